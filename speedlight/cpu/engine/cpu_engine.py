"""The CPU as an engine: all but dense attention is loaded when it is first called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.memory import Array
from ...expressions.tree import lazily
from ...host.forks import importing
from ...host.machine import current_isa
from ...problem.block_tables import page_lists
from ...problem.build import Stated
from ...problem.engine import Engine
from ...problem.gradients import Asked
from ...problem.operands import Dense, Operands, PagedKeys, PageTables, Rows, Strides
from ...problem.problem import Problem
from ...problem.results import Results
from ..memory.records import SLACK
from ..runtime.workers import get_threads, machine
from . import forward_call

if TYPE_CHECKING:
    from ...problem.key_weights import WeightRequest
    from ...problem.plan import Plan
    from ...problem.prepared import Prepared


class CpuEngine(Engine):
    """CPU as an engine. It prepares calls, which run again at other addresses."""

    def attend(
        self, problem: Problem, rows: Rows, keys: Dense | PagedKeys, results: Results, precision: str = "ieee"
    ) -> forward_call.Call:
        """Fills the results; returns the call, which can run again at other addresses. All precisions are "ieee"."""
        call = self.prepare(problem, rows, keys)
        rotary = None if keys.k.rest is None else (keys.k.rest.address,)
        scales = None
        if isinstance(keys, PagedKeys) and keys.k_scales is not None and keys.v_scales is not None:
            scales = keys.k_scales.address, keys.v_scales.address
        addresses = rows.q.address, keys.k.address, keys.v.address, results.out.address, results.lse_address
        call.run(*addresses, rotary=rotary, scales=scales)
        return call

    def prepare(self, problem: Problem, rows: Rows, keys: Dense | PagedKeys) -> forward_call.Call:
        """Prepares a call for the threads and the vector unit in use."""
        return self.planner(chosen=problem.chosen is not None).prepare(
            problem, rows, keys, get_threads(), current_isa()
        )

    def backward(self, request: Asked, layout: str, stated: Stated, operands: Operands, precision: str = "ieee") -> Any:
        with importing:
            from . import backward_call

        return backward_call.prepare(request, layout, stated, operands, get_threads(), current_isa())

    def weigh_keys(
        self, request: WeightRequest, layout: str, stated: Stated, arrays: tuple[Array, Array, Array, Array]
    ) -> None:
        """Reduces weights of q, k and lse, or their rows, into zeros."""
        with importing:
            from . import weights_call

        weights_call.fill(request, layout, stated, weights_call.WeightArrays(*arrays), get_threads(), current_isa())

    def append(
        self, pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: np.ndarray, before: list[int],
        counts: list[int], scales: tuple[Array, Array] | None = None,
    ) -> None:  # fmt: skip
        with importing:
            from . import append_call

        append_call.append_paged(pages, new, layout, table, before, counts, scales)

    def merge(self, outs: list[Array], lses: list[Array]) -> tuple[Any, Any]:
        with importing:
            from . import merge_call

        return merge_call.merge(outs, lses)

    @lazily
    def read(self) -> Callable[..., tuple[Any, bytes] | None]:
        """Function that says what arrays are, and where they lie (problem/prepared.py)."""
        with importing:
            from ..runtime.repeating import functions

        return functions().read

    @lazily
    def repeat(self) -> Callable[..., Any]:
        """Function that repeats a prepared call, or reads its arrays (cpu/kernels/repeat.py)."""
        with importing:
            from ..runtime.repeating import functions

        return functions().repeat

    machine = staticmethod(machine)

    def read_tables(self, block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str) -> PageTables:
        """Copies a block table, checked as far as it is used."""
        return PageTables(*page_lists(block_table, k_lengths, pages, page_size, SLACK))

    def together(self, prepared: Prepared, tables: PageTables, page_size: int) -> Prepared:
        """Returns a prepared call, or in its place one in which sequences that share pages are taken together."""
        numbers, lengths = tables.numbers, list(tables.lengths)
        if len({*numbers[:, 0].tolist()}) == len(numbers):
            return prepared
        key, (last, found) = (numbers.tobytes(), lengths), prepared.call.together
        if last != key:
            with importing:
                from .cascade import PageLists, find_together

            lists = PageLists(numbers, tables.addresses(), page_size)
            found = find_together(prepared.call, lists, lengths, key)
        return prepared if found is None else found.in_place_of(prepared)

    def storages(self) -> Any:
        with importing:
            from . import storage

        return storage

    def plan(
        self, problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False,
        backward: bool = False,
    ) -> Plan:  # fmt: skip
        """Plans a call, or a backward call, over arrays with these strides."""
        chosen = problem.chosen is not None
        return self.planner(backward=backward, chosen=chosen).plan(problem, strides, get_threads(), exact=exact)

    def planner(self, *, backward: bool = False, chosen: bool = False) -> Any:
        """Loads the module whose kernel_of_problem() and plan() describe a call, or a backward call."""
        if chosen and not backward:
            with importing:
                from . import chosen_call

            return chosen_call
        if not backward:
            return forward_call
        with importing:
            from . import backward_call

        return backward_call


ENGINE = CpuEngine()
