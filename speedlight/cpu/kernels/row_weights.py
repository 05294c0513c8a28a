"""Micro-kernels in which a lane is a key: few query rows against many keys, at the speed at which keys can be read.

    queries [rows, units]     a row's units side by side
    scores  [rows, TILE]      then weights in their place, by units of keys
    state   [1 + slots]       vectors: max and sum, then the accumulator; a lane is a value column. The last slot ends
                              where the value ends, and may overlap the one before

The arithmetic of a row is that of panel_weights.py, operation by operation, so are its bits. A row sees a prefix of
the keys; what is uneven at its end, and tiles with scores of -inf, go key by key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ...problem.problem import TILE
from ..language import conversions
from ..language.prototypes import prototype
from ..language.reloading import copies
from ..language.vector import I1, I64, PTR, Function, Module, Value, Variable, vec
from ..memory.formats import load_scales
from ..memory.records import BLOCK
from ..memory.shape import Shape
from ..products.packing import summed_together
from ..products.product import product_of
from .row_scores import block_at, blocks_ahead, score_row
from .softmax import (
    LARGE,
    base_of,
    clamp_exponents,
    combined_by,
    divide_row,
    exp4,
    find_largest,
    is_empty,
    log_sum_exp,
    lowest_exponent,
    merge_of,
    rescale_weights,
)

STEPS_TOGETHER = 32  # steps of keys whose values are used for all rows while the first-level cache has them


def clear_row(k: Function, s: Shape, state: Value, slots: Value) -> None:
    """Stores (-inf, 0, 0), a state that has seen nothing."""
    with k.range(0, slots + 1) as slot:
        k.store(k.const(0.0, s.vector), state, slot * s.vector_bytes)
    k.store(k.const(float("-inf"), s.number), state)


# --- weights


def weigh(module: Module, s: Shape) -> Any:
    """Makes one row's scores weights in place, by units; max and alpha are updated. Keys from `limit` on weigh -0.

    Returns whether a score below `limit` is -inf: then its weight is -0 as well, and its value must not be touched.
    A whole tile of finite scores whose weights are normal numbers takes a loop that asks nothing more.
    """
    words = "scores* state* alpha* limit count c places* value_row ahead"
    k = module.function("weigh", prototype(words, c=s.number), I64)
    p, n = k.p, s.lanes
    c, old = k.splat(p["c"], n), k.splat(k.load(s.number, p["state"]), n)
    top, usual = k.variable(old), k.variable(k.const(0, I1))
    gone = k.variable(k.const(0, vec(I1, n)))
    with k.when(p["limit"].equals(TILE)):
        largest_score, total, least = _extent_of_scores(k, s)
        top.set(k.max(largest_score * c, old))
        finite = k.all(k.abs(total) < float("inf")) & k.all(k.abs(top.get()) < LARGE)
        usual.set(finite & k.all(k.fma(least, c, -top.get()) >= lowest_exponent(s)))
    with k.either(usual.get()) as (fast, careful):
        with fast:
            _weigh_keys(k, s, c, top.get(), None)
        with careful:
            seen = functools.partial(_seen, k, s, k.iota(n))
            top.set(find_largest(k, s, _largest_seen(k, s, seen, gone), c, old))
            _weigh_keys(k, s, c, top.get(), seen)
    (alpha,) = exp4(k, s, [old - base_of(k, s, top.get())], any_x=True)
    for x, where in ((top.get(), p["state"]), (alpha, p["alpha"])):
        k.store(k.first(x), where)
    return k.finish(k.zext(k.any(gone.get()), I64))


_Seen = Callable[[Value, Value], tuple[Value, Value]]


def _seen(k: Function, s: Shape, steps: Value, x: Value, j: Value) -> tuple[Value, Value]:
    """Returns which scores from key j on are below `limit` and not -inf, and which are below it."""
    inside = (steps + k.splat(j, s.lanes)) < k.splat(k.p["limit"], s.lanes)
    return inside & x.differs(float("-inf")), inside


def _extent_of_scores(k: Function, s: Shape) -> tuple[Value, Value, Value]:
    """Returns a whole tile's largest score, in all lanes; in each the sum, finite if all are, and the smallest."""
    starts = float("-inf"), 0.0, float("inf")
    combine = combined_by(k, s)
    found = [k.variable(k.const(x, s.vector)) for x in starts]
    with k.range(0, TILE, 4 * s.lanes) as j:
        xs = [k.load(s.vector, k.p["scores"], (j + i * s.lanes) * s.number_bytes) for i in range(4)]
        for variable, of in zip(found, combine, strict=True):
            variable.set(of(of(of(xs[0], xs[1]), of(xs[2], xs[3])), variable.get()))
    best, total, least = (x.get() for x in found)
    return _largest_lane(k, s, best), total, least


