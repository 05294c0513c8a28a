"""Masks of transformers as a few numbers and expressions: no tensor of q_len x kv_len is made.

transformers composes a mask of small functions of positions. Those that it makes itself are known by their code, and
become options of attention(); any other is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers.masking_utils as theirs

from .. import ArgumentError, Expression, UnsupportedError, documents, expression, padding, table, window
from .. import softcap as softcap_pattern
from ..adapting import warn_once
from ..host.insides import TORCH
from ..host.insides import TRANSFORMERS as INSIDES
from ..torch.attending import Options


def _is_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


def _code_of(make: Any, given: tuple[Any, ...], keeps: tuple[str, ...], rule: Any) -> Any:
    """Returns the code by which mask functions that a function of transformers makes are known.

    If this release lacks it, or its functions keep what they are given under other names or show other keys than
    `rule`, no function has that code: they are traced, as other people's are.
    """
    found: Any = None if make is None else make(*given)
    if found is None or not set(keeps) <= set(getattr(getattr(found, "__code__", None), "co_freevars", ())):
        return object()
    i, j = torch.arange(4)[:, None], torch.arange(4)[None]
    return found.__code__ if torch.equal(found(0, 0, i, j), rule(i, j)) else object()


_CAUSAL = INSIDES.causal_mask_function or _is_causal
_ALL = INSIDES.bidirectional_mask_function
_IDS = torch.tensor([[0, 0, 1, 1]])
_PLACES = torch.tensor([[0, 1, 0, 1]])
_AND = _code_of(
    INSIDES.and_masks, (_is_causal, lambda b, h, i, j: j > i - 2), ("mask_functions",),
    lambda i, j: (j <= i) & (j > i - 2),
)  # fmt: skip
_SLIDING = _code_of(INSIDES.sliding_window_overlay, (2,), ("sliding_window",), lambda i, j: j > i - 2)
_SLIDING_BOTH = _code_of(
    INSIDES.sliding_window_bidirectional_overlay, (1,), ("sliding_window",), lambda i, j: (i - j).abs() <= 1
)
_CHUNKED = _code_of(
    INSIDES.chunked_overlay, (2, torch.tensor([1])), ("chunk_size", "left_padding"),
    lambda i, j: (i - 1) // 2 == (j - 1) // 2,
)  # fmt: skip
_PACKED = _code_of(
    INSIDES.packed_sequence_mask_function, (_IDS,), ("packed_sequence_mask",), lambda i, j: _IDS[0, i] == _IDS[0, j]
)
_REMAPPED = _code_of(
    INSIDES.remap_positions_for_packed_sequence, (_is_causal, _PLACES), ("mask_function", "position_ids"),
    lambda i, j: _PLACES[0, j] <= _PLACES[0, i],
)  # fmt: skip
# models that add keys of their own, and then to the mask, if it is a tensor
_TENSORS = frozenset(("deepseek_v4",))
# the padding seen last, of all models: its expression is taken again while masks say the same, as they do from token
# to token of a generation
_last_padding: tuple[torch.Tensor, Expression] | None = None


@functools.lru_cache(64)
def softcap_score(softcap: float | None) -> Expression | None:
    """Returns the score function of a model's softcap: the same one each time."""
    return None if softcap is None else softcap_pattern(softcap)


@functools.lru_cache(64)
def _window(left: int | None, right: int | None) -> tuple[int | None, int | None]:
    """Returns a window: the same object each time, by which a repeated call knows it."""
    return left, right


class _Pattern(NamedTuple):
    """Parts of a mask function; all of them hold."""

    causal: bool = False
    left: int | None = None  # keys that a query sees before its own
    right: int | None = None
    packed: torch.Tensor | None = None  # (batch, length): which of its sequences a token belongs to
    others: tuple[Callable[..., Any], ...] = ()


