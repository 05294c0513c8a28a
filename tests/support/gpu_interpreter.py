"""Sets Triton 3.6's interpreter up: kernels run in Python on CPU tensors. Import before Triton.

Four defects of 3.6.0 are mended: run-time loop bounds under NumPy 2.4, products of bfloat16, its rounding, and
conditions that become numbers when a scalar one meets a block. And what it does again for every operation is done
once, which is most of its time: patches of the language, shapes, types.
"""

import functools
import math
import os
import types

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _widened(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def _rounded(x):
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    nearest = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), nearest)


_cast, _dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot


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
InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot, InterpreterBuilder.create_splat = (
    cast_impl,
    create_dot,
    create_splat,
)


# --- once, instead of for every call of a function, every operation and every type


def _patch_attr(obj, name, member, builder, scope):
    inner, semantic = getattr(member, "__wrapped__", member), TritonSemantic(builder)

    def call(*args, **named):
        named["_semantic"] = semantic
        return inner(*args, **named)

    scope.set_attr(obj, name, call)


def _patched_for_good():
    """The language, as the interpreter patches it for the time of a call: nothing here is compiled."""
    interpreter._patch_lang(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    tl.tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
    kept = types.SimpleNamespace(restore=lambda: None)
    interpreter._patch_lang = lambda function: kept


@functools.cache
def _shape(sizes):
    """A type's shape, its number of elements and its text; the shape and the number that its tensors have."""
    shape, constants = tl.tuple(sizes), tl.tuple([tl.constexpr(n) for n in sizes])
    return shape, validate_block_shape(shape), str(shape), (constants, tl.constexpr(math.prod(sizes)))


_scalar = _shape(())[-1]


def _block_type(self, element_ty, shape):
    self.element_ty = element_ty
    sizes = tuple([x.value if isinstance(x, tl.constexpr) else x for x in shape])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.shape, self.numel, text, self.of_tensors = _shape(sizes)
    self.name = f"<{text}, {element_ty}>"


def _tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_tensors if type.is_block() else _scalar


_broadcast = TritonSemantic.broadcast_impl_value


def _broadcast_impl_value(self, a, b):
    """Shapes that are equal are the same object here."""
    x = a.type.shape if a.type.is_block() else None
    y = b.type.shape if b.type.is_block() else None
    return (a, b) if x is y else _broadcast(self, a, b)


_operands = TritonSemantic.binary_op_type_checking_impl


def _binary_op_type_checking_impl(
    self, a, b, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
):
    """Operands of one type stay as they are, but for a division's."""
    if type(a) is type(b) is tl.tensor and a.dtype is b.dtype and type(a.dtype) is tl.dtype and not div_or_mod:
        return self.broadcast_impl_value(a, b)
    return _operands(self, a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


_numpy_dtype, _numpy_dtypes = interpreter._get_np_dtype, {}


def _get_np_dtype(kind):
    if kind.name not in _numpy_dtypes:
        _numpy_dtypes[kind.name] = _numpy_dtype(kind)
    return _numpy_dtypes[kind.name]


_equal = tl.dtype.__eq__
interpreter._patch_attr = _patch_attr
_patched_for_good()
tl.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)
tl.block_type.__init__, tl.tensor.__init__ = _block_type, _tensor
TritonSemantic.broadcast_impl_value = _broadcast_impl_value
TritonSemantic.binary_op_type_checking_impl = _binary_op_type_checking_impl
for kind in (tl.dtype, tl.pointer_type, tl.block_type):
    kind.to_ir = lambda self, builder: self
interpreter._get_np_dtype = _get_np_dtype
# overflows are looked for in wider numbers, and told in its debug mode alone
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
