"""Gradients against the specification: every option (R02), special values (R03), what is hidden (R04), and the same
bits however a problem is computed (R05).
"""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL, differing_units
from engines import tuned
from expressions import BIAS, LENGTH, masks, scores
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import DIMS, DTYPES, HUGE, PLACES_AND_SCALES, flow_of, numpy_dtype, qkv
from repeated import forget
from tolerance import assert_gradients, assert_within

import speedlight as sl
from speedlight import reference
from speedlight.cpu.engine import backward_schedule
from speedlight.host.machine import current_isa, host_isas

NAN, INF = np.nan, np.inf
NAMES = ("q", "k", "v", "out", "lse", "d_out", "d_lse")
Arrays = tuple[np.ndarray, ...]
# around a panel, a vector, a tile, a block of queries, a span
LENGTHS = (
    (1, 1), (1, 193), (3, 127), (47, 128), (48, 129), (49, 255), (191, 2), (192, 256), (193, 1), (385, 17),
    (2, 1023), (17, 1024), (20, 1025), (70, 2100),
)  # fmt: skip


def same(one: Any, other: Any, what: str = "") -> None:
    """The same bits, wherever they lie."""
    for name, a, b in zip(("dq", "dk", "dv", "of a table")[: len(one)], one, other, strict=True):
        assert a.shape == b.shape and a.tobytes() == b.tobytes(), f"{what} {name}"


# --- R02: sizes and options


@pytest.mark.units("dtype")
def test_every_dim(isa, rng, dtype, gradients):
    every = 3 if isa != host_isas()[0].name else 2 if dtype != "float32" else 1
    for d, dv in DIMS if FULL else DIMS[::every]:
        arrays = qkv(rng, dtype, 1, 2, 1, 7 if d > 256 else 50, 131, d, dv)
        gradients(arrays, flow_of(rng, arrays, causal=True, q_start=90), causal=True, q_start=90)


@pytest.mark.units
def test_every_length(isa, rng, dtype, gradients):
    for q_len, k_len in LENGTHS:
        options: dict[str, Any] = {"causal": True, "q_start": max(0, k_len - q_len)}
        arrays = qkv(rng, dtype, 1, 2, 2, q_len, k_len, 9, 8)
        gradients(arrays, flow_of(rng, arrays, **options), **options)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_see(rng, sizes):
    """Gradients of what there is are +0."""
    for batch in (0, 2):
        arrays = qkv(rng, "float32", batch, 2, 1, sizes[0], sizes[1], 3, 4)
        for got, x in zip(sl.attention_backward(*arrays, *flow_of(rng, arrays)), arrays, strict=True):
            assert got.shape == x.shape and not got.view(np.int32).any()


OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "positions": {"causal": True, "q_start": 77},
    **PLACES_AND_SCALES,
    "small scale": {"scale": 1e-30},
    "dropout": {"dropout": 0.3, "seed": (1 << 63) + 5, "causal": True},
    "sinks": {"sink_logits": [0.3, -INF, 2.0, 40.0], "causal": True},
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(rng, dtype, name, gradients):
    """Two blocks of queries, groups of two heads."""
    options = OPTIONS[name]
    arrays = qkv(rng, dtype, 2, 4, 2, 200, 150, 10, 7)
    gradients(arrays, flow_of(rng, arrays, **options), zeros_allowed=name == "no scale", **options)


@pytest.mark.each("dtype", "options")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (300, 100)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_blocks(rng, dtype, options):
    """Three blocks of queries, of dims that fill vectors: what whole blocks add to dk and dv joins totals at once."""
    arrays = qkv(rng, dtype, 1, 2, 1, 576, 264, 16, 32)
    assert_gradients(arrays, flow_of(rng, arrays, q_start=0, **options), q_start=0, **options)


