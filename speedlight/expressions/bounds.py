"""Bounds of a mask over a whole box of (b, h, i, j): nothing visible, all visible, or mixed. Always sound.

Integers are followed as intervals, by each operation's rule in operations.py. Comparisons that are linear with unit
coefficients are half-planes in i, j and i - j, and a conjunction of those is tested exactly: its bounds on i, j and
i - j are tightened until they meet or cross. A mask is brought into disjunctive form for "is anything visible", and its
negation for "is anything hidden". Everything else may be anything. The walk is written once: `ops` computes with Python
integers or NumPy arrays, or writes machine code.

Integers of expressions wrap, and intervals must not: only integers that stay within ±FOLLOWED over a whole problem are
followed (`integers` tells which). Every smaller box has smaller intervals, so that 64 bits hold all of the walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ExpressionError
from .operations import INT_MAX, INT_MIN, OPERATIONS
from .tree import Node

SCAN = 8192  # entries of a table that are worth looking at for one box
FOLLOWED = 1 << 57  # 2 * _MOST_SUMMANDS of these, and positions, make less than 2^62
_MOST_SUMMANDS = 8  # free of i and j, on one side of a comparison
_MOST_TERMS, _MOST_ATOMS = 32, 256
_MOST_FOLLOWED = 400  # integers: the walk is compiled into kernels, at a cost of its own
_FAR = 1 << 62  # beyond everything that is followed
_SUMS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}
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
Linear = tuple[int, int, tuple[tuple[int, Node], ...]]


class Exact:
    """Arithmetic of the walk on Python integers and bools."""

    followed: Collection[int] | None = (
        None  # ids of the integers that are; None: those up to `most`, which Python can tell
    )
    most: float = FOLLOWED

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
        if any([a < 0 or b >= n for (a, b), n in zip(index, array.shape, strict=True)]):
            return None
        if math.prod(b - a + 1 for a, b in index) > SCAN:
            return array
        return array[tuple(slice(a, b + 1) for a, b in index)]

    def table(self, node: Node, index: list[tuple[int, int]]) -> tuple[Any, Any, Any] | None:
        """Least and greatest entry, and whether every index is in range: if not, keys must be looked at, one by one."""
        box = self._box(node, index)
        if box is None or not box.size:
            return None
        low, high = node.value.ends() if box is node.value.array else (int(box.min()), int(box.max()))
        return (bool(low), bool(high), True) if node.kind == "bool" else (low, high, True)

    def all_equal(self, node: Node, index: list[tuple[int, int]], number: Node) -> bool:
        """Returns whether a small box of floats holds one number alone."""
        box = self._box(node, index)
        return box is not None and box is not node.value.array and bool((box == number.value).all())


def visible(root: Node, ops: Any) -> tuple[Any, Any]:
    """(something may be visible, all is visible) in ops.box."""
    walk = Walk(ops)
    shown, hidden = (terms(root, positive, walk.fits) for positive in (True, False))
    if shown is None or hidden is None:
        low, high = walk.interval(root) or (ops.truth(False), ops.truth(True))
        return high, low
    return walk.any_possible(shown), ops.invert(walk.any_possible(hidden))


def terms(root: Node, positive: bool, fits: Callable[[Node], bool]) -> list[Term] | None:
    """`root` (or its negation) as a disjunction of conjunctions; None where that grows too long.

    fits: whether the interval of an integer is known, so that it does not wrap.
    """
    done: dict[tuple[int, bool], list[Term] | None] = {}
    stack = [(root, positive)]
    while stack:
        node, sign = stack[-1]
        logic = node.kind == "bool" and node.op in ("not", "and", "or")
        wanted = [(a, sign != (node.op == "not")) for a in node.args] if logic else []
        waiting = [x for x in wanted if (id(x[0]), x[1]) not in done]
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        parts = [done[id(a), s] for a, s in wanted]
        if not parts:
            done[id(node), sign] = _atoms(node, sign, fits)
        elif len(parts) == 1:
            done[id(node), sign] = parts[0]
        else:
            done[id(node), sign] = _joined(*parts, together=(node.op == "and") == sign)
    return done[id(root), positive]


def _joined(a: list[Term] | None, b: list[Term] | None, together: bool) -> list[Term] | None:
    if a is None or b is None:
        return None
    if not together:
        return a + b if len(a) + len(b) <= _MOST_TERMS else None
    if len(a) * len(b) > _MOST_TERMS or max(map(len, a)) + max(map(len, b)) > _MOST_ATOMS:
        return None
    return [x + y for x in a for y in b]


def _atoms(node: Node, positive: bool, fits: Callable[[Node], bool]) -> list[Term]:
    if node.op in _FLIPPED and node.args[0].kind == "int" and all(map(fits, node.args)):
        half_planes = _half_planes(node.op if positive else _FLIPPED[node.op], *node.args)
        if half_planes is not None:
            return half_planes
    return [(Opaque(node, positive),)]


def _half_planes(op: str, a: Node, b: Node) -> list[Term] | None:
    left, right = linear(a), linear(b)
    if left is None or right is None:
        return None

    def below(x: Linear, y: Linear, constant: int) -> HalfPlane | None:
        signs = x[0] - y[0], x[1] - y[1]
        if signs not in {(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)}:
            return None
        return HalfPlane(*signs, x[2] + tuple((-s, n) for s, n in y[2]), constant)

    planes = {"lt": [(left, right, 1)], "le": [(left, right, 0)], "gt": [(right, left, 1)], "ge": [(right, left, 0)]}
    planes["eq"] = planes["le"] + planes["ge"]
    planes["ne"] = planes["lt"] + planes["gt"]
    both = [below(*x) for x in planes[op]]
    if None in both:
        return None
    return [tuple(both)] if op != "ne" else [(x,) for x in both]


def linear(root: Node) -> Linear | None:
    """Coefficients of i and j, and up to _MOST_SUMMANDS that are free of both; None for anything else.

    As long as nothing wraps.
    """
    stack = [root]
    while stack:
        node = stack[-1]
        waiting = [a for a in node.args if _unknown(a)] if node.op in _SUMS and _unknown(node) else []
        if waiting:
            stack.extend(waiting)
            continue
        stack.pop()
        if _unknown(node):
            node.linear = _linear(node)
    return _known_linear(root)


def _unknown(node: Node) -> bool:
    return node.linear is ... and bool(node.uses & {"i", "j"})


def _known_linear(node: Node) -> Linear | None:
    return (
        node.linear if node.uses & {"i", "j"} else (0, 0, ((1, node),))
    )  # which is not kept: a node would hold itself


def _linear(node: Node) -> Linear | None:
    if node.op == "symbol":
        return (1, 0, ()) if node.value == "i" else (0, 1, ())
    if node.op not in _SUMS:
        return None
    i, j, rest = 0, 0, ()
    for part, by in zip(map(_known_linear, node.args), _SUMS[node.op], strict=True):
        if part is None:
            return None
        i, j, rest = i + by * part[0], j + by * part[1], rest + tuple((by * s, x) for s, x in part[2])
    return (i, j, rest) if max(abs(i), abs(j)) < FOLLOWED and len(rest) <= _MOST_SUMMANDS else None


@dataclass(frozen=True, slots=True)
class Integers:
    """The intervals of an expression's integers over a whole problem."""

    most: int | None  # none of them is larger in size; None where that is unknown
    followed: frozenset[int]  # ids of those whose intervals fit, of very long expressions the first
    others: tuple[int, ...]  # indices of the others among the nodes

    @property
    def narrow(self) -> bool:
        """Returns whether every one fits 32 bits."""
        return self.most is not None and self.most < 1 << 31


