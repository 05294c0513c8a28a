"""The CPU engine, beside what test_attention.py tells of every engine: rounding to no side (R01), subnormals
(R03), hidden data (R04), one arithmetic (R05), strides (R10).
"""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import FULL, differing_units
from problems import DTYPES, PATTERNS, Pack, numpy_dtype, qkv
from tolerance import assert_within, plain

import speedlight as sl
from speedlight.host.machine import current_isa, host_isas

NAN, INF = float("nan"), float("inf")


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_tied_maxima_are_not_biased(isa, rng, dtype):
    """Equal keys: every weight is the same, so rounding must not lean to one side (mean signed error <= 0.1 u M)."""
    k = np.repeat(rng.standard_normal((1, 1, 1, 32)), 4096, axis=2).astype(numpy_dtype(dtype))
    q = rng.standard_normal((1, 1, 64, 32)).astype(numpy_dtype(dtype))
    v = (np.exp2(rng.uniform(-4, 4, 512)) * (rng.random((1, 1, 4096, 512)) + 0.5)).astype(
        numpy_dtype(dtype)
    )  # means of any size
    got = plain(sl.attention(q, k, v))
    want = sl.reference.attention(q, k, v)
    bias = ((got - want) / want).mean() / sl.reference.ROUNDOFF[dtype]
    assert abs(bias) <= 0.1  # M = |out| here, because v is positive


# --- special values


@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32"])
def test_arrays_of_any_finite_score(rng, dtype):
    """Arrays of them, and several at once."""
    q, k, v = qkv(rng, dtype, 1, 2, 2, 40, 40, 16, 16)
    most = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    number = np.float64 if dtype == "float64" else np.float32
    zeros = np.zeros_like(q)
    dot = current_isa().dot(dtype)
    mean, bound = sl.reference.attention(zeros, k, v), sl.reference.error_bound(zeros, k, v, dot=dot).out
    whole, half = (np.full((40, 40), x, number) for x in (-most, -most / 2))
    assert_within(sl.attention(q, k, v, score=whole), mean, bound)
    assert_within(sl.attention(q, k, v, score=[half, half]), mean, bound)
    out, lse = sl.attention(q, k, v, score=[whole, whole], return_lse=True)  # the sum is -inf, and that is hidden
    assert not plain(out).any() and (plain(lse) == -INF).all()
    assert (sl.reference.attention(q, k, v, score=[whole, whole]) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maxima_that_are_large_without_hidden_keys(rng, dtype):
    """A row's own maximum decides whether its exponents are clamped, not what the rows beside it see."""
    n, number = 80, numpy_dtype(dtype)  # the last 16 rows are a vector; any past it repeat the last row
    exponents = -(2.0**23) - rng.uniform(2, 50, (20, 1, n, 1))
    exponents[:, :, -1] = -(2.0**23) + 2  # only the last row sees a maximum that is not large
    k, v = (exponents * np.log(4)).astype(number), rng.standard_normal((20, 1, n, 1)).astype(number)
    q = np.ones_like(k)
    out, lse = sl.attention(q, k, v, causal=True, scale=1.0, return_lse=True)
    for i in (60, *range(64, n)):
        alone = sl.attention(q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1], causal=True, scale=1.0, return_lse=True)
        assert (alone[0] == out[:, :, [i]]).all() and (alone[1] == lse[:, :, [i]]).all(), i


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_vanish_of_keys_that_the_last_vector_alone_sees(rng, dtype):
    """Its own maxima tell how they are weighed: such keys are too far below these for the fast loop, not below those of
    the queries before.
    """
    n, number, low = 96, numpy_dtype(dtype), -800 if dtype == "float64" else -100  # whole panels, of 2 or 3 vectors
    v = rng.standard_normal((3, 1, n, 16)).astype(number)
    q, k = np.ones((2, 3, 1, n, 1), number)
    k[0, :, 89::2], k[1, :, 80:], k[2, :, 95], q[:, :, :80] = low, low, -low, low
    out, lse = sl.attention(q, k, v, causal=True, scale=1.0, return_lse=True)
    for i in range(76, n):
        alone = sl.attention(q[:, :, [i]], k[:, :, : i + 1], v[:, :, : i + 1], scale=1.0, return_lse=True)
        assert (alone[0] == out[:, :, [i]]).all() and (alone[1] == lse[:, :, [i]]).all(), i


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_rows_weigh_as_many_do_at_the_ends_of_what_is_usual(isa, rng, dtype):
    """Whole tiles take a fast loop in the decode kernel, others one that looks at each score; the bits are the same."""
    number, least = numpy_dtype(dtype), -511 if dtype == "float64" else -63
    n, ends = 384, (0.0, 1.0, np.nan, np.inf, -np.inf, least, least - 1, least * (1 - 1e-6), least * (1 + 1e-6), -1e5)
    exponents = -rng.random((40, 1, n, 1)) * 3
    for item in range(1, 40):  # at one key of each tile, or two; a tile's largest may be below the tile's before
        places = rng.integers(0, 128, 3) + np.array([0, 128, 256])
        exponents[item, 0, places, 0] = rng.choice(ends, 3)
        exponents[item, 0, 128:256] += rng.choice([0, -40, 5])
    exponents[20:] += rng.choice([0, 2.0**22, 2.0**23 - 2, 2.0**23 + 2, -(2.0**23) + 2, 1e30], (20, 1, 1, 1))
    k, v = (exponents * np.log(4)).astype(number), rng.standard_normal((40, 1, n, 16)).astype(number)
    q = np.ones((40, 1, 48, 1), number)
    for options in ({}, {"causal": True, "q_start": n - 47}, {"k_lengths": [n - x for x in range(40)]}):
        starts = {"q_start": options["q_start"] + 45} if "q_start" in options else {}
        many = sl.attention(q, k, v, scale=1.0, return_lse=True, **options)
        few = sl.attention(q[:, :, 45:], k, v, scale=1.0, return_lse=True, **options | starts)
        for a, b in zip(many, few, strict=True):
            assert np.array_equal(a[:, :, 45:], b, equal_nan=True), options


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_subnormals_survive(isa, dtype):
    tiny = np.finfo(dtype).smallest_subnormal
    q = k = np.ones((1, 1, 4, 2), dtype)
    v = np.full((1, 1, 4, 3), 8 * tiny, dtype)
    torch.set_flush_denormal(True)
    try:
        out = sl.attention(q, k, v)
    finally:
        torch.set_flush_denormal(False)
    assert (
        out == 8 * tiny
    ).all()  # after the reset: a flushing comparison would find them equal to 0, and 0 equal to them


