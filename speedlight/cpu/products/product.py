"""The product of a shape: every class that kernels may multiply by.

Kernels ask it for packing, for steps of sums, and for whole micro-kernels where a register tile is the product's own
affair; none asks which it is. A new one is a class with these methods and its name in machine.PRODUCTS.
"""

from __future__ import annotations

from ..memory.shape import Shape
from .amx_tiles import AmxTiles
from .bf16_pairs import Bf16Pairs
from .fma import Fma

Product = Fma | Bf16Pairs | AmxTiles
CLASSES: dict[str, type[Product]] = {"fma": Fma, "pairs": Bf16Pairs, "amx_tiles": AmxTiles}


def product_of(s: Shape) -> Product:
    """Returns what multiplies in a kernel of this shape."""
    return CLASSES[s.product](s)
