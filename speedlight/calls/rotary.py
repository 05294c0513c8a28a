"""rotary(): rotates queries and keys by their positions."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from ..arrays.array import check_out, describe
from ..arrays.layouts import batch_of
from ..arrays.memory import overlap
from ..arrays.torch_tensors import converted, library, makes_plain_tensors
from ..host.insides import TORCH
from ..host.memo import Memo
from ..host.rounding import standard
from ..problem.options import AnyArray, ArrayOf, Int, Ints, Layout, T, our_layout
from ..problem.problem import LAYOUTS
from ..problem.rotary_angles import RotaryOptions, Rotation, computed_in, is_plain, rotation_of
from ..problem.signatures import public

_PIECE = 1 << 17  # numbers that are turned at a time
_WHOLE = slice(None)
_FEW = 64  # tokens
_WHOLE_OR_NONE, _NUMBERS_OR_NONE = frozenset((int, type(None))), frozenset((int, float, type(None)))


class _Known(NamedTuple):
    """A rotation, and tables that turn whole rows by half: a column for each element, the second sines negative."""

    rotation: Rotation
    cos: Any  # None: rows are not of that kind
    sin: Any


_known: Memo[_Known] = Memo(64, 1 << 20)  # by shape, dtype and every option


@public(leaves_graph=False)
def rotary(
    x: ArrayOf[T],
    cos: AnyArray | None = None,
    sin: AnyArray | None = None,
    *,
    positions: Int | Ints | None = None,
    base: float | None = None,
    interleaved: bool = False,
    dims: int | None = None,
    layout: Layout = "bhld",
    out: AnyArray | None = None,
) -> T:
    """Rotates queries or keys by their positions (RoPE): pairs (a, b) become (a·cos - b·sin, b·cos + a·sin).

    Args:
        x: queries or keys, (batch, heads, length, head_dim) or as `layout` says, of float32, float64, float16 or
            bfloat16: a NumPy array or a PyTorch tensor of any device and strides.
        cos, sin: tables with a row for each position, (positions, dims / 2), or (positions, dims), a column for each
            element, as transformers makes them; or rows for each token, (batch or 1, length, dims / 2 or dims).
            Default: those of positions and base.
        positions: the first token's (the others follow), or each token's: (length,) or (batch, length). Default 0.
        base: pair t of a token at p turns by p · base^(-2t / dims). Default 10,000.
        interleaved: pairs are (0, 1), (2, 3), … as GPT-J, flash-attention and Meta's Llama have them. Default: (0,
            dims / 2), (1, dims / 2 + 1), … as in transformers' Llama and GPT-NeoX.
        dims: how many elements of a row turn, from the first on; the others stay. Default head_dim.
        layout: "bhld", "blhd", "hld" or "lhd", as for attention(); in a packed one positions run through unless given.
        out: where to write the result; may be x itself.

    Returns:
        The turned rows, of x's kind, shape and dtype. Computed in float32 (float64 in float64): each product and their
        sum are rounded, then all once to 16 bits; angles in float64. Autograd follows, to cos and sin, too; by hand,
        what flows back to x is rotary() with -sin, or with negative positions.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    Source: Su et al., RoFormer (2021).

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 3, 4), np.float32)
    >>> sl.rotary(x, positions=1)[0, 0].round(3).tolist()[0]
    [-0.3009999990463257, 0.9900000095367432, 1.3819999694824219, 1.0099999904632568]
    >>> turned = sl.rotary(x, np.zeros((3, 2), np.float32), np.ones((3, 2), np.float32))
    >>> turned[0, 0, 0].tolist()
    [-1.0, -1.0, 1.0, 1.0]
    """
    options = RotaryOptions(cos, sin, positions, base, interleaved, dims, layout)
    key = _key_of(x, options)
    known = None if key is None else _known.get(key)
    if known is None:
        known = _made_known(x, options) if key is not None else _Known(rotation_of(x, options), None, None)
        if key is not None:
            _known.put(key, known, 4 * known.rotation.cos.nbytes)
    if known.cos is not None and out is None:
        turn: Any = _turned_by_numpy if type(x) is np.ndarray else _turned_tensor
        return turn(x, known)
    if out is not None:
        check_out(out, x)
    return _rotated(x, known.rotation, out)


def _made_known(x: Any, options: RotaryOptions) -> _Known:
    """Makes tensors that any later call may use, which tensors made in inference mode are not."""
    lib = library(x)
    with contextlib.nullcontext() if lib is np else TORCH.inference_mode(False):
        rotation = rotation_of(x, options)
        cos, sin = rotation.cos, rotation.sin
        if rotation.interleaved or rotation.dims != x.shape[-1] or x.dtype != cos.dtype:
            return _Known(rotation, None, None)
        return _Known(rotation, lib.concatenate((cos, cos), -1), lib.concatenate((sin, -sin), -1))


def _turned_tensor(x: Any, known: _Known) -> Any:
    """The same bits as turned(): a·cos - b·sin is a·cos + b·(-sin). In half the time."""
    return x * known.cos + (x * known.sin).roll(known.rotation.dims // 2, -1)


@standard
def _turned_by_numpy(x: np.ndarray, known: _Known) -> Any:
    """The same, silently, in place."""
    half = known.rotation.dims // 2
    with np.errstate(all="ignore"):
        result, other = x * known.cos, x * known.sin
        result[..., :half] += other[..., half:]
        result[..., half:] += other[..., :half]
    return result


def _key_of(x: Any, options: RotaryOptions) -> Any:
    """Returns what the angles of an array depend on: of few tokens that follow each other, as every layer and head of
    a step asks for; None of others.
    """
    if options.cos is not None or options.sin is not None or not (type(x) is np.ndarray or makes_plain_tensors(x)):
        return None
    _, _, positions, base, interleaved, dims, layout = options
    kinds = type(positions), type(base), type(interleaved), type(dims), type(layout)
    axes = LAYOUTS.get(our_layout(layout)) if kinds[4] is str else None
    if axes is None or len(axes) != len(x.shape) or batch_of(x.shape, layout) * x.shape[axes[-2]] > _FEW:
        return None
    if not (kinds[0] in _WHOLE_OR_NONE and kinds[1] in _NUMBERS_OR_NONE and kinds[3] in _WHOLE_OR_NONE):
        return None
    return (x.shape, x.dtype, *options) if kinds[2] is bool else None


def _rotated(x: Any, rotation: Rotation, out: Any) -> Any:
    """In pieces where that may be; into `out`, if there is one."""
    if math.prod(x.shape) > _PIECE and _may_be_cut(x, rotation, out):
        out = library(x).empty_like(x) if out is None else out
        _by_pieces(x, rotation, out)
        return out
    result = _by_numpy(x, rotation) if library(x) is np else turned(x, rotation)
    if out is None:
        return result
    if library(out) is np:
        np.copyto(out, result)
    else:
        out.copy_(result)
    return out


def turned(x: Any, rotation: Rotation) -> Any:
    """By the operations of x's library, which autograd, transforms and compilers follow."""
    lib, dims = library(x), rotation.dims
    a, b = rotation.halves(converted(x[..., :dims], computed_in(x)))
    (cos_a, cos_b), (sin_a, sin_b) = map(rotation.halves, (rotation.cos, rotation.sin))
    result = rotation.joined(a * cos_a - b * sin_a, b * cos_b + a * sin_b)
    result = result.astype(x.dtype, copy=False) if lib is np else result.to(x.dtype)
    return result if dims == x.shape[-1] else lib.concatenate((result, x[..., dims:]), -1)


