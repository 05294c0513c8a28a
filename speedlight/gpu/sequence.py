# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""A block of query rows: its item, head and split, the keys that it sees, their addresses, and the end of its rows.

Names in kernels: i_ index, o_ offset, p_ pointer, b_ block in registers, m_ mask; capitals are compile-time constants.
A row is a (token, head): with PACK > 1 the heads of a group share a block, row r is token r // PACK.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import LOG2E, finite_max

# words of an item: q_len, k_len, position of its first query, its first row of q and of k, its index in masks
ITEM = tl.constexpr(6)
ARRAYS, PAGES, RING = (
    tl.constexpr(0),
    tl.constexpr(1),
    tl.constexpr(2),
)  # values for MEMORY: of keys and values
FLAG, RECOMPUTE = tl.constexpr(1), tl.constexpr(2)  # values for NONFINITE


class Config(NamedTuple):
    """The constants of a kernel. Assigned as tl.constexpr: else Triton makes tensors of what it holds.

    NONFINITE: FLAG blocks whose result is not finite, or RECOMPUTE flagged blocks with such values as zeros.
    """

    D: Any  # head dim and value dim, and the powers of two that hold them
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BM: Any  # rows of a block
    BN: Any  # keys of a tile
    PACK: Any
    CAUSAL: Any
    SIGN: Any  # what q is multiplied by first
    PRECISION: Any  # of float32 products
    HIDING: Any  # tiles are classified
    NONFINITE: Any
    SPLIT: Any  # a program takes a run of keys, and leaves a partial state
    USE_TMA: Any
    PRODUCER: Any  # a group of warps does nothing but load keys
    MEMORY: Any
    CODED: Any  # keys and values are codes
    invariants: Any  # functions of the mask and the score, from gpu/lower.py, or None
    apply: Any
    bounds: Any
    # of a backward pass: whether there is a score, what flows through it, and to which entries of a table
    SCORED: Any
    back: Any
    entry: Any
    SPREAD: Any


class Tensor(NamedTuple):
    """A pointer, and strides in elements."""

    p: Any
    item: Any  # or page
    head: Any
    row: Any
    column: Any


class Batch(NamedTuple):
    """The words that items share. p_items: ITEM words for each, where they differ; p_lengths: of keys, on the device.

    at_end: for keys that the device counts, the last query is at the last key, whatever q_start says.
    out_rows: rows of the output, where those past q_len are to be zeros.
    """

    p_items: Any
    p_lengths: Any
    q_len: Any
    k_len: Any
    q_start: Any
    at_end: Any
    k_start: Any
    out_rows: Any
    kv_heads: Any
    group: Any
    row_blocks: Any
    splits: Any


class Pages(NamedTuple):
    """Addresses of tokens that are not contiguous: a table of page numbers, or a ring behind the first tokens."""

    p_table: Any
    page_size: Any
    table_row: Any  # stride
    table_pages: Any  # columns
    page_count: Any
    p_status: Any  # flags page numbers and lengths out of range
    ring_first: Any
    ring: Any


class Item(NamedTuple):
    """One sequence of the batch. Lengths in tokens; o_q, o_k: its first row in packed arrays."""

    i_item: Any
    name: Any  # its index in masks
    q_len: Any
    k_len: Any
    q_start: Any
    o_q: Any
    o_k: Any
    out_len: Any


class Block(NamedTuple):
    """BM rows of an item and of PACK heads that share a kv head; and the split of its keys."""

    item: Item
    i_rows: Any
    i_split: Any
    i_heads: Any
    kv_head: Any


class Rows(NamedTuple):
    """The rows of a block. m_row: those that are queries, not padding."""

    token: Any
    head: Any
    m_row: Any


class Range(NamedTuple):
    """Keys that causality lets the rows of a block see: first … end - 1. Below `clear`, tiles are wholly visible.

    position: of every row; low, high: of the first and the last. limit: keys that a row may see.
    """

    position: Any
    low: Any
    high: Any
    limit: Any
    first: Any
    clear: Any
    end: Any


