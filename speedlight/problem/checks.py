"""Checks of single arguments, with their error messages. Kernels rely on these checks alone."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ..arrays.array import describe, listed
from ..arrays.dtypes import CODES, DTYPES, PAGE_CODES, SHORTEST, SPELLINGS, THEIR_DTYPES, code_cache, conversion
from ..arrays.integers import integer, is_one, whole
from ..arrays.memory import Array
from ..errors import ArgumentError, ArgumentTypeError, CacheFull, UnsupportedError, join_words, pass_on, shown
from ..errors.advice import of_layout, of_scale, of_window
from .options import MOST_SEEDS, DtypeName
from .problem import LAYOUTS

MOST = 1 << 46  # of sizes and positions
MOST_SCALE = 1e30


def size(name: str, x: Any, least: int = 0) -> int:
    x = integer(name, x)
    if not least <= x <= MOST:
        raise ArgumentError(f"{name}: expected a size from {least} to 2^46; got {x}.")
    return x


def number(name: str, x: Any, what: str, way: Callable[[Any], str] = lambda _: "") -> float:
    """A real number as a float; integers beyond all floats are refused, not rounded to infinity."""
    if isinstance(x, (bool, np.bool_)) or not isinstance(x, numbers.Real):
        raise ArgumentTypeError(f"{name}: expected {what}; got {type(x).__name__}.{way(x)}")
    try:
        return float(x)
    except (OverflowError, ValueError, TypeError) as error:
        pass_on(error)
        raise ArgumentError(f"{name}: expected {what}, that a float can hold; got {shown(x)} ({error}).") from None


def scale_of(scale: Any, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = number("scale", scale, "a number or None (1/sqrt(head_dim))", of_scale)
    if not abs(value) <= MOST_SCALE:  # NaN is not, either
        raise ArgumentError(f"scale: expected a finite number up to 1e30 in size; got {value}.")
    return value


def dropout_of(dropout: Any) -> float:
    """A probability."""
    value = number("dropout", dropout, "a probability from 0 to 1")
    if not 0.0 <= value <= 1.0:  # NaN is neither
        raise ArgumentError(f"dropout: expected a probability from 0 to 1; got {value}.")
    return value


def seed_of(seed: Any) -> int:
    """Returns the seed of a dropout that is not 0, which the caller must give."""
    if seed is None:
        raise ArgumentError(
            "seed: expected an int beside dropout=, which says what is dropped; got None. Give another one in every "
            "step of a training loop, and in every layer and process: as seed=step * layers + layer."
        )
    if whole(seed) is None:
        got = type(seed).__name__
        raise ArgumentTypeError(f"seed: expected an int; got {got}. Draw one: seed=random.getrandbits(62).")
    value = integer("seed", seed)
    if not 0 <= value < MOST_SEEDS:
        raise ArgumentError(f"seed: expected 0 to 2^64 - 1; got {value}.")
    return value


def dtype_name(dtype: Any) -> str:
    name = getattr(dtype, "__name__" if isinstance(dtype, type) else "name", None)
    name = name if isinstance(name, str) else dtype if isinstance(dtype, str) else shown(dtype)
    name = name.removeprefix("torch.")
    if name not in DTYPES:
        way = ""
        if name.lower() in THEIR_DTYPES:
            way = f" Write {THEIR_DTYPES[name.lower()]!r}."
        elif name in CODES or name in SPELLINGS or name.lower() in _THEIR_FORMATS:
            way = " Only caches hold codes: `speedlight accuracy` says what they change."
        raise ArgumentTypeError(f"dtype: expected float32, float64, float16 or bfloat16; got {shown(dtype)}.{way}")
    return name


def item_lengths(
    name: str, x: Any, batch: int, most: int, what: str = "the length of the array", way: str = ""
) -> tuple[int, ...]:
    """Lengths of a padded batch, copied before they are checked."""
    if x is None:
        return (most,) * batch
    if is_one(x):
        way = f"One for each of the items: [{shown(x)}] * {batch}."
        raise ArgumentTypeError(f"{name}: expected a sequence of ints; got {type(x).__name__}. {way}")
    values = listed(x, name, "a sequence of ints")
    if len(values) == batch and set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= most:
        return tuple(values)
    if values and (isinstance(values[0], (list, tuple)) or getattr(values[0], "shape", ())):
        raise ArgumentTypeError(
            f"{name}: expected {batch} lengths, one per batch item; got {len(values)} rows. A tokenizer's mask of "
            "(batch, k_len) is mask=sl.padding(attention_mask), which needs no lengths."
        )
    if len(values) != batch:
        raise ArgumentError(f"{name}: expected {batch} lengths, one per batch item; got {len(values)}.{way}")
    lengths = tuple(integer(name, n) for n in values)
    for at, n in enumerate(lengths):
        if not 0 <= n <= most:
            raise ArgumentError(f"{name}: expected lengths from 0 to {most}, {what}; got {n} for item {at}.")
    return lengths


def packed_offsets(name: str, x: Any, total: int) -> tuple[int, ...]:
    """Packed offsets, copied before they are checked: 0 = c₀ ≤ c₁ ≤ … = total."""
    if x is None:
        return (0, total)
    values = tuple(integer(name, i) for i in listed(x, name, "a sequence of ints"))
    if len(values) < 2 or values[0] != 0 or values[-1] != total:
        ends = f"{len(values)} entries" if len(values) < 2 else f"{values[0]} … {values[-1]}"
        way = " Of lengths write numpy.cumsum([0, *lengths])." if sum(values) == total else ""
        raise ArgumentError(f"{name}: expected offsets from 0 to the total length {total}; got {ends}.{way}")
    for i, (a, b) in enumerate(itertools.pairwise(values)):
        if b < a:
            raise ArgumentError(f"{name}: expected offsets that never fall; got {a} then {b} at entry {i + 1}.")
    return values


def packed_lengths(cu_seqlens_q: Any, total: int, batch: int) -> tuple[int, ...]:
    """Lengths of packed queries, of a known number of sequences."""
    offsets = packed_offsets("cu_seqlens_q", cu_seqlens_q, total)
    if len(offsets) != batch + 1:
        raise ArgumentError(f"cu_seqlens_q: expected {batch + 1} entries, one more than sequences; got {len(offsets)}.")
    return tuple(b - a for a, b in itertools.pairwise(offsets))


def check_flag(name: str, x: Any) -> None:
    """Raises unless x is a bool."""
    if not isinstance(x, bool):
        raise ArgumentTypeError(f"{name}: expected True or False; got {shown(x)}.")


def check_planned(given: dict[str, Any]) -> None:
    """Raises unless plan() has all arrays, or all sizes that it needs."""
    missing = [n for n, x in given.items() if x is None]
    if missing:
        way = "plan(q, k, v), or plan(q_heads=…, q_len=…, head_dim=…)"
        raise ArgumentTypeError(f"{missing[0]}: expected arrays or sizes, {way}; got no {', '.join(missing)}.")


def check_layout(x: Any) -> None:
    """Raises unless x names where batch, heads, length and dim lie."""
    if not isinstance(x, str) or x not in LAYOUTS:
        raise ArgumentError(f"layout: expected 'bhld', 'blhd', 'hld' or 'lhd'; got {shown(x)}.{of_layout(x)}")


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """Returns left and right of a window; None is no limit."""
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        n: int = window if type(window) is int else 0
        way = " Write window=(127, 0) for 127 tokens before a query and none after it."
        if 0 < n < MOST:
            way = f" A sliding window of {n} tokens is window=({n - 1}, None) beside causal=True."
        raise ArgumentTypeError(f"window: expected a pair (left, right) of ints or None; got {shown(window)}.{way}")
    negative = [(whole(x) or 0) < 0 for x in window]
    if any(negative):
        ours = tuple(None if no_limit else x for x, no_limit in zip(window, negative, strict=True))
        raise ArgumentError(
            f"window: expected a size from 0 to 2^46, or None for no limit; got {shown(window)}. flash-attn's -1 is "
            f"None: window={shown(ours)}."
        )
    left, right = (None if x is None else size("window", x) for x in window)
    return left, right


def check_precision(x: Any) -> None:
    """Raises unless x is a precision of float32 products on a GPU."""
    if not isinstance(x, str) or x not in ("ieee", "tf32x3", "tf32"):
        raise ArgumentError(
            f"precision: expected 'ieee', 'tf32x3' or 'tf32'; got {shown(x)}. 'ieee' has the products of float32."
        )


# --- of caches

_FLOATS = ("float32", "float16", "bfloat16")  # of tokens that a cache of codes takes
_THEIR_FORMATS = {
    **{theirs: repr(name) for theirs, name in THEIR_DTYPES.items()},
    **{
        theirs: f"{SHORTEST[name]!r}{f', which is {name}' * (name != SHORTEST[name])}"
        for name, row in CODES.items()
        for theirs in row.elsewhere
    },
}


def check_index(name: str, x: Any, count: int) -> int:
    """Returns an index below `count`, checked."""
    if type(x) is int and 0 <= x < count:
        return x
    if name == "layer" and whole(x) is None:
        raise ArgumentTypeError(f"layer: expected an int; got {type(x).__name__}. It comes first, before the arrays.")
    at = integer(name, x)
    if not 0 <= at < count:
        raise ArgumentError(f"{name}: expected 0 to {count - 1}; got {at}.")
    return at


def check_list(name: str, x: Any, of: str) -> list[Any]:
    """Returns the entries of a list; `of`: what they should be."""
    try:
        return list(x)
    except Exception as error:  # another library's, or a generator's
        pass_on(error)
        if not isinstance(x, Iterable):
            way = " Of one alone write [sequence]." if name == "sequences" else ""
            raise ArgumentTypeError(f"{name}: expected a list of {of}; got {type(x).__name__}.{way}") from None
        raise ArgumentTypeError(f"{name}: expected a list of {of}; got {type(x).__name__} ({error}).") from error


def checked_sizes(sizes: dict[str, Any]) -> list[int]:
    """Returns sizes of a cache, each 1 or more."""
    return [size(name, x, 1) for name, x in sizes.items()]


def cache_dtype(dtype: Any) -> DtypeName:
    """Returns the name of a cache's dtype."""
    name: Any = (
        getattr(dtype, "name", None)
        or getattr(dtype, "__name__", None)
        or (SPELLINGS.get(dtype, dtype) if isinstance(dtype, str) else shown(dtype))
    )
    name = name.removeprefix("torch.") if isinstance(name, str) else shown(dtype)
    if name not in (*DTYPES, *CODES):
        wanted = join_words([*DTYPES, *(x if x == short else f"{x} ({short!r})" for x, short in SHORTEST.items())])
        raise ArgumentTypeError(f"dtype: expected {wanted}; got {shown(dtype)}.{dtype_hint(name)}")
    return name


