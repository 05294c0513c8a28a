"""Memory that the host fills and kernels read, by name: arguments, items, scratch and the memory of panels.

A `Record` is a row of 64-bit words. The host writes them into an int64 array at `word(name)`, kernels read them at
`offset(name)`. Scratch has parts of sizes that depend on the problem: `placed` says where each begins, and a kernel
finds that in its arguments, as `at_<part>`. LLVM is not needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...arrays.memory import DIMS
from ...problem.problem import QUERY_BLOCK, TILE
from ...problem.tokens import BLOCK as BLOCK

SLACK = 8  # numbers past the last of a list of pages: they are read, not used
AHEAD = 16  # chosen keys past a tile's that are fetched ahead
PLACES = 192  # addresses of a tile's keys, of what is fetched ahead of it, and what one store may write past them
ENDLESS = 1 << 62  # tokens or pages: there is no end


class Record:
    """Words of 64 bits, by name."""

    __slots__ = ("names", "words")

    def __init__(self, *names: str) -> None:
        self.names, self.words = names, {name: i for i, name in enumerate(names)}

    def word(self, name: str) -> int:
        return self.words[name]

    def offset(self, name: str) -> int:
        """In bytes."""
        return 8 * self.words[name]

    @property
    def bytes(self) -> int:
        return 8 * len(self.names)


class Item(NamedTuple):
    """An item of the batch: values in a kernel, columns of the host's table, or their numbers (ITEM)."""

    first: Any  # tickets before it
    blocks: Any  # tickets per kv head, or per group of them that share a task
    q_len: Any
    k_len: Any
    start: Any  # position of the first query, less that of the first key
    q_at: Any  # bytes from the address in the arguments, likewise the next five
    k_at: Any
    v_at: Any
    out_at: Any
    lse_at: Any
    rotary_at: Any  # of the second part of keys
    index: Any  # in the batch; -1: rows without a query
    pages: Any  # address of its list of pages
    # of rows that go on from states: the first key that those have not seen; where the rows are (ROW_AT)
    first_key: Any
    rows: Any
    chosen: Any  # address of the list of chosen keys of its only query, for the first kv head


ITEM = Item._make(range(len(Item._fields)))
ITEM_BYTES = 8 * len(Item._fields)


class GradientItem(NamedTuple):
    """An item of the batch in a backward pass: as Item."""

    steps: Any  # blocks of queries, times the heads of a group
    ranges: Any  # of keys
    block: Any  # number of the first block of queries: its position / QUERY_BLOCK
    q_len: Any
    k_len: Any
    start: Any
    q_at: Any  # bytes from the address in the arguments, likewise all others
    k_at: Any
    v_at: Any
    out_at: Any
    lse_at: Any
    d_out_at: Any
    dq_at: Any
    dk_at: Any
    dv_at: Any
    sq_at: Any  # of the sums of dq, dk and dv, likewise the next two
    sk_at: Any
    sv_at: Any
    index: Any


GRADIENT_ITEM_BYTES = 8 * len(GradientItem._fields)


class WeightItem(NamedTuple):
    """An item of the batch where weights of keys are summed: as GradientItem."""

    steps: Any
    block: Any
    q_len: Any
    k_len: Any
    start: Any
    q_at: Any
    k_at: Any
    out_at: Any
    lse_at: Any
    rows: Any  # address of the row of results of each query, or -1; read where rows are asked for
    index: Any


WEIGHT_ITEM_BYTES = 8 * len(WeightItem._fields)
WEIGHT_STEPS = 16  # of a task, which takes some milliseconds then
REDUCTIONS = ("sum", "max", "rows")  # by their numbers in `reduction`

# kv heads that are worked on at once: tickets before them, number of the first, how many; ranges of each, at most;
# words of progress before theirs
GANG = Record("first", "column", "columns", "ranges", "progress")

# a block of queries, of the pass that makes gradients of tables; its share, and how many of that come before it
BLOCK_OF = Record("item", "head", "step", "share", "turn")
# of a table: its entries' sums, share after share (0 bytes: all shares have the same), and the bytes of one sum
SHARE_OF = Record("at", "bytes", "number")
SUM_OF = Record("at", "number")  # of a lookup, likewise, in one share

# of a worker: the first index out of range that it met, in the order of positions; `lookup`: its number in lookups
WRONG = Record("noted", "b", "h", "i", "j", "lookup", "index", "pad7")

# --- a call that machine code repeats (cpu/kernels/repeat.py)

