"""Caches and pools on a GPU as their tests ask them."""

from __future__ import annotations

import numpy as np
from problems import numpy_dtype, taken
from tolerance import plain

import speedlight as sl
from speedlight.arrays.dtypes import ON_GPU

KINDS = ("float32", "float16", "bfloat16", *ON_GPU)
OPTIONS = [{}, {"score": sl.softcap(2.0)}, {"mask": sl.window(50, 0) | sl.prefix(3)}, {"sink_logits": [0.5, -1, 2, 0]}]
DROPOUT = {"dropout": 0.4, "seed": 2**63 + 1}
OWN = ("storage.py", "kv/")  # files whose functions are interrupted
CLOSE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2} | dict.fromkeys(ON_GPU, 3e-6)


def close(got, want, dtype):
    np.testing.assert_allclose(plain(got.cpu()), plain(want), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def tokens(rng, dtype, *shapes):
    kind = numpy_dtype(taken(dtype))
    return [rng.standard_normal(s).astype(kind) for s in shapes]
