"""The error bounds of codes, on a model of every class of arithmetic in NumPy: no engine, and any scales per block."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL
from test_bound import FILLS
from tolerance import assert_within

from speedlight import reference
from speedlight.arrays import dtypes

Random = np.random.Generator
SPAN, TILE, CHUNK = 1024, 128, 32
# of a class: how far a power of two may be off
POWERS = {"float32": 4 * 2.0**-24, "dot": 1.1e-4, "tiles": 1.1e-4}
DOT: dict[str, bool | str] = {"float32": False, "dot": True, "tiles": "tiles"}


class Coded(NamedTuple):
    """Rows of codes: columns that share a scale, and the scales; numbers without codes have a scale of 1."""

    codes: np.ndarray  # [keys, dim], float32
    scales: np.ndarray  # [keys, block]
    blocks: list[slice]

    @property
    def numbers(self) -> np.ndarray:
        """codes · scales, as keys() and values() give them."""
        parts = [self.codes[:, x] * self.scales[:, i, None] for i, x in enumerate(self.blocks)]
        return np.concatenate(parts, axis=1)


def coded(x: np.ndarray, dtype: str, latent: int | None = None) -> Coded:
    """Rows as a cache keeps them; latent: the columns of a latent, in front of numbers of bfloat16."""
    end = x.shape[1] if latent is None else latent
    size = (dtypes.CODES[dtype].block or end) if latent is None else dtypes.LATENT_BLOCK
    codes, scales = reference.quantise(x[:, :end], dtype, block=size)
    blocks = [slice(first, min(first + size, end)) for first in range(0, end, size)]
    if end < x.shape[1]:
        rest = x[:, end:].astype(ml_dtypes.bfloat16).astype(np.float32)
        codes, scales = np.concatenate([codes, rest], 1), np.concatenate([scales, np.ones((len(x), 1))], 1)
        blocks.append(slice(end, x.shape[1]))
    return Coded(codes, scales.astype(np.float32), blocks)


def fma(a: Any, b: Any, c: Any, kind: str) -> np.ndarray:
    """a · b + c of float32, rounded once; in the classes of bfloat16 subnormal numbers are zeros."""
    x = (np.float64(a) * b + c).astype(np.float32)
    return x if kind == "float32" else np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def narrow(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, without subnormal numbers."""
    x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    return np.where(np.abs(x) < 2.0**-126, np.float32(0), x)


def summed(terms: list[tuple[Any, Any]], kind: str) -> np.ndarray:
    """The sum of products in a class's order, from +0."""
    zero = np.zeros(np.broadcast_shapes(*[np.shape(x) for x in terms[0]]), np.float32)
    if kind == "float32":
        for a, b in terms:
            zero = fma(a, b, zero, kind)
        return zero
    if kind == "dot":  # of a pair the second first
        for first in range(0, len(terms), 2):
            for a, b in reversed(terms[first : first + 2]):
                zero = fma(a, b, zero, kind)
        return zero
    whole = zero
    for first in range(0, len(terms), CHUNK):
        chains = [zero, zero]
        for i, (a, b) in enumerate(terms[first : first + CHUNK]):
            chains[i % 2] = fma(a, b, chains[i % 2], kind)
        whole = fma(1, fma(1, chains[0], chains[1], kind), whole, kind)
    return whole


