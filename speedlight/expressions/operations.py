"""Table of operations: operands, result, value, interval, rounding error and derivative of each.

A row is all that is known of an operation outside the engines; cpu/kernels/lower.py and gpu/lower.py add its emission.
Kinds of values are bool < int < float < double. `int` is int64, and its arithmetic wraps; `float` is what scores are
computed in: float32, or float64 for float64 arrays.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

KINDS = ("bool", "int", "float", "double")
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
ANY, NUMBERS, FLOATS, BITS = KINDS, KINDS[1:], KINDS[2:], KINDS[:2]
INT, BOOL = ("int",), ("bool",)
LOOKUP_COST = 16  # of a table's entry, as operations count
MOST_ANGLE = 2.0**40  # of sin, cos and tan, which are NaN beyond: up to here 160 bits of π are enough


class Chosen(NamedTuple):
    """A slope that a condition chooses between -1, 0 and 1; what flows is selected, never multiplied by 0."""

    condition: Any
    yes: int
    no: int


class Operation(NamedTuple):
    """A row of the table. Operands have one kind, the greatest of theirs or the next that the operation accepts."""

    name: str
    operands: int  # where's condition is its first, and not of their kind
    accepts: tuple[str, ...]  # kinds of operands
    gives: str | None  # the result's kind; None: the operands'
    symbol: str | None  # in print: before one operand, between two; None: name(…)
    cost: int  # how many operations it counts as, against the most that an expression may have
    numpy: Callable[..., Any]  # its definition on NumPy values; cast's also takes the dtype
    interval: Callable[..., Any] | None  # (ops, node, *intervals) -> (low, high) or None; none: unknown. See bounds.py
    rounding: int  # how many units of roundoff a result of floats is off by itself
    error: Callable[..., Any] | None  # (values, errors, result): what the operands' errors make of it; none: 0
    derivative: Callable[..., Any] | None  # (result, *operands) -> the slope by each operand, of floats
    no_derivative: str = ""  # why there is none


# --- definitions, where NumPy's own would warn, stop or differ


def whole(x: Any) -> Any:
    """Floats as int64: the fraction is dropped, NaN is 0, and what is beyond int64 becomes its nearest end."""
    x = np.asarray(x)
    inside = (x >= -(2.0**63)) & (x < 2.0**63)
    return np.where(
        inside, np.where(inside, x, 0).astype(np.int64), np.where(x > 0, INT_MAX, np.where(x < 0, INT_MIN, 0))
    )


def _cast(x: Any, dtype: np.dtype) -> Any:
    x = np.asarray(x)
    return whole(x) if x.dtype.kind == "f" and dtype.kind == "i" else x.astype(dtype)


def _floordiv(a: Any, b: Any) -> Any:
    """Divides integers, rounded down; 0 where b is 0; INT_MIN // -1 wraps to INT_MIN."""
    if np.asarray(a).dtype.kind == "f":
        return np.floor_divide(a, b)
    usual = (b != 0) & (b != -1)
    return np.where(usual, np.floor_divide(a, np.where(usual, b, 1)), np.where(b == 0, 0, np.negative(a)))


def _mod(a: Any, b: Any) -> Any:
    """Returns remainders of integers, of the divisor's sign; 0 where b is 0 or -1."""
    if np.asarray(a).dtype.kind == "f":
        return np.mod(a, b)
    usual = (b != 0) & (b != -1)
    return np.where(usual, np.mod(a, np.where(usual, b, 1)), 0)


def _shl(a: Any, n: Any) -> Any:
    """Shifts to the left; 0 where n is not in 0 … 63."""
    inside = (n >= 0) & (n < 64)
    return np.where(inside, np.left_shift(a, np.where(inside, n, 0)), 0)


def _shr(a: Any, n: Any) -> Any:
    """Shifts to the right; the sign, 0 or -1, where n is not in 0 … 63."""
    return np.right_shift(a, np.where((n >= 0) & (n < 64), n, 63))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x)))


def _of_angle(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a function of an angle, NaN beyond MOST_ANGLE as of infinities."""

    def definition(x: Any) -> Any:
        x = np.asarray(x)
        return function(np.where(np.abs(x) <= MOST_ANGLE, x, x.dtype.type(np.nan) if x.dtype.kind == "f" else np.nan))

    return definition


def _erf(x: Any) -> Any:
    """Applies Python's erf to every element: NumPy has none."""
    x = np.asarray(x)
    return np.vectorize(math.erf, otypes=[x.dtype if x.dtype.kind == "f" else np.float64])(x)


# --- intervals: least and greatest result of integers, and of conditions (False < True), in the walk's arithmetic `ops`


def _sum_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]


