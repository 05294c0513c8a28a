"""Problem: a call as data, with its options and the sizes that fix bits."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..arrays.dtypes import DTYPES
from ..errors import ArgumentError
from ..expressions.program import Program, hiding_condition
from ..expressions.tracing import Expression
from ..expressions.tree import Node, lazily
from .options import DEFAULTS, exact_key, refuse_unknown

if TYPE_CHECKING:
    from typing_extensions import Self

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


if TYPE_CHECKING:

    class _Fields(tuple[Any, ...]):
        """A named tuple that has a field for each option of the list."""

        _fields: ClassVar[tuple[str, ...]]

        def __new__(cls, **options: Any) -> Self: ...
        def __getattr__(self, name: str) -> Any: ...
        def _replace(self, **options: Any) -> Self: ...
        def _asdict(self) -> dict[str, Any]: ...

else:
    _FIELDS = {name: x for name, x in DEFAULTS.items() if name != "lengths"}  # which is q_lengths and k_lengths
    _Fields = namedtuple("_Fields", _FIELDS, defaults=_FIELDS.values())


class Options(_Fields):
    """The options of a call, as they were given: the fields and the defaults of problem.options' list, in its order.

    An option that is added stands in the list, in the key below, and in what obeys it: nowhere between.
    """

    __slots__ = ()

    @classmethod
    def of(cls, function: Any, given: Mapping[str, Any]) -> Options:
        """Returns what a public function was given; raises for an option that it lacks."""
        if not given:
            return PLAIN
        refuse_unknown(function, given)
        if "lengths" in given:
            given = dict(given)
            both = given.pop("lengths")
            if both is not None:
                both = padded_alike(both, given.get("q_lengths"), given.get("k_lengths"))
                given |= {"q_lengths": both, "k_lengths": both}
        return cls(**given)

    @classmethod
    def of_step(cls, causal: bool, layout: str, given: Mapping[str, Any]) -> Options:
        """Returns the options of a step of a cache or pool."""
        return cls(causal=causal, layout=layout, **given) if given else _STEPS[causal, layout]

    def given(self) -> dict[str, Any]:
        """Returns the options that are not their defaults."""
        pairs = zip(self._fields, self, strict=True)
        return {name: x for name, x in pairs if not (x is DEFAULTS[name] or (type(x) is float and x == DEFAULTS[name]))}

    def spelled(self) -> Options:
        """Returns the options in our own words: layouts and alignments may have come by other libraries' names."""
        layout, causal = our_layout(self.layout), our_causal(self.causal, self.q_start)
        return self if layout is self.layout and causal is self.causal else self._replace(layout=layout, causal=causal)

    def seed_word(self) -> int:
        """Returns the seed of a call that has a key: 0 without dropout, where it says nothing."""
        return self.seed if self.dropout else 0

    def table_bytes(self) -> int:
        """Returns the bytes of what masks and scores that may be part of a key look up, which a key keeps alive."""
        return sum([t.held_bytes for x in (self.mask, self.score) if isinstance(x, Expression) for t in x.tables])

    def arrays(self) -> list[Any]:
        """Returns the arrays among mask and scores, each as often as it is given."""
        mask, score = self.mask, self.score
        if score is None:
            return [] if mask is None or type(mask) is Expression else [mask]
        return [x for x in (self.mask, *scores_of(self.score)) if not (x is None or isinstance(x, Expression))]

    key = exact_key


new_options = tuple.__new__  # new_options(Options, (…)) of all fields: in half the time of Options(…)
PLAIN = Options()  # all as by default
_STEPS = {(x, layout): Options(causal=x, layout=layout) for x in (False, True) for layout in ("bhld", "lhd")}


_MASK, _SCORE, _SCALE, _CAUSAL = map(Options._fields.index, ("mask", "score", "scale", "causal"))


def brief_options(mask: Any, score: Any, scale: Any, causal: Any) -> Options:
    """Returns Options(mask=…, score=…, scale=…, causal=…), in a fourth of the time."""
    fields = list(PLAIN)
    fields[_MASK], fields[_SCORE], fields[_SCALE], fields[_CAUSAL] = mask, score, scale, causal
    return new_options(Options, fields)


class Sizes(NamedTuple):
    """Sizes of q, k and v, whether there are such arrays or not; of a plan at first as they were given, None if left
    out.

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
    """Returns `lengths=`, which stands alone, as lengths of queries and of keys."""
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
        """The dtype of keys and values in memory, where they are not codes."""
        return self.widened or self.dtype

    @property
    def key_storage(self) -> str:
        return DTYPES[self.key_dtype][0]

    @property
    def dropout_divisor(self) -> float:
        """The divisor of the weights that dropout keeps; 1 where it keeps none."""
        return 1.0 - self.dropout if self.dropout < 1 else 1.0

    @property
    def roots(self) -> tuple[Node | None, Node | None]:
        """The roots of the mask's tree and of the score's."""
        return None if self.mask is None else self.mask.root, None if self.score is None else self.score.root

    @property
    def uses(self) -> frozenset[str]:
        """The symbols that decide what is hidden: of the mask, and of a score's condition for a number."""
        mask, score = self.roots
        return frozenset[str]().union(*[x.uses for x in (mask, hiding_condition(score)) if x is not None])

    def kinds(self, heads: int, *, apart: bool = False) -> Iterator[tuple[int, int, int]]:
        """Yields item, head (of so many) and how many are like it, once for all that lengths, positions and what is
        hidden cannot tell apart; `apart`: every item.
        """
        items: dict[Any, list[int]] = {}
        by_item, by_head = apart or "b" in self.uses, "h" in self.uses
        for item, key in enumerate(zip(self.q_lengths, self.k_lengths, self.q_starts, strict=True)):
            items.setdefault((key, item if by_item else 0), []).append(item)
        for alike in items.values():
            for head in range(heads if by_head else min(1, heads)):
                yield alike[0], head, len(alike) * (1 if by_head else heads)

    @lazily
    def program(self) -> Program | None:
        """The program that engines lower; None without mask and score. Raises ExpressionError where an integer may
        leave int64.
        """
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
