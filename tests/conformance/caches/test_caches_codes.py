"""Caches of codes: codes and scales of the reference, and results inside the bound of what they stand for."""

from __future__ import annotations

import numpy as np
import pytest
from caches import OPTIONS, made
from conftest import FULL
from problems import CODES, decoded, numpy_dtype, qkv, quantise
from tolerance import assert_within, bounds_of_codes

import speedlight as sl
from speedlight.arrays import dtypes
from speedlight.cpu.memory import formats
from speedlight.cpu.memory.shape import Shape
from speedlight.host.machine import isa_named

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


@pytest.mark.units("codes")
@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (33, 40), (16, 5)] if FULL else [(33, 40)])
@pytest.mark.parametrize(
    ("codes", "options"),
    [*(("int8", x) for x in OPTIONS), *((y, x) for y in CODES[1:] for x in (OPTIONS if FULL else OPTIONS[3:]))],
)
def test_codes_against_the_oracle(isa, one_width, rng, codes, dtype, d, dv, options):
    """Codes and scales are numbers like any others: the result is inside the bound of them, of the unit's class."""
    q, k, v = qkv(rng, dtype, 1, 4, 2, 1300, 1300, d, dv)
    stored = [decoded(x, codes).astype(np.float64) for x in (k, v)]
    last = q if FULL else q[:, :, -60:]  # of which rows the reference is asked
    want, want_lse = sl.reference.attention(last.astype(np.float64), *stored, causal=True, return_lse=True, **options)
    bounds = bounds_of_codes(last, *(x.astype(np.float32) for x in stored), codes, causal=True, **options)
    whole = made(codes, d, dv).attend(0, q, k, v, return_lse=True, **options)
    assert whole[0].dtype == q.dtype
    assert_within(whole[0][:, :, -last.shape[2] :], want, bounds.out)
    assert_within(whole[1][:, :, -last.shape[2] :], want_lse, bounds.lse)


@pytest.mark.units
@pytest.mark.each("dtype", "codes", "heads")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 1), (3, 1), (5, 1), (7, 1), (3, 2), (2, 3)])
def test_a_task_of_any_number_of_heads(isa, one_width, rng, codes, dtype, heads, group):
    """One thread takes all heads at once: no head that fills up a group of them changes another's scores."""
    d, dv = 100, 70  # keys and values have several scales
    q, k, v = qkv(rng, dtype, 1, heads * group, heads, 35, 35, d, dv)
    cache = made(codes, d, dv, kv_heads=heads)
    sl.set_threads(1)
    steps = [cache.attend(0, *(x[:, :, n : n + 1] for x in (q, k, v)), return_lse=True) for n in range(35)]
    out, lse = (np.concatenate(x, axis=2) for x in zip(*steps, strict=True))
    stored = cache.keys(0), cache.values(0)
    want, want_lse = sl.reference.attention(
        q.astype(np.float64), *(x.astype(np.float64) for x in stored), causal=True, return_lse=True
    )
    bounds = bounds_of_codes(q, *stored, codes, causal=True)
    assert_within(out, want, bounds.out)
    assert_within(lse, want_lse, bounds.lse)


@pytest.mark.units("codes")
@pytest.mark.each("codes", "dtype")
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dropout_drops_the_weights_of_the_reference(isa, one_width, rng, codes, dtype):
    """Values of ones, a column for each key, are exact as codes and show every weight: the same ones are 0. Values of
    any numbers are inside the bound. Of few rows and of many.
    """
    n, ones = 96, np.eye(96, dtype=np.float32)[None, None].repeat(2, 1)
    q, k, v = qkv(rng, dtype, 1, 4, 2, n, n, 33, 40)
    for values, dv in ((ones.astype(v.dtype), n), (v, 40)):
        cache = made(codes, 33, dv)
        cache.append(0, k, values)
        stored = cache.keys(0), cache.values(0)
        exact = [x.astype(np.float64) for x in stored]
        for rows, dropout, seed in ((1, 0.5, 11), (70, 0.3, 2**63 + 5)):
            last, options = q[:, :, -rows:], {"dropout": dropout, "seed": seed}
            got = cache.attend(0, last, q_lengths=[rows], return_lse=True, **options)
            want = sl.reference.attention(last.astype(np.float64), *exact, return_lse=True, **options)
            bounds = bounds_of_codes(last, *stored, codes, **options)
            assert_within(got[0], want[0], bounds.out)
            assert_within(got[1], want[1], bounds.lse)
            if dv == n:
                assert ((stored[1] == 1) == (ones == 1)).all() and np.count_nonzero(stored[1]) == 2 * n
                weights = sl.reference.weights(last.astype(np.float64), exact[0], **options)
                kept = weights > 1e-6  # below them a weight may round to 0
                assert (got[0][weights == 0] == 0).all() and (got[0][kept] != 0).all()
                assert 0.8 * dropout < (weights[:, :, :, :20] == 0).mean() < 1.2 * dropout or rows == 1


