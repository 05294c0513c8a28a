"""Key-value caches in a GPU's memory: appended to and read by kernels, without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import arrays
from ..compiling import in_graph, outside
from ..errors import ArgumentError, ArgumentTypeError, CacheBusy, CacheFull, UnsupportedError, shown
from ..expressions.tracing import is_immutable as kept
from ..forks import renew_after_fork
from ..machine import interpreting
from ..problem import (
    Problem,
    cache_dtype,
    cache_sizes,
    check_index,
    check_list,
    check_tokens,
    from_cache,
    new_counts,
    new_totals,
    shorter_lengths,
)
from ..windows import PIECE, ring_of
from .decode import store
from .launch import Keys, Launch, capturing, check, power_above, run, start

_ENDLESS = 1 << 46  # tokens: the capacity of a cache that has a window and no other limit


def device_of(device: Any) -> torch.device:
    """A GPU by name; in the interpreter, the CPU."""
    try:
        found = torch.device(device)
    except Exception as error:  # PyTorch's, of several kinds
        raise ArgumentError(
            f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)} ({type(error).__name__})."
        ) from None
    if found.type != "cuda":
        raise ArgumentError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)}.")
    if interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError("device: expected a CUDA device; PyTorch sees none here.")
    return torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)


def cache_type(dtype: str) -> torch.dtype:
    if dtype == "float64":
        raise UnsupportedError("dtype: expected float32, float16, bfloat16 or int8 on a GPU; got float64.")
    return getattr(torch, dtype)


def described(x: Any, name: str, device: torch.device) -> arrays.Array:
    """An argument that must lie where the cache does."""
    found = arrays.describe(x, name, gpu=True)
    if torch.device(found.device) != device or (found.kind != "torch" and found.device == "cpu"):
        raise ArgumentError(
            f"{name}: expected a tensor on {device}, as the cache is; got one on {found.device}. Move it first."
        )
    return found


class Rows:
    """Keys and values of one layer, token by token: (item or page, head, token, element) in any order of memory; int8
    with scales.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: str,
        dims: tuple[int, int],
        device: torch.device,
        *,
        tokens_first: bool,
    ) -> None:
        outer, heads, tokens = shape
        lies = (outer, tokens, heads) if tokens_first else (outer, heads, tokens)

        def room(*tail: int, kind: torch.dtype) -> torch.Tensor:
            whole = torch.zeros((*lies, *tail), dtype=kind, device=device)
            return whole.transpose(1, 2) if tokens_first else whole

        self.k, self.v = (room(d, kind=cache_type(dtype)) for d in dims)
        self.scales = tuple(room(kind=torch.float32) for _ in dims) if dtype == "int8" else (None, None)

    @property
    def parts(self) -> list[torch.Tensor]:
        return [x for x in (self.k, self.v, *self.scales) if x is not None]

    def keys(self, **more: Any) -> Keys:
        """As the attention kernel takes them."""
        return Keys(
            self.k,
            self.v,
            tuple(self.k.stride()),
            tuple(self.v.stride()),
            k_scales=self.scales[0],
            v_scales=self.scales[1],
            **more,
        )

    def values_of(self, which: int, where: Any) -> torch.Tensor:
        """A copy of keys (0) or values (1)."""
        x, scale = (self.k, self.v)[which][where], self.scales[which]
        return x.clone() if scale is None else x.float() * scale[where][..., None]

    def put(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        strides: tuple[tuple[int, ...], tuple[int, ...]],
        lengths: torch.Tensor,
        n_new: int,
        status: torch.Tensor,
        *,
        counts: torch.Tensor | None = None,
        first: torch.Tensor | None = None,
        arrived: torch.Tensor | None = None,
        pages: torch.Tensor | None = None,
        page_size: int = 1,
        capacity: int,
        ring_first: int = 0,
        ring: int = 0,
    ) -> Launch:
        """Stores new tokens past the lengths; with `arrived`, then makes those longer.

        strides: (item, head, row, column) of k and v.
        """
        batch, heads = lengths.shape[0], self.k.shape[1]
        d, dv = self.k.shape[3], self.v.shape[3]
        scales = self.scales[0].stride() if self.scales[0] is not None else (0, 0, 0)
        arguments: dict[str, Any] = {
            "k": k, "v": v, "keys": self.k, "values": self.v, "k_scales": self.scales[0], "v_scales": self.scales[1],
            "counts": counts,
            "lengths": lengths, "arrived": arrived, "pages": pages, "status": status, "first": first, "n_new": n_new,
            "capacity": capacity,
            "page_size": page_size, "table_row": 0 if pages is None else pages.stride(0), "programs": n_new, "D": d,
            "DV": dv,
            "BLOCK_D": max(16, power_above(d)), "BLOCK_DV": max(16, power_above(dv)), "HEADS": heads,
            "BLOCK_H": power_above(heads),
            "ring_first": ring_first, "ring": ring, "RING": ring > 0,
        }  # fmt: skip
        for name, each in (("k", strides[0]), ("v", strides[1])):
            arguments |= {f"{name}_{n}": s for n, s in zip(("item", "head", "row", "column"), each, strict=True)}
        for name, each in (("K", self.k.stride()[:3]), ("V", self.v.stride()[:3]), ("S", scales)):
            arguments |= {f"{name}_{n}": s for n, s in zip(("item", "head", "row"), each, strict=True)}
        return Launch(store, (n_new, batch), arguments, 4, 1)


