"""The bound of gradients, held against the canonical order of operations computed in NumPy, one rounding at a time.

`SEED=7 COUNT=10000 PYTHONPATH=tests:tests/support python tests/properties/test_backward_bound.py`
prints the largest share of the bound that is used, by kind of problem: by the same order in NumPy, whose powers are as
wrong as they may be, and by the engine.
"""

from __future__ import annotations

import collections
import contextlib
import os
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL
from problems import DTYPES, numpy_dtype, qkv
from test_bound import FILLS, near_the_largest
from tolerance import assert_within, flat

import speedlight as sl
from speedlight import reference
from speedlight.expressions.derivative import flows
from speedlight.expressions.tree import FLOW, evaluate
from speedlight.host.machine import host_isas
from speedlight.problem.gradients import SINKS
from speedlight.problem.options import Options
from speedlight.problem.problem import FAR_LSE, QUERY_BLOCK, TILE
from speedlight.reference.head_backward import is_far

KINDS = (*DTYPES, "bfloat16 dot")
Random = np.random.Generator
LOG4_E = 1 / np.log(4)


# --- the order of operations


@dataclass(frozen=True)
class Rounding:
    """What a kind of arrays is computed in."""

    kind: str

    @property
    def dot(self) -> bool:
        return self.kind.endswith("dot")

    @property
    def type(self) -> Any:
        return np.float64 if self.kind == "float64" else np.float32

    def fma(self, a: Any, b: Any, c: Any) -> np.ndarray:
        """a · b + c, rounded once (all but once in a while)."""
        wide = np.longdouble if self.kind == "float64" else np.float64
        return (np.asarray(a, wide) * np.asarray(b, wide) + np.asarray(c, wide)).astype(self.type)

    def operand(self, x: np.ndarray) -> np.ndarray:
        """A weight, or a flow, as a product takes it."""
        return x.astype(ml_dtypes.bfloat16).astype(np.float32) if self.dot else x

    def power(self, x: np.ndarray, rng: Random) -> np.ndarray:
        """4^x, off as powers may be; +0 far below."""
        wide = np.longdouble if self.kind == "float64" else np.float64
        off = 1e-4 if self.dot else 1.5 * float(np.finfo(self.type).eps) / 2
        value = np.exp2(2 * x.astype(wide)) * (1 + off * rng.uniform(-1, 1, x.shape))
        return np.where(x < (-511 if self.kind == "float64" else -63), 0, value).astype(self.type)

    def rows(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """x @ y.T: one chain over columns; of pairs, the second of each first."""
        total = np.zeros((len(x), len(y)), self.type)
        for t in range(x.shape[1]):
            at = t ^ 1 if self.dot and t ^ 1 < x.shape[1] else t
            total = self.fma(x[:, at, None], y[None, :, at], total)
        return total

    def sums(self, weights: np.ndarray, x: np.ndarray, seen: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """weights @ x, of seen pairs: a chain for each block, and blocks added as they come."""
        total = np.zeros((len(weights), x.shape[1]), self.type)
        for block in np.unique(blocks):
            partial = np.zeros(total.shape, self.type)
            for t in np.flatnonzero(blocks == block):
                partial = np.where(seen[:, t, None], self.fma(weights[:, t, None], x[None, t], partial), partial)
            total = total + partial
        return total


def emulated(arrays: Any, returned: Any, grads: Any, options: dict[str, Any], kind: str, rng: Random) -> Any:
    """dq, dk and dv of plain arrays ("bhld"), and `grads`, as docs/numerics.md orders their operations."""
    case, r = reference.Case(*arrays, Options(**options)), Rounding(kind)
    flow = reference.Flow(case, arrays[0], returned, grads)
    found = tuple(np.zeros(x.shape, r.type) for x in arrays)
    further = {grad: np.zeros(flow.asked.shape(grad)) for grad in grads}
    scale, group = r.type(case.problem.scale), []
    for head in case.heads():
        given = flow.into(head)
        d_out = given.d_out
        seen, p, raw, entries = head_terms(head, given, r, rng, flow.asked.tables)
        group.append((seen, p, raw, head.q, d_out))
        for table, at, flow_there in entries:
            np.add.at(further[table], at, flow_there)
        if SINKS in further:
            further[SINKS][int(head.env["h"])] -= sink_flow(head, given)
        found[0][head.at] = r.sums(raw, head.k, seen, head.env["j"][0] // TILE) * scale
        if len(group) == case.problem.group:
            blocks = head.env["i"][:, 0] // QUERY_BLOCK
            steps = np.concatenate([blocks * len(group) + n for n in range(len(group))])
            seen, p, raw, q, d_out = (np.concatenate(x) for x in zip(*group, strict=True))
            found[1][head.keys] = r.sums(raw.T, q, seen.T, steps) * scale
            found[2][head.keys] = r.sums(p.T, d_out, seen.T, steps)
            group = []
    own = tuple(x.astype(numpy_dtype(kind.split()[0])) for x in found)
    return *own, *(x.astype(r.type) for x in further.values())


def head_terms(head: Any, given: Any, r: Rounding, rng: Random, tables: Any) -> tuple[Any, ...]:
    """Of one head: which pairs are seen, their weights and flows as products take them, and what flows to entries."""
    problem = head.problem
    score, factor, env = r.rows(head.q, head.k), r.type(problem.scale), head.env
    if problem.score is not None:
        env = head.env | {"s": score * factor}
        score, factor = np.broadcast_to(evaluate(problem.score.root, env, r.type), score.shape), r.type(1)
    seen = head.visible & (score != -np.inf) & (given.lse != -np.inf)[:, None]
    x = r.fma(np.where(seen, score, 0), factor, np.where(seen, -given.lse[:, None], 0)) * r.type(LOG4_E)
    x = np.where((np.abs(given.lse) >= FAR_LSE[np.dtype(r.type).name])[:, None], np.minimum(x, 0), x)
    p = np.where(seen, r.power(x, rng), 0)
    delta = np.zeros(len(p), r.type)
    for t in range(given.out.shape[1]):
        delta = r.fma(given.d_out[:, t], given.out[:, t], delta)
    delta = delta - given.d_lse.astype(r.type)
    keep = r.type(1) if given.keep is None else given.keep.astype(r.type)
    ds = np.where(seen, p * (r.rows(given.d_out, head.v) * keep - delta[:, None]), 0).astype(r.type)
    raw, entries = ds, []
    if problem.score is not None:
        back = flows(problem.score.root, tables)
        env = env | {FLOW: ds}
        raw = np.where(seen, 0 if back.s is None else evaluate(back.s, env, r.type), 0).astype(r.type)
        for lookup, tree in back.entries:
            at = [np.broadcast_to(evaluate(x, env, r.type), seen.shape)[seen][::-1] for x in lookup.args]
            there = np.broadcast_to(evaluate(tree, env, r.type), seen.shape)[seen][::-1]
            entries.append((lookup.value, tuple(at), there.astype(np.float64)))
    return seen, r.operand(p * keep), r.operand(raw), entries


def sink_flow(head: Any, given: Any) -> float:
    """Of one head, all in float64, added one by one."""
    rows = given.lse != -np.inf
    delta = np.cumsum(given.d_out * given.out, axis=1)[:, -1] - given.d_lse
    x = head.problem.sinks[int(head.env["h"])] - given.lse
    x = np.where(is_far(head, given.lse), np.minimum(x, 0), x)
    return float(np.cumsum((np.exp(x) * delta)[rows])[-1]) if rows.any() else 0.0


# --- problems

_GRID = sl.table(np.random.default_rng(5).standard_normal((8, 400)).astype(np.float32), "grid")
_SLOPES, _CAP = sl.table(np.array([0.5, 0.25, 0.1, 0.05, 0.02, 0.01])), sl.table(np.array([3.0]))
_ROWS_APART = sl.table(np.random.default_rng(6).standard_normal((6, 700)))
_IDS = sl.table(np.random.default_rng(7).integers(0, 5, 400))
SCORES = {
    "softcap": sl.softcap(3.0),
    "alibi": sl.expression(lambda s, b, h, i, j: s - _SLOPES[h] * (i - j)),
    "bias": sl.expression(lambda s, b, h, i, j: s + _GRID[h, j]),
    "relative": sl.expression(lambda s, b, h, i, j: s + _ROWS_APART[h, i - j + 300] * _SLOPES[h]),
    "learned cap": sl.expression(lambda s, b, h, i, j: _CAP[h * 0] * sl.tanh(s / _CAP[h * 0])),
    "embedding": sl.expression(lambda s, b, h, i, j: s * _GRID[h, _IDS[j]] + _GRID[h, _IDS[i]]),
    "product": sl.expression(lambda s, b, h, i, j: s * _GRID[h, j] + sl.sigmoid(s) * s),
    "chosen": sl.expression(lambda s, b, h, i, j: sl.where((i + j) % 3 == 0, sl.tanh(s) * 2.0, s / 4.0)),
    "deep": sl.expression(lambda s, b, h, i, j: sl.log(1.0 + sl.exp2(sl.tanh(s * 0.3) * 4.0)) * sl.sqrt(1.0 + s * s)),
    "hidden": sl.expression(lambda s, b, h, i, j: sl.where((i * j) % 7 == 2, -np.inf, s)),
}
_ROWS, _KEYS, _DIMS = (1, 2, 3, 17, 40, 200), (1, 2, 3, 17, 127, 129, 300), (1, 2, 3, 8, 9, 16, 33, 64)


def problem(rng: Random, kind: str) -> tuple[str, Any, Any, Any, dict[str, Any]]:
    """Its name, arrays, what was returned for them and flows back, which further gradients it has, and options."""
    dtype = numpy_dtype(kind.split()[0])
    names = [str(rng.choice(list(FILLS))) for _ in range(4)]
    names[1] = names[0] if rng.random() < 0.3 else names[1]
    names[3] = names[2] if rng.random() < 0.2 else names[3]
    rows, keys, d, dv = (int(rng.choice(x)) for x in (_ROWS, _KEYS, _DIMS, _DIMS))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 1, 2, 3]))
    options: dict[str, Any] = {"causal": bool(rng.random() < 0.4), "q_start": int(rng.integers(0, 200))}
    if rng.random() < 0.3:
        options["scale"] = float(rng.choice([1.0, -0.3, 0.05]))
    match rng.choice(["score", "score", "window", "dropout", "none"]):  # one of these alone: few kernels
        case "score":
            names.append(str(rng.choice(list(SCORES))))
            options["score"] = SCORES[names[-1]]
        case "window":
            options["window"] = (int(rng.integers(0, 100)), None)
        case "dropout":
            options |= {"dropout": float(rng.choice([0.1, 0.6])), "seed": int(rng.integers(1 << 40))}
    with np.errstate(over="ignore"):
        q, k, v, d_out = (
            np.stack([FILLS[name](rng, (n, m)).astype(dtype) for _ in range(heads)])[None]
            for name, heads, n, m in zip(
                names[:4],
                (kv_heads * group, kv_heads, kv_heads, kv_heads * group),
                (rows, keys, keys, rows),
                (d, d, dv, dv),
                strict=True,
            )
        )
    grads = tuple(x for x in options["score"].tables if x is not _IDS) if "score" in options else ()
    if rng.random() < 0.2:
        options["sink_logits"] = rng.standard_normal(kv_heads * group).tolist()
        grads = (*grads, SINKS)
    out, lse = reference.attention(q, k, v, return_lse=True, **options)
    logs = np.float64 if kind == "float64" else np.float32
    d_lse = rng.standard_normal(lse.shape).astype(logs) if rng.random() < 0.3 else None
    return "/".join(names), (q, k, v), (out.astype(dtype), lse.astype(logs), d_out, d_lse), grads, options


