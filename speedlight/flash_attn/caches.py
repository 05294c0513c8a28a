"""Attention over a cache that is the caller's own tensors, contiguous or paged, and new tokens put into it in place."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError, Table, UnsupportedError, expression, rotary
from ..adapting import check_flag, integer
from ..problem.block_tables import page_numbers
from ..problem.checks import check_pages_left, is_one, item_lengths, listed, packed_lengths
from .options import check_apart, check_tensors
from .sequences import PageNames, Side, attend, attend_pages


class Cache(NamedTuple):
    """Keys and values, (batch, capacity, heads, dim) or (pages, page, heads, dim), and whose rows or pages they are."""

    k: Tensor
    v: Tensor
    seqlens: Any = None
    rows: Any = None  # cache_batch_idx
    leftpad: Any = None
    table: Any = None
    table_name: str = "block_table"


class New(NamedTuple):
    """Tokens to append: (batch, length, heads, dim), or packed beside offsets; and how they and the queries turn."""

    k: Tensor | None = None
    v: Tensor | None = None
    offsets: Any = None
    cos: Any = None
    sin: Any = None
    interleaved: bool = True
    rotary_seqlens: Any = None


class Places(NamedTuple):
    """Places of new tokens: page and slot of each; which sequence it is of, and which token of the new ones."""

    page: Tensor
    slot: Tensor
    item: Tensor
    nth: Tensor


def attend_cache(q: Tensor, offsets: Any, cache: Cache, new: New, qv: Tensor | None, options: dict[str, Any]) -> Any:
    """Appends, then attends: (out, lse). If anything is raised, the cache is as it was."""
    _check(q, cache, new)
    q_lens = None if offsets is None else packed_lengths(offsets, q.shape[0], len(offsets) - 1)
    batch = q.shape[0] if q_lens is None else len(q_lens)
    cache = _find_rows(cache, batch)
    capacity = cache.k.shape[1] * (1 if cache.table is None else cache.table.shape[1])
    before = _count_before(cache, new, batch, capacity)
    counts = _count_new(new, batch)
    way = "Make k_cache and v_cache longer" if cache.table is None else f"Give {cache.table_name} more pages"
    check_pages_left("cache_seqlens", way, before, counts, capacity)
    options = _hide_left(cache, before, capacity, options)
    after = [a + b for a, b in zip(before, counts, strict=True)]
    queries = Side("q", offsets)
    if new.k is None:
        return _attend(q, qv, cache, after, queries, options)
    at = _find_places(cache, before, counts, new)
    q, qv, k, v = _copy_apart(cache, q, qv, new.k, new.v)
    q, k = _turn(q, q_lens, new._replace(k=k), at, before, options)
    # what stands in the slots is kept until the call is through
    kept = [x[at.page, at.slot] for x in cache[:2]]
    try:
        cache.k[at.page, at.slot] = k
        cache.v[at.page, at.slot] = v
        return _attend(q, qv, cache, after, queries, options)
    except BaseException:
        for x, was in zip(cache[:2], kept, strict=True):
            x[at.page, at.slot] = was
        raise


def _attend(q: Tensor, qv: Tensor | None, cache: Cache, after: list[int], queries: Side, options: Any) -> Any:
    """Attends over what is in the cache now. Picked rows of a contiguous cache are pages, one for each sequence.

    With qv, queries and keys are longer, and each score is the sum of two.
    """
    k, v, table, name = cache.k, cache.v, cache.table, cache.table_name
    if qv is not None:
        q, k = torch.cat((q, qv), -1), torch.cat((k, v), -1)
    if table is None and cache.rows is None and queries.offsets is None:
        return attend(q, k[: len(after)], v[: len(after)], queries, Side("k", None, after), options, True)
    if table is None:
        name = "cache_batch_idx"
        table = (torch.arange(len(after)) if cache.rows is None else cache.rows)[:, None]
    return attend_pages(
        q, (k, v), table, after, queries, options, PageNames("k_cache", "v_cache", name, "cache_seqlens")
    )


def check_given(q: Any, cache: Cache, new: New, qv: Any = None, offsets: Any = None, hint: str = "") -> None:
    """Raises unless every argument that should be a tensor is one."""
    seqlens = None if is_one(cache.seqlens) else cache.seqlens
    check_tensors(
        {"q": q, "k_cache": cache.k, "v_cache": cache.v},
        {"k": new.k, "v": new.v, "qv": qv, "rotary_cos": new.cos, "rotary_sin": new.sin},
        {
            "cache_seqlens": seqlens,
            "cache_batch_idx": cache.rows,
            "cache_leftpad": cache.leftpad,
            cache.table_name: cache.table,
            "cu_seqlens_q": offsets,
            "cu_seqlens_k_new": new.offsets,
            "rotary_seqlens": new.rotary_seqlens,
        },
        strict=True,
        hint=hint,
    )


def _check(q: Any, cache: Cache, new: New) -> None:
    """Raises unless that is right which must be before anything is written; all else attention_paged() checks."""
    known = [("q", q), ("k_cache", cache.k), ("v_cache", cache.v)]
    known += [(name, x) for name, x in (("k", new.k), ("v", new.v)) if x is not None]
    for name, x in known:
        if x.requires_grad and torch.is_grad_enabled():
            raise UnsupportedError(
                f"{name}: expected a tensor that does not require grad, there is no backward pass over a cache; got "
                "one that does. Call under torch.no_grad(), or use .detach()."
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ArgumentTypeError(
                f"{name}: expected {q.dtype} on {q.device}, as q; got {x.dtype} on {x.device}. Convert one of them."
            )
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if x.dim() != 4 or x.shape[:3] != cache.k.shape[:3]:
            raise ArgumentError(
                f"{name}: expected 4 dimensions, (batch, length, heads, dim) or (pages, page, heads, dim), the first "
                f"three as k_cache has; got {tuple(x.shape)} beside {tuple(cache.k.shape)}."
            )
    if new.k is not None:
        check_apart({"k_cache": cache.k, "v_cache": cache.v})
    if (new.k is None) != (new.v is None):
        missing, given = ("v", "k") if new.v is None else ("k", "v")
        raise ArgumentError(f"{missing}: expected a tensor beside {given}; got None.")
    if (new.cos is None) != (new.sin is None) or (new.cos is not None and new.k is None):
        raise ArgumentError(
            "rotary_cos: expected rotary_sin beside it, and k and v to append: what is in the cache has been turned "
            "before. Use speedlight.rotary() for queries alone."
        )
    check_flag("rotary_interleaved", new.interleaved)
    if new.cos is not None:
        _check_rotary(new.cos, new.sin, q.shape[-1])


def _check_rotary(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.dim() != 2 or x.shape != cos.shape or not 1 <= x.shape[1] <= head_dim // 2:
            raise ArgumentError(
                f"{name}: expected shape (positions, rotary_dim / 2), of 1 to {head_dim // 2} columns as headdim is "
                f"{head_dim}, rotary_sin as rotary_cos; got {tuple(x.shape)}."
            )


def _copy_apart(cache: Cache, *tensors: Any) -> list[Any]:
    """Returns the tensors in memory that new tokens are not written to."""
    ends = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in (cache.k.untyped_storage(), cache.v.untyped_storage())]
    found = []
    for x in tensors:
        first = None if x is None else x.untyped_storage().data_ptr()
        shared = first is not None and any([start <= first < end for start, end in ends])
        found.append(x.clone() if x is not None and shared else x)
    return found


def _find_rows(cache: Cache, batch: int) -> Cache:
    """Returns the cache with its rows or pages as tensors that go with a batch."""
    name = cache.table_name
    if cache.table is not None:
        table = torch.as_tensor(cache.table)
        lead = batch if cache.rows is None else "rows"
        if table.dim() != 2 or (cache.rows is None and table.shape[0] != batch) or table.is_floating_point():
            raise ArgumentError(
                f"{name}: expected ints of shape ({lead}, most pages); got {tuple(table.shape)} of {table.dtype}."
            )
        if cache.rows is not None:
            table = table[_check_rows(cache.rows, batch, table.shape[0], name).to(table.device)]
        return cache._replace(table=table, rows=None)
    if cache.rows is not None:
        return cache._replace(rows=_check_rows(cache.rows, batch, cache.k.shape[0], "k_cache"))
    if cache.k.shape[0] < batch:
        raise ArgumentError(
            f"k_cache: expected {batch} rows or more, as q has; got {cache.k.shape[0]}. Or give cache_batch_idx."
        )
    return cache


def _check_rows(given: Any, batch: int, room: int, whose: str) -> Tensor:
    """Returns which row of a contiguous cache, or of a table of pages, is each sequence's."""
    rows = [integer("cache_batch_idx", n) for n in listed(given, "cache_batch_idx", "a sequence of ints")]
    if len(rows) != batch:
        raise ArgumentError(f"cache_batch_idx: expected {batch} rows, one for each sequence; got {len(rows)}.")
    for item, n in enumerate(rows):
        if not 0 <= n < room:
            raise ArgumentError(
                f"cache_batch_idx: expected rows of {whose}, 0 to {room - 1}; got {n} for sequence {item}."
            )
    return torch.tensor(rows, dtype=torch.int64)


