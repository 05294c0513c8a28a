"""flash-attn 2's calls: its names, its order of arguments and its meaning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..adapting import public
from ..torch.attending import attention
from .caches import Cache, New, attend_cache, check_given
from .kernels import check_no_weights, read_paged_lengths
from .options import check_tensors, find_dropped, infinite_where_empty, options_of, unpacked
from .sequences import PADDED, Side, attend, attend_pages, check_offsets, check_sides


@public(leaves_graph=False)
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attends as flash-attn 2's flash_attn_func does, also on the CPU, in float32 and float64, and for any head dim.

    Args:
        q: (batch, seqlen, nheads, headdim).
        k, v: (batch, seqlen_k, nheads_k, headdim); nheads_k divides nheads.
        dropout_p: how likely each weight is dropped; drawn from PyTorch's default generator.
        softmax_scale: factor of the scores. Default 1/sqrt(headdim).
        causal: hides keys after the query; the last query is at the last key.
        window_size: (left, right): keys further away are hidden; negative: no limit on that side.
        softcap: c > 0: scores become c · tanh(s / c).
        alibi_slopes: (nheads,) or (batch, nheads): -slope · |distance| is added to scores. Gradients flow to them.
        deterministic: means nothing here: every call is.
        return_attn_probs: also return log-sum-exps and S_dmask.

    Returns:
        out, shaped as q; or (out, softmax_lse, S_dmask): log-sum-exps (batch, nheads, seqlen) in float32, +inf in a row
        that sees nothing (its out is 0), and the weights (batch, nheads, seqlen, seqlen_k), negative where they were
        dropped, or an empty tensor without dropout. Gradients flow, to and through softmax_lse, too. On a CPU with the
        dot instruction the log-sum-exps of bfloat16 are off by 1e-3 or so: of weights that are rounded.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.flash_attn
    >>> q, k, v = torch.ones(2, 5, 8, 16), torch.ones(2, 7, 2, 16), torch.ones(2, 7, 2, 16)
    >>> speedlight.flash_attn.flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 5, 8, 16])
    """
    check_tensors({"q": q, "k": k, "v": v}, {}, {}, strict=return_attn_probs is True)
    check_sides(q, k, v, *PADDED)
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    if not return_attn_probs:
        return attention(q, k, v, layout="blhd", **options)
    out, lse = attention(q, k, v, layout="blhd", return_lse=True, **options)
    return out, infinite_where_empty(lse), find_dropped(q, k, options)


