"""Errors of latent keys: what was expected, what came, and the way out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import speedlight as sl
from speedlight.arrays import latents

Q = np.ones((1, 2, 3, 24), np.float32)
K = np.ones((1, 1, 5, 24), np.float32)
LATENT, ROTARY = K[..., :16], K[..., 16:]
PAGES = K.reshape(1, 5, 1, 24)


class Exporter:
    """An array of which nothing is known but DLPack."""

    def __dlpack__(self, **options: Any) -> Any:
        return K.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return K.__dlpack_device__()


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    (K, None, {"value_dim": 25}, "value_dim: expected 1 to 24, the last dimension of k; got 25. Values of other"),
    (K, None, {"value_dim": 0}, "value_dim: expected 1 to 24"),
    (K, None, {"value_dim": 1.5}, "value_dim: expected an int; got float"),
    (K, None, {"value_dim": True}, "value_dim: expected an int; got bool"),
    ((LATENT, ROTARY), None, {"value_dim": 17}, r"value_dim: expected 1 to 16, the last dimension of k\[0\]; got 17"),
    (K, None, {}, "v: expected a NumPy array.* got NoneType. Where values are the first columns of k, give value_dim="),
    (K, K, {"value_dim": 3}, "value_dim: expected None beside v, whose last dimension it is; got 3. Leave one"),
    ((LATENT, ROTARY), LATENT, {"value_dim": 3}, "value_dim: expected None beside v"),
    (None, None, {"value_dim": 3}, "k: expected an array of NumPy or PyTorch, whose first columns v is; got NoneType"),
    (Exporter(), None, {"value_dim": 3}, "k: expected an array of NumPy or PyTorch.*Convert it, or give v"),
    ((LATENT, ROTARY, ROTARY), None, {}, r"k: expected a NumPy array.* or a pair \(latent, rotary\).*got tuple of 3"),
    ([LATENT], LATENT, {}, "k: expected a NumPy array.*or a pair.*got list of 1"),
    ((LATENT, [1.0]), None, {}, r"k: expected an array, or a pair.*got list as k\[1\]"),
    ((LATENT, Exporter()), None, {}, r"got Exporter as k\[1\]"),
    ((LATENT, np.ma.masked_array(ROTARY)), None, {}, r"got MaskedArray as k\[1\]"),
    ((LATENT, ROTARY[:, :, :3]), None, {}, r"differ in their last dimension alone; got shapes \(1, 1, 5, 16\) and"),
    ((LATENT, ROTARY[0]), None, {}, "differ in their last dimension alone"),
    ((LATENT, ROTARY.astype("float64")), None, {}, "a pair of arrays of one kind and dtype; got ndarray of float32"),
    ((LATENT, torch.from_numpy(ROTARY)), None, {}, "a pair of arrays of one kind and dtype"),
    ((LATENT, LATENT), None, {}, "k: expected head_dim 24, as q has; got 32"),
    ((LATENT.astype(int), ROTARY.astype(int)), None, {}, "k: expected dtype float32.*got int64"),
]


@pytest.mark.parametrize(("k", "v", "options", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_keys(k, v, options, message):
    flow = np.ones((1, 2, 3, 16), np.float32), np.ones((1, 2, 3), np.float32), np.ones((1, 2, 3, 16), np.float32)
    calls = (
        lambda: sl.attention(Q, k, v, **options),
        lambda: sl.attention_backward(Q, k, v, *flow, **options),
        lambda: sl.reference.attention(Q, k, v, **options),
        lambda: sl.reference.error_bound(Q, k, v, **options),
        lambda: sl.reference.backward(Q, k, v, *flow, **options),
        lambda: sl.reference.backward_bound(Q, k, v, *flow, **options),
    )
    for call in calls:
        with pytest.raises(sl.Error, match=message):
            call()


def test_wrong_pages():
    for pages, options, message in (
        (PAGES, {"value_dim": 40}, "value_dim: expected 1 to 24, the last dimension of k_pages; got 40.*give v_pages"),
        (PAGES, {}, "v_pages: expected a NumPy array.* got NoneType. Where values are the first columns of k_pages"),
        ((PAGES[..., :16], PAGES[:, :3, :, 16:]), {}, "k_pages: expected a pair of arrays that differ in their last"),
    ):
        with pytest.raises(sl.Error, match=message):
            sl.attention_paged(Q, pages, None, [[0]], [3], **options)


def test_a_pair_on_a_gpu_is_refused(monkeypatch):
    """Its engine reads keys in one array; the error names a way there, and the CPU."""
    monkeypatch.setattr(latents, "on_gpu", lambda x: True)
    message = re.escape("k: expected keys in one array on a GPU; got a pair. Join them, torch.cat(k, -1), or use")
    with pytest.raises(sl.UnsupportedError, match=message + ".*on the CPU"):
        sl.attention(Q, (LATENT, ROTARY), None)


def test_caches_name_their_own_option():
    with pytest.raises(sl.Error):
        sl.KVCache(layers=1, kv_heads=1, head_dim=24, capacity=5, dtype="float32").attend(0, Q, value_dim=4)  # type: ignore[call-arg]


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("columns", [16, 15])  # kernels read both parts, or a copy is attended to
@pytest.mark.parametrize("grad", [False, True])
def test_a_part_whose_storage_was_cut_is_refused(part, columns, grad):
    """Parts that are joined, too: PyTorch's copy would be of what lies behind the storage."""
    q, k = torch.ones(1, 2, 3, 24), torch.ones(1, 1, 500, 24)
    pair = k[..., :columns].clone(), k[..., columns:].clone()
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            sl.attention(q, pair, None)
        pair[part].untyped_storage().resize_(64)
        with pytest.raises(sl.ArgumentError, match="with memory for"):
            sl.attention(q, pair, None)


def test_parts_of_other_places_are_refused():
    q, latent, rotary = (torch.from_numpy(x) for x in (Q, LATENT, ROTARY))
    for other in (rotary.to("meta"), rotary.to_sparse()):
        with pytest.raises(sl.ArgumentTypeError, match="k: expected a pair of tensors of one layout and device"):
            sl.attention(q, (latent, other), None)


@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["array", "tensor"])
def test_pairs_of_other_value_dims_are_other_calls(rng, make):
    """A repeated pair gets as many columns as it asks for, whatever the calls before asked for."""
    numbers = [rng.standard_normal(x.shape).astype(np.float32) for x in (Q, LATENT, ROTARY)]
    q, latent, rotary = map(make, numbers)
    k = make(np.concatenate(numbers[1:], -1))
    for columns in (16, 5, 16, 9, 5):
        got = sl.attention(q, (latent, rotary), None, value_dim=columns)
        want = sl.attention(q, k, make(numbers[1][..., :columns].copy()))
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
