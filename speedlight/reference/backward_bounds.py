"""Error bounds of gradients against the specification, element by element.

docs/numerics.md, "Gradients", has the order of operations and the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ..expressions.tables import Table
from ..expressions.tree import FLOW, Node, rounding_error
from ..problem.gradients import SINKS
from ..problem.problem import QUERY_BLOCK, TILE
from .bounds import (
    LARGEST,
    ROUNDOFF,
    TINY,
    Arithmetic,
    finite,
    flushed,
    on_tensor_cores,
    partial_sums,
    product_errors,
    products_overflow,
)
from .head_backward import (
    Pairs,
    Returned,
    Weights,
    dropped,
    exponents,
    is_far,
    lookup_flows,
    pairs_of,
    sink_weights,
    sum_of_seen,
    weights_of,
)

Blocks = list[tuple[int, int]]  # of rows: first, and one past the last

_MOST = 1e150  # of an error: what is beyond says nothing, and its product with 0 is still 0


class GradientBounds(NamedTuple):
    """Largest allowed |error| of every element of dq, dk and dv."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Terms(NamedTuple):
    """The sums of one head: their factors, and the error of each."""

    head: Any
    given: Returned
    pairs: Pairs
    weights: np.ndarray  # after dropout
    weights_off: np.ndarray
    raw_off: np.ndarray
    ds_off: np.ndarray
    far: np.ndarray  # of which pairs the weight may overflow, though what it is made of is finite
    ds_far: np.ndarray  # … and what flows into the score


class Sums(NamedTuple):
    """Running sums in float64 for every entry of a table, or every head's sink."""

    total: np.ndarray
    size: np.ndarray  # of all terms, without signs
    off: np.ndarray  # of all terms
    terms: np.ndarray  # how many

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> Sums:
        return cls(*(np.zeros(shape) for _ in cls._fields))


def terms_of(head: Any, given: Returned, a: Arithmetic, tables: tuple[Table, ...]) -> Terms:
    """Returns the terms of one head of the reference; 0 where a pair is hidden."""
    pairs = pairs_of(head, given, tables)
    p_off = _weight_errors(head, given.lse, pairs, a)
    ds_off = _flow_errors(head, given, pairs, p_off, a)
    raw_off = ds_off if pairs.back is None else _through_score(head, pairs, pairs.back.s, ds_off, a)
    weights, weights_off = dropped(pairs.p, given.keep), dropped(p_off, given.keep)
    if given.keep is not None:
        weights_off = weights_off + 2 * a.u * weights
    offs = [
        np.where(pairs.seen, np.minimum(off + a.u_weights * (np.abs(x) + off) + a.least_weight, _MOST), 0.0)
        for x, off in ((weights, weights_off), (pairs.raw, raw_off))
    ]
    far, ds_far = (x | (y == _MOST) for x, y in zip(_overflows(head, given, pairs, p_off, a), offs, strict=True))
    return Terms(head, given, pairs, weights, offs[0], offs[1], ds_off, far, ds_far)


def _overflows(
    head: Any, given: Returned, pairs: Pairs, p_off: np.ndarray, a: Arithmetic
) -> tuple[np.ndarray, np.ndarray]:
    """[q_len, k_len]: of which seen pairs the weight may overflow, and what flows into their score."""
    p = finite(pairs.p) + np.where(p_off < _MOST, p_off, 0.0)
    far = products_overflow(head, a) | (dropped(p, given.keep) > a.weight_room)
    dp = dropped(finite(given.d_out) @ finite(head.v).T, given.keep)
    difference = dp + (finite(given.d_out * given.out).sum(axis=1) + finite(given.d_lse))[:, None]
    ds_far = far | (difference * np.maximum(1.0, p) > a.room) | (finite(pairs.raw) > a.weight_room)
    return far & pairs.seen, ds_far & pairs.seen


def query_bound(x: Terms, a: Arithmetic) -> np.ndarray:
    """[q_len, head_dim]: of dq. Tiles of keys, ascending."""
    tiles = _blocks(x.head.env["j"][0], TILE)
    total, off = _sum_bound(x.head, x.pairs.raw, x.raw_off, x.head.k, x.pairs.seen, x.ds_far, tiles, a)
    return _scaled(x.head, total, off, a)


