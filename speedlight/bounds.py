"""What a mask says about a whole box of (b, h, i, j): nothing visible, all visible, or mixed. Always sound.

Integers are followed as intervals. Comparisons that are linear with unit coefficients are half-planes in i, j and i - j,
and a conjunction of those is tested exactly: its bounds on i, j and i - j are tightened until they meet or cross. A mask
is brought into disjunctive form for "is anything visible", and its negation for "is anything hidden". Everything else
may be anything. The walk is written once: `ops` computes with Python integers, or writes machine code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .tree import Node

SCAN = 8192  # entries of a table that are worth looking at for one box
_MOST_TERMS = 32
_FLIPPED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


@dataclass(frozen=True, slots=True)
class HalfPlane:
    """i_sign · i + j_sign · j + Σ sign · node + constant <= 0."""

    i_sign: int
    j_sign: int
    rest: tuple[tuple[int, Node], ...]
    constant: int


@dataclass(frozen=True, slots=True)
class Opaque:
    """A condition of which only its interval is known."""

    node: Node
    positive: bool


Term = tuple[Any, ...]  # HalfPlanes and Opaques that hold together


class Exact:
    """Arithmetic of the walk on Python integers and bools."""

    def __init__(self, box: dict[str, tuple[int, int]]) -> None:
        self.box = box

    minimum, maximum = staticmethod(min), staticmethod(max)

    def where(self, condition: bool, yes: Any, no: Any) -> Any:
        return yes if condition else no

    def invert(self, x: bool) -> bool:
        return not x

    def truth(self, x: bool) -> bool:
        return x

    def equal(self, a: Any, b: Any) -> bool:
        return a == b

    def floordiv(self, a: int, b: int) -> int:
        return a // b if b else 0

    def number(self, node: Node) -> Any:
        return node.value

    def minus_infinity(self, node: Node) -> bool:
        return node.value == -math.inf

    def _box(self, node: Node, index: list[tuple[int, int]]) -> Any:
        """The entries of a small box; the table where it is large; None where an index may be out of range."""
        array = node.value.array
        if node.value.tensor is not None:
            return None  # nobody waits for a GPU to tell
        if any(a < 0 or b >= n for (a, b), n in zip(index, array.shape, strict=True)):
            return None
        if math.prod(b - a + 1 for a, b in index) > SCAN:
            return array
        return array[tuple(slice(a, b + 1) for a, b in index)]

    def table(self, node: Node, index: list[tuple[int, int]]) -> tuple[Any, Any] | None:
        """Least and greatest entry; an index that may be out of range must be looked at, key by key."""
        box = self._box(node, index)
        if box is None or not box.size:
            return None
        low, high = node.value.ends() if box is node.value.array else (int(box.min()), int(box.max()))
        return (bool(low), bool(high)) if node.kind == "bool" else (low, high)

    def all_equal(self, node: Node, index: list[tuple[int, int]], number: Node) -> bool:
        """Whether a small box of floats holds one number alone."""
        box = self._box(node, index)
        return box is not None and box is not node.value.array and bool((box == number.value).all())


def visible(root: Node, ops: Any) -> tuple[Any, Any]:
    """(something may be visible, all is visible) in ops.box."""
    walk = Walk(ops)
    some, none = terms(root, True), terms(root, False)
    if some is None or none is None:
        low, high = walk.interval(root) or (ops.truth(False), ops.truth(True))
        return high, low
    return walk.any_possible(some), ops.invert(walk.any_possible(none))


def hides(score: Node, ops: Any) -> Any:
    """Whether a score of the form where(condition, -inf, …) is -inf all over the box; None if it is of another form."""
    if score.op != "where" or score.args[1].op != "number":
        return None
    interval = Walk(ops).interval(score.args[0])
    return None if interval is None else interval[0] & ops.minus_infinity(score.args[1])


def terms(node: Node, positive: bool) -> list[Term] | None:
    """`node` (or its negation) as a disjunction of conjunctions; None where that grows too long."""
    if node.op == "not":
        return terms(node.args[0], not positive)
    if node.op in ("and", "or") and node.kind == "bool":
        parts = [terms(a, positive) for a in node.args]
        if parts[0] is None or parts[1] is None:
            return None
        together = (node.op == "and") == positive
        joined = [a + b for a in parts[0] for b in parts[1]] if together else parts[0] + parts[1]
        return joined if len(joined) <= _MOST_TERMS else None
    if node.op in _FLIPPED and node.args[0].kind == "int":
        found = _half_planes(node.op if positive else _FLIPPED[node.op], *node.args)
        if found is not None:
            return found
    return [(Opaque(node, positive),)]


def _half_planes(op: str, a: Node, b: Node) -> list[Term] | None:
    left, right = linear(a), linear(b)
    if left is None or right is None:
        return None

    def below(x: Any, y: Any, constant: int) -> HalfPlane | None:
        signs = x[0] - y[0], x[1] - y[1]
        if signs not in {(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)}:
            return None
        return HalfPlane(*signs, x[2] + tuple((-s, n) for s, n in y[2]), constant)

    planes = {"lt": [(left, right, 1)], "le": [(left, right, 0)], "gt": [(right, left, 1)], "ge": [(right, left, 0)]}
    planes["eq"] = planes["le"] + planes["ge"]
    planes["ne"] = planes["lt"] + planes["gt"]
    found = [below(*x) for x in planes[op]]
    if None in found:
        return None
    return [tuple(found)] if op != "ne" else [(x,) for x in found]


def linear(node: Node) -> tuple[int, int, tuple[tuple[int, Node], ...]] | None:
    """Coefficients of i and j, and what is free of both; None for anything else."""
    if not node.uses & {"i", "j"}:
        return 0, 0, ((1, node),)
    if node.op == "symbol":
        return (1, 0, ()) if node.value == "i" else (0, 1, ())
    if node.op not in ("add", "sub", "neg"):
        return None
    parts = [linear(a) for a in node.args]
    sign = 1 if node.op == "add" else -1
    total: tuple[int, int, tuple[tuple[int, Node], ...]] = (0, 0, ())
    for n, part in enumerate(parts):
        if part is None:
            return None
        by = 1 if n == 0 and node.op != "neg" else sign
        total = total[0] + by * part[0], total[1] + by * part[1], total[2] + tuple((by * s, x) for s, x in part[2])
    return total


class _Anywhere(Exact):
    """Bounds that hold for any index: entries are drawn into range, so a table's own ends bound them."""

    def table(self, node: Node, index: list[tuple[int, int]]) -> tuple[Any, Any] | None:
        if node.value.tensor is not None:
            return (False, True) if node.kind == "bool" else None
        return node.value.ends() if node.value.array.size else (0, 0)


