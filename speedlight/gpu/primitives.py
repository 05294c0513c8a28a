# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Device functions that all kernels share, on blocks; they depend on no sequence, head or mask.

A block of scores is [BM rows, BN keys], in units whose exponential is 2^(x · factor). gpu/lower.py writes calls of the
functions of masks and scores below.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
MOST: tl.constexpr = tl.constexpr(3.4028234663852886e38)  # float32's greatest


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b in float32; PRECISION is of float32 operands."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def finite_max(running_max):
    """The maximum, or 0 where nothing has been seen, so that -inf - max is -inf."""
    return tl.where(running_max == float("-inf"), 0.0, running_max)


@triton.jit
def exponents(top, factor):
    """(by, base) of rows with these maxima: weights are 2^(x · by - base), one multiply-add each; `by` is `factor` for
    ordinary rows.

    From |top · factor| = 2^28 on, unequal scores differ by 16 at least, and roundings of the product by as much. A
    power of two has none and never overflows: the largest score takes all.
    """
    # |top| · exact >= 2^40
    exact = ((~top.to(tl.int32, bitcast=True) & 0x7F800000) + (39 << 23)).to(tl.float32, bitcast=True)
    by = tl.where(tl.abs(top * factor) < 268435456.0, factor, exact)
    return by, finite_max(top * by)


@triton.jit
def online_softmax(x, factor, running_max, running_sum):
    """Weights, the new max and sum, and the factor that rescales earlier results. A score of -inf is hidden."""
    new_max = tl.maximum(running_max, tl.max(x, 1))
    by, base = exponents(new_max, factor)
    p = tl.math.exp2(x * by[:, None] - base[:, None])
    alpha = tl.math.exp2(running_max * by - base)
    return p, new_max, running_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def log_sum_exp(running_max, running_sum):
    """Log-sum-exps from the maximum as a logit: -inf for rows that see no key, and only those; others within ±MOST."""
    lse = running_max + tl.math.log2(tl.where(running_sum == 0.0, 1.0, running_sum)) * LN2
    lse = tl.where(lse > MOST, MOST, tl.where(lse < -MOST, -MOST, lse))
    return tl.where(running_sum == 0.0, float("-inf"), lse)


@triton.jit
def widened(x, dtype: tl.constexpr):
    """Keys or values as they are stored, in dtype. Codes are exact: int8, or e4m3 as bits of uint8
    (cpu/memory/formats.py says how; instructions of its own only newer GPUs have).
    """
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def nonfinite_code(v):
    """Per value, what a product with any weight makes of it: 1 for +inf, 1024 for -inf, 2^20 for NaN, else 0."""
    code = tl.where(v == float("inf"), 1.0, 0.0) + tl.where(v == float("-inf"), 1024.0, 0.0)
    return code + tl.where(v != v, 1048576.0, 0.0)


@triton.jit
def finite(v):
    """v where it is finite, else 0."""
    return tl.where(tl.abs(v) < float("inf"), v, 0.0)


@triton.jit
def nonfinite_sum(codes):
    """The sum of values that are not finite, from sums of their codes."""
    positive = tl.where((codes.to(tl.int32) & 1023) > 0, float("inf"), 0.0)
    negative = tl.where((codes.to(tl.int32) & 1047552) > 0, float("-inf"), 0.0)
    return positive + negative + tl.where(codes >= 1048576.0, float("nan"), 0.0)


# --- bits: a set of up to 32 tiles is an int32


@triton.jit
def count_bits(bits):
    return tl.sum((bits >> tl.arange(0, 32)) & 1, 0)


@triton.jit
def take_bit(bits):
    """Index of the lowest bit that is set, or 0 where none is, and the others."""
    alone = (bits & -bits).to(tl.uint32, bitcast=True).to(tl.float32)  # a power of two: its exponent is the index
    return tl.maximum((alone.to(tl.int32, bitcast=True) >> 23) - 127, 0), bits & (bits - 1)


@triton.jit
def as_bits(conditions, o_tiles):
    """A vector of 32 conditions as bits."""
    return tl.sum(conditions.to(tl.int32) << o_tiles, 0)


# --- masks and scores


@triton.jit
def opposite(condition):
    return condition == (condition != condition)


