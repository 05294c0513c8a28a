"""The forward kernel: one task is a block of queries of one kv head. It knows sequences and scratch, not vector widths.

    region(arguments): until the tickets of this region are drawn, take one and run its task
    task: pack the block's query panels; for every span, for every tile of keys, for every panel: score, softmax,
          value; merge the span into the panel's state; at the end divide, transpose and store

Arguments, scratch and the memory of a panel are described in memory/records.py.
"""

from __future__ import annotations

import functools
from typing import Any

from ...problem.problem import SPAN, TILE
from ..language.lookups import lines
from ..language.vector import F32, I1, I64, PTR, Function, Module, Value, Variable, vec
from ..memory.formats import load_scales
from ..memory.records import BLOCK, ENDS, LANES, PLACES, ROW_AT, Item
from ..memory.shape import Shape
from ..products.product import product_of
from .addresses import locate, stage_scales
from .dropping import drop_tile
from .lower import expression_tile, per_query_streams, prefetch_addresses
from .panel_products import score_tile
from .panel_states import clear_state, copy_state, load_state, merge_states, store_panel, store_state
from .panel_weights import scale_weights, softmax_tile
from .panels import Panel, PanelWork, Tile
from .prefetch import find_prefetch
from .slots import Choice, SlotFunctions, number_of, spread_tile
from .softmax import SINK_SUM, natural_log
from .staging import pack_queries
from .task import Seen, attention_module
from .visibility import extent, visibility


class _Parts:
    """The functions of one forward module."""

    def __init__(self, s: Shape) -> None:
        self.shape = s
        self.module = Module(f"forward_{s.storage}")
        m, product = self.module, product_of(s)
        self.per_query_streams = per_query_streams(s.program) if s.program and not s.chosen else []
        self.score = score_tile(m, s, [lines(x, TILE) for x in self.per_query_streams])
        self.prefetch_addresses = prefetch_addresses(m, s, s.program) if self.per_query_streams else None
        self.softmax, self.merge = softmax_tile(m, s), merge_states(m, s)
        self.drop = drop_tile(m, s) if s.dropout else None
        self.scale_weights = scale_weights(m, s) if s.scale_block else None
        self.value, self.predicated = product.value_tile(m), product.predicated_tile(m)
        self.expression = expression_tile(m, s, s.program) if s.program else None
        self.visibility = visibility(m, s, s.program) if s.is_masked and not s.chosen else None
        self.slots: Any = SlotFunctions.of(m, s) if s.chosen else None
        self.spread = spread_tile(m, s) if s.chosen else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.log = natural_log(m)
        self.pack = pack_queries(m, s)
        self.stage_keys, self.stage_values = product.stage_tiles(m)
        self.locate = locate(m, s.piece)
        self.stage_scales = stage_scales(m, self.locate, s.format.unit) if s.lists_scales else None
        self.store = store_panel(m, s, self.log)
        goes_on = s.partial or s.resumed
        self.resume, self.leave = (load_state(m, s), store_state(m, s)) if goes_on else (None, None)


def forward_module(s: Shape, symbol: str) -> Module:
    """Writes the kernel for one shape; `symbol` is the region's public name."""
    return attention_module(_Parts(s), _ChosenTask if s.chosen else _Task, symbol)


