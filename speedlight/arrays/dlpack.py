"""Arrays by DLPack, without copies: on the CPU by their capsule, on a GPU as PyTorch sees them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

from ..errors import ArgumentTypeError, UnsupportedError, how_to_install, pass_on, shown
from .dtypes import ELEMENT_BYTES, check_dtype
from .memory import Array
from .torch_tensors import from_torch

_DLPACK_NAMES = {
    (2, 32): "float32",
    (2, 64): "float64",
    (2, 16): "float16",
    (4, 16): "bfloat16",
    (0, 8): "int8",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("vector", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def has(x: Any, name: str, *attributes: str) -> bool:
    """Returns whether an argument has these attributes; a class's own do not count. A property may raise anything."""
    for attribute in () if isinstance(x, type) else attributes:
        try:
            found = hasattr(x, attribute)
        except Exception as error:  # another library's code
            pass_on(error)
            raise ArgumentTypeError(
                f"{name}: expected an array that can be read; {type(x).__name__}.{attribute} failed: {error}."
            ) from error
        if not found:
            return False
    return not isinstance(x, type)


def has_dlpack(x: Any, name: str) -> bool:
    return has(x, name, "__dlpack__", "__dlpack_device__")


def dlpack_device(x: Any, name: str) -> tuple[int, int]:
    try:
        kind, number = x.__dlpack_device__()
        return int(kind), int(number)
    except Exception as error:  # another library's code
        pass_on(error)
        raise ArgumentTypeError(
            f"{name}: expected an array with a DLPack device; {type(x).__name__}.__dlpack_device__ failed: {error}."
        ) from error


def _dlpack_tensor(x: Any, name: str) -> tuple[Any, _DLTensor]:
    """The capsule, which keeps the memory alive, and what it holds."""
    try:
        capsule = x.__dlpack__()
    except Exception as error:  # another library's code
        pass_on(error)
        raise ArgumentTypeError(
            f"{name}: expected an array that DLPack can pass on; {type(x).__name__}.__dlpack__ failed: {error}."
        ) from error
    pointer, valid = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_IsValid
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    if not valid(capsule, b"dltensor"):
        raise ArgumentTypeError(
            f"{name}: expected an unused DLPack capsule of version 0; {type(x).__name__}.__dlpack__ gave "
            f"{shown(capsule)}."
        )
    return capsule, _DLTensor.from_address(pointer(capsule, b"dltensor"))


def from_dlpack(x: Any, name: str, *, codes: bool = False) -> Array:
    """Reads the capsule itself, because NumPy cannot take bfloat16 from one. `codes`: it may be of codes."""
    device = dlpack_device(x, name)
    if device[0] == 2:
        return _from_cuda(x, name, codes)
    if device[0] != 1:
        raise UnsupportedError(f"{name}: expected an array on the CPU; got DLPack device {device}.")
    capsule, t = _dlpack_tensor(x, name)
    dtype = _DLPACK_NAMES.get((t.code, t.bits), f"DLPack type {t.code} of {t.bits} bits")
    found = dtype if t.vector == 1 else f"DLPack type {t.code} of {t.bits} bits in vectors of {t.vector}"
    check_dtype(name, found, codes=codes)
    size = ELEMENT_BYTES[dtype]
    if t.device_type != 1 or not 0 <= t.ndim <= 64 or (t.ndim and not t.shape):
        raise ArgumentTypeError(
            f"{name}: expected a DLPack tensor on the CPU; got device {t.device_type} with {t.ndim} dimensions."
        )
    shape = tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        strides = tuple(t.strides[i] * size for i in range(t.ndim))
    else:
        strides = tuple(math.prod(shape[i + 1 :]) * size for i in range(t.ndim))
    if min(shape, default=0) < 0 or (0 not in shape and not t.data):
        raise ArgumentTypeError(
            f"{name}: expected a DLPack tensor with memory for its shape; got shape {shape} at address {t.data or 0}."
        )
    return Array(name, (t.data or 0) + t.byte_offset, shape, strides, dtype, "dlpack", False, (x, capsule))


def _from_cuda(x: Any, name: str, codes: bool) -> Array:
    """CuPy's, JAX's … on a GPU: the same memory, as PyTorch sees it."""
    try:
        import torch
    except ImportError:
        raise UnsupportedError(
            f"{name}: expected PyTorch beside arrays on a GPU; it is not installed. Run {how_to_install('gpu')}."
        ) from None
    _, held = _dlpack_tensor(x, name)
    if held.strides and any([held.strides[i] < 0 for i in range(held.ndim)]):  # PyTorch would abort the process
        raise ArgumentTypeError(f"{name}: expected strides that are not negative on a GPU. Use {name}.copy().")
    try:
        tensor = torch.from_dlpack(x)
    except Exception as error:  # another library's code, or a GPU that PyTorch does not see
        pass_on(error)
        raise ArgumentTypeError(
            f"{name}: expected an array that PyTorch can take by DLPack; {type(x).__name__}: {error}."
        ) from error
    found = from_torch(tensor, name, torch, codes=codes)
    return replace(found, kind="dlpack", owner=(x, tensor), writeable=type(x).__module__.startswith("cupy"))
