"""speedlight.flash_attn: flash-attn 2's calls mean what its documentation says."""

from __future__ import annotations

import importlib
import inspect
import math
import sys

import flash
import pytest
import torch
from flash import agree, close, infinite, made

import speedlight as sl
import speedlight.flash_attn as fa
from speedlight.flash_attn import v3, v4

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels

torch.set_num_threads(1)
INF = math.inf
DENSE = "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
DENSE += "deterministic=False, return_attn_probs=False"
ENDS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
DESCALE = "q_descale=None, k_descale=None, v_descale=None"
TAIL3 = f"softmax_scale=None, causal=False, qv=None, {DESCALE}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
TAIL3 += "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
SIGNATURES = {
    fa.flash_attn_func: f"q, k, v, {DENSE}",
    fa.flash_attn_qkvpacked_func: f"qkv, {DENSE}",
    fa.flash_attn_kvpacked_func: f"q, kv, {DENSE}",
    fa.flash_attn_varlen_func: f"q, k, v, {ENDS}, {DENSE}, block_table=None",
    fa.flash_attn_varlen_qkvpacked_func: f"qkv, cu_seqlens, max_seqlen, {DENSE}",
    fa.flash_attn_varlen_kvpacked_func: f"q, kv, {ENDS}, {DENSE}",
    fa.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    fa._flash_attn_forward: "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
    "alibi_slopes, return_softmax",
    fa._flash_attn_varlen_forward: f"q, k, v, {ENDS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, zero_tensors=False, num_splits=0",
    fa._flash_attn_backward: "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
    "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
    fa._flash_attn_varlen_backward: f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {ENDS}, dropout_p, softmax_scale, "
    "causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, "
    "zero_tensors=False",
    v3.flash_attn_func: f"q, k, v, {TAIL3}",
    v3.flash_attn_varlen_func: f"q, k, v, {ENDS}, seqused_q=None, seqused_k=None, {TAIL3}",
    v3.flash_attn_qkvpacked_func: f"qkv, softmax_scale=None, causal=False, {DESCALE}, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    v3.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    v3.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    f"cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, {DESCALE}, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
    "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    v4.flash_attn_func: "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, "
    "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
    "block_sparse_tensors_bwd=None, return_lse=False",
    v4.flash_attn_varlen_func: "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, "
    "aux_tensors=None, aux_scalars=None, return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False",
    v4.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None, cu_seqlens=None, seqused=None, "
    "virtual_batch_idx=None, return_lse=True",
}  # as their sources have them


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda x: f"{x.__module__.rpartition('.')[2]}.{x.__name__}")
def test_order_of_arguments(call):
    own = inspect.signature(call).parameters.values()
    assert ", ".join(str(p).partition(":")[0] + default_of(p) for p in own) == SIGNATURES[call]


def default_of(p: inspect.Parameter) -> str:
    return "" if p.default is p.empty else f"={p.default!r}"


CASES = {
    "plain": {},
    "causal, more queries than keys": {"causal": True, "sq": 9, "sk": 4},
    "causal, one query": {"causal": True, "sq": 1},
    "window": {"window": (3, 1)},
    "left only, scale": {"window": (2, -1), "scale": 0.3},
    "causal takes the window's right": {"causal": True, "window": (2, 5)},
    "softcap": {"softcap": 0.7},
    "slopes by head": {"slopes": (4,)},
    "slopes by item, causal, softcap": {"slopes": (2, 4), "causal": True, "softcap": 2.0},
}


@pytest.mark.parametrize("name", CASES)
def test_dense(name):
    options = dict(CASES[name])
    sq, sk = options.pop("sq", 5), options.pop("sk", 7)
    q, k, v = made(1, (2, sq, 4, 8), (2, sk, 2, 8), (2, sk, 2, 8), grad=True)
    slopes = options.pop("slopes", None)
    slopes = slopes if slopes is None else torch.rand(slopes)
    causal, window = options.get("causal", False), options.get("window", (-1, -1))
    scale, softcap = options.get("scale"), options.get("softcap", 0.0)
    out, lse, weights = fa.flash_attn_func(q, k, v, 0.0, scale, causal, window, softcap, slopes, True, True)
    true_out, true_lse = flash.batched(q, k, v, slopes=slopes, **options)
    agree((out, lse), (true_out, infinite(true_lse)), (q, k, v))
    assert weights.numel() == 0 and lse.dtype == torch.float32
    alone = fa.flash_attn_func(q, k, v, 0.0, scale, causal, window, softcap, slopes)
    assert torch.equal(alone, out)