@settings(max_examples=300 if FULL else 3, deadline=None)
@given(scores(3), masks(1), st.booleans(), st.integers(0, 1 << 30), st.sampled_from(DTYPES))
def test_random_expressions(score, mask, masked, seed, dtype):
    rng = np.random.default_rng(seed)
    q_len, k_len = int(rng.integers(1, 60)), int(rng.integers(1, 200))
    arrays = qkv(rng, dtype, 1, 2, 1, q_len, k_len, 9, 5)
    options: dict[str, Any] = {"score": sl.expression(score, "score"), "q_start": int(rng.integers(0, LENGTH // 2))}
    if masked:
        options["mask"] = sl.expression(mask, "mask")
    assert_gradients(arrays, flow_of(rng, arrays, **options), zeros_allowed=True, **options)


# --- shards


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shards_add_up(rng, dtype):
    """Keys in two parts, with the out and lse of both: dk and dv of each are those of the whole, to the bit."""
    q, k, v = qkv(rng, dtype, 1, 2, 1, 9, 1500, 10, 7)
    options = {"q_start": 1200, "causal": True}
    flow = flow_of(rng, (q, k, v), **options, sink_logits=[0.3, 1.0])
    whole = assert_gradients((q, k, v), flow, **options)
    halves = ((0, slice(1024)), (1024, slice(1024, None)))
    parts = [assert_gradients((q, k[:, :, at], v[:, :, at]), flow, k_start=start, **options) for start, at in halves]
    for n in (1, 2):
        assert np.concatenate([x[n] for x in parts], axis=2).tobytes() == whole[n].tobytes()
    total, want = sum(x[0].astype(np.float64) for x in parts), reference.backward(q, k, v, *flow, **options)[0]
    dot = current_isa().dot(dtype, gradients=True)
    bounds = [
        reference.backward_bound(q, k[:, :, at], v[:, :, at], *flow, k_start=start, dot=dot, **options).dq
        for start, at in halves
    ]
    assert_within(total, want, bounds[0] + bounds[1])


# --- R03


def one_problem(rng: Any, dtype: str, **options: Any) -> dict[str, np.ndarray]:
    """Rows 0 … 8 at positions 120 … 128, so that a tile ends among what they see."""
    arrays = qkv(rng, dtype, 1, 1, 1, 9, 140, 5, 4)
    return dict(zip(NAMES, (*arrays, *flow_of(rng, arrays, **options)), strict=True))


def check(gradients: Any, x: dict[str, Any], **options: Any) -> tuple[np.ndarray, ...]:
    arrays = list(x.values())
    return gradients(arrays[:3], arrays[3:], zeros_allowed=True, **options)


@pytest.mark.units("name")
@pytest.mark.each("dtype", "name", "again")
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse", "d_out", "d_lse"])
@pytest.mark.parametrize("again", [False, True], ids=["", "its own lse"])
def test_special_values(isa, rng, dtype, name, again, gradients):
    """Where they come out: exactly where the specification has them. `again`: lse and out know them, too."""
    options = {"causal": True, "q_start": 120}
    tiny = 3 * float(ml_dtypes.finfo(numpy_dtype(dtype)).smallest_subnormal)
    for special in (NAN, INF, -INF, 1e30 if dtype != "float16" else 6e4, tiny, 0.0, -0.0):
        for row in (0, 4) if name not in ("k", "v") else (0, 122, 127, 128):
            x = one_problem(rng, dtype, **options)
            x[name][0, 0, row] = special
            if again and name in ("q", "k", "v"):
                x["out"], x["lse"] = flow_of(rng, (x["q"], x["k"], x["v"]), **options)[:2]
            check(gradients, x, **options)


def test_rows_that_see_nothing(isa, rng, dtype, gradients):
    """dq is 0 there, and nothing flows on from them, whatever they hold."""
    options = {"causal": True, "q_start": -4}
    x = one_problem(rng, dtype, **options)
    assert (x["lse"][0, 0, :4] == -INF).all()
    want = check(gradients, x, **options)
    for name in ("q", "out", "d_out", "d_lse"):
        x[name][0, 0, :4] = NAN
    same(check(gradients, x, **options), want)
    assert not want[0][0, 0, :4].any()
    x["lse"][0, 0, 5] = -INF  # and whatever it would see
    assert not check(gradients, x, **options)[0][0, 0, 5].any()


def test_far_scores(isa, rng, dtype, gradients):
    """An lse that holds no fractions: weights are at most 1, and nothing overflows."""
    kind, far = numpy_dtype(dtype), HUGE[dtype]
    q, k, v = qkv(rng, dtype, 1, 1, 1, 60, 140, 4, 4)
    for every in (1, 2, 3):
        a, b = q.copy(), k.copy()
        a[:, :, ::every] *= kind.type(far)
        b[:, :, ::every] *= kind.type(far)
        got = gradients((a, b, v), flow_of(rng, (a, b, v)), zeros_allowed=True)
        assert np.isfinite(got[2].astype(np.float64)).all()


# --- R04

HIDDEN: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "q_start": 120},
    "window": {"window": (20, 0), "q_start": 120},
    "mask": {"mask": sl.expression(lambda b, h, i, j: (i + j) % 4 != 3)},
    "array": {"mask": np.arange(140) % 4 != 3},
    "score": {
        "score": sl.expression(lambda s, b, h, i, j: sl.where((i * j) % 5 == 2, -np.inf, s + BIAS[h, j])),
        "q_start": 3,
    },
    "lengths": {"k_lengths": [133], "q_lengths": [7]},
    "rows alone": {"mask": sl.expression(lambda b, h, i, j: i % 3 != 1)},
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_never_matters(rng, dtype, name):
    """A key's NaN reaches the rows that see it and the keys those see; a row's its keys: other bits stay. Of the
    specification, too.
    """
    options = HIDDEN[name]
    x = one_problem(rng, dtype, **options)
    check_hidden(rng, x, options, sl.attention_backward)
    check_hidden(rng, x, options, reference.backward)


def check_hidden(rng: Any, x: dict[str, Any], options: dict[str, Any], backward: Any) -> None:
    want = backward(*x.values(), **options)
    seen = (reference.weights(x["q"], x["k"], **options)[0, 0] > 0) & (x["lse"][0, 0] != -INF)[:, None]
    for which, special in itertools.product(x, (NAN, INF)):
        length = x[which].shape[2]
        for at in {0, 1, min(129, length - 1), length - 1, int(rng.integers(length))}:  # 129: after what all see
            broken = x | {which: x[which].copy()}
            broken[which][0, 0, at] = special
            got = backward(*broken.values(), **options)
            row = seen[:, at] if which in "kv" else np.arange(9) == at
            keys = seen[row].any(axis=0)
            if which in "kv":
                keys = keys | ((np.arange(140) == at) & row.any())
            hits = row & seen.any(axis=1), keys, keys
            for g, w, hit in zip(got, want, hits, strict=True):
                g, w = g[0, 0][~hit], w[0, 0][~hit]
                if backward is reference.backward:
                    assert_within(g, w, np.full(w.shape, 1e-13), which, zeros_allowed=True)
                else:
                    assert g.tobytes() == w.tobytes(), f"{which}[{at}] = {special}"
            assert special == INF or not hits[0].any() or np.isnan(got[0][0, 0][hits[0]].astype(np.float32)).any()


@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32", "bfloat16"])
def test_scores_of_minus_infinity_hide(rng, dtype):
    """By an expression, or since q or k is infinite, in tiles of which all else is visible to all rows."""
    arrays = qkv(rng, dtype, 1, 1, 1, 192, 140, 5, 4)
    score = sl.expression(lambda s, b, h, i, j: sl.where((i + j) % 7 == 3, -np.inf, s))
    plain: dict[str, Any] = {"q_start": 0}
    hiding = plain | {"score": score}
    flow = flow_of(rng, arrays, **plain), flow_of(rng, arrays, **hiding)
    want = sl.attention_backward(*arrays, *flow[1], **hiding)
    for n, special in itertools.product(range(3), (NAN, INF, -INF)):
        broken = [x.copy() for x in arrays]
        broken[n][0, 0, 50, 2] = special
        for options, numbers in zip((plain, hiding), flow, strict=True):
            assert_gradients(broken, numbers, **options)
        got, others = sl.attention_backward(*broken, *flow[1], **hiding)[0], (np.arange(192) + 50) % 7 == 3
        assert n == 0 or got[:, :, others].tobytes() == want[0][:, :, others].tobytes()


def test_slopes_of_hidden_pairs(rng, gradients):
    """Infinite, and beside them finite numbers alone."""
    arrays = qkv(rng, "float32", 1, 2, 1, 192, 140, 5, 4)
    options: dict[str, Any] = {
        "mask": sl.expression(lambda b, h, i, j: (i - j) % 50 != 0),
        "score": sl.expression(lambda s, b, h, i, j: s / sl.cast((i - j) % 50, float)),
        "q_start": 0,
    }
    gradients(arrays, flow_of(rng, arrays, **options), **options)


# --- R05


def several(rng: Any, dtype: str) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Three blocks of queries, three ranges of keys, groups of two."""
    options = {"causal": True, "q_start": 1700}
    arrays = qkv(rng, dtype, 1, 4, 2, 401, 2100, 10, 9)
    kind, logs = arrays[0].dtype, np.float64 if dtype == "float64" else np.float32
    out, lse = sl.attention(*arrays, return_lse=True, **options)
    flow = (out, lse, rng.standard_normal(out.shape).astype(kind), rng.standard_normal(lse.shape).astype(logs))
    return arrays, flow, options


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_for_any_threads(rng, dtype):
    """Nor do ranges and gangs matter: they are how the work is cut."""
    arrays, flow, options = several(rng, dtype)
    sl.set_threads(1)
    want = sl.attention_backward(*arrays, *flow, **options)
    for threads, keys, tasks in ((2, 1024, 3), (3, 1024, 1), (8, 1024, 3), (2, 128, 50), (3, 256, 3), (1, 384, 3)):
        sl.set_threads(threads)
        with tuned(ranges={"keys": (keys, keys), "tasks": tasks}):
            same(sl.attention_backward(*arrays, *flow, **options), want, f"{threads} threads, ranges of {keys}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_panels_of_any_width_have_the_same_bits(rng, dtype, monkeypatch):
    arrays, flow, options = several(rng, dtype)
    found = []
    for vectors in (2, 3):
        monkeypatch.setattr(backward_schedule, "_WORTH", {vectors: 1.0})
        forget()
        found.append(sl.attention_backward(*arrays, *flow, **options))
    same(*found)


@pytest.mark.parametrize("dtype", DTYPES if FULL else ["float32", "bfloat16"])
def test_every_vector_unit_has_the_same_bits(rng, dtype, monkeypatch):
    arrays, flow, options = several(rng, dtype)
    seen = set()
    for unit in host_isas() if dtype == "bfloat16" else differing_units():
        if not unit.dot(dtype, gradients=True):
            monkeypatch.setenv("SPEEDLIGHT_ISA", unit.name)
            seen.add(b"".join(x.tobytes() for x in sl.attention_backward(*arrays, *flow, **options)))
    assert len(seen) == 1


def as_rows(x: np.ndarray, lengths: list[int]) -> np.ndarray:
    """Packed: (all rows, heads, dim), or of log-sum-exps (heads, all rows)."""
    rows = np.concatenate([x[item, :, :n] for item, n in enumerate(lengths)], axis=1)
    return rows.swapaxes(0, 1) if x.ndim == 4 else rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_in_any_batch(rng, dtype):
    """Alone, among others, padded and packed; in either layout; beside other heads."""
    q_lens, k_lens, starts = [37, 0, 200, 5, 1], [1100, 3, 50, 0, 129], [1063, 0, -20, 7, 500]
    padded = qkv(rng, dtype, 5, 4, 2, 200, 1100, 10, 9)
    options: dict[str, Any] = {"causal": True, "q_start": starts, "q_lengths": q_lens, "k_lengths": k_lens}
    flow = flow_of(rng, padded, **options)
    got = sl.attention_backward(*padded, *flow, **options)
    given = dict(zip(NAMES, (*padded, *flow), strict=True))
    lengths = {name: k_lens if name in ("k", "v") else q_lens for name in NAMES}
    turned = [x if "lse" in name else x.swapaxes(1, 2) for name, x in given.items()]
    same([x.swapaxes(1, 2) for x in sl.attention_backward(*turned, layout="blhd", **options)], got, "blhd")

    packed = [as_rows(x, lengths[name]) for name, x in given.items()]
    cu = {f"cu_seqlens_{m}": [0, *itertools.accumulate(n)] for m, n in (("q", q_lens), ("k", k_lens))}
    together = sl.attention_backward(*packed, layout="lhd", causal=True, q_start=starts, **cu)
    same(together, [as_rows(g, lengths[name]) for g, name in zip(got, "qkv", strict=True)], "packed")
    for item in range(5):
        one = [x[item : item + 1, :, : lengths[name][item]] for name, x in given.items()]
        alone = sl.attention_backward(*one, causal=True, q_start=starts[item])
        cut = [g[item : item + 1, :, : lengths[name][item]] for g, name in zip(got, "qkv", strict=True)]
        same(alone, cut, f"item {item}")
    heads = [x[:, 2:] if x.shape[1] == 4 else x[:, 1:] for x in (*padded, *flow)]
    same(sl.attention_backward(*heads, **options), [g[:, g.shape[1] // 2 :] for g in got], "heads")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_queries_can_be_cut_anywhere(rng, dtype):
    """dq knows no other row; dk and dv of a call that ends with a block are what the next adds to."""
    arrays, flow, options = several(rng, dtype)
    want = sl.attention_backward(*arrays, *flow, **options)[0]
    for low, high in ((0, 1), (1, 50), (190, 230), (400, 401)):
        some = [x[:, :, low:high] for x in (arrays[0], *flow)]
        got = sl.attention_backward(some[0], *arrays[1:], *some[1:], causal=True, q_start=1700 + low)[0]
        assert got.tobytes() == want[:, :, low:high].tobytes(), (low, high)


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_lie_at_absolute_positions(rng, dtype):
    """Rows of which nothing flows back add zeros to dk and dv: without them the same bits, where a call begins."""
    arrays, flow, _ = several(rng, dtype)
    for x in flow[2:]:
        x[:, :, :150] = 0
    want = sl.attention_backward(*arrays, *flow, q_start=1700)
    for cut in (1, 77, 150):
        some = [x[:, :, cut:] for x in (arrays[0], *flow)]
        got = sl.attention_backward(some[0], *arrays[1:], *some[1:], q_start=1700 + cut)
        same(got, (want[0][:, :, cut:], *want[1:]), f"from row {cut}")
