"""Where keys and values lie on a device, as kernels are told: strides in elements, pages, codes and their scales."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..checks import page_lists
from ..errors import ArgumentError, ArgumentTypeError
from ..machine import interpreting
from ..problem import LAYOUTS
from .launch import status_of


@dataclass(slots=True)
class Keys:
    """Strides in elements as (item or page, head, row, column)."""

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    pages: torch.Tensor | None = None  # (batch, most pages) page numbers, which kernels check
    page_size: int = 1
    page_count: int = 0
    k_scales: torch.Tensor | None = None  # of int8 codes: (item or page, head, row)
    v_scales: torch.Tensor | None = None
    lengths: torch.Tensor | None = None  # on the device, when the host does not know them
    status: torch.Tensor | None = None  # takes note of page numbers and lengths that are out of range
    most: int = 0  # keys of the longest item, where lengths are on the device
    ring_first: int = 0  # tokens that stay where they are, and how many the others go round
    ring: int = 0

    def of(self, items: list[int]) -> Keys:
        """Of some of the items."""
        pages, lengths = (None if x is None else x[items] for x in (self.pages, self.lengths))
        return replace(self, pages=pages, lengths=lengths)

    def fit_tma(self, longest: int) -> bool:
        """Whether tensor descriptors can tell where they lie: rows of adjoining numbers, all on 16 bytes."""
        if self.pages is not None or self.k_scales is not None or self.ring or longest >= 1 << 31:
            return False
        size = self.k.element_size()
        return all(
            x.data_ptr() % 16 == 0 and s[3] == 1 and s[2] > 0 and all(y * size % 16 == 0 for y in s[:3])
            for x, s in ((self.k, self.k_strides), (self.v, self.v_strides))
        )


def axes(x: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Strides as (item, head, row, column)."""
    strides = x.stride()
    return (*((0,) if layout == "lhd" else ()), *(strides[a] for a in LAYOUTS[layout]))


def arrays_of(k: torch.Tensor, v: torch.Tensor, layout: str) -> Keys:
    return Keys(k, v, axes(k, layout), axes(v, layout))


def paged_keys(k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor | None, most: int) -> Keys:
    """Keys and values in pages (pages, page_size, heads, dim)."""
    strides = [(x.stride(0), x.stride(2), x.stride(1), x.stride(3)) for x in (k, v)]
    return Keys(
        k,
        v,
        strides[0],
        strides[1],
        pages=table,
        page_size=k.shape[1],
        page_count=k.shape[0],
        lengths=lengths,
        status=status_of(k.device),
        most=most,
    )


def paged_tables(
    block_table: Any, k_lengths: Any, pages: int, page_size: int, device: str
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[int, ...]]:
    """The table and the lengths on the device, and lengths for the host: the most there can be, where it does not know
    them.
    """
    resident = [
        isinstance(x, torch.Tensor) and str(x.device) == device and (x.is_cuda or interpreting())
        for x in (block_table, k_lengths)
    ]
    if not all(resident):
        numbers, lengths = page_lists(block_table, k_lengths, pages, page_size, 1)
        return torch.from_numpy(numbers).to(device), None, lengths
    for name, x, dims in (("block_table", block_table, 2), ("k_lengths", k_lengths, 1)):
        if x.ndim != dims or x.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"{name}: expected int32 or int64 of {dims} dimensions; got {x.dtype} of shape {tuple(x.shape)}."
            )
    if len(k_lengths) != len(block_table):
        raise ArgumentError(
            f"k_lengths: expected {len(block_table)} lengths, one per row of block_table; got {len(k_lengths)}."
        )
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    return table, k_lengths.contiguous(), (table.shape[1] * page_size,) * len(table)
