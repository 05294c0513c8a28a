"""Queries over a sharded cache: what they find among a rank's own tokens, and what that is merged to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..calls.merge import merge
from ..errors import ArgumentError, ArgumentTypeError, CommunicationError
from ..expressions.patterns import causal
from ..expressions.substitution import replaced
from ..expressions.symbols import Symbol, node_of
from ..expressions.tables import Table
from ..expressions.tracing import Expression
from ..expressions.tree import SYMBOLS, Node
from ..kv.cache import KVCache
from ..kv.query import check_asked
from ..problem.build import from_stored
from ..problem.options import Options
from ..problem.problem import Problem
from .forms import entries_of, form_of
from .groups import Peers
from .placement import Placement

_CAUSAL = causal()
_B, _I, _J = (Symbol(Node("symbol", SYMBOLS[name], value=name)) for name in "bij")


class NewTokens(NamedTuple):
    """Tokens that a call brings, as this rank has them, and where all of them go."""

    k: Any
    v: Any
    rows: list[np.ndarray] | None  # of every sequence, which of k and v this rank keeps; None: all
    after: list[Placement]


class Asked(NamedTuple):
    """Queries of a call, checked as those of one cache of all tokens."""

    q: Tensor
    problem: Problem
    given: Options
    after: Sequence[Placement]  # of every sequence its tokens by then

    @property
    def logs(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def form(self) -> dict[str, str]:
        """Returns what must be equal on all ranks."""
        p = self.problem
        options = replace(self.given, mask=p.mask, score=p.score, scale=p.scale, q_lengths=list(p.q_lengths))
        return form_of(options, {"q": f"{self.q.dtype} {tuple(self.q.shape)}"}) | entries_of(p.q_lengths, q=self.q)


def put(local: KVCache, layer: int, new: NewTokens) -> None:
    """Appends those of the new tokens that are this rank's."""
    if new.rows is None:
        local.append(layer, new.k, new.v)
        return
    counts = list(map(len, new.rows))
    if not any(counts):
        return
    both = [x[:, :, : max(counts)] + 0 for x in (new.k, new.v)]  # copies, as long as any sequence needs
    for own, x in zip(both, (new.k, new.v), strict=True):
        for item, rows in enumerate(new.rows):
            own[item, :, : len(rows)] = x[item][:, rows]
    local.append(layer, *both, new_lengths=counts)


def asked_of(local: KVCache, q: Any, n_new: int | None, after: Sequence[Placement], given: Options) -> Asked:
    """The queries of a call that brought n_new tokens, or None."""
    if not isinstance(q, Tensor):
        raise ArgumentTypeError(f"q: expected a torch.Tensor; got {type(q).__name__}. Use torch.as_tensor().")
    storage, totals = local.storage, [x.length for x in after]
    problem = from_stored(storage.query(q), storage.shape.stored(totals), given)
    if n_new is not None and given.q_lengths is None and q.shape[2] != n_new:
        raise ArgumentError(
            f"q: expected {n_new} tokens, as k has; got {q.shape[2]} (shape {tuple(q.shape)}). For other "
            "queries than the new tokens give q_lengths=."
        )
    if problem.causal:
        check_asked(list(problem.q_lengths), totals)
    return Asked(q, problem, given, after)


def partial(local: KVCache, layer: int, asked: Asked, rank: int) -> tuple[Tensor, Tensor]:
    """Returns attention of the queries over a rank's own tokens: (out, lse)."""
    q, problem = asked.q, asked.problem
    if not any([x.counts[rank] for x in asked.after]):
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=asked.logs)
        return q.new_zeros(*q.shape[:-1], local.value_dim), lse
    mask, score = problem.mask, problem.score
    if problem.causal and max(problem.q_lengths) > 1:  # a single query sees all
        mask = _CAUSAL if mask is None else mask & _CAUSAL
    return local.attend(
        layer, q, scale=asked.given.scale, mask=_moved(mask, asked, rank), score=_moved(score, asked, rank),
        q_lengths=None if problem.rows is None else problem.q_lengths, return_lse=True,
    )  # fmt: skip


def _moved(x: Expression | None, asked: Asked, rank: int) -> Expression | None:
    """A mask or score of positions, over a rank's own tokens, which the local cache counts from 0."""
    after = asked.after
    if x is None or len(after[0].counts) == 1 or x.root.uses.isdisjoint("ij"):
        return x
    shifts, own = [p.length - p.counts[rank] for p in after], [p.positions(rank) for p in after]
    if all([p is after[0] for p in after]):
        i, j = _I + shifts[0], Table(own[0], "positions")[_J]
    else:
        table = np.zeros((len(own), max(map(len, own))), np.int64)
        for row, at in zip(table, own, strict=True):
            row[: len(at)] = at
        i, j = _I + Table(shifts, "positions")[_B], Table(table, "positions")[_B, _J]
    return replaced(x, {"i": node_of(i), "j": node_of(j)})


def merged(
    peers: Peers, asked: Asked, value_dim: int, state: tuple[Tensor, Tensor] | None, failed: BaseException | None
) -> tuple[Tensor, Tensor]:
    """Merges the partial results of all ranks; a failure on any is raised on each."""
    q, shape = asked.q, (*asked.q.shape[:-1], value_dim)
    rows = math.prod(q.shape[:-1])
    mine = torch.zeros(rows * (value_dim + 1) + 1, dtype=asked.logs, device=q.device)
    if state is None:
        mine[-1] = 1
    else:
        mine[: rows * value_dim].view(shape).copy_(state[0])
        mine[rows * value_dim : -1].view(q.shape[:-1]).copy_(state[1])
    each = peers.gathered(mine, "with what it found")
    if failed is not None:
        raise failed
    gone = [peers.world_rank(rank) for rank, x in enumerate(each) if x[-1]]
    if gone:
        raise CommunicationError(
            f"group: expected every process to attend; rank {gone[0]} failed, and says why. The cache is as it was.",
            gone[0],
        )
    outs = [x[: rows * value_dim].view(shape) for x in each]
    lses = [x[rows * value_dim : -1].view(q.shape[:-1]) for x in each]
    if asked.problem.sinks is not None:
        outs.append(torch.zeros_like(outs[0]))
        lses.append(_sinks(asked.problem, lses[0]))
    out, lse = merge(outs, lses)
    return out.to(q.dtype), lse


def _sinks(problem: Problem, like: Tensor) -> Tensor:
    """The state of attention sinks, whose values are 0; rows that are no queries have none."""
    state = like.new_tensor(problem.sinks)[None, :, None].expand_as(like).clone()
    for item, n in enumerate(problem.q_lengths):
        state[item, :, n:] = -math.inf
    return state
