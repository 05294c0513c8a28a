"""Derivatives of scores by reverse mode, as trees of the same operations.

With d(s, b, h, i, j) flowing into a score, these flow to the raw score s and to every entry of a table of floats. An
engine lowers them like the score itself, whose nodes they share.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from ..errors import ExpressionError
from .operations import OPERATIONS, Chosen
from .symbols import Symbol, where
from .tables import Table
from .tree import FLOW, Node, convert, merged


class Flows(NamedTuple):
    """Gradients of a score's inputs, in terms of the symbol FLOW, the upstream gradient.

    For a hidden key FLOW must be 0, and whatever comes out for it is to be dropped: its score may be infinite or NaN.
    """

    score: Node  # equal to the score that was asked for; the others share its nodes
    s: Node | None  # what flows to s; None: nothing does
    entries: tuple[tuple[Node, Node], ...]  # (lookup, what flows to the entry that it reads)


def flows(score: Node, tables: Collection[Table] | None = None) -> Flows:
    """Returns the gradients of s and of entries of these tables (None: of every table of floats).

    Raises ExpressionError for an operation without a derivative on the way.
    """
    (nodes,) = merged([score])
    score = nodes[-1]
    wanted = _wanted(nodes, tables)
    arrived: dict[int, _Flow] = {id(score): _Flow(Symbol(Node("symbol", score.kind, value=FLOW)), False)}
    for node in reversed(nodes):
        if id(node) in wanted and id(node) in arrived and node.op in OPERATIONS:
            for a, flow in _through(node, arrived[id(node)], wanted):
                arrived[id(a)] = flow if id(a) not in arrived else arrived[id(a)].plus(flow)
    ends = [node for node in nodes if id(node) in wanted and id(node) in arrived and node.op not in OPERATIONS]
    numbers = {id(node) for node in nodes if node.op == "number"}  # a rule's own numbers are constants
    _, *trees = merged([score, *(arrived[id(node)].total.node for node in ends)], numbers)
    pairs = [(end, tree[-1]) for end, tree in zip(ends, trees, strict=True)]
    to_s = [tree for end, tree in pairs if end.op == "symbol"]
    return Flows(score, to_s[0] if to_s else None, tuple((end, tree) for end, tree in pairs if end.op == "table"))


def _wanted(nodes: list[Node], tables: Collection[Table] | None) -> set[int]:
    """Returns ids of the floats on a way from s, or from an entry that is asked for."""
    wanted: set[int] = set()
    for node in nodes:
        begins = (
            node.value == "s"
            if node.op == "symbol"
            else node.op == "table" and (tables is None or node.value in tables)
        )
        if node.is_float and (begins or (node.op in OPERATIONS and any([id(a) in wanted for a in node.args]))):
            wanted.add(id(node))
    return wanted


class _Flow(NamedTuple):
    """The gradient that has accumulated at a node."""

    total: Symbol
    selected: bool  # 0 where a branch was not chosen; whose slopes, infinite or NaN there, must not spoil that

    def plus(self, other: _Flow) -> _Flow:
        return _Flow(self.total + other.total, self.selected and other.selected)

    def times(self, slope: Any) -> _Flow:
        """Through an operation of this slope."""
        d = self.total
        if isinstance(slope, Chosen):
            yes, no = (0.0 if by == 0 else d if by == 1 else -d for by in (slope.yes, slope.no))
            return _Flow(where(slope.condition, yes, no), self.selected or 0 in (slope.yes, slope.no))
        if not isinstance(slope, Symbol):  # 1 or -1
            return _Flow(d if slope == 1 else -d, self.selected)
        return _Flow(where(d == 0.0, 0.0, d * slope) if self.selected else d * slope, self.selected)


def _through(node: Node, flow: _Flow, wanted: set[int]) -> list[tuple[Node, _Flow]]:
    """The operands that are wanted, and what flows to each; nothing where the slope is 0."""
    row = OPERATIONS[node.op]
    if row.derivative is None:
        raise ExpressionError(
            f"score: expected operations that have a derivative; got {row.symbol or row.name} of floats in {node!r}: "
            f"{row.no_derivative}."
        )
    slopes = row.derivative(Symbol(node), *map(Symbol, node.args))
    passed = [(a, flow.times(slope)) for a, slope in zip(node.args, slopes, strict=True) if _passes(a, slope, wanted)]
    return [(a, _Flow(Symbol(convert(x.total.node, a.kind)), x.selected)) for a, x in passed]


def _passes(a: Node, slope: Any, wanted: set[int]) -> bool:
    return id(a) in wanted and (isinstance(slope, (Symbol, Chosen)) or slope != 0)
