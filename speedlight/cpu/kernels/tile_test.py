"""The first use of tile registers: one product on them, and the same by vectors, for the host to compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...host.machine import Isa
from ..language.vector import PTR, Module
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
    row, vectors = k.i64(64), Software(module)
    for n, unit in enumerate((Amx() if s.isa.has_tiles else vectors, vectors)):
        with unit.configured(k):
            for at, register in enumerate((4, 6, 0)):
                unit.load(k, register, k.at(k.p["memory"], at * TILE_BYTES), row)
            unit.dot(k, 0, 4, 6)
            unit.store(k, 0, k.at(k.p["memory"], (3 + n) * TILE_BYTES), row)
    test = k.finish()
    k = module.function(f"{symbol}_joined", {"memory": PTR}, public=True)
    k.call(test, k.p["memory"])
    k.finish()
    return module
