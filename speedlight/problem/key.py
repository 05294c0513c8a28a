"""The key by which a repeated call is known, and the addresses that are read anew each time."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..arrays import array as arrays
from .problem import Options


def key_of(tensors: tuple[Any, ...], options: Options, machine: tuple[Any, ...]) -> Any:
    """The memo key of a call; None if arrays are neither NumPy's nor PyTorch's, or an option is mutable.

    `machine`: threads and vector unit.
    """
    of_options = options.key()
    if of_options is None:
        return None
    key: list[Any] = [of_options, machine]
    if type(tensors[0]) is np.ndarray:
        for x in tensors:
            if type(x) is not np.ndarray:
                return None
            key += (x.shape, x.strides, x.dtype)
        return tuple(key)
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level >= 0:  # inside torch.func: tensors may carry tangents
        return None
    plain, strided = torch.Tensor, torch.strided
    try:
        for x in tensors:
            if type(x) is not plain or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
                return None
            if x.layout is not strided or x.is_neg():
                return None
            key += (x.shape, x.stride(), x.dtype)
    except RuntimeError:  # a nested tensor, which has no shape
        return None
    return tuple(key)


def addresses_of(tensors: tuple[Any, ...], ends: list[int]) -> list[int] | None:
    """Of arrays that have a key; None if one lacks memory. ends: one past the last byte of each, relative to its
    address.
    """
    if type(tensors[0]) is np.ndarray:
        return [arrays.address_of(x) for x in tensors]
    addresses = []
    for n, (x, high) in enumerate(zip(tensors, ends, strict=False)):
        try:
            address = x.const_data_ptr() if n < 3 else x.data_ptr()  # out alone is written
        except RuntimeError:  # a wrapper of torch.func
            return None
        if high and not (address and arrays.has_bytes(x, high)):
            return None
        addresses.append(address)
    return addresses
