"""Symbols: what a mask or score function is called with, and the functions of them. Their operators build the tree.

Two kinds of values meet as the greater (an int and a float meet as a float, as in PyTorch). Python numbers are weak: a
float is a `float`, and their values are run-time parameters of a kernel, never part of its key.
"""

from __future__ import annotations

import builtins
import functools
import numbers
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import ExpressionError, shown
from .operations import INT_MAX, INT_MIN, KINDS, OPERATIONS
from .tree import Node, convert, kind_of


def node_of(x: Any) -> Node:
    if isinstance(x, Symbol):
        return x.node
    if isinstance(x, (bool, np.bool_)):
        return Node("number", "bool", value=bool(x))
    if isinstance(x, numbers.Integral):
        if not INT_MIN <= int(x) <= INT_MAX:
            raise ExpressionError(f"number {shown(x)}: expected an integer that int64 holds. Use a float.")
        return Node("number", "int", value=int(x))
    if isinstance(x, numbers.Real):
        return Node("number", "float", value=_float(x))
    if isinstance(x, np.ndarray) and x.ndim == 0 and x.dtype.kind in "biuf":
        return node_of(x.item())
    raise ExpressionError(
        f"{type(x).__name__}: expected a symbol or a Python number in an expression. Look arrays up through "
        "sl.table(array)."
    )


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:
        raise ExpressionError(f"number {shown(x)}: expected one that float64 holds.") from None


def _no_branch(self: Symbol, *_: Any) -> Any:
    raise ExpressionError(
        "a symbol has no value while a mask or score is traced, so Python's if, and, or, not, max, range … cannot look "
        "at it: "
        "use sl.where(condition, yes, no), & | ~, sl.minimum, sl.maximum."
    )


_MOST_POWER = 64  # of a power by multiplication, which takes negative bases


def _multiplied(x: Symbol, n: int) -> Symbol:
    """x to the n: squares, and x where a bit of n is set."""
    result: Any = 1
    for bit in bin(n)[2:]:
        result = result * result if isinstance(result, Symbol) else result
        result = x * result if bit == "1" else result
    return result if isinstance(result, Symbol) else x * 0 + 1