class MaskSpec:
    """Mask that attention_mask() gives to a model, which passes it on to attention_forward().

    It is what a tensor of shape (batch, 1, q_len, k_len) would say, and becomes that tensor where a model computes with
    it. Positions count from a sequence's first token: of the queries from q_offset on, of the keys from kv_offset on.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> from speedlight.transformers import attention_mask
    >>> attention_mask(1, 8, 8, mask_function=sliding_window_causal_mask_function(4))
    MaskSpec(batch=1, q_len=8, k_len=8, q_offset=0, kv_offset=0, causal=True, window=(3, None))
    """

    __slots__ = (
        "__weakref__", "_cut", "_dense", "_in_cache", "_is_compared", "_make_dense", "_options", "_records", "batch",
        "k_len", "kv_offset", "padded", "pattern", "q_len", "q_offset",
    )  # fmt: skip

    def __init__(
        self,
        batch: int,
        lengths: tuple[int, int],
        offsets: tuple[int, int],
        pattern: _Pattern,
        padded: Any,
        make_dense: Callable[[], torch.Tensor],
    ) -> None:
        self.batch, (self.q_len, self.k_len), (self.q_offset, self.kv_offset) = batch, lengths, offsets
        self.pattern = pattern
        self.padded: torch.Tensor | None = padded  # (batch, at least kv_offset + k_len), if it hides anything
        self._make_dense = make_dense
        self._dense: torch.Tensor | None = None
        self._options: dict[str, Any] | None = None
        self._records: dict[Any, Options] = {}  # by a scale and its type, a softcap; of steps by a length, too
        self._cut: MaskSpec | None = None
        self._is_compared = False  # with position_ids: every layer has the same
        self._in_cache: dict[int | None, Expression | None] = {}

    def __repr__(self) -> str:
        p = self.pattern
        parts = [f"{n}={getattr(self, n)}" for n in ("batch", "q_len", "k_len", "q_offset", "kv_offset")]
        parts += [f"causal={p.causal}"]
        parts += [f"window={(p.left, p.right)}"] if p.left is not None or p.right is not None else []
        parts += ["padded"] if self.padded is not None else []
        parts += ["packed"] if p.packed is not None else []
        parts += [f"others={len(p.others)}"] if p.others else []
        return f"MaskSpec({', '.join(parts)})"

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that it stands for."""
        return torch.Size((self.batch, 1, self.q_len, self.k_len))

    ndim = 4

    def contiguous(self) -> MaskSpec:
        """Returns itself: generate() asks, where a cache is static."""
        return self

    def dense(self) -> torch.Tensor:
        """Returns the tensor that it stands for, as "eager" has it: 0 where a key is seen, else the least of the dtype.

        It is made once. Memory grows with q_len times k_len.
        """
        if self._dense is None:
            self._dense = self._make_dense()
        return self._dense

    def to(self, *args: Any, **options: Any) -> Any:
        """Returns itself on a device, and a tensor in a dtype."""
        if any([isinstance(x, (torch.dtype, torch.Tensor)) for x in (*args, *options.values())]):
            return self.dense().to(*args, **options)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"MaskSpec has no attribute {name!r}.")
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.dense()[index]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        plain = lambda x: x.dense() if type(x) is MaskSpec else x  # noqa: E731
        return function(*TORCH.tree_map(plain, args), **TORCH.tree_map(plain, options or {}))

    @property
    def looks_at_queries(self) -> bool:
        """Tells if it matters which position a query has."""
        p = self.pattern
        return bool(p.causal or p.left is not None or p.right is not None or p.packed is not None or p.others)

    def compare(self, positions: Any) -> None:
        """Warns once where position_ids begin anew in a row, and the mask lets its documents see each other."""
        if self._is_compared:
            return
        self._is_compared = True
        p = self.pattern
        if not p.causal or p.packed is not None or p.others or self.padded is not None:
            return
        if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or positions.shape[1] != self.q_len:
            return
        if positions.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing may wait for the device
            return
        if (positions[:, 1:] < positions[:, :-1]).any():
            warn_once(
                "packed position_ids",
                "position_ids: they begin anew in a row, but its documents see each other, as with 'eager': "
                "transformers tells documents apart only without attention_mask and without a cache. To keep them "
                "apart, leave attention_mask out and give use_cache=False.",
            )

    def options(self) -> dict[str, Any]:
        """Returns attention()'s options over keys of which the first is at kv_offset; of one mask, made once."""
        if self._options is None:
            self._options = self._make_options()
        return self._options

    def cut(self) -> MaskSpec:
        """Returns the mask over the keys up to the last query's; it hides those behind, which a static cache has not
        taken yet. Itself, if there are none.
        """
        if self._cut is None:
            end = self.q_offset + self.q_len - self.kv_offset
            if not self.pattern.causal or self.pattern.packed is not None or not 0 < end < self.k_len:
                return self
            lengths, offsets = (self.q_len, end), (self.q_offset, self.kv_offset)
            make = lambda: self.dense()[..., :end]  # noqa: E731
            self._cut = MaskSpec(self.batch, lengths, offsets, self.pattern, self.padded, make)
        return self._cut

    def record(self, scale: float | None, softcap: float | None) -> tuple[MaskSpec, Options | None]:
        """Returns cut(), and its options of a call without others; None of packed sequences."""
        key = type(scale), scale, softcap
        found = self._records.get(key)
        if found is None:
            options = self.cut().options()
            if "cu_seqlens_q" not in options:
                found = self._records[key] = Options(**options, scale=scale, score=softcap_score(softcap))
        return (self if self._cut is None else self._cut), found

    def step_record(self, length: int | None, scale: float | None, softcap: float | None) -> Options:
        """Returns the options of a step of a cache, as in_cache() has it."""
        key = length, type(scale), scale, softcap
        found = self._records.get(key)
        if found is None:
            given = {"mask": self.in_cache(length), "scale": scale, "score": softcap_score(softcap)}
            found = self._records[key] = Options.of_step(True, "bhld", given)
        return found

    def _make_options(self) -> dict[str, Any]:
        p, first = self.pattern, self.kv_offset
        start = self.q_offset - first  # of the first query, counted from the first key
        options: dict[str, Any] = {}
        if p.packed is not None and self.batch == 1 and not p.others:
            ends = [*(p.packed[0].diff().nonzero()[:, 0] + 1).tolist(), self.k_len]
            options["cu_seqlens_q"] = [0, *ends]
        if p.causal and start < self.k_len - 1:
            options["causal"] = True
        left = None if p.left is None or start + self.q_len - 1 <= p.left else p.left
        right = None if p.right is None or self.k_len - 1 - start <= p.right else p.right
        if left is not None or right is not None:
            options["window"] = _window(left, right)
        masks = [_shift(f, first) for f in p.others]
        if p.packed is not None and "cu_seqlens_q" not in options:
            masks.append(documents(p.packed))
        if self.padded is not None:
            seen = self.padded[:, first : first + self.k_len]
            lengths = _count_if_right(seen)
            if lengths is not None:
                options["k_lengths"] = lengths
            elif self.q_len == 1 and not masks:  # as the array that it is: each step has another
                options["mask"] = seen[:, None, None]
            else:
                masks.append(_make_padding(seen))
        if masks:
            options["mask"] = _join(masks)
        if options and ("k_lengths" in options or start != self.k_len - self.q_len):  # else where it is by default
            options["q_start"] = start
        return options

    def in_cache(self, length: int | None) -> Expression | None:
        """Returns the mask over a cache that holds every token, or shows the last `length` itself, of queries that see
        no later key anyway.
        """
        if length not in self._in_cache:
            p = self.pattern
            masks = [expression(f, "mask") for f in p.others]
            if p.packed is not None:
                masks.append(documents(p.packed))
            if p.left is not None and p.left + 1 != length:
                masks.append(window(p.left, None))
            if self.padded is not None:
                masks.append(_make_padding(self.padded, in_cache=True))
            self._in_cache[length] = _join(masks) if masks else None
        return self._in_cache[length]


