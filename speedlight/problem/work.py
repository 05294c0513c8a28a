"""The work of a problem: tiles, pairs, keys and bytes, of all heads of all items."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..arrays.dtypes import STORAGE_BYTES
from ..errors import UnsupportedError
from ..host.machine import number_bytes
from .problem import TILE, Problem
from .tiles import Rows, counted_pairs, integers_of, lead_of, pairs, tally

_PANELS = 1 << 21  # that are counted at once


class Work(NamedTuple):
    """The work of all heads of all items, on panels of so many rows."""

    visible_pairs: int | None  # None where only counting tells
    full: int  # tiles
    mixed: int
    skipped: int
    panel_keys: int  # keys of the tiles that are computed, over all panels
    mixed_keys: int  # … of those that are computed under the mask


def count(
    problem: Problem,
    panel: int,
    *,
    exact: bool = False,
    backward: bool = False,
    watch: Callable[[int], None] = lambda tiles: None,
) -> Work:
    """Counts the work of a problem on panels of so many rows.

    exact: visible pairs are counted one by one where no closed form tells. watch: is called, now and then, with the
    number of tiles that were counted so since the last time. backward: counts a pass back, whose Rows are of one head.
    """
    if problem.mask is not None or problem.score is not None:
        return _count_expressions(problem, panel, exact, backward, watch)
    totals, (columns, heads) = np.zeros(len(Work._fields), dtype=object), _columns(problem, backward)
    for lengths, times in _distinct(problem, panel, backward).items():
        totals += np.array(_count_item(lengths, problem.causal, heads, panel, backward), dtype=object) * times
    return Work(*(int(x) * columns for x in totals))


def all_panel_keys(problem: Problem, panel: int, *, backward: bool = False) -> int:
    """Counts the keys of all panels if nothing were skipped."""
    columns, heads = _columns(problem, backward)
    items = zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True)
    return sum(-(-(lead_of(at, panel, backward) + q * heads) // panel) * k for q, k, at in items if q) * columns


def _columns(problem: Problem, backward: bool) -> tuple[int, int]:
    """Returns how many Rows an item has, and how many query heads each of them stands for."""
    return (problem.q_heads, 1) if backward else (problem.kv_heads, problem.group)


def all_pairs(problem: Problem) -> int:
    """Pairs of query row and key if nothing were hidden."""
    return sum(q * k for q, k in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads


def least_bytes(problem: Problem) -> tuple[int, int]:
    """(read, written): every input once, every output once."""
    size, q_rows = STORAGE_BYTES[problem.storage], sum(problem.q_lengths) * problem.q_heads
    read = q_rows * problem.head_dim * size + key_bytes(problem)
    return read, q_rows * problem.value_dim * size + q_rows * number_bytes(problem.storage)


def key_bytes(problem: Problem) -> int:
    """Returns the bytes of all keys and values."""
    keys = max(problem.k_lengths, default=0) if problem.shared else sum(problem.k_lengths)
    return keys * problem.kv_heads * (problem.head_dim + problem.value_dim) * STORAGE_BYTES[problem.key_storage]


def value_bytes(problem: Problem) -> int:
    """Returns the bytes of all values."""
    keys = max(problem.k_lengths, default=0) if problem.shared else sum(problem.k_lengths)
    return keys * problem.kv_heads * problem.value_dim * STORAGE_BYTES[problem.key_storage]


def token_bytes(problem: Problem, *, latent: bool) -> int:
    """Returns the bytes of a token's key and value in all heads; `latent`: the value is the key's first columns."""
    columns = problem.head_dim + (0 if latent else problem.value_dim)
    return problem.kv_heads * columns * STORAGE_BYTES[problem.key_storage]


def least_backward_bytes(problem: Problem) -> tuple[int, int]:
    """Returns a backward pass's least bytes: q, k, v, out, lse and d_out are read, dq, dk and dv written."""
    size = STORAGE_BYTES[problem.storage]
    read, out = least_bytes(problem)
    q_rows = sum(problem.q_lengths) * problem.q_heads
    return read + out + q_rows * problem.value_dim * size, read


def materialised_bytes(problem: Problem) -> int:
    """Returns the bytes of scores and weights in memory."""
    return 2 * all_pairs(problem) * STORAGE_BYTES[problem.storage]


class _Lengths(NamedTuple):
    """The lengths that an item's work depends on, where only `causal` hides keys."""

    q_len: int
    k_len: int
    start: int  # of the queries, less that of the keys
    lead: int  # lanes before the first query


