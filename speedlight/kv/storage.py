"""Which engine keeps the tokens of a cache or pool."""

from __future__ import annotations

from typing import Any

from .. import engine
from ..checks import device_name
from ..errors import ArgumentError, shown
from ..forks import importing


def storage_of(device: Any) -> Any:
    """The module of CacheStorage and PoolStorage for a device."""
    name = device_name(device)
    match name.partition(":")[0]:
        case "cpu" if name == "cpu":
            with importing:
                from ..cpu import storage

            return storage
        case "cuda":
            return engine.resident()
    raise ArgumentError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)}.")
