"""Keys and values travel round the ring of processes; each computes with what is there while the next ones come.

A row's state (running_max, running_sum, accumulator) goes on from step to step: nothing is merged afterwards, nothing
is rounded between. The pass back has the out and lse of the whole sequence; what flows to keys goes to their owner.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .. import engine as engines
from ..arrays import DTYPES, Array, describe
from ..cpu.operands import Dense, Operands, Rows
from ..gradients import Given, asked
from ..machine import current_isa
from ..problem import LAYOUTS
from ..resolve import Stated
from .arriving import Arrivals, Shard, tag
from .groups import Message, Peers
from .parts import Part, finishing
from .plans import Plan, Sharded, Work
from .rounds import Step, Transfer
from .shardings import Runs, places

_BUFFERS = 2  # gradients that are on their way to their owner


class Here(NamedTuple):
    """A process's part of a call."""

    peers: Peers
    sharded: Sharded
    plan: Plan
    layout: str
    prepared: dict[Any, Any]  # calls of kernels, for arrays at any addresses

    @property
    def dim(self) -> int:
        """Where lengths are."""
        return LAYOUTS[self.layout][-2]

    @property
    def runs(self) -> Runs:
        return self.sharded.q[self.peers.rank]

    def own(self, *tensors: torch.Tensor) -> Shard:
        return Shard(tensors, self.sharded.k[self.peers.rank], self.dim)

    def queries(self, run: int) -> list[int]:
        """How many rows of a run each item has."""
        q, lengths = self.runs[run], self.sharded.whole.problem.q_lengths
        return [len(range(q.start, min(q.stop, n), q.step)) for n in lengths]


class _States:
    """Outputs, log-sum-exps and what rows go on from."""

    def __init__(self, here: Here, q: torch.Tensor, value_dim: int) -> None:
        self.here = here
        self.q = describe(q, "q")
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = q.new_empty((*q.shape[:-1], value_dim))
        self.lse = q.new_empty([q.shape[a] for a in LAYOUTS[here.layout][:-1]], dtype=wide)
        self.accumulators = self.out if q.dtype == wide else self.out.new_empty(self.out.shape, dtype=wide)
        self.sums = self.lse.new_empty((*self.lse.shape, 2))
        self.written = describe(self.out, "out")
        self.places = places(here.runs)
        problem = here.sharded.whole.problem
        self.whole_rows = here.sharded.whole.cu_q is None  # a part of the keys has all rows of a run, or none
        if not self.whole_rows:
            self.accumulators.zero_()
            self.sums[..., 0], self.sums[..., 1] = -torch.inf, 0
        elif problem.rows is not None:  # some of which have no query
            self.out.zero_()
            self.lse.fill_(-torch.inf)

    def step(self, tensors: tuple[torch.Tensor, ...], works: tuple[Work, ...], at: int) -> None:
        """What is computed with the keys and values of a step, which nobody keeps after it."""
        keys = describe(tensors[0], "k"), describe(tensors[1], "v")
        for work in works:
            for n, part in enumerate(work.parts):
                begins, ends = (self.whole_rows and x for x in (work.begins, work.ends))
                self.run(self.call_of(part, keys, (at, work.run, n)), keys, work.run, begins, ends)

    def run(self, call: Any, keys: tuple[Array, Array], run: int, begins: bool, ends: bool) -> None:
        """One call of a kernel, for a run of the rows."""
        at, dim, size = self.places[run], self.here.dim, self.lse.element_size()
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

    def call_of(self, part: Part, keys: tuple[Array, Array], key: Any) -> Any:
        """The prepared call of a part."""
        prepared, layout = self.here.prepared, self.here.layout
        if key not in prepared:
            rows = Rows(layout, self.q, self.written.strides, part.q_first)
            dense = Dense(layout, *keys, part.k_first)
            threads, isa = engines.threads_now(), current_isa()
            prepared[key] = engines.of("cpu").prepare(part.problem, rows, dense, threads, isa)
        return prepared[key]

    def finish(self, runs: tuple[int, ...], keys: tuple[Array, Array], begins: bool) -> None:
        """Ends rows that no part of the keys ends."""
        for run in runs:
            part = finishing(self.here.sharded.whole, self.out.shape[self.here.dim])
            rows = len(self.here.runs[run])
            lengths = (rows,) if part.q_first else tuple([min(rows, n) for n in self.here.queries(run)])
            part = part._replace(problem=replace(part.problem, q_lengths=lengths))
            self.run(self.call_of(part, keys, ("finish", run)), keys, run, begins, True)


