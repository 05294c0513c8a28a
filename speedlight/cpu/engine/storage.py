"""The tokens of caches and pools in memory, and the calls that read them there.

`gpu/storage.py` has the same two classes with the same methods. Lengths, pages and claims are the business of kv/.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...arrays import array as arrays
from ...arrays.array import DTYPES, Array, numpy_dtype
from ...host.machine import current_isa
from ...host.memo import Memo
from ...problem.build import from_stored
from ...problem.key import addresses_of, key_of
from ...problem.operands import Rows
from ...problem.problem import SPAN, TILE, Options, Problem, spans_of
from ...problem.results import Results
from ...problem.tokens import Batch, Moves, Piece, TokenShape
from ...problem.windows import Ring
from ..memory.blocks import make_stores
from ..memory.operands import Paged, Pages
from ..memory.records import BLOCK, ENDLESS, SLACK
from ..runtime.tuned import tuning_of
from ..runtime.workers import get_threads
from .append_call import Blocks, New, Put
from .forward_call import Call, prepare
from .schedule import DECODE_ROWS
from .steps import Checked, CheckedPut, PoolStep, Step, Table, end_of

_STEPS, _STEPS_BYTES = 64, 16 << 20  # prepared steps that are remembered
_PUTS_BYTES = 1 << 20  # likewise of new tokens
_ALL = slice(None)
_Undo = tuple[Any, np.ndarray, np.ndarray]  # which blocks, and what was in them of keys and values


def _received(x: Any, name: str) -> tuple[np.ndarray, str]:
    """Returns new tokens, and the name of their dtype."""
    if type(x) is not np.ndarray or not x.dtype.isnative:
        x = arrays.describe(x, name).numpy()
    return x, x.dtype.name


def _query(q: Any) -> Array:
    return arrays.describe(q, "q")


def _inline(self: CacheStorage | PoolStorage, rows: int) -> int:
    """Returns the number of tokens below which so many queries of a sequence wake no other thread."""
    return tuning_of(self.isa).threading.inline_bytes // (self.token_bytes * max(1, rows // 8))


def _move(self: CacheStorage | PoolStorage, layer: int, moves: Moves) -> None:
    for store in (self.keys[layer], self.values[layer]):
        store.move(moves)


def _blocks(self: CacheStorage | PoolStorage, layer: int, where: Any) -> _Undo:
    """Copies blocks that will be written over, for put_back()."""
    return where, self.keys[layer].memory[where], self.values[layer].memory[where]


def _before_moves(self: CacheStorage | PoolStorage, layer: int, lengths: list[int], moves: Moves) -> _Undo | None:
    """Copies what moves write over, for put_back(); None where nothing moves."""
    if not moves.to_slot:
        return None
    return _blocks(self, layer, (np.array(moves.to_owner), _ALL, np.array(moves.to_slot) // BLOCK))


def _put_back(self: CacheStorage | PoolStorage, undo: dict[int, _Undo]) -> None:
    """Restores each layer; in a forked child, what another thread of the parent had begun to write over."""
    for layer, (where, keys, values) in undo.items():
        self.keys[layer].memory[where], self.values[layer].memory[where] = keys, values


def _remember_put(
    self: CacheStorage | PoolStorage, given: tuple[Any, ...], k: np.ndarray, v: np.ndarray, counts: list[int],
    options: Options,
) -> None:  # fmt: skip
    """Remembers that new tokens like these were checked, as many of each sequence as by default; `given`: as the caller
    has them.
    """
    key = key_of(given, options, (len(counts), get_threads()))
    if key is not None and any(counts):
        put = self._put_of(k, v, counts)
        found = CheckedPut(put, self.addresses, counts, [end_of(x, x.itemsize) for x in (k, v)])
        self.checked_steps.put(key, found, put.size)


class CacheStorage:
    """The tokens of a KVCache: one endless page to the kernels; with a window, a ring of pages of a tile."""

    device = name = "cpu"
    lengths = None  # only the host has them
    received, query, remember_put = staticmethod(_received), staticmethod(_query), _remember_put
    move, before_moves, put_back = _move, _before_moves, _put_back

    def __init__(self, shape: TokenShape, batch: int, capacity: int, ring: Ring, device: Any) -> None:
        self.shape, self.batch, self.capacity, self.ring, self.isa = shape, batch, capacity, ring, current_isa()
        blocks = (batch, shape.kv_heads, -(-(ring.tokens or capacity) // BLOCK))
        self.keys, self.values = make_stores(shape, blocks, together=False)
        self.addresses = [(k.address, v.address) for k, v in zip(self.keys, self.values, strict=True)]
        self.token_bytes = shape.kv_heads * (self.keys[0].row + self.values[0].row)
        self.pages = self._pages()
        self.list = np.arange(ring.tokens // TILE + SLACK, dtype=np.int64)  # the pages of every sequence
        parts = (ring.fixed // BLOCK, ring.size // BLOCK) if ring.size else ()
        self.blocks = Blocks.of(shape, self.isa, self.keys[0], self.values[0], *parts)
        self.steps: Memo[Step] = Memo(_STEPS, _STEPS_BYTES)
        self.checked_steps: Memo[Checked | CheckedPut] = Memo(_STEPS, _STEPS_BYTES)
        self.puts: Memo[Put] = Memo(_STEPS, _PUTS_BYTES)

    def _pages(self) -> Pages:
        """Returns how kernels find a token."""
        k, v, ring = self.keys[0], self.values[0], self.ring
        heads, items = ([x.memory.strides[axis] for x in (k, v)] for axis in (1, 0))
        more = {"fixed": ring.fixed // TILE, "ring": ring.size // TILE} if ring.size else {}
        return Pages(
            True,
            TILE if ring.size else ENDLESS,
            k_head=heads[0],
            k_page=TILE * k.row,
            k_row=k.row,
            v_head=heads[1],
            v_page=TILE * v.row,
            v_row=v.row,
            k_item=items[0],
            v_item=items[1],
            **more,
        )

    # --- tokens in and out

    def put(self, layer: int, lengths: list[int], counts: list[int], k: np.ndarray, v: np.ndarray) -> None:
        """Stores the first tokens of k and v, so many of each sequence, past its length: nobody sees them yet."""
        most = max(counts)
        # a ring comes round, and no two threads may write to one block: tokens of a pair are stored together
        step = self.ring.size - BLOCK if self.ring.size else most
        for done in range(0, most, max(step, 1)):
            part = counts if step == most else [min(max(n - done, 0), step) for n in counts]
            k_at, v_at = (arrays.address_of(x) + done * x.strides[2] for x in (k, v))
            slots = lengths if not done else [n + done for n in lengths]
            self._put_of(k, v, part).run((k_at, v_at, *self.addresses[layer]), slots)

    def _put_of(self, k: np.ndarray, v: np.ndarray, counts: list[int], heads: int = 0) -> Put:
        key = tuple(counts), k.strides, v.strides, k.dtype, v.dtype, heads, get_threads()  # and on what the cache is
        put = self.puts.get(key)
        if put is None:
            new = []
            for x, store in ((k, self.keys[0]), (v, self.values[0])):
                item, head, row, column = x.strides
                items, to = ([i * step for i in range(self.batch)] for step in (item, store.memory.strides[0]))
                new.append(New(x.dtype.name, head, row, column, items, to))
            put = Put(self.blocks, new[0], new[1], counts, get_threads(), heads)
            self.puts.put(key, put, put.size)
        return put

    def tokens(self, layer: int, part: str, n: int) -> np.ndarray:
        """A copy of the first n slots of "keys" or "values": (batch, kv_heads, n, dim)."""
        return getattr(self, part)[layer].get(_ALL, n)

    def parts(self, layer: int, counts: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Keys and values as files have them, of each sequence the slots in use: [tokens], or [codes, scales]."""
        keys, values = (stores[layer].parts(_ALL, max(counts)) for stores in (self.keys, self.values))
        for x in itertools.chain(keys, values):
            for item, n in enumerate(counts):
                x[item, :, n:] = 0
        return keys, values

    def fill(self, layer: int, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
        """Stores what parts() returned."""
        self.keys[layer].fill(keys)
        self.values[layer].fill(values)

    def copy_to(self, other: CacheStorage, indices: list[int], counts: list[list[int]]) -> None:
        """These sequences become those of another cache; counts: of each layer the slots in use."""
        for layer, used in enumerate(counts):
            for to, item in enumerate(indices):
                blocks = -(-used[item] // BLOCK)
                for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
                    theirs[layer].memory[to, :, :blocks] = mine[layer].memory[item, :, :blocks]

    # --- what a failing call has written over

    def before(self, layer: int, lengths: list[int], slots: list[int]) -> _Undo | None:
        """Copies what lies in slots that will be written over, for put_back(); None where there are none."""
        if not slots:
            return None
        return _blocks(self, layer, (_ALL, _ALL, sorted({n // BLOCK for n in slots})))

    # --- attending

    def prepare(self, q: Array, piece: Piece, options: Options, out_strides: tuple[int, ...]) -> Call:
        """Prepares a piece's call: the problem is checked, nothing is written."""
        if len(q.shape) == 4:
            q = replace(q, shape=(*q.shape[:2], piece.rows.stop - piece.rows.start, q.shape[3]))
        stored = self.shape.stored(piece.after, hiding=self.ring.mask(options.causal))
        return self._prepare(from_stored(q, stored, options._replace(q_lengths=piece.counts)), q, out_strides)

    def attend(self, layer: int, call: Call, q: Array, piece: Piece, results: Results) -> None:
        """Runs what prepare() returned; the results are those of the whole chunk."""
        lse, start, rows = results.lse, piece.rows.start, (_ALL, _ALL, piece.rows)
        part = None
        if lse is not None and piece.rows.stop - start < q.shape[2]:  # kernels write it side by side
            part = np.empty(lse.numpy()[rows].shape, lse.numpy().dtype)
        lse_address = 0 if lse is None else lse.address if part is None else arrays.address_of(part)
        q_address, out_address = (x.address + start * x.strides[2] for x in (q, results.out))
        call.run(q_address, *self.addresses[layer], out_address, lse_address)
        if lse is not None and part is not None:
            lse.numpy()[rows] = part

    def checked_step(
        self, lengths: list[int], tensors: tuple[Any, ...], options: Options
    ) -> tuple[Checked | CheckedPut, list[int]] | None:
        """A step of a form that was checked before, for any lengths of these spans, and the addresses of q, or of q, k
        and v, or of k and v. Known by shapes, strides, dtypes, options and threads, and by what the cache is.
        """
        key = key_of(tensors, options, (self.batch, get_threads()))
        found = None if key is None else self.checked_steps.get(key)
        if found is None or not found.fits(lengths):
            return None
        addresses = addresses_of(tensors, found.ends)
        return None if addresses is None else (found, addresses)

    def step(self, given: Any, q: Array, lengths: list[int], options: Options) -> Step | None:
        """A step for queries of this form, checked; `given`: as the caller has them."""
        known = options.key()
        if known is None or not (type(given) is np.ndarray or q.kind == "torch"):
            return None
        if len(q.shape) != 4 or 0 in q.shape or not min(lengths):
            return None
        most = spans_of(max(lengths))
        # it depends on these, on what the cache is, and on no length beyond the spans: items_for() puts lengths and
        # rows in
        key = (q.shape, q.strides, q.dtype, known, most, get_threads())
        step = self.steps.get(key)
        if step is None:
            longest, shortest = [min(most * SPAN, self.capacity)] * self.batch, q.shape[2] if options.causal else 1
            strides = np.empty((*q.shape[:-1], self.shape.value_dim), numpy_dtype(q.dtype)).strides
            hiding = self.ring.mask(options.causal)
            problem = from_stored(q, self.shape.stored(longest, hiding=hiding, shortest=shortest), options)
            step = Step(self._prepare(problem, q, strides), self.addresses, q, most, _inline(self, q.shape[2]))
            self.steps.put(key, step, step.size)
        return step

    def remember(self, step: Step, given: tuple[Any, ...], q: Array, k: Any, v: Any, options: Options) -> None:
        """Remembers that a step with these arrays, q, or q, k and v, was checked."""
        key = key_of(given, options, (self.batch, get_threads()))
        if key is None or (k is None and self.ring.size):  # what a window still has depends on lengths
            return
        put, new, ends = None, 0, [end_of(q, DTYPES[q.dtype][1])]
        if k is not None:
            new = k.shape[2]
            put = self._put_of(k, v, [new] * self.batch, step.prepared.heads_alone)
            ends += [end_of(x, x.itemsize) for x in (k, v)]
        self.checked_steps.put(key, Checked(step, put, new, ends), step.size)

    def _prepare(self, problem: Problem, q: Array, out_strides: tuple[int, ...]) -> Call:
        keys = Paged(self.pages, [self.list.ctypes.data] * self.batch)
        return prepare(problem, Rows("bhld", q, out_strides), keys, get_threads(), self.isa)


class _Part(NamedTuple):
    """Sequences of a batch that one kernel takes."""

    items: tuple[int, ...]  # which of the batch
    counts: tuple[int, ...]
    rows: tuple[int, ...]  # of each its first among the packed queries
    lengths: list[int]


class PoolStorage:
    """The tokens of a PagePool. To the kernels a page is a block; a sequence's table has the number of each block.

    Blocks are numbered through heads, so that one number times a block's bytes leads there.
    """

    device = "cpu"
    received, query, remember_put = staticmethod(_received), staticmethod(_query), _remember_put
    move, before_moves, put_back = _move, _before_moves, _put_back

    def __init__(self, shape: TokenShape, pages: int, page_size: int, device: Any) -> None:
        self.shape, self.page_size, self.isa = shape, page_size, current_isa()
        self.blocks = page_size // BLOCK  # of a page and head
        self.page_blocks = shape.kv_heads * self.blocks  # numbers from one page to the next
        memory = (pages, shape.kv_heads, self.blocks)
        self.keys, self.values = make_stores(shape, memory, together=True)
        self.addresses = [(k.address, v.address) for k, v in zip(self.keys, self.values, strict=True)]
        k, v = self.keys[0], self.values[0]
        self.token_bytes = shape.kv_heads * (k.row + v.row)
        head, block = k.memory.strides[1:3]
        self.kernel_pages = Pages(True, BLOCK, head, block, k.row, head, block, v.row)
        self.kernel_blocks = Blocks.of(shape, self.isa, k, v)
        self.steps: Memo[Call] = Memo(_STEPS, _STEPS_BYTES)
        self.checked_steps: Memo[PoolStep | CheckedPut] = Memo(_STEPS, _STEPS_BYTES)
        self.puts: Memo[Put] = Memo(_STEPS, _PUTS_BYTES)

    # --- tables

    def new_table(self) -> Table:
        return Table(np.zeros(SLACK, np.int64))

    def copied(self, table: Table) -> Table:
        return Table(table.numbers.copy())

    def extended(self, table: Table, pages: list[int], used: int, moved: list[int]) -> Table:
        """A table of these pages, where `table` is of the first `used` but for those at `moved`.

        What a table says past the pages of its sequence is nobody's, so it is extended in place while it has room.
        """
        blocks, kept_end, end = self.blocks, used * self.blocks, len(pages) * self.blocks
        if moved or end + SLACK > len(table.numbers):
            longer = np.zeros(max(len(table.numbers), 2 * end + SLACK), np.int64)
            longer[:kept_end] = table.numbers[:kept_end]
            table = Table(longer)
        for at in (*moved, *range(used, len(pages))):
            first = pages[at] * self.page_blocks
            table.numbers[at * blocks : (at + 1) * blocks] = range(first, first + blocks)
        return table

    # --- tokens in and out

    def copy_page(self, new: int, old: int) -> None:
        for store in (*self.keys, *self.values):
            store.memory[new] = store.memory[old]

    def tokens(self, layer: int, part: str, pages: list[int], n: int) -> np.ndarray:
        """A copy of a sequence's first n "keys" or "values": (kv_heads, n, dim)."""
        used = np.array(pages[: -(-n // self.page_size)], np.int64)
        each = getattr(self, part)[layer].get(used, self.page_size)  # (pages, heads, page_size, dim)
        return each.swapaxes(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].copy()

    def put(self, layer: int, batch: Batch, k: np.ndarray, v: np.ndarray) -> None:
        """New tokens, one sequence's after the other's."""
        if any(batch.counts):
            addresses = (*[arrays.address_of(x) for x in (k, v)], *self.addresses[layer])
            self._put_of(k, v, batch.counts).run(addresses, batch.before, [x.address for x in batch.tables])

    def _put_of(self, k: np.ndarray, v: np.ndarray, counts: list[int], heads: int = 0) -> Put:
        key = tuple(counts), k.strides, v.strides, k.dtype, v.dtype, heads, get_threads()  # and on what the pool is
        put = self.puts.get(key)
        if put is None:
            first, nowhere = list(itertools.accumulate(counts, initial=0))[:-1], [0] * len(counts)
            new = [
                New(x.dtype.name, head, row, column, [n * row for n in first], nowhere)
                for x in (k, v)
                for row, head, column in (x.strides,)
            ]
            put = Put(self.kernel_blocks, new[0], new[1], counts, get_threads(), heads)
            self.puts.put(key, put, put.size)
        return put

    # --- attending

    def attend(self, layer: int, q: Array, batch: Batch, options: Options, results: Results) -> None:
        """Packed queries over their sequences' tokens."""
        first = list(itertools.accumulate(batch.counts, initial=0))
        addresses = (q.address, *self.addresses[layer], results.out.address, results.lse_address)
        for which in self._by_kernel(q.shape[1], batch.counts):
            counts, rows, lengths = ([x[i] for i in which] for x in (batch.counts, first, batch.after))
            part = _Part(tuple(which), tuple(counts), tuple(rows), lengths)
            lists = [batch.tables[i].address for i in which]
            step, any_lengths = self._step(q, part, lists, options, results.out.strides)
            items = step.items_for(lengths, lists) if any_lengths else None
            if items is None:
                step.run(*addresses)
            else:
                threads = 1 if sum(lengths) < _inline(self, max(counts)) else 0
                step.run(*addresses, ctypes.addressof(items), threads, options.seed_word())

    def checked_step(
        self, sequences: int, tensors: tuple[Any, ...], options: Options
    ) -> tuple[PoolStep | CheckedPut, list[int]] | None:
        """A step of a form that was checked before, where every sequence has as many queries as by default, and the
        addresses of q, or of q, k and v, or of k and v. Known by shapes, strides, dtypes, options
        and threads, by how many sequences there are, and by what the pool is.
        """
        key = key_of(tensors, options, (sequences, get_threads()))
        found = None if key is None else self.checked_steps.get(key)
        addresses = None if found is None else addresses_of(tensors, found.ends)
        return None if found is None or addresses is None else (found, addresses)

    def remember(self, given: tuple[Any, ...], q: Array, k: Any, v: Any, batch: Batch, options: Options) -> None:
        """Remembers that a step with these arrays, of as many queries and new tokens as by default, was checked."""
        key = key_of(given, options, (len(batch.tables), get_threads()))
        which = self._by_kernel(q.shape[1], batch.counts)
        if key is None or 0 in q.shape or which != [[*range(len(batch.tables))]] or not min(batch.after):
            return
        first = list(itertools.accumulate(batch.counts, initial=0))[:-1]
        part = _Part(tuple(which[0]), tuple(batch.counts), tuple(first), batch.after)
        strides = np.empty((*q.shape[:-1], self.shape.value_dim), numpy_dtype(q.dtype)).strides
        lists = [x.address for x in batch.tables]
        prepared, any_lengths = self._step(q, part, lists, options, strides)
        put, ends = None, [end_of(q, DTYPES[q.dtype][1])]
        if k is not None:
            put = self._put_of(k, v, batch.counts, prepared.heads_alone)
            ends += [end_of(x, x.itemsize) for x in (k, v)]
        if any_lengths:
            step = PoolStep(prepared, self.addresses, q, put, ends, _inline(self, max(batch.counts)))
            self.checked_steps.put(key, step, prepared.size)

    def _by_kernel(self, q_heads: int, counts: list[int]) -> list[list[int]]:
        """Which sequences go together: those of few queries, which the decode kernel takes, apart from longer
        chunks.
        """
        few = DECODE_ROWS * self.shape.kv_heads // max(1, q_heads)
        short, long = [i for i, n in enumerate(counts) if 0 < n <= few], [i for i, n in enumerate(counts) if n > few]
        return [x for x in (short, long) if x]

    def _step(
        self, q: Array, part: _Part, lists: list[int], options: Options, out_strides: tuple[int, ...]
    ) -> tuple[Call, bool]:
        """The prepared call, and whether it is one for any lengths of as many spans (doubled until they suffice)."""
        longest, known = max(part.lengths), options.key()
        options = options._replace(q_lengths=part.counts)
        if known is None or not longest:
            problem = from_stored(q, self.shape.stored(part.lengths, items=part.items), options)
            return self._prepare(problem, q, part, lists, out_strides), False
        spans = 1 << (longest - 1 >> 10).bit_length()
        # it depends on these, on what the pool is, and on no length or page: items_for() puts them in
        where = part.items, part.counts, part.rows
        key = (where, q.shape, q.strides, q.dtype, out_strides, known, spans, get_threads())
        prepared = self.steps.get(key)
        if prepared is None:
            most, shortest = [spans * SPAN] * len(lists), max(part.counts) if options.causal else 1
            problem = from_stored(q, self.shape.stored(most, items=part.items, shortest=shortest), options)
            prepared = self._prepare(problem, q, part, lists, out_strides)
            self.steps.put(key, prepared, prepared.size)
        return prepared, True

    def _prepare(self, problem: Problem, q: Array, part: _Part, lists: list[int], out_strides: tuple[int, ...]) -> Call:
        rows, keys = Rows("lhd", q, out_strides, part.rows), Paged(self.kernel_pages, lists)
        return prepare(problem, rows, keys, get_threads(), self.isa)