# --- R05


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_however_it_is_cut(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 3, 4, 2, 200, 1300, 40, 24)
    whole = sl.attention(q, k, v, causal=True)
    for threads in range(1, 9):
        sl.set_threads(threads)
        assert whole.tobytes() == sl.attention(q, k, v, causal=True).tobytes()
    sl.set_threads(None)
    for cuts in ([0, 1, 2, 50, 99, 200], [0, 37, 38, 100, 163, 200], list(range(0, 201, 8))):
        parts = [sl.attention(q[:, :, a:b], k, v, causal=True, q_start=1100 + a) for a, b in itertools.pairwise(cuts)]
        assert whole.tobytes() == np.ascontiguousarray(np.concatenate(parts, axis=2)).tobytes()
    for i in (0, 55, 199):  # decode: the cache holds just what the row sees
        row = sl.attention(q[:, :, i : i + 1], k[:, :, : 1101 + i], v[:, :, : 1101 + i], causal=True)
        assert whole[:, :, i : i + 1].tobytes() == row.tobytes()
    for b in range(3):
        assert (
            whole[b : b + 1].tobytes() == sl.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True).tobytes()
        )
    for h in range(4):
        one = sl.attention(q[:, h : h + 1], k[:, h // 2 : h // 2 + 1], v[:, h // 2 : h // 2 + 1], causal=True)
        assert whole[:, h : h + 1].tobytes() == one.tobytes()


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*((x, {"causal": True}) for x in DTYPES), ("float32", PATTERNS["all"])],
    ids=[*DTYPES, "all"],
)
def test_every_vector_unit_has_the_same_bits(one_width, rng, dtype, options, monkeypatch):
    """Of bfloat16 every unit without the dot."""
    q, k, v = qkv(rng, dtype, 1, 4, 1, 130, 400 if "mask" in options else 1200, 36, 40, 2.0)
    seen = set()
    for level in host_isas() if dtype == "bfloat16" else differing_units():
        if not level.dot(dtype):
            monkeypatch.setenv("SPEEDLIGHT_ISA", level.name)
            out, lse = sl.attention(q, k, v, return_lse=True, **options)
            seen.add((out.tobytes(), lse.tobytes()))
    assert len(seen) == 1


# --- R10


def test_kinds_of_arrays(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 20, 30, 8, 8)
    want = sl.attention(q, k, v)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    for _ in range(2):  # first call, then the memoised one
        got, lse = sl.attention(*tensors, return_lse=True)
        assert (
            isinstance(got, torch.Tensor) and isinstance(lse, torch.Tensor) and got.numpy().tobytes() == want.tobytes()
        )
    halves = [x.bfloat16() for x in tensors]
    got = sl.attention(*halves)
    assert got.dtype is torch.bfloat16
    as_numpy = [x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in halves]
    assert got.view(torch.int16).numpy().tobytes() == sl.attention(*as_numpy).tobytes()

    class Interface:
        def __init__(self, x):
            self.__array_interface__, self.keep = x.__array_interface__, x

    for wrap in (Interface, Pack):
        assert sl.attention(*(wrap(x) for x in (q, k, v))).tobytes() == want.tobytes()
    assert sl.attention(*(Pack(x) for x in halves)).tobytes() == sl.attention(*as_numpy).tobytes()
