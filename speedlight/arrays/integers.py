"""Whole numbers of any library, as Python's ints."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, pass_on
from .array import is_masked


def whole(x: Any) -> int | None:
    """Returns the int that a whole number is: Python's, NumPy's, or an array or tensor of one; None for anything else,
    bools included.
    """
    if type(x) is int:
        return x
    if isinstance(x, (bool, np.bool_, np.timedelta64, type)):  # a span of time is a whole number to NumPy
        return None
    if isinstance(x, numbers.Integral):
        return int(x)
    try:
        kind = getattr(x.dtype, "name", str(x.dtype)).removeprefix("torch.")
        is_one = kind.startswith(("int", "uint")) and math.prod(x.shape) == 1 and not is_masked(x)
        return int(x.item()) if is_one else None
    except Exception as error:  # no array, or one without numbers here: in a trace, under a transform
        pass_on(error)
        return None


def is_one(x: Any) -> bool:
    """Tells a whole number from several in a list or an array, where either may be given."""
    try:
        return not getattr(x, "shape", ()) and whole(x) is not None
    except Exception as error:  # a nested tensor has none
        pass_on(error)
        return False


def integer(name: str, x: Any) -> int:
    """Returns the int of an argument that is a whole number, or raises by its name."""
    value = whole(x)
    if value is None:
        way = f" Write {x:.0f}." if isinstance(x, float) and x.is_integer() else ""
        raise ArgumentTypeError(f"{name}: expected an int; got {type(x).__name__}.{way}")
    if value.bit_length() > 64:  # and Python may refuse to print it
        raise ArgumentError(f"{name}: expected an int of at most 64 bits; got one of {value.bit_length()} bits.")
    return value
