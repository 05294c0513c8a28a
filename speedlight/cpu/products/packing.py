"""Units of keys and values: steps through them, and tiles of them copied to scratch: gathered from pages or strides,
widened, made units.

`places` are addresses of the pieces (kernels/addresses.py); each function fills tile[count, units].
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from llvmlite import ir

from ..language import conversions
from ..language.functions import like
from ..language.prototypes import prototype
from ..language.vector import F32, I16, I32, PTR, Function, Module, Value, vec
from ..memory.formats import Int4
from ..memory.records import BLOCK, TILE
from ..memory.shape import Shape


class KeyRun(NamedTuple):
    """Units [first, end) of rows of keys, `step` of them at a time: so many `bytes` of a row as load(row, t) gives
    them; once transposed, columns(found, i) has the vectors of keys of the i-th `lanes` units.
    """

    first: Value
    end: Value
    step: int
    bytes: int
    load: Callable[[Value, Value], Value]
    columns: Callable[[list[Value], int], list[Value]]


class UnitLoader(Protocol):
    """Loads units of rows and of blocks: the part of a product that staging needs."""

    s: Shape

    def load_units(self, k: Function, row: Value, t: Value, *, stored: bool = False) -> Value: ...

    def load_unit(
        self, k: Function, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
    ) -> Value: ...

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]: ...

    def key_unit(self, k: Function, block: Value, t: Value, key: Value) -> Value: ...

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None: ...


class CacheValues(ABC):
    """Base of products: how they load a cache's values, each unit from a row of its own unless they say otherwise."""

    @property
    def columns_together(self) -> int:
        """Counts vectors of columns side by side that are loaded faster together than one by one; 1: none are."""
        return 1

    def value_offset(self, i: Value, row: Value) -> Value:
        """Returns the bytes from a block's first values to where unit i is loaded; `row`: of a row that is."""
        return i * row

    @abstractmethod
    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        """Returns where unit i of a block's values lies, from its row on, as load_values takes it."""

    @abstractmethod
    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        """Loads one vector of columns of `count` units of values: of a block's row, or of keys' `rows`."""

    def load_columns(
        self, k: Function, rows: list[Value], columns: Sequence[Value], count: int = 1, *, adjoin: bool
    ) -> list[list[Value]]:
        """Loads as load_values() does vectors of columns, which lie side by side if they `adjoin`."""
        return [self.load_values(k, rows, x, count) for x in columns]

    def pack_scaled(self, k: Function, weights: list[Value]) -> Value:
        """Packs the weights of a unit's keys, lane by lane, that scales of codes have multiplied."""
        raise NotImplementedError

    def pack_scaled_row(self, k: Function, weights: list[Value]) -> Value:
        """Packs vectors of weights, one after another, that scales of codes have multiplied."""
        raise NotImplementedError


# the bits of -0: where scales of codes may be negative, just this hides a key
HIDDEN = -(1 << 31)


class NumberWeights:
    """Weights as numbers, a unit each: of products of numbers, and of codes until scales have multiplied them."""

    s: Shape

    @property
    def row_weight(self) -> ir.Type:
        return self.s.number

    def pack_weights(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        return total + unit

    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        return k.select(keep[0], unit, self._dropped(k, unit))

    def drop_row(self, k: Function, weights: Value, keep: Value) -> Value:
        return k.select(keep, weights, self._dropped(k, weights))

    def _dropped(self, k: Function, weights: Value) -> Value:
        """Returns +0 for weights, NaN for NaN, and -0 for that of a hidden key."""
        zero = weights * 0.0
        if not self.s.lists_scales:
            return zero
        # scales, which may be negative, have multiplied these weights
        is_hidden = weights.bits(self.s.ivector).equals(HIDDEN)
        return k.select(is_hidden, zero, k.abs(zero))


class CodeLoader(UnitLoader, Protocol):
    """Loads units of a cache's values, which are codes."""

    units_per_load: int

    @property
    def columns_together(self) -> int: ...

    def value_offset(self, i: Value, row: Value) -> Value: ...

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]: ...

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]: ...

    def load_columns(
        self, k: Function, rows: list[Value], columns: Sequence[Value], count: int = 1, *, adjoin: bool
    ) -> list[list[Value]]: ...

    def value_of(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]: ...


