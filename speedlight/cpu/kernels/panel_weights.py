"""Scores of a panel become weights in place, in which a lane is a query; and what lanes see."""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal

from llvmlite import ir

from ...problem.problem import TILE
from ..language.prototypes import prototype
from ..language.reloading import load_again
from ..language.vector import F32, I32, I64, Function, Module, Value, vec
from ..memory.shape import Shape
from ..products.product import product_of
from .softmax import LARGE, base_of, clamp_exponents, exp4, find_largest, lowest_exponent, rescale_weights


def softmax_tile(module: Module, s: Shape) -> Any:
    """Scores become weights in place; running_max, running_sum and alpha are updated. Returns `full`, or 0 if all keys
    must be predicated.

    Keys [clear, full) are visible to every lane; lane i sees keys below limits[i] - tile_start. If the scores are
    finite, the maximum is below LARGE and no weight underflows, those keys take the fast loop; all others take the
    careful one, which stands anything. There the weight of a hidden key is -0, which no visible key can have.
    """
    words = "scores* check* state* limits* tile_start clear full n_keys c"
    # what the partner of an odd last key weighs
    words += " missing" * s.pads + " scales*" * s.scales_weights
    types = {"c": s.number} | ({"missing": s.number} if s.pads else {})
    k = module.function("softmax_tile", prototype(words, **types), I64)
    p = k.p
    c = k.splat(p["c"], s.lanes)
    old = [k.load(s.vector, p["state"], s.lane_offset(v)) for v in range(s.vectors)]
    tops = [k.variable(k.max(k.load(s.vector, p["check"], s.lane_offset(v)) * c, x)) for v, x in enumerate(old)]
    limits = [limit_of(k, s, v) for v in range(s.vectors)]
    finite = normal = k.const(1, ir.IntType(1))
    usual = LARGE + lowest_exponent(s) - 1  # without hidden keys a row's maximum may be lower, and LARGE
    for v, top in enumerate(tops):
        total, lowest = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in (1, 2))
        finite = finite & k.all(k.abs(total) < float("inf")) & k.all(k.abs(top.get()) < usual)
        normal = normal & k.all(k.fma(lowest, c, -top.get()) >= lowest_exponent(s))
    with k.when((finite ^ 1) | (p["clear"] > 0) | (p["full"] < p["n_keys"])):
        ends = [k.select(finite, p[x], k.i64(0)) for x in ("clear", "full")]
        for top, best, x in zip(tops, _largest_seen(k, s, limits, ends), old, strict=True):
            top.set(find_largest(k, s, best, c, x))
    weights = _Weights(k, s, c, [top.get() for top in tops], limits)
    weights.add(finite & normal)
    weights.finish(old)
    return k.finish(k.select(finite, p["full"], k.i64(0)))


def limit_of(k: Function, s: Shape, v: int) -> Value:
    """Counts the keys of this tile that each lane sees."""
    wide = vec(I64, s.lanes)
    x = k.load(wide, k.p["limits"], v * s.lanes * 8) - k.splat(k.p["tile_start"], s.lanes)
    x = k.max(k.min(x, k.const(TILE, wide)), k.const(0, wide))
    return x if s.wide else k.trunc(x, s.ivector)


def below(k: Function, s: Shape, j: Value, limit: Value) -> Value:
    """Returns which lanes see key j of a tile, if its score is not -inf."""
    return k.splat(j if s.wide else k.trunc(j, I32), s.lanes) < limit


def sees(k: Function, s: Shape, x: Value, j: Value, limit: Value) -> Value:
    """Returns which lanes see a key whose score is not -inf (NaN counts as visible)."""
    return below(k, s, j, limit) & x.differs(float("-inf"))


