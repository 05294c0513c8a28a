"""PyTorch's BlockMask and our masks: its block tables beside its mask_mod, and tables made of a function."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex

from .. import ArgumentError, Expression, Table, blocks, expression
from ..expressions.bounds import integers, visible
from ..expressions.tree import evaluate
from ..problem.tiles import Many
from .block_lists import make_dense, read_entries

_TABLES = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_AT_ONCE = 1 << 13  # blocks that are classified together
_MOST = 1 << 18  # positions that are looked at together
Sizes = tuple[int, int, int, int]  # batch, heads, q_len, k_len


class Blocks(NamedTuple):
    """Blocks that are listed, (batch or 1, heads or 1, blocks of queries, blocks of keys), and the size of a block."""

    partial: np.ndarray
    full: np.ndarray
    size: tuple[int, int]


class Listed(NamedTuple):
    """What block tables say beside a mask_mod."""

    everything: bool  # the mask_mod hides nothing
    shown: Expression | None = None  # blocks that are listed, where some that are not would be seen
    full: Expression | None = None  # blocks that are seen whole, where the mask_mod says less

    def join(self, mask: Expression) -> Expression | None:
        """Returns the mask that shows as much as both; None where that is everything."""
        if self.shown is None:
            return None if self.everything else mask
        seen = self.shown if self.everything else self.shown & mask
        return seen if self.full is None else self.full | seen


_COMPARED = 1 << 20  # bytes of a mask's tables, at most, that tell whether it is the same
# of a BlockMask all that it depended on, and what its block tables said
_known: weakref.WeakKeyDictionary[flex.BlockMask, tuple[Any, Listed]] = weakref.WeakKeyDictionary()


def read_mask(block_mask: flex.BlockMask, sizes: Sizes) -> Expression | None:
    """Returns what a BlockMask shows; None where that is everything."""
    mask = expression(_check_mask_mod(block_mask), "mask")
    if any([t.tensor is not None for t in mask.tables]) or sum([t.array.nbytes for t in mask.tables]) > _COMPARED:
        return _list_blocks(block_mask, mask, sizes).join(mask)
    tables = (getattr(block_mask, name) for name in _TABLES)
    key = (
        mask.key, *(repr(x.value) for x in mask.numbers), *(_contents(t.array) for t in mask.tables),
        sizes, block_mask.BLOCK_SIZE, block_mask.seq_lengths,
        *(None if x is None else _contents(read_entries(x, "block_mask")) for x in tables),
    )  # fmt: skip
    known = _known.get(block_mask)
    if known is None or known[0] != key:
        _known[block_mask] = known = key, _list_blocks(block_mask, mask, sizes)
    return known[1].join(mask)


def _contents(x: np.ndarray) -> tuple[Any, ...]:
    return x.shape, x.dtype.str, x.tobytes()


def _list_blocks(block_mask: flex.BlockMask, mask: Expression, sizes: Sizes) -> Listed:
    """Reads the block tables, and compares them with the mask."""
    partial, full, size = _read_blocks(block_mask, sizes)
    everything = bool(mask.root.op == "number" and mask.root.value)
    listed = partial | full
    if (everything and listed.all()) or 0 in sizes:
        return Listed(True)
    some, every = _classify(mask, listed.shape[:2], sizes, size)
    full = full & ~every  # of which mask_mod says less
    if not (some & ~listed).any() and not full.any():
        return Listed(False)
    shown = blocks(Table(listed, "block_mask"), size)
    return Listed(everything, shown, blocks(Table(full, "block_mask"), size) if full.any() else None)


def _check_mask_mod(block_mask: flex.BlockMask) -> Callable[..., Any]:
    if block_mask.mask_mod is flex._sliced_mask_mod_error:
        raise ArgumentError(
            "block_mask: expected one with a mask_mod; got a slice, which has none. Set its mask_mod, made of that of "
            "the BlockMask that was sliced."
        )
    return block_mask.mask_mod


def _read_blocks(mask: flex.BlockMask, sizes: Sizes) -> Blocks:
    """Returns the block tables of a mask. Raises unless it fits these sizes."""
    batch, heads, q_len, k_len = sizes
    q_size, k_size = mask.BLOCK_SIZE
    if mask.BLOCK_SIZE != (flex._LARGE_SPARSE_BLOCK_SIZE,) * 2 and mask.shape[-2:] != (q_len, k_len):
        raise ArgumentError(
            f"block_mask: expected one for q_len {q_len} and kv_len {k_len}; got shape {mask.shape}. Make one for "
            "these lengths, or use block_mask._adjust(q_len, kv_len)."
        )
    rows, columns = -(-q_len // q_size), -(-k_len // k_size)
    counts, indices, full_counts, full_indices = (getattr(mask, name) for name in _TABLES)
    partial = _read_dense(counts, indices, columns)
    full = np.zeros_like(partial) if full_counts is None else _read_dense(full_counts, full_indices, columns)
    shape = np.broadcast_shapes(partial.shape, full.shape)
    if shape[0] not in (1, batch) or shape[1] not in (1, heads) or shape[2] < rows:
        raise ArgumentError(
            f"block_mask: expected tables that broadcast to batch {batch}, {heads} heads and {rows} rows of blocks; "
            f"got {shape[:3]}."
        )
    partial, full = (np.broadcast_to(x, shape)[:, :, :rows] for x in (partial, full))
    return Blocks(partial, full, (q_size, k_size))


def _read_dense(counts: torch.Tensor, indices: torch.Tensor, columns: int) -> np.ndarray:
    return make_dense(read_entries(counts, "block_mask"), read_entries(indices, "block_mask"), columns)


def _classify(mask: Expression, dims: tuple[int, int], sizes: Sizes, size: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns of each block whether something in it may be visible, and whether all of it is, as intervals tell.

    dims: items and heads that are told apart, each one or all.
    """
    batch, heads, q_len, k_len = sizes
    shape = *dims, -(-q_len // size[0]), -(-k_len // size[1])
    box = {"b": (0, batch - 1), "h": (0, heads - 1), "i": (0, q_len - 1), "j": (0, k_len - 1)}
    followed = integers([("mask", mask.nodes)], box).followed
    some, every = np.empty(shape, bool), np.empty(shape, bool)
    j = np.arange(shape[3]) * size[1]
    for b, h, rows in _iterate(shape, max(1, _AT_ONCE // shape[3])):
        i = np.arange(rows.start, rows.stop)[:, None] * size[0]
        ends = {"i": (i, np.minimum(i + size[0], q_len) - 1), "j": (j, np.minimum(j + size[1], k_len) - 1)}
        ends |= {name: (at, at) for name, at, dim in (("b", b, dims[0]), ("h", h, dims[1])) if dim > 1}
        some[b, h, rows], every[b, h, rows] = visible(mask.root, Many(box | ends, followed))
    return some, every


def _iterate(shape: tuple[int, ...], rows: int) -> Iterator[tuple[int, int, slice]]:
    """Yields items, heads, and some rows of blocks at a time."""
    for b, h, row in itertools.product(range(shape[0]), range(shape[1]), range(0, shape[2], rows)):
        yield b, h, slice(row, min(row + rows, shape[2]))


def make_block_mask(
    mask_mod: Callable[..., Any], mask: Expression, sizes: Sizes, size: Any, device: Any, separate_full: bool
) -> flex.BlockMask:
    """Makes the BlockMask of a function, which `mask` was traced from."""
    some, every = _classify(mask, sizes[:2], sizes, size)
    whole = _find_whole(sizes, size)
    for b, h, row, column in np.argwhere(some & ~every).tolist():
        i, j = (slice(n * at, min(n * at + n, end)) for n, at, end in zip(size, (row, column), sizes[2:], strict=True))
        some[b, h, row, column], every[b, h, row, column] = _look_at(mask, b, h, i, j)
    full = every & whole if separate_full else np.zeros_like(every)
    lists = [_order(x, device) for x in ((some & ~full), full)]
    return flex.BlockMask.from_kv_blocks(
        *lists[0], *(lists[1] if separate_full else ()), BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=sizes[2:]
    )


def _find_whole(sizes: Sizes, size: tuple[int, int]) -> np.ndarray:
    """Returns which blocks do not reach past the last query or key."""
    rows, columns = (np.arange(-(-n // step)) * step + step <= n for n, step in zip(sizes[2:], size, strict=True))
    return rows[:, None] & columns


def _look_at(mask: Expression, b: int, h: int, i: slice, j: slice) -> tuple[bool, bool]:
    """Returns whether something in a block is visible, and whether all is: entry by entry, some rows at a time."""
    some, every = False, True
    step = max(1, _MOST // (j.stop - j.start))
    for row in range(i.start, i.stop, step):
        rows, columns = np.ogrid[row : min(row + step, i.stop), j]
        env = {"b": b, "h": h, "i": rows, "j": columns}
        seen = np.broadcast_to(evaluate(mask.root, env, np.float32, False), (rows.size, columns.size))
        evaluate(mask.root, env, np.float32, seen)  # raises where an index is out of range and the key is seen
        some, every = bool(some or seen.any()), bool(every and seen.all())
        if some and not every:
            break
    return some, every


def _order(blocks: np.ndarray, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns how many blocks each row has, and which: those first, the others after them."""
    order = np.argsort(~blocks, axis=-1, kind="stable").astype(np.int32)
    counts = blocks.sum(-1, dtype=np.int32)
    return torch.from_numpy(counts).to(device), torch.from_numpy(order).to(device)
