"""Elementary functions on vectors of f32 or f64: at most 2 ulp (sigmoid 3), +0 where a result would be subnormal.

NaN stays NaN. exp, tanh and sigmoid share one expansion: x = n·ln2 + r, e^r - 1 = r·Q(r) with |r| <= 0.35.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from .vector import F32, F64, I32, I64, Function, Value, element_of, vec

# ln2 in two parts (n times the first is exact), terms of Q, bits of the fraction, least and greatest argument of exp
_SPLIT = {F32: (0.693359375, -2.12194440054690583e-4), F64: (0.6931471803691238, 1.9082149292705877e-10)}
_TERMS = {F32: 8, F64: 15}
_SHIFT = {F32: 23, F64: 52}
_RANGE = {F32: (-87.33654, 88.72283), F64: (-708.396418532264, 709.782712893384)}
_RANGE2 = {F32: (-126.0, 128.0), F64: (-1022.0, 1024.0)}


def like(x: Value, element: ir.Type) -> ir.Type:
    """`element`, as often as x has lanes."""
    return vec(element, x.type.count) if isinstance(x.type, ir.VectorType) else element


def _integer(x: Value) -> ir.Type:
    return like(x, I64 if element_of(x.type) is F64 else I32)


def _rounded(k: Function, x: Value) -> tuple[Value, Value]:
    """The nearest whole number, and n · 2^shift as an integer, to be added to the bits of a number."""
    t = element_of(x.type)
    magic = k.const(1.5 * 2.0 ** _SHIFT[t], x.type)
    moved = x + magic
    return moved - magic, moved.bits(_integer(x)) << _SHIFT[t]


def _expansion(k: Function, r: Value) -> Value:
    """e^r - 1, relatively exact."""
    q = k.const(1 / math.factorial(_TERMS[element_of(r.type)]), r.type)
    for n in range(_TERMS[element_of(r.type)] - 1, 0, -1):
        q = k.fma(q, r, k.const(1 / math.factorial(n), r.type))
    return q * r


def _reduced(k: Function, x: Value) -> tuple[Value, Value]:
    n, power = _rounded(k, x * k.const(math.log2(math.e), x.type))
    high, low = _SPLIT[element_of(x.type)]
    return k.fma(-n, k.const(low, x.type), k.fma(-n, k.const(high, x.type), x)), power


def _ended(k: Function, x: Value, y: Value, ends: tuple[float, float]) -> Value:
    low, high = ends
    y = k.select(x > high, k.const(math.inf, x.type), y)
    return k.select(x.differs(x), x, k.select(x < low, k.const(0.0, x.type), y))


def exp(k: Function, x: Value) -> Value:
    ends = _RANGE[element_of(x.type)]
    inside = k.max(k.min(x, k.const(ends[1], x.type)), k.const(ends[0], x.type))
    r, power = _reduced(k, inside)
    y = _expansion(k, r) + 1.0
    return _ended(k, x, (y.bits(power.type) + power).bits(x.type), ends)


def exp2(k: Function, x: Value) -> Value:
    low, high = _RANGE2[element_of(x.type)]
    inside = k.max(k.min(x, k.const(high, x.type)), k.const(low, x.type))
    n, power = _rounded(k, inside)
    y = _expansion(k, (inside - n) * k.const(math.log(2), x.type)) + 1.0
    y = (y.bits(power.type) + power).bits(x.type)
    return _ended(k, x, k.select(x >= high, k.const(math.inf, x.type), y), (low, high))


def tanh(k: Function, x: Value) -> Value:
    """From e^(-2|x|) - 1, which is exact where it is small."""
    least = k.const(-40.0 if element_of(x.type) is F32 else -80.0, x.type)
    twice = k.max(k.abs(x) * -2.0, least)
    r, power = _reduced(k, twice)
    scale = (k.const(1.0, x.type).bits(power.type) + power).bits(x.type)
    below = k.fma(scale, _expansion(k, r), scale - 1.0)
    y = k.abs(below / (below + 2.0))
    return k.select(x.differs(x), x, k.select(x < 0.0, -y, y))


def sigmoid(k: Function, x: Value) -> Value:
    one = k.const(1.0, x.type)
    return one / (exp(k, -x) + one)


def log(k: Function, x: Value) -> Value:
    return _logarithm(k, x, 1.0)


def log2(k: Function, x: Value) -> Value:
    return _logarithm(k, x, math.log2(math.e))


def _logarithm(k: Function, x: Value, factor: float) -> Value:
    """By way of f64: logarithms are rare, and so both types are right to 2 ulp."""
    wide = x if element_of(x.type) is F64 else k.extend(x, like(x, F64))
    y = natural_log(k, wide) * factor
    y = k.select(wide < 0.0, k.const(math.nan, wide.type), y)
    return y if wide is x else k.narrow(y, x.type)


def natural_log(k: Function, x: Value) -> Value:
    """ln x for x >= 0 in f64: exponent and mantissa apart, 2 atanh((z-1)/(z+1)) by its series; error below 2 ulp."""
    t = x.type
    tiny = x < 2.0**-1022
    bits = k.select(tiny, x * 2.0**54, x).bits(like(x, I64))
    above = bits - 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2): the exponent counts from there
    exponent = Value(k, k.b.ashr(above.x, k.const(52, above.type).x))
    z = (bits - (exponent << 52)).bits(t)
    ratio = (z - 1.0) / (z + 1.0)
    square = ratio * ratio
    series = k.const(0.0, t)
    for n in range(23, 1, -2):
        series = k.fma(series, square, k.const(1.0 / n, t))
    e = k.to_float(exponent, t) - k.select(tiny, k.const(54.0, t), k.const(0.0, t))
    twice = ratio + ratio
    result = k.fma(e, k.const(0.6931471805599453, t), k.fma(twice * square, series, twice))
    result = k.select(x.equals(0.0), k.const(-math.inf, t), result)
    return k.select((x < math.inf) & (x >= 0.0), result, x)


def sqrt(k: Function, x: Value) -> Value:
    return k.unary("sqrt", x)


FUNCTIONS: dict[str, Any] = {
    "exp": exp,
    "exp2": exp2,
    "log": log,
    "log2": log2,
    "tanh": tanh,
    "sqrt": sqrt,
    "sigmoid": sigmoid,
}
