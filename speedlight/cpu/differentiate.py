"""From a problem, its arrays and those of its gradients to a call of the backward kernel, which runs it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..arrays import STORAGE_BYTES, address_of
from ..expressions.program import Program
from ..gradients import Asked
from ..machine import PRODUCTS, Isa, number_bytes, register_tiles
from ..modes import standard
from ..problem import LAYOUTS, QUERY_BLOCK, TILE, Problem
from ..resolve import Stated
from .compile import kernel_of
from .flows import changes_flow
from .layout import (
    BACKWARD,
    BACKWARD_PANEL,
    BACKWARD_SCRATCH,
    CALL,
    GANG,
    GRADIENTS,
    SCRATCH,
    BackwardSizes,
    GradientItem,
    placed,
)
from .operands import Operands, steps, stride_of
from .prepare import bits_of, give_scratch, program_of, raise_wrong, signs_of, take_scratch, template_of
from .schedule import product_of
from .shape import Shape
from .workers import run_tickets

_RANGE = 1024  # keys of a task
_TASKS = 3  # at once, for each thread
_SLACK = 24  # rows that register tiles write past a tile
_APART = (1 << 20) + 512
_GUESS = 5e9  # FLOP/s of one thread for each element that a vector has, to begin with
_INLINE_SECONDS = 50e-6


class Lies(NamedTuple):
    """How the arrays of a backward pass lie."""

    layout: str
    arrays: Operands
    first_q: tuple[int, ...] | None  # of each packed sequence, its first row in q and in k
    first_k: tuple[int, ...] | None

    def step(self, name: str, axis: int) -> int:
        """Bytes, as stride_of gives them."""
        return stride_of(getattr(self.arrays, name).strides, self.layout, axis)

    def offsets(self, name: str) -> np.ndarray:
        """From an array's address to each item."""
        first = self.first_k if name in ("k", "v", "dk", "dv") else self.first_q
        if first is not None:
            return np.array(first, np.int64) * self.step(name, -2)
        x = getattr(self.arrays, name)
        axis = LAYOUTS[self.layout][0]
        return np.arange(x.shape[axis], dtype=np.int64) * x.strides[axis]


@dataclass(frozen=True, slots=True)
class BackwardSchedule:
    """How the CPU engine runs a backward pass."""

    isa: Isa
    storage: str
    vectors: int
    range_keys: int
    threads: int
    tickets: int
    gangs: np.ndarray
    progress: int  # words
    words: dict[str, int]
    scratch_bytes: int

    @property
    def scratch_stride(self) -> int:
        return self.scratch_bytes + _APART


