"""The decode kernel: few query rows of some kv heads against many keys. It knows spans, tiles and heads, not lanes.

    task: new tokens are stored, if it is to do that; for every span, for every tile: scores of all rows, weights, sums;
          the span's state is merged, or left for the last of a head's tasks

Arguments and scratch are described in memory/records.py, what a lane is in row_weights.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...problem.problem import SPAN, TILE
from ..language.vector import I1, I16, I64, Function, Module, Value, Variable
from ..memory.records import BLOCK, ENDLESS, ITEM, ITEM_BYTES, PLACES, ROW, ROW_AT, STATE_SUMS, WALK, Item
from ..memory.shape import Shape
from ..products.product import product_of
from .addresses import locate, stage_scales
from .dropping import drop_row
from .lower import expression_row
from .row_scores import FEW_ROWS, score, score_heads, score_row
from .row_weights import (
    STEPS_TOGETHER,
    add_up,
    careful_values,
    clear_row,
    merge_row,
    rescale,
    scale_scores,
    store_row,
    value_tiles,
    weigh,
)
from .slots import Choice, SlotFunctions
from .softmax import SINK_SUM, natural_log
from .staging import pack_row
from .task import Box, Work, attention_module, call_at
from .visibility import extent, visibility


class _Parts:
    """The functions of one decode module."""

    def __init__(self, s: Shape) -> None:
        self.shape = s
        m = self.module = Module(f"decode_{s.storage}")
        self.locate, self.pack, self.weigh, self.add_up = locate(m, s.piece), pack_row(m, s), weigh(m, s), add_up(m, s)
        product = product_of(s)
        self.score = product.flushed(m, score(m, s))
        self.drop = drop_row(m, s) if s.dropout else None
        self.rescale = rescale(m, s) if s.format.is_coded else None
        leaves_scales = s.lists_scales or (s.format.is_coded and s.together > 1)  # of keys: scores are without them
        self.scale_scores = scale_scores(m, s) if leaves_scales else None
        self.stage_scales = stage_scales(m, self.locate, s.format.unit) if s.lists_scales else None
        self.expression = expression_row(m, s, s.program) if s.program else None
        self.visibility = visibility(m, s, s.program) if s.is_masked and not s.chosen else None
        self.slots: Any = SlotFunctions.of(m, s) if s.chosen else None
        in_step = s.cached and self.visibility is None and self.scale_scores is None
        self.score_heads = product.flushed(m, score_heads(m, s)) if in_step else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.values = [(rows, least, product.flushed(m, f)) for rows, least, f in value_tiles(m, s)]
        self.careful, self.merge, self.log = product.flushed(m, careful_values(m, s)), merge_row(m, s), natural_log(m)
        self.store = store_row(m, s, self.log)


def decode_module(s: Shape, symbol: str) -> Module:
    """Writes the kernel for one shape; `symbol` is the region's public name."""
    return attention_module(_Parts(s), _ChosenTask if s.chosen else _Task, symbol)


