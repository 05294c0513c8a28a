"""Requests for weights of keys: which queries count, and what becomes of their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import listed
from ..arrays.integers import integer
from ..arrays.layouts import are_widened
from ..arrays.memory import Array
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from .build import Stated
from .gradients import check_lse
from .problem import LAYOUTS, Problem


class WeightRequest(NamedTuple):
    """A request for weights of keys."""

    problem: Problem  # of the queries that count
    skipped: tuple[int, ...]  # queries of each item before those
    reduction: str  # "sum", "max"; "rows": no reduction
    shape: tuple[int, ...]  # of the result
    rows: tuple[int, ...] = ()  # queries whose rows are asked for, numbered along q's length

    def numbers(self, item: int) -> np.ndarray:
        """Returns the row of the result of each query of an item that counts, or -1 for one that is not asked for."""
        numbers = np.full(self.problem.q_lengths[item], -1, np.int64)
        for row, number in self.places().items():
            at = row - self.skipped[item]
            if 0 <= at < len(numbers):
                numbers[at] = number
        return numbers

    def places(self) -> dict[int, int]:
        """Returns the first row of the result that each query has."""
        places: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            places.setdefault(row, number)
        return places

    def repeat_rows(self, result: np.ndarray) -> None:
        """Copies the rows of queries that are asked for more than once."""
        places = self.places()
        for number, row in enumerate(self.rows):
            if places[row] != number:
                result[..., number, :] = result[..., places[row], :]


def requested(
    stated: Stated, layout: str, arrays: tuple[Array, Array, Array], reduce: Any, queries: Any, rows: Any
) -> WeightRequest:
    """Returns the request of a call of q, k and lse, whose problem is known; raises for what does not go with them."""
    q, k, lse = arrays
    problem = stated.problem
    if are_widened(k.dtype, q.dtype):
        raise UnsupportedError(
            f"k: expected dtype {q.dtype}, as q has, where weights of keys are computed; got {k.dtype}. Convert k."
        )
    check_lse(lse, layout, q)
    if not (isinstance(reduce, str) and reduce in ("sum", "max")):
        raise ArgumentError(f"reduce: expected 'sum' or 'max'; got {shown(reduce)}. Whole rows are rows=[…].")
    axes = LAYOUTS[layout]
    heads = (*q.shape[: len(layout) - 3], problem.q_heads)
    keys = k.shape[axes[-2]]
    if rows is None:
        bounds = _bounds(queries, problem.q_lengths)
        return _narrowed(WeightRequest(problem, (), reduce, (*heads, keys)), bounds)
    if queries is not None or reduce != "sum":
        name = "reduce" if queries is None else "queries"
        raise ArgumentError(f"{name}: expected its default beside rows, which are not reduced; got both.")
    if layout == "lhd":
        raise ArgumentError(
            "rows: expected None for packed sequences (layout='lhd'), whose rows have different lengths; got both. Use "
            "layout='hld' for one sequence."
        )
    numbers = _numbers(rows, q.shape[axes[-2]])
    ends = (min(numbers), max(numbers) + 1) if numbers else (0, 0)
    request = WeightRequest(problem, (), "rows", (*heads, len(numbers), keys), numbers)
    return _narrowed(request, [_cut(ends, n) for n in problem.q_lengths])


def _narrowed(request: WeightRequest, bounds: list[tuple[int, int]]) -> WeightRequest:
    """Returns a request of each item's queries from and to these bounds alone."""
    problem = request.problem
    skipped = tuple([first for first, _ in bounds])
    lengths = tuple([end - first for first, end in bounds])
    starts = tuple([start + n for start, n in zip(problem.q_starts, skipped, strict=True)])
    return request._replace(problem=replace(problem, q_starts=starts, q_lengths=lengths), skipped=skipped)


def _cut(ends: tuple[int, int], length: int) -> tuple[int, int]:
    """Returns bounds inside an item's queries."""
    first = min(ends[0], length)
    return first, max(first, min(ends[1], length))


def _bounds(queries: Any, lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the queries of each item that a slice takes, from and to."""
    if queries is None:
        return [(0, n) for n in lengths]
    what = "a slice of neighbouring queries, as slice(-64, None)"
    if not isinstance(queries, slice):
        raise ArgumentTypeError(f"queries: expected {what}; got {shown(queries)}. Single ones are rows=[…].")
    first, end = (None if x is None else integer("queries", x) for x in (queries.start, queries.stop))
    if not (queries.step is None or integer("queries", queries.step) == 1):
        raise ArgumentError(f"queries: expected {what}; got a step of {shown(queries.step)}.")
    bounds = [slice(first, end).indices(n)[:2] for n in lengths]
    return [(low, max(low, high)) for low, high in bounds]


def _numbers(rows: Any, length: int) -> tuple[int, ...]:
    """Returns the numbers of queries from 0 on; negative ones count from the end."""
    numbers = [integer("rows", n) for n in listed(rows, "rows", "a sequence of ints")]
    for n in numbers:
        if not -length <= n < length:
            raise ArgumentError(f"rows: expected numbers of queries from {-length} to {length - 1}; got {n}.")
    return tuple([n % length for n in numbers])
