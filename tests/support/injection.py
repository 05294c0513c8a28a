"""Interrupts a call at every place where CPython can deliver a signal: what Ctrl-C, a timeout or another thread may do
to it.

CPython 3.11 looks for signals when a Python function starts (or a generator goes on), when a loop jumps back, and when
a call has returned from C; not between stores, operators and returns. At each such place of the call's own frames, and
of those that it calls, `interrupted` can raise an exception as CPython would: attributed to the same instruction.

    for n in places(call):         # calls it once to count
        if interrupted(call, n):   # raised at the n-th place; False where it ended without
            ...                    # everything must be as it was before the call
        handled(call, n, handler)  # a handler that returns: the call must go on as if nothing had come between
"""

from __future__ import annotations

import dis
import functools
import gc
import math
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

from speedlight.cpu.runtime import workers

needs_places = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="places are those of CPython 3.11")


class Interrupt(KeyboardInterrupt):
    """What is raised."""


def places(call: Callable[[], Any], within: tuple[str, ...] = ("",)) -> range:
    """The numbers of all places of a call, which is made once. It must take the same way each time.

    within: only in functions of files whose name has one of these in it.
    """
    probe = _Probe(-1, within)
    probe.run(call)
    return range(1, probe.count + 1)


def interrupted(call: Callable[[], Any], at: int, within: tuple[str, ...] = ("",)) -> bool:
    """Whether the call was ended by an exception at its `at`-th place."""
    probe = _Probe(at, within)
    try:
        probe.run(call)
    except Interrupt:
        return True
    assert not probe.raised, "the interrupt was swallowed"
    return False


def handled(call: Callable[[], Any], at: int, handler: Callable[[], Any], within: tuple[str, ...] = ("",)) -> Any:
    """Returns the result of a call during which, at its `at`-th place, a signal handler runs and returns."""
    probe = _Probe(at, within, handler)
    result = probe.run(call)
    assert probe.raised, "there is no such place"
    return result


def spread(found: range, most: int) -> Iterator[int]:
    """At most so many of the places, evenly; the first and the last among them."""
    step = max(1, -(-len(found) // most))
    yield from {*found[::step], *found[-1:]}


@functools.cache
def _code(code: CodeType) -> tuple[dict[int, str], dict[int, Any]]:
    """Of each instruction the name; and of each offset who handles an exception there."""
    names = {x.offset: x.opname for x in dis.get_instructions(code)}
    handlers: dict[int, Any] = {}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2):
            handlers[offset] = entry.target, entry.depth, entry.lasti
    return names, handlers


def _interrupt() -> None:
    raise Interrupt


class _Probe:
    """Counts places and runs a signal handler at one of them; the usual one raises."""

    def __init__(self, at: int, within: tuple[str, ...] = ("",), handler: Callable[[], Any] = _interrupt) -> None:
        self.at, self.within, self.count, self.raised, self.handler = at, within, 0, False, handler
        self.last: dict[FrameType, int] = {}  # the instruction that a frame is in
        self.told: set[FrameType] = set()  # whose call in progress has places of its own
        self.depth: FrameType | None = None

    def run(self, call: Callable[[], Any]) -> Any:
        enabled, tracing, profiling = gc.isenabled(), sys.gettrace(), sys.getprofile()
        gc.disable()
        workers.get_threads()
        # CPUs are counted each second: not in one call, and in the next not
        workers._in_use.known = workers._in_use.known._replace(until=math.inf)
        self.depth = sys._getframe()
        try:
            sys.setprofile(self.profile)
            sys.settrace(self.trace)
            return call()
        finally:
            sys.settrace(tracing)
            sys.setprofile(profiling)
            self.last.clear()  # frames, and what they hold, may go: whoever is waited for is not held by a cycle
            self.told.clear()
            workers._in_use.known = workers._in_use.known._replace(until=0.0)
            if enabled:
                gc.enable()

    def looks_into(self, frame: FrameType) -> bool:
        return any(name in frame.f_code.co_filename for name in self.within)

    def place(self, frame: FrameType) -> None:
        if not self.looks_into(frame):
            return
        self.count += 1
        if self.count == self.at:
            self.raised = True
            self.handler()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """A Python function starts, or a generator goes on."""
        if frame.f_code.co_name == "__del__" or frame.f_code is _Probe.run.__code__:
            return None
        if frame.f_back is not None:
            self.told.add(frame.f_back)
        if not self.looks_into(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if frame.f_back is not self.depth:
            self.place(frame)
        return self.instruction

    def instruction(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            before, self.last[frame] = self.last.get(frame), frame.f_lasti
            told = frame in self.told
            self.told.discard(frame)
            if before is not None and self.checked(frame, before, told):
                self.place(frame)
        elif event == "return":
            self.last.pop(frame, None)
            self.told.discard(frame)
        return self.instruction

    def checked(self, frame: FrameType, before: int, told: bool) -> bool:
        """Whether CPython has looked for signals since the instruction before, and would have had the same handler."""
        names, handlers = _code(frame.f_code)
        name, now = names[before], frame.f_lasti
        if "JUMP_BACKWARD" in name and name != "JUMP_BACKWARD_NO_INTERRUPT":
            if now > before:  # did not jump
                return False
            at = now - 2
        elif name == "CALL_FUNCTION_EX" or (name == "CALL" and not told):
            at = before
        else:
            return False
        return handlers.get(at) == handlers.get(now)

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("c_call", "c_exception"):
            self.told.add(frame)
        elif event == "c_return" and frame.f_code is not _Probe.run.__code__:
            self.told.add(frame)
            self.place(frame)
        elif event == "return" and frame.f_back is not None and frame.f_back is not self.depth and self.by_c(frame):
            self.place(frame)

    def by_c(self, frame: FrameType) -> bool:
        """Whether a Python function was called through C, where signals are looked for once more when it has
        returned.
        """
        back = frame.f_back
        assert back is not None
        if back.f_code is _Probe.run.__code__ or back.f_lasti < 0:
            return False
        name = _code(back.f_code)[0].get(back.f_lasti)
        return name == "CALL_FUNCTION_EX" or (name == "CALL" and frame.f_code.co_name == "__init__")
