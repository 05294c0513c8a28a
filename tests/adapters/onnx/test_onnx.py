"""speedlight.onnx: the operators' meaning in float64, onnx's own node tests, and its reference implementation."""

from __future__ import annotations

import importlib
import warnings

import ml_dtypes
import numpy as np
import onnx
import onnx.helper as h
import pytest
from conftest import FULL
from tolerance import assert_within

import speedlight as sl
import speedlight.onnx

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
TYPES = {"float32": 1, "float16": 10, "float64": 11, "bfloat16": 16}
SMALL = {"float32": 2e-5, "float64": 1e-12, "float16": 2e-3, "bfloat16": 1.6e-2}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def node_cases():
    """onnx's backend tests of the three operators, without those of their function bodies."""
    node = importlib.import_module("onnx.backend.test.case.node")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # expected outputs are computed at import, with overflows
        for name in ("attention", "rotaryembedding", "tensorscatter"):
            importlib.import_module(f"onnx.backend.test.case.node.{name}")
    ops = {op.__name__ for op in speedlight.onnx.OPS}
    return {x.name: x for x in node._NodeTestCases if ops & {n.op_type for n in x.model.graph.node}}


def test_own_tests_of_onnx():
    """Every output of every case, in onnx's own tolerance; bfloat16 in its roundoff, where theirs is 1e-3: onnx rounds
    each step to 16 bits.
    """
    cases = node_cases()
    assert len(cases) >= 100 and any("window" in name for name in cases)
    for name, case in list(cases.items())[:: 1 if FULL else 12]:
        assert speedlight.onnx.is_compatible(case.model)
        for inputs, outputs in case.data_sets:
            got = speedlight.onnx.prepare(case.model).run(list(inputs))
            assert len(got) == len(outputs), name
            for x, want in zip(got, outputs, strict=True):
                assert (x.dtype, x.shape) == (want.dtype, want.shape), name
                rough = want.dtype == BFLOAT16
                rtol = 0.0157 if rough else case.rtol
                assert np.allclose(x.astype(float), want.astype(float), rtol, case.atol), name


