"""sl.padding(): masks of tokenizers, against the reference, and what a mask of a wrong shape is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import FULL
from problems import qkv
from tolerance import assert_accurate

import speedlight as sl
from speedlight.tools.formula import read_formula

pytestmark = pytest.mark.usefixtures("one_width")  # kernels of few shapes: engines' tests have the others
N = 300
LEFT, RIGHT, HOLES = np.ones((3, 2, N), bool)
LEFT[0, :170] = LEFT[1, :1] = False
RIGHT[0, 290:] = RIGHT[1, 5:] = False
HOLES[0, 3:250] = HOLES[1, ::7] = False
MASKS = {"left": LEFT, "right": RIGHT, "holes": HOLES}


def arrays(rng, n=N, dtype="float32"):
    return qkv(rng, dtype, 2, 4, 2, n, N, 16, 16)


@pytest.mark.parametrize("name", MASKS)
def test_against_the_reference(isa, one_width, rng, name):
    q, k, v = arrays(rng)
    mask = sl.padding(MASKS[name].astype(np.int64))
    hidden = ~MASKS[name]
    want, _ = assert_accurate(q, k, v, mask=mask, causal=True)
    assert_accurate(q, k, v, mask=mask, causal=True, layout="bhld", dropout=0.25, seed=3)
    k, v = k.copy(), v.copy()
    for x in (k, v):
        x.swapaxes(1, 2)[hidden] = np.nan  # hidden keys do not exist
    assert sl.attention(q, k, v, mask=mask, causal=True).tobytes() == want.tobytes()
    first = MASKS[name].argmax(axis=1)
    for item in range(2):
        assert (want[item, :, : first[item]] == 0).all() and (want[item, :, first[item] :] != 0).any()


def test_right_padding_is_lengths_and_a_bool_array(rng):
    q, k, v = arrays(rng)
    got = sl.attention(q, k, v, mask=sl.padding(RIGHT))
    assert got.tobytes() == sl.attention(q, k, v, k_lengths=[290, 5]).tobytes()
    assert got.tobytes() == sl.attention(q, k, v, mask=RIGHT[:, None, None]).tobytes()


@pytest.mark.parametrize("make", [np.array, torch.tensor, list, sl.table], ids=["numpy", "torch", "lists", "table"])
def test_whatever_holds_it(rng, make):
    q, k, v = arrays(rng)
    want = sl.attention(q, k, v, mask=sl.padding(LEFT))
    for dtype in (bool, np.int64, np.uint8, np.int32):
        assert sl.attention(q, k, v, mask=sl.padding(make(LEFT.astype(dtype).tolist()))).tobytes() == want.tobytes()


def test_the_mask_is_copied(rng):
    q, k, v = arrays(rng)
    mine = LEFT.copy()
    mask = sl.padding(mine)
    before = sl.attention(q, k, v, mask=mask)
    mine[:] = False
    assert sl.attention(q, k, v, mask=mask).tobytes() == before.tobytes()


def test_tiles_that_are_hidden_whole_are_skipped():
    sizes = {"batch": 2, "q_heads": 1, "q_len": 1024, "k_len": 1024, "head_dim": 16}
    mask = np.ones((2, 1024), np.int64)
    mask[0, :512] = mask[1, 256:] = 0
    plan, whole = sl.plan(**sizes, mask=sl.padding(mask), exact=True), sl.plan(**sizes)
    assert plan.tiles_skipped == 10 / 16 * whole.tiles_full and plan.tiles_mixed == 0
    assert plan.visible_pairs == 1024 * (512 + 256)


def test_of_a_call_with_positions_of_its_own(rng):
    """Shards of the keys, and packed sequences: entries are of absolute positions."""
    q, k, v = qkv(rng, "float32", 2, 2, 2, 3, 1100, 8, 8)
    mask = np.ones((2, 1100), bool)
    mask[0, :1030] = False
    shard = {"q_start": 1097, "mask": sl.padding(mask), "k_start": 1024}
    want, lse = assert_accurate(q, k[:, :, 1024:], v[:, :, 1024:], **shard)
    first = {"q_start": 1097, "mask": sl.padding(mask[:, :1024])}
    out, logs = sl.attention(q, k[:, :, :1024], v[:, :, :1024], **first, return_lse=True)
    assert (out[0] == 0).all() and np.isinf(logs[0]).all()
    merged, _ = sl.merge([out, want], [logs, lse])
    assert np.abs(merged - sl.attention(q, k, v, mask=sl.padding(mask))).max() < 1e-6


def test_a_cache_sees_what_comes_after_the_mask(rng):
    """The mask of the prompts serves all steps, and a window that forgets."""
    q, k, v = arrays(rng)
    prompt = sl.padding(LEFT[:, :200])
    whole = LEFT.copy()
    whole[:, 200:] = True
    for window in (None, 64) if FULL else (64,):
        cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=16, capacity=N, window=window)
        steps = [slice(0, 150), slice(150, 200), *(slice(n, n + 1) for n in range(200, 210)), slice(210, N)]
        got = [cache.attend(0, q[:, :, x], k[:, :, x], v[:, :, x], mask=prompt) for x in steps]
        mask = sl.padding(whole) if window is None else sl.padding(whole) & sl.window(63, 0)
        assert np.concatenate(got, axis=2).tobytes() == sl.attention(q, k, v, causal=True, mask=mask).tobytes()


def test_a_pool_takes_it_by_the_place_in_the_list(rng):
    q, k, v = arrays(rng)
    pool = sl.PagePool(layers=1, pages=40, page_size=16, kv_heads=2, head_dim=16)
    sequences = [pool.sequence(), pool.sequence()]
    packed = [np.concatenate([x[0], x[1]], axis=1).swapaxes(0, 1) for x in (q, k, v)]
    got = pool.attend(0, sequences, *packed, new_lengths=[N, N], mask=sl.padding(LEFT))
    want = sl.attention(q, k, v, causal=True, mask=sl.padding(LEFT))
    assert got.swapaxes(0, 1).tobytes() == np.concatenate(list(want), axis=1).tobytes()
    with pytest.raises(sl.ArgumentError, match=r"\(at least 2, at most 640\) in this call; got \(1, 300\)"):
        pool.attend(0, sequences, *(x[:2] for x in packed), new_lengths=[1, 1], mask=sl.padding(LEFT[:1]))


WRONG = [
    (LEFT[:1], r"attention_mask: expected shape \(batch, k_len\) = \(2, 300\) in this call; got \(1, 300\). Write"),
    (LEFT[:, 1:], r"= \(2, 300\) in this call; got \(2, 299\)"),
    (np.ones((2, N + 1), bool), r"= \(2, 300\) in this call; got \(2, 301\)"),
]


@pytest.mark.parametrize(("mask", "message"), WRONG)
def test_masks_of_other_shapes(rng, mask, message):
    q, k, v = arrays(rng)
    with pytest.raises(sl.ArgumentError, match=message):
        sl.attention(q, k, v, mask=sl.padding(mask) & sl.causal())
    with pytest.raises(sl.ArgumentError, match=message):
        sl.plan(batch=2, q_heads=1, q_len=9, k_len=N, head_dim=8, mask=sl.padding(mask))


@pytest.mark.parametrize("rows", [1, 3])
def test_ids_of_other_batches(rng, rows):
    """documents() as padding(); a table that it was given serves calls of any batch."""
    ids = sl.table(np.zeros((rows, N), np.int64), "ids")
    mask, (q, k, v) = sl.documents(ids), arrays(rng)
    message = rf"ids: expected shape \(batch, length\) = \(2, any\) in this call; got \({rows}, 300\). Give ids"
    with pytest.raises(sl.ArgumentError, match=message):
        sl.attention(q, k, v, mask=mask & sl.causal())
    with pytest.raises(sl.ArgumentError, match=message):
        sl.plan(batch=2, q_heads=1, q_len=9, head_dim=8, mask=mask)
    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=16, capacity=N)
    with pytest.raises(sl.ArgumentError, match=message):
        cache.attend(0, q, k, v, mask=mask)
    free = sl.attention(q, k, v, mask=lambda b, h, i, j: ids[b // 2, i] == ids[b // 2, j])
    assert cache.length(0) == 0 and free.tobytes() == sl.attention(q, k, v).tobytes()


def test_masks_that_are_none():
    for given, message in (
        (LEFT * 1.0, "expected bool, or the integers 0 and 1; got dtype float64. Use attention_mask != 0"),
        (LEFT[:, None, None], r"expected 2 dimensions, \(batch, k_len\); got shape \(2, 1, 1, 300\). A bool array"),
        ([[0, 1, 2]], r"expected 0 \(hidden\) and 1 \(visible\); got 2"),
        ([[0], [1, 1]], "expected an array that NumPy can read"),
        (None, "attention_mask: expected"),
    ):
        with pytest.raises(sl.Error, match=message):
            sl.padding(given)


def test_caches_and_packed_sequences_of_other_batches(rng):
    q, k, v = (x[:, :, :10] for x in arrays(rng))
    cache = sl.KVCache(layers=1, batch=2, kv_heads=2, head_dim=16, capacity=N)
    with pytest.raises(sl.ArgumentError, match=rf"= \(2, at most {N}\) in this call; got \(1, 10\)"):
        cache.attend(0, q, k, v, mask=sl.padding(LEFT[:1, :10]))
    longer = np.ones((2, N + 1), bool)  # than a sequence can become: it is of something else
    with pytest.raises(sl.ArgumentError, match=rf"= \(2, at most {N}\) in this call; got \(2, {N + 1}\)"):
        cache.attend(0, q, k, v, mask=sl.padding(longer))
    assert cache.length(0) == 0
    pool = sl.PagePool(layers=1, pages=2, page_size=16, kv_heads=2, head_dim=16)
    with pytest.raises(sl.ArgumentError, match=r"at most 32\) in this call; got \(1, 33\)"):
        pool.attend(0, [pool.sequence()], *(x[0].swapaxes(0, 1) for x in (q, k, v)), mask=sl.padding(longer[:1, :33]))
    packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    with pytest.raises(sl.ArgumentError, match=r"= \(2, at least 6\) in this call; got \(2, 5\)"):
        sl.attention(*packed, layout="lhd", cu_seqlens_q=[0, 4, 10], mask=sl.padding(LEFT[:, :5]))


def test_no_keys_and_no_items(rng):
    q, k, v = arrays(rng)
    assert (sl.attention(q, k[:, :, :0], v[:, :, :0], mask=sl.padding(LEFT[:, :0])) == 0).all()
    assert sl.attention(q[:0], k[:0], v[:0], mask=sl.padding(LEFT[:0])).shape == (0, 4, N, 16)


def test_it_can_be_typed():
    typed = read_formula("--mask", "causal() & padding([[0, 1, 1]])", "bhij")
    assert repr(typed) == repr(sl.causal() & sl.padding([[0, 1, 1]]))
    assert "padding" not in repr(read_formula("--mask", "padding([[0, 1]]) | (i == j)", "bhij"))