@pytest.mark.units("codes")
@pytest.mark.parametrize(
    ("codes", "dtype"), [*((x, y) for x in CODES for y in ("float32", "bfloat16")), ("bfloat16", "bfloat16")]
)
def test_keys_that_are_dropped_and_hidden_do_not_matter(isa, one_width, rng, codes, dtype):
    """NaN and huge numbers that a mask hides change no bit, whether dropout drops them or not; of few rows and many.

    NaN as a value of bfloat16 shows any mark that is lost: the codes of a token that is NaN are 0.
    """
    n, is_seen = 150, rng.random(150) < 0.5
    seen = sl.table(is_seen)
    q, k, v = qkv(rng, dtype, 1, 4, 2, n, n, 33, 40)
    found: list[list[bytes]] = []
    for values in (None, (np.nan, 3e4), (np.inf, np.nan)):
        new = [x.copy() for x in (k, v)]
        for x, value in zip(new, values or (), strict=False):
            x[:, :, ~is_seen] = value
        cache = made(codes, 33, 40)
        cache.append(0, *new)
        options = {"mask": lambda b, h, i, j: seen[j], "dropout": 0.5, "seed": 3}
        outs = [cache.attend(0, q[:, :, -rows:], q_lengths=[rows], **options) for rows in (1, 3, 70)]
        assert all(np.isfinite(x.astype(np.float32)).all() and x.any() for x in outs)
        found.append([x.tobytes() for x in outs])
    assert found[0] == found[1] == found[2]


def test_the_table_is_of_every_format():
    """Each row has its class, and no names, or tensors on a GPU, are those of two."""
    assert set(formats.FORMATS) == {*dtypes.STORAGE_BYTES, *CODES}
    names = [x for row in dtypes.CODES.values() for x in (*row.spellings, *row.elsewhere)]
    for each in (names, dtypes.ON_GPU.values()):
        assert len(set(each)) == len(each)


def test_elements_of_parts_of_bytes_are_refused(monkeypatch):
    monkeypatch.setattr(formats.FORMATS["int8"], "bits", 6, raising=False)
    with pytest.raises(ValueError, match="int8: expected elements of whole bytes; got 6 bits"):
        print(Shape("decode", isa_named("avx2"), "f32", cached=True, quantised="int8").stored_bytes)


@pytest.mark.parametrize("codes", CODES)
def test_codes_are_as_near_as_their_format_says(rng, codes):
    x = rng.standard_normal((1, 1, 500, 64)).astype(np.float32)
    size = dtypes.CODES[codes].block or 64  # which share a scale
    off, of = (np.abs(y).reshape(500, -1, size).max(axis=-1) for y in (decoded(x, codes).astype(np.float64) - x, x))
    off = off / of
    assert dtypes.CODES[codes].error / 2 < off.max() <= dtypes.CODES[codes].error * (1 + 2.0**-20)


