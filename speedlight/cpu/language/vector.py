"""A small vector language on llvmlite: Python loops unroll, `k.range` loops run.

A `Module` holds functions; a `Function` (always called `k`) is one being written. Every value is a `Value` with
Python arithmetic. Addresses are pointers plus bytes; all indices are 64-bit; no fast-math flag is ever set, so what
is written is what is computed.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
PTR, VOID = ir.PointerType(), ir.VoidType()


class _BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite lacks; only ever an operand of the dot instruction."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


BF16 = _BFloat()
_SIZES = {I8: 1, I16: 2, I32: 4, I64: 8, F16: 2, F32: 4, F64: 8}
_SUFFIX = {F16: "f16", F32: "f32", F64: "f64", I32: "i32", I64: "i64"}


@functools.cache
def vec(element: ir.Type, count: int) -> ir.VectorType:
    return ir.VectorType(element, count)


# Kept, with their text: most of a module's text is constants, and most of those are alike.
@functools.lru_cache(maxsize=2048, typed=True)
def constant(t: ir.Type, value: float, sign: float) -> ir.Constant:
    """`value`, in every lane; `sign` tells zeros apart."""
    return ir.Constant(t, [value] * t.count if isinstance(t, ir.VectorType) else value)


@functools.lru_cache(maxsize=256)
def _numbers(element: ir.Type, *values: int) -> ir.Constant:
    return ir.Constant(vec(element, len(values)), list(values))


def element_of(t: ir.Type) -> ir.Type:
    return t.element if isinstance(t, ir.VectorType) else t


def bytes_of(t: ir.Type) -> int:
    """Returns the bytes of a number, or of a vector."""
    return t.count * _SIZES[t.element] if isinstance(t, ir.VectorType) else _SIZES[t]


def _suffix(t: ir.Type) -> str:
    return f"v{t.count}{_SUFFIX[t.element]}" if isinstance(t, ir.VectorType) else _SUFFIX[t]


class Value:
    """One SSA value. `+ - * /` and comparisons work on it, on its like, and on Python numbers."""

    __slots__ = ("k", "x")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, k: Function, x: Any) -> None:
        self.k, self.x = k, x

    @property
    def type(self) -> ir.Type:
        return self.x.type

    @property
    def is_float(self) -> bool:
        return isinstance(element_of(self.type), (ir.HalfType, ir.FloatType, ir.DoubleType))

    def _like(self, other: Value | float) -> Any:
        return other.x if isinstance(other, Value) else self.k.const(other, self.type).x

    def _binary(self, other: Value | float, on_float: str | None, on_int: str | None) -> Value:
        name = on_float if self.is_float else on_int
        assert name is not None
        return Value(self.k, getattr(self.k.b, name)(self.x, self._like(other)))

    def __add__(self, other: Value | float) -> Value:
        return self._binary(other, "fadd", "add")

    def __sub__(self, other: Value | float) -> Value:
        return self._binary(other, "fsub", "sub")

    def __mul__(self, other: Value | float) -> Value:
        return self._binary(other, "fmul", "mul")

    __radd__ = __add__
    __rmul__ = __mul__

    def __truediv__(self, other: Value) -> Value:
        return self._binary(other, "fdiv", None)

    def __floordiv__(self, other: Value | int) -> Value:
        """Unsigned division: sizes and tickets are never negative."""
        return self._binary(other, None, "udiv")

    def __mod__(self, other: Value | int) -> Value:
        return self._binary(other, None, "urem")

    def __and__(self, other: Value | int) -> Value:
        return self._binary(other, None, "and_")

    def __or__(self, other: Value | int) -> Value:
        return self._binary(other, None, "or_")

    def __xor__(self, other: Value | int) -> Value:
        return self._binary(other, None, "xor")

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary(other, None, "shl")

    def __rshift__(self, other: Value | int) -> Value:
        return self._binary(other, None, "lshr")

    def __neg__(self) -> Value:
        return Value(self.k, self.k.b.fneg(self.x) if self.is_float else self.k.b.neg(self.x))

    def _compare(self, op: str, other: Value | float) -> Value:
        b = self.k.b
        compare = b.fcmp_ordered if self.is_float else b.icmp_signed
        return Value(self.k, compare(op, self.x, self._like(other)))

    def __lt__(self, other: Value | float) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Value | float) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Value | float) -> Value:
        return self._compare("==", other)

    def differs(self, other: Value | float) -> Value:
        """Not equal; for floats true also where either is NaN."""
        if self.is_float:
            return Value(self.k, self.k.b.fcmp_unordered("!=", self.x, self._like(other)))
        return self._compare("!=", other)

    def bits(self, t: ir.Type) -> Value:
        return Value(self.k, self.k.b.bitcast(self.x, t))


def lanes_of(x: Value) -> int:
    """Returns how many lanes a vector has."""
    t: Any = x.type
    return t.count


Body = Callable[[Value], None]  # of a loop, at an index


class Variable:
    """A mutable local; LLVM keeps it in a register."""

    __slots__ = ("_p", "k", "type")

    def __init__(self, k: Function, initial: Value) -> None:
        self.k, self.type = k, initial.type
        with k.b.goto_entry_block():
            self._p = k.b.alloca(initial.type)
        self.set(initial)

    def set(self, value: Value) -> None:
        self.k.b.store(value.x, self._p)

    def get(self) -> Value:
        return Value(self.k, self.k.b.load(self._p, typ=self.type))


class Module:
    """LLVM functions that are compiled together: as one text, or as what many kernels share and what one alone has."""

    def __init__(self, name: str) -> None:
        self.ir = ir.Module(name)
        self.special: set[str] = set()
        self.made: dict[str, Any] = {}

    def function(
        self,
        name: str,
        params: Mapping[str, ir.Type],
        returns: ir.Type = VOID,
        *,
        public: bool = False,
        special: bool = False,
    ) -> Function:
        """`special`: made for one mask and score, or calls one that is."""
        if special or public:
            self.special.add(name)
        return Function(self, name, params, returns, public)

    def once(self, name: str, make: Callable[[Module], Any]) -> Any:
        """Returns what `make` wrote here, which several functions use."""
        if name not in self.made:
            self.made[name] = make(self)
        return self.made[name]

    def declare(self, name: str, returns: ir.Type, params: Sequence[ir.Type]) -> Any:
        known = self.ir.globals.get(name)
        return known or ir.Function(self.ir, ir.FunctionType(returns, list(params)), name)

    def parts(self) -> tuple[str, str]:
        """Two modules that call each other's functions. The first is the same text for many masks and scores: who
        keeps what it was compiled to has half of the next kernel.
        """
        shared, special = [], []
        for f in self.ir.functions:
            if not f.is_declaration:
                (special if f.name in self.special else shared).append(f)
        return self._text(shared), self._text(special)

    def _text(self, functions: list[ir.Function]) -> str:
        """These functions, and prototypes of those that they call."""
        body = "\n".join([str(f).replace("define internal", "define", 1) for f in functions])
        names = {f.name for f in functions}
        called = [f for f in self.ir.functions if f.name not in names and f'@"{f.name}"(' in body]
        return "\n".join([*map(_prototype, called), body, *map(str, self.ir.metadata)])

    def __str__(self) -> str:
        return str(self.ir)


def _prototype(f: ir.Function) -> str:
    if f.is_declaration:
        return str(f)
    types = ", ".join([str(a.type) for a in f.args])
    return f'declare {f.function_type.return_type} @"{f.name}"({types})'


class Function:
    """One function being written. Parameters are attributes of `k.p`."""

    def __init__(
        self, module: Module, name: str, params: Mapping[str, ir.Type], returns: ir.Type, public: bool
    ) -> None:
        self.module = module
        self.f = ir.Function(module.ir, ir.FunctionType(returns, list(params.values())), name)
        if not public:
            self.f.linkage = "internal"
        self.f.attributes.add("noinline")
        self.f.attributes.add("nounwind")
        self.b = ir.IRBuilder(self.f.append_basic_block("entry"))
        body = self.f.append_basic_block("body")
        self.b.branch(body)
        self.b.position_at_end(body)
        self.p = {name: Value(self, arg) for name, arg in zip(params, self.f.args, strict=True)}
        self.parts = 1  # how many vectors are one, under in_step()
        self.made: dict[str, Value] = {}

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Returns what `make` wrote in this function, once for all that use it."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def finish(self, value: Value | None = None) -> Any:
        if value is None:
            self.b.ret_void()
        else:
            self.b.ret(value.x)
        return self.f

    # --- constants and calls

    def const(self, value: float, t: ir.Type) -> Value:
        return Value(self, constant(t, value, math.copysign(1.0, value)))

    def i64(self, value: int) -> Value:
        return self.const(value, I64)

    def iota(self, lanes: int) -> Value:
        """0, 1, 2, …"""
        return Value(self, _numbers(I64, *range(lanes)))

    def call(self, f: Any, *args: Value) -> Value:
        return Value(self, self.b.call(f, [a.x for a in args]))

    def intrinsic(self, name: str, returns: ir.Type, *args: Value) -> Value:
        return self.call(self.module.declare(name, returns, [a.type for a in args]), *args)

    # --- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self.intrinsic(f"llvm.fma.{_suffix(c.type)}", c.type, a, b, c)

    def abs(self, a: Value) -> Value:
        return self.intrinsic(f"llvm.fabs.{_suffix(a.type)}", a.type, a)

    def unary(self, name: str, a: Value) -> Value:
        """An intrinsic of one float: sqrt, floor."""
        return self.intrinsic(f"llvm.{name}.{_suffix(a.type)}", a.type, a)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return Value(self, self.b.select(condition.x, yes.x, no.x))

    def max(self, a: Value, b: Value) -> Value:
        """a where a > b, else b: with a NaN in either, b."""
        return self.select(a > b, a, b)

    def min(self, a: Value, b: Value) -> Value:
        """a where a < b, else b: with a NaN in either, b."""
        return self.select(a < b, a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger, +0 above -0; NaN if either is."""
        return self.intrinsic(f"llvm.maximum.{_suffix(a.type)}", a.type, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller, -0 below +0; NaN if either is."""
        return self.intrinsic(f"llvm.minimum.{_suffix(a.type)}", a.type, a, b)

    def splat(self, a: Value, lanes: int) -> Value:
        t = vec(a.type, lanes)
        undefined = ir.Constant(t, ir.Undefined)
        one = self.b.insert_element(undefined, a.x, I32(0))
        return Value(self, self.b.shuffle_vector(one, undefined, _numbers(I32, *[0] * lanes)))

    def first(self, a: Value) -> Value:
        """The first lane of a vector."""
        return Value(self, self.b.extract_element(a.x, I32(0)))

    def shuffle(self, a: Value, b: Value, index: Sequence[int]) -> Value:
        return Value(self, self.b.shuffle_vector(a.x, b.x, _numbers(I32, *index)))

    def joined(self, parts: Sequence[Value]) -> Value:
        """Returns vectors, a power of 2 of them, as one."""
        level = list(parts)
        while len(level) > 1:
            lanes = 2 * lanes_of(level[0])
            level = [self.shuffle(a, b, range(lanes)) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    def in_step(self, f: Callable[[Function, Value], Value], xs: Sequence[Value]) -> list[Value]:
        """Returns f of vectors, each step of it taken for all of them before the next: f sees them as one vector, which
        LLVM takes apart.
        """
        lanes, self.parts = lanes_of(xs[0]), len(xs)
        y = f(self, self.joined(xs))
        self.parts = 1
        return [self.shuffle(y, y, range(at, at + lanes)) for at in range(0, lanes * len(xs), lanes)]

    def all(self, condition: Value) -> Value:
        n = condition.x.type.count
        return condition.bits(ir.IntType(n)).equals((1 << n) - 1)

    def any(self, condition: Value) -> Value:
        return condition.bits(ir.IntType(condition.x.type.count)).differs(0)

    def zext(self, a: Value, t: ir.Type) -> Value:
        return Value(self, self.b.zext(a.x, t))

    def trunc(self, a: Value, t: ir.Type) -> Value:
        return Value(self, self.b.trunc(a.x, t))

    def extend(self, a: Value, t: ir.Type) -> Value:
        return Value(self, self.b.fpext(a.x, t))

    def narrow(self, a: Value, t: ir.Type) -> Value:
        return Value(self, self.b.fptrunc(a.x, t))

    def to_float(self, a: Value, t: ir.Type) -> Value:
        return Value(self, self.b.sitofp(a.x, t))

    # --- memory

    def buffer(self, t: ir.Type, count: int) -> Value:
        """Room on the stack for `count` values of a type, the same at every turn of a loop."""
        with self.b.goto_entry_block():
            room = self.b.alloca(ir.ArrayType(t, count))
            room.type = PTR  # llvmlite would insist on arrays being stored
            return Value(self, room)

    def at(self, pointer: Value, offset: Value | int) -> Value:
        off = offset.x if isinstance(offset, Value) else I64(offset)
        return Value(self, self.b.gep(pointer.x, [off], source_etype=I8))

    def pointer(self, address: Value) -> Value:
        return Value(self, self.b.inttoptr(address.x, PTR))

    def load(self, t: ir.Type, pointer: Value, offset: Value | int = 0, align: int = 1) -> Value:
        return Value(self, self.b.load(self.at(pointer, offset).x, align=align, typ=t))

    def store(self, value: Value, pointer: Value, offset: Value | int = 0, align: int = 1) -> None:
        self.b.store(value.x, self.at(pointer, offset).x, align=align)

    def stream(self, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        """Stores a vector past the caches, at a multiple of its size."""
        stored = self.b.store(value.x, self.at(pointer, offset).x, align=bytes_of(value.type))
        stored.set_metadata("nontemporal", self.module.ir.add_metadata([I32(1)]))

    def prefetch(self, pointer: Value, level: int = 1, *, write: bool = False) -> None:
        """Towards a cache: the first, second or third, to be read or written there; any address will do."""
        f = self.module.declare("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32])
        self.b.call(f, [pointer.x, I32(int(write)), I32(4 - level), I32(1)])

    def fetch_add(self, pointer: Value, offset: int, amount: Value | int) -> Value:
        """Adds atomically; what was there before."""
        by = amount.x if isinstance(amount, Value) else I64(amount)
        return Value(self, self.b.atomic_rmw("add", self.at(pointer, offset).x, by, "seq_cst"))

    # --- control

    def variable(self, initial: Value) -> Variable:
        return Variable(self, initial)

    @contextlib.contextmanager
    def range(self, low: Value | int, high: Value | int, step: int = 1) -> Iterator[Value]:
        """An emitted loop over [low, high)."""
        lo = low if isinstance(low, Value) else self.i64(low)
        hi = high if isinstance(high, Value) else self.i64(high)
        before = self.b.block
        head, body, end = (self.f.append_basic_block(n) for n in ("for", "do", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(lo.x, before)
        self.b.cbranch(self.b.icmp_signed("<", index, hi.x), body, end)
        self.b.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(self.b.add(index, I64(step)), self.b.block)
        self.b.branch(head)
        self.b.position_at_end(end)

    def unrolled(self, low: Value | int, high: Value, body: Body, by: int = 2, turn: Body | None = None) -> None:
        """body(index) over [low, high), `by` at a time: a short loop's end is predicted, a long one's is not.
        turn(index), if there is one, takes the place of `by` bodies.
        """
        start = low if isinstance(low, Value) else self.i64(low)
        middle = start + (high - start) // by * by
        with self.range(start, middle, by) as t:
            if turn is not None:
                turn(t)
            for i in range(0 if turn else by):
                body(t + i)
        with self.range(middle, high) as t:
            body(t)

    @contextlib.contextmanager
    def forever(self) -> Iterator[Any]:
        """An endless loop; yields `leave_if(condition)`."""
        body, end = self.f.append_basic_block("loop"), self.f.append_basic_block("left")
        self.b.branch(body)
        self.b.position_at_end(body)

        def leave_if(condition: Value) -> None:
            stay = self.f.append_basic_block("stay")
            self.b.cbranch(condition.x, end, stay)
            self.b.position_at_end(stay)

        yield leave_if
        self.b.branch(body)
        self.b.position_at_end(end)

    def when(self, condition: Value, *, likely: bool | None = None) -> contextlib.AbstractContextManager[Any]:
        return self.b.if_then(condition.x, likely)

    def either(self, condition: Value) -> contextlib.AbstractContextManager[tuple[Any, Any]]:
        return self.b.if_else(condition.x)

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """n vectors of n lanes, transposed in registers: each step exchanges one bit of row number and lane number."""
        n = len(rows)
        out, step = list(rows), 1
        if n == 4 and element_of(out[0].type) in (F32, I32):  # halves first, as numbers: else LLVM copies
            wide = [x.bits(vec(F64, 2)) for x in out]
            halves = [self.shuffle(wide[i % 2], wide[i % 2 + 2], [i // 2, i // 2 + 2]) for i in range(4)]
            out = [x.bits(out[0].type) for x in halves]
            for i in (0, 2):
                a, b = out[i : i + 2]
                out[i : i + 2] = [self.shuffle(a, b, index) for index in ([0, 4, 2, 6], [1, 5, 3, 7])]
            return out
        while step < n:
            low = [lane if not lane & step else n + (lane ^ step) for lane in range(n)]
            high = [lane ^ step if not lane & step else n + lane for lane in range(n)]
            for i in range(n):
                if not i & step:
                    a, b = out[i], out[i | step]
                    out[i], out[i | step] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            step *= 2
        return out
