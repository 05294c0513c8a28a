"""Numbers as arrays store them: f32, f64, f16 and bf16, widened exactly, narrowed to nearest even; codes, widened."""

from __future__ import annotations

from llvmlite import ir

from .functions import like
from .vector import F16, F32, F64, I8, I16, I32, Function, Value, element_of, vec


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


# what a code is multiplied by, once load_code has widened it
CODE_UNIT = {"int8": 1.0, "float8_e4m3fn": 256.0}


def load_code(k: Function, dtype: str, pointer: Value, offset: Value | int = 0, lanes: int = 0) -> Value:
    """One code, or `lanes` side by side, in f32, over CODE_UNIT.

    The exponent of e4m3 is biased by 7, that of f16 by 15: its bits in their place are 2^-8 of it, subnormal or not.
    NaN would become 480: no cache holds it (a row that has one has a scale of NaN).
    """
    x = k.load(vec(I8, lanes) if lanes else I8, pointer, offset)
    whole = Value(k, k.b.sext(x.x, like(x, I32 if dtype == "int8" else I16)))
    if dtype == "int8":
        return k.to_float(whole, like(x, F32))
    bits = (whole << 7) & ~0x4000  # sign, 0, exponent, mantissa, 0 …
    return k.extend(bits.bits(like(x, F16)), like(x, F32))


def to_float8(k: Function, size: Value, signed: Value) -> Value:
    """A magnitude (f32, up to 448) as the bits of float8_e4m3fn, to nearest even, with the sign of another number.

    2^e is its binade, or that of the smallest normal numbers. 2^e and a 2^20th of it is rounded to steps of 2^(e-23),
    of which its last bits are the number; the digits of e come on top, in 8 bits, and what these have too much of is
    there from the start.
    """
    wide = like(size, I32)
    bias = -(127 - 7 << 3) & 0xFF
    binade = k.max(size.bits(wide), k.const((127 - 6) << 23, wide)) & 0x7F800000
    steps = k.fma(size, k.const(2.0**-20, size.type), (binade | bias - 8).bits(size.type)).bits(wide)
    return k.trunc(steps + (steps >> 20) | ((signed.bits(wide) >> 24) & 0x80), like(size, I8))


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
    """The same in f64, whatever is stored."""
    x = load(k, storage, pointer, offset, lanes)
    return x if element_of(x.type) is F64 else k.extend(x, like(x, F64))


def store_f64(k: Function, storage: str, x: Value, pointer: Value, offset: Value | int = 0) -> None:
    """Stores an f64, or a vector of them, as `storage`: rounded to f32 first, then to what is narrower."""
    if storage != "f64":
        x = narrowed(k, storage, k.narrow(x, like(x, F32)))
    k.store(x, pointer, offset)
