"""Biases: dense arrays that are added to scores and have gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from ..arrays.torch_tensors import is_detached
from ..expressions.tables import Table
from .option_keys import key_of_mask
from .options import Options, scores_of
from .problem import LAYOUTS, QUERY_BLOCK

_FEW = 3 * QUERY_BLOCK  # queries; and entries of a bias that is broadcast to all items and heads, at most
_ENTRIES = 1 << 24
_SHARES, _SHARE_BYTES = 64, 64 << 20  # of gradients of tables, and bytes of all shares together


def shares_of(entries: int) -> int:
    """Returns how many shares gradients of tables with so many entries are summed in (docs/numerics.md)."""
    return max(1, min(_SHARES, _SHARE_BYTES // (8 * max(1, entries))))


def array_of(x: Any) -> Any:
    """Returns the array, or the plain tensor, that a table reads where it lies; anything else as it is."""
    if type(x) is not Table or x.is_own or x.tensor is not None:
        return x
    return x.watched if is_detached(x.watched) else x.array


def arrays_of(options: Options) -> list[Any]:
    """Returns the arrays among mask and score, those of tables included."""
    return [array_of(x) for x in options.arrays()]


def key_of_bias(x: Any) -> Any:
    """Returns key_of_mask() of a mask or score; a table that is read where it lies counts as its array."""
    if type(x) is list:
        members = tuple([key_of_bias(one) for one in x])
        return ... if ... in members else members
    return key_of_mask(array_of(x))


def with_own_tables(options: Options, grads: Any, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[Options, Any]:
    """Returns a mask, a score and `grads` whose tables are the call's own, which may outlive those of the caller.

    One whose gradient is asked for is broadcast to all items and heads if queries are few: then each of its entries has
    one term, which a thread writes and nobody adds to; the engine adds the terms afterwards, to the same bits. Where
    queries are many, sums are shared out by their positions.

    Args:
        q, k: shapes, of whatever is refused later, too.
    """
    if type(grads) is not tuple or options.mask is options.score is None:
        return options, grads
    square, own = _square(options.layout, q, k), {}
    entries = sum([x.array.size for x in grads if isinstance(x, Table)])
    # items have the same rows at the same positions: then blocks of all are known
    q_start: Any = options.q_start
    is_alike = options.q_lengths is options.k_lengths is None and not np.ndim(q_start)
    given: list[Any] = [options.mask, *scores_of(options.score)]
    for x in given:
        if type(x) is not Table or x.tensor is not None:
            continue
        array = x.array
        if square and array.shape[-2:] == square[-2:] and square[-2] <= _FEW and math.prod(square) <= _ENTRIES:
            fits = all([n in (1, m) for n, m in zip(array.shape[::-1], square[::-1], strict=False)])
            in_order = (x.kind == "float" and is_alike) or _adds_in_order(array.shape, square, shares_of(entries))
            if fits and in_order and any([x is y for y in grads]):
                array = np.broadcast_to(array, square)
        if array.shape != x.shape or not x.is_own:
            own[id(x)] = table = Table(array, x.name, copy=False)
            table.watched = x.array if x.is_own else array_of(x)
    if not own:
        return options, grads
    mask = own.get(id(options.mask), options.mask)
    score = None if options.score is None else [own.get(id(x), x) for x in scores_of(options.score)]
    return replace(options, mask=mask, score=score), tuple([own.get(id(x), x) for x in grads])


def _adds_in_order(shape: tuple[int, ...], square: tuple[int, ...], shares: int) -> bool:
    """Returns whether the canonical sum of an entry is that of its terms, one after the other: no share of blocks of
    queries, ascending by item, head and position, has two of them, or one share has all.
    """
    batch, heads, rows, _ = square
    blocks = -(-rows // QUERY_BLOCK)
    apart = blocks * (heads if len(shape) > 2 and shape[-3] == heads else 1)
    return shares == 1 or -(-batch * heads * blocks // shares) <= apart


def _square(layout: Any, q: tuple[int, ...], k: tuple[int, ...]) -> tuple[int, ...]:
    """Returns (batch, q_heads, q_len, k_len) of a call that may have dense scores; () of another."""
    if not isinstance(layout, str) or layout not in LAYOUTS or layout == "lhd":
        return ()
    axes = LAYOUTS[layout]
    if not len(q) == len(k) == len(axes):
        return ()
    return q[0] if len(axes) == 4 else 1, q[axes[-3]], q[axes[-2]], k[axes[-2]]
