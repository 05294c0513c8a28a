"""The gradient of a score function, from dS to the raw scores; derivative.py made it an expression like the score."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ...expressions.bounds import linear
from ...expressions.program import Program
from ...expressions.tree import FLOW, Node
from ..language.functions import like
from ..language.lookups import added, clamped, direction, length_of, splat_like
from ..language.prototypes import prototype
from ..language.vector import F64, I64, PTR, Function, Module, Value, vec
from ..memory.records import SHARE_OF, SUM_OF
from ..memory.shape import Shape
from .lower import Lowering, of_queries, scale_of

_Env = dict[str, Value]  # what symbols are


def needs_raw(program: Program | None) -> bool:
    """Returns whether scores are looked at again once an expression has changed them."""
    if program is None:
        return False
    return program.changes_flow or any(["s" in x.uses for entry in program.entries for x in entry])


def score_backward_tile(module: Module, s: Shape, program: Program) -> Any:
    """d_scores[n_keys, panel] = what flows to the raw scores from what `d_scores` has; +0 where `scores` marks a key as
    hidden.

    `lanes` holds the position and then the head of every lane, `raw` what scores were before the expression.
    """
    words = "a* raw* scores* d_scores* lanes* ahead* first n_keys batch"
    k = module.function("score_backward_tile", prototype(words), special=True)
    p, flow, scale = k.p, program.flow, scale_of(k, s)
    assert flow is not None
    with k.range(0, s.vectors) as v:
        lowering, env, lane = of_queries(k, s, program, v)
        lowering.before_keys(flow, env)
        streams = lowering.streams(program, [flow], env, k.at(p["ahead"], lane))

        def key(j: Value, m: Value, v: Value = v) -> None:
            row = j * s.row_bytes + v * s.vector_bytes
            raw, d, mark = (k.load(s.vector, p[x], row) for x in ("raw", "d_scores", "scores"))
            now = env | {"j": lowering.integer(p["first"] + j), "s": raw * scale, FLOW: d}
            values = lowering.values | {id(x.node): x.value(m) for x in streams}
            x = lowering.vector(lowering.value(flow, now, values))
            x = x if x.type == s.vector else k.narrow(x, s.vector)
            k.store(k.select(mark.bits(s.ivector) > -1, x, k.const(0.0, s.vector)), p["d_scores"], row)

        lowering.each_key(streams, env, p["first"], (k.i64(0), p["n_keys"]), key)
    return k.finish()


def by_rows(program: Program, lookup: Node) -> bool:
    """Returns whether gradients of entries are added row by row: the keys of a query read entries side by side.

    So may others read the same ones, of more queries, but nothing else does that these sums are of.
    """
    return _alone(program, lookup) and direction(lookup) == 1 and "i" not in lookup.args[-1].uses


def at_positions(program: Program, lookup: Node) -> bool:
    """Returns whether queries at two positions never read the same entry: an index is ± the position + a constant."""
    forms = [linear(x) for x in lookup.args]
    own = [x for x in forms if x and abs(x[0]) == 1 and x[1] == 0 and not any([part.uses for _, part in x[2]])]
    return _alone(program, lookup) and bool(own)


def _alone(program: Program, lookup: Node) -> bool:
    """Returns whether the sums of its table are of this lookup alone."""
    return sum(node.value is lookup.value for node, _ in program.entries) == 1


def entries_tile(module: Module, s: Shape, program: Program) -> Any:
    """Adds to the gradient of each entry of tables that the visible pairs read: keys ascending, of each the lanes,
    lookup after lookup. Of what is added row by row groups of keys ascend, of each the lanes, then the keys: to each
    entry the same order. `sums` has SUM_OF for every lookup; entries lie there without gaps.
    """
    words = "a* raw* scores* d_scores* lanes* ahead* sums* first n_keys batch"
    k = module.function("entries_tile", prototype(words), special=True)
    p, scale = k.p, scale_of(k, s)
    adders = [
        (_Rows if by_rows(program, node) else _Entries)(k, s, node, into, k.at(p["sums"], n * SUM_OF.bytes))
        for n, (node, into) in enumerate(program.entries)
    ]
    rows = [x for x in adders if isinstance(x, _Rows)]
    singles = [x for x in adders if isinstance(x, _Entries)]
    marks = k.buffer(s.integer, s.lanes)
    roots = [x for node, into in program.entries for x in (*node.args, into)]
    with k.range(0, s.vectors) as v:
        lowering, env, lane = of_queries(k, s, program, v)
        for root in roots:
            lowering.before_keys(root, env)
        streams = lowering.streams(program, roots, env, k.at(p["ahead"], lane))
        hidden = k.variable(k.const(-1, s.ivector))  # lanes to which all keys of a group are
        for x in rows:
            x.begin(lowering, env)

        def key(j: Value, m: Value, v: Value = v) -> None:
            row = j * s.row_bytes + v * s.vector_bytes
            d, mark = (k.load(s.vector, p[x], row) for x in ("d_scores", "scores"))
            bits = mark.bits(s.ivector)
            hidden.set(hidden.get() & bits)
            now = env | {"j": lowering.integer(p["first"] + j), FLOW: d}
            if needs_raw(program):
                now["s"] = k.load(s.vector, p["raw"], row) * scale
            values = lowering.values | {id(x.node): x.value(m) for x in streams}
            for x in adders:
                x.take(lowering, now, values, bits > -1, m)
            if singles:
                k.store(bits, marks)
                with k.range(0, s.lanes) as one, k.when(k.load(s.integer, marks, one * s.number_bytes) > -1):
                    for x in singles:
                        x.add(one)

        def after(group: Value, last: Value) -> None:
            k.store(hidden.get(), marks)
            hidden.set(k.const(-1, s.ivector))
            here = env | {"j": lowering.integer(p["first"] + group)}
            for x in rows:
                x.add(lowering, here, last - group, marks)

        lowering.each_key(streams, env, p["first"], (k.i64(0), p["n_keys"]), key, after if rows else None)
    return k.finish()


def find_sums(k: Function, a: Any, program: Program, share: Value | None = None) -> Value:
    """Returns SUM_OF for every lookup, in memory of the task: of a share, or where all have the same sums."""
    sums = k.buffer(I64, max(1, len(program.entries) * len(SUM_OF.names)))
    for n, (node, _) in enumerate(program.entries):
        at = k.at(k.pointer(a.shares), program.tables[node.value] * SHARE_OF.bytes)
        first, size, number = (k.load(I64, at, SHARE_OF.offset(x)) for x in SHARE_OF.names)
        into = k.at(sums, n * SUM_OF.bytes)
        k.store(first if share is None else first + share * size, into, SUM_OF.offset("at"))
        k.store(number, into, SUM_OF.offset("number"))
    return sums


class _Entries:
    """Gradients of entries, and which those are, of the lanes of one key."""

    def __init__(self, k: Function, s: Shape, node: Node, into: Node, sums: Value) -> None:
        self.k, self.s, self.node, self.into, self.sums = k, s, node, into, sums
        self.indices, self.amounts = k.buffer(I64, s.lanes), k.buffer(F64, s.lanes)

    def take(self, lowering: Lowering, now: _Env, values: dict[int, Value], _seen: Value, _m: Value) -> None:
        k, wide = self.k, vec(F64, self.s.lanes)
        amount = lowering.vector(lowering.value(self.into, now, values))
        k.store(amount if amount.type == wide else k.extend(amount, wide), self.amounts)
        at = lowering.table_at(self.node)
        index = [lowering.wide(lowering.value(x, now, values)) for x in self.node.args]
        k.store(lowering.vector(_entry(k, at, index)), self.indices)

    def add(self, lane: Value) -> None:
        k = self.k
        sums = k.load(PTR, self.sums, SUM_OF.offset("at"))
        at = k.at(sums, k.load(I64, self.indices, lane * 8) * 8)
        k.store(k.load(F64, at) + k.load(F64, self.amounts, lane * 8), at)


class _Rows:
    """Gradients of the rows of entries that lanes read, of a group of keys: [keys][lanes], then [lanes][keys].

    A hidden pair has -0, which changes no sum.
    """

    def __init__(self, k: Function, s: Shape, node: Node, into: Node, sums: Value) -> None:
        self.k, self.s, self.node, self.into, self.sums = k, s, node, into, sums
        self.number = F64 if into.kind == "double" else s.number
        self.size = 8 if self.number is F64 else 4
        self.amounts = k.buffer(self.number, s.lanes * s.lanes)
        self.lines = k.buffer(I64, s.lanes)  # of every lane, the entry of key 0 of its row

    def begin(self, lowering: Lowering, env: _Env) -> None:
        """Finds the lanes' rows."""
        k, at, last = self.k, lowering.table_at(self.node), len(self.node.args) - 1
        index = [lowering.wide(lowering.value(x, env, lowering.values)) for x in self.node.args[:-1]]
        line = lowering.vector(_entry(k, at, index)) if index else k.const(0, vec(I64, self.s.lanes))
        k.store(line * k.splat(length_of(k, at, last), self.s.lanes), self.lines)

    def take(self, lowering: Lowering, now: _Env, values: dict[int, Value], seen: Value, m: Value) -> None:
        amount = lowering.vector(lowering.value(self.into, now, values))
        self._store(m, self.k.select(seen, amount, self.k.const(-0.0, amount.type)))

    def _store(self, m: Value, x: Value) -> None:
        self.k.store(x, self.amounts, m * (self.s.lanes * self.size))

    def add(self, lowering: Lowering, here: _Env, count: Value, hidden: Value) -> None:
        """`here`: at the first key of `count`; lanes marked in `hidden` see none of them, and may read anything."""
        k, n = self.k, self.s.lanes
        row = vec(self.number, n)
        with k.range(count, n) as m:
            self._store(m, k.const(-0.0, row))
        keys = [k.load(row, self.amounts, m * (n * self.size)) for m in range(n)]
        for lane, x in enumerate(k.transpose(keys)):
            self._store(k.i64(lane), x)
        first = lowering.wide(lowering.value(self.node.args[-1], here, dict(lowering.values)))
        first = k.first(first) if isinstance(first.type, ir.VectorType) else first
        room = length_of(k, lowering.table_at(self.node), len(self.node.args) - 1) - first
        sums, number = (k.load(I64, self.sums, SUM_OF.offset(x)) for x in SUM_OF.names)
        with k.range(0, n) as lane, k.when(k.load(self.s.integer, hidden, lane * self.s.number_bytes) > -1):
            at = sums + (k.load(I64, self.lines, lane * 8) + first) * number
            amounts = k.at(self.amounts, lane * (n * self.size))
            with k.either((first >= 0) & (room >= n)) as (whole, some):
                with whole:
                    self._join(at, k.load(row, amounts), number)
                with some, k.range(k.max(-first, k.i64(0)), k.min(count, room)) as m:
                    self._join(at + m * number, k.load(self.number, amounts, m * self.size), number)

    def _join(self, address: Value, x: Value, number: Value) -> None:
        """Adds to sums from an address on, of this type or of float64."""
        k, at = self.k, self.k.pointer(address)
        if self.number is F64:
            k.store(k.load(x.type, at) + x, at)
            return
        with k.either(number.equals(8)) as (wide, own):
            with wide:
                y = k.extend(x, like(x, F64))
                k.store(k.load(y.type, at) + y, at)
            with own:
                k.store(k.load(x.type, at) + x, at)


def _entry(k: Function, at: Value, index: list[Value]) -> Value:
    """Returns the entry, or row of entries, that has this index, in a table without gaps."""
    entry = None
    for d, x in enumerate(index):
        inside, _ = clamped(k, at, d, x)
        entry = inside if entry is None else added(k, entry * splat_like(k, length_of(k, at, d), entry), inside)
    assert entry is not None
    return entry
