"""KVCache over several ranks: each keeps a part of the tokens, and what it makes of them is merged."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..arrays.integers import whole
from ..errors import ArgumentError, FileError, not_pickled
from ..kv import saving as saved
from ..kv.cache import KVCache as Local
from ..kv.keeping import paths_of
from ..kv.query import padded_tokens
from ..problem.checks import cache_sizes, check_flag, check_index, checked_sizes, shorter_lengths, size
from ..problem.options import Options, ScoreOptions
from ..problem.shardings import check_shard, positions
from ..problem.signatures import public, refuse_unknown
from . import placement
from .forms import entries_of
from .groups import Peers, agreed
from .partial import NewTokens, asked_of, merged, partial, put
from .placement import Placement
from .tensors import check_lengths

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.options import Dtype, Ints
    from ..problem.shardings import Shard

_STORED = "stored tokens"  # as a message names what ranks have by now


class _Checked(NamedTuple):
    """A call's arguments, as far as this rank can tell."""

    form: dict[str, str]  # in words that have to be the same on every rank
    found: Any = None
    own: int = 0  # of this rank alone: tokens that it brings, or what it has drawn


class KVCache:
    """KV cache whose tokens are spread over ranks, for contexts that one rank cannot hold or read fast enough.

    Every rank makes every call, with the same arguments; whatever differs is an error on all ranks. Every rank then has
    the same results, to the bit. Of q, k, v and tables above 64 KiB each, shapes and dtypes are compared, not entries:
    those that differ there give wrong results. Call it from one thread.

    Args:
        layers, batch, kv_heads, head_dim, dtype, value_dim, device: as for speedlight.KVCache.
        capacity: most tokens of a sequence, on all ranks together; each reserves memory for its share and a piece.
        piece: new tokens go to the rank that has the fewest, so many at a time.
        group: a process group of torch.distributed. Default all processes.

    There is no window=: a window's cache is small, so each rank may have its own. A mask may be a window.

    >>> import torch, torch.distributed as dist, speedlight.distributed
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun says who is who
    >>> cache = speedlight.distributed.KVCache(layers=1, kv_heads=2, head_dim=4, capacity=8)
    >>> x = torch.ones(1, 2, 3, 4)
    >>> cache.attend(0, x, x, x).shape, cache.length(0), cache.counts(0)
    (torch.Size([1, 2, 3, 4]), 3, (3,))
    >>> dist.destroy_process_group()
    """

    @public(leaves_graph=False)
    def __init__(
        self,
        *,
        layers: int,
        batch: int = 1,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: Dtype = "float32",
        value_dim: int | None = None,
        piece: int = 128,
        device: Any = "cpu",
        group: Any = None,
    ) -> None:
        self._joins(group)
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim}

        def made() -> _Checked:
            checked_sizes({"capacity": capacity, "piece": piece})
            *_, most = cache_sizes(**sizes, capacity=capacity, window=None, keep_first=0)
            local = Local(**sizes, capacity=placement.room(most, self.ranks, piece), dtype=dtype, device=device)
            form = {**sizes, "capacity": capacity, "piece": piece, "dtype": local.dtype, **self._carried(local)}
            return _Checked({name: str(x if whole(x) is None else whole(x)) for name, x in form.items()}, local)

        local, _ = self._agreed("KVCache", made)
        placed = [[placement.placed([], self.ranks)] * local.batch for _ in range(local.layers)]
        self._holds(local, size("capacity", capacity), size("piece", piece), placed)

    def _joins(self, group: Any) -> None:
        self._peers = Peers(group)
        self.rank, self.ranks = self._peers.rank, self._peers.ranks

    def _carried(self, local: Local) -> dict[str, str]:
        """Where a rank's tokens lie, if its partial results can be sent."""
        device = torch.device(local.device)
        self._peers.check_carries("results", device)
        return {"device": device.type}

    def _holds(self, local: Local, capacity: int, piece: int, placed: list[list[Placement]]) -> None:
        self._peers.open(torch.device(local.device))
        self._local, self.capacity, self.piece, self._placed = local, capacity, piece, placed
        self.layers, self.batch, self.kv_heads = local.layers, local.batch, local.kv_heads
        self.head_dim, self.value_dim, self.dtype = local.head_dim, local.value_dim, local.dtype

    def __repr__(self) -> str:
        sizes = ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "piece")
        given = ", ".join(f"{n}={getattr(self, n)}" for n in sizes)
        return f"KVCache({given}, dtype={self.dtype!r}, rank {self.rank} of {self.ranks})"

    # --- contents

    @property
    def used_bytes(self) -> int:
        """The bytes of the tokens that this rank keeps."""
        return self._local.used_bytes

    def lengths(self, layer: int) -> tuple[int, ...]:
        """Tokens of every sequence, on all ranks together."""
        return tuple(x.length for x in self._placed[self._layer(layer)])

    def length(self, layer: int, item: int = 0) -> int:
        """Tokens of one sequence."""
        return self._sequence(layer, item).length

    def counts(self, layer: int, item: int = 0) -> tuple[int, ...]:
        """Returns how many tokens of one sequence each rank keeps."""
        return self._sequence(layer, item).counts

    def positions(self, layer: int, item: int = 0) -> Tensor:
        """Returns the positions of this rank's tokens of one sequence, in the order of keys() and values()."""
        return torch.from_numpy(self._sequence(layer, item).positions(self.rank))

    def keys(self, layer: int) -> Any:
        """A copy of this rank's: (batch, kv_heads, most of a sequence, head_dim), as speedlight.KVCache has them."""
        return self._local.keys(layer)

    def values(self, layer: int) -> Any:
        """A copy of this rank's: (batch, kv_heads, most of a sequence, value_dim)."""
        return self._local.values(layer)

    # --- growing

    @public(has_frame=False)
    def append(
        self,
        layer: int,
        k: Any,
        v: Any,
        *,
        new_lengths: Ints | None = None,
        shard: Shard | None = None,
        **theirs: NoReturn,
    ) -> None:
        """Stores tokens without attending.

        Args:
            layer: index of the layer.
            k, v: (batch, kv_heads, n_new, head_dim) and (…, value_dim): the same tokens on every rank, which keeps
                those that are its own.
            new_lengths: how many of them are each sequence's, where some have fewer than n_new.
            shard: "contiguous", "zigzag" or "stripe": k and v are this rank's shard of the new tokens, as attention()
                takes them. Nothing is sent: they stay where they are.

        Raises:
            CacheFull: a sequence would pass the capacity, or what a rank has room for. Nothing is written on any rank.
            speedlight.Error: the argument, what was expected and what came; it differs between ranks; a rank is gone.
        """
        refuse_unknown(KVCache.append, theirs)

        def checked() -> _Checked:
            at = self._layer(layer)
            if shard is None:
                new, form = self._new(at, k, v, new_lengths)
                return _Checked({**form, **self._state(at)}, new)
            check_shard(shard)
            if new_lengths is not None:
                raise ArgumentError("new_lengths: expected None beside shard=, which is of all sequences; got lengths.")
            new = NewTokens(*padded_tokens(self._local.storage, self._local.batch, k, v, None, None)[:2], None, [])
            return _Checked({"shard": shard, **self._state(at)}, new, new.k.shape[2])

        new, counts = self._agreed("append", checked)
        if shard is not None:
            new = self._sharded(layer, new, counts, shard)
        before = self._local.lengths(layer)
        try:
            put(self._local, layer, new)
            self._placed[layer] = new.after  # from here on nothing comes between
        except BaseException:
            self._local.roll_back(layer, before)
            raise

    @public(ScoreOptions, has_frame=False)
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Any = None,
        v: Any = None,
        *,
        new_lengths: Ints | None = None,
        q_lengths: Ints | None = None,
        return_lse: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Any:
        """Appends the tokens' keys and values, then lets their queries attend, each to all tokens up to its own.

        Args:
            q: (batch, q_heads, n_new, head_dim), a tensor, the same on every rank.
            k, v: as for append(), the same on every rank; None appends nothing: every query then sees every token.
            layer, new_lengths, q_lengths, return_lse: as for speedlight.KVCache.attend().
            **options: as for it; positions count from the first token of a sequence, whoever keeps it.

        Returns:
            (batch, q_heads, n_new, value_dim), of q's dtype; with return_lse also (batch, q_heads, n_new). Each rank
            attends to its own tokens, and merge() joins what they found: inside merge()'s bound of one cache, not its
            bits.

        Raises:
            CacheFull: a sequence would pass the capacity. Nothing is written on any rank.
            speedlight.Error: the argument, what was expected and what came; it differs between ranks; a rank is gone.

        After an exception the cache is as it was. If other ranks went on, the next call says so, on every rank.
        """
        refuse_unknown(KVCache.attend, options)
        given = Options(causal=k is not None, **options)

        def checked() -> _Checked:
            check_flag("return_lse", return_lse)
            new, form, at, lengths = None, {"k": "None"}, self._layer(layer), q_lengths
            if k is not None and v is not None:
                new, form = self._new(at, k, v, new_lengths)
                lengths = new_lengths if q_lengths is None else q_lengths
            elif k is not None or v is not None or new_lengths is not None:
                name = "k" if k is None else "v" if v is None else "new_lengths"
                raise ArgumentError(f"{name}: expected k and v together, or neither and no new_lengths.")
            n_new, after = (None, self._placed[at]) if new is None else (new.k.shape[2], new.after)
            asked = asked_of(self._local, q, n_new, after, replace(given, q_lengths=lengths))
            return _Checked({**asked.form(), **form, **self._state(at)}, (new, asked))

        (new, asked), _ = self._agreed("attend", checked)
        before, failed, state = self._local.lengths(layer), None, None
        try:
            try:
                if new is not None:
                    put(self._local, layer, new)
                state = partial(self._local, layer, asked, self.rank)
            except BaseException as error:  # the others wait for what this rank finds: they hear that nothing comes
                failed = error
            out, lse = merged(self._peers, asked, self.value_dim, state, failed)
            self._placed[layer] = asked.after  # from here to the return nothing comes between
            return (out, lse) if return_lse else out
        except BaseException:
            self._local.roll_back(layer, before)
            raise

    # --- shrinking

    def truncate(self, length: int | Sequence[int]) -> None:
        """Forgets the tokens past `length` (one for all sequences, or one for each) in every layer."""

        def checked() -> _Checked:
            each = shorter_lengths(length, [list(self.lengths(n)) for n in range(self.layers)], lambda *_: False)
            return _Checked({"length": str(each)}, self._left(each, [[]] * self.batch))

        self._shorten("truncate", checked)

    def keep(self, indices: Any, *, start: int | Sequence[int]) -> None:
        """Keeps, of the tokens from `start` on, those at these indices, and forgets the others, in every layer: as
        speedlight.KVCache.keep(). Every token stays on its rank.
        """

        def checked() -> _Checked:
            starts, paths = paths_of(indices, start, [self.lengths(n) for n in range(self.layers)])
            return _Checked({"start": str(starts), "indices": str(paths)}, self._left(starts, paths))

        self._shorten("keep", checked)

    def clear(self) -> None:
        """Forgets everything; the memory stays reserved."""
        self._shorten("clear", lambda: _Checked({}, self._left([0] * self.batch, [[]] * self.batch)))

    def _left(self, starts: list[int], paths: list[list[int]]) -> tuple[Any, ...]:
        """What every layer keeps, and of this rank's tokens, alike in each, what keep() takes: indices and starts."""
        placed, own = [], []
        for layer in self._placed:
            both = [placement.kept(*x) for x in zip(layer, starts, paths, strict=True)]
            placed.append([x for x, _ in both])
            slots = [slots[self.rank] for _, slots in both]
            own.append(([x.counts[self.rank] - len(y) for (x, _), y in zip(both, slots, strict=True)], slots))
            if own[-1] != own[0]:
                raise ArgumentError(
                    f"layer: expected tokens that lie alike in every layer; those of layer {len(own) - 1} lie "
                    "otherwise than those of layer 0. Append the same shards to each layer, or clear()."
                )
        start, path = own[0]
        return placed, path if self.batch > 1 else path[0], start

    def _shorten(self, call: str, checked: Callable[[], _Checked]) -> None:
        """Makes the cache what is left: this rank's tokens by one store of their lengths, and where all lie."""
        (placed, path, start), _ = self._agreed(call, checked)
        before, held = self._placed, [self._local.lengths(n) for n in range(self.layers)]
        try:
            self._placed = placed
            self._local.keep(path, start=start)
        except BaseException:
            if [self._local.lengths(n) for n in range(self.layers)] == held:
                self._placed = before
            raise

    # --- files
    __reduce__: Any = not_pickled("KVCache", "it is of its group's processes: save() it, and load() it on as many")

    def save(self, path: str | Path) -> None:
        """Writes a .safetensors file of each rank: for "x.safetensors" rank 0 of 2 writes "x.0-of-2.safetensors".

        Each is that of its rank's speedlight.KVCache.save(), with metadata on whose the tokens are. Where one rank
        cannot write, all raise, and load() refuses the files of two calls together: keep those of before under another
        name.

        Raises:
            FileError: as of speedlight.KVCache.save(), on every rank.
        """
        draw = secrets.randbits(62)  # by which files of one save() know each other
        words = placement.as_words(self._placed)
        where, drawn = self._agreed("save", lambda: _Checked({"tokens": words}, saved.checked_path(path), draw))
        more = {"rank": self.rank, "ranks": self.ranks, "stamp": drawn[0], "whole": self.capacity, "piece": self.piece}
        metadata = {name: str(x) for name, x in more.items()} | {"placed": words}
        own = saved.rank_path(where, self.rank, self.ranks)
        self._agreed("save, written", lambda: _Checked({}, self._local.save_with(own, metadata)))

    @classmethod
    def load(cls, path: str | Path, *, device: Any = "cpu", group: Any = None) -> KVCache:
        """Reads what save() wrote, on as many ranks.

        Raises:
            FileError: a file is missing or damaged, was saved by another number of ranks, or in another save().
        """
        cache = cls.__new__(cls)
        cache._joins(group)

        def found() -> _Checked:
            where = saved.rank_file(saved.checked_path(path), cache.rank, cache.ranks)
            file = saved.open_file(where, saved.CACHE)
            words, content = file.words, saved.read(where, file)
            local = saved.make_filled(where, content, lambda **sizes: Local(**sizes, device=device))
            try:
                placed = placement.from_words(words["placed"], cache.ranks)
                held = [[x.counts[cache.rank] for x in layer] for layer in placed]
                if int(words["ranks"]) != cache.ranks or held != [list(local.lengths(n)) for n in range(local.layers)]:
                    raise ValueError("tokens of another file")
                held_by_all = local, int(words["whole"]), int(words["piece"]), placed
                form = {"stamp": words["stamp"], "tokens": words["placed"]}
            except (KeyError, ValueError, TypeError, IndexError) as error:
                raise FileError(f"{where}: expected a file that save() of a sharded cache wrote ({error}).") from None
            return _Checked({**form, **cache._carried(local)}, held_by_all)

        content, _ = cache._agreed("load", found)
        cache._holds(*content)
        return cache

    # --- arguments

    def _layer(self, layer: Any) -> int:
        return check_index("layer", layer, self.layers)

    def _sequence(self, layer: Any, item: Any) -> Placement:
        return self._placed[self._layer(layer)][check_index("item", item, self.batch)]

    def _agreed(self, call: str, checked: Callable[[], _Checked]) -> tuple[Any, list[int]]:
        """Returns a call's arguments, and each rank's own number, once all ranks agree on them."""
        given, error = _Checked({}), None
        try:
            given = checked()
        except Exception as found:  # the others are told, and this rank raises it
            error = found
        try:
            rows = agreed(self._peers, {"call": call, **given.form}, (given.own,), error)
        except ArgumentError as found:
            if str(found).startswith(f"{_STORED}: "):
                found.args = (f"{found} truncate() the cache to a length that all ranks have.",)
            raise
        return given.found, [own for (own,) in rows]

    def _state(self, layer: int) -> dict[str, str]:
        return {"layer": str(layer), _STORED: str([x.counts for x in self._placed[layer]])}

    def _new(self, layer: int, k: Any, v: Any, new_lengths: Any) -> tuple[NewTokens, dict[str, str]]:
        """New tokens that every rank has."""
        k, v, counts = padded_tokens(self._local.storage, self._local.batch, k, v, new_lengths, None)
        before = self._placed[layer]
        grown: dict[tuple[int, int], Placement] = {}  # most often the sequences of a batch have one
        for x, n in zip(before, counts, strict=True):
            if (id(x), n) not in grown:
                grown[id(x), n] = placement.grown(x, n, self.piece)
        after = [grown[id(x), n] for x, n in zip(before, counts, strict=True)]
        placement.check_room(layer, before, after, self.capacity, self._local.capacity)
        rows = [placement.new_rows(x, y, self.rank) for x, y in zip(before, after, strict=True)]
        form = {"k": f"{k.dtype} {tuple(k.shape)}", "v": f"{v.dtype} {tuple(v.shape)}", "new_lengths": str(counts)}
        return NewTokens(k, v, rows, after), form | entries_of(counts, k=k, v=v)

    def _sharded(self, layer: int, new: NewTokens, counts: list[int], shard: Shard) -> NewTokens:
        """New tokens of which every rank has its shard."""
        shards = positions(sum(counts), self.ranks, shard)
        check_lengths("k", counts, shards, shard)
        before = self._placed[layer]
        joined = {id(x): placement.sharded(x, shards) for x in before}
        after = [joined[id(x)] for x in before]
        placement.check_room(layer, before, after, self.capacity, self._local.capacity)
        return new._replace(after=after)
