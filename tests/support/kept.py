"""Sequences of a cache, a ring or a pool by one interface: what tests of all three ask."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import caches
import numpy as np
import pools

import speedlight as sl

KINDS = ("cache", "ring", "pool")
RING = {"window": 20, "keep_first": 3, "capacity": None}


def padded(x: np.ndarray, counts: Sequence[int]) -> np.ndarray:
    """(total, heads, dim) of sequences one after another as (batch, heads, longest, dim), NaN past each one's end."""
    out = np.full((len(counts), x.shape[1], max(counts), x.shape[2]), np.nan, x.dtype)
    for to, (a, b) in zip(out, itertools.pairwise(itertools.accumulate(counts, initial=0)), strict=True):
        to[:, : b - a] = x[a:b].swapaxes(0, 1)
    return out


class Kept:
    """Arguments and results are packed: the tokens of all sequences one after another, (total, heads, dim)."""

    def __init__(self, kind: str, batch: int, dtype: str = "float32", d: int = 16, dv: int = 17, **sizes: Any) -> None:
        self.batch = batch
        if kind == "pool":
            self.pool: Any = pools.made(dtype, d, dv, **({"pages": 150} | sizes))
            self.sequences = [self.pool.sequence() for _ in range(batch)]
        else:
            self.pool = None
            self.cache = caches.made(dtype, d, dv, batch=batch, **((RING if kind == "ring" else {}) | sizes))

    def append(self, k: np.ndarray, v: np.ndarray, new: Sequence[int]) -> None:
        if self.pool:
            self.pool.append(0, self.sequences, k, v, new_lengths=new)
        else:
            self.cache.append(0, padded(k, new), padded(v, new), new_lengths=new)

    def attend(
        self, q: np.ndarray, k: Any, v: Any, new: Sequence[int], asked: Sequence[int] | None = None, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """out (total, heads, dim) and log-sum-exps (heads, total). asked: queries of each sequence, if not its new
        tokens; rows that pad a cache's results are zeros.
        """
        options |= {"return_lse": True} | ({} if asked is None else {"q_lengths": asked})
        if self.pool:
            return self.pool.attend(0, self.sequences, q, k, v, new_lengths=new, **options)
        rows = new if asked is None else asked
        lengths = {} if len(set(new)) == 1 else {"new_lengths": new}
        out, lse = self.cache.attend(0, padded(q, rows), padded(k, new), padded(v, new), **lengths, **options)
        for item, n in enumerate(rows):
            assert not out[item, :, n:].any() and np.isneginf(lse[item, :, n:]).all()
        own = [(out[item, :, :n].swapaxes(0, 1), lse[item, :, :n]) for item, n in enumerate(rows)]
        return np.concatenate([x for x, _ in own]), np.concatenate([x for _, x in own], axis=1)

    def truncate(self, lengths: Sequence[int]) -> None:
        if self.pool:
            for sequence, n in zip(self.sequences, lengths, strict=True):
                sequence.truncate(n)
        else:
            self.cache.truncate(lengths)

    def state(self) -> Any:
        """Lengths, and all that keys() gives."""
        if self.pool:
            return [(x.length(), x.keys(0).tobytes()) for x in self.sequences]
        return self.cache.lengths(0), self.cache.keys(0).tobytes()


def in_one_call(dtype: str, tokens: Sequence[Sequence[np.ndarray]], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a padded batch of all tokens comes to, (batch, heads, longest, dim); of codes by a cache."""
    lengths = [len(x[0]) for x in tokens]
    q, k, v = (padded(np.concatenate(x), lengths) for x in zip(*tokens, strict=True))
    if dtype in pools.KINDS[:4]:
        return sl.attention(q, k, v, lengths=lengths, causal=True, return_lse=True, **options)
    cache = caches.made(dtype, k.shape[3], v.shape[3], batch=len(tokens))
    return cache.attend(0, q, k, v, new_lengths=lengths, return_lse=True, **options)
