"""The kernel that stores new tokens, as they are or as codes with scales: in a cache's or a pool's blocks, or in the
rows of somebody else's pages. Codes of a file are moved as they are, too; the caller stores their scales.

A ticket is some heads of some blocks of a run of tokens. A whole block is written in vectors, of keys transposed in
registers; where only some of its tokens are new, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from ...arrays.dtypes import STORAGE_BYTES
from ..language.conversions import load, widened
from ..language.functions import like, quotient
from ..language.prototypes import prototype
from ..language.vector import F32, I8, I16, I32, I64, PTR, Function, Module, Value, vec
from ..memory.records import APPEND, BLOCK, RUN
from ..memory.shape import AppendShape
from ..memory.words import Words
from .task import entry, region

_RAW = {1: I8, 2: I16, 4: I32, 8: I64}  # by bytes
_LEAST_SCALE = 2.0**-80  # from here on every step of a quotient that is not coded as 0 is a normal number
_INFINITE = 0x7F800000  # as bits of a float32


def append_module(s: AppendShape, symbol: str) -> Module:
    module = Module(symbol)
    keys, values = (_block(module, s, name) for name in ("keys", "values"))
    task = _task(module, s, keys, values)
    entry(module, s.isa, region(module, task), symbol)
    k = module.function(f"{symbol}_ticket", {"a": PTR, "number": I64}, public=True)  # for tasks of other kernels
    k.call(task, k.p["a"], k.p["a"], k.p["number"])
    k.finish()
    return module


def _task(module: Module, s: AppendShape, keys: Any, values: Any) -> Any:
    """Writes what does one ticket."""
    k = module.function("task", {"a": PTR, "scratch": PTR, "number": I64})
    a = Words(k, APPEND, k.p["a"])
    each, which = a.run_tickets, k.p["number"]
    run = Words(k, RUN, k.at(k.p["a"], which // each * RUN.bytes + APPEND.bytes))  # runs follow the arguments
    groups, slot, end, numbers = a.head_groups, run.slot, run.slot + run.count, run.list
    first_head = which % each % groups * a.heads
    size = a.size if s.raw else k.i64(BLOCK)
    first = slot // size + which % each // groups * a.blocks
    last = k.min(first + a.blocks, (end + (size - 1)) // size)
    parts = [
        (name, f, dim, *(getattr(a, f"{name}_{x}") for x in ("row", "column", "head")), getattr(a, f"to_{name}_head"),
         getattr(a, f"to_{name}_block"), getattr(a, name) + getattr(run, f"{name}_at"),
         getattr(a, f"to_{name}") + getattr(run, f"to_{name}_at"),
         [getattr(a, f"to_{name}_{x}") for x in ("row", "column")] if s.raw else [])
        for f, dim, name in ((keys, a.head_dim, "k"), (values, a.value_dim, "v"))
    ]  # fmt: skip
    fixed, ring, of_page = a.fixed, a.ring, a.page_blocks
    with k.range(first, last) as block:
        low, high = k.max(slot - block * size, k.i64(0)), k.min(end - block * size, size)
        token, place = block * size + low - slot, k.variable(block)
        if s.raw:
            place.set(k.load(I64, k.pointer(numbers), block // of_page * 8))
        else:
            with k.when(block >= fixed):
                place.set(fixed + (block - fixed) % ring)
            with k.when(numbers.differs(0)):
                place.set(k.load(I64, k.pointer(numbers), block << 3))
        number, inside = place.get(), block % of_page * size if s.raw else k.i64(0)
        with k.range(first_head, k.min(first_head + a.heads, a.kv_heads)) as head:
            for name, f, dim, row, column, from_head, to_head, to_block, source, target, steps in parts:
                at = source + head * from_head + token * row
                to = target + head * to_head + number * to_block
                if s.raw:
                    to = to + inside * steps[0]
                ahead = k.select(a.heads > 1, from_head, row * BLOCK)  # to what is next
                scales = _scales_at(k, a, name, head, number, inside) if s.scaling else []
                k.call(f, k.pointer(at), k.pointer(to), low, high, row, column, dim, ahead, *steps, *scales)
    return k.finish()


def _scales_at(k: Function, a: Words, name: str, head: Value, number: Value, inside: Value) -> list[Value]:
    """Returns where the scales of a head's tokens in a block of a page begin, and their distances."""
    of_head, of_page, row, column = (getattr(a, f"{name}_scale_{x}") for x in ("head", "block", "row", "column"))
    at = getattr(a, f"{name}_scales") + head * of_head + number * of_page + inside * row
    return [k.pointer(at), row, column]