def test_packed_in_one_tensor():
    (qkv,) = made(2, (2, 5, 3, 4, 8), grad=True)
    out = fa.flash_attn_qkvpacked_func(qkv, 0.0, None, True, (2, 0))
    true, _ = flash.batched(*qkv.unbind(2), causal=True, window=(2, 0))
    agree((out,), (true,), (qkv,))
    q, kv = made(3, (2, 5, 4, 8), (2, 7, 2, 2, 8))
    close(fa.flash_attn_kvpacked_func(q, kv, 0.0, 0.2), flash.batched(q, *kv.unbind(2), scale=0.2)[0])


@pytest.mark.parametrize("by_item", [False, True])
def test_varlen(by_item):
    cu_q, cu_k = flash.offsets(4, 0, 3, 2), flash.offsets(6, 2, 0, 5)
    q, k, v = made(4, (9, 4, 8), (13, 2, 8), (13, 2, 8), grad=True)
    slopes = torch.rand((4, 4) if by_item else (4,))
    options = {"causal": True, "window": (3, -1), "slopes": slopes}
    true_out, true_lse = flash.ragged(q, k, v, cu_q, cu_k, **options)
    given = (cu_q, cu_k, 4, 6, 0.0, None, True, (3, -1), 0.0, slopes)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *given, return_attn_probs=True)
    agree((out, lse), (true_out, infinite(true_lse)), (q, k, v))
    kv = torch.stack((k, v), 1)
    assert torch.equal(fa.flash_attn_varlen_kvpacked_func(q, kv, *given), out)


def test_varlen_in_one_tensor():
    (qkv,) = made(5, (9, 3, 4, 8))
    ends = flash.offsets(4, 5)
    out = fa.flash_attn_varlen_qkvpacked_func(qkv, ends, 5, causal=True)
    close(out, flash.ragged(*qkv.unbind(1), ends, ends, causal=True)[0])


def test_varlen_pages():
    pages_k, pages_v, q = made(6, (5, 3, 2, 8), (5, 3, 2, 8), (5, 4, 8))
    table, cu_q, cu_k = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32), flash.offsets(2, 3), flash.offsets(4, 6)
    out, lse, _ = fa.flash_attn_varlen_func(
        q, pages_k, pages_v, cu_q, cu_k, 3, 6, causal=True, window_size=(2, 0), block_table=table,
        return_attn_probs=True,
    )  # fmt: skip
    k, v = (torch.cat([x[table[0]].flatten(0, 1)[:4], x[table[1]].flatten(0, 1)[:6]]) for x in (pages_k, pages_v))
    true_out, true_lse = flash.ragged(q, k, v, cu_q, cu_k, causal=True, window=(2, 0))
    agree((out, lse), (true_out, true_lse))


