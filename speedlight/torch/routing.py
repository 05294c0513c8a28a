"""Routing of PyTorch's attention: to speedlight or not, by thread; counts of what was taken and what was left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..host.forks import renew_after_fork

_ORDINARY: Any = getattr(torch.Tensor, "__torch_dispatch__")  # noqa: B009, which is no method: pyright minds
_TRACED = frozenset(("FakeTensor", "FunctionalTensor"))
SDPA = "scaled_dot_product_attention"


class Report(NamedTuple):
    """Counts of calls that speedlight computed, and of those left to PyTorch with the reason; in every thread.

    A call counts once, where it is first seen. Calls outside sdpa() and patch() count nowhere. Layers of transformers
    with latent attention count as "DeepseekV3Attention.expand_kv": taken where kv_b_proj was absorbed.
    """

    taken: dict[str, int]  # by PyTorch's name of what was called
    left: dict[tuple[str, str], int]  # by that name, and why

    def __str__(self) -> str:
        """
        >>> from speedlight.torch.routing import Report
        >>> print(Report({"scaled_dot_product_attention": 12}, {("multi_head_attention_forward", "need_weights"): 1}))
        taken  12  scaled_dot_product_attention
        left    1  multi_head_attention_forward: need_weights
        """
        rows = [("taken", n, name) for name, n in sorted(self.taken.items())]
        rows += [("left", n, f"{name}: {why}") for (name, why), n in sorted(self.left.items())]
        width = max([len(str(n)) for _, n, _ in rows], default=0)
        return "\n".join([f"{what:5}  {n:>{width}}  {name}" for what, n, name in rows]) or "nothing taken, nothing left"

    __repr__ = __str__


class _Counts:
    """Counts of the whole process. A signal may come while a number is being raised: the lock is reentrant."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.left: dict[tuple[str, str], int] = {}
        self.after_fork()
        renew_after_fork(self)

    def after_fork(self) -> None:
        self.lock = threading.RLock()


class _Thread(threading.local):
    """The innermost sdpa() of a thread says whose attention it computes with."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, bool]] = []  # a token of each, and what it says


_counts = _Counts()
_thread = _Thread()
_patches: list[None] = []  # one for each patch() that stands


def is_ours() -> bool:
    """Returns whether this thread's calls of PyTorch's attention go to speedlight now."""
    asked = _thread.asked
    return asked[-1][1] if asked else bool(_patches)


@contextlib.contextmanager
def ask(which: bool) -> Iterator[None]:
    """Sends this thread's calls to speedlight (True), or to PyTorch (False)."""
    stack, token = _thread.asked, object()
    try:
        stack.append((token, which))
        yield
    finally:  # which may come after that of one that was entered before
        stack[:] = [x for x in stack if x[0] is not token]


def count_patches(number: int) -> int | None:
    """Adds a patch() (1) or takes one away (-1): how many stand then, None if there was none to take away."""
    with _counts.lock:
        if number > 0:
            _patches.append(None)
        elif not _patches:
            return None
        else:
            _patches.pop()
        return len(_patches)


def count_taken(name: str) -> None:
    with _counts.lock:
        _counts.taken[name] = _counts.taken.get(name, 0) + 1


def count_left(name: str, why: str) -> None:
    with _counts.lock:
        _counts.left[name, why] = _counts.left.get((name, why), 0) + 1


def read_counts(reset: bool) -> Report:
    with _counts.lock:
        found = Report(dict(_counts.taken), dict(_counts.left))
        if reset:
            _counts.taken.clear()
            _counts.left.clear()
    return found


def find_subclass(*tensors: Any) -> str | None:
    """Returns the name of a tensor class that computes in its own way, but for those that compilers trace with."""
    for x in tensors:
        if x is not None and type(x).__torch_dispatch__ is not _ORDINARY and type(x).__name__ not in _TRACED:
            return type(x).__name__
    return None


def is_traced(x: torch.Tensor) -> bool:
    """Returns whether a compiler is looking: then nothing is computed, and calls are seen more than once."""
    return type(x).__name__ in _TRACED
