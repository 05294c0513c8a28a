"""key_weights() against the specification: every option, special values, what is hidden, and the bits of dv."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL
from problems import DTYPES, LENGTHS, PATTERNS, PLACES_AND_SCALES, Pack, qkv, random_problem
from tolerance import assert_within

import speedlight as sl
from speedlight import reference
from speedlight.host.machine import current_isa

NAN, INF = np.nan, np.inf
# of one chosen query or more, and in another order
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"reduce": "max"},
    {"queries": slice(-33, None)},
    {"queries": slice(3, -2), "reduce": "max"},
    {"rows": [-1, 0, -1]},
)


def lse_of(q: np.ndarray, k: np.ndarray, **options: Any) -> np.ndarray:
    """The log-sum-exps of a call, exact but for their dtype."""
    lse = reference.attention(q, k, k, return_lse=True, **options)[1]
    return lse.astype(np.float64 if q.dtype == np.float64 else np.float32)


def dv_of_ones(q: np.ndarray, k: np.ndarray, lse: np.ndarray, **options: Any) -> np.ndarray:
    """dv of values of one column, for an upstream gradient of 1 and each query head of each item alone."""
    heads = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    heads = np.ascontiguousarray(np.broadcast_to(heads, (len(q), *heads.shape[1:])))
    out = np.zeros((*q.shape[:-1], 1), q.dtype)
    values = np.ones((*heads.shape[:-1], 1), q.dtype)
    return sl.attention_backward(q, heads, values, out, lse, np.ones_like(out), **options)[2][..., 0]


def assert_weights(
    q: np.ndarray, k: np.ndarray, lse: np.ndarray, ways: Any = WAYS, *, zeros_allowed: bool = True, **options: Any
) -> None:
    """Within the bound, each way; and the sum has dv's bits, rounded as that is."""
    dot = current_isa().dot(q.dtype, gradients=True)
    for way in ways:
        if "rows" in way and not q.shape[2]:
            continue
        got = sl.key_weights(q, k, lse, **way, **options)
        assert got.dtype == lse.dtype
        want = reference.key_weights(q, k, lse, **way, **options)
        bound = reference.key_weights_bound(q, k, lse, dot=dot, **way, **options)
        assert_within(got, want, bound, str(way), zeros_allowed=zeros_allowed)
        assert not np.signbit(got).any()
    assert_bits(sl.key_weights(q, k, lse, **options), dv_of_ones(q, k, lse, **options))


def assert_bits(sums: np.ndarray, dv: np.ndarray) -> None:
    """The same numbers once rounded; NaN is one of them."""
    with np.errstate(over="ignore"):
        rounded = sums.astype(dv.dtype)
    np.testing.assert_array_equal(rounded.astype(np.float64), dv.astype(np.float64))


# --- sizes and options


@pytest.mark.units
def test_every_length(isa, rng, dtype):
    for q_len, k_len in LENGTHS:
        options: dict[str, Any] = {"causal": True, "q_start": max(0, k_len - q_len)}
        q, k, _ = qkv(rng, dtype, 1, 2, 1, q_len, k_len, 9, 1)
        assert_weights(q, k, lse_of(q, k, **options), **options)


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_dims_that_models_have(isa, rng, dtype):
    """Of several blocks of queries and tiles."""
    for d in (64, 128):
        q, k, _ = qkv(rng, dtype, 1, 4, 2, 420, 300, d, 1)
        assert_weights(q, k, lse_of(q, k, causal=True, q_start=100), zeros_allowed=False, causal=True, q_start=100)


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "top-left": {"causal": "top-left"},
    **PLACES_AND_SCALES,
    "sinks": {"sink_logits": [0.3, -INF, 2.0, 40.0], "causal": True},
    "window": {"window": (20, 3)},
    "dense": {"mask": np.arange(200 * 250).reshape(200, 250) % 7 != 0, "score": np.linspace(-2, 2, 250)[None]},
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", [*OPTIONS, *PATTERNS])
def test_every_option(rng, dtype, name):
    options = OPTIONS.get(name) or PATTERNS.get(name, {})
    q, k, _ = qkv(rng, dtype, 2, 4, 2, 200, 250, 10, 1)
    assert_weights(q, k, lse_of(q, k, **options), **options)


