"""flash-attn 4's lists of blocks (its module flash_attn.cute.block_sparsity) as masks."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError, Expression, Table, blocks
from ..adapting import integer, shown
from ..expressions.substitution import replaced
from ..expressions.tree import Node
from ..torch.block_lists import make_dense, read_entries

__all__ = ["BlockSparseTensorsTorch"]

_OFFSETS = ("cu_total_m_blocks", "cu_block_idx_offsets")
_FIELDS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx", "block_size")


class BlockSparseTensorsTorch(NamedTuple):
    """Lists of blocks that flash_attn_func(block_sparse_tensors=) shows, by flash-attn 4's names.

    mask_block_cnt, full_block_cnt: (batch or 1, nheads or 1, rows of blocks): how many blocks of keys each row lists.
    mask_block_idx, full_block_idx: with one dimension more: their numbers. mask_mod counts in blocks of the first
    lists alone; those of the second are seen whole, and others not at all.
    cu_total_m_blocks, cu_block_idx_offsets: (batch + 1,): where a sequence's counts and numbers begin, in lists
    (nheads or 1, all). Without offsets numbers follow each other by whole rows of blocks.
    block_size: (queries, keys) in a block.
    dq_write_order, dq_write_order_full, spt: mean nothing here.

    >>> import torch
    >>> from speedlight.flash_attn.v4 import BlockSparseTensorsTorch, flash_attn_func
    >>> q = torch.ones(1, 256, 8, 16)
    >>> diagonal = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0], [1]]]], dtype=torch.int32)
    >>> blocks = BlockSparseTensorsTorch(*diagonal, block_size=(128, 128))
    >>> flash_attn_func(q, q, q, block_sparse_tensors=blocks)[0].shape
    torch.Size([1, 256, 8, 16])
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: Tensor | None = None
    cu_block_idx_offsets: Tensor | None = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Tensor | None = None
    dq_write_order_full: Tensor | None = None
    spt: bool | None = None


class BothPasses(NamedTuple):
    """Lists for the forward pass, and for the backward pass."""

    forward: Any
    backward: Any


class Lengths(NamedTuple):
    """Lengths that lists of blocks cover."""

    heads: int  # of queries
    q_len: int  # with padding
    k_len: int
    q_lens: tuple[int, ...]  # of each sequence
    k_lens: tuple[int, ...]
    is_packed: bool  # queries have offsets


class Blocks(NamedTuple):
    """Blocks as bools, (batch or 1, heads or 1, rows, columns)."""

    listed: np.ndarray
    whole: np.ndarray  # mask_mod does not count in them
    size: tuple[int, int]


def read_mask(given: Any, mask: Expression | None, lengths: Lengths, position: Node) -> Expression:
    """Returns the mask of lists of blocks and a mask_mod. position: a query's place in its sequence."""
    passes = given if isinstance(given, BothPasses) else BothPasses(given, None)
    found = _read_lists("block_sparse_tensors", passes.forward, lengths)
    if mask is None:
        found = found._replace(whole=found.listed)
    if passes.backward is not None:
        _check_backward(found, passes.backward, mask, lengths)
    whole, listed = (
        replaced(blocks(Table(x, "block_sparse_tensors"), found.size), {"i": position})
        for x in (found.whole, found.listed)
    )
    if mask is None:
        return whole
    return (whole | (listed & mask)) if found.whole.any() else listed & mask


