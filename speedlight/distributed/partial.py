"""Queries over a sharded cache: what they find among a rank's own tokens, and what that is merged to."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError, Error
from ..expressions.patterns import causal
from ..expressions.symbols import Symbol
from ..expressions.tables import Table
from ..expressions.tracing import Expression, elsewhere
from ..expressions.tree import SYMBOLS, Node
from ..kv.cache import KVCache
from ..kv.query import check_asked
from ..merging import merge
from ..problem import Options, Problem
from ..resolve import from_stored
from .agreeing import finished
from .placement import Placement

_FEW = 16384  # entries of a table that are compared from rank to rank
_CAUSAL = causal()
_B, _I, _J = (Symbol(Node("symbol", SYMBOLS[name], value=name)) for name in "bij")


class Asked(NamedTuple):
    """Queries of a call, checked as those of one cache of all tokens."""

    q: Tensor
    problem: Problem
    scale: float | None
    after: Sequence[Placement]  # of every sequence its tokens by then

    @property
    def logs(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def said(self) -> dict[str, str]:
        """What all ranks have to mean alike."""
        p = self.problem
        said = {"q": f"{self.q.dtype} {tuple(self.q.shape)}", "q_lengths": str(p.q_lengths), "scale": str(p.scale)}
        return said | {"mask": _told(p.mask), "score": _told(p.score), "sink_logits": str(p.sinks)}


def asked_of(local: KVCache, q: Any, n_new: int | None, after: Sequence[Placement], given: Options) -> Asked:
    """The queries of a call that brought n_new tokens, or None."""
    if not isinstance(q, Tensor):
        raise ArgumentTypeError(f"q: expected a torch.Tensor; got {type(q).__name__}. Use torch.as_tensor().")
    storage, totals = local._storage, [x.length for x in after]
    problem = from_stored(storage.query(q), storage.shape.stored(totals), given)
    if n_new is not None and given.q_lengths is None and q.shape[2] != n_new:
        raise ArgumentError(
            f"q: expected {n_new} tokens, as k has; got {q.shape[2]} (shape {tuple(q.shape)}). Other queries than "
            "those of the new tokens are told by q_lengths=."
        )
    if problem.causal:
        check_asked(list(problem.q_lengths), totals)
    return Asked(q, problem, given.scale, after)


def partial(local: KVCache, layer: int, asked: Asked, rank: int) -> tuple[Tensor, Tensor]:
    """What the queries find among a rank's own tokens: (out, lse)."""
    q, problem = asked.q, asked.problem
    if not any([x.counts[rank] for x in asked.after]):
        lse = q.new_full(q.shape[:-1], -math.inf, dtype=asked.logs)
        return q.new_zeros(*q.shape[:-1], local.value_dim), lse
    mask, score = problem.mask, problem.score
    if problem.causal and max(problem.q_lengths) > 1:  # a single query sees all
        mask = _CAUSAL if mask is None else mask & _CAUSAL
    return local.attend(
        layer, q, scale=asked.scale, mask=_moved(mask, asked, rank), score=_moved(score, asked, rank),
        q_lengths=None if problem.rows is None else problem.q_lengths, return_lse=True,
    )  # fmt: skip


def _moved(x: Expression | None, asked: Asked, rank: int) -> Expression | None:
    """A mask or score of positions, over a rank's own tokens, which the local cache counts from 0."""
    after = asked.after
    if x is None or len(after[0].counts) == 1 or x.root.uses.isdisjoint("ij"):
        return x
    shifts = [p.length - p.counts[rank] for p in after]
    if all([p is after[0] for p in after]):
        return elsewhere(x, _I + shifts[0], Table(after[0].positions(rank), "positions")[_J])
    own = [p.positions(rank) for p in after]
    table = np.zeros((len(own), max(map(len, own))), np.int64)
    for row, at in zip(table, own, strict=True):
        row[: len(at)] = at
    return elsewhere(x, _I + Table(shifts, "positions")[_B], Table(table, "positions")[_B, _J])


def merged(
    group: Any, asked: Asked, value_dim: int, state: tuple[Tensor, Tensor] | None, failed: BaseException | None
) -> tuple[Tensor, Tensor]:
    """What all ranks have found; each hears of a failure on any."""
    q, shape = asked.q, (*asked.q.shape[:-1], value_dim)
    rows = math.prod(q.shape[:-1])
    mine = torch.zeros(rows * (value_dim + 1) + 1, dtype=asked.logs, device=q.device)
    if state is None:
        mine[-1] = 1
    else:
        mine[: rows * value_dim].view(shape).copy_(state[0])
        mine[rows * value_dim : -1].view(q.shape[:-1]).copy_(state[1])
    each = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    finished(dist.all_gather(each, mine, group, async_op=True), group, "attend")
    if failed is not None:
        raise failed
    gone = [rank for rank, x in enumerate(each) if x[-1]]
    if gone:
        raise Error(f"attend: rank {gone[0]} failed, and says why. The cache is as it was on every rank.")
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


def _told(x: Expression | None) -> str:
    """A mask or score in words that differ where it does: its text, and what is in its tables."""
    if x is None:
        return "None"
    few = [t for t in x.tables if t.array.size <= _FEW]
    return " ".join([repr(x), *map(repr, x.tables), *(f"{zlib.crc32(t.host().tobytes()):08x}" for t in few)])
