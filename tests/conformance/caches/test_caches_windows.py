"""Caches with a window: the bits of the mask, in constant memory; nothing lost when a call fails."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from caches import made
from conftest import FULL
from problems import CODES, numpy_dtype, qkv, taken

import speedlight as sl
from speedlight.cpu.engine.storage import CacheStorage
from speedlight.cpu.memory.records import BLOCK
from speedlight.problem.prepared import Prepared
from speedlight.problem.results import Results
from speedlight.problem.windows import SPARE

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


# of a cache, and of what it is given
KINDS = [(x, taken(x)) for x in ("float32", "int8", "int4", *["bfloat16", "float16", "float8_e4m3fn"] * FULL)]
KINDS += [(x, "bfloat16") for x in ("int8", "int4", *["float8_e4m3fn"] * FULL)]


@pytest.mark.units
@pytest.mark.parametrize(("dtype", "given"), KINDS)
def test_a_window_is_the_mask_in_constant_memory(isa, one_width, rng, dtype, given):
    window, keep, n = 300, 20, 3000
    q, k, v = qkv(rng, given, 2, 4, 2, n, n, 24, 24)
    whole = made(dtype, 24, 24, batch=2, capacity=n)
    want, lse = whole.attend(0, q, k, v, mask=sl.window(window - 1, 0) | sl.prefix(keep), return_lse=True)
    alibi = sl.alibi([0.1, 0.2, 0.3, 0.4])
    for chunks, options in (
        ([n], {}),
        ([1] * 5 + [100, 700, 1, 1, 3] + [200] * 11, {}),
        ([256, 257, 1, 2486], {"score": alibi, "dropout": 0.3, "seed": 5}),
    )[: None if FULL or dtype == "float32" else 2]:
        cache, at = (
            sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=24, dtype=dtype, window=window, keep_first=keep),
            0,
        )
        store = cache._storage.keys[0]
        room = store.memory.nbytes
        if options:
            whole.clear()
            want, lse = whole.attend(
                0, q, k, v, mask=sl.window(window - 1, 0) | sl.prefix(keep), return_lse=True, **options
            )
        for m in chunks:
            here = slice(at, min(n, at + m))
            out, some = cache.attend(0, q[:, :, here], k[:, :, here], v[:, :, here], return_lse=True, **options)
            assert out.tobytes() == want[:, :, here].tobytes() and some.tobytes() == lse[:, :, here].tobytes(), (
                f"{m} tokens at {at}"
            )
            at += m
        assert cache.used_bytes <= 2 * (128 + 640) * cache.token_bytes and room == 2 * 2 * (128 + 640) * store.row
        assert cache.keys(0).shape[2] == keep + window - 1 and cache.copy().keys(0).tobytes() == cache.keys(0).tobytes()


class Broken(Exception):
    pass


def fail(*_, **__):
    raise Broken


@pytest.mark.each("dtype", "keep")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("keep", [0, 20])
def test_a_failing_call_takes_nothing_from_a_ring(one_width, rng, dtype, keep, monkeypatch):
    """New tokens of a ring are written over old ones, to which truncate() could still go back: also by a step that was
    prepared before.
    """
    q, k, v = qkv(rng, taken(dtype), 2, 4, 2, 1700, 1700, 16, 16)
    sizes = {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": 16, "dtype": dtype}
    whole = sl.KVCache(**sizes, capacity=1700)
    mask = sl.window(99, 0) | sl.prefix(keep)
    want = whole.attend(0, q, k, v, mask=mask)
    for n in (1, SPARE, SPARE + 1, 200, 300, 900, SPARE + 1, 200):
        cache = sl.KVCache(**sizes, window=100, keep_first=keep)
        cache.append(0, k[:, :, :750], v[:, :, :750], new_lengths=[750, 730])
        held = cache.keys(0).tobytes()
        with monkeypatch.context() as patch:
            patch.setattr(*((Prepared, "run") if n <= 256 else (Results, "returned")), fail)
            with pytest.raises(Broken):
                cache.attend(0, *(x[:, :, :n] for x in (q, k, v)))
        assert cache.keys(0).tobytes() == held and cache.lengths(0) == (750, 730)
        ring = cache._ring
        first = [
            m - ring.size + SPARE + 99 for m in (750, 730)
        ]  # what the next token sees begins with the oldest that is counted on
        for item in (0, 1):
            with pytest.raises(sl.ArgumentError, match="one whose window is still there"):
                cache.truncate([m - (i == item) for i, m in enumerate(first)])
        cache.truncate(first)
        one = [np.stack([x[i, :, m : m + 1] for i, m in enumerate(first)]) for x in (q, k, v)]
        out = cache.attend(0, *one)
        for i, m in enumerate(first):
            assert out[i].tobytes() == want[i, :, m : m + 1].tobytes(), f"{n} tokens, sequence {i}"


@pytest.mark.parametrize("empty", [lambda cache: cache.clear(), lambda cache: cache.truncate(0)])
def test_an_emptied_ring_is_as_a_new_one(rng, tmp_path, empty):
    """What was written over before counts no more: it can go back, and its file has no more than its tokens."""
    q, k, v = qkv(rng, "float32", 1, 4, 2, 900, 900, 16, 16)
    used, new = (sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=100) for _ in range(2))
    used.append(0, k, v)
    empty(used)
    for cache in (used, new):
        cache.append(0, k[:, :, :50], v[:, :, :50])
        cache.save(tmp_path / f"{cache is new}.safetensors")
        cache.truncate(20)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in (True, False)]
    assert sizes[0] == sizes[1]
    step = [x[:, :, 50:60] for x in (q, k, v)]
    assert used.attend(0, *step).tobytes() == new.attend(0, *step).tobytes()


@pytest.mark.parametrize("keep", [0, 5])
def test_queries_over_a_ring_see_all_that_they_should_or_are_refused(rng, keep):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 900, 900, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=100, keep_first=keep)
    cache.append(0, k, v)
    want = sl.attention(q, k, v, mask=sl.window(99, None) | sl.prefix(keep))
    most = cache._ring.size - SPARE - 99
    for n in (1, 50, most - 1, most):
        assert cache.attend(0, q[:, :, 900 - n :]).tobytes() == want[:, :, 900 - n :].tobytes()
    for n in (
        most + 1,
        most + SPARE + 1,
        700,
        890,
        899,
        900,
    ):  # of few first tokens, too, that stay: they see later ones
        with pytest.raises(sl.ArgumentError, match="q: expected fewer queries"):
            cache.attend(0, q[:, :, 900 - n :])


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4", *["bfloat16", "float8_e4m3fn"] * FULL])
def test_a_chunk_that_fills_a_ring_is_as_its_pieces(one_width, rng, dtype, monkeypatch):
    """The first one is attended to at once, where it lies, and stored as far as the ring still has it."""
    q, k, v = qkv(rng, taken(dtype), 2, 4, 2, 1000, 1000, 16, 16)
    alibi = sl.alibi([0.1, 0.2, 0.3, 0.4])
    same, base = [1000, 1000], {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": 16, "dtype": dtype, "window": 100}
    # of one form: another seed, other strides of out, which is written at once without a score, and another score
    cases = [(0, same, 0, seed) for seed in (5, 7, 6, 8)]
    for first, counts, kept, seed in (*cases, (0, same, 70, 8), (0, [1000, 10], 0, 8), (7, [900, 900], 0, 8)):
        sizes, score = base | {"keep_first": kept}, alibi if seed == 8 else None
        options = {"score": score, "dropout": 0.3, "seed": seed}
        pieces, whole, stored = (sl.KVCache(**sizes) for _ in range(3))
        want = [pieces.attend(0, *(x[:, :, :first] for x in (q, k, v)), **options)] if first else []
        for n in range(0, 1000, 50):
            new = [min(max(count - n, 0), 50) for count in counts]
            some = (x[:, :, first + n : first + n + 50] for x in (q, k, v))
            want += [pieces.attend(0, *some, new_lengths=new, **options)] if any(new) else []
        for cache in (whole, stored) if first else ():
            cache.append(0, k[:, :, :first], v[:, :, :first])
        given = [x[:, :, first : first + max(counts)] for x in (q, k, v)]
        out = np.zeros((2, 4, max(counts), 16 + seed % 2), given[0].dtype)[..., :16]
        with monkeypatch.context() as patch:
            if not first and dtype not in CODES and counts[0] == counts[1]:
                patch.setattr(CacheStorage, "prepare", fail)
            whole.attend(0, *given, out=out, new_lengths=counts, **options)
        stored.append(0, *given[1:], new_lengths=counts)
        assert out.tobytes() == np.concatenate(want, 2)[:, :, first : first + max(counts)].tobytes()
        lengths = tuple([first + count for count in counts])
        held = [pieces._ring.held(n, n) for n in lengths]
        parts = [x.tobytes() for part in pieces._storage.parts(0, held) for x in part]
        for cache in (whole, stored):
            assert cache.lengths(0) == pieces.lengths(0) == lengths
            assert [x.tobytes() for part in cache._storage.parts(0, held) for x in part] == parts


def test_a_first_chunk_is_refused_as_a_short_one(rng):
    """Whatever its length, the errors name the cache: never attention()'s options, nor keys that all of q may share."""
    q, k, v = qkv(rng, "float32", 3, 4, 2, 600, 600, 16, 16)
    cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=16, window=100)
    for wrong in (q, q[:1, :3], q[:1, ..., :5], q[0], q[:1].astype(np.float64)):
        said = []
        for n in (100, 600):
            with pytest.raises(sl.Error, match="^q: .* cache|^q: expected 4 dimensions") as refusal:
                cache.attend(0, wrong[..., :n, :], k[:1, :, :n], v[:1, :, :n])
            said.append(str(refusal.value).replace("600", "100"))
        assert said[0] == said[1]
    assert cache.lengths(0) == (0,)


