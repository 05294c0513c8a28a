"""PyTorch's own samples of its attention, every derivative of them that its own tests look at, and calls that its
compiler meets in other people's code.
"""

from __future__ import annotations

import functools

import pytest
import torch
from conftest import FULL
from test_torch_sdpa import assert_equal, drawn
from torch.autograd import gradcheck, gradgradcheck

import speedlight as sl
import speedlight.torch

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
F = torch.nn.functional


def patched(*given, **options):
    with speedlight.torch.sdpa():
        return F.scaled_dot_product_attention(*given, **options)


@functools.cache
def samples():
    """In float64. PyTorch's list has each twice: an option of its is drawn, and not used."""
    from torch.testing._internal.common_methods_invocations import op_db  # which takes four seconds

    (info,) = [x for x in op_db if x.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    drawn = list(info.sample_inputs("cpu", torch.float64, requires_grad=True))
    assert len(drawn) == 25
    return drawn[:24:2] + drawn[24:]


CHECKS = {
    "gradients": lambda run, given: gradcheck(run, given, check_batched_grad=True),
    "forward mode": lambda run, given: gradcheck(run, given, fast_mode=True, check_forward_ad=True),
    "second derivatives": lambda run, given: gradgradcheck(run, given, fast_mode=True),
    "forward over reverse": lambda run, given: gradgradcheck(
        run, given, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=False, check_undefined_grad=False
    ),
    "vmap of second derivatives": lambda run, given: gradgradcheck(run, given, check_batched_grad=True),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("attend", [speedlight.torch.scaled_dot_product_attention, patched])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", range(13 if FULL else 0))  # test_torch_sdpa.py has some like them
def test_samples_of_pytorch(n, check, attend):
    sample = samples()[n]
    options = {name: x for name, x in sample.kwargs.items() if name != "attn_mask"}
    masks = [sample.kwargs["attn_mask"]] if "attn_mask" in sample.kwargs else []
    if check.startswith("vmap") and not (masks or (options["dropout_p"] and sample.input.dim() == 3)):
        return  # which is a minute for each

    def run(*given):
        torch.manual_seed(5)
        return attend(*given, **options)

    given = (sample.input, *sample.args, *masks)
    if not options["dropout_p"]:
        assert_equal(run(*given), F.scaled_dot_product_attention(*given, **options))
    assert CHECKS[check](run, given)


# --- flows of many examples at once


def learned(*shape):
    return drawn(*shape, seed=7, grad=True)


def everything(q, k, v, bias, slopes, sinks):
    score = [bias, sl.alibi(slopes)]
    return speedlight.torch.attention(q, k, v, causal=True, score=score, sink_logits=sinks, return_lse=True)


@pytest.mark.parametrize("results", ["out", *["lse", "both"] * FULL])
def test_batched_flows(results):
    """is_grads_batched=True, vmap of autograd.grad: each example is what it would be alone; derivatives go on."""
    inputs = [drawn(2, 2, 6, 8, seed=s, grad=True) for s in range(3)] + [learned(2, 6, 6), learned(2), learned(2)]
    found = everything(*inputs)
    of = {"out": found[:1], "lse": found[1:], "both": found}[results]
    flows = [drawn(3, *x.shape, seed=9) for x in of]
    grad = functools.partial(torch.autograd.grad, of, inputs, retain_graph=True, allow_unused=True)
    got, again = grad(flows, is_grads_batched=True), grad(flows, is_grads_batched=True, create_graph=True)
    alone = [grad([x[n] for x in flows], create_graph=True) for n in range(3)]
    by_vmap = torch.func.vmap(lambda *flows: tuple(x for x in grad(flows) if x is not None))(*flows)
    for x, *want in zip(by_vmap, *([x for x in one if x is not None] for one in alone), strict=True):
        assert_equal(x, torch.stack(want))
    for x, y, *want in zip(got, again, *alone, strict=True):
        assert (x is None) == (want[0] is None)
        if x is not None:
            assert_equal(x, torch.stack(want))
            assert torch.equal(x, y)
    sums = [sum(x.sin().sum() for x in some if x is not None) for some in (again, [y for x in alone for y in x])]
    for x, y in zip(*(torch.autograd.grad(s, inputs[:3], retain_graph=True) for s in sums), strict=True):
        assert_equal(x, y)


# --- FlexAttention in graphs


@pytest.fixture
def graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SLOPES = torch.nn.Parameter(torch.tensor([0.3, 0.1], dtype=torch.float64))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def alibi(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def flex(q, mask=None):
    mask = mask or speedlight.torch.create_block_mask(causal, None, None, 8, 8, "cpu")
    return speedlight.torch.flex_attention(q * 2, q, q, alibi, mask).cos()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch looks, where graphs break
def test_flex_leaves_a_graph(graphs):
    """Also where the BlockMask is made in what is compiled, whose call has no tensors that Dynamo would mind."""
    q = drawn(1, 2, 8, 8, grad=True)
    want = torch.autograd.grad(flex(q).sum(), (q, SLOPES))
    compiled = torch.compile(flex, backend="inductor" if FULL else "eager")
    for _ in range(2):
        for x, y in zip(torch.autograd.grad(compiled(q).sum(), (q, SLOPES)), want, strict=True):
            assert_equal(x, y)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="speedlight's kernels are no graph nodes"):
        torch.compile(flex, backend="eager", fullgraph=True)(q)


class Flex(torch.nn.Module):
    """Slopes are a parameter of its own; the BlockMask was made before, or is made in forward()."""

    def __init__(self, mask):
        super().__init__()
        self.slopes, self.mask = torch.nn.Parameter(SLOPES.detach().clone()), mask

    def forward(self, q):
        mask = self.mask or torch.nn.attention.flex_attention.create_block_mask(causal, None, None, 8, 8, "cpu")
        return speedlight.torch.flex_attention(q, q, q, lambda s, b, h, i, j: s + self.slopes[h] * (j - i), mask)


def test_flex_is_exported(tmp_path):
    """As one operation, which says what it looks up; a BlockMask of the graph itself has no numbers, and is refused."""
    module = Flex(speedlight.torch.create_block_mask(causal, None, None, 8, 8, "cpu"))
    program = torch.export.export(module, (drawn(1, 2, 8, 8),))
    torch.export.save(program, tmp_path / "flex.pt2")
    again, q = torch.export.load(tmp_path / "flex.pt2").module(), drawn(1, 2, 8, 8, seed=3)
    assert torch.equal(again(q), module(q))
    with torch.no_grad():
        again.slopes.fill_(1.0)
        module.slopes.fill_(1.0)
    assert torch.equal(again(q), module(q))
    with pytest.raises(sl.UnsupportedError, match="^block_mask: expected tables whose numbers lie in memory"):
        torch.export.export(Flex(None), (q,))
