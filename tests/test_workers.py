"""Threads: concurrent callers (R13), forks (R14), interrupts (R15), the caller's floating-point modes, living with
torch.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading
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

import speedlight as sl
from speedlight import api
from speedlight.cpu import workers


def run(code: str, **environment: str) -> str:
    """A fresh interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def use(monkeypatch, way: str) -> None:
    """Regions run on Python's threads ("helpers"), on ours outside Python ("threads") or on OpenMP's."""
    if way == "helpers":
        monkeypatch.setattr(workers, "_ours", None)
        monkeypatch.setattr(workers, "_new_threads", lambda: None)
    if way == "openmp":
        import torch  # noqa: F401 - brings it

        own = time.pthread_getcpuclockid(threading.get_ident())  # the caller's: it runs, as that of an awake team does
        monkeypatch.setattr(workers, "_clock_of_team", lambda *_: own)
    else:
        monkeypatch.setattr(workers, "_openmp", lambda _: None)


def up() -> bool:
    """Whether all threads that serve regions have begun."""
    return all(x.up.locked() for x in workers._helpers)


linux = pytest.mark.skipif(sys.platform != "linux", reason="threads of this kind are Linux's")

BIG = """import numpy as np, speedlight as sl
q = np.random.default_rng(0).standard_normal((1, 4, 600, 64)).astype(np.float32)
"""


def test_importing_is_light():
    heavy = ("torch", "triton", "llvmlite", "matplotlib", "rich", "typer")
    code = f"import sys, speedlight\nprint([m for m in {heavy} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_concurrent_callers(rng):
    shapes = [(1, 2, 33, 64), (2, 4, 200, 32), (1, 1, 700, 80), (1, 8, 96, 128)]
    inputs = [qkv(rng, "float32", b, h, h, n, n, d, d) for b, h, n, d in shapes]
    sl.set_threads(2)
    want = [sl.attention(*x, causal=True).tobytes() for x in inputs]
    wrong, count = [], 200 if FULL else 40

    def work(i: int) -> None:
        for turn in range(5):
            at = (i + turn) % len(inputs)
            if sl.attention(*inputs[at], causal=True).tobytes() != want[at]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_first_compilations_race():
    code = BIG + (
        "import threading\nouts = []\n"
        "ts = [threading.Thread(target=lambda: outs.append(sl.attention(q, q, q).tobytes())) for _ in range(16)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(len(outs), len(set(outs)))"
    )
    assert run(code, SPEEDLIGHT_CACHE="0").split() == ["16", "1"]


def _child(x: np.ndarray, queue) -> None:
    queue.put(sl.attention(x, x, x).tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_scratch_of_its_own():
    """Scratch that was used before the fork is used again on both sides, at the same time."""
    script = (
        "import os, numpy as np, speedlight as sl\n"
        "rng = np.random.default_rng(0)\n"
        "a, b, k, v = (rng.standard_normal((1, 2, 512, 64), dtype=np.float32) for _ in range(4))\n"
        "sl.set_threads(1)\n"
        "want = [sl.attention(x, k, v).tobytes() for x in (a, b)]\n"
        "pid = os.fork()\n"
        "q, right = (a, want[0]) if pid else (b, want[1])\n"
        "wrong = sum(sl.attention(q, k, v).tobytes() != right for _ in range(300))\n"
        "if not pid: os._exit(wrong > 0)\n"
        "_, status = os.waitpid(pid, 0)\n"
        "print(wrong, status)\n"
    )
    assert subprocess.check_output([sys.executable, "-W", "ignore", "-c", script], text=True, timeout=120).split() == [
        "0",
        "0",
    ]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(rng, method):
    x = rng.standard_normal((1, 4, 300, 64)).astype(np.float32)
    sl.set_threads(2)
    want = sl.attention(x, x, x).tobytes()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_child, args=(x, queue)) for _ in range(8 if FULL else 3)]
    for c in children:
        c.start()
    assert all(queue.get(timeout=120) == want for _ in children)
    for c in children:
        c.join(30)
        assert c.exitcode == 0


@pytest.mark.parametrize("with_torch", [False, True] if FULL else [True])
def test_forks_while_computing(with_torch):
    """Children and grandchildren of a process whose other thread is inside a region."""
    code = (
        ("import torch\n" if with_torch else "")
        + BIG
        + (
            "import os, threading\nfrom speedlight.cpu import workers\n"
            "sl.set_threads(2)\nwant = sl.attention(q, q, q).tobytes()\nstop = False\n"
            "def busy():\n    while not stop: sl.attention(q, q, q)\n"
            "t = threading.Thread(target=busy); t.start()\nok = 0\n"
            f"for i in range({50 if FULL else 5}):\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            "        good = workers._region == [None] and sl.attention(q, q, q).tobytes() == want\n"
            "        inner = os.fork()\n"
            "        if inner == 0: os._exit(0 if sl.attention(q, q, q).tobytes() == want else 1)\n"
            "        os._exit(0 if good and os.waitpid(inner, 0)[1] == 0 else 1)\n"
            "    ok += os.waitpid(pid, 0)[1] == 0\n"
            "stop = True; t.join(); print(ok)"
        )
    )
    code = "import warnings; warnings.simplefilter('ignore')\n" + code
    assert int(run(code)) == (50 if FULL else 5)


