"""Codes in the order that docs/numerics.md specifies, one rounding at a time in NumPy: bit for bit, on every unit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import FULL
from engines import cpu_blocks
from problems import CODE_FORMATS, STORAGE, numpy_dtype
from test_bound_of_codes import Coded, coded

import speedlight as sl
from speedlight.cpu.kernels.softmax import LN4, LOG4_E
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.products.product import product_of
from speedlight.host.machine import Isa, runnable_isas

pytestmark = pytest.mark.usefixtures("one_width")

SMALLEST = np.float32(2.0**-126)
SPAN, TILE, CHUNK = 1024, 128, 32


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a · b + c of float32, rounded once: to odd in float64, then to float32."""
    a, b, c = (np.asarray(x, np.float32).astype(np.float64) for x in (a, b, c))
    product = a * b  # exact
    s = product + c
    part = s - product
    error = (product - (s - part)) + (c - part)
    inexact = (error != 0) & (s.view(np.int64) & 1 == 0)
    return np.where(inexact, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s).astype(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < SMALLEST, np.float32(0), x)


def step(a: Any, b: Any, c: Any) -> np.ndarray:
    """A multiply-add of the dot instruction, or of tiles."""
    return flushed(fma(flushed(a), flushed(b), c))


def chain_of_numbers(terms: list[tuple[Any, Any]], zero: np.ndarray) -> np.ndarray:
    return functools.reduce(lambda total, x: fma(*x, total), terms, zero)


def chain_of_pairs(terms: list[tuple[Any, Any]], zero: np.ndarray) -> np.ndarray:
    """Sums a pair's second product first."""
    for first in range(0, len(terms), 2):
        for a, b in reversed(terms[first : first + 2]):
            zero = step(a, b, zero)
    return zero


def chain_of_tiles(terms: list[tuple[Any, Any]], zero: np.ndarray) -> np.ndarray:
    """Sums chunks of 32: the first elements of 16 pairs, the second ones, both sums, and what came before."""
    total = zero
    for first in range(0, len(terms), CHUNK):
        chains = [zero, zero]
        for i, (a, b) in enumerate(terms[first : first + CHUNK]):
            chains[i % 2] = step(a, b, chains[i % 2])
        total = step(1, step(1, chains[0], chains[1]), total)
    return total


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest bfloat16."""
    return flushed(flushed(x).astype(numpy_dtype("bfloat16")).astype(np.float32))


class Order(NamedTuple):
    """A class: the sum of products, what becomes of weights before these, and the terms of 2^f."""

    chain: Callable[[list[tuple[Any, Any]], np.ndarray], np.ndarray]
    rounded: Callable[[np.ndarray], np.ndarray]
    terms: tuple[float, ...] = ()


ORDERS = {
    "fma": Order(chain_of_numbers, lambda x: x),
    "pairs": Order(chain_of_pairs, bfloat16),
    "amx_tiles": Order(chain_of_tiles, bfloat16),
}


def exp4(x: np.ndarray, terms: tuple[float, ...]) -> np.ndarray:
    """4^x for x <= 0."""
    magic = np.float32(1.5 * 2**22)
    halves = (x + magic) - magic
    f, coefficients = x - halves, [np.float32(c * 2**n) for n, c in enumerate(terms, 1)]
    y = np.full_like(x, coefficients[-1])
    for c in [*coefficients[-2::-1], np.float32(1)]:
        y = fma(y, f, c)
    return np.where(x >= -63, np.ldexp(y, np.where(x >= -63, 2 * halves, 0).astype(np.int32)), np.float32(0))


State = tuple[np.ndarray, np.ndarray, np.ndarray]  # of rows: maximum, sum, sums of values


def modelled(q: np.ndarray, k: Coded, v: Coded, seen: np.ndarray, scale: float, order: Order) -> State:
    """The state of a head's rows [row, dim] after all keys; seen: [row, key]."""
    s = np.zeros(seen.shape, np.float32)
    for i, block in enumerate(k.blocks):
        columns = [*zip(q[:, block].T[:, :, None], k.codes[:, block].T[:, None], strict=True)]
        own = order.chain(columns, np.zeros_like(s))
        s = fma(own, k.scales[:, i], s if i else np.float32(-0.0))
    c = np.float32(scale * LOG4_E)
    state = nothing(len(q), v)
    for at in range(0, s.shape[1], SPAN):
        part = span_of(s, v, seen, range(at, min(at + SPAN, s.shape[1])), c, order)
        state = merged(state, part, order)
    return state


def nothing(rows: int, v: Coded) -> State:
    none = np.zeros(rows, np.float32)
    return none - np.inf, none, np.zeros((rows, v.codes.shape[1]), np.float32)


def span_of(s: np.ndarray, v: Coded, seen: np.ndarray, keys: range, c: np.float32, order: Order) -> State:
    top, total, acc = nothing(len(s), v)
    for first in range(keys.start, keys.stop, TILE):
        tile = slice(first, min(first + TILE, keys.stop))
        shown = seen[:, tile]
        new = np.maximum(top, np.where(shown, s[:, tile], -np.inf).max(axis=1) * c)
        base = np.where(np.isinf(new), np.float32(0), new)
        p = np.where(shown, exp4(fma(s[:, tile], c, -base[:, None]), order.terms), np.float32(-0.0))
        alpha = exp4(np.where(np.isinf(top), np.float32(-100), top - base), order.terms)
        own = functools.reduce(np.add, p.T, np.full(len(s), -0.0, np.float32))
        some = shown.any(axis=1)
        sums = np.zeros_like(acc)
        for i, block in enumerate(v.blocks):
            weights = order.rounded(p * v.scales[tile, i])
            rows = [
                (np.where(y, w, 0)[:, None], x)
                for w, x, y in zip(weights.T, v.codes[tile, block], shown.T, strict=True)
            ]
            sums[:, block] = order.chain(rows, sums[:, block])
        acc = np.where(some[:, None], fma(acc, alpha[:, None], sums), acc)
        total, top = np.where(some, fma(total, alpha, own), total), np.where(some, new, top)
    return top, total, acc


