"""attention_backward(): the gradients of attention()."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .. import engines
from ..arrays import latents
from ..arrays.array import describe
from ..arrays.dtypes import DTYPES
from ..arrays.making import empty_like, fresh, like_input
from ..arrays.memory import Array
from ..problem.biases import array_of, arrays_of, with_own_tables
from ..problem.build import from_arrays
from ..problem.gradients import SINKS, Given, are_named, asked, resolved
from ..problem.operands import Operands
from ..problem.option_keys import key_of_repeated
from ..problem.options import AllOptions, AnyArray, ArrayOf, Engine, Grads, Int, K, Keys, Options, T, V, scores_of
from ..problem.prepared import CallKey, array_places, prepared_calls
from ..problem.signatures import public

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NAMES = ("q", "k", "v", "out", "lse", "d_out", "d_lse")


@overload
def attention_backward(
    q: ArrayOf[T], k: ArrayOf[K], v: ArrayOf[V], out: AnyArray, lse: AnyArray, d_out: AnyArray,
    d_lse: AnyArray | None = None, *, grads: tuple[()] = (), engine: Engine | None = None, value_dim: None = None,
    **options: Unpack[AllOptions],
) -> tuple[T, K, V]: ...  # fmt: skip
@overload
def attention_backward(
    q: ArrayOf[T], k: ArrayOf[K], v: ArrayOf[V], out: AnyArray, lse: AnyArray, d_out: AnyArray,
    d_lse: AnyArray | None = None, *, grads: Grads, engine: Engine | None = None, value_dim: None = None,
    **options: Unpack[AllOptions],
) -> tuple[T, K, V, tuple[T, ...]]: ...  # fmt: skip
@overload
def attention_backward(
    q: AnyArray, k: Keys, v: AnyArray | None, out: AnyArray, lse: AnyArray, d_out: AnyArray,
    d_lse: AnyArray | None = None, *, grads: Grads = (), engine: Engine | None = None, value_dim: Int | None = None,
    **options: Unpack[AllOptions],
) -> tuple[Any, ...]: ...  # fmt: skip
@public(AllOptions)
def attention_backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any = None,
    *,
    grads: Grads = (),
    engine: Engine | None = None,
    value_dim: Int | None = None,
    **options: Unpack[AllOptions],
) -> Any:
    """Returns the gradients of attention() with respect to q, k and v, in memory linear in the length.

    The weights are computed again, as exp(score - lse) with the lse that is given: with the out and lse of a whole
    sequence this works on a part of its keys, too, and the dq of all parts add up.

    Args:
        q, k, v: as attention() had them. To keys and values that items share flows the sum over the batch.
        out: what attention() returned for them, shaped as q with value_dim last.
        lse: its log-sum-exps (return_lse=True), (batch, q_heads, q_len) or packed (q_heads, total_length).
        d_out: the gradient of the loss with respect to out: shaped as out, of its dtype.
        d_lse: the same with respect to lse, if there is one: shaped as lse, of its dtype.
        grads: a tuple of further gradients that are wanted: tables that the score looks up (sl.table; patterns take
            them, too: sl.alibi(t)), and "sink_logits".
        engine: "cpu" or "cuda" insists on one. Default: where q, k and v lie.
        value_dim: as attention() had it, with v=None.
        **options: as attention() had them.

    Returns:
        (dq, dk, dv), shaped as q, k and v, of their dtype and kind; with grads (dq, dk, dv, grads), the last a tuple in
        the order of `grads`, of q's kind, each shaped as its table, or (q_heads,), in float32, or float64 beside a q of
        float64. Of a pair of keys dk is a pair. With v=None, dv is None: the first columns of dk are the sum of both.
        Keys that no query sees, and queries that see nothing, get 0. The same bits for any number of threads, and from
        call to call on one GPU.

    Raises:
        speedlight.Error: the argument, what was expected and what came; for a score without a derivative, the operation
        that has none.

    Source: Dao et al., FlashAttention (2022), algorithm 4; the arithmetic is described in docs/numerics.md.

    >>> import numpy as np, speedlight as sl
    >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
    >>> out, lse = sl.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = sl.attention_backward(q, k, v, out, lse, np.ones_like(out))
    >>> dv.shape, round(float(dv[0, 0, 0, 0]), 6)
    ((1, 2, 3, 4), 1.0)
    """
    given = Options.of(attention_backward, options)
    if v is None or value_dim is not None or isinstance(k, (tuple, list)):
        keys, values = latents.resolve_joined(k, v, value_dim)
        found = attention_backward(q, keys, values, out, lse, d_out, d_lse, grads=grads, engine=engine, **options)
        return latents.fold_gradients(found, k, v)
    return _gradients(q, k, v, out, lse, d_out, d_lse, grads, given, engines.runs_on_gpu(q, engine))


def _gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, grads: Any, options: Options,
    on_gpu: bool | None = None,
) -> Any:  # fmt: skip
    """Computes the gradients of a call, with its options in one; on_gpu None: where q lies."""
    on_gpu = engines.runs_on_gpu(q, None) if on_gpu is None else on_gpu
    tensors = q, k, v, out, lse, resolved(d_out), resolved(d_lse)
    key = results = None
    if not on_gpu and are_named(grads):
        key, results = repeat(tensors, grads, options)
    if results is not None:
        return results
    six = [describe(x, name, gpu=True) for x, name in zip(tensors[:6], _NAMES, strict=False)]
    given = six if d_lse is None else [*six, describe(tensors[6], "d_lse", gpu=True)]
    arrays, options, wanted = arrays_of(options), options.spelled(), grads
    if not on_gpu:
        options, wanted = with_own_tables(options, grads, six[0].shape, six[1].shape)
    stated = from_arrays(six[0], six[1], six[2], options)
    made = [_make_gradient(x, six[0] if stated.problem.shared else x) for x in six[:3]]
    request = asked(stated.problem, options.layout, Given(given[0], *given[3:]), wanted)
    engine, operands = engines.of("cuda" if on_gpu else "cpu"), _operands(given, made)
    call = engine.backward(request, options.layout, stated, operands, options.precision)
    results = _run(call, given, made, grads, None if key is None else options.seed_word(), None)
    if key is not None and call.keep_for(arrays):
        prepared_calls.put(key, call, call.size)
    return results


def repeat(tensors: tuple[Any, ...], grads: Any, options: Options) -> tuple[Any, Any]:
    """Repeats a call of q, k, v, out, lse, d_out and d_lse, or None for it, if it was prepared before; returns its key
    and its gradients: each may be None.
    """
    given = tensors[:6] if tensors[6] is None else tensors
    wanted, options = _named_gradients(options, grads), _with_arrays(options)
    of_options, _ = options.keyed(key_of_repeated)
    if of_options is None or wanted is None:
        return None, None
    cpu, arrays = engines.cpu(), options.arrays()
    read = cpu.read(0, *given, *arrays)
    if read is None:
        return None, None
    key = CallKey("gradients", of_options, read[0], cpu.machine(), (len(given), *wanted))
    call = prepared_calls.get(key)
    if call is None:
        return key, None
    lie = array_places(read[1])
    tables = call.tables_at(arrays, lie[len(given) :])
    arrays_again = [like.of(x, at) for like, x, (at, *_) in zip(call.arrays, given, lie, strict=False)]
    made = [_make_again(x, like) for x, like in zip(arrays_again, call.arrays[-3:], strict=False)]
    return key, _run(call, arrays_again, made, grads, options.seed_word(), tables)


def _run(call: Any, given: list[Array], made: list[Any], grads: Any, seed: int | None, tables: Any) -> Any:
    """Fills dq, dk and dv, which are `made`, and returns them, and the further gradients that are asked for."""
    (dq, _), (dk, b), (dv, c) = made
    more = call.run(_operands(given, made), seed, tables)
    if call.request.problem.shared:
        dk, dv = call.sum_items(b), call.sum_items(c)
    results = tuple([like_input(x, y) for x, y in zip(given, (dq, dk, dv), strict=False)])
    return (*results, tuple([_convert(given[0], y) for y in more])) if grads else results


def _operands(given: list[Array], made: list[tuple[Any, Array]]) -> Operands:
    """Returns what a pass reads, of which d_lse may be missing, and the gradients that it fills."""
    q, k, v, out, lse, d_out, *d_lse = given
    (_, dq), (_, dk), (_, dv) = made
    return Operands(q, k, v, out, lse, d_out, d_lse[0] if d_lse else None, dq, dk, dv)


def _named_gradients(options: Options, grads: Any) -> list[Any] | None:
    """Returns which further gradients are wanted: of sinks, and of arrays that the score adds; None for any others."""
    scores = scores_of(options.score)
    wanted = []
    for x in grads:
        at = tuple([n for n, score in enumerate(scores) if score is x])
        if not (at or (type(x) is str and x == SINKS)):
            return None
        wanted.append(at or x)
    return wanted


def _with_arrays(options: Options) -> Options:
    """Returns options with arrays in place of the tables that read them where they lie."""
    if options.mask is options.score is None:
        return options
    score = options.score
    scores = [array_of(x) for x in score] if isinstance(score, (list, tuple)) else array_of(score)
    return replace(options, mask=array_of(options.mask), score=scores)


gradients_of = public()(_gradients)  # attention_backward() with its options in one


def _make_gradient(x: Array, items: Array) -> tuple[Any, Array]:
    """Makes an array for the gradient of x, which lies as x does, of as many batch items as another array has."""
    return empty_like(x, (*items.shape[:1], *x.shape[1:]), x.dtype, ordered=True)


def _make_again(x: Array, like: Array) -> tuple[Any, Array]:
    """Makes an array like another for the gradient of x."""
    alike, size = (like.shape, like.strides) == (x.shape, x.strides), DTYPES[like.dtype][1]
    strides = None if alike or x.kind == "numpy" else tuple([step // size for step in like.strides])
    new, address = fresh(x.owner, like.shape, strides, alike=alike)
    return new, like.of(new, address)


def _convert(q: Array, x: Any) -> Any:
    """Converts an engine's array to what the library of q has."""
    return sys.modules["torch"].from_numpy(x) if type(x) is np.ndarray and q.kind == "torch" else like_input(q, x)
