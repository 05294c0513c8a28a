"""The shape of an adapter: another library's call in the words of attention(). Adapters elsewhere may build on it, too.

An adapter is a function of the other library's signature. It

1. refuses what is not offered, by the table of its `Library`, which documents are made from;
2. says the rest in options of `speedlight.attention()` or, of tensors that autograd may follow, of
   `speedlight.torch.attention()`; both know autocast, and check what they are given;
3. calls that with the library's names in force, so that errors name what the caller wrote;
4. gives the results the library's shape.

>>> import numpy as np, speedlight as sl
>>> from speedlight.adapting import Library, limits
>>> THEIRS = Library("window-attention 1", names={"q": "query"}, refused={"weights": "Use sl.reference.weights()."})
>>> def attend(query, key, value, window=(-1, -1), weights=None):
...     THEIRS.refuse(weights=weights)
...     with THEIRS.renamed:
...         return sl.attention(query, key, value, window=limits(*window), layout="blhd")
>>> attend(np.ones((1, 5, 2, 8)), np.ones((1, 5, 2, 8)), np.ones((1, 5, 2, 8)), (2, -1)).shape
(1, 5, 2, 8)
>>> try:
...     attend(np.ones((5, 2, 8)), np.ones((5, 2, 8)), np.ones((5, 2, 8)))
... except sl.Error as error:
...     print(str(error).partition(";")[0])
query: expected 4 dimensions (batch, length, heads, head_dim) for layout='blhd'
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arrays.dlpack import has
from .arrays.dtypes import DTYPES
from .errors import Error, UnsupportedError, not_installed, pass_on, rename, shown, warn_once
from .errors.advice import of_no_tensor, of_scale
from .expressions.tables import table
from .expressions.tracing import Expression, expression
from .problem.checks import check_flag, check_index, integer, number, scale_of
from .problem.signatures import public

__all__ = [
    "DTYPES",
    "Library",
    "Renamed",
    "add_distances",
    "check_each_once",
    "check_flag",
    "check_index",
    "draw_seed",
    "has",
    "integer",
    "limits",
    "not_installed",
    "number",
    "of_no_tensor",
    "of_scale",
    "pass_on",
    "public",
    "rows_in_use",
    "scale_of",
    "shown",
    "warn_once",
]


class Renamed:
    """Context in which errors name arguments as the other library does. It holds no state: one serves all calls."""

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if self.names and isinstance(error, Error):
            rename(error, self.names)


@dataclass(frozen=True, slots=True, eq=False)
class Library:
    """Differences between another library's call and ours, as far as a table can tell them."""

    name: str
    tested: tuple[str, str] | None = None  # the first and the last release that the tests have run on
    names: Mapping[str, str] = field(default_factory=dict)  # its names of our arguments
    ignored: Collection[str] = ()  # its arguments that change no result
    refused: Mapping[str, str] = field(default_factory=dict)  # its arguments that are not offered, and the way out
    renamed: Renamed = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "renamed", Renamed(self.names))

    def refuse(self, **given: Any) -> None:
        """Raises for an argument that is not offered, unless it is None."""
        for name, x in given.items():
            if x is not None:
                got = shown(x) if isinstance(x, (str, int, float)) else type(x).__name__
                raise UnsupportedError(f"{name}: expected None; got {got}. {self.refused[name]}")

    def check_version(self, installed: str | None) -> None:
        """Raises for a release that is missing or older than those tested."""
        from packaging.version import Version

        assert self.tested is not None
        first = self.tested[0]
        if installed is None:
            raise UnsupportedError(
                f"{self.name}: expected {first}; none is installed. pip install '{self.name}=={first}.*'"
            )
        found = Version(installed).release[:2]
        if found < Version(first).release:
            raise UnsupportedError(
                f"{self.name}: expected {first} or newer, whose interfaces are used; got {installed}. pip install -U "
                f"'{self.name}>={first}'"
            )


def limits(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """Returns the window of two sides of which None or a negative one (elsewhere -1) is no limit.

    >>> from speedlight.adapting import limits
    >>> limits(3, -1), limits(-1, -1)
    ((3, None), None)
    """
    sides = [None if n is None or n < 0 else n for n in (left, right)]
    return None if sides == [None, None] else (sides[0], sides[1])


def draw_seed() -> Any:
    """Draws a seed of dropout, a tensor, from PyTorch's default generator; in a graph, too."""
    import torch

    return torch.randint(1 << 62, (), dtype=torch.int64, device="cpu")


def rows_in_use(starts: Iterable[int], lengths: Iterable[int]) -> Any:
    """Returns the rows of packed sequences of which only the first `lengths` count, one sequence after another."""
    import torch

    rows = [torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=False)]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def check_each_once(name: str, indices: Any) -> None:
    """Raises where a row of chosen keys has one twice, which counts twice in some libraries and once here.

    >>> import torch
    >>> from speedlight.adapting import check_each_once
    >>> check_each_once("indices", torch.tensor([[3, 1, -1, -1]]))
    """
    if indices.device.type != "cpu":  # where attention() refuses chosen keys
        return
    ordered = np.sort(indices.detach().numpy(), axis=-1)
    again = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if again.any():
        at = tuple(np.argwhere(again)[0])
        row = ", ".join(map(str, at[:-1]))
        raise UnsupportedError(
            f"{name}: expected each key once in a row; got {ordered[at]} twice in {name}[{row}]. It would count twice "
            "there and once here: give it once, and -1 in the other place."
        )


def add_distances(slopes: Any) -> Expression:
    """Returns the score of ALiBi in which the distance counts, not its sign: s - slopes[h] · |i - j|, as flash-attn
    has it; slopes by head, or by item and head.
    """
    of = table(slopes, "alibi_slopes")
    if of.array.ndim == 2:
        return expression(lambda s, b, h, i, j: s - of[b, h] * abs(i - j), "score")
    return expression(lambda s, b, h, i, j: s - of[h] * abs(i - j), "score")
