"""Copies and pickles of expressions: the copy looks up the copy of its array, and follows it; the original its own."""

from __future__ import annotations

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from tolerance import assert_within
from torch import nn
from torch.optim.swa_utils import AveragedModel

import speedlight as sl
import speedlight.torch

H, N = 2, 6
RNG = np.random.default_rng(0)
Q, K, V = RNG.normal(size=(3, 1, H, N, 8))
SLOPES = np.array([0.5, -0.25])
BIAS = RNG.normal(size=(H, N, N))


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "without grad": torch.no_grad()(copy.deepcopy),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "twice": lambda x: copy.deepcopy(pickle.loads(pickle.dumps(x))),
    "torch.save": saved,
}


def whole(x):
    return lambda s, b, h, i, j: s + x[h, i, j]


def part(x):
    return lambda s, b, h, i, j: s + x[1][i, j]


def turned(x):
    return lambda s, b, h, i, j: s + x.swapaxes(1, 2)[h, j, i]


def nested(x):
    inner = [lambda s, h, i, j: s + x[h, i, j], lambda s, h, i, j: s * x[h, j, i] + x[0, 1, 2]]

    def score(s, b, h, i, j):
        for one in inner:
            s = one(s, h, i, j)
        return s

    return score


def both(x):
    """One table, in two expressions that are joined by code."""
    return lambda s, b, h, i, j: sl.where(x[h, i, j] > 0, s + x[h, i, j], s)


ARRAYS = {
    "array": lambda: BIAS.copy(),
    "float32": lambda: BIAS.astype(np.float32),
    "columns": lambda: np.asfortranarray(BIAS),
    "tensor": lambda: torch.tensor(BIAS),
    "bfloat16": lambda: torch.tensor(BIAS).bfloat16(),
    "rows": lambda: torch.tensor(np.stack([BIAS, BIAS]))[1],
    "parameter": lambda: nn.Parameter(torch.tensor(BIAS)),
    "frozen": lambda: nn.Parameter(torch.tensor(BIAS), requires_grad=False),
    "buffer": lambda: nn.Buffer(torch.tensor(BIAS)),
    "flat": lambda: nn.Parameter(torch.tensor(np.stack([BIAS, BIAS]))[1]),
}
FUNCTIONS = {"whole": whole, "part": part, "turned": turned, "nested": nested, "both": both}


def numbers(x):
    return np.array(x.detach().double().numpy() if isinstance(x, torch.Tensor) else x, np.float64)


def write(x):
    with torch.no_grad():
        x[...] = x * -2 + 1


def check(expression, function, x):
    """Compares with the reference, which looks the numbers up in an array of its own."""
    score = function(numbers(x))
    want, bound = sl.reference.attention(Q, K, V, score=score), sl.reference.error_bound(Q, K, V, score=score).out
    with torch.no_grad():
        assert_within(sl.attention(Q, K, V, score=expression), want, bound)


@pytest.mark.each("kind", "name", "way")
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ARRAYS)
def test_a_copy_follows_the_copy_of_its_array(kind, name, way):
    x, function = ARRAYS[kind](), FUNCTIONS[name]
    if kind == "rows" and name in ("part", "turned") and way in ("pickle", "twice"):
        pytest.skip("views of a view, which pickle itself takes apart in PyTorch")
    expression = sl.expression(function(x))
    twin, other = COPIES[way]((expression, x))
    last, first = COPIES[way]((x, expression))
    for e, y in ((expression, x), (twin, other), (first, last)):
        check(e, function, y)
        write(y)
        for pair in ((expression, x), (twin, other), (first, last)):
            check(pair[0], function, pair[1])
    assert repr(twin) == repr(expression) and len(twin.tables) == len(expression.tables)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_alone_has_an_array_of_its_own(way):
    for make in ARRAYS.values():
        x = make()
        expression = sl.expression(whole(x))
        twin, before = COPIES[way](expression), numbers(x)
        write(x)
        check(twin, whole, before)
        check(expression, whole, x)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["array", "tensor", "parameter", "flat"])
def test_a_copy_of_a_part_begins_where_the_part_does(kind, way):
    """The function looks up a view that was made before, which begins inside of the array that is copied with it."""
    x = ARRAYS[kind]()
    expression = sl.expression(lambda s, b, h, i, j: s + x[1][i, j])
    assert expression.tables[0].watched is not x
    twin, other = COPIES[way]((expression, x))
    check(twin, part, x)
    write(other)
    check(twin, part, other)


