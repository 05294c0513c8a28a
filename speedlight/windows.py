"""A cache with a window: which tokens it still has, where they lie, and the mask that hides the others."""

from __future__ import annotations

from dataclasses import dataclass

from .expressions.patterns import prefix, window
from .expressions.tracing import Expression

PIECE = 256  # tokens that a windowed cache takes at a time
SPARE = 16  # oldest tokens of a ring that nobody counts on: a call that fails may have written over so many


@dataclass(frozen=True, slots=True)
class Ring:
    """The first `fixed` tokens stay where they are; the others go round in `size`.

    Without a window nothing moves: size 0.
    """

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

    def held(self, length: int, written: int) -> int:
        """Tokens in memory, from its start, whether or not they are still seen."""
        return min(max(length, written), self.tokens) if self.size else length

    def shown(self, length: int) -> list[int]:
        """Positions that a next token would see, besides itself."""
        first = max(self.keep_first, length - (self.window or 1) + 1)
        return [*range(min(self.keep_first, length)), *range(first, length)]

    def lost(self, position: int, length: int, written: int) -> bool:
        """Whether of what a query at `position` sees, of a sequence of this length, anything may have been written
        over.

        written: past the last token that was ever there.
        """
        if not self.size:
            return False
        return max(position - (self.window or 1) + 1, self.fixed) < min(length, written + SPARE - self.size)

    def overwritten(self, total: int, written: int) -> list[int]:
        """Places of tokens that are counted on, and that those up to `total` are written over."""
        first = max(written + SPARE, self.fixed + self.size, total - self.size)
        return [self.place(n) for n in range(first, total)] if self.size else []

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
