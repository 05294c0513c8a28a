"""Sets Triton 3.6's interpreter up: kernels run in Python on CPU tensors. Import before Triton.

Four defects of 3.6.0 are mended: run-time loop bounds under NumPy 2.4, products of bfloat16, its rounding, and
conditions that become numbers when a scalar one meets a block.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def _rounded(x):
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


_patch, _cast, _dot = interpreter._patch_lang_tensor, InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


def _patch_lang_tensor(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))


def cast_impl(self, source, to):
    before, after = source.dtype.scalar, to.scalar
    if before == tl.float32 and after == tl.bfloat16:
        return TensorHandle(_rounded(source.data), after)
    if before == tl.bfloat16 and after == tl.float32:
        return TensorHandle(_widened(source.data), after)
    if tl.bfloat16 in (before, after) and before != after:
        middle = cast_impl(self, source, tl.float32)
        return cast_impl(self, middle, to) if after != tl.float32 else middle
    return _cast(self, source, to)


def create_dot(self, a, b, d, *rest):
    if a.dtype.scalar == tl.bfloat16:
        a, b = (TensorHandle(_widened(x.data), tl.float32) for x in (a, b))
    return _dot(self, a, b, d, *rest)


_splat = InterpreterBuilder.create_splat


def create_splat(self, kind, x):
    if x.data.dtype == np.bool_:
        x = TensorHandle(x.data, tl.int1)
    return _splat(self, kind, x)


_run = interpreter.GridExecutor.__call__


def run(self, *args, **kwargs):
    with np.errstate(all="ignore"):  # as on a GPU
        return _run(self, *args, **kwargs)


interpreter.GridExecutor.__call__ = run
interpreter._patch_lang_tensor = _patch_lang_tensor
InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.create_splat = (
    cast_impl,
    create_dot,
    create_splat,
)
