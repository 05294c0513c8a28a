"""Where the arrays of a call lie: rows of queries and outputs; keys and values in arrays, or in pages. In bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import DTYPES, Array
from ...arrays.layouts import batch_of
from ...problem.problem import LAYOUTS
from .records import ENDLESS, SLACK

_NO_PAGES = np.zeros(1 + SLACK, np.int64)  # the list of an array without pages: one that never ends


@dataclass(frozen=True, slots=True)
class Pages:
    """Keys and values that are read page by page: distances in bytes.

    Each item has a list of pages of its own, with SLACK numbers past the last.
    """

    lanes: bool  # in the blocks of a cache, else row by row
    size: int  # tokens of a page
    k_head: int
    k_page: int
    k_row: int
    v_head: int
    v_page: int
    v_row: int
    k_column: int = 0
    v_column: int = 0
    k_item: int = 0
    v_item: int = 0
    fixed: int = ENDLESS  # entries of a list before those that are a ring
    ring: int = 1


class Strides(NamedTuple):
    """What a schedule wants to know of how keys and values lie; a backward pass's, of queries and d_out as well."""

    strided_keys: bool = False  # elements of a row are not side by side
    strided_values: bool = False
    heads_adjoin: bool = False  # a token's heads lie side by side, and tokens apart
    pages: Pages | None = None
    strided_queries: bool = False
    strided_gradients: bool = False


class Rows(NamedTuple):
    """Where the rows of q and out lie."""

    layout: str
    q: Array
    out_strides: tuple[int, ...]
    first: tuple[int, ...] | None = None  # of each item, its first row in packed queries

    def strides(self, axis: int) -> list[int]:
        """Of q and out; axis as in stride_of."""
        return [stride_of(x, self.layout, axis) for x in (self.q.strides, self.out_strides)]


class Dense(NamedTuple):
    """Keys and values in arrays."""

    layout: str
    k: Array
    v: Array
    first: tuple[int, ...] | None = None  # of each item, its first row in packed keys

    def strides(self, dtype: str) -> Strides:
        """What a schedule wants to know of them."""
        size = DTYPES[dtype][1]
        strided = (stride_of(x.strides, self.layout, -1) != size for x in (self.k, self.v))
        head, row = (stride_of(self.k.strides, self.layout, axis) for axis in (-3, -2))
        return Strides(*strided, heads_adjoin=0 < head < row)

    def words(self) -> dict[str, int]:
        words = {"page_size": ENDLESS, "page_fixed": ENDLESS, "page_ring": 1}
        for name, x in (("k", self.k), ("v", self.v)):
            words |= steps(name, x.strides, self.layout)
        return words

    def places(self, batch: int) -> dict[str, Any]:
        """The columns of the table of items that say where each item's keys and values are."""
        lists = np.full(batch, _NO_PAGES.ctypes.data, np.int64)
        if self.first is None:
            first = np.arange(batch, dtype=np.int64)
            k, v = (step_of_items(x, self.layout) for x in (self.k, self.v))
        else:
            first = np.array(self.first, np.int64)
            k, v = (stride_of(x.strides, self.layout, -2) for x in (self.k, self.v))
        return {"k_at": first * k, "v_at": first * v, "pages": lists}


class Paged(NamedTuple):
    """Keys and values in pages. lists: of each item, the address of its pages' numbers (int64), which were checked."""

    pages: Pages
    lists: list[int]

    def strides(self, dtype: str) -> Strides:
        pages, size = self.pages, DTYPES[dtype][1]
        strided = (not pages.lanes and x != size for x in (pages.k_column, pages.v_column))
        return Strides(*strided, heads_adjoin=not pages.lanes and 0 < pages.k_head < pages.k_row, pages=pages)

    def words(self) -> dict[str, int]:
        pages = self.pages
        names = ("k_head", "k_row", "k_column", "v_head", "v_row", "v_column", "k_page", "v_page")
        words = {name: getattr(pages, name) for name in names}
        return words | {"page_size": pages.size, "page_fixed": pages.fixed, "page_ring": pages.ring}

    def places(self, batch: int) -> dict[str, Any]:
        index, pages = np.arange(batch, dtype=np.int64), self.pages
        lists = np.array(self.lists, np.int64)
        return {"k_at": index * pages.k_item, "v_at": index * pages.v_item, "pages": lists}


class Operands(NamedTuple):
    """The arrays of a backward pass, read and written."""

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
    """Stride of heads (-3), length (-2) or dim (-1)."""
    return strides[LAYOUTS[layout][axis]]


def step_of_items(x: Array, layout: str) -> int:
    """From one batch item to the next: 0 where there is one, which all may share."""
    return x.strides[0] if batch_of(x.shape, layout) > 1 else 0


def steps(name: str, strides: tuple[int, ...], layout: str) -> dict[str, int]:
    """The words of an array's strides."""
    return {f"{name}_{part}": stride_of(strides, layout, i) for part, i in (("head", -3), ("row", -2), ("column", -1))}