class Symbol:
    """What a mask or score function is called with: every operator of Python numbers builds the tree."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return repr(self.node)

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __complex__ = __array__ = __round__ = (
        __contains__
    ) = _no_branch
    __hash__ = __trunc__ = __floor__ = __ceil__ = __reversed__ = _no_branch  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Symbol:
        """np.float32(2) * i, np.exp(s) …: the operations that we have, too."""
        op = _UFUNCS.get(ufunc)
        if op is None or method != "__call__" or options:
            name = getattr(ufunc, "__name__", "a ufunc")
            raise ExpressionError(
                f"np.{name}: expected operators, sl.where, sl.exp, sl.minimum … in an expression; symbols have no "
                "values."
            )
        return op(*inputs)

    def __getitem__(self, index: Any) -> Any:
        raise ExpressionError("a symbol is one number and has no entries. Look arrays up through sl.table(array).")

    def __matmul__(self, other: Any) -> Any:
        raise ExpressionError("a symbol is one number and has no product of matrices. Use *.")

    __rmatmul__ = __matmul__

    def __getattr__(self, name: str) -> Any:
        raise ExpressionError(
            f"a symbol has no attribute {name!r}; an expression is built of operators and sl.where, sl.exp, sl.table …"
        )

    def __add__(self, other: Any) -> Symbol:
        return applied("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return applied("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return applied("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return applied("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return applied("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return applied("mul", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return applied("div", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return applied("div", other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return applied("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return applied("floordiv", other, self)

    def __mod__(self, other: Any) -> Symbol:
        return applied("mod", self, other)

    def __rmod__(self, other: Any) -> Symbol:
        return applied("mod", other, self)

    def __divmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return other // self, other % self

    def __pow__(self, n: Any, modulus: Any = None) -> Symbol:
        if modulus is not None:
            raise ExpressionError("pow: expected two arguments in an expression; got a third. Use %.")
        if isinstance(n, numbers.Real) and _float(n).is_integer() and -_MOST_POWER <= _float(n) <= _MOST_POWER:
            is_int = isinstance(n, numbers.Integral) or self.node.is_float
            base = self if is_int else Symbol(convert(self.node, "float"))
            result = _multiplied(base, builtins.abs(int(_float(n))))
            return result if _float(n) >= 0 else 1.0 / result
        if isinstance(n, numbers.Real) and _float(n).is_integer():
            raise ExpressionError(
                f"**: expected a whole exponent from {-_MOST_POWER} to {_MOST_POWER}, or a fraction; got {shown(n)}."
            )
        return sqrt(self) if isinstance(n, numbers.Real) and _float(n) == 0.5 else exp2(log2(self) * n)

    def __rpow__(self, base: Any) -> Symbol:
        number = node_of(base)
        if number.op != "number" or not number.value > 0:
            raise ExpressionError(f"**: expected a positive base; got {shown(base)}.")
        return exp2(self * float(np.log2(float(number.value))))

    def __neg__(self) -> Symbol:
        return applied("neg", self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return applied("abs", self)

    def __invert__(self) -> Symbol:
        if self.node.is_float:
            raise _no_float("~", self)
        return applied("not", self) if self.node.kind == "bool" else -1 - self

    def __and__(self, other: Any) -> Symbol:
        return applied("and", self, other)

    def __or__(self, other: Any) -> Symbol:
        return applied("or", self, other)

    def __xor__(self, other: Any) -> Symbol:
        return applied("xor", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, other: Any) -> Symbol:
        return applied("shl", self, other)

    def __rshift__(self, other: Any) -> Symbol:
        return applied("shr", self, other)

    def __rlshift__(self, other: Any) -> Symbol:
        return applied("shl", other, self)

    def __rrshift__(self, other: Any) -> Symbol:
        return applied("shr", other, self)

    def __lt__(self, other: Any) -> Symbol:
        return applied("lt", self, other)

    def __le__(self, other: Any) -> Symbol:
        return applied("le", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return applied("gt", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return applied("ge", self, other)

    def __eq__(self, other: object) -> Any:
        return applied("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return applied("ne", self, other)


def _power(a: Any, b: Any) -> Symbol:
    return a**b if isinstance(a, Symbol) else b.__rpow__(a)  # a NumPy number would ask us again


def applied(op: str, *operands: Any) -> Symbol:
    """An operation on operands of one kind: the greatest of theirs, or the next that the operation accepts."""
    row, nodes = OPERATIONS[op], [node_of(x) for x in operands]
    kind = _greatest(nodes)
    # lists: an interrupt that comes while a generator is closed would be lost
    accepted_kinds = [x for x in KINDS[KINDS.index(kind) :] if x in row.accepts]
    if not accepted_kinds:
        raise _no_float(str(row.symbol), Symbol(convert(nodes[0], kind)))
    accepted = accepted_kinds[0]
    args = tuple(convert(a, accepted) for a in nodes)
    if op in ("shl", "shr") and args[1].op == "number" and not 0 <= args[1].value < 64:
        raise ExpressionError(f"{row.symbol}: expected a shift of 0 to 63; got {args[1].value}.")
    return Symbol(Node(op, row.gives or accepted, args))


def _greatest(nodes: list[Node]) -> str:
    return max((a.kind for a in nodes), key=KINDS.index)


def _no_float(op: str, x: Symbol) -> ExpressionError:
    return ExpressionError(f"{op}: expected bool or integers; got a float in {x!r}. Use sl.cast(x, int).")


def _is_traced(*args: Any) -> bool:
    return bool([x for x in args if isinstance(x, Symbol)])


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.where(j < 4, s + 1.0, s))
    score where((j < 4), (s + 1.0), s)
    """
    if not _is_traced(condition, yes, no):
        return np.where(condition, yes, no)[()]
    c = node_of(condition)
    if c.kind != "bool":
        raise ExpressionError(f"where: expected a bool condition; got {c.kind} {c!r}. Write a comparison.")
    x, y = node_of(yes), node_of(no)
    kind = _greatest([x, y])
    return Symbol(Node("where", kind, (c, convert(x, kind), convert(y, kind))))


