"""Pools of pages: the bits of a cache, whatever the pages; accounts that always add up."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from conftest import FULL
from pools import alone, check_accounts, made, packed
from repeated import forget
from threads import together

import speedlight as sl
from speedlight import kv
from speedlight.cpu.engine import append_call as putting
from speedlight.cpu.engine import forward_call as prepare
from speedlight.cpu.engine import storage
from speedlight.cpu.runtime import launch


def test_a_mask_knows_a_sequence_by_its_place(rng):
    pool = made()
    sequences = [pool.sequence() for _ in range(3)]
    q, k, v = packed(rng, "float32", 60)
    ids = sl.table(np.array([5, 9, 40]), "ends")
    out = pool.attend(0, sequences, q, k, v, new_lengths=[1, 50, 9], mask=lambda b, h, i, j: j < ids[b])
    want = alone("float32", 16, 17, [(q[1:51], k[1:51], v[1:51])], mask=lambda b, h, i, j: j < 9)[0]
    assert out[1:51].tobytes() == want.tobytes()


def test_forks_share_until_one_writes(rng):
    pool = made(layers=2, pages=6)
    a = pool.sequence()
    q, k, v = packed(rng, "float32", 40)
    for layer in (0, 1):
        pool.append(layer, [a], k, v)
    b = a.fork()
    assert a.pages == b.pages and pool.free_pages == 3 and pool.used_bytes == 3 * pool.page_bytes
    pool.attend(0, [b], q[:1], k[:1], v[:1])
    assert a.pages[:2] == b.pages[:2] and a.pages[2] != b.pages[2] and pool.free_pages == 2
    assert a.keys(1).tobytes() == b.keys(1).tobytes() == k.swapaxes(0, 1).tobytes()  # the copy has all layers
    assert a.length(0) == 40 and b.length(0) == 41 and b.length(1) == 40
    a.free()
    assert pool.free_pages == 3 and "freed" in repr(a)
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"):
        pool.attend(0, [a], q[:1])
    c = pool.sequence()  # has the place of the freed one; the old handle still means nothing
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"):
        a.length()
    assert c.length() == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_failing_batch_takes_nothing_from_those_who_share(rng, order, monkeypatch):
    """The longer one gets a copy; the shorter may not write to what it left, which is the longer's again when the call
    fails.
    """
    pool = made()
    _, k, v = packed(rng, "float32", 14)
    longer = pool.sequence()
    pool.append(0, [longer], k[:14], v[:14])
    shorter = longer.fork()
    shorter.truncate(3)
    both = [longer, shorter]
    new = packed(rng, "float32", 4)
    free, held = pool.free_pages, [(s.keys(0).tobytes(), s.values(0).tobytes()) for s in both]

    def fail(*_, **__):
        raise sl.CompileError("no")

    with monkeypatch.context() as patch:
        patch.setattr(pool._storage, "attend", fail)
        with pytest.raises(sl.CompileError):
            pool.attend(0, [both[n] for n in order], *new, new_lengths=[2, 2])
    assert [(s.keys(0).tobytes(), s.values(0).tobytes()) for s in both] == held and pool.free_pages == free
    check_accounts(pool, both)
    pool.append(0, [both[n] for n in order], *new[1:], new_lengths=[2, 2])
    check_accounts(pool, both)
    assert longer.keys(0)[:, :14].tobytes() == k[:14].swapaxes(0, 1).tobytes() and shorter.length() == 5


def test_the_last_page_can_be_used_and_one_more_is_refused(rng):
    pool = made(pages=4)
    a, b = pool.sequence(), pool.sequence()
    q, k, v = packed(rng, "float32", 49)
    pool.append(0, [a, b], k[:48], v[:48], new_lengths=[31, 17])
    with pytest.raises(sl.CacheFull, match="layer 0: 1 pages are needed, 0 of 4 are free") as caught:
        pool.attend(0, [a, b], q[:17], k[:17], v[:17], new_lengths=[2, 15])
    assert (caught.value.needed, caught.value.free) == (1, 0)
    assert (a.length(), b.length()) == (31, 17) and a.keys(0).tobytes() == k[:31].swapaxes(0, 1).tobytes()
    pool.attend(0, [a, b], q[:16], k[:16], v[:16], new_lengths=[1, 15])
    assert (a.length(), b.length(), pool.free_pages) == (32, 32, 0)
    twins = made(pages=2)
    first = twins.sequence()
    twins.append(0, [first], k[:8], v[:8])
    second = first.fork()
    twins.attend(0, [first, second], q[:2], k[:2], v[:2])  # one takes the free page, the other keeps the shared one
    assert twins.free_pages == 0
    first.free()
    third = second.fork()
    del second  # of which nobody has counted anything yet: who is alone needs no page to write to
    twins.append(0, [third], k[:8], v[:8])
    assert twins.free_pages == 0 and third.length() == 17


def test_one_writer_of_a_sequence_at_a_time(rng):
    pool = made()
    a, b = pool.sequence(), pool.sequence()
    q, k, v = packed(rng, "float32", 5)
    pool._claims.add(a._number)
    with pytest.raises(sl.CacheBusy, match="another thread is writing"):
        pool.append(0, [b, a], k, v, new_lengths=[2, 3])
    pool.append(0, [b], k, v)
    pool._claims.clear()
    assert (a.length(), b.length()) == (0, 5)

    def work(n: int) -> None:
        """Sequences of their own, in one pool."""
        for _ in range(20):
            mine = pool.sequence()
            pool.attend(0, [mine], *(x.repeat(n, 0) for x in (q, k, v)))
            assert mine.keys(0).tobytes() == k.repeat(n, 0).swapaxes(0, 1).tobytes()
            mine.free()

    together(work, (1, 3, 9))
    assert pool.free_pages == 59


def test_accounts_are_exact_whatever_threads_do(rng):
    """Forks of one sequence in several threads, switched as often as can be: pages are shared, copied, let go, and run
    out.
    """
    pool = made(pages=40)
    base = pool.sequence()
    _, k, v = packed(rng, "float32", 40)
    pool.append(0, [base], k, v)
    left = []

    def work(seed: int) -> None:
        mine, held = np.random.default_rng(seed), []
        for _ in range(20_000 if FULL else 1500):
            what = mine.integers(5)
            try:
                if what == 0 or not held:
                    held.append(base.fork())
                elif what == 1:
                    held.pop().free()
                elif what == 2:
                    held[-1].truncate(int(mine.integers(held[-1].length() + 1)))
                else:
                    n = int(mine.integers(1, 30))
                    pool.append(0, held[-1:], k[:n], v[:n], new_lengths=[n])
            except sl.CacheFull as error:
                assert error.needed > error.free
            except sl.CacheBusy:  # base, which another thread forks
                pass
        left.extend(held)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        together(work, range(4))
    finally:
        sys.setswitchinterval(interval)
    check_accounts(pool, [base, *left])
    assert base.keys(0).tobytes() == k.swapaxes(0, 1).tobytes()
    [x.free() for x in (base, *left)]
    assert pool.free_pages == 40


def test_pages_return_when_nobody_has_a_sequence(rng):
    pool = made(pages=6)
    _, k, v = packed(rng, "float32", 40)
    a, empty = pool.sequence(), pool.sequence()
    pool.append(0, [a], k, v)
    b = a.fork()
    assert pool.free_pages == 3
    del a
    assert b.keys(0).tobytes() == k.swapaxes(0, 1).tobytes()  # b has them still
    kept = b.pages
    pool.append(0, [b], k[:1], v[:1])  # alone, it writes where it is
    assert pool.free_pages == 3 and b.pages == kept
    loop = [b]
    loop.append(loop)  # which only the garbage collector finds
    del b, loop
    gc.collect()
    assert pool.free_pages == 6 and pool._journal.records.keys() == {empty._number}
    check_accounts(pool, [empty])
    for _ in range(5):
        pool.append(0, [pool.sequence()], k, v)  # each of which finds what the one before it had
    assert len(pool._journal.records) <= 3 and pool.free_pages == 6


def test_a_step_costs_the_same_whatever_the_pages():
    """Operations of Python, and memory: a list or a table of all pages would show in the one or the other."""
    room = str(Path(kv.__file__).parent)
    operations, peaks = [], []

    def count(frame, event, _):
        if not frame.f_code.co_filename.startswith(room):
            return None
        frame.f_trace_opcodes = True
        operations[-1] += event == "opcode"
        return count

    for pages in (20, 20, 100_000):  # first of all, what is made once
        pool = sl.PagePool(layers=1, pages=pages, page_size=16, kv_heads=1, head_dim=1)
        a, x = pool.sequence(), np.ones((16 * (pages - 10), 1, 1), np.float32)
        pool.append(0, [a], x, x)
        fork = a.fork()
        fork.free()
        for _ in range(33):  # takes pages, which makes room for more in lists and tables
            pool.append(0, [a], x[:1], x[:1])
        operations.append(0)
        tracing = sys.gettrace()
        tracemalloc.start()
        sys.settrace(count)
        try:
            for _ in range(32):
                pool.append(0, [a], x[:1], x[:1])
        finally:
            sys.settrace(tracing)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert a.length() == 16 * (pages - 10) + 65 and len(a.pages) == pages - 5 and pool.free_pages == 5
    assert len({*operations[1:]}) == 1 and operations[1] > 32 * 100, operations
    assert max(peaks[1:]) < 20_000, peaks


def test_a_block_frees_its_sequence(rng):
    pool = made(pages=6)
    _, k, v = packed(rng, "float32", 40)
    with contextlib.suppress(ZeroDivisionError), pool.sequence() as a, a.fork() as b:
        pool.append(0, [a, b], k, v, new_lengths=[20, 20])
        assert pool.free_pages == 2
        b.free()  # before its block ends
        raise ZeroDivisionError
    assert pool.free_pages == 6 and "freed" in repr(a) and "freed" in repr(b)
    with pytest.raises(sl.ArgumentError, match="this sequence was freed"), a:
        pass


def test_a_sequence_may_go_anywhere_at_any_moment(rng):
    """In the thread that takes pages, while it has the lock; and in others. Never twice, never while it is in use."""
    pool = made(pages=400)
    _, k, v = packed(rng, "float32", 40)
    held = [pool.sequence() for _ in range(100)]
    for sequence in held:
        pool.append(0, [sequence], k[:17], v[:17])
    del sequence
    with pool._journal.lock:
        for _ in range(50):
            held.pop()
    kept, go = held[:10], threading.Barrier(3)
    del held[:10]
    halves = [held[:20], held[20:]]
    held.clear()

    def drop(mine):
        go.wait()
        while mine:
            del mine[-1]
            assert pool.free_pages <= 380

    threads = [threading.Thread(target=drop, args=(x,)) for x in halves]
    for thread in threads:
        thread.start()
    go.wait()
    for n in range(200):
        pool.append(0, [kept[n % 10]], k[:1], v[:1])
        pool.sequence().fork()
    for thread in threads:
        thread.join()
    check_accounts(pool, kept)
    assert {s.length() for s in kept} == {37} and pool.free_pages == 400 - 10 * 3


def test_nothing_is_lost_when_everything_ends():
    """Pools and sequences of an interpreter that exits, and of threads in it."""
    script = (
        "import threading, numpy as np, speedlight as sl\n"
        "pool = sl.PagePool(layers=1, pages=9, page_size=16, kv_heads=1, head_dim=8)\n"
        "x = np.ones((20, 1, 8), np.float32)\n"
        "a = pool.sequence(); pool.append(0, [a], x, x)\n"
        "threading.Thread(target=lambda b=a.fork(): b.length()).start()\n"
        "loop = [a]; loop.append(loop)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


class _Failing:
    """NumPy, whose n-th allocation fails."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __getattr__(self, name):
        found = getattr(np, name)
        if name not in ("empty", "zeros", "array", "arange", "concatenate", "where", "rint", "clip", "full", "ones"):
            return found

        def function(*args, **options):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no memory (in a test)")
            return found(*args, **options)

        return function


