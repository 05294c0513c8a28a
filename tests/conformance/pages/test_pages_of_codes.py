"""attention_paged() over pages of codes: inside the bound of codes times scales, of whatever kind those are."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from coded_pages import FORMATS, KINDS, STEP, Coded, made
from conftest import FULL
from problems import numpy_dtype
from repeated import forget, kept
from tolerance import assert_within

import speedlight as sl

torch = pytest.importorskip("torch")

SHORT = [("number", "tokens"), ("tokens", "heads"), *[(kind, kind) for kind in KINDS]]
PAIRS = list(itertools.product(KINDS, KINDS)) if FULL else SHORT
CALLS: list[tuple[int, dict[str, Any]]] = [  # how many queries, and options
    (1, {}),
    (3, {"causal": True}),
    (70, {"causal": True}),
    (5, {"causal": True, "window": (30, None), "score": sl.softcap(2.0), "sink_logits": [0.5, -1.0, 0.0, 2.0]}),
    (5, {"mask": sl.dilated(3)}),
]


def check(coded: Coded, q: np.ndarray, **options: Any) -> None:
    """Each sequence is inside its bound, with its own log-sum-exps; the result has the queries' dtype."""
    out, lse = coded.attended(q, sl.attention_paged, return_lse=True, **options)
    want, want_lse = coded.attended(q, sl.reference.attention_paged, return_lse=True, **options)
    assert out.dtype == q.dtype and lse.dtype == np.float32
    for item in range(len(q)):
        at = slice(item, item + 1)
        limits = coded.bounds(q[at], item, **options)
        assert_within(out[at], want[at], limits.out + STEP[q.dtype.name] * np.abs(want[at]) + 2.0**-24)
        assert_within(lse[at], want_lse[at], limits.lse)


@pytest.mark.units("codes")
@pytest.mark.each("codes", "kinds", "dtype")
@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_kind_of_scales(isa, one_width, rng, codes, kinds, dtype):
    for size in (16, 7):
        coded = made(rng, codes, kinds, [150, 1030], size=size)
        for n, options in CALLS if FULL else CALLS[:4]:
            q = rng.standard_normal((2, 4, n, 33)).astype(numpy_dtype(dtype))
            check(coded, q, **options)
    check(coded._replace(table=coded.table[:1], lengths=[150]), q[:1], dropout=0.3, seed=7)


@pytest.mark.units("codes")
@pytest.mark.each("codes", "kind")
@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_either_sign(isa, one_width, rng, codes, kind):
    """Scales and codes of the other sign are the same numbers, and have the same bits: hidden, dropped, NaN, and
    where a weight times its scale is too small for float32.
    """
    coded = made(rng, codes, (kind, kind), [150], dims=(33, 40))
    for x in (coded.k, coded.v):
        x[x == -128] = -127
    if kind == "tokens":
        coded.v_scales[coded.table[0, 4]] = 2e-45
    signs = [
        np.where(rng.random(np.shape(x)) < 0.7, -1.0, 1.0).astype(np.float32) if np.ndim(x) else np.float32(-1)
        for x in coded[2:4]
    ]
    seen = sl.table((rng.random(150) < 0.5) | (np.arange(150) == 67))
    masked: dict[str, Any] = {"mask": lambda b, h, i, j: seen[j]}
    calls = [*CALLS, (1, masked)]
    calls += [(n, {"dropout": 0.7, "seed": 3} | more) for n in (1, 40) for more in ({}, masked)]
    for has_nan in (False, True) if codes != "int8" else (False,):
        if has_nan:
            coded.v[coded.table[0, [2, 4]], 3, 1, [7, 9]] = np.nan
        turned = _negated(coded, signs)
        for n, options in calls:
            q = 3.0 * rng.standard_normal((1, 4, n, 33)).astype(np.float32)
            got, want = (x.attended(q, sl.attention_paged, return_lse=True, **options) for x in (turned, coded))
            for x, y in zip(got, want, strict=True):
                assert np.array_equal(x, y, equal_nan=True), (n, options)
            if has_nan:
                assert np.isnan(got[0][0, 2:, -1, 7]).all() or "mask" in options or "window" in options
            else:
                check(turned, q, **options)


