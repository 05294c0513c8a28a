"""Arrays of any library, read without copies: NumPy, PyTorch, DLPack, and the NumPy array interface."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, pass_on, shown
from .dlpack import dlpack_device, from_dlpack, has, has_dlpack
from .dtypes import DTYPES, check_dtype
from .memory import Array
from .torch_tensors import check_plain_tensor, from_torch, has_bytes, is_tensor

_MOST_LISTED = 1 << 24


def describe(x: Any, name: str, *, gpu: bool = False, codes: bool = False) -> Array:
    """Reads where an argument's numbers lie, of any library; copies nothing. `gpu`: it may lie on one. `codes`: it may
    be of codes.
    """
    found = _described(x, name, codes)
    if found.device != "cpu" and not gpu:
        raise UnsupportedError(f"{name}: expected an array on the CPU; got one on {found.device}. Use {name}.cpu().")
    return found


def check_array(name: str, x: Any) -> None:
    """Raises unless it is a NumPy array or a PyTorch tensor of floats that we have."""
    if is_tensor(x):
        torch = sys.modules["torch"]
        if x.layout is not torch.strided or x.is_nested:
            raise ArgumentTypeError(f"{name}: expected a strided tensor; got {shown(x.layout)}. Use {name}.to_dense().")
        if str(x.dtype).removeprefix("torch.") not in DTYPES:
            raise ArgumentTypeError(f"{name}: expected float32, float64, float16 or bfloat16; got {x.dtype}.")
    elif isinstance(x, np.ndarray):
        describe(x, name)
    else:
        raise ArgumentTypeError(
            f"{name}: expected a NumPy array, or a PyTorch tensor; got {type(x).__name__}. Try numpy.asarray({name}, "
            "dtype='float32')."
        )


def check_out(out: Any, x: Any) -> None:
    """Raises unless x's rows can be written to `out`, which may be x itself."""
    check_array("out", out)
    if is_tensor(out) != is_tensor(x):
        raise ArgumentTypeError(f"out: expected the same kind of array as x; got {type(out).__name__}.")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ArgumentError(
            f"out: expected shape {tuple(x.shape)} of {x.dtype}, as x; got {tuple(out.shape)} of {out.dtype}."
        )
    if not is_tensor(out) and not out.flags.writeable:
        raise ArgumentError("out: expected an array that can be written; got a read-only one.")
    steps = out.stride() if is_tensor(out) else [x // out.itemsize for x in out.strides]
    reach = 1
    for step, n in sorted([(abs(step), n) for step, n in zip(steps, out.shape, strict=True) if n > 1]):
        if step < reach and 0 not in out.shape:
            raise ArgumentError(
                f"out: expected a place of its own for every element; got strides {tuple(steps)}. Use a contiguous "
                "array."
            )
        reach += step * (n - 1)
    if not is_tensor(out):
        return
    torch = sys.modules["torch"]
    if out.device != x.device:
        raise ArgumentError(f"out: expected a tensor on {x.device}, as x; got one on {out.device}.")
    if torch.is_grad_enabled() and out.requires_grad and out.is_leaf:
        raise UnsupportedError(
            "out: expected a tensor that may be overwritten; got a leaf that requires grad. Leave out= away, or call "
            "under torch.no_grad()."
        )


def on_gpu(x: Any) -> bool:
    """Returns whether an argument lies on an NVIDIA GPU."""
    if isinstance(x, np.ndarray):
        return False
    if is_tensor(x):
        return x.is_cuda
    return has_dlpack(x, "q") and dlpack_device(x, "q")[0] == 2


def is_masked(x: Any) -> bool:
    """Returns whether it is NumPy's masked array, whose hidden numbers would be read."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(x, ma.MaskedArray)


def _described(x: Any, name: str, codes: bool) -> Array:
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name, codes)
    if is_tensor(x):
        return from_torch(x, name, sys.modules["torch"], codes=codes)
    if has_dlpack(x, name):
        return from_dlpack(x, name, codes=codes)
    if has(x, name, "__array_interface__"):
        # of a NumPy scalar a copy, which nobody else holds
        return _from_numpy(_as_numpy(x, name), name, codes)
    _check_not_traced(x, name)
    way = "" if x is None else f" Try numpy.asarray({name}, dtype='float32')."
    raise ArgumentTypeError(
        f"{name}: expected a NumPy array, a PyTorch tensor, or an object with DLPack or __array_interface__; "
        f"got {type(x).__name__}.{way}"
    )


def _check_not_traced(x: Any, name: str) -> None:
    """Raises if JAX traces an argument: its tracers have no numbers for anybody but JAX."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise UnsupportedError(
            f"{name}: expected an array with numbers; got one that JAX traces ({type(x).__name__}): under jit, "
            "grad and vmap call speedlight.jax.dot_product_attention()."
        )


