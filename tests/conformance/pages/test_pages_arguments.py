"""What a pool is asked for wrongly is named, and leaves it as it was."""

from __future__ import annotations

import numpy as np
import pytest
from pools import made, packed

import speedlight as sl

CALLS = [
    (lambda p, s, q, k, v: p.attend(1, [s], q, k, v), "layer: expected 0 to 0; got 1"),
    (lambda p, s, q, k, v: p.attend(0, [s, s], q, k, v, new_lengths=[2, 1]), "sequences: expected each sequence once"),
    (lambda p, s, q, k, v: p.attend(0, [3], q, k, v), "sequences: expected sequences of this pool"),
    (
        lambda p, s, q, k, v: p.attend(0, [made().sequence()], q, k, v),
        "sequences: expected sequences of this pool; got one of another",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k), "v: expected k and v together"),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:2], k, v), "k: expected 2 tokens"),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v[:2]), "v: expected 3 tokens"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v, new_lengths=[4]),
        "new_lengths: expected 1 ints, one per sequence, that add up to the 3",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s, p.sequence()], q, k, v),
        "new_lengths: expected 2 ints, one per sequence, that add up to the 3 tokens; got None, which is one each",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s, p.sequence()], q),
        "q_lengths: expected 2 ints, one per sequence, that add up to the 3 queries; got None, which is one each",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, new_lengths=[3], q_lengths=[3]),
        "new_lengths: expected None without k and v",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v, new_lengths=[3.0]), "new_lengths: expected 1 ints"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k.astype(np.float64), v),
        "k: expected dtype float32, as the cache has; got float64",
    ),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q.astype(np.float16), k, v),
        "q: expected dtype float32, as the cache has; got float16",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:, :3], k, v), "q: expected a multiple of 2 heads, the kv heads of"),
    (lambda p, s, q, k, v: p.attend(0, [s], q[:, :, :3], k, v), "q: expected head_dim 16"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v.swapaxes(0, 1)),
        r"v: .* got \(2, 3, 17\)\. Heads come after tokens: v\.swapaxes\(0, 1\)",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k[:, :1], v), r"k: expected shape \(total new, 2, 16\)"),
    (
        lambda p, s, q, k, v: p.attend(0, [s], q, k, v, mask=np.ones((1, 1, 3, 3), bool)),
        "expected a function or pattern for layout='lhd'",
    ),
    (lambda p, s, q, k, v: p.attend(0, [s], q, k, v, out=np.zeros((1, 4, 17), np.float32)), "out: expected shape"),
    (lambda p, s, q, k, v: s.truncate(6), "length: expected 0 to 5"),
    (lambda p, s, q, k, v: made(page_size=20), "page_size: expected a multiple of 16; got 20. Use 32."),
    (lambda p, s, q, k, v: made(pages=0), "pages: expected a size from 1"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_every_failing_call_leaves_the_pool_as_it_was(rng, call, message):
    pool = made()
    sequence = pool.sequence()
    q, k, v = packed(rng, "float32", 5)
    pool.append(0, [sequence], k, v)
    before = sequence.keys(0).tobytes(), sequence.values(0).tobytes(), sequence.pages, pool.free_pages
    with pytest.raises(sl.Error, match=message):
        call(pool, sequence, *(x[:3] for x in (q, k, v)))
    assert (sequence.keys(0).tobytes(), sequence.values(0).tobytes(), sequence.pages, pool.free_pages) == before
    pool.attend(0, [sequence], q, k, v)


def test_counts_are_pythons_integers():
    """Sums of NumPy's narrow integers wrap: 3 · 100 would be 44."""
    pool = sl.PagePool(layers=1, pages=64, page_size=16, kv_heads=1, head_dim=4)
    sequences, x = [pool.sequence() for _ in range(3)], np.ones((300, 1, 4), np.float32)
    counts = [np.int8(100)] * 3
    pool.append(0, sequences, x, x, new_lengths=counts)
    assert [s.length() for s in sequences] == [100, 100, 100]
    out = np.zeros_like(x)
    with pytest.raises(sl.ArgumentError, match="add up to the 44 tokens"):
        pool.attend(0, sequences, x[:44], new_lengths=counts, out=out[:44])
    assert not out.any()
