"""`Attention`: the layer that a transformer is made of."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import nn

from .. import (
    ArgumentError,
    ArgumentTypeError,
    Expression,
    KVCache,
    Table,
    UnsupportedError,
    expression,
    padding,
    window,
)
from ..adapting import check_flag, draw_seed, number, shown
from ..calls.rotary import turned
from ..errors.advice import of_no_tensor
from ..problem.checks import dropout_of, scale_of, size, window_size
from ..problem.rotary_angles import RotaryOptions, rotation_of
from ..problem.signatures import public
from .attending import attention

_BASE = "the base of rotary positions, as 10000.0"
_window = functools.lru_cache(maxsize=64)(window)


def _join_masks(limit: Expression | None, attention_mask: Any, mask: Any) -> Any:
    """Joins all that hides keys, but for causality."""
    parts: list[Any] = [] if limit is None else [limit]
    if attention_mask is not None:
        parts.append(attention_mask if isinstance(attention_mask, Expression) else padding(attention_mask))
    if mask is not None and not parts:
        return mask
    if mask is not None and not (isinstance(mask, Expression) or callable(mask)):
        raise ArgumentTypeError(
            "mask: expected a function or a pattern beside window= and attention_mask=; got an array. Join them."
        )
    parts += [] if mask is None else [expression(mask, "mask")]
    return functools.reduce(operator.and_, parts) if parts else None


def _join_in_graph(_: None, attention_mask: Any, mask: Any) -> Any:
    """Joins masks in a graph, of tensors whose numbers nobody has looked at yet."""
    if attention_mask is None:
        return mask
    if mask is not None:
        raise UnsupportedError(
            "mask: expected None beside attention_mask= in a graph; got both. Join them outside of what is compiled: "
            "mask=sl.padding(attention_mask) & mask."
        )
    if not isinstance(attention_mask, torch.Tensor):
        return attention_mask
    return (attention_mask != 0)[:, None, None, :]


def _check_score(score: Any) -> None:
    """Raises unless attention() could take it; functions are traced, so that their errors come before they are used."""
    for x in score if isinstance(score, (list, tuple)) else [] if score is None else [score]:
        if callable(x) or isinstance(x, Expression):
            expression(x, "score")
        elif not isinstance(x, Table) and not (hasattr(x, "dtype") and hasattr(x, "shape")):
            raise ArgumentTypeError(
                f"score: expected a function, a pattern such as sl.softcap(50.0), or a float array; got {shown(x)}."
            )


def _check_factory(device: Any, dtype: Any) -> dict[str, Any]:
    """Returns device and dtype of parameters. Raises unless they are PyTorch's."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentTypeError(f"dtype: expected a floating dtype of PyTorch's, or None; got {shown(dtype)}.")
    try:
        return {"device": None if device is None else torch.device(device), "dtype": dtype}
    except (RuntimeError, TypeError):
        raise ArgumentError(
            f"device: expected a device of PyTorch's, as 'cpu', or None; got {shown(device)}."
        ) from None


def _check_pair(rotation: Any) -> Any:
    if not isinstance(rotation, (tuple, list)) or len(rotation) != 2:
        got = f"{len(rotation)} of them" if isinstance(rotation, (tuple, list)) else type(rotation).__name__
        raise ArgumentTypeError(f"rotation: expected a pair (cos, sin) of tensors; got {got}.")
    return rotation


