"""How results lie: in the order of the query's dimensions, as PyTorch's own attention has it: models view them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import speedlight as sl
import speedlight.torch
from speedlight.autograd import operators as ops
from speedlight.autograd.forms import text_of
from speedlight.problem.problem import Options

pytestmark = pytest.mark.usefixtures("one_kernel")
B, H, N, D = 2, 4, 6, 8
LAID = {
    "bhld": lambda h, d: torch.randn(B, h, N, d),
    "blhd": lambda h, d: torch.randn(B, N, h, d).transpose(1, 2),
    "lbhd": lambda h, d: torch.randn(N, B, h, d).permute(1, 2, 0, 3),
    "one of three": lambda h, d: torch.randn(B, N, 3, h, d)[:, :, 0].transpose(1, 2),
    "a part": lambda h, d: torch.randn(B, h, N + 3, d)[:, :, :N],
    "expanded": lambda h, d: torch.randn(1, h, N, d).expand(B, -1, -1, -1),
    "columns first": lambda h, d: torch.randn(B, h, d, N).mT,
    "one query": lambda h, d: torch.randn(B, 1, h, d).transpose(1, 2),
}
CALLS = {
    "plain": lambda f, q, k, v: f(q, k, v),
    "causal": lambda f, q, k, v: f(q, k, v, is_causal=True),
    "mask": lambda f, q, k, v: f(q, k, v, torch.ones(k.shape[2], dtype=torch.bool)[None]),
    "bias that is learned": lambda f, q, k, v: f(q, k, v, torch.zeros(1, k.shape[2], requires_grad=True)),
    "dropout": lambda f, q, k, v: f(q, k, v, dropout_p=0.5),
    "value dim": lambda f, q, k, v: f(q, k, v[..., :5]),
    "fewer heads": lambda f, q, k, v: f(q, k[:, :2], v[:, :2], enable_gqa=True),
    "without a batch": lambda f, q, k, v: f(q[0], k[0], v[0]),
    "with more": lambda f, q, k, v: f(q[None], k[None], v[None]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("laid", LAID)
def test_results_lie_as_pytorch_s_do(laid, call):
    """Of the first call and of those that are repeated; with gradients, too."""
    q, k, v = (LAID[laid](H, D) for _ in range(3))
    want = CALLS[call](functional.scaled_dot_product_attention, q, k, v)
    for _ in range(2):
        assert CALLS[call](speedlight.torch.scaled_dot_product_attention, q, k, v).stride() == want.stride()
    with speedlight.torch.sdpa():
        assert CALLS[call](functional.scaled_dot_product_attention, q, k, v).stride() == want.stride()
    out = CALLS[call](speedlight.torch.scaled_dot_product_attention, q.detach().requires_grad_(), k, v)
    assert out.stride() == want.stride()
    with torch.no_grad():
        want = CALLS[call](functional.scaled_dot_product_attention, q, k, v)
        with speedlight.torch.sdpa():
            for _ in range(3):
                assert CALLS[call](functional.scaled_dot_product_attention, q, k, v).stride() == want.stride()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("value_dim", [D, 5])
@pytest.mark.parametrize("laid", [x for x in LAID if x != "expanded"])
def test_results_lie_as_the_query(laid, value_dim):
    """attention() and flex_attention() by every way, for any value dim; gradients as what they flow to."""
    q, k, v = (LAID[laid](H, d) for d in (D, D, value_dim))
    want = flex.flex_attention(q, k, v) if laid != "one query" else sl.attention(q, k, v)
    assert want.stride() == speedlight.torch.flex_attention(q, k, v).stride()
    form = text_of(Options())
    for function in (sl.attention, speedlight.torch.attention):
        assert function(q, k, v).stride() == function(q, k, v).stride() == want.stride()
        grads = q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_()
        out = function(*grads)
        assert out.stride() == want.stride()
        flows = torch.autograd.grad(out.sum(), grads)
        assert [x.stride() for x in flows] == [dense(x).stride() for x in (q, k, v)]
    assert ops.attention_op(q, k, v, None, [], form, None)[0].stride() == want.stride()
    assert sl.attention(q, k, v, out=torch.empty(out.shape)).is_contiguous()
    assert torch.equal(sl.attention(q, k, v), sl.attention(*(x.contiguous() for x in (q, k, v))))


def dense(x):
    """A tensor in the order of another, its rows whole."""
    order = sorted(range(3), key=lambda d: -x.stride()[d])
    return torch.empty_permuted(x.shape, (*order, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("laid", LAID)
def test_graphs_are_told_how_results_lie(laid):
    """Forwards and backwards: what an operation says of its results is what it gives."""
    q, k, v = (LAID[laid](H, D).detach().requires_grad_() for _ in range(3))
    arguments = (q, k, v, None, [], text_of(Options(causal=True)), None)
    torch.library.opcheck(ops.attention_op, arguments)
    out, lse = ops.attention_op(*arguments)
    given = [x.detach() for x in (q, k, v, out, lse, torch.ones_like(out), lse)]
    torch.library.opcheck(
        ops.attention_backward_op, (*given, None, [], arguments[5], None, []),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
