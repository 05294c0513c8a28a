"""Rows of symbols: the entries of a table's row taken together, as in `(chosen[b, h, i] == j).any()`.

Operations are done entry by entry while a function is traced; a row ends as one number: any, all, sum, dot …
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ..arrays.torch_tensors import is_tensor
from ..errors import ExpressionError, shown
from . import foreign

Apply = Callable[..., Any]
_MOST = 250  # entries: an expression has room for as many lookups


def _operator(op: str) -> Callable[..., Any]:
    return lambda self, other: self.apply(op, self, other)


def _reflected(op: str) -> Callable[..., Any]:
    return lambda self, other: self.apply(op, other, self)


def _unary(op: str) -> Callable[..., Any]:
    return lambda self: self.apply(op, self)


class Row:
    """Entries side by side. `apply`: symbols' operations by name; `at`: of a table's row, its entry at an index."""

    __slots__ = ("_entries", "apply", "at", "count", "name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        apply: Apply,
        entries: Callable[[], list[Any]],
        count: int,
        name: str = "row",
        at: Callable[[Any], Any] | None = None,
    ) -> None:
        self.apply, self._entries, self.count, self.name, self.at = apply, entries, count, name, at

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        if self.count > _MOST:
            raise ExpressionError(
                f"{self.name}: expected a row of at most {_MOST} entries, taken together; got {self.count}. Index it, "
                "or put what it says into a smaller table."
            )
        return iter(self._entries())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            part = list(self)[index]
            return Row(self.apply, lambda: part, len(part), self.name)
        if self.at is not None:
            from_the_end = type(index) is int and -self.count <= index < 0
            return self.at(index + self.count if from_the_end else index)
        try:
            return list(self)[index]
        except (TypeError, IndexError, ExpressionError):
            raise ExpressionError(
                f"{self.name}: expected a number from 0 to {self.count - 1} as index; got {shown(index)}."
            ) from None

    __add__, __radd__, __sub__, __rsub__ = _operator("add"), _reflected("add"), _operator("sub"), _reflected("sub")
    __mul__, __rmul__, __truediv__ = _operator("mul"), _reflected("mul"), _operator("div")
    __rtruediv__, __floordiv__, __rfloordiv__ = _reflected("div"), _operator("floordiv"), _reflected("floordiv")
    __mod__, __rmod__, __pow__, __rpow__ = _operator("mod"), _reflected("mod"), _operator("pow"), _reflected("pow")
    __and__, __rand__, __or__, __ror__ = _operator("and"), _reflected("and"), _operator("or"), _reflected("or")
    __xor__, __rxor__, __lshift__, __rshift__ = _operator("xor"), _reflected("xor"), _operator("shl"), _operator("shr")
    __rlshift__, __rrshift__ = _reflected("shl"), _reflected("shr")
    __lt__, __le__, __gt__, __ge__ = _operator("lt"), _operator("le"), _operator("gt"), _operator("ge")
    __eq__, __ne__ = _operator("eq"), _operator("ne")
    __neg__, __abs__, __invert__ = _unary("neg"), _unary("abs"), _unary("not")

    def __matmul__(self, other: Any) -> Any:
        return _dot(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _dot(other, self)

    def __bool__(self) -> bool:
        raise ExpressionError(f"{self.name}: a row of {self.count} has no truth value. Use .any() or .all().")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self._called("numpy", ufunc, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        return self._called("numpy", function, args, options)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        first, *_ = [x for x in args if isinstance(x, Row)]
        return first._called("torch", function, args, options or {})

    def _called(self, library: str, function: Any, args: Any, options: Any) -> Any:
        name = getattr(function, "__name__", "")
        if name in _ENDS and isinstance(args[0], Row):
            if len(args) == 1:
                return _ended(name, args[0], **options)
            if library == "torch" and type(args[1]) is int:  # torch.max(row, 0) is a pair, and no maximum of row and 0
                raise ExpressionError(f"torch.{name}: expected a row alone in an expression; got dim {args[1]}, too.")
        if name in ("dot", "inner", "vdot", "vecdot") and len(args) == 2:
            return _dot(*args)
        return foreign.called(self.apply, library, function, args, dict(options))

    def __getattr__(self, name: str) -> Any:
        if name in _ENDS:
            return functools.partial(_ended, name, self)
        if name in ("dot", "inner"):
            return functools.partial(_dot, self)
        method = foreign.method(self.apply, self, name)
        if method is None:
            raise ExpressionError(f"{self.name}: a row of {self.count} has no attribute {name!r} in an expression.")
        return method


def is_row(x: Any) -> bool:
    return isinstance(x, Row)


def entrywise(apply: Apply, op: str, operands: tuple[Any, ...]) -> Row:
    """An operation on rows of one length, and on what is the same for every entry."""
    rows = [list(x) if is_row(x) or _is_flat(x) else None for x in operands]
    lengths = {len(row) for row in rows if row is not None} - {1}
    if len(lengths) > 1:
        raise ExpressionError(f"{op}: expected rows of one length; got {', '.join(map(str, sorted(lengths)))}.")
    count = max(lengths, default=1)
    pairs = list(zip(rows, operands, strict=True))
    made = [apply(op, *(x if row is None else row[n % len(row)] for row, x in pairs)) for n in range(count)]
    return Row(apply, lambda: made, count)


def _is_flat(x: Any) -> bool:
    """Returns whether it is an array of one dimension that rows meet entry by entry."""
    return (isinstance(x, np.ndarray) or is_tensor(x)) and x.ndim == 1


def _end(op: str, of: str | None = None) -> Callable[..., Any]:
    """A row's entries joined by an operation, left to right; `of`: each as this kind first."""

    def end(x: Row, dim: Any = None, keepdim: bool = False, *, axis: Any = None) -> Any:
        if dim not in (None, 0, -1) or axis not in (None, 0, -1):
            raise ExpressionError(f"{x.name}: expected dim None, 0 or -1 of a row; got {shown(dim or axis)}.")
        entries = [x.apply("cast", one, of) if of else one for one in x]
        if not entries:
            raise ExpressionError(f"{x.name}: expected a row with entries; got none.")
        joined = functools.reduce(lambda a, b: x.apply(op, a, b), entries)
        return Row(x.apply, lambda: [joined], 1) if keepdim else joined

    return end


