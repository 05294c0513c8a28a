"""merge(): accuracy, special values, one arithmetic (R05), no byte too many (R08), threads."""

from __future__ import annotations

import ctypes
import itertools
import sys

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL
from guarded import Guarded
from problems import DTYPES, numpy_dtype, qkv
from states import CASES, same, states
from threads import together
from tolerance import assert_within

import speedlight as sl
from speedlight import reference
from speedlight.arrays.array import describe
from speedlight.arrays.memory import pages
from speedlight.cpu.engine import merge_call as merging
from speedlight.host.machine import host_isas

# one, below and above a vector of any unit, several vectors and the tails behind them
WIDTHS = (1, 2, 3, 7, 8, 9, 16, 31, 63, 64, 65, 80, 128, 130)
LSES = ("float32", "float64", "float16", "bfloat16")


def check(outs, lses, *, zeros_allowed=False):
    got = sl.merge(outs, lses)
    assert [x.dtype for x in got] == [outs[0].dtype, lses[0].dtype]
    bounds = reference.merge_bound(outs, lses)
    for x, want, bound, what in zip(got, reference.merge(outs, lses), bounds, ("out", "lse"), strict=True):
        assert_within(x, want, bound, what, zeros_allowed=zeros_allowed)
    return got


@pytest.fixture(scope="module")
def guarded() -> list[Guarded]:
    return [Guarded(1 << 20) for _ in range(4)]


# --- accuracy and meaning


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_and_number_of_states(isa, rng, dtype):
    for width, count in itertools.product(WIDTHS, (1, 2, 3, 9)):
        check(*states(rng, count, (2, 37, width), dtype, str(rng.choice(LSES)), float(rng.choice([0.1, 3, 300]))))


def test_many_states(rng):
    check(*states(rng, 1000, (50, 20)))


def test_each_state_may_have_dtypes_of_its_own(rng):
    for dtypes in itertools.permutations(DTYPES):
        drawn = [states(rng, 1, (3, 11, 21), dtype, lse) for dtype, lse in zip(dtypes, LSES, strict=True)]
        check([outs[0] for outs, _ in drawn], [lses[0] for _, lses in drawn])


def test_shards_are_the_whole(rng):
    q, k, v = qkv(rng, "float32", 1, 4, 2, 9, 300, 16, 16)
    want, bounds = reference.attention(q, k, v, return_lse=True), reference.error_bound(q, k, v)
    for cuts in ((0, 0, 300), (0, 1, 300), (0, 120, 300), (0, 300, 300), (0, 30, 31, 31, 200, 300)):
        parts = [sl.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in itertools.pairwise(cuts)]
        merged = sl.merge([out for out, _ in parts], [lse for _, lse in parts])
        if len(parts) == 2:
            assert same(merged, sl.merge(*parts[0], *parts[1]))
        for x, y, bound in zip(merged, want, bounds, strict=True):
            assert x.dtype == np.float32
            assert_within(x, y, bound)


@pytest.mark.units("case")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=[c[0] for c in CASES])
def test_special_values(isa, dtype, case):
    """Each column many times over, so that every way of summing columns meets it."""
    _, given, out, lse = case
    columns = np.arange(75)
    outs, lses = (
        [np.array([x])[:, columns % len(x)].astype(numpy_dtype(dtype)) for x, _ in given],
        [np.array([x]) for _, x in given],
    )
    got, got_lse = check(outs, lses, zeros_allowed=True)
    want = np.array([out])[:, columns % len(out)].astype(numpy_dtype(dtype))
    assert np.array_equal(got, want, equal_nan=True)
    zeros = want == 0
    assert (np.signbit(got[zeros]) == np.signbit(want[zeros])).all()
    assert_within(got_lse, np.array([lse]), reference.merge_bound(outs, lses).lse, "lse", zeros_allowed=True)


def test_the_largest_and_the_smallest_numbers(isa):
    """Exactly what each state holds; in float64 itself, where shares of a state round, within the bound."""
    for dtype in DTYPES:
        info = ml_dtypes.finfo(numpy_dtype(dtype))
        for x in (float(info.max) / (1 + (dtype == "float64")), float(info.smallest_subnormal) * 3, float(info.tiny)):
            out = np.full((3, 70), x).astype(numpy_dtype(dtype))
            got, _ = check([out] * 3, [np.zeros(3)] * 3)
            assert dtype == "float64" or same([got], [out]), (dtype, x)


