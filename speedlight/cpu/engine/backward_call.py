"""Passes back through attention: how a problem runs, the arguments and tables of its kernel, and the call."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ...arrays.array import STORAGE_BYTES, address_of
from ...expressions.program import Program
from ...host.machine import PRODUCTS, Isa, number_bytes
from ...host.tunings import Ranges, Tuning
from ...problem.operands import Operands, Strides, step_of_items, stride_of
from ...problem.philox import drop_below
from ...problem.plan import pair_flops
from ...problem.problem import QUERY_BLOCK, TILE, Problem
from ..kernels.score_backward import needs_raw
from ..memory.operands import steps
from ..memory.records import (
    BACKWARD,
    BACKWARD_PANEL,
    BACKWARD_SCRATCH,
    CALL,
    ENDLESS,
    GANG,
    GRADIENTS,
    PAIRS,
    SCRATCH,
    BackwardSizes,
    GradientItem,
    placed,
    together,
)
from ..memory.shape import Kind, Shape
from ..runtime.compile import kernel_of
from ..runtime.workers import run_tickets
from .forward_call import bits_of, give_scratch, raise_wrong, signs_of, take_scratch, template_of
from .schedule import product_of, up

_VECTORS = 3  # of queries, in a panel
_SLACK = 24  # rows that register tiles write past a tile


class Lies(NamedTuple):
    """How the arrays of a backward pass lie."""

    layout: str
    arrays: Operands
    first_q: tuple[int, ...] | None  # of each packed sequence, its first row in q and in k
    first_k: tuple[int, ...] | None

    def step(self, name: str, axis: int) -> int:
        """Bytes, as stride_of gives them."""
        return stride_of(getattr(self.arrays, name).strides, self.layout, axis)

    def strides(self, storage: str) -> Strides:
        """What a schedule wants to know of them."""
        size = STORAGE_BYTES[storage]
        keys, values, queries, flows = (self.step(name, -1) != size for name in ("k", "v", "q", "d_out"))
        return Strides(keys, values, strided_queries=queries, strided_gradients=flows)

    def offsets(self, name: str, batch: int) -> np.ndarray:
        """From an array's address to each item."""
        first = self.first_k if name in ("k", "v", "dk", "dv") else self.first_q
        if first is not None:
            return np.array(first, np.int64) * self.step(name, -2)
        return np.arange(batch, dtype=np.int64) * step_of_items(getattr(self.arrays, name), self.layout)


class Tickets(NamedTuple):
    """What the tickets of a pass stand for."""

    number: int
    table: np.ndarray  # which the kernel reads
    progress: int  # words
    words: dict[str, int]


class BackwardSchedule(NamedTuple):
    """How the CPU engine runs a pass back through attention."""

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
        """Of a block of queries."""
        return self.words["panels"]

    @property
    def workspace_bytes(self) -> int:
        """Of all workers."""
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
    """A panel of three vectors of queries; QUERY_BLOCK is so many panels on every vector unit."""
    sizes, staged = _sizes(problem, isa, strides, program, tuning.register_tiles(isa).keys[_VECTORS - 1])
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
    return BackwardSchedule(isa, tuning, problem.storage, _VECTORS, threads, tickets, words, used)


