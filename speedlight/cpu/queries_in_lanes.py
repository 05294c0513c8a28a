"""Micro-kernels in which a lane is a query: score, softmax, value, merge, store. They know panels, nothing of heads,
masks or threads.

A *panel* is `vectors` x `lanes` queries. Everything a panel needs lies lane-contiguous:

    q_panel [units, panel]    queries, transposed; a unit is what a multiply-add step takes (products.py)
    scores  [TILE, panel]     S = K Q, then P in its place, by units
    state   [2 + width, panel] running_max, running_sum, then the accumulator, one row per value column

The order of every floating-point operation is fixed: docs/numerics.md, steps 1-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from ..problem import TILE
from . import conversions
from .products import (
    add_weights,
    multiply_add,
    packed,
    unit_of,
    visible,
    visible_step,
)
from .shape import Shape
from .softmax import (
    LARGE,
    base_of,
    clamped,
    divided,
    exp4,
    is_empty,
    largest,
    log_sum_exp,
    lowest_exponent,
    merge_of,
    rescaled,
)
from .vector import F32, I32, I64, PTR, Function, Module, Value, Variable, vec


def _scales(s: Shape) -> dict[str, ir.Type]:
    """The parameter of a quantised tile's scales, one f32 for each key."""
    return {"scales": PTR} if s.quantised else {}


def accumulators(k: Function, s: Shape, rows: int, vectors: int = 0) -> list[list[Variable]]:
    """Sums of a register tile, +0 so far: [row][vector], of queries if it is not said how many."""
    return [[k.variable(k.const(0.0, s.vector)) for _ in range(vectors or s.vectors)] for _ in range(rows)]


def _each(total: list[list[Variable]]) -> Iterator[tuple[int, int, Variable]]:
    for m, row in enumerate(total):
        for v, x in enumerate(row):
            yield m, v, x


# --- scores

_SCORE_PARAMS = {
    "scores": PTR, "q_panel": PTR, "keys": PTR, "key_row": I64, "n_keys": I64, "units": I64, "check": PTR, "ahead": PTR,
}  # fmt: skip


