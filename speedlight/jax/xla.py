"""Python functions that XLA calls on the CPU: the call frames of its FFI, read as NumPy arrays where they lie.

jax.pure_callback passes copies through JAX's own dispatch: twenty times the cost of a small call, and it can deadlock.

A program may end before XLA has begun what it was asked for. A thread that asks for the GIL then never gets it, and JAX
waits for its threads. So machine code stands before each Python function: once the program ends, it refuses calls.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.ffi
import numpy as np
from llvmlite import ir

from .. import UnsupportedError
from ..arrays.dtypes import numpy_dtype
from ..cpu.language.vector import I64, PTR, Function, Module, Value
from ..cpu.memory.records import Record
from ..host.forks import renew_after_fork
from ..host.llvm import load

# The structures are those of xla/ffi/api/c_api.h in this version. A later minor version only adds fields at the ends;
# an XLA that no longer takes handlers of this one refuses them when they are registered.
_VERSION = 0, 1
# XLA_FFI_DataType
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
_INTERNAL, _UNAVAILABLE = 13, 14  # XLA_FFI_Error_Code
_METADATA = 1  # XLA_FFI_Extension_Type
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


def _make_structure(name: str, **fields: Any) -> type[ctypes.Structure]:
    """Makes a structure that begins as each of them does."""
    start = [("struct_size", _SIZE), ("extension_start", _POINTER)]
    return type(name, (ctypes.Structure,), {"_fields_": start + list(fields.items())})


_Buffer = _make_structure(
    "Buffer", dtype=ctypes.c_int, data=_POINTER, rank=ctypes.c_int64, dims=ctypes.POINTER(ctypes.c_int64)
)
_Buffers = _make_structure(
    "Buffers", size=ctypes.c_int64, types=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Buffer))
)
_Version = _make_structure("Version", major=ctypes.c_int, minor=ctypes.c_int)
_ErrorArgs = _make_structure("ErrorArgs", message=ctypes.c_char_p, code=ctypes.c_int)
_CREATE_ERROR = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_ErrorArgs))
_Api = _make_structure("Api", version=_Version, internal=_POINTER, create_error=_CREATE_ERROR)


class _Text(ctypes.Structure):
    _fields_ = (("data", _POINTER), ("length", _SIZE))


_Attributes = _make_structure(
    "Attributes", size=ctypes.c_int64, types=_POINTER, names=_POINTER, items=ctypes.POINTER(ctypes.POINTER(_Text))
)
_Frame = _make_structure(
    "Frame", api=ctypes.POINTER(_Api), context=_POINTER, stage=ctypes.c_int, args=_Buffers, results=_Buffers,
    attributes=_Attributes,
)  # fmt: skip


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", _SIZE), ("version", _Version), ("traits", ctypes.c_uint32))


class _Question(ctypes.Structure):
    """An extension of a frame. That of `_METADATA` asks what a handler was made for, and wants nothing computed."""

    _fields_ = (
        ("struct_size", _SIZE),
        ("kind", ctypes.c_int),
        ("next", _POINTER),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


_HANDLER = ctypes.CFUNCTYPE(_POINTER, ctypes.POINTER(_Frame))
_GATE = Record("inside", "closed")


class _Gate:
    """Counts the calls that are in Python, or on their way there; once it is closed, refuses them without the GIL."""

    def __init__(self) -> None:
        self._words = (ctypes.c_int64 * len(_GATE.names))()
        message = b"Python is ending: speedlight's attention was not computed"
        self._ended = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _UNAVAILABLE)
        renew_after_fork(self)
        atexit.register(self.close)  # runs before those of JAX, which was imported first and waits for its threads

    def before(self, name: str, handler: Any) -> Any:
        """Makes a handler that calls `handler` while the gate is open."""
        module = Module(name)
        k = module.function(name, {"frame": PTR}, I64, public=True)
        words, found = k.pointer(k.i64(ctypes.addressof(self._words))), k.variable(k.i64(0))
        k.fetch_add(words, _GATE.offset("inside"), 1)
        closed = k.fetch_add(words, _GATE.offset("closed"), 0)
        with k.either(closed.differs(0)) as (yes, no):
            with yes:
                api = k.load(PTR, k.p["frame"], _Frame.api.offset)
                create = k.load(I64, api, _Api.create_error.offset)
                found.set(_call(k, create, k.pointer(k.i64(ctypes.addressof(self._ended)))))
            with no:
                found.set(_call(k, k.i64(ctypes.cast(handler, _POINTER).value or 0), k.p["frame"]))
        k.fetch_add(words, _GATE.offset("inside"), -1)
        k.finish(found.get())
        code = load((), (name,), str(module))
        for kept in (self, handler, code):  # XLA's threads may call when the objects of Python's modules are gone
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return ctypes.cast(code[name], _HANDLER)

    def close(self) -> None:
        """Waits for what has effects, as JAX is about to, and for calls that are inside. Refuses all others."""
        with contextlib.suppress(Exception):  # JAX tells of it
            jax.effects_barrier()
        self._words[_GATE.word("closed")] = 1
        interrupt: BaseException | None = None
        while True:
            try:
                time.sleep(0.001)  # without the GIL, which they need
                if not self._words[_GATE.word("inside")]:
                    break
            except BaseException as error:  # of a signal; who is inside would keep the process for ever
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def after_fork(self) -> None:
        """Resets the count: none of the threads that were inside is here."""
        self._words[_GATE.word("inside")] = 0


def _call(k: Function, address: Value, argument: Value) -> Value:
    """Calls a function at an address with a pointer; returns the pointer that it returns, as a number."""
    kind = ir.FunctionType(I64, [PTR]).as_pointer()
    return Value(k, k.b.call(k.b.inttoptr(address.x, kind), [argument.x]))


_gate = _Gate()


def register(name: str, function: Callable[[list[np.ndarray], list[np.ndarray], bytes], None]) -> None:
    """Makes function(operands, results, text) what jax.ffi.ffi_call(name, …)(*operands, text=…) runs, on any thread.

    It writes to the results; what it raises becomes the message of JAX's error. At the end of the program calls that
    have not begun are refused, and those that have are waited for.
    """

    def handler(pointer: Any) -> int | None:
        frame = pointer.contents
        try:
            if _answer(frame.extension_start):
                return None
            text = frame.attributes.items[0].contents
            function(_read_arrays(frame.args), _read_arrays(frame.results), ctypes.string_at(text.data, text.length))
        except BaseException as error:  # nothing may pass through XLA's frames
            message = f"{type(error).__name__}: {error}".encode()
            args = _ErrorArgs(ctypes.sizeof(_ErrorArgs), None, message, _INTERNAL)
            return frame.api.contents.create_error(ctypes.byref(args))
        return None

    capsule = jax.ffi.pycapsule(_gate.before(name, _HANDLER(handler)))
    try:
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    except jax.errors.JaxRuntimeError as error:
        raise UnsupportedError(
            f"speedlight.jax: expected a JAX whose XLA takes handlers of version {_VERSION[0]}.{_VERSION[1]} of its "
            f"FFI; JAX {jax.__version__} does not ({error}). docs/jax.md names those that were tested."
        ) from error


def _answer(extension: int | None) -> bool:
    """Answers a frame that asks for metadata (a version of XLA's FFI), and returns whether it did."""
    while extension:
        question = _Question.from_address(extension)
        if question.kind == _METADATA:
            metadata = question.metadata.contents
            metadata.version.major, metadata.version.minor = _VERSION
            metadata.traits = 0
            return True
        extension = question.next
    return False


def _read_arrays(buffers: Any) -> list[np.ndarray]:
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
