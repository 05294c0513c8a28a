"""The kernel that makes gradients of tables: what flows to every entry that a score looks up.

Blocks of queries, ascending by (item, head, position), are cut into shares, whose number depends on the problem alone.
A share has sums of its own, which its blocks join in order: one is a task, and waits for the one before. Where no two
positions of queries read the same entry, a share may be what is at the same positions, and all have the same sums.
"""

from __future__ import annotations

from ...problem.problem import TILE
from ..language.vector import I64, Function, Module, Value
from ..memory.records import BLOCK_OF, GRADIENT_ITEM_BYTES, GradientItem
from ..memory.shape import Shape
from .gradient_blocks import PairParts, PairWork
from .panels import Panel, Tile
from .score_backward import find_sums
from .task import attention_module


def tables_module(s: Shape, symbol: str) -> Module:
    """Writes the kernel for one shape; `symbol` is the region's public name."""
    return attention_module(PairParts(s, "tables"), _Task, symbol)


class _Task(PairWork):
    """One block of queries of one head, and all its keys."""

    def __init__(self, k: Function, parts: PairParts) -> None:
        super().__init__(k, parts)
        self.sums = find_sums(k, self.a, self.s.program, self.share)

    def _find_item(self) -> GradientItem:
        k, a = self.k, self.a
        at = k.at(k.pointer(a.blocks), k.p["number"] * BLOCK_OF.bytes)
        item, self.head, self.step, self.share, self.turn = (
            k.load(I64, at, BLOCK_OF.offset(x)) for x in BLOCK_OF.names
        )
        self.progress = k.at(k.pointer(a.progress), self.share * 8)
        self.range = k.i64(0)
        at = k.at(k.pointer(a.items), item * GRADIENT_ITEM_BYTES)
        return GradientItem._make(k.load(I64, at, 8 * word) for word in range(len(GradientItem._fields)))

    def run(self) -> None:
        k = self.k
        self.wait(self.turn)
        most = self.pack_all()
        with k.range(0, self.item.k_len, TILE) as start:
            count = k.min(self.item.k_len - start, k.i64(TILE))
            with k.when(self.sees(start, count, most)):
                tile = self.stage_tile(start, count)
                with k.range(0, self.a.panels) as i:
                    self.if_seen(Panel(self, i), tile, self.panel_tile)
        k.fetch_add(self.progress, 0, 1)

    def panel_tile(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> None:
        """Keys [first, end) of a tile for one panel: P and dS, then what flows to entries."""
        self.weigh(panel, tile, first, end, clear)
        self.add_to_entries(panel, tile.start + first, end - first, self.sums)
