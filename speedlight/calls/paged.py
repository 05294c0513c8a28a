"""`attention_paged()`: keys and values in pages that are the caller's."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import numpy as np

from .. import engines
from ..arrays.array import DTYPES, Array, address_of, describe
from ..arrays.layouts import check_together
from ..cpu.memory.operands import Paged, Pages, Rows
from ..cpu.memory.records import SLACK
from ..errors import ArgumentError, Error
from ..host.machine import current_isa
from ..host.memo import Memo
from ..problem.block_tables import check_pages, page_lists
from ..problem.build import Stored, from_stored
from ..problem.checks import check_flag, check_layout, packed_lengths
from ..problem.key import key_of
from ..problem.options import AnyArray, ArrayOf, BlockTable, Engine, Ints, PagedCall, PagedOptions, T, public
from ..problem.problem import SPAN, Options, Problem, spans_of
from ..problem.results import results_for
from .prepared import Repeatable

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[False] = False, **options: Unpack[PagedCall],
) -> T: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
    return_lse: Literal[True], **options: Unpack[PagedCall],
) -> tuple[T, T]: ...  # fmt: skip
@overload
def attention_paged(
    q: ArrayOf[T], k_pages: AnyArray, v_pages: AnyArray, block_table: BlockTable, k_lengths: Ints, *,
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
    **options: Unpack[PagedOptions],
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
        return_lse, out, engine: as for attention().
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
    """
    given = Options.of(attention_paged, options)
    tensors, key = (q, k_pages, v_pages) if out is None else (q, k_pages, v_pages, out), None
    if (
        given.q_start is given.q_lengths is None
        and (engine is None or (type(engine) is str and engine == "cpu"))
        and type(return_lse) is bool
    ):
        key = key_of(tensors, given, (engines.threads_now(), current_isa().name))
        known = None if key is None else _forms.get(key)
        if known is not None:
            lists = page_lists(block_table, k_lengths, known.pages, known.page_size, SLACK)
            step = _steps.get(known.step(lists[1]))
            results = None if step is None else step.run(tensors, *lists, return_lse, given.seed_word())
            if results is not None:
                return results
    given = given.spelled()
    check_layout(given.layout)
    check_flag("return_lse", return_lse)
    a, k, v = (describe(x, name, gpu=True) for x, name in ((q, "q"), (k_pages, "k_pages"), (v_pages, "v_pages")))
    check_pages(k, v)
    check_together(k, v, a)
    place = engines.chosen(engine, a)
    if place != "cpu" or engine == "cuda":
        return _paged_on_gpu(a, k, v, block_table, k_lengths, given, return_lse, out)
    lists, lengths = page_lists(block_table, k_lengths, k.shape[0], k.shape[1], SLACK)
    problem, offsets = _paged(a, k, v, lengths, given)
    results = results_for(a, problem, given, return_lse, out, (a, k, v))
    prepared = _prepared(problem, a, k, v, lists, given.layout, offsets, results.out.strides)
    prepared.run(a.address, k.address, v.address, results.out.address, results.lse_address)
    if key is not None and prepared.how.kind == "decode" and given.causal != "top-left" and all(problem.q_lengths):
        _remember(key, a, k, v, lists, lengths, given, results)
    return results.returned()


def _prepared(
    problem: Problem, q: Array, k: Array, v: Array, lists: np.ndarray, layout: str, offsets: Any, out_strides: Any
) -> Any:
    """The CPU's call."""
    pages = Pages(
        False, k.shape[1],
        k_head=k.strides[2], k_page=k.strides[0], k_row=k.strides[1], k_column=k.strides[3],
        v_head=v.strides[2], v_page=v.strides[0], v_row=v.strides[1], v_column=v.strides[3],
    )  # fmt: skip
    rows = Rows(layout, q, out_strides, None if offsets is None else offsets[:-1])
    keys = Paged(pages, _each(lists))
    return engines.of("cpu").prepare(problem, rows, keys, engines.threads_now(), current_isa())


def _each(lists: np.ndarray) -> list[int]:
    """Where each sequence's list begins."""
    first, step = address_of(lists), lists.strides[0]
    return [first + i * step for i in range(len(lists))]


class _Step(NamedTuple):
    """A prepared call over any tables and lengths of as many spans."""

    call: Any
    repeatable: Repeatable
    inline: int  # keys below which no other thread is woken

    def run(
        self, tensors: tuple[Any, ...], lists: np.ndarray, lengths: tuple[int, ...], return_lse: bool, seed: Any
    ) -> Any:
        """What attention_paged() returns, or None, as Repeatable.again()."""
        items = self.call.items_for(lengths, _each(lists))
        threads = 1 if sum(lengths) < self.inline else 0
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


def _remember(
    key: Any, q: Array, k: Array, v: Array, lists: np.ndarray, lengths: tuple[int, ...], options: Options, results: Any
) -> None:
    """Prepares the call for longer sequences, too. Where those would be refused, nothing is remembered."""
    form = _forms.get(key) or _Form(next(_numbers), *k.shape[:2])
    at = form.step(lengths)
    if at is None or 0 in q.shape:
        return
    try:
        problem, offsets = _paged(q, k, v, (at[2] * SPAN,) * len(lengths), options, 1)
    except Error:
        return
    prepared = _prepared(problem, q, k, v, lists, options.layout, offsets, results.out.strides)
    row = k.shape[2] * (k.shape[3] + v.shape[3]) * DTYPES[k.dtype][1]
    inline = prepared.inline_bytes // (row * max(1, max(problem.q_lengths) // 8))
    repeatable = Repeatable(prepared.run, options.layout, [q, k, v, results.out])
    _steps.put(at, _Step(prepared, repeatable, inline), prepared.size)
    _forms.put(key, form, options.table_bytes())


def _paged(
    q: Array, k: Array, v: Array, lengths: tuple[int, ...], options: Options, shortest: Any = None
) -> tuple[Problem, tuple[int, ...] | None]:
    """The problem of queries over pages, and the offsets of packed queries; `shortest` as Stored has it."""
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


def _paged_on_gpu(
    q: Array, k: Array, v: Array, block_table: Any, k_lengths: Any, options: Options,
    return_lse: bool, out: Any,
) -> Any:  # fmt: skip
    """attention_paged() on arrays of a GPU."""
    launch = engines.gpu()
    table, lengths_there, lengths = launch.paged_tables(block_table, k_lengths, k.shape[0], k.shape[1], q.device)
    placed = options.q_start is not None or options.causal == "top-left"
    problem, offsets = _paged(q, k, v, lengths, options, None if lengths_there is None or placed else 1)
    results = results_for(q, problem, options, return_lse, out, (q, k, v))
    launch.check(problem, q.device, "ieee")
    keys = launch.paged_keys(k.tensor, v.tensor, table, lengths_there, max(lengths, default=0), placed)
    lse = None if results.lse is None else results.lse.tensor
    launch.run(problem, options.layout, q.tensor, keys, results.out.tensor, lse, cu_q=offsets)
    return results.returned()
