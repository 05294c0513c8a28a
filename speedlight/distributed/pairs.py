"""What any rank's queries see of any rank's keys: how many pairs, and from which key to which.

Boxes of positions are halved, first between runs and then inside, until a mask hides or shows them, or until they are
small enough to look at every pair: time and memory follow the edges of the mask, as in panels.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..errors import UnsupportedError
from ..expressions.program import hiding_condition
from ..problem.problem import Problem
from ..problem.tiles import Rows, classes, integers_of, seen
from .shardings import Runs, tokens

_LEAF = 32  # positions to a side of a box whose pairs are looked at
_LEAVES = 2048  # looked at together: some 2 million pairs
_BOXES = 8192  # classified together
_MOST_LEAVES = 1 << 19  # of one sharding: some seconds
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
    """Of each rank's queries and each run of keys, runs by where they begin: [ranks, runs]."""

    owners: np.ndarray  # [runs]: which rank holds them
    lengths: np.ndarray  # [runs]
    pairs: np.ndarray  # visible ones of all heads of all items
    first: np.ndarray  # of a run's keys, the first that a query of the rank may see, and one past the last
    last: np.ndarray

    def in_whole(self, unit: int) -> Seen:
        """The same with keys in whole units of a run, but for its end."""
        whole = np.minimum(-(-self.last // unit) * unit, self.lengths)
        return self._replace(first=self.first // unit * unit, last=whole)


def seen_between(problem: Problem, q_runs: tuple[Runs, ...], k_runs: tuple[Runs, ...], *, packed: bool = False) -> Seen:
    """What each rank sees; runs are of each rank. packed: items lie one behind another, and so do the tokens that are
    sharded; else each item is sharded alike. Of stripes each rank sees its share, even to within a key of each row.
    """
    if any([run.step > 1 for runs in (*q_runs, *k_runs) for run in runs]):
        return _shares(problem, q_runs, k_runs, packed)
    (q_cuts, q_owners), (k_cuts, k_owners) = _sorted_runs(q_runs), _sorted_runs(k_runs)
    walk = _Walk.of(len(q_owners), len(k_owners))
    for item, head, times in _distinct(problem, packed):
        at = [sum(lengths[:item]) * packed for lengths in (problem.q_lengths, problem.k_lengths)]
        i = problem.q_starts[item] + np.clip(q_cuts - at[0], 0, problem.q_lengths[item])
        j = problem.k_start + np.clip(k_cuts - at[1], 0, problem.k_lengths[item])
        walk.add(Rows(problem, item, head, 1, integers_of(problem), alone=True), i, j, at[1] - problem.k_start, times)
    shape = len(q_runs), len(k_owners)
    found = Seen(
        k_owners, np.diff(k_cuts), np.zeros(shape, np.int64), np.full(shape, 1 << 62), np.zeros(shape, np.int64)
    )
    np.add.at(found.pairs, q_owners, walk.pairs)
    np.minimum.at(found.first, q_owners, walk.first)
    np.maximum.at(found.last, q_owners, walk.last)
    begins = k_cuts[:-1]
    return found._replace(
        first=np.where(found.last > 0, found.first - begins, 0), last=np.maximum(found.last - begins, 0)
    )


def _shares(problem: Problem, q_runs: tuple[Runs, ...], k_runs: tuple[Runs, ...], packed: bool) -> Seen:
    q_sizes, k_sizes = (np.array([tokens(runs) for runs in each], np.int64) for each in (q_runs, k_runs))
    whole = [((range(int(x.sum())),),) for x in (q_sizes, k_sizes)]
    total = int(seen_between(problem, *whole, packed=packed).pairs.sum())
    shares = np.multiply.outer(q_sizes / max(1, q_sizes.sum()), k_sizes / max(1, k_sizes.sum()))
    pairs = np.rint(total * shares).astype(np.int64)
    return Seen(np.arange(len(k_sizes)), k_sizes, pairs, np.zeros_like(pairs), (pairs > 0) * k_sizes)


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


class _Walk(NamedTuple):
    """What was found of each run of queries and each run of keys."""

    pairs: np.ndarray
    first: np.ndarray  # of all tokens
    last: np.ndarray
    looked: np.ndarray  # [1]: how many small boxes were looked at

    @classmethod
    def of(cls, queries: int, keys: int) -> _Walk:
        shape = queries, keys
        return cls(np.zeros(shape, np.int64), np.full(shape, 1 << 62), np.zeros(shape, np.int64), np.zeros(1, np.int64))

    def add(self, rows: Rows, i: np.ndarray, j: np.ndarray, offset: int, times: int) -> None:
        """What the rows of an item's head see; runs of queries and of keys end at positions i and j, ascending.

        offset: from a key's position to its token. times: how many heads of items are like it.
        """
        shown = np.zeros((len(i), len(j)), np.int64)  # differences: sums of rows and columns are 1 in what is visible
        splits = hiding_condition(rows.problem.roots[1]) is None  # a part of a visible box is visible
        stack = [np.array([[0, len(i) - 1, 0, len(j) - 1, i[0], i[-1], j[0], j[-1]]], np.int64).T]
        while stack:
            boxes = stack.pop()
            if boxes.shape[1] > _BOXES:
                stack.append(boxes[:, _BOXES:])
                boxes = boxes[:, :_BOXES]
            kind, diagonal = _kinds(rows, *boxes[4:])
            single = (boxes[1] - boxes[0] == 1) & (boxes[3] - boxes[2] == 1)
            whole = (kind == 2) & splits
            q0, q1, k0, k1 = boxes[:4, whole & ~single]
            for each, keys, sign in ((q0, k0, 1), (q1, k0, -1), (q0, k1, -1), (q1, k1, 1)):
                np.add.at(shown, (each, keys), sign)
            q0, _, k0, _, i0, i1, j0, j1 = boxes[:, whole & single]
            self._note(q0, k0, (i1 - i0) * (j1 - j0) * times, j0 + offset, j1 + offset)
            edge = single & diagonal & splits
            q0, _, k0, _, i0, i1, j0, j1 = boxes[:, edge]
            self._note(q0, k0, _below(i0, i1, j0, j1) * times, j0 + offset, np.minimum(i1, j1) + offset)
            whole |= edge
            leaf = single & (boxes[5] - boxes[4] <= _LEAF) & (boxes[7] - boxes[6] <= _LEAF)
            leaves = boxes[:, leaf & (kind > 0) & ~whole]
            self.looked[0] += leaves.shape[1]
            if self.looked[0] > _MOST_LEAVES:
                raise UnsupportedError(too_long(rows.problem, "under this mask "))
            for at in range(0, leaves.shape[1], _LEAVES):
                q0, _, k0, _, *ends = leaves[:, at : at + _LEAVES]
                self._note(q0, k0, _looked(rows, *ends) * times, ends[2] + offset, ends[3] + offset)
            rest = boxes[:, (kind > 0) & ~whole & ~leaf]
            if rest.size:
                stack.append(_quarters(rest, i, j))
        q, k = np.nonzero(shown.cumsum(axis=0).cumsum(axis=1)[:-1, :-1] * np.diff(i)[:, None] * np.diff(j))
        self._note(q, k, np.diff(i)[q] * np.diff(j)[k] * times, j[k] + offset, j[k + 1] + offset)

    def _note(self, q: np.ndarray, k: np.ndarray, pairs: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
        np.add.at(self.pairs, (q, k), pairs)
        some = pairs > 0
        np.minimum.at(self.first, (q[some], k[some]), first[some])
        np.maximum.at(self.last, (q[some], k[some]), last[some])


def _kinds(rows: Rows, i0: np.ndarray, i1: np.ndarray, j0: np.ndarray, j1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """0, 1 or 2 of each box: nothing, something, everything is visible; and whether the diagonal alone hides some."""
    kind = classes(rows, (i0, np.maximum(i1, i0 + 1) - 1), (j0, np.maximum(j1, j0 + 1) - 1))
    kind = np.where((i0 < i1) & (j0 < j1), kind, 0)
    if not rows.problem.causal:
        return kind, np.zeros(kind.shape, bool)
    kind = np.where(j0 > i1 - 1, 0, kind)
    crossed = j1 - 1 > i0
    return np.where(crossed, np.minimum(kind, 1), kind), crossed & (kind == 2)


def _below(i0: np.ndarray, i1: np.ndarray, j0: np.ndarray, j1: np.ndarray) -> np.ndarray:
    """Pairs of boxes with j <= i: what each row sees from j0 on, less what of it is past j1."""
    a, b, c, d = (np.maximum(x, 0) for x in (i1 - j0, i0 - j0, i1 - j1, i0 - j1))
    return (a * (a + 1) - b * (b + 1) - c * (c + 1) + d * (d + 1)) // 2


def _looked(rows: Rows, *ends: np.ndarray) -> np.ndarray:
    """Visible pairs of small boxes, seen one by one."""
    side, (i0, i1, j0, j1) = np.arange(_LEAF), (x[:, None, None] for x in ends)
    i, j = np.minimum(i0 + side[:, None], i1 - 1), np.minimum(j0 + side, j1 - 1)
    shown = seen(rows.problem, {"b": np.int64(rows.item), "h": np.int64(rows.head), "i": i, "j": j})
    return (shown & (i0 + side[:, None] < i1) & (j0 + side < j1)).sum(axis=(1, 2))


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
