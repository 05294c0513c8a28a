"""From a problem and its arrays to a `Call`: schedule, kernel, arguments, table of items; only addresses are open."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from operator import sub
from typing import Any

import numpy as np

from ...arrays.array import STORAGE_BYTES, pages
from ...errors import ArgumentError, pass_on
from ...expressions.program import Program
from ...expressions.tree import Node, out_of_range
from ...host.machine import PRODUCTS, Isa, current_isa, level2_bytes, number_bytes
from ...host.rounding import standard
from ...problem.operands import Dense, PagedKeys, Rows, Strides
from ...problem.philox import drop_below
from ...problem.plan import Plan, Roofs, Run, plan_of
from ...problem.problem import LAYOUTS, TILE, Problem
from ...problem.work import all_pairs
from ..kernels.softmax import LOG4_E
from ..memory.operands import Paged, columns_of_keys, steps, words_of_keys
from ..memory.records import CALL, ENDLESS, ITEM, NEW, SCRATCH, STATE, Item, Record, arguments_of
from ..memory.shape import Shape
from ..runtime.compile import kernel_of, lock, symbol_of
from ..runtime.tuned import tuning_of
from ..runtime.workers import run_alone, run_tickets
from .schedule import Schedule, product_of, schedule

_KEPT = 4  # times the second-level cache: arrays of so many bytes stay in the caches from call to call


@standard
def prepare(problem: Problem, rows: Rows, keys: Dense | PagedKeys | Paged, threads: int, isa: Isa) -> Call:
    """Prepares everything that addresses don't change."""
    keys = Paged.of(keys) if isinstance(keys, PagedKeys) else keys
    how = schedule(problem, isa, threads, keys.strides(problem.key_dtype), tuning_of(isa))
    items = items_of(problem, how, rows, keys)
    words = words_of(problem, how, rows, keys) | {"item_count": len(items)}
    call = Call(problem, how, words, items, isinstance(keys, Paged) and keys.pages.lanes)
    call.machine = threads, isa.name
    return call


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """What a call on this machine would do."""
    how, shape = kernel_of_problem(problem, strides, threads, current_isa())
    run = Run(how.isa.name, symbol_of(shape), how.threads, how.panel, how.workspace_bytes, how.tuning.origin)
    measured = partial(measured_roofs, how.isa, "f32" if problem.widened else problem.storage, how.threads)
    return plan_of(problem, run, measured, exact=exact)


def measured_roofs(isa: Isa, storage: str, threads: int) -> Roofs:
    """Of this machine, where a plan is asked for them. No fork meanwhile: modules are imported, kernels compiled."""
    with lock:
        from ..runtime.roof import roofs

        return roofs(isa, storage, threads)


