"""Hints of errors to those who come from other libraries: our names of their arguments, and what differs."""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from . import ArgumentTypeError, Error, shown
from .other_names import ADAPTERS, CAPACITY, LAYOUTS, MAKERS, NO_SUCH, OF, OPTIONS, OVER_RANKS, SHARED


def explain(error: Exception, function: Any, args: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises what says more than an error of a call: one of Python's own, that arguments do not fit, or one of ours.

    A TypeError from within, whose call had all that it needs, is left as it is.
    """
    if isinstance(error, Error):
        if options.get("lengths") is not None:
            _named_lengths(error)
        return
    known, by_place = parameters(function)
    theirs = [name for name in options if name not in known]
    if theirs:
        raise unknown(function, theirs[0]) from None
    if len(args) > by_place < len(known):
        skipped = known[0] in ("self", "cls")
        named, others = ", ".join(known[skipped:by_place]) or "no argument", known[by_place:]
        raise ArgumentTypeError(
            f"{_name(function)}: expected {named} by place, and others by name; got {len(args) - skipped} by place. "
            f"Write {'mask' if 'mask' in others else others[0]}=…, and so on."
        ) from None
    has_sizes = {"layers", "kv_heads", "head_dim"} <= set(options)
    if _over_ranks(function) and _name(function) == "KVCache" and has_sizes and "capacity" not in options:
        raise ArgumentTypeError(CAPACITY) from None
    missing = [x for x in required(function) if x not in {*known[: len(args)], *options}]
    if missing:
        raise ArgumentTypeError(
            f"{missing[0]}: expected an argument of {_home(function)}{_name(function)}(); got none. Write "
            f"{', '.join([f'{x}=…' for x in missing])}."
        ) from None


def parameters(function: Any) -> tuple[list[str], int]:
    """Returns the names of a function's arguments, and how many of them may come by place."""
    found = inspect.signature(function).parameters.values()
    return [x.name for x in found], len([x for x in found if x.kind is x.POSITIONAL_OR_KEYWORD])


def required(function: Any) -> list[str]:
    """Returns the names of arguments that have no default."""
    found = inspect.signature(function).parameters.values()
    return [x.name for x in found if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]


def unknown(function: Any, name: str) -> Exception:
    """Returns the error of an argument that a function has not: another library's, or a slip of the pen."""
    hint = hint_of(function, name)
    if hint is not None:
        way = hint.replace("nothing", "Leave it out", 1) if hint.startswith("nothing") else f"Use {hint}"
        adapters = {} if _has_others(function) else ADAPTERS
        more = "".join([f" {text}" for names, text in adapters.items() if name in names])
        attention = sys.modules["speedlight"].attention
        whose = "an argument of attention()" if name in parameters(attention)[0] else "another library's"
        called = f"{_home(function)}{_name(function)}"
        return ArgumentTypeError(f"{name}: expected the arguments of {called}(); got {whose}. {way}.{more}")
    from difflib import get_close_matches

    own = [x for x in parameters(function)[0] if x != "self"]
    near = get_close_matches(name, own, 1, 0.7)
    way = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(own)}."
    return TypeError(f"{_home(function)}{_name(function)}() got an unexpected keyword argument {name!r}.{way}")


def hint_of(function: Any, name: str) -> str | None:
    """Returns what another library's argument is in a call of ours; None where nobody knows the name, or the call has
    no such option.
    """
    called = _name(function)
    if _over_ranks(function) and name in (known := OVER_RANKS.get(called, {})):
        return known[name]
    own = MAKERS.get(called)
    if own is not None:
        return own.get(name)
    if name in OF.get(called, {}):
        return OF[called][name]
    if _has_others(function):
        return _adapted(function, name)
    hint = OPTIONS.get(name) if called not in ("merge", "merge_states", "synchronize") else None
    return hint if hint is not None and options_in(hint) <= {*parameters(function)[0]} else None


def _has_others(function: Any) -> bool:
    """Returns whether a call has another library's arguments."""
    homes = ("flash_attn", "flash_mla", "jax", "torch.dot_product", "torch.flex")
    return bool(function.__module__.startswith(tuple([f"speedlight.{x}" for x in homes])))