@pytest.mark.parametrize(("codes", "dropout"), [*((x, {}) for x in CODES), ("int8", {"dropout": 0.9, "seed": 1})])
def test_rows_that_no_scale_fits(isa, rng, codes, dropout):
    """Zeros, tiny and huge numbers are kept as well as can be; NaN and infinity make NaN of exactly the rows that see
    them, dropped or not.
    """
    q, k, v = qkv(rng, "float32", 1, 4, 2, 40, 40, 16, 16)
    k[0, 0, 3], v[0, 1, 4], k[0, 1, 5], v[0, 0, 6] = 0, 0, 1e-42, 3e38
    cache = made(codes)
    assert np.isfinite(cache.attend(0, q, k, v)).all()
    for which, value in ((0, np.nan), (0, np.inf), (1, np.nan), (1, -np.inf)):
        bad = [k.copy(), v.copy()]
        bad[which][0, 1, 20, 7] = value
        for chunks in ([40], [1] * 40):
            cache, at, outs = made(codes), 0, []
            for n in chunks:
                outs.append(cache.attend(0, *(x[:, :, at : at + n] for x in (q, *bad)), **dropout))
                at += n
            out = np.concatenate(outs, axis=2)
            nan = np.isnan(out).all(axis=-1)
            assert nan[0, 2:, 20:].all() and not nan[0, :2].any() and not nan[0, :, :20].any()
            assert (np.isnan(out).any(axis=-1) == nan).all()


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_those_of_the_reference(rng, kind):
    """All codes, what is half way between two, and the numbers beside that; rows that no scale fits."""
    every = np.arange(256, dtype=np.uint8).view(numpy_dtype(kind)).astype(np.float32)
    last = np.float32(np.nanmax(every))
    every = np.unique(every[np.abs(every) <= last])
    middle = (every[1:] + every[:-1]) / 2
    x = np.concatenate([every, middle, *(np.nextafter(middle, np.float32(way)) for way in (-np.inf, np.inf))])
    x = np.concatenate([x, -x[::-1]])
    rows = [x * np.float32(2.0**n) for n in (-130, -126, -9, 0, 7, 110)]  # a scale is that power of two
    rows += [rng.standard_normal(x.size).astype(np.float32) * np.float32(10.0**n) for n in range(-44, 38, 3)]
    rows += [np.where(np.arange(x.size) == 9, np.float32(bad), x) for bad in (np.nan, np.inf, -np.inf)]
    rows += [np.zeros_like(x), np.full_like(x, 1e-44), np.full_like(x, 3.4e38)]
    tokens = np.stack(rows)[None, None]
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=x.size, capacity=len(rows), dtype=kind)
    cache.append(0, tokens, tokens)
    want = quantise(tokens, kind)
    for stored in cache._storage.parts(0, [len(rows)]):
        assert [part.tobytes() for part in stored] == [part.tobytes() for part in want]
    if dtypes.CODES[kind].is_packed:
        return  # test_four_bits_are_those_of_ggml() has what these are
    codes, scales = (part[0, 0].astype(np.float32) for part in want)
    assert np.isnan(scales).sum() == 3 and (codes[3, : len(every)] == every).all()
    assert len(set(every.tolist())) == {"int8": 255, "float8_e4m3fn": 253}[kind]
    fits = (scales > 0)[:, 0]
    sized = fits & np.isfinite(scales[:, 0])
    assert (scales[sized] == np.abs(np.stack(rows)[sized]).max(axis=-1, keepdims=True) / last).all()
    ratios = np.clip(np.stack(rows)[fits] / scales[fits], -last, last)
    assert (codes[fits] == (np.rint(ratios) if kind == "int8" else ratios.astype(numpy_dtype(kind)))).all()
    with pytest.raises(sl.ArgumentTypeError, match="x: expected float32, float16 or bfloat16, which an? "):
        sl.reference.quantise(np.zeros((2, 3)), kind)


def ggml_rows(x):
    """Rows of 32 numbers as quantize_row_q4_0_ref() of ggml computes them: codes and scales, number by number."""
    codes, scales = np.zeros_like(x), np.zeros(len(x), np.float32)
    for row, to, n in zip(x, codes, range(len(x)), strict=True):
        size = largest = np.float32(0)
        for y in row:
            if size < abs(y):
                size, largest = abs(y), y
        d = largest / np.float32(-8)
        factor = np.float32(1) / d if d else np.float32(0)
        to[:] = [min(15, int(np.float32(y * factor) + np.float32(8.5))) - 8 for y in row]
        scales[n] = d.astype(np.float16)
    return codes, scales


