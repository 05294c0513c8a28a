"""The table of operations: every row in every engine, and its derivative; derivatives of whole scores."""

from __future__ import annotations

import numpy as np
import pytest
from tolerance import assert_within

import speedlight as sl
from speedlight.expressions.derivative import flows
from speedlight.expressions.operations import FLOATS, OPERATIONS, Chosen
from speedlight.expressions.symbols import Symbol, applied
from speedlight.expressions.tree import convert, evaluate, order, rounding_error

STEP = 1e-6
# some equal, some whole, some whose quotients are; of integers the same without their fractions
LEFT = np.array([0.5, 3.0, 1.25, 2.0, 7.0, 0.375, 4.0, 12.0])
RIGHT = np.array([0.5, 2.0, -1.5, 2.0, -3.0, 0.75, 2.0, 5.0])


def table_of(values, kind):
    dtype = {"bool": bool, "int": np.int64, "float": np.float32, "double": np.float64}[kind]
    return sl.table((values > 1 if kind == "bool" else values).astype(dtype), kind)


TABLES = {kind: [table_of(x, kind) for x in (LEFT, RIGHT)] for kind in ("bool", "int", "float", "double")}


EVERY = [(row, kind) for row in OPERATIONS.values() for kind in row.accepts]


def operation(row, x, y):
    """A row's operation, as a float."""
    if row.name == "where":
        return sl.cast(sl.where(x > y, x, y), float)
    if row.name == "cast":
        return sum(Symbol(convert(x.node, to)) * 1.0 for to in ("int", "float", "double"))
    return sl.cast(applied(row.name, *(x, y)[: row.operands]), float)


def every_operation(s, number, at):
    """The operation of this number, of all rows and kinds, on entries at(kind)."""
    found = s
    entries = {kind: [table[at(kind)] for table in tables] for kind, tables in TABLES.items()}
    entries["int"] = [x ^ 0 for x in entries["int"]]  # of which intervals know nothing
    for n, (row, kind) in enumerate(EVERY):
        found = sl.where(number == n, operation(row, *entries[kind]), found)
    return found


def by_heads(s, b, h, i, j):
    """An operation a head. Floats are lanes; others are scalars of an item: test_integers.py has them as lanes."""
    return every_operation(s, h, lambda kind: i if kind == "float" else b)


