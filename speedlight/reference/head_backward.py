"""The specification's backward pass over one head, in float64. docs/numerics.md, "Gradients", has the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..expressions.derivative import Flows, flows
from ..expressions.tables import Table
from ..expressions.tree import FLOW, Node, evaluate
from ..problem.problem import FAR_LSE


class Returned(NamedTuple):
    """The results of attention() for a head's rows, and their upstream gradients."""

    out: np.ndarray  # [q_len, value_dim]
    lse: np.ndarray  # [q_len]
    d_out: np.ndarray
    d_lse: np.ndarray
    keep: np.ndarray | None = None  # [q_len, k_len] of dropout: 0, or 1 / (1 - p); None: no dropout


class Weights(NamedTuple):
    """The weights of every query and key of a head, by the lse that was given; 0 where the pair is hidden."""

    seen: np.ndarray
    products: np.ndarray  # scale · q·k, whatever is seen
    p: np.ndarray


class Pairs(NamedTuple):
    """The intermediate values of every query and key of a head; 0 where the pair is hidden."""

    seen: np.ndarray
    products: np.ndarray  # scale · q·k, whatever is seen
    p: np.ndarray  # weights, by the lse that was given
    dp: np.ndarray  # d_out · v
    delta: np.ndarray  # [q_len]: d_out · out - d_lse
    ds: np.ndarray  # what flows into the scores
    raw: np.ndarray  # what flows into scale · q·k
    back: Flows | None  # through the score's expression


class HeadGradients(NamedTuple):
    """One head's gradients: its own rows of dq, its share of a kv head's dk and dv, and of the tables'."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tables: tuple[np.ndarray, ...]
    sink: float


def backward_of(head: Any, given: Returned, tables: tuple[Table, ...] = ()) -> HeadGradients:
    """Returns the gradients of one head of the reference. A hidden pair adds no term to anything: 0 · NaN is NaN."""
    pairs = pairs_of(head, given, tables)
    scale, seen = head.problem.scale, pairs.seen
    weights = dropped(pairs.p, given.keep)
    rows, sink, _ = sink_weights(head, given.lse)  # a sink is one more key, which every row sees: its value is zeros
    return HeadGradients(
        scale * sum_of_seen(head, pairs.raw, head.k, seen),
        scale * sum_of_seen(head, pairs.raw.T, head.q, seen.T),
        sum_of_seen(head, weights.T, given.d_out, seen.T),
        tuple(_table_gradient(head, pairs, table) for table in tables),
        float(-np.sum(sink * pairs.delta[rows])),
    )


def pairs_of(head: Any, given: Returned, tables: tuple[Table, ...]) -> Pairs:
    """Weights again, from the lse given, and what flows back into every score."""
    seen, products, p = weights_of(head, given.lse)
    dp = np.where(seen, head.product(given.d_out, head.v.T), 0.0)
    delta = np.sum(given.d_out * given.out, axis=1) - given.d_lse
    ds = np.where(seen, p * (dropped(dp, given.keep) - delta[:, None]), 0.0)
    raw, back = ds, None
    if head.problem.score is not None:
        back = flows(head.problem.score.root, tables)
        raw = np.zeros(ds.shape) if back.s is None else flow_through(head, back.s, products, ds, seen)
    return Pairs(seen, products, p, dp, delta, ds, raw, back)


def weights_of(head: Any, lse: np.ndarray) -> Weights:
    """Returns the weights of one head of the reference."""
    products = head.products()
    score = head.scores(products)
    seen = head.visible & (score != -np.inf) & (lse != -np.inf)[:, None]
    return Weights(seen, products, np.where(seen, np.exp(exponents(head, score, lse)), 0.0))


def exponents(head: Any, score: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """score - lse. At most 0 where so large an lse was rounded by more than its distance to a score."""
    x = score - lse[:, None]
    return np.where(is_far(head, lse)[:, None], np.minimum(x, 0.0), x)


def is_far(head: Any, lse: np.ndarray) -> np.ndarray:
    """Returns which rows have an lse so large that rounding moved it past a score."""
    return np.abs(lse) >= FAR_LSE["float64" if head.problem.dtype == "float64" else "float32"]


def dropped(x: np.ndarray, keep: np.ndarray | None) -> np.ndarray:
    """Weights, or what flows into them, after dropout: the one place where it acts."""
    return x if keep is None else keep * x


def flow_through(head: Any, flow: Any, products: np.ndarray, ds: Any, seen: np.ndarray) -> np.ndarray:
    """[q_len, k_len]: what a tree of flows makes of `ds`; 0 for hidden pairs, whatever comes out there."""
    value = evaluate(flow, head.env | {"s": products, FLOW: ds}, seen=seen, beyond=head.beyond)
    return np.where(seen, np.broadcast_to(value, seen.shape), 0.0)


def sum_of_seen(head: Any, weights: np.ndarray, x: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """weights @ x, of seen pairs alone."""
    if np.isfinite(x).all():
        return head.product(weights, x)
    rows = [head.product(row[at][None], x[at])[0] for row, at in zip(weights, seen, strict=True)]
    return np.array(rows).reshape(len(weights), x.shape[1])


def _table_gradient(head: Any, pairs: Pairs, table: Table) -> np.ndarray:
    """Returns the gradient of every entry: the sum over all places where it is read."""
    total = np.zeros(table.shape)
    for _, entries, flow in lookup_flows(head, pairs, table):
        np.add.at(total, entries, flow[pairs.seen])
    return total


def lookup_flows(head: Any, pairs: Pairs, table: Table) -> Iterator[tuple[Node, tuple[np.ndarray, ...], np.ndarray]]:
    """Yields of every lookup of a table the tree of its gradient, the index of the entry that every seen pair reads,
    and [q_len, k_len], its gradient.
    """
    env, seen = head.env | {"s": pairs.products}, pairs.seen
    for lookup, tree in () if pairs.back is None else pairs.back.entries:
        if lookup.value is table:
            index = (evaluate(a, env, seen=seen, beyond=head.beyond) for a in lookup.args)
            entries = tuple(np.broadcast_to(x, seen.shape)[seen] for x in index)
            yield tree, entries, flow_through(head, tree, pairs.products, pairs.ds, seen)


def sink_weights(head: Any, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns which rows see a sink, its weight in each, and the exponent that this is the power of."""
    sinks = head.problem.sinks
    sink = -np.inf if sinks is None else sinks[int(head.env["h"])]
    rows = (lse != -np.inf) & (sink != -np.inf)
    x = exponents(head, np.full((len(lse), 1), sink), lse)[rows, 0]
    return rows, np.exp(x), x
