"""What test_distributed_dropins.py runs on several ranks: forked from one process, which has imported and compiled.

    python tests/dropins.py RANKS [RANKS …]

Every function here that begins with `case_` is run by every rank; a line for each says how it went.
"""

from __future__ import annotations

import fcntl
import inspect
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as theirs
import torch.nn.functional as F
from tolerance import assert_within
from torch.distributed.device_mesh import init_device_mesh

import speedlight as sl
import speedlight.distributed as sd
import speedlight.flash_attn
import speedlight.torch
import speedlight.transformers
from speedlight import reference
from speedlight.cpu import compile as kernels
from speedlight.distributed import positions
from speedlight.distributed.placement import grown
from speedlight.flash_attn import flash_attn_func, flash_attn_varlen_func

FULL = os.environ.get("SPEEDLIGHT_FULL") == "1"
TIMEOUT = 120  # seconds; nothing here waits for it
BATCH, HEADS, KV, DIM = 2, 4, 2, 16
SIZES: dict[str, Any] = {"layers": 1, "batch": BATCH, "kv_heads": KV, "head_dim": DIM, "capacity": 400}


class Both:
    """A cache of all ranks, and one of the whole sequence on each; tokens are drawn alike on every rank."""

    def __init__(self, dtype: str = "float32", layers: int = 1) -> None:
        sizes = SIZES | {"layers": layers, "dtype": dtype}
        self.one, self.all = sl.KVCache(**sizes), sd.KVCache(**sizes, piece=16)
        self.dtype = getattr(torch, "float32" if dtype == "int8" else dtype)
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
        limits = reference.error_bound(q.float().numpy(), keys, values, int8=self.all.dtype == "int8")
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
    for n, lengths in ((40, None), (1, None), (40, [40, 4]), (12, None)):
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
    for dtype in ("float16", "bfloat16", "int8", "float64") if FULL else ():
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
    alone = dist.new_subgroups(1)[0]
    said = refused(lambda: sd.KVCache.load(folder / "cache.safetensors", group=alone))
    ranks = dist.get_world_size()
    assert ranks == 1 or f"expected files of 1 ranks, as this group has; got those of {ranks}. Load it in" in said
    if ranks > 1:
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
    for name, call in calls.items() if dist.get_world_size() > 1 else ():
        said = refused(call)
        assert said.startswith(f"{name}: expected the same in every process; got "), (name, said)
    both.all.truncate(9)
    both.one.truncate(9)
    both.attend(4)
    if dist.get_world_size() > 1:
        said = refused(lambda: both.all.append(0, k, k[:, :, : 2 - last]))
        assert "v: expected 2 tokens, as k has; got 1" in said and said.startswith("v: " if last else "group: expected")
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
    put, q, k = both.all._local.append, both.drawn(HEADS, 3), both.drawn(KV, 3)

    def interrupted(*given: Any, **options: Any) -> None:
        put(*given, **options)
        raise KeyboardInterrupt

    both.all._put = (lambda *_: interrupted(0, k, k)) if last else both.all._put  # type: ignore[method-assign]
    try:
        both.all.attend(0, q, k, k)
    except KeyboardInterrupt:
        assert last
    except sl.Error as error:
        assert not last and "failed, and says why" in str(error)
    else:
        raise AssertionError
    assert both.all.counts(0) == before and (both.all.keys(0) == own).all()
    del both.all._put
    both.attend(3)


# --- PyTorch's ring


def case_context_parallel() -> None:
    """PyTorch's context_parallel() and its scaled_dot_product_attention(), forward and backward."""
    ranks = dist.get_world_size()
    if not FULL:  # DTensor's first operation imports a compiler in every process
        return
    mesh = init_device_mesh("cpu", (ranks,))
    for causal in (True, False):
        q, k, v, flow = drawn_tensors(24 * ranks)
        want = gradients(q, k, v, flow, causal=causal)
        parts = [x.clone() for x in (q, k, v, flow)]
        theirs._cp_options.enable_load_balance = causal
        named = {"buffers": parts, "buffer_seq_dims": [2] * 4, "no_restore_buffers": set(parts)}
        with sd.context_parallel(mesh, **named):
            inputs = [x.requires_grad_() for x in parts[:3]]
            out = F.scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True, scale=0.3)
            out.backward(parts[3])
        got = [out.detach(), *(x.grad for x in inputs)]
        close(theirs.context_parallel_unshard(mesh, got, [2] * 4), want)
    theirs._cp_options.enable_load_balance = True
    assert not [x for x in theirs.custom_ops if "for_cpu" in str(x)]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    with sd.context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
        ring = theirs.custom_ops[flash]
        assert "attn_mask: expected none" in refused(lambda: ring(flash, (q, q, q), {"attn_mask": flow}))
        assert "dropout_p: expected none" in refused(lambda: ring(flash, (q, q, q, 0.1, True), {}))