def _difference_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    return a[0] - b[1], a[1] - b[0]


def _product_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    return _hull(ops, [x * y for x in a for y in b])


def _floordiv_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    """Returns the interval of quotients by one number; by others it is unknown."""
    if node.args[1].op != "number":
        return None
    return _hull(ops, [ops.floordiv(end, b[0]) for end in a])


def _mod_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    """Returns the interval of remainders by one number: exact for integers of one quotient, else all there are."""
    if node.args[1].op != "number":
        return None
    n = b[0]
    first, last = ops.floordiv(a[0], n), ops.floordiv(a[1], n)
    same = ops.equal(first, last) & ops.invert(ops.equal(n, 0))
    low, high = ops.minimum(n + 1, n * 0), ops.maximum(n - 1, n * 0)
    return ops.where(same, a[0] - first * n, low), ops.where(same, a[1] - first * n, high)


def _negative_interval(ops: Any, node: Any, a: Any) -> Any:
    return -a[1], -a[0]


def _abs_interval(ops: Any, node: Any, a: Any) -> Any:
    low = ops.maximum(ops.maximum(a[0], -a[1]), a[0] * 0)
    return low, ops.maximum(a[1], -a[0])


def _min_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    return ops.minimum(a[0], b[0]), ops.minimum(a[1], b[1])


def _max_interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
    return ops.maximum(a[0], b[0]), ops.maximum(a[1], b[1])


def _where_interval(ops: Any, node: Any, a: Any, b: Any, c: Any) -> Any:
    if node.kind == "bool":
        return (a[0] & b[0]) | (ops.invert(a[1]) & c[0]), (a[1] & b[1]) | (ops.invert(a[0]) & c[1])
    low, high = ops.minimum(b[0], c[0]), ops.maximum(b[1], c[1])
    never = ops.invert(a[1])
    return ops.where(a[0], b[0], ops.where(never, c[0], low)), ops.where(a[0], b[1], ops.where(never, c[1], high))


def _cast_interval(ops: Any, node: Any, a: Any) -> Any:
    return (ops.where(a[0], 1, 0), ops.where(a[1], 1, 0)) if node.args[0].kind == "bool" else None


def _not_interval(ops: Any, node: Any, a: Any) -> Any:
    return ops.invert(a[1]), ops.invert(a[0])


