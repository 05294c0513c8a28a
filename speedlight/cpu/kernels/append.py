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

from ...arrays.dtypes import ALL_CODES, STORAGE_BYTES
from ..language.conversions import load, narrowed, widened
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
    block = _way(s, name)(k, s, name)
    low, high, row = k.p["low"], k.p["high"], k.p["row"]
    with k.either((high - low).equals(BLOCK)) as (all_new, some_new):
        with all_new:
            block.streams = block.in_lines
            block.whole()
            block.streams = False
        with some_new, k.range(low, high) as lane:
            block.token(k.at(k.p["source"], (lane - low) * row), lane)
    return k.finish()


def _way(s: AppendShape, name: str) -> Any:
    """Returns the class that stores keys, or values."""
    if s.latent and name == "values":
        return _Rest
    if s.format.is_coded and s.format.bits == 4:
        return _Nibbles
    if s.format.is_coded and not s.moves_codes:
        return _Codes
    if name == "keys" and not s.latent:
        return _Keys
    return _Pairs if s.pairs else _Rows


class _Elements:
    """Elements of rows as they lie: `lanes` side by side, or one; in units of `unit` bytes."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        self.k, self.source = k, s.keys if name == "keys" else s.values
        self.has_codes = self.source.storage == s.stored and s.format.is_coded
        self.size = 1 if self.has_codes else STORAGE_BYTES[self.source.storage]
        self.dim, self.vector_bytes = k.p["dim"], s.isa.vector_bytes
        self.block = k.p["block"]
        if self.has_codes:  # behind the scales
            self.block = k.at(self.block, _Columns(k, s, self.dim).header)
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

    def numbers(self, row: Value, index: Value, count: int = 0) -> Value:
        """Loads numbers in float32: so many side by side, or one."""
        k, storage = self.k, self.source.storage
        if count and self.source.strided:
            return self.gather(F32, lambda lane: load(k, storage, self.at(row, index + lane)), count)
        return load(k, storage, self.at(row, index), 0, count)

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
        self.lanes = BLOCK if self.has_codes else self.vector_bytes // self.size

    def whole(self) -> None:
        with self.k.range(0, BLOCK) as lane:
            self.token(self.k.at(self.k.p["source"], lane * self.k.p["row"]), lane)

    def token(self, row: Value, lane: Value) -> None:
        to = lane * self.dim * self.size
        for index, count in self.vectors_then_tail(self.dim, self.lanes):
            self.store(self.elements(row, index, count), to + index * self.size)


class _Rest(_Rows):
    """Rows of a latent's columns without codes: of bfloat16."""

    def token(self, row: Value, lane: Value) -> None:
        k, to = self.k, lane * self.dim * 2
        for index, count in self.vectors_then_tail(self.dim, BLOCK):
            if self.source.storage == "bf16":
                x = self.elements(row, index, count)
            else:
                x = narrowed(k, "bf16", self.numbers(row, index, count))
            self.store(x, to + index * 2)


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


class _Columns:
    """The columns of a row that share a scale, block after block; where their scales and codes lie."""

    def __init__(self, k: Function, s: AppendShape, dim: Value) -> None:
        self.k, self.dim, self.each = k, dim, s.scale_block
        self.scale_bytes = ALL_CODES[s.stored].scale_bytes
        self.number = (dim + (self.each - 1)) // self.each if self.each else k.i64(1)
        self.header = self.number * (BLOCK * self.scale_bytes)

    def blocks(self) -> Iterator[tuple[Value, Value, Value]]:
        """Writes the loop over them: yields the first column, how many there are, and where their scales begin."""
        k = self.k
        if not self.each:
            yield k.i64(0), self.dim, k.i64(0)
            return
        with k.range(0, self.number) as block:
            first = block * self.each
            yield first, k.min(self.dim - first, k.i64(self.each)), block * (BLOCK * self.scale_bytes)


class _Coded(_Elements):
    """Base of what codes rows: some columns at a time, which share a scale."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        self.format: Any = s.format
        self.is_keys = name == "keys" and not s.latent
        self.columns, self.block = _Columns(k, s, self.dim), k.p["block"]
        self.codes_at = k.at(self.block, self.columns.header)
        self.first, self.count, self.scales = k.i64(0), self.dim, self.block  # of the columns at hand

    def each_columns(self) -> Iterator[None]:
        """Writes the loop over blocks of columns."""
        for first, count, scales in self.columns.blocks():
            self.first, self.count, self.scales = first, count, self.k.at(self.block, scales)
            yield

    def part(self, row: Value) -> Value:
        """Returns the address of a row's columns at hand."""
        return self.at(row, self.first)

    def part_of(self, token: Value | int) -> Value:
        """Returns that of a new token's, of whole blocks."""
        return self.part(self.k.at(self.k.p["source"], self.k.p["row"] * token))


