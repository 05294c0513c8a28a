"""TableSums: the order in which gradients of the tables that a score looks up are summed."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from ...expressions.program import Program
from ...expressions.tables import Table
from ...expressions.tree import Node
from ...host.rounding import standard
from ...host.shortcuts import address_of
from ...host.tunings import Ranges
from ...problem.biases import shares_of
from ...problem.problem import Problem
from ..kernels.score_backward import at_positions, by_rows
from ..memory.records import SHARE_OF
from ..runtime.launch import take_scratch, zeroed
from .backward_schedule import blocks_of_positions, side_by_side

POSITIONS = 4  # blocks of queries, from which on a share is what is at the same positions


class TableSums(NamedTuple):
    """The order in which gradients of tables are summed, which depends on the problem alone."""

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
        """Returns whether a kernel of its own sums them; dS is computed twice then."""
        if not self.rows or (program is not None and program.changes_flow):
            return True
        return not self.alone and side_by_side(problem, threads, wants) < 2 * threads

    def new(
        self, problem: Problem, shares: int, short: Collection[int]
    ) -> tuple[dict[int, np.ndarray], np.ndarray, list[Any]]:
        """Makes sums of so many shares, by the tables' ids, and the words by which kernels find them.

        short: ids of tables whose sums TermSums adds up, and zeroes; they lie in scratch, which comes third.
        """
        count = 1 if self.one else shares
        narrow = self.single if self.one and problem.storage != "f64" else frozenset()
        sums, held = {}, []
        for t in self.tables:
            shape, kind = (count, *t.shape), _sum_type(t, id(t) in narrow)
            if id(t) in short:
                held.append(take_scratch(math.prod(shape) * np.dtype(kind).itemsize, zeroed))
                sums[id(t)] = np.frombuffer(held[-1], kind, math.prod(shape)).reshape(shape)
            else:
                sums[id(t)] = np.zeros(shape, kind)
        words = np.zeros((len(self.program.tables), len(SHARE_OF.names)), np.int64)
        for table, slot in self.program.tables.items():
            if id(table) in sums:
                each = sums[id(table)]
                words[slot] = address_of(each), 0 if self.one else each.strides[0], each.itemsize
        return sums, words, held


def sums_of(problem: Problem, tables: tuple[Table, ...]) -> TableSums | None:
    if not tables or problem.score is None:
        return None
    program = Program.of_entries(problem.mask, problem.score, problem.box(), tables)
    lookups = [node for node, _ in program.entries]
    single = frozenset(id(n.value) for n in lookups if _has_one_term(problem, program, n))
    shares = shares_of(sum([t.array.size for t in tables]))
    # where sums have one term, or there would be one share, shares by positions give the same bits
    few = shares == 1 or blocks_of_positions(problem) >= POSITIONS or all([id(n.value) in single for n in lookups])
    one = few and all([at_positions(program, n) for n in lookups])
    return TableSums(program, tables, shares, single, one, one and all([by_rows(program, n) for n in lookups]))


@standard
def added(shares: np.ndarray) -> np.ndarray:
    """Adds shares, in order."""
    if len(shares) == 1:
        return shares[0]
    with np.errstate(all="ignore"):
        for share in shares[1:]:
            shares[0] += share
    return shares[0].copy()


def _has_one_term(problem: Problem, program: Program, lookup: Node) -> bool:
    """Returns whether no two pairs read the same entry: items, heads, positions and keys all have their own."""
    symbols = {x.value for x in lookup.args if x.op == "symbol"}
    heads = problem.q_heads == 1 or "h" in symbols
    items = problem.batch == 1 or ("b" in symbols and problem.items is None)
    return heads and items and at_positions(program, lookup) and by_rows(program, lookup)


def _sum_type(table: Table, narrow: bool) -> type:
    """Returns the type of sums: of one term, which is the sum but for -0, the result's, where the table's is."""
    return np.float32 if narrow and table.kind == "float" else np.float64
