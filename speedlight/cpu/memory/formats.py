"""The formats of a cache's tokens, one class each: how wide an element is, how it is widened to multiply and narrowed
to be kept.

A coded format keeps a scale for each token and head beside the codes: code · scale ≈ x.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...arrays.dtypes import CODES, PAGE_CODES, STORAGE_BYTES
from ..language import conversions
from ..language.functions import like
from ..language.vector import F16, F32, I8, I16, I32, Function, Value, vec

_WHOLE = 1.5 * 2.0**23  # a float32 so large has no fraction


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


class Int8:
    """Whole numbers from -127 to 127."""

    name, is_coded, in_pairs = "int8", True, False
    bits, last = CODES[name].bits, float(CODES[name].largest)
    unit = 1.0

    def offset(self, index: Value) -> Value:
        return index

    def widen(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads one code, or `lanes` side by side, in f32."""
        return k.to_float(_load_codes(k, pointer, offset, lanes, 32), vec(F32, lanes) if lanes else F32)

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
        """Codes of x by a scale that was given, whatever x is: from -128; 0 of NaN, and by a scale not above 0."""
        live = scale > 0.0
        ratio = x / k.select(live, scale, k.const(1.0, x.type))
        zero = k.const(0.0, x.type)
        whole = k.unary("rint", k.select((ratio.differs(ratio) ^ 1) & live, ratio, zero))
        whole = k.min(k.max(whole, k.const(-self.last - 1, x.type)), k.const(self.last, x.type))
        return k.trunc(Value(k, k.b.fptosi(whole.x, like(x, I32))), like(x, I8))


class Float8:
    """float8_e4m3fn: a sign, four bits of exponent and three of mantissa; no infinity."""

    name, is_coded, in_pairs = "float8_e4m3fn", True, False
    bits, last = CODES[name].bits, float(CODES[name].largest)
    unit = 256.0

    def offset(self, index: Value) -> Value:
        return index

    def widen(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads one code, or `lanes` side by side, in f32, over `unit`.

        The exponent is biased by 7, that of f16 by 15: its bits in their place are 2^-8 of it, subnormal or not. NaN
        would become 480: no cache holds it (a row that has one has a scale of NaN).
        """
        whole = _load_codes(k, pointer, offset, lanes, 16)
        bits = (whole << 7) & ~0x4000  # sign, 0, exponent, mantissa, 0 …
        return k.extend(bits.bits(like(bits, F16)), like(bits, F32))

    def narrow_usual(self, k: Function, x: Value, divide: Callable[[Value], Value]) -> Value:
        """Codes of x, which divide() divides by a usual scale: within half a unit of the last code; -0 keeps its
        sign.
        """
        return _round_to_float8(k, divide(k.abs(x)), x)

    def narrow(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by any scale; 0 where that is 0 or NaN."""
        live = scale > 0.0
        ratio = k.abs(x) / k.select(live, scale, k.const(1.0, x.type))
        code = _round_to_float8(k, k.min(ratio, k.const(self.last, x.type)), x)
        return k.select(live, code, k.const(0, code.type))

    def narrow_given(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by a scale that was given, whatever x is: NaN of NaN, 0 by a scale not above 0."""
        return _keep_nan(k, self.narrow(k, x, scale), x, scale)


class Float8OfPages:
    """float8_e5m2: a sign, five bits of exponent and two of mantissa, as float16 begins; of the caller's pages."""

    name, is_coded, in_pairs = "float8_e5m2", True, False
    bits, last = PAGE_CODES[name].bits, float(PAGE_CODES[name].largest)
    unit = 1.0

    def offset(self, index: Value) -> Value:
        return index

    def widen(self, k: Function, pointer: Value, offset: Value | int, lanes: int = 0) -> Value:
        """Loads one code, or `lanes` side by side, in f32."""
        bits = _load_codes(k, pointer, offset, lanes, 16) << 8
        return k.extend(bits.bits(like(bits, F16)), like(bits, F32))

    def narrow(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by any scale; 0 where that is 0 or NaN."""
        live = scale > 0.0
        ratio = k.abs(x) / k.select(live, scale, k.const(1.0, x.type))
        code = _round_to_float8(k, k.min(ratio, k.const(self.last, x.type)), x, mantissa=2, bias=15)
        return k.select(live, code, k.const(0, code.type))

    def narrow_given(self, k: Function, x: Value, scale: Value) -> Value:
        """Codes of x by a scale that was given, whatever x is: NaN of NaN, 0 by a scale not above 0."""
        return _keep_nan(k, self.narrow(k, x, scale), x, scale)


def load_scales(k: Function, codes: TokenFormat, block: Value, offset: Value | int, lanes: int) -> Value:
    """Loads scales of a cache's codes, side by side, times what those are widened over: exactly."""
    scales = k.load(vec(F32, lanes), block, offset)
    return scales if codes.unit == 1 else scales * codes.unit


def _load_codes(k: Function, pointer: Value, offset: Value | int, lanes: int, bits: int) -> Value:
    """Loads bytes as integers of so many bits."""
    x = k.load(vec(I8, lanes) if lanes else I8, pointer, offset)
    return Value(k, k.b.sext(x.x, like(x, {16: I16, 32: I32}[bits])))


def _keep_nan(k: Function, code: Value, x: Value, scale: Value) -> Value:
    """Returns float8's NaN in place of a code where x is NaN, and its scale is above 0."""
    return k.select(x.differs(x) & (scale > 0.0), k.const(0x7F, code.type), code)


def _round_to_float8(k: Function, size: Value, signed: Value, mantissa: int = 3, bias: int = 7) -> Value:
    """Returns a magnitude (f32, up to the largest) as the bits of a float8, to nearest even, with the sign of another
    number. mantissa, bias: bits of its fraction, and its exponent's bias.

    2^e is its binade, or that of the smallest normal numbers. 2^e and a 2^20th of it (of e4m3) is rounded to steps of
    2^(e-23), of which its last bits are the number; the digits of e come on top, in 8 bits, and what these have too
    much of is there from the start.
    """
    wide = like(size, I32)
    excess = -(127 - bias << mantissa) & 0xFF
    binade = k.max(size.bits(wide), k.const((128 - bias) << 23, wide)) & 0x7F800000
    last_bits = k.const(2.0 ** (mantissa - 23), size.type)
    steps = k.fma(size, last_bits, (binade | excess - (1 << mantissa)).bits(size.type)).bits(wide)
    return k.trunc(steps + (steps >> 23 - mantissa) | ((signed.bits(wide) >> 24) & 0x80), like(size, I8))


TokenFormat = Plain | Int8 | Float8 | Float8OfPages
Codes = Int8 | Float8
FORMATS: dict[str, TokenFormat] = {x.name: x for x in (*map(Plain, STORAGE_BYTES), Int8(), Float8(), Float8OfPages())}
