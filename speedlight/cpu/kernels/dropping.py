"""Micro-kernels that drop weights of a tile in place: a lane is a query, or a key. Sums have been taken before.

What is dropped weighs +0 and is visible still: it multiplies its value. The -0 of a hidden key stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..language.philox import in_order, keeps, philox
from ..language.prototypes import prototype
from ..language.vector import I64, Function, Module, Value, vec
from ..memory.shape import Shape
from ..products.product import product_of

QUAD = 4  # keys that share a counter


def drop_tile(module: Module, s: Shape) -> Any:
    """Drops weights [n_keys, panel], by units. lanes: [2, panel] positions and heads; the first key's position is whole
    quads. Up to one step past n_keys is looked at, which lies in the tile.
    """
    k = module.function("drop_tile", prototype("weights* lanes* position n_keys item seed drop_below"))
    product = product_of(s)
    for j, v, keep in _each_quad(k, s, _load_lanes(k, s)):
        for n in range(0, QUAD, s.weight_elements):
            at = s.weight_of(j + n) * s.row_bytes + s.lane_offset(v)
            unit = k.load(vec(s.weight, s.lanes), k.p["weights"], at)
            k.store(product.drop_weights(k, unit, keep[n : n + s.weight_elements]), k.p["weights"], at)
    return k.finish()


def _load_lanes(k: Function, s: Shape) -> list[list[Value]]:
    """Loads the positions and heads of each vector of queries."""
    wide, at = vec(I64, s.lanes), k.p["lanes"]
    return [[k.load(wide, at, (s.panel * n + v * s.lanes) * 8) for n in (0, 1)] for v in range(s.vectors)]


def _each_quad(k: Function, s: Shape, lanes: list[list[Value]]) -> Iterator[tuple[Value, int, list[Value]]]:
    """Writes a loop over quads of a tile's keys; yields for each vector of queries the first key, the vector, and which
    lanes keep each of the keys.
    """
    p = k.p
    with k.range(0, p["n_keys"], QUAD) as j:
        for v, (positions, heads) in enumerate(lanes):
            counter = p["item"], heads, positions, (p["position"] + j) >> 2
            yield j, v, keeps(k, philox(k, counter, p["seed"], s.lanes), p["drop_below"])


def drop_row(module: Module, s: Shape) -> Any:
    """Drops weights [count] of one row, by units, of a query and a head; a lane is a quad, and then a key."""
    k = module.function("drop_row", prototype("weights* position count item head query seed drop_below"))
    p, n, product = k.p, s.lanes, product_of(s)
    kind = vec(product.row_weight, n)
    with k.range(0, p["count"], QUAD * n) as j:
        quads = k.splat((p["position"] + j) >> 2, n) + k.iota(n)
        words = philox(k, (p["item"], p["head"], p["query"], quads), p["seed"], n)
        for m, keep in enumerate(keeps(k, in_order(k, words), p["drop_below"])):
            at = (j + m * n) * (s.number_bytes // s.weight_elements)
            k.store(product.drop_row(k, k.load(kind, p["weights"], at), keep), p["weights"], at)
    return k.finish()


def drop_factors(module: Module, s: Shape) -> Any:
    """Makes factors [n_keys, panel]: 0 where a weight is dropped, else `factor`; up to a quad past n_keys. As
    drop_tile.
    """
    params = prototype("factors* lanes* position n_keys item seed drop_below", factor=s.number)
    k = module.function("drop_factors", params)
    lanes, factor, zero = _load_lanes(k, s), k.splat(k.p["factor"], s.lanes), k.const(0.0, s.vector)
    for j, v, keep in _each_quad(k, s, lanes):
        for n, x in enumerate(keep):
            k.store(k.select(x, factor, zero), k.p["factors"], (j + n) * s.row_bytes + s.lane_offset(v))
    return k.finish()
