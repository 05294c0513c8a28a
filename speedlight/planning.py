"""Problem × machine → Plan: tiles, FLOPs, bytes, workspace, and the time this machine cannot beat. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from .arrays import STORAGE_BYTES
from .expressions.tree import lazily
from .machine import Isa, blocking, level2_bytes
from .problem import SPAN, TILE, Problem
from .tiles import Rows, counted_pairs, integers_of, pairs, tally

_TASK_FLOPS = 800_000_000

BLOCK = 16  # keys of a block of a KVCache: one after another for each element

_PARTIALS = 64 << 20  # bytes of what parts of heads leave for the last of them, at most
_TASK_ROWS = 128  # of all heads of a decode task: their states stay in the second-level cache
DECODE_ROWS = 16  # query rows of a kv head for which reading keys takes longer than computing

# Side by side, two workers' scratches cost 2 to 4 % (measured; prefetchers run past the end of one into the other)
_APART = (1 << 20) + 512


def lanes_of(isa: Isa, storage: str) -> int:
    return isa.vector_bytes // (8 if storage == "f64" else 4)


def register_rows(isa: Isa, vectors: int) -> int:
    """Keys (or value columns) of a register tile: rows x vectors accumulators leave room for the panel's vectors."""
    return min(8, (isa.registers - 4) // vectors) if isa.registers >= 32 else 4


def uses_dot(isa: Isa, storage: str) -> bool:
    return storage == "bf16" and isa.bf16_dot


def dots(problem: Problem, isa: Isa) -> bool:
    return uses_dot(isa, problem.storage) and not problem.quantised


ENDLESS = 1 << 62  # tokens or pages: there is no end


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values that are read page by page: distances in bytes.

    Each item has a list of pages of its own, with SLACK numbers past the last: they are read, not used.
    """

    lanes: bool  # in the blocks of a cache, else row by row
    size: int  # tokens of a page
    k_head: int
    k_page: int
    k_row: int
    v_head: int
    v_page: int
    v_row: int
    k_column: int = 0
    v_column: int = 0
    k_item: int = 0
    v_item: int = 0
    fixed: int = ENDLESS  # entries of a list before those that are a ring
    ring: int = 1


SLACK = 8
PLACES = 192  # addresses of a tile's keys, and of what is fetched ahead of it, and what one store may write past them


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the CPU engine runs a problem: the panel, the block of panels that shares tiles, and the scratch."""

    isa: Isa
    storage: str
    vectors: int
    panels: int
    threads: int
    tickets: int
    stage_keys: bool
    stage_values: bool
    width: int  # value columns, rounded up to the register tile
    offsets: tuple[tuple[str, int], ...]  # the at_… fields
    panel_bytes: int
    scratch_bytes: int  # of one worker
    parts: int = 0  # of the spans of one kv head, for the decode kernel; 0 for the forward kernel
    partial_bytes: int = 0  # what the parts of one task's kv heads leave for the last of them
    heads: int = 1  # kv heads of one task

    @property
    def panel(self) -> int:
        return self.vectors * lanes_of(self.isa, self.storage) if self.vectors else self.panels

    @property
    def block_rows(self) -> int:
        """Query rows of one task."""
        return self.panel * self.panels if self.vectors else self.panels

    @property
    def scratch_stride(self) -> int:
        """From one worker's scratch to the next; the gap is never touched, so it costs addresses, not memory."""
        return self.scratch_bytes + _APART


def schedule(
    problem: Problem,
    isa: Isa,
    threads: int,
    strided_keys: bool = False,
    strided_values: bool = False,
    *,
    pages: Pages | None = None,
    heads_adjoin: bool = False,
) -> Schedule:
    """Chooses the panel that wastes least, then as many panels per block as the second-level cache and the threads
    allow.

    `heads_adjoin`: a token's heads lie side by side, and tokens apart.
    """
    if _decodes(problem, isa, strided_keys or strided_values):
        return _decode_schedule(problem, isa, threads, heads_adjoin)
    storage = problem.storage
    lanes = lanes_of(isa, storage)
    rows = [n * problem.group for n in problem.q_lengths]
    dot = dots(problem, isa)
    wants = blocking(isa, dot=dot)
    vectors = min((3, 2, 1), key=lambda n: sum(-(-r // (lanes * n)) for r in rows) * n / wants.worth[n - 1])
    direct = (dot or storage in ("f32", "f64")) and not problem.quantised
    cached = pages is not None and pages.lanes
    stage_keys = pages is not None or not direct or strided_keys or (dot and problem.head_dim % 2 == 1)
    stage_values = not direct or strided_values or (not cached and (dot or pages is not None))
    panel_count = sum(-(-r // (lanes * vectors)) for r in rows) * problem.kv_heads
    layout = _layout(
        problem, isa, vectors, stage_keys, stage_values or cached
    )  # a cache's values, where pages part a tile
    fits = (level2_bytes() * 5 // 8 - layout["fixed"]) // layout["panel"]
    # a task of a few milliseconds: threads wait for each other at the end of a region; a staged tile wants more users
    keys = max(problem.k_lengths, default=0)
    work = lanes * vectors * max(keys, 1) * (problem.head_dim + problem.value_dim) * 2
    wanted = max(4 if stage_keys or stage_values else 2, _TASK_FLOPS * (2 if dot else 1) // work)
    panels = max(1, min(wants.panels, fits, wanted, panel_count // (8 * threads)))
    blocks = sum(-(-r // (lanes * vectors * panels)) for r in rows) * problem.kv_heads
    used = max(1, min(threads, blocks))
    blocks += sum(-(-r // (lanes * vectors * panels)) for r in _unused(problem)) * problem.kv_heads
    offsets = tuple((k, n) for k, n in layout.items() if k.startswith("at_"))
    scratch = _up(layout["fixed"] + panels * layout["panel"], 4096)
    return Schedule(
        isa,
        storage,
        vectors,
        panels,
        used,
        blocks,
        stage_keys,
        stage_values,
        layout["width"],
        offsets,
        layout["panel"],
        scratch,
    )


def _decodes(problem: Problem, isa: Isa, strided: bool) -> bool:
    """Whether the decode kernel runs a problem: few rows, values of at least a vector, side by side."""
    if strided or problem.rows is not None:
        return False
    most = max(problem.q_lengths, default=0) * problem.group
    return 0 < most <= DECODE_ROWS and problem.value_dim >= lanes_of(isa, problem.storage)


def _decode_schedule(problem: Problem, isa: Isa, threads: int, heads_adjoin: bool) -> Schedule:
    """One task for each kv head, or several that share its spans where heads are few.

    Where heads adjoin, a task takes several of them through each tile: memory is then read in longer pieces (a page of
    virtual memory holds all heads of a token, so that one head alone would need as many of them as there are tokens).
    """
    storage, lanes = problem.storage, lanes_of(isa, problem.storage)
    number, dot = 8 if storage == "f64" else 4, dots(problem, isa)
    rows = max(problem.q_lengths) * problem.group
    heads = sum(1 for n in problem.q_lengths if n) * problem.kv_heads
    spans = -(-max(problem.k_lengths, default=0) // SPAN)
    together = 1
    if heads_adjoin:
        items = max(1, heads // max(1, problem.kv_heads))
        enough = 4 * threads if threads > 1 else 1  # tasks
        fits = [n for n in range(1, problem.kv_heads + 1) if problem.kv_heads % n == 0 and n * rows <= _TASK_ROWS]
        together = max((n for n in fits if items * (problem.kv_heads // n) * max(1, spans) >= enough), default=1)
    tasks = heads // together
    parts = max(1, min(spans, -(-4 * threads // max(1, tasks)))) if tasks < 4 * threads and threads > 1 else 1
    slots = -(-problem.value_dim // lanes)
    units = (problem.head_dim + 1) // 2 if dot else problem.head_dim
    if tasks * spans * together * rows * (slots + 1) * lanes * number > _PARTIALS:
        parts = 1  # a window over a sequence without end: what its spans leave must not grow with it
    state = rows * (slots + 1) * lanes * number
    at_keys = _up(TILE * rows * number, 64)  # of queries
    at_values = _up(at_keys + together * rows * units * number, 64)  # of a tile's sums
    at_span = _up(at_values + rows * slots * lanes * number, 64)
    at_total = at_span + together * state
    at_rows = at_total + together * state
    at_places = _up(at_rows + rows * 24, 64)
    names = {"at_keys": at_keys, "at_values": at_values, "at_span": at_span, "at_total": at_total, "at_rows": at_rows}
    names["at_places"] = at_places
    used = max(1, min(threads, tasks * parts))
    partial = spans * together * state if parts > 1 else 0
    return Schedule(
        isa,
        storage,
        0,
        rows,
        used,
        tasks * parts,
        False,
        False,
        slots,
        tuple(names.items()),
        0,
        _up(at_places + 2 * PLACES * 8, 4096),
        parts,
        partial,
        together,
    )


def _unused(problem: Problem) -> list[int]:
    """Rows of out, in each item's group of heads, that have no query: they become 0."""
    return [] if problem.rows is None else [(problem.rows - n) * problem.group for n in problem.q_lengths]


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _layout(problem: Problem, isa: Isa, vectors: int, stage_keys: bool, stage_values: bool) -> dict[str, int]:
    """Where everything lies in a worker's scratch, in bytes; scores come first."""
    number = 8 if problem.storage == "f64" else 4
    dot = dots(problem, isa)
    panel = vectors * lanes_of(isa, problem.storage)
    row = panel * number
    units = (problem.head_dim + 1) // 2 if dot else problem.head_dim
    rows = register_rows(isa, vectors)
    width = _up(problem.value_dim, rows)
    at_check = TILE * row
    at_partial = at_check + 3 * row
    at_keys = _up(at_partial + width * row, 64)
    at_values = _up(at_keys + stage_keys * TILE * units * number, 64)
    at_places = _up(at_values + stage_values * (TILE // 2 if dot else TILE) * problem.value_dim * number, 64)
    at_scales = at_places + 2 * PLACES * 8
    at_panels = at_scales + problem.quantised * 2 * TILE * 4
    at_total = _up(64 + units * row, 64)
    at_span = _up(at_total + (2 + width) * row, 64)
    at_limits = _up(at_span + (2 + width) * row, 64)
    at_rows = at_limits + panel * 8
    names = {
        "at_check": at_check,
        "at_partial": at_partial,
        "at_keys": at_keys,
        "at_values": at_values,
        "at_panels": at_panels,
    }
    names |= {"at_places": at_places, "at_scales": at_scales}
    names |= {"at_total": at_total, "at_span": at_span, "at_limits": at_limits, "at_rows": at_rows}
    return names | {"fixed": at_panels, "panel": _up(at_rows + panel * 40, 64), "width": width}


@dataclass(frozen=True)
class Plan:
    """What a call will do, known before it runs. `print(plan)` shows it as a table.

    FLOPs count a multiply-add as two and only visible query-key pairs, except `tile_flops`, which is what is computed.
    visible_pairs and flops are None where only counting would tell (`plan(…, exact=True)` counts).
    Bytes are the least that must be moved: every input once, every output once. Seconds are what this machine's
    measured peak and bandwidth allow at best.
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
    how: Schedule,
    kernel: str,
    peak: float | None = None,
    bandwidth: float | None = None,
    *,
    exact: bool = False,
) -> Plan:
    """The plan's figures, exactly: what the kernel counts when it runs is the same."""
    if problem.mask is None and problem.score is None:
        totals = np.zeros(6, dtype=object)
        for key, times in _distinct(problem).items():
            totals += np.array(_count_item(*key, problem.causal, problem.group, how.panel), dtype=object) * times
        visible, full, mixed, skipped, panel_keys, mixed_keys = (int(x) * problem.kv_heads for x in totals)
    else:
        visible, full, mixed, skipped, panel_keys, mixed_keys = _count_expressions(problem, how.panel, exact)
    per_pair = 2 * (problem.head_dim + problem.value_dim)
    size = STORAGE_BYTES[problem.storage]
    q_rows, k_rows = sum(problem.q_lengths) * problem.q_heads, sum(problem.k_lengths) * problem.kv_heads
    number = 8 if problem.storage == "f64" else 4
    square = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
    return Plan(
        problem=problem,
        engine="cpu",
        isa=how.isa.name,
        kernel=kernel,
        threads=how.threads,
        panel=how.panel,
        visible_pairs=visible,
        flops=None if visible is None else visible * per_pair,
        tile_flops=panel_keys * how.panel * per_pair,
        tiles_full=full,
        tiles_mixed=mixed,
        tiles_skipped=skipped,
        panel_keys=panel_keys,
        full_flops=(panel_keys - mixed_keys) * how.panel * per_pair,
        mixed_flops=mixed_keys * how.panel * per_pair,
        skipped_flops=(_all_keys(problem, how.panel) - panel_keys) * how.panel * per_pair,
        bytes_read=(q_rows * problem.head_dim + k_rows * (problem.head_dim + problem.value_dim)) * size,
        bytes_written=q_rows * problem.value_dim * size + q_rows * number,
        workspace_bytes=how.scratch_bytes * how.threads + how.partial_bytes * (how.tickets // max(1, how.parts)),
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


__all__ = [
    "SPAN",
    "TILE",
    "Pages",
    "Plan",
    "Schedule",
    "count",
    "dots",
    "lanes_of",
    "register_rows",
    "schedule",
    "uses_dot",
]
