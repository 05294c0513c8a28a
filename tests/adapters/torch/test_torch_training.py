"""nanoGPT's attention trains under speedlight.torch.sdpa() as with PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import speedlight.torch

pytestmark = pytest.mark.usefixtures("one_kernel")


class CausalSelfAttention(torch.nn.Module):
    """As nanoGPT has it."""

    def __init__(self, n_embd=64, n_head=4):
        super().__init__()
        self.c_attn, self.c_proj = torch.nn.Linear(n_embd, 3 * n_embd), torch.nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


def train(ours):
    """Losses of five steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(65, 64), CausalSelfAttention(), torch.nn.Linear(64, 65))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(65, (8, 33))
    losses = []
    with speedlight.torch.sdpa(ours):
        for _ in range(5):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_nanogpt_trains_as_with_pytorch():
    """The same losses step by step, and every call is taken."""
    speedlight.torch.report(reset=True)
    ours = train(True)
    assert "taken  5  scaled_dot_product_attention" in str(speedlight.torch.report(reset=True))
    np.testing.assert_allclose(ours, train(False), rtol=1e-4)
    assert ours[-1] < ours[0] - 0.1
