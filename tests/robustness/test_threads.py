"""Threads outside Python: who is waited for, where they run, when they rest, and that nothing is left of them."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import pytest
from conftest import FULL
from threads import BIG, run, wait_until

import speedlight as sl
from speedlight.cpu.kernels.thread_pool import LIBC, ServingShape, serving_module
from speedlight.cpu.runtime import workers
from speedlight.host.machine import isa_named

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads of this kind are Linux's")

two_cpus = pytest.mark.skipif(
    len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()) < 2, reason="one CPU"
)

SHARE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def test_all_that_the_code_calls_is_looked_for():
    module = serving_module(ServingShape(isa_named("avx2")), "x")
    declared = {f.name for f in module.ir.functions if f.is_declaration and not f.name.startswith("llvm.")}
    assert declared == set(LIBC)


class Region:
    """A region whose shares are Python functions, the caller's and the helpers' (`stay`), and who has come and gone."""

    def __init__(self, share, stay=lambda: time.sleep(0.002)) -> None:
        self.came: list[int] = []
        self.left: list[int] = []
        self.stay = stay
        self.share, self.caller, self.kernel = share, threading.get_ident(), SHARE(self._run)

    def _run(self, _: int) -> None:
        if threading.get_ident() == self.caller:
            self.share(self)
        else:
            self.came.append(1)
            self.stay()
            self.left.append(1)

    def run(self, ours, helpers: int) -> None:
        address = ctypes.cast(self.kernel, ctypes.c_void_p).value
        assert address is not None and ours.run(address, 0, helpers, 0, 0) == 0


@pytest.fixture(scope="module")
def ours():
    from speedlight.cpu.runtime.threads import Threads

    return Threads()


def test_who_took_part_is_waited_for(ours):
    for pause in (0, 0.02):  # new threads, and those that sleep
        time.sleep(pause)
        region = Region(lambda r: wait_until(lambda: len(r.came) == 3))
        region.run(ours, 3)
        assert ours.started == 3 and len(region.left) == 3


def test_who_comes_late_is_not_waited_for(ours):
    """The caller's share is over at once: whoever found a seat has left it, and no more come than there are seats."""
    for helpers in (1, 2, 3):
        for pause in (0, 3e-4, 2e-3):
            region = Region(lambda r: None)
            for _ in range(10):
                before = len(region.came)
                region.run(ours, helpers)
                assert len(region.came) == len(region.left) <= before + helpers
                time.sleep(pause)
            came = len(region.came)
            time.sleep(3e-3)
            assert len(region.came) == came  # nobody has come after the end


