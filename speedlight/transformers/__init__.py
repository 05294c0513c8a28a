"""speedlight in transformers: `attn_implementation="speedlight"`, and a cache that attention reads where it lies.

>>> import speedlight.transformers
>>> speedlight.transformers.register()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
