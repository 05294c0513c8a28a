"""Outputs are divided exactly, though not by a division each: held against NumPy's, bit for bit."""

from __future__ import annotations

import ctypes
from fractions import Fraction

import numpy as np
import pytest

import speedlight as sl
from speedlight.cpu.kernels.panel_states import _outputs
from speedlight.cpu.kernels.softmax import Quotients
from speedlight.cpu.language.vector import I64, PTR, Module
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime.compile import compile_ir, host_triple
from speedlight.host import machine
from speedlight.host.llvm import load


@pytest.fixture(scope="module", params=[isa.name for isa in machine.host_isas()])
def quotients(request):
    """Of two arrays; and how many of their pairs did without a division."""
    isa = machine.isa_named(request.param)
    s = Shape("forward", isa, "f32", 1)
    module = Module("quotients")
    k = module.function("quotients", {"a": PTR, "b": PTR, "out": PTR, "usual": PTR, "count": I64}, public=True)
    with k.range(0, k.p["count"], s.lanes) as i:
        x, by = (k.load(s.vector, k.p[name], i * 4) for name in ("a", "b"))
        q = Quotients(k, s, by, by.equals(0.0))
        (out,) = _outputs(k, s, [x], q)
        k.store(out, k.p["out"], i * 4)
        k.store(k.zext(q.usual([x]), I64), k.p["usual"], i // s.lanes * 8)
    k.finish()
    code = load((compile_ir(s, str(module), host_triple()),), ("quotients",))
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, ctypes.c_int64)(code["quotients"])

    def run(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, int]:
        assert len(a) % s.lanes == 0 and a.dtype == b.dtype == np.float32 and code
        out, usual = np.empty_like(a), np.zeros(len(a) // s.lanes, np.int64)
        call(a.ctypes.data, b.ctypes.data, out.ctypes.data, usual.ctypes.data, len(a))
        return out, int(usual.sum()) * s.lanes

    return run


def same(a: np.ndarray, b: np.ndarray, found: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        want = np.where(b == 0, np.float32(0), a / b)
    equal = (want.view(np.int32) == found.view(np.int32)) | (np.isnan(want) & np.isnan(found))
    assert equal.all(), (a[~equal][:3], b[~equal][:3], want[~equal][:3], found[~equal][:3])


def test_random_pairs(quotients, rng):
    """Of any size, most of them where a quotient may be usual."""
    n = 1 << 21
    significands = rng.integers(1 << 23, 1 << 24, (2, n)).astype(np.float64)
    powers = rng.integers((-100, -36), (104, 20), (n // 16, 2))
    powers[::4] = rng.integers(-149, 105, (n // 64, 2))
    powers = np.repeat(powers.T, 16, axis=1)  # a vector's are of a kind
    a, b = (significands * 2.0**powers).astype(np.float32)
    a *= rng.choice([-1, 1], n).astype(np.float32)
    found, usual = quotients(a, b)
    same(a, b, found)
    assert 0.4 * n < usual < 0.9 * n


def test_quotients_beside_the_middle_of_two_numbers(quotients, rng):
    """The closest that a quotient comes to where rounding turns: b·m = a·2^24 ± 1 for an odd m of 25 bits."""
    pairs = []
    for b in [*rng.integers(1 << 23, 1 << 24, 4000).tolist(), (1 << 24) - 1, (1 << 23) + 1]:
        if b % 2 == 0:
            continue
        for sign in (-1, 1):
            m = -sign * pow(b, -1, 1 << 24) % (1 << 24)  # b·m = -sign modulo 2^24
            for middle in (m, m + (1 << 24)):
                a = (b * middle + sign) >> 24
                if middle % 2 and 1 << 23 <= a < 1 << 24:
                    pairs.append((a, b))
    assert len(pairs) > 500
    pairs = pairs[: len(pairs) // 16 * 16]
    a, b = (np.array(x, np.float32) for x in zip(*pairs, strict=True))
    found, usual = quotients(a, b)
    same(a, b, found)
    assert usual == len(a)
    ends = (-93, 76), (-33, 16)  # where the smallest and the largest are just usual
    for powers in [(x, y) for x in ends[0] for y in ends[1]]:
        x, y = (z * np.float32(2.0**power) for z, power in zip((a, b), powers, strict=True))
        scaled, usual = quotients(x, y)
        same(x, y, scaled)
        assert usual == len(a)
    for powers in ((-94, 0), (77, 0), (0, -34), (0, 17), (0, 103), (80, 103), (-110, 16), (-125, -100)):
        x, y = (z * np.float32(2.0**power) for z, power in zip((a, b), powers, strict=True))
        scaled, usual = quotients(x, y)
        same(x, y, scaled)
        assert usual == 0
    for x, (top, bottom) in zip(found.tolist(), pairs, strict=True):  # and not only as NumPy divides
        beside = np.nextafter(np.float32(x), np.array([0, 9], np.float32)).tolist()
        away, *others = (abs(Fraction(y) - Fraction(top, bottom)) for y in (x, *beside))
        assert away < min(others)


def test_what_is_not_usual(quotients):
    numbers = [0.0, 1.0, 3.0, 2.0**-149, 2.0**-126, 2.0**-71, 2.0**-70, 2.0**-10, 2.0**40, 2.0**41, 3.4028235e38]
    numbers += [float("inf"), float("nan"), 1 / 3]
    every = np.array([*numbers, *[-x for x in numbers]], np.float32)
    a, b = (np.repeat(x.ravel(), 16) for x in np.meshgrid(every, np.abs(every)))
    found, usual = quotients(a, b)
    same(a, b, found)
    assert 0 < usual < len(a)
    assert np.signbit(found[(a == 0) & np.signbit(a) & (b == 3)]).all()


def test_vectors_of_which_some_lanes_are_not_usual(quotients, rng):
    """One lane that is not has the whole vector divided."""
    for which in (0, 1):
        pair = np.ones((2, 1 << 14), np.float32) + rng.random((2, 1 << 14), np.float32)
        lanes = np.arange(0, 1 << 14, 16) + rng.integers(0, 8, 1 << 10)  # one at least of every vector
        lanes = np.concatenate([lanes, lanes + 8])
        pair[which, lanes] = rng.choice(np.array([0, 2.0**-130, 3e38, np.inf, np.nan], np.float32), len(lanes))
        a, b = pair
        found, usual = quotients(a, b)
        same(a, b, found)
        assert usual == 0


@pytest.mark.units
def test_columns_of_values_that_are_not_alike(isa, rng):
    """Of many rows, whose outputs are divided some columns at once; few have a division each."""
    q, k = (rng.standard_normal((1, 1, n, 8)).astype(np.float32) for n in (64, 21))
    sizes = np.array([1, 0, -0.0, 2.0**-149, 2.0**-90, 2.0**110, np.inf, -np.inf, np.nan], np.float32)
    for first in range(len(sizes)):  # one of which is the first of every vector of columns
        v = np.repeat(sizes[(np.arange(48) % 16 + first) % len(sizes)][None], 21, axis=0)[None, None]
        many, few = sl.attention(q, k, v), sl.attention(q[:, :, -16:], k, v)
        tail = many[:, :, -16:]
        assert (
            np.array_equal(tail, few, equal_nan=True) and (np.isnan(few) | (np.signbit(tail) == np.signbit(few))).all()
        )
        for ask in (np.isnan, np.isinf):
            assert (ask(few) == ask(v[:, :, :1])).all()
