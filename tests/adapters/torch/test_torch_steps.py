"""Steps of caches that machine code reads and runs: the bits, lengths and errors of Python's way."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from adapters.torch.test_torch_read import by_python, counts, same
from injection import interrupted, needs_places, places, spread
from repeated import kept

import speedlight as sl
from speedlight.cpu.runtime.repeating import functions
from speedlight.kv import running
from speedlight.problem.windows import SPARE

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

__all__ = ["counts"]
DIM = 32
SEEN = np.arange(3000) > np.array([[0], [7]])


def made(batch=1, dtype="float32", **more):
    sizes = {"capacity": 3000} | more
    return sl.KVCache(layers=2, batch=batch, kv_heads=2, head_dim=DIM, dtype=dtype, **sizes)


def tokens(batch, n, heads=2, dtype=torch.float32):
    return torch.randn(batch, heads, n, DIM).to(dtype)


def steps(cache, batch, count, new=1, q_heads=4, dtype=torch.float32, options=None, read=False):
    """What a cache says to `count` chunks, and their arguments."""
    torch.manual_seed(count)
    chunks = [(tokens(batch, new, q_heads, dtype), tokens(batch, new, 2, dtype), tokens(batch, new, 2, dtype))
              for _ in range(count)]  # fmt: skip
    with torch.no_grad():
        return [cache.attend(1, *(chunk[:1] if read else chunk), **(options or {})) for chunk in chunks]


# the batch, tokens that are there, and those of a chunk
CASES = {
    "one": {"batch": 1, "past": 5},
    "from nothing": {"batch": 1, "past": 0},
    "three": {"batch": 3, "past": 70},
    "past a span": {"batch": 1, "past": 1019},
    "in parts": {"batch": 1, "past": 2600},
    "chunks": {"batch": 2, "past": 33, "new": 5},
    "scaled": {"batch": 1, "past": 20, "options": {"scale": 0.5}},
    "bfloat16": {"batch": 2, "past": 20, "dtype": "bfloat16"},
    "codes": {"batch": 1, "past": 20, "dtype": "int8"},
    "read": {"batch": 2, "past": 20, "read": True},
    "a pattern": {"batch": 2, "past": 20, "options": {"mask": sl.window(9, None)}},
    "padding on the left": {"batch": 2, "past": 20, "options": {"mask": sl.padding(SEEN)}},
    "a function": {"batch": 1, "past": 20, "new": 3, "options": {"score": sl.softcap(2.0)}},
    "a ring and a function": {"batch": 1, "past": 200, "of": {"window": 50}, "options": {"score": sl.softcap(2.0)}},
    "a ring": {"batch": 1, "past": 200, "of": {"window": 50}},
    "a ring and first tokens": {"batch": 1, "past": 20, "of": {"window": 50, "keep_first": 4}},
}


@pytest.mark.parametrize("name", CASES)
def test_bits_and_lengths_are_those_of_pythons_way(counts, name):
    case = {"batch": 1, "new": 1, "dtype": "float32", "options": None, "read": False, "of": {}} | CASES[name]
    batch, kind = case["batch"], torch.bfloat16 if case["dtype"] == "bfloat16" else torch.float32
    past = tokens(batch, case["past"], dtype=kind)

    def run():
        cache = made(batch, case["dtype"], **case["of"])
        cache.append(1, past, past)
        given = case["new"], 4, kind, case["options"], case["read"]
        return steps(cache, batch, 12, *given), cache.lengths(1), cache.keys(1), cache.values(1)

    before = counts.ran
    got, want = run(), by_python(run)
    assert counts.ran - before >= 8
    for a, b in zip(got[0], want[0], strict=True):
        same(a, b)
    assert got[1] == want[1]
    for a, b in zip(got[2:], want[2:], strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_ring_knows_what_machine_code_wrote_over(counts):
    """Steps go round the ring: truncate() refuses a length whose next query would see what they wrote over."""
    cache, past = made(window=50, capacity=None), torch.ones(1, 2, 200, DIM)
    for layer in (0, 1):
        cache.append(layer, past, past)
    before = counts.ran
    steps(cache, 1, 300)
    assert counts.ran - before >= 290 and cache.lengths(1) == (500,)
    with pytest.raises(sl.ArgumentError, match="forgotten what token 150 would see"):
        cache.truncate(150)
    assert cache.lengths(1) == (500,)


def test_sequences_of_different_lengths(counts):
    def run():
        cache, past = made(3), torch.ones(3, 2, 40, DIM)
        cache.append(0, past, past, new_lengths=[40, 1, 17])
        cache.append(1, past, past, new_lengths=[3, 40, 0])
        return steps(cache, 3, 8), cache.lengths(0), cache.lengths(1)

    before = counts.ran
    got = run()
    assert counts.ran - before >= 5
    want = by_python(run)
    for a, b in zip(got[0], want[0], strict=True):
        same(a, b)
    assert got[1:] == want[1:] == ((40, 1, 17), (11, 48, 8))


def test_caches_of_a_form_share_what_is_known(counts):
    first, second, third = made(), made(), made(capacity=2000)
    steps(first, 1, 6)
    before, want = counts.ran, by_python(lambda: steps(made(), 1, 6))
    for a, b in zip(steps(second, 1, 6), want, strict=True):
        same(a, b)
    assert counts.ran - before == 6 and first.length(1) == second.length(1) == 6
    known = len(kept("step"))
    steps(second, 1, 2)
    assert len(kept("step")) == known
    steps(third, 1, 2)  # of another layout
    assert len(kept("step")) == known + 1


def test_a_full_cache_is_as_it_was(counts):
    cache = made()
    past = tokens(1, 2990)
    cache.append(1, past, past)
    steps(cache, 1, 10)
    held = cache.keys(1)
    before = counts.ran
    with pytest.raises(sl.CacheFull, match="0 of 3,?000 are free"):
        steps(cache, 1, 1)
    assert counts.ran == before and cache.length(1) == 3000
    np.testing.assert_array_equal(cache.keys(1), held)


def test_others_are_pythons(counts):
    """Arguments that are not alike, a writer that is busy, a length that another writes meanwhile."""
    cache = made()
    steps(cache, 1, 6)
    q, k = tokens(1, 1, 4), tokens(1, 1)
    before = counts.ran
    with torch.no_grad():
        for arguments, error in (((q, k, k.double()), sl.ArgumentTypeError), ((q, k[:, :1], k), sl.ArgumentError),
                                 ((q, k.expand(2, -1, -1, -1), k), sl.ArgumentError)):  # fmt: skip
            with pytest.raises(error):
                cache.attend(1, *arguments)
        assert counts.ran == before and cache.length(1) == 6
        assert len(cache.attend(1, q, k, k, return_lse=True)) == 2
        assert counts.ran == before + 1
        given = torch.empty_like(q)
        assert cache.attend(1, q, k, k, out=given) is given
        cache._claims.add(1)
        with pytest.raises(sl.CacheBusy):
            cache.attend(1, q, k, k)
        cache._claims.clear()
    assert counts.ran == before + 1 and cache.length(1) == 8
    with torch.no_grad():
        cache.attend(1, q, k, k)
    assert counts.ran == before + 2 and cache.length(1) == 9


def test_interrupts_leave_a_cache_as_it_was(counts, monkeypatch):
    """A signal that came while machine code ran is seen right after it."""
    here, stops = functions(), []
    repeat = here.repeat

    def interrupted(*arguments):
        found = repeat(*arguments)
        if stops and found is not None and type(found[1]) is list:
            stops.clear()
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(here, "repeat", interrupted)
    cache = made()
    steps(cache, 1, 6)
    stops.append(1)
    with pytest.raises(KeyboardInterrupt):
        steps(cache, 1, 1)
    assert cache.length(1) == 6 and not cache._claims and not stops
    want = by_python(lambda: steps(cache.copy(), 1, 3))
    before = counts.ran
    for a, b in zip(steps(cache, 1, 3), want, strict=True):
        same(a, b)
    assert counts.ran == before + 3


def test_a_cache_is_not_kept_alive(counts):
    cache = made()
    steps(cache, 1, 6)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_sequences_without_tokens_are_read_as_by_python(counts):
    cache, past, q = made(3), tokens(3, 4), tokens(3, 1, 4)
    with torch.no_grad():
        cache.append(1, past, past)
        for _ in range(4):
            cache.attend(1, q)
        before = counts.ran
        cache.truncate(0)
        cache.append(1, past, past, new_lengths=[4, 3, 0])
        out = cache.attend(1, q)
    assert before >= 2 and counts.ran == before and not out[2].any() and out[:2].any()


def test_what_others_append_meanwhile_stays(counts, monkeypatch):
    cache, q = made(), tokens(1, 1, 4)
    mine, theirs = tokens(1, 1), tokens(1, 1)
    steps(cache, 1, 6)
    transact = running.transact

    def late(*given):
        monkeypatch.setattr(running, "transact", transact)
        cache.append(1, theirs, theirs)
        return transact(*given)

    monkeypatch.setattr(running, "transact", late)
    with torch.no_grad():
        cache.attend(1, q, mine, mine)
    assert running.transact is transact and cache.length(1) == 8
    np.testing.assert_array_equal(cache.keys(1)[:, :, 6:], torch.cat([theirs, mine], 2).numpy())


@needs_places
def test_interrupts_leave_what_a_ring_promised(counts):
    """A chunk of more tokens than are to spare writes over some that truncate() may bring back."""
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=DIM, window=50)
    chunks = [(tokens(1, 20, 4), tokens(1, 20), tokens(1, 20)) for _ in range(25)]
    room = ("kv/running.py", "kv/transaction.py", "engine/storage.py")

    def step():
        cache.attend(0, *chunks[-1])

    with torch.no_grad():
        for chunk in chunks:
            cache.attend(0, *chunk)
        assert cache.length(0) > cache._ring.size
        found = places(step, room)
        oldest = cache.length(0) - cache._ring.size + SPARE + 50
        for n in spread(found, 12):
            want = cache.copy()
            assert interrupted(step, n, room) and cache.lengths(0) == want.lengths(0)
            again = cache.copy()
            want.truncate(oldest)
            again.truncate(oldest)
            np.testing.assert_array_equal(again.keys(0), want.keys(0))
