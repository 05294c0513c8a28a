"""Angles of rotary positions: checks and computes the cosines and sines of every token."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import check_array, is_masked
from ..arrays.layouts import batch_of, check_dimensions
from ..arrays.torch_tensors import check_plain_tensor, converted, is_tensor, library
from ..errors import ArgumentError, ArgumentTypeError, Error, pass_on, shown
from .checks import MOST, check_flag, check_layout, integer, number, size
from .options import our_layout
from .problem import LAYOUTS

BASE = 10000.0
_ARRAY = "a NumPy array, or a PyTorch tensor"


class RotaryOptions(NamedTuple):
    """The arguments of rotary() beside x."""

    cos: Any = None
    sin: Any = None
    positions: Any = None
    base: Any = None
    interleaved: Any = False
    dims: Any = None
    layout: Any = "bhld"


class Rotation(NamedTuple):
    """The first `dims` elements of a row are turned, pair by pair."""

    cos: Any  # broadcast to x in its layout; dims / 2 columns, one for each pair, or dims, one for each element
    sin: Any
    dims: int
    interleaved: bool  # pairs are (2t, 2t + 1); else (t, t + dims / 2)

    def halves(self, x: Any) -> tuple[Any, Any]:
        """Returns the first and the second elements of pairs in rows; rows with one element a pair, twice."""
        if x.shape[-1] != self.dims:
            return x, x
        if self.interleaved:
            return x[..., ::2], x[..., 1::2]
        return x[..., : self.dims // 2], x[..., self.dims // 2 :]

    def joined(self, first: Any, second: Any) -> Any:
        """Returns rows of the first and the second elements of pairs: undoes halves()."""
        if self.interleaved:
            return library(first).stack((first, second), -1).reshape(*first.shape[:-1], self.dims)
        return library(first).concatenate((first, second), -1)


class _Sizes(NamedTuple):
    batch: int
    length: int
    head_dim: int


def computed_in(x: Any) -> str:
    """Returns the dtype in which numbers of x are computed."""
    return "float64" if str(x.dtype).endswith("float64") else "float32"


def rotation_of(x: Any, options: RotaryOptions, dtype: str | None = None) -> Rotation:
    """The rotation of a call, in `dtype` (default: what x is computed in)."""
    layout = our_layout(options.layout)
    check_layout(layout)
    options = options if layout is options.layout else options._replace(layout=layout)
    check_flag("interleaved", options.interleaved)
    sizes = _sizes(x, options.layout)
    dims = sizes.head_dim if options.dims is None else size("dims", options.dims, 2)
    if dims % 2 or not 2 <= dims <= sizes.head_dim:
        raise ArgumentError(f"dims: expected an even number from 2 to head_dim, {sizes.head_dim}; got {dims}.")
    dtype = dtype or computed_in(x)
    if options.cos is None and options.sin is None:
        cos, sin = _computed(x, options, sizes, dims, dtype)
    else:
        cos, sin = _given(x, options, sizes, dims, dtype)
    match options.layout:  # an axis for heads
        case "lhd":
            cos, sin = cos[0][:, None], sin[0][:, None]
        case "blhd":
            cos, sin = cos[:, :, None], sin[:, :, None]
        case "bhld":
            cos, sin = cos[:, None], sin[:, None]
        case _:  # hld: that of a batch of one
            pass
    return Rotation(cos, sin, dims, options.interleaved)


def _sizes(x: Any, layout: str) -> _Sizes:
    """Returns the sizes of an array or tensor of floats."""
    check_array("x", x)
    check_dimensions("x", tuple(x.shape), layout)
    batch = batch_of(tuple(x.shape), layout)
    _, length, head_dim = (x.shape[a] for a in LAYOUTS[layout][-3:])
    return _Sizes(batch, length, head_dim)


def _computed(x: Any, options: RotaryOptions, sizes: _Sizes, dims: int, dtype: str) -> tuple[Any, Any]:
    """Computes angles of base and positions in float64; their cosines and sines are rounded once."""
    base = BASE if options.base is None else number("base", options.base, "a positive number")
    if not 0 < base < math.inf:
        raise ArgumentError(f"base: expected a positive, finite number; got {shown(options.base)}.")
    lib, at = library(x), _positions(x, options, sizes)
    more = {} if lib is np else {"device": x.device}
    if isinstance(at, slice):
        at = lib.arange(at.start, at.stop, **more)[None]
    turns = base ** (-lib.arange(0, dims, 2, dtype=lib.float64, **more) / dims)
    angles = converted(at, "float64")[..., None] * turns
    return converted(lib.cos(angles), dtype), converted(lib.sin(angles), dtype)


def _given(x: Any, options: RotaryOptions, sizes: _Sizes, dims: int, dtype: str) -> tuple[Any, Any]:
    """Reads cosines and sines from tables of positions, or of each token."""
    if options.base is not None:
        raise ArgumentError("base: expected None beside cos and sin, which are of a base already; got a number.")
    found = []
    for name, t in (("cos", options.cos), ("sin", options.sin)):
        if t is None:
            raise ArgumentError(f"{name}: expected cos and sin together, or neither; got None.")
        if name == "cos" and isinstance(t, (int, float)):
            way = f"A base of angles is base={shown(t)}."
            raise ArgumentTypeError(f"cos: expected {_ARRAY}; got {type(t).__name__}. {way}")
        check_array(name, t)
        if is_tensor(t) != is_tensor(x):
            raise ArgumentTypeError(f"{name}: expected the same kind of array as x; got {type(t).__name__}.")
        _check_columns(name, t, sizes, dims, options.layout)
        found.append(t)
    cos, sin = found
    if cos.shape != sin.shape:
        raise ArgumentError(f"sin: expected shape {tuple(cos.shape)}, as cos has; got {tuple(sin.shape)}.")
    if len(cos.shape) == 3:
        if options.positions is not None:
            raise ArgumentError(
                f"positions: expected None, where cos is of each token; got some beside cos of {tuple(cos.shape)}."
            )
        return converted(cos, dtype), converted(sin, dtype)
    at = _positions(x, options, sizes)
    _check_rows(at, cos)
    cos, sin = (converted(t[at], dtype) for t in (cos, sin))
    return (cos[None], sin[None]) if isinstance(at, slice) else (cos, sin)


def _check_columns(name: str, t: Any, sizes: _Sizes, dims: int, layout: str) -> None:
    shape = tuple(t.shape)
    of_tokens = len(shape) == 3 and len(layout) == 4
    if (len(shape) != 2 and not of_tokens) or shape[-1] not in (dims, dims // 2):
        per_item = "" if len(layout) == 3 else f", or (batch, {sizes.length}, …)"
        raise ArgumentError(
            f"{name}: expected shape (positions, {dims // 2}) or (positions, {dims}){per_item}; got {shape}. "
            "With fewer columns than head_dim, say how many elements are turned: dims=."
        )
    if of_tokens and (shape[0] not in (1, sizes.batch) or shape[1] != sizes.length):
        raise ArgumentError(
            f"{name}: expected shape ({sizes.batch} or 1, {sizes.length}, …), as x has batch and length; got {shape}."
        )


def _check_rows(at: Any, cos: Any) -> None:
    """Raises unless a table has rows for all positions, as far as the host can tell."""
    rows = cos.shape[0]
    if isinstance(at, slice):
        first, last = at.start, at.stop - 1
    elif 0 in at.shape or (is_tensor(at) and not (at.device.type == "cpu" and is_plain(at))):
        return
    else:
        first, last = int(at.min()), int(at.max())
    if last >= first and not (first >= 0 and last < rows):
        raise ArgumentError(
            f"positions: expected 0 to {rows - 1}, the rows of cos; got {first if first < 0 else last}. Give a longer "
            "table, or positions=."
        )


def is_plain(x: Any) -> bool:
    """Returns whether a tensor's numbers lie in memory, and nothing records, traces or transforms it."""
    if sys.modules["torch"].compiler.is_compiling():
        return False
    try:
        check_plain_tensor(x, "x")
    except Error:
        return False
    return True


