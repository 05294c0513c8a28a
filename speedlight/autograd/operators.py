"""Attention as operations that PyTorch's own machinery knows: graphs, export, transforms.

    speedlight::attention(q, k, v, sinks?, tables, form, seed?) -> (out, lse)
    speedlight::attention_backward(q, k, v, out, lse, d_out?, d_lse?, sinks?, tables, form, seed?, wanted) -> gradients

`form`: the other options as text (forms.py). `wanted`: of which of `tables`, -1 for sinks, gradients are asked for
beside those of q, k and v.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arrays.making import order_of
from ..calls.backward import gradients_of
from ..calls.dense import attend
from ..problem.gradients import SINKS as SINK_LOGITS
from ..problem.gradients import check_one_dtype
from ..problem.options import MOST_SEEDS, Grads
from ..problem.problem import LAYOUTS
from . import higher_order as further
from .forms import layout_of, options_of

_FORM = "Tensor? sinks, Tensor[] tables, str form, SymInt? seed"
SINKS = -1  # in `wanted`


@torch.library.custom_op(
    "speedlight::attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {_FORM}) -> (Tensor, Tensor)"
)
def attention_op(q: Any, k: Any, v: Any, sinks: Any, tables: Any, form: Any, seed: Any) -> Any:
    options, _ = options_of(form, tables, sinks, seed)
    return attend(q.detach(), k.detach(), v.detach(), options, True)


@attention_op.register_fake
def _(q: Any, k: Any, v: Any, sinks: Any, tables: Any, form: Any, seed: Any) -> Any:
    return results_like(q, v, layout_of(form))


def results_like(q: Any, v: Any, layout: str) -> Any:
    """New tensors of the shapes and dtypes of out and lse."""
    number = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty([q.shape[a] for a in LAYOUTS[layout][:-1]], dtype=number)
    return new_like(q, [*q.shape[:-1], v.shape[-1]]), lse


def new_like(x: Any, shape: Any) -> Any:
    """Returns a new tensor, in the order of memory that the engine makes."""
    return torch.empty_permuted(shape, order_of(x.shape, x.stride()), dtype=x.dtype, device=x.device)


@torch.library.custom_op(
    "speedlight::attention_backward",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? d_out, Tensor? d_lse, {_FORM}, "
    "int[] wanted) -> Tensor[]",
)
def attention_backward_op(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, sinks: Any, tables: Any, form: Any, seed: Any,
    wanted: Any,
) -> Any:  # fmt: skip
    options, known = options_of(form, tables, sinks, seed)
    grads: Grads = tuple(SINK_LOGITS if n == SINKS else known[n] for n in wanted)
    d_out = out.new_zeros(()).expand(out.shape) if d_out is None else d_out
    q, k, v, out, lse, d_out = (x.detach() for x in (q, k, v, out, lse, d_out))
    d_lse = None if d_lse is None else d_lse.detach()
    dq, dk, dv, *more = gradients_of(q, k, v, out, lse, d_out, d_lse, grads, options)
    sources = [sinks if n == SINKS else tables[n] for n in wanted]
    found = zip(more[0] if more else (), sources, strict=True)
    return [dq, dk, dv, *(x.reshape(y.shape).to(y.dtype) for x, y in found)]


@attention_backward_op.register_fake
def _(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, sinks: Any, tables: Any, form: Any, seed: Any,
    wanted: Any,
) -> Any:  # fmt: skip
    others = [sinks if n == SINKS else tables[n] for n in wanted]
    return [*(new_like(x, x.shape) for x in (q, k, v)), *(x.new_empty(x.shape) for x in others)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, sinks, tables, ctx.form, ctx.seed = inputs
    check_one_dtype(*(str(x.dtype).removeprefix("torch.") for x in (q, k)))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, sinks, *tables)


def _differentiate(ctx: Any, d_out: Any, d_lse: Any) -> Any:
    q, k, v, out, lse, sinks, *tables = ctx.saved_tensors
    if d_out is None and d_lse is None:
        return None, None, None, None, [None] * len(tables), None, None
    wanted = wanted_of(ctx.needs_input_grad[3], ctx.needs_input_grad[4])
    dq, dk, dv, *more = torch.ops.speedlight.attention_backward(
        q, k, v, out, lse, d_out, d_lse, sinks, tables, ctx.form, ctx.seed, wanted
    )
    found = dict(zip(wanted, more, strict=True))
    return dq, dk, dv, found.get(SINKS), [found.get(n) for n in range(len(tables))], None, None


def wanted_of(sinks: bool, tables: list[bool]) -> list[int]:
    """Which gradients are asked for, of what needs some."""
    return [n for n, x in enumerate(tables) if x] + [SINKS] * sinks


attention_op.register_autograd(_differentiate, setup_context=_keep)


def _keep_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, v, _, _, d_out, d_lse, sinks, tables, ctx.form, ctx.seed, ctx.wanted = inputs
    ctx.save_for_backward(q, k, v, d_out, d_lse, sinks, *tables)


def _differentiate_backward(ctx: Any, into: list[Any]) -> Any:
    """out and lse are made of the others, to which all of it flows."""
    q, k, v, d_out, d_lse, sinks, *tables = ctx.saved_tensors
    given = further.Tensors(q, k, v, tables, sinks)
    flows = flows_back_again(ctx.form, ctx.seed, given, (d_out, d_lse), ctx.wanted, into)
    (dq, dk, dv, d_tables, d_sinks), (dd_out, dd_lse) = flows
    return dq, dk, dv, None, None, dd_out, dd_lse, d_sinks, d_tables, None, None, None if ctx.wanted else []


def flows_back_again(form: str, seed: Any, given: further.Tensors, flows: Any, wanted: Any, into: Any) -> Any:
    """further.backward_again(), of what flows `into` the gradients that attention_backward gives."""
    more = dict(zip(wanted, into[3:], strict=True))
    of_tables = [more.get(n) for n in range(len(given.tables))]
    return further.backward_again(form, seed, given, flows, (*into[:3], of_tables, more.get(SINKS)))


attention_backward_op.register_autograd(_differentiate_backward, setup_context=_keep_backward)


def signed(seed: int | None) -> int | None:
    """64 bits as an operation's argument."""
    return seed if seed is None or seed < MOST_SEEDS // 2 else seed - MOST_SEEDS