TENSORS = 9  # what a backward pass reads, and the arrays of a mask and a score
TABLED = range(3, 5)  # of a forward pass: the arrays of a mask and a score
SCALED = range(3, 5)  # … or the scales of keys and values that are codes in arrays
_OF_DIMS = [f"{name}{d}" for name in ("size", "stride") for d in range(DIMS)]
# what an array is, with strides in elements, and where it lies, with strides in bytes
ARRAY = Record("dtype", "dims", *_OF_DIMS)
PLACE = Record("address", *_OF_DIMS)
# what reading needs: objects of Python's, and the function that the exchange API hands out
READER = Record(
    "none", "false", "refusals", "ndarray", "tensor", "exchange",
    "is_neg", "is_copy_on_write", "untyped_storage", "storage_offset", "empty_like",
    "questions", "question_count", "level_of", "level", "no_level", "plainly", "region", "taken", "team",
    "prepared", "clock", "call", "record", "address",
)  # fmt: skip
# of a thread: how it runs a region on several threads
TEAM = Record("serve", "threads", "openmp", "clock")
_PARTS = ("words", "items", "tables", "numbers", "put")  # copied from templates: where from, and how many words
REPEAT = Record(
    "none", "kernel", "tickets", "threads", "inline_below", "rows", "counts", "partials", "alike", "new", "spans",
    "put_kernel", "put_ticket", "put_tickets",
    "room",  # bytes of all parts
    *_PARTS, "arrived", "wrong", "scratch",  # bytes from the room's first to each part
    *(f"{x}_{of}" for x in _PARTS for of in ("from", "count")),
    "arrived_count", "wrong_count",
    "scaled",  # whether there are scales of codes (SCALED)
    *(f"{x}{t}" for t in TABLED for x in ("slot", "dims", "firsts", "first_count")),
)  # fmt: skip

# what a counting run adds up (`counts` is not null): tiles full, mixed; keys computed for panels
COUNTS = Record("full", "mixed", "panel_keys")

# --- arguments

# What every kernel's arguments begin with: a region reads no more. `ticket` has a cache line of its own
HEAD = ("ticket", "worker", "left", "pad3", "pad4", "pad5", "pad6", "pad7", "limit", "scratch", "scratch_stride")
# new for each call
_CALL = ("q", "k", "v", "out", "lse", "counts", "items", "partials", "arrived", "wrong", "seed")
_COMMON = (
    *HEAD, *_CALL, "item_count",
    "q_head", "q_row", "q_column", "k_head", "k_row", "k_column", "v_head", "v_row", "v_column",
    "out_head", "out_row", "out_column", "lse_head", "lse_row",
    "head_dim", "value_dim", "group", "causal", "c", "scale", "flip", "k_start", "numbers", "tables", "sinks",
    "drop_below", "divisor",
    "page_size", "page_fixed", "page_ring", "k_page", "v_page",
    # of codes in arrays: where the scales of keys and values lie, new for each call; and their distances
    "k_scales", "v_scales",
    "k_scale_head", "k_scale_row", "k_scale_page", "v_scale_head", "v_scale_row", "v_scale_page",
    "chosen_head",  # bytes from a kv head's lists of chosen keys to the next one's
)  # fmt: skip
TICKET, WORKER, LEFT, LIMIT, SCRATCH = (HEAD.index(x) for x in ("ticket", "worker", "left", "limit", "scratch"))
CALL = slice(len(HEAD), len(HEAD) + len(_CALL))
NUMBERS = slice(_COMMON.index("numbers"), _COMMON.index("numbers") + 1)
TABLES = slice(_COMMON.index("tables"), _COMMON.index("tables") + 1)
SCALES = slice(_COMMON.index("k_scales"), _COMMON.index("v_scales") + 1)
KEYS = slice(_COMMON.index("k_head"), _COMMON.index("v_column") + 1)