def _block(module: Module, s: AppendShape, name: str) -> Any:
    """Writes what stores new tokens as those from `low` to `high` of a block."""
    in_pages = " to_row to_column" * s.raw + " scales* scale_row scale_column" * (s.scaling is not None)
    k = module.function(name, prototype(f"source* block* low high row column dim ahead{in_pages}"))
    if s.scaling is not None:
        return _CodesInPages(k, s, name).tokens()
    if s.raw:
        return _InPages(k, s, name).tokens()
    if s.format.is_coded and not s.moves_codes:
        block: Any = _Codes(k, s, name)
    elif name == "keys":
        block = _Keys(k, s, name)
    elif s.pairs:
        block = _Pairs(k, s, name)
    else:
        block = _Rows(k, s, name)
    low, high, row = k.p["low"], k.p["high"], k.p["row"]
    with k.either((high - low).equals(BLOCK)) as (all_new, some_new):
        with all_new:
            block.streams = block.in_lines
            block.whole()
            block.streams = False
        with some_new, k.range(low, high) as lane:
            block.token(k.at(k.p["source"], (lane - low) * row), lane)
    return k.finish()


class _Elements:
    """Elements of rows as they lie: `lanes` side by side, or one; in units of `unit` bytes."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        self.k, self.source = k, s.keys if name == "keys" else s.values
        self.size = 1 if s.moves_codes else STORAGE_BYTES[self.source.storage]
        self.dim, self.vector_bytes = k.p["dim"], s.isa.vector_bytes
        self.block = k.at(k.p["block"], 4 * BLOCK) if s.moves_codes else k.p["block"]  # behind the scales
        # half a line of pairs at a time takes longer past the caches than through them
        self.streams, self.in_lines = False, s.streams and (self.vector_bytes == 64 or not s.pairs)

    def at(self, row: Value, index: Value | int) -> Value:
        """Returns the address of an element."""
        step = self.k.p["column"] if self.source.strided else self.k.i64(self.size)
        return self.k.at(row, step * index)

    def row(self, token: int) -> Value:
        """Returns the address of a new token, of whole blocks."""
        return self.k.at(self.k.p["source"], self.k.p["row"] * token)

    def gather(self, t: ir.Type, read: Any, count: int) -> Value:
        """Returns what read(index) gives, in lanes."""
        x: Any = ir.Constant(vec(t, count), ir.Undefined)
        for lane in range(count):
            x = self.k.b.insert_element(x, read(lane).x, I32(lane))
        return Value(self.k, x)

    def elements(self, row: Value, index: Value, count: int) -> Value:
        """Loads so many elements as integers; one alone where that is 0."""
        k, t = self.k, _RAW[self.size]
        if not self.source.strided or not count:
            return k.load(vec(t, count) if count else t, self.at(row, index))
        return self.gather(t, lambda lane: k.load(t, self.at(row, index + lane)), count)

    def store(self, x: Value, offset: Value | int) -> None:
        """Stores a vector, or one element, into the block; vectors of whole blocks past the caches, where the shape
        says so.
        """
        if self.streams and isinstance(x.type, ir.VectorType):
            self.k.stream(x, self.block, offset)
        else:
            self.k.store(x, self.block, offset)

    def vectors_then_tail(self, count: Value, lanes: int) -> Iterator[tuple[Value, int]]:
        """Writes loops over a row: yields each index of `lanes` elements, of which the last end where the row ends,
        and of one, with 0 for their number, where the row is shorter than that.
        """
        k = self.k
        wide = k.select(count >= lanes, count, k.i64(0))
        with k.range(0, wide, lanes) as index:
            yield k.min(index, count - lanes), lanes
        with k.range(wide, count) as index:
            yield index, 0


class _Rows(_Elements):
    """Rows of elements side by side."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        # rows of codes may be shorter than a vector, and their rest goes byte by byte
        self.lanes = BLOCK if s.moves_codes else self.vector_bytes // self.size

    def whole(self) -> None:
        with self.k.range(0, BLOCK) as lane:
            self.token(self.k.at(self.k.p["source"], lane * self.k.p["row"]), lane)

    def token(self, row: Value, lane: Value) -> None:
        to = lane * self.dim * self.size
        for index, count in self.vectors_then_tail(self.dim, self.lanes):
            self.store(self.elements(row, index, count), to + index * self.size)


