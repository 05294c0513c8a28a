"""Micro-kernels in which a lane is a query: score, softmax, value. They know panels, nothing of heads,
masks or threads.

A *panel* is `vectors` x `lanes` queries. Everything a panel needs lies lane-contiguous:

    q_panel [units, panel]    queries, transposed; a unit is what a multiply-add step takes (products.py)
    scores  [TILE, panel]     S = K Q, then P in its place, by units
    state   [2 + width, panel] running_max, running_sum, then the accumulator, one row per value column

The order of every floating-point operation is fixed: docs/numerics.md, steps 1-5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from llvmlite import ir

from ..problem import TILE
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
    exp4,
    largest,
    lowest_exponent,
    rescaled,
)
from .upcoming import fetch_next
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


def fetching_keys(k: Function, s: Shape, j: Value, step: Callable[[Value], None]) -> None:
    """All steps of a register tile. Meanwhile keys from j on are fetched, a row in each of so many parts of the sum:
    a line for every two steps, as more at once would fill the places of misses.
    """
    ahead, part = k.at(k.p["keys"], j * k.p["key_row"]), k.p["units"] // s.rows & -2
    with k.range(0, s.rows) as m:
        row = k.at(ahead, m * k.p["key_row"])
        with k.range(0, part, 2) as t:
            k.prefetch(k.at(row, t * (s.rows * s.number_bytes)))
            step(m * part + t)
            step(m * part + t + 1)
    with k.range(part * s.rows, k.p["units"]) as t:
        step(t)


# --- scores

_SCORE_PARAMS = {
    "scores": PTR, "q_panel": PTR, "keys": PTR, "key_row": I64, "n_keys": I64, "units": I64, "check": PTR, "ahead": PTR,
    "a": PTR, "follows": I64, "upcoming": PTR,
}  # fmt: skip


def score_tile(module: Module, s: Shape, lines: Sequence[int] = ()) -> Any:
    """scores[n_keys, panel] = keys @ q_panel, one chain of multiply-adds over the units per element.

    Meanwhile brings in what the expression will read: `ahead` has the panel's addresses, once for each number of
    `lines`; and what the next task will, where one `follows`.

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
        fetch_next(k)
        if s.fetching.rows:
            fetching_keys(k, s, j + s.rows, step)
        else:
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
    """Scores become weights in place; running_max, running_sum and alpha are updated. Returns `full`, or 0 if all keys
    must be predicated.

    Keys [clear, full) are visible to every lane; lane i sees keys below limits[i] - tile_start. If the scores are
    finite, the maximum is below LARGE and no weight underflows, those keys take the fast loop; all others take the
    careful one, which stands anything. There the weight of a hidden key is -0, which no visible key can have.
    """
    params = {
        "scores": PTR, "check": PTR, "state": PTR, "limits": PTR, "tile_start": I64, "clear": I64, "full": I64,
        "n_keys": I64, "c": s.number,
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
    usual = LARGE + lowest_exponent(s) - 1  # without hidden keys a row's maximum may be lower, and LARGE
    for v, top in enumerate(tops):
        total, lowest = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in (1, 2))
        finite = finite & k.all(k.abs(total) < float("inf")) & k.all(k.abs(top.get()) < usual)
        normal = normal & k.all(k.fma(lowest, c, -top.get()) >= lowest_exponent(s))
    with k.when((finite ^ 1) | (p["clear"] > 0) | (p["full"] < p["n_keys"])):
        ends = [k.select(finite, p[x], k.i64(0)) for x in ("clear", "full")]
        for v, top in enumerate(tops):
            top.set(_careful_max(k, s, c, old[v], limits[v], v, ends))
    weights = _Weights(k, s, c, [top.get() for top in tops], limits)
    weights.add(finite & normal)
    weights.finish(old)
    return k.finish(k.select(finite, p["full"], k.i64(0)))


def limit_of(k: Function, s: Shape, v: int) -> Value:
    """How many keys of this tile each lane sees."""
    wide = vec(I64, s.lanes)
    x = k.load(wide, k.p["limits"], v * s.lanes * 8) - k.splat(k.p["tile_start"], s.lanes)
    x = k.max(k.min(x, k.const(TILE, wide)), k.const(0, wide))
    return x if s.wide else k.trunc(x, s.ivector)


