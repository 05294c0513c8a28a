"""Keys and values on a device, in arrays, pages or a ring: tensors, strides in elements, scales of codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..arrays.layouts import batch_of
from ..errors import ArgumentError, ArgumentTypeError
from ..host.machine import interpreting
from ..problem.problem import LAYOUTS


@dataclass(slots=True)
class Keys:
    """Strides in elements as (item or page, head, row, column)."""

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    pages: torch.Tensor | None = None  # (batch, most pages) page numbers; kernels check them
    page_size: int = 1
    page_count: int = 0
    k_scales: torch.Tensor | None = None  # of codes: (item or page, head, row)
    v_scales: torch.Tensor | None = None
    lengths: torch.Tensor | None = None  # on the device, if the host has no copy
    status: torch.Tensor | None = None  # word in which kernels flag page numbers and lengths out of range
    most: int = 0  # keys of the longest item, where lengths are on the device
    placed: bool = False  # with lengths there: queries begin where the problem says, else the last is at the last key
    ring_first: int = 0  # tokens before the ring, and the ring's slots
    ring: int = 0

    def of(self, items: list[int]) -> Keys:
        """Returns the keys and values of these items."""
        pages, lengths = (None if x is None else x[items] for x in (self.pages, self.lengths))
        return replace(self, pages=pages, lengths=lengths)

    def fit_tma(self, longest: int) -> bool:
        """Returns whether tensor descriptors can address them all."""
        if self.pages is not None or self.k_scales is not None or self.ring or longest >= 1 << 31:
            return False
        return fits_tma(self.k, self.k_strides) and fits_tma(self.v, self.v_strides)


def fits_tma(x: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Returns whether a tensor descriptor can address rows of these strides: contiguous, aligned to 16 bytes."""
    size = x.element_size()
    is_aligned = all([at % 16 == 0 for at in (x.data_ptr(), *[y * size for y in strides[:3]])])
    return is_aligned and strides[3] == 1 and strides[2] > 0


def axes(x: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Returns strides as (item, head, row, column)."""
    strides = x.stride()
    return (*((0,) if len(layout) == 3 else ()), *(strides[a] for a in LAYOUTS[layout]))


def arrays_of(k: torch.Tensor, v: torch.Tensor, layout: str) -> Keys:
    return Keys(k, v, _shared(k, layout), _shared(v, layout))


def _shared(x: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Returns the strides of keys or values; an item's is 0 where all items share one."""
    item, *rest = axes(x, layout)
    return (item if batch_of(tuple(x.shape), layout) > 1 else 0, *rest)


def is_resident(x: Any, device: str) -> bool:
    """Returns whether it is a tensor on that device, which the host would have to wait for."""
    return isinstance(x, torch.Tensor) and str(x.device) == device and (x.is_cuda or interpreting())


def checked_tables(block_table: torch.Tensor, k_lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a table and lengths on the device as kernels take them; raises unless they are such."""
    for name, x, dims in (("block_table", block_table, 2), ("k_lengths", k_lengths, 1)):
        if x.ndim != dims or x.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"{name}: expected int32 or int64 of {dims} dimensions; got {x.dtype} of shape {tuple(x.shape)}."
            )
    if len(k_lengths) != len(block_table):
        raise ArgumentError(
            f"k_lengths: expected {len(block_table)} lengths, one per row of block_table; got {len(k_lengths)}."
        )
    return block_table if block_table.stride(1) == 1 else block_table.contiguous(), k_lengths.contiguous()
