"""Key-value caches: the bits of one call over everything, whatever was done in between; nothing lost when a call
fails.
"""

from __future__ import annotations

import copy
import gc
import mmap
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caches import made
from conftest import FULL
from pools import check_accounts
from problems import CODES, DTYPES, Pack, numpy_dtype, qkv, taken
from repeated import forget
from threads import together

import speedlight as sl
from speedlight.arrays.array import describe
from speedlight.host import machine

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_decode_kernel_has_the_forward_kernels_bits(isa, one_width, rng, dtype, monkeypatch):
    """Every dim, length, group and thread count, with special values in keys and values. A short run has one mask or
    score for each dtype, on the best unit.
    """
    from speedlight.cpu.engine import schedule

    for case in range(200 if FULL else 15):
        batch, kv_heads, group, n = (int(rng.integers(1, m)) for m in (3, 4, 6, 4))
        length = int(rng.choice([0, 1, 2, 15, 16, 17, 127, 128, 129, 300, 1023, 1024, 1025, 2500]))
        d, dv = int(rng.choice([1, 3, 16, 33, 64, 80, 128])), int(rng.choice([16, 17, 31, 64, 80, 128]))
        q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, n, length, d, dv, float(rng.choice([0.1, 1, 30])))
        if case % 3 == 0 and length > 2:
            for x in (k, v):
                x[rng.random(x.shape) < 0.5 / length] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        options = {"causal": bool(case % 2), "scale": [None, -0.3, 0.0][int(rng.integers(3))], "return_lse": True}
        options |= {"sink_logits": rng.standard_normal(kv_heads * group)} if case % 5 == 0 else {}
        slopes = rng.random(kv_heads * group)
        more: list[dict[str, Any]] = [
            {"mask": sl.window(int(rng.integers(1, 1500)), 0) | sl.prefix(int(rng.integers(40)))},
            {"score": [sl.softcap(3.0), sl.alibi(slopes)]},
            {"mask": rng.random((batch, 1, n, length) if FULL else length) < 0.7, "score": sl.alibi(slopes)},
            {"mask": sl.window(700, 0) | sl.prefix(9), "dropout": 0.4, "seed": case},
        ]
        others = more if FULL else [more[DTYPES.index(dtype)]] * 3 * (isa == machine.host_isas()[0].name)
        options |= [{}, *others][case % (1 + len(others))]
        results = []
        for rows, threads in ((0, 1), (64, 1), (64, 2)):
            monkeypatch.setattr(schedule, "DECODE_ROWS", rows)
            forget()
            sl.set_threads(threads)
            results.append(sl.attention(q, k, v, **options))
            kernel = sl.plan(q, k, v, causal=options["causal"]).kernel
            assert length == 0 or kernel.startswith("decode" if rows else "forward")
        (want, lse), *others = results
        for out, other in others:
            nan = np.isnan(want)
            assert (np.isnan(out) == nan).all() and (np.isnan(other) == np.isnan(lse)).all()
            assert (
                out[~nan].tobytes() == want[~nan].tobytes()
                and other[~np.isnan(lse)].tobytes() == lse[~np.isnan(lse)].tobytes()
            )


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32", "bfloat16"])
def test_what_a_truncated_cache_still_holds_is_never_read(isa, rng, dtype):
    """Also not the other half of an odd last pair, in either kernel."""
    q, k, v = qkv(rng, dtype, 1, 4, 2, 40, 300, 16, 16)
    for length in (1, 5, 127, 128, 255):
        fresh, used = made(dtype), made(dtype)
        poisoned = [x.copy() for x in (k, v)]
        for x in poisoned:
            x[:, :, length:] = np.nan
        used.append(0, *poisoned)
        used.truncate(length)
        fresh.append(0, k[:, :, :length], v[:, :, :length])
        for n in (1, 40):
            assert used.attend(0, q[:, :, :n]).tobytes() == fresh.attend(0, q[:, :, :n]).tobytes()


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_of_minus_infinity_hides_its_value_when_decoding(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 2, 300, 16, 16)
    q[..., 0] = np.abs(q[..., 0]) + 1
    k[:, :, 77, 0], v[:, :, 77] = -np.inf, np.nan
    seen = np.arange(300) != 77
    want = sl.reference.attention(q, k[:, :, seen], v[:, :, seen])
    cache = made(dtype)
    cache.append(0, k, v)
    for out in (sl.attention(q, k, v), cache.attend(0, q)):
        assert np.abs(out.astype(np.float64) - want).max() < 0.02


def test_few_heads_share_their_spans(isa, rng):
    """One kv head: several tasks, merged in order by the last."""
    for dtype in DTYPES:
        q, k, v = qkv(rng, dtype, 1, 4, 1, 1, 9000, 64, 64)
        sl.set_threads(2)
        assert sl.plan(q, k, v).threads == 2
        results = []
        for threads in (1, 2, 3, 8):
            sl.set_threads(threads)
            results += [sl.attention(q, k, v, causal=True).tobytes() for _ in range(5)]
        assert len(set(results)) == 1


def test_a_full_cache_says_so_and_keeps_what_it_has(rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 10, 10, 16, 16)
    cache = made("float32", batch=2, capacity=12)
    cache.attend(0, q, k, v)
    before = cache.keys(0).tobytes(), cache.lengths(0)
    with pytest.raises(sl.CacheFull, match="10 tokens need room, 2 of 12 are free") as caught:
        cache.attend(0, q, k, v)
    assert (caught.value.needed, caught.value.free) == (10, 2) and isinstance(caught.value, MemoryError)
    with pytest.raises(sl.CacheFull):
        cache.append(0, k, v, new_lengths=[0, 3])
    assert (cache.keys(0).tobytes(), cache.lengths(0)) == before
    cache.append(0, k, v, new_lengths=[2, 2])  # the last place can be used
    assert cache.lengths(0) == (12, 12)
    with pytest.raises(sl.CacheFull, match="larger capacity, or leave capacity out: a window's memory does not grow"):
        made("float32", batch=2, capacity=9, window=4).attend(0, q, k, v)


