"""Caches and pools of latents (latent=True): one row per token, whose first columns are its values; the bits of arrays,
in half the memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from caches import OPTIONS
from conftest import FULL
from pools import check_accounts
from problems import CODES, DTYPES, decoded, numpy_dtype, taken
from repeated import forget
from tolerance import assert_within, bounds_of_codes, plain

import speedlight as sl
from speedlight import reference
from speedlight.arrays.dtypes import CODES as CODE_FORMATS
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays
from speedlight.cpu.engine import append_call as putting
from speedlight.cpu.memory.operands import Paged
from speedlight.host.machine import current_isa
from speedlight.problem.operands import Strides

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels

# latent and rotary columns, heads of latents, query heads of each
SIZES = [(512, 64, 1, 16), (33, 7, 2, 3), (24, 0, 1, 20)]
STEPS = (3, 100, 1, 1, 1, 2, 100, 5, 1, 1, 40)
RING = {"window": 70, "keep_first": 5}


def problem(rng, dtype, sizes, n=sum(STEPS), batch=2):
    """Queries and joined keys."""
    latent, rotary, heads, group = sizes
    kind = numpy_dtype(dtype)
    return [rng.standard_normal((batch, x, n, latent + rotary)).astype(kind) for x in (heads * group, heads)]


def made(dtype, sizes, *, pool=False, **more):
    latent, rotary, heads, _ = sizes
    room: dict[str, Any] = {"pages": 60, "page_size": 32} if pool else {"batch": 2, "capacity": 300}
    shape = {"layers": 1, "kv_heads": heads, "head_dim": latent + rotary, "value_dim": latent, "dtype": dtype}
    return (sl.PagePool if pool else sl.KVCache)(**shape | room | {"latent": True} | more)


def parts(k, columns, joined):
    """Keys as a caller gives them: whole, or a latent and its rotary part, each in an array of its own."""
    return (k.copy(),) if joined else (k[..., :columns].copy(), k[..., columns:].copy())


def rows(x):
    """(batch, heads, n, dim) as packed rows."""
    return np.concatenate([one.swapaxes(0, 1) for one in x])


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_results_have_the_bits_of_arrays(isa, rng, dtype, sizes):
    """By chunks and steps that are prepared, then repeated; by a cache, a ring and pages; by one thread and two."""
    q, k = problem(rng, dtype, sizes)
    value_dim = sizes[0]
    for threads in (1, 2):
        sl.set_threads(threads)
        for more in ({}, RING):
            mask = sl.window(69, 0) | sl.prefix(5) if more else None
            want, lse = sl.attention(q, k, None, value_dim=value_dim, causal=True, mask=mask, return_lse=True)
            for joined in (True, False):
                cache, at, found = made(dtype, sizes, **more), 0, []
                for n in STEPS:
                    new = parts(k[:, :, at : at + n], value_dim, joined)
                    found.append(cache.attend(0, q[:, :, at : at + n], *new, return_lse=True))
                    at += n
                out, sums = (np.concatenate(x, 2) for x in zip(*found, strict=True))
                assert out.tobytes() == want.tobytes() and sums.tobytes() == lse.tobytes()
                shown = cache._ring.shown(at) if more else slice(None)
                assert cache.keys(0).tobytes() == k[:, :, shown].tobytes()
                assert cache.values(0).tobytes() == k[:, :, shown, :value_dim].tobytes()
        pool, at, found = made(dtype, sizes, pool=True), 0, []
        want = sl.attention(q, k, None, value_dim=value_dim, causal=True)
        several = [pool.sequence() for _ in q]
        for n in STEPS:
            new = parts(rows(k[:, :, at : at + n]), value_dim, at % 2 == 0)
            out = pool.attend(0, several, rows(q[:, :, at : at + n]), *new, new_lengths=[n, n])
            found.append(np.stack([x.swapaxes(0, 1) for x in (out[:n], out[n:])]))
            at += n
        assert np.concatenate(found, 2).tobytes() == want.tobytes()
        assert [x.keys(0).tobytes() for x in several] == [x.tobytes() for x in k]
        assert [x.values(0).tobytes() for x in several] == [x[..., :value_dim].tobytes() for x in k]


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_within_the_reference_s_bound(rng, dtype):
    """Of the sizes of DeepSeek's models, over a prompt and a step after it."""
    q, k = problem(rng, dtype, SIZES[0], n=140, batch=1)
    values = k[..., :512]
    cache = made(dtype, SIZES[0], batch=1)
    found = [cache.attend(0, q[:, :, :139], k[:, :, :139]), cache.attend(0, q[:, :, 139:], k[:, :, 139:])]
    want = sl.reference.attention(q, k, values, causal=True)
    bound, _ = sl.reference.error_bound(q, k, values, causal=True, dot=current_isa().dot(dtype))
    assert_within(np.concatenate(found, 2), plain(want), plain(bound))


