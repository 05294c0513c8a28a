"""Tiles of bfloat16: one product against its specification in NumPy, tile registers against vectors, bit for bit, and
what a process is told that may not have them.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from engines import cpu_blocks
from problems import qkv
from tile_problems import problems, results

import speedlight as sl
from speedlight.cpu.kernels.tile_test import TILE_BYTES, TileTestShape
from speedlight.cpu.runtime import compile as compiling
from speedlight.cpu.runtime import roof
from speedlight.errors import UnsupportedError
from speedlight.host import machine

SMALLEST = 2.0**-126
UNITS = [x for x in machine.runnable_isas() if x.dot("bfloat16") == "tiles"]

pytestmark = pytest.mark.skipif(not UNITS, reason="a machine without AVX-512")


def flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.float32(SMALLEST), np.copysign(np.float32(0), x), x).astype(np.float32)


def add(total: np.ndarray, term: np.ndarray) -> np.ndarray:
    """float32 total + float64 term, rounded once: to odd in float64, then to float32, subnormal results to zero."""
    a, b = total.astype(np.float64), term.astype(np.float64)
    with np.errstate(all="ignore"):
        s = a + b
        part = s - a
        error = (a - (s - part)) + (b - part)
        inexact = (error != 0) & (s.view(np.int64) & 1 == 0) & np.isfinite(s)
        s = np.where(inexact, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
        tiny = np.abs((s * 2.0**64).astype(np.float32)) < np.float32(2.0**-62)  # after rounding to 24 bits
        return np.where(tiny, np.copysign(0.0, s), s).astype(np.float32)


def tile_product(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """c[m, n] + a[m, pair, 2] · b[pair, n, 2], bits of bfloat16: the specification."""
    a, b = (flushed((x.astype(np.uint32) << 16).view(np.float32)).astype(np.float64) for x in (a, b))
    chains = [np.zeros(c.shape, np.float32) for _ in (0, 1)]
    with np.errstate(all="ignore"):
        for pair, i in itertools.product(range(a.shape[1]), (0, 1)):
            chains[i] = add(chains[i], a[:, pair, i, None] * b[None, pair, :, i])
        return add(flushed(c), add(*chains))


def drawn(rng: np.random.Generator, kind: str) -> np.ndarray:
    """Bits of bfloat16, [16, 16, 2]."""
    shape = (16, 16, 2)
    if kind == "any finite":
        bits = rng.integers(0, 1 << 16, shape).astype(np.uint16)
        return np.where(bits & 0x7F80 == 0x7F80, bits & 0xBFFF, bits).astype(np.uint16)
    x = rng.standard_normal(shape)
    if kind == "about the smallest":
        x *= 2.0 ** rng.integers(-70, -56, shape)
        x[rng.random(shape) < 0.1] *= 2.0**-70
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["normal", "about the smallest", "any finite"])
@pytest.mark.parametrize("unit", UNITS, ids=lambda x: x.name)
def test_a_product_is_the_specified_one(unit, kind):
    if unit.has_tiles:
        compiling.try_bfloat16(unit)
    rng, kernel = np.random.default_rng(3), compiling.kernel_of(TileTestShape(unit))
    for _ in range(40):
        memory = np.zeros((5, TILE_BYTES), np.uint8)
        a, b, c = drawn(rng, kind), drawn(rng, kind), rng.standard_normal((16, 16), np.float32)
        c *= 2.0**-100 if kind == "about the smallest" else 1
        for tile, x in enumerate((a, b, c)):
            memory[tile] = x.ravel().view(np.uint8)
        kernel.entry(memory.ctypes.data)
        want = tile_product(c, a, b)
        for got in memory[3:].view(np.float32).reshape(2, 16, 16):
            same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
            assert same.all(), f"{(~same).sum()} of 256 differ: {got[~same][:3]} for {want[~same][:3]}"


@pytest.mark.skipif(len(UNITS) < 2, reason="one unit has nothing to be compared with")
@pytest.mark.parametrize("part", range(4))
def test_every_unit_of_tiles_has_the_same_bits(part, monkeypatch):
    """Each also as many rows would be computed, and its hidden values never matter: problems have NaN there."""
    for p in list(problems(seed=1))[part::4]:
        seen = {}
        for unit in UNITS:
            monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
            seen[unit.name] = results(p)
        assert len(set(seen.values())) == 1, f"{p}: {sorted(seen)}"


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit whose bits are not those of multiply-adds."""
    monkeypatch.setenv("SPEEDLIGHT_ISA", UNITS[0].name)