@pytest.mark.each("dtype", "kind")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", ["cache", "ring", "pool"])
def test_any_allocation_may_fail(rng, dtype, kind, monkeypatch):
    """The n-th, for every n: a MemoryError each time, nothing changed, and the next call is right."""
    d = 16
    q, k, v = packed(rng, dtype, 340, d, d)
    if kind == "pool":
        pool = made(dtype, d, d)
        first = pool.sequence()
        pool.append(0, [first], k[:24], v[:24])
        owner = first.fork()

        def call(n):
            return pool.attend(0, [owner], q[:n], k[:n], v[:n])

        def state():
            others = tuple(pool._journal.others.values())
            return owner.keys(0).tobytes(), owner.values(0).tobytes(), owner.pages, pool.free_pages, others
    else:
        cache = sl.KVCache(
            layers=1, kv_heads=2, head_dim=d, dtype=dtype, **({"window": 40} if kind == "ring" else {"capacity": 900})
        )
        cache.append(0, *(x[None, :24].swapaxes(1, 2) for x in (k, v)))

        def call(n):
            return cache.attend(0, *(x[None, :n].swapaxes(1, 2) for x in (q, k, v)))

        def state():
            return cache.keys(0).tobytes(), cache.values(0).tobytes(), cache.lengths(0)

    for n in (1, 340):
        before, failures = state(), 0
        for at in range(1, 400):
            with monkeypatch.context() as patch:
                failing = _Failing(at)
                for module in (putting, storage, prepare, launch):
                    patch.setattr(module, "np", failing)
                forget()
                try:
                    out = call(n)
                except MemoryError:
                    failures += 1
                else:
                    break
            assert state() == before, f"allocation {at}"
        assert failures > 2 and failing.left > 0 and state() != before
        assert np.isfinite(out.astype(np.float32)).all()


def test_as_many_tokens_of_other_sequences_are_another_step(rng):
    """Three of one sequence, then one of each of three: the arrays are alike."""
    pools = [sl.PagePool(layers=1, pages=12, page_size=16, kv_heads=2, head_dim=16) for _ in range(2)]
    (first, *others), (alone, *rest) = ([pool.sequence() for _ in range(3)] for pool in pools)
    x = rng.standard_normal((3, 2, 16), np.float32)
    for _ in range(3):
        pools[0].attend(0, [first], x, x, x)
        pools[1].append(0, [alone], x, x)
    forget()
    want = pools[1].attend(0, [alone, *rest], x, x, x)
    forget()
    for _ in range(2):
        pools[0].attend(0, [first], x, x, x)
    first.truncate(9)
    assert pools[0].attend(0, [first, *others], x, x, x).tobytes() == want.tobytes()
