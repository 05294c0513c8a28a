"""Builds the Problem of a call from its arrays (or sizes) and options. checks.py has the single checks."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import listed
from ..arrays.dtypes import ALL_CODES, code_cache, conversion
from ..arrays.integers import integer, is_one
from ..arrays.layouts import AXES, are_widened, batch_of, check_batch, check_dimensions, check_together
from ..arrays.memory import Array
from ..arrays.torch_tensors import check_plain_tensor
from ..errors import ArgumentError, ArgumentTypeError, shown
from ..errors.advice import of_causal, of_head_dim, of_heads, of_items, of_mask, of_stored_heads
from ..expressions.symbols import Symbol, where
from ..expressions.tables import Table, check_dense
from ..expressions.tracing import Expression, expression, score_chain
from ..host.rounding import standard
from . import checks
from .chosen import check_device, chosen_of, joined
from .options import Options, scores_of
from .philox import MOST_POSITIONS
from .problem import LAYOUTS, SPAN, Problem, Sizes

_Square = tuple[int, int] | None  # rows and columns of a mask that is an array; packed sequences have none


class Stated(NamedTuple):
    """A problem, and the offsets of packed sequences in q and in k, where there are any."""

    problem: Problem
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None


class Stored(NamedTuple):
    """Keys and values that are already kept somewhere, and known to be right."""

    dtype: str  # codes have a scale per token and head
    kv_heads: int
    head_dim: int
    value_dim: int
    k_lengths: tuple[int, ...]
    hiding: Expression | None = None  # a mask of the cache itself, joined to the caller's
    items: tuple[int, ...] | None = None  # what a mask calls the sequences, where not 0, 1, …
    shortest: int | None = None  # what is made of the problem is used for any k_lengths from this to those given
    keeper: str = "the cache"  # in messages
    most: int | None = None  # keys that a sequence can have
    latent: bool = False  # values are the first columns of keys


@standard
def from_sizes(sizes: Sizes, options: Options, *, apart: bool = False) -> Problem:
    """The problem of a plan by sizes alone; lengths and offsets give the sizes that are left out (None)."""
    o = options
    checks.check_layout(o.layout)
    q_len = _longest("q_len", sizes.q_len, "cu_seqlens_q", "q_lengths", o)
    k_len = sizes.k_len
    if k_len is None and o.cu_seqlens_k is None and o.k_lengths is None:
        k_len = q_len
    k_len = _longest("k_len", k_len, "cu_seqlens_k", "k_lengths", o)
    given = {"q_heads": sizes.q_heads, "q_len": q_len, "head_dim": sizes.head_dim}
    checks.check_planned(given)
    q_heads, q_len, k_len = (
        checks.size(n, x) for n, x in (("q_heads", sizes.q_heads), ("q_len", q_len), ("k_len", k_len))
    )
    kv_heads = q_heads if sizes.kv_heads is None else checks.size("kv_heads", sizes.kv_heads)
    if (q_heads % kv_heads if kv_heads else q_heads) != 0:
        raise ArgumentError(f"kv_heads: expected a number that divides q_heads={q_heads}; got {kv_heads}.")
    head_dim = checks.size("head_dim", sizes.head_dim, 1)
    value_dim = head_dim if sizes.value_dim is None else checks.size("value_dim", sizes.value_dim, 1)
    batch = checks.size("batch", sizes.batch)
    if batch > 1_000_000:
        raise ArgumentError(f"batch: expected at most 1,000,000; got {batch}.")
    if len(o.layout) == 3 and batch != 1:
        why = "whose sequences are those of cu_seqlens_q" if o.layout == "lhd" else "which has no batch"
        raise ArgumentError(f"batch: expected 1 for layout={o.layout!r}, {why}; got {batch}.")
    dtype = checks.dtype_name(sizes.dtype)
    sizes = Sizes(dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim)
    problem = _stated(sizes, o, {}).problem
    return problem if apart else joined(problem)


def _longest(name: str, length: Any, offsets: str, lengths: str, options: Options) -> Any:
    """A length that was left out: that of the packed rows, or of the longest item."""
    for its_name in (offsets, lengths):
        given = getattr(options, its_name)
        if length is None and given is not None:
            return max((integer(its_name, n) for n in listed(given, its_name, "a sequence of ints")), default=0)
    return length


@standard
def from_arrays(q: Array, k: Array, v: Array, options: Options, *, apart: bool = False) -> Stated:
    """The problem of three arrays. apart: chosen keys stay apart; else the mask says which they are."""
    layout = options.layout
    checks.check_layout(layout)
    checks.check_precision(options.precision)
    check_device(options.indices, q.device)
    for x in (q, k, v):
        check_dimensions(x.name, x.shape, layout)
    widened = check_together(k, v, q)
    axes = LAYOUTS[layout]
    q_heads, q_len, head_dim = (q.shape[a] for a in axes[-3:])
    kv_heads, k_len, k_dim = k.shape[axes[-3]], k.shape[axes[-2]], k.columns
    if k_dim != head_dim:
        shapes = f"shape {k.shape}" if k.rest is None else f"shapes {k.shape} and {k.rest.shape}"
        way = of_head_dim(head_dim, k_len, layout)
        if k.rest is not None:
            way = " Multiply q's part without positions by W_UK, which gives it the latent's columns."
        raise ArgumentError(f"k: expected head_dim {head_dim}, as q has; got {k_dim} ({shapes}, {AXES[layout]}).{way}")
    if head_dim < 1:
        raise ArgumentError(f"q: expected head_dim of at least 1; got shape {q.shape}.")
    v_heads, v_len, value_dim = (v.shape[a] for a in axes[-3:])
    if value_dim < 1:
        raise ArgumentError(f"v: expected a value dim of at least 1; got shape {v.shape}.")
    if (v_heads, v_len) != (kv_heads, k_len):
        raise ArgumentError(
            f"v: expected {kv_heads} heads and length {k_len}, as k has; got {v_heads} and {v_len} (shape {v.shape})."
        )
    batch = batch_of(q.shape, layout)
    if len(layout) == 4:
        check_batch(k, v, batch)
    shared = batch_of(k.shape, layout) != batch
    sizes = Sizes(q.dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim)
    stated = _stated(sizes, options, {"shared": shared, "widened": widened} if shared or widened else {})
    return stated if apart else stated._replace(problem=joined(stated.problem))


def _stated(sizes: Sizes, options: Options, fields: dict[str, Any]) -> Stated:
    """The problem of these sizes under all of a call's options; fields: more of the problem's."""
    packed = options.layout == "lhd"
    cu_q = cu_k = None
    if packed:
        cu_q, cu_k = _packed_offsets(sizes, options)
        q_lens, k_lens = (tuple(b - a for a, b in itertools.pairwise(c)) for c in (cu_q, cu_k))
    else:
        q_lens, k_lens = _padded_lengths(sizes, options)
    problem = _apply_options(options, sizes, q_lens, k_lens, fields)
    last = problem.k_start + (max(k_lens, default=0) if packed else sizes.k_len)
    _check_items(problem, last, None if packed or problem.k_start else last)
    return Stated(problem, cu_q, cu_k)


def _packed_offsets(sizes: Sizes, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    for name, x in (("q_lengths", options.q_lengths), ("k_lengths", options.k_lengths)):
        if x is not None:
            raise ArgumentError(
                f"{name}: expected None for layout='lhd'; packed sequences have cu_seqlens_q and cu_seqlens_k."
            )
    cu_q = checks.packed_offsets("cu_seqlens_q", options.cu_seqlens_q, sizes.q_len)
    if options.cu_seqlens_k is None and sizes.k_len == sizes.q_len:
        return cu_q, cu_q
    cu_k = checks.packed_offsets("cu_seqlens_k", options.cu_seqlens_k, sizes.k_len)
    if len(cu_q) != len(cu_k):
        raise ArgumentError(f"cu_seqlens_k: expected {len(cu_q)} entries, as cu_seqlens_q has; got {len(cu_k)}.")
    return cu_q, cu_k


def _padded_lengths(sizes: Sizes, options: Options) -> tuple[tuple[int, ...], tuple[int, ...]]:
    o = options
    for name, x in (("cu_seqlens_q", o.cu_seqlens_q), ("cu_seqlens_k", o.cu_seqlens_k)):
        if x is not None:
            raise ArgumentError(f"{name}: expected None for layout={o.layout!r}; packed sequences take layout='lhd'.")
    way = of_items(o.layout)
    q_lens = checks.item_lengths("q_lengths", o.q_lengths, sizes.batch, sizes.q_len, "the length of q", way)
    k_lens = checks.item_lengths("k_lengths", o.k_lengths, sizes.batch, sizes.k_len, "the length of k", way)
    alone = (o.q_lengths is None) != (o.k_lengths is None)
    if alone and o.q_start is None and sizes.q_len == sizes.k_len > 1 and o.causal != "top-left":
        _check_alignment(q_lens, k_lens, o)
    return q_lens, k_lens


def _check_alignment(q_lens: tuple[int, ...], k_lens: tuple[int, ...], options: Options) -> None:
    """Refuses a padded square batch with one kind of lengths alone, where it matters where queries are.

    By attention()'s rule an item's last row is at its last key; whoever pads a square means row i to be at key i.
    """
    name, other = ("q_lengths", "k_lengths") if options.q_lengths is not None else ("k_lengths", "q_lengths")
    placed = options.causal is True or options.window is not None
    for item, (rows, keys) in enumerate(zip(q_lens, k_lens, strict=True)):
        if 0 < rows != keys > 0:
            if placed or any(["i" in x.root.uses for x in _functions_of(options.mask, options.score)]):
                raise ArgumentError(
                    f"{name}: expected lengths= in its place, which pads queries and keys alike, or {other}= or "
                    f"q_start= beside it: by {name}= alone the last of item {item}'s {rows} queries is at the last of "
                    f"its {keys} keys. q_start=0 puts row i at key i."
                )
            return


def _functions_of(mask: Any, score: Any) -> list[Any]:
    """Expressions among the masks and scores. A dense array has rows of its own, wherever queries are."""
    scores = scores_of(score)
    given = [(mask, "mask"), *((x, "score") for x in scores)]
    return [expression(x, role) for x, role in given if isinstance(x, Expression) or callable(x)]


@standard
def from_stored(q: Array, stored: Stored, options: Options, *, apart: bool = False) -> Problem:
    """The problem of queries over keys and values that are stored. By default the last query is the last key's.

    Packed queries ("lhd") have options.q_lengths that are right, too. apart: as for from_arrays().
    """
    check_device(options.indices, q.device)
    layout = options.layout
    dims = len(layout)
    if len(q.shape) != dims:
        raise ArgumentError(f"q: expected {dims} dimensions {AXES[layout]}; got shape {q.shape}.")
    axes = LAYOUTS[layout]
    q_heads, q_len, dim = (q.shape[a] for a in axes[-3:])
    if dim != stored.head_dim:
        raise ArgumentError(
            f"q: expected head_dim {stored.head_dim}, as {stored.keeper} has; got {dim} (shape {q.shape})."
        )
    is_coded, in_pages = stored.dtype in ALL_CODES, stored.keeper == "k_pages"
    if is_coded:
        if q.dtype == "float64":
            over = f"pages of {stored.dtype}" if in_pages else code_cache(stored.dtype)
            raise ArgumentTypeError(f"q: expected float32, float16 or bfloat16 over {over}; got float64.")
    elif q.dtype != stored.dtype and not are_widened(stored.dtype, q.dtype):
        way = f"Convert it first: {conversion('q', stored.dtype)}."
        raise ArgumentTypeError(f"q: expected dtype {stored.dtype}, as {stored.keeper} has; got {q.dtype}. {way}")
    batch, k_len = len(stored.k_lengths), max(stored.k_lengths, default=0)
    if layout == "lhd":
        right: Any = options.q_lengths
        q_lens = tuple(right)
    else:
        if batch_of(q.shape, layout) != batch:
            got = f"{batch_of(q.shape, layout)} (shape {q.shape})"
            keeper = "block_table" if stored.keeper == "k_pages" else stored.keeper
            raise ArgumentError(f"q: expected batch {batch}, as {keeper} has; got {got}.")
        q_lens = checks.item_lengths("q_lengths", options.q_lengths, batch, q_len, "the length of q")
    sizes = Sizes(q.dtype, batch, q_heads, stored.kv_heads, q_len, k_len, stored.head_dim, stored.value_dim)
    if q_heads % stored.kv_heads:
        whose = f"{stored.kv_heads} heads, the kv heads of {stored.keeper}"
        way = of_stored_heads(layout, sizes)
        raise ArgumentError(f"q: expected a multiple of {whose}; got {q_heads} (shape {q.shape}).{way}")
    fields = {
        "quantised": stored.dtype if is_coded else None,
        "latent_codes": stored.latent and is_coded,
        "widened": stored.dtype if are_widened(stored.dtype, q.dtype) or (is_coded and in_pages) else None,
        "items": stored.items,
        "first_row": None if stored.shortest is None else stored.shortest - max(q_lens, default=0),
    }
    problem = _apply_options(options, sizes, q_lens, stored.k_lengths, fields, stored.hiding)
    _check_items(problem, None, stored.most)  # a shorter padding leaves later keys visible
    return problem if apart else joined(problem)


def _apply_options(
    options: Options, sizes: Sizes, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], fields: dict[str, Any],
    hiding: Expression | None = None,
) -> Problem:  # fmt: skip
    """Builds the problem of these lengths under a call's options; hiding: a mask that is joined to the caller's."""
    packed = options.layout == "lhd"
    problem = _dropping(_problem(sizes, q_lengths, k_lengths, options), options)
    rows = None if packed or options.q_lengths is None else sizes.q_len
    if fields or rows is not None or options.sink_logits is not None:
        problem = replace(problem, sinks=_sinks(options.sink_logits, problem), rows=rows, **fields)
    if options.mask is options.score is options.window is options.indices is hiding is None:
        return problem
    square = None if packed else (sizes.q_len, sizes.k_len)
    mask, score = _limits(options, problem, square, hiding), _score(options.score, problem, square)
    if options.indices is None:
        return _expressed(problem, mask, score)
    keys = max(k_lengths, default=0) if packed else sizes.k_len
    chosen = chosen_of(options.indices, problem, options.layout, sizes.q_len, keys)
    return replace(_expressed(problem, mask, score), chosen=chosen)


def _problem(sizes: Sizes, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], options: Options) -> Problem:
    """Builds a problem without mask, score and sinks."""
    q_heads, kv_heads, causal = sizes.q_heads, sizes.kv_heads, options.causal
    if (kv_heads == 0 and q_heads) or (kv_heads and q_heads % kv_heads):
        way = of_heads(options.layout, sizes) if q_heads and kv_heads else ""
        raise ArgumentError(f"k: expected a number of kv heads that divides q's {q_heads} heads; got {kv_heads}.{way}")
    if not (causal is True or causal is False or (isinstance(causal, str) and causal == "top-left")):
        what = "False, True or 'bottom-right' (aligned at the end) or 'top-left'"
        raise ArgumentError(f"causal: expected {what}; got {shown(causal)}.{of_causal(causal)}")
    k_start = integer("k_start", options.k_start)
    if causal == "top-left" and options.q_start is not None:
        raise ArgumentError("q_start: expected None with causal='top-left', which means q_start=0.")
    if k_start < 0 or k_start % SPAN or k_start > checks.MOST:
        raise ArgumentError(f"k_start: expected a multiple of {SPAN} from 0 to 2^46; got {shown(k_start)}.")
    return Problem(
        sizes.dtype,
        q_heads,
        kv_heads,
        sizes.head_dim,
        sizes.value_dim,
        q_lengths,
        k_lengths,
        _starts(0 if causal == "top-left" else options.q_start, q_lengths, k_lengths),
        k_start,
        bool(causal),
        checks.scale_of(options.scale, sizes.head_dim),
    )


def _dropping(problem: Problem, options: Options) -> Problem:
    """Returns the problem with dropout, if there is any: positions are words of the counters of its random numbers."""
    dropout = checks.dropout_of(options.dropout)
    if not dropout:
        return problem
    seed, box = checks.seed_of(options.seed), problem.box()
    last = max(box["i"][1], box["j"][1])
    if last >= MOST_POSITIONS:
        raise ArgumentError(
            f"dropout: expected 0 where queries or keys are at positions from 2^32 on; got position {last}. Attend "
            "without dropout there, or let q_start= and k_start= begin lower."
        )
    return replace(problem, dropout=dropout, seed=seed)


def _starts(q_start: Any, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Absolute positions of each item's first query; by default its last query is its last key's."""
    if q_start is None:
        starts = tuple(k - q for q, k in zip(q_lengths, k_lengths, strict=True))
    elif is_one(q_start):
        starts = (integer("q_start", q_start),) * len(q_lengths)
    else:
        starts = tuple(integer("q_start", x) for x in listed(q_start, "q_start", "an int or a sequence of ints"))
        if len(starts) != len(q_lengths):
            raise ArgumentError(
                f"q_start: expected one int, or {len(q_lengths)} (one per batch item); got {len(starts)}."
            )
    if any([abs(x) > checks.MOST for x in starts]):
        raise ArgumentError(f"q_start: expected positions below 2^46; got {max(starts, key=abs)}.")
    return starts