@pytest.mark.parametrize("seed", range(300 if FULL else 12))
def test_random_problems(seed):
    rng = np.random.default_rng(seed)
    (q, k, _), options = random_problem(rng, long=300)
    options = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    assert_weights(q, k, lse_of(q, k, **options), WAYS[seed % 2 :: 2], **options)


@pytest.mark.parametrize("layout", ["blhd", "hld", "lhd"])
def test_every_layout(rng, layout):
    q, k, _ = qkv(rng, "float32", 1, 4, 2, 70, 90, 8, 1)
    want = sl.key_weights(q, k, lse_of(q, k))
    lse = lse_of(q, k)
    if layout == "blhd":
        got = sl.key_weights(q.swapaxes(1, 2), k.swapaxes(1, 2), lse, layout=layout)
        assert got.tobytes() == want.tobytes()
        return
    if layout == "hld":
        got = sl.key_weights(q[0], k[0], lse[0], layout=layout)
        assert got.shape == (4, 90) and got.tobytes() == want.tobytes()
        assert sl.key_weights(q[0], k[0], lse[0], layout=layout, rows=[5]).shape == (4, 1, 90)
        return
    # two sequences, and a token of neither in k
    packed = {"layout": "lhd", "cu_seqlens_q": [0, 30, 70], "cu_seqlens_k": [0, 50, 90], "causal": True}
    rows, keys = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k))
    lse = sl.attention(rows, keys, keys, return_lse=True, **packed)[1]
    for way in ({}, {"reduce": "max"}, {"queries": slice(-7, None)}):
        got = sl.key_weights(rows, keys, lse, **way, **packed)
        for n, m in ((slice(0, 30), slice(0, 50)), (slice(30, 70), slice(50, 90))):
            alone = sl.key_weights(q[:, :, n], k[:, :, m], lse[None, :, n], causal=True, **way)
            assert got[:, m].tobytes() == alone.tobytes()
        assert_within(got, reference.key_weights(rows, keys, lse, **way, **packed), np.full(got.shape, 1e-4))


def test_keys_that_items_share(rng):
    q, k, _ = qkv(rng, "float32", 3, 2, 1, 20, 30, 8, 1)
    k = k[:1]
    lse = lse_of(q, k)
    assert_weights(q, k, lse, ways=WAYS)
    parts = np.ascontiguousarray(k[..., :5]), np.ascontiguousarray(k[..., 5:])
    assert sl.key_weights(q, parts, lse).tobytes() == sl.key_weights(q, k, lse).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_keys_of_a_cache(rng, dtype):
    """keys() of a cache are its keys, or what its codes stand for."""
    q, k, _ = qkv(rng, "float32", 1, 4, 2, 70, 70, 16, 1)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=80, dtype=dtype)
    _, lse = cache.attend(0, q, k, k, return_lse=True)
    weights = sl.key_weights(q, cache.keys(0), lse, causal=True)
    np.testing.assert_allclose(weights.sum(axis=-1), 70, rtol=1e-5)
    assert_weights(q, cache.keys(0), lse, causal=True)


