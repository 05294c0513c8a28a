"""What a kernel is specialised for: of attention, or one that stores new tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ...arrays.array import STORAGE_BYTES
from ...host.machine import PRODUCTS, Isa, number_bytes
from ...host.tunings import TUNINGS, Fetching, RegisterTiles, shipped
from .records import BLOCK

if TYPE_CHECKING:
    from llvmlite import ir

Kind = Literal["forward", "decode", "backward", "tables"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a set of micro-kernels is specialised for."""

    kind: Kind  # forward: a lane is a query; decode: a lane is a key; backward, tables: gradients
    isa: Isa
    storage: str  # type in memory: f32, f64, f16, bf16
    vectors: int = 0  # query vectors of a panel; none in the decode kernel
    program: Any = None  # the mask and score
    cached: bool = False  # keys and values lie as a cache keeps them: keys in lane order, bf16 in pairs
    quantised: str | None = None  # … as codes of this dtype, with a scale per token and head ahead of every block
    fetching: Fetching = TUNINGS["other"].fetching  # of the decode and forward kernels
    own_tiles: RegisterTiles | None = None  # None: those that ship for the unit
    dropout: bool = False  # weights are dropped
    widened: str | None = None  # type of keys and values in memory, where it is not storage; f32 is what multiplies
    partial: bool = False  # of some of the keys: rows go on from a state; what flows adds to sums that are there

    @property
    def stem(self) -> str:
        """The readable part of the kernel's name."""
        types = self.storage if self.widened is None else f"{self.storage}_{self.widened}"
        name = f"{self.kind}{'_partial' * self.partial}{'_dropout' * self.dropout}_{types}_{self.isa.name}"
        return f"{name}_{self.rows}x{self.vectors}" if self.vectors else name

    @property
    def product(self) -> str:
        """What multiplies: a name in machine.PRODUCTS."""
        return "fma" if self.quantised or self.widened else self.isa.product(self.storage)

    @property
    def elements(self) -> int:
        """Of a unit: what one multiply-add step takes from a row of keys, or of values at one column."""
        return PRODUCTS[self.product]

    @property
    def pads(self) -> bool:
        """Whether the last of an odd number of keys has zeros beside it: of arrays, by pairs."""
        return self.elements > 1 and not self.cached

    @property
    def hides(self) -> bool:
        """Whether keys that a mask or score shows may follow others."""
        return self.program is not None and self.program.may_hide

    @property
    def narrows(self) -> bool:
        """Whether keys that `causal` shows only to a panel's last vector of queries take no time of the others."""
        return self.vectors > 1 and self.program is None

    @property
    def fetches_rows(self) -> bool:
        """Whether the next lines of rows are fetched while those before are transposed: a vector of each is a line."""
        return self.fetching.rows > 0 and self.lanes * self.storage_bytes == 64

    # --- memory

    @property
    def storage_bytes(self) -> int:
        return STORAGE_BYTES[self.storage]

    @property
    def stored(self) -> str:
        """Type of keys and values in memory, where they are not codes."""
        return self.widened or self.storage

    @property
    def key_bytes(self) -> int:
        """Of one element of keys or values."""
        return 1 if self.quantised else STORAGE_BYTES[self.stored]

    @property
    def stored_bytes(self) -> int:
        """Of one unit of a cache's keys or values."""
        return self.key_bytes * self.elements

    @property
    def widens_pairs(self) -> bool:
        """Whether keys and values are bf16 that is multiplied one by one, and not in pairs."""
        return self.stored == "bf16" and self.product == "fma" and not self.quantised

    @property
    def parts_pairs(self) -> bool:
        """Whether a cache's pairs of bf16 are parted."""
        return self.cached and self.widens_pairs

    @property
    def together(self) -> int:
        """Units that lie together in a cache, and are read at once."""
        return 2 if self.parts_pairs else 1

    @property
    def header(self) -> int:
        """Bytes of scales ahead of a block's elements."""
        return 4 * BLOCK if self.quantised else 0

    @property
    def piece(self) -> int:
        """Tokens that lie side by side in a tile of keys or values: one by one in rows, or a cache's block."""
        return BLOCK if self.cached else 1

    # --- types (plans and kernels that were kept are named without them, and without llvmlite's 6 ms)

    @property
    def wide(self) -> bool:
        return self.storage == "f64"

    @property
    def number(self) -> ir.Type:
        """What scores and sums are held in."""
        return _types().F64 if self.wide else _types().F32

    @property
    def number_bytes(self) -> int:
        return number_bytes(self.storage)

    @property
    def gradient_storage(self) -> str:
        """Type of gradients in memory."""
        return ("f64" if self.wide else "f32") if self.partial else self.storage

    @property
    def narrows_gradients(self) -> bool:
        """Whether sums are of more bits than the gradients that they become."""
        return STORAGE_BYTES[self.gradient_storage] < self.number_bytes

    @property
    def integer(self) -> ir.Type:
        return _types().I64 if self.wide else _types().I32

    @property
    def unit(self) -> ir.Type:
        """What is broadcast from a row of keys: one number, or several elements as an integer."""
        return self.number if self.elements == 1 else self.integer

    @property
    def vector(self) -> ir.VectorType:
        return _types().vec(self.number, self.lanes)

    @property
    def ivector(self) -> ir.VectorType:
        return _types().vec(self.integer, self.lanes)

    @property
    def units(self) -> ir.VectorType:
        """A unit of each lane."""
        return _types().vec(self.unit, self.lanes)

    # --- tiles

    @property
    def lanes(self) -> int:
        return self.isa.lanes(self.storage)

    @property
    def vector_bytes(self) -> int:
        return self.isa.vector_bytes

    @property
    def panel(self) -> int:
        return self.lanes * self.vectors

    @property
    def tiles(self) -> RegisterTiles:
        return shipped(self.isa).register_tiles(self.isa) if self.own_tiles is None else self.own_tiles

    @property
    def rows(self) -> int:
        """Keys (or value columns) per register tile."""
        return self.tiles.keys[self.vectors - 1]

    @property
    def row_bytes(self) -> int:
        """One row of a panel-wide array."""
        return self.panel * self.number_bytes

    def lane_offset(self, v: int) -> int:
        return v * self.vector_bytes


class Source(NamedTuple):
    """New keys, or values, as the caller has them."""

    storage: str
    strided: bool  # the elements of a row are not side by side


@dataclass(frozen=True, slots=True)
class AppendShape:
    """What the kernel that stores new tokens is specialised for: sizes and strides are arguments."""

    isa: Isa
    stored: str  # f32, f64, f16, bf16; the dtype of codes
    keys: Source
    values: Source
    streams: bool = False  # whole blocks, of rows of whole cache lines, go past the caches
    raw: bool = False  # to rows in pages of any size and strides
    kind: ClassVar[str] = "append"

    @property
    def pairs(self) -> bool:
        """Whether they are kept as blocks.Pairs keeps them."""
        return self.stored == "bf16" and not self.raw

    @property
    def stem(self) -> str:
        return f"append_{'raw_' * self.raw}{self.stored}_{self.isa.name}"


@functools.cache
def _types() -> Any:
    from ..language import vector

    return vector
