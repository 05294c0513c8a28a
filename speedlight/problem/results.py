"""Results of calls: allocated here, written by kernels, and returned as arrays of the caller's library."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.array import describe
from ..arrays.dtypes import DTYPES
from ..arrays.making import check_out, deliver, empty_like, like_input, tell_written
from ..arrays.memory import Array
from ..errors import ArgumentError
from .options import Options
from .problem import LAYOUTS, Problem


class Results:
    """The results of a call: where kernels write them, and how they get back to the caller's library."""

    __slots__ = ("_given", "_lse", "_out", "_q", "lse", "out")

    def __init__(
        self, q: Array, shape: tuple[int, ...], lse_shape: tuple[int, ...] | None, out: Any, inputs: tuple[Array, ...],
        staged: bool = False, ordered: bool = False,
    ) -> None:  # fmt: skip
        """out: the caller's own array, or None. `staged`: the call may fail after it has begun to write, or read what
        it writes over: then deliver() alone writes to the caller's own. `ordered`: a new tensor lies as q does.
        """
        self._q, self._given = q, out is not None
        if out is None:
            self._out, self.out = empty_like(q, shape, q.dtype, ordered=ordered)
        else:
            self._out, self.out = out, describe(out, "out", gpu=q.device != "cpu")
            if self.out.device != q.device:
                raise ArgumentError(f"out: expected an array on {q.device}, as q; got one on {self.out.device}.")
            check_out(self.out, shape, q.dtype, inputs)
            if staged:
                self.out = replace(empty_like(q, shape, q.dtype)[1], final=self.out)
            else:
                tell_written(self.out)
        self._lse, self.lse = None, None
        if lse_shape is not None:
            self._lse, self.lse = empty_like(q, lse_shape, "float64" if q.dtype == "float64" else "float32")

    @property
    def lse_address(self) -> int:
        return 0 if self.lse is None else self.lse.address

    def returned(self) -> Any:
        """out, or (out, lse), once kernels have run."""
        deliver(self.out)
        out = self._out if self._given else like_input(self._q, self._out)
        return out if self._lse is None else (out, like_input(self._q, self._lse))


class ResultLayout(NamedTuple):
    """Shapes and strides of what a call returns."""

    shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    alike: bool  # out has q's shape and strides
    strides: tuple[int, ...] | None  # of out, in elements, where it is not contiguous

    @classmethod
    def of(cls, layout: str, q: Array, value_dim: int, strides: tuple[int, ...]) -> ResultLayout:
        """Returns the form of an out with these strides, in bytes, beside queries."""
        shape, size = (*q.shape[:-1], value_dim), DTYPES[q.dtype][1]
        dense = tuple([math.prod(shape[d + 1 :]) * size for d in range(len(shape))])
        lse_shape, alike = tuple([q.shape[axis] for axis in LAYOUTS[layout][:-1]]), (q.shape, q.strides)
        return cls(
            shape, lse_shape, (shape, strides) == alike, None if strides == dense else tuple(x // size for x in strides)
        )


def results_for(
    q: Array, problem: Problem, options: Options, return_lse: bool, out: Any, inputs: tuple[Array, ...]
) -> Results:
    """Makes a call's results. `out` is staged where kernels may learn that a lookup is out of range, and where they
    read numbers that others hold: `out` may be among those.
    """
    lse_shape = tuple(q.shape[x] for x in LAYOUTS[options.layout][:-1]) if return_lse else None
    program = problem.program if out is not None else None
    staged = program is not None and (program.may_fail or not all([t.is_own for t in program.tables]))
    return Results(q, (*q.shape[:-1], problem.value_dim), lse_shape, out, inputs, staged, ordered=True)
