"""The formats of a cache's tokens, one class each: how wide an element is, how it is widened to multiply and narrowed
to be kept.

A coded format keeps a scale for each token and head beside the codes: code · scale ≈ x.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from llvmlite import ir

from ...arrays.dtypes import CODES, DTYPES, PAGE_CODES, STORAGE_BYTES
from ..language import conversions
from ..language.functions import like
from ..language.vector import F16, F32, I1, I8, I16, I32, Function, Value, lanes_of, vec

_WHOLE = 1.5 * 2.0**23  # a float32 so large has no fraction
_INFINITE = 0x7F800000  # as bits of a float32
_LARGEST_F16, _INFINITE_F16 = 65504.0, 65520.0  # from the second on a number becomes infinity
_NAN_F16 = 0x7E00
NIBBLES = [float(n - 16 * (n > 7)) for n in range(16)]  # by their bits


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers as arrays store them, without scales: f32, f64, f16, bf16."""

    name: str
    is_coded = False
    unit = 1.0  # what a scale is multiplied by, for what widen() gives

    @property
    def bits(self) -> int:
        return 8 * STORAGE_BYTES[self.name]

    @property
    def in_pairs(self) -> bool:
        """Has neighbouring elements of a key, or keys of a value, side by side, as the dot instruction takes them."""
        return self.name == "bf16"

    def offset(self, index: Value) -> Value:
        """Returns where an element of a row lies, in bytes."""
        return index * (self.bits // 8)

    def widen(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads one number, or `lanes` side by side, in f32; in f64 where they are f64."""
        return conversions.load(k, self.name, pointer, offset, lanes)


class _Bytes(ABC):
    """Base of codes of a byte each, with a scale for each token and head."""

    is_coded, in_pairs = True, False
    unit = 1.0

    def offset(self, index: Value) -> Value:
        return index

    def widen(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads one code, or `lanes` side by side, in f32, over `unit`."""
        return self.number(k, load_codes(k, pointer, offset, lanes))

    @abstractmethod
    def number(self, k: Function, code: Value) -> Value:
        """Returns a code, or a vector of them, in f32, over `unit`."""


class Int8(_Bytes):
    """Whole numbers from -127 to 127."""

    name = "int8"
    bits, last = CODES[name].bits, float(CODES[name].largest)

    def number(self, k: Function, code: Value) -> Value:
        return k.to_float(_extended(k, code, I32), like(code, F32))

    def magnitude(self, k: Function, code: Value) -> Value:
        """Returns codes without their signs: places in `bf16`."""
        return k.intrinsic(f"llvm.abs.v{lanes_of(code)}i8", code.type, code, k.const(0, I1))

    @property
    def bf16(self) -> list[int]:
        """Returns the bits of each magnitude of 0 to 127 in bf16: exact."""
        return [bf16_bits(float(n)) for n in range(128)]

    def narrow_usual(self, k: Function, x: Value, divide: Callable[[Value], Value]) -> Value:
        """Codes of x, which divide() divides by a usual scale: within 127 and a half, the last bits of a sum that has
        no others are the code.
        """
        return k.trunc((divide(x) + _WHOLE).bits(like(x, I32)), like(x, I8))

    def narrow(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by any scale; 0 where that is 0 or NaN."""
        live = scale > 0.0
        whole = k.unary("rint", x / k.select(live, scale, k.const(1.0, x.type)))
        whole = k.min(k.max(whole, k.const(-self.last, x.type)), k.const(self.last, x.type))
        number = Value(k, k.b.fptosi(whole.x, like(x, I32)))
        return k.trunc(k.select(live, number, k.const(0, number.type)), like(x, I8))

    def narrow_given(self, k: Function, x: Value, scale: Value) -> Value:
        """Returns codes of x by a given scale of either sign: from -128 on; 0 of NaN, and by a scale of 0 or NaN."""
        live = k.abs(scale) > 0.0
        ratio = x / k.select(live, scale, k.const(1.0, x.type))
        zero = k.const(0.0, x.type)
        whole = k.unary("rint", k.select((ratio.differs(ratio) ^ 1) & live, ratio, zero))
        whole = k.min(k.max(whole, k.const(-self.last - 1, x.type)), k.const(self.last, x.type))
        return k.trunc(Value(k, k.b.fptosi(whole.x, like(x, I32))), like(x, I8))


class _Floats(_Bytes):
    """Base of float8: a sign, an exponent, a mantissa."""

    last: float
    mantissa: int  # bits
    bias: int  # of the exponent

    def narrow(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by any scale; 0 where that is 0 or NaN."""
        live = scale > 0.0
        ratio = k.abs(x) / k.select(live, scale, k.const(1.0, x.type))
        code = self.rounded(k, k.min(ratio, k.const(self.last, x.type)), x)
        return k.select(live, code, k.const(0, code.type))

    def narrow_given(self, k: Function, x: Value, scale: Value) -> Value:
        """Returns codes of x by a given scale of either sign: NaN of NaN, 0 by a scale of 0 or NaN."""
        size, integer = k.abs(scale), like(x, I32)
        sign = scale.bits(integer) & k.const(-(1 << 31), integer)
        code = self.narrow(k, (x.bits(integer) ^ sign).bits(x.type), size)
        return k.select(x.differs(x) & (size > 0.0), k.const(0x7F, code.type), code)

    def rounded(self, k: Function, size: Value, signed: Value) -> Value:
        """Returns a magnitude (f32, up to the largest) as a code, to nearest even, with the sign of another number.

        2^e is its binade, or that of the smallest normal numbers. 2^e and a 2^20th of it (of e4m3) is rounded to steps
        of 2^(e-23), of which its last bits are the number; the digits of e come on top, in 8 bits, and what these have
        too much of is there from the start.
        """
        wide, mantissa, bias = like(size, I32), self.mantissa, self.bias
        excess = -(127 - bias << mantissa) & 0xFF
        binade = k.max(size.bits(wide), k.const((128 - bias) << 23, wide)) & 0x7F800000
        last_bits = k.const(2.0 ** (mantissa - 23), size.type)
        steps = k.fma(size, last_bits, (binade | excess - (1 << mantissa)).bits(size.type)).bits(wide)
        return k.trunc(steps + (steps >> 23 - mantissa) | ((signed.bits(wide) >> 24) & 0x80), like(size, I8))


class Float8(_Floats):
    """float8_e4m3fn: a sign, four bits of exponent and three of mantissa; no infinity."""

    name, mantissa, bias = "float8_e4m3fn", 3, 7
    bits, last = CODES[name].bits, float(CODES[name].largest)
    unit = 256.0

    def number(self, k: Function, code: Value) -> Value:
        """Returns a code, or a vector of them, in f32, over `unit`.

        The exponent is biased by 7, that of f16 by 15: its bits in their place are 2^-8 of it, subnormal or not. NaN
        would become 480: no cache holds it (a row that has one has a scale of NaN).
        """
        bits = (_extended(k, code, I16) << 7) & ~0x4000  # sign, 0, exponent, mantissa, 0 …
        return k.extend(bits.bits(like(bits, F16)), like(bits, F32))

    def magnitude(self, k: Function, code: Value) -> Value:
        """Returns codes without their signs: places in `bf16`."""
        return code & 0x7F

    @property
    def bf16(self) -> list[int]:
        """Returns the bits of each magnitude in bf16, over `unit`: exact."""
        every = np.arange(128, dtype=np.uint16) << 7
        return [bf16_bits(float(x)) for x in every.view(np.float16)]

    def narrow_usual(self, k: Function, x: Value, divide: Callable[[Value], Value]) -> Value:
        """Codes of x, which divide() divides by a usual scale: within half a unit of the last code; -0 keeps its
        sign.
        """
        return self.rounded(k, divide(k.abs(x)), x)


class Float8OfPages(Float8):
    """float8_e4m3fn with its NaN, in the caller's pages."""

    def number(self, k: Function, code: Value) -> Value:
        return k.select((code & 0x7F).equals(0x7F), k.const(math.nan, like(code, F32)), super().number(k, code))


class HalfFloat8(_Floats):
    """float8_e5m2: a sign, five bits of exponent and two of mantissa, as float16 begins; of the caller's pages."""

    name, mantissa, bias = "float8_e5m2", 2, 15
    bits, last = PAGE_CODES[name].bits, float(PAGE_CODES[name].largest)

    def number(self, k: Function, code: Value) -> Value:
        bits = _extended(k, code, I16) << 8
        return k.extend(bits.bits(like(bits, F16)), like(bits, F32))


class Int4:
    """Whole numbers from -8 to 7, two in a byte, with scales of float16: ggml's q4_0."""

    name, is_coded, in_pairs = "int4", True, False
    bits, last = CODES[name].bits, float(CODES[name].largest)
    unit = 1.0

    def offset(self, index: Value) -> Value:
        """Returns where a row of pairs has one, in bytes."""
        return index

    def widen_pairs(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> tuple[Value, Value]:
        """Loads bytes side by side, or one; returns the codes of their low and of their high halves, in f32."""
        whole = _extended(k, load_codes(k, pointer, offset, lanes), I32)
        if lanes == len(NIBBLES):
            return _looked_up(k, F32, NIBBLES, whole), _looked_up(k, F32, NIBBLES, whole >> 4)
        kind = like(whole, F32)
        return k.to_float(_signed(k, whole << 28, 28), kind), k.to_float(_signed(k, whole, 4), kind)

    def bf16_pairs(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads bytes side by side, or one; returns both codes as a pair of bf16."""
        if lanes == len(NIBBLES):
            whole = _extended(k, load_codes(k, pointer, offset, lanes), I32)
            halves = [bf16_bits(x) for x in NIBBLES]
            upper = [(x << 16) - (x >> 15 << 32) for x in halves]
            return _looked_up(k, I32, halves, whole) | _looked_up(k, I32, upper, whole >> 4)
        low, high = self.widen_pairs(k, pointer, offset, lanes)
        return (low.bits(like(low, I32)) >> 16) | high.bits(like(high, I32))

    def scale_bits(self, k: Function, x: Value) -> tuple[Value, Value]:
        """Returns the scale of numbers in lanes, as bits of float16, and what they are multiplied by to be coded: 0 if
        their codes are 0.
        """
        sizes = x.bits(like(x, I32)) & 0x7FFFFFFF
        lanes = lanes_of(x)
        most = k.intrinsic(f"llvm.vector.reduce.smax.v{lanes}i32", I32, sizes)
        word = ir.IntType(lanes)
        first = k.intrinsic(f"llvm.cttz.i{lanes}", word, sizes.equals(k.splat(most, lanes)).bits(word), k.const(1, I1))
        negative = ((((x < 0.0).bits(word)) >> first) & 1).differs(0)
        size = most.bits(F32) * (1 / self.last)
        size = k.select(size >= _INFINITE_F16, k.const(_LARGEST_F16, F32), size)
        scale = k.select(negative, size, -size)  # the largest number is coded as -8
        bits = k.select(most < _INFINITE, k.narrow(scale, F16).bits(I16), k.const(_NAN_F16, I16))
        live = (most < _INFINITE) & (bits & 0x7FFF).differs(0)
        return bits, k.select(live, k.const(1.0, F32) / scale, k.const(0.0, F32))

    def narrow(self, k: Function, x: Value, factor: Value) -> Value:
        """Codes of numbers in lanes, as bytes; `factor`: as scale_bits() gives it."""
        wide, zero = like(x, I32), k.const(0.0, x.type)
        factor = k.splat(factor, lanes_of(x))
        moved = k.min(k.max(x * factor + 8.5, zero), k.const(15.0, x.type))
        codes = Value(k, k.b.fptosi(moved.x, wide)) - 8
        return k.trunc(k.select(factor.differs(0.0), codes, k.const(0, wide)), like(x, I8))


def load_scales(k: Function, codes: TokenFormat, block: Value, token: Value | int, lanes: int) -> Value:
    """Loads scales of a cache's codes, of tokens from one on, times what those are widened over: exactly.

    block: where those of its tokens lie, of some columns.
    """
    row = CODES[codes.name]
    scales = conversions.load(k, DTYPES[row.scale][0], block, token * row.scale_bytes, lanes)
    return scales if codes.unit == 1 else scales * codes.unit


def load_codes(k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
    """Loads one code, or `lanes` side by side."""
    return k.load(vec(I8, lanes) if lanes else I8, pointer, offset)


def _extended(k: Function, code: Value, kind: ir.Type) -> Value:
    return Value(k, k.b.sext(code.x, like(code, kind)))


def bf16_bits(x: float) -> int:
    """Returns the bits of a number that bf16 has."""
    return int(np.float32(x).view(np.uint32)) >> 16


def _looked_up(k: Function, kind: ir.Type, table: Sequence[float], index: Value) -> Value:
    """Looks up 16 numbers in AVX-512, by the last four bits of a vector of words."""
    words = Value(k, ir.Constant(vec(kind, len(table)), list(table)))
    name = "sf" if kind is F32 else "si"
    return k.intrinsic(f"llvm.x86.avx512.permvar.{name}.512", words.type, words, index)


def _signed(k: Function, x: Value, shift: int) -> Value:
    """Shifts integers to the right, and copies their sign."""
    return Value(k, k.b.ashr(x.x, k.const(shift, x.type).x))


ByteFormat = Int8 | Float8  # of a cache's codes, a byte each
NumberFormat = Plain | ByteFormat | HalfFloat8  # whose elements are widened one by one
TokenFormat = NumberFormat | Int4
NUMBERS = {x: Plain(x) for x in STORAGE_BYTES}
FORMATS: dict[str, TokenFormat] = {**NUMBERS, **{x.name: x for x in (Int8(), Float8(), Int4())}}
PAGE_FORMATS: dict[str, TokenFormat] = {  # of codes in arrays
    x.name: x for x in (Int8(), Float8OfPages(), HalfFloat8())
}
