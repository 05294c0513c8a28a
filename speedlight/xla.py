"""Python functions that XLA calls on the CPU: the call frames of its FFI, read as NumPy arrays where they lie.

jax.pure_callback passes copies through JAX's own dispatch: twenty times the cost of a small call, and it can deadlock.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import jax.ffi
import numpy as np

from .arrays import numpy_dtype

# XLA_FFI_DataType; the structures are those of xla/ffi/api/c_api.h, whose fields keep their places
_DTYPES = {
    code: numpy_dtype(name)
    for code, name in {
        1: "bool",
        4: "int32",
        5: "int64",
        10: "float16",
        11: "float32",
        12: "float64",
        16: "bfloat16",
    }.items()
}
_INTERNAL = 13  # XLA_FFI_Error_Code
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


def _structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """One that begins as each of them does."""
    start = [("struct_size", _SIZE), ("extension_start", _POINTER)]
    return type(name, (ctypes.Structure,), {"_fields_": start + list(fields.items())})


_Buffer = _structure(
    "Buffer", dtype=ctypes.c_int, data=_POINTER, rank=ctypes.c_int64, dims=ctypes.POINTER(ctypes.c_int64)
)
_Buffers = _structure("Buffers", size=ctypes.c_int64, types=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Buffer)))
_Version = _structure("Version", major=ctypes.c_int, minor=ctypes.c_int)
_ErrorArgs = _structure("ErrorArgs", message=ctypes.c_char_p, code=ctypes.c_int)
_CREATE_ERROR = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_ErrorArgs))
_Api = _structure("Api", version=_Version, internal=_POINTER, create_error=_CREATE_ERROR)


class _Text(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("length", _SIZE))


_Attributes = _structure(
    "Attributes", size=ctypes.c_int64, types=_POINTER, names=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Text))
)
_Frame = _structure(
    "Frame", api=ctypes.POINTER(_Api), context=_POINTER, stage=ctypes.c_int, args=_Buffers, results=_Buffers,
    attributes=_Attributes,
)  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32))


class _Question(ctypes.Structure):
    """The extension of a frame that asks what a handler was made for, and wants nothing computed."""

    _fields_ = (
        ("struct_size", _SIZE),
        ("kind", ctypes.c_int),
        ("next", _POINTER),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


_HANDLER = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Frame))
_registered: list[Any] = []  # XLA keeps their addresses


def register(name: str, function: Callable[[list[np.ndarray], list[np.ndarray], bytes], None]) -> None:
    """Makes function(operands, results, text) what jax.ffi.ffi_call(name, …)(*operands, text=…) runs, on any thread.

    It writes to the results; what it raises becomes the message of JAX's error.
    """

    def handler(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if frame.extension_start:
                question = _Question.from_address(frame.extension_start)
                if question.kind == 1:
                    question.metadata.contents.version.major = frame.api.contents.version.major
                    question.metadata.contents.version.minor = frame.api.contents.version.minor
                    question.metadata.contents.traits = 0
                    return None
            text = frame.attributes.items[0].contents
            function(_arrays(frame.args), _arrays(frame.results), ctypes.string_at(text.data, text.length))
        except BaseException as error:  # nothing may pass through XLA's frames
            message = f"{type(error).__name__}: {error}".encode()
            args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _INTERNAL)
            return frame.api.contents.create_error(ctypes.byref(args))
        return None

    _registered.append(_HANDLER(handler))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_registered[-1]), platform="cpu")


def _arrays(buffers: Any) -> list[np.ndarray]:
    found = []
    for at in range(buffers.size):
        buffer = buffers.items[at].contents
        shape, dtype = tuple(buffer.dims[: buffer.rank]), _DTYPES[buffer.dtype]
        size = math.prod(shape) * dtype.itemsize
        if not size:
            found.append(np.empty(shape, dtype))
            continue
        memory: Any = (ctypes.c_char * size).from_address(buffer.data)
        found.append(np.ndarray(shape, dtype, memory))
    return found
