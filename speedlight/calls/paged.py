"""`attention_paged()`: keys and values in pages that are the caller's."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from .. import engines
from ..arrays.array import DTYPES, Array, describe
from ..arrays.layouts import check_together
from ..errors import ArgumentError, Error
from ..host.graph_breaks import leaves_graph
from ..host.machine import current_isa
from ..host.memo import Memo
from ..problem.block_tables import check_pages
from ..problem.build import Stored, from_stored
from ..problem.checks import check_flag, check_layout, packed_lengths
from ..problem.key import key_of
from ..problem.operands import PagedKeys, PageTables, Rows
from ..problem.options import (
    AnyArray,
    ArrayOf,
    BlockTable,
    Causal,
    Engine,
    Int,
    Ints,
    Layout,
    Mask,
    PagedOptions,
    Scores,
    Sinks,
    T,
    Window,
)
from ..problem.problem import SPAN, Options, Problem, new_options, spans_of
from ..problem.results import results_for
from .prepared import Repeatable

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedOptions],
) -> T: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[True], **options: Unpack[PagedOptions],
) -> tuple[T, T]: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: bool, **options: Unpack[PagedOptions],
) -> T | tuple[T, T]: ...  # fmt: skip
@leaves_graph
def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: BlockTable,
    k_lengths: Ints,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: Mask | None = None,
    score: Scores | None = None,
    sink_logits: Sinks | None = None,
    q_start: Int | Ints | None = None,
    scale: float | None = None,
    layout: Layout = "bhld",
    cu_seqlens_q: Ints | None = None,
    q_lengths: Ints | None = None,
    return_lse: bool = False,
    out: AnyArray | None = None,
    engine: Engine | None = None,
    dropout: float = 0.0,
    seed: Int | None = None,
) -> Any:
    """attention() over keys and values in pages of any size, as serving engines keep them.

    Args:
        q: (batch, q_heads, q_len, head_dim), or as `layout` says.
        k_pages: (pages, page_size, kv_heads, head_dim), of q's kind, of dtypes as for attention(). Any strides: pages
            that have heads first come as k_pages.swapaxes(1, 2). On a GPU q, k_pages and v_pages lie there together.
        v_pages: (pages, page_size, kv_heads, value_dim).
        block_table: (batch, most) ints: which pages hold a sequence, in order. Entries past its length may be any ints.
        k_lengths: keys of each sequence. On a GPU this and the block table may be int32 or int64 tensors of that GPU,
            which nobody waits for (a CUDA graph may change them): kernels skip what is out of range, and synchronize()
            raises it.
        q_start: position of the first query of a sequence, an int or one for each. Default: its last query is at its
            last key.
        cu_seqlens_q: for "lhd", offsets of the sequences in q. Default one query for each.
        q_lengths: for a padded batch, queries of each sequence; rows past them get out 0 and lse -inf.
        causal, window, mask, score, sink_logits, scale, layout, return_lse, out, engine, dropout, seed: as for
            attention().

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
    options = new_options(Options, (
        causal, window, mask, score, sink_logits, q_start, 0, scale, layout, cu_seqlens_q, None, q_lengths, None,
        "ieee", dropout, seed,
    ))  # fmt: skip
    tensors, key = (q, k_pages, v_pages) if out is None else (q, k_pages, v_pages, out), None
    if (
        q_start is q_lengths is None
        and (engine is None or (type(engine) is str and engine == "cpu"))
        and type(return_lse) is bool
    ):
        key = key_of(tensors, options, (engines.threads_now(), current_isa().name))
        known = None if key is None else _forms.get(key)
        if known is not None:
            tables = engines.of("cpu").read_tables(block_table, k_lengths, known.pages, known.page_size, "cpu")
            step = _steps.get(known.step(tables.lengths))
            results = None if step is None else step.run(tensors, tables, return_lse, seed if dropout else 0)
            if results is not None:
                return results
    options = options.spelled()
    check_layout(options.layout)
    check_flag("return_lse", return_lse)
    a, k, v = (describe(x, name, gpu=True) for x, name in ((q, "q"), (k_pages, "k_pages"), (v_pages, "v_pages")))
    check_pages(k, v)
    check_together(k, v, a)
    own = engines.of("cuda" if engines.is_on_gpu(engine, a) else "cpu")
    tables = own.read_tables(block_table, k_lengths, k.shape[0], k.shape[1], a.device)
    placed = options.q_start is not None or options.causal == "top-left"
    problem, offsets = _paged(a, k, v, tables.lengths, options, None if tables.on_device is None or placed else 1)
    results = results_for(a, problem, options, return_lse, out, (a, k, v))
    rows = Rows(options.layout, a, results.out.strides, offsets and offsets[:-1])
    keys = PagedKeys(k, v, tables, placed)
    call = own.attend(problem, rows, keys, results)
    if key is not None and call is not None and not placed and call.how.kind == "decode" and all(problem.q_lengths):
        _remember(key, rows, keys, options, results)
    return results.returned()


