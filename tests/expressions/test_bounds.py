"""Interval bounds: never wrong, and exact where they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import FULL
from expressions import LENGTH, masks
from hypothesis import given, settings
from hypothesis import strategies as st

import speedlight as sl
from speedlight.expressions.bounds import Exact, visible
from speedlight.expressions.tree import evaluate

BOXES = 60 if FULL else 25


def elements(mask, b, h, i, j):
    rows, keys = np.arange(i[0], i[1] + 1)[:, None], np.arange(j[0], j[1] + 1)[None, :]
    found = [
        evaluate(mask.root, {"b": np.int64(b), "h": np.int64(x), "i": rows, "j": keys}, np.float32)
        for x in range(h[0], h[1] + 1)
    ]
    return np.stack([np.broadcast_to(x, (len(rows), keys.shape[1])) for x in found])


def random_box(rng, most=LENGTH):
    ends = [sorted(rng.integers(0, most, 2)) for _ in range(2)]
    if rng.random() < 0.7:
        ends = [(int(a), int(min(a + w, most - 1))) for (a, _), w in zip(ends, rng.integers(0, 60, 2), strict=True)]
    return [tuple(map(int, e)) for e in ends]


def classified(mask, b, h, i, j):
    return visible(mask.root, Exact({"b": (b, b), "h": h, "i": i, "j": j}))


@settings(max_examples=2000 if FULL else 120, deadline=None)
@given(masks(), st.integers(0, 1 << 30))
def test_sound(function, seed):
    mask, rng = sl.expression(function, "mask"), np.random.default_rng(seed)
    for _ in range(BOXES):
        i, j = random_box(rng)
        some, every = classified(mask, 1, (0, 1), i, j)
        seen = elements(mask, 1, (0, 1), i, j)
        assert some or not seen.any(), f"{mask} called empty over i {i}, j {j}"
        assert not every or seen.all(), f"{mask} called full over i {i}, j {j}"


EXACT = {
    "causal": sl.causal(),
    "window": sl.window(30, 0),
    "both sides": sl.window(10, 12),
    "band away": sl.expression(lambda b, h, i, j: (i - j >= 5) & (i - j <= 9) & (j >= 7)),
    "nothing": sl.expression(lambda b, h, i, j: (i - j >= 5) & (i - j <= 3)),
    "everything": sl.expression(lambda b, h, i, j: (j >= i) | (j <= i + 1)),
    "prefix": sl.causal() & (sl.window(20, 0) | sl.prefix(4)),
    "outside": ~sl.window(10, 10),
    "rows": sl.expression(lambda b, h, i, j: (i <= 60) & (i > 20) & (j < 90) & (j >= 33)),
    "rows or keys": sl.expression(lambda b, h, i, j: (i > 200) | (j > 300) | (i < 50) | (j < 10)),
    "blocks apart": sl.expression(lambda b, h, i, j: i // 8 - j // 8 >= 2),
    "distance": sl.expression(lambda b, h, i, j: i - j == 7),
    "documents": sl.documents(np.repeat(np.arange(9), [3, 60, 1, 40, 100, 30, 90, 50, 26])),
    "blocks": sl.blocks(np.random.default_rng(5).random((60, 20)) < 0.2, (7, 20)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    mask, rng = EXACT[name], np.random.default_rng(3)
    for _ in range(3000 if FULL else 600):
        i, j = random_box(rng)
        seen = elements(mask, 0, (0, 0), i, j)
        assert classified(mask, 0, (0, 0), i, j) == (seen.any(), seen.all()), f"i {i}, j {j}"
