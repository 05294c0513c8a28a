"""Steps through the units of rows and blocks, for kernels that take them in an order of the product's choosing."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..language.vector import Function, Value


class KeyRun(NamedTuple):
    """Units [first, end) of rows of keys, `step` of them at a time: so many `bytes` of a row as load(row, t) gives
    them; once transposed, columns(found, i) has the vectors of keys of the i-th `lanes` units.
    """

    first: Value
    end: Value
    step: int
    bytes: int
    load: Callable[[Value, Value], Value]
    columns: Callable[[list[Value], int], list[Value]]


def each_unit(k: Function, count: Value, body: Callable[..., None], *, unrolled: bool) -> None:
    """Calls body(t) of `count` units, one after another."""
    if unrolled:
        k.unrolled(0, count, body)
    else:
        with k.range(0, count) as t:
            body(t)
