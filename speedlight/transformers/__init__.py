"""speedlight in transformers: `attn_implementation="speedlight"`, and a cache that attention reads where it lies.

>>> import speedlight.transformers
>>> speedlight.transformers.register()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..host.lazy import importer

if TYPE_CHECKING:
    from .attending import attention_forward
    from .caches import Cache
    from .masks import MaskSpec, attention_mask
    from .registering import register, unregister

_NAMES = {
    "caches": "Cache",
    "masks": "MaskSpec attention_mask",
    "attending": "attention_forward",
    "registering": "register unregister",
}  # of each module

__all__ = ["Cache", "MaskSpec", "attention_forward", "attention_mask", "register", "unregister"]


if not TYPE_CHECKING:
    __getattr__ = importer(globals(), _NAMES)


def __dir__() -> list[str]:
    return sorted(__all__)
