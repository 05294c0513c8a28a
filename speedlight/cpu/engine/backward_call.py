"""Gradients: a request for them becomes calls of kernels, and what the host adds up itself."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.dtypes import STORAGE_BYTES
from ...arrays.making import empty_like
from ...arrays.memory import Array
from ...expressions.program import Program
from ...host.machine import Isa, current_isa, number_bytes
from ...host.rounding import standard
from ...host.shortcuts import address_of
from ...problem.build import Stated
from ...problem.gradients import SINKS, Asked
from ...problem.operands import Operands, Strides, step_of_items, stride_of
from ...problem.plan import Plan, Run, pair_flops, plan_of
from ...problem.problem import FAR_LSE, LAYOUTS, QUERY_BLOCK, Problem
from ..memory.operands import steps
from ..memory.records import BACKWARD, GRADIENTS, TABLES, GradientItem
from ..memory.shape import Kind, Shape
from ..runtime.compile import symbol_of
from ..runtime.launch import Launch, Words, give_scratch, threads_for, zeroed
from ..runtime.tuned import tuning_of
from .backward_schedule import (
    BackwardSchedule,
    Tickets,
    schedule_backward,
    steps_of,
    tickets_of,
    tickets_of_tables,
)
from .forward_call import bits_of, measured_roofs, program_of, signs_of, words_of_problem
from .table_sums import added, sums_of
from .term_sums import terms_of


class Gradients:
    """A prepared request for gradients, of arrays at any addresses."""

    def __init__(self, request: Asked, layout: GradientLayout, threads: int, isa: Isa) -> None:
        self.request, self.problem = request, request.problem
        self.letters, self.first_q = layout.letters, layout.first_q
        # like the arrays that are read and made, which nobody may keep
        self.arrays = [x.of(None, 0) for x in layout.arrays if x is not None]
        wants = tuning_of(isa).ranges
        self.unwritten = _unwritten(self.problem, layout)
        program, skew = program_of(self.problem, backward=True), 0
        self.sums = sums_of(self.problem, request.tables)
        self.terms = {} if self.sums is None else terms_of(self.problem, request.tables, threads, isa)
        self.places: tuple[Any, ...] = ()  # of arrays in mask and score, for each launch
        self.tables = None  # the call that adds to their gradients, where that of dq, dk and dv does not
        if self.sums is not None:
            if self.sums.beside(self.problem, program, threads, wants):
                tickets = tickets_of_tables(self.problem, self.sums.shares, by_positions=self.sums.one)
                self.tables = BackwardCall(self.problem, "tables", self.sums.program, layout, tickets, threads, isa)
            else:
                program, skew = self.sums.program, 0 if self.sums.alone else self.problem.group
        tickets = tickets_of(self.problem, threads, wants, skew=skew)
        self.call = BackwardCall(self.problem, "backward", program, layout, tickets, threads, isa)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return self.call.size + (0 if self.tables is None else self.tables.size)

    def keep_for(self, arrays: list[Any]) -> bool:
        """Makes it ready for other arrays in mask and score than those it was prepared with; False if it cannot be."""
        launches = [x.launch for x in (self.call, self.tables) if x is not None]
        places = [x.places_of(arrays) for x in launches]
        if None in places:
            return False
        for launch in launches:
            launch.release_tables(arrays)
        self.places = tuple(zip(launches, places, strict=True))
        return True

    def tables_at(self, arrays: list[Any], lie: list[Any]) -> list[Any]:
        """Returns the words of tables for arrays that lie elsewhere, of each kernel; as Launch.tables_at()."""
        return [launch.tables_at(places, arrays, lie) if arrays else () for launch, places in self.places]

    def run(self, x: Operands, seed: int | None = None, arrays: list[Any] | None = None) -> tuple[np.ndarray, ...]:
        """Fills dq, dk and dv, or adds to them; returns the further gradients that are asked for. seed: the caller's,
        if given. arrays: what tables_at() gave.
        """
        for name in self.unwritten:
            getattr(x, name).numpy()[...] = 0
        count = 1 if self.tables is None else self.tables.how.tickets.progress
        found, shares, held = ({}, None, ()) if self.sums is None else self.sums.new(self.problem, count, self.terms)
        narrow = () if self.problem.storage in ("f32", "f64") or self.problem.partial else (x.dq, x.dk, x.dv)
        beside = [np.empty(a.shape, np.float32) for a in narrow]  # where they are summed
        sums = [address_of(a) for a in beside] or [x.dq.address, x.dk.address, x.dv.address]
        self.call.run(x, sums, seed, shares if self.tables is None else None, tables=arrays[0] if arrays else None)
        if self.tables is not None:
            self.tables.run(x, [x.dq.address] * 3, seed, shares, tables=arrays[1] if arrays else None)
        tables = {at: self._narrowed(added(each)) for at, each in found.items()}
        for at, terms in self.terms.items():
            if address_of(tables[at]) != address_of(found[at]):  # a sum of shares, or rounded
                found[at][...] = 0
            tables[at] = terms.add(tables[at])
        for scratch in held:
            give_scratch(scratch, zeroed)
        return tuple([self._narrowed(self._sinks(x)) if y == SINKS else tables[id(y)] for y in self.request.grads])

    @standard
    def _sinks(self, x: Operands) -> np.ndarray:
        """Returns the gradient of each head's sink, a key that all rows see and whose value is zeros: - Σ p · delta."""
        problem = self.problem
        assert problem.sinks is not None
        result = np.zeros(problem.q_heads)
        far = FAR_LSE["float64" if problem.storage == "f64" else "float32"]
        for item in range(problem.batch):
            for head, sink in enumerate(problem.sinks):
                out, lse, d_out = (self._rows(a, item, head) for a in (x.out, x.lse, x.d_out))
                d_lse = 0.0 if x.d_lse is None else self._rows(x.d_lse, item, head)
                seen = (lse != -np.inf) & (sink != -np.inf)
                with np.errstate(all="ignore"):
                    delta = (out * d_out).sum(axis=-1) - d_lse
                    exponents = sink - lse
                    exponents = np.where(np.abs(lse) >= far, np.minimum(exponents, 0.0), exponents)  # as of keys
                    result[head] -= (np.exp(exponents) * delta)[seen].sum()
        return result

    def _rows(self, x: Array, item: int, head: int) -> np.ndarray:
        """Returns the rows of an array, or log-sum-exps, for the queries of an item, in float64."""
        first = 0 if self.first_q is None else self.first_q[item]
        rows = slice(first, first + self.problem.q_lengths[item])
        at: list[Any] = [item, head, rows][-len(self.letters) + 1 :]
        if x.name not in ("lse", "d_lse"):
            heads, length, _ = LAYOUTS[self.letters][-3:]
            at[heads], at[length] = head, rows
        return np.asarray(x.numpy()[tuple(at)], np.float64)

    @standard
    def sum_items(self, x: Array) -> Any:
        """Adds gradients of keys that items share: each item's rounded, added in float64, ascending; rounded once."""
        each = x.numpy()
        total = np.zeros((1, *each.shape[1:]))
        with np.errstate(all="ignore"):
            for item in each:
                total += item
            total = total if x.dtype == "float64" else total.astype(np.float32)
            result, to = empty_like(x, total.shape, x.dtype, ordered=True)
            to.numpy()[...] = total
        return result

    @standard
    def _narrowed(self, x: np.ndarray) -> np.ndarray:
        """Rounds a sum to the dtype that is returned."""
        kind = np.float64 if self.problem.storage == "f64" else np.float32
        if x.dtype == kind:
            return x
        with np.errstate(all="ignore"):
            return x.astype(kind)


