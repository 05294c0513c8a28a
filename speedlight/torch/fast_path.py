"""The fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer: one operator that projects and attends.

PyTorch takes it where nobody trains, and attends densely in it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..arrays.torch_tensors import in_grad_mode
from ..front import compute
from ..host.insides import TORCH
from ..problem.options import Options
from .dot_product import only_pytorch_takes
from .routing import count_left, count_taken, is_ours

FAST_PATH = "_native_multi_head_attention"
_originals: dict[str, Any] = {}


def register(library: torch.library.Library) -> None:
    """Puts these kernels where PyTorch looks for its own."""
    if getattr(TORCH, FAST_PATH) is None:
        return
    for place in ("CPU", "NestedTensorCPU"):
        _originals[place] = torch.library.get_kernel(f"aten::{FAST_PATH}", place)
        kernel = functools.partial(_kernel, place)
        library.impl(FAST_PATH, kernel, place, with_keyset=True, allow_override=True)


def _kernel(place: str, keys: Any, *given: Any) -> Any:
    out = _attend(*given) if is_ours() else None
    return _originals[place].call_boxed(keys, *given) if out is None else (out, None)


@in_grad_mode(False)
def _attend(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, qkv_weight: Tensor, qkv_bias: Tensor,
    proj_weight: Tensor, proj_bias: Tensor, mask: Tensor | None = None, need_weights: bool = True,
    average_attn_weights: bool = True, mask_type: int | None = None,
) -> Tensor | None:  # fmt: skip
    """Returns the projected output, or None where it is left to PyTorch."""
    why = only_pytorch_takes(query, 0.0, None)
    if need_weights:
        why = "need_weights"
    elif not (query is key is value):
        why = "query, key and value are not one tensor"
    elif mask is not None and (mask_type not in (0, 1, 2) or query.is_nested):
        why = f"a mask of type {mask_type}"
    elif mask is not None and mask.is_floating_point() and not ((mask == 0) | (mask == -torch.inf)).all():
        why = "a float mask of other numbers than 0 and -inf, which PyTorch reads as bool"
    if why is not None:
        count_left(FAST_PATH, why)
        return None
    rows, lengths = (query, None) if not query.is_nested else _pack(query)
    heads = functional.linear(rows, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1))
    q, k, v = heads.unbind(-3)
    if lengths is None:
        options = Options(layout="blhd", mask=_invert_mask(mask, mask_type))
    else:
        options = Options(layout="lhd", cu_seqlens_q=list(itertools.accumulate(lengths, initial=0)))
    out = compute(q, k, v, options, False)
    out = functional.linear(out.flatten(-2), proj_weight, proj_bias)
    count_taken(FAST_PATH)
    return out if lengths is None else torch.nested.as_nested_tensor(list(out.split(lengths)))


def _pack(x: Tensor) -> tuple[Tensor, list[int]]:
    """Returns the sequences of a nested tensor, one after another, and their lengths."""
    sequences = x.unbind()
    return torch.cat(sequences), [len(s) for s in sequences]


def _invert_mask(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Returns attention()'s mask of one that is True, or not 0, where PyTorch's fast path hides a key."""
    if mask is None:
        return None
    for dim, stride in enumerate(mask.stride()):
        if stride == 0:  # expanded: the same mask for every item, or head
            mask = mask.narrow(dim, 0, min(1, mask.shape[dim]))
    visible = mask.logical_not()
    return visible[:, None, None] if mask_type == 1 else visible
