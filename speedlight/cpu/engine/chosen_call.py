"""Calls over chosen keys: each query is an item of its own, and sees the keys of a list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...host.machine import PRODUCTS, Isa, current_isa, number_bytes
from ...host.rounding import standard
from ...problem.chosen import joined, read_share, work_of
from ...problem.operands import Dense, PagedKeys, Rows, Strides
from ...problem.problem import Problem
from ...problem.results import ResultLayout
from ...problem.work import count, key_bytes
from ..memory.operands import Paged
from ..memory.records import Item
from ..memory.shape import Shape
from ..runtime.tuned import tuning_of
from .forward_call import Call, item_columns, plan_of_kernel, program_of, shape_of, words_of
from .forward_call import plan as plan_masked
from .forward_call import prepare as prepare_masked
from .schedule import Schedule, product_name, schedule

if TYPE_CHECKING:
    from ...problem.plan import Plan


def takes(problem: Problem, keys: Dense | Paged | None, isa: Isa) -> bool:
    """Returns whether chosen keys alone are read: they lie in arrays, or in pages of rows, as numbers."""
    if problem.dropout or problem.partial or problem.quantised or (isinstance(keys, Paged) and keys.pages.lanes):
        return False
    return PRODUCTS[product_name(problem, isa)].together == 1


class _Queries(NamedTuple):
    """Rows of out, each of which is an item of the kernel's: columns."""

    item: np.ndarray  # of the batch
    row: np.ndarray  # the number in its item
    is_used: np.ndarray  # has a query
    place: np.ndarray  # number of its lists, among those of all items and rows

    @classmethod
    def of(cls, problem: Problem) -> _Queries:
        """Numbers the rows of a problem."""
        chosen, lengths = problem.chosen, np.array(problem.q_lengths, np.int64)
        of_items = lengths if problem.rows is None else np.full(problem.batch, problem.rows, np.int64)
        item = np.repeat(np.arange(problem.batch, dtype=np.int64), of_items)
        row = np.arange(len(item), dtype=np.int64) - np.repeat(np.cumsum(of_items) - of_items, of_items)
        if chosen.first is None:
            place = item * chosen.lists.shape[2] + row
        else:
            place = row + np.array(chosen.first, np.int64)[item]
        return cls(item, row, row < lengths[item], place)


def _kernel_of(problem: Problem, queries: _Queries, strides: Strides, threads: int, isa: Isa) -> tuple[Schedule, Shape]:
    """Returns the schedule of a call that reads chosen keys alone, and its kernel's shape."""
    counts = problem.chosen.counts.max(axis=1).reshape(-1)
    each = np.where(queries.is_used, counts[np.where(queries.is_used, queries.place, 0)], 0) if len(counts) else counts
    count = len(queries.item)
    single = replace(problem, q_lengths=(1,) * count, k_lengths=tuple(each.tolist()), q_starts=(0,) * count, rows=None)
    how = schedule(single, isa, threads, strides._replace(is_paged=True), tuning_of(isa))
    return how, shape_of(problem, how, program_of(problem), in_parts=strides.in_parts, chosen=True)


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """Returns the plan of a call of chosen keys on this machine."""
    if not takes(problem, None, current_isa()):
        return plan_masked(joined(problem), strides, threads, exact=exact)
    how, shape = _kernel_of(problem, _Queries.of(problem), strides, threads, current_isa())
    work = work_of(problem, how.panel, shape.chosen_unit)
    whole = joined(problem)
    if exact and work.visible_pairs is None:
        work = work._replace(visible_pairs=count(whole, how.panel, exact=True).visible_pairs)
    found = plan_of_kernel(whole, how, shape, exact=exact, work=work)
    of_keys = key_bytes(problem)
    return replace(found, bytes_read=found.bytes_read - of_keys + round(read_share(problem) * of_keys))


@standard
def prepare(problem: Problem, rows: Rows, keys: Dense | PagedKeys, threads: int, isa: Isa) -> Call:
    """Prepares a call of chosen keys: everything that addresses don't change."""
    where = Paged.of(keys) if isinstance(keys, PagedKeys) else keys
    if takes(problem, where, isa):
        return prepare_chosen(problem, rows, where, threads, isa)
    return prepare_masked(joined(problem), rows, where, threads, isa)


def prepare_chosen(problem: Problem, rows: Rows, keys: Dense | Paged, threads: int, isa: Isa) -> Call:
    """Prepares a call that reads chosen keys alone."""
    chosen = problem.chosen
    strides = keys.strides(problem.key_dtype)
    queries = _Queries.of(problem)
    how, _ = _kernel_of(problem, queries, strides, threads, isa)
    items = _items_of(problem, rows, keys, queries, -(-problem.group // how.block_rows))
    words = words_of(problem, how, rows, keys) | {
        "item_count": len(items), "chosen_head": chosen.lists.strides[1] if chosen.has_heads else 0,
    }  # fmt: skip
    form = ResultLayout.of(rows.layout, rows.q, problem.value_dim, rows.out_strides)
    call = Call(problem, how, words, items, form, strides, in_parts=strides.in_parts, chosen=True)
    call.machine = threads, isa.name
    return call


def _items_of(problem: Problem, rows: Rows, keys: Dense | Paged, queries: _Queries, blocks: int) -> np.ndarray:
    """Returns the kernel's table of items, one for each query; `blocks`: tickets of each and of a kv head."""
    lists, row, is_used = problem.chosen.lists, queries.row, queries.is_used
    of_batch = item_columns(problem, rows, keys)
    columns = Item(*[np.asarray(x)[queries.item] for x in of_batch])
    q_row, out_row = rows.strides(-2)
    item, at = np.divmod(queries.place, max(1, lists.shape[2]))
    columns = columns._replace(
        blocks=np.full_like(row, blocks),
        q_len=np.ones_like(row),
        k_len=np.where(is_used, columns.k_len, 0),
        start=columns.start + row,
        q_at=columns.q_at + row * q_row,
        out_at=columns.out_at + row * out_row,
        lse_at=columns.lse_at + row * number_bytes(problem.storage),
        index=np.where(is_used, columns.index, -1),
        chosen=lists.ctypes.data + item * lists.strides[0] + at * lists.strides[2],
    )
    return np.ascontiguousarray(np.stack(columns, axis=1))
