"""Elementary functions on vectors of f32 or f64: at most 2 ulp (sigmoid, tan 3); exp, exp2: +0 where it would be
subnormal.

NaN stays NaN. exp, expm1, tanh and sigmoid share one expansion: x = n·ln2 + r, e^r - 1 = r·Q(r) with |r| <= 0.35.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir

from ...expressions.operations import MOST_ANGLE
from .reloading import addends
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


def quotient(k: Function, x: Value, by: Value, reciprocal: Value) -> Value:
    """x / by to nearest in three steps, where many are divided by one; a division takes 16 cycles on an Intel core.

    With y = 1/by rounded, q = x·y and r = x − q·by, which is exact, q + r·y is x/by rounded to nearest for any x and by
    (Markstein 1990; Brisebarre, Muller and Raina 2004), as long as no step leaves the normal numbers. Of −0 it is +0.
    """
    q = x * reciprocal
    return k.fma(k.fma(-q, by, x), reciprocal, q)


def _integer(x: Value) -> ir.Type:
    return like(x, I64 if element_of(x.type) is F64 else I32)


def _rounded(k: Function, x: Value) -> tuple[Value, Value]:
    """The nearest whole number, and n · 2^shift as an integer, to be added to the bits of a number."""
    t = element_of(x.type)
    magic = k.const(1.5 * 2.0 ** _SHIFT[t], x.type)
    moved = x + magic
    return moved - magic, moved.bits(_integer(x)) << _SHIFT[t]


def _series(k: Function, x: Value, by: float) -> Value:
    """Q of by · x; by: a power of 2, which changes no rounding, and comes out as a factor, too."""
    terms = [by**n / math.factorial(n) for n in range(_TERMS[element_of(x.type)], 0, -1)]
    q = k.const(terms[0], x.type)
    for term in addends(k, x.type, terms[1:]):
        q = k.fma(q, x, term)
    return q


def _expansion(k: Function, r: Value) -> Value:
    """e^r - 1, relatively exact."""
    return _series(k, r, 1.0) * r


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
    """From e^(-2|x|) - 1, which is exact where it is small. Of -0 it is +0.

    All is in halves, from -|x| and an r that is half of what _reduced() gives; NaN goes through. Each step rounds as in
    whole numbers.
    """
    t, whole = element_of(x.type), _integer(x)
    sign = k.const(-(1 << (63 if t is F64 else 31)), whole)
    least = k.const(-20.0 if t is F32 else -40.0, x.type)
    minus = k.max(least, (x.bits(whole) | sign).bits(x.type))
    log2_e, magic = k.const(2 * math.log2(math.e), x.type), k.const(1.5 * 2.0 ** _SHIFT[t], x.type)
    # rounded once or twice: all numbers of f32 were tried, tanh is the same
    moved = k.fma(minus, log2_e, magic) if t is F32 else minus * log2_e + magic
    n = moved - magic
    high, low = (k.const(part / 2, x.type) for part in _SPLIT[t])
    r = k.fma(-n, low, k.fma(-n, high, minus))
    scale = (k.const(1.0, x.type).bits(whole) + (moved.bits(whole) << _SHIFT[t])).bits(x.type)
    below = k.fma(scale, _series(k, r, 2.0) * r, scale - 1.0)
    y = below / (below + 2.0)
    return (k.abs(y).bits(whole) | ((x + 0.0).bits(whole) & sign)).bits(x.type)


def sigmoid(k: Function, x: Value) -> Value:
    one = k.const(1.0, x.type)
    return one / (exp(k, -x) + one)


def expm1(k: Function, x: Value) -> Value:
    """2^n · (e^r - 1) + (2^n - 1), relatively exact; of half of 2^n, as 2^n itself may overflow."""
    double = element_of(x.type) is F64
    most = _RANGE[element_of(x.type)][1]
    inside = k.max(k.min(x, k.const(most, x.type)), k.const(-80.0 if double else -40.0, x.type))
    r, power = _reduced(k, inside)
    half = (k.const(0.5, x.type).bits(power.type) + power).bits(x.type)
    y = k.fma(half, _expansion(k, r), half - 0.5) * 2.0
    y = k.select(x > most, k.const(math.inf, x.type), y)
    is_tiny = k.abs(x) < 2.0**-55  # and -0, and numbers whose half would be rounded
    return k.select(x.differs(x) | is_tiny, x, y)


def log(k: Function, x: Value, factor: float = 1.0) -> Value:
    """Returns ln x in f64, times a factor; NaN below 0."""
    y = natural_log(k, x) * factor
    return k.select(x < 0.0, k.const(math.nan, x.type), y)


def log2(k: Function, x: Value) -> Value:
    return log(k, x, math.log2(math.e))


def natural_log(k: Function, x: Value) -> Value:
    """ln x for x >= 0 in f64: exponent and mantissa apart, 2 atanh((z-1)/(z+1)) by its series; error below 2 ulp."""
    t = x.type
    tiny = x < 2.0**-1022
    exponent, z = _exponent_and_mantissa(k, k.select(tiny, x * 2.0**54, x))
    ratio = (z - 1.0) / (z + 1.0)
    square, series = _arc_tangent_series(k, ratio)
    e = k.to_float(exponent, t) - k.select(tiny, k.const(54.0, t), k.const(0.0, t))
    twice = ratio + ratio
    result = k.fma(e, k.const(0.6931471805599453, t), k.fma(twice * square, series, twice))
    result = k.select(x.equals(0.0), k.const(-math.inf, t), result)
    return k.select((x < math.inf) & (x >= 0.0), result, x)


def _exponent_and_mantissa(k: Function, x: Value) -> tuple[Value, Value]:
    """Returns x as an integer e and z from sqrt(1/2) to sqrt(2): x = 2^e · z."""
    bits = x.bits(like(x, I64))
    above = bits - 0x3FE6A09E667F3BCD  # the bits of sqrt(1/2): the exponent counts from there
    exponent = Value(k, k.b.ashr(above.x, k.const(52, above.type).x))
    return exponent, (bits - (exponent << 52)).bits(x.type)


def _arc_tangent_series(k: Function, ratio: Value) -> tuple[Value, Value]:
    """Returns t = ratio² and S(t): atanh(ratio) = ratio + ratio · t · S(t)."""
    square = ratio * ratio
    series = k.const(0.0, ratio.type)
    for n in range(23, 1, -2):
        series = k.fma(series, square, k.const(1.0 / n, ratio.type))
    return square, series


def log1p(k: Function, x: Value) -> Value:
    """ln(1 + x) in f64: as natural_log, but of x / (x + 2) near 0, and with what 1 + x lost to rounding elsewhere."""
    t = x.type
    u = x + 1.0
    rest = u - x
    lost = (x - (u - rest)) + (k.const(1.0, t) - rest)
    exponent, z = _exponent_and_mantissa(k, u)
    is_near = exponent.equals(0)
    above = k.select(is_near, x, z - 1.0)
    ratio = above / (above + 2.0)
    square, series = _arc_tangent_series(k, ratio)
    twice = ratio + ratio
    below = k.fma(twice * square, series, twice) + k.select(is_near, k.const(0.0, t), lost / u)
    y = k.fma(k.to_float(exponent, t), k.const(0.6931471805599453, t), below)
    y = k.select(u > 0.0, y, k.select(u.equals(0.0), k.const(-math.inf, t), k.const(math.nan, t)))
    is_itself = (k.abs(x) < 2.0**-54) | x.equals(math.inf) | x.differs(x)
    return k.select(is_itself, x, y)


# pi/2 as a sum: n times the first, and less, is exact in an fma; 160 bits for n up to 2^40
_QUARTER_TURN = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
# sin r = r + r³·…, cos r = 1 + r²·…, for |r| <= pi/4 by their series, in r²
_SINE = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(8, 0, -1))
_COSINE = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(9, 0, -1))
# minimax: of erf(x)/x - 1 in x² on [0, 1], relative error 8e-18; of ln erfc(x) in x - 1 on [1, 6], 7e-18 of erf
_ERF_INSIDE = (
    -7.779462971761597e-10, 1.3710988704190523e-08, -1.6206318752969208e-07, 1.6447132699786621e-06,
    -1.4924712439534814e-05, 0.0001205529358693695, -0.0008548325929766244, 0.005223977606130842,
    -0.026866170643113415, 0.112837916709442, -0.3761263890318352, 0.12837916709551256,
)  # fmt: skip
_ERF_OUTSIDE = (
    -4.9286771384653e-12, 1.2071133370955398e-10, -1.3326337122122265e-09, 8.597243244105049e-09,
    -3.369266925876166e-08, 5.8821368850421515e-08, 2.032452405481918e-07, -2.1297255015168495e-06,
    9.669081532381939e-06, -2.7197235481464668e-05, 2.6295379530784362e-05, 0.0002373167987739163,
    -0.0019779013109420744, 0.010033825195158504, -0.04156109802668308, -0.8431072563593303, -2.6389675142347775,
    -1.8496055099332482,
)  # fmt: skip


def _polynomial(k: Function, x: Value, terms: tuple[float, ...]) -> Value:
    """Highest power first."""
    y = k.const(terms[0], x.type)
    for term in terms[1:]:
        y = k.fma(y, x, k.const(term, x.type))
    return y


def _in_double(function: Any) -> Any:
    """Returns a function computed in f64, from which f32 is rounded once: these are rare, and right to 2 ulp so."""

    def of(k: Function, x: Value) -> Value:
        wide = x if element_of(x.type) is F64 else k.extend(x, like(x, F64))
        y = function(k, wide)
        return y if wide is x else k.narrow(y, x.type)

    return of


def _turned(k: Function, x: Value) -> tuple[Value, Value, Value]:
    """sin r, cos r, |r| <= pi/4, and n: x = n·pi/2 + r. n is in the last bits of an integer."""
    magic = k.const(1.5 * 2.0 ** _SHIFT[F64], x.type)
    moved = k.fma(x, k.const(2 / math.pi, x.type), magic)
    n, r = moved - magic, x
    for part in _QUARTER_TURN:
        r = k.fma(-n, k.const(part, x.type), r)
    square = r * r
    sine = k.fma(r * square, _polynomial(k, square, _SINE), r)
    cosine = k.fma(square, _polynomial(k, square, _COSINE), k.const(1.0, x.type))
    return sine, cosine, moved.bits(_integer(x))


def _of_angle(k: Function, x: Value, y: Value, *, odd: bool) -> Value:
    """y, but NaN beyond MOST_ANGLE; of an odd function x at zeros, which have signs."""
    y = k.select(k.abs(x) <= MOST_ANGLE, y, k.const(math.nan, x.type))
    return k.select(x.equals(0.0), x, y) if odd else y


def _wave(k: Function, x: Value, quarters: int) -> Value:
    """sin(x + quarters·pi/2)."""
    sine, cosine, n = _turned(k, x)
    n = n + quarters
    y = k.select((n & 1).differs(0), cosine, sine)
    return (((n & 2) << 62) ^ y.bits(n.type)).bits(x.type)


def sin(k: Function, x: Value) -> Value:
    return _of_angle(k, x, _wave(k, x, 0), odd=True)


def cos(k: Function, x: Value) -> Value:
    return _of_angle(k, x, _wave(k, x, 1), odd=False)


def tan(k: Function, x: Value) -> Value:
    sine, cosine, n = _turned(k, x)
    is_odd = (n & 1).differs(0)
    y = k.select(is_odd, -cosine, sine) / k.select(is_odd, sine, cosine)
    return _of_angle(k, x, y, odd=True)


def erf(k: Function, x: Value) -> Value:
    """x + x·P(x²) within ±1; outside 1 - e^(ln erfc |x|), of which a seventh at most is taken away."""
    size = k.min(k.abs(x), k.const(6.0, x.type))  # whose erf is 1
    inside = k.fma(x, _polynomial(k, x * x, _ERF_INSIDE), x)
    outside = k.const(1.0, x.type) - exp(k, _polynomial(k, size - 1.0, _ERF_OUTSIDE))
    y = k.select(size < 1.0, inside, k.select(x < 0.0, -outside, outside))
    return k.select(x.differs(x) | x.equals(0.0), x, y)


def sqrt(k: Function, x: Value) -> Value:
    return k.unary("sqrt", x)


IN_STEP = frozenset(("exp", "exp2", "tanh", "sigmoid"))  # chains of so many steps that several overlap, and no more
FUNCTIONS: dict[str, Any] = {
    "exp": exp,
    "exp2": exp2,
    "log": _in_double(log),
    "log2": _in_double(log2),
    "log1p": _in_double(log1p),
    "expm1": expm1,
    "tanh": tanh,
    "sqrt": sqrt,
    "sigmoid": sigmoid,
    "sin": _in_double(sin),
    "cos": _in_double(cos),
    "tan": _in_double(tan),
    "erf": _in_double(erf),
}
