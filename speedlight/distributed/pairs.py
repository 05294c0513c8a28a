"""How many pairs of a query and a key are visible between any two ranks: what each step of a rank has to compute.

Boxes of positions are halved, first between runs and then inside, until a mask hides or shows them, or until they are
small enough to look at every pair: time and memory follow the edges of the mask, as in panels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import numpy as np

from ..expressions.program import hiding_condition
from ..panels import Rows, classes, integers_of, seen
from ..problem import Problem
from .shardings import Runs, tokens

_LEAF = 32  # positions to a side of a box whose pairs are looked at
_LEAVES = 2048  # looked at together: some 2 million pairs
_BOXES = 8192  # classified together


def pairs_between(
    problem: Problem, q_runs: tuple[Runs, ...], k_runs: tuple[Runs, ...], *, packed: bool = False
) -> np.ndarray:
    """[ranks, ranks]: visible pairs of all heads of all items, of one rank's queries and another's keys.

    Runs are of each rank. Of stripes, each has its share of all pairs: they are even to within a key of each row.
    packed: items lie one behind another, and so do the tokens that are sharded; else each item is sharded alike.
    """
    if any([run.step > 1 for runs in (*q_runs, *k_runs) for run in runs]):
        sizes = [np.array([tokens(runs) for runs in each]) for each in (q_runs, k_runs)]
        whole = [((range(x.sum()),),) for x in sizes]
        total = int(pairs_between(problem, *whole, packed=packed).sum())
        shares = np.multiply.outer(*(x / max(1, x.sum()) for x in sizes))
        return np.rint(total * shares).astype(np.int64)
    (q_cuts, q_owners), (k_cuts, k_owners) = _sorted_runs(q_runs), _sorted_runs(k_runs)
    found = np.zeros((len(q_runs), len(k_runs)), np.int64)
    for item, head, times in _distinct(problem, packed):
        at = [sum(lengths[:item]) * packed for lengths in (problem.q_lengths, problem.k_lengths)]
        i = problem.q_starts[item] + np.clip(q_cuts - at[0], 0, problem.q_lengths[item])
        j = problem.k_start + np.clip(k_cuts - at[1], 0, problem.k_lengths[item])
        cells = _cells(Rows(problem, item, head, 1, integers_of(problem), alone=True), i, j)
        np.add.at(found, (q_owners[:, None], k_owners[None, :]), cells * times)
    return found


def _sorted_runs(runs: tuple[Runs, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where the runs of all ranks begin and the last ends, ascending, and whose they are."""
    owned = sorted((run.start, len(run), rank) for rank, each in enumerate(runs) for run in each)
    cuts = [0, *accumulate(length for _, length, _ in owned)]
    return np.array(cuts, np.int64), np.array([rank for *_, rank in owned], np.int64)


def _distinct(problem: Problem, packed: bool) -> Iterator[tuple[int, int, int]]:
    """(item, query head, how many are like it): those that the expressions cannot tell apart are counted once."""
    roots = [x for x in problem.roots if x is not None]
    uses = frozenset().union(*(x.uses for x in roots))
    heads, each = (range(problem.q_heads), 1) if "h" in uses else (range(min(1, problem.q_heads)), problem.q_heads)
    alike: dict[tuple[int, ...], list[int]] = {}
    for item, key in enumerate(zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True)):
        alike.setdefault((*key, item if packed or "b" in uses else 0), []).append(item)
    for items in alike.values():
        yield from ((items[0], head, each * len(items)) for head in heads)