def _distinct(problem: Problem, panel: int, backward: bool) -> dict[_Lengths, int]:
    """Returns the different lengths of items, and how many items have each."""
    counts: dict[_Lengths, int] = {}
    for q_len, k_len, start in zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True):
        key = _Lengths(q_len, k_len, start - problem.k_start, lead_of(start, panel, backward))
        counts[key] = counts.get(key, 0) + 1
    return counts


def _count_expressions(problem: Problem, panel: int, exact: bool, backward: bool, watch: Callable[[int], None]) -> Work:
    """Counts under expressions: items and heads that these cannot tell apart once."""
    visible: int | None = 0
    sums, numbers = [0] * 5, integers_of(problem)
    for item, head, times in problem.kinds(_columns(problem, backward)[0]):
        rows = Rows(problem, item, head, panel, numbers, backward)
        each = tally(rows)
        skipped = -(-rows.keys // TILE) * rows.panels - each.full - each.mixed
        for n, x in enumerate((each.full, each.mixed, skipped, each.keys, each.mixed_keys)):
            sums[n] += x * times
        shown = pairs(rows)
        if shown is None and exact:
            shown = counted_pairs(rows, lambda tiles, times=times: watch(tiles * times))
        visible = None if visible is None or shown is None else visible + shown * times
    return Work(visible, *sums)


@lru_cache(maxsize=256)
def _count_item(lengths: _Lengths, causal: bool, heads: int, panel: int, alone: bool) -> tuple[int, ...]:
    """Counts one Rows' visible pairs, full, mixed and skipped tiles, keys of all tiles, keys of mixed tiles."""
    q_len, k_len, start, lead = lengths
    rows = q_len * heads
    panels = -(-(rows + lead) // panel) if rows else 0
    visible = (_keys_up_to(start + q_len, k_len) - _keys_up_to(start, k_len)) * heads if causal else rows * k_len
    # between two of `ends`, panels `period` apart differ by the same number of keys, and of tiles
    period = heads * TILE // math.gcd(panel, heads * TILE) if causal else 1
    edges = [(x - start) * heads for x in (-1, 0, k_len - 1, k_len)] if causal else []
    near = {0, 1, panels - 1, panels, *[(x + lead) // panel + n for x in edges for n in range(-2, 3)]}
    ends = sorted([n for n in near if 0 <= n <= panels])
    if rows + lead >= 1 << 62 or any([min(b - a, 2 * period) > _PANELS for a, b in itertools.pairwise(ends)]):
        raise UnsupportedError(f"q_heads: expected fewer heads of a key's, or queries, to plan; got {q_len} x {heads}.")

    def counted(begin: int, end: int) -> np.ndarray:
        """Counts these panels' full tiles, all tiles, their keys, keys of mixed tiles."""
        first = np.arange(begin, end, dtype=np.int64) * panel - lead
        last = np.minimum(first + panel, rows) - 1
        low = high = np.full(len(first), k_len, dtype=np.int64)
        if causal:
            low, high = (np.clip(start + np.maximum(r, 0) // heads + 1, 0, k_len) for r in (first, last))
        if alone:  # lanes without a query see nothing
            low = np.where((first >= 0) & (last - first == panel - 1), low, 0)
        run = -(-high // TILE)
        full = np.where(low < high, low // TILE, run)
        mixed_keys = high - np.where(low < high, full * TILE, high)
        return np.array([_sum(x) for x in (full, run, high, mixed_keys)], dtype=object)

    total = np.zeros(4, dtype=object)
    for begin, end in itertools.pairwise(ends):
        times = (end - begin) // period
        if times < 3:
            total += counted(begin, end)
            continue
        one, next_one = counted(begin, begin + period), counted(begin + period, begin + 2 * period)
        total += one * times + (next_one - one) * (times * (times - 1) // 2) + counted(begin + times * period, end)
    full, run, keys, mixed_keys = map(int, total)
    return visible, full, run - full, -(-k_len // TILE) * panels - run, keys, mixed_keys


def _keys_up_to(n: int, most: int) -> int:
    """Sum of 1 … n, none of them beyond `most`."""
    within = min(max(n, 0), most)
    return within * (within + 1) // 2 + max(n - most, 0) * most


def _sum(x: np.ndarray) -> int:
    """Sum that does not wrap: numbers of one period are near the first."""
    return int((x - x[:1]).sum()) + len(x) * int(x[0]) if len(x) else 0
