"""Windows of caches: which tokens a cache still has, where they lie, and the mask that hides the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..expressions.patterns import prefix, window
from ..expressions.tracing import Expression
from .options import Causal
from .problem import TILE

PIECE = 256  # tokens that a windowed cache takes at a time
SPARE = 16  # the oldest tokens of a ring are not promised: a call that fails may have written over so many


@dataclass(frozen=True, slots=True)
class Ring:
    """The slots of a sequence: the first `fixed` tokens keep theirs, the others go round in the next `size`.

    The same on every device, and in files. Without a window every token keeps its slot: size 0.
    """

    window: int | None = None
    keep_first: int = 0
    fixed: int = 0
    size: int = 0

    @property
    def tokens(self) -> int:
        """Capacity in tokens."""
        return self.fixed + self.size

    def slot(self, position: int) -> int:
        """Returns the slot of a token, from the start of its sequence's memory."""
        return position if position < self.fixed or not self.size else self.fixed + (position - self.fixed) % self.size

    def held(self, length: int, written: int) -> int:
        """Counts the slots in use, from the first one, whether or not their tokens are still seen."""
        return min(max(length, written), self.tokens) if self.size else length

    def shown(self, length: int) -> list[int]:
        """Returns the positions that a next token would see, besides itself."""
        first = max(self.keep_first, length - (self.window or 1) + 1)
        return [*range(min(self.keep_first, length)), *range(first, length)]

    def in_order(self, stored: Any, lengths: list[int]) -> Any:
        """Returns from slots (batch, heads, slot, dim) the tokens that a next one would see, in order; then zeros."""
        if not self.size:
            for item, n in enumerate(lengths):
                stored[item, :, n:] = 0
            return stored
        shown = [self.shown(n) for n in lengths]
        out = stored[:, :, list(range(max(map(len, shown))))]  # a copy
        for item, positions in enumerate(shown):
            out[item, :, : len(positions)] = stored[item][:, [self.slot(n) for n in positions]]
            out[item, :, len(positions) :] = 0
        return out

    def lost(self, position: int, length: int, written: int) -> bool:
        """Returns whether anything that a query at `position` sees may have been overwritten, in a sequence of this
        length.

        written: past the last token that was ever there.
        """
        if not self.size:
            return False
        return max(position - (self.window or 1) + 1, self.fixed) < min(length, written + SPARE - self.size)

    def forgotten(self, position: int, written: int) -> bool:
        """Returns whether a token may have been overwritten."""
        return self.fixed <= position < written + SPARE - self.size if self.size else False

    def reached(self, written: list[int], totals: list[int]) -> list[int]:
        """High-water marks after growing to `totals`."""
        return [max(a, b) for a, b in zip(written, totals, strict=True)] if self.size else totals

    def shortened(self, written: list[int], lengths: list[int]) -> list[int]:
        """High-water marks after cutting sequences to `lengths`: a ring keeps its mark, unless it is empty then."""
        return [n and w for n, w in zip(lengths, written, strict=True)] if self.size else lengths

    def overwritten(self, written: list[int], totals: list[int]) -> list[int]:
        """Returns the slots of promised tokens that new ones are written over, where sequences grow to these totals."""
        slots: set[int] = set()
        for old, total in zip(written, totals, strict=True) if self.size else ():
            first = max(old + SPARE, self.tokens)
            slots.update(self.slot(n) for n in range(first, min(total, old + self.size)))  # then its own come round
        return sorted(slots)

    def mask(self, causal: Causal) -> Expression | None:
        """Returns the mask of the window; with `causal` it hides keys after the query, too."""
        if self.window is None:
            return None
        limits = window(self.window - 1, 0 if causal else None)
        return limits | prefix(self.keep_first) if self.keep_first else limits


def ring_of(window: int | None, keep_first: int) -> Ring:
    """Returns the ring of a window: room for it, and for a piece of new tokens, in whole tiles."""
    if window is None:
        return Ring()
    return Ring(window, keep_first, -(-keep_first // TILE) * TILE, -(-(window + PIECE) // TILE) * TILE)