class _Task(PanelWork):
    """One block of queries of one kv head, from packing to stored rows."""

    ends, lanes = ENDS, LANES

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts)
        k, a, item = self.k, self.a, self.item
        head, self.first = self.block_of(k.p["number"], item)
        self.total = item.q_len * a.group
        self.rows = k.min(self.total - self.first, a.panels * self.s.panel)
        self.panels = (self.rows + (self.s.panel - 1)) // self.s.panel
        self.head, self.heads = head, (head * a.group, (head + 1) * a.group - 1)
        self.several = a.parts > 1  # tasks share the spans of this block
        self.keys, self.values = self.keys_of("k", head), self.keys_of("v", head)
        self.values_in_keys = self.are_values_in_keys()
        self.first_key = item.first_key if self.s.resumed else k.i64(0)
        _, position = self.places_of((self.first + self.rows - 1) // a.group, head * a.group)
        self.last = self.limit(position)  # how many keys the last row sees
        self.goes_on = self.s.partial or self.s.resumed or self.s.chosen
        self.in_total = k.const(1, I1) if self.goes_on else (self.last > SPAN) | self.last.equals(0) | self.several
        self.follows, self.prefetch = find_prefetch(self)

    def block_of(self, number: Value, item: Item) -> tuple[Value, Value]:
        """Returns a ticket's kv head and its first row of queries: some heads by turns, then the next ones."""
        k, a = self.k, self.a
        local, together = (number - item.first) // a.parts, item.blocks * a.side_by_side
        head = local // together * a.side_by_side + local % a.side_by_side
        block = local % together // a.side_by_side
        block = k.select(a.causal.differs(0), item.blocks - 1 - block, block)  # heaviest first
        return head, block * (a.panels * self.s.panel)

    def run(self) -> None:
        with product_of(self.s).registers(self.k):
            self.take_all()

    def take_all(self) -> None:
        """Takes all panels through the task's share of the spans; merges these, or leaves their states to the last of
        the tasks that share a block.
        """
        k, a, last = self.k, self.a, self.last
        with k.range(0, self.panels) as i:
            self.pack(Panel(self, i))
        share, spans = k.p["number"] % a.parts, (last + (SPAN - 1)) // SPAN
        seen = self.first_key // SPAN  # whole spans that states have
        first, end = (seen + (spans - seen) * x // a.parts for x in (share, share + 1))
        if self.s.resumed:
            with k.range(first, end) as span:
                self.take_span(k.max(span * SPAN, self.first_key), k.min(span * SPAN + SPAN, last))
        else:
            self.take_visible_spans(first, end)
        with k.when(self.has_all()):
            self.finish()

    def take_visible_spans(self, first: Value, end: Value) -> None:
        """Takes all panels through the spans of a share that any of its rows sees."""
        k, a = self.k, self.a
        if self.visibility is not None:  # spans that are passed by have seen nothing
            with k.when(self.several), k.range(first, end) as span, k.range(0, self.panels) as i:
                clear_state(k, self.s, self.left_state(span, i), a.width + 2)
        box = functools.partial(self.box, k.i64(0), self.panels)
        with self.visible_spans(first * SPAN, k.min(end * SPAN, self.last), box) as (span_start, span_end):
            self.take_span(span_start, span_end)

    def begin_span(self, panel: Panel, start: Value) -> None:
        """Clears a panel's state of a span, or loads it where the span is open already."""
        k, state = self.k, panel.part("span")
        rows = k.i64(2) if self.visibility is None else self.a.width + 2  # the rest is fresh to its first tile
        if not self.s.resumed:
            clear_state(k, self.s, state, rows)
            return
        with k.either((start % SPAN).equals(0)) as (is_fresh, is_open):
            with is_fresh:
                clear_state(k, self.s, state, rows)
            with is_open:
                self.load_state(panel, "span", 1)

    def load_state(self, panel: Panel, part: str, half: int) -> None:
        """Loads what the rows of a panel have seen: in whole spans (0), or in the open one (1)."""
        k = self.k
        k.call(self.parts.resume, k.p["a"], panel.part(part), panel.lanes("state"), k.i64(half))

    def take_span(self, span_start: Value, span_end: Value) -> None:
        """Takes all panels through a span, and merges its states, or leaves them."""
        k, a, last = self.k, self.a, self.last
        with k.range(0, self.panels) as i, k.when(Panel(self, i).word("high") > span_start):
            self.begin_span(Panel(self, i), span_start)
        with k.range(span_start, span_end, TILE) as start:
            count = k.min(last - start, k.i64(TILE))
            if self.visibility is None:
                self.tile(start, count)
            else:
                seen = self.seen_of(self.box(k.i64(0), self.panels), start, start + count)
                with k.when(seen > 0):
                    self.tile(start, count)
        is_merged = k.const(1, I1) if self.s.partial else last > SPAN
        if self.s.resumed:  # an open span is left as it is
            is_merged = a.leaves.equals(0) | (span_end % SPAN).equals(0)
        with k.when(is_merged | self.several), k.range(0, self.panels) as i:
            panel = Panel(self, i)
            with k.when(panel.word("high") > span_start), k.either(self.several) as (leave, merge):
                with leave:
                    copy_state(k, self.s, panel.part("span"), self.left_state(span_start // SPAN, i), a.value_dim + 2)
                with merge:
                    k.call(self.parts.merge, panel.part("total"), panel.part("span"), a.value_dim)

    def left_state(self, span: Value, i: Value) -> Value:
        """Returns where tasks that share a block leave the state of a span and panel."""
        k, a = self.k, self.a
        block = k.pointer(a.partials + k.p["number"] // a.parts * a.partial_bytes)
        return k.at(block, (span * a.panels + i) * ((a.width + 2) * self.s.row_bytes))

    def has_all(self) -> Value:
        """Returns whether this task ends its block: it is alone, or comes last, and then merges all spans in order."""
        k, a = self.k, self.a
        is_last = k.variable(self.several ^ 1)
        with k.when(self.several):
            counter = k.pointer(a.arrived + k.p["number"] // a.parts * 8)
            is_last.set((k.fetch_add(counter, 0, 1) + 1).equals(a.parts))
            with k.when(is_last.get()), k.range(0, self.panels) as i:
                panel = Panel(self, i)
                high, first = panel.word("high"), self.first_key // SPAN
                end = (high + (SPAN - 1)) // SPAN
                if self.s.resumed:
                    is_open = a.leaves.differs(0) & (high % SPAN).differs(0)
                    end = end - k.zext(is_open, I64)
                    with k.when(is_open):
                        copy_state(k, self.s, self.left_state(end, i), panel.part("span"), a.value_dim + 2)
                with k.range(first, end) as span:
                    k.call(self.parts.merge, panel.part("total"), self.left_state(span, i), a.value_dim)
        return is_last.get()

    def places_of(self, query: Value, q_head: Value) -> tuple[dict[str, Value], Value]:
        """Returns where a query of the item and of a head lies, with its results and states, and its position."""
        k, a = self.k, self.a
        names = "q", "out", "lse"
        if not self.s.resumed:
            return {name: self.row_of(name, q_head, query) for name in names}, query
        entry = k.at(k.pointer(self.item.rows), query * ROW_AT.bytes)
        at = {name: k.load(I64, entry, ROW_AT.offset(name)) for name in ROW_AT.names}
        words = {x: getattr(a, x) + at[x] + q_head * getattr(a, f"{x}_head") for x in names}
        return words | {"state": a.states + at["state"] + q_head * a.state_head}, at["position"]

    def pack(self, panel: Panel) -> None:
        """Finds a panel's rows and transposes its queries."""
        k, s, a = self.k, self.s, self.a
        first = k.min(self.first + panel.i * s.panel, self.total - 1)
        row, at, of_group = (k.variable(x) for x in (first, first // a.group, first % a.group))
        with k.range(0, s.panel) as lane:
            query, q_head = at.get(), self.head * a.group + of_group.get()
            words, position = self.places_of(query, q_head)
            words["lse"] = k.select(a.lse.differs(0), words["lse"], a.lse)
            words |= {"limit": self.limit(position), "head": q_head}
            words["position"] = position + self.item.start + a.k_start
            for name, word in words.items():
                k.store(word, panel.lanes(name), lane * 8)
            with k.when(row.get() + 1 < self.total):  # lanes past the end repeat the last row
                next_head = of_group.get() + 1
                row.set(row.get() + 1)
                at.set(query + k.zext(next_head.equals(a.group), I64))
                of_group.set(k.select(next_head.equals(a.group), k.i64(0), next_head))
        limits = panel.lanes("limit")
        k.store(k.load(I64, limits), panel.at, ENDS.offset("low"))
        k.store(k.load(I64, limits, (s.panel - 1) * 8), panel.at, ENDS.offset("high"))
        with k.when(self.in_total | (panel.word("high") <= 0)):
            clear_state(k, s, panel.part("total"), a.width + 2)
        if s.resumed:
            with k.when(self.first_key.differs(0)):
                self.load_state(panel, "total", 0)
        elif self.parts.resume is not None:
            with k.when(a.begins.equals(0)):
                k.call(self.parts.resume, k.p["a"], panel.part("total"), panel.lanes("out"), panel.lanes("lse"))
        if self.visibility is not None:
            clear_state(k, s, panel.part("span"), a.width + 2)  # the only span may be skipped
        units = s.packed_units(a.head_dim)
        k.call(self.parts.pack, panel.lanes("q"), panel.part("queries"), a.head_dim, units, a.q_column, a.flip)

    def finish(self) -> None:
        """Joins a sink last, then writes the rows."""
        k, s, a = self.k, self.s, self.a
        state_at = k.select(self.in_total, a.at_total, a.at_span)  # the only span's state is all
        with k.range(0, self.panels) as i:
            panel = Panel(self, i)
            state = k.at(panel.at, k.select(panel.word("high") > 0, state_at, a.at_total))
            count = k.min(self.rows - i * s.panel, k.i64(s.panel))
            if self.parts.leave is None:
                self.end(panel, state, count)
            else:
                with k.either(a.leaves.equals(0) if s.resumed else a.ends.differs(0)) as (end, more):
                    with end:
                        self.end(panel, state, count)
                    with more:
                        self.leave(panel, state, count)

    def leave(self, panel: Panel, state: Value, count: Value) -> None:
        """Stores the states of a panel's first `count` rows, which go on elsewhere.

        The second is read only where a span is open.
        """
        k, s = self.k, self.s
        if not s.resumed:
            k.call(self.parts.leave, k.p["a"], state, panel.lanes("out"), panel.lanes("lse"), count)
            return
        for half, part in enumerate(("total", "span")):
            k.call(self.parts.leave, k.p["a"], panel.part(part), panel.lanes("state"), k.i64(half), count)

    def end(self, panel: Panel, state: Value, count: Value) -> None:
        """Joins a sink to a panel's state last, then writes its first `count` rows."""
        k, a = self.k, self.a
        with k.when(a.sinks.differs(0) & (self.item.index >= 0)):
            self.sink(panel.lanes("head"), state)
        out, lse = panel.lanes("out"), panel.lanes("lse")
        k.call(self.parts.store, state, out, lse, count, a.value_dim, a.out_column, *self.divisor())

    def sink(self, heads: Value, state: Value) -> None:
        """Merges what a sink is; its state lies where a tile's partial sums were."""
        k, s, a = self.k, self.s, self.a
        of = self.part("partial")
        clear_state(k, s, of, a.width + 2)
        with k.range(0, s.panel) as lane:
            logit = k.load(s.number, k.pointer(a.sinks), k.load(I64, heads, lane * 8) * s.number_bytes)
            k.store(logit, of, lane * s.number_bytes)
            k.store(k.const(SINK_SUM, s.number), of, s.row_bytes + lane * s.number_bytes)
        k.call(self.parts.merge, state, of, a.value_dim)

    # --- one tile

    def tile(self, start: Value, count: Value) -> None:
        """Takes all panels that see any of it through a tile of keys."""
        k = self.k
        tile = self.stage_tile(start, count)
        with k.range(0, self.panels) as i:
            panel = Panel(self, i)
            high = k.min(panel.word("high") - start, count)
            with k.when(high > 0):
                if self.visibility is None:
                    self.panel_tile(panel, tile, Seen(k.i64(0), high, k.i64(0), high))
                else:
                    seen = self.parts_of(self.box(i, i + 1), start, high)
                    with k.when(seen.first < seen.end):
                        self.panel_tile(panel, tile, seen)

    def stage_tile(self, start: Value, count: Value) -> Tile:
        """Returns a tile, copied to scratch where micro-kernels cannot read it where it lies."""
        k, s, a = self.k, self.s, self.a
        if s.reads_blocks and not s.stages_blocks:
            return self.locate_tile(start, count)
        keys, values = k.at(self.keys, start * a.k_row), k.at(self.values, start * a.v_row)
        units, dim = s.packed_units(a.head_dim), a.value_dim
        k_staged, v_staged = self.part("keys"), self.part("values")
        k_places = self.part("places")
        v_places = k.at(k_places, PLACES * 8)
        stage_k, stage_v = a.stage_k.differs(0), a.stage_v.differs(0)
        if s.together > 1:  # they are read whole
            stage_k = stage_k | (count < TILE)
        with k.when(stage_k):
            self.stage_keys(k_staged, k_places, start, count)
        if s.cached:  # values that lie block after block are read there
            regular = self.locate(v_places, "v", start, self.count_located(start, count))
            values = k.load(PTR, v_places)
            stage_v = stage_v | regular.equals(0)
        v_row, k_row = s.step_bytes(a.v_row), a.k_row  # of a cache's values: from a unit to the next
        if s.scattered:
            ahead = k.min(start + count + s.fetching.rows, self.item.k_len) - start
            self.locate(k_places, "k", start, ahead)
            keys, k_row = k_places, k.i64(8)
            if s.scatters_values:
                self.locate(v_places, "v", start, ahead)
                values, v_row = v_places, k.i64(8)
        in_keys = k.const(0, I1)
        if s.has_rows_of_numbers:
            in_keys = stage_k & stage_v & self.values_in_keys
            stage_v = stage_v & (in_keys ^ 1)
        with k.when(stage_v):
            if not s.cached:
                self.locate(v_places, "v", start, count)
            many, row = (s.count_units(count), v_row) if s.cached else (count, a.v_row)
            row = s.format.offset(dim) if s.format.is_coded and s.cached else row
            k.call(self.parts.stage_values, v_staged, v_places, row, a.v_column, many, dim, dim, k.i64(0))
        if s.format.is_coded:
            self.stage_scales(k_places, v_places, start, count)
        k_staged_row = units * s.number_bytes
        if s.stages_blocks:
            k_staged = self.list_blocks(k_staged, k_staged_row, k.at(k_places, 64 * 8))
        return Tile(
            start,
            count,
            k.select(stage_k, k_staged, keys),
            k.select(stage_k, k_staged_row, k_row),
            k.select(in_keys, k_staged, k.select(stage_v, v_staged, values)),
            k.select(in_keys, k_staged_row, k.select(stage_v, dim * s.number_bytes, v_row)),
            self.rest_of_keys(k_staged, stage_k, start) if s.reads_parts else None,
        )

    def count_located(self, start: Value, count: Value) -> Value:
        """Counts the keys of a tile to locate: of codes also those that are fetched meanwhile."""
        if not self.s.stages_blocks:
            return count
        return self.k.min(self.item.k_len - start, count + TILE)

    def list_blocks(self, staged: Value, row: Value, blocks: Value) -> Value:
        """Returns the list of the addresses of a tile's staged blocks, `row` bytes for each key; one more is read."""
        k = self.k
        with k.range(0, TILE // BLOCK + 1) as n:
            k.store(k.at(staged, n * (row * BLOCK)), blocks, n * 8)
        return blocks

    def locate_tile(self, start: Value, count: Value) -> Tile:
        """Returns a tile of a cache's blocks, which are read where they lie: keys by block, values by unit."""
        k, s, a = self.k, self.s, self.a
        keys = self.part("places")
        blocks, values = k.at(keys, 64 * 8), k.at(keys, PLACES * 8)
        ahead = k.min(start + count + s.fetching.rows, self.item.k_len) - start
        self.locate(keys, "k", start, ahead)
        self.locate(blocks, "v", start, ahead)
        units = BLOCK // s.elements
        steps = k.iota(units) * k.splat(s.step_bytes(a.v_row), units)
        with k.range(0, (ahead + (BLOCK - 1)) // BLOCK) as n:
            address = k.splat(k.load(I64, blocks, n * 8), units) + steps
            k.store(address, values, n * (units * 8))
        return Tile(start, count, keys, k.i64(0), values, k.i64(8))

    def rest_of_keys(self, staged: Value, is_staged: Value, start: Value) -> tuple[Value, Value]:
        """Returns where the second part of a tile's keys lies, and its row: in the joined rows, if these are staged."""
        k, s, a = self.k, self.s, self.a
        joined = k.at(staged, s.count_units(a.latent_dim) * s.number_bytes)
        there = k.at(self.keys_of("rotary", self.head), start * a.rotary_row)
        row = k.select(is_staged, s.packed_units(a.head_dim) * s.number_bytes, a.rotary_row)
        return k.select(is_staged, joined, there), row

    def stage_keys(self, to: Value, places: Value, start: Value, count: Value) -> None:
        """Copies a tile of keys to scratch: of keys in two parts, one behind the other."""
        k, s, a = self.k, self.s, self.a
        units = s.packed_units(a.head_dim)
        self.locate(places, "k", start, self.count_located(start, count))
        if not s.in_parts:
            row = a.value_dim if s.latent else a.k_row
            k.call(self.parts.stage_keys, to, places, row, a.k_column, count, a.head_dim, units, k.i64(0))
            return
        k.call(self.parts.stage_keys, to, places, a.k_row, a.k_column, count, a.latent_dim, units, k.i64(0))
        self.locate(places, "rotary", start, count)
        rest, first = a.head_dim - a.latent_dim, s.count_units(a.latent_dim)
        k.call(self.parts.stage_keys, to, places, a.rotary_row, a.rotary_column, count, rest, units, first)

    def are_values_in_keys(self) -> Value:
        """Returns whether values are the first columns of the keys, where these lie."""
        a, item = self.a, self.item
        same = (a.k + item.k_at).equals(a.v + item.v_at)
        for part in ("head", "row", "column", "page"):
            same = same & getattr(a, f"k_{part}").equals(getattr(a, f"v_{part}"))
        return same & (a.value_dim <= (a.latent_dim if self.s.in_parts else a.head_dim))

    def locate(self, places: Value, name: str, start: Value, count: Value) -> Value:
        """Finds the addresses of a tile's keys ("k"), their second part ("rotary") or values ("v").

        Returns whether they are at one distance.
        """
        k, pages = self.k, self.k.pointer(self.item.pages)
        return k.call(self.parts.locate, k.p["a"], places, pages, *self.place_of(name), start, start + count)

    def place_of(self, name: str) -> tuple[Value, Value, Value]:
        """Returns where keys ("k"), their second part ("rotary") or values ("v") lie: base, bytes of a page, a row."""
        a = self.a
        match name:
            case "k":
                return self.keys, a.k_page, a.k_row
            case "v":
                return self.values, a.v_page, a.v_row
            case _:
                return self.keys_of("rotary", self.head), a.rotary_page, a.rotary_row

    def stage_scales(self, k_places: Value, v_places: Value, start: Value, count: Value) -> None:
        """Stages a tile's scales, side by side: of keys, then of values."""
        k = self.k
        s, a = self.s, self.a
        if s.lists_scales:
            for name, to in zip(("k", "v"), self.scales(), strict=True):
                self.list_scales(self.parts.stage_scales, name, self.head, (k_places, to), start, start + count)
            return
        dims = a.value_dim if s.latent else a.head_dim, a.value_dim
        for places, to, columns in zip((k_places, v_places), self.scales(), dims, strict=True):
            with k.range(0, count, BLOCK) as j:
                block = k.load(PTR, places, j // BLOCK * 8)
                with k.range(0, s.count_scales(columns) if s.scale_block else k.i64(1)) as n:
                    at = k.at(block, n * (BLOCK * s.scale_bytes))
                    k.store(load_scales(k, s.format, at, 0, BLOCK), to, (n * TILE + j) * 4)
        if s.latent:  # the rest of a key, which has no codes
            rest = s.count_scales(a.value_dim) * TILE
            with k.range(0, TILE, BLOCK) as j:
                k.store(k.const(1.0, vec(F32, BLOCK)), self.scales()[0], (rest + j) * 4)

    def scales(self) -> list[Value]:
        """Returns where scales lie: of keys, and of values, [scale, TILE] each."""
        s, a = self.s, self.a
        keys = s.count_scales(a.value_dim) + 1 if s.latent else s.count_scales(a.head_dim)
        return [self.part("scales"), self.k.at(self.part("scales"), self.k.i64(TILE * 4) * keys)]

    def panel_tile(self, panel: Panel, tile: Tile, seen: Seen) -> None:
        """Takes a panel through the keys of a tile that the mask shows; `causal` may hide more of them."""
        k, s, parts, a = self.k, self.s, self.parts, self.a
        product, low = product_of(s), k.min(panel.word("low") - tile.start, seen.full)
        masked = seen.clear - s.first_of_units(seen.first)  # keys that the mask may hide before the clear ones
        plain = seen.clear_to(k, low)  # under `causal`, too
        self.count(k.select(plain.clear.equals(seen.first), plain.full - seen.first, k.i64(0)), seen.end - seen.first)
        whole, first = product.whole_keys(k, plain.full, seen.end, tile.length), s.first_of_units(seen.first)
        # the same as numbers of keys from `first` on, where a unit begins
        start, high = tile.start + first, seen.end - first
        clear, shown, full = plain.clear - first, whole - first, seen.full - first
        keys = k.at(tile.keys, first // BLOCK * 8 if s.reads_blocks else first * tile.k_row)
        values = product.values_from(k, tile.values, first, tile.v_row)
        missing = [k.select(seen.end < tile.length, k.const(-0.0, s.number), k.const(0.0, s.number))] if s.pads else []
        scales = [k.at(x, first * 4) for x in self.scales()] if s.format.is_coded else []
        check, state, limits = self.part("check"), panel.part("span"), panel.lanes("limit")
        position = start + a.k_start
        if parts.prefetch_addresses is not None:
            k.call(parts.prefetch_addresses, k.p["a"], self.fetch, panel.lanes("position"), position, self.item.index)
        follows = k.zext(self.follows & (tile.start + TILE >= self.last), I64)
        # keys that any but the last vector of queries sees
        wide = k.max(k.load(I64, limits, (s.panel - s.lanes - 1) * 8) - start, k.i64(0)) if s.has_narrow_tail else high
        codes, rest = [], []
        if s.scale_block:
            codes = [s.count_units(a.value_dim if s.latent else a.head_dim)]
        if tile.rest is not None:
            at, row = tile.rest
            rest = [k.at(at, first * row), row, s.count_units(a.latent_dim)]
        self.score_panel(panel, (keys, tile.k_row, high), (follows, wide), [*scales[:1], *codes, *rest])
        if parts.expression is not None:
            lanes = panel.lanes("position")  # and heads, which follow
            where = (self.first_position(start), start, high, self.item.index, masked, full, self.fetch)
            hides = k.const(1, I1) if s.program.score is not None else (masked > 0) | (full < high)
            with k.when(hides):
                where = (*where, *self.slots())
                k.call(parts.expression, k.p["a"], self.scratch, self.scratch, check, lanes, limits, *where)
        clear, shown = self.hide_absent(clear, shown, high)
        arguments = (check, state, limits, start, clear, shown, high, self.scale(), *missing)
        unpredicated = k.call(parts.softmax, self.scratch, *arguments, *scales[1:] * s.scales_weights)
        if parts.drop is not None:
            lanes = panel.lanes("position")
            k.call(parts.drop, self.scratch, lanes, position, high, self.item.index, a.seed, a.drop_below)
        seen_keys = self.predicated_to(clear), unpredicated, wide, high
        if parts.scale_weights is None:
            self.add_values(state, tile, values, seen_keys, self.scratch)
            return
        with k.range(0, s.count_scales(a.value_dim)) as n:
            scaled = self.part("scaled")
            k.call(parts.scale_weights, self.scratch, scaled, k.at(scales[1], n * (TILE * 4)), high)
            first = n * s.scale_block
            columns = first, k.min(k.i64(s.scale_block), a.value_dim - first)
            self.add_values(state, tile, values, seen_keys, scaled, columns)

    def score_panel(
        self, panel: Panel, keys: tuple[Value, Value, Value], ahead: tuple[Value, Value], more: list[Value],
        to: Value | None = None,
    ) -> None:  # fmt: skip
        """Scores a panel. keys: where they lie, their row, how many. ahead: whether a task follows, and how many keys
        any but the last vector sees.
        """
        k, a, (at, row, count), (follows, wide) = self.k, self.a, keys, ahead
        queries, units = panel.part("queries"), self.s.packed_units(a.head_dim)
        arguments = (queries, at, row, count, units, self.part("check"), self.fetch, k.p["a"], follows, self.prefetch)
        k.call(self.parts.score, self.scratch if to is None else to, *arguments, wide, *more)

    def first_position(self, start: Value) -> Value:
        """Returns the position that keys of a tile are counted from: that of its first one."""
        return start + self.a.k_start

    def hide_absent(self, clear: Value, full: Value, count: Value) -> tuple[Value, Value]:
        """Hides keys that are in a unit with chosen ones, and not chosen; returns what is left of [clear, full)."""
        return clear, full

    def predicated_to(self, clear: Value) -> Value:
        """Returns up to which key products look at what lanes see."""
        return clear

    def slots(self) -> list[Value]:
        """Returns where a tile's keys say which they are; nothing where these lie side by side."""
        return []

    def add_values(
        self, state: Value, tile: Tile, values: Value, keys: tuple[Value, ...], weights: Value,
        columns: tuple[Value, Value] | None = None,
    ) -> None:  # fmt: skip
        """Values by weights, summed to a panel's state. keys: those that all see, from and to; that any but the last
        vector sees; all. columns: the first of values, and how many, where these are not all.
        """
        k, s, parts, a = self.k, self.s, self.parts, self.a
        clear, full, wide, steps = (s.count_units(x) for x in keys)
        clear, full = product_of(s).whole_steps(k, clear, full, steps, tile.values, a.width)
        accumulator, fresh = k.at(state, 2 * s.row_bytes), k.zext((tile.start % SPAN).equals(0), I64)
        partial, width = self.part("partial"), a.value_dim
        if columns is not None:
            column, width = columns
            accumulator, partial = (k.at(x, column * s.row_bytes) for x in (accumulator, partial))
            values = k.at(values, column * s.number_bytes)

        def add(function: Any, first: Value, end: Value, *more: Value) -> None:
            with k.when(first < end):
                sums = width, self.part("check"), partial, fresh
                k.call(function, accumulator, weights, values, tile.v_row, first, end, steps, *sums, *more)

        if s.hides:
            clear = k.select(full > 0, clear, k.i64(0))
            add(parts.predicated, k.i64(0), clear, wide)
        add(parts.value, clear, full)
        add(parts.predicated, full, steps, wide)


class _ChosenTask(_Task):
    """One block of the rows of one query of a kv head, which see the keys of a list.

    Keys of several tiles are scored at once, then weighed and added tile by tile.
    """

    key_count: Value  # keys that are scored at once
    slot_count: Value  # slots of these
    tile_of_keys: tuple[Variable, Value]  # where the next tile's scores are, and how many slots it has

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts)
        self.choice = Choice(self, parts.slots)

    def item_of(self, number: Value) -> Any:
        return self.item_of_chosen(number)

    def block_of(self, number: Value, item: Item) -> tuple[Value, Value]:
        a = self.a
        return number // item.blocks // a.item_count, number % item.blocks * (a.panels * self.s.panel)

    def take_all(self) -> None:
        """Takes all panels through the spans that have chosen keys."""
        k, a, s, limit = self.k, self.a, self.s, self.last
        with k.range(0, self.panels) as i:
            self.pack(Panel(self, i))
        self.choice.clear_zeros(a.value_dim * s.key_bytes)
        at = k.variable(self.item.chosen + self.head * a.chosen_head)
        with k.forever() as leave_if:
            key = self.choice.key_at(at.get())
            leave_if(key >= limit)
            end = k.min((key & -SPAN) + SPAN, limit)
            with k.range(0, self.panels) as i:
                clear_state(k, s, Panel(self, i).part("span"), a.width + 2)
            with k.forever() as leave_span_if:
                leave_span_if(self.choice.key_at(at.get()) >= end)
                self.take_tiles(at, end)
            with k.range(0, self.panels) as i:
                panel = Panel(self, i)
                k.call(self.parts.merge, panel.part("total"), panel.part("span"), a.value_dim)
        self.finish()

    def take_tiles(self, at: Variable, end: Value) -> None:
        """Takes all panels through the next tiles of a span: as many as have room."""
        k, s, choice, zero = self.k, self.s, self.choice, self.k.i64(0)
        tiles, self.slot_count, self.key_count = choice.fill(at, end)
        choice.begin(zero)
        staged = self.stage_tile(zero, self.slot_count)
        with k.range(0, self.panels) as i:
            panel, first_key = Panel(self, i), k.variable(zero)
            rest = []
            if staged.rest is not None:
                rest = [*staged.rest, s.count_units(self.a.latent_dim)]
            keys = staged.keys, staged.k_row, self.key_count
            self.score_panel(panel, keys, (zero, self.key_count), rest, self.part("joint"))
            with choice.each_tile(tiles) as (first, count):
                choice.begin(first)
                self.tile_of_keys = first_key, count
                start = number_of(k.load(I64, choice.slots)) & -TILE
                values = product_of(s).values_from(k, staged.values, first, staged.v_row)
                tile = staged._replace(start=start, length=count, values=values, rest=None)
                self.panel_tile(panel, tile, Seen(zero, count, zero, zero if s.hides else count))

    def score_panel(self, panel: Panel, keys: Any, ahead: Any, more: list[Value], to: Value | None = None) -> None:
        """Scores a panel into memory that is given; else finds a tile's scores there."""
        if to is not None:
            super().score_panel(panel, keys, ahead, more, to)
            return
        first_key, count = self.tile_of_keys
        arguments = (self.part("joint"), self.scratch, self.part("check"), self.choice.slots, first_key.get(), count)
        first_key.set(self.k.call(self.parts.spread, *arguments))

    def stage_keys(self, to: Value, places: Value, start: Value, count: Value) -> None:
        super().stage_keys(to, places, start, self.key_count)

    def hide_absent(self, clear: Value, full: Value, count: Value) -> tuple[Value, Value]:
        k, s = self.k, self.s
        if self.choice.unit == 1:
            return clear, full
        with self.choice.each_absent(count) as (slot, _):
            for v in range(s.vectors):
                k.store(k.const(float("-inf"), s.vector), self.scratch, slot * s.row_bytes + s.lane_offset(v))
        return (clear, full) if s.is_masked else (count, count)

    def predicated_to(self, clear: Value) -> Value:
        """Returns 0 where all lanes see the same keys: values of absent ones are zeros."""
        return clear if self.s.is_masked or self.choice.unit == 1 else self.k.i64(0)

    def locate(self, places: Value, name: str, start: Value, count: Value) -> Value:
        """Finds the addresses of keys ("k"), their second part ("rotary") or values ("v")."""
        choice = self.choice
        of_values = name == "v"
        # not `count`, which may have what is fetched ahead: locate() counts that itself, and no more slots are filled
        slots, count = (choice.base, self.slot_count) if of_values else (choice.keys, self.key_count)
        choice.locate(places, of_values, *self.place_of(name), count, slots)
        return self.k.i64(0)

    def first_position(self, start: Value) -> Value:
        return self.a.k_start

    def slots(self) -> list[Value]:
        return [self.choice.slots]