# of the kernel that stores new tokens; a run, of those that follow the arguments: tokens of a sequence
APPEND = Record(
    *HEAD, "k", "v", "to_k", "to_v",  # new for each call
    "k_head", "k_row", "k_column", "v_head", "v_row", "v_column",
    "to_k_head", "to_k_block", "to_v_head", "to_v_block",
    "kv_heads", "head_dim", "value_dim",
    "run_tickets", "head_groups", "heads", "blocks",  # tickets of a run; groups of heads; of a ticket heads, and blocks
    "fixed", "ring",  # blocks before those that are a ring, and those
    # of raw pages: tokens of a block, blocks of a page; distances in a page
    "size", "page_blocks", "to_k_row", "to_k_column", "to_v_row", "to_v_column",
    # of codes there: where the scales of keys and values lie, new for each call; their distances
    "k_scales", "v_scales",
    "k_scale_head", "k_scale_block", "k_scale_row", "k_scale_column",
    "v_scale_head", "v_scale_block", "v_scale_row", "v_scale_column",
)  # fmt: skip
RUN = Record("count", "slot", "k_at", "v_at", "to_k_at", "to_v_at", "list")  # list: of its blocks' numbers, or 0

SLOTS = TILE + AHEAD + 16  # chosen keys of a tile, those that are fetched ahead, and what a vector reads past them

# --- scratch: each part, and its bytes; parts begin on cache lines


class ForwardSizes(NamedTuple):
    """The sizes of the forward kernel's scratch."""

    number: int  # bytes of a score or sum
    panel: int  # queries of a panel
    tile_rows: int  # TILE, rounded up to register tiles
    units: int  # of a query
    width: int  # value columns, rounded up to register tiles
    staged_keys: int  # bytes of a tile's keys, and values, where they are copied
    staged_values: int
    scales: tuple[int, int]  # of a key, and of a value; none but of codes
    blocks: bool  # scales are of blocks of columns
    chosen: int = 0  # bytes of a value, where keys are chosen

    @property
    def row(self) -> int:
        """Bytes of a number for each query."""
        return self.panel * self.number


# what a panel keeps of each of its queries: keys seen; addresses of the rows of q, out, lse; position, head
LANES = Record("limit", "q", "out", "lse", "position", "head", "state")
ENDS = Record("low", "high", *(f"pad{i}" for i in range(2, 8)))  # keys that a panel's first query sees, and its last

# of a row that goes on from a state: bytes from the first of q, out and lse to its own, of its first head; bytes from
# the first state; its position, counted from the first key
ROW_AT = Record("q", "out", "lse", "state", "position")
# a row's states lie side by side: running_max and running_sum of its whole spans, and of the open one, in a cache line;
# then the accumulators of both
STATE_SUMS = 64

# of a worker; a state is a panel's running_max, running_sum, then the accumulator [width, panel]
FORWARD_SCRATCH: Mapping[str, Callable[[ForwardSizes], int]] = {
    "scores": lambda z: z.tile_rows * z.row,  # [TILE, panel], then weights in their place
    "check": lambda z: 3 * z.row,  # largest score, sum, smallest; then alpha and what sums of values start from
    "partial": lambda z: (2 + z.width) * z.row,  # [width, panel] sums of the fully visible keys; at the end, a sink
    "keys": lambda z: z.staged_keys,  # [TILE, units]
    "values": lambda z: z.staged_values,  # [steps of TILE, value_dim]
    "places": lambda z: 2 * PLACES * 8,  # addresses of a tile's keys, then of its values
    "scales": lambda z: sum(z.scales) * TILE * 4,  # of a tile's keys, then of its values: [scale, TILE]
    # [TILE, panel] weights times the scales of some columns
    "scaled": lambda z: z.blocks * z.tile_rows * z.row,
    "slots": lambda z: (z.chosen > 0) * SLOTS * 8,  # of the chosen keys of some tiles
    "chosen_keys": lambda z: (z.chosen > 0) * SLOTS * 8,  # … without those that are absent
    "zeros": lambda z: z.chosen,  # a value
    "joint": lambda z: (z.chosen > 0) * z.tile_rows * z.row,  # [TILE, panel] scores of some tiles
    "panels": lambda z: 0,  # one after another to the end
}
PANEL: Mapping[str, Callable[[ForwardSizes], int]] = {
    "ends": lambda z: ENDS.bytes,
    "queries": lambda z: z.units * z.row,  # [units, panel]
    "total": lambda z: (2 + z.width) * z.row,  # state of the spans so far
    "span": lambda z: (2 + z.width) * z.row,  # state of this span
    "lanes": lambda z: LANES.bytes * z.panel,  # [LANES, panel]
}


