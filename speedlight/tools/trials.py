"""Trials of schedules on this CPU: candidates in turn, A B A B, on the same problems, beside the row that ships.

A candidate is taken where it is faster beyond noise: in each turn its gain is the geometric mean over all problems; it
counts with the turn below which the median lies with a chance of 1 % at most, and once more, alone, in turns of its
own. Results must have the same bits.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import describe
from ..arrays.dtypes import numpy_dtype
from ..cpu.engine.forward_call import prepare
from ..cpu.engine.storage import CacheStorage
from ..cpu.runtime.tuned import changed
from ..cpu.runtime.workers import get_threads
from ..errors import CompileError
from ..host.machine import Isa
from ..host.shortcuts import address_of
from ..host.tunings import TUNINGS, Parts, Tuning
from ..problem.build import from_arrays
from ..problem.operands import Dense, Rows
from ..problem.options import Layout, Options
from ..problem.tokens import Piece, TokenShape
from ..problem.windows import Ring
from .measuring import alternate, seconds_of

TURNS, LEAST_TURNS = 11, 7  # below seven no turn is sure enough
_GAIN, _LOSS = 1.01, 0.97  # a candidate gains so much at least, and on no problem becomes slower than that
_SAMPLE = 3e-3  # seconds, at least
_HEADS, _GROUP, _DIM = 8, 4, 128  # of decoding


class Run(NamedTuple):
    """A prepared call, where its result goes, and what must live as long."""

    call: Callable[[], None]
    out: np.ndarray
    held: tuple[Any, ...]


Case = Callable[[Isa], Run]  # prepares one, with the tuning in force


class Trial(NamedTuple):
    """Candidates for some fields, by name, and the problems they are tried on."""

    name: str
    candidates: Callable[[Tuning], dict[str, Parts]]
    cases: Callable[[], list[Case]]


class Verdict(NamedTuple):
    """A candidate's speed-up: the median of turns, the turn that counts, and on its worst problem."""

    gain: float
    least: float
    worst: float

    @property
    def taken(self) -> bool:
        return self.least >= _GAIN and self.worst >= _LOSS


class Outcome(NamedTuple):
    """A trial's verdicts; which candidate was kept, if any, and what it gained when it was tried alone."""

    trial: str
    verdicts: dict[str, Verdict]
    kept: str | None
    confirmed: Verdict | None


Times = list[list[float]]  # of each problem, turn after turn


def verdict(before: Times, after: Times) -> Verdict:
    """Compares the times of the schedule that stands and of a candidate."""
    ratios = [[b / a for b, a in zip(x, y, strict=True)] for x, y in zip(before, after, strict=True)]
    turns = sorted(statistics.geometric_mean(turn) for turn in zip(*ratios, strict=True))
    return Verdict(statistics.median(turns), turns[_sure(len(turns))], min(map(statistics.median, ratios)))


def _sure(turns: int) -> int:
    """Returns which of sorted turns the median is below in 1 of 100 cases at most; the first where there are few."""
    chance, found = 0.5**turns, 0
    while chance + math.comb(turns, found + 1) * 0.5**turns <= 0.01:
        found += 1
        chance += math.comb(turns, found) * 0.5**turns
    return found


def try_all(
    isa: Isa, tuning: Tuning, turns: int, seconds: float, advance: Callable[[], None]
) -> Iterator[tuple[Outcome, Tuning]]:
    """Runs every trial of a vector unit, each on top of what those before it found; none begins after so many
    seconds.
    """
    end = time.perf_counter() + seconds
    for trial in trials_of(isa):
        if time.perf_counter() < end:
            outcome = try_out(trial, isa, tuning, turns)
            if outcome.kept is not None:
                tuning = tuning.with_parts(trial.candidates(tuning)[outcome.kept])
            yield outcome, tuning
        advance()


def try_out(trial: Trial, isa: Isa, tuning: Tuning, turns: int) -> Outcome:
    """A trial's candidates beside the tuning that stands; the fastest of those that gain is tried once more."""
    cases, candidates = trial.cases(), trial.candidates(tuning)
    runs = {"": _runs(cases, isa, tuning, {})} | {x: _runs(cases, isa, tuning, p) for x, p in candidates.items()}
    _compare(trial.name, runs)
    times = measured(runs, turns)
    verdicts = {name: verdict(times[""], times[name]) for name in candidates}
    best = max(verdicts, key=lambda name: verdicts[name].gain, default="")
    if not best or not verdicts[best].taken:
        return Outcome(trial.name, verdicts, None, None)
    again = measured({"": runs[""], best: runs[best]}, turns)
    confirmed = verdict(again[""], again[best])
    return Outcome(trial.name, verdicts, best if confirmed.taken else None, confirmed)


