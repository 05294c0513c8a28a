"""Register tiles: score, softmax, value, merge. They know lanes and panels, nothing of heads, masks or threads.

A *panel* is `vectors` x `lanes` queries, one query per lane. Everything a panel needs lies lane-contiguous:

    q_panel [units, panel]    queries, transposed; a unit is one element (or one bf16 pair in the dot class)
    scores  [TILE, panel]     S = K Q, then P in its place (pairs of P in the dot class)
    state   [2 + width, panel] running_max, running_sum, then the accumulator, one row per value column

The order of every floating-point operation here is DESIGN section 3's canonical arithmetic; docs/numerics.md says it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from ..arrays import STORAGE_BYTES
from ..machine import Isa
from ..planning import BLOCK, TILE, lanes_of, register_rows, uses_dot
from . import conversions, functions
from .vector import BF16, F32, F64, I8, I16, I32, I64, PTR, Function, Module, Value, vec

# Weights are powers of 4: |log4 e · score| is below any finite |score|, so it is finite, which log2 e · score need not
# be. Above this |running_max| one rounding of the product moves an exponent visibly: the maximum is then rounded
# down and exponents are clamped at 0, so that the largest weight is exactly 1 for any finite score.
LARGE = 2.0**23
LN4 = 2 * 0.6931471805599453

# 2^f on [-1/2, 1/2] with value 1 at 0 (minimax, relative): errors 9.2e-8, 3.4e-18, and 1.0e-4 where P becomes bf16
_EXP2 = {
    "f32": (0.6931469774100962, 0.24022241711702084, 0.05550733819271004, 0.009671537837623517, 0.0013264795066351006),
    "f64": (
        0.69314718055994532581, 0.24022650695910131286, 0.055504108664820083029, 0.0096181291075941078627,
        0.0013333558146774620302, 0.00015403530457129508295, 0.000015252733493173796849, 1.3215435272716792343e-6,
        1.0178199533695840947e-7, 7.073785041023905453e-9, 4.4347798013903755776e-10,
    ),
    "dot": (0.69328331395880648, 0.24221155408455297, 0.055005948223862378),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """What a set of micro-kernels is specialised for."""

    isa: Isa
    storage: str  # type in memory: f32, f64, f16, bf16
    vectors: int  # query vectors of a panel; 0 for the decode kernel, whose lanes are keys
    program: Any = None  # the mask and score, a lower.Program
    cached: bool = (
        False  # keys and values lie as a cache keeps them: keys in lane order, values of the dot class in pairs
    )
    quantised: bool = False  # … as int8, with a scale per token and head ahead of every block

    @property
    def stem(self) -> str:
        """The readable part of the kernel's name."""
        if not self.vectors:
            return f"decode_{self.storage}_{self.isa.name}"
        return f"forward_{self.storage}_{self.isa.name}_{self.rows}x{self.vectors}"

    @property
    def dot(self) -> bool:
        """bf16 products by the dot instruction, over pairs."""
        return uses_dot(self.isa, self.storage) and not self.quantised

    @property
    def stored(self) -> str:
        """Type of keys and values in memory."""
        return "int8" if self.quantised else self.storage

    @property
    def stored_bytes(self) -> int:
        """Of one unit of a key in memory; where the dot class keeps values in pairs, of one of those."""
        return 1 if self.quantised else 4 if self.dot else self.storage_bytes

    @property
    def header(self) -> int:
        """Bytes of scales ahead of a block's elements."""
        return 4 * BLOCK if self.quantised else 0

    @property
    def piece(self) -> int:
        """Tokens that lie side by side in a tile of keys or values: one by one in rows, or a cache's block."""
        return BLOCK if self.cached else 1

    @property
    def wide(self) -> bool:
        return self.storage == "f64"

    @property
    def number(self) -> ir.Type:
        """What scores and sums are held in."""
        return F64 if self.wide else F32

    @property
    def number_bytes(self) -> int:
        return 8 if self.wide else 4

    @property
    def integer(self) -> ir.Type:
        return I64 if self.wide else I32

    @property
    def unit(self) -> ir.Type:
        """What is broadcast from a row of keys: one number, or one bf16 pair."""
        return I32 if self.dot else self.number

    @property
    def storage_bytes(self) -> int:
        return STORAGE_BYTES[self.storage]

    @property
    def lanes(self) -> int:
        return lanes_of(self.isa, self.storage)

    @property
    def panel(self) -> int:
        return self.lanes * self.vectors

    @property
    def rows(self) -> int:
        """Keys (or value columns) per register tile."""
        return register_rows(self.isa, self.vectors)

    @property
    def row_bytes(self) -> int:
        """One row of a panel-wide array."""
        return self.panel * self.number_bytes

    @property
    def vector(self) -> ir.VectorType:
        return vec(self.number, self.lanes)

    @property
    def ivector(self) -> ir.VectorType:
        return vec(self.integer, self.lanes)

    def lane_offset(self, v: int) -> int:
        return v * self.lanes * self.number_bytes


