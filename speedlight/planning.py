"""Plans: tiles, FLOPs, bytes, workspace, and the time this machine cannot beat. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import STORAGE_BYTES
from .expressions.tree import lazily
from .machine import number_bytes
from .problem import TILE, Problem
from .tiles import Rows, counted_pairs, integers_of, pairs, tally


class Run(NamedTuple):
    """What an engine says of how it runs a problem."""

    isa: str
    kernel: str
    threads: int
    panel: int  # query rows that go through a tile together
    workspace_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a call will do, known before it runs. `print(plan)` shows it as a table.

    FLOPs count a multiply-add as two and only visible query-key pairs, except `tile_flops`, which is what is computed.
    visible_pairs and flops are None where only counting would tell (`plan(…, exact=True)` counts).
    Bytes are the least that must be moved: every input once, every output once. Seconds are what this machine's
    measured peak and bandwidth allow at best.

    >>> import speedlight as sl
    >>> p = sl.plan(q_heads=8, q_len=1024, head_dim=64, causal=True)
    >>> p.visible_pairs, p.flops == p.visible_pairs * 4 * 64
    (4198400, True)
    """

    problem: Problem
    engine: str
    isa: str
    kernel: str
    threads: int
    panel: int
    visible_pairs: int | None
    flops: int | None
    tile_flops: int
    tiles_full: int
    tiles_mixed: int
    tiles_skipped: int
    panel_keys: int
    full_flops: int
    mixed_flops: int
    skipped_flops: int
    bytes_read: int
    bytes_written: int
    workspace_bytes: int
    materialised_bytes: int
    peak_flops: float | None = None  # per second, all threads of the plan
    bandwidth: float | None = None  # bytes per second
    tile_keys: int = TILE

    @property
    def memory_ratio(self) -> float:
        """Bytes of materialised attention over our workspace."""
        return self.materialised_bytes / self.workspace_bytes if self.workspace_bytes else float("inf")

    @lazily
    def seconds_at_least(self) -> float | None:
        """No run on this machine can be faster: the larger of compute and memory time."""
        if not self.peak_flops or not self.bandwidth:
            return None
        return max((self.flops or 0) / self.peak_flops, (self.bytes_read + self.bytes_written) / self.bandwidth)

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each line of the table."""
        p = self.problem
        lengths = f"q {_range(p.q_lengths)}, k {_range(p.k_lengths)}"
        mask = " and ".join(["causal"] * p.causal + ["masked"] * (p.mask is not None)) or "full"
        mask += ", scored" if p.score is not None else ""
        mask += f", dropout {p.dropout:g}" if p.dropout else ""
        visible = "? FLOP visible (exact=True counts)" if self.flops is None else f"{_si(self.flops, 'FLOP')} visible"
        unit, limits = ("thread", ", whatever the lengths") if self.engine == "cpu" else ("program", "")
        rows = [
            (
                "problem",
                f"{p.dtype}, batch {p.batch}, heads {p.q_heads}/{p.kv_heads}, {lengths}, dims "
                f"{p.head_dim}/{p.value_dim}, {mask}",
            ),
            (
                "engine",
                f"{self.engine}, {self.isa}, {self.threads:,} {unit}{'s' * (self.threads != 1)}, kernel {self.kernel}",
            ),
            ("flops", f"{visible}, {_si(self.tile_flops, 'FLOP')} computed"),
            (
                "tiles",
                f"{self.tiles_full:,} full, {self.tiles_mixed:,} mixed, {self.tiles_skipped:,} skipped, of "
                f"{self.panel} x {self.tile_keys}",
            ),
            (
                "tile flops",
                f"{_si(self.full_flops, 'FLOP')} full, {_si(self.mixed_flops, 'FLOP')} mixed, "
                f"{_si(self.skipped_flops, 'FLOP')} skipped",
            ),
            ("bytes", f"{_bytes(self.bytes_read)} read, {_bytes(self.bytes_written)} written, at least"),
            ("workspace", f"{_bytes(self.workspace_bytes)}{limits}"),
            (
                "materialised",
                f"{_bytes(self.materialised_bytes)} for scores and weights: {self.memory_ratio:,.1f} x the workspace",
            ),
        ]
        if self.seconds_at_least is not None and self.peak_flops and self.bandwidth:
            roofs = f"{self.peak_flops / 1e9:,.0f} GFLOP/s and {self.bandwidth / 1e9:,.1f} GB/s, measured"
            rows.append(("time at least", f"{_seconds(self.seconds_at_least)} ({roofs})"))
        return rows


def count(
    problem: Problem,
    run: Run,
    peak: float | None = None,
    bandwidth: float | None = None,
    *,
    exact: bool = False,
) -> Plan:
    """The plan's figures, exactly: what the kernel counts when it runs is the same."""
    if problem.mask is None and problem.score is None:
        totals = np.zeros(6, dtype=object)
        for key, times in _distinct(problem).items():
            totals += np.array(_count_item(*key, problem.causal, problem.group, run.panel), dtype=object) * times
        visible, full, mixed, skipped, panel_keys, mixed_keys = (int(x) * problem.kv_heads for x in totals)
    else:
        visible, full, mixed, skipped, panel_keys, mixed_keys = _count_expressions(problem, run.panel, exact)
    per_pair = 2 * (problem.head_dim + problem.value_dim)
    size = STORAGE_BYTES[problem.storage]
    q_rows, k_rows = sum(problem.q_lengths) * problem.q_heads, sum(problem.k_lengths) * problem.kv_heads
    square = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
    return Plan(
        problem=problem,
        engine="cpu",
        isa=run.isa,
        kernel=run.kernel,
        threads=run.threads,
        panel=run.panel,
        visible_pairs=visible,
        flops=None if visible is None else visible * per_pair,
        tile_flops=panel_keys * run.panel * per_pair,
        tiles_full=full,
        tiles_mixed=mixed,
        tiles_skipped=skipped,
        panel_keys=panel_keys,
        full_flops=(panel_keys - mixed_keys) * run.panel * per_pair,
        mixed_flops=mixed_keys * run.panel * per_pair,
        skipped_flops=(_all_keys(problem, run.panel) - panel_keys) * run.panel * per_pair,
        bytes_read=(q_rows * problem.head_dim + k_rows * (problem.head_dim + problem.value_dim)) * size,
        bytes_written=q_rows * problem.value_dim * size + q_rows * number_bytes(problem.storage),
        workspace_bytes=run.workspace_bytes,
        materialised_bytes=2 * square * size,
        peak_flops=peak,
        bandwidth=bandwidth,
    )


