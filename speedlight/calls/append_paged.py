"""append_paged(): writes new keys and values into the caller's pages."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import engines
from ..arrays.array import describe
from ..arrays.dtypes import PAGE_CODES, conversion
from ..arrays.making import tell_written
from ..arrays.memory import Array, overlap, overlaps_itself
from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, join_words
from ..problem import page_scales
from ..problem.block_tables import block_table_of, check_pages, page_lengths, page_numbers
from ..problem.checks import check_layout, check_pages_left, new_counts, packed_counts
from ..problem.options import AnyArray, BlockTable, Engine, Ints, Layout, Scales, our_layout
from ..problem.problem import LAYOUTS
from ..problem.signatures import public

_TOKENS = ("float32", "float16", "bfloat16")  # of what is stored as codes


@public()
def append_paged(
    k_pages: AnyArray,
    v_pages: AnyArray | None,
    block_table: BlockTable,
    k_lengths: Ints,
    k: AnyArray,
    v: AnyArray | None = None,
    *,
    new_lengths: Ints | None = None,
    layout: Layout = "bhld",
    engine: Engine | None = None,
    k_scales: Scales | None = None,
    v_scales: Scales | None = None,
) -> Any:
    """Writes new keys and values into the caller's pages, after the tokens that each sequence has there.

    Args:
        k_pages: (pages, page_size, kv_heads, head_dim), as attention_paged() takes it; written in place. A NumPy array
            or a PyTorch tensor that can be written, of any strides.
        v_pages: (pages, page_size, kv_heads, value_dim), or None where values are the first columns of k_pages (MLA).
        block_table: (batch, most) ints: which pages hold a sequence, in order. Pages that receive tokens must be
            listed already, and belong to one sequence only.
        k_lengths: keys of each sequence so far. On a GPU this, the block table and new_lengths may be int32 or int64
            tensors of that GPU, which nobody waits for: a sequence that has no room, or a page that does not exist,
            stays as it is, and synchronize() raises it.
        k: (batch, kv_heads, n_new, head_dim), or as `layout` says; of the pages' kind, where they lie, and of their
            dtype; for pages of codes float32, float16 or bfloat16.
        v: (batch, kv_heads, n_new, value_dim). Without v_pages, k and v are latents and their rotary parts, which lie
            side by side in k_pages; or k alone has both.
        new_lengths: new tokens of each sequence, where some have fewer than n_new. For "lhd" they add up to all tokens;
            default all to a single sequence, else one each.
        layout: of k and v: "bhld", "blhd", or "lhd" for packed (total new, heads, dim).
        engine: as for attention().
        k_scales, v_scales: of pages of codes, as attention_paged() takes them. For tokens and heads, (pages, page_size,
            kv_heads), they are written: a row's largest magnitude over the largest code. Others are read: a code is
            x / scale, rounded to nearest, of two to the even one, and -128 to 127 of int8 at most. A scale of 0 makes
            codes of 0.

    Returns:
        The new lengths, of k_lengths' kind, for attention_paged() and the next call. Tokens are written past the old
        lengths, where no call reads: a call that fails or is interrupted has appended nothing.

    Raises:
        CacheFull: a row of block_table has too few pages; nothing has been written.
        speedlight.Error: the argument, what was expected and what came; nothing has been written.

    >>> import numpy as np, speedlight as sl
    >>> k_pages, v_pages = np.zeros((2, 5, 4, 2, 8), np.float32)  # five pages of four tokens, two heads
    >>> table, lengths, x = [[4, 0], [2, 1]], [3, 0], np.ones((2, 2, 3, 8), np.float32)
    >>> lengths = sl.append_paged(k_pages, v_pages, table, lengths, x, x, new_lengths=[3, 2]); lengths
    [6, 2]
    >>> k_pages[[4, 0, 2], :, 0, 0].tolist()
    [[0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]]
    >>> sl.attention_paged(x, k_pages, v_pages, table, lengths, causal=True, q_lengths=[3, 2]).shape
    (2, 2, 3, 8)
    """
    check_layout(ours := our_layout(layout))
    if ours == "hld":
        raise ArgumentError("layout: expected 'bhld', 'blhd' or 'lhd', which say whose tokens they are; got 'hld'.")
    for name, x in (("k_pages", k_pages), ("k", k)):
        if isinstance(x, (tuple, list)) and len(x) == 2 and all([hasattr(part, "shape") for part in x]):
            raise ArgumentTypeError(
                f"{name}: expected an array; got a {type(x).__name__} of two. Latents and rotary parts in two arrays "
                "are k_pages and v_pages, of new tokens k and v."
            )
    named: list[tuple[str, Any]] = [("k_pages", k_pages), ("v_pages", v_pages), ("k", k), ("v", v)]
    if v_pages is None:
        named = _split_latents(k_pages, k, v)
    elif v is None:
        raise ArgumentTypeError(
            "v: expected an array, as v_pages is one; got None. Where values are the first columns of k_pages, give "
            "v_pages=None."
        )
    pages_k, pages_v, new_k, new_v = (describe(x, name, gpu=True, codes="pages" in name) for name, x in named)
    if v_pages is not None:
        _check_target(pages_k, pages_v)
    is_on_gpu = engines.is_on_gpu(engine, pages_k)
    scales = None
    if pages_k.dtype in PAGE_CODES or k_scales is not None or v_scales is not None:
        given = page_scales.as_arrays(k_scales, v_scales, are_one=v_pages is None)
        page_scales.check_codes(pages_k, pages_v, new_k, given, on_gpu=is_on_gpu)
        if v_pages is None and v is not None:
            raise UnsupportedError(
                "v: expected None beside k_pages of codes, whose rows have one scale; got a rotary part. Give whole "
                "rows as k."
            )
        scales = _describe_scales(given, pages_k, pages_v)
    for x, target in ((new_k, pages_k), (new_v, pages_v if scales is None else new_k)):
        _check_like(x, target, _TOKENS if scales is not None and x is new_k else (target.dtype,))
    if v_pages is None and is_on_gpu:
        raise UnsupportedError(
            "v_pages: expected pages of values on a GPU, whose kernels read no values from k_pages; got None. Give "
            "arrays on the CPU."
        )
    own = engines.of("cuda" if is_on_gpu else "cpu")
    pages, new = (pages_k, pages_v), (new_k, new_v)
    there = own.resident_tables(block_table, k_lengths, pages_k.device)
    if there is not None:
        table, lengths = there
        _check_tokens(new_k, new_v, pages_k, pages_v, ours, len(table))
        for x in pages:
            tell_written(x)
        return own.append(pages, new, ours, table, lengths, new_lengths)
    table = block_table_of(block_table)
    _check_tokens(new_k, new_v, pages_k, pages_v, ours, len(table))
    counts = _counts(new_lengths, ours, len(table), new_k)
    capacity = table.shape[1] * pages_k.shape[1]
    before = page_lengths(k_lengths, len(table), capacity)
    check_pages_left("k_lengths", "Give block_table more pages", before, counts, capacity)
    _check_places(table, before, counts, pages_k)
    now = _convert_lengths(k_lengths, [a + b for a, b in zip(before, counts, strict=True)])
    for x in pages:
        tell_written(x)
    for x in scales or ():
        if len(x.shape) == 3:
            tell_written(x)
    own.append(pages, new, ours, table, list(before), counts, scales)
    return now


def _split_latents(k_pages: Any, k: Any, v: Any) -> list[tuple[str, Any]]:
    """Returns pages of latents as two parts of their rows, and new tokens likewise, each with its name.

    The second part has no columns where k alone has whole rows.
    """
    pages, new = describe(k_pages, "k_pages", gpu=True, codes=True), describe(k, "k", gpu=True)
    _check_target(pages, pages)
    row, columns = pages.shape[-1], new.shape[-1] if new.shape else 0
    way = f"Give latents and rotary parts of {row} columns together as k and v, or whole rows of k_pages as k alone."
    if v is None:
        if columns != row:
            raise ArgumentError(f"k: expected {row} columns, as k_pages has; got {columns} (shape {new.shape}). {way}")
        v = k[..., columns:]
    else:
        rest = describe(v, "v", gpu=True)
        if columns > row or not rest.shape or rest.shape[-1] != row - columns:
            raise ArgumentError(
                f"v: expected the rotary part, {max(row - columns, 0)} columns beside {columns} of k; got shape "
                f"{rest.shape}. {way}"
            )
    return [("k_pages", k_pages[..., :columns]), ("k_pages", k_pages[..., columns:]), ("k", k), ("v", v)]


# --- what is checked before anything is written


def _check_target(k: Array, v: Array) -> None:
    """Raises unless pages can be written, each token to memory of its own. Of latents, v is k."""
    check_pages(k, v)
    _check_like(v, k)
    for x in (k,) if v is k else (k, v):
        if not x.writeable:
            raise ArgumentError(f"{x.name}: expected memory that can be written; got a read-only array. Use a copy.")
        if overlaps_itself(x):
            raise ArgumentError(f"{x.name}: expected memory of its own for every token; got pages that share some.")
    if v is not k and overlap(k, v):
        raise ArgumentError("v_pages: expected memory of its own; got some of k_pages'.")


def _describe_scales(given: tuple[Any, Any], k: Array, v: Array) -> tuple[Array, Array]:
    """Returns where scales of keys and values lie; raises unless what is written of them has memory of its own."""
    of_keys = page_scales.describe_scales("k_scales", given[0], k)
    if given[1] is given[0] and v.name == k.name:
        of_values, found = of_keys, [of_keys]
    else:
        of_values = page_scales.describe_scales("v_scales", given[1], v)
        found = [of_keys, of_values]
    for n, x in enumerate(found):
        if len(x.shape) < 3:
            continue
        if not x.writeable:
            raise ArgumentError(f"{x.name}: expected memory that can be written; got a read-only array. Use a copy.")
        if overlaps_itself(x):
            raise ArgumentError(f"{x.name}: expected a place of its own for every scale; got strides {x.strides}.")
        for other in (k, v, *found[:n], *found[n + 1 :]):
            if overlap(x, other):
                raise ArgumentError(f"{x.name}: expected memory of its own; got some of {other.name}'.")
    return of_keys, of_values


def _check_like(x: Array, other: Array, dtypes: tuple[str, ...] = ()) -> None:
    """Raises unless an array is of another's kind, on its device, and of its dtype, or of one of some dtypes."""
    dtypes = dtypes or (other.dtype,)
    if x.dtype not in dtypes:
        wanted = f"dtype {other.dtype}, as {other.name} has"
        if dtypes is _TOKENS:
            wanted = f"{join_words(_TOKENS)}, to be stored as {other.dtype}"
        raise ArgumentTypeError(
            f"{x.name}: expected {wanted}; got {x.dtype}. Convert it first: {conversion(x.name, dtypes[0])}."
        )
    if (x.kind == "torch") != (other.kind == "torch"):
        raise ArgumentTypeError(
            f"{x.name}: expected the same kind of array as {other.name}; got {x.kind} beside {other.kind}."
        )
    if x.device != other.device:
        raise ArgumentError(f"{x.name}: expected an array on {other.device}, as {other.name}; got one on {x.device}.")