def _runs(cases: list[Case], isa: Isa, tuning: Tuning, parts: Parts) -> list[Run]:
    with changed(lambda _: tuning.with_parts(parts)):
        return [case(isa) for case in cases]


def _compare(trial: str, runs: dict[str, list[Run]]) -> None:
    """Runs everything once; the bits must be those of what stands."""
    for name, some in runs.items():
        for run, stands in zip(some, runs[""], strict=True):
            run.call()
            if run.out.tobytes() != stands.out.tobytes():
                raise CompileError(f"tune: {trial}: {name} changes bits. Nothing is kept. Please report this.")


def measured(runs: dict[str, list[Run]], turns: int) -> dict[str, Times]:
    """Returns times of problem after problem, each candidate in every turn, beginning with another one each time."""
    repeats = [max(1, round(_SAMPLE / min(_sample(run, 1) for _ in range(3)))) for run in runs[""]]
    times: dict[str, Times] = {name: [[] for _ in repeats] for name in runs}
    for turn in range(turns):
        for case, count in enumerate(repeats):
            samples = {name: functools.partial(_sample, some[case], count) for name, some in runs.items()}
            for name, found in alternate(samples, 1, first=turn).items():
                times[name][case] += found
    return times


def _sample(run: Run, count: int) -> float:
    """Returns seconds of a call; where it is short, of several after one that warms caches."""
    if count > 1:
        run.call()
    return seconds_of(run.call, count)


# --- problems


