"""merge() on a device, by PyTorch."""

from __future__ import annotations

import functools

import torch


def merged(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over several sets of keys, from the attention over each, in float64; what saw nothing has no say."""
    logs = [x.double() for x in lses]
    top = functools.reduce(torch.fmax, logs)
    base = torch.where(torch.isneginf(top), 0.0, top)
    weights = [torch.exp(x - base) for x in logs]
    total = functools.reduce(torch.add, weights)
    out = torch.where(torch.isneginf(top), 0.0, -0.0)[..., None]  # -0 adds nothing, to the sign of zeros
    for x, log, weight in zip(outs, logs, weights, strict=True):
        out = out + torch.where(torch.isneginf(log)[..., None], -0.0, x.double() * (weight / total)[..., None])
    return out.to(outs[0].dtype), (base + torch.log(total)).to(lses[0].dtype)
