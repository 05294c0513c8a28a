"""Pairs of bf16 made of codes of a cache as these are read, which is exact; scales multiply scores and weights.

Weights are numbers until the scales of their values have multiplied them; then they become pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from ..language.functions import like
from ..language.prototypes import prototype
from ..language.vector import F32, I8, I32, PTR, Function, Module, Value, vec
from ..memory.formats import load_codes
from ..memory.records import BLOCK
from .amx_tiles import AmxTiles
from .bf16_pairs import Bf16Pairs, PairUnits
from .packing import TILE_WORDS, each_unit, fetch_codes, fill_units, stage_lanes, widen_blocks

_LINE = 64  # codes


class CodedPairs(PairUnits):
    """Base of the products of pairs whose keys and values are codes, of 16 lanes."""

    units_per_load = 2  # a line of a block of keys: 4 elements of 16 keys

    # --- codes

    def pairs_of(self, k: Function, low: Value, high: Value) -> Value:
        """Returns pairs of codes: a vector of first elements, and one of second ones."""
        widen = self.s.format.number
        first, second = (widen(k, x).bits(like(x, I32)) for x in (low, high))
        return (first >> 16) | second

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        at = k.at(block, t * (2 * BLOCK))
        if count == 2 and self.s.isa.permutes_bytes:
            return self._line_of_keys(k, k.load(vec(I8, _LINE), at))
        rows = [load_codes(k, at, n * BLOCK + lane, self.s.lanes) for n in range(2 * count)]
        return [self.pairs_of(k, *rows[n : n + 2]) for n in range(0, 2 * count, 2)]

    def _line_of_keys(self, k: Function, codes: Value) -> list[Value]:
        """Returns two vectors of pairs of four elements of 16 keys, which lie element by element."""
        low, high = self._halves(k, codes)
        places = [[2 * n * BLOCK + lane + e * BLOCK for lane in range(BLOCK) for e in (0, 1)] for n in (0, 1)]
        return [self._joined(k, low, high, x) for x in places]

    def _halves(self, k: Function, codes: Value) -> tuple[Value, Value]:
        """Returns the lower and the upper bytes of codes in bf16: looked up by their magnitudes."""
        place, sign = self.s.format.magnitude(k, codes), codes & -128
        low, high = (self._looked_up(k, place, shift) for shift in (0, 8))
        return low, high | sign

    def _looked_up(self, k: Function, place: Value, shift: int) -> Value:
        every = [(x >> shift) & 255 for x in self.s.format.bf16]
        tables = [_bytes(k, every[n : n + _LINE]) for n in (0, _LINE)]
        return k.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", place.type, tables[0], place, tables[1])

    def _joined(self, k: Function, low: Value, high: Value, places: list[int]) -> Value:
        """Returns pairs of these 32 codes, in order."""
        index = _bytes(k, [x + n * _LINE for x in places for n in (0, 1)])
        x = k.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", low.type, low, index, high)
        return x.bits(self.s.ivector)

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None:
        if not of_keys:
            each_unit(k, count, body, unrolled=False)
            return
        whole = count & -2
        with k.range(0, whole, 2) as t:
            body(t, 2)
        with k.when(whole < count):
            body(whole, 1)

    def key_unit(self, k: Function, block: Value, t: Value, key: Value, head_dim: Value) -> Value:
        return self._one(k, k.at(block, t * (2 * BLOCK) + key), k.i64(BLOCK))

    def _one(self, k: Function, at: Value, step: Value) -> Value:
        """Loads a pair of two codes, `step` bytes apart."""
        return self.pairs_of(k, *(load_codes(k, at, x) for x in (k.i64(0), step)))

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        return [row, k.at(row, step // 2)]

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        return [self.pairs_of(k, *(load_codes(k, row, column, self.s.lanes) for row in rows))]

    @property
    def loads_columns(self) -> bool:
        return self.s.isa.permutes_bytes and not self.s.latent

    def load_columns(self, k: Function, rows: list[Value], columns: Sequence[Value]) -> list[list[Value]]:
        if not self.s.isa.permutes_bytes:
            return [self.load_values(k, rows, column) for column in columns]
        found, n = [], self.s.lanes
        for column in columns[::2]:
            low, high = self._halves(k, k.joined([load_codes(k, row, column, 2 * n) for row in rows]))
            for first in (0, n):
                places = [first + lane + 2 * n * key for lane in range(n) for key in (0, 1)]
                found.append([self._joined(k, low, high, places)])
        return found

    # --- weights

    @property
    def row_weight(self) -> ir.Type:
        return F32

    def pack_weights(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        return total + unit

    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        return k.select(keep[0], unit, unit * 0.0) if len(keep) == 1 else super().drop_weights(k, unit, keep)

    def drop_row(self, k: Function, weights: Value, keep: Value) -> Value:
        return k.select(keep, weights, weights * 0.0)

    def pack_scaled(self, k: Function, weights: list[Value]) -> Value:
        return self.side_by_side(k, self.pack_scaled_row(k, weights))

    def pack_scaled_row(self, k: Function, weights: list[Value]) -> Value:
        return super().pack_row(k, weights)

    # --- staging

    def stage_keys_of(self, module: Module) -> Any:
        if self.s.stages_blocks:
            return widen_blocks(self, module)
        return _stage_latents(self, module) if self.s.latent else stage_lanes(self, module)

    def rows_of_pair(self, k: Function, places: Value, row: Value, t: Value) -> list[Value]:
        """Returns where the values of both keys of pair t of a tile lie."""
        half = BLOCK // 2
        at = k.at(k.load(PTR, places, t // half * 8), t % half * (row * 2) + self.s.header)
        return [at, k.at(at, row)]

    def pair_of_values(self, k: Function, places: Value, row: Value, t: Value, column: Value, lanes: int) -> Value:
        """Loads the values of pair t of a tile's keys, at so many columns, or at one (0)."""
        return self.pairs_of(k, *(load_codes(k, x, column, lanes) for x in self.rows_of_pair(k, places, row, t)))


