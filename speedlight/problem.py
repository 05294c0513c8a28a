"""What to compute, and every check of every argument. Kernels trust this module and nobody else."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arrays import DTYPES, Array
from .errors import ArgumentError, ArgumentTypeError, CacheFull
from .tracing import Expression, Symbol, Table, expression, is_tensor, score_chain, where

TILE, SPAN = 128, 1024  # keys per tile and per span of the canonical arithmetic
PART = 16  # keys: the smallest part of a tile that is skipped; even, so that pairs stay whole
LAYOUTS = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "lhd": (1, 0, 2)}  # where batch, head, length, dim lie
_AXES = {"bhld": "(batch, heads, length, head_dim)", "blhd": "(batch, length, heads, head_dim)", "lhd": "(total_length, heads, head_dim)"}
_MOST = 1 << 46


@dataclass(frozen=True, slots=True)
class Problem:
    """softmax(scale · QKᵀ)V for a batch of items, each with lengths and a first position of its own."""

    dtype: str  # float32, float64, float16, bfloat16
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_starts: tuple[int, ...]  # absolute position of the first query of each item
    k_start: int
    causal: bool
    scale: float
    mask: Expression | None = None
    score: Expression | None = None
    sinks: tuple[float, ...] | None = None  # one logit per query head
    rows: int | None = None  # of out per item, where q_lengths leave some of them without a query
    quantised: bool = False  # keys and values are int8 with a scale per token and head
    items: tuple[int, ...] | None = None  # what a mask calls the items, where not 0, 1, …

    @property
    def batch(self) -> int:
        return len(self.q_lengths)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def storage(self) -> str:
        return DTYPES[self.dtype][0]

    def box(self) -> dict[str, tuple[int, int]]:
        """Every position, head and item: first and last."""
        ends = [(start, start + n - 1) for start, n in zip(self.q_starts, self.q_lengths, strict=True) if n]
        rows = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (0, 0)
        last = self.k_start + max(max(self.k_lengths, default=0), 1) - 1
        items = max(self.items) if self.items else max(self.batch, 1) - 1
        return {"b": (0, items), "h": (0, max(self.q_heads, 1) - 1), "i": rows, "j": (self.k_start, last)}


def from_sizes(
    *, batch: Any, q_heads: Any, kv_heads: Any, q_len: Any, k_len: Any, head_dim: Any, value_dim: Any, dtype: Any,
    causal: Any, q_start: Any, k_start: Any, scale: Any, mask: Any = None, score: Any = None,
) -> Problem:  # fmt: skip
    """The problem of a plan by sizes alone."""
    batch, q_heads, q_len = (_size(n, x) for n, x in (("batch", batch), ("q_heads", q_heads), ("q_len", q_len)))
    kv_heads = q_heads if kv_heads is None else _size("kv_heads", kv_heads)
    k_len = q_len if k_len is None else _size("k_len", k_len)
    head_dim = _size("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim, 1)
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    name = getattr(dtype, "__name__", name) if isinstance(dtype, type) else name
    if name not in DTYPES:
        raise ArgumentTypeError(f"dtype: expected float32, float64, float16 or bfloat16; got {dtype!r}.")
    if batch > 1_000_000:
        raise ArgumentError(f"batch: expected at most 1,000,000; got {batch}.")
    lengths = (q_len,) * batch, (k_len,) * batch
    return _expressed(_problem(name, q_heads, kv_heads, head_dim, value_dim, *lengths, causal, q_start, k_start, scale), mask, score, False)


def from_arrays(
    q: Array, k: Array, v: Array, *, causal: Any, q_start: Any, k_start: Any, scale: Any, layout: Any,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, mask: Any = None, score: Any = None, window: Any = None,
    sink_logits: Any = None, q_lengths: Any = None, k_lengths: Any = None,
) -> tuple[Problem, tuple[int, ...] | None, tuple[int, ...] | None]:  # fmt: skip
    """The problem of three arrays, and the packed offsets where there are any."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError(f"layout: expected 'bhld', 'blhd' or 'lhd'; got {layout!r}.")
    dims = len(layout)
    for x in (q, k, v):
        if len(x.shape) != dims:
            raise ArgumentError(f"{x.name}: expected {dims} dimensions {_AXES[layout]} for layout={layout!r}; got shape {x.shape}.")
        if x.dtype != q.dtype:
            raise ArgumentTypeError(f"{x.name}: expected dtype {q.dtype}, as q has; got {x.dtype}. Convert one of them.")
        if (x.kind == "torch") != (q.kind == "torch"):
            raise ArgumentTypeError(f"{x.name}: expected the same kind of array as q; got {x.kind} beside {q.kind}.")
        if x.device != q.device:
            raise ArgumentError(f"{x.name}: expected an array on {q.device}, as q; got one on {x.device}. Move one of them.")
    axes = LAYOUTS[layout]
    q_heads, q_len, head_dim = (q.shape[a] for a in axes[-3:])
    kv_heads, k_len, k_dim = (k.shape[a] for a in axes[-3:])
    if k_dim != head_dim:
        raise ArgumentError(f"k: expected head_dim {head_dim}, as q has; got {k_dim} (shape {k.shape}, layout {layout!r}).")
    if head_dim < 1:
        raise ArgumentError(f"q: expected head_dim of at least 1; got shape {q.shape}.")
    v_heads, v_len, value_dim = (v.shape[a] for a in axes[-3:])
    if value_dim < 1:
        raise ArgumentError(f"v: expected a value dim of at least 1; got shape {v.shape}.")
    if (v_heads, v_len) != (kv_heads, k_len):
        raise ArgumentError(f"v: expected {kv_heads} heads and length {k_len}, as k has; got {v_heads} and {v_len} (shape {v.shape}).")
    rows: int | None = None
    if layout == "lhd":
        for name, x in (("q_lengths", q_lengths), ("k_lengths", k_lengths)):
            if x is not None:
                raise ArgumentError(f"{name}: expected None for layout='lhd'; packed sequences have cu_seqlens_q and cu_seqlens_k.")
        cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, q_len)
        cu_k = _offsets("cu_seqlens_k", cu_seqlens_k, k_len) if cu_seqlens_k is not None or k_len != q_len else cu_q
        if len(cu_q) != len(cu_k):
            raise ArgumentError(f"cu_seqlens_k: expected {len(cu_q)} entries, as cu_seqlens_q has; got {len(cu_k)}.")
        q_lens, k_lens = (tuple(b - a for a, b in itertools.pairwise(c)) for c in (cu_q, cu_k))
    else:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                raise ArgumentError(f"{name}: expected None for layout={layout!r}; packed sequences take layout='lhd'.")
        for x in (k, v):
            if x.shape[0] != q.shape[0]:
                raise ArgumentError(f"{x.name}: expected batch {q.shape[0]}, as q has; got {x.shape[0]} (shape {x.shape}).")
        cu_q = cu_k = None
        q_lens, k_lens = _lengths("q_lengths", q_lengths, q.shape[0], q_len), _lengths("k_lengths", k_lengths, q.shape[0], k_len)
        rows = None if q_lengths is None else q_len
    problem = _problem(q.dtype, q_heads, kv_heads, head_dim, value_dim, q_lens, k_lens, causal, q_start, k_start, scale)
    if sink_logits is not None or rows is not None:
        problem = replace(problem, sinks=_sinks(sink_logits, q_heads), rows=rows)
    mask = mask if window is None else _windowed(window, mask, problem, layout == "lhd", (q_len, k_len))
    return _expressed(problem, mask, score, layout == "lhd", (q_len, k_len)), cu_q, cu_k


