"""Values of masks and scores in PyTorch's operations, which every transform of PyTorch's can follow.

The table of operations is expressions/operations.py; kinks have its slopes: the first argument has what is equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arrays.torch_tensors import is_traced
from ..expressions.operations import INT_MAX, INT_MIN, MOST_ANGLE
from ..expressions.tree import Node, order, out_of_range


def value_of(root: Node, env: dict[str, Any], tables: dict[Any, torch.Tensor], number: torch.dtype, seen: Any) -> Any:
    """The tree over tensors that broadcast; `tables`: the tensor of each; `seen`: where an index must be in range."""
    kinds = {"bool": torch.bool, "int": torch.int64, "float": number, "double": torch.float64}
    values: dict[int, Any] = {}
    for node in order(root):
        args = [values[id(a)] for a in node.args]
        match node.op:
            case "symbol":
                value = env[node.value].to(kinds[node.kind])
            case "number":
                value = torch.tensor(node.value, dtype=kinds[node.kind], device=env["i"].device)
            case "table":
                value = _look_up(node, tables[node.value], args, seen).to(kinds[node.kind])
            case "cast":
                value = _cast(args[0], kinds[node.kind])
            case _:
                value = _VALUES[node.op](*args)
        values[id(node)] = value
    return values[id(root)]


def _look_up(node: Node, table: torch.Tensor, index: list[torch.Tensor], seen: Any) -> Any:
    table = table if table.ndim else table.reshape(1)
    inside = [x.clamp(0, max(n - 1, 0)) for x, n in zip(index, table.shape, strict=True)]
    for at, (x, y) in enumerate(zip(index, inside, strict=True)):
        wrong = (x != y) & seen
        if not is_traced(wrong) and wrong.any():
            raise out_of_range(node, at, int(x.expand(wrong.shape)[wrong][0]))
    return table[tuple(torch.broadcast_tensors(*inside))]


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """A float made whole loses its fraction; NaN is 0, and what int64 cannot hold its nearest end."""
    if not (x.is_floating_point() and dtype == torch.int64):
        return x.to(dtype)
    inside = (x >= -(2.0**63)) & (x < 2.0**63)
    ends = torch.where(x > 0, INT_MAX, torch.where(x < 0, INT_MIN, 0))
    return torch.where(inside, torch.where(inside, x, 0.0).to(dtype), ends)


def _floordiv(a: Any, b: Any) -> Any:
    if a.is_floating_point():
        return torch.div(a, b, rounding_mode="floor")
    usual = (b != 0) & (b != -1)
    quotient = torch.div(a, torch.where(usual, b, 1), rounding_mode="floor")
    return torch.where(usual, quotient, torch.where(b == 0, 0, -a))


def _mod(a: Any, b: Any) -> Any:
    if a.is_floating_point():
        return torch.remainder(a, b)
    usual = (b != 0) & (b != -1)
    return torch.where(usual, torch.remainder(a, torch.where(usual, b, 1)), 0)


def _shl(a: Any, n: Any) -> Any:
    inside = (n >= 0) & (n < 64)
    return torch.where(inside, a << torch.where(inside, n, 0), 0)


def _shr(a: Any, n: Any) -> Any:
    return a >> torch.where((n >= 0) & (n < 64), n, 63)


def _least(a: Any, b: Any) -> Any:
    return torch.where((b < a) | (b != b), b, a)


def _greatest(a: Any, b: Any) -> Any:
    return torch.where((b > a) | (b != b), b, a)


def _of_angle(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(torch.where(x.abs() <= MOST_ANGLE, x, torch.nan))


_VALUES: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "floordiv": _floordiv, "mod": _mod,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "shl": _shl, "shr": _shr,
    "not": torch.logical_not, "neg": torch.neg, "abs": lambda a: torch.where(a < 0, -a, a), "min": _least,
    "max": _greatest, "where": torch.where, "floor": torch.floor, "exp": torch.exp, "exp2": torch.exp2,
    "log": torch.log, "log2": torch.log2, "tanh": torch.tanh, "sqrt": torch.sqrt, "sigmoid": torch.sigmoid,
    "sin": _of_angle(torch.sin), "cos": _of_angle(torch.cos), "tan": _of_angle(torch.tan), "erf": torch.erf,
    "log1p": torch.log1p, "expm1": torch.expm1,
}  # fmt: skip
