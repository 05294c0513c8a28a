"""Numbers as arrays store them: f32, f64, f16 and bf16, widened exactly, narrowed to nearest even."""

from __future__ import annotations

from llvmlite import ir

from .functions import like
from .vector import F16, F32, F64, I16, I32, Function, Value, element_of, vec


def load(k: Function, storage: str, pointer: Value, offset: Value | int = 0, lanes: int = 0) -> Value:
    """One number, or `lanes` side by side, in f32; in f64 where they are f64."""

    def read(t: ir.Type) -> Value:
        return k.load(vec(t, lanes) if lanes else t, pointer, offset)

    if storage in ("f16", "bf16"):
        return widened(k, storage, read(I16))
    return read(F64 if storage == "f64" else F32)


def widened(k: Function, storage: str, bits: Value) -> Value:
    """Numbers of 16 bits, in f32."""
    if storage == "f16":
        return k.extend(bits.bits(like(bits, F16)), like(bits, F32))
    return (k.zext(bits, like(bits, I32)) << 16).bits(like(bits, F32))


def narrowed(k: Function, storage: str, x: Value) -> Value:
    """x (f32, or f64 if stored so) as it is stored; bf16 by integers, so that every CPU agrees."""
    if storage == "f16":
        return k.narrow(x, like(x, F16))
    if storage != "bf16":
        return x
    bits = x.bits(like(x, I32))
    rounded = (bits + ((bits >> 16) & 1) + 0x7FFF) >> 16
    return k.trunc(k.select(x.differs(x), (bits >> 16) | 0x40, rounded), like(x, I16))


def load_f64(k: Function, storage: str, pointer: Value, offset: Value | int = 0, lanes: int = 0) -> Value:
    """Loads numbers in f64, whatever is stored."""
    x = load(k, storage, pointer, offset, lanes)
    return x if element_of(x.type) is F64 else k.extend(x, like(x, F64))


def store_f64(k: Function, storage: str, x: Value, pointer: Value, offset: Value | int = 0) -> None:
    """Stores an f64, or a vector of them, as `storage`: rounded to f32 first, then to what is narrower."""
    if storage != "f64":
        x = narrowed(k, storage, k.narrow(x, like(x, F32)))
    k.store(x, pointer, offset)
