"""Floating-point modes of the calling thread: what the host computes for a result is rounded to nearest, with
subnormals.

Kernels set modes of their own. `standard` is for what Python and NumPy compute: scales, sinks, codes of int8, the
constants in kernels. The caller's modes, which a library may have set for ends of its own, are kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .llvm import load, process_triple

F = TypeVar("F", bound=Callable[..., Any])

_ONE, _HALF, _MORE = 1.0, 2.0**-53, 3 * 2.0**-54  # one, and parts of the step from it to the next number
_LEAST, _PART = 2.0**-1022, 0.3  # their product is subnormal and rounded


def standard(function: F) -> F:
    """Decorates a function whose results must not depend on the caller's modes; takes 0.2 µs if those are standard."""

    @functools.wraps(function)
    def under(*args: Any, **options: Any) -> Any:
        if _ONE + _HALF == _ONE < _ONE + _MORE and _LEAST * _PART > 0.0:
            return function(*args, **options)
        get, put, usual, _ = _access()
        theirs = get()
        try:
            put(usual)
            return function(*args, **options)
        finally:
            put(theirs)

    return under  # type: ignore[return-value]


_X86 = """
declare void @llvm.x86.sse.stmxcsr(ptr)
declare void @llvm.x86.sse.ldmxcsr(ptr)
define i32 @get() {
  %place = alloca i32
  call void @llvm.x86.sse.stmxcsr(ptr %place)
  %modes = load i32, ptr %place
  ret i32 %modes
}
define void @put(i32 %modes) {
  %place = alloca i32
  store i32 %modes, ptr %place
  call void @llvm.x86.sse.ldmxcsr(ptr %place)
  ret void
}
"""
_ARM = """
declare i64 @llvm.aarch64.get.fpcr()
declare void @llvm.aarch64.set.fpcr(i64)
define i32 @get() {
  %modes = call i64 @llvm.aarch64.get.fpcr()
  %word = trunc i64 %modes to i32
  ret i32 %word
}
define void @put(i32 %word) {
  %modes = zext i32 %word to i64
  call void @llvm.aarch64.set.fpcr(i64 %modes)
  ret void
}
"""


@functools.cache
def _access() -> tuple[Any, Any, int, Any]:
    """Returns functions that read and set the modes, the word of the standard ones, and what owns their code."""
    text, usual = (_X86, 0x1F80) if process_triple().startswith("x86_64") else (_ARM, 0)
    code = load((), ("get", "put"), text)
    get = ctypes.CFUNCTYPE(ctypes.c_uint32)(code["get"])
    put = ctypes.CFUNCTYPE(None, ctypes.c_uint32)(code["put"])
    return get, put, usual, code
