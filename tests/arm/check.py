"""The kernels compiled for 64-bit Arm return the bits of this machine, under qemu-user: `make check-arm`. Those of
bfloat16's own instructions have the bits of the same arithmetic by vectors, and lie inside the bound.

Needs aarch64-linux-gnu-gcc and qemu-aarch64-static (Debian: gcc-aarch64-linux-gnu, qemu-user-static).
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import speedlight as sl
from speedlight.arrays.array import describe
from speedlight.arrays.dtypes import numpy_dtype
from speedlight.cpu.engine.forward_call import items_of, kernel_of_problem, words_of
from speedlight.cpu.memory.records import ARGUMENTS, ITEM, SLACK
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime.compile import compile_ir, emit, symbol_of
from speedlight.cpu.runtime.launch import template_of
from speedlight.host.machine import isa_named
from speedlight.problem.build import from_arrays
from speedlight.problem.operands import Dense, Rows
from speedlight.problem.problem import Options

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from tile_problems import OPTIONS, TileProblem, arrays_of, problems
from tolerance import assert_within

HERE = Path(__file__).parent
GCC, QEMU = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
POINTERS = ("q", "k", "v", "out", "lse", "items", "scratch", "numbers")


def words_for(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, unit: str, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, Shape, int]:
    """The argument words of a call on an Arm unit, prepared here, with the items table."""
    described = tuple(describe(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
    problem = from_arrays(*described, Options(**options)).problem
    rows, keys = Rows("bhld", described[0], out.strides), Dense("bhld", *described[1:])
    how, shape = kernel_of_problem(problem, keys.strides(problem.dtype), 1, isa_named(unit))
    items = items_of(problem, how, rows, keys)
    words = words_of(problem, how, rows, keys) | {"item_count": len(items), "seed": options.get("seed", 0)}
    template = np.frombuffer(bytearray(template_of(ARGUMENTS[how.kind], words)), np.int64)
    return template, items, shape, how.scratch_bytes


def run_on_arm(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, folder: Path, unit: str = "neon", **options: Any
) -> tuple[bytes, bytes]:
    out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.empty(q.shape[:3], np.float64 if q.dtype == np.float64 else np.float32)
    words, items, shape, scratch = words_for(q, k, v, out, unit, options)
    memory, offsets = bytearray(), {}
    for name, data in (
        ("q", q),
        ("k", k),
        ("v", v),
        ("pages", np.zeros(1 + SLACK, np.int64)),  # the list of an array without pages
        ("items", items),
        ("scratch", np.zeros(scratch, np.uint8)),
        ("numbers", np.zeros(1, np.int64) if shape.program is None else shape.program.host_words()[0]),
        ("out", out),
        ("lse", lse),
    ):
        memory += b"\0" * (-len(memory) % 64)
        offsets[name] = len(memory)
        if name == "items":
            items[:, ITEM.pages] = offsets["pages"]
        memory += data.tobytes()
    results, record = len(memory) - offsets["out"], ARGUMENTS[shape.kind]
    for name in POINTERS:
        words[record.word(name)] = offsets[name]
    which = np.array([record.word(n) for n in POINTERS], np.int64)
    inside = offsets["items"] + items.strides[0] * np.arange(len(items)) + items.strides[1] * ITEM.pages
    head = struct.pack("<5q", len(words), len(which), len(inside), len(memory), results)
    (folder / "in").write_bytes(head + words.tobytes() + which.tobytes() + inside.astype(np.int64).tobytes() + memory)
    (folder / "kernel.o").write_bytes(compile_ir(shape, emit(shape)))
    binary = folder / "run"
    flags = ["-O2", "-static", f"-DKERNEL={symbol_of(shape)}"]
    subprocess.run(
        [GCC, *flags, str(HERE / "driver.c"), str(folder / "kernel.o"), "-o", str(binary), "-lm"], check=True
    )
    subprocess.run([QEMU, str(binary), str(folder / "in"), str(folder / "out")], check=True)
    data = (folder / "out").read_bytes()
    return data[: out.nbytes], data[offsets["lse"] - offsets["out"] :]


def main() -> None:
    for tool in (GCC, QEMU):
        if shutil.which(tool) is None:
            raise SystemExit(
                f"check-arm: {tool} is missing. On Debian: apt-get install gcc-aarch64-linux-gnu qemu-user-static"
            )
    rng = np.random.default_rng(0)
    wrong = 0
    for dtype in ("float32", "float64", "float16", "bfloat16"):
        for heads, kv_heads, q_len, k_len, d, dv, causal in (
            (2, 1, 40, 300, 33, 20, True),
            (1, 1, 13, 1500, 64, 64, False),
            (3, 3, 70, 70, 16, 7, True),
            (8, 2, 2, 1300, 33, 20, True),  # the decode kernel, as is the second
        ):
            kind = numpy_dtype(dtype)
            shapes = ((1, heads, q_len, d), (1, kv_heads, k_len, d), (1, kv_heads, k_len, dv))
            q, k, v = (rng.standard_normal(s).astype(kind) for s in shapes)
            with tempfile.TemporaryDirectory() as folder:
                got = run_on_arm(q, k, v, Path(folder), causal=causal)
            want = tuple(x.tobytes() for x in sl.attention(q, k, v, causal=causal, return_lse=True))
            same = got == want
            wrong += not same
            print(f"{dtype:9} q {q_len} k {k_len} d {d}/{dv} causal {causal}: {'same bits' if same else 'DIFFERENT'}")
    wrong += sum(not own_bits(p) for p in problems(seed=1) if not p.cached and p.options != "sinks")
    sys.exit(1 if wrong else 0)


def own_bits(p: TileProblem) -> bool:
    """Prints whether a problem has the bits of neonbf16's software; raises if it is finite and outside the bound."""
    (q, k, v), options = arrays_of(p), OPTIONS[p.options]
    with tempfile.TemporaryDirectory() as folder:
        got = run_on_arm(q, k, v, Path(folder), "neonbf16", **options)
    os.environ["SPEEDLIGHT_ISA"] = "neonbf16-software"
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    found = [np.frombuffer(x, y.dtype).reshape(y.shape) for x, y in zip(got, (out, lse), strict=True)]
    same = all(((x == y) | (np.isnan(x) & np.isnan(y))).all() for x, y in zip(found, (out, lse), strict=True))
    if p.finite:
        bound = sl.reference.error_bound(q, k, v, dot="odd", **options)
        want = sl.reference.attention(q, k, v, return_lse=True, **options)
        for name, x, y, most in zip(("out", "lse"), found, want, bound, strict=True):
            assert_within(x, y, most, f"{name} of {p}")
    print(f"{p}: {'same bits' if same else 'DIFFERENT'}")
    return same


if __name__ == "__main__":
    main()
