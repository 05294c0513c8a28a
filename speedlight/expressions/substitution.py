"""Masks and scores over other positions: symbols become linear functions of themselves."""

from __future__ import annotations

from .tracing import Expression, expression_of
from .tree import Node, order


def substituted(x: Expression, by: dict[str, tuple[int, int]]) -> Expression:
    """The same expression with factor · symbol + offset in place of a symbol, for each that is named.

    >>> import speedlight as sl
    >>> from speedlight.expressions.substitution import substituted
    >>> substituted(sl.causal(), {"i": (2, 1)})
    mask (j <= ((i * 2) + 1))
    """
    new: dict[int, Node] = {}
    for node in order(x.root):
        args = tuple([new[id(a)] for a in node.args])
        if node.op == "symbol" and by.get(node.value, (1, 0)) != (1, 0):
            new[id(node)] = _linear(node, *by[node.value])
        else:
            new[id(node)] = node if args == node.args else Node(node.op, node.kind, args, node.value)
    return expression_of(x.role, new[id(x.root)])


def _linear(symbol: Node, factor: int, offset: int) -> Node:
    """Both operations stand there even if one does nothing, so that all offsets make one structure: one kernel."""
    product = symbol if factor == 1 else Node("mul", "int", (symbol, Node("number", "int", value=factor)))
    return Node("add", "int", (product, Node("number", "int", value=offset)))