PATTERNS = {
    "list": lambda x: sl.expression(lambda s, b, h, i, j, x=x.tolist(): s + x[h][i] * j),
    "table": lambda x: sl.expression(lambda s, b, h, i, j, t=sl.table(x): s + t[h, i] * j),
    "alibi": lambda x: sl.alibi(x[:, 0]),
    "softcap": lambda x: sl.softcap(x[0, 0].abs() + 1),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", PATTERNS)
def test_a_copied_pattern_is_as_good_as_it_was(name, way):
    x = torch.tensor(BIAS[:, :, 0])
    expression = PATTERNS[name](x)
    twin = COPIES[way](expression)
    assert np.array_equal(sl.attention(Q, K, V, score=twin), sl.attention(Q, K, V, score=expression))
    assert [t.shape for t in twin.tables] == [t.shape for t in expression.tables]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("make", [sl.alibi, lambda p: sl.expression(lambda s, b, h, i, j: s + p[h] * (j - i))])
def test_gradients_of_a_copy_come_to_the_copied_parameter(make, way):
    p = nn.Parameter(torch.tensor(SLOPES))
    twin, other = COPIES[way]((make(p), p))
    q, k, v = map(torch.tensor, (Q, K, V))
    speedlight.torch.attention(q, k, v, score=twin).square().sum().backward()
    assert p.grad is None
    speedlight.torch.attention(q, k, v, score=make(p)).square().sum().backward()
    assert p.grad.any() and torch.equal(p.grad, other.grad)


def test_a_view_of_a_parameter_is_followed_in_the_copy():
    """Also where the copy is made without grad."""
    p = nn.Parameter(torch.tensor(BIAS))
    q, k, v = map(torch.tensor, (Q, K, V))
    for way in COPIES.values():
        twin, other = way((sl.expression(part(p)), p))
        speedlight.torch.attention(q, k, v, score=twin).square().sum().backward()
        assert other.grad[1].any() and not other.grad[0].any()


def test_tables_that_are_shared_stay_shared():
    x = BIAS.copy()
    t = sl.table(SLOPES)
    one = sl.expression(lambda b, h, i, j: x[h, i, j] > t[h])
    two = one & sl.causal()
    for way in COPIES.values():
        first, second, table = way((one, two, t))
        assert first.tables == second.tables and first.tables[1] is table
        assert first.tables[0] is not one.tables[0] and first.tables[0].watched is second.tables[0].watched
    assert copy.copy(two) == two


def test_a_tree_may_be_deeper_than_the_stack():
    def score(s, b, h, i, j):
        for n in range(1500):
            s = s + 0.001 * n
        return s

    expression = sl.expression(score)
    for way in COPIES.values():
        assert way(expression) == expression


class Biased(nn.Module):
    """A layer that learns a bias, which its score captures."""

    def __init__(self, look_up):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(BIAS, dtype=torch.float32))
        self.attention = speedlight.torch.Attention(16, 2, score=sl.expression(look_up(self.bias)))

    def forward(self, x):
        return self.attention(x)


def test_a_module_and_its_average():
    """A copied layer, and the average of its weights, are as the layer made anew of the same numbers."""
    x = torch.randn(1, N, 16)
    for look_up in (whole, part):
        model = Biased(look_up)
        average = AveragedModel(model)
        average.update_parameters(model)  # copies
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), average.module]
        before = model(x)
        write(model.bias)
        average.update_parameters(model)
        for twin in (model, *twins):
            anew = Biased(look_up)
            anew.load_state_dict(twin.state_dict())
            assert torch.equal(twin(x), anew(x))
        assert torch.equal(twins[0](x), before) and torch.equal(twins[1](x), before)
        assert not torch.equal(average(x), before) and not torch.equal(average(x), model(x))
        twins[0](x).sum().backward()
        assert twins[0].bias.grad.any()


@pytest.mark.parametrize("look_up", [whole, part])
def test_shared_memory(look_up):
    """share_memory() moves what a parameter holds; a copy through torch.multiprocessing shares it."""
    x = torch.randn(1, N, 16)
    model = Biased(look_up)
    before = model(x)
    model.share_memory()
    assert torch.equal(model(x), before)
    other, apart = pickle.loads(ForkingPickler.dumps(model)), copy.deepcopy(model)
    write(other.bias)
    anew = Biased(look_up)
    anew.load_state_dict(model.state_dict())
    assert torch.equal(model(x), anew(x)) and torch.equal(other(x), anew(x)) and not torch.equal(anew(x), before)
    assert torch.equal(apart(x), before)


def test_what_cannot_follow_is_refused():
    """Not taken for numbers that stay: results of operations, and parts of arrays that copies lay out otherwise."""
    p, wide = nn.Parameter(torch.tensor(BIAS)), np.zeros((2, 6, 12))
    rows = torch.tensor(wide)[1].requires_grad_()
    cases = [
        (lambda s, b, h, i, j: s + rows[1][j], "expected a leaf of the graph, .*; got the result of SelectBackward0"),
        (whole(p * 2), "expected a leaf of the graph, or a view of one, .*; got the result of MulBackward0"),
        (part(wide[:, :, ::2]), r"expected a contiguous array .*; got strides \(576, 96, 16\)"),
        (part(nn.Parameter(torch.tensor(wide)[:, :, ::2])), r"expected a contiguous array .*strides \(72, 12, 2\)"),
    ]
    for function, message in cases:
        expression = sl.expression(function)
        for way in (copy.deepcopy, pickle.dumps):
            with pytest.raises(sl.UnsupportedError, match=message):
                way(expression)
    strided = wide[:, :, ::2]
    twin, other = copy.deepcopy((sl.expression(whole(strided)), strided))
    write(other)
    check(twin, whole, other)
