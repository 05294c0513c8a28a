"""Latent attention (MLA): kv_b_proj is absorbed into the query and the output, so that latents are keys as they lie.

Such a layer caches a latent and a rotary key per token, shared by all heads. transformers expands all of them at every
call, in expand_kv(). Here expand_kv() returns tensors that stand for the expanded ones; attention_forward() takes the
latents out of them, and whatever else reads them gets what transformers computes.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import Cache as ModelCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..arrays.latents import resolve
from ..arrays.torch_tensors import is_plain
from ..host.insides import TORCH
from ..torch.routing import count_left, count_taken
from .caches import Kept, StandIn
from .masks import MaskSpec
from .options import LatentMode

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_mode: LatentMode = "stock"
_attend: Callable[..., Any] | None = None  # attention_forward(): layers that call another function are left alone
_lock = threading.RLock()


class Expanded(StandIn):
    """Keys or values of all heads, which nobody has computed yet."""

    latents: Latents
    part: int  # 0 of keys, 1 of values

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Expanded({('keys', 'values')[self.part]}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def stored(self) -> torch.Tensor:
        return self.latents.expand()[self.part]


class Latents:
    """A layer's latents and rotary keys of all tokens, in one call."""

    __slots__ = ("_expanded", "_expanding", "heads", "latent", "layer", "nope_dim", "rotary", "value_dim")

    def __init__(self, layer: Any, latent: torch.Tensor, rotary: torch.Tensor, expanding: Callable[..., Any]) -> None:
        self.layer, self.latent, self.rotary = layer, latent, rotary
        self.nope_dim, self.value_dim = layer.qk_nope_head_dim, layer.v_head_dim
        self.heads = layer.kv_b_proj.weight.shape[0] // (self.nope_dim + self.value_dim)
        self._expanding = expanding  # transformers' own expand_kv()
        self._expanded: tuple[torch.Tensor, torch.Tensor] | None = None

    def make_parts(self) -> tuple[Expanded, Expanded]:
        """Returns tensors that stand for keys and values."""
        batch, _, length, _ = self.latent.shape
        dims = self.nope_dim + self.rotary.shape[-1], self.value_dim
        keys, values = (Expanded.make((batch, self.heads, length, n), self.latent) for n in dims)
        keys.latents, keys.part = self, 0
        values.latents, values.part = self, 1
        return keys, values

    def expand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values of all heads, as transformers computes them."""
        found = self._expanded
        if found is None:
            found = self._expanded = self._expanding(self.layer, self.latent, self.rotary)
        return found

    def as_keys(self, length: int) -> tuple[Any, torch.Tensor]:
        """Returns the first tokens as one head of keys, and values that are its first columns."""
        # tokens of our Cache are copied out of it; those of transformers' caches are read where they lie
        latent, rotary = (x.stored() if type(x) is Kept else x for x in (self.latent, self.rotary))
        latent, rotary = latent[:, :, :length], rotary[:, :, :length]
        keys, values = resolve((latent, rotary), None, None)
        return keys, latent if values is None else values

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Returns (batch, heads, q_len, latent + rotary): queries whose first part meets latents, q · W_UK."""
        batch, heads, rows, _ = query.shape
        nope = query[..., : self.nope_dim].transpose(0, 1).reshape(heads, batch * rows, self.nope_dim)
        found = torch.bmm(nope, self._weights()[:, : self.nope_dim])
        found = found.view(heads, batch, rows, -1).transpose(0, 1)
        return torch.cat((found, query[..., self.nope_dim :]), -1)

    def project(self, out: torch.Tensor) -> torch.Tensor:
        """Returns (batch, q_len, heads, value_dim) of sums of latents, (batch, q_len, heads, latent): out · W_UVᵀ."""
        batch, rows, heads, columns = out.shape
        # [heads, latent, batch * q_len]: with the weight on the left PyTorch reads it where it lies, in every dtype
        sums = out.permute(2, 3, 0, 1).reshape(heads, columns, batch * rows)
        found = torch.bmm(self._weights()[:, self.nope_dim :], sums)
        return found.view(heads, self.value_dim, batch, rows).permute(2, 3, 0, 1).contiguous()

    def _weights(self) -> torch.Tensor:
        """Returns a view of kv_b_proj's weight: [heads, nope + value, latent]."""
        return self.layer.kv_b_proj.weight.unflatten(0, (self.heads, self.nope_dim + self.value_dim))