def kernel_of_problem(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[Schedule, Shape]:
    """How a problem over arrays runs, and what its kernel is specialised for; for any vector unit, this machine's or
    not.
    """
    how = schedule(problem, isa, threads, strides, tuning_of(isa))
    return how, _shape(problem, how, program_of(problem))


def _shape(problem: Problem, how: Schedule, program: Any, *, cached: bool = False) -> Shape:
    dropout, widened = problem.dropout > 0, problem.key_storage if problem.widened else None
    loops = how.tuning.fetching, how.tuning.register_tiles(how.isa)
    of_keys = cached, problem.quantised
    of_call = *of_keys, *loops, dropout, widened, problem.partial
    return Shape(how.kind, how.isa, how.storage, how.vectors, program, *of_call)


class Call:
    """A problem with layouts and strides fixed: only addresses are missing.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(
        self, problem: Problem, how: Schedule, words: dict[str, int], items: np.ndarray, cached: bool = False
    ) -> None:
        """`cached`: keys and values lie as in a cache."""
        self.problem, self.how, self.items = problem, how, items
        self.machine: tuple[int, str] | None = None  # threads and vector unit that it was prepared for
        self.program, self.sinks = program_of(problem), _sinks(problem)
        self.lookups = [] if self.program is None else self.program.lookups
        self.slots = None if self.program is None else self.program.host_words()
        if self.slots is not None:
            words |= {"numbers": self.slots[0].ctypes.data, "tables": self.slots[1].ctypes.data}
        if self.sinks is not None:
            words |= {"sinks": self.sinks.ctypes.data}
        self.shape = _shape(problem, how, self.program, cached=cached)
        self.loaded = weakref.ref(kernel_of(self.shape))
        self.seconds = _guessed_seconds(problem, how)
        wants = how.tuning.threading
        self.threads = how.threads if self.seconds > wants.inline_seconds else 1
        if "upcoming" in words:
            words["upcoming"] = self.threads
        record = arguments_of(how.kind)
        self.words_type, self.template = ctypes.c_int64 * len(record.names), template_of(record, words)
        self.region_seconds, self.inline_bytes = wants.region_seconds, wants.inline_bytes
        self.tickets = how.tickets if problem.value_dim and problem.q_heads else 0
        self.items_at = items.ctypes.data
        self.counts_at = 0  # address to which kernels add tiles and keys (layout.COUNTS); 0: they do not count
        self.items_type, self.items_bytes = ctypes.c_int64 * items.size, items.tobytes()
        self.groups = how.tickets // how.parts if how.parts > 1 else 0  # kv heads whose spans several tasks share
        self.partials_at = how.scratch_stride * self.threads
        self.scratch_size = self.partials_at + self.groups * how.partial_bytes

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        own = self.items.nbytes + len(self.items_bytes) + len(self.template)
        own += 0 if self.slots is None else sum(x.nbytes for x in self.slots)
        return own + (0 if self.program is None else sum(x.array.nbytes for x in self.program.tables))

    @property
    def heads_alone(self) -> int:
        """kv heads of a task that alone reads their keys and values, so that it may store them first; 0: others do."""
        return self.how.heads if self.how.kind == "decode" and self.how.parts == 1 else 0

    def items_for(self, k_lengths: Sequence[int], lists: list[int] | None = None) -> Any:
        """Its table of items for other lengths of keys, of no more spans, and lists of pages.

        The last query is at the last key.
        """
        items = self.items_type.from_buffer_copy(self.items_bytes)
        items[_K_LENS] = k_lengths
        items[_STARTS] = list(map(sub, k_lengths, self.problem.q_lengths))
        if lists is not None:
            items[_LISTS] = lists
        return items

    @property
    def kernel(self) -> Any:
        """Its kernel; loaded anew where it has been unloaded. Whoever runs it holds it meanwhile."""
        kernel = self.loaded()
        if kernel is None:
            kernel = kernel_of(self.shape)
            self.loaded = weakref.ref(kernel)
        kernel.used()
        return kernel

    def run(
        self,
        q: int,
        k: int,
        v: int,
        out: int,
        lse: int,
        items: int = 0,
        threads: int = 0,
        seed: int | None = None,
        state: tuple[int, int, int, int] | None = None,
        new: tuple[int, int] | None = None,
    ) -> None:
        """Fills out (and lse, unless 0) at these addresses; with a table of items, threads and a seed of the caller's,
        if given. One thread is given for short calls only: no signal comes between. `state`: the words that a partial
        problem has beside them (layout.FORWARD). `new`: the function with which tasks
        store new tokens first (heads_alone), and its arguments.
        """
        if not self.tickets:
            return
        wrong = arrived = ()
        words = self.words_type.from_buffer_copy(self.template)
        scratch = take_scratch(self.scratch_size)
        try:
            at = ctypes.addressof(scratch)
            if self.groups:
                arrived = (ctypes.c_int64 * self.groups)()
            if self.lookups:
                wrong = (ctypes.c_int64 * (2 * len(self.lookups)))()
            words[SCRATCH] = at
            words[CALL] = (
                q, k, v, out, lse, self.counts_at, items or self.items_at, at + self.partials_at,
                ctypes.addressof(arrived) if arrived else 0, ctypes.addressof(wrong) if wrong else 0,
                self.problem.seed if seed is None else seed,
            )  # fmt: skip
            if state is not None:
                words[STATE] = state
            if new is not None:
                words[NEW] = new
            if threads == 1:
                run_alone(self.kernel, words, self.tickets)
            else:
                many = threads or self.threads
                run_tickets(self.kernel, words, self.tickets, many, self.seconds, self.region_seconds)
        finally:
            give_scratch(scratch)
        raise_wrong(self.lookups, wrong)


_K_LENS, _STARTS, _LISTS = (slice(word, None, len(ITEM)) for word in (ITEM.k_len, ITEM.start, ITEM.pages))


def template_of(record: Record, words: dict[str, int]) -> bytes:
    """Arguments in their record."""
    template = np.zeros(len(record.names), np.int64)
    for name, value in words.items():
        template[record.word(name)] = value
    return template.tobytes()


def _sinks(problem: Problem) -> np.ndarray | None:
    """The logits of sinks in the unit of exponents."""
    if problem.sinks is None:
        return None
    kind = np.float64 if problem.storage == "f64" else np.float32
    return np.array([x * LOG4_E for x in problem.sinks], kind)


def _guessed_seconds(problem: Problem, how: Schedule) -> float:
    """Of one thread."""
    if how.kind == "decode":
        size = 1 if problem.quantised else STORAGE_BYTES[problem.key_storage]
        read = sum(problem.k_lengths) * problem.kv_heads * (problem.head_dim + problem.value_dim) * size
        return read / how.tuning.threading.read_bytes
    flops = all_pairs(problem) * 2 * (problem.head_dim + problem.value_dim) * (0.5 if problem.causal else 1.0)
    return flops / how.tuning.threading.flops


def raise_wrong(lookups: list[tuple[Node, int]], wrong: Any) -> None:
    """The first of the indices that kernels have noted as out of range."""
    for n, (node, dimension) in enumerate(lookups):
        if wrong[2 * n]:
            raise out_of_range(node, dimension, wrong[2 * n + 1])


def program_of(problem: Problem, *, backward: bool = False) -> Program | None:
    """The mask and score as a kernel wants them, with tables on the CPU."""
    program = problem.program
    if backward:
        program = Program.of(problem.mask, problem.score, problem.box(), backward=True)
    for table in () if program is None else program.tables:
        if table.tensor is not None:
            raise ArgumentError(
                f"{table.name}: expected an array on the CPU, as q; got one on {table.tensor.device}. Use .cpu()."
            )
    return program


# --- scratch

_scratches: deque[Any] = deque(maxlen=4)  # used again: fresh pages cost more than a small call


def take_scratch(size: int) -> Any:
    try:
        scratch = _scratches.pop()
    except IndexError:
        return _map_scratch(size)
    return scratch if len(scratch) >= size else _map_scratch(size)


def _map_scratch(size: int) -> Any:
    try:
        return (ctypes.c_char * size).from_buffer(pages(size))
    except OSError as error:
        pass_on(error, OSError)
        raise MemoryError(f"{size:,} bytes of scratch cannot be reserved: {error}") from error


def give_scratch(scratch: Any) -> None:
    """When nobody works in it any more. One that is not given back is freed."""
    if len(scratch) <= 256 << 20:
        _scratches.append(scratch)


# --- arguments and items


def words_of(problem: Problem, how: Schedule, rows: Rows, keys: Dense | Paged) -> dict[str, int]:
    """The kernel's arguments by name, without addresses; for any vector unit, this machine's or not."""
    c = LOG4_E if problem.score is not None else problem.scale * LOG4_E
    number = number_bytes(problem.storage)
    words = {
        "scratch_stride": how.scratch_stride,
        "limit": how.tickets,
        "lse_head": (rows.q.shape[0] if rows.layout == "lhd" else _padded_rows(problem)) * number,
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "causal": int(problem.causal),
        "c": bits_of(abs(c), number),
        "scale": bits_of(problem.scale, number),
        "k_start": problem.k_start,
        "flip": signs_of(number, PRODUCTS[product_of(problem, how.isa)]) if c < 0 else 0,
        "drop_below": drop_below(problem.dropout),
        "divisor": bits_of(problem.dropout_divisor, number),
    }
    words |= steps("q", rows.q.strides, rows.layout) | steps("out", rows.out_strides, rows.layout)
    words |= words_of_keys(keys) | dict(how.words)
    return words | (upcoming_of(problem, how, words) if how.kind == "forward" else {})


def upcoming_of(problem: Problem, how: Schedule, words: dict[str, int]) -> dict[str, int]:
    """What is fetched for the next task while one computes (cpu/kernels/prefetch.py): of keys a tile at most.

    Nothing of arrays that stay in the caches: there a wrong guess takes lines away from another thread.
    """
    own, keys = STORAGE_BYTES[problem.storage], STORAGE_BYTES[problem.key_storage]
    of_rows, of_keys = sum(problem.q_lengths) * problem.q_heads * own, sum(problem.k_lengths) * problem.kv_heads * keys
    if (of_rows + of_keys) * (problem.head_dim + problem.value_dim) < _KEPT * level2_bytes():
        return {}
    dense = words["page_size"] == ENDLESS
    sizes = (
        ("q", problem.head_dim, own, True),
        ("out", problem.value_dim, own, True),
        ("k", problem.head_dim, keys, dense),
        ("v", problem.value_dim, keys, dense),
    )
    lines = {
        f"{x}_lines": -(-dim * size // 64) * (known and words[f"{x}_column"] == size) for x, dim, size, known in sizes
    }
    groups = TILE // how.tuning.register_tiles(how.isa).keys[how.vectors - 1]  # of keys in a tile
    return lines | {
        "upcoming": how.threads,
        "next_positions": -(-how.panel // (groups * problem.group)),
        "next_keys": -(-TILE // (groups * how.panels)),
    }


def _padded_rows(problem: Problem) -> int:
    """Rows of an item in a padded batch."""
    return problem.rows if problem.rows is not None else problem.q_lengths[0] if problem.batch else 0


def bits_of(x: float, number: int) -> int:
    """A float of `number` bytes as the word that holds it."""
    return struct.unpack("<q", struct.pack("<d", x))[0] if number == 8 else struct.unpack("<i", struct.pack("<f", x))[0]


def signs_of(number: int, elements: int) -> int:
    """The sign bits of a unit of `number` bytes, as an int64."""
    bits = 8 * number // elements
    signs = sum(1 << (bits * (i + 1) - 1) for i in range(elements))
    return signs - (1 << 64) if signs >> 63 else signs


def items_of(problem: Problem, how: Schedule, rows: Rows, keys: Dense | Paged) -> np.ndarray:
    """The kernel's table of batch items, [item, word]: those that have tickets."""
    batch, number = problem.batch, number_bytes(problem.storage)
    q_lengths = np.array(problem.q_lengths, np.int64)
    if how.kind == "decode":
        blocks = np.minimum(q_lengths, 1) * how.parts
    else:
        blocks = -(-q_lengths * problem.group // how.block_rows)
    tickets = blocks * (problem.kv_heads // how.heads)
    if rows.first is not None:
        first, axis, lse = np.array(rows.first, np.int64), LAYOUTS[rows.layout][-2], number
    else:
        first, axis = np.arange(batch, dtype=np.int64), LAYOUTS[rows.layout][0]
        lse = problem.q_heads * _padded_rows(problem) * number
    items = Item(
        first=np.cumsum(tickets) - tickets,
        blocks=blocks,
        q_len=q_lengths,
        k_len=np.array(problem.k_lengths, np.int64),
        start=np.array(problem.q_starts, np.int64) - problem.k_start,
        q_at=first * rows.q.strides[axis],
        out_at=first * rows.out_strides[axis],
        lse_at=first * lse,
        index=np.arange(batch) if problem.items is None else np.array(problem.items, np.int64),
        **columns_of_keys(keys, batch),
    )
    table = np.stack(items, axis=1)
    if problem.rows is not None and batch and not problem.partial:
        table = np.concatenate([table, _unused_rows(problem, how, rows, items)])
        tickets = table[:, ITEM.blocks] * problem.kv_heads
    # an item without tickets shares its first ticket with the next: bisection then finds the last, so only items with
    # work are left
    return np.ascontiguousarray(table[tickets > 0]) if batch else table


def _unused_rows(problem: Problem, how: Schedule, rows: Rows, items: Item) -> np.ndarray:
    """Items of the rows past q_lengths: they see no key."""
    used, number = items.q_len, number_bytes(problem.storage)
    q_len = (problem.rows or 0) - used
    blocks = -(-q_len * problem.group // how.block_rows)
    tickets = blocks * problem.kv_heads
    before = items.first[-1] + items.blocks[-1] * problem.kv_heads
    q_row, out_row = rows.strides(-2)
    rest = items._replace(
        first=before + np.cumsum(tickets) - tickets,
        blocks=blocks,
        q_len=q_len,
        k_len=np.zeros_like(used),
        q_at=items.q_at + used * q_row,
        out_at=items.out_at + used * out_row,
        lse_at=items.lse_at + used * number,
        index=np.full_like(used, -1),
    )
    return np.stack(rest, axis=1)
