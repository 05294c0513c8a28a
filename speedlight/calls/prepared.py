"""Repeatable: a prepared call for arrays at other addresses; the key it is known by, and what is still checked.

What was prepared depends on: shapes, strides, dtypes and kind of q, k, v and of a given out; every option, by exact
type and bits, but for the seed; mask and score, by what they compute; threads and vector unit. Addresses, memory and
overlap are checked each time; the seed is an argument of each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays import array as arrays
from ..problem.key import addresses_of
from ..problem.problem import LAYOUTS
from ..problem.results import count_write, deliver, fresh


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
