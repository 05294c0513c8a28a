"""Blocks of queries against tiles of keys, down to P and dS, with which every backward pass begins.

What becomes of P and dS: backward.py, table_gradients.py.
"""

from __future__ import annotations

from ..language.vector import Function, Value
from ..memory.shape import Shape
from .dropping import drop_factors
from .gradient_rows import copy_vectors, multiply_vectors, stage_across
from .gradient_tiles import UNITS, dot_of_panels, make_units
from .panels import Panel, Tile
from .score_backward import entries_tile, needs_raw, score_backward_tile
from .weight_blocks import BlockWork, WeightParts


class PairParts(WeightParts):
    """The functions of a module that make P and dS."""

    def __init__(self, s: Shape, name: str) -> None:
        program = s.program
        changed = program if program is not None and program.changes_flow else None
        last = changed is None and not s.dropout
        super().__init__(s, name, last=last)
        m = self.module
        self.copy = copy_vectors(m, s)
        self.stage_across = stage_across(m, s) if s.elements > 1 else self.stage
        self.delta = dot_of_panels(m, s)
        self.flow = score_backward_tile(m, s, changed) if changed is not None else None
        self.keeps_raw = needs_raw(program)
        self.factors, self.multiplied = (drop_factors(m, s), multiply_vectors(m, s)) if s.dropout else (None, None)
        self.units = make_units(m, s) if s.elements > 1 and not last else None
        self.entries = entries_tile(m, s, program) if program and program.entries else None


class PairWork(BlockWork):
    """One block of queries of one head. Who finds out which sets `step`, `range`, `head` and `progress`."""

    step: Value  # block of queries, times the heads of a group
    range: Value  # of keys

    def __init__(self, k: Function, parts: PairParts) -> None:
        super().__init__(k, parts)
        self.enter(self.step)
        self.values = self.keys_of("v", self.head)

    def factor(self) -> Value:
        """Returns the scale of scores."""
        return self._number(self.a.scale)

    # --- panels

    def find_rows(self, position: Value) -> tuple[dict[str, Value], Value]:
        words, counts = super().find_rows(position)
        return words | {name: self.row_of(name, self.q_head, position) for name in ("d_out", "out")}, counts

    def store_stats(self, panel: Panel, lane: Value, lse_at: Value) -> None:
        """Stores the upstream gradient of a lane's lse, from which delta is subtracted."""
        k, s, a = self.k, self.s, self.a
        d_lse = k.variable(k.const(0.0, s.number))
        with k.when(a.d_lse.differs(0)):
            d_lse.set(k.load(s.number, k.pointer(a.d_lse), lse_at))
        k.store(d_lse.get(), panel.part("stats"), s.row_bytes + lane * s.number_bytes)

    def pack_rows(self, panel: Panel) -> None:
        """Transposes a panel's queries and their gradients; makes delta."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        value_units, none = s.count_units(a.value_dim), k.i64(0)
        queries, gradients = (panel.part(x) for x in ("queries", "gradients"))
        # the output first, where queries will lie only after delta is known
        k.call(parts.pack, panel.lanes("out"), queries, a.value_dim, value_units, a.out_column, none)
        k.call(parts.pack, panel.lanes("d_out"), gradients, a.value_dim, value_units, a.d_out_column, none)
        k.call(parts.delta, k.at(panel.part("stats"), s.row_bytes), queries, gradients, value_units)
        super().pack_rows(panel)

    # --- tiles

    def stage_tile(self, start: Value, count: Value) -> Tile:
        """Returns a tile, copied to scratch where micro-kernels cannot read it where it lies."""
        a = self.a
        keys = self.stage("k", "keys", self.keys, a.head_dim, start, count)
        values = self.stage("v", "values", self.values, a.value_dim, start, count)
        return Tile(start, count, *keys, *values)

    # --- P and dS

    def multiply(self, panel: Panel, tile: Tile, first: Value, count: Value) -> None:
        """Makes S and dP of `count` keys of a tile, from `first` on."""
        super().multiply(panel, tile, first, count)
        rows = self.k.at(tile.values, first * tile.v_row)
        self.multiply_rows(panel, ("d_scores", "gradients"), rows, tile.v_row, count, self.a.value_dim, 4)

    def make_weights(self, panel: Panel, where: tuple[Value, ...], full: Value) -> Value:
        """Makes P and dS, through the expression and back; returns whether products must look at every pair."""
        k, s, parts = self.k, self.s, self.parts
        raw, scores, d_scores = self.part("raw"), panel.pairs("scores"), panel.pairs("d_scores")
        position, start, count, index, _ = where
        units = [panel.pairs(x) for x in UNITS] if s.elements > 1 else []
        lanes = panel.lanes("position")
        if parts.keeps_raw:
            k.call(parts.copy, raw, scores, count * s.vectors)
        self.apply_expression(panel, where)
        factors = (self.part("factors"), count * s.vectors)
        if parts.factors is not None:
            numbers = (position, count, index, self.a.seed, self.a.drop_below, self._number(self.a.drop_factor))
            k.call(parts.factors, factors[0], lanes, *numbers)
            k.call(parts.multiplied, d_scores, *factors)
        makes_units = units if parts.units is None else []
        stats = panel.part("stats"), panel.lanes("limit"), self.part("check")
        ends = (start, full, count, self.scale())
        careful = k.call(parts.weights, scores, d_scores, *stats, *ends, *makes_units).differs(0)
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