@contextlib.contextmanager
def summed_together(k: Function, s: Shape, first: Value, end: Value) -> Iterator[tuple[Value, Value]]:
    """Yields from and to which units [first, end) are summed together: all, where that is one by one."""
    if s.together == 1:
        yield first, end
    else:
        with k.range(first, end, s.together) as start:
            yield start, k.min(start + s.together, end)


def each_unit(
    k: Function, count: Value, body: Callable[..., None], *, unrolled: bool = False, loads: Sequence[int] = ()
) -> None:
    """Calls body(t) of `count` units, one after another; before, body(t, n) of those that are loaded n at a time."""
    if unrolled:
        k.unrolled(0, count, body)
        return
    first: Value | int = 0
    for size in loads:
        end = count & -size
        with k.range(first, end, size) as t:
            body(t, size)
        first = end
    with k.range(first, count) as t:
        body(t)


# `first`: of a part of keys, how many units the part before has; else 0
TILE_WORDS = "tile* places* row column count length units first"


def stage_rows(product: UnitLoader, module: Module) -> Any:
    """tile[count, units] from rows of any stride and narrower type.

    Of a cache, rows are of units: of several keys each, where those are multiplied together.
    """
    s, k = product.s, module.function("stage_rows", prototype(TILE_WORDS))
    p = k.p
    in_units = s.cached and s.elements > 1  # units as they are
    whole = p["length"] // s.lanes * s.lanes if in_units else s.whole_units(p["length"])
    end = whole if s.cached else k.select(p["column"].equals(s.key_bytes), whole, k.i64(0))
    together = s.piece // s.elements if s.cached else s.piece
    filled, first = filled_units(k, s, p["length"]), p["first"] if s.in_parts else k.i64(0)
    with k.range(0, p["count"]) as j:
        source = k.load(PTR, p["places"], j // together * 8)
        source = k.at(source, j % together * p["row"]) if s.cached else source
        target = k.at(p["tile"], (j * p["units"] + first) * s.number_bytes)
        with k.range(0, end, s.lanes) as t:
            k.store(product.load_units(k, source, t, stored=True), target, t * s.number_bytes)
        with k.range(end, filled) as t:
            if in_units:
                k.store(k.load(s.unit, source, t * s.number_bytes), target, t * s.number_bytes)
            else:
                column = k.i64(s.stored_bytes) if s.cached else p["column"]
                k.store(product.load_unit(k, source, t, column, p["length"], stored=True), target, t * s.number_bytes)
        fill_units(k, s, target, filled, first)
    return k.finish()


def filled_units(k: Function, s: Shape, length: Value) -> Value:
    """Counts the units of a row that have elements, of so many."""
    return k.p["units"] if s.packed == 1 and not s.in_parts else s.count_units(length)


def fill_units(k: Function, s: Shape, row: Value, filled: Value, before: Value | int = 0) -> None:
    """Stores zeros in the rest of the units that lie together; `before`: units that lie before this row."""
    if s.packed > 1:
        with k.range(filled, k.p["units"] - before) as t:
            k.store(k.const(0, s.unit), row, t * s.number_bytes)


def stage_lanes(product: UnitLoader, module: Module) -> Any:
    """tile[count, units] from a cache's blocks: unit after unit, of each the BLOCK keys."""
    s, k = product.s, module.function("stage_lanes", prototype(TILE_WORDS))
    p, n = k.p, s.lanes
    row, filled = p["units"] * s.number_bytes, filled_units(k, s, p["length"])
    whole = filled // n * n
    with k.range(0, p["count"], BLOCK) as j:
        block = k.at(k.load(PTR, p["places"], j // BLOCK * 8), s.header(p["length"]))
        for first in range(0, BLOCK, n):
            target = k.at(p["tile"], (j + first) * row)
            with k.range(0, whole, n) as t:
                lanes = [product.load_keys(k, block, t + u, first, 1)[0] for u in range(n)]
                for m, x in enumerate(k.transpose(lanes)):
                    k.store(x, target, row * m + t * s.number_bytes)
            with k.range(whole, filled) as t, k.range(0, n) as m:
                one = product.key_unit(k, block, t, m + first)
                k.store(one, target, row * m + t * s.number_bytes)
            if s.packed > 1:
                with k.range(0, n) as m:
                    fill_units(k, s, k.at(target, row * m), filled)
    return k.finish()


def widen_blocks(product: UnitLoader, module: Module) -> Any:
    """tile[block, units, BLOCK] from a cache's blocks of codes, as they lie there; fetches those of the next tile."""
    s, k = product.s, module.function("widen_blocks", prototype(TILE_WORDS))
    p, header = k.p, s.header(k.p["length"])
    with k.range(0, p["count"], BLOCK) as j:
        block, ahead = (k.at(k.load(PTR, p["places"], x // BLOCK * 8), header) for x in (j, j + TILE))
        to = k.at(p["tile"], j * p["units"] * s.number_bytes)

        def units(t: Value, count: int = 1, block: Value = block, to: Value = to, ahead: Value = ahead) -> None:
            k.prefetch(k.at(ahead, t * s.block_step), s.fetching.level)
            for lane in range(0, BLOCK, s.lanes):
                for u, x in enumerate(product.load_keys(k, block, t, lane, count)):
                    k.store(x, to, ((t + u) * BLOCK + lane) * s.number_bytes)

        product.each_unit(k, p["units"], units, of_keys=True)
    return k.finish()


def stage_values(product: CodeLoader, module: Module) -> Any:
    """tile[units of keys, length] from a cache's rows of codes; fetches those of the next tile."""
    s, k = product.s, module.function("stage_values", prototype(TILE_WORDS))
    p, n, size, together = k.p, s.lanes, BLOCK // s.elements, product.units_per_load
    header = s.header(p["length"])
    many = product.columns_together
    first, whole = (p["length"] // step * step for step in (many * n, n))
    with k.range(0, p["count"], together) as t:
        block, ahead = (k.at(k.load(PTR, p["places"], x // size * 8), header) for x in (t, t + TILE // s.elements))
        at = product.value_offset(t % size, p["row"])
        rows, later = (product.value_row(k, k.at(x, at), t, p["row"]) for x in (block, ahead))
        to = k.at(p["tile"], t * p["length"] * s.number_bytes)

        def put(column: Value, found: list[Value], to: Value = to) -> None:
            for u, x in enumerate(found):
                k.store(x, to, (u * p["length"] + column) * s.number_bytes)

        for row in later[:1] if together > 1 else later:
            with k.range(0, p["length"], 64) as column:
                k.prefetch(k.at(row, column), s.fetching.level)
        with k.range(0, first, many * n) as column:
            columns = [column + i * n for i in range(many)]
            for x, found in zip(columns, product.load_columns(k, rows, columns, together, adjoin=True), strict=True):
                put(x, found)
        if many > 1:
            with k.range(first, whole, n) as column:
                put(column, product.load_values(k, rows, column))
        with k.range(whole, p["length"]) as column:
            put(column, product.value_of(k, rows, column, together))
    return k.finish()


def stage_latents(module: Module, s: Shape) -> Any:
    """tile[count, length] from a cache's latents: as many columns of codes as `row` has bytes, then bf16."""
    k = module.function("stage_latents", prototype(TILE_WORDS))
    p, codes = k.p, s.format
    assert not isinstance(codes, Int4)
    columns, rest = p["row"], p["length"] - p["row"]
    rest_at = s.header(columns) + columns * BLOCK
    rows = (columns, columns, lambda at, i, lanes: codes.widen(k, at, i, lanes)), (
        rest * 2, rest, lambda at, i, lanes: conversions.load(k, "bf16", at, i * 2, lanes)
    )  # fmt: skip
    with k.range(0, p["count"]) as j:
        block = k.load(PTR, p["places"], j // BLOCK * 8)
        to = k.at(p["tile"], j * p["length"] * s.number_bytes)
        for first, start, (row, length, load) in zip(
            (k.i64(0), columns), (s.header(columns), rest_at), rows, strict=True
        ):
            at, whole = k.at(block, start + j % BLOCK * row), length // s.lanes * s.lanes
            with k.range(0, whole, s.lanes) as i:
                k.store(load(at, i, s.lanes), to, (first + i) * s.number_bytes)
            with k.range(whole, length) as i:
                k.store(load(at, i, 0), to, (first + i) * s.number_bytes)
    return k.finish()


def split_lanes(module: Module, s: Shape) -> Any:
    """tile[count, units] of f32 from a cache's blocks of bf16 pairs: pair after pair, of each the BLOCK keys."""
    k = module.function("split_lanes", prototype(TILE_WORDS))
    p, n = k.p, s.lanes
    row = p["units"] * s.number_bytes
    whole = p["units"] // (2 * n) * n  # pairs
    with k.range(0, p["count"], BLOCK) as j:
        block = k.load(PTR, p["places"], j // BLOCK * 8)
        for first in range(0, BLOCK, n):
            target = k.at(p["tile"], (j + first) * row)
            with k.range(0, whole, n) as t:
                lanes = [k.load(s.ivector, block, (t + u) * (4 * BLOCK) + 4 * first) for u in range(n)]
                for m, x in enumerate(k.transpose(lanes)):
                    for half, y in enumerate(_side_by_side(k, s, x)):
                        k.store(y, target, row * m + t * 8 + half * s.vector_bytes)
            with k.range(whole, (p["units"] + 1) // 2) as t, k.range(0, n) as m:
                low, high = split_pairs(k.load(I32, block, t * (4 * BLOCK) + (m + first) * 4))
                k.store(low, target, row * m + t * 8)
                with k.when(t * 2 + 1 < p["units"]):
                    k.store(high, target, row * m + t * 8 + 4)
    return k.finish()


def split_rows(module: Module, s: Shape) -> Any:
    """tile[count, length] of f32 from a cache's rows of bf16 pairs, each of two keys."""
    k = module.function("split_rows", prototype(TILE_WORDS))
    p, row = k.p, k.p["length"] * s.number_bytes
    end = p["length"] // s.lanes * s.lanes
    with k.range(0, p["count"], 2) as j:
        source = k.at(k.load(PTR, p["places"], j // BLOCK * 8), j % BLOCK * p["row"])
        target = k.at(p["tile"], j * row)
        for first, last, step, kind in ((k.i64(0), end, s.lanes, s.ivector), (end, p["length"], 1, I32)):
            with k.range(first, last, step) as t:
                for half, x in enumerate(split_pairs(k.load(kind, source, t * 4))):
                    k.store(x, target, row * half + t * 4)
    return k.finish()


def _side_by_side(k: Function, s: Shape, pairs: Value) -> list[Value]:
    """Returns the elements of a vector of pairs, in order: two vectors."""
    low, high = split_pairs(pairs)
    order = [lane + s.lanes * half for lane in range(s.lanes) for half in (0, 1)]
    return [k.shuffle(low, high, order[i * s.lanes : (i + 1) * s.lanes]) for i in (0, 1)]


def pair_rows(module: Module, s: Shape) -> Any:
    """tile[ceil(count / 2), length] of bf16 pairs from neighbouring rows; after an odd end comes a row of zeros."""
    k = module.function("pair_rows", prototype(TILE_WORDS))
    p = k.p
    whole = p["length"] // s.lanes * s.lanes
    end = k.select(p["column"].equals(s.storage_bytes), whole, k.i64(0))
    with k.range(0, p["count"], 2) as j:
        both = j + 1 < p["count"]
        low, high = (k.load(PTR, p["places"], x * 8) for x in (j, k.min(j + 1, p["count"] - 1)))
        keep = k.select(both, k.const(0xFFFF0000 - (1 << 32), I32), k.const(0, I32))
        target = k.at(p["tile"], (j >> 1) * p["length"] * s.number_bytes)
        with k.range(0, end, s.lanes) as t:
            a, b = (_halves(k, s, x, t) for x in (low, high))
            every = k.splat(keep, s.lanes)
            k.store(a | ((b << 16) & every), target, t * s.number_bytes)
        with k.range(end, p["length"]) as t:
            a, b = (k.zext(k.load(I16, x, t * p["column"]), I32) for x in (low, high))
            k.store(a | ((b << 16) & keep), target, t * s.number_bytes)
    return k.finish()


def _halves(k: Function, s: Shape, row: Value, t: Value) -> Value:
    return k.zext(k.load(vec(I16, s.lanes), row, t * s.storage_bytes), s.ivector)


def split_pairs(pairs: Value) -> list[Value]:
    """Returns both elements of pairs of bf16, in f32."""
    return [x.bits(like(x, F32)) for x in (pairs << 16, pairs & -65536)]
