"""Micro-kernels that bring the states of a panel in and out, where a problem has a part of the keys.

Of each row its accumulator lies as its output does, in numbers instead of the storage type; its running_max and
running_sum, side by side, as its log-sum-exp does. All arguments are layout.FORWARD's.
"""

from __future__ import annotations

from typing import Any

from .layout import FORWARD
from .region import Words
from .shape import Shape
from .vector import I64, PTR, Function, Module, Value


class _Rows:
    """Where the rows of a panel have their states, from the tables of their outputs and log-sum-exps."""

    def __init__(self, k: Function, s: Shape) -> None:
        self.k, self.s, self.a = k, s, Words(k, FORWARD, k.p["a"])

    def accumulator(self, lane: Value) -> Value:
        ratio = self.s.number_bytes // self.s.storage_bytes
        return self.k.pointer(self.a.accumulators + (self._word("outs", lane) - self.a.out) * ratio)

    def sums(self, lane: Value) -> Value:
        return self.k.pointer(self.a.sums + (self._word("lses", lane) - self.a.lse) * 2)

    def _word(self, table: str, lane: Value) -> Value:
        return self.k.load(I64, self.k.p[table], lane * 8)


def load_state(module: Module, s: Shape) -> Any:
    """The state of a panel: its last lanes may be one row again and again."""
    k = module.function("load_state", {"a": PTR, "state": PTR, "outs": PTR, "lses": PTR})
    rows, state, width = _Rows(k, s), k.p["state"], Words(k, FORWARD, k.p["a"]).value_dim
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
    """The states of the first `count` lanes."""
    k = module.function("store_state", {"a": PTR, "state": PTR, "outs": PTR, "lses": PTR, "count": I64})
    rows, state, width = _Rows(k, s), k.p["state"], Words(k, FORWARD, k.p["a"]).value_dim
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
