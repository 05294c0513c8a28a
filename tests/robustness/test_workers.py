"""Threads: concurrent callers (R13), the caller's floating-point modes, living with torch; where there is no thread or
no memory to be had.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import pytest
from conftest import FULL
from problems import qkv
from repeated import forget
from threads import BIG, run, together, use

import speedlight as sl
from speedlight.cpu.runtime import workers


def test_importing_is_light():
    heavy = ("torch", "triton", "llvmlite", "matplotlib", "rich", "typer")
    code = f"import sys, speedlight\nprint([m for m in {heavy} if m in sys.modules])"
    assert run(code).strip() == "[]"


def test_concurrent_callers(rng):
    shapes = [(1, 2, 33, 64), (2, 4, 200, 32), (1, 1, 700, 80), (1, 8, 96, 128)]
    inputs = [qkv(rng, "float32", b, h, h, n, n, d, d) for b, h, n, d in shapes]
    sl.set_threads(2)
    want = [sl.attention(*x, causal=True).tobytes() for x in inputs]

    def work(i: int) -> None:
        for turn in range(5):
            at = (i + turn) % len(inputs)
            assert sl.attention(*inputs[at], causal=True).tobytes() == want[at]

    together(work, range(200 if FULL else 40))


@pytest.mark.parametrize("way", ["helpers", "threads", "openmp"])
def test_a_call_ends_when_its_last_task_has(rng, monkeypatch, way):
    """Three tasks for two threads: who finds none left waits for the other."""
    use(monkeypatch, way)
    q, k, v = qkv(rng, "float32", 1, 3, 3, 32, 20_000, 64, 64)
    sl.set_threads(2)
    out = sl.attention(q, k, v)
    want = out.tobytes()
    for _ in range(30):
        out.fill(0)
        assert sl.attention(q, k, v, out=out).tobytes() == want


def test_first_compilations_race():
    code = BIG + (
        "import threading\nouts = []\n"
        "ts = [threading.Thread(target=lambda: outs.append(sl.attention(q, q, q).tobytes())) for _ in range(16)]\n"
        "[t.start() for t in ts]\n[t.join() for t in ts]\nprint(len(outs), len(set(outs)))"
    )
    assert run(code, SPEEDLIGHT_CACHE="0").split() == ["16", "1"]


def test_openmp_is_shared_once_torch_is_there():
    code = (
        BIG
        + "from speedlight.cpu.runtime import workers\nprint(workers.runtime())\nimport torch\nprint(workers.runtime())"
    )
    before, after = run(code).split()
    assert before == "pool"
    assert after == ("openmp" if sys.platform == "linux" else "pool")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SPEEDLIGHT_ISA", "mmx"),
        ("SPEEDLIGHT_ISA", "neon"),
        ("SPEEDLIGHT_THREADS", "many"),
        ("SPEEDLIGHT_THREADS", "0"),
    ],
)
def test_environment_variables_are_checked(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    workers._in_use.known = workers._in_use.known._replace(until=0.0)  # a second has passed
    with pytest.raises(sl.Error, match=f"^{name}: "):
        sl.attention(*[np.ones((1, 1, 4, 8), np.float32)] * 3)


def test_no_more_threads_than_cpus(monkeypatch):
    """Threads that share a CPU wait for each other in the middle of tasks: they are neither planned for nor woken."""
    monkeypatch.setattr(workers, "_limit", lambda: 2)
    sl.set_threads(64)
    assert sl.get_threads() == 2 and sl.plan(q_heads=8, q_len=4096, head_dim=64).threads == 2
    sl.set_threads(1)
    assert sl.get_threads() == 1
    sl.set_threads(None)
    monkeypatch.setenv("SPEEDLIGHT_THREADS", "64")
    workers._in_use.known = workers._in_use.known._replace(until=0.0)
    assert sl.get_threads() == 2


@pytest.mark.skipif(
    len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()) < 2, reason="needs two CPUs and Linux"
)
@pytest.mark.parametrize("bound", [False, True])
def test_cpus_are_counted_again(bound):
    """`taskset` and programs move threads while they run, where ours follow: other threads, such as a library's that
    nobody moved, say nothing. Where OpenMP binds threads, others may go elsewhere.
    """
    code = """import os, threading, speedlight as sl
