"""Cascade: the rows of sequences that share leading keys see these together, then each its own keys.

A row that has seen the keys before some tile has two states, of its whole spans and of the open one. It goes on from
both in the order of keys, so no bit of a result depends on who shares what.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import sub
from typing import Any, NamedTuple

import numpy as np

from ...host.machine import number_bytes
from ...problem.prepared import addresses_in
from ...problem.problem import TILE, Problem
from ..memory.records import ITEM, ROW_AT
from ..runtime.launch import give_scratch, take_scratch
from .forward_call import Call, state_bytes

LEAST_SECONDS = 100e-6  # that a run saves, at least: about what it takes to find it
LEAST_RATIO = 1.1  # of the time without it to the time with it


class Run(NamedTuple):
    """Keys [start, end) that several sequences share, from tile to tile."""

    start: int
    end: int
    members: tuple[int, ...]


class Sequences(NamedTuple):
    """Sequences of a call: of each the numbers of its pages, and the tokens that it may share."""

    tables: list[np.ndarray]
    limits: list[int]
    page_size: int
    seconds: Callable[[int], float]  # of a key that is shown to the rows of so many sequences


def shared_runs(of: Sequences) -> list[list[Run]]:
    """Finds the runs of keys that sequences share, those of one depth together; a run follows the one before it."""
    found: list[list[Run]] = []
    members = [n for n, limit in enumerate(of.limits) if limit >= TILE]
    if len(members) > 1 and len({of.tables[n].item(0) for n in members}) < len(members):
        _split(of, members, 0, 0, found, 0)
    return found


def _split(of: Sequences, members: list[int], same: int, seen: int, found: list[list[Run]], depth: int) -> None:
    """Adds the runs of sequences whose keys are the same up to a token, and seen already up to another."""
    alike: dict[bytes, list[int]] = {}
    first, last = same // of.page_size, -(-(same + TILE) // of.page_size)
    for n in members:
        if of.limits[n] >= same + TILE:
            alike.setdefault(of.tables[n][first:last].tobytes(), []).append(n)
    for group in alike.values():
        if len(group) < 2:
            continue
        end = _common_end(of, group, same)
        if not _is_worth(of, end - seen, len(group)):
            _split(of, group, end, seen, found, depth)
            continue
        if len(found) == depth:
            found.append([])
        found[depth].append(Run(seen, end, tuple(group)))
        _split(of, group, end, end, found, depth + 1)


def _is_worth(of: Sequences, tokens: int, members: int) -> bool:
    """Returns whether so many keys are faster seen by the rows of all these sequences together."""
    apart, together = members * of.seconds(1), of.seconds(members)
    return apart > LEAST_RATIO * together and tokens * (apart - together) > LEAST_SECONDS


def _common_end(of: Sequences, group: list[int], same: int) -> int:
    """Returns the first token of a tile, up to which the keys of some sequences are the same."""
    end, model, first = min([of.limits[n] for n in group]), of.tables[group[0]], same // of.page_size
    for n in group[1:]:
        last = -(-end // of.page_size)
        differs = model[first:last] != of.tables[n][first:last]
        if differs.any():
            end = min(end, (first + int(differs.argmax())) * of.page_size)
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


class Together:
    """A prepared call in stages, in place of one in which sequences are apart: it runs for the same arrays."""

    record = None  # machine code does not run it

    def __init__(self, call: Call, stages: Sequence[Stage], tokens: int) -> None:
        self.result_layout, self.put, self.stages, self.tokens = call.result_layout, call.put, stages, tokens

    def run_again(
        self, places: bytes, out: int, lse: int, seed: int, lengths: Sequence[int], lists: Sequence[int],
        store: tuple[int, int], arrays: Sequence[Any],
    ) -> None:  # fmt: skip
        """Runs for arrays at other places, as Call.run_again() does."""
        at = addresses_in(places)
        if self.put is not None:
            before = list(map(sub, lengths, self.put.counts))
            self.put.start((at[1], at[2], *store), before, [*lists], first=True)
        run_stages((at[0], *store, out, lse), self.stages, self.tokens, seed)


def run_stages(addresses: tuple[int, ...], stages: Sequence[Stage], tokens: int, seed: int | None) -> None:
    """Runs stages one after another: each goes on from the states that those before have left."""
    problem = stages[0].call.problem
    scratch = take_scratch(tokens * problem.q_heads * state_bytes(problem))
    try:
        for call, items, _ in stages:
            call.run_on(addresses, ctypes.addressof(scratch), items, seed)
    finally:
        give_scratch(scratch)
