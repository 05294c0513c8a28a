"""Arrays without a batch, and keys and values that all items of a batch share: the bits of the call that spells it out,
and the specification's numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import flow_of, qkv
from states import same
from tolerance import assert_accurate, assert_gradients

import speedlight as sl
import speedlight.torch

pytestmark = pytest.mark.usefixtures("one_width")
OPTIONS = {
    "causal": {"causal": True},
    "lengths": {"q_lengths": [15], "k_lengths": [33]},
    "mask": {"mask": np.random.default_rng(1).random((4, 20, 40)) > 0.4},
    "bias": {"score": np.random.default_rng(2).standard_normal((20, 40)).astype(np.float32), "sink_logits": [1.0] * 4},
}
DTYPES = ("float32", "float64", "float16", "bfloat16") if FULL else ("float32", "bfloat16")


# --- without a batch


@pytest.mark.parametrize("name", OPTIONS if FULL else ("causal", "lengths", "mask"))
def test_without_a_batch(rng, name):
    whole, options = qkv(rng, "float32", 1, 4, 2, 20, 40, 16, 16), OPTIONS[name]
    arrays = [x[0] for x in whole]
    got = assert_accurate(*arrays, layout="hld", **options)
    want = sl.attention(*whole, return_lse=True, **options)
    assert [x.shape for x in got] == [(4, 20, 16), (4, 20)] and same(got, want)
    flow = flow_of(rng, arrays, layout="hld", **options)
    grads = assert_gradients(arrays, flow, layout="hld", **options)
    assert same(grads, sl.attention_backward(*whole, *(x[None] for x in flow), **options))
    plans = [sl.plan(*x, layout=y, **options) for x, y in ((arrays, "hld"), (whole, "bhld"))]
    assert plans[0].rows()[:6] == plans[1].rows()[:6]


def test_one_query_without_a_batch(rng):
    whole = qkv(rng, "float32", 1, 4, 2, 1, 40, 16, 16)
    arrays = [x[0] for x in whole]
    assert sl.attention(*arrays, layout="hld").tobytes() == sl.attention(*whole).tobytes()
    strided = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in arrays]
    assert sl.attention(*strided, layout="hld").tobytes() == sl.attention(*whole).tobytes()


def test_it_is_written_in_place_and_repeated(rng):
    arrays = [x[0] for x in qkv(rng, "float32", 1, 4, 2, 20, 40, 16, 16)]
    want = sl.attention(*arrays, layout="hld")
    for _ in range(2):
        out = np.empty((20, 4, 16), np.float32).swapaxes(0, 1)
        got, lse = sl.attention(*arrays, layout="hld", out=out, return_lse=True)
        assert got is out and lse.shape == (4, 20) and np.array_equal(out, want)


def test_pages_without_a_batch(rng):
    q, k, v = (x[0] for x in qkv(rng, "float32", 1, 4, 2, 20, 40, 16, 16))
    k_pages, v_pages = (np.zeros((4, 16, 2, 16), np.float32) for _ in "kv")
    for x, y in ((k_pages, k), (v_pages, v)):
        x.reshape(64, 2, 16)[:40] = y.swapaxes(0, 1)
    got = sl.attention_paged(q, k_pages, v_pages, [[0, 1, 2]], [40], causal=True, layout="hld")
    assert got.tobytes() == sl.attention(q, k, v, causal=True, layout="hld").tobytes()
    with pytest.raises(sl.Error, match="q: expected batch 2, as block_table has; got 1"):
        sl.attention_paged(q, k_pages, v_pages, [[0, 1, 2]] * 2, [40] * 2, layout="hld")
    with pytest.raises(sl.Error, match="q: expected head_dim 16, as k_pages has; got 8"):
        sl.attention_paged(q[..., :8], k_pages, v_pages, [[0, 1, 2]], [40], layout="hld")


def test_sizes_without_a_batch():
    sizes: Any = {"q_heads": 4, "q_len": 20, "head_dim": 16}
    assert sl.plan(**sizes, layout="hld").flops == sl.plan(**sizes).flops
    with pytest.raises(sl.Error, match="batch: expected 1 for layout='hld', which has no batch; got 2"):
        sl.plan(**sizes, batch=2, layout="hld")


def test_rotary_without_a_batch(rng):
    x = rng.standard_normal((3, 5, 16)).astype(np.float32)
    cos, sin = (f(rng.uniform(-4, 4, (9, 8))).astype(np.float32) for f in (np.cos, np.sin))
    for given in ((), (cos, sin)):
        for positions in (2, [8, 0, 3, 3, 1]):
            want = sl.rotary(x[None], *given, positions=positions)[0]
            assert sl.rotary(x, *given, positions=positions, layout="hld").tobytes() == want.tobytes()
            theirs = sl.reference.rotary(x[None], *given, positions=positions)[0]
            assert np.array_equal(sl.reference.rotary(x, *given, positions=positions, layout="hld"), theirs)
    with pytest.raises(sl.Error, match=r"positions: expected an int, .* or ints of shape \(5,\); got \(1, 5\)"):
        sl.rotary(x, positions=[[8, 0, 3, 3, 1]], layout="hld")


X = np.ones((2, 3, 4), np.float32)
WRONG = {
    "three of four": (
        lambda: sl.attention(X, X, X),
        r"q: expected 4 dimensions .* got shape \(2, 3, 4\)\. Say which three: \(batch, length, head_dim\) of one head "
        r"is q\[:, None\]; layout='hld' is for \(heads, length, head_dim\), 'lhd' for packed ",
    ),
    "three of four, heads after": (lambda: sl.attention(X, X, X, layout="blhd"), r"of one head is q\[:, :, None\]"),
    "four of three": (
        lambda: sl.attention(*[X[None]] * 3, layout="hld"),
        r"q: expected 3 dimensions \(heads, length, head_dim\) for layout='hld'; .* With a batch the layout is 'bhld'",
    ),
    "offsets": (lambda: sl.attention(X, X, X, layout="hld", cu_seqlens_q=[0, 3]), "cu_seqlens_q: expected None for"),
    "an axis of some": (lambda: sl.attention(X[None], X, X), "k: expected 4 dimensions"),
    "another batch": (
        lambda: sl.attention(*(np.ones((n, 1, 3, 4), np.float32) for n in (3, 2, 2))),
        "k: expected batch 3, as q has, or 1, which all of its items share; got 2",
    ),
    "no items, and keys of two": (
        lambda: sl.attention(*(np.ones((n, 1, 3, 4), np.float32) for n in (0, 2, 2))),
        "k: expected batch 0, as q has, or 1, which all of its items share; got 2",
    ),
    "queries of one item": (
        lambda: sl.attention(X[:1, None], X[:, None], X[:, None]),
        r"k: expected batch 1, as q has; got 2 .* numpy.broadcast_to\(q, \(2, \*q.shape\[1:\]\)\)",
    ),
    "queries of one item, as tensors": (
        lambda: sl.attention(*(torch.from_numpy(X[:n, None]) for n in (1, 2, 2))),
        r"repeat q without a copy: q.expand\(2, -1, -1, -1\)",
    ),
    "keys alone": (
        lambda: sl.attention(X[:, None], X[:1, None], X[:, None]),
        "v: expected batch 1, as k has; got 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_nobody_can_guess(name):
    call, message = WRONG[name]
    with pytest.raises(sl.Error, match=message):
        call()


# --- shared by the items of a batch


@pytest.mark.each("dtype", "causal")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_shared_keys(rng, dtype, causal, rows):
    q, k, v = qkv(rng, dtype, 3, 4, 2, rows, 40, 16, 16)
    k, v = k[:1], v[:1]
    for options in ({"causal": causal}, {"causal": causal, "k_lengths": [40, 0, 17], "q_start": 17}):
        got = assert_accurate(q, k, v, **options)
        for spelled in (np.broadcast_to, lambda x, shape: np.repeat(x, shape[0], 0)):
            wide = [spelled(x, (3, *x.shape[1:])) for x in (k, v)]
            assert same(got, sl.attention(q, *wide, return_lse=True, **options))
    strided = [x.swapaxes(1, 2) for x in (q, k, v)]
    assert np.array_equal(sl.attention(*strided, layout="blhd").swapaxes(1, 2), sl.attention(q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_flows_to_shared_keys(rng, dtype):
    q, k, v = qkv(rng, dtype, 3, 4, 2, 20, 40, 16, 16)
    k, v = k[:1], v[:1]
    for options in ({"causal": True}, {"k_lengths": [40, 0, 17], "q_start": 17}):
        flow = flow_of(rng, (q, k, v), **options)
        dq, dk, dv = assert_gradients((q, k, v), flow, **options)
        wide = sl.attention_backward(q, *(np.repeat(x, 3, 0) for x in (k, v)), *flow, **options)
        assert dq.tobytes() == wide[0].tobytes()
        for got, each in zip((dk, dv), wide[1:], strict=True):  # each item's, rounded, added in float64
            total = each.astype(np.float64).sum(axis=0, keepdims=True)
            total = total if dtype == "float64" else total.astype(np.float32)
            assert got.shape == k.shape and got.tobytes() == total.astype(got.dtype).tobytes()


def test_shared_by_no_items():
    q, k = np.ones((0, 2, 3, 16), np.float32), np.ones((1, 2, 5, 16), np.float32)
    out, lse = sl.attention(q, k, k, return_lse=True)
    dq, dk, dv = sl.attention_backward(q, k, k, out, lse, out)
    assert out.shape == dq.shape == q.shape and dk.tobytes() == dv.tobytes() == bytes(k.nbytes)


def test_shared_keys_are_read_once(rng):
    q, k, v = qkv(rng, "float32", 3, 4, 2, 20, 40, 16, 16)
    shared, whole = (sl.plan(q, k[:n], v[:n]) for n in (1, 3))
    assert shared.flops == whole.flops
    assert shared.bytes_read == whole.bytes_read - 2 * (k.nbytes + v.nbytes) // 3


def test_autograd_of_both():
    q, k, v = (torch.randn(n, 2, m, 4, dtype=torch.float64, requires_grad=True) for n, m in ((2, 3), (1, 4), (1, 4)))
    whole = [x[0].detach().requires_grad_() for x in (q, k, v)]
    for arrays, layout in (((q, k, v), "bhld"), (whole, "hld")):
        attend = functools.partial(sl.attention, causal=True, layout=layout, return_lse=True)
        assert torch.autograd.gradcheck(attend, arrays, fast_mode=True)
        if FULL or layout == "bhld":
            assert torch.autograd.gradgradcheck(attend, arrays, fast_mode=True)


def test_examples_of_both():
    q, k, v = (torch.randn(5, n, 2, m, 16) for n, m in ((3, 4), (1, 6), (1, 6)))
    attend: Any = speedlight.torch.attention
    want = torch.stack([attend(*x) for x in zip(q, k, v, strict=True)])
    assert torch.equal(torch.func.vmap(attend)(q, k, v), want)
    alone = [x[:, 0] for x in (q, k, v)]
    want = torch.stack([attend(*x, layout="hld") for x in zip(*alone, strict=True)])
    assert torch.equal(torch.func.vmap(lambda *x: attend(*x, layout="hld"))(*alone), want)