@pytest.fixture
def masked() -> list[dict[str, Any]]:
    """Options of calls that few rows and many are compared in, beside none."""
    return [{"causal": True}, {"mask": sl.window(45, 2)}, {"causal": True, "dropout": 0.3, "seed": 5}]


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (40, 72), (7, 17), (130, 33)])
def test_few_rows_have_the_bits_of_many(rng, head_dim, value_dim, own, masked):
    """The decode kernel, of rows and of a cache, sums as tiles do, under masks that start anywhere, too."""
    q, k, v = qkv(rng, "bfloat16", 1, 4, 2, 3, 333, head_dim, value_dim, 2.0)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=head_dim, value_dim=value_dim, capacity=400, dtype="bfloat16")
    cache.append(0, k, v)
    for options in ({}, *masked):
        found = set()
        for many in (False, True):
            with cpu_blocks(as_many=many):
                found.add(sl.attention(q, k, v, **options).tobytes())
                if not options:
                    found.add(cache.attend(0, q).tobytes())
        assert len(found) == 1, options


@pytest.mark.parametrize("sizes", [(1, 1, 1e-38), (1e37, 1e-38, 1)])
def test_few_rows_take_subnormals_for_zeros_too(rng, sizes, own):
    q, k, v = qkv(rng, "bfloat16", 1, 4, 2, 3, 133, 64, 64, 1.0)
    q, k, v = ((x * np.float32(size)).astype(x.dtype) for x, size in zip((q, k, v), sizes, strict=True))
    assert min(abs(x[x != 0]).min() for x in (k, v)) < SMALLEST
    found = set()
    for many in (False, True):
        with cpu_blocks(as_many=many):
            found.add(sl.attention(q, k, v).tobytes())
    assert len(found) == 1


def test_a_sum_that_is_flushed_to_zero_has_no_sign(monkeypatch):
    """Beside negative values that weigh nothing any more: one of queries, or several, by tiles or not."""
    q, k, v = np.ones((1, 1, 2, 64)), np.full((1, 1, 161, 64), -20.0), np.full((1, 1, 161, 64), -1.0)
    k[:, :, 128::32], v[:, :, 128::32] = 20, 0  # in chunks of their own: a sum of one begins at +0
    v[:, :, 128], v[:, :, 160] = -1.5 * SMALLEST, SMALLEST
    found = set()
    for unit, many in itertools.product(UNITS, (False, True)):
        monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
        with cpu_blocks(as_many=many):
            out = sl.attention(*(x.astype(ml_dtypes.bfloat16) for x in (q, k, v)))
        assert not out.any()
        found |= set(np.signbit(out).ravel())
    assert found == {False}


def test_a_window_begins_at_any_key(rng, own):
    """Inside of what is summed together, too: nothing is seen of the keys before it."""
    q, k, v = qkv(rng, "bfloat16", 1, 2, 1, 1, 200, 64, 64, 1.0)
    for first in range(130, 200):
        mask, found = sl.window(199 - first, None), []
        for many in (False, True):
            with cpu_blocks(as_many=many):
                found.append(sl.attention(q, k, v, mask=mask).tobytes())
        assert found[0] == found[1], first


