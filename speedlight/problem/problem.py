"""A call as data: its options, the problem they state, and the sizes that fix bits."""

from __future__ import annotations

import marshal
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import DTYPES, listed
from ..errors import ArgumentError, Error
from ..expressions.program import Program
from ..expressions.tracing import Expression, is_immutable
from ..expressions.tree import Node, lazily

TILE, SPAN = 128, 1024  # keys per tile and per span of the canonical arithmetic
QUERY_BLOCK = 192  # positions whose share of dK and dV is summed before it is added
# from such |lse| on, which holds no fractions any more, the weights of gradients are at most 1
FAR_LSE = {"float32": 2.0**22, "float64": 2.0**51}
PART = 16  # keys: the smallest part of a tile that is skipped; even, so that pairs stay whole
# where batch, head, length, dim lie
LAYOUTS = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "hld": (0, 1, 2), "lhd": (1, 0, 2)}
# The same by other libraries' letters, of either case: n is heads beside s or t (Ascend, JAX), tokens beside h and d.
SAME_LAYOUTS = {
    "bhld": ("bhsd", "bhtd", "bhnd", "bnsd", "bntd", "bnsh", "bnth"),
    "blhd": ("bshd", "bthd", "bnhd", "bsnd", "btnd", "bsnh", "btnh"),
    "lhd": ("thd", "shd", "nhd", "tnd"),
}
# Where a query sees the last keys: PyTorch's names of it (torch.nn.attention.bias), and flash-attn's.
SAME_CAUSAL: dict[str, bool | str] = {"bottom-right": True, "lower-right": True, "upper-left": "top-left"}
_OURS = {theirs: ours for ours, those in SAME_LAYOUTS.items() for theirs in those}

_OR_NONE, _NUMBER = frozenset((int, float, type(None))), frozenset((int, float))
_CAUSAL, _POSITION, _SCALE = frozenset((bool, str)), frozenset((int, type(None))), _OR_NONE
MOST_SEEDS = 1 << 64  # a seed is the key of dropout's random numbers
_MOST_VALUES = 4096  # of a list that a key may hold


class Options(NamedTuple):
    """Every option of a call, as it was given. What they mean, attention() says; the defaults are its own.

    An option that is added stands here, in the signatures that offer it, and in what obeys it: nowhere between.
    """

    causal: Any = False
    window: Any = None
    mask: Any = None
    score: Any = None
    sink_logits: Any = None
    q_start: Any = None
    k_start: Any = 0
    scale: Any = None
    layout: Any = "bhld"
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    q_lengths: Any = None
    k_lengths: Any = None
    precision: Any = "ieee"
    dropout: Any = 0.0
    seed: Any = None

    def spelled(self) -> Options:
        """The same in our own words: layouts and alignments may have come by other libraries' names."""
        layout, causal = our_layout(self.layout), our_causal(self.causal, self.q_start)
        return self if layout is self.layout and causal is self.causal else self._replace(layout=layout, causal=causal)

    def seed_word(self) -> int:
        """The seed of a call that has a key: 0 without dropout, where it says nothing."""
        return self.seed if self.dropout else 0

    def table_bytes(self) -> int:
        """Of what masks and scores that may be part of a key look up, which whoever keeps the key holds, too."""
        return sum([t.array.nbytes for x in (self.mask, self.score) if isinstance(x, Expression) for t in x.tables])

    def key(self) -> tuple[Any, ...] | None:
        """Equal for options that mean the same to the bit; None where one is of a type that may change or is odd.

        Types and bits count: 0.0 is not -0.0, True not 1. Of lists the values that they hold now; masks and scores are
        expressions, which never change, and are known by what they compute. A seed is none of it: it is a word of every
        call, and another one would come with each.
        """
        (
            causal, window, mask, score, sinks, q_start, k_start, scale, layout, cu_q, cu_k, q_lens, k_lens, precision,
            dropout, seed,
        ) = self  # fmt: skip
        if not (
            type(causal) in _CAUSAL
            and type(q_start) in _POSITION
            and type(k_start) is int
            and type(scale) in _SCALE
            and type(layout) is str
            and type(precision) is str
            and type(dropout) in _NUMBER
        ):
            return None
        if not (mask is score is None or (is_immutable(mask) and is_immutable(score))):
            return None
        exactly = scale or (scale is not None and str(scale))  # 0.0 and -0.0 are equal, their texts are not
        key = (causal, q_start, k_start, type(scale), exactly, layout, precision, mask, score)
        if dropout:
            if not (0 < dropout <= 1 and type(seed) is int and 0 <= seed < MOST_SEEDS):
                return None
            key += (float(dropout),)
        if window is sinks is cu_q is cu_k is q_lens is k_lens is None:
            return key
        values = tuple(map(_exactly, (window, sinks, cu_q, cu_k, q_lens, k_lens)))
        return None if ... in values else key + values


