"""Tiles of bf16 pairs: sixteen units are summed by themselves, s ← s + (e + o), as tile_registers.py says.

A lane is a query. Rows of keys are tiles as they are staged; a panel's queries, and weights, are pairs as Bf16Pairs has
them; values are staged as columns, and as many zeros as make their number, and that of keys, whole blocks:

    S[key, query] = K Qᵀ      C [16 keys, 16 queries] += A [16 keys, 16 pairs of head_dim] · B [16 pairs, 16 queries]
    A[column, query] = Vᵀ P   C [16 columns, 16 queries] += A [16 columns, 16 pairs of keys] · B [16 pairs, 16 queries]

A hidden key weighs ±0, and 0 · v is 0 where v is finite. Of a tile with other values chains skip it lane by lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..language import conversions
from ..language.prototypes import prototype
from ..language.vector import F32, I16, I32, I64, PTR, Function, Module, Value, Variable, vec
from ..memory.records import TILE
from .bf16_pairs import Bf16Pairs, PairUnits
from .outer import VALUE, Check, Fetch, scaled_scores
from .packing import TILE_WORDS, split_pairs, stage_lanes, stage_rows
from .tile_registers import ROWS, Amx, Registers, Software, flushed, multiply

_COLUMN = 2 * TILE  # bytes of a staged column of values
_CHUNK = 2 * ROWS  # elements that are summed together
_INFINITE = 0x7F80  # the exponent's bits of infinity and NaN


class _Sum:
    """A sum of sums of sixteen units: add() their products, then join() them."""

    def __init__(self, k: Function, start: Value) -> None:
        self.k, self.zero = k, k.const(-0.0, start.type)  # the sign of what is nothing stays
        self.total, self.parts = k.variable(start), [k.variable(self.zero) for _ in (0, 1)]

    def add(self, a: Value, b: Value) -> None:
        for part, x, y in zip(self.parts, split_pairs(a), split_pairs(b), strict=True):
            part.set(self.k.fma(x, y, part.get()))

    def join(self) -> None:
        even, odd = self.parts
        self.total.set(self.total.get() + (even.get() + odd.get()))
        for part in self.parts:
            part.set(self.zero)

    def get(self) -> Value:
        return self.total.get()


class AmxTiles(PairUnits):
    """Product of bf16 on tile registers. OuterProduct says what each method is for."""

    sleeps = True
    flops_of_step = 2 * ROWS * ROWS * _CHUNK

    def new_sum(self, k: Function, start: Value) -> _Sum:
        return _Sum(k, start)

    def joint_steps(self, k: Function, joint: Value, steps: Value) -> Value:
        return k.select(joint.equals(steps), joint, joint & -ROWS)

    def settle(self, k: Function, total: Value, begin: Value) -> Value:
        """A zero that products left has the sign that it has on tiles, whose hidden keys add zeros of any sign."""
        return total + begin

    def flushed(self, module: Module, f: Any) -> Any:
        return flushed(module, f)

    def _registers(self, module: Module) -> Registers:
        return Amx() if self.s.isa.has_tiles else module.once("tiles", Software)

    def registers(self, k: Function) -> Any:
        return self._registers(k.module).configured(k)

    # --- weights, rounded to nearest even

    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        if self.s.isa.has_tiles:
            return Bf16Pairs(self.s).pack_row(k, weights)
        low, high = (conversions.narrowed(k, "bf16", x) for x in weights)
        return k.shuffle(low, high, range(2 * self.s.lanes))

    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        """Adds both weights, the second first, as the dot instruction does."""
        first, second = split_pairs(unit)
        return total + second + first

    # --- tiles

    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        keys = stage_lanes(self, module) if self.s.cached else stage_rows(self, module)
        return keys, self._stage_columns(module)

    def _stage_columns(self, module: Module) -> Any:
        """tile[width, TILE] of bf16 from rows of values, and from a cache's of pairs: whole chunks of keys, zeros past
        the last; then a word that says whether all are finite.
        """
        s = self.s
        k = module.function("stage_columns", prototype(TILE_WORDS))
        p, n, width = k.p, s.lanes, (k.p["length"] + (_CHUNK - 1)) & -_CHUNK
        pairs = p["count"] if s.cached else s.count_units(p["count"])
        most = k.variable(k.const(0, self.halves))
        side_by_side = k.const(1, p["count"].equals(0).type) if s.cached else p["column"].equals(s.storage_bytes)
        whole = k.select(side_by_side & (p["length"] >= n), p["length"], k.i64(0))

        def chunk(first: Value, inside: bool) -> None:
            """Stages a chunk of keys, all of which there are if it is `inside`."""
            with k.range(0, whole, n) as c:
                column = k.min(c, whole - n)
                rows = [self._pair(k, first + t, None if inside else pairs, column, n) for t in range(ROWS)]
                for x in rows:
                    most.set(k.max(x.bits(self.halves) & _INFINITE, most.get()))
                for i, x in enumerate(k.transpose(rows)):
                    k.store(x, p["tile"], (column + i) * _COLUMN + first * 4)
            with k.range(whole, p["length"]) as c, k.range(first, first + ROWS) as t:
                x = self._pair(k, t, pairs, c, 0)
                most.set(k.max(k.splat(x, n).bits(self.halves) & _INFINITE, most.get()))
                k.store(x, p["tile"], c * _COLUMN + t * 4)
            with k.range(p["length"], width) as c:
                k.store(k.const(0, s.ivector), p["tile"], c * _COLUMN + first * 4)

        inside = (p["count"] if s.cached else p["count"] // 2) // ROWS * ROWS
        with k.range(0, inside, ROWS) as first:
            chunk(first, True)
        with k.range(inside, pairs, ROWS) as first:
            chunk(first, False)
        k.store(k.zext(k.all(most.get() < _INFINITE), I64), p["tile"], width * _COLUMN)
        return k.finish()

    def _pair(self, k: Function, t: Value, pairs: Value | None, column: Value, lanes: int) -> Value:
        """Loads the values of pair t of keys, at so many columns, or at one (0); zeros past the last of `pairs`."""
        s, p = self.s, k.p
        words = vec(I32, lanes) if lanes else I32
        if s.cached:
            size = s.piece // s.elements
            at = t if pairs is None else k.min(t, pairs - 1)
            x = k.load(words, k.load(PTR, p["places"], at // size * 8), at % size * p["row"] + column * 4)
            return x if pairs is None else k.select(t < pairs, x, k.const(0, words))
        both, kind, step = [], vec(I16, lanes) if lanes else I16, k.i64(2) if lanes else p["column"]
        for key in (t * 2, t * 2 + 1):
            row = k.load(PTR, p["places"], (key if pairs is None else k.min(key, p["count"] - 1)) * 8)
            x = k.zext(k.load(kind, row, column * step), words)
            both.append(x if pairs is None else k.select(key < p["count"], x, k.const(0, words)))
        return both[0] | (both[1] << 16)

    def arrange_queries(self, k: Function, panel: Value, units: Value) -> None:
        """Leaves packed queries as they are: registers read them so."""

    def _row_blocks(self) -> list[list[int]]:
        """Returns the first rows of the blocks that are multiplied at once, of 32: all, or of wide panels half."""
        return [[0, ROWS]] if self.s.vectors < 3 else [[0], [ROWS]]

    def multiply_often(self, k: Function, a: Value, b: Value, sums: Sequence[Variable]) -> None:
        for i in range(len(sums)):
            self._registers(k.module).dot(k, i % 4, 4 + i % 2, 6 + i // 2 % 2)

    def keep_awake(self, k: Function) -> None:
        """Tiles are off after some 1,800 cycles without one, and take 800 to come back."""
        if self.s.isa.has_tiles:
            self._registers(k.module).dot(k, 0, 4, 6)

    def score_groups(self, k: Function, fetch: Fetch, check: Check) -> None:
        """Stores the scores of 32 keys at once, and checks those of the group before: what stores tiles does not
        forward to loads. Keys past the end are anything; checks see the last one again.
        """
        s, n_keys = self.s, k.p["n_keys"]
        whole = n_keys // s.rows * s.rows
        with k.range(0, n_keys, s.rows) as j:
            fetch(j)
            self._score_group(k, j)
            with k.when(j > 0):
                check(range(s.vectors), self._loaded_scores(k, j - s.rows, None))
        with k.when(whole.equals(n_keys)):
            check(range(s.vectors), self._loaded_scores(k, whole - s.rows, None))
        with k.when(whole < n_keys):
            check(range(s.vectors), self._loaded_scores(k, whole, n_keys))

    def _score_group(self, k: Function, j: Value) -> None:
        s, p, u = self.s, k.p, self._registers(k.module)
        for rows in self._row_blocks():
            keys = [k.at(p["keys"], (j + m) * p["key_row"]) for m in rows]
            self._multiply(k, u, p["units"] // ROWS, keys, p["key_row"], p["q_panel"])
            self._store_sums(k, u, [k.at(p["scores"], (j + m) * s.row_bytes) for m in rows])

    def _loaded_scores(self, k: Function, j: Value, end: Value | None) -> list[list[Value]]:
        """Loads the scores of 32 keys, from key j on, [vector][key]; from `end` on the last one's again."""
        s, scores = self.s, k.at(k.p["scores"], j * self.s.row_bytes)
        keys = [k.i64(m) if end is None else k.min(k.i64(m), end - j - 1) for m in range(s.rows)]
        found = [[k.load(s.vector, scores, m * s.row_bytes + s.lane_offset(v)) for m in keys] for v in range(s.vectors)]
        if not s.format.is_coded:
            return found
        found = [scaled_scores(k, s, j, x) for x in found]
        for v, column in enumerate(found):
            for m, x in zip(keys, column, strict=True):
                k.store(x, scores, m * s.row_bytes + s.lane_offset(v))
        return found

    def _multiply(self, k: Function, u: Registers, chunks: Value, rows: list[Value], row: Value, panel: Value) -> None:
        """Multiplies blocks of rows, so many bytes apart, by all queries of a panel of units."""
        columns = [k.at(panel, self.s.lane_offset(v)) for v in range(self.s.vectors)]
        multiply(k, u, chunks, rows, row, columns, k.i64(self.s.row_bytes))

    def _store_sums(self, k: Function, u: Registers, rows: list[Value]) -> None:
        for i, at in enumerate(rows):
            for v in range(self.s.vectors):
                u.store(k, i * self.s.vectors + v, k.at(at, self.s.lane_offset(v)), k.i64(self.s.row_bytes))

    # --- values

    def values_from(self, k: Function, values: Value, first: Value, row: Value) -> Value:
        return k.at(values, first * 2)

    def whole_keys(self, k: Function, full: Value, end: Value, count: Value) -> Value:
        return full

    def whole_steps(
        self, k: Function, clear: Value, full: Value, steps: Value, values: Value, width: Value
    ) -> tuple[Value, Value]:
        """Returns all steps where values are finite, else none."""
        finite = k.load(I64, values, width * _COLUMN).differs(0)
        return k.i64(0), k.select(finite, steps, k.i64(0))

    def value_tile(self, module: Module) -> Any:
        """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], over chunks of keys.

        Takes all steps of OuterProduct.value_tile; weights past the last key are made zeros. Sums are added after the
        next block's are on their way, as scores are checked.
        """
        s, u = self.s, self._registers(module)
        k = module.function("value_tile", prototype(VALUE))
        p, blocks = k.p, self._row_blocks()[0]
        step = len(blocks) * ROWS
        chunks, sums = (p["steps"] + (ROWS - 1)) // ROWS, k.buffer(F32, 2 * step * s.panel)
        last = (p["width"] - 1) // step * step

        def accumulate(column: Value) -> None:
            half = k.at(sums, (column & step) * s.row_bytes)
            with k.range(0, step, 2) as m:
                for i in (0, 1):
                    found = [k.load(s.vector, half, (m + i) * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
                    self._accumulate(k, column + m + i, found)

        with k.range(p["steps"], chunks * ROWS) as t:
            for v in range(s.vectors):
                k.store(k.const(0, s.ivector), p["weights"], t * s.row_bytes + s.lane_offset(v))
        with k.range(0, p["width"], step) as column:
            rows = [k.at(p["values"], (column + m) * _COLUMN) for m in blocks]
            self._multiply(k, u, chunks, rows, k.i64(_COLUMN), p["weights"])
            half = k.at(sums, (column & step) * s.row_bytes)
            self._store_sums(k, u, [k.at(half, m * s.row_bytes) for m in blocks])
            with k.when(column > 0):
                accumulate(column - step)
        accumulate(last)
        return k.finish()

    def _accumulate(self, k: Function, column: Value, sums: list[Value]) -> None:
        """Adds sums to a row of the accumulator; a lane that sees nothing keeps its own."""
        s, p = self.s, k.p
        for v, total in enumerate(sums):
            at = k.at(p["acc"], column * s.row_bytes + s.lane_offset(v))
            alpha, begin = (k.load(s.vector, p["alpha"], i * s.row_bytes + s.lane_offset(v)) for i in (0, 1))
            before = k.load(s.vector, at)
            if not s.hides:
                before = k.select(k.splat(p["fresh"].differs(0), s.lanes), k.const(0.0, s.vector), before)
            after = k.fma(before, alpha, total + 0.0)
            k.store(k.select(begin.bits(s.ivector) > -1, after, before), at)

    def predicated_tile(self, module: Module) -> Any:
        """value_tile by chains that skip, lane by lane, what is hidden: of a tile whose values are not all finite. What
        joins the accumulator is no part of a product: it keeps subnormal numbers, as there.
        """
        s, chains = self.s, flushed(module, self._predicated_chains(module))
        k = module.function("predicated_tile", prototype(f"{VALUE} wide"))
        k.call(chains, *k.p.values())
        with k.range(0, k.p["width"]) as column:
            at = [column * s.row_bytes + s.lane_offset(v) for v in range(s.vectors)]
            self._accumulate(k, column, [k.load(s.vector, k.p["partial"], x) for x in at])
        return k.finish()

    def _predicated_chains(self, module: Module) -> Any:
        """partial[column, :] = the sum of a column."""
        s, k = self.s, module.function("predicated_chains", prototype(f"{VALUE} wide"))
        p, zero = k.p, k.const(0.0, s.vector)
        with k.range(0, p["width"]) as column:
            totals = [k.variable(zero) for _ in range(s.vectors)]
            with k.range(0, p["steps"], ROWS) as first:
                parts = [[k.variable(zero) for _ in (0, 1)] for _ in totals]
                with k.range(first, k.min(first + ROWS, p["steps"])) as t:
                    value = k.splat(k.load(I32, p["values"], column * _COLUMN + t * 4), s.lanes)
                    for v, both in enumerate(parts):
                        weight = k.load(s.ivector, p["weights"], t * s.row_bytes + s.lane_offset(v))
                        for part, x, w, sign in zip(
                            both, split_pairs(value), split_pairs(weight), (weight << 16, weight), strict=True
                        ):
                            part.set(k.select(sign > -1, k.fma(x, w, part.get()), part.get()))
                for total, (even, odd) in zip(totals, parts, strict=True):
                    total.set(total.get() + (even.get() + odd.get()))
            for v, total in enumerate(totals):
                k.store(total.get(), p["partial"], column * s.row_bytes + s.lane_offset(v))
        return k.finish()
