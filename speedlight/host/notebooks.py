"""Objects as notebooks show them: tables, bars and tiles, as HTML without scripts, files or a page's styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

TILE_COLOURS = {"skipped": "#f2f2f2", "mixed": "#e69f00", "full": "#0072b2"}  # told apart by every eye, and in grey
_MOST_BARS = 16
_WIDTH = 240  # pixels of a picture of tiles


def code(text: str) -> str:
    """Returns a text that may hold anything."""
    return f"<code>{escape(text)}</code>"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names and texts."""
    return _table([(name, escape(text)) for name, text in rows])


def bars(title: str, unit: str, most: int | None, counts: Sequence[int]) -> str:
    """Returns how many of `most` each of the first sequences has, a bar for each."""
    shown = [
        (f"sequence {n}", f"<meter min='0' max='{most or 1}' value='{count}'></meter> {count:,} {escape(unit)}")
        for n, count in enumerate(counts[:_MOST_BARS])
    ]
    more = [("…", f"{len(counts) - _MOST_BARS:,} more")] if len(counts) > _MOST_BARS else []
    return f"<div>{code(title)}{_table(shown + more)}</div>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Returns a table of names, and cells that are HTML."""
    left = " style='text-align:left'"
    cells = [f"<tr><th{left}>{escape(name)}</th><td{left}>{cell}</td></tr>" for name, cell in rows]
    return f"<table><tbody>{''.join(cells)}</tbody></table>"


def tiles(classes: Sequence[Sequence[int]], caption: str) -> str:
    """Returns a picture of a square of tiles, 0 skipped, 1 mixed, 2 full: queries downwards, keys to the right."""
    names, runs = list(TILE_COLOURS), {1: "", 2: ""}
    for y, row in enumerate(classes):
        x = 0
        for kind, run in groupby(row):
            width = len(list(run))
            if kind:
                runs[kind] += f"M{x} {y}h{width}"
            x += width
    side, skipped = len(classes), TILE_COLOURS["skipped"]
    paths = [f"<path stroke='{TILE_COLOURS[names[n]]}' d='{run}'/>" for n, run in runs.items() if run]
    legend = ", ".join(f"<span style='color:{x}'>&#9632;</span> {name}" for name, x in reversed(TILE_COLOURS.items()))
    return (
        f"<figure style='margin:4px 0'><svg xmlns='http://www.w3.org/2000/svg' role='img' width='{_WIDTH}' "
        f"height='{_WIDTH}' viewBox='0 0 {side} {side}' shape-rendering='crispEdges' aria-label='{escape(caption)}'>"
        f"<rect width='{side}' height='{side}' fill='{skipped}'/><g transform='translate(0 .5)'>{''.join(paths)}</g>"
        f"</svg><figcaption>{escape(caption)}<br/>{legend}</figcaption></figure>"
    )