class _Anywhere(Exact):
    """Bounds that hold for any index: entries are drawn into range, so a table's own ends bound them."""

    most = math.inf

    def table(self, node: Node, index: list[tuple[int, int]]) -> tuple[Any, Any, Any] | None:
        if node.value.tensor is not None:
            return (False, True, True) if node.kind == "bool" else None
        low, high = node.value.ends() if node.value.array.size else (0, 0)
        return low, high, True


def integers(trees: Iterable[tuple[str, list[Node]]], box: dict[str, tuple[int, int]]) -> Integers:
    """Returns the intervals of a problem's mask and score, given as (role, nodes in order), whose positions are in this
    box.

    Raises ExpressionError where an integer may leave int64 as far as intervals can tell. Integers of which they cannot
    (bit operations, floats made whole) wrap.
    """
    walk, most, followed, others = Walk(_Anywhere(box)), 0, set(), []
    for n, (role, node) in enumerate((role, node) for role, nodes in trees for node in nodes):
        if node.kind != "int":
            continue
        interval = walk.interval(node)
        if interval is None:
            most = None
            others.append(n)
            continue
        low, high = interval
        if low < INT_MIN or high > INT_MAX:
            far = low if low < INT_MIN else high
            raise ExpressionError(
                f"{role}: {node!r} may reach {far}, which int64 cannot hold. Use sl.cast(…, float), or bound it with %."
            )
        most = None if most is None else max(most, -low, high)
        if max(-low, high) <= FOLLOWED and len(followed) < _MOST_FOLLOWED:
            followed.add(id(node))
        else:
            others.append(n)
    return Integers(most, frozenset(followed), tuple(others))