def test_one_appender_at_a_time(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 300, 300, 16, 16)
    cache = made("float32", layers=2)
    cache.append(1, k, v)
    cache._claims.add(0)
    with pytest.raises(sl.CacheBusy, match="layer 0: another thread"):
        cache.append(0, k, v)
    with pytest.raises(sl.CacheBusy):
        cache.clear()
    cache.attend(1, q)  # another layer, and reading, go on
    cache._claims.clear()
    assert cache.lengths(0) == (0,) and cache.lengths(1) == (300,)
    want = cache.attend(1, q).tobytes()

    def read(_: int) -> None:
        assert all([cache.attend(1, q).tobytes() == want for _ in range(50)])

    together(read, range(4))


def through_torch(x):
    return pytest.importorskip("torch").from_numpy(x.copy())


def through_dlpack(x):
    return Pack(x.copy())


@pytest.mark.parametrize("made", [through_torch, through_dlpack])
def test_arrays_that_nobody_else_holds(rng, made):
    """An argument may be the only reference: its memory must stay until it is stored."""
    x = rng.standard_normal((1, 2, 2000, 64), dtype=np.float32)
    tokens = np.ascontiguousarray(x[0].swapaxes(0, 1))
    want = np.asarray(sl.attention(x[:, :, -1:], x, x)).tobytes()
    sizes = {"layers": 2, "kv_heads": 2, "head_dim": 64}
    for _ in range(3):
        cache, pool = sl.KVCache(capacity=2000, **sizes), sl.PagePool(pages=130, page_size=32, **sizes)
        sequence = pool.sequence()
        cache.append(0, made(x), made(x))
        pool.append(0, [sequence], made(tokens), made(tokens))
        cache.attend(1, made(x[:, :, -1:]), made(x), made(x), q_lengths=[1])
        pool.attend(1, [sequence], made(tokens[-1:]), made(tokens), made(tokens), q_lengths=[1])
        for layer in range(2):
            assert cache.keys(layer).tobytes() == cache.values(layer).tobytes() == x.tobytes()
            assert pool.attend(layer, [sequence], tokens[-1:]).tobytes() == want


@pytest.mark.parametrize("made", [through_torch, through_dlpack])
def test_a_view_keeps_its_memory(rng, made):
    x = rng.standard_normal((3, 4))
    given = made(x)
    alive, view = weakref.ref(given), describe(given, "x").numpy()
    del given
    assert alive() is not None and view.tobytes() == x.tobytes()
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("dtype", [*DTYPES, *CODES] if FULL else ["bfloat16", "int8", "int4"])
def test_a_copy_may_use_another_vector_unit(rng, monkeypatch, dtype):
    """Tokens lie alike for all of them."""
    q, k, v = qkv(rng, "float64" if dtype == "float64" else "float32", 2, 4, 2, 20, 20, 17, 19)
    units = [unit.name for unit in machine.host_isas()]
    monkeypatch.setenv("SPEEDLIGHT_ISA", units[0])
    cache = made(dtype, 17, 19, batch=2)
    cache.append(0, *(x.astype(numpy_dtype(taken(dtype))) for x in (k, v)))
    for name in units:
        monkeypatch.setenv("SPEEDLIGHT_ISA", name)
        other = cache.select([1, 0])
        assert other.attend(0, q[::-1]).tobytes() == cache.attend(0, q)[::-1].tobytes()
        assert other._storage.isa.name == name


def test_copies_are_independent_and_pickles_are_refused(rng):
    """By Python's own ways: each has memory of its own, or it is told which call does it."""
    _, k, v = qkv(rng, "float32", 1, 4, 2, 20, 20, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=64)
    pool = sl.PagePool(layers=1, pages=8, page_size=16, kv_heads=2, head_dim=16)
    sequence, rows = pool.sequence(), [x[0].swapaxes(0, 1) for x in (k, v)]
    cache.append(0, k, v)
    pool.append(0, [sequence], *rows)
    for way in (copy.copy, copy.deepcopy):
        other, fork = way(cache), way(sequence)
        other.append(0, v, k)
        pool.append(0, [fork], *rows)
        assert (other.length(0), fork.length()) == (40, 40) and (cache.length(0), sequence.length()) == (20, 20)
        assert cache.keys(0).tobytes() == sequence.keys(0).tobytes() == k.tobytes()
        both = way([cache, cache]) if way is copy.deepcopy else [other, other]
        assert both[0] is both[1] is not cache
        with pytest.raises(
            sl.UnsupportedError, match="^PagePool: expected neither pickle nor the copy module; its seq"
        ):
            way(pool)
    del fork
    for x, told in ((cache, r"KVCache: .* save\(\) it"), (pool, "PagePool: "), (sequence, r"PagedSequence: .* fork\(")):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(sl.UnsupportedError, match=f"^{told}"):
                pickle.dumps(x, protocol)
    check_accounts(pool, [sequence])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_short_sequences_take_little_memory(rng):
    """16 of 2,048 tokens; on pages of MiB each cache would take 8 MiB."""

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def filled():
        cache = sl.KVCache(layers=1, batch=1, kv_heads=8, head_dim=64, capacity=2048)
        cache.append(0, k, k)
        return cache

    k = rng.standard_normal((1, 8, 16, 64), dtype=np.float32)
    filled()
    before = resident()
    caches = [filled() for _ in range(8)]
    assert resident() - before < 8 << 20 and caches[7].length(0) == 16
