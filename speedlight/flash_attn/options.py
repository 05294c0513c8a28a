"""Options of flash-attn's functions, in attention()'s words; what the versions ignore and refuse."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError
from .. import softcap as softcap_score
from ..adapting import (
    Library,
    add_distances,
    check_flag,
    draw_seed,
    has,
    integer,
    limits,
    number,
    of_no_tensor,
    of_scale,
    pass_on,
    shown,
)  # fmt: skip
from ..arrays.array import describe
from ..arrays.memory import Array, overlap, overlaps_itself
from ..arrays.torch_tensors import in_grad_mode
from ..torch.attending import attention

_FP8 = "8-bit floats are not offered: convert q, k and v to bfloat16."
_CHUNK = "speedlight.attention(mask=lambda b, h, i, j: i // n == j // n, causal=True) is attention in chunks of n."
_MAXIMA = ("max_seqlen_q", "max_seqlen_k")  # offsets say them
V2 = Library(
    "flash-attn 2",
    tested=("2.8", "2.8"),
    ignored=("deterministic", "num_splits", "max_seqlen", *_MAXIMA, "zero_tensors"),
)
V3 = Library(
    "flash-attn 3",
    ignored=("deterministic", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", *_MAXIMA),
    refused=dict.fromkeys(("q_descale", "k_descale", "v_descale"), _FP8) | {"attention_chunk": _CHUNK},
)
V4 = Library(
    "flash-attn 4",
    names={"indices": "gather_kv_indices"},
    ignored=(
        "deterministic", "num_splits", "pack_gqa", "scheduler_metadata", "disable_scheduler_metadata",
        "seqlen_k_per_split", *_MAXIMA, "min_seqlen_k", "cu_seqlens", "virtual_batch_idx",
    ),
    refused={
        "score_mod_bwd": "The derivative of score_mod is taken here.",
        "seqused": "Every row is combined: leave it out, or slice.",
    },
)  # fmt: skip
_softcap = functools.lru_cache(64)(softcap_score)
OTHER_ORDER = "Arguments in the order of flash-attn 2 are those of speedlight.flash_attn."
_WORDS = (bool, int, float, str)  # that stand where a tensor should, if arguments are in another order


def check_tensors(
    arrays: dict[str, Any], optional: dict[str, Any], ints: dict[str, Any], *, strict: bool = False, hint: str = ""
) -> None:
    """Raises unless whatever should be a tensor is one, before anything of it is looked at.

    `arrays` may be NumPy's, unless `strict`; `optional` ones may be None; `ints` (offsets, lengths, tables of pages)
    None or sequences, too, which are checked where they are read.
    """
    hint = hint and f" {hint}"
    for name, x in arrays.items():
        if not isinstance(x, Tensor) and (strict or not hasattr(x, "shape")):
            raise ArgumentTypeError(f"{name}: expected a tensor; got {type(x).__name__}.{of_no_tensor(x)}")
    for name, x in optional.items():
        if x is not None and not isinstance(x, Tensor):
            raise ArgumentTypeError(
                f"{name}: expected a tensor or None; got {type(x).__name__}.{of_no_tensor(x)}{hint}"
            )
    for name, x in ints.items():
        if isinstance(x, _WORDS):
            raise ArgumentTypeError(f"{name}: expected a tensor of ints, or None; got {type(x).__name__}.{hint}")
        if isinstance(x, Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool):
            raise ArgumentTypeError(f"{name}: expected an int32 tensor; got {x.dtype}. Use .int().")


def options_of(
    q: Tensor,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Any = None,
    dropout_p: Any = 0.0,
    offsets: Any = None,
) -> dict[str, Any]:
    """Returns attention()'s options; a seed of dropout is drawn. `offsets`: of packed queries."""
    check_flag("causal", causal)
    options: dict[str, Any] = {"causal": causal}
    if softmax_scale is not None:
        options["scale"] = _checked_scale(softmax_scale)
    window = limits(*read_sides(window_size))
    if window is not None:
        options["window"] = window
    cap, dropout = _read_number("softcap", softcap, "a number"), dropout_of(dropout_p)
    if cap or alibi_slopes is not None:
        options["score"] = _make_scores(q, cap, alibi_slopes, offsets)
    if dropout:
        options["dropout"], options["seed"] = dropout, int(draw_seed())
    return options


def _checked_scale(softmax_scale: Any) -> float:
    what = "a number or None (1/sqrt(headdim))"
    value = number("softmax_scale", softmax_scale, what, functools.partial(of_scale, name="softmax_scale"))
    if not abs(value) <= 1e30:  # NaN is not, either
        raise ArgumentError(f"softmax_scale: expected a finite number up to 1e30 in size; got {value}.")
    return value