def from_cache(
    q: Array, *, dtype: str, kv_heads: int, head_dim: int, value_dim: int, k_lengths: tuple[int, ...], causal: Any, scale: Any,
    layout: str = "bhld", q_lengths: Any = None, mask: Any = None, score: Any = None, sink_logits: Any = None,
    hiding: Expression | None = None, items: tuple[int, ...] | None = None,
) -> Problem:  # fmt: skip
    """The problem of queries over a cache's keys and values, which are known to be right. The last query is the last key's.

    `hiding` is a mask of the cache itself, joined to the caller's. Packed queries ("lhd") have q_lengths that are right, too.
    """
    dims = len(layout)
    if len(q.shape) != dims:
        raise ArgumentError(f"q: expected {dims} dimensions {_AXES[layout]}; got shape {q.shape}.")
    axes = LAYOUTS[layout]
    q_heads, q_len, dim = (q.shape[a] for a in axes[-3:])
    if dim != head_dim:
        raise ArgumentError(f"q: expected head_dim {head_dim}, as the cache has; got {dim} (shape {q.shape}).")
    if dtype == "int8":
        if q.dtype == "float64":
            raise ArgumentTypeError("q: expected float32, float16 or bfloat16 over an int8 cache; got float64.")
    elif q.dtype != dtype:
        raise ArgumentTypeError(f"q: expected dtype {dtype}, as the cache has; got {q.dtype}. Convert it first.")
    rows: int | None = None
    if layout == "lhd":
        q_lens = tuple(q_lengths)
    else:
        if q.shape[0] != len(k_lengths):
            raise ArgumentError(f"q: expected batch {len(k_lengths)}, as the cache has; got {q.shape[0]} (shape {q.shape}).")
        q_lens = _lengths("q_lengths", q_lengths, q.shape[0], q_len)
        rows = None if q_lengths is None else q_len
    problem = _problem(q.dtype, q_heads, kv_heads, head_dim, value_dim, q_lens, k_lengths, causal, None, 0, scale)
    problem = replace(problem, sinks=_sinks(sink_logits, q_heads), rows=rows, quantised=dtype == "int8", items=items)
    square = (q_len, max(k_lengths, default=0))
    if hiding is not None:
        mask = hiding if mask is None else hiding & _mask(mask, problem, layout == "lhd", square)
    return _expressed(problem, mask, score, layout == "lhd", square)