@public(leaves_graph=False)
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Calls flash_attn_func() with queries, keys and values of one tensor, (batch, seqlen, 3, nheads, headdim).

    >>> import torch, speedlight.flash_attn
    >>> speedlight.flash_attn.flash_attn_qkvpacked_func(torch.ones(2, 5, 3, 8, 16)).shape
    torch.Size([2, 5, 8, 16])
    """
    q, k, v = unpacked(qkv, "qkv", 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@public(leaves_graph=False)
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Calls flash_attn_func() with keys and values of one tensor, (batch, seqlen_k, 2, nheads_k, headdim).

    >>> import torch, speedlight.flash_attn
    >>> speedlight.flash_attn.flash_attn_kvpacked_func(torch.ones(2, 5, 8, 16), torch.ones(2, 7, 2, 2, 16)).shape
    torch.Size([2, 5, 8, 16])
    """
    k, v = unpacked(kv, "kv", 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


@public(leaves_graph=False)
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attends within packed sequences, as flash_attn_func() within a batch.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim); beside block_table (pages, page_size, nheads_k, headdim), pages of any size,
            copied where gradients flow.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) offsets of the sequences, from 0 to the total.
        max_seqlen_q, max_seqlen_k: say nothing that offsets do not say.
        block_table: (batch, most pages): which pages hold a sequence.
        The others are flash_attn_func()'s; slopes (batch, nheads) are by sequence.

    Returns:
        out, shaped as q; with return_attn_probs (out, softmax_lse (nheads, total_q), an empty tensor).

    Raises:
        speedlight.Error: the argument, what was expected and what came; of return_attn_probs beside dropout_p, too.

    >>> import torch, speedlight.flash_attn
    >>> q, offsets = torch.ones(7, 8, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> speedlight.flash_attn.flash_attn_varlen_func(q, q, q, offsets, offsets, 4, 4, causal=True).shape
    torch.Size([7, 8, 16])
    """
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_tensors({"q": q, "k": k, "v": v}, {}, {**ends, "block_table": block_table}, strict=return_attn_probs is True)
    check_offsets(ends)
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p, cu_seqlens_q)
    if return_attn_probs:
        check_no_weights(options)
    queries, keys = Side("q", cu_seqlens_q), Side("k", cu_seqlens_k)
    if block_table is not None:
        out, lse = attend_pages(q, (k, v), block_table, read_paged_lengths(keys), queries, options)
    elif not return_attn_probs:
        return attend(q, k, v, queries, keys, options, False)
    else:
        out, lse = attend(q, k, v, queries, keys, options, True)
    return (out, infinite_where_empty(lse), q.new_empty(0)) if return_attn_probs else out


@public(leaves_graph=False)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Calls flash_attn_varlen_func() with queries, keys and values of one tensor, (total, 3, nheads, headdim).

    >>> import torch, speedlight.flash_attn
    >>> speedlight.flash_attn.flash_attn_varlen_qkvpacked_func(torch.ones(7, 3, 8, 16), torch.tensor([0, 7]), 7).shape
    torch.Size([7, 8, 16])
    """
    q, k, v = unpacked(qkv, "qkv", 3, packed=True)
    check_offsets({"cu_seqlens": cu_seqlens})
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@public(leaves_graph=False)
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Calls flash_attn_varlen_func() with keys and values of one tensor, (total_k, 2, nheads_k, headdim).

    >>> import torch, speedlight.flash_attn
    >>> q, kv, ends = torch.ones(3, 8, 16), torch.ones(7, 2, 2, 16), (torch.tensor([0, 3]), torch.tensor([0, 7]))
    >>> speedlight.flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *ends, 3, 7).shape
    torch.Size([3, 8, 16])
    """
    k, v = unpacked(kv, "kv", 2, packed=True)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@public(leaves_graph=False)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends new tokens to a cache in place, then attends, as flash-attn 2's flash_attn_with_kvcache does.

    Args:
        q: (batch, seqlen, nheads, headdim). The last query is at the last key.
        k_cache, v_cache: (batch of the cache, capacity, nheads_k, headdim), or beside block_table (pages, page_size,
            nheads_k, headdim), pages of any size. Any strides.
        k, v: (batch, seqlen_new, nheads_k, headdim), written to k_cache and v_cache behind cache_seqlens.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), beside k: new keys are turned by their places in the cache,
            queries likewise if causal or with a window_size; else every query as the first new key.
        cache_seqlens: an int, or (batch,): keys before the call; it is not changed. Default all there is room for.
        cache_batch_idx: (batch,): rows of the cache. Of rows that are named twice, either one's tokens are kept.
        cache_leftpad: (batch,): where each sequence begins in the cache.
        block_table: (batch, most pages): which pages hold a sequence.
        rotary_interleaved: pairs are (0, 1), (2, 3), …; False: (0, rotary_dim / 2), ….
        num_splits: means nothing here.
        return_softmax_lse: also return log-sum-exps.
        The others are flash_attn_func()'s.

    Returns:
        out, shaped as q; or (out, softmax_lse (batch, nheads, seqlen)). There are no gradients.

    Raises:
        speedlight.CacheFull: new tokens do not fit, contiguous or paged.
        speedlight.Error: the argument, what was expected and what came. Nothing has been written then.

    >>> import torch, speedlight.flash_attn
    >>> cache, q, k = torch.zeros(2, 32, 2, 16), torch.ones(2, 1, 8, 16), torch.ones(2, 1, 2, 16)
    >>> speedlight.flash_attn.flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=7).shape
    torch.Size([2, 1, 8, 16])
    >>> cache[:, 7].sum().item(), cache.sum().item()
    (64.0, 64.0)
    """
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    new = New(k, v, None, rotary_cos, rotary_sin, rotary_interleaved)
    check_given(q, cache, new)
    options = options_of(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = attend_cache(q, None, cache, new, None, options)
    return (out, infinite_where_empty(lse)) if return_softmax_lse else out
