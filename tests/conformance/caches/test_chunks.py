"""Tokens in any chunks, of sequences of unequal lengths, in a cache and in a pool: the bits of one call over them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from kept import KINDS, Kept, in_one_call, padded
from pools import KINDS as DTYPES
from pools import packed
from problems import CODES

import speedlight as sl

DROPOUT = {"dropout": 0.3, "seed": 2**63 + 5}
MASKED = {"mask": sl.window(200, 0) | sl.prefix(3)}
OPTIONS = [{}, {"score": sl.softcap(2.0)}, MASKED, {"sink_logits": [0.5, -1, 2, 0]}, DROPOUT]
DIMS = [(64, 64), (33, 40), (16, 5)]
CHUNKS = ([300, 7, 1], [1, 1, 1], [5, 1, 200], [1, 0, 1], [126, 2, 130], [1, 1, 1], [16, 3, 700], [1, 1, 1], [1, 1, 1])


@pytest.mark.units("kind")
@pytest.mark.each("dtype", "dims", "options")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", ["cache", "pool"])
def test_any_chunks_have_the_bits_of_one_call(isa, one_width, rng, kind, dtype, dims, options):
    """Pages are in any order; dropout knows a sequence by its place. A short run has one mask, score or dropout for
    each dtype.
    """
    totals = np.sum(CHUNKS, axis=0)
    tokens = [packed(rng, dtype, n, *dims) for n in totals]
    want, want_lse = in_one_call(dtype, tokens, **options)
    for chunks in (CHUNKS, [totals.tolist()]) if dtype in DTYPES[4:] else (CHUNKS,):
        kept = Kept(kind, 3, dtype, *dims, page_size=48) if kind == "pool" else Kept(kind, 3, dtype, *dims)
        if kept.pool:
            rng.shuffle(kept.pool._journal.free)
        at = np.zeros(3, int)
        for counts in chunks:
            here = [slice(a, a + n) for a, n in zip(at, counts, strict=True)]
            given = (np.concatenate([x[n][a] for x, a in zip(tokens, here, strict=True)]) for n in range(3))
            out, lse = kept.attend(*given, counts, **options)
            for item, (first, last) in enumerate(itertools.pairwise(np.cumsum([0, *counts]))):
                rows = want[item, :, here[item]], want_lse[item, :, here[item]]
                assert out[first:last].swapaxes(0, 1).tobytes() == rows[0].tobytes(), f"{counts} of {item} at {at}"
                assert lse[:, first:last].tobytes() == rows[1].tobytes(), f"{counts} of {item} at {at}"
            at += counts


ERRORS = {
    "cache": [
        ([11, 12], "q_lengths: expected at most 11, the tokens of sequence 1 by now; got 12"),
        ([13, 1], "q_lengths: expected lengths from 0 to 12, the queries in q; got 13"),
        ([1], "q_lengths: expected 2 lengths"),
        (None, r"q: expected 2 tokens, as k has; got 12 .* give q_lengths=\."),
    ],
    "pool": [
        ([12], "q_lengths: expected at most 11, the tokens of sequence 0 by now; got 12"),
        ([2], "q_lengths: expected 1 ints, one per sequence, that add up to the 12 queries"),
        (None, r"k: expected 12 tokens, as q and new_lengths have; got 2\. For other queries .* give q_lengths=\."),
    ],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_queries_that_are_not_those_of_the_new_tokens(rng, one_kernel, dtype, kind):
    """More of them ask for earlier tokens again, fewer for the last ones: the bits that these had, or would have."""
    whole, kept = Kept(kind, 2, dtype), Kept(kind, 2, dtype)
    tokens = [packed(rng, "float32", 60) for _ in range(2)]
    want, want_lse = whole.attend(*(np.concatenate(x) for x in zip(*tokens, strict=True)), [60, 60])

    def part(which, ends, counts):
        return np.concatenate([x[which][a - n : a] for x, a, n in zip(tokens, ends, counts, strict=True)])

    at, first = [30, 30], [30, 30]
    kept.append(part(1, at, first), part(2, at, first), first)
    for new, asked in (([2, 2], [5, 5]), ([3, 0], [4, 1]), ([9, 12], [1, 1]), ([0, 0], [6, 0]), ([4, 4], [0, 0]),
                       ([12, 12], [12, 12]), ([0, 0], [50, 25])):  # fmt: skip
        before, at = at, [a + n for a, n in zip(at, new, strict=True)]
        given = part(0, at, asked), part(1, at, new), part(2, at, new), new
        for _ in range(2):  # as it is, and when the step is known
            out, lse = kept.attend(*given, asked)
            for item, (low, high) in enumerate(itertools.pairwise(np.cumsum([0, *asked]))):
                rows = slice(60 * item + at[item] - asked[item], 60 * item + at[item])
                assert out[low:high].tobytes() == want[rows].tobytes()
                assert lse[:, low:high].tobytes() == want_lse[:, rows].tobytes()
            kept.truncate(before)
            if new == [2, 2] and not kept.pool:  # it must be said each time
                with pytest.raises(sl.ArgumentError, match="give q_lengths="):
                    kept.cache.attend(0, padded(given[0], asked), *(padded(x, new) for x in given[1:3]))
        kept.append(*given[1:])
    few, (q, k, v) = Kept(kind, 2, dtype), (np.concatenate([x[n][:12] for x in tokens]) for n in range(3))
    few.append(part(1, [9, 9], [9, 9]), part(2, [9, 9], [9, 9]), [9, 9])
    state, new = few.state(), [np.concatenate([x[:2], x[12:14]]) for x in (k, v)]

    def attend(asked):
        if few.pool:
            return few.pool.attend(0, few.sequences[:1], q[:12], *(x[:2] for x in new), q_lengths=asked)
        rows = (x.reshape(2, -1, *x.shape[1:]).swapaxes(1, 2) for x in (q, *new))
        return few.cache.attend(0, *rows, q_lengths=asked)

    for asked, message in ERRORS["pool" if few.pool else "cache"]:
        with pytest.raises(sl.Error, match=message):
            attend(asked)
        assert few.state() == state


def test_of_those_who_see_everything_there_may_be_any_number(rng):
    """Without new tokens."""
    for kind in KINDS:
        kept, (q, k, v) = Kept(kind, 2), packed(rng, "float32", 18)
        kept.append(k, v, [9, 9])
        if kept.pool:
            some = kept.pool.attend(0, kept.sequences, q[:16], q_lengths=[12, 4])
            assert some.tobytes() == kept.pool.attend(0, kept.sequences, q[:16], new_lengths=[12, 4]).tobytes()
        else:
            some = kept.cache.attend(0, q[:12].swapaxes(0, 1)[None].repeat(2, 0), q_lengths=[12, 4])
            assert not some[1, :, 4:].any()
        assert np.isfinite(some).all()


@pytest.mark.parametrize("dtype", [*DTYPES, *CODES])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_lies_past_the_last_token_changes_nothing(rng, dtype, rows):
    """Tokens that truncate() has dropped stay in memory: of a block that is read whole, none of them counts."""
    q, k, v = (x.swapaxes(0, 1)[None] for x in packed(rng, dtype, 64, 32, 32))
    caches = [sl.KVCache(layers=1, kv_heads=2, head_dim=32, capacity=64, dtype=dtype) for _ in range(2)]
    caches[0].append(0, np.full_like(k, np.nan), np.full_like(v, np.nan))
    caches[0].truncate(0)
    for n in range(41, 56):
        results = []
        for cache in caches:
            cache.truncate(0)
            cache.append(0, k[:, :, :n], v[:, :, :n])
            results.append(cache.attend(0, q[:, :, :rows]).tobytes())
        assert results[0] == results[1]
