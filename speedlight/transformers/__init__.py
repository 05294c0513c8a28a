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

_HOMES = {
    "Cache": "caches",
    "MaskSpec": "masks",
    "attention_forward": "attending",
    "attention_mask": "masks",
    "register": "registering",
    "unregister": "registering",
}

__all__ = ["Cache", "MaskSpec", "attention_forward", "attention_mask", "register", "unregister"]


if not TYPE_CHECKING:
    __getattr__ = importer(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
