"""What flows back through a score, from dS to the raw scores; derivative.py made it an expression like the score."""

from __future__ import annotations

from typing import Any

from ..expressions.program import Program
from ..expressions.tree import FLOW, Node
from .lookups import added, clamped, length_of, splat_like
from .lower import Lowering, of_queries, scale_of
from .shape import Shape
from .vector import F64, I64, PTR, Function, Module, Value, vec


def changes_flow(program: Program | None) -> bool:
    """Whether something else flows to the raw scores than into the score."""
    flow = None if program is None else program.flow
    return flow is not None and not (flow.op == "symbol" and flow.value == FLOW)


def needs_raw(program: Program | None) -> bool:
    """Whether scores are looked at again once an expression has changed them."""
    return changes_flow(program) or (program is not None and bool(program.entries))


def flow_tile(module: Module, s: Shape, program: Program) -> Any:
    """flows[n_keys, panel] = what flows to the raw scores from what `flows` has; +0 where `scores` marks a key as
    hidden.

    `lanes` holds the position and then the head of every lane, `raw` what scores were before the expression.
    """
    names = ("first", "n_keys", "batch")
    params = {"a": PTR, "raw": PTR, "scores": PTR, "flows": PTR, "lanes": PTR, "ahead": PTR}
    k = module.function("flow_tile", params | dict.fromkeys(names, I64))
    p, flow, scale = k.p, program.flow, scale_of(k, s)
    assert flow is not None
    with k.range(0, s.vectors) as v:
        lowering, env, lane = of_queries(k, s, program, v)
        lowering.before_keys(flow, env)
        streams = lowering.streams(program, [flow], env, k.at(p["ahead"], lane))

        def key(j: Value, m: Value, v: Value = v) -> None:
            row = j * s.row_bytes + v * s.vector_bytes
            raw, d, mark = (k.load(s.vector, p[x], row) for x in ("raw", "flows", "scores"))
            now = env | {"j": lowering.integer(p["first"] + j), "s": raw * scale, FLOW: d}
            values = lowering.values | {id(x.node): x.value(m) for x in streams}
            x = lowering.vector(lowering.value(flow, now, values))
            x = x if x.type == s.vector else k.narrow(x, s.vector)
            k.store(k.select(mark.bits(s.ivector) > -1, x, k.const(0.0, s.vector)), p["flows"], row)

        lowering.each_key(streams, env, p["first"], (k.i64(0), p["n_keys"]), key)
    return k.finish()


def entries_tile(module: Module, s: Shape, program: Program) -> Any:
    """Adds what flows to each entry of tables that the visible pairs read: keys ascending, of each the lanes, lookup
    after lookup. `sums` has an address for every lookup; entries lie there without gaps, as float64.
    """
    names = ("first", "n_keys", "batch")
    params = {"a": PTR, "raw": PTR, "scores": PTR, "flows": PTR, "lanes": PTR, "ahead": PTR, "sums": PTR}
    k = module.function("entries_tile", params | dict.fromkeys(names, I64))
    p, scale = k.p, scale_of(k, s)
    marks = k.buffer(s.integer, s.lanes)
    rooms = [(k.buffer(I64, s.lanes), k.buffer(F64, s.lanes)) for _ in program.entries]
    roots = [x for pair in program.entries for x in pair]
    with k.range(0, s.vectors) as v:
        lowering, env, lane = of_queries(k, s, program, v)
        for root in roots:
            lowering.before_keys(root, env)
        streams = lowering.streams(program, roots, env, k.at(p["ahead"], lane))

        def key(j: Value, m: Value, v: Value = v) -> None:
            row = j * s.row_bytes + v * s.vector_bytes
            raw, d, mark = (k.load(s.vector, p[x], row) for x in ("raw", "flows", "scores"))
            k.store(mark.bits(s.ivector), marks)
            now = env | {"j": lowering.integer(p["first"] + j), "s": raw * scale, FLOW: d}
            values = lowering.values | {id(x.node): x.value(m) for x in streams}
            for (node, into), (indices, amounts) in zip(program.entries, rooms, strict=True):
                amount = lowering.vector(lowering.value(into, now, values))
                k.store(amount if amount.type == vec(F64, s.lanes) else k.extend(amount, vec(F64, s.lanes)), amounts)
                k.store(lowering.vector(_entry(k, lowering, node, now, values)), indices)
            with k.range(0, s.lanes) as one, k.when(k.load(s.integer, marks, one * s.number_bytes) > -1):
                for n, (indices, amounts) in enumerate(rooms):
                    at = k.at(k.load(PTR, p["sums"], n * 8), k.load(I64, indices, one * 8) * 8)
                    k.store(k.load(F64, at) + k.load(F64, amounts, one * 8), at)

        lowering.each_key(streams, env, p["first"], (k.i64(0), p["n_keys"]), key)
    return k.finish()


def _entry(k: Function, lowering: Lowering, node: Node, env: dict[str, Value], values: dict[int, Value]) -> Value:
    """Which entry a lookup reads, in a table without gaps."""
    at, entry = lowering.table_at(node), None
    for d, index in enumerate(node.args):
        x = lowering.wide(lowering.value(index, env, values))
        inside, _ = clamped(k, at, d, x)
        entry = inside if entry is None else added(k, entry * splat_like(k, length_of(k, at, d), entry), inside)
    assert entry is not None
    return entry
