"""The online softmax on vectors: weights, states, and the end of a row. Lanes may be queries or keys.

A state is a row's running_max and running_sum, and its accumulator: values summed by weight. Weights are powers of 4:
|log4 e · score| is below any finite |score|, so it is finite, which log2 e · score need not be.

The order of every operation is fixed: docs/numerics.md, steps 1-5.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..language import functions
from ..language.reloading import load_again, table_of
from ..language.vector import F32, F64, Function, Module, Value
from ..memory.shape import Shape
from ..products.product import product_of

# Above this |running_max| one rounding of the product moves an exponent visibly: the maximum is then rounded
# down and exponents are clamped at 0, so that the largest weight is exactly 1 for any finite score.
LARGE = 2.0**23
LN4 = 2 * 0.6931471805599453
LOG4_E = math.log2(math.e) / 2
SINK_SUM = 1.0  # a sink is a key of that score, whose value is zeros: its state is (logit, SINK_SUM, zeros)


# --- weights


def lowest_exponent(s: Shape) -> float:
    """Returns the exponent below which 4^x is +0: the result would be subnormal."""
    return -511.0 if s.wide else -63.0


def exp4(k: Function, s: Shape, xs: list[Value], *, any_x: bool) -> list[Value]:
    """Returns 4^x for x <= 0 (a little above is fine), several vectors in step. Integer arithmetic scales.

    In step, because one vector's chain of dependent operations would fill the CPU's scheduler before it ends.
    With `any_x`, +0 below the smallest normal exponent, and NaN stays. Without, the caller has proved that x is
    neither.
    """
    shift = 52 if s.wide else 23
    # adding it rounds to a half; how many halves lies in the low bits then
    magic = k.const(1.5 * 2.0 ** (shift - 1), s.vector)
    ts = [x + magic for x in xs]
    rounded = [t - magic for t in ts]
    fs = [x - r for x, r in zip(xs, rounded, strict=True)]
    coefficients = [c * 2.0**n for n, c in enumerate(product_of(s).exp2_terms, 1)]
    ps = [k.const(coefficients[-1], s.vector)] * len(xs)
    for addend in _addends(k, s, (*coefficients[-2::-1], 1.0)):
        ps = [k.fma(p, f, addend()) for p, f in zip(ps, fs, strict=True)]
    ys = [p.bits(s.ivector) + (t.bits(s.ivector) << shift) for p, t in zip(ps, ts, strict=True)]
    if not any_x:
        return [y.bits(s.vector) for y in ys]
    (low,), zero = _addends(k, s, (lowest_exponent(s),)), k.const(0, s.ivector)
    zeroed = [k.select(x >= low(), y, zero).bits(s.vector) for x, y in zip(xs, ys, strict=True)]
    return [k.select(x.differs(x), k.abs(x), y) for x, y in zip(xs, zeroed, strict=True)]


def _addends(k: Function, s: Shape, values: Sequence[float]) -> list[Callable[[], Value]]:
    """Returns constants as they are added: loaded each time where they are overwritten."""
    if not s.isa.overwrites_addends:
        return [functools.partial(k.const, x, s.vector) for x in values]
    table = table_of(k, s.vector, values)
    return [functools.partial(load_again, k, s.vector, table, i * s.vector_bytes) for i in range(len(values))]


def combined_by(k: Function, s: Shape) -> tuple[Callable[[Value, Value], Value], ...]:
    """Returns what finds the largest, the sum and the least of scores: of no use but for the sum where one is NaN."""
    if s.isa.arch == "aarch64":  # of one instruction each, where a comparison and a choice are two
        return k.maximum, operator.add, k.minimum
    return k.max, operator.add, k.min


def find_largest(k: Function, s: Shape, best: Value, c: Value, old: Value) -> Value:
    """Returns max(old, c · best), the product rounded down where it is LARGE."""
    product = best * c
    large = (k.abs(product) >= LARGE) & (k.abs(product) < float("inf"))
    above = k.fma(best, c, -product) < 0.0
    bits = product.bits(s.ivector)
    down = k.select(product > 0.0, bits - 1, bits + 1).bits(s.vector)
    return k.max(k.select(large & above, down, product), old)


def base_of(k: Function, s: Shape, top: Value) -> Value:
    """Returns what scores are taken relative to: the maximum; 0 in an empty row, which must not make inf - inf."""
    return k.select(top.equals(float("-inf")), k.const(0.0, s.vector), top)


def clamp_exponents(k: Function, s: Shape, exponents: list[Value], bases: list[Value]) -> list[Value]:
    """Returns exponents of at most 0 in rows whose maximum is LARGE."""
    zero = k.const(0.0, s.vector)
    if s.isa.arch == "aarch64":  # others that are visible are near 0 at most
        caps = [k.select(k.abs(base) >= LARGE, zero, k.const(LARGE, s.vector)) for base in bases]
        return [k.minimum(e, cap) for e, cap in zip(exponents, caps, strict=True)]
    return [k.select((k.abs(base) >= LARGE) & (e > 0.0), zero, e) for e, base in zip(exponents, bases, strict=True)]


def capped(k: Function, s: Shape, x: Value, most: Value) -> Value:
    """Returns x, or `most` where that is less; NaN stays."""
    return k.minimum(x, most) if s.isa.arch == "aarch64" else k.select(x > most, most, x)


def rescale_weights(k: Function, s: Shape, weight: Value, scale: Value) -> Value:
    """Returns what a code is multiplied by: weight · scale. The -0 of a hidden key stays, whatever its scale is.

    A scale of a cache's row has no sign, so the product gets none, NaN too. A scale in an array may have one, and a
    code there may be NaN: such a product that is -0 becomes +0, which is visible.
    """
    scaled = weight * scale
    if s.lists_scales:
        scaled = scaled + 0.0
    elif not s.has_signed_scales:
        scaled = k.abs(scaled)
    return k.select(weight.bits(s.ivector) < 0, weight, scaled)


# --- states


def is_empty(running_max: Value, running_sum: Value) -> Value:
    """Returns whether a state saw nothing: a maximum of -inf, and a sum that is 0 rather than NaN."""
    return running_max.equals(float("-inf")) & running_sum.equals(0.0)


class Merge(NamedTuple):
    """Factors that make two states one, lane by lane: an empty one leaves the other as it is."""

    k: Function
    top: Value  # the maximum of both
    keep: Value  # the second is empty
    copy: Value  # the first is
    first: Value  # factors
    second: Value

    def of(self, x1: Value, x2: Value) -> Value:
        """Returns a sum over both."""
        both = self.k.fma(x2, self.second, x1 * self.first)
        return self.k.select(self.keep, x1, self.k.select(self.copy, x2, both))


def merge_of(k: Function, s: Shape, first: tuple[Value, Value], second: tuple[Value, Value]) -> Merge:
    """Returns the factors, from the running_max and running_sum of each."""
    (m1, l1), (m2, l2) = first, second
    top = k.max(m1, m2)
    base = base_of(k, s, top)
    factors = exp4(k, s, [m1 - base, m2 - base], any_x=True)
    return Merge(k, top, is_empty(m2, l2), is_empty(m1, l1), *factors)


# --- the end of a row


def divide_row(k: Function, s: Shape, accumulator: Value, by: Value, empty: Value) -> Value:
    """Returns the output of a row: 0 where nothing was seen."""
    return k.select(empty, k.const(0.0, s.vector), accumulator / by)


_USUAL = 2.0**-70, 2.0**100  # of accumulators; and of what divides them
_DIVISORS = 2.0**-10, 2.0**40


class Quotients:
    """Outputs of float32 rows, without a division for each where functions.quotient() says the same: `usual`."""

    def __init__(self, k: Function, s: Shape, by: Value, empty: Value) -> None:
        self.k, self.s, self.by, self.empty = k, s, by, empty
        self.reciprocal = k.const(1.0, s.vector) / by
        self.near = k.all((by >= _DIVISORS[0]) & (by <= _DIVISORS[1]))

    def usual(self, accumulators: list[Value]) -> Value:
        """Returns whether none of these, nor a divisor, is 0, tiny, huge or NaN. |x| as an integer has x's order."""
        k, kind = self.k, self.s.ivector
        least, most = (struct.unpack("<i", struct.pack("<f", x))[0] << 1 for x in _USUAL)
        shift = k.const((1 << 31) - least, kind)  # what is too small comes out largest
        found = functools.reduce(k.max, [(x.bits(kind) << 1) + shift for x in accumulators])
        return self.near & k.all(found < most - least - (1 << 31))

    def of(self, x: Value) -> Value:
        """Returns a usual one's output."""
        return functions.quotient(self.k, x, self.by, self.reciprocal)

    def careful(self, x: Value) -> Value:
        return divide_row(self.k, self.s, x, self.by, self.empty)


def natural_log(module: Module) -> Any:
    """Returns ln x of one f64."""
    k = module.function("natural_log", {"x": F64}, F64)
    return k.finish(functions.natural_log(k, k.p["x"]))


def log_sum_exp(k: Function, s: Shape, log: Any, running_max: Value, running_sum: Value) -> Value:
    """Returns ln 4 · max + ln sum of one row, rounded once. -inf says that nothing was seen, so rounding does not make
    it of a finite score.

    A sink of -inf is nothing, too: its sum is 1.
    """
    m, total = (x if s.wide else k.extend(x, F64) for x in (running_max, running_sum))
    most = k.const(1.7976931348623157e308 if s.wide else 3.4028234663852886e38, F64)
    lse = k.fma(m, k.const(LN4, F64), k.call(log, total))
    lse = k.max(-most, k.min(most, lse))  # NaN stays
    lse = k.select(m.equals(float("-inf")) & total.equals(total), k.const(float("-inf"), F64), lse)
    return lse if s.wide else k.narrow(lse, F32)
