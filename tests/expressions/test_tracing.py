"""Tracing: what a function becomes, what is refused, and what makes two expressions the same."""

from __future__ import annotations

import functools
import math
import operator
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import FULL
from injection import interrupted, needs_places, places

import speedlight as sl
from speedlight.expressions.operations import OPERATIONS
from speedlight.expressions.tree import evaluate

LEAKED = []
sl.expression(lambda s, b, h, i, j: LEAKED.append(s) or s)
TABLE = sl.table(np.arange(12).reshape(3, 4), "grid")


def value(function, **env):
    traced = sl.expression(function)
    return evaluate(traced.root, {"b": 0, "h": 1, "i": 7, "j": 5, "s": 0.5} | env)


@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda s, b, h, i, j: -7 // (j - 3) + (-7) % (j - 2), -4 + 2),
        (lambda s, b, h, i, j: i / 2 + 2**j + j**2 + s**0.5 - (~i), 3.5 + 32 + 25 + 0.5**0.5 + 8),
        (lambda s, b, h, i, j: TABLE[h, j - 2] + TABLE[2, 3] + TABLE[b, h], 7 + 11 + 1),
        (lambda s, b, h, i, j: np.float32(2) * i + np.int64(3), 17),
        (
            lambda s, b, h, i, j: (
                np.maximum(i, 9) + np.abs(j - i) + np.exp(s * 0) + np.float64(2) ** (i - 5) - divmod(i, j)[1]
            ),
            9 + 2 + 1 + 4 - 2,
        ),
    ],
)
def test_operators(function, want):
    assert np.isclose(float(value(function)), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda b, h, i, j: (i > j) and (j > 3), "use sl.where"),
        (lambda b, h, i, j: max(i, j) > 3, "use sl.where"),
        (lambda b, h, i, j: np.arange(4) + i > 1, "sl.table"),
        (lambda b, h, i, j: i.sum() > 1, "no attribute 'sum'"),
        (lambda b, h, i, j: i + j, "expected a bool result"),
        (lambda b, h, i, j: (i / 2) & 1 > 0, "expected bool or integers"),
        (
            lambda b, h, i, j: TABLE[i] > 0,
            r"^mask: expected a condition .*; got .* one number; got a row of 4\. Index it, .* \.any\(\)",
        ),
        (lambda b, h, i, j: TABLE[i, j / 2] > 0, "expected an integer as index 2"),
        (lambda b, h, i, j: i > 2**70, "that int64 holds"),
        (lambda b, h, i, j: i > "x", "expected a symbol or a Python number"),
        (lambda b, h, i, j: sl.where(i, 1, 2) > 1, "expected a bool condition"),
        (lambda b, h, i, j: i << 64 > 1, "expected a shift of 0 to 63"),
        (lambda b, h, i, j: i >> 0 - 1 > 1, "expected a shift of 0 to 63"),
        (lambda b, h, i, j: i < 10**5000, "that int64 holds"),
        (lambda b, h, i, j: i < Fraction(10**400), "that float64 holds"),
        (lambda b, h, i, j: np.sinh(i) > 0, "np.sinh: expected operators"),
        (lambda b, h, i, j: np.add.reduce(i) > 0, "np.add: expected operators"),
        (lambda b, h, i, j: {i: 1}, "use sl.where"),
        (lambda b, h, i, j: i[0] > 1, "Look arrays up through sl.table"),
        (lambda b, h, i, j: i @ j > 1, "no product of matrices"),
        (lambda b, h, i, j: pow(i, 2, 5) > 1, "got a third"),
        (lambda b, h, i, j: (-2) ** i > 1, "expected a positive base"),
        (lambda b, h, i, j: sl.cast(i, "colour") > 1, "cast: expected bool, int"),
        (lambda b, h, i, j: None, r"^mask: expected a result of <lambda>\(\) in .*; got None\. Is a return"),
        (lambda b, h, i, j: TABLE, r"^mask: expected a condition .* of <lambda>\(\) in .*; got Table, "),
        (lambda b, h, i, j: LEAKED[0] > 0, "expected a result made of b, h, i, j; got s"),
        (lambda x, y: x > y, "expected the arguments"),
        (sl.causal, r"^function: expected a pattern; got the function sl\.causal\. Call it: sl\.causal\(\)"),
        (lambda s, b, h, i, j: math.exp(s), "the functions of Python's math cannot .* torch.tanh"),
        (lambda s, b, h, i, j: math.floor(s), "the functions of Python's math cannot"),
        (lambda b, h, i, j: 0 <= i - j < 4, r"chains .* Put parentheses .* as \(0 <= x\) & \(x < 4\)"),
        (lambda b, h, i, j: (i >= j) & j == 2, r"^==: expected a number on each side; got .* bind tighter"),
        (lambda b, h, i, j: i >= j ^ (j > 2), r"^>=: expected a number on each side; got .* bind tighter"),
        (lambda b, h, i, j: (i >= j) & TABLE[0, j] > 2, r"^>: expected a number on each side; got .* bind tighter"),
        (lambda b, h, i, j: sl.causal()(b, h, i, j), r"^a pattern: expected it beside functions.* Join them outside"),
    ],
)
def test_refused(function, message):
    with pytest.raises(sl.ExpressionError, match=message):
        sl.expression(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: (i >= j) & TABLE[0, j] == 1,
        lambda b, h, i, j: (TABLE[0, j] & (i >= j)) > 0,
        lambda b, h, i, j: (i >= j) & 1 == 1,
        lambda b, h, i, j: (i & 3) == (j & 3),
        lambda b, h, i, j: (i > 2) == (j > 2) & (i >= j),
    ],
)
def test_flags_and_bits_may_be_compared(function):
    """Only a condition that is joined to a position, and then compared, is taken for a slip of parentheses."""
    assert sl.expression(function).role == "mask"


