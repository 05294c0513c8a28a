"""The CPU as engines.Engine: all but dense attention is loaded when it is first called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.memory import Array
from ...host.forks import importing
from ...host.machine import current_isa
from ...problem.block_tables import page_lists
from ...problem.build import Stated
from ...problem.gradients import Asked
from ...problem.operands import Dense, Operands, PagedKeys, PageTables, Rows, Strides
from ...problem.problem import Problem
from ...problem.results import Results
from ..memory.records import SLACK
from ..runtime.workers import get_threads, machine as machine
from . import forward_call

if TYPE_CHECKING:
    from ...problem.plan import Plan


def attend(
    problem: Problem, rows: Rows, keys: Dense | PagedKeys, results: Results, precision: str = "ieee"
) -> forward_call.Call:
    """Fills the results, and returns the call, which can run again at other addresses. All precisions are "ieee"."""
    call = prepare(problem, rows, keys)
    call.run(rows.q.address, keys.k.address, keys.v.address, results.out.address, results.lse_address)
    return call


def prepare(problem: Problem, rows: Rows, keys: Dense | PagedKeys) -> forward_call.Call:
    """Prepares a call for the threads and the vector unit in use."""
    return forward_call.prepare(problem, rows, keys, get_threads(), current_isa())


def backward(request: Asked, layout: str, stated: Stated, operands: Operands, precision: str = "ieee") -> Any:
    """Prepares a backward call."""
    with importing:
        from . import backward_call

    return backward_call.prepare(request, layout, stated, operands, get_threads(), current_isa())


def append(
    pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: np.ndarray, before: list[int],
    counts: list[int],
) -> None:  # fmt: skip
    """Stores new tokens in the caller's pages."""
    with importing:
        from . import append_call

    append_call.append_paged(pages, new, layout, table, before, counts)


def merge(outs: list[Array], lses: list[Array]) -> tuple[Any, Any]:
    """Merges states of the same queries over disjoint keys."""
    with importing:
        from . import merge_call

    return merge_call.merge(outs, lses)


def __getattr__(name: str) -> Any:
    """Loads read() where it is first called: what arrays are, and where they lie (problem/prepared.py)."""
    if name != "read":
        raise AttributeError(name)
    with importing:
        from ..runtime.repeating import functions

    globals()["read"] = found = functions().read
    return found


def read_tables(block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str) -> PageTables:
    """Copies a block table, checked as far as it is used."""
    return PageTables(*page_lists(block_table, k_lengths, pages, page_size, SLACK))


def storage() -> Any:
    """Loads the module of CacheStorage and PoolStorage."""
    with importing:
        from . import storage

    return storage


def plan(
    problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False, backward: bool = False
) -> Plan:
    """Plans a call, or a backward call, over arrays with these strides."""
    return planner(backward=backward).plan(problem, strides, get_threads(), exact=exact)


def planner(*, backward: bool) -> Any:
    """Loads the module whose kernel_of_problem() and plan() describe a call, or a backward call."""
    if not backward:
        return forward_call
    with importing:
        from . import backward_call

    return backward_call
