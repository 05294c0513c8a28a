"""New tokens in a cache's and a pool's blocks: every bit of theirs, wherever they come from and go to."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch
from conftest import FULL
from pools import kept_calls
from problems import CODES, DTYPES, decoded, numpy_dtype, quantise
from repeated import forget

import speedlight as sl
from speedlight.arrays import dtypes
from speedlight.cpu.engine import append_call as putting
from speedlight.cpu.memory.records import REPEAT
from speedlight.cpu.runtime.launch import Launch
from speedlight.cpu.runtime.repeating import functions
from speedlight.host.machine import current_isa

SIZES = ((33, 80), (16, 17), (5, 1))  # of keys and values: odd, of a vector, below one
COUNTS = (1, 14, 1, 16, 3, 14, 45, 32, 1, 700)  # of new tokens: blocks are whole, begun, ended; several threads


def lying(x, way):
    """The same numbers, of four dimensions, lying in one of three ways, or a tensor's."""
    if way == "heads adjoin":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if way == "tokens adjoin":
        return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)
    if way == "torch":
        whole = torch.from_numpy(np.ascontiguousarray(x).view(np.uint16 if x.itemsize == 2 else x.dtype))
        return whole.view(getattr(torch, x.dtype.name))
    return x


@pytest.mark.units("dtype")
@pytest.mark.parametrize("way", ["heads adjoin", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_keep_every_bit(isa, rng, dtype, way):
    check_bits(rng, dtype, way)


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_may_lie_apart(rng, dtype):
    check_bits(rng, dtype, "tokens adjoin")


def check_bits(rng, dtype, way, sizes=SIZES):
    """Signs of zeros and payloads of NaN among them; in a cache, and in pages out of order. Returns the last cache."""
    sl.set_threads(2)
    for d, dv in sizes:
        size = numpy_dtype(dtype).itemsize
        bits = [rng.integers(0, 256, (2, 2, sum(COUNTS), n * size), np.uint8) for n in (d, dv)]
        k, v = (x.view(numpy_dtype(dtype)) for x in bits)
        cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=d, value_dim=dv, capacity=2000, dtype=dtype)
        sizes = {"pages": 100, "page_size": 32, "kv_heads": 2, "head_dim": d, "value_dim": dv}
        pool = sl.PagePool(layers=1, **sizes, dtype=dtype)
        sequences = [pool.sequence(), pool.sequence()]
        for at, n in zip(itertools.accumulate(COUNTS, initial=0), COUNTS, strict=False):
            new = [lying(x[:, :, at : at + n], way) for x in (k, v)]
            cache.append(0, *new)
            for item, sequence in enumerate(sequences):
                pool.append(0, [sequence], *(x[item].swapaxes(0, 1) for x in new), new_lengths=[n])
        assert cache.keys(0).tobytes() == k.tobytes() and cache.values(0).tobytes() == v.tobytes()
        for item, sequence in enumerate(sequences):
            assert sequence.keys(0).tobytes() == k[item].tobytes()
            assert sequence.values(0).tobytes() == v[item].tobytes()
    return cache


def half_way(codes):
    """Between two neighbours, all of them."""
    bits = np.arange(256, dtype=np.uint8) if codes != "int4" else np.arange(16, dtype=np.uint8)
    every = bits.view(numpy_dtype(codes)).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    return (every[1:] + every[:-1]) / 2


GIVEN = ["float32", "float16", "bfloat16"]


@pytest.mark.units("codes", "dtype")
@pytest.mark.parametrize(
    ("codes", "dtype"),
    [(x, dtype) for x in CODES for dtype in (GIVEN[:1] if x == "float8_e4m3fn" and not FULL else GIVEN)],
)
def test_codes_and_scales_are_those_of_the_rule(isa, rng, codes, dtype):
    check_codes(rng, codes, dtype, "side by side")


@pytest.mark.parametrize("codes", CODES)
def test_codes_of_elements_that_lie_apart(rng, codes):
    check_codes(rng, codes, "float16", "tokens adjoin")


def check_codes(rng, codes, dtype, way):
    """What is half way between two codes, rows of zeros, subnormals, of NaN and infinity."""
    sl.set_threads(2)
    for d, dv in SIZES:
        k, v = (rng.standard_normal((2, 2, sum(COUNTS), n)).astype(np.float32) for n in (d, dv))
        for x in (k, v):
            x *= 10.0 ** rng.integers(-44, 37, (*x.shape[:3], 1)) if dtype != "float16" else 1
            x[0, 0, ::7] = rng.choice(half_way(codes), x[0, 0, ::7].shape)
            x[0, 0, ::7, :: dtypes.CODES[codes].block or x.shape[3]] = np.float32(dtypes.CODES[codes].largest)
            x[0, 1, ::5, 0], x[1, 0, ::6, -1], x[1, 1, ::9, 0] = np.nan, np.inf, -np.inf
            x[1, 1, 1::9], x[1, 1, 2::9] = -0.0, 1e-44
            x[1, 1, 3::9] = rng.choice([-1, 1], x[1, 1, 3::9].shape)  # of equal sizes the first counts
        with np.errstate(over="ignore"):
            k, v = (x.astype(numpy_dtype(dtype)) for x in (k, v))
        cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=d, value_dim=dv, capacity=2000, dtype=codes)
        for at, n in zip(itertools.accumulate(COUNTS, initial=0), COUNTS, strict=False):
            cache.append(0, *(lying(x[:, :, at : at + n], way) for x in (k, v)))
        for x, stored in zip((k, v), cache._storage.parts(0, [sum(COUNTS)] * 2), strict=True):
            for got, want in zip(stored, quantise(x, codes), strict=True):
                assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize(
    ("dtype", "sizes", "past"),
    [*((x, (64, 128), True) for x in DTYPES), ("float32", (64, 65), False), ("float32", (65, 64), False)],
)
def test_stores_past_the_caches_are_like_others(rng, monkeypatch, dtype, sizes, past):
    """As of prompts of 8 MiB; rows that end within a cache line go through the caches."""
    monkeypatch.setattr(putting, "_STREAM_BYTES", 0)
    forget()
    cache = check_bits(rng, dtype, "side by side", [sizes])
    assert ways_of(cache) == {past and current_isa().arch == "x86_64"}


