"""Operands that are loaded each time they are used: for multiply-adds that write their sum over the addend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from .vector import Function, Module, Value, constant


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


def table_of(k: Function, t: ir.Type, values: Sequence[float]) -> Value:
    """Returns the address of constants, each in every lane."""

    def make(module: Module) -> Any:
        kind = ir.ArrayType(t, len(values))
        table: Any = ir.GlobalVariable(module.ir, kind, module.ir.get_unique_name("table"))
        table.linkage, table.global_constant, table.unnamed_addr = "internal", True, True
        table.initializer = ir.Constant(kind, [constant(t, x, math.copysign(1.0, x)) for x in values])
        return table

    return Value(k, k.module.once(f"{t} {values}", make))
