"""Micro-kernels that drop weights of a tile in place: a lane is a query, or a key. Sums have been taken before.

What is dropped weighs +0 and is visible still: it multiplies its value. The -0 of a hidden key stays.
"""

from __future__ import annotations

from typing import Any

from ..language.philox import in_order, keeps, philox
from ..language.vector import I64, PTR, Module, vec
from ..memory.shape import Shape
from ..products.products import dropped, dropped_alone, unit_of, weight_alone

QUAD = 4  # keys that share a counter


def drop_tile(module: Module, s: Shape) -> Any:
    """weights [n_keys, panel], by units. lanes: [2, panel] positions and heads; the first key's position is whole
    quads. Up to one step past n_keys is looked at, which lies in the tile.
    """
    words = ("position", "n_keys", "item", "seed", "drop_below")
    k = module.function("drop_tile", {"weights": PTR, "lanes": PTR} | dict.fromkeys(words, I64))
    p = k.p
    lanes = [[k.load(vec(I64, s.lanes), p["lanes"], (s.panel * n + v * s.lanes) * 8) for n in (0, 1)]
             for v in range(s.vectors)]  # fmt: skip
    with k.range(0, p["n_keys"], QUAD) as j:
        for v, (positions, heads) in enumerate(lanes):
            counter = p["item"], heads, positions, (p["position"] + j) >> 2
            keep = keeps(k, philox(k, counter, p["seed"], s.lanes), p["drop_below"])
            for n in range(0, QUAD, s.elements):
                at = unit_of(s, j + n) * s.row_bytes + s.lane_offset(v)
                unit = k.load(s.units, p["weights"], at)
                k.store(dropped(k, s, unit, keep[n : n + s.elements]), p["weights"], at)
    return k.finish()


def drop_row(module: Module, s: Shape) -> Any:
    """The same of one row: weights [count], by units, of a query and a head; a lane is a quad, and then a key."""
    words = ("position", "count", "item", "head", "query", "seed", "drop_below")
    k = module.function("drop_row", {"weights": PTR} | dict.fromkeys(words, I64))
    p, n = k.p, s.lanes
    kind = vec(weight_alone(s), n)
    with k.range(0, p["count"], QUAD * n) as j:
        quads = k.splat((p["position"] + j) >> 2, n) + k.iota(n)
        words = philox(k, (p["item"], p["head"], p["query"], quads), p["seed"], n)
        for m, keep in enumerate(keeps(k, in_order(k, words), p["drop_below"])):
            at = (j + m * n) * (s.number_bytes // s.elements)
            k.store(dropped_alone(k, s, k.load(kind, p["weights"], at), keep), p["weights"], at)
    return k.finish()


def drop_factors(module: Module, s: Shape) -> Any:
    """factors [n_keys, panel]: 0 where a weight is dropped, else `factor`; up to a quad past n_keys. As drop_tile."""
    words = ("position", "n_keys", "item", "seed", "drop_below")
    params = {"factors": PTR, "lanes": PTR} | dict.fromkeys(words, I64)
    k = module.function("drop_factors", params | {"factor": s.number})
    p = k.p
    lanes = [[k.load(vec(I64, s.lanes), p["lanes"], (s.panel * n + v * s.lanes) * 8) for n in (0, 1)]
             for v in range(s.vectors)]  # fmt: skip
    factor, zero = k.splat(p["factor"], s.lanes), k.const(0.0, s.vector)
    with k.range(0, p["n_keys"], QUAD) as j:
        for v, (positions, heads) in enumerate(lanes):
            counter = p["item"], heads, positions, (p["position"] + j) >> 2
            for n, keep in enumerate(keeps(k, philox(k, counter, p["seed"], s.lanes), p["drop_below"])):
                k.store(k.select(keep, factor, zero), p["factors"], (j + n) * s.row_bytes + s.lane_offset(v))
    return k.finish()
