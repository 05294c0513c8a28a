"""FlashMLA's dense calls: its signatures, its results at the sizes of its tests and flashinfer's, what is refused."""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import as_numpy
from tolerance import assert_within

import speedlight as sl
from speedlight.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from speedlight.host.machine import current_isa

pytestmark = pytest.mark.usefixtures("one_width")
INF = float("inf")


class Serving(NamedTuple):
    """A batch over pages of latents."""

    q: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def draw(
    rng: np.random.Generator, lengths: list[int], s_q: int, h_q: int, h_k: int = 1, *, page: int = 64, dim: int = 576,
    dtype: torch.dtype = torch.bfloat16, size: float = 0.1,
) -> Serving:  # fmt: skip
    """Pages in any order; NaN past each sequence's end, and no page's number in the table there."""
    most = -(-max(*lengths, 1) // page) + 1
    order = torch.from_numpy(rng.permutation(len(lengths) * most).astype(np.int32)).view(len(lengths), most)
    pages = torch.from_numpy(rng.standard_normal((order.numel(), page, h_k, dim)) * size).clamp_(-1, 1).to(dtype)
    for row, length in zip(order, lengths, strict=True):
        used = -(-length // page)
        pages[row[used:].long()] = torch.nan
        if length % page:
            pages[row[used - 1], length % page :] = torch.nan
        row[used:] = 2147480000
    q = torch.from_numpy(rng.standard_normal((len(lengths), s_q, h_q, dim)) * size).clamp_(-1, 1).to(dtype)
    return Serving(q, pages, order, torch.tensor(lengths, dtype=torch.int32))


def assert_right(x: Serving, columns: int = 512, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of every sequence against the reference, of its own tokens; a row that sees none has 0 and +inf."""
    metadata, nothing = get_mla_metadata()
    out, lse = flash_mla_with_kvcache(x.q, x.pages, x.table, x.lengths, columns, metadata, nothing, **options)
    assert out.dtype == x.q.dtype and out.shape == (*x.q.shape[:3], columns)
    assert lse.dtype == torch.float32 and lse.shape == (x.q.shape[0], x.q.shape[2], x.q.shape[1])
    said = {"layout": "blhd", "causal": options.get("causal", False), "scale": options.get("softmax_scale")}
    for n, length in enumerate(x.lengths.tolist()):
        used = x.table[n, : -(-length // x.pages.shape[1])].long()
        k = as_numpy(x.pages[used].reshape(-1, *x.pages.shape[2:])[:length])[None]
        q = as_numpy(x.q[n])[None]
        want, want_lse = sl.reference.attention(q, k, None, value_dim=columns, return_lse=True, **said)
        dot = current_isa().dot(q.dtype)
        bounds = sl.reference.error_bound(q, k, None, value_dim=columns, dot=dot, **said)
        unseen = np.isneginf(want_lse)
        assert_within(as_numpy(out[n])[None], want, bounds.out, zeros_allowed=True)
        assert_within(as_numpy(lse[n])[None], np.where(unseen, INF, want_lse), bounds.lse, "lse", zeros_allowed=True)
    return out, lse


def test_signatures():
    names = (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None"
    )
    own = inspect.signature(flash_mla_with_kvcache).parameters.values()
    shown = [x.name if x.default is x.empty else f"{x.name}={x.default}" for x in own]
    assert ", ".join(shown) == names


LENGTHS = (20, 140, 4096)
# as their dense test draws them: batch, queries, tokens, query heads, kv heads, lengths that differ
DENSE = [
    (b, s_q, s_k, h_q, h_k, differ)
    for b in (1, 2, 6)
    for s_q in (1, 2, 4)
    for s_k in LENGTHS
    for h_q in (1, 3, 9, 63, 64, 126, 128)
    for h_k in (1, 2, 3, 8)
    for differ in (False, True)
    if h_q % h_k == 0
]
FEW = [
    (1, 1, 140, 128, 1, False), (2, 2, 140, 9, 3, True), (2, 4, 20, 63, 1, True), (2, 2, 20, 64, 8, False),
]  # fmt: skip


@pytest.mark.parametrize("case", DENSE if FULL else FEW, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dense_decoding(rng, case, causal):
    b, s_q, s_k, h_q, h_k, differ = case
    lengths = [max(s_q, int(rng.normal(s_k, s_k / 2))) if differ else s_k for _ in range(b)]
    assert_right(draw(rng, lengths, s_q, h_q, h_k), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_without_tokens(rng, causal):
    out, lse = assert_right(draw(rng, [0, 70, 1, 0], 2, 9), causal=causal)
    assert not out[0].any() and (lse[0] == INF).all()
    assert (lse[2, :, 0] == INF).all() == causal  # one token, of which the first of two queries is ahead


# flashinfer's: tokens of three kinds of sequence, queries, page size; scaled as before the absorption
PAGED = [
    (kinds, qo_len, page)
    for kinds in ((0, 17, 514), (1, 33, 2743), (3, 79, 514), (11, 114, 8736))
    for qo_len in (1, 3, 7, 17)
    for page in (1, 16, 64)
]


@pytest.mark.parametrize("case", PAGED if FULL else PAGED[1:10:4], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_that_differ(rng, case, causal):
    kinds, qo_len, page = case
    x = draw(rng, list(kinds), qo_len, 16, page=page, dtype=torch.float16, size=1.0 if FULL else 0.5)
    assert_right(x, softmax_scale=(128 + 64) ** -0.5, causal=causal)


def test_without_a_rotary_part(rng):
    """The key is the latent alone."""
    x = draw(rng, [97, 97], 3, 16, page=16, dim=512, dtype=torch.float16, size=0.5)
    assert_right(x, softmax_scale=1 / math.sqrt(128))


def test_large_queries(rng):
    """Scores of some hundreds, as flashinfer's test against wrong scales has them."""
    x = draw(rng, [128, 128], 1, 16, page=16)
    assert_right(x._replace(q=x.q * 1000), softmax_scale=(128 + 64) ** -0.5)


def test_unwritten_tokens_are_never_read(rng):
    """Infinity, as an empty pool may hold, past the lengths."""
    x = draw(rng, [127, 5], 1, 16, page=1)
    want = assert_right(x)
    pages = torch.where(x.pages.isnan(), torch.inf, x.pages)
    assert all(torch.equal(a, b) for a, b in zip(assert_right(x._replace(pages=pages)), want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_sizes(rng, dtype):
    assert_right(draw(rng, [50, 300], 2, 6, 2, page=7, dim=40, dtype=dtype, size=0.5), 33, causal=True)


def test_metadata_serves_calls_of_one_size(rng):
    x = draw(rng, [70, 20], 1, 4, dim=40)
    metadata, nothing = get_mla_metadata(x.lengths, 4, num_heads_k=1)
    assert nothing is None and not metadata.have_initialized
    with pytest.raises(sl.Error, match="cache_seqlens"):  # a call that fails leaves it empty
        flash_mla_with_kvcache(x.q, x.pages, x.table, x.lengths[:1], 32, metadata)
    assert metadata == FlashMLASchedMeta()
    first = flash_mla_with_kvcache(x.q, x.pages, x.table, x.lengths, 32, metadata)
    again = flash_mla_with_kvcache(x.q, x.pages, x.table, x.lengths, 32, metadata)
    assert metadata.have_initialized and all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for q, causal, what in ((x.q[:, :, :2], False, "h_q 4 as in the first; got 2"), (x.q, True, "causal False")):
        with pytest.raises(sl.ArgumentError, match=f"tile_scheduler_metadata: expected calls of one size, {what}"):
            flash_mla_with_kvcache(q, x.pages, x.table, x.lengths, 32, metadata, causal=causal)


def test_what_is_refused(rng):
    x = draw(rng, [70, 20], 1, 4, dim=40)
    given = {
        "q": x.q, "k_cache": x.pages, "block_table": x.table, "cache_seqlens": x.lengths, "head_dim_v": 32,
        "tile_scheduler_metadata": get_mla_metadata()[0],
    }  # fmt: skip
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache: expected None; got True. Rows of codes, scales and bfloat16"),
        ({"is_fp8_kvcache": 1}, "is_fp8_kvcache: expected"),
        ({"attn_sink": torch.zeros(4)}, "attn_sink: expected None without indices; .*sink_logits=.*; got Tensor"),
        ({"topk_length": x.lengths}, "topk_length: expected None without indices"),
        ({"num_splits": x.lengths}, "num_splits: expected None; got Tensor"),
        ({"extra_k_cache": x.pages}, "extra_k_cache: expected None without indices"),
        ({"tile_scheduler_metadata": None}, r"tile_scheduler_metadata: expected what get_mla_metadata\(\) returns"),
        ({"block_table": None}, "block_table: expected a tensor; got NoneType"),
        ({"cache_seqlens": [70, 20]}, "cache_seqlens: expected a tensor; got list"),
        ({"head_dim_v": 41}, "head_dim_v: expected 1 to 40, k_cache's head_dim; got 41"),
        ({"head_dim_v": None}, "head_dim_v: expected an int; got NoneType"),
        ({"q": x.q[0]}, "q: expected 4 dimensions"),
        ({"q": x.q[..., :39]}, "q: expected head_dim 40, as k_cache has"),
        ({"q": x.q.double()}, "k_cache: expected"),
        ({"causal": None}, "causal: expected"),
        ({"softmax_scale": "1"}, "softmax_scale: expected"),
        ({"block_table": x.table + 100}, "block_table: expected"),
        ({"cache_seqlens": x.lengths + 5000}, "cache_seqlens: expected"),
        ({"k_cache": x.pages.clone().requires_grad_()}, "k_cache: requires grad"),
    ]
    for change, message in wrong:
        with pytest.raises(sl.Error, match=f"^{message}"):
            flash_mla_with_kvcache(**(given | change))
    with pytest.raises(TypeError, match="scale: expected.*softmax_scale="):
        flash_mla_with_kvcache(**given, scale=1.0)  # type: ignore[call-arg]
