"""The region that draws tickets, with which every kernel starts, and what the tasks of attention kernels share."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from ...host.machine import Isa
from ...problem.problem import SPAN
from ..language.prototypes import prototype
from ..language.vector import F32, F64, I32, I64, PTR, VOID, Function, Module, Value
from ..memory.records import ARGUMENTS, COUNTS, HEAD, ITEM, ITEM_BYTES, LEFT, TICKET, WORKER, Item, Record
from ..memory.shape import Shape
from ..memory.words import Constants, Words


class Box(NamedTuple):
    """Queries of one batch item: first and last head, first and last position."""

    heads: tuple[Value, Value]
    positions: tuple[Value, Value]


class Seen(NamedTuple):
    """The keys of a tile that queries may see, [first, end); nothing is hidden of those of [clear, full)."""

    first: Value
    end: Value
    clear: Value
    full: Value

    def clear_to(self, k: Function, full: Value) -> Seen:
        """Returns the same keys, clear up to `full` alone; where none of them is, [clear, full) is empty at `first`."""
        return Seen(self.first, self.end, *(k.select(full > self.clear, x, self.first) for x in (self.clear, full)))


class Work:
    """Names for what the function that does one ticket works with: arguments, scratch, the ticket's batch item."""

    def __init__(self, k: Function, s: Shape, visibility: Any, extent: Any) -> None:
        """`visibility` and `extent` are functions of the module, or None where nothing can be hidden."""
        self.k, self.s, self.scratch = k, s, k.p["scratch"]
        self.visibility, self.extent = visibility, extent
        self.a = Constants(k, ARGUMENTS[s.kind], k.p["a"])
        self.item = self._find_item()

    def part(self, name: str, of: Value | None = None) -> Value:
        """Returns the address of a part of the scratch, or of a panel's memory."""
        return self.k.at(self.scratch if of is None else of, getattr(self.a, f"at_{name}"))

    def scale(self) -> Value:
        """Returns what a score is multiplied by to become the exponent of a weight."""
        return self._number(self.a.c)

    def divisor(self) -> list[Value]:
        """Returns what dropout divides a row's output by; nothing without it."""
        return [self._number(self.a.divisor)] if self.s.dropout else []

    def _number(self, word: Value) -> Value:
        return word.bits(F64) if self.s.wide else self.k.trunc(word, I32).bits(F32)

    def limit(self, position: Value) -> Value:
        """Counts the keys that the item's query at a position sees."""
        k = self.k
        seen = k.max(k.min(self.item.start + position + 1, self.item.k_len), k.i64(0))
        return k.select(self.a.causal.differs(0), seen, self.item.k_len)

    def row_of(self, name: str, head: Value, position: Value, item: Any = None) -> Value:
        """Returns the address of a row of q, out or lse; of another item than the ticket's, if one is given."""
        a = self.a
        start = getattr(a, name) + getattr(item or self.item, f"{name}_at")
        return start + head * getattr(a, f"{name}_head") + position * getattr(a, f"{name}_row")

    def keys_of(self, name: str, head: Value) -> Value:
        """Returns a kv head's keys ("k") or values ("v")."""
        return self.k.pointer(self.keys_at(name, head, self.item))

    def keys_at(self, name: str, head: Value, item: Any) -> Value:
        """Returns the address of an item's."""
        return getattr(self.a, name) + getattr(item, f"{name}_at") + head * getattr(self.a, f"{name}_head")

    def list_scales(self, stage: Any, name: str, head: Value, lists: tuple[Value, Value], *tile: Value) -> None:
        """Stages scales of keys ("k") or values ("v") of a kv head, which are codes in arrays, from a key to another.

        lists: room for addresses, and where scales go.
        """
        k, a = self.k, self.a
        of_head, page, row = (getattr(a, f"{name}_scale_{x}") for x in ("head", "page", "row"))
        base = k.pointer(getattr(a, f"{name}_scales") + head * of_head)
        k.call(stage, k.p["a"], *lists, k.pointer(self.item.pages), base, page, row, *tile)

    def count(self, full: Value, keys: Value) -> None:
        """Counts, in a counting run, a tile of `keys` keys, the first `full` of which all see; for plan() to agree
        with.
        """
        k, counts = self.k, self.a.counts
        with k.when(counts.differs(0)):
            mixed = k.zext(full < keys, I64)
            for name, amount in (("full", mixed ^ 1), ("mixed", mixed), ("panel_keys", keys)):
                k.fetch_add(k.pointer(counts), COUNTS.offset(name), amount)

    @contextlib.contextmanager
    def visible_spans(self, first: Value, last: Value, box: Callable[[], Box]) -> Iterator[tuple[Value, Value]]:
        """Yields the spans of keys [first, last) that queries of a box may see.

        Where all are hidden, steps double, and halve before what is not.
        """
        k = self.k
        if self.visibility is None:
            with k.range(first, last, SPAN) as start:
                yield start, k.min(start + SPAN, last)
            return
        at, step = k.variable(first), k.variable(k.i64(SPAN))
        with k.forever() as leave_if:
            leave_if(at.get() >= last)
            start = at.get()
            end = k.min(start + step.get(), last)
            with k.either(self.seen_of(box(), start, end).equals(0)) as (skip, maybe):
                with skip:
                    at.set(end)
                    step.set(step.get() << 1)
                with maybe, k.either(step.get() > SPAN) as (far, near):
                    with far:
                        step.set(step.get() >> 1)
                    with near:
                        yield start, end
                        at.set(end)

    def seen_of(self, box: Box, low: Value, high: Value) -> Value:
        """Returns whether keys [low, high) are hidden from (0), partly visible to (1) or visible to (2) a box."""
        if self.visibility is None:
            return self.k.i64(2)
        offset, index = self.a.k_start, self.item.index
        low, high = low + offset, high - 1 + offset
        return self.k.call(self.visibility, self.k.p["a"], index, *box.heads, *box.positions, low, high)

    def extent_of(self, box: Box, start: Value, count: Value) -> tuple[Value, Value, Value]:
        """Returns which of the keys [start, start + count) a box may see, from and to, and up to where all are."""
        first, end, clear, full = self.parts_of(box, start, count)
        return first, end, self.k.select(clear.equals(first), full, first)

    def parts_of(self, box: Box, start: Value, count: Value) -> Seen:
        """Returns which keys of [start, start + count) a box may see, and the first run of them that all of it sees."""
        k, index = self.k, self.item.index
        seen = self.seen_of(box, start, start + count)
        packed = k.variable(k.select(seen.equals(0), k.i64(0), count << 8 | count << 16))
        with k.when(seen.equals(1)):
            first = start + self.a.k_start
            packed.set(k.call(self.extent, k.p["a"], index, *box.heads, *box.positions, first, count))
        word = packed.get()
        return Seen(word & 255, (word >> 8) & 255, word >> 24, (word >> 16) & 255)

    def row_of_ticket(self, table: Value, count: Value, size: int, first: int, number: Value) -> Value:
        """Returns the last row of a table, of `size` bytes each, whose first ticket is not above this one, by
        bisection.
        """
        k = self.k
        low, high = k.variable(k.i64(0)), k.variable(count)
        with k.forever() as leave_if:
            leave_if(high.get() - low.get() <= 1)
            middle = (low.get() + high.get()) >> 1
            before = k.load(I64, table, middle * size + first) <= number
            low.set(k.select(before, middle, low.get()))
            high.set(k.select(before, high.get(), middle))
        return k.at(table, low.get() * size)

    def _find_item(self) -> Any:
        return self.item_of(self.k.p["number"])

    def item_of(self, number: Value) -> Any:
        """Returns the last batch item whose first ticket is not above this one."""
        k, a = self.k, self.a
        at = self.row_of_ticket(k.pointer(a.items), a.item_count, ITEM_BYTES, 8 * ITEM.first, number)
        return Item._make(k.load(I64, at, 8 * word) for word in ITEM)

    def item_of_chosen(self, number: Value) -> Any:
        """Returns the query of a ticket over chosen keys: head by head, so that a head's keys stay in the caches."""
        k, table = self.k, self.k.pointer(self.a.items)
        blocks = k.load(I64, table, 8 * ITEM.blocks)  # all items have as many
        at = k.at(table, number // blocks % self.a.item_count * ITEM_BYTES)
        return Item._make(k.load(I64, at, 8 * word) for word in ITEM)


def call_at(k: Function, address: Value, *args: Value) -> None:
    """Calls a function without result, at an address."""
    kind = ir.FunctionType(VOID, [a.type for a in args]).as_pointer()
    k.b.call(k.b.inttoptr(address.x, kind), [a.x for a in args])


def attention_module(parts: Any, task: Any, symbol: str) -> Module:
    """Writes a kernel whose tickets are each a `task` over the functions of `parts`; `symbol` is its public name."""
    k = parts.module.function("task", prototype("a* scratch* number"), special=True)
    task(k, parts).run()
    entry(parts.module, parts.shape.isa, region(parts.module, k.finish()), symbol)
    return parts.module


def region(module: Module, task: Any) -> Any:
    """Writes a worker's share: a scratch of its own, then task after task until the region's limit."""
    k = module.function("region", {"a": PTR}, special=True)
    a = k.p["a"]
    words = Words(k, Record(*HEAD), a)
    worker = k.fetch_add(a, 8 * WORKER, 1)
    scratch = k.at(k.pointer(words.scratch), worker * words.scratch_stride)
    with k.forever() as leave_if:
        ticket = k.fetch_add(a, 8 * TICKET, 1)
        leave_if(ticket >= words.limit)
        k.call(task, a, scratch, ticket)
    k.fetch_add(a, 8 * LEFT, 1)
    return k.finish()


def look(k: Function, isa: Isa, counter: Value) -> Value:
    """Reads a counter that other threads add to; what they wrote before is seen after."""
    if isa.arch == "x86_64":
        return k.fetch_add(counter, 0, 0)
    return Value(k, k.b.load_atomic(counter.x, "acquire", 8, typ=I64))


def pause(k: Function, isa: Isa) -> None:
    """Tells a core that it waits for another."""
    if isa.arch == "x86_64":
        k.intrinsic("llvm.x86.sse2.pause", VOID)
    else:
        k.intrinsic("llvm.aarch64.hint", VOID, k.const(1, I32))  # yield


def entry(module: Module, isa: Isa, run: Any, symbol: str) -> Any:
    """Writes the public functions, `symbol` and what `joined` makes of it: the caller's rounding mode and flush-to-zero
    are put aside.
    """
    k = module.function(symbol, {"a": PTR}, public=True)
    if isa.arch == "x86_64":
        with k.b.goto_entry_block():
            saved, ours = Value(k, k.b.alloca(I32)), Value(k, k.b.alloca(I32))
        k.intrinsic("llvm.x86.sse.stmxcsr", VOID, saved)
        k.store(k.const(0x1F80, I32), ours)
        k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, ours)
        k.call(run, k.p["a"])
        k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, saved)
    else:
        saved = k.intrinsic("llvm.aarch64.get.fpcr", I64)
        k.intrinsic("llvm.aarch64.set.fpcr", VOID, k.i64(0))
        k.call(run, k.p["a"])
        k.intrinsic("llvm.aarch64.set.fpcr", VOID, saved)
    share = k.finish()
    joined(module, isa, share, symbol)
    return share


def joined(module: Module, isa: Isa, share: Any, symbol: str) -> None:
    """Writes the public function `symbol`_joined: a share of the region, then a wait until nobody is inside.

    One call for both, because Python sees signals between calls only. Who comes later finds no ticket and touches the
    words alone.
    """
    k = module.function(f"{symbol}_joined", {"a": PTR}, public=True)
    a = k.p["a"]
    k.call(share, a)
    with k.forever() as leave_if:
        left = look(k, isa, k.at(a, 8 * LEFT))  # before `worker`: then all who had come by that time have left
        leave_if(left.equals(look(k, isa, k.at(a, 8 * WORKER))))
        if sys.platform != "win32":
            k.intrinsic("sched_yield", I32)
    k.finish()
