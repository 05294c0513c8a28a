"""Scales of codes in the caller's pages: their kinds, by number of dimensions, and their checks.

| dimensions | shape | a scale for |
| 0, or a number | () | all |
| 1 | (kv_heads,) | each head |
| 2 | (kv_heads, dim) | each channel: folded into queries, and into results |
| 3 | (pages, page_size, kv_heads) | each token and head |
"""

from __future__ import annotations

import numbers
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.array import describe
from ..arrays.dtypes import PAGE_CODES, conversion
from ..arrays.memory import Array
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, join_words
from .checks import number
from .problem import LAYOUTS

NAMES = ("k_scales", "v_scales")
_MOST = float(np.finfo(np.float32).max)


def as_arrays(k_scales: Any, v_scales: Any, *, are_one: bool) -> tuple[Any, Any]:
    """Returns scales of keys and of values, numbers as arrays: where a scale lies is an argument of a call.

    are_one: values are columns of keys, and have their scales.
    """
    if are_one:
        if v_scales is not None:
            raise ArgumentError(
                "v_scales: expected None where values are columns of k_pages, whose scales are k_scales; got "
                f"{type(v_scales).__name__}."
            )
        k_scales = _as_array(NAMES[0], k_scales)
        return k_scales, k_scales
    return _as_array(NAMES[0], k_scales), _as_array(NAMES[1], v_scales)


def _as_array(name: str, x: Any) -> Any:
    if not isinstance(x, numbers.Real):
        return x
    value = number(name, x, "a number or an array of float32")
    if not abs(value) <= _MOST:  # NaN is not, either
        raise ArgumentError(f"{name}: expected a finite number of float32; got {value}.")
    return np.array(value, np.float32)


def have_channels(scales: list[Array]) -> bool:
    """Returns whether any scales are those of channels."""
    return any([len(x.shape) == 2 for x in scales])


def check_codes(k: Array, v: Array, q: Array, scales: tuple[Any, Any] | None, *, on_gpu: bool) -> None:
    """Raises unless pages of codes are of one dtype, whole and on the CPU, and have scales; other pages have none."""
    coded = [x for x in (k, v) if x.dtype in PAGE_CODES]
    if not coded:
        for name, x in zip(NAMES, scales or (), strict=False):
            if x is not None:
                raise ArgumentError(
                    f"{name}: expected None beside {k.name} of {k.dtype}, since only codes ({join_words(PAGE_CODES)}) "
                    f"have scales; got {type(x).__name__}."
                )
        return
    for x in (k, v):
        if on_gpu or x.device != "cpu":
            raise UnsupportedError(
                f"{x.name}: expected pages of float32, float16 or bfloat16 on a GPU, whose kernels read no codes from "
                f"them; got {x.dtype}. Give arrays on the CPU, or keep codes in PagePool(dtype='int8', device='cuda')."
            )
        if x.rest is not None:
            raise UnsupportedError(f"{x.name}: expected codes in one array; got {x.dtype} in two parts. Join them.")
    if v.dtype != k.dtype:
        raise ArgumentTypeError(f"{v.name}: expected dtype {k.dtype}, as {k.name} has; got {v.dtype}.")
    for name, x in zip(NAMES, scales or (None, None), strict=True):
        if x is None:
            raise ArgumentTypeError(
                f"{name}: expected a number or an array of float32 beside pages of {k.dtype}; got None. Of codes that "
                f"are the numbers themselves it is {name}=1.0."
            )


def describe_scales(name: str, x: Any, pages: Array) -> Array:
    """Reads where the scales of some pages lie; raises unless their shape says what each is for."""
    scales = describe(x, name)
    if scales.dtype != "float32":
        raise ArgumentTypeError(
            f"{name}: expected float32; got {scales.dtype}. Convert it first: {conversion(name, 'float32')}."
        )
    shapes = _shapes_of(pages)
    if scales.shape != shapes.get(len(scales.shape)):
        wanted = f"a number, or a shape for heads {shapes[1]}, channels {shapes[2]} or tokens and heads {shapes[3]}"
        way = _way_to(name, scales.shape, shapes)
        raise ArgumentError(f"{name}: expected {wanted}, by {pages.name}; got {scales.shape}.{way}")
    return scales


def _shapes_of(pages: Array) -> dict[int, tuple[int, ...]]:
    """Returns the shapes that scales may have, by their number of dimensions."""
    heads = pages.shape[2]
    return {0: (), 1: (heads,), 2: (heads, pages.shape[3]), 3: pages.shape[:3]}


def _way_to(name: str, shape: tuple[int, ...], shapes: dict[int, tuple[int, ...]]) -> str:
    """Returns code that gives scales of another shape the one that is meant."""
    (heads,), channels, tokens = shapes[1], shapes[2], shapes[3]
    whole = tuple([n for n in shape if n != 1])
    if not whole:
        return f" One scale for all is {name}.reshape(())."
    if shape == (tokens[0], tokens[2], tokens[1]):
        return f" Heads come last: {name}.swapaxes(1, 2)."
    if shape == (*tokens, 1):
        return f" Write {name}[..., 0]."
    if whole == channels or whole == (channels[0] * channels[1],):
        return f" Of channels write {name}.reshape{channels}."
    if whole == (heads,):
        return f" Of heads write {name}.reshape({heads})."
    if shape == (tokens[0], heads):
        one_by_one = f"{name}[:, None]"
        return f" Of pages and heads write numpy.broadcast_to({one_by_one}, {tokens}), or {one_by_one}.expand{tokens}."
    return ""


def for_tokens(scales: Array, pages: Array) -> Array:
    """Returns scales as one for each token and head: a stride of 0 where several have the same.

    Of channels, which are folded, it is 1.
    """
    if len(scales.shape) == 2:
        one = np.ones((), np.float32)
        scales = replace(scales, address=one.ctypes.data, shape=(), strides=(), owner=one)
    steps = (0,) * (3 - len(scales.shape)) + scales.strides
    return replace(scales, shape=pages.shape[:3], strides=steps, owner=(scales.owner,))


def fold(x: np.ndarray, channels: np.ndarray, layout: str) -> np.ndarray:
    """Returns rows of query heads times the scales of their kv heads' channels, in float32: one rounding.

    channels: (kv_heads, dim).
    """
    heads = LAYOUTS[layout][-3]
    each = np.repeat(channels, x.shape[heads] // len(channels), axis=0)
    if heads != x.ndim - 2:  # heads come before rows
        each = each[:, None]
    with np.errstate(all="ignore"):
        return x.astype(np.float32) * each
