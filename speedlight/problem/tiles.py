"""Tiles of a problem: which panels of queries and tiles of keys a mask hides, shows or cuts, and the visible pairs.

A panel is a run of query rows; a tile is TILE keys; a tile that is neither hidden nor visible as a whole is trimmed to
parts of PART keys. Squares of panels and tiles are halved until they are hidden or visible, or single, so that time and
memory follow the edges of a mask and not the square: the walk of bounds.py, over many boxes at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import UnsupportedError
from ..expressions.bounds import Exact, HalfPlane, Integers, integers, terms
from ..expressions.program import hiding_condition, visibility
from ..expressions.tree import Node, evaluate
from .problem import PART, SPAN, TILE, Problem

_MOST_BOXES, _TILES = 1 << 21, 1 << 25  # that are looked at where there are more tiles than that: about a second
_FEW = 4096  # tiles that are rather classified at once than box by box
_BOXES = 8192  # classified at once: their arrays stay in the cache


class Many(Exact):
    """Arithmetic of the walk on NumPy arrays, one entry a box."""

    minimum: Any = staticmethod(np.minimum)
    maximum: Any = staticmethod(np.maximum)

    def __init__(self, box: dict[str, tuple[Any, Any]], followed: Collection[int]) -> None:
        """followed: as `integers` tells of the whole problem."""
        self.box, self.followed = box, followed

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        return np.where(condition, *(np.int64(x) if isinstance(x, int) else x for x in (yes, no)))

    def invert(self, x: Any) -> Any:
        return np.logical_not(x)

    def truth(self, x: bool) -> Any:
        return np.bool_(x)

    def floordiv(self, a: Any, b: Any) -> Any:
        return np.floor_divide(a, np.where(b == 0, 1, b)) * (b != 0)

    def table(self, node: Node, index: list[tuple[Any, Any]]) -> tuple[Any, Any, Any]:
        """Least and greatest entry, and whether the box is inside; equal boxes are looked up once."""
        entries = self._each(index, lambda box: super(Many, self).table(node, box) or (0, 0, False))
        low, high = (x != 0 if node.kind == "bool" else x for x in (entries[..., 0], entries[..., 1]))
        return low, high, entries[..., 2] != 0

    def all_equal(self, node: Node, index: list[tuple[Any, Any]], number: Node) -> Any:
        return self._each(index, lambda box: super(Many, self).all_equal(node, box, number))

    def _each(self, index: list[tuple[Any, Any]], look: Any) -> np.ndarray:
        ends = np.broadcast_arrays(*(np.asarray(x) for pair in index for x in pair))
        columns, inverse = np.unique(np.stack([x.ravel() for x in ends], axis=1), axis=0, return_inverse=True)
        values = np.array([look([(int(a), int(b)) for a, b in row.reshape(-1, 2)]) for row in columns])
        return values[inverse.ravel()].reshape((*ends[0].shape, *values.shape[1:]))


@dataclass(frozen=True, slots=True)
class Rows:
    """The query rows of one kv head of one item, as panels: the heads of its group side by side.

    `alone`: those of one query head, as the backward kernel has them: panels begin at multiples of their rows, and
    lanes without a query see nothing.
    """

    problem: Problem
    item: int
    head: int  # of k and v; alone: of q
    panel: int  # rows
    integers: Integers  # of the problem
    alone: bool = False

    @property
    def heads(self) -> int:
        """Query heads whose rows lie side by side."""
        return 1 if self.alone else self.problem.group

    @property
    def lead(self) -> int:
        """Lanes before the first row."""
        return lead_of(self.problem.q_starts[self.item], self.panel, self.alone)

    @property
    def count(self) -> int:
        return self.problem.q_lengths[self.item] * self.heads

    @property
    def keys(self) -> int:
        return self.problem.k_lengths[self.item]

    @property
    def panels(self) -> int:
        return -(-(self.lead + self.count) // self.panel) if self.count else 0

    def begin(self, panel: Any) -> Any:
        """Number of a panel's first row."""
        return np.maximum(panel * self.panel - self.lead, 0)

    def end(self, panel: Any) -> Any:
        """One past the number of its last."""
        return np.minimum(panel * self.panel + self.panel - self.lead, self.count)

    def first(self, panel: Any) -> Any:
        """Absolute position of a panel's first row."""
        return self.problem.q_starts[self.item] + self.begin(panel) // self.heads

    def last(self, panel: Any) -> Any:
        return self.problem.q_starts[self.item] + (self.end(panel) - 1) // self.heads

    def limit(self, position: Any) -> Any:
        """Returns how many keys `causal` leaves a row at this position."""
        if not self.problem.causal:
            return np.full_like(position, self.keys)
        return np.clip(position - self.problem.k_start + 1, 0, self.keys)

    def shared(self, first: Any, last: Any) -> Any:
        """Returns how many keys `causal` leaves every lane of panels [first, last]."""
        limit = self.limit(self.first(first))
        if not self.alone:
            return limit
        whole = (first * self.panel >= self.lead) & ((last + 1) * self.panel - self.lead <= self.count)
        return np.where(whole, limit, 0)


