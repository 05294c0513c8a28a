"""Signals (R15): a call stops soon, nobody stays inside a region, and threads are as they were."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from engines import tuned
from injection import interrupted, needs_places, places, spread
from problems import qkv
from threads import BIG, count_threads, run, up, use, wait_until

import speedlight as sl
from speedlight.cpu.runtime import workers

LONG = {  # calls of seconds, and what they are made of
    "attention": ("x = np.ones((1, 8, 24000, 128), np.float32)", "sl.attention(x, x, x)"),
    "merge": (
        "x, lse = np.ones((20480, 128), np.float32), np.zeros(20480, np.float32); sl.merge([x], [lse])",
        "sl.merge([x] * 25000, [lse] * 25000)",
    ),
}


@pytest.mark.parametrize("with_torch", [False, True] if FULL else [False])
@pytest.mark.parametrize(("made", "call"), LONG.values(), ids=LONG)
def test_interrupt(with_torch, made, call):
    """A call of seconds stops soon after SIGINT; the next call is right."""
    code = (
        ("import torch\n" if with_torch else "")
        + BIG
        + (
            "import os, signal, threading, time\nsl.set_threads(2)\nwant = sl.attention(q, q, q).tobytes()\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's children ignore it
            f"{made}\n"
            "sent = []\n"
            "def later():\n    time.sleep(0.7); sent.append(time.perf_counter()); os.kill(os.getpid(), signal.SIGINT)\n"
            "threading.Thread(target=later).start()\n"
            f"try:\n    {call}; print('finished')\n"
            "except KeyboardInterrupt: print(time.perf_counter() - sent[0])\n"
            "print(sl.attention(q, q, q).tobytes() == want)"
        )
    )
    delay, right = run(code).split()
    assert delay != "finished" and right == "True"
    assert float(delay) < 10  # a hang guard; the figure is in docs/ladder.md


@pytest.mark.parametrize("threads", [2, 3])
def test_measuring_can_be_interrupted(threads):
    """The roofs' kernels count who is inside, as regions do: an interrupted caller waits for them, not for ever."""
    code = (
        "import speedlight as sl\nfrom speedlight.host import machine\n"
        "from speedlight.cpu.runtime import roof, workers\n"
        "workers._openmp = lambda _: None\n"
        "workers._new_threads = lambda: None\n"
        "started = workers._started\n"
        "class Late(list):\n"
        "    def __iter__(self):\n"
        "        yield from list.__iter__(self)\n"
        "        raise KeyboardInterrupt\n"
        "workers._started = lambda count: Late(started(count))\n"
        "isa = machine.current_isa()\n"
        "for call in (lambda n: roof.peak_flops(isa, 'f32', n), lambda n: roof.bandwidth(isa, n)):\n"
        f"    try: call({threads})\n"
        "    except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\ninterrupted\n", done.stderr


SIGNALS = """
import os, random, signal, time
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, 1, n, 64), dtype=np.float32) for n in (512, 3000, 3000))
out, inside, more = np.empty_like(q), [False], [0]
sl.set_threads(3)
want = sl.attention(q, k, v, out=out).tobytes()
class Interrupt(BaseException): pass
def handler(*_):
    more[0] -= 1
    if more[0] <= 0: signal.setitimer(signal.ITIMER_REAL, 0)
    if inside[0]: raise Interrupt
signal.signal(signal.SIGALRM, handler)
start = time.perf_counter()
sl.attention(q, k, v, out=out)
length = time.perf_counter() - start
time.sleep(0.3)  # a thread of the start may still be ending
before = len(os.listdir("/proc/self/task"))
random.seed(0)
ended = late = wrong = 0
for i in range(COUNT):
    out.fill(0)
    try:
        try:
            more[0], inside[0] = 3, True  # a signal of the turn before may still be on its way
            signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, length), random.uniform(2e-5, 4e-4))
            sl.attention(q, k, v, out=out)
        finally: inside[0] = False
    except Interrupt:
        ended += 1
        left = out.tobytes()
        time.sleep(3e-3)
        late += out.tobytes() != left
    while more[0] > 0: time.sleep(1e-4)
    if i % 8 == 0: wrong += sl.attention(q, k, v).tobytes() != want
print(ended > COUNT / 8, late, wrong, len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("with_torch", [False, True] if FULL else [False])
def test_signals_end_a_call_when_nobody_is_inside(with_torch):
    """Three signals some 0.2 ms apart: what comes during the wait for other threads neither ends it nor costs a
    thread.
    """
    code = ("import torch\n" if with_torch else "") + BIG + SIGNALS.replace("COUNT", "600" if FULL else "60")
    assert run(code).split() == ["True", "0", "0", "0"]


@pytest.fixture
def long_regions(regions: int) -> Any:
    """So long that a call has so many."""
    with tuned(threading={"region_seconds": 1.0 if regions == 1 else 1e-4}):
        yield


@needs_places
@pytest.mark.parametrize(
    ("way", "regions"), [("helpers", 1), ("helpers", 5), ("threads", 1), ("threads", 5), ("openmp", 1)]
)
def test_an_interrupt_anywhere_leaves_threads_as_they_were(rng, monkeypatch, way, regions, long_regions):
    """At each place of the engine where CPython looks for signals: no slot stays taken, nobody inside, no thread
    more.
    """
    use(monkeypatch, way)
    q, k, v = qkv(rng, "float32", 1, 2, 2, 128, 256, 64, 64)
    out = np.empty_like(q)
    sl.set_threads(3)

    def call() -> None:
        sl.attention(q, k, v, out=out)

    call()
    wait_until(up)
    want, threads = out.tobytes(), count_threads()
    found = places(call)
    for n in spread(found, 100_000 if FULL else 40):
        out.fill(0)
        ended = interrupted(call, n)
        left = out.tobytes()
        assert workers._region == [None]
        wait_until(
            lambda: count_threads() <= threads
        )  # OpenMP's, and those that tried whether threads can be had, may be leaving
        if n % 4 == 0:
            time.sleep(1e-3)
            assert out.tobytes() == left
        if not ended:
            assert left == want
        call()
        assert out.tobytes() == want


@needs_places
def test_an_interrupt_while_threads_are_started(rng, monkeypatch):
    """A helper is in the list before it is up: whenever the start was interrupted, the next call starts what is
    missing, once.
    """
    use(monkeypatch, "helpers")
    q, k, v = qkv(rng, "float32", 1, 2, 2, 128, 256, 64, 64)
    sl.set_threads(3)
    want = sl.attention(q, k, v).tobytes()

    def call() -> None:
        let_go(workers._helpers)
        sl.attention(q, k, v)

    def complete() -> bool:
        assert sl.attention(q, k, v).tobytes() == want
        return all(x.up.locked() for x in workers._helpers) and serving() == 2

    for n in places(call):
        interrupted(call, n)
        wait_until(complete)
        assert len(workers._helpers) == 2


def serving() -> int:
    """Threads that serve a helper of the list. (All threads of the process would count those that are about to end, and
    one that was started twice and came late to a helper that was let go.)
    """
    frames = [frame for top in sys._current_frames().values() for frame, _ in walk_stack(top)]
    runs = [frame.f_locals["self"] for frame in frames if frame.f_code is workers._Helper.run.__code__]
    return sum(any(x is helper for helper in workers._helpers) for x in runs)


def let_go(helpers: list[workers._Helper]) -> None:
    """Ends their threads."""
    leave: Any = SimpleNamespace(entry=sys.exit)
    for x in helpers:
        x.regions.put((leave, (ctypes.c_int64 * 1)()))
    helpers.clear()
