"""Derivatives of attention beyond the first, and in forward mode: attention in PyTorch's operations, by blocks of rows.

A block keeps its inputs alone and is computed again for every derivative of it, so that memory grows with the length,
not with its square. Slower than the kernels: many small operations, and N² of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..arrays.memory import Array
from ..expressions.tables import Table, plainly
from ..problem.build import Stated, from_arrays
from ..problem.options import Options
from ..problem.philox import kept
from ..problem.problem import LAYOUTS, QUERY_BLOCK, Problem
from .forms import options_of
from .torch_eval import value_of

_MOST_SCORES = 1 << 22  # of a block


class Tensors(NamedTuple):
    """The tensors of a call."""

    q: Any
    k: Any
    v: Any
    tables: list[Any]
    sinks: Any = None

    @property
    def all(self) -> list[Any]:
        return [self.q, self.k, self.v, *self.tables, *([] if self.sinks is None else [self.sinks])]


def attention_of(form: str, seed: int | None, given: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call whose options are text."""
    sinks = None if given.sinks is None else [0.0] * given.sinks.numel()  # whose values are a tensor's
    options, tables = options_of(form, given.tables, sinks, seed)
    return _attention_of(options, tables, *given.all)


def _attention_of(options: Options, tables: list[Table], *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention of q, k, v, the tensors that `tables` look up, and sinks, if options have any."""
    q, k, v, *others = tensors
    stated = stated_of(options, q, k, v)
    axes, packed, alone = LAYOUTS[options.layout], options.layout == "lhd", len(options.layout) == 3
    q, k, v = (x.permute(axes).unsqueeze(0) if alone else x.permute(axes) for x in (q, k, v))
    with plainly():
        constant = {t: torch.tensor(t.host(), device=q.device) for t in looked_up(stated.problem) if t not in tables}
    outs, lses = [], []
    for item, (rows, keys) in enumerate(_items(stated)):
        at, of = 0 if packed else item, 0 if packed or stated.problem.shared else item
        queries, beside = q[at, :, rows], (k[of, :, keys], v[of, :, keys], *others)
        blocks = [(_Block(stated.problem, tuple(tables), constant, item, x), x) for x in _parts(stated.problem, item)]
        parts = [Recomputed.apply(block, queries[:, part], *beside) for block, part in blocks]
        out, lse = (torch.cat([x[n] for x in parts], dim=1) for n in (0, 1)) if parts else _nothing(q, v)
        if not packed:
            out, lse = _pad(out, q.shape[2], 0.0), _pad(lse, q.shape[2], -torch.inf)
        outs.append(out)
        lses.append(lse)
    if packed:
        return torch.cat(outs, dim=1).permute(1, 0, 2), torch.cat(lses, dim=1)
    if alone:
        return outs[0], lses[0]
    return torch.stack(outs).permute(axes), torch.stack(lses)  # bhld and blhd are their own inverses


def stated_of(options: Options, *tensors: Any) -> Stated:
    """The problem, of tensors whose numbers may be nowhere; of a graph's symbolic sizes those that they have now."""
    described = [_shape_of(x, name) for x, name in zip(tensors, "qkv", strict=True)]
    return from_arrays(described[0], described[1], described[2], options)


def looked_up(problem: Problem) -> list[Table]:
    """The tables of mask and score."""
    return [t for x in (problem.mask, problem.score) if x is not None for t in x.tables]


def _shape_of(x: Any, name: str) -> Array:
    dtype = str(x.dtype).removeprefix("torch.")
    return Array(name, 0, tuple(map(int, x.shape)), (), dtype, "torch", False, None, str(x.device))


def _items(stated: Stated) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each item, among all packed, or of its own."""
    problem, cu_q, cu_k = stated
    for item, (rows, keys) in enumerate(zip(problem.q_lengths, problem.k_lengths, strict=True)):
        first, start = (0, 0) if cu_q is None or cu_k is None else (cu_q[item], cu_k[item])
        yield slice(first, first + rows), slice(start, start + keys)


def _parts(problem: Problem, item: int) -> list[slice]:
    """Rows of an item, a block each."""
    wide = max(1, problem.q_heads * problem.k_lengths[item])
    step = max(1, min(QUERY_BLOCK, _MOST_SCORES // wide))
    length = problem.q_lengths[item]
    return [slice(at, min(at + step, length)) for at in range(0, length, step)]


def _nothing(q: Any, v: Any) -> tuple[Any, Any]:
    return q.new_zeros(q.shape[1], 0, v.shape[-1]), q.new_zeros((q.shape[1], 0), dtype=_number(q.dtype))


def _pad(x: Any, rows: int, value: float) -> Any:
    if x.shape[1] == rows:
        return x
    return torch.cat([x, x.new_full((x.shape[0], rows - x.shape[1], *x.shape[2:]), value)], dim=1)


def _number(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class _Block:
    """Rows of queries of one item over all of its keys."""

    problem: Problem
    tables: tuple[Table, ...]  # of tensors
    constant: dict[Table, torch.Tensor]  # entries of the others
    item: int
    rows: slice

    def __call__(self, q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, Any]:
        """out [q_heads, rows, value_dim] and lse [q_heads, rows]."""
        p, number = self.problem, _number(q.dtype)
        heads, count, keys = (p.kv_heads, p.group), q.shape[1], k.shape[1]
        tables = self.constant | dict(zip(self.tables, others, strict=False))
        env = self._places(count, keys, q.device)
        visible = self._visible(env, tables, number)
        any_row = visible.expand(*heads, count, keys).any(dim=2).any(dim=1)[..., None]
        k, v = (torch.where(any_row, x.to(number), 0.0) for x in (k, v))
        s = (q.to(number).unflatten(0, heads) @ k.unsqueeze(1).mT) * p.scale
        seen = visible.expand(s.shape)
        if p.score is not None:
            # what is hidden has some score that any function may take
            env["s"] = torch.where(visible, s, 1.0)
            s = value_of(p.score.root, env, tables, number, visible).expand(s.shape)
            seen = seen & (s != -torch.inf)
        sinks = None if p.sinks is None else others[len(self.tables)].to(q.device, number).reshape(*heads, 1, 1)
        out, lse = _softmax(s, seen, v, sinks, self._factors(number, q.device))
        return out.flatten(0, 1).to(q.dtype), lse.flatten(0, 1)

    def _places(self, count: int, keys: int, device: torch.device) -> dict[str, Any]:
        p = self.problem
        first = p.q_starts[self.item] + self.rows.start
        return {
            "b": torch.tensor(self.item, device=device),
            "h": torch.arange(p.q_heads, device=device).reshape(p.kv_heads, p.group, 1, 1),
            "i": torch.arange(first, first + count, device=device)[:, None],
            "j": torch.arange(p.k_start, p.k_start + keys, device=device),
        }

    def _visible(self, env: dict[str, Any], tables: dict[Any, Any], number: torch.dtype) -> Any:
        """Returns which pairs are visible, in whatever shape broadcasts."""
        causal = env["j"] <= env["i"] if self.problem.causal else torch.ones_like(env["i"], dtype=torch.bool)
        if self.problem.mask is None:
            return causal
        return causal & value_of(self.problem.mask.root, env, tables, number, False)

    def _factors(self, number: torch.dtype, device: torch.device) -> Any:
        """Returns the factors of weights under dropout; None without."""
        p = self.problem
        if not p.dropout:
            return None
        first = p.q_starts[self.item]
        i = range(first + self.rows.start, first + self.rows.stop)
        j = range(p.k_start, p.k_start + p.k_lengths[self.item])
        of = [torch.from_numpy(kept(p.dropout, p.seed, self.item, h, i, j)) for h in range(p.q_heads)]
        return torch.stack(of).unflatten(0, (p.kv_heads, p.group)).to(device, number) / p.dropout_divisor


def _softmax(s: Any, seen: Any, v: Any, sinks: Any, factors: Any) -> tuple[Any, Any]:
    top = (
        torch.where(seen, s, -torch.inf).detach().amax(-1, keepdim=True)
        if s.shape[-1]
        else s.new_full((*s.shape[:-1], 1), -torch.inf)
    )
    if sinks is not None:
        top = torch.maximum(top, sinks.detach())
    top = torch.where(top == -torch.inf, 0.0, top)
    weights = torch.where(seen, torch.where(seen, s - top, 0.0).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    empty = total == 0
    whole = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, top + whole.log()).squeeze(-1)
    left = weights if factors is None else weights * factors
    return (left @ v.unsqueeze(1)) / whole, lse


class Recomputed(torch.autograd.Function):
    """A function of tensors that keeps nothing but them, and neither do its derivatives of any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Any, *tensors: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.function, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *flows: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors
        pulled = iter(Recomputed.apply(_Pulled(ctx.function, len(tensors)), *tensors, *flows))
        return (None, *(next(pulled) if x.is_floating_point() else None for x in tensors))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        tensors = ctx.saved_tensors
        flows = [torch.zeros_like(x) if t is None else t for x, t in zip(tensors, tangents[1:], strict=True)]
        return Recomputed.apply(_Pushed(ctx.function, len(tensors)), *tensors, *flows)


@dataclass(frozen=True, eq=False)
class _Pulled:
    """The gradients of `count` tensors from the upstream gradients of a function of theirs."""

    function: Any
    count: int

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        of, floats = _of_floats(self.function, args[: self.count])
        return torch.func.vjp(of, *floats)[1](tuple(args[self.count :]))


@dataclass(frozen=True, eq=False)
class _Pushed:
    """The tangents that `count` tensors push forward: the gradient of pulling, since that is linear.

    Not torch.func.jvp, since forward mode has one level only.
    """

    function: Any
    count: int

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        of, floats = _of_floats(self.function, args[: self.count])
        results, pull = torch.func.vjp(of, *floats)[:2]
        tangents = tuple(
            t for x, t in zip(args[: self.count], args[self.count :], strict=True) if x.is_floating_point()
        )
        return torch.func.vjp(pull, tuple(torch.zeros_like(x) for x in results))[1](tangents)[0]


def _of_floats(function: Any, tensors: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The function of those of its tensors that hold floats."""
    at = [n for n, x in enumerate(tensors) if x.is_floating_point()]

    def of(*floats: Any) -> Any:
        given = list(tensors)
        for n, x in zip(at, floats, strict=True):
            given[n] = x
        return function(*given)

    return of, [tensors[n] for n in at]


def backward_again(form: str, seed: int | None, given: Tensors, flows: tuple[Any, Any], into: Any) -> Any:
    """Returns the gradients through a backward pass: of tensors, shaped as `given`, and of the upstream gradients.

    `into`: what flows into the gradients of `given`; None: nothing.
    """

    def forward(*tensors: Any) -> Any:
        q, k, v, *others = tensors
        count = len(given.tables)
        return attention_of(form, seed, Tensors(q, k, v, others[:count], others[count] if others[count:] else None))

    of, floats = _of_floats(forward, tuple(given.all))
    shapes = [torch.zeros_like(x) for x in floats]
    arrived = [x for x, y in zip(_flat(into), given.all, strict=False) if y.is_floating_point()]
    arrived = [y if x is None else x.to(y.dtype) for x, y in zip(arrived, shapes, strict=True)]
    present = [n for n, x in enumerate(flows) if x is not None]

    def first(*args: Any) -> Any:
        results, pull = torch.func.vjp(of, *args[: len(floats)])[:2]
        flowing = dict(zip(present, args[len(floats) :], strict=True))
        return pull(tuple(flowing.get(n, torch.zeros_like(x)) for n, x in enumerate(results)))

    back = iter(torch.func.vjp(first, *floats, *(flows[n] for n in present))[1](tuple(arrived)))
    dq, dk, dv, *others = (next(back) if x.is_floating_point() else None for x in given.all)
    count, rest = len(given.tables), dict(zip(present, back, strict=False))
    return (dq, dk, dv, others[:count], others[count] if others[count:] else None), (rest.get(0), rest.get(1))


def _flat(into: Any) -> list[Any]:
    """Returns a list in the order of Tensors.all."""
    dq, dk, dv, tables, sinks = into
    return [dq, dk, dv, *tables, sinks]