@pytest.mark.parametrize(
    ("role", "function", "message"),
    [
        ("mask", sl.causal, r"^mask: expected a pattern; .* Call it: sl\.causal\(\)\.$"),
        ("score", sl.softcap, r"^score: expected a pattern; .* Call it: sl\.softcap\(…\)\.$"),
        ("score", lambda b, h, i, j: i, r"^score: expected the arguments \(s, b, h, i, j\) of a score; got .* 4"),
        ("score", lambda s, b, h, i, j: None, r"^score: expected a result of <lambda>\(\) in "),
    ],
)
def test_refused_in_its_role(role, function, message):
    with pytest.raises(sl.ExpressionError, match=message):
        sl.expression(function, role)


def test_what_a_function_raises_is_its_own():
    with pytest.raises(ZeroDivisionError):
        sl.expression(lambda b, h, i, j: i > 1 // 0)


PATTERNS = [
    (lambda: sl.window(1.5), "left: expected an int; got 1.5"),
    (lambda: sl.window(3, True), "right: expected an int; got True"),
    (lambda: sl.window(1 << 50), "left: expected an int from"),
    (lambda: sl.prefix("3"), "n: expected an int; got '3'"),
    (lambda: sl.prefix(-1), "n: expected an int from 0"),
    (lambda: sl.dilated(0), "k: expected an int from 1"),
    (lambda: sl.dilated(2.0), "k: expected an int; got 2.0"),
    (lambda: sl.softcap("3"), "c: expected a number; got '3'"),
    (lambda: sl.softcap(float("nan")), "c: expected a positive number"),
    (lambda: sl.softcap(float("inf")), "c: expected a positive number"),
    (lambda: sl.softcap(1e-300), "c: expected a positive number"),
    (lambda: sl.alibi([[0.5]]), "slopes: expected 1 dimension; got"),
    (lambda: sl.alibi([0.5, float("nan")]), "slopes: expected finite numbers"),
    (lambda: sl.alibi([True]), "slopes: expected int or float or double"),
    (lambda: sl.relative_bias(np.zeros((2, 4))), "bias: expected shape"),
    (lambda: sl.relative_bias(np.zeros(3)), "bias: expected 2 dimensions"),
    (lambda: sl.documents([0.5]), "ids: expected bool or int"),
    (lambda: sl.documents(np.zeros((2, 2, 2), int)), "ids: expected 1 or 2 dimensions"),
    (lambda: sl.documents([[1], [2, 3]]), "ids: expected an array that NumPy can read"),
    (lambda: sl.documents(None), "ids: expected 1 to 4 dimensions; got None"),
    (lambda: sl.blocks([[1, 0]], 8), "table: expected bool entries; got dtype int64"),
    (lambda: sl.blocks([True], 8), "table: expected 2 or 3 or 4 dimensions"),
    (lambda: sl.blocks([[True]], None), r"size: expected an int, or two: \(q_size, k_size\); got None"),
    (lambda: sl.blocks([[True]], (1, 2, 3)), "size: expected an int, or two"),
    (lambda: sl.blocks([[True]], 0), "size: expected an int from 1"),
    (lambda: sl.blocks([[True]], (2, 0)), r"size\[1\]: expected an int from 1"),
    (lambda: sl.alibi(3), "slopes: expected an array, one per query head; got 3"),
    (lambda: sl.window((3, 0)), r"left: expected an int; got \(3, 0\)\. Of a pair write sl.window\(\*pair\)"),
]


@pytest.mark.parametrize(("call", "message"), PATTERNS)
def test_patterns_check_their_own_arguments(call, message):
    with pytest.raises((sl.ArgumentError, sl.ArgumentTypeError), match=message):
        call()


def test_tables_refuse():
    with pytest.raises(sl.ArgumentError, match="1 to 4 dimensions"):
        sl.table(np.zeros((1,) * 5))
    with pytest.raises(sl.ArgumentTypeError, match="got dtype complex128"):
        sl.table(np.zeros(3, complex))
    for wrong, message in (
        (np.ma.array([1, 2], mask=[0, 1]), "without a mask of its own"),
        (np.array([object()]), "got dtype object"),
        (np.zeros(3, [("a", "f4")]), "got dtype"),
        (np.array(["2020"], "M8[s]"), "got dtype datetime64"),
        (np.zeros(3, np.longdouble), "got dtype"),
        (torch.zeros(3).to_sparse(), "layout torch.sparse_coo"),
        (torch.zeros(3, dtype=torch.complex64).conj(), "lazily negated"),
        (torch.zeros(3, device="meta"), "device meta"),
        (torch._efficientzerotensor((3,)), "storage is missing"),
        (torch.zeros(3).to(torch.float8_e4m3fn), "that NumPy can read"),
    ):
        with pytest.raises(sl.Error, match=f"ids: .*{message}"):
            sl.table(wrong, "ids")
    gone = torch.arange(64)
    gone.untyped_storage().resize_(0)
    with pytest.raises(sl.ArgumentError, match="storage is missing"):
        sl.table(gone)
    for kind in (">f4", ">i8", ">u2", ">f8"):
        assert (
            sl.table(np.arange(3).astype(kind)).array.tolist() == [0, 1, 2]
            and sl.table(np.arange(3).astype(kind)).array.dtype.isnative
        )
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
    nan = [sl.expression(lambda s, b, h, i, j, x=x: s + x) for x in (float("nan"), np.float64("nan"), -float("nan"))]
    assert nan[0] == nan[1] and hash(nan[0]) == hash(nan[1]) and nan[0] != nan[2]
    zeros = [sl.expression(lambda s, b, h, i, j, x=x: s * x) for x in (0.0, -0.0)]
    assert zeros[0] != zeros[1] and zeros[0].key == zeros[1].key
    assert sl.expression(lambda b, h, i, j: i > 1) != sl.expression(lambda b, h, i, j: i > 1.0)
    assert sl.expression(lambda b, h, i, j: True) != sl.expression(lambda b, h, i, j: False)
    code = "import speedlight as sl; print(hash(sl.window(5, 0) & sl.causal()))"
    hashes = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert hashes == {f"{hash(sl.window(9, 0) & sl.causal())}\n"}


def long_erf(x):
    """In long double: a series inside ±1, and what is missing to 1 outside."""
    inside, term = np.where(np.abs(x) < 1, x, 0), np.where(np.abs(x) < 1, x, 0)
    total = inside.copy()
    for n in range(1, 30):
        term = -term * inside * inside / n
        total += term / (2 * n + 1)
    pi = np.arctan(np.longdouble(1)) * 4
    missing = np.array([math.erfc(abs(float(y))) for y in x])
    return np.where(np.abs(x) < 1, 2 / np.sqrt(pi) * total, np.copysign(1 - missing, x))


EXACT = {"sigmoid": lambda y: 1 / (1 + np.exp(-y)), "erf": long_erf}
FUNCTIONS = ("exp", "exp2", "log", "log2", "tanh", "sqrt", "sigmoid", "log1p", "expm1", "sin", "cos", "tan", "erf")


def of_each_function(points):
    """The functions of points[head], in the kernels' own code: scores of one key, read back from the log-sum-exp."""
    table = sl.table(points)

    def score(s, b, h, i, j):
        found = sl.exp(table[h, i])
        for n, name in enumerate(FUNCTIONS[1:], 1):
            found = sl.where(h == n, getattr(sl, name)(table[h, i]), found)
        return found

    ones = np.ones((1, *points.shape, 1), points.dtype)
    return sl.attention(ones, ones[:, :1, :1], ones[:, :1, :1], score=score, q_start=0, return_lse=True)[1][0]


@pytest.mark.units
def test_functions_are_accurate(isa):
    """At most 2 ulp (sigmoid, tan 3), angles up to 2^40; NaN beyond, of infinities and of NaN."""
    x = np.concatenate([np.linspace(-90, 90, 20001), np.geomspace(1e-30, 80, 5000), -np.geomspace(1e-30, 80, 5000)])
    of_pi = (245850922, 14885392687, 21053343141)  # nearly whole multiples of it
    far = np.concatenate([np.geomspace(1e-30, 2.0**40, 10000 - len(of_pi)), of_pi])
    of = dict.fromkeys(("log", "log2", "sqrt"), np.abs(x)) | {"log1p": np.where(x < -1, np.tanh(x / 90), x)}
    of |= dict.fromkeys(("sin", "cos", "tan"), np.concatenate([x[:20001:2], far, -far]))
    special = [np.inf, -np.inf, np.nan, 2.0**40 * (1 + 2.0**-20), -3e38, 0.0]
    for dtype, unit in (("float32", 2.0**-23), ("float64", 2.0**-52)):
        points = np.array([of.get(n, x) for n in FUNCTIONS], dtype)
        for name, at, found in zip(FUNCTIONS, points, of_each_function(points), strict=True):
            exact = np.longdouble(at)
            with np.errstate(all="ignore"):
                want = (EXACT.get(name) or getattr(np, name))(exact)
            normal = (np.abs(want) > np.finfo(dtype).tiny) & (np.abs(want) < np.finfo(dtype).max / 4)
            # with two roundings more: the product with log2 e, and back with ln 2
            error = np.abs(found[normal] - want[normal]) / (np.abs(want[normal]) * unit)
            at, worst = at[normal][error.argmax()], error.max()
            assert worst < (3.1 if name == "tan" else 2.1), f"{name} {dtype}: {worst:.2f} ulp at {at}"
        ends = of_each_function(np.array([special] * len(FUNCTIONS), dtype))[-4:]
        assert np.isnan(ends[:3, :5]).all() and ends[:3, 5].tolist() == [0, 1, 0]
        assert np.array_equal(ends[3], [1, -1, np.nan, 1, -1, 0], equal_nan=True)
        for name, row in zip(FUNCTIONS[-4:], ends, strict=True):
            with np.errstate(all="ignore"):
                assert np.array_equal(OPERATIONS[name].numpy(np.array(special, dtype)), row, equal_nan=True), name


@pytest.mark.units
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zeros_of_functions_have_a_sign(isa, dtype):
    """It is the argument's, but tanh of -0 is +0."""
    zeros = sl.table(np.array([-0.0, 0.0], dtype))
    x = np.ones((1, 1, 2, 1), dtype)
    for name in ("tanh", "sin", "tan", "erf", "expm1", "log1p", "sqrt"):
        score = lambda s, b, h, i, j, f=getattr(sl, name): sl.where(1.0 / f(zeros[i]) < 0, -5.0, 5.0)  # noqa: E731
        _, signs = sl.attention(x, x[:, :, :1], x[:, :, :1], score=score, q_start=0, return_lse=True)
        assert signs.tolist() == [[[5.0 if name == "tanh" else -5.0, 5.0]]], name


def test_an_index_that_can_only_be_wrong_is_refused_when_traced():
    table = sl.table(np.arange(12.0).reshape(3, 4), "grid")
    for index in ((3, 0), (0, 4), (-1, 0)):
        with pytest.raises(sl.ExpressionError, match=r"grid: expected index [12] from 0 to [23]; got"):
            table[index]
    with pytest.raises(sl.ExpressionError, match="grid: expected index 2 from 0 to 3; got 4"):
        sl.expression(lambda s, b, h, i, j: s + table[h, 4])
    assert table[2, 3] == 11.0


def repeated(count, start, step):
    def function(b, h, i, j):
        x = start(i, j)
        for n in range(count):
            x = step(x, i, j, n)
        return x if x.node.kind == "bool" else x > 7

    return function


POWERS = sl.table(np.arange(5000) % 97)
LONG = {
    "or of 330": repeated(330, lambda i, j: j == i, lambda x, i, j, n: x | (j == 3 * n)),
    "or of 1,000": repeated(1000, lambda i, j: j == i, lambda x, i, j, n: x | (j == 3 * n)),
    "and of or": repeated(300, lambda i, j: j <= i, lambda x, i, j, n: x & ((i < n) | (j != n))),
    "sum of 3,900": repeated(3900, lambda i, j: i, lambda x, i, j, n: x + j),
    "x + x": repeated(50, lambda i, j: i - j, lambda x, i, j, n: x + x),
    "x ^ x": repeated(1500, lambda i, j: i, lambda x, i, j, n: (x + x) ^ j),
    "deep where": repeated(900, lambda i, j: i, lambda x, i, j, n: sl.where(j > n, x, i)),
    "deep not": repeated(3900, lambda i, j: j <= i, lambda x, i, j, n: ~x),
    "lookups of lookups": repeated(100, lambda i, j: i, lambda x, i, j, n: POWERS[x + j]),
    "lookups of sums": repeated(100, lambda i, j: i, lambda x, i, j, n: x + POWERS[x % 97 + n]),
}


@pytest.mark.parametrize("name", LONG)
def test_long_expressions(name):
    """Traced, shown, planned, compiled and right, without recursion and with shared parts walked once."""
    mask = sl.expression(LONG[name])
    assert len(repr(mask)) < 3000
    q, k = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 1, 130, 8), np.float32)
    assert sl.plan(q, k, k, mask=mask).visible_pairs != 0
    if not FULL and name in ("or of 330", "or of 1,000", "and of or", "sum of 3,900", "x ^ x", "lookups of lookups"):
        return
    seen = sl.attention(q, k, np.eye(130, dtype=np.float32)[None, None], mask=mask)[0, 0] != 0
    want = evaluate(mask.root, {"b": 0, "h": 0, "i": np.array([[128], [129]]), "j": np.arange(130)[None, :]})
    assert (seen == np.broadcast_to(want, (2, 130))).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: sl.expression(repeated(1400, lambda i, j: j == i, lambda x, i, j, n: x | (j == 3 * n))),
        lambda: sl.expression(repeated(5000, lambda i, j: i, lambda x, i, j, n: x + j)),
        lambda: sl.expression(repeated(300, lambda i, j: i, lambda x, i, j, n: x % (j + 1))),
        lambda: functools.reduce(operator.or_, [sl.window(n, 0) for n in range(700)]),
    ],
)
def test_longer_expressions_are_refused(make):
    with pytest.raises(
        sl.ExpressionError,
        match=r"mask: expected at most 4,000 operations .* got [0-9,]*\. Put constants into an sl.table",
    ):
        make()


