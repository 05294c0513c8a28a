"""AppendCall: new tokens on their way into a cache, a pool or raw pages."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import describe
from ...arrays.dtypes import CODES, DTYPES
from ...arrays.memory import Array
from ...host.machine import Isa, current_isa
from ...host.shortcuts import row_addresses
from ...problem.prepared import CallKey, Prepared, prepared_calls
from ...problem.problem import LAYOUTS
from ...problem.tokens import TokenShape
from ..memory.blocks import Store
from ..memory.records import APPEND, BLOCK, ENDLESS, RUN
from ..memory.shape import AppendShape, Scaling, Source
from ..runtime.compile import Kernel
from ..runtime.launch import Launch, threads_for
from ..runtime.tuned import tuning_of
from ..runtime.workers import get_threads

_BYTES = 4e9  # per second of a thread that stores tokens, read and written
_STREAM_BYTES = 8 << 20  # from so much on it goes past the caches: no line is read to be written over
_TICKET_BYTES = 1 << 16  # read by a ticket, where there are several threads
_CALL = slice(APPEND.word("k"), APPEND.word("k") + 4)
_SCALES = slice(APPEND.word("k_scales"), APPEND.word("k_scales") + 2)
_MOST_TOKENS = 64  # of a block of a raw page
_BY_BYTES = {2: "float16", 4: "float32", 8: "float64"}  # raw tokens are moved as they are
_WORDS, _RUN = len(APPEND.names), len(RUN.names)
_SLOTS, _LISTS = (slice(_WORDS + RUN.word(name), None, _RUN) for name in ("slot", "list"))


class PageScales(NamedTuple):
    """The layout of the scales of codes in raw pages: distances in bytes."""

    scaling: Scaling
    head: int
    page: int
    row: int
    column: int


class InPage(NamedTuple):
    """The layout of a raw page: tokens of a block, blocks of the page; strides in bytes."""

    size: int
    blocks: int
    k_row: int
    k_column: int
    v_row: int
    v_column: int
    lines: bool  # rows are whole cache lines
    scales: tuple[PageScales, PageScales] | None = None  # of codes: of keys and values


class Blocks(NamedTuple):
    """The layout of the blocks of a layer's tokens: strides of heads and blocks, in bytes."""

    shape: TokenShape
    isa: Isa
    k_head: int
    k_block: int
    v_head: int
    v_block: int
    fixed: int = ENDLESS  # blocks before those that are a ring, and those
    ring: int = ENDLESS
    raw: InPage | None = None  # where tokens are rows, in pages: a block is some of a page, and k_block a page's bytes
    numbers: int = 0  # address of the numbers of pages, where all sequences have the same

    @classmethod
    def of(cls, shape: TokenShape, isa: Isa, keys: Store, values: Store, *ring: int) -> Blocks:
        """Returns the blocks of stores whose memory is (…, head, block, bytes)."""
        if shape.latent:  # codes, and behind them the rest, which has none
            shape = shape._replace(head_dim=shape.value_dim, value_dim=shape.rotary_dim)
        k_head, k_block, v_head, v_block = (x.memory.strides[axis] for x in (keys, values) for axis in (-3, -2))
        fixed, around = ring or (ENDLESS, ENDLESS)
        return cls(shape, isa, k_head, k_block, v_head, v_block, fixed, around)

    @classmethod
    def of_latents(cls, shape: TokenShape, isa: Isa, head: int, page: int, size: int, numbers: int = 0) -> Blocks:
        """Returns the blocks of latents: rows in pages of `size` tokens, whose first columns and rest are two parts.

        head, page: strides in bytes. numbers: as the field.
        """
        element = DTYPES[shape.dtype][1]
        row = shape.head_dim * element
        lines = not row % 64 and not shape.value_dim * element % 64
        inside = InPage(BLOCK, size // BLOCK, row, element, row, element, lines)
        parts = shape._replace(head_dim=shape.value_dim, value_dim=shape.rotary_dim)
        return cls(parts, isa, head, page, head, page, raw=inside, numbers=numbers)


class New(NamedTuple):
    """Keys or values of new tokens, as the caller has them: strides in bytes."""

    dtype: str
    head: int
    row: int
    column: int
    items: list[int]  # where each sequence's begin
    to: list[int]  # and where its blocks do


class AppendCall:
    """New tokens of one form, to be stored at any addresses from any slots on.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(self, blocks: Blocks, k: New, v: New, counts: list[int], threads: int, heads: int = 0) -> None:
        """counts: new tokens of each sequence. heads: kv heads of a task of the decode kernel, where its tasks store
        them; else they have a region of their own.
        """
        tokens, wants, sizes = blocks.shape, tuning_of(blocks.isa).threading, [_bytes_of(x) for x in (k, v)]
        row = tokens.head_dim * sizes[0] + tokens.value_dim * sizes[1]
        moved = sum(counts) * tokens.kv_heads * row
        seconds = 2 * moved / _BYTES
        self.counts, self.within, threads = counts, heads > 0, threads_for(seconds, threads, wants)
        size = BLOCK if blocks.raw is None else blocks.raw.size
        most = (max(counts, default=0) + 2 * size - 2) // size  # blocks of a run, wherever it begins
        heads, each = heads or tokens.kv_heads, max(most, 1)
        if threads > 1 and not self.within:
            # what lies side by side is moved together: heads of a token where they come from, or in a raw page
            apart = k.head > k.row and (blocks.raw is None or blocks.k_head > blocks.raw.k_row)
            heads = 1 if apart else heads
            each = max(1, _TICKET_BYTES // (size * heads * row))
        groups = -(-tokens.kv_heads // heads)
        per_run = groups * -(-most // each)
        words = _words_of(blocks, k, v) | {
            "run_tickets": per_run, "head_groups": groups, "heads": heads, "blocks": each,
        }  # fmt: skip
        runs, shape = _runs_of(k, v, counts, blocks.numbers), _shape_of(blocks, k, v, moved)
        tickets = per_run * len(counts)
        self.launch = Launch(shape, APPEND, words, tickets, threads, seconds, wants, rest=runs.tobytes())

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return self.launch.size

    def start(
        self, addresses: tuple[int, ...], slots: list[int], lists: list[int] | None = None, *, first: bool = False,
        scales: tuple[int, ...] = (),
    ) -> tuple[Kernel, Any] | None:  # fmt: skip
        """Stores them, or returns the kernel with which tasks store them, and its arguments, to be held meanwhile.

        first: they are stored before any task begins.

        What lies at the first two addresses, of keys and values, goes into the blocks at the other two. slots: of each
        sequence the first new token's. lists: addresses of the numbers of each one's blocks, if they do not lie side by
        side. scales: of codes in raw pages, addresses of their scales.
        """
        launch = self.launch
        if not launch.tickets:
            return None
        words = launch.words_type.from_buffer_copy(launch.template)
        words[_CALL] = addresses
        words[_SLOTS] = slots
        if lists is not None:
            words[_LISTS] = lists
        if scales:
            words[_SCALES] = scales
        if self.within and not first:
            return launch.kernel, words
        launch.run(words)
        return None


def _bytes_of(x: New) -> int:
    """Returns the bytes of an element, as the caller has it: a code is a byte."""
    return 1 if x.dtype in CODES else DTYPES[x.dtype][1]


def _storage_of(dtype: str) -> str:
    """Returns how kernels name a dtype."""
    return DTYPES[dtype][0] if dtype in DTYPES else dtype


def _shape_of(blocks: Blocks, k: New, v: New, moved: int) -> AppendShape:
    """Returns what the kernel is specialised for, where it moves so many bytes."""
    tokens, raw = blocks.shape, blocks.raw
    keys, values = (Source(_storage_of(x.dtype), x.column != _bytes_of(x)) for x in (k, v))
    lines = not (tokens.head_dim % 64 or tokens.value_dim % 64) if raw is None else raw.lines
    lines &= k.dtype not in CODES  # which are moved in less than a line
    streams = moved >= _STREAM_BYTES and lines and blocks.isa.arch == "x86_64"
    latent = tokens.latent and raw is None
    scaling = None if raw is None or raw.scales is None else (raw.scales[0].scaling, raw.scales[1].scaling)
    stored, is_raw = _storage_of(tokens.dtype), raw is not None
    return AppendShape(blocks.isa, stored, keys, values, streams, is_raw, latent=latent, scaling=scaling)


def _words_of(blocks: Blocks, k: New, v: New) -> dict[str, int]:
    """Returns the arguments that say where tokens lie, and where they go."""
    tokens = blocks.shape
    words = {
        "k_head": k.head, "k_row": k.row, "k_column": k.column,
        "v_head": v.head, "v_row": v.row, "v_column": v.column,
        "to_k_head": blocks.k_head, "to_k_block": blocks.k_block,
        "to_v_head": blocks.v_head, "to_v_block": blocks.v_block,
        "kv_heads": tokens.kv_heads, "head_dim": tokens.head_dim, "value_dim": tokens.value_dim,
        "fixed": blocks.fixed, "ring": blocks.ring,
    }  # fmt: skip
    raw = blocks.raw
    if raw is None:
        return words
    words |= {
        "size": raw.size, "page_blocks": raw.blocks,
        "to_k_row": raw.k_row, "to_k_column": raw.k_column, "to_v_row": raw.v_row, "to_v_column": raw.v_column,
    }  # fmt: skip
    for name, x in zip(("k", "v"), raw.scales or (), strict=False):
        words |= {
            f"{name}_scale_head": x.head, f"{name}_scale_block": x.page,
            f"{name}_scale_row": x.row, f"{name}_scale_column": x.column,
        }  # fmt: skip
    return words


def _runs_of(k: New, v: New, counts: list[int], numbers: int) -> np.ndarray:
    """Returns the table of runs, [sequence, word]."""
    runs = np.zeros((len(counts), _RUN), np.int64)
    columns: dict[str, Any] = {"count": counts, "k_at": k.items, "v_at": v.items, "to_k_at": k.to, "to_v_at": v.to}
    columns["list"] = numbers
    for name, column in columns.items():
        runs[:, RUN.word(name)] = column
    return runs


# --- append_paged(): pages that are the caller's


def append_paged(
    pages: tuple[Array, Array], new: tuple[Array, Array], layout: str, table: np.ndarray, before: list[int],
    counts: list[int], scales: tuple[Array, Array] | None = None,
) -> None:  # fmt: skip
    """Stores new tokens, which were checked, behind those that sequences have in pages of a block table.

    scales: of pages of codes, by their number of dimensions (problem/page_scales.py): of tokens and heads they are
    found and stored, others are given.
    """
    if not any(counts) or 0 in pages[0].shape[:3]:
        return
    of_codes = scales or ()
    given = (*new, *pages, *of_codes)
    prepared = _prepare(given, layout, counts)
    ends = [(x.address + low, x.address + high) for x, (low, high) in zip(given, prepared.reach, strict=True)]
    if any([a < high and low < b for a, b in ends[:2] for low, high in ends[2:]]):  # they may lie where they go
        given = (*[describe(x.numpy().copy(), x.name) for x in new], *pages, *of_codes)
        prepared = _prepare(given, layout, counts)
    lists = row_addresses(np.ascontiguousarray(table, np.int64))[: len(counts)]
    addresses, of_scales = ([x.address for x in several] for several in (given[:4], of_codes))
    prepared.put.start(tuple(addresses), before, lists, scales=tuple(of_scales))


def _prepare(given: tuple[Array, ...], layout: str, counts: list[int]) -> Prepared:
    """Returns the call that stores k and v in k_pages and v_pages, of codes with scales."""
    isa, threads, lines = current_isa(), get_threads(), [x.address % 64 for x in given[2:4]] == [0, 0]
    arrays = tuple([(x.shape, x.strides, x.dtype) for x in given])
    key = CallKey("append", layout, arrays, (threads, isa.name), (lines, *counts))

    def make() -> Prepared:
        put = AppendCall(*_places(given, layout, counts, isa, lines), counts, threads)
        return Prepared(put=put, given=given)

    return prepared_calls.made(key, make)


def _places(
    arrays: tuple[Array, ...], layout: str, counts: list[int], isa: Isa, lines: bool
) -> tuple[Blocks, New, New]:
    """Returns where tokens go, and where they come from. `lines`: pages begin on cache lines."""
    _, _, keys, values, *scales = arrays
    (_, page_size, heads, dim), value_dim, element = keys.shape, values.shape[3], keys.itemsize
    size = max(n for n in range(1, _MOST_TOKENS + 1) if page_size % n == 0)
    size = size if size * size >= page_size or size == _MOST_TOKENS else page_size  # a prime is taken as it is
    _, *axes = (0, *LAYOUTS[layout]) if layout == "lhd" else LAYOUTS[layout]
    new = [(x.strides[axes[0]], x.strides[axes[1]], x.strides[axes[2]]) for x in arrays[:2]]  # head, row, column
    pages = [(x.strides[2], x.strides[1], x.strides[3]) for x in (keys, values)]
    rows = [n * element for n in (dim, value_dim)]
    if all([steps[::2] == (n, element) for steps, n in zip((*new, *pages), rows * 2, strict=True)]) and not scales:
        dim, value_dim, heads = dim * heads, value_dim * heads, 1  # a token's heads are one row
    lines &= not scales and not any([n % 64 for n in (*rows, *keys.strides[:3], *values.strides[:3])])
    (k_head, k_row, k_column), (v_head, v_row, v_column) = pages
    of_codes = (_page_scales(scales[0], dim), _page_scales(scales[1], value_dim)) if scales else None
    inside = InPage(size, page_size // size, k_row, k_column, v_row, v_column, lines, of_codes)
    shape = TokenShape(1, heads, dim, value_dim, keys.dtype if scales else _BY_BYTES[element])
    blocks = Blocks(shape, isa, k_head, keys.strides[0], v_head, values.strides[0], raw=inside)
    first, nth, nowhere = [*itertools.accumulate(counts, initial=0)][:-1], range(len(counts)), [0] * len(counts)
    dtypes = [x.dtype if scales else shape.dtype for x in arrays[:2]]
    items = [
        [n * row for n in first] if layout == "lhd" else [i * x.strides[0] for i in nth]
        for x, (_, row, _) in zip(arrays[:2], new, strict=True)
    ]
    k, v = (New(dtype, *steps, at, nowhere) for dtype, steps, at in zip(dtypes, new, items, strict=True))
    return blocks, k, v


def _page_scales(x: Array, dim: int) -> PageScales:
    """Returns how scales, given as (), (heads,), (heads, dim) or (pages, page_size, heads), lie for rows of `dim`."""
    match x.strides:
        case ():
            return PageScales("given", head=0, page=0, row=0, column=0)
        case (head,):
            return PageScales("given", head, page=0, row=0, column=0)
        case (head, column):
            return PageScales("channels", head, page=0, row=0, column=column)
        case (page, row, head) if dim:
            return PageScales("found", head, page, row, column=0)
    return PageScales("given", head=0, page=0, row=0, column=0)  # no columns: what whole rows have is not theirs
