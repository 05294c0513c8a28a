"""What every kernel starts with: the region that draws tickets, and the lookup of a ticket's batch item."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ..machine import Isa
from ..planning import SPAN
from .layout import ITEM, field
from .vector import I32, I64, PTR, VOID, Function, Module, Value

_Pair = tuple[Value, Value]


class Work:
    """Names for the arguments of the function that does one ticket."""

    def __init__(self, k: Function) -> None:
        self.k, self.scratch = k, k.p["scratch"]

    def get(self, name: str) -> Value:
        return self.k.load(I64, self.k.p["a"], field(name), align=8)

    @contextlib.contextmanager
    def stretches(
        self, first: Value, last: Value, hidden: Callable[[Value, Value], Value] | None
    ) -> Iterator[tuple[Value, Value]]:
        """The spans of keys [first, last) that may be visible.

        Where all are hidden, steps double, and halve before what is not.
        """
        k = self.k
        if hidden is None:
            with k.range(first, last, SPAN) as start:
                yield start, k.min(start + SPAN, last)
            return
        at, step = k.variable(first), k.variable(k.i64(SPAN))
        with k.forever() as leave_if:
            leave_if(at.get() >= last)
            start = at.get()
            end = k.min(start + step.get(), last)
            with k.either(hidden(start, end)) as (skip, maybe):
                with skip:
                    at.set(end)
                    step.set(step.get() << 1)
                with maybe, k.either(step.get() > SPAN) as (far, near):
                    with far:
                        step.set(step.get() >> 1)
                    with near:
                        yield start, end
                        at.set(end)

    def seen_of(self, visibility: Any, index: Value, heads: _Pair, box: _Pair, low: Value, high: Value) -> Value:
        """Whether keys [low, high) are hidden from (0), partly visible to (1) or visible to (2) a box of heads and
        positions.
        """
        offset = self.get("k_start")
        return self.k.call(visibility, self.k.p["a"], index, *heads, *box, low + offset, high - 1 + offset)

    def extent_of(
        self, extent: Any, seen: Value, index: Value, heads: _Pair, box: _Pair, start: Value, count: Value
    ) -> tuple[Value, Value, Value]:
        """Which of `count` keys may be seen at all, from and to, and up to where by all; `seen` as seen_of says of
        them.
        """
        k = self.k
        packed = k.variable(k.select(seen.equals(0), k.i64(0), count << 8 | count << 16))
        with k.when(seen.equals(1)):
            packed.set(k.call(extent, k.p["a"], index, *heads, *box, start + self.get("k_start"), count))
        word = packed.get()
        return word & 255, (word >> 8) & 255, word >> 16

    def item(self) -> dict[str, Value]:
        """The words of the last batch item whose first ticket is not above ours, by bisection."""
        k, items = self.k, self.k.pointer(self.get("items"))
        low, high = k.variable(k.i64(0)), k.variable(self.get("item_count"))
        with k.forever() as leave_if:
            leave_if(high.get() - low.get() <= 1)
            middle = (low.get() + high.get()) >> 1
            before = k.load(I64, items, middle * (8 * len(ITEM))) <= k.p["number"]
            low.set(k.select(before, middle, low.get()))
            high.set(k.select(before, high.get(), middle))
        at = k.at(items, low.get() * (8 * len(ITEM)))
        return {name: k.load(I64, at, 8 * i) for i, name in enumerate(ITEM)}


def region(module: Module, task: Any) -> Any:
    """A worker's share: a scratch of its own, then task after task until the region's limit."""
    k = module.function("region", {"a": PTR})
    a = k.p["a"]

    def get(name: str) -> Value:
        return k.load(I64, a, field(name), align=8)

    worker = k.fetch_add(a, field("worker"), 1)
    scratch = k.at(k.pointer(get("scratch")), worker * get("scratch_stride"))
    with k.forever() as leave_if:
        ticket = k.fetch_add(a, field("ticket"), 1)
        leave_if(ticket >= get("limit"))
        k.call(task, a, scratch, ticket)
    k.fetch_add(a, field("left"), 1)
    return k.finish()


def entry(module: Module, isa: Isa, run: Any, symbol: str) -> Any:
    """The public functions, `symbol` and what `joined` makes of it: the caller's rounding mode and flush-to-zero are
    put aside.
    """
    k = module.function(symbol, {"a": PTR}, public=True)
    if isa.arch == "x86_64":
        with k.b.goto_entry_block():
            saved, ours = Value(k, k.b.alloca(I32)), Value(k, k.b.alloca(I32))
        k.intrinsic("llvm.x86.sse.stmxcsr", VOID, saved)
        k.store(k.const(0x1F80, I32), ours)
        k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, ours)
        k.call(run, k.p["a"])
        k.intrinsic("llvm.x86.sse.ldmxcsr", VOID, saved)
    else:
        saved = k.intrinsic("llvm.aarch64.get.fpcr", I64)
        k.intrinsic("llvm.aarch64.set.fpcr", VOID, k.i64(0))
        k.call(run, k.p["a"])
        k.intrinsic("llvm.aarch64.set.fpcr", VOID, saved)
    share = k.finish()
    joined(module, share, symbol)
    return share


def joined(module: Module, share: Any, symbol: str) -> None:
    """The public function `symbol`_joined: a share of the region, then a wait until nobody is inside.

    One call for both, because Python sees signals between calls only. Who comes later finds no ticket and touches the
    words alone.
    """
    k = module.function(f"{symbol}_joined", {"a": PTR}, public=True)
    a = k.p["a"]
    k.call(share, a)
    with k.forever() as leave_if:
        left = k.fetch_add(a, field("left"), 0)  # before `worker`: then all who had come by that time have left
        leave_if(left.equals(k.fetch_add(a, field("worker"), 0)))
        if sys.platform != "win32":
            k.intrinsic("sched_yield", I32)
    k.finish()
