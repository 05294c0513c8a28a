"""`speedlight tune`: which schedules a CPU wants, kept beside the kernels; which tiles a GPU takes."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from .. import engines as engine
from ..errors import ArgumentError
from ..host import machine
from .inspecting import bf16_report, bf16_rows
from .options import Device, Json, Unit, check_device, on_unit
from .reports import print_json, print_report, print_rows, progress

_KNOWN = {
    "dtype": ("float16", "bfloat16", "float32"),
    "head_dim": (64, 128, 256, 512),
    "kind": ("full", "causal", "masked", "decode"),
}
_SECONDS = 100.0  # no trial begins after so long


def tune(
    reset: Annotated[bool, typer.Option("--reset", help="Forget what was kept: schedules are as they ship.")] = False,
    isa: Unit = None,
    device: Device = "cpu",
    dtype: Annotated[str | None, typer.Option(help="Of a GPU: float16, bfloat16 (default) or float32.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Of a GPU: 64, 128 (default), 256 or 512.")] = None,
    kind: Annotated[str | None, typer.Option(help="Of a GPU: full (default), causal, masked or decode.")] = None,
    turns: Annotated[int | None, typer.Option(help="Samples of each candidate; default 11, of a GPU 3.")] = None,
    as_json: Json = False,
) -> None:
    """Measures which schedules this CPU wants, and keeps those that gain: processes that start later follow them.

    No bit of a result depends on them. With --device cuda: the tiles of a GPU's kernel, best first.
    """
    given = {"dtype": dtype, "head_dim": head_dim, "kind": kind}
    _check(given, turns)
    check_device(device)
    if device != "cpu":
        _tune_gpu(dtype or "bfloat16", head_dim or 128, kind or "full", turns or 3, as_json=as_json)
        return
    for name, x in given.items():
        if x is not None:
            raise ArgumentError(f"{name}: expected --device cuda beside it; a CPU has no tiles to choose.")
    with on_unit(isa):
        unit = machine.current_isa()
        if reset:
            _reset(unit, as_json=as_json)
        else:
            _tune_cpu(unit, turns, as_json=as_json)


def _check(given: dict[str, Any], turns: int | None) -> None:
    for name, known in _KNOWN.items():
        if given[name] is not None and given[name] not in known:
            raise ArgumentError(f"{name}: expected one of {', '.join(map(str, known))}; got {given[name]!r}.")
    if turns is not None and turns < 1:
        raise ArgumentError(f"turns: expected at least 1; got {turns}.")


def _reset(unit: machine.Isa, *, as_json: bool) -> None:
    from ..cpu.runtime.tuned import forget_tuning
    from ..host.tunings import shipped

    forgotten = forget_tuning(unit)
    rows = [("forgotten" if forgotten else "nothing kept", f"schedules are {shipped(unit).origin}")]
    print_report(as_json, {"isa": unit.name, "forgotten": forgotten}, rows)


def _tune_cpu(unit: machine.Isa, turns: int | None, *, as_json: bool) -> None:
    from ..cpu.runtime.tuned import keep_tuning, parts_of
    from ..host.tunings import shipped
    from . import trials

    if turns is not None and turns < trials.LEAST_TURNS:
        raise ArgumentError(
            f"turns: expected at least {trials.LEAST_TURNS} of a CPU, to tell gains from noise; got {turns}."
        )
    start, base = time.perf_counter(), shipped(unit)
    with progress("tuning", len(trials.trials_of(unit))) as advance:
        tried = list(trials.try_all(unit, base, turns or trials.TURNS, _SECONDS, advance))
    outcomes = [outcome for outcome, _ in tried]
    parts = parts_of(tried[-1][1] if tried else base, base)
    missed = [x.name for x in trials.trials_of(unit)[len(outcomes) :]]
    # "as shipped, the best" is what a file without parts says: it takes every trial
    path = keep_tuning(unit, parts) if parts or not missed else None
    products = bf16_report(unit)
    report = {
        "cpu": machine.cpu_name(), "isa": unit.name, "shipped_for": base.family,
        "seconds": time.perf_counter() - start, "parts": parts, "kept_in": str(path) if path else None,
        "not_measured": missed, **products,
        "trials": [
            {"name": x.trial, "kept": x.kept, "gain": x.confirmed.gain if x.confirmed and x.kept else 1.0,
             "candidates": {name: row._asdict() for name, row in x.verdicts.items()}}
            for x in outcomes
        ],
    }  # fmt: skip
    if as_json:
        print_json(report)
        return
    rows = [("cpu", f"{machine.cpu_name()}, {unit.name}; beside schedules {base.origin}")]
    rows += [(x.trial, _text(x)) for x in outcomes] + [(name, "not measured: no time was left") for name in missed]
    if missed:
        rows.append(("measured", f"{len(outcomes)} of {len(outcomes) + len(missed)}: try again while little else runs"))
    print_rows([*rows, *bf16_rows(products), ("kept", _where(parts, path, bool(missed)))])


def _text(outcome: Any) -> str:
    """Returns a trial's outcome in words."""
    if outcome.kept is not None:
        return f"{outcome.kept}: {outcome.confirmed.gain:.3f} times as fast, {outcome.confirmed.worst:.3f} at worst"
    best = max(outcome.verdicts, key=lambda name: outcome.verdicts[name].gain, default=None)
    if best is None:
        return "as it ships"
    x = outcome.confirmed or outcome.verdicts[best]
    return f"as it ships; the best other, {best}: {x.gain:.3f} times as fast, {x.worst:.3f} at worst: not beyond noise"


def _where(parts: dict[str, Any], path: Any, missed: bool) -> str:
    if missed and not parts:
        return "nothing new: nothing gained, and not everything was measured"
    if path is None:
        return "nothing: no file could be written (SPEEDLIGHT_CACHE=0, or what was warned of)"
    return (
        f"{path}{'' if parts else ': schedules are as they ship'}; SPEEDLIGHT_TUNING=0 ignores it, --reset forgets it"
    )


def _tune_gpu(dtype: str, head_dim: int, kind: str, turns: int, *, as_json: bool) -> None:
    """Prints the tiles: what gpu/tiles.py should say for this device."""
    engine.gpu("device", "device='cpu'")
    from ..gpu.rows import device_of
    from . import gpu_tiles

    device_of("cuda")
    with progress("tiles", None):
        measured = gpu_tiles.tune(dtype, head_dim, kind, turns)
    if as_json:
        print_json({"tiles": [{"seconds": seconds} | asdict(tile) for seconds, tile in measured]})
        return
    for seconds, tile in measured:
        print(f"{seconds * 1e6:10,.1f} us  {tile}")
