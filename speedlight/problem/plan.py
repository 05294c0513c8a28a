"""Plans: the cost of a call before it runs, and its printed table. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..errors import ArgumentError, UnsupportedError
from ..expressions.tree import lazily
from ..host.tunings import Origin
from .problem import TILE, Problem
from .rank_plan import Asked, Rates, Spread, spread
from .work import (
    Work,
    all_panel_keys,
    count,
    least_backward_bytes,
    least_bytes,
    materialised_bytes,
    token_bytes,
    value_bytes,
)


class Run(NamedTuple):
    """An engine's account of how it runs a problem."""

    isa: str
    kernel: str
    threads: int
    panel: int  # query rows that go through a tile together
    workspace_bytes: int
    origin: Origin  # of the schedule
    backward: bool = False  # of attention_backward()


class Roofs(NamedTuple):
    """A machine's measured peak and bandwidth, on all threads of a plan."""

    flops: float  # per second
    bytes: float  # per second
    date: str  # of the measurement


class Balance(NamedTuple):
    """How evenly a call's tasks keep its threads busy, simulated: nothing is measured."""

    seconds: float  # from the caller's start to the last thread's end
    share: float  # of these, that the threads need at least for the work (or memory for the keys, if that is more)
    asleep: float  # the same share where all threads but the caller's sleep at first


