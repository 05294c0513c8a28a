"""Substitution of symbols in masks and scores: by factor · symbol + offset, or by another tree."""

from __future__ import annotations

from . import tree
from .tracing import Expression, expression_of
from .tree import SYMBOLS, Node


def substituted(x: Expression, by: dict[str, tuple[int, int]]) -> Expression:
    """Returns the expression with factor · symbol + offset in place of each named symbol.

    >>> import speedlight as sl
    >>> from speedlight.expressions.substitution import substituted
    >>> substituted(sl.causal(), {"i": (2, 1)})
    mask (j <= ((i * 2) + 1))
    """
    symbols = {name: Node("symbol", SYMBOLS[name], value=name) for name in by}
    return replaced(x, {name: _linear(symbols[name], *pair) for name, pair in by.items() if pair != (1, 0)})


def replaced(x: Expression, by: dict[str, Node]) -> Expression:
    """Returns the expression with trees in place of symbols."""
    return expression_of(x.role, tree.replaced(x.root, by))


def _linear(symbol: Node, factor: int, offset: int) -> Node:
    """Returns factor · symbol + offset, with an addition of 0, too: all offsets make one structure, one kernel."""
    product = symbol if factor == 1 else Node("mul", "int", (symbol, Node("number", "int", value=factor)))
    return Node("add", "int", (product, Node("number", "int", value=offset)))
