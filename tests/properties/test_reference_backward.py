"""The specification of gradients against differences of the forward one, in float64; what is hidden, and refused."""

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
    for _ in range(1000 if FULL else 80):
        assert_gradients(rng, *drawn(rng))


@settings(max_examples=1000 if FULL else 50, deadline=None)
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


# --- what is hidden


HIDDEN = {
    "causal": {"causal": True, "q_start": 1},
    "window": {"window": (2, 0), "q_start": 1},
    "mask": {"mask": sl.expression(lambda b, h, i, j: (i + j) % 4 != 3)},
    "array": {"mask": np.arange(9) % 4 != 3},
    "score": {"score": sl.expression(lambda s, b, h, i, j: sl.where((i * j) % 5 == 2, -np.inf, s + GRID[h, j]))},
    "lengths": {"k_lengths": [6], "q_lengths": [4]},
    "a row alone": {"mask": sl.expression(lambda b, h, i, j: i != 3)},
}


@pytest.mark.parametrize("special", [np.nan, np.inf])
@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_hidden_never_comes_out(name, special, rng):
    """A key's NaN reaches the rows that see it and the keys those see; a row's its keys: nothing else changes."""
    options = HIDDEN[name]
    arrays = qkv(rng, "float64", 1, 2, 2, 6, 9, 4, 3)
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    seen = reference.weights(*arrays[:2], **options)[0] > 0  # [head, row, key]
    flow = rng.standard_normal(out.shape)
    want = reference.backward(*arrays, out, lse, flow, **options)
    given = dict(zip(("q", "k", "v", "out", "lse", "d_out"), (*arrays, out, lse, flow), strict=True))
    for which, x in given.items():
        at = int(rng.integers(x.shape[2]))
        broken = x.copy()
        broken[0, 0, at] = special
        got = reference.backward(*(given | {which: broken}).values(), **options)
        row = seen[0, :, at] if which in "kv" else np.arange(6) == at
        keys = seen[0][row].any(axis=0)
        if which in "kv":
            keys = keys | (np.arange(9) == at)
        rows = row & seen[0].any(axis=1)
        for g, w, hit in zip(got, want, (rows, keys, keys), strict=True):
            hit = np.stack([hit, np.zeros(hit.shape, bool)])
            assert_within(g[0][~hit], w[0][~hit], np.full(w[0][~hit].shape, 1e-14), which)
        assert np.isnan(got[0][0, 0][rows]).all() or special == np.inf


def test_rows_that_see_nothing(rng):
    """dq is 0 there, and whatever flows into such a row stops; a sink sees every row."""
    q, k, v = qkv(rng, "float64", 1, 1, 1, 4, 5, 3, 2)
    options = {"mask": sl.expression(lambda b, h, i, j: i > 1), "q_start": 0}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    flow, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    flow[0, 0, 0], d_lse[0, 0, 1], q[0, 0, :2] = np.nan, np.nan, np.nan
    results = reference.backward(q, k, v, out, lse, flow, d_lse, **options)
    assert (results[0][0, 0, :2] == 0).all() and all(np.isfinite(x).all() for x in results)
    q[0, 0, :2], flow[0, 0, 0], d_lse[0, 0, 1] = 1, 1, 2
    options |= {"sink_logits": [0.5]}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    alone = reference.backward(q[:, :, :2], k, v, out[:, :, :2], lse[:, :, :2], flow[:, :, :2], d_lse[:, :, :2],
                               grads=("sink_logits",), **options)  # fmt: skip
    assert alone[3][0].tolist() == [d_lse[0, 0, :2].sum()] and not any(x.any() for x in alone[:3])


def test_a_row_whose_lse_is_given_as_nothing(rng):
    """Whatever it would see."""
    q, k, v = qkv(rng, "float64", 1, 1, 1, 4, 5, 3, 2)
    out, lse = reference.attention(q, k, v, return_lse=True)
    flow = rng.standard_normal(out.shape)
    want = reference.backward(q[:, :, 1:], k, v, out[:, :, 1:], lse[:, :, 1:], flow[:, :, 1:])
    lse[0, 0, 0] = -np.inf
    got = reference.backward(q, k, v, out, lse, flow)
    assert (got[0][0, 0, 0] == 0).all()
    for g, w in zip((got[0][:, :, 1:], *got[1:]), want, strict=True):
        assert_within(g, w, np.full(w.shape, 1e-14))


