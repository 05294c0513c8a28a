"""Memo keys of options' values: values that mean the same to the bit share one. `...` marks a value that may change."""

from __future__ import annotations

import marshal
import sys
from typing import Any

import numpy as np

from ..arrays.array import listed
from ..errors import Error
from ..expressions.tracing import Expression, key_of_expression

_NUMBER_OR_NONE = frozenset((int, float, type(None)))
ARRAY = "array"
_MOST_VALUES = 4096  # of a list that a key may hold


def key_of_traced(x: Any) -> Any:
    """Returns the memo key of a mask or score that is an expression, or None; `...` for anything else."""
    if x is None:
        return None
    return key_of_expression(x) if type(x) is Expression else ...


def key_of_repeated(x: Any) -> Any:
    """Returns the memo key of a mask or score in a call that is repeated; `...` if it may change.

    An array counts as ARRAY: what it is, the engine's read() says.
    """
    if x is None:
        return None
    kind = type(x)
    if kind is Expression:
        return key_of_expression(x)
    if kind is list or kind is tuple:
        members = tuple([key_of_repeated(one) for one in x])
        return ... if ... in members else members
    if kind is np.ndarray:
        return ARRAY
    torch = sys.modules.get("torch")
    return ARRAY if torch is not None and kind is torch.Tensor else ...


def fits_any_keys(added: list[Any]) -> bool:
    """Returns whether masks and scores may serve for any number of keys: no table has an entry for each key."""
    return not any([t.of_keys for x in added if type(x) is Expression for t in x.tables])


def key_of_values(x: Any) -> Any:
    """Returns the memo key of a short list: the types and bits of its values now; `...` for any other type."""
    if x is None:
        return None
    if type(x) in (list, tuple):
        return (type(x), marshal.dumps(x, 2)) if _NUMBER_OR_NONE.issuperset(map(type, x)) else ...
    if type(x) is np.ndarray:
        return (x.dtype, x.shape, x.tobytes()) if x.dtype.kind in "iuf" and x.size <= _MOST_VALUES else ...
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or not x.is_cpu or x.numel() > _MOST_VALUES:
        return ...
    try:
        values = key_of_values(listed(x, "", ""))
    except Error:  # checked again, by name, where nothing is memoised
        return ...
    return ... if values is ... else (x.dtype, values)
