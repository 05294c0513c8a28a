"""Forks (R14): a child computes, whatever its parent's threads were at."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from conftest import FULL
from threads import BIG, run

import speedlight as sl


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
    children = [context.Process(target=_child, args=(x, queue)) for _ in range(8 if FULL else 2)]
    for c in children:
        c.start()
    assert all(queue.get(timeout=120) == want for _ in children)
    for c in children:
        c.join(30)
        assert c.exitcode == 0


def _errors() -> list[sl.Error]:
    """One of every class, with a number for each parameter beside the message."""
    kinds, found = [sl.Error], []
    for kind in kinds:
        kinds += [x for x in kind.__subclasses__() if x.__module__.startswith("speedlight")]
        more = list(inspect.signature(kind).parameters)[1:] if "__init__" in vars(kind) else []
        found.append(kind("what was expected", *range(3, 3 + len(more))))
    return found


def _overflow(room: int) -> None:
    x = np.zeros((1, 1, room + 1, 4), np.float32)
    sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=room).append(0, x, x)


@pytest.mark.parametrize("error", _errors(), ids=lambda error: type(error).__name__)
def test_every_error_comes_back_from_a_pickle_and_a_copy(error):
    error.note = "a caller's own"
    ways = [lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
    for again in [way(error) for way in (*ways, copy.copy, copy.deepcopy)]:
        assert again is not error and type(again) is type(error) and str(again) == str(error)
        assert again.args == error.args and vars(again) == vars(error)


def test_a_pools_worker_may_raise_any_error():
    """One that cannot be unpickled would keep the parent waiting for ever."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        with pytest.raises(sl.CacheFull, match="16") as caught:
            pool.apply_async(_overflow, (16,)).get(60)
        assert (caught.value.needed, caught.value.free) == (17, 16)


ATTENDING = BIG + "sl.set_threads(2)\ndef call(): return sl.attention(q, q, q).tobytes()\n"
GRADIENTS = """x = q[:, :2, :500, :16].copy()
out, lse = sl.attention(x, x, x, return_lse=True)
sl.set_threads(3)
def call(): return b"".join(y.tobytes() for y in sl.attention_backward(x, x, x, out, lse, x))
"""
ROOFS = """from speedlight.cpu.runtime import compile, roof
roof.bandwidth = lambda *_: 1e9
plan = sl.plan(q_heads=1, q_len=8, head_dim=8)
def call():
    with compile.lock: roof._known.clear(); roof._kernels.cache_clear()
    plan.measured()
"""
TRACING = """x = np.ones((1, 1, 8, 4), np.float32)
def call(): return sl.attention(x, x, x, mask=lambda b, h, i, j: i >= j).tobytes()
"""
BUSY = {  # what another thread of the parent is at, and how many children there are
    "regions": ("import torch\n" + ATTENDING, 50 if FULL else 5),
    **({"regions, no torch": (ATTENDING, 50)} if FULL else {}),
    "tasks that wait for others": (BIG + GRADIENTS, 50 if FULL else 8),
    "roofs, under LLVM's lock": (BIG + ROOFS, 100 if FULL else 4),
    "masks that are traced": (BIG + TRACING, 400 if FULL else 8),
}
FORKS = """
import os, signal, threading, time, warnings
warnings.simplefilter("ignore")
want, stop, ended = call(), [], 0
def busy():
    while not stop: call()
def right(): return workers._region == [None] and call() == want
thread = threading.Thread(target=busy)
thread.start()
for n in range(COUNT):
    time.sleep(0.001 * (n % 3))
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        good, inner = right(), os.fork()
        if not inner:
            signal.alarm(20)
            os._exit(not right())
        os._exit(not good or os.waitpid(inner, 0)[1] != 0)
    ended += os.waitpid(pid, 0)[1] == 0
stop.append(1)
thread.join()
print(ended)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("what", BUSY)
def test_forks_while_another_thread_is_busy(what):
    """Children and grandchildren compute: no lock is theirs that a thread holds which they do not have."""
    code, count = BUSY[what]
    environment = {"SPEEDLIGHT_CACHE": "0"} if what.startswith("roofs") else {}
    assert int(run(code + FORKS.replace("COUNT", str(count)), **environment)) == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_waits_for_what_is_being_imported():
    """In a child a module that another thread was importing would stay half made, and whoever wants it would wait."""
    code = (
        "import os, signal, sys, threading, time\nfrom importlib import import_module as module\n"
        "import numpy as np, speedlight as sl\n"
        "steps = {\n"
        "    'speedlight.front': lambda: sl.attention,\n"
        "    'speedlight.cpu.engine.forward_call': lambda: sl.attention(*[np.ones((1, 4, 600, 64), np.float32)] * 3),\n"
        "    'speedlight.cpu.engine.storage': lambda: sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=8),\n"
        "    'speedlight.cpu.runtime.threads': lambda: module('speedlight.cpu.runtime.workers')._new_threads(),\n"
        "    'ml_dtypes': lambda: module('speedlight.arrays.dtypes').numpy_dtype('bfloat16'),\n"
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


WARMED = """
import os, signal, sys, torch, warnings
warnings.simplefilter("ignore")
sl.set_threads(2)
x = q.reshape(-1)
def tensors(): return [torch.from_numpy(q.copy()) for _ in range(3)]
def gradients():
    given = [y.requires_grad_() for y in tensors()]
    torch.autograd.grad(sl.attention(*given, causal=True), given, torch.from_numpy(q.copy()))
