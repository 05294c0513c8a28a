"""Chooses plan and kernel, prepares a call once, and runs it."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import sys
import weakref
from collections import deque
from typing import Any

import numpy as np

from . import planning
from .arrays import DTYPES, Array, pages
from .errors import ArgumentError, UnsupportedError, shown
from .expressions.program import Program
from .expressions.tree import out_of_range
from .machine import Isa, current_isa, interpreting
from .modes import standard
from .problem import LAYOUTS, Problem

_INLINE_SECONDS = 50e-6  # below this a region is not worth waking anybody
LOG4_E = math.log2(math.e) / 2  # weights are powers of 4
_GUESS = 50e9  # FLOP/s of one thread, to begin with
_READ_GUESS = 20e9  # bytes per second that a decode step reads keys and values with, likewise


def _modules() -> Any:
    from .cpu import compile, microkernels, workers
    from .cpu import layout as fields

    return compile, fields, microkernels, workers


_K_LEN, _START, _PAGES = 3, 4, 11  # words of an item


class Prepared:
    """A problem with layouts and strides fixed: only addresses are missing.

    Never changed once it is used, so that threads may share it.
    """

    @standard
    def __init__(
        self,
        problem: Problem,
        how: planning.Schedule,
        words: dict[str, int],
        items: np.ndarray,
        *,
        cached: bool = False,
    ) -> None:
        """`cached`: keys and values lie as in a cache."""
        compile_, fields, microkernels, workers = _modules()
        self.problem, self.how, self.items = problem, how, items
        self.program = _program(problem)
        self.lookups = [] if self.program is None else self.program.lookups
        if self.program is not None:
            self.slots = self.program.host_words()
            words |= {"numbers": self.slots[0].ctypes.data, "tables": self.slots[1].ctypes.data}
        if problem.sinks is not None:
            self.sinks = np.array(
                [x * LOG4_E for x in problem.sinks], np.float64 if problem.storage == "f64" else np.float32
            )
            words |= {"sinks": self.sinks.ctypes.data}
        self.shape = microkernels.Shape(how.isa, how.storage, how.vectors, self.program, cached, problem.quantised)
        self.kernel_of, self.run_tickets = compile_.kernel_of, workers.run_tickets
        self.loaded = weakref.ref(self.kernel_of(self.shape))
        self.words_type = ctypes.c_int64 * len(fields.FIELDS)
        template = np.zeros(len(fields.FIELDS), np.int64)
        for name, value in words.items():
            template[fields.FIELDS.index(name)] = value
        assert [fields.ITEM.index(n) for n in ("k_len", "start", "pages")] == [_K_LEN, _START, _PAGES]
        self.template = template.tobytes()
        self.at = {name: i for i, name in enumerate(fields.FIELDS)}
        pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
        flops = pairs * 2 * (problem.head_dim + problem.value_dim) * (0.5 if problem.causal else 1.0)
        size = 1 if problem.quantised else planning.STORAGE_BYTES[problem.storage]
        read = sum(problem.k_lengths) * problem.kv_heads * (problem.head_dim + problem.value_dim) * size
        self.seconds = read / _READ_GUESS if how.parts else flops / _GUESS
        self.threads = how.threads if self.seconds > _INLINE_SECONDS else 1
        self.tickets = how.tickets if problem.value_dim and problem.q_heads else 0
        self.item_words = len(fields.ITEM)
        self.items_type, self.items_bytes = ctypes.c_int64 * items.size, items.tobytes()
        self.groups = how.tickets // how.parts if how.parts > 1 else 0  # kv heads whose spans several tasks share
        self.scratch_size = how.scratch_stride * self.threads + self.groups * how.partial_bytes

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        own = self.items.nbytes + len(self.items_bytes) + len(self.template)
        own += 0 if self.slots is None else sum(x.nbytes for x in self.slots)
        expressions = [x for x in (self.problem.mask, self.problem.score) if x is not None]
        return own + sum(table.array.nbytes for x in expressions for table in x.tables)

    def items_for(self, k_lengths: list[int], lists: list[int] | None = None) -> Any:
        """Its table of items for other lengths of keys, of no more spans, and lists of pages.

        The last query is at the last key.
        """
        items = self.items_type.from_buffer_copy(self.items_bytes)
        for at, n, rows in zip(range(0, len(items), self.item_words), k_lengths, self.problem.q_lengths, strict=True):
            items[at + _K_LEN], items[at + _START] = n, n - rows
        if lists is not None:
            items[_PAGES :: self.item_words] = lists
        return items

    @property
    def kernel(self) -> Any:
        """Its kernel; loaded anew where it has been unloaded. Whoever runs it holds it meanwhile."""
        kernel = self.loaded()
        if kernel is None:
            kernel = self.kernel_of(self.shape)
            self.loaded = weakref.ref(kernel)
        kernel.used()
        return kernel

    def run(
        self, q: int, k: int, v: int, out: int, lse: int, counts: int = 0, items: int = 0, threads: int = 0
    ) -> None:
        """Fills out (and lse, unless 0) at these addresses; with a table of items and threads of the caller's, if
        given.
        """
        if not self.tickets:
            return
        at, wrong = self.at, ()
        words = self.words_type.from_buffer_copy(self.template)
        scratch = _take_scratch(self.scratch_size)
        try:
            words[at["q"]], words[at["k"]], words[at["v"]], words[at["out"]], words[at["lse"]] = q, k, v, out, lse
            words[at["scratch"]] = ctypes.addressof(scratch)
            words[at["counts"]] = counts
            if items:
                words[at["items"]] = items
            if self.groups:
                arrived = (ctypes.c_int64 * self.groups)()
                words[at["arrived"]] = ctypes.addressof(arrived)
                words[at["partials"]] = words[at["scratch"]] + self.how.scratch_stride * self.threads
            if self.lookups:
                wrong = (ctypes.c_int64 * (2 * len(self.lookups)))()
                words[at["wrong"]] = ctypes.addressof(wrong)
            self.run_tickets(self.kernel, words, self.tickets, threads or self.threads, self.seconds)
        finally:
            _give_scratch(scratch)
        for n, (node, dimension) in enumerate(self.lookups):
            if wrong[2 * n]:
                raise out_of_range(node.value, dimension, wrong[2 * n + 1])


def _program(problem: Problem) -> Program | None:
    """The mask and score as a kernel wants them, with tables on the CPU."""
    program = Program.of(problem.mask, problem.score, problem.box())
    for table in () if program is None else program.tables:
        if table.tensor is not None:
            raise ArgumentError(
                f"{table.name}: expected an array on the CPU, as q; got one on {table.tensor.device}. Use .cpu()."
            )
    return program


def may_fail(problem: Problem) -> bool:
    """Whether a lookup may turn out, while kernels run, to be out of range."""
    program = Program.of(problem.mask, problem.score, problem.box())
    return program is not None and any(program.checked)


_scratches: deque[Any] = deque(maxlen=4)  # used again: fresh pages cost more than a small call


def _take_scratch(size: int) -> Any:
    try:
        scratch = _scratches.pop()
    except IndexError:
        return _map_scratch(size)
    return scratch if len(scratch) >= size else _map_scratch(size)


def _map_scratch(size: int) -> Any:
    try:
        return (ctypes.c_char * size).from_buffer(pages(size))
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of scratch cannot be reserved: {error}") from None


def _give_scratch(scratch: Any) -> None:
    """When nobody works in it any more. One that is not given back is freed."""
    if len(scratch) <= 256 << 20:
        _scratches.append(scratch)


def _axis(strides: tuple[int, ...], layout: str, i: int) -> int:
    """Stride of heads (-3), length (-2) or dim (-1)."""
    return strides[LAYOUTS[layout][i]]


def prepare(
    problem: Problem,
    layout: str,
    q: Array,
    k: Array,
    v: Array,
    out_strides: tuple[int, ...],
    cu_q: tuple[int, ...] | None,
    cu_k: tuple[int, ...] | None,
    threads: int,
    isa: Isa,
) -> Prepared:
    """Everything that addresses don't change."""
    return Prepared(problem, *arguments(problem, layout, q, k, v, out_strides, cu_q, cu_k, threads, isa))


