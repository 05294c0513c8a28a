"""Programs side by side: contenders that compute the same, measured in turn once their results are compared."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from speedlight.tools.measuring import alternate, quantiles, ratios, stay_awake

_SHORT = 0.5  # seconds: a call that takes less is made once more, ahead of the one that counts
# norms of differences over norms, of many layers: error bounds are known of attention alone
_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 6e-2}


class Clock:
    """Seconds inside attention, forwards and backwards."""

    def __init__(self) -> None:
        self.inside = self._begun = 0.0

    def attend(self, attention: Callable[..., Any], q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Calls attention(q, k, v, **options), timed, and so is its backward pass."""
        q, k, v = _Mark.apply(self.end, q, k, v)
        self.begin()
        out = attention(q, k, v, **options)
        self.end()
        return _Mark.apply(self.begin, out)[0]

    def begin(self) -> None:
        self._begun = time.perf_counter()

    def end(self) -> None:
        self.inside += time.perf_counter() - self._begun


class _Mark(torch.autograd.Function):
    """Passes tensors through; backwards, calls `then` when all their gradients have come."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Any) -> Any:
        ctx.then = then
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *flows: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.then()
        return None, *flows


class Contender(NamedTuple):
    """A way to do it: `run` returns tensors to compare, and the seconds inside attention, if that is a part."""

    run: Callable[[], tuple[list[torch.Tensor], float | None]]
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class Problem(NamedTuple):
    """Contenders that compute the same; "speedlight" is the first."""

    name: str
    contenders: dict[str, Contender]
    dtype: torch.dtype = torch.float32


def measured(problem: Problem, turns: int) -> dict[str, Any]:
    """Returns a problem's row: times, ours compared with the others', and attention alone where it is told apart."""
    first: dict[str, float] = {}
    want: list[torch.Tensor] = []
    for name, contender in problem.contenders.items():  # this compiles, too
        start = time.perf_counter()
        with contender.around():
            got, _ = contender.run()
        first[name] = time.perf_counter() - start
        want = want or [x.detach().clone() for x in got]
        if (off := _farthest(got, want)) > _TOLERANCE[problem.dtype]:
            return {"name": problem.name, "refused": f"{name} has another result than ours, by {off:.2g}"}
        del got
    parts: dict[str, list[float]] = {name: [] for name in problem.contenders}

    def sample(name: str) -> float:
        stay_awake()
        with problem.contenders[name].around():
            if first[name] < _SHORT:
                problem.contenders[name].run()
            start = time.perf_counter()
            _, inside = problem.contenders[name].run()
            seconds = time.perf_counter() - start
        parts[name] += [] if inside is None else [inside]
        return seconds

    times = alternate({name: functools.partial(sample, name) for name in problem.contenders}, turns)
    row = {"name": problem.name, "seconds": {x: quantiles(t) for x, t in times.items()}, "ratios": ratios(times)}
    if any(parts.values()):
        row |= {"attention": {x: quantiles(t) for x, t in parts.items()}, "attention_ratios": ratios(parts)}
    return row


def _farthest(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a.detach().double() - b).norm() / b.double().norm()) for a, b in zip(got, want, strict=True))


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


LEGEND = "Medians, in turn; in brackets: how many times ours. The first call compiles; all kinds take minutes."


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    lines, parts = [row["name"]], row.get("attention", {})
    for who, spread in row["seconds"].items():
        times, alone = f"{spread[2] * 1e3:,.0f} ms", f", attention of it {parts[who][2] * 1e3:,.0f} ms" if parts else ""
        if who != "speedlight":
            times += f" ({row['ratios'][who][2]:.2f})"
            alone += f" ({row['attention_ratios'][who][2]:.2f})" if parts else ""
        lines.append(f"  {who:<12}{times}{alone}")
    return "\n".join(lines)