def _negated(coded: Coded, signs: list[Any]) -> Coded:
    """Returns the same numbers: codes and scales times signs, which are 1 and -1."""
    changed = {}
    for pages, scales, sign in zip(("k", "v"), ("k_scales", "v_scales"), signs, strict=True):
        given = getattr(coded, scales)
        changed[scales] = float(given * sign) if isinstance(given, float) else np.asarray(given * sign)
        each = sign[..., None] if np.ndim(given) in (1, 3) else sign
        changed[pages] = (getattr(coded, pages).astype(np.float32) * each).astype(coded.k.dtype)
    return coded._replace(**changed)


@pytest.mark.units("codes")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_codes_of_a_cache_have_its_bits(isa, one_width, rng, codes, dtype):
    """The same tokens, stored with scales for each token and head: bits are a cache's, of few queries and of many."""
    q, k, v = (rng.standard_normal((1, n, 1100, 48)).astype(numpy_dtype(dtype)) for n in (4, 2, 2))
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=48, dtype=codes, capacity=1200)
    cache.append(0, k, v)
    pages, scales = np.zeros((2, 70, 16, 2, 48), numpy_dtype(codes)), np.zeros((2, 70, 16, 2), np.float32)
    table = rng.permutation(70)[None, :69]
    sl.append_paged(*pages, table, [0], k, v, k_scales=scales[0], v_scales=scales[1])
    coded = Coded(*pages, *scales, table, [1100])
    for n in (1, 60):
        for options in ({"mask": sl.window(70, 0)}, {"dropout": 0.5, "seed": 3}):
            want = cache.attend(0, q[:, :, -n:], return_lse=True, **options)
            got = coded.attended(q[:, :, -n:], sl.attention_paged, return_lse=True, **options)
            assert [x.tobytes() for x in got] == [x.tobytes() for x in want], (n, options)


@pytest.mark.parametrize("codes", FORMATS)
def test_the_reference_is_exact(rng, codes):
    """It is attention() of codes times scales in float64, whatever the layout."""
    coded = made(rng, codes, ("tokens", "channels"), [20, 33])
    q = rng.standard_normal((2, 4, 3, 33))
    float32 = q.astype(np.float32)
    want = [
        sl.reference.attention(float32[i : i + 1].astype(np.float64), *coded.sequence(i), causal=True) for i in (0, 1)
    ]
    got = coded.attended(float32, sl.reference.attention_paged, causal=True)
    assert np.allclose(got, np.concatenate(want), rtol=1e-13, atol=0)
    packed = float32.swapaxes(1, 2).reshape(6, 4, 33)
    options = {"layout": "lhd", "cu_seqlens_q": [0, 3, 6], "causal": True}
    for attend, exact in ((sl.reference.attention_paged, True), (sl.attention_paged, False)):
        turned = coded.attended(packed, attend, **options).reshape(2, 3, 4, 33 + 7).swapaxes(1, 2)
        assert np.allclose(turned, got, rtol=1e-13 if exact else 1e-4, atol=0 if exact else 1e-5)
    blhd = coded.attended(float32.swapaxes(1, 2), sl.reference.attention_paged, layout="blhd", causal=True)
    assert (blhd.swapaxes(1, 2) == got).all()


