"""Call: a problem with its schedule, kernel, arguments and table of items; only addresses are open."""

from __future__ import annotations

import copy
import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import sub
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.dtypes import ELEMENT_BYTES, STORAGE_BYTES
from ...errors import ArgumentError
from ...expressions.program import Program
from ...host.forks import importing
from ...host.machine import PRODUCTS, Isa, current_isa, level2_bytes, number_bytes
from ...host.rounding import standard
from ...problem.operands import Dense, PagedKeys, Rows, Strides
from ...problem.philox import drop_below
from ...problem.prepared import array_places
from ...problem.problem import LAYOUTS, TILE, Problem
from ...problem.results import ResultLayout
from ...problem.work import Work, all_pairs
from ..kernels.softmax import LOG4_E
from ..memory.operands import Paged, columns_of_keys, steps, words_of_keys
from ..memory.records import (
    ARGUMENTS,
    ENDLESS,
    ITEM,
    KEPT_WORDS,
    KEYS,
    NEW,
    NUMBERS,
    ROTARY,
    SCALES,
    STATE,
    STATE_SUMS,
    STATES,
    TABLES,
    Item,
)
from ..memory.shape import Shape
from ..runtime.compile import Kernel, lock, symbol_of
from ..runtime.launch import Launch, Place, Words, threads_for
from ..runtime.repeating import NOT_REPEATED, record_of
from ..runtime.tuned import tuning_of
from .schedule import Schedule, product_name, schedule, token_bytes

if TYPE_CHECKING:
    from ...problem.plan import Balance, Plan, Roofs
    from .append_call import AppendCall

_SCATTERED = 2  # times as long as a plain read takes a read of rows that lie anywhere
_KEPT = 4  # times the second-level cache: arrays of so many bytes stay in the caches from call to call


@standard
def prepare(problem: Problem, rows: Rows, keys: Dense | PagedKeys | Paged, threads: int, isa: Isa) -> Call:
    """Prepares everything that addresses don't change."""
    keys = Paged.of(keys) if isinstance(keys, PagedKeys) else keys
    strides = keys.strides(problem.quantised or problem.key_dtype)
    how = schedule(problem, isa, threads, strides, tuning_of(isa))
    items = items_of(problem, how, rows, keys)
    words = words_of(problem, how, rows, keys) | {"item_count": len(items)}
    form = ResultLayout.of(rows.layout, rows.q, problem.value_dim, rows.out_strides)
    lies = {"in_parts": words.get("latent_dim", 0) > 0}
    if isinstance(keys, Paged):
        lies |= {"cached": keys.pages.lanes, "latent": keys.pages.latent}
    call = Call(problem, how, words, items, form, strides, **lies)
    call.machine = threads, isa.name
    return call


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """Returns the plan of a call on this machine."""
    how, shape = kernel_of_problem(problem, strides, threads, current_isa())
    return plan_of_kernel(problem, how, shape, partial(_balance, problem, how), exact=exact)