class DecodeSizes(NamedTuple):
    """The sizes of the decode kernel's scratch."""

    number: int  # bytes of a score or sum
    rows: int  # query rows of a kv head
    heads: int  # kv heads of a task
    units: int  # of a query
    slots: int  # vectors of a value
    vector: int  # bytes
    scales: int  # of a value, where they are of blocks of columns; else 0
    lists_scales: bool  # codes lie in arrays, and their scales in others
    chosen: int = 0  # bytes of a value, where keys are chosen
    queries: int = 1  # of a task over chosen keys

    @property
    def states(self) -> int:
        """Bytes of a state for every row of every head: max, sum, then the accumulator in slots of one vector."""
        return self.queries * self.heads * self.rows * (self.slots + 1) * self.vector


# what a tile leaves of each row: the factor of what came before, the sum of weights, keys seen
ROW = Record("alpha", "sum", "limit")
WALK = Record("next")  # of a query: where in its list the next chosen key is
DECODE_SCRATCH: Mapping[str, Callable[[DecodeSizes], int]] = {
    "scores": lambda z: z.heads * z.rows * TILE * z.number,  # [heads, rows, TILE], then weights in their place
    "queries": lambda z: z.queries * z.heads * z.rows * z.units * z.number,  # [heads, rows, units]
    "sums": lambda z: z.rows * z.slots * z.vector,  # [rows, slots] of a tile's values
    "span": lambda z: z.states,
    "total": lambda z: z.states,
    "numbers": lambda z: ROW.bytes * z.rows,  # [ROW, rows]
    "places": lambda z: 2 * PLACES * 8,  # addresses of a tile's keys, then of its values, each with those to fetch
    "scaled": lambda z: z.scales * z.rows * TILE * z.number,  # [scale, rows, TILE] weights times scales
    "scales": lambda z: z.lists_scales * TILE * 4,  # of a tile's keys, or of its values, where they lie in arrays
    "slots": lambda z: (z.chosen > 0) * SLOTS * 8,  # of the chosen keys of a tile
    "chosen_keys": lambda z: (z.chosen > 0) * SLOTS * 8,  # … without those that are absent
    "zeros": lambda z: z.chosen,  # a value
    "walks": lambda z: (z.chosen > 0) * z.queries * WALK.bytes,  # of each query
    "joint": lambda z: (z.chosen > 0) * (z.rows * TILE * z.number + 64),  # [rows, TILE] scores of some tiles
}

# what of the next task is fetched next: addresses of a row of q, of out, of keys and of values; how many are left
PREFETCH = Record("q", "out", "k", "v", "positions", "keys")


class BackwardSizes(NamedTuple):
    """The sizes of the backward kernel's scratch."""

    number: int  # bytes of a score or sum
    panel: int  # queries of a panel
    tile_rows: int  # TILE, and what register tiles write past it
    units: int  # of a query
    value_units: int  # of a row of d_out
    width: int  # columns of q, rounded up to register tiles
    columns: int  # of rows of q, rounded up to vectors
    value_columns: int  # of rows of d_out, likewise
    staged_keys: int  # bytes of a tile's keys, and values, where they are copied
    staged_values: int
    elements: int  # of a unit; weights are kept once more where they are more than one
    together: int  # panels that add to dK and dV at once
    keeps_raw: bool
    drops: bool
    head_dim: int

    @property
    def row(self) -> int:
        """Bytes of a number for each query."""
        return self.panel * self.number

    @property
    def units_of_weights(self) -> int:
        """Bytes of a tile's P, or dS, in units."""
        return self.tile_rows * self.row // self.elements if self.elements > 1 else 0


# what a panel of the backward kernel keeps of each of its queries: keys seen; addresses of the rows of q, d_out, out
QUERY_LANES = Record("limit", "q", "d_out", "out", "position", "head")
# … and of all: keys that it sees, least and most; the first lane that is a query, and one past the last
# and of a tile, the keys that any of them sees, and whether products must look at every pair
QUERY_ENDS = Record("low", "high", "first", "end", "key_first", "key_end", "careful", "pad")