def largest_integer(nodes: list[Node], box: dict[str, tuple[int, int]]) -> int | None:
    """The size that no integer of these nodes exceeds in the box; None where that is unknown."""
    walk, most = Walk(_Anywhere(box)), 0
    for node in nodes:
        if node.kind == "int":
            interval = walk.interval(node)
            if interval is None:
                return None
            most = max(most, *(abs(x) for x in interval))
    return most


class Walk:
    """Intervals of nodes in one box, each computed once."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.known: dict[int, Any] = {}

    def any_possible(self, found: list[Term]) -> Any:
        result: Any = None
        for term in found:
            one = self.possible(term)
            result = one if result is None else result | one
        return result

    def possible(self, term: Term) -> Any:
        """Whether a point of the box may meet all conditions: exact for half-planes with point constants."""
        ops = self.ops
        (i_low, i_high), (j_low, j_high) = ops.box["i"], ops.box["j"]
        d_low, d_high = i_low - j_high, i_high - j_low
        answer = ops.truth(True)
        for atom in term:
            if isinstance(atom, Opaque):
                interval = self.interval(atom.node)
                if interval is not None:
                    answer = answer & (interval[1] if atom.positive else ops.invert(interval[0]))
                continue
            least = self._least(atom)
            if least is None:
                continue
            match atom.i_sign, atom.j_sign:
                case (1, 0):
                    i_high = ops.minimum(i_high, -least)
                case (-1, 0):
                    i_low = ops.maximum(i_low, least)
                case (0, 1):
                    j_high = ops.minimum(j_high, -least)
                case (0, -1):
                    j_low = ops.maximum(j_low, least)
                case (1, -1):
                    d_high = ops.minimum(d_high, -least)
                case (-1, 1):
                    d_low = ops.maximum(d_low, least)
                case _:
                    answer = answer & (least <= 0)
        d_low, d_high = ops.maximum(d_low, i_low - j_high), ops.minimum(d_high, i_high - j_low)
        return answer & (i_low <= i_high) & (j_low <= j_high) & (d_low <= d_high)

    def _least(self, atom: HalfPlane) -> Any:
        """The least value of what is added to i and j; None if unknown."""
        total: Any = atom.constant
        for sign, node in atom.rest:
            interval = self.interval(node)
            if interval is None:
                return None
            total = interval[0] + total if sign > 0 else -interval[1] + total
        return total

    def interval(self, node: Node) -> tuple[Any, Any] | None:
        """Least and greatest value; None if unknown. Floats are not followed."""
        if id(node) not in self.known:
            self.known[id(node)] = None if node.kind in ("float", "double") else self._interval(node)
        return self.known[id(node)]

    def _interval(self, node: Node) -> tuple[Any, Any] | None:
        ops, op = self.ops, node.op
        if op == "symbol":
            return ops.box[node.value]
        if op == "number":
            return (ops.number(node),) * 2
        args = [self.interval(a) for a in node.args]
        if op == "table" and None not in args:
            return ops.table(node, args)
        if op in ("and", "or") and node.kind == "bool":
            return self._logic(op, *args)
        if op == "eq" and node.args[0].op == "table" and node.args[0].is_float and node.args[1].op == "number":
            index = [self.interval(a) for a in node.args[0].args]
            return None if None in index else (ops.all_equal(node.args[0], index, node.args[1]), ops.truth(True))
        if any(a is None for a in args):
            return None
        if node.kind == "bool":
            return self._condition(op, node, *args)
        return self._integer(op, node, *args)

    def _logic(self, op: str, a: Any, b: Any) -> tuple[Any, Any]:
        no, yes = self.ops.truth(False), self.ops.truth(True)
        a, b = a or (no, yes), b or (no, yes)
        return (a[0] & b[0], a[1] & b[1]) if op == "and" else (a[0] | b[0], a[1] | b[1])

    def _condition(self, op: str, node: Node, a: Any, b: Any = None, c: Any = None) -> tuple[Any, Any] | None:
        ops = self.ops
        if op == "not":
            return ops.invert(a[1]), ops.invert(a[0])
        if op == "where":
            return (a[0] & b[0]) | (ops.invert(a[1]) & c[0]), (a[1] & b[1]) | (ops.invert(a[0]) & c[1])
        if node.args[0].kind != "int" or op not in _FLIPPED:
            return None
        match op:
            case "lt":
                return a[1] < b[0], a[0] < b[1]
            case "le":
                return a[1] <= b[0], a[0] <= b[1]
            case "gt":
                return a[0] > b[1], a[1] > b[0]
            case "ge":
                return a[0] >= b[1], a[1] >= b[0]
        same = ops.equal(a[0], a[1]) & ops.equal(b[0], b[1]) & ops.equal(a[0], b[0])
        meet = (a[0] <= b[1]) & (b[0] <= a[1])
        return (same, meet) if op == "eq" else (ops.invert(meet), ops.invert(same))

    def _integer(self, op: str, node: Node, a: Any, b: Any = None, c: Any = None) -> tuple[Any, Any] | None:
        ops = self.ops
        match op:
            case "cast":
                return (ops.where(a[0], 1, 0), ops.where(a[1], 1, 0)) if node.args[0].kind == "bool" else None
            case "add":
                return a[0] + b[0], a[1] + b[1]
            case "sub":
                return a[0] - b[1], a[1] - b[0]
            case "neg":
                return -a[1], -a[0]
            case "mul":
                ends = [x * y for x in a for y in b]
                return self._hull(ends)
            case "min":
                return ops.minimum(a[0], b[0]), ops.minimum(a[1], b[1])
            case "max":
                return ops.maximum(a[0], b[0]), ops.maximum(a[1], b[1])
            case "abs":
                low = ops.maximum(ops.maximum(a[0], -a[1]), a[0] * 0)
                return low, ops.maximum(a[1], -a[0])
            case "where":
                low, high = ops.minimum(b[0], c[0]), ops.maximum(b[1], c[1])
                never = ops.invert(a[1])
                return ops.where(a[0], b[0], ops.where(never, c[0], low)), ops.where(a[0], b[1], ops.where(never, c[1], high))
            case "floordiv" | "mod" if node.args[1].op == "number":
                n = b[0]
                first, last = ops.floordiv(a[0], n), ops.floordiv(a[1], n)
                if op == "floordiv":
                    return self._hull([first, last])
                same = ops.equal(first, last) & ops.invert(ops.equal(n, 0))
                low, high = ops.minimum(n + 1, n * 0), ops.maximum(n - 1, n * 0)
                return ops.where(same, a[0] - first * n, low), ops.where(same, a[1] - first * n, high)
        return None

    def _hull(self, ends: list[Any]) -> tuple[Any, Any]:
        low = high = ends[0]
        for x in ends[1:]:
            low, high = self.ops.minimum(low, x), self.ops.maximum(high, x)
        return low, high
