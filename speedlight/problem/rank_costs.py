"""Costs of each method of attention over several ranks, under one sharding: a closed form of time, bytes and memory.

Each adds up three figures of a rank: pairs that its queries see, keys that come to it, keys that it sends. It computes
at the rates of a machine, beside a link of its own that sends and receives at once. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import STORAGE_BYTES
from ..host.machine import number_bytes
from .key_parts import problem_of, split_of, turns_of
from .problem import SPAN, TILE, Problem
from .shard_visibility import seen_by
from .shardings import Runs, Shard, tokens, travelling, whole_of


class Link(NamedTuple):
    """Link between a rank and the others, in both directions at once."""

    bandwidth: float  # bytes per second
    latency: float  # seconds until the first byte is there

    def seconds(self, size: Any, messages: Any = 1) -> Any:
        """Seconds of so many bytes, in so many messages one after another."""
        return messages * self.latency + size / self.bandwidth


class Rates(NamedTuple):
    """Rates of a rank's machine."""

    flops: float  # per second
    bytes: float  # per second


@dataclass(frozen=True)
class Estimate:
    """Cost of one method on one sharding; tuples have an entry for each rank.

    seconds: until the rank has its results; compute_seconds: of them computing. bytes_sent: by the rank.
    memory_bytes: beyond its shards of q, k, v and its results. mesh: (ring, ulysses) of method "mesh".
    """

    method: str
    shard: Shard
    seconds: tuple[float, ...]
    compute_seconds: tuple[float, ...]
    bytes_sent: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    mesh: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """The method; of a mesh its sizes, too."""
        return self.method if self.mesh is None else f"{self.method} {self.mesh[0]}x{self.mesh[1]}"

    @property
    def slowest(self) -> float:
        """Seconds until every rank has its results."""
        return max(self.seconds)

    @property
    def balance(self) -> float:
        """The longest computing over the mean: 1 where all have the same to do."""
        return balance_of(np.array(self.compute_seconds))


def balance_of(work: np.ndarray) -> float:
    """The most over the mean."""
    return float(work.max() / work.mean()) if work.any() else 1.0


class Case:
    """A problem on its ranks, each of which holds runs of queries and of keys; arrays have an entry for each rank.

    packed: tokens of all items lie one behind another, and are sharded together.
    """

    def __init__(
        self, problem: Problem, q: tuple[Runs, ...], k: tuple[Runs, ...], shard: Shard, rates: Rates, link: Link,
        pair_flops: int, *, packed: bool, backward: bool,
    ) -> None:  # fmt: skip
        self.problem, self.q, self.k, self.rates, self.link = problem, q, k, rates, link
        self.shard: Shard = shard
        self.pair_flops, self.packed, self.backward, self.ranks = pair_flops, packed, backward, len(k)
        self.items = 1 if packed else problem.batch
        queries, self.keys = (np.array([tokens(runs) for runs in each], np.int64) for each in (q, k))
        self.rows = queries * self.items * problem.q_heads
        self.size, self.number = STORAGE_BYTES[problem.storage], number_bytes(problem.storage)  # of an element, of sums
        elements = self.items * problem.kv_heads * (problem.head_dim + problem.value_dim)
        self.token_bytes, self.sums_bytes = elements * STORAGE_BYTES[problem.key_storage], elements * self.number
        owned = sorted([(x.start, rank, x) for rank, each in enumerate(travelling(k)) for x in each])
        self.pieces, self.owners = [x for *_, x in owned], np.array([rank for _, rank, _ in owned], np.int64)
        self.seen = seen_by(problem, q, self.pieces, packed=packed)

    def needed(self, unit: int, *, of_all: bool) -> tuple[np.ndarray, np.ndarray]:
        """From which key to which of each piece, [ranks, pieces], a rank needs: whole units of the piece, or of all."""
        _, first, last = self.seen
        length, begin = (np.array([f(x) for x in self.pieces], np.int64) for f in (len, lambda x: of_all * x.start))
        first, last = (first + begin) // unit * unit - begin, -(-(last + begin) // unit) * unit - begin
        return tuple(np.where(self.seen.last > 0, x.clip(0, length), 0) for x in (first, last))  # type: ignore

    def computing(self, pairs: Any, rows: Any, keys: Any) -> Any:
        """Seconds: the longer of computing and of reading what it needs; of no pairs, none."""
        p = self.problem
        row_bytes = (1 + self.backward) * (p.head_dim + p.value_dim) * self.size + self.number
        read = rows * row_bytes + keys * self.token_bytes
        return (pairs > 0) * np.maximum(pairs * self.pair_flops / self.rates.flops, read / self.rates.bytes)

    def in_turns(self, memory: np.ndarray) -> np.ndarray:
        """Memory of all heads, of which some take their turn after others."""
        turns = turns_of(self.problem, int(self.keys.max()) * self.items, self.ranks, backward=self.backward)
        return memory * max([len(x.q) for x in turns]) / max(1, self.problem.q_heads)

    def estimate(self, method: str, *figures: Any) -> Estimate:
        """The estimate of seconds, seconds of computing, bytes sent and bytes of memory, of each rank or of all."""
        seconds, computing, sent, memory = (np.broadcast_to(x, self.ranks).tolist() for x in figures)
        sizes = [tuple([int(x) for x in each]) for each in (sent, memory)]
        return Estimate(method, self.shard, tuple(seconds), tuple(computing), sizes[0], sizes[1])


