"""`append_paged()` on a device."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..arrays.memory import Array
from ..errors import ArgumentTypeError
from ..problem.checks import new_counts, packed_counts
from .keys import axes, is_resident
from .launch import start, status_of
from .rows import Destination, Rows, Tokens


def append_paged(
    pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, block_table: Any, k_lengths: Any, counts: Any
) -> torch.Tensor:
    """Enqueues it, and gives the lengths after. Tables and lengths of the host have been checked; kernels check those
    of the device.
    """
    keys, values, k, v = (x.tensor for x in (*pages, *new))
    device, batch = keys.device, len(block_table)
    table = torch.as_tensor(block_table).to(device)
    lengths = torch.as_tensor(k_lengths, dtype=None if is_resident(k_lengths, str(device)) else torch.int64).to(device)
    n_new = k.shape[layout.index("l")]
    each = first = None
    if layout == "lhd":
        given = packed_counts("new_lengths", counts, batch, n_new)
        n_new, first = max(given, default=0), torch.tensor([0, *itertools.accumulate(given)][:batch]).to(device)
        each = torch.tensor(given, dtype=torch.int64).to(device)
    elif is_resident(counts, str(device)):
        if counts.ndim != 1 or len(counts) != batch or counts.dtype not in (torch.int32, torch.int64):
            raise ArgumentTypeError(
                f"new_lengths: expected {batch} of int32 or int64; got {counts.dtype} of shape {tuple(counts.shape)}."
            )
        each = counts.contiguous()
    elif counts is not None:
        each = torch.tensor(new_counts(counts, batch, n_new), dtype=torch.int64).to(device)
    tokens = Tokens(k, v, axes(k, layout), axes(v, layout), n_new, each, first)
    after, size = torch.empty_like(lengths), keys.shape[1]
    to = Destination(lengths, table.shape[1] * size, pages=table, page_size=size, after=after)
    start(Rows.over((keys, values)).put(tokens, to, status_of(device)))
    return after
