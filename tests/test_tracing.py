"""Tracing: what a function becomes, what is refused, and what makes two expressions the same."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import speedlight as sl
from speedlight.tree import evaluate

TABLE = sl.table(np.arange(12).reshape(3, 4), "grid")


def value(function, **env):
    traced = sl.expression(function)
    return evaluate(traced.root, {"b": 0, "h": 1, "i": 7, "j": 5, "s": 0.5} | env)


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda s, b, h, i, j: (i + j - 3) * 2 // 5 % 4 - (-i) + abs(j - i), 3 + 7 + 2),
        (lambda s, b, h, i, j: -7 // (j - 3) + (-7) % (j - 2), -4 + 2),
        (lambda s, b, h, i, j: (i & 3) | (j << 2) ^ (i >> 1), 3 | (20 ^ 3)),
        (lambda s, b, h, i, j: i / 2 + 2**j + j**2 + s**0.5 - (~i), 3.5 + 32 + 25 + 0.5**0.5 + 8),
        (lambda s, b, h, i, j: sl.where((i > j) & ~(i == j), sl.minimum(i, 3), 0) + sl.maximum(j, 6), 9),
        (lambda s, b, h, i, j: sl.floor(s * 5) + sl.cast(s * 5, int) + sl.cast(i > 3, float) + (i > 3), 6),
        (
            lambda s, b, h, i, j: sl.exp(s) + sl.exp2(s) + sl.log(s) + sl.log2(s) + sl.tanh(s) + sl.sqrt(s) + sl.sigmoid(s) + sl.abs(-s),
            None,
        ),
        (lambda s, b, h, i, j: TABLE[h, j - 2] + TABLE[2, 3] + TABLE[b, h], 7 + 11 + 1),
        (lambda s, b, h, i, j: np.float32(2) * i + np.int64(3), 17),
    ],
)
def test_operators(function, want):
    if want is None:
        want = np.exp(0.5) + 2**0.5 + np.log(0.5) + np.log2(0.5) + np.tanh(0.5) + 0.5**0.5 + 1 / (1 + np.exp(-0.5)) + 0.5
    assert np.isclose(float(value(function)), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, i, j: i if i > j else j, "use sl.where"),
        (lambda b, h, i, j: (i > j) and (j > 3), "use sl.where"),
        (lambda b, h, i, j: max(i, j) > 3, "use sl.where"),
        (lambda b, h, i, j: [1, 2][i] > 1, "use sl.where"),
        (lambda b, h, i, j: np.arange(4) + i > 1, "sl.table"),
        (lambda b, h, i, j: i.sum() > 1, "no attribute 'sum'"),
        (lambda b, h, i, j: i + j, "expected a bool result"),
        (lambda b, h, i, j: (i / 2) & 1 > 0, "expected bool or integers"),
        (lambda b, h, i, j: TABLE[i] > 0, "expected 2 indices; got 1"),
        (lambda b, h, i, j: TABLE[i, j / 2] > 0, "expected an integer as index 2"),
        (lambda b, h, i, j: i > 2**70, "that int64 holds"),
        (lambda b, h, i, j: i > "x", "expected a symbol or a Python number"),
        (lambda b, h, i, j: sl.where(i, 1, 2) > 1, "expected a bool condition"),
        (lambda b, h, i, j: i << 64 > 1, "expected a shift of 0 to 63"),
        (lambda x, y: x > y, "expected the arguments"),
    ],
)
def test_refused(function, message):
    with pytest.raises(sl.ExpressionError, match=message):
        sl.expression(function)


def test_tables_refuse():
    with pytest.raises(sl.ArgumentError, match="1 to 4 dimensions"):
        sl.table(np.zeros((1,) * 5))
    with pytest.raises(sl.ArgumentTypeError, match="got dtype complex128"):
        sl.table(np.zeros(3, complex))
    source = np.arange(4)
    table = sl.table(source)
    source[:] = 9
    assert table[2] == 2 and "int64[4]" in repr(table)


def test_masks_combine():
    both = sl.causal() & (sl.window(8, 0) | ~sl.prefix(4))
    assert repr(both) == "mask ((j <= i) & ((((i - j) <= 8) & ((j - i) <= 0)) | ~(j < 4)))"
    assert repr(sl.causal() & (lambda b, h, i, j: h == 0)) == "mask ((j <= i) & (h == 0))"
    with pytest.raises(sl.ExpressionError, match="two masks"):
        sl.causal() & sl.softcap(2.0)
    with pytest.raises(sl.ExpressionError, match="truth value"):
        bool(sl.causal())


def test_structure_is_the_key():
    assert sl.window(5, 0) == sl.window(5, 0) and sl.window(5, 0) != sl.window(6, 0)
    assert sl.window(5, 0).key == sl.window(6, 0).key and hash(sl.window(5, 0)) == hash(sl.window(6, 0))
    assert sl.window(5, 0).key != sl.window(None, 0).key
    assert sl.expression(lambda b, h, i, j: i + j > 1).key != sl.expression(lambda b, h, i, j: j + i > 1).key
    code = "import speedlight as sl; print(hash(sl.window(5, 0) & sl.causal()))"
    hashes = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert hashes == {f"{hash(sl.window(9, 0) & sl.causal())}\n"}


def test_functions_are_accurate(isa):
    """At most 2 ulp (sigmoid 3) in the kernels' own code: scores of one key, read back from the log-sum-exp."""
    x = np.concatenate([np.linspace(-90, 90, 20001), np.geomspace(1e-30, 80, 5000), -np.geomspace(1e-30, 80, 5000)])
    for dtype, unit in (("float32", 2.0**-23), ("float64", 2.0**-52)):
        points = sl.table(x.astype(dtype))
        ones = np.ones((1, 1, len(x), 1), dtype)
        for name in ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sigmoid"):
            at = np.abs(points.array) if name in ("log", "log2", "sqrt") else points.array
            f = getattr(sl, name)
            source = sl.table(at)
            _, lse = sl.attention(
                ones, ones[:, :, :1], ones[:, :, :1], score=lambda s, b, h, i, j, f=f, t=source: f(t[i]), q_start=0, return_lse=True
            )
            exact = np.longdouble(at)
            with np.errstate(all="ignore"):
                want = {"sigmoid": lambda y: 1 / (1 + np.exp(-y))}.get(name, getattr(np, name, None))(exact)
            normal = (np.abs(want) > np.finfo(dtype).tiny) & (np.abs(want) < np.finfo(dtype).max / 4)
            # with two roundings more: the product with log2 e, and back with ln 2
            error = np.abs(lse[0, 0][normal] - want[normal]) / (np.abs(want[normal]) * unit)
            assert error.max() < 2.1, f"{name} {dtype}: {error.max():.2f} ulp at {at[normal][error.argmax()]}"


def test_an_index_that_can_only_be_wrong_is_refused_when_traced():
    table = sl.table(np.arange(12.0).reshape(3, 4), "grid")
    for index in ((3, 0), (0, 4), (-1, 0)):
        with pytest.raises(sl.ExpressionError, match=r"grid: expected index [12] from 0 to [23]; got"):
            table[index]
    with pytest.raises(sl.ExpressionError, match="grid: expected index 2 from 0 to 3; got 4"):
        sl.expression(lambda s, b, h, i, j: s + table[h, 4])
    assert table[2, 3] == 11.0
