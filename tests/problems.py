"""Problems for tests: awkward sizes in one table, and random ones that cover every feature."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES = ("float32", "float64", "float16", "bfloat16")
# head_dim, value_dim: one, odd, below, at and above the register tile and the vector, the sizes models use
DIMS = ((1, 1), (2, 3), (7, 9), (16, 16), (17, 33), (64, 64), (80, 96), (130, 8), (192, 128), (256, 256), (576, 512))
# q_len, k_len: nothing, one, around the panel, the tile and the span
LENGTHS = ((0, 5), (5, 0), (1, 1), (3, 127), (47, 128), (48, 129), (49, 255), (16, 1024), (20, 1025), (100, 2100))


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def qkv(
    rng: np.random.Generator,
    dtype: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    d: int,
    dv: int,
    size: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drawn, then rounded to the low type, so that the oracle sees the same numbers."""
    kind = numpy_dtype(dtype)
    q = (rng.standard_normal((batch, q_heads, q_len, d)) * size).astype(kind)
    k = (rng.standard_normal((batch, kv_heads, k_len, d)) * size).astype(kind)
    return q, k, rng.standard_normal((batch, kv_heads, k_len, dv)).astype(kind)


def random_problem(rng: np.random.Generator) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]:
    """One of R01's random problems."""
    dtype = str(rng.choice(DTYPES))
    d, dv = (int(rng.choice([1, 2, 3, 7, 8, 16, 17, 32, 33, 64, 80, 96, 128, 130])) for _ in range(2))
    q_len, k_len = int(rng.integers(0, 200)), int(rng.choice([0, 1, 2, 3, 127, 128, 129, 255, 300, 1023, 1025, 2048]))
    kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    size = min(float(rng.choice([0.1, 1, 3, 8])), 3.0 if dtype == "float16" else 8.0)
    q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, q_len, k_len, d, dv, size)
    if rng.random() < 0.2:
        v = np.abs(v)
    options: dict[str, Any] = {"causal": [False, True, "top-left"][rng.integers(3)]}
    if rng.random() < 0.3 and options["causal"] != "top-left":
        options["q_start"] = int(rng.integers(-50, k_len + 50))
    if rng.random() < 0.2:
        options["scale"] = float(rng.choice([-1, 0, 0.01, 2.5]))
    return (q, k, v), options


def far_scores(dtype: str) -> list[float]:
    """Finite scores beside which q · k is nothing: what other libraries' masks hold, and where log2 e times a score is infinite."""
    most = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    low = float(ml_dtypes.finfo(numpy_dtype(dtype)).min) if dtype == "bfloat16" else -most
    return [low, -most, most, -most / 2, 0.6 * most, -0.74 * most]


def without_far_scores(q: Any, k: Any, v: Any, far: float, every: int) -> tuple[Any, Any, Any]:
    """With ordinary scores, what adding `far` to the scores of every so many keys comes to: they are hidden, or all there is."""
    place = np.arange(k.shape[2]) % every == 0
    if far < 0 and every > 1:
        return q, k[:, :, ~place], v[:, :, ~place]
    return np.zeros_like(q), k[:, :, place], v[:, :, place]