@pytest.mark.parametrize("with_torch", [False, True] if FULL else [False])
def test_interrupt(with_torch):
    """A call of seconds stops soon after SIGINT; the next call is right."""
    code = (
        ("import torch\n" if with_torch else "")
        + BIG
        + (
            "import os, signal, threading, time\nsl.set_threads(2)\nwant = sl.attention(q, q, q).tobytes()\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job's children ignore it
            "x = np.ones((1, 8, 24000, 128), np.float32)\n"
            "sent = []\n"
            "def later():\n    time.sleep(0.7); sent.append(time.perf_counter()); os.kill(os.getpid(), signal.SIGINT)\n"
            "threading.Thread(target=later).start()\n"
            "try:\n    sl.attention(x, x, x); print('finished')\n"
            "except KeyboardInterrupt: print(time.perf_counter() - sent[0])\n"
            "print(sl.attention(q, q, q).tobytes() == want)"
        )
    )
    delay, right = run(code).split()
    assert delay != "finished" and right == "True"
    assert float(delay) < 10  # a hang guard; the figure is in docs/ladder.md


def test_the_callers_modes_do_not_matter_and_are_kept(rng):
    import torch

    q, k, v = qkv(rng, "float32", 1, 4, 4, 200, 300, 64, 64)
    v *= np.float32(1e-38)
    want = sl.attention(q, k, v).tobytes()
    torch.set_flush_denormal(True)
    try:
        assert sl.attention(q, k, v).tobytes() == want
        assert float(torch.tensor(1e-38) * torch.tensor(0.01)) == 0.0  # still flushing
    finally:
        torch.set_flush_denormal(False)


def test_openmp_is_shared_once_torch_is_there():
    code = BIG + "from speedlight.cpu import workers\nprint(workers.runtime())\nimport torch\nprint(workers.runtime())"
    before, after = run(code).split()
    assert before == "pool"
    assert after == ("openmp" if sys.platform == "linux" else "pool")


def test_environment_variables_are_checked():
    for name, value in (
        ("SPEEDLIGHT_ISA", "mmx"),
        ("SPEEDLIGHT_THREADS", "many"),
        ("SPEEDLIGHT_THREADS", "0"),
        ("SPEEDLIGHT_ISA", "neon"),
    ):
        code = BIG + "try:\n    sl.attention(q, q, q)\nexcept sl.Error as e: print(str(e).split(':')[0])"
        assert run(code, **{name: value}).strip() == name


def test_set_threads_counts():
    sl.set_threads(3)
    assert workers.get_threads() == 3