@pytest.mark.parametrize("kinds", [("number", "tensor"), ("tokens", "heads"), ("channels", "channels")])
@pytest.mark.parametrize("codes", FORMATS)
def test_tensors_have_the_bits_of_arrays(rng, codes, kinds):
    """Of every kind, also again, with the lengths and the table of another step."""
    coded = made(rng, codes, kinds, [100, 40])

    def tensor(x: Any) -> Any:
        if isinstance(x, float):
            return x
        return torch.from_numpy(np.asarray(x).view(np.uint8)).view(getattr(torch, codes)) if x.itemsize == 1 else (
            torch.from_numpy(np.asarray(x))
        )  # fmt: skip

    q = rng.standard_normal((2, 4, 1, 33)).astype(np.float32)
    theirs = coded._replace(**{n: tensor(getattr(coded, n)) for n in ("k", "v", "k_scales", "v_scales")})
    for lengths in ([100, 40], [99, 38], [3, 1]):
        want = coded._replace(lengths=lengths).attended(q, sl.attention_paged)
        for _ in range(2):
            got = theirs._replace(lengths=lengths).attended(torch.from_numpy(q), sl.attention_paged)
            assert got.numpy().tobytes() == want.tobytes()
        forget()
        assert coded._replace(lengths=lengths).attended(q, sl.attention_paged).tobytes() == want.tobytes()


@pytest.mark.parametrize("kinds", [("number", "number"), ("tensor", "tokens"), ("tokens", "heads")])
def test_scales_are_read_anew(rng, kinds):
    """Changed in place, or other arrays at other addresses: the call that is kept is the same, its result is not."""
    forget()
    coded = made(rng, "int8", kinds, [100, 40])
    q = rng.standard_normal((2, 4, 1, 33)).astype(np.float32)
    first = coded.attended(q, sl.attention_paged)
    assert coded.attended(q, sl.attention_paged).tobytes() == first.tobytes()
    others = [2.0 * x if isinstance(x, float) else np.array(2.0 * x, np.float32, order="K") for x in coded[2:4]]
    twice = coded._replace(k_scales=others[0], v_scales=others[1])
    want = twice.attended(q, sl.reference.attention_paged)
    assert_within(twice.attended(q, sl.attention_paged), want, twice.bounds(q[:1], 0).out.max() + np.zeros(want.shape))
    for x in coded[2:4]:
        if isinstance(x, np.ndarray):
            x *= np.float32(2.0)
    changed = coded._replace(**{n: 2.0 * getattr(coded, n) for n in ("k_scales", "v_scales") if kinds[0] == "number"})
    assert changed.attended(q, sl.attention_paged).tobytes() == twice.attended(q, sl.attention_paged).tobytes()


def test_sequences_that_share_pages_have_their_own_bits(rng):
    """Taken together or alone, in any batch, at any places."""
    coded = made(rng, "int8", ("tokens", "heads"), [1100, 1100, 700])
    coded.table[1, :64] = coded.table[0, :64]
    q = rng.standard_normal((3, 8, 1, 33)).astype(np.float32)
    for _ in range(3):
        together = coded.attended(q, sl.attention_paged)
        for i in range(3):
            alone = coded._replace(table=coded.table[i : i + 1], lengths=coded.lengths[i : i + 1])
            assert alone.attended(q[i : i + 1], sl.attention_paged).tobytes() == together[i : i + 1].tobytes()


def test_latents_have_one_kind_of_scales(rng):
    """Values are the first columns of keys, with their scales: of tokens and heads, or of channels."""
    for kind in ("number", "tokens", "channels"):
        coded = made(rng, "float8_e4m3fn", (kind, kind), [90], heads=1, dims=(48, 48))
        q = rng.standard_normal((1, 8, 2, 48)).astype(np.float32)
        places = coded.k, None, coded.table, coded.lengths
        got, want = (
            attend(q, *places, value_dim=32, k_scales=coded.k_scales)
            for attend in (sl.attention_paged, sl.reference.attention_paged)
        )
        keys = coded._replace(v=coded.k[..., :32], v_scales=coded.k_scales)
        if kind == "channels":
            keys = keys._replace(v_scales=coded.k_scales[:, :32])
        assert got.shape == (1, 8, 2, 32)
        assert_within(got, want, keys.bounds(q, 0).out)
        assert got.tobytes() == keys.attended(q, sl.attention_paged).tobytes()


