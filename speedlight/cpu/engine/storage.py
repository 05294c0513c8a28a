"""The tokens of caches and pools in memory, and the calls that read them there.

`gpu/storage.py` has the same two classes. Here they also keep prepared steps (`prepares_steps`), and a cache attends
to a first chunk where that lies (`attends_new`).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import abstractmethod
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import describe
from ...arrays.dtypes import CODES, numpy_dtype
from ...arrays.memory import Array, ask_for_large_pages
from ...errors import ArgumentError
from ...host.machine import current_isa
from ...host.shortcuts import address_of
from ...problem.build import from_stored
from ...problem.operands import Dense, Rows
from ...problem.option_keys import key_of_traced
from ...problem.options import Options, known_keys
from ...problem.prepared import Prepared, new_key, prepared_calls
from ...problem.problem import SPAN, TILE, Problem, spans_of
from ...problem.results import Results
from ...problem.storage import Lengths, Overwritten, Storage
from ...problem.tokens import Batch, Moves, Piece, TokenShape
from ...problem.windows import SPARE, Ring
from ..memory.blocks import LARGE_PAGE, Coded, CodedLatents, make_stores
from ..memory.operands import Paged, Pages
from ..memory.records import BLOCK, ENDLESS, SLACK
from ..runtime.repeating import functions
from ..runtime.workers import get_threads, machine
from .append_call import AppendCall, Blocks, New
from .cascade import PageLists, Together, after_prefix, find_together
from .forward_call import Call, prepare
from .schedule import DECODE_ROWS
from .steps import Steps

_ALL = slice(None)


@functools.cache
def _numbers(pages: int, around: int = 0) -> np.ndarray:
    """Returns the list of pages of every sequence of a cache: they lie one after another.

    around: so many of the last come once more, where a run of new tokens may go past them.
    """
    ends = (0, pages), (pages - around, pages), (pages, pages + SLACK)
    return np.concatenate([np.arange(*x, dtype=np.int64) for x in ends])


class BlockStorage(Storage):
    """Base of both storages of the CPU: tokens lie in blocks of memory, and repeated steps are prepared."""

    device = "cpu"
    prepares_steps = True
    survives_fork = True
    steps: Steps
    blocks: Blocks

    def __init__(self, shape: TokenShape, blocks: tuple[int, int, int], *, together: bool) -> None:
        """Reserves memory; blocks, together: as make_stores() has them."""
        self.shape = shape
        self.isa = current_isa()
        self.stores = make_stores(shape, blocks, together=together)
        # latents are both
        self.keys = [x[0] for x in self.stores]
        self.values = [x[-1] for x in self.stores]
        self.addresses = [(k.address, v.address) for k, v in zip(self.keys, self.values, strict=True)]
        self.token_bytes = shape.kv_heads * sum([x.row for x in self.stores[0]])

    # --- arguments

    def received(self, x: Any, name: str) -> tuple[np.ndarray, str]:
        if type(x) is not np.ndarray or not x.dtype.isnative:
            x = describe(x, name).numpy()
        return x, x.dtype.name

    def query(self, q: Any) -> Array:
        return describe(q, "q")

    # --- steps

    def remember_put(
        self, given: tuple[Any, ...], k: np.ndarray, v: np.ndarray, counts: list[int], options: Options
    ) -> None:
        """Keeps the call for new tokens that were checked, as many of each sequence as by default.

        given: as the caller has them.
        """
        if any(counts) and self._can_repeat_put(k, v):
            self.steps.keep(Prepared(None, self._put_of(k, v, counts)), given, options)

    def _put_of(self, k: np.ndarray, v: np.ndarray, counts: list[int], heads: int = 0) -> AppendCall:
        """Prepares the call that stores so many new tokens of each sequence, wherever they and their places lie.

        heads: as AppendCall has it. Latents have a region of their own.
        """
        if self.shape.latent:
            heads = 0

        def make() -> AppendCall:
            new_keys = self._new(k, self.keys[0].memory, counts)
            new_values = self._new(v, self.values[0].memory, counts)
            if self.shape.latent:
                new_values = self._behind_values(new_values, is_joined=self._is_joined(v))
            return AppendCall(self.blocks, new_keys, new_values, counts, get_threads(), heads)

        key = ("put", tuple(counts), k.strides, v.strides, k.dtype, v.dtype, v.shape[-1], heads)
        return self.steps.made(key, make)

    def _behind_values(self, new: New, *, is_joined: bool) -> New:
        """Returns the second part of latents: it goes behind the first, and comes from there if keys are joined."""
        columns, store = self.shape.value_dim, self.keys[0]
        first = store.rest_at if isinstance(store, CodedLatents) else columns * store.kind.itemsize
        to = [n + first for n in new.to]
        return new._replace(to=to, items=[n + columns * new.column for n in new.items] if is_joined else new.items)

    def _is_joined(self, v: np.ndarray) -> bool:
        """Returns whether new latents are whole keys, which are k and v both."""
        return v.shape[-1] == self.shape.head_dim

    def _can_repeat_put(self, k: np.ndarray, v: np.ndarray) -> bool:
        """Returns whether a call that stores such tokens may be repeated for arrays of the same kind.

        Not a latent beside a rotary part as wide, since a joined key of half the columns would be taken for both.
        """
        return not self.shape.latent or self._is_joined(v) or k.shape[-1] != v.shape[-1]

    @abstractmethod
    def _new(self, x: np.ndarray, memory: np.ndarray, counts: list[int]) -> New:
        """Describes where new keys or values of each sequence lie, and where its memory begins."""

    # --- moves, and rollback

    def move(self, layer: int, moves: Moves) -> None:
        for store in self.stores[layer]:
            store.move(moves)

    def before_moves(self, layer: int, lengths: list[int], moves: Moves) -> Overwritten:
        if not moves.to_slot:
            return []
        return self._copied_blocks(layer, (np.array(moves.to_owner), _ALL, np.array(moves.to_slot) // BLOCK))

    def _copied_blocks(self, layer: int, where: Any) -> Overwritten:
        """Copies blocks of keys and values that will be overwritten."""
        return [(x.memory, where, x.memory[where]) for x in self.stores[layer]]

    def _get(self, layer: int, part: str, where: Any, n: int) -> np.ndarray:
        """Returns a copy of the first n "keys" or "values" of memory[where], (items, heads, n, dim)."""
        found = getattr(self, part)[layer].get(where, n)
        return found[..., : self.shape.value_dim].copy() if self.shape.latent and part == "values" else found

    def _parts(self, layer: int, where: Any, n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns keys and values as files have them, (items, heads, n, dim): [tokens], or [codes, scales].

        Latents are keys, beside no values; codes of these are [codes, scales, rest].
        """
        keys, *values = [x.parts(where, n) for x in self.stores[layer]]
        return keys, values[0] if values else []

    def _fill_scales(self, layer: int, scales: list[np.ndarray], where: Any) -> None:
        """Stores the scales of keys, and of values, if any, that lie beside codes in a file."""
        for store, x in zip(self.stores[layer], scales, strict=False):
            assert isinstance(store, Coded)
            store.fill_scales(x, where)