def attend_to_latents(
    attend: Callable[..., tuple[torch.Tensor, None]],
    *,
    module: Any,
    query: torch.Tensor,
    key: Expanded,
    value: Any,
    attention_mask: Any,
    scaling: float | None,
    cache: Any,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Calls attention_forward() for a layer that has latents: with kv_b_proj absorbed, or with the expanded keys."""
    latents, name = key.latents, f"{type(module).__name__}.expand_kv"
    why = _find_reason(latents, query, value, cache, more)
    if why is not None:
        count_left(name, why)
        keys, values = latents.expand()
        return attend(module, query, keys, values, attention_mask, scaling=scaling, cache=cache, **more)
    length = key.shape[2]
    if type(attention_mask) is MaskSpec and attention_mask.k_len == length and more.get("indices") is None:
        attention_mask = attention_mask.cut()
        length = attention_mask.k_len
    keys, values = latents.as_keys(length)
    scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    absorbed = latents.absorb(query)
    out, _ = attend(module, absorbed, keys, values, attention_mask, scaling=scale, **more)
    count_taken(name)
    return latents.project(out), None


def set_mode(mode: LatentMode, attend: Callable[..., Any] | None = None) -> None:
    """Puts tensors that stand for expanded keys into the layers of `attend`; "stock" restores transformers' own way.

    Classes that are defined later are seen as they are defined.
    """
    global _mode, _attend
    with _lock:
        _mode, _attend = mode, attend
        ours = vars(torch.nn.Module).get("__init_subclass__") is _SEE_CLASS
        if mode != "stock":
            if not ours and "__init_subclass__" not in vars(torch.nn.Module):
                setattr(torch.nn.Module, "__init_subclass__", _SEE_CLASS)  # noqa: B010
            for each in _find_modules():
                _wrap(each)
            return
        if ours:
            delattr(torch.nn.Module, "__init_subclass__")
        for each in _find_modules():
            found = vars(each).get("expand_kv")
            if getattr(found, "is_speedlights", False):
                each.expand_kv = found.__wrapped__  # type: ignore[union-attr]


def _see_class(cls: Any, **options: Any) -> None:
    super(torch.nn.Module, cls).__init_subclass__(**options)
    if _mode != "stock":
        _wrap(cls)


_SEE_CLASS = classmethod(_see_class)


def _find_modules() -> Iterator[Any]:
    """Yields every class of modules that is defined."""
    seen, left = set(), [torch.nn.Module]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += each.__subclasses__()
            yield each


def _wrap(cls: Any) -> None:
    """Wraps a class's own expand_kv(), if it is transformers'."""
    found = vars(cls).get("expand_kv")
    is_theirs = type(found) is FunctionType and found.__module__.startswith("transformers.models.")
    if is_theirs and not getattr(found, "is_speedlights", False):
        cls.expand_kv = _make_expanding(found)


def _make_expanding(expand_kv: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand_kv)
    def expand_later(self: Any, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.compiler.is_compiling() or _mode == "stock" or not _is_ours(self):
            return expand_kv(self, kv_nope, k_rot)
        why = _find_obstacle(self, kv_nope, k_rot, expand_kv)
        if why is None:
            return Latents(self, kv_nope, k_rot, expand_kv).make_parts()
        count_left(f"{type(self).__name__}.expand_kv", why)
        return expand_kv(self, kv_nope, k_rot)

    vars(expand_later)["is_speedlights"] = True
    return expand_later


def _is_ours(layer: Any) -> bool:
    """Returns whether a layer calls attention_forward(): by our name, maybe wrapped, or by another name."""
    name = getattr(getattr(layer, "config", None), "_attn_implementation", None)
    return name == "speedlight" or (name in ALL_ATTENTION_FUNCTIONS and ALL_ATTENTION_FUNCTIONS[name] is _attend)


def _find_obstacle(layer: Any, latent: torch.Tensor, rotary: torch.Tensor, expand_kv: Any) -> str | None:
    """Returns why a layer's latents are expanded by transformers, if they are."""
    linear = layer.kv_b_proj
    if type(linear) is not torch.nn.Linear:
        return f"kv_b_proj is a {type(linear).__module__}.{type(linear).__qualname__}"
    weight = linear.weight
    if type(weight) not in (torch.nn.Parameter, torch.Tensor):
        return f"kv_b_proj's weight is a {type(weight).__name__}"
    if "forward" in vars(linear) or any([vars(linear).get(name) for name in _HOOKS]):
        return "kv_b_proj has hooks"
    if linear.bias is not None:
        return "kv_b_proj has a bias"
    if not (latent.device.type == rotary.device.type == weight.device.type == "cpu"):
        return "latents or kv_b_proj are not on the CPU"
    if TORCH.is_any_autocast_enabled() or not latent.dtype is rotary.dtype is weight.dtype:
        return "latents and kv_b_proj have several dtypes"
    if torch.is_grad_enabled() and (latent.requires_grad or rotary.requires_grad or weight.requires_grad):
        return "gradients are recorded"
    if not is_plain() or not {type(latent), type(rotary)} <= {torch.Tensor, Kept}:
        return "tensors are traced or transformed"
    return None if _is_known(expand_kv) else "this release expands keys in another way"


def _find_reason(latents: Latents, query: torch.Tensor, value: Any, cache: Any, more: dict[str, Any]) -> str | None:
    """Returns why a call attends to expanded keys, if it does."""
    if type(value) is not Expanded or value.latents is not latents:
        return "values are not those of the keys"
    if more.get("block_indices") is not None:
        return "an indexer chooses blocks of keys"
    if torch.is_grad_enabled() and query.requires_grad:
        return "gradients are recorded"
    if query.dtype is not latents.latent.dtype or query.shape[1] != latents.heads:
        return "the query has another dtype or number of heads"
    if cache is not None and not isinstance(cache, ModelCache):
        return "a paged cache takes keys and values"
    if _mode == "auto":
        few = count_few(latents.latent.shape[-1], latents.nope_dim, latents.value_dim)
        chosen = more.get("indices")
        if chosen is not None and chosen.shape[-1]:  # all keys are expanded, of which a query reads so many
            few *= latents.latent.shape[2] / chosen.shape[-1]
        if query.shape[2] > few:
            return "many queries at once"
    return None


@functools.lru_cache(64)
def count_few(latent_dim: int, nope_dim: int, value_dim: int) -> float:
    """Returns up to how many queries a call takes fewer FLOPs with kv_b_proj absorbed, where all keys are read.

    For each head and key, expanding takes latent · (nope + value) multiply-adds and a query nope + rotary + value;
    absorbed, a query takes 2 · latent + rotary.
    """
    more = 2 * latent_dim - nope_dim - value_dim
    return latent_dim * (nope_dim + value_dim) / more if more > 0 else math.inf


@functools.lru_cache(64)
def _is_known(expand_kv: Any) -> bool:
    """Returns whether expand_kv() makes of kv_b_proj what absorption undoes: of a head the rows of W_UK, then W_UV."""
    heads, nope, rope, value, columns = 2, 3, 2, 1, 4
    numbers = torch.arange(heads * (nope + value) * columns, dtype=torch.float32, device="cpu")
    weight = numbers.view(heads, nope + value, columns)
    linear = functools.partial(torch.nn.functional.linear, weight=weight.flatten(0, 1))
    layer = SimpleNamespace(
        kv_b_proj=linear, num_heads=heads, kv_lora_rank=columns,
        qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
    )  # fmt: skip
    latent, rotary = numbers[:12].view(1, 1, 3, columns), numbers[:6].view(1, 1, 3, rope)
    try:
        keys, values = expand_kv(layer, latent, rotary)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    expanded = latent @ weight.mT
    want = torch.cat((expanded[..., :nope], rotary.expand(-1, heads, -1, -1)), -1)
    return torch.equal(keys, want) and torch.equal(values, expanded[..., nope:])