def _cells(rows: Rows, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Visible pairs of each run of queries and each of keys, which end at positions i and j, ascending."""
    count = np.zeros((len(i) - 1, len(j) - 1), np.int64)
    shown = np.zeros((len(i), len(j)), np.int64)  # differences: sums of rows and columns are 1 where a cell is visible
    splits = hiding_condition(rows.problem.roots[1]) is None  # a part of a visible box is visible
    stack = [np.array([[0, len(i) - 1, 0, len(j) - 1, i[0], i[-1], j[0], j[-1]]], np.int64).T]
    while stack:
        boxes = stack.pop()
        if boxes.shape[1] > _BOXES:
            stack.append(boxes[:, _BOXES:])
            boxes = boxes[:, :_BOXES]
        kind = _kinds(rows, *boxes[4:])
        single = (boxes[1] - boxes[0] == 1) & (boxes[3] - boxes[2] == 1)
        whole = (kind == 2) & splits
        q0, q1, k0, k1 = boxes[:4, whole & ~single]
        for rank_rows, columns, sign in ((q0, k0, 1), (q1, k0, -1), (q0, k1, -1), (q1, k1, 1)):
            np.add.at(shown, (rank_rows, columns), sign)
        q0, _, k0, _, i0, i1, j0, j1 = boxes[:, whole & single]
        np.add.at(count, (q0, k0), (i1 - i0) * (j1 - j0))
        leaf = single & (boxes[5] - boxes[4] <= _LEAF) & (boxes[7] - boxes[6] <= _LEAF)
        _look(rows, boxes[:, leaf & (kind > 0) & ~whole], count)
        rest = boxes[:, (kind > 0) & ~whole & ~leaf]
        if rest.size:
            stack.append(_quarters(rest, i, j))
    areas = np.multiply.outer(np.diff(i), np.diff(j))
    return count + shown.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] * areas


def _kinds(rows: Rows, i0: np.ndarray, i1: np.ndarray, j0: np.ndarray, j1: np.ndarray) -> np.ndarray:
    """0, 1 or 2 of each box: nothing, something, or everything is visible."""
    kind = classes(rows, (i0, np.maximum(i1, i0 + 1) - 1), (j0, np.maximum(j1, j0 + 1) - 1))
    if rows.problem.causal:
        kind = np.where(j0 > i1 - 1, 0, np.where(j1 - 1 > i0, np.minimum(kind, 1), kind))
    return np.where((i0 < i1) & (j0 < j1), kind, 0)


def _look(rows: Rows, boxes: np.ndarray, count: np.ndarray) -> None:
    """Adds the visible pairs of small boxes, seen one by one."""
    side = np.arange(_LEAF)
    for first in range(0, boxes.shape[1], _LEAVES):
        q0, _, k0, _, i0, i1, j0, j1 = boxes[:, first : first + _LEAVES, None, None]
        i, j = np.minimum(i0 + side[:, None], i1 - 1), np.minimum(j0 + side, j1 - 1)
        shown = seen(rows.problem, {"b": np.int64(rows.item), "h": np.int64(rows.head), "i": i, "j": j})
        inside = (i0 + side[:, None] < i1) & (j0 + side < j1)
        np.add.at(count, (q0[:, 0, 0], k0[:, 0, 0]), (shown & inside).sum(axis=(1, 2)))


def _quarters(boxes: np.ndarray, i: np.ndarray, j: np.ndarray) -> np.ndarray:
    """Each box cut in four: between runs where it has several, else inside of them."""
    (q, rows), (k, keys) = _halves(boxes[:2], boxes[4:6], i), _halves(boxes[2:4], boxes[6:8], j)
    four = [np.concatenate([a, b, c, d]) for a, c in zip(q, rows, strict=True) for b, d in zip(k, keys, strict=True)]
    out = np.concatenate(four, axis=1)
    return out[:, (out[4] < out[5]) & (out[6] < out[7])]


def _halves(runs: np.ndarray, ends: np.ndarray, cuts: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Runs and positions of the lower half and of the upper, which is empty where one is small enough."""
    (r0, r1), (x0, x1) = runs, ends
    several, middle = r1 - r0 > 1, (r0 + r1) // 2
    x = np.where(several, cuts[middle], np.where(x1 - x0 > _LEAF, (x0 + x1) // 2, x1))
    lower, upper = np.where(several, middle, r1), np.where(several, middle, r0)
    return [np.stack([r0, lower]), np.stack([upper, r1])], [np.stack([x0, x]), np.stack([x, x1])]