def _limits(options: Options, problem: Problem, square: _Square, hiding: Expression | None) -> Expression | None:
    """The masks of a call, joined: that of the cache, the shorthand window=(left, right), and the caller's."""
    left, right = (None, None) if options.window is None else checks.window_sides(options.window)
    limits = [
        hiding,
        None if left is None else expression(lambda b, h, i, j: i - j <= left, "mask"),
        None if right is None else expression(lambda b, h, i, j: j - i <= right, "mask"),
        _mask(options.mask, problem, square),
    ]
    there = [x for x in limits if x is not None]
    return functools.reduce(operator.and_, there) if there else None


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
        sinks.append(checks.number("sink_logits", v, "numbers, one per query head"))
        if most < abs(sinks[-1]) < math.inf:
            raise ArgumentError(
                f"sink_logits: expected logits that float32 can hold, up to {most:.3g} in size, or infinities; got "
                f"{sinks[-1]}."
            )
    return tuple(sinks)


def _expressed(problem: Problem, mask: Expression | None, score: Expression | None) -> Problem:
    """The problem under a mask and a score, whose tables are read as they are now."""
    for table in [t for x in (mask, score) if x is not None for t in x.tables]:
        if table.source is not None:
            check_plain_tensor(table.source, table.name)
        axis = table.heads_axis
        if axis is not None and table.shape[axis] != problem.q_heads:
            raise ArgumentError(
                f"{table.name}: expected an entry for each of q's {problem.q_heads} heads; got {table.shape[axis]}. "
                "Give an entry for each query head of the call."
            )
    return replace(problem, mask=mask, score=score)


