"""Chosen keys: a list of numbers of keys becomes tiles, each with the keys that are chosen of it, side by side.

A slot is a key of such a tile. Where a product sums units of several keys, a unit's other keys have slots, too: the
number of the first that is chosen, and ABSENT. They score as it does, weigh nothing, and their values are zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

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


@contextlib.contextmanager
def _each_slot(k: Function, slots: Value, count: Value, key: Variable) -> Iterator[tuple[Value, Value]]:
    """Loops over slots; yields the number, among all keys, of what is chosen of each one's pair, and the slot.

    key: the number of the first slots' key; it goes on.
    """
    with k.range(0, count) as slot:
        is_absent = k.load(I64, slots, slot * 8) >= ABSENT
        yield key.get() - k.zext(is_absent & (slot & 1).differs(0), I64), slot
        key.set(key.get() + k.zext(is_absent ^ 1, I64))


def spread_tile(module: Module, s: Shape) -> Any:
    """scores[slot, panel] = joint[key, panel] of the slots of a tile; an absent key scores as its partner does.

    check is as score_tile leaves it. key: the number, among all that were scored, of the first; returns that of the
    next tile's first.
    """
    k = module.function("spread_tile", prototype("joint* scores* check* slots* key count"), I64)
    p, starts, combine = k.p, (float("-inf"), 0.0, float("inf")), combined_by(k, s)
    found = [[k.variable(k.const(x, s.vector)) for x in starts] for _ in range(s.vectors)]
    key = k.variable(p["key"])
    with _each_slot(k, p["slots"], p["count"], key) as (row, slot):
        for v in range(s.vectors):
            x = k.load(s.vector, p["joint"], row * s.row_bytes + s.lane_offset(v))
            k.store(x, p["scores"], slot * s.row_bytes + s.lane_offset(v))
            for variable, of in zip(found[v], combine, strict=True):
                variable.set(of(x, variable.get()))
    for v in range(s.vectors):
        for i, variable in enumerate(found[v]):
            k.store(variable.get(), p["check"], i * s.row_bytes + s.lane_offset(v))
    return k.finish(key.get())


class SlotFunctions(NamedTuple):
    """The functions of a module over chosen keys."""

    choose: Any
    choose_keys: Any  # without those that are absent; None where none is
    locate: Any

    @classmethod
    def of(cls, module: Module, s: Shape) -> SlotFunctions:
        """Writes the functions."""
        keys = choose_tile(module, 1) if s.chosen_unit > 1 else None
        return cls(choose_tile(module, s.chosen_unit), keys, locate_chosen(module))


class Choice:
    """A task's walk through its list of chosen keys, tile by tile."""

    def __init__(self, task: Any, functions: SlotFunctions) -> None:
        self.task = task
        self.k = task.k
        self.functions = functions
        self.unit = task.s.chosen_unit
        self.base = self.slots = task.part("slots")
        self.keys = self.base if functions.choose_keys is None else task.part("chosen_keys")
        self.zeros = task.part("zeros")
        self.counts = self.k.buffer(I64, SPAN // TILE)

    def fill(self, at: Variable, end: Value) -> tuple[Value, Value, Value]:
        """Fills slots with the keys below `end`, from the list's next one on, of as many whole tiles as have room; and
        `keys` with the keys alone.

        Returns how many tiles, each of whose slots `counts` has, how many slots these are, and how many keys.
        """
        k = self.k
        tiles, filled, keys = (k.variable(k.i64(0)) for _ in range(3))
        with k.forever() as leave_if:
            key = self.key_at(at.get())
            leave_if(key >= end)
            past = k.min((key & -TILE) + TILE, end)
            room = (k.i64(TILE) - filled.get()) // self.unit  # keys that have room in any case
            is_full = self.key_at(at.get(), room) < past
            leave_if(is_full & (filled.get() > 0))
            taken = k.call(self.functions.choose, k.pointer(at.get()), past, k.at(self.base, filled.get() * 8))
            if self.unit > 1:
                k.call(self.functions.choose_keys, k.pointer(at.get()), past, k.at(self.keys, keys.get() * 8))
            keys.set(keys.get() + (taken & 0xFFFF))
            at.set(at.get() + (taken & 0xFFFF) * 4)
            k.store(taken >> 16, self.counts, tiles.get() * 8)
            tiles.set(tiles.get() + 1)
            filled.set(filled.get() + (taken >> 16))
        return tiles.get(), filled.get(), keys.get()

    def each_slot(self, key: Variable, first: Value, count: Value) -> Any:
        """Loops over the slots of a tile from `first` on, as _each_slot()."""
        return _each_slot(self.k, self.k.at(self.base, first * 8), count, key)

    def key_at(self, address: Value, ahead: Value | int = 0) -> Value:
        """Returns the number of a list's next key, or of one that many further."""
        return self.k.zext(self.k.load(I32, self.k.pointer(address), ahead * 4), I64)

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
        k.call(self.functions.locate, k.p["a"], places, pages, base, page_bytes, row, slots, count + AHEAD, zeros)

    def each_absent(self, count: Value) -> Any:
        """Loops over pairs of slots one of which is absent; yields it and its partner."""
        return _each_absent(self.k, self.slots, count)


@contextlib.contextmanager
def _each_absent(k: Function, slots: Value, count: Value) -> Iterator[tuple[Value, Value]]:
    with k.range(0, count) as i, k.when(k.load(I64, slots, i * 8) >= ABSENT):
        yield i, i ^ 1
