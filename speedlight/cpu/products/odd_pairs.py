"""bf16 pairs with Arm's instructions (odd_dots.py): a unit is a pair, and a sum is one chain of them.

A tile of keys x queries, or of columns of values x queries, is summed in squares of 2 x 2 over two units at a time, a
*quad* of elements. Operands are quads of two rows side by side:

    keys     [TILE / 8][quads of head_dim][8 keys][4]            staged
    values   [width / 8][TILE / 4 quads of keys][8 columns][4]   staged
    queries, weights  [quads][2][panel / 4][2 queries][4]        as [units, panel], two rows interleaved in place

What lanes do not all see, and decoding, takes pairs one by one: the same chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..language import conversions
from ..language.prototypes import prototype
from ..language.vector import BF16, I16, I32, PTR, Function, Module, Value, Variable, vec
from ..memory.records import BLOCK, TILE
from ..memory.shape import Shape
from .bf16_pairs import ONES, PairUnits, add_seen_pairs
from .odd_dots import dot, outer_dot
from .outer import VALUE, Check, Fetch, OuterProduct, Sums, each_sum, end_sums, new_sums, start_sums
from .packing import TILE_WORDS

ROWS = 8  # keys, or columns of values, that are multiplied at once
_QUAD = 8  # bytes of four elements
_STEP = ROWS * _QUAD  # … of all rows
_COLUMNS = TILE // 4 * _STEP  # bytes of ROWS staged columns of values
_WORDS, _HALVES = vec(I32, 4), vec(I16, 8)
_HALF = (0, 1, 4, 5), (2, 3, 6, 7)  # of two vectors, side by side


class OddPairs(PairUnits, OuterProduct):
    """Product of bf16 on Arm."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s)
        self.flops_of_step = 8 * s.lanes

    def multiply_add(self, k: Function, a: Value, b: Value, total: Value) -> Value:
        return dot(k, self.s.isa.is_native, a, b, total)

    def multiply_add_seen(self, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
        return add_seen_pairs(self, k, value, weight, total, seen)

    def multiply_often(self, k: Function, a: Value, b: Value, sums: Sequence[Variable]) -> None:
        for total in sums:
            total.set(outer_dot(k, self.s.isa.is_native, a, b, total.get()))

    # --- weights, rounded to nearest even

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        low, high = (self.round_elements(k, x) for x in weights)
        return k.shuffle(low, high, range(2 * self.s.lanes))

    def round_elements(self, k: Function, x: Value) -> Value:
        if self.s.isa.is_native:
            return k.narrow(x, vec(BF16, 4)).bits(vec(I16, 4))
        return conversions.narrowed(k, "bf16", x)

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        return self.multiply_add(k, k.const(ONES, unit.type), unit, total)

    # --- operands

    def arrange_queries(self, k: Function, panel: Value, units: Value) -> None:
        with k.range(0, units, 2) as t:
            self._interleave(k, k.at(panel, t * self.s.row_bytes))

    def _interleave(self, k: Function, rows: Value) -> None:
        """Makes two rows of units the quads of their lanes, in place."""
        for v in range(self.s.vectors):
            at = [self.s.row_bytes * i + self.s.lane_offset(v) for i in (0, 1)]
            for x, to in zip(_zip(k, *[k.load(_WORDS, rows, i) for i in at]), at, strict=True):
                k.store(x, rows, to)

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        keys = self._stage_blocks(module) if self.s.cached else self._stage_rows(module)
        return keys, self._stage_pairs(module) if self.s.cached else self._stage_values(module)

    def _stage_rows(self, module: Module) -> Any:
        """Stages keys from rows of any stride; keys past the end repeat the last."""
        s, k = self.s, module.function("stage_rows", prototype(TILE_WORDS))
        p, filled = k.p, s.count_units(k.p["length"])
        before = p["first"] if s.in_parts else k.i64(0)
        end = k.select(p["column"].equals(s.storage_bytes), p["length"] // 8 * 4, k.i64(0))
        with k.range(0, p["count"], ROWS) as j:
            block = k.at(p["tile"], j * p["units"] * s.number_bytes + before * (_STEP // 2))
            rows = [k.load(PTR, p["places"], k.min(j + m, p["count"] - 1) * 8) for m in range(ROWS)]
            with k.range(0, end, 4) as t:
                for m in range(0, ROWS, 2):
                    both = [k.load(_WORDS, rows[m + i], t * 4) for i in (0, 1)]
                    for quad, half in enumerate(_HALF):
                        k.store(k.shuffle(both[0], both[1], half), block, t * (_STEP // 2) + quad * _STEP + m * _QUAD)
            with k.range(end, p["units"] - before) as t:
                to = k.at(block, self.step_offset(k, t, p["units"]))
                for m, row in enumerate(rows):
                    x = k.variable(k.const(0, I32))
                    with k.when(t < filled):
                        x.set(self.load_unit(k, row, t, p["column"], p["length"]))
                    k.store(x.get(), to, m * _QUAD)
        return k.finish()

    def _stage_blocks(self, module: Module) -> Any:
        """Stages keys from a cache's blocks, of 16 keys' pairs side by side."""
        s, k = self.s, module.function("stage_blocks", prototype(TILE_WORDS))
        p, filled, unit = k.p, s.count_units(k.p["length"]), BLOCK * s.stored_bytes
        with k.range(0, p["count"], BLOCK) as j:
            source = k.load(PTR, p["places"], j // BLOCK * 8)
            target = k.at(p["tile"], j * p["units"] * s.number_bytes)
            with k.range(0, p["units"], 2) as t:
                second = k.splat(t + 1 < filled, 4)
                for m in range(0, BLOCK, 4):
                    low, high = (k.load(_WORDS, source, x * unit + 4 * m) for x in (t, k.min(t + 1, filled - 1)))
                    high = k.select(second, high, k.const(0, _WORDS))
                    to = k.at(target, p["units"] * (4 * (m & -ROWS)) + t * (_STEP // 2))
                    for i, x in enumerate(_zip(k, low, high)):
                        k.store(x, to, (m % ROWS + 2 * i) * _QUAD)
        return k.finish()

    def _stage_values(self, module: Module) -> Any:
        """Stages values from rows of any stride; keys past the end have zeros."""
        s, k = self.s, module.function("stage_values", prototype(TILE_WORDS))
        p = k.p
        side_by_side = k.select(p["column"].equals(s.storage_bytes), p["length"] // 8 * 8, k.i64(0))

        def quad(j: Value, inside: bool) -> None:
            """Stages four keys, all of which there are if they are `inside`."""
            keys = [j + i if inside else k.min(j + i, p["count"] - 1) for i in range(4)]
            rows = [k.load(PTR, p["places"], x * 8) for x in keys]
            to = k.at(p["tile"], j * (_STEP // 4))

            def shown(i: int, x: Value) -> Value:
                zero = k.const(0, x.type)
                return x if inside or not i else k.select(k.splat(j + i < p["count"], 8), x, zero)

            with k.range(0, side_by_side, 8) as c:
                found = [shown(i, k.load(_HALVES, row, c * 2)) for i, row in enumerate(rows)]
                pairs = [_zip(k, *found[i : i + 2]) for i in (0, 2)]
                for n in (0, 1):
                    for i, x in enumerate(_zip(k, *[x[n].bits(_WORDS) for x in pairs])):
                        k.store(x, to, self.column_offset(k, c) + (4 * n + 2 * i) * _QUAD)
            with k.range(side_by_side, p["length"]) as c:
                for i, row in enumerate(rows):
                    x = k.load(I16, row, c * p["column"])
                    x = x if inside else k.select(j + i < p["count"], x, k.const(0, I16))
                    k.store(x, to, self.column_offset(k, c) + 2 * i)

        whole = p["count"] & -4
        with k.range(0, whole, 4) as j:
            quad(j, True)
        with k.when(whole < p["count"]):
            quad(whole, False)
        return k.finish()

    def _stage_pairs(self, module: Module) -> Any:
        """Stages values from a cache's rows of pairs of keys; what lies past the last pair is not multiplied."""
        s, k = self.s, module.function("stage_pairs", prototype(TILE_WORDS))
        p, size = k.p, s.piece // s.elements
        with k.range(0, p["count"], 2) as t:
            row = k.at(k.load(PTR, p["places"], t // size * 8), t % size * p["row"])
            rows, to = (row, k.at(row, p["row"])), k.at(p["tile"], t * (_STEP // 2))
            whole = p["length"] & -4
            with k.range(0, whole, 4) as c:
                for i, x in enumerate(_zip(k, *[k.load(_WORDS, x, c * 4) for x in rows])):
                    k.store(x, to, self.column_offset(k, c) + 2 * i * _QUAD)
            with k.range(whole, p["length"]) as c:
                for i, x in enumerate(rows):
                    k.store(k.load(I32, x, c * 4), to, self.column_offset(k, c) + 4 * i)
        return k.finish()

    # --- tiles

    def _multiply(self, k: Function, sums: Sums, steps: tuple[Value, Value], rows: Value, panel: Value) -> None:
        """Adds quads, from and to, of ROWS rows times a panel, to squares [row / 2][query / 2]."""
        s = self.s

        def step(t: Value) -> None:
            queries = [
                k.load(_WORDS, panel, (t * 2 + i) * s.row_bytes + s.lane_offset(v))
                for v in range(s.vectors)
                for i in (0, 1)
            ]
            for m, squares in enumerate(sums):
                row = k.load(_WORDS, rows, t * _STEP + 2 * m * _QUAD)
                for square, query in zip(squares, queries, strict=True):
                    square.set(outer_dot(k, s.isa.is_native, row, query, square.get()))

        k.unrolled(*steps, step)

    def score_groups(self, k: Function, fetch: Fetch, check: Check) -> None:
        """Stores and checks the scores of ROWS keys at once. Keys past the end are anything; checks see the last one
        again.
        """
        s, p = self.s, k.p
        with k.range(0, p["n_keys"], ROWS) as j:
            fetch(j)
            sums = _squares(k, new_sums(k, s, ROWS))
            self._multiply(k, sums, (k.i64(0), p["units"] // 2), k.at(p["keys"], j * p["key_row"]), p["q_panel"])
            scores, found = k.at(p["scores"], j * s.row_bytes), _rows(k, sums)
            for m, v, x in each_sum(found):
                k.store(x.get(), scores, m * s.row_bytes + s.lane_offset(v))
            with k.either(j + ROWS <= p["n_keys"]) as (whole, rest):
                with whole:
                    check(range(s.vectors), [[row[v].get() for row in found] for v in range(s.vectors)])
                with rest:
                    keys = [k.min(k.i64(m), p["n_keys"] - j - 1) * s.row_bytes for m in range(ROWS)]
                    at = range(s.vectors)
                    check(at, [[k.load(s.vector, scores, x + s.lane_offset(v)) for x in keys] for v in at])

    # --- values

    def values_from(self, k: Function, values: Value, first: Value, row: Value) -> Value:
        return k.at(values, first * (_STEP // 4))

    def column_offset(self, k: Function, column: Value) -> Value:
        return column // ROWS * _COLUMNS + column % ROWS * _QUAD

    def step_offset(self, k: Function, t: Value, row: Value) -> Value:
        return t // 2 * _STEP + t % 2 * (_QUAD // 2)

    def whole_steps(
        self, k: Function, clear: Value, full: Value, steps: Value, values: Value, width: Value
    ) -> tuple[Value, Value]:
        """Returns from and to which of a tile's steps every lane sees whole quads."""
        return clear, clear + ((full - clear) & -2)

    def value_tile(self, module: Module) -> Any:
        """Sums as OuterProduct.value_tile does; makes weights quads first, in place."""
        s, k = self.s, module.function("value_tile", prototype(VALUE))
        p = k.p
        with k.range(p["first"], p["end"], 2) as t:
            self._interleave(k, k.at(p["weights"], t * s.row_bytes))
        with k.range(0, p["width"], ROWS) as column:
            total = new_sums(k, s, ROWS)
            if s.hides:
                with k.when(p["first"] > 0):
                    start_sums(k, s, total, p["partial"], column, k.i64(s.row_bytes))
            sums, rows = _squares(k, total), k.at(p["values"], column // ROWS * _COLUMNS)
            self._multiply(k, sums, (p["first"] // 2, p["end"] // 2), rows, p["weights"])
            end_sums(k, s, column, _rows(k, sums))
        return k.finish()


def _zip(k: Function, a: Value, b: Value) -> list[Value]:
    """Returns the lanes of two vectors in turn, in two vectors."""
    kind: Any = a.type
    n = kind.count
    order = [lane + n * half for lane in range(n) for half in (0, 1)]
    return [k.shuffle(a, b, order[:n]), k.shuffle(a, b, order[n:])]


def _squares(k: Function, rows: Sums) -> Sums:
    """Returns sums of [row][vector of queries] as squares of 2 x 2, [row / 2][query / 2]."""
    return [
        [k.variable(k.shuffle(a.get(), b.get(), half)) for a, b in zip(*rows[m : m + 2], strict=True) for half in _HALF]
        for m in range(0, len(rows), 2)
    ]


def _rows(k: Function, squares: Sums) -> Sums:
    """Returns sums of squares as [row][vector of queries]."""
    return [
        [k.variable(k.shuffle(a.get(), b.get(), half)) for a, b in zip(row[::2], row[1::2], strict=True)]
        for row in squares
        for half in _HALF
    ]
