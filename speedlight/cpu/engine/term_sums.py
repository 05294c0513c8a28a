"""TermSums: gradients of entries that items or heads share, each the sum of terms that kernels have written apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from ...expressions.tables import Table
from ...host.machine import Isa, number_bytes
from ...host.shortcuts import address_of
from ...problem.biases import shares_of
from ...problem.problem import QUERY_BLOCK, Problem
from ..kernels.term_sums import ARGUMENTS, OUT, RUN, TERMS, TermShape
from ..runtime.launch import Launch, threads_for
from ..runtime.tuned import tuning_of
from .backward_schedule import blocks_of_positions
from .table_sums import POSITIONS

_ENTRIES = 4096  # of a run, at most
_NUMBERS = 1e9  # that a thread is guessed to add in a second


def terms_of(problem: Problem, tables: tuple[Table, ...], threads: int, isa: Isa) -> dict[int, TermSums]:
    """Returns the sums of tables that were broadcast to all items and heads, by the tables' ids."""
    shapes = {id(t): t.shape if t.watched is None else tuple(t.watched.shape) for t in tables}
    shares = shares_of(sum(map(math.prod, shapes.values())))
    wide = [t for t in tables if shapes[id(t)] != t.shape and len(t.shape) == 4]
    return {id(t): TermSums(problem, t.shape, shapes[id(t)], shares, threads, isa) for t in wide}


class TermSums:
    """A sum of terms [batch, q_heads, q_len, k_len] over what `shape` shares, in groups that are `shares` of a pass."""

    def __init__(
        self, problem: Problem, terms: tuple[int, ...], shape: tuple[int, ...], shares: int, threads: int, isa: Isa
    ) -> None:
        batch, heads, rows, keys = terms
        size, entries = number_bytes(problem.storage), rows * keys
        item, head, *_ = (1,) * (4 - len(shape)) + shape
        self.shape, self.kind = shape, np.float64 if problem.storage == "f64" else np.float32
        numbers = np.arange(batch * heads).reshape(batch, heads)  # of terms, items before heads
        each = []
        if 0 not in terms and 0 not in shape:
            each = [x.ravel() for part in np.split(numbers, item) for x in np.split(part, head, axis=1)]
        self.groups: list[np.ndarray] = []  # sizes of groups, which runs point to
        runs: list[tuple[int, ...]] = []
        for at, of_entry in enumerate(each):
            for first, last, block in _blocks(problem, rows):
                groups = self._group(problem, of_entry, block, shares)
                for start in range(first * keys, last * keys, _ENTRIES):
                    count, place = min(_ENTRIES, last * keys - start), (at * entries + start) * size
                    begin = int(of_entry[0]) * entries * size + start * size
                    runs.append((begin, place, count, address_of(groups), len(groups)))
        self.runs, step = np.array(runs, np.int64).reshape(-1, len(RUN.names)), 0
        if runs and len(each[0]) > 1:
            step = int(each[0][1] - each[0][0]) * entries * size
        seconds, wants = math.prod(terms) / _NUMBERS, tuning_of(isa).threading
        threads = threads_for(seconds, max(1, min(threads, len(runs))), wants)
        words = {"step": step, "runs": address_of(self.runs)}
        shape_of_kernel = TermShape(isa, "f64" if size == 8 else "f32")
        self.launch = Launch(shape_of_kernel, ARGUMENTS, words, len(runs), threads, seconds, wants)

    def _group(self, problem: Problem, terms: np.ndarray, block: int, shares: int) -> np.ndarray:
        """Returns the sizes of the groups of an entry's terms: those that are in one share."""
        blocks = blocks_of_positions(problem)
        count, groups = problem.batch * problem.q_heads * blocks, [len(terms)]
        if block >= 0 and shares > 1 and blocks < POSITIONS:
            ends = np.arange(1, min(shares, count) + 1) * count // min(shares, count)
            share = np.searchsorted(ends, terms * blocks + block, side="right").tolist()
            groups = [len(list(same)) for _, same in itertools.groupby(share)]
        self.groups.append(np.array(groups, np.int64))
        return self.groups[-1]

    def add(self, terms: np.ndarray) -> np.ndarray:
        """Returns the sums of terms that lie without gaps, and zeroes those."""
        if not self.launch.tickets:
            return np.zeros(self.shape, self.kind)
        result, words = np.empty(self.shape, self.kind), self.launch.words()
        words[TERMS], words[OUT] = address_of(terms), address_of(result)
        self.launch.run(words)
        return result


def _blocks(problem: Problem, rows: int) -> Iterator[tuple[int, int, int]]:
    """Returns the blocks of positions of rows: first, last, number; of items that differ all rows, as number -1."""
    starts = set(problem.q_starts)
    if len(starts) != 1 or set(problem.q_lengths) != {rows}:
        yield 0, rows, -1
        return
    offset, first, number = starts.pop() % QUERY_BLOCK, 0, 0
    while first < rows:
        last = min(rows, (number + 1) * QUERY_BLOCK - offset)
        yield first, last, number
        first, number = last, number + 1
