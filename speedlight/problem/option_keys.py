"""Memo keys of options' values: values that mean the same to the bit share one. `...` marks a value that may change."""

from __future__ import annotations

import marshal
import sys
from typing import Any

import numpy as np

from ..arrays.array import listed
from ..errors import Error
from ..expressions.tracing import Expression, key_of_expression
from ..host.insides import TORCH

_NUMBER_OR_NONE = frozenset((int, float, type(None)))
_MOST_VALUES = 4096  # of a list that a key may hold


def key_of_traced(x: Any) -> Any:
    """Returns the memo key of a mask or score that is an expression, or None; `...` for anything else."""
    if x is None:
        return None
    return key_of_expression(x) if type(x) is Expression else ...


def key_of_mask(x: Any, keys: int | None = None, rows: int = 1) -> Any:
    """Returns the memo key of a mask or score; `...` if it may change, or autograd follows it.

    An expression is known by what it computes, an array by shape, strides and dtype, a list by its members. With
    `keys`, the memo key leaves out the number of columns, so that it fits any number of keys. Then an array must have
    `keys` columns, and one row or `rows`; an expression must not look up tables that have an entry for each key.
    """
    if x is None:
        return None
    kind = type(x)
    if kind is Expression:
        if keys is not None and any([t.of_keys for t in x.tables]):
            return ...
        return key_of_expression(x)
    if kind is list or kind is tuple:
        members = tuple([key_of_mask(one, keys) for one in x])
        return ... if ... in members else members
    if kind is np.ndarray:
        shape, strides, dtype = x.shape, x.strides, x.dtype
    else:
        torch = sys.modules.get("torch")
        if torch is None or kind is not torch.Tensor or not x.is_cpu or x.is_nested:
            return ...
        if x.layout is not torch.strided or x.is_neg():
            return ...
        if (x.requires_grad and torch.is_grad_enabled()) or TORCH.forward_ad._current_level >= 0:
            return ...
        shape, strides, dtype = x.shape, x.stride(), x.dtype
    if keys is None:
        return shape, strides, dtype
    if len(shape) > 1 and shape[-1] == keys > 1 and shape[-2] in (1, rows):
        return shape[:-1], strides[-1], dtype
    return ...


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
