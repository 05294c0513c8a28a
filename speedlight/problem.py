"""What to compute, and every check of every argument. Kernels trust this module and nobody else."""

from __future__ import annotations

import functools
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .arrays import DTYPES, Array, check_plain_tensor, is_masked, is_tensor, listed
from .errors import ArgumentError, ArgumentTypeError, CacheFull, shown
from .expressions.symbols import Symbol, where
from .expressions.tables import Table
from .expressions.tracing import Expression, expression, score_chain
from .expressions.tree import Node
from .modes import standard

TILE, SPAN = 128, 1024  # keys per tile and per span of the canonical arithmetic
PART = 16  # keys: the smallest part of a tile that is skipped; even, so that pairs stay whole
LAYOUTS = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "lhd": (1, 0, 2)}  # where batch, head, length, dim lie
_AXES = {
    "bhld": "(batch, heads, length, head_dim)",
    "blhd": "(batch, length, heads, head_dim)",
    "lhd": "(total_length, heads, head_dim)",
}
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
    first_row: int | None = None  # run for other lengths of keys, too: for rows from this position to the last key

    @property
    def batch(self) -> int:
        return len(self.q_lengths)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def storage(self) -> str:
        return DTYPES[self.dtype][0]

    @property
    def roots(self) -> tuple[Node | None, Node | None]:
        """Of the mask's tree and of the score's."""
        return None if self.mask is None else self.mask.root, None if self.score is None else self.score.root

    def box(self) -> dict[str, tuple[int, int]]:
        """Every position, head and item: first and last."""
        ends = [(start, start + n - 1) for start, n in zip(self.q_starts, self.q_lengths, strict=True) if n]
        rows = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (0, 0)
        last = self.k_start + max(max(self.k_lengths, default=0), 1) - 1
        if self.first_row is not None:
            rows = self.first_row, last
        items = max(self.items) if self.items else max(self.batch, 1) - 1
        return {"b": (0, items), "h": (0, max(self.q_heads, 1) - 1), "i": rows, "j": (self.k_start, last)}


@standard
def from_sizes(
    *,
    batch: Any,
    q_heads: Any,
    kv_heads: Any,
    q_len: Any,
    k_len: Any,
    head_dim: Any,
    value_dim: Any,
    dtype: Any,
    layout: Any,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    **options: Any,
) -> Problem:
    """The problem of a plan by sizes alone; lengths and offsets give the sizes that are left out."""
    check_layout(layout)
    q_len = _longest("q_len", q_len, cu_seqlens_q, "cu_seqlens_q", q_lengths, "q_lengths")
    if k_len is None and cu_seqlens_k is None and k_lengths is None:
        k_len = q_len
    k_len = _longest("k_len", k_len, cu_seqlens_k, "cu_seqlens_k", k_lengths, "k_lengths")
    q_heads, q_len, k_len = _size("q_heads", q_heads), _size("q_len", q_len), _size("k_len", k_len)
    kv_heads = q_heads if kv_heads is None else _size("kv_heads", kv_heads)
    head_dim = _size("head_dim", head_dim, 1)
    value_dim = head_dim if value_dim is None else _size("value_dim", value_dim, 1)
    batch = _size("batch", batch)
    if batch > 1_000_000:
        raise ArgumentError(f"batch: expected at most 1,000,000; got {batch}.")
    if layout == "lhd" and batch != 1:
        raise ArgumentError(
            f"batch: expected 1 for layout='lhd', whose sequences are those of cu_seqlens_q; got {batch}."
        )
    sizes = _Sizes(_dtype_name(dtype), batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim)
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "q_lengths": q_lengths,
        "k_lengths": k_lengths,
    }
    return _stated(sizes, layout=layout, **lengths, **options)[0]


def _longest(name: str, size: Any, offsets: Any, offsets_name: str, lengths: Any, lengths_name: str) -> Any:
    """A length that was left out: that of the packed rows, or of the longest item."""
    if size is not None or (offsets is None and lengths is None):
        return size
    given, its_name = (offsets, offsets_name) if offsets is not None else (lengths, lengths_name)
    values = [_integer(its_name, n) for n in listed(given, its_name, "a sequence of ints")]
    return max(values, default=0)


