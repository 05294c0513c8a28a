"""The work of a problem: tiles, pairs, keys and bytes, of all heads of all items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..arrays.dtypes import STORAGE_BYTES
from ..errors import UnsupportedError
from ..host.machine import number_bytes
from .problem import TILE, Problem
from .tiles import Rows, counted_pairs, integers_of, lead_of, pairs, tally

_MOST_ROWS = 1 << 62  # of a kv head, that 64 bits number


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
    """Counts the work of all heads of all items; items and heads that nothing tells apart are counted once.

    `exact`: pairs are counted one by one where no closed form tells; `watch` hears how many tiles' were, since it
    heard last. `backward`: of a pass back, Rows `alone`.
    """
    uses = frozenset[str]().union(*(x.root.uses for x in (problem.mask, problem.score) if x is not None))
    items: dict[Any, list[int]] = {}
    for item, key in enumerate(zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True)):
        items.setdefault((key, item if "b" in uses else 0), []).append(item)
    columns = _columns(problem, backward)[0]
    heads, each = (range(columns), 1) if "h" in uses else (range(min(1, columns)), columns)
    visible: int | None = 0
    sums, numbers = [0] * 5, integers_of(problem)
    for equal in items.values():
        for head in heads:
            rows, times = Rows(problem, equal[0], head, panel, numbers, backward), len(equal) * each
            each_tally = tally(rows)
            if rows.lead + rows.count >= _MOST_ROWS:
                raise UnsupportedError(
                    f"q_heads: expected fewer heads of a key's, or queries, to plan; got {rows.count} rows."
                )
            tiles = -(-rows.keys // TILE) * rows.panels
            full, mixed = each_tally.full, each_tally.mixed
            for n, x in enumerate((full, mixed, tiles - full - mixed, each_tally.keys, each_tally.mixed_keys)):
                sums[n] += x * times
            shown = pairs(rows)
            if shown is None and exact:
                shown = counted_pairs(rows, lambda tiles, times=times: watch(tiles * times))
            visible = None if visible is None or shown is None else visible + shown * times
    return Work(visible, *sums)


def all_panel_keys(problem: Problem, panel: int, *, backward: bool = False) -> int:
    """Panel-keys if nothing were skipped."""
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
    size = STORAGE_BYTES[problem.storage]
    keys = max(problem.k_lengths, default=0) if problem.shared else sum(problem.k_lengths)
    q_rows, k_rows = sum(problem.q_lengths) * problem.q_heads, keys * problem.kv_heads
    of_keys = k_rows * (problem.head_dim + problem.value_dim) * STORAGE_BYTES[problem.key_storage]
    read = q_rows * problem.head_dim * size + of_keys
    return read, q_rows * problem.value_dim * size + q_rows * number_bytes(problem.storage)


def least_backward_bytes(problem: Problem) -> tuple[int, int]:
    """Returns a backward pass's least bytes: q, k, v, out, lse and d_out are read, dq, dk and dv written."""
    size = STORAGE_BYTES[problem.storage]
    read, out = least_bytes(problem)
    q_rows = sum(problem.q_lengths) * problem.q_heads
    return read + out + q_rows * problem.value_dim * size, read


def materialised_bytes(problem: Problem) -> int:
    """Returns the bytes of scores and weights in memory."""
    return 2 * all_pairs(problem) * STORAGE_BYTES[problem.storage]
