"""Blocks of queries against tiles of keys, down to P and dS, with which every backward pass begins.

A block is QUERY_BLOCK positions of one head, from a multiple of that on, in panels whose lanes are queries; lanes
before the first query and after the last one see nothing. What becomes of P and dS: backward.py, table_gradients.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from ...problem.problem import QUERY_BLOCK
from ..language.vector import I1, I32, Function, Module, Value
from ..memory.records import QUERY_ENDS, QUERY_LANES
from ..memory.shape import Shape
from ..products.outer_gradients import product_tile
from ..products.product import outer_product_of
from .dropping import drop_factors
from .gradient_rows import copy_vectors, multiply_vectors, stage_across, stage_rows
from .gradient_tiles import UNITS, Weights, dot_of_panels, make_units
from .lower import expression_tile, per_query_streams, prefetch_addresses
from .panels import Panel, PanelWork, Tile
from .score_backward import entries_tile, needs_raw, score_backward_tile
from .staging import pack_queries
from .task import look, pause
from .visibility import extent, visibility

_SPINS = 64  # looks before a waiting thread lets others run


class PairParts:
    """The functions of a module that make P and dS."""

    def __init__(self, s: Shape, name: str) -> None:
        self.shape, self.module = s, Module(f"{name}_{s.storage}")
        m, program = self.module, s.program
        self.visibility = visibility(m, s, program) if program and program.may_hide else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.pack, self.stage, self.copy = pack_queries(m, s), stage_rows(m, s), copy_vectors(m, s)
        self.stage_across = stage_across(m, s) if s.elements > 1 else self.stage
        self.product_tile = product_tile(outer_product_of(s), m)
        self.delta = dot_of_panels(m, s)
        self.per_query_streams = per_query_streams(program) if program else []
        self.prefetch_addresses = prefetch_addresses(m, s, program) if self.per_query_streams else None
        self.expression = expression_tile(m, s, program) if program else None
        self.flow = score_backward_tile(m, s, program) if program and program.changes_flow else None
        self.keeps_raw = needs_raw(program)
        self.factors, self.multiplied = (drop_factors(m, s), multiply_vectors(m, s)) if s.dropout else (None, None)
        last = self.flow is None and not s.dropout
        self.weights = Weights(m, s, last=last).function()
        self.units = make_units(m, s) if s.elements > 1 and not last else None
        self.entries = entries_tile(m, s, program) if program and program.entries else None


class PairWork(PanelWork):
    """One block of queries of one head. Who finds out which sets `step`, `range`, `head` and `progress`."""

    ends, lanes = QUERY_ENDS, QUERY_LANES
    step: Value  # block of queries, times the heads of a group
    range: Value  # of keys
    head: Value  # kv head
    progress: Value  # address of how many steps are done

    def __init__(self, k: Function, parts: PairParts) -> None:
        super().__init__(k, parts)
        a, item = self.a, self.item
        self.q_head = self.head * a.group + self.step % a.group
        self.heads = (self.q_head, self.q_head)
        # of the block's first lane, which may come before the first query
        self.row = (item.block + self.step // a.group) * QUERY_BLOCK - (item.start + a.k_start)
        self.keys, self.values = self.keys_of("k", self.head), self.keys_of("v", self.head)

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

    def factor(self) -> Value:
        """Returns the scale of scores."""
        return self._number(self.a.scale)

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

    def pack(self, panel: Panel) -> None:
        """Finds a panel's rows and transposes its queries and their gradients."""
        k, s, a, item = self.k, self.s, self.a, self.item
        row = self.row + panel.i * s.panel
        first = k.max(k.min(-row, k.i64(s.panel)), k.i64(0))
        end = k.max(k.min(item.q_len - row, k.i64(s.panel)), first)
        low, high = k.variable(item.k_len), k.variable(k.i64(0))
        with k.range(0, s.panel) as lane:
            position = k.max(k.min(row + lane, item.q_len - 1), k.i64(0))
            words = {name: self.row_of(name, self.q_head, position) for name in ("q", "d_out", "out")}
            lse_at = item.lse_at + self.q_head * a.lse_head + position * a.lse_row
            lse = k.load(s.number, k.pointer(a.lse), lse_at)
            words |= {"position": position + item.start + a.k_start, "head": self.q_head}
            seen = (lane >= first) & (lane < end) & lse.differs(float("-inf"))
            words["limit"] = k.select(seen, self.limit(position), k.i64(0))
            low.set(k.min(low.get(), words["limit"]))
            high.set(k.max(high.get(), words["limit"]))
            for name, word in words.items():
                k.store(word, panel.lanes(name), lane * 8)
            k.store(lse, panel.part("stats"), lane * s.number_bytes)
            d_lse = k.variable(k.const(0.0, s.number))
            with k.when(a.d_lse.differs(0)):
                d_lse.set(k.load(s.number, k.pointer(a.d_lse), lse_at))
            k.store(d_lse.get(), panel.part("stats"), s.row_bytes + lane * s.number_bytes)
        for name, word in (("low", low.get()), ("high", high.get()), ("first", first), ("end", end)):
            k.store(word, panel.at, QUERY_ENDS.offset(name))
        with k.when(first < end):
            self._pack_rows(panel)

    def _pack_rows(self, panel: Panel) -> None:
        k, s, a, parts = self.k, self.s, self.a, self.parts
        units, value_units = s.count_units(a.head_dim), s.count_units(a.value_dim)
        none = k.i64(0)
        queries, gradients = (panel.part(x) for x in ("queries", "gradients"))
        # the output first, where queries will lie only after delta is known
        k.call(parts.pack, panel.lanes("out"), queries, a.value_dim, value_units, a.out_column, none)
        k.call(parts.pack, panel.lanes("d_out"), gradients, a.value_dim, value_units, a.d_out_column, none)
        k.call(parts.delta, k.at(panel.part("stats"), s.row_bytes), queries, gradients, value_units)
        k.call(parts.pack, panel.lanes("q"), queries, a.head_dim, units, a.q_column, a.flip)

    # --- tiles

    def sees(self, start: Value, count: Value, most: Value) -> Value:
        """Returns whether any query of the block, which see `most` keys at most, sees any of a tile."""
        k = self.k
        seen = k.variable(k.i64(0))
        with k.when(start < most):
            seen.set(self.seen_of(self.box(k.i64(0), self.a.panels), start, start + count))
        return seen.get() > 0

    def stage_tile(self, start: Value, count: Value) -> Tile:
        """Returns a tile, copied to scratch where micro-kernels cannot read it where it lies."""
        k, s, a = self.k, self.s, self.a
        lie = []
        for name, part, source, length in (
            ("k", "keys", self.keys, a.head_dim),
            ("v", "values", self.values, a.value_dim),
        ):
            row, column = getattr(a, f"{name}_row"), getattr(a, f"{name}_column")
            source, target, units = k.at(source, start * row), self.part(part), s.count_units(length)
            is_staged, tile_row = getattr(a, f"{name}_staged").differs(0), units * s.number_bytes
            with k.when(is_staged):
                k.call(self.parts.stage, target, source, tile_row, row, column, k.i64(0), count, length, units)
            lie += [k.select(is_staged, target, source), k.select(is_staged, tile_row, row)]
        return Tile(start, count, *lie)

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

    # --- P and dS

    def weigh(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> Value:
        """Makes P and dS of keys [first, end) of a tile; returns whether products must look at every pair."""
        k, s, parts, a = self.k, self.s, self.parts, self.a
        full = k.max(k.min(panel.word("low") - tile.start, clear), first)
        self.count(full - first, end - first)
        start, count = tile.start + first, end - first
        check = self.part("check")
        for name, lanes, rows, row, length, at in (
            ("scores", "queries", tile.keys, tile.k_row, a.head_dim, 3),
            ("d_scores", "gradients", tile.values, tile.v_row, a.value_dim, 4),
        ):
            rows, units, sums = k.at(rows, first * row), s.count_units(length), k.at(check, at * s.row_bytes)
            k.call(parts.product_tile, panel.pairs(name), panel.part(lanes), rows, row, count, units, sums)
        return self._weights(panel, (start + a.k_start, start, count, self.item.index, clear - first), full - first)

    def _weights(self, panel: Panel, where: tuple[Value, ...], full: Value) -> Value:
        """Makes P and dS, through the expression and back; returns whether products must look at every pair."""
        k, s, parts = self.k, self.s, self.parts
        raw, check, scores, d_scores = (
            self.part("raw"),
            self.part("check"),
            panel.pairs("scores"),
            panel.pairs("d_scores"),
        )
        position, start, count, index, clear = where
        units = [panel.pairs(x) for x in UNITS] if s.elements > 1 else []
        lanes, limits = panel.lanes("position"), panel.lanes("limit")
        if parts.prefetch_addresses is not None:
            k.call(parts.prefetch_addresses, k.p["a"], self.fetch, lanes, position, index)
        if parts.keeps_raw:
            k.call(parts.copy, raw, scores, count * s.vectors)
        if parts.expression is not None:
            with k.when(k.const(1, I1) if s.program.score is not None else clear < count):
                ends = k.i64(0), clear
                place = (scores, check, lanes, limits, *where[:-1], *ends)
                k.call(parts.expression, k.p["a"], self.scratch, *place, self.fetch)
        factors = (self.part("factors"), count * s.vectors)
        if parts.factors is not None:
            numbers = (position, count, index, self.a.seed, self.a.drop_below, self._number(self.a.drop_factor))
            k.call(parts.factors, factors[0], lanes, *numbers)
            k.call(parts.multiplied, d_scores, *factors)
        makes_units = units if parts.units is None else []
        stats, ends = panel.part("stats"), (start, full, count, self.scale())
        careful = k.call(parts.weights, scores, d_scores, stats, limits, check, *ends, *makes_units).differs(0)
        if parts.flow is not None:
            k.call(parts.flow, k.p["a"], raw, scores, d_scores, lanes, self.fetch, position, count, index)
        if parts.multiplied is not None:
            k.call(parts.multiplied, scores, *factors)
        if parts.units is not None:
            k.call(parts.units, scores, d_scores, count, *units)
        return careful

    def add_to_entries(self, panel: Panel, first: Value, count: Value, sums: Value) -> None:
        """Adds gradients of entries of tables, from P and dS of `count` keys from `first` on."""
        k, pairs = self.k, (panel.pairs("scores"), panel.pairs("d_scores"))
        where = (first + self.a.k_start, count, self.item.index)
        k.call(
            self.parts.entries, k.p["a"], self.part("raw"), *pairs, panel.lanes("position"), self.fetch, sums, *where
        )