class CudaCache:
    """What `KVCache(device="cuda")` makes: the same methods, on tensors of a GPU. See KVCache for the arguments.

    Lengths are kept twice: on the device, where kernels read them and make them longer, and on the host, which checks
    every eager call. Calls only enqueue work. Under a CUDA graph only the device's lengths move, so that a graph of one
    step can be replayed; synchronize() then brings the host's up to date and raises CacheFull if a step did not fit.
    """

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
        device: Any = "cuda",
    ) -> None:
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
        self.dtype, self.device = cache_dtype(dtype), device_of(device)
        self.window, self.keep_first, self._ring = window, keep_first, ring_of(window, keep_first, 1)
        shape, dims = (self.batch, self.kv_heads, self._ring.tokens or self.capacity), (self.head_dim, self.value_dim)
        self._rows = [Rows(shape, self.dtype, dims, self.device, tokens_first=False) for _ in range(self.layers)]
        self._device_lengths = torch.zeros((self.layers, self.batch), dtype=torch.int32, device=self.device)
        self._arrived = torch.zeros((self.layers, self.batch), dtype=torch.int32, device=self.device)
        self._status = torch.zeros(1, dtype=torch.int32, device=self.device)
        # of each layer the lengths, as far as the host knows them; and past the last token that was ever there
        self._held = [([0] * self.batch, [0] * self.batch) for _ in range(self.layers)]
        self._claims: set[int] = set()  # layers that somebody writes to
        self._every = set(range(self.layers))
        renew_after_fork(self)
        self._captured = False  # a graph has seen this cache: only the device knows the lengths

    def __repr__(self) -> str:
        names = ["layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity"]
        if self.window is not None:
            names[-1:] = ["window", "keep_first"]
        sizes = ", ".join(f"{n}={getattr(self, n)}" for n in names)
        return f"KVCache({sizes}, dtype={self.dtype!r}, device='{self.device}')"

    # --- what it holds

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer: keys and values of all heads, and their scales."""
        return sum(x.element_size() * x[0, :, 0].numel() for x in self._rows[0].parts)

    @property
    def used_bytes(self) -> int:
        """Of the tokens that are held."""
        most = self._ring.tokens or self.capacity
        return sum(min(n, most) for lengths, _ in self._now() for n in lengths) * self.token_bytes

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence. Waits for the device if a graph has seen this cache."""
        return tuple(self._now()[check_index("layer", layer, self.layers)][0])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self.lengths(layer)[check_index("batch index", item, self.batch)]

    def keys(self, layer: int) -> torch.Tensor:
        """A copy: (batch, kv_heads, longest, head_dim); zeros past a sequence's length.

        Of int8, codes · scales in float32.
        """
        return self._copied(layer, 0)

    def values(self, layer: int) -> torch.Tensor:
        """A copy: (batch, kv_heads, longest, value_dim); as keys()."""
        return self._copied(layer, 1)

    def _copied(self, layer: int, which: int) -> torch.Tensor:
        lengths = self.lengths(layer)
        if self._ring.size:
            shown = [self._ring.shown(n) for n in lengths]
            whole = self._rows[layer].values_of(which, slice(None))
            out = whole.new_zeros((*whole.shape[:2], max(map(len, shown)), whole.shape[3]))
            for item, positions in enumerate(shown):
                out[item, :, : len(positions)] = whole[item, :, [self._ring.place(n) for n in positions]]
            return out
        out = self._rows[layer].values_of(which, (slice(None), slice(None), slice(max(lengths))))
        for item, n in enumerate(lengths):
            out[item, :, n:] = 0
        return out

    def synchronize(self) -> None:
        """Waits for the device; takes its lengths over.

        Raises:
            CacheFull: a replayed step did not fit. It stored nothing, and its output means nothing.
        """
        noted = int(self._status.item())
        there = self._device_lengths.tolist()
        self._held = [
            (lengths, list(map(max, written, lengths))) for lengths, (_, written) in zip(there, self._held, strict=True)
        ]
        if noted:
            self._status.zero_()
            free = self.capacity - max(map(max, there))
            raise CacheFull(
                f"a step of a CUDA graph found no room: {free} of {self.capacity} tokens are free. truncate() it.",
                free + 1,
                free,
            )

    def _now(self) -> list[tuple[list[int], list[int]]]:
        """The lengths, wherever they are known."""
        if self._captured and not capturing():
            self.synchronize()
        return self._held

    def after_fork(self) -> None:
        """In the child nobody writes."""
        self._claims = set()

    # --- growing and shrinking

    def append(self, layer: int, k: Any, v: Any, *, new_lengths: Any = None) -> None:
        """Stores tokens without attending: k (batch, kv_heads, n_new, head_dim), v (…, value_dim)."""
        if in_graph():
            return outside(CudaCache.append, self, layer, k, v, new_lengths=new_lengths)
        self._step(layer, None, k, v, new_lengths, {}, False, None)

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
        """As KVCache.attend, on tensors of the cache's device."""
        if in_graph():
            options = {
                "scale": scale,
                "mask": mask,
                "score": score,
                "sink_logits": sink_logits,
                "return_lse": return_lse,
                "out": out,
            }
            return outside(CudaCache.attend, self, layer, q, k, v, new_lengths=new_lengths, **options)
        if not isinstance(return_lse, bool):
            raise ArgumentTypeError(f"return_lse: expected True or False; got {shown(return_lse)}.")
        if (k is None) != (v is None) or (k is None and new_lengths is not None):
            name = "k" if k is None and v is not None else "v" if v is None and k is not None else "new_lengths"
            raise ArgumentError(f"{name}: expected k and v together, or neither and no new_lengths.")
        options = {"scale": scale, "mask": mask, "score": score, "sink_logits": sink_logits}
        return self._step(layer, q, k, v, new_lengths, options, return_lse, out)

    def _step(
        self, layer: int, q: Any, k: Any, v: Any, new_lengths: Any, options: dict[str, Any], return_lse: bool, out: Any
    ) -> Any:
        layer = check_index("layer", layer, self.layers)
        capture = capturing()
        lengths, written = self._now()[layer]
        wanted = ((k, "k", self.head_dim), (v, "v", self.value_dim))
        new = [self._new(x, n, d) for x, n, d in wanted if x is not None or q is None]
        n_new = new[0].shape[2] if new else 0
        if new and new[1].shape[2] != n_new:
            raise ArgumentError(f"v: expected {n_new} tokens, as k has; got {new[1].shape[2]} (shape {new[1].shape}).")
        if capture and new_lengths is not None:
            raise UnsupportedError(
                "new_lengths: expected None while a CUDA graph is captured; a replay could not change them."
            )
        counts = new_counts(new_lengths, self.batch, n_new)
        a = described(q, "q", self.device) if q is not None else None
        shape = a.shape if a is not None else ()
        if new and len(shape) == 4 and shape[2] != n_new:
            raise ArgumentError(f"q: expected {n_new} tokens, as k has; got {shape[2]} (shape {tuple(shape)}).")
        rows = shape[2] if len(shape) == 4 else 0
        if not new and any(self._ring.lost(n - rows, n, w) for n, w in zip(lengths, written, strict=True)):
            raise ArgumentError(f"q: expected fewer queries; the window has forgotten what some of the {rows} see.")
        if capture and self.capacity == _ENDLESS:
            raise UnsupportedError(
                "capacity: expected the most tokens of a sequence, for a CUDA graph; this cache has none."
            )
        query = a, options, return_lse, out, new_lengths is not None, capture
        return self._grow(layer, new, counts, query) if new else self._attend(layer, [], counts, lengths, query)

    def _grow(self, layer: int, new: list[arrays.Array], counts: list[int], query: tuple[Any, ...]) -> Any:
        """New tokens, and what a query then sees; all of it or nothing. Claims and commits as in caches.KVCache."""
        claims, mine, claimed, before, below, places = self._claims, {layer}, False, None, [], []
        parts = self._rows[layer].parts
        try:
            if claims & mine:
                raise _busy(layer)
            claims |= mine
            claimed = True
            lengths, written = self._held[layer]
            totals = new_totals(layer, lengths, counts, self.capacity)
            after = totals, list(map(max, written, totals))
            if not query[-1]:  # of a CUDA graph only the device knows
                places = sorted(
                    {n for total, w in zip(totals, written, strict=True) for n in self._ring.overwritten(total, w)}
                )
                below = [x[:, :, places] for x in parts] if places else []
                before = torch.tensor(lengths, dtype=torch.int32)
            result = self._attend(layer, new, counts, totals, query)
            self._held[layer] = after  # from here to the return nothing comes between
            return result
        except BaseException:
            if before is not None:
                self._device_lengths[layer].copy_(before)
                for part, x in zip(parts, below, strict=False):
                    part[:, :, places] = x
            raise
        finally:
            if claimed:
                claims -= mine

    def _attend(
        self, layer: int, new: list[arrays.Array], counts: list[int], totals: list[int], query: tuple[Any, ...]
    ) -> Any:
        """Enqueues the stores and kernels of a call.

        A ring takes a long chunk in pieces: each sees what is still there.
        """
        a, options, return_lse, out, uneven, capture = query
        n_new = new[0].shape[2] if new else 0
        result = target = lse = where = None
        if a is not None:
            staged = not (options["mask"] is options["score"] is None)
            result, target = arrays.out_for(a, (*a.shape[:-1], self.value_dim), out, (a,), staged=staged)
            lse, where = arrays.empty_like(a, a.shape[:-1], "float32") if return_lse else (None, None)
        step = PIECE if self._ring.size else max(n_new, 1)
        pieces = [slice(at, at + step) for at in range(0, max(n_new, 1), step)]
        problems = [
            self._problem(a, x, counts, totals, uneven, capture, bool(new), options) for x in pieces if a is not None
        ]
        self._captured |= capture
        for n, piece in enumerate(pieces):
            if new:
                some = [min(max(x - piece.start, 0), step) for x in counts]
                self._put(layer, [x.tensor[:, :, piece] for x in new], some, uneven)
            if a is not None and target is not None:
                most = self.capacity if capture else min(self.capacity, power_above(max(totals, default=1)))
                views = [
                    None if x is None else x.tensor[:, :, piece] if n_new else x.tensor for x in (a, target, where)
                ]
                self._run(layer, problems[n], *views, most)  # type: ignore[arg-type]
        if a is None or target is None:
            return None
        arrays.deliver(target)
        result = arrays.like_input(a, result) if out is None else out
        return (result, arrays.like_input(a, lse)) if return_lse else result

    def _problem(
        self,
        a: arrays.Array,
        piece: slice,
        counts: list[int],
        totals: list[int],
        uneven: bool,
        capture: bool,
        causal: bool,
        options: dict[str, Any],
    ) -> Problem:
        """A problem is kept and used again, so it speaks of a power of two of keys; arrays as masks want the lengths
        themselves.
        """
        known = kept(options["mask"]) and kept(options["score"])
        bucket = self.capacity if capture else min(self.capacity, power_above(max(totals, default=1)))
        longest = (bucket,) * self.batch if known or capture else tuple(totals)
        rows = a.shape[2] if len(a.shape) == 4 else 0
        some = replace(a, shape=(*a.shape[:2], len(range(rows)[piece]), a.shape[3])) if causal and rows else a
        shortest = (len(range(rows)[piece]) if causal else 1) if known or capture else None
        given = None if not uneven else [min(max(n - piece.start, 0), piece.stop - piece.start) for n in counts]
        problem = from_cache(
            some,
            dtype=self.dtype,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            k_lengths=longest,
            causal=causal,
            q_lengths=given,
            hiding=self._ring.mask(causal),
            shortest=shortest,
            **options,
        )
        check(problem, str(self.device), "ieee")
        return problem

    def _new(self, x: Any, name: str, dim: int) -> arrays.Array:
        found = described(x, name, self.device)
        if len(found.shape) != 4 or (found.shape[0], found.shape[1], found.shape[3]) != (
            self.batch,
            self.kv_heads,
            dim,
        ):
            raise ArgumentError(
                f"{name}: expected shape ({self.batch}, {self.kv_heads}, n_new, {dim}); got {found.shape}."
            )
        check_tokens(found.dtype, name, self.dtype)
        return found

    def _put(self, layer: int, new: list[torch.Tensor], counts: list[int], uneven: bool) -> None:
        k, v = new
        each = torch.tensor(counts, dtype=torch.int32).to(self.device) if uneven else None
        step = self._rows[layer].put(
            k,
            v,
            (k.stride(), v.stride()),
            self._device_lengths[layer],
            k.shape[2],
            self._status,
            counts=each,
            arrived=self._arrived[layer],
            capacity=self.capacity,
            ring_first=self._ring.fixed,
            ring=self._ring.size,
        )
        start(step)

    def _run(
        self, layer: int, problem: Problem, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, most: int
    ) -> None:
        ring = {"ring_first": self._ring.fixed, "ring": self._ring.size}
        keys = self._rows[layer].keys(lengths=self._device_lengths[layer], most=most, **ring)
        run(problem, "bhld", q, keys, out, lse)

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""

        def shorter() -> list[list[int]]:
            now = self._now()
            lost = lambda item, n: any(self._ring.lost(n, n, written[item]) for _, written in now)  # noqa: E731
            return [shorter_lengths(length, [lengths for lengths, _ in now], lost)] * self.layers

        self._shorten(shorter)

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        self._shorten(lambda: [[0] * self.batch] * self.layers)

    def _shorten(self, choose: Callable[[], list[list[int]]]) -> None:
        claims, mine, claimed, before = self._claims, self._every, False, None
        try:  # as in _grow
            if claims & mine:
                raise _busy(min(claims & mine))
            claims |= mine
            claimed = True
            lengths, held = choose(), self._held
            after = [(x, [n and w for n, w in zip(x, y, strict=True)]) for x, (_, y) in zip(lengths, held, strict=True)]
            there = torch.tensor(lengths, dtype=torch.int32)
            before = self._device_lengths.clone()
            self._device_lengths.copy_(there)
            self._held = after
        except BaseException:
            if before is not None:
                self._device_lengths.copy_(before)
            raise
        finally:
            if claimed:
                claims -= mine

    def copy(self) -> CudaCache:
        """An independent cache with the same content."""
        return self.select(range(self.batch))

    def select(self, batch_indices: Sequence[int]) -> CudaCache:
        """A new cache of these sequences, in this order and as often: for beams."""
        indices = [
            check_index("batch index", i, self.batch) for i in check_list("batch_indices", batch_indices, "ints")
        ]
        if not indices:
            raise ArgumentError("batch_indices: expected at least one sequence; got none.")
        names = ("layers", "kv_heads", "head_dim", "value_dim", "capacity", "dtype", "window", "keep_first")
        device = "cuda" if interpreting() else self.device
        new = CudaCache(**{n: getattr(self, n) for n in names}, batch=len(indices), device=device)
        now = self._now()
        for mine, theirs in zip(self._rows, new._rows, strict=True):
            for a, b in zip(mine.parts, theirs.parts, strict=True):
                b.copy_(a[indices])
        new._held = [([lengths[i] for i in indices], [written[i] for i in indices]) for lengths, written in now]
        new._device_lengths.copy_(torch.tensor([lengths for lengths, _ in new._held], dtype=torch.int32))
        return new

    def save(self, path: Any) -> None:
        raise UnsupportedError(
            "save: expected a cache on the CPU; one on a GPU is not saved yet. Copy keys() and values() to the CPU."
        )


