"""The GPU engine (R27): accuracy (R01), special values (R03), hidden data (R04), every mask; in Triton's interpreter, or on a GPU.

Blocks are made small where what is tested is how they join.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    import gpu_interpreter  # noqa: F401  (before Triton)

import triton  # noqa: F401
from conftest import FULL
from expressions import masks, scores
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import numpy_dtype, qkv
from test_forward import CASES, NAN
from tolerance import assert_within, plain

import speedlight as sl
from speedlight.gpu import launch
from speedlight.gpu.tiles import Row, Tile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "float16", "bfloat16")
SMALL = Tile(16, 16, 4, 1)


def tensor(x):
    """A NumPy array as a tensor of the engine's device."""
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(DEVICE)
    return torch.from_numpy(x).to(DEVICE)


@contextlib.contextmanager
def small_blocks(tile: Tile = SMALL):
    """Blocks of a few rows and keys, so that small problems have many."""
    before = launch.table_row
    launch.table_row = lambda *_: Row(512, tile, tile, tile, tile)
    try:
        yield
    finally:
        launch.table_row = before


def attention(q, k, v, **options):
    return sl.attention(*(tensor(x) for x in (q, k, v)), engine="cuda", **options)


def check(q, k, v, *, zeros_allowed=False, **options):
    """Against the oracle: shape, dtype, special values, and the bound for every element."""
    out, lse = attention(q, k, v, return_lse=True, **options)
    assert str(out.dtype) == f"torch.{q.dtype.name}"
    want, want_lse = sl.reference.attention(q, k, v, return_lse=True, **options)
    bounds = sl.reference.error_bound(q, k, v, tile=16, **options)
    assert_within(out.cpu(), want, bounds.out, "out", zeros_allowed=zeros_allowed)
    assert_within(lse.cpu(), want_lse, bounds.lse, "lse", zeros_allowed=True)
    return out, lse


def same(a, b):
    """The same bits, of NaN too."""
    return all(x.cpu().contiguous().view(torch.uint8).equal(y.cpu().contiguous().view(torch.uint8)) for x, y in zip(a, b, strict=True))


# --- accuracy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), [(1, 1), (2, 3), (16, 16), (17, 33), (64, 64), (80, 96), (130, 8), (192, 128), (512, 512)])
def test_every_dim(rng, dtype, d, dv):
    check(*qkv(rng, dtype, 1, 2, 1, 40, 70, d, dv), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (1, 1), (3, 127), (33, 64), (70, 129), (16, 600), (1, 1030)])
def test_every_length(rng, dtype, q_len, k_len):
    with small_blocks(Tile(32, 32, 4, 1)):
        for causal in (False, True, "top-left"):
            check(*qkv(rng, dtype, 2, 4, 2, q_len, k_len, 24, 20), causal=causal, zeros_allowed=True)


@pytest.mark.parametrize("seed", range(40 if FULL else 4))
def test_random_problems(seed):
    rng = np.random.default_rng(2000 + seed)
    for _ in range(25):
        dtype = str(rng.choice(DTYPES))
        d, dv = (int(rng.choice([1, 3, 8, 16, 17, 33, 64, 80])) for _ in range(2))
        q_len, k_len = int(rng.integers(0, 90)), int(rng.choice([0, 1, 2, 31, 32, 33, 100, 257]))
        kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
        size = min(float(rng.choice([0.1, 1, 3, 8])), 3.0 if dtype == "float16" else 8.0)
        q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, q_len, k_len, d, dv, size)
        options = {"causal": [False, True, "top-left"][rng.integers(3)]}
        if rng.random() < 0.3 and options["causal"] != "top-left":
            options["q_start"] = int(rng.integers(-50, k_len + 50))
        if rng.random() < 0.2:
            options["scale"] = float(rng.choice([-1, 0, 0.01, 2.5]))
        if rng.random() < 0.2:
            options["sink_logits"] = rng.standard_normal(kv_heads * group).tolist()
        with small_blocks(Tile(int(rng.choice([16, 32])), int(rng.choice([16, 32, 64])), 4, 1, bool(rng.random() < 0.5))):
            check(q, k, v, zeros_allowed=True, **options)


