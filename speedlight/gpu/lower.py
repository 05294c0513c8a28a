"""From an expression's tree to Triton source: small functions that kernels call.

    invariants(b, h, i, ints, floats)           what is the same for every key: numbers, tables, values of rows
    apply(x, b, h, i, j, inside, …)             the score, then -inf where hidden
    back(d, x, b, h, i, j, …)                   of a backward pass: what d, flowing into the score, makes flow to s
    entry0(d, x, b, h, i, j, …)                 of a lookup: the entry that is read, and what flows to it
    bounds(b, h_low, h_high, i_low, i_high, j_low, j_high, …)      bounds.py's walk over many tiles at once

The text depends on the structure alone: numbers, addresses, shapes and strides are read from memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ..expressions.operations import OPERATIONS
from ..expressions.program import ENDS, LENGTHS, STRIDES, TABLE_WORDS, Program
from ..expressions.tables import Table
from ..expressions.tree import OF_KEYS, Node, order


def key_of(program: Program) -> str:
    """Returns what the text depends on: the structure, the indices that are checked, the tables of
    contiguous entries.
    """
    adjoin = [table.last_is_one for table in program.tables]
    return f"{program.key}\n{program.narrow} {program.unbounded} {adjoin} {program.checked}"


def table_at(program: Program, node: Node) -> int:
    """First word of a lookup's table, behind the numbers."""
    return len(program.numbers) + TABLE_WORDS * program.tables[node.value]


def _entry_type(table: Table) -> str:
    """Returns Triton's name of the type of a table's entries; bools are bytes."""
    return "tl.int8" if table.kind == "bool" else f"tl.{table.dtype_name}"


class _Text:
    """Lines of one function, and the names of what they compute. `before`: the text of loop-invariant values."""

    def __init__(self, program: Program, before: _Text | None = None) -> None:
        self.program, self.before, self.lines = program, before, list[str]()
        self.names: dict[Any, str] = {}
        self.constants: dict[str, str] = {}

    def let(self, value: str) -> str:
        name = f"{'t' if self.before else 'k'}{len(self.lines)}"
        self.lines.append(f"{name} = {value}")
        return name

    def constant(self, value: str) -> str:
        """Names a value that is the same everywhere, and computes it once."""
        text = self.before or self
        if value not in text.constants:
            text.constants[value] = text.let(value)
        return text.constants[value]

    def type_of(self, kind: str) -> str:
        return {
            "bool": "tl.int1",
            "int": "tl.int32" if self.program.narrow else "tl.int64",
            "float": "tl.float32",
            "double": "tl.float64",
        }[kind]

    def name(self, key: Any) -> str | None:
        """Returns the name of a node, or of what says that an index of a lookup is out of range."""
        return self.names.get(key) or (self.before.name(key) if self.before else None)

    def value(self, root: Node) -> str:
        for node in order(root):
            if self.name(id(node)) is None:
                text = self.before if self.before and not node.uses & OF_KEYS else self
                text.names[id(node)] = text.let(text.emit(node, [str(self.name(id(a))) for a in node.args]))
        return str(self.name(id(root)))

    def number(self, node: Node) -> str:
        at = self.program.numbers[id(node)]
        if node.is_float:
            return self.constant(f"tl.load(floats + {at}).to({self.type_of(node.kind)})")
        if node.kind == "int":
            return self.constant(f"tl.load(ints + {at}).to({self.type_of(node.kind)})")
        return self.constant(f"tl.load(ints + {at}) != 0")

    def emit(self, node: Node, args: list[str]) -> str:
        op, kind = node.op, node.kind
        match op:
            case "symbol" if node.is_float:
                return node.value if kind == "float" else f"{node.value}.to(tl.float64)"
            case "symbol":
                return f"{node.value}.to({self.type_of('int')})"
            case "number":
                return self.number(node)
            case "table":
                return self.look_up(node, args)
            case "add" | "sub" | "mul" | "lt" | "le" | "gt" | "ge" | "eq" | "ne" | "and" | "or" | "xor":
                return f"{args[0]} {OPERATIONS[op].symbol} {args[1]}"
            case "div":
                return f"divided({args[0]}, {args[1]})"
            case "floordiv" | "mod" | "shl" | "shr":
                name = "float_" if node.is_float else "int_"
                return f"{name}{op}({args[0]}, {args[1]})"
            case "neg":
                return f"-{args[0]}"
            case "not":
                return f"opposite({args[0]})"
            case "abs" if kind == "int":
                return f"tl.where({args[0]} < 0, -{args[0]}, {args[0]})"
            case "abs" | "floor":
                return f"tl.{op}({args[0]})"
            case "min" | "max":
                nan = ", propagate_nan=tl.PropagateNan.ALL" if node.is_float else ""
                return f"tl.{op}imum({args[0]}, {args[1]}{nan})"
            case "where":
                return f"tl.where({', '.join(args)})"
            case "cast" if kind == "int" and node.args[0].is_float:
                return f"whole({args[0]}).to({self.type_of(kind)})"
            case "cast":
                return f"{args[0]}.to({self.type_of(kind)})"
            case _:  # a function of gpu/primitives.py
                return f"{op}({args[0]})"

    def look_up(self, node: Node, index: list[str]) -> str:
        """The entry at the index, clamped to the table; names[node, dimension] says whether it was out of bounds."""
        at, array = table_at(self.program, node), node.value
        offset = ""
        for d, x in enumerate(index):
            last = self.constant(f"tl.load(ints + {at + LENGTHS + d}).to({self.type_of('int')}) - 1")
            inside = self.let(f"tl.minimum(tl.maximum({x}, 0), {last})")
            self.names[id(node), d] = self.let(f"{inside} != {x}")
            adjoin = d + 1 == len(index) and array.last_is_one
            stride = "1" if adjoin else self.constant(f"tl.load(ints + {at + STRIDES + d})")
            offset += f"{' + ' if offset else ''}{inside}.to(tl.int64) * {stride}"
        pointer = self.constant(f"tl.load(ints + {at}).to(tl.pointer_type({_entry_type(array)}))")
        entry = f"tl.load({pointer} + ({offset}))"
        return f"{entry} != 0" if node.kind == "bool" else f"{entry}.to({self.type_of(node.kind)})"


