"""Tracing of masks and scores: a user's function, called once with symbols, becomes a small tree.

    mask(b, h, i, j) -> bool        score(s, b, h, i, j) -> s

b, h: batch item and query head; i, j: absolute positions of query and key; s: the scaled score.
"""

from __future__ import annotations

import hashlib
import inspect
import linecache
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arrays.dlpack import has
from ..errors import ArgumentError, ArgumentTypeError, ExpressionError, shown
from ..host.graph_breaks import check_outside
from .bounds import Exact, visible
from .captured import LIBRARIES, Tables, called
from .operations import LOOKUP_COST, OPERATIONS
from .rows import is_row
from .symbols import LOOKUP, OF_JAX, Symbol, node_of
from .tables import Table
from .tree import SYMBOLS, Node, convert, lazily, merged, order, replaced, structure

# a user's function; the second of each: written for another library's arrays, or with annotations of its own
MaskFunction = Callable[[Symbol, Symbol, Symbol, Symbol], Symbol | bool] | Callable[[Any, Any, Any, Any], Any]
ScoreFunction = (
    Callable[[Symbol, Symbol, Symbol, Symbol, Symbol], Symbol | float] | Callable[[Any, Any, Any, Any, Any], Any]
)

_MOST = 4_000  # operations: such a kernel compiles in about two seconds