def dtype_hint(name: str) -> str:
    """Returns a hint for a cache's dtype by another library's name."""
    if "e5m2" in name:
        return " Its two bits of fraction are off by up to an eighth: 'fp8' and 'int8' are nearer in as many bytes."
    ours = _THEIR_FORMATS.get(name.lower()) or (repr(name.lower()) if name.lower() in SPELLINGS else None)
    return f" Write {ours}." if ours else ""


def device_name(device: Any) -> str:
    """Returns the name of a cache's or a plan's device, given as a string, or as PyTorch has it."""
    kind = ArgumentError if isinstance(device, str) or type(device).__module__ == "torch" else ArgumentTypeError
    if kind is ArgumentTypeError or (str(device) != "cpu" and str(device).partition(":")[0] != "cuda"):
        raise kind(f"device: expected 'cpu', 'cuda' or 'cuda:0', …; got {shown(device)}.")
    return str(device)


def check_tokens(got: str, name: str, dtype: str) -> None:
    """Raises unless new keys or values have a dtype that the cache takes."""
    if dtype in CODES:
        if got not in _FLOATS:
            way = " Codes of your own are pages: attention_paged(k_scales=, v_scales=)." if got in PAGE_CODES else ""
            raise ArgumentTypeError(
                f"{name}: expected float32, float16 or bfloat16, which {code_cache(dtype)} rounds itself; got "
                f"{got}.{way}"
            )
    elif got != dtype:
        way = f"Convert it first: {conversion(name, dtype)}."
        raise ArgumentTypeError(f"{name}: expected dtype {dtype}, as the cache has; got {got}. {way}")


