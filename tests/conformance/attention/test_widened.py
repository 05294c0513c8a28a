"""Keys and values of 16 bits under queries of another dtype: the bits of float32 arrays, wherever they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import numpy_dtype, qkv
from states import same
from tolerance import assert_accurate

import speedlight as sl
from speedlight.arrays.files import write_arrays
from speedlight.tools import cli

pytestmark = pytest.mark.usefixtures("one_width")
PAIRS = [("float32", "bfloat16"), ("bfloat16", "float16"), ("float32", "float16"), ("float16", "bfloat16")]
KEYS, SPANS = 150, 1100


def drawn(rng, queries, keys, rows, count=KEYS, dims=(17, 33)):
    """q of one dtype, k and v of the other."""
    q, k, v = qkv(rng, "float32", 2, 4, 2, rows, count, *dims)
    return q.astype(numpy_dtype(queries)), *(x.astype(numpy_dtype(keys)) for x in (k, v))


def converted(q, k, v, **options):
    """The same call with float32 arrays, its result rounded."""
    out, lse = sl.attention(*(x.astype(np.float32) for x in (q, k, v)), return_lse=True, **options)
    return out.astype(q.dtype), lse


def packed(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(-1, x.shape[1], x.shape[3])


@pytest.mark.units
@pytest.mark.each("pair")
@pytest.mark.parametrize("pair", PAIRS if FULL else PAIRS[:2], ids="-".join)
def test_wherever_keys_lie(isa, rng, pair):
    for rows in (1, 20):
        q, k, v = drawn(rng, *pair, rows)
        want = converted(q, k, v, causal=True)
        assert same(want, assert_accurate(q, k, v, causal=True))
        strided = [np.asfortranarray(x) for x in (q, k, v)]
        assert same(want, sl.attention(*strided, causal=True, return_lse=True))
        before = KEYS - rows
        cache: Any = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=17, value_dim=33, capacity=KEYS, dtype=pair[1])
        cache.append(0, k[:, :, :before], v[:, :, :before])
        assert same(want, cache.attend(0, q, k[:, :, before:], v[:, :, before:], return_lse=True))
        pool = sl.PagePool(layers=1, pages=20, page_size=16, kv_heads=2, head_dim=17, value_dim=33, dtype=pair[1])
        both = [pool.sequence(), pool.sequence()]
        pool.append(0, both, packed(k[:, :, :before]), packed(v[:, :, :before]), new_lengths=[before] * 2)
        new = (packed(q), packed(k[:, :, before:]), packed(v[:, :, before:]))
        got = pool.attend(0, both, *new, new_lengths=[rows] * 2)
        assert got.tobytes() == packed(want[0]).tobytes()
        pages = [np.zeros((20, 16, 2, x.shape[3]), x.dtype) for x in (k, v)]
        for x, y in zip(pages, (k, v), strict=True):
            x.reshape(2, 160, 2, -1)[:, :KEYS] = y.swapaxes(1, 2)
        table = np.arange(20).reshape(2, 10)
        got = sl.attention_paged(q, pages[0], pages[1], table, [KEYS] * 2, causal=True, return_lse=True)
        assert same(want, got)


def test_a_window_over_spans(isa, rng):
    """A ring of pages, odd dims; many queries, and one."""
    q, k, v = drawn(rng, "float32", "bfloat16", SPANS, SPANS, (33, 17))
    want = converted(q, k, v, causal=True, mask=sl.window(99, 0) | sl.prefix(3))
    cache: Any = sl.KVCache(
        layers=1, batch=2, kv_heads=2, head_dim=33, value_dim=17, dtype="bfloat16", window=100, keep_first=3
    )
    for first, end in ((0, 1001), (1001, SPANS - 1), (SPANS - 1, SPANS)):
        got = cache.attend(0, *(x[:, :, first:end] for x in (q, k, v)))
        assert got.tobytes() == want[0][:, :, first:end].tobytes()


def test_hidden_keys_do_not_exist(rng):
    for rows in (2, 20):
        q, k, v = drawn(rng, "float32", "bfloat16", rows)
        want = sl.attention(q, k, v, k_lengths=[101, 100], q_start=0)
        for x in (k, v):
            x[0, :, 101:] = x[1, :, 100:] = np.nan
        assert sl.attention(q, k, v, k_lengths=[101, 100], q_start=0).tobytes() == want.tobytes()
        cache: Any = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=17, value_dim=33, capacity=KEYS, dtype=k.dtype)
        cache.append(0, k[:, :, :101], v[:, :, :101], new_lengths=[101, 100])
        assert cache.attend(0, q).tobytes() == want.tobytes()


def test_the_plan(rng):
    q, k, v = drawn(rng, "float32", "float16", 20)
    plan, whole = sl.plan(q, k, v), sl.plan(q, k.astype(np.float32), v.astype(np.float32))
    assert "float32 over float16" in str(plan) and plan.kernel.startswith("forward_f32_f16_")
    assert plan.flops == whole.flops and plan.bytes_read == whole.bytes_read - k.nbytes - v.nbytes


def test_a_file(rng, tmp_path, monkeypatch, capsys):
    write_arrays(tmp_path / "in.safetensors", dict(zip("qkv", drawn(rng, "float32", "bfloat16", 20), strict=True)))
    monkeypatch.setattr("sys.argv", ["speedlight", "attend", str(tmp_path / "in.safetensors"), "--check"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and "float32 over bfloat16" in capsys.readouterr().out


def test_tensors(rng):
    q, k, v = (torch.randn(1, 2, 20, 16) for _ in "qkv")
    narrow = [x.bfloat16() for x in (k, v)]
    assert torch.equal(sl.attention(q, *narrow), sl.attention(q, *(x.float() for x in narrow)))
    q.requires_grad_()
    with pytest.raises(sl.UnsupportedError, match=r"k: expected dtype float32, .* autograd follows k.to\(q.dtype\)"):
        sl.attention(q, *narrow)
    sl.attention(q, *(x.to(q.dtype) for x in narrow)).sum().backward()


X = np.ones((1, 2, 3, 16), np.float32)
HALF = X.astype(np.float16)
WRONG = {
    "values": (lambda: sl.attention(X, HALF, X), "v: expected dtype float16, as k has; got float32"),
    "values alone": (lambda: sl.attention(X, X, HALF), "v: expected dtype float32, as q has; got float16"),
    "wider keys": (lambda: sl.attention(HALF, X, X), "k: expected dtype float16, as q has; got float32"),
    "float64": (lambda: sl.attention(X.astype(float), HALF, HALF), "k: expected dtype float64, as q has; got float16"),
    "int8": (
        lambda: sl.attention(X, X.astype(np.int8), X.astype(np.int8)),
        r"k: expected dtype .* got int8. .* Codes alone have no scales: KVCache\(dtype='int8'\) and PagePool keep both",
    ),
    "float8": (
        lambda: sl.attention_paged(X, *[X.astype(numpy_dtype("float8_e4m3fn"))] * 2, [[0]], [2]),
        r"k_scales: expected a number or an array .* beside pages of float8_e4m3fn; got None. .* it is k_scales=1.0",
    ),
    "gradients": (
        lambda: sl.attention_backward(X, HALF, HALF, X, X[..., 0], X),
        "k: expected dtype float32, as q has, where gradients are computed; got float16",
    ),
    "a plan": (
        lambda: sl.plan(X, HALF, HALF, backward=True),
        "k: expected dtype float32, as q has, where",
    ),
    "gradients of the specification": (
        lambda: sl.reference.backward(X, HALF, HALF, X, X[..., 0], X),
        "k: expected dtype float32, as q has, where",
    ),
    "pages": (
        lambda: sl.attention_paged(X, HALF, X, [[0]], [2]),
        "v_pages: expected dtype float16, as k_pages has; got float32",
    ),
    "a cache": (
        lambda: sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=9, dtype="float16").attend(0, X.astype(float)),
        "q: expected dtype float16, as the cache has; got float64",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_widened(name):
    call, message = WRONG[name]
    with pytest.raises(sl.Error, match=message):
        call()