@triton.jit
def int_floordiv(a, b):
    """Divides as Python does; 0 where b is, and the least integer // -1 is itself."""
    usual = (b != 0) & (b != -1)
    by = tl.where(usual, b, 1)
    quotient = a // by
    quotient = quotient - tl.where((a - quotient * by != 0) & ((a ^ by) < 0), 1, 0)
    return tl.where(usual, quotient, tl.where(b == 0, 0, -a))


@triton.jit
def int_mod(a, b):
    return tl.where(b == 0, 0, a - int_floordiv(a, b) * b)


@triton.jit
def int_shl(a, n):
    """0 where n is not in 0 … 63."""
    return tl.where((n >= 0) & (n < 64), a << (n & 63), 0)


@triton.jit
def int_shr(a, n):
    """The sign, 0 or -1, where n is not in 0 … 63."""
    return a >> tl.where((n >= 0) & (n < 64), n, 63)


@triton.jit
def divided(a, b):
    if a.dtype == tl.float64:
        return a / b
    else:
        a, b = tl.broadcast(a, b)
        return tl.math.div_rn(a, b)


@triton.jit
def float_floordiv(a, b):
    return tl.floor(a / b)


@triton.jit
def float_mod(a, b):
    return a - tl.floor(a / b) * b


@triton.jit
def whole(x):
    """A float without its fraction, as an integer; NaN becomes 0, and what int64 cannot hold its nearest end."""
    x = x.to(tl.float64)
    inside = (x >= -9223372036854775808.0) & (x < 9223372036854775808.0)
    ends = tl.where(x > 0, 9223372036854775807, tl.where(x < 0, -9223372036854775807 - 1, 0))
    return tl.where(inside, tl.where(inside, x, 0.0).to(tl.int64), ends)


@triton.jit
def exp2(x):
    """+0 where the result would be subnormal."""
    return tl.where(x < -126.0, 0.0, tl.math.exp2(x)) if x.dtype == tl.float32 else tl.math.exp2(x)


@triton.jit
def exp(x):
    if x.dtype == tl.float32:
        y = tl.math.exp2(_whole_part(x)) * (
            _expm1(x - _whole_part(x) * 0.693359375 + _whole_part(x) * 2.12194440e-4) + 1.0
        )
        y = tl.where(x > 88.72283, float("inf"), tl.where(x < -87.33654, 0.0, y))
        return tl.where(x != x, x, y)
    return tl.math.exp(x)


@triton.jit
def _whole_part(x):
    inside = tl.minimum(tl.maximum(x, -87.33654), 88.72283)
    return tl.floor(inside * LOG2E + 0.5)


@triton.jit
def _expm1(r):
    """e^r - 1 for |r| <= 0.35, relatively exact."""
    q = 1.0 / 40320 * r + 1.0 / 5040
    q = q * r + 1.0 / 720
    q = q * r + 1.0 / 120
    q = q * r + 1.0 / 24
    q = q * r + 1.0 / 6
    q = q * r + 0.5
    return (q * r + 1.0) * r


@triton.jit
def log(x):
    return tl.math.log(x)


@triton.jit
def log2(x):
    return tl.math.log2(x)


@triton.jit
def sqrt(x):
    return tl.math.sqrt_rn(x) if x.dtype == tl.float32 else tl.math.sqrt(x)


@triton.jit
def sigmoid(x):
    return divided(tl.full(x.shape, 1.0, x.dtype), exp(-x) + 1.0)


@triton.jit
def tanh(x):
    """Computes it from e^(-2|x|) - 1, which is relatively exact where it is small."""
    twice = tl.maximum(tl.abs(x) * -2.0, -40.0)
    if x.dtype == tl.float32:
        n = _whole_part(twice)
        scale = tl.math.exp2(n)
        below = scale * _expm1(twice - n * 0.693359375 + n * 2.12194440e-4) + (scale - 1.0)
    else:
        series = twice * (
            1.0 + twice * (0.5 + twice * (1.0 / 6 + twice * (1.0 / 24 + twice * (1.0 / 120 + twice / 720))))
        )
        below = tl.where(twice > -1e-2, series, tl.math.exp(twice) - 1.0)
    y = tl.abs(divided(below, below + 2.0))
    return tl.where(x != x, x, tl.where(x < 0.0, -y, y))


@triton.jit
def _angle(x):
    """NaN beyond 2^40, as of infinities."""
    return tl.where(tl.abs(x) <= 1099511627776.0, x, float("nan"))


