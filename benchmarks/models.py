"""Whole models, and gradients that only PyTorch's dense path has, beside PyTorch's attention: `run.py models`."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import speedlight.torch
from speedlight.tools.measuring import alternate, quantiles, ratios, stay_awake

KINDS = ("gpt", "mask", "flex", "minilm", "prefill", "generate")  # the last three: language_models.py
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


def problems(kind: str) -> Iterator[Problem]:
    """Makes problems of a kind, or of all, one after another."""
    if kind in ("", "gpt"):
        yield from (_gpt(dtype) for dtype in (torch.float32, torch.bfloat16))
    if kind in ("", "mask"):
        yield from (_float_mask(d, heads) for d, heads in ((64, 1), (64, 8), (128, 1)))
    if kind in ("", "flex"):
        yield from (_documents(forward_only) for forward_only in (True, False))
    if kind not in KINDS[:3]:
        import language_models

        yield from language_models.problems(kind)


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


# --- a GPT of six layers, trained


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int, clock: Clock) -> None:
        super().__init__()
        self.heads, self.clock = heads, clock
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = self.clock.attend(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def _gpt(dtype: torch.dtype, layers: int = 6, dim: int = 512, heads: int = 8, length: int = 2048) -> Problem:
    """Forward and backward pass; SDPA is PyTorch's, or ours by `speedlight.torch.sdpa()`."""
    torch.manual_seed(0)
    clock = Clock()
    model = nn.Sequential(*(_Block(dim, heads, clock) for _ in range(layers))).to(dtype)
    x = torch.randn(1, length, dim, dtype=dtype)

    def step() -> tuple[list[torch.Tensor], float]:
        clock.inside = 0.0
        model.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        return [loss, *(p.grad for p in model.parameters() if p.grad is not None)], clock.inside

    name = f"GPT of {layers} layers, {dim} wide, {heads} heads, {length} tokens, {_short(dtype)}, a training step"
    by_torch = Contender(step, lambda: speedlight.torch.sdpa(False))
    return Problem(name, {"speedlight": Contender(step, speedlight.torch.sdpa), "torch": by_torch}, dtype)


# --- what PyTorch has no kernel for


def _float_mask(head_dim: int, mask_heads: int, heads: int = 8, length: int = 4096) -> Problem:
    """SDPA with a float mask that requires grad: PyTorch makes the matrix of scores."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, head_dim, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(mask_heads, length, length, requires_grad=True))
    flow = torch.randn(1, heads, length, head_dim)

    def run(attention: Callable[..., Any]) -> tuple[list[torch.Tensor], None]:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, flow)], None

    ours = Contender(lambda: run(speedlight.torch.scaled_dot_product_attention))
    theirs = Contender(lambda: run(F.scaled_dot_product_attention))
    name = f"SDPA, mask ({mask_heads}, {length}, {length}) requires grad, {heads} heads, d={head_dim}, float32"
    return Problem(name, {"speedlight": ours, "torch": theirs})


def _documents(forward_only: bool, heads: int = 8, length: int = 8192, head_dim: int = 64) -> Problem:
    """FlexAttention's ALiBi within documents: PyTorch compiles its forward pass, and has no backward pass here."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, length, head_dim, requires_grad=not forward_only) for _ in range(3)]
    flow = torch.randn(1, heads, length, head_dim)
    document = torch.searchsorted(torch.arange(1, 8) * length // 8, torch.arange(length), right=True)
    slopes = torch.tensor([2.0 ** -(8 * (h + 1) / heads) for h in range(heads)])

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (document[i] == document[j]) & (i >= j)

    def alibi(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s - slopes[h] * (i - j)

    def run(attention: Callable[..., Any]) -> tuple[list[torch.Tensor], None]:
        out = attention(*inputs)
        return [out] if forward_only else [out, *torch.autograd.grad(out, inputs, flow)], None

    def dense(q: Any, k: Any, v: Any) -> Any:
        i, j = torch.arange(length)[:, None], torch.arange(length)
        mask = torch.where(seen(0, 0, i, j), -slopes[:, None, None] * (i - j), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, mask[None])

    block_mask = create_block_mask(seen, None, None, length, length, "cpu")
    ours = lambda q, k, v: speedlight.torch.flex_attention(q, k, v, alibi, block_mask)  # noqa: E731
    contenders = {"speedlight": Contender(lambda: run(ours)), "torch dense": Contender(lambda: run(dense))}
    if forward_only:
        compiled = torch.compile(flex_attention)
        contenders["torch flex"] = Contender(lambda: run(lambda q, k, v: compiled(q, k, v, alibi, block_mask)))
    name = f"flex: ALiBi in 8 documents, causal, {heads} heads, {length}, d={head_dim}, float32"
    name += ", forward" if forward_only else ", forward and backward"
    return Problem(name, contenders)


def _short(dtype: torch.dtype) -> str:
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