def new_counts(new_lengths: Any, batch: int, n_new: int) -> list[int]:
    """Returns how many new tokens every sequence of a padded batch has."""
    if new_lengths is None:
        return [n_new] * batch
    values = each_count(new_lengths, batch)
    for item, n in enumerate(values):
        if not 0 <= n <= n_new:
            raise ArgumentError(
                f"new_lengths: expected 0 to {n_new}, the tokens in k; got {shown(n)} for sequence {item}."
            )
    return values


def packed_counts(name: str, x: Any, sequences: int, total: int) -> list[int]:
    """Returns how many packed rows each sequence has. By default all are a single sequence's; of several, one each."""
    if not sequences and total:
        raise ArgumentError(f"sequences: expected one at least, whose tokens the {total} new ones are; got none.")
    given = ([total] if sequences == 1 else [1] * sequences) if x is None else each_count(x, sequences, name)
    if any([n < 0 for n in given]) or sum(given) != total:
        what = "tokens" if name == "new_lengths" else "queries"
        got = shown(given) if x is not None else "None, which is one each"
        raise ArgumentError(
            f"{name}: expected {sequences} ints, one per sequence, that add up to the {total} {what}; got {got}."
        )
    return given


def each_count(x: Any, sequences: int, name: str = "new_lengths") -> list[int]:
    """Returns an int for each sequence, Python's own: sums of NumPy's narrow ones would wrap."""
    what = f"{sequences} ints, one per sequence"
    if is_one(x):
        raise ArgumentTypeError(
            f"{name}: expected {what}; got {type(x).__name__}. One for each: [{shown(x)}] * {sequences}."
        )
    counts = [whole(n) for n in listed(x, name, what)]
    if None in counts:
        raise ArgumentTypeError(f"{name}: expected {what}; got {shown(x)}.")
    if len(counts) != sequences:
        raise ArgumentError(f"{name}: expected {what}; got {len(counts)}.")
    return counts  # type: ignore[return-value]


