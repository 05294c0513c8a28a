"""Cascade: the rows of sequences that share leading keys see these together, then each its own keys.

A row that has seen the keys before some tile has two states, of its whole spans and of the open one. It goes on from
both in the order of keys, so no bit of a result depends on who shares what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...host.machine import number_bytes
from ...problem.problem import TILE, Problem
from ..memory.records import ITEM, ROW_AT
from ..runtime.launch import give_scratch, take_scratch
from .forward_call import Call, state_bytes

LEAST = 512  # tokens that sharing saves from being read again, at least
MOST_ROWS = 64  # of a kv head and a sequence: more are no faster together


class Run(NamedTuple):
    """Keys [start, end) that several sequences share, from tile to tile."""

    start: int
    end: int
    members: tuple[int, ...]


def shared_runs(tables: Sequence[np.ndarray], limits: Sequence[int], entry: int) -> list[list[Run]]:
    """Finds the runs of keys that sequences share, those of one depth together; a run follows the one before it.

    tables: of each sequence the numbers of its pages. limits: tokens of each that may be shared. entry: tokens of a
    page.
    """
    found: list[list[Run]] = []
    members = [n for n, limit in enumerate(limits) if limit >= TILE]
    if len(members) < 2:
        return found
    firsts = [tables[n].item(0) for n in members]
    if len({*firsts}) < len(firsts):
        _split(tables, limits, entry, (0, 0), members, found, 0)
    return found


def _split(
    tables: Sequence[np.ndarray], limits: Sequence[int], entry: int, at: tuple[int, int], members: list[int],
    found: list[list[Run]], depth: int,
) -> None:  # fmt: skip
    """Adds the runs of sequences whose keys are the same up to a token, and seen up to another; at: these two."""
    same, seen = at
    alike: dict[bytes, list[int]] = {}
    first, last = same // entry, -(-(same + TILE) // entry)
    for n in members:
        if limits[n] >= same + TILE:
            alike.setdefault(tables[n][first:last].tobytes(), []).append(n)
    for group in alike.values():
        if len(group) < 2:
            continue
        end = _common_end(tables, limits, entry, same, group)
        if (end - seen) * (len(group) - 1) < LEAST:
            _split(tables, limits, entry, (end, seen), group, found, depth)
            continue
        if len(found) == depth:
            found.append([])
        found[depth].append(Run(seen, end, tuple(group)))
        _split(tables, limits, entry, (end, end), group, found, depth + 1)


def _common_end(tables: Sequence[np.ndarray], limits: Sequence[int], entry: int, same: int, group: list[int]) -> int:
    """Returns the token, a tile's first, up to which the keys of some sequences are the same."""
    end = min([limits[n] for n in group])
    model = tables[group[0]]
    for n in group[1:]:
        first, last = same // entry, -(-end // entry)
        differs = model[first:last] != tables[n][first:last]
        at = int(differs.argmax()) if differs.any() else last - first
        end = min(end, (first + at) * entry)
    return end // TILE * TILE


def places_of(
    problem: Problem, strides: tuple[int, int], counts: Sequence[int], after: Sequence[int], tokens: Sequence[int]
) -> np.ndarray:
    """Locates packed queries, [tokens, ROW_AT].

    strides: from a token of q, and of out, to the next. tokens: of each sequence its first one.
    """
    number = np.concatenate([np.arange(at, at + n) for at, n in zip(tokens, counts, strict=True)])
    position = np.concatenate([np.arange(end - n, end) for end, n in zip(after, counts, strict=True)])
    lse, state = number_bytes(problem.storage), problem.q_heads * state_bytes(problem)
    columns = number * strides[0], number * strides[1], number * lse, np.arange(len(number)) * state, position
    return np.ascontiguousarray(np.stack(columns, 1), np.int64)


class Stage(NamedTuple):
    """A prepared call over runs of keys; items: its columns of the table of items (ITEM), by number."""

    call: Call
    items: dict[int, list[int]]
    rows: list[np.ndarray]  # of each item: their addresses are among the columns


def stage_of(call: Call, runs: Sequence[Run], lists: list[int], places: np.ndarray, first: Sequence[int]) -> Stage:
    """Makes a stage of sequences' rows, by position; lists: addresses of the numbers of pages.

    first: of each sequence its first token in `places`.
    """
    rows = []
    for run in runs:
        parts = [places[first[n] : first[n + 1]] for n in run.members]
        if len(parts) > 1:
            together = np.concatenate(parts)
            parts = [together[np.argsort(together[:, ROW_AT.word("position")], kind="stable")]]
        rows.append(parts[0])
    items = {
        ITEM.k_len: [run.end for run in runs], ITEM.first_key: [run.start for run in runs], ITEM.pages: lists,
        ITEM.rows: [x.ctypes.data for x in rows], ITEM.start: [0] * len(runs),
    }  # fmt: skip
    return Stage(call, items, rows)


def run_stages(addresses: tuple[int, ...], stages: Sequence[Stage], tokens: int, seed: int | None) -> None:
    """Runs stages one after another: each goes on from the states that those before have left."""
    problem = stages[0].call.problem
    scratch = take_scratch(tokens * problem.q_heads * state_bytes(problem))
    try:
        for call, items, _ in stages:
            call.run_on(addresses, ctypes.addressof(scratch), items, seed)
    finally:
        give_scratch(scratch)
