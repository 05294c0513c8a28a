"""Transforms and derivatives, where a call was known before, or is unlike the usual one."""

from __future__ import annotations

import pytest
import torch

import speedlight as sl
import speedlight.torch

pytestmark = [
    pytest.mark.usefixtures("one_kernel"),  # kernels of few shapes: engines' tests have the others
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
]
forward_ad = torch.autograd.forward_ad


def drawn(*shape, **more):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), **more)


@torch.no_grad()
def test_a_call_that_machine_code_repeats_has_tangents():
    """Forward mode is on whether gradients are recorded or not."""
    q, k, t = drawn(1, 2, 1, 8), drawn(1, 2, 9, 8), drawn(1, 2, 1, 8)
    for _ in range(4):
        plain = sl.attention(q, k, k)
    _, want = torch.func.jvp(lambda q: speedlight.torch.attention(q, k, k), (q,), (t,))
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(sl.attention(forward_ad.make_dual(q, t), k, k))
        torch.testing.assert_close(found.primal, plain)
        torch.testing.assert_close(found.tangent, want)


def test_derivatives_of_a_sink_far_above_the_scores():
    """Nearly all weight is the sink's: nothing overflows, and what is left is 0."""
    q, k, v = (drawn(1, 2, n, 8, dtype=torch.float64).requires_grad_() for n in (5, 6, 6))
    sinks = torch.tensor([800.0, -3.0], dtype=torch.float64, requires_grad=True)
    out = speedlight.torch.attention(q, k, v, sink_logits=sinks)
    first = torch.autograd.grad(out.sum(), (q, sinks), create_graph=True)
    second = torch.autograd.grad(first[0].sum() + first[1].sum(), (q, k, v, sinks))
    assert all(bool(x.isfinite().all()) for x in second)
    assert not second[0][0, 0].any() and second[0][0, 1].any()
    _, tangent = torch.func.jvp(
        lambda s: speedlight.torch.attention(q, k, v, sink_logits=s), (sinks,), (sinks * 0 + 1,)
    )
    assert not tangent[0, 0].any() and tangent[0, 1].any()


def test_examples_whose_items_share_keys():
    q, k = drawn(3, 4, 2, 5, 8), drawn(3, 1, 2, 5, 8)
    found = torch.func.vmap(lambda q, k: speedlight.torch.attention(q, k, k))(q, k)
    for one, of_q, of_k in zip(found, q, k, strict=True):
        assert torch.equal(one, speedlight.torch.attention(of_q, of_k, of_k))