Shares = dict[str, float]  # of the bounds of dq, dk, dv, tables and sinks: how much is used


def shares(got: Any, want: Any, bounds: Any, grads: Any) -> Shares:
    """All within, or it raises."""
    names = ["dq", "dk", "dv", *("sinks" if x == SINKS else "tables" for x in grads)]
    found: Shares = {}
    for name, *x in zip(names, got, flat(want), flat(bounds), strict=True):
        found[name] = max(found.get(name, 0.0), assert_within(*x, name, zeros_allowed=True))
    return found


def emulated_shares(arrays: Any, returned: Any, options: dict[str, Any], kind: str, rng: Random) -> Shares:
    got = emulated(arrays, returned, (), options, kind, rng)
    want = reference.backward(*arrays, *returned, **options)
    return shares(got, want, reference.backward_bound(*arrays, *returned, dot=kind.endswith("dot"), **options), ())


def one_problem(rng: Random, kind: str, unit: str | None = None) -> tuple[str, list[Shares]]:
    """By the order of operations in NumPy; and by the engine, if it has a `unit` to run on."""
    name, arrays, returned, grads, options = problem(rng, kind)
    given = (*arrays, *returned)
    try:
        with np.errstate(all="ignore"):
            want = reference.backward(*given, grads=grads, **options)
            bounds = reference.backward_bound(*given, grads=grads, dot=kind.endswith("dot"), **options)
            results = [emulated(arrays, returned, grads, options, kind, rng)]
            if unit is not None:
                os.environ["SPEEDLIGHT_ISA"] = unit
                results.append(flat(sl.attention_backward(*given, grads=grads, **options)))
            return name, [shares(got, want, bounds, grads) for got in results]
    except AssertionError as error:
        shapes = [x.shape for x in arrays]
        raise AssertionError(f"{kind} of {name}, shapes {shapes}, {options}, {unit}: {error}") from None


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_operations_is_within(kind):
    rng = np.random.default_rng(3)
    for _ in range(1000 if FULL else 12):
        one_problem(rng, kind)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e10, 1e30])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_that_are_huge(rng, kind, size):
    """Their log-sum-exps hold no fractions: a weight may be off by all of it, but is a weight; nothing overflows."""
    dtype, logs = numpy_dtype(kind.split()[0]), np.float64 if kind == "float64" else np.float32
    arrays = [x.astype(dtype) for x in qkv(rng, "float64", 1, 2, 1, 20, 150, 4, 8)]
    options = {
        "score": sl.expression(lambda s, b, h, i, j: s + sl.where(i == 3, -size, size * _GRID[h, j])),
        "q_start": 0,
    }
    out, lse = reference.attention(*arrays, return_lse=True, **options)
    returned = out.astype(dtype), lse.astype(logs), out.astype(dtype), None
    emulated_shares(arrays, returned, options, kind, rng)
    bounds = reference.backward_bound(*arrays, *returned, dot=kind.endswith("dot"), **options)
    assert all(x.max() < 1e5 for x in bounds)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_near_the_largest_number(kind, monkeypatch):
    """Where one may overflow the bound is infinite; everywhere else it holds."""
    rng, unit, endless, held = np.random.default_rng(12), unit_of(kind), 0, 0
    others = {"score"} if FULL else {"score", "window", "dropout"}  # kernels that a short run leaves out
    for _ in range(1000 if FULL else 40):
        _, arrays, (*_, d_out, d_lse), _, options = problem(rng, kind)
        if others & set(options):
            continue
        q, k, v = near_the_largest(rng, arrays, kind.split()[0])
        if kind == "float64":  # what the specification's own sums bear
            v, d_out = v * 1e-150, d_out * 1e140
        elif kind != "float16" and rng.random() < 0.5:
            v = (v.astype(np.float64) * 1e-12).astype(v.dtype)
            d_out = (d_out.astype(np.float64) * rng.choice([1, 1e12, 1e20])).astype(v.dtype)
        with np.errstate(all="ignore"):
            out, lse = reference.attention(q, k, v, return_lse=True, **options)
            given = (q, k, v, out.astype(q.dtype), lse.astype(np.float64 if kind == "float64" else np.float32))
            given = (*given, d_out, d_lse)
            want = reference.backward(*given, **options)
            bounds = reference.backward_bound(*given, dot=kind.endswith("dot"), **options)
            results = [emulated(given[:3], given[3:], (), options, kind, rng)]
            if unit is not None:
                monkeypatch.setenv("SPEEDLIGHT_ISA", unit)
                results.append(sl.attention_backward(*given, **options))
            for got in results:
                shares(got, want, bounds, ())
        endless += sum(int(np.isinf(x).sum()) for x in bounds)
        held += sum(int(np.isfinite(x).sum()) for x in bounds)
    assert held and (endless or kind == "float64")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_hidden_is_in_no_bound(rng, kind):
    """NaN and infinities that nobody sees; and those that are seen only reach where they come out."""
    dtype, logs = numpy_dtype(kind.split()[0]), np.float64 if kind == "float64" else np.float32
    arrays = [x.astype(dtype) for x in qkv(rng, "float64", 1, 2, 1, 30, 40, 8, 6)]
    options = {"mask": sl.expression(lambda b, h, i, j: (j % 5 != 2) & (i % 7 != 3)), "q_start": 0}
    for hidden in (np.nan, np.inf):
        for x in arrays[1:]:
            x[:, :, 2::5] = hidden
        arrays[0][:, :, 3::7] = hidden
        out, lse = reference.attention(*arrays, return_lse=True, **options)
        out, d_lse, lse = out.astype(dtype), lse.astype(logs), lse.astype(logs)
        out[:, :, 3::7] = d_lse[:, :, 3::7] = hidden
        with np.errstate(all="ignore"):
            emulated_shares(arrays, (out, lse, out, d_lse), options, kind, rng)
            bounds = reference.backward_bound(*arrays, out, lse, out, d_lse, dot=kind.endswith("dot"), **options)
            assert all(np.isfinite(x).all() for x in bounds)
            shown = out.copy()
            shown[0, 0, 4, 1] = hidden
            emulated_shares(arrays, (out, lse, shown, d_lse), options, kind, rng)