def _adapted(function: Any, name: str) -> str | None:
    """Returns what an argument, ours or of a third library, is in a call that has another library's arguments."""
    own = {*parameters(function)[0]}
    for hint in SHARED.get(name, ()):
        if options_in(hint) <= own:
            return hint
    return NO_SUCH if name in parameters(sys.modules["speedlight"].attention)[0] else None


def options_in(hint: str) -> set[str]:
    """Returns which of a call's options a hint tells to use."""
    return set(re.findall(r"\b(\w+)=", re.sub(r"\w\(.*?\)", "", hint)))


def _name(function: Any) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _home(function: Any) -> str:
    """Returns the prefix that tells a function from the one of the same name that most people call."""
    if _over_ranks(function):
        return "speedlight.distributed."
    return "reference." if function.__module__ == "speedlight.reference" else ""


def _over_ranks(function: Any) -> bool:
    return bool(function.__module__.startswith("speedlight.distributed"))


def _named_lengths(error: Error) -> None:
    """`lengths=` is both kinds of lengths from early on: what is wrong with them is wrong with it."""
    text = re.sub(r"^[qk]_lengths(?=: )", "lengths", str(error.args[0])) if error.args else ""
    if error.args and text != error.args[0]:
        way = " lengths= is of queries and keys alike; k_lengths= is of keys alone, q_lengths= of queries."
        error.args = (text + way * ("expected lengths from" in text), *error.args[1:])


def of_layout(layout: Any) -> str:
    """A sentence for who gives a layout that we have not."""
    hint = LAYOUTS.get(layout.lower()) if isinstance(layout, str) else None
    return "" if hint is None else f" {layout!r}: {hint}."


def of_heads(layout: str, sizes: Any) -> str:
    """A sentence for who gives heads and lengths that would fit each other the other way round."""
    other = {"bhld": "blhd", "blhd": "bhld"}.get(layout)
    way = ""
    if other is not None and 0 < sizes.k_len <= sizes.q_len and not sizes.q_len % sizes.k_len:
        way = f" If these are lengths, of {sizes.q_len} and {sizes.k_len} heads, give layout={other!r}."
    if sizes.q_heads < sizes.kv_heads:
        return f"{way} Or q and k are in each other's place: k has as many heads as q, or fewer."
    return f"{way} Each head of k and v serves as many of q's: repeat heads of k and v, or leave some away."


def of_stored_heads(layout: str, sizes: Any) -> str:
    """A sentence for who gives queries whose heads are no multiple of those of the stored keys."""
    if not sizes.q_len or sizes.q_len % sizes.kv_heads:
        return ""
    first = len(layout) - 3
    return f" If these are tokens, of {sizes.q_len} heads, give q.swapaxes({first}, {first + 1})."


def of_head_dim(head_dim: int, k_len: int, layout: str, q: str = "q", k: str = "k", v: str = "v") -> str:
    """A sentence for who gives keys of another head_dim than that of the queries."""
    if k_len == head_dim and layout.endswith("ld"):
        return f" If {k} is transposed, give {k}.swapaxes(-1, -2)."
    return f" {v} alone may have another one. Fill {q} or {k} up with zeros, beside scale=."


def of_packed(name: str, shape: tuple[int, ...]) -> str:
    """A sentence for who gives a pool, which takes packed tokens, an array of other dimensions."""
    if len(shape) == 4:
        packed = f"{name}.swapaxes(1, 2).reshape(-1, {shape[1]}, {shape[3]})"
        lengths = f"[{shape[2]}] * {shape[0]}"
        return f" Of (batch, heads, length, head_dim) it is {packed}, and so the others, beside new_lengths={lengths}."
    return f" Of one head it is {name}[:, None], and so the others." if len(shape) == 2 else ""


def of_no_tensor(x: Any) -> str:
    """A sentence for who gives another library's array where a tensor should be."""
    return " Use torch.as_tensor()." if type(x).__name__ == "ndarray" or "jax" in type(x).__module__ else ""