def _sizes(
    problem: Problem, isa: Isa, strides: Strides, program: Program | None, rows: int
) -> tuple[BackwardSizes, dict[str, bool]]:
    """What scratch depends on, and which rows are copied; `rows`: columns of a register tile."""
    lanes, number = isa.lanes(problem.storage), number_bytes(problem.storage)
    panel, elements = lanes * _VECTORS, PRODUCTS[product_of(problem, isa)]
    units, value_units = -(-problem.head_dim // elements), -(-problem.value_dim // elements)
    staged = _staged(problem, strides, elements)
    columns, value_columns = up(problem.head_dim, lanes), up(problem.value_dim, lanes)
    sizes = BackwardSizes(
        number=number,
        panel=panel,
        tile_rows=TILE + _SLACK,
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


def _staged(problem: Problem, strides: Strides, elements: int) -> dict[str, bool]:
    """Whether keys and values are copied: to be widened, made units, or brought together."""
    narrow = problem.storage not in ("f32", "f64")
    odd = [bool(x % elements) if elements > 1 else narrow for x in (problem.head_dim, problem.value_dim)]
    return {"k": strides.strided_keys or odd[0], "v": strides.strided_values or odd[1]}


def _steps_of(problem: Problem) -> list[int]:
    return [
        ((start + n - 1) // QUERY_BLOCK - start // QUERY_BLOCK + 1) * problem.group if n else 0
        for start, n in zip(problem.q_starts, problem.q_lengths, strict=True)
    ]


def tickets_of(problem: Problem, threads: int, wants: Ranges, *, skew: int = 0) -> Tickets:
    """Of blocks of queries against ranges of keys, gang after gang.

    A gang is as small as keeps all threads busy: what it reads again and again then stays in the cache they share.
    `skew`: so many diagonals each kv head comes after the one before.
    """
    steps = _steps_of(problem)
    columns = problem.batch * problem.kv_heads
    keys = _range_of(problem, threads, columns, wants)
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


def _range_of(problem: Problem, threads: int, columns: int, wants: Ranges) -> int:
    """Keys of a task: all, where heads and items keep the threads busy; no bit depends on it."""
    least, most = wants.keys
    most = max(least, most * 128 // max(128, problem.head_dim, problem.value_dim))
    wanted = -(-wants.tasks * threads // max(1, columns)) if threads > 1 else 1
    keys = -(-max(problem.k_lengths, default=0) // wanted)
    return up(min(most, max(least, keys)), TILE)


def blocks_of_positions(problem: Problem) -> int:
    """Of the longest item."""
    return max(_steps_of(problem), default=0) // problem.group


def side_by_side(problem: Problem, threads: int, wants: Ranges) -> int:
    """How many tasks are worked on at once where each kv head follows the one before."""
    if len(set(zip(problem.q_starts, problem.q_lengths, problem.k_lengths, strict=True))) != 1:
        return 0  # where that one is cannot be told from where this one is
    keys = _range_of(problem, threads, problem.batch * problem.kv_heads, wants)
    return blocks_of_positions(problem) * max(1, -(-problem.k_lengths[0] // keys))


def tickets_of_tables(problem: Problem, most_shares: int, *, by_positions: bool) -> Tickets:
    """Of blocks of queries, in shares that depend on the problem alone: cut evenly, or what is at the same positions.

    Of every share the first block, then of every share the second one …: what a ticket waits for comes before it.
    """
    blocks = [
        (item, head // problem.group, block * problem.group + head % problem.group, start // QUERY_BLOCK + block)
        for item, (steps, start) in enumerate(zip(_steps_of(problem), problem.q_starts, strict=True))
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


def shape_of(problem: Problem, kind: Kind, program: Program | None, how: BackwardSchedule) -> Shape:
    """What the kernel of a pass is specialised for."""
    of_tiles = {"own_tiles": how.tuning.register_tiles(how.isa), "dropout": problem.dropout > 0}
    return Shape(kind, how.isa, how.storage, how.vectors, program, **of_tiles, partial=problem.partial)


class BackwardCall:
    """A pass back through attention with layouts and strides fixed: only addresses are missing.

    Never changed once it is used.
    """

    def __init__(
        self, problem: Problem, kind: Kind, program: Program | None, lies: Lies, how: BackwardSchedule
    ) -> None:
        self.problem, self.program, self.how = problem, program, how
        self.shape = shape_of(problem, kind, program, how)
        self.items = _items(problem, lies, how.tickets.words["range_keys"])
        words = how.words | _words(problem, lies, self.shape.elements) | {"scratch_stride": how.scratch_stride}
        self.slots = None if program is None else program.host_words()
        if self.slots is not None:
            words |= {"numbers": self.slots[0].ctypes.data, "tables": self.slots[1].ctypes.data}
        self.lookups = [] if program is None else program.lookups
        self.template = template_of(BACKWARD, words)
        self.words_type = ctypes.c_int64 * len(BACKWARD.names)
        self.seconds = _guessed_seconds(problem, how, self.shape.elements)
        wants = how.tuning.threading
        self.threads = how.threads if self.seconds > wants.inline_seconds else 1
        self.region_seconds = wants.region_seconds

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        own = self.items.nbytes + self.how.tickets.table.nbytes + len(self.template)
        own += 0 if self.slots is None else sum(x.nbytes for x in self.slots)
        return own + (0 if self.program is None else sum(x.array.nbytes for x in self.program.tables))

    def run(
        self, x: Operands, sums: list[np.ndarray], seed: int | None, shares: np.ndarray | None = None, counts: int = 0
    ) -> None:
        """`sums`: where dq, dk and dv are summed; `shares`: where gradients of tables are; a seed of the caller's, if
        given; `counts`: an address of COUNTS, which then are counted.
        """
        if not self.how.tickets.number:
            return
        words = self.words_type.from_buffer_copy(self.template)
        lse, d_lse = (None if a is None else np.ascontiguousarray(a.numpy()) for a in (x.lse, x.d_lse))
        progress = (ctypes.c_int64 * self.how.tickets.progress)()
        wrong = (ctypes.c_int64 * (2 * len(self.lookups) + 1))()
        scratch = take_scratch(self.how.scratch_stride * self.threads)
        try:
            words[SCRATCH] = ctypes.addressof(scratch)
            words[CALL] = (
                x.q.address, x.k.address, x.v.address, x.out.address, _address(lse), counts, self.items.ctypes.data, 0,
                0, ctypes.addressof(wrong), self.problem.seed if seed is None else seed,
            )  # fmt: skip
            words[GRADIENTS] = (
                x.d_out.address, _address(d_lse), x.dq.address, x.dk.address, x.dv.address, *map(_address, sums),
                ctypes.addressof(progress), _address(shares),
            )  # fmt: skip
            tickets = self.how.tickets.number
            run_tickets(kernel_of(self.shape), words, tickets, self.threads, self.seconds, self.region_seconds)
        finally:
            give_scratch(scratch)
        raise_wrong(self.lookups, wrong)


def _guessed_seconds(problem: Problem, how: BackwardSchedule, elements: int) -> float:
    """Of one thread."""
    pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
    flops = pairs * pair_flops(problem, backward=True) * (0.5 if problem.causal else 1.0)
    return flops / (how.tuning.threading.backward_flops * how.isa.lanes(how.storage) * elements)


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else address_of(x)


def _gradient_bytes(problem: Problem) -> int:
    """Of an element of dq, dk or dv in memory."""
    return number_bytes(problem.storage) if problem.partial else STORAGE_BYTES[problem.storage]


def _words(problem: Problem, lies: Lies, elements: int) -> dict[str, int]:
    number, size = number_bytes(problem.storage), _gradient_bytes(problem)
    words = {
        "lse_head": _lse_rows(lies) * number,
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "causal": int(problem.causal),
        "c": bits_of(abs(problem.scale), number),  # a score's own arithmetic wants it with its sign
        "flip": signs_of(number, elements) if problem.score is None and problem.scale < 0 else 0,
        "scale": bits_of(problem.scale, number),
        "drop_below": drop_below(problem.dropout),
        "drop_factor": bits_of(1.0 / problem.dropout_divisor, number),
        "k_start": problem.k_start,
    }
    for name in ("q", "k", "v", "out", "d_out"):
        words |= steps(name, getattr(lies.arrays, name).strides, lies.layout)
    for name in ("q", "k", "v"):
        for part, axis in (("head", -3), ("row", -2)):
            step = lies.step(f"d{name}", axis)
            words |= {f"d{name}_{part}": step, f"s{name}_{part}": step // size * number}
    return words


def _lse_rows(lies: Lies) -> int:
    """From one head's log-sum-exps to the next."""
    return lies.arrays.lse.shape[-1]


def _items(problem: Problem, lies: Lies, range_keys: int) -> np.ndarray:
    """The kernel's table of batch items, [item, word]."""
    number, size = number_bytes(problem.storage), _gradient_bytes(problem)
    names = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
    at = {f"{name}_at": lies.offsets(name, problem.batch) for name in names}
    if lies.first_q is not None:
        lse = np.array(lies.first_q, np.int64) * number
    else:
        lse = np.arange(problem.batch) * (problem.q_heads * _lse_rows(lies) * number)
    starts = np.array(problem.q_starts, np.int64)
    columns = GradientItem(
        steps=np.array(_steps_of(problem), np.int64),
        ranges=np.maximum(1, -(-np.array(problem.k_lengths, np.int64) // range_keys)),
        block=starts // QUERY_BLOCK,
        q_len=np.array(problem.q_lengths, np.int64),
        k_len=np.array(problem.k_lengths, np.int64),
        start=starts - problem.k_start,
        lse_at=lse,
        **at,
        **{f"s{x}_at": at[f"d{x}_at"] // size * number for x in "qkv"},
        index=np.arange(problem.batch) if problem.items is None else np.array(problem.items, np.int64),
    )
    return np.ascontiguousarray(np.stack(columns, axis=1))
