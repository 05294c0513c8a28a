"""Masks and scores as expressions: a user's function, called once with symbols, becomes a small tree.

    mask(b, h, i, j) -> bool        score(s, b, h, i, j) -> s

b, h: batch item and query head; i, j: absolute positions of query and key; s: the scaled score. Kinds of values are
bool < int < float < double; two kinds meet as the greater (an int and a float meet as a float, as in PyTorch). `int`
is int64, `float` is what the kernel computes scores in: float32, or float64 for float64 arrays. Python numbers are
weak: a float is a `float`, and their values are run-time parameters of a kernel, never part of its key.

The tree knows no engine. Each one walks it: cpu/lower.py, `evaluate` here (NumPy), and bounds.py (whole tiles).
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import inspect
import numbers
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays import check_plain_tensor, is_masked, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, ExpressionError, shown
from .tree import BITS, COMPARISONS, FUNCTIONS, INT_MAX, INT_MIN, KINDS, NUMPY, SYMBOLS, Node, convert, lazily, order

_MOST = 4_000  # operations: such a kernel compiles in about two seconds
_HEAVY, _LONG = 16, {"table", "floordiv", "mod", *FUNCTIONS}  # which count for more than one


class Table:
    """An array that masks and scores may look up: `t = sl.table(ids)`, then `t[j]` inside a function.

    Args:
        array: 1 to 4 dimensions of bool, integers, float16, bfloat16, float32 or float64; on a GPU or not. It is
            copied, so later changes do not matter, and gradients do not reach it.
        name: what error messages call it.

    An index must lie in 0 … n - 1 wherever the mask leaves the key visible; elsewhere it may be anything. Integers
    come as int64, float16 and bfloat16 as float.

    Raises:
        speedlight.ArgumentError, ArgumentTypeError: other dimensions or dtypes, a masked array, a sparse tensor …
        speedlight.UnsupportedError: a tensor that requires grad.

    >>> import numpy as np, speedlight as sl
    >>> ids = sl.table(np.array([0, 0, 1, 1]))
    >>> sl.expression(lambda b, h, i, j: ids[i] == ids[j])
    mask (table[i] == table[j])
    """

    __slots__ = ("_ends", "array", "copies", "kind", "name", "tensor")

    def __init__(self, array: Any, name: str = "table", *, copy: bool = True) -> None:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name: expected a string; got {type(name).__name__}.")
        self.tensor: Any = (
            None  # what lies on a GPU and stays there; `array` then has its shape and dtype, and no values
        )
        self.copies: dict[str, Any] = {}  # by device
        if is_tensor(array):
            check_plain_tensor(array, name)
            array = array.detach()
            if array.device.type != "cpu" and not copy:
                self.tensor = array if array.ndim else array.reshape(1)
        array = (
            _entries(array, name)
            if self.tensor is None
            else np.broadcast_to(np.zeros((), _torch_dtype(array, name)), self.tensor.shape)
        )
        if not array.ndim and not copy:
            array = array.reshape(1)
        if not 1 <= array.ndim <= 4:
            raise ArgumentError(f"{name}: expected 1 to 4 dimensions; got shape {array.shape}.")
        self.kind = _table_kind(array.dtype)
        if self.kind is None:
            raise ArgumentTypeError(
                f"{name}: expected bool, integers or floats of up to 64 bits; got dtype {array.dtype}."
            )
        if not array.dtype.isnative:
            if not copy:
                raise ArgumentTypeError(
                    f"{name}: expected native byte order; got {array.dtype.str}. Use "
                    f"{name}.astype({array.dtype.name!r})."
                )
            array = array.astype(array.dtype.newbyteorder("="))
        if array.dtype.name == "bfloat16":
            array = array.astype(np.float32)
        elif array.dtype == np.uint64 and array.size and array.max() > INT_MAX:
            raise ArgumentError(f"{name}: expected integers that int64 can hold; got {array.max()}.")
        if copy:
            array = np.array(array, order="C")
            array.flags.writeable = False
        self.array, self.name = array, name
        self._ends: Any = None

    def reshaped(self, shape: tuple[int, ...]) -> None:
        """Takes another shape with leading ones."""
        self.array = (
            self.array.reshape(shape)
            if self.array.flags.c_contiguous
            else self.array[(None,) * (len(shape) - self.array.ndim)]
        )
        if self.tensor is not None:
            self.tensor = self.tensor[(None,) * (len(shape) - self.tensor.ndim)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype_name(self) -> str:
        """Of the entries as they lie in memory."""
        return self.array.dtype.name if self.tensor is None else str(self.tensor.dtype).removeprefix("torch.")

    @property
    def last_is_one(self) -> bool:
        """Whether entries of the last dimension follow each other."""
        if self.tensor is not None:
            return self.tensor.stride()[-1] == 1
        return self.array.strides[-1] == self.array.itemsize

    def known_ends(self) -> tuple[int, int] | None:
        """Least and greatest entry of integers that stay what they are."""
        if (
            self.kind not in ("bool", "int")
            or not self.array.size
            or self.tensor is not None
            or self.array.flags.writeable
        ):
            return None
        return self.ends()

    def host(self) -> np.ndarray:
        """The entries, wherever they lie."""
        return self.array if self.tensor is None else _entries(self.tensor, self.name)

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != self.array.ndim:
            raise ExpressionError(f"{self.name}: expected {self.array.ndim} indices; got {len(index)}.")
        for at, (x, n) in enumerate(zip(index, self.array.shape, strict=True)):
            if isinstance(x, numbers.Integral) and not 0 <= int(x) < n:
                raise ExpressionError(
                    f"{self.name}: expected index {at + 1} from 0 to {n - 1}; got {shown(x)} (shape "
                    f"{self.array.shape})."
                )
        if (
            all(isinstance(x, numbers.Integral) and not isinstance(x, (bool, np.bool_)) for x in index)
            and self.tensor is None
        ):
            return self.array[tuple(int(x) for x in index)].item()
        nodes = tuple(_node(x) for x in index)
        for at, x in enumerate(nodes):
            if x.kind != "int":
                raise ExpressionError(
                    f"{self.name}: expected an integer as index {at + 1}; got {x.kind}. Use sl.cast(x, int)."
                )
        return Symbol(Node("table", str(self.kind), nodes, self))

    def ends(self) -> tuple[int, int]:
        """Least and greatest entry of an integer or bool table that has any."""
        if self.array.dtype == bool:
            return 0, 1
        if self._ends is None or self.array.flags.writeable:
            array = self.host()
            self._ends = int(array.min()), int(array.max())
        return self._ends

    def __repr__(self) -> str:
        return f"table({self.name}, {self.array.dtype.name}{list(self.array.shape)})"


def _entries(x: Any, name: str) -> np.ndarray:
    """What NumPy reads of an array, a tensor or a list."""
    if is_masked(x):
        raise ArgumentTypeError(
            f"{name}: expected an array without a mask of its own; got {type(x).__name__}. Use {name}.filled(…)."
        )
    try:
        if is_tensor(x):
            x = x.cpu()
            return x.float().numpy() if str(x.dtype) == "torch.bfloat16" else x.numpy()
        return np.asarray(x)
    except Exception as error:  # lists of different lengths, quantised tensors, another library's code
        raise ArgumentTypeError(f"{name}: expected an array that NumPy can read; got {shown(x)} ({error}).") from error


def _torch_dtype(x: Any, name: str) -> Any:
    which = str(x.dtype).removeprefix("torch.")
    try:
        return np.float32 if which == "bfloat16" else np.dtype(which)
    except TypeError:
        raise ArgumentTypeError(
            f"{name}: expected bool, integers or floats of up to 64 bits; got dtype {x.dtype}."
        ) from None


def _table_kind(dtype: np.dtype) -> str | None:
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu":
        return "int"
    if dtype.name in ("float16", "bfloat16", "float32"):
        return "float"
    return "double" if dtype.name == "float64" else None


def table(array: Any, name: str = "table") -> Table:
    return Table(array, name)


table.__doc__ = Table.__doc__


def _node(x: Any) -> Node:
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
        return _node(x.item())
    raise ExpressionError(
        f"{type(x).__name__}: expected a symbol or a Python number in an expression. Look arrays up through "
        "sl.table(array)."
    )


def _float(x: Any) -> float:
    try:
        return float(x)
    except OverflowError:
        raise ExpressionError(f"number {shown(x)}: expected one that float64 holds.") from None


def _promoted(*args: Node) -> tuple[Node, ...]:
    kind = max((a.kind for a in args), key=KINDS.index)
    return tuple(convert(a, kind) for a in args)


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
        return _arithmetic("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return _arithmetic("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return _arithmetic("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return _arithmetic("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return _arithmetic("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return _arithmetic("mul", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return _arithmetic("div", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return _arithmetic("div", other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return _arithmetic("floordiv", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return _arithmetic("floordiv", other, self)

    def __mod__(self, other: Any) -> Symbol:
        return _arithmetic("mod", self, other)

    def __rmod__(self, other: Any) -> Symbol:
        return _arithmetic("mod", other, self)

    def __divmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Symbol, Symbol]:
        return other // self, other % self

    def __pow__(self, n: Any, modulus: Any = None) -> Symbol:
        if modulus is not None:
            raise ExpressionError("pow: expected two arguments in an expression; got a third. Use %.")
        if isinstance(n, numbers.Real) and _float(n).is_integer() and -_MOST_POWER <= _float(n) <= _MOST_POWER:
            whole = (
                self
                if isinstance(n, numbers.Integral)
                else Symbol(self.node if self.node.is_float else convert(self.node, "float"))
            )
            result = _multiplied(whole, builtins.abs(int(_float(n))))
            return result if _float(n) >= 0 else 1.0 / result
        if isinstance(n, numbers.Real) and _float(n).is_integer():
            raise ExpressionError(
                f"**: expected a whole exponent from {-_MOST_POWER} to {_MOST_POWER}, or a fraction; got {shown(n)}."
            )
        return sqrt(self) if isinstance(n, numbers.Real) and _float(n) == 0.5 else exp2(log2(self) * n)

    def __rpow__(self, base: Any) -> Symbol:
        number = _node(base)
        if number.op != "number" or not number.value > 0:
            raise ExpressionError(f"**: expected a positive base; got {shown(base)}.")
        return exp2(self * float(np.log2(float(number.value))))

    def __neg__(self) -> Symbol:
        return Symbol(Node("neg", self.node.kind, (self.node,))) if self.node.kind != "bool" else 0 - self

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return Symbol(Node("abs", self.node.kind, (self.node,))) if self.node.kind != "bool" else self + 0

    def __invert__(self) -> Symbol:
        if self.node.kind == "bool":
            return Symbol(Node("not", "bool", (self.node,)))
        return -1 - self if self.node.kind == "int" else _no_float("~", self)

    def __and__(self, other: Any) -> Symbol:
        return _bits("and", self, other)

    def __or__(self, other: Any) -> Symbol:
        return _bits("or", self, other)

    def __xor__(self, other: Any) -> Symbol:
        return _bits("xor", self, other)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, other: Any) -> Symbol:
        return _bits("shl", self, other)

    def __rshift__(self, other: Any) -> Symbol:
        return _bits("shr", self, other)

    def __rlshift__(self, other: Any) -> Symbol:
        return _bits("shl", other, self)

    def __rrshift__(self, other: Any) -> Symbol:
        return _bits("shr", other, self)

    def __lt__(self, other: Any) -> Symbol:
        return _compare("lt", self, other)

    def __le__(self, other: Any) -> Symbol:
        return _compare("le", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return _compare("gt", self, other)

    def __ge__(self, other: Any) -> Symbol:
        return _compare("ge", self, other)

    def __eq__(self, other: object) -> Any:
        return _compare("eq", self, other)

    def __ne__(self, other: object) -> Any:
        return _compare("ne", self, other)


def _power(a: Any, b: Any) -> Symbol:
    return a**b if isinstance(a, Symbol) else b.__rpow__(a)  # a NumPy number would ask us again


def _no_float(op: str, x: Any) -> Any:
    raise ExpressionError(f"{op}: expected bool or integers; got a float in {x!r}. Use sl.cast(x, int).")


def _arithmetic(op: str, a: Any, b: Any) -> Symbol:
    x, y = _promoted(_node(a), _node(b))
    if x.kind == "bool":
        x, y = convert(x, "int"), convert(y, "int")
    if op == "div" and x.kind == "int":
        x, y = convert(x, "float"), convert(y, "float")
    return Symbol(Node(op, x.kind, (x, y)))


def _bits(op: str, a: Any, b: Any) -> Symbol:
    x, y = _promoted(_node(a), _node(b))
    if x.kind in ("float", "double"):
        _no_float(BITS[op], Symbol(x))
    if op in ("shl", "shr"):
        x, y = convert(x, "int"), convert(y, "int")
        if y.op == "number" and not 0 <= y.value < 64:
            raise ExpressionError(f"{BITS[op]}: expected a shift of 0 to 63; got {y.value}.")
    return Symbol(Node(op, x.kind, (x, y)))


def _compare(op: str, a: Any, b: Any) -> Symbol:
    x, y = _promoted(_node(a), _node(b))
    return Symbol(Node(op, "bool", (x, y)))


def _is_traced(*args: Any) -> bool:
    return any(isinstance(x, Symbol) for x in args)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where the condition holds, else `no`."""
    if not _is_traced(condition, yes, no):
        return np.where(condition, yes, no)[()]
    c = _node(condition)
    if c.kind != "bool":
        raise ExpressionError(f"where: expected a bool condition; got {c.kind} {c!r}. Write a comparison.")
    x, y = _promoted(_node(yes), _node(no))
    return Symbol(Node("where", x.kind, (c, x, y)))


