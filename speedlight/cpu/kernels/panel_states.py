"""Micro-kernels for the state of a panel: cleared, merged, stored as outputs; brought in and out where a problem has a
part of the keys.

There, of each row its accumulator lies as its output does, in numbers instead of the storage type; its running_max and
running_sum, side by side, as its log-sum-exp does. All arguments are records.FORWARD's.
"""

from __future__ import annotations

from typing import Any

from ..language import conversions
from ..language.prototypes import prototype
from ..language.vector import I64, PTR, Function, Module, Value
from ..memory.records import FORWARD, STATE_SUMS
from ..memory.shape import Shape
from ..memory.words import Words
from .prefetch import fetch_lines
from .softmax import Quotients, is_empty, log_sum_exp, merge_of


class _Rows:
    """Addresses of the states of a panel's rows, from the tables of their outputs and log-sum-exps."""

    words = "outs* lses*"

    def __init__(self, k: Function, s: Shape) -> None:
        self.k, self.s, self.a = k, s, Words(k, FORWARD, k.p["a"])

    def accumulator(self, lane: Value) -> Value:
        ratio = self.s.number_bytes // self.s.storage_bytes
        return self.k.pointer(self.a.accumulators + (self._word("outs", lane) - self.a.out) * ratio)

    def sums(self, lane: Value) -> Value:
        return self.k.pointer(self.a.sums + (self._word("lses", lane) - self.a.lse) * 2)

    def _word(self, table: str, lane: Value) -> Value:
        return self.k.load(I64, self.k.p[table], lane * 8)


class _ResumedRows(_Rows):
    """Addresses of the states that rows go on from; `half`: 0 of whole spans, 1 of the open one."""

    words = "states* half"

    def accumulator(self, lane: Value) -> Value:
        of_half = self.k.p["half"] * ((self.a.state_head - STATE_SUMS) >> 1)
        return self.k.pointer(self._word("states", lane) + of_half + STATE_SUMS)

    def sums(self, lane: Value) -> Value:
        return self.k.pointer(self._word("states", lane) + self.k.p["half"] * (2 * self.s.number_bytes))


def load_state(module: Module, s: Shape) -> Any:
    """Loads the state of a panel: its last lanes may be one row again and again."""
    of = _ResumedRows if s.resumed else _Rows
    k = module.function("load_state", prototype(f"a* state* {of.words}"))
    rows, state, width = of(k, s), k.p["state"], Words(k, FORWARD, k.p["a"]).value_dim
    accumulator, whole = k.at(state, 2 * s.row_bytes), width // s.lanes * s.lanes
    with k.range(0, s.vectors) as v, k.range(0, whole, s.lanes) as c:
        square = [k.load(s.vector, rows.accumulator(v * s.lanes + i), c * s.number_bytes) for i in range(s.lanes)]
        for i, x in enumerate(k.transpose(square)):
            k.store(x, accumulator, (c + i) * s.row_bytes + v * s.vector_bytes)
    with k.range(0, s.panel) as lane:
        for i in (0, 1):
            x = k.load(s.number, rows.sums(lane), i * s.number_bytes)
            k.store(x, state, i * s.row_bytes + lane * s.number_bytes)
        with k.range(whole, width) as c:
            x = k.load(s.number, rows.accumulator(lane), c * s.number_bytes)
            k.store(x, accumulator, c * s.row_bytes + lane * s.number_bytes)
    return k.finish()


