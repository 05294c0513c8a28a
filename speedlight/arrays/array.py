"""Arrays in and out, without copies: NumPy, PyTorch, DLPack, and the NumPy array interface; on the CPU or on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, has, how_to_install, pass_on, shown
from ..host.forks import importing

# our name, bytes; names as NumPy, ml_dtypes, PyTorch and the command line spell them
DTYPES = {"float32": ("f32", 4), "float64": ("f64", 8), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}
STORAGE_BYTES = dict(DTYPES.values())
# of caches that keep codes, with a scale for each token and head: the largest code
CODES = {"int8": 127, "float8_e4m3fn": 448}
_MOST_LISTED = 1 << 24
_DLPACK_NAMES = {(2, 32): "float32", (2, 64): "float64", (2, 16): "float16", (4, 16): "bfloat16"}


@dataclass(slots=True)
class Array:
    """An array in memory: address, shape, strides in bytes, dtype name. `owner` keeps it alive."""

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    kind: str  # numpy, torch, dlpack
    writeable: bool
    owner: Any
    device: str = "cpu"  # or cuda:0, …: then `tensor` is the array as PyTorch has it
    final: Array | None = None  # where deliver() copies it to

    @property
    def tensor(self) -> Any:
        return self.owner if self.kind == "torch" else self.owner[1]

    def extent(self) -> tuple[int, int]:
        """First byte and one past the last."""
        if 0 in self.shape:
            return self.address, self.address
        reach = [(n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(min(r, 0) for r in reach)
        return low, self.address + sum(max(r, 0) for r in reach) + DTYPES[self.dtype][1]

    def numpy(self) -> np.ndarray:
        """A NumPy view of the same memory, which it keeps alive by itself: the array behind it may be a caller's
        temporary.
        """
        if isinstance(self.owner, np.ndarray):
            return self.owner
        low, high = self.extent()
        buffer: Any = (ctypes.c_char * max(high - low, 1)).from_address(low or ctypes.addressof(_EMPTY))
        buffer.owner = self.owner
        view = np.ndarray(self.shape, numpy_dtype(self.dtype), buffer, self.address - low, self.strides)
        view.flags.writeable = self.writeable
        return view


_EMPTY = ctypes.c_char()


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a name; bfloat16 and float8_e4m3fn are ml_dtypes'."""
    if name in ("bfloat16", "float8_e4m3fn"):
        with importing:
            import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def conversion(name: str, dtype: str) -> str:
    """Returns code that converts an array, or a tensor, for a message."""
    of_numpy = f"ml_dtypes.{dtype}" if dtype == "bfloat16" else repr(dtype)
    return f"{name}.astype({of_numpy}), of a tensor {name}.to(torch.{dtype})"


def code_cache(dtype: str) -> str:
    """Returns the name of a cache of codes, with its article, for a message."""
    return f"{'an' if dtype == 'int8' else 'a'} {dtype} cache"


def _check_dtype(name: str, dtype: str) -> str:
    if dtype not in DTYPES:
        known = dtype in CODES
        scales = f" Codes alone have no scales: KVCache(dtype={dtype!r}) and PagePool keep both." if known else ""
        raise ArgumentTypeError(
            f"{name}: expected dtype float32, float64, float16 or bfloat16; got {dtype}. Convert it first.{scales}"
        )
    return dtype


def describe(x: Any, name: str, *, gpu: bool = False) -> Array:
    """The array behind an argument, wherever it came from. Nothing is copied. `gpu`: it may lie on one."""
    found = _described(x, name)
    if found.device != "cpu" and not gpu:
        raise UnsupportedError(f"{name}: expected an array on the CPU; got one on {found.device}. Use {name}.cpu().")
    return found


def on_gpu(x: Any) -> bool:
    """Returns whether an argument lies on an NVIDIA GPU."""
    if isinstance(x, np.ndarray):
        return False
    if is_tensor(x):
        return x.is_cuda
    return _has_dlpack(x, "q") and _dlpack_device(x, "q")[0] == 2


def is_tensor(x: Any) -> bool:
    """Returns whether it is a PyTorch tensor; never imports PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def is_masked(x: Any) -> bool:
    """Returns whether it is NumPy's masked array, whose hidden numbers would be read."""
    ma = sys.modules.get("numpy.ma")
    return ma is not None and isinstance(x, ma.MaskedArray)


def _described(x: Any, name: str) -> Array:
    if isinstance(x, np.ndarray):
        return _from_numpy(x, name, "numpy", x)
    if is_tensor(x):
        return _from_torch(x, name, sys.modules["torch"])
    if _has_dlpack(x, name):
        return _from_dlpack(x, name)
    if has(x, name, "__array_interface__"):
        array = _as_numpy(x, name)  # of a NumPy scalar a copy, which nobody else holds
        return _from_numpy(array, name, "numpy", array)
    _check_not_traced(x, name)
    way = "" if x is None else f" Try numpy.asarray({name}, dtype='float32')."
    raise ArgumentTypeError(
        f"{name}: expected a NumPy array, a PyTorch tensor, or an object with DLPack or __array_interface__; "
        f"got {type(x).__name__}.{way}"
    )


def _check_not_traced(x: Any, name: str) -> None:
    """JAX's tracers have no numbers for anybody but JAX."""
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


def _from_numpy(x: np.ndarray, name: str, kind: str, owner: Any) -> Array:
    if is_masked(x):
        raise ArgumentTypeError(
            f"{name}: expected an array without a mask of its own; got {type(x).__name__}. Use {name}.filled(0) and "
            "mask=."
        )
    if x.dtype.byteorder not in "=|" and x.dtype.newbyteorder("=") != x.dtype:
        raise ArgumentTypeError(
            f"{name}: expected native byte order; got {x.dtype.str}. Use {name}.astype({x.dtype.name!r})."
        )
    dtype = _check_dtype(name, x.dtype.name)
    return Array(name, x.ctypes.data, x.shape, x.strides, dtype, kind, x.flags.writeable, owner)


