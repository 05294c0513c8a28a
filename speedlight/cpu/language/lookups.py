"""Table lookups as code: an entry a lane, sixteen keys of a row at once, and what a box of a table holds.

A table is described by the words of expressions/program.py, with strides in bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from llvmlite import ir

from ...expressions.bounds import SCAN, linear
from ...expressions.program import LENGTHS, STRIDES
from ...expressions.tree import Node
from .functions import like
from .vector import F16, F32, F64, I1, I8, I16, I32, I64, PTR, Function, Value, Variable, element_of, vec

_STORED = {"bool": I8, "int8": I8, "uint8": I8, "int16": I16, "uint16": I16, "int32": I32, "uint32": I32, "int64": I64,
           "uint64": I64,
           "float16": F16, "float32": F32, "float64": F64}  # fmt: skip
_SUFFIX = {I8: "i8", I16: "i16", I32: "i32", I64: "i64", F16: "f16", F32: "f32", F64: "f64"}
_BYTES = {I8: 1, I16: 2, I32: 4, I64: 8, F16: 2, F32: 4, F64: 8}


def dtype_of(node: Node) -> str:
    return node.value.array.dtype.name


def stored_type(node: Node) -> ir.Type:
    return _STORED[dtype_of(node)]


def length_of(k: Function, at: Value, d: int) -> Value:
    return k.load(I64, at, 8 * (LENGTHS + d))


def stride_of(k: Function, at: Value, d: int) -> Value:
    return k.load(I64, at, 8 * (STRIDES + d))


def clamped(k: Function, at: Value, d: int, x: Value) -> tuple[Value, Value]:
    """The index clamped to the table, and whether it was out of bounds."""
    last = splat_like(k, length_of(k, at, d) - 1, x)
    inside = k.max(k.min(x, last), k.const(0, x.type))
    return inside, x.differs(inside) | (last < 0)


def splat_like(k: Function, a: Value, x: Value) -> Value:
    return k.splat(a, x.type.count) if isinstance(x.type, ir.VectorType) else a


def added(k: Function, a: Value | None, b: Value) -> Value:
    """a + b where either may be one number for all lanes."""
    if a is None:
        return b
    if isinstance(b.type, ir.VectorType) and not isinstance(a.type, ir.VectorType):
        return splat_like(k, a, b) + b
    return a + (b if a.type == b.type else splat_like(k, b, a))


def entries(k: Function, node: Node, base: Value, offset: Value) -> Value:
    """Loads what is stored at base + offset: one entry, or one a lane."""
    t = stored_type(node)
    if not isinstance(offset.type, ir.VectorType):
        return k.load(t, base, offset)
    lanes = offset.type.count
    address = k.splat(Value(k, k.b.ptrtoint(base.x, I64)), lanes) + offset
    pointers = Value(k, k.b.inttoptr(address.x, vec(PTR, lanes)))
    name = f"llvm.masked.gather.v{lanes}{_SUFFIX[t]}.v{lanes}p0"
    every = k.const(1, vec(I1, lanes))
    return k.intrinsic(name, vec(t, lanes), pointers, k.const(1, I32), every, k.const(0, vec(t, lanes)))


def as_number(k: Function, node: Node, x: Value, wanted: ir.Type) -> Value:
    """A stored entry as `wanted`: a float, an integer, or for bool the integer 0 or 1 (as I1: itself)."""
    name = dtype_of(node)
    t = like(x, wanted)
    if name == "bool":
        one = x.differs(0)
        return one if wanted is I1 else k.zext(one, t)
    if name.startswith(("int", "uint")):
        if _BYTES[element_of(x.type)] == _BYTES[wanted]:
            return x
        if _BYTES[element_of(x.type)] > _BYTES[wanted]:
            return k.trunc(x, t)
        return Value(k, (k.b.zext if name.startswith("u") else k.b.sext)(x.x, t))
    if element_of(x.type) is F16 and wanted is F64:  # in one step it would be a library's function
        x = k.extend(x, like(x, F32))
    return x if x.type == t else k.extend(x, t)


def direction(node: Node) -> int:
    """+1 or -1 if the last index moves by one from key to key and no other does; else 0."""
    *leading, last = node.args
    if "s" in node.uses or any(["j" in a.uses for a in leading]):
        return 0
    found = linear(last)
    return found[1] if found is not None and found[1] in (1, -1) else 0


def lines(node: Node, keys: int) -> int:
    """Cache lines that so many keys of a row take at most, without the one that is begun."""
    return -(-keys * _BYTES[stored_type(node)] // 64)


class Stream:
    """A lookup whose last index moves by one from key to key: `lanes` keys of every lane's row are read and transposed
    at once.
    """

    def __init__(
        self, k: Function, node: Node, at: Value, lanes: int, number: ir.Type, addresses: Value | None = None
    ) -> None:
        """`addresses`, if known: every lane's address of key 0."""
        self.k, self.node, self.at, self.lanes, self.number = k, node, at, lanes, number
        self.direction, self.last = direction(node), len(node.args) - 1
        self.first: Value = at  # index at the group's first key
        self.base: Value = at
        self.buffer, self.addresses = k.buffer(number, lanes * lanes), addresses
        self.risky = k.variable(k.const(0, I1))

    def begin(self, leading: list[Value]) -> dict[int, tuple[Value, Value]]:
        """Finds every lane's row; returns which of the leading indices are wrong, by dimension."""
        k, wrong = self.k, {}
        base = Value(k, k.b.ptrtoint(k.load(PTR, self.at).x, I64))
        for d, x in enumerate(leading):
            inside, bad = clamped(k, self.at, d, x)
            wrong[d] = bad, x
            base = added(k, base, inside * splat_like(k, stride_of(k, self.at, d), x))
        self.base = base
        return wrong

    def fill(self, first: Value, key: Value, count: Value) -> None:
        """Reads the entries of `count` keys from `key` on; `first` is the last index there."""
        k, n, size = self.k, self.lanes, _BYTES[stored_type(self.node)]
        self.first = first
        low = first if self.direction > 0 else first - (n - 1)
        room = splat_like(k, length_of(k, self.at, self.last) - n, low)
        inside = (low >= 0) & (low <= room)
        inside = k.all(inside) if isinstance(low.type, ir.VectorType) else inside
        fast = inside & stride_of(k, self.at, self.last).equals(size)
        self.risky.set(fast ^ 1)
        with k.either(fast) as (whole, rest):
            with whole:
                self._rows(low, key * size)
            with rest, k.range(0, count) as m:
                inside, _ = clamped(k, self.at, self.last, self.index(m))
                step = inside * splat_like(k, stride_of(k, self.at, self.last), inside)
                offset = added(k, self.base, step)
                offset = offset if isinstance(offset.type, ir.VectorType) else k.splat(offset, n)
                x = entries(k, self.node, k.pointer(k.i64(0)), offset)
                self._store(m, as_number(k, self.node, x, self.number))

    def address(self, index: Value) -> Value:
        """Every lane's address of the entry with this last index, if entries lie side by side."""
        address = added(self.k, self.base, index * _BYTES[stored_type(self.node)])
        return address if isinstance(address.type, ir.VectorType) else self.k.splat(address, self.lanes)

    def _rows(self, low: Value, offset: Value) -> None:
        k, n = self.k, self.lanes
        if self.addresses is None:
            address = self.address(low)
            rows = [k.pointer(Value(k, k.b.extract_element(address.x, I32(lane)))) for lane in range(n)]
        else:  # from memory: cheaper than out of a vector
            rows = [k.at(k.load(PTR, self.addresses, 8 * lane), offset) for lane in range(n)]
        rows = [as_number(k, self.node, k.load(vec(stored_type(self.node), n), row), self.number) for row in rows]
        keys = k.transpose(rows)
        for m, x in enumerate(keys if self.direction > 0 else keys[::-1]):
            self._store(k.i64(m), x)

    def _store(self, m: Value, x: Value) -> None:
        self.k.store(x, self.buffer, m * (self.lanes * _BYTES[self.number]))

    def index(self, m: Value) -> Value:
        """The last index at key m of the group."""
        k = self.k
        return added(k, self.first, m if self.direction > 0 else -m)

    def value(self, m: Value) -> Value:
        k = self.k
        x = k.load(vec(self.number, self.lanes), self.buffer, m * (self.lanes * _BYTES[self.number]))
        return x.differs(0) if self.node.kind == "bool" else x


