"""Pool of pages for many sequences: allocation, sharing, copy-on-write and release; batches are packed.

Owners of pages, claims and rollback are here, for every device; an engine's storage keeps the tokens.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from ..engines import by_name
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, not_pickled, shown
from ..errors.advice import of_packed
from ..host.forks import renew_after_fork
from ..host.graph_breaks import in_graph, outside
from ..host.notebooks import bars
from ..problem.checks import cache_dtype, check_index, check_list, checked_sizes, packed_counts
from ..problem.options import PLAIN, AnyArray, ArrayOf, Dtype, Ints, Options, StepCall, StepOptions, T
from ..problem.signatures import public, refuse_unknown
from ..problem.tokens import BLOCK, Batch, TokenShape
from .query import Packed, Query, check_asked, packed_queries, packed_tokens, query_of
from .running import run_packed
from .saving import save_sequence
from .sequence import PagedSequence
from .sharing import Held, lengths_after, shared_pages, with_pages
from .transaction import transact

if TYPE_CHECKING:
    from typing_extensions import Unpack

Sequences = Sequence[PagedSequence]

_HANDLES = {PagedSequence}
_numbers = itertools.count()  # of sequences, of whichever pool: none is given twice


class PagePool:
    """Pool of KV-cache pages for many sequences (PagedAttention); a page holds `page_size` tokens of all layers.

    Args:
        layers: number of layers.
        pages: number of pages.
        page_size: tokens of a page, a multiple of 16.
        kv_heads: heads of keys and values.
        head_dim: elements of a key.
        dtype: float32, float64, float16, bfloat16, int8 or float8_e4m3fn, as for KVCache.
        value_dim: elements of a value. Default head_dim.
        device: where the pages lie: "cpu", or "cuda" ("cuda:0", …) for a GPU, whose tensors calls then take and return.

    >>> import numpy as np, speedlight as sl
    >>> pool = sl.PagePool(layers=1, pages=8, page_size=16, kv_heads=2, head_dim=4)
    >>> a = pool.sequence(); x = np.ones((20, 2, 4), np.float32)
    >>> pool.append(0, [a], x, x); b = a.fork(); pool.free_pages
    6
    >>> pool.attend(0, [a, b], x[:2], x[:2], x[:2]).shape, pool.free_pages
    ((2, 2, 4), 5)
    >>> del b; pool.free_pages  # a sequence that nobody has holds no pages
    6
    """

    @public(leaves_graph=False)
    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: Dtype = "float32",
        value_dim: int | None = None,
        device: Any = "cpu",
    ) -> None:
        engine = by_name(device)
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        self.layers, self.pages, self.page_size, self.kv_heads, self.head_dim, self.value_dim = checked_sizes(sizes)
        if self.page_size % BLOCK:
            way = f"Use {-(-self.page_size // BLOCK) * BLOCK}"
            raise ArgumentError(f"page_size: expected a multiple of {BLOCK}; got {self.page_size}. {way}.")
        self.dtype = cache_dtype(dtype)
        room = self.pages * self.page_size
        shape = TokenShape(self.layers, self.kv_heads, self.head_dim, self.value_dim, self.dtype, room)
        # first: the reservation may fail
        self._storage = engine.pool_storage(shape, self.pages, self.page_size, device)
        self._held: dict[int, Held] = {}  # by the number of the handle
        # When nobody has a handle any more, C puts its number into _gone: in whichever thread, at whatever moment,
        # without a lock, and no signal can come between. Whoever needs pages next releases what it held.
        self._handles: dict[int, weakref.ref[PagedSequence]] = {}
        self._gone: dict[int, Any] = {}
        self._claims: set[Any] = set()  # numbers of sequences being written to
        self._undo: dict[int, dict[int, Any]] = {}  # of changes in progress: by layer what the storage puts back
        self._dropped: list[list[int]] = []  # released, and counted by whoever needs the free list next
        self._taking = threading.RLock()
        self._free = list(range(self.pages - 1, -1, -1))
        self._others = [0] * self.pages  # references to each page beyond the first
        renew_after_fork(self)

    def __repr__(self) -> str:
        names = ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim")
        sizes = ", ".join(f"{n}={getattr(self, n)}" for n in names)
        return f"PagePool({sizes}, dtype={self.dtype!r}, {self.free_pages} pages free)"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the pages that each sequence holds; forks share some."""
        self._release_gone()
        return bars(repr(self), "pages", self.pages, [len(x.pages) for x in self._held.values()])

    __reduce__: Any = not_pickled("PagePool", "its sequences would not come along: fork() them, or make another pool")

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

    # Pages change hands in runs of plain stores and operators: see transact().

    def _release_gone(self) -> None:
        """Releases the pages of sequences whose handles nobody has."""
        gone, handles, held, dropped = self._gone, self._handles, self._held, self._dropped
        for number in list(gone) if gone else ():
            if number in gone:  # no other thread was here meanwhile
                if number in held:  # it was not freed
                    dropped += [held[number].pages[:]]
                    del held[number]
                if number in handles:
                    del handles[number]
                del gone[number]

    def _count_dropped(self) -> None:
        """Drops a reference of each released page; those without any are free."""
        self._release_gone()
        dropped, free, others = self._dropped, self._free, self._others
        while True:
            if not dropped:
                return
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

    def _take(self, wherefore: str, count: int) -> list[int]:
        """Takes so many free pages; raises CacheFull, and takes none, where there are fewer."""
        free, taken = self._free, []
        try:
            with self._taking:
                self._count_dropped()
                left = len(free)  # once: other threads may be giving pages back
                if count > left:
                    raise CacheFull(
                        f"{wherefore}: {count} pages are needed, {left} of {self.pages} are free. "
                        f"{'free() or truncate() sequences, or make' if left < self.pages else 'Make'} a pool of "
                        "more pages.",
                        count,
                        left,
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
        """In the child: claims of the parent's threads are dropped, pages that they had taken are free, and what they
        had begun to move is back.
        """
        if self._storage.survives_fork:
            for undo in self._undo.values():
                self._storage.put_back(undo)
        if self._claims:
            held = Counter(page for x in self._held.values() for page in x.pages)
            self._others[:] = [max(held[page] - 1, 0) for page in range(self.pages)]
            self._free[:] = [page for page in reversed(range(self.pages)) if not held[page]]
            self._dropped[:] = []
        self._claims, self._undo, self._taking = set(), {}, threading.RLock()

    # --- sequences

    def sequence(self) -> PagedSequence:
        """Makes a new sequence, without tokens. Its pages return when it is freed or deleted."""
        self._release_gone()
        return self._add(Held([], self._storage.new_table(), [0] * self.layers))

    def _add(self, content: Held) -> PagedSequence:
        """Makes the handle of a sequence that holds this."""
        number, handles, held = next(_numbers), self._handles, self._held
        new = PagedSequence(self, number)
        handle = weakref.ref(new, partial(self._gone.__setitem__, number))
        handles[number] = handle
        held[number] = content
        return new

    def _of(self, sequence: Any) -> Held:
        if not isinstance(sequence, PagedSequence):
            raise ArgumentTypeError(
                f"sequences: expected sequences of this pool, from pool.sequence(); got {type(sequence).__name__}."
            )
        if sequence.pool is not self:
            raise ArgumentError("sequences: expected sequences of this pool; got one of another pool.")
        held = self._held.get(sequence._number)
        if held is None:
            raise ArgumentError("sequences: this sequence was freed. Make a new one with pool.sequence().")
        return held

    def _several(self, sequences: list[Any], numbers: list[Any]) -> list[Held]:
        """_of() each; at once where all are there: no two pools give the same number."""
        held = self._held
        found: list[Any] = [held.get(n) for n in numbers]
        if None in found or {type(x) for x in sequences} != _HANDLES:
            return [self._of(x) for x in sequences]
        return found

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _fork(self, sequence: PagedSequence) -> PagedSequence:
        """Makes another sequence of the same pages."""
        shared: list[int] = []

        def change() -> PagedSequence:
            old, others, counted = self._of(sequence), self._others, shared
            copied = old._replace(table=self._storage.copied(old.table))
            for page in old.pages:
                others[page] += 1
                counted += [page]
            return self._add(copied)

        return transact(self, {sequence._number}, change, None, shared)

    def _shorten(self, sequence: PagedSequence, length: int | None) -> None:
        """Shortens a sequence to so many tokens; None frees it."""
        number = sequence._number

        def change() -> None:
            held, dropped, old = self._held, self._dropped, self._of(sequence)
            least = min(old.lengths)
            if length is not None and not 0 <= length <= least:
                raise ArgumentError(f"length: expected 0 to {least}, the tokens in every layer; got {shown(length)}.")
            still = -(-(length or 0) // self.page_size)
            left = [old.pages[still:]] if still < len(old.pages) else []
            if length is None:
                del held[number]
            else:
                new = Held(old.pages[:still], old.table, [length] * self.layers)
                held[number] = new
            dropped += left

        transact(self, {number}, change)

    def _shared(self, before: list[Held], starts: list[int], totals: list[int]) -> list[tuple[int, int]]:
        """Returns shared pages that would be written to, once sequences that have gone are counted."""
        copies = shared_pages(before, starts, totals, self.page_size, self._others)
        if copies:  # as far as is known: those who shared pages may have gone
            self._count_dropped()
            copies = shared_pages(before, starts, totals, self.page_size, self._others)
        return copies

    def _with_pages(
        self, wherefore: str, before: list[Held], fresh: list[int], copies: list[tuple[int, int]], taken: list[int]
    ) -> tuple[list[Held], list[int]]:
        """Copies on write, as with_pages() does, to pages that it enters into `taken`."""
        taken += self._take(wherefore, sum(fresh) + len(copies))
        return with_pages(self._storage, before, fresh, copies, taken)

    def _busy(self, numbers: set[Any]) -> CacheBusy:
        """Makes the error for a second writer, which does not wait."""
        return CacheBusy(
            "sequences: another thread is writing to one of them. Write to a sequence from one thread at a time."
        )

    def _tokens(self, sequence: PagedSequence, layer: int, part: str) -> Any:
        held, layer = self._of(sequence), self._layer(layer)
        return self._storage.tokens(layer, part, held.pages, held.lengths[layer])

    def _save(self, sequence: PagedSequence, path: Any) -> None:
        held = self._of(sequence)
        save_sequence(self._storage, list(held.lengths), held.pages, path)

    # --- append and attend

    @public(has_frame=False)
    def append(
        self, layer: int, sequences: Sequences, k: Any, v: Any, *, new_lengths: Any = None, **theirs: NoReturn
    ) -> None:
        """Stores tokens without attending: k (total new, kv_heads, head_dim), v (…, value_dim), one sequence's after
        the other's; new_lengths: how many of them are each sequence's, as for attend().
        """
        refuse_unknown(PagePool.append, theirs)
        if in_graph():
            return outside(PagePool.append, self, layer, sequences, k, v, new_lengths=new_lengths)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        given = (k, v)
        steps = self._storage.prepares_steps and new_lengths is None
        found = self._storage.find_step(len(sequences), given, PLAIN) if steps else None
        if found is not None:
            return self._grow(layer, sequences, Packed(found[0].counts, k, v, step=found))
        k, v = packed_tokens(self._storage, k, v, None)
        counts = packed_counts("new_lengths", new_lengths, len(sequences), k.shape[0])
        if steps:
            self._storage.remember_put(given, k, v, counts, PLAIN)
        self._grow(layer, sequences, Packed(counts, k, v))

    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[False] = False, **options: Unpack[StepCall],
    ) -> T: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[True], **options: Unpack[StepCall],
    ) -> tuple[T, T]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: bool, **options: Unpack[StepCall],
    ) -> T | tuple[T, T]: ...  # fmt: skip
    @public(StepOptions, has_frame=False)
    def attend(
        self,
        layer: int,
        sequences: Sequences,
        q: Any,
        k: Any = None,
        v: Any = None,
        *,
        new_lengths: Ints | None = None,
        q_lengths: Ints | None = None,
        return_lse: bool = False,
        out: AnyArray | None = None,
        **options: Unpack[StepOptions],
    ) -> Any:
        """Appends new tokens to several sequences, then lets their queries attend, each to all tokens of its sequence
        up to its own.

        Args:
            layer: index of the layer.
            sequences: a list of this pool's sequences, each once.
            q: (total new, q_heads, head_dim), the first sequence's new tokens, then the second's, … Or (total queries,
                q_heads, head_dim), as q_lengths says. Of dtypes as for KVCache.attend.
            k: (total new, kv_heads, head_dim). None appends nothing: every query then sees every stored token.
            v: (total new, kv_heads, value_dim).
            new_lengths: rows of k and v that are each sequence's; they add up to all rows. Default: all to a single
                sequence, else one each.
            q_lengths: the same of q. Default new_lengths; must be said where q has other tokens than k. Of each
                sequence the last query is at the last token: more queries than new tokens ask for earlier ones again.
            return_lse, out: as for speedlight.attention.
            **options: as for KVCache.attend; a mask's b, and dropout's batch item, is the index in `sequences`.

        Returns:
            (total new, q_heads, value_dim), of q's kind; with return_lse also (q_heads, total new).

        Raises:
            CacheFull: too few pages are free; nothing has been written.
            CacheBusy: another thread appends to one of the sequences.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the pool and its sequences are as they were.
        """
        if options:
            refuse_unknown(PagePool.attend, options)
        if in_graph():
            more = {"new_lengths": new_lengths, "q_lengths": q_lengths, "return_lse": return_lse, "out": out}
            return outside(PagePool.attend, self, layer, sequences, q, k, v, **more, **options)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        given = Options.of_step(k is not None, "lhd", options)
        arrays = (q,) if k is v is None else (q, k, v)
        usual = new_lengths is q_lengths is out is None and self._storage.prepares_steps
        if usual and type(return_lse) is bool:
            found = self._storage.find_step(len(sequences), arrays, given)
            if found is not None:
                counts, query = found[0].counts, Query(arrays, None, given, return_lse, None)
                packed = Packed(counts, k, v, query, counts, usual, found)
                return self._read(layer, sequences, packed) if k is None else self._grow(layer, sequences, packed)
        query = query_of(self._storage, arrays, given, return_lse, out)
        shape = query.q.shape
        if len(shape) != 3:
            expected = f"shape (total new, q_heads, {self.head_dim})"
            raise ArgumentError(f"q: expected {expected}; got {shape}.{of_packed('q', shape)}")
        asked = packed_queries(k, v, new_lengths, q_lengths, len(sequences), shape[0])
        if k is None:
            return self._read(layer, sequences, Packed([], None, None, query, asked, usual))
        k, v = packed_tokens(self._storage, k, v, shape[0] if q_lengths is None else None)
        counts = asked if q_lengths is None else packed_counts("new_lengths", new_lengths, len(sequences), k.shape[0])
        return self._grow(layer, sequences, Packed(counts, k, v, query, asked, usual))

    def _read(self, layer: int, sequences: list[Any], packed: Packed) -> Any:
        """Computes what queries see of the stored tokens."""
        held = self._several(sequences, [getattr(x, "_number", None) for x in sequences])
        tables, lengths = [x[1] for x in held], [x[2][layer] for x in held]  # by number in half the time
        return run_packed(self._storage, layer, Batch(tables, lengths, lengths, packed.asked), packed)

    def _grow(self, layer: int, sequences: list[Any], packed: Packed) -> Any:
        """Stores new tokens, and computes what queries then see."""
        numbers = [getattr(x, "_number", None) for x in sequences]
        counts, size, mine, taken = packed.counts, self.page_size, set(numbers), []
        if len(mine) != len(numbers) and all([self._of(x) for x in sequences]):
            raise ArgumentError("sequences: expected each sequence once; fork() makes another of the same tokens.")

        def change() -> Any:
            held, dropped, left = self._held, self._dropped, []
            before = self._several(sequences, numbers)
            starts, totals, longer, fits = lengths_after(before, layer, counts, size, self._others)
            if packed.asked is not counts and packed.query is not None:
                check_asked(packed.asked, totals)
            if not fits:
                copies = self._shared(before, starts, totals)
                fresh = [max(-(-n // size) - len(x.pages), 0) for x, n in zip(before, totals, strict=True)]
                if copies or any(fresh):
                    longer, replaced = self._with_pages(f"layer {layer}", longer, fresh, copies, taken)
                    left = [replaced] if replaced else []
            batch = Batch([x[1] for x in longer], starts, totals, counts)
            result = run_packed(self._storage, layer, batch, packed)
            after = dict(zip(numbers, longer, strict=True))
            held |= after
            dropped += left
            return result

        return transact(self, mine, change, None, taken)