def _windowed(window: Any, mask: Any, problem: Problem, packed: bool, square: tuple[int, int]) -> Expression | None:
    """The shorthand (left, right), joined to the mask."""
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ArgumentTypeError(f"window: expected a pair (left, right) of ints or None; got {window!r}.")
    left, right = (None if x is None else _size("window", x) for x in window)
    limits: list[Any] = []
    if left is not None:
        limits.append(expression(lambda b, h, i, j: i - j <= left, "mask"))
    if right is not None:
        limits.append(expression(lambda b, h, i, j: j - i <= right, "mask"))
    if mask is not None:
        limits.append(_mask(mask, problem, packed, square))
    return functools.reduce(operator.and_, limits) if limits else None


def _lengths(name: str, x: Any, batch: int, most: int) -> tuple[int, ...]:
    """Lengths of a padded batch, copied before they are checked."""
    if x is None:
        return (most,) * batch
    values = tuple(_integer(name, n) for n in _list(name, x))
    if len(values) != batch:
        raise ArgumentError(f"{name}: expected {batch} lengths, one per batch item; got {len(values)}.")
    for at, n in enumerate(values):
        if not 0 <= n <= most:
            raise ArgumentError(f"{name}: expected lengths from 0 to {most}, the length of the array; got {n} for item {at}.")
    return values


def _sinks(x: Any, q_heads: int) -> tuple[float, ...] | None:
    """One logit per query head, copied."""
    if x is None:
        return None
    values = _list("sink_logits", x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind in "fV" else x)
    for v in values:
        if isinstance(v, (bool, np.bool_)) or not isinstance(v, numbers.Real):
            raise ArgumentTypeError(f"sink_logits: expected numbers, one per query head; got {type(v).__name__}.")
    if len(values) != q_heads:
        raise ArgumentError(f"sink_logits: expected {q_heads} numbers, one per query head; got {len(values)}.")
    return tuple(float(v) for v in values)


def _expressed(problem: Problem, mask: Any, score: Any, packed: bool, square: tuple[int, int] | None = None) -> Problem:
    if mask is None and score is None:
        return problem
    return replace(problem, mask=_mask(mask, problem, packed, square), score=_score(score, problem, packed, square))


def _mask(x: Any, problem: Problem, packed: bool, square: tuple[int, int] | None) -> Expression | None:
    if x is None or isinstance(x, Expression) or callable(x):
        return None if x is None else expression(x, "mask")
    table = _dense("mask", x, problem, packed, square)
    if table.kind != "bool":
        way = "Use mask.bool() or mask.astype(bool)" if table.kind == "int" else "Pass an array that is added to scores as score=[array]"
        raise ArgumentTypeError(f"mask: expected a bool array, True where a key is seen; got {table.array.dtype}. {way}.")
    return expression(lambda b, h, i, j: _entry(table, problem, b, h, i, j), "mask")


