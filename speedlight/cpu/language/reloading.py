"""Operands that are loaded each time they are used: for multiply-adds that write their sum over the addend."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from llvmlite import ir

from .vector import Function, Module, Value, bytes_of, constant, vec


class _VolatileLoad(ir.instructions.LoadInstr):
    """A load that LLVM leaves where it is, which llvmlite lacks."""

    def descr(self, buf: list[str]) -> None:
        text: list[str] = []
        super().descr(text)
        buf.append("".join(text).replace("load", "load volatile", 1))


def load_again(k: Function, t: ir.Type, pointer: Value, offset: int) -> Value:
    """Loads a value that no register keeps."""
    found = _VolatileLoad(k.b.block, k.at(pointer, offset).x, typ=t)
    k.b._insert(found)
    return Value(k, found)


def copies(k: Function, pointer: Value, count: int) -> list[Value]:
    """Returns a pointer as often, such that LLVM takes no two for equal: what is loaded from one is loaded again from
    another, as the operand of the instruction that needs it.
    """
    place = k.buffer(pointer.type, 1)
    k.store(pointer, place)
    return [load_again(k, pointer.type, place, 0) for _ in range(count)]


def addends(k: Function, t: ir.Type, values: Sequence[float]) -> Iterator[Value]:
    """Yields numbers that a chain of multiply-adds adds, in every lane of `t`, where each is added.

    Under k.in_step() all parts share one load there. It keeps their chains side by side, which LLVM would else take one
    after another to save registers.
    """
    if k.parts == 1:
        yield from [k.const(x, t) for x in values]
        return
    whole: Any = t
    one = vec(whole.element, whole.count // k.parts)
    table = k.once(f"{one} {values}", lambda: _on_stack(k, one, values))
    for i in range(len(values)):
        yield k.joined([load_again(k, one, k.at(table, i * bytes_of(one)), 0)] * k.parts)


def _on_stack(k: Function, t: ir.Type, values: Sequence[float]) -> Value:
    """Stores numbers, each in every lane, before the function begins: where it is compiled in parts there is no other
    place.
    """
    table = k.buffer(t, len(values))
    with k.b.goto_entry_block():
        for i, x in enumerate(values):
            k.store(k.const(x, t), table, i * bytes_of(t))
    return table


def table_of(k: Function, t: ir.Type, values: Sequence[float]) -> Value:
    """Returns the address of constants, each in every lane."""

    def make(module: Module) -> Any:
        kind = ir.ArrayType(t, len(values))
        table: Any = ir.GlobalVariable(module.ir, kind, module.ir.get_unique_name("table"))
        table.linkage, table.global_constant, table.unnamed_addr = "internal", True, True
        table.initializer = ir.Constant(kind, [constant(t, x, math.copysign(1.0, x)) for x in values])
        return table

    return Value(k, k.module.once(f"{t} {values}", make))
