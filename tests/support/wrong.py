"""Things that are no array, no list and no number, or that almost are: for arguments that are given anything."""

from __future__ import annotations

import numpy as np


class Odd:
    """Says that it has a shape and a dtype, and has not."""

    shape = dtype = name = ndim = 5


NUMBERS = [None, True, -1, 3, 2**70, 1.5, float("nan"), np.float32(1), np.int64(0), np.bool_(True)]
LISTS = [[], {}, (), [None], ["a"], [[0]], [0, 2**70], {1: 2}, "x", "\0.safetensors", b"x"]
ARRAYS = [
    np.array(1),
    np.zeros(3),
    np.zeros((2, 4, 1, 16), "S1"),
    np.zeros((2, 2, 1, 16), object),
    np.zeros((2, 0, 0, 0), np.float32),
]
WRONG = [*NUMBERS, *LISTS, *ARRAYS, object(), Odd(), Odd, iter([]), lambda *_: None]
