"""What the CPU engine makes of a request for gradients: calls of its kernels, and what it adds up itself."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import Array
from ...expressions.program import Program
from ...expressions.tables import Table
from ...expressions.tree import Node
from ...host.machine import Isa, current_isa
from ...host.rounding import standard
from ...host.tunings import Ranges
from ...problem.build import Stated
from ...problem.gradients import SINKS, Asked
from ...problem.operands import Operands, Strides
from ...problem.plan import Plan, Run, plan_of
from ...problem.problem import FAR_LSE, LAYOUTS, Problem
from ..kernels.score_backward import at_positions, by_rows, changes_flow
from ..memory.records import SHARE_OF
from ..memory.shape import Kind, Shape
from ..runtime.compile import symbol_of
from ..runtime.tuned import tuning_of
from .backward_call import (
    BackwardCall,
    BackwardSchedule,
    Lies,
    Tickets,
    blocks_of_positions,
    schedule_backward,
    shape_of,
    side_by_side,
    tickets_of,
    tickets_of_tables,
)
from .forward_call import measured_roofs, program_of

_SHARES, _SHARE_BYTES = 64, 64 << 20  # of gradients of tables, and bytes of all shares together
_POSITIONS = 4  # blocks of queries, from which on a share is what is at the same positions


class Gradients:
    """A prepared request, for arrays at any addresses."""

    def __init__(self, request: Asked, lies: Lies, threads: int, isa: Isa) -> None:
        self.request, self.problem, self.lies, self.tuning = request, request.problem, lies, tuning_of(isa)
        wants = self.tuning.ranges
        self.untouched = _untouched(self.problem, lies)
        program, skew = program_of(self.problem, backward=True), 0
        self.sums = _sums_of(self.problem, request.tables)
        self.tables = None  # the call that adds to their gradients, where that of dq, dk and dv does not
        if self.sums is not None:
            if self.sums.beside(self.problem, program, threads, wants):
                tickets = tickets_of_tables(self.problem, self.sums.shares, by_positions=self.sums.one)
                self.tables = self._call("tables", self.sums.program, tickets, threads, isa)
            else:
                program, skew = self.sums.program, 0 if self.sums.alone else self.problem.group
        tickets = tickets_of(self.problem, threads, wants, skew=skew)
        self.call = self._call("backward", program, tickets, threads, isa)

    def _call(self, kind: Kind, program: Program | None, tickets: Tickets, threads: int, isa: Isa) -> BackwardCall:
        strides = self.lies.strides(self.problem.storage)
        how = schedule_backward(self.problem, isa, strides, program, tickets, threads, self.tuning)
        return BackwardCall(self.problem, kind, program, self.lies, how)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return self.call.size + (0 if self.tables is None else self.tables.size)

    def run(self, x: Operands, seed: int | None = None) -> tuple[np.ndarray, ...]:
        """Fills dq, dk and dv, or adds to them; the further gradients that are asked for. `seed` of the caller's, if
        given.
        """
        for name in self.untouched:
            getattr(x, name).numpy()[...] = 0
        count = 1 if self.tables is None else self.tables.how.tickets.progress
        found, shares = ({}, None) if self.sums is None else self.sums.new(self.problem, count)
        self.call.run(x, self._sums(x), seed, shares if self.tables is None else None)
        if self.tables is not None:
            self.tables.run(x, [x.dq.numpy()] * 3, seed, shares)
        tables = {at: _added(each) for at, each in found.items()}
        grads = self.request.grads
        return tuple(self._narrowed(_sinks(self.problem, self.lies, x) if y == SINKS else tables[id(y)]) for y in grads)

    @standard
    def _narrowed(self, x: np.ndarray) -> np.ndarray:
        """As it is returned."""
        with np.errstate(all="ignore"):
            return x.astype(np.float64 if self.problem.storage == "f64" else np.float32, copy=False)

    def _sums(self, x: Operands) -> list[np.ndarray]:
        """Where dq, dk and dv are summed: they themselves, or arrays of numbers beside them."""
        if self.problem.storage in ("f32", "f64") or self.problem.partial:
            return [a.numpy() for a in (x.dq, x.dk, x.dv)]
        return [np.empty(a.shape, np.float32) for a in (x.dq, x.dk, x.dv)]


class _TableSums(NamedTuple):
    """In what order gradients of tables are summed, which depends on the problem alone."""

    program: Program
    tables: tuple[Table, ...]
    shares: int
    single: frozenset[int]  # ids of tables whose sums have one term each
    one: bool  # all shares add to the same sums: each has positions of its own
    rows: bool  # … and keys of a query add to entries side by side

    @property
    def alone(self) -> bool:
        return all([id(node.value) in self.single for node, _ in self.program.entries])

    def beside(self, problem: Problem, program: Program | None, threads: int, wants: Ranges) -> bool:
        """Whether a kernel of its own sums them; dS is computed twice then."""
        if not self.rows or changes_flow(program):
            return True
        return not self.alone and side_by_side(problem, threads, wants) < 2 * threads

    def new(self, problem: Problem, shares: int) -> tuple[dict[int, np.ndarray], np.ndarray]:
        """Sums of so many shares, by the tables' ids, and where kernels find them."""
        count = 1 if self.one else shares
        narrow = self.single if self.one and problem.storage != "f64" else frozenset()
        sums = {id(t): np.zeros((count, *t.shape), _sum_type(t, id(t) in narrow)) for t in self.tables}
        words = np.zeros((len(self.program.tables), len(SHARE_OF.names)), np.int64)
        for table, slot in self.program.tables.items():
            if id(table) in sums:
                each = sums[id(table)]
                words[slot] = each.ctypes.data, 0 if self.one else each.strides[0], each.itemsize
        return sums, words


