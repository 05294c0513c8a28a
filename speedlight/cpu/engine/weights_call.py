"""Weights of keys: a request for them becomes a call of their kernel."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ...arrays.memory import Array
from ...expressions.program import Program
from ...host.machine import PRODUCTS, Isa, number_bytes
from ...host.rounding import standard
from ...host.tunings import Tuning
from ...problem.build import Stated
from ...problem.key_weights import WeightRequest
from ...problem.operands import Dense, step_of_items, stride_of
from ...problem.problem import QUERY_BLOCK, TILE, Problem
from ..memory.operands import steps
from ..memory.records import (
    PROGRESS,
    REDUCTIONS,
    WEIGHT_PAIRS,
    WEIGHT_PANEL,
    WEIGHT_SCRATCH,
    WEIGHT_STEPS,
    WEIGHTS,
    WeightItem,
    WeightSizes,
    placed,
)
from ..memory.shape import Shape
from ..runtime.launch import Launch, threads_for
from ..runtime.tuned import tuning_of
from .backward_schedule import ROW_SLACK, range_of, staged_of, steps_of, vectors_of
from .forward_call import bits_of, program_of, signs_of, words_of_problem
from .schedule import product_name, up


class WeightArrays(NamedTuple):
    """Arrays of a call, read and written."""

    q: Array
    k: Array
    lse: Array
    out: Array  # zeros, which are reduced into


class _Schedule(NamedTuple):
    """The way in which the kernel is run."""

    words: dict[str, int]
    vectors: int
    scratch_bytes: int
    tickets: int
    tasks: int  # that may be worked on at once


@standard
def fill(
    request: WeightRequest, layout: str, stated: Stated, arrays: WeightArrays, threads: int, isa: Isa
) -> None:  # fmt: skip
    """Fills the result of a request."""
    problem, tuning = request.problem, tuning_of(isa)
    program = program_of(problem)
    how = _schedule(problem, isa, layout, arrays, tuning, threads)
    items, numbers = _items(request, layout, stated, arrays)
    elements = PRODUCTS[product_name(problem, isa, gradients=True)].elements
    words = how.words | _words(request, layout, arrays, elements)
    words |= {"scratch_stride": how.scratch_bytes + tuning.threading.apart}
    shape = _shape_of(problem, isa, program, how.vectors, tuning)
    seconds = _guessed_seconds(problem, tuning, isa, elements)
    used = threads_for(seconds, max(1, min(threads, how.tasks)), tuning.threading)
    launch = Launch(shape, WEIGHTS, words, how.tickets, used, seconds, tuning.threading, program=program)
    progress = (ctypes.c_int64 * max(1, how.tasks))()
    lse = arrays.lse.whole()
    call = (arrays.q.address, arrays.k.address, 0, arrays.out.address, lse.address, 0, items.ctypes.data)
    launch.run_in_scratch(call, 0, ((PROGRESS, (ctypes.addressof(progress),)),))
    del numbers  # whose addresses the items have
    if request.rows:
        request.repeat_rows(arrays.out.numpy())


def _shape_of(problem: Problem, isa: Isa, program: Program | None, vectors: int, tuning: Tuning) -> Shape:
    """Returns what the kernel is specialised for."""
    return Shape("weights", isa, problem.storage, vectors, program, own_tiles=tuning.register_tiles(isa))


def _schedule(
    problem: Problem, isa: Isa, layout: str, arrays: WeightArrays, tuning: Tuning, threads: int
) -> _Schedule:  # fmt: skip
    """Schedules panels, ranges of keys and scratch."""
    vectors, lanes, number = vectors_of(problem, isa), isa.lanes(problem.storage), number_bytes(problem.storage)
    elements = PRODUCTS[product_name(problem, isa, gradients=True)].elements
    strides = Dense(layout, arrays.k, arrays.k).strides(problem.dtype)
    is_staged = staged_of(problem, strides, elements)["k"]
    units, panel = -(-problem.head_dim // elements), lanes * vectors
    sizes = WeightSizes(number, panel, lanes, TILE + ROW_SLACK, units, is_staged * TILE * units * number)
    scratch, fixed = placed(WEIGHT_SCRATCH, sizes)
    pairs, _ = placed(WEIGHT_PAIRS, sizes)
    offsets, panel_bytes = placed(WEIGHT_PANEL, sizes)
    columns, panels = problem.batch * problem.kv_heads, QUERY_BLOCK // panel
    keys = range_of(problem, threads, columns, tuning.ranges)
    ranges = max(1, -(-max(problem.k_lengths, default=0) // keys))
    turns = -(-max(steps_of(problem), default=0) // WEIGHT_STEPS)
    words = {
        "columns": columns, "kv_heads": problem.kv_heads, "ranges": ranges, "range_keys": keys, "panels": panels,
        "panel_bytes": panel_bytes, "pair_bytes": 0, "k_staged": int(is_staged),
    }  # fmt: skip
    words |= {f"at_{name}": at for name, at in (scratch | pairs | offsets).items()}
    used = up(fixed + panels * panel_bytes, 4096)
    return _Schedule(words, vectors, used, columns * ranges * turns, columns * ranges)


def _guessed_seconds(problem: Problem, tuning: Tuning, isa: Isa, elements: int) -> float:
    """Guesses how long one thread takes."""
    pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
    flops = 2 * pairs * problem.head_dim * (0.5 if problem.causal else 1.0)
    return flops / (tuning.threading.backward_flops * isa.lanes(problem.storage) * elements)


def _words(request: WeightRequest, layout: str, arrays: WeightArrays, elements: int) -> dict[str, int]:
    """Returns the arguments that the problem and strides say."""
    problem, number = request.problem, number_bytes(request.problem.storage)
    words = words_of_problem(problem, arrays.lse.shape[-1]) | {
        "c": bits_of(abs(problem.scale), number),  # a score's own arithmetic wants it with its sign
        "flip": signs_of(number, elements) if problem.score is None and problem.scale < 0 else 0,
        "reduction": REDUCTIONS.index(request.reduction),
        "out_row": request.shape[-1] * number,
        "out_head": request.shape[-1] * (request.shape[-2] if request.reduction == "rows" else 1) * number,
    }
    for name, x in (("q", arrays.q), ("k", arrays.k)):
        words |= steps(name, x.strides, layout)
    return words


def _items(
    request: WeightRequest, layout: str, stated: Stated, arrays: WeightArrays
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    """Returns the kernel's table of batch items, [item, word], and the numbers of rows that it has the addresses of."""
    problem, number = request.problem, number_bytes(request.problem.storage)
    q_row, k_row = (stride_of(x.strides, layout, -2) for x in (arrays.q, arrays.k))
    items, skipped = np.arange(problem.batch, dtype=np.int64), np.array(request.skipped, np.int64)
    if stated.cu_q is None or stated.cu_k is None:
        first_q = items * step_of_items(arrays.q, layout)
        first_k = items * step_of_items(arrays.k, layout)
        first_lse = items * (problem.q_heads * arrays.lse.shape[-1] * number)
        first_out = items * (arrays.out.numpy()[0].nbytes if len(layout) == 4 and problem.batch else 0)
    else:
        of_q, of_k = (np.array(x[:-1], np.int64) for x in (stated.cu_q, stated.cu_k))
        first_q, first_k, first_lse, first_out = of_q * q_row, of_k * k_row, of_q * number, of_k * number
    numbers = [request.numbers(item) for item in items.tolist()] if request.rows else []
    starts = np.array(problem.q_starts, np.int64)
    columns = WeightItem(
        steps=np.array(steps_of(problem), np.int64),
        block=starts // QUERY_BLOCK,
        q_len=np.array(problem.q_lengths, np.int64),
        k_len=np.array(problem.k_lengths, np.int64),
        start=starts - problem.k_start,
        q_at=first_q + skipped * q_row,
        k_at=first_k,
        out_at=first_out,
        lse_at=first_lse + skipped * number,
        rows=np.array([x.ctypes.data for x in numbers], np.int64) if numbers else np.zeros(problem.batch, np.int64),
        index=items if problem.items is None else np.array(problem.items, np.int64),
    )
    return np.ascontiguousarray(np.stack(columns, axis=1)), numbers
