"""LLVM is called where no signal interrupts it: whatever comes while a kernel is compiled or loaded, the process lives,
and everybody's next kernel is compiled.
"""

from __future__ import annotations

import _thread
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import llvmlite
import pytest
from conftest import FULL
from injection import interrupted, needs_places, places

import speedlight as sl
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime import compile as compiling
from speedlight.cpu.runtime import workers
from speedlight.host import llvm
from speedlight.host.machine import current_isa

TEXT = "define i32 @one() { ret i32 1 }"
numbers = itertools.count(2)


def made() -> llvm.Code:
    """Another function each time: what is compiled again is remembered."""
    text = TEXT.replace("ret i32 1", f"ret i32 {next(numbers)}")
    return llvm.load([compiling.compile_ir(Shape("decode", current_isa(), "f32"), text)], ["one"])


def elsewhere() -> Any:
    """The same in another thread, which would wait for a lock of llvmlite's that was left taken."""
    found: list[llvm.Code] = []
    thread = threading.Thread(target=lambda: found.append(made()), daemon=True)
    thread.start()
    thread.join(30)
    return found and found[0]["one"]


@needs_places
def test_no_line_of_llvmlite_runs_where_signals_are_handled():
    made()  # loads llvmlite
    assert len(places(made, within=(os.path.dirname(llvmlite.__file__),))) == 0
    assert len(places(made, within=("llvm.py",))) > 5


@needs_places
def test_an_exception_anywhere_is_raised_and_the_next_kernel_is_made():
    made()
    found = places(made)
    for n in found if FULL else found[::3]:
        assert interrupted(made, n), f"place {n} of {len(found)}"
    assert made()["one"] and elsewhere()


STORM = """import random, signal, threading
from test_llvm import elsewhere, made
class Timeout(Exception): pass
def handler(*_): raise Timeout
signal.signal(signal.SIGALRM, handler)
ended = 0
for n in range({rounds}):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(2e-5, 4e-3))
            made()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Timeout:
        ended += 1
print(ended > {rounds} // 8, bool(made()["one"] and elsewhere()))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_signals_while_kernels_are_compiled_leave_the_process_alive():
    code = STORM.format(rounds=2000 if FULL else 60)
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


def test_code_is_unloaded_when_nobody_has_it():
    held = made()
    gc.collect()
    made()  # what was left over goes with the next that is loaded
    count = len(llvm._engines)
    for _ in range(3):
        made()
        assert len(llvm._engines) == count
    del held
    made()
    assert len(llvm._engines) == count - 1


def test_without_a_thread_it_is_compiled_by_the_caller(monkeypatch):
    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(llvm._thread, "start_new_thread", start)
    assert made()["one"]


def test_a_thread_that_ends_before_its_first_line_is_not_waited_for(monkeypatch):
    """An exception that was meant for the caller may reach the new thread, while CPython has it under his number."""
    start, calls = _thread.start_new_thread, []

    def fails_at_first(*given: Any) -> None:
        calls.append(given)
        if len(calls) > 1:
            start(*given)

    monkeypatch.setattr(llvm._thread, "start_new_thread", fails_at_first)
    assert llvm.undisturbed(lambda: 7) == 7 and len(calls) == 2
    calls.clear()
    assert not workers._try_threads(1)
    assert workers._try_threads(1)


def test_what_llvm_refuses_is_an_error_of_ours_and_the_next_is_made():
    with pytest.raises(sl.CompileError, match=r"could not be compiled: (?s:.*)Please report this"):
        compiling.compile_ir(Shape("decode", current_isa(), "f32"), "define nonsense")
    with pytest.raises(sl.CompileError, match="^kernel two is not in its own object file"):
        llvm.load([], ["two"], TEXT)
    assert made()["one"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_a_handler_forks_meanwhile_compiles_on_its_own():
    """It has no thread that compiles: what was not compiled before the fork is compiled in it."""
    before = signal.getsignal(signal.SIGUSR1)
    for place in ("before", "after"):
        children: list[int] = []

        def handler(*_: Any, children: list[int] = children) -> None:
            children.append(os.fork())
            if not children[0]:
                signal.alarm(20)

        def call(place: str = place) -> int:
            if place == "before":
                os.kill(os.getpid(), signal.SIGUSR1)
            return 7

        signal.signal(signal.SIGUSR1, handler)
        try:
            if place == "after":
                signal.raise_signal(signal.SIGUSR1)
            found = llvm.undisturbed(call)
        finally:
            signal.signal(signal.SIGUSR1, before)
        if not children[0]:
            os._exit(found - 7)
        assert found == 7 and os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
