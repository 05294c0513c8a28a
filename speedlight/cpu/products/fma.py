"""Multiply-adds of numbers: a unit is one of them, in f32 or f64, and a step is total + a·b, rounded once.

Narrower numbers, codes, and a cache's pairs of bf16 are widened as they are read. Subnormals count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..language.functions import like
from ..language.vector import I32, Function, Module, Value
from ..memory.formats import NUMBERS, Int4, NumberFormat
from ..memory.records import BLOCK
from ..memory.shape import Shape
from .outer import OuterProduct
from .packing import (
    HIDDEN,
    KeyRun,
    NumberWeights,
    each_unit,
    split_lanes,
    split_pairs,
    split_rows,
    stage_lanes,
    stage_latents,
    stage_rows,
    stage_values,
    widen_blocks,
)

# 2^f on [-1/2, 1/2] with value 1 at 0 (minimax, relative)
_EXP2_F32 = 0.6931469774100962, 0.24022241711702084, 0.05550733819271004, 0.009671537837623517, 0.0013264795066351006
_EXP2_F64 = (
    0.69314718055994532581, 0.24022650695910131286, 0.055504108664820083029, 0.0096181291075941078627,
    0.0013333558146774620302, 0.00015403530457129508295, 0.000015252733493173796849, 1.3215435272716792343e-6,
    1.0178199533695840947e-7, 7.073785041023905453e-9, 4.4347798013903755776e-10,
)  # fmt: skip


class Fma(NumberWeights, OuterProduct):
    """Product of every vector unit: fused multiply-adds."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s)
        self.format = s.format
        self.given = NUMBERS[s.storage]
        self.flops_of_step = 2 * s.lanes
        self.widens_bf16 = self.format.name == "bf16"
        self.splits_pairs = s.cached and (self.format.in_pairs or isinstance(self.format, Int4))
        self.units_per_load = 2 if self.splits_pairs else 1
        line = 64 * 8 // (BLOCK * self.format.bits)  # elements of a block's keys in a cache line
        self.loads = (line,) * self.format.is_coded + (2,) * self.splits_pairs  # elements of keys at once
        self.exp2_terms, self.exp2_error = (_EXP2_F64, 3.4e-18) if s.wide else (_EXP2_F32, 9.2e-8)

    def multiply_add(self, k: Function, a: Value, b: Value, total: Value) -> Value:
        return k.fma(a, b, total)

    @property
    def _numbers(self) -> NumberFormat:
        """Format of keys and values that are widened one by one."""
        assert not isinstance(self.format, Int4)
        return self.format

    # --- rows of q, keys and values

    def load_units(self, k: Function, row: Value, t: Value, *, stored: bool = False) -> Value:
        found = self._numbers if stored else self.given
        return found.widen(k, row, found.offset(t), self.s.lanes)

    def load_unit(
        self, k: Function, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
    ) -> Value:
        return (self._numbers if stored else self.given).widen(k, row, t * column)

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        if self.s.format.is_coded and self.s.cached:
            keys = stage_latents(module, self.s) if self.s.latent else widen_blocks(self, module)
            return keys, stage_values(self, module)
        rows = stage_rows(self, module)
        if self.splits_pairs:
            return split_lanes(module, self.s), split_rows(module, self.s)
        return stage_lanes(self, module) if self.s.cached and not self.s.latent else rows, rows

    def gather_values(self, k: Function, rows: list[Value], column: Value) -> Value:
        return self.load_units(k, rows[0], column, stored=True)

    def key_runs(self, k: Function, head_dim: Value) -> Iterator[KeyRun]:
        """Yields runs that read two vectors of bf16 at a time, then one vector at a time."""
        s, n = self.s, self.s.lanes
        whole, pairs = s.whole_units(head_dim), k.i64(0)
        if self.widens_bf16:
            pairs = whole // (2 * n) * (2 * n)

            def columns(both: list[Value], half: int) -> list[Value]:
                """Splits as many vectors as there is room for."""
                return [y for x in both[half * (n // 2) :][: n // 2] for y in split_pairs(x)]

            yield KeyRun(k.i64(0), pairs, 2 * n, 4 * n, lambda row, t: k.load(s.ivector, row, t * 2), columns)
        load = functools.partial(self.load_units, k, stored=True)
        yield KeyRun(pairs, whole, n, n * s.stored_bytes, load, lambda found, _: found)

    # --- a cache's blocks

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None:
        loads = self.loads if of_keys else (2,) * self.splits_pairs
        each_unit(k, count, body, unrolled=of_keys and not loads, loads=loads)

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        if not self.splits_pairs:
            units = [k.at(block, (t + u) * self.s.block_step) for u in range(count)]
            return [self.load_units(k, at, k.i64(lane), stored=True) for at in units]
        at = k.at(block, t * self.s.block_step)
        pairs = range(0, count + count % 2, 2)
        return [x for u in pairs for x in self._split(k, k.at(at, u * self.s.block_step), k.i64(lane))][:count]

    def _split(self, k: Function, row: Value, unit: Value) -> list[Value]:
        """Loads vectors of the first and of the second elements of units of two, from one on."""
        if isinstance(self.format, Int4):
            return list(self.format.widen_pairs(k, row, unit, self.s.lanes))
        return split_pairs(k.load(self.s.ivector, row, unit * 4))

    def key_unit(self, k: Function, block: Value, t: Value, key: Value) -> Value:
        return self._numbers.widen(k, k.at(block, t * self.s.block_step), self._numbers.offset(key))

    def value_offset(self, i: Value, row: Value) -> Value:
        if isinstance(self.format, Int4):
            return (i >> 1) * row
        return (i >> 1) * (row * 2) if self.splits_pairs else i * row

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        """Returns the row of a unit; of split pairs the row of both, and which of them it is."""
        return [row, i] if self.splits_pairs else [row]

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        if not self.splits_pairs:
            return [self.gather_values(k, rows, column)]
        if count > 1:
            return self._split(k, rows[0], column)
        if isinstance(self.format, Int4):
            low, high = self._split(k, rows[0], column)
            return [k.select(k.splat((rows[1] & 1).equals(0), self.s.lanes), low, high)]
        return [_element_of_pairs(k, k.load(self.s.ivector, rows[0], column * 4), rows[1], self.s)]

    def value_of(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        """Loads the values of codes of one column, as load_values() does of several."""
        if not isinstance(self.format, Int4):
            return [self.format.widen(k, rows[0], column)]
        both = list(self.format.widen_pairs(k, rows[0], column))
        return both if count > 1 else [k.select((rows[1] & 1).equals(0), *both)]

    # --- weights

    def pack_scaled(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def pack_scaled_row(self, k: Function, weights: list[Value]) -> Value:
        return weights[0]

    def round_elements(self, k: Function, x: Value) -> Value:
        return x

    # --- hidden keys

    def first_alone(self, unit: Value) -> Value:
        return unit

    def seen_lanes(self, k: Function, weight: Value) -> Value:
        bits = weight.bits(self.s.ivector)
        return bits.differs(HIDDEN) if self.s.has_signed_scales else bits > -1

    def seen_units(self, k: Function, marks: list[Value]) -> Value:
        return marks[0].bits(like(marks[0], self.s.integer)) > -1

    def multiply_add_seen(self, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
        if not self.s.isa.overwrites_addends:
            return k.select(seen, k.fma(value, weight, total), total)
        # without a copy of the total: 0 · -0 leaves any as it is
        zero, nothing = k.const(0.0, self.s.vector), k.const(-0.0, self.s.vector)
        return k.fma(k.select(seen, value, zero), k.select(seen, weight, nothing), total)

    def seen_bits(self, k: Function, weight: Value) -> tuple[Value, Value | None]:
        bits = weight.bits(self.s.integer)
        return (bits.differs(HIDDEN) if self.s.has_signed_scales else bits > -1), None

    def whole_keys(self, k: Function, full: Value, end: Value, count: Value) -> Value:
        return full


def _element_of_pairs(k: Function, pairs: Value, i: Value, s: Shape) -> Value:
    """Returns element i of vectors of bf16 pairs, in f32: the lower if i is even. split_pairs() has both, in half the
    time.
    """
    shift = k.splat(k.trunc(i & 1, I32) << 4, s.lanes)
    return ((pairs >> shift) << 16).bits(s.vector)