@pytest.mark.parametrize("hidden", [0, 16, 50])
def test_few_rows_leave_the_roundings_of_many(rng, hidden, own):
    """Of values whose sum is 0 a sum has its roundings alone, which bfloat16 does not hide."""
    q, k, v = qkv(rng, "bfloat16", 1, 1, 1, 2, 256, 8, 48, 1.0)
    q[...] = 0
    v *= (2.0 ** rng.integers(-12, 12, v.shape)).astype(v.dtype)
    half = (256 - hidden) // 2
    v[:, :, 256 - half :] = -v[:, :, 256 - 2 * half + rng.permutation(half)]
    options = {"mask": lambda b, h, i, j: j >= hidden} if hidden else {}
    found = set()
    for many in (False, True):
        with cpu_blocks(as_many=many):
            found.add(sl.attention(q, k, v, **options).tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("start", [16, 32, 112])
def test_few_rows_see_nothing_before_a_mask_begins(rng, start, own):
    """Though keys are summed from the chunk's first on."""
    q, k, v = qkv(rng, "bfloat16", 1, 2, 1, 2, 200, 8, 16, 1.0)
    q[...] = 0
    _, lse = sl.attention(q, k, v, mask=lambda b, h, i, j: j >= start, return_lse=True)
    assert np.allclose(np.exp(lse), 200 - start, rtol=1e-2)


@pytest.mark.parametrize("size", [1, 1e-38])
def test_values_that_are_not_finite_reach_those_who_see_them_alone(rng, size, own):
    """The others' bits are those of tiles, which take subnormals for zeros."""
    q, k, v = qkv(rng, "bfloat16", 1, 1, 1, 198, 200, 64, 64, 1.0)
    v = (v * np.float32(size)).astype(v.dtype)
    plain = sl.attention(q, k, v, causal=True)
    v[0, 0, 147, 7], v[0, 0, 159, 9] = np.inf, np.nan  # past keys that make an odd number of pairs
    found = sl.attention(q, k, v, causal=True)
    reached = np.zeros(found.shape, bool)
    reached[0, 0, 145:, 7] = reached[0, 0, 157:, 9] = True
    assert np.array_equal(~np.isfinite(found.astype(np.float32)), reached)
    assert np.array_equal(found[~reached].view(np.uint16), plain[~reached].view(np.uint16))


# --- what a process is told that may not have them


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (errno.EINVAL, "5.16"), (errno.EOPNOTSUPP, "hypervisor"), (errno.EPERM, "seccomp"),
        (errno.ENOSPC, "signal stack"), (errno.ENOSYS, "not implemented"),
    ],
)  # fmt: skip
def test_a_refusal_says_why_and_what_to_do(number, why, monkeypatch):
    class Refusing:
        def syscall(self, *args: object) -> int:
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: Refusing())
    with pytest.raises(UnsupportedError, match=f"(?i){why}.*SPEEDLIGHT_ISA=avx512"):
        machine.permit_tiles()


@pytest.mark.parametrize("unit", ["amx-software", "neonbf16-software"])
def test_other_bits_than_specified_are_refused(unit, monkeypatch):
    class Wrong:
        def __init__(self, *args: object) -> None: ...

        def entry(self, address: int) -> None:
            ctypes.memset(address + 3 * TILE_BYTES, 1, 1)

    monkeypatch.setattr(compiling, "Kernel", Wrong)
    with pytest.raises(UnsupportedError, match="other bits"):
        compiling.try_bfloat16.__wrapped__(machine.isa_named(unit))


def test_a_roof_asks_for_tiles_before_it_runs_them(monkeypatch):
    class Asked(Exception):
        pass

    def ask() -> None:
        raise Asked

    monkeypatch.setattr(compiling, "permit_tiles", ask)
    compiling.try_bfloat16.cache_clear()
    with pytest.raises(Asked):
        roof._kernels.__wrapped__(machine.isa_named("amx"), "bf16")


def test_instructions_are_tried_where_a_kernel_has_them(monkeypatch):
    """Not for gradients, which have none; nor where others compute their bits."""
    tried: list[machine.Isa] = []
    monkeypatch.setattr(compiling, "try_bfloat16", tried.append)
    for unit, product in (("amx", "amx_tiles"), ("neonbf16", "odd_pairs")):
        for isa, kind in itertools.product((unit, f"{unit}-software"), ("forward", "decode", "backward")):
            compiling.begin_product(SimpleNamespace(product=product, kind=kind, isa=machine.isa_named(isa)))
    assert [isa.name for isa in tried] == ["amx", "neonbf16", "neonbf16"]