@pytest.mark.parametrize("threads", [2, 3])
def test_measuring_can_be_interrupted(threads):
    """The roofs' kernels count who is inside, as regions do: an interrupted caller waits for them, not for ever."""
    code = (
        "import speedlight as sl; from speedlight import machine; from speedlight.cpu import roof, workers\n"
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


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("with_torch", [False, True] if FULL else [False])
def test_no_thread_can_be_started(with_torch):
    """There is no room for a stack: GNU OpenMP would end the process.

    Right results, one warning, and threads once there is room.
    """
    code = (
        ("import torch\n" if with_torch else "")
        + BIG
        + (
            "import resource, warnings\nfrom speedlight.cpu import workers\n"
            "sl.set_threads(1)\nwant = sl.attention(q, q, q).tobytes()\nsl.set_threads(3)\n"
            "ours = workers._new_threads()\n"
            "before = resource.getrlimit(resource.RLIMIT_AS)\n"
            "with open('/proc/self/statm') as f: size = int(f.read().split()[0]) * resource.getpagesize()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (size + (5 << 20), before[1]))\n"
            "with warnings.catch_warnings(record=True) as w:\n"
            "    warnings.simplefilter('always')\n"
            "    right = [sl.attention(q, q, q).tobytes() == want for _ in range(3)]\n"
            "resource.setrlimit(resource.RLIMIT_AS, before)\n"
            "right += [sl.attention(q, q, q).tobytes() == want for _ in range(3)]\n"
            "print(all(right), sum('no more threads can be started' in str(x.message) for x in w), len(w))\n"
            "print(ours.started, workers._ours is ours, workers._region)"
        )
    )
    assert run(code).split() == ["True", "1", "1", "2", "True", "[None]"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_no_memory_for_scratch_is_a_memory_error(rng, monkeypatch):
    from speedlight.cpu import prepare

    def full(size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    q, k, v = qkv(rng, "float32", 1, 2, 2, 20, 30, 16, 16)
    want = sl.attention(q, k, v).tobytes()
    prepare._scratches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "pages", full)
        with pytest.raises(MemoryError, match="bytes of scratch cannot be reserved"):
            sl.attention(q, k, v)
    assert sl.attention(q, k, v).tobytes() == want


def count_threads() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()


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


def wait_until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


@pytest.mark.parametrize("way", ["helpers", "threads"])
def test_no_memory_anywhere_in_a_run(rng, monkeypatch, way):
    """At each allocation of Python's own: MemoryError, nobody inside, the next call right."""
    from speedlight.cpu.prepare import Call

    testing = pytest.importorskip("_testcapi")
    use(monkeypatch, way)
    monkeypatch.setattr(
        sys, "unraisablehook", lambda _: None
    )  # a helper may be the one who has none; it is started anew
    q, k, v = qkv(rng, "float32", 1, 2, 2, 128, 128, 64, 64)
    out = np.empty_like(q)
    sl.set_threads(3)
    calls = []
    api._prepared.clear()
    with monkeypatch.context() as patch:
        patch.setattr(Call, "run", lambda *given: calls.append(given))
        sl.attention(q, k, v, out=out)
    run_of, (prepared, *addresses) = Call.run, calls[0]
    api._prepared.clear()
    addresses[3] = out.ctypes.data
    run_of(prepared, *addresses)
    want, failed = out.tobytes(), 0
    assert want == sl.attention(q, k, v).tobytes()
    for n in range(150):
        out.fill(0)
        try:
            testing.set_nomemory(n, n + 1)
            run_of(prepared, *addresses)
        except MemoryError:
            failed += 1
        finally:
            testing.remove_mem_hooks()
        left = out.tobytes()
        assert workers._region == [None]
        if n % 4 == 0:
            time.sleep(5e-4)
            assert out.tobytes() == left
        run_of(prepared, *addresses)
        assert out.tobytes() == want
    assert failed > 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forks_while_roofs_are_measured():
    """A child must not find LLVM's lock taken by a thread that it does not have."""
    code = (
        "import os, signal, threading, warnings; import speedlight as sl\n"
        "from speedlight.cpu import compile, roof\n"
        "warnings.simplefilter('ignore'); roof.bandwidth = lambda *_: 1e9\n"
        "plan = sl.plan(q_heads=1, q_len=8, head_dim=8); str(plan); stop = []\n"
        "def measure():\n"
        "    with compile.lock: roof._known.clear(); roof._kernels.cache_clear()\n"
        "    plan.measured()\n"
        "def other():\n    while not stop: measure()\n"
        "thread = threading.Thread(target=other); thread.start(); hung = 0\n"
        f"for n in range({100 if FULL else 8}):\n"
        "    pid = os.fork()\n"
        "    if not pid: signal.alarm(20); measure(); os._exit(0)\n"
        "    hung += os.waitpid(pid, 0)[1] != 0\n"
        "stop.append(1); thread.join(); print(hung)"
    )
    assert run(code, SPEEDLIGHT_CACHE="0").strip() == "0"


def test_forks_while_masks_are_traced():
    """Nothing that a mask's properties are computed under may be left locked in a child."""
    code = (
        "import os, signal, threading, time, warnings; import numpy as np, speedlight as sl\n"
        "warnings.simplefilter('ignore')\n"
        "x = np.ones((1, 1, 8, 4), np.float32)\n"
        "def call(): sl.attention(x, x, x, mask=lambda b, h, i, j: i >= j)\n"
        "call(); stop = []\n"
        "def other():\n    while not stop: call()\n"
        "thread = threading.Thread(target=other); thread.start(); hung = 0\n"
        f"for n in range({400 if FULL else 8}):\n"
        "    time.sleep(0.001 * (n % 3)); pid = os.fork()\n"
        "    if not pid: signal.alarm(20); call(); os._exit(0)\n"
        "    hung += os.waitpid(pid, 0)[1] != 0\n"
        "stop.append(1); thread.join(); print(hung)"
    )
    assert run(code).strip() == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_what_is_being_imported():
    """In a child a module that another thread was importing would stay half made, and whoever wants it would wait."""
    code = (
        "import os, signal, sys, threading, time\nfrom importlib import import_module as module\n"
        "import numpy as np, speedlight as sl\n"
        "steps = {\n"
        "    'speedlight.api': lambda: sl.attention,\n"
        "    'speedlight.cpu.prepare': lambda: sl.attention(*[np.ones((1, 4, 600, 64), np.float32)] * 3),\n"
        "    'speedlight.cpu.storage': lambda: sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=8),\n"
        "    'speedlight.cpu.threads': lambda: module('speedlight.cpu.workers')._new_threads(),\n"
        "    'ml_dtypes': lambda: module('speedlight.arrays').numpy_dtype('bfloat16'),\n"
        "}\n"
        "wanted, found = None, threading.Event()\n"
        "class Slow:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == wanted: found.set(); time.sleep(0.1)\n"
        "sys.meta_path.insert(0, Slow()); sl.set_threads(1)\n"
        "for wanted, step in steps.items():\n"
        "    thread = threading.Thread(target=step); thread.start()\n"
        "    assert found.wait(60), wanted\n"
        "    pid = os.fork()\n"
        "    if not pid: signal.alarm(20); step(); os._exit(0)\n"
        "    thread.join(); found.clear(); print(os.waitpid(pid, 0)[1])\n"
    )
    assert run(code).split() == ["0"] * 5
