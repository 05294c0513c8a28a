"""Which heads take their turn together: what a process holds beyond its shards and results is that of one turn.

Heads know nothing of each other, so they may go round the ring one after another: the same bits, and the same bytes to
send. Keys on their way, sums in more bits than results have, and gradients that go home are of some heads then.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ..arrays.array import STORAGE_BYTES
from ..host.machine import number_bytes
from ..problem.problem import Problem

_LEAST = 1 << 21  # bytes of a turn's keys and values: less memory is not worth more messages


class Turn(NamedTuple):
    """Heads of q, and those of k and v that they read."""

    q: range
    kv: range


def turns_of(p: Problem, tokens: int, ranks: int, *, backward: bool) -> tuple[Turn, ...]:
    """The turns of a pass; tokens: of the longest shard of keys, of all items."""
    size = tokens * p.kv_heads * (p.head_dim + p.value_dim) * STORAGE_BYTES[p.key_storage]
    count = max(1, min(_wanted(p, ranks, backward=backward), p.kv_heads, size // _LEAST))
    cuts = [p.kv_heads * n // count for n in range(count + 1)]
    return tuple([Turn(range(a * p.group, b * p.group), range(a, b)) for a, b in itertools.pairwise(cuts)])


def _wanted(p: Problem, ranks: int, *, backward: bool) -> int:
    """So many that a ring holds less than two shards of keys and values, with as many heads as q has.

    With all heads at once, in shards: forward 1.5, and 1 more where outputs are summed in more bits; back 3, and 4.5
    more where gradients are, which travel so.
    """
    narrow = STORAGE_BYTES[p.storage] < number_bytes(p.storage)
    if ranks == 1:  # nothing travels: sums alone
        return 2 if backward and narrow else 1
    return (4 if narrow else 2) if backward else 1 + narrow