@standard
def _by_numpy(x: Any, rotation: Rotation) -> Any:
    """Silently: a visible NaN or infinity comes out."""
    with np.errstate(all="ignore"):
        return turned(x, rotation)


def _may_be_cut(x: Any, rotation: Rotation, out: Any) -> bool:
    """Returns whether pieces may be computed in turn: autograd does not record them, and none overwrites
    a later one.
    """
    read = [x, rotation.cos, rotation.sin]
    if library(x) is not np:
        known = read if out is None else [*read, out]
        if any([y.device.type != "cpu" or not is_plain(y) for y in known]):
            return False
    return out is None or not any([y is not out and overlap(describe(y, "x"), describe(out, "out")) for y in read])


def _by_pieces(x: Any, rotation: Rotation, out: Any) -> None:
    """Computes a piece after the other, so that intermediates stay in a core's cache."""
    steps, left = [], max(_PIECE // x.shape[-1], 1)
    for n in reversed(x.shape[:-1]):
        steps.append(min(n, left))
        left = max(left // steps[-1], 1)
    ranges = [range(0, n, step) for n, step in zip(x.shape, reversed(steps), strict=False)]
    for first in itertools.product(*ranges):
        at = tuple(slice(a, a + r.step) for a, r in zip(first, ranges, strict=True))
        cos, sin = (
            t[tuple(_WHOLE if n == 1 else s for s, n in zip(at, t.shape, strict=False))]
            for t in (rotation.cos, rotation.sin)
        )
        piece = rotation._replace(cos=cos, sin=sin)
        out[at] = _by_numpy(x[at], piece) if library(x) is np else turned(x[at], piece)