def _distinct(problem: Problem) -> dict[tuple[int, int, int], int]:
    """(q_len, k_len, first limit) of the items, and how often each comes."""
    found: dict[tuple[int, int, int], int] = {}
    for q_len, k_len, start in zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True):
        key = (q_len, k_len, start - problem.k_start)
        found[key] = found.get(key, 0) + 1
    return found


def _count_expressions(problem: Problem, panel: int, exact: bool) -> tuple[Any, ...]:
    """As _count_item, of all heads; items and heads that the expressions cannot tell apart are counted once."""
    uses = frozenset().union(*(x.root.uses for x in (problem.mask, problem.score) if x is not None))
    items: dict[Any, list[int]] = {}
    for item, key in enumerate(zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True)):
        items.setdefault((key, item if "b" in uses else 0), []).append(item)
    heads, each = (range(problem.kv_heads), 1) if "h" in uses else (range(min(1, problem.kv_heads)), problem.kv_heads)
    visible: int | None = 0
    sums, known = [0] * 5, integers_of(problem)
    for alike in items.values():
        for head in heads:
            rows, times = Rows(problem, alike[0], head, panel, known), len(alike) * each
            found = tally(rows)
            tiles = -(-rows.keys // TILE) * rows.panels
            for n, x in enumerate(
                (found.full, found.mixed, tiles - found.full - found.mixed, found.keys, found.mixed_keys)
            ):
                sums[n] += x * times
            shown = pairs(rows)
            shown = counted_pairs(rows) if shown is None and exact else shown
            visible = None if visible is None or shown is None else visible + shown * times
    return visible, *sums


def _all_keys(problem: Problem, panel: int) -> int:
    """Panel-keys if nothing were skipped."""
    lengths = zip(problem.q_lengths, problem.k_lengths, strict=True)
    return sum(-(-q * problem.group // panel) * k for q, k in lengths) * problem.kv_heads


@lru_cache(maxsize=256)
def _count_item(q_len: int, k_len: int, start: int, causal: bool, group: int, panel: int) -> tuple[int, ...]:
    """Of one kv head: visible pairs, full, mixed and skipped tiles, keys of all tiles, keys of mixed tiles."""
    rows = q_len * group
    first = np.arange(0, rows, panel, dtype=np.int64)
    last = np.minimum(first + panel, rows) - 1
    if causal:
        low, high = (np.clip(start + r // group + 1, 0, k_len) for r in (first, last))
        limits = np.clip(start + np.arange(q_len, dtype=np.int64) + 1, 0, k_len)
        pairs = int(limits.sum()) * group
    else:
        low = high = np.full(len(first), k_len, dtype=np.int64)
        pairs = rows * k_len
    run = -(-high // TILE)
    full = np.where(low < high, low // TILE, run)
    keys = int(high.sum())
    mixed_keys = int((high - np.where(low < high, full * TILE, high)).sum())
    tiles = -(-k_len // TILE) * len(first)
    return pairs, int(full.sum()), int((run - full).sum()), tiles - int(run.sum()), keys, mixed_keys


def _range(lengths: tuple[int, ...]) -> str:
    if not lengths:
        return "none"
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _si(x: float, unit: str) -> str:
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= factor:
            return f"{x / factor:.3g} {prefix}{unit}"
    return f"{x:.3g} {unit}"


def _bytes(x: float) -> str:
    for factor, unit in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if x >= factor:
            return f"{x / factor:.3g} {unit}"
    return f"{x:.0f} B"


def _seconds(x: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if x >= factor:
            return f"{x / factor:.3g} {unit}"
    return f"{x * 1e9:.3g} ns"
