"""The backward kernel: one task is a block of queries of one head against a range of keys.

    task: wait for its turn; pack the block's panels of Q and dO; for every tile of keys, for every panel: S, dP, P, dS,
          then dQ, dV and dK; add the block's share of dK and dV to the sums; at the end dQ

Tasks form a wavefront. (step, range) follows (step, range - 1), whose share of dQ comes first, and (step - 1, range),
whose share of dK and dV does; `progress` counts the steps that are done in each range. Tickets are numbered along
diagonals, so whatever is waited for has a smaller one and somebody works on it. No sum is shared between threads.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

from ..problem import QUERY_BLOCK, TILE
from .backward_tiles import (
    UNITS,
    Weights,
    add_partial,
    clear,
    copied,
    dot_of_panels,
    into_keys,
    into_queries,
    load_panel,
    make_units,
    product,
    stage_across,
    stage_rows,
    store_panel,
)
from .flows import changes_flow, flow_tile
from .layout import GANG, GRADIENT_ITEM_BYTES, QUERY_ENDS, QUERY_LANES, GradientItem
from .lower import aim, expression_tile, squares
from .products import units_of
from .region import Box, Work, entry, region
from .shape import Shape
from .staging import pack_queries
from .vector import F32, F64, I1, I32, I64, PTR, Function, Module, Value
from .visibility import extent, visibility

_SPINS = 64  # looks before a waiting thread lets others run


class _Parts:
    """The functions of one backward module."""

    def __init__(self, s: Shape) -> None:
        self.shape = s
        self.module = m = Module(f"backward_{s.storage}")
        self.visibility = visibility(m, s, s.program) if s.program and s.program.may_hide else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.pack, self.stage, self.clear = pack_queries(m, s), stage_rows(m, s), clear(m, s)
        self.copy = copied(m, s)
        self.stage_across = stage_across(m, s) if s.elements > 1 else self.stage
        self.product, self.delta = product(m, s), dot_of_panels(m, s)
        self.squares = squares(s.program) if s.program else []
        self.aim = aim(m, s, s.program) if self.squares else None
        self.expression = expression_tile(m, s, s.program) if s.program else None
        self.flow = flow_tile(m, s, s.program) if s.program and changes_flow(s.program) else None
        self.weights = Weights(m, s, last=self.flow is None).function()
        self.units = make_units(m, s) if s.elements > 1 and self.flow is not None else None
        self.into_queries = [into_queries(m, s, predicated=x) for x in (False, True)]
        self.into_keys = {n: into_keys(m, s, rows, n) for rows, n in s.tiles.gradients}
        self.into_keys_predicated = into_keys(m, s, 2, 1, predicated=True)
        self.add = add_partial(m, s)
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


class _Panel:
    """A panel's memory, by name."""

    def __init__(self, task: _Task, i: Value) -> None:
        self.k, self.task, self.i = task.k, task, i
        self.at = task.k.at(task.scratch, task.a.at_panels + i * task.a.panel_bytes)

    def end(self, name: str) -> Value:
        """One of QUERY_ENDS."""
        return self.k.load(I64, self.at, QUERY_ENDS.offset(name))

    def part(self, name: str) -> Value:
        return self.task.part(name, self.at)

    def lanes(self, name: str) -> Value:
        """[panel] of one of QUERY_LANES."""
        return self.k.at(self.part("lanes"), QUERY_LANES.offset(name) * self.task.s.panel)


class _Tile(NamedTuple):
    """Some keys, with where they and their values lie."""

    start: Value
    length: Value
    keys: Value
    k_row: Value
    values: Value
    v_row: Value


