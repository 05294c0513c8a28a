"""PyTorch's own modules, and models of them, on speedlight: their fast paths, and 20 steps of training."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import FULL
from counting import SDPA, counted
from test_torch_sdpa import assert_equal, drawn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from speedlight.torch import patch, report, sdpa, unpatch

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
F = torch.nn.functional
FAST_PATH, WEIGHTS = "_native_multi_head_attention", "multi_head_attention_forward"


@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(training):
    """Without its weights it is ours, on the fast path and off it; with them it is PyTorch's, and counted."""
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).train(training)
    x = drawn(2, 8, 16)
    with torch.set_grad_enabled(training):
        want, weights = layer(x, x, x, need_weights=True)
        with sdpa():
            got, nothing = layer(x, x, x, need_weights=False)
            same, seen = layer(x, x, x)
    assert nothing is None and torch.equal(seen, weights) and torch.equal(same, want)
    assert_equal(got.detach(), want)
    name = SDPA if training else FAST_PATH
    assert report() == ({name: 1}, {(WEIGHTS if training else FAST_PATH, "need_weights"): 1})


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_numbers_are_not_counted(kind):
    """Models are built and traced with them; nothing attends, whatever asks for weights."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"), sdpa():
        x = torch.randn(2, 8, 16)
        for training in (True, False):
            layer = nn.MultiheadAttention(16, 2, batch_first=True).train(training)
            with torch.set_grad_enabled(training):
                layer(x, x, x)
                layer(query=x, key=x, value=x)
        F.scaled_dot_product_attention(*[x.to("meta")] * 3)
    assert report() == ({}, {})


PAD = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])
CAUSAL = torch.ones(8, 8, dtype=torch.bool).triu(1)
ENCODER_MASKS = {
    "none": {},
    "causal": {"src_mask": CAUSAL},
    "padding": {"src_key_padding_mask": PAD},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PAD},
    "heads": {"src_mask": CAUSAL.expand(4, 8, 8)},
}


@pytest.mark.each("masks", "norm_first")
@pytest.mark.parametrize("masks", ENCODER_MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoders_fast_path(masks, norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, norm_first=norm_first, batch_first=True, dtype=torch.float64).eval()
    x = drawn(2, 8, 16)
    with torch.no_grad():
        want = layer(x, **ENCODER_MASKS[masks])
        with sdpa():
            got = layer(x, **ENCODER_MASKS[masks])
    assert_equal(got, want)
    assert report() == ({FAST_PATH: 1}, {})


def test_float_masks_of_the_fast_path():
    """PyTorch reads them as bool there: what is not 0 hides. 0 and -inf mean the same to both."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x, added = drawn(2, 8, 16).float(), torch.zeros(8, 8).masked_fill(CAUSAL, -torch.inf)
    for mask, reports in ((added, ({FAST_PATH: 1}, {})), (torch.rand(8, 8) + 1, None)):
        with torch.no_grad():
            want = layer(x, src_mask=mask)
            with sdpa():
                got = layer(x, src_mask=mask)
        assert torch.allclose(got, want, atol=1e-5, equal_nan=True)
        found = report(reset=True)
        assert found == reports or list(found.left) == [
            (FAST_PATH, "a float mask of other numbers than 0 and -inf, which PyTorch reads as bool")
        ]


def test_nested_tensors_of_the_encoder():
    """nn.TransformerEncoder packs padded batches where nobody trains."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64), 2
    ).eval()
    x = drawn(2, 8, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        want = model(x, src_key_padding_mask=PAD)
        with sdpa():
            got = model(x, src_key_padding_mask=PAD)
    assert_equal(got, want)
    assert report() == ({FAST_PATH: 2}, {})


class Block(nn.Module):
    """Of a small GPT."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = (nn.Linear(16, n, dtype=torch.float64) for n in (48, 16))
        self.norm = nn.LayerNorm(16, dtype=torch.float64)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def gpt():
    return nn.Sequential(
        nn.Embedding(11, 16, dtype=torch.float64), Block(), Block(), nn.Linear(16, 11, dtype=torch.float64)
    )


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, dtype=torch.float64)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.first, self.last = nn.Embedding(11, 16, dtype=torch.float64), nn.Linear(16, 11, dtype=torch.float64)

    def forward(self, tokens):
        return self.last(self.body(self.first(tokens), mask=CAUSAL, is_causal=True))


def trained(make, steps=20):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    tokens, losses = torch.arange(24).view(3, 8) % 11, []
    for _ in range(steps):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("make", [gpt, *[Encoder] * FULL])
def test_training(make):
    """20 steps of models that exist: the same losses."""
    want = trained(make)
    patch()
    try:
        got = trained(make)
    finally:
        unpatch()
    assert report().taken == {SDPA: 40} and not report().left
    assert want[-1] < 0.9 * want[0]
    assert_equal(got, want)
