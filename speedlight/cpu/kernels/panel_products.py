"""The micro-kernel of scores in which a lane is a query; it knows panels, nothing of heads, masks or threads. After it
comes panel_weights.py, then the product's value_tile.

A *panel* is `vectors` x `lanes` queries. Everything a panel needs lies lane-contiguous:

    q_panel [units, panel]    queries, transposed; a unit is what a multiply-add step takes (cpu/products/)
    scores  [TILE, panel]     S = K Q, then P in its place, by units
    state   [2 + width, panel] running_max, running_sum, then the accumulator, one row per value column

The order of every floating-point operation is fixed: docs/numerics.md, steps 1-5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...problem.problem import TILE
from ..language.prototypes import prototype
from ..language.vector import PTR, Function, Module, Value
from ..memory.shape import Shape
from ..products.product import product_of
from .prefetch import fetch_next
from .softmax import combined_by

_SCORE = "scores* q_panel* keys* key_row n_keys units check* ahead* a* follows prefetch* wide"


def score_tile(module: Module, s: Shape, lines: Sequence[int] = ()) -> Any:
    """scores[n_keys, panel] = keys @ q_panel, one chain of multiply-adds over the units per element.

    Meanwhile brings in what the expression will read: `ahead` has the panel's addresses, once for each number of
    `lines`; and what the next task will, where one `follows`.

    check holds every lane's largest score, the sum (finite only if all scores are), and the smallest; where a score
    function follows, that says so of what it makes of them. What is written past n_keys nothing reads. Keys from
    `wide` on are seen by the last vector of queries alone (`causal`): the others' scores of these are whatever lay
    there, which softmax_tile hides. Of keys in two parts, units from `rest_unit` on are the second's, in `rest`.
    """
    more = (
        " scales*" * s.format.is_coded
        + " code_units" * (s.scale_block > 0)
        + " rest* rest_row rest_unit" * s.reads_parts
    )
    k = module.function("score_tile", prototype(_SCORE + more))
    product = product_of(s)
    checks = _Checks(k, s) if s.program is None or s.program.score is None else None

    def fetch(j: Value) -> None:
        _fetch_rows(k, s, lines, j)
        fetch_next(k)

    def check(vectors: range, found: list[list[Value]]) -> None:
        if checks is not None:
            for v, scores in zip(vectors, found, strict=True):
                checks.add(v, scores)

    product.score_groups(k, fetch, check)
    if checks is not None:
        checks.store()
    return k.finish()


class _Checks:
    """Facts that softmax_tile asks of scores: each lane's largest, their sum, the smallest; part of score_tile."""

    def __init__(self, k: Function, s: Shape) -> None:
        self.k, self.s = k, s
        starts = float("-inf"), 0.0, float("inf")
        self.found = [[k.variable(k.const(x, s.vector)) for x in starts] for _ in range(s.vectors)]

    def add(self, v: int, scores: list[Value]) -> None:
        for variable, combine in zip(self.found[v], combined_by(self.k, self.s), strict=True):
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


def _tree(values: Sequence[Value], combine: Callable[[Value, Value], Value], last: Value) -> Value:
    """Combines values pairwise, so that no long chain forms; `last` joins at the end."""
    level = list(values)
    while len(level) > 1:
        level = [combine(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return combine(level[0], last)
