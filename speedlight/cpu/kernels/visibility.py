"""Visibility of boxes of queries and keys under a mask, as scalar code: bounds.py's walk, written into the kernel."""

from __future__ import annotations

from typing import Any

from ...expressions.program import ENDS, Program
from ...expressions.tree import Node
from ...problem.problem import PART
from ..language.lookups import Box
from ..language.prototypes import prototype
from ..language.vector import F64, I1, I64, PTR, Value
from ..memory.records import field
from ..memory.shape import Shape
from .lower import Lowering


class _Scalars:
    """bounds.py's arithmetic, written as scalar code."""

    def __init__(self, lowering: Lowering, box: dict[str, tuple[Value, Value]], followed: frozenset[int]) -> None:
        self.lowering, self.k, self.box, self.followed = lowering, lowering.k, box, followed

    def minimum(self, a: Value, b: Value | int) -> Value:
        return self.k.min(a, self._int(b))

    def maximum(self, a: Value, b: Value | int) -> Value:
        return self.k.max(a, self._int(b))

    def _int(self, x: Value | int) -> Value:
        return x if isinstance(x, Value) else self.k.i64(x)

    def where(self, condition: Value, yes: Value | int, no: Value | int) -> Value:
        return self.k.select(condition, self._int(yes), self._int(no))

    def invert(self, x: Value) -> Value:
        return x ^ 1

    def truth(self, x: bool) -> Value:
        return self.k.const(int(x), I1)

    def equal(self, a: Value, b: Value | int) -> Value:
        return a.equals(b)

    def floordiv(self, a: Value, b: Value) -> Value:
        return self.lowering._divided("floordiv", a, b)

    def number(self, node: Node) -> Value:
        return self.lowering._number(node)

    def minus_infinity(self, node: Node) -> Value:
        return self.lowering._number(node).equals(float("-inf"))

    def table(self, node: Node, index: list[tuple[Value, Value]]) -> tuple[Value, Value, Value]:
        """Least and greatest entry of a small box, of the whole table where the box is large; and whether it is
        inside.
        """
        k, at = self.k, self.lowering.table_at(node)
        box = Box(k, node, at, index)
        least, most = (k.variable(k.load(I64, at, 8 * (ENDS + n))) for n in (0, 1))
        box.ends_of(least, most)
        low, high = least.get(), most.get()
        return (low > 0, high > 0, box.inside) if node.kind == "bool" else (low, high, box.inside)

    def all_equal(self, node: Node, index: list[tuple[Value, Value]], number: Node) -> Value:
        wanted = self.lowering._number(number)
        return Box(self.k, node, self.lowering.table_at(node), index).all_equal(
            wanted if wanted.type is F64 else self.k.extend(wanted, F64)
        )


def visibility(module: Any, s: Shape, program: Program) -> Any:
    """0, 1 or 2: nothing, something, or everything in the box of heads, positions and keys is visible.

    Ends are inclusive.
    """
    words = "a* batch h_low h_high i_low i_high j_low j_high"
    k = module.function("visibility", prototype(words), I64, special=True)
    p = k.p
    lowering = Lowering(k, s, program, *(k.load(PTR, p["a"], field(n)) for n in ("numbers", "tables")))
    box = {
        "b": (p["batch"], p["batch"]),
        "h": (p["h_low"], p["h_high"]),
        "i": (p["i_low"], p["i_high"]),
        "j": (p["j_low"], p["j_high"]),
    }
    ops = _Scalars(lowering, box, program.followed)
    some, every = program.visibility(ops)
    return k.finish(k.zext(some, I64) + k.zext(some & every, I64))


def extent(module: Any, visibility: Any) -> Any:
    """Finds in the mixed tile [j_low, j_low + count) the first and past-the-last key that may be visible, and between
    them the first keys of which all are visible, and how far.

    Told by parts of PART keys, relative to j_low, packed as first | end << 8 | full << 16 | clear << 24; first = end if
    all is hidden, clear = full if no part is wholly visible.
    """
    words = "a* batch h_low h_high i_low i_high j_low count"
    k = module.function("extent", prototype(words), I64, special=True)
    p = k.p

    def classed(low: Value, high: Value) -> Value:
        box = [p[n] for n in ("a", "batch", "h_low", "h_high", "i_low", "i_high")]
        return k.call(visibility, *box, p["j_low"] + low, p["j_low"] + high - 1)

    def after(at: Value, end: Value) -> Value:
        return k.min(at + PART, end)

    first, end = k.variable(k.i64(0)), k.variable(p["count"])
    with k.forever() as leave_if:
        leave_if(first.get() >= p["count"])
        leave_if(classed(first.get(), after(first.get(), p["count"])) > 0)
        first.set(after(first.get(), p["count"]))
    with k.forever() as leave_if:
        leave_if(end.get() <= first.get())
        start = (end.get() - 1) & -PART
        leave_if(classed(start, end.get()) > 0)
        end.set(start)
    clear = k.variable(first.get())
    with k.forever() as leave_if:
        leave_if(clear.get() >= end.get())
        leave_if(classed(clear.get(), after(clear.get(), end.get())).equals(2))
        clear.set(after(clear.get(), end.get()))
    full = k.variable(clear.get())
    with k.forever() as leave_if:
        leave_if(full.get() >= end.get())
        leave_if(classed(full.get(), after(full.get(), end.get())) < 2)
        full.set(after(full.get(), end.get()))
    return k.finish(first.get() | end.get() << 8 | full.get() << 16 | clear.get() << 24)
