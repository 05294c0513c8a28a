"""Tree of a traced mask or score: nodes, their order, and their values in NumPy. It knows no engine.

`evaluate` is the definition of every operation, with the NumPy functions of operations.py: docs/numerics.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..errors import ArgumentError
from .operations import OPERATIONS, whole

FLOW = "d"  # the symbol of what flows into a score, in its derivative
OF_KEYS = frozenset(("s", "j", FLOW))  # symbols that change from key to key
SYMBOLS = {"s": "float", "b": "int", "h": "int", "i": "int", "j": "int"}
_LONGEST = 800  # characters of an expression that a message shows

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
            texts[id(node)] = text if len(text) <= _LONGEST else node._text(["…"] * len(node.args))
        return texts[id(self)]

    def _text(self, args: list[str]) -> str:
        if self.op in ("symbol", "number"):
            return str(self.value)
        if self.op == "table":
            return f"{self.value.name}[{', '.join(args)}]"
        symbol = OPERATIONS[self.op].symbol
        if symbol is None:
            return f"{self.op}({', '.join(args)})"
        return f"{symbol}{args[0]}" if len(args) == 1 else f"({args[0]} {symbol} {args[1]})"


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


def replaced(root: Node, by: dict[str, Node]) -> Node:
    """Returns the tree with other trees in place of the symbols of these names."""
    new: dict[int, Node] = {}
    for node in order(root):
        args = tuple([new[id(a)] for a in node.args])
        if node.op == "symbol" and node.value in by:
            new[id(node)] = by[node.value]
        else:
            new[id(node)] = node if args == node.args else Node(node.op, node.kind, args, node.value)
    return new[id(root)]


def merged(roots: list[Node], slots: Container[int] | None = None) -> list[list[Node]]:
    """The trees with equal nodes made one, so that trees of one structure have as many; each in order, its root last.

    Numbers with these ids (None: all) stay apart, whatever their values: each is a slot of its own.
    """
    new: dict[int, Node] = {}
    first: dict[Any, Node] = {}
    trees = []
    for root in roots:
        tree: dict[int, Node] = {}
        for node in order(root):
            one = new.get(id(node))
            if one is None:
                args = tuple([new[id(a)] for a in node.args])
                what = node.value
                if node.op == "number":
                    what = id(node) if slots is None or id(node) in slots else repr(what)
                key = (node.op, node.kind, what, *map(id, args))
                one = first.get(key)
                if one is None:
                    one = node if args == node.args else Node(node.op, node.kind, args, node.value)
                    first[key] = one
                new[id(node)] = one
            tree[id(one)] = one
        trees.append(list(tree.values()))
    return trees


def structure(trees: dict[str, list[Node]]) -> str:
    """Operations, kinds, types of tables, but no number and no size: what kernels are named by.

    A line for each node of merged trees, with its arguments' lines and a table's slot; then which line is which root.
    """
    lines: dict[int, int] = {}
    tables: dict[Any, int] = {}
    texts = []
    for node in (node for tree in trees.values() for node in tree):
        if id(node) in lines:
            continue
        what = node.value if node.op == "symbol" else ""
        if node.op == "table":
            slot = tables.setdefault(node.value, len(tables))
            what = f"{slot}:{node.value.dtype_name}:{node.value.array.ndim}"
        lines[id(node)] = len(lines)
        texts.append(f"{node.op} {node.kind} {what} {' '.join(str(lines[id(a)]) for a in node.args)}")
    return "\n".join((*texts, *(f"{role} {lines[id(tree[-1])]}" for role, tree in trees.items())))


def steps(root: Node) -> Iterator[tuple[Node, list[int]]]:
    """Every node once, arguments first; with it, by id, the arguments that nobody needs after it."""
    nodes = order(root)
    left = Counter(id(a) for node in nodes for a in node.args)
    for node in nodes:
        left.subtract(id(a) for a in node.args)
        yield node, [at for at in {id(a) for a in node.args} if not left[at]]


def numpy_type(kind: str, float_type: Any) -> np.dtype:
    return np.dtype({"bool": np.bool_, "int": np.int64, "float": float_type, "double": np.float64}[kind])


def kind_of(dtype: np.dtype) -> str | None:
    """The kind of what an array of this dtype holds; None: it can be no table."""
    if dtype.kind == "b":
        return "bool"
    if dtype.kind in "iu":
        return "int"
    if dtype.name in ("float16", "bfloat16", "float32"):
        return "float"
    return "double" if dtype.name == "float64" else None


class WrongIndex(NamedTuple):
    """The first index of a lookup that is out of range."""

    element: int  # in row-major order
    lookup: Node
    dimension: int
    value: int


def evaluate(
    root: Node,
    env: dict[str, Any],
    float_type: Any = np.float64,
    seen: Any = True,
    beyond: float = np.inf,
    wrong: list[WrongIndex] | None = None,
) -> Any:
    """The tree over arrays that broadcast: env maps s, b, h, i, j to them. Floats from ±`beyond` on are infinite.

    Raises ArgumentError where an index is out of range at an element that is visible (`seen`): raise_first().
    `wrong`: each lookup's is appended there instead.
    """
    values: dict[int, Any] = {}
    found: list[WrongIndex] = [] if wrong is None else wrong
    with np.errstate(all="ignore"):
        for node, gone in steps(root):
            value = _value(node, [values[id(a)] for a in node.args], env, float_type, seen, found)
            if node.kind == "float" and beyond < np.inf:
                value = np.where(np.abs(value) >= beyond, np.copysign(np.inf, value), value)
            values[id(node)] = value
            for at in gone:
                del values[at]
    if wrong is None:
        raise_first(found)
    return values[id(root)]


def raise_first(wrong: list[WrongIndex]) -> None:
    """Raises for the first element at which an index is out of range, and of several there for the first lookup."""
    if wrong:
        first = min(wrong, key=lambda x: x.element)
        raise out_of_range(first.lookup, first.dimension, first.value)


def _value(
    node: Node, args: list[Any], env: dict[str, Any], float_type: Any, seen: Any, wrong: list[WrongIndex]
) -> Any:
    """Returns the value of one operation, from its arguments' values."""
    kind = numpy_type(node.kind, float_type)
    match node.op:
        case "symbol":
            value = np.asarray(env[node.value])
            return value.astype(kind) if value.dtype != kind else value
        case "number":
            return kind.type(node.value)
        case "table":
            return _look_up(node, args, env, seen, wrong).astype(kind)
        case "cast":
            return OPERATIONS["cast"].numpy(args[0], kind)
    return OPERATIONS[node.op].numpy(*args)


