"""A call that all ranks make: that they mean the same by it is known before anything that depends on it is sent."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, Error, shown

_WAYS = {"stored tokens": " truncate() to a length that all ranks have."}
_FAILED = -1  # in the place of a digest, which is not negative


class Exchange:
    """One call's: started when a rank knows what it was asked for, settled when all do.

    `said`: the arguments in words, each by its name; or the exception that this rank will raise.
    """

    def __init__(self, group: Any, call: str, device: Any, said: dict[str, str] | Exception) -> None:
        self.group, self.call, self.said = group, call, said
        mine = torch.tensor([_FAILED if isinstance(said, Exception) else _digest(call, said)], device=device)
        self.words = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        self.work = dist.all_gather(self.words, mine, group, async_op=True)

    def settle(self) -> None:
        """Raises what this rank had to raise, or an error that names who means something else, on every rank."""
        finished(self.work, self.group, self.call)
        words = [x.item() for x in self.words]
        if words.count(words[0]) == len(words) and words[0] != _FAILED:
            return
        each: list[Any] = [None] * len(words)
        failed = isinstance(self.said, Exception)
        dist.all_gather_object(each, (self.call, str(self.said) if failed else self.said), self.group)
        if isinstance(self.said, Exception):
            raise self.said
        raise ArgumentError(_difference(dist.get_rank(self.group), self.call, self.said, each))


def finished(work: Any, group: Any, call: str) -> None:
    """Waits for a transfer."""
    try:
        work.wait()
    except RuntimeError as error:  # of the transport: who is gone, or too late
        raise Error(f"{call}: rank {dist.get_rank(group)} waits for others in vain ({error}).") from error


def _digest(call: str, said: dict[str, str]) -> int:
    found = hashlib.blake2b(repr((call, said)).encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") >> 1


def _difference(rank: int, call: str, said: dict[str, str], each: list[Any]) -> str:
    """The first rank that means something else, and what it is."""
    for other, (theirs, what) in enumerate(each):
        if isinstance(what, str):
            return f"{call}: rank {other} refused its arguments ({what}). Nothing was done on any rank."
        if theirs != call:
            return f"{call}: expected the same call on every rank; got {theirs} on rank {other}."
        for name in said if what != said else ():
            if what.get(name) != said[name]:
                way = _WAYS.get(name, "")
                return (
                    f"{name}: expected the same on every rank; got {shown(said[name])} on rank {rank} and "
                    f"{shown(what.get(name))} on rank {other}. Nothing was done on any rank.{way}"
                )
    raise AssertionError(each)