def case_ring_ops() -> None:
    """The private functions themselves, by either way of passing blocks on."""
    ranks, ops = dist.get_world_size(), sd.ring_ops()
    q, k, v, flow = drawn_tensors(24 * ranks)
    want = gradients(q, k, v, flow, causal=True)
    group, scale = dist.group.WORLD, 0.3
    for method in ("allgather", "alltoall"):
        theirs.set_rotate_method(method)
        mine = [shard(x, "zigzag") for x in (q, k, v, flow)]
        out, lse = theirs._templated_ring_attention(group, 2, ops.forward, *mine[:3], is_causal=True, scale=scale)
        found = theirs._templated_ring_attention_backward(
            group, 2, ops.backward, mine[3], "grad_out", *mine[:3], out, lse, True, scale=scale
        )
        close([out, *found], [shard(x, "zigzag") for x in want])
    theirs.set_rotate_method("allgather")


# --- ring-flash-attention


def case_ring_flash_attn() -> None:
    """Its calls, beside flash_attn_func() over the whole sequence; packed sequences are sharded one by one."""
    ranks, slopes = dist.get_world_size(), torch.tensor([0.5, 0.25, 0.125, 0.1])
    q, k, v, flow = (x.transpose(1, 2).contiguous() for x in drawn_tensors(24 * ranks))
    options: dict[str, Any] = {"softmax_scale": 0.3, "causal": True}
    options |= {"window_size": (19, 0), "alibi_slopes": slopes} if FULL else {}
    want = traced(flash_attn_func, (q, k, v), flow, **options)
    calls = sd.ring_flash_attn
    for name, kind in (("ring", "contiguous"), ("zigzag_ring", "zigzag"), ("stripe", "stripe")):
        own = [shard(x, kind, 1) for x in (q, k, v)]
        own_flow, own_want = shard(flow, kind, 1), [shard(x, kind, 1) for x in want]
        close(traced(getattr(calls, f"{name}_flash_attn_func"), own, own_flow, **options), own_want)
        kv = traced(
            getattr(calls, f"{name}_flash_attn_kvpacked_func"), (own[0], torch.stack(own[1:], 2)), own_flow, **options
        )
        close([*kv[:2], *kv[2].unbind(2)], own_want)
    qkv = torch.stack([shard(x, "zigzag", 1) for x in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))], 2)
    out, lse, none = calls.zigzag_ring_flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    wide = [x.repeat(1, 1, 2, 1) for x in (k, v)]
    expected, logs, _ = flash_attn_func(q, *wide, causal=True, return_attn_probs=True)
    close([out], [shard(expected, "zigzag", 1).double()])
    close([lse], [shard(logs, "zigzag", 2).double()])
    assert none is None
    said = refused(lambda: calls.ring_flash_attn_func(q, k, v, causal=dist.get_rank() > 0)) if ranks > 1 else "causal: "
    assert said.startswith("causal: ")
    assert "dropout_p: expected 0" in refused(lambda: calls.stripe_flash_attn_func(q, k, v, 0.1))
    said = refused(lambda: calls.ring_flash_attn_kvpacked_func(q, k if dist.get_rank() else torch.stack((k, v), 2)))
    assert ranks == 1 or "kv: expected a tensor of shape (batch, seqlen, 2, nheads, headdim)" in said


