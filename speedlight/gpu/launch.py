"""Kernels with their arguments, launched on a device; and the status words in which kernels report errors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..errors import ArgumentError, CompileError, UnsupportedError
from ..host.machine import interpreting
from ..host.rounding import standard


@dataclass(slots=True)
class Launch:
    """A kernel, its grid, and all its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int
    stages: int
    registers: int | None = None


@standard
def start(each: Launch) -> None:
    kernel, arguments = each.kernel, each.arguments
    if 0 in each.grid:
        return
    if arguments.get("USE_TMA"):
        triton.set_allocator(_descriptor_memory)
    where, *_ = [x.device for x in arguments.values() if isinstance(x, torch.Tensor)]
    # Triton launches on the current device
    current = torch.cuda.device(where) if where.type == "cuda" else contextlib.nullcontext()
    try:
        with current:
            kernel[each.grid](**arguments, num_warps=each.warps, num_stages=each.stages, maxnreg=each.registers)
    except triton.runtime.errors.OutOfResources as error:
        raise UnsupportedError(
            f"{kernel.__name__}: this GPU has too little {error.name} for a head dim of {arguments['DV']}: "
            f"{error.required:,} needed, {error.limit:,} there. Run `speedlight tune` on it."
        ) from error
    except triton.CompilationError as error:
        raise CompileError(f"{kernel.__name__}: Triton could not compile it for this GPU: {error}") from error


def named_strides(prefix: str, strides: tuple[int, ...]) -> dict[str, int]:
    """Arguments of a kernel: prefix_item, prefix_head, prefix_row and, of four strides, prefix_column."""
    names = ("item", "head", "row", "column")[: len(strides)]
    return {f"{prefix}_{n}": s for n, s in zip(names, strides, strict=True)}


def capturing() -> bool:
    """Returns whether a CUDA graph is being captured: nothing may wait for the device."""
    return not interpreting() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _descriptor_memory(size: int, alignment: int, stream: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


# --- errors that kernels report


_status: dict[str, torch.Tensor] = {}  # of each device that was used


def status_of(device: torch.device) -> torch.Tensor:
    """The word in which kernels flag page numbers and lengths that are out of range."""
    word = _status.get(str(device))
    if word is None:
        word = _status[str(device)] = torch.zeros(1, dtype=torch.int32, device=device)
    return word


def synchronize() -> None:
    """Waits for every device that was used, and raises what kernels have flagged there."""
    for device, word in _status.items():
        flagged = int(word.item())
        if flagged:
            word.zero_()
            what = "block_table: a page number" if flagged == 2 else "k_lengths: a length"
            raise ArgumentError(
                f"{what} that was read on {device} was out of range; what was computed from it means nothing."
            )