def forward(here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this process's rows."""
    with here.peers.together():
        return _forward(here, q, k, v)


def _forward(here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    states, plan = _States(here, q, v.shape[-1]), here.plan
    arrivals = Arrivals(here.peers, here.own(k, v), plan.schedule)
    for at in range(len(plan.steps)):
        states.step(arrivals.keys(plan.steps[at]), plan.works[at], at)
    arrivals.finish()
    keys = describe(k, "k"), describe(v, "v")
    states.finish(plan.unseeing if states.whole_rows else tuple(range(len(here.runs))), keys, states.whole_rows)
    return states.out, states.lse


# --- back


class Gradients(NamedTuple):
    """What flows to this process's q, k and v, in float32 at least, and to tables: its share of that."""

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

    def rows(self, here: Here, run: int) -> list[Any]:
        """q, out, lse, d_out and d_lse of a run."""
        at, count = places(here.runs)[run], len(here.runs[run])
        q, out, d_out = (x.narrow(here.dim, at, count) for x in (self.q, self.out, self.d_out))
        lse, d_lse = (None if x is None else x.narrow(-1, at, count).contiguous() for x in (self.lse, self.d_lse))
        return [q, out, lse, d_out, d_lse]


def backward(here: Here, saved: Saved, tables: tuple[Any, ...]) -> Gradients:
    """Every step's dQ is added here; its dK and dV go to who holds the keys, while the next step is computed."""
    with here.peers.together():
        return _backward(here, saved, tables)


def _backward(here: Here, saved: Saved, tables: tuple[Any, ...]) -> Gradients:
    wide = torch.float64 if saved.q.dtype == torch.float64 else torch.float32
    total = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (saved.q, saved.k, saved.v)]
    of_tables = [torch.zeros(t.shape, dtype=torch.float64) for t in tables]
    own = here.own(saved.k, saved.v)
    arrivals = Arrivals(here.peers, own, here.plan.schedule)
    returns = _Returns(here.peers, here.own(*total[1:]), here.plan.schedule.transfers)
    for step, works in zip(here.plan.steps, here.plan.works, strict=True):
        keys = arrivals.keys(step)
        returns.expect(step.round)
        flows = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in keys]
        for work in works:
            for part in work.parts:
                more = _part_back(here, saved, part, work, keys, [total[0], *flows], tables)
                for x, y in zip(of_tables, more, strict=True):
                    x += torch.from_numpy(y)
        returns.give(step, flows)
    arrivals.finish()
    returns.finish()
    return Gradients(total[0], total[1], total[2], tuple(of_tables))


def _part_back(
    here: Here, saved: Saved, part: Part, work: Work, keys: tuple[torch.Tensor, ...], totals: list[torch.Tensor],
    tables: tuple[Any, ...],
) -> tuple[Any, ...]:  # fmt: skip
    """Adds what flows from a part to its rows and its keys; returns what flows to tables."""
    q, out, lse, d_out, d_lse = saved.rows(here, work.run)
    rows = totals[0].narrow(here.dim, places(here.runs)[work.run], q.shape[here.dim])
    into = [rows, *totals[1:]]
    flows = [torch.empty(x.shape, dtype=x.dtype) for x in into]
    names = ("q", "k", "v", "out", "lse", "d_out", "d_lse", "dq", "dk", "dv")
    given = [
        None if x is None else describe(x, name)
        for x, name in zip((q, *keys, out, lse, d_out, d_lse, *flows), names, strict=True)
    ]
    a, _, _, o, logs, d_o, d_logs, *_ = given
    assert a is not None and o is not None and logs is not None and d_o is not None
    narrow = DTYPES[a.dtype][1] < 4
    problem = replace(part.problem, partial=narrow, rows=None, sinks=None)
    stated = Stated(problem, *(None if x is None else (*x, 0) for x in (part.q_first, part.k_first)))
    request = asked(problem, here.layout, Given(a, o, logs, d_o, d_logs), tables)
    where: Any = Operands(*given)  # pyright: ignore[reportArgumentType]
    call = engines.gradients().prepare(request, here.layout, stated, where, engines.threads_now(), current_isa())
    found = call.run(where)
    for x, y in zip(into, flows, strict=True):
        x += y
    return found


class _Returns:
    """What flows to keys, on its way to who holds them, who adds it in the order of rounds."""

    def __init__(self, peers: Peers, total: Shard, transfers: tuple[Transfer, ...]) -> None:
        self.peers, self.total = peers, total
        self.expected = [x for x in transfers if x.owner == peers.rank]
        self.coming: list[tuple[Transfer, list[Message], list[torch.Tensor]]] = []
        self.sent: list[list[Message]] = []

    def expect(self, turn: int) -> None:
        """What others compute meanwhile may come."""
        while self.expected and self.expected[0].round <= turn:
            if len(self.coming) >= _BUFFERS:
                self._add()
            self._receive()

    def give(self, step: Step, flows: list[torch.Tensor]) -> None:
        ((owner, keys),) = step.fragments
        if owner == self.peers.rank:
            for x, y in zip(self.total.of(keys), flows, strict=True):
                x += y
            return
        sends = [(x, owner, tag(step.round, 2 + n), _what(step.round, keys)) for n, x in enumerate(flows)]
        self.sent.append(self.peers.post(sends, []))
        while len(self.sent) > _BUFFERS:
            self._settle()

    def finish(self) -> None:
        while self.coming or self.expected:
            while self.expected and len(self.coming) < _BUFFERS:
                self._receive()
            self._add()
        while self.sent:
            self._settle()

    def _receive(self) -> None:
        x = self.expected.pop(0)
        buffers = [torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in self.total.of(x.keys)]
        receives = [(y, x.to, tag(x.round, 2 + n), _what(x.round, x.keys)) for n, y in enumerate(buffers)]
        self.coming.append((x, self.peers.post([], receives), buffers))

    def _add(self) -> None:
        x, messages, buffers = self.coming.pop(0)
        for message in messages:
            self.peers.wait(message)
        for y, z in zip(self.total.of(x.keys), buffers, strict=True):
            y += z

    def _settle(self) -> None:
        for message in self.sent.pop(0):
            self.peers.wait(message)


def _what(turn: int, keys: range) -> str:
    return f"with gradients of keys {keys.start} to {keys.stop - 1} in step {turn}"
