"""NumPy's and PyTorch's functions on symbols, and arrays that functions capture: against the libraries themselves."""

from __future__ import annotations

import functools
import math
import random

import ml_dtypes
import numpy as np
import pytest
import torch

import speedlight as sl
from speedlight.expressions.derivative import flows
from speedlight.expressions.foreign import FUNCTIONS, METHODS, TENSORS
from speedlight.expressions.tree import evaluate

SCORES = np.array([-2.5, -1.0, -0.5, 0.0, 0.25, 1.0, 1.5, 3.0])
QUERIES = np.array([7, -3, 5, 0, 2, 9, 4, 6])
KEYS = np.array([2, 2, -3, 4, 1, 3, 8, 5])
ENV = {"s": SCORES, "b": np.array(1), "h": np.array(2), "i": QUERIES, "j": KEYS}
POSITIVE = {"log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "log1p"}
INTEGERS = {"bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "invert", "__and__", "__or__", "__xor__"}
SHIFTS = {"bitwise_left_shift", "bitwise_right_shift", "left_shift", "right_shift", "__lshift__", "__rshift__"}
ONE = {
    "neg", "negative", "square", "reciprocal", "logical_not", "bitwise_not", "invert", "abs", "absolute", "fabs",
    "relu", "sign", "floor", "ceil", "trunc", "fix", "exp", "exp2", "log", "log2", "tanh", "sqrt", "sigmoid", "expit",
    "sin", "cos", "tan", "erf", "silu", "gelu", "leaky_relu", "relu6",
    "log1p", "expm1", "softplus", "logsigmoid", "elu", "celu", "selu", "mish", "hardsigmoid", "hardswish", "softsign",
    "isnan", "isinf", "isfinite", "positive", "log10", "hardtanh",
    "rsqrt", "zeros_like", "ones_like",
}  # fmt: skip


def operands(name, s, i, j):
    """What a function is tried on: of floats where it takes them, else of integers."""
    if name in ONE:
        return ((abs(s) + 0.5) if name in POSITIVE else i if name in INTEGERS else s,)
    if name in SHIFTS:
        return i, j % 5
    if name in INTEGERS:
        return i, j
    match name:
        case "where":
            return s > 0, s, i
        case "clamp" | "clip":
            return s, -1.0, 1.25
        case "lerp":
            return s, s * 0 + j, 0.25
        case "clamp_min" | "clamp_max":
            return s, 0.25
        case "full_like":
            return s, 2.5
        case "pow" | "power" | "__pow__":
            return s, 3
    return s, s * 0 + j


def of_symbols(call):
    """What a function of (s, i, j) is, evaluated."""
    traced = sl.expression(lambda s, b, h, i, j: call(s, i, j) * 1)
    return np.broadcast_to(evaluate(traced.root, ENV), SCORES.shape)


NUMPY = sorted(name for name in FUNCTIONS if hasattr(np, name))
HOMES = (torch, torch.special, torch.nn.functional)
TORCH = sorted(name for name in {**FUNCTIONS, **TENSORS} if any(hasattr(home, name) for home in HOMES))
OF_TENSORS = sorted(name for name in {**FUNCTIONS, **TENSORS, **METHODS} if hasattr(torch.Tensor, name))


@pytest.mark.parametrize("name", NUMPY)
def test_numpy(name):
    function = getattr(np, name)
    want = function(*operands(name, SCORES, QUERIES, KEYS))
    np.testing.assert_allclose(of_symbols(lambda *x: function(*operands(name, *x))), want, rtol=1e-12)


@pytest.mark.parametrize("name", TORCH)
def test_torch(name):
    function = next(getattr(home, name) for home in HOMES if hasattr(home, name))
    want = function(*tensors(*operands(name, SCORES, QUERIES, KEYS)))
    np.testing.assert_allclose(of_symbols(lambda *x: function(*operands(name, *x))), want, rtol=1e-12)


@pytest.mark.parametrize("name", OF_TENSORS)
def test_methods_of_tensors(name):
    x, *others = arguments(name, SCORES, QUERIES, KEYS)
    want = getattr(*tensors(x), name)(*tensors(*others))

    def call(s, i, j):
        x, *others = arguments(name, s, i, j)
        return getattr(x, name)(*others) * 1

    np.testing.assert_allclose(of_symbols(call), want, rtol=1e-12)


F = torch.nn.functional
ACTIVATIONS = {
    "softplus": F.softplus, "softplus(2, 3)": functools.partial(F.softplus, beta=2.0, threshold=3.0),
    "logsigmoid": F.logsigmoid, "silu": F.silu, "gelu": F.gelu, "relu": F.relu, "mish": F.mish, "softsign": F.softsign,
    "elu": F.elu, "elu(0.5)": functools.partial(F.elu, alpha=0.5), "celu(2)": functools.partial(F.celu, alpha=2.0),
    "selu": F.selu, "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes(name):
    """At kinks, where they vanish or are lines, and where an exponential overflows. PyTorch has slopes of 1/6 rounded
    to float32.
    """
    x = torch.tensor([-800, -50, -2.5, -1e-9, -0.0, 0.0, 1e-9, 1.5, 2.5, 25, 50, 800], dtype=torch.float64)
    want = ACTIVATIONS[name](x.requires_grad_())
    (slopes,) = torch.autograd.grad(want.sum(), x)
    score = sl.expression(lambda s, b, h, i, j: ACTIVATIONS[name](s))
    env = {"s": x.detach().numpy(), "d": np.float64(1)}
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(evaluate(score.root, env), want.detach().numpy(), rtol=1e-12, atol=1e-300)
        np.testing.assert_allclose(evaluate(flows(score.root).s, env), slopes.numpy(), rtol=1e-7, atol=1e-15)


def arguments(name, s, i, j):
    """What a method is tried on."""
    if name in ("float", "double", "int", "long", "bool"):
        return (s,)
    if name in ("to", "type", "type_as"):
        return s, s if name == "type_as" else torch.float64
    if name.startswith("new_"):
        return (s, ()) if name != "new_full" else (s, (), 2.5)
    if name == "masked_fill":
        return s, s > 0, 2.5
    return (s, s > 0, i) if name == "where" else operands(name, s, i, j)


def tensors(*values):
    return [torch.from_numpy(np.asarray(x)) if isinstance(x, np.ndarray) else x for x in values]


FIVE, HALF = torch.tensor(5), torch.tensor(0.5)


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (
            lambda s, i, j: FIVE - i + FIVE // (j + 9) + FIVE % (i + 9),
            lambda s, i, j: 5 - i + 5 // (j + 9) + 5 % (i + 9),
        ),
        (lambda s, i, j: HALF * s / 2 + (i < FIVE) + (j < FIVE), lambda s, i, j: s / 4 + (i < 5) + (j < 5)),
        (lambda s, i, j: (FIVE & i) | (FIVE ^ j), lambda s, i, j: (5 & i) | (5 ^ j)),
        (lambda s, i, j: torch.div(i, 4, rounding_mode="floor") + torch.div(j, 2), lambda s, i, j: i // 4 + j / 2),
        (
            lambda s, i, j: torch.clamp(s, min=0.5) + s.clamp(max=0),
            lambda s, i, j: np.maximum(s, 0.5) + np.minimum(s, 0),
        ),
        (lambda s, i, j: np.clip(s, a_min=0.5, a_max=1), lambda s, i, j: np.clip(s, 0.5, 1)),
        (lambda s, i, j: i.to(torch.float32) / 4 + s.to(dtype=torch.int32), lambda s, i, j: i / 4 + np.trunc(s)),
        (lambda s, i, j: s.new_full((), 3) + i.new_zeros(size=(), device=i.device), lambda s, i, j: s * 0 + 3),
        (lambda s, i, j: torch.where(i > 2, s, -float("inf")), lambda s, i, j: np.where(i > 2, s, -np.inf)),
        (lambda s, i, j: torch.where(i > 2, HALF, s.type_as(s)), lambda s, i, j: np.where(i > 2, 0.5, s)),
        (lambda s, i, j: torch.full_like(i, 7) + torch.add(i, other=j), lambda s, i, j: 7 + i + j),
        (lambda s, i, j: torch.nn.functional.relu(s, inplace=False), lambda s, i, j: np.maximum(s, 0)),
    ],
)
def test_as_people_write_them(function, want):
    np.testing.assert_allclose(of_symbols(function), want(SCORES, QUERIES, KEYS) * np.ones(8), rtol=1e-12)


def test_booleans_that_say_nothing_go():
    """or_masks and and_masks begin with a constant."""
    mask = sl.expression(lambda b, h, i, j: i.new_zeros((), dtype=torch.bool) | (j <= i) & b.new_ones(()).bool())
    assert repr(mask) == "mask (j <= i)"
    assert repr(sl.expression(lambda b, h, i, j: False & (j <= i))) == "mask False"


ALONE = np.arange(12.0).reshape(3, 4)
IDS, WEIGHTS = np.arange(10) // 3, [0.5, 0.25, 0.125]
BIAS = torch.arange(24.0).reshape(2, 3, 4)


def outside(i, table=IDS):
    return table[i]


def capturing():
    ids, weights, bias, whole = IDS, WEIGHTS, BIAS, [[1, 2, 3], [4, 5, 6]]
    inner = [lambda s, b, h, i, j: s + whole[b][h], functools.partial(lambda t, s, b, h, i, j: s + t[h], weights)]

    def score(s, b, h, i, j, *, more=ALONE):
        s = s + ids[abs(i)] + weights[h] + bias[b, h, 3] + bias[b][h][j % 4] + more[h, j % 4] + outside(abs(j))
        for one in inner:
            s = one(s, b, h, i, j)
        return s + (2 * bias)[1, h][b] + len(ids) + ids.max() + weights[-1] + sum(weights) + bias[0, 0, 1]

    return score


def test_captured_arrays_are_looked_up():
    """Of closures, defaults, globals, and functions that are called; what is not looked up by a symbol stays."""
    bias, j = BIAS.numpy(), KEYS
    want = (
        SCORES + IDS[abs(QUERIES)] + IDS[abs(j)] + 0.125 + bias[1, 2, 3] + bias[1, 2, j % 4] + ALONE[2, j % 4]
        + 6 + 0.125 + 2 * bias[1, 2, 1] + 10 + 3 + 0.125 + 0.875 + 1
    )  # fmt: skip
    traced = sl.expression(capturing())
    np.testing.assert_allclose(evaluate(traced.root, ENV), want)
    assert len(traced.tables) == 7  # one of each array, wherever it is looked up, of 2 * bias, and of bias[0, 0, 1]
    assert {t.name for t in traced.tables} >= {"ids", "bias", "whole", "more"}


def test_captured_arrays_are_read_where_they_lie():
    """A change in place is seen, by an expression that is kept, too."""
    q = np.ones((1, 1, 4, 8), np.float32)
    v = q * np.arange(4, dtype=np.float32)[:, None]
    for ids in (np.zeros(4, np.int64), torch.zeros(4, dtype=torch.int64)):
        mask = sl.expression(lambda b, h, i, j, ids=ids: ids[i] == ids[j])
        before = sl.attention(q, q, v, mask=mask)
        ids[2:] = 1
        after = sl.attention(q, q, v, mask=mask)
        assert before[0, 0, :, 0].tolist() == [1.5] * 4 and after[0, 0, :, 0].tolist() == [0.5, 0.5, 2.5, 2.5]


def test_a_view_that_cannot_be_written_changes_with_what_it_shows():
    """What was known of the numbers that it had is not taken for known: 2²⁹ · 4 is more than 32 bits hold."""
    q = np.ones((1, 1, 4, 8), np.float32)
    v = q * np.arange(4, dtype=np.float32)[:, None]
    base, own = np.zeros(4, np.int64), np.zeros(4, np.int64)
    fixed = own.view()
    fixed.flags.writeable = own.flags.writeable = False
    for ids, writeable in ((np.broadcast_to(base, (2, 4))[1], base), (fixed, own), (own, own)):
        mask = sl.expression(lambda b, h, i, j, ids=ids: ids[j] * 4 >= 0)
        before = sl.attention(q, q, v, mask=mask)
        writeable.flags.writeable = True
        writeable[:] = [-1, -1, -1, 1 << 29]
        writeable.flags.writeable = writeable is base
        after = sl.attention(q, q, v, mask=mask)
        assert before[0, 0, :, 0].tolist() == [1.5] * 4 and after[0, 0, :, 0].tolist() == [3.0] * 4
        writeable.flags.writeable = True
        writeable[:] = 0
        writeable.flags.writeable = writeable is base


@pytest.mark.parametrize("bias", [np.zeros(4, ml_dtypes.bfloat16), torch.zeros(4, dtype=torch.bfloat16)])
def test_captured_bfloat16_is_read_where_it_lies(bias):
    """It is widened: at each use."""
    q = np.ones((1, 1, 4, 8), np.float32)
    v = q * np.arange(4, dtype=np.float32)[:, None]
    score = sl.expression(lambda s, b, h, i, j: s + bias[j])
    before = sl.attention(q, q, v, score=score)
    bias[3] = 100
    for after in (sl.attention(q, q, v, score=score), sl.reference.attention(q, q, v, score=score)):
        assert (before < 2).all() and after[0, 0, :, 0].tolist() == [3.0] * 4


MOVES = {
    "set_": lambda x: x.set_(torch.zeros(4, dtype=x.dtype)),
    "data": lambda x: setattr(x, "data", torch.zeros(4, dtype=x.dtype)),
    "strides": lambda x: x.as_strided_((4,), (0,)).zero_(),
}
OTHERS = {"smaller": lambda x: x.resize_(2), "shape": lambda x: x.unsqueeze_(0)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("move", [*MOVES, *OTHERS])
def test_a_captured_tensor_is_found_where_it_lies_by_now(move, dtype):
    """Its former numbers would be read, or those of bfloat16 from memory that is no more."""
    q, bias = np.ones((1, 1, 4, 8), np.float32), torch.tensor([0, 0, 0, 100], dtype=dtype)
    v = q * np.arange(4, dtype=np.float32)[:, None]
    score = sl.expression(lambda s, b, h, i, j: s + bias[j])
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=4)
    cache.append(0, q[:, :, :2], v[:, :, :2])
    last = slice(3, 4)

    def step(*_, **options):
        out = cache.attend(0, q[:, :, last], q[:, :, 2:], v[:, :, 2:], q_lengths=[1], **options)
        cache.truncate(2)
        return out

    calls = (sl.attention, sl.reference.attention, step)
    for call in calls * 2:
        assert call(q, q, v, score=score)[0, 0, -1, 0] == 3.0
    (MOVES | OTHERS)[move](bias)
    for call in calls:
        if move in MOVES:
            assert abs(call(q, q, v, score=score)[0, 0, -1, 0] - 1.5) < 1e-6
        else:
            with pytest.raises(sl.ArgumentError, match=r"^bias: expected the shape \(4,\) and the dtype b?float"):
                call(q, q, v, score=score)
    assert cache.length(0) == 2


class Model:
    slopes = torch.tensor([1.0, 2.0, 4.0])
    array = ALONE

    def score(self, s, b, h, i, j):
        return s + self.slopes[h] * (j - i)


def test_tensors_are_found_wherever_they_are():
    np.testing.assert_allclose(evaluate(sl.expression(Model().score).root, ENV), SCORES + 4 * (KEYS - QUERIES))


FAILING = [
    (lambda b, h, i, j: Model.array[h, j] > 0, "sl.table", "Model.array[h, j]"),
    (lambda b, h, i, j: torch.sinh(i) > 0, "torch.sinh: expected operators", "torch.sinh(i)"),
    (lambda b, h, i, j: BIAS[h] > 0, "expected 3 indices; got 1", "BIAS[h] > 0"),
    (lambda b, h, i, j: BIAS[h, i, j, j] > 0, "expected 3 indices; got 4", "BIAS[h, i, j, j]"),
    (lambda b, h, i, j: BIAS[:, i, j] > 0, "slice: expected a symbol", "BIAS[:, i, j]"),
    (lambda b, h, i, j: BIAS.index_select(0, i) > 0, "torch.index_select", "BIAS.index_select(0, i)"),
    (lambda b, h, i, j: torch.stack([i, j]) > 0, "torch.stack", "torch.stack([i, j])"),
    (lambda b, h, i, j: torch.dot(BIAS[0, 0], i) > 0, "torch.dot", "torch.dot(BIAS[0, 0], i)"),
    (lambda b, h, i, j: i.item() > 0, "no attribute 'item'", "i.item"),
    (lambda b, h, i, j: torch.add(i, j, alpha=2) > 0, "expected no alpha", "torch.add(i, j, alpha=2)"),
    (lambda b, h, i, j: torch.div(i, j, rounding_mode="trunc") > 0, "rounding_mode", "rounding_mode"),
    (lambda b, h, i, j: i.new_zeros(3) > 0, "size", "i.new_zeros(3)"),
    (lambda b, h, i, j: i.tanh(j) > 0, "tanh: expected 1 operands", "i.tanh(j)"),
    (lambda b, h, i, j: np.exp(i, j) > 0, "exp: expected no out", "np.exp(i, j)"),
    (lambda b, h, i, j: np.clip(i, 0, 3, dtype=float) > 0, "expected no dtype", "np.clip(i, 0, 3, dtype=float)"),
    (lambda b, h, i, j: BIAS + i > 0, "expected a symbol or a Python number", "BIAS + i"),
    (lambda b, h, i, j: torch.ops.aten.lgamma(i) > 0, "torch.", "torch.ops.aten.lgamma(i)"),
    (lambda b, h, i, j: i if i > j else j, "use sl.where", "i > j"),
    (lambda b, h, i, j: not i > j, "use sl.where", "not i > j"),
    (lambda b, h, i, j: 0 < i < 9, "use sl.where", "0 < i < 9"),
    (lambda b, h, i, j: int(i / 2) > 1, r"sl\.cast\(x, int\)", "int(i / 2)"),
    (lambda b, h, i, j: round(i / 2) > 1, r"sl\.floor\(x \+ 0\.5\)", "round(i / 2)"),
    (lambda b, h, i, j: math.exp(i) > 1, "functions of Python's math", "math.exp(i)"),
    (lambda b, h, i, j: [1, 2][h] > 1, r"sl\.table\(\[…\]\)\[symbol\]", "[1, 2][h]"),
    (lambda b, h, i, j: sum(range(i)) > 1, r"sl\.table\(\[…\]\)\[symbol\]", "range(i)"),
    (lambda b, h, i, j: sl.exp(None) > 1, "exp: expected symbols, numbers or arrays of them; got None", "sl.exp(None)"),
    (lambda b, h, i, j: sl.where(True, ["a"], 1) > 1, "where: expected symbols", "sl.where("),
    (lambda b, h, i, j: sl.exp([[1], [2, 3]]) > 1, "exp: expected symbols", "sl.exp("),
    (lambda b, h, i, j: sl.exp(torch.nn.Parameter(torch.ones(1))) > 1, "(?s)exp: .*detach", "sl.exp("),
    (lambda b, h, i, j: np.max([i, j]) > 1, r"NumPy cannot make an array of a symbol.*np\.minimum", "np.max([i, j])"),
    (lambda b, h, i, j: torch.vmap(torch.tanh)(i) > 1, "symbols cannot follow: ValueError: vmap", "torch.vmap"),
    (lambda b, h, i, j: np.random.rand() > 0.5, "random numbers: .* sl.table.*dropout", __file__),
    (lambda b, h, i, j: torch.rand(()) > i, "random numbers: .* sl.table.*dropout", __file__),
    (lambda b, h, i, j: random.random() > 0.5, "random numbers: .* sl.table.*dropout", __file__),
    (lambda b, h, i, j, rng=np.random.default_rng(0): rng.random() > 0.5, "random numbers: .*dropout", __file__),
    (lambda s, b, h, i, j: i > j, r"^score: expected a number made of s of .*; got bool \(i > j\)\. .*mask=", __file__),
    (lambda s, b, h, i, j: "s", r"^score: expected a number .* of <lambda>\(\) in .*; got str, 's'\. Return", __file__),
    (lambda s, b, h, i, j: (s, j), r"^score: expected a number .*; got tuple, \(s, j\)\. Return", __file__),
    (lambda s, b, h, i, j: ALONE, r"^score: .*; got an array of shape \(3, 4\)\. Return one entry of it", __file__),
]


@pytest.mark.parametrize(("function", "message", "code"), FAILING)
def test_what_cannot_be_traced_says_where(function, message, code):
    with pytest.raises(sl.ExpressionError, match=message) as caught:
        sl.expression(function)
    line = function.__code__.co_firstlineno
    assert f"{__file__}:{line}" in str(caught.value)
    assert code == __file__ or code in str(caught.value).split(" In ")[-1]


def test_drawn_before_is_not_drawn_inside():
    """Names alone refuse nothing: numbers must have been drawn while the function ran."""
    rand_mask = torch.rand(10) > 0.5
    assert sl.expression(lambda b, h, i, j: rand_mask[i] & (j <= random_but_not(j))).tables


def random_but_not(j):
    return j + len(random.__name__)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_entry_at_a_constant_index_has_its_gradient(dtype):
    """As the same number has, of the same type, which is no table's."""
    t, grid = sl.table(np.array([0.5, 2.0], dtype), "t"), sl.table(np.arange(6, dtype=dtype).reshape(2, 3), "grid")
    score = sl.expression(lambda s, b, h, i, j: s * t[0] + grid[1][2] * t[1])
    env = {"s": SCORES, "b": 0, "h": 0, "i": 0, "j": 0}
    np.testing.assert_array_equal(evaluate(score.root, env, np.float32), (SCORES * 0.5 + 10.0).astype(np.float32))
    back = {repr(entry): evaluate(flow, env | {"d": np.ones(8)}) for entry, flow in flows(score.root).entries}
    assert {name: np.broadcast_to(flow, 8).tolist() for name, flow in back.items()} == {
        "t[0]": SCORES.tolist(), "t[1]": [5.0] * 8, "grid[1, 2]": [2.0] * 8
    }  # fmt: skip
    assert t[0] == 0.5  # outside of a function it is a number


def test_numbers_from_the_end():
    """Of captured arrays, as in the arrays themselves."""
    last = sl.expression(lambda s, b, h, i, j: s + BIAS[b, h, -1] + ALONE[h, -2])
    assert repr(last) == "score cast((cast((s + BIAS[b, h, 3])) + ALONE[h, 2]))"
    with pytest.raises(sl.ExpressionError, match=r"ALONE: expected index 2 from 0 to 3; got -5"):
        sl.expression(lambda s, b, h, i, j: s + ALONE[h, -5])


def test_a_leaked_symbol_means_nothing_outside():
    leaked = []
    sl.expression(lambda b, h, i, j: leaked.append(i) or i > 0)
    with pytest.raises(sl.ExpressionError, match="means nothing outside"):
        BIAS[leaked[0]]