def schedule_backward(
    problem: Problem, isa: Isa, threads: int, lies: Lies, program: Program | None
) -> BackwardSchedule:
    vectors = 3
    lanes = isa.lanes(problem.storage)
    panel, number = lanes * vectors, number_bytes(problem.storage)
    elements = PRODUCTS[product_of(problem, isa)]
    units, value_units = -(-problem.head_dim // elements), -(-problem.value_dim // elements)
    staged = _staged(problem, lies, lanes, elements)
    columns, value_columns = _up(problem.head_dim, lanes), _up(problem.value_dim, lanes)
    rows = register_tiles(isa).keys[vectors - 1]
    sizes = BackwardSizes(
        number=number,
        panel=panel,
        tile_rows=TILE + _SLACK,
        units=units,
        value_units=value_units,
        width=_up(problem.head_dim, rows),
        columns=columns,
        value_columns=value_columns,
        staged_keys=staged["k"] * TILE * units * number,
        staged_values=staged["v"] * TILE * value_units * number,
        staged_queries=staged["q"] * panel * columns * number,
        staged_gradients=staged["d_out"] * panel * value_columns * number,
        elements=elements,
        head_dim=problem.head_dim,
        keeps_raw=changes_flow(program),
    )
    scratch, fixed = placed(BACKWARD_SCRATCH, sizes)
    offsets, panel_bytes = placed(BACKWARD_PANEL, sizes)
    panels = QUERY_BLOCK // panel
    gangs, progress, tickets = _gangs(problem, _RANGE, threads)
    words = {
        "range_keys": _RANGE, "panels": panels, "panel_bytes": panel_bytes, "columns": columns,
        "value_columns": value_columns, "kv_heads": problem.kv_heads,
    }  # fmt: skip
    words |= {f"{name}_staged": int(x) for name, x in staged.items()}
    words |= {f"at_{name}": at for name, at in (scratch | offsets).items()}
    used = _up(fixed + panels * panel_bytes, 4096)
    tasks = tickets
    return BackwardSchedule(
        isa, problem.storage, vectors, _RANGE, max(1, min(threads, tasks)), tickets, gangs, progress, words, used
    )


def _staged(problem: Problem, lies: Lies, lanes: int, elements: int) -> dict[str, bool]:
    """Which rows are copied: to be widened, made units or whole vectors, or brought together."""
    size = STORAGE_BYTES[problem.storage]
    strided = {name: lies.step(name, -1) != size for name in ("q", "k", "v", "d_out")}
    if elements > 1:
        odd = {"k": problem.head_dim % elements, "v": problem.value_dim % elements, "q": 1, "d_out": 1}
    else:
        narrow = problem.storage not in ("f32", "f64")
        odd = {"k": narrow, "v": narrow, "q": narrow or problem.head_dim % lanes}
        odd["d_out"] = narrow or problem.value_dim % lanes
    return {name: strided[name] or bool(odd[name]) for name in strided}


def _steps_of(problem: Problem) -> list[int]:
    return [
        ((start + n - 1) // QUERY_BLOCK - start // QUERY_BLOCK + 1) * problem.group if n else 0
        for start, n in zip(problem.q_starts, problem.q_lengths, strict=True)
    ]


def _gangs(problem: Problem, range_keys: int, threads: int) -> tuple[np.ndarray, int, int]:
    """The table of gangs, words of progress, and tickets.

    A gang is as small as keeps all threads busy: what it reads again and again then stays in the cache they share.
    """
    steps = _steps_of(problem)
    ranges = [max(1, -(-n // range_keys)) for n in problem.k_lengths]
    columns = problem.batch * problem.kv_heads
    apart = max([min(a, b) for a, b in zip(steps, ranges, strict=True)], default=0)  # tasks of a head at once
    together = -(-_TASKS * threads // max(1, apart)) if threads > 1 else 1
    rows, tickets, progress = [], 0, 0
    for first in range(0, columns, together):
        count = min(together, columns - first)
        items = range(first // problem.kv_heads, (first + count - 1) // problem.kv_heads + 1)
        most = max(ranges[i] for i in items)
        depth = max((steps[i] + ranges[i] - 1 if steps[i] else 0) for i in items)
        if not depth:
            continue
        rows.append((tickets, first, count, most, progress))
        tickets += depth * count * most
        progress += count * most
    return np.array(rows, np.int64).reshape(-1, len(GANG.names)), progress, tickets


class BackwardCall:
    """A backward pass with layouts and strides fixed: only addresses are missing. Never changed once it is used."""

    def __init__(self, request: Asked, lies: Lies, threads: int, isa: Isa) -> None:
        self.request, self.problem = request, request.problem
        problem = request.problem
        self.program = program_of(problem, backward=True)
        self.how = how = schedule_backward(problem, isa, threads, lies, self.program)
        self.shape = Shape("backward", how.isa, how.storage, how.vectors, self.program)
        self.items = _items(problem, lies)
        words = how.words | _words(problem, lies, self.shape.elements) | {
            "scratch_stride": how.scratch_stride, "gangs": how.gangs.ctypes.data, "gang_count": len(how.gangs),
            "item_count": len(self.items),
        }  # fmt: skip
        self.slots = None if self.program is None else self.program.host_words()
        if self.slots is not None:
            words |= {"numbers": self.slots[0].ctypes.data, "tables": self.slots[1].ctypes.data}
        self.lookups = [] if self.program is None else self.program.lookups
        self.template = template_of(BACKWARD, words)
        self.words_type = ctypes.c_int64 * len(BACKWARD.names)
        pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
        flops = pairs * (6 * problem.head_dim + 4 * problem.value_dim) * (0.5 if problem.causal else 1.0)
        self.seconds = flops / (_GUESS * how.isa.lanes(how.storage) * self.shape.elements)
        self.threads = how.threads if self.seconds > _INLINE_SECONDS else 1
        self.untouched = _untouched(problem, lies)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        own = self.items.nbytes + self.how.gangs.nbytes + len(self.template)
        own += 0 if self.slots is None else sum(x.nbytes for x in self.slots)
        return own + (0 if self.program is None else sum(x.array.nbytes for x in self.program.tables))

    def run(self, x: Operands) -> None:
        """Fills dq, dk and dv."""
        for name in self.untouched:
            getattr(x, name).numpy()[...] = 0
        if not self.how.tickets:
            return
        words = self.words_type.from_buffer_copy(self.template)
        lse, d_lse = (None if a is None else np.ascontiguousarray(a.numpy()) for a in (x.lse, x.d_lse))
        sums = self._sums(x)
        progress = (ctypes.c_int64 * (self.how.progress + 1))()
        wrong = (ctypes.c_int64 * (2 * len(self.lookups) + 1))()
        scratch = take_scratch(self.how.scratch_stride * self.threads)
        try:
            words[SCRATCH] = ctypes.addressof(scratch)
            words[CALL] = (
                x.q.address, x.k.address, x.v.address, x.out.address, _address(lse), 0, self.items.ctypes.data, 0,
                0, ctypes.addressof(wrong),
            )  # fmt: skip
            words[GRADIENTS] = (
                x.d_out.address, _address(d_lse), x.dq.address, x.dk.address,
                x.dv.address, *map(_address, sums), ctypes.addressof(progress),
            )  # fmt: skip
            run_tickets(kernel_of(self.shape), words, self.how.tickets, self.threads, self.seconds)
        finally:
            give_scratch(scratch)
        raise_wrong(self.lookups, wrong)

    def _sums(self, x: Operands) -> list[np.ndarray]:
        """Where dq, dk and dv are summed: they themselves, or arrays of numbers beside them."""
        if self.problem.storage in ("f32", "f64"):
            return [a.numpy() for a in (x.dq, x.dk, x.dv)]
        return [np.empty(a.shape, np.float32) for a in (x.dq, x.dk, x.dv)]


@standard
def prepare(request: Asked, layout: str, stated: Stated, arrays: Operands, threads: int, isa: Isa) -> BackwardCall:
    """Everything that addresses don't change."""
    lies = Lies(layout, arrays, stated.cu_q and stated.cu_q[:-1], stated.cu_k and stated.cu_k[:-1])
    return BackwardCall(request, lies, threads, isa)


def _address(x: np.ndarray | None) -> int:
    return 0 if x is None else address_of(x)


def _untouched(problem: Problem, lies: Lies) -> list[str]:
    """Which gradients have rows that no task writes: of queries without keys to come to, of keys without queries."""
    q_rows, k_rows = (sum(x) for x in (problem.q_lengths, problem.k_lengths))
    axes = LAYOUTS[lies.layout]
    most_q, most_k = (
        x.shape[axes[-2]] * (x.shape[axes[0]] if lies.layout != "lhd" else 1) for x in (lies.arrays.q, lies.arrays.k)
    )
    names = ["dq"] if q_rows < most_q else []
    no_queries = any(not a and b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True))
    return names + (["dk", "dv"] if k_rows < most_k or no_queries else [])


def _words(problem: Problem, lies: Lies, elements: int) -> dict[str, int]:
    number, size = number_bytes(problem.storage), STORAGE_BYTES[problem.storage]
    words = {
        "lse_head": _lse_rows(lies) * number,
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "causal": int(problem.causal),
        "c": bits_of(abs(problem.scale), number),  # a score's own arithmetic wants it with its sign
        "flip": signs_of(number, elements) if problem.score is None and problem.scale < 0 else 0,
        "scale": bits_of(problem.scale, number),
        "k_start": problem.k_start,
    }
    for name in ("q", "k", "v", "out", "d_out"):
        words |= steps(name, getattr(lies.arrays, name).strides, lies.layout)
    for name in ("q", "k", "v"):
        for part, axis in (("head", -3), ("row", -2)):
            step = lies.step(f"d{name}", axis)
            words |= {f"d{name}_{part}": step, f"s{name}_{part}": step // size * number}
    return words


def _lse_rows(lies: Lies) -> int:
    """From one head's log-sum-exps to the next."""
    return lies.arrays.lse.shape[-1]


def _items(problem: Problem, lies: Lies) -> np.ndarray:
    """The kernel's table of batch items, [item, word]."""
    number, size = number_bytes(problem.storage), STORAGE_BYTES[problem.storage]
    at = {f"{name}_at": lies.offsets(name) for name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")}
    if lies.first_q is not None:
        lse = np.array(lies.first_q, np.int64) * number
    else:
        lse = np.arange(problem.batch) * (problem.q_heads * _lse_rows(lies) * number)
    starts = np.array(problem.q_starts, np.int64)
    columns = GradientItem(
        steps=np.array(_steps_of(problem), np.int64),
        ranges=np.maximum(1, -(-np.array(problem.k_lengths, np.int64) // _RANGE)),
        block=starts // QUERY_BLOCK,
        q_len=np.array(problem.q_lengths, np.int64),
        k_len=np.array(problem.k_lengths, np.int64),
        start=starts - problem.k_start,
        lse_at=lse,
        **at,
        **{f"s{x}_at": at[f"d{x}_at"] // size * number for x in "qkv"},
        index=np.arange(problem.batch) if problem.items is None else np.array(problem.items, np.int64),
    )
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