def _largest_seen(k: Function, s: Shape, limits: list[Value], whole: list[Value]) -> list[Value]:
    """Returns each lane's largest visible score. Keys of `whole`, from and to, are finite and visible; several maxima
    of them are taken side by side, as each waits for the one before.
    """
    lowest, chains = k.const(float("-inf"), s.vector), max(1, min(4, s.isa.registers // (4 * s.vectors)))
    best = [[k.variable(lowest) for _ in range(chains)] for _ in range(s.vectors)]
    turns = itertools.cycle(range(chains))

    def score(j: Value, v: int) -> Value:
        return k.load(s.vector, k.p["scores"], j * s.row_bytes + s.lane_offset(v))

    def key(j: Value) -> None:
        turn = next(turns)
        for v, chain in enumerate(best):
            chain[turn].set(k.max(score(j, v), chain[turn].get()))

    k.unrolled(whole[0], whole[1], key, chains)
    for ends in ((k.i64(0), whole[0]), (whole[1], k.p["n_keys"])):
        with k.range(*ends) as j:
            for v, (first, *_) in enumerate(best):
                x = score(j, v)
                first.set(k.max(k.select(sees(k, s, x, j, limits[v]), x, lowest), first.get()))
    return [functools.reduce(k.max, [x.get() for x in chain]) for chain in best]


# of keys: all are seen; or by lanes below their limits; and scores may be anything
_How = Literal["all", "seen", "careful"]


class _Weights:
    """Exponentials of one tile, its row sum, alpha, and the new running_max and running_sum; part of softmax_tile."""

    def __init__(self, k: Function, s: Shape, c: Value, top: list[Value], limits: list[Value]) -> None:
        self.k, self.s, self.c, self.top, self.limits = k, s, c, top, limits
        self.product = product_of(s)
        self.base = [base_of(k, s, t) for t in top]
        if s.isa.overwrites_addends:
            for v, (limit, base) in enumerate(zip(limits, self.base, strict=True)):
                k.store(limit, k.p["check"], s.row_bytes + s.lane_offset(v))
                k.store(-base, k.p["check"], 2 * s.row_bytes + s.lane_offset(v))
        self.hidden = k.const(-0.0, s.vector)
        self.total = [k.variable(self.hidden) for _ in range(s.vectors)]  # stays -0 where nothing is seen

    def add(self, usual: Value) -> None:
        """Weighs all keys of a tile, whose visible scores may be `usual`. Weights of hidden ones, which may be
        anything, are dropped.
        """
        k, p, together = self.k, self.k.p, self.s.weight_elements
        first, end = p["clear"], p["full"] & -2
        whole = p["n_keys"] & -together
        with k.either(usual) as (as_usual, any_scores):
            with as_usual:
                if self.s.hides:
                    self._steps(k.i64(0), first, together, "seen")
                self._steps(first, end, 2, "all")
                self._steps(end, whole, together, "seen")
                self._last(whole, "seen")
            with any_scores:
                self._steps(k.i64(0), whole, together, "careful")
                self._last(whole, "careful")

    def _last(self, whole: Value, how: _How) -> None:
        if self.s.weight_elements > 1:
            with self.k.when(whole < self.k.p["n_keys"]):
                self._step(whole, 1, how)

    def _steps(self, first: Value, end: Value, keys: int, how: _How) -> None:
        k = self.k
        if not self.product.sleeps:
            with k.range(first, end, keys) as j:
                self._step(j, keys, how)
            return
        with k.range(first, end, self.s.rows) as start:
            self.product.keep_awake(k)
            with k.range(start, k.min(start + self.s.rows, end), keys) as j:
                self._step(j, keys, how)

    def _step(self, j: Value, keys: int, how: _How) -> None:
        """Weighs keys j and j + 1, or one alone."""
        weights, elements = self._weigh(j, keys, how), self.s.weight_elements
        for v in range(self.s.vectors):
            for i in range(0, keys, elements):
                self._store(j + i, v, [x[v] for x in weights[i : i + elements]])

    def _store(self, j: Value, v: int, weights: list[Value]) -> None:
        """Stores the weights of the unit of keys that begins with key j; the last one's may be incomplete.

        A missing partner weighs +0 beside the zeros past an array's end. It is hidden where there may be anything, and
        where its key is: +0 would change the sign of a sum that is -0.
        """
        k, s, product, total = self.k, self.s, self.product, self.total[v]
        if s.scales_weights:
            self._store_scaled(j, v, weights)
            return
        missing = s.weight_elements - len(weights)
        partner = self.hidden
        if missing and s.pads:
            sign = weights[0].bits(s.ivector) & self.hidden.bits(s.ivector)
            partner = (k.splat(k.p["missing"], s.lanes).bits(s.ivector) | sign).bits(s.vector)
        unit = product.pack_weights(k, weights + [partner] * missing)
        k.store(unit, k.p["scores"], s.weight_of(j) * s.row_bytes + s.lane_offset(v))
        unit = product.pack_weights(k, weights + [self.hidden] * missing) if missing else unit
        total.set(product.add_weights(k, unit, total.get()))

    def _store_scaled(self, j: Value, v: int, weights: list[Value]) -> None:
        """Stores the weights of a unit of keys of codes, times their values' scales; sums them as they are."""
        k, s, scaled = self.k, self.s, []
        for i, x in enumerate(weights):
            self.total[v].set(self.total[v].get() + x)
            scaled.append(rescale_weights(k, s, x, k.splat(k.load(F32, k.p["scales"], (j + i) * 4), s.lanes)))
        unit = self.product.pack_scaled(k, scaled + [self.hidden] * (s.elements - len(scaled)))
        k.store(unit, k.p["scores"], s.unit_of(j) * s.row_bytes + s.lane_offset(v))

    def _weigh(self, j: Value, keys: int, how: _How) -> list[list[Value]]:
        """Returns [key][vector] of weights."""
        k, s = self.k, self.s
        each = [(i, v) for i in range(keys) for v in range(s.vectors)]
        xs = [k.load(s.vector, k.p["scores"], (j + i) * s.row_bytes + s.lane_offset(v)) for i, v in each]
        es = [k.fma(x, self.c, self._less_base(v)) for x, (_, v) in zip(xs, each, strict=True)]
        if how == "careful":
            es = clamp_exponents(k, s, es, [self.base[v] for _, v in each])
        ws = exp4(k, s, es, any_x=how == "careful")
        if how != "all":
            shown = [below(k, s, j + i, self._limit(v)) for i, v in each]
            if how == "careful" or s.hides:  # what a mask hides has such a score
                shown = [y & x.differs(float("-inf")) for x, y in zip(xs, shown, strict=True)]
            ws = [k.select(y, w, self.hidden) for y, w in zip(shown, ws, strict=True)]
        return [ws[i * s.vectors : (i + 1) * s.vectors] for i in range(keys)]

    def _limit(self, v: int) -> Value:
        """Returns lanes' limits: loaded again where registers are wanted for constants."""
        if self.s.isa.overwrites_addends:
            return load_again(self.k, self.s.ivector, self.k.p["check"], self.s.row_bytes + self.s.lane_offset(v))
        return self.limits[v]

    def _less_base(self, v: int) -> Value:
        """Returns what is added to an exponent: loaded again where it is overwritten."""
        if self.s.isa.overwrites_addends:
            return load_again(self.k, self.s.vector, self.k.p["check"], 2 * self.s.row_bytes + self.s.lane_offset(v))
        return -self.base[v]

    def finish(self, old: list[Value]) -> None:
        """Updates the state. check gets alpha, then what a sum of values starts from: +0, or -0 in a lane that sees
        nothing here, whose accumulator it then leaves as it is.
        """
        k, s, p = self.k, self.s, self.k.p
        for v in range(s.vectors):
            at, sum_at = s.lane_offset(v), s.row_bytes + s.lane_offset(v)
            (alpha,) = exp4(k, s, [old[v] - self.base[v]], any_x=True)
            running_sum = k.load(s.vector, p["state"], sum_at)
            total = self.total[v].get()
            k.store(self.top[v], p["state"], at)
            k.store(k.fma(running_sum, alpha, total), p["state"], sum_at)
            k.store(alpha, p["check"], at)
            sign = k.const(-(1 << (63 if s.wide else 31)), s.ivector)
            k.store(total.bits(s.ivector) & sign, p["check"], sum_at)
