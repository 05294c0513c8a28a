"""flash-attn's calls, on speedlight: the order of arguments of flash-attn 2 here, of 3 and 4 in `v3` and `v4`.

>>> import torch, speedlight.flash_attn
>>> q = k = v = torch.ones(1, 5, 2, 16, requires_grad=True)
>>> speedlight.flash_attn.flash_attn_func(q, k, v, 0.0, None, True).sum().backward()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..host.lazy import importer

if TYPE_CHECKING:
    from . import bert_padding, v3, v4
    from .installing import install, uninstall
    from .interface import (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )
    from .kernels import _flash_attn_backward as _flash_attn_backward
    from .kernels import _flash_attn_forward as _flash_attn_forward
    from .kernels import _flash_attn_varlen_backward as _flash_attn_varlen_backward
    from .kernels import _flash_attn_varlen_forward as _flash_attn_varlen_forward

_NAMES = {
    "interface": (
        "flash_attn_func flash_attn_kvpacked_func flash_attn_qkvpacked_func flash_attn_varlen_func "
        "flash_attn_varlen_kvpacked_func flash_attn_varlen_qkvpacked_func flash_attn_with_kvcache"
    ),
    "installing": "install uninstall",
    "kernels": "_flash_attn_backward _flash_attn_forward _flash_attn_varlen_backward _flash_attn_varlen_forward",
}  # of each module
_MODULES = ("bert_padding", "v3", "v4")

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "install",
    "uninstall",
    "v3",
    "v4",
]


if not TYPE_CHECKING:
    __getattr__ = importer(globals(), _NAMES, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
