"""Masks and scores typed on the command line: a small part of Python, read without running anything else."""

from __future__ import annotations

import ast
from typing import Any

import speedlight as sl

from ..errors import ArgumentError, Error
from ..tracing import Symbol

_PATTERNS = ("causal", "window", "prefix", "dilated", "softcap", "alibi")
_FUNCTIONS = ("where", "minimum", "maximum", "exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "sigmoid", "floor")
_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Constant, ast.List, ast.Tuple, ast.keyword, ast.Load,
    ast.operator, ast.unaryop, ast.cmpop,
)  # fmt: skip
_MOST_PARTS = 10_000  # names, numbers and operators


def read_formula(option: str, text: str, symbols: str) -> Any:
    """The mask or score of a text such as "causal() & window(1024, 0)" or, in symbols, "(i >= j) & (i - j < 100)".

    Raises ArgumentError, naming the option, for anything but numbers, operators, the patterns and the functions.
    """
    names = {n: getattr(sl, n) for n in (*_PATTERNS, *_FUNCTIONS)}
    try:
        tree = ast.parse(text.strip(), mode="eval")
        nodes = list(ast.walk(tree))
        code = compile(tree, option, "eval") if len(nodes) <= _MOST_PARTS else None
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(
            f"{option}: expected a formula such as 'causal() & window(1024, 0)'; got {_shortened(text)} ({error})."
        ) from None
    except (RecursionError, MemoryError):
        nodes, code = [], None
    if code is None:
        raise ArgumentError(
            f"{option}: expected a formula of at most {_MOST_PARTS:,} parts, less deeply nested; got {_shortened(text)}. "
            "Use Python and sl.table()."
        )
    used = set()
    for node in nodes:
        if not isinstance(node, _ALLOWED):
            raise ArgumentError(
                f"{option}: expected numbers, operators, patterns and functions; got {type(node).__name__} in {_shortened(text)}."
            )
        if isinstance(node, ast.Name):
            used.add(node.id)
            if node.id not in names and node.id not in tuple(symbols):
                known = ", ".join([*symbols, *_PATTERNS, *_FUNCTIONS])
                raise ArgumentError(f"{option}: expected one of the names {known}; got {node.id!r}.")
        if isinstance(node, ast.Constant) and type(node.value) not in (int, float, bool, type(None)):
            raise ArgumentError(f"{option}: expected numbers; got {node.value!r}.")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            raise ArgumentError(f"{option}: expected no power; got {_shortened(text)}. Multiply, or use exp2(log2(x) * n).")

    def value(**here: Any) -> Any:
        try:
            return eval(code, {"__builtins__": {}}, names | here)  # nothing but the names above can be reached
        except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            if isinstance(error, Error):
                raise
            raise ArgumentError(f"{option}: {_shortened(text)}: {error}.") from None

    if not used & set(symbols):
        return value()
    if symbols.startswith("s"):
        if used & set(_PATTERNS):
            raise ArgumentError(f"{option}: expected either patterns or the symbols {', '.join(symbols)}; got both in {_shortened(text)}.")
        return sl.expression(lambda s, b, h, i, j: value(s=s, b=b, h=h, i=i, j=j), "score")
    patterns = {n: _inlined(names[n]) for n in _PATTERNS}
    return sl.expression(lambda b, h, i, j: value(b=b, h=h, i=i, j=j, **patterns), "mask")


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def read_formulas(mask: str | None, score: str | None) -> dict[str, Any]:
    """The options mask= and score= of --mask and --score."""
    return {
        "mask": None if mask is None else read_formula("--mask", mask, "bhij"),
        "score": None if score is None else read_formula("--score", score, "sbhij"),
    }


def _inlined(pattern: Any) -> Any:
    """A pattern whose mask is a condition among symbols."""
    return lambda *numbers: Symbol(pattern(*numbers).root)
