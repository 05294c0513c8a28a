"""From a problem, its arrays and those of its gradients to a call of the backward kernel, which runs it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays import STORAGE_BYTES, Array
from ..machine import PRODUCTS, Isa, number_bytes, register_tiles
from ..modes import standard
from ..problem import LAYOUTS, QUERY_BLOCK, TILE, Problem
from .compile import kernel_of
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
from .operands import steps, stride_of
from .prepare import bits_of, give_scratch, take_scratch, template_of
from .schedule import product_of
from .shape import Shape
from .workers import run_tickets

_RANGE = 1024  # keys of a task
_TASKS = 3  # at once, for each thread
_SLACK = 24  # rows that register tiles write past a tile
_APART = (1 << 20) + 512
_GUESS = 5e9  # FLOP/s of one thread for each element that a vector has, to begin with
_INLINE_SECONDS = 50e-6


class Tensors(NamedTuple):
    """What a backward pass reads and writes. lse and d_lse lie without gaps, (batch, q_heads, q_len) or packed."""

    layout: str
    q: Array
    k: Array
    v: Array
    out: Array
    lse: np.ndarray
    d_out: Array
    d_lse: np.ndarray | None
    dq: Array
    dk: Array
    dv: Array
    first_q: tuple[int, ...] | None = None  # of each packed sequence, its first row in q and in k
    first_k: tuple[int, ...] | None = None


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


def schedule_backward(problem: Problem, isa: Isa, threads: int, tensors: Tensors) -> BackwardSchedule:
    vectors = 3
    lanes = isa.lanes(problem.storage)
    panel, number = lanes * vectors, number_bytes(problem.storage)
    elements = PRODUCTS[product_of(problem, isa)]
    units, value_units = -(-problem.head_dim // elements), -(-problem.value_dim // elements)
    staged = _staged(problem, tensors, lanes, elements)
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


def _staged(problem: Problem, t: Tensors, lanes: int, elements: int) -> dict[str, bool]:
    """Which rows are copied: to be widened, made units or whole vectors, or brought together."""
    size = STORAGE_BYTES[problem.storage]
    strided = {name: stride_of(getattr(t, name).strides, t.layout, -1) != size for name in ("q", "k", "v", "d_out")}
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
    """A backward pass with layouts and strides fixed: only addresses are missing."""

    def __init__(self, problem: Problem, how: BackwardSchedule, tensors: Tensors) -> None:
        self.problem, self.how = problem, how
        self.shape = Shape("backward", how.isa, how.storage, how.vectors)
        self.items = _items(problem, tensors)
        words = how.words | _words(problem, tensors) | {
            "scratch_stride": how.scratch_stride, "gangs": how.gangs.ctypes.data, "gang_count": len(how.gangs),
            "item_count": len(self.items),
        }  # fmt: skip
        self.template = template_of(BACKWARD, words)
        self.words_type = ctypes.c_int64 * len(BACKWARD.names)
        pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
        flops = pairs * (6 * problem.head_dim + 4 * problem.value_dim) * (0.5 if problem.causal else 1.0)
        self.seconds = flops / (_GUESS * how.isa.lanes(how.storage) * self.shape.elements)
        self.threads = how.threads if self.seconds > _INLINE_SECONDS else 1

    def run(self, t: Tensors, sums: tuple[int, int, int]) -> None:
        """Fills dq, dk and dv; `sums` are addresses of those of dq, dk and dv."""
        if not self.how.tickets:
            return
        words = self.words_type.from_buffer_copy(self.template)
        progress = (ctypes.c_int64 * self.how.progress)()
        scratch = take_scratch(self.how.scratch_stride * self.threads)
        try:
            words[SCRATCH] = ctypes.addressof(scratch)
            words[CALL] = (
                t.q.address, t.k.address, t.v.address, t.out.address, t.lse.ctypes.data, 0, self.items.ctypes.data, 0, 0, 0
            )  # fmt: skip
            d_lse = 0 if t.d_lse is None else t.d_lse.ctypes.data
            words[GRADIENTS] = (
                t.d_out.address, d_lse, t.dq.address, t.dk.address, t.dv.address, *sums, ctypes.addressof(progress)
            )  # fmt: skip
            run_tickets(kernel_of(self.shape), words, self.how.tickets, self.threads, self.seconds)
        finally:
            give_scratch(scratch)


@standard
def differentiate(problem: Problem, tensors: Tensors, isa: Isa, threads: int) -> None:
    """Fills dq, dk and dv."""
    how = schedule_backward(problem, isa, threads, tensors)
    call = BackwardCall(problem, how, tensors)
    sums = _sums(problem, tensors)
    call.run(tensors, tuple(x if isinstance(x, int) else x.ctypes.data for x in sums))  # type: ignore[arg-type]


def _sums(problem: Problem, t: Tensors) -> list[Any]:
    """Where dq, dk and dv are summed: they themselves, or arrays of numbers beside them."""
    if problem.storage in ("f32", "f64"):
        return [x.address for x in (t.dq, t.dk, t.dv)]
    return [np.empty(x.shape, np.float32) for x in (t.dq, t.dk, t.dv)]


def _words(problem: Problem, t: Tensors) -> dict[str, int]:
    number, size = number_bytes(problem.storage), STORAGE_BYTES[problem.storage]
    words = {
        "lse_head": t.lse.strides[-2],
        "lse_row": number,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "group": problem.group,
        "causal": int(problem.causal),
        "scale": bits_of(problem.scale, number),
        "k_start": problem.k_start,
    }
    for name in ("q", "k", "v", "out", "d_out", "dq", "dk", "dv"):
        strides = getattr(t, name).strides
        if name[0] == "d" and name != "d_out":
            both = {name: strides, f"s{name[1]}": tuple(x // size * number for x in strides)}
            for each, these in both.items():
                words |= {x: y for x, y in steps(each, these, t.layout).items() if not x.endswith("column")}
        else:
            words |= steps(name, strides, t.layout)
    return words


def _items(problem: Problem, t: Tensors) -> np.ndarray:
    """The kernel's table of batch items, [item, word]."""
    number, size = number_bytes(problem.storage), STORAGE_BYTES[problem.storage]

    def offsets(x: Array, first: tuple[int, ...] | None) -> np.ndarray:
        if first is not None:
            return np.array(first, np.int64) * stride_of(x.strides, t.layout, -2)
        return np.arange(problem.batch, dtype=np.int64) * x.strides[LAYOUTS[t.layout][0]]

    of = {name: offsets(getattr(t, name), t.first_q) for name in ("q", "out", "d_out", "dq")}
    of |= {name: offsets(getattr(t, name), t.first_k) for name in ("k", "v", "dk", "dv")}
    lse = (
        np.array(t.first_q, np.int64) * number if t.first_q is not None else np.arange(problem.batch) * t.lse.strides[0]
    )
    starts = np.array(problem.q_starts, np.int64)
    columns = GradientItem(
        steps=np.array(_steps_of(problem), np.int64),
        ranges=np.maximum(1, -(-np.array(problem.k_lengths, np.int64) // _RANGE)),
        block=starts // QUERY_BLOCK,
        q_len=np.array(problem.q_lengths, np.int64),
        k_len=np.array(problem.k_lengths, np.int64),
        start=starts - problem.k_start,
        lse_at=lse,
        **{f"{name}_at": x for name, x in of.items()},
        **{f"s{x}_at": of[f"d{x}"] // size * number for x in "qkv"},
        index=np.arange(problem.batch) if problem.items is None else np.array(problem.items, np.int64),
    )
    return np.ascontiguousarray(np.stack(columns, axis=1))


def _up(n: int, step: int) -> int:
    return -(-n // step) * step
