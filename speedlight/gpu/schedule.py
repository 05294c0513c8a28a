"""Schedules of a device: the tile from the table, blocks of rows, splits of keys; and what it cannot run."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError, shown
from ..expressions.program import may_hide
from ..host.machine import interpreting
from ..host.shortcuts import setting
from ..problem.checks import check_precision
from ..problem.problem import Problem
from .keys import Keys
from .tiles import COARSE_DIMS, HEAD_DIMS, Tile, table_row

SHORT_ROWS = 64  # of a kv head: up to so many query rows, its keys are split among programs


@functools.cache
def capability(device: str) -> tuple[int, int]:
    return (9, 0) if interpreting() else torch.cuda.get_device_capability(device)


def allows_tma() -> bool:
    """Returns whether kernels may read keys by tensor descriptors, unless SPEEDLIGHT_GPU_TMA turns them off."""
    wanted = setting("SPEEDLIGHT_GPU_TMA")
    if wanted not in ("", "0", "1"):
        raise ArgumentError(
            f"SPEEDLIGHT_GPU_TMA: expected 0 (plain loads) or 1 (tensor descriptors where they fit); got "
            f"{shown(wanted)}."
        )
    return wanted != "0"


def check(problem: Problem, device: str, precision: Any) -> None:
    """Raises for what this engine cannot do on this device."""
    check_precision(precision)
    allows_tma()
    if problem.dtype == "float64":
        raise UnsupportedError(
            "q: expected float32, float16 or bfloat16 on a GPU; got float64. Use float32, or arrays on the CPU."
        )
    if max(problem.head_dim, problem.value_dim) > HEAD_DIMS:
        most = max(problem.head_dim, problem.value_dim)
        raise UnsupportedError(f"q: expected head dims up to {HEAD_DIMS} on a GPU; got {most}. Use arrays on the CPU.")
    have = capability(device)
    if have < (7, 5):
        raise UnsupportedError(
            f"{device}: expected compute capability 7.5 or newer; got {have[0]}.{have[1]}. Use tensors on the CPU."
        )
    if problem.widened and problem.dtype != "float32":
        raise UnsupportedError(
            f"q: expected float32, or {problem.widened}, as k has, on a GPU; got {problem.dtype}. Convert one of them."
        )
    if "bfloat16" in (problem.dtype, problem.widened) and have < (8, 0):
        raise UnsupportedError(
            f"{device}: expected compute capability 8.0 for bfloat16; got {have[0]}.{have[1]}. Use float16."
        )


@dataclass(frozen=True, slots=True)
class Schedule:
    """The attention kernel's schedule of a problem."""

    capability: tuple[int, int]
    tile: Tile
    precision: str  # of float32 products
    short: bool  # few rows: the heads of a group share a block, and its keys are split
    pack: int  # heads of a block
    rows: int
    row_blocks: int  # of an item and `pack` heads
    splits: int
    causal: bool  # and it hides something
    hiding: bool  # tiles are classified


def schedule(p: Problem, keys: Keys, have: tuple[int, int], precision: str, tile: Tile | None = None) -> Schedule:
    """Tiles depend on the number of queries, never on batch or keys: so a row's bits do not depend on its neighbours.
    `tile`: instead of the table's.
    """
    precision = precision if max(p.head_dim, p.value_dim) <= COARSE_DIMS else "ieee"
    most = most_rows(p)
    short = most * p.group <= SHORT_ROWS
    causal = p.causal and not _sees_all(p, keys)
    tile = tile or _tile(p, keys, have, precision, short, causal)
    pack = p.group if short else 1
    rows = max(tile.rows, power_above(most * pack)) if short else tile.rows
    splits = most_splits(keys.most if keys.lengths is not None else max(p.k_lengths, default=0)) if short else 1
    hiding = may_hide(*p.roots)
    return Schedule(have, tile, precision, short, pack, rows, -(-most * pack // rows), splits, causal, hiding)


def _tile(p: Problem, keys: Keys, have: tuple[int, int], precision: str, short: bool, causal: bool) -> Tile:
    row = table_row(have, p.dtype, max(p.head_dim, p.value_dim), precision)
    if short:
        return row.decode
    if p.quantised == "float8_e4m3fn" and have < (9, 0):  # what widens float8 takes registers
        return replace(row.paged, keys=max(row.paged.keys // 2, 16))
    if keys.pages is not None or keys.k_scales is not None:
        return row.paged
    if p.mask is not None or p.score is not None:
        return row.masked
    if causal:
        return row.masked if row.causal is None or p.dropout else row.causal
    return row.full


def most_rows(p: Problem) -> int:
    """Rows of an item's output, at most."""
    return max(p.q_lengths, default=0) if p.rows is None else p.rows


def tile_class(n_rows: int) -> int:
    """The class of packed sequences by their query rows of a kv head: one class takes one tile."""
    return min(max(power_above(n_rows), 16), 2 * SHORT_ROWS)


def power_above(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def most_splits(k_len: int) -> int:
    """Splits of the longest sequence, and at least as many as any shorter one has."""
    return max(1, min(-(-k_len // 256), 64), -(-k_len // 2048))


def _sees_all(p: Problem, keys: Keys) -> bool:
    """Returns whether causality hides nothing: one query, at the last key."""
    if keys.lengths is not None:
        return max(p.q_lengths) <= 1 and not keys.placed
    for q, k, start in zip(p.q_lengths, p.k_lengths, p.q_starts, strict=True):
        if q and start - p.k_start + 1 < k:
            return False
    return True
