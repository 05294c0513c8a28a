"""The backward kernel: one task is a block of queries of one head against a range of keys.

    task: wait for its turn; pack the block's panels of Q and dO; for every tile of keys, for every panel: S, dP, P, dS,
          then dQ, dV and dK; add the block's share of dK and dV to the sums; at the end dQ

Tasks form a wavefront. (step, range) follows (step, range - 1), whose share of dQ comes first, and (step - 1, range),
whose share of dK and dV does; `progress` counts the steps that are done in each range. Tickets are numbered along
diagonals, so whatever is waited for has a smaller one and somebody works on it. No sum is shared between threads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..problem import QUERY_BLOCK, TILE
from .backward_tiles import UNITS, into_keys, into_queries
from .layout import GANG, GRADIENT_ITEM_BYTES, GradientItem
from .pairs import PairParts, PairWork, Panel, Tile
from .products import units_of
from .region import Box, entry, region
from .rows import add_partial, clear, load_panel, store_panel
from .shape import Shape
from .vector import I64, PTR, Module, Value


class _Parts(PairParts):
    """The functions of one backward module."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, "backward")
        m = self.module
        self.clear, self.add = clear(m, s), add_partial(m, s)
        self.into_queries = [into_queries(m, s, predicated=x) for x in (False, True)]
        self.into_keys = {n: into_keys(m, s, rows, n) for rows, n in s.tiles.gradients}
        self.into_keys_predicated = into_keys(m, s, 2, 1, predicated=True)
        self.load_panel = load_panel(m, s)
        self.store_sums = store_panel(m, s, "f64" if s.wide else "f32")
        self.store_rows = store_panel(m, s, s.storage) if s.number_bytes != s.storage_bytes else self.store_sums


def backward_module(s: Shape, symbol: str) -> Module:
    """The whole backward engine for one shape; `symbol` is the region's public name."""
    parts = _Parts(s)
    k = parts.module.function("task", {"a": PTR, "scratch": PTR, "number": I64})
    _Task(k, parts).run()
    entry(parts.module, s.isa, region(parts.module, k.finish()), symbol)
    return parts.module


class _Sums(NamedTuple):
    """Sums over queries for each of so many keys: weights [count, panel] times rows [panel, columns]."""

    at: Value
    row_bytes: Value
    rows: Value
    row: Value  # from one to the next
    weights: Value
    keys: Value


