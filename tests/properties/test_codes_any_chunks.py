"""Codes in any chunks, caches, pages and shared prefixes have the bits of one call, of each class on every unit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import FULL
from problems import CODE_FORMATS, STORAGE, digest, numpy_dtype, stacked

import speedlight as sl
from speedlight.arrays.dtypes import scales_of
from speedlight.cpu.engine import cascade
from speedlight.host.machine import Isa, runnable_isas

pytestmark = pytest.mark.usefixtures("one_width")

Rows = tuple[np.ndarray, np.ndarray]  # of one item: out [heads, length, value_dim], lse [heads, length]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"mask": sl.window(60, 0)},
    {"mask": lambda b, h, i, j: (i - j) % 3 != 1},
    {"score": sl.softcap(2.0)},
    {"dropout": 0.3, "seed": 5},
    {"mask": sl.window(130, 0) | sl.prefix(3), "score": sl.softcap(2.0), "dropout": 0.5, "seed": 7},
]
LENGTHS = (3, 16, 100, 128, 129, 300, 1100)
MANY = 350  # rows and more of a call, for which a reading of all keys costs little


class Coded(NamedTuple):
    """Tokens of a batch: of each item (heads, length, dim) of q, k and v; the first `shared` keys are everybody's."""

    codes: str
    latent: bool
    dims: tuple[int, int]
    heads: tuple[int, int]  # of keys, and of the queries for each of those
    items: list[list[np.ndarray]]
    shared: int
    options: dict[str, Any]

    @property
    def lengths(self) -> list[int]:
        return [q.shape[1] for q, *_ in self.items]

    def sizes(self) -> dict[str, Any]:
        sizes = {"layers": 1, "kv_heads": self.heads[0], "head_dim": self.dims[0], "value_dim": self.dims[1]}
        return sizes | {"dtype": self.codes, "latent": self.latent}

    def cache(self, batch: int | None = None) -> sl.KVCache:
        return sl.KVCache(
            batch=len(self.items) if batch is None else batch, capacity=max(self.lengths) + 5, **self.sizes()
        )

    def tokens(self, starts: list[int], counts: list[int]) -> list[list[np.ndarray]]:
        """Of each item that many tokens from its start on, as a call takes them: latents without values."""
        used = 2 if self.latent else 3
        return [
            [x[:, at : at + n] for x in item[:used]] for item, at, n in zip(self.items, starts, counts, strict=True)
        ]


def drawn(rng: np.random.Generator, kind: str, dtype: str, options: dict[str, Any]) -> Coded:
    """A problem of any sizes, with zeros, large numbers, and NaN near the end among its tokens."""
    codes, latent = CODE_FORMATS[kind]
    d, dv = (int(x) for x in rng.integers(1, 141, 2))
    if latent:
        d = dv + int(rng.choice([0, 1, 16, 20]))
    kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 5, 8])), int(rng.integers(1, 3))
    lengths = [int(rng.choice(LENGTHS)) for _ in range(batch)]
    shared = int(rng.integers(0, min(lengths) + 1))
    items: list[list[np.ndarray]] = []
    for length in lengths:
        sizes = (kv_heads * group, length, d), (kv_heads, length, d), (kv_heads, length, dv)
        item = [rng.standard_normal(size).astype(np.float32) for size in sizes]
        for x in item[1:]:  # tokens of one scale each
            x *= 2.0 ** rng.integers(-6, 3, (kv_heads, length, 1)).astype(np.float32)
            x[rng.random(x.shape) < 0.05] = 0
        if rng.random() < 0.5:  # which few rows see
            item[int(rng.integers(1, 3))][0, -1 - int(rng.integers(0, min(length, 3))), 0] = np.nan
        item = [x.astype(numpy_dtype(dtype)) for x in item]
        for x, first in zip(item[1:], items[0][1:] if items else (), strict=False):
            x[:, :shared] = first[:, :shared]
        items.append(item)
    if rng.random() < 0.3:
        options = options | {"sink_logits": rng.standard_normal(kv_heads * group).tolist()}
    return Coded(codes, latent, (d, dv), (kv_heads, group), items, shared, options)


def cut(rng: np.random.Generator, left: int) -> int:
    """A next chunk's length."""
    return min(left, MANY) if left > MANY else min(left, int(rng.choice([0, 1, 2, 7, 40, 300])))


def joined(parts: list[Rows]) -> Rows:
    out, lse = zip(*parts, strict=True)
    return np.concatenate(out, axis=1), np.concatenate(lse, axis=1)


def attended(p: Coded, cache: sl.KVCache, starts: list[int], counts: list[int]) -> list[Rows]:
    """Each item's rows of one call of a cache."""
    arrays = [stacked(x) for x in zip(*p.tokens(starts, counts), strict=True)]
    out, lse = cache.attend(0, *arrays, new_lengths=counts, return_lse=True, **p.options)
    return [(out[i, :, :n], lse[i, :, :n]) for i, n in enumerate(counts)]


def grown(rng: np.random.Generator, p: Coded, starts: list[int], attend: Callable[..., list[Rows]]) -> list[Rows]:
    """The rows of all chunks, from these starts on; each item has chunks of its own."""
    found: list[list[Rows]] = [[] for _ in p.items]
    at = list(starts)
    while at != p.lengths:
        counts = [cut(rng, length - x) for length, x in zip(p.lengths, at, strict=True)]
        if not any(counts):
            continue
        for rows, each in zip(found, attend(at, counts), strict=True):
            rows.append(each)
        at = [x + n for x, n in zip(at, counts, strict=True)]
    return [joined(x) if x else (np.zeros((1, 0, 1)), np.zeros((1, 0))) for x in found]