def of_scale(x: Any, name: str = "scale") -> str:
    """A sentence for who gives an array or a tensor as the factor of scores."""
    if type(x).__name__ not in ("Tensor", "Parameter", "ndarray"):
        return ""
    if x.ndim == 0 and not getattr(x, "requires_grad", False):
        return f" Write {name}={name}.item()."
    return (
        f" One that is learned, or of each head, multiplies q, beside {name}=1.0; attention() takes it in "
        "score=lambda s, b, h, i, j: s * t, too."
    )


def of_window(x: Any) -> str:
    """A sentence for who gives a cache the pair that attention() takes."""
    if not isinstance(x, (tuple, list)):
        return ""
    is_pair = len(x) == 2 and type(x[0]) is int and x[0] >= 0
    ours = f": attention()'s ({x[0]}, 0) is window={x[0] + 1}" if is_pair else ""
    return f" window=n is n tokens, a query's own among them{ours}."


def of_items(layout: str) -> str:
    """A sentence for who gives several lengths of what has no batch."""
    one = "layout='hld' is of one item: (batch, length, head_dim) of one head is q[:, None], by layout='bhld'."
    return f" {one}" if layout == "hld" else ""


def of_causal(x: Any) -> str:
    """A sentence for who gives a truth that is no bool."""
    said = shown(x).strip("'").lower().removeprefix("np.").removesuffix("_")
    meant = {"true": True, "1": True, "false": False, "0": False, "none": False}.get(said)
    return "" if meant is None else f" Write causal={meant}."


def of_masks(name: str, x: Any) -> str:
    """A sentence for who gives several masks, or an array's lists."""
    if name != "mask" or not isinstance(x, (list, tuple)):
        return ""
    numbers = all([isinstance(one, (list, tuple, bool, int, float)) for one in x])
    return " Try numpy.array(mask)." if numbers else " Join masks by &: sl.causal() & sl.prefix(3)."


def of_mask(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """A sentence for who gives an array of a shape that does not broadcast to (batch, q_heads, q_len, k_len)."""
    batch, heads, q_len, k_len = whole
    if shape == (heads,):
        return f" Of one number for each head write {name}[:, None, None]."
    if shape == (batch, k_len):
        padding = "A tokenizer's mask of (batch, k_len) is mask=sl.padding(attention_mask)"
        bools = f"{padding}; of bools it is mask[:, None, None, :], too"
        return f" {bools if name == 'mask' else f'Of (batch, k_len) write {name}[:, None, None, :]'}."
    if shape == (batch, q_len, k_len):
        return f" Of (batch, q_len, k_len) write {name}[:, None]."
    if len(shape) > 1 and shape[-1] == k_len and shape[-2] > q_len > 0:
        return f" Of its last rows write {name}[..., -{q_len}:, :]."
    return ""


# Keys and values of models have up to 128 heads, and those with more than 64 have head dims of 128 and above.
_MOST_HEADS, _MOST_NARROW_HEADS, _NARROW = 128, 64, 64
_USUAL_HEADS = frozenset((4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 128))  # of models


def warn_if_swapped(layout: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Warns of heads and length in each other's place, where a call is prepared: they give wrong numbers. Few tokens
    of many heads are common (a step of decoding, a short prompt), more heads of keys than models have are not.
    """
    if layout not in ("bhld", "blhd") or not len(q_shape) == len(k_shape) == 4:
        return
    heads, length = (1, 2) if layout == "bhld" else (2, 1)
    count, q_len, k_len = q_shape[heads], q_shape[length], k_shape[length]
    most = _MOST_NARROW_HEADS if q_shape[3] <= _NARROW else _MOST_HEADS
    if not count == k_shape[heads] > most or not k_len or q_len % k_len:
        return  # heads of q that divide by those of k, the other way round, too
    many = count >= 2 * _MOST_HEADS and count >= 16 * q_len  # even of a single token
    if not many and (q_len not in _USUAL_HEADS or count <= q_len):
        return
    other = "blhd" if layout == "bhld" else "bhld"
    warnings.warn(
        f"q of shape {q_shape} has {count} heads of {q_len} token{'s' * (q_len != 1)} by layout={layout!r}. If these "
        f"are {q_len} head{'s' * (q_len != 1)} of {count} tokens, give layout={other!r}.",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stacklevel of the first frame that is not ours, seen from who asks."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("speedlight", "torch"):
        frame, level = frame.f_back, level + 1
    return max(level, 1)