def multiply_add(k: Function, s: Shape, a: Value, b: Value, total: Value) -> Value:
    """total + a·b, or the dot class's total + a₁b₁ + a₀b₀ over packed bf16 pairs."""
    if not s.dot:
        return k.fma(a, b, total)
    pairs = vec(BF16, 2 * s.lanes)
    return k.intrinsic("llvm.x86.avx512bf16.dpbf16ps.512", s.vector, total, a.bits(pairs), b.bits(pairs))


def lowest_exponent(s: Shape) -> float:
    """4^x is +0 below: the result would be subnormal."""
    return -511.0 if s.wide else -63.0


def exp4(k: Function, s: Shape, xs: list[Value], *, any_x: bool) -> list[Value]:
    """4^x for x <= 0 (a little above is fine), several vectors in step. Integer arithmetic scales.

    In step, because one vector's chain of dependent operations would fill the CPU's scheduler before it ends.
    With `any_x`, +0 below the smallest normal exponent, and NaN stays. Without, the caller has proved that x is
    neither.
    """
    shift = 52 if s.wide else 23
    magic = k.const(
        1.5 * 2.0 ** (shift - 1), s.vector
    )  # adding it rounds to a half; how many halves lies in the low bits then
    ts = [x + magic for x in xs]
    rounded = [t - magic for t in ts]
    fs = [x - r for x, r in zip(xs, rounded, strict=True)]
    coefficients = [c * 2.0**n for n, c in enumerate(_EXP2["dot" if s.dot else "f64" if s.wide else "f32"], 1)]
    ps = [k.const(coefficients[-1], s.vector)] * len(xs)
    for c in (*coefficients[-2::-1], 1.0):
        ps = [k.fma(p, f, k.const(c, s.vector)) for p, f in zip(ps, fs, strict=True)]
    ys = [p.bits(s.ivector) + (t.bits(s.ivector) << shift) for p, t in zip(ps, ts, strict=True)]
    if not any_x:
        return [y.bits(s.vector) for y in ys]
    low, zero = lowest_exponent(s), k.const(0, s.ivector)
    zeroed = [k.select(x >= low, y, zero).bits(s.vector) for x, y in zip(xs, ys, strict=True)]
    return [k.select(x.differs(x), k.abs(x), y) for x, y in zip(xs, zeroed, strict=True)]


def accumulators(k: Function, s: Shape, rows: int) -> list[list[Any]]:
    return [[k.variable(k.const(0.0, s.vector)) for _ in range(s.vectors)] for _ in range(rows)]


def unrolled(k: Function, low: Value | int, high: Value, body: Any, by: int = 2) -> None:
    """body(index) over [low, high), `by` at a time: a short loop's end is predicted, a long one's is not."""
    start = low if isinstance(low, Value) else k.i64(low)
    middle = start + (high - start) // by * by
    with k.range(start, middle, by) as t:
        for i in range(by):
            body(t + i)
    with k.range(middle, high) as t:
        body(t)