def store_state(module: Module, s: Shape) -> Any:
    """Stores the states of the first `count` lanes."""
    of = _ResumedRows if s.resumed else _Rows
    k = module.function("store_state", prototype(f"a* state* {of.words} count"))
    rows, state, width = of(k, s), k.p["state"], Words(k, FORWARD, k.p["a"]).value_dim
    accumulator, count = k.at(state, 2 * s.row_bytes), k.p["count"]
    with k.range(0, s.vectors) as v:
        first = v * s.lanes
        whole = k.select(count >= first + s.lanes, width // s.lanes * s.lanes, k.i64(0))
        with k.range(0, whole, s.lanes) as c:
            at = k.at(accumulator, c * s.row_bytes + v * s.vector_bytes)
            for i, x in enumerate(k.transpose([k.load(s.vector, at, i * s.row_bytes) for i in range(s.lanes)])):
                k.store(x, rows.accumulator(first + i), c * s.number_bytes)
        with k.range(first, k.min(count, first + s.lanes)) as lane:
            for i in (0, 1):
                x = k.load(s.number, state, i * s.row_bytes + lane * s.number_bytes)
                k.store(x, rows.sums(lane), i * s.number_bytes)
            with k.range(whole, width) as c:
                x = k.load(s.number, accumulator, c * s.row_bytes + lane * s.number_bytes)
                k.store(x, rows.accumulator(lane), c * s.number_bytes)
    return k.finish()


def clear_state(k: Function, s: Shape, state: Value, rows: Value) -> None:
    """Stores (-inf, 0, 0), a state of `rows` rows that has seen nothing."""
    for v in range(s.vectors):
        k.store(k.const(float("-inf"), s.vector), state, s.lane_offset(v))
    with k.range(1, rows) as row:
        for v in range(s.vectors):
            k.store(k.const(0.0, s.vector), state, row * s.row_bytes + s.lane_offset(v))


def copy_state(k: Function, s: Shape, state: Value, to: Value, rows: Value) -> None:
    """Copies a state of `rows` rows."""
    with k.range(0, rows) as row:
        for v in range(s.vectors):
            at = row * s.row_bytes + s.lane_offset(v)
            k.store(k.load(s.vector, state, at), to, at)


def merge_states(module: Module, s: Shape) -> Any:
    """total ⊕ span: the first non-empty one is copied, later ones merged, empty ones skipped, lane by lane."""
    k = module.function("merge_states", prototype("total* span* width"))
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
    types = {"divisor": s.number} if s.dropout else {}
    k = module.function("store_panel", prototype("state* table* lse_table* count width column", **types))
    p = k.p
    acc = k.at(p["state"], 2 * s.row_bytes)
    with k.range(0, s.vectors) as v:
        at = v * s.vector_bytes
        m, running_sum = k.load(s.vector, p["state"], at), k.load(s.vector, p["state"], at + s.row_bytes)
        empty = is_empty(m, running_sum)
        by = running_sum * k.splat(p["divisor"], s.lanes) if s.dropout else running_sum
        _store_rows(k, s, v, acc, Quotients(k, s, by, empty))
    with k.when(k.load(I64, p["lse_table"]).differs(0)), k.range(0, p["count"]) as lane:
        m, running_sum = (k.load(s.number, p["state"], i * s.row_bytes + lane * s.number_bytes) for i in (0, 1))
        k.store(log_sum_exp(k, s, log, m, running_sum), k.load(PTR, p["lse_table"], lane * 8))
    return k.finish()


def _store_rows(k: Function, s: Shape, v: Value, acc: Value, quotients: Quotients) -> None:
    """Stores one vector of queries' outputs, [width, lanes]: transposed where all lanes are rows of unit stride, else
    by way of `acc`.
    """
    p, at, first = k.p, v * s.vector_bytes, v * s.lanes
    unit = p["column"].equals(s.storage_bytes) & (p["count"] >= first + s.lanes)
    end = k.select(unit, p["width"] // s.lanes * s.lanes, k.i64(0))
    with k.range(0, end, s.lanes) as c:
        fetch_lines(k, s, k.at(p["table"], first * 8), c + s.lanes, write=True)
        columns = [k.load(s.vector, acc, (c + i) * s.row_bytes + at) for i in range(s.lanes)]
        for lane, x in enumerate(k.transpose(_outputs(k, s, columns, quotients))):
            x = conversions.narrowed(k, s.storage, x)
            k.store(x, k.load(PTR, p["table"], (first + lane) * 8), c * s.storage_bytes)
    with k.range(end, p["width"]) as c:
        x = k.load(s.vector, acc, c * s.row_bytes + at)
        k.store(quotients.careful(x), acc, c * s.row_bytes + at)
    with k.range(first, k.min(p["count"], first + s.lanes)) as lane:
        row = k.load(PTR, p["table"], lane * 8)
        with k.range(end, p["width"]) as c:
            x = k.load(s.number, acc, c * s.row_bytes + lane * s.number_bytes)
            k.store(conversions.narrowed(k, s.storage, x), row, c * p["column"])


def _outputs(k: Function, s: Shape, columns: list[Value], quotients: Quotients) -> list[Value]:
    if s.wide:
        return [quotients.careful(x) for x in columns]
    found = [k.variable(x) for x in columns]
    with k.either(quotients.usual(columns)) as ways:
        for way, of in zip(ways, (quotients.of, quotients.careful), strict=True):
            with way:
                for variable, x in zip(found, columns, strict=True):
                    variable.set(of(x))
    return [x.get() for x in found]