def is_followed(x: Any) -> bool:
    """Returns whether autograd records what is made of a tensor now: it requires grad, or carries a tangent."""
    torch = sys.modules["torch"]
    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def has_tangent(x: Any) -> bool:
    """Returns whether a tensor carries a tangent of forward mode."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def is_traced(x: Any) -> bool:
    """Returns whether a tensor stands for numbers that are elsewhere: in a graph, under a transform of torch.func …"""
    torch = sys.modules["torch"]
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return not x.is_nested
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def check_plain_tensor(x: Any, name: str, *, followed: bool = False) -> None:
    """Raises unless a tensor's numbers lie in memory as its sizes and strides say, and, unless `followed`, nobody
    differentiates it.

    Raises for subclasses that compute in their own way (FakeTensor, DTensor …), inside torch.func.vmap, grad and jvp,
    and for storage that was resized. Of any dtype and device; q, k and v, masks, biases and lists all come through
    here.
    """
    torch = sys.modules["torch"]
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{name}: expected a tensor whose numbers lie in memory; got {type(x).__name__}, which has its own way."
        )
    if x.is_nested:
        raise ArgumentTypeError(
            f"{name}: expected a strided tensor; got a nested one. Use {name}.to_padded_tensor(0) and lengths."
        )
    if x.layout is not torch.strided:
        raise ArgumentTypeError(f"{name}: expected a strided tensor; got layout {x.layout}. Use {name}.to_dense().")
    if not followed and is_followed(x):
        what = "requires grad" if x.requires_grad and torch.is_grad_enabled() else "has a tangent"
        raise UnsupportedError(
            f"{name}: {what}, and autograd does not follow through this call: speedlight.torch.attention(), of "
            f"tensors q, k and v, is one that it does. Without gradients, use {name}.detach(), or call under "
            "torch.no_grad()."
        )
    if x.is_conj() or x.is_neg():
        raise ArgumentTypeError(f"{name}: expected a plain tensor; got a lazily negated one. Use {name}.resolve_neg().")
    if x.device.type == "meta":
        raise UnsupportedError(f"{name}: expected a tensor with values; got one on device meta.")
    if not _has_memory(x):
        raise ArgumentError(
            f"{name}: expected a tensor with memory for its {tuple(x.shape)}; its storage is missing or too short "
            f"(torch.func, resize_ …). Use {name}.clone()."
        )


def has_bytes(x: Any, size: int) -> bool:
    """Returns whether a plain tensor's storage, which may have been resized, has so many bytes from its first element
    on.
    """
    start = x.storage_offset()
    return x.untyped_storage().nbytes() >= size + (start and start * x.itemsize)


def _has_memory(x: Any) -> bool:
    """Returns whether every element lies inside the tensor's storage."""
    if not x.numel():
        return True
    last = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    try:
        return x.const_data_ptr() != 0 and (last + 1) * x.element_size() <= x.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func, a tensor of zeros that are nowhere
        return False


_READ = frozenset(("q", "k", "v", "d_out", "d_lse"))  # what no call writes


def _from_torch(x: Any, name: str, torch: Any) -> Array:
    if x.device.type not in ("cpu", "cuda"):
        way = "Make it where it has numbers." if x.device.type == "meta" else f"Use {name}.cpu()."
        raise UnsupportedError(f"{name}: expected a tensor on the CPU or a CUDA device; got one on {x.device}. {way}")
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError(f"{name}: expected no torch.jit.trace, which speedlight.torch.attention() alone takes.")
    check_plain_tensor(x, name)
    dtype = _check_dtype(name, str(x.dtype).removeprefix("torch."))
    size = DTYPES[dtype][1]
    address = x.const_data_ptr() if name in _READ else x.data_ptr()  # which makes a copy-on-write tensor its copy
    return Array(
        name, address, tuple(x.shape), tuple(s * size for s in x.stride()), dtype, "torch", True, x, str(x.device)
    )


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


def _has_dlpack(x: Any, name: str) -> bool:
    return has(x, name, "__dlpack__", "__dlpack_device__")


def _dlpack_device(x: Any, name: str) -> tuple[int, int]:
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


def _from_dlpack(x: Any, name: str) -> Array:
    """Reads the capsule itself, because NumPy cannot take bfloat16 from one."""
    device = _dlpack_device(x, name)
    if device[0] == 2:
        return _from_cuda(x, name)
    if device[0] != 1:
        raise UnsupportedError(f"{name}: expected an array on the CPU; got DLPack device {device}.")
    capsule, t = _dlpack_tensor(x, name)
    dtype = _DLPACK_NAMES.get((t.code, t.bits), f"DLPack type {t.code} of {t.bits} bits")
    _check_dtype(name, dtype if t.vector == 1 else f"DLPack type {t.code} of {t.bits} bits in vectors of {t.vector}")
    size = DTYPES[dtype][1]
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


def _from_cuda(x: Any, name: str) -> Array:
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
    found = _from_torch(tensor, name, torch)
    return replace(found, kind="dlpack", owner=(x, tensor), writeable=type(x).__module__.startswith("cupy"))


def pages(size: int, *, large: bool = False) -> mmap.mmap:
    """Zeroed pages, in each process its own after a fork; only those that are touched take memory. `large`: of MiB."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, max(size, 1))
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages: small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
