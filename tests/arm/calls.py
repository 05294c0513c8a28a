"""Whole calls with the kernels for 64-bit Arm return the bits of this machine: `make check-arm`. Those with bfloat16's
own instructions have the bits of the same arithmetic by vectors, and lie inside the bound.

A call is prepared here, as on Arm. In place of its kernel, that for Arm runs under qemu on a copy of this process's
memory, at the same addresses; what it changed is changed here.

Needs aarch64-linux-gnu-gcc and qemu-aarch64-static (Debian: gcc-aarch64-linux-gnu, qemu-user-static).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import speedlight as sl
from speedlight.arrays.dtypes import CODES, numpy_dtype
from speedlight.cpu.runtime import compile
from speedlight.host import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tile_problems import OPTIONS, TileProblem, arrays_of, problems
from tolerance import assert_within

HERE = Path(__file__).parent
GCC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
UNITS = tuple([machine.isa_named(name) for name in ("neon", "neonbf16")])
CASES = "plain", "causal", "score", "special", "large", "dropout", "backward", "decode", "cache"
SIZES = (2, 64, 64), (1, 33, 20), (4, 16, 7)  # kv heads of four, head_dim, value_dim, beside the usual ones


class ArmKernel:
    """A kernel that runs under qemu, in this thread."""

    runs = 0  # of all of them
    address = ticket = last = 0
    from_cache = False

    def __init__(self, shape: Any, folder: Path) -> None:
        self.symbol, self.folder = compile.symbol_of(shape), folder
        code, self.binary = folder / "kernel.o", folder / self.symbol
        code.write_bytes(compile.compile_ir(shape, compile.emit(shape)))
        flags = ["-O2", "-static", f"-DKERNEL={self.symbol}", "-o", str(self.binary)]
        subprocess.run([GCC, str(HERE / "same_addresses.c"), str(code), *flags, "-lm"], check=True)

    def used(self) -> None:
        """Is kept."""

    def entry(self, words: int) -> None:
        ArmKernel.runs += 1
        places, memory, before = (self.folder / x for x in ("places", "memory", "before"))
        regions, end = [], 0
        with open("/proc/self/mem", "rb", buffering=0) as here, open(memory, "wb") as out, open(before, "wb") as copy:
            for at, size in writable_regions():
                here.seek(at)
                try:
                    data = here.read(size)
                except OSError:  # pages that nobody may read
                    continue
                out.write(data)
                copy.write(data)
                regions.append((at, len(data), end))
                end += len(data)
        places.write_text("".join([f"{at:x} {size:x} {place:x}\n" for at, size, place in regions]))
        subprocess.run([QEMU, str(self.binary), str(places), str(memory), f"{words:x}"], check=True)
        old, new = (np.memmap(x, np.uint64, "r") for x in (before, memory))
        with open("/proc/self/mem", "r+b", buffering=0) as here:
            for at, size, place in regions:
                part = slice(place // 8, (place + size) // 8)
                for i in np.flatnonzero(old[part] != new[part]):
                    here.seek(at + 8 * int(i))
                    here.write(new[part][i].tobytes())

    joined = entry


def writable_regions() -> list[tuple[int, int]]:
    """Addresses and bytes of the memory of this process that arrays may lie in."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, rights, _, _, _, *name = line.split()
        first, last = (int(x, 16) for x in ends.split("-"))
        if rights.startswith("rw") and name in ([], ["[heap]"]):
            found.append((first, last - first))
    return found


