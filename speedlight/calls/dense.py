"""Dense attention without autograd: the memo of prepared calls, which are repeated, and a new call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import engines
from ..arrays.array import describe, on_gpu
from ..arrays.memory import Array
from ..arrays.torch_tensors import is_tensor
from ..errors import Error
from ..errors.advice import warn_if_swapped
from ..host.machine import current_isa
from ..host.memo import Memo
from ..problem.build import from_arrays
from ..problem.operands import Dense, Rows
from ..problem.option_keys import key_of_mask
from ..problem.options import Options
from ..problem.prepared import Prepared, growing, is_growing, key_of, machine_of
from ..problem.problem import SPAN, spans_of
from ..problem.results import results_for

_prepared: Memo[Prepared] = Memo(512, 64 << 20)  # by key_of() or growing(), with threads and the vector unit


def runs_on_gpu(q: Any, engine: Any) -> bool:
    """Returns whether a GPU's engine takes the call; raises for an `engine` that q cannot have."""
    there = on_gpu(q)
    if engine is None or (type(engine) is str and engine == ("cuda" if there else "cpu")):
        return there
    at = describe(q.detach() if is_tensor(q) else q, "q", gpu=True)  # the interpreter's, or an error
    return engines.is_on_gpu(engine, at)


def attend(q: Any, k: Any, v: Any, options: Options, return_lse: bool) -> Any:
    """Attends where q lies, with attention()'s options in one; out, or (out, lse)."""
    gpu = runs_on_gpu(q, None)
    key, results = (None, None) if gpu else repeat(q, k, v, options, return_lse, None)
    return attend_anew(q, k, v, options.spelled(), return_lse, None, key, gpu) if results is None else results


def repeat(q: Any, k: Any, v: Any, options: Options, return_lse: Any, out: Any) -> tuple[Any, Any]:
    """Repeats a call if it was prepared before: returns its key, and its results; each may be None."""
    tensors = (q, k, v) if out is None else (q, k, v, out)
    machine = engines.threads_now(), current_isa().name
    grows = growing(tensors, options, machine)
    key = grows.key if grows is not None else key_of(tensors, options, machine, key_of_mask)
    if key is None or type(return_lse) is not bool:
        return key, None
    known = _prepared.get(key)
    if known is None:
        return key, None
    if grows is not None:
        return key, known.repeat_growing(tensors, grows, return_lse, options.seed_word(), options.arrays())
    return key, known.repeat(tensors, return_lse, options.seed_word(), arrays=options.arrays())


def replay(tag: Any, q: Any, k: Any, v: Any, options: Options) -> Any:
    """Replays a call of tensors in machine code, if that knows it; else None. tag: as Replays.learn() has it."""
    return engines.cpu().replays().call(tag, q, k, v, options)


def enable_replay(tag: Any, tensors: tuple[Any, ...], options: Options, key: Any) -> None:
    """Hands a call that has been repeated to machine code, which replays the next one."""
    prepared = _prepared.get(key)
    if prepared is not None:
        engines.cpu().replays().learn(tag, tensors, options, key, prepared, is_growing(key))


def attend_anew(
    q: Any, k: Any, v: Any, options: Options, return_lse: bool, out: Any, key: Any, gpu: bool = False
) -> Any:
    """Attends on the CPU, or enqueues the call on a GPU; keeps it under its key, if it has one."""
    a, b, c = describe_all(q, k, v, gpu=gpu)
    problem, cu_q, cu_k = from_arrays(a, b, c, options)
    warn_if_swapped(options.layout, a.shape, b.shape)
    results = results_for(a, problem, options, return_lse, out, (a, b, c))
    rows = Rows(options.layout, a, results.out.strides, cu_q and cu_q[:-1])
    keys = Dense(options.layout, b, c, cu_k and cu_k[:-1])
    call = engines.of("cuda" if gpu else "cpu").attend(problem, rows, keys, results, options.precision)
    if key is not None and machine_of(key) == call.machine:  # as it was when the key was made
        _remember(key, call, rows, keys, options, results.out)
    return results.returned()


def _remember(key: Any, call: Any, rows: Rows, keys: Dense, options: Options, out: Array) -> None:
    """Keeps a prepared call under its key; one of few queries is prepared for any keys of as many spans. Where more
    keys would be refused, nothing is kept.
    """
    problem = call.problem
    if is_growing(key):
        most = spans_of(max(problem.k_lengths)) * SPAN
        starts = tuple([most - n for n in problem.q_lengths])
        first = 1 - max(problem.q_lengths)
        problem = replace(problem, k_lengths=(most,) * problem.batch, q_starts=starts, first_row=first)
        try:
            call = engines.cpu().prepare(problem, rows, keys)
        except Error:
            return
    places = call.launch.places_of(options.arrays(), is_growing(key))
    if places is None:
        return
    given = rows.q, keys.k, keys.v, out.final or out
    prepared = Prepared(given, call, staged=out.final is not None, places=places)
    call.launch.release_tables(options.arrays())  # first: a signal may come between
    _prepared.put(key, prepared, prepared.size)


def describe_all(q: Any, k: Any, v: Any, *, gpu: bool = False) -> list[Array]:
    """Reads where q, k and v lie."""
    return [describe(x, name, gpu=gpu) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
