"""Problems for tests: awkward sizes in one table, and random ones that cover every feature.

Of the package it knows public names alone: tests/same_bits.py makes the same problems in older trees.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from forms import VARIANTS, Form, variant

import speedlight as sl
from speedlight import reference

DTYPES = ("float32", "float64", "float16", "bfloat16")
CODES = ("int8", "float8_e4m3fn", "int4")  # of caches, with scales for each token and head
# a code's dtype, and whether keys are latents
CODE_FORMATS = {
    "int8": ("int8", False),
    "float8": ("float8_e4m3fn", False),
    "int4": ("int4", False),
    "latents of int8": ("int8", True),
    "latents of float8": ("float8_e4m3fn", True),
}
STORAGE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}  # of queries over codes
SCALES = {"int4": np.float16}  # dtypes of scales that are not float32
# head_dim, value_dim: one, odd, below, at and above the register tile and the vector, the sizes models use
DIMS = ((1, 1), (2, 3), (7, 9), (16, 16), (17, 33), (64, 64), (80, 96), (130, 8), (192, 128), (256, 256), (576, 512))
# q_len, k_len: nothing, one, around the panel, the tile and the span
LENGTHS = ((0, 5), (5, 0), (1, 1), (3, 127), (47, 128), (48, 129), (49, 255), (16, 1024), (20, 1025), (100, 2100))

# options of a call or a pass back of two items of 200 queries
PLACES_AND_SCALES: dict[str, dict[str, Any]] = {
    "before the keys": {"causal": True, "q_start": -60},
    "of each": {"causal": True, "q_start": [-300, 191]},
    "a shard": {"causal": True, "q_start": 2100, "k_start": 2048},
    "far": {"causal": True, "q_start": (1 << 40) + 100, "k_start": 1 << 40},
    "lengths": {"q_lengths": [200, 31], "k_lengths": [3, 150]},
    "no keys": {"k_lengths": [0, 150], "causal": True},
    "no queries": {"q_lengths": [0, 200], "causal": True},
    "negative scale": {"scale": -0.7, "causal": True},
    "no scale": {"scale": 0.0},
}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def digest(results: tuple[np.ndarray, ...]) -> str:
    """Shape, dtype and bits; NaN is one of them, whatever its payload."""
    total = hashlib.sha256()
    for x in results:
        x = np.ascontiguousarray(x)
        total.update(f"{x.shape} {x.dtype.name}".encode())
        bits = x.view(f"u{x.dtype.itemsize}").copy()
        bits[np.isnan(x.astype(np.float64))] = 1
        total.update(bits.tobytes())
    return total.hexdigest()[:16]


def taken(dtype: str) -> str:
    """The dtype of what a cache of this one is given: codes it rounds itself."""
    return "float32" if dtype in CODES else dtype


def as_numpy(x: Any) -> np.ndarray:
    """Returns an array, or a tensor of the CPU, as an array of the same bits."""
    if not type(x).__module__.startswith("torch"):
        return np.asarray(x)
    x = x.detach().contiguous()
    is_bfloat16 = str(x.dtype) == "torch.bfloat16"
    return x.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else x.numpy()


def stacked(items: Sequence[np.ndarray], more: int = 0, length: int | None = None) -> np.ndarray:
    """Returns (batch, heads, length, dim), NaN past each one's own; without `length` it is the longest + `more`."""
    length = max(x.shape[1] for x in items) + more if length is None else length
    out = np.full((len(items), items[0].shape[0], length, items[0].shape[2]), np.nan, items[0].dtype)
    for to, x in zip(out, items, strict=True):
        to[:, : x.shape[1]] = x
    return out


