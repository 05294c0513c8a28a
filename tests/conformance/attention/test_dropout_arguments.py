"""Seeds of dropout, which prepare nothing anew, and what is said of wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
from pools import kept_steps
from problems import qkv
from repeated import forget, kept

import speedlight as sl
from speedlight.problem.options import Options

# --- seeds


def test_keys_know_probabilities_and_no_seeds():
    """Of options; None where something is to be said of them."""

    def key(dropout, seed=None):
        return Options(dropout=dropout, seed=seed).key()

    assert key(0.0) == key(0) == key(-0.0, "any") == Options().key()
    assert key(0.1, 0) == key(0.1, 2**64 - 1) and key(1, 0) == key(1.0, 7)
    assert len({key(p, 0) for p in (0.0, 0.1, 0.25, 1.0)}) == 4
    for wrong in ((0.1, None), (0.1, 2**64), (0.1, True), (0.1, np.uint64(3)), (2.0, 0), (-0.5, 0), (True, 0)):
        assert key(*wrong) is None
    assert key(float("nan"), 0) is key(np.float64(0.1), 0) is key(None) is None


@pytest.mark.parametrize("q_len", [60, 1])
def test_another_seed_prepares_nothing(rng, q_len):
    """A training loop has a new one in every step: memos of prepared calls hold none of them."""
    forget()
    q, k, v = qkv(rng, "float32", 1, 2, 2, q_len, 200, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=200)
    cache.append(0, k, v)
    pool = sl.PagePool(layers=1, pages=13, page_size=16, kv_heads=2, head_dim=16)
    sequence, rows = pool.sequence(), [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    pool.append(0, [sequence], *rows[1:])
    forget()
    first = {}
    for turn in range(2):
        for seed in (0, 1, 2**63, 2**64 - 1):
            options = {"dropout": 0.3, "seed": seed}
            out = sl.attention(q, k, v, **options).tobytes()
            assert first.setdefault(seed, out) == out, turn
            assert cache.attend(0, q, **options).tobytes() == out
            got = np.ascontiguousarray(pool.attend(0, [sequence], rows[0], **options).swapaxes(0, 1))
            assert got.tobytes() == out
            assert sl.attention(q, k, v, dropout=0.3, seed=np.uint64(seed)).tobytes() == out
    assert len(set(first.values())) == 4
    assert len(kept()) == 1
    for owner in (cache, pool):
        assert len({x.call for x in kept_steps(owner) if x.call is not None}) == 1


# --- errors

WRONG = (
    ({"dropout": 1.5, "seed": 0}, sl.ArgumentError, r"dropout: expected a probability from 0 to 1; got 1.5\."),
    ({"dropout": -0.1, "seed": 0}, sl.ArgumentError, "dropout: expected a probability from 0 to 1; got -0.1"),
    ({"dropout": float("nan"), "seed": 0}, sl.ArgumentError, "dropout: expected a probability from 0 to 1; got nan"),
    ({"dropout": "0.1", "seed": 0}, sl.ArgumentTypeError, "dropout: expected a probability from 0 to 1; got str"),
    ({"dropout": None}, sl.ArgumentTypeError, "dropout: expected a probability from 0 to 1; got NoneType"),
    ({"dropout": True, "seed": 0}, sl.ArgumentTypeError, "dropout: expected a probability from 0 to 1; got bool"),
    ({"dropout": 0.1}, sl.ArgumentError, "seed: expected an int beside dropout=.* got None"),
    ({"dropout": 0.1, "seed": 1.0}, sl.ArgumentTypeError, "seed: expected an int; got float"),
    ({"dropout": 0.1, "seed": True}, sl.ArgumentTypeError, "seed: expected an int; got bool"),
    ({"dropout": 0.1, "seed": -1}, sl.ArgumentError, r"seed: expected 0 to 2\^64 - 1; got -1"),
    ({"dropout": 0.1, "seed": 2**64}, sl.ArgumentError, "seed: expected an int of at most 64 bits"),
)


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
def test_wrong_arguments(rng, options, kind, message):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 3, 5, 16, 16)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, capacity=5)
    cache.append(0, k, v)
    pool = sl.PagePool(layers=1, pages=3, page_size=16, kv_heads=2, head_dim=16)
    sequence, rows = pool.sequence(), [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v)]
    pool.append(0, [sequence], *rows[1:])
    sizes = {"q_heads": 2, "q_len": 3, "head_dim": 16}
    for call in (
        lambda: sl.attention(q, k, v, **options),
        lambda: sl.reference.attention(q, k, v, **options),
        lambda: sl.plan(**sizes, **options),
        lambda: cache.attend(0, q, **options),
        lambda: pool.attend(0, [sequence], rows[0], **options),
        lambda: sl.attention_paged(q, *(x[None] for x in rows[1:]), [[0]], [5], **options),
    ):
        with pytest.raises(kind, match=message):
            call()


def test_positions_beyond_32_bits(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 2, 1024, 16, 16)
    dropout = {"dropout": 0.1, "seed": 0}
    sl.attention(q, k, v, k_start=2**32 - 1024, **dropout)
    for where in ({"k_start": 2**32}, {"q_start": 2**32 - 1}, {"k_start": 2**32 - 1024, "q_start": 2**32}):
        with pytest.raises(sl.ArgumentError, match=r"dropout: expected 0 where .* at positions from 2\^32 on; got pos"):
            sl.attention(q, k, v, **where, **dropout)
        sl.attention(q, k, v, **where)


def test_keep_mask_says_what_is_wrong():
    keep = sl.reference.keep_mask
    assert keep(0.5, 1, 0, 0, [-3, 7], np.arange(9)[::2]).shape == (2, 5)
    whole = keep(0.5, 1, 0, 0, range(-3, 8), range(9))
    assert (keep(0.5, 1, 0, 0, [-3, 7], [8, 1]) == whole[[0, 10]][:, [8, 1]]).all()
    for change, message in (
        ({"j": [2**32]}, r"j: expected positions from 0 to 2\^32 - 1"),
        ({"j": [-1]}, "j: expected positions from 0"),
        ({"i": [0.5]}, "i: expected an int; got float"),
        ({"b": -1}, "b: expected 0 to"),
        ({"h": "x"}, "h: expected an int"),
        ({"dropout": 2}, "dropout: expected a probability"),
        ({"seed": None}, "seed: expected an int"),
    ):
        with pytest.raises(sl.Error, match=message):
            keep(**{"dropout": 0.5, "seed": 1, "b": 0, "h": 0, "i": [0], "j": [0]} | change)
