# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Around the attention kernel when sequences grow: merging the splits of a row, and storing new tokens on the
device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import ITEM, split_size
from .primitives import LOG2E, finite_max, log_sum_exp

GROUP = tl.constexpr(16)  # splits that are merged at once: the order of the sum depends on nothing else


@triton.jit(do_not_specialize=["q_len", "k_len", "out_rows", "splits", "padded_rows"])
def combine(
    partial,
    stats,
    out,
    lse,
    sinks,
    items,
    lengths,
    o_item,
    o_head,
    o_row,
    o_column,
    l_item,
    l_head,
    l_row,
    q_len,
    k_len,
    out_rows,
    kv_heads,
    group,
    padded_rows,
    splits,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PACK: tl.constexpr,
):
    """One row of one kv head: its splits' states, merged in ascending order."""
    r, kv_head, item = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    q_first = item * 0
    q_len, k_len = item * 0 + q_len, item * 0 + k_len
    if items is not None:
        q_len, k_len, q_first = (
            tl.load(items + item * ITEM),
            tl.load(items + item * ITEM + 1),
            tl.load(items + item * ITEM + 3),
        )
    if lengths is not None:
        k_len = tl.load(lengths + item).to(tl.int64)
    out_len = q_len
    if out_rows is not None:
        out_len = item * 0 + out_rows
    token, head = (r // PACK).to(tl.int64), kv_head * group + r % PACK
    if token < out_len:
        size = split_size(k_len)
        count = tl.minimum((k_len + size - 1) // size, splits)
        o_g, o_dv = tl.arange(0, GROUP), tl.arange(0, BLOCK_DV)
        base = (item * kv_heads + kv_head) * splits
        top = tl.full([GROUP], float("-inf"), tl.float32)
        for s in tl.range(0, count, GROUP):
            row = (base + s + o_g) * padded_rows + r
            top = tl.maximum(top, tl.load(stats + row * 2, mask=s + o_g < count, other=float("-inf")))
        running_max = tl.max(top, 0)
        if sinks is not None:
            sink = tl.load(sinks + head)
            running_max = tl.where(token < q_len, tl.maximum(running_max, sink), running_max)
        least = finite_max(running_max)
        acc = tl.zeros([BLOCK_DV], tl.float32)
        running_sum = 0.0
        for s in tl.range(0, count, GROUP):
            row = (base + s + o_g) * padded_rows + r
            held = s + o_g < count
            weight = tl.math.exp2((tl.load(stats + row * 2, mask=held, other=float("-inf")) - least) * LOG2E)
            running_sum += tl.sum(weight * tl.load(stats + row * 2 + 1, mask=held, other=0.0), 0)
            states = tl.load(
                partial + row[:, None] * DV + o_dv[None, :], mask=held[:, None] & (o_dv < DV)[None, :], other=0.0
            )
            acc += tl.sum(weight[:, None] * states, 0)
        if sinks is not None:
            running_sum += tl.where(token < q_len, tl.math.exp2((sink - least) * LOG2E), 0.0)
        total = tl.where(running_sum == 0.0, 1.0, running_sum)
        result = tl.math.div_rn(acc, total + tl.zeros([BLOCK_DV], tl.float32))
        p_out = out + item * o_item + (q_first + token) * o_row + head * o_head + o_dv * o_column
        tl.store(p_out, result.to(out.dtype.element_ty), mask=o_dv < DV)
        if lse is not None:
            tl.store(
                lse + item * l_item + head * l_head + (q_first + token) * l_row, log_sum_exp(running_max, running_sum)
            )


@triton.jit(do_not_specialize=["n_new", "capacity", "programs"])
def store(
    k,
    v,
    keys,
    values,
    k_scales,
    v_scales,
    counts,
    lengths,
    arrived,
    pages,
    status,
    k_item,
    k_head,
    k_row,
    k_column,
    v_item,
    v_head,
    v_row,
    v_column,
    first,
    K_item,
    K_head,
    K_row,
    V_item,
    V_head,
    V_row,
    S_item,
    S_head,
    S_row,
    n_new,
    capacity,
    page_size,
    table_row,
    programs,
    ring_first,
    ring,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RING: tl.constexpr,
):
    """New token n of an item, all heads, to where it belongs; the last program to finish with an item makes it longer.

    counts: new tokens of each item, where they differ. first: of packed tokens, each item's first (or None). A sequence
    that would pass its capacity stays as it is, and the status says so.
    """
    n, item = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + item).to(tl.int64)
    count = n_new
    if counts is not None:
        count = tl.load(counts + item).to(tl.int32)
    fits = length + count <= capacity
    if fits & (n < count):
        o_h, o_d, o_dv = (
            tl.arange(0, BLOCK_H).to(tl.int64),
            tl.arange(0, BLOCK_D).to(tl.int64),
            tl.arange(0, BLOCK_DV).to(tl.int64),
        )
        at = length + n
        source = n + item * 0
        row = item * (k_item * 0 + 1)
        if first is not None:
            source = source + tl.load(first + item)
            row = item * 0
        slot, block = at, item
        if RING:
            slot = tl.where(at < ring_first, at, ring_first + (at - ring_first) % ring)
        if pages is not None:
            block = tl.load(pages + item * table_row + at // page_size).to(tl.int64)
            slot = at % page_size
        m_h = (o_h < HEADS)[:, None]
        m_k, m_v = m_h & (o_d < D)[None, :], m_h & (o_dv < DV)[None, :]
        new_k = tl.load(
            k + row * k_item + source * k_row + o_h[:, None] * k_head + o_d[None, :] * k_column, mask=m_k, other=0.0
        )
        new_v = tl.load(
            v + row * v_item + source * v_row + o_h[:, None] * v_head + o_dv[None, :] * v_column, mask=m_v, other=0.0
        )
        p_k = keys + block * K_item + slot * K_row + o_h[:, None] * K_head + o_d[None, :]
        p_v = values + block * V_item + slot * V_row + o_h[:, None] * V_head + o_dv[None, :]
        if k_scales is None:
            tl.store(p_k, new_k, mask=m_k)
            tl.store(p_v, new_v, mask=m_v)
        else:
            codes, scale = coded(new_k.to(tl.float32))
            tl.store(p_k, codes, mask=m_k)
            tl.store(k_scales + block * S_item + slot * S_row + o_h * S_head, scale, mask=o_h < HEADS)
            codes, scale = coded(new_v.to(tl.float32))
            tl.store(p_v, codes, mask=m_v)
            tl.store(v_scales + block * S_item + slot * S_row + o_h * S_head, scale, mask=o_h < HEADS)
    if arrived is not None:
        # every warp of every program has read the length before the program arrives, so the last one may change it
        tl.debug_barrier()
        if tl.atomic_add(arrived + item, 1) == programs - 1:
            tl.store(arrived + item, 0)
            if fits:
                tl.store(lengths + item, (length + count).to(lengths.dtype.element_ty))
            else:
                tl.store(status, 1)


@triton.jit
def coded(x):
    """int8 codes and a scale per row: its largest magnitude over 127. A row with NaN or infinity is NaN."""
    most = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    scale = tl.where(most < float("inf"), tl.math.div_rn(most, tl.full(most.shape, 127.0, tl.float32)), float("nan"))
    by = tl.where(scale > 0.0, scale, 1.0)
    ratio = tl.math.div_rn(x, tl.broadcast_to(by[:, None], x.shape))
    codes = (ratio + 12582912.0) - 12582912.0  # to the nearest even
    codes = tl.where((scale > 0.0)[:, None], tl.minimum(tl.maximum(codes, -127.0), 127.0), 0.0)
    return codes.to(tl.int8), scale
