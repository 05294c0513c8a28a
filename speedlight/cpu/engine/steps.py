"""Steps: the prepared calls of caches and pools whose memory has one layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...problem.option_keys import key_of_traced
from ...problem.options import Options, known_keys
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

    def repeat(
        self, sequences: int, arrays: tuple[Any, ...], options: Options, return_lse: bool, lengths: list[int],
        store: tuple[int, int], limits: tuple[int, int],
    ) -> tuple[Any, list[int]] | None:  # fmt: skip
        """Runs a step of a cache that was checked with arrays like these; returns its result and the lengths after it.

        Returns None if there is no such step, or it is not for these lengths.

        Args:
            arrays: q, or q, k and v, or k and v, which are only stored: then the result is True.
            lengths: of the sequences so far.
            store: addresses of the cache's keys and values.
            limits: the greatest length, and the most new tokens.
        """
        of_options, _ = known_keys.get(id(options)) or options.keyed(key_of_traced)
        if of_options is None:
            return None
        now, place = machine(), (self, sequences)
        seed: Any = options.seed if options.dropout else 0
        if return_lse:
            read = functions().read(0, *arrays)
        else:
            read = functions().repeat("step", of_options, now, place, seed, store, lengths, limits, 0, *arrays)
        if read is None:
            return None
        layout, places = read
        if type(places) is list:  # the result and the lengths
            return read
        step = prepared_calls.get(new_key(("step", of_options, layout, now, place)))
        if step is None:
            return None
        totals = [n + step.new for n in lengths]
        if step.new > limits[1] or max(totals) > limits[0] or not step.fits(totals):
            return None
        if step.call is None:
            step.store(places, lengths, store)
            return True, totals
        result = step.run(arrays[0], places, return_lse=return_lse, seed=seed, lengths=totals, store=store)
        return result, totals

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
