"""Words of a call's operands: strides of rows, keys and values as kernels' arguments; the columns of items."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...arrays.dtypes import ELEMENT_BYTES
from ...problem.operands import Dense, PagedKeys, Strides, step_of_items, stride_of
from .records import ENDLESS, SLACK

_NO_PAGES = np.zeros(1 + SLACK, np.int64)  # the list of an array without pages: one that never ends


@dataclass(frozen=True, slots=True)
class Pages:
    """Strides of keys and values that are read page by page.

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
    latent: bool = False  # blocks of keys lie as those of values, which are their first columns
    rotary_head: int = 0  # of keys in two parts: the second
    rotary_page: int = 0
    rotary_row: int = 0
    rotary_column: int = 0
    latent_dim: int = 0  # … and the first part's columns; 0: keys are whole
    k_scale_head: int = 0  # of codes in arrays: their scales, likewise
    k_scale_page: int = 0
    k_scale_row: int = 0
    v_scale_head: int = 0
    v_scale_page: int = 0
    v_scale_row: int = 0
    fixed: int = ENDLESS  # entries of a list before those that are a ring
    ring: int = 1


class Paged(NamedTuple):
    """Keys and values in pages. lists: of each item, the address of its pages' numbers (int64), which were checked."""

    pages: Pages
    lists: list[int]

    @classmethod
    def of(cls, keys: PagedKeys) -> Paged:
        """Locates the caller's pages."""
        k, v = keys.k.strides, keys.v.strides
        pages = Pages(
            False, keys.k.shape[1],
            k_head=k[2], k_page=k[0], k_row=k[1], k_column=k[3], v_head=v[2], v_page=v[0], v_row=v[1], v_column=v[3],
        )  # fmt: skip
        rest = keys.k.rest
        if rest is not None:
            page, row, head, column = rest.strides
            pages = replace(
                pages, rotary_head=head, rotary_page=page, rotary_row=row, rotary_column=column,
                latent_dim=keys.k.shape[3],
            )  # fmt: skip
        if keys.k_scales is not None and keys.v_scales is not None:
            k, v = keys.k_scales.strides, keys.v_scales.strides
            pages = replace(
                pages, k_scale_page=k[0], k_scale_row=k[1], k_scale_head=k[2], v_scale_page=v[0], v_scale_row=v[1],
                v_scale_head=v[2],
            )  # fmt: skip
        return cls(pages, keys.tables.addresses())

    def strides(self, dtype: str) -> Strides:
        """Returns what a schedule depends on."""
        pages = self.pages
        strided = (not pages.lanes and x != ELEMENT_BYTES[dtype] for x in (pages.k_column, pages.v_column))
        adjoin = not pages.lanes and 0 < pages.k_head < pages.k_row
        # rows in one endless page lie as in an array
        is_paged, in_parts = pages.lanes or pages.size != ENDLESS, pages.latent_dim > 0
        return Strides(
            *strided, heads_adjoin=adjoin, is_paged=is_paged, is_cached=pages.lanes, is_latent=pages.latent,
            in_parts=in_parts,
        )  # fmt: skip


def words_of_keys(keys: Dense | Paged) -> dict[str, int]:
    """Returns the words that say where keys and values lie."""
    if isinstance(keys, Dense):
        words = {"page_size": ENDLESS, "page_fixed": ENDLESS, "page_ring": 1}
        for name, x in (("k", keys.k), ("v", keys.v)):
            words |= steps(name, x.strides, keys.layout)
        if keys.k.rest is not None:
            words |= steps("rotary", keys.k.rest.strides, keys.layout) | {"latent_dim": keys.k.shape[-1]}
        return words
    pages = keys.pages
    names = ["k_head", "k_row", "k_column", "v_head", "v_row", "v_column", "k_page", "v_page"]
    names += [f"{x}_scale_{of}" for x in ("k", "v") for of in ("head", "row", "page")]
    if pages.latent_dim:
        names += ["rotary_head", "rotary_row", "rotary_column", "rotary_page", "latent_dim"]
    words = {name: getattr(pages, name) for name in names}
    return words | {"page_size": pages.size, "page_fixed": pages.fixed, "page_ring": pages.ring}


def columns_of_keys(keys: Dense | Paged, batch: int) -> dict[str, Any]:
    """Returns the columns of the table of items that say where each item's keys and values are."""
    index = np.arange(batch, dtype=np.int64)
    if isinstance(keys, Paged):
        pages = keys.pages
        lists = np.array(keys.lists, np.int64)
        return {"k_at": index * pages.k_item, "v_at": index * pages.v_item, "rotary_at": index * 0, "pages": lists}
    lists = np.full(batch, _NO_PAGES.ctypes.data, np.int64)
    arrays = (keys.k, keys.v, keys.k if keys.k.rest is None else keys.k.rest)
    if keys.first is None:
        k, v, rotary = (step_of_items(x, keys.layout) for x in arrays)
    else:
        index = np.array(keys.first, np.int64)
        k, v, rotary = (stride_of(x.strides, keys.layout, -2) for x in arrays)
    return {"k_at": index * k, "v_at": index * v, "rotary_at": index * rotary, "pages": lists}


def steps(name: str, strides: tuple[int, ...], layout: str) -> dict[str, int]:
    """Returns the words of an array's strides."""
    return {f"{name}_{part}": stride_of(strides, layout, i) for part, i in (("head", -3), ("row", -2), ("column", -1))}