def _check_items(problem: Problem, least: int | None, most: int | None) -> None:
    """Raises unless tables of items are of this batch, and padding's of as many keys; None: of any number."""
    for table in [] if problem.mask is None else [t for t in problem.mask.tables if t.of_items]:
        rows, n = table.shape[0], table.shape[-1]
        fits = rows == problem.batch if problem.items is None else rows > max(problem.items, default=0)
        if fits and (not table.of_keys or (least or 0) <= n <= (n if most is None else most)):
            continue
        batch = problem.batch if problem.items is None else f"at least {max(problem.items) + 1}"
        if len(table.shape) > 2:
            raise ArgumentError(
                f"{table.name}: expected blocks for each of the call's {batch} items; got those of {rows}, shape "
                f"{table.shape}. Give as many, or 1 for all."
            )
        ends = [f"at {word} {x}" for word, x in (("least", least), ("most", most)) if x is not None and table.of_keys]
        keys = least if len(ends) == 2 and least == most else " and ".join(ends) or "any"
        what, way = "length", "Give ids for each item of the call, or one row, of shape (length,), for all"
        if table.of_keys:
            what, way = "k_len", "Write sl.padding(attention_mask) of all its items and keys, earlier tokens' included"
        raise ArgumentError(
            f"{table.name}: expected shape (batch, {what}) = ({batch}, {keys}) in this call; got {table.shape}. {way}."
        )


