"""The output of commands: a table of names and texts, or one JSON object; and a bar while a long one runs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..errors import ArgumentError, FileError
from ..problem.plan import Plan
from ..problem.rank_plan import Spread

MOST_OF_OTHERS = 0.1  # of the CPUs, while something is measured: beyond it there is no verdict
_VERDICTS = {"passed": "green", "FAILED": "red"}  # of a check


def console() -> Console:
    """Returns a console of the terminal's width; into a pipe or a file nothing is cut."""
    return Console() if _has_width() else Console(width=200)


def _has_width() -> bool:
    return sys.stdout.isatty() or "COLUMNS" in os.environ


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Names in bold, texts beside them: between words folded where the terminal ends, one line each in a pipe."""
    screen, rows = console(), list(rows)
    indent = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        room = max(20, screen.width - indent) if _has_width() else sys.maxsize
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        for n, line in enumerate(lines):
            shown = Text.assemble((("" if n else name).ljust(indent), "bold"), line)
            for word, style in _VERDICTS.items():
                shown.highlight_regex(rf"\b{word}(?=: )", style)
            screen.print(shown, soft_wrap=True)


def print_json(report: Any) -> None:
    """Prints a report on one line; infinities and NaN, which JSON lacks, are null."""
    finite = json.loads(json.dumps(report), parse_constant=lambda name: None)
    print(json.dumps(finite, ensure_ascii=False))


def print_report(as_json: bool, figures: Any, rows: Iterable[tuple[str, str]]) -> None:
    """Prints figures or rows, as --json says."""
    print_json(figures) if as_json else print_rows(rows)


def check_output(output: Path | None, *suffixes: str) -> None:
    """Raises unless --output can be written: before any work."""
    if output is not None and suffixes and output.suffix.lower() not in suffixes:
        raise ArgumentError(f"--output: expected a name that ends in {', '.join(suffixes)}; got {output.name!r}.")
    if output is not None and not output.parent.is_dir():
        raise ArgumentError(f"--output: expected a directory that exists; got {output.parent}.")


def write_text(output: Path, text: str) -> None:
    """Writes the file that --output names."""
    try:
        output.write_text(text)
    except OSError as error:
        raise FileError(f"--output: {output}: {error.strerror or error}.") from error


def is_busy(others: float | None) -> bool:
    """Returns whether other programs took so much of the CPUs that a measurement says little."""
    return others is not None and others > MOST_OF_OTHERS


def busy_rows(others: float | None, *more: str) -> list[tuple[str, str]]:
    """Returns a line that warns, if other programs took much of the CPUs, or for more reasons."""
    why = [f"other programs took {others:.0%} of the CPUs"] if others is not None and is_busy(others) else []
    why += more
    return [("busy", f"{', '.join(why)}: repeat this while little else runs")] if why else []


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Calls of what it gives advance a bar on stderr, with the time that is left; on a terminal only."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(what, total=total)
        yield lambda steps=1: bar.advance(task, steps)


_FIGURES = (
    "engine", "isa", "kernel", "threads", "panel", "tile_keys", "visible_pairs", "flops", "tile_flops", "full_flops",
    "mixed_flops", "skipped_flops", "tiles_full", "tiles_mixed", "tiles_skipped", "bytes_read", "bytes_written",
    "workspace_bytes", "materialised_bytes", "memory_ratio", "peak_flops", "bandwidth", "seconds_at_least", "backward",
)  # fmt: skip
_SIZES = ("dtype", "batch", "q_heads", "kv_heads", "head_dim", "value_dim", "causal", "scale", "dropout")


def plan_figures(plan: Plan) -> dict[str, Any]:
    """A plan's numbers, for --json; what is not known is null."""
    p = plan.problem
    problem = {name: getattr(p, name) for name in _SIZES} | {"q_lengths": p.q_lengths, "k_lengths": p.k_lengths}
    problem |= {"masked": p.mask is not None, "scored": p.score is not None}
    schedule = {"schedule": plan.origin and plan.origin._asdict()}
    figures = {"problem": problem} | {name: getattr(plan, name) for name in _FIGURES} | schedule
    figures |= {"shared_prefix": plan.shared_prefix, "balance": plan.balance and plan.balance._asdict()}
    return figures if plan.ranks is None else figures | {"ranks": spread_figures(plan.ranks)}


def spread_figures(spread: Spread) -> dict[str, Any]:
    """The numbers of a plan's ranks; a way's lists have an entry for each."""
    return asdict(spread) | {"link": spread.link._asdict(), "speedup": spread.speedup}


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """The lines of its table, in the command's words."""
    return [(name, text.replace("exact=True", "`speedlight plan --exact`")) for name, text in plan.rows()]
