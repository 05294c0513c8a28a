"""Memo: a bounded memory of values that took long to make."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .forks import renew_after_fork

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("size", "used", "value")

    def __init__(self, value: T, size: int, used: int) -> None:
        self.value, self.size, self.used = value, size, used


class Memo(Generic[T]):
    """At most `entries` values of at most `most_bytes` bytes in all; the least recently used are dropped.

    A key has everything that its value depends on; whoever has a Memo says beside it what that is.

    get() takes no lock: it may run while a signal has stopped put() in the middle.
    """

    def __init__(self, entries: int, most_bytes: int) -> None:
        self.entries, self.most_bytes = entries, most_bytes
        self._held: dict[Any, _Entry[T]] = {}
        self._clock = 0
        self._lock = threading.RLock()
        renew_after_fork(self)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        return sum([x.size for x in list(self._held.values())])

    def get(self, key: Any) -> T | None:
        """Returns the value of a key, or None."""
        entry = self._held.get(key)
        if entry is None:
            return None
        self._clock = entry.used = self._clock + 1
        return entry.value

    def put(self, key: Any, value: T, size: int) -> None:
        """Stores a value of so many bytes, and drops the least recently used; one beyond most_bytes is not stored."""
        with self._lock:
            if size > self.most_bytes:
                return
            self._clock += 1
            self._held[key] = _Entry(value, size, self._clock)
            while len(self._held) > self.entries or self.bytes > self.most_bytes:
                oldest = min(list(self._held.items()), key=lambda x: x[1].used)[0]
                self._held.pop(oldest, None)

    def made(self, key: Any, make: Callable[[], T]) -> T:
        """Returns the value of a key; where there is none, one that is made now, and stored by its `size`."""
        value = self.get(key)
        if value is None:
            value: Any = make()
            self.put(key, value, value.size)
        return value

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def after_fork(self) -> None:
        self._lock = threading.RLock()
