"""Register tiles of the backward pass, of products whose step is an outer one (outer.py).

    product_tile  S = K Q and dP = V dO     a lane is a query
    into_queries  dQ += Kᵀ dS               a lane is a query
    into_keys     dV += P dO, dK += dS Q    a lane is a column; P and dS are broadcast from scratch

What lies where: kernels/gradient_tiles.py.
"""

from __future__ import annotations

from typing import Any

from ..language.prototypes import prototype
from ..language.vector import F32, F64, I32, I64, Function, Module, Value
from ..memory.records import QUERY_ENDS, SUMS
from ..memory.shape import Shape
from ..memory.words import Words
from .outer import (
    OuterProduct,
    Step,
    Sums,
    add_outer,
    each_sum,
    load_panel_row,
    new_sums,
    run_fetching,
    score,
    spread,
    spread_columns,
    take_steps,
)


def product_tile(product: OuterProduct, module: Module) -> Any:
    """out[n_keys, panel] = keys @ panel, one chain of multiply-adds over the units per element; in `check` each lane's
    sum, which is finite only if all are.

    Row groups past the end repeat the last key: what they write lies past n_keys.
    """
    s, k = product.s, module.function("product_tile", prototype("out* panel* keys* key_row n_keys units check*"))
    p = k.p
    for v in range(s.vectors):
        k.store(k.const(0.0, s.vector), p["check"], s.lane_offset(v))
    last = p["n_keys"] - 1
    with k.range(0, p["n_keys"], s.rows) as j:
        rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]

        def run(step: Step, j: Value = j) -> None:
            run_fetching(k, s, j + s.rows, p["units"], step)  # 1.1 times as fast from the third-level cache

        total = score(product, k, p["panel"], rows, range(s.vectors), run)
        for v in range(s.vectors):
            at = k.at(p["check"], s.lane_offset(v))
            every = k.load(s.vector, at)
            for m, row in enumerate(total):
                x = row[v].get()
                k.store(x, p["out"], (j + m) * s.row_bytes + s.lane_offset(v))
                every = every + x
            k.store(every, at)
    return k.finish()


# --- dQ


