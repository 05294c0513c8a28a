"""The kernel that adds the gradients of entries that items or heads share: of each, one term from every item or head.

A ticket is a run of entries side by side. Their terms are taken in ascending order, in groups, the shares of
docs/numerics.md: a group is added in float64, from +0, and so are the groups; the sum is rounded once. Terms are zeroed
once they are read, for the next call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...arrays.dtypes import STORAGE_BYTES
from ...host.machine import Isa
from ..language.conversions import load_f64, store_f64
from ..language.vector import F64, I64, PTR, Function, Module, Value, vec
from ..memory.records import HEAD, Record
from ..memory.words import Words
from .task import entry, region

_VECTORS = 4  # vectors of entries that are added together

ARGUMENTS = Record(*HEAD, "terms", "step", "out", "runs")  # step: bytes from a term to the next
# bytes from the first term, and from `out`; how many entries; the address of the groups' sizes, and how many
RUN = Record("at", "to", "entries", "groups", "count")
TERMS, OUT = ARGUMENTS.word("terms"), ARGUMENTS.word("out")


@dataclass(frozen=True, slots=True)
class TermShape:
    """The specialisation of the kernel: sizes and strides are arguments."""

    isa: Isa
    storage: str  # f32, f64
    kind: ClassVar[str] = "terms"

    @property
    def stem(self) -> str:
        return f"terms_{self.storage}_{self.isa.name}"


def terms_module(s: TermShape, symbol: str) -> Module:
    module = Module(symbol)
    k = module.function("task", {"a": PTR, "scratch": PTR, "number": I64})
    a = Words(k, ARGUMENTS, k.p["a"])
    run = Words(k, RUN, k.at(k.pointer(a.runs), k.p["number"] * RUN.bytes))
    lanes, size, entries = s.isa.vector_bytes // 8, STORAGE_BYTES[s.storage], run.entries
    for first, end, vectors, of_each in _pieces(k, entries, lanes):
        with k.range(first, end, vectors * max(1, of_each)) as at:
            _add(k, s, a, run, at * size, vectors, of_each)
    entry(module, s.isa, region(module, k.finish()), symbol)
    return module


def _pieces(k: Function, entries: Value, lanes: int) -> list[tuple[Value, Value, int, int]]:
    """Returns from where to where so many vectors of so many lanes are taken at once; 0 lanes: one number."""
    wide, whole = entries // (_VECTORS * lanes) * (_VECTORS * lanes), entries // lanes * lanes
    return [(k.i64(0), wide, _VECTORS, lanes), (wide, whole, 1, lanes), (whole, entries, 1, 0)]


def _add(k: Function, s: TermShape, a: Words, run: Words, first: Value, vectors: int, lanes: int) -> None:
    """Adds the terms of the entries that are `first` bytes into a run."""
    nothing = k.const(0.0, vec(F64, lanes) if lanes else F64)
    step, groups, apart = a.step, k.pointer(run.groups), lanes * STORAGE_BYTES[s.storage]
    totals, at = [k.variable(nothing) for _ in range(vectors)], k.variable(a.terms + run.at + first)
    with k.range(0, run.count) as group:
        sums = [k.variable(nothing) for _ in range(vectors)]
        with k.range(0, k.load(I64, groups, group * 8)):
            for n, x in enumerate(sums):
                x.set(x.get() + load_f64(k, s.storage, k.pointer(at.get()), n * apart, lanes))
                store_f64(k, s.storage, nothing, k.pointer(at.get()), n * apart)
            at.set(at.get() + step)
        for total, x in zip(totals, sums, strict=True):
            total.set(total.get() + x.get())
    for n, total in enumerate(totals):
        store_f64(k, s.storage, total.get(), k.pointer(a.out + run.to + first), n * apart)