def _count_before(cache: Cache, new: New, batch: int, capacity: int) -> tuple[int, ...]:
    """Returns the keys of every sequence before the call."""
    given = cache.seqlens
    if given is None:
        if new.k is not None:
            raise ArgumentError("cache_seqlens: expected the lengths of the cache beside k; got None.")
        return (capacity,) * batch
    given = [given] * batch if is_one(given) else given
    return item_lengths("cache_seqlens", given, batch, capacity, "what the cache holds")


def _count_new(new: New, batch: int) -> tuple[int, ...]:
    """Returns the number of new tokens of every sequence."""
    if new.k is None or new.v is None:
        return (0,) * batch
    if new.k.dim() != (4 if new.offsets is None else 3):
        lead = "batch, length" if new.offsets is None else "total"
        raise ArgumentError(f"k: expected shape ({lead}, heads, dim); got {tuple(new.k.shape)}.")
    if new.offsets is not None:
        return packed_lengths(new.offsets, new.k.shape[0], batch)
    return (new.k.shape[1],) * batch


def _hide_left(cache: Cache, before: tuple[int, ...], capacity: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns options with a mask that hides what is left of where each sequence begins."""
    if cache.leftpad is None:
        return options
    pads = item_lengths("cache_leftpad", cache.leftpad, len(before), capacity)
    for item, (pad, n) in enumerate(zip(pads, before, strict=True)):
        if pad > n:
            raise ArgumentError(f"cache_leftpad: expected at most cache_seqlens, {n}; got {pad} for sequence {item}.")
    of = Table(np.array(pads, np.int64), "cache_leftpad")
    return {**options, "mask": expression(lambda b, h, i, j: j >= of[b], "mask")}


def _find_places(cache: Cache, before: tuple[int, ...], counts: tuple[int, ...], new: New) -> Places:
    """Returns where new tokens go. Raises unless they fit there, in shape, too."""
    k, v, page_size = new.k, new.v, cache.k.shape[1]
    assert k is not None and v is not None
    device, batch, starts = cache.k.device, len(before), torch.tensor(before, dtype=torch.int64)
    if new.offsets is None:
        item = torch.arange(batch)[:, None].expand(batch, k.shape[1])
        nth = torch.arange(k.shape[1]).expand(batch, -1)
    else:
        item = torch.repeat_interleave(torch.arange(batch), torch.tensor(counts))
        nth = torch.cat([torch.arange(n) for n in counts])
    for name, x, like in (("k", k, cache.k), ("v", v, cache.v)):
        shape = (*item.shape, *like.shape[2:])
        if x.shape != shape:
            raise ArgumentError(f"{name}: expected shape {shape}, by q and {name}_cache; got {tuple(x.shape)}.")
    at = starts[item] + nth
    if cache.table is None:
        page = item if cache.rows is None else cache.rows[item]
        return Places(page.to(device), at.to(device), item, nth)
    page = cache.table.cpu().to(torch.int64)[item, at // page_size]
    if page.numel() and not 0 <= int(page.min()) <= int(page.max()) < cache.k.shape[0]:
        raise ArgumentError(
            f"{cache.table_name}: expected {page_numbers(cache.k.shape[0])} where new tokens go; got "
            f"{int(page.min())} to {int(page.max())}."
        )
    return Places(page.to(device), (at % page_size).to(device), item, nth)


def _turn(
    q: Tensor, q_lens: tuple[int, ...] | None, new: New, at: Places, before: tuple[int, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Turns queries and new keys by their positions; without a mask of positions queries are at the first new key."""
    k = new.k
    assert k is not None
    if new.cos is None:
        return q, k
    room = new.cos.shape[0]
    given = before if new.rotary_seqlens is None else item_lengths(
        "rotary_seqlens", new.rotary_seqlens, len(before), room, "the positions of rotary_cos"
    )  # fmt: skip
    starts = torch.tensor(given, dtype=torch.int64)
    moves = options["causal"] or options.get("window") is not None
    if q_lens is None:
        nth = torch.arange(q.shape[1])
        q_at, q_layout = starts[:, None] + (nth if moves else nth * 0), "blhd"
    else:
        each = [n + torch.arange(m) * bool(moves) for n, m in zip(given, q_lens, strict=True)]
        q_at, q_layout = torch.cat(each), "lhd"
    most = max([int(x.max()) + 1 for x in (q_at, starts[at.item] + at.nth) if x.numel()], default=0)
    if most > room:
        raise ArgumentError(f"rotary_cos: expected {most} positions or more, as far as tokens go; got {room}.")
    dims = 2 * new.cos.shape[-1]
    turn = {"interleaved": new.interleaved, "dims": dims}
    k_layout = "blhd" if new.offsets is None else "lhd"
    k_at = (starts[at.item] + at.nth).to(k.device)
    return (
        rotary(q, new.cos, new.sin, positions=q_at.to(q.device), layout=q_layout, **turn),
        rotary(k, new.cos, new.sin, positions=k_at, layout=k_layout, **turn),
    )