@pytest.mark.parametrize("options", [*OPTIONS, {"dropout": 0.3, "seed": 5}], ids=str)
def test_options_and_wider_queries(rng, options):
    """Positions count from a sequence's first token, in chunks and steps; float32 queries over narrower latents."""
    sizes = (33, 7, 2, 2)
    for dtype, of_queries in (("float32", "float32"), ("bfloat16", "float32"), ("float16", "float32")):
        q, k = problem(rng, dtype, sizes)
        q = q.astype(numpy_dtype(of_queries))
        want = sl.attention(q, k, None, value_dim=33, causal=True, **options)
        cache, at, found = made(dtype, sizes), 0, []
        for n in STEPS:
            new = parts(k[:, :, at : at + n], 33, n == 1)
            found.append(cache.attend(0, q[:, :, at : at + n], *new, **options))
            at += n
        assert np.concatenate(found, 2).tobytes() == want.tobytes()


def test_a_token_is_stored_once():
    for pool in (False, True):
        kept, other = (made("float16", SIZES[0], pool=pool, latent=x) for x in (True, False))
        assert kept.storage.token_bytes == 576 * 2 if not pool else kept.page_bytes == 576 * 2 * 32
        assert other.storage.token_bytes == (576 + 512) * 2 if not pool else other.page_bytes == (576 + 512) * 2 * 32
        assert "latent=True" in repr(kept) and "latent" not in repr(other)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("joined", [True, False])
def test_steps_repeat_by_what_they_were_given(rng, kind, joined):
    """Joined and in parts by turns, of any strides: a prepared step of one is none of the other."""
    given = np.asarray if kind == "numpy" else torch.from_numpy
    q, k = problem(rng, "float32", SIZES[0], n=60, batch=1)
    forget()
    cache = made("float32", SIZES[0], batch=1)
    for n in range(60):
        whole = k[:, :, n : n + 1]
        apart = parts(whole, 512, False) if n % 3 else (whole[..., :512], whole[..., 512:])
        new = (whole,) if joined == (n % 5 > 0) else apart
        out = cache.attend(0, given(q[:, :, n : n + 1]), *map(given, new))
        want = sl.attention(q[:, :, n : n + 1], k[:, :, : n + 1], None, value_dim=512)
        assert np.asarray(out).tobytes() == want.tobytes()
    for n in range(3):  # tokens that are only stored
        cache.append(0, *map(given, parts(k[:, :, n : n + 1], 512, joined)))
    assert cache.keys(0).tobytes() == np.concatenate([k, k[:, :, :3]], 2).tobytes()


