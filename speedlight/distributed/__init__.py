"""Attention over a sequence that is sharded over the processes of torch.distributed.

attention: of this process's shard to the whole sequence, with gradients
shard, unshard: a process's part of a whole tensor, and a whole tensor of all parts
positions: which tokens each process holds
KVCache: a cache whose tokens are shared out among the processes
local_attention: what DeepSpeed's DistributedAttention (Ulysses) takes
ring_flash_attn: a module with the calls of ring-flash-attention

>>> from speedlight.distributed import positions
>>> positions(8, 2, "zigzag")  # which tokens each of two processes holds
((range(0, 2), range(6, 8)), (range(2, 6),))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..host.lazy import importer

if TYPE_CHECKING:
    from ..problem.shardings import positions
    from . import ring_flash_attn
    from .attending import attention
    from .cache import KVCache
    from .local import local_attention
    from .tensors import shard, unshard

_HOMES = {
    "KVCache": "cache",
    "attention": "attending",
    "local_attention": "local",
    "positions": "..problem.shardings",
    "shard": "tensors",
    "unshard": "tensors",
}
_MODULES = ("ring_flash_attn",)

__all__ = [
    "KVCache",
    "attention",
    "local_attention",
    "positions",
    "ring_flash_attn",
    "shard",
    "unshard",
]


if not TYPE_CHECKING:
    __getattr__ = importer(globals(), _HOMES, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
