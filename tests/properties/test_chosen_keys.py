"""Chosen keys (indices=) have the bits of the call with the equal mask, of every class, wherever keys lie."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import digest, numpy_dtype

import speedlight as sl
from speedlight.cpu.engine import chosen_call
from speedlight.host.machine import Isa, runnable_isas

pytestmark = pytest.mark.usefixtures("one_width")

UNITS = [*runnable_isas()]
LENGTHS = (3, 70, 129, 300, 1100, 3000)


class Choice(NamedTuple):
    """A call, with its indices and the equal mask, (batch, q_heads, q_len, k_len)."""

    arrays: tuple[np.ndarray, ...]
    indices: np.ndarray
    mask: np.ndarray
    options: dict[str, Any]


def equal_mask(indices: np.ndarray, keys: int, kv_heads: int, group: int) -> np.ndarray:
    by_head = indices if indices.ndim == 4 else np.repeat(indices[:, None], kv_heads, axis=1)
    mask = np.zeros((*by_head.shape[:-1], keys), bool)
    for at in np.ndindex(*by_head.shape[:-1]):
        seen = by_head[at]
        mask[at][seen[seen >= 0]] = True
    return np.repeat(mask, group, axis=1)


def drawn(seed: int, dtype: str) -> Choice:
    """Draws a call of any sizes, with duplicates, NaN and huge numbers among its keys."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, q_len = (int(rng.choice(x)) for x in ((1, 2), (1, 2), (1, 2, 5, 40)))
    group = int(rng.choice((1, 2, 4, 9)) if q_len == 40 else rng.choice((1, 2, 4, 9, 17, 40)))
    keys, d = int(rng.choice(LENGTHS)), int(rng.choice((1, 8, 20, 64)))
    value_dim, kind = int(rng.choice((1, 16, 40, 64))), numpy_dtype(dtype)
    q, k, v = (
        rng.standard_normal(s, dtype=np.float32).astype(kind)
        for s in ((batch, kv_heads * group, q_len, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, value_dim))
    )
    for x in (k, v):
        if rng.random() < 0.2:
            x[:, :, rng.integers(keys)] = np.nan
        if rng.random() < 0.1:
            x[:, :, rng.integers(keys)] = 6e4
    count = int(rng.choice((1, 4, 30, 200, keys)))
    heads = (kv_heads,) if rng.random() < 0.5 else ()
    indices = rng.integers(-1, keys, (batch, *heads, q_len, count), dtype=np.int32)
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.5 and keys >= q_len)}
    if rng.random() < 0.3:
        options["score"] = sl.alibi(rng.random(kv_heads * group, dtype=np.float32))
    if rng.random() < 0.3:
        options["sink_logits"] = rng.standard_normal(kv_heads * group, dtype=np.float32)
    if rng.random() < 0.3:
        options["k_lengths"] = [int(x) for x in rng.integers(0, keys + 1, batch)]
        options["q_start"] = keys - q_len
    if rng.random() < 0.3:
        options["window"] = (keys // 2, None)
    if rng.random() < 0.2:
        options["k_start"] = 1024
    return Choice((q, k, v), indices, equal_mask(indices, keys, kv_heads, group), options)


def both(c: Choice, **more: Any) -> tuple[str, str]:
    options = c.options | more
    want = sl.attention(*c.arrays, mask=c.mask, return_lse=True, **options)
    got = sl.attention(*c.arrays, indices=c.indices, return_lse=True, **options)
    return digest(got), digest(want)


@pytest.mark.parametrize("unit", UNITS, ids=lambda x: x.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_bits_are_those_of_the_equal_mask(dtype: str, unit: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
    for seed in range(40 if FULL else 6):
        got, want = both(drawn(seed, dtype))
        assert got == want, seed


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_and_layouts_do_not_matter(threads: int) -> None:
    before = sl.get_threads()
    sl.set_threads(threads)
    try:
        for seed in range(20, 24):
            c = drawn(seed, "float32")
            got, want = both(c)
            assert got == want
            turned = c._replace(arrays=tuple(x.swapaxes(1, 2) for x in c.arrays))
            assert both(turned, layout="blhd")[0] == both(turned, layout="blhd")[1]
    finally:
        sl.set_threads(before)


def test_chosen_keys_alone_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    prepare = chosen_call.prepare_chosen
    monkeypatch.setattr(chosen_call, "prepare_chosen", lambda *given: calls.append(given) or prepare(*given))
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, 2, n, 16), dtype=np.float32) for n in (3, 500))
    indices = rng.integers(0, 250, (1, 3, 20)) * 2
    k[:, :, 1::2] = np.inf  # would make everything NaN
    assert np.isfinite(sl.attention(q, k, k, indices=indices)).all()
    assert len(calls) == 1


