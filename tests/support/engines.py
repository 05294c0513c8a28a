"""What tests of `sl.attention` know of an engine: NumPy arrays in and out, whatever it computes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from problems import DTYPES
from repeated import forget
from tolerance import assert_within

import speedlight as sl
from speedlight import reference
from speedlight.cpu.engine import schedule
from speedlight.cpu.runtime.tuned import changed
from speedlight.host.machine import PRODUCTS, current_isa
from speedlight.host.tunings import RegisterTiles

# sums in registers at once, and few: as instructions are unrolled, a kernel has half as many
SMALL_TILES = RegisterTiles(
    16, (2, 2, 2), *[((2, 1), (1, 1))] * 4, *[((2, 1, 2), (1, 1, 1))] * 3, ((2, 2), (2, 1)),
)  # fmt: skip


@contextlib.contextmanager
def tuned(tiles: tuple[RegisterTiles, ...] | None = None, **parts: dict[str, Any]) -> Iterator[None]:
    """Calls are prepared anew, with another tuning: of each of its parts some fields that differ."""

    more = {} if tiles is None else {"tiles": tiles}
    with changed(lambda tuning: tuning.with_parts(parts, **more)):
        try:
            forget()
            yield
        finally:
            forget()


def one_vector(vectors: int) -> dict[str, dict[str, Any]]:
    """Of a tuning: panels of so many vectors of queries."""
    worth = tuple(1.0 if n == vectors else 1e-9 for n in (1, 2, 3))
    return {product: {"worth": worth, "panels": 8, "task_flops": 800_000_000} for product in PRODUCTS}


@contextlib.contextmanager
def cpu_blocks(*, as_many: bool = False) -> Iterator[None]:
    """The CPU's blocks are what they are."""
    before = schedule.DECODE_ROWS
    schedule.DECODE_ROWS = 0 if as_many else before
    forget()
    try:
        yield
    finally:
        schedule.DECODE_ROWS = before
        forget()


def cpu_bound(q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Of the vector unit in use."""
    return reference.error_bound(q, k, v, dot=current_isa().dot(q.dtype), **options)


class Engine(NamedTuple):
    """How it is called, what it promises, and sizes of problems that it takes apart."""

    attention: Callable[..., Any]
    error_bound: Callable[..., Any]
    dtypes: tuple[str, ...] = DTYPES
    keys: int = 140  # a few more than a tile
    long: int = 1300  # keys that are divided further: into spans, or splits
    lse_error: float = 1e-6  # relative and absolute, of special values
    # in it small problems have many blocks; `as_many`: few rows are computed as many are, not decoded
    blocks: Callable[..., contextlib.AbstractContextManager[None]] = cpu_blocks
    one_arithmetic: bool = True  # the same bits whether rows are decoded or many are computed at once
    slow: bool = False  # so that of many alike a few must do

    def check(self, q: Any, k: Any, v: Any, *, zeros_allowed: bool = False, **options: Any) -> None:
        """Against the reference: shapes, dtype, special values, and the bound for every element."""
        out, lse = self.attention(q, k, v, return_lse=True, **options)
        assert out.dtype == q.dtype
        want, want_lse = reference.attention(q, k, v, return_lse=True, **options)
        bounds = self.error_bound(q, k, v, **options)
        assert_within(out, want, bounds.out, "out", zeros_allowed=zeros_allowed)
        assert_within(lse, want_lse, bounds.lse, "lse", zeros_allowed=True)


CPU = Engine(sl.attention, cpu_bound)
