"""The public calls: attention(), attention_paged() and plan(); merge() has a module of its own."""

from __future__ import annotations

import itertools
import marshal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import arrays
from . import engine as engines
from .compiling import leaves_graph
from .cpu.layout import SLACK
from .cpu.operands import Dense, Paged, Pages, Rows, Strides
from .errors import ArgumentError, ArgumentTypeError, Error, shown
from .expressions.tracing import kept
from .machine import current_isa
from .planning import Plan
from .problem import (
    LAYOUTS,
    check_layout,
    check_precision,
    from_arrays,
    from_cache,
    from_sizes,
    packed_lengths,
    page_lists,
)

if TYPE_CHECKING:
    from .cpu.prepare import Call

_prepared: dict[Any, Call] = {}
_MEMO = 512  # prepared calls kept


@leaves_graph
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    score: Any = None,
    sink_logits: Any = None,
    q_start: Any = None,
    k_start: int = 0,
    scale: float | None = None,
    layout: str = "bhld",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    return_lse: bool = False,
    out: Any = None,
    engine: str | None = None,
    precision: str = "ieee",
) -> Any:
    """Exact attention, softmax(scale · QKᵀ)V, in memory that does not grow with the square of the length.

    Args:
        q: (batch, q_heads, q_len, head_dim) of float32, float64, float16 or bfloat16: a NumPy array, a PyTorch
            tensor, or an object with DLPack or `__array_interface__`; on the CPU or (not float64) on an NVIDIA GPU. Any
            strides.
        k: (batch, kv_heads, k_len, head_dim), same dtype. kv_heads divides q_heads: query head h reads kv head
            h // (q_heads // kv_heads).
        v: (batch, kv_heads, k_len, value_dim), same dtype.
        causal: True hides keys after the query, aligned at the end (the last query sees every key); "top-left"
            aligns at the start, as PyTorch's is_causal does.
        window: (left, right): hides keys before i - left and after i + right; None means no limit on that side.
        mask: which keys a query sees: a function (b, h, i, j) -> bool of batch item, query head and absolute positions
            of query and key, a pattern such as sl.window(1024, 0) or several joined by & | ~, or a bool array that
            broadcasts to (batch, q_heads, q_len, k_len), True meaning visible. Joined to `causal` and `window` by &.
        score: what becomes of a score: a function (s, b, h, i, j) -> s of the scaled score, a pattern such as
            sl.alibi(slopes), a float array to add, or a list of these, left to right. A score of -inf hides the key.
        sink_logits: a score per query head that joins the softmax's denominator and nothing else, as gpt-oss has it.
        q_start: absolute position of the first query, an int or one per batch item. Default k_len - q_len,
            by each item's lengths.
        k_start: absolute position of the first key, a multiple of 1024.
        scale: factor of the scores. Default 1/sqrt(head_dim).
        layout: "bhld", "blhd" for (batch, length, heads, head_dim), or "lhd" for packed (total_length, heads,
            head_dim).
        cu_seqlens_q: for "lhd", offsets of the sequences in q: 0, …, total_length. Default one sequence.
        cu_seqlens_k: the same for k and v. Default cu_seqlens_q.
        q_lengths: for a padded batch, queries of each item; rows past them get out 0 and lse -inf.
        k_lengths: for a padded batch, keys of each item; those past them do not exist. Where q_len is k_len, one of the
            two alone is refused if `causal`, `window` or a function of i looks at positions: the default q_start, by
            each item's lengths, is not what a padded square means. Give both (self-attention), or q_start=0, which puts
            row i at key i.
        return_lse: also return the log-sum-exp of each row's scores, natural logarithm, (batch, q_heads, q_len), or
            (q_heads, total_length) packed; float32, or float64 for float64. A row that sees nothing has -inf, and out
            0.
        out: where to write the result, in the layout of q. If the call raises, a lookup out of range included, it is as
            it was.
        engine: "cpu" or "cuda" insists on one. Default: where q, k and v lie.
        precision: of float32 products on a GPU: "ieee", or by tensor cores "tf32x3" (three products for each) or "tf32"
            (10 bits). The CPU, and a GPU with head dims above 128, always compute as "ieee".

    Returns:
        The output, shaped as q with value_dim last, of q's kind and dtype; with return_lse a pair (out, lse).

    Raises:
        speedlight.Error: the argument, what was expected and what came. Nothing has been written then. It is also a
            ValueError or TypeError.

    Source: Dao et al., FlashAttention (2022); the arithmetic is described in docs/numerics.md.

    >>> import numpy as np, speedlight as sl
    >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
    >>> out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape, float(out[0, 0, 0, 0])
    ((1, 2, 3, 4), (1, 2, 3), 1.0)
    """
    check_precision(precision)
    if engine is not None or arrays.on_gpu(q):
        place = engines.chosen(engine, arrays.describe(q, "q", gpu=True))
        if place != "cpu" or engine == "cuda":
            return _on_gpu(
                q,
                k,
                v,
                layout,
                return_lse,
                out,
                precision,
                causal=causal,
                q_start=q_start,
                k_start=k_start,
                scale=scale,
                window=window,
                mask=mask,
                score=score,
                sink_logits=sink_logits,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_k=cu_seqlens_k,
                q_lengths=q_lengths,
                k_lengths=k_lengths,
            )
    threads, isa = engines.threads_now(), current_isa()
    key = None
    if cu_seqlens_q is None and cu_seqlens_k is None and kept(mask) and kept(score):
        numbers = (causal, q_start, k_start, scale, layout, threads)
        lists = (
            ()
            if window is sink_logits is q_lengths is k_lengths is None
            else (window, sink_logits, q_lengths, k_lengths)
        )
        key = _key((q, k, v) if out is None else (q, k, v, out), numbers, (isa.name, mask, score), lists)
        prepared = _prepared.get(key) if key else None
        places = _places(prepared, q, k, v, out) if prepared is not None and type(return_lse) is bool else None
        if prepared is not None and places is not None:
            return _again(prepared, places, q, layout, return_lse, out)
    if not isinstance(return_lse, bool):
        raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
    a, b, c = (arrays.describe(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    problem, cu_q, cu_k = from_arrays(
        a,
        b,
        c,
        causal=causal,
        q_start=q_start,
        k_start=k_start,
        scale=scale,
        layout=layout,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        mask=mask,
        score=score,
        window=window,
        sink_logits=sink_logits,
        q_lengths=q_lengths,
        k_lengths=k_lengths,
    )
    shape = (*a.shape[:-1], problem.value_dim)
    result, target = arrays.out_for(a, shape, out, (a, b, c), staged=out is not None and engines.may_fail(problem))
    prepared = engines.of("cpu").prepare(
        problem,
        Rows(layout, a, target.strides, cu_q and cu_q[:-1]),
        Dense(layout, b, c, cu_k and cu_k[:-1]),
        threads,
        isa,
    )
    prepared.reach = [
        (low - x.address, high - x.address) for x in (a, b, c, target.final or target) for low, high in (x.extent(),)
    ]
    prepared.staged = target.final is not None
    lse, lse_array = _lse(a, layout) if return_lse else (None, None)
    prepared.run(a.address, b.address, c.address, target.address, lse_array.address if lse_array else 0)
    arrays.deliver(target)
    if key is not None:
        if len(_prepared) >= _MEMO:
            _prepared.clear()
        _prepared[key] = prepared
    if out is None:
        result, lse = arrays.like_input(a, result), lse if lse is None else arrays.like_input(a, lse)
    return (result, lse) if return_lse else result


def _on_gpu(q: Any, k: Any, v: Any, layout: Any, return_lse: Any, out: Any, precision: str, **options: Any) -> Any:
    """attention() on arrays of a GPU: enqueued on PyTorch's current stream, not waited for."""
    if not isinstance(return_lse, bool):
        raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
    a, b, c = (arrays.describe(x, name, gpu=True) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    problem, cu_q, cu_k = from_arrays(a, b, c, layout=layout, **options)
    launch = engines.gpu()
    launch.check(problem, a.device, precision)
    staged = out is not None and engines.may_fail(problem)
    result, target = arrays.out_for(a, (*a.shape[:-1], problem.value_dim), out, (a, b, c), staged=staged)
    lse, lse_array = _lse(a, layout) if return_lse else (None, None)
    where = None if lse_array is None else lse_array.tensor
    launch.run(
        problem,
        layout,
        a.tensor,
        launch.arrays_of(b.tensor, c.tensor, layout),
        target.tensor,
        where,
        cu_q=cu_q,
        cu_k=cu_k,
        precision=precision,
    )
    arrays.deliver(target)
    if out is None:
        result, lse = arrays.like_input(a, result), lse if lse is None else arrays.like_input(a, lse)
    return (result, lse) if return_lse else result


@leaves_graph
def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    k_lengths: Any,
    *,
    causal: bool = False,
    mask: Any = None,
    score: Any = None,
    sink_logits: Any = None,
    scale: float | None = None,
    layout: str = "bhld",
    cu_seqlens_q: Any = None,
    return_lse: bool = False,
    out: Any = None,
    engine: str | None = None,
) -> Any:
    """attention() over keys and values in pages of any size, as serving engines keep them.

    Args:
        q: (batch, q_heads, q_len, head_dim), or as `layout` says. The last query of a sequence is at its last key.
        k_pages: (pages, page_size, kv_heads, head_dim), of q's dtype and kind. Any strides: pages that have heads first
            come as k_pages.swapaxes(1, 2). On a GPU q, k_pages and v_pages lie there together.
        v_pages: (pages, page_size, kv_heads, value_dim).
        block_table: (batch, most) ints: which pages hold a sequence, in order. Entries past its length may be any ints.
        k_lengths: keys of each sequence. On a GPU this and the block table may be int32 or int64 tensors of that GPU,
            which nobody waits for (a CUDA graph may change them): kernels skip what is out of range, and synchronize()
            raises it.
        causal: False, or True: a query sees keys up to its own place.
        mask, score, sink_logits, scale, layout, return_lse, out, engine: as for attention().
        cu_seqlens_q: for "lhd", offsets of the sequences in q. Default one query for each.

    Returns:
        As attention() does, and the same bits.

    Raises:
        speedlight.Error: the argument, what was expected and what came; of the block table, every entry that is used is
        checked.

    >>> import numpy as np, speedlight as sl
    >>> q, pages = np.ones((2, 4, 1, 8), np.float32), np.ones((5, 3, 2, 8), np.float32)
    >>> sl.attention_paged(q, pages, pages, [[4, 0], [2, -1]], [5, 3]).shape
    (2, 4, 1, 8)
    """
    check_layout(layout)
    if not isinstance(causal, bool):
        raise ArgumentError(f"causal: expected False or True (aligned at the last key); got {shown(causal)}.")
    if not isinstance(return_lse, bool):
        raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
    a, k, v = (arrays.describe(x, name, gpu=True) for x, name in ((q, "q"), (k_pages, "k_pages"), (v_pages, "v_pages")))
    if len(k.shape) != 4 or min(k.shape[1:]) < 1:
        raise ArgumentError(f"k_pages: expected shape (pages, page_size, kv_heads, head_dim); got {k.shape}.")
    if len(v.shape) != 4 or v.shape[:3] != k.shape[:3] or v.shape[3] < 1:
        raise ArgumentError(f"v_pages: expected shape {(*k.shape[:3], 'value_dim')}, as k_pages has; got {v.shape}.")
    for x in (k, v):
        if x.dtype != a.dtype:
            raise ArgumentTypeError(
                f"{x.name}: expected dtype {a.dtype}, as q has; got {x.dtype}. Convert one of them."
            )
        if (x.kind == "torch") != (a.kind == "torch"):
            raise ArgumentTypeError(f"{x.name}: expected the same kind of array as q; got {x.kind} beside {a.kind}.")
        if x.device != a.device:
            raise ArgumentError(
                f"{x.name}: expected an array on {a.device}, as q; got one on {x.device}. Move one of them."
            )
    pages, page_size, kv_heads, head_dim = k.shape
    place = engines.chosen(engine, a)
    lists = tables = lengths_there = None
    if place != "cpu" or engine == "cuda":
        tables, lengths_there, lengths = engines.gpu().paged_tables(block_table, k_lengths, pages, page_size, a.device)
    else:
        lists, lengths = page_lists(block_table, k_lengths, pages, page_size, SLACK)
    rows, first = None, None
    if layout == "lhd":
        cu = range(len(lengths) + 1) if cu_seqlens_q is None else cu_seqlens_q
        rows = packed_lengths(cu, a.shape[0] if a.shape else 0, len(lengths))
        first = tuple(itertools.accumulate(rows, initial=0))[:-1]
    elif cu_seqlens_q is not None:
        raise ArgumentError(f"cu_seqlens_q: expected None for layout={layout!r}; packed sequences take layout='lhd'.")
    problem = from_cache(
        a,
        dtype=a.dtype,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=v.shape[3],
        k_lengths=lengths,
        causal=causal,
        scale=scale,
        layout=layout,
        q_lengths=rows,
        mask=mask,
        score=score,
        sink_logits=sink_logits,
        shortest=None if lengths_there is None else 1,
    )
    shape = (*a.shape[:-1], problem.value_dim)
    result, target = arrays.out_for(a, shape, out, (a, k, v), staged=out is not None and engines.may_fail(problem))
    if lists is None:
        launch = engines.gpu()
        launch.check(problem, a.device, "ieee")
        keys = launch.paged_keys(k.tensor, v.tensor, tables, lengths_there, max(lengths, default=0))
        lse, lse_array = _lse(a, layout) if return_lse else (None, None)
        cu_q = None if first is None or rows is None else (*first, sum(rows))
        launch.run(
            problem, layout, a.tensor, keys, target.tensor, None if lse_array is None else lse_array.tensor, cu_q=cu_q
        )
        arrays.deliver(target)
        if out is None:
            result = arrays.like_input(a, result)
        return (result, arrays.like_input(a, lse)) if return_lse else result
    places = Pages(
        False,
        page_size,
        k.strides[2],
        k.strides[0],
        k.strides[1],
        v.strides[2],
        v.strides[0],
        v.strides[1],
        k.strides[3],
        v.strides[3],
    )
    each = [lists.ctypes.data + i * lists.strides[0] for i in range(len(lengths))]
    rows = Rows(layout, a, target.strides, first)
    prepared = engines.of("cpu").prepare(problem, rows, Paged(places, each), engines.threads_now(), current_isa())
    lse, lse_array = _lse(a, layout) if return_lse else (None, None)
    prepared.run(a.address, k.address, v.address, target.address, lse_array.address if lse_array else 0)
    arrays.deliver(target)
    if out is None:
        result = arrays.like_input(a, result)
    return (result, arrays.like_input(a, lse)) if lse_array else result


def _lse(q: arrays.Array, layout: str) -> tuple[Any, arrays.Array]:
    """A new array for the log-sum-exp of a call with these queries."""
    axes = LAYOUTS[layout]
    shape = tuple(q.shape[a] for a in axes[:-1])
    return arrays.empty_like(q, shape, "float64" if q.dtype == "float64" else "float32")


# --- repeated calls
#
# What was prepared depends on: shapes, strides, dtypes and kind of q, k, v and of a given out; every option, by exact
# type and bits; threads and vector unit; mask and score, by what they compute. Addresses, memory and overlap are looked
# at each time.


def _key(tensors: tuple[Any, ...], numbers: tuple[Any, ...], others: tuple[Any, ...], lists: tuple[Any, ...]) -> Any:
    """What a repeated call is found by; None where the arrays are neither NumPy's nor PyTorch's or an option is odd."""
    causal, q_start, k_start, scale, layout = numbers[:5]
    if not (type(causal) in (bool, str) and (q_start is None or type(q_start) is int) and type(k_start) is int):
        return None
    if not (scale is None or type(scale) in (float, int)) or type(layout) is not str:
        return None
    key: list[Any] = [marshal.dumps(numbers, 2), others]  # types and bits: 0.0 is not -0.0, True not 1
    for x in lists:
        x = None if x is None else _exactly(x)
        if x is ...:
            return None
        key.append(x)
    if type(tensors[0]) is np.ndarray:
        for x in tensors:
            if type(x) is not np.ndarray:
                return None
            key += (x.shape, x.strides, x.dtype)
        return tuple(key)
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level >= 0:  # there may be tangents
        return None
    for x in tensors:
        if (
            type(x) is not torch.Tensor
            or x.requires_grad
            or x.is_nested
            or not x.is_cpu
            or x.layout is not torch.strided
            or x.is_neg()
        ):
            return None
        key += (x.shape, x.stride(), x.dtype)
    return tuple(key)


_PLAIN, _MOST_VALUES = frozenset((int, float, type(None))), 4096


def _exactly(x: Any) -> Any:
    """A short list as something to find a call by: types and bits of its values now. ... for what cannot be told so."""
    if type(x) in (list, tuple):
        return (type(x), marshal.dumps(x, 2)) if _PLAIN.issuperset(map(type, x)) else ...
    if type(x) is np.ndarray:
        return (x.dtype, x.shape, x.tobytes()) if x.dtype.kind in "iuf" and x.size <= _MOST_VALUES else ...
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or not x.is_cpu or x.numel() > _MOST_VALUES:
        return ...
    try:
        return x.dtype, _exactly(arrays.listed(x, "", ""))
    except Error:  # checked again, by name, where nothing is kept
        return ...


def _places(prepared: Call, q: Any, k: Any, v: Any, out: Any) -> list[int] | None:
    """Addresses of q, k, v and a given out.

    None where one lacks memory, or `out` is read-only or not apart from each input.
    """
    given = (q, k, v) if out is None else (q, k, v, out)
    if type(q) is np.ndarray:
        places = [arrays.address_of(x) for x in given]
    else:
        places = []
        for x, (_, high) in zip(given, prepared.reach, strict=False):
            try:
                address = x.data_ptr()
            except RuntimeError:  # a wrapper of torch.func
                return None
            if high and (not address or x.untyped_storage().nbytes() < high + x.storage_offset() * x.itemsize):
                return None
            places.append(address)
    if out is not None:
        if type(out) is np.ndarray and not out.flags.writeable:
            return None
        ends = [(at + low, at + high) for at, (low, high) in zip(places, prepared.reach, strict=True)]
        first, last = ends[3]
        if not all(high <= first or last <= low for low, high in ends[:3]):
            return None
    return places


def _again(prepared: Call, places: list[int], q: Any, layout: str, return_lse: bool, out: Any) -> Any:
    """A call that was prepared before: only the addresses are new."""
    new, at = (
        _new(q, (*q.shape[:-1], prepared.problem.value_dim)) if out is None or prepared.staged else (out, places[3])
    )
    lse, lse_at = _new(q, tuple(q.shape[a] for a in LAYOUTS[layout][:-1]), logarithms=True) if return_lse else (None, 0)
    prepared.run(places[0], places[1], places[2], at, lse_at)
    if out is not None and new is not out:
        arrays.deliver(replace(arrays.describe(new, "out"), final=arrays.describe(out, "out")))
        new = out
    return (new, lse) if return_lse else new


def _new(q: Any, shape: tuple[int, ...], *, logarithms: bool = False) -> tuple[Any, int]:
    """A new array beside q, for out or for log-sum-exps, and its address."""
    if type(q) is np.ndarray:
        new = np.empty(shape, np.float32 if logarithms and q.dtype != np.float64 else q.dtype)
        return new, arrays.address_of(new)
    torch: Any = sys.modules["torch"]
    new = torch.empty(
        shape, dtype=torch.float32 if logarithms and q.dtype is not torch.float64 else q.dtype, device="cpu"
    )
    if type(new) is not torch.Tensor or not (new.data_ptr() or 0 in shape):
        arrays.check_plain_tensor(new, "out")  # a mode of PyTorch's makes other tensors now
    return new, new.data_ptr()


@leaves_graph
def synchronize() -> None:
    """Waits for the GPUs that were used, and raises what kernels have noted: page numbers and lengths that were out of
    range.

    Does nothing where none was used.

    >>> import speedlight as sl
    >>> sl.synchronize()
    """
    if engines.gpu_used():
        engines.gpu().synchronize()


@leaves_graph
def plan(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    batch: int | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    q_len: int | None = None,
    k_len: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    dtype: Any = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    score: Any = None,
    sink_logits: Any = None,
    q_start: Any = None,
    k_start: int = 0,
    scale: float | None = None,
    layout: str = "bhld",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    exact: bool = False,
    device: Any = None,
    precision: str = "ieee",
) -> Plan:
    """What attention() with these arguments would do: FLOPs, bytes, workspace, tiles, and the time it cannot beat.

    Takes either arrays, as attention() does, or sizes alone: batch 1 and float32 unless said; kv_heads are q_heads,
    k_len is q_len, and value_dim head_dim; lengths that are left out are those of q_lengths, k_lengths or cu_seqlens.
    Every option of attention() counts in both. Sizes are of arrays that lie without gaps in the layout. Runs nothing
    but, once per process, a few milliseconds that measure the machine's peak and bandwidth. Of a mask, the tiles that
    are computed are always known. What is visible in them is known where a mask is made of comparisons of i, j and i -
    j; else `exact=True` counts it, key by key in the tiles that are mixed, and without it visible_pairs and flops are
    None. Of arrays on a GPU, or with `device="cuda"`, the plan is that of the GPU's kernel, its peak that of a product
    of matrices of the dtype there.

    Returns:
        A `Plan`: a frozen dataclass that prints as a table. FLOPs count visible work; a multiply-add is two.

    Raises:
        speedlight.Error: as attention() does.

    >>> import speedlight as sl
    >>> p = sl.plan(batch=1, q_heads=32, kv_heads=8, q_len=8192, k_len=8192, head_dim=128, dtype="bfloat16",
    ...             causal=True)
    >>> p.visible_pairs == 32 * 8192 * 8193 // 2
    True
    """
    if not isinstance(exact, bool):
        raise ArgumentTypeError(f"exact: expected True or False; got {shown(exact)}.")
    check_precision(precision)
    options = {
        "causal": causal, "q_start": q_start, "k_start": k_start, "scale": scale, "layout": layout,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "mask": mask, "score": score, "window": window, "sink_logits": sink_logits,
        "q_lengths": q_lengths, "k_lengths": k_lengths,
    }  # fmt: skip
    sizes = {
        "batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "k_len": k_len, "head_dim": head_dim,
        "value_dim": value_dim, "dtype": dtype,
    }  # fmt: skip
    if q is not None or k is not None or v is not None:
        for name, x in sizes.items():
            if x is not None:
                raise ArgumentError(f"{name}: expected either arrays or sizes; got both. Leave the sizes out.")
        a, b, c = (arrays.describe(x, name, gpu=True) for x, name in ((q, "q"), (k, "k"), (v, "v")))
        device = a.device if device is None and a.device != "cpu" else device
        problem, _, _ = from_arrays(a, b, c, **options)
        strides = Dense(layout, b, c).strides(problem.dtype)
    else:
        sizes["batch"], sizes["dtype"] = 1 if batch is None else batch, "float32" if dtype is None else dtype
        problem = from_sizes(**sizes, **options)
        strides = Strides(heads_adjoin=layout != "bhld" and problem.kv_heads > 1)
    return engines.plan(problem, device, strides, precision, exact)
