"""Whole models, and gradients that only PyTorch's dense path has, beside PyTorch's attention: `run.py models`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import language_models
import programs
import torch
import torch.nn.functional as F
from contenders import Contender, Problem, short
from language_models import transformers
from torch import nn

import speedlight.torch
import speedlight.transformers

KINDS = ("gpt", "mask", "flex", *language_models.KINDS, *programs.KINDS)


def problems(kind: str) -> Iterator[Problem]:
    """Makes problems of a kind, or of all, one after another."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    speedlight.transformers.register()
    if kind in ("", "gpt"):
        yield from (_gpt(dtype) for dtype in (torch.float32, torch.bfloat16))
    if kind in ("", "mask"):
        yield from (_float_mask(d, heads) for d, heads in ((64, 1), (64, 8), (128, 1)))
    if kind in ("", "flex"):
        yield from (_documents(forward_only) for forward_only in (True, False))
    yield from language_models.problems(kind)
    yield from programs.problems(kind)


# --- a GPT of six layers, trained


def _gpt(dtype: torch.dtype, layers: int = 6, dim: int = 512, heads: int = 8, length: int = 2048) -> Problem:
    """Forward and backward pass; SDPA is PyTorch's, or ours by `speedlight.torch.sdpa()`."""

    def make() -> programs.Run:
        model = nn.Sequential(*(programs.Block(dim, heads, dropout=0.0) for _ in range(layers))).to(dtype)
        x = torch.randn(1, length, dim, dtype=dtype)
        return programs.step(model, lambda: model(x).float().square().mean())

    name = f"GPT of {layers} layers, {dim} wide, {heads} heads, {length} tokens, {short(dtype)}, a training step"
    return programs.asked(name, make)._replace(name=name, dtype=dtype)


# --- what PyTorch has no kernel for


def _float_mask(head_dim: int, mask_heads: int, heads: int = 8, length: int = 4096) -> Problem:
    """SDPA with a float mask that requires grad: PyTorch makes the matrix of scores."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, head_dim, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(mask_heads, length, length, requires_grad=True))
    flow = torch.randn(1, heads, length, head_dim)

    def run(attention: Callable[..., Any]) -> tuple[list[torch.Tensor], None]:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, flow)], None

    ours = Contender(lambda: run(speedlight.torch.scaled_dot_product_attention))
    theirs = Contender(lambda: run(F.scaled_dot_product_attention))
    name = f"SDPA, mask ({mask_heads}, {length}, {length}) requires grad, {heads} heads, d={head_dim}, float32"
    return Problem(name, {"speedlight": ours, "torch": theirs})


def _documents(forward_only: bool, heads: int = 8, length: int = 8192, head_dim: int = 64) -> Problem:
    """FlexAttention's ALiBi within documents: PyTorch compiles its forward pass, and has no backward pass here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, head_dim, requires_grad=not forward_only) for _ in range(3)]
    flow = torch.randn(1, heads, length, head_dim)
    document = torch.searchsorted(torch.arange(1, 8) * length // 8, torch.arange(length), right=True)
    slopes = torch.tensor([2.0 ** -(8 * (h + 1) / heads) for h in range(heads)])

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i >= j)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def run(attention: Callable[..., Any]) -> tuple[list[torch.Tensor], None]:
        out = attention(*inputs)
        return [out] if forward_only else [out, *torch.autograd.grad(out, inputs, flow)], None

    def dense(q: Any, k: Any, v: Any) -> Any:
        i, j = torch.arange(length)[:, None], torch.arange(length)
        mask = torch.where(seen(0, 0, i, j), -slopes[:, None, None] * (i - j), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, mask[None])

    block_mask = create_block_mask(seen, None, None, length, length, "cpu")
    ours = lambda q, k, v: speedlight.torch.flex_attention(q, k, v, alibi, block_mask)  # noqa: E731
    contenders = {"speedlight": Contender(lambda: run(ours)), "torch dense": Contender(lambda: run(dense))}
    if forward_only:
        compiled = torch.compile(flex_attention)
        contenders["torch flex"] = Contender(lambda: run(lambda q, k, v: compiled(q, k, v, alibi, block_mask)))
    name = f"flex: ALiBi in 8 documents, causal, {heads} heads, {length}, d={head_dim}, float32"
    name += ", forward" if forward_only else ", forward and backward"
    return Problem(name, contenders)
