"""FlashMLA's calls for dense latent attention over pages, on speedlight: for any sizes and dtypes, on the CPU.

>>> import torch
>>> from speedlight.flash_mla import flash_mla_with_kvcache, get_mla_metadata
>>> q, pages = torch.ones(2, 1, 16, 576), torch.ones(5, 64, 1, 576)
>>> table, lengths = torch.tensor([[4, 0], [2, 1]]), torch.tensor([70, 3])
>>> metadata, _ = get_mla_metadata()
>>> out, lse = flash_mla_with_kvcache(q, pages, table, lengths, 512, metadata, causal=True)
>>> out.shape, lse.shape
(torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import ArgumentError, ArgumentTypeError, attention_paged
from .adapting import Library, check_flag, integer, of_no_tensor, public

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

_SPARSE = "Chosen tokens are not offered: a mask hides the others, speedlight.attention_paged(…, mask=…)."
FLASH_MLA = Library(
    "FlashMLA",
    names={
        "k_pages": "k_cache", "k_lengths": "cache_seqlens", "value_dim": "head_dim_v", "scale": "softmax_scale",
    },
    ignored=("args", "kwargs"),
    refused={
        "num_splits": "How work is divided is the engine's own: get_mla_metadata() gives None.",
        "is_fp8_kvcache": "Rows of codes, scales and bfloat16 side by side are not offered: "
        "speedlight.PagePool(latent=True, dtype='fp8') keeps tokens so.",
        **dict.fromkeys(
            ("indices", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"), _SPARSE
        ),
        "attn_sink": "FlashMLA has it beside indices alone: speedlight.attention_paged(sink_logits=…) has it here.",
    },
)  # fmt: skip


class Config(NamedTuple):
    """Sizes that one metadata object serves, by FlashMLA's names."""

    b: int
    s_q: int
    h_q: int
    page_block_size: int
    h_k: int
    causal: bool


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
    """Attends as FlashMLA's dense flash_mla_with_kvcache does: values are the keys' first head_dim_v columns.

    Args:
        q: (batch, q_len, q_heads, head_dim).
        k_cache: (pages, page_size, kv_heads, head_dim), of dtypes as for attention(); a page has any size.
        block_table: (batch, most pages) ints: the pages of each sequence, in order.
        cache_seqlens: (batch,) ints: the tokens of each sequence.
        head_dim_v: any number up to head_dim.
        tile_scheduler_metadata: from get_mla_metadata(); it serves calls of one size.
        softmax_scale: by default head_dim ** -0.5.
        causal: hides keys after the query, aligned at the last key.

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
    FLASH_MLA.refuse(
        num_splits=num_splits, is_fp8_kvcache=is_fp8_kvcache or None, indices=indices, attn_sink=attn_sink,
        extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )  # fmt: skip
    for name, x in (("q", q), ("k_cache", k_cache), ("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: expected a tensor; got {type(x).__name__}.{of_no_tensor(x)}")
    for name, x in (("q", q), ("k_cache", k_cache)):
        if x.dim() != 4:
            raise ArgumentError(f"{name}: expected 4 dimensions; got {tuple(x.shape)}.")
    columns = integer("head_dim_v", head_dim_v)
    if not 1 <= columns <= k_cache.shape[3]:
        raise ArgumentError(f"head_dim_v: expected 1 to {k_cache.shape[3]}, k_cache's head_dim; got {columns}.")
    (b, s_q, h_q, _), (_, page, h_k, _) = q.shape, k_cache.shape
    config = Config(b, s_q, h_q, page, h_k, causal)
    tile_scheduler_metadata.check(config)
    table: Any = block_table
    lengths: Any = cache_seqlens
    with FLASH_MLA.renamed:
        out, lse = attention_paged(
            q, k_cache, None, table, lengths, value_dim=columns, scale=softmax_scale, causal=causal, layout="blhd",
            return_lse=True,
        )  # fmt: skip
    tile_scheduler_metadata.config = config
    tile_scheduler_metadata.have_initialized = True
    return out, lse.masked_fill_(lse == -torch.inf, torch.inf)