BACKWARD_SCRATCH: Mapping[str, Callable[[BackwardSizes], int]] = {
    "raw": lambda z: z.keeps_raw * z.tile_rows * z.row,  # S, where an expression changes it
    "factors": lambda z: z.drops * z.tile_rows * z.row,  # of weights: 0, or what dropout leaves is multiplied by
    "check": lambda z: 5 * z.row,  # as an expression leaves it: largest score, sum, smallest; sums of S, and of dP
    "dk": lambda z: z.tile_rows * apart(z.columns * z.number),  # [TILE, columns] of this block of queries
    "dv": lambda z: z.tile_rows * apart(z.value_columns * z.number),
    "keys": lambda z: z.staged_keys,  # [TILE, units]
    "values": lambda z: z.staged_values,
    "key_units": lambda z: (z.elements > 1) * TILE // z.elements * z.head_dim * z.number,  # [units of TILE, head_dim]
    "pairs": lambda z: z.together * placed(PAIRS, z)[1],  # of panels that are taken together
    "panels": lambda z: 0,  # one after another to the end
}
# of a panel and a tile
PAIRS: Mapping[str, Callable[[BackwardSizes], int]] = {
    "scores": lambda z: z.tile_rows * z.row,  # [TILE, panel] of S, then of P
    "d_scores": lambda z: z.tile_rows * z.row,  # [TILE, panel] of dP, then of dS
    "p_units": lambda z: z.units_of_weights,  # [TILE, panel] of P: a unit is of queries
    "ds_units": lambda z: z.units_of_weights,  # … and of dS
    "d_score_units": lambda z: z.units_of_weights,  # [units of TILE, panel] of dS: a unit is of keys
}
BACKWARD_PANEL: Mapping[str, Callable[[BackwardSizes], int]] = {
    "ends": lambda z: QUERY_ENDS.bytes,
    "stats": lambda z: 2 * z.row,  # lse; delta
    "queries": lambda z: max(z.units, z.value_units) * z.row,  # [units, panel]; of out, until delta is known
    "gradients": lambda z: z.value_units * z.row,  # [value_units, panel] of d_out
    "dq": lambda z: z.width * z.row,  # [width, panel]
    "q_rows": lambda z: z.panel * apart(z.columns * z.number),  # [panel, columns]
    "d_out_rows": lambda z: z.panel * apart(z.value_columns * z.number),
    "lanes": lambda z: QUERY_LANES.bytes * z.panel,  # [QUERY_LANES, panel]
}


class WeightSizes(NamedTuple):
    """The sizes of the scratch of the kernel that sums weights of keys."""

    number: int  # bytes of a score or sum
    panel: int  # queries of a panel
    lanes: int
    tile_rows: int  # TILE, and what register tiles write past it
    units: int  # of a query
    staged_keys: int  # bytes of a tile's keys, where they are copied

    @property
    def row(self) -> int:
        """Bytes of a number for each query."""
        return self.panel * self.number


WEIGHT_SCRATCH: Mapping[str, Callable[[WeightSizes], int]] = {
    "check": lambda z: 4 * z.row,  # as in BACKWARD_SCRATCH
    "partial": lambda z: (TILE + z.lanes) * z.number,  # of a tile's keys, the weights of a block of queries
    "keys": lambda z: z.staged_keys,
    "pairs": lambda z: z.tile_rows * z.row,  # one for all panels
    "panels": lambda z: 0,  # one after another to the end
}
WEIGHT_PAIRS: Mapping[str, Callable[[WeightSizes], int]] = {"scores": lambda z: z.tile_rows * z.row}  # S, then P
WEIGHT_PANEL: Mapping[str, Callable[[WeightSizes], int]] = {
    "ends": lambda z: QUERY_ENDS.bytes,
    "stats": lambda z: z.row,  # lse
    "queries": lambda z: z.units * z.row,  # [units, panel]
    "lanes": lambda z: QUERY_LANES.bytes * z.panel,  # [QUERY_LANES, panel]; out: the row of results, or 0
}


# sums over queries for each of `keys` keys of a tile: weights [keys, panel] times rows [panel, columns] of each panel
SUMS = Record(
    "partial", "weights", "marks", "pair_bytes", "rows", "panel", "panel_bytes",
    "row",  # from one of `rows` to the next, and of partial
    "panels", "keys",
    "begin",  # from +0, not from what partial has
    "join",  # partial is not written: totals are, or at the end what is returned
    "fresh", "end", "total", "total_row", "out", "out_row", "factor",
)  # fmt: skip


def apart(row: Any) -> Any:
    """Bytes from one row to the next, an odd number of cache lines: the same columns of many rows then lie in all sets
    of the first-level cache, not in a few.
    """
    return ((row + 63) >> 6 | 1) << 6