def _dtype_name(dtype: Any) -> str:
    name = getattr(dtype, "__name__" if isinstance(dtype, type) else "name", None)
    name = name if isinstance(name, str) else dtype if isinstance(dtype, str) else shown(dtype)
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        raise ArgumentTypeError(f"dtype: expected float32, float64, float16 or bfloat16; got {shown(dtype)}.")
    return name


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of q, k and v, whether there are such arrays or not; packed ("lhd"), batch means nothing."""

    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    k_len: int
    head_dim: int
    value_dim: int


@standard
def from_arrays(
    q: Array, k: Array, v: Array, *, layout: Any, **options: Any
) -> tuple[Problem, tuple[int, ...] | None, tuple[int, ...] | None]:
    """The problem of three arrays, and the packed offsets where there are any. Options as _stated() has them."""
    check_layout(layout)
    dims = len(layout)
    for x in (q, k, v):
        if len(x.shape) != dims:
            raise ArgumentError(
                f"{x.name}: expected {dims} dimensions {_AXES[layout]} for layout={layout!r}; got shape {x.shape}."
            )
        if x.dtype != q.dtype:
            raise ArgumentTypeError(
                f"{x.name}: expected dtype {q.dtype}, as q has; got {x.dtype}. Convert one of them."
            )
        if (x.kind == "torch") != (q.kind == "torch"):
            raise ArgumentTypeError(f"{x.name}: expected the same kind of array as q; got {x.kind} beside {q.kind}.")
        if x.device != q.device:
            raise ArgumentError(
                f"{x.name}: expected an array on {q.device}, as q; got one on {x.device}. Move one of them."
            )
    axes = LAYOUTS[layout]
    q_heads, q_len, head_dim = (q.shape[a] for a in axes[-3:])
    kv_heads, k_len, k_dim = (k.shape[a] for a in axes[-3:])
    if k_dim != head_dim:
        raise ArgumentError(
            f"k: expected head_dim {head_dim}, as q has; got {k_dim} (shape {k.shape}, layout {layout!r})."
        )
    if head_dim < 1:
        raise ArgumentError(f"q: expected head_dim of at least 1; got shape {q.shape}.")
    v_heads, v_len, value_dim = (v.shape[a] for a in axes[-3:])
    if value_dim < 1:
        raise ArgumentError(f"v: expected a value dim of at least 1; got shape {v.shape}.")
    if (v_heads, v_len) != (kv_heads, k_len):
        raise ArgumentError(
            f"v: expected {kv_heads} heads and length {k_len}, as k has; got {v_heads} and {v_len} (shape {v.shape})."
        )
    batch = 1 if layout == "lhd" else q.shape[0]
    for x in (k, v) if layout != "lhd" else ():
        if x.shape[0] != batch:
            raise ArgumentError(f"{x.name}: expected batch {batch}, as q has; got {x.shape[0]} (shape {x.shape}).")
    return _stated(
        _Sizes(q.dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim), layout=layout, **options
    )


def _stated(
    sizes: _Sizes,
    *,
    causal: Any,
    q_start: Any,
    k_start: Any,
    scale: Any,
    layout: str,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    mask: Any = None,
    score: Any = None,
    window: Any = None,
    sink_logits: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
) -> tuple[Problem, tuple[int, ...] | None, tuple[int, ...] | None]:
    """The problem of these sizes under all of a call's options."""
    q_len, k_len = sizes.q_len, sizes.k_len
    packed, rows = layout == "lhd", None
    cu_q = cu_k = None
    if packed:
        for name, x in (("q_lengths", q_lengths), ("k_lengths", k_lengths)):
            if x is not None:
                raise ArgumentError(
                    f"{name}: expected None for layout='lhd'; packed sequences have cu_seqlens_q and cu_seqlens_k."
                )
        cu_q = _offsets("cu_seqlens_q", cu_seqlens_q, q_len)
        cu_k = _offsets("cu_seqlens_k", cu_seqlens_k, k_len) if cu_seqlens_k is not None or k_len != q_len else cu_q
        if len(cu_q) != len(cu_k):
            raise ArgumentError(f"cu_seqlens_k: expected {len(cu_q)} entries, as cu_seqlens_q has; got {len(cu_k)}.")
        q_lens, k_lens = (tuple(b - a for a, b in itertools.pairwise(c)) for c in (cu_q, cu_k))
    else:
        for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
            if x is not None:
                raise ArgumentError(f"{name}: expected None for layout={layout!r}; packed sequences take layout='lhd'.")
        q_lens, k_lens = (
            _lengths("q_lengths", q_lengths, sizes.batch, q_len),
            _lengths("k_lengths", k_lengths, sizes.batch, k_len),
        )
        rows = None if q_lengths is None else q_len
        alone = {"q_lengths": q_lengths is not None, "k_lengths": k_lengths is not None}
        if q_start is None and q_len == k_len > 1 and sum(alone.values()) == 1 and causal != "top-left":
            name, other = sorted(alone, key=lambda n: not alone[n])
            _check_alignment(name, other, q_lens, k_lens, causal is True or window is not None, mask, score)
    problem = _problem(
        sizes.dtype,
        sizes.q_heads,
        sizes.kv_heads,
        sizes.head_dim,
        sizes.value_dim,
        q_lens,
        k_lens,
        causal,
        q_start,
        k_start,
        scale,
    )
    if sink_logits is not None or rows is not None:
        problem = replace(problem, sinks=_sinks(sink_logits, problem), rows=rows)
    mask = mask if window is None else _windowed(window, mask, problem, packed, (q_len, k_len))
    return _expressed(problem, mask, score, packed, (q_len, k_len)), cu_q, cu_k


