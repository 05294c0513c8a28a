"""Which engine keeps the tokens of a cache or pool."""

from __future__ import annotations

from typing import Any

from .. import engine
from ..checks import device_name
from ..forks import importing


def storage_of(device: Any) -> Any:
    """The module of CacheStorage and PoolStorage for a device."""
    if device_name(device) != "cpu":
        return engine.resident()
    with importing:
        from ..cpu import storage

    return storage