def together(panel: int) -> int:
    """Returns how many panels of so many queries add to dK and dV at once: half a block, whose rows the first-level
    cache holds (48 columns of them, 18 KiB).
    """
    return max(1, QUERY_BLOCK // panel // 2)


def placed(parts: Mapping[str, Callable[[Any], int]], sizes: Any) -> tuple[dict[str, int], int]:
    """Returns where each part begins, and where the last ends."""
    places, end = {}, 0
    for name, bytes_of in parts.items():
        places[name] = end
        end += -(-bytes_of(sizes) // 64) * 64
    return places, end


FORWARD = Record(
    *_COMMON, "panels", "side_by_side", "width", "stage_k", "stage_v", "panel_bytes",
    # tasks that share a block of queries, each with some of its spans; bytes of what they leave for the last of them
    "parts", "partial_bytes",
    *(f"at_{name}" for name in (*FORWARD_SCRATCH, *PANEL)),
    # of the task that a thread will probably run next: tickets on, 0 if nothing is fetched for it; cache lines of a row
    # of q, out, k and v; positions, and keys, that are fetched with each group of keys
    "upcoming", "q_lines", "out_lines", "k_lines", "v_lines", "next_positions", "next_keys",
    # of keys in two parts: where the second lies, and how wide the first is
    "rotary", "rotary_head", "rotary_row", "rotary_column", "rotary_page", "latent_dim",
    # of a partial problem: accumulators, laid as out is; [rows, 2] of running_max and running_sum, laid as lse is; and
    # whether rows begin here, with nothing, and end here, in out and lse
    "accumulators", "sums", "begins", "ends",
    # of rows that go on from states: where the first one's are, bytes of those of one head, and whether they are left
    # there again, for rows that go on
    "states", "state_head", "leaves",
)  # fmt: skip
ROTARY = slice(FORWARD.word("rotary"), FORWARD.word("rotary_column") + 1)  # new for each call, as CALL
STATE = slice(FORWARD.word("accumulators"), FORWARD.word("ends") + 1)  # new for each call, as CALL
# put, new: a function that stores a task's new tokens before they are read, or 0, and the address of its arguments
DECODE = Record(
    *_COMMON, "rows", "heads", "slots", "partial_bytes", *(f"at_{name}" for name in DECODE_SCRATCH), "put", "new",
    "states", "state_head", "leaves",  # as FORWARD has them
    "queries",  # of a task over chosen keys
)  # fmt: skip
# new for each call, as CALL
STATES = {
    name: slice(record.word("states"), record.word("states") + 1)
    for name, record in (("forward", FORWARD), ("decode", DECODE))
}
NEW = slice(DECODE.word("put"), DECODE.word("new") + 1)  # new for each call, as CALL

BACKWARD = Record(
    *_COMMON, "drop_factor", "d_out", "d_lse", "dq", "dk", "dv", "sq", "sk", "sv", "progress",
    "shares", "gangs", "gang_count", "skew", "blocks", "kv_heads", "range_keys", "panels",
    "panel_bytes", "pair_bytes",
    "d_out_head", "d_out_row", "d_out_column",
    *(f"{name}_{part}" for name in ("dq", "dk", "dv", "sq", "sk", "sv") for part in ("head", "row")),
    "columns", "value_columns", "k_staged", "v_staged",
    *(f"at_{name}" for name in (*BACKWARD_SCRATCH, *PAIRS, *BACKWARD_PANEL)),
)  # fmt: skip
GRADIENTS = slice(BACKWARD.word("d_out"), BACKWARD.word("shares") + 1)  # new for each call, as CALL

# columns: kv heads of all items; ranges: of keys, of the longest item; reduction: of REDUCTIONS
WEIGHTS = Record(
    *_COMMON, "progress", "columns", "kv_heads", "ranges", "range_keys", "reduction", "panels", "panel_bytes",
    "pair_bytes", "k_staged", *(f"at_{name}" for name in (*WEIGHT_SCRATCH, *WEIGHT_PAIRS, *WEIGHT_PANEL)),
)  # fmt: skip
PROGRESS = slice(WEIGHTS.word("progress"), WEIGHTS.word("progress") + 1)  # new for each call, as CALL


# what a call says of its problem and memory, whatever the kernel: a stage's call takes it over
KEPT_WORDS = (
    *_COMMON[_COMMON.index("q_head") :], "rotary_head", "rotary_row", "rotary_column", "rotary_page", "latent_dim",
)  # fmt: skip

# a kernel's arguments, by its kind
ARGUMENTS = {"forward": FORWARD, "decode": DECODE, "backward": BACKWARD, "tables": BACKWARD, "weights": WEIGHTS}


def field(name: str) -> int:
    """Returns the offset of a word that the arguments of every attention kernel have at the same place."""
    return 8 * _COMMON.index(name)
