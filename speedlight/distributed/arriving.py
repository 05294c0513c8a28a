"""Messages of a ring, round by round: keys that come and gradients that go home beside what is computed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch

from ..problem.shardings import Runs, places
from .groups import Message, Peers
from .rounds import Schedule, Step, Transfer, is_within
from .tensors import Memory, contiguous, mmap_empty, pieces

Tensors: TypeAlias = tuple[torch.Tensor, ...]

_BUFFERS = 3  # one that is computed with, one that is passed on, one into which the next keys come


class LocalKeys:
    """A process's own keys and values, by position."""

    def __init__(self, tensors: tuple[torch.Tensor, ...], runs: Runs, dim: int) -> None:
        self.tensors, self.runs, self.dim, self.places = tensors, runs, dim, places(runs)

    def of(self, keys: range) -> tuple[torch.Tensor, ...]:
        """Views of some of them, which lie in one run."""
        at = self.place(keys)
        return tuple([x.narrow(self.dim, at, len(keys)) for x in self.tensors])

    def place(self, keys: range) -> int:
        for run, at in zip(self.runs, self.places, strict=False):
            if keys.start in run:
                return at + (keys.start - run.start) // run.step
        raise AssertionError(keys)


class _Sent(NamedTuple):
    """Messages, and what they are sent from, if that is free once they are gone."""

    messages: list[Message]
    memory: Tensors


class Arrivals:
    """The messages that a process sends and receives in the rounds of a schedule.

    Keys are received where they are computed with and sent on from there: one buffer that is computed with, one that is
    passed on, and one into which the next ones come. The caller of keys() lets go of those of the step before.
    """

    def __init__(self, peers: Peers, own: LocalKeys, schedule: Schedule) -> None:
        self.peers, self.own = peers, own
        mine = [x for x in schedule.transfers if peers.rank in (x.source, x.to)]
        self.rounds = sorted({x.round for x in mine})
        self.by_round = {turn: [x for x in mine if x.round == turn] for turn in self.rounds}
        self.steps = {x.round: x for x in schedule.steps[peers.rank]}
        self.relays = [x for x in mine if x.relayed and x.source == peers.rank]
        self.lent: list[Message] = []  # sent from own keys
        self.sent: list[_Sent] = []
        self.coming: dict[int, tuple[list[Message], Tensors, list[tuple[torch.Tensor, torch.Tensor]]]] = {}
        self.current: Tensors = ()
        self.held: dict[tuple[int, int], tuple[range, Tensors]] = {}  # what is yet to be relayed
        self.at = 0  # rounds that were begun

    def begin(self, last: float) -> None:
        """Starts sending what others want in rounds up to this one."""
        self.current = ()
        while self.at < len(self.rounds) and self.rounds[self.at] <= last:
            self._begin(self.rounds[self.at])

    def keys(self, step: Step) -> Tensors:
        """K and V of a step, once they are here; what comes next is on its way then."""
        self.begin(step.round)
        found = self._arrived(step) if step.round in self.coming else self._own(step)
        self._look_ahead()
        return found

    def finish(self) -> None:
        """Sends what others still want."""
        self.begin(math.inf)
        for message in (*self.lent, *[x for sent in self.sent for x in sent.messages]):
            self.peers.wait(message)
        self.lent, self.sent = [], []

    def _own(self, step: Step) -> Tensors:
        parts = [self.own.of(keys) for _, keys in step.fragments]
        return parts[0] if len(parts) == 1 else tuple([torch.cat(x, self.own.dim) for x in zip(*parts, strict=True)])

    def _arrived(self, step: Step) -> Tensors:
        messages, tensors, aside = self.coming.pop(step.round)
        for owner, keys in step.fragments:
            if owner == self.peers.rank:
                for x, y in zip(self._places(step, tensors, keys), self.own.of(keys), strict=True):
                    x.copy_(y)
        for message in messages:
            self.peers.wait(message)
        for place, part in aside:
            place.copy_(part)
        self.current = tensors
        owner, keys = step.fragments[0]
        if [x for x in self.relays if x.round > step.round and x.owner == owner and is_within(x.keys, keys)]:
            self.held[owner, keys.start] = keys, tensors
        return tensors

    def _places(self, step: Step, tensors: Tensors, keys: range) -> Tensors:
        first = (keys.start - step.keys.start) // step.keys.step
        return tuple([t.narrow(self.own.dim, first, len(keys)) for t in tensors])

    def _look_ahead(self) -> None:
        """Begins rounds up to the next one in which something comes; what is relayed later comes in it, or came."""
        while self.at < len(self.rounds) and not self.coming:
            self._begin(self.rounds[self.at])

    def _begin(self, turn: int) -> None:
        transfers, receives, aside = self.by_round[turn], [], []
        comes = [x for x in transfers if x.to == self.peers.rank]
        if comes:
            self._make_room()
        gives = [self._given(x) for x in transfers if x.to != self.peers.rank]
        tensors = self._memory(len(self.steps[turn].keys)) if comes else ()
        for x in comes:
            for n, place in enumerate(self._places(self.steps[turn], tensors, x.keys)):
                for part in pieces(place, self.own.dim):
                    into = part if part.is_contiguous() else mmap_empty(part, part.shape)
                    receives.append((into, x.source, tag(turn, n), _what(x)))
                    aside += [] if into is part else [(part, into)]
        messages = self.peers.post([x for sends, _ in gives for x in sends], receives)
        self.at += 1
        if comes:
            self.coming[turn] = _of(messages, receives), tensors, aside
        for sends, memory in gives:
            if memory:
                self.sent.append(_Sent(_of(messages, sends), memory))
            else:
                self.lent += _of(messages, sends)

    def _given(self, x: Transfer) -> tuple[list[Any], Tensors]:
        """Some keys as messages, and the memory that is free once they are gone."""
        tensors, memory = self._relayed(x) if x.relayed else (self.own.of(x.keys), ())
        parts = [(n, part) for n, t in enumerate(tensors) for part in pieces(t, self.own.dim)]
        given = [(contiguous(part), x.to, tag(x.round, n), _what(x)) for n, part in parts]
        copies = tuple([y for (_, part), (y, *_) in zip(parts, given, strict=True) if y is not part])
        return given, memory if len(copies) < len(parts) and memory else copies

    def _relayed(self, x: Transfer) -> tuple[Tensors, Tensors]:
        """Views of some keys that came, and all that came with them."""
        for at, (keys, tensors) in list(self.held.items()):
            if at[0] == x.owner and is_within(x.keys, keys):
                if not [y for y in self.relays if y.round > x.round and y.owner == x.owner and is_within(y.keys, keys)]:
                    del self.held[at]
                first = (x.keys.start - keys.start) // keys.step
                return tuple([t.narrow(self.own.dim, first, len(x.keys)) for t in tensors]), tensors
        raise AssertionError(x)

    def _make_room(self) -> None:
        """Waits for the oldest of what is being sent, until there is a buffer less than there may be."""
        while self.sent and self._buffers() >= _BUFFERS:
            for message in self.sent.pop(0).messages:
                self.peers.wait(message)

    def _buffers(self) -> int:
        kept = (self.current, *[x for _, x in self.held.values()], *[x.memory for x in self.sent])
        return len({id(x) for x in kept if x})

    def _memory(self, length: int) -> Tensors:
        dim = self.own.dim
        return tuple([mmap_empty(x, (*x.shape[:dim], length, *x.shape[dim + 1 :])) for x in self.own.tensors])