def _operator(text: str) -> Callable[[_Range, Any], _Range]:
    """Makes the method of a Python operator, written as `text` has it."""
    return lambda self, other: _Range(self.text, self.text.let(text.format(self.name, getattr(other, "name", other))))


class _Range:
    """A name in the text, with the operators that bounds.py uses."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: _Text, name: str) -> None:
        self.text, self.name = text, name

    def __neg__(self) -> _Range:
        return _Range(self.text, self.text.let(f"-{self.name}"))

    __add__ = __radd__ = _operator("{} + {}")
    __sub__, __rsub__ = _operator("{} - {}"), _operator("{1} - {0}")
    __mul__, __and__, __or__ = _operator("{} * {}"), _operator("{} & {}"), _operator("{} | {}")
    __lt__, __le__, __gt__, __ge__ = (_operator(f"{{}} {op} {{}}") for op in ("<", "<=", ">", ">="))


class _Ranges:
    """bounds.py's arithmetic, written as Triton source: scalars for a block of rows, vectors for many tiles."""

    def __init__(self, text: _Text) -> None:
        self.text, self.followed = text, text.program.followed
        ends = {"h": ("h_low", "h_high"), "i": ("i_low", "i_high"), "j": ("j_low", "j_high")}
        self.box = {x: tuple(self._let(f"{name}.to(tl.int64)") for name in ends[x]) for x in ends}
        self.box["b"] = (self._let("b.to(tl.int64)"),) * 2

    def _let(self, value: str) -> _Range:
        return _Range(self.text, self.text.let(value))

    def _call(self, function: str, *args: Any) -> _Range:
        return self._let(f"{function}({', '.join(str(getattr(x, 'name', x)) for x in args)})")

    def minimum(self, a: Any, b: Any) -> _Range:
        return self._call("tl.minimum", a, b)

    def maximum(self, a: Any, b: Any) -> _Range:
        return self._call("tl.maximum", a, b)

    def where(self, condition: Any, yes: Any, no: Any) -> _Range:
        zero = f"tl.zeros_like({condition.name}.to(tl.int64))"
        yes, no = (f"{zero} + {getattr(x, 'name', x)}" for x in (yes, no))
        return self._let(f"tl.where({condition.name}, {yes}, {no})")

    def invert(self, x: _Range) -> _Range:
        return self._let(f"opposite({x.name})")

    def truth(self, x: bool) -> _Range:
        return self._let(f"h_low {'==' if x else '!='} h_low")

    def equal(self, a: Any, b: Any) -> _Range:
        return self._let(f"{a.name} == {getattr(b, 'name', b)}")

    def floordiv(self, a: Any, b: Any) -> _Range:
        return self._call("int_floordiv", a, b)

    def number(self, node: Node) -> _Range:
        value = f"tl.load(ints + {self.text.program.numbers[id(node)]})"
        return self._let(value if node.kind == "int" else f"{value} != 0")

    def minus_infinity(self, node: Node) -> _Range:
        return self._let(f"tl.load(floats + {self.text.program.numbers[id(node)]}) == float('-inf')")

    def table(self, node: Node, index: list[tuple[_Range, _Range]]) -> tuple[_Range, _Range, _Range]:
        """Least and greatest entry, of the run if the box is a short one in one row, else of the whole table; and
        whether the box is inside the table.
        """
        text, at = self.text, table_at(self.text.program, node)
        start, alone, inside = "0", "h_low == h_low", "h_low == h_low"
        for d, (low, high) in enumerate(index[:-1]):
            size = text.let(f"tl.load(ints + {at + LENGTHS + d})")
            start = text.let(
                f"{start} + tl.minimum(tl.maximum({low.name}, 0), {size} - 1) * tl.load(ints + {at + STRIDES + d})"
            )
            alone = text.let(f"{alone} & ({low.name} == {high.name})")
            inside = text.let(f"{inside} & ({low.name} >= 0) & ({high.name} < {size})")
        low, high = (x.name for x in index[-1])
        pointer = text.let(f"tl.load(ints + {at}).to(tl.pointer_type({_entry_type(node.value)}))")
        d = len(index) - 1
        row = text.let(
            f"TableRow({pointer} + {start}, tl.load(ints + {at + STRIDES + d}), tl.load(ints + {at + LENGTHS + d}), "
            f"tl.load(ints + {at + ENDS}), tl.load(ints + {at + ENDS + 1}), {alone}, {inside})"
        )
        three = text.let(f"entry_range({row}, {low}, {high}, WIDTH)")
        least, most, inside = (_Range(text, text.let(f"{three}[{n}]")) for n in range(3))
        return (least > 0, most > 0, inside) if node.kind == "bool" else (least, most, inside)

    def all_equal(self, node: Node, index: Any, number: Node) -> _Range:
        return self.truth(False)  # floats are classified element by element


