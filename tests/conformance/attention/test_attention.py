"""What `sl.attention` means, told once for every engine: accuracy (R01), special values (R03), hidden data (R04).

Here on the CPU's vector units; test_units.py has one that no CPU has, test_gpu_attention.py the GPU.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from conftest import FULL
from problems import (
    PATTERNS,
    far_scores,
    numpy_dtype,
    qkv,
    random_problem,
    without_far_scores,
)
from tolerance import assert_within, plain

import speedlight as sl

NAN, INF = float("nan"), float("inf")


# --- accuracy


@pytest.mark.units("dtype")
@pytest.mark.each("dtype", "dims")
def test_every_dim(engine, rng, dtype, dims):
    engine.check(*qkv(rng, dtype, 1, 2, 1, 50, engine.keys, *dims), causal=True)


@pytest.mark.units("lengths")
@pytest.mark.each("dtype", "lengths")
def test_every_length(engine, rng, dtype, lengths):
    with engine.blocks():
        for causal in (False, True, "top-left"):
            engine.check(*qkv(rng, dtype, 2, 4, 2, *lengths, 24, 20), causal=causal, zeros_allowed=True)


@pytest.mark.each("seed")
@pytest.mark.parametrize("seed", range(100 if FULL else 4))
def test_random_problems(engine, seed):
    rng = np.random.default_rng(1000 + seed)
    for _ in range((10 if engine.slow else 100) if FULL else (5 if engine.slow else 20)):
        arrays, options = random_problem(rng, engine.dtypes, engine.long)
        with engine.blocks():
            engine.check(*arrays, zeros_allowed=True, **options)


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


@pytest.mark.units("case", "dtype")
@pytest.mark.parametrize("as_many", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_special_values(engine, dtype, as_many, case):
    """For two heads, and every column of values 16 times: enough for what decodes."""
    _, q, k, v, options, out, lse = case
    width = max(len(v[0]) if v else 1, 1)
    kind = numpy_dtype(dtype)
    q, k, v = (np.array(x, dtype=np.float64).reshape(1, 1, -1, w).astype(kind) for x, w in ((q, 1), (k, 1), (v, width)))
    with engine.blocks(as_many=as_many):
        got, got_lse = engine.attention(q.repeat(2, axis=1), k, v.repeat(16, axis=3), return_lse=True, **options)
    want = np.broadcast_to(np.repeat(out, 16, axis=1), got.shape)
    np.testing.assert_allclose(plain(got), want, rtol=4 * sl.reference.ROUNDOFF[dtype], atol=0)
    assert not np.signbit(plain(got)[want == 0]).any()
    if lse is not None:
        most = engine.lse_error
        np.testing.assert_allclose(plain(got_lse), np.broadcast_to(np.array(lse), got_lse.shape), rtol=most, atol=most)


@pytest.mark.each("dtype", "q_len")
@pytest.mark.parametrize("q_len", [60, 2])
def test_any_finite_score(engine, rng, dtype, q_len):
    arrays = qkv(rng, dtype, 1, 2, 1, q_len, engine.long, 16, 16)
    for far, every in itertools.product(far_scores(dtype)[:: 1 + engine.slow], (1, 3)):
        score = lambda s, b, h, i, j, far=far, every=every: s + sl.where(j % every == 0, far, 0)  # noqa: E731
        out, lse = engine.attention(*arrays, score=score, return_lse=True)
        same = without_far_scores(*arrays, far, every)
        want = sl.reference.attention(*same)
        assert_within(out, want, engine.error_bound(*same).out)
        exact, exact_lse = sl.reference.attention(*arrays, score=score, return_lse=True)
        np.testing.assert_allclose(exact, want, rtol=1e-9, atol=1e-12)
        assert_within(lse, exact_lse, engine.error_bound(*arrays, score=score).lse, "lse")
    most = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    out, lse = engine.attention(*arrays, sink_logits=[most, -most], return_lse=True)
    assert not plain(out)[:, 0].any() and np.isfinite(plain(lse)).all()
    assert out[:, 1:].tobytes() == engine.attention(*arrays)[:, 1:].tobytes()


HUGE = {  # the first have products of 3.4e38, 1.8e308 and 65025
    "float32": (1.84e19, 1e19, 3e5),
    "bfloat16": (1.84e19, 1e19, 3e5),
    "float64": (1.34e154, 1e154, 1e9),
    "float16": (255.0, 200.0, 150.0),
}


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 40])
def test_huge_logits_stay_finite(engine, dtype, rows, which):
    """The largest score, and those that equal it, take all, whatever rounding does to the products."""
    kind, size = numpy_dtype(dtype), HUGE[dtype][which]
    for factor in np.linspace(0.3, 1.0, 2 if engine.slow else 23):
        q = np.full((1, 2, rows, 1), size * factor).astype(kind)
        k = (np.array([1.0, -1.0, 0.5, -0.97, 1.0]) * size).reshape(1, 1, 5, 1).astype(kind)
        v = np.array([7.0, 1, 2, 3, 5]).reshape(1, 1, 5, 1).astype(kind)
        for scale in (1.0, 0.37, -1.0):
            out = plain(engine.attention(q, k, v, scale=scale))
            assert (out == (6.0 if scale > 0 else 1.0)).all(), (factor, scale, out)


# --- R04: hidden data

HIDING = {
    "causal": {"causal": True},
    "window": {"window": (9, 0)},
    "mask": {"mask": lambda b, h, i, j: (i * 7 + j * 3) % 5 != 0},
    "score": {"score": lambda s, b, h, i, j: sl.where((i + j) % 3 == 0, -np.inf, s)},
    "lengths": {"k_lengths": [20, 33]},
}


@pytest.mark.each("dtype", "name", "q_len")
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("q_len", [70, 3])
def test_hidden_data_never_matter(engine, rng, dtype, name, q_len):
    """A key that one row does not see, though others do, may be anything to it."""
    q, k, v = qkv(rng, dtype, 2, 1, 1, q_len, 70, 16, 16)
    options = HIDING[name]
    seen = np.broadcast_to(sl.reference.weights(q, k, **options), (2, 1, q_len, 70)) > 0
    which = next(n for n in range(69, 0, -1) if not seen[..., n].all())
    with engine.blocks():
        before = engine.attention(q, k, v, **options)
        for fill in (NAN, INF, -INF, 3e4):
            k[:, :, which], v[:, :, which] = fill, fill
            after = engine.attention(q, k, v, **options)
            assert before[~seen[..., which]].tobytes() == after[~seen[..., which]].tobytes()
            if fill != 3e4:
                assert not np.isfinite(plain(after[seen[..., which]])).any()


# --- masks and scores


@pytest.mark.units
@pytest.mark.each("dtype", "name", "queries")
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(engine, rng, name, dtype, queries):
    q, k, v = qkv(rng, dtype, 2, 4, 2, queries, 2 * engine.keys, 17, 20)
    with engine.blocks():
        engine.check(q, k, v, **PATTERNS[name], zeros_allowed=name == "nothing")


# --- layouts


@pytest.mark.units("dtype")
@pytest.mark.each("dtype", "q_lengths")
@pytest.mark.parametrize("q_lengths", [[3, 70, 40], [40, 1, 0], [1, 2, 1]], ids=str)
def test_packed_is_padded_is_alone(engine, rng, dtype, q_lengths):
    """The same bits for a sequence packed, padded, or by itself, with heads before or after positions.

    Where decoding has bits of its own, a padded batch, which is not decoded, is inside the bound.
    """
    k_lengths = [33, 300, 40]
    each = [qkv(rng, dtype, 1, 4, 2, a, b, 20, 24) for a, b in zip(q_lengths, k_lengths, strict=True)]
    with engine.blocks():
        alone = [engine.attention(*x, causal=True, return_lse=True) for x in each]
        packed_and_padded(engine, each, alone, q_lengths, k_lengths)


def packed_and_padded(engine, each, alone, q_lengths, k_lengths):
    heads = each[0][0].shape[1]
    q, k, v = (np.concatenate([x[i][0].swapaxes(0, 1) for x in each]) for i in range(3))
    cu_q, cu_k = (np.cumsum([0, *x]).astype(np.int32) for x in (q_lengths, k_lengths))
    packed = {"layout": "lhd", "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True, "return_lse": True}
    out, lse = engine.attention(q, k, v, **packed)
    assert out.shape == (sum(q_lengths), heads, 24) and lse.shape == (heads, sum(q_lengths))
    for (a, b), (one, one_lse) in zip(itertools.pairwise(cu_q), alone, strict=True):
        assert out[a:b].swapaxes(0, 1).tobytes() == one[0].tobytes() and lse[:, a:b].tobytes() == one_lse[0].tobytes()
    room = [np.full((3, n, m, d), NAN).astype(q.dtype) for n, m, d in ((heads, 75, 20), (2, 310, 20), (2, 310, 24))]
    for i, x in enumerate(each):
        for whole, part in zip(room, x, strict=True):
            whole[i, :, : part.shape[2]] = part[0]
    padded = {"q_lengths": q_lengths, "k_lengths": k_lengths, "causal": True, "return_lse": True}
    for layout, axes in (("bhld", (0, 1, 2, 3)), ("blhd", (0, 2, 1, 3))):
        out, lse = engine.attention(*(x.transpose(axes) for x in room), layout=layout, **padded)
        out = out.transpose(axes)
        for i, n in enumerate(q_lengths):
            if engine.one_arithmetic:
                assert out[i, :, :n].tobytes() == alone[i][0][0].tobytes()
                assert lse[i, :, :n].tobytes() == alone[i][1][0].tobytes()
            else:
                want, bound = sl.reference.attention(*each[i], causal=True), engine.error_bound(*each[i], causal=True)
                assert_within(out[i : i + 1, :, :n], want, bound.out, zeros_allowed=True)
            assert not plain(out[i, :, n:]).any() and np.isneginf(plain(lse[i, :, n:])).all()
