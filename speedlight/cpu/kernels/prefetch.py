"""Prefetches of what a thread's next task will read and write, while this one computes.

A short sequence's arrays are read from memory once, by tasks that would wait for every row. These are hints: another
thread may draw that ticket, and any address will do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...problem.problem import TILE
from ..language.vector import I64, PTR, Function, Value
from ..memory.records import FORWARD, PREFETCH
from ..memory.shape import Shape
from ..memory.words import Words

_LEVEL = 2  # a task's arrays fill the first-level cache several times


def find_prefetch(task: Any) -> tuple[Value, Value]:
    """Returns whether a task follows, and what of it is fetched next (PREFETCH): of its keys, if they are others, a
    tile.
    """
    k, a = task.k, task.a
    cursors, number = k.buffer(I64, len(PREFETCH.names)), k.p["number"] + a.upcoming
    follows = a.upcoming.differs(0) & (number < a.limit)
    with k.when(follows):
        item = task.item_of(number)
        head, first = task.block_of(number, item)
        words = {x: task.row_of(x, head * a.group, first // a.group, item) for x in ("q", "out")}
        words |= {x: task.keys_at(x, head, item) for x in ("k", "v")}
        rows = k.min(item.q_len * a.group - first, a.panels * task.s.panel)
        same = words["k"].equals(task.keys_at("k", task.head, task.item))
        words["positions"] = (rows + (a.group - 1)) // a.group
        words["keys"] = k.select(same, k.i64(0), k.min(item.k_len, k.i64(TILE)))
        for name, word in words.items():
            k.store(word, cursors, PREFETCH.offset(name))
    return follows, cursors


def fetch_next(k: Function) -> None:
    """Fetches a share of what `prefetch` says, if a task follows, and goes on to the next."""
    with k.when(k.p["follows"].differs(0)):
        a, prefetch = Words(k, FORWARD, k.p["a"]), Words(k, PREFETCH, k.p["prefetch"])
        with _share(k, prefetch, "positions", a.next_positions):
            for name in ("q", "out"):
                row, lines = getattr(prefetch, name), getattr(a, f"{name}_lines")
                with k.range(0, a.group) as head:
                    _fetch_row(k, row + head * getattr(a, f"{name}_head"), lines, write=name == "out")
                k.store(row + getattr(a, f"{name}_row"), k.p["prefetch"], PREFETCH.offset(name))
        with _share(k, prefetch, "keys", a.next_keys):
            for name in ("k", "v"):
                row = getattr(prefetch, name)
                _fetch_row(k, row, getattr(a, f"{name}_lines"))
                k.store(row + getattr(a, f"{name}_row"), k.p["prefetch"], PREFETCH.offset(name))


@contextlib.contextmanager
def _share(k: Function, prefetch: Words, name: str, most: Value) -> Iterator[None]:
    """Loops over as many as are left, or `most`; there are fewer left then."""
    left = getattr(prefetch, name)
    count = k.min(left, most)
    k.store(left - count, k.p["prefetch"], PREFETCH.offset(name))
    with k.range(0, count):
        yield


def fetch_lines(k: Function, s: Shape, table: Value, element: Value, *, write: bool = False) -> None:
    """Fetches the next lines of as many rows as a vector has lanes, from an element on, while those before are
    transposed; a table has the rows' addresses. Only where the shape says so.
    """
    if s.fetches_rows:
        for lane in range(s.lanes):
            k.prefetch(k.at(k.load(PTR, table, lane * 8), element * s.storage_bytes), write=write)


def _fetch_row(k: Function, row: Value, lines: Value, *, write: bool = False) -> None:
    with k.range(0, lines) as line:
        k.prefetch(k.pointer(row + line * 64), _LEVEL, write=write)
