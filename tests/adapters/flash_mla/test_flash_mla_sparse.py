"""FlashMLA's calls for chosen tokens: the cases of its sparse tests, prefill and decoding, and what is refused."""

from __future__ import annotations

import inspect
import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import as_numpy
from tolerance import assert_within

import speedlight as sl
from speedlight.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from speedlight.host.machine import current_isa

pytestmark = pytest.mark.usefixtures("one_width")
INF = float("inf")
NONE = [-2147483648, -123456, -1, 114514, 1919810, 2147480000, 2147483647]  # what their tests put where no token is
SIZES = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


class Row(NamedTuple):
    """A query over the tokens that it sees, and its results."""

    out: np.ndarray  # (heads, columns)
    top: np.ndarray  # (heads,)
    lse: np.ndarray


def choose(rng: np.random.Generator, count: int, tokens: int) -> np.ndarray:
    """Draws as many different tokens as there are; numbers of none fill the row."""
    found = rng.permutation(tokens)[:count]
    return np.concatenate([found, rng.choice([*NONE, max(tokens, 1) + 2**20], count - len(found))])


def assert_right(
    q: torch.Tensor, seen: torch.Tensor, sinks: Any, scale: float, columns: int, got: tuple[Any, ...]
) -> None:
    """One query's results, out (heads, columns), its largest scores or None, and lse, against those of its tokens."""
    out, top, lse = got
    if not len(seen):
        assert not out.any() and (lse == INF).all() and (top is None or (top == -INF).all())
        return
    queries, keys = as_numpy(q)[None, :, None], as_numpy(seen)[None, None]  # [1, heads, 1, head_dim], one kv head
    said: dict[str, Any] = {"value_dim": columns, "scale": scale}
    want, want_lse = sl.reference.attention(queries, keys, None, return_lse=True, **said)
    bounds = sl.reference.error_bound(queries, keys, None, dot=current_isa().dot(q.dtype), **said)
    bound, bound_lse = bounds.out[0, :, 0], bounds.lse[0, :, 0]
    want, want_lse = want[0, :, 0], want_lse[0, :, 0]
    if sinks is not None:
        share = 1 / (1 + np.exp(as_numpy(sinks).astype(np.float64) - want_lse))
        want = want * share[:, None]
        bound = bound + np.abs(want) * (bound_lse[:, None] + 2 * SIZES[q.dtype]) + 1e-30
    assert_within(as_numpy(out), want, bound, zeros_allowed=True)
    assert_within(as_numpy(lse), want_lse, bound_lse, "lse", zeros_allowed=True)
    if top is not None:
        scores = scale * np.asarray(queries[0, :, 0], np.float64) @ np.asarray(keys[0, 0], np.float64).T
        size = (
            np.abs(scale) * np.abs(np.asarray(queries[0, :, 0], np.float64)) @ np.abs(keys[0, 0].astype(np.float64)).T
        )
        off = (q.shape[-1] + 8) * 2.0**-24 * size.max(-1) + 1e-7
        assert_within(as_numpy(top), scores.max(-1), off, "max_logits", zeros_allowed=True)


def draw_sinks(rng: np.random.Generator, heads: int) -> torch.Tensor:
    sinks, at = torch.from_numpy(rng.standard_normal(heads, dtype=np.float32)), torch.from_numpy(rng.random(heads))
    return sinks.masked_fill(at < 0.3, -INF).masked_fill(at > 0.7, INF)


def test_signatures():
    own = inspect.signature(flash_mla_sparse_fwd).parameters.values()
    shown = [x.name if x.default is x.empty else f"{x.name}={x.default}" for x in own]
    assert ", ".join(shown) == "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None"


# as their prefill test draws them: tokens, topk
PREFILL = [
    (128, 128), (512, 512), (592, 128), (1840, 256), (1592, 384), (1521, 512), (95, 128), (153, 256), (114, 384),
    (32, 2048),
]  # fmt: skip


class Prefill(NamedTuple):
    tokens: int
    topk: int
    rows: int
    heads: int
    dim: int
    sinks: bool
    cut: bool


ALL = [
    Prefill(*sizes, rows, heads, dim, sinks, cut)
    for sizes in PREFILL
    for rows in (1, 62)
    for heads in (64, 128)
    for dim in (512, 576)
    for sinks, cut in itertools.product((False, True), repeat=2)
]
FEW = [
    Prefill(592, 128, 5, 64, 576, False, False), Prefill(153, 256, 3, 64, 512, True, True),
    Prefill(32, 2048, 1, 128, 576, True, False), Prefill(95, 128, 7, 64, 512, False, True),
]  # fmt: skip


