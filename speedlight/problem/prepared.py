"""Prepared: a call that was checked and prepared once, and runs again for arrays of the same form at other addresses.

It depends on what its key says: shapes, strides, dtypes and kind of the arrays; every option, by exact type and bits,
but for the seed; mask and score, by what they compute; and what whoever keeps it adds (threads, vector unit, how many
sequences). Addresses, memory and overlap are checked each time; the seed, lengths of keys and lists of pages are
arguments of each call.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.array import describe
from ..arrays.dtypes import DTYPES
from ..arrays.memory import Array
from ..arrays.torch_tensors import has_bytes
from ..host.shortcuts import address_of, count_write
from .problem import Options, spans_of
from .results import deliver, fresh

_Ints = Sequence[int] | None


def key_of(tensors: tuple[Any, ...], options: Options, machine: tuple[Any, ...]) -> Any:
    """Returns the memo key of a call; None if arrays are neither NumPy's nor PyTorch's, or an option is mutable.

    `machine`: threads and vector unit, or whatever else a prepared call depends on.
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


class Prepared:
    """A prepared call, and whatever else its next run needs.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(
        self, given: Sequence[Array | np.ndarray], call: Any = None, put: Any = None,
        layers: Sequence[tuple[int, int]] = (), *, staged: bool = False,
    ) -> None:  # fmt: skip
        """given: q, or q, k and v, with `out` if that is the caller's; or k and v, which are only stored: then there is
        no call. put: the call that stores new tokens. layers: addresses of each one's keys and values. staged: results
        go to new memory first, since a lookup may turn out to be out of range.
        """
        self.call, self.put, self.layers, self.staged = call, put, layers, staged
        self.reach = [_reach_of(x) for x in given]
        self.counts = list(put.counts if call is None else call.problem.q_lengths)  # of each sequence new rows
        self.new = 0 if put is None else self.counts[0]  # tokens of each sequence of a cache
        self.spans = 0 if call is None else spans_of(max(call.problem.k_lengths, default=0))

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return sum([x.size for x in (self.call, self.put) if x is not None])

    def fits(self, lengths: Sequence[int], new: int = 0) -> bool:
        """Returns whether it was prepared for as many sequences of these lengths, with so many new tokens each."""
        if self.call is None:
            return True
        return min(lengths) + new > 0 and spans_of(max(lengths) + new) == self.spans

    def addresses(self, tensors: tuple[Any, ...]) -> list[int] | None:
        """Returns where arrays that have its key lie; None if one lacks memory."""
        if type(tensors[0]) is np.ndarray:
            return [address_of(x) for x in tensors]
        addresses = []
        for n, (x, (_, end)) in enumerate(zip(tensors, self.reach, strict=False)):
            try:
                address = x.const_data_ptr() if n < 3 else x.data_ptr()  # out alone is written
            except RuntimeError:  # a wrapper of torch.func
                return None
            if end and not (address and has_bytes(x, end)):
                return None
            addresses.append(address)
        return addresses

    def again(
        self, tensors: tuple[Any, ...], return_lse: bool, seed: int, lengths: _Ints = None, lists: _Ints = None
    ) -> Any:
        """Runs it for other arrays, with another seed; returns None if an array lacks memory, or `out`, the fourth of
        them, cannot be written or is not apart from the others.
        """
        at, out = self.addresses(tensors), tensors[3] if len(tensors) == 4 else None
        if at is None or not (out is None or self._is_apart(out, at)):
            return None
        if out is None or not self.staged:
            if not (out is None or type(out) is np.ndarray):
                count_write(out)
            return self.attend(tensors[0], at, return_lse, seed, lengths, lists, out=out)
        results = self.attend(tensors[0], at, return_lse, seed, lengths, lists)
        new, *lse = results if return_lse else (results,)
        deliver(replace(describe(new, "out"), final=describe(out, "out")))
        return (out, *lse) if return_lse else out

    def _is_apart(self, out: Any, at: list[int]) -> bool:
        """Returns whether `out`, the last of arrays at these addresses, can be written and shares no memory with the
        others.
        """
        if type(out) is np.ndarray and not out.flags.writeable:
            return False
        *others, (first, last) = [(x + low, x + high) for x, (low, high) in zip(at, self.reach, strict=True)]
        return not any([first < high and low < last for low, high in others])

    def step(
        self, layer: int, q: Any, at: list[int], before: list[int], after: list[int], return_lse: bool, seed: int,
        lists: _Ints = None,
    ) -> Any:  # fmt: skip
        """Stores new tokens of a cache or pool, if any, then attends; True where there are no queries.

        at: addresses of q, or q, k and v, or k and v. before, after: tokens of each sequence.
        """
        k_at, v_at = self.layers[layer]
        new = None if self.put is None else self.put.start((at[-2], at[-1], k_at, v_at), before, lists)
        if self.call is None:
            return True
        return self.attend(q, (at[0], k_at, v_at), return_lse, seed, after, lists, new)

    def attend(
        self, q: Any, at: Sequence[int], return_lse: bool, seed: int, lengths: _Ints = None, lists: _Ints = None,
        new: Any = None, out: Any = None,
    ) -> Any:  # fmt: skip
        """Returns out, or (out, lse). at: addresses of q, keys, values, and of `out`, if it is given. lengths, lists,
        new: as Call.run() has them.
        """
        form = self.call.form
        if out is None:
            out, out_at = fresh(q, form.shape, alike=form.alike, strides=form.strides)
        else:
            out_at = at[3]
        lse, lse_at = fresh(q, form.lse_shape, logarithms=True) if return_lse else (None, 0)
        self.call.run(at[0], at[1], at[2], out_at, lse_at, seed, lengths, lists, new)
        return (out, lse) if return_lse else out


def _reach_of(x: Array | np.ndarray) -> tuple[int, int]:
    """Returns the first byte of an array and one past the last, from its address."""
    if 0 in x.shape:
        return 0, 0
    size = x.itemsize if isinstance(x, np.ndarray) else DTYPES[x.dtype][1]
    reach = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    return sum([min(0, n) for n in reach]), sum([max(0, n) for n in reach]) + size
