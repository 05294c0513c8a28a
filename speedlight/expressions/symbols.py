"""Symbols: the arguments of a mask or score function. Their operators build the tree.

Two kinds of values meet as the greater (an int and a float meet as a float, as in PyTorch). Python numbers are weak: a
float is a `float`, and their values are run-time parameters of a kernel, never part of its key.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from ..arrays.torch_tensors import is_tensor
from ..errors import ExpressionError, pass_on, shown
from . import foreign
from .operations import INT_MAX, INT_MIN, KINDS, OPERATIONS
from .rows import Row, entrywise, is_row
from .tree import Node, convert, kind_of

# what `array[symbol]` is: (array, index) -> the entry; while a function is traced. tracing.py sets it
LOOKUP: ContextVar[Callable[[Any, Any], Any] | None] = ContextVar("lookup", default=None)


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
    found = _scalar_of(x)
    if found is not None:
        return node_of(found)
    if isinstance(x, Row):
        raise ExpressionError(
            f"{x.name}: expected one number; got a row of {x.count}. Index it, or make one number of it: .any(), "
            ".all(), .sum(), .amax() …"
        )
    if type(x).__module__.split(".")[0] in ("jax", "jaxlib"):
        raise ExpressionError(OF_JAX)
    name, way = _OURS.get(type(x).__name__, (type(x).__name__, "Look arrays up through sl.table(array)."))
    raise ExpressionError(f"{name}: expected a symbol or a Python number in an expression. {way}")


# our own types, which modules further on have: what they are, and the way out
_OURS = {
    "Expression": ("a pattern", "Join patterns and functions outside: sl.causal() & (lambda b, h, i, j: …)."),
    "Table": ("a table", "Look it up at positions: table[i]."),
    "TableRows": ("a row of a table", "Look it up at as many positions as it has dimensions: table[h, i]."),
}


OF_JAX = (
    "JAX's functions and arrays: expected functions that symbols can follow; JAX wants numbers. Use NumPy's, "
    "PyTorch's or ours, np.tanh, torch.where, sl.exp …, and look arrays up through sl.table(array)."
)


def _scalar_of(x: Any) -> Any:
    """A number of a tensor without dimensions; what can be learned, now or later, stays a tensor's entry."""
    if not is_tensor(x) or x.ndim:
        return None
    return _looked_up(x, ()) if x.is_floating_point() else x.item()


def _looked_up(array: Any, index: Any) -> Any:
    """The entry of an array that lies outside the function, as that of a table."""
    lookup = LOOKUP.get()
    if lookup is None:
        raise ExpressionError(
            "a symbol is one number of a function that is traced, and means nothing outside it. Look arrays up there, "
            "or through sl.table(array)."
        )
    return lookup(array, index)


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:
        raise ExpressionError(f"number {shown(x)}: expected one that float64 holds.") from None


def _refusal(asked: str) -> Callable[..., Any]:
    """Makes a method that says what cannot be asked of a symbol, and the way out."""

    def refuse(self: Symbol, *_: Any) -> Any:
        raise ExpressionError(f"a symbol has no value while a mask or score is traced, so {asked}")

    return refuse


_NO_BRANCH = _refusal(
    "Python's if, and, or, not, in, max, range and chains such as 0 <= x < 4 cannot look at it. Put parentheses around "
    "each comparison and join them by & | ~, as (0 <= x) & (x < 4); else use sl.where(condition, yes, no), sl.minimum, "
    "sl.maximum."
)
_NO_INDEX = _refusal(
    "Python's lists, dicts, slices and range() cannot look at it: look numbers up through sl.table([…])[symbol], and "
    "use sl.where(condition, yes, no)."
)
_NO_INT = _refusal(
    "int() and round() cannot look at it: use sl.cast(x, int), which drops the fraction, or sl.floor(x + 0.5)."
)
_NO_NUMBER = _refusal(
    "float() and the functions of Python's math cannot look at it: use NumPy's or PyTorch's, np.tanh or torch.tanh, or "
    "sl.exp, sl.tanh …"
)
_MOST_POWER = 64  # of a power by multiplication, which takes negative bases


