# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""The kernel that appends new tokens on the device: to caches and pools, as they are or as codes; to raw pages."""

from __future__ import annotations

import triton
import triton.language as tl

from .sequence import Tensor


@triton.jit(do_not_specialize=["n_new", "capacity", "programs", "page_count"])
def store(
    k, k_item, k_head, k_row, k_column,
    v, v_item, v_head, v_row, v_column,
    keys, K_item, K_head, K_row, K_column,
    values, V_item, V_head, V_row, V_column,
    k_scales, v_scales, S_item, S_head, S_row,
    lengths, counts, first, arrived, after, status,
    pages, page_size, page_count, table_row, ring_first, ring,
    n_new, capacity, programs,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Stores new token n of an item, all heads, in its slot; the last program of an item advances its length.

    counts: new tokens of each item, where they differ. first: of packed tokens, each item's first (or None). A sequence
    that would pass its capacity stays as it is, and the status says so. after: of the caller's pages, of which nothing
    is known, the lengths that each item's first program tells; one with a page that is none stays as it is, too.
    """
    # all in x: the grid has no more than 65,535 programs in y
    n, i_item = tl.program_id(0) % programs, (tl.program_id(0) // programs).to(tl.int64)
    length = tl.load(lengths + i_item).to(tl.int64)
    count = n_new
    if counts is not None:
        count = tl.load(counts + i_item).to(tl.int32)
    fits = length + count <= capacity
    if after is not None:
        wrong = tl.where(fits & (length >= 0) & (count >= 0) & (count <= n_new), 0, 4)
        if (wrong == 0) & (count > 0):
            wrong = check_pages(pages + i_item * table_row, length, count, page_size, page_count)
        fits = wrong == 0
        if n == 0:
            tl.store(after + i_item, tl.where(fits, length + count, length).to(after.dtype.element_ty))
            if wrong != 0:
                tl.store(status, wrong)
    if fits & (n < count):
        o_h = tl.arange(0, BLOCK_H).to(tl.int64)
        at = length + n
        slot, block = at, i_item
        if RING:
            slot = tl.where(at < ring_first, at, ring_first + (at - ring_first) % ring)
        if pages is not None:
            block = tl.load(pages + i_item * table_row + at // page_size).to(tl.int64)
            slot = at % page_size
        new_k, m_k = load_token(Tensor(k, k_item, k_head, k_row, k_column), n, i_item, first, o_h, HEADS, D, BLOCK_D)
        new_v, m_v = load_token(Tensor(v, v_item, v_head, v_row, v_column), n, i_item, first, o_h, HEADS, DV, BLOCK_DV)
        p_k = token_at(Tensor(keys, K_item, K_head, K_row, K_column), block, slot, o_h, BLOCK_D)
        p_v = token_at(Tensor(values, V_item, V_head, V_row, V_column), block, slot, o_h, BLOCK_DV)
        if k_scales is None:
            tl.store(p_k, new_k, mask=m_k)
            tl.store(p_v, new_v, mask=m_v)
        else:
            o_scale = block * S_item + slot * S_row + o_h * S_head
            store_codes(p_k, new_k, m_k, k_scales + o_scale, o_h < HEADS)
            store_codes(p_v, new_v, m_v, v_scales + o_scale, o_h < HEADS)
    if arrived is not None:
        count_tokens(arrived + i_item, lengths + i_item, status, length + count, fits, programs)


@triton.jit
def count_tokens(p_arrived, p_length, p_status, total, fits, programs):
    """Makes a sequence longer in its last program, when all warps of all programs have read the length."""
    tl.debug_barrier()
    if tl.atomic_add(p_arrived, 1) == programs - 1:
        tl.store(p_arrived, 0)
        if fits:
            tl.store(p_length, total.to(p_length.dtype.element_ty))
        else:
            tl.store(p_status, 1)


@triton.jit
def check_pages(p_table, length, count, page_size, page_count):
    """2 where a page that new tokens would lie in is none, else 0."""
    wrong = 0
    for i in tl.range(length // page_size, (length + count - 1) // page_size + 1):
        page = tl.load(p_table + i).to(tl.int64)
        wrong = tl.where((page < 0) | (page >= page_count), 2, wrong)
    return wrong


@triton.jit
def store_codes(p, new, mask, p_scales, m_head):
    """Rows as codes, and their scales."""
    codes, scale = quantized(new.to(tl.float32), p.dtype.element_ty)
    tl.store(p, codes, mask=mask)
    tl.store(p_scales, scale, mask=m_head)


@triton.jit
def load_token(new: Tensor, n, i_item, first, o_h, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """New token n of an item, the rows of all heads, [heads, BLOCK], and the mask of those elements that exist."""
    token, item = n + i_item * 0, i_item
    if first is not None:
        token, item = token + tl.load(first + i_item), i_item * 0
    m = (o_h < HEADS)[:, None] & (tl.arange(0, BLOCK) < WIDTH)[None, :]
    return tl.load(token_at(new, item, token, o_h, BLOCK), mask=m, other=0.0), m


@triton.jit
def token_at(x: Tensor, item, row, o_h, BLOCK: tl.constexpr):
    """Pointers to the rows of all heads of a token, [heads, BLOCK]."""
    o_d = tl.arange(0, BLOCK).to(tl.int64)
    return x.p + item * x.item + row * x.row + o_h[:, None] * x.head + o_d[None, :] * x.column


@triton.jit
def quantized(x, dtype: tl.constexpr):
    """Codes, of int8 or as bits of e4m3 (uint8), and a scale per row: its largest magnitude over the largest code. A
    row with NaN or infinity is NaN.
    """
    tl.static_assert((dtype == tl.int8) | (dtype == tl.uint8), "codes of a format that has no rounding here")
    LAST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    most = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    scale = tl.where(most < float("inf"), tl.math.div_rn(most, tl.full(most.shape, LAST, tl.float32)), float("nan"))
    by = tl.where(scale > 0.0, scale, 1.0)
    ratio = tl.math.div_rn(x, tl.broadcast_to(by[:, None], x.shape))
    codes = tl.where((scale > 0.0)[:, None], tl.minimum(tl.maximum(ratio, -LAST), LAST), 0.0)
    if dtype == tl.int8:
        return nearest(codes).to(tl.int8), scale
    else:
        return e4m3_bits(codes), scale


@triton.jit
def nearest(x):
    """Rounded to a whole number, to the even one half way between two; |x| is below 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bits(x):
    """|x| <= 448 as e4m3fn's bits in uint8, to nearest even."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponents are biased by 127, then by 7
    small = nearest(size * 512.0).to(tl.int32)  # of what is below 2^-6; 8 are the first normal number
    sign = tl.where(x.to(tl.int32, bitcast=True) < 0, 128, 0)
    return (tl.where(size < 0.015625, small, normal) + sign).to(tl.uint8)
