"""List of options: the type, default and documentation of each, and the types of arguments.

Public calls take `**options` of one of these dicts. `public` gives them the signature, the documentation and the errors
of an argument that they lack. problem.Options holds the values of a call.
"""

import functools
import inspect
import marshal
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ForwardRef, Literal, Protocol, SupportsIndex, TypedDict, TypeVar

import numpy as np

from ..arrays.array import listed
from ..errors import Error
from ..errors.advice import explain, unknown
from ..expressions.tables import Table
from ..expressions.tracing import Expression, MaskFunction, ScoreFunction, key_of_expression
from ..host.graph_breaks import in_graph, outside
from ..host.insides import TORCH

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")
_Kind = TypeVar("_Kind", covariant=True)
_F = TypeVar("_F", bound=Callable[..., Any])


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


class ScoreOptions(TypedDict, total=False):
    """Options of every call, over ranks, too: `name: Annotated["type", default, "documentation"]`."""

    mask: Annotated["Mask | None", None, "keys that a query sees: a function (b, h, i, j) -> bool, a pattern, …"]
    score: Annotated["Scores | None", None, "how scores change: a function (s, b, h, i, j) -> s, a pattern, …"]
    sink_logits: Annotated["Sinks | None", None, "a score per query head that joins the softmax's denominator alone."]
    scale: Annotated["float | None", None, "factor of the scores. Default 1/sqrt(head_dim)."]


class StepOptions(ScoreOptions, total=False):
    """Options of every call of attention on one machine."""

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


class PagedCall(PagedOptions, total=False):
    """Options of attention_paged(), the array that it writes to and the engine."""

    out: AnyArray | None
    engine: Engine | None


class StepCall(StepOptions, total=False):
    """Options of KVCache.attend() and PagePool.attend(), lengths and the array that they write to."""

    new_lengths: Ints | None
    q_lengths: Ints | None
    out: AnyArray | None


_OR_NONE, _NUMBER = frozenset((int, float, type(None))), frozenset((int, float))
_CAUSAL, _POSITION, _SCALE = frozenset((bool, str)), frozenset((int, type(None))), _OR_NONE
MOST_SEEDS = 1 << 64  # a seed is the key of dropout's random numbers
_MOST_VALUES = 4096  # of a list that a key may hold
DEFAULTS: dict[str, Any] = {name: x.__metadata__[0] for name, x in AllOptions.__annotations__.items()}
BY_HEAD = ("sink_logits",)  # options that have an entry for each query head


def exact_key(options: Sequence[Any], form: Callable[[Any], Any] | None = None) -> tuple[Any, ...] | None:
    """Returns what is equal for options that mean the same to the bit; None for a type that may change or is odd.

    Types and bits count: 0.0 is not -0.0, True not 1. Of lists the values that they hold now; masks and scores that are
    expressions are known by what they compute, and by where the arrays lie that they look up. A seed is none of it: it
    is a word of every call, and another one would come with each. `form`: of masks and scores, where arrays may be part
    of a key: form_of.
    """
    (
        mask, score, sinks, scale, dropout, seed, causal, window, q_start, layout, cu_q, q_lens, k_start, cu_k,
        k_lens, precision,
    ) = options  # fmt: skip  # in the order of the list: by name in three times the time
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
    if not mask is score is None:
        form = form or _form_of_function
        mask, score = form(mask), form(score)
        if mask is ... or score is ...:
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


def _form_of_function(x: Any) -> Any:
    """Returns what a prepared call depends on of a mask or score that is an expression. ... for anything else."""
    if x is None:
        return None
    return key_of_expression(x) if type(x) is Expression else ...


def form_of(x: Any, keys: int | None = None, rows: int = 1) -> Any:
    """Returns what a prepared call depends on of a mask or score: an expression itself, of an array that nobody follows
    shape, strides and dtype; of a list, of each. ... for what may change.

    keys: where the number of keys may change from call to call: then the form of an array that has as many columns, and
    one row or `rows`, and of an expression that does not depend on how many there are.
    """
    if x is None:
        return None
    kind = type(x)
    if kind is Expression:
        if keys is not None and any([t.of_keys for t in x.tables]):
            return ...
        return key_of_expression(x)
    if kind is list or kind is tuple:
        forms = tuple([form_of(one, keys) for one in x])
        return ... if ... in forms else forms
    if kind is np.ndarray:
        form = x.shape, x.strides, x.dtype
    else:
        torch = sys.modules.get("torch")
        if torch is None or kind is not torch.Tensor or not x.is_cpu or x.is_nested:
            return ...
        if x.layout is not torch.strided or x.is_neg():
            return ...
        if (x.requires_grad and torch.is_grad_enabled()) or TORCH.forward_ad._current_level >= 0:
            return ...
        form = x.shape, x.stride(), x.dtype
    if keys is None:
        return form
    shape = form[0]
    if len(shape) > 1 and shape[-1] == keys > 1 and shape[-2] in (1, rows):
        return shape[:-1], form[1][-1], form[2]
    return ...


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


def public(options: Any = None, *, leaves_graph: bool = True, has_frame: bool = True) -> Callable[[_F], _F]:
    """Makes a function public: help() and inspect show each of its options, and errors of arguments that it lacks, or
    that other libraries name otherwise, say what to write.

    Args:
        options: the dict above that its `**options` take. Without any, `**theirs` are only there to be refused.
        leaves_graph: torch.compile does not look into it: memory addresses mean nothing to a tracer.
        has_frame: False where a signal must not come between a result and the caller: when a decorator's call returns,
            signals are looked for. Such a function leaves graphs and calls refuse_unknown() itself.
    """

    def decorate(function: _F) -> _F:
        _describe(function, options)
        if not has_frame:
            return function

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            if leaves_graph and "torch._dynamo" in sys.modules and in_graph():  # asked here first: a call costs more
                return outside(function, *args, **given)
            try:
                return function(*args, **given)
            except (TypeError, Error) as error:  # of arguments that do not fit, and of ours: hints say more
                explain(error, function, args, given)
                raise

        return call  # pyright: ignore[reportReturnType]

    return decorate


def refuse_unknown(function: Any, given: Mapping[str, Any]) -> None:
    """Raises for the first argument that a public function has no such option for."""
    if not function.options.issuperset(given):
        name, *_ = [x for x in given if x not in function.options]
        raise unknown(function, name)


def _describe(function: Any, options: Any) -> None:
    """Gives a function the names, the signature, the types and the documentation of its options."""
    listed = {} if options is None else options.__annotations__
    own = inspect.signature(function)
    if last := [x.name for x in own.parameters.values() if x.kind is x.VAR_KEYWORD]:
        shown = [x for x in own.parameters.values() if x.name != last[0]]
        names = {name: x.__origin__.__forward_arg__ for name, x in listed.items()}
        shown += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=names[name])
            for name in names
        ]
        function.__signature__ = own.replace(parameters=shown)
        del function.__annotations__[last[0]]
        function.__annotations__ |= {name: ForwardRef(x, module=__name__) for name, x in names.items()}
        function.options = frozenset(listed)
    lines = "".join([f"\n{{0}}{name}: {x.__metadata__[1]}" for name, x in listed.items()])
    given = re.compile(r"^( +)\*\*options: .*(\n\1 +.*)*$|^( +)q, k, v, .*\*\*options: .*$", re.MULTILINE)
    function.__doc__ = given.sub(lambda x: x[0] + lines.replace("{0}", x[1] or x[3]), function.__doc__ or "") or None