@triton.jit
def split_size(k_len):
    """Keys of a split: about a 64th of the sequence, between 256 and 2048; by its length alone."""
    return tl.minimum(tl.maximum((k_len + 8191) // 8192 * 128, 256), 2048)


@triton.jit
def locate_item(i_item, batch: Batch, pages: Pages, MEMORY: tl.constexpr):
    """The item: sizes from the batch, or from its words if items differ; k_len from the device if it counts keys."""
    q_len, k_len, q_start = i_item * 0 + batch.q_len, i_item * 0 + batch.k_len, i_item * 0 + batch.q_start
    o_q, o_k, name = i_item * 0, i_item * 0, i_item
    if batch.p_items is not None:
        p_item = batch.p_items + i_item * ITEM
        q_len, k_len, q_start = tl.load(p_item), tl.load(p_item + 1), tl.load(p_item + 2)
        o_q, o_k, name = tl.load(p_item + 3), tl.load(p_item + 4), tl.load(p_item + 5)
    if batch.p_lengths is not None:
        k_len = tl.load(batch.p_lengths + i_item).to(tl.int64)
        if MEMORY == PAGES:
            out_of_range = (k_len < 0) | (k_len > pages.table_pages.to(tl.int64) * pages.page_size)
            if out_of_range:
                tl.store(pages.p_status, 4)
            k_len = tl.where(out_of_range, 0, k_len)
        q_start = tl.where(batch.at_end != 0, k_len - q_len, q_start)
    out_len = q_len
    if batch.out_rows is not None:
        out_len = i_item * 0 + batch.out_rows
    return Item(i_item, name, q_len, k_len, q_start, o_q, o_k, out_len)


@triton.jit
def locate_block(pid, batch: Batch, pages: Pages, c: Config):
    """The block of a program. Blocks of one head are adjacent, so that its keys stay in the L2 cache; the last rows
    come first, since with causal they take longest.
    """
    i_split = pid % batch.splits
    i_rows = batch.row_blocks - 1 - pid // batch.splits % batch.row_blocks
    outer = pid // batch.splits // batch.row_blocks
    head_blocks = batch.kv_heads * batch.group // c.PACK
    i_heads = outer % head_blocks
    i_item = (outer // head_blocks).to(tl.int64)
    kv_head = (i_heads * c.PACK // batch.group).to(tl.int64)
    return Block(locate_item(i_item, batch, pages, c.MEMORY), i_rows, i_split, i_heads, kv_head)


@triton.jit
def has_rows(block: Block, c: Config):
    """Returns whether anything of the block is to be written."""
    live = block.i_rows * c.BM < block.item.out_len * c.PACK
    if c.SPLIT:
        live = live & (block.i_split * split_size(block.item.k_len) < block.item.k_len)
    return live


@triton.jit
def locate_rows(block: Block, c: Config):
    o_m = block.i_rows * c.BM + tl.arange(0, c.BM)
    token, head = (o_m // c.PACK).to(tl.int64), (block.i_heads * c.PACK + o_m % c.PACK).to(tl.int64)
    return Rows(token, head, token < block.item.q_len)


@triton.jit
def tile_range(block: Block, rows: Rows, batch: Batch, c: Config):
    """The keys of the block's split that causality does not hide."""
    item = block.item
    first, end, clear = item.i_item * 0, item.k_len, item.k_len
    if c.SPLIT:
        size = split_size(item.k_len)
        first = block.i_split * size
        end = tl.minimum(item.k_len, first + size)
    position = item.q_start + rows.token
    low = item.q_start + block.i_rows * c.BM // c.PACK
    high = item.q_start + tl.minimum((block.i_rows * c.BM + c.BM - 1) // c.PACK, item.q_len - 1)
    limit = tl.where(rows.m_row, item.k_len, 0)
    if c.CAUSAL:
        limit = tl.minimum(limit, tl.maximum(position - batch.k_start + 1, 0))
        clear = tl.minimum(clear, tl.maximum(low - batch.k_start + 1, 0))
        end = tl.minimum(end, tl.maximum(high - batch.k_start + 1, 0))
    end = tl.where(block.i_rows * c.BM < item.q_len * c.PACK, end, first)
    clear = tl.minimum(tl.maximum(tl.minimum(clear, end) // c.BN * c.BN, first), end)
    return Range(position, low, high, limit, first, clear, end)


@triton.jit
def keys_from(n, limit, BN: tl.constexpr):
    """How many of the keys n … n + BN - 1 lie below a limit: in 32 bits, since threads hold it for many rows."""
    return tl.minimum(tl.maximum(limit - n, 0), BN).to(tl.int32)


@triton.jit
def key_offsets(n, end, tensor: Tensor, i_item, pages: Pages, MEMORY: tl.constexpr):
    """Offsets of keys n, in elements from their head's start."""
    if MEMORY == PAGES:
        in_range = n < end
        page = tl.load(pages.p_table + i_item * pages.table_row + n // pages.page_size, mask=in_range, other=0)
        page = page.to(tl.int64)
        wrong = in_range & ((page < 0) | (page >= pages.page_count))
        p_status = pages.p_status + tl.zeros_like(wrong.to(tl.int32))
        tl.store(p_status, tl.full(wrong.shape, 2, tl.int32), mask=wrong)
        return tl.where(wrong, 0, page) * tensor.item + (n % pages.page_size) * tensor.row
    elif MEMORY == RING:  # the first tokens have fixed slots, the others wrap around
        return tl.where(n < pages.ring_first, n, pages.ring_first + (n - pages.ring_first) % pages.ring) * tensor.row
    else:
        return n * tensor.row


@triton.jit
def load_rows(p, o_rows, o_d, column, m_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """[rows, BLOCK] of an array; zeros past WIDTH, and in rows outside m_row where MASKED."""
    p_rows = p + o_rows[:, None] + o_d[None, :] * column
    if MASKED and WIDTH != BLOCK:
        return tl.load(p_rows, mask=m_row[:, None] & (o_d < WIDTH)[None, :], other=0.0)
    elif MASKED:
        return tl.load(p_rows, mask=m_row[:, None], other=0.0)
    elif WIDTH != BLOCK:
        return tl.load(p_rows, mask=(o_d < WIDTH)[None, :], other=0.0)
    else:
        return tl.load(p_rows)


# --- the end of a row


@triton.jit
def with_sinks(acc, running_max, running_sum, rows: Rows, p_sinks):
    """The state with every head's sink added: a logit without a value."""
    sink = tl.load(p_sinks + rows.head)
    new_max = tl.maximum(running_max, sink)
    base = finite_max(new_max)
    alpha = tl.math.exp2((running_max - base) * LOG2E)
    weight = tl.where(rows.m_row, tl.math.exp2((sink - base) * LOG2E), 0.0)
    return acc * alpha[:, None], tl.where(rows.m_row, new_max, running_max), running_sum * alpha + weight


@triton.jit
def finish_rows(acc, running_sum, divisor):
    """acc / running_sum, rounded once, of a row [DV] or of rows [BM, DV]; a row that sees nothing is 0.

    divisor: what dropout divides by as well, or None.
    """
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    if divisor is not None:
        total = total * divisor
    if len(acc.shape) == 2:
        total = total[:, None]
    return tl.math.div_rn(acc, tl.broadcast_to(total, acc.shape))
