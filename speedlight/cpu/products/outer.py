"""Register tiles of products whose step is an outer one: total[row][vector] += splat(unit of a row) · units in lanes.

    score    total[key][query vector]     over the units of head_dim
    value    total[column][query vector]  over the units of keys

A lane is a query; everything of a panel lies lane-contiguous (kernels/panel_products.py).
"""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from ..language.prototypes import prototype
from ..language.vector import F32, PTR, Function, Module, Value, Variable, vec
from ..memory.records import BLOCK, TILE
from ..memory.shape import Shape
from .packing import CacheValues, KeyRun

Sums = list[list[Variable]]  # of a register tile: [row][vector]
Step = Callable[..., None]  # step(t), or step(t, 2) of two whose units lie side by side in a row
Fetch = Callable[[Value], None]  # what is fetched meanwhile, beside a group of keys from this one on
Check = Callable[[range, list[list[Value]]], None]  # scores of some vectors, [vector][key]
VALUE = "acc* weights* values* value_row first end steps width alpha* partial* fresh"  # value_tile()'s parameters


class OuterProduct(CacheValues):
    """Base of the products whose step is an outer one.

    A subclass says how units are loaded, packed and multiplied. The base has the register tiles made of such steps.
    """

    units_per_load = 1  # that lie together in a cache
    sleeps = False  # keep_awake() is needed
    flops_of_step: int  # of multiply_often()
    exp2_terms: tuple[float, ...]  # of 2^f on [-1/2, 1/2], from the linear one on
    exp2_error: float  # relative

    def __init__(self, s: Shape) -> None:
        self.s = s

    @abstractmethod
    def multiply_add(self, k: Function, a: Value, b: Value, total: Value) -> Value:
        """Returns total + a·b over all elements of the units."""

    # --- rows of q, keys and values

    @abstractmethod
    def load_units(self, k: Function, row: Value, t: Value, *, stored: bool = False) -> Value:
        """Loads `lanes` units from a row with unit stride: of keys or values that are `stored`, or of q."""

    @abstractmethod
    def load_unit(
        self, k: Function, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
    ) -> Value:
        """Loads one unit from a row of any stride; a missing element of the last one is 0."""

    @abstractmethod
    def stage_tiles(self, module: Module) -> tuple[Any, Any]:
        """Returns the micro-kernels that copy tiles of keys, and of values, to scratch."""

    @abstractmethod
    def gather_values(self, k: Function, rows: list[Value], column: Value) -> Value:
        """Loads one vector of columns of a unit's values, of keys whose rows these are."""

    @abstractmethod
    def key_runs(self, k: Function, head_dim: Value) -> Iterator[KeyRun]:
        """Yields how whole vectors of units of keys' rows are read and transposed."""

    # --- a cache's blocks

    @abstractmethod
    def each_unit(self, k: Function, count: Value, body: Callable[..., None], *, of_keys: bool) -> None:
        """Calls body(t, n) of `count` units, n that are loaded together at a time, then body(t) of those that are left.

        of_keys: they are of keys' elements, and not of keys.
        """

    @abstractmethod
    def load_keys(self, k: Function, block: Value, t: Value, lane: int, count: int) -> list[Value]:
        """Loads `count` units, which lie together, of `lanes` keys of a block."""

    @abstractmethod
    def key_unit(self, k: Function, block: Value, t: Value, key: Value) -> Value:
        """Loads unit t of one key of a block."""

    # --- weights

    @abstractmethod
    def pack_weights(self, k: Function, weights: list[Value]) -> Value:
        """Packs the weights of a unit's keys, lane by lane."""

    @abstractmethod
    def pack_row(self, k: Function, weights: list[Value]) -> Value:
        """Packs vectors of weights one after another as units side by side."""

    @abstractmethod
    def round_elements(self, k: Function, x: Value) -> Value:
        """Rounds a vector of numbers to elements of units that lie side by side."""

    @abstractmethod
    def add_weights(self, k: Function, unit: Value, total: Value) -> Value:
        """Returns total + the weights of a unit; `unit` is a vector of them."""

    @abstractmethod
    def drop_weights(self, k: Function, unit: Value, keep: list[Value]) -> Value:
        """Returns a vector of units of weights without those of the elements that are not kept, lane by lane.

        They become +0, or NaN by a scale that is; -0 stays.
        """

    @property
    @abstractmethod
    def row_weight(self) -> ir.Type:
        """Type of a key's weight in a row of units side by side."""

    @abstractmethod
    def drop_row(self, k: Function, weights: Value, keep: Value) -> Value:
        """Returns a vector of keys' weights in a row without those that are not kept."""

    # --- hidden keys

    @abstractmethod
    def first_alone(self, unit: Value) -> Value:
        """Returns one unit with zeros for all of its elements but the first."""

    @abstractmethod
    def seen_lanes(self, k: Function, weight: Value) -> Value:
        """Returns which lanes of a vector of units of weights see them."""

    @abstractmethod
    def seen_units(self, k: Function, marks: list[Value]) -> Value:
        """Returns what seen_lanes() gives, of a unit whose elements are marked one by one, in vectors or alone."""

    @abstractmethod
    def multiply_add_seen(self, k: Function, value: Value, weight: Value, total: Value, seen: Value) -> Value:
        """Returns multiply_add() in lanes that see the unit, by seen_lanes(), else total.

        No value that is hidden is touched.
        """

    @abstractmethod
    def seen_bits(self, k: Function, weight: Value) -> tuple[Value, Value | None]:
        """Returns whether anything of one unit is visible, and the bits that are, if that may be a part."""

    @abstractmethod
    def whole_keys(self, k: Function, full: Value, end: Value, count: Value) -> Value:
        """Returns how many of `full` visible keys make units of their own.

        `end`: of the keys that may be seen; `count`: of those in the tile. Past those is padding, of arrays.
        """

    # --- sums, as most products have them

    def new_sum(self, k: Function, start: Value) -> Chain:
        return Chain(self, k, start)

    def joint_steps(self, k: Function, joint: Value, steps: Value) -> Value:
        """Counts the steps that are summed together, of the first `joint`, which all rows see.

        steps: of a whole tile.
        """
        return joint

    def settle(self, k: Function, total: Value, begin: Value) -> Value:
        """Returns a sum of values that began with a zero, `begin`, as the accumulator adds it."""
        return total

    def flushed(self, module: Module, f: Any) -> Any:
        """Returns f, which sums products, or a function that calls it in the product's floating-point mode."""
        return f

    def multiply_often(self, k: Function, a: Value, b: Value, sums: Sequence[Variable]) -> None:
        """Adds a · b to each sum, `flops_of_step` operations each, as fast as the product can."""
        for total in sums:
            total.set(self.multiply_add(k, a, b, total.get()))

    # --- registers beside vectors, and operands of other layouts, which few products have

    def keep_awake(self, k: Function) -> None:
        """Keeps units awake that the product needs and what is written here does not."""
        return

    def registers(self, k: Function) -> contextlib.AbstractContextManager[None]:
        """Prepares registers that the product has beside vectors, for what is written meanwhile."""
        return contextlib.nullcontext()

    def arrange_queries(self, k: Function, panel: Value, units: Value) -> None:
        """Rearranges a packed panel of queries for score_groups()."""
        return

    def column_offset(self, k: Function, column: Value) -> Value:
        """Returns the bytes from a step's values to those of a column."""
        return column * self.s.number_bytes

    def step_offset(self, k: Function, t: Value, row: Value) -> Value:
        """Returns the bytes from a tile's values to those of a step; `row`: from a step to the next."""
        return t * row

    # --- register tiles

    def score_groups(self, k: Function, fetch: Fetch, check: Check) -> None:
        """Stores and checks the scores of a tile, for as many keys at once as a register tile has.

        Writes the loops of score_tile() in kernels/panel_products.py, whose parameters it reads. Keys past the end
        repeat the last one.
        """
        s, p = self.s, k.p
        rows, n_keys = s.rows, p["n_keys"]

        def group(j: Value, vectors: range) -> None:
            fetch(j)
            check(vectors, _panel_scores(self, k, j, vectors))

        wide = k.min((p["wide"] + (rows - 1)) // rows * rows, n_keys) if s.has_narrow_tail else n_keys
        with k.range(0, wide, rows) as j:
            group(j, range(s.vectors))
        if s.has_narrow_tail:
            with k.range(wide, n_keys, rows) as j:
                group(j, range(s.vectors - 1, s.vectors))

    def values_from(self, k: Function, values: Value, first: Value, row: Value) -> Value:
        """Returns where a tile's values lie from key `first` on; `row`: bytes from a unit to the next."""
        return k.at(values, self.s.count_units(first) * row)

    def whole_steps(
        self, k: Function, clear: Value, full: Value, steps: Value, values: Value, width: Value
    ) -> tuple[Value, Value]:
        """Returns the first and the last of a tile's steps for value_tile(); predicated_tile() takes all others.

        Every lane sees [clear, full).
        """
        return clear, full

    def value_tile(self, module: Module) -> Any:
        """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], ascending j from +0.

        Where nothing hides, an accumulator that is `fresh` is +0, whatever lies there. A step of
        j is a unit of keys. Steps [first, end) are visible to every lane; sums so far come from `partial` if there were
        steps before, and go there if there are more, where predicated_tile continues. Columns past the width repeat the
        last one into rows that nothing reads.
        """
        s = self.s
        k = module.function("value_tile", prototype(VALUE))
        p = k.p

        def group(column: Value, offsets: Sequence[Value | int]) -> None:
            """Columns from `column` on, at these bytes from it."""
            values, total = self.values_of(k, column), new_sums(k, s, s.rows)
            if s.hides:
                with k.when(p["first"] > 0):
                    start_sums(k, s, total, p["partial"], column, k.i64(s.row_bytes))

            def step(j: Value) -> None:
                weights = load_panel_row(k, s, p["weights"], j, range(s.vectors))
                row = values(j)
                if s.fetching.rows:
                    later = p["value_row"] * s.fetching.rows
                    k.prefetch(values(j + s.fetching.rows) if s.scatters_values else k.at(row, later))
                add_outer(self, k, total, spread_columns(k, s, row, offsets), [weights])

            k.unrolled(p["first"], p["end"], step)
            end_sums(k, s, column, total)

        whole, last = p["width"] // s.rows * s.rows, p["width"] - 1
        with k.range(0, whole, s.rows) as column:
            group(column, [m * s.number_bytes for m in range(s.rows)])  # constants: a register each there would not be
        with k.when(whole < p["width"]):
            group(whole, [(k.min(whole + m, last) - whole) * s.number_bytes for m in range(s.rows)])
        return k.finish()

    def values_of(self, k: Function, column: Value) -> Callable[[Value], Value]:
        """Returns a function that says where a step's values lie, from a column on."""
        s, row, offset = self.s, k.p["value_row"], self.column_offset(k, column)
        if s.scatters_values:
            return lambda j: k.at(k.load(PTR, k.p["values"], j * row), offset)
        values = k.at(k.p["values"], offset)
        return lambda j: k.at(values, self.step_offset(k, j, row))

    def predicated_tile(self, module: Module) -> Any:
        """value_tile over steps that some lanes do not see: a lane whose weight is -0 keeps its sum, whatever the value
        is (0 · NaN is NaN).

        Conditions take registers too: the widest panels have half as many rows. Only the last vector sees steps from
        `wide` on.
        """
        s = self.s
        k = module.function("predicated_tile", prototype(f"{VALUE} wide"))
        p = k.p
        roomy = s.isa.registers >= 32 and s.vectors < 3
        last, rows = p["width"] - 1, s.rows if roomy else max(1, s.rows // 2)
        # the first steps: softmax_tile left the start of every column beside alpha
        fresh = p["first"].equals(0)
        begin = k.select(fresh, k.at(p["alpha"], s.row_bytes), p["partial"])
        begin_row = k.select(fresh, k.i64(0), k.i64(s.row_bytes))

        def group(column: Value) -> None:
            values = self.values_of(k, k.i64(0))
            offsets = [self.column_offset(k, k.min(column + m, last)) for m in range(rows)]
            total = new_sums(k, s, rows)
            start_sums(k, s, total, begin, column, begin_row)

            def step(j: Value, vectors: range) -> None:
                weights = load_panel_row(k, s, p["weights"], j, vectors)
                seen = [self.seen_lanes(k, w) for w in weights]
                row = values(j)
                sums = [x[vectors.start :] for x in total]
                add_outer(self, k, sums, spread_columns(k, s, row, offsets), [weights], seen)

            wide = k.min(p["wide"], p["end"]) if s.has_narrow_tail else p["end"]
            with k.range(p["first"], wide) as j:
                step(j, range(s.vectors))
            if s.has_narrow_tail:
                with k.range(wide, p["end"]) as j:
                    step(j, range(s.vectors - 1, s.vectors))
            if s.hides:
                end_sums(k, s, column, total)
            else:
                _accumulate(k, s, column, total)  # nothing follows the end of what `causal` shows

        with k.range(0, p["width"], rows) as column:
            group(column)
        return k.finish()


class Chain:
    """A sum that is one chain of multiply-adds: add() units, join() those that are summed together, one at a time."""

    def __init__(self, product: OuterProduct, k: Function, start: Value) -> None:
        self.product, self.k, self.total = product, k, k.variable(start)

    def add(self, a: Value, b: Value) -> None:
        self.total.set(self.product.multiply_add(self.k, a, b, self.total.get()))

    def join(self) -> None: ...

    def get(self) -> Value:
        return self.total.get()


def new_sums(k: Function, s: Shape, rows: int, vectors: int = 0) -> Sums:
    """Returns sums that begin with +0; vectors: all those of a panel, unless it is given."""
    return [[k.variable(k.const(0.0, s.vector)) for _ in range(vectors or s.vectors)] for _ in range(rows)]


def each_sum(total: Sums) -> list[tuple[int, int, Variable]]:
    """Returns each sum with its row and vector."""
    return [(m, v, x) for m, row in enumerate(total) for v, x in enumerate(row)]


def load_panel_row(k: Function, s: Shape, panel: Value, t: Value, vectors: Sequence[int]) -> list[Value]:
    """Loads vectors of row t of a panel of units."""
    return [k.load(s.units, panel, t * s.row_bytes + s.lane_offset(v)) for v in vectors]


def spread(k: Function, s: Shape, row: Value, offset: Value | int, count: int = 1) -> list[Value]:
    """Loads units that lie side by side, each to all lanes."""
    if count == 1:
        return [k.splat(k.load(s.unit, row, offset), s.lanes)]
    units = k.load(vec(s.unit, count), row, offset)
    return [k.shuffle(units, units, [i] * s.lanes) for i in range(count)]


def spread_columns(k: Function, s: Shape, row: Value, offsets: Sequence[Value | int]) -> Iterator[list[Value]]:
    """Loads the unit at each offset to all lanes; where those are known to adjoin, as many as a load brings."""
    adjoin = s.isa.takes_lanes and isinstance(offsets[0], int) and len(offsets) % s.lanes == 0
    count = s.lanes if adjoin else 1
    for m in range(0, len(offsets), count):
        for x in spread(k, s, row, offsets[m], count):
            yield [x]


def add_outer(
    product: OuterProduct,
    k: Function,
    total: Sums,
    rows: Iterable[list[Value]],
    steps: list[list[Value]],
    seen: list[Value] | None = None,
) -> None:
    """Adds steps, one after another: of each row a unit of each step, in all lanes, times the step's lanes; of lanes
    that have `seen` (of seen_lanes) only what they see.
    """
    for sums, units in zip(total, rows, strict=True):
        for x, lanes in zip(units, steps, strict=True):
            for i, (one, y) in enumerate(zip(sums, lanes, strict=True)):
                before = one.get()
                if seen is None:
                    one.set(product.multiply_add(k, x, y, before))
                else:
                    one.set(product.multiply_add_seen(k, x, y, before, seen[i]))


def take_two(s: Shape, step: Step, t: Value) -> None:
    """Takes steps t and t + 1: with one load of both units, where a lane is an operand."""
    if s.isa.takes_lanes:
        step(t, 2)
    else:
        step(t)
        step(t + 1)


def take_steps(k: Function, s: Shape, first: Value | int, end: Value, step: Step) -> None:
    """Takes steps [first, end), two in a turn."""
    k.unrolled(first, end, step, turn=lambda t: take_two(s, step, t))


def score(
    product: OuterProduct,
    k: Function,
    panel: Value,
    rows: list[Value],
    vectors: Sequence[int],
    run: Callable[[Step], None],
    total: Sums | None = None,
    unit_bytes: int = 0,
) -> Sums:
    """Returns scores of a register tile, [key][vector]: one chain of multiply-adds over the units for each.

    `rows`: of keys. run(step) takes the step through all units, and may fetch memory meanwhile. `total`: scores so far,
    which go on over more units. `unit_bytes`: from a unit of a row to the next, where they do not lie side by side.
    """
    s = product.s
    unit_bytes = unit_bytes or s.number_bytes
    total = new_sums(k, s, len(rows), len(vectors)) if total is None else total

    def step(t: Value, count: int = 1) -> None:
        queries = [load_panel_row(k, s, panel, t + i, vectors) for i in range(count)]
        add_outer(product, k, total, (spread(k, s, row, t * unit_bytes, count) for row in rows), queries)

    run(step)
    return total


def _panel_scores(product: OuterProduct, k: Function, j: Value, vectors: range) -> list[list[Value]]:
    """Stores the scores of a group of keys, from key j on; returns them, [vector][key]."""
    s, p = product.s, k.p
    last = p["n_keys"] - 1
    if s.scale_block:
        return _scores_by_blocks(product, k, j, vectors)
    if s.reads_blocks:
        total = _block_scores(product, k, j, vectors)
        return [_stored_scores(k, s, j, v, [row[i].get() for row in total]) for i, v in enumerate(vectors)]
    rows = [key_row(k, s, k.min(j + m, last)) for m in range(s.rows)]
    end = p["rest_unit"] if s.reads_parts else p["units"]

    def run(step: Step) -> None:
        if s.fetching.rows:
            run_fetching(k, s, j + s.rows, end, step)
        else:
            take_steps(k, s, 0, end, step)

    total = score(product, k, p["q_panel"], rows, vectors, run)
    if s.reads_parts:
        # such that the second part's first unit is number rest_unit of its row, too
        rest = k.at(p["rest"], -(p["rest_unit"] * s.number_bytes))
        rows = [k.at(rest, k.min(j + m, last) * p["rest_row"]) for m in range(s.rows)]
        go_on = functools.partial(take_steps, k, s, end, p["units"])
        score(product, k, p["q_panel"], rows, vectors, go_on, total)
    return [_stored_scores(k, s, j, v, [row[i].get() for row in total]) for i, v in enumerate(vectors)]


def _block_scores(product: OuterProduct, k: Function, j: Value, vectors: range) -> Sums:
    """Returns scores of a group of keys of a cache's block, and fetches a half of the next block meanwhile.

    A key past the last has the score of the one before, which the tile's facts then hold twice.
    """
    s, p = product.s, k.p
    unit, rows = s.block_unit_bytes, _rows_of_block(k, s, j)
    next_block = k.load(PTR, p["keys"], j // BLOCK * 8 + 8)
    share = (j & (BLOCK - 1)) // s.rows * (BLOCK * unit)

    def run(step: Step) -> None:
        def turn(t: Value) -> None:
            if s.fetching.rows and not s.stages_blocks:
                k.prefetch(k.at(next_block, t * (BLOCK * unit) + share))
            take_two(s, step, t)

        k.unrolled(0, p["units"], step, turn=turn)

    total = score(product, k, p["q_panel"], rows, vectors, run, unit_bytes=BLOCK * unit)
    for m in range(1, s.rows):
        for one, before in zip(total[m], total[m - 1], strict=True):
            one.set(k.select(j + m < p["n_keys"], one.get(), before.get()))
    return total


def _rows_of_block(k: Function, s: Shape, j: Value) -> list[Value]:
    """Returns where the first units of keys j, j + 1, … of a register tile lie, in their block."""
    block, unit = k.load(PTR, k.p["keys"], j // BLOCK * 8), s.block_unit_bytes
    return [k.at(block, (j & (BLOCK - 1)) * unit + m * unit) for m in range(s.rows)]


def key_row(k: Function, s: Shape, j: Value) -> Value:
    """Returns where a tile's row j of keys lies. In a list of addresses there may be any past the last key."""
    at = k.at(k.p["keys"], j * k.p["key_row"])
    return k.load(PTR, at) if s.scattered else at


def _stored_scores(k: Function, s: Shape, j: Value, v: int, x: list[Value]) -> list[Value]:
    """Stores and returns scores of keys j, j + 1, … against one vector of queries; of codes, times their scales."""
    p = k.p
    if s.format.is_coded:
        x = scaled_scores(k, s, j, x)
    out = k.at(p["scores"], j * s.row_bytes)
    for m, each in enumerate(x):
        k.store(each, out, m * s.row_bytes + s.lane_offset(v))
    return x


def scaled_sum(k: Function, number: Value, total: Value, scale: Value, scores: Value, at: Value) -> Value:
    """Returns a score so far, plus the sum over the next block of columns, number 0 first, times its scale."""
    before, none = k.load(total.type, scores, at), k.const(-0.0, total.type)
    return k.fma(total, scale, k.select(number.equals(0), none, before))


def _scores_by_blocks(product: OuterProduct, k: Function, j: Value, vectors: range) -> list[list[Value]]:
    """Stores the scores of a group of keys whose blocks of columns have scales; returns them, [vector][key].

    A key past the last has the score of the one before.
    """
    s, p = product.s, k.p
    last, size, codes = p["n_keys"] - 1, s.count_units(s.scale_block), p["code_units"]
    if s.reads_blocks:
        rows, unit_bytes = _rows_of_block(k, s, j), BLOCK * s.block_unit_bytes
    else:
        rows, unit_bytes = [key_row(k, s, k.min(j + m, last)) for m in range(s.rows)], s.number_bytes
    at, whole = j * s.row_bytes, (codes + (size - 1)) // size
    count = k.select(codes < p["units"], whole + 1, whole)  # what has no codes is the last block
    with k.range(0, count) as number:
        is_rest = number.equals(whole)
        first = k.select(is_rest, codes, number * size)
        end = k.select(is_rest, p["units"], k.min((number + 1) * size, codes))
        run = functools.partial(take_steps, k, s, first, end)
        for m, row in enumerate(score(product, k, p["q_panel"], rows, vectors, run, unit_bytes=unit_bytes)):
            scale = k.splat(k.load(F32, p["scales"], (number * TILE + k.min(j + m, last)) * 4), s.lanes)
            for x, v in zip(row, vectors, strict=True):
                place = at + (m * s.row_bytes + s.lane_offset(v))
                k.store(scaled_sum(k, number, x.get(), scale, p["scores"], place), p["scores"], place)
    found = []
    for v in vectors:
        keys = [k.load(s.vector, p["scores"], at + (m * s.row_bytes + s.lane_offset(v))) for m in range(s.rows)]
        for m in range(1, s.rows):
            keys[m] = k.select(j + m < p["n_keys"], keys[m], keys[m - 1])
        found.append(keys)
    return found


def scaled_scores(k: Function, s: Shape, j: Value, x: list[Value]) -> list[Value]:
    """Returns scores of codes of keys j, j + 1, …, times their scales; past the last key the last one's."""
    last, scales = k.p["n_keys"] - 1, k.p["scales"]
    return [each * k.splat(k.load(F32, scales, k.min(j + m, last) * 4), s.lanes) for m, each in enumerate(x)]


def run_fetching(k: Function, s: Shape, j: Value, end: Value, step: Step) -> None:
    """Takes steps [0, end) of a register tile, and fetches keys from j on meanwhile.

    A row is fetched in each of so many parts of the sum: a line for every two steps, as more at once would fill the
    places of misses.
    """
    part = end // s.rows & -2
    with k.range(0, s.rows) as m:
        row = key_row(k, s, j + m)
        with k.range(0, part, 2) as t:
            k.prefetch(k.at(row, t * (s.rows * s.number_bytes)))
            take_two(s, step, m * part + t)
    with k.range(part * s.rows, end) as t:
        step(t)


def start_sums(k: Function, s: Shape, total: Sums, begin: Value, column: Value, row: Value) -> None:
    """Loads sums so far, of a column every `row` bytes."""
    for m, v, x in each_sum(total):
        x.set(k.load(s.vector, begin, (column + m) * row + s.lane_offset(v)))


def end_sums(k: Function, s: Shape, column: Value, total: Sums) -> None:
    """Adds sums to the accumulator, or leaves them in `partial` if there are more steps."""
    p = k.p
    with k.either(p["end"].equals(p["steps"])) as (whole, rest):
        with whole:
            _accumulate(k, s, column, total)
        with rest:
            for m, v, x in each_sum(total):
                k.store(x.get(), p["partial"], (column + m) * s.row_bytes + s.lane_offset(v))


def _accumulate(k: Function, s: Shape, column: Value, total: Sums) -> None:
    zero, fresh = k.const(0.0, s.vector), k.splat(k.p["fresh"].differs(0), s.lanes)
    for m, v, x in each_sum(total):
        at = k.at(k.p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
        before, alpha = k.load(s.vector, at), k.load(s.vector, k.p["alpha"], s.lane_offset(v))
        before = before if s.hides else k.select(fresh, zero, before)
        k.store(k.fma(before, alpha, x.get()), at)
