"""Caches whose sequences begin with the tokens of another: the bits of caches that have copies."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from conftest import FULL
from pools import KINDS
from problems import numpy_dtype, taken

import speedlight as sl
from speedlight.cpu.engine import cascade
from speedlight.host.machine import host_isas

OPTIONS = {
    "plain": {},
    "window": {"mask": sl.window(300, 0)},
    "prefix": {"mask": sl.prefix(5)},
    "alibi": {"score": sl.alibi([2.0**-n for n in range(8)])},
    "sinks": {"sink_logits": [0.5] * 8},
    "dropout": {"dropout": 0.2, "seed": 7},
    "sequence": {"mask": lambda b, h, i, j: j > b * 20},
}


class Twins:
    """A cache that begins with a prefix, and one that has copies of its tokens."""

    def __init__(self, rng, kind, tokens, *, batch=3, kv_heads=2, group=4, d=32, dv=32, capacity=3000, latent=False):
        self.rng, self.kind, self.heads, self.dims, self.latent = rng, kind, (kv_heads, group), (d, dv), latent
        sizes = {"layers": 2, "kv_heads": kv_heads, "head_dim": d, "value_dim": dv, "dtype": kind, "latent": latent}
        self.prefix = sl.KVCache(capacity=tokens + 50, **sizes)
        for layer in (0, 1):
            self.prefix.append(layer, *self.tokens(1, tokens))
        self.shared = sl.KVCache.from_prefix(self.prefix, batch, capacity=capacity)
        self.apart = sl.KVCache(batch=batch, capacity=capacity, **sizes)
        copies = self.prefix.select([0] * batch)
        copies._storage.copy_to(self.apart._storage, list(range(batch)), [[tokens] * batch] * 2)
        self.apart._held = copies._held
        self.batch = batch

    def drawn(self, *shape):
        return self.rng.standard_normal(shape).astype(numpy_dtype(taken(self.kind)))

    def tokens(self, batch, count):
        k, v = (self.drawn(batch, self.heads[0], count, dim) for dim in self.dims)
        return k, None if self.latent else v

    def check(self, count, layer=0, *, new=True, **options):
        """Compares a step of so many tokens, or queries alone."""
        kv_heads, group = self.heads
        q, given = self.drawn(self.batch, kv_heads * group, count, self.dims[0]), self.tokens(self.batch, count)
        given = given if new else ()
        got, want = (x.attend(layer, q, *given, return_lse=True, **options) for x in (self.shared, self.apart))
        for a, b in zip(got, want, strict=True):
            assert a.tobytes() == b.tobytes()

    def check_contents(self):
        for layer in (0, 1):
            assert self.shared.lengths(layer) == self.apart.lengths(layer)
            for part in ("keys", "values"):
                a, b = (getattr(x, part)(layer) for x in (self.shared, self.apart))
                assert a.tobytes() == b.tobytes()


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Counts the runs in stages."""
    seen, run = [], cascade.Together.run
    monkeypatch.setattr(cascade.Together, "run", lambda self, *args: seen.append(self) or run(self, *args))
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_bits_of_copies(rng, isa, kind, option, runs):
    if not FULL and (isa != host_isas()[0].name or option not in ("plain", "dropout")) and kind != "bfloat16":
        pytest.skip("a short run has bfloat16 alone on other units, and of most options")
    twins = Twins(rng, kind, 1200)  # a span, a tile, and 48 tokens that are copied
    for count in (1, 1, 3, 40):
        twins.check(count, **OPTIONS[option])
    twins.check(2, new=False, **OPTIONS[option])
    twins.check_contents()
    assert len(runs) == 5


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_latents(rng, kind, runs):
    twins = Twins(rng, kind, 700, kv_heads=1, group=16, d=72, dv=64, latent=True)
    for count in (1, 1, 5):
        twins.check(count)
    twins.check_contents()
    assert runs


def test_a_long_chunk_comes_in_pieces(rng, runs):
    twins = Twins(rng, "float32", 300)
    twins.check(600)
    assert len(runs) == 3
    twins.check(1)
    assert twins.shared.lengths(0) == twins.apart.lengths(0) == (901, 901, 901)


