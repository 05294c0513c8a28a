"""Prepared calls: checked once, kept under a CallKey, and run again for arrays of the same kind at other addresses.

This is the one way to repeat a call, in three steps: the engine's read() looks at the arrays, `prepared_calls` is asked
by a CallKey, and Prepared.run() runs what it found. What a key leaves out is an argument of each run: addresses, which
are read and checked each time; the seed; lengths of keys; lists of pages. A call of few queries is kept for any number
of keys: then their number and strides are arguments, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..arrays import torch_tensors
from ..arrays.array import describe
from ..arrays.making import count_write, deliver, fresh
from ..arrays.memory import DIMS, PLACE, Array
from ..arrays.torch_tensors import has_bytes
from ..host.insides import TORCH
from ..host.memo import Memo
from ..host.shortcuts import address_of
from .problem import SPAN, spans_of

_Ints = Sequence[int] | None
FEW_ROWS = 16  # queries with which a call is kept for any number of keys, at most


class CallKey(NamedTuple):
    """Everything that a prepared call depends on. A tuple, for speed: its hash and comparison take no Python."""

    call: Any  # which call: "attention", "gradients", "paged", "step", (a name, value_dim) …
    options: Any  # by exact type and bits: Options.keyed()
    arrays: Any  # what each array is: the first part of read()
    machine: Any  # threads and vector unit, or a GPU
    # of a cache the layout of its memory and its sequences; of gradients which are wanted; of out= what that array is
    place: Any = None


new_key = functools.partial(tuple.__new__, CallKey)  # CallKey(*fields), without a call of Python's
# All prepared calls of the process. A call keeps alive what its `size` says.
prepared_calls: Memo[Any] = Memo(1536, 256 << 20)


# --- reading arrays


def read_plainly(rows: int, *arrays: Any) -> tuple[Any, bytes] | None:
    """Returns what arrays of NumPy or PyTorch are, as a part of a CallKey, and where they lie; None for any others.

    Machine code does the same for arrays of NumPy, and for tensors while grad mode is off. This takes all others.

    Args:
        rows: 0; or the dimension of q's rows, 1 or 2, where q, k, v and arrays that are added come first and the call
            may be kept for any number of keys; plus 4 where these arrays may have a row for each query.
    """
    read = []
    for x in arrays:
        one = _read_numpy(x) if type(x) is np.ndarray else _read_tensor(x)
        if one is None:
            return None
        read.append(one)
    places = b""
    for address, shape, strides, size, _ in read:
        padding = (0,) * (DIMS - len(shape))
        places += PLACE.pack(address, *shape, *padding, *[step * size for step in strides], *padding)
    layout: list[Any] = [(dtype, shape, strides) for _, shape, strides, _, dtype in read]
    growing = _without_keys(rows & 3, bool(rows & 4), layout) if rows and len(layout) >= 3 else None
    return growing or (0, *layout), places


def _read_numpy(x: np.ndarray) -> tuple[Any, ...] | None:
    if x.ndim > DIMS or not x.size:
        return None
    return address_of(x), x.shape, x.strides, 1, x.dtype


def _read_tensor(x: Any) -> tuple[Any, ...] | None:
    """Reads a plain tensor on the CPU that nothing follows, transforms or traces."""
    torch: Any = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or x.is_nested or not x.is_cpu:
        return None
    if x.layout is not torch.strided or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if TORCH.forward_ad._current_level >= 0 or TORCH.get_tracing_state() is not None:
        return None
    shape, strides = tuple(x.shape), x.stride()
    if len(shape) > DIMS or 0 in shape:
        return None
    end = sum([(n - 1) * step for n, step in zip(shape, strides, strict=True)]) + 1
    try:
        address = torch_tensors.read_address(x)
    except RuntimeError:  # a wrapper of torch.func
        return None
    if not (address and has_bytes(x, end * x.itemsize)):
        return None
    return address, shape, strides, x.itemsize, x.dtype


def _without_keys(axis: int, has_rows: bool, arrays: list[Any]) -> tuple[Any, ...] | None:
    """Returns the layout of a call of few queries without the number of its keys; None for another call.

    axis: of the rows of q, k and v. The strides of k and v are left out, but for the last, and if heads lie inside of a
    token's row.
    """
    (_, q, _), (k_dtype, k, k_strides), (v_dtype, v, v_strides), *others = arrays
    if not len(q) == len(k) == len(v) == 4:
        return None
    keys, queries = k[axis], q[axis]
    if queries > FEW_ROWS or v[axis] != keys:
        return None
    most = queries if has_rows and queries < keys else 1
    for _, shape, _ in others:
        if not (len(shape) > 1 and shape[-1] == keys > 1 and shape[-2] in (1, most)):
            return None
    inside = 0 < k_strides[3 - axis] < k_strides[axis]
    whole = [
        (dtype, shape[:axis] + shape[axis + 1 :], strides[-1])
        for dtype, shape, strides in ((k_dtype, k, k_strides), (v_dtype, v, v_strides))
    ]
    masks = [(dtype, shape[:-1], strides[-1]) for dtype, shape, strides in others]
    return (spans_of(keys), inside, arrays[0], *whole, *masks)


def is_growing(layout: Any) -> bool:
    """Returns whether a layout leaves out the number of keys."""
    return layout[:8] != bytes(8) if type(layout) is bytes else layout[0] != 0


def addresses_in(places: bytes) -> list[int]:
    """Returns the address of each array."""
    return [words[0] for words in PLACE.iter_unpack(places)]


def array_places(places: bytes) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Returns address, sizes and strides in bytes of each array; zeros fill up what it lacks of DIMS dimensions."""
    return [(words[0], words[1 : 1 + DIMS], words[1 + DIMS :]) for words in PLACE.iter_unpack(places)]


