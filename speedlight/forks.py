"""After a fork the child has none of the parent's other threads: what those were writing to is as it was before, and
free.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Protocol


class Renewed(Protocol):
    def after_fork(self) -> None: ...


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