def _read_lists(name: str, x: Any, lengths: Lengths, *, by_columns: bool = False) -> Blocks:
    """Returns the blocks of lists. Raises unless these fit the call.

    by_columns: lists are of columns of blocks. So are `lengths`, and the size that is returned.
    """
    missing = [field for field in _FIELDS if not hasattr(x, field)]
    if missing:
        raise ArgumentTypeError(
            f"{name}: expected a BlockSparseTensorsTorch; got {shown(x)}. speedlight.flash_attn.v4 has that class."
        )
    size = _read_size(name, x.block_size)
    size = (size[1], size[0]) if by_columns else size
    totals, offsets = (_read_ints(f"{name}.{n}", getattr(x, n, None), 1) for n in _OFFSETS)
    if totals is None and lengths.is_packed:
        raise ArgumentError(
            f"{name}.cu_total_m_blocks: expected a tensor (batch + 1,) beside cu_seqlens_q, as flash-attn does; got "
            "None."
        )
    parts = []
    for part in ("mask", "full"):
        names = f"{name}.{part}_block_cnt", f"{name}.{part}_block_idx"
        dims = 3 if totals is None else 2
        counts = _read_ints(names[0], getattr(x, f"{part}_block_cnt"), dims)
        numbers = _read_ints(names[1], getattr(x, f"{part}_block_idx"), 4 if totals is None else 2)
        if (counts is None) != (numbers is None) or (counts is None and part == "mask"):
            raise ArgumentError(
                f"{names[counts is not None]}: expected a tensor; got None. Both tensors of full blocks may be None."
            )
        if counts is None or numbers is None:
            parts.append(np.zeros_like(parts[0]))
        elif totals is None:
            parts.append(_list_padded(names, counts, numbers, size, lengths))
        else:
            parts.append(_list_packed(names, counts, numbers, (totals, offsets), size, lengths))
    partial, whole = np.broadcast_arrays(*parts)
    if (partial & whole).any():
        b, h, row, column = map(int, np.argwhere(partial & whole)[0])
        raise ArgumentError(
            f"{name}: expected each block once; got block ({row}, {column}) of item {b} and head {h} among mask blocks "
            "and full blocks."
        )
    return Blocks(partial | whole, whole, size)


def _read_size(name: str, size: Any) -> tuple[int, int]:
    if size is None:
        raise ArgumentError(
            f"{name}.block_size: expected (queries, keys); got None, flash-attn's own tile, which depends on the GPU. "
            f"Use {name}._replace(block_size=(…, …))."
        )
    if not isinstance(size, (tuple, list)) or len(size) != 2:
        raise ArgumentTypeError(f"{name}.block_size: expected (queries, keys); got {shown(size)}.")
    pair = tuple(integer(f"{name}.block_size", n) for n in size)
    if min(pair) < 1:
        raise ArgumentError(f"{name}.block_size: expected two numbers from 1; got {shown(size)}.")
    return pair[0], pair[1]


def _read_ints(name: str, x: Any, dims: int) -> np.ndarray | None:
    if x is None:
        return None
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(f"{name}: expected an int32 tensor, or None; got {type(x).__name__}.")
    if x.dtype.is_floating_point or x.dtype.is_complex or str(x.dtype) == "torch.bool":
        raise ArgumentTypeError(f"{name}: expected an int32 tensor; got {x.dtype}. Use .int().")
    if x.ndim != dims:
        raise ArgumentError(f"{name}: expected {dims} dimensions; got shape {tuple(x.shape)}.")
    return read_entries(x, name)


