"""The forward kernel: one task is a block of queries of one kv head. It knows sequences and scratch, not vector widths.

    region(arguments): until the tickets of this region are drawn, take one and run its task
    task: pack the block's query panels; for every span, for every tile of keys, for every panel: score, softmax,
          value; merge the span into the panel's state; at the end divide, transpose and store

Arguments are one struct of 64-bit words (layout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..planning import BLOCK, SPAN, TILE
from .lookups import lines
from .lower import aim, expression_tile, squares
from .microkernels import (
    Shape,
    is_empty,
    load_unit,
    load_units,
    log_sum_exp,
    merge_states,
    narrowed,
    natural_log,
    predicated_tile,
    score_tile,
    softmax_tile,
    value_tile,
)
from .places import PLACES, locate
from .region import Work, entry, region
from .vector import F32, F64, I1, I16, I32, I64, PTR, Function, Module, Value, vec
from .visibility import extent, visibility


class _Parts:
    """The functions of one forward module."""

    def __init__(self, s: Shape) -> None:
        self.shape = s
        self.module = Module(f"forward_{s.storage}")
        m = self.module
        self.squares = squares(s.program) if s.program else []
        self.score = score_tile(m, s, [lines(x, TILE) for x in self.squares])
        self.aim = aim(m, s, s.program) if self.squares else None
        self.softmax, self.merge = softmax_tile(m, s), merge_states(m, s)
        self.value, self.predicated = value_tile(m, s), predicated_tile(m, s)
        self.expression = expression_tile(m, s, s.program) if s.program else None
        self.visibility = visibility(m, s, s.program) if s.program and s.program.may_hide else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.log = natural_log(m)
        self.pack = pack_queries(m, s)
        rows = stage_rows(m, s)
        self.stage_keys = stage_lanes(m, s) if s.cached else rows
        self.stage_values = stage_pairs(m, s) if s.dot and not s.cached else rows
        self.locate = locate(m, s.piece)
        self.store = store_panel(m, s, self.log)


def forward_module(s: Shape, symbol: str) -> Module:
    """The whole forward engine for one shape; `symbol` is the region's public name."""
    parts = _Parts(s)
    entry(parts.module, s.isa, region(parts.module, _task(parts)), symbol)
    return parts.module


def pack_queries(module: Module, s: Shape) -> Any:
    """q_panel[units, panel] from the rows named by a table of pointers; `flip` has the sign bits to invert."""
    k = module.function(
        "pack_queries", {"table": PTR, "q_panel": PTR, "head_dim": I64, "units": I64, "column": I64, "flip": I64}
    )
    p = k.p
    flip = p["flip"] if s.wide else k.trunc(p["flip"], I32)
    whole = p["head_dim"] // (2 * s.lanes if s.dot else s.lanes) * s.lanes
    end = k.select(p["column"].equals(s.storage_bytes), whole, k.i64(0))
    for v in range(s.vectors):
        table = k.at(p["table"], v * s.lanes * 8)
        with k.range(0, end, s.lanes) as t:
            rows = [load_units(k, s, k.load(PTR, table, lane * 8), t) for lane in range(s.lanes)]
            for i, x in enumerate(k.transpose(rows)):
                flipped = x.bits(s.ivector) ^ k.splat(flip, s.lanes)
                k.store(flipped, p["q_panel"], (t + i) * s.row_bytes + s.lane_offset(v))
    with k.range(0, s.panel) as lane:
        row = k.load(PTR, p["table"], lane * 8)
        with k.range(end, p["units"]) as t:
            x = load_unit(k, s, row, t, p["column"], p["head_dim"])
            k.store(x.bits(s.integer) ^ flip, p["q_panel"], t * s.row_bytes + lane * s.number_bytes)
    return k.finish()


_STAGE = {"tile": PTR, "places": PTR, "row": I64, "column": I64, "count": I64, "length": I64, "units": I64}


