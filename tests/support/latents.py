"""Latent keys for tests: problems of attention over them, and the ways in which their two parts may lie in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from problems import numpy_dtype
from ways import lie

import speedlight as sl

WIDTHS = ((1, 0), (1, 1), (7, 1), (16, 8), (33, 5), (24, 40), (64, 16), (130, 3))  # of the latent and the rotary part
PLACES = ("apart", "one row", "rotary first", "sliced", "transposed", "unaligned")


@dataclass(frozen=True)
class Latents:
    """A problem whose values are the first columns of its keys."""

    q: np.ndarray
    latent: np.ndarray
    rotary: np.ndarray
    value_dim: int
    options: dict[str, Any]

    @property
    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        return self.latent, self.rotary

    @property
    def k(self) -> np.ndarray:
        """Keys in one array."""
        return np.concatenate([self.latent, self.rotary], -1)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v, each an array of its own."""
        return self.q, self.k, self.latent[..., : self.value_dim].copy()

    def rows(self, first: int, end: int) -> np.ndarray:
        """Some of the queries."""
        return self.q.take(np.arange(first, end), self.length_axis)

    @property
    def length_axis(self) -> int:
        return {"bhld": 2, "blhd": 1, "hld": 1, "lhd": 0}[self.options.get("layout", "bhld")]


def draw_latents(
    rng: np.random.Generator,
    dtype: str,
    q_len: int,
    k_len: int,
    *,
    widths: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    keys: str | None = None,
    layout: str = "bhld",
    **options: Any,
) -> Latents:
    """Draws a problem.

    Args:
        widths: of the latent and the rotary part; `heads`: of keys, and queries for each; by default drawn.
        keys: dtype of keys, if it is not q's.
    """
    latent, rotary = widths or WIDTHS[rng.integers(len(WIDTHS))]
    kv_heads, group = heads or (int(rng.integers(1, 3)), int(rng.choice([1, 3, 4])))
    batch = 1 if layout in ("hld", "lhd") else int(rng.integers(1, 3))
    keys_batch = 1 if rng.random() < 0.3 else batch

    def numbers(kind: str, *shape: int) -> np.ndarray:
        x = rng.standard_normal(shape).astype(numpy_dtype(kind))
        x = x[0] if layout in ("hld", "lhd") else x
        return np.ascontiguousarray(x.swapaxes(-2, -3)) if layout in ("blhd", "lhd") else x

    return Latents(
        numbers(dtype, batch, kv_heads * group, q_len, latent + rotary),
        numbers(keys or dtype, keys_batch, kv_heads, k_len, latent),
        numbers(keys or dtype, keys_batch, kv_heads, k_len, rotary),
        latent if rng.random() < 0.5 else int(rng.integers(1, latent + 1)),
        {"layout": layout, **options},
    )


def laid(parts: tuple[np.ndarray, np.ndarray], place: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns both parts, lying in memory as `place` says; NaN is around them."""
    columns, more = (x.shape[-1] for x in parts)
    if place not in ("one row", "rotary first"):
        return lie(parts[0], place, rng), lie(parts[1], place, rng)
    wide = np.full((*parts[0].shape[:-1], columns + more + 5), np.nan, parts[0].dtype)
    first = 2 if place == "one row" else 3 + more
    second = 2 + columns if place == "one row" else 1
    latent, rotary = wide[..., first : first + columns], wide[..., second : second + more]
    latent[...], rotary[...] = parts
    return latent, rotary


def calls(p: Latents, place: str, rng: np.random.Generator) -> list[tuple[Any, Any, dict[str, int]]]:
    """Returns k, v and value_dim of every call that means the problem and copies nothing."""
    pair, columns = laid(p.parts, place, rng), {"value_dim": p.value_dim}
    row = laid(p.parts, "one row", rng)
    strides = row[0].strides
    joined = np.lib.stride_tricks.as_strided(row[0], (*row[0].shape[:-1], p.q.shape[-1]), strides)
    found = [
        (pair, pair[0][..., : p.value_dim], {}),
        (pair, None, columns),
        (list(pair), p.latent[..., : p.value_dim].copy(), {}),
        (joined, None, columns),
        (joined, joined[..., : p.value_dim], {}),
    ]
    return [*found, (pair, None, {})] if p.value_dim == p.latent.shape[-1] else found


def attend(p: Latents, k: Any, v: Any, **options: Any) -> tuple[bytes, bytes]:
    """Returns the bits of out and lse."""
    out, lse = sl.attention(p.q, k, v, return_lse=True, **p.options, **options)
    return out.tobytes(), lse.tobytes()
