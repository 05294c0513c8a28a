"""GPUs as engines.Engine. Calls only enqueue work, on PyTorch's current stream."""

from __future__ import annotations

from typing import Any

import torch

from ..arrays.memory import Array
from ..host.forks import importing
from ..problem.block_tables import page_lists
from ..problem.build import Stated
from ..problem.gradients import Asked
from ..problem.operands import Dense, Operands, PagedKeys, PageTables, Rows, Strides
from ..problem.plan import Plan
from ..problem.problem import Problem
from ..problem.results import Results
from .joining import Ending, Found, State, joined
from .keys import Keys, arrays_of, checked_tables, is_resident
from .launch import synchronize
from .merging import merged
from .paging import append_paged as append
from .prepare import prepare
from .rows import device_of, paged_keys
from .schedule import check
from .uploads import check_tables

__all__ = [
    "Ending", "Found", "State", "append", "arrays_of", "attend", "backward", "check", "check_tables", "device_of",
    "joined", "merge", "plan", "prepare", "read_tables", "resident_tables", "storage", "synchronize",
]  # fmt: skip


def attend(problem: Problem, rows: Rows, keys: Dense | PagedKeys, results: Results, precision: str = "ieee") -> None:
    """Fills the results. Nothing is returned to run again: the uploads of a problem are memoised by themselves."""
    q, device = rows.q.tensor, rows.q.device
    cu_q, cu_k = _offsets(rows.first), _offsets(keys.first) if isinstance(keys, Dense) else None
    there = _keys_on_device(keys)
    call = prepare(problem, rows.layout, device, there, cu_q=cu_q, cu_k=cu_k, precision=precision)
    call.run(q, there, results.out.tensor, None if results.lse is None else results.lse.tensor)


def backward(request: Asked, layout: str, stated: Stated, operands: Operands, precision: str = "ieee") -> Any:
    """Prepares a backward call."""
    with importing:
        from . import differentiate

    return differentiate.prepare(request, layout, stated, operands.q, precision)


def _offsets(first: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns first rows as prepare() takes them: an end that it does not read behind them."""
    return None if first is None else (*first, 0)


def _keys_on_device(keys: Dense | PagedKeys) -> Keys:
    if isinstance(keys, Dense):
        return arrays_of(keys.k.tensor, keys.v.tensor, keys.layout)
    tables = keys.tables
    most = max(tables.lengths, default=0)
    return paged_keys((keys.k.tensor, keys.v.tensor), tables.numbers, tables.on_device, most, keys.is_placed)


def merge(outs: list[Array], lses: list[Array]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges states of the same queries over disjoint keys."""
    return merged([x.tensor for x in outs], [x.tensor for x in lses])


def read_tables(block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str) -> PageTables:
    """Uploads a block table that was checked; one that lies on the device, with the lengths, is left to kernels."""
    there = resident_tables(block_table, k_lengths, device)
    if there is None:
        numbers, lengths = page_lists(block_table, k_lengths, pages, page_size, 1)
        return PageTables(torch.from_numpy(numbers).to(device), lengths)
    table, lengths = there
    return PageTables(table, (table.shape[1] * page_size,) * len(table), lengths)


def resident_tables(block_table: Any, k_lengths: Any, device: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns a table and lengths as kernels take them, if both lie on the device; else None: the host checks them."""
    if not (is_resident(block_table, device) and is_resident(k_lengths, device)):
        return None
    return checked_tables(block_table, k_lengths)


def storage() -> Any:
    """Loads the module of CacheStorage and PoolStorage."""
    with importing:
        from . import storage

    return storage


def plan(
    problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False, backward: bool = False
) -> Plan:
    """Plans a call on a device; strides change nothing in it."""
    with importing:
        from . import counting

    return counting.plan(problem, device_of(device), precision, exact=exact)