def _logic(join: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Makes the interval of two conditions, either of which may be unknown (None)."""

    def interval(ops: Any, node: Any, a: Any, b: Any) -> Any:
        if node.kind != "bool":
            return None
        unknown = ops.truth(False), ops.truth(True)
        a, b = a or unknown, b or unknown
        return join(a[0], b[0]), join(a[1], b[1])

    return interval


def _comparison(rule: Callable[[Any, Any, Any], Any]) -> Callable[..., Any]:
    """Makes the row of a comparison, whose interval is that of integers alone."""
    return lambda ops, node, a, b: rule(ops, a, b) if node.args[0].kind == "int" else None


def _equal_interval(ops: Any, a: Any, b: Any) -> Any:
    same = ops.equal(a[0], a[1]) & ops.equal(b[0], b[1]) & ops.equal(a[0], b[0])
    return same, (a[0] <= b[1]) & (b[0] <= a[1])


def _unequal_interval(ops: Any, a: Any, b: Any) -> Any:
    same, meet = _equal_interval(ops, a, b)
    return ops.invert(meet), ops.invert(same)


_LESS = _comparison(lambda ops, a, b: (a[1] < b[0], a[0] < b[1]))
_LESS_OR_EQUAL = _comparison(lambda ops, a, b: (a[1] <= b[0], a[0] <= b[1]))
_GREATER = _comparison(lambda ops, a, b: (a[0] > b[1], a[1] > b[0]))
_GREATER_OR_EQUAL = _comparison(lambda ops, a, b: (a[0] >= b[1], a[1] >= b[0]))
_EQUAL, _UNEQUAL = _comparison(_equal_interval), _comparison(_unequal_interval)


def _hull(ops: Any, ends: list[Any]) -> tuple[Any, Any]:
    low = high = ends[0]
    for x in ends[1:]:
        low, high = ops.minimum(low, x), ops.maximum(high, x)
    return low, high


# --- errors: what errors e of the operands, whose values are v, do to the result y; to first order


def _pass_error(v: Any, e: Any, y: Any) -> Any:
    return e[0]


def _sum_error(v: Any, e: Any, y: Any) -> Any:
    return e[0] + e[1]


def _product_error(v: Any, e: Any, y: Any) -> Any:
    return np.abs(v[0]) * e[1] + np.abs(v[1]) * e[0] + e[0] * e[1]


def _quotient_error(v: Any, e: Any, y: Any) -> Any:
    return (e[0] + np.abs(y) * e[1]) / np.maximum(np.abs(v[1]) - e[1], 1e-300)


def _where_error(v: Any, e: Any, y: Any) -> Any:
    return np.where(v[0], e[1], e[2])


def _power_error(v: Any, e: Any, y: Any) -> Any:
    return np.abs(y) * np.expm1(e[0])


def _logarithm_error(v: Any, e: Any, y: Any) -> Any:
    return 1.5 * e[0] / np.maximum(np.abs(v[0]) - e[0], 1e-300)


def _log1p_error(v: Any, e: Any, y: Any) -> Any:
    return 1.5 * e[0] / np.maximum(np.abs(1 + v[0]) - e[0], 1e-300)


def _expm1_error(v: Any, e: Any, y: Any) -> Any:
    return (y + 1) * np.expm1(e[0])


def _root_error(v: Any, e: Any, y: Any) -> Any:
    least = np.maximum(np.abs(v[0]) - e[0], 0)
    return e[0] / np.maximum(np.sqrt(least), np.sqrt(e[0]) + 1e-300)


def _tangent_error(v: Any, e: Any, y: Any) -> Any:
    """Bounds the error of tan; nothing is known of an argument that may reach a pole."""
    near = np.abs(y) * e[0]
    return np.where(near < 0.5, (1 + y * y) * e[0] / np.maximum(1 - near, 0.5), np.inf)


def _erf_error(v: Any, e: Any, y: Any) -> Any:
    return _ERF_SLOPE * e[0]


def _floor_error(v: Any, e: Any, y: Any) -> Any:
    return np.where(np.floor(v[0] - e[0]) == np.floor(v[0] + e[0]), 0.0, 1.0)


# --- derivatives: the slope by each operand, from the result y and the operands, with Python's operators and NumPy's
# functions, so that one rule makes nodes of symbols and values of NumPy arrays. 1, -1 and 0 (nothing flows) are told
# apart from numbers.


def _flat(y: Any, *operands: Any) -> Any:
    return (0,) * len(operands)


def _abs_slope(y: Any, a: Any) -> Any:
    return (Chosen(a < 0, -1, 1),)


def _min_slope(y: Any, a: Any, b: Any) -> Any:
    """The first operand's where both are least."""
    return Chosen(b < a, 0, 1), Chosen(b < a, 1, 0)


def _max_slope(y: Any, a: Any, b: Any) -> Any:
    """The first operand's where both are greatest."""
    return Chosen(b > a, 0, 1), Chosen(b > a, 1, 0)


def _where_slope(y: Any, condition: Any, a: Any, b: Any) -> Any:
    return 0, Chosen(condition, 1, 0), Chosen(condition, 0, 1)


_LN2, _LOG2_E, _ERF_SLOPE = math.log(2), math.log2(math.e), 2 / math.sqrt(math.pi)
_JUMPS = "its result jumps wherever the quotient becomes whole. Use it of integers, or sl.floor, whose slope is 0"

# name, operands, accepts, gives, symbol, cost | numpy, interval | rounding, error | derivative
_ROWS = (
    Operation("add", 2, NUMBERS, None, "+", 1, np.add, _sum_interval, 1, _sum_error, lambda y, a, b: (1, 1)),
    Operation("sub", 2, NUMBERS, None, "-", 1, np.subtract, _difference_interval, 1, _sum_error,
              lambda y, a, b: (1, -1)),
    Operation("mul", 2, NUMBERS, None, "*", 1, np.multiply, _product_interval, 1, _product_error,
              lambda y, a, b: (b, a)),
    Operation("div", 2, FLOATS, None, "/", 1, np.divide, None, 1, _quotient_error,
              lambda y, a, b: (1.0 / b, -y / b)),
    Operation("floordiv", 2, NUMBERS, None, "//", 16, _floordiv, _floordiv_interval, 1, None, None, _JUMPS),
    Operation("mod", 2, NUMBERS, None, "%", 16, _mod, _mod_interval, 1, None, None, _JUMPS),

    Operation("lt", 2, ANY, "bool", "<", 1, np.less, _LESS, 0, None, _flat),
    Operation("le", 2, ANY, "bool", "<=", 1, np.less_equal, _LESS_OR_EQUAL, 0, None, _flat),
    Operation("gt", 2, ANY, "bool", ">", 1, np.greater, _GREATER, 0, None, _flat),
    Operation("ge", 2, ANY, "bool", ">=", 1, np.greater_equal, _GREATER_OR_EQUAL, 0, None, _flat),
    Operation("eq", 2, ANY, "bool", "==", 1, np.equal, _EQUAL, 0, None, _flat),
    Operation("ne", 2, ANY, "bool", "!=", 1, np.not_equal, _UNEQUAL, 0, None, _flat),

    Operation("and", 2, BITS, None, "&", 1, np.bitwise_and, _logic(operator.and_), 0, None, _flat),
    Operation("or", 2, BITS, None, "|", 1, np.bitwise_or, _logic(operator.or_), 0, None, _flat),
    Operation("xor", 2, BITS, None, "^", 1, np.bitwise_xor, None, 0, None, _flat),
    Operation("shl", 2, INT, None, "<<", 1, _shl, None, 0, None, _flat),
    Operation("shr", 2, INT, None, ">>", 1, _shr, None, 0, None, _flat),
    Operation("not", 1, BOOL, None, "~", 1, np.logical_not, _not_interval, 0, None, _flat),

    Operation("neg", 1, NUMBERS, None, "-", 1, np.negative, _negative_interval, 0, _pass_error, lambda y, a: (-1,)),
    Operation("abs", 1, NUMBERS, None, None, 1, np.abs, _abs_interval, 0, _pass_error, _abs_slope),
    Operation("min", 2, NUMBERS, None, None, 1, np.minimum, _min_interval, 0, _sum_error, _min_slope),
    Operation("max", 2, NUMBERS, None, None, 1, np.maximum, _max_interval, 0, _sum_error, _max_slope),
    Operation("where", 3, ANY, None, None, 1, np.where, _where_interval, 0, _where_error, _where_slope),
    Operation("floor", 1, FLOATS, None, None, 1, np.floor, None, 1, _floor_error, _flat),
    Operation("cast", 1, ANY, None, None, 1, _cast, _cast_interval, 1, _pass_error, lambda y, a: (1,)),

    Operation("exp", 1, FLOATS, None, None, 16, np.exp, None, 3, _power_error, lambda y, a: (y,)),
    Operation("exp2", 1, FLOATS, None, None, 16, np.exp2, None, 3, _power_error, lambda y, a: (y * _LN2,)),
    Operation("log", 1, FLOATS, None, None, 16, np.log, None, 3, _logarithm_error, lambda y, a: (1.0 / a,)),
    Operation("log2", 1, FLOATS, None, None, 16, np.log2, None, 3, _logarithm_error, lambda y, a: (_LOG2_E / a,)),
    Operation("tanh", 1, FLOATS, None, None, 16, np.tanh, None, 3, _pass_error, lambda y, a: (1.0 - y * y,)),
    Operation("sqrt", 1, FLOATS, None, None, 16, np.sqrt, None, 3, _root_error, lambda y, a: (0.5 / y,)),
    Operation("sigmoid", 1, FLOATS, None, None, 16, _sigmoid, None, 3, _pass_error, lambda y, a: (y * (1.0 - y),)),
    Operation("sin", 1, FLOATS, None, None, 16, _of_angle(np.sin), None, 4, _pass_error, lambda y, a: (np.cos(a),)),
    Operation("cos", 1, FLOATS, None, None, 16, _of_angle(np.cos), None, 4, _pass_error, lambda y, a: (-np.sin(a),)),
    Operation("tan", 1, FLOATS, None, None, 16, _of_angle(np.tan), None, 6, _tangent_error,
              lambda y, a: (1.0 + y * y,)),
    Operation("erf", 1, FLOATS, None, None, 16, _erf, None, 4, _erf_error, lambda y, a: (_ERF_SLOPE * np.exp(-a * a),)),
    Operation("log1p", 1, FLOATS, None, None, 16, np.log1p, None, 6, _log1p_error, lambda y, a: (1.0 / (1.0 + a),)),
    Operation("expm1", 1, FLOATS, None, None, 16, np.expm1, None, 6, _expm1_error, lambda y, a: (y + 1.0,)),
)  # fmt: skip
OPERATIONS: dict[str, Operation] = {row.name: row for row in _ROWS}
