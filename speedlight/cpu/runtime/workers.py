"""Threads: where a region runs.

On a few threads of our own; on those of the OpenMP runtime that the process has loaded already as long as they are
awake (two thread pools that are awake take turns on the same cores); inline for little work. On Linux our threads are
those of `threads`; elsewhere they are Python's. Kernels never raise and never call Python.

CPython handles signals, and changes threads, only after calls, at jumps back and at the start of functions. So a slot
is claimed and given back by plain stores without a call between, and a wait that must not end early is one call into a
kernel.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ...arrays.integers import integer
from ...errors import ArgumentError, pass_on, warn_once
from ...host.forks import importing
from ...host.machine import current_isa, slow_cores, usable_cpus
from ...host.shortcuts import ENVIRONMENT, setting
from ..memory.records import LEFT, LIMIT, TEAM, TICKET, WORKER
from .compile import Kernel

if TYPE_CHECKING:
    from .threads import Threads

_threads: int | None = None
_forked = False  # GNU OpenMP hangs in a forked child: there we use threads of our own
_region: list[object] = [None]  # the owner's token: one region at a time; other callers run inline
_ours: Threads | None = None  # touched by the region's owner alone, likewise _helpers
_helpers: list[_Helper] = []


def set_threads(n: int | None) -> None:
    """Sets the largest number of threads of a call in this process; None restores SPEEDLIGHT_THREADS or every CPU.

    A call never runs on more threads than there are CPUs that the process may use at that time.

    >>> import speedlight as sl
    >>> sl.set_threads(1)
    >>> sl.get_threads()
    1
    >>> sl.set_threads(None)
    """
    global _threads
    if n is not None:
        n = integer("n", n)
        if not 1 <= n <= 1024:
            raise ArgumentError(f"n: expected 1 to 1024 threads; got {n}.")
    _threads = n


def get_threads() -> int:
    """Returns how many threads a call may use now.

    That is the number of set_threads(), else SPEEDLIGHT_THREADS, and at most the CPUs that this process may use.

    >>> import speedlight as sl
    >>> sl.get_threads() >= 1
    True
    """
    now, asked, known = time.monotonic(), _threads, _in_use.known
    if now >= known.until or asked != known.asked:  # affinity and quotas change while a process runs
        wanted = asked or _threads_named(setting("SPEEDLIGHT_THREADS"))
        count = min(wanted, _limit()) if wanted else max(1, usable_cpus() - slow_cores())
        known = _in_use.known = _Known(now + 1.0, asked, count)
    return known.threads


def machine() -> tuple[int, str]:
    """Returns the number of threads and the vector unit of a call now, a part of a CallKey."""
    until, asked, _, named, found = _in_use.known
    wanted = ENVIRONMENT.get(b"SPEEDLIGHT_ISA") if ENVIRONMENT is not None else setting("SPEEDLIGHT_ISA")
    if time.monotonic() >= until or _threads != asked or wanted != named:
        found = get_threads(), current_isa().name
        _in_use.known = _in_use.known._replace(named=wanted, machine=found)
    return found


class _Known(NamedTuple):
    """The number of threads that calls run on, with what was asked for, and until when that counts; with the vector
    unit, and what the setting named.
    """

    until: float = 0.0
    asked: int | None = None
    threads: int = 1
    named: Any = ...
    machine: tuple[int, str] = (1, "")


class _InUse(threading.local):
    """Each thread's knowledge of the machine, in one tuple: to read a field of its own takes 50 ns."""

    known = _Known()


_in_use = _InUse()
_limit = usable_cpus  # threads that share a CPU take turns in the middle of tasks; tests want that


def _threads_named(text: str) -> int:
    """Returns the number that SPEEDLIGHT_THREADS says; 0 where it says nothing."""
    if not text:
        return 0
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ArgumentError(
            f"SPEEDLIGHT_THREADS: expected a number from 1 to 1024; got {text!r}. Unset it to use every CPU."
        )
    return int(text)


class _OpenMP(NamedTuple):
    """An OpenMP runtime: the address of its GOMP_parallel, and what ends the calling thread's team before a fork; None
    if its teams survive forks.
    """

    parallel: int
    pause: Callable[[int], int] | None


@functools.cache
def _openmp(_torch_loaded: bool) -> _OpenMP | None:
    """Returns an OpenMP runtime that something else has loaded; None without one. One whose teams neither survive a
    fork nor can be ended before it is left alone.

    _torch_loaded: a key of the cache alone. PyTorch loads a runtime, so that one is looked for again.
    """
    if sys.platform != "linux":
        return None
    try:
        with open("/proc/self/maps") as f:
            paths = {line.split(None, 5)[5].strip() for line in f if "omp" in line and ".so" in line}
    except OSError as error:
        pass_on(error, OSError)
        return None
    for path in sorted(paths, key=lambda p: "libgomp" not in p):  # torch's first: LLVM's exports the same entry
        name = os.path.basename(path)
        if not name.startswith(("libgomp", "libomp", "libiomp")):
            continue
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            parallel = ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
            survives_forks = hasattr(library, "__kmpc_fork_call")  # LLVM's and Intel's begin anew in a child
            return _OpenMP(parallel, None if survives_forks else library.omp_pause_resource_all)
    return None


