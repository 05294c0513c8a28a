"""How a cache keeps keys and values: blocks of 16 tokens, in the order in which the kernels read them."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np

from . import arrays
from .planning import BLOCK


class Plain:
    """A block of keys is [element][16 keys], a block of values is 16 rows. Views have tokens first: (…, block, token, element)."""

    @staticmethod
    def key_block(dim: int) -> tuple[int, ...]:
        return dim, BLOCK

    @staticmethod
    def value_block(dim: int) -> tuple[int, ...]:
        return BLOCK, dim

    @staticmethod
    def keys(x: np.ndarray) -> np.ndarray:
        return x.swapaxes(-1, -2)

    @staticmethod
    def values(x: np.ndarray) -> np.ndarray:
        return x


class Pairs:
    """For the dot instruction: a block of keys is [pair of elements][16 keys][2], one of values is [8 pairs of keys][element][2]."""

    @staticmethod
    def key_block(dim: int) -> tuple[int, ...]:
        return (dim + 1) // 2, BLOCK, 2

    @staticmethod
    def value_block(dim: int) -> tuple[int, ...]:
        return BLOCK // 2, dim, 2

    @staticmethod
    def keys(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x, -3, -2)  # (…, token, pair, 2); an odd last element has a zero beside it

    @staticmethod
    def values(x: np.ndarray) -> np.ndarray:
        return np.moveaxis(x, -1, -2)  # (…, pair, 2, element)


def scatter(blocks: np.ndarray, at: int, x: np.ndarray) -> None:
    """Tokens x (items, heads, n, dim) from token `at` on, into blocks (items, heads, block, …)."""
    n = x.shape[2]
    if blocks.ndim == 6 and blocks.shape[3] == BLOCK and x.shape[3] % 2:  # pairs of elements
        x = np.concatenate([x, np.zeros((*x.shape[:3], 1), x.dtype)], axis=3)
    tail = blocks.shape[3:]
    done = 0
    while done < n:
        block, lane = divmod(at + done, BLOCK)
        if lane or n - done < BLOCK:
            count = min(BLOCK - lane, n - done)
            for token in range(count):
                one = x[:, :, done + token]
                where = blocks[:, :, block]
                if len(tail) == 2:
                    where[:, :, lane + token] = one
                elif tail[0] == BLOCK:
                    where[:, :, lane + token] = one.reshape(*one.shape[:2], *tail[1:])
                else:
                    where[:, :, (lane + token) // 2, (lane + token) % 2] = one
        else:
            count = (n - done) // BLOCK * BLOCK
            whole = x[:, :, done : done + count]
            blocks[:, :, block : block + count // BLOCK] = whole.reshape(*x.shape[:2], count // BLOCK, *tail)
        done += count


def room(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros on pages of their own: a row of a multiple of 64 bytes starts on a cache line, and unused pages take no memory."""
    kind = arrays.numpy_dtype(dtype)
    count = math.prod(shape)
    try:
        memory = arrays.pages(count * kind.itemsize)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{count * kind.itemsize:,} bytes of cache cannot be reserved: {error}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them: small pages do
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, kind, count).reshape(shape)
