"""FlashMLA's calls for latent attention, dense over pages or of chosen tokens: for any sizes and dtypes, on the CPU.

>>> import torch
>>> from speedlight.flash_mla import flash_mla_with_kvcache, get_mla_metadata
>>> q, pages = torch.ones(2, 1, 16, 576), torch.ones(5, 64, 1, 576)
>>> table, lengths = torch.tensor([[4, 0], [2, 1]]), torch.tensor([70, 3])
>>> metadata, _ = get_mla_metadata()
>>> out, lse = flash_mla_with_kvcache(q, pages, table, lengths, 512, metadata, causal=True)
>>> out.shape, lse.shape
(torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))

>>> from speedlight.flash_mla import flash_mla_sparse_fwd
>>> queries, tokens, chosen = torch.ones(3, 16, 576), torch.ones(40, 1, 576), torch.tensor([[[7, 39, -1]]] * 3)
>>> out, max_logits, lse = flash_mla_sparse_fwd(queries, tokens, chosen, 576**-0.5)
>>> out.shape, max_logits.shape, lse.shape
(torch.Size([3, 16, 512]), torch.Size([3, 16]), torch.Size([3, 16]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ArgumentError, ArgumentTypeError, attention, attention_paged, merge
from .adapting import Library, Renamed, check_each_once, check_flag, integer, number, of_no_tensor, public

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

FLASH_MLA = Library(
    "FlashMLA",
    names={
        "k_pages": "k_cache", "k_lengths": "cache_seqlens", "value_dim": "head_dim_v", "scale": "softmax_scale",
    },
    ignored=("args", "kwargs"),
    refused={
        "num_splits": "How work is divided is the engine's own: get_mla_metadata() gives None.",
        "is_fp8_kvcache": "Rows of codes, scales and bfloat16 side by side are not offered: give k_cache as bfloat16, "
        "also beside indices, or keep tokens in speedlight.PagePool(latent=True, dtype='fp8').",
    },
)  # fmt: skip
_SPARSE = Renamed({"k": "kv", "v": "kv", "value_dim": "d_v", "scale": "sm_scale"})
_EXTRA = Renamed({**FLASH_MLA.names, "k_pages": "extra_k_cache", "indices": "extra_indices_in_kvcache"})
# scores this many times as large have a log-sum-exp that is their maximum, within 1e-8 of a score: a softmax grows cold
_COLD = 2.0**30


class Config(NamedTuple):
    """Sizes that one metadata object serves, by FlashMLA's names."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool
    topk: int | None
    extra_page_block_size: int | None
    extra_topk: int | None


@dataclass
class FlashMLASchedMeta:
    """Sizes of the first call that it was given to; later calls must have the same. Work is divided without it."""

    have_initialized: bool = False
    config: Config | None = None

    def check(self, config: Config) -> None:
        """Raises unless a call has the sizes of the first."""
        for name, had, has in zip(Config._fields, self.config or config, config, strict=True):
            if had != has:
                raise ArgumentError(
                    f"tile_scheduler_metadata: expected calls of one size, {name} {had} as in the first; got {has}. "
                    "Call get_mla_metadata() for each."
                )


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """Returns an empty metadata object and None, as FlashMLA's get_mla_metadata does; arguments change nothing."""
    return FlashMLASchedMeta(), None


