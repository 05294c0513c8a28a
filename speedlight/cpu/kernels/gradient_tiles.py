"""Micro-kernels of the backward pass, on one panel of queries and one tile of keys. They know nothing of heads or
threads.

    queries, gradients  [units, panel]   Q and dO, transposed: a lane is a query
    scores              [TILE, panel]    S = K Q, then P in its place; -0 marks what is hidden
    flows               [TILE, panel]    dP = V dO, then dS in its place, +0 where hidden
    rows                [panel, width]   Q and dO as they are: a lane is a column
    partials            [TILE, width]    what this block of queries adds to dK and dV

dQ += Kᵀ dS has queries in its lanes, dV += P dO and dK += dS Q have columns; P and dS are then broadcast from scratch.
Where two are multiplied as pairs, P and dS are rounded to bf16 and kept once more: pairs of keys for dQ, rows for dK
and dV. The order of every operation is fixed: docs/numerics.md, "Gradients".
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ...problem.problem import FAR_LSE
from ..language.vector import F32, F64, I32, I64, PTR, Function, Module, Value, Variable
from ..memory.records import QUERY_ENDS, SUMS
from ..memory.shape import Shape
from ..products.products import first_alone, multiply_add, packed, rounded, seen_units, unit_of, units_of, visible_step
from .panel_products import accumulators, fetching_keys
from .panel_weights import limit_of, sees
from .softmax import LOG4_E, exp4, lowest_exponent
from .task import Words

# --- S and dP


def product(module: Module, s: Shape) -> Any:
    """out[n_keys, panel] = keys @ panel, one chain of multiply-adds over the units per element; in `check` each lane's
    sum, which is finite only if all are.

    Row groups past the end repeat the last key: what they write lies past n_keys.
    """
    names = ("key_row", "n_keys", "units")
    k = module.function("product", {"out": PTR, "panel": PTR, "keys": PTR} | dict.fromkeys(names, I64) | {"check": PTR})
    p = k.p
    for v in range(s.vectors):
        k.store(k.const(0.0, s.vector), p["check"], s.lane_offset(v))
    last = p["n_keys"] - 1
    with k.range(0, p["n_keys"], s.rows) as j:
        rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]
        total = accumulators(k, s, s.rows)

        def step(t: Value, rows: list[Value] = rows, total: list[list[Variable]] = total) -> None:
            query = [k.load(s.units, p["panel"], t * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            for m in range(s.rows):
                key = k.splat(k.load(s.unit, rows[m], t * s.number_bytes), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, key, query[v], total[m][v].get()))

        fetching_keys(k, s, j + s.rows, step)  # 1.1 times as fast from the third-level cache
        for v in range(s.vectors):
            at = k.at(p["check"], s.lane_offset(v))
            every = k.load(s.vector, at)
            for m in range(s.rows):
                x = total[m][v].get()
                k.store(x, p["out"], (j + m) * s.row_bytes + s.lane_offset(v))
                every = every + x
            k.store(every, at)
    return k.finish()


def dot_of_panels(module: Module, s: Shape) -> Any:
    """delta[lane] = Σ a · b over the units of two panels, ascending from +0, less what is there already."""
    k = module.function("dot_of_panels", {"delta": PTR, "a": PTR, "b": PTR, "units": I64})
    p = k.p
    for v in range(s.vectors):
        total = k.variable(k.const(0.0, s.vector))
        with k.range(0, p["units"]) as t:
            a, b = (k.load(s.units, p[x], t * s.row_bytes + s.lane_offset(v)) for x in ("a", "b"))
            total.set(multiply_add(k, s, a, b, total.get()))
        k.store(total.get() - k.load(s.vector, p["delta"], s.lane_offset(v)), p["delta"], s.lane_offset(v))
    return k.finish()


# --- P and dS


class Weights:
    """The function that makes P of S and dS of dP; what it needs to know of each lane comes in `stats` and `limits`.

    stats: lse, then delta [panel] in the type of numbers. limits: lane i sees keys below limits[i] - tile_start.
    check: [5, panel], of scores as an expression left them the largest, their sum and the least; then sums of S and dP.
    """

    def __init__(self, module: Module, s: Shape, *, last: bool) -> None:
        """`last`: nothing else changes P or dS, so units of them are made here."""
        params = {"scores": PTR, "flows": PTR, "stats": PTR, "limits": PTR, "check": PTR}
        params |= dict.fromkeys(("tile_start", "full", "n_keys"), I64) | {"scale": s.number}
        self.makes_units = last and s.elements > 1
        params |= dict.fromkeys(UNITS, PTR) if self.makes_units else {}
        self.k = k = module.function("weights", params, I64)
        self.s, p = s, k.p
        self.far = FAR_LSE["float64" if s.wide else "float32"]
        self.scale = None if s.program and s.program.score else k.splat(p["scale"], s.lanes)
        self.lse, self.delta = (
            [k.load(s.vector, p["stats"], i * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            for i in range(2)
        )
        self.limits = [limit_of(k, s, v) for v in range(s.vectors)]

    def function(self) -> Any:
        """Returns 1 where products must look at every pair: something is hidden, and something is not finite.

        Keys below `full` are visible to every lane.
        """
        k, s, p = self.k, self.s, self.k.p
        normal = products = k.const(1, ir.IntType(1))
        for v in range(s.vectors):
            score, raw, flow = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in (1, 3, 4))
            normal = normal & k.all(k.abs(raw if self.scale else score) < float("inf"))
            normal = normal & k.all(k.abs(self.lse[v]) < self.far)
            products = products & k.all(k.abs(raw) < float("inf")) & k.all(k.abs(flow) < float("inf"))
        start = k.select(normal, p["full"] & -2, k.i64(0))
        with k.range(0, start, 2) as j:
            self._step(j, 2, careful=False)
        whole = p["n_keys"] if s.elements == 1 else p["n_keys"] & -s.elements
        with k.range(start, whole, s.elements) as j:
            self._step(j, s.elements, careful=True)
        if s.elements > 1:
            with k.when(whole < p["n_keys"]):
                self._step(whole, 1, careful=True)
        plain = products | (normal & (p["full"] >= p["n_keys"]))  # a score of -inf hides, too
        return k.finish(k.zext(plain ^ 1, I64))

    def _step(self, j: Value, keys: int, careful: bool) -> None:
        """Keys j and j + 1; or one alone."""
        k, s, p = self.k, self.s, self.k.p
        each = [(i, v) for i in range(keys) for v in range(s.vectors)]
        at = [(j + i) * s.row_bytes + s.lane_offset(v) for i, v in each]
        scores = [k.load(s.vector, p["scores"], x) for x in at]
        ps = self._weights(scores, [self.lse[v] for _, v in each], careful)
        flows = [k.load(s.vector, p["flows"], x) for x in at]
        flows = [(dp - self.delta[v]) * y for dp, y, (_, v) in zip(flows, ps, each, strict=True)]
        if careful:
            seen = [sees(k, s, x, j + i, self.limits[v]) for x, (i, v) in zip(scores, each, strict=True)]
            ps = [k.select(m, y, k.const(-0.0, s.vector)) for m, y in zip(seen, ps, strict=True)]
            flows = [k.select(m, y, k.const(0.0, s.vector)) for m, y in zip(seen, flows, strict=True)]
        for x, y, ds in zip(at, ps, flows, strict=True):
            k.store(y, p["scores"], x)
            k.store(ds, p["flows"], x)
        if self.makes_units:
            n = s.vectors
            for i in range(0, keys, s.elements):
                these = slice(i * n, (i + s.elements) * n)
                store_units(k, s, j + i, ps[these], flows[these])

    def _weights(self, scores: list[Value], lses: list[Value], careful: bool) -> list[Value]:
        """P. The difference is taken before it is scaled: near lse there is then nothing to lose."""
        k, s = self.k, self.s
        most, zero = (k.const(x, s.vector) for x in (512.0 if s.wide else 64.0, 0.0))  # 4 to that power is inf
        if self.scale is None:
            xs = [x - lse for x, lse in zip(scores, lses, strict=True)]
        else:
            xs = [k.fma(x, self.scale, -lse) for x, lse in zip(scores, lses, strict=True)]
        xs = [x * LOG4_E for x in xs]
        if careful:
            mosts = [k.select(k.abs(lse) >= self.far, zero, most) for lse in lses]
            return exp4(k, s, [k.select(x > y, y, x) for x, y in zip(xs, mosts, strict=True)], any_x=True)
        ps = exp4(k, s, [k.select(x > most, most, x) for x in xs], any_x=False)
        low = lowest_exponent(s)
        return [k.select(x >= low, y, zero) for x, y in zip(xs, ps, strict=True)]


UNITS = ("p_units", "ds_units", "flow_units")  # P and dS in units of queries, and dS in units of keys


def store_units(k: Function, s: Shape, j: Value, ps: list[Value], flows: list[Value]) -> None:
    """P and dS of one unit of keys from key j on, [key][vector], once more in units. A missing key is a hidden one."""
    p, n = k.p, s.vectors
    for i in range(len(ps)):
        row = (j + i // n) * (s.row_bytes // s.elements) + s.lane_offset(i % n) // s.elements
        k.store(rounded(k, s, ps[i]), p["p_units"], row)
        k.store(rounded(k, s, flows[i]), p["ds_units"], row)
    missing = s.elements - len(ps) // n
    for v in range(n):
        unit = packed(k, s, flows[v::n] + [k.const(0.0, s.vector)] * missing)
        k.store(unit, p["flow_units"], unit_of(s, j) * s.row_bytes + s.lane_offset(v))
        if missing:
            k.store(k.const(-0.0, s.vector), p["scores"], (j + 1) * s.row_bytes + s.lane_offset(v))


def make_units(module: Module, s: Shape) -> Any:
    """store_units() of all keys, once P and dS are what they will be."""
    k = module.function("make_units", {"scores": PTR, "flows": PTR, "n_keys": I64} | dict.fromkeys(UNITS, PTR))
    p = k.p

    def unit(j: Value, keys: int) -> None:
        at = [(j + i) * s.row_bytes + s.lane_offset(v) for i in range(keys) for v in range(s.vectors)]
        store_units(k, s, j, *([k.load(s.vector, p[x], y) for y in at] for x in ("scores", "flows")))

    whole = p["n_keys"] & -s.elements
    with k.range(0, whole, s.elements) as j:
        unit(j, s.elements)
    with k.when(whole < p["n_keys"]):
        unit(whole, 1)
    return k.finish()


# --- dQ


def into_queries(module: Module, s: Shape, *, predicated: bool) -> Any:
    """acc[column, :] += Σ_j keys[j, column] · flows[j, :], ascending j from +0; a step is a unit of `n_keys` keys.

    `predicated`: a lane leaves out keys that it does not see, by the marks in `scores`.
    Columns past the width repeat the last one into rows that nothing reads.
    """
    names = ("key_row", "n_keys", "width")
    params = {"acc": PTR, "flows": PTR, "keys": PTR} | dict.fromkeys(names, I64) | {"scores": PTR}
    k = module.function("into_queries" + "_predicated" * predicated, params)
    p = k.p
    last, rows = p["width"] - 1, max(1, s.rows // 2) if predicated else s.rows
    units = units_of(s, p["n_keys"])
    whole = units if predicated else unit_of(s, p["n_keys"])  # a missing key is marked as hidden

    def marks(j: Value, v: int) -> list[Value]:
        first = j * (s.elements * s.row_bytes)
        return [k.load(s.vector, p["scores"], first + i * s.row_bytes + s.lane_offset(v)) for i in range(s.elements)]

    with k.range(0, p["width"], rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = accumulators(k, s, rows)

        def step(
            j: Value, offsets: list[Value] = offsets, total: list[list[Variable]] = total, alone: bool = False
        ) -> None:
            flows = [k.load(s.units, p["flows"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            seen = [seen_units(k, s, marks(j, v)) for v in range(s.vectors)] if predicated else []
            row = k.at(p["keys"], j * p["key_row"])
            for m in range(rows):
                unit = k.load(s.unit, row, offsets[m])
                key = k.splat(first_alone(s, unit) if alone else unit, s.lanes)
                for v in range(s.vectors):
                    x = total[m][v].get()
                    new = (
                        visible_step(k, s, key, flows[v], x, seen[v])
                        if predicated
                        else multiply_add(k, s, key, flows[v], x)
                    )
                    total[m][v].set(new)

        k.unrolled(0, whole, step)
        if s.elements > 1 and not predicated:
            with k.when(whole < units):  # the next key is hidden: it may be NaN
                step(whole, alone=True)
        for m in range(rows):
            for v in range(s.vectors):
                at = k.at(p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
                k.store(k.load(s.vector, at) + total[m][v].get(), at)
    return k.finish()


# --- dK and dV


def into_keys(
    module: Module, s: Shape, rows: int, vectors: int, *, exactly: bool = False, predicated: bool = False
) -> Any:
    """partial[keys, vectors] += weights[keys, lanes] @ rows[lanes, vectors] over the lanes of panels, ascending; or
    what a whole block adds joins the totals at once. `column`: bytes from the first one.

    A lane of the product is a column. `predicated`: a key leaves out lanes that do not see it, by `marks`.
    Row groups past the end write what nobody reads, but where keys are meant `exactly`: these repeat the last key, and
    write what it is written. (The addresses of `rows` keys at any distance cost a tenth of the speed.)
    """
    name = "predicated" if predicated else "exactly" if exactly else str(vectors)
    k = module.function(f"into_keys_{name}", {"sums": PTR, "column": I64})
    p, x = k.p, Words(k, SUMS, k.p["sums"])
    last = x.keys - 1
    partial, panels, begin = k.at(k.pointer(x.partial), p["column"]), x.panels, x.begin.differs(0)

    def marks(of: Value, t: Value) -> list[Value]:
        at = t * (s.elements * s.number_bytes)
        return [k.load(s.number, of, at + i * s.number_bytes) for i in range(s.elements)]

    with k.range(0, x.keys, rows) as j:
        keys = [k.min(j + m, last) if exactly or predicated else j + m for m in range(rows)]
        accs = [k.at(partial, key * x.row) for key in keys]
        total = accumulators(k, s, rows, vectors)
        with k.when(x.join.differs(0)):
            at = k.at(k.pointer(x.total), j * x.total_row + k.p["column"])
            for m in range(rows):
                for v in range(vectors):
                    k.prefetch(k.at(at, m * x.total_row + v * s.vector_bytes))
        with k.when(begin ^ 1):
            for m in range(rows):
                for v in range(vectors):
                    total[m][v].set(k.load(s.vector, accs[m], v * s.vector_bytes))
        with k.range(0, panels) as i:
            pairs, panel = i * x.pair_bytes, k.pointer(x.panel + i * x.panel_bytes)
            weights = [k.at(k.pointer(x.weights), pairs + key * (s.row_bytes // s.elements)) for key in keys]
            seen_at = [k.at(k.pointer(x.marks), pairs + key * s.row_bytes) for key in keys] if predicated else []
            source = k.at(k.pointer(x.rows), i * x.panel_bytes + p["column"])
            first, end = (k.load(I64, panel, QUERY_ENDS.offset(name)) for name in ("first", "end"))

            def step(
                t: Value,
                source: Value = source,
                row: Value = x.row,
                weights: list[Value] = weights,
                seen_at: list[Value] = seen_at,
                total: list[list[Variable]] = total,
            ) -> None:
                columns = [k.load(s.units, k.at(source, t * row), v * s.vector_bytes) for v in range(vectors)]
                for m in range(rows):
                    weight = k.splat(k.load(s.unit, weights[m], t * s.number_bytes), s.lanes)
                    seen = k.splat(seen_units(k, s, marks(seen_at[m], t)), s.lanes) if predicated else None
                    for v in range(vectors):
                        y = total[m][v].get()
                        if seen is None:
                            y = multiply_add(k, s, weight, columns[v], y)
                        else:
                            y = visible_step(k, s, columns[v], weight, y, seen)
                        total[m][v].set(y)

            k.unrolled(unit_of(s, first), units_of(s, end), step)
        with k.either(x.join.differs(0)) as (join, leave):
            with join:
                _join(k, s, x, j, [[y.get() for y in row] for row in total])
            with leave:
                for m in range(rows):
                    for v in range(vectors):
                        k.store(total[m][v].get(), accs[m], v * s.vector_bytes)
    return k.finish()


def _join(k: Function, s: Shape, x: Words, j: Value, sums: list[list[Value]]) -> None:
    """Totals of keys from j on are `sums` if `fresh`, else joined by them; at the `end` times `factor`, in out."""
    places = [(m, v) for m in range(len(sums)) for v in range(len(sums[0]))]
    at = k.at(k.pointer(x.total), j * x.total_row + k.p["column"])
    totals = [k.variable(sums[m][v] + k.const(0.0, s.vector)) for m, v in places]  # +0 where it is -0
    with k.when(x.fresh.equals(0)):
        for y, (m, v) in zip(totals, places, strict=True):
            y.set(k.load(s.vector, at, m * x.total_row + v * s.vector_bytes) + sums[m][v])
    with k.either(x.end.differs(0)) as (last, more):
        with last:
            out = k.at(k.pointer(x.out), j * x.out_row + k.p["column"])
            word = x.factor.bits(F64) if s.wide else k.trunc(x.factor, I32).bits(F32)
            for y, (m, v) in zip(totals, places, strict=True):
                k.store(y.get() * k.splat(word, s.lanes), out, m * x.out_row + v * s.vector_bytes)
        with more:
            for y, (m, v) in zip(totals, places, strict=True):
                k.store(y.get(), at, m * x.total_row + v * s.vector_bytes)
