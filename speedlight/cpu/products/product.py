"""The product of a shape: every class that kernels may multiply by.

Kernels ask it for packing, for steps of sums, and for whole micro-kernels where a register tile is the product's own
affair; none asks which it is. A new one is a class with these methods and its name in machine.PRODUCTS.
"""

from __future__ import annotations

from ..memory.shape import Shape
from .amx_tiles import AmxTiles
from .bf16_pairs import Bf16Pairs
from .fma import Fma
from .odd_pairs import OddPairs

GradProduct = Fma | Bf16Pairs  # all of whose steps are outer products (outer.py)
OuterProduct = GradProduct | OddPairs
Product = OuterProduct | AmxTiles
CLASSES: dict[str, type[Product]] = {"fma": Fma, "pairs": Bf16Pairs, "amx_tiles": AmxTiles, "odd_pairs": OddPairs}


def outer_product_of(s: Shape) -> GradProduct:
    """Returns what multiplies in a kernel of gradients, or whose sums are in registers."""
    product = product_of(s)
    assert not isinstance(product, AmxTiles | OddPairs)
    return product


def product_of(s: Shape) -> Product:
    """Returns what multiplies in a kernel of this shape."""
    return CLASSES[s.product](s)
