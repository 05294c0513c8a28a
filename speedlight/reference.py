"""The specification: attention in float64, row by row, and the error bound that every engine keeps.

Slow, in memory that grows with q_len x k_len of one head, and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .errors import ArgumentError
from .expressions.tree import evaluate, rounding_error
from .modes import standard
from .problem import LAYOUTS, SPAN, TILE, Problem, from_arrays

# unit roundoff of a result in each dtype, and half its smallest subnormal
ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TINY = {"float64": 2.0**-1074, "float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}

_BEYOND = 2.0**128 - 2.0**103  # rounds to infinity in float32, in which a score's expression is computed

_MOST = float(np.finfo(np.float64).max)

# of float32 products on tensor cores: of S for the scores, and of M for the sum of values
_COARSE = {"ieee": 0.0, "tf32x3": 2.0**-19, "tf32": 2.0**-9}


class Bounds(NamedTuple):
    """Largest allowed |error| of every element of out and of lse."""

    out: np.ndarray
    lse: np.ndarray


def attention_row(score: np.ndarray, v: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, float]:
    """One query's scores and its values: the definition.

    A key that is not visible, or whose score is -inf, does not exist.
    """
    seen = visible & (score != -np.inf)
    score, v = score[seen], v[seen]
    if len(score) == 0:
        return np.zeros(v.shape[1]), -np.inf
    top = np.nanmax(score) if not np.isnan(score).all() else 0.0
    p = np.exp(score - top)
    weighted = np.ascontiguousarray(
        (p[:, None] * v).T
    )  # along rows NumPy adds in pairs: one long chain may be off by more than the engine
    return weighted.sum(axis=1) / p.sum(), float(top + np.log(p.sum()))


@standard
def attention(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Any) -> Any:
    """What `speedlight.attention` with the same arguments should return, in float64.

    Args:
        q, k, v: as for `speedlight.attention`.
        return_lse: also return the log-sum-exp.
        **options: causal, window, mask, score, sink_logits, q_start, k_start, scale, layout, cu_seqlens_q,
            cu_seqlens_k, q_lengths, k_lengths.

    Returns:
        float64 NumPy arrays of the shapes that `speedlight.attention` returns.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> sl.reference.attention(x, x, x)[0, 0, 0, 0]
    np.float64(1.0)
    """
    case = _Case(q, k, v, options)
    out, lse = case.results()
    lse[...] = -np.inf
    with np.errstate(all="ignore"):
        for place in case.heads():
            place.solve(out, lse)
    return (case.outward(out), lse) if return_lse else case.outward(out)


def error_bound(
    q: Any,
    k: Any,
    v: Any,
    *,
    proven: bool = False,
    dot: bool = False,
    int8: bool = False,
    tile: int | None = None,
    precision: str = "ieee",
    **options: Any,
) -> Bounds:
    """How far a result may be from `attention`, element by element. docs/numerics.md has both formulas.

    Args:
        q, k, v, **options: as for `attention`.
        proven: what the CPU engine cannot exceed, whatever the values are (with a score expression to first order).
            Default: what rounding errors that are not all of one sign add up to, several times less.
        dot: bfloat16 by the dot instruction.
        int8: k and v are codes · scales of an int8 cache, as its keys() and values() give them.
        tile: by the GPU engine, keys of whose blocks these are, at least; `precision` is that of its float32 products.

    Raises:
        ArgumentError: `proven` of the GPU engine, whose tensor cores add in an order of their own.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> bool((sl.reference.error_bound(x, x, x).out < 1e-5).all())
    True
    """
    if proven and tile is not None:
        raise ArgumentError("proven: expected False with `tile`: only the CPU engine's bound is proven.")
    case = _Case(q, k, v, options)
    case.proven, case.dot, case.int8, case.tile, case.precision = proven, dot, int8, tile, precision
    out, lse = case.results()
    with np.errstate(all="ignore"):
        for place in case.heads():
            place.bound(out, lse)
    return Bounds(case.outward(out), lse)


def weights(q: Any, k: Any, **options: Any) -> np.ndarray:
    """softmax(scale · QKᵀ) itself, (batch, q_heads, q_len, k_len) in float64; for a few rows, since it is as large as
    it is.

    Options as for `attention`, with layout "bhld" or "blhd". A row that sees nothing is 0.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> sl.reference.weights(x, x, causal=True)[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    case = _Case(q, k, k, options)
    out = np.zeros((*case.q.shape[:3], case.k.shape[2]))
    with np.errstate(all="ignore"):
        for place in case.heads():
            score = np.where(place.visible, place.scores(), -np.inf)
            p = np.exp(score - np.maximum(score.max(axis=1, keepdims=True, initial=-np.inf), -1e300))
            total = p.sum(axis=1, keepdims=True)
            out[place.at][:, : score.shape[1]] = p / np.where(total == 0, 1, total)
    return out


def merge(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """What `speedlight.merge(outs, lses)` should return, in float64.

    >>> import numpy as np, speedlight as sl
    >>> out, lse = sl.reference.merge([np.ones((1, 2)), np.zeros((1, 2))], [np.zeros(1), np.zeros(1)])
    >>> out.tolist(), round(float(lse[0]), 6)
    ([[0.5, 0.5]], 0.693147)
    """
    out, seen, share, base, total = _shares(outs, lses)
    with np.errstate(all="ignore"):
        return np.where(seen, share * out, 0.0).sum(axis=0), base + np.log(total)


def merge_bound(outs: Sequence[Any], lses: Sequence[Any]) -> Bounds:
    """How far a result of `speedlight.merge` may be from `merge`, element by element.

    docs/numerics.md has the formula.
    """
    dtype, lse_dtype = (arrays.describe(x[0], name).dtype for x, name in ((outs, "outs"), (lses, "lses")))
    out, seen, share, base, total = _shares(outs, lses)
    with np.errstate(all="ignore"):
        log = np.abs(base + np.log(total))
        below = np.where(seen[..., 0] & (share[..., 0] > 0), -np.log(share[..., 0]), 0.0).max(axis=0)
        steps = 2.0**-51 * (len(outs) + 5 + below)
        m, mean = (np.where(seen, share * x, 0.0).sum(axis=0) for x in (np.abs(out), out))
        tiny = _TINY[dtype] + len(outs) * 2.0**-1074 + 2.0**-1022 * np.where(seen, np.abs(out), 0.0).sum(axis=0)
        rounded = (ROUNDOFF[x] + (2.0**-24 if x.endswith("16") else 0.0) for x in (dtype, lse_dtype))
        return Bounds(
            next(rounded) * np.abs(mean) + steps[..., None] * m + tiny, next(rounded) * log + steps + _TINY[lse_dtype]
        )


def _shares(outs: Sequence[Any], lses: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """[states, …] of outputs, which of them saw anything, and their shares; per row, the largest lse and the sum of
    weights.
    """
    out, lse = (
        np.stack([arrays.describe(x, name).numpy().astype(np.float64) for x in xs])
        for xs, name in ((outs, "outs"), (lses, "lses"))
    )
    top = np.where(np.isnan(lse), -np.inf, lse).max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(all="ignore"):
        weight = np.exp(lse - base)
        total = weight.sum(axis=0)
        return out, ~np.isneginf(lse)[..., None], (weight / total)[..., None], base, total


class _Case:
    """Arrays as (batch, heads, length, dim) float64 views of one problem, or as one item when packed."""

    def __init__(self, q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
        described = tuple(arrays.describe(x, n) for x, n in ((q, "q"), (k, "k"), (v, "v")))
        defaults = {"causal": False, "q_start": None, "k_start": 0, "scale": None, "layout": "bhld"}
        self.layout = options.get("layout", "bhld")
        self.proven, self.dot, self.int8, self.precision = False, False, False, "ieee"
        self.tile: int | None = None
        self.problem, self.cu_q, self.cu_k = from_arrays(*described, **(defaults | options))
        self.dtype = self.problem.dtype
        axes = LAYOUTS[self.layout]
        self.q, self.k, self.v = (np.transpose(x.numpy(), axes) for x in described)

    def results(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((*self.q.shape[:-1], self.problem.value_dim)), np.zeros(self.q.shape[:-1])

    def outward(self, x: np.ndarray) -> np.ndarray:
        return np.transpose(x, np.argsort(LAYOUTS[self.layout]))

    def heads(self) -> Iterator[_Head]:
        p = self.problem
        for item in range(p.batch):
            for head in range(p.q_heads):
                if self.cu_q is None or self.cu_k is None:
                    at: Any = (item, head, slice(p.q_lengths[item]))
                    yield _Head(self, item, head, at, (item, head // p.group, slice(p.k_lengths[item])))
                else:
                    rows, keys = (slice(c[item], c[item + 1]) for c in (self.cu_q, self.cu_k))
                    yield _Head(self, item, head, (head, rows), (head // p.group, keys))


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


class _Head:
    """One q head of one item."""

    def __init__(self, case: _Case, item: int, head: int, at: Any, keys: Any) -> None:
        p: Problem = case.problem
        self.case, self.problem, self.at = case, p, at
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
            evaluate(p.mask.root, self.env, number, seen=self.visible)

    def products(self) -> np.ndarray:
        """[q_len, k_len]: scale · QKᵀ."""
        return _product(self.q, self.k.T, self.problem.dtype) * self.problem.scale

    def scores(self, s: np.ndarray | None = None) -> np.ndarray:
        """[q_len, k_len]: scaled, and through the score expression."""
        s = self.products() if s is None else s
        if self.problem.score is None:
            return s
        beyond = np.inf if self.problem.dtype == "float64" else _BEYOND
        return np.broadcast_to(
            evaluate(self.problem.score.root, self.env | {"s": s}, seen=self.visible, beyond=beyond), s.shape
        )

    def add_sink(self, score: np.ndarray) -> np.ndarray:
        """A sink is one more key, of a score given, that every query sees and whose value is zeros."""
        if self.problem.sinks is None:
            return score.copy()
        column = np.full((len(self.q), 1), self.problem.sinks[int(self.env["h"])])
        self.v = np.concatenate([self.v, np.zeros((1, self.v.shape[1]))])
        self.visible = np.concatenate([self.visible, np.ones(column.shape, dtype=bool)], axis=1)
        return np.concatenate([score, column], axis=1)

    def solve(self, out: np.ndarray, lse: np.ndarray) -> None:
        score = self.add_sink(self.scores())
        ordinary = (
            np.isfinite(score).all() and np.isfinite(self.v).all() and self.visible.any(axis=1).all() and score.size
        )
        if ordinary:  # the definition for all rows at once
            score[~self.visible] = -np.inf
            top = score.max(axis=1, keepdims=True)
            p = np.exp(score - top)
            total = p.sum(axis=1, keepdims=True)
            out[self.at], lse[self.at] = _product(p, self.v, self.problem.dtype) / total, (top + np.log(total))[:, 0]
            return
        rows = [attention_row(row, self.v, seen) for row, seen in zip(score, self.visible, strict=True)]
        if rows:
            out[self.at], lse[self.at] = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])

    def bound(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Per element, from M = Σ p|v|."""
        if not self.q.size or not (self.k.size or self.problem.sinks):
            return
        rules, products = _Rules.of(self), self.products()
        scores = self.scores(products)
        errors = self.logit_errors(rules, products, scores)
        score = self.add_sink(scores)
        if self.problem.sinks is not None:
            errors = np.concatenate([errors, 2 * rules.u * np.abs(score[:, -1:])], axis=1)
        values, visible = np.abs(self.v), self.visible & (score != -np.inf)
        score = np.where(visible, score, -np.inf)
        top = np.maximum(score.max(axis=1, keepdims=True), -_MOST)
        weight = np.exp(score - top)
        total = weight.sum(axis=1, keepdims=True)
        weight /= np.where(total == 0, 1, total)
        error = np.where(visible, errors, 0).max(axis=1, keepdims=True)
        if rules.proven:
            error = error + rules.u * np.where(visible, np.minimum(top - score, rules.deepest), 0).max(
                axis=1, keepdims=True
            )
            # so large a maximum is rounded down, and exponents are clamped
            error = error + np.where((np.abs(top) > 2.0**22) & (total > 0), 4 * rules.u * np.abs(top), 0)
        logs = np.abs(np.where(total == 0, 0, top + np.log(total)))
        mean = weight @ values
        out[self.at] = rules.relative(error) * mean + rules.floor(values, visible, weight)
        lse[self.at] = rules.of_lse(error, logs)[:, 0]
        if not rules.proven:
            chain = weight * self.chain_steps(visible)
            total = chain.sum(axis=1)
            out[self.at] += rules.u * (chain @ values + total[:, None] * mean)
            lse[self.at] += rules.u * total

    def chain_steps(self, visible: np.ndarray) -> Any:
        """[q_len, keys]: how many roundings a key's weight goes through in its tile's chain, each of one unit at most.

        They may all be of one sign where terms are equal. The GPU's order is not known: half a tile.
        """
        if self.case.tile:
            return TILE / 2
        keys = self.k.shape[0]  # a sink is merged by itself
        tiles = np.zeros((len(visible), -(-keys // TILE), TILE))
        tiles.reshape(len(visible), -1)[:, :keys] = visible[:, :keys]
        later = tiles[:, :, ::-1].cumsum(axis=2)[:, :, ::-1].reshape(len(visible), -1)[:, :keys]
        return np.pad(later, ((0, 0), (0, visible.shape[1] - keys)))

    def logit_errors(self, rules: _Rules, products: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """[q_len, k_len]: how far every score may be off, its product with log4 e included."""
        p, u = self.problem, rules.u
        scale = max(abs(p.scale), rules.normal * 2) if p.scale else 0.0
        size = np.abs(self.q) @ np.abs(self.k).T * scale
        off = (u * rules.chain + rules.coarse) * size + p.head_dim * rules.tiny * abs(p.scale)
        if rules.biased:
            off += u * rules.biased * np.abs(products)
        if rules.dot:  # subnormal numbers count as zeros
            q, k = (np.where(np.abs(x) < rules.normal, np.abs(x), 0) for x in (self.q, self.k))
            if q.any() or k.any():
                off += (q @ np.abs(self.k).T + np.abs(self.q) @ k.T) * abs(p.scale)
        if p.score is None:
            return off
        _, off = rounding_error(p.score.root, self.env | {"s": products}, off, u)
        return off + 2 * u * np.abs(scores)


@dataclass(frozen=True, slots=True)
class _Rules:
    """How errors add up for one head: the constants of docs/numerics.md."""

    proven: bool
    dot: bool
    gpu: bool
    wide: bool
    u: float  # unit roundoff of what is computed in
    chain: float  # of a score, in u · |scale| Σ|q||k|
    biased: float  # of a score, in u · |score|: what roundings of equal products add up to
    sums: float  # of the sums over keys, unless `chain_steps` has them, of quotients and products, in u
    exponential: float  # of a weight and what it is multiplied by later
    coarse: float  # of float32 products on tensor cores
    weights: float  # of weights that are rounded
    out: float  # of the result
    tiny_out: float  # half the smallest subnormal of the result
    keys: int

    @classmethod
    def of(cls, head: _Head) -> _Rules:
        case, p, n = head.case, head.problem, len(head.k)
        wide, low = p.dtype == "float64", p.dtype in ("float16", "bfloat16")
        u, d = ROUNDOFF["float64" if wide else "float32"], p.head_dim + p.head_dim % 2 * case.dot
        tiles, merges = min(-(-n // TILE), SPAN // TILE), -(-n // SPAN) + (p.sinks is not None)
        out = ROUNDOFF[p.dtype] if low else 0.0
        weights = ROUNDOFF["bfloat16"] if case.dot else out if case.tile else 0.0
        if case.proven:
            chain, biased = d + 2 + 2 * case.int8 + (p.score is not None), 0.0
            sums = 2 * min(n, TILE) + 2 * tiles + 4 * merges + 1 + 2 * case.int8
            exponential = (1.1e-4 if case.dot else 4 * u) * (tiles + merges)
        else:
            chain, biased = 6.0 + 2 * case.int8, d / 4
            sums = n / (case.tile or SPAN) + 12
            exponential = 0.0
        return cls(
            case.proven,
            case.dot,
            case.tile is not None,
            wide,
            u,
            chain,
            biased,
            sums,
            exponential,
            _COARSE[case.precision],
            weights,
            out,
            _TINY[p.dtype],
            n + 1,
        )

    @property
    def normal(self) -> float:
        """The smallest normal number: weights below are 0."""
        return 2.0**-1022 if self.wide else 2.0**-126

    @property
    def tiny(self) -> float:
        """What an operation may be off whose result is subnormal."""
        return self.normal if self.dot else _TINY["float64" if self.wide else "float32"]

    @property
    def deepest(self) -> float:
        """A key so far below the maximum weighs 0."""
        return 709.0 if self.wide else 88.0

    def relative(self, error: Any) -> Any:
        """Of out, in units of M."""
        if self.proven:
            shared = error + self.exponential + self.weights
            return np.expm1(1.01 * (2 * shared + self.u * self.sums)) * (1 + self.out) + self.out
        return self.u * self.sums + error + self.weights + self.out + self.coarse

    def of_lse(self, error: Any, logs: Any) -> Any:
        if self.proven:
            shared = error + self.exponential + self.weights
            return 1.01 * (shared + self.u * self.sums) + 4 * self.u * logs
        return self.u * (self.sums + 2 * logs) + error + self.weights

    def floor(self, values: Any, visible: Any, weight: Any) -> Any:
        """What does not shrink with M: weights and sums that underflow."""
        lost = (
            2.0**-25 if self.gpu and self.out == ROUNDOFF["float16"] else self.normal
        )  # weights of the GPU are float16 there
        floor = self.tiny_out + self.tiny * (2 * self.keys) + lost * (visible.astype(np.float64) @ values)
        if self.dot:
            floor = floor + weight @ np.where(values < self.normal, values, 0)
        return floor
