"""`speedlight bench`: this machine's figures, beside every installed peer, or beside another version of ourselves."""

from __future__ import annotations

import itertools
import platform
import re
import statistics
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.markup import escape
from rich.table import Table

import speedlight as sl

from .. import engines as engine
from ..cpu.runtime.tuned import tuning_of
from ..errors import ArgumentError, how_to_install
from ..host import machine
from ..host.tunings import FAMILIES
from .commits import beside_commit
from .measuring import (
    BACKWARD_PEERS,
    PEERS,
    Call,
    Peer,
    check,
    check_gradients,
    farthest,
    measure,
    name_of,
    peers,
    quantiles,
    tensors,
    with_gradients,
)
from .options import Backward, Device, Json, Unit, check_device, on_unit
from .pictures import check_path, model_bars, roofline
from .reports import console, print_json, progress, write_json

_TOLERANCE = {"float32": 1e-4, "float64": 1e-9, "float16": 1e-2, "bfloat16": 5e-2}  # of a peer's result, against ours
_DTYPES = ("float32", "float16", "bfloat16")
GPU_KINDS = ("forward", "float32", "mask", "decode")
RANK_KINDS = ("ring", "ulysses", "exact", "window")
MODEL_KINDS = ("gpt", "mask", "flex", "minilm", "prefill", "generate")
_KINDS = {"--device cuda": GPU_KINDS, "--models": MODEL_KINDS, "--ranks": RANK_KINDS}
_ONLY = ", ".join(f"of {name}: {', '.join(kinds)}" for name, kinds in _KINDS.items())


def bench(
    dtype: Annotated[
        list[str] | None, typer.Option(help="May be given several times. Default float32, float16 and bfloat16.")
    ] = None,
    head_dim: Annotated[list[int] | None, typer.Option(help="May be given several times. Default 64 and 128.")] = None,
    q_len: Annotated[
        list[int] | None,
        typer.Option(help="Queries, and keys. May be given several times. Default 128, 512, 2048 and 8192."),
    ] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Hide keys after the query, or none. Default both.")
    ] = None,
    q_heads: Annotated[int, typer.Option(help="Query heads; as many of keys and values.")] = 8,
    peer: Annotated[
        list[str] | None,
        typer.Option(help=f"Which peers, of {', '.join(PEERS)}, or none. Default all that are installed."),
    ] = None,
    turns: Annotated[int, typer.Option(help="Samples of each, in turn.")] = 5,
    backward: Backward = False,
    device: Device = "cpu",
    isa: Unit = None,
    models: Annotated[
        bool, typer.Option("--models", help="Measure whole models and training steps, beside PyTorch's attention.")
    ] = False,
    ranks: Annotated[
        int, typer.Option(help="Measure attention over so many processes, beside one with all their threads.")
    ] = 0,
    only: Annotated[str, typer.Option(help=f"One kind {_ONLY}.")] = "",
    base: Annotated[str | None, typer.Option(help="A commit of this clone to compare with, instead of peers.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A .json file for the rows.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A picture: .png, .svg or .pdf. Of the roofline; of --models, bars.")
    ] = None,
    mask: Annotated[str, typer.Option(hidden=True)] = "both",
    as_json: Json = False,
) -> None:
    """Measures attention beside its peers, in turn (A B A B). A row whose result is not right is refused.

    --backward: gradients, beside PyTorch's. --device cuda: forward, masks and decode on a GPU, beside its own peers.
    """
    check_device(device)
    if device != "cpu" or models or ranks:
        more = {
            "--dtype": dtype, "--head-dim": head_dim, "--q-len": q_len, "--peer": peer, "--base": base,
            "--backward": backward, "--isa": isa, "--plot": plot and not models,
        }  # fmt: skip
        _listed(device, models, ranks, only, turns, output, plot, as_json, [name for name, x in more.items() if x])
        return
    if only:
        raise ArgumentError(f"--only: expected --models, --ranks or --device cuda beside it; got {only!r} alone.")
    shapes = _shapes(dtype, head_dim, q_len, _causal(causal, mask), q_heads)
    names = _names(peer, backward)
    _check(turns, output)
    if plot is not None:
        check_path(plot, "--plot")
        if base is not None:
            raise ArgumentError("--plot: expected no --base beside it.")
    rows, missing = [], {}
    if base is not None:
        source = beside_commit(base, shapes, turns, backward)
    else:
        source = _measured(shapes, names, turns, missing, backward)
    with on_unit(isa), progress("problems", len(shapes)) as advance:
        for row in source:
            rows.append(row)
            advance()
    with on_unit(isa):
        about = _about()
    report = about | {"base": base, "backward": backward, "missing": missing, "rows": rows}
    if output is not None:
        write_json(output, report)
    if plot is not None:
        roofline(report, plot)
    if as_json:
        print_json(report)
    else:
        _print(report, output, plot)
    if any("refused" in row for row in rows):
        raise typer.Exit(1)


