"""The memory layout of keys and values on a GPU, token by token; devices by name; arguments that must lie there."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..arrays.array import describe
from ..arrays.dtypes import CODES, DTYPES, ON_GPU, numpy_dtype
from ..arrays.memory import Array
from ..errors import ArgumentError, UnsupportedError, join_words, pass_on, shown
from ..host.machine import interpreting
from ..problem.tokens import TokenShape
from .append import store
from .keys import Keys
from .launch import Launch, named_strides, status_of
from .schedule import power_above

_CODES = {getattr(torch, kind): name for name, kind in ON_GPU.items()}  # whose codes a tensor has


def device_of(device: Any) -> torch.device:
    """A GPU by name; in the interpreter, the CPU."""
    try:
        named = torch.device(device)
    except Exception as error:  # PyTorch's, of several kinds
        pass_on(error)
        raise ArgumentError(
            f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)} ({type(error).__name__})."
        ) from None
    if named.type != "cuda":
        raise ArgumentError(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)}.")
    if interpreting():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError("device: expected a CUDA device; PyTorch sees none here. Use device='cpu'.")
    return torch.device("cuda", torch.cuda.current_device() if named.index is None else named.index)


def cache_type(dtype: str) -> torch.dtype:
    """Returns the dtype of a cache's tensors. Kernels see float8 as bits: not every GPU knows the type."""
    kinds = {name: name for name in DTYPES if name != "float64"} | ON_GPU
    if dtype not in kinds:
        raise UnsupportedError(f"dtype: expected {join_words(kinds)} on a GPU; got {dtype}.")
    return getattr(torch, kinds[dtype])


def described(x: Any, name: str, device: torch.device) -> Array:
    """An argument, checked to lie on the cache's device."""
    array = describe(x, name, gpu=True)
    if torch.device(array.device) != device or (array.kind != "torch" and array.device == "cpu"):
        raise ArgumentError(
            f"{name}: expected a tensor on {device}, as the cache is; got one on {array.device}. Move it first."
        )
    return array


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """A copy on the CPU; bfloat16 as ml_dtypes', and codes as NumPy has them."""
    x = x.to("cpu", copy=True).contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return x.numpy().view(numpy_dtype(_CODES[x.dtype])) if x.dtype in _CODES else x.numpy()


def to_torch(x: np.ndarray) -> torch.Tensor:
    """A copy, still on the CPU."""
    if x.dtype.name == "bfloat16":
        return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
    return torch.tensor(x.view(ON_GPU.get(x.dtype.name, x.dtype)))


class Tokens(NamedTuple):
    """New tokens of several items: strides of k and v as (item, head, row, column)."""

    k: torch.Tensor
    v: torch.Tensor
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    most: int  # tokens of an item
    counts: torch.Tensor | None = None  # tokens of each item, where they differ
    first: torch.Tensor | None = None  # of packed tokens: the first of each item


class Destination(NamedTuple):
    """The destination of an item's new tokens: past its length, in its own rows, in pages, or round a ring."""

    lengths: torch.Tensor
    capacity: int
    arrived: torch.Tensor | None = None  # a counter of each item: with it, the kernel advances the lengths
    pages: torch.Tensor | None = None
    page_size: int = 1
    after: torch.Tensor | None = None  # with it, pages and lengths are the caller's: checked, and told as they are then
    ring_first: int = 0
    ring: int = 0


