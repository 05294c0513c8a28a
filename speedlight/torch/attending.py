"""attention() of PyTorch's tensors: in a graph, under transforms, followed by autograd or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..arrays.array import is_tensor, is_traced
from ..arrays.integers import integer
from ..autograd.attending import attend_as_operation, attended, cast, is_plain
from ..autograd.graphs import in_graph
from ..errors.advice import explained
from ..front import compute
from ..host.graph_breaks import outside, passed_by
from ..problem.gradients import check_fresh, followed, tables_of
from ..problem.options import AttentionOptions, Causal, Int, Ints, Layout, Mask, Precision, Scores, Sinks, Window
from ..problem.problem import Options, new_options, our_causal, our_layout, padded_alike

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False,
    precision: Precision = "ieee", **options: Unpack[AttentionOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True],
    precision: Precision = "ieee", **options: Unpack[AttentionOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool,
    precision: Precision = "ieee", **options: Unpack[AttentionOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@explained
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: Mask | None = None,
    score: Scores | None = None,
    sink_logits: Sinks | None = None,
    q_start: Int | Ints | None = None,
    k_start: Int = 0,
    scale: float | None = None,
    layout: Layout = "bhld",
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    lengths: Ints | None = None,
    q_lengths: Ints | None = None,
    k_lengths: Ints | None = None,
    return_lse: bool = False,
    precision: Precision = "ieee",
    dropout: float = 0.0,
    seed: Int | None = None,
) -> Any:
    """speedlight.attention() of PyTorch's tensors, differentiable: in memory that does not grow with the square of the
    length, forwards and backwards.

    Args:
        q, k, v: (batch, heads, length, head_dim) tensors on the CPU, as for speedlight.attention(); any strides.
        score: gradients flow to float tensors that are added, of any shape that broadcasts, and to tensors behind
            tables: sl.table(t), sl.alibi(slopes), sl.relative_bias(t), sl.softcap(c).
        sink_logits: gradients flow to a tensor.
        causal, window, mask, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k, lengths, q_lengths,
        k_lengths, return_lse, precision, dropout, seed: as for speedlight.attention(); the seed may be a tensor of one
            integer, as graphs draw it.

    Returns:
        out, or with return_lse (out, lse), as speedlight.attention() does; gradients flow through both.
        On a CPU with the dot instruction the lse of bfloat16 is off by 1e-3 or so: of weights that are rounded.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.torch
    >>> q = k = v = torch.ones(1, 2, 3, 4, requires_grad=True)
    >>> speedlight.torch.attention(q, k, v, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([1, 2, 3, 4])
    """
    if lengths is not None:
        q_lengths = k_lengths = padded_alike(lengths, q_lengths, k_lengths)
    layout, causal = our_layout(layout), our_causal(causal, q_start)
    options = new_options(Options, (
        causal, window, mask, score, sink_logits, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k,
        q_lengths, k_lengths, precision, dropout, seed,
    ))  # fmt: skip
    if torch.compiler.is_dynamo_compiling():
        q, k, v = cast(q, k, v)
        return in_graph(attention, q, k, v, options, return_lse)
    if passed_by():
        return outside(attention, q, k, v, return_lse=return_lse, **options._asdict())
    if torch._C._is_any_autocast_enabled():
        q, k, v = cast(q, k, v)
    if is_tensor(options.seed) and not is_traced(options.seed):
        options = options._replace(seed=integer("seed", options.seed))
    if is_plain(q, k, v):
        if torch.is_grad_enabled():
            known = followed(options)
            if known or any([is_tensor(x) and x.requires_grad for x in (q, k, v)]):
                return attended(q, k, v, known, return_lse)
            options = known.options
        else:
            check_fresh(tables_of(options.score))
        return compute(q, k, v, options, return_lse)
    return attend_as_operation(q, k, v, options, return_lse)