def ways_of(cache):
    """Whether tokens went past the caches."""
    return {x.launch.shape.streams for x in kept_calls(cache) if isinstance(x, putting.AppendCall)}


@pytest.mark.parametrize("dim", range(1, 71))
def test_four_bits_of_any_size(rng, dim):
    """Keys and values of every number of elements, in chunks, in a cache, in a ring, and in pages of any size."""
    d, dv, size = dim, 71 - dim, 16 * int(rng.integers(1, 4))
    k, v = (rng.standard_normal((2, 2, 90, n)).astype(np.float32) for n in (d, dv))
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": d, "value_dim": dv, "dtype": "int4"}
    cache = sl.KVCache(**sizes, batch=2, capacity=100)
    ring = sl.KVCache(**sizes, batch=2, window=20, keep_first=3)
    pool = sl.PagePool(**sizes, pages=20, page_size=size)
    sequences, at = [pool.sequence(), pool.sequence()], 0
    while at < 90:
        n = min(int(rng.choice([1, 1, 2, 5, 15, 16, 40])), 90 - at)
        new = [x[:, :, at : at + n] for x in (k, v)]
        cache.append(0, *new)
        ring.append(0, *new)
        pool.append(0, sequences, *(np.concatenate([*x.swapaxes(1, 2)]) for x in new), new_lengths=[n, n])
        at += n
    rows = -(-d // 2) + -(-dv // 2) + 2 * (-(-d // 32) + -(-dv // 32))
    assert cache.token_bytes == 2 * rows
    for x, part in ((k, "keys"), (v, "values")):
        want = decoded(x, "int4")
        assert getattr(cache, part)(0).tobytes() == want.tobytes()
        assert getattr(ring, part)(0).tobytes() == want[:, :, ring._ring.shown(90)].tobytes()
        for item, sequence in enumerate(sequences):
            assert getattr(sequence, part)(0).tobytes() == want[item].tobytes()


@pytest.mark.parametrize("codes", CODES)
def test_codes_past_the_caches_are_like_others(rng, monkeypatch, codes):
    k, v = (rng.standard_normal((1, 2, sum(COUNTS), d)).astype(np.float32) for d in (64, 128))
    found = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(putting, "_STREAM_BYTES", least)
        forget()
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=64, value_dim=128, capacity=900, dtype=codes)
        cache.append(0, k, v)
        found.append([x.tobytes() for both in cache._storage.parts(0, [sum(COUNTS)]) for x in both])
        assert ways_of(cache) == {least == 0 and current_isa().arch == "x86_64"}
    assert found[0] == found[1]


