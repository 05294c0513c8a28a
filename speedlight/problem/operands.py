"""Operands of a call, for any engine: addresses and strides (in bytes) of queries, outputs, keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays.dtypes import DTYPES
from ..arrays.layouts import batch_of
from ..arrays.memory import Array
from ..host.shortcuts import row_addresses
from .problem import LAYOUTS


class Rows(NamedTuple):
    """Rows of queries and of the output."""

    layout: str
    q: Array
    out_strides: tuple[int, ...]
    first: tuple[int, ...] | None = None  # of each item, its first row in packed queries

    def strides(self, axis: int) -> list[int]:
        """Returns the strides of q and out; axis as in stride_of."""
        return [stride_of(x, self.layout, axis) for x in (self.q.strides, self.out_strides)]


class Strides(NamedTuple):
    """Strides of keys and values as a schedule depends on them."""

    strided_keys: bool = False  # elements of a row are not side by side
    strided_values: bool = False
    heads_adjoin: bool = False  # a token's heads lie side by side, and tokens apart
    is_paged: bool = False
    is_cached: bool = False  # in the blocks of a cache
    is_latent: bool = False  # … where keys lie as values do
    in_parts: bool = False  # keys lie in two arrays


class Dense(NamedTuple):
    """Keys and values in arrays."""

    layout: str
    k: Array
    v: Array
    first: tuple[int, ...] | None = None  # of each item, its first row in packed keys

    def strides(self, dtype: str) -> Strides:
        """Returns what a schedule depends on."""
        size = DTYPES[dtype][1]
        columns = [stride_of(x.strides, self.layout, -1) for x in (self.k, self.v)]
        if self.k.rest is not None and stride_of(self.k.rest.strides, self.layout, -1) != size:
            columns[0] = 0
        strided = (column != size for column in columns)
        head, row = (stride_of(self.k.strides, self.layout, axis) for axis in (-3, -2))
        return Strides(*strided, heads_adjoin=0 < head < row, in_parts=self.k.rest is not None)


class PageTables(NamedTuple):
    """Page numbers of every sequence, as the engine that read them takes them, and lengths in tokens."""

    numbers: Any
    lengths: tuple[int, ...]  # upper bounds, where only the device has them
    on_device: Any = None  # lengths that the host has no copy of

    def addresses(self) -> list[int]:
        """Returns where each sequence's numbers begin, in memory."""
        return row_addresses(self.numbers)


class PagedKeys(NamedTuple):
    """Keys and values in pages (pages, page_size, heads, dim) of the caller's."""

    k: Array
    v: Array
    tables: PageTables
    is_placed: bool = False  # with lengths on the device: queries begin at q_start, else the last is at the last key
    k_scales: Array | None = (
        None  # of codes, (pages, page_size, heads) of float32: strides are 0 where several have one
    )
    v_scales: Array | None = None


class Operands(NamedTuple):
    """Arrays of a backward pass, read and written."""

    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    d_out: Array
    d_lse: Array | None
    dq: Array
    dk: Array
    dv: Array


def stride_of(strides: tuple[int, ...], layout: str, axis: int) -> int:
    """Returns the stride of heads (-3), length (-2) or dim (-1)."""
    return strides[LAYOUTS[layout][axis]]


def step_of_items(x: Array, layout: str) -> int:
    """Returns the stride of batch items: 0 where there is one, which all may share."""
    return x.strides[0] if batch_of(x.shape, layout) > 1 else 0