def _ended(name: str, x: Row, *args: Any, **options: Any) -> Any:
    """A row as one number."""
    more = set(options) - {"dim", "keepdim", "axis"}
    if more or len(args) > 2:
        what = ", ".join(sorted(more)) or f"{1 + len(args)} arguments"
        raise ExpressionError(f"{name}: expected a row, and dim or keepdim; got {what}.")
    return _ENDS[name](x, *args, **options)


def _mean(x: Row, dim: Any = None, keepdim: bool = False, *, axis: Any = None) -> Any:
    return _ENDS["sum"](x, dim, keepdim, axis=axis) / float(x.count)


def _dot(a: Any, b: Any) -> Any:
    """The sum of products; of features that many, longer heads are faster."""
    x = a if is_row(a) else b
    if x.count > _MOST // 2:
        raise ExpressionError(
            f"{x.name}: expected a product of rows of at most {_MOST // 2} entries; got {x.count}. Append them to q "
            "and k as further elements of the head dim: scores are their products."
        )
    return _ENDS["sum"](entrywise(x.apply, "mul", (a, b)))


_ENDS: dict[str, Callable[..., Any]] = {
    "any": _end("or", "bool"), "all": _end("and", "bool"), "sum": _end("add"), "prod": _end("mul"),
    "max": _end("max"), "min": _end("min"), "amax": _end("max"), "amin": _end("min"), "mean": _mean,
}  # fmt: skip
