"""PyTorch's autograd of CUDA tensors: the engine's gradients; checkpoints, graphs and second derivatives.

In the interpreter tensors of the CPU pass for a GPU's.
"""

from __future__ import annotations

import pytest
import torch
from on_gpu import DEVICE, small_blocks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import speedlight as sl
import speedlight.torch
from speedlight import engines
from speedlight.autograd import graphs, higher_order
from speedlight.autograd import operators as ops
from speedlight.autograd.forms import text_of
from speedlight.gpu import differentiate
from speedlight.gpu.tiles import Tile
from speedlight.problem.options import Options


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """How many backward calls the engine has taken; all tensors are a GPU's."""
    taken, real = [0], differentiate.Gradients.run

    def run(self, *args):
        taken[0] += 1
        return real(self, *args)

    monkeypatch.setattr(differentiate.Gradients, "run", run)
    monkeypatch.setattr(engines, "on_gpu", lambda x: True)
    with small_blocks(Tile(32, 32, 4, 1)):
        yield taken


@pytest.fixture
def tensors():
    shapes = ((1, 2, 20, 8), (1, 1, 30, 8), (1, 1, 30, 8), (2,), (2, 20, 30), (2,))
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=numbers).to(DEVICE).requires_grad_() for shape in shapes]


def attend(q, k, v, slopes, bias, sinks, **options):
    score = [sl.alibi(sl.table(slopes)), bias]
    return sl.attention(q, k, v, causal=True, score=score, sink_logits=sinks, **options)


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_gradients_are_the_engine_s(tensors, calls):
    """Those of attention_backward(), to the bit; again where a checkpoint attends again."""
    q, k, v, slopes, bias, sinks = tensors
    out, lse = attend(*tensors, return_lse=True)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), tensors, (d_out, d_lse))
    assert calls == [1]
    tables = sl.table(slopes.detach()), sl.table(bias.detach())
    score = [sl.alibi(tables[0]), lambda s, b, h, i, j: s + tables[1][h, i - 10, j]]
    options = {"causal": True, "score": score, "sink_logits": sinks.detach(), "engine": "cuda"}
    given = [x.detach() for x in (q, k, v, out, lse, d_out, d_lse)]
    *three, more = sl.attention_backward(*given, grads=(*tables, "sink_logits"), **options)
    assert same(got, [*three, *more])
    again = checkpoint(lambda *x: attend(*x, return_lse=True), *tensors, use_reentrant=False)
    assert same(torch.autograd.grad(again, tensors, (d_out, d_lse)), got)


@pytest.mark.slow
@pytest.mark.skipif(graphs._IS_OLD, reason="graphs want PyTorch 2.13: Dynamo of an older one takes another closure's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_graphs(tensors, calls, dtype):
    """The operations of a graph, forward and backward."""

    def loss(q, k, v):
        return sl.torch.attention(q, k, v, causal=True).square().sum()

    three = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    got, want = (torch.autograd.grad(f(*three), three) for f in (compiled, loss))
    assert calls == [2] and same(got, want) and got[0].dtype == dtype


@pytest.mark.slow
def test_second_derivatives(tensors, calls, monkeypatch):
    """By PyTorch's operations, wherever the first were computed."""

    def twice():
        (first,) = torch.autograd.grad(attend(*tensors).square().sum(), tensors[:1], create_graph=True)
        return torch.autograd.grad(first.sum(), tensors)

    got = twice()
    assert calls[0] and all([torch.isfinite(x).all() and x.any() for x in got])
    monkeypatch.setattr(engines, "on_gpu", lambda x: x.is_cuda)
    tensors[:] = [x.detach().cpu().double().requires_grad_() for x in tensors]
    for x, y in zip(got, twice(), strict=True):
        assert (x.cpu() - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_casts_as_pytorch_does(device, given):
    """Of tensors without numbers, on the device that is cast for and on the other."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with FakeTensorMode():
        every = [torch.empty(1, 2, 4, 8, dtype=given, device=where) for where in ("cuda", "cpu")]
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16 if given is torch.float16 else torch.float16)
    try:
        for x in every:
            want = torch.nn.functional.scaled_dot_product_attention(x, x, x)
            out = sl.torch.attention(x, x, x)
            assert (out.dtype, out.device) == (want.dtype, want.device)
            assert (out.dtype != given) == (x.device.type == device and given is not torch.float64)
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def test_everything_lies_where_q_does():
    """Of tensors that have no numbers: what is made beside them is on their device, or PyTorch refuses to join it."""
    q, k, v = (torch.empty(1, h, n, 8, device="meta") for h, n in ((4, 20), (2, 30), (2, 30)))
    form = text_of(Options(causal=True, dropout=0.1, mask=sl.window(9, 0), score=sl.softcap(2.0)))
    out, lse = higher_order.attention_of(form, 3, higher_order.Tensors(q, k, v, [], torch.empty(4)))
    assert out.shape == q.shape and out.device == lse.device == q.device
    grads = torch.ops.speedlight.attention_backward(
        q, k, v, out, lse, None, lse, torch.empty(4, device="meta"), [], form, 3, [ops.SINKS]
    )
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape, (4,)] and all(x.device == q.device for x in grads)