@standard
def prepare_pages(
    problem: Problem,
    layout: str,
    q: Array,
    pages: planning.Pages,
    lists: list[int],
    out_strides: tuple[int, ...],
    q_first: tuple[int, ...] | None,
    threads: int,
    isa: Isa,
) -> Prepared:
    """The same for keys and values in pages.

    lists: of each item, the address of its pages' numbers (int64), which the caller has checked.
    q_first: of each item, its first row in packed queries.
    """
    size = DTYPES[problem.dtype][1]
    strided = [not pages.lanes and x != size for x in (pages.k_column, pages.v_column)]
    adjoin = not pages.lanes and 0 < pages.k_head < pages.k_row
    how = planning.schedule(problem, isa, threads, *strided, pages=pages, heads_adjoin=adjoin)
    index = np.arange(problem.batch, dtype=np.int64)
    items = _items(
        problem,
        how,
        layout,
        q,
        out_strides,
        q_first,
        index * pages.k_item,
        index * pages.v_item,
        np.array(lists, np.int64),
    )
    words = _words(problem, how, isa, layout, q, out_strides, items)
    names = ("k_head", "k_row", "k_column", "v_head", "v_row", "v_column", "k_page", "v_page")
    words |= {n: getattr(pages, n) for n in names} | {f"page_{n}": getattr(pages, n) for n in ("size", "fixed", "ring")}
    return Prepared(problem, how, words, items, cached=pages.lanes)


