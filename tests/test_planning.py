"""What runs is what was planned: the kernel counts, and plan() must have said the same."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from problems import qkv

import speedlight as sl
from speedlight import arrays, engine, planning
from speedlight.machine import current_isa
from speedlight.problem import from_arrays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("q_len", "k_len", "options"),
    [(300, 700, {"causal": True}), (300, 700, {}), (1, 5000, {"causal": True}), (700, 300, {"causal": True}),
     (513, 2049, {"causal": True, "q_start": 900}), (200, 400, {"causal": "top-left"}), (64, 64, {"causal": True, "q_start": -5})],
)  # fmt: skip
def test_the_kernel_counts_what_was_planned(isa, rng, dtype, q_len, k_len, options):
    q, k, v = qkv(rng, dtype, 2, 6, 2, q_len, k_len, 16, 16)
    plan = sl.plan(q, k, v, **options)
    described = tuple(arrays.describe(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
    defaults = {"causal": False, "q_start": None, "k_start": 0, "scale": None, "layout": "bhld"}
    problem, _, _ = from_arrays(*described, **(defaults | options))
    out, counts = np.empty_like(q), np.zeros(3, np.int64)
    prepared = engine.prepare(problem, "bhld", *described, out.strides, None, None, sl.get_threads(), current_isa())
    prepared.run(*(x.address for x in described), out.ctypes.data, 0, counts.ctypes.data)
    assert counts.tolist() == [plan.tiles_full, plan.tiles_mixed, plan.panel_keys]
    i, j = np.arange(q_len)[:, None] + problem.q_starts[0], np.arange(k_len)
    visible = int((j <= i).sum()) if problem.causal else q_len * k_len
    assert plan.visible_pairs == visible * 2 * 6 and plan.flops == plan.visible_pairs * 4 * 16
    assert plan.tile_flops == plan.full_flops + plan.mixed_flops >= plan.flops
    assert plan.kernel == prepared.kernel.symbol


def test_workspace_does_not_grow_with_the_lengths():
    sizes = [sl.plan(q_heads=8, q_len=n, head_dim=64).workspace_bytes for n in (4096, 65536, 1 << 20)]
    assert sizes == sorted(sizes, reverse=True)  # long rows share a tile among fewer panels


def test_the_plan_is_frozen_and_prints_as_a_table():
    plan = sl.plan(batch=1, q_heads=32, kv_heads=8, q_len=8192, k_len=8192, head_dim=128, dtype="bfloat16", causal=True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.flops = 0
    text = str(plan)
    for word in ("flops", "tiles", "workspace", "materialised", "time at least", plan.kernel):
        assert word in text
    assert plan.materialised_bytes == 2 * 32 * 8192 * 8192 * 2 and plan.seconds_at_least > 0


def test_schedule_fits_the_cache():
    problem = sl.plan(q_heads=8, q_len=4096, head_dim=64).problem
    how = planning.schedule(problem, current_isa(), 2)
    assert how.scratch_bytes < 1 << 20 and how.panels >= 1
