"""PyTorch's own flash attention operators on the CPU, computed by speedlight.

`_scaled_dot_product_flash_attention_for_cpu` is what attention has become in graphs that were made before, and under
vmap. `_flash_attention_forward` has no kernel of PyTorch's on the CPU: with this one, varlen_attn() runs there.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .. import ArgumentError, UnsupportedError, attention_backward, attention_paged
from ..adapting import add_distances, limits, rows_in_use
from ..arrays.torch_tensors import in_grad_mode
from ..front import compute
from ..host.insides import TORCH
from ..problem.options import Options
from .dot_product import only_pytorch_takes
from .routing import count_left, count_taken, is_ours

FLASH = "_scaled_dot_product_flash_attention_for_cpu"
VARLEN = "_flash_attention_forward"
# stands behind the log-sum-exps of a forward that was ours, so that its backward is, too
_MARK = float.fromhex("0x1.5bee5p-100")
_originals: dict[str, Any] = {}


def register(library: torch.library.Library) -> None:
    """Puts these kernels where PyTorch looks for its own."""
    for name, kernel in ((FLASH, _flash), (f"{FLASH}_backward", _flash_backward)):
        if getattr(TORCH, name) is None:
            continue
        _originals[name] = torch.library.get_kernel(f"aten::{name}", "CPU")
        library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    of_varlen = {
        VARLEN: _varlen, f"{VARLEN}_no_dropout_inplace": _varlen_out, "_flash_attention_backward": _varlen_backward,
    }  # fmt: skip
    for name, kernel in of_varlen.items():
        if getattr(TORCH, name) is not None:
            library.impl(name, kernel, "CPU")


def _flash(keys: Any, *given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    found = _attend(*given, **options) if is_ours() else None
    return _originals[FLASH].call_boxed(keys, *given, **options) if found is None else found


@in_grad_mode(False)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Returns the output in query's order of memory, log-sum-exps in that of (batch, L, heads), as compilers expect."""
    why = "dropout_p" if dropout_p else only_pytorch_takes(query, dropout_p, scale)
    why = "value's last dim is not query's" if query.shape[-1] != value.shape[-1] else why
    if why is not None:
        count_left(FLASH, why)
        return None
    out = torch.empty_like(query)
    _, lse = compute(query, key, value, Options(**_options(is_causal, attn_mask, scale)), True, out)
    found = _mark(lse)
    count_taken(FLASH)
    return out, found


def _options(is_causal: bool, attn_mask: Tensor | None, scale: float | None) -> dict[str, Any]:
    which = "mask" if attn_mask is not None and attn_mask.dtype == torch.bool else "score"
    return {"causal": "top-left" if is_causal else False, which: attn_mask, "scale": scale}


def _mark(lse: Tensor) -> Tensor:
    """Returns log-sum-exps as PyTorch has them, 0 for rows that see nothing, with a mark behind them."""
    batch, heads, length = lse.shape
    memory = lse.new_empty(lse.numel() + 1)
    memory[-1] = _MARK
    found = memory[:-1].view(batch, length, heads).transpose(1, 2)
    found.copy_(lse).masked_fill_(found == -math.inf, 0)
    return found


def _is_marked(lse: Tensor) -> bool:
    whole = lse.numel() + 1
    if lse.storage_offset() or lse.untyped_storage().nbytes() != whole * lse.element_size():
        return False
    return lse.as_strided((1,), (1,), whole - 1).item() == _MARK