def test_a_window_stays_small_however_long_the_sequence(rng):
    """One head, whose spans several tasks would share: what they leave for each other does not grow with what was
    forgotten.
    """
    from speedlight.cpu.runtime import launch

    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=16, window=100)
    q, k, v = qkv(rng, "float32", 1, 4, 1, 300, 300, 16, 16)
    cache.attend(0, q, k, v)
    cache._held[0] = [1 << 33], [1 << 33]
    taken = []
    real = launch.take_scratch
    launch.take_scratch = lambda size: taken.append(size) or real(size)
    try:
        out = cache.attend(0, *(x[:, :, :1] for x in (q, k, v)))
    finally:
        launch.take_scratch = real
    assert np.isfinite(out).all() and max(taken) < 80 << 20


def test_no_two_threads_write_to_one_block_of_a_ring(rng, monkeypatch):
    """What comes round to where it began: tokens of one pair would be stored by two threads, and one of them lost."""
    cache = made("bfloat16", 8, 8, window=100, keep_first=3)
    runs = []
    monkeypatch.setattr(
        CacheStorage,
        "_put_of",
        lambda self, k, v, counts: SimpleNamespace(
            size=0, counts=counts, start=lambda addresses, slots: runs.extend(zip(slots, counts, strict=True))
        ),
    )
    first = 133
    for n in (first, 1000):
        _, k, v = qkv(rng, "bfloat16", 1, 4, 2, 1, n, 8, 8)
        cache.append(0, k, v)
    ring, at = cache._ring, first
    for slot, count in runs[1:]:
        blocks = {n // BLOCK: ring.slot(n) // BLOCK for n in range(slot, slot + count)}
        assert slot == at and len(set(blocks.values())) == len(blocks)
        at += count
    assert at == first + 1000


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("seen", [3, 21, 50, 133, 300])
@pytest.mark.parametrize("old", [0, 5, 200])
def test_the_first_key_that_a_mask_shows_lies_anywhere_in_a_block(rng, dtype, seen, old):
    """Panels read whole blocks of a cache, from the block on that has the first key."""
    kind = numpy_dtype(dtype)
    q, k, v = (rng.standard_normal((1, heads, old + 90, 32)).astype(kind) for heads in (4, 2, 2))
    cache, mask = sl.KVCache(layers=1, kv_heads=2, head_dim=32, capacity=512, dtype=dtype), sl.window(seen, 0)
    if old:
        cache.append(0, k[:, :, :old], v[:, :, :old])
    got = cache.attend(0, *(x[:, :, old:] for x in (q, k, v)), mask=mask)
    assert got.tobytes() == sl.attention(q[:, :, old:], k, v, mask=mask, causal=True).tobytes()
