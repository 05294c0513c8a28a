"""Parts of the keys of a sequence: the problem of some rows against them, and which of them those rows may see.

Pure: it knows positions and problems; no tensors and no processes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import STORAGE_BYTES
from ..errors import ArgumentError
from ..expressions.program import visibility
from ..expressions.substitution import substituted
from ..host.machine import number_bytes
from .build import Stated
from .problem import Problem
from .shardings import Runs, counts_of, tokens
from .tiles import Many, integers_of

_MOST_BOXES = 64  # of rows, and of keys, in which a part is looked at
_LEAST = 1 << 21  # bytes of a turn's keys and values: less memory is not worth more messages


class KeyPart(NamedTuple):
    """A problem over a part of the keys. Of packed sequences where each begins, in the rows and in the keys."""

    problem: Problem
    q_first: tuple[int, ...] | None = None
    k_first: tuple[int, ...] | None = None


def parts_of(whole: Stated, q: range, k: range, rows: int) -> list[KeyPart]:
    """The problems of a run of rows against a run of keys; of packed sequences there may be two, or none.

    whole: of the whole sequence. rows: how many the arrays of the outputs have.
    """
    if whole.cu_q is not None and whole.cu_k is not None:
        return _packed_parts(whole.problem, whole.cu_q, whole.cu_k, q, k)
    return [KeyPart(_padded_part(whole.problem, q, k, rows))]


def _padded_part(p: Problem, q: range, k: range, rows: int) -> Problem:
    lengths = {"q_lengths": counts_of(q, p.q_lengths), "k_lengths": counts_of(k, p.k_lengths)}
    part = replace(p, **lengths, rows=rows, partial=True)
    if q.step == k.step == 1:
        starts = tuple([start + q.start for start in p.q_starts])
        return replace(part, q_starts=starts, k_start=p.k_start + k.start)
    return _striped(part, q, k)


def _striped(p: Problem, q: range, k: range) -> Problem:
    """Restates a problem over every n-th row and key: positions count in n, a row beside the last key not after it.

    i = n · i' + c and j = n · j' + d; j <= i where j' <= i', with the starts chosen for that.
    """
    n, first_key = k.step, p.k_start + k.start
    (start,) = set(p.q_starts)  # stripes of items that begin apart are not served
    row = start + q.start
    at = (row - first_key) // n
    by = {"i": (n, row - n * at), "j": (n, first_key)}
    mask, score = (None if x is None else substituted(x, by) for x in (p.mask, p.score))
    return replace(p, q_starts=(at,) * p.batch, k_start=0, mask=mask, score=score)


def _packed_parts(p: Problem, cu_q: tuple[int, ...], cu_k: tuple[int, ...], q: range, k: range) -> list[KeyPart]:
    """A sequence that the keys' begin cuts has keys at other positions than those that begin there."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for item, start in enumerate(p.q_starts):
        row, end = max(cu_q[item], q.start), min(cu_q[item + 1], q.stop)
        key, last = max(cu_k[item], k.start), min(cu_k[item + 1], k.stop)
        if row < end and key < last:
            fields = item, end - row, last - key, start + row - cu_q[item], row - q.start, key - k.start
            found.setdefault(p.k_start + key - cu_k[item], []).append(fields)
    parts = []
    for k_start, each in found.items():
        items, q_lengths, k_lengths, q_starts, q_first, k_first = zip(*each, strict=True)
        of = replace(p, q_lengths=q_lengths, k_lengths=k_lengths, q_starts=q_starts, k_start=k_start, items=items)
        parts.append(KeyPart(replace(of, partial=True), q_first, k_first))
    return parts


def finishing(whole: Stated, rows: int, lengths: tuple[int, ...]) -> KeyPart:
    """Queries of these lengths without any key: what ends them, where no part of the keys does. rows: as parts_of()."""
    p = replace(whole.problem, k_start=0, mask=None, score=None, causal=False, partial=True, rows=rows)
    p = replace(p, q_lengths=lengths, k_lengths=(0,) * len(lengths))
    return KeyPart(p) if whole.cu_q is None else KeyPart(replace(p, q_starts=(0,), items=(0,)), (0,), (0,))


# --- heads

Heads = tuple[tuple[int, ...], ...]  # of each process


