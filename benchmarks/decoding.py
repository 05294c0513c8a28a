"""One token at a time: the rows of `decode`."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from peers import DECODE as PEERS
from peers import DECODE_CODES as PEERS_OF_CODES

import speedlight as sl
from speedlight.arrays.dtypes import CODES, DTYPES, scales_of
from speedlight.host.machine import current_isa
from speedlight.tools.measuring import PEER_SLACK, measure, quantiles, wrong
from speedlight.tools.peers import Asked, Call, usable

# dtype, batch, q_heads, kv_heads, keys, head_dim
Sizes = tuple[Any, int, int, int, int, int]
DECODE: list[Sizes] = [
    (t, 1, 32, 8, n, 128)
    for t in ("float32", "bfloat16", "float16", "int8", "int4")
    for n in (512, 4096, 16384, 32768, 131072)
]
DECODE += [("float8_e4m3fn", 1, 32, 8, n, 128) for n in (4096, 32768, 131072)]
DECODE += [(t, 1, h, 8, 16384, 128) for t in ("float32", "bfloat16", "int8", "int4") for h in (8, 64)]
DECODE += [(t, 16, 32, 8, 4096, 128) for t in ("float32", "bfloat16", "int8", "int4")]
DECODE += [("float32", 16, 32, 8, 512, 64)]
DECODE = [x for x in DECODE if x[0] in {*DTYPES, *CODES}]
# those where other libraries' caches of codes stand beside ours; they take minutes to build and check for many keys
BESIDE_CODES = [(t, 1, 32, 8, n, 128) for t in PEERS_OF_CODES if t in CODES for n in (4096, 32768)]
_OUR_CACHES = "bfloat16", "int8"  # stand beside our other caches of codes


def decode(turns: int, problems: Iterable[Sizes] | None = None) -> Iterator[dict[str, Any]]:
    """One token against a cache, a pool of pages in random order, and the caller's own arrays; beside the peers and a
    plain read. A cache of codes stands beside ours of more bits, too.
    """
    for problem in DECODE if problems is None else problems:
        dtype, batch, q_heads, kv_heads, n, d = problem
        rng = np.random.default_rng(0)
        given = "bfloat16" if dtype in CODES else dtype  # of the queries
        kind = ml_dtypes.bfloat16 if given == "bfloat16" else given
        shapes = ((batch, q_heads, 1, d), (batch, kv_heads, n, d), (batch, kv_heads, n, d))
        q, k, v = (rng.standard_normal(s, dtype=np.float32).astype(kind) for s in shapes)
        name = f"{dtype} B{batch} H{q_heads}/{kv_heads} N{n} d{d} one token"
        cache = _cache(dtype, k, v)
        pool, sequences = _pool(rng, cache, k, v)
        packed = np.ascontiguousarray(q[:, :, 0])
        if refused := _wrong_decode(q, k, v, cache, pool.attend(0, sequences, packed)):
            yield {"name": name, "refused": refused}
            continue
        calls: dict[str, Call] = {
            "cache": functools.partial(cache.attend, 0, q),
            "read": _plain_read(cache.used_bytes),
            "pages of 16": functools.partial(pool.attend, 0, sequences, packed),
        }
        ours: dict[str, Call] = {}
        others: dict[str, Call] = {}
        notes: dict[str, str] = {}
        if dtype not in CODES:
            held = functools.partial(wrong, q=q, k=k, v=v, heads=q_heads, slack=PEER_SLACK)
            others, notes = usable(PEERS, Asked(q, k, v), held)
            calls["arrays"] = functools.partial(sl.attention, q, k, v)
        elif problem in BESIDE_CODES:
            # a peer that is made has been held to its own codes
            others, notes = usable(PEERS_OF_CODES[dtype], Asked(q, k, v), lambda _: None)
            for x in _OUR_CACHES:
                if x != dtype:
                    ours[f"{x} cache"] = functools.partial(_cache(x, k, v).attend, 0, q)
        times = measure(calls | ours | others, turns)
        medians = {x: statistics.median(t) for x, t in times.items()}
        own, read = medians["cache"], medians["read"]
        yield {
            "name": name, "seconds": {x: quantiles(t) for x, t in times.items()}, "bytes_read": cache.used_bytes,
            "tokens": batch / own, "gbytes": cache.used_bytes / own / 1e9, "share_of_read": read / own,
            "share_of_read_arrays": read / medians["arrays"] if "arrays" in medians else None,
            "pages": own / medians["pages of 16"], "peers": {x: medians[x] / own for x in [*ours, *others]},
            "notes": notes,
        }  # fmt: skip


def _cache(dtype: Any, k: np.ndarray, v: np.ndarray) -> sl.KVCache:
    """Returns a cache that holds these tokens."""
    batch, heads, n, d = k.shape
    cache = sl.KVCache(layers=1, batch=batch, kv_heads=heads, head_dim=d, capacity=n, dtype=dtype)
    cache.append(0, k, v)
    return cache


def _plain_read(size: int) -> Call:
    """PyTorch's sum of as many bytes."""
    import torch

    torch.set_num_threads(sl.get_threads())
    return functools.partial(torch.sum, torch.ones(size // 8, dtype=torch.int64))


def _pool(rng: np.random.Generator, cache: Any, k: np.ndarray, v: np.ndarray) -> tuple[Any, list[Any]]:
    """A pool with the same tokens in pages of 16, handed out in random order."""
    batch, heads, n, d = k.shape
    pool = sl.PagePool(layers=1, pages=batch * -(-n // 16), page_size=16, kv_heads=heads, head_dim=d, dtype=cache.dtype)
    rng.shuffle(pool._journal.free)
    sequences = [pool.sequence() for _ in range(batch)]
    for at in range(0, n, 4096):
        for item, sequence in enumerate(sequences):
            pool.append(0, [sequence], *(x[item, :, at : at + 4096].swapaxes(0, 1) for x in (k, v)))
    return pool, sequences


def _wrong_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Any, paged: np.ndarray) -> str | None:
    """Holds the first item to the oracle, and pages and arrays to the bits of the cache."""
    got = cache.attend(0, q)
    if got[:, :, 0].tobytes() != paged.tobytes():
        return "pages have other bits than the cache"
    if cache.dtype in CODES:
        arithmetic = {
            "codes": cache.dtype,
            "dot": current_isa().dot(q.dtype, codes=scales_of(cache.dtype, latent=False)),
        }
        return wrong(got, q, cache.keys(0), cache.values(0), heads=q.shape[1], arithmetic=arithmetic)
    if got.tobytes() != sl.attention(q, k, v).tobytes():
        return "the arrays have other bits than the cache"
    return wrong(got, q, k, v, heads=q.shape[1])