def _mask(x: Any, problem: Problem, square: _Square) -> Expression | None:
    if x is None or isinstance(x, Expression) or callable(x):
        return None if x is None else expression(x, "mask")
    table = _dense("mask", x, problem, square)
    if table.kind != "bool":
        way = (
            "Use mask.bool() or mask.astype(bool), or sl.padding(mask) for a tokenizer's (batch, k_len)"
            if table.kind == "int"
            else "Pass an array that is added to scores as score=[array]"
        )
        raise ArgumentTypeError(
            f"mask: expected a bool array, True where a key is seen; got {table.array.dtype}. {way}."
        )
    return expression(lambda b, h, i, j: _entry(table, problem, b, h, i, j), "mask")


def _score(x: Any, problem: Problem, square: _Square) -> Expression | None:
    """One score, or several, left to right."""
    found = []
    for one in x if isinstance(x, (list, tuple)) else [] if x is None else [x]:
        if isinstance(one, Expression) or callable(one):
            found.append(expression(one, "score"))
            continue
        table = _dense("score", one, problem, square)
        if table.kind not in ("float", "double"):
            way = "Pass it as mask=" if table.kind == "bool" else "Use score.float() or score.astype('float32')"
            raise ArgumentTypeError(f"score: expected a float array; got {table.array.dtype}. {way}.")
        found.append(expression(lambda s, b, h, i, j, t=table: _plus(s, _entry(t, problem, b, h, i, j)), "score"))
    return score_chain(found)


