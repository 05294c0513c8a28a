"""GPUs as an engine. Calls only enqueue work, on PyTorch's current stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..arrays.memory import Array
from ..host.forks import importing
from ..problem.block_tables import page_lists
from ..problem.build import Stated
from ..problem.engine import Engine
from ..problem.gradients import Asked
from ..problem.operands import Dense, Operands, PagedKeys, PageTables, Rows, Strides
from ..problem.plan import Plan
from ..problem.problem import Problem
from ..problem.results import Results
from . import launch
from .keys import Keys, arrays_of, checked_tables, is_resident
from .merging import merged
from .paging import append_paged
from .prepare import prepare
from .rows import device_of, paged_keys
from .schedule import check
from .uploads import check_tables

if TYPE_CHECKING:
    pass


class GpuEngine(Engine):
    """GPUs as an engine."""

    def attend(
        self, problem: Problem, rows: Rows, keys: Dense | PagedKeys, results: Results, precision: str = "ieee"
    ) -> None:
        """Fills the results. Nothing is returned to run again: the uploads of a problem are memoised by themselves."""
        there = _keys_on_device(keys)
        k_first = keys.first if isinstance(keys, Dense) else None
        call = self.prepare(problem, rows.layout, rows.q.device, there, rows.first, k_first, precision)
        call.run(rows.q.tensor, there, results.out.tensor, None if results.lse is None else results.lse.tensor)

    def prepare(
        self, problem: Problem, layout: str, device: Any, keys: Keys, q_first: tuple[int, ...] | None,
        k_first: tuple[int, ...] | None, precision: str = "ieee",
    ) -> Any:  # fmt: skip
        """Prepares a call of keys on a device; q_first, k_first: of each packed item its first row."""
        cu_q, cu_k = _offsets(q_first), _offsets(k_first)
        return prepare(problem, layout, str(device), keys, cu_q=cu_q, cu_k=cu_k, precision=precision)

    def keys_of(self, k: torch.Tensor, v: torch.Tensor, layout: str) -> Keys:
        """Describes keys and values in tensors."""
        return arrays_of(k, v, layout)

    def joining(self) -> Any:
        """Loads the module that joins parts of keys to the state of rows."""
        with importing:
            from . import joining

        return joining

    def backward(self, request: Asked, layout: str, stated: Stated, operands: Operands, precision: str = "ieee") -> Any:
        with importing:
            from . import differentiate

        return differentiate.prepare(request, layout, stated, operands.q, precision)

    def append(
        self, pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: Any, before: Any, counts: Any,
        scales: tuple[Array, Array] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert scales is None  # pages of codes are refused
        return append_paged(pages, new, layout, table, before, counts)

    def merge(self, outs: list[Array], lses: list[Array]) -> tuple[torch.Tensor, torch.Tensor]:
        return merged([x.tensor for x in outs], [x.tensor for x in lses])

    def read_tables(self, block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str) -> PageTables:
        """Uploads a block table that was checked; one that lies on the device, with the lengths, is left to kernels."""
        there = self.resident_tables(block_table, k_lengths, device)
        if there is None:
            numbers, lengths = page_lists(block_table, k_lengths, pages, page_size, 1)
            return PageTables(torch.from_numpy(numbers).to(device), lengths)
        table, lengths = there
        return PageTables(table, (table.shape[1] * page_size,) * len(table), lengths)

    def resident_tables(
        self, block_table: Any, k_lengths: Any, device: str
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not (is_resident(block_table, device) and is_resident(k_lengths, device)):
            return None
        return checked_tables(block_table, k_lengths)

    def storages(self) -> Any:
        with importing:
            from . import storage

        return storage

    def plan(
        self, problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False,
        backward: bool = False,
    ) -> Plan:  # fmt: skip
        """Plans a call on a device; strides change nothing in it."""
        with importing:
            from . import counting

        return counting.plan(problem, device_of(device), precision, exact=exact)

    def check(self, problem: Problem, device: str, precision: str, tables: Iterable[Any]) -> None:
        """Raises for what the engine cannot do on a device, and for tables that it cannot read there."""
        check(problem, device, precision)
        check_tables(tables, device)

    def synchronize(self) -> None:
        """Waits for the GPUs in use, and raises the errors that their kernels noted."""
        launch.synchronize()


def _offsets(first: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns first rows as prepare() takes them: an end that it does not read behind them."""
    return None if first is None else (*first, 0)


def _keys_on_device(keys: Dense | PagedKeys) -> Keys:
    if isinstance(keys, Dense):
        return arrays_of(keys.k.tensor, keys.v.tensor, keys.layout)
    tables = keys.tables
    most = max(tables.lengths, default=0)
    return paged_keys((keys.k.tensor, keys.v.tensor), tables.numbers, tables.on_device, most, keys.is_placed)


ENGINE = GpuEngine()
