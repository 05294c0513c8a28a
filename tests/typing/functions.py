# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""Masks and scores as README and docs show them need no annotations. Checked by pyright, never run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import assert_type

import speedlight as sl
import speedlight.torch

q = k = v = np.ones((1, 8, 64, 32), np.float32)
docs, slopes = sl.table(np.repeat(np.arange(4), 16)), 2.0 ** -np.arange(1, 9)
captured = np.repeat(np.arange(4), 16)

sl.attention(q, k, v, mask=lambda b, h, i, j: (i >= j) & (docs[i] == docs[j]))
sl.attention(q, k, v, mask=lambda b, h, i, j: captured[i] == captured[j])
sl.attention(q, k, v, mask=lambda b, h, i, j: (i - j) % 4 != 0)
sl.attention(
    q, k, v, mask=sl.causal() & (sl.window(1024, 0) | sl.prefix(4)), score=[sl.softcap(30.0), sl.alibi(slopes)]
)
sl.attention(q, k, v, mask=sl.causal() & sl.expression(lambda b, h, i, j: docs[i] == docs[j]))
sl.attention(q, k, v, mask=q[..., :1] == 0, score=np.zeros((64, 64), np.float32))
sl.attention(q, k, v, score=lambda s, b, h, i, j: s - 0.5 * (i - j))
sl.attention(q, k, v, score=[lambda s, b, h, i, j: sl.tanh(s / 20) * 20, sl.softcap(30.0), np.zeros((64, 64))])
sl.attention(q, k, v, score=lambda s, b, h, i, j: sl.where(i - j < 4, s, -np.inf))
sl.attention(q, k, v, score=lambda s, b, h, i, j: np.exp(s) + torch.tanh(s).abs())
x = torch.ones(1, 2, 8, 4)
block_mask = speedlight.torch.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8, "cpu")
speedlight.torch.flex_attention(x, x, x, lambda s, b, h, i, j: torch.tanh(s / 20) * 20, block_mask)
assert_type(sl.expression(lambda b, h, i, j: (j <= i) & (i - j < 4)), sl.Expression)
sl.expression(lambda s, b, h, i, j: s * sl.cast(j, float))


def annotated(b: sl.Symbol, h: sl.Symbol, i: sl.Symbol, j: sl.Symbol) -> sl.Symbol:
    return (i >= j) & (sl.minimum(i, 9) >= j)


def of_flex_attention(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def everywhere(mask: sl.MaskFunction, score: sl.ScoreFunction) -> Any:
    return sl.attention(q, k, v, mask=mask, score=score)


sl.attention(q, k, v, mask=annotated)
sl.attention(q, k, v, mask=of_flex_attention)
everywhere(annotated, lambda s, b, h, i, j: s + i)

sl.attention(q, k, v, mask=lambda b, h, i: i)  # pyright: ignore
sl.attention(q, k, v, mask=sl.causal)  # pyright: ignore[reportArgumentType]
