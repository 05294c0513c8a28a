"""attention() with autograd: what PyTorch follows of a call, and what it does not."""

from __future__ import annotations

from typing import Any

import torch

from ..api import attention as forward
from ..arrays import is_tensor
from ..backward import attention_backward as backward
from ..errors import UnsupportedError
from ..gradients import SINKS, Followed, followed
from ..problem import Options, new_options


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    mask: Any = None,
    score: Any = None,
    sink_logits: Any = None,
    q_start: Any = None,
    k_start: int = 0,
    scale: float | None = None,
    layout: str = "bhld",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    q_lengths: Any = None,
    k_lengths: Any = None,
    return_lse: bool = False,
    precision: str = "ieee",
    dropout: float = 0.0,
    seed: int | None = None,
) -> Any:
    """speedlight.attention() of PyTorch's tensors, differentiable: in memory that does not grow with the square of the
    length, forwards and backwards.

    Args:
        q, k, v: (batch, heads, length, head_dim) tensors on the CPU, as for speedlight.attention(); any strides.
        score: gradients flow to float tensors that are added, of any shape that broadcasts, and to tensors behind
            tables: sl.table(t), sl.alibi(slopes), sl.relative_bias(t), sl.softcap(c).
        sink_logits: gradients flow to a tensor.
        causal, window, mask, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k, q_lengths, k_lengths,
        return_lse, precision, dropout, seed: as for speedlight.attention().

    Returns:
        out, or with return_lse (out, lse), as speedlight.attention() does; gradients flow through both.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.torch
    >>> q = k = v = torch.ones(1, 2, 3, 4, requires_grad=True)
    >>> speedlight.torch.attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 3, 4])
    """
    options = new_options(Options, (
        causal, window, mask, score, sink_logits, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k,
        q_lengths, k_lengths, precision, dropout, seed,
    ))  # fmt: skip
    if torch.is_grad_enabled():
        known = followed(options)
        if known or any([is_tensor(x) and x.requires_grad for x in (q, k, v)]):
            return attended(q, k, v, known, return_lse)
        options = known.options
    return forward(q, k, v, return_lse=return_lse, **options._asdict())


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, known: Followed, return_lse: bool) -> Any:
    """A call of which something is followed."""
    if q.is_cuda:
        raise UnsupportedError(
            "q: expected tensors on the CPU, where gradients are computed; got one on a GPU. Use .cpu(), or call under "
            "torch.no_grad()."
        )
    out, lse = _Attention.apply(known, q, k, v, known.sinks, *(x.source for x in known.tables))
    return (out, lse) if return_lse else out


class _Attention(torch.autograd.Function):
    """q, k, v, sinks and the tensors behind tables → out, lse."""

    @staticmethod
    def forward(ctx: Any, known: Followed, q: Any, k: Any, v: Any, sinks: Any, *sources: Any) -> Any:
        out, lse = forward(*map(_alone, (q, k, v)), return_lse=True, **_plain(known))
        ctx.known = known
        ctx.save_for_backward(q, k, v, out, lse, sinks, *sources)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *flows: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_out, d_lse = flows
        known, needed = ctx.known, ctx.needs_input_grad
        if d_out is None and d_lse is None:
            return (None,) * len(needed)
        q, k, v, out, lse = (x.detach() for x in ctx.saved_tensors[:5])
        d_out = torch.zeros((), dtype=out.dtype).expand(out.shape) if d_out is None else d_out
        grads = [t for t, wanted in zip(known.tables, needed[5:], strict=True) if wanted] + [SINKS] * needed[4]
        options = _plain(known)
        del options["precision"]
        dq, dk, dv, *more = backward(q, k, v, out, lse, d_out, d_lse, grads=tuple(grads), **options)
        found = dict(zip(grads, more[0] if more else (), strict=True))
        sinks = found[SINKS].to(known.sinks.dtype) if SINKS in found else None
        tables = (found[t].reshape(t.source.shape).to(t.source.dtype) if t in found else None for t in known.tables)
        return (None, dq, dk, dv, sinks, *tables)


def _alone(x: Any) -> Any:
    return x.detach() if is_tensor(x) else x


def _plain(known: Followed) -> dict[str, Any]:
    """The options of a call that nobody follows."""
    options = known.options._asdict()
    if known.sinks is not None:
        options["sink_logits"] = known.sinks.detach()
    return options
