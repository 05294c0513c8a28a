"""Schedules and loops tuned for each family of CPUs: a row each, measured. No bit of a result depends on them.

`shipped` gives the row of a vector unit on this CPU; cpu/runtime/tuned.py what is in force, which may
have been measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .machine import PRODUCTS, Isa, cpu_family, host_arch

FAMILIES = {
    "zen4": "Zen 4", "zen5": "Zen 5", "intel512": "Intel with AVX-512", "arm": "64-bit Arm", "other": "another CPU",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RegisterTiles:
    """Sums that are held in registers at once; the rest hold operands."""

    registers: int  # the row is for units of at least so many
    keys: tuple[int, int, int]  # keys (or columns of values) beside 1, 2, 3 query vectors
    # decoding: rows of queries x blocks of a cache, the largest first; blocks at once are streams from memory
    scores: tuple[tuple[int, int], ...]
    code_scores: tuple[tuple[int, int], ...]  # of codes, which are widened to numbers
    coded_pairs: tuple[tuple[int, int], ...]  # … or to pairs of bfloat16
    narrow_scores: tuple[tuple[int, int], ...]  # where a block of 16 keys takes several vectors
    # decoding: rows of queries x vectors of a value, and for how many rows or more
    values: tuple[tuple[int, int, int], ...]
    code_values: tuple[tuple[int, int, int], ...]
    paired_values: tuple[tuple[int, int, int], ...]
    gradients: tuple[tuple[int, int], ...]  # keys x vectors of columns, of dK and dV, the widest first, down to one
    key_vectors: int = 1  # decoding rows of keys: vectors of them at once
    # decoding a cache: what all lanes share is loaded by each multiply-add that needs it, not once into a register
    reloads: bool = False


@dataclass(frozen=True, slots=True)
class Blocking:
    """The forward kernel's blocks of queries."""

    worth: tuple[float, float, float]  # share of the peak that panels of 1, 2, 3 query vectors reach, of the best
    panels: int  # that share a tile of keys, at most
    task_flops: int  # of a task, at least, where there is so much work
    tasks: int  # for each thread, at least
    even: int  # … of those that stage tiles, where they are alike and every thread has as many


@dataclass(frozen=True, slots=True)
class Fetching:
    """Prefetch distances of the kernels; 0 leaves prefetching to the CPU.

    The decode kernel has room for the addresses of 32 keys, or 24 blocks, past a tile (PLACES of
    cpu/memory/records.py).
    """

    groups: int  # vectors of keys, where keys are rows
    keys: int  # where values are rows; of pairs, twice as many
    cache_bytes: int  # of a cache's keys and values: some microseconds of reading
    cache_blocks: int  # … and blocks, at most
    twice: bool  # whether a cache's values are asked for while weights are computed, too
    level: int  # cache that it is fetched to: 1 to 3
    alone: bool  # of a single row, too: it leaves memory idle at no time
    rows: int  # the forward kernel: rows of values; where it does, keys of the next tile, and what is packed and stored


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decode kernel's tasks."""

    tasks: int  # for each thread, so that none waits long for the last
    rows: int  # of all heads of a task: their states stay in the second-level cache
    spans: int  # of a task, at least, where several share a head


@dataclass(frozen=True, slots=True)
class Ranges:
    """The backward pass's tasks."""

    tasks: int  # at once, for each thread
    keys: tuple[int, int]  # of a task, at least, and at most where a row has 128 elements


@dataclass(frozen=True, slots=True)
class Threading:
    """Work for which threads are woken, and how long they work without a look at signals."""

    inline_seconds: float  # a region that one thread ends so soon is not worth waking another
    inline_bytes: int  # … and a step of a cache over so many bytes of keys and values
    region_seconds: float  # a region lasts about so long at most, so that signals are seen
    flops: float  # per second of one thread, to guess from
    backward_flops: float  # … of the backward pass, for each element that a vector has
    read_bytes: float  # … that a decode step reads keys and values with
    # from one worker's scratch to the next's: side by side they cost 2 to 4 % (a prefetcher runs into the other's)
    apart: int


# threads: of more, each that is woken wakes as many others as WAKES says, and calls have smaller tasks than the tables
# say, which were measured on few. Chosen by simulation alone (cpu/engine/makespan.py)
MANY, WAKES = 16, 4


Parts = dict[str, dict[str, Any]]  # of a tuning, the fields that differ from another's


class Origin(NamedTuple):
    """The source of a tuning; str() says it in words."""

    family: str  # whose row it is, or what it was tuned from
    tuned: str | None  # on which day on this machine, if it was
    parts: tuple[str, ...]  # that are not as they ship

    def __str__(self) -> str:
        base = f"as shipped for {FAMILIES[self.family]}"
        if self.parts:
            return f"{', '.join(self.parts)} tuned on {self.tuned}, else {base}"
        return base if self.tuned is None else f"{base}, the best on {self.tuned}"


