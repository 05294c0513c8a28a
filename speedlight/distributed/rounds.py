"""Who sends which keys to whom, and in what order each process computes: known before anything moves.

Every process makes the same schedule. A *piece* is a run of keys that are sent and computed together; what of it no row
of a process sees is neither sent to it nor computed. Transfers of a *round* go on while the round before is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..problem.shardings import Runs


class Transfer(NamedTuple):
    """Some keys, and their values, on their way from one process to another."""

    round: int  # in which they are computed with
    source: int
    to: int
    owner: int
    keys: range
    relayed: bool  # the source had them from another one, rounds before


class Step(NamedTuple):
    """Keys that a process computes with in a round, in fragments of who holds them."""

    round: int
    keys: range
    fragments: tuple[tuple[int, range], ...]  # (owner, keys)


class Schedule(NamedTuple):
    """The steps of each process, and all transfers, both in the order of rounds."""

    steps: tuple[tuple[Step, ...], ...]
    transfers: tuple[Transfer, ...]

    def tokens_sent(self, rank: int) -> int:
        """Keys that a process sends in a forward pass; a pass back sends as many, and gradients of as many."""
        return sum([len(x.keys) for x in self.transfers if x.source == rank])


Needed = Callable[[int, range], "range | None"]  # of a process, what it sees of some keys


def ring(pieces: tuple[Runs, ...], needed: Needed) -> Schedule:
    """Round t · n + i: process r computes with piece i of process r - t, which it has from its neighbour r - 1, or from
    the owner where that one did not want all of it.
    """
    ranks, most = len(pieces), max(map(len, pieces), default=0)
    wanted = [[[needed(rank, piece) for piece in pieces[owner]] for owner in range(ranks)] for rank in range(ranks)]
    steps: list[list[Step]] = [[] for _ in pieces]
    transfers = []
    for distance in range(ranks):
        for i in range(most):
            for rank in range(ranks):
                owner, before = (rank - distance) % ranks, (rank - 1) % ranks
                keys = wanted[rank][owner][i] if i < len(pieces[owner]) else None
                if keys is None:
                    continue
                turn = distance * most + i
                steps[rank].append(Step(turn, keys, ((owner, keys),)))
                if distance:
                    relayed = before != owner and is_within(keys, wanted[before][owner][i])
                    transfers.append(Transfer(turn, before if relayed else owner, rank, owner, keys, relayed))
    return Schedule(tuple(map(tuple, steps)), tuple(transfers))


def ascending(pieces: Runs, held: tuple[Runs, ...], needed: Needed) -> Schedule:
    """Every process computes with pieces of the whole sequence in order; each fragment comes from who holds it."""
    steps: list[list[Step]] = [[] for _ in held]
    transfers = []
    for turn, piece in enumerate(pieces):
        for rank in range(len(held)):
            keys = needed(rank, piece)
            if keys is None:
                continue
            fragments = fragments_of(held, keys)
            steps[rank].append(Step(turn, keys, fragments))
            transfers += [Transfer(turn, at, rank, at, part, False) for at, part in fragments if at != rank]
    return Schedule(tuple(map(tuple, steps)), tuple(transfers))


def fragments_of(held: tuple[Runs, ...], keys: range) -> tuple[tuple[int, range], ...]:
    """Who holds which of some keys, in ascending order; runs of single steps."""
    found = []
    for rank, runs in enumerate(held):
        for run in runs:
            common = range(max(run.start, keys.start), min(run.stop, keys.stop))
            if common:
                found.append((rank, common))
    return tuple(sorted(found, key=lambda x: x[1].start))


def is_within(part: range, keys: range | None) -> bool:
    return keys is not None and keys.start <= part.start and part.stop <= keys.stop
