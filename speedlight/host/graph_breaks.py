"""Under torch.compile, calls leave the graph: they run as they are, between two compiled parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UnsupportedError
from .insides import TORCH, as_left_alone

_F = TypeVar("_F", bound=Callable[..., Any])


def in_graph() -> bool:
    """Returns whether torch.compile traces this call, or would trace what it calls: a frame without tensors it passes
    by, and from then on every frame of the same code.
    """
    return "torch._dynamo" in sys.modules and (sys.modules["torch"].compiler.is_compiling() or passed_by())


def passed_by() -> bool:
    """Returns whether this frame runs untraced, while torch.compile would trace what is called here."""
    if "torch._dynamo" not in sys.modules:
        return False
    return TORCH.get_eval_frame_callback() is not None


def constant(function: _F) -> _F:
    """Marks a function that Dynamo calls once, with arguments that are constants of the graph; loads no Dynamo."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def check_outside(name: str, what: str) -> None:
    """Refuses what Dynamo would look into: it makes trees and tables of Python's objects, which no graph has."""
    if "torch._dynamo" in sys.modules and sys.modules["torch"].compiler.is_dynamo_compiling():
        raise UnsupportedError(
            f"{name}: expected {what} to be called outside of what is compiled; got a call in a graph. Make it once, "
            "before, and let the compiled function use it: gradients of tensors flow through it, and their numbers are "
            "those of each call."
        )


_untraced: dict[Any, Any] = {}


def outside(function: Any, *args: Any, **options: Any) -> Any:
    """The call as it is.

    For methods of caches, that say so themselves: when a decorator's call returns, signals are looked for.
    """
    if function not in _untraced:
        _untraced[function] = sys.modules["torch"].compiler.disable(as_left_alone(function))
    return _untraced[function](*args, **options)


# What torch.compiler.disable() itself marks functions with; here before torch is imported, if it ever is
vars(outside).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="speedlight's kernels are no graph nodes")
