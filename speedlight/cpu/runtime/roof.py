"""Roofs, measured: the multiply-adds per second of a vector unit, and the bytes per second of a plain read.

Those of this machine are kept beside the kernels, so that a process that asks for them need not measure.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import hashlib
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...arrays.memory import pages
from ...host.machine import Isa, cpu_identity, native_isas
from ...problem.plan import Roofs
from ..kernels.task import joined
from ..language.vector import I64, PTR, Function, Module, vec
from ..memory.records import HEAD, LEFT, LIMIT, TICKET, WORKER, Record
from ..memory.shape import Shape
from ..memory.words import Words
from ..products.product import product_of
from .compile import Kernel, begin_product, compile_ir, host_triple
from .kept_files import cache_directory, keep, read_kept
from .workers import run_region

_CHAINS = {64: 24, 32: 12, 16: 24}  # independent sums: enough for latency times throughput, few enough for registers
_UNROLL = 4  # a taken branch must not count
_ROUNDS = 2_500  # of a ticket: some 30 µs
_READ = 256 << 20  # bytes: more than caches hold
_PIECE = 1 << 20  # bytes of a ticket: in pieces of 64 KiB two threads read a tenth less
_CELLS = 64  # words of sums: each chain begins in one, so that LLVM cannot merge them
ARGUMENTS = Record(*HEAD, "memory", *(f"cell{i}" for i in range(_CELLS)))
OPERANDS = ARGUMENTS.bytes  # vectors behind the arguments


@functools.cache
def _kernels(isa: Isa, storage: str) -> tuple[Kernel, Kernel]:
    """`peak` runs `limit` times _ROUNDS of _UNROLL independent multiply-adds; `read` sums `limit` pieces of memory."""
    s = Shape("forward", isa, storage, 1)
    begin_product(s)
    module = Module("roof")
    _emit_peak(module, s)
    _emit_read(module, isa)
    code = compile_ir(s, str(module), host_triple())
    return Kernel("peak", (code,), False), Kernel("read", (code,), False)


def _emit_peak(module: Module, s: Shape) -> None:
    k, product = module.function("peak", {"a": PTR}, public=True), product_of(s)
    a, start = k.p["a"], ARGUMENTS.offset("cell0")
    k.fetch_add(a, 8 * WORKER, 1)  # as every region does: who is interrupted waits for those inside
    sums = [k.variable(k.load(s.vector, a, start + 8 * i)) for i in range(_CHAINS[s.vector_bytes])]
    x, y = (k.load(s.units, a, OPERANDS + 64 * i) for i in (0, 1))
    with k.forever() as leave_if:
        ticket = k.fetch_add(a, 8 * TICKET, 1)
        leave_if(ticket >= Words(k, ARGUMENTS, a).limit)
        with product.registers(k), k.range(0, _ROUNDS):
            product.multiply_often(k, x, y, sums * _UNROLL)
    for i, total in enumerate(sums):
        k.store(total.get(), a, start + 8 * i)
    _leave(module, s.isa, k, "peak")


def _emit_read(module: Module, isa: Isa) -> None:
    k = module.function("read", {"a": PTR}, public=True)
    a, wide = k.p["a"], vec(I64, isa.vector_bytes // 8)
    words = Words(k, ARGUMENTS, a)
    k.fetch_add(a, 8 * WORKER, 1)
    base = k.pointer(words.memory)
    sums = [k.variable(k.const(0, wide)) for _ in range(8)]
    with k.forever() as leave_if:
        ticket = k.fetch_add(a, 8 * TICKET, 1)
        leave_if(ticket >= words.limit)
        with k.range(ticket * _PIECE, (ticket + 1) * _PIECE, isa.vector_bytes * 8) as at:
            for i, total in enumerate(sums):
                total.set(total.get() + k.load(wide, base, at + i * isa.vector_bytes))
    for i, total in enumerate(sums):  # each to a place of its own: else LLVM drops all but the last, and their loads
        k.store(total.get(), a, OPERANDS + isa.vector_bytes * i)
    _leave(module, isa, k, "read")


def _leave(module: Module, isa: Isa, k: Function, symbol: str) -> None:
    k.fetch_add(k.p["a"], 8 * LEFT, 1)
    joined(module, isa, k.finish(), symbol)


def _timed(kernel: Kernel, limit: int, threads: int, address: int = 0) -> float:
    words = (ctypes.c_int64 * (len(ARGUMENTS.names) + 128))()
    numbers = np.random.default_rng(0).standard_normal(96).astype(np.float32)
    ctypes.memmove(ctypes.addressof(words) + OPERANDS, numbers.ctypes.data, numbers.nbytes)
    words[LIMIT], words[ARGUMENTS.word("memory")] = limit, address
    start = time.perf_counter()
    run_region(kernel, words, threads)
    return time.perf_counter() - start


def peak_flops(isa: Isa, storage: str, threads: int) -> float:
    """FLOP/s of multiply-adds on operands in registers, best of several short runs."""
    kernel, _ = _kernels(isa, storage)
    s = Shape("forward", isa, storage, 1)
    tickets = 100 * threads  # some 3 ms, so that waking a thread does not count
    per_round = _UNROLL * _CHAINS[isa.vector_bytes] * product_of(s).flops_of_step
    best = min([_timed(kernel, tickets, threads) for _ in range(4)])
    return per_round * _ROUNDS * tickets / best


def kind_of_peak(isa: Isa, storage: str, *, gradients: bool = False) -> str:
    """Returns the storage type whose multiply-adds these numbers are multiplied by; tiles in software are of f32."""
    product = isa.product(storage, gradients=gradients)
    return storage if storage == "f64" or (product != "fma" and isa.is_native) else "f32"


def bandwidth(isa: Isa, threads: int, size: int = _READ) -> float:
    """Bytes per second of reading so many MiB in sequence, best of a few. Those that fit a cache come from there.

    From large pages of virtual memory, as caches have them: small ones cost a fifth.
    """
    _, kernel = _kernels(isa, "f32")
    memory = (ctypes.c_char * size).from_buffer(pages(size, large=True))
    ctypes.memset(memory, 1, size)
    best = min([_timed(kernel, size // _PIECE, threads, ctypes.addressof(memory)) for _ in range(4)])
    return size / best


class Rate(NamedTuple):
    """A rate that was measured, per second."""

    rate: float
    date: str


READING = "read"  # in place of a storage type: the plain read, which is one for all of them
_known: dict[tuple[Isa, str, int], Rate] = {}  # the machine does not change while a process runs


def roofs(isa: Isa, storage: str, threads: int) -> Roofs:
    """As this machine's were kept; measured, and kept, where they were not."""
    for what in (storage, READING):
        key = isa, what, threads
        if key not in _known:
            _known[key] = kept_rate(*key) or _measured(*key)
    flops, read = _known[isa, storage, threads], _known[isa, READING, threads]
    return Roofs(flops.rate, read.rate, min(flops.date, read.date))


