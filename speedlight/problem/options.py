"""What type checkers are told of public calls: arrays of any library, the words that options take, and options.

Overloads tell what comes back, and take options as a TypedDict; the signature that help() and completions show is the
implementation's. tests/arguments/test_names.py holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np

from ..expressions.tables import Table
from ..expressions.tracing import Expression, MaskFunction, ScoreFunction

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
_Kind = TypeVar("_Kind", covariant=True)


class ArrayOf(Protocol[_Kind]):
    """NumPy's, PyTorch's, JAX's … whose library is told, without importing any, by what a method of theirs returns: of
    a Parameter a Tensor, of an array an array of any shape, of what is not typed Any.
    """

    def squeeze(self) -> _Kind: ...


class TorchDtype(Protocol):
    """torch.dtype."""

    @property
    def is_floating_point(self) -> bool: ...


AnyArray = ArrayOf[Any]
Int = SupportsIndex  # Python's, NumPy's, a tensor of one
Ints = Sequence[Int] | AnyArray
BlockTable = AnyArray | Sequence[Ints]
Window = tuple[int | None, int | None]
Mask = MaskFunction | Expression | AnyArray
Score = ScoreFunction | Expression | AnyArray
Scores = Score | Sequence[Score]
Sinks = Sequence[float] | AnyArray
Grads = tuple[Table | Literal["sink_logits"], ...]

Causal = bool | Literal["top-left", "bottom-right", "lower-right", "upper-left"]
Layout = Literal["bhld", "blhd", "hld", "lhd", "bhsd", "bshd", "thd", "bhnd", "bnhd", "nhd"]
Engine = Literal["cpu", "cuda"]
Precision = Literal["ieee", "tf32x3", "tf32"]
Shard = Literal["auto", "contiguous", "zigzag", "stripe"]
Method = Literal["auto", "ring", "ulysses", "gather", "exact", "mesh"]
DtypeName = Literal["float32", "float64", "float16", "bfloat16", "int8", "float8_e4m3fn"]
Dtype = DtypeName | Literal["fp8", "fp8_e4m3", "float8_e4m3"] | np.dtype[Any] | type[Any] | TorchDtype


class Weighing(TypedDict, total=False):
    """What every call of attention takes."""

    mask: Mask | None
    score: Scores | None
    sink_logits: Sinks | None
    scale: float | None
    dropout: float
    seed: Int | None


class AttentionOptions(Weighing, total=False):
    """What to compute, as attention(), attention_backward() and plan() take it: for options that are passed on.

    >>> import numpy as np, speedlight as sl
    >>> options: sl.AttentionOptions = {"causal": True, "window": (64, 0)}
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> sl.attention(q, q, q, **options).shape, sl.plan(q, q, q, **options).visible_pairs
    ((1, 2, 3, 4), 12)
    """

    causal: Causal
    window: Window | None
    q_start: Int | Ints | None
    k_start: Int
    layout: Layout
    cu_seqlens_q: Ints | None
    cu_seqlens_k: Ints | None
    lengths: Ints | None
    q_lengths: Ints | None
    k_lengths: Ints | None


class ArrayOptions(AttentionOptions, total=False):
    """Of attention()."""

    out: AnyArray | None
    engine: Engine | None
    precision: Precision


class PagedOptions(Weighing, total=False):
    """Of attention_paged()."""

    causal: Causal
    window: Window | None
    q_start: Int | Ints | None
    layout: Layout
    cu_seqlens_q: Ints | None
    q_lengths: Ints | None
    out: AnyArray | None
    engine: Engine | None


class StepOptions(Weighing, total=False):
    """Of KVCache.attend() and PagePool.attend()."""

    new_lengths: Ints | None
    q_lengths: Ints | None
    out: AnyArray | None