def ring(case: Case, *, exact: bool = False) -> Estimate:
    """Keys go from rank to rank as far as they are seen; who lacks some has them from their owner. The next keys come
    while the last are computed with: the longer of computing, and of the link and the last step. Gradients go home.

    exact: keys come in ascending order, in whole spans, from their owners, who give to all at once: all wait for that.
    """
    n, owners, rank, link = case.ranks, case.owners, np.arange(case.ranks)[:, None], case.link
    first, last = case.needed(SPAN if exact else TILE, of_all=exact)
    away, before = (last - first) * (owners != rank), (rank - 1) % n
    relayed = (owners != before) & (first[before[:, 0]] <= first) & (last[before[:, 0]] >= last) & (not exact)
    given = np.bincount(np.where(relayed, before, owners).ravel(), away.ravel(), n)
    came, home, back = away.sum(axis=1), np.bincount(owners, away.sum(axis=0), n), case.backward * case.sums_bytes
    sent, received = given * case.token_bytes + came * back, came * case.token_bytes + home * back
    order = np.argsort(owners, kind="stable")
    each_owner = np.add.reduceat(away[:, order], np.flatnonzero(np.diff(owners[order], prepend=-1)), axis=1)
    steps = ((away if exact else each_owner) > 0).sum(axis=1)
    waited = (away > 0) @ away.sum(axis=0) * case.token_bytes if exact else np.maximum(sent, received)
    needed = (last - first).sum(axis=1)
    work = case.computing(case.seen.pairs, case.rows, needed)
    last_step = work * came / np.maximum(needed, 1) / np.maximum(steps, 1)
    seconds = np.maximum(work, link.seconds(waited, steps) + last_step)
    seconds = seconds + link.latency * (home > 0) * (back > 0)
    passes = np.isin(rank[:, 0], before[(relayed & (away > 0)).any(axis=1)])  # a third piece is on its way through
    coming = away if exact else np.take_along_axis(away, np.argsort((rank - owners) % n, kind="stable"), axis=1)
    memory = np.array([_held_at_once(x, 2 + y) for x, y in zip(coming, passes, strict=True)]) * case.token_bytes
    if case.backward:
        of_others, of_owners = np.array([_held_at_once(x, 2) for x in coming]), np.zeros(n)
        np.maximum.at(of_owners, owners, away.max(axis=0))
        memory = memory + _gradients(case, of_others + of_owners)
    else:
        memory = memory + _states(case)
    return case.estimate("exact" if exact else "ring", seconds, work, sent, case.in_turns(memory))


def _held_at_once(coming: np.ndarray, most: int) -> int:
    """Keys of so many pieces that come to a rank one after another, where those are most; coming: keys of each."""
    ends = np.cumsum(np.append(np.zeros(most, np.int64), coming[coming > 0]))
    return int((ends[most:] - ends[:-most]).max(initial=0))


