"""Key-value caches: append in place, attend to what is stored, never lose anything when a call fails."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import arrays, engine
from ..compiling import in_graph, outside
from ..cpu.layout import BLOCK, ENDLESS, SLACK
from ..cpu.operands import Paged, Pages, Rows
from ..cpu.storage import Store, make_stores
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, FileError, UnsupportedError, shown
from ..expressions.tracing import kept
from ..forks import renew_after_fork
from ..machine import current_isa
from ..problem import (
    SPAN,
    TILE,
    cache_dtype,
    cache_sizes,
    check_index,
    check_list,
    check_tokens,
    device_name,
    from_cache,
    new_counts,
    new_totals,
    shorter_lengths,
)
from ..windows import PIECE, SPARE, ring_of
from . import saved

if TYPE_CHECKING:
    from ..cpu.prepare import Call

_STEPS = 64  # prepared steps kept
_INLINE_BYTES = 1 << 20  # keys and values below this are read sooner than another thread is woken
_SCALES = (type(None), float)
_ALL = slice(None)
_Overwritten = tuple[list[int], np.ndarray, np.ndarray]  # blocks, and what was in them of keys and values


class KVCache:
    """The keys and values of every layer, for a batch of sequences that grow.

    Memory is reserved for `capacity` tokens and used as tokens come. A layer of one item may be attended to by several
    threads; appends to a layer exclude each other.

    Args:
        layers: number of layers; each has lengths of its own.
        batch: sequences.
        kv_heads: heads of keys and values.
        head_dim: elements of a key.
        capacity: most tokens of a sequence. May be left out with a window, whose memory does not grow.
        dtype: float32, float64, float16, bfloat16, or int8: codes with a scale for each token and head, from that row
            alone. An int8 cache takes and returns float32, float16 or bfloat16.
        value_dim: elements of a value. Default head_dim.
        window: a token sees itself and the window - 1 tokens before it, as with sl.window(window - 1, 0); older
            ones are forgotten.
        device: where it lies. On "cuda" (or "cuda:0", …) keys, values and lengths stay on that GPU, calls take its
            tensors and
            only enqueue work, and a step may be captured in a CUDA graph: gpu/storage.py's CudaCache, with the same
                methods.
        keep_first: … but the first tokens of a sequence stay visible to all (attention sinks), as with
            sl.prefix(keep_first).

    >>> import numpy as np, speedlight as sl
    >>> cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=4, capacity=8)
    >>> x = np.ones((1, 2, 3, 4), np.float32)
    >>> cache.attend(0, x, x, x).shape, cache.length(0)
    ((1, 2, 3, 4), 3)
    """

    def __new__(cls, *, device: Any = "cpu", **sizes: Any) -> Any:
        if device_name(device).startswith("cuda"):
            return engine.resident().CudaCache(device=device, **sizes)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        layers: int,
        batch: int = 1,
        kv_heads: int,
        head_dim: int,
        capacity: int | None = None,
        dtype: Any = "float32",
        value_dim: int | None = None,
        window: int | None = None,
        keep_first: int = 0,
        device: Any = "cpu",
    ) -> None:
        if device_name(device) != "cpu":  # __new__ has made something else, unless this is another CPU
            raise ArgumentError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {device!r}.")
        self.layers, self.batch, self.kv_heads, self.head_dim, self.value_dim, self.capacity = cache_sizes(
            layers=layers,
            batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            capacity=capacity,
            window=window,
            keep_first=keep_first,
        )
        self.window, self.keep_first = None if window is None else int(window), int(keep_first)
        self.dtype = cache_dtype(dtype)
        self._isa = current_isa()
        self._rings = ring_of(self.window, self.keep_first, TILE)
        self._fixed, self._ring = (
            self._rings.fixed,
            self._rings.size,
        )  # tokens that stay where they are, and those of the ring
        tokens = self._rings.tokens or self.capacity
        shape = (self.batch, self.kv_heads, -(-tokens // BLOCK))
        self._keys, self._values = make_stores(
            self.layers, shape, self.dtype, self.head_dim, self.value_dim, self._isa, together=False
        )
        self._pages, self._list = self._layout()
        self._addresses = [(k.address, v.address) for k, v in zip(self._keys, self._values, strict=True)]
        # Of each layer the lengths; and past the last token that was ever there, which tells what a ring has forgotten.
        # A call takes effect by one store of such a pair, the lists of which never change.
        self._held = [([0] * self.batch, [0] * self.batch) for _ in range(self.layers)]
        self._claims: set[int] = set()  # layers that somebody writes to
        self._every = set(range(self.layers))
        self._undo: dict[int, _Overwritten] = {}  # of rings that somebody writes to
        self._steps: dict[Any, Call] = {}
        self._known_steps: dict[Any, Call] = {}
        renew_after_fork(self)

    def _layout(self) -> tuple[Pages, np.ndarray]:
        """How kernels find a token, and the list of pages of every sequence."""
        k, v = self._keys[0], self._values[0]
        page = TILE if self._ring else ENDLESS
        ring = {"fixed": self._fixed // TILE, "ring": self._ring // TILE} if self._ring else {}
        pages = Pages(
            True,
            page,
            k.memory.strides[1],
            TILE * k.row,
            k.row,
            v.memory.strides[1],
            TILE * v.row,
            v.row,
            k_item=k.memory.strides[0],
            v_item=v.memory.strides[0],
            **ring,
        )
        return pages, np.arange((self._fixed + self._ring) // TILE + SLACK, dtype=np.int64)

    def __repr__(self) -> str:
        sizes = ["layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity"]
        if self.window is not None:
            sizes[-1:] = ["window", "keep_first"]
        given = ", ".join(f"{n}={getattr(self, n)}" for n in sizes)
        return f"KVCache({given}, dtype={self.dtype!r}, {self.used_bytes:,} bytes used)"

    # --- what it holds

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads, and their scales."""
        return self.kv_heads * (self._keys[0].row + self._values[0].row)

    @property
    def used_bytes(self) -> int:
        """Of the tokens that are held."""
        most = self._fixed + self._ring or self.capacity
        return sum(min(n, most) for lengths, _ in self._held for n in lengths) * self.token_bytes

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence."""
        return tuple(self._held[self._layer(layer)][0])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self._held[self._layer(layer)][0][self._item(item)]

    def keys(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, head_dim); zeros past a sequence's length. Of int8, codes · scales in
        float32.

        With a window: the tokens that the next one would see, in order.
        """
        return self._copied(self._keys[self._layer(layer)], layer)

    def values(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, value_dim); as keys()."""
        return self._copied(self._values[self._layer(layer)], layer)

    def _copied(self, store: Store, layer: int) -> np.ndarray:
        lengths, written = self._held[layer]
        if self.window is None:
            out = store.get(_ALL, max(lengths))
            for item, n in enumerate(lengths):
                out[item, :, n:] = 0
            return out
        whole = store.get(_ALL, max(map(self._rings.held, lengths, written)))
        shown = [self._rings.shown(n) for n in lengths]
        out = np.zeros((*whole.shape[:2], max(map(len, shown)), whole.shape[3]), whole.dtype)
        for item, positions in enumerate(shown):
            out[item, :, : len(positions)] = whole[item, :, [self._rings.place(n) for n in positions]].swapaxes(0, 1)
        return out

    # --- growing and shrinking

    def append(self, layer: int, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (batch, kv_heads, n_new, head_dim), v (…, value_dim)."""
        if in_graph():
            return outside(KVCache.append, self, layer, k, v, new_lengths=new_lengths)
        layer = self._layer(layer)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        self._grow(layer, k, v, self._counts(new_lengths, k.shape[2]), None)

    def attend(
        self,
        layer: int,
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
        """Appends the tokens' keys and values, then lets their queries attend, each to all tokens up to its own.

        Args:
            layer: which layer.
            q: (batch, q_heads, n_new, head_dim), of the cache's dtype: a NumPy array, a PyTorch CPU tensor, …
            k: (batch, kv_heads, n_new, head_dim). None appends nothing: every query then sees every stored token.
            v: (batch, kv_heads, n_new, value_dim).
            new_lengths: tokens of each sequence, where they are fewer than n_new; rows past them are 0.
            scale, mask, score, sink_logits, return_lse, out: as for speedlight.attention; positions count from the
                first token of a sequence. A mask is joined to causality by &.

        Returns:
            (batch, q_heads, n_new, value_dim), of q's kind; with return_lse also (batch, q_heads, n_new).
            The bits are those of one call over the whole sequence, however it was cut into chunks.

        Raises:
            CacheFull: a sequence would pass the capacity.
            CacheBusy: another thread appends to this layer.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the cache is as it was.
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
            return outside(KVCache.attend, self, layer, q, k, v, new_lengths=new_lengths, **options)
        if (
            new_lengths is out is sink_logits is None
            and type(k) is np.ndarray
            and type(layer) is int
            and 0 <= layer < self.layers
        ):
            result = self._known(layer, q, k, v, scale, mask, score, return_lse)
            if result is not None:
                return result
        layer = self._layer(layer)
        if not isinstance(return_lse, bool):
            raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
        options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits}
        if k is None or v is None:
            if k is not None or v is not None or new_lengths is not None:
                name = "k" if k is None else "v" if v is None else "new_lengths"
                raise ArgumentError(f"{name}: expected k and v together, or neither and no new_lengths.")
            lengths, written = self._held[layer]
            rows = arrays.describe(q, "q").shape[2:3]
            for item, (n, w) in enumerate(zip(lengths, written, strict=True) if rows else ()):
                if self._rings.lost(n - rows[0], n, w):
                    raise ArgumentError(
                        f"q: expected fewer queries; of sequence {item} the window has forgotten what {rows[0]} of "
                        "them see."
                    )
            return self._run(layer, q, lengths, None, False, options, return_lse, out)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        counts = self._counts(new_lengths, k.shape[2])
        shape = arrays.describe(q, "q").shape
        if len(shape) == 4 and shape[2] != k.shape[2]:
            raise ArgumentError(f"q: expected {k.shape[2]} tokens, as k has; got {shape[2]} (shape {shape}).")
        return self._grow(layer, k, v, counts, (q, options, return_lse, out, new_lengths is None))

    def _grow(self, layer: int, k: np.ndarray, v: np.ndarray, counts: list[int], query: tuple[Any, ...] | None) -> Any:
        """New tokens, and what a query then sees; all of it or nothing.

        Signals come, and other threads run, where calls begin and end and where loops jump back: not within a run of
        plain stores, operators and returns. Claims are made and released, and everything takes effect, in such runs.
        """
        claims, mine, claimed, undo, result = self._claims, {layer}, False, self._undo, None
        keys, values = self._keys[layer].memory, self._values[layer].memory
        try:
            if claims & mine:
                raise _busy(layer)
            claims |= mine
            claimed = True
            lengths, written = self._held[layer]
            totals = new_totals(layer, lengths, counts, self.capacity)
            after = totals, self._reached(written, totals)
            below = self._overwritten(layer, totals, written)
            if below is not None:
                undo[layer] = below
            if query is None:
                self._write(layer, lengths, k, v, counts)
            elif self._ring and k.shape[2] > PIECE:
                result = self._pieces(layer, k, v, counts, *query[:4])
            else:
                q, options, return_lse, out, even = query
                self._write(layer, lengths, k, v, counts)
                result = self._run(layer, q, totals, None if even else counts, True, options, return_lse, out)
                if even and out is None:
                    self._remember(q, k, v, totals, options)
            self._held[layer] = after  # from here to the return nothing comes between
            return result
        except BaseException:
            if claimed and layer in undo:
                blocks, some_keys, some_values = undo[layer]
                try:
                    keys[:, :, blocks], values[:, :, blocks] = some_keys, some_values
                except BaseException:  # another signal came meanwhile: once more
                    try:
                        keys[:, :, blocks], values[:, :, blocks] = some_keys, some_values
                    except BaseException:
                        keys[:, :, blocks], values[:, :, blocks] = some_keys, some_values
            raise
        finally:
            if claimed:
                if layer in undo:
                    del undo[layer]
                claims -= mine

    def _reached(self, written: list[int], totals: list[int]) -> list[int]:
        return [max(a, b) for a, b in zip(written, totals, strict=True)] if self._ring else totals

    def _overwritten(self, layer: int, totals: list[int], written: list[int]) -> _Overwritten | None:
        """What new tokens of a ring are written over, though somebody may go back to it."""
        if not self._ring:
            return None
        places = {
            n // BLOCK for total, w in zip(totals, written, strict=True) for n in self._rings.overwritten(total, w)
        }
        blocks = sorted(places)
        return (
            (blocks, self._keys[layer].memory[:, :, blocks], self._values[layer].memory[:, :, blocks])
            if blocks
            else None
        )

    def after_fork(self) -> None:
        """In the child: nobody writes, and what another thread of the parent had begun has not been."""
        for layer, (blocks, keys, values) in self._undo.items():
            self._keys[layer].memory[:, :, blocks] = keys
            self._values[layer].memory[:, :, blocks] = values
        self._claims, self._undo = set(), {}

    def _remember(self, q: Any, k: np.ndarray, v: np.ndarray, totals: list[int], options: dict[str, Any]) -> None:
        """A step of this form need not be checked again."""
        if options["sink_logits"] is None and type(q) is np.ndarray and q.size and min(totals):
            step = self._step(q, totals, True, options)
            if step is not None:
                if len(self._known_steps) >= _STEPS:
                    self._known_steps.clear()
                self._known_steps[_form(q, k, v, options["mask"], options["score"], options["scale"], totals)] = step

    def _known(self, layer: int, q: Any, k: Any, v: Any, scale: Any, mask: Any, score: Any, return_lse: Any) -> Any:
        """A step of a form that was checked before, told by shapes, dtypes and options; None for any other."""
        if not (
            type(q) is type(v) is np.ndarray
            and type(return_lse) is bool
            and kept(mask)
            and kept(score)
            and type(scale) in _SCALES
        ):
            return None
        new, held = k.shape[2:3], self._held[layer]
        lengths, written = held
        totals = [n + new[0] for n in lengths] if new else lengths
        step = self._known_steps.get(_form(q, k, v, mask, score, scale, totals))
        if step is None or max(totals) > self.capacity or (self._ring and new[0] > SPARE):
            return None
        claims, mine, claimed = self._claims, {layer}, False
        try:  # as in _grow
            if claims & mine:
                raise _busy(layer)
            claims |= mine
            claimed = True
            if self._held[layer] is not held:
                return None  # somebody appended since
            if self.batch == 1:
                self._put(layer, _ALL, lengths[0], k, v)
            else:
                self._write(layer, lengths, k, v, [new[0]] * self.batch)
            after = totals, self._reached(written, totals)
            result = self._again(step, layer, q, totals, return_lse)
            self._held[layer] = after
            return result
        finally:
            if claimed:
                claims -= mine

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""
        claims, mine, claimed = self._claims, self._every, False
        try:  # as in _grow
            if claims & mine:
                raise _busy(min(claims & mine))
            claims |= mine
            claimed = True
            self._held = self._shorter(length)
        finally:
            if claimed:
                claims -= mine

    def _shorter(self, length: int | Sequence[int]) -> list[tuple[list[int], list[int]]]:
        lost = lambda item, n: any(self._rings.lost(n, n, written[item]) for _, written in self._held)  # noqa: E731
        lengths = shorter_lengths(length, [lengths for lengths, _ in self._held], lost)
        return [
            (lengths, [n and w for n, w in zip(lengths, old, strict=True)] if self._ring else lengths)
            for _, old in self._held
        ]

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        self.truncate(0)

    def copy(self) -> KVCache:
        """An independent cache with the same content."""
        return self.select(range(self.batch))

    def select(self, batch_indices: Sequence[int]) -> KVCache:
        """A new cache of these sequences, in this order and as often: for beams."""
        indices = [self._item(i) for i in check_list("batch_indices", batch_indices, "ints")]
        if not indices:
            raise ArgumentError("batch_indices: expected at least one sequence; got none.")
        new = KVCache(**(self._sizes() | {"batch": len(indices)}), dtype=self.dtype)
        if new._isa != self._isa:
            raise UnsupportedError(
                "select: SPEEDLIGHT_ISA has changed since this cache was made. Set it once, at the start."
            )
        for layer, (lengths, written) in enumerate(self._held):
            for to, item in enumerate(indices):
                blocks = -(-self._rings.held(lengths[item], written[item]) // BLOCK)
                for mine, theirs in ((self._keys, new._keys), (self._values, new._values)):
                    theirs[layer].memory[to, :, :blocks] = mine[layer].memory[item, :, :blocks]
            new._held[layer] = [lengths[i] for i in indices], [written[i] for i in indices]
        return new

    def _sizes(self) -> dict[str, Any]:
        names = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep_first")
        return {n: getattr(self, n) for n in names}

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file: under a temporary name first, then renamed."""
        where, held = saved.checked_path(path), list(self._held)
        parts = []
        for layer, pairs in enumerate(held):
            counts = [self._rings.held(*pair) for pair in zip(*pairs, strict=True)]
            both = [stores[layer].parts(_ALL, max(counts)) for stores in (self._keys, self._values)]
            for x in itertools.chain(*both):
                for item, n in enumerate(counts):
                    x[item, :, n:] = 0
            parts.append(tuple(both))
        sizes = {n: x for n, x in self._sizes().items() if x is not None}
        saved.write(where, saved.Saved(sizes, self.dtype, held, parts))

    @classmethod
    def load(cls, path: str | Path) -> KVCache:
        """Reads what save() wrote. Every size is checked before anything is reserved.

        Raises:
            FileError: the file is missing, damaged, or something else.
        """
        where = saved.checked_path(path)
        found = saved.read(where)
        try:
            cache = cls(**found.sizes, dtype=found.dtype)
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise FileError(f"{where}: a cache of {found.sizes} cannot be reserved ({error}).") from None
        for layer, both in enumerate(found.parts):
            for stores, parts in zip((cache._keys, cache._values), both, strict=True):
                stores[layer].fill(parts)
        cache._held = found.held
        return cache

    # --- inside

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _item(self, item: Any) -> int:
        return check_index("batch index", item, self.batch)

    def _new(self, x: Any, name: str, dim: int) -> np.ndarray:
        if type(x) is not np.ndarray:
            x = arrays.describe(x, name).numpy()
        if x.ndim != 4 or x.shape[0] != self.batch or x.shape[1] != self.kv_heads or x.shape[3] != dim:
            raise ArgumentError(f"{name}: expected shape ({self.batch}, {self.kv_heads}, n_new, {dim}); got {x.shape}.")
        check_tokens(x.dtype.name, name, self.dtype)
        return x

    def _same_count(self, k: np.ndarray, v: np.ndarray) -> None:
        if v.shape[2] != k.shape[2]:
            raise ArgumentError(f"v: expected {k.shape[2]} tokens, as k has; got {v.shape[2]} (shape {v.shape}).")

    def _counts(self, new_lengths: Any, n_new: int) -> list[int]:
        return new_counts(new_lengths, self.batch, n_new)

    def _write(self, layer: int, lengths: list[int], k: np.ndarray, v: np.ndarray, counts: list[int]) -> None:
        """Past the lengths, so that nobody sees it yet."""
        first, n = lengths[0], counts[0]
        if counts.count(n) == len(counts) and lengths.count(first) == len(counts):
            self._put(layer, _ALL, first, k[:, :, :n], v[:, :, :n])
            return
        for item, (at, n) in enumerate(zip(lengths, counts, strict=True)):
            self._put(layer, slice(item, item + 1), at, k[item : item + 1, :, :n], v[item : item + 1, :, :n])

    def _put(self, layer: int, items: slice, at: int, k: np.ndarray, v: np.ndarray) -> None:
        done, n = 0, k.shape[2]
        while done < n:  # a ring comes round
            place = self._rings.place(at + done)
            end = self.capacity if not self._ring else self._fixed if place < self._fixed else self._fixed + self._ring
            count = min(n - done, end - place)
            whole = count == n
            for store, x in ((self._keys[layer], k), (self._values[layer], v)):
                store.put(items, place, x if whole else x[:, :, done : done + count])
            done += count

    def _pieces(
        self,
        layer: int,
        k: np.ndarray,
        v: np.ndarray,
        counts: list[int],
        q: Any,
        options: dict[str, Any],
        return_lse: bool,
        out: Any,
    ) -> Any:
        """A chunk that is longer than a window has room for: each piece sees what is still there."""
        a = arrays.describe(q, "q")
        result, target, lse, where = self._results(a, return_lse, out, options)
        lengths = self._held[layer][0]
        for at in range(0, k.shape[2], PIECE):
            here = slice(at, at + PIECE)
            some = [min(max(n - at, 0), PIECE) for n in counts]
            self._write(layer, lengths, k[:, :, here], v[:, :, here], some)
            lengths = [a + b for a, b in zip(lengths, some, strict=True)]
            given = None if set(some) == {len(range(*here.indices(k.shape[2])))} else some
            rows, piece = (arrays.describe(x.numpy()[:, :, here], x.name) for x in (target, a))
            some_lse = where and arrays.describe(np.empty(piece.shape[:-1], where.numpy().dtype), "lse")
            self._compute(layer, piece, lengths, given, True, options, rows, some_lse)
            if where and some_lse:
                where.numpy()[:, :, here] = some_lse.numpy()
        arrays.deliver(target)
        return self._given(a, result, lse, out)

    def _run(
        self,
        layer: int,
        q: Any,
        totals: list[int],
        counts: list[int] | None,
        causal: bool,
        options: dict[str, Any],
        return_lse: bool,
        out: Any,
    ) -> Any:
        quick = counts is None and out is None and type(q) is np.ndarray and q.ndim == 4 and q.size and min(totals)
        step = self._step(q, totals, causal, options) if quick else None
        if step is not None:
            return self._again(step, layer, q, totals, return_lse)
        a = arrays.describe(q, "q")
        result, target, lse, where = self._results(a, return_lse, out, options)
        self._compute(layer, a, totals, counts, causal, options, target, where)
        arrays.deliver(target)
        return self._given(a, result, lse, out)

    def _results(
        self, q: arrays.Array, return_lse: bool, out: Any, options: dict[str, Any]
    ) -> tuple[Any, arrays.Array, Any, arrays.Array | None]:
        """What a call writes to, and where that lies: out, and the log-sum-exp."""
        shape = (*q.shape[:-1], self.value_dim)
        result, target = arrays.out_for(q, shape, out, (q,), staged=not (options["mask"] is options["score"] is None))
        lse, where = (
            arrays.empty_like(q, shape[:-1], "float64" if q.dtype == "float64" else "float32")
            if return_lse
            else (None, None)
        )
        return result, target, lse, where

    def _given(self, q: arrays.Array, result: Any, lse: Any, out: Any) -> Any:
        result = arrays.like_input(q, result) if out is None else out
        return result if lse is None else (result, arrays.like_input(q, lse))

    def _compute(
        self,
        layer: int,
        q: arrays.Array,
        totals: list[int],
        counts: list[int] | None,
        causal: bool,
        options: dict[str, Any],
        out: arrays.Array,
        lse: arrays.Array | None,
    ) -> None:
        prepared = self._prepare(q, totals, counts, causal, options, out.strides)
        prepared.run(q.address, *self._addresses[layer], out.address, lse.address if lse else 0)

    def _prepare(
        self,
        q: arrays.Array,
        totals: list[int],
        counts: list[int] | None,
        causal: bool,
        options: dict[str, Any],
        strides: tuple[int, ...],
        shortest: int | None = None,
    ) -> Call:
        problem = from_cache(
            q,
            dtype=self.dtype,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            k_lengths=tuple(totals),
            causal=causal,
            q_lengths=counts,
            hiding=self._rings.mask(causal),
            shortest=shortest,
            **options,
        )
        lists = [self._list.ctypes.data] * self.batch
        rows, keys = Rows("bhld", q, strides), Paged(self._pages, lists)
        return engine.of("cpu").prepare(problem, rows, keys, engine.threads_now(), self._isa)

    def _step(self, q: np.ndarray, totals: list[int], causal: bool, options: dict[str, Any]) -> Call | None:
        """The prepared call for queries of this form: for any lengths of as many spans (doubled until they suffice)."""
        mask, score, scale = options["mask"], options["score"], options["scale"]
        if options["sink_logits"] is not None or not (kept(mask) and kept(score) and type(scale) in _SCALES):
            return None
        spans = 1 << (max(totals) - 1 >> 10).bit_length()
        # it depends on these, on what the cache is, and on no length beyond the spans: items_for() puts lengths and
        # rows in
        key = (q.shape, q.strides, q.dtype, causal, mask, score, scale or str(scale), spans, engine.threads_now())
        prepared = self._steps.get(key)
        if prepared is None:
            most = [min(spans * SPAN, self.capacity)] * self.batch
            strides = np.empty((*q.shape[:-1], self.value_dim), q.dtype).strides
            prepared = self._prepare(
                arrays.describe(q, "q"), most, None, causal, options, strides, q.shape[2] if causal else 1
            )
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[key] = prepared
        return prepared

    def _again(self, step: Call, layer: int, q: np.ndarray, totals: list[int], return_lse: bool) -> Any:
        n_new = q.shape[2]
        items = step.items_for(totals)
        out = np.empty((*q.shape[:-1], self.value_dim), q.dtype)
        lse = np.empty(q.shape[:-1], np.float64 if self.dtype == "float64" else np.float32) if return_lse else None
        threads = 1 if sum(totals) * self.token_bytes * max(1, n_new // 8) < _INLINE_BYTES else 0
        step.run(
            arrays.address_of(q),
            *self._addresses[layer],
            arrays.address_of(out),
            0 if lse is None else arrays.address_of(lse),
            items=ctypes.addressof(items),
            threads=threads,
        )
        return out if lse is None else (out, lse)


def _form(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, score: Any, scale: Any, totals: list[int]
) -> tuple[Any, ...]:
    """What two steps share that need the same checks and the same prepared call. -0.0 is another scale than 0.0."""
    spans = max(totals) - 1 >> 10
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.strides,
        mask,
        score,
        scale or str(scale),
        spans,
        engine.threads_now(),
    )


def _busy(layer: int) -> CacheBusy:
    """A second appender is told so instead of waiting."""
    return CacheBusy(f"layer {layer}: another thread is appending to it. Append from one thread at a time.")