class Box:
    """A box of a table, to be looked at entry by entry if all of it is inside and small."""

    def __init__(self, k: Function, node: Node, at: Value, index: list[tuple[Value, Value]]) -> None:
        self.k, self.node, self.at, self.ends = k, node, at, index
        inside, area = k.const(1, I1), k.i64(1)
        for d, (a, b) in enumerate(index):
            inside = inside & (a >= 0) & (b < length_of(k, at, d))
            area = area * k.min(b - a + 1, k.i64(SCAN + 1))
        self.inside, self.small = inside, inside & (area <= SCAN)

    @contextlib.contextmanager
    def rows(self, done: Variable) -> Iterator[tuple[Value, Value, Value]]:
        """Address, count and step of each row, until `done`."""
        k = self.k
        with contextlib.ExitStack() as stack:
            stack.enter_context(k.when(self.small))
            offset = k.i64(0)
            for d, (a, b) in enumerate(self.ends[:-1]):
                offset = offset + stack.enter_context(k.range(a, b + 1)) * stride_of(k, self.at, d)
            stack.enter_context(k.when(done.get() ^ 1))
            a, b = self.ends[-1]
            step = stride_of(k, self.at, len(self.ends) - 1)
            yield k.at(k.load(PTR, self.at), offset + a * step), b - a + 1, step

    def ends_of(self, least: Variable, most: Variable) -> None:
        """Least and greatest entry of bools and integers. Of bools, looks no further once both are there."""
        k, node = self.k, self.node
        t = stored_type(node)
        done = k.variable(k.const(0, I1))
        with k.when(self.small):
            least.set(k.i64((1 << 63) - 1))
            most.set(k.i64(-(1 << 63)))
        with self.rows(done) as (row, count, step):
            whole = k.i64(0)
            if not dtype_of(node).startswith("u"):  # several at a time; unsigned ones would compare as signed
                n = 64 // _BYTES[t] if node.kind != "bool" else 16
                wide = vec(t, n)
                whole = k.select(step.equals(_BYTES[t]), count & -n, k.i64(0))
                with k.when(whole > 0):
                    lows, highs = (k.variable(k.const(x, wide)) for x in (_most(t), -_most(t) - 1))
                    with k.range(0, whole, n) as m:
                        x = k.load(wide, row, m * _BYTES[t])
                        x = k.zext(x.differs(0), wide) if node.kind == "bool" else x
                        lows.set(k.min(x, lows.get()))
                        highs.set(k.max(x, highs.get()))
                    for found, name, best, combine in ((lows, "smin", least, k.min), (highs, "smax", most, k.max)):
                        one = k.intrinsic(f"llvm.vector.reduce.{name}.v{n}{_SUFFIX[t]}", t, found.get())
                        one = one if t is I64 else Value(k, k.b.sext(one.x, I64))
                        best.set(combine(one, best.get()))
            with k.range(whole, count) as m:
                x = as_number(k, node, k.load(t, row, m * step), I64)
                least.set(k.min(x, least.get()))
                most.set(k.max(x, most.get()))
            if node.kind == "bool":
                done.set(least.get() < most.get())

    def all_equal(self, wanted: Value) -> Value:
        """Returns whether every entry of floats equals `wanted`, an F64; False where the box was not looked at."""
        k, t = self.k, stored_type(self.node)
        compared = F32 if t is F16 else t
        wanted = wanted if compared is F64 else k.narrow(wanted, F32)
        other = k.variable(self.small ^ 1)
        n = 64 // _BYTES[compared]
        with self.rows(other) as (row, count, step):
            whole = k.select(step.equals(_BYTES[t]), count & -n, k.i64(0))
            with k.range(0, whole, n) as m, k.when(other.get() ^ 1):
                x = as_number(k, self.node, k.load(vec(t, n), row, m * _BYTES[t]), compared)
                other.set(k.any(x.differs(k.splat(wanted, n))))
            with k.range(whole, count) as m:
                other.set(other.get() | as_number(k, self.node, k.load(t, row, m * step), compared).differs(wanted))
        return other.get() ^ 1


def _most(t: ir.Type) -> int:
    return (1 << (8 * _BYTES[t] - 1)) - 1
