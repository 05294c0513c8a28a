"""Under torch.compile, calls leave the graph: they run as they are, between two compiled parts."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def leaves_graph(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A public call that torch.compile does not look into: memory addresses mean nothing to a tracer."""

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        if in_graph():
            return outside(function, *args, **options)
        return function(*args, **options)

    return call


def in_graph() -> bool:
    """Whether torch.compile is looking at this call, or would at what it calls: a frame without tensors it passes by,
    and from then on every frame of the same code.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    torch = sys.modules["torch"]
    return torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


_untraced: dict[Any, Any] = {}


def outside(function: Any, *args: Any, **options: Any) -> Any:
    """The call as it is.

    For methods of caches, that say so themselves: when a decorator's call returns, signals are looked for.
    """
    if function not in _untraced:
        _untraced[function] = sys.modules["torch"].compiler.disable(function)
    return _untraced[function](*args, **options)


# What torch.compiler.disable() itself marks functions with; here before torch is imported, if it ever is
vars(outside).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="speedlight's kernels are no graph nodes")