def plan_of_kernel(
    problem: Problem, how: Schedule, shape: Shape, simulated: Any = None, *, exact: bool = False,
    work: Work | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan of a call that a kernel runs; work: where it is not that of the whole problem."""
    with importing:
        from ...problem.plan import Run, plan_of

    run = Run(how.isa.name, symbol_of(shape), how.threads, how.panel, how.workspace_bytes, how.tuning.origin)
    measured = partial(measured_roofs, how.isa, "f32" if problem.widened else problem.storage, how.threads)
    return plan_of(problem, run, measured, simulated, exact=exact, work=work)


def _balance(problem: Problem, how: Schedule) -> Balance | None:
    with importing:
        from .makespan import balance_of

    return balance_of(problem, how)


def measured_roofs(isa: Isa, storage: str, threads: int, *, gradients: bool = False) -> Roofs:
    """Measures this machine for a plan. No fork meanwhile: modules are imported, kernels compiled."""
    with lock:
        from ..runtime.roof import kind_of_peak, roofs

        return roofs(isa, kind_of_peak(isa, storage, gradients=gradients), threads)


def kernel_of_problem(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[Schedule, Shape]:
    """Returns a problem's schedule over arrays, and its kernel's shape; for any vector unit, this machine's or not."""
    how = schedule(problem, isa, threads, strides, tuning_of(isa))
    return how, shape_of(problem, how, program_of(problem))


def shape_of(
    problem: Problem, how: Schedule, program: Any, *, cached: bool = False, latent: bool = False,
    in_parts: bool = False, resumed: bool = False, chosen: bool = False,
) -> Shape:  # fmt: skip
    dropout, widened = problem.dropout > 0, problem.key_storage if problem.widened else None
    loops = how.tuning.fetching, how.tuning.register_tiles(how.isa)
    of_keys = cached, problem.quantised if cached else None
    of_call = *of_keys, *loops, dropout, widened, latent, in_parts, how.scattered, problem.partial, resumed, chosen
    return Shape(how.kind, how.isa, how.storage, how.vectors, program, *of_call)


class Call:
    """A problem with layouts and strides fixed: only addresses are missing.

    Never changed once it is used but for what it keeps as one object, so that threads may share it.
    """

    def __init__(
        self, problem: Problem, how: Schedule, words: dict[str, int], items: np.ndarray, form: ResultLayout,
        strides: Strides, *, cached: bool = False, latent: bool = False, in_parts: bool = False, resumed: bool = False,
        chosen: bool = False,
    ) -> None:  # fmt: skip
        """form: of its results. strides: of its keys. cached, latent, in_parts, resumed, chosen: as Shape has them."""
        self.problem, self.how, self.items, self.result_layout, self.sinks = problem, how, items, form, _sinks(problem)
        self.machine: tuple[int, str] | None = None  # threads and vector unit that it was prepared for
        wants, program = how.tuning.threading, program_of(problem)
        seconds = _guessed_seconds(problem, how)
        threads = threads_for(seconds, how.threads, wants)
        if self.sinks is not None:
            words |= {"sinks": self.sinks.ctypes.data}
        if "upcoming" in words:
            words["upcoming"] = threads
        self.launch = Launch(
            shape_of(
                problem, how, program, cached=cached, latent=latent, in_parts=in_parts, resumed=resumed, chosen=chosen
            ),
            ARGUMENTS[how.kind],
            words,
            how.tickets if problem.value_dim and problem.q_heads else 0,
            threads,
            seconds,
            wants,
            program=program,
            groups=(how.tickets // how.parts, how.partial_bytes) if how.parts > 1 else (0, 0),
        )
        rows = max(1, max(problem.q_lengths, default=0) // 8)
        self.inline_keys = wants.inline_bytes // max(1, token_bytes(problem) * rows)  # below, no other thread is woken
        self.items_at = items.ctypes.data
        self.counts_at = 0  # address to which kernels add tiles and keys (records.COUNTS); 0: they do not count
        self.items_type, self.items_bytes = ctypes.c_int64 * items.size, items.tobytes()
        self._others: Any = (None,)  # what the last run of other lengths had
        self.put: AppendCall | None = None  # what stores new tokens of a cache first
        # codes lie in arrays, and their scales
        self.is_scaled = problem.quantised is not None and problem.widened is not None
        self.in_parts, self.lies = in_parts, {"cached": cached, "latent": latent, "in_parts": in_parts}
        self.strides = strides
        self.together: Any = (None, None)  # what the last sequences shared, and how they were taken (cascade.py)
        self.stages: dict[Any, Call] = {}
        self.rows = 0  # the dimension of q's rows, where it runs for any number of keys
        self.places: tuple[Place, ...] = ()  # of the arrays in mask and score
        self.record: Any = None  # for machine code, once it runs again

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        return self.items.nbytes + len(self.items_bytes) + self.launch.size

    def keep_for(self, arrays: Sequence[Any], rows: int) -> bool:
        """Makes the call ready for other arrays in mask and score than it was prepared with; False if it cannot be.

        rows: the dimension of q's rows, where it runs for any number of keys; else 0.
        """
        places = self.launch.places_of(arrays, rows > 0)
        if places is None:
            return False
        self.places, self.rows = tuple(places), rows
        self.launch.release_tables(arrays)
        return True

    def storing(self, put: AppendCall | None) -> Call:
        """Returns the call with what stores new tokens first."""
        new = copy.copy(self)
        new.put, new.record = put, None
        return new

    def forget_record(self) -> None:
        """Forgets what machine code runs: the kernel is unloaded, and loaded anew where it is run again."""
        self.record = None

    @property
    def heads_alone(self) -> int:
        """kv heads of a task that alone reads their keys and values, so that it may store them first; 0: others do."""
        return self.how.heads if self.how.kind == "decode" and self.how.parts == 1 else 0

    def run(
        self, q: int, k: int, v: int, out: int, lse: int, seed: int | None = None,
        lengths: Sequence[int] | None = None, lists: Sequence[int] | None = None,
        new: tuple[Kernel, Any] | None = None, state: tuple[int, int, int, int] | None = None,
        tables: Any = None, keys: tuple[int, ...] | None = None, rotary: tuple[int, ...] | None = None,
        scales: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Fills out (and lse, unless 0) at these addresses.

        seed: of the caller's, if given. lengths: of keys, others of no more spans; then the last query is at the last
        key. lists: of pages, as these. new: the kernel with which tasks store new tokens first (heads_alone), and its
        arguments. state: the words that a partial problem has beside the addresses (records.FORWARD). tables: as
        Launch.tables_at() has them. keys: strides that are others, as _other_items() takes them. rotary: of keys in two
        parts, the second's address. scales: of codes in arrays, the addresses of their scales.
        """
        more: tuple[Words, ...] = ()
        if state is not None:
            more = ((STATE, state),)
        elif new is not None:
            more = ((NEW, (new[0].ticket, ctypes.addressof(new[1]))),)
        if tables is not None:
            more += ((TABLES, (ctypes.addressof(tables[0]),)),)
            if tables[1] is not None:
                more += ((NUMBERS, (tables[1].ctypes.data,)),)
        if rotary is not None:
            more += ((slice(ROTARY.start, ROTARY.start + 1), rotary),)
        if scales is not None:
            more += ((SCALES, scales),)
        items_at, threads = self.items_at, 0
        if lengths is not None:
            known = self._others
            if known[0] != (lengths, lists, keys):
                known = self._others = self._other_items([*lengths], lists, keys)
            _, _, items_at, threads, strides = known  # which keeps the items
            more += strides
        call = q, k, v, out, lse, self.counts_at, items_at
        self.launch.run_in_scratch(call, self.problem.seed if seed is None else seed, more, threads)

    def words(self) -> dict[str, int]:
        """Returns its arguments by name, without addresses."""
        names = ARGUMENTS[self.how.kind].names
        return dict(zip(names, np.frombuffer(self.launch.template, np.int64).tolist(), strict=True))

    def staged(self, counts: tuple[int, ...], *, leaves: bool, heads: tuple[int, int] | None = None) -> Call:
        """Prepares a call over the same keys of rows that go on from states, so many of each item.

        leaves: whether the states are left again. heads: bytes from one head's keys to the next, and of values, where
        they lie in other memory. Items, but for their queries and tickets, are a run's.
        """
        p, isa = self.problem, self.how.isa
        first = min(p.q_starts) if p.first_row is None else p.first_row
        most, threads = max(p.k_lengths), self.machine[0] if self.machine else 1
        lengths = {"k_lengths": (most,) * len(counts), "q_starts": tuple([most - n for n in counts])}
        problem = replace(p, q_lengths=counts, items=None, first_row=first, rows=None, **lengths)
        how = schedule(problem, isa, threads, self.strides, self.how.tuning, leaves=leaves)
        blocks, tickets = tickets_of(problem, how)
        items = np.zeros((len(counts), len(ITEM)), np.int64)
        items[:, ITEM.first], items[:, ITEM.blocks] = np.cumsum(tickets) - tickets, blocks
        items[:, ITEM.q_len] = counts
        own, known = self.words(), ARGUMENTS[how.kind].words
        words = {name: own[name] for name in KEPT_WORDS if name in own and name in known} | dict(how.words) | {
            "scratch_stride": how.scratch_stride, "limit": how.tickets, "item_count": len(items),
            "state_head": state_bytes(problem), "leaves": int(leaves),
        }  # fmt: skip
        if heads is not None:
            words |= dict(zip(("k_head", "v_head"), heads, strict=True))
        call = Call(problem, how, words, items, self.result_layout, self.strides, **self.lies, resumed=True)
        call.machine = self.machine
        return call

    def run_on(
        self, addresses: tuple[int, ...], states: int, items: Mapping[int, Sequence[int]], seed: int | None,
        scales: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Runs rows that go on from states: fills out and lse, or leaves the states.

        addresses: of q, k, v, out and lse. states: of the first row's. items: by the number of their word (ITEM).
        scales: as for run().
        """
        table = self.items_type.from_buffer_copy(self.items_bytes)
        for word, values in items.items():
            table[word :: len(ITEM)] = [*values]
        call = *addresses, self.counts_at, ctypes.addressof(table)
        seed = self.problem.seed if seed is None else seed
        more: tuple[Words, ...] = ((STATES[self.how.kind], (states,)),)
        if scales is not None:
            more += ((SCALES, scales),)
        self.launch.run_in_scratch(call, seed, more)

    def run_again(
        self, places: bytes, out: int, lse: int, seed: int, lengths: Sequence[int] | None, lists: Sequence[int] | None,
        store: tuple[int, int], arrays: Sequence[Any],
    ) -> None:  # fmt: skip
        """Runs for arrays at other places (problem/prepared.py), in machine code if that takes the call.

        Python runs a long call, in regions between which it sees signals, and one with an index out of range, which is
        raised.

        out, lse: addresses. store: addresses of a cache's keys and values, or zeros.
        """
        record = self.record
        if record is None:
            record = self.record = record_of(self) or NOT_REPEATED
        if record.run(record.address, places, *store, None, out, lse, seed, lengths, lists):
            return
        lie = array_places(places)
        q, k, v = lie[0][0], *store
        new = tables = keys = count = rotary = scales = None
        if self.put is not None:
            assert lengths is not None
            before = list(map(sub, lengths, self.put.counts))
            new = self.put.start((lie[1][0], lie[2][0], k, v), before, None if lists is None else [*lists])
        if self.in_parts:
            k = v = lie[1][0]
            rotary = (lie[2][0],)
        elif store == (0, 0):
            k, v = lie[1][0], lie[2][0]
        if self.is_scaled:
            scales = (lie[3][0], lie[4][0])
        if self.rows:
            count = lie[1][1][self.rows]
            lengths = [count] * lie[0][1][0]
            keys = (*self._strides_of(lie[1]), *self._strides_of(lie[2]))
            if self.in_parts:
                keys = (*keys[:4], *keys)
        if self.places:
            tables = self.launch.tables_at(self.places, arrays, lie[3:], count)
        self.run(q, k, v, out, lse, seed, lengths, lists, new, None, tables, keys, rotary, scales)

    def _strides_of(self, array: tuple[int, tuple[int, ...], tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the strides of heads, rows, columns and items of keys or values; 0 where one item serves all."""
        _, shape, strides = array
        return strides[3 - self.rows], strides[self.rows], strides[3], strides[0] if shape[0] > 1 else 0

    def _other_items(self, lengths: list[int], lists: Sequence[int] | None, keys: tuple[int, ...] | None) -> Any:
        """Returns what a run of other lengths depends on, its items, their address, its threads and words of strides.

        keys: strides of heads, rows, columns and items, of k and of v; of keys in two parts also of the second.

        The last are kept, for a model's next layer: 2 µs.
        """
        items, strides = self.items_type.from_buffer_copy(self.items_bytes), ()
        items[_K_LENS] = lengths
        items[_STARTS] = list(map(sub, lengths, self.problem.q_lengths))
        if lists is not None:
            lists = items[_LISTS] = [*lists]
        if keys is not None:
            strides = ((KEYS, (*keys[:3], *keys[4:7])),)
            columns = [(_K_AT, keys[3]), (_V_AT, keys[7])]
            if self.in_parts:
                strides += ((slice(ROTARY.start + 1, ROTARY.stop), keys[8:11]),)
                columns.append((_ROTARY_AT, keys[11]))
            if len(lengths) > 1:
                for column, step in columns:
                    items[column] = [n * step for n in range(len(lengths))]
        threads = 1 if sum(lengths) < self.inline_keys else 0
        return (lengths, lists, keys), items, ctypes.addressof(items), threads, strides


_K_LENS, _STARTS, _LISTS, _K_AT, _V_AT, _ROTARY_AT = (
    slice(word, None, len(ITEM)) for word in (ITEM.k_len, ITEM.start, ITEM.pages, ITEM.k_at, ITEM.v_at, ITEM.rotary_at)
)


def _sinks(problem: Problem) -> np.ndarray | None:
    """Returns the logits of sinks in the unit of exponents."""
    if problem.sinks is None:
        return None
    kind = np.float64 if problem.storage == "f64" else np.float32
    return np.array([x * LOG4_E for x in problem.sinks], kind)


def _guessed_seconds(problem: Problem, how: Schedule) -> float:
    """Guesses how long one thread takes."""
    if problem.chosen is not None:
        return _guessed_seconds_of_chosen(problem, how)
    if how.kind == "decode":
        return sum(problem.k_lengths) * token_bytes(problem) / how.tuning.threading.read_bytes
    flops = all_pairs(problem) * 2 * (problem.head_dim + problem.value_dim) * (0.5 if problem.causal else 1.0)
    return flops / how.tuning.threading.flops


def _guessed_seconds_of_chosen(problem: Problem, how: Schedule) -> float:
    counts = problem.chosen.counts
    keys = int(counts.sum()) * (1 if problem.chosen.has_heads else problem.kv_heads)  # rows that are read
    bytes_of_key = token_bytes(problem) / max(1, problem.kv_heads)
    flops = 2 * keys * problem.group * (problem.head_dim + problem.value_dim)
    wants = how.tuning.threading
    return max(_SCATTERED * keys * bytes_of_key / wants.read_bytes, flops / wants.flops)


def program_of(problem: Problem, *, backward: bool = False) -> Program | None:
    """Returns the mask and score as a kernel wants them; raises unless their tables are on the CPU."""
    program = problem.program
    if backward:
        program = Program.of(problem.mask, problem.score, problem.box(), backward=True)
    for table in () if program is None else program.tables:
        if table.tensor is not None:
            raise ArgumentError(
                f"{table.name}: expected an array on the CPU, as q; got one on {table.tensor.device}. Use .cpu()."
            )
    return program


# --- arguments and items


def words_of(problem: Problem, how: Schedule, rows: Rows, keys: Dense | Paged) -> dict[str, int]:
    """Returns the kernel's arguments by name, without addresses; for any vector unit, this machine's or not."""
    c = LOG4_E if problem.score is not None else problem.scale * LOG4_E
    number = number_bytes(problem.storage)
    words = words_of_problem(problem, rows.q.shape[0] if rows.layout == "lhd" else _padded_rows(problem)) | {
        "scratch_stride": how.scratch_stride,
        "limit": how.tickets,
        "c": bits_of(abs(c), number),
        "flip": signs_of(number, PRODUCTS[product_name(problem, how.isa)].elements) if c < 0 else 0,
        "divisor": bits_of(problem.dropout_divisor, number),
    }
    words |= steps("q", rows.q.strides, rows.layout) | steps("out", rows.out_strides, rows.layout)
    words |= words_of_keys(keys) | dict(how.words)
    return words | (upcoming_of(problem, how, words) if how.kind == "forward" else {})


def words_of_problem(problem: Problem, lse_rows: int) -> dict[str, int]:
    """Returns the arguments that a problem alone says; `lse_rows`: from one head's log-sum-exps to the next."""
    number = number_bytes(problem.storage)
    return {
        "lse_head": lse_rows * number,
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "causal": int(problem.causal),
        "scale": bits_of(problem.scale, number),
        "k_start": problem.k_start,
        "drop_below": drop_below(problem.dropout),
    }


def state_bytes(problem: Problem) -> int:
    """Returns the bytes of the states of a row of one head, of whole spans and of the open one."""
    return STATE_SUMS + 2 * (-(-problem.value_dim * number_bytes(problem.storage) // 64) * 64)


def upcoming_of(problem: Problem, how: Schedule, words: dict[str, int]) -> dict[str, int]:
    """Returns what is prefetched for the next task meanwhile (cpu/kernels/prefetch.py): of keys a tile at most.

    Nothing of arrays that stay in the caches: there a wrong guess takes lines away from another thread.
    """
    own, keys = STORAGE_BYTES[problem.storage], ELEMENT_BYTES[problem.key_dtype]
    of_rows, of_keys = sum(problem.q_lengths) * problem.q_heads * own, sum(problem.k_lengths) * problem.kv_heads * keys
    if (
        problem.chosen is not None
        or how.parts > 1
        or (of_rows + of_keys) * (problem.head_dim + problem.value_dim) < _KEPT * level2_bytes()
    ):
        return {}
    dense = words["page_size"] == ENDLESS
    sizes = (
        ("q", problem.head_dim, own, True),
        ("out", problem.value_dim, own, True),
        ("k", problem.head_dim, keys, dense),
        ("v", problem.value_dim, keys, dense),
    )
    lines = {
        f"{x}_lines": -(-dim * size // 64) * (known and words[f"{x}_column"] == size) for x, dim, size, known in sizes
    }
    rows = PRODUCTS[product_name(problem, how.isa)].rows or how.tuning.register_tiles(how.isa).keys[how.vectors - 1]
    groups = TILE // rows  # of keys in a tile
    return lines | {
        "upcoming": how.threads,
        "next_positions": -(-how.panel // (groups * problem.group)),
        "next_keys": -(-TILE // (groups * how.panels)),
    }


def _padded_rows(problem: Problem) -> int:
    """Returns the rows of an item in a padded batch."""
    return problem.rows if problem.rows is not None else problem.q_lengths[0] if problem.batch else 0


def bits_of(x: float, number: int) -> int:
    """Returns the word that holds a float of `number` bytes."""
    return struct.unpack("<q", struct.pack("<d", x))[0] if number == 8 else struct.unpack("<i", struct.pack("<f", x))[0]


def signs_of(number: int, elements: int) -> int:
    """Returns the sign bits of a unit of `number` bytes, as an int64."""
    bits = 8 * number // elements
    signs = sum(1 << (bits * (i + 1) - 1) for i in range(elements))
    return signs - (1 << 64) if signs >> 63 else signs


def tickets_of(problem: Problem, how: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Returns each item's tickets of a kv head, or of several that share a task, and all of its tickets."""
    q_lengths = np.array(problem.q_lengths, np.int64)
    if how.kind == "decode":
        blocks = np.minimum(q_lengths, 1) * how.parts
        return blocks, blocks * (problem.kv_heads // how.heads)
    blocks = -(-q_lengths * problem.group // how.block_rows)
    return blocks, blocks * (problem.kv_heads // how.heads) * how.parts


def items_of(problem: Problem, how: Schedule, rows: Rows, keys: Dense | Paged) -> np.ndarray:
    """Returns the kernel's table of batch items, [item, word]: those that have tickets."""
    batch = problem.batch
    blocks, tickets = tickets_of(problem, how)
    items = item_columns(problem, rows, keys)._replace(first=np.cumsum(tickets) - tickets, blocks=blocks)
    table = np.stack(items, axis=1)
    if problem.rows is not None and batch and not problem.partial:
        table = np.concatenate([table, _unused_rows(problem, how, rows, items)])
        tickets = table[:, ITEM.blocks] * problem.kv_heads
    # an item without tickets shares its first ticket with the next: bisection then finds the last, so only items with
    # work are left
    return np.ascontiguousarray(table[tickets > 0]) if batch else table


def item_columns(problem: Problem, rows: Rows, keys: Dense | Paged) -> Item:
    """Returns the columns of the table of batch items; tickets are left out."""
    batch, number = problem.batch, number_bytes(problem.storage)
    if rows.first is not None:
        first, axis, lse = np.array(rows.first, np.int64), LAYOUTS[rows.layout][-2], number
    else:
        first, axis = np.arange(batch, dtype=np.int64), LAYOUTS[rows.layout][0]
        lse = problem.q_heads * _padded_rows(problem) * number
    return Item(
        first=first * 0,
        blocks=first * 0,
        q_len=np.array(problem.q_lengths, np.int64),
        k_len=np.array(problem.k_lengths, np.int64),
        start=np.array(problem.q_starts, np.int64) - problem.k_start,
        q_at=first * rows.q.strides[axis],
        out_at=first * rows.out_strides[axis],
        lse_at=first * lse,
        index=np.arange(batch) if problem.items is None else np.array(problem.items, np.int64),
        first_key=first * 0,
        rows=first * 0,
        chosen=first * 0,
        **columns_of_keys(keys, batch),
    )


def _unused_rows(problem: Problem, how: Schedule, rows: Rows, items: Item) -> np.ndarray:
    """Returns the items of rows past q_lengths, which see no key."""
    used, number = items.q_len, number_bytes(problem.storage)
    q_len = (problem.rows or 0) - used
    blocks = -(-q_len * problem.group // how.block_rows)
    tickets = blocks * problem.kv_heads
    before = items.first[-1] + items.blocks[-1] * problem.kv_heads
    q_row, out_row = rows.strides(-2)
    rest = items._replace(
        first=before + np.cumsum(tickets) - tickets,
        blocks=blocks,
        q_len=q_len,
        k_len=np.zeros_like(used),
        q_at=items.q_at + used * q_row,
        out_at=items.out_at + used * out_row,
        lse_at=items.lse_at + used * number,
        index=np.full_like(used, -1),
    )
    return np.stack(rest, axis=1)
