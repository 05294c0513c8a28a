"""Storage descriptions from caches and pools for engines: a token's shape, pieces of a chunk, a packed batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..arrays.dtypes import CODES
from .build import Stored

BLOCK = 16  # tokens: the pages of a pool are multiples of it; on the CPU, keys of a block of a cache


class TokenShape(NamedTuple):
    """The storage of every token, in each of `layers` layers."""

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str  # of arrays.CODES: codes, with scales for each token and head
    most: int | None = None  # tokens that a sequence has room for; None where old ones make room
    latent: bool = False  # values are the first value_dim columns of keys, and stored as a part of them

    @property
    def rotary_dim(self) -> int:
        """Returns the columns of a latent key behind its values."""
        return self.head_dim - self.value_dim

    @property
    def has_rows(self) -> bool:
        """Returns whether tokens are rows, as in an array: latents that are no codes."""
        return self.latent and self.dtype not in CODES

    @property
    def has_codes_of_latents(self) -> bool:
        """Returns whether tokens are latents whose values are codes, in blocks of 16 tokens, row by row."""
        return self.latent and self.dtype in CODES

    def stored(self, lengths: list[int], **more: Any) -> Stored:
        """Describes stored tokens, so many of each sequence, for building a Problem; more: as Stored has it."""
        return Stored(self.dtype, self.kv_heads, self.head_dim, self.value_dim, tuple(lengths), most=self.most, **more)


class Piece(NamedTuple):
    """Rows of a chunk of queries, and of each sequence the tokens before and after those rows are stored."""

    rows: slice
    before: list[int]
    after: list[int]
    counts: list[int] | None  # of each sequence the rows that are queries, where some have fewer than the piece

    @property
    def new(self) -> list[int]:
        """Tokens that each sequence gets."""
        return [b - a for a, b in zip(self.before, self.after, strict=True)]


class Batch(NamedTuple):
    """Sequences of a pool whose queries are packed: of each its table, and tokens before and after new ones."""

    tables: list[Any]  # as the storage made them: where the tokens are
    before: list[int]
    after: list[int]
    counts: list[int]  # of each sequence its rows in the packed arrays


class Moves(NamedTuple):
    """Tokens that go to the places of others, all at once: of each the sequence, or page, and the slot in it."""

    from_owner: list[int]
    from_slot: list[int]
    to_owner: list[int]
    to_slot: list[int]


def pieces_of(n_new: int, lengths: list[int], counts: list[int], step: int) -> list[Piece]:
    """A chunk of n_new tokens in pieces of up to `step`; counts: of each sequence its tokens in the chunk."""
    pieces = []
    for start in range(0, max(n_new, 1), step):
        rows = slice(start, min(start + step, n_new))
        n = rows.stop - start
        part = [min(max(x - start, 0), n) for x in counts]
        after = [a + b for a, b in zip(lengths, part, strict=True)]
        pieces.append(Piece(rows, lengths, after, None if part.count(n) == len(part) else part))
        lengths = after
    return pieces