def minimum(a: Any, b: Any) -> Any:
    """The lesser of two; NaN if either is."""
    return _least("min", np.minimum, a, b)


def maximum(a: Any, b: Any) -> Any:
    """The greater of two; NaN if either is."""
    return _least("max", np.maximum, a, b)


def _least(op: str, on_numbers: Any, a: Any, b: Any) -> Any:
    if not _is_traced(a, b):
        return on_numbers(a, b)
    x, y = _promoted(_node(a), _node(b))
    if x.kind == "bool":
        x, y = convert(x, "int"), convert(y, "int")
    return Symbol(Node(op, x.kind, (x, y)))


def _function(name: str, x: Any) -> Any:
    if not _is_traced(x):
        return NUMPY[name](x)
    node = _node(x)
    node = node if node.kind in ("float", "double") else convert(node, "float")
    return Symbol(Node(name, node.kind, (node,)))


def exp(x: Any) -> Any:
    """e to the x; at most 2 ulp off, +0 where the result would be subnormal."""
    return _function("exp", x)


def exp2(x: Any) -> Any:
    """2 to the x; at most 2 ulp off, +0 where the result would be subnormal."""
    return _function("exp2", x)


def log(x: Any) -> Any:
    """Natural logarithm; at most 2 ulp off."""
    return _function("log", x)


