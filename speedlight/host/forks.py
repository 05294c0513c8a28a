"""Fork safety: resets the parent threads' locks and half-done writes in the child, and lets no fork split an import."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from typing import Protocol


class Renewed(Protocol):
    def after_fork(self) -> None: ...


# Held where a call imports a module: in a child that was forked meanwhile it would stay half made, and locked.
importing = threading.RLock()
_alive: dict[int, weakref.ref[Renewed]] = {}  # without callbacks: an interrupt in one of those would be lost
_numbers = itertools.count(1)


def renew_after_fork(x: Renewed) -> None:
    """Calls x.after_fork() in every child, as long as x is there."""
    number = next(_numbers)
    _alive[number] = weakref.ref(x)
    if number % 64 == 0:
        for other, found in list(_alive.items()):
            if found() is None:
                _alive.pop(other, None)


def _after_fork() -> None:
    for found in _alive.values():
        x = found()
        if x is not None:
            x.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
    os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=importing.release)
