"""The share of the peak that kernels would reach on Arm's CPUs, as llvm-mca predicts it: `make predict`.

A prediction knows no cache, no front end of the core and no wrong jump: everything lies in the first-level cache. On an
Intel Xeon such predictions were 1.1 to 1.3 times what was measured.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from listing import Loop, blocks_of, hot_listing, hot_loops, loops_of

from speedlight.arrays.dtypes import STORAGE_BYTES
from speedlight.cpu.memory.shape import Kind, Shape
from speedlight.host.machine import isa_named
from speedlight.host.tunings import shipped
from speedlight.problem.problem import TILE

OLDEST = 17  # release of LLVM with models of Neoverse V1 and V2
CPUS = {"neoverse-n1": "Neoverse N1", "neoverse-v1": "Neoverse V1", "neoverse-v2": "Neoverse V2"}
VECTORS = 2  # of queries, in a panel that Arm's tunings think best
_MOVES = re.compile(r"^(\t(?:st|ld)\w+\t.*)\[(x\d+|sp)\], #(-?\d+)$")


# --- llvm-mca


@functools.cache
def find_mca() -> str:
    """Returns the path of an llvm-mca that knows these CPUs; exits if there is none."""
    names = ["llvm-mca", *[f"llvm-mca-{n}" for n in range(30, OLDEST - 1, -1)]]
    paths = [*filter(None, map(shutil.which, names)), *sorted(map(str, Path("/usr/lib").glob("llvm-*/bin/llvm-mca")))]
    for path in paths:
        said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        version = re.search(r"version (\d+)", said)
        if version and int(version[1]) >= OLDEST:
            return path
    sys.exit(f"predict: expected llvm-mca of LLVM {OLDEST} or later; found none. On Debian: apt-get install llvm-19")


@functools.cache
def cycles(body: tuple[str, ...], cpu: str) -> float:
    """Returns the cycles of one turn of a loop, over many; its jumps go nowhere.

    A load or store that moves its address is two instructions: else the address would wait for the data.
    """
    lines = [re.sub(r"\.LBB\w+", "1f", y) for x in body for y in _parted(x)]
    command = [find_mca(), "-mtriple=aarch64", f"-mcpu={cpu}", "-mattr=+fullfp16,+bf16", "-iterations=200"]
    said = subprocess.run(command, input="\n".join(lines) + "\n1:\n", capture_output=True, text=True, check=True).stdout
    counts = dict(re.findall(r"^(Total Cycles|Iterations):\s+(\d+)", said, re.M))
    return int(counts["Total Cycles"]) / int(counts["Iterations"])


def _parted(line: str) -> list[str]:
    found = _MOVES.match(line)
    if found is None:
        return [line]
    by = int(found[3])
    return [f"{found[1]}[{found[2]}]", f"\t{'add' if by >= 0 else 'sub'}\t{found[2]}, {found[2]}, #{abs(by)}"]


@functools.cache
def peak(cpu: str) -> float:
    """Returns vector multiply-adds in a cycle: of 24 sums, which wait for nothing."""
    body = tuple([f"\tfmla\tv{i}.4s, v30.4s, v31.4s" for i in range(24)])
    return round(2 * 24 / cycles(body, cpu)) / 2


# --- kernels


def _listing(kind: Kind, storage: str, vectors: int = 0, *, cached: bool = False, unit: str = "neon") -> str:
    """Returns a kernel's hot loops on Arm; of decoding those that take one row of queries."""
    neon = isa_named(unit)
    tuning = shipped(neon)
    tiles = tuning.register_tiles(neon)
    tiles = replace(tiles, narrow_scores=tiles.narrow_scores[-1:])
    return hot_listing(Shape(kind, neon, storage, vectors, None, cached, None, tuning.fetching, tiles))


def main_loop(listing: str, function: str, height: int = 1) -> Loop:
    """Returns the loop of a function with the most multiply-adds, the shortest; height 2: with another inside."""
    found = [x for x in loops_of(listing) if x.function == function and x.height == height]
    return max(found, key=lambda x: (x.products, -len(x.body)))


