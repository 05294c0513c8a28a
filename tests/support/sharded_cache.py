"""A cache over several ranks, beside one of the whole sequence: what tests/support/dropins.py runs on each rank."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from problems import CODES, taken
from sharded_faults import refused as error_of
from tolerance import assert_within

import speedlight as sl
import speedlight.distributed as sd
from speedlight import reference
from speedlight.distributed import positions
from speedlight.distributed.forms import entries_of
from speedlight.distributed.placement import grown

FULL = os.environ.get("SPEEDLIGHT_FULL") == "1"
BATCH, HEADS, KV, DIM = 2, 4, 2, 16
SIZES: dict[str, Any] = {"layers": 1, "batch": BATCH, "kv_heads": KV, "head_dim": DIM, "capacity": 400}


class Both:
    """A cache of all ranks, and one of the whole sequence on each; tokens are drawn alike on every rank."""

    def __init__(self, dtype: str = "float32", layers: int = 1) -> None:
        sizes = SIZES | {"layers": layers, "dtype": dtype}
        self.one, self.all = sl.KVCache(**sizes), sd.KVCache(**sizes, piece=16)
        self.dtype = getattr(torch, taken(dtype))
        self.draw = torch.Generator().manual_seed(7)

    def drawn(self, heads: int, n: int) -> torch.Tensor:
        return torch.randn(BATCH, heads, n, DIM, generator=self.draw).to(self.dtype)

    def append(self, n: int, layer: int = 0, **options: Any) -> None:
        k, v = self.drawn(KV, n), self.drawn(KV, n)
        self.one.append(layer, k, v, **options)
        self.all.append(layer, k, v, **options)

    def shard(self, n: int, shard: Any, layer: int = 0) -> None:
        k, v = self.drawn(KV, n), self.drawn(KV, n)
        self.one.append(layer, k, v)
        mine = np.concatenate([*map(np.array, positions(n, dist.get_world_size(), shard)[dist.get_rank()]), []])
        self.all.append(layer, *(x[:, :, mine.astype(int)] for x in (k, v)), shard=shard)

    def attend(self, n: int, new: int | None = None, **options: Any) -> None:
        """Both, held to each other by twice the bound: of each of the two."""
        new = n if new is None else new
        q, k, v = self.drawn(HEADS, n), self.drawn(KV, new), self.drawn(KV, new)
        kv = (k, v) if new else ()
        want = self.one.attend(0, q, *kv, return_lse=True, **options)
        got = self.all.attend(0, q, *kv, return_lse=True, **options)
        assert self.one.lengths(0) == self.all.lengths(0)
        assert got[0].dtype == q.dtype
        keys, values = (x.astype(np.float32) for x in (self.one.keys(0), self.one.values(0)))
        codes = self.all.dtype if self.all.dtype in CODES else None
        limits = reference.error_bound(q.float().numpy(), keys, values, codes=codes)
        # of no mask: the largest of the row's item and head
        most = limits.out.max((2, 3), keepdims=True), limits.lse.max(2, keepdims=True)
        coarse = 0.0 if self.dtype == torch.float32 else 2.0**-7
        for x, y, bound, name in zip(got, want, most, ("out", "lse"), strict=True):
            y = y.double().numpy()
            limit = np.broadcast_to(4 * bound + coarse * np.abs(np.where(np.isfinite(y), y, 0)) + coarse, y.shape)
            assert_within(x, y, limit, name, zeros_allowed=True)


def case_steps() -> None:
    """Chunks, single tokens, other lengths of each sequence, queries alone."""
    both = Both()
    for n in (5, 100, 1, 1):
        both.attend(n)
    both.attend(1, new_lengths=[1, 0])
    both.attend(7, new_lengths=[7, 3])
    both.attend(5, new=7, q_lengths=[5, 2])
    both.attend(1, new=0)
    both.attend(4, new=0, q_lengths=[3, 4])
    assert sum(both.all.counts(0)) == both.all.length(0)
    assert max(both.all.counts(0)) - min(both.all.counts(0)) <= 16
    assert both.all.keys(0).shape[2] == max(both.all.counts(0, n)[dist.get_rank()] for n in range(BATCH))


def case_masks_and_scores() -> None:
    """At the positions of the whole sequence, in a batch of different lengths, too."""
    both = Both()
    both.attend(60)
    for n, lengths in ((40, None), (1, None), (40, [40, 4]), (12, None)) if FULL else ((40, [40, 4]), (12, None)):
        both.attend(n, new_lengths=lengths, mask=sl.window(20, 0), sink_logits=[1.0, 2.0, -3.0, 4.0])
    if not FULL:
        return
    both.attend(3, score=[sl.softcap(5.0), sl.alibi([0.5, 0.25, 0.125, 0.1])])
    dense = torch.rand(BATCH, 1, 3, both.one.length(0) + 3, generator=both.draw)
    both.attend(3, mask=dense > 0.3)
    shape = BATCH, 1, 2, both.one.length(0) + 2
    both.attend(2, score=torch.rand(shape, generator=both.draw))
    seen = torch.rand(BATCH, 50, generator=both.draw) > 0.5
    both.attend(2, mask=sl.padding(seen), scale=0.1)


def case_shards() -> None:
    """A context that was attended to in shards stays where it is."""
    for kind, n in itertools.product(("contiguous", "zigzag", "stripe"), (1, 50, 64)):
        both = Both()
        both.shard(n, kind)
        both.attend(5)
        both.shard(20, kind)
        both.attend(1)
        both.one.truncate(n // 2)
        both.all.truncate(n // 2)
        both.attend(30)
        own = both.all.positions(0).numpy()
        assert (np.diff(own) > 0).all() and len(own) == both.all.counts(0)[dist.get_rank()]
        assert (torch.as_tensor(both.all.keys(0)) == torch.as_tensor(both.one.keys(0))[:, :, own]).all()


def case_dtypes() -> None:
    for dtype in ("float16", "bfloat16", "int8", "int4", "float64") if FULL else ():
        both = Both(dtype)
        for n in (20, 1):
            both.attend(n)


def case_shorter() -> None:
    """truncate(), keep() and clear(): as one cache does."""
    both = Both(layers=2)
    for layer in (0, 1):
        both.append(100, layer)
    both.append(3)  # a layer is ahead
    for cache in (both.one, both.all):
        cache.truncate([50, 41])
    both.append(30)
    both.append(30, 1)
    for cache in (both.one, both.all):
        cache.keep([[0, 3, 17, 20], [1, 2]], start=[50, 41])
    assert both.all.lengths(1) == both.one.lengths(1) == (54, 43)
    both.attend(33)
    for cache in (both.one, both.all):
        cache.clear()
    both.attend(3)
    both.all.clear()
    k = both.drawn(KV, 8)
    both.all.append(0, k, k)
    both.all.append(1, *[k[:, :, :4]] * 2, shard="contiguous")
    assert both.all.ranks == 1 or "expected tokens that lie alike" in refused(lambda: both.all.truncate([5, 5]))
    both.all.clear()  # wherever they lie
    assert both.all.lengths(0) == both.all.lengths(1) == (0, 0)


def case_files() -> None:
    """What was saved goes on as it was; other numbers of ranks, and other files, are told."""
    both, folder = Both(), Path(os.environ["DROPINS"])
    both.attend(37)
    both.shard(20, "zigzag")
    both.all.save(folder / "cache.safetensors")
    both.all = sd.KVCache.load(folder / "cache.safetensors")
    both.attend(40)
    both.all.save(folder / f"{'b' if dist.get_rank() else 'a'}.safetensors")
    said = refused(lambda: sd.KVCache.load(folder / "none.safetensors"))
    assert "no such file" in said
    ranks, rank, last = dist.get_world_size(), dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    own = folder / f"cache.{rank}-of-{ranks}.safetensors"
    part, k = both.all._local, both.drawn(KV, 1)
    both.all.append(0, k, k)
    drawn = torch.get_rng_state()
    if last:
        part.save_with = full  # type: ignore[method-assign]
    before = own.read_bytes()
    said = refused(lambda: both.all.save(folder / "cache.safetensors"), sl.FileError)
    assert said.endswith("No space left.") and said.startswith("x: " if last else "group: ") and "x: No space" in said
    if last:
        del part.save_with
    assert not last or own.read_bytes() == before
    if ranks > 1:
        said = refused(lambda: sd.KVCache.load(folder / "cache.safetensors"))
        assert "stamp: expected the same in every process" in said or "tokens: expected the same" in said, said
    both.all.save(folder / "cache.safetensors")
    assert torch.equal(torch.get_rng_state(), drawn)
    dist.barrier()
    assert not [x for x in folder.iterdir() if x.name.startswith(".cache")]
    said = refused(lambda: sl.KVCache.load(own), sl.FileError)
    assert f"is the part of rank {rank} of {ranks} of a cache over ranks" in said
    assert "; speedlight.distributed.KVCache.load('cache.safetensors') reads it, on" in said
    said = refused(lambda: sd.KVCache.load(folder / f"cache.0-of-{ranks}.safetensors"), sl.FileError)
    assert "speedlight.distributed.KVCache.load('cache.safetensors') reads it" in said
    if not rank:
        both.one.save(folder / "whole.safetensors")
    dist.barrier()
    said = refused(lambda: sd.KVCache.load(folder / "whole.safetensors"), sl.FileError)
    assert "got a whole cache. speedlight.KVCache.load('whole.safetensors') reads it" in said
    if ranks > 1:
        alone = dist.new_subgroups(1)[0]
        said = refused(lambda: sd.KVCache.load(folder / "cache.safetensors", group=alone))
        assert f"expected files of 1 ranks, as this group has; got those of {ranks}. Load it in" in said
        both.all.save(folder / "again.safetensors")
        name = f"{dist.get_rank()}-of-{ranks}.safetensors"
        if dist.get_rank():
            (folder / f"again.{name}").replace(folder / f"cache.{name}")
        dist.barrier()
        assert "stamp: expected the same in every process" in refused(
            lambda: sd.KVCache.load(folder / "cache.safetensors")
        )


def case_differences() -> None:
    """What differs between ranks is told on every one, and nothing is done."""
    rank, both = dist.get_rank(), Both(layers=2)
    both.append(9, 1)
    both.attend(9)
    last = rank == dist.get_world_size() - 1 > 0
    q, k = both.drawn(HEADS, 2), both.drawn(KV, 2)
    calls = {
        "q": lambda: both.all.attend(0, q[:, :, : 1 + last]),
        "k": lambda: both.all.append(0, k[:, :, : 1 + last], k[:, :, : 1 + last]),
        "layer": lambda: both.all.append(int(last), k, k),
        "entries of v": lambda: both.all.append(0, k, k + last),
        "entries of q": lambda: both.all.attend(0, q + last, k, k),
        "new_lengths": lambda: both.all.append(0, k, k, new_lengths=[1, 1 + last]),
        "scale": lambda: both.all.attend(0, q, scale=1.0 + last),
        "mask": lambda: both.all.attend(0, q, mask=sl.window(4 + last, 0)),
        "score": lambda: both.all.attend(0, q, score=sl.alibi([1.0, 2.0, 3.0, 4.0 + last])),
        "sink_logits": lambda: both.all.attend(0, q, sink_logits=[1.0, 2.0, 3.0, 4.0 + last]),
        "length": lambda: both.all.truncate(3 + last),
        "start": lambda: both.all.keep([0], start=1 + last),
        "call": lambda: both.all.attend(0, q) if last else both.all.append(0, k, k),
        "head_dim": lambda: sd.KVCache(**{**SIZES, "head_dim": 16 + last}),
    }
    for x in (torch.float32, torch.bfloat16):  # what lies past a sequence's end is nobody's
        padded = torch.where(torch.arange(2)[:, None] < 1, k, k + 1).to(x)
        assert entries_of((1, 1), k=padded) == entries_of((1, 1), k=k.to(x)) != entries_of((1, 2), k=padded)
    for name, call in calls.items() if dist.get_world_size() > 1 else ():
        said = refused(call)
        assert said.startswith(f"{name}: expected the same in every process; got "), (name, said)
    both.all.truncate(9)
    both.one.truncate(9)
    both.attend(4)
    if dist.get_world_size() > 1:
        said = refused(lambda: both.all.append(0, k, k[:, :, : 2 - last]))
        assert "v: expected 2 tokens, as k has; got 1" in said and said.startswith("v: " if last else "group: rank")
        if last:  # as if the others had gone on where this rank failed
            both.all._placed[0] = [grown(x, 1, 16) for x in both.all._placed[0]]
        said = refused(lambda: both.all.attend(0, q))
        assert said.startswith("stored tokens: expected the same") and said.endswith("a length that all ranks have.")


def case_too_many() -> None:
    """What does not fit is refused on every rank, before anything is written on any."""
    both = Both()
    both.attend(390)
    before, own = both.all.counts(0), both.all.keys(0).copy()
    k = both.drawn(KV, 11)
    for call in (lambda: both.all.append(0, k, k), lambda: both.all.attend(0, both.drawn(HEADS, 11), k, k)):
        try:
            call()
        except sl.CacheFull as error:
            assert (error.needed, error.free) == (11, 10)
        else:
            raise AssertionError
    small = sd.KVCache(**SIZES | {"capacity": 40}, piece=4)
    if small.ranks > 1:
        x = torch.ones(BATCH, KV, int(small.rank == 0), DIM)
        said = refused(lambda: [small.append(0, x, x, shard="contiguous") for _ in range(40)])
        assert "1 tokens need room on rank 0, 0 of its" in said and small.counts(0)[0] == small.length(0)
    assert both.all.counts(0) == before and (both.all.keys(0) == own).all()
    both.attend(10)


def case_failures() -> None:
    """A rank that fails when all have agreed: the others hear of it, and every cache is as it was."""
    both = Both()
    both.attend(20)
    before, own = both.all.counts(0), both.all.keys(0).copy()
    last = dist.get_rank() == dist.get_world_size() - 1
    n = 16 * dist.get_world_size()  # some of them are the last rank's
    put, q, k = both.all._local.append, both.drawn(HEADS, n), both.drawn(KV, n)

    def interrupted(*given: Any, **options: Any) -> None:
        put(*given, **options)
        raise KeyboardInterrupt

    if last:
        both.all._local.append = interrupted  # type: ignore[method-assign]
    try:
        both.all.attend(0, q, k, k)
    except KeyboardInterrupt:
        assert last
    except sl.Error as error:
        assert not last and "failed, and says why" in str(error)
    else:
        raise AssertionError
    assert both.all.counts(0) == before and (both.all.keys(0) == own).all()
    if last:
        del both.all._local.append
    both.attend(3)


def full(*_: Any) -> None:
    raise sl.FileError("x: No space left.")


def refused(call: Any, kind: type[Exception] = sl.Error) -> str:
    """Returns what the error of a call says."""
    return str(error_of(call, kind))
