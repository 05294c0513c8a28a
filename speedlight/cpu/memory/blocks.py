"""The memory layout of keys and values in a cache: blocks of 16 tokens, in the order in which the kernels read them.

A `Store` is the memory of one layer's keys or values, (…, block, bytes of a block), and *planes*: views of it with
tokens first, (…, block, token, element), through which whole tokens are copied, moved and read from files.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ...arrays.dtypes import CODES, numpy_dtype, scale_columns, signed_nibbles
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
        old, new = _Places.of(moves.from_owner, moves.from_slot), _Places.of(moves.to_owner, moves.to_slot)
        for plane in self.planes:
            self.move_in(plane, old, new)

    def move_in(self, plane: np.ndarray, old: _Places, new: _Places) -> None:
        """Moves whole tokens of a plane."""
        of_pairs = plane.shape[self.memory.ndim - 1] != BLOCK
        at, to = (
            (x.owner, slice(None), x.slot >> 4, *((x.pair, x.slot & 1) if of_pairs else (x.slot & 15,)))
            for x in (old, new)
        )
        plane[to] = plane[at]  # of a copy

    def get(self, where: Any, n: int) -> np.ndarray:
        """A copy of the first n tokens of memory[where], (items, heads, n, dim)."""
        return self.joined(self.parts(where, n))

    def parts(self, where: Any, n: int) -> list[np.ndarray]:
        """A copy of the first n tokens of memory[where], plane by plane."""
        count = -(-n // BLOCK)
        parts = []
        for plane in self.planes:
            blocks = self.tokens_of(plane, plane[where][:, :, :count])
            tokens = blocks.reshape(*blocks.shape[:2], count * BLOCK, math.prod(blocks.shape[3:]) // BLOCK)
            parts.append(tokens[:, :, :n, : self.dim].copy())
        return parts

    def tokens_of(self, plane: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Returns blocks of a plane as tokens, one after another."""
        return blocks


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
    """Codes with scales: of each block of columns 16 scales, then the block of codes as `Store` has it.

    codes · scales ≈ x, from the columns of a token that share a scale. Those with NaN or infinity are NaN.
    """

    def __init__(self, dim: int, dtype: str, *, keys: bool) -> None:
        self.scales = ScaleBlocks.of(dim, dtype, latent=False)
        super().__init__(dim, dtype, keys=keys)

    def row_bytes(self) -> int:
        return self.scales.row + self.dim + self.dim % 2 * self.is_keys  # elements of keys are read in pairs

    def views(self) -> list[np.ndarray]:
        return [self.view_codes(), self.view_scales()]

    def view_codes(self) -> np.ndarray:
        columns = self.scales.columns
        codes = self.view(self.kind, (columns, BLOCK) if self.is_keys else (BLOCK, columns), BLOCK * self.scales.row)
        return codes.swapaxes(-1, -2) if self.is_keys else codes

    def view_scales(self) -> np.ndarray:
        return self.view(self.scales.kind, (self.scales.number, BLOCK)).swapaxes(-1, -2)

    @standard
    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        scales = parts[1].astype(np.float32)
        if self.scales.number > 1:
            scales = scales.repeat(self.scales.size, -1)[..., : self.scales.columns]
        with np.errstate(all="ignore"):  # a number next to the largest may be rounded past it
            return parts[0].astype(np.float32) * scales

    def fill_scales(self, scales: np.ndarray, where: Any) -> None:
        """Stores the scales that parts() returned, in memory[where]; zeros to the end of a block."""
        *items, n, columns = scales.shape
        count = -(-n // BLOCK)
        whole = np.zeros((*items, count * BLOCK, columns), scales.dtype)
        whole[:, :, :n] = scales
        self.planes[1][where, :, :count] = whole.reshape(*items, count, BLOCK, columns)


class CodedLatents(Coded):
    """Latents whose first columns, the values, are codes, row by row; the rest is bfloat16, row by row behind them."""

    def __init__(self, dim: int, dtype: str, *, columns: int) -> None:
        self.scales = ScaleBlocks.of(columns, dtype, latent=True)
        Store.__init__(self, dim, dtype, keys=False)

    @property
    def rest(self) -> int:
        """Returns the columns without codes."""
        return self.dim - self.scales.columns

    @property
    def rest_at(self) -> int:
        """Returns where they begin in a block, in bytes."""
        return BLOCK * (self.scales.row + self.scales.columns)

    def row_bytes(self) -> int:
        return self.scales.row + self.scales.columns + 2 * self.rest

    def views(self) -> list[np.ndarray]:
        return [*super().views(), self.view(numpy_dtype("bfloat16"), (BLOCK, self.rest), self.rest_at)]

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([super().joined(parts), parts[2].astype(np.float32)], -1)


class Nibbles(Coded):
    """Codes of four bits, two in a byte: a block of keys is [pair of elements][16 keys], a block of values is
    [8 pairs of keys][element]. The first of two is the low half.

    An odd last element of a key has a zero beside it; behind values of an odd dim are 8 bytes that nothing reads.
    """

    def row_bytes(self) -> int:
        return self.scales.row + (self.dim + 1) // 2

    def view_codes(self) -> np.ndarray:
        tail = ((self.dim + 1) // 2, BLOCK) if self.is_keys else (BLOCK // 2, self.dim)
        pairs = self.view(np.dtype(np.uint8), tail, BLOCK * self.scales.row)
        return pairs.swapaxes(-1, -2) if self.is_keys else pairs  # (…, token, pair), or (…, pair of tokens, element)

    def tokens_of(self, plane: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        if plane is not self.planes[0]:
            return blocks
        codes = np.stack([blocks & 15, blocks >> 4], -1 if self.is_keys else -2)
        return signed_nibbles(codes).astype(self.kind)

    def move_in(self, plane: np.ndarray, old: _Places, new: _Places) -> None:
        if plane is not self.planes[0] or self.is_keys:
            super().move_in(plane, old, new)
            return
        shift = (4 * (old.slot & 1)).astype(np.uint8)[:, None, None]
        codes = (plane[old.owner, :, old.slot >> 4, old.pair] >> shift) & 15
        for half in (0, 1):  # the halves of a byte one after the other
            mine = (new.slot & 1) == half
            at = new.owner[mine], slice(None), new.slot[mine] >> 4, new.pair[mine]
            plane[at] = (plane[at] & (0xF0 >> 4 * half)) | (codes[mine] << 4 * half)


class ScaleBlocks(NamedTuple):
    """The scales of a token: how many columns have codes, how many share a scale, and what dtype it has."""

    columns: int
    size: int
    kind: np.dtype

    @classmethod
    def of(cls, columns: int, dtype: str, *, latent: bool) -> ScaleBlocks:
        return cls(columns, scale_columns(dtype, latent=latent) or columns, np.dtype(CODES[dtype].scale))

    @property
    def number(self) -> int:
        """Returns how many scales a token has."""
        return -(-self.columns // self.size)

    @property
    def row(self) -> int:
        """Returns their bytes."""
        return self.number * self.kind.itemsize


class _Places(NamedTuple):
    """Tokens in memory: of each its page, or sequence, and its slot there."""

    owner: np.ndarray
    slot: np.ndarray

    @classmethod
    def of(cls, owner: list[int], slot: list[int]) -> _Places:
        return cls(np.array(owner, np.int64), np.array(slot, np.int64))

    @property
    def pair(self) -> np.ndarray:
        """Returns which pair of its block's tokens has each."""
        return (self.slot & 15) >> 1


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
        kind = Nibbles if CODES[shape.dtype].is_packed else Coded
    elif shape.dtype == "bfloat16" and not shape.latent:
        kind = Pairs
    name = "pages" if together else "window" if shape.most is None else "capacity"
    dims = [(shape.head_dim, not shape.latent)] + [(shape.value_dim, False)] * (not shape.latent)
    layers = []
    for _ in range(shape.layers):
        stores = tuple([kind(dim, shape.dtype, keys=is_keys) for dim, is_keys in dims])
        if shape.has_codes_of_latents:
            stores = (CodedLatents(shape.head_dim, shape.dtype, columns=shape.value_dim),)
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