def backward():
    out, lse = sl.attention(q, q, q, return_lse=True)
    sl.attention_backward(q, q, q, out, lse, q)
def cache(new=lambda: (q,) * 3):
    kept, (a, b, c) = sl.KVCache(layers=1, kv_heads=4, head_dim=64, capacity=1024), new()
    kept.append(0, b, c)
    kept.attend(0, a)
def sums():
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        torch.from_numpy(x).sum()  # on a team of this thread
        os._exit(0)
    return os.waitpid(pid, 0)[1]
def turns():
    for _ in range(3): torch.from_numpy(x).sum(); sl.attention(q, q, q)
warmings = {
    "nothing": lambda: None,
    "attention": lambda: sl.attention(q, q, q),
    "gradients": backward,
    "cache": cache,
    "plan": lambda: sl.plan(q_heads=1, q_len=8, head_dim=8).measured(),
    "threads": lambda: (sl.set_threads(3), sl.attention(q, q, q)),
    "tensors": lambda: [sl.attention(*tensors()) for _ in range(3)],
    "a cache of tensors": lambda: cache(tensors),
    "gradients of tensors": gradients,
    "PyTorch and attention": turns,
    "a small call beside PyTorch": lambda: (torch.from_numpy(x).sum(), sl.attention(*[y[:, :, :8] for y in tensors()])),
}
for name, warm in warmings.items():
    warm()
    if sums(): sys.exit(name)  # the next would wait, too
pid = os.fork()
if not pid:
    torch.from_numpy(x).sum()
    os._exit(sums())  # in a grandchild
if os.waitpid(pid, 0)[1]: sys.exit("grandchild")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_pytorch_computes_in_a_child_after_a_warm_up():
    """A child of GNU OpenMP's would wait for ever for the team of its parent's thread."""
    pytest.importorskip("torch")
    run(BIG + WARMED)


ENDED = """
import os, sys, torch, warnings
from speedlight.cpu.runtime import workers
warnings.simplefilter("ignore")
sl.set_threads(2)
def warm():
    torch.from_numpy(q.reshape(-1)).sum()
    out = sl.attention(q, q, q)
    return out.tobytes(), getattr(workers._calling, "clock", 0)
want, clock = warm()
openmp = workers._usable_openmp()
if openmp is None or openmp.pause is None: sys.exit()
if not clock: sys.exit("no team")
pid = os.fork()
if not pid: os._exit(0)
os.waitpid(pid, 0)
if getattr(workers._calling, "clock", 0): sys.exit("a team that has ended is taken for one that is there")
if warm()[0] != want: sys.exit("other bits")
if not getattr(workers._calling, "clock", 0): sys.exit("no new team")
"""


TEAMS = """from speedlight.cpu.memory.records import TEAM
sl.set_threads(2)
def team():
    address = workers.team_address(2)
    words = (ctypes.c_int64 * len(TEAM.names)).from_address(address) if address else None
    return words and words[TEAM.word("threads")], workers._ours and workers._ours.addresses()[1]
for turn in range(2):
    told, own = team()
    if told != own: sys.exit(f"threads {told}, expected {own}")
if os.fork() == 0:
    told, own = team()
    os._exit(told != own)
if os.wait()[1]: sys.exit("a child runs on its parent's threads")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_childs_calls_run_on_threads_of_its_own():
    run("import ctypes, os, sys\n" + BIG + TEAMS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_team_that_a_fork_has_ended_is_forgotten():
    """Machine code repeats calls on the team that it knows, and regions count on as many threads."""
    pytest.importorskip("torch")
    run(BIG + ENDED)
