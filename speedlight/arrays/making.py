"""New arrays beside those of a caller: made here, written by kernels, handed back as the caller's library has them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..host.insides import TORCH
from ..host.shortcuts import address_of
from .array import describe
from .dtypes import numpy_dtype
from .memory import Array, overlap, overlaps_itself
from .torch_tensors import check_plain_tensor


def empty_like(x: Array, shape: tuple[int, ...], dtype: str, *, ordered: bool = False) -> tuple[Any, Array]:
    """A new array of the kind of `x` (a NumPy one for DLPack), and where it lies. `ordered`: a tensor whose dimensions
    lie in the order of x's.
    """
    if x.kind == "torch" or x.device != "cpu":
        torch = sys.modules["torch"]
        order = order_of(x.shape, x.strides) if ordered else range(len(shape))
        new = torch.empty_permuted(shape, tuple(order), dtype=getattr(torch, dtype), device=x.device)
    else:
        new = np.empty(shape, numpy_dtype(dtype))
    return new, describe(new, "out", gpu=True)  # checked, too: under FakeTensorMode it is a fake


def order_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of what PyTorch's attention returns for such a query, from the outermost in: as the query's lie,
    but for the last; of an expanded one as they are.
    """
    *dims, last = range(len(shape))
    if not any([strides[d] == 0 and shape[d] > 1 for d in dims]):
        dims.sort(key=lambda d: -strides[d])
    return (*dims, last)


def fresh(
    q: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None, *, logarithms: bool = False, alike: bool = False
) -> tuple[Any, int]:
    """A new array beside a NumPy array or a tensor, for out or for log-sum-exps, and its address; as fast as can be.
    `alike`: of q's own shape and strides, which are those of a dense one. `strides`: of a tensor that has others than
    a contiguous one, in elements.
    """
    if type(q) is np.ndarray:
        new = np.empty(shape, np.float32 if logarithms and q.dtype != np.float64 else q.dtype)
        return new, address_of(new)
    torch: Any = sys.modules["torch"]
    dtype = torch.float32 if logarithms and q.dtype is not torch.float64 else q.dtype
    try:
        new = torch.empty_like(q) if alike else None  # in half the time
    except AssertionError:  # FakeTensorMode, of tensors that are none
        new = None
    if new is None:
        if strides is None:
            new = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            new = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    if type(new) is not torch.Tensor:  # a mode of PyTorch's makes other tensors now
        check_plain_tensor(new, "out")
    wanted = q.stride() if alike else strides
    has_strides = new.stride() == wanted if wanted else new.is_contiguous()
    is_asked_for = tuple(new.shape) == tuple(shape) and new.dtype is dtype and has_strides
    address = new.data_ptr()
    if not address and 0 not in shape:
        check_plain_tensor(new, "out")
    if not is_asked_for:
        raise UnsupportedError(
            f"out: expected new tensors of shape {tuple(shape)} and {dtype}; a mode of PyTorch's made one of "
            f"{tuple(new.shape)} and {new.dtype}. Call outside of it."
        )
    return new, address


def check_out(out: Array, shape: tuple[int, ...], dtype: str, inputs: tuple[Array, ...]) -> None:
    """Raises unless `out` can be written: shape, dtype, a place of its own for each element, none of an input."""
    if out.shape != shape:
        raise ArgumentError(f"out: expected shape {shape}; got {out.shape}.")
    if out.dtype != dtype:
        raise ArgumentTypeError(f"out: expected dtype {dtype}, as q has; got {out.dtype}.")
    if not out.writeable:
        raise ArgumentError("out: expected a writeable array; got a read-only one.")
    if 0 in shape:
        return
    if overlaps_itself(out):
        raise ArgumentError(
            f"out: expected a place of its own for every element; got strides {out.strides}. Use a contiguous array."
        )
    for x in inputs:
        if overlap(out, x):
            raise ArgumentError(
                f"out: expected memory of its own; it overlaps {x.name}. Pass another array, or leave out=None."
            )


def count_write(tensor: Any) -> None:
    """Raises a tensor's version, if it has one: what was saved of it for a backward pass is no more.

    In 0.4 µs; torch.autograd.graph.increment_version() takes 0.9.
    """
    sys.modules["torch"]._C._increment_version((tensor,))


def tell_written(x: Array) -> None:
    """Tells autograd, before it happens, that an array is written to, if it is a tensor."""
    if x.kind == "torch":
        count_write(x.tensor)


def deliver(target: Array) -> None:
    """Copies what was written for a caller's own array to it; nothing, where it lies there."""
    if target.final is None:
        return
    if target.device == "cpu":
        tell_written(target.final)
        target.final.numpy()[...] = target.numpy()
    else:
        # inference mode may write to any tensor
        with TORCH.inference_mode(True):
            target.final.tensor.copy_(target.tensor)


def like_input(x: Array, result: Any) -> Any:
    """A NumPy result as the library of `x` would hold it, by DLPack where that library can."""
    if x.kind != "dlpack":
        return result
    namespace = getattr(x.owner[0], "__array_namespace__", None)
    if namespace is None:
        return result
    library = namespace()
    if hasattr(library, "from_dlpack") and (x.device != "cpu" or result.dtype.name != "bfloat16"):
        return library.from_dlpack(result)
    return library.asarray(result)
