"""Prepared calls: checked once, and run again for arrays of the same form at other addresses.

It depends on what its key says: shapes, strides, dtypes and kind of the arrays; every option, by exact type and bits,
but for the seed; mask and score, by what they compute, arrays among them by their form; and what whoever keeps it adds
(threads, vector unit, how many sequences). Addresses, memory and overlap are checked each time; the seed, lengths of
keys and lists of pages are arguments of each call. One that is kept for any number of keys (growing) has their
strides, and those of masks and scores, as arguments, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays import torch_tensors
from ..arrays.array import describe
from ..arrays.dtypes import DTYPES
from ..arrays.memory import Array
from ..arrays.torch_tensors import has_bytes
from ..expressions.tracing import Expression
from ..host.insides import TORCH
from ..host.shortcuts import address_of, count_write
from .option_keys import key_of_mask, key_of_traced
from .options import Options, scores_of
from .problem import spans_of
from .results import deliver, fresh

_Ints = Sequence[int] | None


def key_of(tensors: tuple[Any, ...], options: Options, machine: tuple[Any, ...], form: Any = key_of_traced) -> Any:
    """Returns the memo key of a call; None if arrays are neither NumPy's nor PyTorch's, or an option is mutable.

    `machine`: threads and vector unit, or whatever else a prepared call depends on. `form`: Options.key()'s argument.
    The key is (options, machine, *forms of the arrays), flat for speed: machine_of() and is_growing() read it.
    """
    of_options = options.key(form)
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
    if torch is None or TORCH.forward_ad._current_level >= 0:  # inside torch.func: tensors may carry tangents
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


_FEW = 16  # queries with which a call is kept for any number of keys
_HEADS_FIRST = {"bhld": True, "blhd": False}


class Growing(NamedTuple):
    """A call of few queries over any number of keys, as in decoding."""

    key: Any  # of a memo: its form, but for the number of keys
    keys: int
    strides: tuple[int, ...]  # of k, then of v, in bytes: of heads, rows, columns, items
    ends: tuple[int, int]  # bytes from the address of k, and of v, to the end


def growing(tensors: tuple[Any, ...], options: Options, machine: tuple[Any, ...]) -> Growing | None:
    """Returns what is prepared once for any number of keys; None of a call that is not so.

    Written out, without loops: a step of decoding asks for it.
    """
    layout = options.layout
    heads_first = _HEADS_FIRST.get(layout) if type(layout) is str else None
    if heads_first is None or len(tensors) != 3:
        return None
    rows_at = 2 if heads_first else 1
    q, k, v = tensors
    kind = type(q)
    if kind is np.ndarray and (q.ndim != 4 or q.shape[rows_at] > _FEW):
        return None
    if options.q_start is not None or type(options.causal) is not bool:
        return None
    if type(options.k_start) is not int or options.k_start:
        return None
    if not options.q_lengths is options.k_lengths is options.cu_seqlens_q is options.cu_seqlens_k is None:
        return None
    if not (kind is type(k) is type(v)):
        return None
    try:
        if kind is np.ndarray:
            of_q, of_k, of_v, size = q.strides, k.strides, v.strides, 1
        else:
            torch: Any = sys.modules.get("torch")
            if torch is None or kind is not torch.Tensor or TORCH.forward_ad._current_level >= 0:
                return None
            if TORCH.get_tracing_state() is not None:  # sizes are tensors
                return None
            if q.dim() != 4 or q.size(rows_at) > _FEW:  # most calls
                return None
            if not (q.is_cpu and k.is_cpu and v.is_cpu and q.layout is k.layout is v.layout is torch.strided):
                return None
            if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
                return None
            if q.is_neg() or k.is_neg() or v.is_neg():
                return None
            of_q, of_k, of_v, size = q.stride(), k.stride(), v.stride(), k.itemsize
        shape = q.shape
        if heads_first:
            (batch, heads, n, dim), (batch_v, heads_v, n_v, dim_v) = k.shape, v.shape
            (k_item, k_head, k_row, k_column), (v_item, v_head, v_row, v_column) = of_k, of_v
        else:
            (batch, n, heads, dim), (batch_v, n_v, heads_v, dim_v) = k.shape, v.shape
            (k_item, k_row, k_head, k_column), (v_item, v_row, v_head, v_column) = of_k, of_v
    except (RuntimeError, ValueError):  # a nested tensor, which has no shape; other numbers of dimensions
        return None
    if 0 in shape or not n == n_v > 0:
        return None
    if options.mask is options.score is None:
        of_options = options.key()
    else:
        rows = shape[rows_at] if shape[rows_at] < n and _are_arrays(options) else 1
        of_options = options.key(lambda x: key_of_mask(x, n, rows))
    if of_options is None:
        return None
    key = (
        of_options, machine, shape, of_q, q.dtype, k.dtype, v.dtype, batch, heads, dim, batch_v, heads_v, dim_v,
        k_column, v_column, 0 < k_head < k_row, spans_of(n),
    )  # fmt: skip
    end_k = ((batch - 1) * k_item + (heads - 1) * k_head + (n - 1) * k_row + (dim - 1) * k_column + 1) * size
    end_v = ((batch_v - 1) * v_item + (heads_v - 1) * v_head + (n - 1) * v_row + (dim_v - 1) * v_column + 1) * size
    k_item, v_item = k_item if batch > 1 else 0, v_item if batch_v > 1 else 0
    strides = (k_head, k_row, k_column, k_item, v_head, v_row, v_column, v_item)
    return Growing(key, n, strides if size == 1 else tuple([x * size for x in strides]), (end_k, end_v))


def _are_arrays(options: Options) -> bool:
    """Returns whether nothing but arrays hides or scores: then the first row's position is told from other numbers."""
    return options.window is None and Expression not in (type(options.mask), *map(type, scores_of(options.score)))