def numbers(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns 1,024 rows again and again: their values do not matter, but none is subnormal."""
    rows = np.random.default_rng(0).uniform(-1, 1, (1024, shape[-1])).astype(numpy_dtype(dtype))
    return np.resize(rows, shape)


def prefill(dtype: str, heads: int, n: int, d: int, causal: bool = False) -> Case:
    q = numbers((1, heads, n, d), dtype)
    k, v = q.copy(), q.copy()
    return lambda isa: _over_arrays(isa, q, k, v, "bhld", causal)


def own_step(dtype: str, n: int, layout: Layout = "bhld") -> Case:
    """Prepares one token over the caller's own keys and values."""
    sizes = [{"b": 1, "h": heads, "l": rows, "d": _DIM} for heads, rows in ((_HEADS * _GROUP, 1), (_HEADS, n))]
    q, k = (numbers(tuple(size[axis] for axis in layout), dtype) for size in sizes)
    v = k.copy()
    return lambda isa: _over_arrays(isa, q, k, v, layout, False)


def _over_arrays(isa: Isa, q: np.ndarray, k: np.ndarray, v: np.ndarray, layout: Layout, causal: bool) -> Run:
    a, b, c = (describe(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    out = np.empty(q.shape, q.dtype)
    problem = from_arrays(a, b, c, Options(causal=causal, layout=layout)).problem
    call = prepare(problem, Rows(layout, a, out.strides), Dense(layout, b, c), get_threads(), isa)
    at = a.address, b.address, c.address, address_of(out), 0
    return Run(lambda: call.run(*at), out, (q, k, v))


def cached_step(dtype: str, n: int, heads: int = _HEADS) -> Case:
    """Prepares one token over a cache."""
    kind = "float32" if dtype == "int8" else dtype
    storage = CacheStorage(TokenShape(1, heads, _DIM, _DIM, dtype), 1, n, Ring(), "cpu")
    k = numbers((1, heads, n, _DIM), kind)
    storage.put(0, [0], [n], k, k)
    q = numbers((1, heads * _GROUP, 1, _DIM), kind)

    def case(isa: Isa) -> Run:
        out, a = np.empty(q.shape, q.dtype), describe(q, "q")
        call = storage.prepare(a, Piece(slice(0, 1), [n], [n], None), Options(), out.strides)
        at = a.address, *storage.addresses[0], address_of(out), 0
        return Run(lambda: call.run(*at), out, (q, storage))

    return case


# --- what is tried


def trials_of(isa: Isa) -> list[Trial]:
    """Returns the trials that matter to a vector unit."""
    trials = [*_blocks("float32", "fma")]
    if (product := isa.product("bf16")) != "fma":
        trials += _blocks("bfloat16", product)
    own, heads = lambda: own_step("float32", 16384), (1, 2, 3, 4, 6, 8)
    adjoining = lambda: own_step("float32", 8192, "blhd")  # noqa: E731
    rows = _field("fetching", "rows", {"nothing": 0, "16 rows": 16, "32 rows": 32, "64 rows": 64})
    distances = _field("fetching", "cache_bytes", {f"{x} KiB": x << 10 for x in (4, 8, 16, 32, 64)})
    inline = _field("threading", "inline_seconds", {f"{x * 1e6:.0f} us": x for x in (20e-6, 50e-6, 100e-6, 200e-6)})
    return [
        *trials,
        Trial("fetching in long problems", rows, lambda: [prefill("float32", *size) for size in _LONG]),
        Trial("fetching ahead", _fetched, lambda: [*_caches(), own()]),
        Trial("how far ahead", distances, _caches),
        Trial("decode tasks", _decode_tasks, lambda: [cached_step("float32", 8192, 2), adjoining()]),
        Trial("inline", inline, lambda: [prefill("float32", n, 64, 64) for n in heads]),
    ]


def _caches() -> list[Case]:
    """Read from memory, and one that the third-level cache holds."""
    sizes = ("float32", 16384), ("bfloat16", 32768), ("int8", 32768), ("float32", 2048)
    return [cached_step(dtype, n) for dtype, n in sizes]


_SHORT = (8, 128, 64, True), (8, 256, 128, False), (8, 512, 64, True)  # heads, tokens, head dim, causal
_LONG = (8, 512, 128, False), (8, 1024, 64, False), (8, 1024, 128, True), (4, 2048, 128, True)


def _blocks(dtype: str, part: str) -> Iterator[Trial]:
    cases = lambda: [prefill(dtype, *size) for size in (*_SHORT, *_LONG)]  # noqa: E731
    yield Trial(f"{dtype} blocks", lambda tuning: _worths(tuning, part), cases)
    yield Trial(f"{dtype} tasks", lambda tuning: _tasks(tuning, part), cases)


def _worths(tuning: Tuning, part: str) -> dict[str, Parts]:
    """Returns what panels of one, two and three vectors are worth to any family, with four and eight of them."""
    now, found = tuning.part(part), {}
    for worth in dict.fromkeys(x.worth for t in TUNINGS.values() for x in t.blockings.values()):
        best = sorted((1, 2, 3), key=lambda n: -worth[n - 1])
        for panels in (4, 8):
            if (worth, panels) != (now.worth, now.panels):
                name = f"{', '.join(map(str, best))} vectors, {panels} panels"
                found[name] = {part: {"worth": worth, "panels": panels}}
    return found


def _tasks(tuning: Tuning, part: str) -> dict[str, Parts]:
    """Larger and smaller tasks, and more or fewer of them for each thread."""
    now = tuning.part(part)
    sizes = {f"{x / 1e9:g} GFLOP": {"task_flops": x} for x in (now.task_flops // 4, now.task_flops * 4)}
    tasks = _others("tasks", now.tasks, (4, 8, 16)) | _others("even", now.even, (4, 8))
    return {name: {part: x} for name, x in (sizes | tasks).items()}


def _field(part: str, field: str, values: dict[str, Any]) -> Callable[[Tuning], dict[str, Parts]]:
    """Returns the candidates that differ in one field."""
    return lambda tuning: {
        name: {part: {field: x}} for name, x in values.items() if x != getattr(tuning.part(part), field)
    }


def _fetched(tuning: Tuning) -> dict[str, Parts]:
    now = tuning.fetching
    nothing = {"groups": 0, "keys": 0, "cache_bytes": 0, "cache_blocks": 0, "twice": False}
    rows = {
        "nothing": nothing,
        "keys once, values once": {"twice": False},
        "a single row, too" if not now.alone else "not a single row": {"alone": not now.alone},
        "nothing of caches": {x: nothing[x] for x in ("cache_bytes", "cache_blocks", "twice")},
        "nothing of arrays": dict.fromkeys(("groups", "keys"), 0),
        "into the first level": {"level": 1},
        "into the second level": {"level": 2},
        "into the third level": {"level": 3},
    }
    return {x: {"fetching": row} for x, row in rows.items() if any(getattr(now, y) != row[y] for y in row)}


def _decode_tasks(tuning: Tuning) -> dict[str, Parts]:
    now = tuning.decoding
    rows = _others("tasks", now.tasks, (2, 4, 8)) | _others("rows", now.rows, (32, 128, 512))
    return {name: {"decoding": x} for name, x in (rows | _others("spans", now.spans, (1, 2, 4))).items()}


def _others(field: str, now: int, values: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Other values of a field, by name."""
    return {f"{field} {x}": {field: x} for x in values if x != now}
