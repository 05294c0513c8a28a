"""Plans of latent attention: values that are the keys' first columns count their bytes once, of arrays and of sizes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from latents import draw_latents

import speedlight as sl

SIZES = {"q_heads": 16, "kv_heads": 1, "q_len": 5, "k_len": 300, "head_dim": 576, "value_dim": 512}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
def test_values_count_once(rng, dtype, backward):
    p = draw_latents(rng, dtype, 5, 300, widths=(33, 5), heads=(2, 3))
    q, k, v = p.arrays
    own = sl.plan(q, k, v, causal=True, backward=backward)
    both = (p.latent, p.rotary)
    for keys, values, columns in ((k, None, p.value_dim), (both, None, p.value_dim), (both, v, None)):
        plan = sl.plan(q, keys, values, value_dim=columns, causal=True, backward=backward)
        shared = v.nbytes if values is None else 0
        assert plan.latent == ("of the keys" in str(plan)) == (values is None)
        assert plan.bytes_read == own.bytes_read - shared
        assert plan.bytes_written == own.bytes_written - shared * backward
        assert dataclasses.replace(plan, latent=False).flops == own.flops and plan.problem == own.problem
    assert sl.plan(q, both, None).problem.value_dim == p.latent.shape[-1]


def test_sizes():
    plan, own = sl.plan(**SIZES, latent=True), sl.plan(**SIZES)
    assert own.bytes_read - plan.bytes_read == 300 * 512 * 4 and plan.flops == own.flops
    q, k = np.ones((1, 16, 5, 576), np.float32), np.ones((1, 1, 300, 576), np.float32)
    assert sl.plan(q, k, None, value_dim=512) == plan


def test_wrong_sizes():
    with pytest.raises(sl.ArgumentError, match="value_dim: expected at most head_dim 576, as values are the first col"):
        sl.plan(**SIZES | {"value_dim": 577}, latent=True)
    with pytest.raises(sl.ArgumentTypeError, match="latent: expected"):
        sl.plan(**SIZES, latent=1)  # type: ignore[arg-type]
    q = np.ones((1, 16, 5, 576), np.float32)
    with pytest.raises(sl.ArgumentError, match="value_dim: expected 1 to 576, the last dimension of k; got 600"):
        sl.plan(q, q, None, value_dim=600)
    with pytest.raises(sl.ArgumentTypeError, match=r"v: expected a NumPy array.*got NoneType\. Where values"):
        sl.plan(q, q, None)