def test_many_regions_one_after_another(ours):
    """Each with a number of helpers of its own, some asleep, some awake; all tickets are drawn once."""
    from speedlight.cpu.memory.records import LEFT, LIMIT, TICKET, WORKER
    from speedlight.cpu.runtime import roof
    from speedlight.host.machine import current_isa

    read = roof._kernels(current_isa(), "f32")[1]
    memory = (ctypes.c_int64 * (4 * roof._PIECE // 8))()  # of four tickets
    words = (ctypes.c_int64 * (len(roof.ARGUMENTS.names) + 128))()
    words[LIMIT], words[roof.ARGUMENTS.word("memory")] = 4, ctypes.addressof(memory)
    for n in range(2000):
        words[TICKET] = words[WORKER] = words[LEFT] = 0
        assert ours.run(read.address, ctypes.addressof(words), n % 4, 0, 0) == 0
        assert words[WORKER] == words[LEFT] <= 1 + n % 4 and words[TICKET] == 4 + words[WORKER]
        if n % 200 == 0:
            time.sleep(1e-3)


def test_many_that_sleep_wake_each_other():
    """The caller wakes four of forty; all come, and no more than a small region has seats for are woken after that."""
    from speedlight.cpu.runtime.threads import Threads

    ours, region = Threads(), Region(lambda r: wait_until(lambda: len(r.came) == 40))
    for _ in range(3):
        region.run(ours, 40)
        assert ours.started == 40 and len(region.left) == 40
        wait_until(lambda: ours._word("sleeping").value == 40)
        region = Region(region.share)
    seen = threading.Event()  # until then the three stay: they would sleep again, and nobody would see 37

    def look(r: Region) -> None:
        wait_until(lambda: len(r.came) == 3 and ours._word("sleeping").value == 37)
        seen.set()

    few = Region(look, stay=lambda: seen.wait(30))
    few.run(ours, 3)
    assert len(few.left) == 3


MANY = """import os, signal, time
sl.set_threads(1)
want = sl.attention(q, q, q, causal=True).tobytes()
sl.set_threads(40)

def raises(*_):
    raise ZeroDivisionError

signal.signal(signal.SIGALRM, raises)
stopped = right = 0
for turn in range(TURNS):
    time.sleep(0.003 * (turn % 3))  # all are awake, some, none
    signal.setitimer(signal.ITIMER_REAL, 1e-4 * (turn % 30 + 1))
    try:
        sl.attention(q, q, q, causal=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except ZeroDivisionError:
        stopped += 1
    right += sl.attention(q, q, q, causal=True).tobytes() == want
if os.fork() == 0:
    os._exit(sl.attention(q, q, q, causal=True).tobytes() != want)
print(right, stopped > 0, os.wait()[1], workers._region, workers._ours.started)
"""


def test_many_threads_are_right_through_signals_and_forks():
    turns = 60 if FULL else 24
    assert run(f"TURNS = {turns}\n{BIG}{MANY}").split() == [str(turns), "True", "0", "[None]", "39"]


def test_openmp_while_its_team_is_awake(rng, monkeypatch):
    import torch  # noqa: F401 - brings OpenMP

    q = rng.standard_normal((1, 4, 300, 64)).astype("float32")
    sl.set_threads(2)
    want = sl.attention(q, q, q).tobytes()
    used, openmp = workers._ours, workers._openmp(True)
    assert used is not None and openmp is not None
    team = used.clock_of_team(openmp.parallel, 2)
    caller = time.pthread_getcpuclockid(threading.get_ident())
    assert team not in (0, caller) and time.clock_gettime(team) >= 0
    for clock, is_ours in ((caller, 0), (0, 1), (team, 1)):  # that of somebody awake, of nobody, of somebody asleep
        monkeypatch.setattr(workers, "_team_of", lambda *_, clock=clock: (openmp.parallel, clock))
        vars(workers._calling).pop("team", None)  # it is asked anew
        time.sleep(0.1 if clock == team else 0)
        before = used._word("state").value
        assert sl.attention(q, q, q).tobytes() == want
        assert used._word("state").value == before + is_ours


def test_a_team_is_asked_for_anew_for_more_threads(monkeypatch):
    """More of an OpenMP team are tried first: its runtime ends the process where they cannot start."""
    asked, team_of = [], workers._team_of
    monkeypatch.setattr(workers, "_team_of", lambda ours, n: (asked.append(n), team_of(ours, n))[1])
    vars(workers._calling).pop("team", None)
    found = [workers.team_address(n) for n in (2, 2, 1, 3, 3, 2)]
    assert asked == [2, 3] and len({*found}) == 1 and found[0]


@two_cpus
def test_a_team_that_is_bound_is_always_taken():
    """Threads of ours may go where the caller may; a team has been told to stay elsewhere."""
    import torch  # noqa: F401 - brings OpenMP

    from speedlight.cpu.runtime.threads import Threads

    openmp, found = workers._openmp(True), []

    def call() -> None:
        assert openmp is not None
        own = time.pthread_getcpuclockid(threading.get_ident())
        for cpus in (os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}):
            os.sched_setaffinity(0, cpus)  # of this thread alone
            found.append(Threads().clock_of_team(openmp.parallel, 2) == own)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [False, True]


ALONE = (
    "import ctypes, gc, os, time\nfrom speedlight.cpu.runtime import compile, workers\n"
    "from speedlight.problem.prepared import prepared_calls\n"
    "sl.set_threads(3)\nbefore = set(os.listdir('/proc/self/task'))\n"
    "want = sl.attention(q, q, q).tobytes()\n"
    "def status(name):\n"
    "    tasks = sorted(set(os.listdir('/proc/self/task')) - before)\n"
    "    texts = [open(f'/proc/self/task/{t}/status').read() for t in tasks]\n"
    "    return [int(x.split(f'{name}:')[1].split()[0], 16) for x in texts]\n"
)


def test_idle_threads_rest_and_a_process_ends():
    """They take no CPU time when there is nothing to do, no signals, and do not mind that kernels are unloaded."""
    code = (
        "time.sleep(0.05); start = time.process_time(); time.sleep(0.3)\n"
        "print(time.process_time() - start < 0.003, len(status('SigBlk')), all(x >> 1 & 1 for x in status('SigBlk')))\n"
        "compile._loaded.clear(); prepared_calls.clear(); gc.collect()\n"
        "print(sl.attention(q, q, q).tobytes() == want, sl.attention(q, q, q, causal=True).shape == q.shape)"
    )
    assert run(BIG + ALONE + code).split() == ["True", "2", "True", "True", "True"]


@two_cpus
def test_threads_go_where_the_caller_may_but_not_where_it_is():
    code = (
        "may = sorted(os.sched_getaffinity(0))[:2]\n"
        "for here in ([may[0]], [may[1]], may):\n"
        "    os.sched_setaffinity(0, here); time.sleep(0.02)\n"
        "    assert sl.attention(q, q, q).tobytes() == want\n"
        "    now = {sum(1 << x for x in here) ^ (1 << x if len(here) > 1 else 0) for x in here}\n"
        "    print(*{x in now for x in status('Cpus_allowed')})"
    )
    assert run(BIG + ALONE + code).split() == ["True"] * 3