def by_rows(s, b, h, i, j):
    """All in one head, in lanes."""
    return every_operation(s, i // len(LEFT), lambda kind: i % len(LEFT))


def assert_every_operation(attention, score, sizes, dtype="float32"):
    """The log-sum-exp of one key is its score: every row's definition, in all items, heads and lanes at once."""
    q, k, v = (np.ones((*sizes[:2], n, 8), dtype) for n in (sizes[2], 1, 1))
    score = sl.expression(score)
    _, lse = attention(q, k, v, score=score, q_start=0, return_lse=True)
    unit, places = np.finfo(dtype).eps / 2, dict(zip("bhi", np.ogrid[tuple(map(slice, sizes))], strict=True))
    want, error = rounding_error(score.root, places | {"j": 0, "s": 8**0.5}, 9 * unit, unit)
    assert_within(lse, want, error + 8 * unit * (1 + np.abs(want)), "lse")


HEADS, ROWS = (len(LEFT), len(EVERY), len(LEFT)), (1, 1, len(EVERY) * len(LEFT))


@pytest.mark.filterwarnings("ignore:q of shape")  # a head for each operation is more than models have
def test_every_operation_on_the_cpu():
    assert_every_operation(sl.attention, by_heads, HEADS)


def test_rows_are_complete():
    for name, row in OPERATIONS.items():
        assert row.name == name and row.operands in (1, 2, 3) and row.cost >= 1 and row.rounding >= 0
        assert (row.derivative is None) == bool(row.no_derivative)
        assert row.gives in (None, "bool")
        if row.gives is None and set(row.accepts) & set(FLOATS) and row.derivative is not None:
            assert row.error is not None, f"{name}: errors of floats have a rule"


def slopes(row, operands):
    y = row.numpy(*operands) if row.name != "cast" else operands[0]
    found = row.derivative(y, *operands)
    return [np.where(x.condition, x.yes, x.no) if isinstance(x, Chosen) else x for x in found]


@pytest.mark.parametrize("name", [n for n, row in OPERATIONS.items() if row.derivative and row.accepts[-1] in FLOATS])
def test_derivative_of_each_operation(name):
    """Against central differences, by every operand of floats."""
    row, rng = OPERATIONS[name], np.random.default_rng(5)
    definition = row.numpy if name != "cast" else lambda x: x
    signs = (1,) if name in ("log", "log1p", "log2", "sqrt") else (-1, 1)
    most = 1.2 if name == "tan" else 3.0
    operands = [rng.uniform(0.2, most, 500) * rng.choice(signs, 500) for _ in range(row.operands)]
    if name == "where":
        operands[0] = operands[0] > 0
    for n, slope in enumerate(slopes(row, operands)):
        if operands[n].dtype == bool:
            continue
        ends = [definition(*operands[:n], operands[n] + step, *operands[n + 1 :]) for step in (STEP, -STEP)]
        difference = (ends[0].astype(float) - ends[1].astype(float)) / (2 * STEP)
        slope = np.broadcast_to(slope, difference.shape)
        assert_within(slope, difference, 1e-7 * (1 + np.abs(difference)), name, zeros_allowed=True)


def test_ties_go_to_the_first_operand():
    for traced in (lambda s, b, h, i, j: sl.maximum(s, 2.0 - s), lambda s, b, h, i, j: sl.minimum(s, 2.0 - s)):
        assert flow_to_s(traced, 1.0) == 1.0
    for zero in (0.0, -0.0):
        assert flow_to_s(lambda s, b, h, i, j: sl.abs(s), zero) == 1.0
    assert flow_to_s(lambda s, b, h, i, j: sl.maximum(2.0 - s, s), 1.0) == -1.0


def flow_to_s(function, s, d=1.0):
    back = flows(sl.expression(function).root)
    assert back.s is not None
    return float(evaluate(back.s, {"s": np.float64(s), "d": np.float64(d), "b": 0, "h": 0, "i": 0, "j": 0}))


def test_what_was_not_chosen_gets_nothing():
    """Not even NaN, from slopes that are infinite there."""
    for inner in (
        lambda s: sl.sqrt(s - 1.0),
        lambda s: sl.log(s - 1.0) * s,
        lambda s: 1.0 / (s - 1.0),
        lambda s: sl.exp(s * 1000.0) * sl.exp(s * 1000.0),
        lambda s: sl.log2(-s) ** 2,
    ):
        assert flow_to_s(lambda s, b, h, i, j, f=inner: sl.where(s == 1.0, 3.0 * s, f(s)), 1.0) == 3.0


GRID = sl.table(np.linspace(-1, 1, 12).reshape(3, 4).astype(np.float32), "grid")
WHOLE = sl.table(np.arange(4), "whole")


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, i, j: s * 0 + sl.floor(s) + 3,
        lambda s, b, h, i, j: sl.cast(s, int) + i % 3 + WHOLE[j % 4],
        lambda s, b, h, i, j: sl.where(s > 1.0, 2.0, 5.0) + (i // 3) * 0.5 % 7.0,
    ],
)
def test_nothing_flows_through_steps_and_integers(function):
    back = flows(sl.expression(function).root)
    assert not back.entries
    assert back.s is None or flow_to_s(function, 2.5) == 0


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda s, b, h, i, j: s % 2.0, "%"),
        (lambda s, b, h, i, j: sl.tanh(s // 2.0 + j), "//"),
        (lambda s, b, h, i, j: s + GRID[h, j] % 3.0, "%"),
    ],
)
def test_an_operation_without_a_derivative_is_named(function, operation):
    message = rf"score: expected operations that have a derivative; got {operation} of floats in \(.* {operation} .*\)"
    with pytest.raises(sl.ExpressionError, match=message):
        flows(sl.expression(function).root)


def test_only_what_is_asked_for_needs_a_derivative():
    score = sl.expression(lambda s, b, h, i, j: s * 2.0 + GRID[h, j] % 3.0)
    back = flows(score.root, tables=())
    assert repr(back.s) == "(d * 2.0)" and not back.entries
    other = sl.table(np.ones(5), "other")
    assert not flows(sl.expression(lambda s, b, h, i, j: s + GRID[h, j] * other[i]).root, [GRID]).entries[1:]


def test_subtrees_are_shared():
    """A tower of squares has as many nodes in its derivative as the tower, times a constant; constants are one node."""

    def tower(s, b, h, i, j):
        for _ in range(40):
            s = sl.tanh(s * s) + sl.exp2(s)
        return s

    back = flows(sl.expression(tower).root)
    assert back.s is not None
    own, new = order(back.score), order(back.s)
    assert len(new) < 8 * len(own)
    shared = {id(n) for n in own}
    assert len([n for n in new if n.op == "number" and id(n) not in shared]) == 2  # 1 and ln 2
    assert {n.op for n in new} <= {*OPERATIONS, "symbol", "number", "table"}