@dataclass(frozen=True)
class Plan:
    """Cost of a call, known before it runs. `print(plan)` shows it as a table.

    FLOPs count a multiply-add as two and only visible query-key pairs, except `tile_flops`, which is what is computed:
    `mixed_flops` under the mask, `full_flops` without, of those keys of mixed tiles, too, that all rows of a panel see.
    A tile is full where none of its keys is computed under the mask, though some, hidden from all rows, may be skipped.
    (On the CPU a little less is: `causal` keys that only the last rows of a panel see take no time of the others.)
    visible_pairs and flops are None where only counting would tell (`plan(…, exact=True)` counts).
    Bytes are the least that must be moved: every input once, every output once. Seconds are the least
    at the best peak and bandwidth that were measured on this machine: when they are first asked for, in a quarter of a
    second, and then kept beside the kernels. If the machine was busy then, a run may take less; `speedlight info
    --measure` measures again. `backward`: of attention_backward(): five products where attention() has two; gradients
    of tables and sinks are not in it.

    >>> import speedlight as sl
    >>> p = sl.plan(q_heads=8, q_len=1024, head_dim=64, causal=True)
    >>> p.visible_pairs, p.flops == p.visible_pairs * 4 * 64
    (4198400, True)
    """

    problem: Problem
    engine: str
    isa: str
    kernel: str
    threads: int
    panel: int
    visible_pairs: int | None
    flops: int | None
    tile_flops: int
    tiles_full: int
    tiles_mixed: int
    tiles_skipped: int
    panel_keys: int
    full_flops: int
    mixed_flops: int
    skipped_flops: int
    bytes_read: int
    bytes_written: int
    workspace_bytes: int
    materialised_bytes: int
    tile_keys: int = TILE
    backward: bool = False
    latent: bool = False  # values are the keys' first columns, which count once
    shared_prefix: int = 0  # leading keys that are those of all sequences; their whole tiles count once
    origin: Origin | None = None  # of the schedule, on a CPU
    measured: Callable[[], Roofs | None] | None = field(default=None, repr=False, compare=False)
    simulated: Callable[[], Balance | None] | None = field(default=None, repr=False, compare=False)
    ranks: Spread | None = None  # of plan(…, ranks=): how the call goes over several

    @property
    def memory_ratio(self) -> float:
        """Bytes of materialised attention over our workspace."""
        return self.materialised_bytes / self.workspace_bytes if self.workspace_bytes else float("inf")

    @lazily
    def roofs(self) -> Roofs | None:
        """The roofs of this machine, measured at the first access; None where nothing can be measured."""
        return self.measured() if self.measured else None

    @lazily
    def balance(self) -> Balance | None:
        """How evenly tasks keep the threads busy, simulated at the first access. None of a pass back, under a mask, and
        of GPUs.
        """
        return self.simulated() if self.simulated else None

    @property
    def peak_flops(self) -> float | None:
        """Per second, on all threads of the plan."""
        return self.roofs and self.roofs.flops

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second."""
        return self.roofs and self.roofs.bytes

    @property
    def seconds_at_least(self) -> float | None:
        """The larger of compute and memory time, at the best peak and bandwidth that were measured on this machine.
        None where flops or roofs are not known.
        """
        if self.flops is None or self.roofs is None:
            return None
        return max(self.flops / self.roofs.flops, (self.bytes_read + self.bytes_written) / self.roofs.bytes)

    def __str__(self) -> str:
        return "\n".join(f"{name:<16} {text}" for name, text in self.rows())

    def _repr_html_(self) -> str:
        """Returns the table, as a notebook shows it."""
        from ..host.notebooks import table

        return table(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Name and text of each line of the table."""
        p = self.problem
        lengths = f"q {_range(p.q_lengths)}, k {_range(p.k_lengths)}"
        shared = _whole_tiles(self.shared_prefix)
        lengths += f" ({shared:,} shared)" if shared else ""
        mask = " and ".join(["causal"] * p.causal + ["masked"] * (p.mask is not None)) or "full"
        mask += ", scored" if p.score is not None else ""
        mask += f", dropout {p.dropout:g}" if p.dropout else ""
        visible = "visible unknown (exact=True counts)" if self.flops is None else f"{_si(self.flops, 'FLOP')} visible"
        unit = "thread" if self.engine == "cpu" else "program"
        sums = self.backward and p.storage in ("f16", "bf16")  # of gradients, in 32 bits
        limits = ", whatever the lengths" if self.engine == "cpu" and not sums else ""
        what = "weights and their gradients" if self.backward else "scores and weights"
        dtypes = p.dtype if p.widened is None else f"{p.dtype} over {p.widened}"
        rows = [
            (
                "problem",
                f"{dtypes}, batch {p.batch}, heads {p.q_heads}/{p.kv_heads}, {lengths}, dims "
                f"{p.head_dim}/{p.value_dim}{' of the keys' * self.latent}, {mask}{', backward' * self.backward}",
            ),
            (
                "engine",
                f"{self.engine}, {self.isa}, {self.threads:,} {unit}{'s' * (self.threads != 1)}, kernel {self.kernel}",
            ),
            ("flops", f"{visible}, {_si(self.tile_flops, 'FLOP')} computed"),
            (
                "tiles",
                f"{self.tiles_full:,} full, {self.tiles_mixed:,} mixed, {self.tiles_skipped:,} skipped, of "
                f"{self.panel} x {self.tile_keys}",
            ),
            (
                "tile flops",
                f"{_si(self.full_flops, 'FLOP')} full, {_si(self.mixed_flops, 'FLOP')} mixed, "
                f"{_si(self.skipped_flops, 'FLOP')} skipped",
            ),
            ("bytes", f"{size_text(self.bytes_read)} read, {size_text(self.bytes_written)} written, at least"),
            ("workspace", f"{size_text(self.workspace_bytes)}{limits}"),
            (
                "materialised",
                f"{size_text(self.materialised_bytes)} for {what}: {self.memory_ratio:,.1f} x the workspace",
            ),
        ]
        if self.origin:
            rows.insert(2, ("schedule", str(self.origin)))
        if self.balance and self.threads > 1:
            share, asleep = self.balance[1:]
            rows.append(("balance", f"{share:.2f} of {self.threads:,} threads, {asleep:.2f} if they sleep (simulated)"))
        if self.roofs:
            least = "unknown" if self.seconds_at_least is None else _seconds(self.seconds_at_least)
            roofs = f"{self.roofs.flops / 1e9:,.0f} GFLOP/s and {self.roofs.bytes / 1e9:,.1f} GB/s, {self.roofs.date}"
            rows.append(("time at least", f"{least} ({roofs})"))
        return rows + ([] if self.ranks is None else spread_rows(self.ranks))


