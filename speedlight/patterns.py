"""Ready-made masks and scores, each written with the public expressions. Masks combine with & | ~."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError
from .tracing import Expression, expression, table, tanh


def causal() -> Expression:
    """j <= i: no key after the query."""
    return expression(lambda b, h, i, j: j <= i)


def window(left: int | None, right: int | None = 0) -> Expression:
    """i - left <= j <= i + right; None means no limit on that side.

    >>> import speedlight as sl
    >>> sl.window(1024, 0)
    mask (((i - j) <= 1024) & ((j - i) <= 0))
    """
    if left is None and right is None:
        raise ArgumentError("left: expected a number for left or right; got None for both. Leave the mask out.")
    if right is None:
        return expression(lambda b, h, i, j: i - j <= left)
    if left is None:
        return expression(lambda b, h, i, j: j - i <= right)
    return expression(lambda b, h, i, j: (i - j <= left) & (j - i <= right))


def prefix(n: int) -> Expression:
    """j < n: the first n keys, for every query. Joined by | to causal(): a prefix language model."""
    return expression(lambda b, h, i, j: j < n)


def documents(ids: Any) -> Expression:
    """Query and key in the same document: ids[i] == ids[j], one id per absolute position."""
    of = table(ids, "ids")
    if of.array.ndim == 2:
        return expression(lambda b, h, i, j: of[b, i] == of[b, j])
    return expression(lambda b, h, i, j: of[i] == of[j])


def dilated(k: int) -> Expression:
    """Every k-th key, counted from the query: (i - j) % k == 0."""
    if k < 1:
        raise ArgumentError(f"k: expected at least 1; got {k}.")
    return expression(lambda b, h, i, j: (i - j) % k == 0)


def alibi(slopes: Any) -> Expression:
    """s + slopes[h] · (j - i), one slope per query head.

    Source: Press et al., Train Short, Test Long (2022).
    """
    of = table(slopes, "slopes")
    return expression(lambda s, b, h, i, j: s + of[h] * (j - i))


def softcap(c: float) -> Expression:
    """c · tanh(s / c): scores stay within ±c."""
    if not c > 0:
        raise ArgumentError(f"c: expected a positive number; got {c}.")
    return expression(lambda s, b, h, i, j: c * tanh(s / c))


def relative_bias(bias: Any) -> Expression:
    """s + bias[h, i - j + n - 1] for a table of (q_heads, 2n - 1) distances from -(n - 1) to n - 1."""
    of = table(bias, "bias")
    if of.array.ndim != 2 or of.array.shape[1] % 2 == 0:
        raise ArgumentError(f"bias: expected shape (q_heads, 2n - 1); got {of.array.shape}.")
    middle = of.array.shape[1] // 2
    return expression(lambda s, b, h, i, j: s + of[h, i - j + middle])
