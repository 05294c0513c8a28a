"""Forward and backward passes, each alone: flash_attn's private functions, which other libraries import."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from .. import ArgumentError, attention_backward
from ..arrays.torch_tensors import in_grad_mode
from ..problem.checks import listed, packed_offsets
from .options import check_apart, check_tensors, check_written, find_dropped, infinite_where_empty, options_of
from .sequences import Side, attend, attend_pages, check_offsets


@in_grad_mode(False)
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (out, softmax_lse, S_dmask, rng_state); rng_state holds the seed of dropout."""
    window = window_size_left, window_size_right
    check_tensors({"q": q, "k": k, "v": v}, {}, {}, strict=True)
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, dropout_p)
    out, lse = attend(q, k, v, Side("q"), Side("k"), options, True)
    weights = find_dropped(q, k, options) if return_softmax else q.new_empty(0)
    return out, infinite_where_empty(lse), weights, _make_state(options, q)


@in_grad_mode(False)
def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    return_softmax: bool = False, block_table: Tensor | None = None, leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None, zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns what _flash_attn_forward() does, of packed sequences; S_dmask is not offered."""
    if leftpad_k is not None:
        raise ArgumentError("leftpad_k: expected None; got a tensor. Slice k, or use flash_attn_with_kvcache().")
    ends = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    ints = {**ends, "block_table": block_table, "seqused_k": seqused_k}
    check_tensors({"q": q, "k": k, "v": v}, {}, ints, strict=True)
    check_offsets(ends if seqused_k is None else {"cu_seqlens_q": cu_seqlens_q})
    window = window_size_left, window_size_right
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, dropout_p, cu_seqlens_q)
    if return_softmax:
        check_no_weights(options)
    queries, keys = Side("q", cu_seqlens_q), Side("k", cu_seqlens_k, seqused_k)
    if block_table is None:
        out, lse = attend(q, k, v, queries, keys, options, True)
    else:
        out, lse = attend_pages(q, (k, v), block_table, read_paged_lengths(keys), queries, options)
    return out, infinite_where_empty(lse), q.new_empty(0), _make_state(options, q)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv; returns the row sums of dout · out, (batch, heads, q_len)."""
    check_tensors({"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}, {}, {}, strict=True)
    window = window_size_left, window_size_right
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes) | _read_dropout(dropout_p, rng_state)
    write_gradients((q, k, v, out, softmax_lse, dout), (dq, dk, dv), {**options, "layout": "blhd"})
    return sum_rows(dout, out).transpose(1, 2)


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv of packed sequences; returns row sums (heads, total)."""
    check_tensors({"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": softmax_lse}, {}, {}, strict=True)
    window = window_size_left, window_size_right
    options = options_of(q, softmax_scale, causal, window, softcap, alibi_slopes, offsets=cu_seqlens_q)
    options |= _read_dropout(dropout_p, rng_state)
    options |= {"layout": "lhd", "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    write_gradients((q, k, v, out, softmax_lse, dout), (dq, dk, dv), options)
    return sum_rows(dout, out).transpose(0, 1)


@in_grad_mode(False)
def write_gradients(given: tuple[Tensor, ...], to: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
    """Writes gradients of q, k and v into tensors that may be of another dtype."""
    found = attention_backward(*given, **options)
    for name, x, y in zip(("dq", "dk", "dv"), to, found, strict=True):
        if x is not None:
            check_written(name, x, y.shape)
    check_apart({name: x for name, x in zip(("dq", "dk", "dv"), to, strict=True) if x is not None})
    for x, y in zip(to, found, strict=True):
        if x is not None:
            x.copy_(y)


@in_grad_mode(False)
def sum_rows(dout: Tensor, out: Tensor) -> Tensor:
    """Returns the sums of upstream gradient · output over each row."""
    return (dout.float() * out.float()).sum(-1)


def check_no_weights(options: dict[str, Any]) -> None:
    """Refuses weights of packed sequences, which would tell what was dropped."""
    if "dropout" in options:
        raise ArgumentError(
            "return_attn_probs: expected False beside dropout_p for packed sequences; got True. Their weights are not "
            "kept: call flash_attn_func() for each sequence, or speedlight.reference.keep_mask()."
        )


def read_paged_lengths(keys: Side) -> Any:
    """Returns the keys of every sequence that lies in pages: those that are used, or by its offsets."""
    if keys.used is not None:
        return keys.used
    ends = listed(keys.offsets, "cu_seqlens_k", "a sequence of ints")
    return [b - a for a, b in itertools.pairwise(packed_offsets("cu_seqlens_k", ends, ends[-1] if ends else 0))]


def _make_state(options: dict[str, Any], q: Tensor) -> Tensor:
    return torch.tensor([options.get("seed", 0), 0], dtype=torch.int64, device=q.device)


def _read_dropout(dropout_p: float, rng_state: Tensor | None) -> dict[str, Any]:
    """Returns the dropout of a forward call, by what that returned."""
    if not dropout_p:
        return {}
    if rng_state is None:
        raise ArgumentError("rng_state: expected what the forward call returned, beside dropout_p; got None.")
    return {"dropout": dropout_p, "seed": int(rng_state[0])}
