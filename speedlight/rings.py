"""A cache with a window: which tokens it still has, where they lie, and the mask that hides the others."""

from __future__ import annotations

from dataclasses import dataclass

from .patterns import prefix, window
from .tracing import Expression

PIECE = 256  # tokens that a windowed cache takes at a time


@dataclass(frozen=True, slots=True)
class Ring:
    """The first `fixed` tokens stay where they are; the others go round in `size`. Without a window nothing moves: size 0."""

    window: int | None = None
    keep_first: int = 0
    fixed: int = 0
    size: int = 0

    @property
    def tokens(self) -> int:
        """That there is room for."""
        return self.fixed + self.size

    def place(self, position: int) -> int:
        """Where a token lies."""
        return position if position < self.fixed or not self.size else self.fixed + (position - self.fixed) % self.size

    def shown(self, length: int) -> list[int]:
        """Positions that a next token would see, besides itself."""
        first = max(self.keep_first, length - (self.window or 1) + 1)
        return [*range(min(self.keep_first, length)), *range(first, length)]

    def lost(self, position: int, written: int) -> bool:
        """Whether what a token at `position` sees has been written over; `written`: past the last token that was ever there."""
        if not self.size or position <= self.fixed:
            return False
        return max(position - (self.window or 1) + 1, self.fixed) < written - self.size

    def mask(self, causal: bool) -> Expression | None:
        """What the window hides from queries that are, or are not, hidden from later keys anyway."""
        if self.window is None:
            return None
        limits = window(self.window - 1, 0 if causal else None)
        return limits | prefix(self.keep_first) if self.keep_first else limits


def ring_of(window: int | None, keep_first: int, step: int) -> Ring:
    """Room for a window and a piece of new tokens, in multiples of `step`."""
    if window is None:
        return Ring()
    return Ring(window, keep_first, -(-keep_first // step) * step, -(-(window + PIECE) // step) * step)