def test_tokens_are_held_once(rng):
    twins = Twins(rng, "float32", 1200)
    assert twins.apart.used_bytes == 2 * 3 * 1200 * twins.apart.token_bytes
    assert twins.shared.used_bytes == 2 * 3 * (1200 - 1152) * twins.shared.token_bytes


def test_a_short_prefix_is_copied(rng, runs):
    twins = Twins(rng, "float32", 100)
    twins.check(1)
    assert not runs and twins.shared.used_bytes == twins.apart.used_bytes
    sl.KVCache.from_prefix(sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=9), 2)


def test_everything_that_caches_do(rng, tmp_path, runs):
    twins = Twins(rng, "float32", 600)
    twins.check(30)
    for x in (twins.shared, twins.apart):
        x.append(1, *(np.ones((3, 2, 30, 32), np.float32),) * 2)
        x.keep([0, 2, 5], start=610)
        x.truncate(612)
    twins.check_contents()
    twins.check(1)
    for x in (twins.shared, twins.apart):
        x.append(1, *(np.ones((3, 2, 1, 32), np.float32),) * 2)
    twins.shared.save(tmp_path / "shared.safetensors")
    loaded = sl.KVCache.load(tmp_path / "shared.safetensors")
    for other in (loaded, twins.shared.copy(), twins.shared.select([2, 0])):
        assert other.used_bytes == other.token_bytes * sum(map(sum, (other.lengths(0), other.lengths(1))))
        assert other.keys(0)[-1].tobytes() == twins.apart.keys(0)[0 if other.batch == 2 else 2].tobytes()
    assert runs


@pytest.mark.parametrize("length", [0, 100, 500])
def test_a_change_of_the_prefix_makes_its_tokens_its_own(rng, runs, length):
    twins = Twins(rng, "float32", 600)
    twins.check(3)
    for x in (twins.shared, twins.apart):
        x.append(1, *(np.ones((3, 2, 3, 32), np.float32),) * 2)
        x.truncate(length)
    twins.check_contents()
    for layer in (0, 1):
        twins.check(5, layer)
    twins.check_contents()
    assert len(runs) == 1
    twins.prefix.clear()  # nobody reads it any more


@pytest.mark.parametrize("counts", [[3, 1, 2], [0, 3, 0], [0, 0, 0]], ids=str)
def test_sequences_of_different_lengths(rng, runs, counts):
    twins = Twins(rng, "float32", 700)
    q, (k, v) = twins.drawn(3, 8, 3, 32), twins.tokens(3, 3)
    got, want = (x.attend(0, q, k, v, new_lengths=counts, return_lse=True) for x in (twins.shared, twins.apart))
    for a, b in zip(got, want, strict=True):
        assert a.tobytes() == b.tobytes()
    assert bool(runs) == any(counts)
    twins.check(2)
    assert twins.shared.lengths(0) == tuple(702 + n for n in counts)


def test_queries_of_earlier_tokens_are_those_of_copies(rng, runs):
    twins = Twins(rng, "float32", 640)
    q, (k, v) = twins.drawn(3, 8, 20, 32), twins.tokens(3, 2)
    got, want = (x.attend(0, q, k, v, q_lengths=[20, 3, 1]) for x in (twins.shared, twins.apart))
    assert got.tobytes() == want.tobytes() and not runs
    twins.check(1)


def test_a_prefix_is_frozen_while_others_begin_with_it(rng):
    twins = Twins(rng, "float32", 700)
    before = twins.prefix.keys(0).tobytes(), twins.prefix.lengths(0)
    for change in (
        lambda: twins.prefix.truncate(600),
        lambda: twins.prefix.keep([0, 2], start=600),
        twins.prefix.clear,
        lambda: twins.prefix.roll_back(1, [5]),
    ):
        with pytest.raises(sl.ArgumentError, match="first 640 tokens to stay"):
            change()
    assert (twins.prefix.keys(0).tobytes(), twins.prefix.lengths(0)) == before
    for layer in (0, 1):
        twins.prefix.append(layer, *twins.tokens(1, 20))
    twins.check(1)
    twins.prefix.truncate(640)
    twins.check(1)
    del twins.shared
    gc.collect()
    twins.prefix.clear()


