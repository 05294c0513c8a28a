"""Problems of one shape: attention of a tensor over itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

import speedlight as sl
from speedlight.tools.measuring import measure_plan, normal_numbers


class Problem(NamedTuple):
    """Attention of a tensor over itself, one item, as many heads of keys as of queries."""

    dtype: str
    heads: int
    length: int
    head_dim: int
    causal: bool
    backward: bool = False

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} H{self.heads} N{self.length} d{self.head_dim} {mask}{' backward' * self.backward}"


def tensors(dtype: str, heads: int, n: int, d: int) -> list[np.ndarray]:
    """Returns q, k and v, [1, heads, n, d], of normal numbers."""
    return normal_numbers(dtype, *[(1, heads, n, d)] * 3)


def problems_of(
    dtypes: list[str] | None, dims: list[int] | None, lengths: list[int] | None, causal: bool | None, heads: int,
    backward: bool,
) -> list[Problem]:  # fmt: skip
    """Returns all problems of these sizes; None stands for the usual ones."""
    dtypes, masks = dtypes or ["float32", "float16", "bfloat16"], (False, True) if causal is None else (causal,)
    sizes = itertools.product(dtypes, dims or (64, 128), lengths or (128, 512, 2048, 8192), masks)
    return [Problem(t, heads, n, d, c, backward) for t, d, n, c in sizes]


def row_of(asked: Problem, turns: int, names: Iterable[str]) -> dict[str, Any]:
    """Measures a problem beside peers of these names; a result that is wrong leaves "refused" alone."""
    plan = sl.plan(
        q_heads=asked.heads, q_len=asked.length, head_dim=asked.head_dim, dtype=asked.dtype,
        causal=asked.causal, backward=asked.backward,
    )  # fmt: skip
    return {"name": asked.name} | asked._asdict() | measure_plan(plan, {"causal": asked.causal}, turns, names)
