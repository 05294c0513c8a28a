"""Dropout: the random numbers, the weights that they drop, and that these are the same wherever a row is computed."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from conftest import FULL
from problems import DTYPES, numpy_dtype, qkv
from repeated import forget
from tolerance import assert_accurate

import speedlight as sl
from speedlight.cpu.language import philox as on_vectors
from speedlight.cpu.language.vector import I64, PTR, Module, vec
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime.compile import compile_ir
from speedlight.host.llvm import load
from speedlight.host.machine import host_isas
from speedlight.problem import philox

pytestmark = pytest.mark.usefixtures("one_width")  # test_attention.py has dropout in panels of any width

# --- the random numbers

# of Random123: counter, key, words
KNOWN = (
    ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_known_answers(counter, key, words):
    assert tuple(int(x) for x in philox.philox(counter, key)) == words


def emitted(isa, storage):
    """A function that stores words of each lane's counter, then which of them stay."""
    s, module = Shape("forward", isa, storage, 1), Module("words")
    names = ("out", "keep", "i", "h"), ("b", "quad", "count", "seed", "drop_below")
    k = module.function("words", dict.fromkeys(names[0], PTR) | dict.fromkeys(names[1], I64), public=True)
    p, lanes = k.p, s.lanes
    i, h = (k.load(vec(I64, lanes), p[n]) for n in ("i", "h"))
    with k.range(0, p["count"]) as n:
        words = on_vectors.philox(k, (p["b"], h, i, p["quad"] + n), p["seed"], lanes)
        for w, (word, keep) in enumerate(zip(words, on_vectors.keeps(k, words, p["drop_below"]), strict=True)):
            at = (n * 4 + w) * (lanes * 4)
            k.store(word, p["out"], at)
            k.store(k.zext(keep, s.ivector if not s.wide else word.type), p["keep"], at)
    k.finish()
    code = load([compile_ir(s, str(module))], ["words"])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 5)
    return code, call(code["words"]), lanes


@pytest.mark.units("storage")
@pytest.mark.parametrize("isa", host_isas(), ids=lambda x: x.name)
@pytest.mark.parametrize("storage", ["f32", "f64"])
def test_words_on_vectors(isa, storage):
    _code, run, lanes = emitted(isa, storage)
    i = np.array([(-1) ** n * (n * 99_999_999 + n) for n in range(lanes)], np.int64)
    h, quads = np.arange(lanes, dtype=np.int64) // 3, (1 << 30) - 17 + np.arange(32)
    for seed in (0, 1, 0xFEDCBA9876543210, 2**64 - 1):
        for b in (0, 7, 2**32 - 1):
            want = philox.philox((b, h[None], i[None], quads[:, None]), philox.key_of(seed))
            want = np.stack(np.broadcast_arrays(*want), axis=1)
            for below in (0, 1, philox.drop_below(0.3), 2**32 - 1, 2**32):
                words, keep = np.zeros((2, 32, 4, lanes), np.uint32)
                run(*(x.ctypes.data for x in (words, keep, i, h)), b, int(quads[0]), 32, seed, below)
                assert (words == want).all()
                assert (keep == (want >= below)).all()


def test_what_is_dropped_of_a_probability():
    assert philox.drop_below(0.0) == 0 and philox.drop_below(1.0) == 2**32
    assert philox.drop_below(2.0**-33) == 0 and philox.drop_below(1 - 2.0**-53) == 2**32 - 1
    assert philox.drop_below(0.1) == 429496729


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_words_are_fair_and_independent(p):
    """Shares of what stays, alone and of pairs of neighbours, within five standard deviations of their means."""
    rows, keys, heads = 1000 if FULL else 300, 10_000, 10 if FULL else 1  # 10^8 draws, or 3 * 10^6
    count = single = 0
    pairs = dict.fromkeys([(0, 1), (0, 4), (1, 0), (1, 1)], 0)
    last = None
    for h in range(heads):
        keep = philox.kept(p, 12345, 0, h, np.arange(rows), np.arange(keys))
        count, single = count + keep.size, single + int(keep.sum())
        for a, b in pairs:
            pairs[a, b] += int((keep[: rows - a, : keys - b] & keep[a:, b:]).sum())
        if last is not None:
            both, mean = (keep & last).mean(), (1 - p) ** 2
            assert abs(both - mean) < 5 * np.sqrt(mean * (1 - mean) / keep.size)
        last = keep
    assert abs(single / count - (1 - p)) < 5 * np.sqrt(p * (1 - p) / count)
    for (a, b), n in pairs.items():
        size, mean = heads * (rows - a) * (keys - b), (1 - p) ** 2
        # pairs that overlap vary more than as many that do not: by less than twice as much
        assert abs(n / size - mean) < 5 * np.sqrt(3 * mean * (1 - mean) / size), (a, b)


# --- which weights are dropped


