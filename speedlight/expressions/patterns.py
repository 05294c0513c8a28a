"""Ready-made masks and scores, each written with the public expressions. Masks combine with & | ~."""

from __future__ import annotations

import copy
import numbers
from typing import Any

import numpy as np

from ..arrays.integers import whole
from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError, ArgumentTypeError, shown
from ..host.graph_breaks import check_outside
from .functions import minimum, tanh
from .symbols import Symbol
from .tables import Table, table
from .tracing import Expression, expression

_MOST = 1 << 46  # positions and distances
_FLOATS = ("float", "double")


def causal() -> Expression:
    """Causal mask, j <= i: hides keys after the query.

    >>> import speedlight as sl
    >>> sl.causal()
    mask (j <= i)
    """
    return expression(lambda b, h, i, j: j <= i)


def window(left: int | None, right: int | None = 0) -> Expression:
    """Mask of a sliding window, i - left <= j <= i + right; None means no limit on that side.

    >>> import speedlight as sl
    >>> sl.window(1024, 0)
    mask (((i - j) <= 1024) & ((j - i) <= 0))
    """
    if isinstance(left, (tuple, list)):
        raise ArgumentTypeError(f"left: expected an int; got {shown(left)}. Of a pair write sl.window(*pair).")
    left, right = (None if x is None else _limit(name, x) for name, x in (("left", left), ("right", right)))
    if left is None and right is None:
        raise ArgumentError("left: expected a number for left or right; got None for both. Leave the mask out.")
    if right is None:
        return expression(lambda b, h, i, j: i - j <= left)
    if left is None:
        return expression(lambda b, h, i, j: j - i <= right)
    return expression(lambda b, h, i, j: (i - j <= left) & (j - i <= right))


def prefix(n: int) -> Expression:
    """Mask that shows the first n keys to every query: j < n. `causal() | prefix(n)` is a prefix language model.

    >>> import speedlight as sl
    >>> sl.causal() | sl.prefix(16)
    mask ((j <= i) | (j < 16))
    """
    n = _integer("n", n, 0)
    return expression(lambda b, h, i, j: j < n)


def documents(ids: Any) -> Expression:
    """Mask that shows the keys of the query's own document: ids[i] == ids[j].

    ids: one id per absolute position, or a row of them for each item of the call, (batch, length).

    >>> import speedlight as sl
    >>> sl.documents([0, 0, 1, 1]) & sl.causal()
    mask ((ids[i] == ids[j]) & (j <= i))
    """
    of = copy.copy(_table(ids, "ids", ("bool", "int"), (1, 2)))  # a table that is given stays as it is
    of.way = of.way or "Give an id for every token, those of queries and of keys: as many as the longest of them."
    if of.array.ndim == 2:
        of.of_items = True
        return expression(lambda b, h, i, j: of[b, i] == of[b, j])
    return expression(lambda b, h, i, j: of[i] == of[j])


def padding(attention_mask: Any) -> Expression:
    """Mask that hides padding, at any place: keys where a tokenizer's attention_mask[b, j] is 0.

    Args:
        attention_mask: (batch, k_len) of bool, or of the integers 0 and 1: an array, a tensor or lists. It is copied.
            In a cache keys past its end are visible: the mask of the prompts does for all that is generated.

    Rows that see no key, such as left padding under causal(), are 0. No query and no key moves.

    >>> import speedlight as sl
    >>> sl.padding([[0, 0, 1, 1], [1, 1, 1, 1]]) & sl.causal()
    mask (((j >= 4) | attention_mask[b, min(j, 3)]) & (j <= i))
    """
    check_outside("attention_mask", "sl.padding")
    given = attention_mask if isinstance(attention_mask, Table) else table(attention_mask, "attention_mask")
    if given.kind not in ("bool", "int"):
        raise ArgumentTypeError(
            f"attention_mask: expected bool, or the integers 0 and 1; got dtype {given.dtype_name}. Use "
            "attention_mask != 0; what is added to scores is score=[array]."
        )
    if len(given.shape) != 2:
        way = "A bool array that broadcasts to (batch, q_heads, q_len, k_len) is mask=array."
        if len(given.shape) == 1:
            way = "Of one sequence write [attention_mask]; lengths are lengths=."
        raise ArgumentError(f"attention_mask: expected 2 dimensions, (batch, k_len); got shape {given.shape}. {way}")
    entries = given.host()
    odd = entries[(entries != 0) & (entries != 1)]
    if odd.size:
        raise ArgumentError(
            f"attention_mask: expected 0 (hidden) and 1 (visible); got {odd[0]}. Use attention_mask != 0, or "
            "sl.documents(ids) for numbers of documents."
        )
    of, n = Table(entries != 0, "attention_mask"), given.shape[1]
    of.of_items = of.of_keys = True
    return expression(lambda b, h, i, j: (j >= n) | of[b, minimum(j, n - 1)])


