"""Calls on a GPU: a problem becomes launches of the attention kernel, on PyTorch's current stream."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..host.rounding import standard
from ..problem.problem import Problem
from .dropping import words_of
from .forward import attend
from .keys import Keys, axes, fits_tma
from .launch import Launch, named_strides, start
from .schedule import Schedule, allows_tma, capability, check, most_rows, power_above, schedule, tile_class
from .sequence import ARRAYS, FLAG, PAGES, RECOMPUTE, RING
from .splits import combine
from .tiles import Tile
from .uploads import Classes, Grid, Uploads, classes_of, uploads_of

REPAIR_GRID = 128  # the repair launch scans flags, and usually exits


@dataclass(frozen=True, slots=True)
class Part:
    """Items of a call that take one tile: all, or a class of its packed sequences."""

    problem: Problem
    layout: str
    how: Schedule
    uploads: Uploads
    items: list[int] | None = None  # their indices in the call; None: all

    def run(self, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        keys = keys if self.items is None else keys.of(self.items)
        wrong = self.uploads.new_flags(q.device)
        for each in self.launches(q, keys, out, lse, wrong):
            start(each)
        self.uploads.check_flags(wrong)

    @standard
    def launches(
        self, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None, wrong: torch.Tensor | None
    ) -> list[Launch]:
        """The attention kernel, the same again for flagged blocks, and the merging of splits."""
        p, how, device = self.problem, self.how, q.device
        tile, blocks = how.tile, how.row_blocks * how.splits * (p.q_heads // how.pack) * p.batch
        producer = self._has_producer(q, keys)
        flags = (torch.zeros if producer else torch.empty)(blocks, dtype=torch.int32, device=device)
        # a split's tiles start at the split, and the host may not know the device's lengths: then kernels classify
        classes = Classes()
        if not how.short and keys.lengths is None:
            classes = classes_of(p, self.uploads, Grid(how.rows, tile.keys, how.pack), device)
        shared = self._shared(keys, out, lse, device)
        first = {
            **shared, "q": q, "flags": flags, "blocks": blocks, "row_blocks": how.row_blocks, "q_start": p.q_starts[0],
            "at_end": int(not keys.placed), "k_start": p.k_start, "wrong": wrong,
            "sinks": None if how.short else self.uploads.sinks, **named_strides("q", axes(q, self.layout)),
            **_key_arguments(keys), **self._constants(keys), **self._program(), **words_of(p), **classes._asdict(),
            "NONFINITE": int(FLAG), "PRODUCER": producer,
        }  # fmt: skip
        again = first | {"NONFINITE": int(RECOMPUTE), "PRODUCER": False}
        warps, registers = (tile.warps // 2, None) if producer else (tile.warps, tile.registers)
        made = [
            Launch(attend, (blocks,), first, warps, tile.stages, registers),
            # apart, since it wants more registers
            Launch(attend, (min(blocks, REPAIR_GRID),), again, tile.warps, tile.stages),
        ]
        if how.short:
            rows = most_rows(p) * how.pack
            more = {"sinks": self.uploads.sinks, "rows": rows, "padded_rows": how.row_blocks * how.rows}
            made.append(Launch(combine, (rows * p.kv_heads * p.batch,), shared | more, 4, 2))
        return made

    def _has_producer(self, q: torch.Tensor, keys: Keys) -> bool:
        """Returns whether a group of warps loads keys for the others.

        Every tile must be whole and every row must see a key, by causality alone; q is read by a descriptor, too.
        """
        p, how = self.problem, self.how
        if not how.tile.producer or how.short or not self._uses_tma(keys):
            return False
        is_plain = p.mask is None and p.score is None and p.sinks is None and not p.dropout and _factor(p)[1] == 1
        is_alike = self.uploads.items is None and keys.lengths is None and p.rows is None
        if not (is_plain and is_alike):
            return False
        q_len, k_len = p.q_lengths[0], p.k_lengths[0]
        if q_len % how.rows or k_len % how.tile.keys or not k_len:
            return False
        sees_none = how.causal and p.q_starts[0] < p.k_start
        return not sees_none and fits_tma(q, axes(q, self.layout))

    def _uses_tma(self, keys: Keys) -> bool:
        return self.how.tile.use_tma and allows_tma() and keys.fit_tma(max(self.problem.k_lengths))

    def _shared(self, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None, device: torch.device) -> dict[str, Any]:
        """Arguments that the attention kernel and `combine` share."""
        p, how = self.problem, self.how
        partial = stats = None
        if how.short:
            count = p.batch * p.kv_heads * how.splits * how.row_blocks * how.rows
            partial = torch.empty(count * p.value_dim, dtype=torch.float32, device=device)
            stats = torch.empty(count * 2, dtype=torch.float32, device=device)
        strides = (0, 0, 0) if lse is None else lse.stride() if lse.ndim == 3 else (0, *lse.stride())
        return {
            "out": out, "lse": lse, "items": self.uploads.items, "lengths": keys.lengths,
            "partial": partial, "stats": stats,
            **named_strides("o", axes(out, self.layout)), **named_strides("l", strides),
            "q_len": p.q_lengths[0], "k_len": p.k_lengths[0], "out_rows": p.rows,
            "divisor": p.dropout_divisor if p.dropout else None,
            "kv_heads": p.kv_heads, "group": p.group, "splits": how.splits,
            "PACK": how.pack, "DV": p.value_dim, "BLOCK_DV": max(16, power_above(p.value_dim)),
        }  # fmt: skip

    def _constants(self, keys: Keys) -> dict[str, Any]:
        """Returns the constants that the attention kernel is compiled for."""
        p, how = self.problem, self.how
        return {
            "D": p.head_dim, "BLOCK_D": max(16, power_above(p.head_dim)), "BM": how.rows, "BN": how.tile.keys,
            "CAUSAL": how.causal, "PRECISION": how.precision, "HIDING": how.hiding, "SPLIT": how.short,
            "USE_TMA": self._uses_tma(keys),
            "MEMORY": int(PAGES if keys.pages is not None else RING if keys.ring else ARRAYS),
        }  # fmt: skip

    def _program(self) -> dict[str, Any]:
        """Returns the factor of scores, and the functions of the mask and the score."""
        factor, sign = _factor(self.problem)
        functions = {n: self.uploads.functions.get(n) for n in ("invariants", "apply", "bounds")}
        numbers = {"ints": self.uploads.words, "floats": self.uploads.floats}
        return {"factor": factor, "SIGN": sign, "scale": float(self.problem.scale)} | functions | numbers


@dataclass(frozen=True, slots=True)
class Call:
    """A problem on a device; a problem without rows has no parts."""

    parts: tuple[Part, ...]

    def run(self, q: torch.Tensor, keys: Keys, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Tensors of the shapes and dtypes that were prepared for, and of any strides."""
        for part in self.parts:
            part.run(q, keys, out, lse)