@public()
def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attends as FlashMLA's flash_mla_with_kvcache does: values are the keys' first head_dim_v columns.

    Args:
        q: (batch, q_len, q_heads, head_dim).
        k_cache: (pages, page_size, kv_heads, head_dim), of dtypes as for attention(); a page has any size.
        block_table: (batch, most pages) ints: the pages of each sequence, in order; not looked at beside indices.
        cache_seqlens: (batch,) ints: the tokens of each sequence; not looked at beside indices.
        head_dim_v: any number up to head_dim.
        tile_scheduler_metadata: from get_mla_metadata(); it serves calls of one size.
        softmax_scale: by default head_dim ** -0.5.
        causal: hides keys after the query, aligned at the last key; False beside indices.
        indices: (batch, q_len, topk) ints: the tokens that each query sees, page number · page_size + place in the
            page, each once, in any order; -1 is none. No other token is read.
        attn_sink: beside indices, (q_heads,) scores that join the softmax's denominator, not the log-sum-exp.
        extra_k_cache, extra_indices_in_kvcache: more tokens that each query sees, in pages of another size.
        topk_length, extra_topk_length: (batch,) ints: only so many of a row of indices count, from the left.

    Returns:
        out, (batch, q_len, q_heads, head_dim_v), and the log-sum-exp, (batch, q_heads, q_len), natural logarithm. A
        query that sees no key has out 0 and lse +inf.
    """
    if not isinstance(tile_scheduler_metadata, FlashMLASchedMeta):
        raise ArgumentTypeError(
            f"tile_scheduler_metadata: expected what get_mla_metadata() returns first; got "
            f"{type(tile_scheduler_metadata).__name__}."
        )
    check_flag("causal", causal)
    check_flag("is_fp8_kvcache", is_fp8_kvcache)
    FLASH_MLA.refuse(num_splits=num_splits, is_fp8_kvcache=is_fp8_kvcache or None)
    _check_tensors(4, q=q, k_cache=k_cache)
    columns = _read_columns("head_dim_v", head_dim_v, k_cache, "k_cache")
    of_indices = {
        "attn_sink": attn_sink, "topk_length": topk_length, "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache, "extra_topk_length": extra_topk_length,
    }  # fmt: skip
    if indices is None:
        _check_alone(of_indices, "without indices; speedlight.attention_paged() has sink_logits=, k_lengths= and mask=")
        _check_tensors(2, block_table=block_table)
        _check_tensors(1, cache_seqlens=cache_seqlens)
    else:
        _check_tensors(3, indices=indices)
        if causal:
            raise ArgumentError("causal: expected False beside indices, which say all that is seen; got True.")
        if extra_k_cache is None or extra_indices_in_kvcache is None:
            missing = "extra_k_cache" if extra_k_cache is None else "extra_indices_in_kvcache"
            extra = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
            _check_alone({name: of_indices[name] for name in extra}, f"without {missing}")
        else:
            _check_tensors(4, extra_k_cache=extra_k_cache)
            _check_tensors(3, extra_indices_in_kvcache=extra_indices_in_kvcache)
    config = Config(
        *q.shape[:3],
        page_block_size=k_cache.shape[1],
        h_k=k_cache.shape[2],
        causal=causal,
        topk=None if indices is None else indices.shape[-1],
        extra_page_block_size=None if extra_k_cache is None else extra_k_cache.shape[1],
        extra_topk=None if extra_indices_in_kvcache is None else extra_indices_in_kvcache.shape[-1],
    )
    tile_scheduler_metadata.check(config)
    if indices is None:
        table: Any = block_table
        lengths: Any = cache_seqlens
        with FLASH_MLA.renamed:
            out, lse = attention_paged(
                q, k_cache, None, table, lengths, value_dim=columns, scale=softmax_scale, causal=causal,
                layout="blhd", return_lse=True,
            )  # fmt: skip
    else:
        chosen = _cut("indices", indices, "topk_length", topk_length, q.shape[:2])
        with FLASH_MLA.renamed:
            out, lse = _attend_to_slots(q, k_cache, chosen, columns, softmax_scale)
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            name = "extra_indices_in_kvcache"
            chosen = _cut(name, extra_indices_in_kvcache, "extra_topk_length", extra_topk_length, q.shape[:2])
            scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
            with _EXTRA:
                more, more_lse = _attend_to_slots(q, extra_k_cache, chosen, columns, scale)
            states = (out.transpose(1, 2), more.transpose(1, 2)), (lse, more_lse)
            merged, lse = merge(*states)
            out = merged.transpose(1, 2).contiguous()
        if attn_sink is not None:
            out = _join_sinks(out, lse.transpose(1, 2), attn_sink)
    tile_scheduler_metadata.config = config
    tile_scheduler_metadata.have_initialized = True
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)


@public()
def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attends to chosen tokens as FlashMLA's flash_mla_sparse_fwd does: values are the tokens' first d_v columns.

    Args:
        q: (q_len, q_heads, head_dim).
        kv: (kv_len, kv_heads, head_dim), of dtypes as for attention().
        indices: (q_len, kv_heads, topk) ints: the tokens that each query sees, each once, in any order; a number below
            0 or from kv_len on is none. No other token is read.
        sm_scale: factor of the scores.
        d_v: any number up to head_dim.
        attn_sink: (q_heads,) scores that join the softmax's denominator, and neither of the other results.
        topk_length: (q_len,) ints: only so many of a row of indices count, from the left.

    Returns:
        out, (q_len, q_heads, d_v); the largest score and the log-sum-exp (natural logarithm), both (q_len, q_heads). A
        query that sees no token has out 0, max_logits -inf and lse +inf. The largest scores take a second pass over
        the chosen tokens.

    Source: DeepSeek-AI, DeepSeek-V3.2 (2025).
    """
    _check_tensors(3, q=q, kv=kv, indices=indices)
    columns = _read_columns("d_v", d_v, kv, "kv")
    scale = number("sm_scale", sm_scale, "a number")
    lead = (q.shape[0], kv.shape[1])
    chosen = _cut("indices", indices, "topk_length", topk_length, lead, tokens=kv.shape[0]).transpose(0, 1)
    with _SPARSE:
        out, lse = attention(
            q, kv, None, value_dim=columns, indices=chosen, scale=scale, layout="lhd", return_lse=True
        )  # fmt: skip
        _, cold = attention(
            q, kv, None, value_dim=1, indices=chosen, scale=scale * _COLD, layout="lhd", return_lse=True
        )  # fmt: skip
    lse = lse.transpose(0, 1).contiguous()
    if attn_sink is not None:
        out = _join_sinks(out, lse, attn_sink)
    return out, cold.transpose(0, 1) / _COLD, lse.masked_fill_(lse == -torch.inf, torch.inf)