def dilated(k: int) -> Expression:
    """Mask that shows every k-th key, counted from the query: (i - j) % k == 0.

    >>> import speedlight as sl
    >>> sl.dilated(4)
    mask (((i - j) % 4) == 0)
    """
    k = _integer("k", k, 1)
    return expression(lambda b, h, i, j: (i - j) % k == 0)


def blocks(table: Any, size: Any) -> Expression:
    """Mask that shows blocks of queries and keys: table[b, h, i // q_size, j // k_size].

    Hidden blocks cost nothing: tiles of 128 keys are skipped, or cut to parts of 16.

    Args:
        table: bool, (rows, columns), (q_heads, rows, columns), or (batch, q_heads, rows, columns), of blocks. Heads
            and batch may be 1, for all. It covers all positions of the call, in a cache also those of earlier tokens.
        size: positions in a block: an int, or (q_size, k_size).

    >>> import speedlight as sl
    >>> sl.blocks([[True, False], [True, True]], 128)
    mask table[(i // 128), (j // 128)]
    """
    if isinstance(size, (tuple, list)) and len(size) == 2:
        q_size, k_size = (_integer(f"size[{n}]", x, 1) for n, x in enumerate(size))
    elif whole(size) is None:
        raise ArgumentTypeError(f"size: expected an int, or two: (q_size, k_size); got {shown(size)}.")
    else:
        q_size = k_size = _integer("size", size, 1)
    of = copy.copy(_table(table, "table", ("bool",), (2, 3, 4)))
    of.way = of.way or "Give rows and columns of blocks for all positions of queries and keys."
    lead = of.shape[:-2]
    of.heads_axis = len(lead) - 1 if lead and lead[-1] != 1 else None
    of.of_items = len(lead) == 2 and lead[0] != 1

    def mask(b: Symbol, h: Symbol, i: Symbol, j: Symbol) -> Any:
        own = [x if n != 1 else 0 for x, n in zip((b, h)[2 - len(lead) :], lead, strict=True)]
        return of[(*own, i // q_size, j // k_size)]

    return expression(mask)


def alibi(slopes: Any) -> Expression:
    """ALiBi's linear bias, s + slopes[h] · (j - i), with one slope per query head.

    slopes: an array, a tensor that may require grad, or a Table for attention_backward(grads=).

    Source: Press et al., Train Short, Test Long (2022).

    >>> import numpy as np, speedlight as sl
    >>> sl.alibi(np.float32([0.5, 0.25]))
    score (s + (slopes[h] * cast((j - i))))
    """
    if whole(slopes) is not None:
        way = "The usual ones of n heads, a power of 2, are 2.0 ** (-8 / n * numpy.arange(1, n + 1))."
        raise ArgumentTypeError(f"slopes: expected an array, one per query head; got {shown(slopes)}. {way}")
    of = _table(slopes, "slopes", ("int", *_FLOATS), (1,))
    if not np.isfinite(of.host()).all():
        raise ArgumentError("slopes: expected finite numbers; got NaN or infinity among them.")
    of.heads_axis = 0
    return expression(lambda s, b, h, i, j: s + of[h] * (j - i))


def softcap(c: Any) -> Expression:
    """Soft cap, c · tanh(s / c): keeps scores within ±c, a number or a PyTorch tensor of one, which may be learned.

    >>> import speedlight as sl
    >>> sl.softcap(30.0)
    score (30.0 * tanh((s / 30.0)))
    """
    check_outside("c", "sl.softcap")
    of = _table(c, "c", _FLOATS, (1, 2, 3, 4)) if is_tensor(c) and c.numel() == 1 else None
    given = c if of is None else of.host().item()
    if is_tensor(c) and of is None:
        raise ArgumentTypeError(
            f"c: expected a number, or a tensor of one; got shape {tuple(c.shape)}. One for each head is a function: "
            "lambda s, b, h, i, j: c[h] * sl.tanh(s / c[h])."
        )
    if isinstance(given, (bool, np.bool_)) or not isinstance(given, numbers.Real):
        raise ArgumentTypeError(f"c: expected a number; got {shown(c)}.")
    number: Any = given
    if not 2.0**-126 <= number < 2.0**127:  # float32 holds it and its inverse
        way = " Without a cap leave it out." if number == 0 else ""
        raise ArgumentError(f"c: expected a positive number up to 1.7e38; got {shown(c)}.{way}")
    if of is not None:
        number = of[(0,) * len(of.shape)]
    return expression(lambda s, b, h, i, j: number * tanh(s / number))


def relative_bias(bias: Any) -> Expression:
    """Relative position bias, s + bias[h, i - j + n - 1], with a number for each query head and distance.

    bias: (q_heads, 2n - 1), for distances from -(n - 1) to n - 1: an array, a tensor that may require grad, or a Table
    for attention_backward(grads=).

    >>> import numpy as np, speedlight as sl
    >>> sl.relative_bias(np.zeros((8, 255), np.float32))
    score (s + bias[h, ((i - j) + 127)])
    """
    of = _table(bias, "bias", ("int", *_FLOATS), (2,))
    if of.array.shape[1] % 2 == 0:
        way = " That is (2n - 1, q_heads): pass bias.T." if of.array.shape[0] % 2 else ""
        raise ArgumentError(f"bias: expected shape (q_heads, 2n - 1); got {of.array.shape}.{way}")
    of.heads_axis = 0
    of.way = of.way or "Give 2n - 1 distances, n no less than positions are apart; or hide farther keys with a mask."
    middle = of.array.shape[1] // 2
    return expression(lambda s, b, h, i, j: s + of[h, i - j + middle])


def _limit(name: str, x: Any) -> int:
    """Returns a window's limit, checked. -1, elsewhere no limit, would hide the query's own key."""
    if (whole(x) or 0) < 0:
        raise ArgumentError(
            f"{name}: expected an int from 0 to 2^46, or None for no limit, flash-attn's -1; got {shown(x)}. Keys "
            "strictly before the query are mask=lambda b, h, i, j: j < i."
        )
    return _integer(name, x, 0)


def _integer(name: str, x: Any, least: int) -> int:
    value = whole(x)
    if value is None:
        way = "One for each item is a function: lambda b, h, i, j: j < n[b]."
        raise ArgumentTypeError(f"{name}: expected an int; got {shown(x)}.{f' {way}' if name == 'n' else ''}")
    if not least <= value <= _MOST:
        raise ArgumentError(f"{name}: expected an int from {least} to 2^46; got {shown(x)}.")
    return value


def _table(x: Any, name: str, kinds: tuple[str, ...], dims: tuple[int, ...]) -> Table:
    """A table of the kinds and dimensions that a pattern needs."""
    check_outside(name, "patterns of arrays, tensors and tables")
    of = x if isinstance(x, Table) else table(x, name)
    if of.kind not in kinds:
        raise ArgumentTypeError(
            f"{name}: expected {' or '.join(kinds)} entries; got dtype {of.array.dtype}. Convert it."
        )
    if of.array.ndim not in dims:
        several = "s" * (dims[-1] > 1)
        expected = f"{' or '.join(map(str, dims))} dimension{several}"
        raise ArgumentError(f"{name}: expected {expected}; got shape {of.array.shape}.")
    return of
