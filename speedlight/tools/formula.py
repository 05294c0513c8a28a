"""Masks and scores typed on the command line: a small part of Python, read without running anything else."""

from __future__ import annotations

import ast
from typing import Any

import speedlight as sl

from ..errors import ArgumentError
from ..tracing import Symbol

_PATTERNS = ("causal", "window", "prefix", "dilated", "softcap", "alibi")
_FUNCTIONS = ("where", "minimum", "maximum", "exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "sigmoid", "floor")
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.keyword, ast.Load,
    ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip


def read_formula(option: str, text: str, symbols: str) -> Any:
    """The mask or score of a text such as "causal() & window(1024, 0)" or, in symbols, "(i >= j) & (i - j < 100)".

    Raises ArgumentError, naming the option, for anything but numbers, operators, the patterns and the functions.
    """
    names = {n: getattr(sl, n) for n in (*_PATTERNS, *_FUNCTIONS)}
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"{option}: expected a formula such as 'causal() & window(1024, 0)'; got {text!r} ({error}).") from None
    used = set()
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise ArgumentError(f"{option}: expected numbers, operators, patterns and functions; got {type(node).__name__} in {text!r}.")
        if isinstance(node, ast.Name):
            used.add(node.id)
            if node.id not in names and node.id not in symbols:
                known = ", ".join([*symbols, *_PATTERNS, *_FUNCTIONS])
                raise ArgumentError(f"{option}: expected one of the names {known}; got {node.id!r}.")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float, bool, type(None)):
            raise ArgumentError(f"{option}: expected numbers; got {node.value!r}.")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            raise ArgumentError(f"{option}: expected no power; got {text!r}. Multiply, or use exp2(log2(x) * n).")
    code = compile(tree, option, "eval")

    def value(**here: Any) -> Any:
        try:
            return eval(code, {"__builtins__": {}}, names | here)  # nothing but the names above can be reached
        except (TypeError, OverflowError, ZeroDivisionError) as error:
            raise ArgumentError(f"{option}: {text!r}: {error}.") from None

    if not used & set(symbols):
        return value()
    if symbols.startswith("s"):
        if used & set(_PATTERNS):
            raise ArgumentError(f"{option}: expected either patterns or the symbols {', '.join(symbols)}; got both in {text!r}.")
        return sl.expression(lambda s, b, h, i, j: value(s=s, b=b, h=h, i=i, j=j), "score")
    patterns = {n: _inlined(names[n]) for n in _PATTERNS}
    return sl.expression(lambda b, h, i, j: value(b=b, h=h, i=i, j=j, **patterns), "mask")


def read_formulas(mask: str | None, score: str | None) -> dict[str, Any]:
    """The options mask= and score= of --mask and --score."""
    return {
        "mask": None if mask is None else read_formula("--mask", mask, "bhij"),
        "score": None if score is None else read_formula("--score", score, "sbhij"),
    }


def _inlined(pattern: Any) -> Any:
    """A pattern whose mask is a condition among symbols."""
    return lambda *numbers: Symbol(pattern(*numbers).root)