def formula(q, k, v, mask, past, nonpad, attributes):
    """What the operator's text says, in float64, of inputs by heads: Y and the four modes of qk_matmul_output."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if past is not None:
        k, v = (np.concatenate((p.astype(np.float64), x), 2) for p, x in zip(past, (k, v), strict=True))
    rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    offset = np.full(len(q), 0 if past is None else past[0].shape[2])
    seen = np.ones((len(q), 1, rows, keys), bool)
    i, j = np.arange(rows)[:, None], np.arange(keys)
    if nonpad is not None:
        offset = nonpad - rows
        seen &= j < nonpad[:, None, None, None]
    p = i + offset[:, None, None, None]
    if attributes.get("is_causal"):
        seen &= j <= p
    if attributes.get("left_window_size", -1) >= 0:
        seen &= p - attributes["left_window_size"] <= j
    if attributes.get("right_window_size", -1) >= 0:
        seen &= j <= p + attributes["right_window_size"]
    scores = q @ np.repeat(k, group, 1).swapaxes(-1, -2) * attributes.get("scale", q.shape[-1] ** -0.5)
    cap = attributes.get("softcap", 0)
    capped = cap * np.tanh(scores / cap) if cap else scores
    bias = np.where(seen, 0, -np.inf)
    if mask is not None:
        whole = np.full((*mask.shape[:-1], keys), -np.inf)
        whole[..., : mask.shape[-1]] = np.where(mask, 0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
        bias = bias + whole
    masked = capped + bias
    most = masked.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(masked - np.where(np.isinf(most), 0, most))
    weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
    return weights @ np.repeat(v, group, 1), (scores, capped, masked, weights)


def drawn(seed):
    r = np.random.default_rng(seed)
    names = ["float32", "float64", "float16", "bfloat16"] if FULL else ["float32", "float32", "float32", "bfloat16"]
    dtype = np.dtype({"bfloat16": BFLOAT16}.get(name := names[seed % 4], name))
    batch, kv_heads, group, rows, keys = (int(r.integers(1, n)) for n in (4, 3, 4, 9, 12))
    dim, value_dim = (8, 8) if not FULL else (int(r.integers(1, 40)), int(r.integers(1, 40)))
    q = r.standard_normal((batch, kv_heads * group, rows, dim)).astype(dtype)
    k, v = (r.standard_normal((batch, kv_heads, keys, n)).astype(dtype) for n in (dim, value_dim))
    past = nonpad = mask = None
    attributes = {"is_causal": int(r.integers(2))}
    match r.integers(3):
        case 1:
            n = int(r.integers(5))
            past = [r.standard_normal((batch, kv_heads, n, x)).astype(dtype) for x in (dim, value_dim)]
        case 2:
            nonpad = r.integers(0, keys + 1, batch)
    total = keys + (0 if past is None else past[0].shape[2])
    if r.integers(2):
        shape = [x if r.integers(2) else 1 for x in (batch, kv_heads * group, rows)][int(r.integers(4)) :]
        shape += [int(r.integers(1, total + 1)) if nonpad is None else total]
        mask = r.random(shape) < 0.7 if r.integers(2) else r.standard_normal(shape).astype(dtype)
        if mask.dtype != bool:
            mask[r.random(shape) < 0.2] = -np.inf
    for name, value in (("scale", 0.5), ("softcap", 1.5), ("left_window_size", 2), ("right_window_size", 1)):
        if not r.integers(3):
            attributes[name] = value
    return dtype, (q, k, v, mask, past, nonpad), attributes, bool(r.integers(2))


def flat(x):
    """(batch, length, heads · dim) of what is by heads."""
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(len(x), x.shape[2], -1)


def run(op, inputs, outputs, **attributes):
    """A node of one operator; inputs that are None are left out."""
    names = ["" if x is None else f"x{at}" for at, x in enumerate(inputs)]
    node = h.make_node(op, names, [f"y{n}" for n in range(outputs)], **attributes)
    return speedlight.onnx.run_node(node, inputs)


@pytest.mark.parametrize("seed", range(400 if FULL else 6))
def test_attention_against_its_definition(seed):
    dtype, (q, k, v, mask, past, nonpad), attributes, packed = drawn(seed)
    mode, outputs = seed % 4, 4 if nonpad is None or seed % 2 else 1
    want, products = formula(q, k, v, mask, past, nonpad, attributes)
    heads = {"q_num_heads": q.shape[1], "kv_num_heads": k.shape[1]} if packed else {}
    given = [flat(x) for x in (q, k, v)] if packed else [q, k, v]
    inputs = [*given, mask, *(past or (None, None)), nonpad]
    got = run("Attention", inputs, outputs, **attributes, **heads, qk_matmul_output_mode=mode)
    assert len(got) == outputs and all(x.dtype == dtype for x in got)
    want = flat(want) if packed else want
    small = SMALL[dtype.name]
    assert_within(got[0], want, small * (1 + abs(want)), zeros_allowed=True)
    if outputs == 4:
        for x, new, old in zip(got[1:3], (k, v), past or (k[:, :, :0], v[:, :, :0]), strict=True):
            assert (x == np.concatenate((old, new), 2)).all()
        what = products[mode]
        assert_within(got[3], what, small * (1 + np.nan_to_num(abs(what))), f"mode {mode}", zeros_allowed=True)


def test_attention_in_models_of_every_opset():
    """Attributes that an opset does not have are as if they were not there; nodes around it are onnx's."""
    q = np.random.default_rng(0).standard_normal((1, 2, 5, 8), np.float32)
    want, _ = formula(q, q, q, None, None, None, {"is_causal": 1})
    for opset in (23, 24, 25):
        nodes = [h.make_node("Attention", ["q", "q", "q"], ["a"], is_causal=1), h.make_node("Neg", ["a"], ["y"])]
        values = [h.make_tensor_value_info(x, 1, list(q.shape)) for x in "qy"]
        model = h.make_model(
            h.make_graph(nodes, "two", values[:1], values[1:]), opset_imports=[h.make_opsetid("", opset)]
        )
        onnx.checker.check_model(model)
        for inputs in ([q], {"q": q}):
            assert np.allclose(speedlight.onnx.prepare(model).run(inputs)[0], -want, atol=1e-5)
        assert np.allclose(speedlight.onnx.run_model(model, [q])[0], -want, atol=1e-5)