def _flash_backward(keys: Any, *given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gradients by the engine that made the forward, wherever this is called."""
    lse = given[5]
    if not _is_marked(lse):
        return _originals[f"{FLASH}_backward"].call_boxed(keys, *given, **options)
    d_out, query, key, value, out, _, _, is_causal = given[:8]
    said = _options(is_causal, options.get("attn_mask"), options.get("scale"))
    return _find_gradients(query, key, value, out, lse, d_out, said)


@in_grad_mode(False)
def _find_gradients(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, said: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    found = attention_backward(query, key, value, out, lse, d_out, **said)
    dq, dk, dv = (torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype).copy_(x) for x in found)
    return dq, dk, dv


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Attends: packed (T, heads, dim), pages, or (batch, length, heads, dim).

    Log-sum-exps are (heads, T) or (batch, heads, length). Causal and windows are aligned at the last key, as
    FlashAttention has them. max_q and max_k say nothing new.
    """
    out = torch.empty((*query.shape[:-1], value.shape[-1]), dtype=query.dtype, device=query.device)
    lse = _varlen_out(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options
    )
    nothing = out.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), nothing, nothing.clone()


def _varlen_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """Attends as _varlen() does; writes to `out`, and returns log-sum-exps."""
    if not is_ours():
        raise UnsupportedError(
            f"aten::{VARLEN}: PyTorch has no kernel of it for the CPU; speedlight has one: call under "
            "speedlight.torch.sdpa(), or after speedlight.torch.patch()."
        )
    if dropout_p or return_debug_mask:
        raise UnsupportedError("dropout_p: expected 0, and no debug mask; speedlight's kernel has neither.")
    options: dict[str, Any] = {
        "causal": is_causal, "scale": scale, "window": limits(window_size_left, window_size_right),
        "score": None if alibi_slopes is None else add_distances(alibi_slopes),
    }  # fmt: skip
    lse = _attend_sequences(out, query, key, value, cum_seq_q, cum_seq_k, seqused_k, block_table, options)
    count_taken(VARLEN)
    return lse


@in_grad_mode(False)
def _attend_sequences(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    seqused_k: Tensor | None, block_table: Tensor | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attends to packed sequences, pages or a batch; writes to `out`, and returns log-sum-exps."""
    if block_table is not None:
        if cum_seq_q is None or seqused_k is None:
            raise ArgumentError("seqused_k: expected lengths of sequences, and cum_seq_q, beside block_table.")
        options = options | {"layout": "lhd", "cu_seqlens_q": cum_seq_q, "return_lse": True, "out": out}
        return attention_paged(query, key, value, block_table, seqused_k, **options)[1]
    if cum_seq_q is None:
        if seqused_k is not None:
            used = seqused_k.tolist()
            options = options | {"k_lengths": used, "q_start": [n - query.shape[1] for n in used]}
        return compute(query, key, value, Options(layout="blhd", **options), True, out)[1]
    if seqused_k is not None:
        key, value, cum_seq_k = _pack_used(key, value, cum_seq_k, seqused_k)
    options = options | {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    return compute(query, key, value, Options(layout="lhd", **options), True, out)[1]


@in_grad_mode(False)
def _varlen_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes gradients of _varlen(); PyTorch has no kernel for the CPU, so the forward's results are from here."""
    options = {"causal": is_causal, "scale": scale, "window": limits(window_size_left, window_size_right)}
    if cum_seq_q is None:
        options |= {"layout": "blhd"}
    else:
        options |= {"layout": "lhd", "cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    return attention_backward(query, key, value, out, logsumexp, grad_out, **options)


def _pack_used(
    key: Tensor, value: Tensor, cum_seq_k: Tensor | None, seqused_k: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Packs copies of the keys and values that exist, and returns their offsets, too."""
    if cum_seq_k is None:
        raise ArgumentError("cum_seq_k: expected offsets of the sequences in key beside seqused_k; got None.")
    starts, used = cum_seq_k.tolist(), seqused_k.tolist()
    room = [b - a for a, b in itertools.pairwise(starts)]
    if len(used) != len(room) or any([not 0 <= n <= most for n, most in zip(used, room, strict=True)]):
        raise ArgumentError(f"seqused_k: expected a length of at most {room} for each sequence; got {used}.")
    rows = rows_in_use(starts, used)
    return key[rows], value[rows], torch.tensor([0, *used]).cumsum(0)
