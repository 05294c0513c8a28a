"""What every kernel starts with: the region that draws tickets, and the lookup of a ticket's batch item."""

from __future__ import annotations

from typing import Any

from ..machine import Isa
from .fields import ITEM, field
from .vector import I32, I64, PTR, VOID, Function, Module, Value


class Work:
    """Names for the arguments of the function that does one ticket."""

    def __init__(self, k: Function) -> None:
        self.k, self.scratch = k, k.p["scratch"]

    def get(self, name: str) -> Value:
        return self.k.load(I64, self.k.p["a"], field(name), align=8)

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
    """The public function: the caller's rounding mode and flush-to-zero are put aside around the region."""
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
    return k.finish()
