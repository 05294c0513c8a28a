"""Autograd functions of PyTorch in traced functions: replaced by what they compute, if its derivative is the one they
define.

A symbol cannot go through `Function.apply`, which is not Python; the function's rule for vmap, or its forward, can.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from ..arrays.torch_tensors import in_grad_mode
from ..errors import ExpressionError, pass_on
from .derivative import flows
from .symbols import Symbol, node_of
from .tree import FLOW, Node, evaluate

_POINTS = np.linspace(-4.9, 5.3, 41)  # where what was traced is compared with the function itself
_NEAR = 1e-4


class _Info(NamedTuple):
    """The information that a rule for vmap gets."""

    batch_size: int = 1
    randomness: str = "error"


class Traceable:
    """Stands for a class of autograd functions: apply() of symbols is traced, all else is the class's."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def apply(self, *args: Any) -> Any:
        if not [x for x in args if isinstance(x, Symbol)]:
            return self._function.apply(*args)
        _check(self._function, args)
        return _value(self._function, args)


def is_autograd_function(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, type) and issubclass(x, torch.autograd.Function)


def _value(function: Any, args: tuple[Any, ...]) -> Any:
    base = sys.modules["torch"].autograd.Function
    if function.vmap is not base.vmap:
        return function.vmap(_Info(), tuple(0 if isinstance(x, Symbol) else None for x in args), *args)[0]
    if function.setup_context is base.setup_context:
        raise ExpressionError(
            f"{function.__name__}: expected an autograd function with a setup_context, whose forward takes no ctx. "
            "Write forward(inputs) and setup_context(ctx, inputs, output), or use PyTorch's operations."
        )
    return function.forward(*args)


def _check(function: Any, args: tuple[Any, ...]) -> None:
    """Raises unless values and slopes by each symbol, at some points, are the function's own: its backward is not
    traced.
    """
    kinds = {n: x.node.kind for n, x in enumerate(args) if isinstance(x, Symbol)}
    torch, floats = sys.modules["torch"], [n for n, kind in kinds.items() if kind in ("float", "double")]
    points = {n: torch.from_numpy(np.roll(_POINTS, 7 * n)) for n in kinds}
    points = {n: x > 0 if kinds[n] == "bool" else x.long() if n not in floats else x for n, x in points.items()}
    points = {n: x.requires_grad_() if n in floats else x for n, x in points.items()}
    want, slopes = _of_tensors(function, args, points, floats)
    for n in kinds:
        symbols = {m: Symbol(Node("symbol", kind, value="s" if m == n else f"x{m}")) for m, kind in kinds.items()}
        root = node_of(_value(function, tuple(symbols.get(m, x) for m, x in enumerate(args))))
        env = {symbols[m].node.value: points[m].detach().numpy() for m in kinds}
        _compare(function, "forward", evaluate(root, env), want)
        if n in slopes and root.is_float:
            back = flows(root, ()).s
            found = 0.0 if back is None else evaluate(back, env | {FLOW: np.ones(len(_POINTS))})
            flows_at = np.isfinite(want)  # a score of -inf is hidden: nothing flows, whatever its slope
            _compare(function, "backward", np.where(flows_at, found, 0.0), np.where(flows_at, slopes[n], 0.0))


def _of_tensors(function: Any, args: Any, points: dict[int, Any], floats: list[int]) -> tuple[Any, dict[int, Any]]:
    """Returns the function's values at the points and its slopes, or no slopes if it has no backward."""
    torch = sys.modules["torch"]

    @in_grad_mode(True)
    def differentiate() -> tuple[Any, tuple[Any, ...]]:
        out = function.apply(*[points.get(n, x) for n, x in enumerate(args)])
        followed = [points[n] for n in floats] if out.requires_grad else []
        return out, torch.autograd.grad(out.sum(), followed, allow_unused=True) if followed else ()

    try:
        out, found = differentiate()
    except NotImplementedError:
        return function.apply(*[points[n].detach() if n in points else x for n, x in enumerate(args)]).numpy(), {}
    except Exception as error:
        pass_on(error)
        raise ExpressionError(
            f"{function.__name__}: expected an autograd function of numbers that runs in float64 on the CPU; "
            f"got {type(error).__name__}: {error}. Use PyTorch's operations."
        ) from error
    slopes = [0.0 if x is None else x.numpy() for x in found] or [0.0] * len(floats)
    return out.detach().numpy(), dict(zip(floats, slopes, strict=True))


def _compare(function: Any, what: str, found: Any, want: Any) -> None:
    if not np.allclose(found, want, rtol=_NEAR, atol=_NEAR, equal_nan=True):
        raise ExpressionError(
            f"{function.__name__}: expected a {what} that PyTorch's own operations make of its inputs; got another, "
            "which a traced function cannot have. Use those operations."
        )