def staying(dtype, batch, heads, group, q_len, k_len, **options):
    """[batch, q_heads, q_len, k_len]: the weights that are not 0, since the value of key j is 1 in column j alone."""
    kind = numpy_dtype(dtype)
    q, k = (np.zeros((batch, n, m, 16), kind) for n, m in ((heads, q_len), (heads // group, k_len)))
    v = np.broadcast_to(np.eye(k_len, dtype=np.float32).astype(kind), (batch, heads // group, k_len, k_len))
    return sl.attention(q, k, v, **options).astype(np.float64) != 0


@pytest.mark.units
@pytest.mark.each("dtype", "k_start")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("seed", "start", "k_start"),
    [(0, 0, 0), (2**64 - 1, -50, 1024), (1 << 32, 2**32 - 100, 2**32 - 2048), (7, 12, 2**31)],
)
def test_the_weights_that_keep_mask_tells(isa, dtype, seed, start, k_start):
    """In the forward kernel and in the decode kernel, of every item, head and place."""
    for q_len, k_len in ((70, 1100), (3, 1100), (1, 30)) if FULL else ((20, 300), (3, 1100)):
        found = staying(dtype, 2, 4, 2, q_len, k_len, dropout=0.3, seed=seed, q_start=start, k_start=k_start)
        assert found.any() and not found.all()
        i, j = range(start, start + q_len), range(k_start, k_start + k_len)
        for b, h in np.ndindex(2, 4):
            assert (found[b, h] == sl.reference.keep_mask(0.3, seed, b, h, i, j)).all(), (b, h)


def test_masks_and_tiles_that_begin_within_a_tile(isa):
    """A mask leaves parts of tiles out: what is dropped of the rest stays the same."""
    mask = sl.window(40, 0) | sl.prefix(3)
    for q_len in (70, 3):
        keep = staying("float32", 1, 2, 1, q_len, 700, dropout=0.4, seed=5, mask=mask)
        seen = staying("float32", 1, 2, 1, q_len, 700, mask=mask)
        for h in range(2):
            expected = sl.reference.keep_mask(0.4, 5, 0, h, range(700 - q_len, 700), range(700))
            assert (keep[0, h] == (seen[0, h] & expected)).all()


# --- results

PROBLEMS = (
    (1, 1, 3, 3, {}),
    (300, 1300, 40, 24, {"causal": True, "sink_logits": [0.0, 1.0, -np.inf, 3.0]}),
    (50, 129, 17, 33, {"window": (20, 3)}),
    (16, 1025, 64, 64, {"score": sl.softcap(3.0), "scale": -0.4}),
    (3, 2100, 64, 17, {"causal": True}),
    (2, 300, 33, 40, {"mask": sl.window(60, 0), "score": sl.alibi([0.1, 0.2, 0.3, 0.4])}),
)


@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_len", "k_len", "d", "dv", "options"), PROBLEMS)
def test_every_element_is_within_its_bound(isa, rng, dtype, q_len, k_len, d, dv, options):
    q, k, v = qkv(rng, dtype, 2, 4, 2, q_len, k_len, d, dv)
    for p in (0.1, 0.9):
        out, lse = assert_accurate(q, k, v, dropout=p, seed=99, zeros_allowed=True, **options)
        plain, all_of_it = sl.attention(q, k, v, return_lse=True, **options)
        assert lse.tobytes() == all_of_it.tobytes()  # of every weight
        assert k_len < 30 or out.tobytes() != plain.tobytes()


def test_the_bound_is_near():
    """Of the worst element, between a thousandth and the whole: dropout has not made it idle."""
    from tolerance import assert_within

    q, k, v = qkv(np.random.default_rng(3), "float32", 1, 2, 2, 200, 2000, 64, 64)
    options = {"dropout": 0.5, "seed": 1}
    for proven in (False, True):
        bounds = sl.reference.error_bound(q, k, v, proven=proven, **options)
        share = assert_within(sl.attention(q, k, v, **options), sl.reference.attention(q, k, v, **options), bounds.out)
        assert 1e-3 < share < 1


def test_weights_are_those_that_stay():
    q, k, v = qkv(np.random.default_rng(3), "float64", 2, 2, 1, 5, 40, 8, 8)
    options = {"causal": True, "dropout": 0.5, "seed": 11}
    weights = sl.reference.weights(q, k, **options)
    assert np.allclose(weights @ v, sl.reference.attention(q, k, v, **options), atol=1e-12)
    keep = sl.reference.keep_mask(0.5, 11, 1, 1, range(35, 40), range(40))
    assert (weights[1, 1] == sl.reference.weights(q, k, causal=True)[1, 1] * keep / 0.5).all()


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_dropout_costs_nothing(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 1, 2, 2, 60, 200, 16, 16)
    want, kernel = sl.attention(q, k, v), sl.plan(q, k, v).kernel
    for p, seed in ((0.0, None), (0, 3), (-0.0, "any"), (np.float32(0), None)):
        assert sl.attention(q, k, v, dropout=p, seed=seed).tobytes() == want.tobytes()
        assert sl.plan(q, k, v, dropout=p, seed=seed).kernel == kernel
    assert "_dropout_" in sl.plan(q, k, v, dropout=0.1, seed=0).kernel
    assert ", dropout 0.1" in str(sl.plan(q, k, v, dropout=0.1, seed=0))


@pytest.mark.each("dtype", "q_len")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [60, 2])
def test_the_ends_of_probability(isa, rng, dtype, q_len):
    q, k, v = qkv(rng, dtype, 1, 2, 2, q_len, 200, 16, 16)
    want, lse = sl.attention(q, k, v, return_lse=True)
    none, same = sl.attention(q, k, v, return_lse=True, dropout=1.0, seed=4)
    assert none.shape == want.shape and not none.astype(np.float64).any() and same.tobytes() == lse.tobytes()
    for least in (5e-324, 2.0**-60, 2.0**-33):
        out = sl.attention(q, k, v, dropout=least, seed=4)
        by = want.astype(np.float64) / (1 - least)
        assert np.abs(out.astype(np.float64) - by).max() <= 3e-16 if dtype == "float64" else (out == want).all()
    nearly = assert_accurate(q, k, v, dropout=1 - 2.0**-20, seed=4, zeros_allowed=True)
    assert np.isfinite(nearly[0].astype(np.float64)).all()


# --- the same bits everywhere


@pytest.mark.each("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_however_it_is_cut(isa, rng, dtype):
    q, k, v = qkv(rng, dtype, 2, 4, 2, 150, 1200, 33, 40)
    options = {"causal": True, "dropout": 0.25, "seed": 77}
    want, lse = sl.attention(q, k, v, return_lse=True, **options)
    for threads in (1, 3):
        sl.set_threads(threads)
        forget()
        assert sl.attention(q, k, v, **options).tobytes() == want.tobytes()
    for first, end in ((0, 1), (1, 4), (4, 60), (60, 150)):
        out, some = sl.attention(q[:, :, first:end], k, v, q_start=1050 + first, return_lse=True, **options)
        assert out.tobytes() == want[:, :, first:end].tobytes() and some.tobytes() == lse[:, :, first:end].tobytes()
    apart = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)]
    assert (sl.attention(*apart, layout="blhd", **options).swapaxes(1, 2) == want).all()
    packed = [x.reshape(-1, *x.shape[2:]) for x in apart]
    offsets = {"cu_seqlens_q": [0, 150, 300], "cu_seqlens_k": [0, 1200, 2400]}
    out = sl.attention(*packed, layout="lhd", **offsets, **options).reshape(apart[0].shape[:3] + (40,))
    assert (out.swapaxes(1, 2) == want).all()
    alone = [x[1:] for x in (q, k, v)]  # another item of the batch: other weights
    assert sl.attention(*alone, **options).tobytes() != want[1:].tobytes()
    assert sl.attention(*(x[:1] for x in (q, k, v)), **options).tobytes() == want[:1].tobytes()


def test_raw_pages(isa, rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 3, 64, 16, 16)
    pages = [x.swapaxes(1, 2).reshape(8, 16, 2, 16) for x in (k, v)]
    options = {"dropout": 0.5, "seed": 3}
    out = sl.attention_paged(q, *pages, [[0, 1, 2, 3], [4, 5, 6, 7]], [64, 64], causal=True, **options)
    assert out.tobytes() == sl.attention(q, k, v, causal=True, **options).tobytes()


# --- what is seen


@pytest.mark.each("dtype", "q_len")
@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32", "bfloat16"])
@pytest.mark.parametrize("q_len", [70, 2])
def test_hidden_keys_stay_absent_and_dropped_ones_do_not(isa, rng, dtype, q_len):
    """0 times NaN is NaN, as in PyTorch, where the key is visible."""
    q, k, v = qkv(rng, dtype, 1, 2, 2, q_len, 300, 16, 16)
    options = {"causal": True, "dropout": 0.9, "seed": 1}
    clean = sl.attention(q, k, v, **options)
    for at in (290, 299):
        bad = v.copy()
        bad[:, :, at] = np.nan
        out, seen = sl.attention(q, k, bad, **options), np.arange(300 - q_len, 300) >= at
        assert np.isnan(out[:, :, seen]).all() and out[:, :, ~seen].tobytes() == clean[:, :, ~seen].tobytes()
        mask = sl.expression(lambda b, h, i, j, at=at: j != at)
        hidden = sl.attention(q, k, bad, mask=mask, **options)
        assert hidden.tobytes() == sl.attention(q, k, v, mask=mask, **options).tobytes()
        assert (np.isnan(sl.reference.attention(q, k, bad, **options)) == np.isnan(out)).all()