def _check(turns: int, output: Path | None) -> None:
    if turns < 1:
        raise ArgumentError(f"--turns: expected at least 1; got {turns}.")
    if output is not None and (output.suffix != ".json" or not output.parent.is_dir()):
        raise ArgumentError(f"--output: expected a name that ends in .json, in a directory that exists; got {output}.")


def _listed(
    device: str, models: bool, ranks: int, only: str, turns: int, output: Path | None, plot: Path | None,
    as_json: bool, others: list[str],
) -> None:  # fmt: skip
    """A list of problems of its own: the GPU's, whole models, or those of several processes."""
    asked = [name for name, x in zip(_KINDS, (device != "cpu", models, ranks), strict=True) if x]
    what, kinds = asked[-1], _KINDS[asked[-1]]
    if others := [*others, *asked[:-1]]:
        more = "--plot, " if what == "--models" else ""
        raise ArgumentError(
            f"{what}: expected no more than --only, --turns, --output, {more}and --json beside it; got "
            f"{', '.join(others)}."
        )
    if only not in ("", *kinds):
        raise ArgumentError(f"--only: expected one of {', '.join(kinds)}; got {only!r}.")
    _check(turns, output)
    if plot is not None:
        check_path(plot, "--plot")
    if models:
        from . import models as whole

        problems = whole.problems(only)
        if only not in whole.KINDS:
            if find_spec("transformers") is None:
                raise ArgumentError(f"--models: expected transformers beside PyTorch: {how_to_install('bench')}.")
            from . import language_models

            problems = itertools.chain(problems, language_models.problems(only))
        report, rows, line = _about(), (whole.measured(x, turns) for x in problems), whole.line
        if not as_json:
            print(whole.LEGEND, flush=True)
    elif ranks:
        if find_spec("torch") is None:
            raise ArgumentError(f"--ranks: expected PyTorch: {how_to_install('torch')}.")
        from . import ranks as several

        report, rows, line = several.measured(ranks, turns, only, _about())
        if not as_json:
            print(several.LEGEND, flush=True)
    else:
        engine.gpu("device", "device='cpu'").device_of(device)
        from . import gpu

        roofs = gpu.roofs(turns)
        report, rows = gpu.about() | {"roofs": roofs}, gpu.rows(turns, only)
        line = lambda row: gpu.line(row, roofs)  # noqa: E731
    report["rows"] = []
    for row in rows:
        report["rows"].append(row)
        if not as_json:
            print(line(row), flush=True)
        if output is not None:
            write_json(output, report)
    if plot is not None:
        model_bars(report, plot)
    if as_json:
        print_json(report)
    if any("refused" in row for row in report["rows"]):
        raise typer.Exit(1)


def _names(peer: list[str] | None, backward: bool) -> list[str]:
    """Of the peers that are asked for."""
    known = BACKWARD_PEERS if backward else PEERS
    names = list(known) if peer is None else [] if peer == ["none"] else peer
    if unknown := [x for x in names if x not in known]:
        beside = " beside --backward" if backward else ""
        raise ArgumentError(f"--peer: expected some of {', '.join(known)}, or none{beside}; got {unknown[0]!r}.")
    return names


def _causal(causal: bool | None, mask: str) -> tuple[bool, ...]:
    """Which are measured; --mask is what --causal was called."""
    known = {"full": (False,), "causal": (True,), "both": (False, True)}
    if mask not in known:
        raise ArgumentError(f"--mask: expected full, causal or both; got {mask!r}. It is called --causal now.")
    return known[mask] if causal is None else (causal,)


def _shapes(
    dtypes: list[str] | None, dims: list[int] | None, lengths: list[int] | None, causal: tuple[bool, ...], heads: int
) -> list[tuple[Any, ...]]:
    for name, values in (("head_dim", dims or []), ("q_len", lengths or []), ("q_heads", [heads])):
        if any(not 1 <= x <= 1 << 20 for x in values):
            raise ArgumentError(f"{name}: expected sizes from 1 to 1,048,576; got {', '.join(map(str, values))}.")
    for name in dtypes or []:
        if name not in _TOLERANCE:
            raise ArgumentError(f"--dtype: expected some of {', '.join(_TOLERANCE)}; got {name!r}.")
    return [
        (t, heads, n, d, c)
        for t in dtypes or _DTYPES
        for d in dims or (64, 128)
        for n in lengths or (128, 512, 2048, 8192)
        for c in causal
    ]


class _Subject(NamedTuple):
    """A call that is measured."""

    arrays: list[np.ndarray]
    call: Call
    got: Any
    refused: str | None  # why its result is not right
    peers: dict[str, Peer]
    plan: sl.Plan


def _subject(shape: tuple[Any, ...], backward: bool) -> _Subject:
    arrays, causal = tensors(*shape[:4]), shape[4]
    plan = sl.plan(*arrays, causal=causal, backward=backward)
    if backward:
        arrays = with_gradients(arrays, causal)
        call = lambda: sl.attention_backward(*arrays, causal=causal)  # noqa: E731
        got = call()
        return _Subject(arrays, call, got, check_gradients(arrays, got, causal), BACKWARD_PEERS, plan)
    call = lambda: sl.attention(*arrays, causal=causal)  # noqa: E731
    got = call()
    return _Subject(arrays, call, got, check(arrays, got, causal), PEERS, plan)


