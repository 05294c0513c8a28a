"""Backward calls on a GPU: a request becomes launches of the backward kernel, on PyTorch's current stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..arrays.memory import Array
from ..expressions.program import may_hide
from ..expressions.tables import Table
from ..expressions.tree import OF_KEYS
from ..host.rounding import standard
from ..problem.build import Stated
from ..problem.gradients import SINKS, Asked
from ..problem.operands import Operands
from ..problem.problem import LAYOUTS
from . import backward
from .backward import differentiate
from .dropping import words_of
from .gradient_sums import sum_rows, sum_terms
from .gradient_tiles import KEYS, PAIRS, ROWS
from .keys import arrays_of, axes
from .launch import Launch, named_strides, start
from .prepare import REPAIR_GRID
from .schedule import capability, check, power_above
from .sequence import FLAG, RECOMPUTE
from .tiles import COARSE_DIMS, GradientRow, Tile, gradient_row
from .uploads import Classes, Grid, Uploads, classes_of, uploads_of

_ELEMENTS = 4096  # of d_out that a program of sum_rows() has
_TERMS = 1 << 24  # of entries of a table that are stored at once
_MANY = 1024  # entries of a table


@dataclass(frozen=True, slots=True)
class Gradients:
    """A backward call on a device."""

    request: Asked
    layout: str
    precision: str
    firsts: tuple[tuple[int, ...], tuple[int, ...]] | None  # of packed sequences, their first rows in q and in k
    uploads: Uploads
    capability: tuple[int, int]

    @standard
    def run(self, x: Operands, seed: int | None = None, arrays: Any = None) -> tuple[torch.Tensor, ...]:
        """Fills dq, dk and dv; returns the further gradients that are asked for."""
        p = self.request.problem
        for name, lengths in (("dq", p.q_lengths), ("dk", p.k_lengths), ("dv", p.k_lengths)):
            to = getattr(x, name)
            rows = to.shape[LAYOUTS[self.layout][-2]] * (to.shape[0] if len(self.layout) == 4 else 1)
            if sum(lengths) < rows or not p.q_heads:
                to.tensor.zero_()
        device = x.q.tensor.device
        sinks = self.uploads.sinks if SINKS in self.request.grads else None
        delta = torch.empty(x.lse.shape, dtype=torch.float32, device=device)
        found = {
            id(t): torch.zeros(math.prod(t.shape), dtype=torch.float64, device=device) for t in self.request.tables
        }
        shares = torch.zeros((0, p.q_heads, 0), dtype=torch.float64, device=device)
        if p.batch and p.q_heads:
            each, shares = self.of_rows(x, delta, sinks)
            start(each)
            wrong = self.uploads.new_flags(device)
            for each in self.launches(x, delta, wrong):
                start(each)
            self.uploads.check_flags(wrong)
            if found and max(p.q_lengths) and max(p.k_lengths):
                for each in self.of_entries(x, delta, found):
                    start(each)
        return tuple(
            (found[id(y)].reshape(y.shape) if isinstance(y, Table) else shares.sum((0, 2))).float()
            for y in self.request.grads
        )

    @standard
    def sum_items(self, x: Array) -> torch.Tensor:
        """Adds the gradients of keys that items share: each item's rounded, added in float64, ascending."""
        total = torch.zeros((1, *x.shape[1:]), dtype=torch.float64, device=x.tensor.device)
        for item in x.tensor:
            total += item
        to = torch.empty_like(x.tensor[:1])
        return to.copy_(total.float())

    def of_rows(self, x: Operands, delta: torch.Tensor, sinks: torch.Tensor | None) -> tuple[Launch, torch.Tensor]:
        p, columns = self.request.problem, max(16, power_above(self.request.problem.value_dim))
        rows = max(1, _ELEMENTS // columns)
        blocks = -(-max(p.q_lengths) // rows)
        shares = torch.zeros((p.batch, p.q_heads, blocks), dtype=torch.float64, device=delta.device)
        arguments = {
            "out": x.out.tensor, "d_out": x.d_out.tensor, "lse": x.lse.tensor,
            "d_lse": None if x.d_lse is None else x.d_lse.tensor, "delta": delta, "sinks": sinks, "shares": shares,
            **named_strides("o", axes(x.out.tensor, self.layout)),
            **named_strides("g", axes(x.d_out.tensor, self.layout)),
            **named_strides("l", _of_rows(x.lse.tensor)), **named_strides("d", _of_rows(delta)),
            **named_strides("e", (0, 0, 0) if x.d_lse is None else _of_rows(x.d_lse.tensor)),
            "items": self.uploads.items, "q_len": p.q_lengths[0], "heads": p.q_heads, "blocks": blocks,
            "DV": p.value_dim, "BLOCK_DV": columns, "BM": rows,
        }  # fmt: skip
        return Launch(sum_rows, (shares.numel(),), arguments, 4, 1), shares

    def launches(self, x: Operands, delta: torch.Tensor, wrong: torch.Tensor | None) -> list[Launch]:
        """The kernel for dQ, and for dK and dV; each again for blocks that it flagged."""
        p, shared, row = self.request.problem, self._shared(x, delta, wrong), self._row()
        made = []
        for keys, tile, heads, length in (
            (False, row.queries, p.q_heads, -(-max(p.q_lengths) // row.queries.rows)),
            (True, row.keys, p.kv_heads, -(-max(p.k_lengths) // row.keys.keys)),
        ):  # fmt: skip
            blocks = length * heads * p.batch
            flags = torch.empty(blocks, dtype=torch.int32, device=delta.device)
            arguments = (
                shared | self._tiles(tile, self.uploads, delta.device)
                | {"END": int(backward.OF_KEYS if keys else backward.OF_ROWS), "flags": flags, "blocks": blocks}
                | {"row_blocks": 1 if keys else length, "key_blocks": length if keys else 1}
            )  # fmt: skip
            first, again = arguments | {"NONFINITE": int(FLAG)}, arguments | {"NONFINITE": int(RECOMPUTE)}
            made.append(Launch(differentiate, (blocks,), first, tile.warps, tile.stages, tile.registers))
            made.append(Launch(differentiate, (min(blocks, REPAIR_GRID),), again, tile.warps, tile.stages))
        return made

    def of_entries(self, x: Operands, delta: torch.Tensor, found: dict[int, torch.Tensor]) -> Iterator[Launch]:
        """The kernel for what flows to entries, and for their sums, which are `found` by their table's id: of lookup
        after lookup, and of some blocks of rows after the others, so that terms fit into _TERMS. Each launch is to be
        started before the next is made.
        """
        p, device, tables = self.request.problem, delta.device, self.request.tables
        uploads = uploads_of(p, x.q.device, self.firsts, backward=True, tables=tables)
        assert uploads.program is not None
        tile = self._row().queries
        row_blocks, wrong = -(-max(p.q_lengths) // tile.rows), uploads.new_flags(device)
        shared = self._shared(x, delta, wrong) | self._tiles(tile, uploads, device) | {
            "END": int(backward.OF_ENTRIES), "NONFINITE": 0, "flags": None, "row_blocks": row_blocks, "key_blocks": 1,
            "length": -(-max(p.k_lengths) // tile.keys) * tile.keys,
        }  # fmt: skip
        for n, (lookup, _) in enumerate(uploads.program.entries):
            uses = frozenset[str]().union(*(a.uses for a in lookup.args))
            spread = ROWS if not uses & OF_KEYS else PAIRS if uses & {"i", "s"} else KEYS
            of_block = tile.rows if spread == ROWS else shared["length"] * (tile.rows if spread == PAIRS else 1)
            at_once, blocks = max(1, _TERMS // of_block), row_blocks * p.q_heads * p.batch
            for first in range(0, blocks, at_once):
                count = min(at_once, blocks - first)
                values = torch.zeros(count * of_block, dtype=torch.float64, device=device)
                indices = torch.full(values.shape, -1, dtype=torch.int32, device=device)
                arguments = shared | {"entry": uploads.functions[f"entry{n}"], "SPREAD": int(spread)}
                arguments |= {"values": values, "indices": indices, "first_block": first, "blocks": count}
                yield Launch(differentiate, (count,), arguments, tile.warps, tile.stages, tile.registers)
                yield _adding(values, indices, found[id(lookup.value)])
        uploads.check_flags(wrong)

    def _row(self) -> GradientRow:
        p = self.request.problem
        is_plain = p.mask is None and p.score is None and not p.dropout
        return gradient_row(self.capability, p.dtype, max(p.head_dim, p.value_dim), self.precision, is_plain=is_plain)

    def _tiles(self, tile: Tile, uploads: Uploads, device: torch.device) -> dict[str, Any]:
        """Returns the blocks, and the classes of tiles where the host makes them; functions and numbers."""
        p = self.request.problem
        classes = Classes()
        if max(p.q_lengths) and max(p.k_lengths):
            classes = classes_of(p, uploads, Grid(tile.rows, tile.keys, 1), device)
        return {n: uploads.functions.get(n) for n in ("invariants", "apply", "back", "bounds")} | {
            "BM": tile.rows, "BN": tile.keys, "classes": classes.classes, "class_item": classes.c_item,
            "class_head": classes.c_head, "chunks": classes.chunks, "ints": uploads.words, "floats": uploads.floats,
        }  # fmt: skip

    def _shared(self, x: Operands, delta: torch.Tensor, wrong: torch.Tensor | None) -> dict[str, Any]:
        """Arguments that all launches share."""
        p, keys = self.request.problem, arrays_of(x.k.tensor, x.v.tensor, self.layout)
        tensors: dict[str, Any] = {"k": keys.k, "v": keys.v, "lse": x.lse.tensor, "delta": delta}
        tensors |= named_strides("k", keys.k_strides) | named_strides("v", keys.v_strides)
        tensors |= named_strides("l", _of_rows(x.lse.tensor)) | named_strides("d", _of_rows(delta))
        for prefix, name in (("q", "q"), ("g", "d_out"), ("a", "dq"), ("b", "dk"), ("c", "dv")):
            tensor = getattr(x, name).tensor
            tensors |= {name: tensor} | named_strides(prefix, axes(tensor, self.layout))
        return tensors | words_of(p) | {
            "drop_factor": 1.0 / p.dropout_divisor if p.dropout else None,
            "items": self.uploads.items, "wrong": wrong, "values": None, "indices": None, "first_block": 0, "length": 0,
            "q_len": p.q_lengths[0], "k_len": p.k_lengths[0], "q_start": p.q_starts[0], "k_start": p.k_start,
            "kv_heads": p.kv_heads, "group": p.group, "scale": float(p.scale),
            "D": p.head_dim, "DV": p.value_dim, "BLOCK_D": max(16, power_above(p.head_dim)),
            "BLOCK_DV": max(16, power_above(p.value_dim)), "CAUSAL": p.causal,
            "PRECISION": self.precision, "HIDING": may_hide(*p.roots),
            "SCORED": p.score is not None, "entry": None, "SPREAD": 0,
        }  # fmt: skip


def _adding(values: torch.Tensor, indices: torch.Tensor, total: torch.Tensor) -> Launch:
    """The launch that adds terms to the entries of these indices: each entry's in the order in which they lie."""
    entries = total.numel()
    ordered, order = torch.sort(indices, stable=True)
    starts = torch.searchsorted(ordered, torch.arange(entries + 1, dtype=torch.int32, device=total.device))
    # few entries have many terms each
    width = 1024 if entries >= _MANY else 1
    arguments = {
        "values": values, "order": order, "starts": starts, "total": total, "entries": entries,
        "ENTRIES_AT_ONCE": width, "TERMS": 1024 // width,
    }  # fmt: skip
    return Launch(sum_terms, (-(-entries // width),), arguments, 4, 1)


def _of_rows(x: torch.Tensor) -> tuple[int, ...]:
    """Strides as (item, head, row)."""
    return x.stride() if x.ndim == 3 else (0, *x.stride())


def prepare(request: Asked, layout: str, stated: Stated, q: Array, precision: str) -> Gradients:
    """Checks what the engine can do, and uploads what the problem needs."""
    check(request.problem, q.device, precision)
    if max(request.problem.head_dim, request.problem.value_dim) > COARSE_DIMS:
        precision = "ieee"
    firsts = None
    if stated.cu_q is not None and stated.cu_k is not None:
        firsts = stated.cu_q[:-1], stated.cu_k[:-1]
    uploads = uploads_of(request.problem, q.device, firsts, backward=True)
    return Gradients(request, layout, precision, firsts, uploads, capability(q.device))
