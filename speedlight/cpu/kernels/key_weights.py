"""The kernel that reduces weights over queries: a task is some blocks of queries of a kv head against a range of keys.

    task: wait for its turn; for each block of queries: pack its panels; for every tile of keys, for every panel: S, P,
          then the sums, or the largest weights, of the tile; join them to those of the blocks before

Tasks of the same keys follow each other: `progress` counts those that are done. So sums have the order that dV has.
Where rows of weights are asked for, P is stored, and queries that nobody asks for see nothing.
"""

from __future__ import annotations

from typing import Any

from ...problem.problem import TILE
from ..language.functions import like
from ..language.prototypes import prototype
from ..language.vector import I64, Function, Module, Value
from ..memory.records import REDUCTIONS, WEIGHT_ITEM_BYTES, WEIGHT_STEPS, WeightItem
from ..memory.shape import Shape
from ..products.product import outer_product_of
from .panels import Panel, Tile
from .task import attention_module
from .weight_blocks import BlockWork, WeightParts

_MAXIMUM, _ROWS = (REDUCTIONS.index(x) for x in ("max", "rows"))


class _Parts(WeightParts):
    """The functions of one module."""

    def __init__(self, s: Shape) -> None:
        super().__init__(s, "weights")
        m = self.module
        self.add, self.find_largest = add_panel(m, s), largest_of_panel(m, s)
        self.join_sums, self.join_largest = join(m, s, largest=False), join(m, s, largest=True)
        self.store = store_row(m, s)


def weights_module(s: Shape, symbol: str) -> Module:
    """Writes the kernel for one shape; `symbol` is the region's public name."""
    return attention_module(_Parts(s), _Task, symbol)


