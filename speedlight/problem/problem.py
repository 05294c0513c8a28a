"""Problem: a call as data, with the sizes that fix bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..arrays.dtypes import DTYPES
from ..expressions.program import Program, hiding_condition
from ..expressions.tracing import Expression
from ..expressions.tree import Node, lazily

TILE, SPAN = 128, 1024  # keys per tile and per span of the canonical arithmetic
QUERY_BLOCK = 192  # positions whose share of dK and dV is summed before it is added
# from such |lse| on, which holds no fractions any more, the weights of gradients are at most 1
FAR_LSE = {"float32": 2.0**22, "float64": 2.0**51}
PART = 16  # keys: the smallest part of a tile that is skipped; a cache's blocks stay whole, and pairs
# where batch, head, length, dim lie
LAYOUTS = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "hld": (0, 1, 2), "lhd": (1, 0, 2)}


class Sizes(NamedTuple):
    """Sizes of q, k and v, whether there are such arrays or not; of a plan at first as they were given, None if left
    out.

    Of layouts without a batch, that is 1.
    """

    dtype: Any
    batch: Any
    q_heads: Any
    kv_heads: Any
    q_len: Any
    k_len: Any
    head_dim: Any
    value_dim: Any


def spans_of(tokens: int) -> int:
    """Spans that a step over so many keys is prepared for: doubled until they suffice."""
    return 1 << (tokens - 1 >> 10).bit_length()


@dataclass(frozen=True)
class Problem:
    """softmax(scale · QKᵀ)V for a batch of items, each with lengths and a first position of its own."""

    dtype: str  # float32, float64, float16, bfloat16
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_starts: tuple[int, ...]  # absolute position of the first query of each item
    k_start: int
    causal: bool
    scale: float
    mask: Expression | None = None
    score: Expression | None = None
    sinks: tuple[float, ...] | None = None  # one logit per query head
    rows: int | None = None  # of out per item, where q_lengths leave some of them without a query
    quantised: str | None = None  # dtype of codes, where keys and values are such with scales per token and head
    latent_codes: bool = False  # … and values are the first columns of keys, whose rest has no codes
    items: tuple[int, ...] | None = None  # what a mask calls the items, where not 0, 1, …
    dropout: float = 0.0  # how likely a weight is dropped, after the softmax
    seed: int = 0  # of what says which
    widened: str | None = None  # dtype of keys and values where it is not q's: all is computed in float32
    shared: bool = False  # the keys and values of one item are those of all
    # of some of the keys: rows go on from a state, and may leave one (`rows`: of the state); gradients add to sums
    partial: bool = False
    first_row: int | None = None  # run for other lengths of keys, too: for rows from this position to the last key
    chosen: Any = None  # keys that queries see at most (chosen.py), where `mask` does not say so

    @property
    def batch(self) -> int:
        return len(self.q_lengths)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def storage(self) -> str:
        return DTYPES[self.dtype][0]

    @property
    def key_dtype(self) -> str:
        """The dtype of keys and values in memory, where they are not a cache's codes."""
        return self.widened or self.dtype

    @property
    def key_storage(self) -> str:
        return DTYPES[self.key_dtype][0] if self.key_dtype in DTYPES else self.key_dtype

    @property
    def dropout_divisor(self) -> float:
        """The divisor of the weights that dropout keeps; 1 where it keeps none."""
        return 1.0 - self.dropout if self.dropout < 1 else 1.0

    @property
    def roots(self) -> tuple[Node | None, Node | None]:
        """The roots of the mask's tree and of the score's."""
        return None if self.mask is None else self.mask.root, None if self.score is None else self.score.root

    @property
    def uses(self) -> frozenset[str]:
        """The symbols that decide what is hidden: of the mask, and of a score's condition for a number."""
        mask, score = self.roots
        return frozenset[str]().union(*[x.uses for x in (mask, hiding_condition(score)) if x is not None])

    @property
    def is_by_item(self) -> bool:
        """True if a result depends on which item it is of: with dropout, and where an expression reads b."""
        return bool(self.dropout) or any([x is not None and "b" in x.uses for x in self.roots])

    def kinds(self, heads: int, *, apart: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yields item, head (of so many) and how many are like it, once for all that lengths, positions and what is
        hidden cannot tell apart; `apart`: every item.
        """
        items: dict[Any, list[int]] = {}
        by_item, by_head = apart or "b" in self.uses, "h" in self.uses
        for item, key in enumerate(zip(self.q_lengths, self.k_lengths, self.q_starts, strict=True)):
            items.setdefault((key, item if by_item else 0), []).append(item)
        for alike in items.values():
            for head in range(heads if by_head else min(1, heads)):
                yield alike[0], head, len(alike) * (1 if by_head else heads)

    @lazily
    def program(self) -> Program | None:
        """The program that engines lower; None without mask and score. Raises ExpressionError where an integer may
        leave int64.
        """
        return Program.of(self.mask, self.score, self.box())

    def box(self) -> dict[str, tuple[int, int]]:
        """Every position, head and item: first and last."""
        ends = [(start, start + n - 1) for start, n in zip(self.q_starts, self.q_lengths, strict=True) if n]
        rows = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (0, 0)
        last = self.k_start + max(max(self.k_lengths, default=0), 1) - 1
        if self.first_row is not None:
            rows = self.first_row, last
        items = max(self.items) if self.items else max(self.batch, 1) - 1
        return {"b": (0, items), "h": (0, max(self.q_heads, 1) - 1), "i": rows, "j": (self.k_start, last)}
