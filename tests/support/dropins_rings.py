"""Rings of others on several ranks: ring-flash-attention's calls, and one of somebody else's on flash_attn.

A function here that begins with `case_` is run by tests/support/dropins.py.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sharded_cache import FULL, refused
from whole_tensors import close, drawn_tensors, shard, traced

import speedlight.distributed as sd
import speedlight.flash_attn
from speedlight.flash_attn import flash_attn_func, flash_attn_varlen_func


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
    said = refused(lambda: calls.ring_flash_attn_kvpacked_func(q, torch.stack((k, v), 2) if dist.get_rank() else k))
    assert "kv: expected a tensor of shape (batch, seqlen, 2, nheads, headdim)" in said


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