def test_a_second_array_beside_whole_keys_is_refused_after_any_steps(rng):
    """A step that is prepared for keys alone takes no values of their own."""
    q, k = problem(rng, "float32", SIZES[1], n=1)
    cache, pool = made("float32", SIZES[1]), made("float32", SIZES[1], pool=True)
    sequence = pool.sequence()
    packed = [rows(x[:1]) for x in (q, k, k)]
    for _ in range(3):
        cache.attend(0, q, k)
        cache.append(0, k)
        pool.attend(0, [sequence], *packed[:2])
        pool.append(0, [sequence], packed[1])
    for call in (
        lambda: cache.attend(0, q, k, k.copy()),
        lambda: cache.append(0, k, k.copy()),
        lambda: pool.attend(0, [sequence], *packed),
        lambda: pool.append(0, [sequence], *packed[1:]),
    ):
        with pytest.raises(sl.ArgumentError, match=r"v: expected the rotary part, 7 columns, .*got shape \(.*40\)\. V"):
            call()
    assert cache.lengths(0) == (6, 6) and sequence.length() == 6


def test_a_half_of_a_key_is_no_joined_key(rng):
    """A latent and a rotary part as wide, given as two arrays alike, then one of them alone."""
    x = rng.standard_normal((1, 1, 1, 16)).astype(np.float32)
    q = rng.standard_normal((1, 4, 1, 32)).astype(np.float32)
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=32, value_dim=16, capacity=20, latent=True)
    pool = sl.PagePool(layers=1, pages=2, page_size=16, kv_heads=1, head_dim=32, value_dim=16, latent=True)
    sequence = pool.sequence()
    for _ in range(3):
        cache.append(0, x, x.copy())
        cache.attend(0, q, x, x.copy())
        pool.attend(0, [sequence], q[0].swapaxes(0, 1), x[0], x[0].copy())
    for call in (
        lambda: cache.append(0, x),
        lambda: cache.attend(0, q, x),
        lambda: pool.attend(0, [sequence], q[0].swapaxes(0, 1), x[0]),
    ):
        with pytest.raises(sl.ArgumentError, match=r"k: expected shape .*32\); got .*16\)"):
            call()
    assert cache.lengths(0) == (6,) and sequence.length() == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("streams", [False, True])
def test_long_prompts_are_rows_as_they_were_given(rng, monkeypatch, dtype, streams):
    """By several threads, through the caches and past them; round a ring, too."""
    if streams:
        monkeypatch.setattr(putting, "_STREAM_BYTES", 0)
    forget()
    sl.set_threads(2)
    for sizes in (SIZES[0], SIZES[1]):
        _, k = problem(rng, dtype, sizes, n=1500)
        for joined in (True, False):
            cache, ring = made(dtype, sizes, capacity=1500), made(dtype, sizes, capacity=None, **RING)
            for first, last in ((0, 3), (3, 400), (400, 1500)):
                for x in (cache, ring):
                    x.append(0, *parts(k[:, :, first:last], sizes[0], joined), new_lengths=[last - first] * 2)
                assert cache.keys(0).tobytes() == k[:, :, :last].tobytes()
                assert ring.keys(0).tobytes() == k[:, :, ring._ring.shown(last)].tobytes()


def test_all_else_that_caches_do(rng, tmp_path):
    """Of unequal sequences, in two layers: copies, beams, rollback, paths of a tree, and files."""
    sizes = SIZES[1]
    q, k = problem(rng, "bfloat16", sizes)
    for more in ({}, RING):
        cache = made("bfloat16", sizes, layers=2, **more)
        for layer in (0, 1):
            cache.append(layer, k[:, :, :200], new_lengths=[200, 90])
        if not more:
            cache.roll_back(1, [190, 80])
            assert cache.keys(1)[0].tobytes() == k[0, :, :190].tobytes()
            cache.truncate([190, 80])
        start = cache.lengths(0)
        for layer in (0, 1):
            cache.append(layer, *parts(k[:, :, 200:207], sizes[0], False))
        cache.keep([0, 2, 5], start=start)
        want = [np.concatenate([x[:, :n], x[:, [200, 202, 205]]], 1) for x, n in zip(k, start, strict=True)]
        mask = sl.window(69, 0) | sl.prefix(5) if more else None
        cache.save(tmp_path / "chat.safetensors")
        swapped = cache.select([1, 0, 1])
        loaded = sl.KVCache.load(tmp_path / "chat.safetensors")
        assert repr(loaded) == repr(cache) and loaded.latent is True
        for layer in (0, 1):
            for other, order in ((cache, [0, 1]), (cache.copy(), [0, 1]), (loaded, [0, 1]), (swapped, [1, 0, 1])):
                new = [x[order][:, :, 210:211] for x in (q, k)]
                got = other.attend(layer, new[0], new[1])
                for item, n in enumerate(order):
                    keys = np.concatenate([want[n], k[n, :, 210:211]], 1)[None]
                    query = new[0][item : item + 1]
                    exact = sl.attention(query, keys, None, value_dim=sizes[0], causal=True, mask=mask)
                    assert got[item : item + 1].tobytes() == exact.tobytes()
        cache.clear()
        assert cache.lengths(1) == (0, 0) and cache.used_bytes == 0