def new_totals(
    layer: int, lengths: list[int], counts: list[int], capacity: int, window: int | None = None
) -> list[int]:
    """Returns the lengths after an append, or raises CacheFull."""
    without = "" if window is None else ", or leave capacity out: a window's memory does not grow"
    for item, n in enumerate(counts):
        free = capacity - lengths[item]
        if n > free:
            raise CacheFull(
                f"layer {layer}, sequence {item}: {n} tokens need room, {free} of {capacity} are free. "
                f"{'truncate() it, or make' if lengths[item] else 'Make'} a cache of larger capacity{without}.",
                n,
                free,
            )
    return [a + b for a, b in zip(lengths, counts, strict=True)]


def check_pages_left(name: str, way: str, lengths: Sequence[int], counts: Sequence[int], capacity: int) -> None:
    """Raises CacheFull where sequences of these lengths, named by `name`, have no room for so many new tokens."""
    for item, (n, more) in enumerate(zip(lengths, counts, strict=True)):
        if n + more > capacity:
            raise CacheFull(
                f"{name}: sequence {item} has {n} keys, {more} new ones need room, {capacity - n} of {capacity} are "
                f"free. {way}.",
                more,
                capacity - n,
            )


def cache_sizes(
    *,
    layers: Any,
    batch: Any,
    kv_heads: Any,
    head_dim: Any,
    value_dim: Any,
    capacity: Any,
    window: Any,
    keep_first: Any,
) -> tuple[int, int, int, int, int, int]:
    """(layers, batch, kv_heads, head_dim, value_dim, capacity) of a cache; with a window and no capacity, the most
    there is.
    """
    if capacity is None:
        if window is None:
            raise ArgumentError("capacity: expected the most tokens of a sequence, or a window.")
        capacity = MOST
    given = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
    given |= {"value_dim": head_dim if value_dim is None else value_dim, "capacity": capacity}
    sizes = checked_sizes(given)
    window_size(window)
    if size("keep_first", keep_first) and window is None:
        raise ArgumentError(f"keep_first: expected 0 without a window; got {keep_first}. Give window=, too.")
    return tuple(sizes)  # type: ignore[return-value]