def _check_tokens(k: Array, v: Array, k_pages: Array, v_pages: Array, layout: str, batch: int) -> None:
    """Raises unless new tokens have the shapes that pages and the block table ask for."""
    for x, pages in ((k, k_pages), (v, v_pages)):
        heads, dim = pages.shape[2:]
        new: Any = "n_new" if x is k or len(k.shape) != len(layout) else k.shape[LAYOUTS[layout][-2]]
        expected = {"bhld": (batch, heads, new, dim), "blhd": (batch, new, heads, dim), "lhd": (new, heads, dim)}[
            layout
        ]
        fits = [a in ("n_new", b) for a, b in zip(expected, x.shape, strict=False)]
        if len(x.shape) != len(expected) or not all(fits):
            raise ArgumentError(
                f"{x.name}: expected shape ({', '.join(map(str, expected))}) for layout={layout!r}, by block_table and "
                f"{pages.name}; got {x.shape}."
            )


def _counts(new_lengths: Any, layout: str, batch: int, k: Array) -> list[int]:
    n_new = k.shape[LAYOUTS[layout][-2]]
    if layout == "lhd":
        return packed_counts("new_lengths", new_lengths, batch, n_new)
    return new_counts(new_lengths, batch, n_new)


def _check_places(table: np.ndarray, before: tuple[int, ...], counts: list[int], pages: Array) -> None:
    """Raises unless new tokens go to pages that exist, each to a place of its own."""
    count, page_size = pages.shape[:2]
    start, each = np.array(before, np.int64), np.array(counts, np.int64)
    first = start // page_size
    item, at = _number_each(first, np.where(each > 0, -(-(start + each) // page_size) - first, 0))
    page = table[item, at]
    wrong = (page < 0) | (page >= count)
    if wrong.any():
        n = int(np.argmax(wrong))
        raise ArgumentError(
            f"block_table: expected {page_numbers(count)} where new tokens go; got {page[n]} at [{item[n]}, {at[n]}]."
        )
    if len(set(page.tolist())) == len(page):
        return
    item, at = _number_each(start, each)  # a page comes twice: whether any of its places does
    page = table[item, at // page_size]
    place = page.astype(np.int64) * page_size + at % page_size
    order = np.argsort(place, kind="stable")
    same = np.flatnonzero(np.diff(place[order]) == 0)
    if len(same):
        a, b = order[same[0]], order[same[0] + 1]
        raise ArgumentError(
            f"block_table: expected a page for one sequence alone where new tokens go; got page {page[a]} where "
            f"sequences {item[a]} and {item[b]} grow. Copy a page that is shared before one of them writes to it."
        )


def _number_each(first: np.ndarray, each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns, of so many things of each sequence, numbered from its first, whose each is, and its number."""
    item = np.repeat(np.arange(len(each)), each)
    return item, np.arange(len(item)) + np.repeat(first - (np.cumsum(each) - each), each)


def _convert_lengths(k_lengths: Any, after: list[int]) -> Any:
    """Returns lengths in the kind that the caller's are of."""
    if is_tensor(k_lengths):
        torch = sys.modules["torch"]
        narrow = max(after, default=0) > torch.iinfo(k_lengths.dtype).max
        return k_lengths.new_tensor(after, dtype=torch.int64 if narrow else k_lengths.dtype)
    if isinstance(k_lengths, np.ndarray):
        return np.array(after, np.int64 if max(after, default=0) > np.iinfo(k_lengths.dtype).max else k_lengths.dtype)
    return after
