"""Graphs and transforms of PyTorch around and inside sdpa(): compiled, exported, vmap, tangents, checkpoints."""

from __future__ import annotations

import pytest
import torch
from conftest import FULL
from counting import FLASH, SDPA, counted
from test_torch_sdpa import assert_equal, drawn, formula
from torch import nn
from torch.autograd import forward_ad

from speedlight.torch import patch, report, sdpa, unpatch

__all__ = ["counted"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
F = torch.nn.functional


def test_compiled_inside():
    """A graph that is compiled inside is ours, wherever it runs; forwards and backwards."""
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    mask = drawn(8, 8, grad=True)
    run = torch.compile(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), backend="aot_eager")
    with sdpa():
        got = run(q, mask)
    taken = report(reset=True).taken
    assert set(taken) <= {SDPA, f"{SDPA}, compiled into a graph"} and taken
    want = formula(q, q, q, mask)
    assert_equal(got, want)
    flow = drawn(2, 3, 8, 8, seed=4)
    for a, b in zip(*(torch.autograd.grad(x, (q, mask), flow) for x in (got, want)), strict=True):
        assert_equal(a, b)
    torch.compiler.reset()


def test_compiled_outside():
    """Of a graph that was compiled before, what PyTorch made its flash kernel is ours when it runs inside."""
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager")
    assert_equal(run(q), formula(q, q, q, is_causal=True))
    assert not report().taken
    with sdpa():
        got = run(q)
    assert report().taken == {FLASH: 1}
    (grad,) = torch.autograd.grad(got.sum(), q)  # outside, and ours: of the forward's log-sum-exps
    assert_equal(grad, torch.autograd.grad(formula(q, q, q, is_causal=True).sum(), q)[0])
    patch()  # graphs are made anew
    try:
        run(q)
    finally:
        unpatch()
    assert any("compiled" in name or name == SDPA for name in report().taken)
    torch.compiler.reset()


def test_a_compiled_function_may_enter():
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def run(q):
        with sdpa():
            return F.scaled_dot_product_attention(q, q, q)

    q = drawn(2, 3, 8, 8)
    assert_equal(run(q), formula(q, q, q))
    torch.compiler.reset()


def test_exported():
    """A program keeps PyTorch's operator, wherever it was made, and runs on who is asked then."""

    class Model(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = drawn(2, 3, 8, 8)
    with sdpa():
        program = torch.export.export(Model(), (q,)).module()
        report(reset=True)
        assert_equal(program(q), formula(q, q, q, is_causal=True))
    assert report().taken == {SDPA: 1}
    program(q)
    assert report().taken == {SDPA: 1}


def test_dropout_in_a_graph_is_left():
    """Which weights are dropped is drawn when a graph runs, and a seed is a number of the graph."""
    torch.compiler.reset()
    q = drawn(1, 2, 8, 8)
    with sdpa():
        torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), backend="aot_eager")(q)
    assert (SDPA, "dropout_p in a graph that is being compiled") in report().left
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own, of vmap, since 2.14
def test_transforms():
    """vmap comes to us by PyTorch's flash kernel; what is differentiated by torch.func is PyTorch's, and counted."""
    q = drawn(4, 2, 8, 8)
    with sdpa():
        got = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
        assert_equal(got, formula(q, q, q, is_causal=True))
        grad = torch.func.grad(lambda x: F.scaled_dot_product_attention(x, x, x).sum())(q)
    assert_equal(grad, torch.func.grad(lambda x: formula(x, x, x).sum())(q))
    assert report().left == {(SDPA, "inside torch.func"): 1}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents():
    q, t = drawn(1, 2, 8, 8), drawn(1, 2, 8, 8, seed=1)
    with sdpa(), forward_ad.dual_level():
        x = forward_ad.make_dual(q, t)
        out = forward_ad.unpack_dual(F.scaled_dot_product_attention(x, x, x))
    assert_equal(out.tangent, torch.func.jvp(lambda x: formula(x, x, x), (q,), (t,))[1])


def test_lazily_negated():
    q = torch.complex(drawn(1, 2, 8, 8), drawn(1, 2, 8, 8, seed=1)).conj().imag
    assert q.is_neg()
    with sdpa():
        assert_equal(F.scaled_dot_product_attention(q, q, q), formula(q, q, q))


def test_checkpoint_inside():
    from torch.utils.checkpoint import checkpoint

    q = drawn(2, 3, 8, 8, grad=True)

    def run(x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)

    with sdpa():
        torch.manual_seed(1)
        (want,) = torch.autograd.grad(run(q).sum(), q)
        torch.manual_seed(1)
        (got,) = torch.autograd.grad(checkpoint(run, q, use_reentrant=False).sum(), q)
    assert torch.equal(got, want)


@pytest.mark.skipif(not FULL, reason="a graph of C++ takes seconds to compile")
def test_inductor():
    torch.compiler.reset()
    q = drawn(2, 3, 8, 8, grad=True)
    run = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True).relu())
    want = formula(q, q, q, is_causal=True).relu()
    with sdpa():
        assert_equal(run(q), want)
    torch.compiler.reset()
    run(q)
    with sdpa():  # its strides are asserted in the graph
        got = run(q)
    assert_equal(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0])
    torch.compiler.reset()
