"""Storage of a cache's or a pool's tokens, as kv/ asks for it: the base classes of every engine's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ..arrays.memory import Array
from ..errors import UnsupportedError
from .tokens import Moves, TokenShape

# Memory, an index into it, and what is there: memory[index] = what was there. An index has no list in it, since NumPy
# looks for signals while it reads one.
Overwritten = list[tuple[Any, Any, Any]]


class Storage(ABC):
    """Base of the storages, which keep the tokens of every layer in memory of one device.

    Lengths, pages and claims are the business of kv/. An engine has one storage for caches and one for pools. What only
    some can do, the flags below say.
    """

    prepares_steps: bool = False  # keeps prepared calls, which run again
    survives_fork: ClassVar[bool] = False  # a forked child has a copy of the memory
    attends_new: bool = False  # of a cache: attend_new() takes a first chunk where it lies
    shape: TokenShape
    device: Any  # "cpu", or a torch.device
    shared: int = 0  # of a cache: the first tokens of all its sequences, which lie in another one
    token_bytes: int  # of one token of one layer

    # --- arguments

    @abstractmethod
    def received(self, x: Any, name: str) -> tuple[Any, str]:
        """Returns new tokens, and the name of their dtype."""

    @abstractmethod
    def query(self, q: Any) -> Array:
        """Describes queries, which must lie on the device."""

    # --- a prefix

    def begin_with(self, prefix: Storage, tokens: int) -> None:
        """Makes so many tokens of another cache's only sequence the first ones of all; by default that is refused."""
        raise UnsupportedError(
            f"prefix: expected a cache on the CPU; got one on {self.device}. prefix.select([0] * batch) copies it."
        )

    def before_change(self, least: int, name: str) -> None:
        """Prepares for a change of tokens from `least` on; raises where other caches begin with them."""
        return

    # --- moves, and rollback

    @abstractmethod
    def move(self, layer: int, moves: Moves) -> None:
        """Moves tokens of a layer."""

    @abstractmethod
    def before_moves(self, layer: int, lengths: list[int], moves: Moves) -> Overwritten:
        """Copies what moves overwrite."""


class Lengths:
    """Base of the lengths of a cache's sequences on its device. By default the host alone has them."""

    may_wait = False  # read() waits for a device

    def check_capture(self, lengths: Mapping[str, Any]) -> None:
        """Raises for arguments that a CUDA graph cannot replay, while one is captured."""

    def is_ahead(self) -> bool:
        """Returns whether they may be ahead of the host's, and may be read."""
        return False

    def read(self) -> list[list[int]] | None:
        """Returns those of each layer; None where the host alone has them."""
        return None

    def has_overflowed(self) -> bool:
        """Returns whether a replayed step exceeded the capacity since the last call."""
        return False

    def set(self, lengths: list[list[int]]) -> None:
        """Stores the host's."""
