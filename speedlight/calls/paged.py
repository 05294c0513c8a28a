"""attention_paged(): attends to keys and values in the caller's pages."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from .. import engines
from ..arrays import latents
from ..arrays.array import describe
from ..arrays.dtypes import PAGE_CODES
from ..arrays.latents import KeyPair, describe_keys
from ..arrays.layouts import check_beside, check_together
from ..arrays.memory import Array
from ..errors import ArgumentError, Error
from ..problem import page_scales
from ..problem.block_tables import check_pages
from ..problem.build import Stored, from_stored
from ..problem.checks import check_flag, check_layout, packed_lengths
from ..problem.operands import PagedKeys, Rows
from ..problem.options import (
    AnyArray,
    ArrayOf,
    BlockTable,
    Engine,
    Int,
    Ints,
    Keys,
    Options,
    PagedCall,
    PagedOptions,
    Scales,
    T,
)
from ..problem.prepared import CallKey, Prepared, addresses_in, prepared_calls
from ..problem.problem import SPAN, Problem, spans_of
from ..problem.results import Results, results_for
from ..problem.signatures import public

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_paged(
    q: ArrayOf[T], k_pages: Keys, v_pages: AnyArray | None, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedCall],
) -> T: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: Keys, v_pages: AnyArray | None, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[True], **options: Unpack[PagedCall],
) -> tuple[T, T]: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: Keys, v_pages: AnyArray | None, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: bool, **options: Unpack[PagedCall],
) -> T | tuple[T, T]: ...  # fmt: skip
@public(PagedOptions)
def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: BlockTable,
    k_lengths: Ints,
    *,
    return_lse: bool = False,
    out: AnyArray | None = None,
    engine: Engine | None = None,
    value_dim: Int | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
    **options: Unpack[PagedOptions],
) -> Any:
    """Computes attention() over keys and values in pages of any size, as serving engines keep them (PagedAttention).

    Args:
        q: (batch, q_heads, q_len, head_dim), or as `layout` says.
        k_pages: (pages, page_size, kv_heads, head_dim), of q's kind, of dtypes as for attention(). Any strides: pages
            that have heads first come as k_pages.swapaxes(1, 2). On a GPU q, k_pages and v_pages lie there together.
        v_pages: (pages, page_size, kv_heads, value_dim), or None, as for attention(): then values are the keys' first
            value_dim columns. k_pages may be a pair, too.
        block_table: (batch, most) ints: which pages hold a sequence, in order. Entries past its length may be any ints.
        k_lengths: keys of each sequence. On a GPU this and the block table may be int32 or int64 tensors of that GPU,
            which nobody waits for (a CUDA graph may change them): kernels skip what is out of range, and synchronize()
            raises it.
        return_lse, out, engine, value_dim: as for attention().
        k_scales, v_scales: of pages of codes (int8, float8_e4m3fn, float8_e5m2), on the CPU: keys are codes times
            k_scales. A number, or float32 of shape (kv_heads,), (kv_heads, dim) for channels, or (pages, page_size,
            kv_heads) for tokens and heads; any strides, any finite numbers. Each call reads them anew. Where v_pages is
            None, values have the scales of keys.
        **options: as for attention(). By default a sequence's last query is at its last key, and packed queries
            ("lhd") are one for each sequence. Rows past q_lengths get out 0 and lse -inf.

    Returns:
        As attention() does, and the same bits.

    Raises:
        speedlight.Error: the argument, what was expected and what came; of the block table, every entry that is used is
        checked.

    >>> import numpy as np, speedlight as sl
    >>> q, pages = np.ones((2, 4, 1, 8), np.float32), np.ones((5, 3, 2, 8), np.float32)
    >>> sl.attention_paged(q, pages, pages, [[4, 0], [2, -1]], [5, 3]).shape
    (2, 4, 1, 8)
    >>> codes = pages.astype(np.int8)
    >>> sl.attention_paged(q, codes, codes, [[4, 0], [2, -1]], [5, 3], k_scales=0.5, v_scales=0.25)[0, 0, 0, 0]
    np.float32(0.25)
    """
    given = Options.of(attention_paged, options)
    scales: tuple[Any, Any] | None = None
    if k_scales is not None or v_scales is not None:
        scales = page_scales.as_arrays(k_scales, v_scales, are_one=v_pages is None)
    if v_pages is None or value_dim is not None or isinstance(k_pages, (tuple, list)):
        k_pages, v_pages = latents.resolve(k_pages, v_pages, value_dim, ("k_pages", "v_pages"))
    key = results = None
    on_cpu = engine is None or (type(engine) is str and engine == "cpu")
    if given.q_start is given.q_lengths is None and on_cpu and type(return_lse) is bool:
        key, results = _repeat(q, k_pages, v_pages, scales, block_table, k_lengths, given, return_lse, out)
    if results is not None:
        return results
    given = given.spelled()
    check_layout(given.layout)
    check_flag("return_lse", return_lse)
    if type(k_pages) is KeyPair and engines.runs_on_gpu(q, engine):
        k_pages, v_pages = k_pages.joined()
    a = describe(q, "q", gpu=True)
    k, v = describe_keys(k_pages, v_pages, ("k_pages", "v_pages"), gpu=True, codes=True)
    check_pages(k, v)
    coded = _describe_codes(a, k, v, scales, engine)
    own = engines.of("cuda" if engines.is_on_gpu(engine, a) else "cpu")
    tables = own.read_tables(block_table, k_lengths, k.shape[0], k.shape[1], a.device)
    placed = given.q_start is not None or (isinstance(given.causal, str) and given.causal == "top-left")
    problem, offsets = _build(a, k, v, tables.lengths, given, None if tables.on_device is None or placed else 1)
    results = results_for(a, problem, given, return_lse, out, (a, k, v, *coded))
    rows = Rows(given.layout, a, results.out.strides, offsets and offsets[:-1])
    each = [page_scales.for_tokens(x, k) for x in coded]
    keys = PagedKeys(k, v, tables, placed, *each)
    if page_scales.have_channels(coded):
        _attend_folded(problem, rows, keys, results, coded)
        return results.returned()
    own.attend(problem, rows, keys, results)
    if key is not None and not placed and problem.rows is None and all(problem.q_lengths):
        _remember(key, rows, keys, given, results.out)
    return results.returned()


def _describe_codes(q: Array, k: Array, v: Array, scales: tuple[Any, Any] | None, engine: Any) -> list[Array]:
    """Returns where the scales of pages of codes lie, as they were given; none of other pages, which are checked."""
    if k.dtype not in PAGE_CODES and v.dtype not in PAGE_CODES and scales is None:
        check_together(k, v, q)
        return []
    page_scales.check_codes(k, v, q, scales, on_gpu=engines.is_on_gpu(engine, q))
    assert scales is not None
    for x in (k, v):
        check_beside(x, q)
    found = page_scales.describe_scales("k_scales", scales[0], k)
    if scales[1] is scales[0]:
        return [found, found]
    return [found, page_scales.describe_scales("v_scales", scales[1], v)]


def _attend_folded(problem: Problem, rows: Rows, keys: PagedKeys, results: Results, scales: list[Array]) -> None:
    """Attends with scales of channels: those of keys multiply queries, those of values results, all in float32."""
    (of_keys, of_values), layout = scales, rows.layout
    queries = rows.q.numpy().astype(np.float32)
    if len(of_keys.shape) == 2:
        queries = page_scales.fold(queries, of_keys.numpy(), layout)
    wide = describe(queries, "q")
    found = Results(wide, results.out.shape, None if results.lse is None else results.lse.shape, None, ())
    engines.cpu().attend(
        replace(problem, dtype="float32"), Rows(layout, wide, found.out.strides, rows.first), keys, found
    )
    out = found.out.numpy()
    if len(of_values.shape) == 2:
        out = page_scales.fold(out, of_values.numpy()[:, : problem.value_dim], layout)
    into = results.out.numpy()
    with np.errstate(all="ignore"):
        into[...] = out.astype(into.dtype, copy=False)
    if results.lse is not None and found.lse is not None:
        results.lse.numpy()[...] = found.lse.numpy()


def _repeat(
    q: Any, k_pages: Any, v_pages: Any, scales: tuple[Any, Any] | None, block_table: Any, k_lengths: Any,
    options: Options, return_lse: bool, out: Any,
) -> tuple[CallKey | None, Any]:  # fmt: skip
    """Repeats a call if it was prepared before, over any tables, and lengths of as many spans; returns its key and its
    results: each may be None.
    """
    of_options, cpu = options.key(), engines.cpu()
    if of_options is None or type(k_pages) is KeyPair:
        return None, None
    read, into = cpu.read(0, q, k_pages, v_pages, *(scales or ())), None if out is None else cpu.read(0, out)
    if read is None or (out is not None and into is None):
        return None, None
    key = CallKey("paged", of_options, read[0], cpu.machine(), into and into[0])
    prepared = prepared_calls.get(key)
    if prepared is None:
        return key, None
    tables = cpu.read_tables(block_table, k_lengths, k_pages.shape[0], k_pages.shape[1], "cpu")
    lengths = list(tables.lengths)
    if len(lengths) != len(prepared.counts) or not prepared.fits(lengths):
        return key, None
    prepared = cpu.together(prepared, tables, k_pages.shape[1])
    more: Any = {"return_lse": return_lse, "seed": options.seed_word(), "lengths": lengths, "lists": tables.addresses()}
    at = 0 if into is None else addresses_in(into[1])[0]
    return key, prepared.run(q, read[1], out=out, at=at, **more)


def _remember(key: CallKey, rows: Rows, keys: PagedKeys, options: Options, out: Array) -> None:
    """Prepares the call for any tables and lengths of as many spans. Where longer sequences would be refused, nothing
    is kept.
    """
    q, k, v, lengths = rows.q, keys.k, keys.v, keys.tables.lengths
    if not lengths or not min(lengths) or 0 in q.shape:
        return
    try:
        problem, _ = _build(q, k, v, (spans_of(max(lengths)) * SPAN,) * len(lengths), options, 1)
    except Error:
        return
    call = engines.cpu().prepare(problem, rows, keys)
    prepared = Prepared(call, given=(q, k, v, out.final or out), staged=out.final is not None)
    prepared_calls.put(key, prepared, prepared.size)


def _build(
    q: Array, k: Array, v: Array, lengths: tuple[int, ...], options: Options, shortest: Any = None
) -> tuple[Problem, tuple[int, ...] | None]:
    """Builds the problem of queries over pages, with the offsets of packed queries; `shortest` as Stored has it."""
    offsets = None
    if options.layout == "lhd":
        if options.q_lengths is not None:
            raise ArgumentError("q_lengths: expected None for layout='lhd'; packed sequences have cu_seqlens_q.")
        given = range(len(lengths) + 1) if options.cu_seqlens_q is None else options.cu_seqlens_q
        if given is not options.cu_seqlens_q and len(q.shape) == 3 and q.shape[0] != len(lengths):
            raise ArgumentError(
                f"q: expected {len(lengths)} rows, a query for each sequence; got {q.shape[0]} (shape {q.shape}). "
                "For other numbers of queries give cu_seqlens_q=, beside layout='lhd'."
            )
        rows = packed_lengths(given, q.shape[0] if q.shape else 0, len(lengths))
        offsets = tuple(itertools.accumulate(rows, initial=0))
        options = replace(options, q_lengths=rows)
    elif options.cu_seqlens_q is not None:
        raise ArgumentError(
            f"cu_seqlens_q: expected None for layout={options.layout!r}; packed sequences take layout='lhd'."
        )
    stored = Stored(k.dtype, k.shape[2], k.columns, v.shape[3], lengths, shortest=shortest, keeper="k_pages")
    return from_stored(q, stored, options, apart=True), offsets