def modelled(rng: Random, q: np.ndarray, k: Coded, v: Coded, scale: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of a head: scores of blocks, tiles, spans."""
    if kind != "float32":
        q = np.where(np.abs(q) < 2.0**-126, np.float32(0), q)
    s = np.zeros((len(q), len(k.codes)), np.float32)
    for i, block in enumerate(k.blocks):
        columns = zip(q[:, block].T[:, :, None], k.codes[:, block].T[:, None], strict=True)
        s = fma(k.scales[:, i], summed([*columns], kind), s, kind)
    factor = np.float32(scale * np.log2(np.e))
    states = [span_of(rng, s[:, at : at + SPAN], v, at, factor, kind) for at in range(0, s.shape[1], SPAN)]
    top, total, acc = states[0]
    for their_top, their_total, their_acc in states[1:]:
        new = np.maximum(top, their_top)
        a, b = (np.exp2(x - new, dtype=np.float64).astype(np.float32) for x in (top, their_top))
        total, acc = fma(total, a, their_total * b, kind), fma(acc, a[:, None], their_acc * b[:, None], kind)
        top = new
    return acc / total[:, None], (top + np.log2(np.float64(total))) * np.log(2.0)


def span_of(
    rng: Random, s: np.ndarray, v: Coded, at: int, factor: np.float32, kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The state of a span's keys: the maximum as a power of two, L, and the sum of values."""
    scaled = (s * factor).astype(np.float32)
    top = np.full(len(s), -np.inf, np.float32)
    total, acc = np.zeros(len(s), np.float32), np.zeros((len(s), v.codes.shape[1]), np.float32)
    for first in range(0, s.shape[1], TILE):
        tile = slice(first, min(first + TILE, s.shape[1]))
        new = np.maximum(top, scaled[:, tile].max(axis=1))
        exact = np.exp2(fma(s[:, tile], factor, -new[:, None], "float32").astype(np.float64))
        p = (exact * (1 + POWERS[kind] * rng.uniform(-1, 1, exact.shape))).astype(np.float32)
        p = np.where(p < 2.0**-126, np.float32(0), p)
        alpha = np.exp2(np.float64(top) - new).astype(np.float32)
        own = np.zeros(len(s), np.float32)
        for weight in p.T:
            own = own + weight
        total, top = fma(total, alpha, own, kind), new
        keys = slice(at + tile.start, at + tile.stop)
        for i, block in enumerate(v.blocks):
            weights = p * v.scales[keys, i]
            weights = weights if kind == "float32" else narrow(weights)
            rows = zip(weights.T[:, :, None], v.codes[keys, block][:, None], strict=True)
            acc[:, block] = fma(acc[:, block], alpha[:, None], summed([*rows], kind), kind)
    return top, total, acc


def problem(rng: Random, dtype: str, kind: str, *, latent: bool) -> tuple[str, np.ndarray, Coded, Coded, float]:
    """Any pairing of FILLS; v of latents is their first columns."""
    names = [str(rng.choice(list(FILLS))) for _ in range(3)]
    length, rows = int(rng.choice([1, 17, 129, 300, 1100] if FULL else [1, 17, 129, 300])), 5
    d, dv = int(rng.choice([1, 31, 32, 33, 100])), int(rng.choice([16, 21, 45]))
    columns = int(rng.choice([1, 40, 128, 140])) if latent else None
    d = columns + int(rng.choice([0, 3, 20])) if columns is not None else d
    q, k, v = (
        FILLS[name](rng, size).astype(np.float32)
        for name, size in zip(names, ((rows, d), (length, d), (length, dv)), strict=True)
    )
    if kind != "float32":
        q = q.astype(ml_dtypes.bfloat16).astype(np.float32)
    keys = coded(k, dtype, columns)
    values = coded(v, dtype)
    if columns is not None:
        ends = [x for x in keys.blocks if x.start < columns]
        values = Coded(keys.codes[:, :columns], keys.scales[:, : len(ends)], ends)
    return "/".join(names), q, keys, values, float(rng.choice([1.0, 0.3, -0.05]))


def shares(rng: Random, dtype: str, kind: str, *, latent: bool) -> tuple[str, list[float]]:
    """How much of each bound the model uses. All within, or it raises."""
    name, q, k, v, scale = problem(rng, dtype, kind, latent=latent)
    with np.errstate(all="ignore"):
        out, lse = modelled(rng, q, k, v, scale, kind)
    kept: Any = q[None, None] if kind == "float32" else q.astype(ml_dtypes.bfloat16)[None, None]
    keys, values = k.numbers[None, None], v.numbers[None, None]
    more: dict[str, Any] = {"value_dim": values.shape[3]} if latent else {}
    stored = (keys, None if latent else values)
    want, want_lse = reference.attention(q[None, None], *stored, return_lse=True, scale=scale, **more)
    found = []
    for proven in (False, True):
        bounds = reference.error_bound(kept, *stored, codes=dtype, dot=DOT[kind], proven=proven, scale=scale, **more)
        what = f"{name}, {keys.shape}, {values.shape}, {'proven' if proven else 'ordinary'}"
        rounded = out.astype(kept.dtype)[None, None]
        found.append(assert_within(rounded, want, bounds.out, f"out of {what}", zeros_allowed=True))
        lses = lse.astype(np.float32)[None, None]
        found.append(assert_within(lses, want_lse, bounds.lse, f"lse of {what}", zeros_allowed=True))
    return name, found


@pytest.mark.parametrize("kind", [*POWERS])
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
@pytest.mark.parametrize("dtype", [*dtypes.CODES])
def test_codes_of_structured_problems(kind, dtype, latent):
    if latent and dtype == "int4":
        pytest.skip("latents have no codes of four bits")
    rng = np.random.default_rng(5)
    used = [shares(rng, dtype, kind, latent=latent)[1] for _ in range(300 if FULL else 25)]
    assert max(x[0] for x in used) > 0.05