def _second_part(keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """Returns what lies behind the first part of a token: values; of latents whole keys, or the rest beside codes."""
    return (values or keys[2:] or keys)[0]


def _out_strides(q: Array, value_dim: int) -> tuple[int, ...]:
    """Returns the strides of a new array beside queries."""
    return np.empty((*q.shape[:-1], value_dim), numpy_dtype(q.dtype)).strides


class CacheStorage(BlockStorage):
    """Tokens of a KVCache: one endless page to the kernels; with a window, a ring of pages of a tile."""

    name = "cpu"
    lengths = Lengths()  # the host alone has them

    def __init__(self, shape: TokenShape, batch: int, capacity: int, ring: Ring, device: Any) -> None:
        super().__init__(shape, (batch, shape.kv_heads, -(-(ring.tokens or capacity) // BLOCK)), together=False)
        self.batch = batch
        self.capacity = capacity
        self.ring = ring
        # codes are to be read as the cache has them, and latents may come in two parts
        self.attends_new = shape.dtype not in CODES and not shape.latent
        self.pages = self._pages()
        self.most_new = SPARE if ring.size else capacity  # more may write over tokens that a ring promises
        self._large_from(LARGE_PAGE // 2 // max(self.keys[0].row, self.values[0].row) + 1)
        self.numbers = _numbers(ring.tokens // TILE, ring.size // TILE if shape.has_rows else 0).ctypes.data
        self.blocks = self._blocks()
        self.steps = Steps.of("cache", shape._replace(layers=0), self.pages, batch, capacity, ring, self.isa.name)
        self._place = self.steps, batch
        self.prefix: CacheStorage | None = None  # has the first `shared` tokens of all sequences
        self.sharers: weakref.WeakSet[CacheStorage] = weakref.WeakSet()  # which begin with tokens of this one

    def expect(self, tokens: int) -> None:
        """Asks for large pages, once, where a sequence fills half of one in each head: from `large_from` tokens on."""
        if tokens >= self.large_from:
            for store in itertools.chain(*self.stores):
                ask_for_large_pages(store.memory)
            self._large_from(self.capacity + 1)  # never again

    # --- a prefix: what lies before `shared` in memory of one's own is not used

    def begin_with(self, prefix: Storage, tokens: int) -> None:
        """Makes tokens of another cache's only sequence the first ones of all: whole tiles stay there."""
        assert isinstance(prefix, CacheStorage)
        shared = tokens // TILE * TILE
        self._copy_prefix(prefix, shared, tokens)
        if shared:
            prefix.sharers.add(self)
            self.prefix, self.shared, self.prepares_steps = prefix, shared, False

    def _copy_prefix(self, prefix: CacheStorage, first: int, end: int) -> None:
        """Copies tokens of a prefix to every sequence; `first` is a block's."""
        self.expect(end)
        blocks = slice(first // BLOCK, -(-end // BLOCK))
        for mine, theirs in zip(itertools.chain(*self.stores), itertools.chain(*prefix.stores), strict=True):
            mine.memory[:, :, blocks] = theirs.memory[:, :, blocks]

    def _leave_prefix(self) -> None:
        """Copies what lies in a prefix: then every token is one's own."""
        prefix, shared = self.prefix, self.shared
        if prefix is not None:
            self._copy_prefix(prefix, 0, shared)
            self.shared, self.prefix, self.prepares_steps = 0, None, True
            prefix.sharers.discard(self)

    def before_change(self, least: int, name: str) -> None:
        """Leaves a prefix whose tokens change; raises where other caches begin with them."""
        read = max([x.shared for x in [*self.sharers]], default=0)
        if least < read:
            raise ArgumentError(
                f"{name}: expected the first {read} tokens to stay, with which caches from from_prefix() begin; got "
                f"{least}. Delete those caches first, or change a copy()."
            )
        if least < self.shared:
            self._leave_prefix()

    def _stages(self, call: Call, piece: Piece) -> Together:
        """Returns the stages of a call: the prefix, then each sequence's own tokens."""
        assert self.prefix is not None
        heads = self.prefix.keys[0].memory.strides[1], self.prefix.values[0].memory.strides[1]
        # not the prefix, whose memory what is kept would hold
        key, (last, found) = (heads, self.shared, piece.after), call.together
        if last != key:
            lists = PageLists((), [self.numbers] * self.batch, TILE)
            found = after_prefix(call, self.shared, lists, piece.after, heads)
            call.together = key, found
        return found

    def _large_from(self, tokens: int) -> None:
        """Sets from how many tokens on large pages are asked for, and what a repeated step may reach before."""
        self.large_from = tokens
        self.most = min(self.capacity, tokens - 1)

    def repeat_step(
        self, layer: int, arrays: tuple[Any, ...], options: Options, return_lse: bool, lengths: list[int]
    ) -> tuple[Any, list[int]] | None:
        """Runs a step that was checked with arrays like these; returns its result and the lengths after it.

        Each sequence must have as many new tokens and queries as by default. Returns None if there is no such step, or
        if it is not for these lengths.

        Args:
            arrays: q, or q, k and v, or k and v, which are only stored: then the result is True.
            lengths: of the sequences so far.
        """
        of_options, _ = known_keys.get(id(options)) or options.keyed(key_of_traced)
        if of_options is None:
            return None
        now, place, store = machine(), self._place, self.addresses[layer]
        seed: Any = options.seed if options.dropout else 0
        if return_lse:
            read = functions().read(0, *arrays)
        else:
            read = functions().repeat("step", of_options, now, place, seed, store, lengths, self.most, 0, *arrays)
        if read is None:
            return None
        layout, places = read
        if type(places) is list:  # the result and the lengths
            return read
        step = prepared_calls.get(new_key(("step", of_options, layout, now, place)))
        if step is None:
            return None
        totals = [n + step.new for n in lengths]
        if step.new > self.most_new or max(totals) > self.most or not step.fits(totals):
            return None
        if step.call is None:
            step.store(places, lengths, store)
            return True, totals
        result = step.run(arrays[0], places, return_lse=return_lse, seed=seed, lengths=totals, store=store)
        return result, totals

    def _blocks(self) -> Blocks:
        """Returns where new tokens go."""
        shape, ring, store = self.shape, self.ring, self.keys[0]
        if shape.has_rows:
            head, size = store.memory.strides[1], TILE if ring.size else ENDLESS
            return Blocks.of_latents(shape, self.isa, head, TILE * store.row, size, self.numbers)
        parts = (ring.fixed // BLOCK, ring.size // BLOCK) if ring.size else ()
        return Blocks.of(shape, self.isa, store, self.values[0], *parts)

    def _pages(self) -> Pages:
        """Returns how kernels find a token."""
        k, v, ring = self.keys[0], self.values[0], self.ring
        heads, items = ([x.memory.strides[axis] for x in (k, v)] for axis in (1, 0))
        more = {"fixed": ring.fixed // TILE, "ring": ring.size // TILE} if ring.size else {}
        if self.shape.has_rows:
            more |= {"k_column": k.kind.itemsize, "v_column": v.kind.itemsize}
        return Pages(
            not self.shape.has_rows,
            TILE if ring.size else ENDLESS,
            k_head=heads[0],
            k_page=TILE * k.row,
            k_row=k.row,
            v_head=heads[1],
            v_page=TILE * v.row,
            v_row=v.row,
            k_item=items[0],
            v_item=items[1],
            latent=self.shape.has_codes_of_latents,
            **more,
        )

    # --- tokens in and out

    def put(self, layer: int, lengths: list[int], counts: list[int], k: np.ndarray, v: np.ndarray) -> None:
        """Stores the first tokens of k and v, so many of each sequence, past its length: nobody sees them yet."""
        most = max(counts)
        self.expect(max(lengths) + most)
        # a ring comes round: what later tokens write over is not stored, and no two threads may write to one block,
        # where tokens of a pair are stored together
        size, first, step = self.ring.size, 0, most
        if size:
            first = max(min(counts) - size, 0) // BLOCK * BLOCK if not self.ring.fixed else 0
            step = size if not any([(n + first) % BLOCK for n in lengths]) else size - BLOCK
        for done in range(first, most, max(step, 1)):
            part = counts if step == most else [min(max(n - done, 0), step) for n in counts]
            k_at, v_at = (address_of(x) + done * x.strides[2] for x in (k, v))
            slots = lengths if not done else [n + done for n in lengths]
            if self.shape.has_rows:
                slots = [self.ring.slot(n) for n in slots]
            self._put_of(k, v, part).start((k_at, v_at, *self.addresses[layer]), slots)

    def _new(self, x: np.ndarray, memory: np.ndarray, counts: list[int]) -> New:
        item, head, row, column = x.strides
        items, to = ([i * step for i in range(self.batch)] for step in (item, memory.strides[0]))
        return New(x.dtype.name, head, row, column, items, to)

    def tokens(self, layer: int, part: str, n: int) -> np.ndarray:
        """A copy of the first n slots of "keys" or "values": (batch, kv_heads, n, dim)."""
        found = self._get(layer, part, _ALL, n)
        if self.prefix is not None:
            found[:, :, : self.shared] = self.prefix.tokens(layer, part, min(n, self.shared))
        return found

    def parts(self, layer: int, counts: list[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns keys and values as files have them, of each sequence the slots in use."""
        keys, values = self._parts(layer, _ALL, max(counts))
        if self.prefix is not None:
            theirs = self.prefix._parts(layer, _ALL, self.shared)
            for x, y in zip(itertools.chain(keys, values), itertools.chain(*theirs), strict=True):
                x[:, :, : self.shared] = y
        for x in itertools.chain(keys, values):
            for item, n in enumerate(counts):
                x[item, :, n:] = 0
        return keys, values

    def fill(self, layer: int, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
        """Stores what parts() returned, in a cache that has held nothing."""
        batch, _, n, _ = keys[0].shape
        if n:
            self.put(layer, [0] * batch, [n] * batch, keys[0], _second_part(keys, values))
        self._fill_scales(layer, [x[1] for x in (keys, values) if len(x) > 1], _ALL)

    def copy_to(self, other: CacheStorage, indices: list[int], counts: list[list[int]]) -> None:
        """These sequences become those of another cache; counts: of each layer the slots in use."""
        other.expect(max(map(max, counts)))
        for layer, used in enumerate(counts):
            for to, item in enumerate(indices):
                blocks = -(-used[item] // BLOCK)
                for mine, theirs in zip(self.stores[layer], other.stores[layer], strict=True):
                    theirs.memory[to, :, :blocks] = mine.memory[item, :, :blocks]
        if self.prefix is not None:
            other._copy_prefix(self.prefix, 0, self.shared)

    # --- what a failing call has written over

    def before(self, layer: int, lengths: list[int], slots: list[int]) -> Overwritten:
        """Copies what lies in slots that will be overwritten."""
        if not slots:
            return []
        return self._copied_blocks(layer, (_ALL, _ALL, np.array(sorted({n // BLOCK for n in slots}))))

    # --- attending

    def prepare(self, q: Array, piece: Piece, options: Options, out_strides: tuple[int, ...]) -> Call:
        """Prepares a piece's call: the problem is checked, nothing is written."""
        if len(q.shape) == 4:
            q = replace(q, shape=(*q.shape[:2], piece.rows.stop - piece.rows.start, q.shape[3]))
        if self.shared and not self._goes_on(q, piece, options):
            self._leave_prefix()
        if self.shared and piece.counts is None and not options.dropout and (known := options.key()) is not None:
            spans = spans_of(max(piece.after))
            key = "staged", q.shape, q.strides, q.dtype, out_strides, known, spans
            return self.steps.made(key, lambda: self._call_of_step(q, spans, options, out_strides))
        stored = self.shape.stored(piece.after, hiding=self.ring.mask(options.causal))
        return self._prepare(from_stored(q, stored, replace(options, q_lengths=piece.counts)), q, out_strides)

    def attend(self, layer: int, call: Call, q: Array, piece: Piece, results: Results) -> None:
        """Runs what prepare() returned; the results are those of the whole chunk."""
        lse, start, rows = results.lse, piece.rows.start, (_ALL, _ALL, piece.rows)
        part = None
        if lse is not None and piece.rows.stop - start < q.shape[2]:  # kernels write it side by side
            part = np.empty(lse.numpy()[rows].shape, lse.numpy().dtype)
        lse_address = 0 if lse is None else lse.address if part is None else address_of(part)
        q_address, out_address = (x.address + start * x.strides[2] for x in (q, results.out))
        addresses = q_address, *self.addresses[layer], out_address, lse_address
        if self.prefix is not None:
            if any(piece.counts or [1]):
                self._stages(call, piece).run(addresses, None, self.prefix.addresses[layer])
            for item, n in enumerate(piece.counts or ()):  # the rest of its rows are no queries
                results.out.numpy()[item, :, n:] = 0
                if lse is not None:
                    lse.numpy()[item, :, n:] = -np.inf
        else:
            call.run(*addresses)
        if lse is not None and part is not None:
            lse.numpy()[rows] = part

    def attend_new(self, q: Array, k: np.ndarray, v: np.ndarray, options: Options, results: Results) -> None:
        """Attends to a first chunk at once, where it lies: pieces of it would each be prepared."""
        of_k, of_v = (replace(describe(x, name), kind=q.kind) for x, name in ((k, "k"), (v, "v")))

        def make() -> Call:
            stored = self.shape.stored([k.shape[2]] * self.batch, hiding=self.ring.mask(bool(options.causal)))
            rows, keys = Rows("bhld", q, results.out.strides), Dense("bhld", of_k, of_v)
            return prepare(from_stored(q, stored, options), rows, keys, get_threads(), self.isa)

        known, arrays = options.key(), [(x.shape, x.strides, x.dtype) for x in (q, of_k, of_v, results.out)]
        call = make() if known is None else self.steps.made(("new", known, *arrays), make)
        call.run(q.address, of_k.address, of_v.address, results.out.address, results.lse_address, options.seed_word())

    def step(self, given: Any, q: Array, lengths: list[int], options: Options) -> Prepared | None:
        """A step for queries of this form, checked; `given`: as the caller has them."""
        known = options.key()
        if known is None or not (type(given) is np.ndarray or q.kind == "torch"):
            return None
        if len(q.shape) != 4 or 0 in q.shape or not min(lengths):
            return None
        self.expect(max(lengths))
        most = spans_of(max(lengths))

        # it depends on no length beyond the spans: items_for() puts lengths and rows in
        key = "step", q.shape, q.strides, q.dtype, known, most
        out_strides = _out_strides(q, self.shape.value_dim)
        return self.steps.made(key, lambda: Prepared(self._call_of_step(q, most, options, out_strides)))

    def _call_of_step(self, q: Array, spans: int, options: Options, out_strides: tuple[int, ...]) -> Call:
        """Prepares a call for any lengths of so many spans."""
        longest, shortest = [min(spans * SPAN, self.capacity)] * self.batch, q.shape[2] if options.causal else 1
        stored = self.shape.stored(longest, hiding=self.ring.mask(bool(options.causal)), shortest=shortest)
        return self._prepare(from_stored(q, stored, options), q, out_strides)

    def _goes_on(self, q: Array, piece: Piece, options: Options) -> bool:
        """Returns whether every query sees the whole prefix, but for what a mask hides."""
        if len(q.shape) != 4:
            return False
        counts = piece.counts or [q.shape[2]] * self.batch
        queries = counts if options.causal else map(bool, counts)
        return all([end - n >= self.shared for end, n in zip(piece.after, queries, strict=True)])

    def remember(self, step: Prepared, given: tuple[Any, ...], q: Array, k: Any, v: Any, options: Options) -> None:
        """Keeps a step that was checked with these arrays: q, or q, k and v."""
        if k is not None:
            if not self._can_repeat_put(k, v):
                return
            put = self._put_of(k, v, step.counts, step.call.heads_alone)
            step = Prepared(step.call, put)
        elif self.ring.size:  # what a window still has depends on lengths
            return
        self.steps.keep(step, given, options)

    def _can_repeat_put(self, k: np.ndarray, v: np.ndarray) -> bool:
        # rows find their place in a ring on the host
        return super()._can_repeat_put(k, v) and not (self.shape.has_rows and self.ring.size)

    def _prepare(self, problem: Problem, q: Array, out_strides: tuple[int, ...]) -> Call:
        keys = Paged(self.pages, [self.numbers] * self.batch)
        return prepare(problem, Rows("bhld", q, out_strides), keys, get_threads(), self.isa)


class _Part(NamedTuple):
    """Sequences of a batch that one kernel takes."""

    items: tuple[int, ...]  # which of the batch
    counts: tuple[int, ...]
    rows: tuple[int, ...]  # of each its first among the packed queries
    lengths: list[int]


class _Table:
    """The blocks of a sequence, by number, with SLACK more numbers past the last; and where they lie."""

    __slots__ = ("address", "numbers")

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.address = numbers, numbers.ctypes.data


class PoolStorage(BlockStorage):
    """Tokens of a PagePool. To the kernels a page is a block; a sequence's table has the number of each block.

    Blocks are numbered through heads, so that one number times a block's bytes leads there. Of latents, which are rows,
    pages are the kernels', too.
    """

    def __init__(self, shape: TokenShape, pages: int, page_size: int, device: Any) -> None:
        self.page_size = page_size
        blocks = page_size // BLOCK  # of each head
        super().__init__(shape, (pages, shape.kv_heads, blocks), together=True)
        k, v = self.keys[0], self.values[0]
        page, head, block = k.memory.strides[:3]
        # a table's entries for a page, and from the first of a page to the first of the next
        self.entries, self.numbers_per_page = (1, 1) if shape.has_rows else (blocks, shape.kv_heads * blocks)
        if shape.has_rows:
            columns = k.kind.itemsize, v.kind.itemsize
            self.kernel_pages = Pages(False, page_size, head, page, k.row, head, page, v.row, *columns)
            self.blocks = Blocks.of_latents(shape, self.isa, head, page, page_size)
        else:
            latent = shape.has_codes_of_latents
            self.kernel_pages = Pages(True, BLOCK, head, block, k.row, head, block, v.row, latent=latent)
            self.blocks = Blocks.of(shape, self.isa, k, v)
        self.steps = Steps.of("pool", shape._replace(layers=0), self.kernel_pages, page_size, self.isa.name)

    def find_step(self, sequences: int, tensors: tuple[Any, ...], options: Options) -> tuple[Prepared, bytes] | None:
        """Returns a step that was checked with arrays like these, for any lengths, and where its arrays lie.

        Each sequence must have as many new tokens and queries as by default. Returns None if there is no such step.
        """
        return self.steps.find(sequences, tensors, options)

    # --- tables

    def new_table(self) -> _Table:
        return _Table(np.zeros(SLACK, np.int64))

    def copied(self, table: _Table) -> _Table:
        return _Table(table.numbers.copy())

    def extended(self, table: _Table, pages: list[int], used: int, moved: list[int]) -> _Table:
        """A table of these pages, where `table` is of the first `used` but for those at `moved`.

        What a table says past the pages of its sequence is nobody's, so it is extended in place while it has room.
        """
        entries, kept_end, end = self.entries, used * self.entries, len(pages) * self.entries
        if moved or end + SLACK > len(table.numbers):
            longer = np.zeros(max(len(table.numbers), 2 * end + SLACK), np.int64)
            longer[:kept_end] = table.numbers[:kept_end]
            table = _Table(longer)
        for at in (*moved, *range(used, len(pages))):
            first = pages[at] * self.numbers_per_page
            table.numbers[at * entries : (at + 1) * entries] = range(first, first + entries)
        # another object, by which a kept answer (cascade.py) knows that what is behind the first pages has changed
        return _Table(table.numbers)

    # --- tokens in and out

    def copy_page(self, new: int, old: int) -> None:
        for store in itertools.chain(*self.stores):
            store.memory[new] = store.memory[old]

    def tokens(self, layer: int, part: str, pages: list[int], n: int) -> np.ndarray:
        """A copy of a sequence's first n "keys" or "values": (kv_heads, n, dim)."""
        used = np.array(pages[: -(-n // self.page_size)], np.int64)
        each = self._get(layer, part, used, self.page_size)  # (pages, heads, page_size, dim)
        return each.swapaxes(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].copy()

    def parts(self, layer: int, pages: list[int], n: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """A sequence's keys and values as files have them, as CacheStorage.parts() of a batch of one."""
        used = np.array(pages[: -(-n // self.page_size)], np.int64)
        keys, values = (
            [x.swapaxes(0, 1).reshape(1, x.shape[1], -1, x.shape[3])[:, :, :n] for x in parts]
            for parts in self._parts(layer, used, self.page_size)
        )
        return keys, values

    def fill(
        self, layer: int, table: _Table, pages: list[int], keys: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        """Stores what parts() returned of a sequence whose tokens fill these pages; `table`: of the same pages."""
        n, size = len(pages) * self.page_size, self.page_size
        k, v = (x[0].swapaxes(0, 1) for x in (keys[0], _second_part(keys, values)))
        self.put(layer, Batch([table], [0], [n], [n]), k, v)
        scales = [x[1] for x in (keys, values) if len(x) > 1]
        of_pages = [x[0].reshape(x.shape[1], -1, size, x.shape[3]).swapaxes(0, 1) for x in scales]
        self._fill_scales(layer, of_pages, np.array(pages, np.int64))

    def put(self, layer: int, batch: Batch, k: np.ndarray, v: np.ndarray) -> None:
        """New tokens, one sequence's after the other's."""
        if any(batch.counts):
            addresses = (address_of(k), address_of(v), *self.addresses[layer])
            self._put_of(k, v, batch.counts).start(addresses, batch.before, [x.address for x in batch.tables])

    def _new(self, x: np.ndarray, memory: np.ndarray, counts: list[int]) -> New:
        # one's after the other's; tables tell where they go
        row, head, column = x.strides
        first = [n * row for n in itertools.accumulate(counts, initial=0)]
        return New(x.dtype.name, head, row, column, first[:-1], [0] * len(counts))

    # --- attending

    def attend(self, layer: int, q: Array, batch: Batch, options: Options, results: Results) -> None:
        """Packed queries over their sequences' tokens."""
        first = list(itertools.accumulate(batch.counts, initial=0))
        addresses = (q.address, *self.addresses[layer], results.out.address, results.lse_address)
        for which in self._by_kernel(q.shape[1], batch.counts):
            counts, rows, lengths = ([x[i] for i in which] for x in (batch.counts, first, batch.after))
            part = _Part(tuple(which), tuple(counts), tuple(rows), lengths)
            lists = [batch.tables[i].address for i in which]
            call, any_lengths = self._call_of(q, part, lists, options, results.out.strides)
            shared = self._find_shared(call, [batch.tables[i] for i in which], lengths)
            if shared is not None:
                shared.run(addresses, options.seed_word())
                continue
            more: Any = (options.seed_word(), lengths, lists) if any_lengths else ()
            call.run(*addresses, *more)

    def together(self, step: Prepared, batch: Batch) -> Prepared:
        """Returns a step, or in its place one in which sequences that share pages are taken together."""
        found = self._find_shared(step.call, batch.tables, batch.after)
        return step if found is None else found.in_place_of(step)

    def _find_shared(self, call: Call, tables: list[_Table], lengths: list[int]) -> Together | None:
        """Finds the stages of a call in which sequences that share pages are taken together, if that is faster."""
        if len({x.numbers.item(0) for x in tables}) == len(tables):
            return None
        key, (last, found) = (tables, lengths), call.together
        if last == key:  # in a model's next layer
            return found
        page_size = BLOCK if self.kernel_pages.lanes else self.page_size
        lists = PageLists([x.numbers for x in tables], [x.address for x in tables], page_size)
        return find_together(call, lists, lengths, key)

    def remember(self, given: tuple[Any, ...], q: Array, k: Any, v: Any, batch: Batch, options: Options) -> None:
        """Keeps a step that was checked with these arrays, of as many queries and new tokens as by default."""
        which = self._by_kernel(q.shape[1], batch.counts)
        if 0 in q.shape or which != [[*range(len(batch.tables))]] or not min(batch.after):
            return
        first = list(itertools.accumulate(batch.counts, initial=0))[:-1]
        part = _Part(tuple(which[0]), tuple(batch.counts), tuple(first), batch.after)
        lists, strides = [x.address for x in batch.tables], _out_strides(q, self.shape.value_dim)
        call, any_lengths = self._call_of(q, part, lists, options, strides)
        if any_lengths and (k is None or self._can_repeat_put(k, v)):
            put = None if k is None else self._put_of(k, v, batch.counts, call.heads_alone)
            self.steps.keep(Prepared(call, put), given, options)

    def _by_kernel(self, q_heads: int, counts: list[int]) -> list[list[int]]:
        """Which sequences go together: those of few queries, which the decode kernel takes, apart from longer
        chunks.
        """
        few = DECODE_ROWS * self.shape.kv_heads // max(1, q_heads)
        short, long = [i for i, n in enumerate(counts) if 0 < n <= few], [i for i, n in enumerate(counts) if n > few]
        return [x for x in (short, long) if x]

    def _call_of(
        self, q: Array, part: _Part, lists: list[int], options: Options, out_strides: tuple[int, ...]
    ) -> tuple[Call, bool]:
        """The prepared call, and whether it is one for any lengths of as many spans (doubled until they suffice)."""
        longest, known = max(part.lengths), options.key()
        options = replace(options, q_lengths=part.counts)
        if known is None or not longest:
            problem = from_stored(q, self.shape.stored(part.lengths, items=part.items), options)
            return self._prepare(problem, q, part, lists, out_strides), False
        spans = spans_of(longest)

        def make() -> Call:
            most, shortest = [spans * SPAN] * len(lists), max(part.counts) if options.causal else 1
            problem = from_stored(q, self.shape.stored(most, items=part.items, shortest=shortest), options)
            return self._prepare(problem, q, part, lists, out_strides)

        # it depends on no length or page: items_for() puts them in
        where = part.items, part.counts, part.rows
        return self.steps.made(("call", where, q.shape, q.strides, q.dtype, out_strides, known, spans), make), True

    def _prepare(self, problem: Problem, q: Array, part: _Part, lists: list[int], out_strides: tuple[int, ...]) -> Call:
        rows, keys = Rows("lhd", q, out_strides, part.rows), Paged(self.kernel_pages, lists)
        return prepare(problem, rows, keys, get_threads(), self.isa)