BROKEN = {  # what is wrong, and which gradients that shows in
    "one key of many": "q",
    "half a key": "q",
    "tile twice": "q",
    "block of rows twice": "kv",
    "one row of many": "kv",
    "a head of the group": "kv",
    "score": "qkv",
    "lse of other rows": "qkv",
    "delta of other rows": "qk",
    "nothing flows into lse": "qk",
    "pair swapped": "q",
}


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_gradients_are_outside(rng, broken):
    q, k, v = qkv(rng, "float32", 1, 2, 1, 250, 300, 32, 16)
    out, lse = (x.astype(np.float32) for x in reference.attention(q, k, v, return_lse=True))
    d_out, d_lse = (rng.standard_normal(x.shape).astype(np.float32) for x in (out, lse))
    right = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "d_out": d_out, "d_lse": d_lse}
    want, bounds = reference.backward(**right), reference.backward_bound(**right)
    got = broken_gradients(broken, right)
    for name, g, w, bound in zip("qkv", got, want, bounds, strict=True):
        if name in BROKEN[broken]:
            outside = (np.abs(g - w) > bound).any(axis=-1)
            assert outside.mean() >= 0.75, f"d{name}: {outside.mean():.0%} of the rows"


def broken_gradients(broken: str, right: dict[str, Any]) -> Any:
    wrong, options = {name: x.copy() for name, x in right.items()}, {}
    match broken:
        case "one key of many":
            options["mask"] = np.arange(300) != 299
        case "half a key":
            options["score"] = [np.where(np.arange(300) == 150, -np.log(2), 0.0)]
        case "tile twice":
            wrong |= {name: np.concatenate([wrong[name], wrong[name][:, :, 128:256]], axis=2) for name in "kv"}
        case "block of rows twice":
            for name in ("d_out", "d_lse"):
                wrong[name][:, :, :192] *= 2
        case "one row of many":
            options["mask"] = np.arange(250)[:, None] != 249
        case "a head of the group":
            wrong["lse"][:, 1] = -np.inf
        case "score":
            options["scale"] = 32**-0.5 * (1 + 1e-4)
        case "lse of other rows":
            wrong["lse"] = np.roll(wrong["lse"], 1, axis=2)
        case "delta of other rows":
            wrong["d_lse"] = np.roll(wrong["d_lse"], 1, axis=2)
        case "nothing flows into lse":
            wrong["d_lse"][...] = 0
        case "pair swapped":
            wrong["v"] = wrong["v"][:, :, np.arange(300) ^ 1]
    return reference.backward(**wrong, **options)