def check_latent(latent: Any, head_dim: int, value_dim: int, given: Any, dtype: str) -> bool:
    """Returns whether values are the first columns of keys; raises unless a key has so many, as was `given`."""
    check_flag("latent", latent)
    if latent and given is None:
        raise ArgumentError(
            f"value_dim: expected the columns of a latent beside latent=True; got None. Of 512 and 64 they are "
            f"head_dim=576, value_dim=512; value_dim=head_dim={head_dim} has no rotary part."
        )
    if latent and value_dim > head_dim:
        raise ArgumentError(
            f"value_dim: expected at most head_dim={head_dim}, as values are the first columns of keys (latent=True); "
            f"got {value_dim}. head_dim counts the columns of a latent and of its rotary part."
        )
    if latent and dtype in CODES and CODES[dtype].is_packed:
        raise UnsupportedError(
            f"dtype: expected int8, float8_e4m3fn ('fp8') or a dtype of numbers with latent=True; got {dtype}. 'int8' "
            "is the smallest of latents."
        )
    return latent


def window_size(x: Any) -> int | None:
    """Returns the tokens of a window, the query's own included; None is no window."""
    if way := of_window(x):
        raise ArgumentTypeError(f"window: expected an int; got {shown(x)}.{way}")
    return None if x is None else size("window", x, 1)


def shorter_lengths(length: Any, lengths: list[list[int]], lost: Callable[[int, int], bool]) -> list[int]:
    """Returns the length that truncate() leaves of every sequence; lengths: per layer.

    lost(item, n): a window has forgotten what token n would see.
    """
    batch = len(lengths[0])
    one = length is None or isinstance(length, str) or is_one(length)  # of these only ints are lengths: seen below
    given = [length] * batch if one else check_list("length", length, "ints, or one int")
    wanted = [integer("length", n) for n in given]
    if len(wanted) != batch:
        raise ArgumentError(f"length: expected one int, or {batch} (one per sequence); got {len(wanted)}.")
    for item, n in enumerate(wanted):
        least = min(x[item] for x in lengths)
        if not 0 <= n <= least:
            raise ArgumentError(
                f"length: expected 0 to {least}, the tokens of sequence {item} in every layer; got {n}."
            )
        if lost(item, n):
            raise ArgumentError(
                f"length: expected one whose window is still there; of sequence {item} the cache has forgotten what "
                f"token {n} would "
                "see. clear() it, or make a cache of a longer window."
            )
    return wanted


def states_of(out1: Any, lse1: Any, out2: Any, lse2: Any, *, gpu: bool = True) -> tuple[list[Array], list[Array]]:
    """Reads the arrays of both forms of merge(), and checks their shapes and devices. `gpu`: they may lie on one."""
    if not isinstance(out1, (list, tuple)) and not isinstance(lse1, (list, tuple)):
        for name, x in (("out2", out2), ("lse2", lse2)):
            if x is None:
                raise ArgumentTypeError(
                    f"{name}: expected an array; got None. Or pass lists: merge([out1, …], [lse1, …])."
                )
        pairs = ((out1, "out1"), (out2, "out2")), ((lse1, "lse1"), (lse2, "lse2"))
    else:
        for name, x in (("outs", out1), ("lses", lse1)):
            if not isinstance(x, (list, tuple)):
                raise ArgumentTypeError(
                    f"{name}: expected a list or tuple of arrays; got {type(x).__name__}. Use list({name})."
                )
        if out2 is not None or lse2 is not None:
            raise ArgumentError(
                "out2: expected nothing beside lists of states; got more. Put all states into the lists."
            )
        if not out1:
            raise ArgumentError("outs: expected one state or more; got none.")
        if len(lse1) != len(out1):
            raise ArgumentError(f"lses: expected {len(out1)} arrays, one for each of outs; got {len(lse1)}.")
        pairs = tuple([(x, f"{name}[{i}]") for i, x in enumerate(xs)] for name, xs in (("outs", out1), ("lses", lse1)))
    outs, lses = ([describe(x, name, gpu=gpu) for x, name in several] for several in pairs)
    _check_states(outs, lses)
    return outs, lses


def _check_states(outs: list[Array], lses: list[Array]) -> None:
    first = outs[0]
    if not first.shape:
        raise ArgumentError(f"{first.name}: expected shape (…, n_q, value_dim); got ().")
    for several, shape in ((outs, first.shape), (lses, first.shape[:-1])):
        for x in several:
            if x.shape != shape:
                raise ArgumentError(f"{x.name}: expected shape {shape}, to go with {first.name}; got {x.shape}.")
            if x.device != first.device:
                raise ArgumentError(
                    f"{x.name}: expected an array on {first.device}, as {first.name}; got one on {x.device}. Move one "
                    "of them."
                )