def test_sequences_share_pages_and_go_to_files(rng, tmp_path):
    sizes = SIZES[1]
    q, k = problem(rng, "float16", sizes, batch=1)
    pool = made("float16", sizes, pool=True)
    a = pool.sequence()
    pool.append(0, [a], rows(k[:, :, :70]), new_lengths=[70])
    b = a.fork()
    free = pool.free_pages
    pool.append(0, [b], rows(k[:, :, 100:110]), new_lengths=[10])
    assert pool.free_pages == free - 1  # a copy of the last page
    b.keep([1, 3], start=70)
    both = k[0, :, :70], np.concatenate([k[0, :, :70], k[0, :, [101, 103]].swapaxes(0, 1)], 1)
    for sequence, want in zip((a, b), both, strict=True):
        assert sequence.keys(0).tobytes() == want.tobytes()
        assert sequence.values(0).tobytes() == want[..., :33].tobytes()
    b.save(tmp_path / "b.safetensors")
    cache = sl.KVCache.load(tmp_path / "b.safetensors")
    assert cache.latent and cache.keys(0)[0].tobytes() == both[1].tobytes()
    exact = sl.attention(q[:, :, 9:10], both[1][None], None, value_dim=33)
    assert cache.attend(0, q[:, :, 9:10]).tobytes() == exact.tobytes()
    assert pool.attend(0, [b], rows(q[:, :, 9:10])).tobytes() == rows(exact).tobytes()
    b.truncate(10)
    assert b.keys(0).tobytes() == k[0, :, :10].tobytes()
    check_accounts(pool, [a, b])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"latent": "2"}, "expected sizes"),
        ({"latent": "x"}, "a size is missing or no number"),
        ({"value_dim": "50"}, "expected sizes"),
        ({"latent": None}, r"expected values\.0 of shape"),
    ],
)
def test_files_that_are_no_latents_are_named(rng, tmp_path, words, message):
    path = tmp_path / "x.safetensors"
    cache = made("float32", SIZES[1])
    cache.append(0, problem(rng, "float32", SIZES[1], n=5)[1])
    cache.save(path)
    found = {name: x for name, x in (read_metadata(path) | words).items() if x is not None}
    write_arrays(path, read_arrays([path]), found)
    with pytest.raises(sl.FileError, match=message):
        sl.KVCache.load(path)