def _check_alignment(
    name: str, other: str, q_lens: tuple[int, ...], k_lens: tuple[int, ...], placed: bool, mask: Any, score: Any
) -> None:
    """Refuses a padded square batch with one kind of lengths alone, where it matters where queries are (`placed`: it
    does).

    By attention()'s rule an item's last row is at its last key; whoever pads a square means row i to be at key i.
    """
    for item, (rows, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
        if 0 < rows != keys > 0:
            if placed or any("i" in x.root.uses for x in _functions_of(mask, score)):
                raise ArgumentError(
                    f"{name}: expected {other}= or q_start= beside it: without them the last of item {item}'s {rows} "
                    "queries is at the "
                    f"last of its {keys} keys. Give {other}= the same lengths, or q_start=0, which puts row i at key i."
                )
            return


def _functions_of(mask: Any, score: Any) -> list[Any]:
    """Expressions among the masks and scores. A dense array has rows of its own, wherever queries are."""
    scores = score if isinstance(score, (list, tuple)) else [score]
    given = [(mask, "mask"), *((x, "score") for x in scores)]
    return [expression(x, role) for x, role in given if isinstance(x, Expression) or callable(x)]


@standard
def from_cache(
    q: Array,
    *,
    dtype: str,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    k_lengths: tuple[int, ...],
    causal: Any,
    scale: Any,
    layout: str = "bhld",
    q_lengths: Any = None,
    mask: Any = None,
    score: Any = None,
    sink_logits: Any = None,
    hiding: Expression | None = None,
    items: tuple[int, ...] | None = None,
    shortest: int | None = None,
) -> Problem:
    """The problem of queries over a cache's keys and values, which are known to be right. The last query is the last
    key's.

    `hiding` is a mask of the cache itself, joined to the caller's. Packed queries ("lhd") have q_lengths that are
    right, too. `shortest`: what is made of the problem is used for any k_lengths from this to those given.
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
            raise ArgumentError(
                f"q: expected batch {len(k_lengths)}, as the cache has; got {q.shape[0]} (shape {q.shape})."
            )
        q_lens = _lengths("q_lengths", q_lengths, q.shape[0], q_len)
        rows = None if q_lengths is None else q_len
    problem = _problem(q.dtype, q_heads, kv_heads, head_dim, value_dim, q_lens, k_lengths, causal, None, 0, scale)
    first_row = None if shortest is None else shortest - max(q_lens, default=0)
    problem = replace(
        problem,
        sinks=_sinks(sink_logits, problem),
        rows=rows,
        quantised=dtype == "int8",
        items=items,
        first_row=first_row,
    )
    square = (q_len, max(k_lengths, default=0))
    if hiding is not None:
        mask = hiding if mask is None else hiding & _mask(mask, problem, layout == "lhd", square)
    return _expressed(problem, mask, score, layout == "lhd", square)


def _windowed(window: Any, mask: Any, problem: Problem, packed: bool, square: tuple[int, int]) -> Expression | None:
    """The shorthand (left, right), joined to the mask."""
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ArgumentTypeError(f"window: expected a pair (left, right) of ints or None; got {shown(window)}.")
    left, right = (None if x is None else _size("window", x) for x in window)
    limits: list[Any] = []
    if left is not None:
        limits.append(expression(lambda b, h, i, j: i - j <= left, "mask"))
    if right is not None:
        limits.append(expression(lambda b, h, i, j: j - i <= right, "mask"))
    if mask is not None:
        limits.append(_mask(mask, problem, packed, square))
    return functools.reduce(operator.and_, limits) if limits else None


def _lengths(name: str, x: Any, batch: int, most: int, what: str = "the length of the array") -> tuple[int, ...]:
    """Lengths of a padded batch, copied before they are checked."""
    if x is None:
        return (most,) * batch
    values = listed(x, name, "a sequence of ints")
    if len(values) != batch:
        raise ArgumentError(f"{name}: expected {batch} lengths, one per batch item; got {len(values)}.")
    lengths = tuple(_integer(name, n) for n in values)
    for at, n in enumerate(lengths):
        if not 0 <= n <= most:
            raise ArgumentError(f"{name}: expected lengths from 0 to {most}, {what}; got {n} for item {at}.")
    return lengths


def _sinks(x: Any, problem: Problem) -> tuple[float, ...] | None:
    """One logit per query head, copied; each a number of the type that scores are computed in."""
    if x is None:
        return None
    if isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
        x = x.astype(np.float32)
    values = listed(x, "sink_logits", "numbers, one per query head")
    if len(values) != problem.q_heads:
        raise ArgumentError(f"sink_logits: expected {problem.q_heads} numbers, one per query head; got {len(values)}.")
    most = float(np.finfo(np.float64 if problem.dtype == "float64" else np.float32).max)
    sinks = []
    for v in values:
        sinks.append(_number("sink_logits", v, "numbers, one per query head"))
        if most < abs(sinks[-1]) < math.inf:
            raise ArgumentError(
                f"sink_logits: expected logits that float32 can hold, up to {most:.3g} in size, or infinities; got "
                f"{sinks[-1]}."
            )
    return tuple(sinks)


def _number(name: str, x: Any, what: str) -> float:
    """A real number as a float; integers beyond all floats are refused, not rounded to infinity."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise ArgumentTypeError(f"{name}: expected {what}; got {type(x).__name__}.")
    try:
        return float(x)
    except (OverflowError, ValueError, TypeError) as error:
        raise ArgumentError(f"{name}: expected {what}, that a float can hold; got {shown(x)} ({error}).") from None


def _expressed(problem: Problem, mask: Any, score: Any, packed: bool, square: tuple[int, int] | None = None) -> Problem:
    if mask is None and score is None:
        return problem
    return replace(problem, mask=_mask(mask, problem, packed, square), score=_score(score, problem, packed, square))


def _mask(x: Any, problem: Problem, packed: bool, square: tuple[int, int] | None) -> Expression | None:
    if x is None or isinstance(x, Expression) or callable(x):
        return None if x is None else expression(x, "mask")
    table = _dense("mask", x, problem, packed, square)
    if table.kind != "bool":
        way = (
            "Use mask.bool() or mask.astype(bool)"
            if table.kind == "int"
            else "Pass an array that is added to scores as score=[array]"
        )
        raise ArgumentTypeError(
            f"mask: expected a bool array, True where a key is seen; got {table.array.dtype}. {way}."
        )
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
        raise ArgumentError(
            f"{name}: expected a function or pattern for layout='lhd'; got an array. Sequences have squares of their "
            "own."
        )
    if not (is_tensor(x) or (hasattr(x, "dtype") and hasattr(x, "shape"))):
        raise ArgumentTypeError(
            f"{name}: expected a function, a pattern such as sl.causal(), or an array; got {type(x).__name__}."
        )
    table = Table(x, name, copy=False)
    q_len, k_len = square or (max(problem.q_lengths, default=0), max(problem.k_lengths, default=0))
    whole = (problem.batch, problem.q_heads, q_len, k_len)
    shape = (1,) * (4 - table.array.ndim) + table.array.shape
    if any(a not in (1, b) for a, b in zip(shape, whole, strict=True)):
        raise ArgumentError(
            f"{name}: expected a shape that broadcasts to (batch, q_heads, q_len, k_len) = {whole}; got "
            f"{table.array.shape}."
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
    dtype: str,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
    causal: Any,
    q_start: Any,
    k_start: Any,
    scale: Any,
) -> Problem:
    if (kv_heads == 0 and q_heads) or (kv_heads and q_heads % kv_heads):
        raise ArgumentError(f"k: expected a number of kv heads that divides q's {q_heads} heads; got {kv_heads}.")
    if not (causal is True or causal is False or (isinstance(causal, str) and causal == "top-left")):
        raise ArgumentError(f"causal: expected False, True (aligned at the end) or 'top-left'; got {shown(causal)}.")
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
        starts = tuple(_integer("q_start", x) for x in listed(q_start, "q_start", "an int or a sequence of ints"))
        if len(starts) != len(q_lengths):
            raise ArgumentError(
                f"q_start: expected one int, or {len(q_lengths)} (one per batch item); got {len(starts)}."
            )
    if any(abs(x) > _MOST for x in starts):
        raise ArgumentError(f"q_start: expected positions below 2^46; got {max(starts, key=abs)}.")
    return Problem(
        dtype,
        q_heads,
        kv_heads,
        head_dim,
        value_dim,
        q_lengths,
        k_lengths,
        starts,
        k_start,
        bool(causal),
        _scale(scale, head_dim),
    )


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = _number("scale", scale, "a number or None (1/sqrt(head_dim))")
    if not math.isfinite(value) or abs(value) > 1e30:
        raise ArgumentError(f"scale: expected a finite number up to 1e30 in size; got {value}.")
    return value


def _integer(name: str, x: Any) -> int:
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Integral):
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
    value = int(x)
    if value.bit_length() > 64:  # and Python may refuse to print it
        raise ArgumentError(f"{name}: expected an int of at most 64 bits; got one of {value.bit_length()} bits.")
    return value