@pytest.mark.parametrize("codes", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("queries", [1, 40])
def test_nan_and_infinity_are_what_they_are(rng, codes, queries):
    """A code that is NaN, or of e5m2 infinite, makes NaN of what sees it, and of nothing else."""
    coded = made(rng, codes, ("tokens", "number"), [60])
    q = rng.standard_normal((1, 4, queries, 33)).astype(np.float32)
    clean = coded.attended(q, sl.attention_paged, causal=True)
    for pages, value in ((coded.k, np.nan), (coded.v, np.nan), (coded.v, np.inf if codes[-1] == "2" else np.nan)):
        page, last = coded.table[0, 3], 60 - 1 - 48  # its last token
        held = pages[page, last, 1, 5]
        pages[page, last, 1, 5] = np.float32(value).astype(pages.dtype)
        got, want = (coded.attended(q, x, causal=True) for x in (sl.attention_paged, sl.reference.attention_paged))
        assert (np.isnan(got) == np.isnan(want)).all() and (np.isinf(got) == np.isinf(want)).all()
        assert not np.isfinite(got[0, 2:, -1]).all() and got[:, :2].tobytes() == clean[:, :2].tobytes()
        pages[page, last, 1, 5] = held


@pytest.mark.units
@pytest.mark.each("codes", "queries")
@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("queries", [1, 40])
def test_hidden_codes_and_scales_do_not_matter(isa, one_width, rng, codes, queries):
    """Whatever codes and scales hidden tokens have, NaN and negative ones among them."""
    coded = made(rng, codes, ("tokens", "tokens"), [60])
    q = rng.standard_normal((1, 4, queries, 33)).astype(np.float32)
    is_seen = rng.random(60) < 0.5
    seen = sl.table(is_seen)
    options: dict[str, Any] = {"mask": lambda b, h, i, j: seen[j]}
    clean = coded.attended(q, sl.attention_paged, **options)
    hidden = np.flatnonzero(~is_seen)
    at = coded.table[0, hidden // 16], hidden % 16
    for x in (coded.k, coded.v):
        x.view(np.uint8)[at] = rng.choice([0x7F, 0xFF, 0x7C, 0x80], x[at].shape)
    for x in (coded.k_scales, coded.v_scales):
        x[at] = rng.choice([np.nan, np.inf, -np.inf, -1.0], x[at].shape)
    assert coded.attended(q, sl.attention_paged, **options).tobytes() == clean.tobytes()


def test_calls_are_kept_by_what_scales_are_not_by_their_values(rng):
    forget()
    coded = made(rng, "int8", ("number", "tokens"), [100])
    q = rng.standard_normal((1, 4, 1, 33)).astype(np.float32)
    for number in (0.5, 0.25, np.float32(0.125)):
        coded._replace(k_scales=number).attended(q, sl.attention_paged)
    assert len(kept("paged")) == 1
    coded._replace(k_scales=np.ones(2, np.float32)).attended(q, sl.attention_paged)
    assert len(kept("paged")) == 2


def test_out_may_not_lie_in_scales(rng):
    coded = made(rng, "int8", ("tokens", "tokens"), [10], dims=(8, 8), heads=1)
    q = rng.standard_normal((1, 1, 1, 8)).astype(np.float32)
    out = coded.k_scales.swapaxes(1, 2).reshape(-1)[:8].reshape(1, 1, 1, 8)
    with pytest.raises(sl.ArgumentError, match="out: expected memory of its own; it overlaps k_scales"):
        coded.attended(q, sl.attention_paged, out=out)
    mine = np.zeros((1, 1, 1, 8), np.float32)
    for _ in range(2):
        assert coded.attended(q, sl.attention_paged, out=mine) is mine and mine.any()
