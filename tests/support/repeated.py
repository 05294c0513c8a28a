"""Repeated calls: what is kept of them, who reads their arrays, and who runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from speedlight import engines
from speedlight.cpu.kernels.repeat import KEY_PARTS
from speedlight.cpu.runtime import repeating
from speedlight.host.memo import USED, VALUE
from speedlight.problem.prepared import prepared_calls, read_plainly


def kept(call: str = "attention") -> list[Any]:
    """Returns the prepared calls of this name."""
    return [x[VALUE] for key, x in list(prepared_calls.held.items()) if key.call == call]


def last_used() -> Any:
    """Returns the prepared call that was asked for last."""
    return max(prepared_calls.held.values(), key=lambda x: x[USED])[VALUE]


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Has the memo of prepared calls empty meanwhile; what was in it is there again afterwards."""
    held = dict(prepared_calls.held)
    forget()
    try:
        yield
    finally:
        forget()
        prepared_calls.held.update(held)


def forget() -> None:
    """Forgets all prepared calls: the next one is checked and prepared anew."""
    prepared_calls.clear()


@contextlib.contextmanager
def reading_by(read: Callable[..., Any]) -> Iterator[None]:
    """Has arrays of calls read by this function, and calls looked up and run by Python."""
    with _replaced(read, lambda *given: read(*given[KEY_PARTS:])):
        yield


@contextlib.contextmanager
def _replaced(read: Callable[..., Any], repeat: Callable[..., Any]) -> Iterator[None]:
    homes: tuple[Any, ...] = repeating.functions(), engines.cpu()
    before = [(x.read, x.repeat) for x in homes]
    for x in homes:
        x.read, x.repeat = read, repeat
    try:
        yield
    finally:
        for x, (old_read, old_repeat) in zip(homes, before, strict=True):
            x.read, x.repeat = old_read, old_repeat


def read_by_python() -> contextlib.AbstractContextManager[None]:
    """Has Python read arrays, as where there is no machine code for that."""
    return reading_by(read_plainly)


class Counts:
    """Numbers of reads by machine code, of reads that it left to Python, and of runs by machine code."""

    def __init__(self) -> None:
        self.read = self.left = self.ran = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Counts what machine code does for calls; all prepared calls are forgotten before and after."""
    here, counts = repeating.functions(), Counts()
    machine_read, machine_run, machine_repeat = here.read, here.run, here.repeat

    def note(found: Any) -> Any:
        is_left = found is None or (type(found) is tuple and type(found[0]) is tuple)
        counts.left += is_left
        counts.read += not is_left
        return found

    def read(rows: int, *arrays: Any) -> Any:
        return note(machine_read(rows, *arrays))

    def repeat(*given: Any) -> Any:
        found = note(machine_repeat(*given))
        counts.ran += found is not None and not (type(found) is tuple and type(found[1]) is bytes)
        return found

    def run(*given: Any) -> Any:
        result = machine_run(*given)
        counts.ran += result is not None and result is not False
        return result

    forget()
    here.run = None if machine_run is None else run
    try:
        with _replaced(read, repeat):
            yield counts
    finally:
        here.run = machine_run
        forget()


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Has Python read arrays and run calls, as where there is no machine code for that; no call is prepared yet."""
    here = repeating.functions()
    run, here.run = here.run, None
    try:
        with nothing_kept(), read_by_python():
            yield
    finally:
        here.run = run
