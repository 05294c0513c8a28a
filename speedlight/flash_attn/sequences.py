"""Queries and keys of many sequences: padded, packed or in pages, and how much of them is used."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays.array import is_followed
from ..calls.paged import attention_paged
from ..errors import ArgumentError, ArgumentTypeError, Error, rename
from ..problem.checks import item_lengths, packed_offsets
from ..torch.attending import attention
from .options import check_tensors


class Side(NamedTuple):
    """Queries, or keys: packed where there are offsets, else padded; of each sequence only what is used, if given."""

    name: str  # "q" or "k"
    offsets: Any = None
    used: Any = None


PADDED = Side("q"), Side("k")  # of calls that have no offsets
_AXES = {3: "(total, nheads, headdim) beside", 4: "(batch, seqlen, nheads, headdim) without"}


class PageNames(NamedTuple):
    """What a caller calls the arguments of attention_paged()."""

    k: str
    v: str
    table: str
    lengths: str


PAGES = PageNames("k", "v", "block_table", "seqused_k")


class Packing(NamedTuple):
    """Offsets of packed sequences, and which rows of all they are, where not all."""

    offsets: list[int]
    rows: Tensor | None


def attended(q: Tensor, k: Tensor, v: Tensor, queries: Side, keys: Side, said: dict[str, Any], return_lse: bool) -> Any:
    """attention(), of whatever both sides are; rows of queries that are not used get 0, and -inf."""
    check_sides(q, k, v, queries, keys)
    if queries.used is keys.used is None:
        if queries.offsets is keys.offsets is None:
            return attention(q, k, v, layout="blhd", return_lse=return_lse, **said)
        if queries.offsets is not None and keys.offsets is not None:
            cu_q, cu_k = queries.offsets, keys.offsets
            said = {**said, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            return attention(q, k, v, layout="lhd", return_lse=return_lse, **said)
    if queries.offsets is keys.offsets is None:
        said = {**said, "k_lengths": lengths(keys, k)}
        if queries.used is not None:
            said["q_lengths"] = lengths(queries, q)
        if q.shape[1] == k.shape[1]:  # where attention() asks for starts: the last query is at the last key
            both = zip(lengths(queries, q), said["k_lengths"], strict=False)
            said["q_start"] = [n - m for m, n in both]
        return attention(q, k, v, layout="blhd", return_lse=return_lse, **said)
    check_tensors({"q": q, "k": k, "v": v}, {}, {}, strict=True)
    packing = packed(queries, q)
    offsets, rows = packed(keys, k)
    k, v = (_rows(x, keys, rows) for x in (k, v))
    said = {**said, "layout": "lhd", "cu_seqlens_q": packing.offsets, "cu_seqlens_k": offsets}
    found = attention(_rows(q, queries, packing.rows), k, v, return_lse=True, **said)
    return _placed(found, q, queries, packing, return_lse)


def check_sides(q: Any, k: Any, v: Any, queries: Side, keys: Side) -> None:
    """Each is packed or padded, as its side says."""
    for name, x, side in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        dims = 4 if side.offsets is None else 3
        if x.ndim != dims:
            raise ArgumentError(
                f"{name}: expected {dims} dimensions, {_AXES[dims]} cu_seqlens_{side.name}; got shape {tuple(x.shape)}."
            )


def check_offsets(given: dict[str, Any]) -> None:
    """Offsets that a call cannot do without, by name."""
    for name, x in given.items():
        if x is None:
            raise ArgumentTypeError(
                f"{name}: expected offsets of the sequences, (batch + 1,) ints from 0 to the total; got None."
            )


def _check_pages(pages: tuple[Tensor, Tensor], names: tuple[str, str]) -> None:
    for name, x in zip(names, pages, strict=True):
        if x.ndim != 4 or x.shape[1] < 1:
            raise ArgumentError(
                f"{name}: expected pages (pages, page_size, nheads_k, headdim) of at least one token; got shape "
                f"{tuple(x.shape)}."
            )


def attended_pages(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    table: Any,
    k_lengths: Any,
    queries: Side,
    said: dict[str, Any],
    names: PageNames = PAGES,
) -> Any:
    """attention_paged(), (out, lse), whose errors have the caller's names. Where gradients flow keys are copied."""
    _check_pages(pages, names[:2])
    check_sides(q, q, q, queries, queries)
    try:
        if any([is_followed(x) for x in (q, *pages) if isinstance(x, Tensor)]):
            keys, k, v = _gathered(q, pages, table, k_lengths)
            return attended(q, k, v, queries, keys, said, True)
        said = {**said, "return_lse": True}
        if queries.offsets is queries.used is None:
            return attention_paged(q, *pages, table, k_lengths, layout="blhd", **said)
        packing = packed(queries, q)
        said |= {"layout": "lhd", "cu_seqlens_q": packing.offsets}
        found = attention_paged(_rows(q, queries, packing.rows), *pages, table, k_lengths, **said)
    except Error as error:
        rename(error, dict(zip(("k_pages", "v_pages", "block_table", "k_lengths"), names, strict=True)))
        raise

    return _placed(found, q, queries, packing, True)


