"""The tree of a traced mask or score: nodes, their order, and their values in NumPy. It knows no engine.

Kinds of values are bool < int < float < double. `int` is int64, and its arithmetic wraps; `float` is what scores are
computed in: float32, or float64 for float64 arrays. `evaluate` is the definition of every operation: docs/numerics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import numpy as np

from ..errors import ArgumentError

KINDS = ("bool", "int", "float", "double")
SYMBOLS = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
BITS = {"and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sigmoid")  # of one float
_INFIX = ARITHMETIC | COMPARISONS | BITS
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
_SHOWN = 800  # characters of an expression that a message shows


_T = TypeVar("_T")


class lazily(Generic[_T]):
    """A property that is computed once.

    Not functools.cached_property: Python 3.11's has a lock, which a forked child may find taken.
    """

    def __init__(self, function: Callable[[Any], _T]) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: Any, owner: Any = None) -> _T:
        value = instance.__dict__[self.function.__name__] = self.function(instance)
        return value


class Node:
    """One operation. `value` is a number, a Table, or a symbol's name; `linear` is bounds.py's memo."""

    __slots__ = ("args", "kind", "linear", "op", "uses", "value")

    def __init__(self, op: str, kind: str, args: tuple[Node, ...] = (), value: Any = None) -> None:
        self.op, self.kind, self.args, self.value = op, kind, args, value
        self.linear: Any = ...
        own = {value} if op == "symbol" else set()
        self.uses: frozenset[str] = frozenset(own.union(*(a.uses for a in args)))

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "double")

    def __repr__(self) -> str:
        texts: dict[int, str] = {}
        for node in order(self):
            text = node._text([texts[id(a)] for a in node.args])
            texts[id(node)] = text if len(text) <= _SHOWN else node._text(["…"] * len(node.args))
        return texts[id(self)]

    def _text(self, args: list[str]) -> str:
        if self.op in ("symbol", "number"):
            return str(self.value)
        if self.op == "table":
            return f"{self.value.name}[{', '.join(args)}]"
        if self.op in _INFIX:
            return f"({args[0]} {_INFIX[self.op]} {args[1]})"
        if self.op in ("neg", "not"):
            return f"{'-' if self.op == 'neg' else '~'}{args[0]}"
        return f"{self.op}({', '.join(args)})"


def convert(a: Node, kind: str) -> Node:
    """`a` as another kind; a number changes itself."""
    if a.kind == kind:
        return a
    if a.op == "number":
        value = (
            int(whole(np.float64(a.value)))
            if kind == "int" and a.is_float
            else {"bool": bool, "int": int}.get(kind, float)(a.value)
        )
        return Node("number", kind, value=value)
    return Node("cast", kind, (a,))


def order(root: Node) -> list[Node]:
    """Every node once, arguments first."""
    seen: dict[int, Node] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if id(node) in seen:
            continue
        if ready:
            seen[id(node)] = node
        else:
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args))
    return list(seen.values())


def steps(root: Node) -> Iterator[tuple[Node, list[int]]]:
    """Every node once, arguments first; with it, by id, the arguments that nobody needs after it."""
    nodes = order(root)
    left = Counter(id(a) for node in nodes for a in node.args)
    for node in nodes:
        left.subtract(id(a) for a in node.args)
        yield node, [at for at in {id(a) for a in node.args} if not left[at]]


def whole(x: Any) -> Any:
    """Floats as int64: the fraction is dropped, NaN is 0, and what is beyond int64 becomes its nearest end."""
    x = np.asarray(x)
    inside = (x >= -(2.0**63)) & (x < 2.0**63)
    return np.where(
        inside, np.where(inside, x, 0).astype(np.int64), np.where(x > 0, INT_MAX, np.where(x < 0, INT_MIN, 0))
    )


def _floordiv(a: Any, b: Any) -> Any:
    """Of integers: rounded down, 0 where b is 0; INT_MIN // -1 wraps to INT_MIN."""
    if np.asarray(a).dtype.kind == "f":
        return np.floor_divide(a, b)
    usual = (b != 0) & (b != -1)
    return np.where(usual, np.floor_divide(a, np.where(usual, b, 1)), np.where(b == 0, 0, np.negative(a)))


def _mod(a: Any, b: Any) -> Any:
    """Of integers: of the divisor's sign, 0 where b is 0 or -1."""
    if np.asarray(a).dtype.kind == "f":
        return np.mod(a, b)
    usual = (b != 0) & (b != -1)
    return np.where(usual, np.mod(a, np.where(usual, b, 1)), 0)


def _shl(a: Any, n: Any) -> Any:
    """0 where n is not in 0 … 63."""
    inside = (n >= 0) & (n < 64)
    return np.where(inside, np.left_shift(a, np.where(inside, n, 0)), 0)


def _shr(a: Any, n: Any) -> Any:
    """The sign, 0 or -1, where n is not in 0 … 63."""
    return np.right_shift(a, np.where((n >= 0) & (n < 64), n, 63))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x)))


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": _floordiv, "mod": _mod,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": _shl, "shr": _shr,
    "neg": np.negative, "abs": np.abs, "not": np.logical_not, "min": np.minimum, "max": np.maximum, "where": np.where,
    "floor": np.floor,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt,
    "sigmoid": _sigmoid,
}  # fmt: skip


