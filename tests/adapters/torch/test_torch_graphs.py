"""speedlight.torch.attention in graphs: torch.compile without a break, torch.export and back in another process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import FULL

import speedlight as sl
import speedlight.torch
import speedlight.transformers
from speedlight.autograd import graphs
from speedlight.autograd.forms import options_of, tensors_of, text_of
from speedlight.expressions.tables import Table
from speedlight.expressions.tracing import Expression
from speedlight.problem.options import OPTION_NAMES, Options

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
attention = speedlight.torch.attention
TABLE = sl.table(np.float32([1.0, 2.0]))
WINDOW = sl.window(3, 0)


@pytest.fixture
def q():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return torch.randn(2, 2, 12, 8)


def look_up(s, b, h, i, j):
    return s + TABLE[h]


class Learned(torch.nn.Module):
    """Methods, numbers of the object, an expression of its own over a parameter."""

    def __init__(self):
        super().__init__()
        self.slopes, self.weight = torch.nn.Parameter(torch.rand(2)), 5
        self.alibi = sl.alibi(self.slopes)

    def score(self, s, b, h, i, j):
        return s + TABLE[h] * self.weight

    def forward(self, q):
        out = attention(q, q, q, score=[self.alibi, self.score], mask=WINDOW, sink_logits=self.slopes)
        return out + attention(q, q, q, score=self.score)


def near(q):
    n = 4
    return attention(q, q, q, mask=lambda b, h, i, j: i - j < n)


@pytest.mark.parametrize("dynamic", [False, *[True] * FULL])  # as numbers of a graph are
def test_compiled(q, dynamic):
    """A function that a call makes; test_torch_any_door.py has other options."""
    compiled = torch.compile(near, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for x in (q, torch.cat([q, q + 1])[:2]):
        given = x.clone().requires_grad_()
        want, got = near(x), compiled(given)
        assert torch.equal(got, want)
        got.sin().sum().backward()
        again = x.clone().requires_grad_()
        near(again).sin().sum().backward()
        assert torch.equal(given.grad, again.grad)


def test_compiled_module(q):
    module = Learned()
    out = torch.compile(module, fullgraph=True, backend="aot_eager")(q)
    out.sin().sum().backward()
    got, module.slopes.grad = module.slopes.grad, None
    want = module(q)
    want.sin().sum().backward()
    assert torch.equal(out, want) and torch.allclose(got, module.slopes.grad)


def test_another_closure_is_another_graph(q):
    """One code, other numbers: Dynamo's own guards do not tell them apart."""

    def near(n):
        return lambda b, h, i, j: i - j < n

    def function(q, mask):
        return attention(q, q, q, mask=mask)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for mask in (near(3), near(5), sl.window(1, 0), sl.window(2, 0)):
        assert torch.equal(compiled(q, mask), function(q, mask))


def test_an_older_pytorch_makes_no_graphs(q, monkeypatch):
    """It would take that of another closure: it goes on uncompiled, or says so."""
    monkeypatch.setattr(graphs, "_IS_OLD", True)

    def function(q, n):
        return attention(q, q, q, mask=lambda b, h, i, j: i - j < n)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="expected PyTorch 2.13 or newer"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(q, 3)
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager")
    assert all([torch.equal(compiled(q, n), function(q, n)) for n in ((3, 5) if FULL else (5,))])
    torch._dynamo.reset()


def test_numbers_of_a_graph(q):
    def function(q, start, seed):
        return attention(q, q, q, causal=True, q_start=start, dropout=0.5, seed=seed)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for numbers in ((5, 1), (7, 2), (7, 3)):
        assert torch.equal(compiled(q, *numbers), function(q, *numbers))


def compiled_with(**options):
    """attention() of a graph, and beside it, with options of which one comes with each call."""
    torch._dynamo.reset()

    def function(q, name, x):
        return attention(q, q, q, **{**options, name: x})

    return torch.compile(function, fullgraph=True, backend="aot_eager"), function


