"""The memory layout of keys and values in a cache: blocks of 16 tokens, in the order in which the kernels read them.

A `Store` is the memory of one layer's keys or values, (…, block, bytes of a block), and *planes*: views of it with
tokens first, (…, block, token, element), through which whole tokens are copied, moved and read from files.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...arrays.dtypes import CODES, numpy_dtype
from ...arrays.memory import pages
from ...errors import ReservationError, pass_on, shown
from ...host.rounding import standard
from ...problem.tokens import Moves, TokenShape
from .records import BLOCK


class Store:
    """Keys or values in their own dtype: a block of keys is [element][16 keys], a block of values is 16 rows."""

    def __init__(self, dim: int, dtype: str, *, keys: bool) -> None:
        self.dim, self.dtype, self.is_keys = dim, dtype, keys
        self.kind = numpy_dtype(dtype)
        self.row = self.row_bytes()  # of a token: a block's bytes over 16
        self.planes: list[np.ndarray] = []

    def use(self, whole: np.ndarray, first: int = 0) -> None:
        """Its memory: of each block of `whole`, (…, block, bytes), the bytes from `first` on."""
        self.whole, self.first = whole, first
        self.memory = whole[..., first : first + BLOCK * self.row]
        self.address = whole.ctypes.data + first
        self.planes = self.views()

    def row_bytes(self) -> int:
        return self.dim * self.kind.itemsize

    def views(self) -> list[np.ndarray]:
        return [
            self.view(self.kind, (self.dim, BLOCK)).swapaxes(-1, -2)
            if self.is_keys
            else self.view(self.kind, (BLOCK, self.dim))
        ]

    def view(self, kind: np.dtype, tail: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """Part of each block as an array of this type."""
        inner = [kind.itemsize * math.prod(tail[i + 1 :]) for i in range(len(tail))]
        strides = (*self.memory.strides[:-1], *inner)
        return np.ndarray((*self.memory.shape[:-1], *tail), kind, self.whole, self.first + offset, strides)

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """Tokens (…, dim) of what the planes hold."""
        return parts[0]

    # --- tokens in and out: new ones are put by the kernel of append.py

    def move(self, moves: Moves) -> None:
        """Moves whole tokens of (page, heads, block, …), all at once."""
        ends = ((moves.from_owner, moves.from_slot), (moves.to_owner, moves.to_slot))
        (old, old_slot), (new, new_slot) = ((np.array(page, np.int64), np.array(slot, np.int64)) for page, slot in ends)
        for plane in self.planes:
            of_pairs = plane.shape[self.memory.ndim - 1] != BLOCK
            at, to = (
                (slot >> 4, (slot & 15) >> 1, slot & 1) if of_pairs else (slot >> 4, slot & 15)
                for slot in (old_slot, new_slot)
            )
            plane[(new, slice(None), *to)] = plane[(old, slice(None), *at)]  # of a copy

    def fill_scales(self, scales: list[np.ndarray], where: Any) -> None:
        """Stores the scales that parts() returned beside codes, in memory[where]; zeros to the end of a block."""
        for plane, part in zip(self.planes[1:], scales, strict=True):
            *items, n, _ = part.shape
            count = -(-n // BLOCK)
            whole = np.zeros((*items, count * BLOCK, 1), part.dtype)
            whole[:, :, :n] = part
            plane[where, :, :count] = whole.reshape(*items, count, BLOCK, 1)

    def get(self, where: Any, n: int) -> np.ndarray:
        """A copy of the first n tokens of memory[where], (items, heads, n, dim)."""
        return self.joined(self.parts(where, n))

    def parts(self, where: Any, n: int) -> list[np.ndarray]:
        """A copy of the first n tokens of memory[where], plane by plane."""
        count = -(-n // BLOCK)
        parts = []
        for plane in self.planes:
            blocks = plane[where][:, :, :count]
            tokens = blocks.reshape(*blocks.shape[:2], count * BLOCK, math.prod(blocks.shape[3:]) // BLOCK)
            parts.append(tokens[:, :, :n, : self.dim].copy())
        return parts


class Pairs(Store):
    """bfloat16, as the dot instruction takes it and others part it: a block of keys is [pair of elements][16 keys][2],
    one of values is [8 pairs of keys][element][2].

    An odd last element of a key has a zero beside it.
    """

    def row_bytes(self) -> int:
        return (self.dim + self.dim % 2 if self.is_keys else self.dim) * self.kind.itemsize

    def views(self) -> list[np.ndarray]:
        if self.is_keys:
            return [np.moveaxis(self.view(self.kind, ((self.dim + 1) // 2, BLOCK, 2)), -3, -2)]  # (…, token, pair, 2)
        return [np.moveaxis(self.view(self.kind, (BLOCK // 2, self.dim, 2)), -1, -2)]  # (…, pair of tokens, 2, element)


class Coded(Store):
    """Codes with a scale per token and head: 16 scales, then the block of codes as `Store` has it. codes · scales ≈ x,
    from each row alone: a scale is the row's largest magnitude over the largest code. A row with NaN or infinity is
    NaN.
    """

    def row_bytes(self) -> int:
        return self.dim + self.dim % 2 * self.is_keys + 4  # elements of keys are read in pairs, too

    def views(self) -> list[np.ndarray]:
        codes = self.view(self.kind, (self.dim, BLOCK) if self.is_keys else (BLOCK, self.dim), 4 * BLOCK)
        return [codes.swapaxes(-1, -2) if self.is_keys else codes, self.view(np.dtype(np.float32), (BLOCK, 1))]

    @standard
    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return parts[0].astype(np.float32) * parts[1]


LARGE_PAGE = 2 << 20  # bytes


def reserved(shape: tuple[int, ...], name: str, *, filled: bool = False) -> np.ndarray:
    """Zero bytes on pages of their own: a row of a multiple of 64 bytes starts on a cache line, and unused pages take
    no memory. Pages are large where all bytes will be `filled`, or where heads, (…, blocks, bytes), share them and are
    too much for caches of the CPU: elsewhere most of one would be zeroed for nothing where a sequence is short of the
    capacity. `name`: of the argument that asks for so many.
    """
    count, head = math.prod(shape), math.prod(shape[-2:])
    try:
        memory = pages(count, large=filled or (head < LARGE_PAGE // 2 and count > 8 * LARGE_PAGE))
    except (OSError, OverflowError, ValueError) as error:
        pass_on(error, Exception)
        raise ReservationError(
            f"{name}: {shown(count)} bytes cannot be reserved ({error}). Reduce the {name}, layers or dtype."
        ) from None
    return np.frombuffer(memory, np.uint8, count).reshape(shape)


def make_stores(shape: TokenShape, blocks: tuple[int, ...], *, together: bool) -> list[tuple[Store, ...]]:
    """Returns the stores of every layer, in an array of blocks of this shape: of keys and of values, or of latents.

    Latents are kept as values are: their rows lie side by side, and so they do in an array.

    together: a block's values follow its keys, and all blocks will be used.
    """
    kind: type[Store] = Store
    if shape.dtype in CODES:
        kind = Coded
    elif shape.dtype == "bfloat16" and not shape.latent:
        kind = Pairs
    name = "pages" if together else "window" if shape.most is None else "capacity"
    dims = [(shape.head_dim, not shape.latent)] + [(shape.value_dim, False)] * (not shape.latent)
    layers = []
    for _ in range(shape.layers):
        stores = tuple([kind(dim, shape.dtype, keys=is_keys) for dim, is_keys in dims])
        if together:
            whole = reserved((*blocks, BLOCK * sum([x.row for x in stores])), name, filled=True)
            first = 0
            for x in stores:
                x.use(whole, first)
                first += BLOCK * x.row
        else:
            for x in stores:
                x.use(reserved((*blocks, BLOCK * x.row), name))
        layers.append(stores)
    return layers
