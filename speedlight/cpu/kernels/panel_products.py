"""Micro-kernels in which a lane is a query: score and value; weights.py comes between. They know panels, nothing of
heads, masks or threads.

A *panel* is `vectors` x `lanes` queries. Everything a panel needs lies lane-contiguous:

    q_panel [units, panel]    queries, transposed; a unit is what a multiply-add step takes (products.py)
    scores  [TILE, panel]     S = K Q, then P in its place, by units
    state   [2 + width, panel] running_max, running_sum, then the accumulator, one row per value column

The order of every floating-point operation is fixed: docs/numerics.md, steps 1-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...problem.problem import TILE
from ..language.vector import F32, I64, PTR, Function, Module, Value, Variable
from ..memory.shape import Shape
from ..products.products import multiply_add, scales_of, visible, visible_step
from .prefetch import fetch_next


def accumulators(k: Function, s: Shape, rows: int, vectors: int = 0) -> list[list[Variable]]:
    """Sums of a register tile, +0 so far: [row][vector], of queries if it is not said how many."""
    return [[k.variable(k.const(0.0, s.vector)) for _ in range(vectors or s.vectors)] for _ in range(rows)]


def _each(total: list[list[Variable]]) -> Iterator[tuple[int, int, Variable]]:
    for m, row in enumerate(total):
        for v, x in enumerate(row):
            yield m, v, x


def fetching_keys(k: Function, s: Shape, j: Value, step: Callable[[Value], None]) -> None:
    """All steps of a register tile. Meanwhile keys from j on are fetched, a row in each of so many parts of the sum:
    a line for every two steps, as more at once would fill the places of misses.
    """
    ahead, part = k.at(k.p["keys"], j * k.p["key_row"]), k.p["units"] // s.rows & -2
    with k.range(0, s.rows) as m:
        row = k.at(ahead, m * k.p["key_row"])
        with k.range(0, part, 2) as t:
            k.prefetch(k.at(row, t * (s.rows * s.number_bytes)))
            step(m * part + t)
            step(m * part + t + 1)
    with k.range(part * s.rows, k.p["units"]) as t:
        step(t)


# --- scores

_SCORE_PARAMS = {
    "scores": PTR, "q_panel": PTR, "keys": PTR, "key_row": I64, "n_keys": I64, "units": I64, "check": PTR, "ahead": PTR,
    "a": PTR, "follows": I64, "upcoming": PTR, "wide": I64,
}  # fmt: skip


def score_tile(module: Module, s: Shape, lines: Sequence[int] = ()) -> Any:
    """scores[n_keys, panel] = keys @ q_panel, one chain of multiply-adds over the units per element.

    Meanwhile brings in what the expression will read: `ahead` has the panel's addresses, once for each number of
    `lines`; and what the next task will, where one `follows`.

    check holds every lane's largest score, the sum (finite only if all scores are), and the smallest; where a score
    function follows, that says so of what it makes of them. Row groups past the end repeat the last key: what they
    write lies past n_keys. Keys from `wide` on are seen by the last vector of queries alone (`causal`): the others'
    scores of these are whatever lay there, which softmax_tile hides.
    """
    k = module.function("score_tile", _SCORE_PARAMS | scales_of(s))
    p = k.p
    checks = _Checks(k, s) if s.program is None or s.program.score is None else None
    last = p["n_keys"] - 1

    def group(j: Value, vectors: range) -> None:
        """A group of keys from j on, for some of the panel's vectors."""
        rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]
        total = accumulators(k, s, s.rows, len(vectors))

        def step(t: Value) -> None:
            query = [k.load(s.units, p["q_panel"], t * s.row_bytes + s.lane_offset(v)) for v in vectors]
            for m in range(s.rows):
                key = k.splat(k.load(s.unit, rows[m], t * s.number_bytes), s.lanes)
                for sums, x in zip(total[m], query, strict=True):
                    sums.set(multiply_add(k, s, key, x, sums.get()))

        _fetch_rows(k, s, lines, j)
        fetch_next(k)
        if s.fetching.rows:
            fetching_keys(k, s, j + s.rows, step)
        else:
            k.unrolled(0, p["units"], step)
        for i, v in enumerate(vectors):
            scores = _stored_scores(k, s, j, v, [total[m][i].get() for m in range(s.rows)])
            if checks is not None:
                checks.add(v, scores)

    wide = k.min((p["wide"] + (s.rows - 1)) // s.rows * s.rows, p["n_keys"]) if s.narrows else p["n_keys"]
    with k.range(0, wide, s.rows) as j:
        group(j, range(s.vectors))
    if s.narrows:
        with k.range(wide, p["n_keys"], s.rows) as j:
            group(j, range(s.vectors - 1, s.vectors))
    if checks is not None:
        checks.store()
    return k.finish()


class _Checks:
    """What softmax_tile asks of scores: each lane's largest, their sum, the smallest; part of score_tile."""

    def __init__(self, k: Function, s: Shape) -> None:
        self.k, self.s = k, s
        starts = float("-inf"), 0.0, float("inf")
        self.found = [[k.variable(k.const(x, s.vector)) for x in starts] for _ in range(s.vectors)]

    def add(self, v: int, scores: list[Value]) -> None:
        k = self.k
        for variable, combine in zip(self.found[v], (k.max, lambda a, b: a + b, k.min), strict=True):
            variable.set(_tree(scores, combine, variable.get()))

    def store(self) -> None:
        for v, found in enumerate(self.found):
            for i, x in enumerate(found):
                self.k.store(x.get(), self.k.p["check"], i * self.s.row_bytes + self.s.lane_offset(v))


def _fetch_rows(k: Function, s: Shape, lines: Sequence[int], j: Value) -> None:
    """Prefetches a share of the panel's rows of tables, for every group of keys."""
    for n, count in enumerate(lines):
        share = -(-s.panel * s.rows // TILE)
        lane = j // s.rows * share
        with k.range(lane, k.min(lane + share, k.i64(s.panel))) as i:
            row = k.load(PTR, k.p["ahead"], (i + n * s.panel) * 8)
            for line in range(count):
                k.prefetch(k.at(row, line * 64))


def _stored_scores(k: Function, s: Shape, j: Value, v: int, x: list[Value]) -> list[Value]:
    """Scores of keys j, j + 1, … against one vector of queries."""
    p = k.p
    if s.quantised:
        last = p["n_keys"] - 1
        x = [each * k.splat(k.load(F32, p["scales"], k.min(j + m, last) * 4), s.lanes) for m, each in enumerate(x)]
    out = k.at(p["scores"], j * s.row_bytes)
    for m, each in enumerate(x):
        k.store(each, out, m * s.row_bytes + s.lane_offset(v))
    return x


def _tree(values: Sequence[Value], combine: Callable[[Value, Value], Value], last: Value) -> Value:
    """Pairwise, so that no long chain forms; `last` joins at the end."""
    level = list(values)
    while len(level) > 1:
        level = [combine(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return combine(level[0], last)


# --- values

_VALUE_PARAMS = {
    "acc": PTR, "weights": PTR, "values": PTR, "value_row": I64, "first": I64, "end": I64, "steps": I64, "width": I64,
    "alpha": PTR, "partial": PTR, "fresh": I64,
}  # fmt: skip


def value_tile(module: Module, s: Shape) -> Any:
    """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], ascending j from +0. Where
    nothing hides, an accumulator that is `fresh` is +0, whatever lies there.

    A step of j is a unit of keys. Steps [first, end) are visible to every lane; sums so far come from `partial` if
    there were steps before, and go there if there are more, where predicated_tile continues. Columns past the width
    repeat the last one into rows that nothing reads.
    """
    k = module.function("value_tile", _VALUE_PARAMS)
    p = k.p

    def group(column: Value, offsets: Sequence[Value | int]) -> None:
        """Columns from `column` on, at these bytes from it."""
        values, total = k.at(p["values"], column * s.number_bytes), accumulators(k, s, s.rows)
        if s.hides:
            with k.when(p["first"] > 0):
                _start(k, s, total, p["partial"], column, k.i64(s.row_bytes))

        def step(j: Value) -> None:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            row = k.at(values, j * p["value_row"])
            if s.fetching.rows:
                k.prefetch(k.at(row, p["value_row"] * s.fetching.rows))
            for m in range(s.rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, value, weights[v], total[m][v].get()))

        k.unrolled(p["first"], p["end"], step)
        _end(k, s, column, total)

    whole, last = p["width"] // s.rows * s.rows, p["width"] - 1
    with k.range(0, whole, s.rows) as column:
        group(column, [m * s.number_bytes for m in range(s.rows)])  # constants: a register each there would not be
    with k.when(whole < p["width"]):
        group(whole, [(k.min(whole + m, last) - whole) * s.number_bytes for m in range(s.rows)])
    return k.finish()


def predicated_tile(module: Module, s: Shape) -> Any:
    """What value_tile does, over steps of which a lane may see none: where its weight is -0 it keeps its sum, whatever
    the value is (0 · NaN is NaN). Conditions take registers too: of the widest panels half as many rows. Steps from
    `wide` on are seen by the last vector alone.
    """
    k = module.function("predicated_tile", _VALUE_PARAMS | {"wide": I64})
    p = k.p
    roomy = s.isa.registers >= 32 and s.vectors < 3
    last, rows = p["width"] - 1, s.rows if roomy else max(1, s.rows // 2)
    # the first steps: softmax_tile left the start of every column beside alpha
    fresh = p["first"].equals(0)
    begin = k.select(fresh, k.at(p["alpha"], s.row_bytes), p["partial"])
    begin_row = k.select(fresh, k.i64(0), k.i64(s.row_bytes))
    with k.range(0, p["width"], rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = accumulators(k, s, rows)
        _start(k, s, total, begin, column, begin_row)

        def step(j: Value, vectors: range, offsets: list[Value] = offsets, total: list[list[Variable]] = total) -> None:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in vectors]
            seen = [visible(k, s, w) for w in weights]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v, weight, sees_it in zip(vectors, weights, seen, strict=True):
                    total[m][v].set(visible_step(k, s, value, weight, total[m][v].get(), sees_it))

        wide = k.min(p["wide"], p["end"]) if s.narrows else p["end"]
        with k.range(p["first"], wide) as j:
            step(j, range(s.vectors))
        if s.narrows:
            with k.range(wide, p["end"]) as j:
                step(j, range(s.vectors - 1, s.vectors))
        if s.hides:
            _end(k, s, column, total)
        else:
            _accumulate(k, s, column, total)  # nothing follows the end of what `causal` shows
    return k.finish()


def _start(k: Function, s: Shape, total: list[list[Variable]], begin: Value, column: Value, row: Value) -> None:
    """Sums so far, of a column every `row` bytes."""
    for m, v, total_mv in _each(total):
        total_mv.set(k.load(s.vector, begin, (column + m) * row + s.lane_offset(v)))


def _end(k: Function, s: Shape, column: Value, total: list[list[Variable]]) -> None:
    """Sums go to the accumulator, or to `partial` if there are more steps."""
    p = k.p
    with k.either(p["end"].equals(p["steps"])) as (whole, rest):
        with whole:
            _accumulate(k, s, column, total)
        with rest:
            for m, v, total_mv in _each(total):
                k.store(total_mv.get(), p["partial"], (column + m) * s.row_bytes + s.lane_offset(v))


def _accumulate(k: Function, s: Shape, column: Value, total: list[list[Variable]]) -> None:
    zero, fresh = k.const(0.0, s.vector), k.splat(k.p["fresh"].differs(0), s.lanes)
    for m, v, total_mv in _each(total):
        at = k.at(k.p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
        before, alpha = k.load(s.vector, at), k.load(s.vector, k.p["alpha"], s.lane_offset(v))
        before = before if s.hides else k.select(fresh, zero, before)
        k.store(k.fma(before, alpha, total_mv.get()), at)
