"""Which rank keeps which token of a sequence in a sharded cache; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import CacheFull
from ..problem.checks import new_totals


class Run(NamedTuple):
    """Positions of tokens that a rank keeps."""

    rank: int
    at: range


class Placement(NamedTuple):
    """The ranks of a sequence's tokens: runs, of which those of one rank rise; and how many each rank has."""

    runs: tuple[Run, ...]
    counts: tuple[int, ...]

    @property
    def length(self) -> int:
        return sum(self.counts)

    def positions(self, rank: int) -> np.ndarray:
        """Returns the positions of a rank's tokens, in the order in which it keeps them."""
        own = [np.arange(x.at.start, x.at.stop, x.at.step) for x in self.runs if x.rank == rank]
        return np.concatenate(own) if own else np.empty(0, np.int64)


def placed(runs: Iterable[Run], ranks: int) -> Placement:
    """The placement of these runs; empty ones are left out."""
    some, counts = tuple([x for x in runs if x.at]), [0] * ranks
    for x in some:
        counts[x.rank] += len(x.at)
    return Placement(some, tuple(counts))


def grown(old: Placement, n: int, piece: int) -> Placement:
    """With n tokens more. Pieces end at multiples of `piece`, and each goes to the rank that has the fewest tokens: the
    same whether tokens come one by one or all at once.
    """
    runs, counts, at = list(old.runs), list(old.counts), old.length
    end = at + n
    while at < end:
        first = at - at % piece
        stop = min(end, first + piece)
        last = runs[-1] if runs else None
        if last is not None and last.at.step == 1 and last.at.stop == at > first <= last.at.start:
            rank, runs[-1] = last.rank, Run(last.rank, range(last.at.start, stop))
        else:
            rank = counts.index(min(counts))
            runs.append(Run(rank, range(at, stop)))
        counts[rank] += stop - at
        at = stop
    return Placement(tuple(runs), tuple(counts))


def sharded(old: Placement, shards: Sequence[Sequence[range]]) -> Placement:
    """With what every rank has of new tokens: positions, counted from the first new one."""
    n = old.length
    new = [Run(rank, range(n + x.start, n + x.stop, x.step)) for rank, own in enumerate(shards) for x in own]
    # by their ends: what grown() goes on with is the run that is last
    return placed([*old.runs, *sorted(new, key=lambda x: (x.at.stop, x.at.start))], len(old.counts))


def shortened(old: Placement, length: int) -> Placement:
    """Without the tokens from `length` on."""
    runs = [Run(x.rank, range(x.at.start, min(x.at.stop, length), x.at.step)) for x in old.runs]
    return placed(runs, len(old.counts))


def kept(old: Placement, start: int, path: Sequence[int]) -> tuple[Placement, dict[int, list[int]]]:
    """With these tokens alone, counted from `start` on, each where it is, one after the other; and of every rank which
    they are, counted from its own first one.
    """
    before, ranks = shortened(old, start), len(old.counts)
    owner = np.full(max(old.length - start, 0), -1)
    slot = np.zeros_like(owner)
    for rank in range(ranks):
        own = old.positions(rank)[before.counts[rank] :] - start
        owner[own], slot[own] = rank, np.arange(len(own))
    runs, own_slots = list(before.runs), {rank: [] for rank in range(ranks)}
    for at, index in enumerate(path, start):
        rank = int(owner[index])
        own_slots[rank].append(int(slot[index]))
        if at > start and runs[-1].rank == rank:
            runs[-1] = Run(rank, range(runs[-1].at.start, at + 1))
        else:
            runs.append(Run(rank, range(at, at + 1)))
    return placed(runs, ranks), own_slots


def new_rows(old: Placement, new: Placement, rank: int) -> np.ndarray:
    """Returns a rank's tokens among those that grown() placed, counted from the first of them."""
    n, first = old.length, max(len(old.runs) - 1, 0)
    rows = [np.arange(max(x.at.start - n, 0), x.at.stop - n) for x in new.runs[first:] if x.rank == rank]
    return np.concatenate(rows) if rows else np.empty(0, np.int64)


def as_words(layers: Sequence[Sequence[Placement]]) -> str:
    """The placements of every layer's sequences, as a file has them."""
    return json.dumps([[[(x.rank, x.at.start, x.at.stop, x.at.step) for x in p.runs] for p in own] for own in layers])


def from_words(text: str, ranks: int) -> list[list[Placement]]:
    """Reads what as_words() gave. Raises ValueError where a token is nobody's, or several ranks'."""
    layers = []
    for own in json.loads(text):
        layers.append([placed([Run(rank, range(*at)) for rank, *at in runs], ranks) for runs in own])
    for p in {id(p): p for own in layers for p in own}.values():
        every = np.sort(np.concatenate([p.positions(rank) for rank in range(ranks)]))
        if not np.array_equal(every, np.arange(len(every))):
            raise ValueError(f"tokens that are not once on {ranks} ranks")
    return layers


def room(capacity: int, ranks: int, piece: int) -> int:
    """Tokens that each rank reserves memory for: grown() never gives it more."""
    return min(capacity, -(-capacity // ranks) + piece) if ranks > 1 else capacity


def check_room(layer: int, old: Sequence[Placement], new: Sequence[Placement], capacity: int, most: int) -> None:
    """Raises unless sequences fit, as a whole and on every rank."""
    lengths = [x.length for x in old]
    new_totals(layer, lengths, [x.length - n for x, n in zip(new, lengths, strict=True)], capacity)
    for item, (before, after) in enumerate(zip(old, new, strict=True)):
        for rank, count in enumerate(after.counts):
            if count > most:
                had = before.counts[rank]
                raise CacheFull(
                    f"layer {layer}, sequence {item}: {count - had} tokens need room on rank {rank}, {most - had} of "
                    f"its {most} are free. Append shards of one size, or make a cache of larger capacity.",
                    count - had,
                    most - had,
                )
