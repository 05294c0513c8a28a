"""A pool of pages for many sequences: handed out, shared, copied on the first write, returned; batches are packed."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import arrays, engine
from ..compiling import in_graph, outside
from ..cpu.layout import BLOCK, SLACK
from ..cpu.operands import Paged, Pages, Rows
from ..cpu.schedule import DECODE_ROWS
from ..cpu.storage import make_stores
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, shown
from ..expressions.tracing import kept
from ..forks import renew_after_fork
from ..machine import current_isa
from ..problem import (
    SPAN,
    cache_dtype,
    check_index,
    check_list,
    check_sizes,
    check_tokens,
    device_name,
    each_count,
    from_cache,
)

if TYPE_CHECKING:
    from ..cpu.prepare import Call

_STEPS = 64  # prepared steps kept
_numbers = itertools.count()  # of sequences, of whichever pool: none is given twice


class _Held(NamedTuple):
    """What a sequence holds. Never changed: an append makes another.

    table: a number for each block of 16 tokens, which kernels read; past those of `used` pages it is nobody's.
    lengths: tokens of each layer.
    """

    table: np.ndarray
    used: int
    lengths: list[int]


class Sequence:
    """A sequence of a PagePool: a handle that ends with free()."""

    __slots__ = ("_number", "pool")

    def __init__(self, pool: PagePool, number: int) -> None:
        self.pool, self._number = pool, number

    def __repr__(self) -> str:
        held = self.pool._held.get(self._number)
        return "Sequence(freed)" if held is None else f"Sequence({max(held.lengths)} tokens, {held.used} pages)"

    def length(self, layer: int = 0) -> int:
        """Tokens of a layer."""
        return self.pool._of(self).lengths[self.pool._layer(layer)]

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages it holds, in order."""
        return tuple(self.pool._pages_of(self.pool._of(self)))

    def fork(self) -> Sequence:
        """Another sequence of the same tokens. Pages are shared until one of the two writes to them."""
        return self.pool._fork(self)

    def truncate(self, length: int) -> None:
        """Forgets the tokens past `length` in every layer; pages that hold no others are returned."""
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise ArgumentTypeError(f"length: expected an int; got {type(length).__name__}.")
        self.pool._shorten(self, int(length))

    def free(self) -> None:
        """Returns its pages. The handle is of no use afterwards."""
        self.pool._shorten(self, None)

    def keys(self, layer: int) -> np.ndarray:
        """A copy: (kv_heads, length, head_dim). Of int8, codes · scales in float32."""
        return self.pool._tokens(self, layer, self.pool._keys)

    def values(self, layer: int) -> np.ndarray:
        """A copy: (kv_heads, length, value_dim)."""
        return self.pool._tokens(self, layer, self.pool._values)


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
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        check_sizes(sizes)
        if page_size % BLOCK:
            raise ArgumentError(f"page_size: expected a multiple of {BLOCK}; got {page_size}.")
        self.layers, self.pages, self.page_size, self.kv_heads, self.head_dim, self.value_dim = map(int, sizes.values())
        self.dtype, self._isa = cache_dtype(dtype), current_isa()
        self._blocks = self.page_size // BLOCK
        self._apart = self.kv_heads * self._blocks  # numbers from one page to the next
        self._held: dict[int, _Held] = {}  # by the numbers of their handles
        self._claims: set[Any] = set()  # of sequences that somebody writes to
        self._dropped: list[list[int]] = []  # pages that were let go, to be counted by whom it concerns next
        self._taking = threading.RLock()
        self._steps: dict[Any, Call] = {}
        renew_after_fork(self)
        self._cuda: Any = None
        self._keys: list[Any]
        self._values: list[Any]
        self._free: list[int] = []
        self._others: list[int] = []  # how often a page is held besides once
        self._reserve(device)
        self._free.extend(range(self.pages - 1, -1, -1))
        self._others.extend([0] * self.pages)

    def _reserve(self, device: Any) -> None:
        """The memory: first, since it is what may not be had."""
        if device_name(device) != "cpu":
            memory = engine.resident().PoolMemory
            own = {
                n: getattr(self, n)
                for n in ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim", "dtype")
            }
            self._cuda = memory(**own, device=device)
            self._keys, self._values = [0] * self.layers, [1] * self.layers  # which of the two, for tokens()
            return
        shape = (self.pages, self.kv_heads, self.page_size // BLOCK)
        self._keys, self._values = make_stores(
            self.layers, shape, self.dtype, self.head_dim, self.value_dim, self._isa, together=True
        )
        self._addresses = [(k.address, v.address) for k, v in zip(self._keys, self._values, strict=True)]
        k, v = self._keys[0], self._values[0]
        # to the kernels a page is a block; blocks are numbered through heads, so that one number times a block's bytes
        # leads there
        head, block = k.memory.strides[1:3]
        self._pages = Pages(True, BLOCK, head, block, k.row, head, block, v.row)

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{n}={getattr(self, n)}" for n in ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim")
        )
        return f"PagePool({sizes}, dtype={self.dtype!r}, {self.free_pages} pages free)"

    # --- accounts

    @property
    def free_pages(self) -> int:
        self._count_dropped()
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of all layers, and their scales."""
        token = self._cuda.token_bytes if self._cuda else self.kv_heads * (self._keys[0].row + self._values[0].row)
        return self.layers * self.page_size * token

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold; a shared page counts once."""
        return (self.pages - self.free_pages) * self.page_bytes

    # Signals come, and other threads run, where calls begin and end and where loops jump back: not within a run of
    # plain stores, operators and returns. Claims are made and released, pages change hands, and everything takes
    # effect, in such runs.

    def _count_dropped(self) -> None:
        """Pages that nobody holds any more are free."""
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
        """In the child: nobody writes, and pages that another thread of the parent had taken are free."""
        if self._claims:
            held = Counter(page for x in self._held.values() for page in self._pages_of(x))
            self._others[:] = [max(held[page] - 1, 0) for page in range(self.pages)]
            self._free[:] = [page for page in reversed(range(self.pages)) if not held[page]]
            self._dropped[:] = []
        self._claims, self._taking = set(), threading.RLock()

    # --- sequences

    def sequence(self) -> Sequence:
        """A new sequence, without tokens."""
        new = Sequence(self, next(_numbers))
        empty = _Held(np.zeros(SLACK, np.int64), 0, [0] * self.layers)
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
            copied = old._replace(table=old.table.copy())
            for page in self._pages_of(old):
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
            left = [self._pages_of(old)[still:]] if still < old.used else []
            if length is None:
                del held[sequence._number]
            else:
                new = _Held(old.table, still, [length] * self.layers)
                held[sequence._number] = new
            self._dropped += left
        finally:
            if claimed:
                claims -= mine

    def _pages_of(self, held: _Held) -> list[int]:
        return (held.table[: held.used * self._blocks : self._blocks] // self._apart).tolist()

    def _set_page(self, table: np.ndarray, at: int, page: int) -> None:
        first = page * self._apart
        table[at * self._blocks : (at + 1) * self._blocks] = range(first, first + self._blocks)

    def _tokens(self, sequence: Sequence, layer: int, stores: list[Any]) -> np.ndarray:
        held, layer = self._of(sequence), self._layer(layer)
        n = held.lengths[layer]
        used = self._pages_of(held)[: -(-n // self.page_size)]
        if self._cuda:
            return self._cuda.tokens(layer, stores[layer], used, n)
        each = stores[layer].get(np.array(used, np.int64), self.page_size)  # (pages, heads, page_size, dim)
        return each.swapaxes(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].copy()

    # --- append and attend

    def append(self, layer: int, sequences: Any, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (total new, kv_heads, head_dim), v (…, value_dim), one sequence's after
        the other's.
        """
        if in_graph():
            return outside(PagePool.append, self, layer, sequences, k, v, new_lengths=new_lengths)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        counts = self._counts(new_lengths, len(sequences), k.shape[0])
        self._check_new(k, v, counts)
        self._grow(layer, sequences, counts, k, v, None)

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
    ) -> Any:
        """Appends new tokens to several sequences, then lets their queries attend, each to all tokens of its sequence
        up to its own.

        Args:
            layer: which layer.
            sequences: a list of this pool's sequences, each once.
            q: (total new, q_heads, head_dim), the first sequence's new tokens, then the second's, …
            k: (total new, kv_heads, head_dim). None appends nothing: every query then sees every stored token.
            v: (total new, kv_heads, value_dim).
            new_lengths: new tokens of each sequence. Default: all to a single sequence, else one each.
            scale, mask, score, sink_logits, return_lse, out: as for KVCache.attend; a mask's b is the place in
                `sequences`.

        Returns:
            (total new, q_heads, value_dim), of q's kind; with return_lse also (q_heads, total new).

        Raises:
            CacheFull: too few pages are free; nothing has been written.
            CacheBusy: another thread appends to one of the sequences.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the pool and its sequences are as they were.
        """
        if in_graph():
            options = {
                "scale": scale,
                "mask": mask,
                "score": score,
                "sink_logits": sink_logits,
                "return_lse": return_lse,
                "out": out,
            }
            return outside(PagePool.attend, self, layer, sequences, q, k, v, new_lengths=new_lengths, **options)
        layer, sequences = self._layer(layer), check_list("sequences", sequences, "sequences of this pool")
        if not isinstance(return_lse, bool):
            raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
        options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits}
        a = self._cuda.described(q, "q") if self._cuda else arrays.describe(q, "q")
        if len(a.shape) != 3:
            raise ArgumentError(f"q: expected shape (total new, q_heads, {self.head_dim}); got {a.shape}.")
        counts = self._counts(new_lengths, len(sequences), a.shape[0])
        if k is None or v is None:
            if k is not None or v is not None:
                raise ArgumentError(f"{'k' if k is None else 'v'}: expected k and v together, or neither.")
            held = [self._of(x) for x in sequences]
            return self._run(
                layer,
                a,
                counts,
                [x.lengths[layer] for x in held],
                [x.table for x in held],
                False,
                options,
                return_lse,
                out,
            )
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._check_new(k, v, counts)
        return self._grow(layer, sequences, counts, k, v, (a, options, return_lse, out))

    def _grow(
        self, layer: int, sequences: list[Any], counts: list[int], k: Any, v: Any, query: tuple[Any, ...] | None
    ) -> Any:
        """New tokens, and what a query then sees; all of it or nothing."""
        numbers = [getattr(x, "_number", None) for x in sequences]
        claims, mine, claimed, taken, result = self._claims, set(numbers), False, [], None
        if len(mine) != len(numbers) and all(self._of(x) for x in sequences):
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
            fresh = [max(0, -(-n // self.page_size) - x.used) for x, n in zip(before, totals, strict=True)]
            needed = sum(fresh) + len(copies)
            if needed:
                taken = self._take(layer, needed)
            tables, replaced = self._tables(before, fresh, copies, taken)
            self._write(layer, starts, tables, counts, k, v)
            if query is not None:
                q, options, return_lse, out = query
                result = self._run(layer, q, counts, totals, tables, True, options, return_lse, out)
            after = {}
            for number, old, table, n, total in zip(numbers, before, tables, fresh, totals, strict=True):
                lengths = old.lengths[:]
                lengths[layer] = total
                after[number] = _Held(table, old.used + n, lengths)
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

    def _new(self, x: Any, name: str, dim: int) -> Any:
        if self._cuda:
            x = self._cuda.described(x, name)
        elif type(x) is not np.ndarray:
            x = arrays.describe(x, name).numpy()
        if len(x.shape) != 3 or x.shape[1:] != (self.kv_heads, dim):
            raise ArgumentError(f"{name}: expected shape (total new, {self.kv_heads}, {dim}); got {x.shape}.")
        check_tokens(str(x.dtype), name, self.dtype)
        return x

    def _counts(self, new_lengths: Any, sequences: int, total: int) -> list[int]:
        alone = [total] if sequences == 1 else [1] * sequences
        given = alone if new_lengths is None else each_count(new_lengths, sequences)
        if any(n < 0 for n in given) or sum(given) != total:
            raise ArgumentError(
                f"new_lengths: expected {sequences} ints, one per sequence, that add up to the {total} tokens; got "
                f"{shown(given)}."
            )
        return given

    def _check_new(self, k: Any, v: Any, counts: list[int]) -> None:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != sum(counts):
                raise ArgumentError(
                    f"{name}: expected {sum(counts)} tokens, as q and new_lengths have; got {x.shape[0]}."
                )

    def _tables(
        self, before: list[_Held], fresh: list[int], copies: list[tuple[int, int]], taken: list[int]
    ) -> tuple[list[np.ndarray], list[int]]:
        """Each sequence's table with so many fresh pages, in which none that is written to is shared; and the pages
        that gave way.
        """
        left, tables, replaced = iter(taken), [], []
        for which, (held, n) in enumerate(zip(before, fresh, strict=True)):
            mine = [at for owner, at in copies if owner == which] if copies else []
            table, end = held.table, held.used * self._blocks
            if mine or end + n * self._blocks + SLACK > len(table):
                table = np.zeros(max(len(table), 2 * (end + n * self._blocks) + SLACK), np.int64)
                table[:end] = held.table[:end]
            for at in mine:
                old, new = int(table[at * self._blocks]) // self._apart, next(left)
                self._copy_page(new, old)
                replaced.append(old)
                self._set_page(table, at, new)
            for at in range(held.used, held.used + n):
                self._set_page(table, at, next(left))
            tables.append(table)
        return tables, replaced

    def _to_copy(self, before: list[_Held], starts: list[int], totals: list[int]) -> list[tuple[int, int]]:
        """Shared pages that would be written to.

        The last of those who share one writes to it, if the others end before.
        """
        left: Counter[int] = Counter()
        away: dict[int, int] = {}  # of a page, the longest that has left it
        found = []
        for which, (held, start, total) in enumerate(zip(before, starts, totals, strict=True)):
            for at in range(start // self.page_size, min(held.used, -(-total // self.page_size))):
                page = int(held.table[at * self._blocks]) // self._apart
                if self._others[page] > left[page] or away.get(page, 0) > start:
                    left[page] += 1
                    away[page] = max(away.get(page, 0), start)
                    found.append((which, at))
        return found

    def _copy_page(self, new: int, old: int) -> None:
        if self._cuda:
            self._cuda.copy_page(new, old)
            return
        for store in (*self._keys, *self._values):
            store.memory[new] = store.memory[old]

    def _page_lists(self, tables: list[np.ndarray], totals: list[int]) -> list[list[int]]:
        """The pages that hold so many tokens, of each sequence."""
        return [
            (t[: -(-n // self.page_size) * self._blocks : self._blocks] // self._apart).tolist()
            for t, n in zip(tables, totals, strict=True)
        ]

    def _write(
        self, layer: int, starts: list[int], tables: list[np.ndarray], counts: list[int], k: Any, v: Any
    ) -> None:
        if self._cuda:
            totals = [a + b for a, b in zip(starts, counts, strict=True)]
            self._cuda.write(layer, self._page_lists(tables, totals), starts, counts, k, v)
            return
        if max(counts, default=0) <= 1:
            used = [(t[s >> 4], s) for t, s, n in zip(tables, starts, counts, strict=True) if n]
            numbers, positions = np.array(used, np.int64).reshape(-1, 2).T
        else:
            each = [np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
            positions = np.concatenate(each)
            numbers = np.concatenate([t[x >> 4] for t, x in zip(tables, each, strict=True)])
        if len(positions):
            places = numbers // self._apart, numbers % self._apart, positions & 15
            self._keys[layer].put_each(*places, k)
            self._values[layer].put_each(*places, v)

    def _run(
        self,
        layer: int,
        q: arrays.Array,
        counts: list[int],
        totals: list[int],
        tables: list[np.ndarray],
        causal: bool,
        options: dict[str, Any],
        return_lse: bool,
        out: Any,
    ) -> Any:
        if self._cuda:
            return self._cuda.run(
                layer, q, self._page_lists(tables, totals), counts, totals, causal, options, return_lse, out
            )
        shape = (*q.shape[:-1], self.value_dim)
        result, target = arrays.out_for(q, shape, out, (q,), staged=not (options["mask"] is options["score"] is None))
        number = "float64" if q.dtype == "float64" else "float32"
        lse, where = arrays.empty_like(q, (q.shape[1], q.shape[0]), number) if return_lse else (None, None)
        first = list(itertools.accumulate(counts, initial=0))
        addresses = (q.address, *self._addresses[layer], target.address, where.address if where else 0)
        for which in self._parts(q.shape[1], counts):
            some, starts, lengths = ([x[i] for i in which] for x in (counts, first, totals))
            lists = [arrays.address_of(tables[i]) for i in which]
            step, alike = self._step(q, which, some, starts, lengths, lists, causal, options, target.strides)
            items = step.items_for(lengths, lists) if alike else None
            step.run(*addresses, items=ctypes.addressof(items) if items is not None else 0)
        arrays.deliver(target)
        result = arrays.like_input(q, result) if out is None else out
        return result if lse is None else (result, arrays.like_input(q, lse))

    def _parts(self, q_heads: int, counts: list[int]) -> list[list[int]]:
        """Which sequences go together: those of few queries, which the decode kernel takes, apart from longer
        chunks.
        """
        few = DECODE_ROWS * self.kv_heads // max(1, q_heads)
        short, long = ([i for i, n in enumerate(counts) if n and (n <= few) == x] for x in (True, False))
        return [x for x in (short, long) if x]

    def _step(
        self,
        q: arrays.Array,
        which: list[int],
        counts: list[int],
        first: list[int],
        totals: list[int],
        lists: list[int],
        causal: bool,
        options: dict[str, Any],
        strides: tuple[int, ...],
    ) -> tuple[Call, bool]:
        """The prepared call, and whether it is one for any lengths of as many spans (doubled until they suffice)."""
        mask, score, scale = options["mask"], options["score"], options["scale"]
        alike = (
            options["sink_logits"] is None
            and kept(mask)
            and kept(score)
            and type(scale) in (type(None), float)
            and max(totals) > 0
        )
        key = shortest = None
        if alike:
            shortest = max(counts) if causal else 1
            spans = 1 << (max(totals) - 1 >> 10).bit_length()
            # it depends on these, on what the pool is, and on no length or page: items_for() puts them in
            places = tuple(which), tuple(counts), tuple(first)
            key = (
                places,
                q.shape,
                q.strides,
                q.dtype,
                strides,
                causal,
                mask,
                score,
                scale or str(scale),
                spans,
                engine.threads_now(),
            )
            prepared = self._steps.get(key)
            if prepared is not None:
                return prepared, True
            totals = [spans * SPAN] * len(totals)
        problem = from_cache(
            q,
            dtype=self.dtype,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            k_lengths=tuple(totals),
            causal=causal,
            layout="lhd",
            q_lengths=counts,
            items=tuple(which),
            shortest=shortest,
            **options,
        )
        rows, keys = Rows("lhd", q, strides, tuple(first)), Paged(self._pages, lists)
        prepared = engine.of("cpu").prepare(problem, rows, keys, engine.threads_now(), self._isa)
        if key is not None:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[key] = prepared
        return prepared, alike


def _busy() -> CacheBusy:
    """A second writer is told so instead of waiting."""
    return CacheBusy(
        "sequences: another thread is writing to one of them. Write to a sequence from one thread at a time."
    )
