"""What flows back through a score, from dS to the raw scores; derivative.py made it an expression like the score."""

from __future__ import annotations

from typing import Any

from ..expressions.program import Program
from ..expressions.tree import FLOW
from .layout import field
from .lower import Lowering
from .shape import Shape
from .vector import F32, F64, I32, I64, PTR, Module, Value, vec


def changes_flow(program: Program | None) -> bool:
    """Whether something else flows to the raw scores than into the score."""
    flow = None if program is None else program.flow
    return flow is not None and not (flow.op == "symbol" and flow.value == FLOW)


def flow_tile(module: Module, s: Shape, program: Program) -> Any:
    """flows[n_keys, panel] = what flows to the raw scores from what `flows` has; +0 where `scores` marks a key as
    hidden.

    `lanes` holds the position and then the head of every lane, `raw` what scores were before the expression.
    """
    names = ("first", "n_keys", "batch")
    params = {"a": PTR, "raw": PTR, "scores": PTR, "flows": PTR, "lanes": PTR, "ahead": PTR}
    k = module.function("flow_tile", params | dict.fromkeys(names, I64))
    p, wide = k.p, vec(I64, s.lanes)
    assert program.flow is not None
    flow = program.flow
    scale = k.load(I64, p["a"], field("scale"))
    scale = k.splat(scale.bits(F64) if s.wide else k.trunc(scale, I32).bits(F32), s.lanes)
    numbers, tables = (k.load(PTR, p["a"], field(n)) for n in ("numbers", "tables"))
    with k.range(0, s.vectors) as v:
        lane = v * (s.lanes * 8)
        lowering = Lowering(k, s, program, numbers, tables, narrow=program.narrow)
        env = {"b": p["batch"], "i": k.load(wide, p["lanes"], lane), "h": k.load(wide, p["lanes"], lane + s.panel * 8)}
        env = {name: lowering.integer(x) for name, x in env.items()}
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
