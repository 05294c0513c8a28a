"""The error bounds, on problems whose roundings are not those of random numbers; and that broken results are outside
them.

`SEED=7 COUNT=10000 PYTHONPATH=tests:tests/support python tests/properties/test_bound.py`
prints the largest share of each bound that is used, by kind of problem.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import FULL
from problems import CODES, DTYPES, numpy_dtype, qkv, taken
from tolerance import assert_within, bounds_of_codes

import speedlight as sl
from speedlight import reference
from speedlight.arrays.dtypes import CODES as CODE_FORMATS
from speedlight.host.machine import current_isa, runnable_isas

Random = np.random.Generator
Size = tuple[int, int]  # length, dim
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]

# dtypes, and codes of caches under queries of them
KINDS = (*DTYPES, *CODES, *(f"{x}, {y}" for x in CODES for y in ("bfloat16", "float16")))

# what q, k or v are made of
FILLS: dict[str, Callable[[Random, Size], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n) * rng.choice([0.1, 1, 3, 8]),
    "sparse": lambda rng, n: rng.standard_normal(n) * (rng.random(n) < rng.choice([0.03, 0.3])) * 8,
    "one-hot": lambda rng,
    n: (rng.integers(0, n[1], (n[0], 1)) == np.arange(n[1])) * rng.standard_normal((n[0], 1)) * 4,
    "constant rows": lambda rng, n: np.broadcast_to(rng.standard_normal((n[0], 1)) * rng.choice([0.3, 1]), n),
    "constant columns": lambda rng, n: np.broadcast_to(rng.standard_normal((1, n[1])), n),
    "one number": lambda rng, n: np.full(n, rng.standard_normal() * rng.choice([0.1, 0.5])),
    "powers of two": lambda rng, n: np.exp2(rng.integers(-9, 3, n)) * rng.choice([-1, 1], n),
    "few rows": lambda rng, n: rng.standard_normal((3, n[1]))[rng.integers(0, 3, n[0])] * 2,
    "whole numbers": lambda rng, n: rng.integers(-3, 4, n).astype(float),
    "alternating": lambda rng, n: np.abs(rng.standard_normal(n)) * np.where(np.indices(n).sum(0) % 2, 1, -1) * 3,
    "half and half": lambda rng, n: np.where(np.arange(n[1]) < n[1] / 2, *rng.standard_normal(2)) + np.zeros(n),
    "positive": lambda rng, n: np.abs(rng.standard_normal(n)) * rng.choice([0.3, 2]),
    "sorted": lambda rng, n: np.sort(rng.standard_normal(n) * 2, axis=0)[:: rng.choice([-1, 1])],
    "one large row": lambda rng,
    n: np.where(np.arange(n[0])[:, None] == rng.integers(0, n[0]), 5.0, 0.01) * rng.standard_normal(n),
    "one row": lambda rng, n: (np.arange(n[0])[:, None] == rng.integers(0, n[0])) * rng.standard_normal(n) * 4,
    "wide range": lambda rng, n: rng.standard_normal(n) * np.exp2(rng.integers(-30, 4, n)),
    "subnormal": lambda rng, n: rng.integers(-40, 41, n) * 2.0**-149,
}  # fmt: skip
_LENGTHS = (1, 2, 3, 17, 127, 128, 129, 300, 640, 1024, 1100, 2500)
_DIMS = (1, 2, 3, 4, 8, 9, 16, 33, 64, 128, 256)


def structured_problem(rng: Random, dtype: str) -> tuple[str, Arrays, dict[str, Any]]:
    """Its kind, arrays and options: any pairing of FILLS, for the decode kernel or the other one."""
    names = [str(rng.choice(list(FILLS))) for _ in range(3)]
    names[1] = names[0] if rng.random() < 0.3 else names[1]
    length, d, dv = (int(rng.choice(x)) for x in (_LENGTHS, _DIMS, (16, 21)))
    rows = int(rng.choice([3, 40]))
    with np.errstate(over="ignore"):
        q, k, v = (
            FILLS[name](rng, size).astype(numpy_dtype(dtype))[None, None]
            for name, size in zip(names, ((rows, d), (length, d), (length, dv)), strict=True)
        )
    options: dict[str, Any] = {"scale": float(rng.choice([1.0, -0.3, 0.05]))} if rng.random() < 0.3 else {}
    if rng.random() < 0.2:
        options["sink_logits"] = [float(rng.standard_normal() * 4)]
    return "/".join(names), (q, k, v), options


def computed(arrays: Arrays, options: dict[str, Any], codes: str | None) -> tuple[Arrays, Any]:
    """What (q, k, v) are to the reference, and (out, lse); `codes`: from a cache of these."""
    if codes is None:
        return arrays, sl.attention(*arrays, return_lse=True, **options)
    q, k, v = arrays
    cache = sl.KVCache(
        layers=1, batch=1, kv_heads=1, head_dim=k.shape[3], value_dim=v.shape[3], capacity=k.shape[2], dtype=codes
    )
    cache.append(0, k, v)
    result = cache.attend(0, q, return_lse=True, **options)
    return (q, cache.keys(0).astype(np.float32), cache.values(0).astype(np.float32)), result


def bounds_of(arrays: Arrays, codes: str | None, **options: Any) -> reference.Bounds:
    """The bounds of the unit in use."""
    if codes is None:
        return reference.error_bound(*arrays, dot=current_isa().dot(arrays[0].dtype), **options)
    return bounds_of_codes(*arrays, codes, **options)


def shares(arrays: Arrays, options: dict[str, Any], codes: str | None = None) -> list[float]:
    """How much of the bound of out and of lse is used, and of the proven bounds. All within, or it raises."""
    arrays, (out, lse) = computed(arrays, options, codes)
    given = arrays if codes is None else (arrays[0].astype(np.float32), *arrays[1:])
    want, want_lse = reference.attention(*given, return_lse=True, **options)
    found = []
    for proven in (False, True):
        bounds = bounds_of(arrays, codes, proven=proven, **options)
        what = "proven" if proven else "ordinary"
        found.append(assert_within(out, want, bounds.out, f"out, {what} bound", zeros_allowed=True))
        found.append(assert_within(lse, want_lse, bounds.lse, f"lse, {what} bound", zeros_allowed=True))
    return found


def of_kind(kind: str) -> tuple[str, str | None]:
    """The dtype of arrays, and the codes that keys and values become, of a dtype or of "codes" or "codes, dtype"."""
    codes, _, dtype = kind.partition(", ")
    return dtype or taken(codes), codes if codes in CODES else None


def one_problem(rng: Random, kind: str) -> tuple[str, list[float]]:
    """`kind` is a dtype, or codes of a cache under queries of one."""
    dtype, codes = of_kind(kind)
    name, arrays, options = structured_problem(rng, dtype)
    try:
        return name, shares(arrays, options, codes)
    except AssertionError as error:
        sizes = [x.shape[2:] for x in arrays]
        raise AssertionError(f"{kind} of {name}, shapes {sizes}, {options}, on {current_isa().name}: {error}") from None


@pytest.mark.units("kind")
@pytest.mark.parametrize("kind", KINDS)
def test_structured_problems(isa, kind):
    rng = np.random.default_rng(3)
    for _ in range(60 if FULL else 30):
        one_problem(rng, kind)


@pytest.mark.parametrize("unit", [x.name for x in runnable_isas() if x.dot("bfloat16") == "odd"])
def test_structured_problems_rounded_to_odd(unit, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_ISA", unit)
    test_structured_problems(unit, "bfloat16")


def near_the_largest(rng: Random, arrays: Arrays, dtype: str) -> Arrays:
    """v, or q and k, times so much that sums of theirs are around the largest number there is, or beyond.

    Codes times scales are numbers, too.
    """
    kind, wide = numpy_dtype(dtype), dtype == "float64"
    most = 0.99 * float(ml_dtypes.finfo(kind).max)
    q, k, v = (x.astype(np.float64) for x in arrays)
    sizes = [max(float(np.abs(x).max(initial=0)), 1e-30) for x in (q, k, v)]
    if wide or rng.random() < 0.7:
        v = v / sizes[2] * most * rng.choice([1, 0.5, 0.1, 1e-3, 1e-4])
    else:
        q, k = (x / size * np.sqrt(most) * rng.choice([1, 0.5, 0.1]) for x, size in ((q, sizes[0]), (k, sizes[1])))
    return q.astype(kind), k.astype(kind), v.astype(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_sums_near_the_largest_number(kind):
    """Where one may overflow the bound is infinite; everywhere else it holds."""
    rng, endless, held, overflowed = np.random.default_rng(12), 0, 0, 0
    dtype, codes = of_kind(kind)
    for _ in range(1000 if FULL else 40):
        _, arrays, options = structured_problem(rng, dtype)
        arrays = near_the_largest(rng, arrays, dtype)
        with np.errstate(all="ignore"):
            shares(arrays, options, codes)
            arrays, (out, _) = computed(arrays, options, codes)
            bound = bounds_of(arrays, codes, proven=True, **options).out
        endless, held = endless + np.isinf(bound).sum(), held + np.isfinite(bound).sum()
        overflowed += (~np.isfinite(out.astype(np.float64))).sum()
    # numbers of float16, and those whose scales are, are small to float32
    is_small = dtype == "float16" or (codes is not None and CODE_FORMATS[codes].scale == "float16")
    assert held and (is_small or (endless and overflowed))


def test_one_key_above_equal_ones():
    """Equal terms on top of a large sum: each rounding of a tile's chain has one sign, in numerator and denominator."""
    rng = np.random.default_rng(11)
    for _ in range(60):
        q, k, v = np.zeros((1, 1, 40, 8)), np.zeros((1, 1, 128, 8)), np.full((1, 1, 128, 64), rng.uniform(1, 4))
        q[..., 3], k[0, 0, 0, 3] = rng.uniform(3, 7, 40), 5.0
        arrays = tuple((x * np.linspace(1, 2, 64) if x is v else x).astype(np.float32) for x in (q, k, v))
        shares(arrays, {})