def forward_cycles(storage: str, dim: int, cpu: str, unit: str = "neon", vectors: int = VECTORS) -> float:
    """Returns the cycles of a vector of queries in a tile of keys that all of them see."""
    rows, text, quads = 8, _listing("forward", storage, vectors, unit=unit), unit == "neonbf16"
    score, value, weigh = (main_loop(text, x) for x in ("score_tile", "value_tile", "softmax_tile"))
    checks = max(blocks_of(text, "score_tile"), key=lambda x: (sum(y.startswith("\tfmax") for y in x), -len(x)))
    spent = TILE / rows * cycles(tuple(checks), cpu) + TILE / 2 * cycles(weigh.body, cpu)
    products = TILE * dim * vectors / (4 if quads else 1)
    spent += sum(products * cycles(x.body, cpu) / x.products for x in (score, value))
    if quads:  # weights become operands
        packed = next(x for x in loops_of(text) if x.function == "value_tile" and not x.products)
        spent += TILE / 4 * cycles(packed.body, cpu)
    return spent / vectors


def forward_share(storage: str, dim: int, cpu: str) -> float:
    """Returns the share of the peak that a panel reaches."""
    return 2 * TILE * dim / peak(cpu) / forward_cycles(storage, dim, cpu)


def forward_speed(dim: int, cpu: str) -> float:
    """Returns how many times as fast as float32's bfloat16's own instructions are."""
    return forward_cycles("f32", dim, cpu) / forward_cycles("bf16", dim, cpu, "neonbf16", 3)


def backward_share(storage: str, dim: int, cpu: str) -> float:
    """Returns the share of the peak that five products and the weights between them reach, likewise."""
    text = _listing("backward", storage, 3)
    scores, queries, keys = (main_loop(text, x) for x in ("product_tile", "into_queries", "into_keys_2"))
    weights = next(x for x in hot_loops(text) if x.function == "weights")  # of what is seen and usual
    steps = TILE * dim * 3
    spent = TILE * cycles(weights.body, cpu)
    spent += sum(steps * cycles(x.body, cpu) / x.products for x in (scores, scores, queries, keys, keys))
    return 5 * steps / peak(cpu) / spent


def decode_rates(storage: str, cached: bool, cpu: str) -> list[float]:
    """Returns the bytes of keys, then of values, that a row of queries takes in a cycle."""
    text, bytes_at_once = (
        _listing("decode", storage, cached=cached),
        isa_named("neon").lanes(storage) * STORAGE_BYTES[storage],
    )
    keys = main_loop(text, "score_lanes") if cached else main_loop(text, "score_rows", 2)
    return [x.products * bytes_at_once / cycles(x.body, cpu) for x in (keys, main_loop(text, "value_rows_1"))]


# --- the table


def rows() -> list[tuple[str, list[str]]]:
    """Returns what is predicted of each CPU, kernel by kernel."""
    found = []
    for name, share in (("forward", forward_share), ("backward", backward_share)):
        for storage, dtype in (("f32", "float32"), ("f64", "float64")):
            for dim in (64, 128):
                each = [f"{100 * share(storage, dim, cpu):.0f} %" for cpu in CPUS]
                found.append((f"{name}, {dtype}, head_dim {dim}", each))
    for dim in (64, 128):  # Neoverse N1 has none
        each = ["–" if cpu == "neoverse-n1" else f"{forward_speed(dim, cpu):.1f} x float32" for cpu in CPUS]
        found.append((f"forward, bfloat16 on neonbf16, head_dim {dim}", each))
    for cached in (True, False):
        for storage, dtype in (("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")):
            rates = [decode_rates(storage, cached, cpu) for cpu in CPUS]
            for i, what in enumerate(("keys", "values")):
                each = [f"{x[i]:.0f} bytes" for x in rates]
                found.append((f"decode, {what} of {'a cache' if cached else 'arrays'}, {dtype}", each))
    return found


def main() -> None:
    print(f"| kernel | {' | '.join(CPUS.values())} |\n|---|{'---|' * len(CPUS)}")
    for name, each in rows():
        print(f"| {name} | {' | '.join(each)} |", flush=True)


if __name__ == "__main__":
    main()