def read_sides(window_size: Any) -> tuple[int | None, int | None]:
    """Returns left and right of a window as they were given: two numbers, or a tensor of two."""
    try:
        left, right = window_size
    except Exception as error:  # a sparse tensor raises RuntimeError
        pass_on(error)
        raise ArgumentTypeError(
            f"window_size: expected (left, right), as (127, 0), or -1 for no limit; got {shown(window_size)}."
        ) from None
    return tuple(None if n is None else integer("window_size", n) for n in (left, right))  # type: ignore[return-value]


def _read_number(name: str, x: Any, what: str) -> float:
    """Returns a number; None and False are 0, as in flash-attn."""
    return 0.0 if x is None or x is False else number(name, x, what)


def _make_scores(q: Tensor, cap: float, alibi_slopes: Any, offsets: Any) -> Any:
    """Returns what caps scores, then biases them. A softcap up to 0 is none."""
    if not cap < 2.0**127:
        raise ArgumentError(f"softcap: expected a number up to 1.7e38; got {cap}.")
    capped = _softcap(cap) if cap > 0 else None
    if alibi_slopes is not None:
        is_array, heads = has(alibi_slopes, "alibi_slopes", "shape"), q.shape[-2]
        shape = tuple(alibi_slopes.shape) if is_array else ()
        batch = q.shape[0] if offsets is None else len(offsets) - 1
        if shape not in ((heads,), (batch, heads)):
            got = shape if is_array else f"{type(alibi_slopes).__name__}; use torch.tensor()"
            raise ArgumentError(
                f"alibi_slopes: expected shape ({heads},) or ({batch}, {heads}), by q's heads; got {got}."
            )
        biased = add_distances(alibi_slopes)
        return biased if capped is None else [capped, biased]
    return capped


def dropout_of(dropout_p: Any) -> float:
    """Returns a probability, by flash-attn's name."""
    value = _read_number("dropout_p", dropout_p, "a probability from 0 to 1")
    if not 0.0 <= value <= 1.0:
        raise ArgumentError(f"dropout_p: expected a probability from 0 to 1; got {value}.")
    return value


def _describe(x: Tensor, name: str) -> Array:
    """Returns where a tensor lies that will be written to."""
    return describe(x.detach(), name, gpu=True)


def check_apart(tensors: dict[str, Tensor]) -> None:
    """Raises unless what is written to one tensor changes none of the others, nor another element of its own."""
    arrays = [_describe(x, name) for name, x in tensors.items()]
    for n, x in enumerate(arrays):
        others = [y.name for y in arrays[:n] if overlap(x, y)]
        if others or overlaps_itself(x):
            got = f"some of {others[0]}'s" if others else "elements that share some"
            raise ArgumentError(f"{x.name}: expected memory of its own for every element; got {got}. Use .clone().")


def check_written(name: str, x: Any, shape: Any) -> None:
    """Raises unless results can be written to x: of this shape, of floats, in memory of its own."""
    if (
        not isinstance(x, Tensor)
        or x.shape != torch.Size(shape)
        or not x.is_floating_point()
        or overlaps_itself(_describe(x, name))
    ):
        got = f"{tuple(x.shape)} of {x.dtype}, strides {x.stride()}" if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{name}: expected shape {tuple(shape)} of floats, each in memory of its own; got {got}.")


def infinite_where_empty(lse: Tensor) -> Tensor:
    """Returns flash-attn 2's log-sum-exps: +inf, not -inf, for a row that sees nothing."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def unpacked(x: Any, name: str, count: int, packed: bool = False) -> tuple[Tensor, ...]:
    """Returns views of what is stacked: (batch, length, count, heads, dim), or (total, count, heads, dim)."""
    axis = 1 if packed else 2
    if not isinstance(x, Tensor) or x.dim() != axis + 3 or x.shape[axis] != count:
        lead = "total" if packed else "batch, seqlen"
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ArgumentError(f"{name}: expected a tensor of shape ({lead}, {count}, nheads, headdim); got {got}.")
    return x.unbind(axis)


@in_grad_mode(False)
def find_dropped(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Returns S_dmask, (batch, heads, q_len, k_len): weights, negative where dropped; empty without dropout."""
    if "dropout" not in options:
        return q.new_empty(0)
    length = k.shape[1]
    # with the unit matrix for values, weights come out
    unit = torch.eye(max(length, 1), dtype=q.dtype, device=q.device)[:length, None]
    values = unit.expand(k.shape[0], length, k.shape[2], -1)
    plain = {name: x for name, x in options.items() if name not in ("dropout", "seed")}
    whole = attention(q, k, values, layout="blhd", **plain)
    kept = attention(q, k, values, layout="blhd", **options)
    return torch.where((kept == 0) & (whole != 0), -whole, whole)[..., :length].transpose(1, 2)
