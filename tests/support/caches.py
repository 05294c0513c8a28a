"""Caches as their tests make them."""

from __future__ import annotations

import speedlight as sl

OPTIONS = [{}, {"sink_logits": [0.5, -1, 2, 0]}, {"mask": sl.window(200, 0) | sl.prefix(3)}, {"score": sl.softcap(2.0)}]


def made(dtype, d=16, dv=16, **sizes):
    return sl.KVCache(
        **(
            {"layers": 1, "batch": 1, "kv_heads": 2, "head_dim": d, "value_dim": dv, "capacity": 1300, "dtype": dtype}
            | sizes
        )
    )