@dataclass(frozen=True, slots=True, eq=False)
class Tuning:
    """All that is chosen by the CPU and changes no bit. What is prepared depends on it, by identity."""

    family: str
    tiles: tuple[RegisterTiles, ...]
    blockings: dict[str, Blocking]  # by product
    fetching: Fetching
    decoding: Decoding
    ranges: Ranges
    threading: Threading
    date: str = ""  # when parts of it were measured on this machine, if so

    def part(self, name: str) -> Any:
        """Returns the Blocking of a product, or the field of this name."""
        return self.blockings[name] if name in PRODUCTS else getattr(self, name)

    def with_parts(self, parts: Parts, **more: Any) -> Tuning:
        """Returns another tuning, of whose parts some fields differ."""
        new = {name: replace(self.part(name), **fields) for name, fields in parts.items()}
        blockings = self.blockings | {x: new.pop(x) for x in PRODUCTS if x in new}
        return replace(self, blockings=blockings, **new, **more)

    @property
    def origin(self) -> Origin:
        own = [x for x in LIMITS if self.part(x) != TUNINGS[self.family].part(x)]
        return Origin(self.family, self.date or None, tuple(own))

    def register_tiles(self, isa: Isa) -> RegisterTiles:
        """Those for as many registers as a unit has."""
        fitting = [row for row in self.tiles if row.registers <= isa.registers]
        return fitting[0]  # not next(…): an interrupt while its generator is closed would be lost


# One stream is read fastest, by 4 to 9 % (measured on a Zen 5). int8 takes less time to read than to compute, where a
# few chains wait for each other: it has more sums, and a vector of values that was widened is used for four rows.
# An Intel core multiplies and adds twice a cycle, 4 cycles each, and widens and computes exponentials in the same two
# pipes: eight sums at least, and what was widened is used for every row of a group (bf16 1.15 to 1.2 times as fast).
#       registers   keys
#          scores                    of codes                  of codes as pairs         narrow
#          values                               of codes                         of codes as pairs
#          gradients
_TILES = (
    RegisterTiles(32, (8, 8, 8),
        ((8, 1), (4, 1), (1, 1)), ((8, 1), (4, 4), (1, 4)), ((8, 2), (4, 4), (1, 4)), ((4, 1), (1, 1)),
        ((4, 4, 8), (2, 8, 2), (1, 8, 1)), ((4, 4, 4), (2, 8, 2), (1, 8, 1)),
        ((8, 2, 8), (4, 4, 4), (2, 8, 2), (1, 8, 1)),
        ((8, 2), (8, 1))),
    RegisterTiles(16, (4, 4, 4),
        ((4, 1), (1, 1)),         ((4, 1), (1, 1)),         ((4, 1), (1, 1)),         ((4, 1), (1, 1)),
        ((2, 4, 2), (1, 4, 1)),              ((2, 4, 2), (1, 4, 1)),             ((2, 4, 2), (1, 4, 1)),
        ((4, 3), (4, 2), (4, 1))),
)  # fmt: skip
_INTEL_TILES = (
    RegisterTiles(32, (8, 8, 8),
        ((8, 2), (4, 2), (1, 4)), ((8, 2), (4, 2), (1, 4)), ((8, 2), (4, 2), (1, 4)), ((4, 1), (1, 1)),
        ((8, 2, 8), (4, 4, 4), (2, 8, 2), (1, 8, 1)),
        ((8, 2, 8), (4, 4, 4), (2, 8, 2), (1, 8, 1)),
        ((8, 2, 8), (4, 4, 4), (2, 8, 2), (1, 8, 1)),
        ((8, 2), (8, 1))),
)  # fmt: skip
# One vector of four keys would wait for its sum: 16 keys at once.
_ARM_TILES = (replace(_TILES[0], narrow_scores=((4, 1), (1, 2)), key_vectors=4),)
# A Zen 4 takes two 512-bit instructions a cycle, loads to registers among them.
_ZEN4_TILES = (replace(_TILES[0], reloads=True), _TILES[1])
_REGISTER_TILES = {"zen4": _ZEN4_TILES, "zen5": _TILES, "intel512": _INTEL_TILES, "arm": _ARM_TILES, "other": _TILES}