def lead_of(start: int, panel: int, alone: bool) -> int:
    """Lanes of an item's first panel before its first query, which is at `start`."""
    return start % panel if alone else 0


def integers_of(p: Problem) -> Integers:
    """Which integers of the mask and the score the bounds follow, and their range."""
    return integers([(x.role, x.nodes) for x in (p.mask, p.score) if x is not None], p.box())


def classes(rows: Rows, i: tuple[Any, Any], j: tuple[Any, Any]) -> Any:
    """0, 1 or 2 of each box of positions: nothing, something, or everything is visible. Ends are inclusive."""
    p = rows.problem
    h = rows.head * rows.heads
    ops = Many({"b": (rows.item, rows.item), "h": (h, h + rows.heads - 1), "i": i, "j": j}, rows.integers.followed)
    partly, wholly = visibility(*p.roots, ops)
    shape = np.broadcast_shapes(*(np.shape(x) for x in (*i, *j)))
    return np.broadcast_to(partly * (1 + (partly & wholly)), shape).astype(np.int8)


@dataclass(slots=True)
class Tally:
    """A kernel's counts: tiles and keys by class."""

    full: int = 0
    mixed: int = 0
    keys: int = 0  # over all panels
    mixed_keys: int = 0
    full_pairs: int = 0  # rows x keys of the tiles that are visible as a whole


