"""Memo: a bounded memory of values that took long to make."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .forks import renew_after_fork

T = TypeVar("T")


USED, VALUE, SIZE = range(3)  # of an entry: when it was last asked for, its value, and the bytes of that


class Memo(Generic[T]):
    """At most `entries` values of at most `most_bytes` bytes in all; the least recently used are dropped.

    A key has everything that its value depends on; whoever has a Memo says beside it what that is.

    get() takes no lock: it may run while a signal has stopped put() in the middle. Machine code asks as get() does
    (cpu/kernels/repeat.py): `held` and `clock` stay the same objects.
    """

    def __init__(self, entries: int, most_bytes: int) -> None:
        self.entries, self.most_bytes = entries, most_bytes
        self.held: dict[Any, list[Any]] = {}  # entries: [USED, VALUE, SIZE]
        self.clock = itertools.count()
        self._lock = threading.RLock()
        renew_after_fork(self)

    def __len__(self) -> int:
        return len(self.held)

    @property
    def bytes(self) -> int:
        return sum([x[SIZE] for x in list(self.held.values())])

    def get(self, key: Any) -> T | None:
        """Returns the value of a key, or None."""
        entry = self.held.get(key)
        if entry is None:
            return None
        entry[USED] = next(self.clock)
        return entry[VALUE]

    def put(self, key: Any, value: T, size: int) -> None:
        """Stores a value of so many bytes, and drops the least recently used; one beyond most_bytes is not stored."""
        with self._lock:
            if size > self.most_bytes:
                return
            self.held[key] = [next(self.clock), value, size]
            while len(self.held) > self.entries or self.bytes > self.most_bytes:
                oldest = min(list(self.held.items()), key=lambda x: x[1][USED])[0]
                self.held.pop(oldest, None)

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """Returns the value of a key; where there is none, one that is made now, and stored by its `size`."""
        value = self.get(key)
        if value is None:
            value: Any = make()
            self.put(key, value, value.size)
        return value

    def clear(self) -> None:
        with self._lock:
            self.held.clear()

    def after_fork(self) -> None:
        self._lock = threading.RLock()
