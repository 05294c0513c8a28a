"""States of attention for tests of merging: random ones, and those that are special."""

from __future__ import annotations

import numpy as np
from problems import numpy_dtype

NAN, INF = float("nan"), float("inf")


def states(rng, count, shape, dtype="float32", lse="float32", size=3.0):
    """Outputs and log-sum-exps of random rows, some of which saw nothing and hold NaN."""
    outs = [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for _ in range(count)]
    lses = [(rng.standard_normal(shape[:-1]) * size).astype(numpy_dtype(lse)) for _ in range(count)]
    for out, log in zip(outs, lses, strict=True):
        unseen = rng.random(shape[:-1]) < 0.1
        out[unseen], log[unseen] = NAN, -INF
    return outs, lses


def same(a, b):
    return all(
        np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )


# what, states as (out, lse), out, lse
CASES = [
    ("one state is copied", [([1.5, -0.0, NAN, INF], -3.25)], [1.5, -0.0, NAN, INF], -3.25),
    ("one state that saw nothing", [([NAN, 1.0], -INF)], [0.0, 0.0], -INF),
    ("two halves", [([1.0, -2.0], 0.0), ([3.0, 2.0], 0.0)], [2.0, 0.0], np.log(2)),
    ("none saw anything", [([NAN, -0.0], -INF), ([INF, -0.0], -INF)], [0.0, 0.0], -INF),
    ("one saw nothing", [([NAN, INF], -INF), ([3.0, -0.0], 1.0)], [3.0, -0.0], 1.0),
    ("the other saw nothing", [([3.0, -0.0], 1.0), ([NAN, INF], -INF)], [3.0, -0.0], 1.0),
    ("visible nan", [([NAN, 1.0], 0.0), ([3.0, 1.0], 0.0)], [NAN, 1.0], np.log(2)),
    ("visible infinity", [([INF, 1.0], 0.0), ([3.0, 1.0], 0.0)], [INF, 1.0], np.log(2)),
    ("both infinities", [([INF, 1.0], 0.0), ([-INF, 1.0], 0.0)], [NAN, 1.0], np.log(2)),
    ("infinity of no weight", [([1.0, 1.0], 2000.0), ([INF, 1.0], 0.0)], [NAN, 1.0], 2000.0),
    ("nan lse", [([1.0, 1.0], NAN), ([3.0, 1.0], 0.0)], [NAN, NAN], NAN),
    ("nan lse, nothing else", [([1.0, 1.0], -INF), ([3.0, 1.0], NAN)], [NAN, NAN], NAN),
    ("lse of +inf", [([1.0, 1.0], INF), ([3.0, 1.0], 0.0)], [NAN, NAN], NAN),
    ("lse of both infinities", [([1.0, 1.0], INF), ([3.0, 1.0], -INF)], [NAN, NAN], NAN),
    ("far apart", [([1.0, 1.0], -60000.0), ([3.0, 5.0], 60000.0)], [3.0, 5.0], 60000.0),
    ("all far below zero", [([1.0, 1.0], -60000.0), ([3.0, 5.0], -60000.0)], [2.0, 3.0], -60000 + np.log(2)),
]
