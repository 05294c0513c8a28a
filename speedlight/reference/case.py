"""The specification of one problem: its arrays as float64, its heads one by one, and what a row of one is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays.array import describe
from ..expressions.tree import WrongIndex, evaluate, raise_first
from ..problem.build import from_arrays
from ..problem.gradients import Asked, Given, asked
from ..problem.options import Options
from ..problem.philox import kept
from ..problem.problem import LAYOUTS, Problem
from .head_backward import Returned

_LARGE = 2.0**900  # values beyond are summed in units of this
_BEYOND = 2.0**128 - 2.0**103  # rounds to infinity in float32, in which a score's expression is computed


def attention_row(
    score: np.ndarray, v: np.ndarray, visible: np.ndarray, factors: np.ndarray | None = None
) -> tuple[np.ndarray, float]:
    """One query's scores and its values: the definition.

    A key that is not visible, or whose score is -inf, does not exist. `factors`: what dropout multiplies weights by.
    """
    seen = visible & (score != -np.inf)
    score, v = score[seen], v[seen]
    if len(score) == 0:
        return np.zeros(v.shape[1]), -np.inf
    top = np.nanmax(score) if not np.isnan(score).all() else 0.0
    p = np.exp(score - top)
    left = p if factors is None else p * factors[seen]
    weighted = np.ascontiguousarray(
        (left[:, None] * v).T
    )  # along rows NumPy adds in pairs: one long chain may be off by more than the engine
    return weighted.sum(axis=1) / p.sum(), float(top + np.log(p.sum()))


class Case:
    """Arrays as (batch, heads, length, dim) float64 views of one problem, or as one item when packed."""

    def __init__(self, q: Any, k: Any, v: Any, options: Options) -> None:
        described = tuple(describe(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
        given = options.spelled()
        self.layout = given.layout
        self.problem, self.cu_q, self.cu_k = from_arrays(described[0], described[1], described[2], given)
        self.dtype = self.problem.dtype
        self.q, self.k, self.v = (self.inward(x.numpy()) for x in described)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((*self.q.shape[:-1], self.problem.value_dim)), np.zeros(self.q.shape[:-1])

    def inward(self, x: np.ndarray) -> np.ndarray:
        return np.transpose(x, LAYOUTS[self.layout])

    def outward(self, x: np.ndarray) -> np.ndarray:
        return np.transpose(x, np.argsort(LAYOUTS[self.layout]))

    def heads(self) -> Iterator[Head]:
        p = self.problem
        for item in range(p.batch):
            for head in range(p.q_heads):
                if self.cu_q is None or self.cu_k is None:
                    at: Any = (item, head, slice(p.q_lengths[item]))
                    keys: Any = (0 if p.shared else item, head // p.group, slice(p.k_lengths[item]))
                    alone = 4 - self.q.ndim  # without a batch
                    yield Head(self, item, head, at[alone:], keys[alone:])
                else:
                    rows, keys = (slice(c[item], c[item + 1]) for c in (self.cu_q, self.cu_k))
                    yield Head(self, item, head, (head, rows), (head // p.group, keys))


class Flow:
    """The results of attention() for a case, their upstream gradients, and the gradients that are asked for."""

    def __init__(self, case: Case, q: Any, given: tuple[Any, ...], grads: Any) -> None:
        named = zip((q, *given), Given._fields, strict=True)
        known = Given._make(None if x is None and n == "d_lse" else describe(x, n) for x, n in named)
        self.asked: Asked = asked(case.problem, case.layout, known, grads)
        self.out, self.d_out = (case.inward(x.numpy()) for x in (known.out, known.d_out))
        self.lse = known.lse.numpy()
        self.d_lse = np.zeros(self.lse.shape) if known.d_lse is None else known.d_lse.numpy()

    def into(self, head: Head) -> Returned:
        """Returns the rows of one head."""
        rows = (x[head.at].astype(np.float64) for x in (self.out, self.lse, self.d_out, self.d_lse))
        return Returned(*rows, keep=head.factors)


def _product(a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """a @ b.

    To judge float64 as a tree of short sums: in one long chain roundings of equal terms add up to more than the
    engine's.
    """
    if dtype != "float64":
        return a @ b
    parts = [a[:, i : i + 32] @ b[i : i + 32] for i in range(0, max(len(b), 1), 32)]
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


class Head:
    """One q head of one item."""

    def __init__(self, case: Case, item: int, head: int, at: Any, keys: Any) -> None:
        p: Problem = case.problem
        self.case, self.problem, self.at, self.keys = case, p, at, keys
        # floats from here on are infinite in what a score's expression is computed in
        self.beyond = np.inf if p.dtype == "float64" else _BEYOND
        self.q, self.k, self.v = (
            case.q[at].astype(np.float64),
            case.k[keys].astype(np.float64),
            case.v[keys].astype(np.float64),
        )
        i = p.q_starts[item] + np.arange(len(self.q))[:, None]
        j = p.k_start + np.arange(len(self.k))[None, :]
        self.visible = (j <= i) if p.causal else np.ones((len(self.q), len(self.k)), dtype=bool)
        self.env = {"b": np.int64(item), "h": np.int64(head), "i": i, "j": j}
        if p.mask is not None:
            number = np.float64 if p.dtype == "float64" else np.float32  # comparisons decide as they do in the kernel
            mask = evaluate(p.mask.root, self.env, number, seen=False)
            self.visible = self.visible & mask
            wrong: list[WrongIndex] = []
            evaluate(p.mask.root, self.env, number, seen=self.visible, wrong=wrong)
            if wrong:
                self._evaluate_score(self.products(), wrong)
                raise_first(wrong)
        self.factors: np.ndarray | None = None  # what dropout multiplies weights by
        if p.dropout:
            self.factors = kept(p.dropout, p.seed, item, head, i, j) / p.dropout_divisor

    def products(self) -> np.ndarray:
        """[q_len, k_len]: scale · QKᵀ."""
        return self.product(self.q, self.k.T) * self.problem.scale

    def product(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _product(a, b, self.problem.dtype)

    def scores(self, s: np.ndarray | None = None) -> np.ndarray:
        """[q_len, k_len]: scaled, and through the score expression."""
        return self._evaluate_score(self.products() if s is None else s)

    def _evaluate_score(self, s: np.ndarray, wrong: list[WrongIndex] | None = None) -> np.ndarray:
        """Returns what the score expression makes of `s`; `wrong` as in evaluate()."""
        if self.problem.score is None:
            return s
        env = self.env | {"s": s}
        value = evaluate(self.problem.score.root, env, seen=self.visible, beyond=self.beyond, wrong=wrong)
        return np.broadcast_to(value, s.shape)

    def add_sink(self, score: np.ndarray) -> np.ndarray:
        """A sink is one more key, of a score given, that every query sees and whose value is zeros."""
        if self.problem.sinks is None:
            return score.copy()
        column = np.full((len(self.q), 1), self.problem.sinks[int(self.env["h"])])
        self.v = np.concatenate([self.v, np.zeros((1, self.v.shape[1]))])
        self.visible = np.concatenate([self.visible, np.ones(column.shape, dtype=bool)], axis=1)
        if self.factors is not None:
            self.factors = np.concatenate([self.factors, np.ones(column.shape)], axis=1)
        return np.concatenate([score, column], axis=1)

    def solve(self, out: np.ndarray, lse: np.ndarray) -> None:
        score = self.add_sink(self.scores())
        if np.abs(self.v[np.isfinite(self.v)]).max(initial=0.0) > _LARGE:  # their sum may not be a float
            self.v = self.v / _LARGE
            self.solve_scores(score, out, lse)
            out[self.at] *= _LARGE
        else:
            self.solve_scores(score, out, lse)

    def solve_scores(self, score: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        seen = self.visible & (score != -np.inf)
        if np.isfinite(score[seen]).all() and np.isfinite(self.v).all() and seen.any(axis=1).all() and score.size:
            score[~seen] = -np.inf  # the definition for all rows at once
            top = score.max(axis=1, keepdims=True)
            p = np.exp(score - top)
            total = p.sum(axis=1, keepdims=True)
            left = p if self.factors is None else p * self.factors
            out[self.at] = self.product(left, self.v) / total
            lse[self.at] = (top + np.log(total))[:, 0]
            return
        factors = [None] * len(score) if self.factors is None else self.factors
        each = zip(score, self.visible, factors, strict=True)
        rows = [attention_row(row, self.v, seen, left) for row, seen, left in each]
        if rows:
            out[self.at], lse[self.at] = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
