"""Ulysses: each process gives every other its tokens of some heads, and has all tokens of its own heads then."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..problem.key_parts import Heads
from ..problem.problem import LAYOUTS
from ..problem.shardings import Runs, tokens, whole_of
from .arriving import pieces
from .groups import Peers
from .tensors import Exchange, common, contiguous, mmap_empty, strided_slice


class HeadExchange(NamedTuple):
    """Who holds which tokens and computes which heads."""

    peers: Peers
    held: tuple[Runs, ...]
    heads: Heads
    axes: tuple[int, int]  # of heads, and of lengths
    number: int  # of heads in all

    @property
    def all_tokens(self) -> Runs:
        return whole_of(self.held)

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers all tokens of own heads from own tokens of all heads."""
        own, (head, length), whole = self.peers.rank, self.axes, self.all_tokens
        result = mmap_empty(tensor, _shape(tensor, self.axes, len(self.heads[own]), tokens(whole)))
        messages = _Messages(self, "with its heads")
        for to, heads in enumerate(self.heads):
            for part in _of_heads(tensor, heads, head) if to != own else ():
                for at, _ in common(self.held[own], whole):
                    messages.give(strided_slice(part, at, length), to)
        for source, runs in enumerate(self.held):
            for part, place in zip(
                _of_heads(tensor, self.heads[own], head), _in_turn(result, self.heads[own], head), strict=True
            ):
                for at, into in common(runs, whole):
                    if source != own:
                        messages.take(strided_slice(place, into, length), source)
                    else:
                        strided_slice(place, into, length).copy_(strided_slice(part, at, length))
        messages.carry()
        return result

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers own tokens of all heads from all tokens of own heads; of heads that several processes have, their
        sum, in float32 at least, by rank.
        """
        own, (head, length), whole = self.peers.rank, self.axes, self.all_tokens
        adding = sum(map(len, self.heads)) > self.number
        count = tokens(self.held[own])
        result = mmap_empty(tensor, _shape(tensor, self.axes, self.number, count))
        messages, parts = _Messages(self, "with its tokens"), []
        for to, runs in enumerate(self.held):
            for part in _in_turn(tensor, self.heads[own], head) if to != own else ():
                for _, into in common(runs, whole):
                    messages.give(strided_slice(part, into, length), to)
        for source, heads in enumerate(self.heads):
            parts.append(mmap_empty(tensor, _shape(tensor, self.axes, len(heads), count)) if adding else result)
            places = _in_turn(parts[-1], heads, head) if adding else _of_heads(result, heads, head)
            for n, place in enumerate(places):
                for at, into in common(self.held[own], whole):
                    if source != own:
                        messages.take(strided_slice(place, at, length), source)
                    else:
                        strided_slice(place, at, length).copy_(
                            strided_slice(_in_turn(tensor, heads, head)[n], into, length)
                        )
        messages.carry()
        return _added(parts, self, result) if adding else result

    @property
    def reversed(self) -> Exchange:
        """The exchange that begins with all tokens of own heads."""
        return Exchange(self.back, self.there)


def axes_of(layout: str, *, logarithms: bool = False) -> tuple[int, int]:
    """Returns the axes of heads and lengths, of q, k and v, or of log-sum-exps."""
    head, length, _ = LAYOUTS[layout][-3:]
    if logarithms:
        return (1, 2) if len(layout) == 4 else (0, 1)
    return head, length


class _Messages:
    """The pieces that go to other processes and come from them: from where each lies, to where it belongs."""

    def __init__(self, x: HeadExchange, what: str) -> None:
        self.x, self.what = x, what
        self.sends: list[Any] = []
        self.receives: list[Any] = []
        self.aside: list[tuple[torch.Tensor, torch.Tensor]] = []

    def give(self, part: torch.Tensor, to: int) -> None:
        for y in pieces(part, self.x.axes[1]):
            self.sends.append((contiguous(y), to, self._number(self.sends, to), self.what))

    def take(self, place: torch.Tensor, source: int) -> None:
        for y in pieces(place, self.x.axes[1]):
            into = y if y.is_contiguous() else mmap_empty(y, y.shape)
            self.receives.append((into, source, self._number(self.receives, source), self.what))
            self.aside += [] if into is y else [(y, into)]

    @staticmethod
    def _number(given: list[Any], peer: int) -> int:
        return given[-1][2] + 1 if given and given[-1][1] == peer else 0

    def carry(self) -> None:
        self.x.peers.carry(self.sends, self.receives)
        for place, part in self.aside:
            place.copy_(part)


def _added(parts: list[torch.Tensor], x: HeadExchange, like: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
    for part, heads in zip(parts, x.heads, strict=True):
        total.index_add_(x.axes[0], torch.tensor(heads, dtype=torch.int64, device=like.device), part.to(total.dtype))
    return total.to(like.dtype)


def _spans(heads: tuple[int, ...]) -> list[tuple[int, int]]:
    """Heads that follow each other, as the first and how many."""
    found: list[tuple[int, int]] = []
    for h in heads:
        first, count = found[-1] if found else (h, 0)
        found = [*found[:-1], (first, count + 1)] if h == first + count else [*found, (h, 1)]
    return found


def _of_heads(tensor: torch.Tensor, heads: tuple[int, ...], dim: int) -> list[torch.Tensor]:
    """Views of some of all heads."""
    return [tensor.narrow(dim, first, count) for first, count in _spans(heads)]


def _in_turn(tensor: torch.Tensor, heads: tuple[int, ...], dim: int) -> list[torch.Tensor]:
    """Returns the pieces of a tensor that has these heads alone."""
    counts = [count for _, count in _spans(heads)]
    return [tensor.narrow(dim, sum(counts[:n]), count) for n, count in enumerate(counts)]


def _shape(tensor: torch.Tensor, axes: tuple[int, int], heads: int, length: int) -> list[int]:
    shape = list(tensor.shape)
    shape[axes[0]], shape[axes[1]] = heads, length
    return shape
