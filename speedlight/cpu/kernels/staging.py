"""Queries copied to scratch: gathered from strides, widened, made units. `flip` has the sign bits to invert."""

from __future__ import annotations

from typing import Any

from ..language.prototypes import prototype
from ..language.vector import I32, PTR, Function, Module, Value
from ..memory.shape import Shape
from ..products.packing import filled_units
from ..products.product import product_of
from .prefetch import fetch_lines

_QUERY = "head_dim units column flip"


def _flip_and_end(k: Function, s: Shape) -> tuple[Value, Value]:
    """Returns the sign bits of a unit, and how many units vectors take: none unless elements are contiguous."""
    flip = k.p["flip"] if s.wide else k.trunc(k.p["flip"], I32)
    return flip, k.select(k.p["column"].equals(s.storage_bytes), s.whole_units(k.p["head_dim"]), k.i64(0))


def pack_queries(module: Module, s: Shape) -> Any:
    """q_panel[units, panel] from the rows named by a table of pointers."""
    k = module.function("pack_queries", prototype(f"table* q_panel* {_QUERY}"))
    p, product, (flip, end) = k.p, product_of(s), _flip_and_end(k, s)
    filled = filled_units(k, s, p["head_dim"])
    with k.range(0, s.vectors) as v, k.range(0, end, s.lanes) as t:
        table = k.at(p["table"], v * (s.lanes * 8))
        fetch_lines(k, s, table, t + s.lanes)
        rows = [product.load_units(k, k.load(PTR, table, lane * 8), t) for lane in range(s.lanes)]
        for i, x in enumerate(k.transpose(rows)):
            flipped = x.bits(s.ivector) ^ k.splat(flip, s.lanes)
            k.store(flipped, p["q_panel"], (t + i) * s.row_bytes + v * s.vector_bytes)
    with k.range(0, s.panel) as lane:
        row = k.load(PTR, p["table"], lane * 8)
        with k.range(end, filled) as t:
            x = product.load_unit(k, row, t, p["column"], p["head_dim"])
            k.store(x.bits(s.integer) ^ flip, p["q_panel"], t * s.row_bytes + lane * s.number_bytes)
    with k.range(filled, p["units"]) as t:
        for v in range(s.vectors):
            k.store(k.const(0, s.ivector), p["q_panel"], t * s.row_bytes + s.lane_offset(v))
    product.arrange_queries(k, p["q_panel"], p["units"])
    return k.finish()


def pack_row(module: Module, s: Shape) -> Any:
    """Packs queries[units] from one row of q."""
    k = module.function("pack_row", prototype(f"queries* row* {_QUERY}"))
    p, product, (flip, end) = k.p, product_of(s), _flip_and_end(k, s)
    with k.range(0, end, s.lanes) as t:
        x = product.load_units(k, p["row"], t).bits(s.ivector) ^ k.splat(flip, s.lanes)
        k.store(x, p["queries"], t * s.number_bytes)
    with k.range(end, p["units"]) as t:
        x = product.load_unit(k, p["row"], t, p["column"], p["head_dim"])
        k.store(x.bits(s.integer) ^ flip, p["queries"], t * s.number_bytes)
    return k.finish()
