"""Threads: where a region runs.

On the OpenMP runtime already in the process if there is one (two runtimes that alternate cost 5 to 8 times), else on
a few threads of our own; inline for little work. Kernels never raise and never call Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from ..machine import available_threads
from .compile import Kernel
from .fields import LEFT, LIMIT, WORKER

_threads: int | None = None
_forked = False  # GNU OpenMP hangs in a forked child: there we use threads of our own
_region = threading.Lock()  # one region at a time; other callers run inline
_pool: Pool | None = None


def set_threads(n: int | None) -> None:
    """Use `n` threads from now on, in this process; None goes back to SPEEDLIGHT_THREADS or the machine's own count.

    >>> import speedlight as sl
    >>> sl.set_threads(2)
    >>> sl.get_threads()
    2
    >>> sl.set_threads(None)
    """
    global _threads
    if n is not None:
        if not isinstance(n, int) or isinstance(n, bool):
            raise ArgumentTypeError(f"n: expected an int or None; got {type(n).__name__}.")
        if not 1 <= n <= 1024:
            raise ArgumentError(f"n: expected 1 to 1024 threads; got {n}.")
    _threads = n


def get_threads() -> int:
    """Threads a call may use: set_threads, else SPEEDLIGHT_THREADS, else the CPUs this process may run on."""
    if _threads is not None:
        return _threads
    return _default_threads(os.environ.get("SPEEDLIGHT_THREADS", ""))


@functools.cache
def _default_threads(text: str) -> int:
    if not text:
        return available_threads()
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ArgumentError(f"SPEEDLIGHT_THREADS: expected a number from 1 to 1024; got {text!r}. Unset it to use every CPU.")
    return int(text)


@functools.cache
def _openmp(_torch_loaded: bool) -> Any:
    """GOMP_parallel of an OpenMP runtime that something else has loaded; None without one."""
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/self/maps") as f:
            paths = {line.split(None, 5)[5].strip() for line in f if "omp" in line and ".so" in line}
    except OSError:
        return None
    for path in sorted(paths, key=lambda p: "libgomp" not in p):  # torch's first: LLVM's exports the same entry
        name = os.path.basename(path)
        if not name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        with contextlib.suppress(OSError, AttributeError):
            run = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
            run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            run.restype = None
            return run
    return None


def runtime() -> str:
    """Which threads a region would use now: 'openmp' or 'pool'."""
    return "openmp" if not _forked and _openmp("torch" in sys.modules) else "pool"


def run_region(kernel: Kernel, words: Any, threads: int) -> None:
    """Runs one region to its end on up to `threads` threads; `words` is the ctypes array of its arguments.

    Raises only what signal handlers raise, and only when no thread works on the region any more.
    """
    arguments = ctypes.addressof(words)
    if threads == 1 or not _region.acquire(blocking=False):
        kernel.entry(arguments)
        return
    try:
        parallel = None if _forked else _openmp("torch" in sys.modules)
        if parallel is not None:
            parallel(kernel.address, arguments, threads, 0)
        else:
            _run_on_pool(kernel, words, threads - 1)
    finally:
        _region.release()


def _run_on_pool(kernel: Kernel, words: Any, helpers: int) -> None:
    """Our own threads help; the caller alone could do all of it, so a helper that comes late finds nothing left."""
    global _pool
    pool = _pool
    if pool is None:
        pool = _pool = Pool()
    try:
        pool.start(kernel.entry, words, helpers)
        kernel.entry(ctypes.addressof(words))
        pool.wait(helpers)
    except BaseException:  # a signal handler raised: give up these threads, and leave once none is inside
        _pool = None
        words[LIMIT] = 0
        while words[WORKER] != words[LEFT]:
            time.sleep(1e-4)
        raise


class Pool:
    """Threads that wait for a region each. Python threads: ctypes releases the GIL while a kernel runs."""

    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def start(self, entry: Any, words: Any, helpers: int) -> None:
        while len(self.workers) < helpers:
            self.workers.append(_Worker(len(self.workers)))
        for worker in self.workers[:helpers]:
            worker.job = (entry, words)
            worker.go.release()

    def wait(self, helpers: int) -> None:
        for worker in self.workers[:helpers]:
            worker.done.acquire()


class _Worker:
    def __init__(self, number: int) -> None:
        self.go, self.done = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.done.acquire()
        self.job: Any = None
        threading.Thread(target=self._loop, name=f"speedlight-{number}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self.go.acquire()
            entry, words = self.job
            entry(ctypes.addressof(words))
            self.job = None
            self.done.release()


def _after_fork() -> None:
    """The child has none of the parent's threads and may find the lock taken."""
    global _forked, _region, _pool
    _forked, _region, _pool = True, threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
