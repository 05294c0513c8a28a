"""The backward kernel: one task is a block of queries of one head against a range of keys.

    task: wait for its turn; pack the block's panels of Q and dO; for every tile of keys, for every panel: S, dP, P, dS,
          then dQ, dV and dK; add the block's share of dK and dV to the sums; at the end dQ

Tasks form a wavefront. (step, range) follows (step, range - 1), whose share of dQ comes first, and (step - 1, range),
whose share of dK and dV does; `progress` counts the steps that are done in each range. Tickets are numbered along
diagonals, so whatever is waited for has a smaller one and somebody works on it. No sum is shared between threads.

Of a part of the keys, what comes out is added to what dQ, dK and dV have, before the scale of scores.

Gradients of a table are added here, too, where no two positions or keys read the same entry. Where heads do, `skew` is
not 0: each follows the head before, so many diagonals later.
"""

from __future__ import annotations

from ...problem.problem import TILE
from ..language.vector import I1, I64, Function, Module, Value, Variable
from ..memory.records import GANG, GRADIENT_ITEM_BYTES, QUERY_ENDS, SUMS, GradientItem, apart, together
from ..memory.shape import Shape
from ..memory.words import Words
from ..products.outer_gradients import into_keys, into_queries
from ..products.product import outer_product_of
from .gradient_blocks import PairParts, PairWork
from .gradient_rows import add_partial, clear, load_panel, store_panel
from .panels import Panel, Tile
from .score_backward import find_sums
from .task import attention_module


class _Parts(PairParts):
    """The functions of one backward module."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, "backward")
        m, product = self.module, outer_product_of(s)
        self.clear, self.add = clear(m, s), add_partial(m, s)
        self.into_queries = [into_queries(product, m, predicated=x) for x in (False, True)]
        self.into_keys = {n: into_keys(product, m, rows, n) for rows, n in s.tiles.gradients}
        self.into_keys_exactly = into_keys(product, m, 2, 1, exactly=True)
        self.into_keys_predicated = into_keys(product, m, 2, 1, predicated=True)
        self.load_panel = load_panel(m, s)
        self.store_sums = store_panel(m, s, s.sums)
        self.store_rows = store_panel(m, s, s.storage) if s.narrows_gradients else self.store_sums


def backward_module(s: Shape, symbol: str) -> Module:
    """Writes the kernel for one shape; `symbol` is the region's public name."""
    return attention_module(_Parts(s), _Task, symbol)