def _gathered(q: Tensor, pages: tuple[Tensor, Tensor], table: Any, k_lengths: Any) -> tuple[Side, Tensor, Tensor]:
    """Keys and values that lie in pages, packed; a call without queries checks where they lie."""
    table, k_lengths = torch.as_tensor(table), torch.as_tensor(k_lengths)
    with torch.no_grad():
        none = q.new_empty(table.shape[0] if table.dim() else 1, 0, *q.shape[-2:])
        attention_paged(none, *pages, table, k_lengths, layout="blhd")
    at = torch.arange(int(k_lengths.max()) if k_lengths.numel() else 0, device=table.device)
    size = pages[0].shape[1]
    rows = (table[:, at // size].long() * size + at % size)[at < k_lengths.to(table.device)[:, None]]
    offsets = torch.cat((k_lengths.new_zeros(1), k_lengths.cumsum(0)))
    k, v = (x.flatten(0, 1)[rows.to(x.device)] for x in pages)
    return Side("k", offsets), k, v


def lengths(side: Side, x: Tensor) -> tuple[int, ...]:
    """Of every sequence what is used, and it is there."""
    if side.offsets is None:
        return item_lengths(f"seqused_{side.name}", side.used, x.shape[0], x.shape[1])
    offsets = packed_offsets(f"cu_seqlens_{side.name}", side.offsets, x.shape[0])
    room = [b - a for a, b in itertools.pairwise(offsets)]
    if side.used is None:
        return tuple(room)
    used = item_lengths(f"seqused_{side.name}", side.used, len(room), max(room, default=0))
    for at, (n, most) in enumerate(zip(used, room, strict=True)):
        if n > most:
            raise ArgumentError(
                f"seqused_{side.name}: expected at most the length in cu_seqlens_{side.name}, {most}; got {n} for "
                f"sequence {at}."
            )
    return used


def packed(side: Side, x: Tensor) -> Packing:
    """How the sequences of a side are packed, or can be."""
    used = lengths(side, x)
    if side.offsets is None:
        starts = list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1])) if x.shape[1] else [0] * (x.shape[0] + 1)
    else:
        starts = list(packed_offsets(f"cu_seqlens_{side.name}", side.offsets, x.shape[0]))
    if side.used is None:
        return Packing(starts, None)
    pieces = [torch.arange(a, a + n) for a, n in zip(starts, used, strict=False)]
    rows = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
    return Packing([0, *itertools.accumulate(used)], rows.to(x.device))


def _rows(x: Tensor, side: Side, rows: Tensor | None) -> Tensor:
    """(total, heads, dim) of what is used."""
    x = x.flatten(0, 1) if side.offsets is None else x
    return x if rows is None else x[rows]


def _placed(found: Any, q: Tensor, queries: Side, packing: Packing, return_lse: bool) -> Any:
    """Results of packed queries, where the queries were."""
    out, lse = found
    total = q.shape[0] * q.shape[1] if queries.offsets is None else q.shape[0]
    if packing.rows is not None:
        out = out.new_zeros(total, *out.shape[1:]).index_copy(0, packing.rows, out)
        lse = lse.new_full((lse.shape[0], total), -math.inf).index_copy(1, packing.rows, lse)
    if queries.offsets is None:
        out = out.view(*q.shape[:2], *out.shape[1:])
        lse = lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_lse else out