# a short run has the first with the first, the second with the second, …: none that is skipped
@pytest.mark.each("name", "kind")
@pytest.mark.parametrize("kind", ["array", "tensor", "scalars", "written"])
@pytest.mark.parametrize("name", ["scale", "lengths", "sink_logits", "q_start", "window", "cu_seqlens_q", "seed"])
def test_numbers_that_a_graph_reads_at_each_call(q, name, kind):
    """NumPy's arrays and scalars, and tensors, of which no guard of Dynamo's tells that they have other numbers."""
    values = {
        "lengths": ([3, 4], [12, 1]), "q_start": ([5, 0], [2, 30]), "sink_logits": ([0.5, 3.0], [-1.0, 2.0]),
        "scale": (0.5, 2.0), "seed": (1, 2), "window": ((3, 0), (1, 2)), "cu_seqlens_q": ([0, 5, 24], [0, 20, 24]),
    }[name]  # fmt: skip
    scalar = not isinstance(values[0], list)
    if (kind == "tensor" and name in ("scale", "window")) or (kind == "written" and scalar):
        pytest.skip("no tensors, or nothing that could be written to")
    options = {"seed": {"dropout": 0.5}, "cu_seqlens_q": {"layout": "lhd"}, "window": {"causal": True}}.get(name, {})
    dtype = np.float32 if name in ("scale", "sink_logits") else np.int64
    x = q.transpose(1, 2).flatten(0, 1) if name == "cu_seqlens_q" else q
    kept = np.array(values[0], dtype)
    compiled, function = compiled_with(**options)
    for plain in (*values, values[0]):
        given = kept
        if kind == "written":
            kept[...] = plain
        elif kind == "tensor":
            given = torch.tensor(plain)
        elif kind == "scalars" or not isinstance(plain, list):
            given = type(plain)(map(dtype, plain)) if isinstance(plain, (list, tuple)) else dtype(plain)
        else:
            given = np.array(plain, dtype)
        assert torch.equal(compiled(x, name, given), function(x, name, plain))


def test_a_backward_pass_has_the_lengths_of_its_forward(q):
    """Also where whoever gave them has written others into the array since."""
    compiled, function = compiled_with(causal=True)
    for kind in (np.array, torch.tensor):
        lengths, grads = kind([3, 4]), []
        for call, given in ((compiled, lengths), (function, [3, 4])):
            x = q.clone().requires_grad_()
            loss = call(x, "lengths", given).sin().sum()
            lengths[:] = 12
            loss.backward()
            grads.append(x.grad)
            lengths[:] = kind([3, 4])
        assert torch.equal(*grads)


def test_masks_that_come_and_go(q):
    """One in the memory of another that is gone has a graph of its own."""

    class Layer(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, mask=self.mask, score=self.score)

    layer = Layer()
    compiled = torch.compile(layer, backend="aot_eager")
    for n in range(7 if FULL else 4):
        layer.mask = layer.score = None
        gc.collect()
        layer.mask, layer.score = sl.window(n, 0), sl.table(np.cos(np.arange(12) * n).reshape(1, 12))
        want = attention(q, q, q, window=(n, 0), score=torch.cos(torch.arange(12) * n)[None])
        assert torch.allclose(compiled(q), want, atol=1e-6)


def test_public_objects_can_be_watched():
    """Dynamo knows an object by its address, and by a weak reference that it is the one that it has seen."""
    packages = [sl, speedlight.torch, speedlight.transformers]
    found = {getattr(package, name) for package in packages for name in package.__all__}
    plan = type(sl.plan(q_heads=1, q_len=1, head_dim=1))
    classes = {x for x in found if isinstance(x, type)} | {Expression, Table, plan}
    watched = [x for x in classes if not issubclass(x, (tuple, dict, int))]
    assert len(watched) > 20 and [x for x in watched if not x.__weakrefoffset__] == []


@pytest.mark.parametrize("grad", [True, *[False] * FULL])
@torch._dynamo.config.patch(recompile_limit=2)
def test_beyond_the_limit_of_graphs(q, grad):
    """More masks than Dynamo makes graphs of: the calls go on without one, as PyTorch's own do."""

    def function(q, mask, k_lengths):
        return attention(q, q, q, mask=mask, k_lengths=k_lengths, q_start=0)

    def near(n):
        return lambda b, h, i, j: sl.where(i > n, j < i, j < 9)

    compiled = torch.compile(function, backend="aot_eager")
    for n in range(6 if FULL else 4):
        x = q.clone().requires_grad_(grad)
        assert torch.equal(compiled(x, near(n), [3 + n, 4]), function(q, near(n), [3 + n, 4]))


@pytest.mark.parametrize("what", ["array", "tensor"])
def test_what_no_graph_holds_leaves_it(q, what):
    """A function that looks up numbers which may change: with fullgraph=True an error, otherwise computed as it is."""
    numbers = np.ones(2, np.float32) if what == "array" else torch.ones(2)

    def function(q):
        return attention(q * 2, q, q, score=lambda s, b, h, i, j: sl.where(i > j, s, s * numbers[h])).cos()

    def look(s, b, h, i, j):
        return sl.where(i > j, s, s * numbers[h])

    compiled = torch.compile(lambda q: attention(q * 2, q, q, score=look).cos(), backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(q), function(q))
        numbers *= 3


def test_errors_of_a_graph_are_those_of_the_call(q):
    with pytest.raises(sl.ArgumentError, match="^q_lengths: expected lengths from 0 to 12"):
        torch.compile(lambda q: attention(q, q, q, q_lengths=[13, 1], k_lengths=[1, 1]), backend="aot_eager")(q)