class _Task(PairWork):
    """One block of queries of one head, and one range of keys."""

    def _find_item(self) -> GradientItem:
        """Finds the gang, kv head, step and range of the ticket."""
        k, a = self.k, self.a
        at = self.row_of_ticket(k.pointer(a.gangs), a.gang_count, GANG.bytes, GANG.offset("first"), k.p["number"])
        gang = {name: k.load(I64, at, GANG.offset(name)) for name in GANG.names}
        local, width = k.p["number"] - gang["first"], gang["columns"] * gang["ranges"]
        diagonal, rest = local // width, local % width
        column, self.ranges = gang["column"] + rest // gang["ranges"], gang["ranges"]
        self.range = rest % self.ranges
        self.step = diagonal - self.range - rest // self.ranges * a.skew
        self.is_first = column.equals(0)
        self.head = column % a.kv_heads
        self.progress = k.at(k.pointer(a.progress), (gang["progress"] + rest) * 8)
        at = k.at(k.pointer(a.items), column // a.kv_heads * GRADIENT_ITEM_BYTES)
        return GradientItem._make(k.load(I64, at, 8 * word) for word in range(len(GradientItem._fields)))

    def __init__(self, k: Function, parts: _Parts) -> None:
        super().__init__(k, parts)
        weights = ("p_units", "ds_units") if self.s.elements > 1 else ("scores", "d_scores")
        self.sums = [_Sums(self, *names) for names in zip(("v", "k"), ("d_out", "q"), weights, strict=True)]
        self.entries = None if parts.entries is None else find_sums(k, self.a, self.s.program)

    def run(self) -> None:
        k, item = self.k, self.item
        with k.when((self.step >= 0) & (self.step < item.steps) & (self.range < item.ranges)):
            self.wait(self.step)
            self.work()
            k.fetch_add(self.progress, 0, 1)

    def has_come(self, turn: Value) -> Value:
        """Returns whether the step before is done in this range, and this step in the range before. Where heads add to
        the same entries of a table, the head before has done so at these positions, in this range.
        """
        k, a = self.k, self.a
        before = k.select(self.range > 0, k.at(self.progress, -8), self.progress)
        wanted = k.select(self.range > 0, turn + 1, k.i64(0))
        come = super().has_come(turn) & (self.done_at(before) >= wanted)
        if self.entries is None:
            return come
        free = a.skew.equals(0) | self.is_first | (turn % a.group).differs(0)
        column = k.select(free, self.progress, k.at(self.progress, self.ranges * -8))
        return come & (self.done_at(column) >= k.select(free, k.i64(0), turn + a.group))

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

    # --- panels

    def begin(self, panel: Panel) -> None:
        """Rows of Q and dO are copied, and dQ is what earlier ranges have left."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        row, first, end, dq = self.row + panel.i * s.panel, panel.word("first"), panel.word("end"), panel.part("dq")
        with k.when(first < end):
            for name, length, columns in (("q", a.head_dim, a.columns), ("d_out", a.value_dim, a.value_columns)):
                source = k.pointer(self.row_of(name, self.q_head, row))
                steps = (apart(columns * s.number_bytes), getattr(a, f"{name}_row"), getattr(a, f"{name}_column"))
                k.call(parts.stage_across, panel.part(f"{name}_rows"), source, *steps, first, end, length, columns)
            with k.either(self.range.equals(0) & k.const(int(not s.partial), I1)) as (fresh, more):
                with fresh:
                    k.call(parts.clear, dq, a.head_dim * s.vectors)
                with more:
                    source = k.pointer(self.row_of("sq", self.q_head, row))
                    k.call(parts.load_panel, dq, source, a.sq_row, first, end, a.head_dim)

    def finish(self, panel: Panel) -> None:
        """Stores dQ in its sums, or in the caller's array."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        row, first, end = self.row + panel.i * s.panel, panel.word("first"), panel.word("end")
        end_of_keys = (self.range + 1).equals(self.item.ranges) & k.const(int(not s.partial), I1)
        with k.when(first < end), k.either(end_of_keys) as (last, more):
            with last:
                target = k.pointer(self.row_of("dq", self.q_head, row))
                k.call(parts.store_rows, panel.part("dq"), target, a.dq_row, first, end, a.head_dim, self.factor())
            with more:
                target, one = k.pointer(self.row_of("sq", self.q_head, row)), k.const(1.0, s.number)
                k.call(parts.store_sums, panel.part("dq"), target, a.sq_row, first, end, a.head_dim, one)

    # --- tiles

    def tile(self, start: Value, count: Value, most: Value) -> None:
        """Takes all panels that see any of it through a tile of keys; adds its share of dK and dV."""
        k, s, a = self.k, self.s, self.a
        whole = k.const(int(not s.partial), I1)
        fresh, end = self.step.equals(0) & whole, (self.step + 1).equals(self.item.steps) & whole
        seen = self.sees(start, count, most)
        with k.when(seen | fresh | end):
            for sums in self.sums:
                sums.begin(start, fresh, end)
            begun, joined = k.variable(k.i64(0)), k.variable(k.i64(0))
            with k.when(seen):
                if s.elements > 1:
                    steps = (a.head_dim * s.number_bytes, a.k_row, a.k_column, k.i64(0), count, a.head_dim, a.head_dim)
                    k.call(self.parts.stage_across, self.part("key_units"), k.at(self.keys, start * a.k_row), *steps)
                tile, n, joins = self.stage_tile(start, count), together(s.panel), self.may_join(count, end)
                with k.range(0, a.panels, n) as first:
                    with k.range(first, first + n) as i:
                        self.weigh_panel(Panel(self, i), tile)
                    joined.set(k.zext(joins & (first + n).equals(a.panels), I64))
                    self.gather(first, count, begun, joined)
            with k.when(joined.get().equals(0)):
                self.clear(count, begun)
                for sums in self.sums:
                    sums.add(count)

    def may_join(self, count: Value, end: Value) -> Value:
        """Returns whether what a tile adds may go where it belongs without a stop: whole register tiles, as numbers."""
        a, s = self.a, self.s
        whole = a.columns.equals(a.head_dim) & a.value_columns.equals(a.value_dim)
        whole = whole & (count % s.tiles.gradients[0][0]).equals(0)
        return whole & (end ^ 1) if s.narrows_gradients else whole

    def weigh_panel(self, panel: Panel, tile: Tile) -> None:
        """Makes P and dS of a tile for one panel, and its share of dQ."""
        k = self.k
        for name in ("key_first", "key_end", "careful"):
            k.store(k.i64(0), panel.at, QUERY_ENDS.offset(name))
        self.if_seen(panel, tile, self.panel_tile)

    def panel_tile(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> None:
        """Keys [first, end) of a tile for one panel: P and dS, then its share of dQ."""
        k, s, parts, a = self.k, self.s, self.parts, self.a
        careful, count = self.weigh(panel, tile, first, end, clear), end - first
        if self.entries is not None:
            self.add_to_entries(panel, tile.start + first, count, self.entries)
        for name, x in (("key_first", first), ("key_end", end), ("careful", k.zext(careful, I64))):
            k.store(x, panel.at, QUERY_ENDS.offset(name))
        keys, key_row = k.at(tile.keys, first * tile.k_row), tile.k_row
        if s.elements > 1:
            key_row = a.head_dim * s.number_bytes
            keys = k.at(self.part("key_units"), s.count_units(first) * key_row)
        d_scores = panel.pairs("d_score_units" if s.elements > 1 else "d_scores")
        dq = (panel.part("dq"), d_scores, keys, key_row, count, a.head_dim, panel.pairs("scores"))
        with k.either(careful) as (predicated, plain):
            with predicated:
                k.call(parts.into_queries[1], *dq)
            with plain:
                k.call(parts.into_queries[0], *dq)

    # --- dK and dV

    def gather(self, first: Value, count: Value, begun: Variable, joined: Variable) -> None:
        """Adds to dK and dV what panels that are taken together have: at once where each sees the whole tile, else one
        after another. `joined` is what to do with it, and what was done.
        """
        k, n = self.k, together(self.s.panel)
        whole, some = k.variable(k.const(1, I1)), k.variable(k.const(0, I1))
        with k.range(first, first + n) as i:
            panel = Panel(self, i)
            low, high, careful = (panel.word(x) for x in ("key_first", "key_end", "careful"))
            some.set(some.get() | (low < high))
            empty = panel.word("first").equals(panel.word("end"))
            whole.set(whole.get() & ((low.equals(0) & high.equals(count) & careful.equals(0)) | empty))
        whole = whole.get() & some.get()
        with k.either(whole) as (at_once, in_turn):
            with at_once:
                for sums in self.sums:
                    sums.of_panels(Panel(self, first), n, k.i64(0), k.i64(0), count)
                    sums.whole(begun.get().equals(0), joined.get())
                begun.set(k.i64(1))
            with in_turn:
                joined.set(k.i64(0))
                with k.when(some.get()):
                    self.clear(count, begun)
                    with k.range(first, first + n) as i:
                        panel = Panel(self, i)
                        for sums in self.sums:
                            sums.of_panel(panel)

    def clear(self, count: Value, begun: Variable) -> None:
        """Sums of a tile begin, where they have not."""
        k = self.k
        with k.when(begun.get().equals(0)):
            for sums in self.sums:
                k.call(self.parts.clear, sums.partial, count * sums.row // self.s.vector_bytes)
        begun.set(k.i64(1))


class _Sums:
    """Sums that a block of queries adds to dK or dV of a tile of keys: their record in memory, and who adds."""

    def __init__(self, task: _Task, name: str, rows: str, weights: str) -> None:
        """`name`: "k" or "v". `rows`: "q" or "d_out". `weights`: of PAIRS."""
        a = task.a
        self.task, self.k, self.s, self.name, self.rows, self.weights = task, task.k, task.s, name, rows, weights
        self.length, self.columns = (a.head_dim, a.columns) if name == "k" else (a.value_dim, a.value_columns)
        self.at, self.partial = self.k.buffer(I64, len(SUMS.names)), task.part(f"d{name}")
        self.row = apart(self.columns * self.s.number_bytes)
        self.put(row=self.row, pair_bytes=a.pair_bytes, panel_bytes=a.panel_bytes)

    def put(self, **words: Value) -> None:
        for name, x in words.items():
            self.k.store(x, self.at, SUMS.offset(name))

    def begin(self, start: Value, fresh: Value, end: Value) -> None:
        """Begins a tile of keys, from `start` on. fresh, end: of the first block of queries, and of the last."""
        k, a, name = self.k, self.task.a, self.name
        total, out = (self.task.row_of(f"{x}{name}", self.task.head, start) for x in "sd")
        self.put(total=total, out=out, total_row=getattr(a, f"s{name}_row"), out_row=getattr(a, f"d{name}_row"))
        self.put(fresh=k.zext(fresh, I64), end=k.zext(end, I64), factor=self.factor())

    def factor(self) -> Value:
        return self.task.factor() if self.name == "k" else self.k.const(1.0, self.s.number)

    def of_panels(self, panel: Panel, panels: int, key: Value, skip: Value, count: Value) -> None:
        """Sets so many panels from this one on, which see a tile from `key` on; keys [skip, skip + count) of those."""
        k, s = self.k, self.s
        self.put(
            rows=panel.part(f"{self.rows}_rows"),
            partial=k.at(self.partial, (key + skip) * self.row),
            weights=k.at(panel.pairs(self.weights), skip * (s.row_bytes // s.elements)),
            marks=k.at(panel.pairs("scores"), skip * s.row_bytes),
            panel=panel.at,
            panels=k.i64(panels),
            keys=count,
        )

    def whole(self, begin: Value, join: Value) -> None:
        """Adds all columns: the widest register tile as often as it fits, then those of two vectors, or one.

        begin: from +0. join: with the totals, or what is returned, and not with partial sums.
        """
        k, functions, vectors = self.k, self.task.parts.into_keys, self.columns // self.s.lanes
        self.put(begin=k.zext(begin, I64), join=join)
        widest = max(functions)
        rest = vectors % widest
        rest = k.select(rest.equals(1) & (vectors > widest), rest + widest, rest)  # 2 + 2 rather than 3 + 1
        most, pairs = vectors - rest, rest & -2
        for n, first, end in ((widest, k.i64(0), most), (2, most, most + pairs), (1, most + pairs, vectors)):
            with k.range(first, end, n) as v:
                k.call(functions[n], self.at, v * self.s.vector_bytes)

    def of_panel(self, panel: Panel) -> None:
        """Adds what one panel has for the keys that it sees to partial sums."""
        k, parts, none = self.k, self.task.parts, self.k.i64(0)
        first, end = panel.word("key_first"), panel.word("key_end")
        with k.when(first < end):
            careful, count = panel.word("careful").differs(0), end - first
            whole = k.select(careful, none, count - count % self.s.tiles.gradients[0][0])
            self.of_panels(panel, 1, first, none, whole)
            self.whole(k.const(0, I1), none)
            self.of_panels(panel, 1, first, whole, count - whole)
            with k.either(careful) as (predicated, plain):
                for branch, function in ((predicated, parts.into_keys_predicated), (plain, parts.into_keys_exactly)):
                    with branch, k.range(0, self.columns, self.s.lanes) as c:
                        k.call(function, self.at, c * self.s.number_bytes)

    def add(self, count: Value) -> None:
        """Joins the tile's partial sums to those of the blocks before."""
        k, x = self.k, Words(self.k, SUMS, self.at)
        steps = (self.row, x.total_row, x.out_row, count, self.length, x.fresh, x.end)
        k.call(self.task.parts.add, self.partial, k.pointer(x.total), k.pointer(x.out), *steps, self.factor())
