"""Repeated calls: what is kept of them, who reads their arrays, and who runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from speedlight import engines
from speedlight.cpu.runtime import repeating
from speedlight.problem.prepared import prepared_calls, read_plainly


def kept(call: str = "attention") -> list[Any]:
    """Returns the prepared calls of this name."""
    return [x.value for key, x in list(prepared_calls._held.items()) if key.call == call]


def forget() -> None:
    """Forgets all prepared calls: the next one is checked and prepared anew."""
    prepared_calls.clear()


@contextlib.contextmanager
def reading_by(read: Callable[..., Any]) -> Iterator[None]:
    """Has arrays of calls read by this function."""
    homes = repeating.functions(), engines.cpu()
    before = [x.read for x in homes]
    for x in homes:
        x.read = read
    try:
        yield
    finally:
        for x, old in zip(homes, before, strict=True):
            x.read = old


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
    machine_read, machine_run = here.read, here.run

    def read(rows: int, *arrays: Any) -> Any:
        found = machine_read(rows, *arrays)
        if found is not None and type(found[0]) is bytes:
            counts.read += 1
        else:
            counts.left += 1
        return found

    def run(*given: Any) -> Any:
        result = machine_run(*given)
        counts.ran += result is not None and result is not False
        return result

    forget()
    here.run = None if machine_run is None else run
    try:
        with reading_by(read):
            yield counts
    finally:
        here.run = machine_run
        forget()


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Has Python read arrays and run calls, as where there is no machine code for that; no call is prepared yet."""
    here = repeating.functions()
    run, here.run = here.run, None
    held, prepared_calls._held = prepared_calls._held, {}
    try:
        with read_by_python():
            yield
    finally:
        here.run = run
        prepared_calls._held = held