def runtime() -> str:
    """Names the threads that a region may use now: 'pool', ours; 'openmp', those of an OpenMP runtime as well."""
    return "openmp" if _usable_openmp() else "pool"


def _usable_openmp() -> _OpenMP | None:
    """Returns the OpenMP runtime on whose threads regions may run; None where there is none."""
    return None if _forked else _openmp("torch" in sys.modules)


def run_tickets(kernel: Kernel, words: Any, tickets: int, threads: int, seconds: float, longest: float) -> None:
    """Runs all tickets of a call; `seconds` is how long one thread may take, and `longest` a region at most.

    Raises as run_region does.

    In the main thread, where signals are handled, a long call is one region after another. The bits don't know.
    """
    if seconds < longest or threading.current_thread() is not threading.main_thread():
        words[LIMIT] = tickets
        run_region(kernel, words, threads)
        return
    step, done = first_region(tickets, threads, seconds, longest), 0
    while done < tickets:
        end = min(tickets, done + step)
        words[TICKET], words[WORKER], words[LEFT], words[LIMIT] = done, 0, 0, end
        start = time.perf_counter()
        run_region(kernel, words, threads)
        passed = max(time.perf_counter() - start, 1e-6)
        step, done = next_region(step, end - done, threads, passed, longest), end


def first_region(tickets: int, threads: int, seconds: float, longest: float) -> int:
    """Counts the tickets of a call's first region, if one thread takes so long for all of them."""
    return max(1, round(tickets * longest / seconds / min(2, threads))) * threads