class _Codes(_Coded):
    """Scales, then codes of keys element by element, [element][16 tokens], or of rows."""

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        self.usual = False
        self.magnitudes, self.reciprocals = k.buffer(I32, BLOCK), k.buffer(F32, BLOCK)  # of tokens; of usual scales

    def numbers(self, row: Value, index: Value, count: int = 0) -> Value:
        k = self.k
        if self.usual and count and not self.source.strided:  # memory is read while numbers are coded: the next block
            k.prefetch(k.at(self.at(row, index), k.p["ahead"]), 2)
        return super().numbers(row, index, count)

    def largest(self, row: Value) -> Value:
        """Returns the largest magnitude of a token's columns in float32, by its bits: NaNs are above infinity then."""
        k, size, t = self.k, self.size, _RAW[self.size]
        bits, lanes = 8 * size, BLOCK * 4 // size  # compared as they lie

        many, most = k.variable(k.const(0, vec(t, lanes))), k.variable(k.const(0, t))
        for index, count in self.vectors_then_tail(self.count, lanes):
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
        self.k.store(self.scale_of(self.largest(row)), self.scales, lane * 4)

    def of_token(self, numbers: Value, lane: Value | int, x: Value) -> Value:
        """Loads a token's of 16 numbers, as often as x has lanes."""
        found = self.k.load(F32, numbers, (self.k.i64(0) + lane) * 4)
        return self.k.splat(found, x.type.count) if isinstance(x.type, ir.VectorType) else found

    def ratio(self, x: Value, scale: Value, lane: Value | int) -> Value:
        """Returns x over a usual scale, rounded to nearest where it is not coded as 0."""
        return quotient(self.k, x, scale, self.of_token(self.reciprocals, lane, x))

    def codes(self, x: Value, lane: Value | int) -> Value:
        """Returns codes of a token's numbers by its scale; 0 where that is 0 or NaN."""
        k, scale = self.k, self.of_token(self.scales, lane, x)
        if self.usual:
            return self.format.narrow_usual(k, x, lambda y: self.ratio(y, scale, lane))
        return self.format.narrow(k, x, scale)

    def whole(self) -> None:
        for _ in self.each_columns():
            self._whole_columns()

    def _whole_columns(self) -> None:
        """Stores scales and codes of the columns at hand, of 16 tokens."""
        k = self.k
        with k.range(0, BLOCK) as lane:
            k.store(self.largest(self.part_of(lane)), self.magnitudes, lane * 4)
        scales = self.scale_of(k.load(vec(I32, BLOCK), self.magnitudes))
        k.store(scales, self.scales)
        with k.either(k.all(scales >= _LEAST_SCALE)) as (usual, others):
            with usual:
                k.store(k.const(1.0, scales.type) / scales, self.reciprocals)
                self.usual = True
                self._usual_columns()
                self.usual = False
            with others, k.range(0, BLOCK) as lane:
                self._coded(self.part_of(lane), lane)

    def _usual_columns(self) -> None:
        k = self.k
        if not self.is_keys:
            with k.range(0, BLOCK) as lane:
                self._values(self.part_of(lane), lane)
            return
        rows = [self.part_of(token) for token in range(BLOCK)]
        for index, count in self.vectors_then_tail(self.count, BLOCK):
            (self._transposed if count else self._one)(rows, index)

    def _transposed(self, rows: list[Value], index: Value) -> None:
        """Stores 16 elements of 16 tokens."""
        several = [self.codes(self.numbers(row, index, BLOCK), n) for n, row in enumerate(rows)]
        for part, x in enumerate(_transposed_bytes(self.k, several)):
            self.store(x, self.columns.header + (self.first + index) * BLOCK + part * 64)

    def _one(self, rows: list[Value], index: Value, lane: Value | int = 0) -> None:
        k = self.k
        for n, row in enumerate(rows):
            at = k.i64(n) + lane
            k.store(self.codes(self.numbers(row, index), at), self.codes_at, (self.first + index) * BLOCK + at)

    def _values(self, row: Value, lane: Value) -> None:
        to = lane * self.dim + self.columns.header + self.first
        for index, count in self.vectors_then_tail(self.count, BLOCK):
            self.store(self.codes(self.numbers(row, index, count), lane), to + index)

    def token(self, row: Value, lane: Value) -> None:
        for _ in self.each_columns():
            self.store_scale(self.part(row), lane)
            self._coded(self.part(row), lane)

    def _coded(self, row: Value, lane: Value) -> None:
        """Stores codes of a token by the scale that is there."""
        if not self.is_keys:
            self._values(row, lane)
            return
        k = self.k

        for index, count in self.vectors_then_tail(self.count, BLOCK):
            if not count:
                self._one([row], index, lane)
                continue
            x = self.codes(self.numbers(row, index, BLOCK), lane)
            for i in range(BLOCK):
                one = Value(k, k.b.extract_element(x.x, I32(i)))
                k.store(one, self.codes_at, (self.first + index + i) * BLOCK + lane)