def _largest_seen(k: Function, s: Shape, seen: _Seen, gone: Variable) -> Value:
    """Returns the largest score that is seen, in all lanes; `gone`: whether one that could be is -inf."""
    lowest = k.const(float("-inf"), s.vector)
    best = k.variable(lowest)
    with k.range(0, k.p["count"], s.lanes) as j:
        x = k.load(s.vector, k.p["scores"], j * s.number_bytes)
        visible, inside = seen(x, j)
        best.set(k.max(k.select(visible, x, lowest), best.get()))
        gone.set(gone.get() | (inside & x.equals(float("-inf"))))
    return _largest_lane(k, s, best.get())


def _largest_lane(k: Function, s: Shape, x: Value) -> Value:
    name = f"llvm.vector.reduce.fmax.v{s.lanes}{'f64' if s.wide else 'f32'}"
    return k.splat(k.intrinsic(name, s.number, x), s.lanes)


def _weigh_keys(k: Function, s: Shape, c: Value, top: Value, seen: _Seen | None) -> None:
    """Makes weights of two vectors of keys at a time. seen: as of _seen(); None: all are, and their weights are normal
    numbers.
    """
    p, n, hidden = k.p, s.lanes, k.const(-0.0, s.vector)
    base = top if seen is None else base_of(k, s, top)
    with k.range(0, p["count"], 2 * n) as j:
        if s.cached and s.fetching.twice:
            _fetch_values(k, s, j)
        xs = [k.load(s.vector, p["scores"], (j + i * n) * s.number_bytes) for i in (0, 1)]
        es = [k.fma(x, c, -base) for x in xs]
        es = es if seen is None else clamp_exponents(k, s, es, [base, base])
        ws = exp4(k, s, es, any_x=seen is not None)
        if seen is not None:
            ws = [k.select(seen(x, j + i * n)[0], w, hidden) for i, (x, w) in enumerate(zip(xs, ws, strict=True))]
        for i in range(0, 2, s.weight_elements):
            at = j * (s.number_bytes // s.weight_elements) + i * s.vector_bytes
            k.store(product_of(s).pack_row(k, ws[i : i + s.weight_elements]), p["scores"], at)


def _fetch_values(k: Function, s: Shape, j: Value) -> None:
    """Prefetches a whole tile's values while weights are computed: memory would be idle meanwhile."""
    p, block_bytes = k.p, k.p["value_row"] * BLOCK
    with k.when(p["count"].equals(TILE)):
        byte = p["ahead"] + j * 64
        block = byte // block_bytes
        number = k.min(block, k.i64(TILE // BLOCK + s.fetching.cache_blocks))
        at = k.at(k.load(PTR, p["places"], number * 8), byte - block * block_bytes)
        for line in range(2 * s.lanes):
            k.prefetch(k.at(at, line * 64), s.fetching.level)


def add_up(module: Module, s: Shape) -> Any:
    """sums[row] = the weights of a row, one after another from -0; eight rows in step, for their chains to overlap."""
    k = module.function("add_up", prototype("scores* sums* rows steps"))
    p, product = k.p, product_of(s)
    alone = s.weight_elements == 1  # units of several elements are summed in vectors, all lanes the same
    eights = p["rows"] // 8 * 8
    for low, high, together in ((k.i64(0), eights, 8), (eights, p["rows"], 4)):
        with k.range(low, high, together) as first:
            rows = [k.min(first + i, p["rows"] - 1) for i in range(together)]
            places = [k.at(p["scores"], r * score_row(s)) for r in rows]
            totals = [k.variable(k.const(-0.0, s.number if alone else s.vector)) for _ in rows]
            with k.range(0, p["steps"]) as j:
                for total, at in zip(totals, places, strict=True):
                    x = k.load(s.weight, at, j * s.number_bytes)
                    total.set(product.add_weights(k, x if alone else k.splat(x, s.lanes), total.get()))
            for r, total in zip(rows, totals, strict=True):
                k.store(total.get() if alone else k.first(total.get()), p["sums"], r * 8)
    return k.finish()


def _load_row_scales(k: Function, s: Shape, key: Value, at: Value | int = 0) -> Value:
    """Loads the scales of a vector of a tile's keys, or values: from a list of a cache's blocks, `at` so many bytes in
    each, or side by side. Past the last block they are its.
    """
    p = k.p
    if s.lists_scales:
        return k.load(s.vector, p["scales"], key * 4)
    last = (p["count"] - 1) // BLOCK
    block = k.at(k.load(PTR, p["scales"], k.min(key // BLOCK, last) * 8), at)
    return load_scales(k, s.format, block, key % BLOCK, s.lanes)


def scale_scores(module: Module, s: Shape) -> Any:
    """Multiplies scores of codes by their keys' scales, where those were left out."""
    k = module.function("scale_scores", prototype("scores* scales* count rows"))
    p = k.p
    with k.range(0, p["count"], s.lanes) as j:
        scale = _load_row_scales(k, s, j)
        with k.range(0, p["rows"]) as r:
            at = r * score_row(s) + j * 4
            k.store(k.load(s.vector, p["scores"], at) * scale, p["scores"], at)
    return k.finish()


def rescale(module: Module, s: Shape) -> Any:
    """to[row, units] = weights[row, count] of a coded tile, times scales of its values; `at`: the bytes to these in a
    block.

    Both may be in one place.
    """
    k = module.function("rescale", prototype("weights* to* scales* count at rows"))
    p, n = k.p, s.lanes
    with k.range(0, p["count"], n * s.elements) as j:
        keys = [j + i * n for i in range(s.elements)]
        scales = [_load_row_scales(k, s, key, p["at"]) for key in keys]
        with k.range(0, p["rows"]) as r:
            row = k.at(p["weights"], r * score_row(s))
            xs = [rescale_weights(k, s, k.load(s.vector, row, key * 4), x) for key, x in zip(keys, scales, strict=True)]
            to = r * score_row(s) + j * (s.number_bytes // s.elements)
            k.store(product_of(s).pack_scaled_row(k, xs), p["to"], to)
    return k.finish()


# --- values

# scaled_row: from a step's weights times the scales of some columns to those of the next columns
_VALUE = "sums* sum_row weights* places* value_row first end value_dim slots regular scaled_row"


def _steps_together(s: Shape) -> int:
    """Steps of keys whose values lie side by side."""
    return s.piece // s.elements if s.cached else s.piece


def _step_row(k: Function, s: Shape) -> Value:
    """Bytes of a row of a cache's values: of codes those of a key, or of a pair in bytes; else of a unit."""
    is_kept = s.format.is_coded and s.cached
    return s.format.offset(k.p["value_dim"]) if is_kept else s.step_bytes(k.p["value_row"])


def _column_bytes(s: Shape) -> int:
    """Bytes from a column of a cache's values to the next."""
    return 1 if s.format.is_coded else s.stored_bytes * product_of(s).units_per_load


def value_tiles(module: Module, s: Shape) -> list[tuple[int, int, Any]]:
    """Rows that a function takes at once, from how many rows on it is worth it, and the function; the most first.

    Memory is read best in whole rows of values. But where a vector of them is used by many rows, or are codes that must
    be widened, it is read once for several.
    """
    tiles = s.tiles.values
    if s.format.is_coded:
        tiles = s.tiles.code_values if s.elements == 1 else s.tiles.paired_values
    return [(rows, least, value_rows(module, s, rows, together)) for rows, together, least in tiles]


def value_rows(module: Module, s: Shape, rows: int, together: int) -> Any:
    """sums[row, slot] += Σ_j weights[row, j] · values[j], j from `first` to `end`, all visible. A step of j is a unit.

    `rows` rows and `together` slots at a time. Each pass fetches what comes after: what one asks for may be dropped,
    and once was measured to be too little.
    """
    k = module.function(f"value_rows_{rows}", prototype(_VALUE))
    if together < 8:
        _value_slots(k, s, rows, together)
        return k.finish()
    # sums of a row that has no more are not all the same
    with k.either(k.p["slots"] <= together // 2) as (short, long):
        with short:
            _value_slots(k, s, rows, together // 2)
        with long:
            _value_slots(k, s, rows, together)
    return k.finish()


def _value_slots(k: Function, s: Shape, rows: int, together: int) -> None:
    """Writes the body of value_rows(): for slots that adjoin, then for the rest."""
    p, whole = k.p, k.i64(0)
    if product_of(s).columns_together > 1 or s.scale_block:
        whole = p["value_dim"] // (s.lanes * together) * together
        with k.range(0, whole, together) as slot:
            _value_group(k, s, rows, [slot + i for i in range(together)], adjoin=True)
    with k.range(whole, p["slots"], together) as slot:
        slots = [k.min(slot + i, p["slots"] - 1) for i in range(together)]
        _value_group(k, s, rows, slots, adjoin=False)


def _value_group(k: Function, s: Shape, rows: int, slots: list[Value], *, adjoin: bool) -> None:
    """Adds to the sums of some slots, whose columns lie side by side if they `adjoin`."""
    p, product = k.p, product_of(s)
    last = p["value_dim"] - s.lanes
    columns = [x * s.lanes if adjoin else k.min(x * s.lanes, last) for x in slots]
    sums = [[r * p["sum_row"] + x * s.vector_bytes for x in slots] for r in map(k.i64, range(rows))]
    totals = [[product.new_sum(k, k.load(s.vector, p["sums"], x)) for x in row] for row in sums]

    def step(
        j: Value,
        keys: list[Value],
        count: int = 1,
        columns: list[Value] = columns,
        totals: list[list[Any]] = totals,
    ) -> None:
        vectors = product.load_columns(k, keys, columns, count, adjoin=adjoin)
        for r in range(rows):
            for u in range(count):
                at = (j + u) * s.number_bytes + r * score_row(s)
                weights = _weights_of(k, s, pointers, at, columns, adjoin=adjoin)
                for total, x, weight in zip(totals[r], vectors, weights, strict=True):
                    total.add(x[u], weight)

    pointers = [p["weights"]] * len(columns)
    if s.reloads and s.cached:
        pointers = copies(k, p["weights"], len(columns))
    every = max(1, 64 // (s.lanes * (_column_bytes(s) if s.cached else s.stored_bytes)))
    lines = columns[::every] if rows > 1 or s.fetches_alone or not s.cached else []
    with summed_together(k, s, p["first"], p["end"]) as steps:
        (_blocks_of_values if s.cached else _rows_of_values)(k, s, lines, steps, step)
        for row in totals:
            for total in row:
                total.join()
    for r in range(rows):
        for total, x in zip(totals[r], sums[r], strict=True):
            k.store(total.get(), p["sums"], x)


def _weights_of(
    k: Function, s: Shape, pointers: list[Value], at: Value, columns: list[Value], *, adjoin: bool
) -> list[Value]:
    """Loads a step's weight for vectors of columns, by a pointer for each: those that share scales have one weight.

    adjoin: columns lie side by side, from a multiple of as many on; else a vector may have columns of two scales.
    """
    if not s.scale_block:
        return [k.splat(k.load(s.unit, x, at), s.lanes) for x in pointers]
    size, pitch = s.scale_block, k.p["scaled_row"]

    def weight(pointer: Value, number: Value) -> Value:
        return k.splat(k.load(s.unit, pointer, at + number * pitch), s.lanes)

    if adjoin:
        every = max(1, size // s.lanes)
        numbers = [columns[i - i % every] // size for i in range(len(columns))]
        return [weight(x, number) for x, number in zip(pointers, numbers, strict=True)]
    last, found = (k.p["value_dim"] - 1) // size, []
    for pointer, column in zip(pointers, columns, strict=True):
        first = column // size
        both = [weight(pointer, x) for x in (first, k.min(first + 1, last))]
        lanes = k.iota(s.lanes) + k.splat(column - first * size, s.lanes)
        found.append(k.select(lanes < size, *both))
    return found


_Step = Callable[..., None]  # step, rows of values, how many steps those are


def _blocks_of_values(k: Function, s: Shape, lines: list[Value], steps: tuple[Value, Value], step: _Step) -> None:
    """Takes steps, from and to, through a cache's blocks; of each row, those lines of a block ahead are fetched."""
    p, size, step_row, product = k.p, _steps_together(s), _step_row(k, s), product_of(s)
    far = blocks_ahead(k, s, p["value_row"]) if lines else None
    with k.range(*steps, size) as j:
        block = block_at(k, s, j // size, p["value_dim"])
        ahead = None if far is None else block_at(k, s, j // size + far, p["value_dim"])
        if s.format.is_coded and ahead is not None:
            k.prefetch(k.at(ahead, k.i64(0) - s.header(p["value_dim"])), s.fetching.level)

        def rows(i: Value, count: int = 1, j: Value = j, block: Value = block, ahead: Value | None = ahead) -> None:
            """Steps i and on, so many that lie together."""
            row = product.value_offset(i, step_row)
            if ahead is not None:
                starts = [k.at(ahead, row)]
                if s.format.is_coded and s.format.bits == 8:
                    starts = product.value_row(k, starts[0], i, step_row)
                for column in lines:
                    for start in starts:
                        k.prefetch(k.at(start, column * _column_bytes(s)), s.fetching.level)
            at = k.at(block, row)
            step(j + i, [at] if count > 1 else product.value_row(k, at, i, step_row), count)

        count = k.min(steps[1] - j, k.i64(size))
        product.each_unit(k, count, rows, of_keys=False)


def _rows_of_values(k: Function, s: Shape, lines: list[Value], steps: tuple[Value, Value], step: _Step) -> None:
    """Takes steps, from and to, through rows: at one distance, or a list of them."""
    p, keys, far = k.p, s.elements, s.fetching.keys

    def one(j: Value, row_of: Callable[[Value], Value]) -> None:
        first = j if keys == 1 else j * keys
        for n in range(keys) if far and lines else ():
            ahead = row_of(first + (far * keys + n))
            for column in lines:
                k.prefetch(k.at(ahead, column * s.key_bytes), s.fetching.level)
        step(j, [row_of(first + n) for n in range(keys)])

    base = k.load(PTR, p["places"])
    with k.either(p["regular"].differs(0)) as (by_stride, by_list):  # a load less for each row
        with by_stride, k.range(*steps) as j:
            one(j, lambda x: k.at(base, x * p["value_row"]))
        with by_list, k.range(*steps) as j:
            one(j, lambda x: k.load(PTR, p["places"], x * 8))


def careful_values(module: Module, s: Shape) -> Any:
    """Adds values of one row where some weights are -0: those keys' values are not touched.

    `last` is the tile's last key.
    """
    k = module.function("careful_values", prototype(f"{_VALUE} last"))
    p, size, product = k.p, _steps_together(s), product_of(s)
    step_row = _step_row(k, s)

    @contextlib.contextmanager
    def visible(j: Value) -> Iterator[Callable[[Value, Any], None]]:
        """Does what follows where any of step j's keys is seen; yields what adds its values, of one slot, to a sum."""
        weight = k.load(s.unit, p["weights"], j * s.number_bytes)
        seen, mask = product.seen_bits(k, weight)
        with k.when(seen):
            if s.cached:
                block = block_at(k, s, j // size, p["value_dim"])
                row = k.at(block, product.value_offset(j % size, step_row))
                rows = product.value_row(k, row, j, step_row)
            else:
                first = j if s.elements == 1 else j * s.elements
                rows = [k.load(PTR, p["places"], k.min(first + n, p["last"]) * 8) for n in range(s.elements)]

            def add(slot: Value, total: Any) -> None:
                column = k.min(slot * s.lanes, p["value_dim"] - s.lanes)
                (x,) = product.load_values(k, rows, column)
                (w,) = _weights_of(k, s, [p["weights"]], j * s.number_bytes, [column], adjoin=False)
                if mask is not None:
                    x, w = x & k.splat(mask, s.lanes), w & k.splat(mask, s.lanes)
                total.add(x, w)

            yield add

    @contextlib.contextmanager
    def each_slot() -> Iterator[tuple[Value, Any]]:
        """Goes on with the row's sum of each slot."""
        with k.range(0, p["slots"]) as slot:
            at = k.at(p["sums"], slot * s.vector_bytes)
            total = product.new_sum(k, k.load(s.vector, at))
            yield slot, total
            total.join()
            k.store(total.get(), at)

    with k.range(p["first"], p["end"], s.together) as start:
        if s.together == 1:
            with visible(start) as add, each_slot() as where:
                add(*where)
        else:
            end = k.min(start + s.together, p["end"])
            with each_slot() as where, k.range(start, end) as j, visible(j) as add:
                add(*where)
    return k.finish()


# --- states


def merge_row(module: Module, s: Shape) -> Any:
    """total ⊕ span of one row: the first non-empty state is copied, later ones merged, empty ones skipped."""
    k = module.function("merge_row", prototype("total* span* slots"))
    p, n = k.p, s.lanes
    (m1, l1), (m2, l2) = (
        [k.splat(k.load(s.number, x, i * s.number_bytes), n) for i in (0, 1)] for x in (p["total"], p["span"])
    )
    merge = merge_of(k, s, (m1, l1), (m2, l2))
    total = merge.of(l1, l2)
    with k.range(1, p["slots"] + 1) as slot:
        at = slot * s.vector_bytes
        a1, a2 = (k.load(s.vector, x, at) for x in (p["total"], p["span"]))
        k.store(merge.of(a1, a2), p["total"], at)
    k.store(k.first(merge.top), p["total"])
    k.store(k.first(total), p["total"], s.number_bytes)
    return k.finish()


def store_row(module: Module, s: Shape, log: Any) -> Any:
    """Stores the output and log-sum-exp of one row."""
    types = {"divisor": s.number} if s.dropout else {}
    k = module.function("store_row", prototype("state* out* lse* value_dim slots column with_lse", **types))
    p, n = k.p, s.lanes
    m, total = (k.load(s.number, p["state"], i * s.number_bytes) for i in (0, 1))
    empty = is_empty(m, total)
    by, none = k.splat(total * p["divisor"] if s.dropout else total, n), k.splat(empty, n)
    lanes = k.buffer(s.number, n)
    with k.range(0, p["slots"]) as slot:
        column = k.min(slot * n, p["value_dim"] - n)
        x = divide_row(k, s, k.load(s.vector, p["state"], (slot + 1) * s.vector_bytes), by, none)
        with k.either(p["column"].equals(s.storage_bytes)) as (side_by_side, apart):
            with side_by_side:
                k.store(conversions.narrowed(k, s.storage, x), p["out"], column * s.storage_bytes)
            with apart:
                k.store(x, lanes)
                with k.range(0, n) as lane:
                    one = conversions.narrowed(k, s.storage, k.load(s.number, lanes, lane * s.number_bytes))
                    k.store(one, p["out"], (column + lane) * p["column"])
    with k.when(p["with_lse"].differs(0)):
        k.store(log_sum_exp(k, s, log, m, total), p["lse"])
    return k.finish()
