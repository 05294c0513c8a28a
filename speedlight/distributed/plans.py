"""Schedules of a process: the parts that it computes, in order, made of the whole sequence's problem. No tensors."""

from __future__ import annotations

from typing import NamedTuple

from ..problem.build import Stated
from ..problem.key_parts import KeyPart, needed, parts_of
from ..problem.problem import SPAN, TILE
from ..problem.shardings import Runs, cut, tokens, travelling
from . import rounds
from .rounds import Schedule, Step


class Sharded(NamedTuple):
    """A problem of a whole sequence, and which positions of queries and of keys each process holds."""

    whole: Stated
    q: tuple[Runs, ...]
    k: tuple[Runs, ...]

    @property
    def may_fail(self) -> bool:
        """Returns whether a kernel of any process may find an index out of range."""
        p = self.whole.problem
        tables = [t for x in (p.mask, p.score) if x is not None for t in x.tables]
        return bool(tables) and p.program is not None and p.program.may_fail


class Work(NamedTuple):
    """A run of rows against the keys of a step."""

    run: int  # which of the process's runs of queries
    parts: tuple[KeyPart, ...]
    begins: bool  # nothing came before for these rows
    ends: bool  # nothing comes after


class Plan(NamedTuple):
    """The steps of a process, what it computes in each, and everybody's schedule."""

    schedule: Schedule
    rank: int
    works: tuple[tuple[Work, ...], ...]  # of each step
    unseeing: tuple[int, ...]  # runs of rows that see no key at all

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.schedule.steps[self.rank]


def plan_of(sharded: Sharded, rank: int, *, exact: bool) -> Plan:
    """exact: keys in ascending order, in whole spans, so that rows have the bits of one process."""
    schedule = schedule_of(sharded, exact=exact)
    whole, runs = sharded.whole, sharded.q[rank]
    found = [
        [(run, _parts(whole, q, step.keys, tokens(runs))) for run, q in enumerate(runs)]
        for step in schedule.steps[rank]
    ]
    steps = [[(run, parts) for run, parts in each if parts] for each in found]
    first, last = {}, {}
    for at, each in enumerate(steps):
        for run, _ in each:
            first.setdefault(run, at)
            last[run] = at
    works = tuple(
        tuple([Work(run, parts, first[run] == at, last[run] == at) for run, parts in each])
        for at, each in enumerate(steps)
    )
    return Plan(schedule, rank, works, tuple([run for run in range(len(runs)) if run not in first]))


def schedule_of(sharded: Sharded, *, exact: bool) -> Schedule:
    """Who sends which keys to whom, and when."""
    # where nothing travels, bits are those of one process, too
    unit, cache = SPAN if exact or len(sharded.k) == 1 else TILE, {}

    def wanted(rank: int, piece: range) -> range | None:
        key = rank, piece
        if key not in cache:
            cache[key] = needed(sharded.whole, sharded.q[rank], piece, unit)
        return cache[key]

    if exact:
        ranks, length = len(sharded.k), sum(map(tokens, sharded.k))
        chunk = max(SPAN, _up(-(-length // (2 * ranks)), SPAN))
        return rounds.ascending(cut((range(length),), chunk), sharded.k, wanted)
    return rounds.ring(travelling(sharded.k), wanted)  # of whose pieces Arrivals has two or three


def _parts(whole: Stated, q: range, keys: range, rows: int) -> tuple[KeyPart, ...]:
    if needed(whole, (q,), keys, TILE) is None:
        return ()
    return tuple(parts_of(whole, q, keys, rows))


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
