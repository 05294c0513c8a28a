"""The bytes that ggml itself makes of rows: ggml_rows.npz, which tests of codes compare with.

    pip install llama-cpp-python==0.3.36    # it builds ggml; an environment of its own is best
    python tests/support/ggml_rows.py       # writes ggml_rows.npz anew

The file has `x`, float32 rows of 32 numbers, and `q4_0`, the 18 bytes of each row: the scale, a float16, then the codes
plus 8. Byte j has number j in its low half and number j + 16 in its high half. `names` says what each row tries.
C leaves the codes of NaN and of infinite ratios undefined: `q4_0` has there what an x86 CPU answers.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_suffix(".npz")
BLOCK, Q4_0, Q4_0_BYTES = 32, 2, 18  # of ggml.h: numbers of a block, the type's number; bytes of a block


def rows() -> tuple[list[str], np.ndarray]:
    """Returns names and float32 rows, from integers alone, so that no library's random numbers matter."""
    state = np.arange(400 * BLOCK, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state ^= state >> np.uint64(29)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(32)
    unit = ((state >> np.uint64(11)).astype(np.float64) / 2.0**52 - 1.0).reshape(-1, BLOCK)  # in -1 … 1
    random = iter(unit)
    named: list[tuple[str, np.ndarray]] = []

    def add(name: str, *some: np.ndarray) -> None:
        with np.errstate(over="ignore"):
            named.extend((name, np.broadcast_to(np.float32(x), BLOCK)) for x in some)

    def with_at(base: np.ndarray, **values: float) -> np.ndarray:
        """Returns a row with numbers at places: p3=1.0 is place 3."""
        row = np.array(base, np.float64)
        for place, value in values.items():
            row[int(place[1:])] = value
        return row

    add("random", *(next(random) for _ in range(64)))
    add("random cubed", *(next(random) ** 3 for _ in range(32)))
    for exponent in (-149, -140, -130, -127, -126, -120, -100, -60, -30, -25, -24, -23, -20, -15, -14, -13):
        add(f"random x 2^{exponent}", *(next(random) * 2.0**exponent for _ in range(2)))
    for exponent in (13, 15, 16, 17, 18, 19, 20, 24, 60, 100, 126, 127):
        add(f"random x 2^{exponent}", *(next(random) * 2.0**exponent for _ in range(2)))

    add("zeros", np.zeros(BLOCK), -np.zeros(BLOCK))
    for value in (1.0, -1.0, 8.0, -8.0, 1e38, -1e38, 1e-45, -1e-45, 3e-39, 1e-38, 3.4028234663852886e38):
        add(f"all {value:g}", np.full(BLOCK, value))
    # the first of the largest magnitude decides the sign of the scale
    small = next(random) / 2
    pairs = ((0, 31), (5, 6), (15, 16))
    for sign in (1, -1):
        add("two largest", *(with_at(small, **{f"p{one}": sign, f"p{two}": -sign}) for one, two in pairs))
    add("one number", *(with_at(np.zeros(BLOCK), **{f"p{n}": v}) for n in (0, 15, 16, 31) for v in (3.0, -3.0)))
    # codes halfway between two: the largest is 8, so that the scale is -1 or 1
    halves = np.arange(-15, 17) / 2
    add("halves", with_at(halves, p31=8), with_at(halves, p31=-8), with_at(halves * 2.0**-7, p31=8 * 2.0**-7))
    beside = np.nextafter(np.float32(halves), np.float32(np.inf)), np.nextafter(np.float32(halves), np.float32(-np.inf))
    add("beside halves", *(with_at(x, p31=sign * 8) for x in beside for sign in (1, -1)))
    add("halves of thirds", *(with_at(halves / 3, p31=sign * 8 / 3) for sign in (1, -1)))
    add("halves of sevenths", *(with_at(halves / 7, p31=sign * 8 / 7) for sign in (1, -1)))
    # float16 ends at 65504 (65520 rounds to infinity) and at 2^-24 (half of it rounds to zero); 1 / scale is infinite
    # where the scale is below 2^-128
    large = 65503, 65504, 65519, 65520, 65521, 65536, 1e6
    small_ones = (x * 2.0**n for n in (-14, -23, -24, -25, -26) for x in (0.999, 1, 1.001))
    smallest = (2.0**n for n in (-126, -127, -128, -129, -140, -149))
    for scale in (*large, *small_ones, *smallest):
        add(f"scale {scale:g}", *(with_at(next(random) * scale * 7, p9=sign * scale * 8) for sign in (1, -1)))
    add("scale rounds to float16", *(with_at(next(random), p2=8 * (1 + n / 4096)) for n in (1, 2, 3, 5, 6, 7)))
    row = next(random)
    add("NaN", with_at(row, p3=np.nan), with_at(row, p31=-np.nan), np.full(BLOCK, np.nan), with_at(0 * row, p3=np.nan))
    add("infinity", *(with_at(row, p3=sign * np.inf) for sign in (1, -1)), with_at(row, p3=np.inf, p4=-np.inf))
    add("infinity and NaN", with_at(row, p3=np.inf, p4=np.nan), with_at(row, p3=np.nan, p4=-np.inf))
    return [name for name, _ in named], np.stack([x for _, x in named])


def main() -> None:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise SystemExit("ggml_rows: expected llama-cpp-python; it is not installed.")
    ggml = ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libggml-base.so"))
    quantize = ggml.ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    pointer = ctypes.c_void_p
    quantize.argtypes = ctypes.c_int, pointer, pointer, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, pointer
    names, x = rows()
    found = np.zeros((len(x), Q4_0_BYTES), np.uint8)
    written = quantize(Q4_0, x.ctypes.data, found.ctypes.data, 0, len(x), BLOCK, None)
    assert written == found.nbytes
    np.savez_compressed(FILE, x=x, q4_0=found, names=np.array(names))
    print(f"{FILE}: {len(x)} rows, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
