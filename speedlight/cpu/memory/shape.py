"""The specialisation of a kernel: of attention, or of one that stores new tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from ...arrays.dtypes import CODES, STORAGE_BYTES, scale_columns, scales_of
from ...host.machine import PRODUCTS, Isa, sum_storage
from ...host.tunings import TUNINGS, Fetching, RegisterTiles, shipped
from .records import BLOCK

if TYPE_CHECKING:
    from llvmlite import ir

    from .formats import TokenFormat

Kind = Literal["forward", "decode", "backward", "tables", "weights"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The specialisation of a set of micro-kernels."""

    kind: Kind  # forward: a lane is a query; decode: a lane is a key; backward, tables: gradients; weights: of keys
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
    latent: bool = False  # a cache's keys lie as values do, which are their first columns
    in_parts: bool = False  # keys lie in two arrays, one behind the other
    # rows (of a cache: blocks) of keys, and values that are not staged, are read by a list of their addresses
    scattered: bool = False
    partial: bool = False  # of some of the keys: rows go on from a state; what flows adds to sums that are there
    resumed: bool = False  # rows go on from the states of keys that several sequences share
    chosen: bool = False  # an item is one query, which sees the keys of a list

    @property
    def stem(self) -> str:
        """The readable part of the kernel's name."""
        types = self.storage if self.widened is None else f"{self.storage}_{self.widened}"
        flags = "resumed", "partial", "dropout", "in_parts", "chosen"
        marks = "".join([f"_{name}" for name in flags if getattr(self, name)])
        name = f"{self.kind}{marks}_{types}_{self.isa.name}"
        return f"{name}_{self.rows}x{self.vectors}" if self.vectors else name

    @property
    def product(self) -> str:
        """Name of what multiplies, in machine.PRODUCTS."""
        if self.widened:
            return "fma"
        gradients = self.kind in ("backward", "tables", "weights")
        codes = scales_of(self.quantised, latent=self.latent)
        return self.isa.product(self.storage, gradients=gradients, codes=codes)

    @property
    def differentiates(self) -> bool:
        """Has an upstream gradient."""
        return self.kind in ("backward", "tables")

    @property
    def elements(self) -> int:
        """Elements of a unit: what one multiply-add step takes from a row of keys, or of values at one column."""
        return PRODUCTS[self.product].elements

    @property
    def weight_elements(self) -> int:
        """Elements of a unit of weights, before these are multiplied by scales of codes: then they are numbers."""
        return 1 if self.format.is_coded and not self.scales_weights else self.elements

    @property
    def scales_weights(self) -> bool:
        """Multiplies weights by scales of codes as they are made."""
        return self.kind == "forward" and self.format.is_coded and not self.scale_block

    @property
    def together(self) -> int:
        """Units that are summed by themselves, from zero, before they join the sum."""
        return PRODUCTS[self.product].together

    @property
    def packed(self) -> int:
        """Units that lie together in a packed row of queries or keys."""
        return PRODUCTS[self.product].packed

    @property
    def pads(self) -> bool:
        """Has zeros beside the last of an odd number of keys: of arrays, by pairs."""
        return self.elements > 1 and self.together == 1 and not self.cached

    @property
    def is_masked(self) -> bool:
        """Has a mask or score that may hide keys."""
        return self.program is not None and self.program.may_hide

    @property
    def hides(self) -> bool:
        """Has a mask or score that may show keys behind hidden ones."""
        absent = self.chosen and self.chosen_unit > 1
        return absent or self.is_masked

    @property
    def scatters_values(self) -> bool:
        """Has values that are read by a list of addresses; of an array, units of several keys are staged."""
        return self.scattered and (self.elements == 1 or self.cached)

    @property
    def reads_blocks(self) -> bool:
        """Reads blocks of keys, a cache's where they lie or staged ones: unit after unit, each of BLOCK keys."""
        return (self.scattered and self.cached) or self.stages_blocks

    @property
    def stages_blocks(self) -> bool:
        """Has codes of keys, which are widened block by block."""
        return (
            self.kind == "forward" and self.format.is_coded and self.cached and not self.latent and self.together == 1
        )

    @property
    def block_unit_bytes(self) -> int:
        """Bytes of a unit of one key in the blocks that are read."""
        return self.number_bytes if self.stages_blocks else self.stored_bytes

    @property
    def reads_parts(self) -> bool:
        """Reads keys in two parts where they lie, unless they are staged; tiles are always staged."""
        return self.in_parts and self.together == 1

    @property
    def has_rows_of_numbers(self) -> bool:
        """Has staged keys whose rows are as staged values' are: numbers side by side."""
        return self.elements == 1 and (self.latent or not self.cached)

    @property
    def has_narrow_tail(self) -> bool:
        """Computes keys that `causal` shows to a panel's last vector of queries alone for that vector alone."""
        return self.vectors > 1 and self.together == 1 and self.program is None

    @property
    def fetches_alone(self) -> bool:
        """Fetches a cache's blocks ahead for a single row, too: codes take longer to compute than to miss."""
        return self.fetching.alone or self.format.is_coded

    @property
    def reloads(self) -> bool:
        """Loads what lanes share for each multiply-add of codes; others and the dot instruction are slower so."""
        return self.tiles.reloads and self.elements == 1 and self.format.is_coded

    @property
    def fetches_rows(self) -> bool:
        """Fetches the next lines of rows while those before are transposed: a vector of each is a line."""
        return self.fetching.rows > 0 and self.lanes * self.storage_bytes == 64

    # --- units of rows

    def count_units(self, length: Any) -> Any:
        """Counts the units that hold so many elements."""
        return length if self.elements == 1 else (length + (self.elements - 1)) // self.elements

    def packed_units(self, length: Any) -> Any:
        """Counts the units of a panel or a staged tile that hold so many elements: zeros fill up those together."""
        return (self.count_units(length) + (self.packed - 1)) & -self.packed

    def first_of_units(self, element: Any) -> Any:
        """Returns the first element of the units that are summed with an element's; parts of a tile are blocks."""
        return element if self.together == 1 else element & -(self.elements * self.together)

    def count_weights(self, keys: Any) -> Any:
        """Counts the units of weights of so many keys, before they are multiplied by scales of codes."""
        return keys if self.weight_elements == 1 else self.count_units(keys)

    def weight_of(self, key: Any) -> Any:
        """Returns the unit of weights that has a key's, before they are multiplied by scales of codes."""
        return key if self.weight_elements == 1 else self.unit_of(key)

    def unit_of(self, element: Any) -> Any:
        """Returns the unit that has an element."""
        return element if self.elements == 1 else element // self.elements

    def whole_units(self, length: Any) -> Any:
        """Counts those that can be read a vector at a time."""
        return length // (self.elements * self.lanes) * self.lanes

    def step_bytes(self, row: Any) -> Any:
        """Returns the step from a unit of values to the next, where neighbouring keys' values are kept together."""
        return row if self.elements == 1 else row * self.elements

    # --- memory

    @property
    def storage_bytes(self) -> int:
        return STORAGE_BYTES[self.storage]

    @property
    def format(self) -> TokenFormat:
        """Format of keys and values in memory."""
        return _format_of(self.quantised or self.widened or self.storage, in_pages=not self.cached)

    @property
    def key_bytes(self) -> int:
        """Bytes of one element of keys or values."""
        if self.format.bits % 8:
            raise ValueError(f"{self.format.name}: expected elements of whole bytes; got {self.format.bits} bits.")
        return self.format.bits // 8

    @property
    def stored_bytes(self) -> int:
        """Bytes of one unit of a cache's keys or values."""
        return self.key_bytes * self.elements

    @property
    def scale_block(self) -> int:
        """Columns of codes that share a scale; 0: all of a row."""
        return scale_columns(self.quantised if self.cached else None, latent=self.latent)

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale of codes, ahead of a block's."""
        return 0 if self.quantised is None or self.lists_scales else CODES[self.quantised].scale_bytes

    @property
    def lists_scales(self) -> bool:
        """Has codes in arrays, whose scales lie in others."""
        return self.format.is_coded and not self.cached

    @property
    def has_signed_scales(self) -> bool:
        """Has scales of codes that may be negative: only a weight of exactly -0 is that of a hidden key."""
        return self.scale_block > 0 or self.lists_scales

    def count_scales(self, columns: Any) -> Any:
        """Counts the scales of so many columns of codes."""
        size = self.scale_block
        return (columns + (size - 1)) // size if size else 1

    def header(self, columns: Any) -> Any:
        """Returns the bytes of scales ahead of a block's elements, of so many columns each."""
        return self.count_scales(columns) * (BLOCK * self.scale_bytes)

    @property
    def block_step(self) -> int:
        """Bytes from a unit of a block's keys to the next."""
        return BLOCK * self.elements * self.format.bits // 8

    @property
    def piece(self) -> int:
        """Tokens that lie side by side in a tile of keys or values: one by one in rows, or a cache's block."""
        return BLOCK if self.cached else 1

    @property
    def chosen_unit(self) -> int:
        """Keys that have slots together where one of them is chosen."""
        return self.elements * self.together

    # --- types (plans and kernels that were kept are named without them, and without llvmlite's 6 ms)

    @property
    def sums(self) -> str:
        """Storage type of scores and sums."""
        return sum_storage(self.storage)

    @property
    def wide(self) -> bool:
        """Has scores and sums of 64 bits."""
        return self.number_bytes == 8

    @property
    def number(self) -> ir.Type:
        """Type of scores and sums."""
        return _types().F64 if self.wide else _types().F32

    @property
    def number_bytes(self) -> int:
        return STORAGE_BYTES[self.sums]

    @property
    def gradient_storage(self) -> str:
        """Storage type of gradients."""
        return self.sums if self.partial else self.storage

    @property
    def narrows_gradients(self) -> bool:
        """Has sums of more bits than the gradients that they become."""
        return STORAGE_BYTES[self.gradient_storage] < self.number_bytes

    @property
    def integer(self) -> ir.Type:
        """Type of a score's bits."""
        return _types().I64 if self.wide else _types().I32

    @property
    def unit(self) -> ir.Type:
        """Type of what is broadcast from a row of keys: one number, or several elements as an integer."""
        return self.number if self.elements == 1 else self.integer

    @property
    def weight(self) -> ir.Type:
        """Type of a unit of weights, before they are multiplied by scales of codes."""
        return self.number if self.weight_elements == 1 else self.unit

    @property
    def vector(self) -> ir.VectorType:
        return _types().vec(self.number, self.lanes)

    @property
    def ivector(self) -> ir.VectorType:
        return _types().vec(self.integer, self.lanes)

    @property
    def units(self) -> ir.VectorType:
        """Type of a unit of each lane."""
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
        """Keys (or value columns) that are multiplied at once."""
        return PRODUCTS[self.product].rows or self.tiles.keys[self.vectors - 1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a panel-wide array."""
        return self.panel * self.number_bytes

    def lane_offset(self, v: int) -> int:
        return v * self.vector_bytes


# whose scales in arrays codes have: found from each token, and stored; given, for all elements of a row, or for each
Scaling = Literal["found", "given", "channels"]


class Source(NamedTuple):
    """New keys, or values, as the caller has them."""

    storage: str
    strided: bool  # the elements of a row are not side by side


@dataclass(frozen=True, slots=True)
class AppendShape:
    """The specialisation of the kernel that stores new tokens: sizes and strides are arguments."""

    isa: Isa
    stored: str  # f32, f64, f16, bf16; the dtype of codes
    keys: Source
    values: Source
    streams: bool = False  # whole blocks, of rows of whole cache lines, go past the caches
    raw: bool = False  # to rows in pages of any size and strides
    latent: bool = False  # keys are the codes of latents, row by row, and values the rest of them, without codes
    scaling: tuple[Scaling, Scaling] | None = None  # … as codes: of keys and values
    kind: ClassVar[str] = "append"

    @property
    def format(self) -> TokenFormat:
        return _format_of(self.stored, in_pages=self.raw)

    @property
    def scale_block(self) -> int:
        """Codes of a row that share a scale; 0: all."""
        return scale_columns(self.stored, latent=self.latent)

    @property
    def pairs(self) -> bool:
        """Keeps tokens as blocks.Pairs has them."""
        return self.format.in_pairs and not self.raw

    @property
    def moves_codes(self) -> bool:
        """Takes codes as they are, without their scales."""
        return self.keys.storage == self.stored and self.format.is_coded

    @property
    def stem(self) -> str:
        return f"append_{'raw_' * self.raw}{'latent_' * self.latent}{self.stored}_{self.isa.name}"


@functools.cache
def _types() -> Any:
    from ..language import vector

    return vector


@functools.cache
def _format_of(name: str, *, in_pages: bool) -> TokenFormat:
    """Returns a format by name; of codes that of a cache, or of the caller's pages."""
    from .formats import FORMATS, PAGE_FORMATS

    return PAGE_FORMATS[name] if in_pages and name in PAGE_FORMATS else FORMATS[name]
