"""Multiply-adds of numbers: a unit is one of them, in f32 or f64, and a step is total + a·b, rounded once.

Narrower numbers, codes, and a cache's pairs of bf16 are widened as they are read. Subnormals count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from ..language.functions import like
from ..language.vector import I32, Function, Module, Value
from ..memory.formats import FORMATS
from ..memory.records import BLOCK
from ..memory.shape import Shape
from . import outer, outer_gradients
from .packing import KeyRun, each_unit, split_lanes, split_pairs, split_rows, stage_lanes, stage_rows

# 2^f on [-1/2, 1/2] with value 1 at 0 (minimax, relative)
_EXP2_F32 = 0.6931469774100962, 0.24022241711702084, 0.05550733819271004, 0.009671537837623517, 0.0013264795066351006
_EXP2_F64 = (
    0.69314718055994532581, 0.24022650695910131286, 0.055504108664820083029, 0.0096181291075941078627,
    0.0013333558146774620302, 0.00015403530457129508295, 0.000015252733493173796849, 1.3215435272716792343e-6,
    1.0178199533695840947e-7, 7.073785041023905453e-9, 4.4347798013903755776e-10,
)  # fmt: skip


class Fma:
    """The product of every vector unit."""

    score_groups, value_tile, predicated_tile = outer.score_groups, outer.value_tile, outer.predicated_tile
    new_sum, values_from, whole_steps = outer.new_sum, outer.values_from, outer.whole_steps
    joint_steps, settle = outer.joint_steps, outer.settle
    flushed, registers, keep_awake = outer.flushed, outer.registers, outer.keep_awake
    multiply_often, arrange_queries = outer.multiply_often, outer.arrange_queries
    column_offset, step_offset = outer.column_offset, outer.step_offset
    sleeps = False  # keep_awake() is needed
    product_tile, into_queries = outer_gradients.product_tile, outer_gradients.into_queries
    into_keys = outer_gradients.into_keys

    def __init__(self, s: Shape) -> None:
        self.s, self.format, self.given = s, s.format, FORMATS[s.storage]
        self.flops_of_step = 2 * s.lanes
        self.widens_bf16 = self.format.name == "bf16"
        self.splits_bf16_pairs = s.cached and self.format.in_pairs
        self.units_per_load = 2 if self.splits_bf16_pairs else 1  # that lie together in a cache
        # 2^f on [-1/2, 1/2], and its relative error
        self.exp2_terms, self.exp2_error = (_EXP2_F64, 3.4e-18) if s.wide else (_EXP2_F32, 9.2e-8)

    def multiply_add(self, k: Function, a: Value, b: Value, total: Value) -> Value:
        """Returns total + a·b."""
        return k.fma(a, b, total)

    # --- rows of q, keys and values

    def load_units(self, k: Function, row: Value, t: Value, *, stored: bool = False) -> Value:
        """Loads `lanes` units from a row with unit stride: of keys or values that are `stored`, or of q."""
        found = self.format if stored else self.given
        return found.widen(k, row, found.offset(t), self.s.lanes)

    def load_unit(
        self, k: Function, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
    ) -> Value:
        """Loads one unit from a row of any stride."""
        return (self.format if stored else self.given).widen(k, row, t * column)

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        """Returns the micro-kernels that copy tiles of keys, and of values, to scratch."""
        rows = stage_rows(self, module)
        if self.splits_bf16_pairs:
            return split_lanes(module, self.s), split_rows(module, self.s)
        return stage_lanes(self, module) if self.s.cached else rows, rows

    def gather_values(self, k: Function, rows: list[Value], column: Value) -> Value:
        """Loads one vector of columns of a unit's values, of keys whose rows these are."""
        return self.load_units(k, rows[0], column, stored=True)

    def key_runs(self, k: Function, head_dim: Value) -> Iterator[KeyRun]:
        """Yields how whole vectors of units of keys' rows are read and transposed: of bf16, two at a time first."""
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

    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, unrolled: bool) -> None:
        """Calls body(t) of `count` units; of units in split pairs body(t, 2), and body(t, 1) of an odd last."""
        if self.splits_bf16_pairs:
            pairs = count & -2
            with k.range(0, pairs, 2) as t:
                body(t, 2)
            with k.when(pairs < count):
                body(pairs, 1)
        else:
            each_unit(k, count, body, unrolled=unrolled)

    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        """Loads `count` units, which lie together, of `lanes` keys of a block."""
        s = self.s
        if self.splits_bf16_pairs:
            return split_pairs(k.load(s.ivector, block, t * (2 * BLOCK) + 4 * lane))[:count]
        return [self.load_units(k, k.at(block, t * (BLOCK * s.stored_bytes)), k.i64(lane), stored=True)]

    def value_row(self, k: Function, row: Value, i: Value, step: Value) -> list[Value]:
        """Returns where unit i of a block's values lies, `step` bytes after the one before, as load_values takes it: of
        split pairs the row of both, and which of them it is.
        """
        return [k.at(row, -((i & 1) * step)), i] if self.splits_bf16_pairs else [row]

    def load_values(self, k: Function, rows: list[Value], column: Value, count: int = 1) -> list[Value]:
        """Loads one vector of columns of `count` units of values: of a block's row, or of keys' `rows`."""
        if not self.splits_bf16_pairs:
            return [self.gather_values(k, rows, column)]
        pairs = k.load(self.s.ivector, rows[0], column * 4)
        return split_pairs(pairs) if count > 1 else [_element_of_pairs(k, pairs, rows[1], self.s)]

    # --- weights

    def pack_weights(self, k: Function, weights: list[Value]) -> Value:
        """Packs the weights of a unit's keys, lane by lane."""
        return weights[0]

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        """Packs vectors of weights one after another as units side by side."""
        return weights[0]

    def round_elements(self, k: Function, x: Value) -> Value:
        """Rounds a vector of numbers to elements of units that lie side by side."""
        return x

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        """Returns total + the weights of a unit; `unit` is a vector of them."""
        return total + unit

    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        """Returns a vector of units of weights without those of the elements that are not kept, lane by lane.

        They become +0, or NaN by a scale that is; -0 stays.
        """
        return k.select(keep[0], unit, unit * 0.0)

    @property
    def row_weight(self) -> ir.Type:
        """Type of a key's weight in a row of units side by side."""
        return self.s.number

    def drop_row(self, k: Function, weights: Value, keep: Value) -> Value:
        """Returns a vector of keys' weights in a row without those that are not kept."""
        return k.select(keep, weights, weights * 0.0)

    # --- hidden keys

    def first_alone(self, unit: Value) -> Value:
        """Returns one unit with zeros for all of its elements but the first."""
        return unit

    def seen_lanes(self, k: Function, weight: Value) -> Value:
        """Returns which lanes of a vector of units of weights see them."""
        return weight.bits(self.s.ivector) > -1

    def seen_units(self, k: Function, marks: list[Value]) -> Value:
        """Returns what seen_lanes() gives, of a unit whose elements are marked one by one, in vectors or alone."""
        return marks[0].bits(like(marks[0], self.s.integer)) > -1

    def multiply_add_seen(self, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
        """Returns multiply_add() in lanes that see the unit, by seen_lanes(), else total: no value that is hidden is
        touched.
        """
        if not self.s.isa.overwrites_addends:
            return k.select(seen, k.fma(value, weight, total), total)
        # without a copy of the total: 0 · -0 leaves any as it is
        zero, nothing = k.const(0.0, self.s.vector), k.const(-0.0, self.s.vector)
        return k.fma(k.select(seen, value, zero), k.select(seen, weight, nothing), total)

    def seen_bits(self, k: Function, weight: Value) -> tuple[Value, Value | None]:
        """Returns whether anything of one unit is visible, and the bits that are, if that may be a part."""
        return weight.bits(self.s.integer) > -1, None

    def whole_keys(self, k: Function, full: Value, end: Value, count: Value) -> Value:
        """Returns how many of `full` visible keys make units of their own.

        `end`: of the keys that may be seen; `count`: of those in the tile. Past those is padding, of arrays.
        """
        return full


def _element_of_pairs(k: Function, pairs: Value, i: Value, s: Shape) -> Value:
    """Returns element i, in f32, of vectors of bf16 pairs that have it: the lower if i is even. split_pairs() has both,
    in half the time.
    """
    shift = k.splat(k.trunc(i & 1, I32) << 4, s.lanes)
    return ((pairs >> shift) << 16).bits(s.vector)
