"""`speedlight attend`: attention over a file, and its check against float64."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import speedlight as sl

from ..arrays.files import write_arrays
from ..errors import ArgumentError
from ..host.machine import current_isa
from ..problem.problem import Problem
from .options import Dropout, FileOptions, Json, Seed, Unit, check_seed, on_unit, takes_listed
from .reports import check_output, plan_figures, plan_rows, print_report, progress

_LONG = 0.5  # seconds, at the machine's peak: then head by head


@takes_listed
def attend(
    given: FileOptions,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to write out and lse: .safetensors or .npz; .npy holds out alone."),
    ] = None,
    top_left: Annotated[bool, typer.Option("--top-left", help="Causal, aligned at the start.")] = False,
    dropout: Dropout = 0.0,
    seed: Seed = None,
    isa: Unit = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare every element with float64; exit 1 if one is outside its bound.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Computes attention of a file: softmax(scale·QKᵀ)V, its log-sum-exp, and the plan it followed."""
    if top_left and given.causal:
        raise ArgumentError("--top-left: expected either --causal or --top-left; got both.")
    check_output(output)
    if output is not None and any([x.exists() and output.exists() and output.samefile(x) for x in given.files]):
        raise ArgumentError(f"--output: expected another file than those that are read; got {output}.")
    check_seed(dropout, seed)
    arrays, options = given.read()
    options |= {"dropout": dropout, "seed": seed} | ({"causal": "top-left"} if top_left else {})
    with on_unit(isa):
        plan = sl.plan(*arrays, **options)
        out, lse, seconds = _attend(arrays, options, plan)
        if seconds < (plan.seconds_at_least or 0):
            _measure_again(plan)
            plan = sl.plan(*arrays, **options)
        written = {"out": out} if output is not None and output.suffix == ".npy" else {"out": out, "lse": lse}
        if output is not None:
            write_arrays(output, written)
        report: dict[str, Any] = {
            "out": {"shape": list(out.shape), "dtype": out.dtype.name},
            "seconds": seconds,
            "gflops": None if plan.flops is None else plan.flops / seconds / 1e9,
            "kernel": plan.kernel,
            "output": str(output) if output else None,
            "written": list(written) if output else [],
        }
        if check:
            report["check"] = _check(arrays, options, plan.problem, out, lse)
    print_report(as_json, report | {"plan": plan_figures(plan)}, [*_rows(report, plan), *plan_rows(plan)])
    if check and not report["check"]["passed"]:
        raise typer.Exit(1)


def _attend(arrays: list[np.ndarray], options: dict[str, Any], plan: sl.Plan) -> tuple[np.ndarray, np.ndarray, float]:
    """The call; if it takes long head by head, under a progress bar. The bits are the same."""
    if plan.tile_flops < _LONG * (plan.peak_flops or 0) or not _heads_are_alike(plan.problem):
        out, lse, seconds = arrays[0], arrays[0], 0.0
        for _ in range(2):  # the first call also loads or compiles the kernel; the second is the one to time
            start = time.perf_counter()
            out, lse = sl.attention(*arrays, return_lse=True, **options)
            seconds = time.perf_counter() - start
        return out, lse, seconds
    parts, seconds = [], 0.0
    with progress("attention by heads", plan.problem.kv_heads) as advance:
        for some in _split_heads(arrays, options["layout"], plan.problem):
            start = time.perf_counter()
            parts.append(sl.attention(*some, return_lse=True, **options))
            seconds += time.perf_counter() - start
            advance()
    out, lse = _join(parts, options["layout"])
    return out, lse, seconds


def _measure_again(plan: sl.Plan) -> None:
    """Roofs that a call has beaten were measured while the machine was busy."""
    from ..cpu.runtime import roof

    unit = current_isa()
    storage = "f32" if plan.problem.widened else plan.problem.storage
    roof.measure(unit, roof.kind_of_peak(unit, storage), plan.threads)


