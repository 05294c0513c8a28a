"""The product of a shape: every class that kernels may multiply by.

Kernels ask it for packing, for steps of sums, and for whole micro-kernels where a register tile is the product's own
affair; none asks which it is. A new one is a subclass of OuterProduct (outer.py), and its name in machine.PRODUCTS.
"""

from __future__ import annotations

from ..memory.shape import Shape
from .amx_tiles import AmxTiles
from .bf16_pairs import Bf16Pairs
from .coded_pairs import AmxCodes, Bf16Codes
from .fma import Fma
from .odd_pairs import OddPairs
from .outer import OuterProduct

Product = OuterProduct | AmxTiles
CLASSES: dict[str, type[Product]] = {"fma": Fma, "pairs": Bf16Pairs, "amx_tiles": AmxTiles, "odd_pairs": OddPairs}
OF_CODES: dict[str, type[Product]] = {"fma": Fma, "pairs": Bf16Codes, "amx_tiles": AmxCodes}


def outer_product_of(s: Shape) -> OuterProduct:
    """Returns the product of a kernel of gradients, or of one whose sums are in registers."""
    product = product_of(s)
    assert not isinstance(product, AmxTiles | OddPairs)
    return product


def product_of(s: Shape) -> Product:
    """Returns the product of a kernel of this shape."""
    return (OF_CODES if s.format.is_coded else CLASSES)[s.product](s)
