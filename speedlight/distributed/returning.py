"""What flows to keys, on its way to who holds them."""

from __future__ import annotations

import math

import torch

from .arriving import Shard, tag
from .groups import Message, Peers
from .rounds import Step, Transfer
from .tensors import Memory


class Returns:
    """Gradients that this process sends to who holds the keys, and those of its own keys that others send it.

    What comes is added in the order of rounds. Beside the gradients that are computed some may come, and some go: what
    was computed in a round travels during the next one. Nobody waits for later rounds than his own, so all end.
    """

    def __init__(self, peers: Peers, total: Shard, transfers: tuple[Transfer, ...], memory: Memory) -> None:
        self.peers, self.total, self.memory = peers, total, memory
        self.expected = [x for x in transfers if x.owner == peers.rank]
        self.coming: tuple[Transfer, list[Message], list[torch.Tensor]] | None = None
        self.sent: list[Message] = []

    def settle(self, before: float) -> None:
        """Adds all that others have computed in earlier rounds than this one."""
        self._add()
        while self.expected and self.expected[0].round < before:
            self.receive(before)
            self._add()

    def receive(self, before: float) -> None:
        """What another one has computed in an earlier round may come."""
        if not self.expected or self.expected[0].round >= before:
            return
        x = self.expected.pop(0)
        buffers = [self.memory.take(y, y.shape) for y in self.total.of(x.keys)]
        receives = [(y, x.to, tag(x.round, 2 + n), _what(x.round, x.keys)) for n, y in enumerate(buffers)]
        self.coming = x, self.peers.post([], receives), buffers

    def sums(self, step: Step) -> list[torch.Tensor]:
        """Where a step adds what flows to its keys: the totals of own ones, zeros of others."""
        ((owner, keys),) = step.fragments
        if owner == self.peers.rank:
            return list(self.total.of(keys))
        dim, tensors = self.total.dim, self.total.tensors
        shapes = [(*x.shape[:dim], len(keys), *x.shape[dim + 1 :]) for x in tensors]
        return [self.memory.take(x, shape).zero_() for x, shape in zip(tensors, shapes, strict=True)]

    def give(self, step: Step, flows: list[torch.Tensor]) -> None:
        """Sends what sums() gave to who holds the keys."""
        ((owner, keys),) = step.fragments
        if owner == self.peers.rank:
            return
        sends = [(x, owner, tag(step.round, 2 + n), _what(step.round, keys)) for n, x in enumerate(flows)]
        sent = self.peers.post(sends, [])
        self.gone()
        self.sent = sent

    def gone(self) -> None:
        """Until the last one that was sent has left."""
        for message in self.sent:
            self.peers.wait(message)
        self.memory.give([message.tensor for message in self.sent])
        self.sent = []

    def finish(self) -> None:
        self.settle(math.inf)
        self.gone()

    def _add(self) -> None:
        if self.coming is None:
            return
        x, messages, buffers = self.coming
        for message in messages:
            self.peers.wait(message)
        for y, z in zip(self.total.of(x.keys), buffers, strict=True):
            y += z
        self.memory.give(buffers)
        self.coming = None


def _what(turn: int, keys: range) -> str:
    return f"with gradients of keys {keys.start} to {keys.stop - 1} in step {turn}"
