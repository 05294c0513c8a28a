"""The tokens of caches and pools in a GPU's memory, and the calls that read them there.

`cpu/engine/storage.py` has the same two classes with the same methods. Calls only enqueue work.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays.memory import Array
from ..errors import UnsupportedError
from ..expressions.tracing import is_immutable
from ..host.machine import interpreting
from ..problem.build import from_stored
from ..problem.checks import MOST
from ..problem.options import Options
from ..problem.problem import Problem
from ..problem.results import Results
from ..problem.storage import Lengths, Overwritten, Storage
from ..problem.tokens import Batch, Moves, Piece, TokenShape
from ..problem.windows import PIECE, Ring
from .launch import capturing, start
from .prepare import prepare
from .rows import Destination, Rows, Tokens, described, device_of, to_numpy, to_torch
from .schedule import check, power_above

_ANY = 1 << 40  # tokens: the capacity of a pool's sequence, whose pages the host counts


class Call(NamedTuple):
    """The problem of a piece, for a power of two of keys: what was uploaded for it serves many steps."""

    problem: Problem
    most: int  # keys of the longest sequence, or more
    captured: bool  # in a CUDA graph


def _slots(owners: list[int], slots: list[int], device: torch.device) -> tuple[Any, ...]:
    """Tokens of (item or page, head, token, …)."""
    return torch.tensor(owners, device=device), slice(None), torch.tensor(slots, device=device)


class DeviceLengths(Lengths):
    """Lengths of a KVCache's sequences on the device, [layer, sequence].

    Kernels read and advance them; the host's copy in kv/ checks every eager call. Replays of a CUDA graph advance the
    device's alone: once a graph has captured a step, the host asks the device.
    """

    may_wait = True

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        self.tensor, self.arrived = (torch.zeros((layers, batch), dtype=torch.int32, device=device) for _ in range(2))
        self.status = torch.zeros(1, dtype=torch.int32, device=device)
        self.capacity, self.captured = capacity, False  # captured: a graph has seen this cache

    def check_capture(self, lengths: Mapping[str, Any]) -> None:
        if not capturing():
            return
        for name, x in lengths.items():
            if x is not None:
                raise UnsupportedError(
                    f"{name}: expected None while a CUDA graph is captured; a replay could not change them."
                )
        if self.capacity == MOST:
            raise UnsupportedError(
                "capacity: expected the most tokens of a sequence, for a CUDA graph; this cache has none."
            )

    def is_ahead(self) -> bool:
        return self.captured and not capturing()

    def read(self) -> list[list[int]]:
        """Returns those of each layer; waits for the device."""
        return self.tensor.tolist()

    def has_overflowed(self) -> bool:
        if not int(self.status.item()):
            return False
        self.status.zero_()
        return True

    def set(self, lengths: list[list[int]]) -> None:
        self.tensor.copy_(torch.as_tensor(lengths, dtype=torch.int32))


class TensorStorage(Storage):
    """Base of both storages of a GPU: tokens lie in tensors."""

    def __init__(self, shape: TokenShape, owners: int, tokens: int, device: Any, *, tokens_first: bool) -> None:
        """Reserves memory of so many tokens for each sequence or page."""
        if shape.latent:
            raise UnsupportedError(
                'latent: expected False on a GPU, whose kernels read values of their own; got True. Give device="cpu", '
                "or store values beside keys."
            )
        self.shape = shape
        self.device: torch.device = device_of(device)
        self.rows = [Rows(shape, owners, tokens, self.device, tokens_first=tokens_first) for _ in range(shape.layers)]
        self.token_bytes = self.rows[0].token_bytes

    # --- arguments

    def received(self, x: Any, name: str) -> tuple[torch.Tensor, str]:
        a = self._described(x, name)
        return a.tensor, a.dtype

    def query(self, q: Any) -> Array:
        return self._described(q, "q")

    def _described(self, x: Any, name: str) -> Array:
        """Describes a tensor, which must lie on the device."""
        return described(x, name, self.device)

    # --- moves, and rollback

    def move(self, layer: int, moves: Moves) -> None:
        old = _slots(moves.from_owner, moves.from_slot, self.device)
        new = _slots(moves.to_owner, moves.to_slot, self.device)
        for part in self.rows[layer].parts:
            part[new] = part[old]  # of which this is a copy

    def before_moves(self, layer: int, lengths: list[int], moves: Moves) -> Overwritten:
        if not moves.to_slot:
            return []
        if capturing():
            raise UnsupportedError(
                "keep: a CUDA graph cannot replay it; which tokens move would be the same every time."
            )
        where = _slots(moves.to_owner, moves.to_slot, self.device)
        return [(part, where, part[where]) for part in self.rows[layer].parts]


class CacheStorage(TensorStorage):
    """Tokens of a KVCache, token by token, and their lengths.

    No step is prepared to run again: the device takes longer than the checks.
    """

    def __init__(self, shape: TokenShape, batch: int, capacity: int, ring: Ring, device: Any) -> None:
        super().__init__(shape, batch, ring.tokens or capacity, device, tokens_first=False)
        self.batch = batch
        self.capacity = capacity
        self.ring = ring
        self.name = "cuda" if interpreting() else str(self.device)
        self.lengths = DeviceLengths(shape.layers, batch, capacity, self.device)

    # --- tokens in and out

    def put(self, layer: int, lengths: list[int], counts: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores the first counts[item] tokens of k and v, and advances the device's lengths."""
        n_new = k.shape[2]
        self.lengths.captured |= capturing()
        to = Destination(self.lengths.tensor[layer], self.capacity, self.lengths.arrived[layer])
        to = to._replace(ring_first=self.ring.fixed, ring=self.ring.size)
        step = PIECE if self.ring.size else max(n_new, 1)  # no two programs may write to one slot
        for at in range(0, max(n_new, 1), step):
            part_k, part_v = (x[:, :, at : at + step] for x in (k, v))
            part = [min(max(n - at, 0), part_k.shape[2]) for n in counts]
            uneven = part.count(part_k.shape[2]) < len(part)
            each = torch.tensor(part, dtype=torch.int32).to(self.device) if uneven else None
            new = Tokens(part_k, part_v, part_k.stride(), part_v.stride(), part_k.shape[2], each)
            start(self.rows[layer].put(new, to, self.lengths.status))

    def tokens(self, layer: int, part: str, n: int) -> torch.Tensor:
        """A copy of the first n slots of "keys" or "values": (batch, kv_heads, n, dim)."""
        return self.rows[layer].tokens(part, (slice(None), slice(None), slice(n)))

    def parts(self, layer: int, counts: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Keys and values as files have them, of each sequence the slots in use: [tokens], or [codes, scales]."""
        both = []
        for index in (0, 1):
            both.append([to_numpy(x[:, :, : max(counts)]) for x in self.rows[layer].planes(index)])
            for x in both[-1]:
                for item, n in enumerate(counts):
                    x[item, :, n:] = 0
        return both[0], both[1]

    def fill(self, layer: int, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
        """Stores what parts() returned."""
        for index, planes in enumerate((keys, values)):
            for x, plane in zip(self.rows[layer].planes(index), planes, strict=True):
                x[:, :, : plane.shape[2]] = to_torch(plane).to(self.device)

    def copy_to(self, other: CacheStorage, indices: list[int], counts: list[list[int]]) -> None:
        """These sequences become those of another cache, but for their lengths."""
        for mine, theirs in zip(self.rows, other.rows, strict=True):
            for a, b in zip(mine.parts, theirs.parts, strict=True):
                b.copy_(a[indices])

    # --- what a failing call has written over

    def before(self, layer: int, lengths: list[int], slots: list[int]) -> Overwritten:
        """Copies lengths, and what lies in slots that will be overwritten; nothing while a CUDA graph is captured."""
        if capturing():
            return []
        where = slice(None), slice(None), slots
        below = [(part, where, part[where]) for part in self.rows[layer].parts] if slots else []
        return [self._old_lengths(layer, torch.tensor(lengths, dtype=torch.int32)), *below]

    def before_moves(self, layer: int, lengths: list[int], moves: Moves) -> Overwritten:
        below = super().before_moves(layer, lengths, moves)
        if below:
            return [self._old_lengths(layer, torch.tensor(lengths, dtype=torch.int32)), *below]
        return [self._old_lengths(layer, self.lengths.tensor[layer].clone())]

    def _old_lengths(self, layer: int, lengths: torch.Tensor) -> tuple[Any, Any, Any]:
        """Returns the lengths of a layer as a part of what is overwritten."""
        return self.lengths.tensor, layer, lengths

    # --- attending

    def prepare(self, q: Array, piece: Piece, options: Options, out_strides: tuple[int, ...]) -> Call:
        """A piece's call: checked, nothing enqueued. Mutable masks and scores need the exact lengths."""
        n, captured = piece.rows.stop - piece.rows.start, capturing()
        least = n if piece.counts is None else max(piece.counts)  # tokens that whoever has so many queries has
        most = self.capacity if captured else min(self.capacity, power_above(max(piece.after)))
        any_lengths = captured or (is_immutable(options.mask) and is_immutable(options.score))
        stored = self.shape.stored(
            [most] * self.batch if any_lengths else piece.after,
            hiding=self.ring.mask(bool(options.causal)),
            shortest=(least if options.causal else 1) if any_lengths else None,
        )
        rows = replace(q, shape=(*q.shape[:2], n, q.shape[3])) if len(q.shape) == 4 else q
        problem = from_stored(rows, stored, replace(options, q_lengths=piece.counts))
        check(problem, str(self.device), "ieee")
        return Call(problem, most, captured)

    def attend(self, layer: int, call: Call, q: Array, piece: Piece, results: Results) -> None:
        """Runs what prepare() returned, into the piece's rows of the chunk's results."""
        self.lengths.captured |= call.captured
        ring = {"ring_first": self.ring.fixed, "ring": self.ring.size}
        keys = self.rows[layer].keys(lengths=self.lengths.tensor[layer], most=call.most, **ring)
        rows, lse = (slice(None), slice(None), piece.rows), results.lse
        out, part = results.out.tensor[rows], None if lse is None else lse.tensor[rows]
        prepare(call.problem, "bhld", str(self.device), keys).run(q.tensor[rows], keys, out, part)


class PoolStorage(TensorStorage):
    """Tokens of a PagePool. A sequence's table is the list of its pages, which each call uploads."""

    def __init__(self, shape: TokenShape, pages: int, page_size: int, device: Any) -> None:
        super().__init__(shape, pages, page_size, device, tokens_first=True)
        self.page_size = page_size
        self.page_count = pages
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)

    def _described(self, x: Any, name: str) -> Array:
        if capturing():
            raise UnsupportedError(
                "PagePool: a CUDA graph cannot hand out pages. Use attention_paged() with tables of your own there."
            )
        return super()._described(x, name)

    # --- tables

    def new_table(self) -> list[int]:
        return []

    def copied(self, table: list[int]) -> list[int]:
        return table

    def extended(self, table: list[int], pages: list[int], used: int, moved: list[int]) -> list[int]:
        """A table of these pages."""
        return pages

    # --- tokens in and out

    def copy_page(self, new: int, old: int) -> None:
        for rows in self.rows:
            for part in rows.parts:
                part[new].copy_(part[old])

    def tokens(self, layer: int, part: str, pages: list[int], n: int) -> torch.Tensor:
        """A copy of a sequence's first n "keys" or "values": (kv_heads, n, dim)."""
        each = self.rows[layer].tokens(part, pages[: -(-n // self.page_size)])  # (pages, heads, tokens, dim)
        return each.transpose(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].clone()

    def parts(self, layer: int, pages: list[int], n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """A sequence's keys and values as files have them, as CacheStorage.parts() of a batch of one."""
        used, both = pages[: -(-n // self.page_size)], []
        for index in (0, 1):
            planes = [to_numpy(x[used]).swapaxes(0, 1) for x in self.rows[layer].planes(index)]
            both.append([x.reshape(1, x.shape[0], -1, x.shape[3])[:, :, :n] for x in planes])
        return both[0], both[1]

    def fill(
        self, layer: int, table: list[int], pages: list[int], keys: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        """Stores what parts() returned of a sequence whose tokens fill these pages."""
        where = torch.tensor(pages, device=self.device)
        for index, planes in enumerate((keys, values)):
            for x, plane in zip(self.rows[layer].planes(index), planes, strict=True):
                each = plane.reshape(plane.shape[1], -1, self.page_size, plane.shape[3]).swapaxes(0, 1)
                x[where] = to_torch(np.ascontiguousarray(each)).to(self.device)

    def put(self, layer: int, batch: Batch, k: torch.Tensor, v: torch.Tensor) -> None:
        """New tokens, one sequence's after the other's."""
        first = list(itertools.accumulate(batch.counts, initial=0))[:-1]
        three = torch.tensor([batch.before, batch.counts, first], dtype=torch.int64).to(self.device)
        k_strides, v_strides = ((0, x.stride(1), x.stride(0), x.stride(2)) for x in (k, v))
        new = Tokens(k, v, k_strides, v_strides, max(batch.counts, default=0), three[1], three[2])
        to = Destination(three[0], _ANY, pages=self._uploaded(batch), page_size=self.page_size)
        start(self.rows[layer].put(new, to, self.status))

    def _uploaded(self, batch: Batch) -> torch.Tensor:
        """The pages of each sequence that hold its tokens, on the device."""
        tables = [x[: -(-n // self.page_size)] for x, n in zip(batch.tables, batch.after, strict=True)]
        most = max(map(len, tables), default=0) or 1
        return torch.tensor([[*x, *[0] * (most - len(x))] for x in tables], dtype=torch.int32).to(self.device)

    # --- attending

    def attend(self, layer: int, q: Array, batch: Batch, options: Options, results: Results) -> None:
        """Packed queries over their sequences' tokens."""
        problem = from_stored(q, self.shape.stored(batch.after), replace(options, q_lengths=batch.counts))
        keys = self.rows[layer].keys(
            pages=self._uploaded(batch), page_size=self.page_size, page_count=self.page_count, status=self.status
        )
        offsets, lse = tuple(itertools.accumulate(batch.counts, initial=0)), results.lse
        call = prepare(problem, "lhd", str(self.device), keys, cu_q=offsets)
        call.run(q.tensor, keys, results.out.tensor, None if lse is None else lse.tensor)