# Measured over 90 shapes on Zen 4 and Zen 5, over 20 on an Intel Xeon (docs/ladder.md). Units of 16 registers have no
# room for enough sums of one vector: they take the row of other CPUs. Arm's are predicted (docs/systems.md).
#                       worth of 1, 2, 3     panels  FLOPs of a task  tasks  even
_FMA = {
    "zen4":     Blocking((1.00, 0.98, 0.95),      8,     800_000_000,     8,    8),
    "zen5":     Blocking((0.80, 0.97, 1.00),      8,     800_000_000,     8,    8),
    "intel512": Blocking((0.80, 1.00, 0.98),      8,     800_000_000,     8,    4),
    "arm":      Blocking((0.80, 1.00, 0.98),      8,     800_000_000,     8,    8),
    "other":    Blocking((0.80, 0.97, 1.00),      8,     800_000_000,     8,    8),
}  # fmt: skip
_PAIRS = {
    "zen4":     Blocking((0.72, 1.00, 0.99),      4,   1_600_000_000,     8,    8),
    "zen5":     Blocking((0.80, 0.97, 1.00),      8,   1_600_000_000,     8,    8),
    "intel512": Blocking((0.80, 0.97, 1.00),      8,   1_600_000_000,     8,    8),  # slower than avx512 there
    "arm":      Blocking((0.80, 0.97, 1.00),      8,   1_600_000_000,     8,    8),
    "other":    Blocking((0.80, 0.97, 1.00),      8,   1_600_000_000,     8,    8),
}  # fmt: skip
# Of AMX's tiles two vectors of queries share each tile of keys; Intel's CPUs alone have them.
_AMX_TILES = dict.fromkeys(FAMILIES, Blocking((0.60, 1.00, 0.70), 12, 6_400_000_000, 8, 8))
_ODD_PAIRS = dict.fromkeys(FAMILIES, Blocking((0.65, 0.97, 1.00), 8, 3_200_000_000, 8, 8))  # as llvm-mca predicts
_BLOCKINGS = {"fma": _FMA, "pairs": _PAIRS, "amx_tiles": _AMX_TILES, "odd_pairs": _ODD_PAIRS}

# A Zen 5 reads a fifth faster with it. On a Zen 4 what is fetched to the first level takes the place of what is being
# missed there, 24 lines at once: 16 KiB ahead to the second level reads up to half faster (docs/ladder.md). An Intel
# Xeon waits for its third level in long problems, too: rows fetched make it 3 to 5 % faster, its AVX2 code 2 to 4.
#                   groups  keys  cache_bytes  cache_blocks  twice  level  alone  rows
_FETCHING = {
    "zen4":     Fetching(2,   16,       16384,           24,  True,     2, False,   16),
    "zen5":     Fetching(2,   16,       16384,           24,  True,     1,  True,    0),
    "intel512": Fetching(2,   16,       16384,           24, False,     2,  True,   32),
    "arm":      Fetching(2,   16,       16384,           24,  True,     1,  True,    0),
    "other":    Fetching(2,   16,       16384,           24,  True,     1,  True,   16),
}  # fmt: skip

_DECODING = Decoding(tasks=4, rows=128, spans=1)  # of every family
_RANGES = Ranges(tasks=3, keys=(1024, 4096))

#                    inline seconds  bytes  region  FLOP/s  backward  bytes/s  scratches apart
_THREADING = {
    "zen4":     Threading(20e-6, 1 << 19,    0.048,   50e9,      5e9,    20e9, (1 << 20) + 512),
    "zen5":     Threading(50e-6, 1 << 20,    0.048,   50e9,      5e9,    20e9, (1 << 20) + 512),
    "intel512": Threading(20e-6, 1 << 19,    0.048,   50e9,      5e9,    20e9, (1 << 20) + 512),
    "arm":      Threading(50e-6, 1 << 20,    0.048,   50e9,      5e9,    20e9, (1 << 20) + 512),
    "other":    Threading(50e-6, 1 << 20,    0.048,   50e9,      5e9,    20e9, (1 << 20) + 512),
}  # fmt: skip

# What `speedlight tune` may change of which part, and within what limits; a file that says otherwise is not followed.
# Register tiles and regions are not tried: tests know the tiles that ship, and regions are as long as signals may wait.
_BLOCKS = {
    "worth": (0.01, 1.0),
    "panels": (1, 16),
    "task_flops": (10_000_000, 100_000_000_000),
    "tasks": (1, 64),
    "even": (1, 64),
}
LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    **dict.fromkeys(PRODUCTS, _BLOCKS),
    "fetching": {
        "groups": (0, 2), "keys": (0, 16), "cache_bytes": (0, 65536), "cache_blocks": (0, 24), "twice": (0, 1),
        "level": (1, 3), "alone": (0, 1), "rows": (0, 64),
    },
    "decoding": {"tasks": (1, 64), "rows": (1, 1024), "spans": (1, 64)},
    "threading": {"inline_seconds": (0.0, 1e-3)},
}  # fmt: skip

TUNINGS = {
    x: Tuning(
        x,
        _REGISTER_TILES[x],
        {product: rows[x] for product, rows in _BLOCKINGS.items()},
        _FETCHING[x],
        _DECODING,
        _RANGES,
        _THREADING[x],
    )
    for x in FAMILIES
}


def shipped(isa: Isa) -> Tuning:
    """The row of a vector unit on this CPU; of x86's narrow ones, and those of machines that are not here, the last."""
    if isa.arch == "aarch64":
        return TUNINGS["arm"]
    return TUNINGS[cpu_family() if isa.registers >= 32 and isa.arch == host_arch() else "other"]