def _of(messages: list[Message], given: list[Any]) -> list[Message]:
    """Those of some tensors."""
    own = {id(x[0]) for x in given}
    return [x for x in messages if id(x.tensor) in own]


def _what(x: Transfer) -> str:
    return f"with keys {x.keys.start} to {x.keys.stop - 1} in step {x.round}"


def tag(turn: int, n: int) -> int:
    return 4 * turn + n


# --- gradients


class GradientReturns:
    """Gradients that this process sends to who holds the keys, and those of its own keys that others send it.

    What comes is added in the order of rounds. Beside the gradients that are computed some may come, and some go: what
    was computed in a round travels during the next one. Nobody waits for later rounds than his own, so all end.
    """

    def __init__(self, peers: Peers, total: LocalKeys, transfers: tuple[Transfer, ...], memory: Memory) -> None:
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
        """Starts receiving what another process computed in an earlier round."""
        if not self.expected or self.expected[0].round >= before:
            return
        x = self.expected.pop(0)
        buffers = [self.memory.take(y, y.shape) for y in self.total.of(x.keys)]
        receives = [(y, x.to, tag(x.round, 2 + n), _what_returns(x.round, x.keys)) for n, y in enumerate(buffers)]
        self.coming = x, self.peers.post([], receives), buffers

    def sums(self, step: Step) -> list[torch.Tensor]:
        """Returns the tensors to which a step adds gradients of its keys: the totals of own ones, zeros of others."""
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
        sends = [(x, owner, tag(step.round, 2 + n), _what_returns(step.round, keys)) for n, x in enumerate(flows)]
        sent = self.peers.post(sends, [])
        self.wait_until_sent()
        self.sent = sent

    def wait_until_sent(self) -> None:
        """Waits until the gradients that were sent last have left, and takes their memory back."""
        for message in self.sent:
            self.peers.wait(message)
        self.memory.give([message.tensor for message in self.sent])
        self.sent = []

    def finish(self) -> None:
        self.settle(math.inf)
        self.wait_until_sent()

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


def _what_returns(turn: int, keys: range) -> str:
    return f"with gradients of keys {keys.start} to {keys.stop - 1} in step {turn}"
