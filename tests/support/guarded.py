"""Memory between unreadable pages: whoever reads or writes a byte too many is killed."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
PAGE = mmap.PAGESIZE


class Guarded:
    """Memory between two unreadable pages, handed out at its end ("over") or its start ("under")."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self.base = libc.mmap(None, self.size + 2 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) + PAGE
        self.unlock()

    def unlock(self) -> None:
        libc.mprotect(self.base, self.size, 3)

    def seal(self) -> None:
        libc.mprotect(self.base, self.size, 1)

    def array(self, shape: tuple[int, ...], dtype: np.dtype, side: str) -> np.ndarray:
        count = int(np.prod(shape)) * dtype.itemsize
        offset = self.size - count if side == "over" else 0
        return np.ndarray(shape, dtype, (ctypes.c_char * self.size).from_address(self.base), offset)
