"""Results do not depend on the caller's rounding mode nor on flushing of subnormals, and the caller's modes are kept
(R05).
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from injection import interrupted, needs_places, places
from problems import CODES, qkv
from repeated import forget
from states import INF, same, states

import speedlight as sl
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime import compile as compiling
from speedlight.host import rounding as modes
from speedlight.host.machine import current_isa

USUAL = modes._access()[2]
TOWARDS = {"upward": 0x4000, "downward": 0x2000, "zero": 0x6000}  # of x86's MXCSR
MODES = {**TOWARDS, "flushing": 0x8000, "taken as zero": 0x0040, "all": 0x4000 | 0x8040}

x86 = pytest.mark.skipif(USUAL == 0, reason="the words are x86's")
every_mode = pytest.mark.parametrize("name", MODES)


@contextlib.contextmanager
def set_to(name: str) -> Iterator[None]:
    """The modes of the thread; kept they are by what runs inside."""
    get, put = modes._access()[:2]
    put(USUAL | MODES[name])
    try:
        yield
        assert get() & ~0x3F == USUAL | MODES[name]  # the flags of what has happened may differ
    finally:
        put(USUAL)


def scales_and_sinks(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 30, 40, 20, 16)
    options = [{"scale": 0.1 + 0.013 * n, "sink_logits": [0.3 + n, -0.7 * n, 1.1, 1e-40]} for n in range(8)]
    return lambda: [y for x in options for y in sl.attention(q, k, v, **x, return_lse=True)]


def default_scales(_):
    return lambda: [np.array([sl.plan(q_heads=1, q_len=4, head_dim=n).problem.scale for n in range(1, 24)])]


def the_reference(rng):
    q, k, v = (x * 1e-160 for x in qkv(rng, "float64", 1, 2, 2, 9, 12, 8, 8))
    v *= 1e-150  # subnormal
    return lambda: [sl.reference.attention(q, k, v, sink_logits=[0.1, 0.7])]


def merging(rng):
    """Differences of log-sum-exps round."""
    outs, lses = states(rng, 3, (200, 40))
    outs[0] *= np.float32(1e-39)
    outs[1] *= np.float32(1e-38)
    lses[2][...] = -INF
    return lambda: sl.merge(outs, lses)


def caches_of_codes(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 20, 20, 16, 16)
    k[..., :10, :] *= np.float32(1e-39)
    v[..., 5:15, :] *= np.float32(1e-39)

    def results():
        found = []
        for dtype in CODES:
            cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=16, dtype=dtype, capacity=32)
            found += [cache.attend(0, q, k, v), cache.keys(0), cache.values(0)]
        return found

    return results


@x86
@every_mode
@pytest.mark.parametrize("made", [scales_and_sinks, default_scales, the_reference, merging, caches_of_codes])
def test_results_have_the_bits_of_the_usual_modes(rng, made, name):
    results = made(rng)
    with set_to(name):
        found = results()
    forget()  # nothing is at hand that was prepared inside
    want = results()
    assert same(found, want)
    if made in (the_reference, merging, caches_of_codes):
        assert any((np.abs(x[x != 0]) < 1e-38).any() for x in want)  # subnormal numbers were there


def digest_of_a_kernel() -> bytes:
    return hashlib.sha256(compiling.emit(Shape("forward", current_isa(), "f32", 3)).encode()).digest()


@pytest.fixture(scope="module")
def usual_digest() -> bytes:
    return digest_of_a_kernel()


@x86
@every_mode
def test_kernels_are_written_alike(usual_digest, name):
    """Constants are rounded when a kernel is written, and the kernel is kept for others."""
    with set_to(name):
        assert digest_of_a_kernel() == usual_digest


@pytest.mark.parametrize("name", ["FE_UPWARD", "FE_DOWNWARD", "FE_TOWARDZERO"])
def test_libm_and_torch_set_them_too(rng, name):
    """As callers do, by fesetround and set_flush_denormal."""
    import torch

    library = ctypes.util.find_library("m")
    arm = USUAL == 0
    word = {"FE_UPWARD": (0x800, 0x400000), "FE_DOWNWARD": (0x400, 0x800000), "FE_TOWARDZERO": (0xC00, 0xC00000)}[name][
        arm
    ]
    m = ctypes.CDLL(library)
    q, k, v = qkv(rng, "float32", 1, 2, 2, 20, 30, 12, 12)
    v[:, 1] *= np.float32(1e-38)  # of which results are subnormal
    options: dict[str, Any] = {"sink_logits": [0.123, 4.5], "scale": 0.777}
    try:
        assert m.fesetround(word) == 0
        assert torch.set_flush_denormal(True)
        out = sl.attention(q, k, v, **options)
        assert m.fegetround() == word
        assert float(torch.tensor(1e-38) * torch.tensor(0.01)) == 0.0  # still flushing
    finally:
        torch.set_flush_denormal(False)
        m.fesetround(0)
    assert out.tobytes() == sl.attention(q, k, v, **options, out=np.empty_like(out)).tobytes()


def test_nothing_is_touched_where_modes_are_standard(monkeypatch):
    def never() -> None:
        raise AssertionError

    monkeypatch.setattr(modes, "_access", never)
    assert modes.standard(lambda a, b: a - b)(5, b=2) == 3


@x86
@needs_places
def test_an_interrupt_anywhere_puts_the_modes_back():
    work: Callable[[], Any] = modes.standard(lambda: max(1.0, 2.0))
    get, put = modes._access()[:2]
    theirs = USUAL | MODES["all"]
    for n in places(work):
        put(theirs)
        try:
            interrupted(work, n)
            now = get()
        finally:
            put(USUAL)
        assert now & ~0x3F == theirs