_NO_PAGES = np.zeros(1 + planning.SLACK, np.int64)  # the list of an array without pages: one that never ends


@standard
def arguments(
    problem: Problem,
    layout: str,
    q: Array,
    k: Array,
    v: Array,
    out_strides: tuple[int, ...],
    cu_q: tuple[int, ...] | None,
    cu_k: tuple[int, ...] | None,
    threads: int,
    isa: Isa,
) -> tuple[planning.Schedule, dict[str, int], np.ndarray]:
    """The schedule, the kernel's words by name, and its table of items; for any vector unit, this machine's or not."""
    how = planning.schedule(problem, isa, threads, **strides_of(problem, layout, k, v))
    if cu_q is not None and cu_k is not None:
        first, strides = np.array(cu_k[:-1], np.int64), [_axis(x.strides, layout, -2) for x in (k, v)]
    else:
        first, strides = np.arange(problem.batch, dtype=np.int64), [x.strides[LAYOUTS[layout][0]] for x in (k, v)]
    lists = np.full(problem.batch, _NO_PAGES.ctypes.data, np.int64)
    q_first = None if cu_q is None else cu_q[:-1]
    items = _items(problem, how, layout, q, out_strides, q_first, first * strides[0], first * strides[1], lists)
    words = _words(problem, how, isa, layout, q, out_strides, items)
    for name, strides in (("k", k.strides), ("v", v.strides)):
        words |= {f"{name}_{part}": _axis(strides, layout, i) for part, i in _PARTS}
    return how, words | {"page_size": planning.ENDLESS, "page_fixed": planning.ENDLESS, "page_ring": 1}, items


_PARTS = (("head", -3), ("row", -2), ("column", -1))


