"""The loop that threads of ours run, and the hand-over of a region to them, as LLVM. Linux.

The block is what they look at. Its `state` is a generation (the low half, a futex), how many seats are free in the
region of that generation, and whether the region is open. Who takes a seat runs the kernel on the words and counts
itself in `left`. The caller works as well. When it finds no more tickets it closes the region, with what seats are
left, and waits for those that were taken. So a thread that comes late finds no seat, and reads nothing but the block.

Between regions a thread looks at the state for a while, then sleeps. Of many that sleep the caller wakes a few, which
wake others. Block and code are never freed: threads sleep in them as long as the process lives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from llvmlite import ir

from ...host.machine import Isa
from ...host.tunings import MANY, WAKES
from ..language.vector import I32, I64, PTR, VOID, Function, Module, Value
from ..memory.records import Record
from .task import call_at, pause

# Nanoseconds that a thread looks out for the next region after the end of one, and for that end, before it sleeps.
# Python takes 10 to 60 µs from one short call to the next: of 50 some sleep, of 20 a third (docs/ladder.md).
_SPIN, _LAST = 100_000, 1_000_000
_FEW = 7  # threads that are kept off the caller's CPU; of more, one that shares it hardly matters
_MASK = 16  # words of a set of CPUs
# signals that are kept from threads: all but faults, and but three that C libraries use
_QUIET = ~sum(1 << n - 1 for n in (4, 5, 6, 7, 8, 11, 31, 32, 33, 34))
LIBC = (  # what the module calls; where one is missing, LLVM would end the process
    "clock_gettime", "pthread_create", "pthread_getcpuclockid", "pthread_self", "pthread_setaffinity_np",
    "pthread_sigmask", "sched_getaffinity", "sched_getcpu", "sched_yield", "syscall",
)  # fmt: skip
_SYSCALL_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_MONOTONIC = 1  # CLOCK_MONOTONIC
_SEAT, _SEATS, _OPEN = 1 << 32, (1 << 30) - 1, 1 << 62  # in `state`, beside the generation


def _line(name: str) -> tuple[str, ...]:
    """Names a word on a cache line of its own."""
    return (name, *(f"{name}_pad{i}" for i in range(7)))


BLOCK = Record(
    *_line("state"), *_line("left"), *_line("sleeping"),
    # `apart`: the CPU that threads are kept off; -1: none. `wakes`: how many others each wakes that slept
    "kernel", "words", "started", "apart", "wakes",
    *(f"mask{i}" for i in range(_MASK)), *(f"thread{i}" for i in range(_FEW + 1)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServingShape:
    """The specialisation of the module: an architecture, by its least vector unit."""

    isa: Isa
    kind: ClassVar[str] = "serving"

    @property
    def stem(self) -> str:
        return f"serving_{self.isa.arch}"


def serving_module(s: ServingShape, symbol: str) -> Module:
    module = Module(symbol)
    emit = _Emit(module, s.isa)
    now = emit.now()
    served = emit.serve(emit.rest(now))
    ours, started, awake = emit.ours(emit.keep_apart()), emit.start(served), emit.awake(now)
    emit.region(symbol, ours, started, awake)
    emit.clock(f"{symbol}_clock", emit.noting())
    return module


class _Emit:
    """Functions of the module, one after another; each has those that it calls as arguments."""

    def __init__(self, module: Module, isa: Isa) -> None:
        self.module, self.isa = module, isa

    def function(self, name: str, *params: str, returns: ir.Type = VOID, **kind: bool) -> Function:
        types = dict.fromkeys(params, I64) | {x: PTR for x in params if x in ("block", "words")}
        return self.module.function(name, types, returns, **kind)

    def now(self) -> Any:
        """now(clock): in nanoseconds; -1 if there is no such clock."""
        k = self.function("now", "clock", returns=I64)
        time = k.buffer(I64, 2)
        failed = k.intrinsic("clock_gettime", I32, k.trunc(k.p["clock"], I32), time).differs(0)
        passed = k.load(I64, time) * 1_000_000_000 + k.load(I64, time, 8)
        return k.finish(k.select(failed, k.i64(-1), passed))

    def awake(self, now: Any) -> Any:
        """awake(clock): 1 if a thread's clock runs, 0 if it rests or is not there."""
        k = self.function("awake", "clock", returns=I64)
        before = k.call(now, k.p["clock"])
        return k.finish(k.zext(k.call(now, k.p["clock"]) > before, I64))

    def rest(self, now: Any) -> Any:
        """rest(block, seen): until there may be another generation."""
        k = self.function("rest", "block", "seen")
        block, seen = k.p["block"], k.p["seen"]
        begin = k.call(now, k.i64(_MONOTONIC))
        end, state = k.variable(begin + _SPIN), k.variable(seen)
        with k.forever() as leave_if:
            with k.range(0, 8):
                pause(k, self.isa)
            time = k.call(now, k.i64(_MONOTONIC))
            state.set(_load(k, block, "state"))
            end.set(k.select((state.get() & _OPEN).differs(0), time + _SPIN, end.get()))
            leave_if(_generation(state.get()).differs(seen) | (time > k.min(end.get(), begin + _LAST)))
        with k.when(_generation(state.get()).equals(seen)):
            k.fetch_add(block, BLOCK.offset("sleeping"), 1)
            self.futex(k, block, _WAIT, seen)
            k.fetch_add(block, BLOCK.offset("sleeping"), -1)
            wakes = k.load(I64, block, BLOCK.offset("wakes"))
            more = (_seats(_load(k, block, "state")) > 0) & (_load(k, block, "sleeping") > 0)
            with k.when(more & (wakes > 0)):
                self.futex(k, block, _WAKE, wakes)
        return k.finish()

    def serve(self, rest: Any) -> Any:
        """serve(block): a thread's life."""
        k = self.function("serve", "block", returns=PTR)
        block, seen, taken = k.p["block"], k.variable(k.i64(0)), k.variable(k.i64(0))
        quiet = k.buffer(I64, _MASK)
        for i in range(_MASK):
            k.store(k.i64(0 if i else _QUIET), quiet, 8 * i)
        k.intrinsic("pthread_sigmask", I32, k.const(2, I32), quiet, k.pointer(k.i64(0)))
        with k.forever():
            state = _load(k, block, "state")
            generation = _generation(state)
            with k.either(generation.equals(seen.get())) as (old, new):
                with old:
                    k.call(rest, block, seen.get())
                with new:
                    seats = _seats(state)
                    taken.set(k.i64(0))
                    with k.when(seats.differs(0)):
                        taken.set(_exchange_if(k, block, "state", state, state - _SEAT))
                    with k.when(taken.get().differs(0)):
                        call_at(
                            k, k.load(I64, block, BLOCK.offset("kernel")), k.load(PTR, block, BLOCK.offset("words"))
                        )
                        k.fetch_add(block, BLOCK.offset("left"), 1)
                    with k.when(seats.equals(0) | taken.get().differs(0)):
                        seen.set(generation)
        return k.finish(block)

    def start(self, serve: Any) -> Any:
        """start(block, helpers): 0 once there are so many threads, else the error number of why there are not."""
        k = self.function("start", "block", "helpers", returns=I64)
        block, error = k.p["block"], k.variable(k.i64(0))
        with k.forever() as leave_if:
            started = k.load(I64, block, BLOCK.offset("started"))
            leave_if((started >= k.p["helpers"]) | error.get().differs(0))
            at = k.at(block, k.min(started, k.i64(_FEW)) * 8 + BLOCK.offset("thread0"))
            code = k.intrinsic("pthread_create", I32, at, k.pointer(k.i64(0)), _address(k, serve), block)
            error.set(k.zext(code, I64))
            with k.when(code.equals(0)):
                k.store(started + 1, block, BLOCK.offset("started"))
                k.store(k.i64(-1), block, BLOCK.offset("apart"))
        return k.finish(error.get())

    def keep_apart(self) -> Any:
        """keep_apart(block): threads may run wherever the caller may, but not where it runs now.

        Linux may wake a thread on the waker's CPU though another is idle (on virtual machines those look busy), where
        it would wait for milliseconds.
        """
        k = self.function("keep_apart", "block")
        block, size, may = k.p["block"], k.i64(8 * _MASK), k.buffer(I64, _MASK)
        cpu, started = k.zext(k.intrinsic("sched_getcpu", I32), I64), k.load(I64, block, BLOCK.offset("started"))
        before = k.load(I64, block, BLOCK.offset("apart"))
        changed = cpu.differs(before) | (_load(k, block, "sleeping") > 0)
        with k.when(changed & (cpu < 64 * _MASK)):
            k.store(cpu, block, BLOCK.offset("apart"))
            failed = self.allowed(k, may) < 0
            at, own = (cpu >> 6) * 8, k.i64(1) << (cpu & 63)
            k.store(k.load(I64, may, at) & (own ^ -1), may, at)
            with k.when(self.either_word(k, may).equals(0)):
                k.store(own, may, at)
            mask = k.at(block, BLOCK.offset("mask0"))
            other = self.either_word(k, may, mask).differs(0) | before.equals(-1)
            with k.when(other & failed.equals(0)):
                for i in range(_MASK):
                    k.store(k.load(I64, may, 8 * i), mask, 8 * i)
                with k.range(0, k.min(started, k.i64(_FEW))) as i:
                    thread = k.load(I64, k.at(block, i * 8 + BLOCK.offset("thread0")))
                    k.intrinsic("pthread_setaffinity_np", I32, thread, size, mask)
        return k.finish()

    @staticmethod
    def allowed(k: Function, mask: Value) -> Value:
        """Writes the set of CPUs that the calling thread may use; negative if that fails."""
        return k.intrinsic("sched_getaffinity", I32, k.const(0, I32), k.i64(8 * _MASK), mask)

    @staticmethod
    def either_word(k: Function, mask: Value, less: Value | None = None) -> Value:
        """The bits that any word of a set of CPUs has; those by which it differs from another."""
        bits = k.i64(0)
        for i in range(_MASK):
            word = k.load(I64, mask, 8 * i)
            bits = bits | (word if less is None else word ^ k.load(I64, less, 8 * i))
        return bits

    def ours(self, keep_apart: Any) -> Any:
        """ours(block, kernel, words, helpers): a region on threads of ours."""
        k = self.function("ours", "block", "kernel", "words", "helpers")
        block, words = k.p["block"], k.p["words"]
        helpers = k.min(k.p["helpers"], k.load(I64, block, BLOCK.offset("started")))
        wakes = k.select(helpers > MANY, k.i64(WAKES), k.i64(0))  # the kernel wakes one after another
        for name, value in (("kernel", k.p["kernel"]), ("words", words), ("left", k.i64(0)), ("wakes", wakes)):
            k.store(value, block, BLOCK.offset(name))
        k.call(keep_apart, block)
        generation = _generation(_load(k, block, "state") + 1)
        _exchange(k, block, "state", generation | helpers * _SEAT | _OPEN)
        with k.when(_load(k, block, "sleeping") > 0):
            self.futex(k, block, _WAKE, k.select(wakes > 0, wakes, helpers))
        call_at(k, k.p["kernel"], words)
        inside = helpers - _seats(_exchange(k, block, "state", generation))
        turns = k.variable(k.i64(0))
        with k.forever() as leave_if:
            leave_if(_load(k, block, "left").equals(inside))
            turns.set(turns.get() + 1)
            pause(k, self.isa)
            with k.when((turns.get() & 63).equals(0)):  # they may be waiting for this CPU
                k.intrinsic("sched_yield", I32)
        return k.finish()

    def region(self, symbol: str, ours: Any, start: Any, awake: Any) -> None:
        k = self.function(symbol, "block", "kernel", "words", "helpers", "openmp", "clock", returns=I64, public=True)
        block, kernel, words, helpers, openmp, clock = k.p.values()
        theirs, error = k.variable(k.i64(0)), k.variable(k.i64(0))
        with k.when(clock.differs(0)):
            theirs.set(k.call(awake, clock))
        with k.either(theirs.get().differs(0)) as (yes, no):
            with yes:
                call_at(k, openmp, kernel, words, k.trunc(helpers + 1, I32), k.const(0, I32))
            with no:
                error.set(k.call(start, block, helpers))
                k.call(ours, block, kernel, words, helpers)
        k.finish(error.get())

    def noting(self) -> Any:
        """noting(words): in a team. Words: the caller, the clock to be written, the CPUs that the caller may use.

        A team that may use others is bound, and threads of ours cannot take its place: the clock is the caller's then,
        which runs whenever it is asked for.
        """
        k = self.function("noting", "words", special=True)  # beside the one that takes its address
        words, clock, may = k.p["words"], k.buffer(I32, 2), k.buffer(I64, _MASK)
        me, caller = k.intrinsic("pthread_self", I64), k.load(I64, words)
        with k.when(me.differs(caller)):
            self.allowed(k, may)
            bound = self.either_word(k, may, k.at(words, 16)).differs(0)
            with k.when(k.intrinsic("pthread_getcpuclockid", I32, k.select(bound, caller, me), clock).equals(0)):
                k.store(Value(k, k.b.sext(k.load(I32, clock).x, I64)), words, 8)
        return k.finish()

    def clock(self, symbol: str, noting: Any) -> None:
        k = self.function(symbol, "openmp", "threads", returns=I64, public=True)
        words = k.buffer(I64, 2 + _MASK)
        k.store(k.intrinsic("pthread_self", I64), words)
        k.store(k.i64(0), words, 8)
        self.allowed(k, k.at(words, 16))
        team = k.trunc(k.p["threads"], I32), k.const(0, I32)
        call_at(k, k.p["openmp"], _address(k, noting), words, *team)
        k.finish(k.load(I64, words, 8))

    def futex(self, k: Function, block: Value, operation: int, value: Value) -> None:
        """Calls futex on the generation: its words are little-endian."""
        number, nothing = k.i64(_SYSCALL_FUTEX[self.isa.arch]), k.i64(0)
        known = self.module.ir.globals.get("syscall")
        syscall = known or ir.Function(self.module.ir, ir.FunctionType(I64, [I64], var_arg=True), "syscall")
        k.call(syscall, number, block, k.i64(operation), value, nothing, nothing, nothing)


def _load(k: Function, block: Value, name: str) -> Value:
    """Loads a word that another thread may change at any time."""
    return Value(k, k.b.load_atomic(k.at(block, BLOCK.offset(name)).x, "seq_cst", 8, typ=I64))


def _generation(state: Value) -> Value:
    return state & _SEAT - 1


def _seats(state: Value) -> Value:
    return state >> 32 & _SEATS


def _exchange(k: Function, block: Value, name: str, new: Value) -> Value:
    """Returns what was there before."""
    return Value(k, k.b.atomic_rmw("xchg", k.at(block, BLOCK.offset(name)).x, new.x, "seq_cst"))


def _exchange_if(k: Function, block: Value, name: str, old: Value, new: Value) -> Value:
    """Returns 1 if it was `old` and is `new` now, else 0."""
    both = k.b.cmpxchg(k.at(block, BLOCK.offset(name)).x, old.x, new.x, "seq_cst")
    return k.zext(Value(k, k.b.extract_value(both, 1)), I64)


def _address(k: Function, f: Any) -> Value:
    return Value(k, ir.FormattedConstant(PTR, f.get_reference()))