def _heads_are_alike(problem: Problem) -> bool:
    """Returns whether heads can be computed alone: no mask, score or dropout asks for a head's number."""
    expressions = [x for x in (problem.mask, problem.score) if x is not None]
    return problem.kv_heads > 0 and not problem.dropout and not any("h" in x.root.uses for x in expressions)


def _split_heads(arrays: list[np.ndarray], layout: str, problem: Problem) -> Iterator[list[np.ndarray]]:
    """q, k and v of each head of the keys."""
    axis, group = layout.index("h"), problem.group
    for h in range(problem.kv_heads):
        heads = (slice(h * group, (h + 1) * group), slice(h, h + 1), slice(h, h + 1))
        yield [x[(slice(None),) * axis + (some,)] for x, some in zip(arrays, heads, strict=True)]


def _join(parts: list[tuple[np.ndarray, np.ndarray]], layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Results of heads, as those of one call."""
    axis, lse_axis = layout.index("h"), len(layout) - 3
    outs, lses = zip(*parts, strict=True)
    return np.concatenate(outs, axis=axis), np.concatenate(lses, axis=lse_axis)


def _check(
    arrays: list[np.ndarray], options: dict[str, Any], problem: Problem, out: np.ndarray, lse: np.ndarray
) -> dict[str, Any]:
    """Compares every element with float64: the largest error, and the largest share of its bound."""
    dot = current_isa().dot(out.dtype)
    alike, layout = _heads_are_alike(problem), options["layout"]
    wanted, bounds = [], []
    with progress("check in float64", problem.kv_heads if alike else 1) as advance:
        for some in _split_heads(arrays, layout, problem) if alike else [arrays]:
            wanted.append(sl.reference.attention(*some, return_lse=True, **options))
            bound = sl.reference.error_bound(*some, dot=dot, **options)
            bounds.append((bound.out, bound.lse))
            advance()
    outside, share, largest = 0, 0.0, 0.0
    for got, expected, bound in zip((out, lse), _join(wanted, layout), _join(bounds, layout), strict=True):
        got = got.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            same = (got == expected) | (np.isnan(got) & np.isnan(expected))
            error = np.where(same, 0.0, np.abs(got - expected))
            error[np.isnan(error)] = np.inf  # where one of the two is NaN
            outside += int((~(same | (np.isfinite(error) & (error <= bound)))).sum())
            shares = np.where(same, 0.0, error / np.maximum(bound, 1e-320))
        if error.size:
            share = max(share, float(shares.max()))
            largest = max(largest, float(error.max())) if expected.ndim == out.ndim else largest
    figures = {"passed": not outside, "outside": outside, "largest_error": largest, "share_of_bound": share}
    return figures | {"elements": int(out.size)}


def _rows(report: dict[str, Any], plan: sl.Plan) -> list[tuple[str, str]]:
    """The lines above the plan's."""
    out, seconds = report["out"], report["seconds"]
    rate = "" if report["gflops"] is None else f" ({report['gflops']:.3g} GFLOP/s)"
    rows = [("result", f"out {tuple(out['shape'])} {out['dtype']}, in {seconds * 1e3:.3g} ms{rate}")]
    if report["output"]:
        alone = " (.npy holds out alone: .npz and .safetensors keep lse, too)" if len(report["written"]) == 1 else ""
        rows.append(("written", f"{report['output']}: {' and '.join(report['written'])}{alone}"))
    if "check" in report:
        c = report["check"]
        word = "passed" if c["passed"] else "FAILED"
        error = f"largest error {c['largest_error']:.2g}, {c['share_of_bound']:.0%} of its bound"
        if not math.isfinite(c["share_of_bound"]):
            error = "some of them infinite or NaN where float64 has a number, or the other way round"
        count = f"{c['outside']:,} of {c['elements']:,}" if c["outside"] else f"{c['elements']:,}"
        told = f"{count} elements {'outside their bounds ' if c['outside'] else ''}against float64"
        rows.append(("check", f"{word}: {told}, {error}"))
    if plan.seconds_at_least is not None and seconds < plan.seconds_at_least:
        rows.append(("faster", "than “time at least” below: caches hold the arrays, or others were busy meanwhile"))
    return rows