def case_ring_flash_attn_varlen() -> None:
    """Every sequence is cut for itself, as the package's own tests cut them."""
    ranks, calls = dist.get_world_size(), sd.ring_flash_attn
    local = [0, 5, 6, 20]
    ends = torch.tensor(local, dtype=torch.int32)
    cuts = [ranks * n for n in local]
    q, k, v, flow = (x[0].transpose(0, 1).contiguous() for x in drawn_tensors(cuts[-1]))
    whole = torch.tensor(cuts, dtype=torch.int32)
    longest = max(b - a for a, b in itertools.pairwise(cuts))
    options: dict[str, Any] = {"causal": True} | ({"window_size": (9, 0)} if FULL else {})
    want = traced(flash_attn_varlen_func, (q, k, v), flow, whole, whole, longest, longest, **options)
    for name, kind in (("ring", "contiguous"), ("zigzag_ring", "zigzag")):

        def own(x: torch.Tensor, kind: str = kind) -> torch.Tensor:
            return torch.cat([shard(x[a:b], kind, 0) for a, b in itertools.pairwise(cuts)])

        call, mine = getattr(calls, f"{name}_flash_attn_varlen_func"), [own(x) for x in (q, k, v)]
        close(traced(call, mine, own(flow), ends, longest, **options), [own(x) for x in want])
        packed = getattr(calls, f"{name}_flash_attn_varlen_kvpacked_func")
        out = packed(mine[0], torch.stack(mine[1:], 1), ends, longest, **options)
        close([out], [own(want[0])])
        qkv = torch.stack([mine[0], *(x.repeat(1, 2, 1) for x in mine[1:])], 1)
        out = getattr(calls, f"{name}_flash_attn_varlen_qkvpacked_func")(qkv, ends, longest, causal=True)
        assert out.shape == mine[0].shape


def traced(call: Any, given: Any, flow: torch.Tensor, *more: Any, **options: Any) -> list[torch.Tensor]:
    """What a call returns, and what flows back to its tensors, in float64."""
    inputs = [x.clone().requires_grad_() for x in given]
    out = call(*inputs, *more, **options)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, inputs, flow))]


def case_ring_on_flash_attn() -> None:
    """A ring of somebody else's on flash_attn's private functions, found and called as ring-flash-attention does."""
    speedlight.flash_attn.install()
    try:
        from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward
    finally:
        speedlight.flash_attn.uninstall()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, flow = (x.transpose(1, 2).contiguous() for x in drawn_tensors(24 * ranks))
    want = [shard(x, "contiguous", 1) for x in traced(flash_attn_func, (q, k, v), flow, softmax_scale=0.3, causal=True)]
    q, flow = (shard(x, "contiguous", 1) for x in (q, flow))
    blocks = [(x.chunk(ranks, 1)) for x in (k, v)]
    said = {
        "dropout_p": 0.0,
        "softmax_scale": 0.3,
        "window_size_left": -1,
        "window_size_right": -1,
        "alibi_slopes": None,
    }

    def filled(function: Any, **given: Any) -> Any:
        """By name, whatever the function's arguments are: None where it has no default, and no softcap."""
        spec = inspect.getfullargspec(function)
        defaults = spec.defaults or ()
        options = dict(zip(spec.args, (None,) * (len(spec.args) - len(defaults)) + defaults, strict=True))
        return function(**options | {"softcap": 0.0} | said | given)

    out = lse = None
    for source in range(rank + 1):  # as they come round; later ones are hidden
        at = {"k": blocks[0][source].contiguous(), "v": blocks[1][source].contiguous(), "causal": source == rank}
        block, logs, *_ = filled(_flash_attn_forward, q=q, return_softmax=False, **at)
        block, logs = block.float(), logs.transpose(1, 2).unsqueeze(-1)
        if out is None:
            out, lse = block, logs
        else:
            out, lse = out - F.sigmoid(logs - lse) * (out - block), lse - F.logsigmoid(lse - logs)
    lse = lse.squeeze(-1).transpose(1, 2).contiguous()
    total = [torch.zeros_like(x) for x in (q, k, v)]
    for source in range(rank + 1):
        at = {"k": blocks[0][source].contiguous(), "v": blocks[1][source].contiguous(), "causal": source == rank}
        part = [torch.empty_like(x) for x in (q, at["k"], at["v"])]
        named = dict(zip(("dq", "dk", "dv"), part, strict=True))
        filled(_flash_attn_backward, dout=flow, q=q, out=out, softmax_lse=lse, deterministic=False, **named, **at)
        for x, y in zip((total[0], *(x.chunk(ranks, 1)[source] for x in total[1:])), part, strict=True):
            x += y
    for x in total[1:]:
        dist.all_reduce(x)
    close([out, total[0], *(x.chunk(ranks, 1)[rank] for x in total[1:])], want)


