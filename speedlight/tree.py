"""The tree of a traced mask or score: nodes, their order, and their values in NumPy. It knows no engine.

Kinds of values are bool < int < float < double. `int` is int64; `float` is what scores are computed in: float32, or
float64 for float64 arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import ArgumentError

KINDS = ("bool", "int", "float", "double")
SYMBOLS = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
BITS = {"and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sigmoid")  # of one float
_INFIX = ARITHMETIC | COMPARISONS | BITS


class Node:
    """One operation. `value` is a number, a Table, or a symbol's name."""

    __slots__ = ("args", "kind", "op", "uses", "value")

    def __init__(self, op: str, kind: str, args: tuple[Node, ...] = (), value: Any = None) -> None:
        self.op, self.kind, self.args, self.value = op, kind, args, value
        own = {value} if op == "symbol" else set()
        self.uses: frozenset[str] = frozenset(own.union(*(a.uses for a in args)))

    @property
    def is_float(self) -> bool:
        return self.kind in ("float", "double")

    def __repr__(self) -> str:
        args = [repr(a) for a in self.args]
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
        return Node("number", kind, value={"bool": bool, "int": int}.get(kind, float)(a.value))
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


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x)))


NUMPY: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide, "mod": np.mod,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": np.left_shift, "shr": np.right_shift,
    "neg": np.negative, "abs": np.abs, "not": np.logical_not, "min": np.minimum, "max": np.maximum, "where": np.where, "floor": np.floor,
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "tanh": np.tanh, "sqrt": np.sqrt, "sigmoid": _sigmoid,
}  # fmt: skip


def numpy_type(kind: str, float_type: Any) -> np.dtype:
    return np.dtype({"bool": np.bool_, "int": np.int64, "float": float_type, "double": np.float64}[kind])


def evaluate(root: Node, env: dict[str, Any], float_type: Any = np.float64, seen: Any = True) -> Any:
    """The tree over arrays that broadcast: env maps s, b, h, i, j to them.

    Raises ArgumentError where an index is out of range at an element that is visible (`seen`).
    """
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for node in order(root):
            kind = numpy_type(node.kind, float_type)
            args = [values[id(a)] for a in node.args]
            if node.op == "symbol":
                value = np.asarray(env[node.value])
                value = value.astype(kind) if value.dtype != kind else value
            elif node.op == "number":
                value = kind.type(node.value)
            elif node.op == "table":
                value = _look_up(node, args, seen).astype(kind)
            elif node.op == "cast":
                value = np.asarray(np.trunc(args[0]) if node.kind == "int" and node.args[0].is_float else args[0]).astype(kind)
            elif node.op in ("floordiv", "mod") and node.kind == "int":
                value = np.where(args[1] == 0, 0, NUMPY[node.op](args[0], np.where(args[1] == 0, 1, args[1])))
            else:
                value = NUMPY[node.op](*args)
            values[id(node)] = value
    return values[id(root)]


def _look_up(node: Node, index: list[Any], seen: Any) -> Any:
    array = node.value.array
    inside = [np.clip(x, 0, max(n - 1, 0)) for x, n in zip(index, array.shape, strict=True)]
    for at, (x, y, n) in enumerate(zip(index, inside, array.shape, strict=True)):
        x, wrong = np.broadcast_arrays(x, (np.asarray(x != y) | (n == 0)) & seen)
        if wrong.any():
            raise out_of_range(node.value, at, int(x[wrong][0]))
    return array[tuple(inside)] if array.size else np.zeros(np.broadcast_shapes(*(np.shape(x) for x in inside)), array.dtype)


def out_of_range(which: Any, at: int, value: int) -> ArgumentError:
    """The error of an index outside its table."""
    return ArgumentError(
        f"{which.name}: expected index {at + 1} from 0 to {which.array.shape[at] - 1} where the key is visible; got {value} "
        f"(shape {which.array.shape}). Hide those keys with a mask, or bound the index with sl.minimum and sl.maximum."
    )
