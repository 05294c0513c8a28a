"""merge(): attention over several sets of keys, from the attention over each."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, overload

from .. import engines
from ..arrays import array as arrays
from ..arrays.array import STORAGE_BYTES, Array
from ..errors import ArgumentError, ArgumentTypeError
from ..host.forks import importing
from ..host.machine import current_isa
from ..problem.checks import check_flag, states_of
from ..problem.options import AnyArray, ArrayOf, T, V, public
from ..problem.results import empty_like, like_input, overlap
from ..problem.rotary_angles import check_array, check_out, converted

_TICKET_BYTES = 128 << 10  # of outputs that a thread takes at a time
_BYTES, _ROW_SECONDS = 5e9, 20e-9  # what a thread is guessed to do: bytes per second, and seconds for a row of a state


@overload
def merge(outs: Sequence[ArrayOf[T]], lses: Sequence[ArrayOf[V]], /) -> tuple[T, V]: ...
@overload
def merge(out1: ArrayOf[T], lse1: ArrayOf[V], out2: AnyArray, lse2: AnyArray) -> tuple[T, V]: ...
@public()
def merge(out1: Any, lse1: Any, out2: Any = None, lse2: Any = None) -> tuple[Any, Any]:
    """Attention over several sets of keys, from the attention over each: what shards of a sequence need.

    `merge(out1, lse1, out2, lse2)` takes two states, `merge(outs, lses)` lists (or tuples) of any number of them; of an
    array with the states first, pass `list(outs)`. A state whose lse is -inf saw nothing: it has no say, whatever
    stands in its output. Where none saw anything, out is 0 and lse -inf. NaN in a state that did see something comes
    out, as does NaN in an lse; an lse of +inf makes its row NaN. One state alone is copied, its rows that saw nothing
    as zeros.

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
    if first.device != "cpu":
        out, lse = engines.gpu().merged([x.tensor for x in outs], [x.tensor for x in lses])
    else:
        out, to = empty_like(first, first.shape, first.dtype)
        lse, lse_to = empty_like(first_lse, first_lse.shape, first_lse.dtype)
        _run(outs, lses, to, lse_to)
    return like_input(first, out), like_input(first_lse, lse)


@public()
def merge_states(
    v: ArrayOf[T] | Sequence[ArrayOf[T]],
    s: ArrayOf[V] | Sequence[ArrayOf[V]],
    *,
    base2: bool = False,
    out: tuple[Any, Any] | None = None,
) -> tuple[T, V]:
    """merge() of states that lie in one array, or several, in FlashInfer's order, with its logarithms if so wanted.

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
        if overlap(*[arrays.describe(x.detach() if arrays.is_tensor(x) else x, "out", gpu=True) for x in out]):
            raise ArgumentError("out: expected memory of its own for each of v and s; got arrays that share some.")
    natural = ss
    if base2:
        wide = "float32" if arrays.on_gpu(ss[0]) else "float64"
        natural = [converted(x, wide) * math.log(2) for x in ss]
    merged_v, merged_s = merge(vs, natural)
    if base2:
        merged_s = merged_s / math.log(2)
        merged_s = merged_s.to(ss[0].dtype) if arrays.is_tensor(merged_s) else merged_s.astype(ss[0].dtype)
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


def _rows(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Sizes of as few dims of rows as will do, and each array's steps: neighbours that are one in every array are
    joined.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all([own[-1] == x[d] * size for own, x in zip(steps, strides, strict=True)]):
            sizes[-1] *= size
            for own in steps:
                own.pop()
        else:
            sizes.append(size)
        for own, x in zip(steps, strides, strict=True):
            own.append(x[d])
    return (sizes, steps) if sizes else ([1], [[0]] * len(strides))


_KINDS = {
    name: list(STORAGE_BYTES).index(storage) for name, (storage, _) in arrays.DTYPES.items()
}  # as the kernel counts them


def _run(outs: list[Array], lses: list[Array], out: Array, lse: Array) -> None:
    """Fills `out` and `lse`, which are contiguous."""
    with importing:
        from ..cpu.kernels import merge as kernels
        from ..cpu.runtime.launch import Launch, threads_for
        from ..cpu.runtime.tuned import tuning_of
        from ..cpu.runtime.workers import get_threads

    rows, width, states = math.prod(lse.shape), out.shape[-1], len(outs)
    if not rows:
        return
    sizes, steps = _rows(lse.shape, [x.strides[:-1] for x in outs] + [x.strides for x in lses])
    row_bytes = width * sum(arrays.DTYPES[x.dtype][1] for x in (*outs, out)) + 16 * states
    ticket_rows = max(1, _TICKET_BYTES // row_bytes // kernels.BLOCK) * kernels.BLOCK
    tickets = -(-rows // ticket_rows)
    seconds = rows * (row_bytes / _BYTES + states * _ROW_SECONDS)
    isa = current_isa()
    wants = tuning_of(isa).threading
    threads = threads_for(seconds, min(get_threads(), tickets), wants)
    table = _table(outs, lses, steps)
    state_words, size_words = (ctypes.c_int64 * len(table))(*table), (ctypes.c_int64 * len(sizes))(*sizes)
    stride = -(-kernels.scratch_bytes(states, len(sizes)) // 64) * 64 + 64  # no cache line belongs to two threads
    scratch = (ctypes.c_char * (stride * threads))()
    words = {
        "scratch": ctypes.addressof(scratch),
        "scratch_stride": stride,
        "states": ctypes.addressof(state_words),
        "count": states,
        "state_bytes": ctypes.sizeof(state_words) // states,
        "sizes": ctypes.addressof(size_words),
        "dims": len(sizes),
        "rows": rows,
        "ticket_rows": ticket_rows,
        "value_dim": width,
        "strided": int(width > 1 and any([x.strides[-1] != arrays.DTYPES[x.dtype][1] for x in outs])),
        "out": out.address,
        "out_kind": _KINDS[out.dtype],
        "lse": lse.address,
        "lse_kind": _KINDS[lse.dtype],
    }
    launch = Launch(kernels.MergeShape(isa), kernels.ARGUMENTS, words, tickets, threads, seconds, wants)
    launch.run(launch.words())


def _table(outs: list[Array], lses: list[Array], steps: list[list[int]]) -> list[int]:
    """The kernel's table of states: what is in STATE, then the steps of out and lse in each dim of the rows."""
    table: list[int] = []
    for x, log, own, log_own in zip(outs, lses, steps, steps[len(outs) :], strict=False):
        table += (x.address, _KINDS[x.dtype], x.strides[-1], log.address, _KINDS[log.dtype])
        for pair in zip(own, log_own, strict=True):
            table += pair
    return table
