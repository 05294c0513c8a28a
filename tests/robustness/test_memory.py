"""No byte too many: arrays between unreadable pages (R08), full and exact writes (R09), offsets above 2^31 elements
(R11).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import tracemalloc

import numpy as np
import pytest
from coded_pages import FORMATS, LARGEST, codes_of
from conftest import FULL
from guarded import Guarded, libc
from problems import CODES, DTYPES, numpy_dtype, taken

import speedlight as sl
from speedlight.cpu.memory import blocks
from speedlight.cpu.runtime import launch
from speedlight.host.machine import host_isas

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="mmap and mprotect")


@pytest.fixture(scope="module")
def guarded() -> list[Guarded]:
    return [Guarded(1 << 20) for _ in range(4)]


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages(engine, guarded, dtype):
    """Inputs sealed read-only, guards on both sides, every tail of every dim and length: a fault kills the process."""
    rng = np.random.default_rng(7)
    kind = numpy_dtype(dtype)
    for _ in range(2000 if FULL else 100):
        d, dv = int(rng.integers(1, 131)), int(rng.integers(1, 131))
        q_len, k_len, group = int(rng.integers(1, 60)), int(rng.integers(1, 258)), int(rng.integers(1, 3))
        side = str(rng.choice(["over", "under"]))
        shapes = ((1, group, q_len, d), (1, 1, k_len, d), (1, 1, k_len, dv), (1, group, q_len, dv))
        for g in guarded:
            g.unlock()
        q, k, v, out = (g.array(s, kind, side) for g, s in zip(guarded, shapes, strict=True))
        for x in (q, k, v):
            x[...] = rng.standard_normal(x.shape, dtype=np.float32).astype(kind)
        for g in guarded[:3]:
            g.seal()
        whole = np.ndarray(guarded[3].size, np.uint8, (ctypes.c_char * guarded[3].size).from_address(guarded[3].base))
        whole[:] = 0xFF  # a NaN payload in every type
        sl.attention(q, k, v, causal=bool(rng.integers(2)), q_start=k_len, out=out)
        assert not np.isnan(out.astype(np.float32)).any()
        outside = whole[: -out.nbytes] if side == "over" else whole[out.nbytes :]
        assert (outside == 0xFF).all()


@pytest.mark.units
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_guard_pages_of_tables(isa, one_width, guarded, dtype):
    """Dense arrays and tables between guards: rows that are read many keys at once end where they end. A short run has
    arrays that broadcast for one dtype each, and tables on the best unit.
    """
    rng = np.random.default_rng(8)
    kind = numpy_dtype(dtype)
    for _ in range(1000 if FULL else 16):
        least = 1 if FULL else 2  # an axis of one broadcasts: another kernel
        q_len, k_len, heads = (int(rng.integers(least, most)) for most in (100, 258, 3))
        side = str(rng.choice(["over", "under"]))
        stored = (
            rng.choice(["float32", "float16", "float64"])
            if FULL
            else {2: "float16", 4: "float32", 8: "float64"}[kind.itemsize]
        )
        for g in guarded:
            g.unlock()
        one = rng.integers(2, size=2) if FULL else {2: (1, 0), 4: (0, 0), 8: (0, 1)}[kind.itemsize]
        mask = guarded[0].array((1, 1 if one[0] else heads, q_len, k_len), np.dtype(bool), side)
        bias = guarded[1].array((1 if one[1] else q_len, k_len), np.dtype(stored), side)
        ids = guarded[2].array((max(q_len, k_len),), np.dtype(np.int64), side)
        mask[...], bias[...] = rng.random(mask.shape) < rng.choice([0.02, 0.5, 0.98]), rng.standard_normal(bias.shape)
        ids[...] = np.sort(rng.integers(0, 5, ids.shape))
        for g in guarded[:3]:
            g.seal()
        q, k, v = (rng.standard_normal((1, heads, n, 16)).astype(kind) for n in (q_len, k_len, k_len))
        sl.attention(q, k, v, mask=mask, score=bias)
        if FULL or isa == host_isas()[0].name:
            of = sl.Table(ids, "ids", copy=False)
            sl.attention(q, k, v, q_start=0, mask=lambda b, h, i, j, of=of: of[i] == of[j])


def ending_memory(guarded):
    """Instead of pages of our own: memory that ends where a guard begins."""
    memory = iter(guarded)

    def pages(size: int, *, large: bool = False) -> ctypes.Array:
        g = next(memory)
        g.unlock()
        ctypes.memset(g.base, 0, g.size)
        return (ctypes.c_char * size).from_address(g.base + g.size - size)

    return pages


def queries_over(rng, dtype, q):
    """Queries over a cache of this dtype: over codes half of them are bfloat16, whose kernels are others."""
    return q.astype(numpy_dtype("bfloat16")) if dtype in CODES and rng.random() < 0.5 else q


@pytest.mark.units
@pytest.mark.each("dtype", "window")
@pytest.mark.parametrize("dtype", [*DTYPES, *CODES])
@pytest.mark.parametrize("window", [False, True])
def test_guard_pages_of_caches(isa, one_width, guarded, dtype, window, monkeypatch):
    """A cache that ends where memory ends, at every length."""
    rng = np.random.default_rng(9)
    kind = numpy_dtype(taken(dtype))
    for _ in range(200 if FULL else 12):
        d, dv, capacity = int(rng.integers(1, 131)), int(rng.integers(1, 131)), int(rng.integers(1, 300))
        ring = {"window": int(rng.integers(1, 100)), "keep_first": int(rng.integers(40))} if window else {}
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "pages", ending_memory(guarded))
            cache = sl.KVCache(
                layers=1, kv_heads=1, head_dim=d, value_dim=dv, capacity=capacity + 700 * window, dtype=dtype, **ring
            )
        while cache.length(0) < cache.capacity:
            n = min(cache.capacity - cache.length(0), int(rng.choice([1, 1, 2, 16, 40, 260])))
            q, k, v = (rng.standard_normal((1, h, n, x)).astype(kind) for h, x in ((2, d), (1, d), (1, dv)))
            assert np.isfinite(cache.attend(0, queries_over(rng, dtype, q), k, v).astype(np.float32)).all()


@pytest.mark.units
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [*DTYPES, "int8", "float8_e4m3fn"])
def test_guard_pages_of_latents(isa, one_width, guarded, dtype, monkeypatch):
    """Of latents, whose codes have numbers beside them, at every length."""
    rng = np.random.default_rng(13)
    kind = numpy_dtype(taken(dtype))
    for _ in range(200 if FULL else 12):
        dv, capacity = int(rng.integers(1, 270)), int(rng.integers(1, 300))
        d = dv + int(rng.integers(40))
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "pages", ending_memory(guarded))
            sizes = {"kv_heads": 1, "head_dim": d, "value_dim": dv, "capacity": capacity}
            cache = sl.KVCache(layers=1, latent=True, dtype=dtype, **sizes)
        while cache.length(0) < cache.capacity:
            n = min(cache.capacity - cache.length(0), int(rng.choice([1, 1, 2, 16, 40, 260])))
            q, k = (rng.standard_normal((1, h, n, d)).astype(kind) for h in (4, 1))
            assert np.isfinite(cache.attend(0, queries_over(rng, dtype, q), k).astype(np.float32)).all()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", [*DTYPES, *CODES])
def test_guard_pages_of_pools(isa, one_width, guarded, dtype, monkeypatch):
    """The last page of a pool ends where memory ends, and is anywhere in a sequence."""
    rng = np.random.default_rng(10)
    kind = numpy_dtype(taken(dtype))
    for _ in range(200 if FULL else 12):
        d, dv, size = int(rng.integers(1, 131)), int(rng.integers(1, 131)), 16 * int(rng.integers(1, 5))
        with monkeypatch.context() as patched:
            patched.setattr(blocks, "pages", ending_memory(guarded))
            pool = sl.PagePool(layers=1, pages=6, page_size=size, kv_heads=1, head_dim=d, value_dim=dv, dtype=dtype)
        rng.shuffle(pool._journal.free)
        sequences = [pool.sequence(), pool.sequence()]
        while pool.free_pages > 1:
            counts = [int(rng.integers(0, 1 + size // int(rng.integers(1, 9)))) for _ in sequences]
            q, k, v = (rng.standard_normal((sum(counts), h, x)).astype(kind) for h, x in ((2, d), (1, d), (1, dv)))
            q = queries_over(rng, dtype, q)
            assert np.isfinite(pool.attend(0, sequences, q, k, v, new_lengths=counts).astype(np.float32)).all()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages_of_raw_pages(isa, guarded, dtype):
    """Arrays of pages between guards; pages of any size, in any order, sealed."""
    rng = np.random.default_rng(11)
    kind = numpy_dtype(dtype)
    for _ in range(1500 if FULL else 100):
        d, dv, size, count = (int(rng.integers(1, n)) for n in (131, 131, 34, 40))
        side, length, n = (
            str(rng.choice(["over", "under"])),
            int(rng.integers(0, count * size + 1)),
            int(rng.choice([1, 2, 30])),
        )
        for g in guarded:
            g.unlock()
        k, v = (g.array((count, size, 1, x), kind, side) for g, x in zip(guarded, (d, dv), strict=False))
        for x, g in ((k, guarded[0]), (v, guarded[1])):
            x[...] = rng.standard_normal(x.shape, dtype=np.float32).astype(kind)
            g.seal()
        q = rng.standard_normal((1, 2, n, d)).astype(kind)
        table = rng.permutation(count)[None]
        out = sl.attention_paged(q, k, v, table, [length], causal=True)
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", FORMATS)
def test_guard_pages_of_raw_pages_of_codes(isa, guarded, dtype):
    """Pages of codes and their scales between guards: nothing else is written, and all is sealed when it is read."""
    rng, kind = np.random.default_rng(12), numpy_dtype(dtype)
    for _ in range(1500 if FULL else 100):
        d, dv, size, count = (int(rng.integers(1, n)) for n in (131, 131, 34, 40))
        side, shares = str(rng.choice(["over", "under"])), str(rng.choice(["all", "heads", "tokens"]))
        length, n = int(rng.integers(0, count * size + 1)), int(rng.choice([1, 2, 30]))
        for g in guarded:
            g.unlock()
        k, v = (g.array((count, size, 1, x), kind, side) for g, x in zip(guarded, (d, dv), strict=False))
        of_scales = {"all": (), "heads": (1,), "tokens": (count, size, 1)}[shares]
        scales = [g.array(of_scales, np.dtype(np.float32), side) for g in guarded[2:]]
        for x in (k, v):
            x[...] = codes_of(rng, dtype, x.shape)
        for x in scales:
            x[...] = 1 / LARGEST[dtype]
        before, table = [x.copy() for x in (k, v, *scales)], rng.permutation(count)[None]
        new = [rng.standard_normal((1, 1, count * size - length, x)).astype(np.float32) for x in (d, dv)]
        both = {"k_scales": scales[0], "v_scales": scales[1]}
        sl.append_paged(k, v, table, [length], *new, **both)
        old = np.arange(count * size)[:length]
        for x, y in zip((k, v, *scales), before, strict=True):
            kept = (table[0, old // size], old % size) if x.ndim > 2 else ...
            assert x[kept].tobytes() == y[kept].tobytes()
        for g in guarded:
            g.seal()
        q = rng.standard_normal((1, 2, n, d)).astype(numpy_dtype(str(rng.choice(["float32", "bfloat16"]))))
        out = sl.attention_paged(q, k, v, table, [count * size], causal=True, **both)
        assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.each("dtype", "q_len", "options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [77, 3])
@pytest.mark.parametrize("options", [{"q_start": 20}, {"dropout": 0.2, "seed": 8}])
def test_scratch_contents_do_not_matter(isa, rng, rubbish, dtype, q_len, options):
    q, k, v = (rng.standard_normal((1, 2, n, 33)).astype(numpy_dtype(dtype)) for n in (q_len, 77, 77))
    kinds = (dtype,) if dtype == "float64" else (dtype, *CODES)
    caches = [sl.KVCache(layers=1, kv_heads=2, head_dim=33, capacity=77, dtype=x) for x in kinds]
    for cache in caches:
        cache.append(0, k, v)
    results, stored = set(), set()
    for _ in rubbish(launch):
        results.add(sl.attention(q, k, v, causal=True, **options).tobytes())
        stored.add(b"".join(cache.attend(0, q).tobytes() for cache in caches))
    assert len(results) == len(stored) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 40])
def test_scratch_contents_do_not_matter_to_chosen_keys(isa, rng, rubbish, dtype, heads):
    """In pages, where what is fetched ahead is looked up in a table, too: each kind of kernel."""
    q = rng.standard_normal((2, heads, 3, 33)).astype(numpy_dtype(dtype))
    pages = rng.standard_normal((40, 7, 1, 33)).astype(q.dtype)
    table, indices = rng.permutation(40).reshape(2, 20), rng.integers(-1, 130, (2, 3, 25))
    results = set()
    for _ in rubbish(launch):
        results.add(sl.attention_paged(q, pages, pages, table, [140, 130], indices=indices).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offsets_above_two_to_the_31(dtype):
    """Rows 2^31 elements apart on memory that is never touched in between."""
    kind, apart = numpy_dtype(dtype), (1 << 31) + 64
    size = kind.itemsize * (3 * apart + 64)
    base = libc.mmap(None, size, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)  # MAP_NORESERVE
    buffer = (ctypes.c_char * size).from_address(base)
    rng = np.random.default_rng(0)
    x = np.ndarray((1, 1, 4, 16), kind, buffer, 0, (0, 0, apart * kind.itemsize, kind.itemsize))
    x[...] = rng.standard_normal((1, 1, 4, 16)).astype(kind)
    small = x.copy()
    assert sl.attention(x, x, x).tobytes() == sl.attention(small, small, small).tobytes()
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(size))


def test_memory_stays_small():
    """One head of 65,536 keys: the scratch and what Python allocates stay below 8 MB."""
    n = 65536
    q = np.ones((1, 1, 64, 64), np.float32)
    k = np.ones((1, 1, n, 64), np.float32)
    sl.attention(q, k, k)
    tracemalloc.start()
    sl.attention(q, k, k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert sl.plan(q_heads=1, q_len=n, head_dim=64).workspace_bytes < 8 << 20