def _operator(name: str) -> Any:
    """Returns a method of MaskSpec: a tensor's, for numbers and tensors."""

    def operate(self: MaskSpec, *others: Any) -> Any:
        if not all([isinstance(x, (int, float, torch.Tensor)) for x in others]):
            return NotImplemented
        return getattr(self.dense(), name)(*others)

    return operate


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "eq", "ne", "lt", "le", "gt", "ge", "invert"):
    setattr(MaskSpec, f"__{_name}__", _operator(f"__{_name}__"))


def _make_dense(config: Any, options: dict[str, Any]) -> torch.Tensor:
    """Returns transformers' own tensor of a mask, for models that compute with it and hand it on to attention."""
    if config is not None and _attends_itself(type(config)):
        raise UnsupportedError(
            f"attn_implementation: models of {type(config).__name__} compute attention themselves, and would as ever; "
            "got 'speedlight'. Leave attn_implementation out; inside speedlight.torch.sdpa() what the model asks of "
            "PyTorch's attention comes here."
        )
    return theirs.eager_mask(**options)


def _attends_itself(config: type) -> bool:
    """Tells if a model of this config asks nobody for its attention, as far as transformers can say."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found: Any = MODEL_MAPPING.get(config, ())  # pyright: ignore[reportArgumentType]
    if INSIDES.can_set_attn_implementation is None:
        return False
    return not all([x._can_set_attn_implementation() for x in (found if isinstance(found, tuple) else (found,))])


@torch.compiler.disable
def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = _CAUSAL,
    attention_mask: torch.Tensor | MaskSpec | None = None,
    **more: Any,
) -> MaskSpec | torch.Tensor:
    """Makes a mask for `attn_implementation="speedlight"`, as transformers calls it.

    Args:
        batch_size, q_length, kv_length: sizes of the mask.
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: (b, h, q_idx, kv_idx) -> bool, True where a key is seen, as transformers.masking_utils makes
            them, or any function of numbers and of tensors that it looks up.
        attention_mask: (batch_size, length) of bool, False where a token is padding; keys past its end are hidden.
        more: config, dtype, device, use_vmap: of the tensor, where a model computes with its mask. local_size,
            allow_is_causal_skip, allow_is_bidirectional_skip: what other implementations need.

    Raises:
        speedlight.Error: a mask function that cannot be traced, with the line.

    >>> from speedlight.transformers import attention_mask
    >>> attention_mask(2, 4, 4)
    MaskSpec(batch=2, q_len=4, k_len=4, q_offset=0, kv_offset=0, causal=True)
    """
    if isinstance(attention_mask, MaskSpec):  # generate() has made it before
        return attention_mask
    offsets, seen, end = (int(q_offset), int(kv_offset)), attention_mask, int(kv_offset) + kv_length
    if seen is not None:
        if seen.ndim != 2:
            raise ArgumentError(
                "attention_mask: expected (batch, length), 0 where a token is padding; or, where rows see different "
                f"keys, 4 dimensions, as attention_mask.bool()[:, None] of 3; got {tuple(seen.shape)}."
            )
        seen = seen if seen.dtype == torch.bool else seen != 0
        if seen.shape[1] < end:
            seen = torch.nn.functional.pad(seen, (0, end - seen.shape[1]))
        seen = None if bool(seen[:, offsets[1] : end].all()) else seen
    config, sizes = more.get("config"), (q_length, kv_length)
    given = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "q_offset": offsets[0]}
    given |= {"kv_offset": offsets[1], "mask_function": mask_function, "attention_mask": seen}
    given |= {name: more[name] for name in ("dtype", "device", "use_vmap") if name in more}
    make = functools.partial(_make_dense, config, given)
    if getattr(config, "model_type", None) in _TENSORS:
        return make()
    return MaskSpec(batch_size, sizes, offsets, _make_pattern(_split(mask_function)), seen, make)


def _split(f: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Returns the functions that a mask function joins."""
    if getattr(f, "__code__", None) is _AND:
        return [x for part in _read_closure(f)["mask_functions"] for x in _split(part)]
    return [f]