def _measured(
    shapes: list[tuple[Any, ...]], names: list[str], turns: int, missing: dict[str, str], backward: bool = False
) -> Iterator[dict[str, Any]]:
    from ..cpu.runtime import roof

    isa, threads = machine.current_isa(), sl.get_threads()
    read = roof.bandwidth(isa, threads, 512 << 20)
    for shape in shapes:
        dtype, _, _, _, causal = shape
        ours, name = _subject(shape, backward), name_of(*shape, backward=backward)
        row = {"name": name, "dtype": dtype, "length": shape[2], "head_dim": shape[3], "causal": causal}
        if ours.refused:
            yield row | {"refused": ours.refused}
            continue
        wanted = [x for x in names if not missing.get(x, "").startswith("not installed")]
        others, without = peers(dtype, ours.arrays, causal, wanted, ours.peers)
        missing |= {x: why for x, why in without.items() if why.startswith("not installed")}
        notes = {x: why for x, why in without.items() if x not in missing}
        for name in list(others):
            off = farthest(others[name](), ours.got)
            if not off <= _TOLERANCE[dtype]:
                notes[name] = f"another result than ours, by {off:.2g}"
                del others[name]
        kind = (
            "f64" if dtype == "float64" else "bf16" if dtype == "bfloat16" and isa.product("bf16") == "pairs" else "f32"
        )
        times, peaks = measure(
            {"speedlight": ours.call} | others, turns, lambda k=kind: roof.peak_flops(isa, k, threads)
        )
        plan, flops = ours.plan, ours.plan.flops or 0
        seconds, peak = statistics.median(times["speedlight"]), statistics.median(peaks)
        # turn by turn, so that what slows both down does not count
        turn_ratios = {
            x: [a / b for a, b in zip(t, times["speedlight"], strict=True)]
            for x, t in times.items()
            if x != "speedlight"
        }
        yield row | {
            "kernel": plan.kernel, "flops": flops, "bytes_moved": plan.bytes_read + plan.bytes_written,
            "gflops": flops / seconds / 1e9,
            "peak": peak / 1e9, "share_of_peak": flops / seconds / peak, "read_bandwidth": read,
            "seconds": {x: quantiles(t) for x, t in times.items()}, "notes": notes,
            "ratios": {x: quantiles(t) for x, t in turn_ratios.items()},
        }  # fmt: skip


def _about() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "speedlight": sl.__version__}
    for package in ("numpy", "llvmlite", "torch", "onnxruntime", "openvino", "jax"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "machine": machine.cpu_name(), "family": FAMILIES[machine.cpu_family()], "threads": sl.get_threads(),
        "isa": machine.current_isa().name, "schedule": tuning_of(machine.current_isa()).origin._asdict(),
        "versions": versions,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _print(report: dict[str, Any], output: Path | None, plot: Path | None) -> None:
    screen = console()
    rows, base = report["rows"], report["base"]
    names = sorted({x for row in rows for x in row.get("ratios", {})}, key=lambda x: [*PEERS, "base"].index(x))
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    spreads = screen.width >= 70 + 19 * len(names)
    for title in ("problem", "ms") if base else ("problem", "ms", "GFLOP/s", "of peak" if spreads else "peak"):
        table.add_column(title, justify="left" if title == "problem" else "right", no_wrap=True)
    for name in names:
        table.add_column(f"{name} (quartiles)" if spreads else name, justify="right", no_wrap=True)
    for row in rows:
        if "refused" in row:
            table.add_row(row["name"], "[red]refused[/]")
            continue
        cells = [
            row["name"] if spreads else re.sub(r" H\d+", "", row["name"]),
            f"{row['seconds']['speedlight'][2] * 1e3:.3g}",
        ]
        cells += [] if base else [f"{row['gflops']:.0f}", f"{row['share_of_peak']:.0%}"]
        for name in names:
            spread = row["ratios"].get(name)
            around = f" ({spread[1]:.2f}–{spread[3]:.2f})" if spread and spreads else ""
            cells.append(f"{spread[2]:.2f}{around}" if spread else "–")
        table.add_row(*cells)
    screen.print(table)
    if names:
        screen.print("Of a peer: its time over ours, median of turns; above 1: speedlight is faster.", style="dim")
    for row in rows:
        if "refused" in row:
            screen.print(f"[red]{escape(row['name'])}: refused: {escape(row['refused'])}[/]")
    for name, why in report["missing"].items():
        screen.print(escape(f"{name}: {why}"), style="dim")
    for why in sorted({f"{name}: {text}" for row in rows for name, text in row.get("notes", {}).items()}):
        screen.print(escape(why), style="dim")
    if base:
        same = sum(row.get("same_bits", False) for row in rows)
        screen.print(f"The same bits in {same} of {len(rows)} problems.", style="dim")
    for path in (output, plot):
        if path is not None:
            screen.print(escape(f"written {path}"))