def log2(x: Any) -> Any:
    """Logarithm to base 2; at most 2 ulp off."""
    return _function("log2", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent; at most 2 ulp off."""
    return _function("tanh", x)


def sqrt(x: Any) -> Any:
    """Square root, correctly rounded."""
    return _function("sqrt", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)); at most 3 ulp off."""
    return _function("sigmoid", x)


def abs(x: Any) -> Any:
    """Absolute value."""
    return x.__abs__() if isinstance(x, Symbol) else np.abs(x)


def floor(x: Any) -> Any:
    """The largest whole number not above x, of x's kind."""
    if not isinstance(x, Symbol):
        return np.floor(x)
    return x if x.node.kind in ("bool", "int") else Symbol(Node("floor", x.node.kind, (x.node,)))


def cast(x: Any, dtype: Any) -> Any:
    """x as another kind: bool, int (any integer type means int64), float or float32 (what scores are computed in),
    float64.

    A float becomes an int by dropping its fraction; NaN becomes 0, and what int64 cannot hold its least or greatest
    number.
    """
    kind = {bool: "bool", int: "int", float: "float"}.get(dtype) if isinstance(dtype, type) else None
    if kind is None:
        kind = _kind_named(dtype)
    if kind is None:
        raise ExpressionError(f"cast: expected bool, int, float32 or float64; got {shown(dtype)}.")
    node = _node(x)
    if kind == "bool" and node.kind != "bool":
        return Symbol(node) != 0
    return Symbol(convert(node, kind))


def _kind_named(dtype: Any) -> str | None:
    """The kind of a dtype as NumPy, ml_dtypes, PyTorch or a string name it."""
    name = shown(dtype)
    try:
        return None if dtype is None else _table_kind(np.dtype(name[6:] if name.startswith("torch.") else dtype))
    except Exception:  # NumPy's, or of whatever was passed
        return "float" if name == "torch.bfloat16" else None


_UFUNCS: dict[Any, Callable[..., Any]] = {
    **{NUMPY[op]: functools.partial(_arithmetic, op) for op in ("add", "sub", "mul", "div")},
    np.floor_divide: functools.partial(_arithmetic, "floordiv"), np.mod: functools.partial(_arithmetic, "mod"),
    **{NUMPY[op]: functools.partial(_compare, op) for op in COMPARISONS},
    **{NUMPY[op]: functools.partial(_bits, op) for op in ("and", "or", "xor")},
    np.left_shift: functools.partial(_bits, "shl"), np.right_shift: functools.partial(_bits, "shr"),
    **{NUMPY[name]: functools.partial(_function, name) for name in FUNCTIONS if name != "sigmoid"},
    np.negative: operator.neg, np.absolute: abs, np.invert: operator.invert, np.logical_not: operator.invert,
    np.floor: floor,
    np.minimum: minimum, np.maximum: maximum, np.power: _power,
}  # fmt: skip


class Expression:
    """A traced mask or score.

    Masks combine with & | ~. Two are equal if they compute the same from the same tables and numbers.
    """

    __slots__ = ("__dict__", "role", "root", "size")

    def __init__(self, role: str, root: Node, size: int) -> None:
        self.role, self.root, self.size = role, root, size  # size: operations, at most

    @lazily
    def nodes(self) -> list[Node]:
        return order(self.root)

    @lazily
    def numbers(self) -> tuple[Node, ...]:
        """Number nodes in the order of their slots."""
        return tuple(n for n in self.nodes if n.op == "number")

    @lazily
    def tables(self) -> tuple[Table, ...]:
        """Tables in the order of their slots."""
        return tuple(dict.fromkeys(n.value for n in self.nodes if n.op == "table"))

    @lazily
    def key(self) -> str:
        """The structure: operations, kinds, table types, but no number and no size. What kernels are named by."""
        slots = {t: n for n, t in enumerate(self.tables)}
        at: dict[int, int] = {}
        seen: dict[str, int] = {}
        lines = []
        for n, node in enumerate(self.nodes):
            what = ""
            if node.op == "number":
                what = f"#{n}"  # a slot of its own
            elif node.op == "symbol":
                what = str(node.value)
            elif node.op == "table":
                array = node.value.array
                what = f"{slots[node.value]}:{array.dtype.name}:{array.ndim}"
            line = f"{node.op} {node.kind} {what} {' '.join(str(at[id(a)]) for a in node.args)}"
            if line not in seen:
                seen[line] = len(lines)
                lines.append(line)
            at[id(node)] = seen[line]
        return f"{self.role}\n" + "\n".join(lines)

    def _identity(self) -> tuple[Any, ...]:
        """The structure (with every number's kind), numbers by their bits, and which tables."""
        words = tuple(struct.pack("<d", n.value) if n.is_float else n.value for n in self.numbers)
        return self.key, words, tuple(id(t.array if t.tensor is None else t.tensor) for t in self.tables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """Stable from process to process; of the structure alone."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little") >> 1

    def __repr__(self) -> str:
        return f"{self.role} {self.root!r}"

    def _joined(self, op: str, other: Any) -> Expression:
        if callable(other) and not isinstance(other, Expression):
            other = expression(other)
        if not isinstance(other, Expression) or self.role != "mask" or other.role != "mask":
            raise ExpressionError(f"{BITS[op]}: expected two masks; got {self!r} and {other!r}.")
        return _checked("mask", Node(op, "bool", (self.root, other.root)), self.size + other.size)

    def __and__(self, other: Any) -> Expression:
        return self._joined("and", other)

    def __or__(self, other: Any) -> Expression:
        return self._joined("or", other)

    def __rand__(self, other: Any) -> Expression:
        return expression(other) & self

    def __ror__(self, other: Any) -> Expression:
        return expression(other) | self

    def __invert__(self) -> Expression:
        if self.role != "mask":
            raise ExpressionError(f"~: expected a mask; got {self!r}.")
        return _checked("mask", Node("not", "bool", (self.root,)), self.size)

    def __bool__(self) -> bool:
        raise ExpressionError("a mask has no truth value: combine masks with & | ~, not with and, or, not.")


def kept(x: Any) -> bool:
    """Whether a mask or score stays what it is: an Expression whose tables are its own does; an array, or a function,
    does not.
    """
    return x is None or (
        type(x) is Expression and all(t.array.base is None and not t.array.flags.writeable for t in x.tables)
    )


def expression(function: Callable[..., Any] | Expression, role: str | None = None) -> Expression:
    """Traces a mask `function(b, h, i, j)` or a score `function(s, b, h, i, j)` once; the result can be kept and used
    again.

    Raises:
        speedlight.ExpressionError: the function branches on a symbol, uses an unknown operation, or returns a wrong
        type.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: (j <= i) & (i - j < 4))
    mask ((j <= i) & ((i - j) < 4))
    """
    if not (role is None or (isinstance(role, str) and role in ("mask", "score"))):
        raise ArgumentError(f"role: expected 'mask', 'score' or None; got {shown(role)}.")
    if isinstance(function, Expression):
        if role and function.role != role:
            raise ExpressionError(f"{role}: expected a {role}; got the {function!r}.")
        return function
    if not callable(function):
        raise ArgumentTypeError(
            f"{role or 'function'}: expected a function, a pattern such as sl.causal(), or an array; got "
            f"{shown(function)}."
        )
    if isinstance(function, type):
        raise ArgumentTypeError(f"{role or 'function'}: expected a function; got the class {function.__name__}.")
    count = _arity(function)
    role = role or {4: "mask", 5: "score"}.get(count or 0)
    if role is None or count not in (None, 4 if role == "mask" else 5):
        raise ExpressionError(
            f"{role or 'function'}: expected the arguments (b, h, i, j) for a mask, (s, b, h, i, j) for a score; got "
            f"{count} arguments."
        )
    names = ("b", "h", "i", "j") if role == "mask" else ("s", "b", "h", "i", "j")
    result = function(*(Symbol(Node("symbol", SYMBOLS[n], value=n)) for n in names))
    if isinstance(result, Expression):
        return expression(result, role)
    root = _node(result)
    if role == "mask" and root.kind != "bool":
        raise ExpressionError(f"mask: expected a bool result; got {root.kind} {root!r}. Write a comparison.")
    if role == "score":
        root = convert(root, "float")
    if not root.uses <= set(names):
        raise ExpressionError(
            f"{role}: expected a result made of {', '.join(names)}; got {', '.join(root.uses - set(names))} in "
            f"{root!r}."
        )
    return _checked(role, root)


def _checked(role: str, root: Node, most: int = _MOST) -> Expression:
    """The expression, if it is not too long; `most`: operations without the last, as far as is known without
    looking.
    """
    size = most + 1 if most < _MOST else sum(_HEAVY if node.op in _LONG else 1 for node in order(root))
    if size > _MOST:
        raise ExpressionError(
            f"{role}: expected at most {_MOST:,} operations (a lookup, a function, // and % count as {_HEAVY}); got "
            f"{size:,}. "
            "Put constants into an sl.table."
        )
    return Expression(role, root, size)


def _arity(function: Callable[..., Any]) -> int | None:
    """Positional arguments without defaults; None where Python cannot say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


def score_chain(scores: Sequence[Expression]) -> Expression | None:
    """Several scores, left to right, as one."""
    root: Node | None = None
    for one in scores:
        root = one.root if root is None else _substituted(one.root, root)
    return None if root is None else _checked("score", root)


def _substituted(root: Node, s: Node) -> Node:
    """`root` with the symbol s replaced."""
    new: dict[int, Node] = {}
    for node in order(root):
        if node.op == "symbol" and node.value == "s":
            new[id(node)] = s
        elif "s" in node.uses:
            new[id(node)] = Node(node.op, node.kind, tuple(new.get(id(a), a) for a in node.args), node.value)
    return new.get(id(root), root)