def _size(name: str, x: Any, least: int = 0) -> int:
    x = _integer(name, x)
    if not least <= x <= _MOST:
        raise ArgumentError(f"{name}: expected a size from {least} to 2^46; got {x}.")
    return x


def packed_lengths(cu_seqlens_q: Any, total: int, batch: int) -> tuple[int, ...]:
    """Lengths of packed queries, of a known number of sequences."""
    offsets = _offsets("cu_seqlens_q", cu_seqlens_q, total)
    if len(offsets) != batch + 1:
        raise ArgumentError(f"cu_seqlens_q: expected {batch + 1} entries, one more than sequences; got {len(offsets)}.")
    return tuple(b - a for a, b in itertools.pairwise(offsets))


def _block_table(x: Any) -> np.ndarray:
    """(batch, most pages) of ints, of any kind and byte order."""
    if is_tensor(x):
        check_plain_tensor(x, "block_table")
    elif isinstance(x, Sequence):  # of rows, whose lengths are looked at before NumPy copies them
        what = "ints of shape (batch, most pages)"
        x = [
            row if hasattr(row, "shape") else listed(row, "block_table", what) for row in listed(x, "block_table", what)
        ]
    try:
        table = np.array(x.detach().cpu().numpy() if is_tensor(x) else x)
    except Exception as error:  # ragged lists, other libraries' code
        raise ArgumentTypeError(f"block_table: expected an array of ints; got {type(x).__name__} ({error}).") from None
    if is_masked(x) or table.ndim != 2 or (table.size and table.dtype.kind not in "iu"):
        raise ArgumentTypeError(
            f"block_table: expected ints of shape (batch, most pages); got {type(x).__name__} of {table.dtype}, shape "
            f"{table.shape}."
        )
    return table


