"""merge() on the CPU: the table of states, and the kernel's run."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ...arrays.dtypes import DTYPES, STORAGE_BYTES
from ...arrays.making import empty_like
from ...arrays.memory import Array
from ...host.machine import current_isa
from ..kernels import merge as kernels
from ..runtime.launch import Launch, threads_for
from ..runtime.tuned import tuning_of
from ..runtime.workers import get_threads

_TICKET_BYTES = 128 << 10  # of outputs that a thread takes at a time
_BYTES, _ROW_SECONDS = 5e9, 20e-9  # what a thread is guessed to do: bytes per second, and seconds for a row of a state
# of a dtype: its number in the kernel
_KINDS = {name: list(STORAGE_BYTES).index(storage) for name, (storage, _) in DTYPES.items()}


def merge(outs: list[Array], lses: list[Array]) -> tuple[Any, Any]:
    """Returns out and lse over all states, as new arrays of the first one's kinds and dtypes."""
    (out, to), (lse, lse_to) = (empty_like(x[0], x[0].shape, x[0].dtype) for x in (outs, lses))
    _fill(outs, lses, to, lse_to)
    return out, lse


def _fill(outs: list[Array], lses: list[Array], out: Array, lse: Array) -> None:
    """Fills `out` and `lse`, which are contiguous."""
    rows, width, states = math.prod(lse.shape), out.shape[-1], len(outs)
    if not rows:
        return
    sizes, steps = _rows(lse.shape, [x.strides[:-1] for x in outs] + [x.strides for x in lses])
    row_bytes = width * sum(DTYPES[x.dtype][1] for x in (*outs, out)) + 16 * states
    ticket_rows = max(1, _TICKET_BYTES // row_bytes // kernels.BLOCK) * kernels.BLOCK
    tickets = -(-rows // ticket_rows)
    seconds = rows * (row_bytes / _BYTES + states * _ROW_SECONDS)
    isa = current_isa()
    wants = tuning_of(isa).threading
    threads = threads_for(seconds, min(get_threads(), tickets), wants)
    table = _table(outs, lses, steps)
    state_words, size_words = (ctypes.c_int64 * len(table))(*table), (ctypes.c_int64 * len(sizes))(*sizes)
    stride = -(-kernels.scratch_bytes(states, len(sizes)) // 64) * 64 + 64  # no cache line belongs to two threads
    scratch = (ctypes.c_char * (stride * threads))()
    words = {
        "scratch": ctypes.addressof(scratch),
        "scratch_stride": stride,
        "states": ctypes.addressof(state_words),
        "count": states,
        "state_bytes": ctypes.sizeof(state_words) // states,
        "sizes": ctypes.addressof(size_words),
        "dims": len(sizes),
        "rows": rows,
        "ticket_rows": ticket_rows,
        "value_dim": width,
        "strided": int(width > 1 and any([x.strides[-1] != DTYPES[x.dtype][1] for x in outs])),
        "out": out.address,
        "out_kind": _KINDS[out.dtype],
        "lse": lse.address,
        "lse_kind": _KINDS[lse.dtype],
    }
    launch = Launch(kernels.MergeShape(isa), kernels.ARGUMENTS, words, tickets, threads, seconds, wants)
    launch.run(launch.words())


def _rows(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    """Returns the sizes of as few dims of rows as will do, and each array's steps: neighbours that are one in every
    array are joined.
    """
    sizes: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all([own[-1] == x[d] * size for own, x in zip(steps, strides, strict=True)]):
            sizes[-1] *= size
            for own in steps:
                own.pop()
        else:
            sizes.append(size)
        for own, x in zip(steps, strides, strict=True):
            own.append(x[d])
    return (sizes, steps) if sizes else ([1], [[0]] * len(strides))


def _table(outs: list[Array], lses: list[Array], steps: list[list[int]]) -> list[int]:
    """Returns the kernel's table of states: STATE, then the steps of out and lse in each dim of the rows."""
    table: list[int] = []
    for x, log, own, log_own in zip(outs, lses, steps, steps[len(outs) :], strict=False):
        table += (x.address, _KINDS[x.dtype], x.strides[-1], log.address, _KINDS[log.dtype])
        for pair in zip(own, log_own, strict=True):
            table += pair
    return table