@pytest.mark.parametrize("group", [4, 40], ids=["rows", "panels"])
def test_absent_keys_of_pairs_weigh_nothing(group: int) -> None:
    rng = np.random.default_rng(4)
    kind = numpy_dtype("bfloat16")
    q, k, v = (rng.standard_normal((1, n, m, 16)).astype(kind) for n, m in ((group, 2), (1, 400), (1, 400)))
    v[:, :, ::7] = np.nan
    indices = rng.permutation(400)[: 2 * 60].reshape(1, 2, 60)
    indices[indices % 7 == 0] = -1
    v[:, :, indices.max(axis=-1)[0]] = np.inf  # times a weight of 0 it would be NaN
    got, want = both(Choice((q, k, v), indices, equal_mask(indices, 400, 1, group), {}))
    assert got == want
    assert np.isinf(sl.attention(q, k, v, indices=indices).astype(np.float32)).all()


def test_order_and_duplicates_do_not_matter() -> None:
    rng = np.random.default_rng(1)
    q, k = (rng.standard_normal((1, 4, n, 16), dtype=np.float32) for n in (2, 700))
    indices = np.stack([rng.permutation(700)[:90] for _ in range(2)])[None]
    want = sl.attention(q, k, k, indices=indices)
    again = np.concatenate([indices[..., ::-1], indices[..., :7], np.full((1, 2, 3), -1)], axis=-1)
    assert digest((sl.attention(q, k, k, indices=again),)) == digest((want,))
    assert digest((sl.attention(q, k, k, indices=torch.as_tensor(again)),)) == digest((want,))


