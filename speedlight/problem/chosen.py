"""Chosen keys, the option `indices`: read, checked and put in order once; and the mask that means the same."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.array import is_masked
from ..arrays.dlpack import has
from ..arrays.torch_tensors import check_plain_tensor, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, pass_on
from ..expressions.program import hiding_condition
from ..expressions.symbols import Symbol
from ..expressions.tables import Table, plainly
from ..expressions.tracing import Expression, expression
from .problem import TILE, Problem
from .work import Work

NONE = 2**31 - 1  # ends a list of keys: no key has this number
_SLACK = 160  # numbers past the end of a list that kernels may read: of a tile, and what is fetched ahead
_BITS = 32  # of a word of the mask
_ROWS = 1 << 24  # entries whose bits are made at once


@dataclass(frozen=True, eq=False)
class Chosen:
    """Keys that each query sees, at most.

    lists: (items, heads, rows, most), int32: numbers of keys ascending, each once, then NONE. The heads are kv heads,
    or one for all. The items of packed sequences are one, whose rows begin at `first`.
    """

    lists: np.ndarray
    counts: np.ndarray  # (items, heads, rows)
    first: tuple[int, ...] | None  # of each item of packed sequences, its first row

    @property
    def has_heads(self) -> bool:
        """Returns whether each kv head has lists of its own."""
        return self.lists.shape[1] > 1

    def place_of(self, item: int) -> tuple[int, int]:
        """Returns where an item's first query has its list: the item and the row of `lists`."""
        return (item, 0) if self.first is None else (0, self.first[item])

    def mask(self, problem: Problem) -> Expression:
        """Returns the mask that shows the same keys."""
        table = _Bits(self, max(problem.k_lengths, default=0))
        starts = [x - self.place_of(n)[1] for n, x in enumerate(problem.q_starts)]
        first: Any = max(starts, default=0) if len(set(starts)) <= 1 else Table(np.array(starts, np.int64), "q_start")
        has_items, has_heads, group = self.lists.shape[0] > 1, self.has_heads, problem.group
        start = problem.k_start

        def is_chosen(b: Symbol, h: Symbol, i: Symbol, j: Symbol) -> Any:
            row = i - (first[b] if isinstance(first, Table) else first)
            key = j - start
            word = table[b if has_items else b * 0, h // group if has_heads else h * 0, row, key >> 5]
            return ((word >> (key & (_BITS - 1))) & 1) != 0

        return expression(is_chosen, "mask")


def work_of(problem: Problem, panel: int, unit: int) -> Work:
    """Counts the work of a call that reads chosen keys alone, in units of so many, on panels of so many rows."""
    chosen, heads = problem.chosen, problem.kv_heads
    lists, full, keys, pairs = chosen.lists, 0, 0, 0
    for item, (q_len, k_len, start) in enumerate(
        zip(problem.q_lengths, problem.k_lengths, problem.q_starts, strict=True)
    ):
        place, row = chosen.place_of(item)
        seen = lists[place, :, row : row + q_len]
        ends = np.full((q_len, 1), k_len)
        if problem.causal:
            ends = np.minimum(ends, start - problem.k_start + 1 + np.arange(q_len)[:, None])
        visible = seen < ends
        pairs += int(np.count_nonzero(visible))
        full += _count_distinct(seen // TILE, visible)
        keys += _count_distinct(seen // unit, visible) * unit
    times = 1 if chosen.has_heads else heads
    panels = -(-problem.group // panel)
    hides = problem.mask is not None or hiding_condition(problem.roots[1]) is not None
    whole = 0 if hides or unit > 1 else full * times * panels
    return Work(
        visible_pairs=None if hides else pairs * times * problem.group,
        full=whole,
        mixed=full * times * panels - whole,
        skipped=0,
        panel_keys=keys * times * panels,
        mixed_keys=0 if whole else keys * times * panels,
    )


def read_share(problem: Problem) -> float:
    """Returns the share of all keys that any query has chosen."""
    chosen, found = problem.chosen, 0
    for item, q_len in enumerate(problem.q_lengths):
        place, row = chosen.place_of(item)
        for lists in chosen.lists[place, :, row : row + q_len]:
            found += len(np.unique(lists[lists < problem.k_lengths[item]]))
    total = sum(problem.k_lengths) * (chosen.lists.shape[1])
    return found / total if total else 0.0


def _count_distinct(groups: np.ndarray, visible: np.ndarray) -> int:
    """Counts the different groups of each list that are visible; lists ascend, so that alike ones adjoin."""
    first = visible.copy()
    first[..., 1:] &= groups[..., 1:] != groups[..., :-1]
    return int(np.count_nonzero(first))


def joined(problem: Problem) -> Problem:
    """Returns the problem with the equal mask in place of chosen keys."""
    if problem.chosen is None:
        return problem
    mask = problem.chosen.mask(problem)
    return replace(problem, mask=mask if problem.mask is None else problem.mask & mask, chosen=None)


_making = threading.Lock()


class _Bits(Table):
    """Table of bits, one for each query and key, that is made when it is first looked up."""

    def __init__(self, chosen: Chosen, keys: int) -> None:
        words = max(1, -(-keys // _BITS))
        super().__init__(
            np.broadcast_to(np.zeros((), np.int32), (*chosen.lists.shape[:3], words)), "indices", copy=False
        )
        self._chosen: Chosen | None = chosen

    def _follow(self) -> Any:
        with _making:  # one array for all threads, whose kernels have its address
            if self._chosen is not None:
                self._bound = self._bound._replace(array=_bits_of(self._chosen, self.shape))
                self.watched, self._chosen = None, None
        return self._bound


def _bits_of(chosen: Chosen, shape: tuple[int, ...]) -> np.ndarray:
    words, lists = np.zeros(shape, np.uint32), chosen.lists.reshape(-1, chosen.lists.shape[-1])
    width = shape[-1] * _BITS
    rows = words.reshape(-1, shape[-1])
    step = max(1, _ROWS // (width + 1))
    for at in range(0, len(rows), step):
        part = np.minimum(lists[at : at + step], width)
        seen = np.zeros((len(part), width + 8), bool)
        np.put_along_axis(seen, part, True, axis=1)
        packed = np.packbits(seen[:, :width], axis=1, bitorder="little")
        rows[at : at + step] = packed.view("<u4")
    return words.view(np.int32)


def check_device(indices: Any, device: str) -> None:
    """Raises for a call on a GPU, which has no kernel for chosen keys."""
    if indices is not None and device != "cpu":
        raise UnsupportedError(
            f"indices: expected None on a GPU; got chosen keys for a q on {device}. Call with q.cpu(), k.cpu() and "
            "v.cpu(), or give a mask of the same keys."
        )


def chosen_of(indices: Any, problem: Problem, layout: str, rows: int, keys: int) -> Chosen:
    """Reads the option `indices` of a problem; rows: the queries of an item, or all packed ones; keys: how many there
    are.
    """
    array = _read(indices)
    packed, heads = layout == "lhd", problem.kv_heads
    lead = () if len(layout) == 3 else (problem.batch,)
    shapes = [(*lead, rows), (*lead, heads, rows)]
    if lead and array.ndim in (3, 4) and array.shape[0] == 1:  # of all items
        array = np.broadcast_to(array, (problem.batch, *array.shape[1:]))
    if array.ndim < 1 or array.shape[:-1] not in shapes:
        names = ", ".join(["batch", "q_len", "k"][1 - len(lead) :])
        by_head = ", ".join(["batch", "kv_heads", "q_len", "k"][1 - len(lead) :])
        way = ""
        if array.ndim == len(lead) + 3 and array.swapaxes(-3, -2).shape[:-1] == shapes[1]:
            way = " Use indices.swapaxes(-3, -2)."
        elif array.ndim == len(lead) + 3:
            way = " Query heads of a group share the list of their kv head."
        expected = " or ".join(
            [f"({a}) = ({', '.join(map(str, b))}, k)" for a, b in ((names, shapes[0]), (by_head, shapes[1]))]
        )
        raise ArgumentError(f"indices: expected shape {expected}; got {array.shape}.{way}")
    if array.size and (array.min() < -1 or array.max() >= keys):
        bad = np.argwhere((array < -1) | (array >= keys))[0]
        place = ", ".join(map(str, bad))
        numbers = (
            f"numbers of keys from 0 to {keys - 1}, or -1 for none" if keys else "-1 alone, since there are no keys"
        )
        of_each = ", counted from each sequence's first key" if packed else ""
        raise ArgumentError(
            f"indices: expected {numbers}{of_each}; got {array[tuple(bad)]} at [{place}]. Write "
            f"np.where(indices < {keys}, indices, -1) for keys that are not there."
        )
    if keys >= NONE:
        raise ArgumentError(f"indices: expected fewer than 2^31 - 1 keys; got {keys}.")
    by_heads = array.ndim == len(shapes[1]) + 1
    shape = (problem.batch if lead else 1, heads if by_heads else 1, rows, array.shape[-1])
    lists, counts = _sorted(array.reshape(shape))
    first = None
    if packed:
        first = tuple(itertools.accumulate(problem.q_lengths, initial=0))[:-1]
    return Chosen(lists, counts, first)


def _sorted(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns lists of keys ascending, each once, then NONE; and how many each has."""
    lists = np.full((*array.shape[:-1], array.shape[-1] + _SLACK), NONE, np.int32)
    keys = lists[..., : array.shape[-1]]
    np.copyto(keys, array, where=array >= 0, casting="unsafe")
    keys.sort(axis=-1)
    again = np.zeros(keys.shape, bool)
    np.equal(keys[..., 1:], keys[..., :-1], out=again[..., 1:])
    again &= keys != NONE
    if again.any():
        keys[again] = NONE
        keys.sort(axis=-1)
    return lists, np.count_nonzero(keys != NONE, axis=-1)


def _read(x: Any) -> np.ndarray:
    """Returns whole numbers of any library on the CPU, perhaps in the caller's memory."""
    what = "an array of whole numbers on the CPU"
    if is_tensor(x):
        check_plain_tensor(x, "indices")
        if x.device.type != "cpu":
            raise ArgumentError(f"indices: expected a tensor on the CPU, as q; got one on {x.device}. Use .cpu().")
    if is_masked(x):
        raise ArgumentTypeError(f"indices: expected {what}; got a {type(x).__name__}. Use indices.filled(-1).")
    is_array = is_tensor(x) or isinstance(x, (np.ndarray, list, tuple))
    if not is_array and (
        isinstance(x, type) or not (has(x, "indices", "__array__") or has(x, "indices", "__dlpack__"))
    ):
        raise ArgumentTypeError(f"indices: expected {what}; got {type(x).__name__}.")
    try:
        given: Any = x
        if is_tensor(x):
            with plainly():
                array = given.detach().numpy()
        else:
            array = np.asarray(given) if is_array or has(x, "indices", "__array__") else np.from_dlpack(given)
    except Exception as error:  # ragged lists, other libraries' code
        pass_on(error)
        raise ArgumentTypeError(f"indices: expected {what}; got {type(x).__name__} ({error}).") from error
    if array.dtype.kind not in "iu" and (array.size or array.dtype.kind != "f"):
        raise ArgumentTypeError(f"indices: expected whole numbers; got {array.dtype}, shape {array.shape}.")
    return array if array.dtype.isnative and array.size else array.astype(np.int64)
