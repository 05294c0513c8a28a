"""Queries and keys of many sequences: padded, packed or in pages, and how much of them is used."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError, attention_paged
from ..adapting import Renamed, rows_in_use
from ..arrays.torch_tensors import in_grad_mode, is_followed
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
    """Names that a caller knows the arguments of attention_paged() by."""

    k: str
    v: str
    table: str
    lengths: str


PAGES = PageNames("k", "v", "block_table", "seqused_k")


class Packing(NamedTuple):
    """Packed sequences: their offsets, and the rows that are taken for them, in order; None: all rows."""

    offsets: list[int]
    rows: Tensor | None


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: Side, keys: Side, options: dict[str, Any], return_lse: bool
) -> Any:
    """Attends, whether sides are padded or packed; rows of queries that are not used get 0, and -inf."""
    check_sides(q, k, v, queries, keys)
    if queries.used is keys.used is None:
        if queries.offsets is keys.offsets is None:
            return attention(q, k, v, layout="blhd", return_lse=return_lse, **options)
        if queries.offsets is not None and keys.offsets is not None:
            cu_q, cu_k = queries.offsets, keys.offsets
            options = {**options, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
            return attention(q, k, v, layout="lhd", return_lse=return_lse, **options)
    if queries.offsets is keys.offsets is None:
        options = {**options, "k_lengths": read_lengths(keys, k)}
        if queries.used is not None:
            options["q_lengths"] = read_lengths(queries, q)
        if q.shape[1] == k.shape[1]:  # where attention() asks for starts: the last query is at the last key
            both = zip(read_lengths(queries, q), options["k_lengths"], strict=False)
            options["q_start"] = [k_len - q_len for q_len, k_len in both]
        return attention(q, k, v, layout="blhd", return_lse=return_lse, **options)
    check_tensors({"q": q, "k": k, "v": v}, {}, {}, strict=True)
    packing = pack(queries, q)
    offsets, rows = pack(keys, k)
    k, v = (_take_rows(x, keys, rows) for x in (k, v))
    options = {**options, "layout": "lhd", "cu_seqlens_q": packing.offsets, "cu_seqlens_k": offsets}
    if "indices" in options:
        options["indices"] = _take_rows(options["indices"], queries, packing.rows)
    found = attention(_take_rows(q, queries, packing.rows), k, v, return_lse=True, **options)
    return _put_back(found, q, queries, packing, return_lse)


def check_sides(q: Any, k: Any, v: Any, queries: Side, keys: Side) -> None:
    """Raises unless each is packed or padded, as its side says."""
    for name, x, side in (("q", q, queries), ("k", k, keys), ("v", v, keys)):
        dims = 4 if side.offsets is None else 3
        if x.ndim != dims:
            raise ArgumentError(
                f"{name}: expected {dims} dimensions, {_AXES[dims]} cu_seqlens_{side.name}; got shape {tuple(x.shape)}."
            )


def check_offsets(given: dict[str, Any]) -> None:
    """Raises unless all of these offsets, by name, are given."""
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


def attend_pages(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    table: Any,
    k_lengths: Any,
    queries: Side,
    options: dict[str, Any],
    names: PageNames = PAGES,
) -> Any:
    """Attends over pages: (out, lse), with errors in the caller's names. Where gradients flow keys are copied."""
    _check_pages(pages, names[:2])
    check_sides(q, q, q, queries, queries)
    with Renamed(dict(zip(("k_pages", "v_pages", "block_table", "k_lengths"), names, strict=True))):
        if any([is_followed(x) for x in (q, *pages) if isinstance(x, Tensor)]):
            keys, k, v = _gather(q, pages, table, k_lengths)
            return attend(q, k, v, queries, keys, options, True)
        options = {**options, "return_lse": True}
        if queries.offsets is queries.used is None:
            return attention_paged(q, *pages, table, k_lengths, layout="blhd", **options)
        packing = pack(queries, q)
        options |= {"layout": "lhd", "cu_seqlens_q": packing.offsets}
        found = attention_paged(_take_rows(q, queries, packing.rows), *pages, table, k_lengths, **options)
    return _put_back(found, q, queries, packing, True)


def _gather(q: Tensor, pages: tuple[Tensor, Tensor], table: Any, k_lengths: Any) -> tuple[Side, Tensor, Tensor]:
    """Packs keys and values that lie in pages."""
    table, k_lengths = torch.as_tensor(table), torch.as_tensor(k_lengths)
    _check_places(q, pages, table, k_lengths)
    at = torch.arange(int(k_lengths.max()) if k_lengths.numel() else 0, device=table.device)
    size = pages[0].shape[1]
    rows = (table[:, at // size].long() * size + at % size)[at < k_lengths.to(table.device)[:, None]]
    offsets = torch.cat((k_lengths.new_zeros(1), k_lengths.cumsum(0)))
    k, v = (x.flatten(0, 1)[rows.to(x.device)] for x in pages)
    return Side("k", offsets), k, v


@in_grad_mode(False)
def _check_places(q: Tensor, pages: tuple[Tensor, Tensor], table: Tensor, k_lengths: Tensor) -> None:
    """Raises unless keys and values lie where the table says: calls attention_paged() without queries."""
    none = q.new_empty(table.shape[0] if table.dim() else 1, 0, *q.shape[-2:])
    attention_paged(none, *pages, table, k_lengths, layout="blhd")


def read_lengths(side: Side, x: Tensor) -> tuple[int, ...]:
    """Returns how much of every sequence is used. Raises unless it is there."""
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


def pack(side: Side, x: Tensor) -> Packing:
    """Returns how the sequences of a side are packed, or can be."""
    used = read_lengths(side, x)
    if side.offsets is None:
        starts = list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1])) if x.shape[1] else [0] * (x.shape[0] + 1)
    else:
        starts = list(packed_offsets(f"cu_seqlens_{side.name}", side.offsets, x.shape[0]))
    if side.used is None:
        return Packing(starts, None)
    return Packing([0, *itertools.accumulate(used)], rows_in_use(starts, used).to(x.device))


def _take_rows(x: Tensor, side: Side, rows: Tensor | None) -> Tensor:
    """Returns what is used, (total, heads, dim)."""
    x = x.flatten(0, 1) if side.offsets is None else x
    return x if rows is None else x[rows]


def _put_back(found: Any, q: Tensor, queries: Side, packing: Packing, return_lse: bool) -> Any:
    """Returns results of packed queries where the queries were."""
    out, lse = found
    total = q.shape[0] * q.shape[1] if queries.offsets is None else q.shape[0]
    if packing.rows is not None:
        out = out.new_zeros(total, *out.shape[1:]).index_copy(0, packing.rows, out)
        lse = lse.new_full((lse.shape[0], total), -math.inf).index_copy(1, packing.rows, lse)
    if queries.offsets is None:
        out = out.view(*q.shape[:2], *out.shape[1:])
        lse = lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_lse else out