def short_list(x: Any, dimensions: int = 1, most_bytes: int = 8 * _MOST_LISTED) -> list[Any] | None:
    """Returns the ints of an array, or of a contiguous tensor, of so many dimensions and at most so many bytes,
    where all of it is in memory of the CPU; None of anything else, of tensors that are not yet negated, too.
    """
    if type(x) is np.ndarray:
        return x.tolist() if x.ndim == dimensions and x.nbytes <= most_bytes and x.dtype.kind in "iu" else None
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or x.ndim != dimensions or not x.is_cpu:
        return None
    if x.dtype is not torch.int64 and x.dtype is not torch.int32:
        return None
    try:
        size = x.nbytes
        plain = has_bytes(x, size) and x.is_contiguous() and not x.is_neg()
        return x.tolist() if plain and size <= most_bytes else None
    except RuntimeError:  # sparse, or a wrapper of torch.func
        return None


def listed(x: Any, name: str, what: str) -> list[Any]:
    """Returns the numbers that a short list, an array or a tensor holds now."""
    short = short_list(x)
    if short is not None:
        return short
    if is_tensor(x):
        check_plain_tensor(x, name)
    elif is_masked(x):
        raise ArgumentTypeError(
            f"{name}: expected {what}; got a {type(x).__name__}. Use {name}.filled(0), or {name}.compressed()."
        )
    elif isinstance(x, (type, str, bytes, bytearray)) or not (isinstance(x, Sequence) or has(x, name, "tolist")):
        raise ArgumentTypeError(f"{name}: expected {what}; got {type(x).__name__}.")
    try:
        count = len(x) if isinstance(x, Sequence) else math.prod(getattr(x, "shape", ()))
        if count > _MOST_LISTED:
            raise ArgumentError(f"{name}: expected {what}; got {count:,} entries, which are more than any call takes.")
        values = list(x) if isinstance(x, Sequence) else x.tolist()
    except ArgumentError:
        raise
    except Exception as error:  # another library's code, or a tensor without values
        pass_on(error)
        raise ArgumentTypeError(f"{name}: expected {what}; got {type(x).__name__} ({error}).") from error
    if not isinstance(values, list):
        raise ArgumentTypeError(f"{name}: expected {what}; got {type(x).__name__} without dimensions.")
    return values


def _as_numpy(x: Any, name: str) -> np.ndarray:
    try:
        return np.asarray(x)
    except Exception as error:  # another library's code
        pass_on(error)
        raise ArgumentTypeError(
            f"{name}: expected an array that NumPy can read; {type(x).__name__}.__array_interface__ is not: {error}."
        ) from error


def _from_numpy(x: np.ndarray, name: str, codes: bool) -> Array:
    if is_masked(x):
        raise ArgumentTypeError(
            f"{name}: expected an array without a mask of its own; got {type(x).__name__}. Use {name}.filled(0) and "
            "mask=."
        )
    if x.dtype.byteorder not in "=|" and x.dtype.newbyteorder("=") != x.dtype:
        raise ArgumentTypeError(
            f"{name}: expected native byte order; got {x.dtype.str}. Use {name}.astype({x.dtype.name!r})."
        )
    dtype = check_dtype(name, x.dtype.name, codes=codes)
    return Array(name, x.ctypes.data, x.shape, x.strides, dtype, "numpy", x.flags.writeable, x)