@standard
def prepare(request: Asked, layout: str, stated: Stated, arrays: Operands, threads: int, isa: Isa) -> Gradients:
    """Prepares everything that addresses don't change."""
    first_q, first_k = (x and x[:-1] for x in (stated.cu_q, stated.cu_k))
    return Gradients(request, GradientLayout(layout, arrays, first_q, first_k), threads, isa)


def plan(problem: Problem, strides: Strides, threads: int, *, exact: bool = False) -> Plan:
    """Returns the plan of a backward call on this machine."""
    how, shape = kernel_of_problem(problem, strides, threads, current_isa())
    workspace = how.workspace_bytes + _sum_bytes(problem)
    run = Run(how.isa.name, symbol_of(shape), how.threads, shape.panel, workspace, how.tuning.origin, backward=True)
    measured = partial(measured_roofs, how.isa, problem.storage, how.threads, gradients=True)
    return plan_of(problem, run, measured, exact=exact)


def kernel_of_problem(problem: Problem, strides: Strides, threads: int, isa: Isa) -> tuple[BackwardSchedule, Shape]:
    """Returns a backward call's schedule and its kernel's shape; for any vector unit, this machine's or not."""
    program, tuning = program_of(problem, backward=True), tuning_of(isa)
    tickets = tickets_of(problem, threads, tuning.ranges)
    how = schedule_backward(problem, isa, strides, program, tickets, threads, tuning)
    return how, shape_of(problem, "backward", program, how)


