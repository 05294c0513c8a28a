# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Splits: where few rows read many keys, several programs share a row's keys. Their partial states, and the merge."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import LOG2E, finite_max, log_sum_exp
from .sequence import ARRAYS, Batch, finish_rows, locate_item, split_size

GROUP = tl.constexpr(16)  # splits that are merged at once: the order of the sum depends on nothing else


class Partial(NamedTuple):
    """States of rows: an accumulator [DV] each, and two numbers: the maximum, which is a logit, and the sum."""

    p_acc: Any
    p_stats: Any


@triton.jit
def row_of_state(i_item, kv_head, i_split, i_row, batch: Batch, padded_rows):
    """Which row of the partial states is that of row i_row of a kv head."""
    return ((i_item * batch.kv_heads + kv_head) * batch.splits + i_split) * padded_rows + i_row


@triton.jit(do_not_specialize=["q_len", "k_len", "out_rows", "splits", "padded_rows"])
def combine(
    partial, stats,
    out, o_item, o_head, o_row, o_column,
    lse, l_item, l_head, l_row,
    sinks,
    items, lengths, q_len, k_len, out_rows, kv_heads, group, padded_rows, splits,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """One row of one kv head: its splits' states, merged in ascending order."""
    i_row, kv_head, i_item = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    batch = Batch(items, lengths, q_len, k_len, 0, 0, out_rows, kv_heads, group, 1, splits)
    item = locate_item(i_item, batch, None, ARRAYS)
    token, head = (i_row // PACK).to(tl.int64), kv_head * group + i_row % PACK
    if token < item.out_len:
        first = row_of_state(i_item, kv_head, 0, i_row, batch, padded_rows)
        size = split_size(item.k_len)
        count = tl.minimum((item.k_len + size - 1) // size, splits)
        running_max = greatest(stats, first, padded_rows, count)
        if sinks is not None:
            sink = tl.load(sinks + head)
            running_max = tl.where(token < item.q_len, tl.maximum(running_max, sink), running_max)
        base = finite_max(running_max)
        acc, running_sum = weighted(Partial(partial, stats), first, padded_rows, count, base, DV, BLOCK_DV)
        if sinks is not None:
            running_sum += tl.where(token < item.q_len, tl.math.exp2((sink - base) * LOG2E), 0.0)
        o_dv = tl.arange(0, BLOCK_DV)
        p_out = out + i_item * o_item + (item.o_q + token) * o_row + head * o_head + o_dv * o_column
        tl.store(p_out, finish_rows(acc, running_sum).to(out.dtype.element_ty), mask=o_dv < DV)
        if lse is not None:
            p_lse = lse + i_item * l_item + head * l_head + (item.o_q + token) * l_row
            tl.store(p_lse, log_sum_exp(running_max, running_sum))


@triton.jit
def greatest(p_stats, first, padded_rows, count):
    """The maximum over a row's splits; -inf where none has seen a key."""
    o_g = tl.arange(0, GROUP)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    for i in tl.range(0, count, GROUP):
        row = first + (i + o_g) * padded_rows
        top = tl.maximum(top, tl.load(p_stats + row * 2, mask=i + o_g < count, other=float("-inf")))
    return tl.max(top, 0)


@triton.jit
def weighted(states: Partial, first, padded_rows, count, base, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """(acc, running_sum) of all splits of a row, relative to the logit `base`."""
    o_g, o_dv = tl.arange(0, GROUP), tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    running_sum = 0.0
    for i in tl.range(0, count, GROUP):
        row = first + (i + o_g) * padded_rows
        m_g = i + o_g < count
        weight = tl.math.exp2((tl.load(states.p_stats + row * 2, mask=m_g, other=float("-inf")) - base) * LOG2E)
        running_sum += tl.sum(weight * tl.load(states.p_stats + row * 2 + 1, mask=m_g, other=0.0), 0)
        p_acc = states.p_acc + row[:, None] * DV + o_dv[None, :]
        b_acc = tl.load(p_acc, mask=m_g[:, None] & (o_dv < DV)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * b_acc, 0)
    return acc, running_sum