def _score(x: Any, problem: Problem, packed: bool, square: tuple[int, int] | None) -> Expression | None:
    """One score, or several, left to right."""
    found = []
    for one in x if isinstance(x, (list, tuple)) else [] if x is None else [x]:
        if isinstance(one, Expression) or callable(one):
            found.append(expression(one, "score"))
            continue
        table = _dense("score", one, problem, packed, square)
        if table.kind not in ("float", "double"):
            way = "Pass it as mask=" if table.kind == "bool" else "Use score.float() or score.astype('float32')"
            raise ArgumentTypeError(f"score: expected a float array; got {table.array.dtype}. {way}.")
        found.append(expression(lambda s, b, h, i, j, t=table: _plus(s, _entry(t, problem, b, h, i, j)), "score"))
    return score_chain(found)


def _plus(s: Symbol, entry: Any) -> Any:
    """s + entry; -inf hides the key whatever its score, so that a tile of nothing else need not be computed."""
    return where(entry == -math.inf, -math.inf, s + entry)


def _dense(name: str, x: Any, problem: Problem, packed: bool, square: tuple[int, int] | None) -> Table:
    """An array that broadcasts to (batch, q_heads, q_len, k_len), as PyTorch's attn_mask does; read where it lies."""
    if packed:
        raise ArgumentError(f"{name}: expected a function or pattern for layout='lhd'; got an array. Sequences have squares of their own.")
    if not (is_tensor(x) or (hasattr(x, "dtype") and hasattr(x, "shape"))):
        raise ArgumentTypeError(f"{name}: expected a function, a pattern such as sl.causal(), or an array; got {type(x).__name__}.")
    table = Table(x, name, copy=False)
    q_len, k_len = square or (max(problem.q_lengths, default=0), max(problem.k_lengths, default=0))
    whole = (problem.batch, problem.q_heads, q_len, k_len)
    shape = (1,) * (4 - table.array.ndim) + table.array.shape
    if any(a not in (1, b) for a, b in zip(shape, whole, strict=True)):
        raise ArgumentError(
            f"{name}: expected a shape that broadcasts to (batch, q_heads, q_len, k_len) = {whole}; got {table.array.shape}."
        )
    table.reshaped(shape)
    return table


def _entry(table: Table, problem: Problem, b: Symbol, h: Symbol, i: Symbol, j: Symbol) -> Any:
    """The entry of a dense array; positions become rows and columns again."""
    starts = problem.q_starts
    first: Any = max(starts, default=0) if len(set(starts)) <= 1 else Table(np.array(starts, np.int64), "q_start")[b]
    index = (b, h, i - first, j - problem.k_start)
    return table[tuple(b * 0 if n == 1 else x for x, n in zip(index, table.array.shape, strict=True))]


def _problem(
    dtype: str, q_heads: int, kv_heads: int, head_dim: int, value_dim: int, q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...], causal: Any, q_start: Any, k_start: Any, scale: Any,
) -> Problem:  # fmt: skip
    if (kv_heads == 0 and q_heads) or (kv_heads and q_heads % kv_heads):
        raise ArgumentError(f"k: expected a number of kv heads that divides q's {q_heads} heads; got {kv_heads}.")
    if not (causal is True or causal is False or (isinstance(causal, str) and causal == "top-left")):
        raise ArgumentError(f"causal: expected False, True (aligned at the end) or 'top-left'; got {causal!r}.")
    if causal == "top-left":
        if q_start is not None:
            raise ArgumentError("q_start: expected None with causal='top-left', which means q_start=0.")
        q_start = 0
    k_start = _integer("k_start", k_start)
    if k_start < 0 or k_start % SPAN or k_start > _MOST:
        raise ArgumentError(f"k_start: expected a multiple of {SPAN}, not negative; got {k_start}.")
    if q_start is None:
        starts = tuple(k - q for q, k in zip(q_lengths, k_lengths, strict=True))
    elif isinstance(q_start, numbers.Integral):
        starts = (_integer("q_start", q_start),) * len(q_lengths)
    else:
        starts = tuple(_integer("q_start", x) for x in _list("q_start", q_start))
        if len(starts) != len(q_lengths):
            raise ArgumentError(f"q_start: expected one int, or {len(q_lengths)} (one per batch item); got {len(starts)}.")
    if any(abs(x) > _MOST for x in starts):
        raise ArgumentError(f"q_start: expected positions below 2^46; got {max(starts, key=abs)}.")
    return Problem(
        dtype, q_heads, kv_heads, head_dim, value_dim, q_lengths, k_lengths, starts, k_start, bool(causal), _scale(scale, head_dim)
    )


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, numbers.Real):
        raise ArgumentTypeError(f"scale: expected a number or None (1/sqrt(head_dim)); got {type(scale).__name__}.")
    value = float(scale)
    if not math.isfinite(value) or abs(value) > 1e30:
        raise ArgumentError(f"scale: expected a finite number up to 1e30 in size; got {value}.")
    return value