def _plus(s: Symbol, entry: Any) -> Any:
    """s + entry; -inf hides the key whatever its score, so that a tile of nothing else need not be computed."""
    return where(entry == -math.inf, -math.inf, s + entry)


def _dense(name: str, x: Any, problem: Problem, square: _Square) -> Table:
    """An array that broadcasts to (batch, q_heads, q_len, k_len), as PyTorch's attn_mask does; read where it lies."""
    if square is None:
        raise ArgumentError(
            f"{name}: expected a function or pattern for layout='lhd'; got an array. Sequences have squares of their "
            "own."
        )
    check_dense(name, x)
    table = x if isinstance(x, Table) else Table(x, name, copy=False)
    whole = (problem.batch, problem.q_heads, *square)
    shape = (1,) * (4 - table.array.ndim) + table.array.shape
    if any([a not in (1, b) for a, b in zip(shape, whole, strict=True)]):
        what = f"a shape that broadcasts to (batch, q_heads, q_len, k_len) = {whole}"
        raise ArgumentError(f"{name}: expected {what}; got {table.shape}.{of_mask(name, table.shape, whole)}")
    if table is not x:
        table.reshaped(shape)
    return table


def _entry(table: Table, problem: Problem, b: Symbol, h: Symbol, i: Symbol, j: Symbol) -> Any:
    """The entry of a dense array; positions become rows and columns again."""
    starts = problem.q_starts
    first: Any = max(starts, default=0) if len(set(starts)) <= 1 else Table(np.array(starts, np.int64), "q_start")[b]
    index = (b, h, i - first, j - problem.k_start)
    shape = table.array.shape
    return table[tuple(b * 0 if n == 1 else x for x, n in zip(index[4 - len(shape) :], shape, strict=True))]