def numpy_type(kind: str, float_type: Any) -> np.dtype:
    return np.dtype({"bool": np.bool_, "int": np.int64, "float": float_type, "double": np.float64}[kind])


def evaluate(
    root: Node, env: dict[str, Any], float_type: Any = np.float64, seen: Any = True, beyond: float = np.inf
) -> Any:
    """The tree over arrays that broadcast: env maps s, b, h, i, j to them. Floats from ±`beyond` on are infinite.

    Raises ArgumentError where an index is out of range at an element that is visible (`seen`).
    """
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for node, gone in steps(root):
            value = _value(node, [values[id(a)] for a in node.args], env, float_type, seen)
            if node.kind == "float" and beyond < np.inf:
                value = np.where(np.abs(value) >= beyond, np.copysign(np.inf, value), value)
            values[id(node)] = value
            for at in gone:
                del values[at]
    return values[id(root)]


def _value(node: Node, args: list[Any], env: dict[str, Any], float_type: Any, seen: Any) -> Any:
    """What one operation makes of its arguments' values."""
    kind = numpy_type(node.kind, float_type)
    match node.op:
        case "symbol":
            value = np.asarray(env[node.value])
            return value.astype(kind) if value.dtype != kind else value
        case "number":
            return kind.type(node.value)
        case "table":
            return _look_up(node, args, seen).astype(kind)
        case "cast":
            return whole(args[0]) if node.kind == "int" and node.args[0].is_float else np.asarray(args[0]).astype(kind)
    return NUMPY[node.op](*args)


def _look_up(node: Node, index: list[Any], seen: Any) -> Any:
    array = node.value.host()
    inside = [np.clip(x, 0, max(n - 1, 0)) for x, n in zip(index, array.shape, strict=True)]
    for at, (x, y, n) in enumerate(zip(index, inside, array.shape, strict=True)):
        x, wrong = np.broadcast_arrays(x, (np.asarray(x != y) | (n == 0)) & seen)
        if wrong.any():
            raise out_of_range(node.value, at, int(x[wrong][0]))
    return (
        array[tuple(inside)]
        if array.size
        else np.zeros(np.broadcast_shapes(*(np.shape(x) for x in inside)), array.dtype)
    )


def out_of_range(which: Any, at: int, value: int) -> ArgumentError:
    """The error of an index outside its table."""
    return ArgumentError(
        f"{which.name}: expected index {at + 1} from 0 to {which.array.shape[at] - 1} where the key is visible; got "
        f"{value} "
        f"(shape {which.array.shape}). Hide those keys with a mask, or bound the index with sl.minimum and sl.maximum."
    )


def rounding_error(root: Node, env: dict[str, Any], s_error: Any, unit: float) -> tuple[Any, Any]:
    """A score's value in float64, and how far its value in arithmetic of unit roundoff `unit` may be off, if s is by
    s_error.

    First order, with two more units for every function. Conditions of floats count as exact: see docs/numerics.md.
    """
    value: dict[int, Any] = {}
    error: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for node, gone in steps(root):
            v = [value[id(a)] for a in node.args]
            e = [error[id(a)] for a in node.args]
            y = _value(node, v, env, np.float64, False)
            off = _spread(node.op, v, e, y) if v and node.op != "table" else s_error if node.value == "s" else 0.0
            rounded = node.is_float and node.op not in ("symbol", "neg", "abs", "min", "max", "where")
            units = 3 * unit if node.op in FUNCTIONS else unit
            total = off + (units * np.abs(y) if rounded else 0.0)
            value[id(node)], error[id(node)] = (
                y,
                np.where(np.isinf(y), 0.0, total) if node.is_float else total,
            )  # an infinity is exact
            for at in gone:
                del value[at], error[at]
    return value[id(root)], error[id(root)]


def _spread(op: str, v: list[Any], e: list[Any], y: Any) -> Any:
    """What errors of the arguments do to the result."""
    a = np.abs(v[0])
    match op:
        case "add" | "sub" | "min" | "max":
            return e[0] + e[1]
        case "mul":
            return a * e[1] + np.abs(v[1]) * e[0] + e[0] * e[1]
        case "div":
            return (e[0] + np.abs(y) * e[1]) / np.maximum(np.abs(v[1]) - e[1], 1e-300)
        case "where":
            return np.where(v[0], e[1], e[2])
        case "exp" | "exp2":
            return np.abs(y) * np.expm1(e[0])
        case "log" | "log2":
            return 1.5 * e[0] / np.maximum(a - e[0], 1e-300)
        case "sqrt":
            return e[0] / np.maximum(np.sqrt(np.maximum(a - e[0], 0)), np.sqrt(e[0]) + 1e-300)
        case "tanh" | "sigmoid" | "neg" | "abs" | "cast":
            return e[0]
        case "floor":
            return np.where(np.floor(v[0] - e[0]) == np.floor(v[0] + e[0]), 0.0, 1.0)
    return 0.0