class _Task(Work):
    """All rows of some kv heads of one item, over a share of its spans."""

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts.shape, parts.visibility, parts.extent)
        self.parts = parts
        a, s, item = self.a, self.s, self.item
        self.first_head, self.share = self.head_of_ticket()
        self.group = a.group
        self.rows = item.q_len * self.group
        self.all_rows = self.rows * a.heads
        self.slots, self.value_dim = a.slots, a.value_dim
        self.state_row = (self.slots + 1) * s.vector_bytes
        self.units = s.count_units(a.head_dim)
        self.queries, self.tile_sums, self.span, self.total, self.k_places = (
            self.part(name) for name in ("queries", "sums", "span", "total", "places")
        )
        self.v_places = k.at(self.k_places, PLACES * 8)
        self.alpha, self.sums, self.limits = (
            k.at(self.part("numbers"), a.rows * ROW.offset(name)) for name in ("alpha", "sum", "limit")
        )
        # heads in step where all they see is one tile; longer sequences are read best head by head
        few = (self.rows < FEW_ROWS) & (a.heads > 1) & (item.k_len <= TILE)
        self.in_step = few if parts.score_heads is not None else None
        self.first_key = item.first_key if s.resumed else k.i64(0)
        self.take(k.i64(0))
        self.positions = self.position(k.i64(0)), self.position(self.rows - 1)

    def head_of_ticket(self) -> tuple[Value, Value]:
        """Returns the task's first kv head, and which share of its spans it takes."""
        local, blocks = self.k.p["number"] - self.item.first, self.item.blocks
        return local // blocks * self.a.heads, local % blocks

    def take(self, h: Value) -> None:
        """Turns to the h-th head of the task."""
        k = self.k
        self.h, self.head, self.state_at = h, self.first_head + h, h * self.rows * self.state_row
        self.keys, self.values = self.keys_of("k", self.head), self.keys_of("v", self.head)
        self.heads = self.head * self.group, (self.head + 1) * self.group - 1
        self.head_queries = k.at(self.queries, h * self.rows * self.units * self.s.number_bytes)
        self.scores = self.scratch
        if self.in_step is not None:
            self.scores = k.at(self.scratch, k.select(self.in_step, h * self.rows, k.i64(0)) * score_row(self.s))
        self.head_span = k.at(self.span, self.state_at)

    @contextlib.contextmanager
    def each_head(self) -> Iterator[None]:
        """Loops over all heads of the task."""
        with self.k.range(0, self.a.heads) as h:
            self.take(h)
            yield

    def position(self, r: Value) -> Value:
        """Returns the position of a row's query."""
        return self.item.start + self.place_in_item(r) + self.a.k_start

    def place_in_item(self, r: Value) -> Value:
        """Returns the position of a row's query, counted from the item's first one."""
        return self.place(r, "position") if self.s.resumed else r // self.group

    def place(self, r: Value, name: str) -> Value:
        """Returns a word of a row that goes on from a state (ROW_AT)."""
        return self.k.load(I64, self.k.pointer(self.item.rows), r // self.group * ROW_AT.bytes + ROW_AT.offset(name))

    def query(self, name: str, r: Value) -> Value:
        """Address of a row of q, out or lse."""
        head = self.head * self.group + r % self.group
        if self.s.resumed:
            at = getattr(self.a, name) + self.place(r, name) + head * getattr(self.a, f"{name}_head")
            return self.k.pointer(at)
        return self.k.pointer(self.row_of(name, head, r // self.group))

    def row_limit(self, r: Value) -> Value:
        """Counts the keys that a row sees."""
        return self.limit(self.place_in_item(r))

    def run(self) -> None:
        """Takes all rows through a share of the spans; merges these, or leaves their states to the last task."""
        k, a, blocks = self.k, self.a, self.item.blocks
        if self.s.cached:
            with k.when(a.put.differs(0)):
                call_at(k, a.put, k.pointer(a.new), k.p["number"])
        self.pack()
        last = k.select(self.rows > 0, self.row_limit(k.max(self.rows - 1, k.i64(0))), k.i64(0))
        spans, seen = (last + (SPAN - 1)) // SPAN, self.first_key // SPAN
        first, end = (seen + (spans - seen) * x // blocks for x in (self.share, self.share + 1))
        alone = blocks.equals(1)
        # nothing is merged: what its span leaves is the end
        single = alone & (spans <= 1)
        if self.s.resumed:
            single = single & self.first_key.equals(0) & a.leaves.equals(0)
        self.state, self.spare = k.select(single, self.span, self.total), k.select(single, self.total, self.span)
        self.begin(self.state, self.first_key.differs(0), 0)
        states = self.all_rows * self.state_row  # bytes of what a span leaves
        shared = k.pointer(a.partials + k.p["number"] // blocks * a.partial_bytes)
        if self.visibility is not None and not self.s.resumed:  # spans that are passed by have seen nothing
            with k.when(alone ^ 1), k.range(first, end) as span:
                self.clear(k.at(shared, span * states))
        with self.spans_of_share(first, end, last) as (start, stop):
            with k.when(single ^ 1):
                self.begin(self.span, (start % SPAN).differs(0), 1)
            with k.range(start, stop, TILE) as tile:
                count = k.min(last - tile, k.i64(TILE))
                self.score_together(tile, count)
                with self.each_head():
                    self.trimmed_tile(tile, count)
            is_merged = single ^ 1
            if self.s.resumed:  # an open span is left as it is
                is_merged = is_merged & (a.leaves.equals(0) | (stop % SPAN).equals(0))
            with k.either(alone) as (merge, leave):
                with merge, k.when(is_merged):
                    self.merge(self.span)
                with leave, k.range(0, states, 8) as byte:
                    k.store(k.load(I64, self.span, byte), k.at(shared, start // SPAN * states), byte)
        is_open = k.const(0, I1)
        if self.s.resumed:
            is_open = a.leaves.differs(0) & (last % SPAN).differs(0)
        finished = self.merge_shares(alone, shared, spans, states, is_open)
        with k.when(finished):
            self.end()

    def end(self) -> None:
        """Writes the results of all rows, or leaves their states."""
        k = self.k
        if not self.s.resumed:
            with self.each_head(), k.range(0, self.rows) as r:
                self.finish(r)
            return
        with k.either(self.a.leaves.equals(0)) as (end, leave):
            with end, self.each_head(), k.range(0, self.rows) as r:
                self.finish(r)
            with leave:  # the second is read only where a span is open
                self.move_states(self.total, 0, to_memory=True)
                self.move_states(self.span, 1, to_memory=True)

    @contextlib.contextmanager
    def spans_of_share(self, first: Value, end: Value, last: Value) -> Iterator[tuple[Value, Value]]:
        """Yields spans of keys that any row may see: all, where rows go on from states."""
        k = self.k
        if not self.s.resumed:
            with self.visible_spans(first * SPAN, k.min(end * SPAN, last), self.every_box) as span:
                yield span
            return
        with k.range(first, end) as n:
            yield k.max(n * SPAN, self.first_key), k.min(n * SPAN + SPAN, last)

    def begin(self, states: Value, goes_on: Value, half: int) -> None:
        """Clears the states of all rows, or loads what they have seen: in whole spans (0), or in the open one (1)."""
        k = self.k
        if not self.s.resumed:
            self.clear(states)
            return
        with k.either(goes_on) as (load, clear):
            with load:
                self.move_states(states, half, to_memory=False)
            with clear:
                self.clear(states)

    def move_states(self, states: Value, half: int, *, to_memory: bool) -> None:
        """Moves the states of rows that go on: of whole spans (0), or of the open one (1)."""
        k, s, a = self.k, self.s, self.a
        of_half = half * ((a.state_head - STATE_SUMS) >> 1) + STATE_SUMS

        def move(kind: Any, memory: Value, at: Value | int, state: Value, slot: Value | int) -> None:
            if to_memory:
                k.store(k.load(kind, state, slot), memory, at)
            else:
                k.store(k.load(kind, memory, at), state, slot)

        with self.each_head(), k.range(0, self.rows) as r:
            q_head = self.head * self.group + r % self.group
            memory = k.pointer(a.states + self.place(r, "state") + q_head * a.state_head)
            state = k.at(states, self.state_at + r * self.state_row)
            for n in (0, 1):
                move(s.number, memory, (2 * half + n) * s.number_bytes, state, n * s.number_bytes)
            with k.range(0, self.slots) as slot:
                column = k.min(slot * s.lanes, self.value_dim - s.lanes)
                move(s.vector, k.at(memory, of_half), column * s.number_bytes, state, (slot + 1) * s.vector_bytes)

    def merge_shares(self, alone: Value, shared: Value, spans: Value, states: Value, is_open: Value) -> Value:
        """Returns whether this task ends its heads: it is alone, or comes last, and then merges all spans in order.

        shared: where tasks leave what each span has seen, `states` bytes apart. is_open: the last one is not merged.
        """
        k, blocks = self.k, self.item.blocks
        finished = k.variable(alone)
        with k.when(alone ^ 1):
            counter = k.pointer(self.a.arrived + k.p["number"] // blocks * 8)
            finished.set((k.fetch_add(counter, 0, 1) + 1).equals(blocks))
            with k.when(finished.get()):
                whole = spans - k.zext(is_open, I64)
                with k.range(self.first_key // SPAN, whole) as span:
                    self.merge(k.at(shared, span * states))
                if self.s.resumed:
                    with k.when(is_open), k.range(0, states, 8) as byte:
                        k.store(k.load(I64, shared, whole * states + byte), self.span, byte)
        return finished.get()

    def every_box(self) -> Box:
        """Returns the queries of all heads of the task."""
        last = (self.first_head + self.a.heads) * self.group - 1
        return Box((self.first_head * self.group, last), self.positions)

    def pack(self) -> None:
        """Packs the queries of all heads, by units."""
        k, a = self.k, self.a
        with self.each_head(), k.range(0, self.rows) as r:
            query = k.at(self.head_queries, r * self.units * self.s.number_bytes)
            k.call(self.parts.pack, query, self.query("q", r), a.head_dim, self.units, a.q_column, a.flip)

    def clear(self, states: Value) -> None:
        """Clears the state of every row of every head."""
        with self.k.range(0, self.all_rows) as r:
            clear_row(self.k, self.s, self.k.at(states, r * self.state_row), self.slots)

    def merge(self, states: Value) -> None:
        """Merges what a span has seen into the totals of all heads."""
        k = self.k
        with k.range(0, self.all_rows) as r:
            k.call(self.parts.merge, k.at(self.total, r * self.state_row), k.at(states, r * self.state_row), self.slots)

    def finish(self, r: Value) -> None:
        """Joins a sink last, then writes the row."""
        k, s, a = self.k, self.s, self.a
        state = k.at(self.state, self.state_at + r * self.state_row)
        with k.when(a.sinks.differs(0) & (self.item.index >= 0)):
            clear_row(k, s, self.spare, self.slots)
            head = self.head * self.group + r % self.group
            k.store(k.load(s.number, k.pointer(a.sinks), head * s.number_bytes), self.spare)
            k.store(k.const(SINK_SUM, s.number), self.spare, s.number_bytes)
            k.call(self.parts.merge, state, self.spare, self.slots)
        out, lse = self.query("out", r), self.query("lse", r)
        k.call(self.parts.store, state, out, lse, self.value_dim, self.slots, a.out_column, a.lse, *self.divisor())

    # --- one tile

    def score_together(self, start: Value, count: Value) -> None:
        """Scores all heads of the task at once, where that is worth it."""
        k, a = self.k, self.a
        if self.in_step is None:
            return
        with k.when(self.in_step):
            self.take(k.i64(0))
            self.locate(self.k_places, "k", start, count)
            arguments = (self.queries, self.k_places, a.k_row, count, self.units, self.all_rows, a.head_dim)
            k.call(self.parts.score_heads, self.scratch, *arguments, a.k_head, self.rows)

    def trimmed_tile(self, start: Value, count: Value) -> None:
        """Takes the rows of a head through what a mask shows of a tile."""
        k = self.k
        if self.visibility is None:
            self.tile(start, count, count)
            return
        first, end, clear = self.extent_of(Box(self.heads, self.positions), start, count)
        begin = self.s.first_of_units(first)  # what comes before the first is hidden
        clear = k.select((clear > first) & begin.equals(first), clear - first, k.i64(0))
        with k.when(first < end):
            self.tile(start + begin, end - begin, clear)

    def tile(self, start: Value, count: Value, clear: Value) -> None:
        """Keys of one tile. The mask hides nothing below `clear`; `causal` still may."""
        k, parts, a = self.k, self.parts, self.a
        with contextlib.nullcontext() if self.in_step is None else k.when(self.in_step ^ 1):
            self.locate(self.k_places, "k", start, count)
            arguments = (self.head_queries, self.k_places, a.k_row, count, self.units, self.rows, a.head_dim)
            k.call(parts.score, self.scratch, *arguments)
            if parts.scale_scores is not None:
                scales = self.scales_of("k", self.k_places, start, count)
                k.call(parts.scale_scores, self.scratch, scales, count, self.rows)
        self.add_tile(start, count, clear, self.locate(self.v_places, "v", start, count))

    def add_tile(self, start: Value, count: Value, clear: Value, regular: Value) -> None:
        """Adds the values of a tile that has been scored; regular: whether they are at one distance."""
        k, s, parts = self.k, self.s, self.parts
        joint = self.weigh(start, count, clear)
        k.call(parts.add_up, self.scores, self.sums, self.rows, s.count_weights(count))
        self.drop(start, count)
        if parts.rescale is not None:
            first, scales = k.i64(0), self.scales_of("v", self.v_places, start, count)
            with k.range(0, self.count_scales()) as n:
                to, at = k.at(self.scaled_weights(first), n * self.scaled_row), n * (BLOCK * s.scale_bytes)
                k.call(parts.rescale, self.weights(first), to, scales, count, at, self.rows)
        self.begin_sums()
        shared = product_of(s).joint_steps(k, s.unit_of(joint), s.count_units(count))
        self.add_values(shared, regular)
        with k.range(0, self.rows) as r:
            end = s.count_units(k.load(I64, self.limits, r * 8))
            with k.when(shared < end):
                k.call(parts.careful, *self.value_arguments(r, shared, end, regular), count - 1)
            self.accumulate(r)

    def scales_of(self, name: str, places: Value, start: Value, count: Value) -> Value:
        """Returns where the scales of a tile's keys ("k"), or values ("v"), are: in the blocks at `places`, or in a
        list that is made of those in arrays.
        """
        if not self.s.lists_scales:
            return places
        to = self.part("scales")
        self.list_scales(self.parts.stage_scales, name, self.head, (self.k_places, to), start, start + count)
        return to

    def locate(self, places: Value, name: str, start: Value, count: Value) -> Value:
        """Finds the addresses of a tile's keys or values, whether they are at one distance; and of what comes next, to
        be fetched ahead.

        What comes next is the tile of the task's next head, or its first head's next tile.
        """
        k, a, piece = self.k, self.a, self.s.piece
        base, head, page_bytes, row = (
            (self.keys, a.k_head, a.k_page, a.k_row) if name == "k" else (self.values, a.v_head, a.v_page, a.v_row)
        )
        more = (self.h + 1) < a.heads
        next_base = k.at(base, k.select(more, head, -(self.h * head)))
        next_start = k.select(more, start, start + TILE)
        ahead = (self.s.fetching.cache_blocks if self.s.cached else 2) * BLOCK
        next_end = k.min(next_start + ahead, self.item.k_len)
        pages, locate = k.pointer(self.item.pages), self.parts.locate
        regular = k.call(locate, k.p["a"], places, pages, base, page_bytes, row, start, start + count)
        past = k.at(places, (count + (piece - 1)) // piece * 8)
        fetched = count.equals(TILE) | (self.rows > 1)
        with k.when(fetched) if self.s.cached and not self.s.fetches_alone else contextlib.nullcontext():
            k.call(locate, k.p["a"], past, pages, next_base, page_bytes, row, next_start, next_end)
        return k.select(a.heads.equals(1), regular, k.i64(0))  # else what comes next is elsewhere

    def weights(self, r: Value) -> Value:
        """Returns where a row's scores, and then weights, lie."""
        return self.k.at(self.scores, r * score_row(self.s))

    def count_scales(self) -> Value:
        """Counts the scales of a value."""
        return self.s.count_scales(self.value_dim) if self.s.scale_block else self.k.i64(1)

    @property
    def scaled_row(self) -> Value:
        """Returns the bytes from all rows' weights times a scale of values to those times the next."""
        return self.rows * score_row(self.s)

    def scaled_weights(self, r: Value) -> Value:
        """Returns where a row's weights lie that multiply values: of codes times their scales."""
        if not self.s.scale_block:
            return self.weights(r)
        return self.k.at(self.part("scaled"), r * score_row(self.s))

    def weigh(self, start: Value, count: Value, clear: Value) -> Value:
        """Makes weights of every row's scores; returns how many keys all rows see."""
        k, parts, a = self.k, self.parts, self.a
        joint = k.variable(count)
        self.count(k.max(k.min(self.row_limit(k.i64(0)) - start, clear), k.i64(0)), count)
        c = self.scale()
        with k.range(0, self.rows) as r:
            limit = self.tile_limit(r, start, count)
            k.store(limit, self.limits, r * 8)
            row, state = self.weights(r), k.at(self.head_span, r * self.state_row)
            if parts.expression is not None:
                q_head = self.head * self.group + r % self.group
                first, *slots = self.places_of_keys(start)
                where = (first, count, limit, clear, self.item.index, q_head, self.position(r), *slots)
                k.call(parts.expression, k.p["a"], self.scratch, row, *where)
            ahead = r * (64 * TILE) + self.s.fetching.cache_bytes
            alpha = k.at(self.alpha, r * 8)
            gone = k.call(parts.weigh, row, state, alpha, limit, count, c, self.v_places, a.v_row, ahead)
            joint.set(k.min(k.select(gone.equals(0), limit, k.i64(0)), joint.get()))
        return joint.get()

    def places_of_keys(self, start: Value) -> list[Value]:
        """Returns the position of a tile's first key."""
        return [start + self.a.k_start]

    def tile_limit(self, r: Value, start: Value, count: Value) -> Value:
        """Counts the keys of a tile that a row sees."""
        k = self.k
        return k.max(k.min(self.row_limit(r) - start, count), k.i64(0))

    def drop(self, start: Value, count: Value) -> None:
        """Drops weights of every row."""
        k, a, drop = self.k, self.a, self.parts.drop
        if drop is None:
            return
        with k.range(0, self.rows) as r:
            q_head = self.head * self.group + r % self.group
            where = (start + a.k_start, count, self.item.index, q_head, self.position(r))
            k.call(drop, self.weights(r), *where, a.seed, a.drop_below)

    def begin_sums(self) -> None:
        """Updates running sums; what the tile's sums of values start from is a zero of the sign of its weights' sum."""
        k, s = self.k, self.s
        with k.range(0, self.rows) as r:
            total, begin = k.load(s.number, self.sums, r * 8), self.begin_of(r)
            with k.range(0, self.slots) as slot:
                k.store(begin, self.tile_sums, (r * self.slots + slot) * s.vector_bytes)
            at = k.at(self.head_span, r * self.state_row)
            alpha, running_sum = k.load(s.number, self.alpha, r * 8), k.load(s.number, at, s.number_bytes)
            k.store(k.fma(running_sum, alpha, total), at, s.number_bytes)

    def begin_of(self, r: Value) -> Value:
        """Returns what a row's sums of values start from: -0 where it sees nothing, else +0."""
        k, s = self.k, self.s
        sign = k.const(-(1 << (63 if s.wide else 31)), s.integer)
        total = k.load(s.number, self.sums, r * 8)
        return k.splat((total.bits(s.integer) & sign).bits(s.number), s.lanes)

    def add_values(self, shared: Value, regular: Value) -> None:
        """Adds the values of `shared` steps, which all rows see, for as many rows at once as there are registers."""
        k = self.k
        with k.range(0, shared, STEPS_TOGETHER) as first:
            end = k.min(first + STEPS_TOGETHER, shared)
            done = k.i64(0)
            for rows, least, function in self.parts.values:
                many = k.select(self.rows >= least, (self.rows - done) // rows * rows, k.i64(0))
                with k.range(done, done + many, rows) as r:
                    k.call(function, *self.value_arguments(r, first, end, regular))
                done = done + many

    def value_arguments(self, r: Value, first: Value, end: Value, regular: Value) -> tuple[Value, ...]:
        row = self.slots * self.s.vector_bytes
        sums = self.k.at(self.tile_sums, r * row)
        places = (self.v_places, self.a.v_row)
        weights = self.scaled_weights(r)
        return sums, row, weights, *places, first, end, self.value_dim, self.slots, regular, self.scaled_row

    def accumulate(self, r: Value) -> None:
        """Makes the accumulator accumulator · alpha + the tile's sums."""
        k, s = self.k, self.s
        alpha, begin = k.splat(k.load(s.number, self.alpha, r * 8), s.lanes), self.begin_of(r)
        with k.range(0, self.slots) as slot:
            at = k.at(self.head_span, r * self.state_row + (slot + 1) * s.vector_bytes)
            x = k.load(s.vector, self.tile_sums, (r * self.slots + slot) * s.vector_bytes)
            x = product_of(s).settle(k, x, begin)
            k.store(k.fma(k.load(s.vector, at), alpha, x), at)


class _ChosenTask(_Task):
    """All rows of some queries of a kv head, each of which sees the keys of a list.

    The queries go through a span one after another, so that its keys are in the caches for all but the first. A query's
    keys of several tiles are scored at once, then weighed and added tile by tile.
    """

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts)
        a = self.a
        self.choice = Choice(self, parts.slots)
        self.first_query = self.k.p["number"] % self.groups_of_queries() * a.queries
        self.queries_here = k.min(a.item_count - self.first_query, a.queries)
        self.places_of_values = self.v_places
        self.walks = self.part("walks")
        self.joint_scores = self.part("joint")

    def groups_of_queries(self) -> Value:
        return (self.a.item_count + (self.a.queries - 1)) // self.a.queries

    def item_of(self, number: Value) -> Any:
        return self.query_of(number % self.groups_of_queries() * self.a.queries)

    def query_of(self, number: Value) -> Any:
        """Loads the item of a query."""
        at = self.k.at(self.k.pointer(self.a.items), number * ITEM_BYTES)
        return Item._make(self.k.load(I64, at, 8 * word) for word in ITEM)

    def head_of_ticket(self) -> tuple[Value, Value]:
        return self.k.p["number"] // self.groups_of_queries(), self.k.i64(0)

    @contextlib.contextmanager
    def each_query(self) -> Iterator[Value]:
        """Loops over the task's queries; yields the words of each one's walk (WALK)."""
        k, s = self.k, self.s
        with k.range(0, self.queries_here) as n:
            self.item = self.query_of(self.first_query + n)
            self.take(k.i64(0))
            self.state_at = n * (self.rows * self.state_row)
            self.head_queries = k.at(self.queries, n * (self.rows * self.units * s.number_bytes))
            self.head_span = k.at(self.span, self.state_at)
            yield k.at(self.walks, n * WALK.bytes)

    def run(self) -> None:
        """Takes all queries through the spans in which any has a chosen key."""
        k, s, a = self.k, self.s, self.a
        self.choice.clear_zeros(self.value_dim * s.key_bytes)
        self.state, self.spare = self.total, self.span
        following = k.variable(k.i64(ENDLESS))
        with self.each_query() as walk:
            with k.range(0, self.rows) as r:
                query = k.at(self.head_queries, r * self.units * s.number_bytes)
                k.call(self.parts.pack, query, self.query("q", r), a.head_dim, self.units, a.q_column, a.flip)
                clear_row(k, s, k.at(self.total, self.state_at + r * self.state_row), self.slots)
            lists = self.item.chosen + self.head * a.chosen_head
            k.store(lists, walk, WALK.offset("next"))
            following.set(k.min(following.get(), self.next_key(lists)))
        with k.forever() as leave_if:
            first = following.get()
            leave_if(first >= ENDLESS)
            following.set(k.i64(ENDLESS))
            with self.each_query() as walk:
                at = k.variable(k.load(I64, walk, WALK.offset("next")))
                end = k.min((first & -SPAN) + SPAN, self.row_limit(k.i64(0)))
                with k.when(self.next_key(at.get()) < end):
                    with k.range(0, self.rows) as r:
                        clear_row(k, s, k.at(self.head_span, r * self.state_row), self.slots)
                    self.take_span(at, end)
                    with k.range(0, self.rows) as r:
                        total = k.at(self.total, self.state_at + r * self.state_row)
                        k.call(self.parts.merge, total, k.at(self.head_span, r * self.state_row), self.slots)
                    k.store(at.get(), walk, WALK.offset("next"))
                following.set(k.min(following.get(), self.next_key(at.get())))
        with self.each_query(), k.range(0, self.rows) as r:
            self.finish(r)

    def next_key(self, at: Value) -> Value:
        """Returns the number of a query's next key, ENDLESS if it sees no more."""
        k, key = self.k, self.choice.key_at(at)
        return k.select(key < self.row_limit(k.i64(0)), key, k.i64(ENDLESS))

    def take_span(self, at: Variable, end: Value) -> None:
        """Takes the rows of a query through its keys below `end`, of one span, as many tiles at once as have slots."""
        k, s, a, choice = self.k, self.s, self.a, self.choice
        with k.forever() as leave_if:
            leave_if(self.next_key(at.get()) >= end)
            tiles, slots, keys = choice.fill(at, end)
            choice.locate(self.k_places, False, self.keys, a.k_page, a.k_row, keys, choice.keys)
            arguments = (self.head_queries, self.k_places, a.k_row, keys, self.units, self.rows, a.head_dim)
            k.call(self.parts.score, self.joint_scores, *arguments)
            places = self.places_of_values
            choice.locate(places, True, self.values, a.v_page, a.v_row, slots, choice.base)
            first_key = k.variable(k.i64(0))
            with choice.each_tile(tiles) as (first, count):
                self.spread_scores(first_key, first, count)
                choice.begin(first)
                self.v_places = k.at(self.places_of_values, first * 8)
                self.add_tile(k.i64(0), count, k.i64(0) if s.is_masked else count, k.i64(0))

    def spread_scores(self, first_key: Variable, first: Value, count: Value) -> None:
        """Copies the scores of a tile's slots; an absent key scores as its partner does."""
        k, s = self.k, self.s
        if self.choice.unit == 1:
            with k.range(0, self.rows) as r, k.range(0, count, s.lanes) as j:
                x = k.load(s.vector, self.joint_scores, r * score_row(s) + (first + j) * s.number_bytes)
                k.store(x, self.scratch, r * score_row(s) + j * s.number_bytes)
            return
        with self.choice.each_slot(first_key, first, count) as (key, slot), k.range(0, self.rows) as r:
            x = k.load(s.number, self.joint_scores, r * score_row(s) + key * s.number_bytes)
            k.store(x, self.scratch, r * score_row(s) + slot * s.number_bytes)

    def tile_limit(self, r: Value, start: Value, count: Value) -> Value:
        return count

    def places_of_keys(self, start: Value) -> list[Value]:
        """Returns the position of the first of all keys, and the slots."""
        return [self.a.k_start, self.choice.slots]

    def weigh(self, start: Value, count: Value, clear: Value) -> Value:
        """Makes weights of every row's scores; those of absent keys become zeros of their partners' signs."""
        k, joint = self.k, super().weigh(start, count, clear)
        if self.choice.unit > 1:
            kind = I16 if self.s.weight_elements > 1 else self.s.integer
            size, sign = (2, -0x8000) if kind is I16 else (self.s.number_bytes, -(1 << 31))
            with self.choice.each_absent(count) as (slot, partner), k.range(0, self.rows) as r:
                row = self.weights(r)
                k.store(k.load(kind, row, partner * size) & sign, row, slot * size)
        return joint