def test_packed_and_paged_keys() -> None:
    rng = np.random.default_rng(2)
    lengths, size = (5, 300, 1300), 16
    pages = rng.standard_normal((2, 120, size, 2, 24), dtype=np.float32)
    blocks = np.full((3, 82), -1)
    used = iter(rng.permutation(120))
    for n, length in enumerate(lengths):
        for at in range(-(-length // size)):
            blocks[n, at] = next(used)
    q = rng.standard_normal((3, 4, 2, 24), dtype=np.float32)
    indices = np.stack([rng.integers(-1, n, (2, 30)) for n in lengths])
    k, v = (
        [
            x[blocks[n, : -(-length // size)]].reshape(-1, 2, 24)[:length].swapaxes(0, 1)[None]
            for n, length in enumerate(lengths)
        ]
        for x in pages
    )
    got, lse = sl.attention_paged(q, *pages, blocks, lengths, indices=indices, causal=True, return_lse=True)
    for n in range(3):
        mask = equal_mask(indices[n : n + 1], lengths[n], 2, 2)
        want = sl.attention(q[n : n + 1], k[n], v[n], mask=mask, causal=True, return_lse=True)
        assert digest((got[n : n + 1], lse[n : n + 1])) == digest(want)
    packed, offsets = q.swapaxes(1, 2).reshape(6, 4, 24), np.cumsum([0, *lengths])
    rows = [np.concatenate([x[n][0].swapaxes(0, 1) for n in range(3)]) for x in (k, v)]
    flat = sl.attention(
        packed,
        *rows,
        layout="lhd",
        cu_seqlens_q=[0, 2, 4, 6],
        cu_seqlens_k=offsets,
        indices=indices.reshape(6, 30),
        causal=True,
    )
    assert digest((flat.reshape(3, 2, 4, 24).swapaxes(1, 2),)) == digest((got,))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("latent", [False, True])
def test_caches_and_pools(dtype: str, latent: bool) -> None:
    rng = np.random.default_rng(3)
    heads, d, dv = (1, 40, 24) if latent else (2, 24, 24)
    given = numpy_dtype("float32" if dtype == "int8" else dtype)
    q, k, v = (rng.standard_normal(s).astype(given) for s in ((2, 4, 3, d), (2, heads, 400, d), (2, heads, 400, dv)))
    indices = rng.integers(-1, 400, (2, 3, 50))
    sizes: dict[str, Any] = {
        "layers": 1,
        "kv_heads": heads,
        "head_dim": d,
        "value_dim": dv,
        "dtype": dtype,
        "latent": latent,
    }
    cache = sl.KVCache(batch=2, capacity=420, **sizes)
    cache.append(0, k, *([] if latent else [v]))
    mask = equal_mask(indices, 400, heads, 4 // heads)
    shown = sl.table(mask)
    want = cache.attend(0, q, mask=lambda b, h, i, j: shown[b, h, i - 397, j])
    assert digest((cache.attend(0, q, indices=indices),)) == digest((want,))
    pool = sl.PagePool(pages=80, page_size=16, **sizes)
    sequences = [pool.sequence() for _ in range(2)]
    for n, sequence in enumerate(sequences):
        tokens = [x[n].swapaxes(0, 1) for x in ((k,) if latent else (k, v))]
        pool.append(0, [sequence], *tokens)
    one = np.ascontiguousarray(q[:, :, 2])
    got = pool.attend(0, sequences, one, indices=indices[:, 2])
    assert digest((got,)) == digest((np.ascontiguousarray(want[:, :, 2]),))


def test_gradients_are_those_of_the_equal_mask() -> None:
    import speedlight.torch as st

    c = drawn(7, "float32")
    mask = torch.as_tensor(c.mask)
    results = []
    for how in ({"indices": torch.as_tensor(c.indices)}, {"mask": mask}):
        q, k, v = (torch.tensor(np.nan_to_num(x), requires_grad=True) for x in c.arrays)
        out = st.attention(q, k, v, causal=True, **how)
        out.backward(torch.ones_like(out))
        results.append([x.grad.numpy() for x in (q, k, v)] + [out.detach().numpy()])
    assert digest(tuple(results[0])) == digest(tuple(results[1]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # PyTorch's own, in forward mode
@pytest.mark.parametrize("as_array", [torch.Tensor.numpy, torch.Tensor.clone], ids=["numpy", "torch"])
def test_transforms_and_derivatives_are_those_of_the_equal_mask(as_array: Any) -> None:
    import speedlight.torch as st

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8, dtype=torch.double), torch.randn(2, 2, 40, 8, dtype=torch.double)
    indices = torch.randint(0, 40, (2, 5, 6))
    mask = torch.zeros(2, 1, 5, 40, dtype=torch.bool).scatter_(-1, indices[:, None], True)
    found = []
    for how in ({"indices": as_array(indices)}, {"mask": mask}):

        def call(q: torch.Tensor, how: dict[str, Any] = how) -> torch.Tensor:
            return st.attention(q, k, k, **how)

        followed = q.clone().requires_grad_()
        (first,) = torch.autograd.grad((call(followed) ** 2).sum(), followed, create_graph=True)
        (second,) = torch.autograd.grad((first**2).sum(), followed)
        tangent = torch.func.jvp(call, (q,), (q,))[1]
        found.append((second.numpy(), tangent.numpy(), torch.func.vmap(call)(torch.stack([q, 2 * q])).numpy()))
    assert digest(found[0]) == digest(found[1])


def test_a_query_without_keys_is_empty() -> None:
    x = np.ones((1, 2, 3, 8), np.float32)
    out, lse = sl.attention(x, x, x, indices=np.full((1, 3, 4), -1), return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()
    assert not sl.attention(x, x, x, indices=np.zeros((1, 3, 0), int)).any()


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        (np.zeros((1, 3), int), "indices: expected shape"),
        (np.zeros((2, 3, 4), int), "indices: expected shape"),
        (np.full((1, 3, 4), 2**64 - 1, np.uint64), "got 18446744073709551615"),
        (np.zeros((1, 3, 4)), "indices: expected whole numbers; got float64"),
        (np.full((1, 3, 4), 5), "indices: expected numbers of keys from 0 to 4, or -1 for none; got 5"),
        (np.full((1, 3, 4), -2), "got -2"),
        ([[[0], [1, 2], [3]]], "indices: expected"),
        ("keys", "indices: expected"),
        (np.ma.array(np.zeros((1, 3, 1), int)), "MaskedArray"),
    ],
)
def test_wrong_indices_are_refused_by_name(indices: Any, words: str) -> None:
    q, k = np.ones((1, 2, 3, 8), np.float32), np.ones((1, 2, 5, 8), np.float32)
    out = np.full_like(q, 7)
    with pytest.raises(sl.Error, match=words):
        sl.attention(q, k, k, indices=indices, out=out)
    assert (out == 7).all()