class Bf16Codes(CodedPairs, Bf16Pairs):
    """Codes by the dot instruction."""

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        return self.stage_keys_of(module), self._stage_values(module)

    def _stage_values(self, module: Module) -> Any:
        """tile[pairs of keys, width] from a cache's rows of codes."""
        s, k = self.s, module.function("stage_values", prototype(TILE_WORDS))
        p = k.p
        n = s.lanes
        twice, whole = (p["length"] // step * step for step in (2 * n, n))
        with k.range(0, p["count"]) as t:
            to = k.at(p["tile"], t * p["length"] * s.number_bytes)
            rows = self.rows_of_pair(k, p["places"], p["row"], t)
            if s.stages_blocks:
                fetch_codes(k, s, p["places"], [(t * 2, p["row"]), (t * 2 + 1, p["row"])], p["length"])
            with k.range(0, twice, 2 * n) as column:
                for i, (x,) in enumerate(self.load_columns(k, rows, [column, column + n])):
                    k.store(x, to, (column + i * n) * s.number_bytes)
            with k.range(twice, whole, n) as column:
                k.store(self.load_values(k, rows, column)[0], to, column * s.number_bytes)
            with k.range(whole, p["length"]) as column:
                k.store(self.pair_of_values(k, p["places"], p["row"], t, column, 0), to, column * s.number_bytes)
        return k.finish()


class AmxCodes(CodedPairs, AmxTiles):
    """Codes on tile registers."""

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        return self.stage_keys_of(module), self._stage_columns(module)

    def _pair(self, k: Function, t: Value, pairs: Value | None, column: Value, lanes: int) -> Value:
        p, words = k.p, vec(I32, lanes) if lanes else I32
        at = t if pairs is None else k.min(t, pairs - 1)
        x = self.pair_of_values(k, p["places"], p["row"], at, column, lanes)
        return x if pairs is None else k.select(t < pairs, x, k.const(0, words))


def _stage_latents(product: CodedPairs, module: Module) -> Any:
    """tile[count, units] from a cache's rows of codes, which are latents."""
    s, k = product.s, module.function("stage_latents", prototype(TILE_WORDS))
    p, n = k.p, s.lanes
    whole = p["length"] // (2 * n) * n
    filled = s.count_units(p["length"])
    evens, odds = ([2 * lane + half for lane in range(n)] for half in (0, 1))
    with k.range(0, p["count"]) as j:
        row = k.at(k.load(PTR, p["places"], j // BLOCK * 8), j % BLOCK * p["row"] + s.header)
        to = k.at(p["tile"], j * p["units"] * s.number_bytes)
        with k.range(0, whole, n) as t:
            x = load_codes(k, row, t * 2, 2 * n)
            k.store(product.pairs_of(k, *(k.shuffle(x, x, half) for half in (evens, odds))), to, t * s.number_bytes)
        with k.range(whole, filled) as t:
            second = t * 2 + 1
            high = load_codes(k, row, k.min(second, p["length"] - 1))
            high = k.select(second < p["length"], high, k.const(0, I8))
            k.store(product.pairs_of(k, load_codes(k, row, t * 2), high), to, t * s.number_bytes)
        fill_units(k, s, to, filled)
    return k.finish()


def _bytes(k: Function, numbers: Sequence[int]) -> Value:
    """Returns a vector of bytes, from 0 to 255 each."""
    signed = np.array(numbers, np.uint8).view(np.int8)
    return Value(k, ir.Constant(vec(I8, len(numbers)), [int(x) for x in signed]))