def spread_rows(spread: Spread) -> list[tuple[str, str]]:
    """Returns the lines of a plan's table about its ranks."""
    way, link = spread.way, spread.link
    mean = sum(way.seconds) / spread.ranks
    best: dict[str, float] = {}
    for x in spread.ways:
        best.setdefault(x.name if x.method == "ulysses" else f"{x.name} {x.shard}", x.slowest)
    return [
        (
            "ranks",
            f"{spread.ranks:,}, {way.name} {way.shard}: {_seconds(way.slowest)} for the slowest, {_seconds(mean)} on "
            f"average; {spread.speedup:,.3g} x as fast as one",
        ),
        (
            "rank sends",
            f"{size_text(max(way.bytes_sent))} at most, {size_text(sum(way.bytes_sent) / spread.ranks)} on average",
        ),
        ("rank memory", f"{size_text(max(way.memory_bytes))} at most, beyond its shards and results"),
        ("load", f"{', '.join(f'{name} {x:.3g}' for name, x in spread.balance.items())}: the most over the mean"),
        ("ways", ", ".join(f"{name} {_seconds(x)}" for name, x in best.items())),
        ("link", f"{link.bandwidth / 1e9:,.3g} GB/s, {_seconds(link.latency)}{', assumed' * spread.assumed}"),
    ]


def plan_of(
    problem: Problem,
    run: Run,
    measured: Callable[[], Roofs | None] | None = None,
    simulated: Callable[[], Balance | None] | None = None,
    *,
    exact: bool = False,
    work: Work | None = None,
) -> Plan:
    """The plan of a call on the CPU, exactly: what the kernel counts when it runs is the same.

    But the backward kernel leaves out rows whose lse is -inf, also where only their scores say so: tiles of panels that
    have such a row are mixed then, if any.
    """
    work = work or count(problem, run.panel, exact=exact, backward=run.backward)
    all_keys = all_panel_keys(problem, run.panel, backward=run.backward)
    read, written = (least_backward_bytes if run.backward else least_bytes)(problem)
    per_pair = pair_flops(problem, backward=run.backward)
    return Plan(
        problem=problem,
        engine="cpu",
        isa=run.isa,
        kernel=run.kernel,
        threads=run.threads,
        panel=run.panel,
        visible_pairs=work.visible_pairs,
        flops=None if work.visible_pairs is None else work.visible_pairs * per_pair,
        tile_flops=work.panel_keys * run.panel * per_pair,
        tiles_full=work.full,
        tiles_mixed=work.mixed,
        tiles_skipped=work.skipped,
        panel_keys=work.panel_keys,
        full_flops=(work.panel_keys - work.mixed_keys) * run.panel * per_pair,
        mixed_flops=work.mixed_keys * run.panel * per_pair,
        skipped_flops=(all_keys - work.panel_keys) * run.panel * per_pair,
        bytes_read=read,
        bytes_written=written,
        workspace_bytes=run.workspace_bytes,
        materialised_bytes=materialised_bytes(problem),
        backward=run.backward,
        origin=run.origin,
        measured=measured,
        simulated=simulated,
    )


def of_latents(plan: Plan) -> Plan:
    """Returns the plan of a call whose values are the keys' first columns: their bytes, and gradients', count once."""
    shared = value_bytes(plan.problem)
    written = plan.bytes_written - shared * plan.backward
    return replace(plan, latent=True, bytes_read=plan.bytes_read - shared, bytes_written=written)


