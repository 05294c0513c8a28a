"""Plans of calls on a GPU, counted on the host: tiles as the kernel classifies them, bytes, workspace, least time."""

from __future__ import annotations

import datetime
import functools
from functools import partial
from typing import Any

import numpy as np
import torch

from ..expressions.program import may_hide, visibility
from ..host.machine import interpreting
from ..problem.plan import Plan, Roofs
from ..problem.problem import TILE, Problem
from ..problem.tiles import Many, integers_of
from ..problem.work import count, least_bytes, materialised_bytes
from .keys import Keys
from .schedule import capability, check, schedule

_TILES = 1 << 20  # classified at once


def plan(problem: Problem, device: torch.device, precision: str = "ieee", *, exact: bool = False) -> Plan:
    """The plan of a problem whose keys and values lie in arrays."""
    check(problem, str(device), precision)
    nowhere = torch.empty(0)
    how = schedule(problem, Keys(nowhere, nowhere, (0,) * 4, (0,) * 4), capability(str(device)), precision)
    visible = count(problem, TILE, exact=exact).visible_pairs  # no tile changes it
    read, written = least_bytes(problem)
    full, mixed, skipped, pairs = _tiles(problem, how.rows, how.tile.keys, how.pack)
    per_pair = 2 * (problem.head_dim + problem.value_dim)
    cell = how.rows * how.tile.keys * per_pair
    blocks = sum(-(-n * how.pack // how.rows) for n in problem.q_lengths) * (problem.q_heads // how.pack)
    splits = how.splits
    states = blocks * splits * how.rows * (problem.value_dim + 2) * 4 if how.short else 0
    number = "sm_{}{}".format(*how.capability)
    warps, stages = how.tile.warps, how.tile.stages
    return Plan(
        problem=problem,
        engine="cuda",
        isa=number if interpreting() else f"{number} {torch.cuda.get_device_name(device)}",
        kernel=f"attend_{problem.storage}_{how.rows}x{how.tile.keys}_w{warps}s{stages}",
        threads=blocks * splits,
        panel=how.rows,
        visible_pairs=visible,
        flops=None if visible is None else visible * per_pair,
        tile_flops=pairs * per_pair,
        tiles_full=full,
        tiles_mixed=mixed,
        tiles_skipped=skipped,
        panel_keys=pairs // how.rows,
        full_flops=full * cell,
        mixed_flops=pairs * per_pair - full * cell,
        skipped_flops=skipped * cell,
        bytes_read=read,
        bytes_written=written,
        workspace_bytes=states + 4 * blocks * splits,
        materialised_bytes=materialised_bytes(problem),
        tile_keys=how.tile.keys,
        measured=partial(_roofs, str(device), problem.dtype, how.precision),
    )


def _tiles(p: Problem, rows: int, keys: int, pack: int) -> tuple[int, int, int, int]:
    """Tiles visible as a whole, mixed and skipped, and pairs computed, of all blocks of rows."""
    hiding, heads = may_hide(*p.roots), p.q_heads // pack
    uses = p.uses if hiding else frozenset()
    totals, followed = np.zeros(4, dtype=object), integers_of(p).followed
    for item in range(p.batch):
        for head in range(heads if "h" in uses else 1):
            counts = _of_head(p, item, head, rows, keys, pack, hiding, followed)
            totals += np.array(counts, dtype=object) * (1 if "h" in uses else heads)
    return tuple(int(x) for x in totals)  # type: ignore[return-value]


def _of_head(
    p: Problem, item: int, head: int, rows: int, keys: int, pack: int, hiding: bool, followed: frozenset[int]
) -> tuple[int, int, int, int]:
    q_len, k_len, start = p.q_lengths[item], p.k_lengths[item], p.q_starts[item]
    blocks, tiles = -(-q_len * pack // rows), -(-k_len // keys)
    if not blocks or not tiles:
        return 0, 0, 0, 0
    first = start + np.arange(blocks) * rows // pack
    last = start + np.minimum((np.arange(1, blocks + 1) * rows - 1) // pack, q_len - 1)
    limits = [np.clip(x - p.k_start + 1, 0, k_len) if p.causal else np.full(blocks, k_len) for x in (first, last)]
    clear, end = limits[0] // keys, -(-limits[1] // keys)  # in tiles
    clear = np.minimum(clear, end)
    if not hiding:
        full, computed = int(clear.sum()), int(end.sum())
        return full, computed - full, blocks * tiles - computed, computed * rows * keys
    name = item if p.items is None else p.items[item]
    full = computed = 0
    step = max(1, _TILES // tiles)
    j = p.k_start + np.arange(tiles)[None, :] * keys
    for at in range(0, blocks, step):
        here = slice(at, at + step)
        box = {
            "b": (name, name),
            "h": (head * pack, head * pack + pack - 1),
            "i": (first[here, None], last[here, None]),
        }
        ops = Many(box | {"j": (j, np.minimum(j + keys, p.k_start + k_len) - 1)}, followed)
        partly, wholly = visibility(*p.roots, ops)
        inside = np.arange(tiles)[None, :] < end[here, None]
        computed += int((inside & partly).sum())
        full += int((inside & partly & wholly & (np.arange(tiles)[None, :] < clear[here, None])).sum())
    return full, computed - full, blocks * tiles - computed, computed * rows * keys


@functools.cache
def _roofs(device: str, dtype: str, precision: str) -> Roofs | None:
    """Measured once per process: a product of matrices, and a plain copy (bytes read and written), per second."""
    if interpreting():
        return None
    n = 8192 if dtype != "float32" else 4096
    x = torch.randn(n, n, device=device, dtype=getattr(torch, dtype))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision != "ieee"
    try:
        peak = 2 * n**3 / _seconds(lambda: x @ x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    a, b = (torch.empty(1 << 28, dtype=torch.float32, device=device) for _ in range(2))
    copied = 2 * a.nbytes / _seconds(lambda: a.copy_(b))
    return Roofs(peak / (3 if precision == "tf32x3" else 1), copied, datetime.date.today().isoformat())


def _seconds(call: Any) -> float:
    """The least of five samples."""
    call()
    samples = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return min(samples)