# --- DeepSpeed


class SeqAllToAll(torch.autograd.Function):
    """DeepSpeed's: what is scattered along one dimension is gathered along the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        ctx.way = gather, scatter
        parts = [y.contiguous() for y in x.chunk(dist.get_world_size(), scatter)]
        found = [torch.empty_like(y) for y in parts]
        dist.all_to_all(found, parts)
        return torch.cat(found, gather)

    @staticmethod
    def backward(ctx: Any, flow: torch.Tensor) -> Any:
        return SeqAllToAll.apply(flow, *ctx.way), None, None


class DistributedAttention(torch.nn.Module):
    """DeepSpeed's calling convention: local_attn(query, key, value, *args, **kwargs) between two exchanges."""

    def __init__(self, local_attention: Any, sequence_process_group: Any, scatter_idx: int = 2, gather_idx: int = 0):
        super().__init__()
        self.local_attn, self.scatter_idx, self.gather_idx = local_attention, scatter_idx, gather_idx

    def forward(self, query: Any, key: Any, value: Any, batch_dim_idx: int, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (SeqAllToAll.apply(x, self.scatter_idx, self.gather_idx) for x in (query, key, value))
        context = self.local_attn(query, key, value, *args, **kwargs)
        return SeqAllToAll.apply(context, self.gather_idx, self.scatter_idx)


def case_deepspeed() -> None:
    """Whose heads a process has is known to scores and sinks, in both of its layouts."""
    ranks = dist.get_world_size()
    if HEADS % ranks:
        return
    dense = torch.rand(1, HEADS, 24 * ranks, 24 * ranks, generator=torch.Generator().manual_seed(3))
    options: dict[str, Any] = {"causal": True, "sink_logits": [1.0, -2.0, 0.5, 3.0]}
    alibi = sl.alibi([0.5, 0.25, 0.125, 0.1])
    options |= {"score": [sl.softcap(9.0), alibi, dense] if FULL else alibi}
    q, k, v, flow = drawn_tensors(24 * ranks)
    k, v = (x.repeat(1, 2, 1, 1) for x in (k, v))
    want = gradients(q, k, v, flow, **options)
    for batch_dim, order in ((0, (0, 2, 1, 3)), (1, (2, 0, 1, 3))):
        if not (FULL or batch_dim):
            continue
        length = 1 - batch_dim
        attend = sd.local_attention(batch_dim_idx=batch_dim, scale=0.3, **options)
        layer = DistributedAttention(attend, dist.group.WORLD, 2, length)
        own = [shard(x.permute(order), "contiguous", length) for x in (q, k, v)]
        mine = [shard(x.permute(order), "contiguous", length) for x in (flow, *want)]
        close(traced(layer, own, mine[0], batch_dim), mine[1:])
    said = refused(lambda: layer(*own, 1, torch.ones(1)))
    assert "argument 4: expected None; got Tensor" in said
    assert "layout: expected nothing" in refused(lambda: sd.local_attention(layout="bhld"))
    if not FULL:
        return
    causal = sd.local_attention(causal=True, mask=lambda b, h, i, j: (h % 2 == 0) | (i - j < 5))
    kept = causal(*(x.transpose(1, 2).chunk(ranks, 2)[dist.get_rank()] for x in (q, k, v)))
    whole = sl.attention(q, k, v, causal=True, mask=lambda b, h, i, j: (h % 2 == 0) | (i - j < 5))
    close([kept], [whole.chunk(ranks, 1)[dist.get_rank()].transpose(1, 2).double()])


# --- transformers


def case_transformers() -> None:
    """DeepSpeed's UlyssesSPAttentionHF around "speedlight": it drops every mask, so that position_ids tell what is
    packed. A whole model, of which every rank has a part of the tokens.
    """
    if not FULL or HEADS % dist.get_world_size():
        return
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    speedlight.transformers.register()
    core = ALL_ATTENTION_FUNCTIONS["speedlight"]
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=HEADS, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="speedlight")

    def ulysses(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value = (SeqAllToAll.apply(x, 1, 2) for x in (query, key, value))
        places = kwargs["position_ids"].contiguous()
        every = [torch.empty_like(places) for _ in range(dist.get_world_size())]
        dist.all_gather(every, places)
        context, weights = core(
            module, query, key, value, None, *args, **kwargs | {"position_ids": torch.cat(every, 1)}
        )
        return SeqAllToAll.apply(context, 1, 2), weights

    length = 24 * dist.get_world_size()
    ids = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(1))
    for places in (torch.arange(length), torch.arange(length) % 20):
        want = model(ids, position_ids=places[None], use_cache=False).logits
        ALL_ATTENTION_FUNCTIONS["speedlight"] = ulysses
        try:
            own = [shard(x, "contiguous", 1) for x in (ids, places[None])]
            got = model(own[0], position_ids=own[1], use_cache=False).logits
        finally:
            ALL_ATTENTION_FUNCTIONS["speedlight"] = core
        close([got], [shard(want, "contiguous", 1).double()])