def test_other_parts_are_refused_and_nothing_is_stored(rng):
    z = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=576, value_dim=512, capacity=8, latent=True)
    other = sl.KVCache(layers=1, kv_heads=1, head_dim=576, value_dim=512, capacity=8)
    pool = sl.PagePool(layers=1, pages=3, page_size=16, kv_heads=1, head_dim=576, value_dim=512, latent=True)
    sequence = pool.sequence()
    q, k, latent, rotary = (z(1, 4 if d == 577 else 1, 2, min(d, 576)) for d in (577, 576, 512, 64))
    way = r"Give latents of 512 columns as k and rotary parts of 64 as v, or keys of 576 as k alone\.$"
    for call, error, message in (
        (lambda: cache.append(0, latent), sl.ArgumentError, rf"k: .* 576\); got \(1, 1, 2, 512\)\. {way}"),
        (lambda: cache.attend(0, q, rotary), sl.ArgumentError, rf"k: .* 576\); got \(1, 1, 2, 64\)\. {way}"),
        (lambda: cache.append(0, k, k), sl.ArgumentError, r"v: expected the rotary part, 64 columns, .*got k itself\."),
        (lambda: cache.append(0, k, rotary), sl.ArgumentError, rf"k: .* 512\); got \(1, 1, 2, 576\)\. {way}"),
        (lambda: cache.append(0, k, latent), sl.ArgumentError, rf"k: .* 512\); got \(1, 1, 2, 576\)\. {way}"),
        (lambda: cache.append(0, latent, latent.copy()), sl.ArgumentError, rf"v: .* 64\); got .* 512\)\. {way}"),
        (lambda: cache.append(0, latent, z(1, 1, 3, 64)), sl.ArgumentError, "v: expected 2 tokens, as k has; got 3"),
        (lambda: cache.append(0, (latent, rotary)), sl.ArgumentTypeError, "k: expected an array; got a tuple of two"),
        (lambda: cache.attend(0, q, None, rotary), sl.ArgumentError, "k: expected k and v together"),
        (lambda: cache.append(0, latent, rotary.astype("d")), sl.ArgumentTypeError, "v: expected dtype float32"),
        (lambda: pool.append(0, [sequence], latent[0].swapaxes(0, 1)), sl.ArgumentError, rf"k: expected .*{way}"),
        (
            lambda: pool.attend(0, [sequence], *(x[0].swapaxes(0, 1) for x in (q, latent, z(1, 1, 2, 60)))),
            sl.ArgumentError,
            rf"v: expected shape \(total new, 1, 64\); got \(2, 1, 60\)\. {way}",
        ),
        (lambda: other.append(0, k), sl.ArgumentTypeError, "v: expected an array; got None. .*latent=True"),
        (lambda: other.attend(0, q, k), sl.ArgumentError, "v: expected k and v together.*latent=True"),
        (lambda: other.append(0, latent, rotary), sl.ArgumentError, "k: expected .* or with latent=True if these are"),
        (lambda: other.append(0, [latent, rotary], k), sl.ArgumentTypeError, "k: .* got a list of two.*latent=True"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert cache.lengths(0) == other.lengths(0) == (0,) and sequence.length() == 0
    for x in (cache, other):
        assert not x.storage.keys[0].memory.any()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("codes", [x for x in CODES if CODE_FORMATS[x].bits == 8])
def test_codes_have_scales_by_blocks_and_the_rest_is_bfloat16(rng, monkeypatch, tmp_path, codes, streams):
    """In caches, rings, pages and files; keys and values are read from the same codes."""
    if streams:
        monkeypatch.setattr(putting, "_STREAM_BYTES", 0)
    forget()
    queries = "float32", "bfloat16", "float16", "bfloat16"
    for sizes, dtype in zip((SIZES[0], SIZES[1], (300, 20, 2, 1), (257, 3, 1, 1)), queries, strict=True):
        q, k = problem(rng, taken(codes), sizes)
        q = q.astype(numpy_dtype(dtype))
        k *= rng.choice([1e-3, 1.0, 1e3], k.shape[:3])[..., None].astype(k.dtype)
        latent, rotary, kv_heads, _ = sizes
        want = decoded(k, codes, latent)
        for more, joined in ((x, y) for x in ({}, RING) for y in (True, False)):
            cache, at = made(codes, sizes, **more), 0
            assert cache.token_bytes == kv_heads * (latent + 4 * -(-latent // 128) + 2 * rotary)
            for n in STEPS:
                cache.append(0, *parts(k[:, :, at : at + n], latent, joined))
                at += n
            shown = cache._ring.shown(at) if more else slice(None)
            cache.save(tmp_path / "x.safetensors")
            for x in (cache, cache.copy(), sl.KVCache.load(tmp_path / "x.safetensors")):
                assert x.keys(0).tobytes() == want[:, :, shown].tobytes()
                assert x.values(0).tobytes() == want[:, :, shown, :latent].tobytes()
            some, keys = q[:, :, :20], want[:, :, shown]
            exactly = some.astype(np.float32)
            masks = {"mask": cache._ring.mask(False)} if more and cache._ring.mask(False) is not None else {}
            if not masks:
                out = cache.attend(0, some)
                exact = reference.attention(exactly, keys, None, value_dim=latent)
                bound = bounds_of_codes(some, keys, None, codes, value_dim=latent).out
                assert_within(out, exact, bound)
                alone = [cache.attend(0, some[:, :, i : i + 1]) for i in range(some.shape[2])]
                assert np.concatenate(alone, 2).tobytes() == out.tobytes()
                copied = cache.copy()
                step = copied.attend(0, some[:, :, :3], *parts(k[:, :, :3], latent, joined))
                grown = np.concatenate((keys, want[:, :, :3]), 2)
                exact = reference.attention(exactly[:, :, :3], grown, None, value_dim=latent, causal=True)
                bound = bounds_of_codes(some[:, :, :3], grown, None, codes, value_dim=latent, causal=True).out
                assert_within(step, exact, bound)
        pool, at = made(codes, sizes, pool=True), 0
        sequence = pool.sequence()
        for n in STEPS:
            pool.append(0, [sequence], *parts(rows(k[:1, :, at : at + n]), latent, n > 1), new_lengths=[n])
            at += n
        assert sequence.keys(0).tobytes() == want[0].tobytes()
        whole = made(codes, sizes)
        whole.append(0, *parts(k[:, :, :at], latent, True))
        found = pool.attend(0, [sequence], rows(q[:1, :, :5]), q_lengths=[5])
        assert found.swapaxes(0, 1).tobytes() == whole.attend(0, q[:, :, :5])[0].tobytes()


def test_a_cache_without_a_window_is_read_as_an_array():
    """Its rows are not staged because of pages that it does not have; pages and rings are paged."""
    strides = [
        Paged(pages, [0]).strides("float32")
        for pages in (
            made("float32", SIZES[1]).storage.pages,
            made("float32", SIZES[1], **RING).storage.pages,
            made("float32", SIZES[1], pool=True)._storage.kernel_pages,
        )
    ]
    assert strides == [Strides(), Strides(is_paged=True), Strides(is_paged=True)]


@pytest.mark.parametrize("of", [sl.KVCache, sl.PagePool])
def test_latents_have_no_codes_of_four_bits(of):
    room = {"capacity": 8} if of is sl.KVCache else {"pages": 2, "page_size": 16}
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 24, "value_dim": 20, "latent": True} | room
    with pytest.raises(
        sl.UnsupportedError, match=r"dtype: expected int8, float8_e4m3fn \('fp8'\) or a dtype .* got int4"
    ):
        of(**sizes, dtype="q4_0")


@pytest.mark.parametrize("of", [sl.KVCache, sl.PagePool])
def test_what_cannot_be_a_cache_of_latents_says_so(of):
    room = {"capacity": 8} if of is sl.KVCache else {"pages": 2, "page_size": 16}
    sizes = {"layers": 1, "kv_heads": 1, "head_dim": 24, "latent": True} | room
    with pytest.raises(sl.ArgumentError, match="value_dim: expected at most head_dim=24.*got 25"):
        of(**sizes | {"value_dim": 25})
    for wrong in (1, None, "keys"):
        with pytest.raises(sl.ArgumentTypeError, match="latent: expected True or False"):
            of(**sizes | {"latent": wrong})
    with pytest.raises(
        sl.ArgumentError, match="value_dim: expected the columns of a latent beside latent=True; got None"
    ):
        of(**sizes)
    assert of(**sizes, value_dim=24).value_dim == 24


def test_results_may_not_lie_in_what_is_stored(rng):
    q, k = problem(rng, "float32", (24, 0, 1, 1), n=3)
    cache = made("float32", (24, 0, 1, 1))
    with pytest.raises(sl.ArgumentError, match="out: "):
        cache.attend(0, q, k, out=k)
    assert cache.lengths(0) == (0, 0)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["float32"])
def test_latents_go_into_the_caller_s_pages(rng, kind, layout, dtype):
    """Whole rows, or both of their parts; in pages of several heads, and of strides of their own."""
    given = np.asarray if kind == "numpy" or dtype == "bfloat16" else torch.from_numpy
    for (latent, rotary, heads, group), joined in ((x, y) for x in SIZES for y in (True, False)):
        row = latent + rotary
        memory = rng.standard_normal((12, 5, heads, row + 3)).astype(numpy_dtype(dtype))
        pages, want, table, before = memory[..., :row], memory.copy(), np.array([[3, 7, 1], [0, 10, 4]]), [4, 0]
        x = rng.standard_normal((2, 3, heads, row)).astype(memory.dtype)
        for item, n in ((item, n) for item in (0, 1) for n in range(3)):
            at = before[item] + n
            want[table[item, at // 5], at % 5, :, :row] = x[item, n]
        new = {"bhld": x.swapaxes(1, 2), "blhd": x, "lhd": x.reshape(6, heads, row)}[layout]
        more = {"new_lengths": [3, 3]} if layout == "lhd" else {}
        tokens = map(given, parts(np.ascontiguousarray(new), latent, joined))
        after = sl.append_paged(given(pages), None, table, before, *tokens, layout=layout, **more)
        assert after == [7, 3] and memory.tobytes() == want.tobytes()
        q = rng.standard_normal((2, heads * group, 1, row)).astype(memory.dtype)
        out = sl.attention_paged(given(q), given(pages), None, table, after, value_dim=latent)
        for item, n in enumerate(after):
            keys = pages[table[item]].reshape(-1, heads, row)[None, :n].swapaxes(1, 2)
            exact = sl.attention(q[item : item + 1], keys, None, value_dim=latent)
            assert np.asarray(out[item : item + 1]).tobytes() == exact.tobytes()


def test_other_rows_than_the_pages_have_are_refused(rng):
    pages, z = np.zeros((12, 5, 1, 9), np.float32), lambda *shape: np.ones(shape, np.float32)
    read_only = np.broadcast_to(z(9), (12, 5, 1, 9))
    for where, new, error, message in (
        ((pages, None), (z(1, 1, 2, 6),), sl.ArgumentError, "k: expected 9 columns, as k_pages has; got 6 .*as k an"),
        ((pages, None), (z(1, 1, 2, 6), z(1, 1, 2, 4)), sl.ArgumentError, "v: expected the rotary part, 3 columns bes"),
        ((pages, None), (z(1, 1, 2, 6), z(1, 1, 3, 3)), sl.ArgumentError, r"v: expected shape \(1, 1, 2, 3\)"),
        ((pages, None), (z(1, 1, 2, 12), z(1, 1, 2, 3)), sl.ArgumentError, "v: expected the rotary part, 0 columns"),
        ((pages, pages.copy()), (z(1, 1, 2, 9),), sl.ArgumentTypeError, "v: expected an array.*give v_pages=None"),
        ((read_only, None), (z(1, 1, 2, 9),), sl.ArgumentError, "k_pages: expected memory that can be written"),
        ((pages[0], None), (z(1, 1, 2, 9),), sl.ArgumentError, "k_pages: expected shape"),
    ):
        with pytest.raises(error, match=message):
            sl.append_paged(*where, [[3]], [1], *new)
    assert not pages.any()
