"""The decode kernel: few query rows against many keys, at the speed at which keys can be read. A lane is a key.

    task: for every span, for every tile: scores of all rows (keys are transposed in registers, so that one vector holds
          one element of 16 keys), weights, sums; the span's state is merged, or left for the last of a head's tasks

The arithmetic of a row is the forward kernel's, operation by operation, so are its bits. A row sees a prefix of the
keys; what is uneven at its end, and tiles with scores of -inf, go key by key. Row r of a head's queries has the
scores scores[r, TILE]; a state is max, sum, then the accumulator in slots of one vector. The last slot ends where the
value ends, and may overlap the one before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..planning import BLOCK, SPAN, TILE
from .lower import expression_row
from .microkernels import (
    LARGE,
    Shape,
    exp4,
    is_empty,
    largest,
    load_unit,
    load_units,
    log_sum_exp,
    merged,
    multiply_add,
    narrowed,
    natural_log,
    rescaled,
    unrolled,
)
from .places import PLACES, locate
from .region import Work, entry, region
from .vector import BF16, F32, F64, I1, I16, I32, I64, PTR, Function, Module, Value, vec
from .visibility import extent, visibility

_TOGETHER = 32  # steps of keys whose values are used for all rows while the first-level cache has them
_AHEAD = 2  # groups of keys that are fetched ahead, of rows
_FAR = 16384  # bytes that are fetched ahead, of a cache: some microseconds of reading
_MOST_AHEAD = 24  # blocks, where they are small
_ONES = 0x3F803F80  # a pair of bf16 ones


def decode_module(s: Shape, symbol: str) -> Module:
    """The whole decode engine for one shape; `symbol` is the region's public name."""
    m = Module(f"decode_{s.storage}")
    parts = _Parts(m, s)
    entry(m, s.isa, region(m, _task(m, s, parts)), symbol)
    return m


class _Parts:
    def __init__(self, m: Module, s: Shape) -> None:
        self.locate, self.pack, self.weigh, self.add_up = locate(m, s.piece), pack(m, s), weigh(m, s), add_up(m, s)
        self.score = score_lanes(m, s) if s.cached else score_rows(m, s)
        self.rescale = rescale(m, s) if s.quantised else None
        self.expression = expression_row(m, s, s.program) if s.program else None
        self.visibility = visibility(m, s, s.program) if s.program and s.program.may_hide else None
        self.extent = extent(m, self.visibility) if self.visibility else None
        self.values = [(rows, least, value_rows(m, s, rows, together)) for rows, together, least in _value_tiles(s)]
        self.careful, self.merge, self.log = careful_values(m, s), merge_row(m, s), natural_log(m)
        self.store = store_row(m, s, self.log)


def _score_row(s: Shape) -> int:
    return TILE * s.number_bytes


def _slot_bytes(s: Shape) -> int:
    return s.lanes * s.number_bytes


def pack(module: Module, s: Shape) -> Any:
    """queries[units] from one row of q; `flip` has the sign bits to invert."""
    k = module.function("pack", {"queries": PTR, "row": PTR, "head_dim": I64, "units": I64, "column": I64, "flip": I64})
    p = k.p
    flip = p["flip"] if s.wide else k.trunc(p["flip"], I32)
    whole = p["head_dim"] // (2 * s.lanes if s.dot else s.lanes) * s.lanes
    end = k.select(p["column"].equals(s.storage_bytes), whole, k.i64(0))
    with k.range(0, end, s.lanes) as t:
        x = load_units(k, s, p["row"], t).bits(s.ivector) ^ k.splat(flip, s.lanes)
        k.store(x, p["queries"], t * s.number_bytes)
    with k.range(end, p["units"]) as t:
        x = load_unit(k, s, p["row"], t, p["column"], p["head_dim"])
        k.store(x.bits(s.integer) ^ flip, p["queries"], t * s.number_bytes)
    return k.finish()


_SCORE_PARAMS = {
    "scores": PTR, "queries": PTR, "places": PTR, "key_row": I64, "count": I64, "units": I64, "rows": I64,
    "head_dim": I64,
}  # fmt: skip


