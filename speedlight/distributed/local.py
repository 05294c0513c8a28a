"""Attention for libraries that exchange heads themselves: all tokens of a process's own heads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from ..expressions.substitution import substituted
from ..expressions.tables import Table
from ..expressions.tracing import Expression, expression, expression_of
from ..expressions.tree import Node, order
from ..problem.options import BY_HEAD, scores_of
from ..torch.attending import attention
from .groups import Peers, agreed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..problem.options import AttentionOptions


def local_attention(
    *, group: Any = None, batch_dim_idx: int = 0, **options: Unpack[AttentionOptions]
) -> Callable[..., Tensor]:
    """Makes the callable that DeepSpeed's DistributedAttention takes as `local_attention`.

    It gets all tokens of some heads; masks, scores and sinks cover all heads of the model.

    Args:
        group: the process group over which heads are exchanged. Default all processes.
        batch_dim_idx: 0: tensors are (batch, length, heads, head_dim); 1: (length, batch, heads, head_dim). As
            DistributedAttention is called with.
        options: of speedlight.torch.attention(), but its layout and return_lse, of all heads and the whole sequence.

    Returns:
        attend(query, key, value), differentiable: out, shaped as the query. Masks belong into the options: whatever
        else attend() is given is refused, since DistributedAttention hands anything on.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, torch.distributed as dist
    >>> from speedlight.distributed import local_attention
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> attend = local_attention(batch_dim_idx=1, causal=True)
    >>> x = torch.ones(6, 1, 2, 16)
    >>> attend(x, x, x).shape  # in DistributedAttention(attend, group, scatter_idx=2, gather_idx=0)
    torch.Size([6, 1, 2, 16])
    >>> dist.destroy_process_group()
    """
    if batch_dim_idx not in (0, 1) or isinstance(batch_dim_idx, bool):
        raise ArgumentError(f"batch_dim_idx: expected 0 or 1; got {shown(batch_dim_idx)}.")
    for name in ("layout", "return_lse"):
        if name in options:
            raise ArgumentError(
                f"{name}: expected nothing; DistributedAttention says it. batch_dim_idx= is the layout."
            )
    said: dict[str, Any] = dict(options)
    if said.get("mask") is not None and _is_function(said["mask"]):
        said["mask"] = expression(said["mask"], "mask")
    if said.get("score") is not None:
        said["score"] = [expression(x, "score") if _is_function(x) else x for x in scores_of(said["score"])]
    by_head = [name for name, x in said.items() if _looks_at_heads(name, x)]

    def attend(query: Tensor, key: Tensor, value: Tensor, *more: Any, **others: Any) -> Tensor:
        given = {**{f"argument {n + 4}": x for n, x in enumerate(more)}, **others}
        for name, x in given.items():
            if x is not None:
                raise UnsupportedError(
                    f"{name}: expected None; got {type(x).__name__}. What hides keys is mask= or causal= of "
                    "local_attention(): libraries differ in what True means."
                )
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not is_tensor(x) or x.ndim != 4:
                got = tuple(x.shape) if is_tensor(x) else type(x).__name__
                raise ArgumentTypeError(f"{name}: expected a tensor of 4 dimensions, heads third; got {got}.")
        heads = query.shape[2]
        own = {**said, **{name: _of_own_heads(name, said[name], first_of(query), heads) for name in by_head}}
        q, k, v = (x.transpose(0, 1) if batch_dim_idx else x for x in (query, key, value))
        out = attention(q, k, v, layout="blhd", **own)
        return out.transpose(0, 1) if batch_dim_idx else out

    def first_of(query: Tensor) -> int:
        """This process's first query head: they go round by rank, and need not be as many everywhere."""
        peers = Peers(group)
        each = agreed(peers, {"call": "local_attention"}, (query.shape[2],), None)
        return sum([n for (n,) in each[: peers.rank]])

    return attend


def _is_function(x: Any) -> bool:
    return isinstance(x, Expression) or (callable(x) and not hasattr(x, "shape"))


def _looks_at_heads(name: str, x: Any) -> bool:
    match name:
        case "mask":
            return "h" in x.root.uses if isinstance(x, Expression) else x is not None and _heads_of(x) > 1
        case "score":
            return any([_looks_at_heads("mask", one) for one in x or ()])
    return name in BY_HEAD and x is not None


def _of_own_heads(name: str, x: Any, first: int, heads: int) -> Any:
    """Returns an option of all heads for these."""
    if name in BY_HEAD:
        return x[first : first + heads]
    if name == "score":
        return [_of_own_heads("mask", one, first, heads) for one in x]
    if isinstance(x, Expression):
        return _counted(substituted(x, {"h": (1, first)})) if "h" in x.root.uses else x
    array = x.array if isinstance(x, Table) else x
    return array[..., first : first + heads, :, :] if _heads_of(x) > 1 else x


def _heads_of(x: Any) -> int:
    """Returns the heads of an array that broadcasts to (batch, q_heads, q_len, k_len)."""
    shape = x.shape if hasattr(x, "shape") else ()
    return shape[-3] if len(shape) > 2 else 1


def _counted(x: Expression) -> Expression:
    """Tables of all heads need not have as many entries as a call of some of them has heads."""
    new: dict[int, Node] = {}
    tables = {t: copy.copy(t) for t in x.tables if t.heads_axis is not None}
    for t in tables.values():
        t.heads_axis = None
    for node in order(x.root):
        args = tuple([new[id(a)] for a in node.args])
        value = tables.get(node.value, node.value) if node.op == "table" else node.value
        new[id(node)] = Node(node.op, node.kind, args, value)
    return expression_of(x.role, new[id(x.root)])