@triton.jit
def sin(x):
    return tl.math.sin(_angle(x))


@triton.jit
def cos(x):
    return tl.math.cos(_angle(x))


@triton.jit
def tan(x):
    """Computes it in float64, of which a quotient of two is right to 3 ulp."""
    angle = _angle(x).to(tl.float64)
    return (tl.math.sin(angle) / tl.math.cos(angle)).to(x.dtype)


@triton.jit
def erf(x):
    return tl.math.erf(x)


@triton.jit
def log1p(x):
    """ln u · (x / (u - 1)), u = 1 + x rounded: the quotient makes good what that rounding did (Kahan)."""
    u = x + 1.0
    off = u - 1.0
    y = log(u) * divided(x, tl.where(off == 0.0, 1.0, off))
    return tl.where((off == 0.0) | (u == float("inf")), x, y)


@triton.jit
def expm1(x):
    """2^n · (e^r - 1) + (2^n - 1), with half of 2^n, which would overflow, in float32; in float64 as log1p."""
    if x.dtype == tl.float32:
        n = _whole_part(tl.maximum(x, -40.0))
        r = tl.minimum(tl.maximum(x, -40.0), 88.72283) - n * 0.693359375 + n * 2.12194440e-4
        half = tl.math.exp2(n - 1.0)
        y = (half * _expm1(r) + (half - 0.5)) * 2.0
        y = tl.where(x > 88.72283, float("inf"), y)
        return tl.where((x != x) | (x == 0.0), x, y)
    else:
        u = tl.math.exp(x)
        off = u - 1.0
        logarithm = tl.math.log(u)
        y = off * (x / tl.where(logarithm == 0.0, 1.0, logarithm))
        y = tl.where((off == 0.0) | (u == float("inf")), x, y)
        return tl.where(off == -1.0, off, tl.where(x > 709.782712893384, float("inf"), y))


@triton.jit
def note(p_wrong, bad, index, shown):
    """Notes that an index is out of range at a key that is shown, and one such index."""
    bad = bad & shown
    at = tl.zeros_like(bad.to(tl.int32))
    tl.store(p_wrong + at, at + 1, mask=bad)
    tl.store(p_wrong + 1 + at, index.to(tl.int64) + at, mask=bad)


class TableRow(NamedTuple):
    """A row of a table: pointer and stride of its entries, and how many; the least and greatest of the whole table.

    is_one: all of a box looks up this row. inside: none of its other indices is out of bounds.
    """

    p: Any
    stride: Any
    size: Any
    least: Any
    most: Any
    is_one: Any
    inside: Any


@triton.jit
def entry_range(row: TableRow, low, high, WIDTH: tl.constexpr):
    """Least and greatest entry from `low` to `high` of a row of a table, for one such run or for many.

    The whole table's where the run is longer than WIDTH, may leave the table, or the box spans several rows; and
    whether every index is in bounds: if not, the keys must be classified one by one.
    """
    inside = row.inside & (low >= 0) & (high < row.size)
    short = inside & row.is_one & (high - low < WIDTH)
    if len(short.shape) == 0:
        o_run = tl.arange(0, WIDTH)
        m = (o_run <= high - low) & short
        entries = tl.load(row.p + (low + o_run).to(tl.int64) * row.stride, mask=m, other=0).to(tl.int64)
        a = tl.min(tl.where(m, entries, 1 << 60), 0)
        b = tl.max(tl.where(m, entries, -(1 << 60)), 0)
    else:  # every box its own run, and its own row where an index before the last differs; in parts: registers
        nothing = tl.zeros_like(short.to(tl.int64))
        count, p_first = high - low + nothing, row.p + (low + nothing) * row.stride
        a, b = nothing + (1 << 60), nothing - (1 << 60)
        for at in tl.range(0, WIDTH, 16):
            o_run = at + tl.arange(0, 16)[None, :]
            m = (o_run <= count[:, None]) & short[:, None]
            entries = tl.load(p_first[:, None] + o_run * row.stride, mask=m, other=0).to(tl.int64)
            a = tl.minimum(a, tl.min(tl.where(m, entries, 1 << 60), 1))
            b = tl.maximum(b, tl.max(tl.where(m, entries, -(1 << 60)), 1))
    return tl.where(short, a, row.least), tl.where(short, b, row.most), inside
