"""Plans of sequences that share leading keys: these count their bytes once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import speedlight as sl

SIZES = {"batch": 3, "q_heads": 8, "kv_heads": 2, "q_len": 1, "k_len": 300, "head_dim": 64, "value_dim": 32}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("latent", [False, True])
def test_whole_tiles_of_shared_keys_count_once(dtype, size, latent):
    own = sl.plan(**SIZES, dtype=dtype, latent=latent)
    for tokens, counted in ((0, 0), (1, 0), (127, 0), (128, 128), (256, 256), (299, 256)):
        plan = sl.plan(**SIZES, dtype=dtype, latent=latent, shared_prefix=tokens)
        saved = 2 * counted * 2 * (64 if latent else 64 + 32) * size
        assert plan.shared_prefix == tokens and plan.bytes_read == own.bytes_read - saved
        assert (f"({counted} shared)" in str(plan)) == ("shared" in str(plan)) == bool(counted)
        assert dataclasses.replace(plan, shared_prefix=0, bytes_read=own.bytes_read) == own, "nothing else changes"


def test_arrays_and_lengths(rng):
    q, k = rng.standard_normal((2, 4, 5, 16), np.float32), rng.standard_normal((2, 4, 300, 16), np.float32)
    plan, own = (sl.plan(q, k, k, k_lengths=[300, 280], shared_prefix=n) for n in (275, 0))
    assert own.bytes_read - plan.bytes_read == 256 * 4 * 32 * 4
    with pytest.raises(sl.ArgumentError, match="shared_prefix: expected 0 to 275, the keys before .*; got 276"):
        sl.plan(q, k, k, k_lengths=[300, 280], shared_prefix=276)
    with pytest.raises(sl.ArgumentError, match="shared_prefix: expected 0 beside keys of one item"):
        sl.plan(q, k[:1], k[:1], shared_prefix=3)


PACKED = {"layout": "lhd", "cu_seqlens_q": [0, 1, 2], "cu_seqlens_k": [0, 9, 20], "batch": None, "k_len": None}
WRONG = [
    (
        {"shared_prefix": 300},
        sl.ArgumentError,
        "expected 0 to 299, the keys before the first query .*; got 300.*k_len=301 or",
    ),
    ({"shared_prefix": -1}, sl.ArgumentError, r"expected 0 to 299, .*; got -1\.$"),
    (
        {"q_len": 600, "k_len": None, "shared_prefix": 512},
        sl.ArgumentError,
        "expected 0 to 0, .*; got 512.*k_len=1112 ",
    ),
    ({"shared_prefix": 2.0}, sl.ArgumentTypeError, "expected an int"),
    ({"batch": 1}, sl.ArgumentError, "expected at least two sequences .*; got batch=1. Write batch=2"),
    ({"backward": True}, sl.UnsupportedError, "expected 0 beside backward=True; got 9"),
    (PACKED | {"q_len": None}, sl.ArgumentError, "expected 0 beside layout='lhd'.*Plan a batch"),
    ({"dropout": 0.5, "seed": 1}, sl.UnsupportedError, "expected neither dropout nor a mask or score that reads b"),
    ({"mask": lambda b, h, i, j: j > b}, sl.UnsupportedError, "expected neither dropout nor a mask or score"),
    ({"score": lambda s, b, h, i, j: s + b}, sl.UnsupportedError, "expected neither dropout nor a mask or score"),
    ({"ranks": 2}, sl.UnsupportedError, "expected 0 beside ranks=; got 9"),
]


@pytest.mark.parametrize(("options", "error", "says"), WRONG)
def test_wrong_prefixes(options, error, says):
    with pytest.raises(error, match=f"shared_prefix: {says}"):
        sl.plan(**SIZES | {"shared_prefix": 9} | options)


def test_a_gpu_takes_each_sequence_by_itself():
    plan = dataclasses.replace(sl.plan(**SIZES), engine="cuda")
    from speedlight.problem.plan import of_shared_prefix

    with pytest.raises(sl.UnsupportedError, match="shared_prefix: expected a plan of the CPU; got one of cuda"):
        of_shared_prefix(plan, 9, packed=False)


def test_a_mask_of_positions_shares():
    plan = sl.plan(**SIZES, mask=lambda b, h, i, j: j <= i, score=sl.softcap(5.0), shared_prefix=np.int64(128))
    assert plan.shared_prefix == 128
