# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Sums beside the backward kernel: of each row d_out · out, and so the gradients of sinks; of each entry of a table
its terms.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_tiles import FAR, head_of
from .sequence import ARRAYS, Batch, Tensor, load_rows, locate_item


@triton.jit(do_not_specialize=["q_len", "blocks"])
def sum_rows(
    out, o_item, o_head, o_row, o_column, d_out, g_item, g_head, g_row, g_column,
    lse, l_item, l_head, l_row, d_lse, e_item, e_head, e_row, delta, d_item, d_head, d_row,
    sinks, shares, items, q_len, heads, blocks,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta of a block of rows of a head; with sinks also the block's share of its sink's gradient, in float64."""
    pid = tl.program_id(0)
    head = (pid // blocks % heads).to(tl.int64)
    batch = Batch(items, None, q_len, 0, 0, 0, 0, None, heads, 1, 1, 1)
    item = locate_item((pid // blocks // heads).to(tl.int64), batch, None, ARRAYS)
    token = (pid % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    m_row, o_dv = token < item.q_len, tl.arange(0, BLOCK_DV).to(tl.int64)
    outs, flows = Tensor(out, o_item, o_head, o_row, o_column), Tensor(d_out, g_item, g_head, g_row, g_column)
    p_out = head_of(outs, item.i_item, head, item.o_q)
    p_flow = head_of(flows, item.i_item, head, item.o_q)
    b_out = load_rows(p_out, token * o_row, o_dv, o_column, m_row, DV, BLOCK_DV, True)
    b_flow = load_rows(p_flow, token * g_row, o_dv, g_column, m_row, DV, BLOCK_DV, True)
    total = tl.sum(b_out.to(tl.float32) * b_flow.to(tl.float32), 1)
    of_lse = tl.zeros([BM], tl.float32)
    if d_lse is not None:
        p_flow = head_of(Tensor(d_lse, e_item, e_head, e_row, 1), item.i_item, head, item.o_q) + token * e_row
        of_lse = tl.load(p_flow, mask=m_row, other=0.0)
    p_delta = head_of(Tensor(delta, d_item, d_head, d_row, 1), item.i_item, head, item.o_q) + token * d_row
    tl.store(p_delta, total - of_lse, mask=m_row)
    if sinks is not None:
        p_lse = head_of(Tensor(lse, l_item, l_head, l_row, 1), item.i_item, head, item.o_q) + token * l_row
        of_rows, sink = tl.load(p_lse, mask=m_row, other=float("-inf")), tl.load(sinks + head)
        exponent = sink - of_rows.to(tl.float64)
        exponent = tl.where((tl.abs(of_rows) >= FAR) & (exponent > 0.0), 0.0, exponent)
        seen = (of_rows != float("-inf")) & (sink != float("-inf"))
        total = tl.sum(b_out.to(tl.float64) * b_flow.to(tl.float64), 1) - of_lse.to(tl.float64)
        share = tl.where(seen, -tl.math.exp(tl.where(seen, exponent, 0.0)) * total, 0.0)
        tl.store(shares + pid + tl.arange(0, 1), tl.sum(tl.reshape(share, [1, BM]), 1))


@triton.jit(do_not_specialize=["entries"])
def sum_terms(values, order, starts, total, entries, ENTRIES_AT_ONCE: tl.constexpr, TERMS: tl.constexpr):
    """Adds to each entry its terms, which `order` brings together: entry e has those from starts[e] on."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES_AT_ONCE + tl.arange(0, ENTRIES_AT_ONCE)
    there = entry < entries
    first = tl.load(starts + entry, mask=there, other=0)
    count = tl.load(starts + entry + 1, mask=there, other=0) - first
    acc = tl.load(total + entry, mask=there, other=0.0)
    for t in tl.range(0, tl.max(count, 0), TERMS):
        o_t = t + tl.arange(0, TERMS)
        m = o_t[None, :] < count[:, None]
        at = tl.load(order + first[:, None] + o_t[None, :], mask=m, other=0)
        acc += tl.sum(tl.load(values + at, mask=m, other=0.0), 1)
    tl.store(total + entry, acc, mask=there)
