"""Arm's instructions for bf16: total ← total ⊕ (a₀b₀ ⊕ a₁b₁), where ⊕ rounds to odd: to the neighbour whose last bit is
1. Subnormal numbers are zeros, before and after.

`dot` takes a pair in each lane, `outer_dot` two pairs, one after the other, of 2 rows x 2 columns. Another CPU has the
same bits by vectors, slowly; there, sums that rounding to nearest takes to infinity stay so.
"""

from __future__ import annotations

from ..language.vector import BF16, F32, I32, Function, Value, vec
from .packing import split_pairs

_NUMBERS, _PAIRS, _HALVES = vec(F32, 4), vec(I32, 4), vec(BF16, 8)
_SIGN = -0x80000000
_SMALLEST = 2.0**-126  # normal number


def dot(k: Function, native: bool, a: Value, b: Value, total: Value) -> Value:
    """Returns total ⊕ (a₀b₀ ⊕ a₁b₁), lane by lane."""
    return _instruction(k, "bfdot", a, b, total) if native else _dot(k, a, b, total)


def outer_dot(k: Function, native: bool, a: Value, b: Value, total: Value) -> Value:
    """Returns total[row, column] with two pairs of each of two rows, a, and of two columns, b."""
    if native:
        return _instruction(k, "bfmmla", a, b, total)
    for pair in (0, 1):
        x, y = ([pair, pair, 2 + pair, 2 + pair], [pair, 2 + pair] * 2)
        total = _dot(k, k.shuffle(a, a, x), k.shuffle(b, b, y), total)
    return total


def _instruction(k: Function, name: str, a: Value, b: Value, total: Value) -> Value:
    suffix = ".v4f32.v8bf16" * (name == "bfdot")
    return k.intrinsic(f"llvm.aarch64.neon.{name}{suffix}", _NUMBERS, total, a.bits(_HALVES), b.bits(_HALVES))


def _dot(k: Function, a: Value, b: Value, total: Value) -> Value:
    low, high = (_flush(k, _flush(k, x) * _flush(k, y)) for x, y in zip(split_pairs(a), split_pairs(b), strict=True))
    return _add(k, _flush(k, total), _add(k, low, high))


def _add(k: Function, a: Value, b: Value) -> Value:
    """Returns a ⊕ b. What nearest rounding leaves, which is exact, says on which side of an even sum it lies."""
    total = a + b
    part = total - a
    rest = (a - (total - part)) + (b - part)
    bits = total.bits(_PAIRS)
    outward = (bits ^ rest.bits(_PAIRS)) > -1
    step = k.select(outward, k.const(1, _PAIRS), k.const(-1, _PAIRS))
    inexact = (k.abs(rest) > 0.0) & (bits & 1).equals(0)
    return _flush(k, (bits + k.select(inexact, step, k.const(0, _PAIRS))).bits(_NUMBERS))


def _flush(k: Function, x: Value) -> Value:
    """Returns x, or a zero of its sign where it is subnormal."""
    return k.select(k.abs(x) < _SMALLEST, (x.bits(_PAIRS) & _SIGN).bits(_NUMBERS), x)
