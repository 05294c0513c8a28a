"""flash-attn 3's calls (its module flash_attn_interface): other arguments from the fourth on than flash-attn 2's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import ArgumentError, merge
from ..adapting import Library, public
from ..arrays.torch_tensors import in_grad_mode
from .caches import Cache, New, attend_cache, check_given
from .kernels import sum_rows, write_gradients
from .options import OTHER_ORDER, V3, check_tensors, check_written, options_of, unpacked
from .sequences import Side, attend, read_lengths

_OVER_CACHE = Library(
    "flash-attn 3, over a cache",
    refused=dict.fromkeys(("cu_seqlens_k", "seqused_q"), "Over a cache, lengths are seqused_k and cu_seqlens_q."),
)
__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


@public(leaves_graph=False)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attends as flash_attn_func of flash-attn 3 does.

    Args:
        q: (batch, seqlen, nheads, headdim).
        k: (batch, seqlen_k, nheads_k, headdim).
        v: (batch, seqlen_k, nheads_k, headdim_v).
        softmax_scale: factor of the scores. Default 1/sqrt(headdim), with qv 1/sqrt(headdim + headdim_v).
        causal, window_size, softcap: as speedlight.flash_attn.flash_attn_func() has them.
        qv: (batch, seqlen, nheads, headdim_v): scores are of q·k + qv·v. Keys and values are copied for that.
        q_descale, k_descale, v_descale, attention_chunk: refused.
        num_splits, pack_gqa, deterministic, sm_margin: mean nothing here.
        return_attn_probs: also return log-sum-exps (and nothing else).

    Returns:
        out (batch, seqlen, nheads, headdim_v), or (out, softmax_lse (batch, nheads, seqlen)), -inf in a row that sees
        nothing. Gradients flow.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.flash_attn
    >>> q, k, v = torch.ones(2, 5, 8, 16), torch.ones(2, 7, 2, 16), torch.ones(2, 7, 2, 24)
    >>> speedlight.flash_attn.v3.flash_attn_func(q, k, v, None, True).shape
    torch.Size([2, 5, 8, 24])
    """
    check_tensors({"q": q, "k": k, "v": v}, {"qv": qv}, {}, strict=qv is not None, hint=OTHER_ORDER)
    _refuse(q_descale, k_descale, v_descale, attention_chunk)
    q, k = absorb(q, k, v, qv)
    options = options_of(q, softmax_scale, causal, window_size, softcap)
    return attend(q, k, v, Side("q"), Side("k"), options, return_attn_probs)