class _Step(NamedTuple):
    """A prepared call over any tables and lengths of as many spans."""

    call: Any
    repeatable: Repeatable
    inline: int  # keys below which no other thread is woken

    def run(self, tensors: tuple[Any, ...], tables: PageTables, return_lse: bool, seed: Any) -> Any:
        """What attention_paged() returns, or None, as Repeatable.again()."""
        items = self.call.items_for(tables.lengths, tables.addresses())
        threads = 1 if sum(tables.lengths) < self.inline else 0
        return self.repeatable.again(tensors, return_lse, seed, ctypes.addressof(items), threads)


class _Form(NamedTuple):
    """Arrays and options that were checked."""

    number: int  # no two forms have the same
    pages: int
    page_size: int

    def step(self, lengths: tuple[int, ...]) -> Any:
        """The key of a step over keys of these lengths: how many there are, and how many spans the longest has."""
        return (self.number, len(lengths), spans_of(max(lengths))) if lengths and min(lengths) else None


_numbers = itertools.count()
_forms: Memo[_Form] = Memo(256, 64 << 20)  # by what key_of() says, which knows all but tables, lengths and seeds
_steps: Memo[_Step] = Memo(256, 64 << 20)


def _remember(key: Any, rows: Rows, keys: PagedKeys, options: Options, results: Any) -> None:
    """Prepares the call for longer sequences, too. Where those would be refused, nothing is remembered."""
    q, k, v, lengths = rows.q, keys.k, keys.v, keys.tables.lengths
    form = _forms.get(key) or _Form(next(_numbers), *k.shape[:2])
    at = form.step(lengths)
    if at is None or 0 in q.shape:
        return
    try:
        problem = _paged(q, k, v, (at[2] * SPAN,) * len(lengths), options, 1)[0]
    except Error:
        return
    call = engines.cpu().prepare(problem, rows, keys)
    row = k.shape[2] * (k.shape[3] + v.shape[3]) * DTYPES[k.dtype][1]
    inline = call.inline_bytes // (row * max(1, max(problem.q_lengths) // 8))
    repeatable = Repeatable(call.run, options.layout, [q, k, v, results.out])
    _steps.put(at, _Step(call, repeatable, inline), call.size)
    _forms.put(key, form, options.table_bytes())


def _paged(
    q: Array, k: Array, v: Array, lengths: tuple[int, ...], options: Options, shortest: Any = None
) -> tuple[Problem, tuple[int, ...] | None]:
    """Builds the problem of queries over pages, and the offsets of packed queries; `shortest` as Stored has it."""
    offsets = None
    if options.layout == "lhd":
        if options.q_lengths is not None:
            raise ArgumentError("q_lengths: expected None for layout='lhd'; packed sequences have cu_seqlens_q.")
        given = range(len(lengths) + 1) if options.cu_seqlens_q is None else options.cu_seqlens_q
        if given is not options.cu_seqlens_q and len(q.shape) == 3 and q.shape[0] != len(lengths):
            raise ArgumentError(
                f"q: expected {len(lengths)} rows, a query for each sequence; got {q.shape[0]} (shape {q.shape}). "
                "Other numbers of queries are told by cu_seqlens_q=."
            )
        rows = packed_lengths(given, q.shape[0] if q.shape else 0, len(lengths))
        offsets = tuple(itertools.accumulate(rows, initial=0))
        options = options._replace(q_lengths=rows)
    elif options.cu_seqlens_q is not None:
        raise ArgumentError(
            f"cu_seqlens_q: expected None for layout={options.layout!r}; packed sequences take layout='lhd'."
        )
    stored = Stored(k.dtype, k.shape[2], k.shape[3], v.shape[3], lengths, shortest=shortest, keeper="k_pages")
    return from_stored(q, stored, options), offsets