def is_growing(key: tuple[Any, ...]) -> bool:
    """Returns whether growing() made a key: its last entry is a number of spans; that of key_of() is a dtype."""
    return type(key[-1]) is int


def machine_of(key: tuple[Any, ...]) -> Any:
    """Returns the threads and the vector unit for which key_of() or growing() made a key."""
    return key[1]


class Prepared:
    """A prepared call, and whatever else its next run needs.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(
        self, given: Sequence[Array | np.ndarray], call: Any = None, put: Any = None,
        *, staged: bool = False, places: Any = (), reads: int = 3,
    ) -> None:  # fmt: skip
        """given: q, or q, k and v, with `out` if that is the caller's; or k and v, which are only stored: then there is
        no call; or what a backward pass reads. put: the call that stores new tokens. staged: results go to new memory
        first, since a lookup may turn out to be out of range. places: of the arrays in mask and score, as
        Launch.places_of() has them. reads: how many of `given`, from the first, are only read.
        """
        self.places, self.reads = places, reads
        self.call, self.put, self.staged = call, put, staged
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
                address = torch_tensors.read_address(x) if n < self.reads else x.data_ptr()  # out alone is written
            except RuntimeError:  # a wrapper of torch.func
                return None
            if end and not (address and has_bytes(x, end)):
                return None
            addresses.append(address)
        return addresses

    def repeat(
        self, tensors: tuple[Any, ...], return_lse: bool, seed: int, lengths: _Ints = None, lists: _Ints = None,
        arrays: Sequence[Any] = (),
    ) -> Any:  # fmt: skip
        """Runs it for other arrays, with another seed; returns None if an array lacks memory, or `out`, the fourth of
        them, cannot be written or is not apart from the others. arrays: those of mask and score.
        """
        at, out = self.addresses(tensors), tensors[3] if len(tensors) == 4 else None
        if at is None or not (out is None or self._is_apart(out, at)):
            return None
        tables = None
        if arrays:
            tables = self.call.launch.tables_at(self.places, arrays)
            if tables is None:
                return None
        if out is None or not self.staged:
            if not (out is None or type(out) is np.ndarray):
                count_write(out)
            return self.attend(tensors[0], at, return_lse, seed, lengths, lists, out=out, tables=tables)
        results = self.attend(tensors[0], at, return_lse, seed, lengths, lists, tables=tables)
        new, *lse = results if return_lse else (results,)
        deliver(replace(describe(new, "out"), final=describe(out, "out")))
        return (out, *lse) if return_lse else out

    def repeat_growing(
        self, tensors: tuple[Any, ...], found: Growing, return_lse: bool, seed: int, arrays: Sequence[Any]
    ) -> Any:
        """Runs it for another number of keys; returns None if an array lacks memory."""
        q, k, v = tensors
        if type(q) is np.ndarray:
            at = [address_of(q), address_of(k), address_of(v)]
        else:
            try:
                at = [torch_tensors.read_address(q), torch_tensors.read_address(k), torch_tensors.read_address(v)]
            except RuntimeError:  # a wrapper of torch.func
                return None
            (_, end), (end_k, end_v) = self.reach[0], found.ends
            if not (0 not in at and has_bytes(q, end) and has_bytes(k, end_k) and has_bytes(v, end_v)):
                return None
        words = None
        if arrays:
            words = self.call.launch.tables_at(self.places, arrays, found.keys)
            if words is None:
                return None
        lengths = [found.keys] * q.shape[0]
        return self.attend(q, at, return_lse, seed, lengths, tables=words, keys=found.strides)

    def _is_apart(self, out: Any, at: list[int]) -> bool:
        """Returns whether `out`, the last of arrays at these addresses, can be written and shares no memory with the
        others.
        """
        if type(out) is np.ndarray and not out.flags.writeable:
            return False
        *others, (first, last) = [(x + low, x + high) for x, (low, high) in zip(at, self.reach, strict=True)]
        return not any([first < high and low < last for low, high in others])

    def step(
        self, places: tuple[int, int], q: Any, at: list[int], before: list[int], after: list[int], return_lse: bool,
        seed: int, lists: _Ints = None,
    ) -> Any:  # fmt: skip
        """Stores new tokens of a cache or pool, if any, then attends; True where there are no queries.

        places: addresses of a layer's keys and values. at: of q, or q, k and v, or k and v. before, after: tokens of
        each sequence.
        """
        k_at, v_at = places
        new = None if self.put is None else self.put.start((at[-2], at[-1], k_at, v_at), before, lists)
        if self.call is None:
            return True
        return self.attend(q, (at[0], k_at, v_at), return_lse, seed, after, lists, new)

    def attend(
        self, q: Any, at: Sequence[int], return_lse: bool, seed: int, lengths: _Ints = None, lists: _Ints = None,
        new: Any = None, out: Any = None, tables: Any = None, keys: Any = None,
    ) -> Any:  # fmt: skip
        """Returns out, or (out, lse). at: addresses of q, keys, values, and of `out`, if it is given. lengths, lists,
        new, tables, keys: as Call.run() has them.
        """
        form = self.call.form
        if out is None:
            out, out_at = fresh(q, form.shape, alike=form.alike, strides=form.strides)
        else:
            out_at = at[3]
        lse, lse_at = fresh(q, form.lse_shape, logarithms=True) if return_lse else (None, 0)
        self.call.run(at[0], at[1], at[2], out_at, lse_at, seed, lengths, lists, new, None, tables, keys)
        return (out, lse) if return_lse else out


def _reach_of(x: Array | np.ndarray) -> tuple[int, int]:
    """Returns the first byte of an array and one past the last, from its address."""
    if 0 in x.shape:
        return 0, 0
    size = x.itemsize if isinstance(x, np.ndarray) else DTYPES[x.dtype][1]
    reach = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    return sum([min(0, n) for n in reach]), sum([max(0, n) for n in reach]) + size
