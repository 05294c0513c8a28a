"""What every command prints: a table of names and texts, or one JSON object."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Of the terminal's width; into a pipe or a file nothing is cut."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=200)


def print_rows(rows: Iterable[tuple[str, str]]) -> None:
    """Names in bold, texts beside them, folded where the terminal ends."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console().print(table)


def print_json(report: Any) -> None:
    print(json.dumps(report, ensure_ascii=False))


def size_text(n: float) -> str:
    """Bytes as people say them."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= factor:
            return f"{n / factor:.3g} {unit}"
    return f"{n:.0f} B"
