"""Problems of bfloat16 for units that must have the same bits: forward, few rows and caches, every option, awkward
sizes, values that are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import speedlight as sl

SIZES = [  # batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim
    (1, 2, 1, 70, 300, 64, 64), (2, 2, 2, 33, 140, 128, 128), (1, 4, 2, 1, 1500, 80, 48), (1, 1, 1, 75, 61, 7, 5),
    (1, 3, 1, 5, 200, 32, 96), (1, 2, 2, 130, 130, 40, 72),
]  # fmt: skip


class TileProblem(NamedTuple):
    """Sizes, options by name, values that are not finite or not, tokens of a cache or arrays, threads."""

    sizes: tuple[int, ...]
    options: str
    finite: bool
    cached: bool
    threads: int
    seed: int


OPTIONS: dict[str, Any] = {
    "none": {},
    "causal": {"causal": True},
    "window": {"mask": sl.window(70, 3)},
    "dilated": {"mask": sl.causal() & sl.dilated(3)},
    "score": {"score": sl.softcap(3.0), "causal": True},
    "sinks": {"sink_logits": True, "causal": True},
    "dropout": {"dropout": 0.25, "seed": 11},
    "scale": {"scale": -0.3},
}


def problems(seed: int) -> Iterator[TileProblem]:
    """Yields 66, each option and size with finite values or others, in arrays or a cache, on one thread or two."""
    for n, (sizes, name) in enumerate((s, o) for s in SIZES for o in OPTIONS):
        yield TileProblem(sizes, name, n % 3 != 0, False, 1 + n % 2, seed + n)
    for n, sizes in enumerate(SIZES * 3):
        name = ("none", "window", "score")[n % 3]
        yield TileProblem(sizes, name, n % 4 != 0, True, 1 + n % 2, seed + 100 + n)


def arrays_of(p: TileProblem) -> tuple[np.ndarray, ...]:
    """Returns q, k and v."""
    rng, (batch, heads, kv_heads, q_len, k_len, head_dim, value_dim) = np.random.default_rng(p.seed), p.sizes
    shapes = (batch, heads, q_len, head_dim), (batch, kv_heads, k_len, head_dim), (batch, kv_heads, k_len, value_dim)
    q, k, v = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes)
    if not p.finite:
        v[rng.random(v.shape) < 0.002] = np.inf
        v[rng.random(v.shape) < 0.002] = np.nan
    return q, k, v


def results(p: TileProblem) -> bytes:
    """Returns the bits of out and lse, of NaN that it is one."""
    q, k, v = arrays_of(p)
    rng, (batch, heads, kv_heads, _, k_len, head_dim, value_dim) = np.random.default_rng(p.seed), p.sizes
    options = dict(OPTIONS[p.options])
    if "sink_logits" in options:
        options["sink_logits"] = rng.standard_normal(heads).astype(np.float32)
    sl.set_threads(p.threads)
    try:
        if p.cached:
            cache = sl.KVCache(
                layers=1, batch=batch, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, capacity=k_len,
                dtype="bfloat16",
            )  # fmt: skip
            cache.append(0, k, v)
            options.pop("causal", None)
            found = [cache.attend(0, q, return_lse=True, **options)]
        else:
            found = [sl.attention(q, k, v, return_lse=True, **options)]
    finally:
        sl.set_threads(None)
    return b"".join(np.where(np.isnan(x), np.nan, x).astype(x.dtype).tobytes() for pair in found for x in pair)