# --- special values, and what is hidden


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_special_values(rng, dtype, value):
    """A query or a key that is not finite, seen and hidden; maxima of NaN are NaN."""
    q, k, _ = qkv(rng, dtype, 1, 2, 1, 60, 140, 16, 1)
    lse = lse_of(q, k, causal=True)
    k[0, 0, 100, 3] = value
    q[0, 0, 7, 2] = value
    with np.errstate(all="ignore"):
        assert_weights(q, k, lse, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_weigh_nothing(rng, dtype):
    """A row of lse -inf weighs nothing, whatever it holds; NaN in one is in all keys that it sees."""
    q, k, _ = qkv(rng, dtype, 1, 2, 1, 200, 150, 16, 1)
    lse = lse_of(q, k)
    q[0, 0, 5] = NAN
    lse[0, 0, 5] = -INF
    assert_weights(q, k, lse)
    assert not np.isnan(sl.key_weights(q, k, lse)).any()
    lse[0, 1, 7] = NAN
    lse[0, 1, 8] = INF
    assert_weights(q, k, lse)
    assert np.isnan(sl.key_weights(q, k, lse, reduce="max"))[0].all(axis=1).tolist() == [False, True]
    lse[...] = -INF
    assert not sl.key_weights(q, k, lse).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_that_see_part_of_a_vector(rng, dtype):
    """The last rows of each panel weigh nothing: the others see a number of keys that fills no vectors."""
    q, k, _ = qkv(rng, dtype, 1, 2, 1, 200, 200, 16, 1)
    lse = lse_of(q, k, causal=True)
    rows = np.arange(200) % 16
    lse[..., (rows > 4) & (np.arange(200) < 190)] = -INF
    assert_weights(q, k, lse, causal=True)
    lse[..., rows > 0] = -INF
    assert_weights(q, k, lse, causal=True)


def test_nothing_to_see(rng):
    for q_len, k_len in ((0, 5), (5, 0), (0, 0)):
        for batch in (0, 2):
            q, k, _ = qkv(rng, "float32", batch, 2, 1, q_len, k_len, 3, 1)
            got = sl.key_weights(q, k, np.zeros((batch, 2, q_len), np.float32))
            assert got.shape == (batch, 2, k_len) and not got.view(np.int32).any()
    q, k, _ = qkv(rng, "float32", 1, 2, 1, 5, 6, 3, 1)
    lse = lse_of(q, k)
    assert not sl.key_weights(q, k, lse, queries=slice(2, 2)).any()
    assert sl.key_weights(q, k, lse, rows=[]).shape == (1, 2, 0, 6)


# --- bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_threads_and_chunks(rng, dtype):
    """Threads, chunks of keys, and blocks of queries that are added ascending."""
    q, k, _ = qkv(rng, dtype, 1, 4, 2, 700, 2500, 16, 1)
    options = {"causal": True, "q_start": 2304, "mask": sl.window(2000, 0)}
    lse = lse_of(q, k, **options)
    for way in ({}, {"reduce": "max"}, {"rows": range(190, 200)}):
        sl.set_threads(1)
        want = sl.key_weights(q, k, lse, **way, **options)
        for threads in (2, 3):
            sl.set_threads(threads)
            assert sl.key_weights(q, k, lse, **way, **options).tobytes() == want.tobytes()
        parts = [
            sl.key_weights(q, k[:, :, at : at + 1024], lse, k_start=at, **way, **options) for at in (0, 1024, 2048)
        ]
        assert np.concatenate(parts, axis=-1).tobytes() == want.tobytes()
    total = np.zeros((1, 4, 2500), lse.dtype)
    largest = total.copy()
    for first in range(0, 700, 192):
        at = slice(first, first + 192)
        moved = options | {"q_start": 2304 + first}
        share = sl.key_weights(q[:, :, at], k, lse[:, :, at], **moved)
        assert sl.key_weights(q, k, lse, queries=at, **options).tobytes() == share.tobytes()
        total += share
        largest = np.maximum(largest, sl.key_weights(q, k, lse, reduce="max", queries=at, **options))
    assert total.tobytes() == sl.key_weights(q, k, lse, **options).tobytes()
    assert largest.tobytes() == sl.key_weights(q, k, lse, reduce="max", **options).tobytes()


def test_maxima_are_rows(rng, dtype):
    """A maximum is an entry of the rows, to the bit."""
    q, k, _ = qkv(rng, dtype, 2, 4, 2, 210, 140, 16, 1)
    lse = lse_of(q, k, causal=True)
    rows = sl.key_weights(q, k, lse, causal=True, rows=range(210))
    assert rows.max(axis=2).tobytes() == sl.key_weights(q, k, lse, causal=True, reduce="max").tobytes()


# --- arrays of every kind


def test_tensors_and_strides(rng):
    torch = pytest.importorskip("torch")
    q, k, _ = qkv(rng, "float32", 1, 2, 1, 40, 50, 8, 1)
    lse = lse_of(q, k)
    want = sl.key_weights(q, k, lse)
    turned = np.ascontiguousarray(q[..., ::-1])[..., ::-1], np.ascontiguousarray(k[:, :, ::-1])[:, :, ::-1]
    assert sl.key_weights(*turned, np.repeat(lse, 2, axis=2)[..., ::2]).tobytes() == want.tobytes()
    tensors = [torch.from_numpy(x) for x in (q, k, lse)]
    got = sl.key_weights(*tensors)
    assert type(got) is torch.Tensor and got.numpy().tobytes() == want.tobytes()
    packs = [Pack(x) for x in tensors]
    assert np.asarray(sl.key_weights(*packs)).tobytes() == want.tobytes()
    narrow = [x.to(torch.bfloat16) for x in tensors[:2]]
    assert sl.key_weights(*narrow, tensors[2]).dtype is torch.float32
    tensors[0].requires_grad_()
    with pytest.raises(sl.UnsupportedError, match=r"^q: requires grad"):
        sl.key_weights(*tensors)
    with torch.no_grad():
        assert sl.key_weights(*tensors).numpy().tobytes() == want.tobytes()


# --- errors


def test_errors(rng):
    q, k, _ = qkv(rng, "float32", 1, 2, 1, 4, 6, 8, 1)
    lse = lse_of(q, k)
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (sl.ArgumentError, r"lse: expected shape \(1, 2, 4\)", {"lse": lse[..., :3]}),
        (sl.ArgumentTypeError, "lse: expected dtype float32", {"lse": lse.astype(np.float64)}),
        (sl.ArgumentTypeError, "lse: expected a NumPy array", {"lse": None}),
        (sl.UnsupportedError, "k: expected dtype float32", {"k": k.astype(ml_dtypes.bfloat16)}),
        (sl.ArgumentError, "k: expected head_dim 8", {"k": k[..., :7]}),
        (sl.ArgumentError, "reduce: expected 'sum' or 'max'", {"reduce": "mean"}),
        (sl.ArgumentTypeError, "queries: expected a slice", {"queries": 3}),
        (sl.ArgumentError, "queries: expected a slice", {"queries": slice(0, 4, 2)}),
        (sl.ArgumentTypeError, "queries: expected an int", {"queries": slice(0.5, 2)}),
        (sl.ArgumentError, "rows: expected numbers of queries from -4 to 3; got 4", {"rows": [0, 4]}),
        (sl.ArgumentTypeError, "rows: expected a sequence of ints", {"rows": 3}),
        (sl.ArgumentError, "queries: expected its default beside rows", {"rows": [1], "queries": slice(1)}),
        (sl.ArgumentError, "reduce: expected its default beside rows", {"rows": [1], "reduce": "max"}),
        (TypeError, "dropout", {"dropout": 0.5}),
    ]
    for kind, text, changed in wrong:
        given = {"q": q, "k": k, "lse": lse} | changed
        with pytest.raises(kind, match=text):
            sl.key_weights(**given)
    packed = {"layout": "lhd", "cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 6]}
    with pytest.raises(sl.ArgumentError, match="rows: expected None for packed sequences"):
        sl.key_weights(q[0].swapaxes(0, 1), k[0].swapaxes(0, 1), lse[0], rows=[1], **packed)


def test_an_index_out_of_range_is_named(rng):
    q, k, _ = qkv(rng, "float32", 1, 2, 1, 4, 6, 8, 1)
    table = sl.table(np.zeros(5, np.float32))
    with pytest.raises(sl.ArgumentError, match="table: expected index 1 from 0 to 4"):
        sl.key_weights(q, k, np.zeros((1, 2, 4), np.float32), score=lambda s, b, h, i, j: s + table[j])