def _words(
    problem: Problem,
    how: planning.Schedule,
    isa: Isa,
    layout: str,
    q: Array,
    out_strides: tuple[int, ...],
    items: np.ndarray,
) -> dict[str, int]:
    """All but where keys and values lie."""
    c = LOG4_E if problem.score is not None else problem.scale * LOG4_E
    number = 8 if problem.storage == "f64" else 4
    flip = 0
    if c < 0:
        flip = 0x80008000 if planning.dots(problem, isa) else 1 << (8 * number - 1)
    lse_head = (q.shape[0] if layout == "lhd" else _rows(problem)) * number
    words = {
        "limit": how.tickets,
        "items": items.ctypes.data,
        "item_count": len(items),
        "scratch_stride": how.scratch_stride,
        "lse_head": lse_head,
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "panels": how.panels,
        "causal": int(problem.causal),
        "c": _bits(abs(c), number),
        "scale": _bits(problem.scale, number),
        "k_start": problem.k_start,
        "flip": flip - (1 << 64) if flip >> 63 else flip,
        "stage_k": int(how.stage_keys),
        "stage_v": int(how.stage_values),
        "panel_bytes": how.panel_bytes,
        "width": how.width,
        "heads": how.heads,
        "partial_bytes": how.partial_bytes,
        **dict(how.offsets),
    }
    for name, strides in (("q", q.strides), ("out", out_strides)):
        words |= {f"{name}_{part}": _axis(strides, layout, i) for part, i in _PARTS}
    return words


def _rows(problem: Problem) -> int:
    """Rows of an item in a padded batch."""
    return problem.rows if problem.rows is not None else problem.q_lengths[0] if problem.batch else 0


def _bits(x: float, number: int) -> int:
    """A float of `number` bytes as the word that holds it."""
    return struct.unpack("<q", struct.pack("<d", x))[0] if number == 8 else struct.unpack("<i", struct.pack("<f", x))[0]


