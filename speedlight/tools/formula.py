"""Masks and scores of the command line: typed, a small part of Python that is read without running anything else; or
by name from a file of the user's, which is run.
"""

from __future__ import annotations

import ast
import operator
import re
import runpy
from pathlib import Path
from typing import Any

import speedlight as sl

from ..errors import ArgumentError, Error, FileError, shown
from ..expressions.operations import INT_MAX, INT_MIN
from ..expressions.substitution import substituted
from ..expressions.symbols import Symbol

_PATTERNS = ("causal", "window", "prefix", "padding", "dilated", "softcap", "alibi")
_FUNCTIONS = ("where", "minimum", "maximum", "exp", "exp2", "log", "log2", "tanh", "sqrt", "abs", "sigmoid", "floor",
              "sin", "cos", "tan", "erf", "log1p", "expm1")  # fmt: skip
_BINARY = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
    ast.BitXor: operator.xor, ast.LShift: operator.lshift, ast.RShift: operator.rshift,
}  # fmt: skip
_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
_COMPARE = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_FILE = re.compile(r"(.+\.py):(\w+)", re.DOTALL)
_MOST_PARTS = 10_000  # names, numbers and operators


def read_formula(option: str, text: str, symbols: str) -> Any:
    """Reads the mask or score of a text: "causal() & window(1024, 0)", in symbols "(i >= j) & (i - j < 100)", or
    "file.py:name".

    Raises ArgumentError, naming the option, for anything but numbers, operators, the patterns and the functions.
    """
    if found := _FILE.fullmatch(text.strip()):
        return _load(option, Path(found[1]), found[2])
    tree = _parse(option, text)
    names = {n: getattr(sl, n) for n in (*_PATTERNS, *_FUNCTIONS)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in used - {*names, *symbols}:
        known = ", ".join([*symbols, *_PATTERNS, *_FUNCTIONS])
        raise ArgumentError(f"{option}: expected one of the names {known}; got {name!r}.")
    _check(option, text, tree)
    if not used & set(symbols):
        return _evaluate(option, text, tree, names)
    if symbols.startswith("s") and used & set(_PATTERNS):
        raise ArgumentError(
            f"{option}: expected either patterns or the symbols {', '.join(symbols)}; got both in {_shorten(text)}."
        )
    names |= {n: _inline(names[n]) for n in _PATTERNS}

    def function(*given: Any) -> Any:
        return _evaluate(option, text, tree, names | dict(zip(symbols, given, strict=True)))

    return sl.expression(function, option.removeprefix("--"))


def _load(option: str, path: Path, name: str) -> sl.Expression:
    """Runs the file, and returns its function or pattern of this name as an expression."""
    try:
        names = runpy.run_path(str(path))
    except OSError as error:
        raise FileError(f"{option}: {path}: {error.strerror or error}.") from None
    except Exception as error:
        raise ArgumentError(f"{option}: {path}: expected a file that Python runs; got {_error_text(error)}.") from error
    own = sorted(x for x in names if not x.startswith("_"))
    if name not in names:
        raise ArgumentError(f"{option}: {path}: expected one of its names {', '.join(own) or '(none)'}; got {name!r}.")
    try:
        return sl.expression(names[name], option.removeprefix("--"))
    except Error as error:
        told = re.sub(r"^(mask|score): ", "", str(error))
        error.args = (f"{option}: {path}: {name}: {told}", *error.args[1:])
        raise
    except Exception as error:  # the function's own
        told = f"expected a function of symbols; it raised {_error_text(error)}"
        raise ArgumentError(f"{option}: {path}: {name}: {told}.") from error


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no words'])[0]}".rstrip(".")


def _parse(option: str, text: str) -> ast.expr:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if sum(1 for _ in ast.walk(tree)) <= _MOST_PARTS:
            return tree
    except (SyntaxError, ValueError) as error:
        why = getattr(error, "msg", None) or error
        way = f" Name its function: {text.strip()}:name." if text.strip().endswith(".py") else ""
        raise ArgumentError(
            f"{option}: expected a formula such as 'causal() & window(1024, 0)'; got {_shorten(text)} ({why}).{way}"
        ) from None
    except (RecursionError, MemoryError):
        pass
    raise ArgumentError(
        f"{option}: expected a formula of at most {_MOST_PARTS:,} parts, less deeply nested; got {_shorten(text)}. "
        "Use Python and sl.table()."
    )


def _check(option: str, text: str, tree: ast.expr) -> None:
    stack = [tree]
    try:
        while stack:
            stack.extend(_operands(stack.pop()))
    except ValueError as error:
        raise ArgumentError(f"{option}: {error} in {_shorten(text)}.") from None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def _evaluate(option: str, text: str, tree: ast.expr, names: dict[str, Any]) -> Any:
    """Returns the value of the formula with these names.

    Nothing else can be reached: the tree is walked here, and not run by Python.
    """
    values: dict[ast.AST, Any] = {}
    stack: list[ast.AST] = [tree]
    try:
        while stack:
            node = stack[-1]
            waiting = [x for x in _operands(node) if x not in values]
            stack.extend(reversed(waiting))
            if not waiting:
                values[node] = _value(node, values, names)
                stack.pop()
    except (TypeError, ValueError, ArithmeticError, MemoryError) as error:
        if isinstance(error, Error):
            told = re.sub(r"mask=lambda b, h, i, j: ([^.]+)", r"'\1'", str(error))  # as it is typed here
            error.args = (f"{option}: {_shorten(text)}: {told}", *error.args[1:])
            raise
        raise ArgumentError(f"{option}: {_shorten(text)}: {error}.") from None
    return values[tree]


def _operands(node: ast.AST) -> list[ast.expr]:
    """Returns the nodes that a node's value is made of; raises for anything that is no part of a formula."""
    match node:
        case ast.BinOp(op=op) if type(op) in _BINARY:
            return [node.left, node.right]
        case ast.UnaryOp(op=op) if type(op) in _UNARY:
            return [node.operand]
        case ast.Compare(ops=[op]) if type(op) in _COMPARE:
            return [node.left, *node.comparators]
        case ast.Call(func=ast.Name()):
            return [*node.args, *(x.value for x in node.keywords)]
        case ast.List() | ast.Tuple():
            return node.elts
        case ast.Name(id=name) if name in (*_PATTERNS, *_FUNCTIONS):
            raise ValueError(f"expected a call; got {name} alone. Write {name}({'' if name == 'causal' else '…'})")
        case ast.Name():
            return []
        case ast.Constant(value=value) if type(value) in (int, float, bool, type(None)):
            return []
        case ast.Constant(value=value):
            raise ValueError(f"expected numbers; got {shown(value)}")
        case ast.BinOp(op=ast.Pow()):
            raise ValueError("expected no power: multiply, or use exp2(log2(x) * n)")
        case ast.Compare():
            raise ValueError("expected one sign in each comparison, as in (0 < i) & (i < 9); got several")
        case ast.BoolOp(op=op):
            one, other = ("&", "and") if isinstance(op, ast.And) else ("|", "or")
            raise ValueError(f"expected {one} in place of {other!r}, with comparisons in parentheses: (a) {one} (b)")
        case ast.UnaryOp(op=ast.Not()):
            raise ValueError("expected ~ in place of 'not', with a comparison in parentheses: ~(j <= i)")
        case ast.Lambda():
            raise ValueError(
                "expected what follows the colon of a lambda, in b, h, i and j (a score: s, too); got the lambda"
            )
        case ast.IfExp():
            raise ValueError("expected where(condition, a, b) in place of 'if'")
    raise ValueError(f"expected numbers, operators, patterns and functions; got {type(node).__name__}")


def _value(node: ast.AST, values: dict[ast.AST, Any], names: dict[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names[node.id]
        case ast.List() | ast.Tuple():
            return [values[x] for x in node.elts]
        case ast.UnaryOp():
            return _UNARY[type(node.op)](values[node.operand])
        case ast.Compare():
            return _COMPARE[type(node.ops[0])](values[node.left], values[node.comparators[0]])
        case ast.Call(func=ast.Name(id=name)):
            if not callable(names[name]):
                raise ValueError(f"expected a function; got {name}(…)")
            return names[name](*(values[x] for x in node.args), **{x.arg or "": values[x.value] for x in node.keywords})
        case ast.BinOp():
            return _apply(type(node.op), values[node.left], values[node.right])
    raise AssertionError(node)


def _apply(op: type[ast.operator], left: Any, right: Any) -> Any:
    """Applies a binary operator; raises where Python's integers grow beyond our 64 bits."""
    if op is ast.LShift and type(right) is int and right > 63:
        raise ValueError(f"<<: expected a shift of 0 to 63; got {shown(right)}")
    found = _BINARY[op](left, right)
    if type(found) is int and not INT_MIN <= found <= INT_MAX:
        raise ValueError(f"expected integers that int64 holds; got {shown(found)}")
    return found


def read_formulas(mask: str | None, score: str | None, at: dict[str, int] | None = None) -> dict[str, Any]:
    """Returns the options mask= and score= of --mask and --score; `at`: of one item b and head h, alone in a call."""
    found = {
        "mask": None if mask is None else read_formula("--mask", mask, "bhij"),
        "score": None if score is None else read_formula("--score", score, "sbhij"),
    }
    offsets = {name: (1, n) for name, n in (at or {}).items()}
    return {name: substituted(x, offsets) if isinstance(x, sl.Expression) else x for name, x in found.items()}


def _inline(pattern: Any) -> Any:
    """A pattern whose mask is a condition among symbols."""
    return lambda *numbers, **named: Symbol(pattern(*numbers, **named).root)
