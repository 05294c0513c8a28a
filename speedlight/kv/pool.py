"""A pool of pages for many sequences: handed out, shared, copied on the first write, returned; batches are packed.

Which page is whose, claims and roll-back are here, for every device; an engine's storage keeps the tokens.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any, NamedTuple

from ..checks import cache_dtype, check_index, check_list, check_sizes, each_count
from ..compiling import in_graph, outside
from ..cpu.layout import BLOCK
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, shown
from ..forks import renew_after_fork
from ..problem import Options
from ..tokens import Batch, TokenShape
from .query import Query, query_of, received, results_of
from .sequence import Sequence
from .storage import storage_of

_numbers = itertools.count()  # of sequences, of whichever pool: none is given twice


class _Held(NamedTuple):
    """What a sequence holds. Never changed: an append makes another.

    pages: in order.
    table: the same in the storage's own form, which an append may extend in place.
    lengths: tokens of each layer.
    """

    pages: list[int]
    table: Any
    lengths: list[int]


class PagePool:
    """Memory for the keys and values of many sequences, in pages that hold `page_size` tokens of all layers.

    Args:
        layers: number of layers.
        pages: number of pages.
        page_size: tokens of a page, a multiple of 16.
        kv_heads: heads of keys and values.
        head_dim: elements of a key.
        dtype: float32, float64, float16, bfloat16 or int8, as for KVCache.
        value_dim: elements of a value. Default head_dim.
        device: where the pages lie: "cpu", or "cuda" ("cuda:0", …) for a GPU, whose tensors calls then take and return.

    >>> import numpy as np, speedlight as sl
    >>> pool = sl.PagePool(layers=1, pages=8, page_size=16, kv_heads=2, head_dim=4)
    >>> a = pool.sequence(); x = np.ones((20, 2, 4), np.float32)
    >>> pool.append(0, [a], x, x); b = a.fork(); pool.free_pages
    6
    >>> pool.attend(0, [a, b], x[:2], x[:2], x[:2]).shape, pool.free_pages
    ((2, 2, 4), 5)
    """

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any = "float32",
        value_dim: int | None = None,
        device: Any = "cpu",
    ) -> None:
        engine = storage_of(device)
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        check_sizes(sizes)
        if page_size % BLOCK:
            raise ArgumentError(f"page_size: expected a multiple of {BLOCK}; got {page_size}.")
        self.layers, self.pages, self.page_size, self.kv_heads, self.head_dim, self.value_dim = map(int, sizes.values())
        self.dtype = cache_dtype(dtype)
        shape = TokenShape(self.layers, self.kv_heads, self.head_dim, self.value_dim, self.dtype)
        self._storage = engine.PoolStorage(shape, self.pages, self.page_size, device)  # first: the reservation may fail
        self._held: dict[int, _Held] = {}  # by the number of the handle
        self._claims: set[Any] = set()  # numbers of sequences being written to
        self._dropped: list[list[int]] = []  # released, and counted by whoever needs the free list next
        self._taking = threading.RLock()
        self._free = list(range(self.pages - 1, -1, -1))
        self._others = [0] * self.pages  # references to each page beyond the first
        renew_after_fork(self)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{n}={getattr(self, n)}" for n in ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim")
        )
        return f"PagePool({sizes}, dtype={self.dtype!r}, {self.free_pages} pages free)"

    # --- accounts

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        self._count_dropped()
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of all layers, and their scales."""
        return self.layers * self.page_size * self._storage.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold; a shared page counts once."""
        return (self.pages - self.free_pages) * self.page_bytes

    # Signals come, and other threads run, where calls begin and end and where loops jump back: not within a run of
    # plain stores, operators and returns. Claims are made and released, pages change hands, and everything takes
    # effect, in such runs.

    def _count_dropped(self) -> None:
        """Drops a reference of each released page; those without any are free."""
        dropped, free, others = self._dropped, self._free, self._others
        while dropped:
            pages = dropped[-1]
            if not pages:
                del dropped[-1]
                continue
            page = pages[-1]
            del pages[-1]
            if others[page]:
                others[page] -= 1
            else:
                free += [page]

    def _take(self, layer: int, count: int) -> list[int]:
        """So many free pages, or none."""
        free, taken = self._free, []
        try:
            with self._taking:
                self._count_dropped()
                if count > len(free):
                    raise CacheFull(
                        f"layer {layer}: {count} pages are needed, {len(free)} of {self.pages} are free. "
                        "free() or truncate() sequences, or make a pool of more pages.",
                        count,
                        len(free),
                    )
                for _ in range(count):
                    page = free[-1]
                    del free[-1]
                    taken += [page]
        except BaseException:
            self._dropped += [taken]
            raise
        return taken

    def after_fork(self) -> None:
        """In the child: claims of the parent's threads are dropped, and pages that they had taken are free."""
        if self._claims:
            held = Counter(page for x in self._held.values() for page in x.pages)
            self._others[:] = [max(held[page] - 1, 0) for page in range(self.pages)]
            self._free[:] = [page for page in reversed(range(self.pages)) if not held[page]]
            self._dropped[:] = []
        self._claims, self._taking = set(), threading.RLock()

    # --- sequences

    def sequence(self) -> Sequence:
        """A new sequence, without tokens."""
        new = Sequence(self, next(_numbers))
        empty = _Held([], self._storage.new_table(), [0] * self.layers)
        self._held[new._number] = empty
        return new

    def _of(self, sequence: Any) -> _Held:
        if not isinstance(sequence, Sequence):
            raise ArgumentTypeError(
                f"sequences: expected sequences of this pool, from pool.sequence(); got {type(sequence).__name__}."
            )
        if sequence.pool is not self:
            raise ArgumentError("sequences: expected sequences of this pool; got one of another pool.")
        held = self._held.get(sequence._number)
        if held is None:
            raise ArgumentError("sequences: this sequence was freed. Make a new one with pool.sequence().")
        return held

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _fork(self, sequence: Sequence) -> Sequence:
        claims, mine, claimed, shared = self._claims, {sequence._number}, False, []
        try:
            if claims & mine:
                raise _busy()
            claims |= mine
            claimed = True
            old, others = self._of(sequence), self._others
            new = Sequence(self, next(_numbers))
            copied = old._replace(table=self._storage.copied(old.table))
            for page in old.pages:
                others[page] += 1
                shared += [page]
            self._held[new._number] = copied
            return new
        except BaseException:
            self._dropped += [shared]
            raise
        finally:
            if claimed:
                claims -= mine

    def _shorten(self, sequence: Sequence, length: int | None) -> None:
        """To so many tokens; None frees it."""
        held, claims, mine, claimed = self._held, self._claims, {sequence._number}, False
        try:
            if claims & mine:
                raise _busy()
            claims |= mine
            claimed = True
            old = self._of(sequence)
            least = min(old.lengths)
            if length is not None and not 0 <= length <= least:
                raise ArgumentError(f"length: expected 0 to {least}, the tokens in every layer; got {shown(length)}.")
            still = -(-(length or 0) // self.page_size)
            left = [old.pages[still:]] if still < len(old.pages) else []
            if length is None:
                del held[sequence._number]
            else:
                new = _Held(old.pages[:still], old.table, [length] * self.layers)
                held[sequence._number] = new
            self._dropped += left
        finally:
            if claimed:
                claims -= mine

    def _tokens(self, sequence: Sequence, layer: int, part: str) -> Any:
        held, layer = self._of(sequence), self._layer(layer)
        return self._storage.tokens(layer, part, held.pages, held.lengths[layer])

    # --- append and attend

    def append(self, layer: int, sequences: Any, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (total new, kv_heads, head_dim), v (…, value_dim), one sequence's after
        the other's.
        """
        if in_graph():
            return outside(PagePool.append, self, layer, sequences, k, v, new_lengths=new_lengths)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        k, v = self._new(k, v, None)
        self._grow(layer, sequences, self._counts(new_lengths, len(sequences), k.shape[0]), k, v, None)

    def attend(
        self,
        layer: int,
        sequences: Any,
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        new_lengths: Any = None,
        scale: float | None = None,
        mask: Any = None,
        score: Any = None,
        sink_logits: Any = None,
        return_lse: bool = False,
        out: Any = None,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> Any:
        """Appends new tokens to several sequences, then lets their queries attend, each to all tokens of its sequence
        up to its own.

        Args:
            layer: index of the layer.
            sequences: a list of this pool's sequences, each once.
            q: (total new, q_heads, head_dim), the first sequence's new tokens, then the second's, …
            k: (total new, kv_heads, head_dim). None appends nothing: every query then sees every stored token.
            v: (total new, kv_heads, value_dim).
            new_lengths: new tokens of each sequence. Default: all to a single sequence, else one each.
            scale, mask, score, sink_logits, return_lse, out, dropout, seed: as for KVCache.attend; a mask's b, and
                dropout's batch item, is the index in `sequences`.

        Returns:
            (total new, q_heads, value_dim), of q's kind; with return_lse also (q_heads, total new).

        Raises:
            CacheFull: too few pages are free; nothing has been written.
            CacheBusy: another thread appends to one of the sequences.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the pool and its sequences are as they were.
        """
        if in_graph():
            options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits, "out": out}
            more = {"new_lengths": new_lengths, "return_lse": return_lse, "dropout": dropout, "seed": seed}
            return outside(PagePool.attend, self, layer, sequences, q, k, v, **options, **more)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        options = Options(
            k is not None, None, mask, score, sink_logits, None, 0, scale, "lhd", dropout=dropout, seed=seed
        )
        query = query_of(self._storage, q, options, return_lse, out)
        shape = query.q.shape
        if len(shape) != 3:
            raise ArgumentError(f"q: expected shape (total new, q_heads, {self.head_dim}); got {shape}.")
        counts = self._counts(new_lengths, len(sequences), shape[0])
        if k is None or v is None:
            if k is not None or v is not None:
                raise ArgumentError(f"{'k' if k is None else 'v'}: expected k and v together, or neither.")
            held = [self._of(x) for x in sequences]
            lengths = [x.lengths[layer] for x in held]
            return self._attended(layer, query, Batch([x.table for x in held], lengths, lengths, counts))
        k, v = self._new(k, v, shape[0])
        return self._grow(layer, sequences, counts, k, v, query)

    def _grow(self, layer: int, sequences: list[Any], counts: list[int], k: Any, v: Any, query: Query | None) -> Any:
        """New tokens, and what a query then sees; all of it or nothing."""
        numbers = [getattr(x, "_number", None) for x in sequences]
        claims, mine, claimed, taken, result = self._claims, set(numbers), False, [], None
        if len(mine) != len(numbers) and all([self._of(x) for x in sequences]):
            raise ArgumentError("sequences: expected each sequence once; fork() makes another of the same tokens.")
        try:
            if claims & mine:
                raise _busy()
            claims |= mine
            claimed = True
            before = [self._of(x) for x in sequences]
            starts = [x.lengths[layer] for x in before]
            totals = [a + n for a, n in zip(starts, counts, strict=True)]
            copies = self._to_copy(before, starts, totals)
            fresh = [max(0, -(-n // self.page_size) - len(x.pages)) for x, n in zip(before, totals, strict=True)]
            needed, longer, replaced = sum(fresh) + len(copies), before, []
            if needed:
                taken = self._take(layer, needed)
                longer, replaced = self._longer(before, fresh, copies, taken)
            batch = Batch([x.table for x in longer], starts, totals, counts)
            self._storage.put(layer, batch, k, v)
            if query is not None:
                result = self._attended(layer, query, batch)
            after = {}
            for number, x, total in zip(numbers, longer, totals, strict=True):
                lengths = x.lengths[:]
                lengths[layer] = total
                after[number] = _Held(x.pages, x.table, lengths)
            held, dropped, left = self._held, self._dropped, [replaced] if replaced else []
            held |= after  # from here to the return nothing comes between
            dropped += left
            return result
        except BaseException:
            if taken:
                self._dropped += [taken]
            raise
        finally:
            if claimed:
                claims -= mine

    def _attended(self, layer: int, query: Query, batch: Batch) -> Any:
        q = query.q
        results = results_of(query, self.value_dim, (q.shape[1], q.shape[0]))
        self._storage.attend(layer, q, batch, query.options, results)
        return results.returned()

    def _new(self, k: Any, v: Any, total: int | None) -> tuple[Any, Any]:
        """New keys and values, checked: `total` tokens of each, by default as many as k has."""
        k = received(self._storage, k, "k", ("total new", self.kv_heads, self.head_dim), 0)
        v = received(self._storage, v, "v", ("total new", self.kv_heads, self.value_dim), 0)
        total = k.shape[0] if total is None else total
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != total:
                raise ArgumentError(f"{name}: expected {total} tokens, as q and new_lengths have; got {x.shape[0]}.")
        return k, v

    def _counts(self, new_lengths: Any, sequences: int, total: int) -> list[int]:
        alone = [total] if sequences == 1 else [1] * sequences
        given = alone if new_lengths is None else each_count(new_lengths, sequences)
        if any([n < 0 for n in given]) or sum(given) != total:
            raise ArgumentError(
                f"new_lengths: expected {sequences} ints, one per sequence, that add up to the {total} tokens; got "
                f"{shown(given)}."
            )
        return given

    def _longer(
        self, before: list[_Held], fresh: list[int], copies: list[tuple[int, int]], taken: list[int]
    ) -> tuple[list[_Held], list[int]]:
        """Copy on write: each sequence with its fresh pages, and with copies of the shared pages that it writes to; and
        the pages that were replaced.
        """
        left, longer, replaced, storage = iter(taken), [], [], self._storage
        for index, (held, n) in enumerate(zip(before, fresh, strict=True)):
            moved = [at for owner, at in copies if owner == index] if copies else []
            if not moved and not n:
                longer.append(held)
                continue
            pages = held.pages[:]
            for at in moved:
                old, new = pages[at], next(left)
                storage.copy_page(new, old)
                replaced.append(old)
                pages[at] = new
            pages += itertools.islice(left, n)
            longer.append(_Held(pages, storage.extended(held.table, pages, len(held.pages), moved), held.lengths))
        return longer, replaced

    def _to_copy(self, before: list[_Held], starts: list[int], totals: list[int]) -> list[tuple[int, int]]:
        """Shared pages that would be written to, as (index of the sequence, index of its page).

        The last sequence that shares a page writes in place, unless one that leaves has tokens there: a failing call
        must not change those.
        """
        left: Counter[int] = Counter()
        away: dict[int, int] = {}  # of a page: tokens of the longest sequence that leaves it for a copy
        shared = []
        for index, (held, start, total) in enumerate(zip(before, starts, totals, strict=True)):
            for at in range(start // self.page_size, min(len(held.pages), -(-total // self.page_size))):
                page = held.pages[at]
                if self._others[page] > left[page] or away.get(page, 0) > start:
                    left[page] += 1
                    away[page] = max(away.get(page, 0), start)
                    shared.append((index, at))
        return shared


def _busy() -> CacheBusy:
    """Raised for a second writer, which does not wait."""
    return CacheBusy(
        "sequences: another thread is writing to one of them. Write to a sequence from one thread at a time."
    )
