"""Tensors that every rank draws alike, their shards, and what the specification says of the whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from sharded_cache import BATCH, DIM, HEADS, KV

from speedlight import reference
from speedlight.distributed import positions


def traced(call: Any, given: Any, flow: torch.Tensor, *more: Any, **options: Any) -> list[torch.Tensor]:
    """What a call returns, and what flows back to its tensors, in float64."""
    inputs = [x.clone().requires_grad_() for x in given]
    out = call(*inputs, *more, **options)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, flow))]


def drawn_tensors(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and what flows into out, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, n, length, DIM, generator=draw, dtype=dtype) for n in (HEADS, KV, KV, HEADS)]


def gradients(q: Any, k: Any, v: Any, flow: Any, **options: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv of the specification, in float64."""
    arrays = [x.double().numpy() for x in (q, k, v)]
    out, lse = reference.attention(*arrays, scale=0.3, return_lse=True, **options)
    found = reference.backward(*arrays, out, lse, flow.double().numpy(), scale=0.3, **options)
    return [torch.from_numpy(x) for x in (out, *found)]


def shard(x: torch.Tensor, kind: Any, dim: int = 2) -> torch.Tensor:
    own = positions(x.shape[dim], dist.get_world_size(), kind)[dist.get_rank()]
    return x.index_select(dim, torch.tensor([i for run in own for i in run], dtype=torch.int64))


def close(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        torch.testing.assert_close(x.double(), y, atol=3e-6, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")
