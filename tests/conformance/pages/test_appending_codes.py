"""append_paged() into pages of codes: the codes and scales of the reference, where the table says and nowhere else.

The cases of vLLM's tests of caches with a scale for each token and head are here by their facts: sizes, shuffled slots,
places that stay as they are, how near numbers come back, and attention over what was stored.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from coded_pages import FORMATS, KINDS, Coded, made, scales_of
from conftest import FULL
from problems import numpy_dtype
from tolerance import assert_within

import speedlight as sl

PAIRS = [*zip(KINDS, KINDS[1:] + KINDS[:1], strict=True)]
if FULL:
    PAIRS = list(itertools.product(KINDS, KINDS))
AWKWARD = (np.nan, np.inf, -np.inf, -0.0, 1e-42, 3e38)


def wanted(rows: np.ndarray, scales: Any, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the reference's codes of a token's heads, (heads, dim), and scales that were found."""
    if np.ndim(scales) == 3:
        codes, found = sl.reference.quantise(rows, dtype)
        return codes, found[:, 0]
    given = np.asarray(scales, np.float32)
    return sl.reference.quantise(rows, dtype, scales=given[:, None] if given.ndim == 1 else given)[0], None


@pytest.mark.units("codes")
@pytest.mark.each("codes", "kinds", "dtype", "layout")
@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("kinds", PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
def test_codes_are_the_references(isa, rng, codes, kinds, dtype, layout):
    """Of every kind of scales, in pages of any strides, of rows of any length; NaN, infinities and zeros among them."""
    lengths, counts = [3, 0, 9], [7, 5, 0]
    for (d, dv), size, is_odd in (((64, 64), 4, False), ((21, 40), 17, True)):
        step = 1 + is_odd
        k_pages, v_pages = (np.full((9, size, 3, x * step), 1, numpy_dtype(codes))[..., ::step] for x in (d, dv))
        scales = [scales_of(rng, kind, x.shape, 0.02) for kind, x in zip(kinds, (k_pages, v_pages), strict=True)]
        k, v = (rng.standard_normal((3, 3, 7, x)).astype(numpy_dtype(dtype)) for x in (d, dv))
        for x, places in ((k, range(6)), (v, range(6))):
            with np.errstate(over="ignore"):
                x[0, 0, places, 3] = np.float32(AWKWARD).astype(x.dtype)
        v[1, 2, 3], k[1, 1, 2] = 0, 200.0
        table = [[4, 0, 2], [3, 1, 8], [7, 6, 5]]
        before = [(x.copy(), np.array(given)) for x, given in zip((k_pages, v_pages), scales, strict=True)]
        new = k, v
        if layout == "blhd":
            new = k.swapaxes(1, 2), v.swapaxes(1, 2)
        elif layout == "lhd":
            new = tuple(np.concatenate([x[i, :, :n].swapaxes(0, 1) for i, n in enumerate(counts)]) for x in (k, v))
        options = {"k_scales": scales[0], "v_scales": scales[1], "layout": layout, "new_lengths": counts}
        assert sl.append_paged(k_pages, v_pages, table, lengths, *new, **options) == [10, 5, 9]
        for pages, rows, given, (old, old_scales) in zip((k_pages, v_pages), (k, v), scales, before, strict=True):
            for item, n in enumerate(counts):
                for i in range(n):
                    place = table[item][(lengths[item] + i) // size], (lengths[item] + i) % size
                    code, found = wanted(rows[item, :, i], given, codes)
                    assert np.array_equal(pages[place].astype(np.float32), code, equal_nan=True)
                    old[place] = pages[place]
                    if found is not None:
                        assert np.array_equal(given[place], found, equal_nan=True)
                        old_scales[place] = found
            assert pages.tobytes() == old.tobytes() and np.array_equal(given, old_scales, equal_nan=True)


@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("kind", ["number", "tensor", "heads", "channels"])
def test_scales_that_are_given_have_either_sign(rng, codes, kind):
    """A number is a code times any finite scale but 0: codes of a negative one have the other sign. NaN makes 0."""
    pages = np.zeros((2, 4, 16, 3, 48), numpy_dtype(codes))
    scales = [scales_of(rng, kind, pages[0].shape, -0.02) for _ in range(2)]
    if np.ndim(scales[0]):
        scales[0].flat[:2], scales[1].flat[0] = (0.0, np.nan), -0.0
        scales[0].flat[2] *= -1
    new = rng.standard_normal((2, 1, 3, 40, 48)).astype(np.float32)
    new[:, 0, :, 0, :6] = AWKWARD
    sl.append_paged(*pages, [[2, 0, 3]], [0], *new, k_scales=scales[0], v_scales=scales[1])
    for x, found, given in zip(new, pages, scales, strict=True):
        stored = found[[2, 0, 3]].reshape(48, 3, 48)[:40].astype(np.float32)
        for i in range(40):
            assert np.array_equal(stored[i], wanted(x[0, :, i], given, codes)[0], equal_nan=True)
        factors = np.broadcast_to(np.asarray(given, np.float32)[..., None] if kind == "heads" else given, (3, 48))
        limits = 127 if codes == "int8" else 448
        inside = np.isfinite(x[0]) & (np.abs(x[0]) <= 0.9 * limits * np.abs(factors)[:, None])
        error = np.abs(stored.swapaxes(0, 1) * factors[:, None] - x[0])
        assert inside.any() and (error <= 0.03 + np.abs(x[0]) / 8)[inside & (factors != 0)[:, None]].all()


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_found_scales_are_a_caches(rng, codes):
    """Tokens that are stored with a scale for each token and head are, to the bit, those of a cache of codes."""
    k, v = (rng.standard_normal((1, 2, 40, 48)).astype(np.float32) for _ in range(2))
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=48, dtype=codes, capacity=64)
    cache.append(0, k, v)
    pages, scales = np.zeros((2, 4, 16, 2, 48), numpy_dtype(codes)), np.zeros((2, 4, 16, 2), np.float32)
    sl.append_paged(*pages, [[2, 0, 3]], [0], k, v, k_scales=scales[0], v_scales=scales[1])
    for x, codes_of, scale in zip((cache.keys(0), cache.values(0)), pages, scales, strict=True):
        numbers = codes_of.astype(np.float32) * scale[..., None]
        assert numbers[[2, 0, 3]].reshape(48, 2, 48)[:40].swapaxes(0, 1).tobytes() == x[0].tobytes()


@pytest.mark.each("tokens", "heads", "dim")
@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("tokens", [1, 7, 42])
@pytest.mark.parametrize("heads", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_tokens_come_back_from_any_slots(rng, codes, tokens, heads, dim):
    """bfloat16 tokens, each in a sequence of its own at some slot of a page of 16: within a tenth of what they were,
    with the scale of their largest magnitude; all other slots stay as they are.
    """
    count = -(-tokens // 16) + 4
    slots = rng.permutation(count * 16)[:tokens]
    table, lengths = np.stack([slots // 16], axis=1), (slots % 16).tolist()
    k, v = (rng.standard_normal((tokens, heads, dim)).astype(numpy_dtype("bfloat16")) for _ in range(2))
    pages = np.zeros((2, count, 16, heads, dim), numpy_dtype(codes))
    scales = np.ones((2, count, 16, heads), np.float32)
    new = [torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for x in (k, v)]
    their_pages = [torch.from_numpy(x.view(np.uint8)).view(getattr(torch, codes)) for x in pages]
    theirs = [torch.from_numpy(x) for x in scales]
    sl.append_paged(*their_pages, table, lengths, *new, layout="lhd", k_scales=theirs[0], v_scales=theirs[1])
    largest = {"int8": 127, "float8_e4m3fn": 448}[codes]
    for x, page, scale in zip((k, v), pages, scales, strict=True):
        found = page.astype(np.float32) * scale[..., None]
        rows = x.astype(np.float32)
        assert np.allclose(found.reshape(-1, heads, dim)[slots], rows, atol=0.1, rtol=0.1)
        assert np.allclose(scale.reshape(-1, heads)[slots], np.abs(rows).max(-1) / largest, rtol=1e-6)
        rest = (
            np.delete(page.reshape(-1, heads, dim), slots, axis=0),
            np.delete(scale.reshape(-1, heads), slots, axis=0),
        )
        assert not rest[0].astype(np.float32).any() and (rest[1] == 1).all()


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
def test_padding_is_not_stored(rng, codes):
    """Of four tokens two count: their slots change, and no others."""
    pages, scales = np.zeros((2, 2, 16, 2, 64), numpy_dtype(codes)), np.ones((2, 2, 16, 2), np.float32)
    x = rng.standard_normal((1, 2, 4, 64)).astype(np.float32)
    sl.append_paged(*pages, [[0, 1]], [0], x, x, new_lengths=[2], k_scales=scales[0], v_scales=scales[1])
    for page, scale in zip(pages, scales, strict=True):
        assert page[0, :2].astype(np.float32).any(axis=-1).all() and (scale[0, :2] != 1).all()
        assert not page[0, 2:].astype(np.float32).any() and not page[1].astype(np.float32).any()
        assert (scale[0, 2:] == 1).all() and (scale[1] == 1).all()


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("lengths", [[128], [64, 32]])
def test_decoding_over_what_was_stored(rng, codes, lengths):
    """4 heads of 128, pages of 16: inside the bound of codes times scales, and near attention over the tokens."""
    pages, scales = np.zeros((2, 20, 16, 4, 128), numpy_dtype(codes)), np.zeros((2, 20, 16, 4), np.float32)
    table = rng.permutation(20)[: 8 * len(lengths)].reshape(len(lengths), 8)
    x = rng.standard_normal((2, len(lengths), 4, max(lengths), 128)).astype(np.float32)
    sl.append_paged(*pages, table, [0] * len(lengths), *x, new_lengths=lengths, k_scales=scales[0], v_scales=scales[1])
    coded = Coded(*pages, *scales, table, lengths)
    q = rng.standard_normal((len(lengths), 4, 1, 128)).astype(np.float32)
    got, want = (
        coded.attended(q, attend, causal=True) for attend in (sl.attention_paged, sl.reference.attention_paged)
    )
    for item, n in enumerate(lengths):
        at = slice(item, item + 1)
        assert_within(got[at], want[at], coded.bounds(q[at], item, causal=True).out)
        near = sl.reference.attention(q[at], x[0][at, :, :n], x[1][at, :, :n])
        assert np.abs(got[at] - near).max() < 0.05


def test_whole_rows_of_latents(rng):
    """Without pages of values a row is a latent and its rotary part, with one scale."""
    pages, scales = np.zeros((3, 16, 1, 72), np.int8), np.zeros((3, 16, 1), np.float32)
    rows = rng.standard_normal((1, 1, 20, 72)).astype(np.float32)
    sl.append_paged(pages, None, [[2, 0]], [0], rows, k_scales=scales)
    codes, found = sl.reference.quantise(rows[0, 0], "int8")
    assert (pages[[2, 0]].reshape(32, 72)[:20] == codes).all() and (scales[[2, 0]].reshape(32, 1)[:20] == found).all()
    for given in (0.02, np.float32([0.02]), np.full((1, 72), 0.02, np.float32)):
        sl.append_paged(pages, None, [[1]], [0], rows[:, :, :16], k_scales=given)
        assert (pages[1, :, 0] == sl.reference.quantise(rows[0, 0, :16], "int8", scales=0.02)[0]).all()


def test_new_tokens_may_lie_in_the_scales_that_are_written(rng):
    """What is read is read before anything is written over it."""
    scales = rng.standard_normal((4, 16, 2)).astype(np.float32)
    x = scales.reshape(-1)[:64].reshape(1, 2, 2, 16)
    want, other = np.zeros((2, 4, 16, 2, 16), np.int8), [np.zeros((4, 16, 2), np.float32) for _ in range(2)]
    sl.append_paged(*want, [[0]], [0], x.copy(), x.copy(), k_scales=other[0], v_scales=other[1])
    got = np.zeros_like(want)
    sl.append_paged(*got, [[0]], [0], x, x, k_scales=scales, v_scales=other[1])
    assert got.tobytes() == want.tobytes() and (scales[0, :2] == other[0][0, :2]).all()


def test_versions_of_tensors_that_are_written_rise():
    """Scales of tokens are written as pages are; scales of heads are read."""
    pages = torch.zeros(2, 2, 4, 2, 8, dtype=torch.int8)
    found, given, x = torch.ones(2, 4, 2), torch.ones(2), torch.ones(1, 2, 3, 8)
    before = [t._version for t in (pages, found, given)]
    sl.append_paged(*pages, [[0]], [0], x, x, k_scales=found, v_scales=given)
    risen = [t._version > n for t, n in zip((pages, found, given), before, strict=True)]
    assert risen == [True, True, False]


def test_a_call_that_is_refused_has_written_nothing(rng):
    coded = made(rng, "int8", ("tokens", "tokens"), [16, 3], dims=(16, 16))
    held = [np.array(x) for x in coded[:4]]
    x = rng.standard_normal((2, 2, 3, 16)).astype(np.float32)
    scales = {"k_scales": coded.k_scales, "v_scales": coded.v_scales}
    with pytest.raises(sl.CacheFull, match="3 new ones need room"):
        sl.append_paged(coded.k, coded.v, coded.table[:, :1], [16, 3], x, x, **scales)
    with pytest.raises(sl.ArgumentError, match="block_table: expected pages from 0"):
        sl.append_paged(coded.k, coded.v, coded.table, [16, 15], x, x, **scales)
    assert all(np.array_equal(a, b) for a, b in zip(held, coded[:4], strict=True))
