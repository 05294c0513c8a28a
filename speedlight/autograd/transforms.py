"""The operations as torch.func transforms them, which takes functions of autograd's with rules of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedError
from ..host.insides import TORCH
from . import higher_order as further
from . import operators as ops
from .forms import is_same_for_items


class Transformed(torch.autograd.Function):
    """(form, seed, q, k, v, sinks, *tables) → out, lse."""

    @staticmethod
    def forward(form: str, seed: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ops.attention_op(*given[:4], list(given[4:]), form, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form, ctx.seed, *given = inputs
        ctx.save_for_backward(*output, *given)

    @staticmethod
    def backward(ctx: Any, *flows: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        wanted = tuple(ops.wanted_of(ctx.needs_input_grad[5], ctx.needs_input_grad[6:]))
        dq, dk, dv, *more = TransformedBackward.apply(ctx.form, ctx.seed, wanted, *flows, *ctx.saved_tensors)
        found = dict(zip(wanted, more, strict=True))
        count = len(ctx.needs_input_grad) - 6
        return None, None, dq, dk, dv, found.get(ops.SINKS), *(found.get(n) for n in range(count))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
        form, seed, *tensors = given
        of_one = functools.partial(Transformed.apply, form, seed)
        return _over_examples(of_one, tensors, in_dims[2:], info.batch_size, 3, form)


class TransformedBackward(torch.autograd.Function):
    """(form, seed, wanted, d_out, d_lse, out, lse, q, k, v, sinks, *tables) → dq, dk, dv, those that are wanted."""

    @staticmethod
    def forward(form: str, seed: Any, wanted: Any, *given: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse, out, lse, q, k, v, sinks, *tables = given
        found = ops.attention_backward_op(q, k, v, out, lse, d_out, d_lse, sinks, tables, form, seed, list(wanted))
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.form, ctx.seed, ctx.wanted, d_out, d_lse, _, _, *given = inputs
        ctx.save_for_backward(d_out, d_lse, *given)

    @staticmethod
    def backward(ctx: Any, *into: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse, q, k, v, sinks, *tables = ctx.saved_tensors
        given = further.Tensors(q, k, v, tables, sinks)
        flows = ops.flows_back_again(ctx.form, ctx.seed, given, (d_out, d_lse), ctx.wanted, into)
        (dq, dk, dv, d_tables, d_sinks), (dd_out, dd_lse) = flows
        return None, None, None, dd_out, dd_lse, None, None, dq, dk, dv, d_sinks, *d_tables

    @staticmethod
    def vmap(info: Any, in_dims: Any, *given: Any) -> Any:
        form, seed, wanted, *tensors = given
        of_one = functools.partial(TransformedBackward.apply, form, seed, wanted)
        return _over_examples(of_one, tensors, in_dims[3:], info.batch_size, 7, None if wanted else form)


def _over_examples(
    of_one: Callable[..., Any], tensors: Any, dims: Any, size: int, count: int, form: str | None
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns results of `size` examples, and their dims: of items of one batch where that is the same, else of each.

    The first `count` tensors have items, q, k and v last of them; sinks and tables follow. form: None where nothing can
    be folded.
    """
    differ = any([x is not None for x in dims[count:]])  # sinks or tables: then examples are no items of one batch
    folds = size and form is not None and not differ and is_same_for_items(form, tensors[count + 1 :])
    if folds and not _shares(tensors[count - 3 : count - 1], dims[count - 3 :]):
        folded = [_fold(x, at, size) for x, at in zip(tensors[:count], dims[:count], strict=True)]
        results = tuple(x.unflatten(0, (size, -1)) for x in of_one(*folded, *tensors[count:]))
    else:
        results = _each(of_one, tensors, dims, size)
    return results, (0,) * len(results)


def _shares(given: Any, dims: Any) -> bool:
    """Returns whether all items of q share the keys of one.

    Items are the first dimension beside that of examples, `at`, which may be counted from the end: hence the modulo.
    """
    q, k = (x.size(0 if at is None or at % x.ndim else 1) for x, at in zip(given, dims, strict=False))
    return q != k


def _fold(x: Any, at: int | None, count: int) -> Any:
    return (x.unsqueeze(0).expand(count, *x.shape) if at is None else x.movedim(at, 0)).flatten(0, 1)


def _each(function: Callable[..., Any], given: Any, dims: Any, count: int) -> tuple[Any, ...]:
    """Applies a function to every example's tensors, one by one; of no example the results are empty."""
    examples = [[_one(x, at, n) for x, at in zip(given, dims, strict=True)] for n in range(max(count, 1))]
    return tuple(torch.stack(x)[:count] for x in zip(*[function(*one) for one in examples], strict=True))


def _one(x: Any, at: int | None, n: int) -> Any:
    """A tensor of an example; zeros, where there is none."""
    return x if at is None else x.select(at, n) if x.shape[at] else x.sum(at).to(x.dtype)


def is_batched(flows: tuple[Any, ...]) -> bool:
    """Returns whether these come of torch.autograd.grad(is_grads_batched=True), whose vmap is not torch.func's."""
    return any([x is not None and TORCH.is_legacy_batchedtensor(x) for x in flows])


def of_each(function: Callable[..., Any], flows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Applies a function to such gradients, example by example."""
    names = ("vmapmode_increment_nesting", "vmapmode_decrement_nesting", "add_batch_dim", "remove_batch_dim")
    if None in [getattr(TORCH, name) for name in names]:
        raise UnsupportedError(
            "is_grads_batched: expected False with this release of PyTorch; got True. Use torch.func.vmap, or a call "
            "of torch.autograd.grad() for each gradient."
        )
    TORCH.vmapmode_increment_nesting()
    level = TORCH.vmapmode_decrement_nesting()  # the innermost

    def apart(x: Any, count: int) -> Any:
        return x if x is None else TORCH.remove_batch_dim(x, level, count, 0)

    count = max([len(apart(x, 1)) for x in flows if x is not None])
    given = [apart(x, count) for x in flows]
    results = [function(*(x if x is None else x[n] for x in given)) for n in range(count)]
    of = zip(*results, strict=True)
    return tuple(x[0] if x[0] is None else TORCH.add_batch_dim(torch.stack(x), 0, level) for x in of)
