"""Which positions of a sequence each process holds. Pure: neither PyTorch nor NumPy.

A *run* is a `range` of positions; a process holds its runs one after another, in this order:

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2     one run each
    zigzag       0 0 1 1 2 2 2 2 1 1 0 0     two each, from both ends: under causal() all have the same work
    stripe       0 1 2 0 1 2 0 1 2 0 1 2     every n-th position: a run whose step is n
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Literal, TypeAlias

from ..checks import size
from ..errors import ArgumentError, shown

Shard: TypeAlias = Literal["contiguous", "zigzag", "stripe"]
Runs: TypeAlias = tuple[range, ...]  # of one process

SHARDS: tuple[Shard, ...] = ("contiguous", "zigzag", "stripe")


def positions(length: int, ranks: int, shard: Shard = "contiguous", multiple: int = 1) -> tuple[Runs, ...]:
    """Which positions of a sequence each process of a group holds.

    Args:
        length: of the whole sequence. What does not divide goes to the first chunks, one more each; of a sequence that
            is too short some processes have nothing.
        ranks: how many processes there are.
        shard: "contiguous", "zigzag" (process r has chunks r and 2·ranks - 1 - r of 2·ranks) or "stripe" (positions r,
            r + ranks, …).
        multiple: of what chunks are whole multiples, but the last one: 1024 for exact=True. Not of stripes.

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
    multiple = size("multiple", multiple, 1)
    if shard == "stripe" and multiple > 1:
        raise ArgumentError(
            f"multiple: expected 1 for shard='stripe', whose runs are of single positions; got {multiple}. Use "
            "shard='zigzag', which balances causal work, too."
        )
    return _positions(size("length", length), size("ranks", ranks, 1), shard, multiple)


@functools.lru_cache(maxsize=256)
def _positions(length: int, ranks: int, shard: str, multiple: int) -> tuple[Runs, ...]:
    match shard:
        case "contiguous":
            return tuple(joined([chunk]) for chunk in _chunks(length, ranks, multiple))
        case "zigzag":
            chunks = _chunks(length, 2 * ranks, multiple)
            return tuple(joined([chunks[r], chunks[-1 - r]]) for r in range(ranks))
    return tuple((range(r, length, ranks),) if r < length else () for r in range(ranks))


def _chunks(length: int, count: int, multiple: int) -> list[range]:
    """`count` chunks of consecutive positions, as even as may be; the first ones are the longer ones."""
    units = -(-length // multiple)
    each, more = divmod(units, count)
    ends = [min(length, (each * n + min(n, more)) * multiple) for n in range(count + 1)]
    return [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


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


def tokens(runs: Runs) -> int:
    """How many positions a process holds."""
    return sum(map(len, runs))


def cut(runs: Runs, most: int) -> Runs:
    """Runs in pieces of at most so many positions."""
    return tuple(run[at : at + most] for run in runs for at in range(0, len(run), most))


def places(runs: Runs) -> list[int]:
    """Where each run begins in the memory of who holds them, and where the last ends."""
    found = [0]
    for run in runs:
        found.append(found[-1] + len(run))
    return found


def check_shard(shard: object) -> None:
    if not (isinstance(shard, str) and shard in SHARDS):
        raise ArgumentError(f"shard: expected 'contiguous', 'zigzag' or 'stripe'; got {shown(shard)}.")