def _positions(x: Any, options: RotaryOptions, sizes: _Sizes) -> Any:
    """A slice, or (batch or 1, length or 1) of integers in x's library."""
    given, lib = options.positions, library(x)
    if given is None or (isinstance(given, (int, np.integer)) and not isinstance(given, (bool, np.bool_))):
        first = 0 if given is None else integer("positions", given)
        if abs(first) > MOST:
            raise ArgumentError(f"positions: expected positions below 2^46; got {first}.")
        return slice(first, first + sizes.length)
    if is_masked(given) or (is_tensor(given) and lib is np and getattr(given, "shape", ())):
        raise ArgumentTypeError(f"positions: expected an int, a list or {_ARRAY} as x; got {type(given).__name__}.")
    try:
        at = np.asarray(given) if lib is np else lib.as_tensor(given, device=x.device)
    except Exception as error:  # lists of different lengths, another library's code
        pass_on(error)
        raise ArgumentTypeError(f"positions: expected ints; got {type(given).__name__} ({error}).") from error
    kind = str(at.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        if 0 in at.shape:  # an empty list is of floats
            return converted(at, "int64")
        raise ArgumentTypeError(f"positions: expected ints; got {kind}. For fractions give cos and sin.")
    if at.ndim == 0:  # the first token's
        at = converted(at, "int64") + lib.arange(sizes.length, **({} if lib is np else {"device": x.device}))
    shape = tuple(at.shape)
    wanted = [(n,) for n in (sizes.length, 1)]
    if len(options.layout) == 4:
        wanted += [(b, n) for b in (sizes.batch, 1) for n in (sizes.length, 1)]
    if shape not in wanted:
        per_item = "" if len(options.layout) == 3 else f" or ({sizes.batch}, {sizes.length})"
        raise ArgumentError(
            f"positions: expected an int, the first token's, or ints of shape ({sizes.length},){per_item}; got {shape}."
        )
    at = converted(at, "int64")
    return at[None] if len(shape) == 1 else at
