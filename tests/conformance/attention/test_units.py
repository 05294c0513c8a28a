"""A vector unit that no CPU has, added where units are added, in tables: its bits are those of its base.

AVX-512 with 24 registers: of three query vectors a register tile has 6 keys, which divide neither a tile nor a panel.
Decoding takes two vectors of rows of keys at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, replace

import numpy as np
import pytest
from conftest import FULL
from engines import one_vector, tuned
from problems import CODES, numpy_dtype, qkv, taken
from test_attention import (  # noqa: F401 - collected here as well, with the fixture `isa` below
    test_every_dim,
    test_every_length,
    test_packed_is_padded_is_alone,
)

import speedlight as sl
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.products.product import CLASSES, product_of
from speedlight.cpu.runtime.compile import emit
from speedlight.host import machine, tunings
from speedlight.host.tunings import Fetching

BASES = [isa for isa in machine.host_isas() if isa.vector_bytes == 64][: None if FULL else 1]
ROW = tunings.RegisterTiles(
    24, (8, 8, 6),
    ((8, 1), (4, 1), (1, 1)), ((4, 2), (1, 4)), ((4, 2), (2, 1), (1, 2)), ((4, 1), (1, 1)),
    ((2, 8, 2), (1, 8, 1)), ((2, 8, 1),), ((4, 2, 3), (1, 4, 1)),
    ((6, 3), (8, 2), (8, 1)), 2,
)  # fmt: skip


@pytest.fixture(params=BASES, ids=[f"{base.name}r24" for base in BASES])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One with the features of a unit that this machine has."""
    unit = replace(request.param, name=f"{request.param.name}r24", registers=24)
    monkeypatch.setattr(machine, "ISAS", (unit, *machine.ISAS))
    for family, row in tunings.TUNINGS.items():
        monkeypatch.setitem(tunings.TUNINGS, family, replace(row, tiles=(row.tiles[0], ROW, *row.tiles[1:])))
    forget()
    monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
    with contextlib.nullcontext() if FULL else tuned(**one_vector(3)):  # the width that has six keys
        yield unit.name
    forget()


def forget() -> None:
    machine.host_isas.cache_clear()
    machine._chosen_isa.cache_clear()


@pytest.mark.each("dtype", "rows")
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 40])
def test_its_bits_are_those_of_the_unit_it_is_made_from(isa, rng, dtype, rows, monkeypatch):
    q, k, v = qkv(rng, dtype, 1, 3, 1, rows, 1300, 36, 40, 2.0)
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=36, value_dim=40, capacity=1300, dtype=dtype)
    cache.append(0, k, v)
    options = {"causal": True, "sink_logits": [0.5, -1.0, 3.0], "return_lse": True}
    assert isa in sl.plan(q, k, v, causal=True).kernel
    results = []
    for name in (isa, isa.removesuffix("r24")):
        monkeypatch.setenv("SPEEDLIGHT_ISA", name)
        results.append(b"".join(x.tobytes() for x in sl.attention(q, k, v, **options)))
    assert results[0] == results[1]
    assert cache.attend(0, q).tobytes() == sl.attention(q, k, v).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("codes", CODES)
def test_codes_have_the_bits_of_the_unit_it_is_made_from(isa, rng, codes, dtype, monkeypatch):
    """Of few rows, of some, and of panels."""
    q, k, v = qkv(rng, dtype, 1, 6, 2, 300, 300, 100, 72)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=100, value_dim=72, capacity=300, dtype=codes)
    cache.append(0, k, v)
    results = []
    for name in (isa, isa.removesuffix("r24")):
        monkeypatch.setenv("SPEEDLIGHT_ISA", name)
        results.append(b"".join(cache.attend(0, q[:, :, -n:]).tobytes() for n in (1, 3, 300)))
    assert results[0] == results[1]


FETCHINGS = (
    *[tunings.TUNINGS["other"].fetching] * FULL,
    Fetching(0, 0, 0, 0, False, 1, False, 0),
    Fetching(1, 3, 4096, 5, True, 2, True, 7),
)


@pytest.mark.parametrize("dtype", ["bfloat16", *CODES, *["float32"] * FULL])
def test_what_is_fetched_ahead_changes_no_bit(rng, dtype):
    q, k, v = qkv(rng, taken(dtype), 1, 4, 1, 1, 700, 64, 64)
    low = q.astype(numpy_dtype("bfloat16"))
    results = set()
    for fetching in FETCHINGS:
        with tuned(fetching=asdict(fetching)):
            cache = sl.KVCache(layers=1, kv_heads=1, head_dim=64, capacity=700, dtype=dtype)
            cache.append(0, k, v)
            own = (
                cache.attend(0, low).tobytes()
                if dtype in CODES
                else sl.attention(np.ascontiguousarray(q), k, v).tobytes()
            )
            rows = np.repeat(q, 150, axis=2)
            for d in (64, 9, 24) if FULL or dtype not in CODES else ():  # the last two in an odd number of parts
                own += sl.attention(rows[..., :d], k[..., :d], v, causal=True).tobytes()
            results.add(own + cache.attend(0, q).tobytes())
    assert len(results) == 1


@pytest.mark.parametrize("fetching", FETCHINGS)
def test_what_is_fetched_ahead_is_in_the_kernels(fetching):
    text = emit(Shape("decode", machine.current_isa(), "f32", cached=True, fetching=fetching))
    assert ("prefetch" in text) == (fetching.cache_blocks > 0)
    texts = {
        x: emit(Shape("forward", machine.current_isa(), "f32", 2, fetching=replace(fetching, rows=x))) for x in (0, 7)
    }
    assert texts[7].count("prefetch") > texts[0].count("prefetch")


def test_every_unit_has_a_row_in_every_table():
    for unit in machine.ISAS:
        tuning = tunings.shipped(unit)
        tiles = tuning.register_tiles(unit)
        for vectors, keys in enumerate(tiles.keys, 1):
            assert keys * vectors + vectors < unit.registers  # sums, and a vector of each query
        for product in {unit.product(storage) for storage in ("f32", "f64", "f16", "bf16")}:
            assert product in machine.PRODUCTS
            assert len(tuning.blockings[product].worth) == 3


def test_every_product_has_a_class_and_none_takes_anothers_tuning():
    assert machine.PRODUCTS.keys() == CLASSES.keys()
    for tuning in tunings.TUNINGS.values():
        assert tuning.blockings.keys() == machine.PRODUCTS.keys()


@pytest.mark.parametrize(("storage", "least"), [("f32", 0.0), ("bf16", 0.0), ("f64", 2.0**-51)])
def test_powers_are_as_near_as_their_product_says(storage, least):
    """2^f on [-1/2, 1/2] by the product's polynomial; float64 rounds, too, where that of f64 is tried."""
    product = product_of(Shape("forward", machine.isa_named("avx512bf16"), storage, 1))
    f = np.linspace(-0.5, 0.5, 100_001)
    found = 1.0 + sum(c * f**n for n, c in enumerate(product.exp2_terms, 1))
    assert np.abs(found / np.exp2(f) - 1.0).max() <= product.exp2_error + least