def _attend_to_slots(
    q: Tensor, pages: Tensor, chosen: Tensor, columns: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Attends to chosen tokens of all pages: the block table of every sequence lists them in order."""
    table = torch.arange(pages.shape[0]).expand(q.shape[0], -1)
    lengths = torch.full((q.shape[0],), pages.shape[0] * pages.shape[1])
    if pages.shape[2] != 1:
        chosen = chosen[:, None].expand(-1, pages.shape[2], -1, -1)
    return attention_paged(
        q, pages, None, table, lengths, value_dim=columns, indices=chosen, scale=scale, layout="blhd", return_lse=True
    )  # fmt: skip


def _join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns outputs whose denominators count a sink per head; out [..., q_heads, columns], lse [..., q_heads]."""
    if not isinstance(sinks, Tensor) or sinks.shape != lse.shape[-1:] or not sinks.is_floating_point():
        got = f"{sinks.dtype} of shape {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ArgumentError(
            f"attn_sink: expected floats of shape ({lse.shape[-1]},), one for each head of q; got {got}."
        )
    share = torch.sigmoid(lse - sinks).masked_fill(lse == -torch.inf, 0)
    return (out * share[..., None]).to(out.dtype)


def _cut(
    name: str,
    indices: Tensor,
    length_name: str,
    length: Tensor | None,
    lead: tuple[int, ...],
    tokens: int | None = None,
) -> Tensor:
    """Returns rows of chosen tokens, -1 past their lengths, and for numbers that none of `tokens` has.

    lead: what the shape begins with. Raises where a row has a token twice: FlashMLA gives it twice the weight.
    """
    if indices.shape[:2] != lead or indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ArgumentError(
            f"{name}: expected ints of shape ({lead[0]}, {lead[1]}, topk); got {indices.dtype} of shape "
            f"{tuple(indices.shape)}."
        )
    if length is not None:
        if not isinstance(length, Tensor) or length.shape != lead[:1] or length.is_floating_point():
            got = (
                f"{length.dtype} of shape {tuple(length.shape)}"
                if isinstance(length, Tensor)
                else type(length).__name__
            )
            raise ArgumentError(f"{length_name}: expected ints of shape ({lead[0]},); got {got}.")
        indices = indices.masked_fill(
            torch.arange(indices.shape[2], device=indices.device) >= length[:, None, None], -1
        )
    if tokens is not None:
        indices = indices.masked_fill((indices < 0) | (indices >= tokens), -1)
    check_each_once(name, indices)
    return indices


def _check_tensors(dims: int, **tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: expected a tensor; got {type(x).__name__}.{of_no_tensor(x)}")
        if x.dim() != dims:
            raise ArgumentError(f"{name}: expected {dims} dimensions; got {tuple(x.shape)}.")


def _check_alone(given: dict[str, Any], where: str) -> None:
    """Raises for an argument that means nothing there."""
    for name, x in given.items():
        if x is not None:
            raise ArgumentError(f"{name}: expected None {where}; got {type(x).__name__}.")


def _read_columns(name: str, x: Any, keys: Tensor, of: str) -> int:
    columns = integer(name, x)
    if not 1 <= columns <= keys.shape[-1]:
        raise ArgumentError(f"{name}: expected 1 to {keys.shape[-1]}, {of}'s head_dim; got {columns}.")
    return columns
