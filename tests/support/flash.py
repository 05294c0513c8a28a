"""What flash-attn's documentation says its calls compute, in float64, one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attended(
    q: Tensor, k: Tensor, v: Tensor, *, scale: Any = None, causal: bool = False, window: Any = (-1, -1),
    softcap: float = 0.0, slopes: Any = None, qv: Any = None, sink: Any = None, score: Any = None, mask: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out (sq, h, dv) and log-sum-exps (h, sq) of q (sq, h, d), k (sk, hk, d), v (sk, hk, dv)."""
    q, k, v = q.double(), k.double(), v.double()
    (sq, heads, d), (sk, kv_heads, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k)
    if qv is not None:
        s = s + torch.einsum("ihd,jhd->hij", qv.double(), v)
        d += qv.shape[-1]
    s = s * (d**-0.5 if scale is None else scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(sq)[:, None], torch.arange(sk)
    distance = i + sk - sq - j
    if slopes is not None:
        s = s - slopes.double()[:, None, None] * distance.abs()
    if score is not None:
        s = torch.stack([score(s[h], h, i, j) for h in range(heads)])
    left, right = (-1 if n is None else n for n in window)
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if causal:
        hidden |= distance < 0
    if left >= 0:
        hidden |= distance > left
    if right >= 0:
        hidden |= -distance > right
    if mask is not None:
        hidden |= ~mask(i, j)
    s = s.masked_fill(hidden, -math.inf)
    joined = s if sink is None else torch.cat((s, sink.double()[:, None, None].expand(-1, sq, 1)), -1)
    lse = joined.logsumexp(-1) if joined.shape[-1] else joined.new_full((heads, sq), -math.inf)
    p = (s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", p, v), lse


def batched(q: Tensor, k: Tensor, v: Tensor, *, slopes: Any = None, qv: Any = None, **options: Any) -> Any:
    """The same of a batch: out (b, sq, h, dv) and log-sum-exps (b, h, sq); slopes (h,) or (b, h)."""
    found = [
        attended(
            q[n], k[n], v[n], qv=None if qv is None else qv[n],
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[n], **options,
        )
        for n in range(len(q))
    ]  # fmt: skip
    return tuple(torch.stack(x) for x in zip(*found, strict=True))


def ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, *, slopes: Any = None, **options: Any) -> Any:
    """The same of packed sequences: out (total_q, h, dv) and log-sum-exps (h, total_q)."""
    found = []
    for n in range(len(cu_q) - 1):
        a, b = slice(cu_q[n], cu_q[n + 1]), slice(cu_k[n], cu_k[n + 1])
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[n]
        found.append(attended(q[a], k[b], v[b], slopes=own, **options))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs), torch.cat(lses, 1)


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: list[int], interleaved: bool) -> Tensor:
    """Rows (n, heads, d), each turned by the row of cos and sin of its position."""
    x = x.double().clone()
    half = cos.shape[1]
    for row, p in enumerate(at):
        for t in range(half):
            a, b = (2 * t, 2 * t + 1) if interleaved else (t, t + half)
            c, s = cos[p, t].double(), sin[p, t].double()
            first, second = x[row, :, a].clone(), x[row, :, b].clone()
            x[row, :, a], x[row, :, b] = first * c - second * s, second * c + first * s
    return x


def offsets(*lengths: int) -> Tensor:
    """From 0, as int32."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