@pytest.mark.parametrize("precision", ["tf32x3", "tf32"])
def test_float32_products_by_tensor_cores(rng, precision):
    q, k, v = qkv(rng, "float32", 1, 2, 1, 40, 70, 24, 20)
    out = attention(q, k, v, causal=True, precision=precision)
    bound = sl.reference.error_bound(q, k, v, causal=True, tile=32, precision=precision)
    assert_within(out.cpu(), sl.reference.attention(q, k, v, causal=True), bound.out)


# --- special values and hidden data


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_special_values(dtype, rows, case):
    """`rows` heads of the same: 40 are too many for the decode path's block."""
    _, q, k, v, options, out, lse = case
    width = max(len(v[0]) if v else 1, 1)
    kind = numpy_dtype(dtype)
    q, k, v = (np.array(x, dtype=np.float64).reshape(1, 1, -1, w).astype(kind) for x, w in ((q, 1), (k, 1), (v, width)))
    q = np.repeat(q, 2 * rows, axis=1)
    if rows > 1:
        q = q.repeat(-(-66 // (q.shape[1] * q.shape[2])), axis=1)
    with small_blocks():
        got, got_lse = attention(q, k, v, return_lse=True, **options)
    want = np.broadcast_to(np.array(out)[None, None], got.shape)
    np.testing.assert_allclose(plain(got.cpu()), want, rtol=4 * sl.reference.ROUNDOFF[dtype], atol=0)
    if lse is not None:
        np.testing.assert_allclose(plain(got_lse.cpu()), np.broadcast_to(np.array(lse)[None, None], got_lse.shape), rtol=2e-6, atol=2e-6)


HIDING = {
    "causal": {"causal": True},
    "window": {"window": (9, 0)},
    "mask": {"mask": lambda b, h, i, j: (i * 7 + j * 3) % 5 != 0},
    "score": {"score": lambda s, b, h, i, j: sl.where((i + j) % 3 == 0, -np.inf, s)},
    "lengths": {"k_lengths": [20, 33]},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [3, 70])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("fill", [NAN, np.inf, 3e4])
def test_hidden_data_never_matter(rng, name, dtype, q_len, fill):
    """A key that one row does not see, though others do, may be anything to it."""
    q, k, v = qkv(rng, dtype, 2, 1, 1, q_len, 70, 16, 16)
    options = HIDING[name]
    weights = np.broadcast_to(sl.reference.weights(q, k, **options), (2, 1, q_len, 70))
    which = next(n for n in range(69, 0, -1) if not (weights[..., n] > 0).all())
    k2, v2 = k.copy(), v.copy()
    k2[:, :, which], v2[:, :, which] = fill, fill
    seen = weights[..., which] > 0
    with small_blocks(Tile(32, 16, 4, 1)):
        before, after = attention(q, k, v, **options).cpu(), attention(q, k2, v2, **options).cpu()
    hidden = torch.from_numpy(~seen)
    assert same([before[hidden]], [after[hidden]])
    if fill != 3e4 and seen.any():
        assert not torch.isfinite(after[~hidden].float()).any()


# --- masks and scores


@settings(max_examples=400 if FULL else 40, deadline=None)
@given(mask=st.none() | masks(), score=st.none() | scores(), causal=st.booleans(), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_random_expressions(mask, score, causal, dtype, seed):
    rng = np.random.default_rng(seed)
    q_len, k_len = int(rng.integers(1, 90)), int(rng.integers(1, 130))
    q, k, v = qkv(rng, dtype, 2, 4, 2, q_len, k_len, 8, 8)
    with small_blocks(), np.errstate(all="ignore"):
        check(q, k, v, mask=mask, score=score, causal=causal, q_start=int(rng.integers(0, 99)), zeros_allowed=True)