@public(leaves_graph=False)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Calls flash_attn_func() with one tensor: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, heads, headdim)
    with num_heads_q heads of queries, then as many of keys as of values.

    >>> import torch, speedlight.flash_attn
    >>> speedlight.flash_attn.v3.flash_attn_qkvpacked_func(torch.ones(2, 5, 12, 16), num_heads_q=8).shape
    torch.Size([2, 5, 8, 16])
    """
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4:
        q, k, v = unpacked(qkv, "qkv", 3)
    else:
        left = qkv.shape[2] - (num_heads_q or 0)
        if num_heads_q is None or left < 2 or left % 2:
            raise ArgumentError(
                f"num_heads_q: expected heads of queries among the {qkv.shape[2]} of qkv, and an even number left; got "
                f"{num_heads_q}."
            )
        q, k, v = qkv.split([num_heads_q, left // 2, left // 2], dim=2)
    _refuse(q_descale, k_descale, v_descale, attention_chunk)
    options = options_of(q, softmax_scale, causal, window_size, softcap)
    return attend(q, k, v, Side("q"), Side("k"), options, return_attn_probs)


@public(leaves_graph=False)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attends within sequences of their own lengths, as flash_attn_func() within a batch.

    Args:
        q: (total_q, nheads, headdim), or (batch, seqlen, nheads, headdim) where cu_seqlens_q is None.
        k, v: the same of keys and values, by cu_seqlens_k.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of the sequences, from 0 to the total.
        max_seqlen_q, max_seqlen_k: say nothing that offsets do not say.
        seqused_q, seqused_k: (batch,): of each sequence only so many count. Rows of out past them are 0, their
            log-sum-exps -inf.
        The others are flash_attn_func()'s.

    Returns:
        out, shaped as q with headdim_v last, or (out, softmax_lse): (nheads, total_q), or (batch, nheads, seqlen).

    >>> import torch, speedlight.flash_attn
    >>> q, offsets, used = torch.ones(7, 8, 16), torch.tensor([0, 3, 7]), torch.tensor([2, 4])
    >>> out = speedlight.flash_attn.v3.flash_attn_varlen_func(q, q, q, offsets, offsets, 4, 4, used, used)
    >>> out.sum((1, 2)).tolist()
    [128.0, 128.0, 0.0, 128.0, 128.0, 128.0, 128.0]
    """
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    check_tensors({"q": q, "k": k, "v": v}, {"qv": qv}, ends | used, strict=qv is not None, hint=OTHER_ORDER)
    _refuse(q_descale, k_descale, v_descale, attention_chunk)
    q, k = absorb(q, k, v, qv)
    options = options_of(q, softmax_scale, causal, window_size, softcap)
    queries, keys = Side("q", cu_seqlens_q, seqused_q), Side("k", cu_seqlens_k, seqused_k)
    return attend(q, k, v, queries, keys, options, return_attn_probs)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Joins the attention over several sets of keys.

    Args:
        out_partial: (splits, batch, seqlen, nheads, headdim).
        lse_partial: (splits, batch, seqlen, nheads), natural logarithms.
        out: where to write the first result.
        out_dtype: its dtype, if there is no out. Default out_partial's.

    Returns:
        (out (batch, seqlen, nheads, headdim), softmax_lse (batch, seqlen, nheads)). There are no gradients.

    >>> import torch, speedlight.flash_attn
    >>> out, lse = speedlight.flash_attn.v3.flash_attn_combine(torch.ones(3, 2, 5, 8, 16), torch.zeros(3, 2, 5, 8))
    >>> out.shape, round(lse[0, 0, 0].item(), 4)
    (torch.Size([2, 5, 8, 16]), 1.0986)
    """
    if out_dtype is not None and not out_dtype.is_floating_point:
        raise ArgumentError(f"out_dtype: expected a dtype of floats; got {out_dtype}.")
    check_tensors({"out_partial": out_partial, "lse_partial": lse_partial}, {"out": out}, {}, strict=True)
    found, lse = merge(list(out_partial), list(lse_partial))
    if out is None:
        return found.to(out_dtype or out_partial.dtype), lse
    check_written("out", out, found.shape)
    if out_dtype is not None and out.dtype != out_dtype:
        raise ArgumentError(f"out: expected {out_dtype}, as out_dtype says; got {out.dtype}.")
    return out.copy_(found), lse


@public(leaves_graph=False)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Puts new tokens into a cache in place, then attends, as flash-attn 3's flash_attn_with_kvcache does.

    Args:
        q: (batch, seqlen, nheads, headdim), or (total_q, nheads, headdim) beside cu_seqlens_q.
        k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad: as
            speedlight.flash_attn.flash_attn_with_kvcache() has them; k and v are packed beside cu_seqlens_k_new.
        page_table: (batch, most pages), as block_table there; beside cache_batch_idx rows of it are picked.
        qv: shaped as q with headdim_v last: scores are of q·k + qv·v. The cache is copied for that.
        rotary_seqlens: (batch,): where rotary positions begin instead of at cache_seqlens.
        scheduler_metadata, num_splits, pack_gqa, sm_margin, max_seqlen_q: mean nothing here.
        The others are flash_attn_func()'s.

    Returns:
        out; or (out, softmax_lse, and two empty tensors, where flash-attn 3 has the results of splits).

    Raises:
        speedlight.CacheFull: new tokens do not fit, contiguous or paged.
        speedlight.Error: the argument, what was expected and what came. Nothing has been written then.

    >>> import torch, speedlight.flash_attn
    >>> pages, table = torch.zeros(4, 8, 2, 16), torch.tensor([[3, 0], [1, 2]], dtype=torch.int32)
    >>> q, k = torch.ones(2, 1, 8, 16), torch.ones(2, 1, 2, 16)
    >>> put = speedlight.flash_attn.v3.flash_attn_with_kvcache
    >>> put(q, pages, pages.clone(), k, k, cache_seqlens=9, page_table=table).shape, pages[0, 1, 0, 0].item()
    (torch.Size([2, 1, 8, 16]), 1.0)
    """
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, "page_table")
    new = New(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    check_given(q, cache, new, qv, cu_seqlens_q, OTHER_ORDER)
    _refuse(q_descale, k_descale, v_descale, attention_chunk)
    options = options_of(q, softmax_scale, causal, window_size, softcap)
    if qv is not None:
        check_absorbed(q, v_cache, qv)
        options.setdefault("scale", (q.shape[-1] + qv.shape[-1]) ** -0.5)
    out, lse = attend_cache(q, cu_seqlens_q, cache, new, qv, options)
    return (out, lse, out.new_empty(0), out.new_empty(0)) if return_softmax_lse else out


def get_scheduler_metadata(*given: Any, **named: Any) -> Tensor:
    """Returns what flash_attn_with_kvcache(scheduler_metadata=…) takes: nothing, since nothing is computed ahead here.

    >>> import torch, speedlight.flash_attn
    >>> speedlight.flash_attn.v3.get_scheduler_metadata(2, 1, 64, 8, 2, 16, torch.tensor([5, 7])).shape
    torch.Size([0])
    """
    devices = [x.device for x in (*given, *named.values()) if isinstance(x, Tensor)]
    return torch.empty(0, dtype=torch.int32, device=devices[0] if devices else None)


def absorb(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns queries and keys of which each score is q·k + qv·v."""
    if qv is None:
        return q, k
    check_absorbed(q, v, qv)
    return torch.cat((q, qv), -1), torch.cat((k, v), -1)


def check_absorbed(q: Tensor, v: Tensor, qv: Tensor) -> None:
    """Raises unless qv goes with q and v."""
    shape = (*q.shape[:-1], v.shape[-1])
    if qv.shape != shape:
        raise ArgumentError(f"qv: expected shape {shape}, as q with v's dim last; got {tuple(qv.shape)}. {OTHER_ORDER}")


def _refuse(q_descale: Any, k_descale: Any, v_descale: Any, attention_chunk: Any) -> None:
    V3.refuse(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk or None)


@in_grad_mode(False)
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    attention_chunk: int = 0, softcap: float = 0.0, rotary_interleaved: bool = True, scheduler_metadata: Any = None,
    num_splits: int = 1, pack_gqa: bool | None = None, sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (out, softmax_lse, and two empty tensors)."""
    window = window_size_left, window_size_right
    if out_ is not None:
        check_written("out_", out_, (*q.shape[:-1], v.shape[-1]))
    if any([x is not None for x in (k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos)]):
        _OVER_CACHE.refuse(cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q)
        out, lse, *_ = flash_attn_with_kvcache(
            q, k, v, k_new, v_new, qv, rotary_cos, rotary_sin, seqused_k, kv_batch_idx, leftpad_k, page_table,
            cu_seqlens_q, cu_seqlens_k_new, max_seqlen_q, seqlens_rotary, q_descale, k_descale, v_descale,
            softmax_scale, causal, window, attention_chunk, softcap, rotary_interleaved, return_softmax_lse=True,
        )  # fmt: skip
    else:
        out, lse = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, softmax_scale,
            causal, qv, q_descale, k_descale, v_descale, window, attention_chunk, softcap, return_attn_probs=True,
        )  # fmt: skip
    out = out if out_ is None else out_.copy_(out)
    return out, lse, out.new_empty(0), out.new_empty(0)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
    deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv; returns the row sums of dout · out: (batch, heads, q_len), or (heads, total)."""
    options = options_of(q, softmax_scale, is_causal, (window_size_left, window_size_right), softcap)
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None) or (packed and (sequed_q is not None or sequed_k is not None)):
        raise ArgumentError(
            "cu_seqlens_q: expected both of cu_seqlens_q and cu_seqlens_k without sequed_q and sequed_k, or neither. "
            "flash_attn_varlen_func() has gradients of all of them."
        )
    if packed:
        options |= {"layout": "lhd", "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    else:
        q_lens, k_lens = read_lengths(Side("q", None, sequed_q), q), read_lengths(Side("k", None, sequed_k), k)
        starts = [b - a for a, b in zip(q_lens, k_lens, strict=False)]
        options |= {"layout": "blhd", "q_lengths": q_lens, "k_lengths": k_lens, "q_start": starts}
    write_gradients((q, k, v, out, softmax_lse, dout), (dq, dk, dv), options)
    sums = sum_rows(dout, out)
    return sums.transpose(-1, -2)