def _multiplied(x: Symbol, n: int) -> Symbol:
    """x to the n: squares, and x where a bit of n is set."""
    result: Any = 1
    for bit in bin(n)[2:]:
        result = result * result if isinstance(result, Symbol) else result
        result = x * result if bit == "1" else result
    return result if isinstance(result, Symbol) else x * 0 + 1


def _operator(op: str) -> tuple[Callable[[Symbol, Any], Symbol], Callable[[Symbol, Any], Symbol]]:
    """Returns the method of a Python operator, and that of its reflection."""
    return lambda self, other: applied(op, self, other), lambda self, other: applied(op, other, self)


class Symbol:
    """Argument of a mask or score function; Python's operators on it build the expression.

    A function that is annotated takes and returns these:

    >>> import speedlight as sl
    >>> def near(b: sl.Symbol, h: sl.Symbol, i: sl.Symbol, j: sl.Symbol) -> sl.Symbol:
    ...     return (j <= i) & (i - j < 4)
    >>> sl.expression(near)
    mask ((j <= i) & ((i - j) < 4))
    """

    __slots__ = ("__weakref__", "node")

    def __init__(self, node: Node) -> None:
        self.node = node

    def __repr__(self) -> str:
        return repr(self.node)

    __bool__ = __len__ = __iter__ = __complex__ = __array__ = __contains__ = __reversed__ = _NO_BRANCH
    __hash__ = __index__ = _NO_INDEX  # type: ignore[assignment]
    __int__ = __round__ = _NO_INT
    __float__ = __trunc__ = __floor__ = __ceil__ = _NO_NUMBER

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """np.float32(2) * i, np.exp(s) …: what foreign.py has."""
        if method != "__call__":
            raise foreign.unknown("numpy", ufunc)
        return foreign.called(by_name, "numpy", ufunc, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return foreign.called(by_name, "numpy", function, args, dict(options))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        """torch.tanh(s), tensor * s, tensor[i] …"""
        if function is sys.modules["torch"].Tensor.__getitem__:
            return _looked_up(*args)
        return foreign.called(by_name, "torch", function, args, dict(options or {}))

    def __getitem__(self, index: Any) -> Any:
        raise ExpressionError("a symbol is one number and has no entries. Look arrays up through sl.table(array).")

    def __matmul__(self, other: Any) -> Any:
        raise ExpressionError("a symbol is one number and has no product of matrices. Use *.")

    __rmatmul__ = __matmul__

    @property
    def dtype(self) -> type:
        """The dtype that symbol.to(…) and torch.tensor(…, dtype=…) take."""
        return {"bool": bool, "int": int, "float": float, "double": np.float64}[self.node.kind]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one number, which symbol.new_zeros(symbol.shape) takes."""
        return ()

    def __getattr__(self, name: str) -> Any:
        """A method of tensors that we have: s.tanh(), i.clamp(0, 9), s.to(torch.float32) …"""
        method = foreign.method(by_name, self, name)
        if method is not None:
            return method
        if name == "device" and "torch" in sys.modules:
            return sys.modules["torch"].device("cpu")
        if name in ("__array_struct__", "__array_interface__"):  # NumPy's questions, before it gives up
            raise ExpressionError(
                "NumPy cannot make an array of a symbol, nor look one up at it that the function does not capture by "
                "its own name. Look it up through sl.table(array); np.minimum, np.where … work on symbols."
            )
        if name == "__jax_array__":
            raise ExpressionError(OF_JAX)
        raise ExpressionError(
            f"a symbol has no attribute {name!r}; an expression is built of operators and sl.where, sl.exp, sl.table …"
        )

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("sub")
    __mul__, __rmul__ = _operator("mul")
    __truediv__, __rtruediv__ = _operator("div")
    __floordiv__, __rfloordiv__ = _operator("floordiv")
    __mod__, __rmod__ = _operator("mod")
    __lshift__, __rlshift__ = _operator("shl")
    __rshift__, __rrshift__ = _operator("shr")
    __and__ = __rand__ = _operator("and")[0]
    __or__ = __ror__ = _operator("or")[0]
    __xor__ = __rxor__ = _operator("xor")[0]
    __lt__, __gt__ = _operator("lt")[0], _operator("gt")[0]
    __le__, __ge__ = _operator("le")[0], _operator("ge")[0]
    __eq__, __ne__ = _operator("eq")[0], _operator("ne")[0]  # type: ignore[assignment]

    def __divmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return other // self, other % self

    def __pow__(self, n: Any, modulus: Any = None) -> Symbol:
        if modulus is not None:
            raise ExpressionError("pow: expected two arguments in an expression; got a third. Use %.")
        number = _float(n) if isinstance(n, numbers.Real) else math.nan
        if number == 0.5:
            return applied("sqrt", self)
        if not number.is_integer():
            return applied("exp2", applied("log2", self) * n)
        if abs(number) > _MOST_POWER:
            raise ExpressionError(
                f"**: expected a whole exponent from {-_MOST_POWER} to {_MOST_POWER}, or a fraction; got {shown(n)}."
            )
        is_int = isinstance(n, numbers.Integral) or self.node.is_float
        result = _multiplied(self if is_int else Symbol(convert(self.node, "float")), abs(int(number)))
        return result if number >= 0 else 1.0 / result

    def __rpow__(self, base: Any) -> Symbol:
        number = node_of(base)
        if number.op != "number" or not number.value > 0:
            raise ExpressionError(f"**: expected a positive base; got {shown(base)}.")
        return applied("exp2", self * float(np.log2(float(number.value))))

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


def applied(op: str, *operands: Any) -> Symbol:
    """An operation on operands of one kind: the greatest of theirs, or the next that the operation accepts."""
    if [x for x in operands if is_row(x)]:
        return entrywise(applied, op, operands)  # type: ignore[return-value]
    row, nodes = OPERATIONS[op], [node_of(x) for x in operands]
    if op in _COMPARISONS:
        _check_precedence(str(row.symbol), nodes)
    kind = _greatest(nodes)
    # lists: an interrupt that comes while a generator is closed would be lost
    accepted_kinds = [x for x in KINDS[KINDS.index(kind) :] if x in row.accepts]
    if not accepted_kinds:
        raise _no_float(str(row.symbol), Symbol(convert(nodes[0], kind)))
    accepted = accepted_kinds[0]
    args = tuple(convert(a, accepted) for a in nodes)
    if op in ("and", "or") and accepted == "bool":
        for a, b in (args, args[::-1]):
            if a.op == "number":  # True & b, False | b are b
                return Symbol(b if a.value is (op == "and") else a)
    if op in ("shl", "shr") and args[1].op == "number" and not 0 <= args[1].value < 64:
        raise ExpressionError(f"{row.symbol}: expected a shift of 0 to 63; got {args[1].value}.")
    return Symbol(Node(op, row.gives or accepted, args))


_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _check_precedence(symbol: str, nodes: list[Node]) -> None:
    """Raises for a comparison of `condition & position`, as in (i >= j) & j > 2; a table's flags may be joined so."""
    for x, other in (nodes, nodes[::-1]):
        joined = x.args if x.kind == "int" and x.op in ("and", "or", "xor") else ()
        bits = [a for a in joined if a.op != "cast" or a.args[0].kind != "bool"]
        if len(bits) != 1 or (bits[0].op in ("table", "number") and other.op == "number" and other.value in (0, 1)):
            continue
        raise ExpressionError(
            f"{symbol}: expected a number on each side; got {x!r}, for & | ^ bind tighter than comparisons. Put "
            "parentheses around each comparison: (i >= j) & (j > 2)."
        )


def _greatest(nodes: list[Node]) -> str:
    return max((a.kind for a in nodes), key=KINDS.index)


def _no_float(op: str, x: Symbol) -> ExpressionError:
    return ExpressionError(f"{op}: expected bool or integers; got a float in {x!r}. Use sl.cast(x, int).")


def is_traced(*args: Any) -> bool:
    """Returns whether a symbol, a row of them, or a tensor's one number in a trace is among them."""
    if [x for x in args if isinstance(x, (Symbol, Row))]:
        return True
    return LOOKUP.get() is not None and bool([x for x in args if is_tensor(x) and not x.ndim])


def applied_by_numpy(op: str, *operands: Any) -> Any:
    """Returns an operation's value on numbers and arrays."""
    try:
        return OPERATIONS[op].numpy(*operands)
    except Exception as error:  # another library's array may refuse by any
        pass_on(error)
        got, why = ", ".join(map(shown, operands)), str(error).rstrip(".")
        raise ExpressionError(f"{op}: expected symbols, numbers or arrays of them; got {got} ({why}).") from None


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Chooses `yes` where the condition holds, else `no`.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: sl.where(j < 4, s + 1.0, s))
    score where((j < 4), (s + 1.0), s)
    """
    if not is_traced(condition, yes, no):
        return applied_by_numpy("where", condition, yes, no)[()]
    if [x for x in (condition, yes, no) if is_row(x)]:
        return entrywise(by_name, "where", (condition, yes, no))
    c = node_of(condition)
    if c.kind != "bool":
        raise ExpressionError(f"where: expected a bool condition; got {c.kind} {c!r}. Write a comparison.")
    x, y = node_of(yes), node_of(no)
    kind = _greatest([x, y])
    return Symbol(Node("where", kind, (c, convert(x, kind), convert(y, kind))))


def cast(x: Any, dtype: Any) -> Any:
    """Converts x to bool, int (int64, for any integer type), float or float32 (the type of scores), or float64.

    A float becomes an int by dropping its fraction. NaN becomes 0; a float that int64 cannot hold becomes its least or
    greatest number.

    >>> import speedlight as sl
    >>> sl.expression(lambda s, b, h, i, j: s * sl.cast(j, float))
    score (s * cast(j))
    """
    kind = {bool: "bool", int: "int", float: "float"}.get(dtype) if isinstance(dtype, type) else None
    if kind is None:
        kind = _kind_named(dtype)
    if kind is None:
        raise ExpressionError(f"cast: expected bool, int, float32 or float64; got {shown(dtype)}.")
    if is_row(x):
        return entrywise(by_name, "cast", (x, kind))
    node = node_of(x)
    if kind == "bool" and node.kind != "bool" and node.op != "number":
        return Symbol(node) != 0
    return Symbol(convert(node, kind))


def _kind_named(dtype: Any) -> str | None:
    """The kind of a dtype as NumPy, ml_dtypes, PyTorch or a string name it."""
    name = shown(dtype)
    try:
        return None if dtype is None else kind_of(np.dtype(name[6:] if name.startswith("torch.") else dtype))
    except Exception as error:  # NumPy's, or of whatever was passed
        pass_on(error)
        return "float" if name == "torch.bfloat16" else None


def by_name(op: str, *operands: Any) -> Any:
    """An operation of the table, or a power, or a number of some dtype, by its name: what foreign.py's rules need."""
    if [x for x in operands if is_row(x)]:
        return entrywise(by_name, op, operands)
    match op:
        case "where":
            return where(*operands)
        case "cast":
            return cast(*operands)
        case "pow":
            a, b = operands
            return a**b if isinstance(a, Symbol) else Symbol(node_of(b)).__rpow__(a)  # NumPy's numbers would ask again
        case "not":
            return ~Symbol(node_of(*operands))
        case "floor":
            (x,) = operands
            return applied("floor", x) if node_of(x).is_float else x
        case "number":
            value, dtype = operands
            return cast(value, dtype)
    return applied(op, *operands)
