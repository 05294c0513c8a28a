"""Hypothesis strategies that write random masks and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

import speedlight as sl

LENGTH = 400  # entries of the random tables: more than any position in the tests
_rng = np.random.default_rng(7)
IDS = sl.table(np.sort(_rng.integers(0, 9, LENGTH)), "ids")
NOISE = sl.table(_rng.integers(-3, 4, LENGTH).astype(np.int8), "noise")
FLAGS = sl.table(_rng.random(LENGTH) < 0.8, "flags")
GRID = sl.table(_rng.integers(0, 3, (2, LENGTH)), "grid")
BIAS = sl.table(_rng.standard_normal((8, 2 * LENGTH)).astype(np.float32), "bias")
HALVES = sl.table(_rng.standard_normal(LENGTH).astype(np.float16), "halves")
SQUARE = sl.table(_rng.standard_normal((LENGTH, LENGTH + 8)).astype(np.float32), "square")
SEEN = sl.table(_rng.random((2, LENGTH, LENGTH + 8)) < np.linspace(0, 1, LENGTH + 8).round(1), "seen")

numbers = st.integers(-40, 300)
Four = Callable[[Any, Any, Any, Any], Any]


@st.composite
def integers(draw: Any, depth: int = 2) -> Four:
    kind = draw(
        st.sampled_from(
            ["i", "j", "number", "ids", "h"]
            + (["add", "sub", "min", "max", "mod", "div", "abs", "mul", "where"] * (depth > 0))
        )
    )
    if kind == "number":
        n = draw(numbers)
        return lambda b, h, i, j: n + 0 * i
    if kind == "ids":
        table, key = draw(st.sampled_from([IDS, NOISE])), draw(st.booleans())
        return lambda b, h, i, j: table[i if key else j]
    if kind in "ijh":
        return lambda b, h, i, j: {"i": i, "j": j, "h": h}[kind]
    x, y, n = draw(integers(depth - 1)), draw(integers(depth - 1)), draw(st.integers(-9, 20))
    by = {
        "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "min": sl.minimum, "max": sl.maximum, "mod": lambda a,
        b: a % n,
        "div": lambda a, b: a // n, "abs": lambda a, b: sl.abs(a), "mul": lambda a, b: a * n,
        "where": lambda a, b: sl.where(a < b, a, b - n),
    }[kind]  # fmt: skip
    return lambda b, h, i, j: by(x(b, h, i, j), y(b, h, i, j))


WIDE = sl.table(
    np.array(
        [*_rng.integers(-(1 << 63), (1 << 63) - 1, LENGTH - 6), -(1 << 63), (1 << 63) - 1, 0, -1, 1 << 31, -(1 << 62)]
    ),
    "wide",
)
POWERS = (0, 6, 20, 31, 40, 57, 58, 62)
EDGES = (0, 2, 63, 3_000_000_000, (1 << 63) - 1, -(1 << 63), *(1 << n for n in POWERS), *(-(1 << n) for n in POWERS))


@st.composite
def wide_integers(draw: Any, depth: int = 2) -> Four:
    """Integers of any size, which may wrap, shifted and divided by anything."""
    kind = draw(
        st.sampled_from(
            ["i", "j", "number", "wide", "ids"] + ["two"] * 8 * (depth > 0) + ["one", "where"] * (depth > 0)
        )
    )
    if kind == "number":
        n = draw(st.sampled_from(EDGES) | numbers)
        return lambda b, h, i, j: n + 0 * i
    if kind in ("wide", "ids"):
        table, key = {"wide": WIDE, "ids": IDS}[kind], draw(st.booleans())
        return lambda b, h, i, j: table[i if key else j]
    if kind in "ij":
        return lambda b, h, i, j: {"i": i, "j": j}[kind]
    x, y, n = (
        draw(wide_integers(depth - 1)),
        draw(wide_integers(depth - 1)),
        draw(st.sampled_from(EDGES) | st.integers(-9, 20)),
    )
    by = draw(st.sampled_from({
        "two": [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a // b, lambda a, b: a % b,
                lambda a, b: a << b,
                lambda a, b: a >> b, lambda a, b: a ^ b, lambda a, b: a & b, lambda a, b: a | b, sl.minimum,
                sl.maximum],
        "one": [lambda a, b: a * n, lambda a, b: a // n, lambda a, b: a % n, lambda a, b: a + n, lambda a, b: n - a,
                lambda a, b: -a,
                lambda a, b: sl.abs(a), lambda a, b: ~a, lambda a, b: sl.cast(sl.cast(a, float) * 1.5, int)],
        "where": [lambda a, b: sl.where(a < b, a, b - n), lambda a, b: sl.where(b == 0, n, a // b)],
    }[kind]))  # fmt: skip
    return lambda b, h, i, j: by(x(b, h, i, j), y(b, h, i, j))


@st.composite
def masks(draw: Any, depth: int = 2) -> Four:
    kinds = ["causal", "window", "documents", "compare", "flags", "grid", "seen"]
    kind = draw(st.sampled_from(kinds + ["and", "or", "not", "and"] * (depth > 0)))
    if kind in ("and", "or"):
        x, y = draw(masks(depth - 1)), draw(masks(depth - 1))
        return (lambda *a: x(*a) & y(*a)) if kind == "and" else (lambda *a: x(*a) | y(*a))
    if kind == "not":
        x = draw(masks(depth - 1))
        return lambda *a: ~x(*a)
    if kind == "compare":
        x, y = draw(integers()), draw(integers())
        op = draw(st.sampled_from(["__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"]))
        return lambda *a: getattr(x(*a), op)(y(*a))
    left, right = draw(st.integers(0, 200)), draw(st.integers(-20, 50))
    return {
        "causal": lambda b, h, i, j: j <= i, "window": lambda b, h, i, j: (i - j <= left) & (j - i <= right),
        "documents": lambda b, h, i, j: IDS[i] == IDS[j], "flags": lambda b, h, i, j: FLAGS[j],
        "grid": lambda b, h, i, j: GRID[b, i] == GRID[b, j], "seen": lambda b, h, i, j: SEEN[b, i, j + left % 8],
    }[kind]  # fmt: skip


# of a score y, a number c and positions
SCORES: dict[str, Callable[..., Any]] = {
    "alibi": lambda y, c, b, h, i, j: y + c / 64 * (j - i),
    "bias": lambda y, c, b, h, i, j: y + BIAS[h, i - j + LENGTH],
    "halves": lambda y, c, b, h, i, j: y * HALVES[j],
    "square": lambda y, c, b, h, i, j: y + SQUARE[i, j + int(c)],
    "hidden": lambda y, c, b, h, i, j: sl.where(SEEN[b, i, j], -np.inf, y),
    "softcap": lambda y, c, b, h, i, j: c * sl.tanh(y / c),
    "sigmoid": lambda y, c, b, h, i, j: sl.sigmoid(y) * c,
    "scale": lambda y, c, b, h, i, j: y * c - 1,
    "where": lambda y, c, b, h, i, j: sl.where((i + j) % 3 == 0, y, -y / c),
    "max": lambda y, c, b, h, i, j: sl.maximum(y, c - 1.0),
    "log": lambda y, c, b, h, i, j: sl.log2(1.5 + sl.abs(y)),
    "exp": lambda y, c, b, h, i, j: sl.exp(sl.minimum(y, c)),
    "sqrt": lambda y, c, b, h, i, j: sl.sqrt(1 + sl.abs(y)),
    "sum": lambda y, c, b, h, i, j: y + sl.exp2(sl.minimum(-sl.abs(y), c)),
}


@st.composite
def scores(draw: Any, depth: int = 3) -> Callable[..., Any]:
    kind = draw(st.sampled_from(["s", "s", *(SCORES if depth > 0 else ())]))
    if kind == "s":
        return lambda s, b, h, i, j: s
    x, c = draw(scores(depth - 1)), draw(st.floats(0.25, 4.0))
    return lambda s, b, h, i, j: SCORES[kind](x(s, b, h, i, j), c, b, h, i, j)
