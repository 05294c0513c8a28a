"""Pairs of bf16 made of codes of a cache as these are read, which is exact; scales multiply scores and weights.

Weights are numbers until the scales of their values have multiplied them; then they become pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from ..language.functions import like
from ..language.vector import I8, I16, I32, PTR, Function, Module, Value, lanes_of, vec
from ..memory.formats import NIBBLES, ByteFormat, Int4, bf16_bits, load_codes
from ..memory.records import BLOCK
from .amx_tiles import AmxTiles
from .bf16_pairs import Bf16Pairs, PairUnits
from .packing import NumberWeights, each_unit, stage_lanes, stage_values, widen_blocks

_LINE = 64  # codes


class CodedPairs(NumberWeights, PairUnits):
    """Base of the products of pairs whose keys and values are codes, of 16 lanes."""

    # --- codes

    def pairs_of(self, k: Function, low: Value, high: Value) -> Value:
        """Returns pairs of codes: a vector of first elements, and one of second ones."""
        widen = self._bytes.number
        first, second = (widen(k, x).bits(like(x, I32)) for x in (low, high))
        return (first >> 16) | second

    @property
    def _bytes(self) -> ByteFormat:
        """Format of codes of a byte each."""
        assert isinstance(self.s.format, ByteFormat)
        return self.s.format

    @property
    def is_packed(self) -> bool:
        """Has pairs of codes in a byte."""
        return isinstance(self.s.format, Int4)

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        at = k.at(block, t * self.s.block_step)
        if isinstance(self.s.format, Int4):
            if count == 4 and self.s.isa.permutes_bytes:
                return self._line_of_nibbles(k, k.load(vec(I8, _LINE), at))
            return [self.s.format.bf16_pairs(k, at, u * BLOCK + lane, self.s.lanes) for u in range(count)]
        if count == 2 and self.s.isa.permutes_bytes:
            return self._line_of_keys(k, k.load(vec(I8, _LINE), at))
        rows = [load_codes(k, at, n * BLOCK + lane, self.s.lanes) for n in range(2 * count)]
        return [self.pairs_of(k, *rows[n : n + 2]) for n in range(0, 2 * count, 2)]

    def _line_of_keys(self, k: Function, codes: Value) -> list[Value]:
        """Returns two vectors of pairs of four elements of 16 keys, which lie element by element."""
        low, high = self._halves(k, codes)
        places = [[2 * n * BLOCK + lane + e * BLOCK for lane in range(BLOCK) for e in (0, 1)] for n in (0, 1)]
        return [self._joined(k, low, high, x) for x in places]

    def _line_of_nibbles(self, k: Function, codes: Value) -> list[Value]:
        """Returns four vectors of pairs, of 16 bytes side by side each.

        The bytes of a vector are spread over the quarters of a register first, since what is interleaved is so in
        each.
        """
        quarters = [16 * n + 4 * q + i for q in range(4) for n in range(4) for i in range(4)]
        spread = k.shuffle(codes, codes, quarters)
        halves = [bf16_bits(x) for x in NIBBLES]
        words = []
        for nibbles in (spread & 15, (spread.bits(vec(I16, _LINE // 2)) >> 4).bits(spread.type) & 15):
            low, high = (self._shuffled(k, [(x >> shift) & 255 for x in halves], nibbles) for shift in (0, 8))
            words.append([x.bits(vec(I16, _LINE // 2)) for x in _interleaved(k, low, high)])
        pairs = [x for first, second in zip(*words, strict=True) for x in _interleaved(k, first, second)]
        return [x.bits(self.s.ivector) for x in pairs]

    def _shuffled(self, k: Function, table: list[int], index: Value) -> Value:
        """Looks up bytes among 16, which are the same in each quarter of a register."""
        name = "llvm.x86.avx512.pshuf.b.512"
        return k.intrinsic(name, index.type, _bytes(k, table * 4), index)

    def _halves(self, k: Function, codes: Value) -> tuple[Value, Value]:
        """Returns the lower and the upper bytes of codes in bf16: looked up by their magnitudes."""
        place, sign = self._bytes.magnitude(k, codes), codes & -128
        low, high = (self._looked_up(k, place, shift) for shift in (0, 8))
        return low, high | sign

    def _looked_up(self, k: Function, place: Value, shift: int) -> Value:
        every = [(x >> shift) & 255 for x in self._bytes.bf16]
        tables = [_bytes(k, every[n : n + _LINE]) for n in (0, _LINE)]
        return k.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", place.type, tables[0], place, tables[1])

    def _joined(self, k: Function, low: Value, high: Value, places: list[int]) -> Value:
        """Returns pairs of these 32 codes, in order."""
        index = _bytes(k, [x + n * _LINE for x in places for n in (0, 1)])
        x = k.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", low.type, low, index, high)
        return x.bits(self.s.ivector)

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None:
        each_unit(k, count, body, loads=(_LINE // self.s.block_step,) if of_keys else ())

    def key_unit(self, k: Function, block: Value, t: Value, key: Value) -> Value:
        at = k.at(block, t * self.s.block_step + key)
        return self.pairs_of(k, *(load_codes(k, at, n * BLOCK) for n in (0, 1)))

    def value_offset(self, i: Value, row: Value) -> Value:
        return i * row if self.is_packed else i * (row * 2)

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        return [row] if self.is_packed else [row, k.at(row, step)]

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        return [self._values(k, rows, column, self.s.lanes)]

    def value_of(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        return [self._values(k, rows, column, 0)]

    def _values(self, k: Function, rows: list[Value], column: Value, lanes: int) -> Value:
        """Loads the values of a pair of keys, at so many columns, or at one (0)."""
        if isinstance(self.s.format, Int4):
            return self.s.format.bf16_pairs(k, rows[0], column, lanes)
        return self.pairs_of(k, *(load_codes(k, row, column, lanes) for row in rows))

    @property
    def columns_together(self) -> int:
        """Counts the vectors of columns of a line, whose codes are looked up together."""
        if not self.s.isa.permutes_bytes:
            return 1
        return 4 if self.is_packed else 2

    def load_columns(
        self, k: Function, rows: list[Value], columns: Sequence[Value], count: int = 1, *, adjoin: bool
    ) -> list[list[Value]]:
        together = self.columns_together
        if not adjoin or together == 1 or len(columns) % together:
            return super().load_columns(k, rows, columns, count, adjoin=adjoin)
        line = self._line_of_nibbles if self.is_packed else self._line_of_rows
        size = _LINE // len(rows)  # codes of a row
        lines = [k.joined([load_codes(k, row, x, size) for row in rows]) for x in columns[::together]]
        return [[x] for codes in lines for x in line(k, codes)]

    def _line_of_rows(self, k: Function, codes: Value) -> list[Value]:
        """Returns two vectors of pairs of 32 columns of two keys, which lie key by key."""
        low, high = self._halves(k, codes)
        n = self.s.lanes
        places = [[first + lane + 2 * n * key for lane in range(n) for key in (0, 1)] for first in (0, n)]
        return [self._joined(k, low, high, x) for x in places]

    # --- weights

    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        kind = NumberWeights if len(keep) == 1 else PairUnits  # before scales have multiplied them, or after
        return kind.drop_weights(self, k, unit, keep)

    def pack_scaled(self, k: Function, weights: list[Value]) -> Value:
        return self.side_by_side(k, self.pack_scaled_row(k, weights))

    def pack_scaled_row(self, k: Function, weights: list[Value]) -> Value:
        return super(NumberWeights, self).pack_row(k, weights)


class Bf16Codes(CodedPairs, Bf16Pairs):
    """Codes by the dot instruction."""

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        return widen_blocks(self, module), stage_values(self, module)


class AmxCodes(CodedPairs, AmxTiles):
    """Codes on tile registers."""

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        return stage_lanes(self, module), self._stage_columns(module)

    def _pair(self, k: Function, t: Value, pairs: Value | None, column: Value, lanes: int) -> Value:
        p, words, size = k.p, vec(I32, lanes) if lanes else I32, BLOCK // 2
        at = t if pairs is None else k.min(t, pairs - 1)
        block = k.at(k.load(PTR, p["places"], at // size * 8), self.s.header(p["length"]))
        row = k.at(block, self.value_offset(at % size, p["row"]))
        x = self._values(k, self.value_row(k, row, at, p["row"]), column, lanes)
        return x if pairs is None else k.select(t < pairs, x, k.const(0, words))


def _interleaved(k: Function, a: Value, b: Value) -> list[Value]:
    """Interleaves the lower, and the upper, halves of each quarter of two registers."""
    size = lanes_of(a)
    quarter, half = size // 4, size // 8
    order = [
        [q * quarter + part * half + i + size * n for q in range(4) for i in range(half) for n in (0, 1)]
        for part in (0, 1)
    ]
    return [k.shuffle(a, b, x) for x in order]


def _bytes(k: Function, numbers: Sequence[int]) -> Value:
    """Returns a vector of bytes, from 0 to 255 each."""
    signed = np.array(numbers, np.uint8).view(np.int8)
    return Value(k, ir.Constant(vec(I8, len(numbers)), [int(x) for x in signed]))
