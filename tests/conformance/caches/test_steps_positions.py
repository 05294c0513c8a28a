"""Steps at other positions than those they were prepared for, where integers may be beyond 32 bits."""

from __future__ import annotations

import pytest
from problems import qkv
from steps import BEYOND, D

import speedlight as sl

pytestmark = pytest.mark.usefixtures("one_width")  # what is remembered of a step knows no panels


@pytest.mark.parametrize("window", [None, 900])
def test_a_step_may_be_run_at_any_position_of_its_span(rng, window):
    """Prepared where all integers fit 32 bits, run where they do not."""
    q, k, v = qkv(rng, "float32", 1, 4, 2, 1100, 1100, D, D)
    mask = BEYOND if window is None else BEYOND & sl.window(window - 1, 0)
    want = sl.attention(q, k, v, causal=True, mask=mask)
    assert not (want == sl.attention(q, k, v, causal=True)).all()
    for first in (0, 990, 1023):
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=D, window=window, capacity=2048)
        pool = sl.PagePool(layers=1, pages=70, page_size=16, kv_heads=2, head_dim=D)
        sequence = pool.sequence()
        cache.append(0, k[:, :, :first], v[:, :, :first])
        pool.append(0, [sequence], *(x[0, :, :first].swapaxes(0, 1) for x in (k, v)), new_lengths=[first])
        for at in range(first, first + 40):
            here = [x[:, :, at : at + 1] for x in (q, k, v)]
            assert cache.attend(0, *here, mask=BEYOND).tobytes() == want[:, :, at : at + 1].tobytes(), at
            out = pool.attend(0, [sequence], *(x[0].swapaxes(0, 1) for x in here), mask=mask)
            assert out.tobytes() == want[0, :, at].tobytes(), at


def test_the_first_token_of_another_span_is_another_step(rng):
    """By the usual steps before it, whose positions are those at which integers fit 32 bits."""
    mask = sl.expression(lambda b, h, i, j: i * 2_098_000 * (j % 2) >= j)
    q, k, v = qkv(rng, "float32", 1, 4, 2, 1025, 1025, D, D)
    want = sl.attention(q[:, :, 1000:], k, v, causal=True, mask=mask)[:, :, 20:]
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=D, capacity=2048)
    cache.append(0, k[:, :, :1020], v[:, :, :1020])
    for n in range(5):
        at = slice(1020 + n, 1021 + n)
        assert (
            cache.attend(0, q[:, :, at], k[:, :, at], v[:, :, at], mask=mask).tobytes()
            == want[:, :, n : n + 1].tobytes()
        ), n


def test_reading_begins_before_the_first_position(rng):
    """More queries than keys: the first rows have negative positions, at which integers may be beyond 32 bits."""
    mask = sl.expression(lambda b, h, i, j: (100 - i) * 21_000_000 * (j % 2 + 1) > 0)
    q, k, v = qkv(rng, "float32", 1, 4, 2, 6, 300, D, D)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=D, capacity=400)
    for n in (300, 3, 90):
        cache.clear()
        cache.append(0, k[:, :, :n], v[:, :, :n])
        want = sl.attention(q, k[:, :, :n], v[:, :, :n], mask=mask, q_start=n - 6)
        assert cache.attend(0, q, mask=mask).tobytes() == want.tobytes()
