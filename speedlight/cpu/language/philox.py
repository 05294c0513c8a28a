"""Philox 4x32-10 on vectors: the words of problem/philox.py, which says what dropout drops.

A word is held in 64 bits, so that one multiplication gives both halves of its product; what is in the upper 32 bits is
never looked at. What is the same for all lanes may be one number, and is computed once.
"""

from __future__ import annotations

from ...problem.philox import MULTIPLIERS, ROUNDS, STEPS
from .vector import I32, I64, Function, Value, vec

_WORD = 0xFFFFFFFF


def philox(k: Function, counter: tuple[Value, Value, Value, Value], seed: Value, lanes: int) -> list[Value]:
    """Four random words of each lane's counter, in vectors of I32. `counter`: I64, one number or one for each lane."""
    a, b, c, d = counter
    first, second = seed & _WORD, seed >> 32
    for n in range(ROUNDS):
        x, y = (_multiplied(k, word, m) for word, m in zip((a, c), MULTIPLIERS, strict=True))
        a, b = _xor(k, _xor(k, y >> 32, b, lanes), first + n * STEPS[0], lanes), y
        c, d = _xor(k, _xor(k, x >> 32, d, lanes), second + n * STEPS[1], lanes), x
    return [k.trunc(_vector(k, word, lanes), vec(I32, lanes)) for word in (a, b, c, d)]


def _multiplied(k: Function, word: Value, by: int) -> Value:
    """The product of a word, of 64 bits: one multiplication of halves, since the upper ones are known to be 0."""
    return (word & _WORD) * k.const(by, word.type)


def _xor(k: Function, x: Value, y: Value, lanes: int) -> Value:
    if x.type == y.type:
        return x ^ y
    return _vector(k, x, lanes) ^ _vector(k, y, lanes)


def _vector(k: Function, x: Value, lanes: int) -> Value:
    return k.splat(x, lanes) if x.type == I64 else x


def keeps(k: Function, words: list[Value], drop_below: Value) -> list[Value]:
    """Which lanes' weights stay, of each word: those that are not below `drop_below`, an I64 up to 2^32."""
    lanes = words[0].x.type.count
    limit = k.splat(k.trunc(drop_below, I32), lanes)
    some = k.splat(Value(k, k.b.icmp_signed("<=", drop_below.x, I64(_WORD))), lanes)
    return [Value(k, k.b.icmp_unsigned(">=", word.x, limit.x)) & some for word in words]


def in_order(k: Function, words: list[Value]) -> list[Value]:
    """Returns, for counters of as many quads of keys, one after another, the words of the keys, in four vectors."""
    (low02, high02), (low13, high13) = (_interleaved(k, words[n], words[n + 2]) for n in (0, 1))
    return [*_interleaved(k, low02, low13), *_interleaved(k, high02, high13)]


def _interleaved(k: Function, x: Value, y: Value) -> tuple[Value, Value]:
    """x0 y0 x1 y1 …, in two vectors."""
    n = x.x.type.count
    order = [lane // 2 + n * (lane % 2) for lane in range(2 * n)]
    return k.shuffle(x, y, order[:n]), k.shuffle(x, y, order[n:])