def test_attention_where_types_differ():
    """V of another dtype; a softmax in float64; masks of integers and of another float type."""
    r = np.random.default_rng(1)
    q, k, v = (r.standard_normal((1, 2, 4, 8), np.float32) for _ in range(3))
    want, _ = formula(q, k, v, None, None, None, {})
    [y] = run("Attention", [q, k, v], 1, softmax_precision=11)
    assert y.dtype == np.float32 and (y == want.astype(np.float32)).mean() > 0.9 and np.allclose(y, want, 1e-6)
    halved = [q.astype(np.float16), k.astype(np.float16), v]
    y, _, value = run("Attention", halved, 3)
    assert y.dtype == np.float16 and value is not None and value.dtype == np.float32
    assert np.allclose(y.astype(float), formula(*halved, None, None, None, {})[0], atol=2e-3)
    for mask in (r.integers(0, 3, (4, 4)), r.standard_normal((4, 4)), r.standard_normal((4, 4)).astype(np.float16)):
        [y] = run("Attention", [q, k, v, mask], 1)
        assert np.allclose(y, formula(q, k, v, mask, None, None, {})[0], atol=1e-5)


def test_what_is_hidden_stays_hidden():
    """Rows that see nothing are 0, in mode 3, too; values behind the mask may be anything."""
    q, k, v = (np.ones((1, 1, 3, 8), np.float32) for _ in range(3))
    k[0, 0, 2], v[0, 0, 2] = np.inf, np.nan
    mask = np.array([[True, False, False], [True, True, False], [False, False, False]])
    y, _, _, weights = run("Attention", [q, k, v, mask], 4, qk_matmul_output_mode=3)
    assert y[0, 0, :, 0].tolist() == [1, 1, 0]
    assert weights[0, 0].round(6).tolist() == [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 0]]
    [y] = run("Attention", [q, k, v, mask[:, :1]], 1)  # a short mask: keys that it has no entries for are hidden
    assert y[0, 0, :, 0].tolist() == [1, 1, 0]
    [y] = run("Attention", [q, k, v, None, None, None, np.array([1])], 1, is_causal=1)
    assert y[0, 0, :, 0].tolist() == [0, 0, 1]


REFUSED = [
    ({"scale": -1.0}, "scale: expected a number of at least 0"),
    ({"softcap": -1.0}, "softcap: expected 0"),
    ({"left_window_size": -2}, "left_window_size: expected -1"),
    ({"qk_matmul_output_mode": 4}, "qk_matmul_output_mode: expected 0 to 3; got 4"),
    ({"softmax_precision": 7}, "softmax_precision: expected 1, 10, 11 or 16; got 7"),
    ({"q_num_heads": 3}, "q_num_heads: expected none beside Q of 4 dimensions; got 3"),
]


