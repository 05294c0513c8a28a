"""Plans of lengths that nobody computes: closed forms, or an error at once."""

from __future__ import annotations

import time

import numpy as np
import pytest
from conftest import FULL
from expressions import masks
from hypothesis import given, settings
from hypothesis import strategies as st

import speedlight as sl
from speedlight.problem import tiles as panels

HUGE = {
    "causal": {"causal": True},
    "everything": {},
    "backward": {"causal": True, "backward": True},
    "a window": {"window": (1000, 0)},
    "a window and a prefix": {"causal": True, "mask": sl.prefix(10**6) | sl.window(4000, 0)},
    "a window, backward": {"window": (1000, 30), "backward": True},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_plan_of_any_lengths_takes_no_time(name):
    """Its figures are those of shorter ones, further on: the third difference over equal steps is 0."""
    options, figures = {"q_heads": 6, "kv_heads": 2, "head_dim": 64} | HUGE[name], []
    start = time.process_time()
    for step in (1 << 9, 1 << 16):
        plans = [sl.plan(q_len=(n + 4) * step * 3 << 18, **options) for n in range(4)]
        figures.append([[p.visible_pairs, p.tiles_full, p.tiles_mixed, p.panel_keys, p.mixed_flops] for p in plans])
    assert not np.diff(np.array(figures, dtype=object), 3, axis=1).any()
    assert time.process_time() - start < 60  # a hang guard


@settings(max_examples=100 if FULL else 5, deadline=None)
@given(mask=masks(), causal=st.booleans(), sizes=st.tuples(*[st.integers(0, 9_000)] * 2, st.integers(-500, 900)))
def test_tallies_of_long_edges_are_those_of_every_panel(mask, causal, sizes):
    q_len, k_len, q_start = sizes
    plans = []
    for every in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if every:
                patch.setattr(panels, "_planes", lambda rows: None)
            mask_of = {"mask": mask, "causal": causal, "q_start": q_start}
            plan = sl.plan(q_heads=3, kv_heads=1, head_dim=8, q_len=q_len, k_len=max(k_len, 1), **mask_of)
        plans.append((plan.tiles_full, plan.tiles_mixed, plan.tiles_skipped, plan.panel_keys, plan.mixed_flops))
    assert plans[0] == plans[1]


def test_what_has_no_closed_form_is_refused_soon():
    """A mask whose every tile is mixed; and heads that nobody has."""
    start = time.process_time()
    with pytest.raises(sl.UnsupportedError, match="^q_len: expected fewer tokens, or a mask of fewer edges"):
        sl.plan(q_heads=1, head_dim=64, q_len=1 << 30, mask=lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0)
    assert time.process_time() - start < 20  # a hang guard
    q_len = 40_000  # as large as tables of blocks get
    plan = sl.plan(q_heads=1, head_dim=64, q_len=q_len, mask=lambda b, h, i, j: (i // 128 + j // 128) % 2 == 0)
    assert plan.tiles_full + plan.tiles_mixed > 50_000


def test_a_tile_that_causality_alone_cuts_is_computed_whole():
    plan = sl.plan(q_heads=1, q_len=128, head_dim=16, causal=True)
    assert plan.tiles_full == 0 and plan.mixed_flops == plan.tile_flops > plan.flops
