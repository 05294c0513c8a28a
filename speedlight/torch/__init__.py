"""speedlight in PyTorch: attention with autograd, in PyTorch's own conventions; gradients on the CPU.

>>> import torch, speedlight.torch
>>> q = k = v = torch.ones(1, 2, 3, 4, requires_grad=True)
>>> speedlight.torch.attention(q, k, v, causal=True).sum().backward()
>>> q.grad.shape
torch.Size([1, 2, 3, 4])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..host.lazy import importer

if TYPE_CHECKING:
    from .attending import attention
    from .dot_product import scaled_dot_product_attention
    from .flex import create_block_mask, flex_attention
    from .module import Attention
    from .overrides import patch, report, sdpa, unpatch

_NAMES = {
    "module": "Attention",
    "attending": "attention",
    "overrides": "patch report sdpa unpatch",
    "dot_product": "scaled_dot_product_attention",
    "flex": "create_block_mask flex_attention",
}  # of each module

__all__ = [
    "Attention",
    "attention",
    "patch",
    "report",
    "scaled_dot_product_attention",
    "sdpa",
    "unpatch",
    "create_block_mask",
    "flex_attention",
]


if not TYPE_CHECKING:
    __getattr__ = importer(globals(), _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
