"""Dense attention without autograd: repeats a prepared call, or prepares and runs a new one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import engines
from ..arrays.array import describe
from ..arrays.latents import KeyPair, describe_keys
from ..arrays.memory import Array
from ..errors import Error
from ..errors.advice import warn_if_swapped
from ..problem.build import from_arrays
from ..problem.operands import Dense, Rows
from ..problem.option_keys import key_of_repeated
from ..problem.options import Options, known_keys
from ..problem.prepared import CallKey, Prepared, addresses_in, is_growing, new_key, prepared_calls
from ..problem.problem import LAYOUTS, SPAN, spans_of
from ..problem.results import results_for


def attend(q: Any, k: Any, v: Any, options: Options, return_lse: bool, out: Any = None, gpu: bool = False) -> Any:
    """Attends where q lies: repeats a prepared call, or makes a new one; returns out, or (out, lse)."""
    key, results = (None, None) if gpu else repeat(q, k, v, options, return_lse, out)
    if results is not None:
        return results
    return attend_anew(q, k, v, options.spelled(), return_lse, out, key, gpu)


def repeat(
    q: Any, k: Any, v: Any, options: Options, return_lse: Any, out: Any = None, call: Any = "attention"
) -> tuple[Any, Any]:
    """Repeats a call if it was prepared before; returns its key and its results.

    Without a key it cannot be repeated. With a key alone it was not prepared yet, or `out` cannot be written to.

    Args:
        call: a name in the key; what was prepared by another name is not repeated.
    """
    of_options, rows = known_keys.get(id(options)) or options.keyed(key_of_repeated)
    if of_options is None or type(return_lse) is not bool:
        return None, None
    cpu = engines.cpu()
    arrays = () if options.mask is options.score is None else options.arrays()
    first, second = k, v
    if type(k) is KeyPair:
        first, second = k[:2]
        call = call, k.value_dim
    machine = cpu.machine()
    seed: Any = options.seed if options.dropout else 0
    if out is None and not return_lse:
        read = cpu.repeat(call, of_options, machine, None, seed, None, None, None, rows, q, first, second, *arrays)
        if type(read) is not tuple:  # the result
            return None, read
    else:
        read = cpu.read(rows if out is None else 0, q, first, second, *arrays)
        if read is None:
            return None, None
    layout, places = read
    into, at = None, 0
    if out is not None:
        read = cpu.read(0, out)
        if read is None:
            return None, None
        into, at = read[0], addresses_in(read[1])[0]
    key = new_key((call, of_options, layout, machine, into))
    prepared = prepared_calls.get(key)
    if prepared is None:
        return key, None
    return key, prepared.run(q, places, return_lse=return_lse, seed=seed, arrays=arrays, out=out, at=at)


def attend_anew(
    q: Any, k: Any, v: Any, options: Options, return_lse: bool, out: Any, key: CallKey | None, gpu: bool = False
) -> Any:
    """Attends on the CPU, or enqueues the call on a GPU; keeps it under its key, if it has one."""
    a, b, c = describe_all(q, k, v, gpu=gpu)
    problem, cu_q, cu_k = from_arrays(a, b, c, options, apart=True)
    warn_if_swapped(options.layout, a.shape, b.shape)
    inputs = (a, b, c) if b.rest is None else (a, b, b.rest)
    results = results_for(a, problem, options, return_lse, out, inputs)
    rows = Rows(options.layout, a, results.out.strides, cu_q and cu_q[:-1])
    keys = Dense(options.layout, b, c, cu_k and cu_k[:-1])
    call = engines.of("cuda" if gpu else "cpu").attend(problem, rows, keys, results, options.precision)
    if key is not None and key.machine == call.machine:  # as it was when the key was made
        _remember(key, call, rows, keys, options, results.out)
    return results.returned()


def _remember(key: CallKey, call: Any, rows: Rows, keys: Dense, options: Options, out: Array) -> None:
    """Keeps a prepared call under its key; one of few queries is prepared for any keys of as many spans. Where more
    keys would be refused, nothing is kept.
    """
    problem, axis = call.problem, 0
    if is_growing(key.arrays):
        axis = LAYOUTS[options.layout][2]
        most = spans_of(max(problem.k_lengths)) * SPAN
        starts = tuple([most - n for n in problem.q_lengths])
        first = 1 - max(problem.q_lengths)
        problem = replace(problem, k_lengths=(most,) * problem.batch, q_starts=starts, first_row=first)
        try:
            call = engines.cpu().prepare(problem, rows, keys)
        except Error:
            return
    if not call.keep_for(options.arrays(), axis):
        return
    given = (rows.q, keys.k, keys.v if keys.k.rest is None else keys.k.rest, out.final or out)
    prepared = Prepared(call, given=given, staged=out.final is not None)
    prepared_calls.put(key, prepared, prepared.size)


def describe_all(q: Any, k: Any, v: Any, *, gpu: bool = False) -> list[Array]:
    """Reads where q, k and v lie."""
    if type(k) is KeyPair:
        return [describe(q, "q", gpu=gpu), *describe_keys(k, v, ("k", "v"), gpu=gpu)]
    return [describe(x, name, gpu=gpu) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