def _without(score: np.ndarray, v: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of one head, whose weights before they are normalised are multiplied by `weights`."""
    top = score.max(axis=1, keepdims=True)
    p = np.exp(score - top) * weights
    total = p.sum(axis=1, keepdims=True)
    return p @ v / total, (top + np.log(total))[:, 0]


@pytest.mark.parametrize("proven", [False, True], ids=["ordinary", "proven"])
@pytest.mark.parametrize(
    "broken", ["one key of many", "half a key", "maximum of another tile", "tile twice", "score", "pair swapped"]
)
def test_broken_results_are_outside(rng, broken, proven):
    q, k, v = qkv(rng, "float32", 1, 1, 1, 20, 1300, 64, 32)
    score, values = q[0, 0].astype(np.float64) @ k[0, 0].T.astype(np.float64) / 8, v[0, 0].astype(np.float64)
    weights = np.ones((20, 1300))
    match broken:
        case "one key of many":
            weights[:, 1299] = 0
        case "half a key":
            weights[:, 600] = 0.5
        case "maximum of another tile":
            weights[:, :128] = np.exp(score[:, 128:256].max(axis=1) - score[:, :128].max(axis=1))[:, None]
        case "tile twice":
            weights[:, 1024:1152] = 2
        case "score":
            score = score * (1 + (1e-3 if proven else 1e-4))
        case "pair swapped":
            values = values[np.arange(1300) ^ 1]
    out, lse = _without(score, values, weights)
    bounds = reference.error_bound(q, k, v, proven=proven)
    want, want_lse = reference.attention(q, k, v, return_lse=True)
    assert_within(*_sound(q, k, v), bounds.out)
    outside = (np.abs(out - want[0, 0]) > bounds.out[0, 0]).any(axis=1)
    assert outside.mean() >= 0.75, f"{outside.mean():.0%} of the rows"
    assert broken == "pair swapped" or (np.abs(lse - want_lse[0, 0]) > bounds.lse[0, 0]).mean() >= 0.75


def _sound(q, k, v):
    return sl.attention(q, k, v), reference.attention(q, k, v)


def main(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    worst: dict[str, np.ndarray] = collections.defaultdict(lambda: np.zeros(4))
    units = [x.name for x in runnable_isas()]
    for _ in range(count):
        kind = str(rng.choice(KINDS))
        os.environ["SPEEDLIGHT_ISA"] = unit = str(rng.choice(units))
        try:
            name, found = one_problem(rng, kind)
        except AssertionError as error:
            print("OUTSIDE:", error, flush=True)
            continue
        label = f"{kind} {unit}" if "bfloat16" in kind else kind
        for row in (label, f"{label}: {name}"):
            worst[row] = np.maximum(worst[row], found)
    for row, x in sorted(worst.items(), key=lambda y: (":" in y[0], -y[1].max()))[:60]:
        print(f"{row:60} out {x[0]:.3f} lse {x[1]:.3f}, proven out {x[2]:.3f} lse {x[3]:.3f}")


if __name__ == "__main__":
    main(int(os.environ.get("SEED", "1")), int(os.environ.get("COUNT", "1000")))