def measure(isa: Isa, storage: str, threads: int) -> Roofs:
    """Measured now. Others may keep the machine busy meanwhile, so the best that it ever reached is kept."""
    for what in (storage, READING):
        _known[isa, what, threads] = _measured(isa, what, threads)
    return roofs(isa, storage, threads)


def _measured(isa: Isa, what: str, threads: int) -> Rate:
    """Measures a rate, and keeps the best that was seen."""
    rate = bandwidth(isa, threads) if what == READING else peak_flops(isa, what, threads)
    best = kept_rate(isa, what, threads)
    found = Rate(max(rate, best.rate) if best else rate, datetime.date.today().isoformat())
    if path := _path(isa, what, threads):
        keep(path, json.dumps(found._asdict() | {"machine": cpu_identity()}).encode())
    return found


def bf16_peaks() -> dict[str, float]:
    """Measures one thread's FLOP/s of products of bfloat16 on every unit of this machine, in turn: the best of each."""
    kinds = {x: kind_of_peak(x, "bf16") for x in native_isas()}
    turns = [{x.name: peak_flops(x, kind, 1) for x, kind in kinds.items()} for _ in range(16)]
    return {x.name: max([turn[x.name] for turn in turns]) for x in kinds}


def faster_unit(unit: Isa, peaks: dict[str, float]) -> str | None:
    """Names the unit whose peak is a fifth or more above that of `unit`, the highest; None if there is none."""
    best = max(peaks, key=lambda name: peaks[name])
    return best if peaks[best] > 1.2 * peaks.get(unit.name, 0.0) else None


def kept_rate(isa: Isa, what: str, threads: int) -> Rate | None:
    """Returns the rate that was kept on this machine, of a storage type's peak or of READING; None without a whole
    file.
    """
    path = _path(isa, what, threads)
    data = read_kept(path) if path else None
    try:
        row = json.loads(data or b"")
        if row["machine"] != cpu_identity() or not (type(row["rate"]) is float and 1e6 < row["rate"] < 1e18):
            return None
        return Rate(row["rate"], str(row["date"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _path(isa: Isa, what: str, threads: int) -> Path | None:
    """One file for each machine that shares the directory."""
    directory = cache_directory()
    name = f"roofs_{isa.name}_{what}_{threads}_{hashlib.sha256(cpu_identity().encode()).hexdigest()[:12]}.json"
    return directory and directory / name