def test_dropout():
    """S_dmask says what was dropped, and out and gradients are those of the weights that were kept."""
    q, k, v = made(7, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), grad=True)
    torch.manual_seed(0)
    out, lse, weights = fa.flash_attn_func(q, k, v, 0.4, causal=True, return_attn_probs=True)
    true_out, true_lse = flash.batched(q, k, v, causal=True)
    close(lse, true_lse)
    assert weights.shape == (2, 4, 5, 7) and 0.2 < (weights < 0).sum() / (weights != 0).sum() < 0.6
    unit = torch.eye(7).expand(2, 2, 7, 7).transpose(1, 2)
    close(weights.abs().transpose(1, 2), flash.batched(q, k, unit, causal=True)[0])
    keys, values = (x.double().repeat_interleave(2, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * 8**-0.5
    p = s.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(3), -INF).softmax(-1)
    true_out = torch.einsum("bhij,bjhd->bihd", p * (weights > 0) / 0.6, values)
    agree((out,), (true_out,), (q, k, v))
    torch.manual_seed(0)
    assert torch.equal(fa.flash_attn_func(q, k, v, 0.4, causal=True), out)
    assert not torch.equal(fa.flash_attn_func(q, k, v, 0.4, causal=True), out)


def test_forward_and_backward_alone():
    """What ring attention does: the log-sum-exps of all keys, gradients of a part of them; and dropout's state."""
    q, k, v = made(8, (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), grad=True)
    true = flash.batched(q, k, v)
    dout = torch.randn(2, 6, 4, 8)
    wanted = torch.autograd.grad(true[0], (q, k, v), dout.double())
    with torch.no_grad():
        halves = [
            fa._flash_attn_forward(q, k[:, a:b], v[:, a:b], 0.0, 8**-0.5, False, -1, -1, 0.0, None, False)
            for a, b in ((0, 4), (4, 6))
        ]
    out, lse = sl.merge([x[0].transpose(1, 2) for x in halves], [x[1] for x in halves])
    out = out.transpose(1, 2)
    close(out, true[0])
    dq = torch.zeros_like(q, dtype=torch.float64)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for a, b in ((0, 4), (4, 6)):
        part = torch.empty_like(q)
        ends = part, dk[:, a:b], dv[:, a:b]
        sums = fa._flash_attn_backward(
            dout, q, k[:, a:b], v[:, a:b], out, lse, *ends, 0.0, 8**-0.5, False, -1, -1, 0.0, None, False
        )
        dq += part
    for x, y in zip((dq, dk, dv), wanted, strict=True):
        close(x, y)
    close(sums, (dout * out).sum(-1).transpose(1, 2))
    out, lse, weights, state = fa._flash_attn_forward(q, k, v, 0.3, None, True, -1, -1, 0.0, None, True)
    given = (q, k, v, out, lse, *map(torch.empty_like, (q, k, v)))
    fa._flash_attn_backward(dout, *given, 0.3, None, True, -1, -1, 0.0, None, False, state)
    kept = (weights.clamp(min=0) / 0.7).double()
    per_head = torch.einsum("bhij,bihd->bjhd", kept, dout.double())
    close(given[-1], per_head.unflatten(2, (2, 2)).sum(3))
    with pytest.raises(sl.ArgumentError, match="rng_state"):
        fa._flash_attn_backward(dout, *given, 0.3, None, True, -1, -1, 0.0, None, False)


@pytest.mark.parametrize("dv", [torch.zeros(1, 3, 2, 8, dtype=torch.int32), torch.zeros(8).expand(1, 3, 2, 8)])
def test_gradients_are_written_where_they_fit_or_nowhere(dv):
    q, k, v = made(2, (1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    out, lse, *_ = fa._flash_attn_forward(q, k, v, 0.0, None, False, -1, -1, 0.0, None, False)
    dq, dk = torch.zeros_like(q), torch.zeros_like(k)
    with pytest.raises(sl.ArgumentError, match="^dv: expected shape .* of floats, each in memory of its own"):
        fa._flash_attn_backward(out, q, k, v, out, lse, dq, dk, dv, 0.0, None, False, -1, -1, 0.0, None, False)
    with pytest.raises(sl.ArgumentError, match="^dk: expected memory of its own for every element; got some of dq's"):
        fa._flash_attn_backward(out, q, k, v, out, lse, dq, dq, dk, 0.0, None, False, -1, -1, 0.0, None, False)
    assert not dq.any() and not dk.any()


def test_slopes_of_packed_sequences_are_of_each():
    q, _, _ = made(2, (7, 4, 8), (1,), (1,))
    ends = flash.offsets(3, 4)
    for count in (1, 3):
        with pytest.raises(sl.ArgumentError, match=r"^alibi_slopes: expected shape .* or \(2, 4\), by"):
            fa.flash_attn_varlen_func(q, q, q, ends, ends, 4, 4, alibi_slopes=torch.ones(count, 4))


def test_varlen_forward_and_backward_alone():
    """Rows that see nothing come with +inf, and the backward pass takes it."""
    cu_q, cu_k = flash.offsets(4, 3), flash.offsets(2, 5)
    q, k, v = made(9, (7, 4, 8), (7, 2, 8), (7, 2, 8), grad=True)
    true = flash.ragged(q, k, v, cu_q, cu_k, causal=True)
    out, lse, _, state = fa._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 4, 5, 0.0, None, True)
    close(out, true[0])
    assert (lse[:, :2] == INF).all() and lse[:, 2:].isfinite().all() and state.shape == (2,)
    dout, grads = torch.randn(7, 4, 8), [torch.empty_like(x) for x in (q, k, v)]
    sums = fa._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *grads, cu_q, cu_k, 4, 5, 0.0, None, True, -1, -1, 0.0, None, False
    )
    for x, y in zip(grads, torch.autograd.grad(true[0], (q, k, v), dout.double()), strict=True):
        close(x, y)
    close(sums, (dout * out).sum(-1).transpose(0, 1))
    used = torch.tensor([1, 4], dtype=torch.int32)
    out = fa._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, 4, 5, 0.0, None, False, seqused_k=used)[0]
    close(out[:4], flash.attended(q[:4], k[:1], v[:1])[0])
    close(out[4:], flash.attended(q[4:], k[2:6], v[2:6])[0])


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"dropout_p": 1.5}, "dropout_p"),
        ({"softmax_scale": "x"}, "softmax_scale"),
        ({"causal": "top-left"}, "causal"),
        ({"window_size": 3}, "window_size"),
        ({"window_size": (1.5, 0)}, "window_size"),
        ({"softcap": "x"}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
        ({"softcap": INF}, "softcap"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
        ({"alibi_slopes": torch.ones(3, 4)}, "alibi_slopes"),
        ({"k": torch.ones(2, 7, 2, 9)}, "k"),
        ({"v": torch.ones(2, 6, 2, 8)}, "v"),
    ],
)
def test_errors_name_the_argument(given, name):
    q, k, v = made(1, (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
    with pytest.raises(sl.Error, match=f"^{name}: expected"):
        fa.flash_attn_func(**{"q": q, "k": k, "v": v, **given})


def test_packed_shapes_are_checked():
    with pytest.raises(sl.ArgumentError, match="^qkv: expected"):
        fa.flash_attn_qkvpacked_func(torch.ones(2, 5, 2, 4, 8))
    with pytest.raises(sl.ArgumentError, match="^kv: expected"):
        fa.flash_attn_varlen_kvpacked_func(torch.ones(5, 4, 8), torch.ones(5, 4, 8), [0, 5], [0, 5], 5, 5)
    with pytest.raises(sl.ArgumentError, match="^return_attn_probs: expected"):
        fa.flash_attn_varlen_func(*[torch.ones(5, 4, 8)] * 3, [0, 5], [0, 5], 5, 5, 0.5, return_attn_probs=True)


class TestInstall:
    @pytest.fixture(autouse=True)
    def _clean(self):
        before = {name: x for name, x in sys.modules.items() if name.startswith("flash_attn")}
        yield
        fa.uninstall()
        assert {name: x for name, x in sys.modules.items() if name.startswith("flash_attn")} == before

    def test_code_finds_it(self):
        fa.install()
        from flash_attn import __version__, flash_attn_func, flash_attn_with_kvcache  # type: ignore
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # type: ignore # noqa: F401
        from flash_attn.flash_attn_interface import _flash_attn_forward, flash_attn_varlen_func  # type: ignore

        assert flash_attn_func is fa.flash_attn_func and flash_attn_varlen_func is fa.flash_attn_varlen_func
        assert _flash_attn_forward is fa._flash_attn_forward and flash_attn_with_kvcache is fa.flash_attn_with_kvcache
        assert __version__.startswith("2.8") and pad_input is fa.bert_padding.pad_input
        assert importlib.util.find_spec("flash_attn").name == "flash_attn"
        with pytest.raises(ImportError, match="flash_attn.layers"):
            import flash_attn.layers  # type: ignore # noqa: F401

    def test_other_versions(self):
        fa.install((3, 4))
        import flash_attn_interface  # type: ignore
        from flash_attn.cute import flash_attn_func  # type: ignore
        from flash_attn.cute.interface import flash_attn_varlen_func, get_scheduler_metadata  # type: ignore

        assert flash_attn_interface.flash_attn_func is v3.flash_attn_func
        assert flash_attn_interface.get_scheduler_metadata(2, 1, 8, 4, 2, 16, torch.tensor([5, 7])).numel() == 0
        assert flash_attn_func is v4.flash_attn_func and flash_attn_varlen_func is v4.flash_attn_varlen_func
        (x,), ahead = made(3, (7, 4, 8)), get_scheduler_metadata(4, 4, 4, 4, 8, 1, cu_seqlens_q=torch.tensor([0, 7]))
        assert flash_attn_varlen_func(x, x, x, cu_seqlens_q=[0, 7], cu_seqlens_k=[0, 7], scheduler_metadata=ahead)
        fa.install()
        assert "flash_attn_interface" not in sys.modules and "flash_attn.cute" not in sys.modules

    def test_what_was_there_comes_back(self, monkeypatch):
        theirs = {name: type(sys)(name) for name in ("flash_attn", "flash_attn.ops")}
        for name, x in theirs.items():
            monkeypatch.setitem(sys.modules, name, x)
        fa.install()
        assert sys.modules["flash_attn"] is not theirs["flash_attn"] and "flash_attn.ops" not in sys.modules
        fa.uninstall()
        assert {name: sys.modules[name] for name in theirs} == theirs
        monkeypatch.undo()

    @pytest.mark.parametrize("versions", [(), (5,), 2])
    def test_versions_are_checked(self, versions):
        with pytest.raises(sl.ArgumentError, match="^versions: expected"):
            fa.install(versions)


def test_padding_there_and_back():
    x = torch.randn(3, 4, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    tokens, indices, ends, longest, used = fa.bert_padding.unpad_input(x, mask, 1 - mask)
    assert tokens.shape == (12, 2) and longest == 4 and used.tolist() == [2, 0, 3] and ends.tolist() == [0, 4, 8, 12]
    tokens, indices, ends, longest, used = fa.bert_padding.unpad_input(x, mask)
    assert ends.dtype == torch.int32 and ends.tolist() == [0, 2, 2, 5] and longest == 3
    back = fa.bert_padding.pad_input(tokens, indices, 3, 4)
    assert torch.equal(back, x * mask[..., None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, mask[..., None].expand(3, 4, 2).float())
