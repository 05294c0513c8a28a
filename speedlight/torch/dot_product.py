"""scaled_dot_product_attention(): PyTorch's signature and meaning, in memory that does not grow with the square."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import ArgumentError, ArgumentTypeError
from ..adapting import Library, draw_seed
from ..errors.advice import of_head_dim, of_mask, of_no_tensor
from ..problem.options import Causal
from ..problem.signatures import public, refuse_unknown
from .attending import attention
from .kernel_choice import takes_formula

_DTYPES = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
TORCH = Library(
    "torch",
    tested=("2.13", "2.15"),
    names={"q": "query", "k": "key", "v": "value", "dropout": "dropout_p", "mask": "attn_mask", "score": "attn_mask"},
)
_MASKS = "a bool tensor, True where a key takes part, or one of float32 or of query's dtype, which is added to scores"


@public(has_frame=False)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **theirs: NoReturn,
) -> Tensor:
    """Attends as torch.nn.functional.scaled_dot_product_attention does, by its signature, on the CPU.

    Whatever is asked for, masks that require grad, dropout, other value dims, memory beyond the arguments and what
    is returned does not grow with the square of the length.

    Args:
        query: (..., q_heads, L, E) of float32, float64, float16 or bfloat16; two dimensions at least. Batch dims of
            query, key and value broadcast, and so do heads without `enable_gqa`.
        key: (..., kv_heads, S, E).
        value: (..., kv_heads, S, Ev).
        attn_mask: broadcasts to (..., q_heads, L, S): bool, True where a key takes part, or float32 or query's dtype,
            which is added to scores and may require grad; or a torch.nn.attention.bias.CausalBias of (L, S), which is
            never made a tensor. With several batch dims a mask that broadcasts along some of them is copied along them.
        dropout_p: how likely each weight is dropped, whether anything trains or not. What is dropped is drawn from
            PyTorch's default generator: torch.manual_seed() reproduces it; not the weights that PyTorch would drop.
        is_causal: hides keys j > i, aligned at the first query and key, also where L is not S.
        scale: factor of the scores, up to 1e30 in size, 0 and negative ones included. Default 1/sqrt(E).
        enable_gqa: key's and value's numbers of heads divide query's, and their heads are repeated.

    Returns:
        (..., q_heads, L, Ev), of query's dtype, differentiable in query, key, value and a float attn_mask. Rows that
        see nothing are 0, as PyTorch's on the CPU are since 2.5 (its formula, and older versions, give NaN). A visible
        NaN comes out, which some of PyTorch's kernels make 0; a hidden one does not.

    Raises:
        speedlight.Error: the argument, what was expected and what came. attn_mask beside is_causal is refused, as it is
            documented to be (PyTorch's own flash kernel takes both); so are keys and values of different lengths, of
            which PyTorch reads out of bounds.

    >>> import torch, speedlight.torch
    >>> q, k, v = torch.ones(2, 8, 5, 16), torch.ones(2, 2, 7, 16), torch.ones(2, 2, 7, 4)
    >>> speedlight.torch.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).shape
    torch.Size([2, 8, 5, 4])
    """
    refuse_unknown(scaled_dot_product_attention, theirs)
    shape = broadcast_shape(query, key, value, enable_gqa)
    causal: Causal = "top-left" if is_causal else False
    mask = score = None
    if attn_mask is not None:
        if is_causal:
            raise ArgumentError("is_causal: expected False beside attn_mask; got both. Join them in one mask.")
        if _is_causal_bias(attn_mask):
            causal = _read_alignment(attn_mask, shape)
            attn_mask = None
        else:
            found = check_mask(attn_mask, query, shape)
            mask, score = (found, None) if found.dtype == torch.bool else (None, found)
    q, k, v = join_batches(query, key, value, shape)
    dropout, seed = (dropout_p, int(draw_seed())) if dropout_p else (0.0, None)
    with TORCH.renamed:
        out = attention(q, k, v, causal=causal, mask=mask, score=score, scale=scale, dropout=dropout, seed=seed)
    if len(shape) == 3:
        out = out[0]
    elif len(shape) != 4:
        out = out.reshape(*shape[:-1], value.shape[-1])
    return as_pytorch(out, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)


def as_pytorch(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, dropout_p: float, is_causal: bool,
    enable_gqa: bool,
) -> Tensor:  # fmt: skip
    """Returns a result with PyTorch's strides: in query's order, as its kernel's, or contiguous, as its formula's."""
    if out.dim() == 4:
        _, heads, rows, dim = out.shape
        if out.stride() == (heads * rows * dim, rows * dim, dim, 1):  # a new tensor's, those of dims of one included
            return out
    if not takes_formula(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        return out
    return out.reshape(out.shape) if out.is_contiguous() else out.contiguous()


def broadcast_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Returns (*batch, q_heads, L, S), the shape of PyTorch's weights; of two dimensions without heads.

    Raises for shapes that do not fit.
    """
    least = 3 if enable_gqa else 2
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ArgumentTypeError(f"{name}: expected a tensor; got {type(x).__name__}.{of_no_tensor(x)}")
        _check_strided(name, x)
        if x.dim() < least:
            what = "(heads, length, dim) at least, for enable_gqa" if enable_gqa else "(length, dim) at least"
            raise ArgumentError(f"{name}: expected {what}; got shape {tuple(x.shape)}.")
    q, k, v = query.shape, key.shape, value.shape
    if k[-1] != q[-1]:
        way = of_head_dim(q[-1], k[-2], "bhld", "query", "key", "value")
        raise ArgumentError(f"key: expected last dim {q[-1]}, as query has; got shape {tuple(k)}.{way}")
    if v[-2] != k[-2]:
        raise ArgumentError(f"value: expected length {k[-2]}, as key has; got {v[-2]} (shape {tuple(v)}).")
    if q[:-2] == k[:-2] == v[:-2]:
        return (*q[:-1], k[-2])
    cut = -2
    if enable_gqa:
        cut = -3
        for name, heads in (("key", k[-3]), ("value", v[-3])):
            if not heads or q[-3] % heads:
                raise ArgumentError(f"{name}: expected a number of heads that divides query's {q[-3]}; got {heads}.")
    try:
        lead = torch.broadcast_shapes(q[:cut], k[:cut], v[:cut])
    except RuntimeError:
        way = "" if enable_gqa else " Heads that are shared take enable_gqa=True."
        raise ArgumentError(
            f"key: expected query, key and value that broadcast; got shapes {tuple(q)}, {tuple(k)}, {tuple(v)}.{way}"
        ) from None
    return (*lead, *q[cut:-1], k[-2])