def of_shared_prefix(plan: Plan, tokens: int, *, packed: bool) -> Plan:
    """Returns the plan of sequences that have so many leading keys in common: bytes of their whole tiles count once.

    packed: sequences lie one after the other in arrays, where each has keys of its own.
    """
    p = plan.problem
    if not tokens:
        return plan
    if plan.backward:
        raise UnsupportedError(
            f"shared_prefix: expected 0 beside backward=True; got {tokens}. Caches have no gradients. Leave it out."
        )
    if packed:
        raise ArgumentError(
            f"shared_prefix: expected 0 beside layout='lhd', whose sequences have keys of their own; got {tokens}. "
            "Plan a batch: layout='bhld' with batch=, and with q_lengths= and k_lengths= if its sequences differ."
        )
    if p.shared:
        raise ArgumentError(
            f"shared_prefix: expected 0 beside keys of one item, which are those of all and count once; got {tokens}. "
            "Leave it out."
        )
    if p.batch < 2:
        raise ArgumentError(
            f"shared_prefix: expected at least two sequences to share it; got batch={p.batch}. Write batch=2 or more."
        )
    if plan.engine != "cpu":
        raise UnsupportedError(
            f"shared_prefix: expected a plan of the CPU; got one of {plan.engine}, where each sequence is taken by "
            "itself. Leave it out."
        )
    if p.is_by_item:
        raise UnsupportedError(
            f"shared_prefix: expected neither dropout nor a mask or score that reads b beside it; got {tokens}. Each "
            "sequence is taken by itself then: leave it out."
        )
    most = max(0, min(k - q for q, k in zip(p.q_lengths, p.k_lengths, strict=True)))
    if not 0 <= tokens <= most:
        longest = tokens + max(p.q_lengths)
        way = f" k_len counts shared and new tokens: write k_len={longest} or more." if tokens > 0 else ""
        raise ArgumentError(
            f"shared_prefix: expected 0 to {most}, the keys before the first query of the shortest sequence; got "
            f"{tokens}.{way}"
        )
    saved = (p.batch - 1) * _whole_tiles(tokens) * token_bytes(p, latent=plan.latent)
    return replace(plan, shared_prefix=tokens, bytes_read=plan.bytes_read - saved)


def _whole_tiles(tokens: int) -> int:
    """Returns how many of so many shared keys are read once: sequences are taken together down to whole tiles."""
    return tokens // TILE * TILE


def over_ranks(plan: Plan, asked: Asked, *, packed: bool) -> Plan:
    """Returns the plan with its figures over several ranks, at the roofs of this machine."""
    if plan.roofs is None:
        raise UnsupportedError(f"ranks: expected an engine whose roofs are measured; got {plan.engine}.")
    if plan.problem.dropout:
        raise UnsupportedError(
            f"dropout: expected 0 beside ranks=; got {plan.problem.dropout:g}. Several processes have no dropout."
        )
    if plan.shared_prefix:
        raise UnsupportedError(
            f"shared_prefix: expected 0 beside ranks=; got {plan.shared_prefix}. Several processes share no pages."
        )
    rates, each = Rates(plan.roofs.flops, plan.roofs.bytes), pair_flops(plan.problem, backward=plan.backward)
    return replace(plan, ranks=spread(plan.problem, asked, rates, each, packed=packed, backward=plan.backward))


def pair_flops(problem: Problem, *, backward: bool = False) -> int:
    """Returns the FLOPs of a query and a key: S and out; or S, dP, dQ, dK and dV."""
    d, value_dim = problem.head_dim, problem.value_dim
    return 6 * d + 4 * value_dim if backward else 2 * (d + value_dim)


def _range(lengths: tuple[int, ...]) -> str:
    if not lengths:
        return "none"
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


_PREFIXES = "EPTGMk"
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def _si(x: float, unit: str) -> str:
    return _scaled(x, [(1e3 ** (6 - n), prefix + unit) for n, prefix in enumerate(_PREFIXES)] + [(1.0, unit)])


def size_text(x: float) -> str:
    """Bytes as people say them."""
    return _scaled(x, [(1 << (60 - 10 * n), f"{c.upper()}iB") for n, c in enumerate(_PREFIXES)] + [(1, "B")])


def _seconds(x: float) -> str:
    return _scaled(x, _SECONDS)


def _scaled(x: float, units: Sequence[tuple[float, str]]) -> str:
    """In the largest unit of which there is one, else in the last: three digits, and more where that is no fraction."""
    factor, unit = ([pair for pair in units if x >= pair[0]] or units[-1:])[0]
    number = x / factor
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
