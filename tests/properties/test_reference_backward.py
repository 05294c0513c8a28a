"""The specification of gradients against differences of the forward one, in float64; what is refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from expressions import BIAS, HALVES, IDS, LENGTH, SQUARE, masks, scores
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import qkv
from tolerance import assert_within

import speedlight as sl
from speedlight import reference
from speedlight.expressions.tree import Node, order

STEP = 1e-5
Random = np.random.Generator
TABLES = (BIAS, HALVES, SQUARE)
GRID = sl.table(np.random.default_rng(8).standard_normal((6, 40)), "grid")


def loss(arrays: Any, flow: Any, options: dict[str, Any]) -> float:
    """What d_out and d_lse are the slopes of."""
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    return float(np.sum(out * flow[0]) + np.sum(np.where(np.isfinite(lse), lse, 0.0) * flow[1]))


def gradients(arrays: Any, flow: Any, options: dict[str, Any], **asked: Any) -> Any:
    """By the specification, from its own out and lse."""
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    return reference.backward(*arrays, out, lse, *flow, **asked, **options)


def flow_for(rng: Random, arrays: Any, options: dict[str, Any]) -> Any:
    """d_out and d_lse."""
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    return rng.standard_normal(out.shape), rng.standard_normal(lse.shape)


def assert_slope(at: Any, slope: np.ndarray, rng: Random, what: str) -> None:
    """A gradient against differences of `at(change)` along random directions, where there is no kink."""
    for every in (1.0, 0.2):
        way = rng.standard_normal(slope.shape) * (rng.random(slope.shape) < every)
        low, here, high = (at(x * way) for x in (-STEP, 0.0, STEP))
        left, right = (here - low) / STEP, (high - here) / STEP
        if abs(left - right) < 1e-2 * (1 + abs(left)):
            got, want = np.sum(slope * way), (high - low) / (2 * STEP)
            bound = 1e-6 * (1 + abs(want) + abs(here))
            assert_within(np.array([got]), np.array([want]), np.array([bound]), what, zeros_allowed=True)


def replaced(score: sl.Expression, old: sl.Table, new: np.ndarray) -> sl.Expression:
    """The score with other entries in a table."""
    table, nodes = sl.table(new), {}
    for node in order(score.root):
        value = table if node.value is old else node.value
        nodes[id(node)] = Node(node.op, node.kind, tuple(nodes[id(a)] for a in node.args), value)
    return sl.Expression("score", nodes[id(score.root)], score.size)


def assert_gradients(rng: Random, arrays: Any, options: dict[str, Any]) -> None:
    """Of q, k, v, every table of the score, and sinks."""
    flow = flow_for(rng, arrays, options)
    score = options.get("score")
    tables = [t for t in score.tables if t.kind in ("float", "double")] if isinstance(score, sl.Expression) else []
    sinks = options.get("sink_logits")
    asked = (*tables, *(["sink_logits"] if sinks is not None else []))
    *own, extra = gradients(arrays, flow, options, grads=asked) if asked else (*gradients(arrays, flow, options), ())
    for n, name in enumerate("qkv"):

        def moved(change: Any, n: int = n) -> float:
            return loss([x + change if m == n else x for m, x in enumerate(arrays)], flow, options)

        assert own[n].shape == arrays[n].shape and own[n].dtype == np.float64
        assert_slope(moved, own[n], rng, f"d{name}")
    for table, slope in zip(tables, extra, strict=False):

        def looked_up(change: Any, table: Any = table) -> float:
            return loss(arrays, flow, options | {"score": replaced(score, table, table.array + change)})

        assert slope.shape == table.shape
        assert_slope(looked_up, slope, rng, table.name)
    if sinks is not None:
        assert_slope(lambda x: loss(arrays, flow, options | {"sink_logits": sinks + x}), extra[-1], rng, "sinks")


# --- random problems of every option


def sizes(rng: Random) -> tuple[int, ...]:
    """batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim."""
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    q_len, k_len, d, dv = (int(rng.integers(1, n)) for n in (8, 11, 5, 5))
    return int(rng.integers(1, 3)), kv_heads * group, kv_heads, q_len, k_len, d, dv


def drawn(rng: Random) -> tuple[Any, dict[str, Any]]:
    """Arrays and options: positions, lengths, layouts, sinks, scale, dropout; no expression."""
    batch, q_heads, kv_heads, q_len, k_len, d, dv = sizes(rng)
    options: dict[str, Any] = {"causal": [False, True, "top-left"][rng.integers(3)]}
    if rng.random() < 0.3 and options["causal"] != "top-left":
        options["q_start"] = rng.integers(0, 12, batch).tolist()
    if rng.random() < 0.3:
        options["window"] = (int(rng.integers(0, 5)), None if rng.random() < 0.5 else int(rng.integers(0, 3)))
    if rng.random() < 0.3:
        options["scale"] = float(rng.choice([-0.7, 2.0, 0.0]))
    if rng.random() < 0.4:
        options["sink_logits"] = rng.standard_normal(q_heads)
    if rng.random() < 0.3:
        options |= {"dropout": 0.3, "seed": int(rng.integers(1 << 40))}
    layout = str(rng.choice(["bhld", "blhd", "lhd"]))
    options["layout"] = layout
    if layout == "lhd":
        q_lens, k_lens = rng.integers(0, 6, (2, batch))
        q_len, k_len = int(q_lens.sum()), int(k_lens.sum())
        options |= {f"cu_seqlens_{x}": np.cumsum([0, *n]).tolist() for x, n in (("q", q_lens), ("k", k_lens))}
    elif rng.random() < 0.3:
        options |= {"q_lengths": rng.integers(0, q_len + 1, batch), "k_lengths": rng.integers(0, k_len + 1, batch)}
    arrays = qkv(rng, "float64", 1 if layout == "lhd" else batch, q_heads, kv_heads, q_len, k_len, d, dv)
    match layout:
        case "blhd":
            arrays = tuple(x.swapaxes(1, 2) for x in arrays)
        case "lhd":
            arrays = tuple(x[0].swapaxes(0, 1) for x in arrays)
    return arrays, options


def test_random_problems():
    rng = np.random.default_rng(31)
    for _ in range(1000 if FULL else 50):
        assert_gradients(rng, *drawn(rng))


@settings(max_examples=1000 if FULL else 30, deadline=None)
@given(scores(3), masks(1), st.integers(0, 1 << 30))
def test_random_expressions(score, mask, seed):
    """Positions that the tables of these expressions know."""
    rng = np.random.default_rng(seed)
    batch, q_heads, kv_heads, *rest = sizes(rng)
    arrays = qkv(rng, "float64", batch, q_heads, kv_heads, *rest)
    options: dict[str, Any] = {"score": sl.expression(score, "score"), "q_start": int(rng.integers(0, LENGTH // 2))}
    if rng.random() < 0.7:
        options["mask"] = sl.expression(mask, "mask")
    assert_gradients(rng, arrays, options)


SCORES = {
    "alibi": sl.alibi([0.5, 0.1]),
    "softcap": sl.softcap(2.0),
    "one entry, read everywhere": sl.expression(lambda s, b, h, i, j: s * GRID[h * 0, h * 0]),
    "two lookups of a table": sl.expression(lambda s, b, h, i, j: s * GRID[h, j] + sl.tanh(GRID[i % 6, j] * s)),
    "an entry at an index of s": sl.expression(lambda s, b, h, i, j: s + GRID[h, sl.cast(sl.abs(s), int) % 40]),
    "a chosen entry": sl.expression(lambda s, b, h, i, j: sl.where(IDS[j] > 1, s + GRID[b, i], GRID[5, j] * 2.0)),
    "nothing of s": sl.expression(lambda s, b, h, i, j: GRID[h, j] * GRID[h, i]),
    "nothing flows": sl.expression(lambda s, b, h, i, j: sl.floor(s + GRID[h, j])),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores_by_name(name, rng):
    arrays = qkv(rng, "float64", 2, 2, 1, 5, 7, 4, 3)
    assert_gradients(rng, arrays, {"score": SCORES[name], "causal": True, "q_start": 2})


def test_several_scores_and_arrays(rng):
    """A list, left to right; a bool mask and an additive array that hides by -inf."""
    arrays = qkv(rng, "float64", 1, 2, 2, 5, 7, 4, 3)
    bias = np.where(rng.random((2, 5, 7)) < 0.3, -np.inf, rng.standard_normal((2, 5, 7)))
    options = {"score": [sl.softcap(3.0), bias], "mask": rng.random((5, 7)) < 0.8}
    flow = flow_for(rng, arrays, options)
    for n, slope in enumerate(gradients(arrays, flow, options)):
        moved = functools.partial(
            lambda n, x: loss([a + x if m == n else a for m, a in enumerate(arrays)], flow, options), n
        )
        assert_slope(moved, slope, rng, "qkv"[n])


def test_by_hand():
    """Two keys of weights 1/4 and 3/4, values 2 and 6: out is 5, delta 5, ds = p · (v - 5)."""
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[0.0], [np.log(3.0)]]]]), np.array([[[[2.0], [6.0]]]])
    dq, dk, dv = gradients((q, k, v), (np.ones((1, 1, 1, 1)), None), {})
    assert dv[0, 0, :, 0] == pytest.approx([0.25, 0.75])
    assert dk[0, 0, :, 0] == pytest.approx([-0.75, 0.75])
    assert dq[0, 0, 0, 0] == pytest.approx(0.75 * np.log(3.0))


# --- shards


@pytest.mark.parametrize("sinks", [None, [0.3, -0.5]])
def test_shards_add_up(rng, sinks):
    """Keys in two parts, with the out and lse of both: each gives its own dk and dv, and a share of dq."""
    q, k, v = qkv(rng, "float64", 1, 2, 1, 9, 1500, 4, 3)
    options = {"score": sl.expression(lambda s, b, h, i, j: s + GRID[h, j % 40]), "q_start": 1200, "causal": True}
    joint = options | {"sink_logits": sinks}
    out, lse = reference.attention(q, k, v, return_lse=True, **joint)
    flow = flow_for(rng, (q, k, v), joint)
    dq, dk, dv, (table,) = reference.backward(q, k, v, out, lse, *flow, grads=(GRID,), **options)
    parts = [
        reference.backward(q, k[:, :, at], v[:, :, at], out, lse, *flow, grads=(GRID,), k_start=start, **options)
        for start, at in ((0, slice(1024)), (1024, slice(1024, None)))
    ]
    bound = 1e-13
    assert_within(parts[0][0] + parts[1][0], dq, np.full(dq.shape, bound), "dq")
    assert_within(np.concatenate([x[1] for x in parts], axis=2), dk, np.full(dk.shape, bound), "dk")
    assert_within(np.concatenate([x[2] for x in parts], axis=2), dv, np.full(dv.shape, bound), "dv")
    assert_within(parts[0][3][0] + parts[1][3][0], table, np.full(table.shape, bound), "table")


def test_sinks_of_one_shard_are_those_of_all(rng):
    q, k, v = qkv(rng, "float64", 1, 2, 1, 9, 1100, 4, 3)
    options = {"sink_logits": [0.3, 2.0]}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    flow = flow_for(rng, (q, k, v), options)
    *_, (whole,) = reference.backward(q, k, v, out, lse, *flow, grads=["sink_logits"], **options)
    *_, (part,) = reference.backward(q, k[:, :, :3], v[:, :, :3], out, lse, *flow, grads=["sink_logits"], **options)
    assert (whole == part).all() and (whole != 0).all()


# --- what is refused

FLOATS = sl.table(np.ones(40, np.float32), "floats")
MASKED = sl.expression(lambda b, h, i, j: FLOATS[j] > 0.5)


@pytest.mark.parametrize(
    ("grads", "options", "error", "message"),
    [
        ((FLOATS.array,), {}, sl.ArgumentTypeError, r"expected a tuple of the score's tables .* at \[0\]"),
        ((FLOATS,), {}, sl.ArgumentError, r"got table\(floats, float32\[40\]\) at \[0\], which it does not"),
        ((FLOATS,), {"mask": MASKED}, sl.ArgumentError, r"tables that the score looks up; got .*only the mask does"),
        ((BIAS,), {"score": lambda s, b, h, i, j: s + FLOATS[3]}, sl.ArgumentError, "at an index of symbols"),
        ((IDS,), {"score": lambda s, b, h, i, j: s * IDS[j]}, sl.ArgumentTypeError, "tables of floats; got table.ids"),
        ((GRID, GRID), {"score": lambda s, b, h, i, j: s + GRID[h, j]}, sl.ArgumentError, "once; got .* again"),
    ],
)  # fmt: skip
def test_grads_that_are_refused(rng, grads, options, error, message):
    q, k, v = qkv(rng, "float64", 1, 2, 2, 5, 6, 3, 2)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    with pytest.raises(error, match=f"^grads: .*{message}"):
        reference.backward(q, k, v, out, lse, out, grads=grads, **options)
