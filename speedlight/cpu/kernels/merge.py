"""The merge kernel: states of attention over disjoint keys become one, in one pass over their outputs.

A ticket is some rows, taken BLOCK at a time: their log-sum-exps become weights in float64, rows in lanes; then each
row's outputs are summed by their weights, columns in lanes. States are taken in ascending order, each lane by itself,
so the bits know nothing of lanes, strides or neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from ...arrays.dtypes import STORAGE_BYTES
from ...host.machine import Isa
from ..language import functions
from ..language.conversions import load_f64, store_f64
from ..language.vector import F64, I64, PTR, Function, Module, Value, vec
from ..memory.records import HEAD, Record
from ..memory.words import Words
from .task import entry, region

BLOCK = 16  # rows whose weights are computed together
_VECTORS = 8  # vectors of columns summed together
STORAGES = tuple(STORAGE_BYTES)  # a kind is an index into it

# sizes[dims] and states[count] are tables; a state is STATE words, then for each of the dims its step of out and of lse
ARGUMENTS = Record(
    *HEAD, "states", "count", "state_bytes", "sizes", "dims", "rows", "ticket_rows",
    "value_dim", "strided", "out", "out_kind", "lse", "lse_kind",
)  # fmt: skip
STATE = Record("out", "out_kind", "column", "lse", "lse_kind")
_ENTRY = Record("at", "kind", "column", "weight")  # of a state that has a say in a row
_EMPTY_STATE = -1.0  # instead of a weight


def scratch_bytes(states: int, dims: int) -> int:
    """Bytes of one worker: weights and addresses of a block's rows, a row's entries, its index, the block's results."""
    return 8 * (2 * BLOCK * states + dims + BLOCK) + _ENTRY.bytes * states


@dataclass(frozen=True, slots=True)
class MergeShape:
    """The specialisation of the merge kernel: dtypes, strides and the number of states are arguments."""

    isa: Isa
    kind: ClassVar[str] = "merge"

    @property
    def stem(self) -> str:
        return f"merge_{self.isa.name}"

    @property
    def lanes(self) -> int:
        return self.isa.vector_bytes // 8


def merge_module(s: MergeShape, symbol: str) -> Module:
    module = Module(symbol)
    entry(module, s.isa, region(module, _task(module, s)), symbol)
    return module


class _Part:
    """A function of the kernel: its arguments by name, and where things lie in scratch."""

    def __init__(self, module: Module, name: str, *params: str) -> None:
        self.k = module.function(name, {"a": PTR, "scratch": PTR} | dict.fromkeys(params, I64))
        self.p, self.scratch = self.k.p, self.k.p["scratch"]
        self.a = Words(self.k, ARGUMENTS, self.p["a"])

    def weight(self, state: Value, row: Value | int) -> Value:
        """[count, BLOCK] of log-sum-exps, then weights."""
        return self.k.at(self.scratch, (state * BLOCK + row) * 8)

    def output(self, state: Value, row: Value) -> Value:
        """[count, BLOCK] of addresses of outputs."""
        return self.k.at(self.scratch, ((self.a.count + state) * BLOCK + row) * 8)

    def entries(self) -> Value:
        return self.k.at(self.scratch, self.a.count * (16 * BLOCK))

    def index(self) -> Value:
        return self.k.at(self.entries(), self.a.count * _ENTRY.bytes)

    def logs(self) -> Value:
        return self.k.at(self.index(), self.a.dims * 8)

    def call(self, f: Any, *args: Value) -> Value:
        return self.k.call(f, self.p["a"], self.scratch, *args)


def _by_kind(k: Function, kind: Value, emit: Callable[[str], None]) -> None:
    for i, storage in enumerate(STORAGES):
        with k.when(kind.equals(i)):
            emit(storage)


def _load_number(module: Module) -> Any:
    """Loads one number of any kind, in f64."""
    k = module.function("load_number", {"kind": I64, "at": PTR}, F64)
    x = k.variable(k.const(0.0, F64))
    _by_kind(k, k.p["kind"], lambda storage: x.set(load_f64(k, storage, k.p["at"])))
    return k.finish(x.get())