def _busy(layer: int) -> CacheBusy:
    """A second appender is told so instead of waiting."""
    return CacheBusy(f"layer {layer}: another thread is appending to it. Append from one thread at a time.")


class PoolMemory:
    """The memory of a `PagePool(device="cuda")`: pages of tokens, per layer. The pool itself keeps the accounts."""

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        dtype: str,
        device: Any,
    ) -> None:
        self.device, self.dtype, self.page_size = device_of(device), dtype, page_size
        self.kv_heads, self.head_dim, self.value_dim = kv_heads, head_dim, value_dim
        shape, dims = (pages, kv_heads, page_size), (head_dim, value_dim)
        self.rows = [Rows(shape, dtype, dims, self.device, tokens_first=True) for _ in range(layers)]
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)

    @property
    def token_bytes(self) -> int:
        """Of one layer: keys and values of all heads, and their scales."""
        return sum(x.element_size() * x[0, :, 0].numel() for x in self.rows[0].parts)

    def described(self, x: Any, name: str) -> arrays.Array:
        if capturing():
            raise UnsupportedError(
                "PagePool: a CUDA graph cannot hand out pages. Use attention_paged() with tables of your own there."
            )
        return described(x, name, self.device)

    def copy_page(self, new: int, old: int) -> None:
        for rows in self.rows:
            for part in rows.parts:
                part[new].copy_(part[old])

    def tokens(self, layer: int, which: int, pages: list[int], n: int) -> torch.Tensor:
        """A copy of a sequence's keys (0) or values (1): (kv_heads, n, dim)."""
        each = self.rows[layer].values_of(which, pages)  # (pages, heads, tokens, dim)
        return each.transpose(0, 1).reshape(each.shape[1], -1, each.shape[3])[:, :n].clone()

    def _tables(self, pages: list[list[int]]) -> torch.Tensor:
        most = max(map(len, pages), default=0) or 1
        return torch.tensor([[*x, *[0] * (most - len(x))] for x in pages], dtype=torch.int32).to(self.device)

    def write(
        self, layer: int, pages: list[list[int]], starts: list[int], counts: list[int], k: arrays.Array, v: arrays.Array
    ) -> None:
        """New tokens, one sequence's after the other's, to their pages."""
        first, total = [], 0
        for n in counts:
            first.append(total)
            total += n
        three = torch.tensor([starts, counts, first], dtype=torch.int64).to(self.device)
        strides = tuple((0, x.tensor.stride(1), x.tensor.stride(0), x.tensor.stride(2)) for x in (k, v))
        step = self.rows[layer].put(
            k.tensor,
            v.tensor,
            strides,  # type: ignore[arg-type]
            three[0],
            max(counts, default=0),
            self.status,
            counts=three[1],
            first=three[2],
            pages=self._tables(pages),
            page_size=self.page_size,
            capacity=1 << 40,
        )
        start(step)

    def run(
        self,
        layer: int,
        q: arrays.Array,
        pages: list[list[int]],
        counts: list[int],
        totals: list[int],
        causal: bool,
        options: dict[str, Any],
        return_lse: bool,
        out: Any,
    ) -> Any:
        """Packed queries over their sequences' pages."""
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
            **options,
        )
        check(problem, str(self.device), "ieee")
        staged = not (options["mask"] is options["score"] is None)
        result, target = arrays.out_for(q, (*q.shape[:-1], self.value_dim), out, (q,), staged=staged)
        lse, where = arrays.empty_like(q, (q.shape[1], q.shape[0]), "float32") if return_lse else (None, None)
        keys = self.rows[layer].keys(
            pages=self._tables(pages),
            page_size=self.page_size,
            page_count=self.rows[layer].k.shape[0],
            status=self.status,
        )
        offsets = [0]
        for n in counts:
            offsets.append(offsets[-1] + n)
        run(problem, "lhd", q.tensor, keys, target.tensor, None if where is None else where.tensor, cu_q=tuple(offsets))
        arrays.deliver(target)
        result = arrays.like_input(q, result) if out is None else out
        return (result, arrays.like_input(q, lse)) if return_lse else result