def source(program: Program) -> str:
    """The functions."""
    before = _Text(program)
    bodies = [_apply(program, before)]
    if program.changes_flow:
        bodies.append(_back(program, before))
    bodies += [_entry(program, before, n) for n in range(len(program.entries))]
    words = set(re.findall(r"\w+", " ".join([line for _, lines in bodies for line in lines])))
    names = [line.split(" = ")[0] for line in before.lines]
    used = [name for name in names if name in words]
    lines = ["@triton.jit", "def invariants(b, h, i, ints, floats):"]
    lines.extend(f"    {line}" for line in before.lines)
    lines.append(f"    return ({', '.join([*used, '0'])},)\n")
    for head, body in bodies:
        lines.extend(["", "@triton.jit", f"def {head}:"])
        lines.extend(f"    {name} = invariants[{n}]" for n, name in enumerate(used))
        lines.extend(f"    {line}" for line in body)
    return "\n".join((_HEAD, *lines, "", _bounds(program)))


_HEAD = """from speedlight.gpu.primitives import *
"""


def _apply(program: Program, before: _Text) -> tuple[str, list[str]]:
    text = _Text(program, before)
    if program.score is not None:
        text.lines.append("s = x * scale")
        text.lines.append(f"x = {text.value(program.score)} + tl.zeros_like(x)")
    text.lines.append("shown = inside")
    text.lines.append("if MASKED:")
    start = len(text.lines)
    if program.mask is not None:
        text.lines.append(f"shown = shown & {text.value(program.mask)}")
        text.lines.extend(_notes(program, text, program.mask))
    text.lines.append("x = tl.where(shown, x, float('-inf'))")
    text.lines[start:] = [f"    {line}" for line in text.lines[start:]]
    if program.score is not None:
        text.lines.extend(_notes(program, text, program.score))
    head = "apply(x, b, h, i, j, inside, scale, invariants, ints, floats, wrong, MASKED: tl.constexpr)"
    return head, [*text.lines, "return x"]


def _back(program: Program, before: _Text) -> tuple[str, list[str]]:
    """What is the same as in the score is written again, for the compiler to join."""
    text = _Text(program, before)
    assert program.flow is not None
    text.lines.append("s = x * scale")
    text.lines.append(f"return ({text.value(program.flow)} + tl.zeros_like(x)).to(tl.float32)")
    return "back(d, x, b, h, i, j, scale, invariants, ints, floats)", text.lines


def _entry(program: Program, before: _Text, n: int) -> tuple[str, list[str]]:
    text, (lookup, into) = _Text(program, before), program.entries[n]
    text.lines.append("s = x * scale")
    index = text.let("tl.zeros([], tl.int64)")
    for d, node in enumerate(lookup.args):
        size = text.let(f"tl.load(ints + {table_at(program, lookup) + LENGTHS + d})")
        at = text.let(f"{text.value(node)}.to(tl.int64)")
        index = text.let(f"{index} * {size} + tl.minimum(tl.maximum({at}, 0), {size} - 1)")
    text.lines.append(f"return {index}, ({text.value(into)} + tl.zeros_like(x)).to(tl.float64)")
    return f"entry{n}(d, x, b, h, i, j, scale, invariants, ints, floats)", text.lines


def _notes(program: Program, text: _Text, root: Node) -> list[str]:
    """Lines that note an index that is out of range at a visible key."""
    lines = []
    reached = {id(n) for n in order(root)}
    for n, ((node, d), checked) in enumerate(zip(program.lookups, program.checked, strict=True)):
        if checked and id(node) in reached:
            index = text.name(id(node.args[d]))
            lines.append(f"note(wrong + {2 * n}, {text.name((id(node), d))}, {index}, shown)")
    return lines


def _bounds(program: Program) -> str:
    if not program.may_hide:
        return ""
    text = _Text(program)
    ops = _Ranges(text)
    partly, wholly = program.visibility(ops)
    lines = [
        "@triton.jit",
        "def bounds(b, h_low, h_high, i_low, i_high, j_low, j_high, ints, floats, WIDTH: tl.constexpr):",
    ]
    lines.extend(f"    {line}" for line in text.lines)
    lines.append("    none = j_low != j_low  # of the right shape")
    lines.append(f"    return {partly.name} | none, {wholly.name} | none\n")
    return "\n".join(lines)
