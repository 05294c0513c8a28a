"""Latent attention: keys in two parts, and values that are the keys' first columns, have the bits of a call whose keys
and values are arrays of their own, and the specification's numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from guarded import Guarded
from latents import PLACES, attend, calls, draw_latents
from problems import DTYPES, numpy_dtype
from tolerance import assert_accurate

import speedlight as sl

Q_LENGTHS = (1, 7, 16, 17, 64, 130)
K_LENGTHS = (0, 1, 127, 128, 1024, 1025, 3000)
LAYOUTS = ("bhld", "blhd", "hld", "lhd")
MASK = np.random.default_rng(3).random((130, 3000)) < 0.5
BIAS = np.random.default_rng(4).standard_normal((130, 3000)).astype(np.float32)
# by name: what a problem of so many query heads, queries and keys is asked
OPTIONS: dict[str, Any] = {
    "plain": lambda heads, q_len, k_len: {},
    "causal": lambda heads, q_len, k_len: {"causal": True, "sink_logits": np.linspace(-2, 2, heads).tolist()},
    "window": lambda heads, q_len, k_len: {"window": (300, 20), "scale": 0.3},
    "top-left": lambda heads, q_len, k_len: {"causal": "top-left"},
    "mask": lambda heads, q_len, k_len: {"mask": MASK[:q_len, :k_len]},
    "pattern": lambda heads, q_len, k_len: {"mask": sl.causal() & (sl.window(200, 0) | sl.prefix(4))},
    "bias": lambda heads, q_len, k_len: {"score": BIAS[:q_len, :k_len], "causal": True},
    "scores": lambda heads, q_len, k_len: {"score": [sl.softcap(3.0), sl.alibi(np.linspace(0.01, 0.5, heads))]},
    "dropout": lambda heads, q_len, k_len: {"dropout": 0.3, "seed": 5},
}


def assert_same_bits(p: Any, rng: np.random.Generator, places: Any = PLACES) -> None:
    """Every call that means the problem has the bits of its copies."""
    _, k, v = p.arrays
    want = attend(p, k, v)
    for place in places:
        for n, (keys, values, named) in enumerate(calls(p, place, rng)):
            assert attend(p, keys, values, **named) == want, (place, n, p.q.shape, p.latent.shape, p.value_dim)


def of_heads(name: str, heads: tuple[int, int], q_len: int, k_len: int) -> dict[str, Any]:
    return OPTIONS[name](heads[0] * heads[1], q_len, k_len)


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_length(isa, one_width, rng, dtype):
    """Around the panel, the tile and the span: numbers inside the bound, the bits of copies, wherever parts lie."""
    for n, q_len in enumerate(Q_LENGTHS):
        for m, k_len in enumerate(K_LENGTHS):
            if not FULL and (2 * n + m) % 5:
                continue
            p = draw_latents(rng, dtype, q_len, k_len, causal=bool((n + m) % 2))
            assert_accurate(*p.arrays, zeros_allowed=True, **p.options)
            assert_same_bits(p, rng, PLACES if FULL else [PLACES[(n + m) % len(PLACES)]])


@pytest.mark.units("dtype")
@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(isa, one_width, rng, dtype, name):
    for n in range(6 if FULL else 2):
        q_len, k_len, heads = (Q_LENGTHS[3 + n % 3], K_LENGTHS[3 + n % 4], (1 + n % 2, 3))
        layout = LAYOUTS[n % 2]
        p = draw_latents(rng, dtype, q_len, k_len, heads=heads, layout=layout, **of_heads(name, heads, q_len, k_len))
        assert_accurate(*p.arrays, **p.options)
        assert_same_bits(p, rng, PLACES if FULL else PLACES[n::2])


@pytest.mark.each("layout", "dtype")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout(isa, one_width, rng, dtype, layout):
    """Packed sequences and padded batches, too."""
    for n, (q_len, k_len) in enumerate(((1, 300), (16, 129), (64, 1025))):
        options: dict[str, Any] = {"causal": True}
        if layout == "lhd" and q_len > 1:
            options |= {"cu_seqlens_q": [0, 5, 5, q_len], "cu_seqlens_k": [0, 40, 70, k_len]}
        p = draw_latents(rng, dtype, q_len, k_len, layout=layout, **options)
        if layout in ("bhld", "blhd") and p.k.shape[0] == p.q.shape[0]:
            sizes = {"k_lengths": rng.integers(q_len, k_len, p.q.shape[0]), "q_lengths": [q_len] * p.q.shape[0]}
            p.options.update({n: [int(x) for x in y] for n, y in sizes.items()})
        assert_accurate(*p.arrays, **p.options)
        assert_same_bits(p, rng, PLACES if FULL else PLACES[n::3])


@pytest.mark.units
@pytest.mark.each("dtype", "keys")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("keys", ["float16", "bfloat16"])
def test_keys_of_another_dtype(isa, one_width, rng, dtype, keys):
    for q_len in (1, 17, 64):
        p = draw_latents(rng, dtype, q_len, 1100, keys=keys, causal=True)
        assert_accurate(*p.arrays, **p.options)
        assert_same_bits(p, rng, PLACES[:3])


@pytest.fixture
def threads() -> Iterator[Any]:
    yield sl.set_threads
    sl.set_threads(None)


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_sizes(isa, rng, threads, dtype):
    """Heads that read one latent of 512 numbers and a rotary key of 64: the bits of one thread, of more, and of queries
    in chunks.
    """
    longest = 3000 if FULL else 1100  # of more than one span
    for heads, q_len, k_len in ((16, 1, longest), (128, 1, longest), (16, 7, longest), (3, 130, 300)):
        p = draw_latents(rng, dtype, q_len, k_len, widths=(512, 64), heads=(1, heads), causal=True)
        if FULL or (heads, q_len) == (16, 1):
            assert_accurate(*p.arrays, **p.options)
        _, k, v = p.arrays
        threads(1)
        want, want_lse = sl.attention(p.q, k, v, return_lse=True, **p.options)
        for n in (1, 2, 5) if FULL else (1, 2):
            threads(n)
            for keys, values, named in calls(p, "apart", rng)[None if FULL else 1 :: 1 if FULL else 2]:
                assert attend(p, keys, values, **named) == (want.tobytes(), want_lse.tobytes()), n
        pair = calls(p, "apart", rng)[1][0]
        for first in range(0, q_len, 50):
            end = min(q_len, first + 50 if q_len > 50 else first + 3)
            p.options["q_start"] = k_len - q_len + first
            got = sl.attention(p.rows(first, end), pair, None, value_dim=p.value_dim, **p.options)
            assert got.tobytes() == want[:, :, first:end].tobytes(), first


@pytest.mark.units
@pytest.mark.parametrize("q_len", [1, 5])
def test_tasks_that_share_spans_have_the_bits_of_one(isa, rng, threads, q_len):
    """A block of queries that is alone: its spans are merged in order, whoever took them."""
    q, latent, rotary = (
        rng.standard_normal(shape, dtype=np.float32)
        for shape in ((1, 16, q_len, 72), (1, 1, 3000, 64), (1, 1, 3000, 8))
    )
    found = []
    for n in (1, 2, 3):
        threads(n)
        out, lse = sl.attention(q, (latent, rotary), None, causal=True, return_lse=True)
        found.append((out.tobytes(), lse.tobytes()))
    assert found == found[:1] * 3


@pytest.mark.units
def test_spans_that_nobody_sees_leave_nothing(isa, rng, threads):
    """Tasks share the spans of a block: one that is passed by holds what an earlier call left there."""
    p = draw_latents(rng, "float32", 1, 6000, widths=(64, 8), heads=(1, 16))
    ends, all_keys = (sl.expression(lambda b, h, i, j, n=n: (j < n) | (j > 5500)) for n in (500, 6000))
    results = []
    for n in (1, 3):
        threads(n)
        attend(p, p.parts, None, mask=all_keys)
        results.append(attend(p, p.parts, None, mask=ends))
    assert results[0] == results[1]


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_repeated_and_written_in_place(isa, one_width, rng, dtype):
    """A call that repeats reads what lies in the parts then, and where they lie then."""
    p = draw_latents(rng, dtype, 7, 200, heads=(1, 3))
    out = np.empty((*p.q.shape[:-1], p.value_dim), p.q.dtype)
    pair = latent, rotary = p.latent.copy(), p.rotary.copy()
    for n in range(4):
        if n == 2:
            pair = latent, rotary = p.latent.copy(), p.rotary.copy()
        latent[...], rotary[...] = rng.standard_normal(latent.shape), rng.standard_normal(rotary.shape)
        assert sl.attention(p.q, pair, None, value_dim=p.value_dim, out=out) is out
        k = np.concatenate(pair, -1)
        assert out.tobytes() == sl.attention(p.q, k, latent[..., : p.value_dim].copy()).tobytes()


@pytest.mark.units("dtype")
@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages(isa, one_width, rng, dtype):
    """Parts that end, or begin, where unreadable memory does: a byte too many kills the process."""
    kind, guarded = numpy_dtype(dtype), [Guarded(1 << 20) for _ in range(3)]
    for n in range(400 if FULL else 30):
        p = draw_latents(
            rng, dtype, int(rng.choice([1, 5, 40])), int(rng.integers(1, 258)), heads=(1, 3),
            widths=(int(rng.integers(1, 131)), int(rng.integers(1, 70))), causal=True,
        )  # fmt: skip
        for g in guarded:
            g.unlock()
        side = ("over", "under")[n % 2]
        parts = [g.array(x.shape, kind, side) for g, x in zip(guarded, (p.latent, p.rotary, p.k), strict=True)]
        for to, x in zip(parts, (p.latent, p.rotary, p.k), strict=True):
            to[...] = x
        for g in guarded:
            g.seal()
        _, k, v = p.arrays
        want = attend(p, k, v)
        assert attend(p, tuple(parts[:2]), None, value_dim=p.value_dim) == want
        assert attend(p, parts[2], None, value_dim=p.value_dim) == want


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_hidden_is_never_read(isa, one_width, rng, dtype):
    """NaN in hidden tokens of either part, and in columns of the latent past value_dim, which are keys alone."""
    p = draw_latents(rng, dtype, 40, 600, widths=(33, 5), heads=(1, 3))
    seen = np.arange(600) % 7 < 3
    mask = sl.table(seen)
    hides = functools.partial(sl.attention, p.q, v=None, value_dim=9, mask=sl.expression(lambda b, h, i, j: mask[j]))
    want = hides((p.latent, p.rotary))
    latent, rotary = p.latent.copy(), p.rotary.copy()
    latent[:, :, ~seen], rotary[:, :, ~seen] = np.nan, np.nan
    got = hides((latent, rotary))
    assert np.isfinite(got.astype(np.float32)).all() and got.tobytes() == want.tobytes()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_special_values(isa, one_width, rng, dtype):
    """NaN and infinities that are seen, in the latent, the rotary part, and columns past value_dim."""
    for place, column, special in ((0, 2, np.nan), (0, 30, np.inf), (1, 1, -np.inf), (0, 3, np.inf)):
        p = draw_latents(rng, dtype, 20, 300, widths=(33, 5), heads=(1, 2))
        (p.latent, p.rotary)[place][0, 0, 150, column] = special
        with np.errstate(all="ignore"):
            assert_same_bits(p, rng, ["apart", "one row"])