def page_lists(
    block_table: Any, k_lengths: Any, pages: int, page_size: int, slack: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """A block table that may say anything, copied with `slack` more columns, then checked as far as it is used; and the
    lengths.
    """
    table = _block_table(block_table)
    numbers = np.zeros((table.shape[0], table.shape[1] + slack), np.int64)
    numbers[:, : table.shape[1]] = table
    lengths = _lengths(
        "k_lengths",
        k_lengths,
        len(table),
        table.shape[1] * page_size,
        "the tokens that a row of block_table has pages for",
    )
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
    values = tuple(_integer(name, i) for i in listed(x, name, "a sequence of ints"))
    if len(values) < 2 or values[0] != 0 or values[-1] != total:
        ends = f"{len(values)} entries" if len(values) < 2 else f"{values[0]} … {values[-1]}"
        raise ArgumentError(f"{name}: expected offsets from 0 to the total length {total}; got {ends}.")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ArgumentError(f"{name}: expected offsets that never fall; got {a} then {b} at entry {i + 1}.")
    return values


def check_layout(x: Any) -> None:
    """Where batch, heads, length and dim lie."""
    if not isinstance(x, str) or x not in LAYOUTS:
        raise ArgumentError(f"layout: expected 'bhld', 'blhd' or 'lhd'; got {shown(x)}.")


def check_precision(x: Any) -> None:
    """That of float32 products on a GPU."""
    if not isinstance(x, str) or x not in ("ieee", "tf32x3", "tf32"):
        raise ArgumentError(f"precision: expected 'ieee', 'tf32x3' or 'tf32'; got {shown(x)}.")


# --- arguments of caches

_FLOATS = ("float32", "float16", "bfloat16")  # of tokens that an int8 cache takes


def check_index(name: str, x: Any, count: int) -> int:
    """One of `count` places, by name."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
    if not 0 <= x < count:
        raise ArgumentError(f"{name}: expected 0 to {count - 1}; got {shown(x)}.")
    return int(x)


def check_list(name: str, x: Any, of: str) -> list[Any]:
    """Several things, by name; `of`: what they should be."""
    try:
        return list(x)
    except TypeError:
        raise ArgumentTypeError(f"{name}: expected a list of {of}; got {type(x).__name__}.") from None
    except Exception as error:  # another library's, or a generator's
        raise ArgumentTypeError(f"{name}: expected a list of {of}; got {type(x).__name__} ({error}).") from error


def check_sizes(sizes: dict[str, Any], least: int = 1) -> None:
    """Sizes of a cache, by name."""
    for name, x in sizes.items():
        if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
            raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
        if not least <= x <= _MOST:
            raise ArgumentError(f"{name}: expected a size from {least} to 2^46; got {shown(x)}.")


def cache_dtype(dtype: Any) -> str:
    """The name of a cache's dtype."""
    name = (
        getattr(dtype, "name", None)
        or getattr(dtype, "__name__", None)
        or (dtype if isinstance(dtype, str) else shown(dtype))
    )
    name = name.removeprefix("torch.") if isinstance(name, str) else shown(dtype)
    if name not in (*DTYPES, "int8"):
        raise ArgumentTypeError(f"dtype: expected float32, float64, float16, bfloat16 or int8; got {shown(dtype)}.")
    return name


def device_name(device: Any) -> str:
    """Of a cache: as a string, or as PyTorch has it."""
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise ArgumentTypeError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)}.")
    return str(device)