def _exactly(x: Any) -> Any:
    """A short list as part of a key: types and bits of its values now. ... for what cannot be told so."""
    if x is None:
        return None
    if type(x) in (list, tuple):
        return (type(x), marshal.dumps(x, 2)) if _OR_NONE.issuperset(map(type, x)) else ...
    if type(x) is np.ndarray:
        return (x.dtype, x.shape, x.tobytes()) if x.dtype.kind in "iuf" and x.size <= _MOST_VALUES else ...
    torch = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or not x.is_cpu or x.numel() > _MOST_VALUES:
        return ...
    try:
        values = _exactly(listed(x, "", ""))
    except Error:  # checked again, by name, where nothing is memoised
        return ...
    return ... if values is ... else (x.dtype, values)


new_options = tuple.__new__  # new_options(Options, (…)) of all fields: in half the time of Options(…)


class Sizes(NamedTuple):
    """Of q, k and v, whether there are such arrays or not; of a plan at first as they were given, None if left out.

    Of layouts without a batch, that is 1.
    """

    dtype: Any
    batch: Any
    q_heads: Any
    kv_heads: Any
    q_len: Any
    k_len: Any
    head_dim: Any
    value_dim: Any


def spans_of(tokens: int) -> int:
    """Spans that a step over so many keys is prepared for: doubled until they suffice."""
    return 1 << (tokens - 1 >> 10).bit_length()


def our_layout(layout: Any) -> Any:
    """Our name of a layout; whatever is none stays as it is."""
    if not isinstance(layout, str) or layout in LAYOUTS:
        return layout
    lower = layout.lower()
    return lower if lower in LAYOUTS else _OURS.get(lower, layout)


def our_causal(causal: Any, q_start: Any) -> Any:
    """Our word for an alignment, which says where queries are; whatever is none stays as it is."""
    if not isinstance(causal, str) or causal not in SAME_CAUSAL:
        return causal
    if q_start is not None:
        raise ArgumentError(f"q_start: expected None with causal={causal!r}, which says where queries are; got both.")
    return SAME_CAUSAL[causal]


def padded_alike(lengths: Any, q_lengths: Any, k_lengths: Any) -> Any:
    """What `lengths=` says, of queries and of keys: it stands alone."""
    for name, x in (("q_lengths", q_lengths), ("k_lengths", k_lengths)):
        if x is not None:
            raise ArgumentError(
                f"lengths: expected None beside {name}=; got both. lengths= is of queries and keys alike; where they "
                "differ, give q_lengths= and k_lengths=."
            )
    return lengths


def scores_of(score: Any) -> list[Any]:
    """The functions, patterns and arrays of the option `score`, left to right."""
    return list(score) if isinstance(score, (list, tuple)) else [score]


@dataclass(frozen=True)
class Problem:
    """softmax(scale · QKᵀ)V for a batch of items, each with lengths and a first position of its own."""

    dtype: str  # float32, float64, float16, bfloat16
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    q_starts: tuple[int, ...]  # absolute position of the first query of each item
    k_start: int
    causal: bool
    scale: float
    mask: Expression | None = None
    score: Expression | None = None
    sinks: tuple[float, ...] | None = None  # one logit per query head
    rows: int | None = None  # of out per item, where q_lengths leave some of them without a query
    quantised: str | None = None  # dtype of codes, where keys and values are such with a scale per token and head
    items: tuple[int, ...] | None = None  # what a mask calls the items, where not 0, 1, …
    dropout: float = 0.0  # how likely a weight is dropped, after the softmax
    seed: int = 0  # of what says which
    widened: str | None = None  # dtype of keys and values where it is not q's: all is computed in float32
    shared: bool = False  # the keys and values of one item are those of all
    # of some of the keys: rows go on from a state, and may leave one (`rows`: of the state); gradients add to sums
    partial: bool = False
    first_row: int | None = None  # run for other lengths of keys, too: for rows from this position to the last key

    @property
    def batch(self) -> int:
        return len(self.q_lengths)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads if self.kv_heads else 1

    @property
    def storage(self) -> str:
        return DTYPES[self.dtype][0]

    @property
    def key_dtype(self) -> str:
        """Of keys and values in memory, where they are not codes."""
        return self.widened or self.dtype

    @property
    def key_storage(self) -> str:
        return DTYPES[self.key_dtype][0]

    @property
    def dropout_divisor(self) -> float:
        """Of the weights that dropout leaves; 1 where it leaves none."""
        return 1.0 - self.dropout if self.dropout < 1 else 1.0

    @property
    def roots(self) -> tuple[Node | None, Node | None]:
        """Of the mask's tree and of the score's."""
        return None if self.mask is None else self.mask.root, None if self.score is None else self.score.root

    @lazily
    def program(self) -> Program | None:
        """What engines lower; None without mask and score. Raises ExpressionError where an integer may leave int64."""
        return Program.of(self.mask, self.score, self.box())

    def box(self) -> dict[str, tuple[int, int]]:
        """Every position, head and item: first and last."""
        ends = [(start, start + n - 1) for start, n in zip(self.q_starts, self.q_lengths, strict=True) if n]
        rows = (min(a for a, _ in ends), max(b for _, b in ends)) if ends else (0, 0)
        last = self.k_start + max(max(self.k_lengths, default=0), 1) - 1
        if self.first_row is not None:
            rows = self.first_row, last
        items = max(self.items) if self.items else max(self.batch, 1) - 1
        return {"b": (0, items), "h": (0, max(self.q_heads, 1) - 1), "i": rows, "j": (self.k_start, last)}