def _sum_bytes(problem: Problem) -> int:
    """Returns the bytes of the sums of dq, dk and dv, where they are of more bits than the arrays."""
    if problem.storage in ("f32", "f64"):
        return 0
    rows, keys = sum(problem.q_lengths) * problem.q_heads, sum(problem.k_lengths) * problem.kv_heads
    return 4 * (rows * problem.head_dim + keys * (problem.head_dim + problem.value_dim))


def _unwritten(problem: Problem, layout: GradientLayout) -> list[str]:
    """Names the gradients with rows that no task writes: of queries past q_lengths, of keys that no query is beside."""
    if problem.partial:  # which are added to
        return []
    length, batch = LAYOUTS[layout.letters][-2], problem.batch if len(layout.letters) == 4 else 1
    rows, keys = (x.shape[length] * batch for x in (layout.arrays.q, layout.arrays.k))
    alone = [a == 0 < b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)]
    names = ["dq"] if sum(problem.q_lengths) < rows else []
    return names + (["dk", "dv"] if sum(problem.k_lengths) < keys or True in alone else [])


# --- arrays, arguments and items


class GradientLayout(NamedTuple):
    """The layout of the arrays of a backward pass."""

    letters: str  # one of LAYOUTS
    arrays: Operands
    first_q: tuple[int, ...] | None  # of each packed sequence, its first row in q and in k
    first_k: tuple[int, ...] | None

    def step(self, name: str, axis: int) -> int:
        """Returns a stride in bytes, as stride_of gives it."""
        return stride_of(getattr(self.arrays, name).strides, self.letters, axis)

    def strides(self, storage: str) -> Strides:
        """Returns what a schedule wants to know of strides."""
        size = STORAGE_BYTES[storage]
        return Strides(self.step("k", -1) != size, self.step("v", -1) != size)

    def offsets(self, name: str, batch: int) -> np.ndarray:
        """Returns the bytes from an array's address to each item."""
        first = self.first_k if name in ("k", "v", "dk", "dv") else self.first_q
        if first is not None:
            return np.array(first, np.int64) * self.step(name, -2)
        return np.arange(batch, dtype=np.int64) * step_of_items(getattr(self.arrays, name), self.letters)


def shape_of(problem: Problem, kind: Kind, program: Program | None, how: BackwardSchedule) -> Shape:
    """Returns what the kernel of a pass is specialised for."""
    of_tiles = {"own_tiles": how.tuning.register_tiles(how.isa), "dropout": problem.dropout > 0}
    return Shape(kind, how.isa, how.storage, how.vectors, program, **of_tiles, partial=problem.partial)