def _integer(name: str, x: Any) -> int:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Integral):
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
    return int(x)


def _size(name: str, x: Any, least: int = 0) -> int:
    x = _integer(name, x)
    if not least <= x <= _MOST:
        raise ArgumentError(f"{name}: expected a size from {least} to 2^46; got {x}.")
    return x


def _list(name: str, x: Any) -> list[Any]:
    try:
        values = x.tolist() if hasattr(x, "tolist") else list(x)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected an int or a sequence of ints; got {type(x).__name__}.") from None
    if not isinstance(values, list):
        raise ArgumentTypeError(f"{name}: expected a sequence of ints; got {type(x).__name__}.")
    return values


def packed_lengths(cu_seqlens_q: Any, total: int, batch: int) -> tuple[int, ...]:
    """Lengths of packed queries, of a known number of sequences."""
    offsets = _offsets("cu_seqlens_q", cu_seqlens_q, total)
    if len(offsets) != batch + 1:
        raise ArgumentError(f"cu_seqlens_q: expected {batch + 1} entries, one more than sequences; got {len(offsets)}.")
    return tuple(b - a for a, b in itertools.pairwise(offsets))


def page_lists(block_table: Any, k_lengths: Any, pages: int, page_size: int, slack: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """A block table that may say anything, copied with `slack` more columns, then checked as far as it is used; and the lengths."""
    try:
        table = np.array(block_table.numpy() if hasattr(block_table, "numpy") else block_table)  # PyTorch's has that
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"block_table: expected an array of ints; got {type(block_table).__name__} ({error}).") from None
    if table.ndim != 2 or (table.size and table.dtype.kind not in "iu"):
        raise ArgumentTypeError(f"block_table: expected ints of shape (batch, most pages); got {table.dtype} of shape {table.shape}.")
    numbers = np.zeros((table.shape[0], table.shape[1] + slack), np.int64)
    numbers[:, : table.shape[1]] = table
    lengths = _lengths("k_lengths", k_lengths, len(table), table.shape[1] * page_size)
    for item, n in enumerate(lengths):
        used = numbers[item, : -(-n // page_size)]
        if used.size and (used.min() < 0 or used.max() >= pages):
            at = int(np.argmax((used < 0) | (used >= pages)))
            raise ArgumentError(f"block_table: expected pages from 0 to {pages - 1}; got {used[at]} at [{item}, {at}].")
    return numbers, lengths


def _offsets(name: str, x: Any, total: int) -> tuple[int, ...]:
    """Packed offsets, copied before they are checked: 0 = c₀ ≤ c₁ ≤ … = total."""
    if x is None:
        return (0, total)
    values = tuple(_integer(name, i) for i in _list(name, x))
    if len(values) < 2 or values[0] != 0 or values[-1] != total:
        ends = f"{len(values)} entries" if len(values) < 2 else f"{values[0]} … {values[-1]}"
        raise ArgumentError(f"{name}: expected offsets from 0 to the total length {total}; got {ends}.")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ArgumentError(f"{name}: expected offsets that never fall; got {a} then {b} at entry {i + 1}.")
    return values


def check_precision(x: Any) -> None:
    """That of float32 products on a GPU."""
    if x not in ("ieee", "tf32x3", "tf32"):
        raise ArgumentError(f"precision: expected 'ieee', 'tf32x3' or 'tf32'; got {x!r}.")


# --- arguments of caches

_FLOATS = ("float32", "float16", "bfloat16")  # of tokens that an int8 cache takes


def check_index(name: str, x: Any, count: int) -> int:
    """One of `count` places, by name."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
    if not 0 <= x < count:
        raise ArgumentError(f"{name}: expected 0 to {count - 1}; got {x}.")
    return int(x)


def check_sizes(sizes: dict[str, Any], least: int = 1) -> None:
    """Sizes of a cache, by name."""
    for name, x in sizes.items():
        if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
            raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
        if not least <= x <= _MOST:
            raise ArgumentError(f"{name}: expected a size from {least} to 2^46; got {x}.")


def cache_dtype(dtype: Any) -> str:
    """The name of a cache's dtype."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in (*DTYPES, "int8"):
        raise ArgumentTypeError(f"dtype: expected float32, float64, float16, bfloat16 or int8; got {dtype!r}.")
    return name


def check_tokens(got: str, name: str, dtype: str) -> None:
    """The dtype of new keys or values."""
    if dtype == "int8":
        if got not in _FLOATS:
            raise ArgumentTypeError(f"{name}: expected float32, float16 or bfloat16, which an int8 cache rounds itself; got {got}.")
    elif got != dtype:
        raise ArgumentTypeError(f"{name}: expected dtype {dtype}, as the cache has; got {got}. Convert it first.")


def new_counts(new_lengths: Any, batch: int, n_new: int) -> list[int]:
    """New tokens of every sequence of a padded batch."""
    if new_lengths is None:
        return [n_new] * batch
    values = new_lengths.tolist() if hasattr(new_lengths, "tolist") else new_lengths
    if not isinstance(values, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in values):
        raise ArgumentTypeError(f"new_lengths: expected {batch} ints, one per sequence; got {new_lengths!r}.")
    if len(values) != batch:
        raise ArgumentError(f"new_lengths: expected {batch} ints, one per sequence; got {len(values)}.")
    for item, n in enumerate(values):
        if not 0 <= n <= n_new:
            raise ArgumentError(f"new_lengths: expected 0 to {n_new}, the tokens in k; got {n} for sequence {item}.")
    return [int(n) for n in values]


def new_totals(layer: int, lengths: list[int], counts: list[int], capacity: int) -> list[int]:
    """Lengths after an append that fits."""
    for item, n in enumerate(counts):
        free = capacity - lengths[item]
        if n > free:
            raise CacheFull(
                f"layer {layer}, sequence {item}: {n} tokens need room, {free} of {capacity} are free. "
                "truncate() it, or make a cache of larger capacity.",
                n,
                free,
            )
    return [a + b for a, b in zip(lengths, counts, strict=True)]


def cache_sizes(
    *, layers: Any, batch: Any, kv_heads: Any, head_dim: Any, value_dim: Any, capacity: Any, window: Any, keep_first: Any
) -> tuple[int, int, int, int, int, int]:
    """(layers, batch, kv_heads, head_dim, value_dim, capacity) of a cache; with a window and no capacity, the most there is."""
    if capacity is None:
        if window is None:
            raise ArgumentError("capacity: expected the most tokens of a sequence, or a window.")
        capacity = _MOST
    sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"value_dim": head_dim if value_dim is None else value_dim, "capacity": capacity}
    check_sizes(sizes | {"window": 1 if window is None else window})
    if window is None and keep_first:
        raise ArgumentError(f"keep_first: expected 0 without a window; got {keep_first}.")
    check_sizes({"keep_first": keep_first}, least=0)
    return tuple(map(int, sizes.values()))  # type: ignore[return-value]


def shorter_lengths(length: Any, lengths: list[list[int]], lost: Callable[[int, int], bool]) -> list[int]:
    """What truncate() leaves of every sequence; lengths: per layer. lost(item, n): a window has forgotten what token n would see."""
    batch = len(lengths[0])
    wanted = [length] * batch if isinstance(length, (int, np.integer)) else list(length)
    if len(wanted) != batch:
        raise ArgumentError(f"length: expected one int, or {batch} (one per sequence); got {len(wanted)}.")
    for item, n in enumerate(wanted):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise ArgumentTypeError(f"length: expected an int; got {type(n).__name__}.")
        least = min(x[item] for x in lengths)
        if not 0 <= n <= least:
            raise ArgumentError(f"length: expected 0 to {least}, the tokens of sequence {item} in every layer; got {n}.")
        if lost(item, int(n)):
            raise ArgumentError(
                f"length: expected one whose window is still there; of sequence {item} the cache has forgotten what token {n} would "
                "see. clear() it, or make a cache of a longer window."
            )
    return [int(n) for n in wanted]
