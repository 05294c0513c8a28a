"""Key-value caches: append in place, attend to what is stored, never lose anything when a call fails."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import arrays, engine
from .blocks import Store, make_stores
from .compiling import leaves_graph
from .errors import ArgumentError, ArgumentTypeError, CacheBusy, FileError, UnsupportedError
from .files import read_arrays, read_metadata, write_arrays
from .machine import current_isa
from .planning import BLOCK, ENDLESS, SLACK, Pages
from .problem import SPAN, TILE, cache_dtype, cache_sizes, check_index, check_tokens, from_cache, new_counts, new_totals, shorter_lengths
from .rings import PIECE, ring_of
from .tracing import kept

_FORMAT, _VERSION = "speedlight key-value cache", 1
_STEPS = 64  # prepared steps kept
_INLINE_BYTES = 1 << 20  # keys and values below this are read sooner than another thread is woken
_MOST = 1 << 46
_SCALES = (type(None), float)
_ALL = slice(None)


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
        device: where it lies. On "cuda" (or "cuda:0", …) keys, values and lengths stay on that GPU, calls take its tensors and
            only enqueue work, and a step may be captured in a CUDA graph: gpu/resident.py's CudaCache, with the same methods.
        keep_first: … but the first tokens of a sequence stay visible to all (attention sinks), as with sl.prefix(keep_first).

    >>> import numpy as np, speedlight as sl
    >>> cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=4, capacity=8)
    >>> x = np.ones((1, 2, 3, 4), np.float32)
    >>> cache.attend(0, x, x, x).shape, cache.length(0)
    ((1, 2, 3, 4), 3)
    """

    def __new__(cls, *, device: Any = "cpu", **sizes: Any) -> Any:
        if str(device).startswith("cuda"):
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
        if str(device) != "cpu":  # __new__ has made something else, unless this is another CPU
            raise ArgumentError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {device!r}.")
        self.layers, self.batch, self.kv_heads, self.head_dim, self.value_dim, self.capacity = cache_sizes(
            layers=layers, batch=batch, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, capacity=capacity, window=window,
            keep_first=keep_first,
        )  # fmt: skip
        self.window, self.keep_first = None if window is None else int(window), int(keep_first)
        self.dtype = cache_dtype(dtype)
        self._isa = current_isa()
        self._rings = ring_of(self.window, self.keep_first, TILE)
        self._fixed, self._ring = self._rings.fixed, self._rings.size  # tokens that stay where they are, and those of the ring
        tokens = self._rings.tokens or self.capacity
        shape = (self.batch, self.kv_heads, -(-tokens // BLOCK))
        self._keys, self._values = make_stores(self.layers, shape, self.dtype, self.head_dim, self.value_dim, self._isa, together=False)
        self._pages, self._list = self._layout()
        self._addresses = [(k.address, v.address) for k, v in zip(self._keys, self._values, strict=True)]
        self._lengths = [[0] * self.batch for _ in range(self.layers)]
        self._written = [[0] * self.batch for _ in range(self.layers)]  # past the last token that was ever there: what a ring has forgotten
        self._locks = [threading.Lock() for _ in range(self.layers)]
        self._steps: dict[Any, engine.Prepared] = {}
        self._known_steps: dict[Any, engine.Prepared] = {}

    def _layout(self) -> tuple[Pages, np.ndarray]:
        """How kernels find a token, and the list of pages of every sequence."""
        k, v = self._keys[0], self._values[0]
        page = TILE if self._ring else ENDLESS
        ring = {"fixed": self._fixed // TILE, "ring": self._ring // TILE} if self._ring else {}
        pages = Pages(
            True, page, k.memory.strides[1], TILE * k.row, k.row, v.memory.strides[1], TILE * v.row, v.row,
            k_item=k.memory.strides[0], v_item=v.memory.strides[0], **ring,
        )  # fmt: skip
        return pages, np.arange((self._fixed + self._ring) // TILE + SLACK, dtype=np.int64)

    def __repr__(self) -> str:
        sizes = ["layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity"]
        if self.window is not None:
            sizes[-1:] = ["window", "keep_first"]
        return f"KVCache({', '.join(f'{n}={getattr(self, n)}' for n in sizes)}, dtype={self.dtype!r}, {self.used_bytes:,} bytes used)"

    # --- what it holds

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads, and their scales."""
        return self.kv_heads * (self._keys[0].row + self._values[0].row)

    @property
    def used_bytes(self) -> int:
        """Of the tokens that are held."""
        most = self._fixed + self._ring or self.capacity
        return sum(min(n, most) for lengths in self._lengths for n in lengths) * self.token_bytes

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence."""
        return tuple(self._lengths[self._layer(layer)])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self._lengths[self._layer(layer)][self._item(item)]

    def keys(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, head_dim); zeros past a sequence's length. Of int8, codes · scales in float32.

        With a window: the tokens that the next one would see, in order.
        """
        return self._copied(self._keys[self._layer(layer)], layer)

    def values(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, value_dim); as keys()."""
        return self._copied(self._values[self._layer(layer)], layer)

    def _copied(self, store: Store, layer: int) -> np.ndarray:
        lengths = self._lengths[layer]
        if self.window is None:
            out = store.get(_ALL, max(lengths))
            for item, n in enumerate(lengths):
                out[item, :, n:] = 0
            return out
        whole = store.get(_ALL, self._fixed + self._ring)
        shown = [self._rings.shown(n) for n in lengths]
        out = np.zeros((*whole.shape[:2], max(map(len, shown)), whole.shape[3]), whole.dtype)
        for item, positions in enumerate(shown):
            out[item, :, : len(positions)] = whole[item, :, [self._rings.place(n) for n in positions]].swapaxes(0, 1)
        return out

    # --- growing and shrinking

    @leaves_graph
    def append(self, layer: int, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (batch, kv_heads, n_new, head_dim), v (…, value_dim)."""
        layer = self._layer(layer)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        counts = self._counts(new_lengths, k.shape[2])
        with self._writing(layer), self._restored(layer, counts):
            for at, some in self._piecewise(counts, k.shape[2]):
                totals = self._totals(layer, some)
                self._write(layer, k[:, :, at:], v[:, :, at:], some)
                self._set_layer(layer, totals)

    @leaves_graph
    def attend(
        self, layer: int, q: Any, k: Any = None, v: Any = None, *, new_lengths: Any = None, scale: float | None = None, mask: Any = None,
        score: Any = None, sink_logits: Any = None, return_lse: bool = False, out: Any = None,
    ) -> Any:  # fmt: skip
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
        if new_lengths is out is sink_logits is None and type(k) is np.ndarray and type(layer) is int and 0 <= layer < self.layers:
            result = self._known(layer, q, k, v, scale, mask, score, return_lse)
            if result is not None:
                return result
        layer = self._layer(layer)
        if not isinstance(return_lse, bool):
            raise ArgumentTypeError(f"return_lse: expected True or False; got {return_lse!r}.")
        options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits}
        if k is None or v is None:
            if k is not None or v is not None or new_lengths is not None:
                name = "k" if k is None else "v" if v is None else "new_lengths"
                raise ArgumentError(f"{name}: expected k and v together, or neither and no new_lengths.")
            rows = getattr(q, "shape", (0, 0, 0))[2:3]
            for item, n in enumerate(self._lengths[layer] if self._ring and rows else ()):
                if self._lost(layer, item, n - rows[0] + 1):
                    raise ArgumentError(
                        f"q: expected fewer queries; of sequence {item} the window has forgotten what {rows[0]} of them see."
                    )
            return self._run(layer, q, self._lengths[layer], None, False, options, return_lse, out)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        counts = self._counts(new_lengths, k.shape[2])
        shape = getattr(q, "shape", ())
        if len(shape) == 4 and shape[2] != k.shape[2]:
            raise ArgumentError(f"q: expected {k.shape[2]} tokens, as k has; got {shape[2]} (shape {tuple(shape)}).")
        with self._writing(layer), self._restored(layer, counts):
            totals = self._totals(layer, counts)
            if self._ring and k.shape[2] > PIECE:
                return self._pieces(layer, q, k, v, counts, options, return_lse, out)
            self._write(layer, k, v, counts)
            result = self._run(layer, q, totals, None if new_lengths is None else counts, True, options, return_lse, out)
            if new_lengths is out is None and type(q) is np.ndarray and q.size and min(totals):
                step = self._step(q, totals, True, options)
                if step is not None:
                    if len(self._known_steps) >= _STEPS:
                        self._known_steps.clear()
                    self._known_steps[_form(q, k, v, mask, score, scale, totals)] = step
            self._set_layer(layer, totals)
        return result

    def _known(self, layer: int, q: Any, k: Any, v: Any, scale: Any, mask: Any, score: Any, return_lse: Any) -> Any:
        """A step of a form that was checked before, told by shapes, dtypes and options; None for any other."""
        if not (type(q) is type(v) is np.ndarray and type(return_lse) is bool and kept(mask) and kept(score) and type(scale) in _SCALES):
            return None
        new, lengths = k.shape[2:3], self._lengths[layer]
        totals = [n + new[0] for n in lengths] if new else lengths
        step = self._known_steps.get(_form(q, k, v, mask, score, scale, totals))
        if step is None or max(totals) > self.capacity:
            return None
        with self._writing(layer):
            if self._lengths[layer] is not lengths:
                return None  # somebody appended since
            if self.batch == 1:
                self._put(layer, _ALL, lengths[0], k, v)
            else:
                self._write(layer, k, v, [new[0]] * self.batch)
            result = self._again(step, layer, q, totals, return_lse)
            self._set_layer(layer, totals)
        return result

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""
        lost = lambda item, n: any(self._lost(layer, item, n) for layer in range(self.layers))  # noqa: E731
        self._set_lengths(shorter_lengths(length, self._lengths, lost))

    def _lost(self, layer: int, item: int, position: int) -> bool:
        """Whether a ring has written over what a token at `position` sees."""
        return self._rings.lost(position, self._written[layer][item])

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        self._set_lengths([0] * self.batch)

    def _set_lengths(self, lengths: list[int]) -> None:
        """In every layer, or in none."""
        with contextlib.ExitStack() as stack:
            for layer in range(self.layers):
                stack.enter_context(self._writing(layer))
            self._lengths = [list(lengths) for _ in range(self.layers)]
            self._written = [[n and w for n, w in zip(lengths, old, strict=True)] for old in self._written]

    def _set_layer(self, layer: int, totals: list[int]) -> None:
        self._lengths[layer] = totals
        if self._ring:
            self._written[layer] = [max(a, b) for a, b in zip(self._written[layer], totals, strict=True)]

    def copy(self) -> KVCache:
        """An independent cache with the same content."""
        return self.select(range(self.batch))

    def select(self, batch_indices: Sequence[int]) -> KVCache:
        """A new cache of these sequences, in this order and as often: for beams."""
        indices = [self._item(i) for i in batch_indices]
        if not indices:
            raise ArgumentError("batch_indices: expected at least one sequence; got none.")
        new = KVCache(**(self._sizes() | {"batch": len(indices)}), dtype=self.dtype)
        if new._isa != self._isa:
            raise UnsupportedError("select: SPEEDLIGHT_ISA has changed since this cache was made. Set it once, at the start.")
        for layer in range(self.layers):
            for to, item in enumerate(indices):
                n = self._lengths[layer][item]
                blocks = -(-self._held(layer, item) // BLOCK)
                for mine, theirs in ((self._keys, new._keys), (self._values, new._values)):
                    theirs[layer].memory[to, :, :blocks] = mine[layer].memory[item, :, :blocks]
                new._lengths[layer][to], new._written[layer][to] = n, self._written[layer][item]
        return new

    def _sizes(self) -> dict[str, Any]:
        names = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep_first")
        return {n: getattr(self, n) for n in names}

    def _held(self, layer: int, item: int) -> int:
        """Tokens of a sequence in memory, from its start, whether or not they are still seen."""
        n = self._lengths[layer][item]
        return min(max(n, self._written[layer][item]), self._fixed + self._ring) if self._ring else n

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file: under a temporary name first, then renamed."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise FileError(f"{path}: expected a name that ends in .safetensors.")
        found = {"lengths": np.array(self._lengths, np.int64), "written": np.array(self._written, np.int64)}
        for layer in range(self.layers):
            held = [self._held(layer, item) for item in range(self.batch)]
            for name, stores in (("key", self._keys), ("value", self._values)):
                for part, x in zip(("", "_scale"), stores[layer].parts(_ALL, max(held)), strict=False):
                    for item, n in enumerate(held):
                        x[item, :, n:] = 0
                    found[f"{name}{part}s.{layer}"] = x
        words = {n: str(x) for n, x in self._sizes().items() if x is not None}
        write_arrays(path, found, {"format": _FORMAT, "version": str(_VERSION), "dtype": self.dtype} | words)

    @classmethod
    def load(cls, path: str | Path) -> KVCache:
        """Reads what save() wrote. Every size is checked before anything is reserved.

        Raises:
            FileError: the file is missing, damaged, or something else.
        """
        path = Path(path)
        if path.suffix != ".safetensors":
            raise FileError(f"{path}: expected a name that ends in .safetensors.")
        words = read_metadata(path)
        if words.get("format") != _FORMAT:
            raise FileError(f"{path}: expected a file that KVCache.save() wrote; got format {words.get('format')!r}.")
        if words.get("version") != str(_VERSION):
            raise FileError(f"{path}: expected version {_VERSION}; got {words.get('version')!r}. Save it anew with this release.")
        names = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity")
        try:
            sizes = {n: int(words[n]) for n in names} | {n: int(words[n]) for n in ("window", "keep_first") if n in words}
        except (KeyError, ValueError) as error:
            raise FileError(f"{path}: a size is missing or no number ({error}).") from None
        wrong = any(not (0 if n == "keep_first" else 1) <= x <= _MOST for n, x in sizes.items())
        if wrong or words.get("dtype") not in (*arrays.DTYPES, "int8") or (sizes.get("keep_first") and "window" not in sizes):
            raise FileError(f"{path}: expected sizes from 1 to 2^46 and a known dtype; got {sizes} and {words.get('dtype')!r}.")
        found = read_arrays([path])
        try:
            cache = cls(**sizes, dtype=words["dtype"])
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise FileError(f"{path}: a cache of {sizes} cannot be reserved ({error}).") from None
        cache._fill(path, found)
        return cache

    def _fill(self, path: Path, found: dict[str, np.ndarray]) -> None:
        """Takes the arrays of a file, if they are those that its sizes announce."""
        shape = (self.layers, self.batch)
        for name in ("lengths", "written"):
            x = found.get(name)
            if x is None or x.shape != shape or x.dtype != np.int64:
                raise FileError(f"{path}: expected {name} of {self.layers} layers and {self.batch} sequences.")
            if x.size and (x.min() < 0 or x.max() > self.capacity):
                raise FileError(f"{path}: expected {name} from 0 to the capacity {self.capacity}; got {x.min()} to {x.max()}.")
        self._lengths, self._written = found["lengths"].tolist(), found["written"].tolist()
        for layer in range(self.layers):
            held = max(self._held(layer, item) for item in range(self.batch))
            for name, store in (("key", self._keys[layer]), ("value", self._values[layer])):
                parts = []
                for part, plane in zip(("", "_scale"), store.planes, strict=False):
                    x = found.get(f"{name}{part}s.{layer}")
                    wanted = (self.batch, self.kv_heads, held, 1 if part else store.dim)
                    if x is None or x.shape != wanted or x.dtype != plane.dtype:
                        got = "none" if x is None else f"{x.shape} of {x.dtype}"
                        raise FileError(f"{path}: expected {name}{part}s.{layer} of shape {wanted} and dtype {plane.dtype}; got {got}.")
                    parts.append(x)
                if len(parts) > 1:
                    if (parts[1] < 0).any() or np.isinf(parts[1]).any():
                        raise FileError(f"{path}: expected {name}_scales.{layer} of finite numbers that are not negative.")
                    parts[1] = np.where(np.isnan(parts[1]), np.float32(np.nan), parts[1])  # of one sign: the kernels read it
                store.fill(parts)

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

    def _totals(self, layer: int, counts: list[int]) -> list[int]:
        return new_totals(layer, self._lengths[layer], counts, self.capacity)

    def _write(self, layer: int, k: np.ndarray, v: np.ndarray, counts: list[int]) -> None:
        """Past the lengths, so that nobody sees it yet."""
        lengths = self._lengths[layer]
        first, n = lengths[0], counts[0]
        if counts.count(n) == len(counts) and lengths.count(first) == len(counts):
            self._put(layer, slice(None), first, k[:, :, :n], v[:, :, :n])
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

    def _piecewise(self, counts: list[int], n_new: int) -> Iterator[tuple[int, list[int]]]:
        """Where each piece of an append starts, and its tokens of every sequence."""
        step = PIECE if self._ring else max(n_new, 1)
        for at in range(0, max(n_new, 1), step):
            yield at, [min(max(n - at, 0), step) for n in counts]

    def _pieces(
        self, layer: int, q: Any, k: np.ndarray, v: np.ndarray, counts: list[int], options: dict[str, Any], return_lse: bool, out: Any
    ) -> Any:  # fmt: skip
        """A chunk that is longer than a window has room for: each piece sees what is still there."""
        a = arrays.describe(q, "q")
        result, target, lse, where = self._results(a, return_lse, out, options)
        for at, some in self._piecewise(counts, k.shape[2]):
            totals = self._totals(layer, some)
            self._write(layer, k[:, :, at:], v[:, :, at:], some)
            here = slice(at, at + PIECE)
            given = None if set(some) == {len(range(*here.indices(k.shape[2])))} else some
            rows, piece = (arrays.describe(x.numpy()[:, :, here], x.name) for x in (target, a))
            some_lse = where and arrays.describe(np.empty(piece.shape[:-1], where.numpy().dtype), "lse")
            self._compute(layer, piece, totals, given, True, options, rows, some_lse)
            if where and some_lse:
                where.numpy()[:, :, here] = some_lse.numpy()
            self._set_layer(layer, totals)
        arrays.deliver(target)
        return self._given(a, result, lse, out)

    @contextlib.contextmanager
    def _restored(self, layer: int, counts: list[int]) -> Iterator[None]:
        """After an exception, what several pieces have written over is there again."""
        if not self._ring or max(counts) <= PIECE:
            yield
            return
        kept_memory = [store.memory.copy() for store in (self._keys[layer], self._values[layer])]
        lengths, written = self._lengths[layer], self._written[layer]
        try:
            yield
        except BaseException:
            for store, memory in zip((self._keys[layer], self._values[layer]), kept_memory, strict=True):
                store.memory[...] = memory
            self._lengths[layer], self._written[layer] = lengths, written
            raise

    def _writing(self, layer: int) -> _Writing:
        return _Writing(self._locks[layer], layer)

    def _run(
        self, layer: int, q: Any, totals: list[int], counts: list[int] | None, causal: bool, options: dict[str, Any],
        return_lse: bool, out: Any,
    ) -> Any:  # fmt: skip
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
        lse, where = arrays.empty_like(q, shape[:-1], "float64" if q.dtype == "float64" else "float32") if return_lse else (None, None)
        return result, target, lse, where

    def _given(self, q: arrays.Array, result: Any, lse: Any, out: Any) -> Any:
        result = arrays.like_input(q, result) if out is None else out
        return result if lse is None else (result, arrays.like_input(q, lse))

    def _compute(
        self, layer: int, q: arrays.Array, totals: list[int], counts: list[int] | None, causal: bool, options: dict[str, Any],
        out: arrays.Array, lse: arrays.Array | None,
    ) -> None:  # fmt: skip
        prepared = self._prepare(q, totals, counts, causal, options, out.strides)
        prepared.run(q.address, *self._addresses[layer], out.address, lse.address if lse else 0)

    def _prepare(
        self, q: arrays.Array, totals: list[int], counts: list[int] | None, causal: bool, options: dict[str, Any], strides: tuple[int, ...]
    ) -> engine.Prepared:
        problem = from_cache(
            q, dtype=self.dtype, kv_heads=self.kv_heads, head_dim=self.head_dim, value_dim=self.value_dim, k_lengths=tuple(totals),
            causal=causal, q_lengths=counts, hiding=self._rings.mask(causal), **options,
        )  # fmt: skip
        lists = [self._list.ctypes.data] * self.batch
        return engine.prepare_pages(problem, "bhld", q, self._pages, lists, strides, None, engine.threads_now(), self._isa)

    def _step(self, q: np.ndarray, totals: list[int], causal: bool, options: dict[str, Any]) -> engine.Prepared | None:
        """The prepared call for queries of this form: for any lengths of as many spans (doubled until they suffice)."""
        mask, score, scale = options["mask"], options["score"], options["scale"]
        if options["sink_logits"] is not None or not (kept(mask) and kept(score) and type(scale) in _SCALES):
            return None
        spans = 1 << (max(totals) - 1 >> 10).bit_length()
        key = (q.shape, q.strides, q.dtype, causal, mask, score, scale, spans, engine.threads_now())
        prepared = self._steps.get(key)
        if prepared is None:
            most = [min(spans * SPAN, self.capacity)] * self.batch
            strides = np.empty((*q.shape[:-1], self.value_dim), q.dtype).strides
            prepared = self._prepare(arrays.describe(q, "q"), most, None, causal, options, strides)
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[key] = prepared
        return prepared

    def _again(self, step: engine.Prepared, layer: int, q: np.ndarray, totals: list[int], return_lse: bool) -> Any:
        n_new = q.shape[2]
        items = step.items_for(totals)
        out = np.empty((*q.shape[:-1], self.value_dim), q.dtype)
        lse = np.empty(q.shape[:-1], np.float64 if self.dtype == "float64" else np.float32) if return_lse else None
        threads = 1 if sum(totals) * self.token_bytes * max(1, n_new // 8) < _INLINE_BYTES else 0
        step.run(
            arrays.address_of(q), *self._addresses[layer], arrays.address_of(out), 0 if lse is None else arrays.address_of(lse),
            items=ctypes.addressof(items), threads=threads,
        )  # fmt: skip
        return out if lse is None else (out, lse)


def _form(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: Any, score: Any, scale: Any, totals: list[int]) -> tuple[Any, ...]:
    """What two steps share that need the same checks and the same prepared call."""
    spans = max(totals) - 1 >> 10
    return q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.strides, mask, score, scale, spans, engine.threads_now()


class _Writing:
    """One appender at a time; a second one is told so instead of waiting."""

    __slots__ = ("layer", "lock")

    def __init__(self, lock: threading.Lock, layer: int) -> None:
        self.lock, self.layer = lock, layer

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise CacheBusy(f"layer {self.layer}: another thread is appending to it. Append from one thread at a time.")

    def __exit__(self, *_: object) -> None:
        self.lock.release()
