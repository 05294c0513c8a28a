"""Schedule: the kernel, blocks, threads and scratch with which this machine runs a problem. Pure.

The figures of CPUs are the tables of tunings.py; no bit of a result depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...arrays.dtypes import ALL_CODES, STORAGE_BYTES, scale_columns, scales_of
from ...host.machine import PRODUCTS, Isa, level2_bytes, number_bytes
from ...host.tunings import MANY, Decoding, Tuning
from ...problem.operands import Strides
from ...problem.problem import SPAN, TILE, Problem
from ..memory.records import BLOCK, DECODE_SCRATCH, FORWARD_SCRATCH, PANEL, DecodeSizes, ForwardSizes, placed

DECODE_ROWS = 16  # query rows of a kv head for which reading keys takes longer than computing
_VISIT = 30_000  # FLOPs of a task for each of many threads, at least: they take tickets one after another
_CHOSEN = 32  # queries that go through a span of chosen keys together, at most
_PARTIALS = 64 << 20  # bytes of what parts of heads leave for the last of them, at most


@dataclass(frozen=True, slots=True)
class Schedule:
    """The way in which the CPU engine runs a problem."""

    kind: Literal["forward", "decode"]
    isa: Isa
    tuning: Tuning
    storage: str
    panel: int  # query rows that go through a tile together
    panels: int  # of one task
    threads: int
    tickets: int
    words: tuple[tuple[str, int], ...]  # what the kernel's arguments say of it
    scratch_bytes: int  # of one worker
    vectors: int = 0  # of a panel, in the forward kernel
    parts: int = 1  # tasks that share the spans of a block of queries, or of a task's kv heads
    partial_bytes: int = 0  # what those leave for the last of them
    heads: int = 1  # kv heads of one task
    scattered: bool = False  # the forward kernel reads rows of pages where they lie

    @property
    def block_rows(self) -> int:
        """Query rows of one task, of one kv head."""
        return self.panel * self.panels

    @property
    def scratch_stride(self) -> int:
        """Bytes from one worker's scratch to the next; the gap is never touched: it costs addresses, not memory."""
        return self.scratch_bytes + self.tuning.threading.apart

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch of all workers, and of what parts leave for each other."""
        return self.scratch_bytes * self.threads + self.partial_bytes * (self.tickets // self.parts)


def product_name(problem: Problem, isa: Isa, *, gradients: bool = False) -> str:
    """Names what multiplies, in machine.PRODUCTS. Keys of another dtype than q's are widened first."""
    if problem.widened:
        return "fma"
    return isa.product(problem.storage, gradients=gradients, codes=codes_of(problem))


def codes_of(problem: Problem) -> str:
    """Says what share the scales of a problem's codes, as Steps.codes does; nothing where there are none."""
    return scales_of(problem.quantised, latent=problem.latent_codes)


