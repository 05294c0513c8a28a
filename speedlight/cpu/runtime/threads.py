"""Threads of ours, outside Python: the GIL is not needed to wake them, nor by them. Linux."""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from ...host.llvm import load
from ...host.machine import host_arch, isa_named
from ..kernels.thread_pool import BLOCK, LIBC, ServingShape
from .compile import lock, objects_of, symbol_of


@functools.cache
def available() -> bool:
    """Returns whether this system has what threads of ours are made of."""
    if sys.platform != "linux":
        return False
    process = ctypes.CDLL(None)
    return all([hasattr(process, name) for name in LIBC])


class Threads:
    """Some threads, none at first, for one caller at a time. They last as long as the process."""

    __slots__ = ("_block", "_clock", "_region")

    def __init__(self) -> None:
        self._region, self._clock = _code()
        memory = (ctypes.c_int64 * (len(BLOCK.names) + 8))()
        self._block = -(-ctypes.addressof(memory) // 64) * 64
        self._word("apart").value = -1
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # never freed: threads sleep on it

    def run(self, kernel: int, words: int, helpers: int, openmp: int, clock: int) -> int:
        """A region on the caller's thread and up to `helpers` more. Nobody is inside any more when it returns.

        Those are of GOMP_parallel, at `openmp`, while the one with that clock (0: none) is awake; else ours. Returns 0,
        or the error number of why not all of ours could be started.
        """
        return self._region(self._block, kernel, words, helpers, openmp, clock)

    def clock_of_team(self, openmp: int, threads: int) -> int:
        """The clock of the CPU time of a thread of the caller's team of GOMP_parallel, not of the caller; 0: there is
        none. The caller's where the team is bound to CPUs of its own.
        """
        return self._clock(openmp, threads)

    def addresses(self) -> tuple[int, int]:
        """Returns the addresses of run()'s function and of the threads, for machine code."""
        return ctypes.cast(self._region, ctypes.c_void_p).value or 0, self._block

    @property
    def started(self) -> int:
        return self._word("started").value

    def _word(self, name: str) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self._block + BLOCK.offset(name))


@functools.cache
def _code() -> tuple[Any, Any]:
    """The functions `region` and `clock` of serving.py. Never unloaded: threads sleep in it."""
    shape = ServingShape(isa_named({"x86_64": "avx2", "aarch64": "neon"}[host_arch()]))
    symbol, pointer, word = symbol_of(shape), ctypes.c_void_p, ctypes.c_int64
    with lock:
        code = load(objects_of(shape)[0], (symbol, f"{symbol}_clock"))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(code))
    region = ctypes.CFUNCTYPE(word, pointer, pointer, pointer, word, pointer, word)(code[symbol])
    return region, ctypes.CFUNCTYPE(word, pointer, word)(code[f"{symbol}_clock"])
