"""Launch: a kernel, its arguments but for addresses, and its tickets: packs words, takes scratch, runs, raises."""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...arrays import torch_tensors
from ...arrays.memory import DIMS, pages
from ...errors import pass_on
from ...expressions.program import LENGTHS, STRIDES, TABLE_WORDS, Program
from ...expressions.tree import Node, out_of_range
from ...host.tunings import Threading
from ..memory.records import CALL, SCRATCH, WRONG, Record
from .compile import Kernel, kernel_of
from .workers import run_alone, run_tickets

Words = tuple[slice, tuple[int, ...]]  # some of the arguments: their place, and what they are


class Place(NamedTuple):
    """An array of a mask or score, in a prepared call."""

    slot: int | None  # of its table; None: nothing looks it up
    dims: int
    is_copied: bool = False  # kernels read no bfloat16: a copy in float32 is made for each call
    first: tuple[int, ...] = ()  # slots of the numbers that are the first row's position, where that may change


class Launch:
    """A kernel with all of its arguments but addresses.

    Never changed once it is used, so that threads may share it.
    """

    def __init__(
        self,
        shape: Any,
        record: Record,
        words: dict[str, int],
        tickets: int,
        threads: int,
        seconds: float,
        wants: Threading,
        *,
        program: Program | None = None,
        groups: tuple[int, int] = (0, 0),
        rest: bytes = b"",
    ) -> None:
        """seconds: of one thread, as guessed. groups: of tasks that share a result, and bytes that each leaves for the
        last of them. rest: what follows the arguments.
        """
        self.shape, self.tickets, self.threads, self.seconds = shape, tickets, threads, seconds
        self.loaded = weakref.ref(kernel_of(shape))
        self.region_seconds = wants.region_seconds
        self.inline = threads == 1 and seconds < wants.region_seconds
        self.partials_at = words.get("scratch_stride", 0) * threads
        self.groups = groups[0]
        self.scratch_bytes = self.partials_at + groups[0] * groups[1]
        self.program, self.lookups = program, []
        self.slots: tuple[Any, ...] = ()
        if program is not None:
            self.lookups, self.slots = program.lookups, program.host_words()
            self.tables_type: Any = ctypes.c_int64 * self.slots[1].size
            words = words | {"numbers": self.slots[0].ctypes.data, "tables": self.slots[1].ctypes.data}
        self.template = template_of(record, words) + rest
        self.words_type = ctypes.c_int64 * (len(self.template) // 8)

    @property
    def size(self) -> int:
        """Bytes that it keeps alive, the tables of its mask and score included."""
        tables = 0 if self.program is None else sum([x.held_bytes for x in self.program.tables])
        return len(self.template) + tables + sum([x.nbytes for x in self.slots])

    def places_of(self, arrays: Sequence[Any], grows: bool = False) -> list[Place] | None:
        """Returns the places of a call's dense masks and scores; None if one is empty, was copied for another reason
        than that kernels read no bfloat16, or is there twice: which table is which, no address tells.

        grows: over any number of keys; then the last row is at the last key.
        """
        if len({id(x) for x in arrays}) < len(arrays):
            return None
        left = [] if self.program is None else list(self.program.tables.items())
        places = []
        for x in arrays:
            found = [n for n, (table, _) in enumerate(left) if table.watched is x]
            if not found:
                places.append(Place(None, x.ndim))
                continue
            table, slot = left.pop(found[0])
            there, is_numpy = table.array, isinstance(x, np.ndarray)
            if not there.size:
                return None
            first = self._find_first(there.shape) if grows and there.shape[-2] > 1 else ()
            if first is None:
                return None
            if there.ctypes.data == (x.ctypes.data if is_numpy else torch_tensors.read_address(x)):
                places.append(Place(slot, x.ndim, first=first))
            elif not is_numpy and str(x.dtype) == "torch.bfloat16":
                places.append(Place(slot, x.ndim, is_copied=True, first=first))
            else:
                return None
        return places

    def _find_first(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Returns the slots of the numbers that are the position of the first row of an array of all keys, or None."""
        assert self.program is not None
        numbers = [node for node in self.program.nodes if node.op == "number"]
        first = shape[-1] - shape[-2]
        return tuple([n for n, x in enumerate(numbers) if not x.is_float and x.value == first]) or None

    def release_tables(self, arrays: Sequence[Any]) -> None:
        """Forgets arrays of masks and scores, which each call has at places of its own."""
        for table in [] if self.program is None else self.program.tables:
            if any([table.watched is x for x in arrays]):
                table.release()

    def tables_at(
        self, places: Sequence[Place], arrays: Sequence[Any], lie: Sequence[tuple[int, Any, Any]],
        keys: int | None = None,
    ) -> Any:  # fmt: skip
        """Returns the words of the tables of a call that has arrays at other addresses, and what must live as long.

        lie: of each array its address, sizes and strides in bytes (problem/prepared.py). keys: columns of each, where
        that may change: then the second result is the numbers.
        """
        words, held, numbers = self.tables_type.from_buffer_copy(self.slots[1]), None, None
        for x, (slot, dims, is_copied, first), (address, sizes, steps) in zip(arrays, places, lie, strict=True):
            if slot is None:
                continue
            if is_copied:
                x = x.detach().float()
                held = x, held
                address = x.data_ptr()
                steps = [step * x.itemsize for step in x.stride()]
            row = slot * TABLE_WORDS
            words[row] = address
            if keys is not None or is_copied:
                words[row + STRIDES + DIMS - dims : row + STRIDES + DIMS] = steps[:dims]
            if keys is not None:
                words[row + LENGTHS + DIMS - 1] = keys
                if first:
                    numbers = self.slots[0].copy() if numbers is None else numbers
                    numbers[list(first)] = keys - sizes[dims - 2]
        return words, numbers, held

    @property
    def kernel(self) -> Kernel:
        """Its kernel; loaded anew where it has been unloaded. Whoever runs it holds it meanwhile."""
        kernel = self.loaded()
        if kernel is None:
            kernel = kernel_of(self.shape)
            self.loaded = weakref.ref(kernel)
        kernel.used()
        return kernel

    def words(self) -> Any:
        """Returns arguments of a call's own, without addresses."""
        return self.words_type.from_buffer_copy(self.template)

    def run(self, words: Any, threads: int = 0) -> None:
        """Runs all tickets. One thread is given for short calls only: no signal comes between."""
        if threads == 1 or self.inline:
            run_alone(self.kernel, words, self.tickets)
        else:
            run_tickets(self.kernel, words, self.tickets, threads or self.threads, self.seconds, self.region_seconds)

    def run_in_scratch(self, call: tuple[int, ...], seed: int, more: tuple[Words, ...] = (), threads: int = 0) -> None:
        """Runs a kernel of attention, and raises for a lookup that it found out of range.

        call: addresses of q, k, v, out, lse, counts and items. more: arguments beside these.
        """
        if not self.tickets:
            return
        wrong = arrived = ()
        words = self.words_type.from_buffer_copy(self.template)
        scratch = take_scratch(self.scratch_bytes)
        try:
            at = ctypes.addressof(scratch)
            if self.groups:
                arrived = (ctypes.c_int64 * self.groups)()
            if self.lookups:
                wrong = (ctypes.c_int64 * (len(WRONG.names) * self.threads))()
            words[SCRATCH] = at
            words[CALL] = (
                *call, at + self.partials_at, ctypes.addressof(arrived) if arrived else 0,
                ctypes.addressof(wrong) if wrong else 0, seed,
            )  # fmt: skip
            for place, values in more:
                words[place] = values
            if threads == 1 or self.inline:
                run_alone(self.kernel, words, self.tickets)
            else:
                self.run(words, threads)
        finally:
            give_scratch(scratch)
        if wrong:
            raise_wrong(self.lookups, wrong)


def threads_for(seconds: float, threads: int, wants: Threading) -> int:
    """Returns how many threads work that takes one of them so long is worth."""
    return threads if seconds > wants.inline_seconds else 1


def template_of(record: Record, words: dict[str, int]) -> bytes:
    """Packs arguments into their record."""
    template = np.zeros(len(record.names), np.int64)
    for name, value in words.items():
        template[record.word(name)] = value
    return template.tobytes()


def raise_wrong(lookups: list[tuple[Node, int]], wrong: Any) -> None:
    """Raises the first, in the order of positions, of the indices that workers have noted as out of range."""
    size = len(WRONG.names)
    noted = wrong[WRONG.word("noted") :: size]
    if not any(noted):
        return
    notes = [wrong[n * size : (n + 1) * size] for n, is_noted in enumerate(noted) if is_noted]
    first = min(notes, key=lambda note: note[WRONG.word("b") : WRONG.word("lookup") + 1])
    node, dimension = lookups[first[WRONG.word("lookup")]]
    raise out_of_range(node, dimension, first[WRONG.word("index")])


# --- scratch

_scratches: deque[Any] = deque(maxlen=4)  # used again: fresh pages cost more than a small call
zeroed: deque[Any] = deque(maxlen=2)  # likewise, of those who leave zeros


def take_scratch(size: int, kept: deque[Any] = _scratches) -> Any:
    """Returns memory of at least so many bytes, whatever is in it; or zeros, of those that are kept so."""
    try:
        scratch = kept.pop()
    except IndexError:
        return take_pages(size)
    return scratch if len(scratch) >= size else take_pages(size)


def take_pages(size: int) -> Any:
    try:
        return (ctypes.c_char * size).from_buffer(pages(size))
    except OSError as error:
        pass_on(error, OSError)
        raise MemoryError(f"{size:,} bytes of scratch cannot be reserved: {error}") from error


def give_scratch(scratch: Any, kept: deque[Any] = _scratches) -> None:
    """Keeps scratch that nobody works in any more for the next call. One that is not given back is freed."""
    if len(scratch) <= 256 << 20:
        kept.append(scratch)
