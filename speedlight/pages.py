"""A pool of pages for many sequences: handed out, shared, copied on the first write, returned; batches are packed."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import arrays, engine
from .blocks import make_stores
from .compiling import leaves_graph
from .errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull
from .machine import current_isa
from .planning import BLOCK, DECODE_ROWS, SLACK, Pages
from .problem import SPAN, cache_dtype, check_index, check_sizes, check_tokens, from_cache
from .tracing import kept

_STEPS = 64  # prepared steps kept


class _State:
    """What the pool knows of a sequence: `count` pages. Kernels read `table`, a number for each block of 16 tokens; what is

    past those of `count` pages is nobody's: an append writes there first.
    """

    __slots__ = ("count", "generation", "lengths", "lock", "table")

    def __init__(self, layers: int) -> None:
        self.generation, self.lock = 0, threading.Lock()
        self.reset(layers)

    def reset(self, layers: int) -> None:
        self.table, self.count, self.lengths = np.zeros(SLACK, np.int64), 0, [0] * layers


class Sequence:
    """A sequence of a PagePool: a handle that ends with free()."""

    __slots__ = ("_generation", "_state", "pool")

    def __init__(self, pool: PagePool, state: _State) -> None:
        self.pool, self._state, self._generation = pool, state, state.generation

    def __repr__(self) -> str:
        if self._state.generation != self._generation:
            return "Sequence(freed)"
        return f"Sequence({max(self._state.lengths)} tokens, {self._state.count} pages)"

    def length(self, layer: int = 0) -> int:
        """Tokens of a layer."""
        return self.pool._state(self).lengths[self.pool._layer(layer)]

    @property
    def pages(self) -> tuple[int, ...]:
        """The pages it holds, in order."""
        return tuple(self.pool._pages_of(self.pool._state(self)))

    def fork(self) -> Sequence:
        """Another sequence of the same tokens. Pages are shared until one of the two writes to them."""
        return self.pool._fork(self)

    def truncate(self, length: int) -> None:
        """Forgets the tokens past `length` in every layer; pages that hold no others are returned."""
        self.pool._truncate(self, length)

    def free(self) -> None:
        """Returns its pages. The handle is of no use afterwards."""
        self.pool._free_sequence(self)

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
        self, *, layers: int, pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: Any = "float32",
        value_dim: int | None = None,
        device: Any = "cpu",
    ) -> None:  # fmt: skip
        sizes = {"layers": layers, "pages": pages, "page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        check_sizes(sizes)
        if page_size % BLOCK:
            raise ArgumentError(f"page_size: expected a multiple of {BLOCK}; got {page_size}.")
        self.layers, self.pages, self.page_size, self.kv_heads, self.head_dim, self.value_dim = map(int, sizes.values())
        self.dtype, self._isa = cache_dtype(dtype), current_isa()
        self._blocks = self.page_size // BLOCK
        self._apart = self.kv_heads * self._blocks  # numbers from one page to the next
        self._free = list(range(self.pages - 1, -1, -1))
        self._uses = [0] * self.pages
        self._states: list[_State] = []  # of sequences that were freed
        self._lock = threading.Lock()  # of the accounts
        self._steps: dict[Any, engine.Prepared] = {}
        self._cuda: Any = None
        self._keys: list[Any]
        self._values: list[Any]
        if str(device) != "cpu":
            memory = engine.resident().PoolMemory
            own = {n: getattr(self, n) for n in ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim", "dtype")}
            self._cuda = memory(**own, device=device)
            self._keys, self._values = [0] * self.layers, [1] * self.layers  # which of the two, for tokens()
            return
        shape = (self.pages, self.kv_heads, self.page_size // BLOCK)
        self._keys, self._values = make_stores(self.layers, shape, self.dtype, self.head_dim, self.value_dim, self._isa, together=True)
        self._addresses = [(k.address, v.address) for k, v in zip(self._keys, self._values, strict=True)]
        k, v = self._keys[0], self._values[0]
        # to the kernels a page is a block; blocks are numbered through heads, so that one number times a block's bytes leads there
        head, block = k.memory.strides[1:3]
        self._pages = Pages(True, BLOCK, head, block, k.row, head, block, v.row)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={getattr(self, n)}" for n in ("layers", "pages", "page_size", "kv_heads", "head_dim", "value_dim"))
        return f"PagePool({sizes}, dtype={self.dtype!r}, {self.free_pages} pages free)"

    # --- accounts

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: the keys and values of all layers, and their scales."""
        token = self._cuda.token_bytes if self._cuda else self.kv_heads * (self._keys[0].row + self._values[0].row)
        return self.layers * self.page_size * token

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold; a shared page counts once."""
        return (self.pages - len(self._free)) * self.page_bytes

    # --- sequences

    def sequence(self) -> Sequence:
        """A new sequence, without tokens."""
        with self._lock:
            return Sequence(self, self._states.pop() if self._states else _State(self.layers))

    def _state(self, sequence: Any) -> _State:
        if not isinstance(sequence, Sequence):
            raise ArgumentTypeError(f"sequences: expected sequences of this pool, from pool.sequence(); got {type(sequence).__name__}.")
        if sequence.pool is not self:
            raise ArgumentError("sequences: expected sequences of this pool; got one of another pool.")
        if sequence._state.generation != sequence._generation:
            raise ArgumentError("sequences: this sequence was freed. Make a new one with pool.sequence().")
        return sequence._state

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _fork(self, sequence: Sequence) -> Sequence:
        with self._writing([self._state(sequence)]), self._lock:
            old = self._state(sequence)
            new = self._states.pop() if self._states else _State(self.layers)
            new.table, new.count, new.lengths = old.table.copy(), old.count, list(old.lengths)
            for page in self._pages_of(new):
                self._uses[page] += 1
            return Sequence(self, new)

    def _truncate(self, sequence: Sequence, length: int) -> None:
        state = self._state(sequence)
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise ArgumentTypeError(f"length: expected an int; got {type(length).__name__}.")
        if not 0 <= length <= min(state.lengths):
            raise ArgumentError(f"length: expected 0 to {min(state.lengths)}, the tokens in every layer; got {length}.")
        with self._writing([state]), self._lock:
            state.lengths = [int(length)] * self.layers
            still = -(-int(length) // self.page_size)
            self._return(self._pages_of(state)[still:])
            state.count = still

    def _free_sequence(self, sequence: Sequence) -> None:
        state = self._state(sequence)
        with self._writing([state]), self._lock:
            self._return(self._pages_of(state))
            state.generation += 1
            state.reset(self.layers)
            self._states.append(state)

    def _pages_of(self, state: _State) -> list[int]:
        return (state.table[: state.count * self._blocks : self._blocks] // self._apart).tolist()

    def _set_page(self, table: np.ndarray, at: int, page: int) -> None:
        first = page * self._apart
        table[at * self._blocks : (at + 1) * self._blocks] = range(first, first + self._blocks)

    def _return(self, pages: list[int]) -> None:
        for page in pages:
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)

    def _tokens(self, sequence: Sequence, layer: int, stores: list[Any]) -> np.ndarray:
        state, layer = self._state(sequence), self._layer(layer)
        n = state.lengths[layer]
        used = self._pages_of(state)[: -(-n // self.page_size)]
        if self._cuda:
            return self._cuda.tokens(layer, stores[layer], used, n)
        each = stores[layer].get(np.array(used, np.int64), self.page_size)  # (pages, heads, page_size, dim)
        return each.swapaxes(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].copy()

    # --- append and attend

    @leaves_graph
    def append(self, layer: int, sequences: Any, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (total new, kv_heads, head_dim), v (…, value_dim), one sequence's after the other's."""
        layer, states = self._layer(layer), [self._state(x) for x in sequences]
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        counts = self._counts(new_lengths, len(states), k.shape[0])
        self._check_new(k, v, counts)
        with self._writing(states), self._reserved(layer, states, counts) as tables:
            self._write(layer, states, tables, counts, k, v)

    @leaves_graph
    def attend(
        self, layer: int, sequences: Any, q: Any, k: Any = None, v: Any = None, *, new_lengths: Any = None, scale: float | None = None,
        mask: Any = None, score: Any = None, sink_logits: Any = None, return_lse: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
        """Appends new tokens to several sequences, then lets their queries attend, each to all tokens of its sequence up to its own.

        Args:
            layer: which layer.
            sequences: a list of this pool's sequences, each once.
            q: (total new, q_heads, head_dim), the first sequence's new tokens, then the second's, …
            k: (total new, kv_heads, head_dim). None appends nothing: every query then sees every stored token.
            v: (total new, kv_heads, value_dim).
            new_lengths: new tokens of each sequence. Default one each.
            scale, mask, score, sink_logits, return_lse, out: as for KVCache.attend; a mask's b is the place in `sequences`.

        Returns:
            (total new, q_heads, value_dim), of q's kind; with return_lse also (q_heads, total new).

        Raises:
            CacheFull: too few pages are free; nothing has been written.
            CacheBusy: another thread appends to one of the sequences.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the pool and its sequences are as they were.
        """
        layer, states = self._layer(layer), [self._state(x) for x in sequences]
        if not isinstance(return_lse, bool):
            raise ArgumentTypeError(f"return_lse: expected True or False; got {return_lse!r}.")
        options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits}
        a = self._cuda.described(q, "q") if self._cuda else arrays.describe(q, "q")
        if len(a.shape) != 3:
            raise ArgumentError(f"q: expected shape (total new, q_heads, {self.head_dim}); got {a.shape}.")
        counts = self._counts(new_lengths, len(states), a.shape[0])
        if k is None or v is None:
            if k is not None or v is not None:
                raise ArgumentError(f"{'k' if k is None else 'v'}: expected k and v together, or neither.")
            tables = [s.table for s in states]
            return self._run(layer, a, counts, [s.lengths[layer] for s in states], tables, False, options, return_lse, out)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._check_new(k, v, counts)
        with self._writing(states), self._reserved(layer, states, counts) as tables:
            self._write(layer, states, tables, counts, k, v)
            totals = [s.lengths[layer] + n for s, n in zip(states, counts, strict=True)]
            return self._run(layer, a, counts, totals, tables, True, options, return_lse, out)

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
        given = [1] * sequences if new_lengths is None else new_lengths.tolist() if hasattr(new_lengths, "tolist") else new_lengths
        if new_lengths is None and total != sequences and sequences == 1:
            given = [total]
        if not isinstance(given, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in given):
            raise ArgumentTypeError(f"new_lengths: expected {sequences} ints, one per sequence; got {new_lengths!r}.")
        if len(given) != sequences or any(n < 0 for n in given) or sum(given) != total:
            raise ArgumentError(
                f"new_lengths: expected {sequences} ints, one per sequence, that add up to the {total} tokens; got {list(given)}."
            )
        return [int(n) for n in given]

    def _check_new(self, k: Any, v: Any, counts: list[int]) -> None:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != sum(counts):
                raise ArgumentError(f"{name}: expected {sum(counts)} tokens, as q and new_lengths have; got {x.shape[0]}.")

    @contextlib.contextmanager
    def _writing(self, states: list[_State]) -> Iterator[None]:
        """One writer at a time of a sequence; a second one is told so."""
        if len({id(s) for s in states}) != len(states):
            raise ArgumentError("sequences: expected each sequence once; fork() makes another of the same tokens.")
        with contextlib.ExitStack() as stack:
            for state in states:
                if not state.lock.acquire(blocking=False):
                    raise CacheBusy("sequences: another thread is writing to one of them. Write to a sequence from one thread at a time.")
                stack.callback(state.lock.release)
            yield

    @contextlib.contextmanager
    def _reserved(self, layer: int, states: list[_State], counts: list[int]) -> Iterator[list[np.ndarray]]:
        """Room for new tokens: each sequence's table of pages, in which none that is written to is shared. Kept if all goes well."""
        totals = [s.lengths[layer] + n for s, n in zip(states, counts, strict=True)]
        with self._lock:
            copies = self._to_copy(layer, states, totals)
            wanted = [-(-n // self.page_size) for n in totals]
            fresh = [max(0, w - s.count) for s, w in zip(states, wanted, strict=True)]
            needed = sum(fresh) + len(copies)
            if needed > len(self._free):
                raise CacheFull(
                    f"layer {layer}: {needed} pages are needed, {len(self._free)} of {self.pages} are free. "
                    "free() or truncate() sequences, or make a pool of more pages.",
                    needed,
                    len(self._free),
                )
            taken = [self._free.pop() for _ in range(needed)]
        try:
            left = iter(taken)
            tables, replaced = [], []
            for state, n in zip(states, fresh, strict=True):
                mine = [at for owner, at in copies if owner is state]
                table, used = state.table, state.count * self._blocks
                if mine or used + n * self._blocks + SLACK > len(table):
                    table = np.zeros(max(len(table), 2 * (used + n * self._blocks) + SLACK), np.int64)
                    table[:used] = state.table[:used]
                for at in mine:
                    old, new = int(table[at * self._blocks]) // self._apart, next(left)
                    self._copy_page(new, old)
                    replaced.append(old)
                    self._set_page(table, at, new)
                for at in range(state.count, state.count + n):
                    self._set_page(table, at, next(left))
                tables.append(table)
            yield tables
        except BaseException:
            with self._lock:
                self._free.extend(reversed(taken))
            raise
        with self._lock:
            for page in taken:
                self._uses[page] = 1
            self._return(replaced)
            for state, table, n, total in zip(states, tables, fresh, totals, strict=True):
                state.table, state.count, state.lengths[layer] = table, state.count + n, total

    def _to_copy(self, layer: int, states: list[_State], totals: list[int]) -> list[tuple[_State, int]]:
        """Shared pages that would be written to. The last of those who share one writes to it, if the others end before."""
        left: Counter[int] = Counter()
        away: dict[int, int] = {}  # of a page, the longest that has left it
        found = []
        for state, total in zip(states, totals, strict=True):
            start = state.lengths[layer]
            for at in range(start // self.page_size, min(state.count, -(-total // self.page_size))):
                page = int(state.table[at * self._blocks]) // self._apart
                if self._uses[page] - left[page] > 1 or away.get(page, 0) > start:
                    left[page] += 1
                    away[page] = max(away.get(page, 0), start)
                    found.append((state, at))
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

    def _write(self, layer: int, states: list[_State], tables: list[np.ndarray], counts: list[int], k: Any, v: Any) -> None:
        starts = [s.lengths[layer] for s in states]
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
        self, layer: int, q: arrays.Array, counts: list[int], totals: list[int], tables: list[np.ndarray], causal: bool,
        options: dict[str, Any], return_lse: bool, out: Any,
    ) -> Any:  # fmt: skip
        if self._cuda:
            return self._cuda.run(layer, q, self._page_lists(tables, totals), counts, totals, causal, options, return_lse, out)
        shape = (*q.shape[:-1], self.value_dim)
        result, target = arrays.out_for(q, shape, out, (q,), staged=not (options["mask"] is options["score"] is None))
        number = "float64" if q.dtype == "float64" else "float32"
        lse, where = arrays.empty_like(q, (q.shape[1], q.shape[0]), number) if return_lse else (None, None)
        first = list(itertools.accumulate(counts, initial=0))
        addresses = (q.address, *self._addresses[layer], target.address, where.address if where else 0)
        for which in self._parts(q.shape[1], counts):
            some, starts, lengths = ([x[i] for i in which] for x in (counts, first, totals))
            lists = [tables[i].ctypes.data for i in which]
            step, alike = self._step(q, which, some, starts, lengths, lists, causal, options, target.strides)
            items = step.items_for(lengths, lists) if alike else None
            step.run(*addresses, items=ctypes.addressof(items) if items is not None else 0)
        arrays.deliver(target)
        result = arrays.like_input(q, result) if out is None else out
        return result if lse is None else (result, arrays.like_input(q, lse))

    def _parts(self, q_heads: int, counts: list[int]) -> list[list[int]]:
        """Which sequences go together: those of few queries, which the decode kernel takes, apart from longer chunks."""
        few = DECODE_ROWS * self.kv_heads // max(1, q_heads)
        short, long = ([i for i, n in enumerate(counts) if n and (n <= few) == x] for x in (True, False))
        return [x for x in (short, long) if x]

    def _step(
        self, q: arrays.Array, which: list[int], counts: list[int], first: list[int], totals: list[int], lists: list[int], causal: bool,
        options: dict[str, Any], strides: tuple[int, ...],
    ) -> tuple[engine.Prepared, bool]:  # fmt: skip
        """The prepared call, and whether it is one for any lengths of as many spans (doubled until they suffice)."""
        mask, score, scale = options["mask"], options["score"], options["scale"]
        alike = options["sink_logits"] is None and kept(mask) and kept(score) and type(scale) in (type(None), float) and max(totals) > 0
        key = None
        if alike:
            spans = 1 << (max(totals) - 1 >> 10).bit_length()
            key = (*which, *counts, q.shape, q.strides, q.dtype, strides, causal, mask, score, scale, spans, engine.threads_now())
            prepared = self._steps.get(key)
            if prepared is not None:
                return prepared, True
            totals = [spans * SPAN] * len(totals)
        problem = from_cache(
            q, dtype=self.dtype, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim, k_lengths=tuple(totals),
            causal=causal, layout="lhd", q_lengths=counts, items=tuple(which), **options,
        )  # fmt: skip
        prepared = engine.prepare_pages(problem, "lhd", q, self._pages, lists, strides, tuple(first), engine.threads_now(), self._isa)
        if key is not None:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[key] = prepared
        return prepared, alike
