"""Keys and values travel round the ring of processes; each computes with what is there while the next ones come.

A row's state (running_max, running_sum, accumulator) goes on from step to step: nothing is merged afterwards, nothing
is rounded between. The pass back has the out and lse of the whole sequence; what flows to keys goes to their owner.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .. import engines
from ..arrays.array import describe
from ..arrays.memory import Array
from ..errors import ArgumentError
from ..problem.build import Stated
from ..problem.gradients import Given, asked
from ..problem.key_parts import KeyPart, Turn, finishing, of_heads, turns_of
from ..problem.operands import Dense, Operands, Rows
from ..problem.problem import LAYOUTS, Problem
from ..problem.shardings import Runs, counts_of, places, tokens
from .arriving import Arrivals, GradientReturns, LocalKeys
from .groups import Peers
from .plans import Plan, Sharded, Work
from .tensors import Memory, mmap_empty


class RankContext(NamedTuple):
    """A process's part of a call."""

    peers: Peers
    sharded: Sharded
    plan: Plan
    layout: str
    prepared: dict[Any, Any]  # calls of kernels, for arrays at any addresses
    deferred_errors: list[ArgumentError]  # what kernels have found out; the others still wait for keys then
    turn: Turn | None = None  # of these heads, of which arrays have no others then

    @property
    def dim(self) -> int:
        """The axis of lengths."""
        return LAYOUTS[self.layout][-2]

    @property
    def runs(self) -> Runs:
        return self.sharded.q[self.peers.rank]

    def own(self, *tensors: torch.Tensor) -> LocalKeys:
        return LocalKeys(tensors, self.sharded.k[self.peers.rank], self.dim)

    def queries(self, run: int) -> tuple[int, ...]:
        """Returns how many rows of a run each item has."""
        return counts_of(self.runs[run], self.sharded.whole.problem.q_lengths)

    @contextlib.contextmanager
    def noting(self) -> Any:
        """Around a kernel, which looks up what a mask or a score says: an index out of range is told at the end."""
        try:
            yield
        except ArgumentError as error:
            self.deferred_errors.append(error)

    def turns(self, *, backward: bool) -> list[RankContext]:
        """The call, some heads after others."""
        whole = self.sharded.whole
        most = max(map(tokens, self.sharded.k)) * (1 if whole.cu_k is not None else whole.problem.batch)
        found = turns_of(whole.problem, most, self.peers.ranks, backward=backward)
        return [self] if len(found) == 1 else [self._replace(turn=turn) for turn in found]

    def problem(self, of_all: Problem) -> Problem:
        """Returns the problem of this turn's heads."""
        return of_all if self.turn is None else of_heads(of_all, self.turn.q, len(self.turn.kv))

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns this turn's heads of q, or of what is made of it."""
        return x if self.turn is None else _heads(x, LAYOUTS[self.layout][-3], self.turn.q)

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.turn is None else _heads(x, LAYOUTS[self.layout][-3], self.turn.kv)

    def logarithms(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.turn is None else _heads(x, -2, self.turn.q)


def _heads(x: torch.Tensor, dim: int, heads: range) -> torch.Tensor:
    return x.narrow(dim, heads.start, len(heads))


class _States:
    """Outputs, log-sum-exps and what rows go on from."""

    def __init__(self, here: RankContext, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.here, self.out, self.lse = here, out, lse
        self.q, self.written = describe(q, "q"), describe(out, "out")
        self.accumulators = out if out.dtype == lse.dtype else mmap_empty(lse, out.shape)  # which lie as out does
        self.sums = lse.new_empty((*lse.shape, 2))
        self.places = places(here.runs)
        self.whole_rows = here.sharded.whole.cu_q is None  # a part of the keys has all rows of a run, or none
        if not self.whole_rows:
            self.accumulators.zero_()
            self.sums[..., 0], self.sums[..., 1] = -torch.inf, 0
        elif here.sharded.whole.problem.rows is not None:  # some of which have no query
            self.out.zero_()
            self.lse.fill_(-torch.inf)

    def step(self, tensors: tuple[torch.Tensor, ...], works: tuple[Work, ...], at: int) -> None:
        """Computes with the keys and values of a step, which are not kept after it."""
        keys = describe(tensors[0], "k"), describe(tensors[1], "v")
        for work in works:
            for n, part in enumerate(work.parts):
                begins, ends = (self.whole_rows and x for x in (work.begins, work.ends))
                self.run(self.call_of(part, keys, (at, work.run, n)), keys, work.run, begins, ends)

    def run(self, call: Any, keys: tuple[Array, Array], run: int, begins: bool, ends: bool) -> None:
        """One call of a kernel, for a run of the rows."""
        at, dim, size = self.places[run], self.here.dim, self.lse.element_size()
        with self.here.noting():
            call.run(
                self.q.address + at * self.q.strides[dim],
                keys[0].address,
                keys[1].address,
                self.written.address + at * self.written.strides[dim],
                self.lse.data_ptr() + at * size,
                state=(
                    self.accumulators.data_ptr() + at * self.accumulators.stride(dim) * size,
                    self.sums.data_ptr() + at * 2 * size,
                    int(begins),
                    int(ends),
                ),
            )

    def call_of(self, part: KeyPart, keys: tuple[Array, Array], key: Any) -> Any:
        """The prepared call of a part."""
        prepared, layout, key = self.here.prepared, self.here.layout, (self.here.turn, key)
        if key not in prepared:
            rows = Rows(layout, self.q, self.written.strides, part.q_first)
            dense = Dense(layout, *keys, part.k_first)
            prepared[key] = engines.cpu().prepare(self.here.problem(part.problem), rows, dense)
        return prepared[key]

    def finish(self, runs: tuple[int, ...], keys: tuple[Array, Array], begins: bool) -> None:
        """Ends rows that no part of the keys ends."""
        whole = self.here.sharded.whole
        for run in runs:
            lengths = self.here.queries(run) if whole.cu_q is None else (len(self.here.runs[run]),)
            part = finishing(whole, self.out.shape[self.here.dim], lengths)
            self.run(self.call_of(part, keys, ("finish", run)), keys, run, begins, True)


def forward(here: RankContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this process's rows."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty([q.shape[a] for a in LAYOUTS[here.layout][:-1]], dtype=wide)
    with here.peers.underway():
        for turn in here.turns(backward=False):
            results = turn.rows(out), turn.logarithms(lse)
            with here.peers.together():
                found = _forward(turn, turn.rows(q), turn.keys(k), turn.keys(v), results)
            for x, y in zip(results, found, strict=True):
                if x is not y:
                    x.copy_(y)
    return out, lse


def _forward(
    here: RankContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, results: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a turn's heads: the results, or tensors beside them where those do not lie in one piece."""
    out, lse = (x if x.is_contiguous() else mmap_empty(x, x.shape) for x in results)
    states, plan = _States(here, q, out, lse), here.plan
    arrivals = Arrivals(here.peers, here.own(k, v), plan.schedule)
    for at in range(len(plan.steps)):
        states.step(arrivals.keys(plan.steps[at]), plan.works[at], at)
    arrivals.finish()
    keys = describe(k, "k"), describe(v, "v")
    states.finish(plan.unseeing if states.whole_rows else tuple(range(len(here.runs))), keys, states.whole_rows)
    return out, lse


# --- back


class Gradients(NamedTuple):
    """The gradients of this process's q, k and v, and its share of those of tables."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    tables: tuple[Any, ...]


class Saved(NamedTuple):
    """The forward pass, and what flows into it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    d_out: torch.Tensor
    d_lse: torch.Tensor | None

    def of(self, here: RankContext) -> Saved:
        """The heads of a turn."""
        q, out, d_out = (here.rows(x) for x in (self.q, self.out, self.d_out))
        d_lse = None if self.d_lse is None else here.logarithms(self.d_lse)
        return Saved(q, here.keys(self.k), here.keys(self.v), out, here.logarithms(self.lse), d_out, d_lse)

    def rows(self, here: RankContext, run: int) -> list[Any]:
        """q, out, lse, d_out and d_lse of a run."""
        at, count = places(here.runs)[run], len(here.runs[run])
        q, out, d_out = (x.narrow(here.dim, at, count) for x in (self.q, self.out, self.d_out))
        lse, d_lse = (None if x is None else x.narrow(-1, at, count).contiguous() for x in (self.lse, self.d_lse))
        return [q, out, lse, d_out, d_lse]


def backward(here: RankContext, saved: Saved, tables: tuple[Any, ...], *, wide: bool = False) -> Gradients:
    """Every step's dQ is added here; its dK and dV go to who holds the keys, while the next step is computed.

    wide: dk and dv are to be of the type that sums have.
    """
    number = saved.lse.dtype
    of_keys = number if wide else saved.k.dtype
    dq = saved.q.new_empty(saved.q.shape)
    dk, dv = (x.new_empty(x.shape, dtype=of_keys) for x in (saved.k, saved.v))
    of_tables = [torch.zeros(t.shape, dtype=torch.float64) for t in tables]
    memory = Memory()
    with here.peers.underway():
        for turn in here.turns(backward=True):
            own = [turn.rows(dq), turn.keys(dk), turn.keys(dv)]
            totals = [(x if x.dtype == number else memory.take(saved.lse, x.shape)).zero_() for x in own]
            with here.peers.together():
                more = _backward(turn, saved.of(turn), totals, tables, memory)
            for x, y in zip(of_tables, more, strict=True):
                x += y
            for x in totals[:2]:
                x *= here.sharded.whole.problem.scale
            for x, y in zip(own, totals, strict=True):
                if x is not y:
                    x.copy_(y)
                    memory.give([y])
    return Gradients(dq, dk, dv, tuple(of_tables))


def _backward(
    here: RankContext, saved: Saved, totals: list[torch.Tensor], tables: tuple[Any, ...], memory: Memory
) -> list[torch.Tensor]:
    """Adds what flows to a turn's q, k and v, before the scale of scores; returns what flows to tables."""
    of_tables = [torch.zeros(t.shape, dtype=torch.float64) for t in tables]
    arrivals = Arrivals(here.peers, here.own(saved.k, saved.v), here.plan.schedule)
    returns = GradientReturns(here.peers, here.own(*totals[1:]), here.plan.schedule.transfers, memory)
    for step, works in zip(here.plan.steps, here.plan.works, strict=True):
        arrivals.begin(step.round)
        returns.settle(step.round - 1)
        keys = arrivals.keys(step)
        returns.receive(step.round)
        flows = returns.sums(step)
        for work in works:
            for part in work.parts:
                more = _part_back(here, saved, part, work, keys, [totals[0], *flows], tables)
                for x, y in zip(of_tables, more, strict=True):
                    x += torch.from_numpy(y)
        returns.give(step, flows)
        del keys, flows
    arrivals.begin(math.inf)
    returns.finish()
    arrivals.finish()
    return of_tables


def _part_back(
    here: RankContext, saved: Saved, part: KeyPart, work: Work, keys: tuple[torch.Tensor, ...],
    totals: list[torch.Tensor], tables: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Adds what flows from a part to its rows and its keys; returns what flows to tables."""
    q, out, lse, d_out, d_lse = saved.rows(here, work.run)
    dq = totals[0].narrow(here.dim, places(here.runs)[work.run], q.shape[here.dim])
    names = ("q", "k", "v", "out", "lse", "d_out", "d_lse", "dq", "dk", "dv")
    given = [
        None if x is None else describe(x, name)
        for x, name in zip((q, *keys, out, lse, d_out, d_lse, dq, *totals[1:]), names, strict=True)
    ]
    a, _, _, o, logs, d_o, d_logs, *_ = given
    assert a is not None and o is not None and logs is not None and d_o is not None
    problem = replace(here.problem(part.problem), rows=None, sinks=None)
    stated = Stated(problem, *(None if x is None else (*x, 0) for x in (part.q_first, part.k_first)))
    request = asked(problem, here.layout, Given(a, o, logs, d_o, d_logs), tables)
    where: Any = Operands(*given)  # pyright: ignore[reportArgumentType]
    call = engines.cpu().backward(request, here.layout, stated, where)
    return call.run(where)
