"""An array in memory: its address, extent and overlap with others; fresh pages."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import ELEMENT_BYTES, numpy_dtype

DIMS = 4  # dimensions of an array whose place can be said
# a place: an array's address, sizes and strides in bytes, in words of 64 bits; zeros fill up what it lacks of DIMS
PLACE = struct.Struct(f"={1 + 2 * DIMS}q")


@dataclass(slots=True)
class Array:
    """An array in memory: address, shape, strides in bytes, dtype name. `owner` keeps it alive."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    kind: str  # numpy, torch, dlpack
    writeable: bool
    owner: Any
    device: str = "cpu"  # or cuda:0, …: then `tensor` is the array as PyTorch has it
    final: Array | None = None  # where deliver() copies it to
    rest: Array | None = None  # of keys in two parts: the second, whose rows continue this one's

    @property
    def columns(self) -> int:
        """Elements of a row, those of its second part included."""
        return self.shape[-1] + (0 if self.rest is None else self.rest.shape[-1])

    @property
    def itemsize(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def tensor(self) -> Any:
        return self.owner if self.kind == "torch" else self.owner[1]

    @property
    def place(self) -> bytes:
        """Says where the array lies, as read() of a prepared call does."""
        padding = (0,) * (DIMS - len(self.shape))
        return PLACE.pack(self.address, *self.shape, *padding, *self.strides, *padding)

    def of(self, owner: Any, address: int) -> Array:
        """Returns the array of this form that another owner has at an address."""
        return Array(self.name, address, self.shape, self.strides, self.dtype, self.kind, self.writeable, owner)

    def extent(self) -> tuple[int, int]:
        """Returns the addresses of the first byte and one past the last."""
        if 0 in self.shape:
            return self.address, self.address
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum([r for r in reach if r < 0])
        return low, self.address + sum([r for r in reach if r > 0]) + self.itemsize

    def whole(self) -> Array:
        """Returns it, or a copy without gaps."""
        size, dense = self.itemsize, ()
        for n in reversed(self.shape):
            dense, size = (size, *dense), size * n
        if self.strides == dense:
            return self
        copy = np.ascontiguousarray(self.numpy())
        return Array(self.name, copy.ctypes.data, copy.shape, copy.strides, self.dtype, "numpy", True, copy)

    def numpy(self) -> np.ndarray:
        """Returns a NumPy view, which keeps the memory alive: the array behind it may be a caller's temporary."""
        if isinstance(self.owner, np.ndarray):
            return self.owner
        view = view_of_memory(
            self.address, self.extent(), self.shape, self.strides, numpy_dtype(self.dtype), self.owner
        )
        view.flags.writeable = self.writeable
        return view


_EMPTY = ctypes.c_char()


def view_of_memory(
    address: int, extent: tuple[int, int], shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any, owner: Any
) -> np.ndarray:
    """Returns a NumPy view of an array at an address, which keeps its owner alive; extent: the addresses of its first
    byte and one past the last; strides in bytes.
    """
    low, high = extent
    buffer: Any = (ctypes.c_char * max(high - low, 1)).from_address(low or ctypes.addressof(_EMPTY))
    buffer.owner = owner
    return np.ndarray(shape, dtype, buffer, address - low, strides)


def pages(size: int, *, large: bool = False) -> mmap.mmap:
    """Returns zeroed pages: after a fork each process has its own; only touched ones take memory. `large`: of MiB."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, max(size, 1))
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large:
        ask_for_large_pages(memory)
    return memory


def ask_for_large_pages(memory: Any) -> None:
    """Asks for pages of MiB where a mapping, or the one that an array is in, is touched from now on."""
    while isinstance(memory, (np.ndarray, memoryview)):
        memory = memory.base if isinstance(memory, np.ndarray) else memory.obj
    if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)


def overlap(a: Array, b: Array) -> bool:
    """Returns whether the two share a byte (or might, where that is too hard to say)."""
    a_low, a_high = a.extent()
    b_low, b_high = b.extent()
    if a_low >= b_high or b_low >= a_high or a.device != b.device:
        return False
    try:
        limit: Any = 10_000
        return bool(np.shares_memory(a.numpy(), b.numpy(), max_work=limit))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(x: Array) -> bool:
    """Returns whether two elements may share a byte: none do if each stride is at least what smaller ones span."""
    within = x.itemsize
    for step, n in sorted((abs(s), n) for n, s in zip(x.shape, x.strides, strict=True) if n > 1):
        if step < within:
            return 0 not in x.shape
        within += step * (n - 1)
    return False