def test_four_bits_are_those_of_ggml(rng):
    """Of numbers whose scales float16 has, to the bit; signs of zero among them."""
    rows = [rng.standard_normal((200, 32)) * 10.0 ** rng.integers(-5, 5, (200, 1)), rng.integers(-8, 9, (100, 32)) / 3]
    rows += [
        rng.choice([-1.0, 1.0], (50, 32)),
        np.zeros((1, 32)),
        np.full((1, 32), -0.0),
        np.full((1, 32), 8 * 65519.0),
    ]
    x = np.concatenate(rows).astype(np.float32)
    codes, scales = quantise(x, "int4")
    want, want_scales = ggml_rows(x)
    assert codes.astype(np.float32).tobytes() == (want + 0).tobytes()
    assert scales[:, 0].tobytes() == want_scales.astype(np.float16).tobytes() and np.signbit(scales[350:352]).all()
    whole = rng.standard_normal((5, 75)).astype(np.float32)  # the last block is shorter: as if zeros followed
    codes, scales = quantise(whole, "int4")
    for at, n in ((0, 32), (32, 32), (64, 11)):
        part = np.zeros((5, 32), np.float32)
        part[:, :n] = whole[:, at : at + n]
        want, want_scales = ggml_rows(part)
        assert (codes[:, at : at + n].astype(np.float32) == want[:, :n]).all()
        assert (scales[:, at // 32] == want_scales.astype(np.float16)).all()


@pytest.mark.parametrize("exponent", [*range(-40, -6, 3), 12, 17, 18, 19, 20, 60, 127])
def test_scales_of_four_bits_that_float16_has_not(rng, exponent):
    """Scales below its normal numbers are off by 2^-25 at most; numbers past eight times its largest are that."""
    x = (rng.uniform(-1, 1, (300, 32)) * 2.0**exponent).astype(np.float32)
    stored, scales = (y.astype(np.float64) for y in quantise(x, "int4"))
    assert np.isfinite(scales).all() and not stored[scales[:, 0] == 0].any()
    largest = np.abs(x).astype(np.float64).max(axis=1, keepdims=True)
    off, error = np.abs(stored * scales - x), dtypes.CODES["int4"].error
    assert (off <= np.maximum(error * largest, largest / 8 + 8 * 2.0**-25)).all() or exponent > 18
    past = largest[:, 0] >= 8 * 65520
    assert (np.abs(scales[past, 0]) == 65504).all() and past.any() == (exponent > 18)
    inside = np.abs(x) <= 7.5 * 65504
    assert (off[past] <= np.where(inside[past], 65504 / 2, np.abs(x[past]) - 7 * 65504)).all()


@pytest.mark.parametrize("codes", CODES)
def test_numbers_next_to_the_largest_are_given_back_in_silence(codes):
    """A code times its scale may be rounded past the largest float32."""
    x = np.full((1, 1, 2, 40), np.finfo(np.float32).max)
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=40, capacity=2, dtype=codes)
    cache.append(0, x, x)
    with np.errstate(all="raise"):
        assert (cache.keys(0) > 0).all() and (cache.values(0) > 0).all()


def test_blocks_of_four_bits_with_nan_are_nan_alone(rng):
    x = rng.standard_normal((1, 1, 3, 80)).astype(np.float32)
    x[0, 0, 0, 40], x[0, 0, 1, 79], x[0, 0, 2, 0] = np.nan, np.inf, -np.inf
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=80, capacity=3, dtype="int4")
    cache.append(0, x, x)
    for y in (cache.keys(0), cache.values(0), decoded(x, "int4")):
        assert np.isnan(y[0, 0, :, [0, 31, 32, 63, 64, 79]]).T.tolist() == [
            [False, False, True, True, False, False], [False] * 4 + [True] * 2, [True] * 2 + [False] * 4
        ]  # fmt: skip


def test_four_bits_stay_on_the_cpu():
    pytest.importorskip("triton")
    for of, room in ((sl.KVCache, {"capacity": 8}), (sl.PagePool, {"pages": 1, "page_size": 16})):
        with pytest.raises(sl.UnsupportedError, match=r"dtype: expected .* on a GPU; got int4|expected a CUDA device"):
            of(layers=1, kv_heads=1, head_dim=8, dtype="int4", device="cuda", **room)
