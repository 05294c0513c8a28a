"""Integers of expressions: the same at every edge in NumPy, in vectors of both widths, in scalars, and in what tiles
show.
"""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from conftest import FULL
from expressions import LENGTH, wide_integers
from hypothesis import given, settings
from hypothesis import strategies as st

import speedlight as sl
from speedlight.expressions.bounds import Exact, integers, visible
from speedlight.expressions.tree import evaluate
from speedlight.problem.tiles import Many

pytestmark = pytest.mark.usefixtures("one_width")  # a lane is a lane in panels of any width
LEAST, MOST = -(1 << 63), (1 << 63) - 1
EDGES = [0, 1, -1, 2, -2, 3, -7, 63, 64, 70, 255, -255, 46341, (1 << 31) - 1, 1 << 31, -(1 << 31), -(1 << 31) - 1,
         1 << 32, 1 << 62,
         -(1 << 62), MOST, MOST - 1, LEAST, LEAST + 1, 0x5555555555555555]  # fmt: skip
SHIFTS = list(range(-1, 71))
FLOATS = [0.0, -0.0, 0.99, -0.99, 1.5, -1.5, 2.0**31, -(2.0**31) - 1, 1e15 + 0.5, 2.0**62, 2.0**63, -(2.0**63), 2.0**64,
          -1e300, 1e300,
          math.inf, -math.inf, math.nan, 9223371487098961920.0, 5e-324]  # fmt: skip


def wrapped(x: int) -> int:
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


def shifted(a: int, n: int) -> int:
    return a << n if 0 <= n < 64 else 0