class Walk:
    """Intervals of nodes in one box, each computed once."""

    def __init__(self, ops: Any) -> None:
        self.ops = ops
        self.intervals: dict[int, Any] = {}
        self.in_range: dict[int, Any] = {}  # of integers that come from a table: whether every index is in range

    def any_possible(self, disjunction: list[Term]) -> Any:
        result: Any = None
        for term in disjunction:
            one = self.possible(term)
            result = one if result is None else result | one
        return result

    def possible(self, term: Term) -> Any:
        """Returns whether a point of the box may meet all conditions: exact for half-planes with point constants."""
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
        in_range = self._all_in_range(node for _, node in atom.rest)
        return total if in_range is None else self.ops.where(in_range, total, -_FAR)

    def _all_in_range(self, nodes: Iterable[Node]) -> Any:
        """Returns a condition that all of these are in_range; None where nothing can be wrong."""
        result: Any = None
        for one in (self.in_range.get(id(n)) for n in nodes):
            result = one if result is None else result if one is None else result & one
        return result

    def fits(self, node: Node) -> bool:
        """Returns whether an integer's interval is known, and the integer does not wrap."""
        if self.ops.followed is not None:
            return id(node) in self.ops.followed
        return self.interval(node) is not None

    def interval(self, root: Node) -> tuple[Any, Any] | None:
        """Least and greatest value; None if unknown. Floats are not followed."""
        stack = [root]
        while stack:
            node = stack[-1]
            needed = () if id(node) in self.intervals else self._needed(node)
            waiting = [a for a in needed if id(a) not in self.intervals]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if id(node) not in self.intervals:
                self.intervals[id(node)] = self._interval(node)
        return self.intervals[id(root)]

    def _needed(self, node: Node) -> tuple[Node, ...]:
        """Returns the nodes whose intervals are needed first."""
        if node.is_float or (
            node.kind == "int" and self.ops.followed is not None and id(node) not in self.ops.followed
        ):
            return ()
        return node.args[0].args if _compares_floats(node) else node.args

    def _interval(self, node: Node) -> tuple[Any, Any] | None:
        ops, op = self.ops, node.op
        if node.is_float:
            return None
        if node.kind == "int":
            if ops.followed is not None and id(node) not in ops.followed:
                return None
            interval = self._integer(node)
            beyond = ops.followed is None and interval is not None and max(-interval[0], interval[1]) > ops.most
            return None if beyond else interval
        if op == "number":
            return (ops.number(node),) * 2
        args = [self.intervals[id(a)] for a in self._needed(node)]
        if op == "table":
            return None if None in args else self._looked_up(node, args)
        if _compares_floats(node):
            if None in args:
                return None
            every = ops.all_equal(node.args[0], args, node.args[1])
            in_range = self._all_in_range(node.args[0].args)
            return every if in_range is None else every & in_range, ops.truth(True)
        interval, in_range = self._computed(node, args), self._all_in_range(node.args)
        if interval is None or in_range is None:
            return interval
        return interval[0] & in_range, interval[1] | ops.invert(in_range)

    def _computed(self, node: Node, args: list[Any]) -> tuple[Any, Any] | None:
        """Returns the interval by the operation's rule. Of "and" and "or" one known side may tell."""
        rule = OPERATIONS[node.op].interval
        if rule is None or (None in args and node.op not in ("and", "or")):
            return None
        return rule(self.ops, node, *args)

    def _looked_up(self, node: Node, index: list[tuple[Any, Any]]) -> tuple[Any, Any] | None:
        """Returns the ends of a table's entries, which may be anything where an index may be out of range."""
        ops = self.ops
        entries = ops.table(node, index)
        if entries is None:
            return None
        low, high, inside = entries
        in_range = self._all_in_range(node.args)
        inside = inside if in_range is None else inside & in_range
        if inside is True:
            return low, high
        if node.kind == "bool":
            return low & inside, high | ops.invert(inside)
        self.in_range[id(node)] = inside
        return low, high

    def _integer(self, node: Node) -> tuple[Any, Any] | None:
        if node.op == "symbol":
            return self.ops.box[node.value]
        if node.op == "number":
            return (self.ops.number(node),) * 2
        args = [self.intervals[id(a)] for a in node.args]
        if None in args:
            return None
        if node.op == "table":
            return self._looked_up(node, args)
        in_range = self._all_in_range(node.args)
        if in_range is not None:
            self.in_range[id(node)] = in_range
        return self._computed(node, args)


def _compares_floats(node: Node) -> bool:
    """Returns whether a node compares a float table's entry with a number, which a look into the table may tell."""
    return node.op == "eq" and node.args[0].op == "table" and node.args[0].is_float and node.args[1].op == "number"
