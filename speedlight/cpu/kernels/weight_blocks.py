"""Blocks of queries against tiles of keys, down to P: weights that are made again from a log-sum-exp.

A block is QUERY_BLOCK positions of one head, from a multiple of that on, in panels whose lanes are queries; lanes
before the first query and after the last one see nothing. What becomes of P: gradient_blocks.py, key_weights.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...problem.problem import QUERY_BLOCK
from ..language.vector import I1, I32, Function, Module, Value
from ..memory.records import QUERY_ENDS, QUERY_LANES
from ..memory.shape import Shape
from ..products.outer_gradients import product_tile
from ..products.product import outer_product_of
from .gradient_rows import stage_rows
from .gradient_tiles import Weights
from .lower import expression_tile, per_query_streams, prefetch_addresses
from .panels import Panel, PanelWork, Tile
from .staging import pack_queries
from .task import Box, look, pause
from .visibility import extent, visibility

_SPINS = 64  # looks before a waiting thread lets others run


class WeightParts:
    """The functions of a module that make P."""

    def __init__(self, s: Shape, name: str, *, last: bool = True) -> None:
        """`last`: nothing else changes P, or dS."""
        self.shape, self.module = s, Module(f"{name}_{s.storage}")
        m, program = self.module, s.program
        self.visibility = visibility(m, s, program) if program and program.may_hide else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.pack, self.stage = pack_queries(m, s), stage_rows(m, s)
        self.product_tile = product_tile(outer_product_of(s), m)
        self.per_query_streams = per_query_streams(program) if program else []
        self.prefetch_addresses = prefetch_addresses(m, s, program) if self.per_query_streams else None
        self.expression = expression_tile(m, s, program) if program else None
        self.weights = Weights(m, s, last=last).function()


class BlockWork(PanelWork):
    """One block of queries of one head. A subclass finds `head` and `progress`, and calls enter() first."""

    ends, lanes = QUERY_ENDS, QUERY_LANES
    head: Value  # kv head
    progress: Value  # address of how many steps are done

    def __init__(self, k: Function, parts: Any) -> None:
        super().__init__(k, parts)
        self.keys = self.keys_of("k", self.head)

    def enter(self, step: Value) -> None:
        """Begins a step: a block of queries, times the heads of a group."""
        a, item = self.a, self.item
        self.q_head = self.head * a.group + step % a.group
        self.heads = (self.q_head, self.q_head)
        # of the block's first lane, which may come before the first query
        self.row = (item.block + step // a.group) * QUERY_BLOCK - (item.start + a.k_start)

    def wait(self, turn: Value) -> None:
        """Waits until so many steps are done."""
        k = self.k
        with k.forever() as leave_if:
            leave_if(self.has_come(turn))
            spins = k.variable(k.i64(0))
            with k.forever() as enough:
                enough(self.has_come(turn) | (spins.get() >= _SPINS))
                spins.set(spins.get() + 1)
                pause(k, self.s.isa)
            if sys.platform != "win32":
                k.intrinsic("sched_yield", I32)

    def has_come(self, turn: Value) -> Value:
        return self.done_at(self.progress) >= turn

    def done_at(self, counter: Value) -> Value:
        """Counts the steps that are done."""
        return look(self.k, self.s.isa, counter)

    # --- panels

    def pack_all(self) -> Value:
        """Packs all panels of the block; returns how many keys any of its queries sees."""
        k = self.k
        most = k.variable(k.i64(0))
        with k.range(0, self.a.panels) as i:
            panel = Panel(self, i)
            self.pack(panel)
            most.set(k.max(most.get(), panel.word("high")))
        return most.get()

    def find_rows(self, position: Value) -> tuple[dict[str, Value], Value]:
        """Returns where the rows of a query lie, by names of `lanes`, and whether the query counts."""
        return {"q": self.row_of("q", self.q_head, position)}, self.k.const(1, I1)

    def pack(self, panel: Panel) -> None:
        """Finds a panel's rows and packs them."""
        k, s, a, item = self.k, self.s, self.a, self.item
        row = self.row + panel.i * s.panel
        first = k.max(k.min(-row, k.i64(s.panel)), k.i64(0))
        end = k.max(k.min(item.q_len - row, k.i64(s.panel)), first)
        low, high = k.variable(item.k_len), k.variable(k.i64(0))
        with k.range(0, s.panel) as lane:
            position = k.max(k.min(row + lane, item.q_len - 1), k.i64(0))
            words, counts = self.find_rows(position)
            lse_at = item.lse_at + self.q_head * a.lse_head + position * a.lse_row
            lse = k.load(s.number, k.pointer(a.lse), lse_at)
            words |= {"position": position + item.start + a.k_start, "head": self.q_head}
            seen = (lane >= first) & (lane < end) & lse.differs(float("-inf")) & counts
            words["limit"] = k.select(seen, self.limit(position), k.i64(0))
            low.set(k.min(low.get(), words["limit"]))
            high.set(k.max(high.get(), words["limit"]))
            for name, word in words.items():
                k.store(word, panel.lanes(name), lane * 8)
            k.store(lse, panel.part("stats"), lane * s.number_bytes)
            self.store_stats(panel, lane, lse_at)
        for name, word in (("low", low.get()), ("high", high.get()), ("first", first), ("end", end)):
            k.store(word, panel.at, QUERY_ENDS.offset(name))
        with k.when(first < end):
            self.pack_rows(panel)

    def store_stats(self, panel: Panel, lane: Value, lse_at: Value) -> None:
        """Stores what a lane has beside its lse, which is `lse_at` bytes from the first: nothing here."""

    def pack_rows(self, panel: Panel) -> None:
        """Transposes a panel's queries."""
        k, s, a = self.k, self.s, self.a
        units = s.count_units(a.head_dim)
        k.call(self.parts.pack, panel.lanes("q"), panel.part("queries"), a.head_dim, units, a.q_column, a.flip)

    # --- tiles

    def sees_range(self, first: Value, last: Value) -> Value:
        """Returns whether any query of the block may see any of the keys [first, last)."""
        k, item = self.k, self.item
        low, high = k.max(self.row, k.i64(0)), k.min(self.row + QUERY_BLOCK, item.q_len) - 1
        offset = item.start + self.a.k_start
        end, seen = k.min(last, self.limit(high)), k.variable(k.i64(0))
        with k.when(first < end):
            seen.set(self.seen_of(Box(self.heads, (low + offset, high + offset)), first, end))
        return seen.get() > 0

    def sees(self, start: Value, count: Value, most: Value) -> Value:
        """Returns whether any query of the block, which see `most` keys at most, sees any of a tile."""
        k = self.k
        seen = k.variable(k.i64(0))
        with k.when(start < most):
            seen.set(self.seen_of(self.box(k.i64(0), self.a.panels), start, start + count))
        return seen.get() > 0

    def stage(
        self, name: str, part: str, source: Value, length: Value, start: Value, count: Value
    ) -> tuple[Value, Value]:
        """Returns where rows of a tile lie, and how far apart; copied to a part of scratch where micro-kernels cannot
        read them where they are.

        name: "k" or "v". length: of a row.
        """
        k, s, a = self.k, self.s, self.a
        row, column = getattr(a, f"{name}_row"), getattr(a, f"{name}_column")
        source, target, units = k.at(source, start * row), self.part(part), s.count_units(length)
        is_staged, tile_row = getattr(a, f"{name}_staged").differs(0), units * s.number_bytes
        with k.when(is_staged):
            k.call(self.parts.stage, target, source, tile_row, row, column, k.i64(0), count, length, units)
        return k.select(is_staged, target, source), k.select(is_staged, tile_row, row)

    def if_seen(self, panel: Panel, tile: Tile, then: Callable[[Panel, Tile, Value, Value, Value], None]) -> None:
        """Calls then(panel, tile, first, end, clear) if a panel sees any of a tile: keys [first, end). The mask hides
        nothing below `clear`; `causal` still may.
        """
        k = self.k
        high = k.min(panel.word("high") - tile.start, tile.length)
        with k.when(high > 0):
            if self.visibility is None:
                then(panel, tile, k.i64(0), high, high)
            else:
                first, end, clear = self.extent_of(self.box(panel.i, panel.i + 1), tile.start, high)
                with k.when(first < end):
                    then(panel, tile, first, end, clear)

    # --- P

    def weigh(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> Value:
        """Makes P of keys [first, end) of a tile; returns whether products must look at every pair."""
        k, a = self.k, self.a
        full = k.max(k.min(panel.word("low") - tile.start, clear), first)
        self.count(full - first, end - first)
        start, count = tile.start + first, end - first
        self.multiply(panel, tile, first, count)
        where = (start + a.k_start, start, count, self.item.index, clear - first)
        return self.make_weights(panel, where, full - first)

    def multiply(self, panel: Panel, tile: Tile, first: Value, count: Value) -> None:
        """Makes S of `count` keys of a tile, from `first` on."""
        rows = self.k.at(tile.keys, first * tile.k_row)
        self.multiply_rows(panel, ("scores", "queries"), rows, tile.k_row, count, self.a.head_dim, 3)

    def multiply_rows(
        self, panel: Panel, names: tuple[str, str], rows: Value, row: Value, count: Value, length: Value, check: int
    ) -> None:
        """Multiplies rows of a tile by a panel's. names: of the product in PAIRS, and of the panel's part.

        check: the row of that part where the sums of products go.
        """
        k, s = self.k, self.s
        product, lanes = names
        sums = k.at(self.part("check"), check * s.row_bytes)
        place = panel.pairs(product), panel.part(lanes)
        k.call(self.parts.product_tile, *place, rows, row, count, s.count_units(length), sums)

    def apply_expression(self, panel: Panel, where: tuple[Value, ...]) -> None:
        """Takes S through the expression."""
        k, parts, lanes = self.k, self.parts, panel.lanes("position")
        position, _, count, index, clear = where
        if parts.prefetch_addresses is not None:
            k.call(parts.prefetch_addresses, k.p["a"], self.fetch, lanes, position, index)
        if parts.expression is not None:
            with k.when(k.const(1, I1) if self.s.program.score is not None else clear < count):
                place = (panel.pairs("scores"), self.part("check"), lanes, panel.lanes("limit"), *where[:-1])
                k.call(parts.expression, k.p["a"], self.scratch, *place, k.i64(0), clear, self.fetch)

    def make_weights(self, panel: Panel, where: tuple[Value, ...], full: Value) -> Value:
        """Makes P, through the expression; returns whether products must look at every pair.

        where: the position of the first key, its number, how many keys, the item, and up to where the mask hides none.
        """
        self.apply_expression(panel, where)
        _, start, count, _, _ = where
        arrays = panel.pairs("scores"), panel.part("stats"), panel.lanes("limit"), self.part("check")
        return self.k.call(self.parts.weights, *arrays, start, full, count, self.scale()).differs(0)
