"""The bits of `sl.ARITHMETIC = 3`: a hash of the results of some 350 problems, kept in golden.json.

    python tests/golden.py            compares, on every vector unit of this machine
    python tests/golden.py --write    writes the file anew: only where the arithmetic is meant to change

Inputs come from integers alone, so that no library's random numbers matter. Units that share a class of bits share a
hash.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["SPEEDLIGHT_TUNING"] = "0"  # schedules are as they ship
sys.path.insert(0, str(Path(__file__).with_name("support")))

import ml_dtypes
import numpy as np
from problems import CODES, DTYPES, digest

import speedlight as sl
from speedlight.arrays.dtypes import CODES as DTYPES_OF_CODES
from speedlight.arrays.dtypes import scales_of
from speedlight.host.machine import isa_named, runnable_isas

FILE = Path(__file__).with_name("golden.json")
# q_heads, kv_heads, q_len, k_len, head_dim, value_dim: three vectors of queries, one, a tail of everything, several
# spans
SHAPES = {
    "square": (2, 2, 150, 150, 64, 64),
    "tails": (4, 2, 37, 131, 17, 33),
    "spans": (1, 1, 20, 2100, 32, 16),
    "decode": (4, 2, 2, 1300, 48, 64),
}
Case = tuple[str, str, Callable[[], tuple[np.ndarray, ...]]]


def numbers(seed: int, shape: tuple[int, ...], dtype: str, size: float = 2.0) -> np.ndarray:
    """Values of a bell-like shape between ±4 · size, by SplitMix64: sums of four uniform numbers."""
    count = math.prod(shape)
    x = np.arange(1, 4 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        seed * 0x632BE59BD9B4E019 % (1 << 64)
    )
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    uniform = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1.0
    values = uniform.reshape(4, count).sum(axis=0) * size / 2
    return values.reshape(shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def qkv(dtype: str, shape: tuple[int, ...], batch: int = 1, seed: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    h, g, n, m, d, dv = shape
    sizes = ((batch, h, n, d), (batch, g, m, d), (batch, g, m, dv))
    return tuple(numbers(seed + i, x, dtype) for i, x in enumerate(sizes))  # type: ignore[return-value]


def _flags(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return numbers(seed, shape, "float64") > -0.5


def _ids(n: int) -> np.ndarray:
    return np.arange(n) * 7 // n


# of a shape: what is given beside q, k and v
OPTIONS: dict[str, Callable[[tuple[int, ...]], dict[str, Any]]] = {
    "full": lambda s: {},
    "causal": lambda s: {"causal": True},
    "top-left": lambda s: {"causal": "top-left"},
    "placed": lambda s: {"causal": True, "q_start": 1024 + s[3] // 2, "k_start": 1024},
    "negative": lambda s: {"scale": -0.25, "causal": True},
    "large": lambda s: {"scale": 1e7},
    "sinks": lambda s: {"sink_logits": [0.5 - h for h in range(s[0])], "causal": True},
    "window": lambda s: {"window": (50, 3)},
    "prefix": lambda s: {"mask": sl.prefix(20) | sl.causal()},
    "documents": lambda s: {"mask": sl.documents(_ids(max(s[2], s[3]))), "causal": True},
    "dilated": lambda s: {"mask": sl.dilated(3)},
    "dense mask": lambda s: {"mask": _flags((1, s[0], s[2], s[3]), 90)},
    "alibi": lambda s: {"score": sl.alibi([2.0 ** -(h + 1) for h in range(s[0])]), "causal": True},
    "softcap": lambda s: {"score": sl.softcap(3.0)},
    "dense bias": lambda s: {"score": numbers(91, (s[2], s[3]), "float32")},
    "relative": lambda s: {
        "score": sl.relative_bias(numbers(92, (s[0], 2 * max(s[2], s[3]) - 1), "float32")),
        "sink_logits": [0.0] * s[0],
    },
    "functions": lambda s: {
        "score": [_functions, sl.softcap(8.0)],
        "mask": lambda b, h, i, j: (i * 7 + j * 3 + h) % 5 != 0,
    },
}


def _functions(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return sl.where(
        (i + j) % 4 == 0, sl.exp(sl.minimum(s, 1.0)) + sl.sigmoid(s), sl.log2(1.5 + sl.abs(s)) - sl.sqrt(sl.abs(s))
    )


def _call(dtype: str, shape: tuple[int, ...], options: dict[str, Any], **how: Any) -> tuple[np.ndarray, ...]:
    return sl.attention(*qkv(dtype, shape, **how), return_lse=True, **options)


def plain() -> Iterator[Case]:
    """Every option on every shape and dtype."""
    for dtype in DTYPES:
        for name, shape in SHAPES.items():
            for option, given in OPTIONS.items():
                yield f"{option}, {name}", dtype, lambda d=dtype, s=shape, g=given: _call(d, s, g(s))


def laid_out() -> Iterator[Case]:
    """Layouts, lengths, strides and values that are special."""
    shape = SHAPES["tails"]
    for dtype in DTYPES:
        q, k, v = qkv(dtype, shape, batch=3)
        yield (
            "blhd",
            dtype,
            lambda a=(q, k, v): sl.attention(*(x.swapaxes(1, 2) for x in a), layout="blhd", return_lse=True),
        )
        yield "packed", dtype, lambda a=(q, k, v): _packed(*a)
        lengths = {"q_lengths": [37, 0, 20], "k_lengths": [131, 64, 20], "return_lse": True}
        yield "lengths", dtype, lambda a=(q, k, v), o=lengths: sl.attention(*a, causal=True, **o)
        yield "strided", dtype, lambda a=(q, k, v): sl.attention(*(x[..., ::-1] for x in a), return_lse=True)
        yield "special", dtype, lambda a=(q, k, v): _special(*a)
        # where all bits of a sum are seen, of weights that are not summed exactly
        near = {"scale": 1.0, "score": lambda s, b, h, i, j: s - 12, "return_lse": True}
        yield "lse near zero", dtype, lambda a=(q, k, v), o=near: sl.attention(*a, **o)
        yield (
            "tiny",
            dtype,
            lambda a=(q, k, v), d=dtype: sl.attention(a[0], a[1], a[2] * a[2].dtype.type(_tiny(d)), return_lse=True),
        )


def _packed(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    q, k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])[: x.shape[2]] for x in arrays)
    cu = {"cu_seqlens_q": [0, 5, 5, 37], "cu_seqlens_k": [0, 60, 61, 131]}
    return sl.attention(q, k, v, layout="lhd", causal=True, return_lse=True, **cu)


def _tiny(dtype: str) -> float:
    return {"float32": 1e-38, "float64": 1e-307, "float16": 1e-5, "bfloat16": 1e-38}[dtype]


def _special(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, ...]:
    """NaN and infinities at keys that some queries see and some do not."""
    k, v = k.copy(), v.copy()
    k[0, 0, 110], v[0, 1, 120], v[1, 0, 100, 3], v[2, 1, 64] = np.nan, np.inf, -np.inf, np.nan
    return sl.attention(q, k, v, causal=True, return_lse=True)


def cached() -> Iterator[Case]:
    """Caches in uneven chunks, pools, and pages."""
    options: dict[str, dict[str, Any]] = {
        "cache": {},
        "cache, mask": {"mask": sl.dilated(2)},
        "cache, score": {"score": sl.alibi([0.5, 0.25, 0.125, 0.0625])},
        "cache, sinks": {"sink_logits": [0.0, 1.0, 2.0, 3.0]},
    }
    rings = {"window": {"window": 40}, "window, first kept": {"window": 150, "keep_first": 4}}
    for dtype in (*DTYPES, *CODES):
        for name, given in options.items():
            yield name, dtype, lambda d=dtype, g=given: _through_cache(d, {"capacity": 1400}, g)
        for name, sizes in rings.items():
            yield name, dtype, lambda d=dtype, s=sizes: _through_cache(d, s, {})
        yield "pool", dtype, lambda d=dtype: _through_pool(d)
        if dtype not in CODES:
            for size in (16, 5):
                yield f"pages of {size}", dtype, lambda d=dtype, n=size: _paged(d, n)
    for codes in CODES:
        of = f"bfloat16 over {codes}"
        for name, given in options.items():
            yield name, of, lambda d=codes, g=given: _through_cache(d, {"capacity": 1400}, g, "bfloat16")
        sizes = rings["window, first kept"]
        yield "window, first kept", of, lambda d=codes, s=sizes: _through_cache(d, s, {}, "bfloat16")
        yield "pool", of, lambda d=codes: _through_pool(d, "bfloat16")
        if DTYPES_OF_CODES[codes].bits == 8:
            for dtype in ("float32", "bfloat16"):
                yield f"latents under {dtype}", codes, lambda d=codes, q=dtype: _latents(d, q)


def _taken(dtype: str, queries: str | None) -> str:
    """Returns the dtype of what a cache is given."""
    return queries or ("float32" if dtype in CODES else dtype)


def _through_cache(
    dtype: str, sizes: dict[str, Any], options: dict[str, Any], queries: str | None = None
) -> tuple[np.ndarray, ...]:
    h, g, d, dv = 4, 2, 40, 33
    cache = sl.KVCache(layers=1, batch=2, kv_heads=g, head_dim=d, value_dim=dv, dtype=dtype, **sizes)
    found: list[np.ndarray] = []
    for step, n in enumerate((300, 1, 1, 17, 800, 3, 1)):
        q, k, v = qkv(_taken(dtype, queries), (h, g, n, n, d, dv), batch=2, seed=10 * step)
        found.extend(cache.attend(0, q, k, v, return_lse=True, **options))
    return tuple(found)


def _latents(dtype: str, queries: str) -> tuple[np.ndarray, ...]:
    """Codes in two blocks of columns, and numbers beside them."""
    h, latent, d = 4, 200, 221
    cache = sl.KVCache(layers=1, kv_heads=1, head_dim=d, value_dim=latent, latent=True, capacity=1400, dtype=dtype)
    found: list[np.ndarray] = []
    for step, n in enumerate((300, 1, 17, 800, 1)):
        q, k, _ = qkv(queries, (h, 1, n, n, d, 1), seed=10 * step)
        found.extend(cache.attend(0, q, k, return_lse=True))
    return tuple(found)


def _through_pool(dtype: str, queries: str | None = None) -> tuple[np.ndarray, ...]:
    h, g, d, dv = 4, 2, 40, 33
    pool = sl.PagePool(layers=1, pages=40, page_size=32, kv_heads=g, head_dim=d, value_dim=dv, dtype=dtype)
    sequences, found = [pool.sequence() for _ in range(3)], []
    for step, new in enumerate(([40, 1, 300], [1, 1, 1], [0, 20, 5], [1, 1, 1])):
        q, k, v = qkv(_taken(dtype, queries), (h, g, sum(new), sum(new), d, dv), seed=10 * step)
        q, k, v = (np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in (q, k, v))
        found.extend(pool.attend(0, sequences, q, k, v, new_lengths=new, return_lse=True))
        if step == 1:
            sequences[0] = sequences[2].fork()
    return tuple(found)


def _paged(dtype: str, size: int) -> tuple[np.ndarray, ...]:
    q = numbers(1, (2, 4, 3, 40), dtype)
    k, v = numbers(2, (60, size, 2, 40), dtype), numbers(3, (60, size, 2, 33), dtype)
    table = (np.arange(2 * 25) * 17 % 60).reshape(2, 25)
    return sl.attention_paged(q, k, v, table, [25 * size, 7 * size + 2], causal=True, return_lse=True)


def cases() -> Iterator[Case]:
    yield from plain()
    yield from laid_out()
    yield from cached()


def class_of(dtype: str, unit: str) -> str:
    """Names the class of bits: bfloat16 by the dot instruction, and by tiles, has bits of its own.

    dtype: of a case, which has codes behind that of queries.
    """
    queries, _, codes = dtype.partition(" over ")
    dot = isa_named(unit).dot(queries, codes=scales_of(codes or None, latent=False))
    return f"{dtype}, {'dot' if dot is True else dot}" if dot else dtype


def mismatches(known: dict[str, str], unit: str) -> list[str]:
    """The cases whose bits on a vector unit are not those of the file; new ones are entered into `known`."""
    os.environ["SPEEDLIGHT_ISA"] = unit
    wrong = []
    for name, dtype, run in cases():
        if isa_named(unit).asked and "bfloat16" not in dtype:  # all else is as on another unit
            continue
        key = f"{class_of(dtype, unit)}: {name}"
        found = digest(run())
        if known.setdefault(key, found) != found:
            wrong.append(key)
    return wrong


def main() -> int:
    known = {} if "--write" in sys.argv else json.loads(FILE.read_text())
    before = len(known)
    units = [x.name for x in runnable_isas() if not x.asked or x.dot("bfloat16") == "odd"]
    wrong = [f"{unit}: {x}" for unit in units for x in mismatches(known, unit)]
    print("\n".join(wrong) or f"{len(known)} hashes, the same bits on {', '.join(units)}")
    if "--write" in sys.argv and not wrong:
        FILE.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
    elif len(known) != before:
        wrong.append("cases that the file does not have")
        print(wrong[-1])
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