# what Python's integers say, wrapped
BINARY = {
    "+": (operator.add, operator.add), "-": (operator.sub, operator.sub), "*": (operator.mul, operator.mul),
    "//": (operator.floordiv, lambda a, b: a // b if b else 0), "%": (operator.mod, lambda a, b: a % b if b else 0),
    "&": (operator.and_, operator.and_), "|": (operator.or_, operator.or_), "^": (operator.xor, operator.xor),
    "minimum": (sl.minimum, min), "maximum": (sl.maximum, max),
    "neg": (lambda a, b: -a, lambda a, b: -a), "abs": (lambda a, b: sl.abs(a), lambda a, b: abs(a)),
    "~": (lambda a, b: ~a, lambda a, b: ~a),
    "<": (lambda a, b: sl.cast(a < b, int), operator.lt), "==": (lambda a, b: sl.cast(a == b, int), operator.eq),
    "where": (lambda a, b: sl.where(a <= b, a, b), lambda a, b: a if a <= b else b),
}  # fmt: skip
SHIFTED = {"<<": (operator.lshift, shifted), ">>": (operator.rshift, lambda a, n: a >> n if 0 <= n < 64 else a >> 63)}


def whole(x: float) -> int:
    return 0 if math.isnan(x) else max(min(int(x), MOST), LEAST) if math.isfinite(x) else MOST if x > 0 else LEAST


def squares():
    """(operation, left, right, right answers[left, right]) of everything."""
    for operations, right in ((BINARY, EDGES), (SHIFTED, SHIFTS)):
        for name, (traced, model) in operations.items():
            yield name, traced, right, np.array([[wrapped(int(model(a, b))) for b in right] for a in EDGES])


LEFT = sl.table(np.array(EDGES), "left")
RIGHT = {"shifts": sl.table(np.array(SHIFTS), "shifts"), "edges": sl.table(np.array(EDGES), "edges")}
CASES = [
    (name, traced, RIGHT["edges" if right is EDGES else "shifts"], sl.table(want, name))
    for name, traced, right, want in squares()
]
with np.errstate(over="ignore"):
    ROUNDED = {name: np.array(FLOATS).astype(name) for name in ("f4", "f8")}
NUMBERS = {name: (sl.table(x), sl.table(np.array([whole(float(y)) for y in x]))) for name, x in ROUNDED.items()}


def every_operation(a, b):
    """A condition that holds everywhere: every operation on entries `a` and `b` of the tables is right.

    What became of a bit operation may be anything, as far as intervals can tell: nothing is refused.
    """
    found = True
    for _, traced, right, want in CASES:
        y = sl.minimum(b, right.shape[0] - 1)
        found = found & (traced(LEFT[a] ^ 0, right[y] ^ 0) == want[a, y])
    for floats, want in NUMBERS.values():
        at = sl.minimum(a, len(FLOATS) - 1)
        found = found & (sl.cast(floats[at], int) == want[at])
    return found


def seen(q_len, k_len, batch=1, dtype="float32", **options):
    """Which keys a call sees, [batch, q_len, k_len]: all weights are alike, and every value is a row of the unit
    matrix.
    """
    q, k = np.zeros((batch, 1, q_len, 8), dtype), np.zeros((batch, 1, k_len, 8), dtype)
    v = np.broadcast_to(np.eye(k_len, dtype=dtype), (batch, 1, k_len, k_len))
    return sl.attention(q, k, v, **options)[:, 0] != 0


def right_of(function, q_len, k_len, start=0, b=0, h=0):
    env = {"b": np.int64(b), "h": np.int64(h), "i": start + np.arange(q_len)[:, None], "j": np.arange(k_len)[None, :]}
    return np.broadcast_to(evaluate(sl.expression(function, "mask").root, env, np.float32), (q_len, k_len))


@pytest.mark.parametrize("name", [case[0] for case in CASES])
def test_numpy(name):
    """The definition itself, against Python's integers."""
    _, traced, right, want = next(case for case in CASES if case[0] == name)
    root = sl.expression(lambda b, h, i, j: traced(LEFT[i], right[j]) == 0).root.args[0]
    found = evaluate(root, {"i": np.arange(len(EDGES))[:, None], "j": np.arange(right.shape[0])[None, :]})
    assert found.dtype == np.int64 and (found == want.array).all()
    one = [[evaluate(root, {"i": np.int64(i), "j": np.int64(j)}) for j in (0, 1, 2)] for i in range(len(EDGES))]
    assert (np.array(one) == want.array[:, :3]).all()


@pytest.mark.parametrize("name", NUMBERS)
def test_floats_become_whole_in_numpy(name):
    floats, want = NUMBERS[name]
    root = sl.expression(lambda b, h, i, j: sl.cast(floats[i], int) == 0).root.args[0]
    assert (evaluate(root, {"i": np.arange(len(FLOATS))}) == want.array).all()


@pytest.mark.units
def test_vectors(isa):
    """Lanes are queries; then, in decoding, keys."""
    rows, keys = len(EDGES), len(SHIFTS)
    mask = sl.expression(lambda b, h, i, j: every_operation(i, j))
    assert not integers(
        [("mask", mask.nodes)], {"b": (0, 0), "h": (0, 0), "i": (0, rows - 1), "j": (0, keys - 1)}
    ).narrow
    assert seen(rows, keys, mask=mask, q_start=0).all()
    for row in range(0, rows, 1 if FULL else 5):
        assert seen(1, keys, mask=mask, q_start=row).all()


def test_scalars(isa):
    """What no lane changes: every pair is a batch item."""
    rows, keys = len(EDGES), len(SHIFTS)
    mask = sl.expression(lambda b, h, i, j: every_operation(b // keys, b % keys))
    for q_len in (1, 20):
        assert seen(q_len, 1, batch=rows * keys, mask=mask, q_start=0).all()


SMALL = [0, 1, -1, 7, -7, 8, -9, 1000, -46340, 46340, (1 << 31) - 1, -(1 << 31) + 1, 12345678]


DIVISORS = (1, -1, 2, -3, 0, -(1 << 31) + 1, (1 << 31) - 1, 46341, -2, 3, 7, -7)


def narrow_case(j_too):
    """Operations whose numbers all fit 32 bits; // and % by numbers, as intervals know them."""
    left = sl.table(np.array(SMALL))
    low = sl.table(np.array([x if abs(x) < 46341 else 3 for x in SMALL]))

    def mask(b, h, i, j):
        found = True
        at = j if j_too else i
        for n in DIVISORS if FULL else DIVISORS[1:6]:
            for op in (BINARY["//"], BINARY["%"]):
                want = sl.table(np.array([op[1](a, n) for a in SMALL]))
                found = found & (op[0](left[at], n) == want[at])
        for op in (BINARY["*"], BINARY["minimum"], BINARY["neg"], BINARY["abs"], BINARY["where"]):
            want = sl.table(np.array([[op[1](a, b) for b in low.array.tolist()] for a in low.array.tolist()]))
            found = found & (op[0](low[i], low[j]) == want[i, j])
        return found

    return sl.expression(mask)


def test_vectors_of_32_bits(isa):
    """The sign of // and % for negative divisors, and the largest numbers."""
    n = len(SMALL)
    for j_too in (False, True):
        mask = narrow_case(j_too)
        assert integers([("mask", mask.nodes)], {"b": (0, 0), "h": (0, 0), "i": (0, n - 1), "j": (0, n - 1)}).narrow
        if FULL or not j_too:  # lanes are queries
            assert seen(n, n, mask=mask, q_start=0).all()
        if FULL or j_too:  # lanes are keys
            assert seen(1, n, mask=mask, q_start=4).all()


@pytest.mark.parametrize("shift", [lambda x, n: x, lambda x, n: x << n])  # 32 bits, 64 bits
def test_division_by_negative_numbers(shift):
    """In elements and in what tiles show: divisors are no part of a kernel."""
    for start, n, m, r in (
        (0, 7, 5, 3),
        (0, -7, 5, 3),
        (300, 7, -5, -3),
        (300, -7, -5, -3),
        (0, -1, -1, 0),
        (150, -150, 3, 2),
        (9, 40, -8, 0),
    ):
        for op, rows in ((operator.le, (30, 1) if FULL else (30,)), (operator.eq, (30, 1) if FULL else (1,))):
            mask = lambda b, h, i, j, n=n, m=m, r=r, op=op: op(shift(i - j, 0) // n % m, r)  # noqa: E731
            for q_len in rows:
                assert (seen(q_len, 330, mask=mask, q_start=start)[0] == right_of(mask, q_len, 330, start)).all()


TRAPS = {
    "division": lambda b, h, i, j: ((((i * 0 + 1) << 31) << 31) << 1) // (j * 0 - 1) > 0,
    "rest": lambda b, h, i, j: ((((i * 0 + 1) << 31) << 31) << 1) % (j * 0 - 1) > -1,
    "of scalars": lambda b, h, i,
    j: (((b + 1) << 31 << 31 << 1) // (b * 0 - 1) < 0) & (((h + 1) << 31 << 31 << 1) % (h * 0 - 1) == 0),
    "guarded": lambda b, h, i, j: sl.where(j > 3, (LEFT[b * 0 + 22] + j * 0) // sl.where(j > 4, -1, 0), j) < 1,
    "in tables": lambda b, h, i, j: (LEFT[22] // (j - 3) < j) | ((LEFT[i * 0 + 20] ^ 0) * j > LEFT[i * 0 + 20]),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAPS)
def test_nothing_stops_the_process(name):
    mask = TRAPS[name]
    for q_len in (1, 40) if FULL else ((1, 40)[list(TRAPS).index(name) % 2],):
        assert (seen(q_len, 40, mask=mask, q_start=0)[0] == right_of(mask, q_len, 40)).all()


def test_the_remainder_by_zero_is_zero_in_whole_tiles_too():
    """They have one quotient by it, and another remainder than themselves."""
    for mask in (lambda b, h, i, j: i % 0 == 0, lambda b, h, i, j: (j + 200) % 0 < 1, lambda b, h, i, j: j // 0 == 0):
        assert seen(20, 300, mask=mask, q_start=700)[0].all()


def test_what_intervals_cannot_tell_has_64_bits():
    """One unknown integer is enough; the others may be large."""
    for mask in (
        lambda b, h, i, j: (1000 - i) * 3000000 * (j % 2) + (i ^ j) > 0,
        lambda b, h, i, j: ((i ^ 1) * 3000000 > 5) & (i * 3000000 + j > 6_000_000_000),
        lambda b, h, i, j: sl.cast(sl.cast(i, float) * 1e9, int) > j,
    ):
        assert (seen(20, 300, mask=mask, q_start=1995)[0] == right_of(mask, 20, 300, 1995)).all()


def test_an_overflow_that_is_known_is_refused():
    large = 1 << 40
    for mask in (
        lambda b, h, i, j: (i * large) * large > j,
        lambda b, h, i, j: ((i ^ j) > 3) & ((i * large) * large > j),  # whatever else is unknown
        lambda b, h, i, j: -(LEFT[j] * 1) > 0,
        lambda b, h, i, j: sl.abs(LEFT[i]) > 0,
    ):
        for call in (
            lambda mask=mask: seen(5, 20, mask=mask),
            lambda mask=mask: sl.plan(q_heads=1, q_len=5, k_len=20, head_dim=8, mask=mask),
        ):
            with pytest.raises(sl.ExpressionError, match="may reach -?[0-9]*, which int64 cannot hold"):
                call()


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, i, j: LEFT[j % 25] > 1 << 59,
        lambda b, h, i, j: LEFT[j % 25] // 4 - LEFT[j % 3] // 8 - LEFT[(i + 18) % 25] // 4 < i,
        lambda b, h, i, j: i - (1 << 62) <= j - (1 << 61) - (1 << 61) + 100,
        lambda b, h, i, j: (i + 5) * (1 << 54) > j * (1 << 54),
    ],
)
def test_large_integers_that_fit(mask):
    """Beyond what intervals follow, at the edge of int64, and in sums that are grouped anew."""
    for q_len in (1, 70) if FULL else (70,):
        assert (seen(q_len, 330, mask=mask, q_start=150)[0] == right_of(mask, q_len, 330, 150)).all()


def test_an_index_that_may_be_out_of_range_is_looked_at():
    """Whatever is computed from the entry, no tile is decided without the keys."""
    ids = sl.table(np.arange(200) % 3, "ids")
    for factor, rows in ((1, (1, 40)), (64, (1, 40)), (1 << 50, (1, 40))) if FULL else ((1, (40,)), (1 << 50, (1,))):
        mask = sl.expression(lambda b, h, i, j, n=factor: (ids[j] * n >= 0) & (ids[j] * n <= 3 * n))
        for q_len in rows:
            with pytest.raises(sl.ArgumentError, match="ids: expected index 1 from 0 to 199"):
                seen(q_len, 400, mask=mask, q_start=0)
            assert seen(q_len, 400, mask=mask & (lambda b, h, i, j: j < 200), q_start=0).sum() == q_len * 200


def ops_of(mask, box):
    known = integers([("mask", mask.nodes)], {"b": (0, 1), "h": (0, 1), "i": (0, LENGTH - 1), "j": (0, LENGTH - 1)})
    many = Many({x: tuple(np.array([end]) for end in ends) for x, ends in box.items()}, known.followed)
    return Exact(box), many


@settings(max_examples=3000 if FULL else 60, deadline=None)
@given(
    wide_integers(3),
    wide_integers(2),
    st.sampled_from([operator.lt, operator.ge, operator.eq, operator.ne]),
    st.integers(0, 1 << 30),
)
def test_bounds_are_sound_for_any_integers(x, y, compare, seed):
    mask, rng = sl.expression(lambda b, h, i, j: compare(x(b, h, i, j), y(b, h, i, j))), np.random.default_rng(seed)
    for _ in range(20):
        (i_low, i_high), (j_low, j_high) = (sorted(map(int, rng.integers(0, LENGTH, 2))) for _ in range(2))
        i_high, j_high = min(i_high, i_low + 40), min(j_high, j_low + 40)
        box = {"b": (1, 1), "h": (0, 1), "i": (i_low, i_high), "j": (j_low, j_high)}
        elements = np.stack([right_of(mask, i_high + 1, j_high + 1, 0, 1, h)[i_low:, j_low:] for h in (0, 1)])
        try:
            ways = ops_of(mask, box)
        except sl.ExpressionError:
            ways = (Exact(box),)
        for ops in ways:
            some, every = (bool(np.all(x)) for x in visible(mask.root, ops))
            assert some or not elements.any(), f"{mask} called empty over {box}"
            assert not every or elements.all(), f"{mask} called full over {box}"


@settings(max_examples=400 if FULL else 4, deadline=None)
@given(
    wide_integers(3),
    wide_integers(2),
    st.sampled_from([operator.lt, operator.ge, operator.eq]),
    st.integers(0, LENGTH - 80),
)
def test_kernels_compute_any_integers(x, y, compare, start):
    mask = sl.expression(lambda b, h, i, j: compare(x(b, h, i, j), y(b, h, i, j)))
    try:
        found = seen(70, LENGTH, mask=mask, q_start=start)[0]
    except sl.ExpressionError as error:
        assert "int64 cannot hold" in str(error)
        return
    assert (found == right_of(mask, 70, LENGTH, start)).all()