def count_scales(problem: Problem) -> tuple[int, int]:
    """Counts the scales of a key and of a value; none where there are no codes. The rest of a latent counts as one."""
    if problem.quantised is None:
        return 0, 0
    size = scale_columns(problem.quantised, latent=problem.latent_codes)
    if not size:
        return 1, 1
    values = -(-problem.value_dim // size)
    return (values + 1 if problem.latent_codes else -(-problem.head_dim // size)), values


def schedule(
    problem: Problem, isa: Isa, threads: int, strides: Strides, tuning: Tuning, *, leaves: bool = False
) -> Schedule:
    """Schedules the decode kernel for few rows, the forward kernel for all else.

    leaves: for rows of several sequences, whose states are left.
    """
    if _decodes(problem, isa, strides):
        return _decode_schedule(problem, isa, threads, strides.heads_adjoin, tuning)
    return _forward_schedule(problem, isa, threads, strides, tuning, leaves=leaves)


def _decodes(problem: Problem, isa: Isa, strides: Strides) -> bool:
    """Returns whether the decode kernel runs a problem: few rows, values of at least a vector, side by side."""
    if strides.strided_keys or strides.strided_values or problem.rows is not None or problem.partial:
        return False
    if strides.in_parts or strides.is_latent:
        return False
    most = max(problem.q_lengths, default=0) * problem.group
    rows = DECODE_ROWS - _fills_panels(problem, isa, strides)
    return 0 < most <= rows and problem.value_dim >= isa.lanes(problem.storage)


def _fills_panels(problem: Problem, isa: Isa, strides: Strides) -> bool:
    """Returns whether DECODE_ROWS rows, which fill panels, are faster there: keys are read where they lie."""
    return not _staged(problem, product_name(problem, isa), strides)[0]


# --- many rows


def _forward_schedule(
    problem: Problem, isa: Isa, threads: int, strides: Strides, tuning: Tuning, *, leaves: bool
) -> Schedule:
    """Chooses the panel that wastes least, then as many panels per block as the second-level cache and the threads
    allow.
    """
    lanes, product = isa.lanes(problem.storage), product_name(problem, isa)
    rows = [n * problem.group for n in problem.q_lengths]
    wants, tiles = tuning.blockings[product], tuning.register_tiles(isa)
    vectors = min((3, 2, 1), key=lambda n: _blocks(rows, lanes * n) * n / wants.worth[n - 1])
    panel = lanes * vectors
    stage_keys, stage_values = _staged(problem, product, strides)
    scattered = _reads_pages(problem, product, strides)
    rows_at_once = PRODUCTS[product].rows or tiles.keys[vectors - 1]
    if _reads_blocks(problem, isa, product, strides) and BLOCK % rows_at_once == 0:
        scattered, stage_keys, stage_values = True, False, False
    # a cache's values are staged where pages part a tile
    staged = stage_keys, stage_values or (strides.is_cached and not scattered)
    sizes = _sizes(problem, isa, vectors, rows_at_once, staged)
    scratch, fixed = placed(FORWARD_SCRATCH, sizes)
    offsets, panel_bytes = placed(PANEL, sizes)
    fits = (level2_bytes() * 5 // 8 - fixed) // panel_bytes
    keys = max(problem.k_lengths, default=0)
    work = panel * max(keys, 1) * (problem.head_dim + problem.value_dim) * 2
    # tasks are short, a few milliseconds, since threads wait for the last one of a region
    flops = wants.task_flops // (1 if threads <= MANY else 4)
    # a tile that is staged is staged once for all panels of a task
    least, even = (4, wants.even) if stage_keys or stage_values else (2, wants.tasks)
    share = wants.panels * (2 if problem.quantised else 1)  # codes take longer to stage than numbers
    most = max(1, min(share, fits, max(least, flops // work)))
    panels = _panels_of_task(rows, panel, problem.kv_heads, most, threads, (wants.tasks, even))
    if threads > MANY:
        panels = max(panels, min(most, -(-threads * _VISIT // work)))
    if leaves:  # a tile is staged once for all rows of an item; tasks share the spans, where they are few
        panels = max(1, min(fits, -(-max(rows) // panel)))
    blocks = _blocks(rows, panel * panels) * problem.kv_heads
    side_by_side = _side_by_side(problem, _blocks(rows, panel * panels), threads)
    state_bytes = -(-keys // SPAN) * panels * (2 + sizes.width) * sizes.row
    parts = _parts_of_blocks(problem, blocks, state_bytes, threads, tuning.decoding)
    words = {
        "panels": panels, "side_by_side": side_by_side, "width": sizes.width, "stage_k": int(stage_keys),
        "stage_v": int(stage_values), "panel_bytes": panel_bytes, "parts": parts, "partial_bytes": state_bytes,
    }  # fmt: skip
    return Schedule(
        "forward",
        isa,
        tuning,
        problem.storage,
        panel,
        panels,
        threads=max(1, min(threads, blocks * parts)),
        tickets=blocks * parts + _blocks(_unused(problem), panel * panels) * problem.kv_heads,
        words=_words(words, scratch | offsets),
        scratch_bytes=up(fixed + panels * panel_bytes, 4096),
        vectors=vectors,
        parts=parts,
        partial_bytes=state_bytes if parts > 1 else 0,
        scattered=scattered,
    )


def _reads_pages(problem: Problem, product: str, strides: Strides) -> bool:
    """Returns whether rows of pages are read where they lie, by a list of their addresses."""
    if not strides.is_paged or PRODUCTS[product].rows:
        return False
    apart = strides.is_cached or strides.in_parts or strides.strided_values
    return not (apart or _staged(problem, product, strides._replace(is_paged=False))[0])


def _reads_blocks(problem: Problem, isa: Isa, product: str, strides: Strides) -> bool:
    """Returns whether a cache's blocks are read where they lie: they have units as these are multiplied."""
    steps = PRODUCTS[product]
    if not strides.is_cached or strides.is_latent or problem.quantised or isa.takes_lanes or steps.packed > 1:
        return False
    return steps.elements > 1 or problem.key_storage in ("f32", "f64")


def _parts_of_blocks(problem: Problem, blocks: int, state_bytes: int, threads: int, wants: Decoding) -> int:
    """Returns how many tasks share the spans of each of these blocks of queries: several, where blocks are few.

    state_bytes: what the tasks of a block leave for the last of them.
    """
    tasks, enough = blocks, wants.tasks * threads
    alone = problem.rows is not None or problem.partial or problem.chosen is not None
    if threads == 1 or tasks >= threads or alone:
        return 1
    if blocks * state_bytes > _PARTIALS:
        return 1
    return _parts_of(problem, tasks, enough, threads, wants)


def _parts_of(problem: Problem, tasks: int, enough: int, threads: int, wants: Decoding) -> int:
    """Returns among how many tasks the spans of one are shared, so that there are `enough`, or as many as spans."""
    spans = -(-max(problem.k_lengths, default=0) // SPAN)
    most = -(-spans // wants.spans)
    parts = max(1, min(most, -(-enough // max(1, tasks))))
    if threads > MANY and parts > 1:
        parts = min(most, -(-spans // (spans // parts)))  # alike
    return parts


def _panels_of_task(rows: list[int], panel: int, kv_heads: int, most: int, threads: int, tasks: tuple[int, int]) -> int:
    """Returns how many panels a task takes, of at most `most`.

    tasks: how many each thread has at least; then how many, where all tasks have as many panels and all threads as many
    tasks.
    """
    blocks = _blocks(rows, panel)
    least, more = (max(1, min(most, blocks * kv_heads // (x * threads))) for x in tasks)
    for panels in range(more, least, -1):
        found = _blocks(rows, panel * panels)
        if found * panels == blocks and found * kv_heads % threads == 0:
            return panels
    return least


def _side_by_side(problem: Problem, blocks: int, threads: int) -> int:
    """Returns the kv heads whose blocks have tickets in turn; `blocks`: of a kv head, in all items.

    Heads come one after another, so that their keys stay in the shared cache. But under `causal` many threads would
    wait for the heaviest blocks of the last: what comes last then is light blocks of several heads.
    """
    if threads <= MANY or not problem.causal:
        return 1
    enough = [n for n in range(1, problem.kv_heads) if problem.kv_heads % n == 0 and blocks * n >= 4 * threads]
    return min(enough, default=max(1, problem.kv_heads))


def _staged(problem: Problem, product: str, strides: Strides) -> tuple[bool, bool]:
    """Returns whether tiles of keys, and of values, are copied: to be widened, made units, or brought together."""
    elements, together, rows, *_ = PRODUCTS[product]
    if rows:  # keys are tiles where they lie, if their rows are whole chunks and not far apart
        apart = together == 1 or strides.in_parts or strides.is_paged or strides.strided_keys or strides.heads_adjoin
        return apart or problem.head_dim % (elements * together) != 0, True
    paired = elements > 1
    direct = (paired or problem.key_storage in ("f32", "f64")) and not problem.quantised
    keys = strides.is_cached or not direct or strides.strided_keys or problem.head_dim % elements != 0
    values = not direct or strides.strided_values or (not strides.is_cached and paired)
    if strides.is_paged and not strides.is_cached:  # staged, or read where they lie
        apart = keys or strides.in_parts or strides.strided_values
        return apart, values or apart
    return keys, values


def _sizes(problem: Problem, isa: Isa, vectors: int, rows: int, staged: tuple[bool, bool]) -> ForwardSizes:
    """Returns what scratch depends on. rows: keys of a register tile; staged: whether keys are, and values."""
    number, steps = number_bytes(problem.storage), PRODUCTS[product_name(problem, isa)]
    elements, together = steps.elements, steps.together
    units, width = up(-(-problem.head_dim // elements), steps.packed), up(problem.value_dim, rows)
    columns = width if steps.rows else problem.value_dim
    return ForwardSizes(
        number=number,
        panel=vectors * isa.lanes(problem.storage),
        tile_rows=up(TILE, rows),
        units=units,
        width=width,
        staged_keys=(staged[0] or together > 1) * TILE * units * number,  # a tile that is not whole is copied
        staged_values=staged[1] * ((TILE // elements) * columns * number + (together > 1) * 64),
        scales=count_scales(problem),
        blocks=codes_of(problem) in ("blocks", "latents"),
        chosen=_chosen_bytes(problem),
    )


def _unused(problem: Problem) -> list[int]:
    """Counts the rows of out, in each item's group of heads, that have no query: they become 0."""
    return (
        []
        if problem.rows is None or problem.partial
        else [(problem.rows - n) * problem.group for n in problem.q_lengths]
    )


def seconds_of_key(problem: Problem, isa: Isa, rows: int, tuning: Tuning) -> float:
    """Guesses how long one thread takes to show a key of every kv head to so many query rows of each."""
    product = product_name(problem, isa)
    wants, lanes = tuning.blockings[product], isa.lanes(problem.storage)
    fills = [wants.worth[n - 1] * rows / (-(-rows // (n * lanes)) * n * lanes) for n in (1, 2, 3)]
    rate = tuning.threading.flops * PRODUCTS[product].elements * (1.0 if rows < DECODE_ROWS else max(fills))
    flops = 2 * rows * problem.kv_heads * (problem.head_dim + problem.value_dim)
    return max(token_bytes(problem) / tuning.threading.read_bytes, flops / rate)


# --- few rows


def _decode_schedule(problem: Problem, isa: Isa, threads: int, heads_adjoin: bool, tuning: Tuning) -> Schedule:
    """Schedules one task for each kv head, or several that share its spans where heads are few.

    Where heads adjoin, a task takes several of them through each tile: memory is then read in longer pieces (a page of
    virtual memory holds all heads of a token, so that one head alone would need as many of them as there are tokens).
    Where keys are few, it takes several as well: threads that draw tickets faster than that wait for each other.
    """
    rows = max(problem.q_lengths) * problem.group
    heads = sum(1 for n in problem.q_lengths if n) * problem.kv_heads
    spans = -(-max(problem.k_lengths, default=0) // SPAN)
    wants = tuning.decoding
    together = 1 if problem.chosen else _heads_together(problem, threads, rows, spans, wants, heads_adjoin)
    tasks, enough = heads // together, wants.tasks * threads * (1 if threads <= MANY else 2)
    shares = tasks < enough and threads > 1 and not problem.chosen
    parts = _parts_of(problem, tasks, enough, threads, wants) if shares else 1
    elements = PRODUCTS[product_name(problem, isa)].elements
    queries = _queries_together(problem, threads, wants) if problem.chosen else 1
    tasks = -(-tasks // problem.kv_heads // queries) * problem.kv_heads if problem.chosen else tasks
    sizes = DecodeSizes(
        number=number_bytes(problem.storage),
        rows=rows,
        heads=together,
        units=-(-problem.head_dim // elements),
        slots=-(-problem.value_dim // isa.lanes(problem.storage)),
        vector=isa.vector_bytes,
        scales=count_scales(problem)[1] * (codes_of(problem) == "blocks"),
        lists_scales=problem.quantised is not None and problem.widened is not None,
        chosen=_chosen_bytes(problem),
        queries=queries,
    )
    if tasks * spans * sizes.states > _PARTIALS:
        parts = 1  # a window over a sequence without end: what its spans leave must not grow with it
    scratch, used = placed(DECODE_SCRATCH, sizes)
    partial = spans * sizes.states if parts > 1 else 0
    words = {
        "rows": rows, "heads": together, "slots": sizes.slots, "partial_bytes": partial, "queries": queries,
    }  # fmt: skip
    return Schedule(
        "decode",
        isa,
        tuning,
        problem.storage,
        rows,
        1,
        threads=max(1, min(threads, tasks * parts)),
        tickets=tasks * parts,
        words=_words(words, scratch),
        scratch_bytes=up(used, 4096),
        parts=parts,
        partial_bytes=partial,
        heads=together,
    )


def _queries_together(problem: Problem, threads: int, wants: Decoding) -> int:
    """Returns the queries of a task over chosen keys: as many as leave enough tasks, and whose states stay in the
    cache.
    """
    queries, enough = len(problem.q_lengths), 2 * wants.tasks * threads
    return max(1, min(_CHOSEN, queries * problem.kv_heads // enough))


def _chosen_bytes(problem: Problem) -> int:
    """Returns the bytes of a value where keys are chosen; else 0."""
    return problem.value_dim * STORAGE_BYTES[problem.key_storage] if problem.chosen else 0


def token_bytes(problem: Problem) -> int:
    """Returns the bytes of a token's keys and values."""
    bits = ALL_CODES[problem.quantised].bits if problem.quantised else 8 * STORAGE_BYTES[problem.key_storage]
    return problem.kv_heads * (problem.head_dim + problem.value_dim) * bits // 8


def _heads_together(problem: Problem, threads: int, rows: int, spans: int, wants: Decoding, heads_adjoin: bool) -> int:
    """Returns the kv heads of one task: the most whose states stay in the cache, and which leave enough tasks.

    Where heads don't adjoin: of a single span, and so that one sequence alone, the longest maybe, has all threads.
    """
    items = max(1, sum(1 for n in problem.q_lengths if n))
    enough = wants.tasks * threads if threads > 1 else 1
    most = problem.kv_heads if heads_adjoin else problem.kv_heads // threads if spans <= 1 else 1
    fits = [n for n in range(1, most + 1) if problem.kv_heads % n == 0 and n * rows <= wants.rows]
    return max((n for n in fits if items * (problem.kv_heads // n) * max(1, spans) >= enough), default=1)


def _words(words: dict[str, int], places: dict[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple((words | {f"at_{name}": at for name, at in places.items()}).items())


def _blocks(rows: list[int], size: int) -> int:
    return sum(-(-r // size) for r in rows)


def up(n: int, step: int) -> int:
    return -(-n // step) * step
