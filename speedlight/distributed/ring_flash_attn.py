"""ring-flash-attention's calls, on attention() of shards: its names, its order of arguments and its meaning.

`ring_…`: each process has one chunk of the sequence; `zigzag_ring_…`: chunks from both ends; `stripe_…`: every n-th
token. q, k and v are a process's shards, of one length in all processes; gradients flow.

>>> import torch, torch.distributed as dist
>>> from speedlight.distributed.ring_flash_attn import zigzag_ring_flash_attn_func
>>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
>>> q = k = v = torch.ones(1, 6, 2, 16)  # (batch, tokens of this process, heads, head_dim)
>>> zigzag_ring_flash_attn_func(q, k, v, causal=True).shape
torch.Size([1, 6, 2, 16])
>>> dist.destroy_process_group()
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from ..flash_attn.options import check_tensors, dropout_of, infinite_where_empty, options_of, unpacked
from ..flash_attn.sequences import PADDED, Side, check_sides
from ..problem.checks import check_flag, packed_offsets
from ..problem.options import Options
from ..problem.shardings import Shard
from ..problem.signatures import public
from .attending import Given, attended
from .groups import peers_of

__all__ = [
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]


_OFFSETS = {"cu_seqlens": "Tensor", "max_seqlen": "int"}
_FORMS = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_varlen_func": ("q", "k", "v"),
    "flash_attn_varlen_kvpacked_func": ("q", "kv"),
    "flash_attn_varlen_qkvpacked_func": ("qkv",),
}


def _calls(shard: Shard, prefix: str) -> tuple[Callable[..., Any], ...]:
    """All calls of one sharding."""
    return tuple([_make_call(shard, prefix + name, tensors) for name, tensors in _FORMS.items()])


def _make_call(shard: Shard, name: str, tensors: tuple[str, ...]) -> Callable[..., Any]:
    """Makes a call that takes these tensors, of packed sequences their offsets, and then what _attended() takes."""
    own, positional = inspect.signature(_attended), inspect.Parameter.POSITIONAL_OR_KEYWORD
    types = dict.fromkeys(tensors, "Tensor") | (_OFFSETS if "varlen" in name else {})
    first = [inspect.Parameter(x, positional, annotation=kind) for x, kind in types.items()]
    signature = own.replace(parameters=[*first, *list(own.parameters.values())[3:]])

    def call(*args: Any, **named: Any) -> Any:
        options = signature.bind(*args, **named).arguments
        offsets, _ = options.pop("cu_seqlens", None), options.pop("max_seqlen", None)
        return _attended(tuple([options.pop(x) for x in tensors]), shard, offsets, **options)

    call.__name__ = call.__qualname__ = name
    call.__doc__, vars(call)["__signature__"] = _attended.__doc__, signature
    return call


@public()
def _attended(
    given: tuple[Any, ...], shard: Shard, cu_seqlens: Any, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None,
) -> Any:  # fmt: skip
    """Attends as flash-attn's call of this name does, over a sharded sequence, or over packed ones, each of which is
    sharded by itself. Every process takes part, even if its own arguments are wrong: the others wait for it.

    Args:
        q: (batch, tokens of this process, nheads, headdim), packed (tokens of this process, nheads, headdim): of every
            sequence this process's shard, one after the other.
        k, v: the same of nheads_k heads, which divide nheads. kv: both in one tensor, (…, 2, nheads_k, headdim). qkv:
            all three, (…, 3, nheads, headdim).
        cu_seqlens: (sequences + 1,): offsets of the shards, the same in all processes.
        max_seqlen: says nothing that offsets do not say.
        dropout_p: 0; attention() of shards drops nothing.
        softmax_scale, causal, window_size, alibi_slopes: as for speedlight.flash_attn.flash_attn_func(), of the
            whole sequence; to alibi_slopes flows each process's share.
        deterministic: means nothing here: every call is.
        return_attn_probs: also return log-sum-exps, and None.
        group: a process group of torch.distributed. Default all processes.

    Returns:
        out, shaped as q; or (out, softmax_lse (batch, nheads, tokens of this process), packed without batch, None).

    Raises:
        speedlight.Error: the argument, what was expected and what came; it differs between processes; one is gone.
    """
    peers, cuts, options, error = peers_of(group, None), None, Options(), None
    q = k = v = None
    try:
        q, k, v = _separate(given, packed=cu_seqlens is not None)
        check_tensors({"q": q, "k": k, "v": v}, {}, {"cu_seqlens": cu_seqlens}, strict=True)
        check_flag("return_attn_probs", return_attn_probs)
        more: dict[str, Any] = {"layout": "blhd"}
        if cu_seqlens is None:
            check_sides(q, k, v, *PADDED)
        else:
            check_sides(q, k, v, Side("q", cu_seqlens), Side("k", cu_seqlens))
            cuts = tuple([peers.ranks * n for n in packed_offsets("cu_seqlens", cu_seqlens, q.shape[0])])
            more = {"layout": "lhd", "cu_seqlens_q": list(cuts), "cu_seqlens_k": list(cuts)}
        if dropout_of(dropout_p):
            raise UnsupportedError(f"dropout_p: expected 0, as shards drop no weights; got {dropout_p}.")
        options = Options(
            **more, **options_of(q, softmax_scale, causal, window_size, 0.0, alibi_slopes, 0.0, cu_seqlens)
        )
    except Exception as found:  # which the others are told
        error = found
    out, lse = attended(Given(q, k, v, shard, "ring", False, return_attn_probs, peers, cuts), options, error)
    return (out, infinite_where_empty(lse), None) if return_attn_probs else out


def _separate(given: tuple[Any, ...], *, packed: bool) -> tuple[Any, ...]:
    """q, k and v."""
    match given:
        case (qkv,):
            return unpacked(qkv, "qkv", 3, packed)
        case (q, kv):
            return q, *unpacked(kv, "kv", 2, packed)
    return given


(
    ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func, ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func,
) = _calls("contiguous", "ring_")  # fmt: skip
(
    zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _calls("zigzag", "zigzag_ring_")  # fmt: skip
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func, *_ = _calls(
    "stripe", "stripe_"
)
