"""Keys and values on their way, round by round: sent and received while the round before is computed."""

from __future__ import annotations

import torch

from .groups import Message, Peers
from .rounds import Step, Transfer
from .shardings import Runs, places

_MOST_SENDS = 2  # rounds whose messages may be on their way before the oldest is waited for


class Shard:
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


class Arrivals:
    """What a process sends and receives in the rounds of a schedule."""

    def __init__(self, peers: Peers, own: Shard, transfers: tuple[Transfer, ...]) -> None:
        self.peers, self.own = peers, own
        mine = [x for x in transfers if peers.rank in (x.source, x.to)]
        self.rounds = sorted({x.round for x in mine})
        self.by_round = {turn: [x for x in mine if x.round == turn] for turn in self.rounds}
        self.relays = [x for x in mine if x.relayed and x.source == peers.rank]
        self.sent: list[tuple[int, list[Message]]] = []
        self.coming: dict[tuple[int, int, int], tuple[list[Message], tuple[torch.Tensor, ...]]] = {}
        self.held: dict[tuple[int, int], tuple[range, tuple[torch.Tensor, ...]]] = {}  # what is yet to be relayed
        self.at = 0  # rounds that were begun

    def keys(self, step: Step) -> tuple[torch.Tensor, ...]:
        """K and V of a step, once they are here; what comes next is on its way then."""
        while self.at < len(self.rounds) and self.rounds[self.at] <= step.round:
            self._begin(self.rounds[self.at])
        parts = [self._fragment(step.round, owner, keys) for owner, keys in step.fragments]
        self._look_ahead()
        if len(parts) == 1:
            return parts[0]
        return tuple([torch.cat(x, dim=self.own.dim) for x in zip(*parts, strict=True)])

    def finish(self) -> None:
        """What others still want is sent."""
        while self.at < len(self.rounds):
            self._begin(self.rounds[self.at])
        self._settle(0)

    def _fragment(self, turn: int, owner: int, keys: range) -> tuple[torch.Tensor, ...]:
        if owner == self.peers.rank:
            return self.own.of(keys)
        messages, tensors = self.coming.pop((turn, owner, keys.start))
        for message in messages:
            self.peers.wait(message)
        if [x for x in self.relays if x.round > turn and x.owner == owner and _within(x.keys, keys)]:
            self.held[owner, keys.start] = keys, tensors
        return tensors

    def _look_ahead(self) -> None:
        """Begins rounds up to the next one in which something comes; what is relayed later comes in it, or came."""
        while self.at < len(self.rounds) and not self.coming:
            self._begin(self.rounds[self.at])

    def _begin(self, turn: int) -> None:
        sends, receives, kept = [], [], []
        for x in self.by_round[turn]:
            what = f"with keys {x.keys.start} to {x.keys.stop - 1} in step {turn}"
            if x.source == self.peers.rank:
                tensors = [t.contiguous() for t in (self._relayed(x) if x.relayed else self.own.of(x.keys))]
                sends += [(t, x.to, tag(turn, n), what) for n, t in enumerate(tensors)]
            else:
                shapes = [self._shape(t, len(x.keys)) for t in self.own.tensors]
                tensors = tuple([t.new_empty(shape) for t, shape in zip(self.own.tensors, shapes, strict=True)])
                receives += [(t, x.source, tag(turn, n), what) for n, t in enumerate(tensors)]
                kept.append((x, tensors))
        messages = self.peers.post(sends, receives)
        self.at += 1
        out = {id(x[0]) for x in sends}
        self.sent.append((turn, [x for x in messages if id(x.tensor) in out]))
        for x, tensors in kept:
            own = {id(t) for t in tensors}
            self.coming[turn, x.owner, x.keys.start] = [m for m in messages if id(m.tensor) in own], tensors
        self._settle(_MOST_SENDS)

    def _relayed(self, x: Transfer) -> tuple[torch.Tensor, ...]:
        for at, (keys, tensors) in list(self.held.items()):
            if at[0] == x.owner and _within(x.keys, keys):
                if not [y for y in self.relays if y.round > x.round and y.owner == x.owner and _within(y.keys, keys)]:
                    del self.held[at]
                first = (x.keys.start - keys.start) // keys.step
                return tuple([t.narrow(self.own.dim, first, len(x.keys)) for t in tensors])
        raise AssertionError(x)

    def _settle(self, most: int) -> None:
        """Waits for the oldest of what is being sent, until at most so many rounds' are."""
        while len(self.sent) > most:
            for message in self.sent[0][1]:
                self.peers.wait(message)
            self.sent.pop(0)

    def _shape(self, x: torch.Tensor, length: int) -> tuple[int, ...]:
        return tuple(length if d == self.own.dim % x.ndim else n for d, n in enumerate(x.shape))


def _within(part: range, keys: range) -> bool:
    return keys.start <= part.start and part.stop <= keys.stop


def tag(turn: int, n: int) -> int:
    return 4 * turn + n
