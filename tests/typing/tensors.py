# pyright: strict, reportUnknownMemberType=false, reportUnnecessaryTypeIgnoreComment=true
"""What type checkers know of calls on PyTorch's tensors, and JAX's arrays. Checked by pyright, never run."""

from __future__ import annotations

from typing import Any

import jax
import torch
from torch import Tensor
from typing_extensions import assert_type

import speedlight as sl
import speedlight.torch

q = k = v = torch.randn(1, 8, 64, 32, requires_grad=True)
learned = torch.nn.Parameter(torch.rand(8))

out, lse = sl.attention(q, k, v, return_lse=True)
assert_type(out, Tensor)
assert_type(lse, Tensor)
assert_type(sl.attention(q, k, v, causal=True, score=sl.alibi(learned)), Tensor)
assert_type(sl.attention(torch.nn.Parameter(q), k, v), Tensor)
sl.attention(q, k, v, causal=True).square().sum().backward()
sl.attention(q, k, v, k_lengths=torch.tensor([60]), score=learned.view(8, 1, 1))
assert_type(sl.merge([out], [lse]), tuple[Tensor, Tensor])
assert_type(sl.rotary(q), Tensor)
assert_type(sl.attention_backward(q, k, v, out, lse, out), tuple[Tensor, Tensor, Tensor])
assert_type(sl.key_weights(q, k, lse, reduce="max", queries=slice(-8, None)), Tensor)

assert_type(speedlight.torch.attention(q, k, v, causal=True, dropout=0.1, seed=torch.tensor(3)), Tensor)
assert_type(speedlight.torch.attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
assert_type(speedlight.torch.scaled_dot_product_attention(q, k, v, is_causal=True), Tensor)
assert_type(speedlight.torch.flex_attention(q, k, v), Tensor)
assert_type(speedlight.torch.flex_attention(q, k, v, return_lse=True), tuple[Tensor, Tensor])
layer = speedlight.torch.Attention(32, heads=4, kv_heads=2, causal=True, rotary=10000.0)
with speedlight.torch.sdpa():
    projected = layer(q)  # Any, as of all modules
assert_type(sl.attention(projected, projected, projected), Any)
cache = sl.KVCache(layers=1, kv_heads=8, head_dim=32, capacity=64, dtype=torch.bfloat16, device="cuda")
assert_type(cache.attend(0, q, k, v), Tensor)


def of_jax(x: jax.Array) -> None:
    assert_type(sl.attention(x, x, x, causal=True), jax.Array)
    assert_type(sl.attention(x, x, x, return_lse=True), tuple[jax.Array, jax.Array])


speedlight.torch.attention(q, k, v, is_causal=True)  # pyright: ignore[reportCallIssue]
speedlight.torch.atention(q, k, v)  # pyright: ignore[reportAttributeAccessIssue]
