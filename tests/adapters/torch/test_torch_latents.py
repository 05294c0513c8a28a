"""Latent attention of tensors: gradients through a pair of keys and through values in the keys, by autograd, in graphs
and under transforms.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from latents import draw_latents
from problems import as_numpy
from tolerance import assert_within, plain

import speedlight as sl
import speedlight.torch

pytestmark = pytest.mark.usefixtures("one_kernel")
DTYPES = ("float32", "float64", "bfloat16")


def leaves(p):
    """q and both parts, which require grad."""
    return [as_tensor(x).requires_grad_() for x in (p.q, p.latent, p.rotary)]


def as_tensor(x):
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.name == "bfloat16" else torch.tensor(x)


def gradients_of_copies(p, d_out):
    """Of the call whose keys and values are copies, joined and cut by PyTorch."""
    q, latent, rotary = leaves(p)
    k, v = torch.cat([latent, rotary], -1), latent[..., : p.value_dim].clone()
    out = sl.attention(q, k, v, **p.options)
    return out, torch.autograd.grad(out, (q, latent, rotary), d_out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", [sl.attention, speedlight.torch.attention], ids=["attention", "torch.attention"])
def test_gradients_flow_to_both_parts(rng, dtype, attention):
    p = draw_latents(rng, dtype, 20, 70, widths=(24, 8), heads=(2, 3), causal=True)
    q, latent, rotary = leaves(p)
    d_out = as_tensor(rng.standard_normal((*p.q.shape[:-1], p.value_dim)).astype(p.q.dtype))
    want, grads = gradients_of_copies(p, d_out)
    ways = [((latent, rotary), None), ([latent, rotary], None), (torch.cat([latent, rotary], -1), None)]
    for keys, values in ways:
        out = attention(q, keys, values, value_dim=p.value_dim, **p.options)
        assert torch.equal(out, want)
        for got, other in zip(torch.autograd.grad(out, (q, latent, rotary), d_out), grads, strict=True):
            assert torch.equal(got, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_specification(rng, dtype):
    p = draw_latents(rng, dtype, 20, 70, widths=(24, 8), heads=(1, 3), causal=True)
    q, latent, rotary = leaves(p)
    out, lse = sl.attention(q, (latent, rotary), None, value_dim=p.value_dim, return_lse=True, **p.options)
    d_out = as_tensor(rng.standard_normal(out.shape).astype(p.q.dtype))
    got = torch.autograd.grad(out, (q, latent, rotary), d_out)
    flow = [as_numpy(x) for x in (out, lse, d_out)]
    given = (p.q, (p.latent, p.rotary), None, *flow)
    dq, dk, dv = sl.reference.backward(*given, value_dim=p.value_dim, **p.options)
    bounds = sl.reference.backward_bound(*given, value_dim=p.value_dim, dot=dtype == "bfloat16", **p.options)
    assert dv is None and bounds.dv is None
    for x, want, bound in zip(got, (dq, *dk), (bounds.dq, *bounds.dk), strict=True):
        assert_within(plain(x), want, bound)


def test_in_a_graph(rng):
    """torch.compile keeps speedlight.torch.attention in the graph, with the parts joined there."""
    p = draw_latents(rng, "float32", 20, 70, widths=(24, 8), heads=(1, 3))
    q, latent, rotary = leaves(p)
    want = sl.attention(q, (latent, rotary), None, value_dim=9)
    for attention, whole in ((speedlight.torch.attention, True), (sl.attention, False)):

        def call(q, latent, rotary, attention=attention):
            return attention(q, (latent, rotary), None, value_dim=9)

        compiled = torch.compile(call, backend="aot_eager", fullgraph=whole)
        assert torch.equal(compiled(q, latent, rotary), want)
        grads = [torch.autograd.grad(f(q, latent, rotary).sum(), latent)[0] for f in (compiled, call)]
        assert torch.equal(*grads)


def test_under_transforms(rng):
    p = draw_latents(rng, "float32", 5, 30, widths=(24, 8), heads=(1, 2))
    q, latent, rotary = (x.detach() for x in leaves(p))

    def loss(latent):
        return speedlight.torch.attention(q, (latent, rotary), None).square().sum()

    followed = latent.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(followed), followed)
    assert torch.equal(torch.func.grad(loss)(latent), want)
    each = torch.vmap(lambda x: speedlight.torch.attention(q, (x, rotary), None))(torch.stack([latent, -latent]))
    for got, x in zip(each, (latent, -latent), strict=True):
        assert torch.equal(got, sl.attention(q, (x, rotary), None))


def test_under_autocast(rng):
    p = draw_latents(rng, "float32", 5, 30, widths=(24, 8), heads=(1, 2))
    q, latent, rotary = (x.detach() for x in leaves(p))
    with torch.autocast("cpu", torch.bfloat16):
        got = [attention(q, (latent, rotary), None) for attention in (sl.attention, speedlight.torch.attention)]
    want = sl.attention(q.bfloat16(), (latent.bfloat16(), rotary.bfloat16()), None)
    assert all(torch.equal(x, want) for x in got)