def results(case: str, dtype: str, seed: int) -> list[np.ndarray]:
    """Arrays that a call of a kind returns, on the unit that SPEEDLIGHT_ISA names."""
    rng, kind = np.random.default_rng(seed), numpy_dtype(dtype)
    rows, keys = 3 if case in ("decode", "cache", *CODES) else 75, 1300 if case in ("plain", "decode") else 270
    kv_heads, d, dv = SIZES[seed % 3] if case in ("plain", "causal", "dropout", "decode") else (2, 36, 24)
    shapes = (1, 4, rows, d), (1, kv_heads, keys, d), (1, kv_heads, keys, dv), (1, 4, rows, dv)
    q, k, v, flow = (rng.standard_normal(x).astype(kind) for x in shapes)
    if case == "special":
        for x in (q, k, v):
            for value in (np.inf, np.nan, 1e-38):
                x[rng.random(x.shape) < 0.003] = value
    if case == "cache" or case in CODES:
        stored = case if case in CODES else dtype
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=36, value_dim=24, capacity=512, dtype=stored)
        unit = os.environ["SPEEDLIGHT_ISA"]
        os.environ["SPEEDLIGHT_ISA"] = "avx2"  # which stores the same
        cache.append(0, k, v)
        os.environ["SPEEDLIGHT_ISA"] = unit
        return list(cache.attend(0, q, return_lse=True))
    options: dict[str, Any] = {
        "score": {"score": sl.softcap(3.0), "mask": sl.window(70, 3) | sl.dilated(5)},
        "large": {"scale": 1e7},
        "dropout": {"dropout": 0.25, "seed": 3},
    }.get(case, {})
    options |= {"causal": case not in ("plain", "large")}
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    if case not in ("backward", "special", "score"):
        return [out, lse]
    return [out, lse, *sl.attention_backward(q, k, v, out, lse, flow, **options)]


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns whether two arrays have the same bits, of NaN that it is one."""
    missing = np.isnan(a.astype(np.float64)), np.isnan(b.astype(np.float64))
    bits = [np.where(x, 0, y.view(f"u{y.itemsize}")) for x, y in zip(missing, (a, b), strict=True)]
    return np.array_equal(*missing) and np.array_equal(*bits)


def has_own_bits(p: TileProblem) -> bool:
    """Prints whether a problem has the bits of neonbf16's software; raises if it is finite and outside the bound."""
    (q, k, v), options, found, before = arrays_of(p), OPTIONS[p.options], [], ArmKernel.runs
    for unit in ("neonbf16", "neonbf16-software"):
        os.environ["SPEEDLIGHT_ISA"] = unit
        found.append(sl.attention(q, k, v, return_lse=True, **options))
    fine = ArmKernel.runs > before and all(same(a, b) for a, b in zip(*found, strict=True))
    if p.finite:
        bound = sl.reference.error_bound(q, k, v, dot="odd", **options)
        want = sl.reference.attention(q, k, v, return_lse=True, **options)
        for name, x, y, most in zip(("out", "lse"), found[0], want, bound, strict=True):
            assert_within(x, y, most, f"{name} of {p}")
    print(f"{p}: {'same bits' if fine else 'DIFFERENT'}", flush=True)
    return fine


def main() -> None:
    for tool in (GCC, QEMU):
        if shutil.which(tool) is None:
            raise SystemExit(f"check-arm: {tool} is missing. On Debian: gcc-aarch64-linux-gnu, qemu-user-static")
    sl.set_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        make, runnable, parts = compile._make, machine.runnable_isas(), Path(folder)
        vars(compile)["_make"] = lambda s: ArmKernel(s, parts) if s.isa.arch == "aarch64" else make(s)
        vars(machine)["runnable_isas"] = lambda: (*runnable, *UNITS)
        wrong = 0
        for n, case in enumerate((*CASES, *CODES)):
            for dtype in ("float32", "float16", "bfloat16", *["float64"] * (case not in CODES)):
                found, before = [], ArmKernel.runs
                for unit in ("avx2", "neon"):
                    os.environ["SPEEDLIGHT_ISA"] = unit
                    found.append(results(case, dtype, n))
                fine = ArmKernel.runs > before and all(same(a, b) for a, b in zip(*found, strict=True))
                wrong += not fine
                print(f"{case:9} {dtype:9} {'same bits' if fine else 'DIFFERENT'}", flush=True)
        wrong += sum([not has_own_bits(p) for p in problems(seed=1) if not p.cached and p.options != "sinks"])
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
