"""Calls over chosen keys: each query is an item of its own, and sees the keys of a list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...host.machine import PRODUCTS, Isa, number_bytes
from ...problem.operands import Dense, Rows
from ...problem.problem import LAYOUTS, Problem
from ...problem.results import ResultLayout
from ..memory.operands import Paged, columns_of_keys
from ..memory.records import Item
from ..runtime.tuned import tuning_of
from .forward_call import Call, words_of
from .schedule import product_name, schedule

_NO_UPCOMING = "upcoming", "q_lines", "out_lines", "k_lines", "v_lines", "next_positions", "next_keys"


def takes(problem: Problem, keys: Dense | Paged, isa: Isa) -> bool:
    """Returns whether chosen keys alone are read: they lie in arrays, or in pages of rows, as numbers."""
    if problem.dropout or problem.partial or problem.quantised or (isinstance(keys, Paged) and keys.pages.lanes):
        return False
    return PRODUCTS[product_name(problem, isa)].together == 1


def prepare_chosen(problem: Problem, rows: Rows, keys: Dense | Paged, threads: int, isa: Isa) -> Call:
    """Prepares a call of chosen keys: everything that addresses don't change."""
    chosen = problem.chosen
    strides = keys.strides(problem.key_dtype)._replace(is_paged=True)
    counts = chosen.counts.max(axis=1).reshape(-1)
    item, row, is_used = _queries_of(problem)
    at = item * (chosen.lists.shape[2] if chosen.first is None else 0) + row
    if chosen.first is not None:
        at += np.array(chosen.first, np.int64)[item]
    at = np.where(is_used, at, 0)
    each = tuple(np.where(is_used, counts[at], 0).tolist()) if len(counts) else ()
    single = replace(problem, q_lengths=(1,) * len(item), k_lengths=each, q_starts=(0,) * len(item), rows=None)
    how = schedule(single, isa, threads, strides, tuning_of(isa))
    items = _items_of(problem, rows, keys, (item, row, is_used), -(-problem.group // how.block_rows))
    lists = chosen.lists
    of_item = lists.strides[0] if chosen.first is None else 0
    of_row = row if chosen.first is None else row + np.array(chosen.first, np.int64)[item]
    items[:, Item._fields.index("chosen")] = lists.ctypes.data + item * of_item + of_row * lists.strides[2]
    words = words_of(problem, how, rows, keys) | {
        "item_count": len(items), "chosen_head": lists.strides[1] if chosen.has_heads else 0,
    }  # fmt: skip
    words = {name: x for name, x in words.items() if name not in _NO_UPCOMING}
    form = ResultLayout.of(rows.layout, rows.q, problem.value_dim, rows.out_strides)
    in_parts = words.get("latent_dim", 0) > 0
    call = Call(problem, how, words, items, form, strides, in_parts=in_parts, chosen=True)
    call.machine = threads, isa.name
    return call


def _queries_of(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns of each row of out its item, its number there, and whether it has a query."""
    lengths = np.array(problem.q_lengths, np.int64)
    of_items = lengths if problem.rows is None else np.full(problem.batch, problem.rows, np.int64)
    item = np.repeat(np.arange(problem.batch, dtype=np.int64), of_items)
    row = np.arange(len(item), dtype=np.int64) - np.repeat(np.cumsum(of_items) - of_items, of_items)
    return item, row, row < lengths[item]


def _items_of(
    problem: Problem, rows: Rows, keys: Dense | Paged, queries: tuple[np.ndarray, ...], blocks: int
) -> np.ndarray:
    """Returns the kernel's table of items, one for each query."""
    item, row, is_used = queries
    number, (q_row, out_row) = number_bytes(problem.storage), rows.strides(-2)
    if rows.first is not None:
        first = np.array(rows.first, np.int64)[item] + row
        q_at, out_at, lse_at = first * q_row, first * out_row, first * number
    else:
        axis, padded = LAYOUTS[rows.layout][0], problem.rows or max(problem.q_lengths, default=0)
        batched = len(rows.layout) == 4
        q_item, out_item = (x[axis] if batched else 0 for x in (rows.q.strides, rows.out_strides))
        q_at, out_at = item * q_item + row * q_row, item * out_item + row * out_row
        lse_at = (item * (problem.q_heads * padded) + row) * number
    index = np.arange(problem.batch) if problem.items is None else np.array(problem.items, np.int64)
    zeros = np.zeros(len(item), np.int64)
    of_keys = {name: np.asarray(x)[item] for name, x in columns_of_keys(keys, problem.batch).items()}
    columns = Item(
        first=zeros,
        blocks=zeros + blocks,
        q_len=zeros + 1,
        k_len=np.where(is_used, np.array(problem.k_lengths, np.int64)[item], 0),
        start=np.array(problem.q_starts, np.int64)[item] - problem.k_start + row,
        q_at=q_at,
        out_at=out_at,
        lse_at=lse_at,
        index=np.where(is_used, index[item], -1),
        first_key=zeros,
        rows=zeros,
        chosen=zeros,
        **of_keys,
    )
    return np.ascontiguousarray(np.stack(columns, axis=1)) if len(item) else np.zeros((0, len(Item._fields)), np.int64)