class _Nibbles(_Coded):
    """Scales, then codes of four bits: of keys [pair of elements][16 tokens], of values [8 pairs of tokens][element].

    Columns that share a scale are coded in lanes. Where there are fewer of them zeros follow, which change nothing.
    """

    def __init__(self, k: Function, s: AppendShape, name: str) -> None:
        super().__init__(k, s, name)
        self.lanes = self.columns.each
        self.room = k.buffer(F32, self.lanes)  # of a short row's numbers, and of bytes
        self.rows = k.buffer(I8, BLOCK * self.lanes // 2)

    def coded(self, row: Value, lane: Value | int) -> Value:
        """Returns codes of a token's columns at hand, as bytes; stores their scale."""
        k, lanes = self.k, self.lanes
        kind = I8 if self.has_codes else F32
        x = k.variable(k.const(0, vec(kind, lanes)))
        read: Any = self.elements if self.has_codes else self.numbers
        with k.either(self.count.equals(lanes)) as (full, short):
            with full:
                x.set(read(row, k.i64(0), lanes))
            with short:
                k.store(x.get(), self.room)
                with k.range(0, self.count) as index:
                    k.store(read(row, index, 0), self.room, index * (1 if self.has_codes else 4))
                x.set(k.load(vec(kind, lanes), self.room))
        if self.has_codes:
            return x.get()
        bits, factor = self.format.scale_bits(k, x.get())
        k.store(bits, self.scales, (k.i64(0) + lane) * 2)
        return self.format.narrow(k, x.get(), factor)

    def pairs_of(self, codes: Value) -> Value:
        """Returns neighbouring codes of a key in bytes."""
        low, high = (self.k.shuffle(codes, codes, range(half, self.lanes, 2)) for half in (0, 1))
        return (low & 15) | (high << 4)

    def whole(self) -> None:
        for _ in self.each_columns():
            (self._whole_keys if self.is_keys else self._whole_values)()

    def _whole_keys(self) -> None:
        k, n = self.k, self.lanes // 2
        with k.range(0, BLOCK) as lane:
            k.store(self.pairs_of(self.coded(self.part_of(lane), lane)), self.rows, lane * n)
        rows = [k.load(vec(I8, n), self.rows, token * n) for token in range(BLOCK)]
        to = self.columns.header + self.first * (BLOCK // 2)
        parts = _transposed_bytes(k, rows)
        with k.either(self.count.equals(self.lanes)) as (full, short):
            with full:
                for part, x in enumerate(parts):
                    self.store(x, to + part * 64)
            with short:
                for part, x in enumerate(parts):
                    k.store(x, self.rows, part * 64)
                with k.range(0, (self.count + 1) >> 1) as pair:
                    k.store(k.load(vec(I8, BLOCK), self.rows, pair * BLOCK), self.block, to + pair * BLOCK)

    def _whole_values(self) -> None:
        k = self.k
        with k.range(0, BLOCK // 2) as pair:
            low, high = (self.coded(self.part_of(pair * 2 + half), pair * 2 + half) for half in (0, 1))
            both = (low & 15) | (high << 4)
            to = self.columns.header + pair * self.dim + self.first
            with k.either(self.count.equals(self.lanes)) as (full, short):
                with full:
                    self.store(both, to)
                with short:
                    k.store(both, self.room)
                    with k.range(0, self.count) as index:
                        k.store(k.load(I8, self.room, index), self.block, to + index)

    def token(self, row: Value, lane: Value) -> None:
        k = self.k
        for _ in self.each_columns():
            codes = self.coded(self.part(row), lane)
            if self.is_keys:
                k.store(self.pairs_of(codes), self.room)
                to = self.columns.header + self.first * (BLOCK // 2) + lane
                with k.range(0, (self.count + 1) >> 1) as pair:
                    k.store(k.load(I8, self.room, pair), self.block, to + pair * BLOCK)
                continue
            # the other half of each byte is another token's
            shift = k.trunc((lane & 1) << 2, I8)
            k.store((codes & 15) << k.splat(shift, self.lanes), self.room)
            others = k.const(0xF0 - 256, I8) >> shift
            to = self.columns.header + (lane >> 1) * self.dim + self.first
            with k.range(0, self.count) as index:
                there = k.load(I8, self.block, to + index) & others
                k.store(there | k.load(I8, self.room, index), self.block, to + index)


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


def _transposed_bytes(k: Function, rows: list[Value]) -> list[Value]:
    """Returns 16 rows of 16 bytes as columns, in four vectors: bytes of four rows become words, whose vectors are then
    interleaved, which is fewer steps than to transpose bytes.
    """
    words = [k.zext(x, vec(I32, BLOCK)) for x in rows]
    words = [a | b << 8 | c << 16 | d << 24 for a, b, c, d in (words[n : n + 4] for n in range(0, BLOCK, 4))]
    every = range(BLOCK * 2)
    pairs = [k.shuffle(a, b, [x // 2 + x % 2 * BLOCK for x in every]) for a, b in (words[:2], words[2:])]
    first, second = (x.bits(vec(I64, BLOCK)) for x in pairs)
    quarters = ([part * 4 + x // 2 + x % 2 * BLOCK for x in range(8)] for part in range(4))
    return [k.shuffle(first, second, quarter) for quarter in quarters]
