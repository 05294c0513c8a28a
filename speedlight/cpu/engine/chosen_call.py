"""Calls over chosen keys: each query is an item of its own, and sees the keys of a list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ...host.machine import PRODUCTS, Isa, current_isa, number_bytes
from ...host.rounding import standard
from ...problem.chosen import joined, read_share, work_of
from ...problem.operands import Dense, PagedKeys, Rows, Strides
from ...problem.problem import LAYOUTS, Problem
from ...problem.results import ResultLayout
from ...problem.work import count, key_bytes
from ..memory.operands import Paged, columns_of_keys
from ..memory.records import Item
from ..memory.shape import Shape
from ..runtime.tuned import tuning_of
from .forward_call import Call, plan_of_kernel, program_of, shape_of, words_of
from .forward_call import plan as plan_masked
from .forward_call import prepare as prepare_masked
from .schedule import Schedule, product_name, schedule

if TYPE_CHECKING:
    from ...problem.plan import Plan

_NO_UPCOMING = "upcoming", "q_lines", "out_lines", "k_lines", "v_lines", "next_positions", "next_keys"


def takes(problem: Problem, keys: Dense | Paged | None, isa: Isa) -> bool:
    """Returns whether chosen keys alone are read: they lie in arrays, or in pages of rows, as numbers."""
    if problem.dropout or problem.partial or problem.quantised or (isinstance(keys, Paged) and keys.pages.lanes):
        return False
    return PRODUCTS[product_name(problem, isa)].together == 1


def kernel_of_chosen(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[Schedule, Shape]:
    """Returns the schedule of a call of chosen keys, and its kernel's shape."""
    item, row, is_used = _queries_of(problem)
    at, counts = _lists_of(problem, item, row), problem.chosen.counts.max(axis=1).reshape(-1)
    each = tuple(np.where(is_used, counts[np.where(is_used, at, 0)], 0).tolist()) if len(counts) else ()
    ones = (1,) * len(item)
    single = replace(problem, q_lengths=ones, k_lengths=each, q_starts=(0,) * len(item), rows=None)
    how = schedule(single, isa, threads, strides._replace(is_paged=True), tuning_of(isa))
    return how, shape_of(problem, how, program_of(problem), in_parts=strides.in_parts, chosen=True)


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """Returns the plan of a call of chosen keys on this machine."""
    if not takes(problem, None, current_isa()):
        return plan_masked(joined(problem), strides, threads, exact=exact)
    how, shape = kernel_of_chosen(problem, strides, threads, current_isa())
    work, of_keys, share = work_of(problem, how.panel, shape.chosen_unit), key_bytes(problem), read_share(problem)
    whole = joined(problem)
    if exact and work.visible_pairs is None:
        work = work._replace(visible_pairs=count(whole, how.panel, exact=True).visible_pairs)
    found = plan_of_kernel(whole, how, shape, exact=exact, work=work)
    return replace(found, bytes_read=found.bytes_read - of_keys + round(share * of_keys))


@standard
def prepare(problem: Problem, rows: Rows, keys: Dense | PagedKeys, threads: int, isa: Isa) -> Call:
    """Prepares a call of chosen keys: everything that addresses don't change."""
    where = Paged.of(keys) if isinstance(keys, PagedKeys) else keys
    if takes(problem, where, isa):
        return prepare_chosen(problem, rows, where, threads, isa)
    return prepare_masked(joined(problem), rows, where, threads, isa)


def prepare_chosen(problem: Problem, rows: Rows, keys: Dense | Paged, threads: int, isa: Isa) -> Call:
    """Prepares a call that reads chosen keys alone."""
    chosen, strides = problem.chosen, keys.strides(problem.key_dtype)
    how, _ = kernel_of_chosen(problem, strides, threads, isa)
    queries = _queries_of(problem)
    items = _items_of(problem, rows, keys, queries, -(-problem.group // how.block_rows))
    lists = chosen.lists
    at = _lists_of(problem, *queries[:2])
    by_item = lists.shape[2]
    places = at // by_item * lists.strides[0] + at % by_item * lists.strides[2] if by_item else at
    items[:, Item._fields.index("chosen")] = lists.ctypes.data + places
    words = words_of(problem, how, rows, keys) | {
        "item_count": len(items), "chosen_head": lists.strides[1] if chosen.has_heads else 0,
    }  # fmt: skip
    words = {name: x for name, x in words.items() if name not in _NO_UPCOMING}
    form = ResultLayout.of(rows.layout, rows.q, problem.value_dim, rows.out_strides)
    call = Call(problem, how, words, items, form, strides, in_parts=strides.in_parts, chosen=True)
    call.machine = threads, isa.name
    return call


def _lists_of(problem: Problem, item: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Returns the number of each query's lists, among those of all items and rows."""
    chosen = problem.chosen
    if chosen.first is not None:
        return row + np.array(chosen.first, np.int64)[item]
    return item * chosen.lists.shape[2] + row


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
