"""What each way of attention over several ranks takes: time, bytes sent, memory, under one sharding.

A rank computes what is visible to its queries, at the peak and bandwidth that were measured on this machine, and has a
link of its own to the others, which sends and receives at once. What a step needs travels while the step before it is
computed, so a step takes the longer of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import STORAGE_BYTES
from ..host.machine import number_bytes
from ..problem.build import Stated
from ..problem.problem import SPAN, TILE, Problem
from .pairs import Seen, seen_between
from .parts import problem_of, split_of
from .plans import Sharded, schedule_of
from .shardings import Runs, Shard, positions, tokens, whole_of
from .turns import turns_of

_COUNTED = 8  # ranks up to which bytes are those of the schedule itself, which takes the square of their number to make


class Link(NamedTuple):
    """Between a rank and the others, both ways at once."""

    bandwidth: float  # bytes per second
    latency: float  # seconds until the first byte is there


class Rates(NamedTuple):
    """What a rank computes and reads at, with a rank's own machine."""

    flops: float  # per second
    bytes: float  # per second


@dataclass(frozen=True)
class Way:
    """One method on one sharding; tuples have an entry for each rank.

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
        mean = sum(self.compute_seconds) / len(self.compute_seconds)
        return max(self.compute_seconds) / mean if mean else 1.0


class Case(NamedTuple):
    """A problem on its ranks, under one sharding."""

    sharded: Sharded
    shard: Shard
    seen: Seen
    queries: np.ndarray  # rows of out of each rank, of all items and heads
    keys: np.ndarray  # positions of each rank
    items: int  # that lie at the same positions
    rates: Rates
    link: Link
    pair_flops: int
    backward: bool

    @property
    def problem(self) -> Problem:
        return self.sharded.whole.problem

    @property
    def packed(self) -> bool:
        return self.sharded.whole.cu_k is not None

    @property
    def ranks(self) -> int:
        return len(self.keys)

    @property
    def row_bytes(self) -> int:
        """Of a row of q and of what is made of it; of a pass back, of out and what flows to both, too."""
        p, size = self.problem, STORAGE_BYTES[self.problem.storage]
        forward = (p.head_dim + p.value_dim) * size + number_bytes(p.storage)
        return forward + self.backward * (p.head_dim + p.value_dim) * size

    @property
    def token_bytes(self) -> int:
        """Of a position in all heads and items of k and v."""
        p = self.problem
        return self.items * p.kv_heads * (p.head_dim + p.value_dim) * STORAGE_BYTES[p.key_storage]

    @property
    def sums_bytes(self) -> int:
        """The same of dk and dv, as they are summed."""
        p = self.problem
        return self.items * p.kv_heads * (p.head_dim + p.value_dim) * number_bytes(p.storage)

    @property
    def turn(self) -> float:
        """The share of heads that take their turn together."""
        most = int(self.keys.max(initial=0)) * self.items
        found = turns_of(self.problem, most, self.ranks, backward=self.backward)
        return max(len(x.q) for x in found) / max(1, self.problem.q_heads)

    def computing(self, pairs: Any, rows: Any, tokens: Any) -> Any:
        """Seconds: the longer of computing and of reading what it needs; of nothing, none."""
        moved = rows * self.row_bytes + tokens * self.token_bytes
        return (pairs > 0) * np.maximum(pairs * self.pair_flops / self.rates.flops, moved / self.rates.bytes)

    def carrying(self, sizes: Any, messages: int = 1) -> Any:
        """Seconds of so many bytes on a link, in so many messages one after another."""
        return messages * self.link.latency + sizes / self.link.bandwidth

    def way(self, method: str, seconds: np.ndarray, computing: np.ndarray, sent: np.ndarray, memory: np.ndarray) -> Way:
        numbers = (tuple(x.tolist()) for x in (seconds, computing))
        return Way(method, self.shard, *numbers, *(tuple(x.astype(np.int64).tolist()) for x in (sent, memory)))


def case_of(
    problem: Problem, ranks: int, link: Link, shard: Shard, rates: Rates, pair_flops: int, packed: bool, backward: bool
) -> Case:
    """The problem as these ranks have it."""
    q_len = sum(problem.q_lengths) if packed else problem.rows or max(problem.q_lengths, default=0)
    k_len = sum(problem.k_lengths) if packed else max(problem.k_lengths, default=0)
    cu_q, cu_k = ((0, *accumulate(x)) if packed else None for x in (problem.q_lengths, problem.k_lengths))
    sharded = Sharded(Stated(problem, cu_q, cu_k), *(positions(n, ranks, shard) for n in (q_len, k_len)))
    return _of(sharded, shard, rates, link, pair_flops, backward)


def _of(sharded: Sharded, shard: Shard, rates: Rates, link: Link, pair_flops: int, backward: bool) -> Case:
    problem, packed, ranks = sharded.whole.problem, sharded.whole.cu_k is not None, len(sharded.k)
    items = 1 if packed else problem.batch
    queries, keys = (np.array([tokens(each) for each in x], np.int64) for x in (sharded.q, sharded.k))
    rows, seen = queries * items * problem.q_heads, seen_between(problem, sharded.q, sharded.k, packed=packed)
    if not seen.owners.size:  # no keys: a run of none
        none = np.zeros((ranks, 1), np.int64)
        seen = Seen(none[0], none[0], none, none, none)
    return Case(sharded, shard, seen, rows, keys, items, rates, link, pair_flops, backward)


def _agreed(case: Case, *, exact: bool) -> tuple[np.ndarray, np.ndarray] | None:
    """Keys that each rank sends and gets, as the processes agree on it; None of too many ranks."""
    apart = case.packed or len(set(case.problem.q_starts)) > 1
    if case.ranks > _COUNTED or (case.shard == "stripe" and apart):
        return None
    sent, got = np.zeros((2, case.ranks), np.int64)
    for x in schedule_of(case.sharded, exact=exact).transfers:
        sent[x.source] += len(x.keys)
        got[x.to] += len(x.keys)
    return sent, got


def ring(case: Case) -> Way:
    """Keys and values go from rank to rank, as far as they are seen; who lacks some has them from their owner.

    In a pass back what flows to them goes to their owner, in float32, while the next step is computed.
    """
    n, rank, seen = case.ranks, np.arange(case.ranks)[:, None], case.seen.in_whole(TILE)
    runs, back = _runs_of(seen.owners, n), case.backward * case.sums_bytes
    computing, sent, clock, passes = np.zeros(n), np.zeros(n), _Clock(case), np.zeros(n, bool)
    held, home = (_Buffers(case, -(-int(case.keys.max(initial=0)) // 2)) for _ in range(2))
    for step in range(n):
        owner, before = (rank - step) % n, (rank - 1) % n
        at = runs[owner[:, 0]]  # [ranks, runs of an owner]
        first, last, of_before = seen.first[rank, at], seen.last[rank, at], (before, at)
        sizes, pairs = np.where(at < 0, 0, last - first), np.where(at < 0, 0, seen.pairs[rank, at]).sum(axis=1)
        work = case.computing(pairs, case.queries, sizes.sum(axis=1))
        computing += work
        covered = (seen.first[of_before] <= first) & (seen.last[of_before] >= last)
        moved, relayed = sizes * (step > 0), covered & (step > 1)
        passes[before[:, 0]] |= (relayed & (moved > 0)).any(axis=1)
        held.come(moved)
        home.come(np.roll(moved, -step, axis=0))  # of each owner what another one has of it
        sent += clock.step(work, moved * (case.token_bytes + back), np.where(relayed, before, owner))
        sent += moved.sum(axis=1) * back - clock.given(moved * back, owner)
    agreed = _agreed(case, exact=False)
    if agreed is not None:
        sent = agreed[0] * case.token_bytes + agreed[1] * back
    memory = held.bytes(2 + passes) + (_sums(case, held, home) if case.backward else _states(case))
    return case.way("ring", clock.free + case.carrying(0) * (back > 0) * (n > 1), computing, sent, case.turn * memory)


def _runs_of(owners: np.ndarray, ranks: int) -> np.ndarray:
    """[ranks, most]: the runs of each rank, and -1 where it has fewer."""
    each = [np.flatnonzero(owners == rank) for rank in range(ranks)]
    found = np.full((ranks, max(map(len, each))), -1)
    for rank, runs in enumerate(each):
        found[rank, : len(runs)] = runs
    return found


def exact(case: Case) -> Way | None:
    """Every rank computes with all that it sees in ascending order, and has each run from its owner."""
    if case.shard == "stripe" or case.backward or (case.packed and case.ranks > 1):
        return None
    seen, n = case.seen, case.ranks
    spans = -(-int(case.keys.sum()) // (2 * n * SPAN))  # of a piece that all ranks go through together
    sizes, computing, sent, clock = _in_spans(seen, max(1, spans)), np.zeros(n), np.zeros(n), _Clock(case)
    held = _Buffers(case, spans * SPAN)
    for run, owner in enumerate(seen.owners):
        work = case.computing(seen.pairs[:, run], case.queries, sizes[:, run])
        computing += work
        moved = sizes[:, run] * (np.arange(n) != owner)
        held.come(moved[:, None])
        sent += clock.step(work, moved[:, None] * case.token_bytes, np.full((n, 1), owner))
    agreed = _agreed(case, exact=True)
    sent = sent if agreed is None else agreed[0] * case.token_bytes
    return case.way("exact", clock.free, computing, sent, case.turn * (_states(case) + held.bytes(2)))


def _in_spans(seen: Seen, together: int) -> np.ndarray:
    """[ranks, runs]: tokens of each run in the spans that a rank needs. Those count from the first token of all, so a
    rank takes of a run what shares a span with keys that it sees; so many spans together are taken from the first that
    is needed to the last.
    """
    ends = np.cumsum(seen.lengths)
    begins, ranks = ends - seen.lengths, np.arange(len(seen.pairs))[:, None]
    pieces = -(-int(ends[-1]) // (SPAN * together))
    edges = np.zeros((len(ranks), pieces * together + 1), np.int64)
    some = seen.last > seen.first
    np.add.at(edges, (ranks, (begins + seen.first) // SPAN), some)
    np.add.at(edges, (ranks, -(-(begins + seen.last) // SPAN)), -1 * some)
    needed = (edges.cumsum(axis=1)[:, :-1] > 0).reshape(len(ranks), pieces, together)
    later = np.maximum.accumulate(needed[..., ::-1], axis=2)[..., ::-1]
    whole = (np.maximum.accumulate(needed, axis=2) & later).reshape(len(ranks), -1)
    before = np.pad(whole.cumsum(axis=1) * SPAN, ((0, 0), (1, 0)))  # tokens until each span begins
    whole = np.pad(whole, ((0, 0), (0, 1)))
    at = [before[:, x // SPAN] + whole[:, x // SPAN] * (x % SPAN) for x in (begins, ends)]
    return at[1] - at[0]


class _Buffers:
    """Of each rank: the largest piece of keys that comes to it, in tokens, and how many come. A run comes in pieces."""

    def __init__(self, case: Case, piece: int) -> None:
        self.case, self.piece = case, max(1, piece)
        self.largest, self.count = np.zeros(case.ranks), np.zeros(case.ranks)

    def come(self, moved: np.ndarray) -> None:
        """[ranks, runs]: tokens of a step."""
        self.largest = np.maximum(self.largest, np.minimum(moved, self.piece).max(axis=1))
        self.count += -(-moved // self.piece).sum(axis=1)

    def bytes(self, most: Any) -> np.ndarray:
        """One piece is computed with while the next one comes; who passes some on has a third."""
        return np.minimum(self.count, most) * self.largest * self.case.token_bytes


class _Clock:
    """Of each rank: when it began its last step, and when it is free again."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.begun, self.free = np.zeros(case.ranks), np.zeros(case.ranks)

    def given(self, moved: np.ndarray, source: np.ndarray) -> np.ndarray:
        """What each rank gives away of this."""
        found = np.zeros(len(moved))
        np.add.at(found, np.broadcast_to(source, moved.shape), moved)
        return found

    def step(self, work: np.ndarray, moved: np.ndarray, source: np.ndarray) -> np.ndarray:
        """A step that takes so long, [ranks], once so many bytes came from these ranks, [ranks, parts]: they set out
        when both ranks have begun the step before. Returns what each rank sent.
        """
        given, some = self.given(moved, source), moved > 0
        taken = moved.sum(axis=1)
        busiest = np.maximum(taken, np.where(some, given[source], 0).max(axis=1))
        ready = np.maximum(self.begun, np.where(some, self.begun[source], 0).max(axis=1))
        arrived = np.where(taken > 0, ready + self.case.carrying(busiest), 0)
        begun = np.maximum(self.free, arrived)
        self.begun, self.free = np.where(work > 0, begun, self.begun), np.where(work > 0, begun + work, self.free)
        return given