def score_tile(module: Module, s: Shape, lines: Sequence[int] = ()) -> Any:
    """scores[n_keys, panel] = keys @ q_panel, one chain of multiply-adds over the units per element.

    Meanwhile brings in what the expression will read: `ahead` has the panel's addresses, once for each number of
    `lines`.

    check holds every lane's largest score, the sum (finite only if all scores are), and the smallest; where a score
    function follows, that says so of what it makes of them. Row groups past the end repeat the last key: what they
    write lies past n_keys.
    """
    k = module.function("score_tile", _SCORE_PARAMS | _scales(s))
    p = k.p
    checks = _Checks(k, s) if s.program is None or s.program.score is None else None
    last = p["n_keys"] - 1
    with k.range(0, p["n_keys"], s.rows) as j:
        rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]
        total = accumulators(k, s, s.rows)

        def step(t: Value, rows: list[Value] = rows, total: list[list[Variable]] = total) -> None:
            query = [k.load(s.units, p["q_panel"], t * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            for m in range(s.rows):
                key = k.splat(k.load(s.unit, rows[m], t * s.number_bytes), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, key, query[v], total[m][v].get()))

        _fetch_rows(k, s, lines, j)
        k.unrolled(0, p["units"], step)
        for v in range(s.vectors):
            scores = _stored_scores(k, s, j, v, [total[m][v].get() for m in range(s.rows)])
            if checks is not None:
                checks.add(v, scores)
    if checks is not None:
        checks.store()
    return k.finish()


class _Checks:
    """What softmax_tile asks of scores: each lane's largest, their sum, the smallest; part of score_tile."""

    def __init__(self, k: Function, s: Shape) -> None:
        self.k, self.s = k, s
        starts = float("-inf"), 0.0, float("inf")
        self.found = [[k.variable(k.const(x, s.vector)) for x in starts] for _ in range(s.vectors)]

    def add(self, v: int, scores: list[Value]) -> None:
        k = self.k
        for variable, combine in zip(self.found[v], (k.max, lambda a, b: a + b, k.min), strict=True):
            variable.set(_tree(scores, combine, variable.get()))

    def store(self) -> None:
        for v, found in enumerate(self.found):
            for i, x in enumerate(found):
                self.k.store(x.get(), self.k.p["check"], i * self.s.row_bytes + self.s.lane_offset(v))


def _fetch_rows(k: Function, s: Shape, lines: Sequence[int], j: Value) -> None:
    """Prefetches a share of the panel's rows of tables, for every group of keys."""
    for n, count in enumerate(lines):
        share = -(-s.panel * s.rows // TILE)
        lane = j // s.rows * share
        with k.range(lane, k.min(lane + share, k.i64(s.panel))) as i:
            row = k.load(PTR, k.p["ahead"], (i + n * s.panel) * 8)
            for line in range(count):
                k.prefetch(k.at(row, line * 64))


def _stored_scores(k: Function, s: Shape, j: Value, v: int, x: list[Value]) -> list[Value]:
    """Scores of keys j, j + 1, … against one vector of queries."""
    p = k.p
    if s.quantised:
        last = p["n_keys"] - 1
        x = [each * k.splat(k.load(F32, p["scales"], k.min(j + m, last) * 4), s.lanes) for m, each in enumerate(x)]
    out = k.at(p["scores"], j * s.row_bytes)
    for m, each in enumerate(x):
        k.store(each, out, m * s.row_bytes + s.lane_offset(v))
    return x


def _tree(values: Sequence[Value], combine: Callable[[Value, Value], Value], last: Value) -> Value:
    """Pairwise, so that no long chain forms; `last` joins at the end."""
    level = list(values)
    while len(level) > 1:
        level = [combine(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return combine(level[0], last)


# --- weights


def softmax_tile(module: Module, s: Shape) -> Any:
    """Scores become weights in place; running_max, running_sum and alpha are updated. Returns where predication starts.

    Keys below `full` are visible to every lane; lane i sees keys below limits[i] - tile_start. If the scores are
    finite, the maximum is below LARGE and no weight underflows, keys below `full` take the fast loop; all others
    take the careful one, which stands anything. There the weight of a hidden key is -0, which no visible key can have.
    """
    params = {
        "scores": PTR, "check": PTR, "state": PTR, "limits": PTR, "tile_start": I64, "full": I64, "n_keys": I64,
        "c": s.number,
    }  # fmt: skip
    if s.pads:
        params["missing"] = s.number  # what the partner of an odd last key weighs
    k = module.function("softmax_tile", params | _scales(s), I64)
    p = k.p
    c = k.splat(p["c"], s.lanes)
    old = [k.load(s.vector, p["state"], s.lane_offset(v)) for v in range(s.vectors)]
    tops = [k.variable(k.max(k.load(s.vector, p["check"], s.lane_offset(v)) * c, x)) for v, x in enumerate(old)]
    limits = [limit_of(k, s, v) for v in range(s.vectors)]
    finite = normal = k.const(1, ir.IntType(1))
    for v, top in enumerate(tops):
        total, lowest = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in (1, 2))
        finite = finite & k.all(k.abs(total) < float("inf")) & k.all(k.abs(top.get()) < LARGE)
        normal = normal & k.all(k.fma(lowest, c, -top.get()) >= lowest_exponent(s))
    with k.when((finite ^ 1) | (p["full"] < p["n_keys"])):
        for v, top in enumerate(tops):
            top.set(_careful_max(k, s, c, old[v], limits[v], v, k.select(finite, p["full"], k.i64(0))))
    start = k.select(finite & normal, p["full"] & -2, k.i64(0))
    weights = _Weights(k, s, c, [top.get() for top in tops], limits)
    weights.all_from(start)
    weights.finish(old)
    return k.finish(k.select(finite, p["full"], k.i64(0)))


def limit_of(k: Function, s: Shape, v: int) -> Value:
    """How many keys of this tile each lane sees."""
    wide = vec(I64, s.lanes)
    x = k.load(wide, k.p["limits"], v * s.lanes * 8) - k.splat(k.p["tile_start"], s.lanes)
    x = k.max(k.min(x, k.const(TILE, wide)), k.const(0, wide))
    return x if s.wide else k.trunc(x, s.ivector)


def sees(k: Function, s: Shape, x: Value, j: Value, limit: Value) -> Value:
    """Visible and not -inf (NaN counts as visible)."""
    index = k.splat(j if s.wide else k.trunc(j, I32), s.lanes)
    return (index < limit) & x.differs(float("-inf"))


def _careful_max(k: Function, s: Shape, c: Value, old: Value, limit: Value, v: int, full: Value) -> Value:
    """max(old, c · largest visible score), rounded down where it is LARGE. Keys below `full` are finite and visible."""
    lowest = k.const(float("-inf"), s.vector)
    best = k.variable(lowest)

    def score(j: Value) -> Value:
        return k.load(s.vector, k.p["scores"], j * s.row_bytes + s.lane_offset(v))

    with k.range(0, full) as j:
        best.set(k.max(score(j), best.get()))
    with k.range(full, k.p["n_keys"]) as j:
        x = score(j)
        best.set(k.max(k.select(sees(k, s, x, j, limit), x, lowest), best.get()))
    return largest(k, s, best.get(), c, old)


class _Weights:
    """Exponentials of one tile, its row sum, alpha, and the new running_max and running_sum; part of softmax_tile."""

    def __init__(self, k: Function, s: Shape, c: Value, top: list[Value], limits: list[Value]) -> None:
        self.k, self.s, self.c, self.top, self.limits = k, s, c, top, limits
        self.base = [base_of(k, s, t) for t in top]
        self.hidden = k.const(-0.0, s.vector)
        self.total = [k.variable(self.hidden) for _ in range(s.vectors)]  # stays -0 where nothing is seen

    def all_from(self, start: Value) -> None:
        """From key `start` on lanes are predicated, NaN is kept, exponents of LARGE rows are clamped."""
        k, n, together = self.k, self.k.p["n_keys"], self.s.elements
        with k.range(0, start, 2) as j:
            self._step(j, 2, careful=False)
        whole = n if together == 1 else n & -together
        with k.range(start, whole, together) as j:
            self._step(j, together, careful=True)
        if together > 1:
            with k.when(whole < n):
                self._step(whole, 1, careful=True)

    def _step(self, j: Value, keys: int, careful: bool) -> None:
        """Keys j and j + 1; or one alone."""
        weights = self._weigh(j, keys, careful)
        for v in range(self.s.vectors):
            for i in range(0, keys, self.s.elements):
                self._store(j + i, v, [x[v] for x in weights[i : i + self.s.elements]])

    def _store(self, j: Value, v: int, weights: list[Value]) -> None:
        """The weights of the unit of keys that begins with key j; the last one's may be incomplete.

        A missing partner weighs +0 beside the zeros past an array's end. It is hidden where there may be anything, and
        where its key is: +0 would change the sign of a sum that is -0.
        """
        k, s, total = self.k, self.s, self.total[v]
        missing = s.elements - len(weights)
        partner = self.hidden
        if missing and s.pads:
            sign = weights[0].bits(s.ivector) & self.hidden.bits(s.ivector)
            partner = (k.splat(k.p["missing"], s.lanes).bits(s.ivector) | sign).bits(s.vector)
        unit = packed(k, s, weights + [partner] * missing)
        stored = rescaled(k, s, unit, k.splat(k.load(F32, k.p["scales"], j * 4), s.lanes)) if s.quantised else unit
        k.store(stored, k.p["scores"], unit_of(s, j) * s.row_bytes + s.lane_offset(v))
        unit = packed(k, s, weights + [self.hidden] * missing) if missing else unit
        total.set(add_weights(k, s, unit, total.get()))

    def _weigh(self, j: Value, keys: int, careful: bool) -> list[list[Value]]:
        """[key][vector] of weights."""
        k, s = self.k, self.s
        each = [(i, v) for i in range(keys) for v in range(s.vectors)]
        xs = [k.load(s.vector, k.p["scores"], (j + i) * s.row_bytes + s.lane_offset(v)) for i, v in each]
        es = [k.fma(x, self.c, -self.base[v]) for x, (_, v) in zip(xs, each, strict=True)]
        if careful:
            es = clamped(k, s, es, [self.base[v] for _, v in each])
        ws = exp4(k, s, es, any_x=careful)
        if careful:
            ws = [
                k.select(sees(k, s, x, j + i, self.limits[v]), w, self.hidden)
                for w, x, (i, v) in zip(ws, xs, each, strict=True)
            ]
        return [ws[i * s.vectors : (i + 1) * s.vectors] for i in range(keys)]

    def finish(self, old: list[Value]) -> None:
        """Updates the state. check gets alpha, then what a sum of values starts from: +0, or -0 in a lane that sees
        nothing here, whose accumulator it then leaves as it is.
        """
        k, s, p = self.k, self.s, self.k.p
        for v in range(s.vectors):
            at, sum_at = s.lane_offset(v), s.row_bytes + s.lane_offset(v)
            (alpha,) = exp4(k, s, [old[v] - self.base[v]], any_x=True)
            running_sum = k.load(s.vector, p["state"], sum_at)
            total = self.total[v].get()
            k.store(self.top[v], p["state"], at)
            k.store(k.fma(running_sum, alpha, total), p["state"], sum_at)
            k.store(alpha, p["check"], at)
            sign = k.const(-(1 << (63 if s.wide else 31)), s.ivector)
            k.store(total.bits(s.ivector) & sign, p["check"], sum_at)


# --- values

_VALUE_PARAMS = {
    "acc": PTR, "weights": PTR, "values": PTR, "value_row": I64, "full": I64, "steps": I64, "width": I64, "alpha": PTR,
    "partial": PTR,
}  # fmt: skip


def value_tile(module: Module, s: Shape) -> Any:
    """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], ascending j from +0.

    A step of j is a unit of keys. Steps below `full` are visible to every lane; if there are more, the sums so far go
    to `partial` and predicated_tile continues. Columns past the width repeat the last one into rows that nothing reads.
    """
    k = module.function("value_tile", _VALUE_PARAMS)
    p = k.p
    last = p["width"] - 1
    with k.range(0, p["width"], s.rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(s.rows)]
        total = accumulators(k, s, s.rows)

        def step(j: Value, offsets: list[Value] = offsets, total: list[list[Variable]] = total) -> None:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(s.rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, value, weights[v], total[m][v].get()))

        k.unrolled(0, p["full"], step)
        with k.either(p["full"].equals(p["steps"])) as (whole, rest):
            with whole:
                _accumulate(k, s, column, total)
            with rest:
                for m, v, total_mv in _each(total):
                    k.store(total_mv.get(), p["partial"], (column + m) * s.row_bytes + s.lane_offset(v))
    return k.finish()


def predicated_tile(module: Module, s: Shape) -> Any:
    """Continues value_tile from `partial` over the steps [full, steps): a lane whose weight is -0 keeps its sum,
    whatever the value is (0 · NaN is NaN). Conditions take registers too: of the widest panels half as many rows.
    """
    k = module.function("predicated_tile", _VALUE_PARAMS)
    p = k.p
    roomy = s.isa.registers >= 32 and s.vectors < 3
    last, rows = p["width"] - 1, s.rows if roomy else max(1, s.rows // 2)
    # without full steps value_tile has not run: softmax_tile left the start of every column beside alpha
    fresh = p["full"].equals(0)
    begin = k.select(fresh, k.at(p["alpha"], s.row_bytes), p["partial"])
    begin_row = k.select(fresh, k.i64(0), k.i64(s.row_bytes))
    with k.range(0, p["width"], rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = accumulators(k, s, rows)
        for m, v, total_mv in _each(total):
            total_mv.set(k.load(s.vector, begin, (column + m) * begin_row + s.lane_offset(v)))
        with k.range(p["full"], p["steps"]) as j:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            seen = [visible(k, s, w) for w in weights]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(visible_step(k, s, value, weights[v], total[m][v].get(), seen[v]))
        _accumulate(k, s, column, total)
    return k.finish()


def _accumulate(k: Function, s: Shape, column: Value, total: list[list[Variable]]) -> None:
    for m, v, total_mv in _each(total):
        at = k.at(k.p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
        alpha = k.load(s.vector, k.p["alpha"], s.lane_offset(v))
        k.store(k.fma(k.load(s.vector, at), alpha, total_mv.get()), at)


# --- states


def clear_state(k: Function, s: Shape, state: Value, rows: Value) -> None:
    """(-inf, 0, 0): a state of `rows` rows that has seen nothing."""
    for v in range(s.vectors):
        k.store(k.const(float("-inf"), s.vector), state, s.lane_offset(v))
    with k.range(1, rows) as row:
        for v in range(s.vectors):
            k.store(k.const(0.0, s.vector), state, row * s.row_bytes + s.lane_offset(v))


def merge_states(module: Module, s: Shape) -> Any:
    """total ⊕ span: the first non-empty one is copied, later ones merged, empty ones skipped, lane by lane."""
    k = module.function("merge_states", {"total": PTR, "span": PTR, "width": I64})
    p = k.p
    merges = []
    for v in range(s.vectors):
        at = s.lane_offset(v)
        first, second = (
            (k.load(s.vector, x, at), k.load(s.vector, x, s.row_bytes + at)) for x in (p["total"], p["span"])
        )
        merges.append(merge := merge_of(k, s, first, second))
        k.store(merge.top, p["total"], at)
        k.store(merge.of(first[1], second[1]), p["total"], s.row_bytes + at)
    with k.range(2, p["width"] + 2) as row:
        for v, merge in enumerate(merges):
            at = row * s.row_bytes + s.lane_offset(v)
            a1, a2 = (k.load(s.vector, x, at) for x in (p["total"], p["span"]))
            k.store(merge.of(a1, a2), p["total"], at)
    return k.finish()


def store_panel(module: Module, s: Shape, log: Any) -> Any:
    """Outputs and log-sum-exps of the first `count` lanes, to the rows named by tables of pointers."""
    params = {"state": PTR, "table": PTR, "lse_table": PTR, "count": I64, "width": I64, "column": I64}
    k = module.function("store_panel", params | ({"divisor": s.number} if s.dropout else {}))
    p = k.p
    acc = k.at(p["state"], 2 * s.row_bytes)
    with k.range(0, s.vectors) as v:
        at = v * s.vector_bytes
        m, running_sum = k.load(s.vector, p["state"], at), k.load(s.vector, p["state"], at + s.row_bytes)
        empty = is_empty(m, running_sum)
        by = running_sum * k.splat(p["divisor"], s.lanes) if s.dropout else running_sum
        with k.range(0, p["width"]) as c:
            x = k.load(s.vector, acc, c * s.row_bytes + at)
            k.store(divided(k, s, x, by, empty), acc, c * s.row_bytes + at)
        _store_rows(k, s, v, acc)
    with k.when(k.load(I64, p["lse_table"]).differs(0)), k.range(0, p["count"]) as lane:
        m, running_sum = (k.load(s.number, p["state"], i * s.row_bytes + lane * s.number_bytes) for i in (0, 1))
        k.store(log_sum_exp(k, s, log, m, running_sum), k.load(PTR, p["lse_table"], lane * 8))
    return k.finish()


def _store_rows(k: Function, s: Shape, v: Value, acc: Value) -> None:
    """One vector of queries' outputs, [width, lanes] of `acc`: transposed where all lanes are rows of unit stride."""
    p, at, first = k.p, v * s.vector_bytes, v * s.lanes
    unit = p["column"].equals(s.storage_bytes) & (p["count"] >= first + s.lanes)
    end = k.select(unit, p["width"] // s.lanes * s.lanes, k.i64(0))
    with k.range(0, end, s.lanes) as c:
        rows = k.transpose([k.load(s.vector, acc, (c + i) * s.row_bytes + at) for i in range(s.lanes)])
        for lane, x in enumerate(rows):
            x = conversions.narrowed(k, s.storage, x)
            k.store(x, k.load(PTR, p["table"], (first + lane) * 8), c * s.storage_bytes)
    with k.range(first, k.min(p["count"], first + s.lanes)) as lane:
        row = k.load(PTR, p["table"], lane * 8)
        with k.range(end, p["width"]) as c:
            x = k.load(s.number, acc, c * s.row_bytes + lane * s.number_bytes)
            k.store(conversions.narrowed(k, s.storage, x), row, c * p["column"])
