"""attention() of PyTorch's tensors: in a graph, under transforms, followed by autograd or not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..arrays import latents
from ..arrays.integers import integer
from ..arrays.latents import KeyPair
from ..arrays.torch_tensors import cast, is_plain, is_tensor, is_traced
from ..autograd.attending import attend_as_operation, attend_recorded
from ..autograd.graphs import in_graph
from ..front import compute
from ..host.graph_breaks import outside, passed_by
from ..host.insides import TORCH
from ..problem.options import AllOptions, Int, Options
from ..problem.signatures import public

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensors = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | list[torch.Tensor]  # keys, or two parts of them


@overload
def attention(
    q: torch.Tensor, k: Tensors, v: torch.Tensor | None, *, return_lse: Literal[False] = False,
    value_dim: Int | None = None, **options: Unpack[AllOptions],
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: Tensors, v: torch.Tensor | None, *, return_lse: Literal[True],
    value_dim: Int | None = None, **options: Unpack[AllOptions],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: Tensors, v: torch.Tensor | None, *, return_lse: bool,
    value_dim: Int | None = None, **options: Unpack[AllOptions],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@public(AllOptions, leaves_graph=False)
def attention(
    q: torch.Tensor,
    k: Tensors,
    v: torch.Tensor | None,
    *,
    return_lse: bool = False,
    value_dim: Int | None = None,
    **options: Unpack[AllOptions],
) -> Any:
    """Computes speedlight.attention() of PyTorch tensors with autograd, in memory linear in the length.

    Args:
        q, k, v, value_dim: (batch, heads, length, head_dim) tensors on the CPU, as for speedlight.attention(); any
            strides. k may be a pair (latent, rotary), and v None.
        return_lse: also return the log-sum-exp of each row's scores, through which gradients flow, too.
        **options: as for speedlight.attention(). Gradients flow to float tensors that `score` adds, of any shape that
            broadcasts, to tensors behind tables (sl.table(t), sl.alibi(slopes), sl.relative_bias(t), sl.softcap(c)),
            and to tensors of sinks. The seed may be a tensor of one integer, as graphs draw it.

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
    keys: Any = k
    values: Any = v
    if v is None or value_dim is not None or isinstance(k, (tuple, list)):
        keys, values = latents.resolve(k, v, value_dim)
        if type(keys) is KeyPair and (_is_watched() or not is_plain(q, keys.latent, keys.rotary)):
            keys, values = keys.joined()
    if torch.compiler.is_dynamo_compiling():
        q, keys, values = cast(q, keys, values)
        return in_graph(attention, q, keys, values, dict(options), return_lse)
    if passed_by():
        return outside(attention, q, keys, values, return_lse=return_lse, **options)
    return attend(q, keys, values, Options.of(attention, options), return_lse)


def _is_watched() -> bool:
    """Returns whether a graph, a transform or autocast sees the call, which takes keys in one tensor."""
    return torch.compiler.is_dynamo_compiling() or passed_by() or TORCH.is_any_autocast_enabled()


def attend(q: torch.Tensor, k: Any, v: Any, options: Options, return_lse: bool = False) -> Any:
    """Computes attention() with its options in one, outside of graphs. k may be a KeyPair of plain tensors."""
    if TORCH.is_any_autocast_enabled():
        q, k, v = cast(q, k, v)
    if is_tensor(options.seed) and not is_traced(options.seed):
        options = replace(options, seed=integer("seed", options.seed))
    if type(k) is not KeyPair and not is_plain(q, k, v):
        return attend_as_operation(q, k, v, options.spelled(), return_lse)
    if not isinstance(q, torch.Tensor):  # an error, if k, v or a table requires grad
        _, options = attend_recorded(q, k, v, options, return_lse)
    return compute(q, k, v, options, return_lse)
