"""Prepared steps of caches and pools: over any lengths, at any addresses, from NumPy's arrays and PyTorch's tensors."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from ...arrays.array import Array, numpy_dtype
from ...problem.problem import spans_of
from ...problem.results import fresh
from ...problem.tokens import Batch
from .append_call import Put
from .forward_call import Call


def end_of(x: Any, size: int) -> int:
    """One past the last byte of an array, from its address."""
    if 0 in x.shape:
        return 0
    return sum([max(0, (n - 1) * step) for n, step in zip(x.shape, x.strides, strict=True)]) + size


def alike(q: Array, shape: tuple[int, ...]) -> bool:
    """Whether a new array of this shape has q's shape and strides."""
    return shape == q.shape and np.empty(shape, numpy_dtype(q.dtype)).strides == q.strides


class Step:
    """A prepared call of a cache, for queries of one form over any lengths of as many spans."""

    __slots__ = ("addresses", "alike", "inline", "most", "prepared", "shape")

    def __init__(self, prepared: Call, addresses: list[tuple[int, int]], q: Array, most: int, inline: int) -> None:
        """addresses: of each layer's keys and values. inline: tokens below which no other thread is woken."""
        self.prepared, self.addresses, self.most, self.inline = prepared, addresses, most, inline
        self.shape = (*q.shape[:-1], prepared.problem.value_dim)
        self.alike = alike(q, self.shape)

    @property
    def size(self) -> int:
        return self.prepared.size

    def run(
        self, layer: int, q: Any, q_at: int, lengths: list[int], return_lse: bool, seed: int, new: Any = None
    ) -> Any:
        """What attend() returns. new: as of Call.run()."""
        items = self.prepared.items_for(lengths)
        out, out_at = fresh(q, self.shape, alike=self.alike)
        lse, lse_at = fresh(q, self.shape[:-1], logarithms=True) if return_lse else (None, 0)
        k_at, v_at = self.addresses[layer]
        threads = 1 if sum(lengths) < self.inline else 0
        self.prepared.run(q_at, k_at, v_at, out_at, lse_at, ctypes.addressof(items), threads, seed, None, new)
        return out if lse is None else (out, lse)


class Checked(NamedTuple):
    """A step that was checked with all its arrays: how its new tokens are stored, if it has any."""

    step: Step
    put: Put | None
    new: int  # tokens of each sequence
    ends: list[int]  # of each array one past the last byte, relative to its address

    def fits(self, lengths: list[int]) -> bool:
        """Whether it was prepared for sequences of these lengths, before it."""
        longest = max(lengths) + self.new
        return longest > 0 and spans_of(longest) == self.step.most and (self.new > 0 or min(lengths) > 0)

    def run(
        self, layer: int, q: Any, at: list[int], before: list[int], after: list[int], return_lse: bool, seed: int
    ) -> Any:
        """Stores the new tokens, then attends. at: addresses of the arrays."""
        put, new, held = self.put, None, None
        if put is not None:
            addresses = at[1], at[2], *self.step.addresses[layer]
            if put.within:
                held = put.words(addresses, before)
                new = held[0].ticket, ctypes.addressof(held[1])
            else:
                put.run(addresses, before)
        return self.step.run(layer, q, at[0], after, return_lse, seed, new)


class CheckedPut(NamedTuple):
    """New tokens that were checked, of a cache or a pool, and no queries."""

    put: Put
    addresses: list[tuple[int, int]]  # of each layer's keys and values
    counts: list[int]  # tokens of each sequence
    ends: list[int]  # as Checked

    @property
    def new(self) -> int:
        """Tokens of each sequence of a cache."""
        return self.counts[0]

    def fits(self, lengths: list[int]) -> bool:
        """Whatever they are."""
        return True

    def run(
        self, layer: int, k: Any, at: list[int], before: list[int], after: list[int], return_lse: bool, seed: int
    ) -> bool:
        """As Checked, of a cache; what it returns is not None."""
        self.put.run((*at, *self.addresses[layer]), before)
        return True

    def store(self, layer: int, at: list[int], batch: Batch) -> None:
        """Of a pool. at: addresses of k and v."""
        self.put.run((*at, *self.addresses[layer]), batch.before, [x.address for x in batch.tables])


class Table:
    """The blocks of a sequence, by number, with SLACK more numbers past the last; and where they lie."""

    __slots__ = ("address", "numbers")

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers, self.address = numbers, numbers.ctypes.data


class PoolStep:
    """A prepared call of a pool that was checked with all its arrays, over any lengths of as many spans."""

    __slots__ = ("addresses", "alike", "counts", "ends", "inline", "lse_shape", "most", "prepared", "put", "shape")

    def __init__(
        self, prepared: Call, addresses: list[tuple[int, int]], q: Array, put: Put | None, ends: list[int], inline: int
    ) -> None:
        """As Step and Checked."""
        self.prepared, self.put, self.ends, self.addresses, self.inline = prepared, put, ends, addresses, inline
        self.counts = list(prepared.problem.q_lengths)
        self.shape, self.lse_shape = (*q.shape[:-1], prepared.problem.value_dim), (q.shape[1], q.shape[0])
        self.most, self.alike = spans_of(max(prepared.problem.k_lengths)), alike(q, self.shape)

    def fits(self, lengths: list[int]) -> bool:
        """Whether it was prepared for sequences of these lengths."""
        return min(lengths) > 0 and spans_of(max(lengths)) == self.most

    def run(self, layer: int, q: Any, at: list[int], batch: Batch, return_lse: bool, seed: int) -> Any:
        """What attend() returns: stores the new tokens, if any, then attends. at: addresses of the arrays."""
        lists, (k_at, v_at) = [x.address for x in batch.tables], self.addresses[layer]
        put, new, held = self.put, None, None
        if put is not None:
            addresses = at[1], at[2], k_at, v_at
            if put.within:
                held = put.words(addresses, batch.before, lists)
                new = held[0].ticket, ctypes.addressof(held[1])
            else:
                put.run(addresses, batch.before, lists)
        items = self.prepared.items_for(batch.after, lists)
        out, out_at = fresh(q, self.shape, alike=self.alike)
        lse, lse_at = fresh(q, self.lse_shape, logarithms=True) if return_lse else (None, 0)
        threads = 1 if sum(batch.after) < self.inline else 0
        self.prepared.run(at[0], k_at, v_at, out_at, lse_at, ctypes.addressof(items), threads, seed, None, new)
        return out if lse is None else (out, lse)