def key_bounds(group: list[Terms], a: Arithmetic) -> tuple[np.ndarray, np.ndarray]:
    """[k_len, head_dim] and [k_len, value_dim]: of dk and dv, from all heads that read these keys.

    Blocks of positions, ascending; for each a sum of every head's.
    """
    head = group[0].head
    blocks = _blocks(head.env["i"][:, 0], QUERY_BLOCK)
    ends = itertools.accumulate((end - first for first, end in blocks for _ in group), initial=0)
    steps = list(itertools.pairwise(ends))

    def joined(several: Iterable[np.ndarray]) -> np.ndarray:
        return np.concatenate([x[first:end] for first, end in blocks for x in several])

    def summed(*several: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
        terms, off, far, rows = (joined(x) for x in several)
        return _sum_bound(head, terms.T, off.T, rows, seen, far.T, steps, a)

    seen = joined([x.pairs.seen for x in group]).T
    dk = summed(*zip(*((x.pairs.raw, x.raw_off, x.ds_far, x.head.q) for x in group), strict=True))
    dv = summed(*zip(*((x.weights, x.weights_off, x.far, x.given.d_out) for x in group), strict=True))
    return _scaled(head, *dk, a), _rounded(*dv, a)


def key_weight_bound(head: Any, lse: np.ndarray, rows: Any, a: Arithmetic, reduction: str) -> np.ndarray:
    """[k_len]: of the sum, or the largest, of weights over some rows of a head; of "rows" [rows, k_len]."""
    weights = weights_of(head, lse)
    off = np.minimum(_weight_errors(head, lse, weights, a), _MOST)
    far = weights.seen & (products_overflow(head, a) | (finite(weights.p) + off > a.weight_room) | (off == _MOST))
    seen, p, off, far = (x[rows] for x in (weights.seen, weights.p, np.where(weights.seen, off, 0.0), far))
    dtype = "float64" if a.wide else "float32"
    if reduction != "sum":
        found = _stored(p, off * (2.02 if a.wide else 1.01), 0.0, dtype)
        found = np.where(far, np.inf, found)
        return found if reduction == "rows" else found.max(axis=0, initial=TINY[dtype])
    off = np.where(seen, off + a.u_weights * (p + off), 0.0)
    blocks = _blocks(head.env["i"][rows, 0], QUERY_BLOCK) if len(p) else []
    ones = np.ones((len(p), 1))
    total, off = _sum_bound(head, p.T, off.T, ones, seen.T, far.T, blocks, a)
    return _stored(total, off * (2.02 if a.wide else 1.01), 0.0, dtype)[:, 0]


def add_share(sums: Sums, keys: Any, share: np.ndarray) -> None:
    """Adds one head's share of the gradient of keys that items share."""
    for y, term in zip(sums, (share, np.abs(share), np.zeros(share.shape), np.ones(share.shape)), strict=True):
        y[keys] += term


def shared_bound(sums: Sums, off: np.ndarray, a: Arithmetic) -> np.ndarray:
    """Bounds the gradient of shared keys: the items' sums, off by `off` in all, added in float64 and rounded once."""
    dtype = a.problem.dtype
    off = off + 2.02 * ROUNDOFF["float64"] * sums.terms * (sums.size + off)
    u = 0.0 if a.wide else ROUNDOFF[dtype] + (ROUNDOFF["float32"] if a.u_out else 0.0)
    return _stored(sums.total, off, u, dtype)


def folded_bound(bounds: tuple[np.ndarray, ...], gradients: tuple[np.ndarray, ...], dtype: str) -> np.ndarray:
    """Bounds dk where values are the keys' first columns: dv, rounded by itself, is added there and rounded once more.

    Args:
        bounds, gradients: of keys and values that are arrays of their own.
    """
    (off, more), (dk, dv) = bounds, gradients
    both, total = off.copy(), dk.copy()
    columns = dv.shape[-1]
    total[..., :columns] += dv
    u = ROUNDOFF[dtype] + (ROUNDOFF["float32"] if dtype in ("float16", "bfloat16") else 0.0)
    own_rounding = ROUNDOFF["float64"] * np.abs(total[..., :columns])
    both[..., :columns] = _stored(total[..., :columns], off[..., :columns] + more + own_rounding, u, dtype)
    return both


def add_terms(sums: Sums, x: Terms, grad: Table | str, a: Arithmetic) -> None:
    """Adds one head's terms to the gradient of a table, or of sinks."""
    if not isinstance(grad, Table):
        for y, share in zip(sums, _sink_terms(x), strict=True):
            y[int(x.head.env["h"])] += share
        return
    for tree, entries, flow in lookup_flows(x.head, x.pairs, grad):
        off = np.minimum(_through_score(x.head, x.pairs, tree, x.ds_off, a), _MOST)
        off = np.where(x.ds_far | (finite(flow) > a.room), np.inf, off)
        for y, term in zip(sums, (flow, np.abs(flow), off, np.ones(flow.shape)), strict=True):
            np.add.at(y, entries, term[x.pairs.seen])


def summed_bound(sums: Sums, grad: Table | str, a: Arithmetic) -> np.ndarray:
    """Bounds the gradient of a table, or of sinks: sums in float64, in any order, rounded once.

    The specification adds in float64, too; so it does whatever a sink's terms are made of.
    """
    both = 2.02 if a.wide or grad == SINKS else 1.01
    off = both * sums.off + 2.02 * ROUNDOFF["float64"] * sums.terms * (sums.size + sums.off)
    dtype = "float64" if a.wide else "float32"
    u = 0.0 if a.wide else ROUNDOFF[dtype]
    return _stored(sums.total, off, u, dtype)


def _sink_terms(x: Terms) -> tuple[float, ...]:
    """Returns the error terms of one head's sink in float64: the weight's exponent rounds, and delta's sum."""
    u, given = ROUNDOFF["float64"], x.given
    rows, p, exponent = sink_weights(x.head, given.lse)
    delta = x.pairs.delta[rows]
    sizes = np.abs(given.d_out * given.out).sum(axis=1)[rows]
    delta_off = u * ((given.out.shape[1] + 1) * sizes + np.abs(delta))
    off = p * delta_off + (3 + np.abs(exponent)) * u * p * np.abs(delta) + TINY["float64"] * (1 + np.abs(delta))
    return float(-np.sum(p * delta)), float(np.sum(p * np.abs(delta))), float(np.sum(off)), float(np.sum(rows))


def _blocks(positions: np.ndarray, size: int) -> Blocks:
    """First of each block of absolute positions, and one past its last."""
    edges = [0, *(np.flatnonzero(np.diff(positions // size)) + 1).tolist(), len(positions)]
    return list(itertools.pairwise(edges))


def _weight_errors(head: Any, lse: np.ndarray, pairs: Pairs | Weights, a: Arithmetic) -> np.ndarray:
    """Bounds the error of p: an exponent off by e makes it off by e^e - 1 of itself; then the power's own error."""
    scores = head.scores(pairs.products)
    exponent = np.where(pairs.seen, exponents(head, scores, lse), 0.0)
    off = product_errors(head, a, pairs.products)
    if head.problem.score is not None:
        _, off = rounding_error(head.problem.score.root, head.env | {"s": pairs.products}, off, a.u)
    off = np.where(pairs.seen, off + 3 * a.u * np.abs(exponent), 0.0)
    moved = np.where(exponent == -np.inf, 0.0, np.exp(exponent + off) * -np.expm1(-off))
    moved = np.where(is_far(head, lse)[:, None], np.minimum(moved, 1.0), moved)
    return moved + (1.1e-4 if a.dot else 4 * a.u) * pairs.p + a.normal


def _flow_errors(head: Any, given: Returned, pairs: Pairs, p_off: np.ndarray, a: Arithmetic) -> np.ndarray:
    """Bounds the error of p · (dp - delta)."""
    d_out, v, u = given.d_out, head.v, a.u
    size = np.abs(d_out) @ np.abs(v).T
    sums = on_tensor_cores(a, size, len(v.T), pairs.dp) if a.tile else u * (partial_sums(d_out, v) + a.dot * size)
    off = sums + len(v.T) * a.tiny + flushed(a, np.abs(d_out), np.abs(v))
    off = dropped(off, given.keep)
    dp = dropped(pairs.dp, given.keep)
    if given.keep is not None:
        off = off + 2 * u * np.abs(dp)
    products = d_out * given.out
    sums = np.abs(products).sum(axis=1)
    sums = (
        (2 + len(v.T).bit_length()) * sums if a.tile else np.abs(np.cumsum(products, axis=1)).sum(axis=1) + a.dot * sums
    )
    delta_off = u * (sums + np.where(given.d_lse != 0, np.abs(pairs.delta), 0)) + len(v.T) * a.tiny
    difference = np.abs(dp - pairs.delta[:, None])
    return (pairs.p + p_off) * (off + delta_off[:, None]) + (p_off + 2 * u * pairs.p) * difference + 2 * a.tiny


def _through_score(head: Any, pairs: Pairs, back: Node | None, ds_off: np.ndarray, a: Arithmetic) -> np.ndarray:
    """Bounds the gradient through the score function, whose slope is off, too."""
    if back is None:
        return np.zeros(ds_off.shape)
    env = head.env | {"s": pairs.products, FLOW: np.ones(ds_off.shape)}
    slope, slope_off = rounding_error(back, env, product_errors(head, a, pairs.products), a.u)
    off = np.abs(slope) * ds_off + slope_off * (np.abs(pairs.ds) + ds_off)
    return np.where((slope == 0) & (slope_off == 0), 0.0, off) + 2 * a.tiny


def _sum_bound(
    head: Any,
    weights: np.ndarray,
    off: np.ndarray,
    x: np.ndarray,
    seen: np.ndarray,
    far: np.ndarray,
    blocks: Blocks,
    a: Arithmetic,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns weights @ x over visible pairs, and a bound of its error, the roundings of its chains included.

    Infinite where it may overflow, by its terms or as those that are `far` may.
    """
    total, rounded = np.zeros((len(weights), x.shape[1])), np.zeros((len(weights), x.shape[1]))
    if a.tile:  # the order in which tensor cores add is theirs
        total = sum_of_seen(head, weights, x, seen)
        rounded = (TILE + len(x) / a.tile + 12 + a.coarse / a.u) * (finite(weights) @ finite(x))
        blocks = []
    for first, end in blocks:
        partial = np.zeros(total.shape)
        for t in range(first, end):
            at = seen[:, t, None]
            partial += np.where(at, weights[:, t, None] * x[t], 0.0)
            rounded += np.abs(partial) * at
        total += partial
        rounded += np.abs(total) * (first > 0)
    size = np.abs(x)
    lost = a.tiny * (len(x) + len(blocks))
    if a.dot:  # subnormal numbers count as zeros
        lost = lost + sum_of_seen(head, np.abs(weights), np.where(size < a.normal, size, 0), seen)
    terms = (finite(weights) + np.where(off < _MOST, off, 0.0)) @ finite(x)
    off = sum_of_seen(head, off, size, seen) + a.u * rounded + lost
    return total, np.where(far.any(axis=1, keepdims=True) | (terms > a.room), np.inf, off)


def _scaled(head: Any, total: np.ndarray, off: np.ndarray, a: Arithmetic) -> np.ndarray:
    """Bounds a sum that is multiplied by the scale, which is rounded, too."""
    scale = abs(head.problem.scale)
    least = max(scale, 2 * a.normal) if scale else 0.0
    return _rounded(scale * total, scale * off + 2 * a.u * least * np.abs(total), a)


def _rounded(total: np.ndarray, off: np.ndarray, a: Arithmetic) -> np.ndarray:
    off = off * (2.02 if a.wide else 1.01)  # the specification is rounded to float64, too
    return _stored(total, off, a.u_out, a.problem.dtype)


def _stored(total: np.ndarray, off: np.ndarray, u: float, dtype: str) -> np.ndarray:
    """Bounds a sum that is off by `off` once rounded to a dtype; infinite where it may overflow that."""
    off = off + (u * (np.abs(total) + off) if u else 0.0) + TINY[dtype]
    return np.where(finite(total) + off > LARGEST[dtype], np.inf, off)
