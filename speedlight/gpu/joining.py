# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Rows that meet their keys part by part: what each part gives is joined to a state, which the last one ends."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .keys import axes
from .launch import Launch, named_strides, start
from .primitives import LOG2E, finite_max, log_sum_exp
from .schedule import power_above
from .sequence import Rows, finish_rows, with_sinks

_ELEMENTS = 1024  # of an accumulator that a program has


class Found(NamedTuple):
    """The results of some rows: out (…, value_dim) in the layout of q, and lse ([batch,] heads, rows)."""

    out: torch.Tensor
    lse: torch.Tensor


class State(NamedTuple):
    """The state of rows: accumulator as out, float32; stats as lse and two more: running_max, a logit, and
    running_sum.
    """

    acc: torch.Tensor
    stats: torch.Tensor


@triton.jit(do_not_specialize=["rows", "blocks"])
def join(
    part, p_item, p_head, p_row, p_column, part_lse, e_item, e_head, e_row,
    acc, a_item, a_head, a_row, a_column, stats, s_item, s_head, s_row,
    out, o_item, o_head, o_row, o_column, lse, l_item, l_head, l_row,
    sinks, counts, rows, heads, blocks,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BM: tl.constexpr, BEGINS: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: their state (none before where it BEGINS), a part added, stored or, where it ENDS,
    finished. Each part is one more key to a row: its lse the score, its out the value.
    """
    pid = tl.program_id(0)
    i_head, i_item = (pid // blocks % heads).to(tl.int64), (pid // blocks // heads).to(tl.int64)
    o_row_in = (pid % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    o_dv = tl.arange(0, BLOCK_DV).to(tl.int64)
    m_row = o_row_in < rows
    m_acc = m_row[:, None] & (o_dv < DV)[None, :]
    p_stats = stats + i_item * s_item + i_head * s_head + o_row_in * s_row
    p_acc = acc + i_item * a_item + i_head * a_head + o_row_in[:, None] * a_row + o_dv[None, :] * a_column
    running_max = tl.full([BM], float("-inf"), tl.float32)
    running_sum = tl.zeros([BM], tl.float32)
    b_acc = tl.zeros([BM, BLOCK_DV], tl.float32)
    if not BEGINS:
        running_max = tl.load(p_stats, mask=m_row, other=float("-inf"))
        running_sum = tl.load(p_stats + 1, mask=m_row, other=0.0)
        b_acc = tl.load(p_acc, mask=m_acc, other=0.0)
    if part is not None:
        p_part = part + i_item * p_item + i_head * p_head + o_row_in[:, None] * p_row + o_dv[None, :] * p_column
        p_score = part_lse + i_item * e_item + i_head * e_head + o_row_in * e_row
        score = tl.load(p_score, mask=m_row, other=float("-inf"))
        seen = score != float("-inf")
        b_part = tl.load(p_part, mask=m_acc, other=0.0)  # of rows that have seen nothing, anything
        new_max = tl.maximum(running_max, score)
        base = finite_max(new_max)
        alpha = tl.math.exp2((running_max - base) * LOG2E)
        weight = tl.math.exp2((score - base) * LOG2E)
        b_acc = tl.where(seen[:, None], b_acc * alpha[:, None] + b_part * weight[:, None], b_acc)
        running_sum = running_sum * alpha + weight
        running_max = new_max
    if ENDS:
        if sinks is not None:
            m_query = m_row
            if counts is not None:
                m_query = o_row_in < tl.load(counts + i_item)
            owners = Rows(o_row_in, tl.zeros([BM], tl.int64) + i_head, m_query)
            b_acc, running_max, running_sum = with_sinks(b_acc, running_max, running_sum, owners, sinks)
        result = finish_rows(b_acc, running_sum, None)
        p_out = out + i_item * o_item + i_head * o_head + o_row_in[:, None] * o_row + o_dv[None, :] * o_column
        tl.store(p_out, result.to(out.dtype.element_ty), mask=m_acc)
        p_lse = lse + i_item * l_item + i_head * l_head + o_row_in * l_row
        tl.store(p_lse, log_sum_exp(running_max, running_sum), mask=m_row)
    else:
        tl.store(p_acc, b_acc, mask=m_acc)
        tl.store(p_stats, running_max, mask=m_row)
        tl.store(p_stats + 1, running_sum, mask=m_row)


class Ending(NamedTuple):
    """The end of rows: sinks, float32, one per head; and how many rows of each item are queries, where not all are.

    Both lie where the rows do; None where there is nothing to say.
    """

    sinks: torch.Tensor | None = None
    counts: torch.Tensor | None = None


def joining(
    layout: str, part: Found | None, state: State, into: Found, ending: Ending, *, begins: bool, ends: bool
) -> Launch:
    """The launch of joined()."""
    out, lse = into
    width, rows, heads = out.shape[-1], lse.shape[-1], lse.shape[-2]
    columns = max(16, power_above(width))
    block = max(1, _ELEMENTS // columns)
    blocks = -(-rows // block)
    arguments = {
        "part": None if part is None else part.out, "part_lse": None if part is None else part.lse,
        **named_strides("p", (0,) * 4 if part is None else axes(part.out, layout)),
        **named_strides("e", (0,) * 3 if part is None else _of_rows(part.lse)),
        "acc": state.acc, **named_strides("a", axes(state.acc, layout)),
        "stats": state.stats, **named_strides("s", _of_rows(state.stats[..., 0])),
        "out": out, **named_strides("o", axes(out, layout)), "lse": lse, **named_strides("l", _of_rows(lse)),
        "sinks": ending.sinks, "counts": ending.counts, "rows": rows, "heads": heads, "blocks": blocks,
        "DV": width, "BLOCK_DV": columns, "BM": block, "BEGINS": begins, "ENDS": ends,
    }  # fmt: skip
    return Launch(join, (math.prod(lse.shape[:-1]) * blocks,), arguments, 4, 1)


def joined(
    layout: str, part: Found | None, state: State, into: Found, ending: Ending, *, begins: bool, ends: bool
) -> None:
    """Adds a part of the keys to a state, which is written anew where it begins; where it ends, writes out and lse
    instead. None: a part without keys.
    """
    start(joining(layout, part, state, into, ending, begins=begins, ends=ends))


def _of_rows(x: torch.Tensor) -> tuple[int, ...]:
    """Strides as (item, head, row)."""
    return x.stride() if x.ndim == 3 else (0, *x.stride())