def _states(case: Case) -> np.ndarray:
    """Bytes of the state of a rank's rows: a maximum and a sum each, and accumulators where outputs are narrower."""
    p = case.problem
    return case.rows * (2 + p.value_dim * (case.size < case.number)) * case.number * (case.ranks > 1)


def _gradients(case: Case, of_keys: np.ndarray) -> np.ndarray:
    """Bytes of gradients of so many keys that come and go, and of a rank's own where those are summed in more bits."""
    own = case.rows * case.problem.head_dim * case.number + case.keys * case.sums_bytes
    return of_keys * case.sums_bytes + (case.size < case.number) * own


def ulysses(case: Case, rows: int = 1) -> Estimate:
    """Each rank gets some heads of all tokens of its row of a mesh; then keys travel between rows, if several."""
    p, n, size, number, columns = case.problem, case.ranks, case.size, case.number, case.ranks // rows
    split = split_of(p.q_heads, p.kv_heads, columns)
    own, share = case.rows // columns, len(split.kv[0]) / max(1, p.kv_heads)
    joint, keys = (np.repeat(x.reshape(rows, columns).sum(axis=1), columns) for x in (own, case.keys))
    there = (columns - 1) * (own * p.head_dim * size + case.keys * case.token_bytes * share)
    home = (joint - own) * (p.value_dim * size + number)
    if case.backward:  # what was sent is there still: the gradient of out goes there, those of q, k and v come back
        there = (columns - 1) * own * p.value_dim * size
        home = (joint - own) * p.head_dim * size + (keys - case.keys) * case.sums_bytes * share
    if rows > 1:
        q, k = (tuple([whole_of(x[at : at + columns]) for at in range(0, n, columns)]) for x in (case.q, case.k))
        along = ring(Case(
            problem_of(p, split, 0), q, k, case.shard, case.rates, case.link, case.pair_flops, packed=case.packed,
            backward=case.backward,
        ))  # fmt: skip
        figures = along.seconds, along.compute_seconds, along.bytes_sent, along.memory_bytes
        seconds, work, sent, states = (np.repeat(x, columns) for x in figures)
    else:
        seconds = work = case.computing(np.full(n, case.seen.pairs.sum() / n), joint, keys * share)
        sent, states = 0, 2 * joint * number
    seconds = seconds + case.link.seconds(there.max(), columns - 1) + case.link.seconds(home.max(), columns - 1)
    memory = _of_heads(case, joint, keys * share, states, columns)
    found = case.estimate("ulysses" if rows == 1 else "mesh", seconds, work, sent + there + home, memory)
    return found if rows == 1 else replace(found, mesh=(rows, columns))


def _of_heads(case: Case, rows: np.ndarray, keys: np.ndarray, states: Any, columns: int) -> np.ndarray:
    """Bytes of a rank's heads of these rows and keys, beyond its results; most while v comes, is computed with, or out
    goes home. states: bytes that are held while they are computed.
    """
    p, size, number, kv = case.problem, case.size, case.number, keys * case.token_bytes
    q, out, lse, others = rows * p.head_dim * size, rows * p.value_dim * size, rows * number, 1 - 1 / columns
    if case.backward:  # those of the forward pass, and all gradients; of a turn dq as it is summed
        if columns == case.ranks:
            states = (size < number) * rows * p.head_dim * number / min(2, max(1, p.kv_heads // columns))
        return 2 * q + kv + 2 * out + lse + keys * case.sums_bytes + states
    coming = q + kv * (1 + others * p.value_dim / max(1, p.head_dim + p.value_dim))
    most = np.maximum(np.maximum(coming, q + kv + out + lse + states), out * (2 + others) + lse)
    return np.maximum(most - case.rows * (p.value_dim * size + number), 0) * (case.ranks > 1)


def gather(case: Case) -> Estimate:
    """Every rank gets the keys and values of all, then computes; a pass back adds up their gradients."""
    n, whole = case.ranks, case.keys.sum()
    sent = (whole - case.keys) * case.sums_bytes if case.backward else (n - 1) * case.keys * case.token_bytes
    work = case.computing(case.seen.pairs, case.rows, whole)
    memory = whole * (case.token_bytes + case.backward * case.sums_bytes) * (n > 1)
    return case.estimate("gather", work + case.link.seconds(sent.max(), n - 1), work, sent, memory)
