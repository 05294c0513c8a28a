"""keep(): an accepted path of a speculated tree stays, with the bits of a cache into which only it was appended."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from conftest import FULL
from pools import KINDS, check_accounts, made, packed
from problems import qkv, taken

import speedlight as sl

PATHS = ([0, 2, 5], [], [3], [0, 1, 2], [1, 2, 3, 30, 31, 33])  # of trees of 40 tokens
FEW = KINDS if FULL else ("float32", "int8", "int4")  # of which a step is computed
RINGS = {"window": 60, "keep_first": 20}


def cache_of(dtype, **sizes):
    sizes = {"capacity": 400} | sizes
    return sl.KVCache(layers=2, kv_heads=2, head_dim=16, value_dim=17, dtype=dtype, **sizes)


def tokens(rng, dtype, batch, n):
    return qkv(rng, taken(dtype), batch, 4, 2, n, n, 16, 17)


def state(cache):
    return [(cache.lengths(n), cache.keys(n).tobytes(), cache.values(n).tobytes()) for n in range(cache.layers)]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("sizes", [{}, RINGS], ids=["cache", "ring"])
def test_a_path_is_as_if_nothing_else_had_been_appended(rng, dtype, sizes):
    """Of sequences of unequal lengths, over borders of blocks and round a ring; then the next step, in every layer."""
    used, fresh = (cache_of(dtype, batch=2, **sizes | {"capacity": 600}) for _ in range(2))
    first = [490 if sizes else 200, 90]  # a ring of 384 begins at 128
    _, k, v = tokens(rng, dtype, 2, first[0])
    for layer in (0, 1):
        for cache in (used, fresh):
            cache.append(layer, k, v, new_lengths=first)
    for path in PATHS:
        paths = [path, path[1:]]
        start = used.lengths(0)
        for layer in (0, 1):
            _, k, v = tokens(rng, dtype, 2, 40)
            used.append(layer, k, v)
            some = [np.zeros_like(x[:, :, :6]) for x in (k, v)]
            for to, x in zip(some, (k, v), strict=True):
                for item, mine in enumerate(paths):
                    to[item, :, : len(mine)] = x[item, :, mine].swapaxes(0, 1)
            fresh.append(layer, *some, new_lengths=[len(x) for x in paths])
        used.keep(paths, start=start)
        assert state(used) == state(fresh)
        for layer in (0, 1) if dtype in FEW else ():
            q, k, v = tokens(rng, dtype, 2, 1)
            assert used.attend(layer, q, k, v).tobytes() == fresh.attend(layer, q, k, v).tobytes()


@pytest.mark.parametrize("dtype", KINDS)
def test_a_path_in_pages_that_others_share(rng, dtype):
    """Whoever shares them keeps what it has; who is alone needs no page, and gives back what it no longer needs."""
    pool = made(dtype, layers=2, pages=30)
    a = pool.sequence()
    _, k, v = packed(rng, dtype, 300)
    for layer in (0, 1):
        pool.append(layer, [a], k[:70], v[:70])
    for shared in (True, False):
        for path in PATHS if shared or FULL else PATHS[::2]:
            others, start = [a.fork()] * shared, a.length()
            before = [x.tobytes() for other in others for x in (other.keys(1), other.values(1))]
            for layer in (0, 1):
                pool.append(layer, [a], k[100:140], v[100:140])
            others += [a.fork()] * shared
            tree = [x(1).tobytes() for x in (a.keys, a.values)] * shared
            want = [
                np.concatenate([x(1)[:, :start], x(1)[:, [start + n for n in path]]], 1) for x in (a.keys, a.values)
            ]
            a.keep(path, start=start)
            assert [x(1).tobytes() for x in (a.keys, a.values)] == [x.tobytes() for x in want]
            assert a.length(0) == a.length(1) == start + len(path) and len(a.pages) == -(-a.length() // 16)
            assert [x.tobytes() for other in others[:1] for x in (other.keys(1), other.values(1))] == before
            assert [x.tobytes() for other in others[1:] for x in (other.keys(1), other.values(1))] == tree
            check_accounts(pool, [a, *others])
            others.clear()
            check_accounts(pool, [a])
    q, k, v = packed(rng, dtype, 1)
    fresh = pool.sequence()
    keys, values = a.keys(0).swapaxes(0, 1), a.values(0).swapaxes(0, 1)
    if dtype in FEW and taken(dtype) == dtype:
        pool.append(0, [fresh], keys, values)
        assert pool.attend(0, [a], q, k, v).tobytes() == pool.attend(0, [fresh], q, k, v).tobytes()


def test_a_full_pool_says_so_and_keeps_what_it_has(rng):
    pool = made(pages=3)
    a = pool.sequence()
    _, k, v = packed(rng, "float32", 48)
    pool.append(0, [a], k, v)
    a.keep([1, 3], start=20)  # alone, in place
    assert a.keys(0)[0].tobytes() == k[[*range(20), 21, 23], 0].tobytes() and pool.free_pages == 1
    pool.append(0, [a], k[:20], v[:20])
    a.keep(range(10), start=22)  # 32 tokens: as many as two pages hold
    assert len(a.pages) == 2 and pool.free_pages == 1
    a.truncate(22)
    b = a.fork()
    pool.append(0, [pool.sequence()], k[:0], v[:0])
    c = pool.sequence()
    pool.append(0, [c], k[:1], v[:1])
    before = a.keys(0).tobytes(), a.pages
    with pytest.raises(sl.CacheFull, match="keep: 1 pages are needed, 0 of 3 are free") as caught:
        a.keep([1], start=20)
    assert (caught.value.needed, caught.value.free) == (1, 0) and (a.keys(0).tobytes(), a.pages) == before
    del b  # and a is alone again
    a.keep([1], start=20)
    check_accounts(pool, [a, c])


def test_a_tree_that_a_ring_has_no_room_for(rng):
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=60)
    _, k, v = qkv(rng, "float32", 1, 4, 2, 500, 500, 16, 16)
    cache.append(0, k[:, :, :100], v[:, :, :100])
    cache.append(0, k, v)
    before = state(cache)
    for path in ([1], [400]):  # of the first, what it would see is gone; of the second, where it goes
        with pytest.raises(sl.ArgumentError, match="start: expected tokens that are still there; of sequence 0"):
            cache.keep(path, start=100)
    assert state(cache) == before
    cache.keep([1, 90], start=450)
    assert cache.lengths(0) == (452,)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=16, window=60, keep_first=20)
    cache.append(0, k, v)
    with pytest.raises(sl.ArgumentError, match="start: expected tokens that are still there"):
        cache.keep([1, 120], start=10)  # where it goes is kept, what goes there is gone
    cache.keep([1, 8], start=10)
    assert cache.keys(0).tobytes() == k[:, :, [*range(10), 11, 18]].tobytes()


CALLS = [
    (([0, 10], 20), "indices: expected less than 10, the tokens of sequence 0 from start=20 on in every layer; got 10"),
    (([0, 2, 2], 20), "indices: expected ints from 0 on that rise; got 2 after 2 of sequence 0"),
    (([2, 1], 20), "indices: expected ints from 0 on that rise; got 1 after 2"),
    (([-1], 20), "indices: expected ints from 0 on that rise; got -1"),
    (([0], 31), "start: expected 0 to 30, the tokens of sequence 0 in every layer; got 31"),
    (([0], [20]), r"start: expected one int, or 2 \(one per sequence\); got 1"),
    (([0], 20.0), "start: expected one int"),
    (([[0], [1], [2]], 20), "indices: expected ints, or a list of them for each of 2 sequences; got 3 lists"),
    (([[0], [1.5]], 20), "indices: expected an int"),
    ((3, 20), "indices: expected ints"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS)
def test_wrong_paths_are_named(rng, arguments, message):
    cache = cache_of("float32", batch=2)
    _, k, v = tokens(rng, "float32", 2, 30)
    for layer in (0, 1):
        cache.append(layer, k, v)
    cache.append(0, k, v)  # as many as in every layer are counted
    before, (indices, start) = state(cache), arguments
    with pytest.raises(sl.Error, match=message):
        cache.keep(indices, start=start)
    assert state(cache) == before
    cache.keep(np.array([[0, 2], [1, 3]]), start=[20, 5])
    assert cache.lengths(0) == cache.lengths(1) == (22, 7)


def test_nobody_else_writes_meanwhile(rng, monkeypatch):
    pool, cache = made(), cache_of("float32")
    a, x = pool.sequence(), packed(rng, "float32", 30)[1:]
    pool.append(0, [a], *x)
    chunk = tokens(rng, "float32", 1, 30)[1:]
    for layer in (0, 1):
        cache.append(layer, *chunk)
    for owner, write in (
        (pool, lambda: pool.append(0, [a], *x)),
        (cache, lambda: cache.append(1, *chunk)),
    ):
        storage, refused = owner._storage, []

        def refuse(write=write, refused=refused):
            with pytest.raises(sl.CacheBusy):
                write()
            refused.append(True)

        def moving(*given, move=type(storage).move, storage=storage, refuse=refuse):
            thread = threading.Thread(target=refuse)
            thread.start()
            thread.join()
            move(storage, *given)

        monkeypatch.setattr(storage, "move", moving)
        (a if owner is pool else cache).keep([3], start=4)
        assert refused
    assert a.length() == cache.length(0) == cache.length(1) == 5