def _store_number(module: Module) -> Any:
    k = module.function("store_number", {"kind": I64, "at": PTR, "x": F64})
    _by_kind(k, k.p["kind"], lambda storage: store_f64(k, storage, k.p["x"], k.p["at"]))
    return k.finish()


def _bytes_of(k: Function, kind: Value) -> Value:
    size = k.i64(0)
    for i, storage in enumerate(STORAGES):
        size = k.select(kind.equals(i), k.i64(STORAGE_BYTES[storage]), size)
    return size


def _task(module: Module, s: MergeShape) -> Any:
    """Does one ticket: `ticket_rows` rows."""
    numbers = _load_number(module), _store_number(module)
    locate, weigh, total = _locate(module, numbers), _weigh(module, s, numbers), _sum(module, s, numbers)
    part = _Part(module, "task", "number")
    k = part.k
    first = part.p["number"] * part.a.ticket_rows
    last = k.min(first + part.a.ticket_rows, part.a.rows)
    with k.range(first, last, BLOCK) as start:
        end = k.min(start + BLOCK, last)
        part.call(locate, start, end)
        part.call(weigh, start, end)
        with k.range(start, end) as row:
            part.call(total, row, row - start)
    return k.finish()


def _locate(module: Module, numbers: Any) -> Any:
    """Finds of the rows [start, end), and the last one again up to BLOCK, where each state's outputs lie, and its
    log-sum-exp.
    """
    part = _Part(module, "locate", "start", "end")
    k, p = part.k, part.p
    dims, sizes, states, index = part.a.dims, k.pointer(part.a.sizes), k.pointer(part.a.states), part.index()
    with k.range(0, BLOCK) as r:
        rest = k.variable(k.min(p["start"] + r, p["end"] - 1))
        with k.range(1, dims) as back:
            at = (dims - back) * 8
            size, number = k.load(I64, sizes, at), rest.get()
            rest.set(number // size)
            k.store(number - rest.get() * size, index, at)
        k.store(rest.get(), index)
        with k.range(0, part.a.count) as n:
            state = k.at(states, n * part.a.state_bytes)
            word = Words(k, STATE, state)
            lse_kind, out, lse = word.lse_kind, k.variable(word.out), k.variable(word.lse)
            with k.range(0, dims) as d:
                i, steps = k.load(I64, index, d * 8), k.at(state, d * 16 + STATE.bytes)
                out.set(out.get() + i * k.load(I64, steps))
                lse.set(lse.get() + i * k.load(I64, steps, 8))
            k.store(k.call(numbers[0], lse_kind, k.pointer(lse.get())), part.weight(n, r))
            k.store(out.get(), part.output(n, r))
    return k.finish()


def _weigh(module: Module, s: MergeShape, numbers: Any) -> Any:
    """Makes of the log-sum-exps of a block's rows, in lanes, each state's share, or _EMPTY_STATE; stores the merged
    log-sum-exps.
    """
    part = _Part(module, "weigh", "start", "end")
    k, p, t = part.k, part.p, vec(F64, s.lanes)
    count = part.a.count
    with k.range(0, BLOCK, s.lanes) as lane:
        top = k.variable(k.const(-math.inf, t))
        with k.range(0, count) as n:
            top.set(k.max(k.load(t, part.weight(n, lane)), top.get()))  # a NaN is passed over here, not in the weights
        base = k.select(top.get().equals(-math.inf), k.const(0.0, t), top.get())
        total = k.variable(k.const(0.0, t))
        with k.range(0, count) as n:
            x = k.load(t, part.weight(n, lane))
            w = functions.exp(k, x - base)
            total.set(total.get() + w)
            k.store(k.select(x.equals(-math.inf), k.const(_EMPTY_STATE, t), w), part.weight(n, lane))
        with k.range(0, count) as n:
            w = k.load(t, part.weight(n, lane))
            k.store(k.select(w < 0.0, w, w / total.get()), part.weight(n, lane))
        k.store(base + functions.natural_log(k, total.get()), part.logs(), lane * 8)
    kind = part.a.lse_kind
    with k.range(p["start"], p["end"]) as row:
        x = k.load(F64, part.logs(), (row - p["start"]) * 8)
        k.call(numbers[1], kind, k.at(k.pointer(part.a.lse), row * _bytes_of(k, kind)), x)
    return k.finish()


def _sum(module: Module, s: MergeShape, numbers: Any) -> Any:
    """Sums one row: the states that have a say are listed, then columns are summed, many side by side where they
    adjoin.
    """
    part = _Part(module, "sum", "row", "r")
    k, p = part.k, part.p
    states, entries, said = k.pointer(part.a.states), part.entries(), k.variable(k.i64(0))
    with k.range(0, part.a.count) as n:
        weight, state = k.load(F64, part.weight(n, p["r"])), k.at(states, n * part.a.state_bytes)
        entry = k.at(entries, said.get() * _ENTRY.bytes)
        word = Words(k, STATE, state)
        values = {"at": k.load(I64, part.output(n, p["r"])), "kind": word.out_kind, "column": word.column}
        for name, value in (values | {"weight": weight}).items():
            k.store(value, entry, _ENTRY.offset(name))
        said.set(k.select(weight < 0.0, said.get(), said.get() + 1))
    width, kind = part.a.value_dim, part.a.out_kind
    size = _bytes_of(k, kind)
    columns = _Columns(k, entries, said.get(), kind, k.at(k.pointer(part.a.out), p["row"] * width * size), size)
    side_by_side = k.select(part.a.strided.equals(0) & (width >= s.lanes), width, k.i64(0))
    wide = side_by_side // (_VECTORS * s.lanes) * (_VECTORS * s.lanes)
    with k.range(0, wide, _VECTORS * s.lanes) as column:
        columns.vectors(column, _VECTORS, s.lanes)
    with k.range(wide, side_by_side, s.lanes) as column:  # the last vector ends where the row ends
        columns.vectors(k.min(column, width - s.lanes), 1, s.lanes)
    with k.range(side_by_side, width) as column:
        columns.one(column, numbers)
    return k.finish()


class _Columns:
    """Weighted sums of a row's columns over the entries of the list.

    From -0, which adds nothing, to the sign of zeros.
    """

    def __init__(self, k: Function, entries: Value, said: Value, kind: Value, out: Value, size: Value) -> None:
        self.k, self.entries, self.said, self.kind, self.out, self.size = k, entries, said, kind, out, size
        self.empty = k.select(said.equals(0), k.const(0.0, F64), k.const(-0.0, F64))

    def _entry(self, n: Value) -> tuple[Value, Value, Value, Value]:
        k, at = self.k, self.k.at(self.entries, n * _ENTRY.bytes)
        entry = Words(k, _ENTRY, at)
        return k.pointer(entry.at), entry.kind, entry.column, k.load(F64, at, _ENTRY.offset("weight"))

    def vectors(self, column: Value, count: int, lanes: int) -> None:
        """Sums `count` vectors of columns."""
        k = self.k
        sums = [k.variable(k.splat(self.empty, lanes)) for _ in range(count)]
        with k.range(0, self.said) as n:
            at, kind, _, weight = self._entry(n)
            weights = k.splat(weight, lanes)

            def add(storage: str) -> None:
                size = STORAGE_BYTES[storage]
                for i, total in enumerate(sums):
                    x = load_f64(k, storage, at, column * size + i * lanes * size, lanes)
                    total.set(k.fma(weights, x, total.get()))

            _by_kind(k, kind, add)

        def store(storage: str) -> None:
            size = STORAGE_BYTES[storage]
            for i, total in enumerate(sums):
                store_f64(k, storage, total.get(), self.out, column * size + i * lanes * size)

        _by_kind(k, self.kind, store)

    def one(self, column: Value, numbers: Any) -> None:
        """Sums one column, wherever it lies."""
        k = self.k
        total = k.variable(self.empty)
        with k.range(0, self.said) as n:
            at, kind, step, weight = self._entry(n)
            total.set(k.fma(weight, k.call(numbers[0], kind, k.at(at, column * step)), total.get()))
        k.call(numbers[1], self.kind, k.at(self.out, column * self.size), total.get())
