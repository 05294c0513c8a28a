"""Queries, and tiles of keys and values, copied to scratch: gathered from pages or strides, widened, made units.

Of queries, `flip` has the sign bits to invert. Of tiles, `places` are addresses of the pieces (places.py), and each
function fills tile[count, units].
"""

from __future__ import annotations

from typing import Any

from ..language.vector import I16, I32, I64, PTR, Function, Module, Value, vec
from ..memory.records import BLOCK
from ..memory.shape import Shape
from ..products.products import load_unit, load_units, paired, parted, whole_units
from .prefetch import fetch_lines

# --- queries

_QUERY = {"head_dim": I64, "units": I64, "column": I64, "flip": I64}


def _flip_and_end(k: Function, s: Shape) -> tuple[Value, Value]:
    """The sign bits of a unit; and how many units vectors take: none unless elements are contiguous."""
    flip = k.p["flip"] if s.wide else k.trunc(k.p["flip"], I32)
    return flip, k.select(k.p["column"].equals(s.storage_bytes), whole_units(s, k.p["head_dim"]), k.i64(0))


def pack_queries(module: Module, s: Shape) -> Any:
    """q_panel[units, panel] from the rows named by a table of pointers."""
    k = module.function("pack_queries", {"table": PTR, "q_panel": PTR} | _QUERY)
    p, (flip, end) = k.p, _flip_and_end(k, s)
    with k.range(0, s.vectors) as v, k.range(0, end, s.lanes) as t:
        table = k.at(p["table"], v * (s.lanes * 8))
        fetch_lines(k, s, table, t + s.lanes)
        rows = [load_units(k, s, k.load(PTR, table, lane * 8), t) for lane in range(s.lanes)]
        for i, x in enumerate(k.transpose(rows)):
            flipped = x.bits(s.ivector) ^ k.splat(flip, s.lanes)
            k.store(flipped, p["q_panel"], (t + i) * s.row_bytes + v * s.vector_bytes)
    with k.range(0, s.panel) as lane:
        row = k.load(PTR, p["table"], lane * 8)
        with k.range(end, p["units"]) as t:
            x = load_unit(k, s, row, t, p["column"], p["head_dim"])
            k.store(x.bits(s.integer) ^ flip, p["q_panel"], t * s.row_bytes + lane * s.number_bytes)
    return k.finish()


def pack_row(module: Module, s: Shape) -> Any:
    """queries[units] from one row of q."""
    k = module.function("pack_row", {"queries": PTR, "row": PTR} | _QUERY)
    p, (flip, end) = k.p, _flip_and_end(k, s)
    with k.range(0, end, s.lanes) as t:
        x = load_units(k, s, p["row"], t).bits(s.ivector) ^ k.splat(flip, s.lanes)
        k.store(x, p["queries"], t * s.number_bytes)
    with k.range(end, p["units"]) as t:
        x = load_unit(k, s, p["row"], t, p["column"], p["head_dim"])
        k.store(x.bits(s.integer) ^ flip, p["queries"], t * s.number_bytes)
    return k.finish()


# --- tiles

_PARAMS = {"tile": PTR, "places": PTR, "row": I64, "column": I64, "count": I64, "length": I64, "units": I64}


def stage_keys(module: Module, s: Shape, rows: Any) -> Any:
    """What brings keys; `rows` is from stage_rows."""
    if s.parts_pairs:
        return part_lanes(module, s)
    return stage_lanes(module, s) if s.cached else rows


def stage_values(module: Module, s: Shape, rows: Any) -> Any:
    """What brings values. A cache has units of several keys in a row already."""
    if s.parts_pairs:
        return part_rows(module, s)
    return stage_pairs(module, s) if s.elements > 1 and not s.cached else rows