class _InPages(_Elements):
    """Rows of elements in somebody's page: `to_row` bytes apart, of elements `to_column` bytes apart."""

    def tokens(self) -> Any:
        """Stores all new tokens, one after another."""
        k, p, lanes, self.streams = self.k, self.k.p, self.vector_bytes // self.size, self.in_lines
        with k.range(p["low"], p["high"]) as lane:
            row, to = k.at(p["source"], (lane - p["low"]) * p["row"]), lane * p["to_row"]

            with k.either(p["to_column"].equals(self.size)) as (side_by_side, apart):
                with side_by_side:
                    for index, count in self.vectors_then_tail(self.dim, lanes):
                        x = self.elements(row, index, count)
                        self.store(x, to + index * (self.size if count else p["to_column"]))
                with apart, k.range(0, self.dim) as index:
                    self.store(self.elements(row, index, 0), to + index * p["to_column"])
        return k.finish()


class _Pairs(_Elements):
    """Rows of values two by two: [8 pairs of tokens][element][2]."""

    def whole(self) -> None:
        for pair in range(BLOCK // 2):
            rows, to = (self.row(2 * pair), self.row(2 * pair + 1)), self.dim * (4 * pair)
            for index, count in self.vectors_then_tail(self.dim, 16):
                (self._both if count else self._each)(rows, to, index)

    def _both(self, rows: tuple[Value, Value], to: Value, index: Value) -> None:
        a, b = (self.elements(row, index, 16) for row in rows)
        self.store(self.k.shuffle(a, b, [lane // 2 + lane % 2 * 16 for lane in range(32)]), to + index * 4)

    def _each(self, rows: tuple[Value, ...], to: Value, index: Value) -> None:
        for n, row in enumerate(rows):
            self.k.store(self.k.load(I16, self.at(row, index)), self.block, to + index * 4 + 2 * n)

    def token(self, row: Value, lane: Value) -> None:
        k, n, pair, half = self.k, self.vector_bytes // 4, (lane >> 1) * self.dim * 4, lane & 1
        shift = k.splat(k.trunc(half << 4, I32), n)
        other = k.splat(k.select(half.equals(0), k.const(-65536, I32), k.const(65535, I32)), n)

        for index, count in self.vectors_then_tail(self.dim, n):
            if count:
                new = k.zext(self.elements(row, index, n), vec(I32, n)) << shift
                k.store((k.load(vec(I32, n), self.block, pair + index * 4) & other) | new, self.block, pair + index * 4)
            else:
                self._each((row,), pair + half * 2, index)


class _Keys(_Elements):
    """Keys unit by unit: [unit][16 tokens]. A unit is an element, or a pair of them; an odd last one has a zero."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        self.each = 2 if s.pairs else 1  # elements of a unit
        self.unit = self.size * self.each
        self.lanes = min(BLOCK, s.isa.vector_bytes // self.unit)
        self.units = self.dim // self.each

    def whole(self) -> None:
        rows = [self.row(token) for token in range(BLOCK)]
        for unit, count in self.vectors_then_tail(self.units, self.lanes):
            (self._transposed if count else self._one)(rows, unit)
        self._odd(rows, self.k.i64(0))

    def _transposed(self, rows: list[Value], unit: Value) -> None:
        k, n = self.k, self.lanes
        for first in range(0, BLOCK, n):
            several = [self.elements(row, unit * self.each, n * self.each) for row in rows[first : first + n]]
            for i, x in enumerate(k.transpose([x.bits(vec(_RAW[self.unit], n)) for x in several])):
                self.store(x, (unit + i) * (BLOCK * self.unit) + first * self.unit)

    def _one(self, rows: list[Value], unit: Value, lane: Value | int = 0) -> None:
        k = self.k
        for n, row in enumerate(rows):
            to = k.at(self.block, unit * (BLOCK * self.unit) + (k.i64(n) + lane) * self.unit)
            for i in range(self.each):
                k.store(k.load(_RAW[self.size], self.at(row, unit * self.each + i)), to, i * self.size)

    def _odd(self, rows: list[Value], lane: Value) -> None:
        k = self.k
        if self.each == 1:
            return
        with k.when((self.dim % 2).equals(1)):
            for n, row in enumerate(rows):
                last = k.zext(k.load(I16, self.at(row, self.dim - 1)), I32)
                k.store(last, self.block, self.units * (BLOCK * self.unit) + (lane + n) * self.unit)

    def token(self, row: Value, lane: Value) -> None:
        with self.k.range(0, self.units) as unit:
            self._one([row], unit, lane)
        self._odd([row], lane)


class _Codes(_Elements):
    """16 scales, then codes of keys element by element, [element][16 tokens], or of rows of values."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        self.format: Any = s.format
        self.is_keys, self.usual = name == "keys", False
        self.magnitudes, self.reciprocals = k.buffer(I32, BLOCK), k.buffer(F32, BLOCK)  # of tokens; of usual scales

    def numbers(self, row: Value, index: Value, count: int = 0) -> Value:
        """Loads numbers in float32: so many side by side, or one."""
        k, storage = self.k, self.source.storage
        if self.usual and count and not self.source.strided:  # memory is read while numbers are coded: the next block
            k.prefetch(k.at(self.at(row, index), k.p["ahead"]), 2)
        if count and self.source.strided:
            return self.gather(F32, lambda lane: load(k, storage, self.at(row, index + lane)), count)
        return load(k, storage, self.at(row, index), 0, count)

    def largest(self, row: Value) -> Value:
        """Returns a token's largest magnitude in float32, by its bits: NaNs are above infinity then."""
        k, size, t = self.k, self.size, _RAW[self.size]
        bits, lanes = 8 * size, BLOCK * 4 // size  # compared as they lie

        many, most = k.variable(k.const(0, vec(t, lanes))), k.variable(k.const(0, t))
        for index, count in self.vectors_then_tail(self.dim, lanes):
            total = many if count else most
            total.set(k.max(self.elements(row, index, count) & ((1 << (bits - 1)) - 1), total.get()))
        found = k.max(k.intrinsic(f"llvm.vector.reduce.smax.v{lanes}i{bits}", t, many.get()), most.get())
        return found if size == 4 else widened(k, self.source.storage, found).bits(I32)

    def scale_of(self, largest: Value) -> Value:
        """Returns a token's scale, or several in lanes: the largest magnitude over the last code, or NaN."""
        k, kind = self.k, like(largest, F32)
        return k.select(
            largest < _INFINITE, largest.bits(kind) / k.const(self.format.last, kind), k.const(math.nan, kind)
        )

    def store_scale(self, row: Value, lane: Value) -> None:
        """Stores a token's scale."""
        self.k.store(self.scale_of(self.largest(row)), self.block, lane * 4)

    def of_token(self, numbers: Value, lane: Value | int, x: Value) -> Value:
        """Loads a token's of 16 numbers, as often as x has lanes."""
        found = self.k.load(F32, numbers, (self.k.i64(0) + lane) * 4)
        return self.k.splat(found, x.type.count) if isinstance(x.type, ir.VectorType) else found

    def ratio(self, x: Value, scale: Value, lane: Value | int) -> Value:
        """Returns x over a usual scale, rounded to nearest where it is not coded as 0."""
        return quotient(self.k, x, scale, self.of_token(self.reciprocals, lane, x))

    def codes(self, x: Value, lane: Value | int) -> Value:
        """Returns codes of a token's numbers by its scale; 0 where that is 0 or NaN."""
        k, scale = self.k, self.of_token(self.block, lane, x)
        if self.usual:
            return self.format.narrow_usual(k, x, lambda y: self.ratio(y, scale, lane))
        return self.format.narrow(k, x, scale)

    def whole(self) -> None:
        k, p = self.k, self.k.p
        with k.range(0, BLOCK) as lane:
            k.store(self.largest(k.at(p["source"], lane * p["row"])), self.magnitudes, lane * 4)
        scales = self.scale_of(k.load(vec(I32, BLOCK), self.magnitudes))
        k.store(scales, self.block)
        with k.either(k.all(scales >= _LEAST_SCALE)) as (usual, others):
            with usual:
                k.store(k.const(1.0, scales.type) / scales, self.reciprocals)
                self.usual = True
                self._whole()
                self.usual = False
            with others, k.range(0, BLOCK) as lane:
                self._coded(k.at(p["source"], lane * p["row"]), lane)

    def _whole(self) -> None:
        k, p = self.k, self.k.p
        if not self.is_keys:
            with k.range(0, BLOCK) as lane:
                self._values(k.at(p["source"], lane * p["row"]), lane)
            return
        rows = [self.row(token) for token in range(BLOCK)]
        for index, count in self.vectors_then_tail(self.dim, BLOCK):
            (self._transposed if count else self._one)(rows, index)

    def _transposed(self, rows: list[Value], index: Value) -> None:
        """Stores 16 elements of 16 tokens: bytes of four tokens become words, whose vectors are then interleaved, which
        is fewer steps than to transpose bytes.
        """
        k, wide = self.k, vec(I32, BLOCK)
        codes = [k.zext(self.codes(self.numbers(row, index, BLOCK), n), wide) for n, row in enumerate(rows)]
        words = [a | b << 8 | c << 16 | d << 24 for a, b, c, d in (codes[n : n + 4] for n in range(0, BLOCK, 4))]
        every = range(BLOCK * 2)
        pairs = [k.shuffle(a, b, [x // 2 + x % 2 * BLOCK for x in every]) for a, b in (words[:2], words[2:])]
        first, second = (x.bits(vec(I64, BLOCK)) for x in pairs)
        for part in range(4):
            quarter = [part * 4 + x // 2 + x % 2 * BLOCK for x in range(8)]
            self.store(k.shuffle(first, second, quarter), index * BLOCK + (part + 1) * 64)

    def _one(self, rows: list[Value], index: Value, lane: Value | int = 0) -> None:
        k = self.k
        for n, row in enumerate(rows):
            at = k.i64(n) + lane
            k.store(self.codes(self.numbers(row, index), at), self.block, index * BLOCK + at + 4 * BLOCK)

    def _values(self, row: Value, lane: Value) -> None:
        to = lane * self.dim + 4 * BLOCK
        for index, count in self.vectors_then_tail(self.dim, BLOCK):
            self.store(self.codes(self.numbers(row, index, count), lane), to + index)

    def token(self, row: Value, lane: Value) -> None:
        self.store_scale(row, lane)
        self._coded(row, lane)

    def _coded(self, row: Value, lane: Value) -> None:
        """Stores codes of a token by the scale that is there."""
        if not self.is_keys:
            self._values(row, lane)
            return
        k = self.k

        for index, count in self.vectors_then_tail(self.dim, BLOCK):
            if not count:
                self._one([row], index, lane)
                continue
            x = self.codes(self.numbers(row, index, BLOCK), lane)
            for i in range(BLOCK):
                one = Value(k, k.b.extract_element(x.x, I32(i)))
                k.store(one, self.block, (index + i) * BLOCK + lane + 4 * BLOCK)


class _CodesInPages(_Codes):
    """Rows of codes in somebody's page, whose scales lie in an array: they are given, or found and stored there."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        assert s.scaling is not None
        self.scaling = s.scaling[0 if name == "keys" else 1]

    def tokens(self) -> Any:
        """Stores all new tokens, one after another."""
        k, p = self.k, self.k.p
        with k.range(p["low"], p["high"]) as lane:
            row, to = k.at(p["source"], (lane - p["low"]) * p["row"]), lane * p["to_row"]
            scales = k.at(p["scales"], lane * p["scale_row"])
            if self.scaling == "found":
                k.store(self.scale_of(self.largest(row)), scales)

            with k.either(p["to_column"].equals(1)) as (side_by_side, apart):
                with side_by_side:
                    for index, count in self.vectors_then_tail(self.dim, BLOCK):
                        self.store(self.codes_of(row, scales, index, count), to + index)
                with apart, k.range(0, self.dim) as index:
                    self.store(self.codes_of(row, scales, index, 0), to + index * p["to_column"])
        return k.finish()

    def codes_of(self, row: Value, scales: Value, index: Value, count: int) -> Value:
        """Returns codes of so many elements of a token side by side; of one, where that is 0."""
        k = self.k
        x = self.numbers(row, index, count)
        if self.scaling == "channels":
            each = k.p["scale_column"]
            if count:
                scale = self.gather(F32, lambda lane: k.load(F32, scales, (index + lane) * each), count)
            else:
                scale = k.load(F32, scales, index * each)
        else:
            scale = k.load(F32, scales)
            scale = k.splat(scale, count) if count else scale
        narrow = self.format.narrow if self.scaling == "found" else self.format.narrow_given
        return narrow(k, x, scale)