def tally(rows: Rows) -> Tally:
    """Counts of one head of one item. Between two turns of the edges of half-planes, panels that are a whole number of
    tiles apart differ by as many tiles: of many such, three are looked at.
    """

    def counted(begin: int, end: int) -> np.ndarray:
        part = Tally()
        for _ in _mixed(rows, part, (begin, end, *_tiles_near(rows, begin, end, planes))):
            pass
        return np.array([part.full, part.mixed, part.keys, part.mixed_keys, part.full_pairs], dtype=object)

    total, period = np.zeros(5, dtype=object), rows.heads * TILE // math.gcd(rows.panel, rows.heads * TILE)
    planes = _planes(rows) if rows.panels > 8 * period else None
    ends, margin = {0, 1, rows.panels - 1, rows.panels}, TILE + 2 * rows.panel
    for turn in () if planes is None else _turns(rows, planes):
        at = (turn - rows.problem.q_starts[rows.item]) * rows.heads + rows.lead
        ends |= {(at + n * rows.heads) // rows.panel for n in (-margin, margin)}
    for begin, end in itertools.pairwise(sorted([n for n in ends if 0 <= n <= rows.panels])):
        times = (end - begin) // period
        if planes is not None and times > 3:
            at = [begin + n * period for n in (0, 1, times - 1)]
            first, second, last = [counted(x, x + period) for x in at]
            if (last == first + (second - first) * (times - 1)).all():
                total += first * times + (second - first) * (times * (times - 1) // 2)
                begin += times * period
        total += counted(begin, end)
    return Tally(*map(int, total))


def _tiles_near(rows: Rows, begin: int, end: int, planes: list[list[Any]] | None) -> tuple[int, int]:
    """Returns the tiles, from and to, outside which half-planes hide all from these panels."""
    tiles = -(-rows.keys // TILE)
    if planes is None or begin >= end:
        return 0, tiles
    start, i = rows.problem.k_start, (int(rows.first(begin)), int(rows.last(end - 1)))
    most = start + int(rows.limit(np.int64(i[1]))) - 1
    found = []
    for term in planes:
        low, high = start, most
        for i_sign, j_sign, c in term:
            ends = [i_sign * x + c for x in i]  # and with j_sign · j it is at most 0
            if j_sign < 0:
                low = max(low, min(ends))
            elif j_sign > 0 or min(ends) > 0:
                high = min(high, -min(ends) if j_sign else start - 1)
        if low <= high:
            found.append((low, high))
    low, high = min((x for x, _ in found), default=start), max((x for _, x in found), default=start - 1)
    return (low - start) // TILE, (high - start) // TILE + 1


def _mixed(
    rows: Rows, total: Tally, box: tuple[int, int, int, int] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Walks panels against tiles, from and to, or all; adds to `total`, yields panels and tiles that only counting
    resolves.
    """
    splits = splits_alike(rows)
    square = np.array([box or (0, rows.panels, 0, -(-rows.keys // TILE))], _type(rows)).T
    for full, _, (p, t, kind) in _walk(rows, square):
        _add_full(rows, total, *full)
        if not splits and full.size:
            yield full[0], full[2]
        if p.size:
            cut = _add_mixed(rows, total, p, t, kind)
            yield p[cut | (not splits)], t[cut | (not splits)]


def splits_alike(rows: Rows) -> bool:
    """Returns whether a part of a visible box is visible."""
    return hiding_condition(rows.problem.roots[1]) is None


class _Told(NamedTuple):
    """The classes of a step's boxes [p0, p1, t0, t1]."""

    full: np.ndarray  # boxes that are visible as a whole
    hidden: np.ndarray  # … that are hidden
    single: tuple[np.ndarray, np.ndarray, np.ndarray]  # panel, tile and kind of single tiles that are neither


def _walk(
    rows: Rows, boxes: np.ndarray, wanted: Callable[[np.ndarray], np.ndarray] = lambda boxes: boxes
) -> Iterator[_Told]:
    """Halves these boxes of panels and tiles until they are hidden or visible, or single; `wanted` may drop some."""
    if not rows.panels or not rows.keys:
        return
    splits, stack, looked = splits_alike(rows), [boxes], 0
    while stack:
        boxes = stack.pop()
        if boxes.shape[1] > _BOXES:
            stack.append(boxes[:, _BOXES:])
            boxes = boxes[:, :_BOXES]
        p0, p1, t0, t1 = boxes = wanted(boxes)
        if not boxes.size:
            continue
        looked += boxes.shape[1]
        if looked > _MOST_BOXES and rows.panels * -(-rows.keys // TILE) > _TILES:
            raise UnsupportedError(
                f"q_len: expected fewer tokens, or a mask of fewer edges; {rows.count:,} rows x {rows.keys:,} keys are "
                "too many to plan under this one."
            )
        low, high = rows.first(p0), rows.last(p1 - 1)
        end = np.minimum(t1 * TILE, rows.limit(high))
        start = rows.problem.k_start
        kind = classes(rows, (low, high), (start + t0 * TILE, start + np.maximum(end, t0 * TILE + 1) - 1))
        kind = np.where(end > t0 * TILE, kind, 0)
        single = (p1 - p0 == 1) & (t1 - t0 == 1)
        whole = (kind == 2) & (rows.shared(p0, p1 - 1) >= np.minimum(t1 * TILE, rows.keys)) & (single | splits)
        leaves = single & (kind > 0) & ~whole
        yield _Told(boxes[:, whole], boxes[:, kind == 0], (p0[leaves], t0[leaves], kind[leaves]))
        rest = boxes[:, (kind > 0) & ~whole & ~single]
        if rest.size:
            stack.append(_parts(rest))


def _type(rows: Rows) -> Any:
    """32-bit where all fit, and sums of a few: twice as quick."""
    p, most = rows.problem, rows.integers.most
    ends = max((abs(x) for pair in p.box().values() for x in pair), default=0) + SPAN
    return np.int32 if most is not None and max(most, ends * p.group) < 1 << 26 else np.int64


def _parts(boxes: np.ndarray) -> np.ndarray:
    """Returns single tiles, where all boxes have few, else halves by halves."""
    p0, p1, t0, t1 = boxes
    wide = t1 - t0
    tiles = (p1 - p0).astype(np.int64) * wide
    if tiles.sum() <= _FEW:
        of = np.repeat(np.arange(len(tiles)), tiles)
        number = (np.arange(len(of)) - np.repeat(np.cumsum(tiles) - tiles, tiles)).astype(boxes.dtype)
        p, t = p0[of] + number // wide[of], t0[of] + number % wide[of]
        return np.stack([p, p + 1, t, t + 1])
    pm, tm = (p0 + p1 + 1) // 2, (t0 + t1 + 1) // 2
    four = [np.stack([a, b, c, d]) for a, b in ((p0, pm), (pm, p1)) for c, d in ((t0, tm), (tm, t1))]
    out = np.concatenate(four, axis=1)
    return out[:, (out[0] < out[1]) & (out[2] < out[3])]


def _add_full(rows: Rows, total: Tally, p0: np.ndarray, p1: np.ndarray, t0: np.ndarray, t1: np.ndarray) -> None:
    keys = (np.minimum(t1 * TILE, rows.keys) - t0 * TILE).astype(np.int64)
    total.full += int(((p1 - p0).astype(np.int64) * (t1 - t0)).sum())
    total.keys += int(((p1 - p0) * keys).sum())
    total.full_pairs += int(((rows.end(p1 - 1) - rows.begin(p0)) * keys).sum())


def _add_mixed(rows: Rows, total: Tally, p: np.ndarray, t: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Adds single tiles that the mask or `causal` cuts; returns which are still mixed when they are trimmed."""
    keys, visible = _trimmed(rows, p, t, kind)
    mixed = visible < keys
    total.full += int(((keys > 0) & ~mixed).sum())
    total.mixed += int(mixed.sum())
    total.keys += int(keys.sum())
    total.mixed_keys += int((keys - visible).sum())
    total.full_pairs += int(((rows.end(p) - rows.begin(p)) * keys)[~mixed].sum())
    return mixed


def _trimmed(rows: Rows, p: np.ndarray, t: np.ndarray, kind: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns how many keys of single tiles are computed, trimmed as the kernel's `extent` does, and how many of those
    without the mask.
    """
    start = rows.problem.k_start + t * TILE
    low, last, shared = rows.first(p), rows.last(p), rows.shared(p, p)
    high = np.minimum(TILE, rows.limit(last) - t * TILE)
    first, end, clear, full = np.zeros_like(p), high, np.zeros_like(p), high.copy()
    cut = np.flatnonzero(kind == 1)
    if cut.size:
        parts = np.arange(0, TILE, PART, dtype=p.dtype)
        ends = np.minimum(parts + PART, high[cut, None])
        j = start[cut, None] + parts, start[cut, None] + np.maximum(ends, parts + 1) - 1
        kinds = np.where(ends > parts, classes(rows, (low[cut, None], last[cut, None]), j), 0)
        count, seen = len(parts), kinds > 0
        visible = seen.any(axis=1)
        from_ = np.where(visible, seen.argmax(axis=1), 0)
        to = np.where(visible, count - seen[:, ::-1].argmax(axis=1), 0)
        whole = kinds == 2
        begin = np.where(whole.any(axis=1), whole.argmax(axis=1), count)
        broken = ~whole & (np.arange(count) >= begin[:, None])
        stop = np.where(broken.any(axis=1), broken.argmax(axis=1), count)
        first[cut], end[cut] = from_ * PART, np.minimum(to * PART, high[cut])
        clear[cut], full[cut] = np.minimum(begin * PART, end[cut]), np.minimum(stop * PART, end[cut])
    full = np.maximum(np.minimum(shared - t * TILE, full), clear)  # keys [clear, full) are visible to all rows
    return end - first, full - clear


def grid(rows: Rows, most: int = 600) -> tuple[np.ndarray, int, int]:
    """A map of one kv head of one item: the class of each cell, and how many query rows and keys a cell has.

    A cell is a tile of a panel, or as many as keep the map within most x most cells: 0 where the tally skips all, 2
    where it takes all for full, else 1.
    """
    panels, tiles = rows.panels, -(-rows.keys // TILE)
    step_p, step_t = max(1, -(-panels // most)), max(1, -(-tiles // most))
    p, t = np.meshgrid(np.arange(0, panels, step_p), np.arange(0, tiles, step_t), indexing="ij")
    ends = np.minimum(p + step_p, panels), np.minimum(t + step_t, tiles)
    has = np.zeros((3, *p.shape), bool)  # of each cell, whether tiles are skipped, mixed, full

    def undecided(boxes: np.ndarray) -> np.ndarray:
        cell = boxes[0] // step_p, boxes[2] // step_t
        return boxes[:, ~(has[1][cell] | (has[0][cell] & has[2][cell]))]

    boxes = np.stack([p, ends[0], t, ends[1]]).reshape(4, -1).astype(_type(rows))
    for full, hidden, (panel, tile, kind) in _walk(rows, boxes, undecided):
        has[2][full[0] // step_p, full[2] // step_t] = True
        has[0][hidden[0] // step_p, hidden[2] // step_t] = True
        if panel.size:
            keys, visible = _trimmed(rows, panel, tile, kind)
            has[np.where(keys == 0, 0, np.where(visible < keys, 1, 2)), panel // step_p, tile // step_t] = True
    return np.where(has[1] | (has[0] & has[2]), 1, 2 * has[2]), step_p * rows.panel, step_t * TILE


def pairs(rows: Rows) -> int | None:
    """Visible pairs of query row and key, where a closed form exists: any and/or of half-planes in i, j and i - j."""
    p, planes = rows.problem, _planes(rows)
    if planes is None or not rows.count:
        return None if planes is None else 0
    first, last = p.q_starts[rows.item], p.q_starts[rows.item] + p.q_lengths[rows.item] - 1
    turns = np.array(sorted({first, last, *[i for i in _turns(rows, planes) if first <= i <= last]}))
    total = int(_union(rows, turns, planes).sum())
    # between two turns the count changes by as much with each row
    begins, ends = (x[np.diff(turns) > 1] for x in (turns[:-1] + 1, turns[1:] - 1))
    for a, b, x, y in zip(begins, ends, _union(rows, begins, planes), _union(rows, ends, planes), strict=True):
        total += (int(b) - int(a) + 1) * (int(x) + int(y)) // 2
    return total * rows.heads


def _planes(rows: Rows) -> list[list[Any]] | None:
    """Returns the visible pairs, `causal` aside, as a union of intersections of half-planes; None if not so."""
    p = rows.problem
    if _hiding(p) is not None:
        return None
    unions = [()] if p.mask is None else terms(p.mask.root, True, lambda node: id(node) in rows.integers.followed)
    planes = None if unions is None else [[_plane(rows, atom) for atom in term] for term in unions]
    return None if planes is None or any([x is None for term in planes for x in term]) else planes


def _turns(rows: Rows, planes: list[list[Any]]) -> set[int]:
    """Positions of rows where ends of intervals cross, or half-planes of i alone begin; and those beside them."""
    p = rows.problem
    lines = {(0, p.k_start), (0, p.k_start - 1), (0, p.k_start + rows.keys - 1)} | ({(1, 0)} if p.causal else set())
    turns = set()
    for i_sign, j_sign, c in [plane for term in planes for plane in term]:
        if j_sign:
            lines.add((-j_sign * i_sign, -j_sign * c))
        elif i_sign:
            turns.add(-i_sign * c)
    turns |= {(d - c) // (a - b) for (a, c), (b, d) in itertools.combinations(lines, 2) if a != b}
    return {i + n for i in turns for n in range(-2, 3)}


def _plane(rows: Rows, atom: Any) -> tuple[int, int, int] | None:
    """(i's sign, j's sign, constant) of a half-plane whose constant is one number here; None otherwise."""
    if not isinstance(atom, HalfPlane):
        return None
    constant = atom.constant
    for sign, node in atom.rest:
        if node.uses & {"h", "s"}:
            return None
        constant += sign * int(evaluate(node, {"b": np.int64(rows.item)}))
    return atom.i_sign, atom.j_sign, constant


def _union(rows: Rows, i: np.ndarray, planes: list[list[Any]]) -> np.ndarray:
    """Counts the keys of each row that lie in any of the terms' intervals."""
    start = rows.problem.k_start
    most = start + rows.limit(i) - 1
    lows, highs = [], []
    for term in planes:
        low, high = np.full(i.shape, start), most.copy()
        for i_sign, j_sign, c in term:
            if j_sign:
                bound = i_sign * i + c
                low = np.maximum(low, bound) if j_sign < 0 else low
                high = np.minimum(high, -bound) if j_sign > 0 else high
            else:
                high = np.where(i_sign * i + c <= 0, high, start - 1)
        lows.append(low)
        highs.append(high)
    if len(planes) == 1:
        return np.maximum(highs[0] - lows[0] + 1, 0)
    low, high = np.array(lows), np.array(highs)
    order = np.argsort(low, axis=0)
    low, high = (np.take_along_axis(x, order, axis=0) for x in (low, high))
    total, covered = np.zeros_like(i), np.full(i.shape, start - 1)
    for a, b in zip(low, high, strict=True):
        total += np.maximum(b - np.maximum(a, covered + 1) + 1, 0)
        covered = np.maximum(covered, b)
    return total


def counted_pairs(rows: Rows, watch: Callable[[int], None] = lambda tiles: None) -> int:
    """Visible pairs, element by element in mixed tiles: the time grows with those. `watch` hears how many were done."""
    p, total, count = rows.problem, Tally(), 0
    for panels, keys in _mixed(rows, total):
        for panel, tile in zip(panels.tolist(), keys.tolist(), strict=True):
            r = np.arange(rows.begin(panel), rows.end(panel))
            i = (p.q_starts[rows.item] + r // rows.heads)[:, None]
            j = p.k_start + np.arange(tile * TILE, min((tile + 1) * TILE, rows.keys))[None, :]
            h = (rows.head * rows.heads + r % rows.heads)[:, None]
            count += int(seen(p, {"b": np.int64(rows.item), "h": h, "i": i, "j": j}).sum())
        watch(len(panels))
    return count + (total.full_pairs if _hiding(p) is None else 0)


def seen(p: Problem, at: dict[str, Any]) -> np.ndarray:
    """Returns whether each pair of positions, item and head is visible; the arrays of `at` broadcast."""
    shown = at["j"] <= at["i"] if p.causal else np.ones(np.broadcast_shapes(*(np.shape(x) for x in at.values())), bool)
    number, hidden = np.float64 if p.dtype == "float64" else np.float32, _hiding(p)
    if p.mask is not None:
        shown = shown & evaluate(p.mask.root, at, number, seen=False)
    return shown if hidden is None else shown & ~evaluate(hidden, at, number, seen=False)


def _hiding(p: Problem) -> Node | None:
    """The condition under which a score is -inf, if it is written so and does not depend on the scores."""
    score = p.roots[1]
    condition = hiding_condition(score)
    if score is None or condition is None or "s" in condition.uses or score.args[1].value != -np.inf:
        return None
    return condition
