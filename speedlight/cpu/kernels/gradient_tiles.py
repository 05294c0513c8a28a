"""Micro-kernels of the backward pass, on one panel of queries and one tile of keys. They know nothing of heads or
threads.

    queries, gradients  [units, panel]   Q and dO, transposed: a lane is a query
    scores              [TILE, panel]    S = K Q, then P in its place; -0 marks what is hidden
    d_scores               [TILE, panel]    dP = V dO, then dS in its place, +0 where hidden
    rows                [panel, width]   Q and dO as they are: a lane is a column
    partials            [TILE, width]    what this block of queries adds to dK and dV

dQ += Kᵀ dS has queries in its lanes, dV += P dO and dK += dS Q have columns; P and dS are then broadcast from scratch.
Where two are multiplied as pairs, P and dS are rounded to bf16 and kept once more: pairs of keys for dQ, rows for dK
and dV. The order of every operation is fixed: docs/numerics.md, "Gradients".
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ...problem.problem import FAR_LSE
from ..language.prototypes import prototype
from ..language.reloading import load_again
from ..language.vector import I64, Function, Module, Value
from ..memory.shape import Shape
from ..products.product import outer_product_of
from .panel_weights import limit_of, sees
from .softmax import LOG4_E, capped, exp4, lowest_exponent


def dot_of_panels(module: Module, s: Shape) -> Any:
    """delta[lane] = Σ a · b over the units of two panels, ascending from +0, less what is there already."""
    k = module.function("dot_of_panels", prototype("delta* a* b* units"))
    p, product = k.p, outer_product_of(s)
    for v in range(s.vectors):
        total = k.variable(k.const(0.0, s.vector))
        with k.range(0, p["units"]) as t:
            a, b = (k.load(s.units, p[x], t * s.row_bytes + s.lane_offset(v)) for x in ("a", "b"))
            total.set(product.multiply_add(k, a, b, total.get()))
        k.store(total.get() - k.load(s.vector, p["delta"], s.lane_offset(v)), p["delta"], s.lane_offset(v))
    return k.finish()


# --- P and dS


class Weights:
    """The function that makes P of S, and dS of dP where there is one.

    stats: of each lane lse, then delta, [panel] numbers each. limits: lane i sees keys below limits[i] - tile_start.
    check: [5, panel], of scores as an expression left them the largest, their sum and the least; then sums of S and dP.
    """

    def __init__(self, module: Module, s: Shape, *, last: bool) -> None:
        """`last`: nothing else changes P or dS, so units of them are made here."""
        self.makes_units = last and s.elements > 1 and s.differentiates
        flow = " d_scores*" * s.differentiates
        words = f"scores*{flow} stats* limits* check* tile_start full n_keys scale" + _UNITS * self.makes_units
        params = prototype(words, scale=s.number)
        self.k = k = module.function("weights", params, I64)
        self.s, p = s, k.p
        self.far = FAR_LSE["float64" if s.wide else "float32"]
        self.scale = None if s.program and s.program.score else k.splat(p["scale"], s.lanes)
        stats = [[self._stat_at(i, v) for v in range(s.vectors)] for i in range(2)]
        self.lse = [k.load(s.vector, p["stats"], at) for at in stats[0]]
        self.delta = [k.load(s.vector, p["stats"], at) for at in stats[1]] if s.differentiates else []
        self.limits = [limit_of(k, s, v) for v in range(s.vectors)]

    def function(self) -> Any:
        """Returns 1 where products must look at every pair: something is hidden, and something is not finite.

        Keys below `full` are visible to every lane.
        """
        k, s, p = self.k, self.s, self.k.p
        normal = products = k.const(1, ir.IntType(1))
        for v in range(s.vectors):
            rows = (1, 3, 4) if s.differentiates else (1, 3)
            score, raw, *flow = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in rows)
            normal = normal & k.all(k.abs(raw if self.scale else score) < float("inf"))
            normal = normal & k.all(k.abs(self.lse[v]) < self.far)
            for x in (raw, *flow):
                products = products & k.all(k.abs(x) < float("inf"))
        keys = s.elements if s.isa.overwrites_addends else 2  # each has constants of its own: fewer registers are left
        start = k.select(normal, p["full"] & -2, k.i64(0))
        with k.range(0, start, keys) as j:
            self._step(j, keys, careful=False)
        whole = p["n_keys"] if s.elements == 1 else p["n_keys"] & -s.elements
        with k.range(start, whole, s.elements) as j:
            self._step(j, s.elements, careful=True)
        if s.elements > 1:
            with k.when(whole < p["n_keys"]):
                self._step(whole, 1, careful=True)
        plain = products | (normal & (p["full"] >= p["n_keys"]))  # a score of -inf hides, too
        return k.finish(k.zext(plain ^ 1, I64))

    def _step(self, j: Value, keys: int, careful: bool) -> None:
        """Keys j and j + 1; or one alone."""
        k, s, p = self.k, self.s, self.k.p
        each = [(i, v) for i in range(keys) for v in range(s.vectors)]
        at = [(j + i) * s.row_bytes + s.lane_offset(v) for i, v in each]
        scores = [k.load(s.vector, p["scores"], x) for x in at]
        ps = self._weights(scores, [v for _, v in each], careful)
        d_scores = []
        if s.differentiates:
            d_scores = [k.load(s.vector, p["d_scores"], x) for x in at]
            d_scores = [(dp - self._delta(v)) * y for dp, y, (_, v) in zip(d_scores, ps, each, strict=True)]
        if careful:
            seen = [sees(k, s, x, j + i, self.limits[v]) for x, (i, v) in zip(scores, each, strict=True)]
            ps = [k.select(m, y, k.const(-0.0, s.vector)) for m, y in zip(seen, ps, strict=True)]
            if s.differentiates:
                d_scores = [k.select(m, y, k.const(0.0, s.vector)) for m, y in zip(seen, d_scores, strict=True)]
        for n, x in enumerate(at):
            k.store(ps[n], p["scores"], x)
            if s.differentiates:
                k.store(d_scores[n], p["d_scores"], x)
        if self.makes_units:
            n = s.vectors
            for i in range(0, keys, s.elements):
                these = slice(i * n, (i + s.elements) * n)
                store_units(k, s, j + i, ps[these], d_scores[these])

    def _stat_at(self, i: int, v: int) -> int:
        return i * self.s.row_bytes + self.s.lane_offset(v)

    def _delta(self, v: int) -> Value:
        """Returns the delta of a vector of lanes, which is loaded again where registers are wanted for constants."""
        if self.s.isa.overwrites_addends:
            return load_again(self.k, self.s.vector, self.k.p["stats"], self._stat_at(1, v))
        return self.delta[v]

    def _less_lse(self, x: Value, v: int) -> Value:
        """Returns scale · x - lse; or its negative, which is rounded alike, where a lse is overwritten."""
        k, s = self.k, self.s
        if self.scale is None:
            return x - self.lse[v]
        if s.isa.overwrites_addends:
            return k.fma(-x, self.scale, load_again(k, s.vector, k.p["stats"], self._stat_at(0, v)))
        return k.fma(x, self.scale, -self.lse[v])

    def _weights(self, scores: list[Value], vectors: list[int], careful: bool) -> list[Value]:
        """Returns P. The difference is taken before it is scaled: near lse there is then nothing to lose."""
        k, s = self.k, self.s
        most, zero = (k.const(x, s.vector) for x in (512.0 if s.wide else 64.0, 0.0))  # 4 to that power is inf
        xs = [self._less_lse(x, v) for x, v in zip(scores, vectors, strict=True)]
        negated = s.isa.overwrites_addends and self.scale is not None
        xs = [x * (-LOG4_E if negated else LOG4_E) for x in xs]
        if careful:
            mosts = [k.select(k.abs(self.lse[v]) >= self.far, zero, most) for v in vectors]
            return exp4(k, s, [capped(k, s, x, y) for x, y in zip(xs, mosts, strict=True)], any_x=True)
        ps = exp4(k, s, [capped(k, s, x, most) for x in xs], any_x=False)
        low = lowest_exponent(s)
        return [k.select(x >= low, y, zero) for x, y in zip(xs, ps, strict=True)]


UNITS = ("p_units", "ds_units", "d_score_units")  # P and dS in units of queries, and dS in units of keys
_UNITS = "".join([f" {name}*" for name in UNITS])


def store_units(k: Function, s: Shape, j: Value, ps: list[Value], d_scores: list[Value]) -> None:
    """Stores P and dS of one unit of keys from key j on, [key][vector], once more in units. A missing key is a hidden
    one.
    """
    p, n, product = k.p, s.vectors, outer_product_of(s)
    for i in range(len(ps)):
        row = (j + i // n) * (s.row_bytes // s.elements) + s.lane_offset(i % n) // s.elements
        k.store(product.round_elements(k, ps[i]), p["p_units"], row)
        k.store(product.round_elements(k, d_scores[i]), p["ds_units"], row)
    missing = s.elements - len(ps) // n
    for v in range(n):
        unit = product.pack_weights(k, d_scores[v::n] + [k.const(0.0, s.vector)] * missing)
        k.store(unit, p["d_score_units"], s.unit_of(j) * s.row_bytes + s.lane_offset(v))
        if missing:
            k.store(k.const(-0.0, s.vector), p["scores"], (j + 1) * s.row_bytes + s.lane_offset(v))


def make_units(module: Module, s: Shape) -> Any:
    """Calls store_units() of all keys, once P and dS are what they will be."""
    k = module.function("make_units", prototype("scores* d_scores* n_keys" + _UNITS))
    p = k.p

    def unit(j: Value, keys: int) -> None:
        at = [(j + i) * s.row_bytes + s.lane_offset(v) for i in range(keys) for v in range(s.vectors)]
        store_units(k, s, j, *([k.load(s.vector, p[x], y) for y in at] for x in ("scores", "d_scores")))

    whole = p["n_keys"] & -s.elements
    with k.range(0, whole, s.elements) as j:
        unit(j, s.elements)
    with k.when(whole < p["n_keys"]):
        unit(whole, 1)
    return k.finish()