def merged(first: State, second: State, order: Order) -> State:
    """Two states; an empty one leaves the other as it is."""
    if np.isinf(first[0]).all():
        return second
    empty = np.isinf(second[0])
    top = np.maximum(first[0], second[0])
    a, b = (exp4(np.where(np.isinf(x), np.float32(-100), x - top), order.terms) for x in (first[0], second[0]))
    both = [
        fma(y, b.reshape(n), x * a.reshape(n)) for x, y, n in zip(first[1:], second[1:], (-1, (-1, 1)), strict=True)
    ]
    total, acc = (np.where(empty.reshape(n), x, y) for x, y, n in zip(first[1:], both, (-1, (-1, 1)), strict=True))
    return top, total, acc


ROWS = 5  # of queries, behind keys that all of them see
# keys, head_dim, value_dim: below, at and above units, blocks of columns, chunks and tiles; an odd number of each
SIZES = [(200, 64, 64), (131, 45, 77), (75, 7, 17), (1200, 100, 33)]


def drawn(rng: np.random.Generator, length: int, d: int, dv: int, *, latent: bool) -> tuple[np.ndarray, ...]:
    """Tokens of which, of keys alike, half of the values are the others' negative: the roundings of their sum are left.

    A row's last keys have values of zeros.
    """
    half = (length - ROWS) // 2
    q, k, v = (rng.standard_normal((heads, length, dim)) for heads, dim in ((2, d), (1, d), (1, dv)))
    v *= 2.0 ** rng.integers(-9, 3, (1, length, 1))
    partner = half + rng.permutation(half)
    k[:, partner], v[:, partner], v[:, 2 * half :] = k[:, :half], -v[:, :half], 0
    if latent:
        k[..., :dv] = v
        q[..., :dv] *= rng.random((1, length, 1)) < 0.5
    return q, k, v


def shape_of(kind: str, dtype: str, unit: Isa) -> Shape:
    codes, latent = CODE_FORMATS[kind]
    return Shape("decode", unit, STORAGE[dtype], cached=True, quantised=codes, latent=latent)


ALL = [(kind, dtype, unit) for kind in CODE_FORMATS for dtype in ("float32", "bfloat16") for unit in runnable_isas()]
# a short run has one unit of each class, and queries of float32 where that may be
SOME = {(kind, shape_of(kind, dtype, unit).product): (kind, dtype, unit) for kind, dtype, unit in reversed(ALL)}


@pytest.mark.parametrize(
    ("kind", "dtype", "unit"), ALL if FULL else [*SOME.values()], ids=lambda x: getattr(x, "name", x)
)
def test_bits_are_those_of_the_order(kind, dtype, unit, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
    (codes, latent), shape = CODE_FORMATS[kind], shape_of(kind, dtype, unit)
    order = ORDERS[shape.product]._replace(terms=product_of(shape).exp2_terms)
    rng = np.random.default_rng(2)
    for length, d, dv in SIZES:
        d = dv + d % 40 if latent else d
        q, k, v = (x.astype(numpy_dtype(dtype)) for x in drawn(rng, length, d, dv, latent=latent))
        keys = coded(k[0].astype(np.float32), codes, dv if latent else None)
        ends = [x for x in keys.blocks if x.start < dv]
        values = Coded(keys.codes[:, :dv], keys.scales[:, : len(ends)], ends)
        values = values if latent else coded(v[0].astype(np.float32), codes)
        seen = np.tile(np.arange(length) <= np.arange(length - ROWS, length)[:, None], (2, 1))
        rows = q[:, -ROWS:].astype(np.float32).reshape(-1, d)
        scale = 0.4 * d**-0.5
        top, total, acc = modelled(rows, keys, values, seen, scale, order)
        want = (acc / total[:, None]).astype(q.dtype)
        lse = (np.float64(top) * LN4 + np.log(np.float64(total))).astype(np.float32)
        for many in (False, True):
            with cpu_blocks(as_many=many):
                cache = sl.KVCache(
                    layers=1, kv_heads=1, head_dim=d, value_dim=dv, capacity=length, dtype=codes, latent=latent
                )
                before, new = (
                    [x[None, :, y] for x in ((k,) if latent else (k, v))] for y in (slice(-ROWS), slice(-ROWS, None))
                )
                cache.append(0, *before)
                got = cache.attend(0, q[None, :, -ROWS:], *new, scale=scale, return_lse=True)
            what = f"{length} keys, {d}, {dv}, {'many rows' if many else 'few'}"
            for name, x, y in zip(("lse", "out"), (got[1], got[0]), (lse, want), strict=True):
                x = x.reshape(y.shape)
                same = (x == y) & (np.signbit(x) == np.signbit(y))
                assert same.all(), f"{name} of {what}: {(~same).sum()} of {y.size}: {x[~same][:3]}, not {y[~same][:3]}"
