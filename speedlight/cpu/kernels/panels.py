"""Panels of queries against tiles of keys, as tasks of the forward and the backward kernels see them."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..language.vector import I64, Function, Value
from ..memory.records import Record, together
from .task import Box, Work


class Panel:
    """A panel's memory, by name."""

    def __init__(self, task: PanelWork, i: Value) -> None:
        self.k, self.task, self.i = task.k, task, i
        self.at = task.k.at(task.scratch, task.a.at_panels + i * task.a.panel_bytes)

    def word(self, name: str) -> Value:
        """Loads one of the words that all lanes share."""
        return self.k.load(I64, self.at, self.task.ends.offset(name))

    def part(self, name: str) -> Value:
        return self.task.part(name, self.at)

    def pairs(self, name: str) -> Value:
        """Returns one of PAIRS of this panel and the tile at hand; panels taken together have a place each."""
        place = self.i % together(self.task.s.panel)
        return self.task.part(name, self.k.at(self.task.part("pairs"), place * self.task.a.pair_bytes))

    def lanes(self, name: str) -> Value:
        """Returns [panel] of what each lane has of this name."""
        return self.k.at(self.part("lanes"), self.task.lanes.offset(name) * self.task.s.panel)


class Tile(NamedTuple):
    """Some keys, with where they and their values lie."""

    start: Value
    length: Value
    keys: Value
    k_row: Value
    values: Value
    v_row: Value  # from a unit of values to the next
    rest: tuple[Value, Value] | None = None  # of keys in two parts: where the second lies, and its row


class PanelWork(Work):
    """One block of queries, in panels. A subclass says what a panel keeps of all lanes (`ends`) and of each."""

    ends: Record
    lanes: Record
    heads: tuple[Value, Value]  # first and last

    def __init__(self, k: Function, parts: Any) -> None:
        super().__init__(k, parts.shape, parts.visibility, parts.extent)
        self.parts = parts
        self.fetch = k.buffer(I64, max(1, len(parts.per_query_streams) * self.s.panel))  # rows of tables

    def box(self, first: Value, end: Value) -> Box:
        """Returns the queries of panels [first, end)."""
        k, lanes = self.k, [Panel(self, x).lanes("position") for x in (first, end - 1)]
        return Box(self.heads, (k.load(I64, lanes[0]), k.load(I64, lanes[1], (self.s.panel - 1) * 8)))