def prepare(
    problem: Problem,
    layout: str,
    device: str,
    keys: Keys,
    *,
    cu_q: tuple[int, ...] | None = None,
    cu_k: tuple[int, ...] | None = None,
    precision: str = "ieee",
    tile: Tile | None = None,
) -> Call:
    """Checks what the engine can do, chooses tiles (or takes `tile`), and uploads what the problem needs."""
    check(problem, device, precision)
    if not problem.batch or not problem.q_heads or not most_rows(problem):
        return Call(())
    have = capability(device)
    if cu_q is None:
        how = schedule(problem, keys, have, precision, tile)
        return Call((Part(problem, layout, how, uploads_of(problem, device, None)),))
    firsts = cu_q[:-1], cu_k[:-1] if cu_k is not None else (0,) * problem.batch
    parts = []
    for items in _tile_classes(problem):
        theirs = problem if items is None else _of_items(problem, items)
        rows = firsts if items is None else tuple(tuple(x[i] for i in items) for x in firsts)
        how = schedule(theirs, keys, have, precision, tile)
        parts.append(Part(theirs, layout, how, uploads_of(theirs, device, rows), items))  # type: ignore[arg-type]
    return Call(tuple(parts))


def _tile_classes(p: Problem) -> list[list[int]] | list[None]:
    """Packed sequences by the tiles that they take, so that none depends on its neighbours; [None] where all are of one
    class. Of several classes, sequences without a query are left out.
    """
    classes: dict[int, list[int]] = {}
    for i, n in enumerate(p.q_lengths):
        if n:
            classes.setdefault(tile_class(n * p.group), []).append(i)
    return list(classes.values()) if len(classes) > 1 else [None]


def _of_items(p: Problem, items: list[int]) -> Problem:
    names = p.items or tuple(range(p.batch))
    q_lengths, k_lengths, q_starts, names = (
        tuple(x[i] for i in items) for x in (p.q_lengths, p.k_lengths, p.q_starts, names)
    )
    return replace(p, q_lengths=q_lengths, k_lengths=k_lengths, q_starts=q_starts, items=names)


def _key_arguments(keys: Keys) -> dict[str, Any]:
    """Keys and values as arguments of the attention kernel."""
    scales = (0, 0, 0) if keys.k_scales is None else keys.k_scales.stride()
    return {
        "k": keys.k, "v": keys.v, "k_scales": keys.k_scales, "v_scales": keys.v_scales,
        **named_strides("k", keys.k_strides), **named_strides("v", keys.v_strides), **named_strides("s", scales),
        "pages": keys.pages, "page_size": keys.page_size, "page_count": keys.page_count, "status": keys.status,
        "table_row": 0 if keys.pages is None else keys.pages.stride(0),
        "table_pages": 0 if keys.pages is None else keys.pages.shape[1],
        "ring_first": keys.ring_first, "ring": keys.ring,
    }  # fmt: skip


def _factor(p: Problem) -> tuple[float, int]:
    """Returns the factor of scores in the exponent, never negative, and the factor of q before."""
    if p.score is not None:
        return math.log2(math.e), 1
    c = p.scale * math.log2(math.e)
    return (abs(c), 1 if c > 0 else -1) if c else (1.0, 0)
