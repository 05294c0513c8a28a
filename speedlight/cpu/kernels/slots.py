"""Chosen keys: a list of numbers of keys becomes tiles, each with the keys that are chosen of it, side by side.

A slot is a key of such a tile. Where a product sums units of several keys, a unit's other keys have slots, too: the
number of the first that is chosen, and ABSENT. They score as it does, weigh nothing, and their values are zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ...problem.problem import SPAN, TILE
from ..language.prototypes import prototype
from ..language.vector import I32, I64, PTR, Function, Module, Value, Variable, vec
from ..memory.records import AHEAD, ENDLESS, field
from ..memory.shape import Shape
from .softmax import combined_by

ABSENT = 1 << 40  # a bit of a slot
_NUMBER = ABSENT - 1
_AT_ONCE = 8


def number_of(slot: Value) -> Value:
    """Returns the number of the key of a slot, or of each of a vector."""
    return slot & _NUMBER


def choose_tile(module: Module, unit: int) -> Any:
    """Fills slots[] with the chosen keys below `end`, in units of so many keys, then with AHEAD keys that come next.

    Returns how many keys are chosen, and how many slots they take, << 16.
    """
    k = module.function(f"choose_{unit}", prototype("list* end slots*"), I64)
    p = k.p
    taken, filled, opened = k.variable(k.i64(0)), k.variable(k.i64(0)), k.variable(k.i64(-1))
    with k.forever() as leave_if:
        key = k.zext(k.load(I32, p["list"], taken.get() * 4), I64)
        leave_if(key >= p["end"])
        if unit == 1:
            k.store(key, p["slots"], taken.get() * 8)
        else:
            _fill_unit(k, unit, key, filled, opened)
        taken.set(taken.get() + 1)
    count = taken.get() if unit == 1 else filled.get()
    last = k.zext(k.load(I32, p["list"], (taken.get() - 1) * 4), I64)
    for n in range(0, AHEAD, _AT_ONCE):
        wide = vec(I64, _AT_ONCE)
        later = k.zext(k.load(vec(I32, _AT_ONCE), p["list"], (taken.get() + n) * 4), wide)
        is_key = later < k.const(2**31 - 1, wide)
        k.store(k.select(is_key, later, k.splat(last, _AT_ONCE)), p["slots"], (count + n) * 8)
    return k.finish(taken.get() | count << 16)


def _fill_unit(k: Function, unit: int, key: Value, filled: Any, opened: Any) -> None:
    """Fills the slot of a key; of a new unit also those of the others."""
    first, slots = key & -unit, k.p["slots"]
    with k.when(first.differs(opened.get())):
        for n in range(unit):
            k.store(key | ABSENT, slots, (filled.get() + n) * 8)
        filled.set(filled.get() + unit)
        opened.set(first)
    k.store(key, slots, (filled.get() - unit + (key - first)) * 8)


def locate_chosen(module: Module) -> Any:
    """places[i] = address of the key or value of slots[i], for all below `count`; `zeros` of what is ABSENT, if there
    are any.
    """
    words = "a* places* pages* base* page_bytes row slots* count zeros*"
    k = module.function("locate_chosen", prototype(words))
    p = k.p
    size, fixed, ring = (k.load(I64, p["a"], field(f"page_{n}")) for n in ("size", "fixed", "ring"))
    base, zeros = (Value(k, k.b.ptrtoint(p[x].x, I64)) for x in ("base", "zeros"))
    has_zeros = zeros.differs(0)
    with k.either(size.equals(ENDLESS)) as (dense, paged):
        with dense:
            start = base + k.load(I64, p["pages"]) * p["page_bytes"]
            wide = vec(I64, _AT_ONCE)
            with k.range(0, p["count"], _AT_ONCE) as i:
                slot = k.load(wide, p["slots"], i * 8)
                address = k.splat(start, _AT_ONCE) + number_of(slot) * k.splat(p["row"], _AT_ONCE)
                is_absent = (slot >= ABSENT) & k.splat(has_zeros, _AT_ONCE)
                k.store(k.select(is_absent, k.splat(zeros, _AT_ONCE), address), p["places"], i * 8)
        with paged, k.range(0, p["count"]) as i:
            slot = k.load(I64, p["slots"], i * 8)
            number = number_of(slot)
            page = number // size
            place = k.select(page >= fixed, fixed + (page - fixed) % ring, page)
            inside = (number - page * size) * p["row"]
            address = base + k.load(I64, p["pages"], place * 8) * p["page_bytes"] + inside
            k.store(k.select((slot >= ABSENT) & has_zeros, zeros, address), p["places"], i * 8)
    return k.finish()


def spread_tile(module: Module, s: Shape) -> Any:
    """scores[slot, panel] = joint[key, panel] of the slots of a tile; an absent key scores as its partner does.

    check is as score_tile leaves it. key: the number, among all that were scored, of the first; returns that of the
    next tile's first.
    """
    k = module.function("spread_tile", prototype("joint* scores* check* slots* key count"), I64)
    p, starts, combine = k.p, (float("-inf"), 0.0, float("inf")), combined_by(k, s)
    found = [[k.variable(k.const(x, s.vector)) for x in starts] for _ in range(s.vectors)]
    key = k.variable(p["key"])
    with k.range(0, p["count"]) as slot:
        is_absent = k.load(I64, p["slots"], slot * 8) >= ABSENT
        row = key.get() - k.zext(is_absent & (slot & 1).differs(0), I64)
        for v in range(s.vectors):
            x = k.load(s.vector, p["joint"], row * s.row_bytes + s.lane_offset(v))
            k.store(x, p["scores"], slot * s.row_bytes + s.lane_offset(v))
            for variable, of in zip(found[v], combine, strict=True):
                variable.set(of(x, variable.get()))
        key.set(key.get() + k.zext(is_absent ^ 1, I64))
    for v in range(s.vectors):
        for i, variable in enumerate(found[v]):
            k.store(variable.get(), p["check"], i * s.row_bytes + s.lane_offset(v))
    return k.finish(key.get())


class Choice:
    """A task's walk through its list of chosen keys, tile by tile."""

    def __init__(self, task: Any, choose: Any, locate: Any, choose_keys: Any = None) -> None:
        self.task, self.k, self.choose, self.locate_slots, self.choose_keys = task, task.k, choose, locate, choose_keys
        self.base = self.slots = task.part("slots")
        self.keys = self.base if choose_keys is None else task.part("chosen_keys")
        self.zeros, self.counts = task.part("zeros"), self.k.buffer(I64, SPAN // TILE)
        self.unit = task.s.chosen_unit

    def fill(self, at: Variable, end: Value) -> tuple[Value, Value, Value]:
        """Fills slots with the keys below `end`, from the list's next one on, of as many whole tiles as have room; and
        `keys` with the keys alone.

        Returns how many tiles, each of whose slots `counts` has, how many slots these are, and how many keys.
        """
        k = self.k
        tiles, filled, keys = (k.variable(k.i64(0)) for _ in range(3))
        with k.forever() as leave_if:
            key = self.next_key(at)
            leave_if(key >= end)
            past = k.min((key & -TILE) + TILE, end)
            room = (k.i64(TILE) - filled.get()) // self.unit  # keys that have room in any case
            is_full = k.zext(k.load(I32, k.pointer(at.get()), room * 4), I64) < past
            leave_if(is_full & (filled.get() > 0))
            taken = k.call(self.choose, k.pointer(at.get()), past, k.at(self.base, filled.get() * 8))
            if self.unit > 1:
                k.call(self.choose_keys, k.pointer(at.get()), past, k.at(self.keys, keys.get() * 8))
            keys.set(keys.get() + (taken & 0xFFFF))
            at.set(at.get() + (taken & 0xFFFF) * 4)
            k.store(taken >> 16, self.counts, tiles.get() * 8)
            tiles.set(tiles.get() + 1)
            filled.set(filled.get() + (taken >> 16))
        return tiles.get(), filled.get(), keys.get()

    def spread(self, first_key: Variable, first: Value, count: Value, move: Callable[[Value, Value], None]) -> None:
        """Calls move(key, slot) for the slots of a tile, from `first` on: `key` is the number, among all keys, of what
        is chosen of the slot's unit; `first_key` goes on.
        """
        k = self.k
        with k.range(0, count) as slot:
            is_absent = k.load(I64, self.base, (first + slot) * 8) >= ABSENT
            after = is_absent & (slot & 1).differs(0)
            move(first_key.get() - k.zext(after, I64), slot)
            first_key.set(first_key.get() + k.zext(is_absent ^ 1, I64))

    def next_key(self, at: Variable) -> Value:
        """Returns the number of the list's next key."""
        return self.k.zext(self.k.load(I32, self.k.pointer(at.get())), I64)

    @contextlib.contextmanager
    def each_tile(self, tiles: Value) -> Iterator[tuple[Value, Value]]:
        """Loops over the tiles that were filled; yields the first slot of each, and how many it has."""
        k = self.k
        first = k.variable(k.i64(0))
        with k.range(0, tiles) as n:
            count = k.load(I64, self.counts, n * 8)
            yield first.get(), count
            first.set(first.get() + count)

    def begin(self, first: Value) -> None:
        """Turns to the slots from this one on."""
        self.slots = self.k.at(self.base, first * 8)

    def clear_zeros(self, size: Value) -> None:
        """Clears what stands for absent values."""
        if self.unit > 1:
            k = self.k
            with k.range(0, size, 64) as at:
                k.store(k.const(0, vec(I64, 8)), self.zeros, at)

    def locate(
        self, places: Value, of_values: bool, base: Value, page_bytes: Value, row: Value, count: Value, slots: Value
    ) -> None:
        """Finds the addresses of slots, or of keys alone, and of what is fetched ahead."""
        k = self.k
        null = Value(k, k.b.inttoptr(k.i64(0).x, PTR))
        zeros = self.zeros if of_values and self.unit > 1 else null
        pages = k.pointer(self.task.item.pages)
        k.call(self.locate_slots, k.p["a"], places, pages, base, page_bytes, row, slots, count + AHEAD, zeros)

    def each_absent(self, count: Value) -> Any:
        """Loops over pairs of slots one of which is absent; yields it and its partner."""
        return _each_absent(self.k, self.slots, count)


@contextlib.contextmanager
def _each_absent(k: Function, slots: Value, count: Value) -> Iterator[tuple[Value, Value]]:
    with k.range(0, count) as i, k.when(k.load(I64, slots, i * 8) >= ABSENT):
        yield i, i ^ 1