def _check_strided(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise ArgumentTypeError(
            f"{name}: expected a strided tensor; got a nested one. Use {name}.to_padded_tensor(0) and a mask, or "
            "torch.nn.attention.varlen."
        )


def join_batches(query: Tensor, key: Tensor, value: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views of all three as (batch, heads, length, dim), query's heads a multiple of the others'."""
    query, key, value = query.resolve_neg(), key.resolve_neg(), value.resolve_neg()
    heads = key.shape[-3] if key.dim() > 2 else 1
    if len(shape) == query.dim() == key.dim() == value.dim() == 4 and heads == value.shape[1]:
        as_is = query.shape[0] == key.shape[0] == value.shape[0] and query.shape[1] == shape[1]
        if as_is and heads and shape[1] % heads == 0:
            return query, key, value
    q_heads = shape[-3] if len(shape) > 2 else 1
    shared = math.lcm(heads, value.shape[-3] if value.dim() > 2 else 1)
    return (
        _expand(query, shape[:-3], q_heads),
        _expand(key, shape[:-3], shared),
        _expand(value, shape[:-3], shared),
    )


def _expand(x: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """Returns (batch, heads, length, dim), expanded; heads that divide `heads` are repeated, each next to itself."""
    if x.dim() == 2:
        x = x[None]
    if x.shape[-3] not in (1, heads):
        x = x.repeat_interleave(heads // x.shape[-3], -3)
    x = x.expand(*batch, heads, *x.shape[-2:])
    if not batch:
        return x[None]  # reshape() would change the strides of dims of one
    return x if len(batch) == 1 else x.reshape(math.prod(batch), *x.shape[-3:])


def check_mask(attn_mask: Tensor, query: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a mask as attention() takes it: it broadcasts to (batch, q_heads, L, S). Raises unless it fits."""
    if not isinstance(attn_mask, Tensor):
        got = f"{type(attn_mask).__name__}.{of_no_tensor(attn_mask)}"
        raise ArgumentTypeError(f"attn_mask: expected {_MASKS}; got {got}")
    _check_strided("attn_mask", attn_mask)
    fits = attn_mask.dtype in (torch.bool, torch.float32, query.dtype)
    if not fits and not (attn_mask.is_floating_point() and torch.is_autocast_enabled("cpu")):
        raise ArgumentTypeError(
            f"attn_mask: expected {_MASKS} ({query.dtype}); got {attn_mask.dtype}. Use attn_mask.to(query.dtype), or "
            ".bool()."
        )
    own = tuple(attn_mask.shape)
    padded = (1,) * (len(shape) - len(own)) + own
    if len(own) < 2 or len(own) > len(shape) or any([n not in (1, m) for n, m in zip(padded, shape, strict=False)]):
        whole = (*shape[:1], 1, *shape[-2:])
        way = of_mask("attn_mask", own, whole) if len(shape) == 4 else ""
        raise ArgumentError(
            f"attn_mask: expected a shape of 2 dims at least that broadcasts to {shape}; got {own}.{way}"
        )
    if len(own) <= 4 and len(shape) <= 4:
        return attn_mask
    batch = padded[:-3]
    if any([n != 1 for n in batch]):
        attn_mask = attn_mask.expand(*shape[:-3], *padded[-3:])
        batch = shape[:-3]
    return attn_mask.reshape(math.prod(batch), *padded[-3:])


def _is_causal_bias(x: Any) -> bool:
    if type(x) is Tensor:
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(x, CausalBias)


def _read_alignment(bias: Any, shape: tuple[int, ...]) -> Causal:
    """Returns attention()'s `causal` for a CausalBias."""
    from torch.nn.attention.bias import CausalVariant

    if (bias.seq_len_q, bias.seq_len_kv) != shape[-2:]:
        raise ArgumentError(
            f"attn_mask: expected a CausalBias of {shape[-2:]}; got one of {(bias.seq_len_q, bias.seq_len_kv)}."
        )
    return True if bias.variant == CausalVariant.LOWER_RIGHT else "top-left"


def only_pytorch_takes(query: Tensor, dropout_p: float, scale: float | None) -> str | None:
    """Returns what PyTorch takes and attention() does not, as a report says it; None if there is nothing of it."""
    if query.dtype not in _DTYPES:
        return str(query.dtype)
    if scale is not None and not abs(scale) <= 1e30:
        return "scale is not finite, or beyond 1e30"
    return None if 0 <= dropout_p <= 1 else "dropout_p is no probability"
