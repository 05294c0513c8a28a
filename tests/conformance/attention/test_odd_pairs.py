"""Arm's products of bfloat16, elsewhere by vectors: a step against its specification in whole numbers, bit for bit, and
what holds of every class of bits. `make check-arm` compares the instructions with vectors.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_tiles import (  # noqa: F401 - collected here as well, with the fixture `own` below
    test_a_window_begins_at_any_key,
    test_few_rows_have_the_bits_of_many,
    test_few_rows_leave_the_roundings_of_many,
    test_few_rows_see_nothing_before_a_mask_begins,
    test_few_rows_take_subnormals_for_zeros_too,
    test_values_that_are_not_finite_reach_those_who_see_them_alone,
)

import speedlight as sl
from speedlight.cpu.language.vector import F32, I32, PTR, Module, vec
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.products.odd_dots import dot, outer_dot
from speedlight.cpu.runtime.compile import compile_ir
from speedlight.host.llvm import load
from speedlight.host.machine import runnable_isas

UNITS = [x for x in runnable_isas() if x.dot("bfloat16") == "odd"]
ONE = 1 << 300  # as a whole number; the smallest product is a 2^266th


pytestmark = pytest.mark.skipif(not UNITS, reason="an Arm CPU without bfloat16")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEEDLIGHT_ISA", UNITS[0].name)


@pytest.fixture
def masked() -> list[dict[str, Any]]:
    return [{"mask": sl.window(45, 2)}]  # each kernel of these takes seconds


def whole(x: float) -> int:
    n, d = float(x).as_integer_ratio()
    return n * (ONE // d)


def to_odd(n: int, zero: float) -> float:
    """The number of 24 bits that is next to n toward zero, or the one after, whose last bit is 1, if n has more.
    `zero`: where n is 0.
    """
    size, sign = abs(n), -1.0 if n < 0 else 1.0
    if not n or size < ONE >> 126:
        return math.copysign(0.0, n or zero)
    shift = size.bit_length() - 24
    bits = size >> shift | (size & ((1 << shift) - 1) > 0)
    return sign * (math.inf if bits << shift >= ONE << 128 else math.ldexp(bits, shift - 300))


def add(a: float, b: float) -> float:
    total = float(np.float32(a) + np.float32(b))
    return to_odd(whole(a) + whole(b), total) if math.isfinite(a) and math.isfinite(b) else total


def product(a: float, b: float) -> float:
    found = a * b
    return to_odd(whole(a) * whole(b) // ONE, found) if math.isfinite(a) and math.isfinite(b) else found


def step(total: float, a: np.ndarray, b: np.ndarray) -> float:
    """total ⊕ (a₀b₀ ⊕ a₁b₁): the specification."""
    total, *elements = (math.copysign(0.0, x) if abs(x) < 2.0**-126 else float(x) for x in (total, *a, *b))
    return add(total, add(product(elements[0], elements[2]), product(elements[1], elements[3])))


@pytest.fixture(scope="module")
def steps() -> Iterator[Callable[..., None]]:
    """steps(a, b, totals): one of dot(), then one of outer_dot()."""
    module, shape = Module("steps"), Shape("forward", UNITS[0], "bf16", 1)
    k = module.function("steps", {"a": PTR, "b": PTR, "totals": PTR}, public=True)
    for i, one in enumerate((dot, outer_dot)):
        a, b = (k.load(vec(I32, 4), k.p[x]) for x in "ab")
        k.store(one(k, UNITS[0].is_native, a, b, k.load(vec(F32, 4), k.p["totals"], 16 * i)), k.p["totals"], 16 * i)
    k.finish()
    code = load([compile_ir(shape, str(module))], ["steps"])
    yield ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3)(code["steps"])
    del code  # until here it is loaded


def drawn(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of bfloat16."""
    bits = rng.integers(0, 1 << 16, shape).astype(np.uint32) << 16
    if kind == "any":
        return bits.view(np.float32)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-6, 6, shape)
    if kind == "about the smallest":
        x *= 2.0 ** rng.integers(-72, -58, shape)
        x[rng.random(shape) < 0.1] *= 2.0**-70
    x[rng.random(shape) < 0.05] = 0.0
    return (x.astype(np.float32).view(np.uint32) & 0xFFFF0000 | bits & 0x80000000).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("kind", ["normal", "about the smallest", "any"])
@np.errstate(all="ignore")
def test_a_step_is_the_specified_one(rng, steps, kind):
    for _ in range(1000):
        a, b = (drawn(rng, kind, (4, 2)) for _ in range(2))
        c = drawn(rng, kind, (8,)) * np.float32(1 + 2**-20)
        if kind == "about the smallest":
            c *= np.float32(2.0**-64)
        packed = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
        want = [step(c[i], a[i], b[i]) for i in range(4)]
        for i in range(4):
            x, y = a.reshape(2, 2, 2)[i // 2], b.reshape(2, 2, 2)[i % 2]
            want.append(step(step(c[4 + i], x[0], y[0]), x[1], y[1]))
        found = c.copy()
        steps(*[x.ctypes.data for x in (*packed, found)])
        expected = np.array(want).astype(np.float32)
        same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
        assert same.all(), f"{found[~same]} for {expected[~same]}"
