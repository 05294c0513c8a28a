# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportCallIssue=false, reportArgumentType=false
"""Which weights dropout drops, in Triton: the words of problem/philox.py. What no dropout has is None."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..problem.philox import drop_below, key_of
from ..problem.problem import Problem


class Dropout(NamedTuple):
    """Words of 32 bits as int32: of the seed, and below which one a weight is dropped; `drop_all`: 1 where all are."""

    seed_low: Any
    seed_high: Any
    drop_below: Any
    drop_all: Any


def words_of(problem: Problem) -> dict[str, int | None]:
    """The kernel's arguments; of a fixed type, whatever they are, so that nothing is compiled anew."""
    if not problem.dropout:
        return dict.fromkeys(Dropout._fields)
    below = drop_below(problem.dropout)
    low, high, limit = (x - ((x >> 31) << 32) for x in (*key_of(problem.seed), below & 0xFFFFFFFF))
    return {"seed_low": low, "seed_high": high, "drop_below": limit, "drop_all": below >> 32}


@triton.jit
def keeps(item, heads, queries, first_key, words: Dropout, KEYS: tl.constexpr):
    """[rows, KEYS]: which weights stay, of keys from first_key on, which is whole quads. heads, queries: [rows]."""
    o_quad = tl.arange(0, KEYS // 4)
    quads = (first_key // 4 + o_quad)[None, :]
    w0, w1, w2, w3 = tl.philox_impl(
        as_word(item), as_word(heads)[:, None], as_word(queries)[:, None], as_word(quads),
        as_word(words.seed_low), as_word(words.seed_high),
    )  # fmt: skip
    word = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [rows, quads, 2, 2]: in the order of the keys
    word = tl.reshape(word, [heads.shape[0], KEYS])
    return (word >= as_word(words.drop_below)) & (words.drop_all == 0)


@triton.jit
def as_word(x):
    """Modulo 2^32."""
    return tl.cast(x, tl.int64).to(tl.uint32)
