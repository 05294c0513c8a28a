"""Gradients of tables and of sinks: what attention_backward() gives for `grads`, held against the specification."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FULL
from engines import tuned
from guarded import Guarded, GuardedNumpy
from problems import flow_of, qkv
from tolerance import assert_gradients
from ways import poisoned

import speedlight as sl
from speedlight import reference
from speedlight.cpu.engine import backward_call, table_sums
from speedlight.cpu.engine.backward_schedule import tickets_of_tables
from speedlight.cpu.engine.term_sums import TermSums
from speedlight.problem import biases
from speedlight.problem.problem import Problem

pytestmark = pytest.mark.usefixtures("one_width")  # gradients have panels of their own
RNG = np.random.default_rng(7)
Q_HEADS, LENGTH = 4, 420
SLOPES, ROWS = sl.table(RNG.random(Q_HEADS)), sl.table(RNG.standard_normal((Q_HEADS, 2 * LENGTH)))
BIAS, CAP = sl.table(RNG.standard_normal((LENGTH, LENGTH))), sl.table(np.array([3.0]))
IDS, WORTH = sl.table(RNG.integers(0, 5, LENGTH)), sl.table(RNG.standard_normal((Q_HEADS, 5)))
FORMS = {
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j), (SLOPES,)),
    "relative positions": (lambda s, b, h, i, j: s + ROWS[h, i - j + LENGTH], (ROWS,)),
    "two tables": (lambda s, b, h, i, j: s + BIAS[i, j] * SLOPES[h], (SLOPES, BIAS)),
    "a learned soft cap": (lambda s, b, h, i, j: CAP[h * 0] * sl.tanh(s / CAP[h * 0]), (CAP,)),
    "an embedding, read twice": (lambda s, b, h, i, j: s * WORTH[h, IDS[j]] + WORTH[h, IDS[i]], (WORTH,)),
}


def problem(dtype, rng, score, *, batch=2, q_len=200, k_len=300, **more):
    q, k, v = qkv(rng, dtype, batch, Q_HEADS, 2, q_len, k_len, 24, 9)
    options = {"score": score, "q_start": 70, "mask": sl.window(150, 40), **more}
    return (q, k, v, *flow_of(rng, (q, k, v), **options)), options


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("name", FORMS if FULL else list(FORMS)[1:])  # the first has layouts, below
def test_tables_and_sinks(rng, name, dtype, gradients):
    score, tables = FORMS[name]
    sinks = rng.standard_normal(Q_HEADS)
    more = {"sink_logits": sinks, "dropout": 0.2, "seed": 5, "batch": 2 if FULL or name == "two tables" else 1}
    arrays, options = problem(dtype, rng, score, q_len=199, k_len=351, **more)
    grads = (*tables, "sink_logits")
    got = gradients(arrays[:3], arrays[3:], grads=grads, **options)
    if FULL or name == "two tables":
        plain = gradients(arrays[:3], arrays[3:], **options)
        assert all((x == y).all() for x, y in zip(got, plain, strict=False))
    for _ in range(3 if FULL else 1):
        hiding = poisoned(arrays[:3], arrays[3:], options, rng)
        hiding = gradients(hiding[:3], hiding[3:], grads=grads, **options)
        assert all((x == y).all() for x, y in zip(got, hiding, strict=True))


def test_patterns_take_tables_and_results_are_of_the_kind_of_q(rng):
    q, k, v = (torch.from_numpy(x) for x in qkv(rng, "float32", 1, Q_HEADS, 2, 30, 30, 8, 8))
    score = [sl.alibi(SLOPES), sl.relative_bias(sl.table(np.zeros((Q_HEADS, 61), np.float32)))]
    out, lse = sl.attention(q, k, v, score=score, causal=True, return_lse=True)
    *_, (slopes,) = sl.attention_backward(
        q, k, v, out, lse, torch.ones_like(out), grads=(SLOPES,), score=score, causal=True
    )
    assert isinstance(slopes, torch.Tensor) and slopes.shape == (Q_HEADS,) and slopes.dtype == torch.float32


@pytest.mark.parametrize("layout", ["blhd", "lhd"])
def test_layouts(rng, layout):
    """Padded and packed sequences, an empty one among them."""
    lengths = [130, 0, 70]
    if layout == "lhd":
        q, k, v = (x[0].swapaxes(0, 1) for x in qkv(rng, "float64", 1, Q_HEADS, 2, 200, 200, 8, 5))
        more = {"cu_seqlens_q": np.cumsum([0, *lengths]).tolist()}
    else:
        q, k, v = (x.swapaxes(1, 2) for x in qkv(rng, "float64", 3, Q_HEADS, 2, 140, 140, 8, 5))
        more = {"q_lengths": lengths, "k_lengths": lengths}
    options = {"score": FORMS["alibi"][0], "sink_logits": [0.5] * Q_HEADS, "causal": True, "layout": layout, **more}
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    assert_gradients((q, k, v), (out, lse, rng.standard_normal(out.shape)), grads=(SLOPES, "sink_logits"), **options)


def test_shares_know_the_problem_alone(rng, monkeypatch):
    """Few where tables are large: the sums of all of them stay within a limit."""
    score, tables = FORMS["two tables"]
    arrays, options = problem("bfloat16", rng, score, dropout=0.2, seed=5)
    monkeypatch.setattr(biases, "_SHARE_BYTES", 3 * 8 * (BIAS.array.size + SLOPES.array.size))
    assert_gradients(arrays[:3], arrays[3:], grads=tables, **options)


ONE = sl.table(np.array([1]))  # i * ONE[0 * b] is i, but nobody can tell: entries are added one by one, in one share
ROWWISE = {
    "one of all heads": ((LENGTH, LENGTH), lambda t, b, h, i, j: t[i, j]),
    "one of each head": ((Q_HEADS, LENGTH, LENGTH), lambda t, b, h, i, j: t[h, i, j]),
    "one of each pair": ((2, Q_HEADS, LENGTH, LENGTH), lambda t, b, h, i, j: t[b, h, i, j]),
    "of keys": ((2 * LENGTH,), lambda t, b, h, i, j: t[j + LENGTH]),
    "positions backwards": ((LENGTH, 2 * LENGTH), lambda t, b, h, i, j: t[LENGTH - 1 - i, j + 7]),
    "sixteen positions": ((LENGTH // 16 + 1, LENGTH), lambda t, b, h, i, j: t[i // 16, j]),
    "of heads last": ((LENGTH, LENGTH), lambda t, b, h, i, j: t[i, j + h]),
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ROWWISE if FULL else list(ROWWISE)[2::2])  # the first is packed, below
def test_rows_have_the_bits_of_entries_one_by_one(rng, name, dtype, monkeypatch):
    """For any threads, with NaN that is seen, and tables of either type."""
    shape, read = ROWWISE[name]
    monkeypatch.setattr(biases, "_SHARE_BYTES", 1)
    more: dict[str, Any] = {"k_start": 1024, "q_start": 1024 + int(rng.integers(0, 190)), "dropout": 0.1, "seed": 3}
    ends: dict[str, dict[str, Any]] = {
        "float32": {"mask": sl.window(150, 40)},
        "float64": {"mask": None, "causal": True},
    }
    of_tables = list(ends) if FULL else ["float64" if dtype == "float64" else "float32"]
    for kind, hiding in ((x, ends[x]) for x in of_tables):
        t = sl.table(rng.standard_normal(shape).astype(kind))

        def rowwise(s, b, h, i, j, t=t, first=1024):
            return s * 0.5 + read(t, b, h, i - first, j - first)

        def single(s, b, h, i, j, t=t, first=1024):
            return s * 0.5 + read(t, b, h, (i - first) * ONE[0 * b], (j - first) * ONE[0 * b])

        arrays, options = problem(dtype, rng, rowwise, **more, **hiding)
        arrays[5][0, 1, 7, 2] = np.nan
        same_bits(arrays, t, options, rowwise, single)


@pytest.mark.parametrize("name", ["one of all heads", "one of each head"][: 2 if FULL else 1])
def test_packed_rows_have_the_bits_of_entries_one_by_one(rng, name, monkeypatch):
    shape, read = ROWWISE[name]
    monkeypatch.setattr(biases, "_SHARE_BYTES", 1)
    t = sl.table(rng.standard_normal(shape).astype(np.float32))
    scores = [
        lambda s, b, h, i, j: s + read(t, b, h, i, j),
        lambda s, b, h, i, j: s + read(t, b, h, i * ONE[0 * b], j * ONE[0 * b]),
    ]
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(rng, "float32", 1, Q_HEADS, 2, 200, 200, 8, 5))
    options = {"cu_seqlens_q": [0, 130, 130, 200], "layout": "lhd", "causal": True}
    out, lse = sl.attention(q, k, v, return_lse=True, score=scores[0], **options)
    same_bits((q, k, v, out, lse, rng.standard_normal(out.shape).astype(np.float32)), t, options, *scores)


def same_bits(arrays, t, options, rowwise, single):
    results = []
    for threads, score in ((1, single), (1, rowwise), (3, rowwise)):
        sl.set_threads(threads)
        results.append(sl.attention_backward(*arrays, grads=(t,), **{**options, "score": score})[3][0])
    assert np.isfinite(results[0]).any() and (results[0] != 0).any()
    for other in results[1:]:
        assert other.dtype == results[0].dtype and np.array_equal(results[0], other, equal_nan=True)
        assert (np.signbit(results[0]) == np.signbit(other))[results[0] == 0].all()


DENSE = {
    "all heads": ((700, 300), lambda t, b, h, i, j: t[i, j]),
    "each head": ((Q_HEADS, 700, 300), lambda t, b, h, i, j: t[h, i, j]),
    "each item": ((2, 700, 300), lambda t, b, h, i, j: t[b, i, j]),
    "each pair": ((2, Q_HEADS, 700, 300), lambda t, b, h, i, j: t[b, h, i, j]),
}


@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("dtype", [*["float32"] * FULL, "float64", "bfloat16"])
@pytest.mark.parametrize("name", list(DENSE) if FULL else ["each pair"])
def test_dense_scores_beside_dq_dk_and_dv(rng, name, dtype, monkeypatch):
    """Summed where dS is made, heads in turn, or by a kernel of their own: the same bits, for any threads."""
    q, k, v = qkv(rng, dtype, 2, Q_HEADS, 2, 700, 300, 24, 9)
    shape, read = DENSE[name]
    t = sl.table(rng.standard_normal(shape).astype(np.float32))
    options = {"score": lambda s, b, h, i, j: s + read(t, b, h, i, j), "mask": sl.window(400, 100)}
    options |= {"q_start": 0, "sink_logits": rng.standard_normal(Q_HEADS), "dropout": 0.1, "seed": 3}
    arrays = (q, k, v, *flow_of(rng, (q, k, v), **options))
    sums, seen, results = table_sums.sums_of, [], []
    monkeypatch.setattr(backward_call, "sums_of", lambda *x: seen.append(sums(*x)) or seen[-1])
    for threads, beside in ((1, True), (1, False), (2, False), (3, False)):
        sl.set_threads(threads)
        with monkeypatch.context() as m, tuned(ranges={"keys": (128, 128)}):
            if beside:
                m.setattr(table_sums.TableSums, "beside", lambda *_: True)
            results.append(sl.attention_backward(*arrays, grads=(t, "sink_logits"), **options))
        assert seen[-1].rows and seen[-1].alone == (name == "each pair")
    want = reference.backward(*arrays, grads=(t,), **options)[3][0]
    for other in results:
        assert all(x.tobytes() == y.tobytes() for x, y in zip(results[0][:3], other[:3], strict=True))
        assert all(x.tobytes() == y.tobytes() for x, y in zip(results[0][3], other[3], strict=True))
    close = np.abs(results[0][3][0] - want).max() <= 0.02 * np.abs(want).max()
    assert close and (results[0][3][0] != 0).any()


@pytest.mark.skipif(sys.platform == "win32", reason="mmap and mprotect")
def test_keys_that_a_table_lacks_are_hidden(rng, monkeypatch):
    """Rows of 61 entries, 300 keys: nothing is written before a table's sums, or past them."""
    monkeypatch.setattr(biases, "_SHARE_BYTES", 1)
    t, memory = sl.table(rng.standard_normal((103, 61))), Guarded(1 << 20)
    for first, side in ((0, "over"), (90, "over"), (90, "under")):
        arrays, options = problem(
            "float32",
            rng,
            lambda s, b, h, i, j, first=first: s + t[i - 70, j - first],
            mask=lambda b, h, i, j, first=first: (i < 70 + 103) & (j >= first) & (j < 61 + first),
        )
        with monkeypatch.context() as patch:
            patch.setattr(table_sums, "np", GuardedNumpy(itertools.repeat(memory), side))
            assert_gradients(arrays[:3], arrays[3:], grads=(t,), **options)


