"""`append_paged()` on the CPU."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from ...arrays.array import DTYPES, Array, address_of, describe
from ...host.machine import Isa, current_isa
from ...host.memo import Memo
from ...problem.problem import LAYOUTS
from ...problem.tokens import TokenShape
from ..runtime.workers import get_threads
from .append_call import Blocks, InPage, New, Put

_MOST_TOKENS = 64  # of a block of a page
_BY_BYTES = {2: "float16", 4: "float32", 8: "float64"}  # tokens are moved as they are


class _Form(NamedTuple):
    """New tokens, and pages, that lie in one way."""

    put: Put
    reach: list[tuple[int, int]]  # of k, v, k_pages and v_pages the first byte and one past the last, from the address

    def meets(self, arrays: tuple[Array, ...]) -> bool:
        """Whether new tokens may lie where they go."""
        ends = [(x.address + low, x.address + high) for x, (low, high) in zip(arrays, self.reach, strict=True)]
        return any([a < high and low < b for a, b in ends[:2] for low, high in ends[2:]])


_forms: Memo[_Form] = Memo(64, 1 << 20)


def append_paged(
    pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: np.ndarray, before: list[int],
    counts: list[int],
) -> None:  # fmt: skip
    """Stores new tokens, which were checked, behind those that sequences have in pages of a block table."""
    if not any(counts) or 0 in pages[0].shape[:3]:
        return
    form = _form_of((*new, *pages), layout, counts)
    if form.meets((*new, *pages)):
        k, v = (describe(x.numpy().copy(), x.name) for x in new)
        new, form = (k, v), _form_of((k, v, *pages), layout, counts)
    lists = np.ascontiguousarray(table, np.int64)
    first, step = address_of(lists), lists.strides[0]
    addresses = tuple([x.address for x in (*new, *pages)])
    form.put.run(addresses, before, [first + i * step for i in range(len(counts))])


def _form_of(arrays: tuple[Array, ...], layout: str, counts: list[int]) -> _Form:
    """It depends on where tokens lie, in both, and how many there are; threads and the vector unit."""
    isa, threads, lines = current_isa(), get_threads(), [x.address % 64 for x in arrays[2:]] == [0, 0]
    key = isa.name, threads, lines, layout, tuple(counts), *[(x.shape, x.strides, x.dtype) for x in arrays]
    form = _forms.get(key)
    if form is None:
        put = Put(*_places(arrays, layout, counts, isa, lines), counts, threads)
        reach = [(low - x.address, high - x.address) for x in arrays for low, high in (x.extent(),)]
        form = _Form(put, reach)
        _forms.put(key, form, put.size)
    return form


def _places(
    arrays: tuple[Array, ...], layout: str, counts: list[int], isa: Isa, lines: bool
) -> tuple[Blocks, New, New]:
    """Where tokens go, and whence. `lines`: pages begin on cache lines."""
    _, _, keys, values = arrays
    (_, page_size, heads, dim), value_dim, element = keys.shape, values.shape[3], DTYPES[keys.dtype][1]
    size = max(n for n in range(1, _MOST_TOKENS + 1) if page_size % n == 0)
    size = size if size * size >= page_size or size == _MOST_TOKENS else page_size  # a prime is taken as it is
    _, *axes = (0, *LAYOUTS[layout]) if layout == "lhd" else LAYOUTS[layout]
    new = [(x.strides[axes[0]], x.strides[axes[1]], x.strides[axes[2]]) for x in arrays[:2]]  # head, row, column
    pages = [(x.strides[2], x.strides[1], x.strides[3]) for x in (keys, values)]
    rows = [n * element for n in (dim, value_dim)]
    if all([steps[::2] == (n, element) for steps, n in zip((*new, *pages), rows * 2, strict=True)]):
        dim, value_dim, heads = dim * heads, value_dim * heads, 1  # a token's heads are one row
    lines &= not any([n % 64 for n in (*rows, *keys.strides[:3], *values.strides[:3])])
    (k_head, k_row, k_column), (v_head, v_row, v_column) = pages
    inside = InPage(size, page_size // size, k_row, k_column, v_row, v_column, lines)
    shape = TokenShape(1, heads, dim, value_dim, _BY_BYTES[element])
    blocks = Blocks(shape, isa, k_head, keys.strides[0], v_head, values.strides[0], raw=inside)
    first, nth, nowhere = [*itertools.accumulate(counts, initial=0)][:-1], range(len(counts)), [0] * len(counts)
    k, v = (
        New(shape.dtype, head, row, column, [n * row for n in first] if layout == "lhd" else items, nowhere)
        for (head, row, column), items in zip(new, ([i * x.strides[0] for i in nth] for x in arrays[:2]), strict=True)
    )
    return blocks, k, v