def into_queries(product: OuterProduct, module: Module, *, predicated: bool) -> Any:
    """acc[column, :] += Σ_j keys[j, column] · d_scores[j, :], ascending j from +0; a step is a unit of `n_keys` keys.

    `predicated`: a lane leaves out keys that it does not see, by the marks in `scores`.
    Columns past the width repeat the last one into rows that nothing reads.
    """
    s, name = product.s, "into_queries" + "_predicated" * predicated
    k = module.function(name, prototype("acc* d_scores* keys* key_row n_keys width scores*"))
    p = k.p
    last, rows = p["width"] - 1, max(1, s.rows // 2) if predicated else s.rows
    units = s.count_units(p["n_keys"])
    whole = units if predicated else s.unit_of(p["n_keys"])  # a missing key is marked as hidden

    def marks(j: Value, v: int) -> list[Value]:
        first = j * (s.elements * s.row_bytes)
        return [k.load(s.vector, p["scores"], first + i * s.row_bytes + s.lane_offset(v)) for i in range(s.elements)]

    def group(column: Value) -> None:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = new_sums(k, s, rows)

        def step(j: Value, alone: bool = False) -> None:
            d_scores = load_panel_row(k, s, p["d_scores"], j, range(s.vectors))
            seen = [product.seen_units(k, marks(j, v)) for v in range(s.vectors)] if predicated else None
            row = k.at(p["keys"], j * p["key_row"])

            keys = spread_columns(k, s, row, offsets)
            if alone:
                keys = ([k.splat(product.first_alone(k.load(s.unit, row, x)), s.lanes)] for x in offsets)
            add_outer(product, k, total, keys, [d_scores], seen)

        k.unrolled(0, whole, step)
        if s.elements > 1 and not predicated:
            with k.when(whole < units):  # the next key is hidden: it may be NaN
                step(whole, alone=True)
        for m, v, x in each_sum(total):
            at = k.at(p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
            k.store(k.load(s.vector, at) + x.get(), at)

    with k.range(0, p["width"], rows) as column:
        group(column)
    return k.finish()


# --- dK and dV


def into_keys(
    product: OuterProduct, module: Module, rows: int, vectors: int, *, exactly: bool = False, predicated: bool = False
) -> Any:
    """partial[keys, vectors] += weights[keys, lanes] @ rows[lanes, vectors] over the lanes of panels, ascending; or
    what a whole block adds joins the totals at once. `column`: bytes from the first one.

    A lane of the product is a column. `predicated`: a key leaves out lanes that do not see it, by `marks`.
    Row groups past the end write what nobody reads, but where keys are meant `exactly`: these repeat the last key, and
    write what it is written. (The addresses of `rows` keys at any distance cost a tenth of the speed.)
    """
    s, name = product.s, "predicated" if predicated else "exactly" if exactly else str(vectors)
    k = module.function(f"into_keys_{name}", prototype("sums* column"))
    p, x = k.p, Words(k, SUMS, k.p["sums"])
    last = x.keys - 1
    partial, panels, begin = k.at(k.pointer(x.partial), p["column"]), x.panels, x.begin.differs(0)

    def group(j: Value) -> None:
        """Keys from j on."""
        keys = [k.min(j + m, last) if exactly or predicated else j + m for m in range(rows)]
        accs = [k.at(partial, key * x.row) for key in keys]
        total = new_sums(k, s, rows, vectors)
        with k.when(x.join.differs(0)):
            at = k.at(k.pointer(x.total), j * x.total_row + k.p["column"])
            for m, v, _ in each_sum(total):
                k.prefetch(k.at(at, m * x.total_row + v * s.vector_bytes))
        with k.when(begin ^ 1):
            for m, v, one in each_sum(total):
                one.set(k.load(s.vector, accs[m], v * s.vector_bytes))
        with k.range(0, panels) as i:
            _add_panel(product, k, x, i, keys, total, predicated=predicated)
        with k.either(x.join.differs(0)) as (join, leave):
            with join:
                _join(k, s, x, j, total)
            with leave:
                for m, v, one in each_sum(total):
                    k.store(one.get(), accs[m], v * s.vector_bytes)

    with k.range(0, x.keys, rows) as j:
        group(j)
    return k.finish()


def _add_panel(
    product: OuterProduct, k: Function, x: Words, i: Value, keys: list[Value], total: Sums, *, predicated: bool
) -> None:
    """Adds what the i-th panel has for these keys."""
    s, vectors = product.s, len(total[0])
    pairs, panel = i * x.pair_bytes, k.pointer(x.panel + i * x.panel_bytes)
    weights = [k.at(k.pointer(x.weights), pairs + key * (s.row_bytes // s.elements)) for key in keys]
    seen_at = [k.at(k.pointer(x.marks), pairs + key * s.row_bytes) for key in keys] if predicated else []
    source = k.at(k.pointer(x.rows), i * x.panel_bytes + k.p["column"])
    first, end = (k.load(I64, panel, QUERY_ENDS.offset(name)) for name in ("first", "end"))
    row = x.row

    def marks(of: Value, t: Value) -> list[Value]:
        at = t * (s.elements * s.number_bytes)
        return [k.load(s.number, of, at + i * s.number_bytes) for i in range(s.elements)]

    def columns_of(t: Value) -> list[Value]:
        return [k.load(s.units, k.at(source, t * row), v * s.vector_bytes) for v in range(vectors)]

    def step(t: Value, count: int = 1) -> None:
        columns = [columns_of(t + i) for i in range(count)]
        add_outer(product, k, total, (spread(k, s, w, t * s.number_bytes, count) for w in weights), columns)

    def predicated_step(t: Value) -> None:
        columns = columns_of(t)
        for m, sums in enumerate(total):
            weight = k.splat(k.load(s.unit, weights[m], t * s.number_bytes), s.lanes)
            seen = k.splat(product.seen_units(k, marks(seen_at[m], t)), s.lanes)
            for one, column in zip(sums, columns, strict=True):
                one.set(product.multiply_add_seen(k, column, weight, one.get(), seen))

    ends = s.unit_of(first), s.count_units(end)
    if predicated:
        k.unrolled(*ends, predicated_step)
    else:
        take_steps(k, s, *ends, step)


def _join(k: Function, s: Shape, x: Words, j: Value, sums: Sums) -> None:
    """Adds sums to the totals of keys from j on; `fresh` ones are the totals; at the end, totals · factor go to out."""
    found = [(m, v, one.get()) for m, v, one in each_sum(sums)]
    at = k.at(k.pointer(x.total), j * x.total_row + k.p["column"])
    totals = [k.variable(one + k.const(0.0, s.vector)) for _, _, one in found]  # +0 where it is -0
    with k.when(x.fresh.equals(0)):
        for y, (m, v, one) in zip(totals, found, strict=True):
            y.set(k.load(s.vector, at, m * x.total_row + v * s.vector_bytes) + one)
    with k.either(x.end.differs(0)) as (last, more):
        with last:
            out = k.at(k.pointer(x.out), j * x.out_row + k.p["column"])
            word = x.factor.bits(F64) if s.wide else k.trunc(x.factor, I32).bits(F32)
            for y, (m, v, _) in zip(totals, found, strict=True):
                k.store(y.get() * k.splat(word, s.lanes), out, m * x.out_row + v * s.vector_bytes)
        with more:
            for y, (m, v, _) in zip(totals, found, strict=True):
                k.store(y.get(), at, m * x.total_row + v * s.vector_bytes)
