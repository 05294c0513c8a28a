"""merge(): accuracy, special values, one arithmetic (R05), no byte too many (R08), layouts (R10), threads, interrupts,
errors.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import torch
from conftest import FULL
from problems import DTYPES, numpy_dtype, qkv
from test_memory import Guarded, guarded
from tolerance import assert_within

import speedlight as sl
from speedlight import arrays, merging, reference
from speedlight.machine import host_isas

__all__ = ["guarded"]
NAN, INF = float("nan"), float("inf")
# one, below and above a vector of any unit, several vectors and the tails behind them
WIDTHS = (1, 2, 3, 7, 8, 9, 16, 31, 63, 64, 65, 80, 128, 130)
LSES = ("float32", "float64", "float16", "bfloat16")


def states(rng, count, shape, dtype="float32", lse="float32", size=3.0):
    """Outputs and log-sum-exps of random rows, some of which saw nothing and hold NaN."""
    outs = [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for _ in range(count)]
    lses = [(rng.standard_normal(shape[:-1]) * size).astype(numpy_dtype(lse)) for _ in range(count)]
    for out, log in zip(outs, lses, strict=True):
        unseen = rng.random(shape[:-1]) < 0.1
        out[unseen], log[unseen] = NAN, -INF
    return outs, lses


def same(a, b):
    return all(
        np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )


def check(outs, lses, *, zeros_allowed=False):
    got = sl.merge(outs, lses)
    assert [x.dtype for x in got] == [outs[0].dtype, lses[0].dtype]
    bounds = reference.merge_bound(outs, lses)
    for x, want, bound, what in zip(got, reference.merge(outs, lses), bounds, ("out", "lse"), strict=True):
        assert_within(x, want, bound, what, zeros_allowed=zeros_allowed)
    return got


# --- accuracy and meaning


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


# what, states as (out, lse), out, lse
CASES = [
    ("one state is copied", [([1.5, -0.0, NAN, INF], -3.25)], [1.5, -0.0, NAN, INF], -3.25),
    ("one state that saw nothing", [([NAN, 1.0], -INF)], [0.0, 0.0], -INF),
    ("two halves", [([1.0, -2.0], 0.0), ([3.0, 2.0], 0.0)], [2.0, 0.0], np.log(2)),
    ("none saw anything", [([NAN, -0.0], -INF), ([INF, -0.0], -INF)], [0.0, 0.0], -INF),
    ("one saw nothing", [([NAN, INF], -INF), ([3.0, -0.0], 1.0)], [3.0, -0.0], 1.0),
    ("the other saw nothing", [([3.0, -0.0], 1.0), ([NAN, INF], -INF)], [3.0, -0.0], 1.0),
    ("visible nan", [([NAN, 1.0], 0.0), ([3.0, 1.0], 0.0)], [NAN, 1.0], np.log(2)),
    ("visible infinity", [([INF, 1.0], 0.0), ([3.0, 1.0], 0.0)], [INF, 1.0], np.log(2)),
    ("both infinities", [([INF, 1.0], 0.0), ([-INF, 1.0], 0.0)], [NAN, 1.0], np.log(2)),
    ("infinity of no weight", [([1.0, 1.0], 2000.0), ([INF, 1.0], 0.0)], [NAN, 1.0], 2000.0),
    ("nan lse", [([1.0, 1.0], NAN), ([3.0, 1.0], 0.0)], [NAN, NAN], NAN),
    ("nan lse, nothing else", [([1.0, 1.0], -INF), ([3.0, 1.0], NAN)], [NAN, NAN], NAN),
    ("lse of +inf", [([1.0, 1.0], INF), ([3.0, 1.0], 0.0)], [NAN, NAN], NAN),
    ("lse of both infinities", [([1.0, 1.0], INF), ([3.0, 1.0], -INF)], [NAN, NAN], NAN),
    ("far apart", [([1.0, 1.0], -60000.0), ([3.0, 5.0], 60000.0)], [3.0, 5.0], 60000.0),
    ("all far below zero", [([1.0, 1.0], -60000.0), ([3.0, 5.0], -60000.0)], [2.0, 3.0], -60000 + np.log(2)),
]


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


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(os, "uname") or os.uname().machine != "x86_64",
    reason="modes as on x86-64 Linux",
)
@pytest.mark.parametrize("rounding", [0, 0x400, 0x800, 0xC00])
@pytest.mark.parametrize("flush", [False, True])
def test_the_callers_modes_do_not_matter_and_are_kept(rng, rounding, flush):
    """Subnormal outputs and differences of log-sum-exps that round, under every rounding mode and flush-to-zero."""
    outs, lses = states(rng, 3, (200, 40))
    outs[0] *= np.float32(1e-39)
    outs[1] *= np.float32(1e-38)
    lses[2][...] = -INF
    want, libm = sl.merge(outs, lses), ctypes.CDLL("libm.so.6")
    assert (np.abs(want[0][want[0] != 0]) < 1e-38).any()
    before = libm.fegetround()
    torch.set_flush_denormal(flush)
    try:
        libm.fesetround(rounding)
        got = sl.merge(outs, lses)
        kept = libm.fegetround()
    finally:
        libm.fesetround(before)
        torch.set_flush_denormal(False)
    assert kept == rounding and same(got, want)


# --- layouts and memory


def test_layouts(isa, rng):
    outs, lses = states(rng, 3, (2, 3, 50, 24))
    want = sl.merge(outs, lses)
    wide = [np.full((2, 50, 5, 40), NAN, np.float32) for _ in outs]
    for w, x in zip(wide, outs, strict=True):
        w[:, :, 1:4, 7:31] = x.transpose(0, 2, 1, 3)
        w.flags.writeable = False
    views = [w[:, :, 1:4, 7:31].transpose(0, 2, 1, 3) for w in wide]
    flipped = [np.ascontiguousarray(x[::-1, :, ::-1, ::-1])[::-1, :, ::-1, ::-1] for x in outs]
    columns = [np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for x in outs]
    rows = [np.ascontiguousarray(x.transpose(2, 1, 0)).transpose(2, 1, 0) for x in lses]
    tensors = [torch.from_numpy(x) for x in outs]
    for some in (views, flipped, columns, [views[0], outs[1], flipped[2]], tensors):
        assert same(want, [np.asarray(x) for x in sl.merge(some, lses)]) and same(
            want, [np.asarray(x) for x in sl.merge(some, rows)]
        )
    odd = [
        np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(np.float32).reshape(x.shape) for x in outs
    ]  # unaligned
    assert same(want, sl.merge(odd, lses))


def test_strides_of_zero(rng):
    out, lse = states(rng, 2, (1, 50, 24))
    far = [[np.broadcast_to(x, (3, *x.shape[1:])) for x in xs] for xs in (out, lse)]
    assert same(sl.merge(*far), sl.merge(*[[np.array(x) for x in xs] for xs in far]))
    column = [np.broadcast_to(x[..., :1], x.shape) for x in out]
    assert same(sl.merge(column, lse), sl.merge([np.array(x) for x in column], lse))


def test_kinds(rng):
    outs, lses = states(rng, 2, (5, 7))
    want = sl.merge(outs, lses)
    got = sl.merge(torch.from_numpy(outs[0]), lses[0], outs[1], torch.from_numpy(lses[1]))
    assert (
        isinstance(got[0], torch.Tensor) and isinstance(got[1], np.ndarray) and same(want, [np.asarray(x) for x in got])
    )
    bf16 = [torch.from_numpy(x).bfloat16() for x in outs]
    out, lse = sl.merge(tuple(bf16), tuple(torch.from_numpy(x) for x in lses))
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    numbers = sl.merge([x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for x in bf16], lses)
    assert out.view(torch.int16).numpy().tobytes() == numbers[0].tobytes()


def test_a_scalar_of_numpy_is_an_array():
    """NumPy makes an array of it, which nobody else holds while its memory is read."""
    for x in range(100):
        _, lse = sl.merge([np.ones(5, np.float32)] * 3, [np.float64(x), np.float64(-INF), np.float64(-INF)])
        assert lse.shape == () and lse == x


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 8), (0, 0), (5, 0), (2, 3, 0), (1,), (7,), (0,)])
def test_shapes_without_rows_or_columns(rng, shape):
    outs = [np.ones(shape, np.float32) for _ in range(2)]
    lses = [np.zeros(shape[:-1]) for _ in range(2)]
    out, lse = sl.merge(outs, lses)
    assert out.shape == shape and lse.shape == shape[:-1]
    assert (out == 1).all() and np.allclose(lse, np.log(2), rtol=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
def test_guard_pages(isa, guarded: list[Guarded], dtype):
    """Inputs sealed read-only and results between guards, every tail of every width: a fault kills the process."""
    rng = np.random.default_rng(12)
    kind, places = numpy_dtype(dtype), iter(())

    def empty_like(x, shape, dtype):
        place, side = next(places)
        new = place.array(shape, arrays.numpy_dtype(dtype), side)
        return new, arrays.describe(new, "out")

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
    room = np.frombuffer(arrays.pages((5 << 30) + 4096), np.float16)
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


def test_inputs_are_never_written(rng):
    outs, lses = states(rng, 3, (40, 24))
    before = [x.tobytes() for x in (*outs, *lses)]
    sl.merge(outs, lses)
    assert before == [x.tobytes() for x in (*outs, *lses)]


# --- threads and signals


def test_concurrent_callers(rng):
    inputs = [
        states(rng, n, shape) for n, shape in ((2, (4, 300, 64)), (5, (700, 33)), (1, (9, 9)), (3, (2, 2, 2000, 128)))
    ]
    sl.set_threads(2)
    want, wrong = [sl.merge(*x) for x in inputs], []

    def work(i: int) -> None:
        for turn in range(10):
            at = (i + turn) % len(inputs)
            if not same(sl.merge(*inputs[at]), want[at]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(200 if FULL else 20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=120)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_interrupt():
    """A merge of seconds stops soon after SIGINT; the next call is right."""
    code = (
        "import os, signal, threading, time, numpy as np, speedlight as sl\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "sl.set_threads(2)\nx, lse = np.ones((20480, 128), np.float32), np.zeros(20480, np.float32)\n"
        "sl.merge([x], [lse])\nsent = []\n"
        "def later():\n    time.sleep(0.5); sent.append(time.perf_counter()); os.kill(os.getpid(), signal.SIGINT)\n"
        "outs, lses = [x] * 5000, [lse] * 5000\nthreading.Thread(target=later).start()\n"
        "try:\n    sl.merge(outs, lses); print('finished')\n"
        "except KeyboardInterrupt: print(time.perf_counter() - sent[0])\n"
        "print(bool((sl.merge([x], [lse])[0] == 1).all()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ.copy()
    )
    delay, right = done.stdout.split()
    assert delay != "finished" and right == "True", done.stderr
    assert float(delay) < 10  # a hang guard


# --- errors


@pytest.mark.parametrize("merge", [sl.merge, reference.merge, reference.merge_bound])
def test_wrong_arguments(rng, merge):
    (a, b), (la, lb) = states(rng, 2, (2, 5, 8))
    tensor = torch.from_numpy(a).requires_grad_()
    for message, error, call in (
        (
            r"lse2: expected shape \(2, 5\), to go with out1; got \(2, 1\)",
            sl.ArgumentError,
            lambda: merge(a, la, b, lb[:, :1]),
        ),
        (
            r"out2: expected shape \(2, 5, 8\), to go with out1; got",
            sl.ArgumentError,
            lambda: merge(a, la, b[..., :7], lb),
        ),
        (r"lse1: expected shape \(2, 5\)", sl.ArgumentError, lambda: merge(a, la[..., None], b, lb)),
        (
            r"out1: expected shape \(…, n_q, value_dim\); got \(\)",
            sl.ArgumentError,
            lambda: merge(*[np.array(1.0)] * 4),
        ),
        (r"outs\[2\]: expected shape", sl.ArgumentError, lambda: merge([a, b, a[:1]], [la, lb, la])),
        (r"lses\[1\]: expected shape", sl.ArgumentError, lambda: merge([a, b], [la, lb[:1]])),
        ("lses: expected 2 arrays, one for each of outs; got 1", sl.ArgumentError, lambda: merge([a, b], [la])),
        ("outs: expected one state or more", sl.ArgumentError, lambda: merge([], [])),
        (
            r"outs: expected a list or tuple of arrays; got ndarray. Use list\(outs\)",
            sl.ArgumentTypeError,
            lambda: merge(a, [la]),
        ),
        (r"lses: expected a list or tuple of arrays; got ndarray", sl.ArgumentTypeError, lambda: merge([a], la)),
        ("out2: expected nothing beside lists", sl.ArgumentError, lambda: merge([a], [la], b, lb)),
        ("out2: expected an array; got None", sl.ArgumentTypeError, lambda: merge(a, la)),
        ("lse2: expected an array; got None", sl.ArgumentTypeError, lambda: merge(a, la, b, None)),
        ("out2: expected dtype float32", sl.ArgumentTypeError, lambda: merge(a, la, np.int32(b > 0), lb)),
        (r"lses\[0\]: expected dtype float32", sl.ArgumentTypeError, lambda: merge([a], [la.astype(bool)])),
        (r"outs\[1\]: expected a NumPy array", sl.ArgumentTypeError, lambda: merge([a, "b"], [la, lb])),
        (r"outs\[0\]: requires grad", sl.UnsupportedError, lambda: merge([tensor, b], [la, lb])),
        ("out1: expected native byte order", sl.ArgumentTypeError, lambda: merge(a.astype(">f4"), la, b, lb)),
    ):
        with pytest.raises(error, match=message):
            call()
    with torch.no_grad():
        assert same([sl.merge([tensor], [la])[0].numpy()], [sl.merge([a], [la])[0]])


# --- in FlashInfer's order


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_states_in_one_array(kind, base2):
    rng = np.random.default_rng(3)
    outs, lses = states(rng, 3, (5, 4, 8))
    lses[0][0] = lses[1][0] = lses[2][0] = -INF
    factor = math.log(2) if base2 else 1.0
    want = reference.merge(outs, [x.astype(np.float64) * factor for x in lses])
    v, s = np.stack(outs, 1), np.stack(lses, 1)
    v, s = (v, s) if kind == "numpy" else (torch.from_numpy(v), torch.from_numpy(s))
    out, lse = sl.merge_states(v, s, base2=base2)
    assert type(out) is type(v) and out.dtype == v.dtype and lse.dtype == s.dtype and out.shape == (5, 4, 8)
    np.testing.assert_allclose(out, want[0], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(lse, want[1] / factor, rtol=1e-6, atol=1e-7)
    assert (np.asarray(lse)[0] == -INF).all() and (np.asarray(out)[0] == 0).all()
    if not base2:
        assert same((out, lse), sl.merge(outs, lses))
    mine = [x[:, 0] for x in (v, s)]  # in place, in a view
    lists = [v[:, n] for n in range(3)], [s[:, n] for n in range(3)]
    found = sl.merge_states(*lists, base2=base2, out=tuple(mine))
    assert found[0] is mine[0] and found[1] is mine[1] and same(found, (out, lse)) and same((v[:, 0], s[:, 0]), found)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"v": np.ones((5, 4, 8), np.float32)}, "v"),
        ({"s": np.ones((5, 3, 4, 1), np.float32)}, "s"),
        ({"v": [], "s": []}, "v"),
        ({"v": 3}, "v"),
        ({"base2": 2}, "base2"),
        ({"out": np.ones((5, 4, 8), np.float32)}, "out"),
        ({"out": (np.ones((5, 4, 9), np.float32), np.ones((5, 4), np.float32))}, "out"),
        ({"s": np.ones((5, 2, 4), np.float32)}, "lses"),
    ],
)
def test_errors_of_states(given, name):
    with pytest.raises(sl.Error, match=f"^{name}: expected"):
        sl.merge_states(**{"v": np.ones((5, 3, 4, 8), np.float32), "s": np.ones((5, 3, 4), np.float32)} | given)
