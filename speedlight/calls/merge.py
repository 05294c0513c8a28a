"""merge(): joins the attention over several disjoint sets of keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

from .. import engines
from ..arrays.array import check_array, check_out, describe, on_gpu
from ..arrays.making import like_input
from ..arrays.memory import overlap
from ..arrays.torch_tensors import converted, is_tensor
from ..errors import ArgumentError, ArgumentTypeError
from ..problem.checks import check_flag, states_of
from ..problem.options import AnyArray, ArrayOf, T, V
from ..problem.signatures import public


@overload
def merge(outs: Sequence[ArrayOf[T]], lses: Sequence[ArrayOf[V]], /) -> tuple[T, V]: ...
@overload
def merge(out1: ArrayOf[T], lse1: ArrayOf[V], out2: AnyArray, lse2: AnyArray) -> tuple[T, V]: ...
@public()
def merge(out1: Any, lse1: Any, out2: Any = None, lse2: Any = None) -> tuple[Any, Any]:
    """Merges the attention over several disjoint sets of keys into the attention over all of them.

    `merge(out1, lse1, out2, lse2)` takes two states, `merge(outs, lses)` lists (or tuples) of any number of them; of an
    array with the states first, pass `list(outs)`. A state whose lse is -inf saw no key: its output is
    ignored. Where no state saw a key, out is 0 and lse -inf. NaN in another state's output, or in an lse, propagates;
    an lse of +inf makes its row NaN. A single state is copied, with zeros in rows that saw no key.

    Args:
        out1, out2, …: (…, n_q, value_dim), the outputs for the same queries over disjoint keys. float32, float64,
            float16 or bfloat16, of any strides; those of one call may differ.
        lse1, lse2, …: (…, n_q), their log-sum-exps (natural logarithms), of these dtypes likewise.

    Returns:
        (out, lse), of the kinds and dtypes of out1 and lse1. Computed in float64 in the order of the states and
        rounded at the end: the same bits on every CPU, for any threads, strides and place in a batch, but not those
        of one call over all keys.

    Raises:
        ArgumentError: shapes, devices or numbers of arrays that don't go together, naming the argument.
        ArgumentTypeError: something that is no array, or of another dtype.
        UnsupportedError: a tensor that requires grad, or lies on a device of another kind.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 4, 2), np.float32)
    >>> parts = [sl.attention(x, x[:, :, a:b], x[:, :, a:b], return_lse=True) for a, b in ((0, 1), (1, 3), (3, 4))]
    >>> out, lse = sl.merge([out for out, _ in parts], [lse for _, lse in parts])
    >>> bool(np.allclose(lse, sl.attention(x, x, x, return_lse=True)[1]))
    True
    """
    outs, lses = states_of(out1, lse1, out2, lse2)
    first, first_lse = outs[0], lses[0]
    out, lse = engines.of(first.device).merge(outs, lses)
    return like_input(first, out), like_input(first_lse, lse)


@public()
def merge_states(
    v: ArrayOf[T] | Sequence[ArrayOf[T]],
    s: ArrayOf[V] | Sequence[ArrayOf[V]],
    *,
    base2: bool = False,
    out: tuple[Any, Any] | None = None,
) -> tuple[T, V]:
    """Merges states as merge() does, with FlashInfer's order of arguments and dimensions.

    Args:
        v: (n, states, heads, value_dim), the outputs for n queries over disjoint keys; or a list or tuple of arrays
            (n, heads, value_dim), one for each state.
        s: (n, states, heads), their log-sum-exps; or a list or tuple of (n, heads). NumPy arrays or PyTorch tensors.
        base2: whether s, and what is returned for it, are logarithms to the base of 2, as FlashInfer has them.
        out: (v, s) to write to, (n, heads, value_dim) and (n, heads) of the dtypes of the first state: of those of the
            states, too, so merge_states([v, v_other], [s, s_other], out=(v, s)) is in place.

    Returns:
        (v, s): (n, heads, value_dim) and (n, heads); `out`, if it is given.

    Raises:
        speedlight.Error: as merge() does.

    Source: Ye et al., FlashInfer (2025); merge() says how it is computed.

    >>> import numpy as np, speedlight as sl
    >>> v, s = np.ones((5, 3, 8, 16), np.float32), np.zeros((5, 3, 8), np.float32)
    >>> out, lse = sl.merge_states(v, s, base2=True)
    >>> out.shape, round(float(lse[0, 0]), 4)
    ((5, 8, 16), 1.585)
    """
    check_flag("base2", base2)
    vs, ss = _states(v, "v", "(n, states, heads, value_dim)", 4), _states(s, "s", "(n, states, heads)", 3)
    if out is not None:
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise ArgumentTypeError(f"out: expected (v, s), two arrays; got {type(out).__name__}.")
        for x, like in zip(out, (vs[0], ss[0]), strict=True):
            check_out(x, like)
        if overlap(*[describe(x.detach() if is_tensor(x) else x, "out", gpu=True) for x in out]):
            raise ArgumentError("out: expected memory of its own for each of v and s; got arrays that share some.")
    natural = ss
    if base2:
        wide = "float32" if on_gpu(ss[0]) else "float64"
        natural = [converted(x, wide) * math.log(2) for x in ss]
    merged_v, merged_s = merge(vs, natural)
    if base2:
        merged_s = merged_s / math.log(2)
        merged_s = merged_s.to(ss[0].dtype) if is_tensor(merged_s) else merged_s.astype(ss[0].dtype)
    if out is None:
        return merged_v, merged_s
    for x, y in zip(out, (merged_v, merged_s), strict=True):
        x[...] = y
    return out[0], out[1]


def _states(x: Any, name: str, shape: str, dims: int) -> list[Any]:
    """One array for each state."""
    several = isinstance(x, (list, tuple))
    for one in x if several else [x]:
        check_array(name, one)
        if one.ndim != dims - several:
            raise ArgumentError(f"{name}: expected shape {shape}, or a list without states; got {tuple(one.shape)}.")
    each = list(x) if several else [x[:, n] for n in range(x.shape[1])]
    if not each:
        raise ArgumentError(f"{name}: expected one state or more; got none.")
    return each
