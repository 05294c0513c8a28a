"""Masks and scores on a GPU (R27): every operation, random expressions, integers, dense arrays, tiles left out."""

from __future__ import annotations

import numpy as np
import pytest
import test_integers
import torch
from conftest import FULL
from expressions import LENGTH, masks, scores, wide_integers
from hypothesis import given, settings
from hypothesis import strategies as st
from on_gpu import DTYPES, attention, check, small_blocks, tensor, tiles_computed
from problems import PATTERNS, qkv
from test_operations import ROWS, assert_every_operation, by_rows
from tolerance import assert_within

import speedlight as sl
from speedlight.expressions.program import Program
from speedlight.gpu.tiles import Tile


@settings(max_examples=400 if FULL else 4, deadline=None)
@given(
    mask=st.none() | masks(),
    score=st.none() | scores(),
    causal=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_expressions(mask, score, causal, dtype, seed):
    rng = np.random.default_rng(seed)
    q_len, k_len = int(rng.integers(1, 90)), int(rng.integers(1, 130))
    q, k, v = qkv(rng, dtype, 2, 4, 2, q_len, k_len, 8, 8)
    with small_blocks(Tile(64, 32, 4, 1)), np.errstate(all="ignore"):
        check(q, k, v, mask=mask, score=score, causal=causal, q_start=int(rng.integers(0, 99)), zeros_allowed=True)


@pytest.mark.parametrize("q_len", [2, 70])
def test_dense_arrays(rng, q_len):
    q, k, v = qkv(rng, "float32", 2, 4, 2, q_len, 90, 16, 16)
    seen, bias = rng.random((2, 1, q_len, 90)) < 0.5, rng.standard_normal((4, q_len, 90)).astype(np.float32)
    seen[:, :, :, 32:64] = False
    bias[:, :, 40:] = -np.inf
    want = sl.reference.attention(q, k, v, mask=seen, score=bias)
    bound = sl.reference.error_bound(q, k, v, mask=seen, score=bias, tile=16).out
    with small_blocks():
        assert_within(attention(q, k, v, mask=tensor(seen), score=tensor(bias)).cpu(), want, bound)
        tables = sl.table(seen), sl.table(bias)
        got = attention(
            q,
            k,
            v,
            q_start=0,
            mask=lambda b, h, i, j: tables[0][b, 0 * b, i, j],
            score=lambda s, b, h, i, j: sl.where(tables[1][h, i, j] == -np.inf, -np.inf, s + tables[1][h, i, j]),
        )
        assert_within(got.cpu(), want, bound)


def seen_keys(q_len, k_len, batch=1, **options):
    """Which keys a call sees, [batch, q_len, k_len]."""
    q, k = np.zeros((batch, 1, q_len, 16), np.float32), np.zeros((batch, 1, k_len, 16), np.float32)
    v = np.tile(np.eye(k_len, dtype=np.float32), (batch, 1, 1, 1))
    with small_blocks():
        return attention(q, k, v, **options).cpu().numpy()[:, 0] != 0


def test_every_operation_on_integers():
    """The table of every edge, of 64 bits and of 32."""
    rows, keys, n = len(test_integers.EDGES), len(test_integers.SHIFTS), len(test_integers.SMALL)
    assert seen_keys(rows, keys, q_start=0, mask=lambda b, h, i, j: test_integers.every_operation(i, j)).all()
    for j_too in (False, True):
        assert seen_keys(n, n, q_start=0, mask=test_integers.narrow_case(j_too)).all()


@pytest.mark.parametrize("name", test_integers.TRAPS)
def test_integers_as_in_the_definition(name):
    mask = test_integers.TRAPS[name]
    for q_len in (1, 40):
        assert (seen_keys(q_len, 40, mask=mask, q_start=0)[0] == test_integers.right_of(mask, q_len, 40)).all()


@settings(max_examples=200 if FULL else 8, deadline=None)
@given(wide_integers(3), wide_integers(2), st.sampled_from(["__lt__", "__eq__"]), st.integers(0, LENGTH - 150))
def test_any_integers(x, y, compare, start):
    mask = sl.expression(lambda b, h, i, j: getattr(x(b, h, i, j) + 0 * i, compare)(y(b, h, i, j)))
    try:
        found = seen_keys(40, 130, mask=mask, q_start=start)[0]
    except sl.ExpressionError as error:
        assert "int64 cannot hold" in str(error)
        return
    assert (found == test_integers.right_of(mask, 40, 130, start)).all()


@pytest.mark.parametrize("factor", [1, 64, 1 << 50])
def test_an_index_that_may_be_out_of_range_is_looked_at(factor):
    """Whatever is computed from the entry, and if it is the index of a row that is wrong."""
    ids, grid = sl.table(np.arange(50) % 3, "ids"), sl.table(np.ones((20, 200), bool), "grid")
    for q_len in (1, 40):
        with pytest.raises(sl.ArgumentError, match="ids: expected index 1 from 0 to 49"):
            seen_keys(
                q_len, 130, q_start=0, mask=lambda b, h, i, j: (ids[j] * factor >= 0) & (ids[j] * factor <= 3 * factor)
            )
    if factor == 1:
        with pytest.raises(sl.ArgumentError, match="grid: expected index 1 from 0 to 19"):
            seen_keys(40, 130, q_start=0, mask=lambda b, h, i, j: grid[i, j])


def test_every_operation():
    """The whole table."""
    assert_every_operation(lambda *x, **o: [y.cpu() for y in attention(*x, **o)], by_rows, ROWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles are counted in the interpreter")
@pytest.mark.parametrize("name", ["causal", "window", "prefix", "documents", "square", "wide", "blocks"])
def test_empty_tiles_are_skipped(rng, monkeypatch, name):
    """Those that the bounds say, and no others: the host's look and the kernel's own agree."""
    q, k, v = qkv(rng, "float32", 1, 1, 1, 160, 160, 16, 16)
    seen = np.zeros((160, 160), bool)
    seen[:48, 32:64] = seen[100:, 100:] = True
    square = sl.table(seen)
    if name == "blocks":
        mask = sl.blocks(rng.random((1, 4, 7)) < 0.4, (50, 24))
    elif name == "square":
        mask = sl.expression(lambda b, h, i, j: square[i, j])
    else:
        mask = PATTERNS[name]["mask"] if name in PATTERNS else sl.expression(lambda b, h, i, j: (i // 40) == (j // 40))
    visible = sl.reference.weights(q, k, mask=mask)[0, 0] > 0
    blocks = visible.reshape(10, 16, 10, 16).swapaxes(1, 2)
    some, every = blocks.any(axis=(2, 3)).sum(), blocks.all(axis=(2, 3)).sum()
    with small_blocks():
        mixed, full = tiles_computed(monkeypatch, lambda: check(q, k, v, mask=mask))
        assert (mixed + full, full) == (some, every)
        if name != "square":
            monkeypatch.setattr(Program, "opaque", property(lambda self: True))  # the host looks
            mixed, full = tiles_computed(monkeypatch, lambda: check(q, k, v, mask=mask & (lambda b, h, i, j: j >= -1)))
            assert (mixed + full, full) == (some, every)


@pytest.mark.parametrize("q_len", [2, 70])
def test_index_out_of_range_is_an_error(rng, q_len):
    q, k, v = qkv(rng, "float32", 1, 2, 1, q_len, 90, 16, 16)
    ids = sl.table(np.zeros(50, np.int32), "ids")
    with pytest.raises(
        sl.ArgumentError, match=r"ids: expected index 1 from 0 to 49 where the key is visible; got \d\d"
    ):
        attention(q, k, v, mask=lambda b, h, i, j: ids[j] == 0)
    check(q, k, v, mask=lambda b, h, i, j: (ids[j] == 0) & (j < 50))