def _make_pattern(leaves: list[Callable[..., Any]]) -> _Pattern:
    causal, left, right, packed, others = False, [], [], None, []
    for f in leaves:
        code = getattr(f, "__code__", None)
        if f is _CAUSAL:
            causal = True
        elif f is _ALL:
            continue
        elif code is _SLIDING:
            left.append(_read_closure(f)["sliding_window"] - 1)
        elif code is _SLIDING_BOTH:
            left.append(_read_closure(f)["sliding_window"])
            right.append(_read_closure(f)["sliding_window"])
        elif code is _PACKED:
            packed = _read_closure(f)["packed_sequence_mask"]
        elif code is _REMAPPED and not (inner := _make_pattern(_split(_read_closure(f)["mask_function"]))).others:
            # of two tokens of one packed sequence, whose distance is what it is without the others before them
            causal = causal or inner.causal
            left += [] if inner.left is None else [inner.left]
            right += [] if inner.right is None else [inner.right]
        else:
            others.append(_trace_chunked(**_read_closure(f)) if code is _CHUNKED else f)
    return _Pattern(causal, min(left, default=None), min(right, default=None), packed, tuple(others))


def _read_closure(f: Any) -> dict[str, Any]:
    """Returns what a function of transformers has closed over, by name."""
    return dict(zip(f.__code__.co_freevars, [cell.cell_contents for cell in f.__closure__], strict=True))


def _trace_chunked(chunk_size: int, left_padding: torch.Tensor) -> Callable[..., Any]:
    """Returns chunked_overlay() of numbers that are as they are now."""
    if not left_padding.any():
        return lambda b, h, i, j: j // chunk_size == i // chunk_size
    first = table(left_padding, "left_padding")
    return lambda b, h, i, j: (j - first[b]) // chunk_size == (i - first[b]) // chunk_size


def _shift(f: Callable[..., Any], first: int) -> Expression:
    """Returns the mask of a function whose positions count from `first` on."""
    if not first:
        return expression(f, "mask")
    return expression(lambda b, h, i, j: f(b, h, i + first, j + first), "mask")


def _count_if_right(seen: torch.Tensor) -> list[int] | None:
    """Returns how many keys of each item are seen, if they are its first ones."""
    counts = seen.sum(1, keepdim=True)
    if torch.equal(seen, torch.arange(seen.shape[1], device=seen.device) < counts):
        return counts[:, 0].tolist()
    return None


def _make_padding(seen: torch.Tensor, in_cache: bool = False) -> Expression:
    """Returns padding() of a mask, or that of an earlier one which says the same.

    In a cache it may be shorter: all keys past its end are seen.
    """
    global _last_padding
    if _last_padding is not None:
        known, found = _last_padding
        n = known.shape[1]
        alike = known.shape[0] == seen.shape[0] and known.device == seen.device
        fits = alike and (n <= seen.shape[1] if in_cache else n == seen.shape[1])
        if fits and torch.equal(known, seen[:, :n]) and seen[:, n:].all():
            return found
    found = padding(seen)
    _last_padding = seen.clone(), found
    return found


def _join(masks: list[Expression]) -> Expression:
    joined = masks[0]
    for x in masks[1:]:
        joined = joined & x
    return joined
