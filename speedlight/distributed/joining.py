"""Rows of a process against keys that travel, on a GPU: each part is attended to by itself, and joined to a state.

Who sends what to whom, and when, is what it is on CPUs; messages and kernels are ordered by the device's current
stream, and the host waits for neither.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import engines
from ..problem.key_parts import KeyPart
from ..problem.problem import LAYOUTS
from ..problem.shardings import places
from .arriving import Arrivals
from .plans import Work
from .ring import RankContext


def forward(here: RankContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out and lse of this process's rows."""
    rows, plan = _Rows(here, q, k, v), here.plan
    with here.peers.together():
        arrivals = Arrivals(here.peers, here.own(k, v), plan.schedule)
        for at in range(len(plan.steps)):
            rows.step(arrivals.keys(plan.steps[at]), plan.works[at], at)
        arrivals.finish()
        for run in plan.unseeing:
            rows.join(None, run, begins=True, ends=True)
    return rows.out, rows.lse


class _Rows:
    """Outputs, log-sum-exps, and the state of rows whose keys come in several parts.

    Everything that can be refused is refused as it is made, before any message.
    """

    def __init__(self, here: RankContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.here, self.q, self.engine = here, q, engines.gpu()
        self.joining = self.engine.joining()
        self.packed, plan = here.sharded.whole.cu_q is not None, here.plan
        self.out = q.new_empty((*q.shape[:-1], v.shape[-1]))
        self.lse = q.new_empty([q.shape[a] for a in LAYOUTS[here.layout][:-1]], dtype=torch.float32)
        self.places = places(here.runs)
        self._prepare(self.engine.keys_of(k, v, here.layout))
        works = [work for works in plan.works for work in works]
        several = {work.run for work in works if not self._in_one_call(work)} | set(plan.unseeing)
        self.state = self.part = None
        if several:
            acc = self.out if q.dtype == torch.float32 else self.out.new_empty(self.out.shape, dtype=torch.float32)
            self.state = self.joining.State(acc, self.lse.new_empty((*self.lse.shape, 2)))
            longest = max([len(here.runs[run]) for run in several])
            shape = [longest if d == here.dim else n for d, n in enumerate(self.out.shape)]
            lse = self.lse.new_empty((*self.lse.shape[:-1], longest))
            self.part = self.joining.Found(self.out.new_empty(shape, dtype=torch.float32), lse)

    def _prepare(self, keys: Any) -> None:
        """Prepares the calls of all parts, and the endings of all runs; kept from call to call."""
        prepared, plan = self.here.prepared, self.here.plan
        if "endings" in prepared:
            return
        calls = {
            (at, work.run, n): self._call_of(part, work, keys)
            for at, works in enumerate(plan.works)
            for work in works
            for n, part in enumerate(work.parts)
        }
        prepared |= calls
        prepared["endings"] = [self._ending(run) for run in range(len(self.here.runs))]

    def _call_of(self, part: KeyPart, work: Work, keys: Any) -> Any:
        """Prepares the kernel's call for a part: of all rows of its run, those included that are padding."""
        whole, alone = self.here.sharded.whole.problem, self._in_one_call(work)
        rows = None if whole.rows is None else len(self.here.runs[work.run])
        problem = replace(part.problem, partial=False, rows=rows, sinks=part.problem.sinks if alone else None)
        return self.engine.prepare(problem, self.here.layout, self.q.device, keys, part.q_first, part.k_first)

    def _ending(self, run: int) -> Any:
        """Returns what joins the rows of a run last: sinks, and the number of rows that are no padding."""
        whole, device = self.here.sharded.whole.problem, self.q.device
        sinks = None if whole.sinks is None else torch.tensor(whole.sinks, dtype=torch.float32).to(device)
        counts = None if whole.rows is None else torch.tensor(self.here.queries(run), dtype=torch.int64).to(device)
        return self.joining.Ending(sinks, counts)

    def _in_one_call(self, work: Work) -> bool:
        """Returns whether rows meet all of their keys in one call, which ends them; packed ones may meet none in it."""
        return work.begins and work.ends and not self.packed

    def step(self, tensors: tuple[torch.Tensor, ...], works: tuple[Work, ...], at: int) -> None:
        """Computes with the keys and values of a step, which are not kept after it."""
        k, v = tensors
        keys = self.engine.keys_of(k, v, self.here.layout)
        for work in works:
            into = self._of_run(self.joining.Found(self.out, self.lse), work.run)
            if not self._in_one_call(work):
                into = self._of_run(self.part, work.run, at=0)
            if self.packed:  # a part has some sequences
                into.lse.fill_(-torch.inf)
            for n in range(len(work.parts)):
                call = self.here.prepared[at, work.run, n]
                with self.here.noting():
                    call.run(self._narrowed(self.q, work.run), keys, into.out, into.lse)
            if not self._in_one_call(work):
                self.join(into, work.run, begins=work.begins, ends=work.ends)

    def join(self, part: Any, run: int, *, begins: bool, ends: bool) -> None:
        """Joins a part of a run's keys, or none, to the state of its rows."""
        assert self.state is not None
        acc, stats = self.state
        at = self.places[run]
        state = self.joining.State(self._narrowed(acc, run), stats.narrow(stats.ndim - 2, at, len(self.here.runs[run])))
        into = self._of_run(self.joining.Found(self.out, self.lse), run)
        ending = self.here.prepared["endings"][run]
        self.joining.joined(self.here.layout, part, state, into, ending, begins=begins, ends=ends)

    def _of_run(self, found: Any, run: int, at: int | None = None) -> Any:
        """Returns views of a run's rows, which begin at `at`."""
        at, count = self.places[run] if at is None else at, len(self.here.runs[run])
        return self.joining.Found(found.out.narrow(self.here.dim, at, count), found.lse.narrow(-1, at, count))

    def _narrowed(self, x: torch.Tensor, run: int) -> torch.Tensor:
        return x.narrow(self.here.dim, self.places[run], len(self.here.runs[run]))
