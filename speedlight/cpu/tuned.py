"""The tuning in force: what ships for this CPU's family."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..machine import Isa
from ..tunings import Tuning, shipped

_changes: tuple[Callable[[Tuning], Tuning], ...] = ()


def tuning_of(isa: Isa) -> Tuning:
    """What schedules and kernels of a vector unit follow. It stays the same while a process runs, so memos of what was
    prepared need no key for it; who uses changed() sees to them.
    """
    found = shipped(isa)
    for change in _changes:
        found = change(found)
    return found


@contextlib.contextmanager
def changed(change: Callable[[Tuning], Tuning]) -> Iterator[None]:
    """Of every vector unit another tuning for what is prepared meanwhile, on any thread: to measure it, or to test."""
    global _changes
    before, _changes = _changes, (*_changes, change)
    try:
        yield
    finally:
        _changes = before