def _list_padded(
    names: tuple[str, str], counts: np.ndarray, numbers: np.ndarray, size: tuple[int, int], lengths: Lengths
) -> np.ndarray:
    """Returns the blocks of lists (batch or 1, heads or 1, rows, …)."""
    rows, columns = -(-lengths.q_len // size[0]), -(-lengths.k_len // size[1])
    batch = len(lengths.q_lens)
    for name, x in zip(names, (counts, numbers), strict=True):
        if x.shape[0] not in (1, batch) or x.shape[1] not in (1, lengths.heads) or x.shape[2] != rows:
            raise ArgumentError(
                f"{name}: expected shape ({batch} or 1, {lengths.heads} or 1, {rows}"
                f"{', …' if x.ndim == 4 else ''}), in blocks of {size[0]} of {lengths.q_len} positions; got {x.shape}."
            )
    shape = np.broadcast_shapes(counts.shape, numbers.shape[:3])
    counts, numbers = np.broadcast_to(counts, shape), np.broadcast_to(numbers, (*shape, numbers.shape[3]))
    return _make_blocks(names, counts, numbers, columns)


def _list_packed(
    names: tuple[str, str],
    counts: np.ndarray,
    numbers: np.ndarray,
    offsets: tuple[np.ndarray, np.ndarray | None],
    size: tuple[int, int],
    lengths: Lengths,
) -> np.ndarray:
    """Returns the blocks of lists (heads or 1, all rows) and (heads or 1, all numbers)."""
    prefix = names[0].rpartition(".")[0]
    rows, columns = ([-(-n // step) for n in x] for step, x in zip(size, lengths[3:5], strict=True))
    totals = [0, *np.cumsum(rows).tolist()]
    given, starts = offsets
    if given.tolist() != totals:
        raise ArgumentError(
            f"{prefix}.cu_total_m_blocks: expected {shown(totals)}, in blocks of {size[0]} queries; got "
            f"{shown(given.tolist())}."
        )
    of_rows = [at * n for at, n in zip(totals[:-1], columns, strict=True)]
    begins = of_rows if starts is None else starts.tolist()
    if len(begins) < len(rows):
        raise ArgumentError(f"{prefix}.cu_block_idx_offsets: expected {len(rows) + 1} offsets; got {len(begins)}.")
    heads = max(counts.shape[0], numbers.shape[0])
    for name, x in zip(names, (counts, numbers), strict=True):
        if x.shape[0] not in (1, lengths.heads):
            raise ArgumentError(f"{name}: expected {lengths.heads} or 1 rows; got shape {x.shape}.")
    if counts.shape[1] != totals[-1]:
        raise ArgumentError(f"{names[0]}: expected {totals[-1]} rows of blocks; got shape {counts.shape}.")
    found = np.zeros((len(rows), heads, max(rows, default=0), max(columns, default=0)), bool)
    for b, (n, width) in enumerate(zip(rows, columns, strict=True)):
        end = begins[b] + n * width
        if not 0 <= begins[b] <= end <= numbers.shape[1]:
            raise ArgumentError(
                f"{names[1]}: expected at least {end} numbers for sequence {b}, {n} rows of {width} blocks from "
                f"{begins[b]} on; got shape {numbers.shape}."
            )
        of_item = numbers[:, begins[b] : end].reshape(numbers.shape[0], n, width)
        count = np.broadcast_to(counts[:, totals[b] : totals[b + 1]], (heads, n))
        found[b, :, :n, :width] = _make_blocks(names, count, np.broadcast_to(of_item, (heads, n, width)), width)[0]
    return found


def _make_blocks(names: tuple[str, str], counts: np.ndarray, numbers: np.ndarray, columns: int) -> np.ndarray:
    """Returns listed blocks as bools. Raises unless counts and numbers are in range, and each block is listed once."""
    most = min(numbers.shape[-1], columns)
    if counts.size and not 0 <= counts.min() <= counts.max() <= most:
        raise ArgumentError(f"{names[0]}: expected counts from 0 to {most}; got {counts.min()} to {counts.max()}.")
    listed = np.arange(numbers.shape[-1]) < counts[..., None]
    wrong = numbers[listed & ((numbers < 0) | (numbers >= columns))]
    if wrong.size:
        raise ArgumentError(f"{names[1]}: expected numbers of blocks from 0 to {columns - 1}; got {wrong[0]}.")
    dense = make_dense(counts, numbers, columns)
    if dense.sum() != counts.sum():
        raise ArgumentError(f"{names[1]}: expected each block of a row once; got one twice.")
    return dense


def _check_backward(forward: Blocks, given: Any, mask: Expression | None, lengths: Lengths) -> None:
    """Raises where one pass's lists show a block whole that the other's hide. Sizes of blocks may differ."""
    name = "block_sparse_tensors_bwd"
    turned = lengths._replace(
        q_len=lengths.k_len, k_len=lengths.q_len, q_lens=lengths.k_lens, k_lens=lengths.q_lens, is_packed=False
    )
    found = _read_lists(name, given, turned, by_columns=True)
    whole = found.listed if mask is None else found.whole
    backward = Blocks(found.listed.swapaxes(2, 3), whole.swapaxes(2, 3), (found.size[1], found.size[0]))
    sizes = [math.gcd(a, b) for a, b in zip(forward.size, backward.size, strict=True)]
    rows, columns = (-(-n // step) for n, step in zip((lengths.q_len, lengths.k_len), sizes, strict=True))

    def refine(x: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return x.repeat(size[0] // sizes[0], 2).repeat(size[1] // sizes[1], 3)[:, :, :rows, :columns]

    listed, whole, also_listed, also_whole = (refine(x, y.size) for y in (forward, backward) for x in y[:2])
    wrong = np.argwhere((whole & ~also_listed) | (also_whole & ~listed))
    if wrong.size:
        i, j = (int(n) * step for n, step in zip(wrong[0, 2:], sizes, strict=True))
        raise ArgumentError(
            f"{name}: expected the blocks of block_sparse_tensors; got others at query {i} and key {j}. Gradients are "
            "those of the forward pass: list the same blocks, or leave it out."
        )