class Exported(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.slopes, self.weight = torch.nn.Parameter(torch.rand(2)), 5

    def forward(self, q, bias):
        score = [sl.alibi(self.slopes), bias, lambda s, b, h, i, j: s + TABLE[h] * self.weight]
        return attention(q, q, q, causal=True, score=score, mask=WINDOW, sink_logits=self.slopes, dropout=0.5, seed=3)


READ = """
import sys, torch, speedlight.torch.ops
program, given = torch.export.load(sys.argv[1]), torch.load(sys.argv[2])
assert torch.equal(program.module()(*given[:2]), given[2])
"""


def test_exported(q, tmp_path):
    module, bias = Exported(), torch.randn(12, 12)
    program = torch.export.export(
        module, (q, bias), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=99)}, None)
    )
    assert [x.arg.name for x in program.graph_signature.input_specs] == ["p_slopes", "q", "bias"]
    other = torch.randn(5, 2, 12, 8)
    want = module(other, bias)
    assert torch.equal(program.module()(other, bias), want)
    torch.export.save(program, tmp_path / "program.pt2")
    if not FULL:  # another process would import PyTorch first
        assert torch.equal(torch.export.load(tmp_path / "program.pt2").module()(other, bias), want)
        return
    torch.save((other, bias, want.detach()), tmp_path / "given.pt")
    command = [sys.executable, "-W", "ignore", "-c", READ, str(tmp_path / "program.pt2"), str(tmp_path / "given.pt")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr


def test_what_export_refuses(q):
    with pytest.raises(sl.UnsupportedError, match="tables of parameters to be made in forward"):
        torch.export.export(Learned(), (q,))


def test_text_and_back():
    """Every option comes back, numbers by their bits."""
    bias = torch.randn(2, 12, 12)
    given = Options(
        causal=True, window=(3, None), mask=WINDOW, score=[look_up, bias, sl.softcap(0.1)], q_start=[1, 2],
        k_start=1024, scale=0.1, layout="blhd", q_lengths=[3, 4], k_lengths=np.array([5, 6]), precision="tf32",
        dropout=0.3, seed=1,
    )  # fmt: skip
    text, tensors = text_of(given), tensors_of(given)
    back, tables = options_of(text, tensors, None, -1)
    assert tensors == [bias] and back.score[1] is tables[0] and text_of(replace(back, score=[*back.score[::2]]))
    assert back.mask == WINDOW and repr(back.score[0]) == "score (s + table[h])" and back.score[2] == sl.softcap(0.1)
    assert back.score[0].tables[0].array.tolist() == [1.0, 2.0] and back.seed == 2**64 - 1
    plain = [x for x in OPTION_NAMES if x not in ("mask", "score", "seed", "k_lengths", "sink_logits")]
    assert [getattr(back, x) for x in plain] == [getattr(given, x) for x in plain] and back.k_lengths == [5, 6]
    for wrong in ('{"mask": {"tables": [], "nodes": [["system", "bool", [], null]]}}',
                  '{"mask": {"tables": [], "nodes": [["lt", "bool", [], null]]}}'):  # fmt: skip
        with pytest.raises(sl.ArgumentError, match="^form: expected operations"):
            options_of(wrong, [], None, None)


def test_captured_tensors_of_a_graph(q):
    """Numbers that change later are seen, or a graph refuses what would not see them."""
    slopes, cap, frozen = torch.rand(2), torch.tensor(2.0), torch.nn.Parameter(torch.rand(2), requires_grad=False)
    captured = sl.expression(lambda s, b, h, i, j: torch.tanh(s / cap) * cap + slopes[h] * (j - i))
    hidden = sl.expression(lambda b, h, i, j: slopes[h] < j + 1)
    kept = sl.alibi(frozen)

    def function(q):
        return attention(q, q, q, score=[captured, kept], mask=hidden)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(q), function(q))
        slopes.mul_(2).sub_(0.5)
        cap.add_(1)
    frozen.requires_grad_()
    compiled(q).sin().sum().backward()
    got, frozen.grad = frozen.grad, None
    function(q).sin().sum().backward()
    assert got.abs().sum() > 0 and torch.equal(got, frozen.grad)
    array = np.ones(2, np.float32)
    for score, message in (
        (lambda s, b, h, i, j: s * slopes[h], "looks up a tensor or an array, of which no graph sees later numbers"),
        (lambda s, b, h, i, j: s * array[h], "looks up a tensor or an array, of which no graph sees later numbers"),
        (sl.expression(lambda s, b, h, i, j: s * array[h]), "got a NumPy array, whose later numbers"),
    ):
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=message):
            torch.compile(lambda q, score: attention(q, q, q, score=score), fullgraph=True, backend="aot_eager")(
                q, score
            )


@pytest.mark.parametrize(
    "make", [lambda q: sl.window(3, 0), lambda q: WINDOW & WINDOW, lambda q: sl.alibi(q[0, :, 0, 0])]
)
def test_patterns_made_in_a_graph_are_refused(q, make):
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="to be called outside of what is compiled"):
        torch.compile(lambda q: attention(q, q, q, mask=make(q)), fullgraph=True, backend="aot_eager")(q)
