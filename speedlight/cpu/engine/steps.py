"""Steps: the calls that a cache or pool keeps prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...arrays.array import Array, numpy_dtype
from ...host.memo import Memo
from ...problem.prepared import Prepared, key_of
from ...problem.problem import Options
from ..runtime.workers import get_threads
from .append_call import AppendCall
from .forward_call import Call


class Steps:
    """Calls of one cache or pool. Each depends on what that is, on its key, and on the number of threads."""

    __slots__ = ("layers", "memo", "token_bytes")

    def __init__(self, layers: list[tuple[int, int]], token_bytes: int) -> None:
        """layers: addresses of each one's keys and values. token_bytes: of a token's keys and values."""
        self.layers, self.token_bytes = layers, token_bytes
        self.memo: Memo[Any] = Memo(192, 32 << 20)

    def find(self, sequences: int, tensors: tuple[Any, ...], options: Options) -> tuple[Prepared, list[int]] | None:
        """Returns a step that was checked with arrays like these, where each sequence has as many new tokens and
        queries as by default, and the addresses of q, or of q, k and v, or of k and v; None for any other.
        """
        key = key_of(tensors, options, (sequences, get_threads()))
        step = None if key is None else self.memo.get(key)
        addresses = None if step is None else step.addresses(tensors)
        return None if step is None or addresses is None else (step, addresses)

    def keep(self, step: Prepared, given: tuple[Any, ...], options: Options) -> None:
        """Keeps a step that was checked with the caller's arrays."""
        key = key_of(given, options, (len(step.counts), get_threads()))
        if key is not None:
            self.memo.put(key, step, step.size)

    def made(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Returns what is kept under a key, made now if it is not there."""
        return self.memo.made((*key, get_threads()), make)

    def of_tokens(self, k: np.ndarray, v: np.ndarray, counts: list[int], put: AppendCall) -> Prepared:
        """Returns the step that stores new tokens and attends to none."""
        return Prepared((k, v), counts, put=put, layers=self.layers)

    def of_queries(
        self, call: Call, layout: str, q: Array, tokens: tuple[np.ndarray, ...] = (), put: AppendCall | None = None
    ) -> Prepared:
        """Returns the step of a call over any lengths of as many spans; new k and v are stored first."""
        counts, strides = call.problem.q_lengths, out_strides(q, call.problem.value_dim)
        return Prepared(
            (q, *tokens), counts, call=call, layout=layout, out_strides=strides, key_bytes=self.token_bytes, put=put,
            layers=self.layers,
        )  # fmt: skip


def out_strides(q: Array, value_dim: int) -> tuple[int, ...]:
    """Returns the strides of a new array beside queries."""
    return np.empty((*q.shape[:-1], value_dim), numpy_dtype(q.dtype)).strides
