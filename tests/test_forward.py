"""The CPU engine: accuracy (R01), special values (R03), hidden data (R04), one arithmetic (R05), layouts (R10)."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import FULL
from problems import DIMS, DTYPES, LENGTHS, far_scores, numpy_dtype, qkv, random_problem, without_far_scores
from tolerance import assert_accurate, assert_within, plain

import speedlight as sl
from speedlight.machine import current_isa

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("d", "dv"), DIMS)
def test_every_dim(isa, rng, dtype, d, dv):
    assert_accurate(*qkv(rng, dtype, 1, 2, 1, 50, 140, d, dv), causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "k_len"), LENGTHS)
def test_every_length(isa, rng, dtype, q_len, k_len):
    for causal in (False, True, "top-left"):
        assert_accurate(*qkv(rng, dtype, 2, 4, 2, q_len, k_len, 24, 20), causal=causal, zeros_allowed=True)


@pytest.mark.parametrize("seed", range(100 if FULL else 4))
def test_random_problems(seed):
    rng = np.random.default_rng(1000 + seed)
    for _ in range(100 if FULL else 40):
        arrays, options = random_problem(rng)
        assert_accurate(*arrays, zeros_allowed=True, **options)


@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_random_problems_on_every_unit(isa, seed):
    rng = np.random.default_rng(5000 + seed)
    for _ in range(100 if FULL else 40):
        arrays, options = random_problem(rng)
        assert_accurate(*arrays, zeros_allowed=True, **options)


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


# --- R03: special values. Rows of (what, q, k, v, options, out, lse); one head, shapes from the lists
ONE = [[1.0]]
CASES = [
    ("one key", ONE, ONE, [[3.0]], {}, [[3.0]], [1.0]),
    ("negative zero value", ONE, ONE, [[-0.0]], {}, [[0.0]], [1.0]),
    ("zero query", [[0.0]], [[5.0], [7.0]], [[1.0], [3.0]], {}, [[2.0]], [np.log(2)]),
    ("negative zero query", [[-0.0]], [[5.0], [7.0]], [[1.0], [3.0]], {}, [[2.0]], [np.log(2)]),
    ("no keys", [[1.0], [2.0]], [], [], {}, [[0.0], [0.0]], [-INF, -INF]),
    ("row before every key", [[1.0], [2.0]], ONE, [[3.0]], {"causal": True}, [[0.0], [3.0]], [-INF, 2.0]),
    ("q_start far below", ONE, ONE, [[3.0]], {"causal": True, "q_start": -100}, [[0.0]], [-INF]),
    (
        "q_start far above",
        ONE,
        [[1.0], [1.0]],
        [[3.0], [5.0]],
        {"causal": True, "q_start": 10**9},
        [[4.0]],
        [1 + np.log(2)],
    ),
    ("keys after the query", ONE, ONE, [[3.0]], {"causal": True, "q_start": 1023, "k_start": 1024}, [[0.0]], [-INF]),
    ("keys at the query", ONE, ONE, [[3.0]], {"causal": True, "q_start": 1024, "k_start": 1024}, [[3.0]], [1.0]),
    ("scale zero", [[9.0]], [[5.0], [7.0]], [[1.0], [3.0]], {"scale": 0.0}, [[2.0]], [np.log(2)]),
    ("negative scale", [[1.0]], [[0.0], [1000.0]], [[1.0], [3.0]], {"scale": -1.0}, [[1.0]], [0.0]),
    ("score -inf is hidden", ONE, [[-INF], [1.0]], [[NAN], [3.0]], {}, [[3.0]], [1.0]),
    ("all scores -inf", ONE, [[-INF], [-INF]], [[1.0], [3.0]], {}, [[0.0]], [-INF]),
    ("score +inf", ONE, [[INF], [1.0]], [[1.0], [3.0]], {}, [[NAN]], [NAN]),
    ("nan query", [[NAN], [1.0]], ONE, [[3.0]], {}, [[NAN], [3.0]], [NAN, 1.0]),
    ("inf query", [[INF], [1.0]], ONE, [[3.0]], {}, [[NAN], [3.0]], [NAN, 1.0]),
    ("nan key", ONE, [[NAN], [1.0]], [[1.0], [3.0]], {}, [[NAN]], [NAN]),
    ("all keys nan", ONE, [[NAN], [NAN]], [[1.0], [3.0]], {}, [[NAN]], [NAN]),
    ("nan value", ONE, [[1.0], [1.0]], [[NAN, 1.0], [3.0, 1.0]], {}, [[NAN, 1.0]], [1 + np.log(2)]),
    ("inf value", ONE, [[1.0], [1.0]], [[INF, 1.0], [3.0, 1.0]], {}, [[INF, 1.0]], [1 + np.log(2)]),
    ("-inf value", ONE, [[1.0], [1.0]], [[-INF, 1.0], [3.0, 1.0]], {}, [[-INF, 1.0]], [1 + np.log(2)]),
    ("both infinities", ONE, [[1.0], [1.0]], [[INF, 1.0], [-INF, 1.0]], {}, [[NAN, 1.0]], [1 + np.log(2)]),
    ("inf value of no weight", [[2000.0]], [[1.0], [0.0]], [[1.0], [INF]], {}, [[NAN]], [2000.0]),
    ("hidden nan key", [[1.0], [1.0]], [[1.0], [NAN]], [[3.0], [5.0]], {"causal": True}, [[3.0], [NAN]], [1.0, NAN]),
    (
        "hidden nan value",
        [[1.0], [1.0]],
        [[1.0], [1.0]],
        [[3.0], [NAN]],
        {"causal": True},
        [[3.0], [NAN]],
        [1.0, 1 + np.log(2)],
    ),
    (
        "hidden inf value",
        [[1.0], [1.0]],
        [[1.0], [1.0]],
        [[3.0], [INF]],
        {"causal": True},
        [[3.0], [INF]],
        [1.0, 1 + np.log(2)],
    ),
    ("all logits below -5e4", [[-300.0]], [[200.0], [200.0]], [[1.0], [3.0]], {}, [[2.0]], [-60000 + np.log(2)]),
    ("f16 scores above 65504", [[300.0]], [[300.0], [300.0]], [[1.0], [3.0]], {}, [[2.0]], [90000 + np.log(2)]),
    ("far apart", [[100.0]], [[100.0], [-100.0]], [[1.0], [3.0]], {}, [[1.0]], [10000.0]),
    (
        "pair half hidden",
        [[1.0], [1.0], [1.0]],
        [[1.0], [1.0], [1.0]],
        [[1.0], [2.0], [NAN]],
        {"causal": True},
        [[1.0], [1.5], [NAN]],
        None,
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_special_values(isa, dtype, case):
    _, q, k, v, options, out, lse = case
    width = max(len(v[0]) if v else 1, 1)
    kind = numpy_dtype(dtype)
    q, k, v = (np.array(x, dtype=np.float64).reshape(1, 1, -1, w).astype(kind) for x, w in ((q, 1), (k, 1), (v, width)))
    got, got_lse = sl.attention(q, k, v, return_lse=True, **options)
    want = np.array(out)[None, None]
    np.testing.assert_allclose(plain(got), want, rtol=4 * sl.reference.ROUNDOFF[dtype], atol=0)
    assert not np.signbit(plain(got)[want == 0]).any()
    if lse is not None:
        np.testing.assert_allclose(plain(got_lse), np.array(lse)[None, None], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 1.84e19),
        ("float32", 1e19),
        ("float32", 1e5),
        ("bfloat16", 1.84e19),
        ("bfloat16", 1e19),
        ("bfloat16", 3e4),
        ("float64", 1.34e154),
        ("float64", 1e154),
        ("float64", 1e9),
    ],
)
def test_huge_logits_stay_finite(isa, dtype, size):
    """Scores of 3.4e38 (1.8e308): the largest weight is exactly 1, whatever rounding does to the product."""
    kind = numpy_dtype(dtype)
    for factor in np.linspace(0.3, 1.0, 23):
        q = np.full((1, 1, 3, 1), size * factor).astype(kind)
        k = (np.array([1.0, -1.0, 0.5, 0.97]) * size).reshape(1, 1, 4, 1).astype(kind)
        v = np.array([7.0, 1, 2, 3]).reshape(1, 1, 4, 1).astype(kind)
        k[0, 0, 3] = -k[0, 0, 3]
        for scale in (1.0, 0.37, -1.0):
            out = plain(sl.attention(q, k, v, scale=scale))
            assert (out == (7.0 if scale > 0 else 1.0)).all(), (factor, scale, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [2, 60])
def test_any_finite_score(isa, rng, dtype, q_len):
    arrays = qkv(rng, dtype, 1, 2, 1, q_len, 1300, 16, 16)
    dot = current_isa().product("bf16") == "pairs" and dtype == "bfloat16"
    for far, every in itertools.product(far_scores(dtype), (1, 3)):
        score = lambda s, b, h, i, j, far=far, every=every: s + sl.where(j % every == 0, far, 0)  # noqa: E731
        out, lse = sl.attention(*arrays, score=score, return_lse=True)
        same = without_far_scores(*arrays, far, every)
        want = sl.reference.attention(*same)
        assert_within(out, want, sl.reference.error_bound(*same, dot=dot).out)
        exact, exact_lse = sl.reference.attention(*arrays, score=score, return_lse=True)
        np.testing.assert_allclose(exact, want, rtol=1e-9, atol=1e-12)
        assert_within(lse, exact_lse, sl.reference.error_bound(*arrays, score=score, dot=dot).lse, "lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_finite_score_everywhere(rng, dtype):
    """Arrays of them, several at once, sinks; caches, pools and packed sequences have the same bits."""
    q, k, v = qkv(rng, dtype, 1, 2, 2, 40, 40, 16, 16)
    most = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    number = np.float64 if dtype == "float64" else np.float32
    zeros = np.zeros_like(q)
    dot = current_isa().product("bf16") == "pairs" and dtype == "bfloat16"
    mean, bound = sl.reference.attention(zeros, k, v), sl.reference.error_bound(zeros, k, v, dot=dot).out
    whole, half = (np.full((40, 40), x, number) for x in (-most, -most / 2))
    assert_within(sl.attention(q, k, v, score=whole), mean, bound)
    assert_within(sl.attention(q, k, v, score=[half, half]), mean, bound)
    out, lse = sl.attention(q, k, v, score=[whole, whole], return_lse=True)  # the sum is -inf, and that is hidden
    assert not plain(out).any() and (plain(lse) == -INF).all()
    assert (sl.reference.attention(q, k, v, score=[whole, whole]) == 0).all()
    out, lse = sl.attention(q, k, v, sink_logits=[most, -most], return_lse=True)
    assert not plain(out)[:, 0].any() and np.isfinite(plain(lse)).all()
    assert (out[:, 1] == sl.attention(q, k, v)[:, 1]).all()

    score = lambda s, b, h, i, j: s - 0.99 * most  # noqa: E731
    want = sl.attention(q, k, v, score=score, causal=True)
    bound = sl.reference.error_bound(zeros, k, v, dot=dot, causal=True).out
    assert_within(want, sl.reference.attention(zeros, k, v, causal=True), bound)
    sizes = {"kv_heads": 2, "head_dim": 16, "value_dim": 16, "dtype": dtype}
    cache = sl.KVCache(layers=1, batch=1, capacity=64, **sizes)
    pool = sl.PagePool(layers=1, pages=4, page_size=16, **sizes)
    packed, sequences = [x[0].swapaxes(0, 1) for x in (q, k, v)], [pool.sequence()]
    for low, high in ((0, 39), (39, 40)):
        here = [x[:, :, low:high] for x in (q, k, v)]
        assert cache.attend(0, *here, score=score).tobytes() == want[:, :, low:high].tobytes()
        out = pool.attend(0, sequences, *(x[low:high] for x in packed), new_lengths=[high - low], score=score)
        assert out.swapaxes(0, 1).tobytes() == want[0, :, low:high].tobytes()
    out = sl.attention(*packed, layout="lhd", cu_seqlens_q=[0, 40], cu_seqlens_k=[0, 40], score=score, causal=True)
    assert out.swapaxes(0, 1).tobytes() == want[0].tobytes()


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


# --- R04


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
def test_hidden_data_never_matter(isa, rng, dtype, poison):
    q, k, v = qkv(rng, dtype, 1, 2, 1, 70, 300, 18, 21)
    clean = sl.attention(q, k, v, causal=True, q_start=90)
    poison = min(poison, 6e4) if dtype == "float16" else poison
    k[:, :, 160:], v[:, :, 160:] = poison, poison
    wide = [np.full((*x.shape[:-1], 64), poison).astype(x.dtype) for x in (q, k, v)]
    for w, x in zip(wide, (q, k, v), strict=True):
        w[..., 5 : 5 + x.shape[-1]] = x
    views = [w[..., 5 : 5 + x.shape[-1]] for w, x in zip(wide, (q, k, v), strict=True)]
    assert clean.tobytes() == sl.attention(*views, causal=True, q_start=90).tobytes()


# --- R05


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_is_padded(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 210, 400, 20, 24)
    cu_q, cu_k = [0, 0, 17, 210], [0, 30, 150, 400]
    packed = [x[0].transpose(1, 0, 2) for x in (q, k, v)]
    out, lse = sl.attention(
        *packed, layout="lhd", cu_seqlens_q=cu_q, cu_seqlens_k=np.array(cu_k, np.int32), causal=True, return_lse=True
    )
    assert out.shape == (210, 4, 24) and lse.shape == (4, 210)
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        alone, alone_lse = sl.attention(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], causal=True, return_lse=True)
        assert np.ascontiguousarray(out[a:b].transpose(1, 0, 2)).tobytes() == alone[0].tobytes()
        assert np.ascontiguousarray(lse[:, a:b]).tobytes() == alone_lse[0].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_every_vector_unit_has_the_same_bits(rng, dtype, monkeypatch):
    from speedlight.machine import host_isas

    q, k, v = qkv(rng, dtype, 1, 3, 1, 130, 1200, 36, 40, 2.0)
    seen = set()
    for level in host_isas():
        monkeypatch.setenv("SPEEDLIGHT_ISA", level.name)
        out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
        seen.add((out.tobytes(), lse.tobytes()))
    assert len(seen) == 1


def test_widened_bf16_has_the_same_bits_on_every_unit_without_the_dot(rng, monkeypatch):
    from speedlight.machine import host_isas

    q, k, v = qkv(rng, "bfloat16", 1, 3, 1, 130, 1200, 36, 40, 2.0)
    seen = set()
    for level in host_isas():
        if level.product("bf16") != "pairs":
            monkeypatch.setenv("SPEEDLIGHT_ISA", level.name)
            seen.add(sl.attention(q, k, v, causal=True).tobytes())
    assert len(seen) == 1


# --- R10


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_and_strides(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 2, 4, 2, 60, 150, 34, 34)
    want = sl.attention(q, k, v, causal=True)
    blhd = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (q, k, v)]
    assert (
        want.tobytes()
        == np.ascontiguousarray(sl.attention(*blhd, causal=True, layout="blhd").transpose(0, 2, 1, 3)).tobytes()
    )
    backwards = [x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1] for x in (q, k, v)]
    apart = [np.repeat(np.repeat(x, 2, axis=3), 3, axis=2)[:, :, ::3, ::2] for x in (q, k, v)]
    columns = [np.asfortranarray(x) for x in (q, k, v)]
    unaligned = []
    for x in (q, k, v):
        raw = np.empty(x.nbytes + 1, np.uint8)[1:].view(np.uint8)
        y = np.ndarray(x.shape, x.dtype, raw.data)
        y[...] = x
        unaligned.append(y)
    for arrays in (backwards, apart, columns, unaligned):
        for x in arrays:
            x.flags.writeable = False
        assert want.tobytes() == sl.attention(*arrays, causal=True).tobytes()
    broadcast = sl.attention(q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape))
    assert broadcast[1].tobytes() == sl.attention(q[1:], k[:1], v[:1])[0].tobytes()


def test_fused_qkv_and_out(isa, rng):
    fused = rng.standard_normal((2, 50, 3, 4, 16)).astype(np.float32)
    q, k, v = (fused[:, :, i] for i in range(3))
    before = fused.copy()
    out = np.full((2, 50, 4, 32), NAN, np.float32)[..., ::2]
    got = sl.attention(q, k, v, layout="blhd", out=out)
    assert got is out and np.isnan(out.base if out.base is not None else out).sum() == out.size
    assert out.tobytes() == sl.attention(*(x.copy() for x in (q, k, v)), layout="blhd").tobytes()
    assert (fused == before).all()


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

    class Pack:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__()

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    for wrap in (Interface, Pack):
        assert sl.attention(*(wrap(x) for x in (q, k, v))).tobytes() == want.tobytes()
    assert sl.attention(*(Pack(x) for x in halves)).tobytes() == sl.attention(*as_numpy).tobytes()