@pytest.mark.parametrize("n", [2, 3, 0, -1, -2, 2.0, 3.0, 1.0, 0.0, np.float32(2)])
def test_whole_powers_take_negative_bases(n):
    s = np.array([-1.0, -2.0, 3.0])
    found = evaluate(sl.expression(lambda s, b, h, i, j: s**n).root, {"s": s, "b": 0, "h": 0, "i": 0, "j": 0})
    np.testing.assert_array_equal(np.broadcast_to(found, s.shape), s ** float(n))


def test_powers_that_would_be_wrong_are_refused():
    for n in (65, 1e9, -65.0):
        with pytest.raises(sl.ExpressionError, match="exponent"):
            sl.expression(lambda s, b, h, i, j, n=n: s**n)


def test_classes_and_odd_names_are_no_functions_and_names():
    x = np.ones((1, 1, 2, 4), np.float32)
    with pytest.raises(sl.ArgumentTypeError, match="the class int"):
        sl.attention(x, x, x, mask=int)
    with pytest.raises(sl.ArgumentTypeError, match="name"):
        sl.table([1], None)  # type: ignore[arg-type]
    with pytest.raises(sl.ArgumentError, match="role"):
        sl.expression(lambda b, h, i, j: i == j, np.ones((2, 2)))  # type: ignore[arg-type]