class _Task(Work):
    """One block of queries of one head, and one range of keys."""

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts.shape, parts.visibility, parts.extent)
        self.parts = parts
        self.fetch = k.buffer(I64, max(1, len(parts.squares) * self.s.panel))  # rows of tables
        a, item = self.a, self.item
        self.q_head = self.head * a.group + self.step % a.group
        self.heads = (self.q_head, self.q_head)
        # of the block's first lane, which may come before the first query
        self.row = (item.block + self.step // a.group) * QUERY_BLOCK - (item.start + a.k_start)
        self.keys, self.values = self.keys_of("k", self.head), self.keys_of("v", self.head)

    def _find_item(self) -> GradientItem:
        """Which gang, kv head, step and range the ticket is for."""
        k, a, gangs = self.k, self.a, self.k.pointer(self.a.gangs)
        low, high = k.variable(k.i64(0)), k.variable(a.gang_count)
        with k.forever() as leave_if:
            leave_if(high.get() - low.get() <= 1)
            middle = (low.get() + high.get()) >> 1
            before = k.load(I64, gangs, middle * GANG.bytes) <= k.p["number"]
            low.set(k.select(before, middle, low.get()))
            high.set(k.select(before, high.get(), middle))
        gang = {name: k.load(I64, gangs, low.get() * GANG.bytes + GANG.offset(name)) for name in GANG.names}
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
            self.wait()
            self.work()
            k.fetch_add(self.progress, 0, 1)

    def wait(self) -> None:
        """Until the step before is done in this range, and this step in the range before."""
        k = self.k
        with k.forever() as leave_if:
            leave_if(self._turn_has_come())
            spins = k.variable(k.i64(0))
            with k.forever() as enough:
                enough(self._turn_has_come() | (spins.get() >= _SPINS))
                spins.set(spins.get() + 1)
                if self.s.isa.arch == "x86_64":
                    k.pause()
            if sys.platform != "win32":
                k.intrinsic("sched_yield", I32)

    def _turn_has_come(self) -> Value:
        k = self.k
        above = k.fetch_add(self.progress, 0, 0) >= self.step
        before = k.select(self.range > 0, k.at(self.progress, -8), self.progress)
        wanted = k.select(self.range > 0, self.step + 1, k.i64(0))
        return above & (k.fetch_add(before, 0, 0) >= wanted)

    def work(self) -> None:
        k, a = self.k, self.a
        first = self.range * a.range_keys
        last = k.min(first + a.range_keys, self.item.k_len)
        most = k.variable(k.i64(0))  # how many keys any query of the block sees
        with k.range(0, a.panels) as i:
            panel = _Panel(self, i)
            self.pack(panel)
            most.set(k.max(most.get(), panel.end("high")))
        with k.range(first, last, TILE) as start:
            count = k.min(last - start, k.i64(TILE))
            self.tile(start, count, most.get())
        with k.range(0, a.panels) as i:
            self.finish(_Panel(self, i))

    # --- panels

    def pack(self, panel: _Panel) -> None:
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
        self._pack_rows(panel, row, first, end)

    def _pack_rows(self, panel: _Panel, row: Value, first: Value, end: Value) -> None:
        k, s, a, parts = self.k, self.s, self.a, self.parts
        units, value_units = units_of(s, a.head_dim), units_of(s, a.value_dim)
        none = k.i64(0)
        queries, gradients, dq = (panel.part(x) for x in ("queries", "gradients", "dq"))
        with k.when(first < end):
            # the output first, where gradients will lie only after delta is known
            k.call(parts.pack, panel.lanes("out"), queries, a.value_dim, value_units, a.out_column, none)
            k.call(parts.pack, panel.lanes("d_out"), gradients, a.value_dim, value_units, a.d_out_column, none)
            delta = k.at(panel.part("stats"), s.row_bytes)
            k.call(parts.delta, delta, queries, gradients, value_units)
            k.call(parts.pack, panel.lanes("q"), queries, a.head_dim, units, a.q_column, a.flip)
            for name, length, columns in (("q", a.head_dim, a.columns), ("d_out", a.value_dim, a.value_columns)):
                with k.when(getattr(a, f"{name}_staged").differs(0)):
                    source = k.pointer(self.row_of(name, self.q_head, row))
                    steps = (getattr(a, f"{name}_row"), getattr(a, f"{name}_column"))
                    to = panel.part(f"{name}_rows")
                    k.call(
                        parts.stage_across, to, source, columns * s.number_bytes, *steps, first, end, length, columns
                    )
            with k.either(self.range.equals(0)) as (fresh, more):
                with fresh:
                    k.call(parts.clear, dq, a.head_dim * s.vectors)
                with more:
                    source = k.pointer(self.row_of("sq", self.q_head, row))
                    k.call(parts.load_panel, dq, source, a.sq_row, first, end, a.head_dim)

    def finish(self, panel: _Panel) -> None:
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

    def factor(self) -> Value:
        """The scale of scores."""
        word = self.a.scale
        return word.bits(F64) if self.s.wide else self.k.trunc(word, I32).bits(F32)

    # --- tiles

    def box(self, first: Value, end: Value) -> Box:
        """The queries of panels [first, end)."""
        k, lanes = self.k, [_Panel(self, x).lanes("position") for x in (first, end - 1)]
        return Box(self.heads, (k.load(I64, lanes[0]), k.load(I64, lanes[1], (self.s.panel - 1) * 8)))

    def tile(self, start: Value, count: Value, most: Value) -> None:
        """One tile of keys for all panels that see any of it; its share of dK and dV."""
        k, a = self.k, self.a
        fresh, end = self.step.equals(0), (self.step + 1).equals(self.item.steps)
        seen = k.variable(k.i64(0))
        with k.when(start < most):
            seen.set(self.seen_of(self.box(k.i64(0), a.panels), start, start + count))
        with k.when((seen.get() > 0) | fresh | end):
            for name, columns in (("dk", a.columns), ("dv", a.value_columns)):
                k.call(self.parts.clear, self.part(name), count * columns // self.s.lanes)
            with k.when(seen.get() > 0):
                tile = self.staged(start, count)
                with k.range(0, a.panels) as i:
                    self.panel_of_tile(_Panel(self, i), tile)
            self.add(start, count, k.zext(fresh, I64), k.zext(end, I64))

    def staged(self, start: Value, count: Value) -> _Tile:
        """A tile, copied to scratch where micro-kernels cannot read it where it lies."""
        k, s, a = self.k, self.s, self.a
        lie = []
        for name, length in (("k", a.head_dim), ("v", a.value_dim)):
            source = self.keys if name == "k" else self.values
            row, column = getattr(a, f"{name}_row"), getattr(a, f"{name}_column")
            source = k.at(source, start * row)
            target = self.part("keys" if name == "k" else "values")
            is_staged = getattr(a, f"{name}_staged").differs(0)
            units = units_of(s, length)
            with k.when(is_staged):
                k.call(
                    self.parts.stage,
                    target,
                    source,
                    units * s.number_bytes,
                    row,
                    column,
                    k.i64(0),
                    count,
                    length,
                    units,
                )
            lie += [k.select(is_staged, target, source), k.select(is_staged, units * s.number_bytes, row)]
            if name == "k" and s.elements > 1:
                steps = (length * s.number_bytes, row, column, k.i64(0), count, length, length)
                k.call(self.parts.stage_across, self.part("key_units"), source, *steps)
        return _Tile(start, count, *lie)

    def panel_of_tile(self, panel: _Panel, tile: _Tile) -> None:
        k = self.k
        high = k.min(panel.end("high") - tile.start, tile.length)
        with k.when(high > 0):
            if self.visibility is None:
                self.panel_tile(panel, tile, k.i64(0), high, high)
            else:
                first, end, clear = self.extent_of(self.box(panel.i, panel.i + 1), tile.start, high)
                with k.when(first < end):
                    self.panel_tile(panel, tile, first, end, clear)

    def panel_tile(self, panel: _Panel, tile: _Tile, first: Value, end: Value, clear: Value) -> None:
        """Keys [first, end) of a tile for one panel. The mask hides nothing below `clear`; `causal` still may."""
        k, s, parts, a = self.k, self.s, self.parts, self.a
        full = k.max(k.min(panel.end("low") - tile.start, clear), first)
        self.count(full - first, end - first)
        start, full, count = tile.start + first, full - first, end - first
        keys, values = k.at(tile.keys, first * tile.k_row), k.at(tile.values, first * tile.v_row)
        units, value_units = units_of(s, a.head_dim), units_of(s, a.value_dim)
        scores, flows, check = (self.part(x) for x in ("scores", "flows", "check"))
        sums = [k.at(check, i * s.row_bytes) for i in (3, 4)]
        k.call(parts.product, scores, panel.part("queries"), keys, tile.k_row, count, units, sums[0])
        k.call(parts.product, flows, panel.part("gradients"), values, tile.v_row, count, value_units, sums[1])
        where = (start + a.k_start, start, count, self.item.index, clear - first)
        careful = self.weights(panel, where, full)
        p_units, ds_units, flow_units = [self.part(x) for x in UNITS] if s.elements > 1 else (scores, flows, flows)
        key_row = tile.k_row
        if s.elements > 1:
            key_row = a.head_dim * s.number_bytes
            keys = k.at(self.part("key_units"), units_of(s, first) * key_row)
        dq = (panel.part("dq"), flow_units, keys, key_row, units_of(s, count), a.head_dim, scores)
        with k.either(careful) as (some, every):
            for which, branch in enumerate((every, some)):
                with branch:
                    k.call(parts.into_queries[which], *dq)
        for name, weights, columns in (
            ("d_out", p_units, a.value_columns),
            ("q", ds_units, a.columns),
        ):
            rows, row = self.rows_of(panel, name)
            acc_row = columns * s.number_bytes
            acc = k.at(self.part("dv" if name == "d_out" else "dk"), first * acc_row)
            arguments = (weights, panel.end("first"), panel.end("end"), row, count)
            with k.either(careful) as (some, every):
                with some, k.range(0, columns, s.lanes) as c:
                    self.columns_of(parts.into_keys_predicated, acc, acc_row, rows, c, arguments, scores)
                with every:
                    self.all_columns(acc, acc_row, rows, columns // s.lanes, arguments, scores)

    def weights(self, panel: _Panel, where: tuple[Value, ...], full: Value) -> Value:
        """P and dS, through the expression and back; whether products must look at every pair."""
        k, s, parts = self.k, self.s, self.parts
        scores, flows, raw, check = (self.part(x) for x in ("scores", "flows", "raw", "check"))
        position, start, count, index, clear = where
        units = [self.part(x) for x in UNITS] if s.elements > 1 else []
        lanes, limits = panel.lanes("position"), panel.lanes("limit")
        if parts.aim is not None:
            k.call(parts.aim, k.p["a"], self.fetch, lanes, position, index)
        if parts.flow is not None:
            k.call(parts.copy, raw, scores, count * s.vectors)
        if parts.expression is not None:
            with k.when(k.const(1, I1) if s.program.score is not None else clear < count):
                k.call(parts.expression, k.p["a"], scores, check, lanes, limits, *where, self.fetch)
        arguments = (scores, flows, panel.part("stats"), limits, check, start, full, count, self.scale())
        if parts.flow is None:
            return k.call(parts.weights, *arguments, *units).differs(0)
        careful = k.call(parts.weights, *arguments).differs(0)
        k.call(parts.flow, k.p["a"], raw, scores, flows, lanes, self.fetch, position, count, index)
        if parts.units is not None:
            k.call(parts.units, scores, flows, count, *units)
        return careful

    def rows_of(self, panel: _Panel, name: str) -> tuple[Value, Value]:
        """The rows of q or d_out of a panel, and their distance: where they lie, or copied."""
        k, s, a = self.k, self.s, self.a
        is_staged = getattr(a, f"{name}_staged").differs(0)
        there = k.pointer(self.row_of(name, self.q_head, self.row + panel.i * s.panel))
        columns = a.columns if name == "q" else a.value_columns
        return (
            k.select(is_staged, panel.part(f"{name}_rows"), there),
            k.select(is_staged, columns * s.number_bytes, getattr(a, f"{name}_row")),
        )

    def all_columns(
        self, acc: Value, acc_row: Value, rows: Value, vectors: Value, arguments: tuple[Value, ...], marks: Value
    ) -> None:
        """The widest register tile over all columns that it fits, then those of two vectors, or one."""
        k, s, functions = self.k, self.s, self.parts.into_keys
        widest = max(functions)
        rest = vectors % widest
        rest = k.select(rest.equals(1) & (vectors > widest), rest + widest, rest)  # 2 + 2 rather than 3 + 1
        whole, pairs = vectors - rest, rest & -2
        for n, first, end in ((widest, k.i64(0), whole), (2, whole, whole + pairs), (1, whole + pairs, vectors)):
            with k.range(first, end, n) as v:
                self.columns_of(functions[n], acc, acc_row, rows, v * s.lanes, arguments, marks)

    def columns_of(
        self,
        function: object,
        acc: Value,
        acc_row: Value,
        rows: Value,
        c: Value,
        arguments: tuple[Value, ...],
        marks: Value,
    ) -> None:
        k, s = self.k, self.s
        weights, first, end, row, count = arguments
        at = c * s.number_bytes
        k.call(function, k.at(acc, at), weights, k.at(rows, at), acc_row, first, end, row, count, marks)

    def add(self, start: Value, count: Value, fresh: Value, end: Value) -> None:
        """The tile's partial sums join those of the blocks before."""
        k, s, a = self.k, self.s, self.a
        for name, length, columns in (("k", a.head_dim, a.columns), ("v", a.value_dim, a.value_columns)):
            total, out = (k.pointer(self.row_of(f"{x}{name}", self.head, start)) for x in "sd")
            steps = (columns * s.number_bytes, getattr(a, f"s{name}_row"), getattr(a, f"d{name}_row"))
            factor = self.factor() if name == "k" else k.const(1.0, s.number)
            k.call(self.parts.add, self.part(f"d{name}"), total, out, *steps, count, length, fresh, end, factor)