def _sums_of(problem: Problem, tables: tuple[Table, ...]) -> _TableSums | None:
    if not tables or problem.score is None:
        return None
    program = Program.of_entries(problem.mask, problem.score, problem.box(), tables)
    lookups = [node for node, _ in program.entries]
    single = frozenset(id(n.value) for n in lookups if _has_one_term(problem, program, n))
    shares = max(1, min(_SHARES, _SHARE_BYTES // (8 * max(1, sum(t.array.size for t in tables)))))
    # where sums have one term, or there would be one share, shares by positions give the same bits
    few = shares == 1 or blocks_of_positions(problem) >= _POSITIONS or all([id(n.value) in single for n in lookups])
    one = few and all([at_positions(program, n) for n in lookups])
    return _TableSums(program, tables, shares, single, one, one and all([by_rows(program, n) for n in lookups]))


@standard
def _added(shares: np.ndarray) -> np.ndarray:
    """Shares, in order."""
    with np.errstate(all="ignore"):
        for share in shares[1:]:
            shares[0] += share
    return shares[0] if len(shares) == 1 else shares[0].copy()


def _has_one_term(problem: Problem, program: Program, lookup: Node) -> bool:
    """Whether no two pairs read the same entry: items and heads, positions and keys all have entries of their own."""
    symbols = {x.value for x in lookup.args if x.op == "symbol"}
    heads = problem.q_heads == 1 or "h" in symbols
    items = problem.batch == 1 or ("b" in symbols and problem.items is None)
    return heads and items and at_positions(program, lookup) and by_rows(program, lookup)


def _sum_type(table: Table, narrow: bool) -> type:
    """A sum of one term is that term, whose type is the result's where the table's is: but for -0, which +0 + it is."""
    return np.float32 if narrow and table.kind == "float" else np.float64


@standard
def prepare(request: Asked, layout: str, stated: Stated, arrays: Operands, threads: int, isa: Isa) -> Gradients:
    """Everything that addresses don't change."""
    first_q, first_k = (x and x[:-1] for x in (stated.cu_q, stated.cu_k))
    return Gradients(request, Lies(layout, arrays, first_q, first_k), threads, isa)


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """What a backward call on this machine would do."""
    how, shape = kernel_of_problem(problem, strides, threads, current_isa())
    workspace = how.workspace_bytes + _sum_bytes(problem)
    run = Run(how.isa.name, symbol_of(shape), how.threads, shape.panel, workspace, how.tuning.origin, backward=True)
    return plan_of(problem, run, partial(measured_roofs, how.isa, problem.storage, how.threads), exact=exact)


def kernel_of_problem(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[BackwardSchedule, Shape]:
    """How a backward call runs, and what its kernel is specialised for; for any vector unit, this machine's or not."""
    program, tuning = program_of(problem, backward=True), tuning_of(isa)
    tickets = tickets_of(problem, threads, tuning.ranges)
    how = schedule_backward(problem, isa, strides, program, tickets, threads, tuning)
    return how, shape_of(problem, "backward", program, how)


def _sum_bytes(problem: Problem) -> int:
    """Of the sums of dq, dk and dv, where they are of more bits than the arrays."""
    if problem.storage in ("f32", "f64"):
        return 0
    rows, keys = sum(problem.q_lengths) * problem.q_heads, sum(problem.k_lengths) * problem.kv_heads
    return 4 * (rows * problem.head_dim + keys * (problem.head_dim + problem.value_dim))


@standard
def _sinks(problem: Problem, lies: Lies, x: Operands) -> np.ndarray:
    """A sink is one more key, which every row sees and whose value is zeros: - Σ p · delta, of each head."""
    assert problem.sinks is not None
    result = np.zeros(problem.q_heads)
    far = FAR_LSE["float64" if problem.storage == "f64" else "float32"]
    for item, length in enumerate(problem.q_lengths):
        for head, sink in enumerate(problem.sinks):
            out, lse, d_out = (_rows(a, lies, item, head, length) for a in (x.out, x.lse, x.d_out))
            d_lse = 0.0 if x.d_lse is None else _rows(x.d_lse, lies, item, head, length)
            seen = (lse != -np.inf) & (sink != -np.inf)
            with np.errstate(all="ignore"):
                delta = (out * d_out).sum(axis=-1) - d_lse
                exponents = sink - lse
                exponents = np.where(np.abs(lse) >= far, np.minimum(exponents, 0.0), exponents)  # as of keys
                result[head] -= (np.exp(exponents) * delta)[seen].sum()
    return result


def _rows(x: Array, lies: Lies, item: int, head: int, length: int) -> np.ndarray:
    """What an array, or log-sum-exps, has for the queries of an item: float64."""
    first = 0 if lies.first_q is None else lies.first_q[item]
    rows: Any = slice(first, first + length)
    if x.name in ("lse", "d_lse"):
        return np.asarray(x.numpy()[(item, head, rows)[-len(lies.layout) + 1 :]], np.float64)
    match lies.layout:
        case "lhd":
            at = rows, head
        case "blhd":
            at = item, rows, head
        case "hld":
            at = head, rows
        case _:
            at = item, head, rows
    return np.asarray(x.numpy()[at], np.float64)


def _untouched(problem: Problem, lies: Lies) -> list[str]:
    """Which gradients have rows that no task writes: of queries past q_lengths, of keys that no query is beside."""
    if problem.partial:  # which are added to
        return []
    length, batch = LAYOUTS[lies.layout][-2], problem.batch if len(lies.layout) == 4 else 1
    rows, keys = (x.shape[length] * batch for x in (lies.arrays.q, lies.arrays.k))
    alone = [a == 0 < b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)]
    names = ["dq"] if sum(problem.q_lengths) < rows else []
    return names + (["dk", "dv"] if sum(problem.k_lengths) < keys or True in alone else [])
