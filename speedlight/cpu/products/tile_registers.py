"""Registers of sixteen rows of 64 bytes, and their product of bf16 pairs: Intel's AMX, or the same in AVX-512.

    C[m, n] ← C[m, n] + (e + o)    e, o: chains of fused multiply-adds from +0 over the first, and the second, elements
                                   of the sixteen pairs of A[m, :] and B[:, n]

Subnormal numbers are zeros before and after each operation, whatever the rounding mode's register says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from ..language.vector import F32, I8, I32, I64, PTR, VOID, Function, Module, Value, vec

ROWS = 16  # of a register, and pairs of a row
_USUAL, _FLUSHING = 0x1F80, 0x9FC0  # MXCSR as regions have it; with subnormal numbers as zeros
# palette 1; bytes of a row of each of eight registers, then their rows
_CONFIG = (1, 0, *[0x0040004000400040] * 2, 0, 0, 0x1010101010101010, 0)


class Amx:
    """Registers by number: LLVM configures and allocates nothing."""

    def zero(self, k: Function, t: int) -> None:
        k.intrinsic("llvm.x86.tilezero", VOID, k.const(t, I8))

    def load(self, k: Function, t: int, at: Value, row: Value) -> None:
        """Loads register t from rows so many bytes apart."""
        k.intrinsic("llvm.x86.tileloadd64", VOID, k.const(t, I8), at, row)

    def store(self, k: Function, t: int, at: Value, row: Value) -> None:
        k.intrinsic("llvm.x86.tilestored64", VOID, k.const(t, I8), at, row)

    def dot(self, k: Function, c: int, a: int, b: int) -> None:
        k.intrinsic("llvm.x86.tdpbf16ps", VOID, *[k.const(x, I8) for x in (c, a, b)])

    @contextlib.contextmanager
    def configured(self, k: Function) -> Iterator[None]:
        """Makes all registers whole meanwhile."""
        config = k.buffer(I64, len(_CONFIG))
        for i, word in enumerate(_CONFIG):
            k.store(k.i64(word), config, 8 * i)
        k.intrinsic("llvm.x86.ldtilecfg", VOID, config)
        yield
        k.intrinsic("llvm.x86.tilerelease", VOID)


class Software:
    """Registers on the stack of the function that is being written."""

    def __init__(self, module: Module) -> None:
        self.copy, self.product = _tile_copy(module), flushed(module, _tile_dot(module))
        self.buffers: dict[str, Value] = {}

    def _at(self, k: Function, t: int) -> Value:
        if k.f.name not in self.buffers:
            self.buffers[k.f.name] = k.buffer(F32, 8 * 256)
        return k.at(self.buffers[k.f.name], t * 1024)

    def zero(self, k: Function, t: int) -> None:
        for m in range(ROWS):
            k.store(k.const(0.0, vec(F32, 16)), self._at(k, t), 64 * m)

    def load(self, k: Function, t: int, at: Value, row: Value) -> None:
        k.call(self.copy, self._at(k, t), k.i64(64), at, row)

    def store(self, k: Function, t: int, at: Value, row: Value) -> None:
        k.call(self.copy, at, row, self._at(k, t), k.i64(64))

    def dot(self, k: Function, c: int, a: int, b: int) -> None:
        k.call(self.product, *(self._at(k, t) for t in (c, a, b)))

    def configured(self, k: Function) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


Registers = Amx | Software


def multiply(
    k: Function, u: Registers, chunks: Value, a: Sequence[Value], a_row: Value, b: Sequence[Value], b_row: Value
) -> None:
    """Sums of A · B over chunks of sixteen pairs, from zeros, in registers 0, 1, …: those of a block of rows side by
    side. a: addresses of blocks of sixteen rows, chunks side by side; b: of blocks of columns, chunks below each other.
    """
    count = len(a) * len(b)
    for t in range(count):
        u.zero(k, t)
    with k.range(0, chunks) as t:
        for i, block in enumerate(a):
            u.load(k, count + i, k.at(block, t * 64), a_row)
        for i, block in enumerate(b):
            u.load(k, count + len(a) + i, k.at(block, t * (b_row * ROWS)), b_row)
        for i in range(len(a)):
            for j in range(len(b)):
                u.dot(k, i * len(b) + j, count + i, count + len(a) + j)


def flushed(module: Module, f: Any) -> Any:
    """Returns a function like f that takes subnormal numbers for zeros. No call is inlined: nothing moves out or in."""
    types = {f"x{i}": arg.type for i, arg in enumerate(f.args)}
    k = module.function(f"{f.name}_flushed", types, f.function_type.return_type, special=f.name in module.special)
    with k.b.goto_entry_block():
        modes = [Value(k, k.b.alloca(I32)) for _ in range(2)]
    for at, mode in zip(modes, (_FLUSHING, _USUAL), strict=True):
        k.store(k.const(mode, I32), at)
    k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, modes[0])
    result = k.call(f, *k.p.values())
    k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, modes[1])
    return k.finish(None if f.function_type.return_type == VOID else result)


def _tile_copy(module: Module) -> Any:
    k = module.function("tile_copy", {"to": PTR, "to_row": I64, "source": PTR, "row": I64})
    with k.range(0, ROWS) as m:
        k.store(k.load(vec(F32, 16), k.p["source"], m * k.p["row"]), k.p["to"], m * k.p["to_row"])
    return k.finish()


def _tile_dot(module: Module) -> Any:
    k = module.function("tile_dot", {"c": PTR, "a": PTR, "b": PTR})
    numbers, words, rows = vec(F32, 16), vec(I32, 16), 4
    with k.range(0, ROWS, rows) as m:
        chains = [[k.variable(k.const(0.0, numbers)) for _ in (0, 1)] for _ in range(rows)]
        with k.range(0, ROWS) as t:
            b = k.load(words, k.p["b"], t * 64)
            for r, both in enumerate(chains):
                a = k.splat(k.load(I32, k.p["a"], (m + r) * 64 + t * 4), 16)
                for chain, x, y in zip(both, (a << 16, a & -65536), (b << 16, b & -65536), strict=True):
                    chain.set(k.fma(x.bits(numbers), y.bits(numbers), chain.get()))
        for r, (even, odd) in enumerate(chains):
            c = k.at(k.p["c"], (m + r) * 64)
            k.store(k.load(numbers, c) + (even.get() + odd.get()), c)
    return k.finish()