def in_one_call(rng: np.random.Generator, p: Coded) -> list[Rows]:
    return attended(p, p.cache(), [0] * len(p.items), p.lengths)


def in_chunks(rng: np.random.Generator, p: Coded) -> list[Rows]:
    cache = p.cache()
    return grown(rng, p, [0] * len(p.items), lambda at, counts: attended(p, cache, at, counts))


def after_a_prefix(rng: np.random.Generator, p: Coded) -> list[Rows]:
    """Rows behind the shared tokens, which a cache of one item has."""
    first = p.cache(batch=1)
    first.append(0, *[x[None, :, : p.shared] for x in p.items[0][1 : 2 if p.latent else 3]])
    cache = sl.KVCache.from_prefix(first, len(p.items), capacity=max(p.lengths) + 5)
    return grown(rng, p, [p.shared] * len(p.items), lambda at, counts: attended(p, cache, at, counts))


def in_pages(rng: np.random.Generator, p: Coded) -> list[Rows]:
    """Rows behind the shared tokens, in pages that forks share."""
    size = int(rng.choice([16, 48, 128]))
    pool = sl.PagePool(pages=sum(p.lengths) // size + 2 * len(p.items) + 2, page_size=size, **p.sizes())
    root = pool.sequence()
    pool.append(0, [root], *[x[:, : p.shared].swapaxes(0, 1) for x in p.items[0][1 : 2 if p.latent else 3]])
    sequences = [root.fork() for _ in p.items]

    def attend(at: list[int], counts: list[int]) -> list[Rows]:
        columns = zip(*p.tokens(at, counts), strict=True)
        arrays = [np.concatenate(x, axis=1).swapaxes(0, 1) for x in columns]
        out, lse = pool.attend(0, sequences, *arrays, new_lengths=counts, return_lse=True, **p.options)
        ends = np.cumsum([0, *counts])
        return [(out[a:b].swapaxes(0, 1), lse[:, a:b]) for a, b in itertools.pairwise(ends)]

    return grown(rng, p, [p.shared] * len(p.items), attend)


WAYS = {"chunks": in_chunks, "a prefix": after_a_prefix, "pages": in_pages}


def class_of(unit: Isa, kind: str, dtype: str) -> str:
    """What multiplies: units that have it in common have the same bits."""
    codes, latent = CODE_FORMATS[kind]
    return unit.product(STORAGE[dtype], codes=scales_of(codes, latent=latent))


def units_of(kind: str, dtype: str) -> list[Isa]:
    """All units; in a short run one of each class and number of lanes."""
    units = {(class_of(x, kind, dtype), x.vector_bytes): x for x in reversed(runnable_isas())}
    return [*runnable_isas()] if FULL else [*units.values()]


def behind(rows: list[Rows], first: int) -> list[str]:
    """Digests of each item's rows from the first on."""
    return [digest((out[:, first:], lse[:, first:])) if out.shape[1] > first else "" for out, lse in rows]


def compare(p: Coded, seed: int, kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares all ways on all units."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    described = f"{p.dims}, {p.heads}, {p.lengths}, {p.shared} shared, {[*p.options]}"
    for unit in units_of(kind, dtype):
        monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
        whole = in_one_call(np.random.default_rng(seed), p)
        found.setdefault(class_of(unit, kind, dtype), {}).setdefault(tuple(behind(whole, 0)), unit.name)
        for way, rows in WAYS.items():
            first = 0 if way == "chunks" else p.shared
            got = rows(np.random.default_rng([seed, 1]), p)
            assert behind(got, 0) == behind(whole, first), f"{way} on {unit.name}: {described}"
    for each in found.values():
        assert len(each) == 1, f"{sorted(each.values())} differ: {described}"


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared keys are read together wherever that is possible."""
    monkeypatch.setattr(cascade, "LEAST_RATIO", 0.0)
    monkeypatch.setattr(cascade, "LEAST_SECONDS", -1e9)


# a short run has float32 and float16 queries, whose kernels multiply alike, of some formats each
SOME = [(kind, "bfloat16") for kind in CODE_FORMATS] + [("int8", "float16"), ("int4", "float32")]
CASES = [(kind, dtype) for kind in CODE_FORMATS for dtype in STORAGE] if FULL else SOME


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_bits_of_one_call(kind, dtype, monkeypatch):
    """Each class has the same bits on each of its units: float32 and float16 queries on all."""
    for seed in range(40 if FULL else 4):
        rng = np.random.default_rng([seed, *kind.encode()])
        options = OPTIONS[(CASES.index((kind, dtype)) + (seed if FULL else 0)) % len(OPTIONS)]
        compare(drawn(rng, kind, dtype, options), seed, kind, dtype, monkeypatch)


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("seen", [21, 50, 133])
def test_a_mask_shows_part_of_a_chunk(kind, seen, monkeypatch):
    """Tiles sum chunks of 32 keys from an even number of blocks on, wherever the first key is that a mask shows."""
    rng = np.random.default_rng(seen)
    item = [rng.standard_normal((heads, 290, 32)) for heads in (4, 2, 2)]
    item[2] *= 2.0 ** rng.integers(-9, 3, (2, 290, 1))  # sums are rounded
    item = [x.astype(numpy_dtype("bfloat16")) for x in item]
    p = Coded(CODE_FORMATS[kind][0], False, (32, 32), (2, 2), [item], 0, {"mask": sl.window(seen, 0)})
    for unit in units_of(kind, "bfloat16"):
        monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
        whole = attended(p, p.cache(), [0], [290])
        for step in (1, 16, 40):
            cache, found = p.cache(), []
            for at in range(0, 290, step):
                found += attended(p, cache, [at], [min(step, 290 - at)])
            assert behind([joined(found)], 0) == behind(whole, 0), f"steps of {step} on {unit.name}"