# --- running


class Prepared:
    """A prepared call, and whatever else its next run needs.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(
        self, call: Any = None, put: Any = None, *, given: Sequence[Array | np.ndarray] = (), staged: bool = False
    ) -> None:
        """call: what an engine prepared; None if new tokens are only stored, by `put`. given: q, k, v and `out`, where
        the caller's own array is written to. staged: results go to new memory first, since a lookup may turn out to be
        out of range.
        """
        self.call: Any = call if call is None or put is None else call.storing(put)
        self.put: Any = put
        self.staged = staged
        self.reach = [_reach_of(x) for x in given]
        self.counts = list(self.put.counts if call is None else call.problem.q_lengths)  # of each sequence new rows
        self.new = 0 if put is None else self.counts[0]  # tokens of each sequence of a cache
        self.spans = 0 if call is None else spans_of(max(call.problem.k_lengths, default=0))

    @property
    def size(self) -> int:
        """Bytes that it keeps alive."""
        return sum([x.size for x in (self.call, self.put) if x is not None])

    def fits(self, lengths: Sequence[int]) -> bool:
        """Returns whether it was prepared for sequences of these lengths, new tokens included."""
        if self.call is None:
            return True
        return min(lengths) > 0 and self.spans // 2 * SPAN < max(lengths) <= self.spans * SPAN

    def run(
        self, q: Any, places: bytes, *, return_lse: bool = False, seed: int = 0, lengths: _Ints = None,
        lists: _Ints = None, store: tuple[int, int] = (0, 0), arrays: Sequence[Any] = (), out: Any = None, at: int = 0,
    ) -> Any:  # fmt: skip
        """Runs the call for other arrays; returns out, or (out, lse); None if `out` cannot be written to.

        Args:
            q: the queries, as the caller has them: results are of their kind.
            places: of q, k and v, and of the arrays of mask and score: the second part of read(). Of keys in two parts
                the second is in v's place.
            seed: of dropout.
            lengths: keys of each sequence, with those that are new, where they are not as they were.
            lists: addresses of the numbers of each sequence's pages.
            store: addresses of a cache's keys and values; then k and v are new tokens, which go there first.
            arrays: of mask and score.
            out: the caller's own array, which lies at `at`, if the call was prepared for one.
        """
        call = self.call
        record = call.record
        is_alike = call.result_layout.alike and type(q) is not np.ndarray
        if is_alike and record is not None and not return_lse and out is None:
            # machine code makes a tensor like q itself
            made = record.run(record.address, places, *store, q, 0, 0, seed, lengths, lists)
            if made is not None and made is not False:
                return made
        if out is not None and not self._is_apart(out, [*addresses_in(places)[:3], at]):
            return None
        new, new_at, lse, lse_at = self._results(q, return_lse, None if self.staged else out, at)
        call.run_again(places, new_at, lse_at, seed, lengths, lists, store, arrays)
        if new is not out and out is not None:
            deliver(replace(describe(new, "out"), final=describe(out, "out")))
            new = out
        return (new, lse) if return_lse else new

    def _results(self, q: Any, return_lse: bool, out: Any, at: int) -> tuple[Any, int, Any, int]:
        """Makes the results of queries, or takes the caller's own array; returns each with its address."""
        layout = self.call.result_layout
        lse, lse_at = fresh(q, layout.lse_shape, None, logarithms=True) if return_lse else (None, 0)
        if out is None:
            out, at = fresh(q, layout.shape, layout.strides, alike=layout.alike)
        elif type(out) is not np.ndarray:
            count_write(out)
        return out, at, lse, lse_at

    def store(self, places: bytes, before: list[int], store: tuple[int, int], lists: list[int] | None = None) -> None:
        """Stores new tokens of a cache or pool without attending.

        places: of k and v. before: tokens of each sequence. store, lists: as for run().
        """
        self.put.start((*addresses_in(places), *store), before, lists)

    def _is_apart(self, out: Any, at: list[int]) -> bool:
        """Returns whether `out`, the last of arrays at these addresses, can be written and shares no memory with the
        others.
        """
        if type(out) is np.ndarray and not out.flags.writeable:
            return False
        *others, (first, last) = [(x + low, x + high) for x, (low, high) in zip(at, self.reach, strict=True)]
        return not any([first < high and low < last for low, high in others])


def _reach_of(x: Array | np.ndarray) -> tuple[int, int]:
    """Returns the first byte of an array and one past the last, from its address."""
    if 0 in x.shape:
        return 0, 0
    reach = [(n - 1) * step for n, step in zip(x.shape, x.strides, strict=True)]
    return sum([min(0, n) for n in reach]), sum([max(0, n) for n in reach]) + x.itemsize
