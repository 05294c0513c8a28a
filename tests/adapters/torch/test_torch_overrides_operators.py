"""PyTorch's own operators of attention on speedlight: its flash kernel for CPUs, and varlen_attn()."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FULL
from counting import FLASH, counted
from test_torch_sdpa import assert_equal, drawn, formula
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import speedlight as sl
from speedlight.torch import report, sdpa

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels


FLASH_FORMS = {  # causal or not, and what else
    "causal": (True, {}),
    "mask": (False, {"attn_mask": drawn(8, 8)}),
    "empty rows": (False, {"attn_mask": torch.where(drawn(8, 8) > 1.2, 0.0, -torch.inf), "scale": 0.3}),
}


@pytest.mark.parametrize("form", FLASH_FORMS)
def test_flash_operator(form):
    """The specification's values and log-sum-exps in PyTorch's layouts, and the backward with whom made the forward.

    PyTorch 2.13's own kernel takes some masks of -inf for none on CPUs without AVX-512: it is asked for layouts alone.
    """
    causal, rest = FLASH_FORMS[form]
    mask = rest.get("attn_mask")
    options = {"causal": causal, "score": None if mask is None else mask.numpy(), "scale": rest.get("scale")}
    q, d_out = drawn(2, 3, 8, 8), drawn(2, 3, 8, 8, seed=5)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    theirs = forward(q, q, q, 0.0, causal, **rest)
    with sdpa():
        ours = forward(q, q, q, 0.0, causal, **rest)
        counted_once = report().taken
    assert counted_once == {FLASH: 1}
    out, lse = sl.reference.attention(*[q.numpy()] * 3, return_lse=True, **options)
    want = out, np.where(lse == -np.inf, 0.0, lse)  # PyTorch's, of a row that sees no key
    for mine, other, right in zip(ours, theirs, want, strict=True):
        assert mine.stride() == other.stride() and mine.dtype == other.dtype
        assert_equal(mine, right)
    plain = backward(d_out, q, q, q, *theirs, 0.0, causal, **rest)
    got = backward(d_out, q, q, q, *ours, 0.0, causal, **rest)
    with sdpa():
        still = backward(d_out, q, q, q, *theirs, 0.0, causal, **rest)
    want = sl.reference.backward(*[q.numpy()] * 3, out, lse, d_out.numpy(), **options)
    for mine, other, same, right in zip(got, plain, still, want, strict=True):
        assert mine.stride() == other.stride() and torch.equal(other, same)
        assert_equal(mine, right)


WINDOWS = {"all": (-1, -1), "causal": (-1, 0), "window": (3, 0), "both sides": (2, 1)}


def by_sequence(q, k, v, window, lengths_q, lengths_k):
    """What varlen_attn() is, sequence by sequence, in FlashAttention's alignment."""
    parts = []
    for a, b, c in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
        i, j = torch.arange(len(a))[:, None] + len(b) - len(a), torch.arange(len(b))
        left, right = (n if n >= 0 else 99 for n in window)
        seen = (j >= i - left) & (j <= i + right)
        parts.append(formula(*(x.transpose(0, 1) for x in (a, b, c)), seen, enable_gqa=True).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("window", WINDOWS if FULL else ["both sides"])
def test_varlen(window):
    """torch.nn.attention.varlen, which PyTorch has for GPUs only: forwards and backwards."""
    lengths_q, lengths_k = [3, 1, 6], [5, 4, 6]
    q, k, v = (drawn(n, h, 8, seed=s, grad=True) for s, (n, h) in enumerate([(10, 4), (15, 2), (15, 2)]))
    cu_q, cu_k = (torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k))
    with sdpa():
        out, lse = varlen_attn(
            q, k, v, cu_q, cu_k, 6, 6, window_size=WINDOWS[window], enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        written = torch.empty_like(out)
        with torch.no_grad():
            varlen_attn_out(written, q, k, v, cu_q, cu_k, 6, 6, window_size=WINDOWS[window], enable_gqa=True)
    assert lse.shape == (4, 10) and torch.equal(written, out)
    want = by_sequence(q, k, v, WINDOWS[window], lengths_q, lengths_k)
    assert_equal(out, want)
    flow = drawn(10, 4, 8, seed=9)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), flow) for x in (out, want)), strict=True):
        assert_equal(a, b)
    assert report().taken == {"_flash_attention_forward": 2}