def quantise(x: np.ndarray, dtype: str = "int8", block: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """What a cache of codes keeps of rows, by the reference: codes as they are stored, and scales.

    block: as for the reference's quantise(), which older trees do not have.
    """
    codes, scales = reference.quantise(x, dtype) if block is None else reference.quantise(x, dtype, block=block)
    return codes.astype(numpy_dtype(dtype)), scales.astype(SCALES.get(dtype, np.float32))


def decoded(x: np.ndarray, dtype: str, latent: int | None = None) -> np.ndarray:
    """The numbers that a cache of codes gives back of rows; `latent`: of latents with so many columns of values."""
    columns = x.shape[-1] if latent is None else latent
    codes, scales = quantise(x[..., :columns], dtype, None if latent is None else 128)
    size = columns if scales.shape[-1] == 1 else 128 if latent else 32
    numbers = codes.astype(np.float32) * scales.astype(np.float32).repeat(size, -1)[..., :columns]
    rest = x[..., columns:].astype(numpy_dtype("bfloat16")).astype(np.float32)
    return np.concatenate([numbers, rest], -1)


def qkv(
    rng: np.random.Generator,
    dtype: str,
    batch: int,
    q_heads: int,
    kv_heads: int,
    q_len: int,
    k_len: int,
    d: int,
    dv: int,
    size: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Drawn, then rounded to the low type, so that the oracle sees the same numbers."""
    kind = numpy_dtype(dtype)
    q = (rng.standard_normal((batch, q_heads, q_len, d)) * size).astype(kind)
    k = (rng.standard_normal((batch, kv_heads, k_len, d)) * size).astype(kind)
    return q, k, rng.standard_normal((batch, kv_heads, k_len, dv)).astype(kind)


def flow_of(rng: np.random.Generator, arrays: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """What attention() returns, and what may flow into it: out, lse, d_out, d_lse. Exact but for their dtypes."""
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    kind = arrays[0].dtype
    logs = np.float64 if kind == np.float64 else np.float32
    d_out, d_lse = rng.standard_normal(out.shape), rng.standard_normal(lse.shape)
    return out.astype(kind), lse.astype(logs), d_out.astype(kind), d_lse.astype(logs)


class Pack:
    """An array of which nothing is known but DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def random_problem(
    rng: np.random.Generator, dtypes: tuple[str, ...] = DTYPES, long: int = 1300
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], dict[str, Any]]:
    """One of R01's random problems; of up to twice `long` keys, and few rows over many: the reference takes longest."""
    dtype = str(rng.choice(dtypes))
    d, dv = (int(rng.choice([1, 2, 3, 7, 8, 16, 17, 32, 33, 64, 80, 96, 128, 130])) for _ in range(2))
    k_lengths = [n for n in (0, 1, 2, 3, 33, 127, 128, 129, 255, 300, 1023, 1025, 2048) if n <= 2 * long]
    k_len = int(rng.choice(k_lengths))
    q_len = int(rng.integers(0, min(200, long // 3, 1 + 60_000 // (k_len + 1))))
    kv_heads, group, batch = int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(1, 3))
    size = min(float(rng.choice([0.1, 1, 3, 8])), 3.0 if dtype == "float16" else 8.0)
    q, k, v = qkv(rng, dtype, batch, kv_heads * group, kv_heads, q_len, k_len, d, dv, size)
    if rng.random() < 0.2:
        v = np.abs(v)
    options: dict[str, Any] = {"causal": [False, True, "top-left"][rng.integers(3)]}
    if rng.random() < 0.3 and options["causal"] != "top-left":
        options["q_start"] = int(rng.integers(-50, k_len + 50))
    if rng.random() < 0.2:
        options["scale"] = float(rng.choice([-1, 0, 0.01, 2.5]))
    if rng.random() < 0.2:
        options["sink_logits"] = rng.standard_normal(kv_heads * group).tolist()
    if rng.random() < 0.2:
        options |= {"dropout": float(rng.choice([0.01, 0.3, 0.5, 0.97])), "seed": int(rng.integers(2**63))}
    return (q, k, v), options


# --- masks and scores, for 4 heads and up to 500 positions

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
IDS = np.repeat(np.arange(5), [3, 130, 61, 206, 100])
PATTERNS = {
    "causal": {"mask": sl.causal()},
    "window": {"mask": sl.window(40, 0)},
    "window and causal": {"mask": sl.window(130, 9), "causal": True},
    "prefix": {"mask": sl.causal() & (sl.window(20, 0) | sl.prefix(4))},
    "documents": {"mask": sl.documents(IDS)},
    "documents and causal": {"mask": sl.documents(IDS), "causal": True},
    "dilated": {"mask": sl.dilated(3)},
    "nothing": {"mask": sl.prefix(0)},
    "alibi": {"score": sl.alibi(SLOPES), "causal": True},
    "softcap": {"score": sl.softcap(2.0)},
    "relative": {"score": sl.relative_bias(np.linspace(-1, 1, 4 * 1001).reshape(4, 1001))},
    "all": {"score": [sl.softcap(2.0), sl.alibi(SLOPES)], "mask": sl.window(100, 0) | sl.prefix(2)},
}


# --- every option at once

SHORT = (0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 48, 49, 100)
MIDDLE = (127, 128, 129, 255, 257)
LONG = (1023, 1024, 1025, 2049)
HUGE = {
    "float32": 1e16,
    "float64": 1e150,
    "float16": 100.0,
    "bfloat16": 1e16,
}  # of queries and keys: their products are finite
TINY = {"float32": 1e-40, "float64": 1e-310, "float16": 1e-7, "bfloat16": 1e-39}  # subnormal


@dataclass(frozen=True)
class Part:
    """Some queries of one item, and its keys: (heads, length, dim) each."""

    item: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    start: int  # absolute position of the first query
    row: int = 0  # which query of the item that is

    def rows(self, first: int, end: int) -> Part:
        return replace(self, q=self.q[:, first:end], start=self.start + first, row=self.row + first)


@dataclass(frozen=True)
class Combined:
    """A problem of every option, and how its arrays lie."""

    form: Form
    parts: list[Part]
    mask: Any
    score: Any
    options: dict[str, Any]  # window, sink_logits, scale, k_start
    causal: bool | str
    q_start: Any  # as the call gets it
    layout: str
    kind: str  # of arrays: numpy or torch
    lies: tuple[str, str, str]  # how q, k and v do
    expanded: str  # what k and v repeat: "", "batch" or "heads"
    has_infinity: bool  # among the values

    @property
    def at_end(self) -> bool:
        """Every last query is at the last key, as in a cache."""
        return self.options["k_start"] == 0 and all(p.start == p.k.shape[1] - p.q.shape[1] for p in self.parts)


def draw_combined(rng: np.random.Generator, form: Form) -> Combined:
    """One problem, the same for the same `rng`."""
    mask, score = variant(form, int(rng.integers(VARIANTS))) if not form.dense else (None, None)
    q_lengths, k_lengths, kv_heads, group = _sizes(rng, form)
    d, dv = int(rng.choice([1, 2, 3, 8, 16, 17, 33, 64, 80])), int(rng.choice([1, 3, 8, 16, 17, 32, 40, 64]))
    causal, k_start, q_start, starts = _positions(rng, form, q_lengths, k_lengths)
    if form.dense:
        mask, score = form.make(rng, len(q_lengths), kv_heads * group, max(q_lengths), max(k_lengths))
    options: dict[str, Any] = {"k_start": k_start, "scale": [None, None, None, -0.3, 0.0, 1e-30, 2.0][rng.integers(7)]}
    options["sink_logits"] = None
    if rng.random() < 0.3:
        options["sink_logits"] = rng.choice([-3.0, 0.5, 2.0, 20.0, -np.inf], kv_heads * group).tolist()
    left, right = form.window
    options["window"] = (
        (int(rng.integers(0, 300)) if left else None, int(rng.integers(0, 40)) if right else None)
        if left or right
        else None
    )
    sizes = [(a, b, s) for a, b, s in zip(q_lengths, k_lengths, starts, strict=True)]
    expanded = str(rng.choice(["", "", "", "batch", "heads"]))
    if expanded == "batch" and len(set(k_lengths)) > 1:
        expanded = ""
    parts, has_infinity = _content(rng, form, sizes, kv_heads, group, d, dv, expanded)
    if options["scale"] == 0 and not all(np.isfinite(x).all() for p in parts for x in (p.q, p.k)):
        options["scale"] = None  # 0 times infinity
    layout = str(rng.choice(["bhld", "blhd"] if form.dense else ["bhld", "blhd", "lhd"]))
    kind = str(rng.choice(["numpy", "numpy", "torch"]))
    ways = ["plain", "plain", "transposed", "sliced", *(["backwards", "unaligned"] if kind == "numpy" else [])]
    lies = tuple(str(x) for x in rng.choice(ways, 3))
    return Combined(form, parts, mask, score, options, causal, q_start, layout, kind, lies, expanded, has_infinity)  # type: ignore[arg-type]


def _sizes(rng: np.random.Generator, form: Form) -> tuple[list[int], list[int], int, int]:
    """Lengths of queries and keys, kv heads, and their group."""
    pairs = 20_000 if rng.random() < 0.93 else 400_000
    batch, kv_heads, group = int(rng.choice([1, 1, 2, 3, 4])), int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 4]))
    uniform = rng.random() < 0.5
    if form.dense:  # axes of one entry would broadcast, and items that end elsewhere start elsewhere: other kernels
        batch, kv_heads = max(2, batch), 2
    k_lengths = [_length(rng, form, [0.45, 0.3, 0.25]) for _ in range(batch)]
    q_lengths = [_length(rng, form, [0.7, 0.15, 0.15], max(49, pairs // max(1, n))) for n in k_lengths]
    if uniform or form.dense:
        q_lengths = q_lengths[:1] * batch
    if uniform:
        k_lengths = k_lengths[:1] * batch
    while sum(a * b for a, b in zip(q_lengths, k_lengths, strict=True)) * kv_heads * group > pairs:
        if group > 1:
            group //= 2
        elif len(q_lengths) > (2 if form.dense else 1):
            q_lengths.pop()
            k_lengths.pop()
        elif kv_heads > 1 and not form.dense:
            kv_heads = 1
        else:
            break
    return q_lengths, k_lengths, kv_heads, group


def _length(rng: np.random.Generator, form: Form, weights: list[float], most: int = 2049) -> int:
    """Of queries or keys; `weights`: of the short, the middle and the long ones."""
    names = [[x for x in y if 2 * form.dense <= x <= most] for y in (SHORT, MIDDLE, LONG)]
    return int(rng.choice(names[rng.choice(3, p=weights)] or names[0]))


def _positions(
    rng: np.random.Generator, form: Form, q_lengths: list[int], k_lengths: list[int]
) -> tuple[Any, int, Any, list[int]]:
    """causal, k_start, q_start as it is given, and what it means for each item."""
    ends = [k - q for q, k in zip(q_lengths, k_lengths, strict=True)]
    where = rng.choice(["end", "end", "end", "top", "one", "each"])
    causal = bool(rng.random() < 0.6)
    far = rng.random() < form.far
    if form.ring:
        where, causal = "end", True
    if form.far == 1:
        where = rng.choice(["one", "each"])
    if form.dense and where in ("end", "each") and len(set(ends)) > 1:
        where = "one"
    if where == "end" and not (form.tables and min(ends) < 0):
        return causal, 0, None, ends
    if where == "top":
        return ("top-left", 0, None, [0] * len(ends)) if rng.random() < 0.7 else (causal, 0, 0, [0] * len(ends))
    k_start = int(rng.choice([0, 0, 1024, 3072]))
    if far:
        k_start = 1 << int(rng.integers(32, 45))
    low = k_start if form.tables else k_start - 30
    starts = [int(rng.integers(low, k_start + max(k_lengths) + 30)) for _ in ends]
    if where == "each" and not form.dense:
        return causal, k_start, starts, starts
    return causal, k_start, starts[0], starts[:1] * len(ends)


def _content(
    rng: np.random.Generator,
    form: Form,
    sizes: list[tuple[int, int, int]],
    kv_heads: int,
    group: int,
    d: int,
    dv: int,
    expanded: str,
) -> tuple[list[Part], bool]:
    """Numbers of all kinds, drawn in the low type."""
    kind = numpy_dtype(form.dtype)
    size = float(rng.choice([0.1, 1, 1, 3]))
    what = str(rng.choice(["normal", "normal", "normal", "sparse", "one-hot", "constant", "huge", "tiny"]))
    if what == "huge" and not form.name.startswith("plain"):
        what = "normal"  # scores of 1e30 are beyond what the expressions bear
    v_what = str(rng.choice(["normal", "normal", "positive", "sparse", "constant", "huge", "tiny"]))
    parts: list[Part] = []
    for item, (q_len, k_len, start) in enumerate(sizes):
        q, k = (
            _numbers(rng, form.dtype, what, (heads, n, d), size)
            for heads, n in ((kv_heads * group, q_len), (kv_heads, k_len))
        )
        v = _numbers(rng, form.dtype, v_what, (kv_heads, k_len, dv), 1.0)
        if expanded == "batch" and item:
            k, v = parts[0].k, parts[0].v
        elif expanded == "heads":
            k, v = (np.repeat(x[:1], kv_heads, axis=0) for x in (k, v))
        parts.append(Part(item, q, k, v, start))
    has_infinity = False
    if rng.random() < 0.15 and not expanded:  # special values that may be seen
        for _ in range(rng.integers(1, 4)):
            part, which = parts[rng.integers(len(parts))], ["q", "k", "v"][rng.integers(3)]
            x, special = getattr(part, which), rng.choice([np.nan, np.inf, -np.inf])
            if x.size:
                x[tuple(rng.integers(n) for n in x.shape)] = kind.type(special)
                has_infinity |= bool(np.isinf(special))
    return parts, has_infinity


def _numbers(rng: np.random.Generator, dtype: str, what: str, shape: tuple[int, ...], size: float) -> np.ndarray:
    x = rng.standard_normal(shape) * size
    match what:
        case "sparse":
            x = np.where(rng.random(shape) < 0.97, 0, x)
        case "one-hot":
            x = (np.arange(shape[2]) == rng.integers(0, shape[2], shape[:2])[..., None]) * 4.0 * size
        case "constant":
            x = np.broadcast_to(x[:, :1], shape)
        case "positive":
            x = np.abs(x) + 0.1
        case "huge":
            x = x * HUGE[dtype]
        case "tiny":
            x = x * TINY[dtype]
    return x.astype(numpy_dtype(dtype))


def far_scores(dtype: str) -> list[float]:
    """Finite scores beside which q · k is nothing: what other libraries' masks hold, and where log2 e times a score is
    infinite.
    """
    most = float(np.finfo(np.float64 if dtype == "float64" else np.float32).max)
    low = float(ml_dtypes.finfo(numpy_dtype(dtype)).min) if dtype == "bfloat16" else -most
    return [low, -most, most, -most / 2, 0.6 * most, -0.74 * most]


def without_far_scores(q: Any, k: Any, v: Any, far: float, every: int) -> tuple[Any, Any, Any]:
    """With ordinary scores, what adding `far` to the scores of every so many keys comes to: they are hidden, or all
    there is.
    """
    place = np.arange(k.shape[2]) % every == 0
    if far < 0 and every > 1:
        return q, k[:, :, ~place], v[:, :, ~place]
    return np.zeros_like(q), k[:, :, place], v[:, :, place]