def stage_rows(module: Module, s: Shape) -> Any:
    """tile[count, units] from rows of any stride and narrower type.

    Of a cache in the dot class, rows are pairs of values.
    """
    k = module.function("stage_rows", _STAGE)
    p = k.p
    whole = p["length"] // (2 * s.lanes if s.dot and not s.cached else s.lanes) * s.lanes
    end = whole if s.cached else k.select(p["column"].equals(s.storage_bytes), whole, k.i64(0))
    together = s.piece // 2 if s.cached and s.dot else s.piece
    with k.range(0, p["count"]) as j:
        source = k.load(PTR, p["places"], j // together * 8)
        source = k.at(source, j % together * p["row"] + s.header) if s.cached else source
        target = k.at(p["tile"], j * p["units"] * s.number_bytes)
        with k.range(0, end, s.lanes) as t:
            k.store(load_units(k, s, source, t, stored=True), target, t * s.number_bytes)
        with k.range(end, p["units"]) as t:
            if s.cached and s.dot:
                k.store(k.load(I32, source, t * 4), target, t * 4)
            else:
                column = k.i64(s.stored_bytes) if s.cached else p["column"]
                k.store(load_unit(k, s, source, t, column, p["length"], stored=True), target, t * s.number_bytes)
    return k.finish()


def stage_lanes(module: Module, s: Shape) -> Any:
    """tile[count, units] from a cache's blocks: unit after unit, of each the BLOCK keys."""
    k = module.function("stage_lanes", _STAGE)
    p, n = k.p, s.lanes
    row = p["units"] * s.number_bytes
    whole = p["units"] // n * n
    stored = BLOCK * s.stored_bytes  # bytes of one unit of a block
    with k.range(0, p["count"], BLOCK) as j:
        block = k.at(k.load(PTR, p["places"], j // BLOCK * 8), s.header)
        for first in range(0, BLOCK, n):
            target = k.at(p["tile"], (j + first) * row)
            with k.range(0, whole, n) as t:
                lanes = [load_units(k, s, k.at(block, (t + u) * stored), k.i64(first), stored=True) for u in range(n)]
                for m, x in enumerate(k.transpose(lanes)):
                    k.store(x, target, row * m + t * s.number_bytes)
            with k.range(whole, p["units"]) as t, k.range(0, n) as m:
                size = k.i64(1 if s.quantised else s.storage_bytes)
                one = load_unit(k, s, k.at(block, t * stored), m + first, size, k.i64(2 * BLOCK), stored=True)
                k.store(one, target, row * m + t * s.number_bytes)
    return k.finish()


def stage_pairs(module: Module, s: Shape) -> Any:
    """tile[ceil(count / 2), length] of bf16 pairs from neighbouring rows; after an odd end comes a row of zeros."""
    k = module.function("stage_pairs", _STAGE)
    p = k.p
    whole = p["length"] // s.lanes * s.lanes
    end = k.select(p["column"].equals(2), whole, k.i64(0))
    with k.range(0, p["count"], 2) as j:
        both = j + 1 < p["count"]
        low, high = (k.load(PTR, p["places"], x * 8) for x in (j, k.min(j + 1, p["count"] - 1)))
        keep = k.select(both, k.const(0xFFFF0000 - (1 << 32), I32), k.const(0, I32))
        target = k.at(p["tile"], (j >> 1) * p["length"] * 4)
        with k.range(0, end, s.lanes) as t:
            a, b = (_halves(k, s, x, t) for x in (low, high))
            k.store(a | ((b << 16) & k.splat(keep, s.lanes)), target, t * 4)
        with k.range(end, p["length"]) as t:
            a, b = (k.zext(k.load(I16, x, t * p["column"]), I32) for x in (low, high))
            k.store(a | ((b << 16) & keep), target, t * 4)
    return k.finish()


def _halves(k: Function, s: Shape, row: Value, t: Value) -> Value:
    return k.zext(k.load(vec(I16, s.lanes), row, t * 2), s.ivector)


def store_panel(module: Module, s: Shape, log: Any) -> Any:
    """out = acc / running_sum and lse = ln4·running_max + ln running_sum for the first `count` lanes."""
    k = module.function(
        "store_panel", {"state": PTR, "table": PTR, "lse_table": PTR, "count": I64, "width": I64, "column": I64}
    )
    p = k.p
    acc = k.at(p["state"], 2 * s.row_bytes)
    for v in range(s.vectors):
        at = s.lane_offset(v)
        m, running_sum = k.load(s.vector, p["state"], at), k.load(s.vector, p["state"], s.row_bytes + at)
        empty = is_empty(m, running_sum)
        with k.range(0, p["width"]) as c:
            x = k.load(s.vector, acc, c * s.row_bytes + at) / running_sum
            k.store(k.select(empty, k.const(0.0, s.vector), x), acc, c * s.row_bytes + at)
        first = v * s.lanes
        unit = p["column"].equals(s.storage_bytes) & (p["count"] >= first + s.lanes)
        end = k.select(unit, p["width"] // s.lanes * s.lanes, k.i64(0))
        with k.range(0, end, s.lanes) as c:
            rows = k.transpose([k.load(s.vector, acc, (c + i) * s.row_bytes + at) for i in range(s.lanes)])
            for lane, x in enumerate(rows):
                k.store(narrowed(k, s, x), k.load(PTR, p["table"], (first + lane) * 8), c * s.storage_bytes)
        with k.range(first, k.min(p["count"], k.i64(first + s.lanes))) as lane:
            row = k.load(PTR, p["table"], lane * 8)
            with k.range(end, p["width"]) as c:
                x = k.load(s.number, acc, c * s.row_bytes + lane * s.number_bytes)
                k.store(narrowed(k, s, x), row, c * p["column"])
    with k.when(k.load(I64, p["lse_table"]).differs(0)), k.range(0, p["count"]) as lane:
        m, running_sum = (k.load(s.number, p["state"], i * s.row_bytes + lane * s.number_bytes) for i in (0, 1))
        k.store(log_sum_exp(k, s, log, m, running_sum), k.load(PTR, p["lse_table"], lane * 8))
    return k.finish()


def _task(parts: _Parts) -> Any:
    """One block of queries of one kv head, from packing to stored rows."""
    s = parts.shape
    k = parts.module.function("task", {"a": PTR, "scratch": PTR, "number": I64})
    task = _Task(k, parts)
    last = task.setup()
    with task.stretches(k.i64(0), last, task.hidden) as (span_start, span_end):
        with k.range(0, task.panels) as i, k.when(k.load(I64, task.panel(i), task.high) > span_start):
            task.clear(k.at(task.panel(i), task.get("at_span")))
        with k.range(span_start, span_end, TILE) as start:
            count = k.min(last - start, k.i64(TILE))
            with k.when(task.class_of(k.i64(0), task.panels, start, start + count) > 0):
                task.tile(start, count)
        with (
            k.when(last > SPAN),
            k.range(0, task.panels) as i,
            k.when(k.load(I64, task.panel(i), task.high) > span_start),
        ):
            at = task.panel(i)
            k.call(parts.merge, k.at(at, task.get("at_total")), k.at(at, task.get("at_span")), task.get("value_dim"))
    state = k.select((last > SPAN) | last.equals(0), task.get("at_total"), task.get("at_span"))
    with k.range(0, task.panels) as i:
        at = task.panel(i)
        rows = k.at(at, task.get("at_rows"))
        seen = k.select(k.load(I64, at, task.high) > 0, state, task.get("at_total"))
        count = k.min(task.rows - i * s.panel, k.i64(s.panel))
        with k.when(task.get("sinks").differs(0) & (task.index >= 0)):
            task.sink(k.at(rows, s.panel * 32), k.at(at, seen))
        out, lse = k.at(rows, s.panel * 8), k.at(rows, s.panel * 16)
        k.call(parts.store, k.at(at, seen), out, lse, count, task.get("value_dim"), task.get("out_column"))
    return k.finish()


class _Task(Work):
    """Names for what a task works with. A panel's memory: low and high limits, q_panel, two states, limits, rows."""

    low, high, queries = 0, 8, 64

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k)
        self.parts, self.s = parts, parts.shape
        self.rows = self.panels = k.i64(0)
        self.keys = self.values = self.scratch
        self.index, self.of = self.rows, {}
        self.heads = self.rows, self.rows
        self.ahead = k.buffer(I64, max(1, len(parts.squares) * self.s.panel))

    def panel(self, i: Value) -> Value:
        return self.k.at(self.scratch, self.get("at_panels") + i * self.get("panel_bytes"))

    def units(self, length: Value) -> Value:
        return (length + 1) >> 1 if self.s.dot else length

    def setup(self) -> Value:
        """Finds the task's rows, packs its panels; returns how many keys its last row sees."""
        k, s = self.k, self.s
        self.of = of = self.item()
        local = k.p["number"] - of["first"]
        head, block = local // of["blocks"], local % of["blocks"]
        causal = self.get("causal").differs(0)
        block = k.select(causal, of["blocks"] - 1 - block, block)  # heaviest first
        group, block_rows = self.get("group"), self.get("panels") * s.panel
        first = block * block_rows
        total = of["q_len"] * group
        self.rows = k.min(total - first, block_rows)
        self.panels = (self.rows + (s.panel - 1)) // s.panel
        self.keys = k.at(k.pointer(self.get("k")), of["k_at"] + head * self.get("k_head"))
        self.values = k.at(k.pointer(self.get("v")), of["v_at"] + head * self.get("v_head"))
        self.index = of["index"]
        self.heads = head * group, (head + 1) * group - 1
        lse = self.get("lse")
        with k.range(0, self.panels) as i:
            at = self.panel(i)
            rows = k.at(at, self.get("at_rows"))
            with k.range(0, s.panel) as lane:
                r = k.min(first + i * s.panel + lane, total - 1)
                position, q_head = r // group, head * group + r % group
                for slot, name in enumerate(("q", "out", "lse")):
                    address = (
                        self.get(name)
                        + of[f"{name}_at"]
                        + q_head * self.get(f"{name}_head")
                        + position * self.get(f"{name}_row")
                    )
                    if name == "lse":
                        address = k.select(lse.differs(0), address, lse)
                    k.store(address, rows, lane * 8 + slot * s.panel * 8)
                limit = k.max(k.min(of["start"] + position + 1, of["k_len"]), k.i64(0))
                limit = k.select(causal, limit, of["k_len"])
                k.store(limit, k.at(at, self.get("at_limits")), lane * 8)
                k.store(position + of["start"] + self.get("k_start"), rows, lane * 8 + s.panel * 24)
                k.store(q_head, rows, lane * 8 + s.panel * 32)
            limits = k.at(at, self.get("at_limits"))
            k.store(k.load(I64, limits), at, self.low)
            k.store(k.load(I64, limits, (s.panel - 1) * 8), at, self.high)
            self.clear(k.at(at, self.get("at_total")))
            if self.parts.visibility is not None:
                self.clear(k.at(at, self.get("at_span")))  # the only span may be skipped
            d = self.get("head_dim")
            k.call(
                self.parts.pack, rows, k.at(at, self.queries), d, self.units(d), self.get("q_column"), self.get("flip")
            )
        return k.load(I64, self.panel(self.panels - 1), self.high)

    @property
    def hidden(self) -> Callable[[Value, Value], Value] | None:
        """Tells whether keys are hidden from all rows."""
        if self.parts.visibility is None:
            return None
        return lambda low, high: self.class_of(self.k.i64(0), self.panels, low, high).equals(0)

    def clear(self, state: Value) -> None:
        """(-inf, 0, 0): a state that has seen nothing."""
        k, s = self.k, self.s
        for v in range(s.vectors):
            k.store(k.const(float("-inf"), s.vector), state, s.lane_offset(v))
        with k.range(1, self.get("width") + 2) as row:
            for v in range(s.vectors):
                k.store(k.const(0.0, s.vector), state, row * s.row_bytes + s.lane_offset(v))

    def sink(self, heads: Value, state: Value) -> None:
        """Merges what a sink is: a key of that score, with a value of zeros.

        Its state lies where a tile's partial sums were.
        """
        k, s = self.k, self.s
        of, logits = k.at(self.scratch, self.get("at_check") + s.row_bytes), k.pointer(self.get("sinks"))
        self.clear(of)
        with k.range(0, s.panel) as lane:
            logit = k.load(s.number, logits, k.load(I64, heads, lane * 8) * s.number_bytes)
            k.store(logit, of, lane * s.number_bytes)
            k.store(k.const(1.0, s.number), of, s.row_bytes + lane * s.number_bytes)
        k.call(self.parts.merge, state, of, self.get("value_dim"))

    def tile(self, start: Value, count: Value) -> None:
        """One tile of keys for all panels that see any of it."""
        k, s, parts = self.k, self.s, self.parts
        d, value_dim = self.get("head_dim"), self.get("value_dim")
        k_row, v_row = self.get("k_row"), self.get("v_row")
        keys, values = k.at(self.keys, start * k_row), k.at(self.values, start * v_row)
        units, number = self.units(d), s.number_bytes
        k_staged, v_staged = (k.at(self.scratch, self.get(n)) for n in ("at_keys", "at_values"))
        stage_k, stage_v = self.get("stage_k").differs(0), self.get("stage_v").differs(0)
        k_places = k.at(self.scratch, self.get("at_places"))
        v_places = k.at(k_places, PLACES * 8)
        with k.when(stage_k):
            self.locate(k_places, "k", self.keys, start, count)
            k.call(parts.stage_keys, k_staged, k_places, k_row, self.get("k_column"), count, d, units)
        staging = k.variable(stage_v)
        if s.cached:  # values that lie block after block are read there
            regular = self.locate(v_places, "v", self.values, start, count)
            values = k.at(k.load(PTR, v_places), s.header)
            staging.set(stage_v | regular.equals(0))
        steps_row = v_row << 1 if s.dot else v_row  # from one pair of a cache to the next
        with k.when(staging.get()):
            if not s.cached:
                self.locate(v_places, "v", self.values, start, count)
            many, row = (self.units(count), steps_row) if s.cached and s.dot else (count, v_row)
            row = k.i64(0) + value_dim if s.quantised else row
            k.call(parts.stage_values, v_staged, v_places, row, self.get("v_column"), many, value_dim, value_dim)
        if s.quantised:
            self.stage_scales(k_places, v_places, count)
        keys, k_row = k.select(stage_k, k_staged, keys), k.select(stage_k, units * number, k_row)
        values, v_row = (
            k.select(staging.get(), v_staged, values),
            k.select(staging.get(), value_dim * number, steps_row),
        )
        with k.range(0, self.panels) as i:
            at = self.panel(i)
            high = k.min(k.load(I64, at, self.high) - start, count)
            with k.when(high > 0):
                if parts.visibility is None:
                    self.panel_tile(i, start, count, k.i64(0), high, high, keys, k_row, values, v_row)
                else:
                    seen = self.class_of(i, i + 1, start, start + high)
                    first, end, clear = self.extent_of(
                        parts.extent, seen, self.index, self.heads, self.box(i, i + 1), start, high
                    )
                    with k.when(first < end):
                        self.panel_tile(i, start, count, first, end, clear, keys, k_row, values, v_row)

    def locate(self, places: Value, name: str, base: Value, start: Value, count: Value) -> Value:
        """The addresses of a tile's keys or values; whether they are at one distance."""
        k = self.k
        row = self.get(f"{name}_row")
        return k.call(
            self.parts.locate,
            k.p["a"],
            places,
            k.pointer(self.of["pages"]),
            base,
            self.get(f"{name}_page"),
            row,
            start,
            start + count,
        )

    def stage_scales(self, k_places: Value, v_places: Value, count: Value) -> None:
        """A tile's scales, side by side: of keys, then of values."""
        k = self.k
        for n, places in enumerate((k_places, v_places)):
            to = k.at(self.scratch, self.get("at_scales") + n * (TILE * 4))
            with k.range(0, count, BLOCK) as j:
                k.store(k.load(vec(F32, BLOCK), k.load(PTR, places, j // BLOCK * 8)), to, j * 4)

    def panel_tile(
        self,
        i: Value,
        start: Value,
        count: Value,
        first: Value,
        end: Value,
        clear: Value,
        keys: Value,
        k_row: Value,
        values: Value,
        v_row: Value,
    ) -> None:
        """Keys [first, end) of a tile for one panel. The mask hides nothing below `clear`; `causal` still may."""
        k, s, parts = self.k, self.s, self.parts
        at = self.panel(i)
        check = k.at(self.scratch, self.get("at_check"))
        d, value_dim = self.get("head_dim"), self.get("value_dim")
        units = self.units(d)
        full = k.max(k.min(k.load(I64, at, self.low) - start, clear), first)
        self.count(full - first, end - first)
        if s.dot:  # the lone key of a half-visible pair needs the predicated path, unless its partner is padding
            odd = (full & 1).differs(0)
            odd = odd if s.cached else odd & ((full < end) | (end < count))
            full = k.select(odd, full - 1, full)
        start, full, high, clear = start + first, full - first, end - first, clear - first
        keys = k.at(keys, first * k_row)
        values = k.at(values, self.units(first) * v_row)
        state = k.at(at, self.get("at_span"))
        if parts.aim is not None:
            k.call(
                parts.aim,
                k.p["a"],
                self.ahead,
                k.at(at, self.get("at_rows") + s.panel * 24),
                start + self.get("k_start"),
                self.index,
            )
        scales = (
            [k.at(self.scratch, self.get("at_scales") + n * (TILE * 4) + first * 4) for n in (0, 1)]
            if s.quantised
            else []
        )
        k.call(
            parts.score, self.scratch, k.at(at, self.queries), keys, k_row, high, units, check, self.ahead, *scales[:1]
        )
        limits = k.at(at, self.get("at_limits"))
        if parts.expression is not None:
            lanes = k.at(at, self.get("at_rows") + s.panel * 24)
            place = (start + self.get("k_start"), start, high, self.index, clear, self.ahead)
            with k.when(k.const(1, I1) if s.program.score is not None else clear < high):
                k.call(parts.expression, k.p["a"], self.scratch, check, lanes, limits, *place)
        full = k.call(parts.softmax, self.scratch, check, state, limits, start, full, high, self.scale(), *scales[1:])
        steps = self.units(high)
        full = self.units(full)
        acc = k.at(state, 2 * s.row_bytes)
        partial = k.at(self.scratch, self.get("at_partial"))
        arguments = (acc, self.scratch, values, v_row, full, steps, value_dim, check, partial)
        with k.when(full > 0):
            k.call(parts.value, *arguments)
        with k.when(full < steps):
            k.call(parts.predicated, *arguments)

    def box(self, first: Value, end: Value) -> tuple[Value, Value]:
        """First and last position of panels [first, end)."""
        k, s = self.k, self.s
        lanes = self.get("at_rows") + s.panel * 24
        return k.load(I64, k.at(self.panel(first), lanes)), k.load(
            I64, k.at(self.panel(end - 1), lanes + (s.panel - 1) * 8)
        )

    def class_of(self, first: Value, end: Value, low: Value, high: Value) -> Value:
        """Whether keys [low, high) are hidden from (0), partly visible to (1) or visible to (2) panels [first, end)."""
        k = self.k
        if self.parts.visibility is None:
            return k.i64(2)
        return self.seen_of(self.parts.visibility, self.index, self.heads, self.box(first, end), low, high)

    def count(self, full: Value, high: Value) -> None:
        """In a counting run: what was computed, for plan() to agree with."""
        k = self.k
        counts = self.get("counts")
        with k.when(counts.differs(0)):
            target = k.pointer(counts)
            mixed = full < high
            for i, amount in enumerate((k.zext(mixed ^ 1, I64), k.zext(mixed, I64), high)):
                Value(k, k.b.atomic_rmw("add", k.at(target, 8 * i).x, amount.x, "seq_cst"))

    def scale(self) -> Value:
        k, s = self.k, self.s
        word = self.get("c")
        return word.bits(F64) if s.wide else k.trunc(word, I32).bits(F32)
