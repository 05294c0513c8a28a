"""A bounded memo of prepared calls, and what is still checked when a call is repeated.

What was prepared depends on: shapes, strides, dtypes and kind of q, k, v and of a given out; every option, by exact
type and bits, but for the seed; mask and score, by what they compute; threads and vector unit. Addresses, memory and
overlap are checked each time; the seed is an argument of each call.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from . import arrays
from .forks import renew_after_fork
from .problem import LAYOUTS, Options
from .results import count_write, deliver, fresh

T = TypeVar("T")


class _Entry(Generic[T]):
    __slots__ = ("size", "used", "value")

    def __init__(self, value: T, size: int, used: int) -> None:
        self.value, self.size, self.used = value, size, used


class Memo(Generic[T]):
    """At most `entries` entries of at most `most_bytes` bytes in all; the least recently used are dropped.

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

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def after_fork(self) -> None:
        self._lock = threading.RLock()


def key_of(tensors: tuple[Any, ...], options: Options, machine: tuple[Any, ...]) -> Any:
    """The memo key of a call; None if arrays are neither NumPy's nor PyTorch's, or an option is mutable.

    `machine`: threads and vector unit.
    """
    of_options = options.key()
    if of_options is None:
        return None
    key: list[Any] = [of_options, machine]
    if type(tensors[0]) is np.ndarray:
        for x in tensors:
            if type(x) is not np.ndarray:
                return None
            key += (x.shape, x.strides, x.dtype)
        return tuple(key)
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.autograd.forward_ad._current_level >= 0:  # inside torch.func: tensors may carry tangents
        return None
    plain, strided = torch.Tensor, torch.strided
    try:
        for x in tensors:
            if type(x) is not plain or not x.is_cpu or (x.requires_grad and torch.is_grad_enabled()):
                return None
            if x.layout is not strided or x.is_neg():
                return None
            key += (x.shape, x.stride(), x.dtype)
    except RuntimeError:  # a nested tensor, which has no shape
        return None
    return tuple(key)


class Repeatable:
    """A prepared call. `staged`: results go to new memory first, since a lookup may turn out to be out of range.

    reach: of q, k, v and out the first byte and one past the last, relative to the address.
    """

    __slots__ = ("alike", "ends", "layout", "reach", "run", "shape", "staged", "steps")

    def __init__(self, run: Callable[..., None], layout: str, given: list[arrays.Array]) -> None:
        self.run, self.layout = run, layout
        out = given[-1]
        self.shape, self.alike = out.shape, (out.shape, out.strides) == (given[0].shape, given[0].strides)
        self.staged = out.final is not None
        size = arrays.DTYPES[out.dtype][1]
        whole = [math.prod(out.shape[d + 1 :]) * size for d in range(len(out.shape))]
        self.steps = None if list(out.strides) == whole else tuple([x // size for x in out.strides])
        self.reach = [
            (low - x.address, high - x.address) for x in (*given[:-1], out.final or out) for low, high in (x.extent(),)
        ]
        self.ends = [high for _, high in self.reach]

    def again(self, tensors: tuple[Any, ...], return_lse: bool, seed: Any, items: int = 0, threads: int = 0) -> Any:
        """The same call for arrays at other addresses, with another seed; None if an array lacks memory, or `out` is
        not apart from the inputs. items, threads: as of Call.run().
        """
        addresses = self._addresses(tensors)
        if addresses is None:
            return None
        q, out = tensors[0], tensors[3] if len(tensors) == 4 else None
        if out is None or self.staged:
            new, at = fresh(q, self.shape, alike=self.alike, steps=self.steps)
        else:
            new, at = out, addresses[3]
            if type(out) is not np.ndarray:
                count_write(out)
        lse, lse_at = None, 0
        if return_lse:
            lse, lse_at = fresh(q, tuple(q.shape[a] for a in LAYOUTS[self.layout][:-1]), logarithms=True)
        self.run(addresses[0], addresses[1], addresses[2], at, lse_at, items, threads, seed)
        if out is not None and new is not out:
            deliver(replace(arrays.describe(new, "out"), final=arrays.describe(out, "out")))
            new = out
        return (new, lse) if return_lse else new

    def _addresses(self, tensors: tuple[Any, ...]) -> list[int] | None:
        addresses = addresses_of(tensors, self.ends)
        if addresses is not None and len(tensors) == 4:
            out = tensors[3]
            if type(out) is np.ndarray and not out.flags.writeable:
                return None
            ends = [(at + low, at + high) for at, (low, high) in zip(addresses, self.reach, strict=True)]
            first, last = ends[3]
            for low, high in ends[:3]:
                if first < high and low < last:
                    return None
        return addresses


def addresses_of(tensors: tuple[Any, ...], ends: list[int]) -> list[int] | None:
    """Of arrays that have a key; None if one lacks memory. ends: one past the last byte of each, relative to its
    address.
    """
    if type(tensors[0]) is np.ndarray:
        return [arrays.address_of(x) for x in tensors]
    addresses = []
    for n, (x, high) in enumerate(zip(tensors, ends, strict=False)):
        try:
            address = x.const_data_ptr() if n < 3 else x.data_ptr()  # out alone is written
        except RuntimeError:  # a wrapper of torch.func
            return None
        if high and not (address and arrays.has_bytes(x, high)):
            return None
        addresses.append(address)
    return addresses