class Expression:
    """A traced mask or score.

    Masks combine with & | ~. Two are equal if they compute the same from the same tables and numbers.

    >>> import speedlight as sl
    >>> sl.window(4, 0) == sl.window(4, 0), sl.causal() & sl.prefix(2)
    (True, mask ((j <= i) & (j < 2)))
    """

    __array_ufunc__ = None  # array & mask is ours to refuse, not NumPy's to do entry by entry

    def __init__(self, role: str, root: Node, size: int) -> None:
        check_outside(role, "& | ~ of patterns")
        self.role, self.root, self.size = role, root, size  # size: operations, at most

    @lazily
    def nodes(self) -> list[Node]:
        return order(self.root)

    @lazily
    def numbers(self) -> tuple[Node, ...]:
        """Number nodes in the order of their slots."""
        return tuple(n for n in self.nodes if n.op == "number")

    @lazily
    def tables(self) -> tuple[Table, ...]:
        """Tables in the order of their slots."""
        return tuple(dict.fromkeys(n.value for n in self.nodes if n.op == "table"))

    @lazily
    def key(self) -> str:
        """The structure, without numbers and tables."""
        return structure({self.role: merged([self.root])[0]})

    def _identity(self) -> tuple[Any, ...]:
        """The structure (with every number's kind), numbers by their bits, and which tables."""
        words = tuple(struct.pack("<d", n.value) if n.is_float else n.value for n in self.numbers)
        return self.key, words, tuple(t.identity for t in self.tables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self._identity() == other._identity()

    def __hash__(self) -> int:
        """Stable from process to process; of the structure alone."""
        return int.from_bytes(hashlib.sha256(self.key.encode()).digest()[:8], "little") >> 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns a flat list of nodes: a tree may be deeper than Python's stack."""
        at = {id(node): n for n, node in enumerate(self.nodes)}
        nodes = [(node.op, node.kind, [at[id(a)] for a in node.args], node.value) for node in self.nodes]
        return _expression_of_nodes, (self.role, nodes, self.size)

    def __repr__(self) -> str:
        return f"{self.role} {self.root!r}"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the formula, and the tiles of a mask."""
        from ..host.notebooks import code, tiles

        if self.role != "mask":
            return code(repr(self))
        sizes, lengths = [abs(n.value) for n in self.numbers if n.kind == "int"], [t.array.shape for t in self.tables]
        # a table has an entry for each token, most often; of numbers there are some times as many tokens
        count = max([n for shape in lengths for n in shape], default=0)
        count = count or 32 << min(max(sizes, default=0) // 16, 1 << 40).bit_length()
        side = -(-count // 32)
        ends = [(n, min(n + side, count) - 1) for n in range(0, count, side)]
        of = "".join([f", {name} 0" for name, symbol in (("item", "b"), ("head", "h")) if symbol in self.root.uses])
        caption = f"{count:,} queries x {count:,} keys, in squares of {side:,}{of}"
        return code(repr(self)) + tiles([[_square(self.root, i, j) for j in ends] for i in ends], caption)

    def _joined(self, op: str, other: Any) -> Expression:
        if callable(other) and not isinstance(other, Expression):
            other = expression(other)
        if not isinstance(other, Expression) or self.role != "mask" or other.role != "mask":
            way = ""
            if isinstance(other, Symbol):
                way = " Join patterns and functions outside: sl.causal() & (lambda b, h, i, j: …)."
            elif has(other, "mask", "shape"):
                way = " An array of (batch, k_len) is sl.padding(array), a mask, too."
            raise ExpressionError(f"{OPERATIONS[op].symbol}: expected two masks; got {self!r} and {shown(other)}.{way}")
        return _checked("mask", Node(op, "bool", (self.root, other.root)), self.size + other.size)

    def __and__(self, other: MaskFunction | Expression) -> Expression:
        return self._joined("and", other)

    def __or__(self, other: MaskFunction | Expression) -> Expression:
        return self._joined("or", other)

    def __rand__(self, other: MaskFunction) -> Expression:
        return self._before("and", other)

    def __ror__(self, other: MaskFunction) -> Expression:
        return self._before("or", other)

    def _before(self, op: str, other: Any) -> Expression:
        """Joins another mask with this one, the other first."""
        return expression(other)._joined(op, self) if callable(other) else self._joined(op, other)

    def __invert__(self) -> Expression:
        if self.role != "mask":
            raise ExpressionError(f"~: expected a mask; got {self!r}. Negate a score by lambda s, b, h, i, j: -s.")
        return _checked("mask", Node("not", "bool", (self.root,)), self.size)

    def __bool__(self) -> bool:
        raise ExpressionError("a mask has no truth value: combine masks with & | ~, not with and, or, not.")


def _expression_of_nodes(role: str, nodes: Sequence[tuple[str, str, list[int], Any]], size: int) -> Expression:
    """Returns an expression that was copied or pickled."""
    made: list[Node] = []
    for op, kind, args, value in nodes:
        made.append(Node(op, kind, tuple([made[n] for n in args]), value))
    return Expression(role, made[-1], size)


def _square(root: Node, i: tuple[int, int], j: tuple[int, int]) -> int:
    """Returns the class of a square of positions, of item 0 and head 0: 0 hidden, 1 mixed, 2 visible."""
    return sum(visible(root, Exact({"b": (0, 0), "h": (0, 0), "i": i, "j": j})))


def is_immutable(x: Any) -> bool:
    """Safe as a memo key: None, or an Expression whose tables are its own, and followed by nobody now; not an array,
    nor a function.
    """
    return x is None or (
        type(x) is Expression and all([t.is_own and t.array.base is None and t.may_be_kept() for t in x.tables])
    )


def key_of_expression(x: Expression) -> Any:
    """Returns what a prepared call depends on of a mask or score: the expression, and where the tables lie that others
    may change or move. Returns ... if autograd records one of its tables now.
    """
    tables = x.tables
    if not tables:
        return x
    places = []
    for table in tables:
        if not table.may_be_kept():
            return ...
        place = table.place()
        if place is not None:
            places.append(place)
    return (x, *places) if places else x


def expression(function: MaskFunction | ScoreFunction | Expression, role: str | None = None) -> Expression:
    """Traces a mask `function(b, h, i, j)` or a score `function(s, b, h, i, j)` once; the result can be kept and used
    again.

    NumPy's and PyTorch's functions of numbers work in it. Arrays and tensors that it captures may be looked up at
    symbols, and are read where they lie whenever the result is used; indices must lie in 0 … n - 1.

    Raises:
        speedlight.ExpressionError: the function branches on a symbol, uses an unknown operation, or returns a wrong
        type; with the line and the expression in which it does.

    >>> import speedlight as sl
    >>> sl.expression(lambda b, h, i, j: (j <= i) & (i - j < 4))
    mask ((j <= i) & ((i - j) < 4))
    """
    if not (role is None or (isinstance(role, str) and role in ("mask", "score"))):
        raise ArgumentError(f"role: expected 'mask', 'score' or None; got {shown(role)}.")
    check_outside(role or "function", "sl.expression, and patterns,")
    if isinstance(function, Expression):
        if role and function.role != role:
            raise ExpressionError(f"{role}: expected a {role}; got the {function!r}. Give it as {function.role}=.")
        return function
    if not callable(function):
        such = "sl.softcap(30.0)" if role == "score" else "sl.causal()"
        way = " Of an array it is lambda b, h, i, j: array[i, j]." if has(function, "function", "shape") else ""
        raise ArgumentTypeError(
            f"{role or 'function'}: expected a function, or a pattern such as {such}; got {shown(function)}.{way}"
        )
    if isinstance(function, type):
        raise ArgumentTypeError(f"{role or 'function'}: expected a function; got the class {function.__name__}.")
    given = _positional(function)
    role = _role(function, role, None if given is None else len(given))
    names = _NAMES[role]
    if given is not None and given != names and sorted(given) == sorted(names):  # it would compute something else
        raise ExpressionError(
            f"{role}: expected {_TAKES[role]}, in this order; got a function{_origin(function)} of "
            f"({', '.join(given)}). Arguments come by place: write its arguments as ({', '.join(names)})."
        )
    result = _called(function, [Symbol(Node("symbol", SYMBOLS[n], value=n)) for n in names])
    if isinstance(result, Expression):
        return expression(result, role)
    check_returned(role, function, result)
    root = _returned(role, function, result)
    if role == "mask" and root.kind != "bool":
        raise ExpressionError(
            f"mask: expected a bool result{_origin(function)}; got {root.kind} {root!r}. Write a comparison."
        )
    if role == "score" and root.kind == "bool":
        raise ExpressionError(
            f"score: expected a number made of s{_origin(function)}; got bool {root!r}. Give it as mask=, or write "
            "sl.where(condition, s, -math.inf)."
        )
    if role == "score":
        root = convert(root, "float")
    return expression_of(role, root)


_NAMES = {"mask": ("b", "h", "i", "j"), "score": ("s", "b", "h", "i", "j")}
_TAKES = {"mask": "the arguments (b, h, i, j) of a mask", "score": "the arguments (s, b, h, i, j) of a score"}


def _role(function: Callable[..., Any], role: str | None, count: int | None) -> str:
    """Returns the role that a function of so many arguments fits; a pattern that nobody called fits none."""
    name = getattr(function, "__name__", "")
    found = role or {4: "mask", 5: "score"}.get(count or 0)
    if found is None or count not in (None, 4 if found == "mask" else 5):
        if getattr(sys.modules["speedlight"], name, None) is function:
            call = f"sl.{name}({'…' if count else ''})"
            raise ExpressionError(
                f"{role or 'function'}: expected a pattern; got the function sl.{name}. Call it: {call}."
            )
        expected = _TAKES[found] if found else f"{_TAKES['mask']}, or {_TAKES['score']}"
        got = f"{count} argument{'s' * (count != 1)}"
        other = "mask" if found == "score" else "score"
        way = f" A {other} is {other}=." if found and count == len(_NAMES[other]) else ""
        if (count or 0) > len(_NAMES["score"]):
            way = " Other arrays and numbers are captured by the function, or have defaults."
        raise ExpressionError(f"{found or 'function'}: expected {expected}; got a function of {got}.{way}")
    return found


def check_returned(name: str, function: Callable[..., Any], result: Any) -> None:
    """Raises if a function returned nothing, by its name."""
    if result is None:
        raise ExpressionError(f"{name}: expected a result{_origin(function)}; got None. Is a return missing?")


def _origin(function: Callable[..., Any]) -> str:
    """Returns words that name a function and its place; "" for those of libraries."""
    function = inspect.unwrap(function)
    code, module = getattr(function, "__code__", None), str(getattr(function, "__module__", ""))
    if code is None or module.split(".")[0] in LIBRARIES:
        return ""
    return f" of {code.co_name}() in {code.co_filename}:{code.co_firstlineno}"


def _returned(role: str, function: Callable[..., Any], result: Any) -> Node:
    """The tree of a result: one number."""
    try:
        return node_of(result)
    except ExpressionError as error:
        what = "a condition of b, h, i and j" if role == "mask" else "a number made of s, b, h, i and j"
        got = f"{type(result).__name__}, {shown(result)}. Return {what}."
        if isinstance(result, np.ndarray):
            got = f"an array of shape {result.shape}. Return one entry of it. Look arrays up through sl.table(array)."
        elif is_row(result):
            got = str(error)
        raise ExpressionError(f"{role}: expected {what} as the result{_origin(function)}; got {got}") from None


def expression_of(role: str, root: Node) -> Expression:
    """The expression of a tree of the right kind."""
    others = root.uses - set(_NAMES[role])
    if others:
        names = ", ".join(_NAMES[role])
        raise ExpressionError(f"{role}: expected a result made of {names}; got {', '.join(others)} in {root!r}.")
    return _checked(role, root)


def _called(function: Callable[..., Any], symbols: list[Symbol]) -> Any:
    """Calls a function with symbols. Arrays that it captures are looked up; errors tell where in it they arose."""
    tables = Tables()
    before = LOOKUP.get()
    try:
        LOOKUP.set(tables)  # inside: a signal may come when the call has returned
        return called(function, tables, symbols)
    except Exception as error:
        found = error if isinstance(error, ExpressionError) else _refused(error)
        if found is None:
            raise
        place = _place(error) or _origin(function).rpartition(" in ")[2]
        if place and not found.place:
            found.place, found.args = place, (f"{found} In {place}",)
        if found is error:
            raise
        raise found from error
    finally:
        LOOKUP.set(before)


def _refused(error: Exception) -> ExpressionError | None:
    """Explains that another library refuses a symbol, or that a pattern was called, if that is what an error says."""
    if str(error) == "'Expression' object is not callable":
        return ExpressionError(
            "a pattern: expected it beside functions, not called in one; got a call. Join them outside: sl.causal() & "
            "(lambda b, h, i, j: …)."
        )
    if "speedlight.expressions.symbols.Symbol" not in str(error):
        return None
    if [x for x in ("JAX", "jax", "jit-wrapped") if x in str(error)]:
        return ExpressionError(OF_JAX)
    return ExpressionError(
        f"a function that symbols cannot follow: {type(error).__name__}: {str(error).partition('. ')[0]}. Use "
        "operators, and NumPy's, PyTorch's or our functions of numbers."
    )


def _place(error: BaseException) -> str:
    """File, line and expression of the innermost code of others that an error came through; "" without any."""
    found, trace = "", error.__traceback__
    while trace is not None:
        frame, trace = trace, trace.tb_next
        code, line = frame.tb_frame.f_code, frame.tb_lineno
        if str(frame.tb_frame.f_globals.get("__name__")).split(".")[0] in LIBRARIES:
            continue
        text = linecache.getline(code.co_filename, line)
        if sys.version_info >= (3, 11):
            first, last, start, end = list(code.co_positions())[frame.tb_lasti // 2]
            text = text.encode()[start:end].decode() if first == last else text
        found = f"{code.co_filename}:{line}" + (f": {text.strip()}" if text.strip() else "")
    return found


def _checked(role: str, root: Node, most: int = _MOST) -> Expression:
    """The expression, if it is not too long; `most`: operations without the last, as far as is known without
    looking.
    """
    size = most + 1 if most < _MOST else sum(_cost(node) for node in order(root))
    if size > _MOST:
        raise ExpressionError(
            f"{role}: expected at most {_MOST:,} operations (a lookup, a function, // and % count as {LOOKUP_COST}); "
            f"got {size:,}. Put constants into an sl.table."
        )
    return Expression(role, root, size)


def _cost(node: Node) -> int:
    return LOOKUP_COST if node.op == "table" else OPERATIONS[node.op].cost if node.op in OPERATIONS else 1


def _positional(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names of positional arguments without defaults; None where Python cannot say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any([p.kind is p.VAR_POSITIONAL for p in parameters]):
        return None
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple([p.name for p in by_place if p.default is p.empty])


def score_chain(scores: Sequence[Expression]) -> Expression | None:
    """Several scores, left to right, as one."""
    root: Node | None = None
    for one in scores:
        root = one.root if root is None else replaced(one.root, {"s": root})
    return None if root is None else _checked("score", root)