def below(k: Function, s: Shape, j: Value, limit: Value) -> Value:
    """Which lanes see key j of a tile, if its score is not -inf."""
    return k.splat(j if s.wide else k.trunc(j, I32), s.lanes) < limit


def sees(k: Function, s: Shape, x: Value, j: Value, limit: Value) -> Value:
    """Visible and not -inf (NaN counts as visible)."""
    return below(k, s, j, limit) & x.differs(float("-inf"))


def _careful_max(k: Function, s: Shape, c: Value, old: Value, limit: Value, v: int, whole: list[Value]) -> Value:
    """max(old, c · largest visible score), rounded down where it is LARGE. Keys of `whole`, from and to, are finite and
    visible.
    """
    lowest = k.const(float("-inf"), s.vector)
    best = k.variable(lowest)

    def score(j: Value) -> Value:
        return k.load(s.vector, k.p["scores"], j * s.row_bytes + s.lane_offset(v))

    with k.range(whole[0], whole[1]) as j:
        best.set(k.max(score(j), best.get()))
    for ends in ((k.i64(0), whole[0]), (whole[1], k.p["n_keys"])):
        with k.range(*ends) as j:
            x = score(j)
            best.set(k.max(k.select(sees(k, s, x, j, limit), x, lowest), best.get()))
    return largest(k, s, best.get(), c, old)


# of keys: all are seen; or by lanes below their limits; and scores may be anything
_How = Literal["all", "seen", "careful"]


class _Weights:
    """Exponentials of one tile, its row sum, alpha, and the new running_max and running_sum; part of softmax_tile."""

    def __init__(self, k: Function, s: Shape, c: Value, top: list[Value], limits: list[Value]) -> None:
        self.k, self.s, self.c, self.top, self.limits = k, s, c, top, limits
        self.base = [base_of(k, s, t) for t in top]
        self.hidden = k.const(-0.0, s.vector)
        self.total = [k.variable(self.hidden) for _ in range(s.vectors)]  # stays -0 where nothing is seen

    def add(self, usual: Value) -> None:
        """All keys of a tile. Where scores are `usual`, so are those past a lane's limit; their weights are dropped."""
        k, p, together = self.k, self.k.p, self.s.elements
        first, end = p["clear"], p["full"] & -2
        whole = p["n_keys"] & -together
        with k.either(usual) as (as_usual, any_scores):
            with as_usual:
                if self.s.hides:
                    self._steps(k.i64(0), first, together, "seen")
                self._steps(first, end, 2, "all")
                self._steps(end, whole, together, "seen")
                self._last(whole, "seen")
            with any_scores:
                self._steps(k.i64(0), whole, together, "careful")
                self._last(whole, "careful")

    def _last(self, whole: Value, how: _How) -> None:
        if self.s.elements > 1:
            with self.k.when(whole < self.k.p["n_keys"]):
                self._step(whole, 1, how)

    def _steps(self, first: Value, end: Value, keys: int, how: _How) -> None:
        with self.k.range(first, end, keys) as j:
            self._step(j, keys, how)

    def _step(self, j: Value, keys: int, how: _How) -> None:
        """Keys j and j + 1; or one alone."""
        weights = self._weigh(j, keys, how)
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

    def _weigh(self, j: Value, keys: int, how: _How) -> list[list[Value]]:
        """[key][vector] of weights."""
        k, s = self.k, self.s
        each = [(i, v) for i in range(keys) for v in range(s.vectors)]
        xs = [k.load(s.vector, k.p["scores"], (j + i) * s.row_bytes + s.lane_offset(v)) for i, v in each]
        es = [k.fma(x, self.c, -self.base[v]) for x, (_, v) in zip(xs, each, strict=True)]
        if how == "careful":
            es = clamped(k, s, es, [self.base[v] for _, v in each])
        ws = exp4(k, s, es, any_x=how == "careful")
        if how != "all":
            shown = [below(k, s, j + i, self.limits[v]) for i, v in each]
            if how == "careful" or s.hides:  # what a mask hides has such a score
                shown = [y & x.differs(float("-inf")) for x, y in zip(xs, shown, strict=True)]
            ws = [k.select(y, w, self.hidden) for y, w in zip(shown, ws, strict=True)]
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
    "acc": PTR, "weights": PTR, "values": PTR, "value_row": I64, "first": I64, "end": I64, "steps": I64, "width": I64,
    "alpha": PTR, "partial": PTR,
}  # fmt: skip


