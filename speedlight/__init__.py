"""speedlight: exact attention at the speed of the machine.

>>> import numpy as np, speedlight as sl
>>> q = k = v = np.ones((1, 8, 16, 64), dtype=np.float32)
>>> sl.attention(q, k, v).shape
(1, 8, 16, 64)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference
    from .api import attention, plan
    from .cpu.workers import get_threads, set_threads
    from .errors import ArgumentError, ArgumentTypeError, CompileError, Error, FileError, UnsupportedError
    from .planning import Plan

__version__ = "0.1.0"
ARITHMETIC = 1  # the canonical order of operations; docs/numerics.md

_HOMES = {
    "attention": "api",
    "plan": "api",
    "Plan": "planning",
    "set_threads": "cpu.workers",
    "get_threads": "cpu.workers",
    "Error": "errors",
    "ArgumentError": "errors",
    "ArgumentTypeError": "errors",
    "UnsupportedError": "errors",
    "CompileError": "errors",
    "FileError": "errors",
}

__all__ = [
    "ARITHMETIC",
    "ArgumentError",
    "ArgumentTypeError",
    "CompileError",
    "Error",
    "FileError",
    "Plan",
    "UnsupportedError",
    "__version__",
    "attention",
    "get_threads",
    "plan",
    "reference",
    "set_threads",
]


def __getattr__(name: str) -> Any:
    if name == "reference":
        return importlib.import_module(".reference", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