@pytest.mark.parametrize(("attributes", "message"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_attributes_that_are_refused(attributes, message):
    q = np.ones((1, 2, 3, 8), np.float32)
    with pytest.raises(sl.ArgumentError, match=message):
        run("Attention", [q, q, q], 1, **attributes)


def test_inputs_that_are_refused():
    q, five = np.ones((1, 2, 3, 8), np.float32), np.array([5])
    packed = flat(q)
    for inputs, message in [
        ([q[0, 0], q, q], "Q: expected 3 or 4 dimensions"),
        ([packed, packed, packed], "q_num_heads: expected a divisor of 16"),
        ([q, q, q, None, q, None], "past_value: expected past_key and past_value together"),
        ([q, q, q, None, q[:, :1], q], "past_key: expected shape"),
        ([q, q, q, None, q, q[:, :, :2]], "past_value: expected the length of past_key; got 2"),
        ([q, q, q, None, q, q, five], "nonpad_kv_seqlen: expected none beside past_key"),
        ([q, q, q, None, None, None, five], "nonpad_kv_seqlen: expected 0 to 3, the keys in K"),
        ([q, q, q, None, None, None, np.ones(1)], "nonpad_kv_seqlen: expected 1 ints"),
        ([q, q, q, np.ones((3, 4), bool)], "attn_mask: expected a shape that broadcasts"),
        ([q, q, q, np.ones((2, 3), bool)], "attn_mask: expected a shape that broadcasts"),
    ]:
        with pytest.raises(sl.ArgumentError, match=message):
            run("Attention", inputs, 1)
    for inputs, message in [
        ([q, q.astype(np.float64), q], "K: expected float32, as Q has; got float64"),
        ([q, q, q.astype(int)], "V: expected float32"),
        ([q, q, q, None, q.astype(np.float64), q], "past_key: expected float32"),
    ]:
        with pytest.raises(sl.ArgumentError, match=f"^{message}"):  # onnx would wrap a TypeError
            run("Attention", inputs, 1)
    for inputs, message in [
        ([q, q[..., :4], q], "K: expected head_dim 8, as Q has; got 4"),
        ([q, q, q[:, :, :2]], "V: expected 2 heads and length 3, as K has"),
    ]:
        with pytest.raises(sl.ArgumentError, match=f"^{message}"):
            run("Attention", inputs, 1)


def test_models_of_older_opsets_are_refused():
    node = h.make_node("Attention", ["q", "k", "v"], ["y"])
    graph = h.make_graph([node], "one", [], [])
    with pytest.raises(sl.ArgumentError, match="^model: expected opset 23 or later, which has Attention; got 22"):
        speedlight.onnx.prepare(h.make_model(graph, opset_imports=[h.make_opsetid("", 22)]))
    table = np.ones((9, 2), np.float32)
    with pytest.raises(sl.ArgumentError, match="^X: expected"):
        run("RotaryEmbedding", [np.ones((1, 2, 3, 4), int), table, table, np.ones((1, 3), int)], 1)


@pytest.mark.parametrize("seed", range(60 if FULL else 12))
def test_rotary_embedding(seed):
    r = np.random.default_rng(seed)
    batch, heads, length, dim = (int(r.integers(1, n)) for n in (3, 4, 6, 9))
    dim, turned = 2 * dim, 2 * int(r.integers(1, dim + 1))
    name = ["float32", "float16", "bfloat16"][seed % 3]
    dtype = BFLOAT16 if name == "bfloat16" else np.dtype(name)
    x = r.standard_normal((batch, heads, length, dim)).astype(dtype)
    at = r.integers(0, 20, (batch, length))
    tables = [r.standard_normal((20, turned // 2)).astype(dtype) for _ in range(2)]
    cos, sin = (t.astype(np.float64)[at][:, None] for t in tables)
    whole = x.astype(np.float64)
    pairs = (slice(0, turned, 2), slice(1, turned, 2)) if seed % 2 else (slice(turned // 2), slice(turned // 2, turned))
    want = whole.copy()
    want[..., pairs[0]] = whole[..., pairs[0]] * cos - whole[..., pairs[1]] * sin
    want[..., pairs[1]] = whole[..., pairs[0]] * sin + whole[..., pairs[1]] * cos
    attributes = {"interleaved": seed % 2, "rotary_embedding_dim": 0 if turned == dim else turned}
    inputs = [x, *tables, at] if seed % 4 < 2 else [x, *(t[at] for t in tables)]
    if r.integers(2):
        inputs[0], want = flat(x), flat(want)
        attributes["num_heads"] = heads
    [got] = run("RotaryEmbedding", inputs, 1, **attributes)
    assert got.dtype == dtype
    assert_within(got, want, SMALL[name] * (2 + abs(want)))


def test_rotary_embedding_refuses():
    x, table = np.ones((1, 2, 3, 8), np.float32), np.ones((9, 4), np.float32)
    at = np.array([[0, 1, 9]])
    for inputs, message in [
        ([x, table, table], "cos_cache: expected 3 dimensions beside no position_ids"),
        ([x, table, table[:, :3], at], "sin_cache: expected 2 dimensions beside position_ids, the last of 4"),
        ([x, table, table, at], "position_ids: expected 0 to 8, the rows of cos_cache; got 9"),
        ([x, table, table, -at], "position_ids: expected 0 to 8, the rows of cos_cache; got -9"),
        ([flat(x), table, table, at], "num_heads: expected a divisor of 16"),
    ]:
        with pytest.raises(sl.ArgumentError, match=message):
            run("RotaryEmbedding", inputs, 1)


@pytest.mark.parametrize("seed", range(40))
def test_tensor_scatter(seed):
    """The loop that its text has, along any axis."""
    r = np.random.default_rng(seed)
    shape = [int(n) for n in r.integers(1, 5, int(r.integers(2, 5)))]
    axis, circular = int(r.integers(1, len(shape))), seed % 2
    most, length = shape[axis], int(r.integers(0, shape[axis] + 1))
    past = r.integers(0, 100, shape).astype([np.int8, np.float32, BFLOAT16, bool][seed % 4])
    update = r.integers(0, 100, [*shape[:axis], length, *shape[axis + 1 :]]).astype(past.dtype)
    first = r.integers(-9, 9, shape[0]) if circular else r.integers(0, most - length + 1, shape[0])
    want = past.copy()
    for prefix in np.ndindex(*shape[:axis]):
        for n in range(length):
            want[(*prefix, (first[prefix[0]] + n) % most)] = update[(*prefix, n)]
    before = past.copy()
    for given in (axis, axis - len(shape)):
        [got] = run("TensorScatter", [past, update, first], 1, axis=given, mode="circular" if circular else "linear")
        assert got.dtype == past.dtype and (got == want).all() and (past == before).all()


def test_tensor_scatter_refuses():
    past, new = np.zeros((2, 4, 3)), np.ones((2, 2, 3))
    for inputs, attributes, message in [
        ([past, new, np.array([0, 3])], {}, r"write_indices: expected 0 to 2, so that 2 fit; got \[0, 3\]"),
        ([past, new, np.array([-1, 0])], {}, "write_indices: expected 0 to 2"),
        ([past, new, np.array([0])], {}, "write_indices: expected 2 ints"),
        ([past, new], {"axis": 0}, "axis: expected a dimension"),
        ([past, new], {"axis": -1}, "update: expected the shape of past_cache"),
        ([past, new], {"mode": "ring"}, "mode: expected linear or circular; got ring"),
        ([new, past], {}, "update: expected the shape of past_cache"),
    ]:
        with pytest.raises(sl.ArgumentError, match=message):
            run("TensorScatter", inputs, 1, **attributes)


@pytest.mark.parametrize("shape", [(2, 0, 8), (2, 2, 0, 4)])
def test_no_queries_at_all(shape):
    heads = {"q_num_heads": 2, "kv_num_heads": 1} if len(shape) == 3 else {}
    k = np.ones((2, 5, 4) if heads else (2, 1, 5, 4), np.float32)
    node = h.make_node("Attention", ["q", "k", "v"], ["y", "", "", "s"], qk_matmul_output_mode=3, **heads)
    y, *_, s = speedlight.onnx.run_node(node, [np.ones(shape, np.float32), k, k])
    assert y.shape == shape and s.shape == (2, 2, 0, 5)


def test_backend():
    q = np.ones((1, 1, 2, 8), np.float32)
    node = h.make_node("Attention", ["q", "q", "q"], ["y"])
    with pytest.raises(sl.ArgumentError, match="device: expected 'CPU'; got 'CUDA'"):
        speedlight.onnx.run_node(node, [q, q, q], "CUDA")
    assert speedlight.onnx.supports_device("CPU:0") and not speedlight.onnx.supports_device("CUDA")