def test_a_step_stores_its_own_tokens(rng, monkeypatch):
    """The tasks that read a head store what is new of it; where several share its spans, a region of its own does."""
    regions = []
    run = Launch.run
    monkeypatch.setattr(Launch, "run", lambda self, *given: (regions.append(self.shape.kind), run(self, *given))[1])
    here, repeat = functions(), functions().run

    def run_again(address, *given):
        result = repeat(address, *given)
        stores = ctypes.c_int64.from_address(address + REPEAT.offset("put_kernel")).value
        if result is not None and stores:
            regions.append("append")
        return result

    monkeypatch.setattr(here, "run", repeat and run_again)
    forget()
    sl.set_threads(2)
    for length, alone in ((40, 0), (9000, 1)):
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=64, capacity=9100)
        k, v, q = (rng.standard_normal((1, 2, length + 3, 64)).astype(np.float32) for _ in range(3))
        cache.append(0, k[:, :, :length], v[:, :, :length])
        for at in range(length, length + 3):
            regions.clear()
            got = cache.attend(0, *(x[:, :, at : at + 1] for x in (q, k, v)))
            exact = sl.attention(q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1])
            assert got.tobytes() == exact.tobytes()
            assert regions.count("append") == (1 if at == length else alone)  # the first step is no repeated one


def test_tasks_of_several_heads_store_their_own(rng):
    """Some of the heads each, in steps of a batch of short sequences."""
    sl.set_threads(2)
    cache = sl.KVCache(layers=1, batch=4, kv_heads=8, head_dim=16, capacity=43)
    q, k, v = (rng.standard_normal((4, 8, 43, 16)).astype(np.float32) for _ in range(3))
    cache.append(0, k[:, :, :40], v[:, :, :40])
    for at in range(40, 43):
        cache.attend(0, *(x[:, :, at : at + 1] for x in (q, k, v)))
    assert cache.keys(0).tobytes() == k.tobytes() and cache.values(0).tobytes() == v.tobytes()


@pytest.mark.parametrize("dtype", ["float32", *CODES])
def test_heads_in_step_say_what_each_says_alone(rng, dtype):
    """Of short sequences, in one task, by one row or a few; longer ones go head by head."""
    sl.set_threads(1)
    for heads, group, n in ((8, 1, 1), (3, 3, 17), (5, 2, 128), (6, 1, 129), (2, 4, 40)):
        q, k, v = (rng.standard_normal((1, x, n, 64)).astype(np.float32) for x in (heads * group, heads, heads))
        caches = [sl.KVCache(layers=1, kv_heads=x, head_dim=64, capacity=n, dtype=dtype) for x in (heads, 1)]
        caches[0].append(0, k, v)
        got = caches[0].attend(0, q[:, :, -1:])
        for head in range(heads):
            caches[1].clear()
            caches[1].append(0, *(x[:, head : head + 1] for x in (k, v)))
            mine = slice(head * group, (head + 1) * group)
            assert got[:, mine].tobytes() == caches[1].attend(0, q[:, mine, -1:]).tobytes()


def test_a_ring_keeps_the_last_tokens_of_long_chunks(rng):
    """Longer ones than go round once; by several threads."""
    sl.set_threads(2)
    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=33, value_dim=40, window=70, keep_first=5)
    k, v = (rng.standard_normal((2, 2, 6000, d), dtype=np.float32) for d in (33, 40))
    for first, last in ((0, 3), (3, 700), (700, 701), (701, 6000)):
        cache.append(0, k[:, :, first:last], v[:, :, first:last])
        shown = cache._ring.shown(last)
        assert cache.keys(0).tobytes() == k[:, :, shown].tobytes()
        assert cache.values(0).tobytes() == v[:, :, shown].tobytes()


def test_tokens_of_another_byte_order_are_refused(rng):
    x = rng.standard_normal((1, 1, 3, 16)).astype(np.float32)
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, capacity=32)
    pool = sl.PagePool(layers=1, kv_heads=1, head_dim=16, pages=4, page_size=16)
    sequence = pool.sequence()
    for append in (
        lambda y: cache.append(0, y, x),
        lambda y: pool.append(0, [sequence], y[0, 0][:, None], x[0, 0][:, None]),
    ):
        with pytest.raises(sl.ArgumentTypeError, match="k: expected native byte order; got >f4"):
            append(x.astype(">f4"))
    assert cache.length(0) == sequence.length() == 0