def test_a_prefix_outlives_its_handle(rng):
    twins = Twins(rng, "float32", 700)
    del twins.prefix
    gc.collect()
    twins.check(1)
    twins.check_contents()


def test_steps_of_one_form_may_have_other_prefixes(rng, runs):
    """What is kept of a step is right for memory of other strides, and for another end of the prefix."""
    begun, x = [], rng.standard_normal((1, 2, 700, 32), np.float32)
    for capacity in (700, 900):
        prefix = sl.KVCache(layers=1, kv_heads=2, head_dim=32, capacity=capacity)
        for part in (x[:, :, :600], x[:, :, 600:]):
            prefix.append(0, part, part)
            begun.append(sl.KVCache.from_prefix(prefix, 3, capacity=1000))
    assert [cache.used_bytes // cache.token_bytes for cache in begun] == [3 * 88, 3 * 60] * 2
    rest = rng.standard_normal((3, 2, 100, 32), np.float32)
    for cache in begun[::2]:
        cache.append(0, rest, rest)
    q, new = rng.standard_normal((3, 8, 1, 32), np.float32), rng.standard_normal((3, 2, 1, 32), np.float32)
    for _ in range(2):
        for cache in (begun[0], begun[2], begun[3], begun[1]):  # next to each other they differ in one of the two
            copies = cache.copy()
            assert cache.attend(0, q, new, new).tobytes() == copies.attend(0, q, new, new).tobytes()
    assert len(runs) == 2 * len(begun)


def test_a_prefix_is_freed_with_its_caches(rng, runs):
    twins = Twins(rng, "float32", 600)
    twins.check(1)
    held = weakref.ref(twins.prefix._storage)
    del twins
    runs.clear()
    gc.collect()
    assert held() is None


def test_a_prefix_is_frozen_as_far_as_any_cache_begins_with_it(rng):
    prefix, x = sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=900), np.ones((1, 1, 400, 4), np.float32)
    caches = []
    for _ in range(2):
        prefix.append(0, x, x)
        caches.append(sl.KVCache.from_prefix(prefix, 1))
    for most in (768, 384):
        with pytest.raises(sl.ArgumentError, match=f"first {most} tokens to stay"):
            prefix.truncate(most - 1)
        prefix.truncate(most)
        caches.pop()
        gc.collect()


def test_refusals():
    make = {"layers": 2, "kv_heads": 1, "head_dim": 4, "capacity": 300}
    prefix, x = sl.KVCache(**make), np.ones((1, 1, 200, 4), np.float32)
    for layer in (0, 1):
        prefix.append(layer, x, x)
    begun, odd = sl.KVCache.from_prefix(prefix, 1), sl.KVCache(**make)
    odd.append(0, x, x)
    for given, error, match in (
        ((5, 2), sl.ArgumentTypeError, "prefix: expected a KVCache"),
        ((sl.KVCache(batch=2, **make), 2), sl.ArgumentError, "batch 1 without a window; got batch 2"),
        ((sl.KVCache(layers=1, kv_heads=1, head_dim=4, window=8), 2), sl.ArgumentError, "got window 8"),
        ((begun, 2), sl.ArgumentError, r"prefix\.copy\(\)"),
        ((odd, 2), sl.ArgumentError, "as many tokens in every layer"),
        ((prefix, 0), sl.ArgumentError, "batch"),
    ):
        with pytest.raises(error, match=match):
            sl.KVCache.from_prefix(*given)
    with pytest.raises(
        sl.ArgumentTypeError, match=r"^batch: expected an argument of KVCache\.from_prefix\(\); got none"
    ):
        sl.KVCache.from_prefix(prefix)
    with pytest.raises(sl.ArgumentError, match="capacity: expected at least the prefix's 200 tokens; got 100"):
        sl.KVCache.from_prefix(prefix, 2, capacity=100)