def _items(
    problem: Problem,
    how: planning.Schedule,
    layout: str,
    q: Array,
    out_strides: tuple[int, ...],
    q_first: tuple[int, ...] | None,
    k_at: np.ndarray,
    v_at: np.ndarray,
    lists: np.ndarray,
) -> np.ndarray:
    """The kernel's table of batch items: tickets, lengths, positions, byte offsets."""
    batch, number = problem.batch, 8 if problem.storage == "f64" else 4
    table = np.zeros((batch, 12), np.int64)
    table[:, 10] = np.arange(batch) if problem.items is None else problem.items
    q_lengths = np.array(problem.q_lengths, np.int64)
    blocks = np.minimum(q_lengths, 1) * how.parts if how.parts else -(-q_lengths * problem.group // how.block_rows)
    tickets = blocks * (problem.kv_heads // how.heads)
    table[:, 0] = np.cumsum(tickets) - tickets
    table[:, 1], table[:, 2], table[:, 3] = blocks, q_lengths, problem.k_lengths
    table[:, 4] = np.array(problem.q_starts, np.int64) - problem.k_start
    if q_first is not None:
        place = np.array(q_first, np.int64)
        strides = [_axis(x, layout, -2) for x in (q.strides, out_strides)]
        table[:, 9] = place * number
    else:
        place = np.arange(batch, dtype=np.int64)
        strides = [x[LAYOUTS[layout][0]] for x in (q.strides, out_strides)]
        table[:, 9] = place * problem.q_heads * _rows(problem) * number
    table[:, 5], table[:, 8] = (place * x for x in strides)
    table[:, 6], table[:, 7], table[:, 11] = k_at, v_at, lists
    if problem.rows is not None and batch:
        table = np.concatenate(
            [table, _unused_rows(problem, how, table, [_axis(s, layout, -2) for s in (q.strides, out_strides)], number)]
        )
        tickets = table[:, 1] * problem.kv_heads
    # an item without tickets shares its first ticket with the next: bisection then finds the last, so keep only items
    # with work
    return np.ascontiguousarray(table[tickets > 0]) if batch else table


def _unused_rows(
    problem: Problem, how: planning.Schedule, table: np.ndarray, row: list[int], number: int
) -> np.ndarray:
    """Items of the rows past q_lengths: they see no key."""
    rest = table.copy()
    used = table[:, 2]
    rest[:, 2], rest[:, 3], rest[:, 10] = (problem.rows or 0) - used, 0, -1
    rest[:, 1] = -(-rest[:, 2] * problem.group // how.block_rows)
    tickets = rest[:, 1] * problem.kv_heads
    rest[:, 0] = table[-1, 0] + table[-1, 1] * problem.kv_heads + np.cumsum(tickets) - tickets
    for column, stride in ((5, row[0]), (8, row[1]), (9, number)):
        rest[:, column] += used * stride
    return rest


def strides_of(problem: Problem, layout: str, k: Array, v: Array) -> dict[str, Any]:
    """What a schedule wants to know of the strides of keys and values."""
    size = DTYPES[problem.dtype][1]
    strided = {f"strided_{name}": _axis(x.strides, layout, -1) != size for name, x in (("keys", k), ("values", v))}
    return strided | {"heads_adjoin": 0 < _axis(k.strides, layout, -3) < _axis(k.strides, layout, -2)}


def kernel_shape(
    problem: Problem,
    threads: int,
    isa: Isa,
    *,
    strided_keys: bool = False,
    strided_values: bool = False,
    heads_adjoin: bool = False,
) -> tuple[planning.Schedule, Any]:
    """How a problem runs, and the Shape of its kernel; for any vector unit, this machine's or not."""
    from .cpu.microkernels import Shape

    how = planning.schedule(problem, isa, threads, strided_keys, strided_values, heads_adjoin=heads_adjoin)
    return how, Shape(isa, how.storage, how.vectors, _program(problem))


# --- the other engine


def chosen(engine: Any, q: Array) -> str:
    """ "cpu", or the device whose engine takes the call: that on which q lies, which `engine` may insist on."""
    if not (engine is None or (isinstance(engine, str) and engine in ("cpu", "cuda"))):
        raise ArgumentError(f"engine: expected 'cpu', 'cuda' or None (where q lies); got {shown(engine)}.")
    if engine == "cpu" and q.device != "cpu":
        raise ArgumentError(f"q: expected an array on the CPU for engine='cpu'; got one on {q.device}. Use q.cpu().")
    if engine == "cuda" and q.device == "cpu" and not (interpreting() and q.kind == "torch"):
        raise ArgumentError("q: expected a tensor on a GPU for engine='cuda'; got an array on the CPU. Use q.cuda().")
    return "cpu" if q.device == "cpu" and engine != "cuda" else q.device


def gpu() -> Any:
    """What computes on a GPU."""
    try:
        from .gpu import prepare as gpu_prepare
    except ImportError as error:
        raise UnsupportedError(
            f"q: expected Triton, for arrays on a GPU; it cannot be loaded ({error}). pip install 'speedlight[gpu]', "
            "or use q.cpu()."
        ) from None
    return gpu_prepare


def gpu_plan(problem: Problem, device: Any, precision: str, exact: bool) -> Any:
    """The plan of a problem on a GPU."""
    place = resident().device_of(device)
    from .gpu import counting

    return counting.plan(problem, place, precision, exact=exact)


def gpu_used() -> bool:
    """Whether anything was launched on one."""
    return "speedlight.gpu.launch" in sys.modules


def resident() -> Any:
    """Caches in a GPU's memory."""
    gpu()
    from .gpu import storage as resident

    return resident


def make_plan(problem: Problem, threads: int, isa: Isa | None = None, *, exact: bool = False, **strides: Any) -> Any:
    """The plan of a problem on this machine, with its measured roofs; strides as from strides_of()."""
    from .cpu import roof
    from .cpu.compile import symbol_of

    isa = isa or current_isa()
    how, shape = kernel_shape(problem, threads, isa, **strides)
    peak = roof.peak_flops(isa, problem.storage, how.threads)
    return planning.count(problem, how, symbol_of(shape), peak, roof.bandwidth(how.threads), exact=exact)


@functools.lru_cache(maxsize=1)
def _get_threads() -> Any:
    from .cpu.workers import get_threads

    return get_threads


def threads_now() -> int:
    return _get_threads()()
