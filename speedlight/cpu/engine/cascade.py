"""Cascade: the rows of sequences that share leading keys see these together, then each its own keys.

A row that has seen the keys before some tile has two states, of its whole spans and of the open one. It goes on from
both in the order of keys, so no bit of a result depends on who shares what.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Sequence
from operator import sub
from typing import Any, NamedTuple

import numpy as np

from ...problem.prepared import Prepared, addresses_in
from ...problem.problem import TILE
from ..memory.records import ITEM, ROW_AT
from ..runtime.launch import give_scratch, take_scratch
from .forward_call import Call, state_bytes
from .schedule import seconds_of_key

LEAST_SECONDS = 100e-6  # that a run saves, at least: about what it takes to find it
LEAST_RATIO = 1.1  # of the time without it to the time with it
_STAGES = 8  # that a call keeps


class PageLists(NamedTuple):
    """Pages of sequences: of each their numbers, and where these lie."""

    numbers: Sequence[np.ndarray]
    addresses: list[int]
    page_size: int


class Run(NamedTuple):
    """Keys [start, end) that several sequences share, from tile to tile."""

    start: int
    end: int
    members: tuple[int, ...]


class Stage(NamedTuple):
    """A prepared call over runs of keys; items: its columns of the table of items (ITEM), by number."""

    call: Call
    items: dict[int, list[int]]
    rows: list[np.ndarray]  # of each item: their addresses are among the columns
    is_apart: bool = False  # its keys and values are a prefix's, in memory of their own


class Together:
    """Stages of a call in which sequences are taken together; it runs in that call's place."""

    record = None  # machine code does not run it

    def __init__(self, call: Call, stages: list[Stage], lists: PageLists) -> None:
        """lists: held, since the stages have their addresses."""
        problem = call.problem
        self.result_layout, self.put, self.stages, self.lists = call.result_layout, call.put, stages, lists
        self.is_scaled = call.is_scaled
        self.state_bytes = sum(problem.q_lengths) * problem.q_heads * state_bytes(problem)
        self.seed = problem.seed

    def in_place_of(self, prepared: Prepared) -> Prepared:
        """Returns a prepared call with these stages instead of its own call."""
        new = copy.copy(prepared)
        new.call = self
        return new

    def run(
        self, addresses: tuple[int, ...], seed: int | None, prefix: tuple[int, int] = (0, 0),
        scales: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Fills out and lse: each stage goes on from the states that those before have left.

        addresses: of q, k, v, out and lse. prefix: of keys and values that lie in memory of their own. scales: as for
        Call.run().
        """
        scratch, (q, k, v, *results) = take_scratch(self.state_bytes), addresses
        try:
            for call, items, _, is_apart in self.stages:
                keys = prefix if is_apart else (k, v)
                at = ctypes.addressof(scratch)
                call.run_on((q, *keys, *results), at, items, self.seed if seed is None else seed, scales)
        finally:
            give_scratch(scratch)

    def run_again(
        self, places: bytes, out: int, lse: int, seed: int, lengths: Sequence[int], lists: Sequence[int],
        store: tuple[int, int], arrays: Sequence[Any],
    ) -> None:  # fmt: skip
        """Runs for arrays at other places, as Call.run_again() does."""
        at = addresses_in(places)
        if self.put is not None:
            before = list(map(sub, lengths, self.put.counts))
            self.put.start((at[1], at[2], *store), before, [*lists], first=True)
        keys = store if store != (0, 0) else (at[1], at[2])
        self.run((at[0], *keys, out, lse), seed, scales=(at[3], at[4]) if self.is_scaled else None)


def find_together(call: Call, lists: PageLists, lengths: list[int], key: Any) -> Together | None:
    """Finds how sequences that begin with the same pages are taken together; None where that saves nothing.

    lengths: keys of each sequence, whose last query is at the last one. key: of what is asked, beside which the answer
    is kept, for a model's next layer.
    """
    found, runs = None, _find_runs(call, lists, lengths)
    if runs:
        found = Together(call, _stages_of(call, runs, lists, lengths), lists)
    call.together = key, found
    return found


def after_prefix(call: Call, tokens: int, lists: PageLists, lengths: list[int], heads: tuple[int, int]) -> Together:
    """Returns the stages of sequences that begin with the same tokens, which lie in memory of their own.

    heads: there, the bytes from a head's keys to the next head's, and of values.
    """
    used = [n for n, count in enumerate(call.problem.q_lengths) if count]  # others have no item
    counts, lengths = tuple([call.problem.q_lengths[n] for n in used]), [lengths[n] for n in used]
    members = tuple(range(len(used)))
    runs = [Run(0, tokens, members)]
    if call.problem.is_by_item:  # each row must know its sequence
        runs = [Run(0, tokens, (n,)) for n in members]
    places = _places_of(call, counts, lengths)
    first = _stage_of(call, runs, lists, places, leaves=True, heads=heads)
    for word in (ITEM.k_at, ITEM.v_at):
        first.items[word] = [0] * len(runs)
    own = [Run(tokens, end, (n,)) for n, end in zip(members, lengths, strict=True)]
    last = _stage_of(call, own, lists, places, leaves=False)
    return Together(call, [first._replace(is_apart=True), last], lists)


def _staged(call: Call, counts: tuple[int, ...], *, leaves: bool, heads: tuple[int, int] | None = None) -> Call:
    """Prepares a stage's call, or takes the one that the call keeps."""
    key, kept = (counts, leaves, heads), call.stages
    stage = kept.get(key)
    if stage is None:
        stage = call.staged(counts, leaves=leaves, heads=heads)
        call.stages = {**(kept if len(kept) < _STAGES else {}), key: stage}
    return stage


def _find_runs(call: Call, lists: PageLists, lengths: list[int]) -> list[list[Run]]:
    """Finds the runs of keys that sequences share, those of one depth together; a run follows the one before it."""
    p, found = call.problem, list[list[Run]]()
    if p.is_by_item or p.rows is not None or call.in_parts or not all(p.q_lengths):
        return found
    limits = [(end - n) // TILE * TILE for end, n in zip(lengths, p.q_lengths, strict=True)]
    members = [n for n, limit in enumerate(limits) if limit >= TILE]
    if len(members) > 1:
        _Search(call, lists, limits, found).split(members, 0, 0, 0)
    return found


class _Search:
    """The search for runs."""

    def __init__(self, call: Call, lists: PageLists, limits: list[int], found: list[list[Run]]) -> None:
        """limits: tokens of each sequence that it may share."""
        self.call, self.limits, self.found = call, limits, found
        self.numbers, self.size = lists.numbers, lists.page_size

    def split(self, members: list[int], same: int, seen: int, depth: int) -> None:
        """Adds the runs of sequences whose keys are the same up to a token, and seen already up to another."""
        alike: dict[bytes, list[int]] = {}
        first, last = same // self.size, -(-(same + TILE) // self.size)
        for n in members:
            if self.limits[n] >= same + TILE:
                alike.setdefault(self.numbers[n][first:last].tobytes(), []).append(n)
        for group in alike.values():
            if len(group) < 2:
                continue
            end = self.common_end(group, same)
            if not self.is_worth(end - seen, group):
                self.split(group, end, seen, depth)
                continue
            if len(self.found) == depth:
                self.found.append([])
            self.found[depth].append(Run(seen, end, tuple(group)))
            self.split(group, end, end, depth + 1)

    def common_end(self, group: list[int], same: int) -> int:
        """Returns the first token of a tile, up to which the keys of some sequences are the same."""
        end, model, first = min([self.limits[n] for n in group]), self.numbers[group[0]], same // self.size
        for n in group[1:]:
            last = -(-end // self.size)
            differs = model[first:last] != self.numbers[n][first:last]
            if differs.any():
                end = min(end, (first + int(differs.argmax())) * self.size)
        return end // TILE * TILE

    def is_worth(self, tokens: int, group: list[int]) -> bool:
        """Returns whether so many keys are faster seen by the rows of all these sequences together."""
        p, how = self.call.problem, self.call.how
        rows = [p.q_lengths[n] * p.group for n in group]
        *apart, together = [seconds_of_key(p, how.isa, n, how.tuning) for n in (*rows, sum(rows))]
        saved = (sum(apart) - together) / (self.call.machine or (1,))[0]
        return sum(apart) > LEAST_RATIO * together and tokens * saved > LEAST_SECONDS


def _stages_of(call: Call, shared: list[list[Run]], lists: PageLists, lengths: list[int]) -> list[Stage]:
    """Prepares the stages of sequences: the keys that they share, then each one's own."""
    counts = call.problem.q_lengths
    places = _places_of(call, counts, lengths)
    ends = [0] * len(counts)
    for runs in shared:
        for run in runs:
            for n in run.members:
                ends[n] = run.end
    own = [Run(start, end, (n,)) for n, (start, end) in enumerate(zip(ends, lengths, strict=True))]
    return [_stage_of(call, runs, lists, places, leaves=runs is not own) for runs in (*shared, own)]


def _places_of(call: Call, counts: Sequence[int], lengths: list[int]) -> list[np.ndarray]:
    """Locates the queries of each sequence that has any, [queries, ROW_AT]; these are the first of the items."""
    p, words, state = call.problem, call.words(), 0
    found, of_token = [], p.q_heads * state_bytes(p)
    for item, n, end in zip(call.items[: len(counts)], counts, lengths, strict=True):
        t = np.arange(n)
        columns = [item[word] + t * words[row] for word, row in _OF_ROWS]
        found.append(np.ascontiguousarray(np.stack([*columns, state + t * of_token, end - n + t], 1)))
        state += n * of_token
    return found


_OF_ROWS = (ITEM.q_at, "q_row"), (ITEM.out_at, "out_row"), (ITEM.lse_at, "lse_row")


def _stage_of(
    call: Call, runs: Sequence[Run], lists: PageLists, places: list[np.ndarray], *, leaves: bool,
    heads: tuple[int, int] | None = None,
) -> Stage:  # fmt: skip
    """Makes a stage of the rows of a call's sequences, by position; leaves, heads: as Call.staged() has them."""
    rows = []
    for run in runs:
        together = places[run.members[0]]
        if len(run.members) > 1:
            together = np.concatenate([places[n] for n in run.members])
            together = together[np.argsort(together[:, ROW_AT.word("position")], kind="stable")]
        rows.append(together)
    of_call = call.items[[run.members[0] for run in runs]]
    items = {word: of_call[:, word].tolist() for word in (ITEM.k_at, ITEM.v_at, ITEM.index)} | {
        ITEM.k_len: [run.end for run in runs], ITEM.first_key: [run.start for run in runs],
        ITEM.pages: [lists.addresses[run.members[0]] for run in runs],
        ITEM.rows: [x.ctypes.data for x in rows], ITEM.start: [0] * len(runs),
    }  # fmt: skip
    return Stage(_staged(call, tuple([len(x) for x in rows]), leaves=leaves, heads=heads), items, rows)
