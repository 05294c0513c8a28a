"""PyTorch's choice of a kernel for scaled_dot_product_attention: results lie in memory as those of that kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.backends.cuda import flash_sdp_enabled, math_sdp_enabled

from ..host.graph_breaks import constant
from ..host.insides import TORCH as INSIDES

_MATH = 0  # PyTorch's number of its formula, among SDPBackends
_Shapes = tuple[tuple[int, ...], ...]
_DENSE = (True, True, True)
_USUAL: dict[bool, _Shapes] = {  # small tensors that stand for those of most calls: with as many heads, or fewer
    True: ((2, 4, 3, 2),) * 3,
    False: ((2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2)),
}


def takes_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Returns whether PyTorch would compute a call by its formula, whose results are contiguous.

    Its fused kernel gives results in the query's order of dimensions. The arguments fit each other.
    """
    if attn_mask is None:
        mask = None
    elif attn_mask.requires_grad:
        return True  # the fused kernel has no gradient of it
    else:
        mask = attn_mask.dtype, attn_mask.dim()
    # asked for at every call: stride() is faster than stride(-1), and a comparison of symbolic numbers is no bool
    steps = query.stride()[-1], key.stride()[-1], value.stride()[-1]
    are_dense = _DENSE if steps == (1, 1, 1) else tuple([bool(step == 1) for step in steps])
    shapes = _small_shapes(query, key, value, enable_gqa)
    return _chooses_formula(query.dtype, shapes, are_dense, mask, dropout_p > 0, is_causal, enable_gqa)


def _small_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> _Shapes | bool:
    """Returns shapes of small tensors whose sizes are equal, or 0 or 1, where those of the arguments are; a key of
    _USUAL for those.
    """
    q_shape, k_shape = query.shape, key.shape
    if len(q_shape) == len(k_shape) == 4 and k_shape == value.shape:
        q_batch, q_heads, q_len, q_dim = q_shape
        k_batch, k_heads, k_len, k_dim = k_shape
        if q_batch == k_batch and q_dim == k_dim and not _is_empty(q_len) and not _is_empty(k_len):
            if q_heads == k_heads:
                return True
            if enable_gqa:
                return False
    heads = _small_heads(query, key, value)
    rows, keys = 0 if _is_empty(q_shape[-2]) else 3, 0 if _is_empty(k_shape[-2]) else 3
    dim = _small(q_shape[-1])
    value_dim = dim if value.shape[-1] == q_shape[-1] else dim + 1
    return (
        (*_small_batch(query), *heads[0], rows, dim),
        (*_small_batch(key), *heads[1], keys, dim),
        (*_small_batch(value), *heads[2], keys, value_dim),
    )


def _is_empty(length: Any) -> bool:
    """Returns whether a length is 0; one that a graph does not know yet is not."""
    return type(length) is int and length == 0


def _small(size: int) -> int:
    """Returns a size of 0 or 1 as it is, and 2 for all others."""
    return 0 if size == 0 else 1 if size == 1 else 2


def _small_batch(x: Tensor) -> list[int]:
    return [_small(n) for n in x.shape[:-3]]


def _small_heads(query: Tensor, key: Tensor, value: Tensor) -> list[tuple[int, ...]]:
    """Returns small numbers of heads, which are equal where theirs are; of a tensor without heads none."""
    known: list[tuple[int, int]] = []
    found: list[tuple[int, ...]] = []
    for x in (query, key, value):
        if x.dim() < 3:
            found.append(())
            continue
        heads = x.shape[-3]
        small = _small(heads)
        if small == 2:
            same = [one for other, one in known if other == heads]
            small = same[0] if same else (4, 2, 1)[len(known)]
        known.append((heads, small))
        found.append((small,))
    return found


@constant
def _chooses_formula(*question: Any) -> bool:
    """Returns what PyTorch chooses of small tensors, with the kernels that are enabled now. question: as for _ask().

    Where its formula is disabled PyTorch takes the fused kernel, or none.
    """
    if not math_sdp_enabled():
        return False
    return not flash_sdp_enabled() or _ask(*question)


@functools.lru_cache(1024)
def _ask(
    dtype: torch.dtype,
    shapes: _Shapes | bool,
    steps: tuple[bool, ...],
    mask: tuple[torch.dtype, int] | None,
    drops: bool,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """Asks PyTorch, outside of what traces this call; both kernels are enabled.

    A release that cannot be asked has the fused kernel for usual calls, as every one had so far.
    """
    choose = INSIDES.fused_sdp_choice
    if choose is None:
        return drops or shapes not in _USUAL or not all(steps) or (mask is not None and mask[1] == 3)
    sizes = _USUAL[shapes] if isinstance(shapes, bool) else shapes
    if enable_gqa and 0 in [shape[-3] for shape in sizes[1:] if len(shape) > 2]:
        return True  # to answer, PyTorch would divide by that number of heads, which ends the process
    with INSIDES.disable_current_modes():
        query, key, value = (_make(dtype, shape, is_dense) for shape, is_dense in zip(sizes, steps, strict=True))
        attn_mask = None
        if mask is not None:
            of, dims = mask
            shape = (1,) * dims + (*sizes[0][:-1], sizes[1][-2])
            attn_mask = torch.zeros(shape[-dims:], dtype=of, device="cpu")
        number = choose(query, key, value, attn_mask, 0.5 if drops else 0.0, is_causal, enable_gqa=enable_gqa)
    return number == _MATH


def _make(dtype: torch.dtype, shape: tuple[int, ...], is_dense: bool) -> Tensor:
    """Returns a small tensor; is_dense: its last dimension has a stride of 1."""
    stride = 1 if is_dense else 2
    return torch.zeros((*shape[:-1], stride * shape[-1]), dtype=dtype, device="cpu")[..., ::stride]
