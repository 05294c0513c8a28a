"""What the CPU engine makes of a request for gradients: calls of its kernels, and what it adds up itself."""

from __future__ import annotations

import numpy as np

from ..arrays import Array
from ..expressions.program import Program
from ..gradients import SINKS, Asked
from ..machine import Isa, current_isa
from ..modes import standard
from ..planning import Plan, Run, plan_of
from ..problem import LAYOUTS, Problem
from ..resolve import Stated
from . import roof
from .compile import symbol_of
from .differentiate import (
    BackwardCall,
    BackwardSchedule,
    Lies,
    schedule_backward,
    shape_of,
    tickets_of,
    tickets_of_tables,
)
from .layout import SHARE_OF
from .operands import Operands, Strides
from .prepare import program_of
from .shape import Shape

_SHARES, _SHARE_BYTES = 64, 64 << 20  # of gradients of tables, and bytes of all shares together


class Gradients:
    """A prepared request, for arrays at any addresses."""

    def __init__(self, request: Asked, lies: Lies, threads: int, isa: Isa) -> None:
        problem = request.problem
        self.request, self.problem, self.layout = request, problem, lies.layout
        self.untouched = _untouched(problem, lies)
        program = program_of(problem, backward=True)
        strides = lies.strides(problem.storage)
        how = schedule_backward(problem, isa, strides, program, tickets_of(problem, threads), threads)
        self.call, self.tables = BackwardCall(problem, "backward", program, lies, how), None
        if request.tables and problem.score is not None:
            entries = sum(x.array.size for x in request.tables)
            program = Program.of_entries(problem.mask, problem.score, problem.box(), request.tables)
            tickets = tickets_of_tables(problem, max(1, min(_SHARES, _SHARE_BYTES // (8 * max(1, entries)))))
            how = schedule_backward(problem, isa, strides, program, tickets, threads)
            self.tables = BackwardCall(problem, "tables", program, lies, how)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return self.call.size + (0 if self.tables is None else self.tables.size)

    def run(self, x: Operands, seed: int | None = None) -> tuple[np.ndarray, ...]:
        """Fills dq, dk and dv; the further gradients that are asked for. `seed` of the caller's, if given."""
        for name in self.untouched:
            getattr(x, name).numpy()[...] = 0
        self.call.run(x, self._sums(x), seed)
        tables = self._tables(x, seed)
        kind = np.float64 if self.problem.storage == "f64" else np.float32
        grads = [_sinks(self.problem, self.layout, x) if y == SINKS else tables[id(y)] for y in self.request.grads]
        return tuple(y.astype(kind) for y in grads)

    def _sums(self, x: Operands) -> list[np.ndarray]:
        """Where dq, dk and dv are summed: they themselves, or arrays of numbers beside them."""
        if self.problem.storage in ("f32", "f64"):
            return [a.numpy() for a in (x.dq, x.dk, x.dv)]
        return [np.empty(a.shape, np.float32) for a in (x.dq, x.dk, x.dv)]

    def _tables(self, x: Operands, seed: int | None) -> dict[int, np.ndarray]:
        """Gradients of tables, by the tables' ids: shares are added in order."""
        tables = self.request.tables
        if self.tables is None or self.tables.program is None:
            return {}
        count = self.tables.how.tickets.progress
        sums = {id(t): np.zeros((count, *t.shape)) for t in tables}
        shares = np.zeros((len(self.tables.program.tables), len(SHARE_OF.names)), np.int64)
        for table, slot in self.tables.program.tables.items():
            if id(table) in sums:
                each = sums[id(table)]
                shares[slot] = each.ctypes.data, each.strides[0]
        self.tables.run(x, [x.dq.numpy()] * 3, seed, shares)
        for each in sums.values():
            for share in range(1, count):
                each[0] += each[share]
        return {at: each[0] for at, each in sums.items()}


@standard
def prepare(request: Asked, layout: str, stated: Stated, arrays: Operands, threads: int, isa: Isa) -> Gradients:
    """Everything that addresses don't change."""
    first_q, first_k = (x and x[:-1] for x in (stated.cu_q, stated.cu_k))
    return Gradients(request, Lies(layout, arrays, first_q, first_k), threads, isa)


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """What a backward call on this machine would do, with its measured roofs."""
    how, shape = kernel_of_problem(problem, strides, threads, current_isa())
    workspace = how.workspace_bytes + _sum_bytes(problem)
    run = Run(how.isa.name, symbol_of(shape), how.threads, shape.panel, workspace, backward=True)
    peak = roof.peak_flops(how.isa, problem.storage, how.threads)
    return plan_of(problem, run, peak, roof.bandwidth(how.threads), exact=exact)


def kernel_of_problem(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[BackwardSchedule, Shape]:
    """How a backward call runs, and what its kernel is specialised for; for any vector unit, this machine's or not."""
    program = program_of(problem, backward=True)
    how = schedule_backward(problem, isa, strides, program, tickets_of(problem, threads), threads)
    return how, shape_of(problem, "backward", program, how)


def _sum_bytes(problem: Problem) -> int:
    """Of the sums of dq, dk and dv, where they are of more bits than the arrays."""
    if problem.storage in ("f32", "f64"):
        return 0
    rows, keys = sum(problem.q_lengths) * problem.q_heads, sum(problem.k_lengths) * problem.kv_heads
    return 4 * (rows * problem.head_dim + keys * (problem.head_dim + problem.value_dim))


def _sinks(problem: Problem, layout: str, x: Operands) -> np.ndarray:
    """A sink is one more key, which every row sees and whose value is zeros: - Σ p · delta, of each head."""
    assert problem.sinks is not None
    heads = LAYOUTS[layout][-3]
    result = np.zeros(problem.q_heads)
    for head, sink in enumerate(problem.sinks):
        out, d_out = (_of_head(a, heads, head) for a in (x.out, x.d_out))
        lse, d_lse = (None if a is None else np.asarray(a.numpy()[..., head, :], np.float64) for a in (x.lse, x.d_lse))
        assert lse is not None
        seen = (lse != -np.inf) & (sink != -np.inf)
        delta = (out * d_out).sum(axis=-1) - (0.0 if d_lse is None else d_lse)
        with np.errstate(all="ignore"):
            result[head] = -(np.exp(sink - lse[seen]) * delta[seen]).sum()
    return result


def _of_head(x: Array, axis: int, head: int) -> np.ndarray:
    return np.take(x.numpy(), head, axis=axis).astype(np.float64)


def _untouched(problem: Problem, lies: Lies) -> list[str]:
    """Which gradients have rows that no task writes: of queries past q_lengths, of keys that no query is beside."""
    length, batch = LAYOUTS[lies.layout][-2], 1 if lies.layout == "lhd" else problem.batch
    rows, keys = (x.shape[length] * batch for x in (lies.arrays.q, lies.arrays.k))
    alone = [a == 0 < b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)]
    names = ["dq"] if sum(problem.q_lengths) < rows else []
    return names + (["dk", "dv"] if sum(problem.k_lengths) < keys or True in alone else [])
