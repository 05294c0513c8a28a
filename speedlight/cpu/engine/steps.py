"""Steps: the prepared calls of caches and pools whose memory has one layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...problem.option_keys import key_of_traced
from ...problem.options import Options
from ...problem.prepared import CallKey, Prepared, new_key, prepared_calls
from ..runtime.repeating import functions
from ..runtime.workers import machine


class Steps:
    """Prepared calls of the caches and pools of one memory layout, which one object stands for in a CallKey."""

    def __init__(self, *layout: Any) -> None:
        self.layout = layout

    @staticmethod
    @functools.lru_cache(64)
    def of(*layout: Any) -> Steps:
        """Returns the one of a memory layout."""
        return Steps(*layout)

    def find(self, sequences: int, tensors: tuple[Any, ...], options: Options) -> tuple[Prepared, bytes] | None:
        """Returns a step that was checked with arrays like these, and where they lie; None if there is none.

        The arrays are q, or q, k and v, or k and v; each sequence has as many new tokens and queries as by default.
        """
        of_options, _ = options.keyed(key_of_traced)
        read = None if of_options is None else functions().read(0, *tensors)
        if read is None:
            return None
        step = prepared_calls.get(new_key(("step", of_options, read[0], machine(), (self, sequences))))
        return None if step is None else (step, read[1])

    def keep(self, step: Prepared, given: tuple[Any, ...], options: Options) -> None:
        """Keeps a step that was checked with the caller's arrays."""
        of_options = options.key()
        read = None if of_options is None else functions().read(0, *given)
        if read is not None:
            key = CallKey("step", of_options, read[0], machine(), (self, len(step.counts)))
            prepared_calls.put(key, step, step.size)

    def made(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Returns what is kept under a key, made now if it is not there."""
        return prepared_calls.made(CallKey("storage", key, None, machine(), self), make)
