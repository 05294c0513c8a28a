"""Key-value caches: append in place, attend to what is stored, never lose anything when a call fails."""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import arrays, engine
from .blocks import Pairs, Plain, room, scatter
from .errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, FileError, UnsupportedError
from .files import read_arrays, read_metadata, write_arrays
from .machine import current_isa
from .planning import BLOCK, uses_dot
from .problem import SPAN, from_arrays
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
        capacity: most tokens of a sequence.
        dtype: float32, float64, float16 or bfloat16.
        value_dim: elements of a value. Default head_dim.

    >>> import numpy as np, speedlight as sl
    >>> cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=4, capacity=8)
    >>> x = np.ones((1, 2, 3, 4), np.float32)
    >>> cache.attend(0, x, x, x).shape, cache.length(0)
    ((1, 2, 3, 4), 3)
    """

    def __init__(
        self,
        *,
        layers: int,
        batch: int = 1,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: Any = "float32",
        value_dim: int | None = None,
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "capacity": capacity}
        sizes["value_dim"] = head_dim if value_dim is None else value_dim
        for name, x in sizes.items():
            if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
                raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
            if not 1 <= x <= _MOST:
                raise ArgumentError(f"{name}: expected a size from 1 to 2^46; got {x}.")
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
        if name not in arrays.DTYPES:
            raise ArgumentTypeError(f"dtype: expected float32, float64, float16 or bfloat16; got {dtype!r}.")
        self.layers, self.batch, self.kv_heads, self.head_dim, self.capacity, self.value_dim = map(int, sizes.values())
        self.dtype = name
        self._isa = current_isa()
        self._store = Pairs if uses_dot(self._isa, arrays.DTYPES[name][0]) else Plain
        shape = (self.batch, self.kv_heads, -(-self.capacity // BLOCK))
        self._keys = [room((*shape, *self._store.key_block(self.head_dim)), name) for _ in range(self.layers)]
        self._values = [room((*shape, *self._store.value_block(self.value_dim)), name) for _ in range(self.layers)]
        self._key_tokens, self._value_tokens = [self._store.keys(x) for x in self._keys], [self._store.values(x) for x in self._values]
        self._addresses = [(k.ctypes.data, v.ctypes.data) for k, v in zip(self._keys, self._values, strict=True)]
        self._lengths = [[0] * self.batch for _ in range(self.layers)]
        self._locks = [threading.Lock() for _ in range(self.layers)]
        self._steps: dict[Any, engine.Prepared] = {}
        self._known_steps: dict[Any, engine.Prepared] = {}

    def __repr__(self) -> str:
        sizes = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity")
        return f"KVCache({', '.join(f'{n}={getattr(self, n)}' for n in sizes)}, dtype={self.dtype!r}, {self.used_bytes:,} bytes used)"

    # --- what it holds

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads."""
        return self.kv_heads * (self.head_dim + self.value_dim) * arrays.DTYPES[self.dtype][1]

    @property
    def used_bytes(self) -> int:
        return sum(map(sum, self._lengths)) * self.token_bytes

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence."""
        return tuple(self._lengths[self._layer(layer)])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self._lengths[self._layer(layer)][self._item(item)]

    def keys(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, head_dim); zeros past a sequence's length."""
        return self._copied(self._key_tokens[self._layer(layer)], layer, self.head_dim)

    def values(self, layer: int) -> np.ndarray:
        """A copy: (batch, kv_heads, longest, value_dim); zeros past a sequence's length."""
        return self._copied(self._value_tokens[self._layer(layer)], layer, self.value_dim)

    def _copied(self, blocks: np.ndarray, layer: int, dim: int) -> np.ndarray:
        lengths = self._lengths[layer]
        count = -(-max(lengths) // BLOCK)
        elements = math.prod(blocks.shape[3:]) // BLOCK  # of a token, with what pads it
        tokens = blocks[:, :, :count].reshape(self.batch, self.kv_heads, count * BLOCK, elements)
        out = tokens[:, :, : max(lengths), :dim].copy()
        for item, n in enumerate(lengths):
            out[item, :, n:] = 0
        return out

    # --- growing and shrinking

    def append(self, layer: int, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (batch, kv_heads, n_new, head_dim), v (…, value_dim)."""
        layer = self._layer(layer)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        counts = self._counts(new_lengths, k.shape[2])
        with self._writing(layer):
            totals = self._totals(layer, counts)
            self._write(layer, k, v, counts)
            self._lengths[layer] = totals

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
            return self._run(layer, q, self._lengths[layer], None, False, options, return_lse, out)
        k, v = self._new(k, "k", self.head_dim), self._new(v, "v", self.value_dim)
        self._same_count(k, v)
        counts = self._counts(new_lengths, k.shape[2])
        shape = getattr(q, "shape", ())
        if len(shape) == 4 and shape[2] != k.shape[2]:
            raise ArgumentError(f"q: expected {k.shape[2]} tokens, as k has; got {shape[2]} (shape {tuple(shape)}).")
        with self._writing(layer):
            totals = self._totals(layer, counts)
            self._write(layer, k, v, counts)
            result = self._run(layer, q, totals, None if new_lengths is None else counts, True, options, return_lse, out)
            self._lengths[layer] = totals
            if new_lengths is out is None and type(q) is np.ndarray and q.size and min(totals):
                step = self._step(q, totals, True, options)
                if step is not None:
                    if len(self._known_steps) >= _STEPS:
                        self._known_steps.clear()
                    self._known_steps[_form(q, k, v, mask, score, scale, totals)] = step
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
            self._lengths[layer] = totals
        return result

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""
        wanted = [length] * self.batch if isinstance(length, (int, np.integer)) else list(length)
        if len(wanted) != self.batch:
            raise ArgumentError(f"length: expected one int, or {self.batch} (one per sequence); got {len(wanted)}.")
        for item, n in enumerate(wanted):
            if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
                raise ArgumentTypeError(f"length: expected an int; got {type(n).__name__}.")
            least = min(x[item] for x in self._lengths)
            if not 0 <= n <= least:
                raise ArgumentError(f"length: expected 0 to {least}, the tokens of sequence {item} in every layer; got {n}.")
        self._set_lengths([int(n) for n in wanted])

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        self._set_lengths([0] * self.batch)

    def _set_lengths(self, lengths: list[int]) -> None:
        """In every layer, or in none."""
        with contextlib.ExitStack() as stack:
            for layer in range(self.layers):
                stack.enter_context(self._writing(layer))
            self._lengths = [list(lengths) for _ in range(self.layers)]

    def copy(self) -> KVCache:
        """An independent cache with the same content."""
        return self.select(range(self.batch))

    def select(self, batch_indices: Sequence[int]) -> KVCache:
        """A new cache of these sequences, in this order and as often: for beams."""
        indices = [self._item(i) for i in batch_indices]
        if not indices:
            raise ArgumentError("batch_indices: expected at least one sequence; got none.")
        new = KVCache(
            layers=self.layers, batch=len(indices), kv_heads=self.kv_heads, head_dim=self.head_dim, capacity=self.capacity,
            dtype=self.dtype, value_dim=self.value_dim,
        )  # fmt: skip
        if new._isa != self._isa:
            raise UnsupportedError("select: SPEEDLIGHT_ISA has changed since this cache was made. Set it once, at the start.")
        for layer in range(self.layers):
            for to, item in enumerate(indices):
                n = self._lengths[layer][item]
                blocks = -(-n // BLOCK)
                for mine, theirs in ((self._keys, new._keys), (self._values, new._values)):
                    theirs[layer][to, :, :blocks] = mine[layer][item, :, :blocks]
                new._lengths[layer][to] = n
        return new

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file: under a temporary name first, then renamed."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise FileError(f"{path}: expected a name that ends in .safetensors.")
        found = {"lengths": np.array(self._lengths, np.int64)}
        for layer in range(self.layers):
            found |= {f"keys.{layer}": self.keys(layer), f"values.{layer}": self.values(layer)}
        sizes = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "dtype")
        write_arrays(path, found, {"format": _FORMAT, "version": str(_VERSION)} | {n: str(getattr(self, n)) for n in sizes})

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
            sizes = {n: int(words[n]) for n in names}
        except (KeyError, ValueError) as error:
            raise FileError(f"{path}: a size is missing or no number ({error}).") from None
        if words.get("dtype") not in arrays.DTYPES or any(not 1 <= x <= _MOST for x in sizes.values()):
            raise FileError(f"{path}: expected sizes from 1 to 2^46 and a known dtype; got {sizes} and {words.get('dtype')!r}.")
        found = read_arrays([path])
        _check_content(path, sizes, words["dtype"], found)
        try:
            cache = cls(**sizes, dtype=words["dtype"])
        except (OSError, OverflowError, MemoryError, ValueError) as error:
            raise FileError(f"{path}: a capacity of {sizes['capacity']:,} tokens cannot be reserved ({error}).") from None
        for layer, lengths in enumerate(found["lengths"].tolist()):
            cache._put(layer, slice(None), 0, found[f"keys.{layer}"], found[f"values.{layer}"])
            cache._lengths[layer] = lengths
        return cache

    # --- inside

    def _layer(self, layer: Any) -> int:
        return _index("layer", layer, self.layers)

    def _item(self, item: Any) -> int:
        return _index("batch index", item, self.batch)

    def _new(self, x: Any, name: str, dim: int) -> np.ndarray:
        if type(x) is not np.ndarray:
            x = arrays.describe(x, name).numpy()
        if x.ndim != 4 or x.shape[0] != self.batch or x.shape[1] != self.kv_heads or x.shape[3] != dim:
            raise ArgumentError(f"{name}: expected shape ({self.batch}, {self.kv_heads}, n_new, {dim}); got {x.shape}.")
        if x.dtype != self._keys[0].dtype:
            raise ArgumentTypeError(f"{name}: expected dtype {self.dtype}, as the cache has; got {x.dtype}. Convert it first.")
        return x

    def _same_count(self, k: np.ndarray, v: np.ndarray) -> None:
        if v.shape[2] != k.shape[2]:
            raise ArgumentError(f"v: expected {k.shape[2]} tokens, as k has; got {v.shape[2]} (shape {v.shape}).")

    def _counts(self, new_lengths: Any, n_new: int) -> list[int]:
        if new_lengths is None:
            return [n_new] * self.batch
        values = new_lengths.tolist() if hasattr(new_lengths, "tolist") else new_lengths
        if not isinstance(values, (list, tuple)) or any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) for n in values):
            raise ArgumentTypeError(f"new_lengths: expected {self.batch} ints, one per sequence; got {new_lengths!r}.")
        if len(values) != self.batch:
            raise ArgumentError(f"new_lengths: expected {self.batch} ints, one per sequence; got {len(values)}.")
        for item, n in enumerate(values):
            if not 0 <= n <= n_new:
                raise ArgumentError(f"new_lengths: expected 0 to {n_new}, the tokens in k; got {n} for sequence {item}.")
        return [int(n) for n in values]

    def _totals(self, layer: int, counts: list[int]) -> list[int]:
        """Lengths after an append that fits."""
        lengths = self._lengths[layer]
        for item, n in enumerate(counts):
            free = self.capacity - lengths[item]
            if n > free:
                raise CacheFull(
                    f"layer {layer}, sequence {item}: {n} tokens need room, {free} of {self.capacity} are free. "
                    "truncate() it, or make a cache of larger capacity.",
                    n,
                    free,
                )
        return [a + b for a, b in zip(lengths, counts, strict=True)]

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
        for blocks, x in ((self._key_tokens[layer], k), (self._value_tokens[layer], v)):
            if x.shape[2] == 1 and blocks.ndim == 5:  # the usual step
                blocks[items, :, at >> 4, at & 15] = x[:, :, 0]
            else:
                scatter(blocks[items], at, x)

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
        prepared = self._prepare(a, totals, counts, causal, options, out)
        shape = (*a.shape[:-1], self.value_dim)
        if out is None:
            result, target = arrays.empty_like(a, shape, self.dtype)
        else:
            result, target = out, arrays.describe(out, "out")
        lse, where = arrays.empty_like(a, shape[:-1], "float64" if self.dtype == "float64" else "float32") if return_lse else (None, None)
        prepared.run(a.address, *self._addresses[layer], target.address, where.address if where else 0)
        result = arrays.like_input(a, result) if out is None else out
        return (result, arrays.like_input(a, lse)) if return_lse else result

    def _prepare(
        self, q: arrays.Array, totals: list[int], counts: list[int] | None, causal: bool, options: dict[str, Any], out: Any
    ) -> engine.Prepared:
        k = self._described("k", self._keys[0], self.head_dim, q.kind)
        v = self._described("v", self._values[0], self.value_dim, q.kind)
        problem, _, _ = from_arrays(
            q, k, v, causal=causal, q_start=None, k_start=0, layout="bhld", q_lengths=counts, k_lengths=totals, **options
        )  # fmt: skip
        shape = (*q.shape[:-1], self.value_dim)
        if out is None:
            strides = np.empty(shape, self._keys[0].dtype).strides
        else:
            target = arrays.describe(out, "out")
            arrays.check_out(target, shape, self.dtype, (q,))
            strides = target.strides
        return engine.prepare(problem, "bhld", q, k, v, strides, None, None, engine.threads_now(), self._isa, cached=True)

    def _described(self, name: str, x: np.ndarray, dim: int, kind: str) -> arrays.Array:
        """Shape as of plain keys or values; of the strides, those of batch, head and a token (of which only 16 lie together)."""
        token = x.strides[2] // BLOCK
        shape = (self.batch, self.kv_heads, self.capacity, dim)
        return arrays.Array(name, x.ctypes.data, shape, (x.strides[0], x.strides[1], token, x.itemsize), self.dtype, kind, True, x)

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
            prepared = self._prepare(arrays.describe(q, "q"), most, None, causal, options, None)
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            self._steps[key] = prepared
        return prepared

    def _again(self, step: engine.Prepared, layer: int, q: np.ndarray, totals: list[int], return_lse: bool) -> Any:
        n_new = q.shape[2]
        items = step.items_type.from_buffer_copy(step.items_bytes)
        for item, n in enumerate(totals):
            items[item * step.item_words + 3] = n
            items[item * step.item_words + 4] = n - n_new
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


def _index(name: str, x: Any, count: int) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.")
    if not 0 <= x < count:
        raise ArgumentError(f"{name}: expected 0 to {count - 1}; got {x}.")
    return int(x)


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


def _check_content(path: Path, sizes: dict[str, int], dtype: str, found: dict[str, np.ndarray]) -> None:
    """The arrays of a file are those that its sizes announce."""
    lengths = found.get("lengths")
    if lengths is None or lengths.shape != (sizes["layers"], sizes["batch"]) or lengths.dtype != np.int64:
        raise FileError(f"{path}: expected lengths of {sizes['layers']} layers and {sizes['batch']} sequences.")
    if lengths.size and (lengths.min() < 0 or lengths.max() > sizes["capacity"]):
        raise FileError(f"{path}: expected lengths from 0 to the capacity {sizes['capacity']}; got {lengths.min()} to {lengths.max()}.")
    for layer in range(sizes["layers"]):
        for name, dim in (("keys", "head_dim"), ("values", "value_dim")):
            x = found.get(f"{name}.{layer}")
            shape = (sizes["batch"], sizes["kv_heads"], int(lengths[layer].max()), sizes[dim])
            if x is None or x.shape != shape or x.dtype != arrays.numpy_dtype(dtype):
                raise FileError(
                    f"{path}: expected {name}.{layer} of shape {shape} and dtype {dtype}; got {None if x is None else x.shape}."
                )
