"""`speedlight bench`: this machine's figures, beside those of every installed peer."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ..errors import ArgumentError
from .measuring import about, problems_of, row_of
from .options import Backward, Json, Unit, on_unit
from .peers import BACKWARD, LIBRARIES, PEERS
from .reports import console, print_json, progress, write_json

_DTYPES = ("float32", "float16", "bfloat16", "float64")


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
    isa: Unit = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A .json file for the rows.")] = None,
    as_json: Json = False,
) -> None:
    """Measures attention beside its peers, in turn (A B A B). A row whose result is not right is refused.

    --backward: gradients, beside PyTorch's.
    """
    _check_sizes(dtype or [], head_dim or [], q_len or [], q_heads)
    problems = problems_of(dtype, head_dim, q_len, causal, q_heads, backward)
    names = _names(peer, backward)
    if turns < 1:
        raise ArgumentError(f"--turns: expected at least 1; got {turns}.")
    if output is not None and (output.suffix != ".json" or not output.parent.is_dir()):
        raise ArgumentError(f"--output: expected a name that ends in .json, in a directory that exists; got {output}.")
    missing = {x: f"not installed ({LIBRARIES.get(x, x)})" for x in names if find_spec(LIBRARIES.get(x, x)) is None}
    rows = []
    with on_unit(isa), progress("problems", len(problems)) as advance:
        for problem in problems:
            rows.append(row_of(problem, turns, [x for x in names if x not in missing]))
            advance()
        report = about() | {"backward": backward, "missing": missing, "rows": rows}
    if output is not None:
        write_json(output, report)
    if as_json:
        print_json(report)
    else:
        _print(report, output)
    if any("refused" in row for row in rows):
        raise typer.Exit(1)


def _names(peer: list[str] | None, backward: bool) -> list[str]:
    """Returns the names of the peers that are asked for."""
    known = BACKWARD if backward else tuple(PEERS)
    names = list(known) if peer is None else [] if peer == ["none"] else peer
    if unknown := [x for x in names if x not in known]:
        beside = " beside --backward" if backward else ""
        raise ArgumentError(f"--peer: expected some of {', '.join(known)}, or none{beside}; got {unknown[0]!r}.")
    return names


def _check_sizes(dtypes: list[str], dims: list[int], lengths: list[int], heads: int) -> None:
    for name, values in (("head_dim", dims), ("q_len", lengths), ("q_heads", [heads])):
        if any(not 1 <= x <= 1 << 20 for x in values):
            raise ArgumentError(f"{name}: expected sizes from 1 to 1,048,576; got {', '.join(map(str, values))}.")
    for name in dtypes:
        if name not in _DTYPES:
            raise ArgumentError(f"--dtype: expected some of {', '.join(_DTYPES)}; got {name!r}.")


def _print(report: dict[str, Any], output: Path | None) -> None:
    screen, rows = console(), report["rows"]
    screen.print(_table(rows, screen.width))
    if any(row.get("ratios") for row in rows):
        screen.print("Of a peer: its time over ours, median of turns; above 1: speedlight is faster.", style="dim")
    for row in rows:
        if "refused" in row:
            screen.print(f"[red]{escape(row['name'])}: refused: {escape(row['refused'])}[/]")
    notes = {f"{name}: {why}" for row in rows for name, why in row.get("notes", {}).items()}
    for why in [*(f"{name}: {why}" for name, why in report["missing"].items()), *sorted(notes)]:
        screen.print(escape(why), style="dim")
    if output is not None:
        screen.print(escape(f"written {output}"))


def _table(rows: list[dict[str, Any]], width: int) -> Table:
    """Returns a line for each row; where it is wide enough, with quartiles."""
    found = {x for row in rows for x in row.get("ratios", {})}
    names = [x for x in PEERS if x in found]
    has_quartiles = width >= 70 + 19 * len(names)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("problem", no_wrap=True)
    titles = [f"{name} (quartiles)" if has_quartiles else name for name in names]
    for title in ("ms", "GFLOP/s", "of peak" if has_quartiles else "peak", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        name = row["name"] if has_quartiles else re.sub(r" H\d+", "", row["name"])
        if "refused" in row:
            table.add_row(name, "[red]refused[/]")
            continue
        cells = [f"{row['seconds']['speedlight'][2] * 1e3:.3g}", f"{row['gflops']:.0f}", f"{row['share_of_peak']:.0%}"]
        for peer in names:
            _, low, middle, high, _ = row["ratios"].get(peer, [None] * 5)
            around = f" ({low:.2f}–{high:.2f})" if has_quartiles and middle else ""
            cells.append(f"{middle:.2f}{around}" if middle else "–")
        table.add_row(name, *cells)
    return table
