"""Units of two neighbouring bf16, and their product by AVX-512's dot instruction.

Queries and keys are paired along head_dim, weights and values along keys; a missing partner is 0. A step of the
instruction is total + a₁b₁ + a₀b₀; it reads subnormals as 0.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from ..language.functions import like
from ..language.vector import BF16, I16, I32, Function, Module, Value, vec
from ..memory.records import BLOCK
from ..memory.shape import Shape
from .outer import OuterProduct
from .packing import HIDDEN, CacheValues, KeyRun, each_unit, pair_rows, stage_lanes, stage_rows

# 2^f on [-1/2, 1/2] with value 1 at 0 (minimax, relative)
_EXP2 = 0.69328331395880648, 0.24221155408455297, 0.055005948223862378
ONES = 0x3F803F80  # a pair of bf16
_HALVES = 0xFFFF, -65536  # the bits of its elements


class PairUnits(CacheValues):
    """Base of the products whose units are pairs of bf16: how these are loaded, packed and hidden."""

    units_per_load = 1
    exp2_terms, exp2_error = _EXP2, 1.02e-4  # where P becomes bf16

    def __init__(self, s: Shape) -> None:
        self.s = s
        self.pairs = vec(BF16, 2 * s.lanes)
        self.halves = vec(I16, 2 * s.lanes)

    @abstractmethod
    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        """Packs two vectors of weights one after another as units side by side."""

    # --- rows of q, keys and values

    def load_units(self, k: Function, row: Value, t: Value, *, stored: bool = False) -> Value:
        return k.load(self.s.ivector, row, t * 4)

    def load_unit(
        self, k: Function, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
    ) -> Value:
        """Loads one unit from a row of any stride; the missing half of an odd last pair is 0."""
        second = t * 2 + 1
        low = k.zext(k.load(I16, row, t * 2 * column), I32)
        high = k.zext(k.load(I16, row, k.min(second, count - 1) * column), I32)
        return low | k.select(second < count, high << 16, k.const(0, I32))

    def gather_values(self, k: Function, rows: list[Value], column: Value) -> Value:
        low, high = (k.zext(k.load(vec(I16, self.s.lanes), row, column * 2), self.s.ivector) for row in rows)
        return low | (high << 16)

    def key_runs(self, k: Function, head_dim: Value) -> Iterator[KeyRun]:
        s, whole = self.s, self.s.whole_units(head_dim)
        load = functools.partial(self.load_units, k, stored=True)
        yield KeyRun(k.i64(0), whole, s.lanes, s.lanes * s.stored_bytes, load, lambda found, _: found)

    # --- a cache's blocks, which have pairs as they are multiplied

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None:
        each_unit(k, count, body, unrolled=of_keys)

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        return [self.load_units(k, k.at(block, t * self.s.block_step), k.i64(lane), stored=True)]

    def key_unit(self, k: Function, block: Value, t: Value, key: Value) -> Value:
        return self.load_unit(k, k.at(block, t * self.s.block_step), key, k.i64(2), k.i64(2 * BLOCK))

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        return [row]

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        return [self.load_units(k, rows[0], column) if self.s.cached else self.gather_values(k, rows, column)]

    # --- weights

    @property
    def row_weight(self) -> ir.Type:
        return I16

    def pack_weights(self, k: Function, weights: list[Value]) -> Value:
        return self.side_by_side(k, self.pack_row(k, weights))

    def side_by_side(self, k: Function, words: Value) -> Value:
        """Returns the units of two vectors of halves that lie one behind the other."""
        n = self.s.lanes
        return k.shuffle(words, words, [lane + n * half for lane in range(n) for half in (0, 1)]).bits(self.s.ivector)

    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        every = k.const(-1, self.s.ivector)
        low, high = (
            k.select(x, every, k.const(bits, self.s.ivector))
            for x, bits in zip(keep, (-0x8000, 0x8000FFFF - (1 << 32)), strict=True)
        )
        return unit & low & high

    def drop_row(self, k: Function, weights: Value, keep: Value) -> Value:
        return weights & k.select(keep, k.const(-1, weights.type), k.const(-0x8000, weights.type))

    # --- hidden keys

    def first_alone(self, unit: Value) -> Value:
        return unit & _HALVES[0]

    def seen_lanes(self, k: Function, weight: Value) -> Value:
        """Returns the bits of the halves that lanes see."""
        halves = weight.bits(self.halves)
        if self.s.has_signed_scales:
            return Value(k, k.b.sext(halves.differs(-0x8000).x, self.halves)).bits(self.s.ivector)
        return Value(k, k.b.not_(k.b.ashr(halves.x, k.const(15, halves.type).x))).bits(self.s.ivector)

    def seen_units(self, k: Function, marks: list[Value]) -> Value:
        seen = [mark.bits(like(mark, I32)) > -1 for mark in marks]
        halves = [
            k.select(x, k.const(m, like(x, I32)), k.const(0, like(x, I32))) for x, m in zip(seen, _HALVES, strict=True)
        ]
        return halves[0] | halves[1]

    def seen_bits(self, k: Function, weight: Value) -> tuple[Value, Value | None]:
        marks = weight << 16, weight & _HALVES[1]
        seen = [x.differs(HIDDEN) if self.s.has_signed_scales else x > -1 for x in marks]
        low, high = (k.select(x, k.const(m, I32), k.const(0, I32)) for x, m in zip(seen, _HALVES, strict=True))
        return (low | high).differs(0), low | high

    def whole_keys(self, k: Function, full: Value, end: Value, count: Value) -> Value:
        """Returns `full`, or one less where the last would be half of a pair: that needs the predicated path."""
        odd = (full & 1).differs(0)
        odd = odd if self.s.cached else odd & ((full < end) | (end < count))
        return k.select(odd, full - 1, full)


def add_seen_pairs(product: OuterProduct, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
    """Returns multiply_add() of pairs in lanes that see either element, else total; `seen`: bits that are visible."""
    some = ((seen << 16) | seen) < 0  # as a sign: LLVM then makes it the multiply-add's own mask
    return k.select(some, product.multiply_add(k, value & seen, weight & seen, total), total)


class Bf16Pairs(PairUnits, OuterProduct):
    """Product of bf16 where the dot instruction is faster than f32."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s)
        self.flops_of_step = 4 * s.lanes

    def multiply_add(self, k: Function, a: Value, b: Value, total: Value) -> Value:
        dot = "llvm.x86.avx512bf16.dpbf16ps.512"
        return k.intrinsic(dot, self.s.vector, total, a.bits(self.pairs), b.bits(self.pairs))

    def multiply_add_seen(self, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
        return add_seen_pairs(self, k, value, weight, total, seen)

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        rows = stage_rows(self, module)
        if self.s.cached:  # which has units of several keys in a row already
            return stage_lanes(self, module), rows
        return rows, pair_rows(module, self.s)

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        low, high = weights
        return k.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", self.pairs, high, low).bits(self.halves)

    def round_elements(self, k: Function, x: Value) -> Value:
        kind = vec(BF16, self.s.lanes)
        return k.intrinsic("llvm.x86.avx512bf16.cvtneps2bf16.512", kind, x).bits(vec(I16, self.s.lanes))

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        return self.multiply_add(k, k.const(ONES, self.s.ivector), unit, total)
