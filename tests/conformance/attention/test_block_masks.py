"""sl.blocks() shows the bits of a dense mask, and its hidden blocks cost nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from problems import qkv

import speedlight as sl
from speedlight.problem.problem import PART
from speedlight.torch import attention

pytestmark = pytest.mark.usefixtures("one_width")
NAN = np.nan


def dense(table, size, q_len, k_len):
    """The mask of the last q_len of k_len positions, entry by entry."""
    rows, columns = np.arange(k_len - q_len, k_len) // size[0], np.arange(k_len) // size[1]
    return np.asarray(table)[..., rows[:, None], columns]


def random_blocks(rng, size, length, lead=(), share=0.3):
    return rng.random((*lead, *(-(-length // n) for n in size))) < share


SHAPES = [
    ((64, 64), ()),
    ((128, 128), (1,)),
    ((100, 100), (4,)),
    ((256, 32), (2, 1)),
    ((7, 300), (1, 4)),
    ((1, 1), (2, 4)),
]


@pytest.mark.each("dtype")
@pytest.mark.parametrize(("size", "lead"), SHAPES, ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 300])
def test_the_same_bits_as_a_dense_mask(isa, rng, dtype, size, lead, q_len):
    """In panels and in rows, with a score and without; a row may see nothing."""
    q, k, v = qkv(rng, dtype, 2, 4, 2, q_len, 700, 16, 16)
    table = random_blocks(rng, size, 700, lead)
    mask = sl.blocks(table, size if size[0] != size[1] else size[0])
    cases: list[dict[str, Any]] = [{}, {"score": sl.softcap(2.0)}, {"causal": True}]
    for options in cases:
        out, lse = sl.attention(q, k, v, mask=mask, return_lse=True, **options)
        want, want_lse = sl.attention(q, k, v, mask=dense(table, size, q_len, 700), return_lse=True, **options)
        assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes()


@pytest.mark.parametrize(("size", "lead"), SHAPES, ids=str)
def test_gradients_have_the_same_bits(rng, size, lead):
    given = [torch.from_numpy(x) for x in qkv(rng, "float32", 2, 4, 2, 300, 700, 16, 16)]
    table = torch.from_numpy(random_blocks(rng, size, 700, lead))
    grads = []
    for mask in (sl.blocks(table, size), torch.from_numpy(dense(table, size, 300, 700))):
        leaves = [x.clone().requires_grad_() for x in given]
        attention(*leaves, mask=mask).sum().backward()
        grads.append([x.grad.numpy().tobytes() for x in leaves])
    assert grads[0] == grads[1]


def test_a_tensor_of_blocks_is_followed(rng):
    q, k, v = qkv(rng, "float32", 1, 2, 2, 256, 256, 16, 16)
    table = torch.tensor([[True, False], [True, True]])
    mask = sl.blocks(table, 128)
    for _ in range(2):
        want = sl.attention(q, k, v, mask=dense(table, (128, 128), 256, 256))
        assert sl.attention(q, k, v, mask=mask).tobytes() == want.tobytes()
        table[0, 1] = True


@pytest.mark.parametrize("size", [64, 100, 128, 256])
def test_hidden_blocks_are_never_read(isa, rng, size):
    """Keys and values of blocks that no query sees are poison, in panels, in rows, and in gradients."""
    columns = -(-700 // size)
    hidden = np.arange(columns) % 2 == 1
    table = np.tile(~hidden, (columns, 1))
    q, k, v = qkv(rng, "float32", 1, 4, 2, 700, 700, 16, 16)
    whole = [n for n in range(0, 700, PART) if hidden[n // size] and hidden[min(n + PART - 1, 699) // size]]
    assert whole
    mask = sl.blocks(table, size)
    for q_len in (700, 2):
        rows = np.ascontiguousarray(q[:, :, -q_len:])
        want = sl.attention(rows, k, v, mask=mask, return_lse=True)
        d_out = np.ones_like(want[0])
        grads = sl.attention_backward(rows, k, v, *want, d_out, mask=mask)
        bad_k, bad_v = k.copy(), v.copy()
        for n in whole:  # parts of keys that a trimmed tile leaves out
            bad_k[:, :, n : n + PART], bad_v[:, :, n : n + PART] = NAN, NAN
        out = sl.attention(rows, bad_k, bad_v, mask=mask, return_lse=True)
        assert [x.tobytes() for x in out] == [x.tobytes() for x in want]
        again = sl.attention_backward(rows, bad_k, bad_v, *want, d_out, mask=mask)
        assert [x.tobytes() for x in again[:3]] == [x.tobytes() for x in grads[:3]]


@pytest.mark.parametrize(
    ("size", "skipped", "share", "backward"),
    [(64, 0.80, 0.104, 0.15), (100, 0.77, 0.125, 0.16), (128, 0.90, 0.1, 0.12), (256, 0.90, 0.1, 0.11)],
)
def test_a_tenth_of_the_blocks_is_a_tenth_of_the_work(rng, size, skipped, share, backward):
    """At 8,192 tokens: of tiles of 128 keys, and of keys computed after tiles are trimmed."""
    n = -(-8192 // size)
    table = np.zeros((n, n), bool)
    for row in table:
        row[rng.choice(n, round(n * 0.1), replace=False)] = True
    sizes: dict[str, Any] = {"q_heads": 4, "kv_heads": 1, "q_len": 8192, "head_dim": 64}
    full, plan = sl.plan(**sizes), sl.plan(**sizes, mask=sl.blocks(table, size))
    tiles = plan.tiles_full + plan.tiles_mixed + plan.tiles_skipped
    assert plan.tiles_skipped >= skipped * tiles
    assert plan.tile_flops <= share * full.tile_flops
    assert plan.tiles_mixed == 0 or size == 100
    back, of_blocks = (sl.plan(**sizes, backward=True, mask=x) for x in (None, sl.blocks(table, size)))
    assert of_blocks.tile_flops <= backward * back.tile_flops


@pytest.mark.parametrize("q_len", [1, 8])
def test_decoding_skips_hidden_blocks(rng, q_len):
    sizes: dict[str, Any] = {"q_heads": 4, "kv_heads": 1, "q_len": q_len, "k_len": 8192, "head_dim": 64}
    table = np.zeros((64, 64), bool)
    table[:, rng.choice(64, 6, replace=False)] = True
    full, plan = sl.plan(**sizes), sl.plan(**sizes, mask=sl.blocks(table, 128))
    assert plan.tiles_full * 64 == full.tiles_full * 6 and plan.tiles_mixed == 0


def test_blocks_fit_the_call(rng):
    q, k, v = qkv(rng, "float32", 2, 4, 2, 256, 256, 16, 16)
    for shape, message in (
        ((3, 4, 2, 2), r"table: expected blocks for each of the call's 2 items; got those of 3"),
        ((2, 2, 2), "table: expected an entry for each of q's 4 heads; got 2"),
        ((2, 2, 2, 2), "table: expected an entry for each of q's 4 heads; got 2"),
        ((1, 2), r"table: expected index 1 from 0 to 0 where the key is visible; got 1 .*Give rows and columns"),
    ):
        with pytest.raises(sl.ArgumentError, match=message):
            sl.attention(q, k, v, mask=sl.blocks(np.ones(shape, bool), 128))
