"""speedlight.onnx.GroupQueryAttention: caches of floats and of codes, by the facts of ONNX Runtime's own tests.

Their sizes, numbers and tolerances; what the operator's text says of lengths, windows, biases and sinks, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.helper as h
import pytest
from problems import numpy_dtype

import speedlight as sl
import speedlight.onnx

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
INPUTS = (
    "query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache",
    "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale", "q_norm_weight", "k_norm_weight",
)  # fmt: skip
# batch, length, heads, heads of keys, dim
SIZES = [(1, 4, 2, 1, 8), (2, 4, 4, 2, 16), (1, 8, 2, 1, 64), (1, 4, 4, 1, 16), (1, 16, 4, 2, 32), (1, 128, 8, 2, 64)]


def run(attributes: dict[str, Any], outputs: int = 3, **inputs: Any) -> list[np.ndarray]:
    """Runs one node with the inputs that are given."""
    names = [name if inputs.get(name) is not None else "" for name in INPUTS]
    node = h.make_node(
        "GroupQueryAttention",
        names,
        ["y", "present_key", "present_value"][:outputs],
        domain="com.microsoft",
        **attributes,
    )
    return speedlight.onnx.run_node(node, [inputs.get(name) for name in INPUTS])


def by_heads(x: np.ndarray, heads: int) -> np.ndarray:
    """Returns (batch, heads, length, dim)."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def formula(q, k, v, totals, *, past=0, bias=None, window=None, softcap=0.0, sinks=None, causal=True):
    """What the operator's text says, in float64: queries are the last of each item's tokens."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group, out = q.shape[1] // k.shape[1], np.zeros((*q.shape[:3], v.shape[3]))
    for item, total in enumerate(totals):
        before = total - q.shape[2] if past is None else past
        for head in range(q.shape[1]):
            for row in range(min(q.shape[2], total - before)):
                end = before + row + 1 if causal else total
                first = max(0, end - window) if window else 0
                scores = k[item, head // group, first:end] @ q[item, head, row] / np.sqrt(q.shape[3])
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                if bias is not None:
                    scores = scores + bias[item % len(bias), head % bias.shape[1], row, first:end]
                weights = np.exp(scores - scores.max())
                total_weight = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - scores.max()))
                out[item, head, row] = weights @ v[item, head // group, first:end] / total_weight
    return out.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def scales_of(x: np.ndarray, kind: str) -> np.ndarray:
    """Returns a scale for all of (batch, heads, length, dim), (1,), or one for each channel, flat."""
    if kind == "PER_TENSOR":
        return np.float32([np.abs(x).max() / 127])
    return (np.abs(x).max(axis=(0, 2)) / 127).astype(np.float32).ravel()


def codes_of(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.clip(np.round(x / _broadcast(x, scale)), -128, 127)


def _broadcast(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return scale if scale.size == 1 else scale.reshape(1, x.shape[1], 1, x.shape[3])


def quantised(kind: str, heads: int, kv_heads: int) -> dict[str, Any]:
    kinds = {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}
    return {"num_heads": heads, "kv_num_heads": kv_heads} | kinds


def drawn(rng, batch, length, heads, kv_heads, dim, dtype="float32"):
    return [
        rng.uniform(-0.5, 0.5, (batch, length, n * dim)).astype(numpy_dtype(dtype)) for n in (heads, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_prompts(rng, kind, size, packed):
    """An empty cache of codes is filled with the nearest codes, and the prompt attends to these."""
    _, length, heads, kv_heads, _ = size
    query, key, value = drawn(rng, *size)
    k, v = by_heads(key, kv_heads), by_heads(value, kv_heads)
    k_scale, v_scale = scales_of(k, kind), scales_of(v, kind)
    past = np.zeros(k.shape, np.int8)
    inputs = {"query": query, "key": key, "value": value}
    if packed:
        inputs = {"query": np.concatenate([query, key, value], axis=2)}
    y, present_k, present_v = run(
        quantised(kind, heads, kv_heads), **inputs, past_key=past, past_value=past, k_scale=k_scale, v_scale=v_scale,
        seqlens_k=np.full(len(query), length - 1, np.int32), total_sequence_length=np.int32([length]),
    )  # fmt: skip
    assert present_k.dtype == np.int8 and (present_k == codes_of(k, k_scale)).all()
    assert (present_v == codes_of(v, v_scale)).all() and not past.any()
    keys, values = present_k * _broadcast(k, k_scale), present_v * _broadcast(v, v_scale)
    want = formula(by_heads(query, heads), keys, values, [length] * len(query))
    assert y.dtype == np.float32 and np.allclose(y, want, atol=1e-6)
    assert np.allclose(y, formula(by_heads(query, heads), k, v, [length] * len(query)), atol=0.02, rtol=0.1)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn", "float32"])
def test_a_first_prompt_has_a_past_without_tokens(rng, codes):
    """Its dtype is that of the presents, which are as long as the prompt. Items have the tokens that they say.

    Another past, with room, has the same codes and the same result. Scales of either sign store the same numbers.
    """
    query, key, value = drawn(rng, 2, 5, 4, 2, 16)
    lies = {"seqlens_k": np.int32([4, 2]), "total_sequence_length": np.int32([5])}
    attributes, scales = {"num_heads": 4, "kv_num_heads": 2}, {}
    if codes != "float32":
        attributes = quantised("PER_CHANNEL", 4, 2)
        scales = {n: rng.uniform(0.004, 0.006, 2 * 16).astype(np.float32) for n in ("k_scale", "v_scale")}

    def prompt(room: int, scales: dict[str, np.ndarray]) -> list[np.ndarray]:
        past = dict.fromkeys(("past_key", "past_value"), np.zeros((2, 2, room, 16), numpy_dtype(codes)))
        return run(attributes, query=query, key=key, value=value, **past, **lies, **scales)

    y, *present = prompt(0, scales)
    assert all(x.shape == (2, 2, 5, 16) and x.dtype == codes for x in present)
    factors = [scales[n].reshape(1, 2, 1, 16) if scales else 1.0 for n in ("k_scale", "v_scale")]
    numbers = [x.astype(np.float32) * f for x, f in zip(present, factors, strict=True)]
    assert np.allclose(y, formula(by_heads(query, 4), *numbers, [5, 3]), atol=1e-6) and not y[1, 3:].any()
    for x, rows in zip(numbers, (key, value), strict=True):
        assert np.allclose(x[0], by_heads(rows, 2)[0], atol=0.035) and not x[1, :, 3:].any()
    same, *longer = prompt(7, scales)
    assert same.tobytes() == y.tobytes()
    assert all((a[:, :, :5] == b).all() for a, b in zip(longer, present, strict=True))
    turned, *others = prompt(0, {name: -x for name, x in scales.items()})
    sign = -1 if scales else 1
    assert np.array_equal(turned, y)
    clipped = [np.abs(x.astype(np.float32)) < 127 for x in present]
    for a, b, inside in zip(others, present, clipped, strict=True):
        assert (sign * a.astype(np.float32) == b.astype(np.float32))[inside].all()


@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_biases_are_broadcast(rng, kind, shape):
    query, key, value = drawn(rng, 2, 6, 4, 2, 16)
    k, v = by_heads(key, 2), by_heads(value, 2)
    scale = scales_of(k, kind), scales_of(v, kind)
    bias = rng.uniform(-1, 1, (*shape, 6, 6)).astype(np.float32)
    past = np.zeros(k.shape, np.int8)
    y, *present = run(
        quantised(kind, 4, 2), query=query, key=key, value=value, past_key=past, past_value=past, attention_bias=bias,
        k_scale=scale[0], v_scale=scale[1], seqlens_k=np.int32([5, 5]), total_sequence_length=np.int32([6]),
    )  # fmt: skip
    keys = [x * _broadcast(x, s) for x, s in zip(present, scale, strict=True)]
    assert np.allclose(y, formula(by_heads(query, 4), *keys, [6, 6], bias=bias), atol=1e-6)


@pytest.mark.parametrize("codes", ["int8", "float8_e4m3fn", None])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_go_on_from_codes(rng, codes, dtype):
    """A prompt, then tokens one by one, with a buffer that has room for all: codes stay, and lengths differ by item."""
    lengths, room, attributes = [5, 3], 12, {"num_heads": 4, "kv_num_heads": 2}
    scales = {}
    if codes:
        attributes = quantised("PER_CHANNEL", 4, 2)
        scales = {n: rng.uniform(0.003, 0.006, 2 * 16).astype(np.float32) for n in ("k_scale", "v_scale")}
    query, key, value = drawn(rng, 2, 5, 4, 2, 16, dtype)
    past = [np.zeros((2, 2, room, 16), numpy_dtype(codes or dtype)) for _ in range(2)]
    lies = {"seqlens_k": np.int32([4, 2]), "total_sequence_length": np.int32([5])}
    y, *past = run(
        attributes, query=query, key=key, value=value, past_key=past[0], past_value=past[1], **lies, **scales
    )
    assert not y[1, 3:].astype(np.float32).any() and all(x.shape == (2, 2, room, 16) for x in past)
    for step in range(3):
        query, key, value = drawn(rng, 2, 1, 4, 2, 16, dtype)
        lengths = [n + 1 for n in lengths]
        lies = {"seqlens_k": np.int32(lengths) - 1, "total_sequence_length": np.int32([max(lengths)])}
        kept = [x.copy() for x in past]
        y, *past = run(
            attributes, query=query, key=key, value=value, past_key=past[0], past_value=past[1], **lies, **scales
        )
        for item, n in enumerate(lengths):
            for old, new in zip(kept, past, strict=True):
                assert old[item, :, : n - 1].tobytes() == new[item, :, : n - 1].tobytes(), step
        factors = [scales[n].reshape(1, 2, 1, 16) if codes else 1.0 for n in ("k_scale", "v_scale")]
        keys = [x.astype(np.float64) * f for x, f in zip(past, factors, strict=True)]
        want = formula(by_heads(query, 4), *keys, lengths, past=None)
        assert y.dtype == query.dtype
        assert np.allclose(y.astype(np.float64), want, atol={"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype])


def test_a_cache_without_room_grows(rng):
    """A present that has to be longer than the past is: as long as the longest item."""
    query, key, value = drawn(rng, 1, 2, 2, 1, 8)
    past = [rng.standard_normal((1, 1, 3, 8)).astype(np.float32) for _ in range(2)]
    lies = {"seqlens_k": np.int32([4]), "total_sequence_length": np.int32(5)}
    y, k, v = run(
        {"num_heads": 2, "kv_num_heads": 1},
        query=query,
        key=key,
        value=value,
        past_key=past[0],
        past_value=past[1],
        **lies,
    )
    assert k.shape == (1, 1, 5, 8) and (k[:, :, :3] == past[0]).all() and (v[:, :, 3:] == by_heads(value, 1)).all()
    assert np.allclose(y, formula(by_heads(query, 2), k, v, [5], past=3), atol=1e-6)
    [alone] = run({"num_heads": 2, "kv_num_heads": 1}, 1, query=query, key=key, value=value, seqlens_k=np.int32([1]),
                  total_sequence_length=np.int32(2))  # fmt: skip
    assert np.allclose(alone, formula(by_heads(query, 2), by_heads(key, 1), by_heads(value, 1), [2]), atol=1e-6)


def test_windows_caps_and_sinks(rng):
    """A window counts the query's own key; a smooth softmax has a sink of 0, and a head's sink its own."""
    query, key, value = drawn(rng, 1, 20, 4, 2, 16)
    heads = by_heads(query * 4, 4), by_heads(key, 2), by_heads(value, 2)
    given = {
        "query": query * 4,
        "key": key,
        "value": value,
        "seqlens_k": np.int32([19]),
        "total_sequence_length": np.int32(20),
    }
    sinks = np.float32([0.5, -1, 0, 2])
    for attributes, inputs, options in (
        ({"local_window_size": 5}, {}, {"window": 5}),
        ({"local_window_size": 1}, {}, {"window": 1}),
        ({"softcap": 0.3}, {}, {"softcap": 0.3}),
        ({"smooth_softmax": 1}, {}, {"sinks": np.zeros(4)}),
        ({}, {"head_sink": sinks}, {"sinks": sinks}),
        ({"causal": 0}, {}, {"causal": False}),
    ):
        y, *_ = run({"num_heads": 4, "kv_num_heads": 2} | attributes, **given, **inputs)
        assert np.allclose(y, formula(*heads, [20], **options), atol=2e-6), attributes
    y, *_ = run({"num_heads": 4, "kv_num_heads": 2, "scale": 0.5}, **given)
    assert np.allclose(y, formula(heads[0] * 2, *heads[1:], [20]), atol=2e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_positions_follow_the_past(rng, interleaved):
    """Keys are stored turned, as the tokens that they are; position_ids say others."""
    query, key, value = drawn(rng, 2, 2, 2, 1, 8)
    angles = rng.uniform(0, 3, (16, 4)).astype(np.float32)
    table = {"cos_cache": np.cos(angles), "sin_cache": np.sin(angles)}
    past = np.zeros((2, 1, 8, 8), np.float32)
    lies = {"seqlens_k": np.int32([6, 3]), "total_sequence_length": np.int32(7)}
    attributes = {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1, "rotary_interleaved": interleaved}
    _, k, _ = run(attributes, query=query, key=key, value=value, past_key=past, past_value=past, **lies, **table)
    positions = np.array([[5, 6], [2, 3]])
    turned = sl.rotary(by_heads(key, 1), *table.values(), positions=positions, interleaved=bool(interleaved))
    for item, first in enumerate((5, 2)):
        assert np.allclose(k[item, 0, first : first + 2], turned[item, 0], atol=1e-6)
    others = {"position_ids": np.array([[1, 2], [9, 10]])}
    _, k, _ = run(
        attributes, query=query, key=key, value=value, past_key=past, past_value=past, **lies, **table, **others
    )
    turned = sl.rotary(
        by_heads(key, 1), *table.values(), positions=others["position_ids"], interleaved=bool(interleaved)
    )
    assert np.allclose(k[1, 0, 2:4], turned[1, 0], atol=1e-6)


CODES = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
SCALES = {"k_scale": np.float32([0.5]), "v_scale": np.float32([0.5])}
CODED = dict.fromkeys(("past_key", "past_value"), np.zeros((1, 1, 4, 8), np.int8))
E5M2 = dict.fromkeys(("past_key", "past_value"), np.zeros((1, 1, 4, 8), numpy_dtype("float8_e5m2")))
NO_PAST = dict.fromkeys(CODED)
FLOATS = {"past_key": np.zeros((1, 1, 4, 8), np.float32), "past_value": np.zeros((1, 1, 4, 8), np.float32)}
WRONG = [
    (CODES | {"kv_cache_bit_width": 4}, {}, "Codes of four bits"),
    ({"k_quant_type": "PER_TOKEN"}, {}, "k_quant_type: expected NONE, PER_TENSOR or PER_CHANNEL"),
    ({"k_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}, {}, "v_quant_type: expected codes of both"),
    ({"kv_cache_bit_width": 8}, {}, "kv_cache_bit_width: expected 0 beside NONE.* write k_quant_type"),
    ({}, CODED, "k_quant_type: expected PER_TENSOR or PER_CHANNEL beside past_key of int8; got NONE"),
    (CODES, {"k_scale": None}, "k_scale: expected 1 of float32 beside PER_TENSOR; got None"),
    (CODES | {"v_quant_type": "PER_CHANNEL"}, {}, "v_scale: expected 8 of float32 beside PER_CHANNEL; got"),
    (CODES, FLOATS, "past_key: expected int8 or float8_e4m3fn beside k_quant_type, .* got float32"),
    (CODES, E5M2, "past_key: expected int8 or float8_e4m3fn beside k_quant_type, .* got float8_e5m2"),
    (CODES, {"past_value": E5M2["past_value"]}, "past_value: expected int8 or float8_e4m3fn .* got float8_e5m2"),
    (CODES, NO_PAST, r"past_key: expected int8 or .* first prompt .*: numpy\.zeros\(\(1, 1, 0, 8\), 'int8'\)"),
    (CODES, {"past_value": None}, "past_value: expected int8 or float8_e4m3fn beside k_quant_type, since"),
    ({}, {"past_value": CODED["past_value"]}, "v_quant_type: expected PER_TENSOR or .* past_value of int8"),
    (CODES, {"k_scale": np.ones(1)}, "k_scale: expected float32; got float64"),
    ({}, {"key": None}, "value: expected key and value together"),
    ({}, {"past_value": None}, "past_value: expected past_key and past_value together"),
    ({}, {"seqlens_k": np.int32([5])}, "seqlens_k: expected 0 to 3"),
    ({}, {"seqlens_k": None}, "seqlens_k: expected 1 ints"),
    ({}, {"total_sequence_length": None}, "total_sequence_length: expected one int"),
    ({"qk_output": 1}, {}, "qk_output: expected None; got 1. An array of all products"),
    ({"sliding_window_cache": 1}, {}, "sliding_window_cache: expected None; got 1"),
    ({}, {"q_norm_weight": np.ones(8, np.float32)}, "q_norm_weight: expected None"),
    ({"local_window_size": 0}, {}, "local_window_size: expected -1"),
    ({"do_rotary": 1}, {}, "cos_cache: expected cos_cache and sin_cache"),
    ({"num_heads": 0}, {}, "num_heads: expected a number of heads"),
    ({}, {"attention_bias": np.ones((1, 1, 1, 3), np.float32)}, "attention_bias: expected shape"),
]  # fmt: skip


@pytest.mark.parametrize(("attributes", "inputs", "says"), WRONG)
def test_what_is_wrong_is_named_as_the_operator_names_it(attributes, inputs, says):
    x = np.ones((1, 1, 8), np.float32)
    past = np.zeros((1, 1, 4, 8), np.int8 if "PER_TENSOR" in attributes.values() else np.float32)
    given = {"query": x, "key": x, "value": x, "past_key": past, "past_value": past, "seqlens_k": np.int32([0])}
    given |= {"total_sequence_length": np.int32([4])} | (SCALES if "PER_TENSOR" in attributes.values() else {})
    with pytest.raises(sl.Error, match=says):
        run({"num_heads": 1, "kv_num_heads": 1} | attributes, **(given | inputs))