@needs_places
def test_an_interrupt_while_a_function_is_traced():
    """Nothing says afterwards that one is: entries at numbers are numbers."""
    table = sl.table(np.arange(4.0))

    def trace() -> None:
        sl.expression(lambda s, b, h, i, j: s + table[1] * j)

    for n in places(trace, ("tracing.py", "captured.py")):
        interrupted(trace, n, ("tracing.py", "captured.py"))
        assert table[2] == 2.0, f"place {n}"


@pytest.mark.parametrize(
    ("role", "function"),
    [
        ("mask", lambda i, j, b, h: j <= i),
        ("mask", lambda h, b, i, j: h < 2),
        ("mask", lambda b, h, j, i: j <= i),
        ("score", lambda b, h, i, j, s: s),
        ("score", lambda s, i, j, b, h: s + (j - i)),
    ],
)
def test_our_names_in_another_order_are_refused(role, function):
    """They come by place: the function would compute something else."""
    x, names = np.ones((1, 2, 3, 4), np.float32), "b, h, i, j" if role == "mask" else "s, b, h, i, j"
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=4, capacity=8)
    calls = (
        lambda: sl.expression(function),
        lambda: sl.attention(x, x, x, **{role: function}),
        lambda: sl.plan(x, x, x, **{role: function}),
        lambda: cache.attend(0, x, x, x, **{role: function}),
        lambda: sl.reference.attention(x, x, x, **{role: function}),
    )
    for call in calls:
        with pytest.raises(sl.ExpressionError, match=rf"{role}: expected .* in this order; .*\({names}\)"):
            call()


def test_other_names_and_defaults_are_no_order():
    assert sl.expression(lambda q, k, x, y: y <= x) == sl.causal()
    assert sl.expression(lambda b, h, i, j, n=0: j <= i) == sl.causal()