def check_tokens(got: str, name: str, dtype: str) -> None:
    """The dtype of new keys or values."""
    if dtype == "int8":
        if got not in _FLOATS:
            raise ArgumentTypeError(
                f"{name}: expected float32, float16 or bfloat16, which an int8 cache rounds itself; got {got}."
            )
    elif got != dtype:
        raise ArgumentTypeError(f"{name}: expected dtype {dtype}, as the cache has; got {got}. Convert it first.")


def new_counts(new_lengths: Any, batch: int, n_new: int) -> list[int]:
    """New tokens of every sequence of a padded batch."""
    if new_lengths is None:
        return [n_new] * batch
    values = each_count(new_lengths, batch)
    for item, n in enumerate(values):
        if not 0 <= n <= n_new:
            raise ArgumentError(
                f"new_lengths: expected 0 to {n_new}, the tokens in k; got {shown(n)} for sequence {item}."
            )
    return values


def each_count(new_lengths: Any, sequences: int) -> list[int]:
    """An int for each sequence, as Python's: sums of NumPy's narrow ones would wrap."""
    what = f"{sequences} ints, one per sequence"
    values = listed(new_lengths, "new_lengths", what)
    if any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in values):
        raise ArgumentTypeError(f"new_lengths: expected {what}; got {shown(new_lengths)}.")
    if len(values) != sequences:
        raise ArgumentError(f"new_lengths: expected {what}; got {len(values)}.")
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
    *,
    layers: Any,
    batch: Any,
    kv_heads: Any,
    head_dim: Any,
    value_dim: Any,
    capacity: Any,
    window: Any,
    keep_first: Any,
) -> tuple[int, int, int, int, int, int]:
    """(layers, batch, kv_heads, head_dim, value_dim, capacity) of a cache; with a window and no capacity, the most
    there is.
    """
    if capacity is None:
        if window is None:
            raise ArgumentError("capacity: expected the most tokens of a sequence, or a window.")
        capacity = _MOST
    sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
    sizes |= {"value_dim": head_dim if value_dim is None else value_dim, "capacity": capacity}
    check_sizes(sizes | {"window": 1 if window is None else window})
    check_sizes({"keep_first": keep_first}, least=0)
    if window is None and keep_first:
        raise ArgumentError(f"keep_first: expected 0 without a window; got {keep_first}.")
    return tuple(map(int, sizes.values()))  # type: ignore[return-value]


def shorter_lengths(length: Any, lengths: list[list[int]], lost: Callable[[int, int], bool]) -> list[int]:
    """What truncate() leaves of every sequence; lengths: per layer.

    lost(item, n): a window has forgotten what token n would see.
    """
    batch = len(lengths[0])
    wanted = (
        [length] * batch if isinstance(length, (int, np.integer)) else check_list("length", length, "ints, or one int")
    )
    if len(wanted) != batch:
        raise ArgumentError(f"length: expected one int, or {batch} (one per sequence); got {len(wanted)}.")
    for item, n in enumerate(wanted):
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise ArgumentTypeError(f"length: expected an int; got {type(n).__name__}.")
        least = min(x[item] for x in lengths)
        if not 0 <= n <= least:
            raise ArgumentError(
                f"length: expected 0 to {least}, the tokens of sequence {item} in every layer; got {shown(n)}."
            )
        if lost(item, int(n)):
            raise ArgumentError(
                f"length: expected one whose window is still there; of sequence {item} the cache has forgotten what "
                f"token {n} would "
                "see. clear() it, or make a cache of a longer window."
            )
    return [int(n) for n in wanted]
