"""Schedules of backward passes: panels, scratch, and what tickets stand for. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...expressions.program import Program
from ...host.machine import PRODUCTS, Isa, number_bytes
from ...host.tunings import Ranges, Tuning
from ...problem.operands import Strides
from ...problem.problem import QUERY_BLOCK, TILE, Problem
from ..kernels.score_backward import needs_raw
from ..memory.records import (
    BACKWARD_PANEL,
    BACKWARD_SCRATCH,
    ENDLESS,
    GANG,
    PAIRS,
    BackwardSizes,
    placed,
    together,
)
from .schedule import product_name, up

_WORTH = {3: 1.0, 2: 0.92}  # share of the peak that panels of so many vectors reach (docs/ladder.md)
ROW_SLACK = 24  # rows that register tiles write past a tile


class Tickets(NamedTuple):
    """The tasks of a pass, numbered."""

    number: int
    table: np.ndarray  # which the kernel reads
    progress: int  # words
    words: dict[str, int]


class BackwardSchedule(NamedTuple):
    """The way in which the CPU engine runs a pass back through attention."""

    isa: Isa
    tuning: Tuning
    storage: str
    vectors: int
    threads: int
    tickets: Tickets
    words: dict[str, int]
    scratch_bytes: int

    @property
    def scratch_stride(self) -> int:
        return self.scratch_bytes + self.tuning.threading.apart

    @property
    def panels(self) -> int:
        """Panels of a block of queries."""
        return self.words["panels"]

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch of all workers."""
        return self.scratch_bytes * self.threads


def schedule_backward(
    problem: Problem,
    isa: Isa,
    strides: Strides,
    program: Program | None,
    tickets: Tickets,
    threads: int,
    tuning: Tuning,
) -> BackwardSchedule:
    """Schedules panels of two or three vectors of queries; QUERY_BLOCK is a number of panels on every vector unit."""
    vectors = vectors_of(problem, isa)
    sizes, staged = _sizes(problem, isa, strides, program, vectors, tuning.register_tiles(isa).keys[vectors - 1])
    scratch, fixed = placed(BACKWARD_SCRATCH, sizes)
    pairs, pair_bytes = placed(PAIRS, sizes)
    offsets, panel_bytes = placed(BACKWARD_PANEL, sizes)
    panels = QUERY_BLOCK // sizes.panel
    words = tickets.words | {
        "panels": panels, "panel_bytes": panel_bytes, "pair_bytes": pair_bytes, "columns": sizes.columns,
        "value_columns": sizes.value_columns, "kv_heads": problem.kv_heads,
    }  # fmt: skip
    words |= {f"{name}_staged": int(x) for name, x in staged.items()}
    words |= {f"at_{name}": at for name, at in (scratch | pairs | offsets).items()}
    used = up(fixed + panels * panel_bytes, 4096)
    threads = max(1, min(threads, tickets.number))
    return BackwardSchedule(isa, tuning, problem.storage, vectors, threads, tickets, words, used)