class _Task(BlockWork):
    """Some steps of a kv head, and one range of keys."""

    def _find_item(self) -> WeightItem:
        """Finds the kv head, steps and range of the ticket."""
        k, a, number = self.k, self.a, self.k.p["number"]
        all_ranges = a.columns * a.ranges
        local = number % all_ranges
        self.turn, self.range = number // all_ranges, local % a.ranges
        column = local // a.ranges
        self.head = column % a.kv_heads
        self.progress = k.at(k.pointer(a.progress), local * 8)
        at = k.at(k.pointer(a.items), column // a.kv_heads * WEIGHT_ITEM_BYTES)
        return WeightItem._make(k.load(I64, at, 8 * word) for word in range(len(WeightItem._fields)))

    def run(self) -> None:
        k, a, item = self.k, self.a, self.item
        first, step = self.range * a.range_keys, self.turn * WEIGHT_STEPS
        with k.when((step < item.steps) & (first < item.k_len)):
            self.wait(self.turn)
            with k.range(step, k.min(step + WEIGHT_STEPS, item.steps)) as one:
                self.enter(one)
                self.take_block(first, k.min(first + a.range_keys, item.k_len))
            k.fetch_add(self.progress, 0, 1)

    def take_block(self, first: Value, last: Value) -> None:
        """Takes a block of queries through the keys [first, last)."""
        k = self.k
        with k.when(self.sees_range(first, last)):
            most = self.pack_all()
            with k.range(first, k.min(last, most), TILE) as start:
                count = k.min(last - start, k.i64(TILE))
                with k.when(self.sees(start, count, most)):
                    self.take_tile(start, count)

    def take_tile(self, start: Value, count: Value) -> None:
        """Takes all panels that see any of a tile through it; joins its weights to those of the blocks before."""
        k, s, a, partial = self.k, self.s, self.a, self.part("partial")
        keys = self.stage("k", "keys", self.keys, a.head_dim, start, count)
        with k.range(0, TILE + s.lanes, s.lanes) as j:
            k.store(k.const(0.0, s.vector), partial, j * s.number_bytes)
        tile = Tile(start, count, *keys, *keys)  # there are no values
        with k.range(0, a.panels) as i:
            self.if_seen(Panel(self, i), tile, self.panel_tile)
        total = k.at(k.pointer(self.results_at()), start * s.number_bytes)
        with k.when(a.reduction.differs(_ROWS)), k.either(a.reduction.equals(_MAXIMUM)) as (largest, sums):
            with largest:
                k.call(self.parts.join_largest, total, partial, count)
            with sums:
                k.call(self.parts.join_sums, total, partial, count)

    def results_at(self) -> Value:
        """Returns the address of the results of a head."""
        a = self.a
        return a.out + self.item.out_at + self.q_head * a.out_head

    def find_rows(self, position: Value) -> tuple[dict[str, Value], Value]:
        """Returns where the rows of a query lie, and whether it counts: where rows are asked for, if this one is."""
        k, a = self.k, self.a
        words, counts = super().find_rows(position)
        number, is_reduced = k.variable(k.i64(-1)), a.reduction.differs(_ROWS)
        with k.when(is_reduced ^ 1):
            number.set(k.load(I64, k.pointer(self.item.rows), position * 8))
        is_chosen = number.get() >= 0
        row = k.select(is_chosen, self.results_at() + number.get() * a.out_row, k.i64(0))
        return words | {"out": row}, counts & (is_reduced | is_chosen)

    def panel_tile(self, panel: Panel, tile: Tile, first: Value, end: Value, clear: Value) -> None:
        """Keys [first, end) of a tile for one panel: P, then what becomes of it."""
        k, s, a, parts = self.k, self.s, self.a, self.parts
        self.weigh(panel, tile, first, end, clear)
        weights, count = panel.pairs("scores"), end - first
        partial = k.at(self.part("partial"), first * s.number_bytes)
        with k.either(a.reduction.equals(_ROWS)) as (stored, reduced):
            with stored, k.range(panel.word("first"), panel.word("end")) as lane:
                row = k.load(I64, panel.lanes("out"), lane * 8)
                with k.when(row.differs(0)):
                    target = k.pointer(row + (tile.start + first) * s.number_bytes)
                    k.call(parts.store, target, k.at(weights, lane * s.number_bytes), count)
            with reduced, k.either(a.reduction.equals(_MAXIMUM)) as (largest, sums):
                with largest:
                    k.call(parts.find_largest, partial, weights, count)
                with sums:
                    k.call(parts.add, partial, weights, count)


# --- weights [keys, panel] of a tile; the -0 of a hidden key adds nothing, and is below all others


def add_panel(module: Module, s: Shape) -> Any:
    """partial[keys] += Σ weights[keys, lane] over the lanes, ascending, as the product adds units of weights."""
    product = outer_product_of(s)

    def add(k: Function, total: Value, lanes: list[Value]) -> Value:
        for first in range(0, s.lanes, s.elements):
            total = product.add_weights(k, product.pack_weights(k, lanes[first : first + s.elements]), total)
        return total

    return _over_lanes(module, s, "add_panel", add)


def largest_of_panel(module: Module, s: Shape) -> Any:
    """partial[keys] = the largest of it and weights[keys, lane] over the lanes. NaN is the largest."""

    def find(k: Function, total: Value, lanes: list[Value]) -> Value:
        for x in lanes:
            total = _larger(k, s, total, x)
        return total

    return _over_lanes(module, s, "largest_of_panel", find)


def _larger(k: Function, s: Shape, a: Value, b: Value) -> Value:
    """Returns the larger of weights, by their bits as integers: those of NaN, which has no sign here, are largest."""
    bits = like(a, s.integer)
    return k.max(a.bits(bits), b.bits(bits)).bits(a.type)


def _over_lanes(module: Module, s: Shape, name: str, combined: Any) -> Any:
    """partial[keys] = combined(k, partial, lanes), for `lanes` keys at once, which are turned into lanes.

    Rows past the last key hold anything, and partial stays there.
    """
    k = module.function(name, prototype("partial* weights* n_keys"))
    p, numbers = k.p, k.iota(s.lanes)
    with k.range(0, p["n_keys"], s.lanes) as j:
        at = k.at(p["partial"], j * s.number_bytes)
        before = total = k.load(s.vector, at)
        for v in range(s.vectors):
            rows = [k.load(s.vector, p["weights"], (j + i) * s.row_bytes + s.lane_offset(v)) for i in range(s.lanes)]
            total = combined(k, total, k.transpose(rows))
        is_key = numbers < k.splat(p["n_keys"] - j, s.lanes)
        k.store(k.select(is_key, total, before), at)
    return k.finish()


def join(module: Module, s: Shape, *, largest: bool) -> Any:
    """total[keys] += partial[keys]; or the larger of both."""
    k = module.function("join_largest" if largest else "join_sums", prototype("total* partial* n_keys"))
    p = k.p
    whole = p["n_keys"] // s.lanes * s.lanes

    def one(j: Value, lanes: int) -> None:
        kind = s.vector if lanes else s.number
        total, partial = (k.load(kind, p[x], j * s.number_bytes) for x in ("total", "partial"))
        k.store(_larger(k, s, total, partial) if largest else total + partial, p["total"], j * s.number_bytes)

    with k.range(0, whole, s.lanes) as j:
        one(j, s.lanes)
    with k.range(whole, p["n_keys"]) as j:
        one(j, 0)
    return k.finish()


def store_row(module: Module, s: Shape) -> Any:
    """row[keys] = |weights[keys, 0]|: +0 where a key is hidden."""
    k = module.function("store_row", prototype("row* weights* n_keys"))
    p = k.p
    with k.range(0, p["n_keys"]) as j:
        k.store(k.abs(k.load(s.number, p["weights"], j * s.row_bytes)), p["row"], j * s.number_bytes)
    return k.finish()