def test_shares_of_positions():
    """Each has its blocks ascending by item and head, one after another; a ticket comes after what it waits for."""
    sizes = {"head_dim": 8, "value_dim": 8, "q_lengths": (400, 100), "k_lengths": (300, 300), "q_starts": (70, 300)}
    asked = Problem("float32", Q_HEADS, 2, k_start=0, causal=False, scale=1.0, **sizes)
    for by_positions, shares in ((False, 5), (True, 3)):
        tickets = tickets_of_tables(asked, 5, by_positions=by_positions)
        table = tickets.table.tolist()
        assert tickets.progress == shares and tickets.number == len(table) == Q_HEADS * (3 + 2)
        for share in range(shares):
            rows = [row for row in table if row[3] == share]
            heads = [(item, 2 * head + step % 2) for item, head, step, _, _ in rows]
            assert [row[4] for row in rows] == list(range(len(rows))) and heads == sorted(heads)
            places = {(70, 300)[item] // 192 + step // 2 for item, _, step, _, _ in rows}
            assert len(places) == 1 or not by_positions


BROKEN = (
    "the last keys",
    "half of the last keys",
    "last row",
    "delta of other rows",
    "nothing flows into lse",
    "score",
)


@pytest.mark.each("name", "broken")
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", ["alibi", "relative positions", "two tables", "a learned soft cap"])
def test_broken_sums_are_outside(rng, name, broken):
    """Of 200 rows and 300 keys: most entries that the broken pairs flow to, and most sinks where rows are broken.

    A bound of many terms that cancel each other is as wide as what each may be off: one key of many is within.
    """
    score, tables = FORMS[name]
    arrays, options = problem("float32", rng, score, mask=None, sink_logits=[0.5, 1.0, -0.5, 2.0])
    grads = (*tables, "sink_logits")
    want = reference.backward(*arrays, grads=grads, **options)[3]
    bounds = reference.backward_bound(*arrays, grads=grads, **options)[3]
    wrong, other = list(arrays), dict(options)
    match broken:
        case "the last keys":
            other["mask"] = np.arange(300) < 290
        case "half of the last keys":
            other["score"] = [score, np.where(np.arange(300) >= 290, -np.log(2), 0.0)]
        case "last row":
            wrong[4] = np.where(np.arange(200) == 199, -np.inf, wrong[4])
        case "delta of other rows":
            wrong[6] = np.roll(wrong[6], 1, axis=2)
        case "nothing flows into lse":
            wrong[6] = np.zeros_like(wrong[6])
        case "score":
            other["scale"] = 24**-0.5 * 1.01
    got = reference.backward(*wrong, grads=grads, **other)[3]
    of_keys = broken in ("the last keys", "half of the last keys", "score")
    for x, y, bound in zip(got[: len(grads) - of_keys], want, bounds, strict=False):
        moved = x != y
        outside = (np.abs(x - y) > bound)[moved]
        assert outside.size and outside.mean() >= 0.75, f"{outside.mean():.0%} of {outside.size}"


@pytest.mark.parametrize(("dtype", "sink"), [("float32", 1e18), ("float64", 1e30)])
def test_a_far_sink_takes_all(dtype, sink):
    """Its weight is 1, though so large an lse was rounded by more than anything else counts."""
    x = np.ones((1, 1, 3, 4), dtype)
    out, lse = sl.attention(x, x, x, sink_logits=[sink], return_lse=True)
    got = sl.attention_backward(x, x, x, out, lse, x, np.ones_like(lse), grads=("sink_logits",), sink_logits=[sink])[3]
    want = reference.backward(x, x, x, out, lse, x, np.ones_like(lse), grads=("sink_logits",), sink_logits=[sink])[3]
    assert got[0].tolist() == want[0].tolist() == [3.0]


def test_rows_past_q_lengths_do_not_exist(rng):
    q, k, v = qkv(rng, "float32", 2, Q_HEADS, 2, 20, 20, 8, 8)
    options = {"q_lengths": [20, 7], "k_lengths": [20, 7], "sink_logits": [0.5] * Q_HEADS}
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    d_out = rng.standard_normal(out.shape).astype(np.float32)
    want = sl.attention_backward(q, k, v, out, lse, d_out, grads=("sink_logits",), **options)[3][0]
    for x in (out, lse, d_out):
        x[1, :, 7:] = np.nan
    with np.errstate(all="raise"):
        got = sl.attention_backward(q, k, v, out, lse, d_out, grads=("sink_logits",), **options)[3][0]
    assert np.isfinite(want).all() and (got == want).all()


@pytest.mark.parametrize("seed", range(12) if FULL else (0, 1, 3, 6, 8, 10))  # every shape, dtype and way
def test_a_bias_that_is_shared_has_the_bits_of_its_shares(monkeypatch, seed):
    """Broadcast to every item and head, and added afterwards: as it is summed where queries are many."""
    r = np.random.default_rng(seed)
    many = seed >= 8  # shares have several terms of an entry, in float64, where their order tells
    batch, kv_heads, group, d = 40 if many else int(r.integers(1, 5)), int(r.integers(1, 4)), int(r.integers(1, 3)), 16
    heads, keys = kv_heads * group, int(r.choice([3, 7, 64, 150]))
    rows = int(r.choice([5, 60] if many else [5, 60, 197, 400]))
    kind = np.float64 if many else [np.float32, np.float64, np.float16][r.integers(3)]
    q, k = (r.standard_normal((batch, n, m, d)).astype(kind) for n, m in ((heads, rows), (kv_heads, keys)))
    shape = [(rows, keys), (1, heads, rows, keys), (batch, 1, rows, keys), (heads, rows, keys)][seed % 4]
    options = {"score": sl.table(r.standard_normal(shape).astype(np.float32)), "causal": bool(r.integers(2))}
    options["q_start"] = [None, 100, 180 + 192 * 2][r.integers(3)]
    out, lse = sl.attention(q, k, k, return_lse=True, **options)
    call = q, k, k, out, lse, r.standard_normal(out.shape).astype(kind)
    broadcast = []
    real = TermSums.add
    monkeypatch.setattr(TermSums, "add", lambda sums, x: (broadcast.append(x.shape), real(sums, x))[1])
    found = sl.attention_backward(*call, grads=(options["score"],), **options)
    monkeypatch.setattr(biases, "_FEW", 0)
    want = sl.attention_backward(*call, grads=(options["score"],), **options)
    assert broadcast == [(batch, heads, rows, keys)] * (shape != (batch, heads, rows, keys))
    for a, b in zip((*found[:3], *found[3]), (*want[:3], *want[3]), strict=True):
        assert a.shape == b.shape and a.tobytes() == b.tobytes()


def test_terms_of_a_shared_bias_are_zeroed_where_they_lie_in_shares():
    """Beside a table whose entries have several terms: what a call leaves there, the next one would add."""
    q, bias = RNG.standard_normal((2, Q_HEADS, 40, 8)).astype(np.float32), sl.table(RNG.standard_normal((40, 40)))
    options: Any = {"score": [bias, lambda s, b, h, i, j: s + SLOPES[h]]}
    call = q, q, q, *sl.attention(q, q, q, return_lse=True, **options), q
    found = [sl.attention_backward(*call, grads=(bias, SLOPES), **options)[3][0] for _ in range(2)]
    assert found[0].any() and found[0].tobytes() == found[1].tobytes()