def vectors_of(problem: Problem, isa: Isa) -> int:
    """Returns the vectors of a panel: two where that leaves fewer lanes idle, and registers hold enough sums of two."""

    def cost(vectors: int) -> float:
        panel, items = isa.lanes(problem.storage) * vectors, zip(problem.q_starts, problem.q_lengths, strict=True)
        return sum([-(-(first + n) // panel) - first // panel for first, n in items]) * vectors / _WORTH[vectors]

    return min(_WORTH, key=cost) if isa.registers >= 32 else 3


def _sizes(
    problem: Problem, isa: Isa, strides: Strides, program: Program | None, vectors: int, rows: int
) -> tuple[BackwardSizes, dict[str, bool]]:
    """Returns what scratch depends on, and which rows are copied; `rows`: columns of a register tile."""
    lanes, number = isa.lanes(problem.storage), number_bytes(problem.storage)
    panel, elements = lanes * vectors, PRODUCTS[product_name(problem, isa, gradients=True)].elements
    units, value_units = -(-problem.head_dim // elements), -(-problem.value_dim // elements)
    staged = staged_of(problem, strides, elements)
    columns, value_columns = up(problem.head_dim, lanes), up(problem.value_dim, lanes)
    sizes = BackwardSizes(
        number=number,
        panel=panel,
        tile_rows=TILE + ROW_SLACK,
        units=units,
        value_units=value_units,
        width=up(problem.head_dim, rows),
        columns=columns,
        value_columns=value_columns,
        staged_keys=staged["k"] * TILE * units * number,
        staged_values=staged["v"] * TILE * value_units * number,
        elements=elements,
        together=together(panel),
        head_dim=problem.head_dim,
        keeps_raw=needs_raw(program),
        drops=problem.dropout > 0,
    )
    return sizes, staged


def staged_of(problem: Problem, strides: Strides, elements: int) -> dict[str, bool]:
    """Returns whether keys and values are copied: to be widened, made units, or brought together."""
    narrow = problem.storage not in ("f32", "f64")
    odd = [bool(x % elements) if elements > 1 else narrow for x in (problem.head_dim, problem.value_dim)]
    return {"k": strides.strided_keys or odd[0], "v": strides.strided_values or odd[1]}


def steps_of(problem: Problem) -> list[int]:
    return [
        ((start + n - 1) // QUERY_BLOCK - start // QUERY_BLOCK + 1) * problem.group if n else 0
        for start, n in zip(problem.q_starts, problem.q_lengths, strict=True)
    ]


def tickets_of(problem: Problem, threads: int, wants: Ranges, *, skew: int = 0) -> Tickets:
    """Numbers blocks of queries against ranges of keys, gang after gang.

    A gang is as small as keeps all threads busy: what it reads again and again then stays in the cache they share.
    `skew`: so many diagonals each kv head comes after the one before.
    """
    steps = steps_of(problem)
    columns = problem.batch * problem.kv_heads
    keys = range_of(problem, threads, columns, wants)
    ranges = [max(1, -(-n // keys)) for n in problem.k_lengths]
    # tasks of a head at once; what is hidden leaves one of a diagonal with work, maybe
    hides = problem.mask is not None or problem.score is not None
    apart = 1 if hides else max([min(a, b) for a, b in zip(steps, ranges, strict=True)], default=0)
    together = -(-wants.tasks * threads // max(1, apart)) if threads > 1 else 1
    rows, count, progress = [], 0, 0
    for first in range(0, columns, together):
        heads = min(together, columns - first)
        items = range(first // problem.kv_heads, (first + heads - 1) // problem.kv_heads + 1)
        most = max(ranges[i] for i in items)
        depth = max((steps[i] + ranges[i] - 1 if steps[i] else 0) for i in items)
        if depth:
            depth += (heads - 1) * skew
            rows.append((count, first, heads, most, progress))
            count += depth * heads * most
            progress += heads * most
    gangs = np.array(rows, np.int64).reshape(-1, len(GANG.names))
    words = {"gangs": gangs.ctypes.data, "gang_count": len(gangs), "skew": skew, "range_keys": keys}
    return Tickets(count, gangs, progress, words)


def range_of(problem: Problem, threads: int, columns: int, wants: Ranges) -> int:
    """Returns the keys of a task: all, where heads and items keep the threads busy; no bit depends on it."""
    least, most = wants.keys
    most = max(least, most * 128 // max(128, problem.head_dim, problem.value_dim))
    wanted = -(-wants.tasks * threads // max(1, columns)) if threads > 1 else 1
    keys = -(-max(problem.k_lengths, default=0) // wanted)
    return up(min(most, max(least, keys)), TILE)


def blocks_of_positions(problem: Problem) -> int:
    """Counts the blocks of queries of the longest item."""
    return max(steps_of(problem), default=0) // problem.group


def side_by_side(problem: Problem, threads: int, wants: Ranges) -> int:
    """Counts the tasks that are worked on at once where each kv head follows the one before."""
    if len(set(zip(problem.q_starts, problem.q_lengths, problem.k_lengths, strict=True))) != 1:
        return 0  # where that one is cannot be told from where this one is
    keys = range_of(problem, threads, problem.batch * problem.kv_heads, wants)
    return blocks_of_positions(problem) * max(1, -(-problem.k_lengths[0] // keys))


def tickets_of_tables(problem: Problem, most_shares: int, *, by_positions: bool) -> Tickets:
    """Numbers blocks of queries, in shares that depend on the problem alone: cut evenly, or by positions.

    Of every share the first block, then of every share the second one …: what a ticket waits for comes before it.
    """
    blocks = [
        (item, head // problem.group, block * problem.group + head % problem.group, start // QUERY_BLOCK + block)
        for item, (steps, start) in enumerate(zip(steps_of(problem), problem.q_starts, strict=True))
        for head in range(problem.q_heads if steps else 0)
        for block in range(steps // problem.group)
    ]
    count = len(blocks)
    found = np.array(blocks, np.int64).reshape(count, 4)
    if by_positions:
        share = np.unique(found[:, 3], return_inverse=True)[1].reshape(count)
    else:
        shares = max(1, min(most_shares, count))
        share = np.repeat(np.arange(shares), np.diff(np.arange(shares + 1) * count // shares))
    each = np.bincount(share, minlength=1)
    order = np.argsort(share, kind="stable")
    turn = np.empty(count, np.int64)
    turn[order] = np.arange(count) - np.repeat(np.cumsum(each) - each, each)
    table = np.column_stack([found[:, :3], share, turn])[np.lexsort((share, turn))]
    table = np.ascontiguousarray(table, np.int64)
    words = {"blocks": table.ctypes.data, "range_keys": ENDLESS}
    return Tickets(count, table, len(each), words)
