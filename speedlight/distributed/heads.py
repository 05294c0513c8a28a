"""Ulysses: each process gives every other its tokens of some heads, and has all tokens of its own heads then."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..problem import LAYOUTS
from .groups import Peers
from .parts import Heads
from .shardings import Runs, tokens, whole_of
from .tensors import Passage, common, every, lying, passed, passing


class Exchange(NamedTuple):
    """Who holds which tokens and computes which heads."""

    peers: Peers
    held: tuple[Runs, ...]
    heads: Heads
    axes: tuple[int, int]  # of heads, and of lengths
    number: int  # of heads in all

    @property
    def all_tokens(self) -> Runs:
        return whole_of(self.held)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """From own tokens of all heads to all tokens of own heads."""
        return _gather(tensor, self)

    def returned(self, flow: torch.Tensor) -> torch.Tensor:
        """From all tokens of own heads to own tokens of all heads; of heads that several processes have, the sum."""
        return _scatter(flow, self)


def axes_of(layout: str, *, logarithms: bool = False) -> tuple[int, int]:
    """Where heads and lengths are, of q, k and v, or of log-sum-exps."""
    head, length, _ = LAYOUTS[layout][-3:]
    if logarithms:
        return (1, 2) if len(layout) == 4 else (0, 1)
    return head, length


def gathered(tensor: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Exchange.gathered(), which autograd follows."""
    return passed((Passage(exchange.gathered, exchange.returned),), tensor)[0]


def scattered(*given: tuple[torch.Tensor, Exchange]) -> tuple[torch.Tensor, ...]:
    """Exchange.returned() of several tensors, which autograd follows."""
    return passed(tuple([Passage(x.returned, x.gathered) for _, x in given]), *[tensor for tensor, _ in given])


def _gather(tensor: torch.Tensor, x: Exchange) -> torch.Tensor:
    peers, (head, length), whole = x.peers, x.axes, x.all_tokens
    result = passing(tensor, _shape(tensor, x.axes, len(x.heads[peers.rank]), tokens(whole)))
    sends = [
        (lying(_of_heads(tensor, x.heads[to], head)), to, 0, "with its heads")
        for to in range(peers.ranks)
        if to != peers.rank
    ]
    parts = []
    for source, runs in enumerate(x.held):
        if source == peers.rank:
            parts.append(_of_heads(tensor, x.heads[source], head))
        else:
            parts.append(passing(tensor, _shape(tensor, x.axes, len(x.heads[peers.rank]), tokens(runs))))
    receives = [(part, source, 0, "with its heads") for source, part in enumerate(parts) if source != peers.rank]
    peers.carry(sends, receives)
    for part, runs in zip(parts, x.held, strict=True):
        for at, into in common(runs, whole):
            every(result, into, length).copy_(every(part, at, length))
    return result


def _scatter(tensor: torch.Tensor, x: Exchange) -> torch.Tensor:
    """Heads that are several processes' come together as their sum, in float32 at least, by rank."""
    peers, head = x.peers, x.axes[0]
    adding = sum(map(len, x.heads)) > x.number
    wide = torch.promote_types(tensor.dtype, torch.float32) if adding else tensor.dtype
    shape = _shape(tensor, x.axes, x.number, tokens(x.held[peers.rank]))
    count = tokens(x.held[peers.rank])
    sends, parts = [], []
    for other, (runs, heads) in enumerate(zip(x.held, x.heads, strict=True)):
        if other == peers.rank:
            parts.append(_of_tokens(tensor, runs, x))
        else:
            sends.append((_of_tokens(tensor, runs, x), other, 0, "with its tokens"))
            parts.append(passing(tensor, _shape(tensor, x.axes, len(heads), count)))
    receives = [(part, source, 0, "with its tokens") for source, part in enumerate(parts) if source != peers.rank]
    peers.carry(sends, receives)
    del sends
    result = torch.zeros(shape, dtype=wide, device=tensor.device)
    for part, heads in zip(parts, x.heads, strict=True):
        at = torch.tensor(heads, dtype=torch.int64, device=tensor.device)
        if adding:
            result.index_add_(head, at, part.to(wide))
        else:
            result.index_copy_(head, at, part)
    return result.to(tensor.dtype)


def _of_tokens(tensor: torch.Tensor, runs: Runs, x: Exchange) -> torch.Tensor:
    """A copy of some tokens of all, in the order in which their process has them."""
    length, at = x.axes[1], 0
    result = passing(tensor, [tokens(runs) if d == length else n for d, n in enumerate(tensor.shape)])
    for _, into in common(runs, x.all_tokens):
        result.narrow(length, at, len(into)).copy_(every(tensor, into, length))
        at += len(into)
    return result


def _of_heads(tensor: torch.Tensor, heads: tuple[int, ...], dim: int) -> torch.Tensor:
    if heads == tuple(range(heads[0], heads[0] + len(heads)) if heads else ()):
        return tensor.narrow(dim, heads[0] if heads else 0, len(heads))
    return tensor.index_select(dim, torch.tensor(heads, dtype=torch.int64, device=tensor.device))


def _shape(tensor: torch.Tensor, axes: tuple[int, int], heads: int, length: int) -> list[int]:
    shape = list(tensor.shape)
    shape[axes[0]], shape[axes[1]] = heads, length
    return shape
