"""Pool of pages for many sequences: growing, sharing, copy-on-write and release; batches are packed.

The accounts are the same for every device; an engine's storage keeps the tokens.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from ..engines import by_name
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, not_pickled, shown
from ..errors.advice import of_packed
from ..host.forks import renew_after_fork
from ..host.graph_breaks import in_graph, outside
from ..host.notebooks import bars
from ..problem.checks import cache_dtype, check_index, check_latent, check_list, checked_sizes, packed_counts
from ..problem.options import PLAIN, AnyArray, ArrayOf, Dtype, Ints, Options, StepCall, StepOptions, T
from ..problem.signatures import public, refuse_unknown
from ..problem.storage import Overwritten
from ..problem.tokens import BLOCK, Batch, TokenShape
from .journal import PageJournal, SequencePages, loan_of
from .prefixes import PageTokens, no_tokens, token_bytes, token_bytes_of_rows, with_tokens
from .query import Packed, Query, check_asked, packed_queries, packed_tokens, query_of, second_part
from .running import run_packed
from .saving import (
    CACHE,
    SavedSequence,
    check_model,
    checked_path,
    copy_sequence,
    copy_sequences,
    read_sequences,
    write,
    write_sequences,
)
from .sequence import PagedSequence
from .sharing import lengths_after, shared_pages, with_pages
from .transaction import put_back, transact

if TYPE_CHECKING:
    from typing_extensions import Unpack

Sequences = Sequence[PagedSequence]
Tokens = Ints | Sequence[int | None]

_HANDLES = {PagedSequence}


class PagePool:
    """Pool of KV-cache pages for many sequences (PagedAttention); a page holds `page_size` tokens of all layers.

    Args:
        layers: number of layers.
        pages: number of pages.
        page_size: tokens of a page, a multiple of 16.
        kv_heads: heads of keys and values.
        head_dim: elements of a key.
        dtype: float32, float64, float16, bfloat16, int8, float8_e4m3fn or int4, as for KVCache.
        value_dim: elements of a value. Default head_dim.
        device: where the pages lie: "cpu", or "cuda" ("cuda:0", …) for a GPU, whose tensors calls then take and return.
        latent: True where values are the first columns of keys, as for KVCache.

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
        latent: bool = False,
    ) -> None:
        engine = by_name(device)
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        self.layers, self.pages, self.page_size, self.kv_heads, self.head_dim, self.value_dim = checked_sizes(sizes)
        if self.page_size % BLOCK:
            way = f"Use {-(-self.page_size // BLOCK) * BLOCK}"
            raise ArgumentError(f"page_size: expected a multiple of {BLOCK}; got {self.page_size}. {way}.")
        self.dtype = cache_dtype(dtype)
        self.latent = check_latent(latent, self.head_dim, self.value_dim, value_dim, self.dtype)
        room, dims = self.pages * self.page_size, (self.head_dim, self.value_dim)
        shape = TokenShape(self.layers, self.kv_heads, *dims, self.dtype, room, self.latent)
        # first: the reservation may fail
        self._storage = engine.pool_storage(shape, self.pages, self.page_size, device)
        self._journal = PageJournal(self.pages)
        self._claims = self._journal.claims
        self._undo: dict[int, Overwritten] = {}  # of changes in progress: what they overwrite
        renew_after_fork(self)

    def __repr__(self) -> str:
        names = ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim")
        sizes = ", ".join(f"{n}={getattr(self, n)}" for n in names)
        latent = ", latent=True" * self.latent
        return f"PagePool({sizes}{latent}, dtype={self.dtype!r}, {self.free_pages} pages free)"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the pages that each sequence holds; forks share some."""
        self._journal.release_unowned()
        records = list(self._journal.records.values())
        return bars(repr(self), "pages", self.pages, [x.used for x in records if x.handle is not None])

    __reduce__: Any = not_pickled(
        "PagePool", "its sequences would not come along: save() and load() them, or fork() them"
    )

    # --- accounts

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, those that are kept for equal prompts among them."""
        return self._journal.count_free()

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads, and their scales.

        >>> import speedlight as sl
        >>> pool = sl.PagePool(layers=3, pages=8, page_size=16, kv_heads=2, head_dim=64, dtype="int8")
        >>> pool.token_bytes, pool.page_bytes
        (272, 13056)
        """
        return self._storage.token_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of all layers, and their scales."""
        return self.layers * self.page_size * self.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold; a shared page counts once."""
        return (self.pages - self.free_pages) * self.page_bytes

    def statistics(self) -> dict[str, int]:
        """Returns counts of shared prompts.

        lookups: sequences that were made with tokens=; hits: those that found pages; tokens_reused: tokens in these
        pages; pages_kept: free pages that can be found.
        """
        self._journal.release_unowned()
        names = ("lookups", "hits", "tokens_reused")
        return {name: getattr(self._journal, name) for name in names} | {"pages_kept": self._journal.kept}

    def forget(self) -> None:
        """Forgets the pages that pool.sequence(tokens=) finds, as after a change of the model's weights.

        Sequences stay as they are; pages of a sequence from before are not found any more.
        """
        self._journal.forget()

    def after_fork(self) -> None:
        """In the child: the calls of the parent's other threads have ended, and what they overwrote is back."""
        if self._storage.survives_fork:
            for undo in self._undo.values():
                put_back(undo)
        self._undo = {}
        self._journal.after_fork()

    # --- sequences

    @public(has_frame=False)
    def sequence(self, *, tokens: Ints | None = None, extra: Any = None, **theirs: NoReturn) -> PagedSequence:
        """Makes a new sequence. Its pages return when it is freed or deleted.

        Args:
            tokens: the prompt. The sequence starts with the longest prefix in full pages that the pool still has, never
                with the whole prompt: the last token is left to compute. The caller appends what follows length().
            extra: key that both sequences of a shared prefix must have: a tenant, an adapter, an image. A str, bytes,
                an int, or a tuple of these.

        Pages are found once all layers have them in full, with tokens=, which append() and attend() take.

        >>> import numpy as np, speedlight as sl
        >>> pool = sl.PagePool(layers=1, pages=8, page_size=16, kv_heads=2, head_dim=4)
        >>> prompt = list(range(40)); x = np.ones((40, 2, 4), np.float32)
        >>> first = pool.sequence(tokens=prompt); first.length()
        0
        >>> pool.append(0, [first], x, x, tokens=prompt)
        >>> second = pool.sequence(tokens=prompt); second.length(), second.pages == first.pages[:2]
        (32, True)
        >>> pool.append(0, [second], x[32:], x[32:], tokens=prompt[32:])
        >>> pool.sequence(tokens=prompt, extra="another tenant").length()
        0
        >>> pool.statistics()
        {'lookups': 3, 'hits': 1, 'tokens_reused': 32, 'pages_kept': 0}
        """
        refuse_unknown(PagePool.sequence, theirs)
        journal = self._journal
        journal.release_unowned()
        if tokens is None and extra is None:
            records, number = journal.records, journal.next_number()
            new, handle = self._handle(number)
            record = SequencePages([], self._storage.new_table(), [0] * self.layers, 0, handle, None)
            records[number] = record
            return new
        journal.has_tokens = True
        empty, size = no_tokens(extra, self.page_size, journal.generation), self.page_size
        prompt = b"" if tokens is None else token_bytes(tokens, None)
        whole = empty.extended(0, 0, prompt)
        wanted = whole.pages(0, (whole.length - 1) // size)
        mine: set[Any] = set()

        def change() -> PagedSequence:
            number = journal.lend(mine)
            new, handle = self._handle(number)

            def make() -> SequencePages:
                pages, found = journal.find(wanted)
                known = empty._replace(last=found[-1], offered=len(found)) if found else empty
                known = known.expecting(prompt)
                table = self._storage.extended(self._storage.new_table(), pages, 0, [])
                return SequencePages(pages, table, [known.length] * self.layers, len(pages), handle, known)

            unowned = journal.unowned
            used = journal.share(number, make).used
            is_hit, reused, is_lookup = used > 0, used * size, tokens is not None
            journal.lookups += is_lookup
            journal.hits += is_hit
            journal.tokens_reused += reused
            del unowned[number]
            return new

        return transact(self, mine, change)

    def _handle(self, number: int) -> tuple[PagedSequence, weakref.ref[PagedSequence]]:
        """Makes the handle of a record, and a reference to it, which enters its number when nobody has it any more."""
        new = PagedSequence(self, number)
        return new, weakref.ref(new, partial(self._journal.unowned.__setitem__, number))

    def _of(self, sequence: Any, name: str = "sequences") -> SequencePages:
        """Returns the record of a sequence.

        name: the argument's, or the class of the handle whose method is called.
        """
        if not isinstance(sequence, PagedSequence):
            raise ArgumentTypeError(
                f"sequences: expected sequences of this pool, from pool.sequence(); got {type(sequence).__name__}."
            )
        if sequence.pool is not self:
            raise ArgumentError("sequences: expected sequences of this pool; got one of another pool.")
        record = self._journal.records.get(sequence._number)
        if record is None:
            raise ArgumentError(f"{name}: this sequence was freed. Make a new one with pool.sequence().")
        return record

    def _several(self, sequences: list[Any], numbers: list[Any]) -> list[SequencePages]:
        """Returns the record of each; at once where all are there: no two pools give the same number."""
        records = self._journal.records
        found: list[Any] = [records.get(n) for n in numbers]
        if None in found or {type(x) for x in sequences} != _HANDLES:
            return [self._of(x) for x in sequences]
        return found

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _fork(self, sequence: PagedSequence) -> PagedSequence:
        """Makes another sequence of the same pages."""
        mine = {sequence._number}

        def change() -> PagedSequence:
            old, storage, journal = self._of(sequence, "PagedSequence"), self._storage, self._journal
            number, unowned = journal.lend(mine), journal.unowned
            new, handle = self._handle(number)
            pages = old.held()
            table = storage.extended(storage.copied(old.table), pages, old.used, [])
            record = old._replace(pages=pages, table=table, handle=handle)
            journal.share(number, lambda: record)
            del unowned[number]
            return new

        return transact(self, mine, change)

    def _truncate(self, sequence: PagedSequence, length: int) -> None:
        """Shortens a sequence to so many tokens."""
        number, mine = sequence._number, {sequence._number}
        undo: Overwritten = []

        def change() -> None:
            records, old, size = self._journal.records, self._of(sequence, "PagedSequence"), self.page_size
            least = min(old.lengths)
            if not 0 <= length <= least:
                raise ArgumentError(f"length: expected 0 to {least}, the tokens in every layer; got {shown(length)}.")
            self._journal.withdraw(old.pages[length // size : -(-length // size)], undo)
            after = self._shortened(number, old, length, mine)
            records |= after

        transact(self, mine, change, undo)

    def _shortened(self, number: int, old: SequencePages, length: int, mine: set[Any]) -> dict[int, SequencePages]:
        """Returns the record of a sequence of `length` tokens, and a loan of the pages that it no longer has."""
        used = -(-length // self.page_size)
        tokens = None if old.tokens is None else old.tokens.cut(length)
        left = old.pages[used : old.used]
        after = {number: old._replace(lengths=[length] * self.layers, used=used, tokens=tokens)}
        if left:
            after[self._journal.lend(mine)] = loan_of(left)
        return after

    def _free(self, sequence: PagedSequence) -> None:
        """Ends a sequence."""
        number, mine = sequence._number, {sequence._number}

        def change() -> None:
            records, old = self._journal.records, self._of(sequence, "PagedSequence")
            loan = self._journal.lend(mine)
            record = loan_of(old.held())
            records[loan] = record
            del records[number]

        transact(self, mine, change)

    def _shared(self, before: list[SequencePages], starts: list[int], totals: list[int]) -> list[tuple[int, int]]:
        """Returns shared pages that would be written to, once sequences that have gone are counted."""
        copies = shared_pages(before, starts, totals, self.page_size, self._journal.others)
        if copies:  # as far as is known: those who shared pages may have gone
            self._journal.release_unowned()
            copies = shared_pages(before, starts, totals, self.page_size, self._journal.others)
        return copies

    def _with_pages(
        self,
        wherefore: str,
        before: list[SequencePages],
        fresh: list[int],
        copies: list[tuple[int, int]],
        mine: set[Any],
    ) -> tuple[list[SequencePages], dict[int, SequencePages]]:
        """Copies on write, as with_pages() does, to pages of a loan; returns also the loan of those replaced."""
        loan = self._journal.lend(mine)
        taken = self._journal.take(loan, sum(fresh) + len(copies), wherefore)
        longer, replaced = with_pages(self._storage, before, fresh, copies, taken)
        return longer, {loan: loan_of(replaced)}

    def _busy(self, numbers: set[Any]) -> CacheBusy:
        """Makes the error for a second writer, which does not wait."""
        return CacheBusy(
            "sequences: another thread is writing to one of them, or saves it. Write to a sequence from one thread at "
            "a time."
        )

    def _tokens(self, sequence: PagedSequence, layer: int, part: str) -> Any:
        record, layer = self._of(sequence, "PagedSequence"), self._layer(layer)
        return self._storage.tokens(layer, part, record.pages, record.lengths[layer])

    # --- files

    def _save(self, sequence: PagedSequence, path: Any) -> None:
        """Writes one sequence as a cache."""
        where = checked_path(path)
        copy = lambda: copy_sequence(self._storage, self._of(sequence, "PagedSequence"))  # noqa: E731
        content = transact(self, {sequence._number}, copy)
        write(where, CACHE, {"": content}, {})

    def save(self, path: str | Path, sequences: Sequences, *, model: str | None = None) -> None:
        """Writes sequences to a .safetensors file, which load() of a pool of the same sizes reads.

        The file has each sequence's `tokens` and `extra`; it has no tokens of a sequence if some are not known. A page
        that several share is written once. Only the user may read the file, which is written under a temporary name
        first, then renamed. Appends to these sequences from other threads raise CacheBusy while they are copied.

        Args:
            path: a name that ends in .safetensors.
            sequences: a list of this pool's sequences, each once.
            model: key of the model that computed them, such as its name and revision. load() asks for the same.

        Raises:
            FileError: the file cannot be written; one of that name is as it was.
            CacheBusy: another thread appends to one of the sequences.
            speedlight.Error: the argument, what was expected and what came.

        >>> import numpy as np, pathlib, tempfile, speedlight as sl
        >>> sizes = dict(layers=1, pages=8, page_size=16, kv_heads=1, head_dim=8)
        >>> pool, x = sl.PagePool(**sizes), np.ones((20, 1, 8), np.float32)
        >>> prompt = pool.sequence(); pool.append(0, [prompt], x, x, tokens=range(20)); chat = prompt.fork()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "prompts.safetensors")
        ...     pool.save(path, [prompt, chat], model="llama")
        ...     again = sl.PagePool(**sizes)
        ...     sequences = again.load(path, model="llama")
        >>> sequences, again.free_pages
        ([PagedSequence(20 tokens, 2 pages), PagedSequence(20 tokens, 2 pages)], 6)
        >>> sequences[1].tokens == list(range(20)), again.sequence(tokens=range(20)).length()
        (True, 16)
        """
        where, name = checked_path(path), check_model(model)
        chosen = check_list("sequences", sequences, "sequences of this pool")
        records = [self._of(x) for x in chosen]
        numbers = {x._number for x in chosen}
        if not records or len(numbers) != len(records):
            raise ArgumentError("sequences: expected one sequence or more, each once; fork() makes another.")

        def copy() -> Any:
            now = [self._of(x) for x in chosen]
            return copy_sequences(self._storage, self.page_size, now, self._journal.generation)

        write_sequences(where, transact(self, numbers, copy), self.page_size, name)

    def load(self, path: str | Path, *, model: str | None = None) -> list[PagedSequence]:
        """Reads what save() wrote: makes sequences of free pages of this pool, which share pages as those did.

        sequence(tokens=) finds their full pages, unless the pool has the same tokens already, or a sequence shares a
        page whose tokens it has in part. It finds no sequence that was older than forget() when it was saved.

        Raises:
            FileError: the file is missing, damaged, of other sizes, or of another model.
            CacheFull: too few pages are free.

        After any exception the pool is as it was.
        """
        content = read_sequences(checked_path(path), self, check_model(model))
        mine: set[Any] = set()

        def change() -> list[PagedSequence]:
            journal, storage = self._journal, self._storage
            loan = journal.lend(mine)
            taken = journal.take(loan, sum(content.pages.held[0][0]) // self.page_size, "load")
            table = storage.extended(storage.new_table(), taken, 0, [])
            for layer, (keys, values) in enumerate(content.pages.parts if taken else []):
                storage.fill(layer, table, taken, keys, values)
            made = [self._loaded(saved, taken, mine) for saved in content.sequences]
            numbers = [x._number for x in made]
            loaded = [self._of(x) for x in made]
            # besides the loan, these alone list the pages: one in full may be found if all of them have it in full
            full = Counter([page for x in loaded for page in x.pages[: min(x.lengths) // self.page_size]])
            found: dict[int, PageTokens | None] = {}
            offered = [journal.offer(x, full.__getitem__, found) for x in loaded]
            after = dict(zip(numbers, offered, strict=True))
            owned = map(journal.unowned.pop, numbers)
            records, contents = journal.records, journal.contents
            records |= after
            contents |= found
            # from here on their handles own them; the loan gives back its share once the call has ended
            _ = [*owned]
            return made

        return transact(self, mine, change)

    def _loaded(self, saved: SavedSequence, taken: list[int], mine: set[Any]) -> PagedSequence:
        """Makes a sequence of a file, which a call owns. `taken`: pages that have the contents of the file's."""
        journal, storage = self._journal, self._storage
        number = journal.lend(mine)
        new, handle = self._handle(number)
        pages = [taken[n] for n in saved.pages]
        table = storage.extended(storage.new_table(), pages, 0, [])
        tokens = saved.known_tokens(self.page_size, journal.generation)
        if tokens is not None:
            journal.has_tokens = True
        record = SequencePages(pages, table, saved.lengths, len(pages), handle, tokens)
        journal.share(number, lambda: record)
        return new

    # --- append and attend

    @public(has_frame=False)
    def append(
        self, layer: int, sequences: Sequences, k: Any, v: Any = None, *, new_lengths: Any = None, tokens: Any = None,
        **theirs: NoReturn,
    ) -> None:  # fmt: skip
        """Stores tokens without attending.

        Args:
            layer: index of the layer.
            sequences: a list of this pool's sequences, each once.
            k: (total new, kv_heads, head_dim), one sequence's rows after the other's.
            v: (total new, kv_heads, value_dim). Of a pool of latents k and v are as for KVCache.append().
            new_lengths, tokens: as for attend().
        """
        refuse_unknown(PagePool.append, theirs)
        if in_graph():
            return outside(PagePool.append, self, layer, sequences, k, v, new_lengths=new_lengths, tokens=tokens)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        if self.latent:
            v = second_part(self._storage.shape, k, v)
        given = (k, v)
        steps = self._storage.prepares_steps and new_lengths is None
        found = self._storage.find_step(len(sequences), given, PLAIN) if steps else None
        if found is not None:
            return self._grow(layer, sequences, Packed(found[0].counts, k, v, None, (), False, found, tokens))
        k, v = packed_tokens(self._storage, k, v, None)
        counts = packed_counts("new_lengths", new_lengths, len(sequences), k.shape[0])
        if steps:
            self._storage.remember_put(given, k, v, counts, PLAIN)
        self._grow(layer, sequences, Packed(counts, k, v, tokens=tokens))

    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[False] = False, tokens: Tokens | None = None, **options: Unpack[StepCall],
    ) -> T: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[True], tokens: Tokens | None = None, **options: Unpack[StepCall],
    ) -> tuple[T, T]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, sequences: Sequences, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: bool, tokens: Tokens | None = None, **options: Unpack[StepCall],
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
        tokens: Tokens | None = None,
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
            v: (total new, kv_heads, value_dim). Of a pool of latents k and v are as for KVCache.append().
            new_lengths: rows of k and v that are each sequence's; they add up to all rows. Default: all to a single
                sequence, else one each.
            q_lengths: the same of q. Default new_lengths; must be said where q has other tokens than k. Of each
                sequence the last query is at the last token: more queries than new tokens ask for earlier ones again.
            tokens: one int for each row of k, in one list: pool.sequence(tokens=) then finds the pages that they fill.
                They are given from a sequence's first append on; in the first layer, or in each layer the same. Rows
                of a sequence without tokens have None. A tree of guesses has none: PagedSequence.keep(tokens=) gives
                those of the path.
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
            return outside(PagePool.attend, self, layer, sequences, q, k, v, tokens=tokens, **more, **options)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        given = Options.of_step(k is not None, "lhd", options)
        if self.latent and k is not None:
            v = second_part(self._storage.shape, k, v)
        if k is None and tokens is not None:
            raise ArgumentError("tokens: expected None without k and v, whose rows they name. Give k and v, too.")
        arrays = (q,) if k is v is None else (q, k, v)
        usual = new_lengths is q_lengths is out is None and self._storage.prepares_steps
        if usual and type(return_lse) is bool:
            found = self._storage.find_step(len(sequences), arrays, given)
            if found is not None:
                counts, query = found[0].counts, Query(arrays, None, given, return_lse, None)
                packed = Packed(counts, k, v, query, counts, usual, found, tokens)
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
        return self._grow(layer, sequences, Packed(counts, k, v, query, asked, usual, tokens=tokens))

    def _read(self, layer: int, sequences: list[Any], packed: Packed) -> Any:
        """Computes what queries see of the stored tokens."""
        records = self._several(sequences, [getattr(x, "_number", None) for x in sequences])
        tables, lengths = [x[1] for x in records], [x[2][layer] for x in records]  # by number in half the time
        return run_packed(self._storage, layer, Batch(tables, lengths, lengths, packed.asked), packed)

    def _grow(self, layer: int, sequences: list[Any], packed: Packed) -> Any:
        """Stores new tokens, and computes what queries then see."""
        numbers = [getattr(x, "_number", None) for x in sequences]
        counts, size, mine = packed.counts, self.page_size, set(numbers)
        if len(mine) != len(numbers) and all([self._of(x) for x in sequences]):
            raise ArgumentError("sequences: expected each sequence once; fork() makes another of the same tokens.")

        new_tokens = None
        if packed.tokens is not None:
            new_tokens = token_bytes_of_rows(packed.tokens, counts)
            self._journal.has_tokens = True

        def change() -> Any:
            journal = self._journal
            returned: dict[int, SequencePages] = {}
            found: dict[int, PageTokens | None] | None = None
            before = self._several(sequences, numbers)
            starts, totals, longer, fits = lengths_after(before, layer, counts, size, journal.others)
            if packed.asked is not counts and packed.query is not None:
                check_asked(packed.asked, totals)
            if new_tokens is not None:
                empty = no_tokens(None, size, journal.generation)
                longer = with_tokens(longer, starts, new_tokens, empty)
            if not fits:
                copies = self._shared(before, starts, totals)
                fresh = [max(-(-n // size) - x.used, 0) for x, n in zip(before, totals, strict=True)]
                if copies or any(fresh):
                    longer, returned = self._with_pages(f"layer {layer}", longer, fresh, copies, mine)
            if journal.has_tokens:
                found = {}
                replaced = [page for loan in returned.values() for page in loan.pages]
                longer = [journal.offer(x, replaced.count, found) for x in longer]
            batch = Batch([x[1] for x in longer], starts, totals, counts)
            result = run_packed(self._storage, layer, batch, packed)
            after = dict(zip(numbers, longer, strict=True))
            after |= returned
            records, contents = journal.records, journal.contents
            records |= after
            if found:
                contents |= found
            return result

        return transact(self, mine, change)