@pytest.mark.parametrize("case", ALL if FULL else FEW, ids=str)
def test_prefill(rng, case: Prefill):
    """Whatever no query has chosen is NaN; queries, tokens and indices are strided."""
    assert_prefill(rng, case, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_prefill_of_other_dtypes(rng, dtype):
    assert_prefill(rng, Prefill(300, 64, 9, 6, 40, True, True), dtype, columns=24)


def assert_prefill(rng, case: Prefill, dtype: torch.dtype, columns: int = 512) -> None:
    q, kv = (
        torch.from_numpy(rng.standard_normal((n, 2 * case.dim), dtype=np.float32) / 10 + 0.02).to(dtype)[:, : case.dim]
        for n in (case.rows * case.heads, case.tokens)
    )
    q, kv = q.unflatten(0, (case.rows, case.heads)), kv[:, None]
    chosen = np.stack([choose(rng, case.topk, case.tokens) for _ in range(case.rows)])
    if case.cut:
        chosen[rng.random(case.rows) < 0.2] = 2147483647
    indices = torch.from_numpy(chosen.astype(np.int32)).repeat(1, 2)[:, None, : case.topk]
    lengths = torch.from_numpy(rng.integers(0, case.topk + 1, case.rows, dtype=np.int32)) if case.cut else None
    sinks = draw_sinks(rng, case.heads) if case.sinks else None
    counts = [case.topk] * case.rows if lengths is None else lengths.tolist()
    seen = [[n for n in row[:count] if 0 <= n < case.tokens] for row, count in zip(chosen, counts, strict=True)]
    kv[np.setdiff1d(np.arange(case.tokens), np.concatenate([[], *seen]).astype(int))] = torch.nan
    out, top, lse = flash_mla_sparse_fwd(q, kv, indices, 0.5, columns, sinks, lengths)
    assert out.dtype == q.dtype and out.shape == (case.rows, case.heads, columns)
    assert top.dtype == lse.dtype == torch.float32 and top.shape == lse.shape == out.shape[:2]
    for n, row in enumerate(seen):
        assert_right(q[n], kv[row, 0], sinks, 0.5, columns, (out[n], top[n], lse[n]))


def test_prefill_of_several_kv_heads(rng):
    q, kv = (torch.from_numpy(rng.standard_normal(s, dtype=np.float32)) for s in ((4, 6, 16), (50, 2, 16)))
    indices = torch.from_numpy(np.stack([rng.permutation(50)[:8] for _ in range(8)]).reshape(4, 2, 8))
    out, top, lse = flash_mla_sparse_fwd(q, kv, indices, 0.3, 12)
    for n, head in itertools.product(range(4), range(2)):
        of = slice(3 * head, 3 * head + 3)
        got = out[n, of], top[n, of], lse[n, of]
        assert_right(q[n, of], kv[indices[n, head], head], None, 0.3, 12, got)


class Decoding(NamedTuple):
    """A batch over pages; what none of its queries has chosen is NaN."""

    given: dict[str, Any]
    seen: list[list[torch.Tensor]]  # by sequence and query: the tokens


def draw_pages(
    rng: np.random.Generator, lengths: list[int], s_q: int, topk: int, page: int, cut: bool, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, list[list[torch.Tensor]]]:
    """Pages in any order, chosen tokens as slots of them, topk_length, and the tokens that queries see."""
    most = -(-max(*lengths, 1) // page) + 1
    table = rng.permutation(len(lengths) * most).reshape(len(lengths), most)
    pages = torch.from_numpy(rng.standard_normal((table.size, 2 * page, 1, dim), dtype=np.float32) / 10)
    pages = pages.clamp_(-1, 1).bfloat16()[:, :page]  # strided
    counts = rng.integers(0, topk + 1, len(lengths)) if cut else np.full(len(lengths), topk)
    indices = np.full((len(lengths), s_q, topk), -1)
    keep, seen = np.zeros(table.size * page, bool), []
    for n, length in enumerate(lengths):
        for i in range(s_q):
            found = rng.permutation(length)[:topk]
            indices[n, i, : len(found)] = table[n, found // page] * page + found % page
            rng.shuffle(indices[n, i])
            keep[[x for x in indices[n, i, : counts[n]] if x >= 0]] = True
    pages[~torch.from_numpy(keep.reshape(table.size, page))] = torch.nan
    for n in range(len(lengths)):
        rows = [[x for x in row[: counts[n]] if x >= 0] for row in indices[n]]
        seen.append([pages[np.array(row, int) // page, np.array(row, int) % page, 0] for row in rows])
    return pages, torch.from_numpy(indices.astype(np.int32)), torch.from_numpy(counts) if cut else None, seen


def draw_decoding(
    rng: np.random.Generator, lengths: list[int], s_q: int, topk: int, *, heads: int = 64, dim: int = 576,
    page: int = 64, cut: bool = False, sinks: bool = True, extra: tuple[list[int], int, int, bool] | None = None,
) -> Decoding:  # fmt: skip
    """extra: lengths, topk and page size of the second cache, and whether it has lengths of rows."""
    q = torch.from_numpy(rng.standard_normal((len(lengths), s_q, heads, dim), dtype=np.float32)).clamp_(-1, 1)
    pages, indices, counts, seen = draw_pages(rng, lengths, s_q, topk, page, cut, dim)
    given: dict[str, Any] = {
        "q": q.bfloat16(), "k_cache": pages, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "softmax_scale": dim**-0.55, "indices": indices, "topk_length": counts,
        "attn_sink": draw_sinks(rng, heads) if sinks else None,
    }  # fmt: skip
    if extra is not None:
        more_lengths, more_topk, more_page, more_cut = extra
        pages, indices, counts, more = draw_pages(rng, more_lengths, s_q, more_topk, more_page, more_cut, dim)
        given |= {"extra_k_cache": pages, "extra_indices_in_kvcache": indices, "extra_topk_length": counts}
        seen = [[torch.cat(x) for x in zip(*rows, strict=True)] for rows in zip(seen, more, strict=True)]
    return Decoding(given, seen)


def assert_decoded(x: Decoding) -> None:
    q, scale, sinks = (x.given[name] for name in ("q", "softmax_scale", "attn_sink"))
    out, lse = flash_mla_with_kvcache(**x.given, tile_scheduler_metadata=get_mla_metadata()[0])
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], 512)
    assert lse.dtype == torch.float32 and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    for n, i in itertools.product(*map(range, q.shape[:2])):
        got = out[n, i], None, lse[n, :, i]
        assert_row(q[n, i], x.seen[n][i], sinks, scale, got, merged="extra_k_cache" in x.given)


def assert_row(q: Any, seen: Any, sinks: Any, scale: Any, got: Any, merged: bool) -> None:
    """As assert_right(); states of two caches are rounded before they are merged."""
    if not merged:
        assert_right(q, seen, sinks, scale, 512, got)
        return
    out, _, lse = got
    keys = seen.float()
    scores = scale * q.float() @ keys.T
    want_lse = torch.logsumexp(scores, -1)
    want = torch.softmax(scores, -1) @ keys[:, :512]
    if sinks is not None:
        want = want * torch.sigmoid(want_lse - sinks)[:, None]
    want = want.masked_fill(torch.isneginf(want_lse)[:, None], 0)
    assert (out - want).abs().max() <= 2.01 / 128 * want.abs().max() + 1e-3
    assert_within(
        as_numpy(lse), as_numpy(want_lse.masked_fill(want_lse == -INF, INF)), np.full(lse.shape, 5e-3), "lse",
        zeros_allowed=True,
    )  # fmt: skip


# as their decoding test draws them: tokens, topk, page size
DECODE = [(512, 64, 2), (512, 64, 69), (1024, 576, 61), (2046, 2048, 64), (650, 576, 53)]
FEW_DECODED = [DECODE[1], DECODE[4]]


@pytest.mark.parametrize("case", DECODE if FULL else FEW_DECODED, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_decoding(rng, case, cut):
    tokens, topk, page = case
    for dim, s_q, heads in ((576, 1, 64), (512, 3, 128)) if FULL else ((576, 2, 16),):
        lengths = [max(s_q, int(rng.normal(tokens, tokens / 2))) for _ in range(4)]
        assert_decoded(draw_decoding(rng, lengths, s_q, topk, heads=heads, dim=dim, page=page, cut=cut, sinks=not cut))


@pytest.mark.parametrize("sinks", [False, True])
def test_decoding_of_sequences_without_tokens(rng, sinks):
    assert_decoded(draw_decoding(rng, [0, 70, 0], 3, 16, heads=16, sinks=sinks))


@pytest.mark.parametrize("extra", DECODE if FULL else FEW_DECODED, ids=str)
@pytest.mark.parametrize("cut", [False, True])
def test_decoding_over_a_second_cache(rng, extra, cut):
    tokens, topk, page = extra
    lengths = [tokens, 0, tokens // 2, 0]
    x = draw_decoding(
        rng, [512, 90, 0, 0], 3, 64, heads=16, dim=512, page=61, cut=cut, extra=(lengths, topk, page, cut)
    )
    assert_decoded(x)


def test_metadata_knows_the_indices(rng):
    x = draw_decoding(rng, [70, 20], 1, 16, heads=4)
    metadata = get_mla_metadata()[0]
    flash_mla_with_kvcache(**x.given, tile_scheduler_metadata=metadata)
    shorter = x.given | {"indices": x.given["indices"][..., :8]}
    with pytest.raises(sl.ArgumentError, match="tile_scheduler_metadata: .* topk 16 as in the first; got 8"):
        flash_mla_with_kvcache(**shorter, tile_scheduler_metadata=metadata)


def test_what_prefill_refuses(rng):
    q, kv = torch.ones(3, 4, 24), torch.ones(20, 1, 24)
    indices = torch.from_numpy(np.stack([rng.permutation(20)[:5] for _ in range(3)]))[:, None].int()
    twice = indices.clone()
    twice[1, 0, 4] = twice[1, 0, 2]
    given: dict[str, Any] = {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.5, "d_v": 16}
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"indices": twice},
            rf"indices: expected each key once in a row; got {int(twice[1, 0, 2])} twice in .*\[1, 0\]",
        ),
        ({"indices": indices[:2]}, r"indices: expected ints of shape \(3, 1, topk\); got torch.int32 of shape \(2, 1"),
        ({"indices": indices.float()}, "indices: expected ints of shape"),
        ({"indices": indices[:, 0]}, "indices: expected 3 dimensions"),
        ({"indices": None}, "indices: expected a tensor; got NoneType"),
        ({"q": q[0]}, "q: expected 3 dimensions"),
        ({"kv": kv[..., :20]}, "kv: expected head_dim 24|q: expected head_dim 20"),
        ({"sm_scale": None}, "sm_scale: expected a number"),
        ({"sm_scale": INF}, "sm_scale: expected a finite"),
        ({"d_v": 25}, "d_v: expected 1 to 24, kv's head_dim; got 25"),
        ({"attn_sink": torch.zeros(3)}, r"attn_sink: expected floats of shape \(4,\)"),
        ({"topk_length": torch.zeros(4, dtype=torch.int32)}, r"topk_length: expected ints of shape \(3,\)"),
        ({"topk_length": torch.zeros(3)}, "topk_length: expected ints"),
    ]
    for change, message in wrong:
        with pytest.raises(sl.Error, match=f"^({message})"):
            flash_mla_sparse_fwd(**given | change)
    tail = torch.tensor([4, 4, 4])  # what is past it may be there twice
    assert not flash_mla_sparse_fwd(**given | {"indices": twice, "topk_length": tail})[0].isnan().any()


def test_what_decoding_refuses(rng):
    x = draw_decoding(rng, [70, 20], 1, 16, heads=4, extra=([30, 30], 8, 64, False))
    indices = x.given["indices"]
    twice = indices.clone()
    twice[..., :2] = indices[..., indices[0, 0].argmax(), None]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"indices": twice}, "indices: expected each key once in a row"),
        ({"extra_indices_in_kvcache": twice[..., :8]}, "extra_indices_in_kvcache: expected each key once"),
        ({"indices": indices + 10000}, "indices: expected numbers of keys from 0 to"),
        ({"extra_indices_in_kvcache": indices + 10000}, "extra_indices_in_kvcache: expected numbers of keys from 0"),
        ({"extra_k_cache": None}, "extra_indices_in_kvcache: expected None without extra_k_cache"),
        ({"extra_indices_in_kvcache": None}, "extra_k_cache: expected None without extra_indices_in_kvcache"),
        ({"causal": True}, "causal: expected False beside indices"),
        ({"is_fp8_kvcache": True}, "is_fp8_kvcache: expected None; got True.*bfloat16, also beside indices"),
        ({"attn_sink": torch.zeros(5)}, r"attn_sink: expected floats of shape \(4,\)"),
        ({"topk_length": torch.zeros(3, dtype=torch.int32)}, r"topk_length: expected ints of shape \(2,\)"),
        ({"k_cache": x.given["k_cache"].clone().requires_grad_()}, "k_cache: requires grad"),
        ({"extra_k_cache": x.given["extra_k_cache"][..., :500]}, "head_dim_v: expected|extra_k_cache: expected|q: "),
    ]
    for change, message in wrong:
        metadata = FlashMLASchedMeta()
        with pytest.raises(sl.Error, match=f"^({message})"):
            flash_mla_with_kvcache(**x.given | change, tile_scheduler_metadata=metadata)
        assert metadata == FlashMLASchedMeta()  # a call that fails leaves it empty
