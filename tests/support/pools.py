"""Pools of pages as their tests make them, and what must always be so of one."""

from __future__ import annotations

from collections import Counter

from problems import CODES, DTYPES, numpy_dtype, taken

import speedlight as sl
from speedlight.host.memo import VALUE
from speedlight.problem.prepared import Prepared, prepared_calls

KINDS = (*DTYPES, *CODES)


def made(dtype="float32", d=16, dv=17, **sizes):
    return sl.PagePool(
        **(
            {"layers": 1, "pages": 60, "page_size": 16, "kv_heads": 2, "head_dim": d, "value_dim": dv, "dtype": dtype}
            | sizes
        )
    )


def packed(rng, dtype, total, d=16, dv=17):
    kind = numpy_dtype(taken(dtype))
    return [rng.standard_normal((total, heads, dim)).astype(kind) for heads, dim in ((4, d), (2, d), (2, dv))]


def alone(dtype, d, dv, chunks, **options):
    """What a cache of one sequence says to the last chunk."""
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=d, value_dim=dv, capacity=5000, dtype=dtype)
    for q, k, v in chunks:
        out, lse = cache.attend(0, *(x.swapaxes(0, 1)[None] for x in (q, k, v)), return_lse=True, **options)
    return out[0].swapaxes(0, 1), lse[0]


def check_accounts(pool, sequences):
    """Every page is free, kept, or held as often as counted; nobody else has a record; what is indexed is full."""
    held, free, journal = Counter(page for s in sequences for page in s.pages), pool.free_pages, pool._journal
    kept = [page for page, count in journal.others.items() if count < 0]
    assert free == len(journal.free) + len(kept) == pool.pages - len(held)
    assert pool.used_bytes == len(held) * pool.page_bytes
    assert sorted([*held, *journal.free, *kept]) == list(range(pool.pages))
    assert journal.others == {page: held[page] - 1 if held[page] or page in kept else 0 for page in range(pool.pages)}
    assert journal.records.keys() == {s._number for s in sequences} and not journal.unowned and not pool._claims
    assert journal.kept == len(kept) == pool.statistics()["pages_kept"] and set(kept) <= journal.last_use.keys()
    assert not any(journal.contents[page] for page in journal.free) and all(journal.contents[page] for page in kept)
    for s in sequences:  # whoever holds an indexed page holds all of its tokens
        assert not any(journal.contents[page] for page in s.pages[shortest(s) // pool.page_size :])


def shortest(sequence):
    """Returns the tokens that a sequence has in every layer."""
    return min(sequence.length(layer) for layer in range(sequence.pool.layers))


def kept_steps(owner):
    """Returns the steps of a cache or pool that were checked, or prepared for any lengths."""
    return [x for x in kept_calls(owner) if isinstance(x, Prepared)]


def kept_calls(owner):
    """Returns what is kept for caches or pools whose memory has the layout of this one."""
    of = owner._storage.steps
    entries = list(prepared_calls.held.items())
    return [x[VALUE] for key, x in entries if key.place is of or (type(key.place) is tuple and key.place[0] is of)]
