# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Splits (flash decoding): several programs share the keys of few rows. Their partial states, and the merge."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .primitives import LOG2E, finite_max, log_sum_exp
from .sequence import ARRAYS, Batch, finish_rows, locate_item, split_size

GROUP = tl.constexpr(16)  # splits that are merged at once; the order of sums depends on nothing else


class States(NamedTuple):
    """Partial states of one row: `splits` of them, from index `first` on.

    p_acc: an accumulator [DV] each. p_stats: two numbers each: the maximum, which is a logit, and the sum.
    """

    p_acc: Any
    p_stats: Any
    first: Any
    splits: Any
    i_row: Any
    padded_rows: Any


@triton.jit
def first_state(i_item, kv_head, batch: Batch):
    """Returns the index of a kv head's first split: states lie in the order of items, kv heads, splits, rows."""
    return (i_item * batch.kv_heads + kv_head) * batch.splits


@triton.jit(do_not_specialize=["q_len", "k_len", "out_rows", "splits", "rows", "padded_rows", "divisor"])
def combine(
    partial, stats, out, lse, sinks, items, lengths,
    o_item, o_head, o_row, o_column, l_item, l_head, l_row,
    q_len, k_len, out_rows, kv_heads, group, rows, padded_rows, splits, divisor,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Merges the states of the splits of one row, in ascending order."""
    pid = tl.program_id(0)  # all in x: the grid has no more than 65,535 programs in y and z
    i_row, i_head = pid % rows, (pid // rows).to(tl.int64)
    kv_head, i_item = i_head % kv_heads, i_head // kv_heads
    batch = Batch(items, lengths, q_len, k_len, 0, 1, 0, out_rows, kv_heads, group, 1, splits)
    item = locate_item(i_item, batch, None, ARRAYS)
    token, head = (i_row // PACK).to(tl.int64), kv_head * group + i_row % PACK
    if token < item.out_len:
        size = split_size(item.k_len)
        count = tl.minimum((item.k_len + size - 1) // size, splits)
        states = States(partial, stats, first_state(i_item, kv_head, batch), count, i_row, padded_rows)
        running_max = greatest(states)
        if sinks is not None:
            sink = tl.load(sinks + head)
            running_max = tl.where(token < item.q_len, tl.maximum(running_max, sink), running_max)
        base = finite_max(running_max)
        acc, running_sum = weighted(states, base, DV, BLOCK_DV)
        if sinks is not None:
            running_sum += tl.where(token < item.q_len, tl.math.exp2((sink - base) * LOG2E), 0.0)
        o_dv = tl.arange(0, BLOCK_DV)
        result = finish_rows(acc, running_sum, divisor)
        p_out = out + i_item * o_item + (item.o_q + token) * o_row + head * o_head + o_dv * o_column
        tl.store(p_out, result.to(out.dtype.element_ty), mask=o_dv < DV)
        if lse is not None:
            p_lse = lse + i_item * l_item + head * l_head + (item.o_q + token) * l_row
            tl.store(p_lse, log_sum_exp(running_max, running_sum))


@triton.jit
def greatest(states: States):
    """Returns the maximum over a row's splits; -inf if all their keys are hidden."""
    o_g = tl.arange(0, GROUP)
    top = tl.full([GROUP], float("-inf"), tl.float32)
    for i in tl.range(0, states.splits, GROUP):
        row = (states.first + i + o_g) * states.padded_rows + states.i_row
        top = tl.maximum(top, tl.load(states.p_stats + row * 2, mask=i + o_g < states.splits, other=float("-inf")))
    return tl.max(top, 0)


@triton.jit
def weighted(states: States, base, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Returns (acc, running_sum) of all splits of a row, relative to the logit `base`."""
    o_g, o_dv = tl.arange(0, GROUP), tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    running_sum = 0.0
    for i in tl.range(0, states.splits, GROUP):
        row = (states.first + i + o_g) * states.padded_rows + states.i_row
        m_g = i + o_g < states.splits
        weight = tl.math.exp2((tl.load(states.p_stats + row * 2, mask=m_g, other=float("-inf")) - base) * LOG2E)
        running_sum += tl.sum(weight * tl.load(states.p_stats + row * 2 + 1, mask=m_g, other=0.0), 0)
        m_acc = m_g[:, None] & (o_dv < DV)[None, :]
        b_acc = tl.load(states.p_acc + row[:, None] * DV + o_dv[None, :], mask=m_acc, other=0.0)
        acc += tl.sum(weight[:, None] * b_acc, 0)
    return acc, running_sum