def _look_up(node: Node, index: list[Any], env: dict[str, Any], seen: Any, wrong: list[WrongIndex]) -> Any:
    array = node.value.host()
    inside = [np.clip(x, 0, max(n - 1, 0)) for x, n in zip(index, array.shape, strict=True)]
    for at, (x, y, n) in enumerate(zip(index, inside, array.shape, strict=True)):
        bad = (np.asarray(x != y) | (n == 0)) & seen
        if bad.any():
            bad, x, *_ = np.broadcast_arrays(bad, x, *env.values())
            first = int(bad.argmax())
            wrong.append(WrongIndex(first, node, at, int(x.flat[first])))
    return (
        array[tuple(inside)]
        if array.size
        else np.zeros(np.broadcast_shapes(*(np.shape(x) for x in inside)), array.dtype)
    )


def out_of_range(lookup: Node, at: int, value: int) -> ArgumentError:
    """The error of an index outside its table."""
    table, of_heads = lookup.value, lookup.args[at].op == "symbol" and lookup.args[at].value == "h"
    return ArgumentError(
        f"{table.name}: expected index {at + 1} from 0 to {table.array.shape[at] - 1} where the key is visible; "
        f"got {value} (shape {table.array.shape}). "
        + ("Give an entry for each query head. " if of_heads else "")
        + (table.way or "Hide those keys with a mask, or bound the index with sl.minimum and sl.maximum.")
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
            y = _value(node, v, env, np.float64, False, [])
            rule = OPERATIONS.get(node.op)
            if rule is None:  # a leaf
                off, units = (s_error, 0) if node.value == "s" else (0.0, int(node.op != "symbol"))
            else:
                off, units = 0.0 if rule.error is None else rule.error(v, e, y), rule.rounding
            if node.is_float:
                total = off + (units * unit * np.abs(y) if units else 0.0)
                off = np.where(np.isinf(y), 0.0, total)  # an infinity is exact
            value[id(node)], error[id(node)] = y, off
            for at in gone:
                del value[at], error[at]
    return value[id(root)], error[id(root)]