def score_rows(module: Module, s: Shape) -> Any:
    """scores[row, key] = queries[row] · keys[key], a vector of keys at a time: one chain of multiply-adds over the
    units.

    Keys past the end repeat the last one; what they score is never used.
    """
    k = module.function("score_rows", _SCORE_PARAMS)
    p, n = k.p, s.lanes
    places, column = k.buffer(I64, n), k.buffer(s.unit, n)
    whole = p["head_dim"] // (2 * n if s.dot else n) * n
    # keys some groups on are fetched line after line where rows lie side by side, and row by row where not
    width = n * (4 if s.dot else s.storage_bytes)
    dense = p["key_row"].equals(p["head_dim"] * s.storage_bytes)
    lane_step, unit_step = k.select(dense, k.i64(width), p["key_row"]), k.select(dense, k.i64(width), k.i64(width // n))
    zero = k.const(0.0, s.vector)

    def each_row(j: Value, t: Value, columns: list[Value]) -> None:
        with k.range(0, p["rows"]) as r:
            place = k.at(p["scores"], r * _score_row(s) + j * s.number_bytes)
            query = k.at(p["queries"], (r * p["units"] + t) * s.number_bytes)
            total = k.load(s.vector, place)
            for u, keys in enumerate(columns):
                total = multiply_add(k, s, k.splat(k.load(s.unit, query, u * s.number_bytes), n), keys, total)
            k.store(total, place)

    with k.range(0, p["count"], n) as j:
        ahead = k.load(PTR, p["places"], (j + n * _AHEAD) * 8)
        for m in range(n):
            k.store(k.load(I64, p["places"], k.min(j + m, p["count"] - 1) * 8), places, 8 * m)
        with k.range(0, p["rows"]) as r:
            k.store(zero, p["scores"], r * _score_row(s) + j * s.number_bytes)
        with k.range(0, whole, n) as t:
            rows = []
            for m in range(n):
                k.prefetch(k.at(ahead, t * unit_step + lane_step * m))
                rows.append(load_units(k, s, k.load(PTR, places, 8 * m), t))
            each_row(j, t, k.transpose(rows))
        with k.range(whole, p["units"]) as t:
            for m in range(n):
                x = load_unit(k, s, k.load(PTR, places, 8 * m), t, k.i64(s.storage_bytes), p["head_dim"])
                k.store(x, column, m * s.number_bytes)
            each_row(j, t, [k.load(vec(s.unit, n), column)])
    return k.finish()


def score_lanes(module: Module, s: Shape) -> Any:
    """The same over a cache's blocks, where the keys of a vector lie side by side: nothing is transposed, all is read
    in sequence.
    """
    k = module.function("score_lanes", _SCORE_PARAMS)
    p, n = k.p, s.lanes
    vectors, unit_bytes = max(1, BLOCK // n), BLOCK * s.stored_bytes
    far = _blocks_ahead(k, p["key_row"])
    last = (p["count"] - 1) // BLOCK

    def rows_of(first: Value, count: int, j: Value, together: int) -> None:
        """`count` rows and some blocks: as many independent chains as there are sums.

        A block past the end repeats the last one.
        """
        queries = [k.at(p["queries"], (first + r) * p["units"] * s.number_bytes) for r in range(count)]
        numbers = [k.min(j // BLOCK + i, last) for i in range(together)]
        blocks, aheads = ([k.at(k.load(PTR, p["places"], (x + y) * 8), s.header) for x in numbers] for y in (0, far))
        places = [(block, i * n) for block in blocks for i in range(vectors)]
        totals = [[k.variable(k.const(0.0, s.vector)) for _ in places] for _ in range(count)]
        for ahead in aheads if s.quantised else ():
            k.prefetch(k.at(ahead, -s.header))

        def unit(t: Value) -> None:
            keys = [load_units(k, s, k.at(block, t * unit_bytes), k.i64(lane), stored=True) for block, lane in places]
            for ahead in aheads:
                for line in range(0, unit_bytes, 64):
                    k.prefetch(k.at(ahead, t * unit_bytes + line))
            for r in range(count):
                query = k.splat(k.load(s.unit, queries[r], t * s.number_bytes), n)
                for total, x in zip(totals[r], keys, strict=True):
                    total.set(multiply_add(k, s, query, x, total.get()))

        unrolled(k, 0, p["units"], unit, by=2)
        for r in range(count):
            for i, (total, (block, lane)) in enumerate(zip(totals[r], places, strict=True)):
                x = total.get()
                if s.quantised:
                    x = x * k.load(s.vector, block, lane * 4 - s.header)
                k.store(x, p["scores"], (first + r) * _score_row(s) + (j + i * n) * s.number_bytes)

    tiles = _score_tiles(s)
    most = max(together for _, together in tiles)
    with k.range(0, p["count"], BLOCK * most) as group:
        start = k.i64(0)
        for rows, together in tiles:
            end = start + (p["rows"] - start) // rows * rows
            with (
                k.range(start, end, rows) as r,
                k.range(group, k.min(group + BLOCK * most, p["count"]), BLOCK * together) as j,
            ):
                rows_of(r, rows, j, together)
            start = end
    return k.finish()


def _score_tiles(s: Shape) -> list[tuple[int, int]]:
    """Rows and blocks of a cache whose sums are in registers.

    Blocks at once are streams from memory at once, which is 4 to 9 % slower where memory is what limits (measured). But
    a few chains wait for each other, and of int8, which takes less from memory than it takes to compute, that is what
    limits.
    """
    if s.isa.registers < 32 or s.lanes < BLOCK:
        return [(4, 1), (1, 1)]
    return [(8, 1), (4, 2), (1, 4)] if s.quantised else [(8, 1), (4, 1), (1, 1)]


def _blocks_ahead(k: Function, row: Value) -> Value:
    """How many blocks on a cache is fetched."""
    return k.max(k.min(k.i64(_FAR) // (row * BLOCK), k.i64(_MOST_AHEAD)), k.i64(1))


def weigh(module: Module, s: Shape) -> Any:
    """One row's scores become weights in place (pairs in the dot class); max and alpha are updated. Keys from `limit`
    on weigh -0.

    Returns whether a score below `limit` is -inf: then its weight is -0 as well, and its value must not be touched.
    """
    k = module.function("weigh", {"scores": PTR, "state": PTR, "alpha": PTR, "limit": I64, "count": I64, "c": s.number,
                                  "places": PTR, "value_row": I64, "ahead": I64}, I64)  # fmt: skip
    p, n = k.p, s.lanes
    c = k.splat(p["c"], n)
    lowest, zero, hidden = (k.const(x, s.vector) for x in (float("-inf"), 0.0, -0.0))
    steps, block_bytes = k.iota(n), p["value_row"] * BLOCK
    best, gone = k.variable(lowest), k.variable(k.const(0, vec(I1, n)))

    def seen(x: Value, j: Value) -> tuple[Value, Value]:
        inside = (steps + k.splat(j, n)) < k.splat(p["limit"], n)
        return inside & x.differs(float("-inf")), inside

    with k.range(0, p["count"], n) as j:
        x = k.load(s.vector, p["scores"], j * s.number_bytes)
        visible, inside = seen(x, j)
        best.set(k.max(k.select(visible, x, lowest), best.get()))
        gone.set(gone.get() | (inside & x.equals(float("-inf"))))
    name = f"llvm.vector.reduce.fmax.v{n}{'f64' if s.wide else 'f32'}"
    old = k.splat(k.load(s.number, p["state"]), n)
    top = largest(k, s, k.splat(k.intrinsic(name, s.number, best.get()), n), c, old)
    base = k.select(top.equals(float("-inf")), zero, top)
    with k.range(0, p["count"], 2 * n) as j:
        if s.cached:  # memory would be idle meanwhile
            with k.when(p["count"].equals(TILE)):
                byte = p["ahead"] + j * 64
                block = byte // block_bytes
                place = k.at(
                    k.load(PTR, p["places"], k.min(block, k.i64(TILE // BLOCK + _MOST_AHEAD)) * 8),
                    byte - block * block_bytes,
                )
                for line in range(2 * n):
                    k.prefetch(k.at(place, line * 64))
        xs = [k.load(s.vector, p["scores"], (j + i * n) * s.number_bytes) for i in (0, 1)]
        es = [k.fma(x, c, -base) for x in xs]
        es = [k.select((k.abs(base) >= LARGE) & (e > 0.0), zero, e) for e in es]
        ws = [
            k.select(seen(x, j + i * n)[0], w, hidden)
            for i, (x, w) in enumerate(zip(xs, exp4(k, s, es, any_x=True), strict=True))
        ]
        if s.dot:
            pairs = k.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vec(BF16, 2 * n), ws[1], ws[0])
            k.store(pairs.bits(vec(I16, 2 * n)), p["scores"], j * 2)
        else:
            for i, w in enumerate(ws):
                k.store(w, p["scores"], (j + i * n) * s.number_bytes)
    (alpha,) = exp4(k, s, [old - base], any_x=True)
    for x, where in ((top, p["state"]), (alpha, p["alpha"])):
        k.store(_first(k, x), where)
    return k.finish(k.zext(k.any(gone.get()), I64))


def _first(k: Function, x: Value) -> Value:
    return Value(k, k.b.extract_element(x.x, I32(0)))


def add_up(module: Module, s: Shape) -> Any:
    """sums[row] = the weights of a row, one after another from -0; four rows in step, for their chains to overlap."""
    k = module.function("add_up", {"scores": PTR, "sums": PTR, "rows": I64, "steps": I64})
    p = k.p
    with k.range(0, p["rows"], 4) as first:
        rows = [k.min(first + i, p["rows"] - 1) for i in range(4)]
        places = [k.at(p["scores"], r * _score_row(s)) for r in rows]
        start = k.const(-0.0, s.vector if s.dot else s.number)
        totals = [k.variable(start) for _ in rows]
        with k.range(0, p["steps"]) as j:
            for total, place in zip(totals, places, strict=True):
                x = k.load(s.unit, place, j * s.number_bytes)
                if s.dot:
                    total.set(multiply_add(k, s, k.const(_ONES, s.ivector), k.splat(x, s.lanes), total.get()))
                else:
                    total.set(total.get() + x)
        for r, total in zip(rows, totals, strict=True):
            k.store(_first(k, total.get()) if s.dot else total.get(), p["sums"], r * 8)
    return k.finish()


def rescale(module: Module, s: Shape) -> Any:
    """Of a quantised tile: weights · scales, in place."""
    k = module.function("rescale", {"weights": PTR, "places": PTR, "count": I64})
    p, n = k.p, s.lanes
    with k.range(0, p["count"], n) as j:
        scale = k.load(s.vector, k.load(PTR, p["places"], j // BLOCK * 8), j % BLOCK * 4)
        x = k.load(s.vector, p["weights"], j * 4)
        k.store(rescaled(k, s, x, scale), p["weights"], j * 4)
    return k.finish()


_VALUE_PARAMS = {
    "sums": PTR, "sum_row": I64, "weights": PTR, "places": PTR, "value_row": I64, "first": I64, "end": I64,
    "value_dim": I64, "slots": I64,
    "regular": I64,
}  # fmt: skip


def _value(k: Function, s: Shape, row: Value, next_row: Value, column: Value) -> Value:
    """One vector of a value's columns; in the dot class pairs of two keys' values."""
    if s.cached or not s.dot:
        return load_units(k, s, row, column, stored=True)
    low, high = (k.zext(k.load(vec(I16, s.lanes), x, column * 2), s.ivector) for x in (row, next_row))
    return low | (high << 16)


def _steps_together(s: Shape) -> int:
    """Steps of keys whose values lie side by side."""
    return s.piece // 2 if s.cached and s.dot else s.piece


def _step_row(k: Function, s: Shape) -> Value:
    """Bytes from one step's values to the next, where they lie side by side."""
    return k.p["value_dim"] if s.quantised else k.p["value_row"] << 1 if s.dot else k.p["value_row"]


def _value_tiles(s: Shape) -> list[tuple[int, int, int]]:
    """Rows and slots whose sums are in registers, and from how many rows on.

    Memory is read best in whole rows of values. But where a vector of them is used by many rows, or is int8 that must
    be widened, it is read once for four.
    """
    if s.isa.registers < 32:
        return [(2, 4, 2), (1, 4, 1)]
    return [(4, 4, 4 if s.quantised else 8), (2, 8, 2), (1, 8, 1)]


def value_rows(module: Module, s: Shape, rows: int, together: int) -> Any:
    """sums[row, slot] += Σ_j weights[row, j] · values[j], j from `first` to `end`, all visible. A step of j is a key,
    or a pair.

    `rows` rows and `together` slots at a time. Each pass fetches what comes after: what one asks for may be dropped,
    and once was measured to be too little.
    """
    k = module.function(f"value_rows_{rows}", _VALUE_PARAMS)
    p = k.p
    size, step_row = _steps_together(s), _step_row(k, s)
    with k.range(0, p["slots"], together) as slot:
        slots = [k.min(slot + i, p["slots"] - 1) for i in range(together)]
        columns = [k.min(x * s.lanes, p["value_dim"] - s.lanes) for x in slots]
        sums = [[r * p["sum_row"] + x * _slot_bytes(s) for x in slots] for r in map(k.i64, range(rows))]
        totals = [[k.variable(k.load(s.vector, p["sums"], x)) for x in row] for row in sums]
        lines = columns[:: max(1, 64 // (s.lanes * s.stored_bytes))]

        def step(
            j: Value, row: Value, after: Value, columns: list[Value] = columns, totals: list[list[Any]] = totals
        ) -> None:
            vectors = [_value(k, s, row, after, c) for c in columns]
            for r in range(rows):
                weight = k.splat(k.load(s.unit, p["weights"], j * s.number_bytes + r * _score_row(s)), s.lanes)
                for total, x in zip(totals[r], vectors, strict=True):
                    total.set(multiply_add(k, s, x, weight, total.get()))

        if s.cached:
            far = _blocks_ahead(k, p["value_row"])
            with k.range(p["first"], p["end"], size) as j:
                block, ahead = (k.at(k.load(PTR, p["places"], x * 8), s.header) for x in (j // size, j // size + far))
                if s.quantised:
                    k.prefetch(k.at(ahead, -s.header))
                with k.range(0, k.min(p["end"] - j, k.i64(size))) as i:
                    row = k.at(block, i * step_row)
                    for column in lines:
                        k.prefetch(k.at(ahead, i * step_row + column * s.stored_bytes))
                    step(j + i, row, row)
        else:
            keys = 2 if s.dot else 1

            def one(j: Value, row_of: Callable[[Value], Value]) -> None:
                for n in range(keys):
                    ahead = row_of(j * keys + (16 * keys + n))
                    for column in lines:
                        k.prefetch(k.at(ahead, column * s.storage_bytes))
                step(j, row_of(j * keys), row_of(j * keys + (keys - 1)))

            base = k.load(PTR, p["places"])
            with k.either(p["regular"].differs(0)) as (by_stride, by_list):  # a load less for each row
                with by_stride, k.range(p["first"], p["end"]) as j:
                    one(j, lambda x: k.at(base, x * p["value_row"]))
                with by_list, k.range(p["first"], p["end"]) as j:
                    one(j, lambda x: k.load(PTR, p["places"], x * 8))
        for r in range(rows):
            for total, x in zip(totals[r], sums[r], strict=True):
                k.store(total.get(), p["sums"], x)
    return k.finish()


def careful_values(module: Module, s: Shape) -> Any:
    """The same for one row where some weights are -0: those keys' values are not touched.

    `last` is the tile's last key.
    """
    k = module.function("careful_values", _VALUE_PARAMS | {"last": I64})
    p, size = k.p, _steps_together(s)
    step_row = _step_row(k, s)
    with k.range(p["first"], p["end"]) as j:
        weight = k.load(s.unit, p["weights"], j * s.number_bytes)
        if s.dot:
            low, high = (
                k.select((weight << by).bits(I32) > -1, k.const(m, I32), k.const(0, I32))
                for by, m in ((16, 0xFFFF), (0, -65536))
            )
            mask = low | high
            some = mask.differs(0)
        else:
            mask, some = weight, weight.bits(s.integer) > -1
        with k.when(some):
            if s.cached:
                row = after = k.at(k.load(PTR, p["places"], j // size * 8), j % size * step_row + s.header)
            else:
                keys = 2 if s.dot else 1
                row, after = (k.load(PTR, p["places"], k.min(j * keys + x, p["last"]) * 8) for x in (0, keys - 1))
            with k.range(0, p["slots"]) as slot:
                column = k.min(slot * s.lanes, p["value_dim"] - s.lanes)
                x, w = _value(k, s, row, after, column), k.splat(weight, s.lanes)
                if s.dot:
                    x, w = x & k.splat(mask, s.lanes), w & k.splat(mask, s.lanes)
                place = k.at(p["sums"], slot * _slot_bytes(s))
                k.store(multiply_add(k, s, x, w, k.load(s.vector, place)), place)
    return k.finish()


def merge_row(module: Module, s: Shape) -> Any:
    """total ⊕ span of one row: the first non-empty state is copied, later ones merged, empty ones skipped."""
    k = module.function("merge_row", {"total": PTR, "span": PTR, "slots": I64})
    p, n = k.p, s.lanes
    (m1, l1), (m2, l2) = (
        [k.splat(k.load(s.number, x, i * s.number_bytes), n) for i in (0, 1)] for x in (p["total"], p["span"])
    )
    keep, copy = is_empty(m2, l2), is_empty(m1, l1)
    top = k.max(m1, m2)
    base = k.select(top.equals(float("-inf")), k.const(0.0, s.vector), top)
    first, second = exp4(k, s, [m1 - base, m2 - base], any_x=True)
    total = merged(k, l1, l2, first, second, keep, copy)
    with k.range(1, p["slots"] + 1) as slot:
        at = slot * _slot_bytes(s)
        a1, a2 = (k.load(s.vector, x, at) for x in (p["total"], p["span"]))
        k.store(merged(k, a1, a2, first, second, keep, copy), p["total"], at)
    k.store(_first(k, top), p["total"])
    k.store(_first(k, total), p["total"], s.number_bytes)
    return k.finish()


def store_row(module: Module, s: Shape, log: Any) -> Any:
    """out = acc / sum and lse = ln4·max + ln sum, of one row."""
    k = module.function(
        "store_row",
        {"state": PTR, "out": PTR, "lse": PTR, "value_dim": I64, "slots": I64, "column": I64, "with_lse": I64},
    )
    p, n = k.p, s.lanes
    m, total = (k.load(s.number, p["state"], i * s.number_bytes) for i in (0, 1))
    empty = is_empty(m, total)
    by, none = k.splat(total, n), k.splat(empty, n)
    lanes = k.buffer(s.number, n)
    with k.range(0, p["slots"]) as slot:
        column = k.min(slot * n, p["value_dim"] - n)
        x = k.load(s.vector, p["state"], (slot + 1) * _slot_bytes(s)) / by
        x = k.select(none, k.const(0.0, s.vector), x)
        with k.either(p["column"].equals(s.storage_bytes)) as (side_by_side, apart):
            with side_by_side:
                k.store(narrowed(k, s, x), p["out"], column * s.storage_bytes)
            with apart:
                k.store(x, lanes)
                with k.range(0, n) as lane:
                    one = narrowed(k, s, k.load(s.number, lanes, lane * s.number_bytes))
                    k.store(one, p["out"], (column + lane) * p["column"])
    with k.when(p["with_lse"].differs(0)):
        k.store(log_sum_exp(k, s, log, m, total), p["lse"])
    return k.finish()


def _task(module: Module, s: Shape, parts: _Parts) -> Any:
    k = module.function("task", {"a": PTR, "scratch": PTR, "number": I64})
    _Task(k, s, parts).run()
    return k.finish()


class _Task(Work):
    """All rows of some kv heads of one item, over a share of its spans."""

    def __init__(self, k: Function, s: Shape, parts: _Parts) -> None:
        super().__init__(k)
        self.s, self.parts = s, parts
        self.of = self.item()
        local = k.p["number"] - self.of["first"]
        self.first_head, self.part = local // self.of["blocks"] * self.get("heads"), local % self.of["blocks"]
        self.group = self.get("group")
        self.rows = self.of["q_len"] * self.group
        self.slots, self.value_dim = self.get("width"), self.get("value_dim")
        self.state_row = (self.slots + 1) * _slot_bytes(s)
        d = self.get("head_dim")
        self.units = (d + 1) >> 1 if s.dot else d
        self.queries, self.tile_sum, self.span, self.total, self.k_places = (
            k.at(self.scratch, self.get(n)) for n in ("at_keys", "at_values", "at_span", "at_total", "at_places")
        )
        self.v_places = k.at(self.k_places, PLACES * 8)
        numbers = k.at(self.scratch, self.get("at_rows"))
        most = self.get("panels") * 8  # bytes of one number of every row
        self.alpha, self.sums, self.limits = (k.at(numbers, most * i) for i in range(3))
        self.all_rows = self.rows * self.get("heads")
        self.take(k.i64(0))
        self.box = self.position(k.i64(0)), self.position(self.rows - 1)

    def take(self, h: Value) -> None:
        """Turns to the h-th head of the task."""
        k = self.k
        self.h, self.head, self.state_at = h, self.first_head + h, h * self.rows * self.state_row
        self.keys = k.at(k.pointer(self.get("k")), self.of["k_at"] + self.head * self.get("k_head"))
        self.values = k.at(k.pointer(self.get("v")), self.of["v_at"] + self.head * self.get("v_head"))
        self.heads = self.head * self.group, (self.head + 1) * self.group - 1
        self.head_queries = k.at(self.queries, h * self.rows * self.units * self.s.number_bytes)
        self.head_span, self.head_total = k.at(self.span, self.state_at), k.at(self.total, self.state_at)

    @contextlib.contextmanager
    def each_head(self) -> Iterator[None]:
        """For all heads of the task, one after another."""
        with self.k.range(0, self.get("heads")) as h:
            self.take(h)
            yield

    def position(self, r: Value) -> Value:
        """Of a row's query."""
        return self.of["start"] + r // self.group + self.get("k_start")

    def place(self, name: str, r: Value) -> Value:
        """Address of a row of q, out or lse."""
        position, q_head = r // self.group, self.head * self.group + r % self.group
        offset = self.of[f"{name}_at"] + q_head * self.get(f"{name}_head") + position * self.get(f"{name}_row")
        return self.k.pointer(self.get(name) + offset)

    def limit(self, r: Value) -> Value:
        k = self.k
        seen = k.max(k.min(self.of["start"] + r // self.group + 1, self.of["k_len"]), k.i64(0))
        return k.select(self.get("causal").differs(0), seen, self.of["k_len"])

    def run(self) -> None:
        k, s, parts = self.k, self.s, self.parts
        with self.each_head(), k.range(0, self.rows) as r:
            query = k.at(self.head_queries, r * self.units * s.number_bytes)
            k.call(
                parts.pack,
                query,
                self.place("q", r),
                self.get("head_dim"),
                self.units,
                self.get("q_column"),
                self.get("flip"),
            )
        self.clear(self.total)
        last = k.select(self.rows > 0, self.limit(self.rows - 1), k.i64(0))
        spans = (last + (SPAN - 1)) // SPAN
        first, end = (spans * x // self.of["blocks"] for x in (self.part, self.part + 1))
        alone = self.of["blocks"].equals(1)
        shared = k.pointer(self.get("partials") + k.p["number"] // self.of["blocks"] * self.get("partial_bytes"))
        hidden = None
        if parts.visibility is not None:
            every = self.first_head * self.group, (self.first_head + self.get("heads")) * self.group - 1
            hidden = lambda low, high: self.class_of(low, high, every).equals(0)  # noqa: E731
            with k.when(alone ^ 1), k.range(first, end) as span:  # spans that are passed by have seen nothing
                self.clear(k.at(shared, span * self.all_rows * self.state_row))
        with self.stretches(first * SPAN, k.min(end * SPAN, last), hidden) as (start, stop):
            self.clear(self.span)
            with k.range(start, stop, TILE) as tile, self.each_head():
                self.trimmed_tile(tile, k.min(last - tile, k.i64(TILE)))
            with k.either(alone) as (merge, leave):
                with merge:
                    self.merge(self.span)
                with leave, k.range(0, self.all_rows * self.state_row, 8) as byte:
                    target = k.at(shared, start // SPAN * self.all_rows * self.state_row)
                    k.store(k.load(I64, self.span, byte), target, byte)
        finished = k.variable(alone)
        with k.when(alone ^ 1):  # the last of the head's tasks merges all of its spans, in order
            counter = k.pointer(self.get("arrived") + k.p["number"] // self.of["blocks"] * 8)
            finished.set((k.fetch_add(counter, 0, 1) + 1).equals(self.of["blocks"]))
            with k.when(finished.get()), k.range(0, spans) as span:
                self.merge(k.at(shared, span * self.all_rows * self.state_row))
        with k.when(finished.get()), self.each_head():
            self.finish()

    def class_of(self, low: Value, high: Value, heads: tuple[Value, Value]) -> Value:
        """Whether keys [low, high) are hidden from (0), partly visible to (1) or visible to (2) the rows of some
        heads.
        """
        return self.seen_of(self.parts.visibility, self.of["index"], heads, self.box, low, high)

    def trimmed_tile(self, start: Value, count: Value) -> None:
        """What a mask shows of a tile."""
        k = self.k
        if self.parts.visibility is None:
            self.tile(start, count, count)
            return
        seen = self.class_of(start, start + count, self.heads)
        first, end, clear = self.extent_of(
            self.parts.extent, seen, self.of["index"], self.heads, self.box, start, count
        )
        with k.when(first < end):
            self.tile(start + first, end - first, clear - first)

    def clear(self, states: Value) -> None:
        """(-inf, 0, 0) for every row of every head."""
        k, s = self.k, self.s
        with k.range(0, self.all_rows) as r:
            at = k.at(states, r * self.state_row)
            with k.range(0, self.slots + 1) as slot:
                k.store(k.const(0.0, s.vector), at, slot * _slot_bytes(s))
            k.store(k.const(float("-inf"), s.number), at)

    def merge(self, states: Value) -> None:
        """What a span has seen, into the totals of all heads."""
        k = self.k
        with k.range(0, self.all_rows) as r:
            k.call(self.parts.merge, k.at(self.total, r * self.state_row), k.at(states, r * self.state_row), self.slots)

    def locate(self, places: Value, name: str, start: Value, count: Value) -> Value:
        """The addresses of a tile's keys or values, whether they are at one distance; and of what comes next, to be
        fetched ahead.

        What comes next is the tile of the task's next head, or its first head's next tile.
        """
        k, parts = self.k, self.parts
        base = self.keys if name == "k" else self.values
        head, row = self.get(f"{name}_head"), self.get(f"{name}_row")
        more = (self.h + 1) < self.get("heads")
        next_base = k.at(base, k.select(more, head, -(self.h * head)))
        next_start = k.select(more, start, start + TILE)
        ahead = _MOST_AHEAD * BLOCK if self.s.cached else 2 * BLOCK
        next_end = k.min(next_start + ahead, self.of["k_len"])
        pages, page_bytes, piece = k.pointer(self.of["pages"]), self.get(f"{name}_page"), self.s.piece
        regular = k.call(parts.locate, k.p["a"], places, pages, base, page_bytes, row, start, start + count)
        past = k.at(places, (count + (piece - 1)) // piece * 8)
        k.call(parts.locate, k.p["a"], past, pages, next_base, page_bytes, row, next_start, next_end)
        return k.select(self.get("heads").equals(1), regular, k.i64(0))  # else what comes next is elsewhere

    def tile(self, start: Value, count: Value, clear: Value) -> None:
        """Keys of one tile. The mask hides nothing below `clear`; `causal` still may."""
        k, s, parts = self.k, self.s, self.parts
        k_row, v_row, d = self.get("k_row"), self.get("v_row"), self.get("head_dim")
        self.locate(self.k_places, "k", start, count)
        regular = self.locate(self.v_places, "v", start, count)
        k.call(parts.score, self.scratch, self.head_queries, self.k_places, k_row, count, self.units, self.rows, d)
        joint = k.variable(count)  # keys that every row sees
        word = self.get("c")
        c = word.bits(F64) if s.wide else k.trunc(word, I32).bits(F32)
        self.count(k.max(k.min(self.limit(k.i64(0)) - start, clear), k.i64(0)), count)
        with k.range(0, self.rows) as r:
            limit = k.max(k.min(self.limit(r) - start, count), k.i64(0))
            k.store(limit, self.limits, r * 8)
            row, state = k.at(self.scratch, r * _score_row(s)), k.at(self.head_span, r * self.state_row)
            if parts.expression is not None:
                q_head = self.head * self.group + r % self.group
                place = (start + self.get("k_start"), count, limit, clear, self.of["index"], q_head, self.position(r))
                k.call(parts.expression, k.p["a"], row, *place)
            ahead = r * (64 * TILE) + _FAR
            gone = k.call(
                parts.weigh, row, state, k.at(self.alpha, r * 8), limit, count, c, self.v_places, v_row, ahead
            )
            joint.set(k.min(k.select(gone.equals(0), limit, k.i64(0)), joint.get()))
        steps = (count + 1) >> 1 if s.dot else count
        k.call(parts.add_up, self.scratch, self.sums, self.rows, steps)
        if parts.rescale is not None:
            with k.range(0, self.rows) as r:
                k.call(parts.rescale, k.at(self.scratch, r * _score_row(s)), self.v_places, count)
        sign = k.const(-(1 << (63 if s.wide else 31)), s.integer)
        with k.range(0, self.rows) as r:
            total = k.load(s.number, self.sums, r * 8)
            begin = k.splat((total.bits(s.integer) & sign).bits(s.number), s.lanes)
            with k.range(0, self.slots) as slot:
                k.store(begin, self.tile_sum, r * self.slots * _slot_bytes(s) + slot * _slot_bytes(s))
            at = k.at(self.head_span, r * self.state_row)
            alpha, running_sum = k.load(s.number, self.alpha, r * 8), k.load(s.number, at, s.number_bytes)
            k.store(k.fma(running_sum, alpha, total), at, s.number_bytes)
        together = joint.get() >> 1 if s.dot else joint.get()
        with k.range(0, together, _TOGETHER) as first:
            end = k.min(first + _TOGETHER, together)
            done = k.i64(0)
            for rows, least, function in parts.values:
                many = k.select(self.rows >= least, (self.rows - done) // rows * rows, k.i64(0))
                with k.range(done, done + many, rows) as r:
                    k.call(function, *self.value_arguments(r, v_row, first, end, regular))
                done = done + many
        with k.range(0, self.rows) as r:
            limit = k.load(I64, self.limits, r * 8)
            end = (limit + 1) >> 1 if s.dot else limit
            with k.when(together < end):
                k.call(parts.careful, *self.value_arguments(r, v_row, together, end, regular), count - 1)
            alpha = k.splat(k.load(s.number, self.alpha, r * 8), s.lanes)
            with k.range(0, self.slots) as slot:
                place = k.at(self.head_span, r * self.state_row + (slot + 1) * _slot_bytes(s))
                x = k.load(s.vector, self.tile_sum, (r * self.slots + slot) * _slot_bytes(s))
                k.store(k.fma(k.load(s.vector, place), alpha, x), place)

    def value_arguments(self, r: Value, v_row: Value, first: Value, end: Value, regular: Value) -> tuple[Value, ...]:
        k, s = self.k, self.s
        row = self.slots * _slot_bytes(s)
        sums, weights = k.at(self.tile_sum, r * row), k.at(self.scratch, r * _score_row(s))
        return sums, row, weights, self.v_places, v_row, first, end, self.value_dim, self.slots, regular

    def finish(self) -> None:
        """A sink joins last; then the rows are written."""
        k, s = self.k, self.s
        with k.range(0, self.rows) as r:
            state = k.at(self.head_total, r * self.state_row)
            with k.when(self.get("sinks").differs(0) & (self.of["index"] >= 0)):
                with k.range(0, self.slots + 1) as slot:
                    k.store(k.const(0.0, s.vector), self.span, slot * _slot_bytes(s))
                logits = k.pointer(self.get("sinks"))
                logit = k.load(s.number, logits, (self.head * self.group + r % self.group) * s.number_bytes)
                k.store(logit, self.span)
                k.store(k.const(1.0, s.number), self.span, s.number_bytes)
                k.call(self.parts.merge, state, self.span, self.slots)
            lse = self.get("lse")
            k.call(
                self.parts.store,
                state,
                self.place("out", r),
                self.place("lse", r),
                self.value_dim,
                self.slots,
                self.get("out_column"),
                lse,
            )

    def count(self, joint: Value, count: Value) -> None:
        """In a counting run: what was computed, for plan() to agree with."""
        k = self.k
        counts = self.get("counts")
        with k.when(counts.differs(0)):
            mixed = k.zext(joint < count, I64)
            for i, amount in enumerate((mixed ^ 1, mixed, count)):
                Value(k, k.b.atomic_rmw("add", k.at(k.pointer(counts), 8 * i).x, amount.x, "seq_cst"))
