"""Shardings: the positions of a sequence that each process holds. Pure: neither PyTorch nor NumPy.

A *run* is a `range` of positions; a process holds its runs one after another, in this order:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2     one run each
    zigzag       0 0 1 1 2 2 2 2 1 1 0 0     two each, from both ends: under causal() all have the same work
    stripe       0 1 2 0 1 2 0 1 2 0 1 2     every n-th position: a run whose step is n
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from ..errors import ArgumentError, shown
from .checks import size
from .problem import SPAN

Shard: TypeAlias = Literal["contiguous", "zigzag", "stripe"]
Runs: TypeAlias = tuple[range, ...]  # of one process

SHARDS: tuple[Shard, ...] = ("contiguous", "zigzag", "stripe")


def positions(length: int, ranks: int, shard: Shard = "contiguous") -> tuple[Runs, ...]:
    """Returns the positions of a sequence that each process of a group holds.

    Args:
        length: of the whole sequence. What does not divide goes to the first chunks, one more each; of a sequence that
            is too short some processes have nothing.
        ranks: how many processes there are.
        shard: "contiguous", "zigzag" (process r has chunks r and 2·ranks - 1 - r of 2·ranks) or "stripe" (positions r,
            r + ranks, …).

    Returns:
        A tuple for each process, in the order of ranks: the ranges of positions that it holds, none of them empty, in
        the order in which it holds them.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> from speedlight.distributed import positions
    >>> positions(10, 2, "zigzag")
    ((range(0, 3), range(8, 10)), (range(3, 8),))
    >>> positions(10, 3, "stripe")
    ((range(0, 10, 3),), (range(1, 10, 3),), (range(2, 10, 3),))
    """
    check_shard(shard)
    return _positions(size("length", length), size("ranks", ranks, 1), shard)


@functools.lru_cache(maxsize=256)
def _positions(length: int, ranks: int, shard: str) -> tuple[Runs, ...]:
    match shard:
        case "contiguous":
            return tuple(joined([chunk]) for chunk in _chunks(length, ranks))
        case "zigzag":
            chunks = _chunks(length, 2 * ranks)
            return tuple(joined([chunks[r], chunks[-1 - r]]) for r in range(ranks))
    return tuple((range(r, length, ranks),) if r < length else () for r in range(ranks))


def _chunks(length: int, count: int) -> list[range]:
    """`count` chunks of consecutive positions, as even as may be; the first ones are the longer ones."""
    each, more = divmod(length, count)
    ends = [each * n + min(n, more) for n in range(count + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def joined(runs: Iterable[range]) -> Runs:
    """Runs without empty ones; neighbours that adjoin are one."""
    found: list[range] = []
    for run in runs:
        if not run:
            continue
        if found and found[-1].step == run.step == 1 and found[-1].stop == run.start:
            run = range(found.pop().start, run.stop)
        found.append(run)
    return tuple(found)


def one_after_the_other(each: Sequence[tuple[Runs, ...]], ranks: int) -> tuple[Runs, ...]:
    """Returns what each process holds of sequences that are packed one after the other, and sharded one by one."""
    held: list[list[range]] = [[] for _ in range(ranks)]
    first = 0
    for shards in each:
        for own, runs in zip(held, shards, strict=True):
            own += [range(first + x.start, first + x.stop, x.step) for x in runs]
        first += sum(map(tokens, shards))
    return tuple(map(joined, held))


def whole_of(held: tuple[Runs, ...]) -> Runs:
    """All positions of several processes, in order."""
    runs = [run for each in held for run in each]
    if True in [run.step > 1 for run in runs]:  # stripes of all
        return joined([range(sum(map(len, runs)))])
    return joined(sorted(runs, key=lambda x: x.start))


def tokens(runs: Runs) -> int:
    """Returns how many positions a process holds."""
    return sum(map(len, runs))


def counts_of(run: range, lengths: Iterable[int]) -> tuple[int, ...]:
    """Returns how many positions of a run lie in items of each of these lengths."""
    return tuple([len(range(run.start, min(run.stop, n), run.step)) for n in lengths])


def cut(runs: Runs, most: int) -> Runs:
    """Runs in pieces of at most so many positions."""
    return tuple(run[at : at + most] for run in runs for at in range(0, len(run), most))


def travelling(held: tuple[Runs, ...]) -> tuple[Runs, ...]:
    """Returns the pieces in which keys travel: halves of the longest shard, in whole spans where it has several."""
    most = max(map(tokens, held), default=0)
    half = -(-most // 2) if most <= 2 * SPAN else -(-most // (2 * SPAN)) * SPAN
    return tuple([cut(runs, max(1, half if len(held) > 1 else most)) for runs in held])


def places(runs: Runs) -> list[int]:
    """Returns where each run begins in its holder's memory, and where the last ends."""
    found = [0]
    for run in runs:
        found.append(found[-1] + len(run))
    return found


def check_shard(shard: object) -> None:
    if not (isinstance(shard, str) and shard in SHARDS):
        way = " plan(…, ranks=) says which is fastest: plan.ranks.way.shard." if shard == "auto" else ""
        raise ArgumentError(f"shard: expected 'contiguous', 'zigzag' or 'stripe'; got {shown(shard)}.{way}")
