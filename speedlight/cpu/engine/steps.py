"""Steps: the calls that a cache or pool keeps prepared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...host.forks import importing
from ...host.memo import Memo
from ...problem.prepared import Prepared, key_of
from ...problem.problem import Options
from ..runtime.workers import get_threads

_prepared: Memo[Any] = Memo(512, 64 << 20)  # by the form of a cache or pool, key_of() and the number of threads


class Steps:
    """Calls of caches and pools of one form, which say of those what a prepared call depends on: all but addresses."""

    def __init__(self, *form: Any) -> None:
        self.form = form
        self.replays: Any = None  # of machine code, once that may know some

    @staticmethod
    @functools.lru_cache(64)
    def of(*form: Any) -> Steps:
        """Returns the one of a form: which it is, machine code tells by its address."""
        return Steps(*form)

    def find(self, sequences: int, tensors: tuple[Any, ...], options: Options) -> tuple[Prepared, list[int]] | None:
        """Returns a step that was checked with arrays like these, where each sequence has as many new tokens and
        queries as by default, and the addresses of q, or of q, k and v, or of k and v; None for any other.
        """
        key = key_of(tensors, options, (sequences, get_threads(), self.form))
        step = None if key is None else _prepared.get(key)
        if step is None:
            return None
        addresses = step.addresses(tensors)
        return None if addresses is None else (step, addresses)

    def keep(self, step: Prepared, given: tuple[Any, ...], options: Options) -> None:
        """Keeps a step that was checked with the caller's arrays."""
        key = key_of(given, options, (len(step.counts), get_threads(), self.form))
        if key is not None:
            _prepared.put(key, step, step.size)

    def made(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Returns what is kept under a key, made now if it is not there."""
        return _prepared.made((*key, get_threads(), self.form), make)


@functools.cache
def load_replays() -> Any:
    """Returns the calls of PyTorch's tensors that machine code repeats."""
    with importing:
        from ..runtime.replay import replays

    return replays
