"""Arguments of any type for calls that keep something: an error of ours that changes nothing, or an answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from pools import check_accounts
from problems import qkv
from tolerance import plain
from wrong import WRONG

import speedlight as sl

OPTIONS = dict.fromkeys(("new_lengths", "q_lengths", "scale", "mask", "score", "sink_logits", "out"))
CACHE = {"layers": 1, "batch": 2, "kv_heads": 2, "head_dim": 16, "capacity": 20}
SIZES = {"keep_first": 0, "latent": False}
POOL = {"layers": 1, "pages": 6, "page_size": 16, "kv_heads": 2, "head_dim": 16}


class Given(NamedTuple):
    """A call, its right arguments, and what it must leave as it was if it fails."""

    function: Callable[..., Any]
    right: dict[str, Any]
    state: Callable[[], Any]


def check_any_type(make: Callable[[], Given]) -> None:
    """Every wrong object as every argument, one at a time; never an error of somebody else's."""
    function, right, state = make()
    for name in right:
        for wrong in WRONG:
            before = state()
            try:
                function(**(right | {name: wrong}))
            except sl.Error as error:
                assert str(error) and state() == before, f"{name}: {type(wrong).__name__}"
            else:
                function, right, state = make()


def stored(keys: Any) -> bytes:
    return plain(keys.cpu() if hasattr(keys, "cpu") else keys).tobytes()


def of_caches(of: Callable[[Any], Any] = np.asarray, **more: Any) -> dict[str, Callable[[], Given]]:
    """Methods of a cache of one token; `of`: arrays as its device has them."""
    q, k, v = (of(x) for x in qkv(np.random.default_rng(0), "float32", 2, 4, 2, 1, 1, 16, 16))
    step = {"layer": 0, "q": q, "k": k, "v": v, "return_lse": False} | OPTIONS
    calls: dict[str, dict[str, Any]] = {
        "attend": step,
        "append": {n: step[n] for n in ("layer", "k", "v", "new_lengths")},
        "truncate": {"length": 1},
        "keep": {"indices": [0], "start": 0},
        "select": {"batch_indices": [0]},
        "lengths": {"layer": 0},
        "length": {"layer": 0, "item": 0},
        "keys": {"layer": 0},
        "save": {"path": "x"},
    }

    def make(method: str) -> Given:
        cache = sl.KVCache(**CACHE, **more)
        cache.append(0, k, v)
        state = lambda: (stored(cache.keys(0)), cache.lengths(0), cache._claims == set())  # noqa: E731
        return Given(getattr(cache, method), calls[method], state)

    return {method: functools.partial(make, method) for method in calls}


def of_pools() -> dict[str, Callable[[], Given]]:
    """Methods of a pool with one sequence of five tokens, and of the sequence."""
    q, k, v = (x[0].swapaxes(0, 1) for x in qkv(np.random.default_rng(0), "float32", 1, 4, 2, 5, 5, 16, 16))
    step = {"layer": 0, "q": q[:1], "k": k[:1], "v": v[:1], "return_lse": False} | OPTIONS
    calls: dict[str, dict[str, Any]] = {
        "attend": step,
        "append": {n: step[n] for n in ("layer", "k", "v", "new_lengths")},
        "truncate": {"length": 3},
        "keep": {"indices": [0], "start": 3},
        "length": {"layer": 0},
        "keys": {"layer": 0},
    }

    def make(method: str) -> Given:
        pool = sl.PagePool(**POOL)
        sequence = pool.sequence()
        pool.append(0, [sequence], k, v)

        def state() -> Any:
            check_accounts(pool, [sequence])
            return sequence.keys(0).tobytes(), pool.free_pages, pool._claims == set()

        if "k" in calls[method]:
            return Given(getattr(pool, method), {"sequences": [sequence]} | calls[method], state)
        return Given(getattr(sequence, method), calls[method], state)

    return {method: functools.partial(make, method) for method in calls}


def of_pages() -> Given:
    """append_paged() to pages of the caller's."""
    k_pages, v_pages, k, v = (
        np.ones(n, np.float32) for n in ((6, 4, 2, 16), (6, 4, 2, 17), (2, 2, 3, 16), (2, 2, 3, 17))
    )
    given = {"block_table": [[0, 5], [2, 1]], "k_lengths": [3, 0], "k": 2 * k, "v": 2 * v, "new_lengths": None}
    given |= {"k_pages": k_pages, "v_pages": v_pages, "layout": "bhld", "engine": None}
    return Given(sl.append_paged, given, lambda: (k_pages.tobytes(), v_pages.tobytes()))


def of_sizes(owner: Callable[..., Any], sizes: dict[str, Any], *others: str) -> Given:
    return Given(owner, sizes | dict.fromkeys(others) | {"dtype": "float32", "device": "cpu"}, lambda: None)


def beside_a_sequence() -> Given:
    """A pool's step whose second sequence is another thing."""
    pool = sl.PagePool(**POOL)
    sequence, x = pool.sequence(), np.ones((2, 2, 16), np.float32)
    attend = lambda second: pool.attend(0, [sequence, second], x, x, x)  # noqa: E731
    return Given(attend, {"second": None}, lambda: check_accounts(pool, [sequence]))


KEPT: dict[str, Callable[[], Given]] = {
    **{f"KVCache.{name}": make for name, make in of_caches().items()},
    **{f"PagePool.{name}": make for name, make in of_pools().items()},
    "PagePool.attend, several": beside_a_sequence,
    "KVCache": functools.partial(of_sizes, sl.KVCache, CACHE | SIZES, "value_dim", "window"),
    "PagePool": functools.partial(of_sizes, sl.PagePool, POOL | {"latent": False}, "value_dim"),
    "KVCache.load": lambda: Given(sl.KVCache.load, {"path": "nowhere"}, lambda: None),
    "append_paged": of_pages,
}