def test_scores_far_from_zero_have_weights_of_at_most_one(rng):
    """An lse of -1e9, which float32 rounds by more than some scores are apart; finite masks of other libraries."""
    q, k, v = (x.astype(np.float32) for x in qkv(rng, "float64", 1, 1, 1, 4, 5, 3, 2))
    for far in (-1e9, -3.4e38):
        options = {"score": [np.full((4, 5), far, np.float32)]}
        out, lse = (x.astype(np.float32) for x in reference.attention(q, k, v, return_lse=True, **options))
        dq, dk, dv = reference.backward(q, k, v, out, lse, np.ones_like(out), **options)
        assert np.isfinite(dq).all() and np.isfinite(dk).all() and (dv <= 4).all() and (dv > 0).all()


def test_rows_and_keys_past_their_lengths_have_no_gradient(rng):
    q, k, v = qkv(rng, "float64", 2, 2, 1, 5, 6, 3, 2)
    options = {"q_lengths": [3, 0], "k_lengths": [4, 6]}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    for x, n in ((q, 3), (k, 4), (v, 4), (out, 3)):
        x[0, :, n:] = np.nan
    dq, dk, dv = reference.backward(q, k, v, out, lse, np.ones(out.shape), **options)
    assert not dq[0, :, 3:].any() and not dk[0, :, 4:].any() and not dv[0, :, 4:].any()
    assert not any(x[1].any() for x in (dq, dk, dv)) and dq[0, :, :3].all() and dk[0, :, :4].all()


# --- what is refused

FLOATS = sl.table(np.ones(40, np.float32), "floats")
MASKED = sl.expression(lambda b, h, i, j: FLOATS[j] > 0.5)


@pytest.mark.parametrize("layout", ["bhld", "blhd", "lhd"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_arrays_as_attention_returns_them(rng, layout, dtype):
    q, k, v = qkv(rng, dtype, 1, 4, 2, 5, 6, 3, 2)
    if layout != "bhld":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    if layout == "lhd":
        q, k, v = q[0], k[0], v[0]
    options = {"layout": layout} | ({"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 6]} if layout == "lhd" else {})
    logs = "float64" if dtype == "float64" else "float32"
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    out, lse = out.astype(q.dtype), lse.astype(logs)
    dq, dk, dv = reference.backward(q, k, v, out, lse, out, lse, **options)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    for name, x, dtype_name in (("out", out, dtype), ("lse", lse, logs), ("d_out", out, dtype), ("d_lse", lse, logs)):
        given = {"out": out, "lse": lse, "d_out": out, "d_lse": lse}
        what = name.removeprefix("d_")
        with pytest.raises(sl.ArgumentError, match=rf"^{name}: expected shape .* attention\(\) returns {what}; got"):
            reference.backward(q, k, v, **(given | {name: x[..., :1]}), **options)
        other = x.astype("float16")
        with pytest.raises(sl.ArgumentTypeError, match=rf"^{name}: expected dtype {dtype_name}, as attention"):
            reference.backward(q, k, v, **(given | {name: other}), **options)
        if name != "d_lse":
            with pytest.raises(sl.ArgumentTypeError, match=rf"^{name}: expected a NumPy array"):
                reference.backward(q, k, v, **(given | {name: None}), **options)


def test_tensors_and_arrays_do_not_mix(rng):
    torch = pytest.importorskip("torch")
    q, k, v = qkv(rng, "float64", 1, 2, 2, 5, 6, 3, 2)
    out, lse = reference.attention(q, k, v, return_lse=True)
    for name in ("out", "lse", "d_out", "d_lse"):
        given = {"out": out, "lse": lse, "d_out": out, "d_lse": lse}
        with pytest.raises(sl.ArgumentTypeError, match=rf"^{name}: expected the same kind of array as q; got torch"):
            reference.backward(q, k, v, **(given | {name: torch.from_numpy(given[name])}))


@pytest.mark.parametrize(
    ("grads", "options", "error", "message"),
    [
        ("sink_logits", {}, sl.ArgumentTypeError, "expected a tuple of the score's tables .* got 'sink_logits'"),
        (("sinks",), {}, sl.ArgumentTypeError, r"got 'sinks' at \[0\]"),
        ((FLOATS.array,), {}, sl.ArgumentTypeError, r"expected a tuple of the score's tables .* at \[0\]"),
        (("sink_logits",), {}, sl.ArgumentError, "expected sink_logits= beside 'sink_logits'; got none"),
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


def test_an_operation_without_a_derivative_is_named(rng):
    q, k, v = qkv(rng, "float64", 1, 2, 2, 5, 6, 3, 2)
    options = {"score": sl.expression(lambda s, b, h, i, j: s % 2.0)}
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    with pytest.raises(sl.ExpressionError, match="expected operations that have a derivative; got %"):
        reference.backward(q, k, v, out, lse, out, **options)