class Split(NamedTuple):
    """Which heads each process computes."""

    q: Heads
    kv: Heads  # those that its query heads read: with fewer of them than processes, some are several processes'


def split_of(q_heads: int, kv_heads: int, ranks: int) -> Split:
    """Each process's share of the heads."""
    if q_heads % ranks:
        raise ArgumentError(
            f"method: expected a number of query heads that divides by {ranks} processes for 'ulysses'; got {q_heads}. "
            "Use method='ring', or a mesh of two dimensions whose second one divides them."
        )
    each, group = q_heads // ranks, q_heads // max(1, kv_heads)
    q = tuple([tuple(range(r * each, (r + 1) * each)) for r in range(ranks)])
    if each and (each % group == 0 or group % each == 0):
        return Split(q, tuple([tuple(dict.fromkeys([h // group for h in heads])) for heads in q]))
    return Split(q, tuple([tuple([h // group for h in heads]) for heads in q]))  # one for each query head


def of_heads(p: Problem, q: range, kv_heads: int) -> Problem:
    """Restates a problem over some heads, counted from 0; masks and scores keep their numbers."""
    mask, score = (
        x if x is None or "h" not in x.root.uses else substituted(x, {"h": (1, q.start)}) for x in (p.mask, p.score)
    )
    sinks = None if p.sinks is None else p.sinks[q.start : q.stop]
    return replace(p, q_heads=len(q), kv_heads=kv_heads, mask=mask, score=score, sinks=sinks)


def problem_of(p: Problem, split: Split, rank: int) -> Problem:
    """Returns the problem of one process."""
    heads = split.q[rank]
    first = heads[0] if heads else 0
    return of_heads(p, range(first, first + len(heads)), len(split.kv[rank]))


# --- heads that take their turn together


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


# --- what is seen


def needed(whole: Stated, rows: Runs, keys: range, unit: int) -> range | None:
    """Those of some keys that any of these rows may see: a run of whole units of them; None where all are hidden."""
    low, high = len(keys), 0
    for q in rows:
        for part in parts_of(whole, q, keys, tokens(rows)):
            for item, *_ in part.problem.kinds(1):
                seen = _seen(part.problem, item, unit)
                if seen is not None:
                    at = 0 if part.k_first is None else part.k_first[item]
                    low, high = min(low, at + seen[0]), max(high, at + seen[1])
    if low >= high:
        return None
    return keys[low // unit * unit : min(-(-high // unit) * unit, len(keys))]


def _seen(p: Problem, item: int, unit: int) -> tuple[int, int] | None:
    """From the first to the last of the item's keys that any of its rows may see."""
    rows, keys, start = p.q_lengths[item], p.k_lengths[item], p.q_starts[item]
    if not rows or not keys:
        return None
    j = np.arange(0, keys, _box(keys, unit))
    j_end = np.append(j[1:], keys) - 1
    if p.mask is None and p.score is None:
        seen = np.full(len(j), True)
    else:
        i = np.arange(0, rows, _box(rows, unit))
        i_end = np.append(i[1:], rows) - 1
        seen = _visible(p, item, (start + i, start + i_end), (p.k_start + j, p.k_start + j_end)).any(axis=0)
    if p.causal:
        seen = seen & (p.k_start + j <= start + rows - 1)
    at = np.flatnonzero(seen)
    if not at.size:
        return None
    last = min(int(j_end[at[-1]]), start + rows - 1 - p.k_start) if p.causal else int(j_end[at[-1]])
    return int(j[at[0]]), last + 1


def _box(count: int, unit: int) -> int:
    """Positions of a box: whole units, so many that there are few boxes."""
    return -(-count // (unit * _MOST_BOXES)) * unit


def _visible(p: Problem, item: int, i: tuple[Any, Any], j: tuple[Any, Any]) -> np.ndarray:
    """[boxes of rows, boxes of keys]: whether anything may be visible. Ends are inclusive."""
    b = item if p.items is None else p.items[item]
    rows = tuple(x[:, None] for x in i)
    box = {"b": (b, b), "h": (0, p.q_heads - 1), "i": rows, "j": j}
    partly, _ = visibility(*p.roots, Many(box, integers_of(p).followed))
    beside = (j[0] <= rows[1]) if p.causal else True
    return np.broadcast_to(partly & beside, (len(i[0]), len(j[0])))
