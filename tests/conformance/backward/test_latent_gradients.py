"""Gradients of latent attention: both uses of the shared keys are summed, in the order and the roundings that copies
have.
"""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FULL
from latents import PLACES, draw_latents, laid
from problems import DTYPES, flow_of
from tolerance import assert_within

import speedlight as sl
from speedlight.host.machine import current_isa

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (30, 5), "sink_logits": [0.5, -1.0, 2.0]},
    "softcap": {"score": sl.softcap(2.0), "scale": 0.3},
    "dropout": {"dropout": 0.3, "seed": 5},
}


def flattened(gradients):
    dq, dk, dv, *more = gradients
    return [x for x in (dq, *(dk if isinstance(dk, tuple) else [dk]), dv, *more) if x is not None]


@pytest.mark.units("dtype")
@pytest.mark.each("dtype", "name")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_gradients(isa, one_width, rng, dtype, name):
    """Inside the bound; the bits of joined keys, and of a sum of copies' gradients."""
    for n in range(4 if FULL else 2):
        layout = ("bhld", "blhd")[n % 2]
        p = draw_latents(rng, dtype, 40, (70, 300)[n % 2], heads=(1, 3), layout=layout, **OPTIONS[name])
        pair, columns = laid(p.parts, PLACES[n % len(PLACES)], rng), p.value_dim
        flow = flow_of(rng, p.arrays, **p.options)
        dq, dk, dv = sl.attention_backward(*p.arrays, *flow, **p.options)
        both = dk.copy()
        both[..., :columns] += dv
        got = sl.attention_backward(p.q, pair, None, *flow, value_dim=columns, **p.options)
        joined = sl.attention_backward(p.q, p.k, None, *flow, value_dim=columns, **p.options)
        own_values = sl.attention_backward(p.q, pair, p.arrays[2], *flow, **p.options)
        assert got[2] is None and joined[2] is None and isinstance(got[1], tuple) and isinstance(own_values[1], tuple)
        assert [x.shape for x in got[1]] == [p.latent.shape, p.rotary.shape]
        for found, want_k in ((got, both), (joined, both), (own_values, dk)):
            assert found[0].tobytes() == dq.tobytes()
            keys = np.concatenate(found[1], -1) if isinstance(found[1], tuple) else found[1]
            assert keys.tobytes() == want_k.tobytes()
        assert own_values[2].tobytes() == dv.tobytes()
        given, dot = (p.q, (p.latent, p.rotary), None, *flow), current_isa().dot(p.q.dtype, gradients=True)
        want = sl.reference.backward(*given, value_dim=columns, **p.options)
        bounds = sl.reference.backward_bound(*given, value_dim=columns, dot=dot, **p.options)
        for x, y, bound in zip(*map(flattened, (got, want, bounds)), strict=True):
            assert_within(x, y, bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_keys_and_further_gradients(one_width, rng, dtype):
    """Keys that the items of a batch share get the sum over items; sinks' gradients come beside them."""
    p = draw_latents(rng, dtype, 20, 70, widths=(24, 8), heads=(1, 3), sink_logits=[0.5, -1.0, 2.0])
    q = np.concatenate([p.q[:1], -p.q[:1], p.q[:1]])
    k, columns = p.k[:1], p.value_dim
    pair = p.latent[:1], p.rotary[:1]
    flow = flow_of(rng, (q, k, k[..., :columns]), **p.options)
    grads = {"grads": ("sink_logits",)}
    dq, dk, dv, (sinks,) = sl.attention_backward(q, k, k[..., :columns].copy(), *flow, **grads, **p.options)
    got = sl.attention_backward(q, pair, None, *flow, value_dim=columns, **grads, **p.options)
    dk[..., :columns] += dv
    assert got[0].tobytes() == dq.tobytes() and got[2] is None and got[3][0].tobytes() == sinks.tobytes()
    assert np.concatenate(got[1], -1).tobytes() == dk.tobytes()
    dot = current_isa().dot(q.dtype, gradients=True)
    bounds = sl.reference.backward_bound(q, pair, None, *flow, value_dim=columns, dot=dot, **grads, **p.options)
    want = sl.reference.backward(q, pair, None, *flow, value_dim=columns, **grads, **p.options)
    for x, y, bound in zip(got[1], want[1], bounds[1], strict=True):
        assert_within(x, y, bound)
