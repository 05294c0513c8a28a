"""Options of a call: the list of them, with the type, default and documentation of each, and a record of their values.

Public calls take `**options` of one of the dicts below. signatures.public() gives them the signature, the documentation
and the errors of an argument that they lack. Options holds the values of a call.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from typing import Annotated, Any, Literal, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np

from ..errors import ArgumentError
from ..expressions.tables import Table
from ..expressions.tracing import Expression, MaskFunction, ScoreFunction
from .option_keys import ARRAY, fits_any_keys, key_of_traced, key_of_values
from .problem import LAYOUTS
from .signatures import refuse_unknown

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
_Kind = TypeVar("_Kind", covariant=True)


class ArrayOf(Protocol[_Kind]):
    """An array of any library, which a type checker knows by what its method returns, without importing any: of a
    Parameter a Tensor, of an array an array of any shape, of what is not typed Any.
    """

    def squeeze(self) -> _Kind: ...


class TorchDtype(Protocol):
    """A torch.dtype."""

    @property
    def is_floating_point(self) -> bool: ...


AnyArray = ArrayOf[Any]
Keys = AnyArray | tuple[AnyArray, AnyArray] | list[AnyArray]  # or two parts, side by side along head_dim
Int = SupportsIndex  # Python's, NumPy's, a tensor of one
Ints = Sequence[Int] | AnyArray
BlockTable = AnyArray | Sequence[Ints]
Scales = float | AnyArray  # of codes in pages
Indices = AnyArray | Sequence[Any]
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
DtypeName = Literal["float32", "float64", "float16", "bfloat16", "int8", "float8_e4m3fn", "int4"]
Dtype = DtypeName | Literal["fp8", "fp8_e4m3", "float8_e4m3", "q4_0"] | np.dtype[Any] | type[Any] | TorchDtype


class ScoreOptions(TypedDict, total=False):
    """Options of every call, over ranks, too: `name: Annotated["type", default, "documentation"]`."""

    mask: Annotated["Mask | None", None, "keys that a query sees: a function (b, h, i, j) -> bool, a pattern, …"]
    score: Annotated["Scores | None", None, "how scores change: a function (s, b, h, i, j) -> s, a pattern, …"]
    sink_logits: Annotated["Sinks | None", None, "a score per query head that joins the softmax's denominator alone."]
    scale: Annotated["float | None", None, "factor of the scores. Default 1/sqrt(head_dim)."]


class StepOptions(ScoreOptions, total=False):
    """Options of every call of attention on one machine."""

    indices: Annotated["Indices | None", None, "the keys that each query may see, by number, (batch, q_len, k)."]
    dropout: Annotated["float", 0.0, "probability that a weight becomes 0 after the softmax."]
    seed: Annotated["Int | None", None, "key of dropout's random numbers, an int of 64 bits."]


class QueryOptions(TypedDict, total=False):
    """Options of where queries are."""

    causal: Annotated["Causal", False, "hides keys after the query, aligned at the end, or at the start (top-left)."]
    window: Annotated["Window | None", None, "(left, right): hides keys before i - left and after i + right."]
    q_start: Annotated["Int | Ints | None", None, "absolute position of the first query, an int or one per item."]
    layout: Annotated["Layout", "bhld", "order of the arrays' dimensions."]
    cu_seqlens_q: Annotated["Ints | None", None, "for layout lhd, offsets of the sequences in q."]
    q_lengths: Annotated["Ints | None", None, "for a padded batch, queries of each item."]


class KeyOptions(TypedDict, total=False):
    """Options of where keys are, and of lengths of both."""

    k_start: Annotated["Int", 0, "absolute position of the first key, a multiple of 1024."]
    cu_seqlens_k: Annotated["Ints | None", None, "for layout lhd, offsets of the sequences in k and v."]
    k_lengths: Annotated["Ints | None", None, "for a padded batch, keys of each item."]
    lengths: Annotated["Ints | None", None, "for a padded batch, tokens of each item, queries and keys alike."]


class PagedOptions(StepOptions, QueryOptions, total=False):
    """Options of attention_paged()."""


class ShardOptions(ScoreOptions, QueryOptions, KeyOptions, total=False):
    """Options of attention over shards, which drops nothing."""


class WeightOptions(ShardOptions, total=False):
    """Options of key_weights()."""

    indices: Annotated["Indices | None", None, "the keys that each query may see, by number, (batch, q_len, k)."]


class AttentionOptions(PagedOptions, KeyOptions, total=False):
    """Options of attention(), attention_backward() and plan(), for code that passes them on.

    >>> import numpy as np, speedlight as sl
    >>> options: sl.AttentionOptions = {"causal": True, "window": (64, 0)}
    >>> q = np.ones((1, 2, 3, 4), np.float32)
    >>> sl.attention(q, q, q, **options).shape, sl.plan(q, q, q, **options).visible_pairs
    ((1, 2, 3, 4), 12)
    """


class AllOptions(AttentionOptions, total=False):
    """Every option."""

    precision: Annotated["Precision", "ieee", "of float32 products on a GPU."]


class ArrayCall(AllOptions, total=False):
    """Options of attention(), the array that it writes to and the engine."""

    out: AnyArray | None
    engine: Engine | None
    value_dim: Int | None


class PagedCall(PagedOptions, total=False):
    """Options of attention_paged(), the array that it writes to, the engine, and scales of codes."""

    out: AnyArray | None
    engine: Engine | None
    value_dim: Int | None
    k_scales: Scales | None
    v_scales: Scales | None


class StepCall(StepOptions, total=False):
    """Options of KVCache.attend() and PagePool.attend(), lengths and the array that they write to."""

    new_lengths: Ints | None
    q_lengths: Ints | None
    out: AnyArray | None


MOST_SEEDS = 1 << 64  # a seed is the key of dropout's random numbers
DEFAULTS: dict[str, Any] = {name: x.__metadata__[0] for name, x in AllOptions.__annotations__.items()}
BY_HEAD = ("sink_logits",)  # options that have an entry for each query head

# Names of layouts in other libraries, of either case: n is heads beside s or t (Ascend, JAX), tokens beside h and d.
SAME_LAYOUTS = {
    "bhld": ("bhsd", "bhtd", "bhnd", "bnsd", "bntd", "bnsh", "bnth"),
    "blhd": ("bshd", "bthd", "bnhd", "bsnd", "btnd", "bsnh", "btnh"),
    "lhd": ("thd", "shd", "nhd", "tnd"),
}
# PyTorch's and flash-attn's names of alignments (torch.nn.attention.bias).
SAME_CAUSAL: dict[str, bool | str] = {"bottom-right": True, "lower-right": True, "upper-left": "top-left"}
_OURS = {theirs: ours for ours, those in SAME_LAYOUTS.items() for theirs in those}

_NUMBER = frozenset((int, float))
_NUMBER_OR_NONE = frozenset((int, float, type(None)))
_INT_OR_NONE = frozenset((int, type(None)))
_BOOL_OR_STR = frozenset((bool, str))
_FIXED = frozenset((type(None), bool, int, float, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a call, as they were given, with the names, types and defaults of AllOptions; frozen.

    `lengths` is in `q_lengths` and `k_lengths`.
    """

    mask: Mask | None = None
    score: Scores | None = None
    sink_logits: Sinks | None = None
    scale: float | None = None
    indices: Indices | None = None
    dropout: float = 0.0
    seed: Int | None = None
    causal: Causal = False
    window: Window | None = None
    q_start: Int | Ints | None = None
    layout: Layout = "bhld"
    cu_seqlens_q: Ints | None = None
    q_lengths: Ints | None = None
    k_start: Int = 0
    cu_seqlens_k: Ints | None = None
    k_lengths: Ints | None = None
    precision: Precision = "ieee"

    @classmethod
    def of(cls, function: Any, given: Mapping[str, Any]) -> "Options":
        """Returns the options that a public function was given; raises for an option that it lacks."""
        if not given:
            return PLAIN
        refuse_unknown(function, given)
        if "lengths" in given:
            given = dict(given)
            both = given.pop("lengths")
            if both is not None:
                both = padded_alike(both, given.get("q_lengths"), given.get("k_lengths"))
                given |= {"q_lengths": both, "k_lengths": both}
        return new_options(**given)

    @classmethod
    def of_step(cls, causal: bool, layout: Layout, given: Mapping[str, Any]) -> "Options":
        """Returns the options of a step of a cache or pool."""
        return new_options(causal=causal, layout=layout, **given) if given else STEPS[causal, layout]

    def given(self) -> dict[str, Any]:
        """Returns the options that are not their defaults, by name."""
        found = {}
        for name in OPTION_NAMES:
            x, default = getattr(self, name), DEFAULTS[name]
            if not (x is default or (type(x) is float and x == default)):
                found[name] = x
        return found

    def spelled(self) -> "Options":
        """Returns the options in our words: layouts and alignments may have come by other libraries' names."""
        layout, causal = our_layout(self.layout), our_causal(self.causal, self.q_start)
        if layout is self.layout and causal is self.causal:
            return self
        return replace(self, layout=layout, causal=causal)

    def seed_word(self) -> int:
        """Returns the seed of a call that has a key: 0 without dropout, where it says nothing."""
        seed: Any = self.seed
        return seed if self.dropout else 0

    def table_bytes(self) -> int:
        """Returns the bytes that tables of mask and score keep alive with a memo key."""
        return sum([t.held_bytes for x in (self.mask, self.score) if isinstance(x, Expression) for t in x.tables])

    def arrays(self) -> list[Any]:
        """Returns the arrays among mask and scores, each as often as it is given."""
        mask, score = self.mask, self.score
        if score is None:
            return [] if mask is None or type(mask) is Expression else [mask]
        if mask is None and type(score) is not list and not isinstance(score, (Expression, tuple)):
            return [score]
        return [x for x in (mask, *scores_of(score)) if not (x is None or isinstance(x, Expression))]

    def key(self) -> tuple[Any, ...] | None:
        """Returns keyed()'s memo key, where masks and scores are expressions; None for arrays."""
        return self.keyed(key_of_traced)[0]

    def keyed(self, key_of_mask: Callable[[Any], Any]) -> tuple[tuple[Any, ...] | None, int]:
        """Returns a memo key, equal for options that mean the same to the bit, and `rows` as read_plainly() has it.

        The key is None for a type that may change. Types and bits count: 0.0 is not -0.0, True is not 1. Lists count by
        the values that they hold now. The seed is left out, since it is an argument of every run. rows is 0 for a call
        that is not kept for any number of keys.

        Args:
            key_of_mask: returns the key of a mask or score: key_of_traced(), or key_of_repeated() where arrays are read
                apart.
        """
        known = known_keys.get(id(self))
        if known is not None:
            return known
        scale, dropout, causal, q_start, k_start = self.scale, self.dropout, self.causal, self.q_start, self.k_start
        layout, precision = self.layout, self.precision
        if not (
            type(causal) in _BOOL_OR_STR
            and type(q_start) in _INT_OR_NONE
            and type(k_start) is int
            and type(scale) in _NUMBER_OR_NONE
            and type(layout) is str
            and type(precision) is str
            and type(dropout) in _NUMBER
            and self.indices is None
        ):
            return None, 0
        mask: Any = self.mask
        score: Any = self.score
        if not mask is score is None:
            mask = None if mask is None else key_of_mask(mask)
            score = None if score is None else key_of_mask(score)
            if mask is ... or score is ...:
                return None, 0
        exactly = scale or (scale is not None and str(scale))  # 0.0 and -0.0 are equal, their texts are not
        key = (causal, q_start, k_start, type(scale), exactly, layout, precision, mask, score)
        if dropout:
            if not (0 < dropout <= 1 and type(self.seed) is int and 0 <= self.seed < MOST_SEEDS):
                return None, 0
            key += (float(dropout),)
        rows = _ROWS.get(layout, 0) if q_start is None and not k_start and type(causal) is bool else 0
        window, sinks = self.window, self.sink_logits
        if not mask is score is None:
            if mask in _ARRAY_OR_NONE and score in _ARRAY_OR_NONE:  # a row for each query: see _rows_of_masks()
                rows += 4 * (rows > 0 and window is None)
            else:
                rows = self._rows_of_masks(rows)
        cu_q, cu_k, q_lengths, k_lengths = self.cu_seqlens_q, self.cu_seqlens_k, self.q_lengths, self.k_lengths
        if window is sinks is cu_q is cu_k is q_lengths is k_lengths is None:
            return key, rows
        values = tuple(map(key_of_values, (window, sinks, cu_q, cu_k, q_lengths, k_lengths)))
        if ... in values:
            return None, 0
        return key + values, rows if cu_q is cu_k is q_lengths is k_lengths is None else 0

    def _rows_of_masks(self, rows: int) -> int:
        """Returns `rows` of a call with a mask or score: 0 where a table has an entry for each key."""
        added = [self.mask, *scores_of(self.score)]
        if not rows or not fits_any_keys(added):
            return 0
        # a row for each query: then the first row's position is told from other numbers
        has_rows = self.window is None and Expression not in map(type, added)
        return rows + 4 * has_rows

    def is_fixed(self) -> bool:
        """Returns whether every option but mask and score is of a type that never changes."""
        return _FIXED.issuperset(map(type, _all_but_masks(self)))


