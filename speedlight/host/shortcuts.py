"""Shortcuts: functions that are as they are only to save microseconds of Python.

Figures are timeit's on an AMD EPYC under CPython 3.11, beside those of the plain way.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from typing import Any

import numpy as np

_word_at = ctypes.c_size_t.from_address
_HEAD = object.__basicsize__  # of an array object, what every object has; then comes its address (PyArrayObject)


def address_of(x: np.ndarray) -> int:
    """Returns x.ctypes.data, in 0.4 µs instead of 1.6; a call has four."""
    return _word_at(id(x) + _HEAD).value if _known else x.ctypes.data


def _is_known() -> bool:
    """Returns whether array objects are as that says: of own memory and of others', written or not, with entries or
    none.
    """
    own, fixed = np.arange(6.0).reshape(2, 3), np.frombuffer(b"12345678", np.int8)
    cases = (own, own[1:, ::-2], own[1, 1, ...], own.view(np.int16).T, fixed, fixed[3:], np.zeros((0, 2)))
    cpython = sys.implementation.name == "cpython"
    return cpython and all([_word_at(id(x) + _HEAD).value == x.ctypes.data for x in cases])


_known = _is_known()


def row_addresses(x: np.ndarray) -> list[int]:
    """Returns where each row of an array begins."""
    first, step = address_of(x), x.strides[0]
    return [first + i * step for i in range(len(x))]


def setting(name: str) -> str:
    """Returns a variable of the environment as it is now, "" where it is not set.

    A call asks for two. A variable that is not set takes 0.15 µs; os.environ.get() takes 1.5.
    """
    if ENVIRONMENT is not None and _encode(name) not in ENVIRONMENT:
        return ""
    return os.environ.get(name, "")


ENVIRONMENT: Any = getattr(os.environ, "_data", None)
_encode = functools.cache(os.environ.encodekey)  # names are a few constants