class Attention(nn.Module):
    """Attention layer with projections, grouped heads, rotary positions, windows, sinks, dropout and a key-value cache.

    Parameters are named as transformers' LlamaAttention names them (q_proj, k_proj, v_proj, o_proj), whose state_dict
    loads as it is; load_multihead() takes nn.MultiheadAttention's, and multihead_state() gives them back. forward() is
    what help(speedlight.torch.Attention.forward) says; all other methods are nn.Module's.

    Args:
        dim: of what comes in and goes out.
        heads: query heads.
        kv_heads: heads of keys and values, a divisor of heads. Default heads.
        head_dim: of each head. Default dim / heads.
        context_dim: of what keys and values are made of, in cross attention. Default dim.
        bias: whether the projections of queries, keys and values have one.
        out_bias: whether that of the output has one. Default: as bias.
        causal: hides keys after the query.
        window: a token sees itself and the window - 1 tokens before it, as in Mistral and KVCache(window=). An
            int; attention(window=) takes the pair (window - 1, None).
        rotary: base of rotary positions, as 10000.0; None: none, unless forward() is given rotation=.
        rotary_dims: how many elements of a head turn. Default all.
        interleaved: which of them are pairs, as for speedlight.rotary().
        sinks: a learned logit for each query head that joins the softmax's denominator, as gpt-oss has it (`sinks`).
        score: what becomes of scores, as for speedlight.attention(): sl.softcap(50.0), sl.alibi(slopes), …
        dropout: of weights, while training; seeds are drawn from PyTorch's generator.
        scale: of scores. Default 1/sqrt(head_dim).
        layer: which layer of a cache is this one's.
        device, dtype: of the parameters.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, speedlight.torch
    >>> layer = speedlight.torch.Attention(32, heads=4, kv_heads=2, causal=True, rotary=10000.0)
    >>> layer(torch.randn(1, 5, 32)).shape
    torch.Size([1, 5, 32])
    """

    @public(leaves_graph=False)
    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        causal: bool = False,
        window: int | None = None,
        rotary: float | None = None,
        rotary_dims: int | None = None,
        interleaved: bool = False,
        sinks: bool = False,
        score: Any = None,
        dropout: float = 0.0,
        scale: float | None = None,
        layer: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        out_bias = bias if out_bias is None else out_bias
        flags = {"bias": bias, "out_bias": out_bias, "causal": causal, "interleaved": interleaved, "sinks": sinks}
        for name, flag in flags.items():
            check_flag(name, flag)
        self.dim, self.heads = size("dim", dim, 1), size("heads", heads, 1)
        self.kv_heads = self.heads if kv_heads is None else size("kv_heads", kv_heads, 1)
        if self.heads % self.kv_heads:
            raise ArgumentError(f"kv_heads: expected a divisor of heads, {self.heads}; got {self.kv_heads}.")
        if head_dim is None and self.dim % self.heads:
            raise ArgumentError(f"heads: expected a divisor of dim, {self.dim}, or head_dim= beside; got {self.heads}.")
        self.head_dim = self.dim // self.heads if head_dim is None else size("head_dim", head_dim, 1)
        self.context_dim = self.dim if context_dim is None else size("context_dim", context_dim, 1)
        self.causal, self.window = causal, window_size(window)
        if self.window is not None and not causal:
            raise ArgumentError("window: expected causal=True beside it; got False. Give forward() mask=sl.window(…).")
        self.rotary = None if rotary is None else number("rotary", rotary, _BASE)
        if self.rotary is not None and not 0 < self.rotary < math.inf:
            raise ArgumentError(f"rotary: expected {_BASE}, positive and finite; got {shown(rotary)}.")
        self.rotary_dims = None if rotary_dims is None else size("rotary_dims", rotary_dims, 2)
        turning = self.head_dim if self.rotary_dims is None else self.rotary_dims
        if (self.rotary is not None or rotary_dims is not None) and (turning % 2 or turning > self.head_dim):
            raise ArgumentError(f"rotary_dims: expected an even number up to head_dim, {self.head_dim}; got {turning}.")
        self.interleaved, self.score, self.layer = interleaved, score, size("layer", layer)
        _check_score(score)
        self.scale = None if scale is None else scale_of(scale, self.head_dim)
        self.dropout = dropout_of(dropout)
        made = _check_factory(device, dtype)
        self.q_proj = nn.Linear(self.dim, self.heads * self.head_dim, bias, **made)
        self.k_proj = nn.Linear(self.context_dim, self.kv_heads * self.head_dim, bias, **made)
        self.v_proj = nn.Linear(self.context_dim, self.kv_heads * self.head_dim, bias, **made)
        self.o_proj = nn.Linear(self.heads * self.head_dim, self.dim, out_bias, **made)
        self.sinks = nn.Parameter(torch.zeros(self.heads, **made)) if sinks else None

    @public(leaves_graph=False)
    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        attention_mask: Any = None,
        mask: Any = None,
        positions: Any = None,
        rotation: tuple[torch.Tensor, torch.Tensor] | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Returns what every token of x takes from the tokens that it sees.

        Args:
            x: (batch, length, dim).
            context: (batch, k_len, context_dim), what keys and values are made of. Default x.
            attention_mask: (batch, k_len) of a tokenizer, 0 where there is no token, or such a speedlight.padding(…),
                made once for all layers. With a cache, of the prompts, or of all tokens so far.
            mask: of speedlight.attention(), joined to all others by &.
            positions: rotary ones, as for speedlight.rotary(). Default: from 0 on; with a cache, from its length on.
            rotation: cos and sin instead, as for speedlight.rotary(): transformers' position_embeddings.
            cache: where keys and values of all calls are kept, which x sees all of: (layers ≥ layer + 1, this batch,
                kv_heads, head_dim). The outputs of attention have the bits of one call without it. Under
                torch.no_grad() or inference_mode().

        Returns:
            (batch, length, dim).
        """
        self._check(x, context, cache, positions, rotation)
        source = x if context is None else context
        q, k, v = (
            proj(of).unflatten(-1, (-1, self.head_dim))
            for proj, of in ((self.q_proj, x), (self.k_proj, source), (self.v_proj, source))
        )
        if self.rotary is not None or rotation is not None:
            cos, sin = (None, None) if rotation is None else _check_pair(rotation)
            at = self._find_positions(cache, x.shape[1]) if positions is None and rotation is None else positions
            base = self.rotary if rotation is None else None
            options = RotaryOptions(cos, sin, at, base, self.interleaved, self.rotary_dims, "blhd")
            turn = rotation_of(q, options)
            q, k = turned(q, turn), turned(k, turn)
        sinks = self.sinks
        if cache is not None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            limit = None if self.window is None else _window(self.window - 1)
            options = {
                "scale": self.scale,
                "mask": _join_masks(limit, attention_mask, mask),
                "score": self.score,
                "sink_logits": sinks,
            }
            out = cache.attend(self.layer, q, k, v, **options).transpose(1, 2)
        else:
            dropout = self.dropout if self.training else 0.0
            seed = draw_seed() if dropout else None
            join = _join_in_graph if torch.compiler.is_compiling() else _join_masks
            seen = join(None, attention_mask, mask)
            out = attention(
                q, k, v, causal=self.causal, window=None if self.window is None else (self.window - 1, None),
                mask=seen, score=self.score, sink_logits=sinks, scale=self.scale, layout="blhd", dropout=dropout,
                seed=seed,
            )  # fmt: skip
        return self.o_proj(out.flatten(-2))

    def _check(self, x: Any, context: Any, cache: Any, positions: Any, rotation: Any) -> None:
        """Raises unless shapes fit and options go together."""
        for name, y, dim in (("x", x, self.dim), ("context", context, self.context_dim)):
            if y is None and name == "context":
                continue
            if not isinstance(y, torch.Tensor):
                raise ArgumentTypeError(f"{name}: expected a tensor; got {type(y).__name__}.{of_no_tensor(y)}")
            if y.is_nested or y.layout is not torch.strided:
                what = "nested" if y.is_nested else "sparse"
                raise ArgumentTypeError(
                    f"{name}: expected a strided tensor; got a {what} one. Pad it, or make it dense."
                )
            if y.ndim != 3 or y.shape[-1] != dim:
                way = f" Of one item it is {name}[None]." if y.ndim == 2 and y.shape[-1] == dim else ""
                raise ArgumentError(f"{name}: expected shape (batch, length, {dim}); got {tuple(y.shape)}.{way}")
            own = self.q_proj.weight.dtype
            if y.dtype != own and not (y.is_floating_point() and torch.is_autocast_enabled(y.device.type)):
                raise ArgumentTypeError(
                    f"{name}: expected dtype {own}, as the layer's parameters; got {y.dtype}. Use {name}.to({own})."
                )
        if context is None and self.context_dim != self.dim:
            raise ArgumentError(f"context: expected shape (batch, length, {self.context_dim}); got None.")
        if positions is not None and self.rotary is None and rotation is None:
            raise ArgumentError(
                "positions: expected None without rotary= in Attention(…), or rotation= beside; got positions, which "
                "nothing uses."
            )
        if context is not None and self.rotary is not None:
            raise ArgumentError("context: expected None beside rotary=: its tokens have no positions among those of x.")
        if cache is None:
            return
        if not isinstance(cache, KVCache):
            raise ArgumentTypeError(f"cache: expected a speedlight.KVCache; got {type(cache).__name__}.")
        if context is not None or not self.causal or (self.training and self.dropout):
            what = "context" if context is not None else "causal=False" if not self.causal else "dropout in training"
            raise ArgumentError(
                f"cache: expected None beside {what}; got one. Caches are for causal inference: eval()."
            )
        if torch.is_grad_enabled() and (x.requires_grad or any([p.requires_grad for p in self.parameters()])):
            raise UnsupportedError(
                "cache: expected no gradients beside it, which no cache keeps; x or a parameter requires grad. Call "
                "the layer under torch.no_grad() or torch.inference_mode()."
            )

    def _find_positions(self, cache: KVCache | None, length: int) -> Any:
        """Returns positions of the new tokens: those that follow what the cache has."""
        if cache is None:
            return 0
        lengths = cache.lengths(self.layer)
        if len(set(lengths)) == 1:
            return lengths[0]
        return torch.tensor(lengths)[:, None] + torch.arange(length)

    # --- weights of nn.MultiheadAttention

    def load_multihead(self, state: dict[str, torch.Tensor]) -> Attention:
        """Takes the weights of an nn.MultiheadAttention, its state_dict(); returns itself.

        >>> import torch, speedlight.torch
        >>> theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> ours = speedlight.torch.Attention(32, 4, bias=True).load_multihead(theirs.state_dict())
        """
        odd = not isinstance(state, dict) or not all([isinstance(x, torch.Tensor) for x in state.values()])
        if odd:
            way = " Use .state_dict()." if isinstance(state, nn.Module) else ""
            raise ArgumentTypeError(f"state: expected a state_dict() of tensors; got {type(state).__name__}.{way}")
        extra = sorted(state.keys() & {"bias_k", "bias_v"})
        if extra:
            raise ArgumentError(f"state: expected an nn.MultiheadAttention with add_bias_kv=False; got {extra[0]}.")
        new: dict[str, torch.Tensor] = {}
        names = ("q_proj", "k_proj", "v_proj")
        if "in_proj_weight" in state:
            new |= {f"{n}.weight": w for n, w in zip(names, state["in_proj_weight"].chunk(3), strict=True)}
        else:
            new |= {f"{n}.weight": state[f"{n}_weight"] for n in names if f"{n}_weight" in state}
        if "in_proj_bias" in state:
            new |= {f"{n}.bias": b for n, b in zip(names, state["in_proj_bias"].chunk(3), strict=True)}
        new |= {f"o_proj.{n}": state[f"out_proj.{n}"] for n in ("weight", "bias") if f"out_proj.{n}" in state}
        wanted = {n: tuple(w.shape) for n, w in self.state_dict().items() if n != "sinks"}
        got = {n: tuple(w.shape) for n, w in new.items()}
        if got != wanted:
            different = [n for n in (*wanted, *got) if got.get(n) != wanted.get(n)]
            name = different[0]
            raise ArgumentError(f"state: expected {wanted.get(name)} for {name}; got {got.get(name)}.")
        self.load_state_dict(new, strict=False)  # sinks are none of theirs
        return self

    def multihead_state(self) -> dict[str, torch.Tensor]:
        """Returns the weights of an nn.MultiheadAttention(dim, heads, bias, kdim=context_dim, vdim=context_dim)."""
        own, names = self.state_dict(), ("q_proj", "k_proj", "v_proj")
        if self.kv_heads != self.heads or self.heads * self.head_dim != self.dim or self.sinks is not None:
            raise ArgumentError("kv_heads, head_dim, sinks: expected what nn.MultiheadAttention has; got others.")
        if ("q_proj.bias" in own) != ("o_proj.bias" in own):
            raise ArgumentError("out_bias: expected bias, as in nn.MultiheadAttention; got another.")
        weights = [own[f"{n}.weight"] for n in names]
        if self.context_dim == self.dim:
            state = {"in_proj_weight": torch.cat(weights)}
        else:
            state = {f"{n}_weight": w for n, w in zip(names, weights, strict=True)}
        if "q_proj.bias" in own:
            state |= {"in_proj_bias": torch.cat([own[f"{n}.bias"] for n in names]), "out_proj.bias": own["o_proj.bias"]}
        return state | {"out_proj.weight": own["o_proj.weight"]}

    def extra_repr(self) -> str:
        """Returns what the projections do not show."""
        given = {
            "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim, "causal": self.causal,
            "window": self.window, "rotary": self.rotary, "dropout": self.dropout, "layer": self.layer,
        }  # fmt: skip
        return ", ".join(f"{name}={x}" for name, x in given.items() if x is not None)
