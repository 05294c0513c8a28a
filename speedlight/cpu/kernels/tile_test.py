"""The first use of instructions for bfloat16: one product by them, and the same by vectors, for the host to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...host.machine import Isa
from ..language.vector import F32, I32, PTR, Function, Module, vec
from ..products.odd_dots import dot, outer_dot
from ..products.tile_registers import ROWS, Amx, Software

TILE_BYTES = 64 * ROWS


@dataclass(frozen=True, slots=True)
class TileTestShape:
    """The specialisation of the module: a vector unit."""

    isa: Isa
    kind: ClassVar[str] = "tile_test"

    @property
    def stem(self) -> str:
        return f"tile_test_{self.isa.name}"


def tile_test_module(s: TileTestShape, symbol: str) -> Module:
    """Writes symbol(memory), of tiles A, B, C, and C + A·B as the unit has it, and by vectors."""
    module = Module(symbol)
    k = module.function(symbol, {"memory": PTR}, public=True)
    _WRITERS[s.isa.product("bf16")](k, s.isa)
    test = k.finish()
    k = module.function(f"{symbol}_joined", {"memory": PTR}, public=True)
    k.call(test, k.p["memory"])
    k.finish()
    return module


def _write_dots(k: Function, isa: Isa) -> None:
    """Takes four numbers at a time through both of Arm's instructions."""
    with k.range(0, TILE_BYTES, 16) as at:
        a, b = (k.load(vec(I32, 4), k.p["memory"], at + n * TILE_BYTES) for n in (0, 1))
        for n, native in enumerate((isa.is_native, False)):
            total = dot(k, native, a, b, k.load(vec(F32, 4), k.p["memory"], at + 2 * TILE_BYTES))
            k.store(outer_dot(k, native, a, b, total), k.p["memory"], at + (3 + n) * TILE_BYTES)


def _write_tiles(k: Function, isa: Isa) -> None:
    row, vectors = k.i64(64), Software(k.module)
    for n, unit in enumerate((Amx() if isa.has_tiles else vectors, vectors)):
        with unit.configured(k):
            for at, register in enumerate((4, 6, 0)):
                unit.load(k, register, k.at(k.p["memory"], at * TILE_BYTES), row)
            unit.dot(k, 0, 4, 6)
            unit.store(k, 0, k.at(k.p["memory"], (3 + n) * TILE_BYTES), row)


_WRITERS = {"amx_tiles": _write_tiles, "odd_pairs": _write_dots}  # of products that are tried
