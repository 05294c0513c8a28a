"""Pages of codes for tests: each kind of scales, and pages whose places in a table are shuffled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from problems import numpy_dtype

from speedlight import reference

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
LARGEST = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}
KINDS = ("number", "tensor", "heads", "channels", "tokens")  # of scales
STEP = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # the rounding of a result


class Coded(NamedTuple):
    """Pages of codes, their scales, a table and lengths; NaN is where nobody reads."""

    k: Any
    v: Any
    k_scales: Any
    v_scales: Any
    table: np.ndarray
    lengths: list[int]

    def attended(self, q: Any, attend: Any, **options: Any) -> Any:
        """Returns what attention_paged(), ours or the reference's, makes of them."""
        scales = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        return attend(q, self.k, self.v, self.table, self.lengths, **scales, **options)

    def sequence(self, item: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys and values of a sequence in float64, (1, heads, n, dim): codes times scales."""
        n, size = self.lengths[item], self.k.shape[1]
        pages = self.table[item, : -(-n // size)]
        found = []
        for codes, scales in ((self.k, self.k_scales), (self.v, self.v_scales)):
            factors = np.asarray(scales, np.float64)
            factors = factors[..., None] if factors.ndim in (1, 3) else factors
            numbers = (codes.astype(np.float64) * factors)[pages]
            found.append(numbers.reshape(-1, *codes.shape[2:])[:n].swapaxes(0, 1)[None])
        return found[0], found[1]

    def bounds(self, q: np.ndarray, item: int, **options: Any) -> reference.Bounds:
        """Returns the bound of a sequence's results: float32's of codes times scales, which take queries as float32."""
        keys = [x.astype(np.float32) for x in self.sequence(item)]
        return reference.error_bound(q.astype(np.float32), *keys, codes=str(self.k.dtype), **options)


def scales_of(rng: np.random.Generator, kind: str, shape: tuple[int, ...], like: float) -> Any:
    """Returns scales of pages of a shape, about `like`; of tokens and heads they lie heads first."""
    if kind == "number":
        return float(np.float32(like * 1.37))
    made = (like * rng.uniform(0.5, 2.0, shape)).astype(np.float32)
    match kind:
        case "tensor":
            return made[0, 0, 0, :1].reshape(())
        case "heads":
            return made[0, 0, :, 0]
        case "channels":
            return np.ascontiguousarray(made[0, 0].T).T
    return np.ascontiguousarray(made[..., 0].swapaxes(1, 2)).swapaxes(1, 2)


def codes_of(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns codes from the smallest to the largest there are, -128 of int8 among them."""
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    numbers = rng.standard_normal(shape) * LARGEST[dtype] / 5
    return np.clip(numbers, -LARGEST[dtype], LARGEST[dtype]).astype(numpy_dtype(dtype))


def made(
    rng: np.random.Generator, dtype: str, kinds: tuple[str, str], lengths: list[int], *, size: int = 16, heads: int = 2,
    dims: tuple[int, int] = (33, 40),
) -> Coded:  # fmt: skip
    """Makes pages of sequences of these lengths, at places of their own."""
    need = [-(-n // size) for n in lengths]
    count = sum(need) + 3
    order = rng.permutation(count)
    table = np.full((len(lengths), max(need) + 1), -7, np.int32)
    for item, n in enumerate(need):
        table[item, :n], order = order[:n], order[n:]
    shapes = [(count, size, heads, d) for d in dims]
    like = 2.0 / LARGEST[dtype]
    codes = [codes_of(rng, dtype, shape) for shape in shapes]
    scales = [scales_of(rng, kind, shape, like) for kind, shape in zip(kinds, shapes, strict=True)]
    return Coded(*codes, *scales, table, lengths)
