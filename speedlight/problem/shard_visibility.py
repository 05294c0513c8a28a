"""Visible pairs between each rank's queries and pieces of the keys. Pure.

Boxes of positions are halved until a mask hides or shows them, or until they are small enough to look at every pair:
time and memory follow the edges of the mask, as in tiles.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError
from .problem import Problem
from .shardings import Runs, tokens
from .tiles import Rows, classes, integers_of, seen, splits_alike

_LEAF = 32  # positions to a side of a box whose pairs are looked at
_LEAVES = 2048  # looked at together: some 2 million pairs
_BOXES = 1 << 16  # classified together
_MOST_LEAVES = 1 << 19  # of an item's head: some seconds
_MOST_TOKENS, _MOST_HEADS, _MOST_PAIRS = 1 << 26, 1 << 16, 1 << 62


def check_sizes(problem: Problem) -> None:
    """Refuses what would take minutes and gigabytes to look at, and sums that leave int64."""
    if problem.q_heads > _MOST_HEADS:
        raise UnsupportedError(f"q_heads: expected at most {_MOST_HEADS:,} beside ranks=; got {problem.q_heads:,}.")
    longest = max((*problem.q_lengths, *problem.k_lengths), default=0)
    pairs = problem.q_heads * sum([q * k for q, k in zip(problem.q_lengths, problem.k_lengths, strict=True)])
    if longest > _MOST_TOKENS or pairs > _MOST_PAIRS:
        raise UnsupportedError(too_long(problem, ""))


def too_long(problem: Problem, why: str) -> str:
    return (
        f"q_len: expected fewer tokens beside ranks=; {sum(problem.q_lengths):,} rows x {sum(problem.k_lengths):,} "
        f"keys {why}are too many to look at."
    )


class Seen(NamedTuple):
    """Visible pairs of each rank, of all heads of all items, and of each piece its first and last visible key."""

    pairs: np.ndarray  # [ranks]
    first: np.ndarray  # [ranks, pieces], from the piece's begin
    last: np.ndarray  # one past it; 0 where nothing is seen


def seen_by(problem: Problem, q: tuple[Runs, ...], pieces: Sequence[range], *, packed: bool) -> Seen:
    """Visible pairs of each rank, which has these runs of queries. packed: items lie one behind another, and so do the
    tokens that are sharded; else each item is sharded alike. Of stripes each rank sees its share.
    """
    lengths, shape = [len(x) for x in pieces], (len(q), len(pieces))
    if True in [x.step > 1 for x in (*pieces, *[run for runs in q for run in runs])]:
        queries = np.array([tokens(x) for x in q])
        pairs = seen_by(problem, ((range(int(queries.sum())),),), [range(sum(lengths))], packed=packed).pairs[0]
        shares = np.rint(pairs * (queries / max(1, queries.sum()))).astype(np.int64)
        return Seen(shares, np.zeros(shape, np.int64), (shares[:, None] > 0) * np.array(lengths, np.int64))
    runs = [(rank, run) for rank, each in enumerate(q) for run in each]
    owners = np.array([rank for rank, _ in runs], np.int64)
    found = Seen(np.zeros(len(q), np.int64), np.full(shape, 1 << 62), np.zeros(shape, np.int64))
    for item, head, times in problem.kinds(problem.q_heads, apart=packed):
        before = [sum(x[:item]) * packed for x in (problem.q_lengths, problem.k_lengths)]
        i = _ends([x for _, x in runs], before[0], problem.q_lengths[item]) + problem.q_starts[item]
        j = _ends(pieces, before[1], problem.k_lengths[item]) + problem.k_start
        begins = np.array([x.start for x in pieces], np.int64) - before[1] + problem.k_start
        for run, piece, pairs, j0, j1 in _boxes(Rows(problem, item, head, 1, integers_of(problem), alone=True), i, j):
            np.add.at(found.pairs, owners[run], pairs * times)
            np.minimum.at(found.first, (owners[run], piece), j0 - begins[piece])
            np.maximum.at(found.last, (owners[run], piece), j1 - begins[piece])
    return found._replace(first=np.where(found.last > 0, found.first, 0))


def _ends(runs: Sequence[range], before: int, length: int) -> np.ndarray:
    """[2, runs]: ends of the part of each run that lies in an item of this length, from its first token."""
    return np.clip(np.array([[x.start, x.stop] for x in runs], np.int64).reshape(-1, 2).T - before, 0, length)


def _boxes(rows: Rows, i: np.ndarray, j: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """Yields (runs, pieces, visible pairs, from which key, to which) of boxes in which something is visible."""
    causal, splits, looked = rows.problem.causal, splits_alike(rows), 0
    some = [np.flatnonzero(ends[0] < ends[1]) for ends in (i, j)]
    each = max(1, _BOXES // max(1, len(some[1])))
    starts = list(range(0, len(some[0]), each))
    stack: list[np.ndarray] = []
    while stack or starts:
        if not stack:
            run, piece = (x.ravel() for x in np.meshgrid(some[0][starts[-1] : starts.pop() + each], some[1]))
            stack.append(np.stack([run, piece, *i[:, run], *j[:, piece]]))
        boxes = stack.pop()
        if boxes.shape[1] > _BOXES:
            stack.append(boxes[:, _BOXES:])
        _, _, i0, i1, j0, j1 = boxes = boxes[:, :_BOXES]
        kind = classes(rows, (i0, i1 - 1), (j0, j1 - 1))
        kind = np.where(j0 >= i1, 0, kind) if causal else kind
        shown = (kind == 2) & splits
        small = (i1 - i0 <= _LEAF) & (j1 - j0 <= _LEAF) & (kind > 0) & ~shown
        run, piece, i0, i1, j0, j1 = boxes[:, shown]
        yield run, piece, _area(i0, i1, j0, j1, causal), j0, np.minimum(j1, i1) if causal else j1
        looked += int(small.sum())
        if looked > _MOST_LEAVES:
            raise UnsupportedError(too_long(rows.problem, "under this mask "))
        for at in np.array_split(np.flatnonzero(small), -(-int(small.sum()) // _LEAVES) or 1):
            run, piece, *ends = boxes[:, at]
            pairs = _looked(rows, *ends)
            yield tuple(x[pairs > 0] for x in (run, piece, pairs, ends[2], ends[3]))
        rest = boxes[:, (kind > 0) & ~shown & ~small]
        if rest.size:
            stack.append(_quarters(rest))


def _area(i0: np.ndarray, i1: np.ndarray, j0: np.ndarray, j1: np.ndarray, causal: bool) -> np.ndarray:
    """Pairs of boxes; causal: with j <= i: those that rows see from j0 on, less those past j1."""
    if not causal:
        return (i1 - i0) * (j1 - j0)
    a, b, c, d = (np.maximum(x, 0) for x in (i1 - j0, i0 - j0, i1 - j1, i0 - j1))
    return (a * (a + 1) - b * (b + 1) - c * (c + 1) + d * (d + 1)) // 2


def _looked(rows: Rows, *ends: np.ndarray) -> np.ndarray:
    """Visible pairs of small boxes, seen one by one."""
    side, (i0, i1, j0, j1) = np.arange(_LEAF), (x[:, None, None] for x in ends)
    i, j = np.minimum(i0 + side[:, None], i1 - 1), np.minimum(j0 + side, j1 - 1)
    shown = seen(rows.problem, {"b": np.int64(rows.item), "h": np.int64(rows.head), "i": i, "j": j})
    return (shown & (i0 + side[:, None] < i1) & (j0 + side < j1)).sum(axis=(1, 2))


def _quarters(boxes: np.ndarray) -> np.ndarray:
    """Each box cut in four, or in two where one side is small."""
    run, piece, i0, i1, j0, j1 = boxes
    middle = [np.where(b - a > _LEAF, (a + b) // 2, b) for a, b in ((i0, i1), (j0, j1))]
    rows, keys = ([(a, m), (m, b)] for a, m, b in ((i0, middle[0], i1), (j0, middle[1], j1)))
    four = np.concatenate([np.stack([run, piece, *x, *y]) for x in rows for y in keys], axis=1)
    return four[:, (four[2] < four[3]) & (four[4] < four[5])]