class BackwardCall:
    """A pass back through attention with layouts and strides fixed: only addresses are missing.

    Never changed once it is used.
    """

    def __init__(
        self, problem: Problem, kind: Kind, program: Program | None, layout: GradientLayout, tickets: Tickets,
        threads: int, isa: Isa,
    ) -> None:  # fmt: skip
        strides = layout.strides(problem.storage)
        how = schedule_backward(problem, isa, strides, program, tickets, threads, tuning_of(isa))
        self.problem, self.how, self.items = problem, how, _items(problem, layout, tickets.words["range_keys"])
        self.items_at = self.items.ctypes.data
        shape, wants = shape_of(problem, kind, program, how), how.tuning.threading
        words = how.words | _words(problem, layout, shape.elements) | {"scratch_stride": how.scratch_stride}
        seconds = _guessed_seconds(problem, how, shape.elements)
        threads = threads_for(seconds, how.threads, wants)
        self.launch = Launch(shape, BACKWARD, words, how.tickets.number, threads, seconds, wants, program=program)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        return self.items.nbytes + self.how.tickets.table.nbytes + self.launch.size

    def run(
        self, x: Operands, sums: list[int], seed: int | None, shares: np.ndarray | None = None, counts: int = 0,
        tables: Any = None,
    ) -> None:  # fmt: skip
        """Fills the gradients. sums: addresses where dq, dk and dv are summed. shares: where gradients of tables are.
        seed: the caller's, if given. counts: an address of COUNTS, which then are counted. tables: of
        Launch.tables_at().
        """
        lse, d_lse = x.lse.whole(), None if x.d_lse is None else x.d_lse.whole()
        progress = (ctypes.c_int64 * self.how.tickets.progress)()
        call = x.q.address, x.k.address, x.v.address, x.out.address, lse.address, counts, self.items_at
        gradients = (
            x.d_out.address, 0 if d_lse is None else d_lse.address, x.dq.address, x.dk.address, x.dv.address, *sums,
            ctypes.addressof(progress), 0 if shares is None else address_of(shares),
        )  # fmt: skip
        more: tuple[Words, ...] = ((GRADIENTS, gradients),)
        if tables:
            more += ((TABLES, (ctypes.addressof(tables[0]),)),)
        self.launch.run_in_scratch(call, self.problem.seed if seed is None else seed, more)


def _guessed_seconds(problem: Problem, how: BackwardSchedule, elements: int) -> float:
    """Guesses how long one thread takes."""
    pairs = sum(a * b for a, b in zip(problem.q_lengths, problem.k_lengths, strict=True)) * problem.q_heads
    flops = pairs * pair_flops(problem, backward=True) * (0.5 if problem.causal else 1.0)
    return flops / (how.tuning.threading.backward_flops * how.isa.lanes(how.storage) * elements)


def _gradient_bytes(problem: Problem) -> int:
    """Returns the bytes of an element of dq, dk or dv in memory."""
    return number_bytes(problem.storage) if problem.partial else STORAGE_BYTES[problem.storage]


def _words(problem: Problem, layout: GradientLayout, elements: int) -> dict[str, int]:
    number, size = number_bytes(problem.storage), _gradient_bytes(problem)
    words = words_of_problem(problem, _lse_rows(layout)) | {
        "c": bits_of(abs(problem.scale), number),  # a score's own arithmetic wants it with its sign
        "flip": signs_of(number, elements) if problem.score is None and problem.scale < 0 else 0,
        "drop_factor": bits_of(1.0 / problem.dropout_divisor, number),
    }
    for name in ("q", "k", "v", "out", "d_out"):
        words |= steps(name, getattr(layout.arrays, name).strides, layout.letters)
    for name in ("q", "k", "v"):
        for part, axis in (("head", -3), ("row", -2)):
            step = layout.step(f"d{name}", axis)
            words |= {f"d{name}_{part}": step, f"s{name}_{part}": step // size * number}
    return words


def _lse_rows(layout: GradientLayout) -> int:
    """Returns the stride of heads in log-sum-exps, in numbers."""
    return layout.arrays.lse.shape[-1]


def _items(problem: Problem, layout: GradientLayout, range_keys: int) -> np.ndarray:
    """Returns the kernel's table of batch items, [item, word]."""
    number, size = number_bytes(problem.storage), _gradient_bytes(problem)
    names = ("q", "k", "v", "out", "d_out", "dq", "dk", "dv")
    at = {f"{name}_at": layout.offsets(name, problem.batch) for name in names}
    if layout.first_q is not None:
        lse = np.array(layout.first_q, np.int64) * number
    else:
        lse = np.arange(problem.batch) * (problem.q_heads * _lse_rows(layout) * number)
    starts = np.array(problem.q_starts, np.int64)
    columns = GradientItem(
        steps=np.array(steps_of(problem), np.int64),
        ranges=np.maximum(1, -(-np.array(problem.k_lengths, np.int64) // range_keys)),
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
