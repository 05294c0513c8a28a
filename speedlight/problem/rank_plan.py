"""Plans of attention over several ranks: every method and sharding that can run a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import ArgumentError, UnsupportedError, shown
from . import checks
from . import rank_costs as costs
from .problem import Problem
from .rank_costs import Case, Estimate, Link, Rates, balance_of
from .shard_visibility import check_sizes
from .shardings import SHARDS, positions

METHODS = ("ring", "ulysses", "gather", "exact", "mesh")
ASSUMED = Link(12.5e9, 1e-5)  # 100 Gbit/s and ten microseconds, where nobody says
_CLOSE = 1.01  # ways that take so much longer than the fastest are as good: the first of them is taken


class Asked(NamedTuple):
    """The arguments of plan() about ranks."""

    ranks: int
    link: Link
    assumed: bool  # the link, because nobody said
    shard: str  # or "auto", and so the method
    method: str


MOST_RANKS = 2048  # whose runs, two of each, are held against each other


def asked_ranks(ranks: Any, link_bandwidth: Any, latency: Any, shard: Any, method: Any) -> Asked | None:
    """The arguments of plan() that are about ranks, checked; None without any."""
    words = {"shard": (shard, SHARDS), "method": (method, METHODS)}
    for name, (x, known) in words.items():
        if not (isinstance(x, str) and x in ("auto", *known)):
            raise ArgumentError(f"{name}: expected 'auto' or one of {', '.join(map(repr, known))}; got {shown(x)}.")
    given = {"link_bandwidth": link_bandwidth, "latency": latency}
    if ranks is None:
        for name, x in (given | {n: None if x == "auto" else x for n, (x, _) in words.items()}).items():
            if x is not None:
                raise ArgumentError(f"{name}: expected ranks= beside it; got {shown(x)} alone. Give ranks=2, or more.")
        return None
    count = checks.integer("ranks", ranks)
    if not 1 <= count <= MOST_RANKS:
        raise ArgumentError(f"ranks: expected 1 to {MOST_RANKS:,}; got {shown(count)}.")
    bandwidth, delay = (
        default if x is None else checks.number(name, x, what)
        for (name, x), default, what in zip(given.items(), ASSUMED, ("bytes per second", "seconds"), strict=True)
    )
    if not 0 < bandwidth < math.inf:
        raise ArgumentError(f"link_bandwidth: expected bytes per second, finite and above 0; got {bandwidth}.")
    if not 0 <= delay < math.inf:
        raise ArgumentError(f"latency: expected seconds, finite, from 0; got {delay}.")
    return Asked(count, Link(bandwidth, delay), link_bandwidth is None or latency is None, shard, method)


@dataclass(frozen=True)
class Spread:
    """Cost of a call over several ranks: of the method asked for, or the fastest, and of the others.

    ways: every method and sharding that can do it, the fastest first. alone_seconds: of one rank with all of it.
    assumed: whether the link is nobody's, but a guess (100 Gbit/s, 10 µs).

    >>> import speedlight as sl
    >>> found = sl.plan(q_heads=8, q_len=65536, head_dim=128, causal=True, ranks=4, link_bandwidth=1e9, latency=1e-4)
    >>> found.ranks.way.shard, len(found.ranks.way.bytes_sent), round(found.ranks.balance["contiguous"], 2)
    ('zigzag', 4, 1.75)
    """

    ranks: int
    link: Link
    assumed: bool
    way: Estimate
    ways: tuple[Estimate, ...]
    balance: dict[str, float]  # of each sharding, as `Estimate.balance`
    alone_seconds: float

    @property
    def speedup(self) -> float:
        """The speed-up of the way over one rank with all of it."""
        return self.alone_seconds / self.way.slowest if self.way.slowest else float(self.ranks)


def spread(
    problem: Problem, asked: Asked, rates: Rates, pair_flops: int, *, packed: bool = False, backward: bool = False
) -> Spread:
    """A problem over several ranks, each a machine of these rates; `packed`: its tokens lie one behind another.

    Raises UnsupportedError where no way that was asked for can do it, and for sizes that nobody looks at.
    """
    check_sizes(problem)
    whole = sum if packed else lambda x: max(x, default=0)
    lengths = whole(problem.q_lengths) if packed else problem.rows or whole(problem.q_lengths), whole(problem.k_lengths)
    cases = {}
    for name in SHARDS:
        q, k = (positions(n, asked.ranks, name) for n in lengths)
        cases[name] = Case(problem, q, k, name, rates, asked.link, pair_flops, packed=packed, backward=backward)
    apart = packed or len(set(problem.q_starts)) > 1  # attention() makes zigzag shards of such stripes

    def on_shards(method: str) -> list[Estimate]:
        return [
            x
            for shard, case in cases.items()
            if asked.shard in ("auto", shard)
            if not (apart and asked.ranks > 1 and shard == "stripe" and method != "ulysses")
            for x in _ways(method, case)
        ]

    found = [x for method in METHODS if asked.method in ("auto", method) for x in on_shards(method)]
    if not found:
        others = [method for method in METHODS if on_shards(method)]
        raise UnsupportedError(_why_none(problem, asked, packed, backward, others))
    least = min((x.slowest for x in found if x.method != "exact"), default=0.0)
    own = next(iter(cases.values()))
    alone = own.computing(own.seen.pairs.sum(), own.rows.sum(), own.keys.sum())
    return Spread(
        ranks=asked.ranks,
        link=asked.link,
        assumed=asked.assumed,
        way=([x for x in found if x.method != "exact" and x.slowest <= _CLOSE * least] or found)[0],
        ways=tuple(sorted(found, key=lambda x: x.slowest)),
        balance={name: balance_of(case.seen.pairs) for name, case in cases.items()},
        alone_seconds=float(alone),
    )


def _ways(method: str, case: Case) -> list[Estimate]:
    """Those of a method that can do it."""
    q_heads, n, striped = case.problem.q_heads, case.ranks, case.shard == "stripe"
    match method:
        case "ring":
            return [costs.ring(case)]
        case "gather":
            return [costs.gather(case)]
        case "ulysses":
            return [costs.ulysses(case)] if q_heads and q_heads % n == 0 else []
        case "mesh":
            columns = [x for x in range(2, n // 2 + 1) if n % x == 0 and q_heads and q_heads % x == 0 and not striped]
            return [costs.ulysses(case, n // x) for x in columns]
    return [] if striped or case.backward or (case.packed and n > 1) else [costs.ring(case, exact=True)]


def _why_none(problem: Problem, asked: Asked, packed: bool, backward: bool, others: list[str]) -> str:
    """Why no way does what was asked for; `others`: methods that do on such shards."""
    expected = f"method: expected {', '.join(map(repr, others))} or 'auto'"
    if asked.shard == "stripe" and (asked.method not in ("ulysses", "mesh") or not others):
        why = "for method='exact'" if asked.method == "exact" else "here, where sequences begin at several positions"
        return (
            f"shard: expected 'zigzag', 'contiguous' or 'auto' {why}: attention() makes zigzag shards of stripes "
            "first, and stripes of its results, which the model has no figures for; got 'stripe'."
        )
    match asked.method:
        case "exact" if backward:
            return f"{expected} with backward=True, whose sums have no order of one process; got 'exact'."
        case "exact" if packed:
            same = " and ".join(repr(x) for x in others if x in ("ulysses", "gather"))
            return (
                f"{expected} for packed sequences, whose spans begin anywhere; got 'exact'. The bits of one process "
                f"come of {same}."
            )
        case "mesh" if asked.shard == "stripe":
            return "shard: expected 'zigzag', 'contiguous' or 'auto' for method='mesh'; got 'stripe'."
        case "mesh":
            return (
                f"{expected} for {asked.ranks} ranks: a mesh is ring x ulysses, both 2 at least, and ulysses divides "
                f"the {problem.q_heads} heads of q; got 'mesh'."
            )
    return (
        f"{expected} where {asked.ranks} ranks cannot have as many whole heads each, of {problem.q_heads} of q and "
        f"{problem.kv_heads} of k and v; got {asked.method!r}."
    )