_ROWS = {"bhld": 2, "blhd": 1}  # the dimension of rows
_ARRAY_OR_NONE = (None, ARRAY)
# what keyed() returns for options that live as long as the process, by their ids
known_keys: dict[int, tuple[tuple[Any, ...] | None, int]] = {}
_MOST_KNOWN = 256
_steady: list[Options] = []  # they


def _know(options: Options) -> Options:
    """Keeps options, which have no mask and score, for good, with their memo key; returns them."""
    if len(_steady) < _MOST_KNOWN:
        _steady.append(options)
        known_keys[id(options)] = options.keyed(key_of_traced)
    return options


def _freeze(options: Any) -> None:
    """Gives filled options their class, which refuses changes."""
    options.__class__ = Options


# new_options(…) is Options(…) in 0.9 µs instead of 2.3; a NumPy call takes 15. A frozen dataclass fills each field
# through object.__setattr__. This fills a class of the same slots that is not frozen, then changes the class.
new_options: type[Options] = make_dataclass(
    "Options",
    [(x.name, x.type, x.default) for x in fields(Options)],
    namespace={"__post_init__": _freeze},
    slots=True,
    kw_only=True,
)
OPTION_NAMES = tuple([x.name for x in fields(Options)])
_all_but_masks = operator.attrgetter(*[x for x in OPTION_NAMES if x not in ("mask", "score")])
PLAIN = _know(Options())  # all as by default
STEPS = {(x, layout): _know(Options(causal=x, layout=layout)) for x in (False, True) for layout in ("bhld", "lhd")}
TOP_LEFT = _know(Options(causal="top-left"))  # as PyTorch's is_causal


@functools.lru_cache(64, typed=True)
def usual_options(causal: Causal, scale: float | None, layout: Layout) -> Options:
    """Returns options with no others than these, in a fifth of the time that new ones and their memo key take.

    Args:
        causal: a bool or str.
        scale: None or a float, and not 0.0, which equals -0.0.
    """
    return _know(Options(causal=causal, scale=scale, layout=layout))


def our_layout(layout: Any) -> Any:
    """Returns our name of a layout; any other value stays as it is."""
    if not isinstance(layout, str) or layout in LAYOUTS:
        return layout
    lower = layout.lower()
    return lower if lower in LAYOUTS else _OURS.get(lower, layout)


def our_causal(causal: Any, q_start: Any) -> Any:
    """Returns our word for an alignment, which says where queries are; any other value stays as it is."""
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
    """Returns the functions, patterns and arrays of the option `score`, left to right."""
    return list(score) if isinstance(score, (list, tuple)) else [score]