class _Task(PairWork):
    """One block of queries of one head, and one range of keys."""

    def _find_item(self) -> GradientItem:
        """Which gang, kv head, step and range the ticket is for."""
        k, a = self.k, self.a
        at = self.row_of_ticket(k.pointer(a.gangs), a.gang_count, GANG.bytes, GANG.offset("first"))
        gang = {name: k.load(I64, at, GANG.offset(name)) for name in GANG.names}
        local, width = k.p["number"] - gang["first"], gang["columns"] * gang["ranges"]
        diagonal, rest = local // width, local % width
        column = gang["column"] + rest // gang["ranges"]
        self.range = rest % gang["ranges"]
        self.step = diagonal - self.range
        self.head = column % a.kv_heads
        self.progress = k.at(k.pointer(a.progress), (gang["progress"] + rest) * 8)
        at = k.at(k.pointer(a.items), column // a.kv_heads * GRADIENT_ITEM_BYTES)
        return GradientItem._make(k.load(I64, at, 8 * word) for word in range(len(GradientItem._fields)))

    def run(self) -> None:
        k, item = self.k, self.item
        with k.when((self.step >= 0) & (self.step < item.steps) & (self.range < item.ranges)):
            self.wait(self.step)
            self.work()
            k.fetch_add(self.progress, 0, 1)

    def has_come(self, turn: Value) -> Value:
        """The step before is done in this range, and this step in the range before."""
        k = self.k
        before = k.select(self.range > 0, k.at(self.progress, -8), self.progress)
        wanted = k.select(self.range > 0, turn + 1, k.i64(0))
        return super().has_come(turn) & (k.fetch_add(before, 0, 0) >= wanted)

    def work(self) -> None:
        """Panels are packed only where the block sees any of the range, or dQ begins or ends there."""
        k, a = self.k, self.a
        first = self.range * a.range_keys
        last = k.min(first + a.range_keys, self.item.k_len)
        at_end = self.range.equals(0) | (self.range + 1).equals(self.item.ranges)
        most, wanted = k.variable(k.i64(0)), self.sees_range(first, last) | at_end
        with k.when(wanted):
            most.set(self.pack_all())
            with k.range(0, a.panels) as i:
                self.begin(Panel(self, i))
        with k.range(first, last, TILE) as start:
            self.tile(start, k.min(last - start, k.i64(TILE)), most.get())
        with k.when(wanted), k.range(0, a.panels) as i:
            self.finish(Panel(self, i))

    def sees_range(self, first: Value, last: Value) -> Value:
        """Whether any query of the block may see any of the keys [first, last)."""
        k, item = self.k, self.item
        low, high = k.max(self.row, k.i64(0)), k.min(self.row + QUERY_BLOCK, item.q_len) - 1
        offset = item.start + self.a.k_start
        end, seen = k.min(last, self.limit(high)), k.variable(k.i64(0))
        with k.when(first < end):
            seen.set(self.seen_of(Box(self.heads, (low + offset, high + offset)), first, end))
        return seen.get() > 0

    # --- panels

    def begin(self, panel: Panel) -> None:
        """Rows of Q and dO are copied where they must be, and dQ is what earlier ranges have left."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        row, first, end, dq = self.row + panel.i * s.panel, panel.end("first"), panel.end("end"), panel.part("dq")
        with k.when(first < end):
            for name, length, columns in (("q", a.head_dim, a.columns), ("d_out", a.value_dim, a.value_columns)):
                with k.when(getattr(a, f"{name}_staged").differs(0)):
                    source = k.pointer(self.row_of(name, self.q_head, row))
                    steps = (columns * s.number_bytes, getattr(a, f"{name}_row"), getattr(a, f"{name}_column"))
                    k.call(parts.stage_across, panel.part(f"{name}_rows"), source, *steps, first, end, length, columns)
            with k.either(self.range.equals(0)) as (fresh, more):
                with fresh:
                    k.call(parts.clear, dq, a.head_dim * s.vectors)
                with more:
                    source = k.pointer(self.row_of("sq", self.q_head, row))
                    k.call(parts.load_panel, dq, source, a.sq_row, first, end, a.head_dim)

    def finish(self, panel: Panel) -> None:
        """dQ goes to its sums, or to the caller."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        row, first, end = self.row + panel.i * s.panel, panel.end("first"), panel.end("end")
        with k.when(first < end), k.either((self.range + 1).equals(self.item.ranges)) as (last, more):
            with last:
                target = k.pointer(self.row_of("dq", self.q_head, row))
                k.call(parts.store_rows, panel.part("dq"), target, a.dq_row, first, end, a.head_dim, self.factor())
            with more:
                target, one = k.pointer(self.row_of("sq", self.q_head, row)), k.const(1.0, s.number)
                k.call(parts.store_sums, panel.part("dq"), target, a.sq_row, first, end, a.head_dim, one)

    # --- tiles

    def tile(self, start: Value, count: Value, most: Value) -> None:
        """One tile of keys for all panels that see any of it; its share of dK and dV."""
        k, s, a = self.k, self.s, self.a
        fresh, end = self.step.equals(0), (self.step + 1).equals(self.item.steps)
        seen = self.sees(start, count, most)
        with k.when(seen | fresh | end):
            for name, columns in (("dk", a.columns), ("dv", a.value_columns)):
                k.call(self.parts.clear, self.part(name), count * columns // s.lanes)
            with k.when(seen):
                if s.elements > 1:
                    steps = (a.head_dim * s.number_bytes, a.k_row, a.k_column, k.i64(0), count, a.head_dim, a.head_dim)
                    k.call(self.parts.stage_across, self.part("key_units"), k.at(self.keys, start * a.k_row), *steps)
                self.all_panels(self.staged(start, count), self.panel_tile)
            self.add(start, count, k.zext(fresh, I64), k.zext(end, I64))

    def panel_tile(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> None:
        """Keys [first, end) of a tile for one panel: P and dS, then shares of dQ, dV and dK."""
        k, s, parts, a = self.k, self.s, self.parts, self.a
        careful, count = self.weigh(panel, tile, first, end, clear), end - first
        scores, flows = self.part("scores"), self.part("flows")
        p_units, ds_units, flow_units = [self.part(x) for x in UNITS] if s.elements > 1 else (scores, flows, flows)
        keys, key_row = k.at(tile.keys, first * tile.k_row), tile.k_row
        if s.elements > 1:
            key_row = a.head_dim * s.number_bytes
            keys = k.at(self.part("key_units"), units_of(s, first) * key_row)
        dq = (panel.part("dq"), flow_units, keys, key_row, units_of(s, count), a.head_dim, scores)
        with k.either(careful) as (predicated, plain):
            with predicated:
                k.call(parts.into_queries[1], *dq)
            with plain:
                k.call(parts.into_queries[0], *dq)
        for name, into, weights, columns in (
            ("d_out", "dv", p_units, a.value_columns),
            ("q", "dk", ds_units, a.columns),
        ):
            rows, row = self.rows_of(panel, name)
            acc_row = columns * s.number_bytes
            sums = _Sums(k.at(self.part(into), first * acc_row), acc_row, rows, row, weights, count)
            with k.either(careful) as (predicated, plain):
                with predicated, k.range(0, columns, s.lanes) as c:
                    self.columns_of(panel, parts.into_keys_predicated, sums, c)
                with plain:
                    self.all_columns(panel, sums, columns // s.lanes)

    def rows_of(self, panel: Panel, name: str) -> tuple[Value, Value]:
        """The rows of q or d_out of a panel, and their distance: where they lie, or copied."""
        k, s, a = self.k, self.s, self.a
        is_staged = getattr(a, f"{name}_staged").differs(0)
        there = k.pointer(self.row_of(name, self.q_head, self.row + panel.i * s.panel))
        columns = a.columns if name == "q" else a.value_columns
        return (
            k.select(is_staged, panel.part(f"{name}_rows"), there),
            k.select(is_staged, columns * s.number_bytes, getattr(a, f"{name}_row")),
        )

    def all_columns(self, panel: Panel, sums: _Sums, vectors: Value) -> None:
        """The widest register tile over all columns that it fits, then those of two vectors, or one."""
        k, s, functions = self.k, self.s, self.parts.into_keys
        widest = max(functions)
        rest = vectors % widest
        rest = k.select(rest.equals(1) & (vectors > widest), rest + widest, rest)  # 2 + 2 rather than 3 + 1
        whole, pairs = vectors - rest, rest & -2
        for n, first, end in ((widest, k.i64(0), whole), (2, whole, whole + pairs), (1, whole + pairs, vectors)):
            with k.range(first, end, n) as v:
                self.columns_of(panel, functions[n], sums, v * s.lanes)

    def columns_of(self, panel: Panel, function: Any, sums: _Sums, column: Value) -> None:
        """Those that one register tile takes, from `column` on."""
        k, at, x = self.k, column * self.s.number_bytes, sums
        ends = (panel.end("first"), panel.end("end"))
        marks = self.part("scores")
        k.call(function, k.at(x.at, at), x.weights, k.at(x.rows, at), x.row_bytes, *ends, x.row, x.keys, marks)

    def add(self, start: Value, count: Value, fresh: Value, end: Value) -> None:
        """The tile's partial sums join those of the blocks before."""
        k, s, a = self.k, self.s, self.a
        for name, length, columns in (("k", a.head_dim, a.columns), ("v", a.value_dim, a.value_columns)):
            total, out = (k.pointer(self.row_of(f"{x}{name}", self.head, start)) for x in "sd")
            steps = (columns * s.number_bytes, getattr(a, f"s{name}_row"), getattr(a, f"d{name}_row"))
            factor = self.factor() if name == "k" else k.const(1.0, s.number)
            k.call(self.parts.add, self.part(f"d{name}"), total, out, *steps, count, length, fresh, end, factor)