def score_tile(module: Module, s: Shape, lines: Sequence[int] = ()) -> Any:
    """scores[n_keys, panel] = keys @ q_panel, one chain of multiply-adds over the units per element.

    Meanwhile brings in what the expression will read: `ahead` has the panel's addresses, once for each number of
    `lines`.

    check holds every lane's largest score, the sum (finite only if all scores are), and the smallest.
    Row groups past the end repeat the last key: what they write lies past n_keys.
    """
    params = {
        "scores": PTR,
        "q_panel": PTR,
        "keys": PTR,
        "key_row": I64,
        "n_keys": I64,
        "units": I64,
        "check": PTR,
        "ahead": PTR,
    }
    k = module.function("score_tile", params | _scales(s))
    p = k.p
    unit = s.number_bytes
    for v in range(s.vectors):
        k.store(k.const(float("-inf"), s.vector), p["check"], s.lane_offset(v))
        k.store(k.const(0.0, s.vector), p["check"], s.row_bytes + s.lane_offset(v))
        k.store(k.const(float("inf"), s.vector), p["check"], 2 * s.row_bytes + s.lane_offset(v))
    last = p["n_keys"] - 1
    with k.range(0, p["n_keys"], s.rows) as j:
        rows = [k.at(p["keys"], k.min(j + m, last) * p["key_row"]) for m in range(s.rows)]
        total = accumulators(k, s, s.rows)

        def step(t: Value, rows: list[Value] = rows, total: list[list[Any]] = total) -> None:
            query = [k.load(q_type(s), p["q_panel"], t * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            for m in range(s.rows):
                key = k.splat(k.load(s.unit, rows[m], t * unit), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, key, query[v], total[m][v].get()))

        for n, count in enumerate(lines):
            share = -(-s.panel * s.rows // TILE)  # of the panel's rows, for every group of keys
            lane = j // s.rows * share
            with k.range(lane, k.min(lane + share, k.i64(s.panel))) as i:
                place = k.load(PTR, p["ahead"], (i + n * s.panel) * 8)
                for line in range(count):
                    k.prefetch(k.at(place, line * 64))
        unrolled(k, 0, p["units"], step)
        out = k.at(p["scores"], j * s.row_bytes)
        for v in range(s.vectors):
            x = [total[m][v].get() for m in range(s.rows)]
            if s.quantised:
                x = [
                    each * k.splat(k.load(F32, p["scales"], k.min(j + m, last) * 4), s.lanes)
                    for m, each in enumerate(x)
                ]
            for m in range(s.rows):
                k.store(x[m], out, m * s.row_bytes + s.lane_offset(v))
            for i, combine in enumerate((k.max, lambda a, b: a + b, k.min)):
                place = k.at(p["check"], i * s.row_bytes + s.lane_offset(v))
                k.store(tree(x, combine, k.load(s.vector, place)), place)
    return k.finish()


def _scales(s: Shape) -> dict[str, ir.Type]:
    """The parameter of a quantised tile's scales, one f32 for each key."""
    return {"scales": PTR} if s.quantised else {}


def q_type(s: Shape) -> ir.VectorType:
    return vec(s.unit, s.lanes)


def tree(values: Sequence[Value], combine: Any, last: Value) -> Value:
    """Pairwise, so that no long chain forms; `last` joins at the end."""
    level = list(values)
    while len(level) > 1:
        level = [combine(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return combine(level[0], last)


def softmax_tile(module: Module, s: Shape) -> Any:
    """Scores become weights in place; running_max, running_sum and alpha are updated. Returns where predication starts.

    Keys below `full` are visible to every lane; lane i sees keys below limits[i] - tile_start. If the scores are
    finite, the maximum is below LARGE and no weight underflows, keys below `full` take the fast loop; all others
    take the careful one, which stands anything. There the weight of a hidden key is -0, which no visible key can have.
    """
    params = {
        "scores": PTR,
        "check": PTR,
        "state": PTR,
        "limits": PTR,
        "tile_start": I64,
        "full": I64,
        "n_keys": I64,
        "c": s.number,
    }
    k = module.function("softmax_tile", params | _scales(s), I64)
    p = k.p
    c = k.splat(p["c"], s.lanes)
    old = [k.load(s.vector, p["state"], s.lane_offset(v)) for v in range(s.vectors)]
    tops = [k.variable(k.max(k.load(s.vector, p["check"], s.lane_offset(v)) * c, x)) for v, x in enumerate(old)]
    limits = [_limits(k, s, v) for v in range(s.vectors)]
    finite = normal = k.const(1, ir.IntType(1))
    for v, top in enumerate(tops):
        total, lowest = (k.load(s.vector, p["check"], i * s.row_bytes + s.lane_offset(v)) for i in (1, 2))
        finite = finite & k.all(k.abs(total) < float("inf")) & k.all(k.abs(top.get()) < LARGE)
        normal = normal & k.all(k.fma(lowest, c, -top.get()) >= lowest_exponent(s))
    with k.when((finite ^ 1) | (p["full"] < p["n_keys"])):
        for v, top in enumerate(tops):
            top.set(_careful_max(k, s, c, old[v], limits[v], v, k.select(finite, p["full"], k.i64(0))))
    start = k.select(finite & normal, p["full"] & -2, k.i64(0))
    _weights(k, s, c, old, [top.get() for top in tops], limits, start)
    return k.finish(k.select(finite, p["full"], k.i64(0)))


def _limits(k: Function, s: Shape, v: int) -> Value:
    """How many keys of this tile each lane sees."""
    wide = vec(I64, s.lanes)
    x = k.load(wide, k.p["limits"], v * s.lanes * 8) - k.splat(k.p["tile_start"], s.lanes)
    x = k.max(k.min(x, k.const(TILE, wide)), k.const(0, wide))
    return x if s.wide else k.trunc(x, s.ivector)


def _seen(k: Function, s: Shape, x: Value, j: Value, limit: Value) -> Value:
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
        best.set(k.max(k.select(_seen(k, s, x, j, limit), x, lowest), best.get()))
    return largest(k, s, best.get(), c, old)


def largest(k: Function, s: Shape, best: Value, c: Value, old: Value) -> Value:
    """max(old, c · best), the product rounded down where it is LARGE."""
    product = best * c
    large = (k.abs(product) >= LARGE) & (k.abs(product) < float("inf"))
    above = k.fma(best, c, -product) < 0.0
    bits = product.bits(s.ivector)
    down = k.select(product > 0.0, bits - 1, bits + 1).bits(s.vector)
    return k.max(k.select(large & above, down, product), old)


def _weights(
    k: Function, s: Shape, c: Value, old: list[Value], top: list[Value], limits: list[Value], start: Value
) -> None:
    """Exponentials of one tile, its row sum, alpha, and the new running_max and running_sum.

    From key `start` on lanes are predicated, NaN is kept, exponents of LARGE rows are clamped. check gets alpha, then
    what a sum of values starts from: +0, or -0 in a lane that sees nothing here, whose accumulator it then leaves as it
    is.
    """
    p = k.p
    zero, hidden = k.const(0.0, s.vector), k.const(-0.0, s.vector)
    base = [k.select(t.equals(float("-inf")), zero, t) for t in top]  # an empty row must not make inf - inf
    total = [k.variable(hidden) for _ in range(s.vectors)]  # stays -0 where nothing is seen

    def weigh(j: Value, keys: int, careful: bool) -> list[list[Value]]:
        """[key][vector] of weights."""
        place = [(i, v) for i in range(keys) for v in range(s.vectors)]
        xs = [k.load(s.vector, p["scores"], (j + i) * s.row_bytes + s.lane_offset(v)) for i, v in place]
        es = [k.fma(x, c, -base[v]) for x, (_, v) in zip(xs, place, strict=True)]
        if careful:
            es = [k.select((k.abs(base[v]) >= LARGE) & (e > 0.0), zero, e) for e, (_, v) in zip(es, place, strict=True)]
        ws = exp4(k, s, es, any_x=careful)
        if careful:
            ws = [
                k.select(_seen(k, s, x, j + i, limits[v]), w, hidden)
                for w, x, (i, v) in zip(ws, xs, place, strict=True)
            ]
        return [ws[i * s.vectors : (i + 1) * s.vectors] for i in range(keys)]

    def step(j: Value, keys: int, careful: bool) -> None:
        """Keys j and j + 1; or an odd last key alone, whose partner in a pair weighs +0."""
        weights = weigh(j, keys, careful)
        for v in range(s.vectors):
            if s.dot:
                lone = hidden if s.cached else zero  # a cache may have anything in the place of a missing partner
                pair = bf16_pair(k, s, weights[0][v], weights[1][v] if keys == 2 else lone)
                k.store(pair, p["scores"], (j >> 1) * s.row_bytes + s.lane_offset(v))
                pair = pair if keys == 2 else bf16_pair(k, s, weights[0][v], hidden)
                total[v].set(multiply_add(k, s, k.const(0x3F803F80, s.ivector), pair, total[v].get()))
                continue
            for i in range(keys):
                weight = (
                    rescaled(k, s, weights[i][v], k.splat(k.load(F32, p["scales"], (j + i) * 4), s.lanes))
                    if s.quantised
                    else weights[i][v]
                )
                k.store(weight, p["scores"], (j + i) * s.row_bytes + s.lane_offset(v))
                total[v].set(total[v].get() + weights[i][v])

    with k.range(0, start, 2) as j:
        step(j, 2, careful=False)
    if s.dot:
        even = p["n_keys"] & -2
        with k.range(start, even, 2) as j:
            step(j, 2, careful=True)
        with k.when(even < p["n_keys"]):
            step(even, 1, careful=True)
    else:
        with k.range(start, p["n_keys"]) as j:
            step(j, 1, careful=True)
    for v in range(s.vectors):
        (alpha,) = exp4(k, s, [old[v] - base[v]], any_x=True)
        running_sum = k.load(s.vector, p["state"], s.row_bytes + s.lane_offset(v))
        k.store(top[v], p["state"], s.lane_offset(v))
        k.store(k.fma(running_sum, alpha, total[v].get()), p["state"], s.row_bytes + s.lane_offset(v))
        k.store(alpha, p["check"], s.lane_offset(v))
        sign = k.const(-(1 << (63 if s.wide else 31)), s.ivector)
        k.store(total[v].get().bits(s.ivector) & sign, p["check"], s.row_bytes + s.lane_offset(v))


def rescaled(k: Function, s: Shape, weight: Value, scale: Value) -> Value:
    """What a quantised value is multiplied by: weight · scale. The -0 of a hidden key stays, whatever its scale is."""
    return k.select(weight.bits(s.ivector) < 0, weight, k.abs(weight * scale))


def bf16_pair(k: Function, s: Shape, low: Value, high: Value) -> Value:
    """Two vectors rounded to bf16 (nearest even), lane by lane in one vector of pairs."""
    both = k.intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vec(BF16, 2 * s.lanes), high, low)
    words = both.bits(vec(I16, 2 * s.lanes))
    order = [lane + s.lanes * half for lane in range(s.lanes) for half in (0, 1)]
    return k.shuffle(words, words, order).bits(s.ivector)


def value_tile(module: Module, s: Shape) -> Any:
    """accumulator[column, :] = accumulator · alpha + Σ_j values[j, column] · weights[j, :], ascending j from +0.

    A step is one key, or a pair of keys in the dot class. Steps below `full` are visible to every lane; if there are
    more, the sums so far go to `partial` and predicated_tile continues. Columns past the width repeat the last one
    into rows that nothing reads.
    """
    k = module.function("value_tile", _VALUE_PARAMS)
    p = k.p
    last = p["width"] - 1
    with k.range(0, p["width"], s.rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(s.rows)]
        total = accumulators(k, s, s.rows)

        def step(j: Value, offsets: list[Value] = offsets, total: list[list[Any]] = total) -> None:
            weights = [k.load(q_type(s), p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(s.rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(multiply_add(k, s, value, weights[v], total[m][v].get()))

        unrolled(k, 0, p["full"], step)
        with k.either(p["full"].equals(p["steps"])) as (whole, rest):
            with whole:
                _accumulate(k, s, column, total)
            with rest:
                for m, v, total_mv in _each(total):
                    k.store(total_mv.get(), p["partial"], (column + m) * s.row_bytes + s.lane_offset(v))
    return k.finish()


_VALUE_PARAMS = {
    "acc": PTR, "weights": PTR, "values": PTR, "value_row": I64, "full": I64, "steps": I64, "width": I64, "alpha": PTR,
    "partial": PTR,
}  # fmt: skip


def predicated_tile(module: Module, s: Shape) -> Any:
    """Continues value_tile from `partial` over the steps [full, steps): a lane whose weight is -0 keeps its sum,

    whatever the value is (0 · NaN is NaN). Half as many rows, because conditions take registers too.
    """
    k = module.function("predicated_tile", _VALUE_PARAMS)
    p = k.p
    last, rows = p["width"] - 1, max(1, s.rows // 2)
    # without full steps value_tile has not run: softmax_tile left the start of every column beside alpha
    fresh = p["full"].equals(0)
    begin = Value(k, k.b.select(fresh.x, k.at(p["alpha"], s.row_bytes).x, p["partial"].x))
    begin_row = k.select(fresh, k.i64(0), k.i64(s.row_bytes))
    with k.range(0, p["width"], rows) as column:
        offsets = [k.min(column + m, last) * s.number_bytes for m in range(rows)]
        total = accumulators(k, s, rows)
        for m, v, total_mv in _each(total):
            total_mv.set(k.load(s.vector, begin, (column + m) * begin_row + s.lane_offset(v)))
        with k.range(p["full"], p["steps"]) as j:
            weights = [k.load(q_type(s), p["weights"], j * s.row_bytes + s.lane_offset(v)) for v in range(s.vectors)]
            seen = [_visible(k, s, w) for w in weights]
            row = k.at(p["values"], j * p["value_row"])
            for m in range(rows):
                value = k.splat(k.load(s.unit, row, offsets[m]), s.lanes)
                for v in range(s.vectors):
                    total[m][v].set(_value_step(k, s, value, weights[v], total[m][v].get(), seen[v]))
        _accumulate(k, s, column, total)
    return k.finish()


def _each(total: list[list[Any]]) -> Iterator[tuple[int, int, Any]]:
    for m, row in enumerate(total):
        for v, x in enumerate(row):
            yield m, v, x


def _accumulate(k: Function, s: Shape, column: Value, total: list[list[Any]]) -> None:
    for m, v, total_mv in _each(total):
        place = k.at(k.p["acc"], (column + m) * s.row_bytes + s.lane_offset(v))
        alpha = k.load(s.vector, k.p["alpha"], s.lane_offset(v))
        k.store(k.fma(k.load(s.vector, place), alpha, total_mv.get()), place)


def _visible(k: Function, s: Shape, weight: Value) -> Value:
    """Per lane: a condition, or in the dot class the bits of the visible halves."""
    if not s.dot:
        return weight.bits(s.ivector) > -1
    halves = weight.bits(vec(I16, 2 * s.lanes))
    return Value(k, k.b.not_(k.b.ashr(halves.x, k.const(15, halves.type).x))).bits(s.ivector)


def _value_step(k: Function, s: Shape, value: Value, weight: Value, total: Value, seen: Value) -> Value:
    if not s.dot:
        return k.select(seen, k.fma(value, weight, total), total)
    return k.select(seen.differs(0), multiply_add(k, s, value & seen, weight & seen, total), total)


def merge_states(module: Module, s: Shape) -> Any:
    """total ⊕ span: the first non-empty one is copied, later ones merged, empty ones skipped, lane by lane."""
    k = module.function("merge_states", {"total": PTR, "span": PTR, "width": I64})
    p = k.p
    keep, copy, first, second = [], [], [], []
    for v in range(s.vectors):
        at = s.lane_offset(v)
        m1, m2 = (k.load(s.vector, x, at) for x in (p["total"], p["span"]))
        l1, l2 = (k.load(s.vector, x, s.row_bytes + at) for x in (p["total"], p["span"]))
        keep.append(is_empty(m2, l2))
        copy.append(is_empty(m1, l1))
        top = k.max(m1, m2)
        base = k.select(top.equals(float("-inf")), k.const(0.0, s.vector), top)
        for factors, m in ((first, m1), (second, m2)):
            factors += exp4(k, s, [m - base], any_x=True)
        k.store(top, p["total"], at)
        k.store(merged(k, l1, l2, first[v], second[v], keep[v], copy[v]), p["total"], s.row_bytes + at)
    with k.range(2, p["width"] + 2) as row:
        for v in range(s.vectors):
            at = row * s.row_bytes + s.lane_offset(v)
            a1, a2 = (k.load(s.vector, x, at) for x in (p["total"], p["span"]))
            k.store(merged(k, a1, a2, first[v], second[v], keep[v], copy[v]), p["total"], at)
    return k.finish()


def is_empty(running_max: Value, running_sum: Value) -> Value:
    """Saw nothing: a maximum of -inf, and a sum that is 0 rather than NaN."""
    return running_max.equals(float("-inf")) & running_sum.equals(0.0)


def merged(k: Function, x1: Value, x2: Value, a1: Value, a2: Value, keep: Value, copy: Value) -> Value:
    both = k.fma(x2, a2, x1 * a1)
    return k.select(keep, x1, k.select(copy, x2, both))


def load_units(k: Function, s: Shape, row: Value, t: Value, *, stored: bool = False) -> Value:
    """`lanes` units from a row with unit stride, as the micro-kernels want them; of keys or values that are `stored`,
    or of q.
    """
    if s.dot:
        return k.load(s.ivector, row, t * 4)
    if stored and s.quantised:
        return k.to_float(Value(k, k.b.sext(k.load(vec(I8, s.lanes), row, t).x, s.ivector)), s.vector)
    return conversions.load(k, s.storage, row, t * s.storage_bytes, s.lanes)


def load_unit(
    k: Function, s: Shape, row: Value, t: Value, column: Value, count: Value, *, stored: bool = False
) -> Value:
    """One unit from a row of any stride; the missing half of an odd last pair is 0."""
    if stored and s.quantised:
        return k.to_float(Value(k, k.b.sext(k.load(I8, row, t * column).x, I32)), F32)
    if s.dot:
        second = t * 2 + 1
        low = k.zext(k.load(I16, row, t * 2 * column), I32)
        high = k.zext(k.load(I16, row, k.min(second, count - 1) * column), I32)
        return low | k.select(second < count, high << 16, k.const(0, I32))
    return conversions.load(k, s.storage, row, t * column)


def narrowed(k: Function, s: Shape, x: Value) -> Value:
    """A result in the storage type."""
    return conversions.narrowed(k, s.storage, x)


def natural_log(module: Module) -> Any:
    """ln x of one f64."""
    k = module.function("natural_log", {"x": F64}, F64)
    return k.finish(functions.natural_log(k, k.p["x"]))


def log_sum_exp(k: Function, s: Shape, log: Any, running_max: Value, running_sum: Value) -> Value:
    """ln 4 · max + ln sum of one row, rounded once. -inf says that nothing was seen, so rounding does not make it of a
    finite score.

    A sink of -inf is nothing, too: its sum is 1.
    """
    m, total = (x if s.wide else k.extend(x, F64) for x in (running_max, running_sum))
    most = k.const(1.7976931348623157e308 if s.wide else 3.4028234663852886e38, F64)
    lse = k.fma(m, k.const(LN4, F64), k.call(log, total))
    lse = k.max(-most, k.min(most, lse))  # NaN stays
    lse = k.select(m.equals(float("-inf")) & total.equals(total), k.const(float("-inf"), F64), lse)
    return lse if s.wide else k.narrow(lse, F32)