from speedlight.cpu.runtime import workers
def count():
    workers._in_use.known = workers._in_use.known._replace(until=0.0)  # a second has passed
    return sl.get_threads()
every = os.sched_getaffinity(0)
some, gate, counts = set(sorted(every)[:2]), threading.Event(), []
os.sched_setaffinity(0, some)
other = threading.Thread(target=lambda: (gate.wait(), counts.append(sl.get_threads())))
other.start()
print(count())
os.sched_setaffinity(0, {min(some)})  # the main thread is bound, the other is not
print(count())
if os.environ.get("OMP_PROC_BIND"):
    os.sched_setaffinity(other.native_id, {min(some)})
print(count())
sl.set_threads(64)
print(sl.get_threads())
gate.set()
other.join()
print(*counts)
"""
    if bound:
        assert run(code, OMP_PROC_BIND="true").split() == ["2", "2", "1", "1", "1"]
    else:
        assert run(code).split() == ["2", "1", "1", "1", "2"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
@pytest.mark.parametrize("with_torch", [False, True] if FULL else [False])
def test_no_thread_can_be_started(with_torch):
    """There is no room for so many stacks: GNU OpenMP would end the process. Some may be there, of threads that loaded
    code and have ended.

    Right results, one warning, and threads once there is room.
    """
    code = (
        ("import torch\n" if with_torch else "")
        + BIG
        + (
            "import resource, warnings\nfrom speedlight.cpu.runtime import workers\n"
            "sl.set_threads(1)\nwant = sl.attention(q, q, q).tobytes()\nsl.set_threads(4)\n"
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
    assert run(code).split() == ["True", "1", "1", "3", "True", "[None]"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_no_memory_for_scratch_is_a_memory_error(rng, monkeypatch):
    from speedlight.cpu.runtime import launch

    def full(size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    q, k, v = qkv(rng, "float32", 1, 2, 2, 20, 30, 16, 16)
    want = sl.attention(q, k, v).tobytes()
    launch._scratches.clear()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "pages", full)
        forget()  # machine code takes memory of its own
        with pytest.raises(MemoryError, match="bytes of scratch cannot be reserved"):
            sl.attention(q, k, v)
    assert sl.attention(q, k, v).tobytes() == want


@pytest.mark.parametrize("way", ["helpers", "threads"])
def test_no_memory_anywhere_in_a_run(way):
    """At each allocation of Python's own: MemoryError, nobody inside, the next call right. In a process of its own: a
    thread of anybody else's, as the one that talks to pytest's workers, would end it.
    """
    pytest.importorskip("_testcapi")
    code = "import pytest, test_workers\nwith pytest.MonkeyPatch.context() as patch:\n"
    run(f"{code}    test_workers.fail_at_each_allocation(patch, {way!r})", PYTHONPATH=os.pathsep.join(sys.path))


def fail_at_each_allocation(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """What test_no_memory_anywhere_in_a_run() is about."""
    import _testcapi as testing

    from speedlight.cpu.engine.forward_call import Call

    use(monkeypatch, way)
    monkeypatch.setattr(
        sys, "unraisablehook", lambda _: None
    )  # a helper may be the one who has none; it is started anew
    q, k, v = qkv(np.random.default_rng(0), "float32", 1, 2, 2, 128, 128, 64, 64)
    out = np.empty_like(q)
    sl.set_threads(3)
    calls = []
    forget()
    with monkeypatch.context() as patch:
        patch.setattr(Call, "run", lambda *given, **_: calls.append(given))
        sl.attention(q, k, v, out=out)
    run_of, (prepared, *addresses) = Call.run, calls[0]
    forget()
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
