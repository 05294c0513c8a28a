"""Key-value caches: appending, attending, and rollback when a call fails.

Lengths, claims, rollback and files are here, for every device; an engine's storage keeps the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from ..engines import by_name
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, not_pickled
from ..host.forks import renew_after_fork
from ..host.graph_breaks import in_graph, outside
from ..host.lazy import lacking
from ..host.notebooks import bars
from ..problem.checks import (
    cache_dtype,
    cache_sizes,
    check_index,
    check_latent,
    check_list,
    each_count,
    integer,
    new_totals,
    window_size,
)
from ..problem.options import PLAIN, STEPS, AnyArray, ArrayOf, Dtype, DtypeName, Ints, Options, StepCall, StepOptions, T
from ..problem.signatures import public, refuse_unknown
from ..problem.storage import Overwritten
from ..problem.tokens import TokenShape, pieces_of
from ..problem.windows import PIECE, ring_of
from . import saving as saved
from .keeping import Left, Lengths, kept, shorten, truncated
from .query import MAKE_LATENT, Query, check_queries, padded_tokens, piece_of, query_of, second_part
from .running import attend_pieces, repeat
from .transaction import put_back, transact

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVCache:
    """KV cache: the keys and values of every layer, for a batch of sequences that grow.

    Memory is reserved for `capacity` tokens and used as tokens come. A layer of one item may be attended to by several
    threads; appends to a layer exclude each other.

    Args:
        layers: number of layers; each has lengths of its own.
        batch: sequences.
        kv_heads: heads of keys and values.
        head_dim: elements of a key.
        capacity: most tokens of a sequence. Left out with a window, whose memory does not grow, it is 2^46.
        dtype: float32, float64, float16, bfloat16, or codes with scales for each token and head, from that row alone:
            int8 or float8_e4m3fn ("fp8") with a scale for the row, or int4 ("q4_0", as ggml has it) with one for each
            32 elements. A cache of codes takes and returns float32, float16 or bfloat16.
        value_dim: elements of a value. Default head_dim.
        window: a token sees itself and the window - 1 tokens before it, as with sl.window(window - 1, 0); older
            tokens are dropped.
        keep_first: number of first tokens that stay visible beside the window (attention sinks), as with
            sl.prefix(keep_first).
        device: where it lies. On "cuda" (or "cuda:0", …) keys, values and lengths stay on that GPU; calls take its
            tensors and only enqueue work. A step may be captured in a CUDA graph: then only the device knows the
            lengths, and synchronize() brings the host's up to date.
        latent: True where values are the first value_dim columns of keys (multi-head latent attention, MLA), which are
            stored once. append() and attend() then take a latent as k and its rotary part as v, or a key with both as k
            alone. Codes are of values, with a scale for each 128 of them, and the rest of a key is bfloat16.

    >>> import numpy as np, speedlight as sl
    >>> cache = sl.KVCache(layers=1, batch=1, kv_heads=2, head_dim=4, capacity=8)
    >>> x = np.ones((1, 2, 3, 4), np.float32)
    >>> cache.attend(0, x, x, x).shape, cache.length(0)
    ((1, 2, 3, 4), 3)
    >>> mla = sl.KVCache(layers=1, kv_heads=1, head_dim=5, value_dim=3, capacity=8, latent=True)
    >>> q, latent, rotary = (np.ones((1, *shape), np.float32) for shape in ((8, 2, 5), (1, 2, 3), (1, 2, 2)))
    >>> mla.attend(0, q, latent, rotary).shape, mla.keys(0).shape, mla.token_bytes
    ((1, 8, 2, 3), (1, 1, 2, 5), 20)
    """

    @public(leaves_graph=False)
    def __init__(
        self,
        *,
        layers: int,
        batch: int = 1,
        kv_heads: int,
        head_dim: int,
        capacity: int | None = None,
        dtype: Dtype = "float32",
        value_dim: int | None = None,
        window: int | None = None,
        keep_first: int = 0,
        device: Any = "cpu",
        latent: bool = False,
    ) -> None:
        engine = by_name(device)
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}
        sizes |= {"capacity": capacity, "window": window, "keep_first": keep_first}
        self.layers, self.batch, self.kv_heads, self.head_dim, self.value_dim, self.capacity = cache_sizes(**sizes)
        self.window, self.keep_first = window_size(window), integer("keep_first", keep_first)
        self.dtype: DtypeName = cache_dtype(dtype)
        self._ring = ring_of(self.window, self.keep_first)
        room = None if window else self.capacity
        self.latent = check_latent(latent, self.head_dim, self.value_dim, value_dim, self.dtype)
        dims = self.head_dim, self.value_dim
        shape = TokenShape(self.layers, self.kv_heads, *dims, self.dtype, room, self.latent)
        self._storage = engine.cache_storage(shape, self.batch, self.capacity, self._ring, device)
        # Of each layer the tokens of every sequence, and one past the highest position that was ever written. A call
        # takes effect by one store of such a pair, whose lists never change.
        self._held: list[Lengths] = [([0] * self.batch, [0] * self.batch) for _ in range(self.layers)]
        self._claims: set[int] = set()  # layers being written to
        self._undo: dict[int, Overwritten] = {}  # of changes in progress: what they overwrite
        renew_after_fork(self)

    def __repr__(self) -> str:
        without = ("window", "keep_first") if self.window is None else ("capacity",)
        without += () if self.latent else ("latent",)
        given = ", ".join(f"{n}={x}" for n, x in self._sizes().items() if n not in without)
        # used_bytes would wait for the device
        last = f"device='{self.device}'" if self._storage.lengths.may_wait else f"{self.used_bytes:,} bytes used"
        return f"KVCache({given}, dtype={self.dtype!r}, {last})"

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the tokens of each sequence, in its fullest layer."""
        totals = list(map(max, zip(*[lengths for lengths, _ in self._now()], strict=True)))
        return bars(repr(self), "tokens", self._ring.tokens or self.capacity, totals)

    if not TYPE_CHECKING:  # for which no name would be wrong
        __getattr__ = lacking("KVCache")

    # --- contents

    @property
    def device(self) -> Any:
        """Device of its memory: "cpu", or a torch.device."""
        return self._storage.device

    @property
    def storage(self) -> Any:
        """Storage of the tokens, as the device's engine makes it."""
        return self._storage

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads, and their scales."""
        return self._storage.token_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the tokens that are held, without those that lie in a prefix."""
        most, shared = self._ring.tokens or self.capacity, self._storage.shared
        return sum(min(n, most) - shared for lengths, _ in self._now() for n in lengths) * self.token_bytes

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence. Waits for the device if a CUDA graph has seen this cache."""
        return tuple(self._now()[self._layer(layer)][0])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self._now()[self._layer(layer)][0][check_index("item", item, self.batch)]

    def keys(self, layer: int) -> Any:
        """Copy of a layer's keys, (batch, kv_heads, longest, head_dim), with zeros past a sequence's length. Of codes,
        codes · scales in float32.

        With a window: the tokens that the next one would see, in order. A NumPy array, or a tensor of the device.
        """
        return self._copied(layer, "keys")

    def values(self, layer: int) -> Any:
        """Copy of a layer's values, (batch, kv_heads, longest, value_dim), as keys()."""
        return self._copied(layer, "values")

    def _copied(self, layer: int, part: str) -> Any:
        lengths, written = self._now()[layer := self._layer(layer)]
        stored = self._storage.tokens(layer, part, max(map(self._ring.held, lengths, written)))
        return self._ring.in_order(stored, lengths)

    def synchronize(self) -> None:
        """Waits for the device and takes over its lengths, which replayed CUDA graphs advance without the host.

        Raises:
            CacheFull: a replayed step did not fit. It stored nothing, and its output means nothing.
        """
        on_device = self._storage.lengths
        found = on_device.read()
        if found is None:
            return
        pairs = zip(found, self._held, strict=True)
        self._held = [(lengths, list(map(max, written, lengths))) for lengths, (_, written) in pairs]
        if on_device.has_overflowed():
            free = self.capacity - max(max(lengths) for lengths, _ in self._held)
            raise CacheFull(
                f"a step of a CUDA graph found no room: {free} of {self.capacity} tokens are free. truncate() it.",
                free + 1,
                free,
            )

    def _now(self) -> list[Lengths]:
        """Returns the lengths; waits for the device if a replayed CUDA graph may have advanced them."""
        if self._storage.lengths.is_ahead():
            self.synchronize()
        return self._held

    def after_fork(self) -> None:
        """In the child: claims of the parent's threads are dropped, and their unfinished writes rolled back."""
        if self._storage.survives_fork:
            for undo in self._undo.values():
                put_back(undo)
        self._claims, self._undo = set(), {}

    # --- growing

    @public(has_frame=False)
    def append(self, layer: int, k: Any, v: Any = None, *, new_lengths: Any = None, **theirs: NoReturn) -> None:
        """Stores tokens without attending: k (batch, kv_heads, n_new, head_dim), v (…, value_dim); new_lengths: how
        many of them are each sequence's, where some have fewer than n_new.

        A cache of latents takes them as k (…, value_dim) and their rotary parts as v (…, head_dim - value_dim), or both
        in one as k (…, head_dim).
        """
        refuse_unknown(KVCache.append, theirs)
        if in_graph():
            return outside(KVCache.append, self, layer, k, v, new_lengths=new_lengths)
        layer = self._layer(layer)
        if self.latent:
            v = second_part(self._storage.shape, k, v)
        given = (k, v)
        if new_lengths is None and repeat(self, layer, given, PLAIN, False) is not None:
            return
        k, v, counts = padded_tokens(self._storage, self.batch, k, v, new_lengths, None)
        if new_lengths is None and self._storage.prepares_steps:
            self._storage.remember_put(given, k, v, counts, PLAIN)
        self._grow(layer, k, v, counts, None)

    @overload
    def attend(
        self, layer: int, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[False] = False, **options: Unpack[StepCall],
    ) -> T: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: Literal[True], **options: Unpack[StepCall],
    ) -> tuple[T, T]: ...  # fmt: skip
    @overload
    def attend(
        self, layer: int, q: ArrayOf[T], k: AnyArray | None = None, v: AnyArray | None = None, *,
        return_lse: bool, **options: Unpack[StepCall],
    ) -> T | tuple[T, T]: ...  # fmt: skip
    @public(StepOptions, has_frame=False)
    def attend(
        self,
        layer: int,
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
        """Appends the tokens' keys and values, then lets their queries attend, each to all tokens up to its own.

        Args:
            layer: index of the layer.
            q: (batch, q_heads, n_new, head_dim), of the cache's dtype, or as attention() takes it over that: a NumPy
                array, a PyTorch tensor, …, where the cache lies.
            k: (batch, kv_heads, n_new, head_dim). None appends nothing: every query then sees every stored token.
            v: (batch, kv_heads, n_new, value_dim). Of a cache of latents k and v are as for append().
            new_lengths: new tokens of each sequence, where some have fewer than n_new: of k and v those past them are
                not stored, of q they are no queries: their rows get out 0 and lse -inf.
            q_lengths: queries of each sequence, where they are not those of its new tokens, or fewer than q has; q may
                then have other tokens than k. The last one is at the last token: more queries than new tokens ask for
                earlier ones again, fewer ask for the last ones only. Rows past them get out 0 and lse -inf.
            return_lse, out: as for speedlight.attention.
            **options: as for speedlight.attention; positions count from the first token of a sequence. A mask is
                joined to causality by &.

        Returns:
            (batch, q_heads, n_new, value_dim), of q's kind; with return_lse also (batch, q_heads, n_new).
            The bits are those of one call over the whole sequence, however it was cut into chunks.

        Raises:
            CacheFull: a sequence would pass the capacity.
            CacheBusy: another thread appends to this layer.
            speedlight.Error: the argument, what was expected and what came.

        After any exception the cache is as it was.
        """
        if options:
            refuse_unknown(KVCache.attend, options)
        if "torch._dynamo" in sys.modules and in_graph():  # asked here first: a call costs more
            more = {"new_lengths": new_lengths, "q_lengths": q_lengths, "return_lse": return_lse, "out": out}
            return outside(KVCache.attend, self, layer, q, k, v, **more, **options)
        given = Options.of_step(k is not None, "bhld", options) if options else STEPS[k is not None, "bhld"]
        return self.compute(
            layer, q, k, v, given, return_lse=return_lse, new_lengths=new_lengths, q_lengths=q_lengths, out=out
        )

    def compute(
        self, layer: int, q: Any, k: Any, v: Any, options: Options, *, return_lse: bool = False,
        new_lengths: Ints | None = None, q_lengths: Ints | None = None, out: AnyArray | None = None,
    ) -> Any:  # fmt: skip
        """Computes attend() with its options in one: repeats a prepared step, or makes a new one."""
        if self.latent and k is not None:
            v = second_part(self._storage.shape, k, v)
        arrays = (q,) if k is v is None else (q, k, v)
        if new_lengths is q_lengths is out is None and type(layer) is int and 0 <= layer < self.layers:
            result = repeat(self, layer, arrays, options, return_lse)
            if result is not None:
                return result
        layer = self._layer(layer)
        if k is None or v is None:
            if k is not None or v is not None or new_lengths is not None:
                name = "k" if k is None else "v" if v is None else "new_lengths"
                way = MAKE_LATENT * (name == "v")
                raise ArgumentError(f"{name}: expected k and v together, or neither and no new_lengths.{way}")
            self._storage.lengths.check_capture({"q_lengths": q_lengths})
            return self._read(layer, query_of(self._storage, arrays, options, return_lse, out, q_lengths))
        k, v, counts = padded_tokens(self._storage, self.batch, k, v, new_lengths, q_lengths)
        query = query_of(self._storage, arrays, options, return_lse, out, q_lengths)
        check_queries(query, k.shape[2])
        return self._grow(layer, k, v, counts, query)

    def _read(self, layer: int, query: Query) -> Any:
        """Computes what queries see of the stored tokens."""
        lengths, written = self._now()[layer]
        piece = piece_of(query, lengths, lengths, written, self._ring)
        return attend_pieces(self._storage, layer, query, [piece], None, None)

    def _grow(self, layer: int, k: Any, v: Any, counts: list[int], query: Query | None) -> Any:
        """Stores new tokens, and computes what a query then sees."""
        storage, ring = self._storage, self._ring
        undo: Overwritten = []

        def change() -> Any:
            lengths, written = self._now()[layer]
            totals = new_totals(layer, lengths, counts, self.capacity, self.window)
            after, result = (totals, ring.reached(written, totals)), None
            undo.extend(storage.before(layer, lengths, ring.overwritten(written, totals)))
            if query is None:
                storage.put(layer, lengths, counts, k, v)
            else:
                if query.lengths is None:
                    most = PIECE if ring.size or storage.shared else max(k.shape[2], 1)
                    pieces = pieces_of(k.shape[2], lengths, counts, most)
                else:
                    pieces = [piece_of(query, lengths, *after, ring)]
                result = attend_pieces(storage, layer, query, pieces, k, v)
            self._held[layer] = after
            return result

        return transact(self, {layer}, change, undo)

    def _busy(self, layers: set[int]) -> CacheBusy:
        """Makes the error for a second writer, which does not wait."""
        return CacheBusy(
            f"layer {min(layers)}: another thread is appending to it, or saves it. Append from one thread at a time."
        )

    def roll_back(self, layer: int, lengths: Sequence[int]) -> None:
        """Drops the newest tokens of one layer, so that its sequences have these lengths, one for each. truncate()
        shortens all layers; this undoes a step of one, which failed on another rank. Not for caches with a window.
        """
        layer = self._layer(layer)
        counts = each_count(lengths, self.batch, "lengths")
        if self.window is not None:
            raise ArgumentError("roll_back: expected a cache without a window, which has overwritten tokens.")
        for item, (n, now) in enumerate(zip(counts, self._now()[layer][0], strict=True)):
            if not 0 <= n <= now:
                raise ArgumentError(f"lengths: expected 0 to {now}, the tokens of sequence {item}; got {n}.")
        self._storage.before_change(min(counts), "lengths")
        self._held[layer] = counts, list(counts)
        self._storage.lengths.set([lengths for lengths, _ in self._held])

    # --- shrinking and copying

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""
        shorten(self, lambda: truncated(length, self._now(), self._ring), "length")

    def keep(self, indices: Any, *, start: int | Sequence[int]) -> None:
        """Keeps the tokens at these indices from `start` on, and drops the others, in every layer.

        For trees of speculated tokens: append them all, attend under a mask that is the tree, and keep the path that is
        right. The cache is then, to the bit, as if only that path had been appended.

        Args:
            indices: ints that rise, counted from `start`: [0, 2, 5] keeps the first, third and sixth of the speculated
                tokens. One list for all sequences, or a list for each. An empty one keeps none, as truncate(start).
            start: tokens before the speculated ones: an int, or one for each sequence.

        The n-th that is kept is at position start + n afterwards. Keys are not turned anew: rotary() the keys of a tree
        by start + depth in it, which is that position, not by their place in the chunk. Not while other threads attend.

        Raises:
            CacheBusy: another thread appends.
            speedlight.Error: the argument, what was expected and what came; a window has forgotten what is kept.

        After any exception the cache is as it was.

        >>> import numpy as np, speedlight as sl
        >>> cache = sl.KVCache(layers=1, kv_heads=1, head_dim=4, capacity=16)
        >>> x = np.arange(40, dtype=np.float32).reshape(1, 1, 10, 4)
        >>> cache.append(0, x, x)
        >>> cache.keep([0, 2, 5], start=4); cache.keys(0)[0, 0, :, 0]
        array([ 0.,  4.,  8., 12., 16., 24., 36.], dtype=float32)
        """
        shorten(self, lambda: kept(indices, start, self._now(), self._ring), "start")

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        shorten(self, lambda: Left([0] * self.batch), "clear")  # without asking a device for its lengths

    def copy(self) -> KVCache:
        """Makes an independent cache with the same content."""
        return self.select(range(self.batch))

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> KVCache:
        return self.copy()

    __reduce__: Any = not_pickled("KVCache", "copy() it here, or save() it, and load() it where it is wanted")

    def select(self, batch_indices: Sequence[int]) -> KVCache:
        """A new cache of these sequences, in this order and as often: for beams."""
        given = check_list("batch_indices", batch_indices, "ints")
        indices = [check_index("batch_indices", i, self.batch) for i in given]
        if not indices:
            raise ArgumentError("batch_indices: expected at least one sequence; got none.")
        sizes: dict[str, Any] = self._sizes() | {"batch": len(indices)}
        new = type(self)(**sizes, dtype=self.dtype, device=self._storage.name)
        held = self._now()
        self._storage.copy_to(new._storage, indices, [list(map(self._ring.held, *pair)) for pair in held])
        lengths = [([n[i] for i in indices], [w[i] for i in indices]) for n, w in held]
        new._storage.lengths.set([n for n, _ in lengths])
        new._held = lengths
        return new

    @classmethod
    @public(leaves_graph=False)
    def from_prefix(cls, prefix: KVCache, batch: int, *, capacity: int | None = None) -> KVCache:
        """Makes a cache of sequences that all begin with a prefix: the tokens of a cache of one sequence.

        Whole tiles of 128 tokens stay in the prefix, and are read once for all sequences. Results are those of
        `prefix.select([0] * batch)`, which has copies, to the bit.

        Args:
            prefix: a KVCache of batch 1 without a window, on the CPU. While caches begin with its tokens, truncate(),
                keep() and clear() refuse to change these; it may grow.
            batch: number of sequences.
            capacity: most tokens of a sequence, with those of the prefix. Default that of the prefix.

        Raises:
            speedlight.Error: the argument, what was expected and what came.

        >>> import numpy as np, speedlight as sl
        >>> x = np.ones((1, 2, 300, 4), np.float32)
        >>> prefix = sl.KVCache(layers=1, kv_heads=2, head_dim=4, capacity=1000); prefix.append(0, x, x)
        >>> cache = sl.KVCache.from_prefix(prefix, 3); y = np.ones((3, 2, 1, 4), np.float32)
        >>> cache.attend(0, y, y, y).shape, cache.lengths(0), cache.used_bytes // cache.token_bytes
        ((3, 2, 1, 4), (301, 301, 301), 135)
        """
        if not isinstance(prefix, KVCache):
            raise ArgumentTypeError(f"prefix: expected a KVCache; got {type(prefix).__name__}.")
        if prefix.batch != 1 or prefix.window is not None:
            what = f"batch {prefix.batch}" if prefix.batch != 1 else f"window {prefix.window}"
            raise ArgumentError(f"prefix: expected a cache of batch 1 without a window; got {what}. Use select().")
        if prefix._storage.shared:
            raise ArgumentError("prefix: expected a cache that has all of its tokens itself. Use prefix.copy().")
        sizes: dict[str, Any] = prefix._sizes() | {"batch": batch}
        if capacity is not None:
            sizes["capacity"] = capacity
        new = cls(**sizes, dtype=prefix.dtype, device=prefix._storage.name)

        def begin() -> None:
            lengths = [tokens for (tokens,), _ in prefix._now()]
            if len({*lengths}) > 1:
                raise ArgumentError(f"prefix: expected as many tokens in every layer; got {lengths}.")
            if lengths[0] > new.capacity:
                raise ArgumentError(
                    f"capacity: expected at least the prefix's {lengths[0]} tokens; got {new.capacity}."
                )
            new._storage.begin_with(prefix._storage, lengths[0])
            new._held = [(lengths[:1] * new.batch, lengths[:1] * new.batch) for _ in lengths]

        transact(prefix, set(range(prefix.layers)), begin)  # other threads cannot write to it meanwhile
        return new

    def _sizes(self) -> dict[str, Any]:
        names = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep_first", "latent")
        return {n: getattr(self, n) for n in names}

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file, which any device can load and only the user may read.

        It is written under a temporary name first, then renamed. Appends from other threads raise CacheBusy while the
        tokens are copied.

        Raises:
            FileError: the file cannot be written; one of that name is as it was.
            CacheBusy: another thread appends.
        """
        self.save_with(saved.checked_path(path), {})

    save_with = saved.save_cache

    @classmethod
    def load(cls, path: str | Path, *, device: Any = "cpu", capacity: int | None = None) -> KVCache:
        """Reads what save() wrote, on any device. Every size is checked before anything is reserved.

        capacity: most tokens of a sequence, where they are to be others than those of the cache that was saved.

        Raises:
            FileError: the file is missing, damaged, or something else.
        """
        where = saved.checked_path(path)
        file = saved.open_file(where, saved.CACHE, device)
        saved.check_whole(where, file.words)
        content = saved.with_capacity(saved.read(where, file), capacity)
        return saved.make_filled(where, content, lambda **sizes: cls(**sizes, device=device))