def drawn_tensors(length: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v and what flows into out, the same on every rank."""
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(BATCH, n, length, DIM, generator=draw, dtype=dtype) for n in (HEADS, KV, KV, HEADS)]


def gradients(q: Any, k: Any, v: Any, flow: Any, **options: Any) -> list[torch.Tensor]:
    """out, dq, dk and dv of the specification, in float64."""
    arrays = [x.double().numpy() for x in (q, k, v)]
    out, lse = reference.attention(*arrays, scale=0.3, return_lse=True, **options)
    found = reference.backward(*arrays, out, lse, flow.double().numpy(), scale=0.3, **options)
    return [torch.from_numpy(x) for x in (out, *found)]


def shard(x: torch.Tensor, kind: Any, dim: int = 2) -> torch.Tensor:
    own = positions(x.shape[dim], dist.get_world_size(), kind)[dist.get_rank()]
    return x.index_select(dim, torch.tensor([i for run in own for i in run], dtype=torch.int64))


def close(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        torch.testing.assert_close(x.double(), y, atol=3e-6, rtol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def refused(call: Any) -> str:
    try:
        call()
    except sl.Error as error:
        return str(error)
    raise AssertionError("nothing was refused")


# --- processes


def run(rank: int, ranks: int, where: str, names: list[str]) -> int:
    """One rank: every case, up to one that fails."""
    torch.set_num_threads(1)
    make = kernels._make

    def make_in_turn(shape: Any) -> Any:
        with open(f"{where}/turn", "w") as turn:  # of ranks that need one kernel, one compiles it
            fcntl.flock(turn, fcntl.LOCK_EX)
            return make(shape)

    kernels._make = make_in_turn
    dist.init_process_group(
        "gloo", init_method=f"file://{where}/meeting", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
    wrong = 0
    for name in names:
        try:
            before = time.process_time()
            globals()[name]()
            said = "passed"
            if "TIMES" in os.environ:
                sys.stderr.write(f"{name} {time.process_time() - before:.2f}\n")
        except BaseException:
            said, wrong = traceback.format_exc(), wrong + 1
        text = said.replace("\n", "\\n")
        sys.stdout.write(f"{ranks} {rank} {name} {text}\n")
        sys.stdout.flush()
        if wrong:
            break  # and the others will miss this rank, not wait for it
        dist.barrier()
    dist.destroy_process_group()
    return wrong


def forked(ranks: int, names: list[str]) -> None:
    with tempfile.TemporaryDirectory() as where:
        os.environ["DROPINS"] = where
        children = []
        for rank in range(ranks):
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = run(rank, ranks, where, names)
                finally:
                    os._exit(code)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    wanted = [x for x in globals() if x.startswith("case_") and re.search(os.environ.get("CASE", ""), x)]
    for count in map(int, sys.argv[1:]):
        forked(count, wanted)