# --- one arithmetic


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_however_it_is_cut(isa, rng, dtype):
    outs, lses = states(rng, 3, (4, 500, 73), dtype)
    whole = sl.merge(outs, lses)
    for threads in range(1, 9):
        sl.set_threads(threads)
        assert same(whole, sl.merge(outs, lses))
    for at in (np.s_[1:2], np.s_[:, 17:18], np.s_[2, 3:40], np.s_[3, 499]):
        assert same([x[at] for x in whole], sl.merge([x[at] for x in outs], [x[at] for x in lses]))
    for columns in (np.s_[..., :1], np.s_[..., 5:12], np.s_[..., 3:70], np.s_[..., ::-1], np.s_[..., ::5]):
        assert same([whole[0][columns]], sl.merge([x[columns] for x in outs], lses)[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_vector_unit_has_the_same_bits(rng, dtype, monkeypatch):
    inputs = [states(rng, 5, (100, width), dtype) for width in WIDTHS]
    seen = set()
    for level in host_isas():
        monkeypatch.setenv("SPEEDLIGHT_ISA", level.name)
        seen.add(b"".join(x.tobytes() for given in inputs for x in sl.merge(*given)))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages(isa, guarded: list[Guarded], dtype):
    """Inputs sealed read-only and results between guards, every tail of every width: a fault kills the process."""
    rng = np.random.default_rng(12)
    kind, places = numpy_dtype(dtype), iter(())

    def empty_like(x, shape, dtype):
        place, side = next(places)
        new = place.array(shape, numpy_dtype(dtype), side)
        return new, describe(new, "out")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "empty_like", empty_like)
        for _ in range(2000 if FULL else 100):
            rows, width, side = int(rng.integers(1, 60)), int(rng.integers(1, 131)), str(rng.choice(["over", "under"]))
            for g in guarded:
                g.unlock()
                ctypes.memset(g.base, 0xFF, g.size)  # a NaN payload in every type
            out, lse = (
                guarded[0].array((rows, width), kind, side),
                guarded[1].array((rows,), np.dtype(np.float32), side),
            )
            out[...], lse[...] = rng.standard_normal(out.shape).astype(kind), rng.standard_normal(lse.shape)
            for g in guarded[:2]:
                g.seal()
            places = iter([(guarded[2], side), (guarded[3], side)])
            got = sl.merge([out] * 3, [lse] * 3)
            for x, g in zip(got, guarded[2:], strict=True):
                assert not np.isnan(x.astype(np.float32)).any()
                whole = np.ndarray(g.size, np.uint8, (ctypes.c_char * g.size).from_address(g.base))
                assert (whole[: -x.nbytes] if side == "over" else whole[x.nbytes :] == 0xFF).all()


@pytest.mark.skipif(sys.platform != "linux", reason="MAP_NORESERVE")
def test_offsets_above_two_to_the_31(rng):
    """In elements; on memory that is never touched in between."""
    room = np.frombuffer(pages((5 << 30) + 4096), np.float16)
    far = np.lib.stride_tricks.as_strided(room, (2, 3, 20), (5 << 30, 40, 2))
    outs, lses = states(rng, 2, far.shape, "float16")
    far[...] = outs[0]
    assert same(sl.merge(outs, lses), sl.merge([far, outs[1]], lses))


def test_any_allocation_may_fail(rng, monkeypatch):
    """R22: the n-th array, for every n; afterwards the same call is right."""
    outs, lses = states(rng, 2, (40, 24))
    want, allocate = sl.merge(outs, lses), merging.empty_like
    for n in range(3):
        with monkeypatch.context() as patch:
            calls = itertools.count()

            def failing(*args, n=n, calls=calls):
                if next(calls) == n:
                    raise MemoryError("no memory (in a test)")
                return allocate(*args)

            patch.setattr(merging, "empty_like", failing)
            if n < 2:
                with pytest.raises(MemoryError):
                    sl.merge(outs, lses)
            else:
                assert same(sl.merge(outs, lses), want)
    huge = np.broadcast_to(outs[0][:1, :1], (1 << 40, 1 << 12))
    with pytest.raises(MemoryError):
        sl.merge([huge] * 2, [huge[:, 0]] * 2)
    assert same(sl.merge(outs, lses), want)


# --- threads and signals


def test_concurrent_callers(rng):
    inputs = [
        states(rng, n, shape) for n, shape in ((2, (4, 300, 64)), (5, (700, 33)), (1, (9, 9)), (3, (2, 2, 2000, 128)))
    ]
    sl.set_threads(2)
    want = [sl.merge(*x) for x in inputs]

    def work(i: int) -> None:
        for turn in range(10):
            at = (i + turn) % len(inputs)
            assert same(sl.merge(*inputs[at]), want[at])

    together(work, range(200 if FULL else 20))
