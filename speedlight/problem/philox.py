"""Random numbers of dropout: Philox 4x32-10 in NumPy. A weight's position determines its number.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011). Engines emit the same:
cpu/language/philox.py, gpu/dropping.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # of the first and the third word
STEPS = 0x9E3779B9, 0xBB67AE85  # from a round's key to the next one's
MOST_POSITIONS = 1 << 32  # a position is one word of a counter

_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Any], key: tuple[int, int]) -> list[np.ndarray]:
    """Four random words of every counter: four arrays that broadcast, of which the low 32 bits count, as uint64."""
    a, b, c, d = (np.asarray(x).astype(np.uint64) & _WORD for x in counter)
    for n in range(ROUNDS):
        first, second = (np.uint64((x + n * step) & 0xFFFFFFFF) for x, step in zip(key, STEPS, strict=True))
        x, y = (np.uint64(m) * word for m, word in zip(MULTIPLIERS, (a, c), strict=True))
        a, b, c, d = (y >> _HALF) ^ b ^ first, y & _WORD, (x >> _HALF) ^ d ^ second, x & _WORD
    return [a, b, c, d]


def key_of(seed: int) -> tuple[int, int]:
    """Returns the two words of a seed of 64 bits."""
    return seed & 0xFFFFFFFF, seed >> 32


def drop_below(dropout: float) -> int:
    """Words below are dropped: none where it is 0, all where it is 2^32."""
    return math.floor(dropout * 2.0**32)


def kept(dropout: float, seed: int, b: int, h: int, i: Any, j: Any) -> np.ndarray:
    """[rows, keys] of positions i and j: True where the weight stays. Four keys share a counter."""
    rows, keys = np.asarray(i, np.int64).reshape(-1), np.asarray(j, np.int64).reshape(-1)
    quads, which = np.unique(keys >> 2, return_inverse=True)
    words = philox((np.uint64(b), np.uint64(h), rows[:, None], quads[None, :]), key_of(seed))
    drawn = np.stack(np.broadcast_arrays(*words))
    word = drawn[keys & 3, :, which.reshape(-1)].T
    return word >= np.uint64(drop_below(dropout))