def stage_rows(module: Module, s: Shape) -> Any:
    """tile[count, units] from rows of any stride and narrower type.

    Of a cache, rows are of units: of several keys each, where those are multiplied together.
    """
    k = module.function("stage_rows", _PARAMS)
    p = k.p
    in_units = s.cached and s.elements > 1  # units as they are
    whole = p["length"] // s.lanes * s.lanes if in_units else whole_units(s, p["length"])
    end = whole if s.cached else k.select(p["column"].equals(s.key_bytes), whole, k.i64(0))
    together = s.piece // s.elements if s.cached else s.piece
    with k.range(0, p["count"]) as j:
        source = k.load(PTR, p["places"], j // together * 8)
        source = k.at(source, j % together * p["row"] + s.header) if s.cached else source
        target = k.at(p["tile"], j * p["units"] * s.number_bytes)
        with k.range(0, end, s.lanes) as t:
            k.store(load_units(k, s, source, t, stored=True), target, t * s.number_bytes)
        with k.range(end, p["units"]) as t:
            if in_units:
                k.store(k.load(s.unit, source, t * s.number_bytes), target, t * s.number_bytes)
            else:
                column = k.i64(s.stored_bytes) if s.cached else p["column"]
                k.store(load_unit(k, s, source, t, column, p["length"], stored=True), target, t * s.number_bytes)
    return k.finish()


def stage_lanes(module: Module, s: Shape) -> Any:
    """tile[count, units] from a cache's blocks: unit after unit, of each the BLOCK keys."""
    k = module.function("stage_lanes", _PARAMS)
    p, n = k.p, s.lanes
    row = p["units"] * s.number_bytes
    whole = p["units"] // n * n
    stored = BLOCK * s.stored_bytes  # bytes of one unit of a block
    with k.range(0, p["count"], BLOCK) as j:
        block = k.at(k.load(PTR, p["places"], j // BLOCK * 8), s.header)
        for first in range(0, BLOCK, n):
            target = k.at(p["tile"], (j + first) * row)
            with k.range(0, whole, n) as t:
                lanes = [load_units(k, s, k.at(block, (t + u) * stored), k.i64(first), stored=True) for u in range(n)]
                for m, x in enumerate(k.transpose(lanes)):
                    k.store(x, target, row * m + t * s.number_bytes)
            with k.range(whole, p["units"]) as t, k.range(0, n) as m:
                size = k.i64(s.key_bytes)
                count = k.i64(s.elements * BLOCK)
                one = load_unit(k, s, k.at(block, t * stored), m + first, size, count, stored=True)
                k.store(one, target, row * m + t * s.number_bytes)
    return k.finish()


def part_lanes(module: Module, s: Shape) -> Any:
    """tile[count, units] of f32 from a cache's blocks of bf16 pairs: pair after pair, of each the BLOCK keys."""
    k = module.function("part_lanes", _PARAMS)
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
                low, high = parted(k.load(I32, block, t * (4 * BLOCK) + (m + first) * 4))
                k.store(low, target, row * m + t * 8)
                with k.when(t * 2 + 1 < p["units"]):
                    k.store(high, target, row * m + t * 8 + 4)
    return k.finish()


def part_rows(module: Module, s: Shape) -> Any:
    """tile[count, length] of f32 from a cache's rows of bf16 pairs, each of two keys."""
    k = module.function("part_rows", _PARAMS)
    p, row = k.p, k.p["length"] * s.number_bytes
    end = p["length"] // s.lanes * s.lanes
    with k.range(0, p["count"], 2) as j:
        source = k.at(k.load(PTR, p["places"], j // BLOCK * 8), j % BLOCK * p["row"])
        target = k.at(p["tile"], j * row)
        for first, last, step, kind in ((k.i64(0), end, s.lanes, s.ivector), (end, p["length"], 1, I32)):
            with k.range(first, last, step) as t:
                for half, x in enumerate(parted(k.load(kind, source, t * 4))):
                    k.store(x, target, row * half + t * 4)
    return k.finish()


def _side_by_side(k: Function, s: Shape, pairs: Value) -> list[Value]:
    """The elements of a vector of pairs, in order: two vectors."""
    low, high = parted(pairs)
    order = [lane + s.lanes * half for lane in range(s.lanes) for half in (0, 1)]
    return [k.shuffle(low, high, order[i * s.lanes : (i + 1) * s.lanes]) for i in (0, 1)]


def stage_pairs(module: Module, s: Shape) -> Any:
    """tile[ceil(count / 2), length] of bf16 pairs from neighbouring rows; after an odd end comes a row of zeros."""
    k = module.function("stage_pairs", _PARAMS)
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
            k.store(paired(a, b, k.splat(keep, s.lanes)), target, t * s.number_bytes)
        with k.range(end, p["length"]) as t:
            a, b = (k.zext(k.load(I16, x, t * p["column"]), I32) for x in (low, high))
            k.store(paired(a, b, keep), target, t * s.number_bytes)
    return k.finish()


def _halves(k: Function, s: Shape, row: Value, t: Value) -> Value:
    return k.zext(k.load(vec(I16, s.lanes), row, t * s.storage_bytes), s.ivector)