def unit_of(kind: str) -> str | None:
    """The best vector unit here that computes this kind so."""
    dot = [x.product("bf16") == "pairs" and kind.startswith("bfloat16") for x in host_isas()]
    return next((x.name for x, pairs in zip(host_isas(), dot, strict=True) if pairs == kind.endswith("dot")), None)


def main(seed: int, first: int, count: int) -> None:
    worst: dict[str, list[Shares]] = collections.defaultdict(list)
    with contextlib.suppress(KeyboardInterrupt):  # then what there is so far
        for number in range(first, first + count):
            rng = np.random.default_rng([seed, number])
            kind = str(rng.choice(KINDS))
            try:
                name, found = one_problem(rng, kind, unit_of(kind))
            except AssertionError as error:
                print(f"OUTSIDE, number {number}: {error}", flush=True)
                continue
            for how, x in zip(("in NumPy", "engine"), found, strict=False):
                worst[f"{kind}, {how}"].append(x)
                worst[f"{kind}, {how}: {name}"].append(x)
    for row, x in sorted(worst.items(), key=lambda y: (":" in y[0], -max(max(z.values()) for z in y[1])))[:60]:
        used = {name: [z[name] for z in x if name in z] for name in ("dq", "dk", "dv", "tables", "sinks")}
        texts = (f"{name} {np.max(z):.3f} ({np.median(z):.3f}, {len(z)})" for name, z in used.items() if z)
        print(f"{row:70}", *texts)


if __name__ == "__main__":
    main(*(int(os.environ.get(name, number)) for name, number in (("SEED", 1), ("FIRST", 0), ("COUNT", 300))))
