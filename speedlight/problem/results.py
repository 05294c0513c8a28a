"""Results of calls: allocated here, written by kernels, and returned as arrays of the caller's library."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import describe
from ..arrays.dtypes import DTYPES, numpy_dtype
from ..arrays.memory import Array, overlap, overlaps_itself
from ..arrays.torch_tensors import check_plain_tensor
from ..errors import ArgumentError, ArgumentTypeError
from ..host.insides import TORCH
from ..host.shortcuts import address_of, count_write
from .options import Options
from .problem import LAYOUTS, Problem


class Results:
    """The results of a call: where kernels write them, and how they get back to the caller's library."""

    __slots__ = ("_given", "_lse", "_out", "_q", "lse", "out")

    def __init__(
        self, q: Array, shape: tuple[int, ...], lse_shape: tuple[int, ...] | None, out: Any, inputs: tuple[Array, ...],
        staged: bool = False, ordered: bool = False,
    ) -> None:  # fmt: skip
        """out: the caller's own array, or None. `staged`: the call may fail after it has begun to write, or read what
        it writes over: then deliver() alone writes to the caller's own. `ordered`: a new tensor lies as q does.
        """
        self._q, self._given = q, out is not None
        if out is None:
            self._out, self.out = empty_like(q, shape, q.dtype, ordered=ordered)
        else:
            self._out, self.out = out, describe(out, "out", gpu=q.device != "cpu")
            if self.out.device != q.device:
                raise ArgumentError(f"out: expected an array on {q.device}, as q; got one on {self.out.device}.")
            check_out(self.out, shape, q.dtype, inputs)
            if staged:
                self.out = replace(empty_like(q, shape, q.dtype)[1], final=self.out)
            else:
                tell_written(self.out)
        self._lse, self.lse = None, None
        if lse_shape is not None:
            self._lse, self.lse = empty_like(q, lse_shape, "float64" if q.dtype == "float64" else "float32")

    @property
    def lse_address(self) -> int:
        return 0 if self.lse is None else self.lse.address

    def returned(self) -> Any:
        """out, or (out, lse), once kernels have run."""
        deliver(self.out)
        out = self._out if self._given else like_input(self._q, self._out)
        return out if self._lse is None else (out, like_input(self._q, self._lse))


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


class ResultForm(NamedTuple):
    """The form of what a call returns."""

    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    alike: bool  # out has q's shape and strides
    strides: tuple[int, ...] | None  # of out, in elements, where it is not contiguous

    @classmethod
    def of(cls, layout: str, q: Array, value_dim: int, strides: tuple[int, ...]) -> ResultForm:
        """Returns the form of an out with these strides, in bytes, beside queries."""
        shape, size = (*q.shape[:-1], value_dim), DTYPES[q.dtype][1]
        dense = tuple([math.prod(shape[d + 1 :]) * size for d in range(len(shape))])
        lse_shape, alike = tuple([q.shape[axis] for axis in LAYOUTS[layout][:-1]]), (q.shape, q.strides)
        return cls(
            shape, lse_shape, (shape, strides) == alike, None if strides == dense else tuple(x // size for x in strides)
        )


def fresh(
    q: Any, shape: tuple[int, ...], *, logarithms: bool = False, alike: bool = False, strides: Any = None
) -> tuple[Any, int]:
    """A new array beside a NumPy array or a tensor, for out or for log-sum-exps, and its address; as fast as can be.
    `alike`: of q's own shape and strides, which are those of a dense one. `strides`: of a tensor that has others than
    a contiguous one, in elements.
    """
    if type(q) is np.ndarray:
        new = np.empty(shape, np.float32 if logarithms and q.dtype != np.float64 else q.dtype)
        return new, address_of(new)
    torch: Any = sys.modules["torch"]
    try:
        new = torch.empty_like(q) if alike else None  # in half the time
    except AssertionError:  # FakeTensorMode, of tensors that are none
        new = None
    if new is None:
        dtype = torch.float32 if logarithms and q.dtype is not torch.float64 else q.dtype
        if strides is None:
            new = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            new = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    if type(new) is torch.Tensor and ((address := new.data_ptr()) or 0 in shape):
        return new, address
    check_plain_tensor(new, "out")  # a mode of PyTorch's makes other tensors now
    return new, new.data_ptr()


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


def results_for(
    q: Array, problem: Problem, options: Options, return_lse: bool, out: Any, inputs: tuple[Array, ...]
) -> Results:
    """Makes a call's results. `out` is staged where kernels may learn that a lookup is out of range, and where they
    read numbers that others hold: `out` may be among those.
    """
    lse_shape = tuple(q.shape[x] for x in LAYOUTS[options.layout][:-1]) if return_lse else None
    program = problem.program if out is not None else None
    staged = program is not None and (program.may_fail or not all([t.is_own for t in program.tables]))
    return Results(q, (*q.shape[:-1], problem.value_dim), lse_shape, out, inputs, staged, ordered=True)