def next_region(step: int, done: int, threads: int, passed: float, longest: float) -> int:
    """Counts those of the next region after one of `step`, whose tickets, `done`, took so long."""
    return max(1, min(4 * step, round(done * longest / passed)) // threads) * threads


def run_alone(kernel: Kernel, words: Any, tickets: int) -> None:
    """Runs all tickets of a short call, in this thread."""
    words[LIMIT] = tickets
    try:
        kernel.entry(ctypes.addressof(words))
    except ctypes.ArgumentError as error:  # as in run_region
        raise MemoryError(str(error)) from None


def run_region(kernel: Kernel, words: Any, threads: int) -> None:
    """Runs one region to its end on up to `threads` threads; `words` is the ctypes array of its arguments.

    Raises only what signal handlers raise (and MemoryError), and only when no thread works on the region any more.
    """
    token = object()
    try:
        if threads > 1 and _region[0] is None:
            _region[0] = token
        if _region[0] is not token:
            kernel.entry(ctypes.addressof(words))
        elif (ours := _ours or _new_threads()) is not None:
            _run_on_threads(ours, kernel, words, threads)
        else:
            _run_on_helpers(kernel, words, threads - 1)
    except ctypes.ArgumentError as error:  # addresses are valid arguments: it means that memory ran out
        raise MemoryError(str(error)) from None
    finally:
        if _region[0] is token:
            _region[0] = None


def team_address(threads: int) -> int:
    """Returns the address of the words with which machine code runs a region of the calling thread (records.TEAM); 0
    where threads are Python's.
    """
    most, ours, has_torch, address = _calling.team
    if threads <= most and ours is _ours and has_torch == ("torch" in sys.modules):
        return address
    ours = _ours or _new_threads()
    if ours is None:
        return 0
    words = getattr(_calling, "words", None)
    if words is None:
        words = _calling.words = (ctypes.c_int64 * len(TEAM.names))()
    has_torch = "torch" in sys.modules
    openmp, clock = _team_of(ours, threads)
    words[:] = (*ours.addresses(), openmp, clock)
    address = ctypes.addressof(words)
    if clock or not openmp:  # else threads are tried again at the next call
        _calling.team = threads, ours, has_torch, address
    return address


def region_holder() -> list[object]:
    """Returns the list whose one entry is whoever runs a region; None: nobody."""
    return _region


def _new_threads() -> Threads | None:
    """Starts our threads, imported here since LLVM writes their code; None where there are none of this kind."""
    global _ours
    if sys.platform == "linux":
        with importing:
            from .threads import Threads, available

        if available():
            _ours = Threads()
    return _ours


def _run_on_threads(ours: Threads, kernel: Kernel, words: Any, threads: int) -> None:
    """Runs a region in one call into machine code, from the first store to the end: no signal comes between."""
    openmp, clock = _team_of(ours, threads)
    error = ours.run(kernel.address, ctypes.addressof(words), threads - 1, openmp, clock)
    if error:
        _warn(os.strerror(error))


def _run_on_helpers(kernel: Kernel, words: Any, count: int) -> None:
    """Runs a region with our own threads. The caller alone could finish it, so a late helper just finds no ticket."""
    words = type(words).from_buffer_copy(words)  # late helpers read them after the caller has returned
    arguments = ctypes.addressof(words)
    try:
        for helper in _started(count):
            helper.regions.put((kernel, words))
    except BaseException:
        words[LIMIT] = 0  # no more tickets are drawn
        raise
    finally:
        try:
            kernel.joined(arguments)
        except (MemoryError, ctypes.ArgumentError):  # memory ran out before the call was made: once more
            kernel.joined(arguments)
            raise


def _started(count: int) -> list[_Helper]:
    """Returns up to `count` running helpers; fewer if no more threads can be started."""
    while len(_helpers) < count:
        _helpers.append(_Helper())
    for helper in _helpers[:count]:
        if not helper.up.locked():
            try:
                _thread.start_new_thread(helper.run, ())
            except RuntimeError as error:
                _warn(error)
                return [x for x in _helpers[:count] if x.up.locked()]
    return _helpers[:count]


class _Helper:
    """A thread that waits for regions. ctypes releases the GIL while a kernel runs.

    Starting one may be interrupted before or after its thread runs: so it is started again until `up` is locked, and
    the lock lets a single thread serve.
    """

    __slots__ = ("regions", "up")

    def __init__(self) -> None:
        self.regions: queue.SimpleQueue[tuple[Kernel, Any]] = queue.SimpleQueue()
        self.up = threading.Lock()

    def run(self) -> None:
        if self.up.acquire(blocking=False):
            try:
                while True:
                    self._help(*self.regions.get())
            finally:
                self.up.release()

    @staticmethod
    def _help(kernel: Kernel, words: Any) -> None:
        """Holds kernel and words while it runs, and no longer."""
        kernel.entry(ctypes.addressof(words))


class _Calling(threading.local):
    """Each thread's OpenMP team: its threads, at most so far, and the clock of one of them, not its own; what
    team_address() said last, for how many threads, by which threads of ours, and with PyTorch or without.
    """

    threads = 1
    clock = 0
    team: tuple[int, Threads | None, bool, int] = (0, None, False, 0)


_calling = _Calling()


def _team_of(ours: Threads, threads: int) -> tuple[int, int]:
    """Returns what starts a region on the calling thread's OpenMP team, and the clock that tells whether the team is
    awake; a clock of 0: a region must not run on it.

    GNU OpenMP ends the process if it cannot start a thread, so a trial comes first.
    """
    openmp = _usable_openmp()
    if openmp is None:
        return 0, 0
    if threads > _calling.threads:
        if not _try_threads(threads - 1):
            return openmp.parallel, 0
        _calling.clock = ours.clock_of_team(openmp.parallel, threads)
        _calling.threads = threads
    return openmp.parallel, _calling.clock


def _before_fork() -> None:
    """Ends the calling thread's OpenMP team, ours or PyTorch's: the child of a fork would wait for its threads, which
    it lacks, in PyTorch's next operation. The parent's next operation starts another.

    In a process that was forked without Python's knowledge there is nothing to end: the team's threads are not here.
    """
    openmp = _openmp(True) if "torch" in sys.modules and os.getpid() == _process else None
    if openmp is not None and openmp.pause is not None:
        vars(_calling).clear()
        openmp.pause(_HARD)


_HARD = 2  # OpenMP's omp_pause_hard
_process = os.getpid()


def _try_threads(count: int) -> bool:
    """Returns whether `count` more threads can run at the same time; they have ended when it returns True.

    Returns False after a second if a thread did not come: it may have ended before its first line, as in
    llvm.undisturbed().
    """
    came: list[int] = []
    gate = threading.Lock()

    def wait() -> None:
        came.append(threading.get_native_id())
        with gate:
            pass

    try:
        with gate:
            for _ in range(count):
                _thread.start_new_thread(wait, ())
    except RuntimeError as error:
        _warn(error)
        return False
    latest = time.monotonic() + 1.0
    while len(came) < count or any([os.path.exists(f"/proc/self/task/{n}") for n in came]):
        if len(came) < count and time.monotonic() > latest:
            return False
        time.sleep(5e-5)
    return True


def _warn(error: object) -> None:
    warn_once(
        "threads",
        f"no more threads can be started ({error}); calls run on fewer. Raise the limit (ulimit -u, or a container's "
        "limit of processes), or ask for fewer: SPEEDLIGHT_THREADS=1.",
    )


def _after_fork() -> None:
    """Resets a forked child: none of the parent's threads exist, and no region runs."""
    global _forked, _ours, _process
    _forked, _ours, _process = True, None, os.getpid()
    _helpers.clear()
    _region[0] = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
