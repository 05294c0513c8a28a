"""Rows in and out of the backward pass: copied and widened, made units; sums that are begun, joined and stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...arrays.dtypes import STORAGE_BYTES
from ..language import conversions
from ..language.prototypes import prototype
from ..language.vector import I16, I32, Function, Module, Value, vec
from ..memory.shape import Shape
from ..products.product import outer_product_of


def stage_rows(module: Module, s: Shape) -> Any:
    """target[i, padded]: units of rows [first, end) of any stride and narrower type; zeros past `length` elements."""
    k = module.function("stage_rows", prototype("target* source* target_row row column first end length padded"))
    p, product = k.p, outer_product_of(s)
    whole = k.select(p["column"].equals(s.storage_bytes), s.whole_units(p["length"]), k.i64(0))
    units = s.count_units(p["length"])
    with k.range(p["first"], p["end"]) as i:
        source, target = k.at(p["source"], i * p["row"]), k.at(p["target"], i * p["target_row"])
        with k.range(0, whole, s.lanes) as t:
            k.store(product.load_units(k, source, t), target, t * s.number_bytes)
        with k.range(whole, units) as t:
            k.store(product.load_unit(k, source, t, p["column"], p["length"]), target, t * s.number_bytes)
        with k.range(units, p["padded"]) as t:
            k.store(k.const(0, s.integer), target, t * s.number_bytes)
    return k.finish()


def stage_across(module: Module, s: Shape) -> Any:
    """target[unit, padded]: units of neighbouring rows, for rows [first, end); zeros for rows before and after, and
    past `length`. The row of a panel's first lane, or a tile's first key, begins a unit.
    """
    k = module.function("stage_across", prototype("target* source* target_row row column first end length padded"))
    p, last, product = k.p, k.p["end"] - 1, outer_product_of(s)
    whole = k.select(p["column"].equals(s.storage_bytes), p["length"] // s.lanes * s.lanes, k.i64(0))
    with k.range(s.unit_of(p["first"]), s.count_units(p["end"])) as unit:
        target, keep, sources = k.at(p["target"], unit * p["target_row"]), k.i64(0), []
        for i in range(s.elements):
            row = unit * s.elements + i
            inside = (row >= p["first"]) & (row <= last)
            bits = ((1 << 32 // s.elements) - 1) << (32 // s.elements * i)
            keep = keep | k.select(inside, k.i64(bits), k.i64(0))
            sources.append(k.at(p["source"], k.max(k.min(row, last), p["first"]) * p["row"]))
        keep = k.trunc(keep, I32)
        with k.range(0, whole, s.lanes) as c:
            k.store(product.gather_values(k, sources, c) & k.splat(keep, s.lanes), target, c * s.number_bytes)
        with k.range(whole, p["length"]) as c:
            low, high = (k.zext(k.load(I16, x, c * p["column"]), I32) for x in sources)
            k.store((low | (high << 16)) & keep, target, c * s.number_bytes)
        with k.range(p["length"], p["padded"]) as c:
            k.store(k.const(0, I32), target, c * s.number_bytes)
    return k.finish()


def clear(module: Module, s: Shape) -> Any:
    """Stores `count` vectors of +0."""
    k = module.function("clear", prototype("at* count"))
    with k.range(0, k.p["count"]) as i:
        k.store(k.const(0.0, s.vector), k.p["at"], i * s.vector_bytes)
    return k.finish()


def copy_vectors(module: Module, s: Shape) -> Any:
    """Copies `count` vectors."""
    k = module.function("copied", prototype("to* source* count"))
    with k.range(0, k.p["count"]) as i:
        k.store(k.load(s.vector, k.p["source"], i * s.vector_bytes), k.p["to"], i * s.vector_bytes)
    return k.finish()


def multiply_vectors(module: Module, s: Shape) -> Any:
    """Multiplies `count` vectors, each by its factor."""
    k = module.function("multiplied", prototype("at* factors* count"))
    with k.range(0, k.p["count"]) as i:
        x, factor = (k.load(s.vector, k.p[name], i * s.vector_bytes) for name in ("at", "factors"))
        k.store(x * factor, k.p["at"], i * s.vector_bytes)
    return k.finish()


def add_partial(module: Module, s: Shape) -> Any:
    """total[n, width] = partial if `fresh`, else total + partial; at the `end` times `factor` and narrowed, in out."""
    words = "partial* total* out* partial_row total_row out_row n width fresh end"
    k = module.function("add_partial", prototype(words, factor=s.number))
    p = k.p
    whole = p["width"] // s.lanes * s.lanes
    fresh, end = p["fresh"].differs(0), p["end"].differs(0)

    def element(j: Value, c: Value, lanes: int) -> None:
        t = vec(s.number, lanes) if lanes else s.number
        x = k.load(t, p["partial"], j * p["partial_row"] + c * s.number_bytes)
        at = k.at(p["total"], j * p["total_row"] + c * s.number_bytes)
        variable = k.variable(x + k.const(0.0, t))  # +0 where it is -0
        with k.when(fresh ^ 1):
            variable.set(k.load(t, at) + x)
        with k.either(end) as (last, more):
            with last:
                factor = k.splat(p["factor"], lanes) if lanes else p["factor"]
                x = conversions.narrowed(k, s.gradient_storage, variable.get() * factor)
                k.store(x, p["out"], j * p["out_row"] + c * STORAGE_BYTES[s.gradient_storage])
            with more:
                k.store(variable.get(), at)

    with k.range(0, p["n"]) as j:
        with k.range(0, whole, s.lanes) as c:
            element(j, c, s.lanes)
        with k.range(whole, p["width"]) as c:
            element(j, c, 0)
    return k.finish()


def load_panel(module: Module, s: Shape) -> Any:
    """acc[width, panel] from rows of sums, lanes [first, end)."""
    k = module.function("load_panel", prototype("acc* source* row first end width"))
    p = k.p

    def turned(c: Value, lane: int, v: int) -> None:
        rows = k.transpose(
            [k.load(s.vector, p["source"], p["row"] * (lane + i) + c * s.number_bytes) for i in range(s.lanes)]
        )
        for i, x in enumerate(rows):
            k.store(x, p["acc"], (c + i) * s.row_bytes + s.lane_offset(v))

    def single(c: Value, lane: Value) -> None:
        x = k.load(s.number, p["source"], lane * p["row"] + c * s.number_bytes)
        k.store(x, p["acc"], c * s.row_bytes + lane * s.number_bytes)

    _over_panel(k, s, turned, single)
    return k.finish()


def store_panel(module: Module, s: Shape, storage: str) -> Any:
    """Rows of acc[width, panel] times `factor`, narrowed to `storage`: lanes [first, end)."""
    params = prototype("acc* target* row first end width", factor=s.number)
    k = module.function(f"store_panel_{storage}", params)
    p = k.p
    size = STORAGE_BYTES[storage]

    def turned(c: Value, lane: int, v: int) -> None:
        rows = k.transpose(
            [k.load(s.vector, p["acc"], (c + i) * s.row_bytes + s.lane_offset(v)) for i in range(s.lanes)]
        )
        for i, x in enumerate(rows):
            x = conversions.narrowed(k, storage, x * k.splat(p["factor"], s.lanes))
            k.store(x, p["target"], p["row"] * (lane + i) + c * size)

    def single(c: Value, lane: Value) -> None:
        x = k.load(s.number, p["acc"], c * s.row_bytes + lane * s.number_bytes) * p["factor"]
        k.store(conversions.narrowed(k, storage, x), p["target"], lane * p["row"] + c * size)

    _over_panel(k, s, turned, single)
    return k.finish()


def _over_panel(
    k: Function, s: Shape, turned: Callable[[Value, int, int], None], single: Callable[[Value, Value], None]
) -> None:
    """Takes every column of lanes [first, end): by squares that are transposed in registers, or one by one."""
    p = k.p
    for v in range(s.vectors):
        lane = v * s.lanes
        inside = (p["first"] <= lane) & (p["end"] >= lane + s.lanes)
        whole = k.select(inside, p["width"] // s.lanes * s.lanes, k.i64(0))
        with k.range(0, whole, s.lanes) as c:
            turned(c, lane, v)
        with k.range(k.max(p["first"], k.i64(lane)), k.min(p["end"], k.i64(lane + s.lanes))) as one:
            with k.range(whole, p["width"]) as c:
                single(c, one)