def value_tile(module: Module, s: Shape) -> Any:
    """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], ascending j from +0.

    A step of j is a unit of keys. Steps [first, end) are visible to every lane; sums so far come from `partial` if
    there were steps before, and go there if there are more, where predicated_tile continues. Columns past the width
    repeat the last one into rows that nothing reads.
    """
    k = module.function("value_tile", _VALUE_PARAMS)
    p = k.p

    def group(column: Value, offsets: Sequence[Value | int]) -> None:
        """Columns from `column` on, at these bytes from it."""
        values, total = k.at(p["values"], column * s.number_bytes), accumulators(k, s, s.rows)
        if s.hides:
            with k.when(p["first"] > 0):
                _start(k, s, total, p["partial"], column, k.i64(s.row_bytes))

        def step(j: Value) -> None:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            row = k.at(values, j * p["value_row"])
            if s.fetching.rows:
                k.prefetch(k.at(row, p["value_row"] * s.fetching.rows))
            for m in range(s.rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, value, weights[v], total[m][v].get()))

        k.unrolled(p["first"], p["end"], step)
        _end(k, s, column, total)

    whole, last = p["width"] // s.rows * s.rows, p["width"] - 1
    with k.range(0, whole, s.rows) as column:
        group(column, [m * s.number_bytes for m in range(s.rows)])  # constants: a register each there would not be
    with k.when(whole < p["width"]):
        group(whole, [(k.min(whole + m, last) - whole) * s.number_bytes for m in range(s.rows)])
    return k.finish()


def predicated_tile(module: Module, s: Shape) -> Any:
    """What value_tile does, over steps of which a lane may see none: where its weight is -0 it keeps its sum, whatever
    the value is (0 · NaN is NaN). Conditions take registers too: of the widest panels half as many rows.
    """
    k = module.function("predicated_tile", _VALUE_PARAMS)
    p = k.p
    roomy = s.isa.registers >= 32 and s.vectors < 3
    last, rows = p["width"] - 1, s.rows if roomy else max(1, s.rows // 2)
    # the first steps: softmax_tile left the start of every column beside alpha
    fresh = p["first"].equals(0)
    begin = k.select(fresh, k.at(p["alpha"], s.row_bytes), p["partial"])
    begin_row = k.select(fresh, k.i64(0), k.i64(s.row_bytes))
    with k.range(0, p["width"], rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = accumulators(k, s, rows)
        _start(k, s, total, begin, column, begin_row)
        with k.range(p["first"], p["end"]) as j:
            weights = [k.load(s.units, p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            seen = [visible(k, s, w) for w in weights]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(visible_step(k, s, value, weights[v], total[m][v].get(), seen[v]))
        if s.hides:
            _end(k, s, column, total)
        else:
            _accumulate(k, s, column, total)  # nothing follows the end of what `causal` shows
    return k.finish()


def _start(k: Function, s: Shape, total: list[list[Variable]], begin: Value, column: Value, row: Value) -> None:
    """Sums so far, of a column every `row` bytes."""
    for m, v, total_mv in _each(total):
        total_mv.set(k.load(s.vector, begin, (column + m) * row + s.lane_offset(v)))


def _end(k: Function, s: Shape, column: Value, total: list[list[Variable]]) -> None:
    """Sums go to the accumulator, or to `partial` if there are more steps."""
    p = k.p
    with k.either(p["end"].equals(p["steps"])) as (whole, rest):
        with whole:
            _accumulate(k, s, column, total)
        with rest:
            for m, v, total_mv in _each(total):
                k.store(total_mv.get(), p["partial"], (column + m) * s.row_bytes + s.lane_offset(v))


def _accumulate(k: Function, s: Shape, column: Value, total: list[list[Variable]]) -> None:
    for m, v, total_mv in _each(total):
        at = k.at(k.p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
        alpha = k.load(s.vector, k.p["alpha"], s.lane_offset(v))
        k.store(k.fma(k.load(s.vector, at), alpha, total_mv.get()), at)
