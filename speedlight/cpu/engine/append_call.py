"""New tokens on their way into a cache or a pool: which kernel stores them, its arguments, its run."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import DTYPES, STORAGE_BYTES
from ...host.machine import Isa
from ...problem.tokens import TokenShape
from ..memory.blocks import Store
from ..memory.records import APPEND, BLOCK, ENDLESS, RUN
from ..memory.shape import AppendShape, Source
from ..runtime.compile import Kernel, kernel_of
from ..runtime.tuned import tuning_of
from ..runtime.workers import run_alone, run_tickets
from .forward_call import template_of

_BYTES = 4e9  # per second of a thread that stores tokens, read and written
_STREAM_BYTES = 8 << 20  # from so much on it goes past the caches: no line is read to be written over
_TICKET_BYTES = 1 << 16  # read by a ticket, where there are several threads
_CALL = slice(APPEND.word("k"), APPEND.word("k") + 4)
_IN_PAGE = ("size", "page_blocks", "to_k_row", "to_k_column", "to_v_row", "to_v_column")
_WORDS, _RUN = len(APPEND.names), len(RUN.names)
_SLOTS, _LISTS = (slice(_WORDS + RUN.word(name), None, _RUN) for name in ("slot", "list"))


class InPage(NamedTuple):
    """How tokens lie in a raw page: tokens of a block, blocks of the page; distances in bytes."""

    size: int
    blocks: int
    k_row: int
    k_column: int
    v_row: int
    v_column: int
    lines: bool  # rows are whole cache lines


class Blocks(NamedTuple):
    """Where the blocks of a layer's tokens lie: from one head, and one block, to the next; in bytes."""

    shape: TokenShape
    isa: Isa
    k_head: int
    k_block: int
    v_head: int
    v_block: int
    fixed: int = ENDLESS  # blocks before those that are a ring, and those
    ring: int = ENDLESS
    raw: InPage | None = None  # where tokens are rows, in pages: a block is some of a page, and k_block a page's bytes

    @classmethod
    def of(cls, shape: TokenShape, isa: Isa, keys: Store, values: Store, *ring: int) -> Blocks:
        """Of stores whose memory is (…, head, block, bytes)."""
        k_head, k_block, v_head, v_block = (x.memory.strides[axis] for x in (keys, values) for axis in (-3, -2))
        fixed, around = ring or (ENDLESS, ENDLESS)
        return cls(shape, isa, k_head, k_block, v_head, v_block, fixed, around)


class New(NamedTuple):
    """Keys or values of new tokens: distances in bytes."""

    dtype: str
    head: int
    row: int
    column: int
    items: list[int]  # where each sequence's begin
    to: list[int]  # and where its blocks do


class Put:
    """New tokens of one form, to be stored at any addresses from any slots on.

    Never changed once it is used, so that threads may share it.
    """

    __slots__ = (
        "inline",
        "loaded",
        "region_seconds",
        "seconds",
        "shape",
        "template",
        "threads",
        "tickets",
        "within",
        "words_type",
    )

    def __init__(self, blocks: Blocks, k: New, v: New, counts: list[int], threads: int, heads: int = 0) -> None:
        """counts: new tokens of each sequence. heads: kv heads of a task of the decode kernel, where its tasks store
        them; else they have a region of their own.
        """
        tokens, stored = blocks.shape, blocks.shape.dtype
        stored = DTYPES[stored][0] if stored in DTYPES else stored
        storages = [DTYPES[x.dtype][0] for x in (k, v)]
        sizes = [STORAGE_BYTES[x] for x in storages]
        keys, values = (Source(x, side.column != n) for x, n, side in zip(storages, sizes, (k, v), strict=True))
        row = tokens.head_dim * sizes[0] + tokens.value_dim * sizes[1]
        lines = not (tokens.head_dim % 64 or tokens.value_dim % 64) if blocks.raw is None else blocks.raw.lines
        streams = sum(counts) * tokens.kv_heads * row >= _STREAM_BYTES and lines
        streams &= blocks.isa.arch == "x86_64"
        self.shape = AppendShape(blocks.isa, stored, keys, values, streams, blocks.raw is not None)
        self.within = heads > 0
        self._load()
        self.seconds = 2 * sum(counts) * tokens.kv_heads * row / _BYTES
        wants = tuning_of(blocks.isa).threading
        self.inline, self.region_seconds = self.seconds < wants.inline_seconds, wants.region_seconds
        self.threads = 1 if self.inline else threads
        size = BLOCK if blocks.raw is None else blocks.raw.size
        most = (max(counts, default=0) + 2 * size - 2) // size  # blocks of a run, wherever it begins
        heads, each = heads or tokens.kv_heads, max(most, 1)
        if self.threads > 1 and not self.within:
            # what lies side by side is moved together: heads of a token where they come from, or in a raw page
            apart = k.head > k.row and (blocks.raw is None or blocks.k_head > blocks.raw.k_row)
            heads = 1 if apart else heads
            each = max(1, _TICKET_BYTES // (size * heads * row))
        groups = -(-tokens.kv_heads // heads)
        per_run = groups * -(-most // each)
        self.tickets = per_run * len(counts)
        words = {
            "k_head": k.head, "k_row": k.row, "k_column": k.column,
            "v_head": v.head, "v_row": v.row, "v_column": v.column,
            "to_k_head": blocks.k_head, "to_k_block": blocks.k_block,
            "to_v_head": blocks.v_head, "to_v_block": blocks.v_block,
            "kv_heads": tokens.kv_heads, "head_dim": tokens.head_dim, "value_dim": tokens.value_dim,
            "run_tickets": per_run, "head_groups": groups, "heads": heads, "blocks": each,
            "fixed": blocks.fixed, "ring": blocks.ring,
        }  # fmt: skip
        if blocks.raw is not None:
            words |= dict(zip(_IN_PAGE, blocks.raw[:-1], strict=True))
        runs = np.zeros((len(counts), _RUN), np.int64)
        columns = {"count": counts, "k_at": k.items, "v_at": v.items, "to_k_at": k.to, "to_v_at": v.to}
        for name, column in columns.items():
            runs[:, RUN.word(name)] = column
        self.template = template_of(APPEND, words) + runs.tobytes()
        self.words_type = ctypes.c_int64 * (_WORDS + runs.size)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return len(self.template)

    def _load(self) -> Kernel:
        kernel = kernel_of(self.shape)
        self.loaded = weakref.ref(kernel)
        return kernel

    def words(self, addresses: tuple[int, ...], slots: list[int], lists: list[int] | None = None) -> tuple[Kernel, Any]:
        """The kernel and its arguments, to be held while it runs. What lies at the first two addresses, of keys and
        values, goes into the blocks at the other two.

        slots: of each sequence the first new token's. lists: addresses of the numbers of each one's blocks, if they do
        not lie side by side.
        """
        words = self.words_type.from_buffer_copy(self.template)
        words[_CALL] = addresses
        words[_SLOTS] = slots
        if lists is not None:
            words[_LISTS] = lists
        kernel = self.loaded() or self._load()
        kernel.used()
        return kernel, words

    def run(self, addresses: tuple[int, ...], slots: list[int], lists: list[int] | None = None) -> None:
        """Stores them, as words() has it."""
        if not self.tickets:
            return
        kernel, words = self.words(addresses, slots, lists)
        if self.inline:
            run_alone(kernel, words, self.tickets)
        else:
            run_tickets(kernel, words, self.tickets, self.threads, self.seconds, self.region_seconds)