def test_varlen_of_caches():
    """Slots that are longer than their sequences, and pages."""
    q, k, v = drawn(4, 4, 8), drawn(20, 2, 8, seed=1), drawn(20, 2, 8, seed=2)
    cu_q, cu_k, used = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 4], [0, 10, 20], [7, 9]))
    keys, values = (torch.cat([x[:7], x[10:19]]) for x in (k, v))
    want = by_sequence(q, keys, values, (4, 0), [1, 3], [7, 9])
    with sdpa():
        got = varlen_attn(q, k, v, cu_q, cu_k, 3, 10, window_size=(4, 0), enable_gqa=True, seqused_k=used)
        assert_equal(got, want)
        table = torch.tensor([[1, 0], [3, 2]], dtype=torch.int32)
        pages = [x.view(4, 5, 2, 8)[torch.tensor([1, 0, 3, 2])] for x in (k, v)]
        got = varlen_attn(
            q, *pages, cu_q, None, 3, 10, window_size=(4, 0), enable_gqa=True, seqused_k=used, block_table=table
        )
    assert_equal(got, want)


def test_varlen_operator_of_a_batch():
    """Its operators without offsets: of a batch whose sequences are as long, or have fewer keys."""
    q, k, v, flow = (drawn(2, 5, 4, 8, seed=s) for s in range(4))
    i, j = torch.arange(5)[:, None], torch.arange(5)
    used = torch.tensor([3, 5], dtype=torch.int32)
    operators, sizes = torch.ops.aten, (None, None, 5, 5, 0.0)
    with sdpa():
        out, lse, *state = operators._flash_attention_forward(q, k, v, *sizes, True, False)
        got = operators._flash_attention_backward(flow, q, k, v, out, lse, *sizes, True, *state[:2])
        fewer = operators._flash_attention_forward(q, k, v, *sizes, False, False, seqused_k=used)[0]
    inputs = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    want = formula(*inputs, i >= j)
    assert_equal(out, want.transpose(1, 2))
    for a, b in zip(got, torch.autograd.grad(want, inputs, flow.transpose(1, 2)), strict=True):
        assert_equal(a, b.transpose(1, 2))
    assert_equal(fewer, formula(*inputs, (j < used[:, None])[:, None, None]).transpose(1, 2))


@pytest.mark.parametrize(
    ("dropout", "more", "words"),
    [
        (0.5, {}, "dropout_p: expected 0, and no debug mask"),
        (0.0, {"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "seqused_k: expected lengths of sequences"),
        (0.0, {"seqused_k": torch.tensor([9])}, r"seqused_k: expected a length of at most \[4\] .*; got \[9\]"),
        (0.0, {"seqused_k": torch.tensor([3]), "cum_seq_k": None}, "cum_seq_k: expected offsets of the sequences"),
    ],
)
def test_varlen_operator_names_what_it_refuses(dropout, more, words):
    q, cu = drawn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    given = {"cum_seq_q": cu, "cum_seq_k": cu, "max_q": 4, "max_k": 4} | more
    with sdpa(), pytest.raises(sl.Error, match=words):
        torch.ops.aten._flash_attention_forward(
            q, q, q, dropout_p=dropout, is_causal=False, return_debug_mask=False, **given
        )


def test_varlen_outside_is_refused():
    with sdpa():
        pass  # our kernel is in PyTorch's table
    q, cu = drawn(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"PyTorch has no kernel of it for the CPU.*speedlight\.torch\.sdpa"):
        varlen_attn(q, q, q, cu, cu, 4, 4)
