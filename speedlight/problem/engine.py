"""Computation on devices of a kind: the base class of every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ..arrays.memory import Array
from .build import Stated
from .gradients import Asked
from .operands import Dense, Operands, PagedKeys, PageTables, Rows, Strides
from .problem import Problem
from .results import Results

if TYPE_CHECKING:  # a first call of attention() needs none of them
    from .plan import Plan
    from .tokens import TokenShape
    from .windows import Ring


class Engine(ABC):
    """Base of the engines. Everything is checked before it comes here, but for what an engine lacks."""

    @abstractmethod
    def attend(
        self, problem: Problem, rows: Rows, keys: Dense | PagedKeys, results: Results, precision: str = "ieee"
    ) -> Any:
        """Fills the results; returns a prepared call that can run again at other addresses, or None."""

    @abstractmethod
    def backward(self, request: Asked, layout: str, stated: Stated, operands: Operands, precision: str = "ieee") -> Any:
        """Prepares a backward call."""

    @abstractmethod
    def append(
        self, pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: Any, before: Any, counts: Any,
        scales: tuple[Array, Array] | None = None,
    ) -> Any:  # fmt: skip
        """Stores new tokens in the caller's pages, behind those of each sequence; with scales as codes.

        Returns the lengths after it where resident_tables() gave those before; else nothing is read of what it returns.
        """

    @abstractmethod
    def merge(self, outs: list[Array], lses: list[Array]) -> tuple[Any, Any]:
        """Merges states of the same queries over disjoint keys into a new out and lse."""

    @abstractmethod
    def read_tables(self, block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str) -> PageTables:
        """Reads a block table and lengths of the caller's, as attend() takes them."""

    def resident_tables(self, block_table: Any, k_lengths: Any, device: str) -> tuple[Any, Any] | None:
        """Returns a table and lengths as kernels take them, if both lie on the device; else None: the host checks them.

        By default no engine reads them there.
        """
        return None

    @abstractmethod
    def storages(self) -> Any:
        """Loads the module of CacheStorage and PoolStorage."""

    def cache_storage(self, shape: TokenShape, batch: int, capacity: int, ring: Ring, device: Any) -> Any:
        """Reserves the Storage of a KVCache."""
        return self.storages().CacheStorage(shape, batch, capacity, ring, device)

    def pool_storage(self, shape: TokenShape, pages: int, page_size: int, device: Any) -> Any:
        """Reserves the Storage of a PagePool."""
        return self.storages().PoolStorage(shape, pages, page_size, device)

    @abstractmethod
    def plan(
        self, problem: Problem, device: Any, strides: Strides, precision: str, *, exact: bool = False,
        backward: bool = False,
    ) -> Plan:  # fmt: skip
        """Plans a call, or a backward call, on a device."""