def _states(case: Case) -> np.ndarray:
    """Bytes of what a rank's rows go on from: a maximum and a sum each, and their outputs where those are narrower."""
    p, number = case.problem, number_bytes(case.problem.storage)
    wide = p.value_dim * (STORAGE_BYTES[p.storage] < number)
    return case.queries * (2 + wide) * number * (case.ranks > 1)


def _sums(case: Case, held: _Buffers, home: _Buffers) -> np.ndarray:
    """Bytes of what a pass back adds up: what flows to keys of others, of a step and of the one before, which is on its
    way to them; what comes from them; and dq, dk and dv, where those are of fewer bits.
    """
    p, number = case.problem, number_bytes(case.problem.storage)
    flows = np.minimum(held.count, 2) * held.largest + np.minimum(home.count, 1) * home.largest
    wide = STORAGE_BYTES[p.storage] < number
    return flows * case.sums_bytes + wide * (case.queries * p.head_dim * number + case.keys * case.sums_bytes)


def ulysses(case: Case) -> Way | None:
    """Each rank gets some heads of all tokens; None where heads cannot be dealt out."""
    return _over_heads(case, 1, case.ranks) if _deals(case, case.ranks) else None


def meshes(case: Case) -> list[Way]:
    """Each pair of numbers of ranks, along which keys travel and heads are exchanged."""
    if case.shard == "stripe":
        return []
    columns = [n for n in range(2, case.ranks // 2 + 1) if case.ranks % n == 0 and _deals(case, n)]
    return [_over_heads(case, case.ranks // n, n) for n in columns]


def _deals(case: Case, ranks: int) -> bool:
    return case.problem.q_heads > 0 and case.problem.q_heads % ranks == 0


def _over_heads(case: Case, rows: int, columns: int) -> Way:
    """Ranks of a row of a mesh exchange heads; then keys travel along its columns, if there are several rows."""
    p, size, n = case.problem, STORAGE_BYTES[case.problem.storage], case.ranks
    split = split_of(p.q_heads, p.kv_heads, columns)
    heads = len(split.kv[0])  # of k and v that a rank reads
    own = case.queries // columns  # rows of q of each rank for each of its row
    per_token, summed = (heads * x // p.kv_heads for x in (case.token_bytes, case.sums_bytes))
    there = (columns - 1) * (own * p.head_dim * size + case.keys * per_token)
    joint, keys = (np.repeat(x.reshape(rows, columns).sum(axis=1), columns) for x in (own, case.keys))
    home = (joint - own) * (p.value_dim * size + number_bytes(p.storage))
    if case.backward:  # what was sent is there still: only what flows to out goes there, what flows to q, k and v back
        there = (columns - 1) * own * p.value_dim * size
        home = (joint - own) * p.head_dim * size + (keys - case.keys) * summed
    states = 2 * joint * number_bytes(p.storage)
    if rows > 1:
        along = ring(_column(case, rows, columns))
        seconds, computing, sent, states = (
            np.repeat(np.array(x), columns)
            for x in (along.seconds, along.compute_seconds, along.bytes_sent, along.memory_bytes)
        )
    else:
        pairs = np.full(n, case.seen.pairs.sum() / n)
        seconds = computing = case.computing(pairs, joint, keys * heads / p.kv_heads)
        sent = 0
    seconds = seconds + case.carrying(there.max(), columns - 1) + case.carrying(home.max(), columns - 1)
    memory = _of_heads(case, joint, keys * per_token, states, columns)
    way = case.way("ulysses" if rows == 1 else "mesh", seconds, computing, sent + there + home, memory)
    return way if rows == 1 else replace(way, mesh=(rows, columns))


def _column(case: Case, rows: int, columns: int) -> Case:
    """The ring of the ranks that have the same heads, each with all tokens of its row."""

    def joined(held: tuple[Runs, ...]) -> tuple[Runs, ...]:
        return tuple([whole_of(held[at : at + columns]) for at in range(0, len(held), columns)])

    p, whole = case.problem, case.sharded.whole
    own = whole._replace(problem=problem_of(p, split_of(p.q_heads, p.kv_heads, columns), 0))
    sharded = Sharded(own, joined(case.sharded.q), joined(case.sharded.k))
    return _of(sharded, case.shard, case.rates, case.link, case.pair_flops, case.backward)


def _of_heads(case: Case, rows: np.ndarray, keys: np.ndarray, states: np.ndarray, columns: int) -> np.ndarray:
    """Bytes of the heads of all tokens of its row that a rank has, beyond its results. keys: bytes of k and v; states:
    of what is held while they are computed.

    Most is held while v comes, while it is computed, or while out goes home; results are there from then on alone.
    """
    p, size, number = case.problem, STORAGE_BYTES[case.problem.storage], number_bytes(case.problem.storage)
    q, out, lse = rows * p.head_dim * size, rows * p.value_dim * size, rows * number
    if case.backward:  # those of the forward pass, d_out, dq, dk and dv
        flows = keys * (case.sums_bytes / max(1, case.token_bytes))
        if columns == case.ranks:  # of a turn dq as it is summed
            states = (size < number) * rows * p.head_dim * number / min(2, max(1, p.kv_heads // columns))
        return 2 * q + keys + 2 * out + lse + flows + states
    others, results = 1 - 1 / columns, case.queries * (p.value_dim * size + number)
    coming = q + keys * (1 + others * p.value_dim / max(1, p.head_dim + p.value_dim))
    going = out * (2 + others) + lse
    most = np.maximum(np.maximum(coming, q + keys + out + lse + states), going)
    return np.maximum(most - results, 0) * (case.ranks > 1)


def gather(case: Case) -> Way:
    """Every rank gets the keys and values of all, then computes; a pass back adds up what flows to them."""
    n, whole = case.ranks, np.full(case.ranks, case.keys.sum())
    sent = (n - 1) * case.keys * case.token_bytes
    if case.backward:  # keys are there still: what flows to those of others
        sent = (whole - case.keys) * case.sums_bytes
    computing = case.computing(case.seen.pairs.sum(axis=1), case.queries, whole)
    seconds = computing + case.carrying(sent.max(), n - 1)
    memory = whole * (case.token_bytes + case.backward * case.sums_bytes) * (n > 1)
    return case.way("gather", seconds, computing, sent, memory)