def minimum(a: Any, b: Any) -> Any:
    """The lesser of two; NaN if either is.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: sl.minimum(i, 9) >= j)
    mask (min(i, 9) >= j)
    """
    return _function("min", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The greater of two; NaN if either is.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: sl.maximum(i, 9) >= j)
    mask (max(i, 9) >= j)
    """
    return _function("max", a, b)


def _function(op: str, *operands: Any) -> Any:
    return applied(op, *operands) if _is_traced(*operands) else OPERATIONS[op].numpy(*operands)


def exp(x: Any) -> Any:
    """e to the x; at most 2 ulp off, +0 where the result would be subnormal.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.exp(s))
    score exp(s)
    """
    return _function("exp", x)


def exp2(x: Any) -> Any:
    """2 to the x; at most 2 ulp off, +0 where the result would be subnormal.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.exp2(s))
    score exp2(s)
    """
    return _function("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.log(s))
    score log(s)
    """
    return _function("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.log2(s))
    score log2(s)
    """
    return _function("log2", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent; at most 2 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.tanh(s))
    score tanh(s)
    """
    return _function("tanh", x)


def sqrt(x: Any) -> Any:
    """Square root, correctly rounded.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.sqrt(s))
    score sqrt(s)
    """
    return _function("sqrt", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)); at most 3 ulp off.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.sigmoid(s))
    score sigmoid(s)
    """
    return _function("sigmoid", x)


def abs(x: Any) -> Any:
    """Absolute value.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.abs(s))
    score abs(s)
    """
    return _function("abs", x)


def floor(x: Any) -> Any:
    """The largest whole number not above x, of x's kind.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.floor(s))
    score floor(s)
    """
    return x if isinstance(x, Symbol) and not x.node.is_float else _function("floor", x)


def cast(x: Any, dtype: Any) -> Any:
    """x as another kind: bool, int (any integer type means int64), float or float32 (what scores are computed in),
    float64.

    A float becomes an int by dropping its fraction; NaN becomes 0, and what int64 cannot hold its least or greatest
    number.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: s * sl.cast(j, float))
    score (s * cast(j))
    """
    kind = {bool: "bool", int: "int", float: "float"}.get(dtype) if isinstance(dtype, type) else None
    if kind is None:
        kind = _kind_named(dtype)
    if kind is None:
        raise ExpressionError(f"cast: expected bool, int, float32 or float64; got {shown(dtype)}.")
    node = node_of(x)
    if kind == "bool" and node.kind != "bool":
        return Symbol(node) != 0
    return Symbol(convert(node, kind))


def _kind_named(dtype: Any) -> str | None:
    """The kind of a dtype as NumPy, ml_dtypes, PyTorch or a string name it."""
    name = shown(dtype)
    try:
        return None if dtype is None else kind_of(np.dtype(name[6:] if name.startswith("torch.") else dtype))
    except Exception:  # NumPy's, or of whatever was passed
        return "float" if name == "torch.bfloat16" else None


_UFUNCS: dict[Any, Callable[..., Any]] = {
    **{row.numpy: functools.partial(applied, op) for op, row in OPERATIONS.items() if isinstance(row.numpy, np.ufunc)},
    np.floor_divide: functools.partial(applied, "floordiv"), np.mod: functools.partial(applied, "mod"),
    np.left_shift: functools.partial(applied, "shl"), np.right_shift: functools.partial(applied, "shr"),
    np.invert: operator.invert, np.logical_not: operator.invert, np.floor: floor, np.power: _power,
}  # fmt: skip