class Rows:
    """Keys and values of one layer, token by token: (item or page, head, token, element) in any order of memory; codes
    with scales.
    """

    def __init__(self, shape: TokenShape, outer: int, tokens: int, device: torch.device, *, tokens_first: bool) -> None:
        """Makes room for `outer` sequences or pages, so many tokens each; `tokens_first`: the heads of a
        token adjoin.
        """
        dims = (shape.head_dim, shape.value_dim)
        lies = (outer, tokens, shape.kv_heads) if tokens_first else (outer, shape.kv_heads, tokens)

        def zeros(*tail: int, kind: torch.dtype) -> torch.Tensor:
            whole = torch.zeros((*lies, *tail), dtype=kind, device=device)
            return whole.transpose(1, 2) if tokens_first else whole

        self.k, self.v = (zeros(d, kind=cache_type(shape.dtype)) for d in dims)
        self.scales = tuple(zeros(kind=torch.float32) for _ in dims) if shape.dtype in CODES else (None, None)

    @classmethod
    def over(cls, pages: tuple[torch.Tensor, ...]) -> Rows:
        """The caller's own pages of keys and values, (pages, page_size, heads, dim)."""
        rows = cls.__new__(cls)
        (rows.k, rows.v), rows.scales = (x.transpose(1, 2) for x in pages), (None, None)
        return rows

    @property
    def parts(self) -> list[torch.Tensor]:
        return [x for x in (self.k, self.v, *self.scales) if x is not None]

    @property
    def token_bytes(self) -> int:
        """The bytes of one token: keys and values of all heads, and their scales."""
        return sum(x.element_size() * x[0, :, 0].numel() for x in self.parts)

    def keys(self, **more: Any) -> Keys:
        """Returns what the attention kernel takes."""
        return Keys(
            self.k,
            self.v,
            tuple(self.k.stride()),
            tuple(self.v.stride()),
            k_scales=self.scales[0],
            v_scales=self.scales[1],
            **more,
        )

    def tokens(self, part: str, where: Any) -> torch.Tensor:
        """A copy of "keys" or "values"."""
        index = ("keys", "values").index(part)
        x, scale = (self.k, self.v)[index][where], self.scales[index]
        if scale is None:
            return x.clone()
        return x.view(getattr(torch, _CODES[x.dtype])).float() * scale[where][..., None]

    def planes(self, index: int) -> list[torch.Tensor]:
        """Keys (0) or values (1) as files have them: [tokens], or [codes, scales]."""
        scale = self.scales[index]
        return [(self.k, self.v)[index], *([] if scale is None else [scale[..., None]])]

    def put(self, new: Tokens, to: Destination, status: torch.Tensor) -> Launch:
        """Stores new tokens past the lengths of their items."""
        k, v, pages, n_new = new.k, new.v, to.pages, new.most
        batch, heads = to.lengths.shape[0], self.k.shape[1]
        d, dv = self.k.shape[3], self.v.shape[3]
        scales = self.scales[0].stride() if self.scales[0] is not None else (0, 0, 0)
        arguments: dict[str, Any] = {
            "k": k, "v": v, "keys": self.k, "values": self.v, "k_scales": self.scales[0], "v_scales": self.scales[1],
            "lengths": to.lengths, "counts": new.counts, "first": new.first, "arrived": to.arrived, "after": to.after,
            "status": status, "pages": pages, "page_size": to.page_size, "page_count": self.k.shape[0],
            "table_row": 0 if pages is None else pages.stride(0),
            "ring_first": to.ring_first, "ring": to.ring, "RING": to.ring > 0,
            "n_new": n_new, "capacity": to.capacity, "programs": max(n_new, 1),
            "D": d, "DV": dv, "BLOCK_D": max(16, power_above(d)), "BLOCK_DV": max(16, power_above(dv)),
            "HEADS": heads, "BLOCK_H": power_above(heads),
        }  # fmt: skip
        arguments |= named_strides("k", new.k_strides) | named_strides("v", new.v_strides)
        arguments |= named_strides("K", self.k.stride()) | named_strides("V", self.v.stride())
        arguments |= named_strides("S", scales)
        return Launch(store, ((n_new if to.after is None else max(n_new, 1)) * batch,), arguments, 4, 1)


def paged_keys(
    pages: tuple[torch.Tensor, ...], table: torch.Tensor, lengths: torch.Tensor | None, most: int, placed: bool
) -> Keys:
    """Keys and values in pages of the caller's, (pages, page_size, heads, dim)."""
    (count, size, *_), status = pages[0].shape, status_of(pages[0].device)
    return Rows.over(pages).keys(
        pages=table, page_size=size, page_count=count, lengths=lengths, status=status, most=most, placed=placed
    )
