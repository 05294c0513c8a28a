"""Models that exist, on speedlight: what they call in PyTorch is computed here, in a thread or in the whole process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .. import ArgumentError
from ..adapting import check_flag
from ..arrays.torch_tensors import is_plain
from ..front import compute
from ..host.insides import TORCH
from ..problem.options import PLAIN, TOP_LEFT, new_options
from . import fast_path, flash_kernels
from .dot_product import as_pytorch, only_pytorch_takes, scaled_dot_product_attention
from .routing import (
    SDPA,
    Report,
    ask,
    count_left,
    count_patches,
    count_taken,
    find_subclass,
    is_ours,
    is_traced,
    read_counts,
)

_GROUPED = f"{SDPA}, enable_gqa"  # under which other shapes are allowed
_WEIGHTS = "multi_head_attention_forward"
_NEED_WEIGHTS = list(inspect.signature(functional.multi_head_attention_forward).parameters).index("need_weights")
_lock = threading.RLock()
_libraries: list[torch.library.Library] = []  # registered as long as they live: at the first use, for good
_originals: dict[str, Any] = {}


def sdpa(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Lets speedlight compute this thread's PyTorch attention while inside, for any model.

    Taken are F.scaled_dot_product_attention on the CPU with all its options (so nn.MultiheadAttention,
    nn.Transformer and other people's models, in training and out of it), the fast path of nn.MultiheadAttention and
    nn.TransformerEncoderLayer, and torch.nn.attention.varlen. What is not is left to PyTorch, and report() counts it
    and says why. They nest; other threads are not touched. A backward pass is its forward's, wherever it is called.

    A graph of torch.compile keeps what was in force when it was compiled: compile it inside.

    Args:
        enabled: False leaves this thread's attention to PyTorch, also after patch().

    >>> import torch, speedlight.torch
    >>> x = torch.ones(1, 2, 3, 4)
    >>> with speedlight.torch.sdpa():
    ...     out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> speedlight.torch.report().taken["scaled_dot_product_attention"] > 0
    True
    """
    if type(enabled) is not bool:
        raise ArgumentError(f"enabled: expected True or False; got {enabled!r}.")
    return _enter(enabled)


@contextlib.contextmanager
def _enter(enabled: bool) -> Iterator[None]:
    _register()
    with ask(enabled):
        yield


def patch() -> None:
    """Enters sdpa() for every thread of the process, until unpatch(). Of nested calls the outer ones count.

    Graphs that torch.compile made before are made anew.

    >>> import torch, speedlight.torch
    >>> speedlight.torch.patch()
    >>> x = torch.ones(1, 2, 3, 4)
    >>> out = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> speedlight.torch.unpatch()
    """
    _register()
    if count_patches(1) == 1:
        _forget_graphs()


def unpatch() -> None:
    """Undoes one patch().

    Raises:
        speedlight.ArgumentError: there is none.

    >>> import speedlight.torch
    >>> speedlight.torch.patch()
    >>> speedlight.torch.unpatch()
    """
    left = count_patches(-1)
    if left is None:
        raise ArgumentError("unpatch(): expected a patch() before it; got none that is in force.")
    if left == 0:
        _forget_graphs()


def report(reset: bool = False) -> Report:
    """Returns which calls sdpa() and patch() took in the whole process, and which they left to PyTorch and why.

    Layers of latent attention (speedlight.transformers) count as `DeepseekV3Attention.expand_kv`, by their class: taken
    where latents were not expanded.

    Args:
        reset: begin anew after it.

    >>> import speedlight.torch
    >>> speedlight.torch.report(reset=True).left
    {}
    """
    check_flag("reset", reset)
    return read_counts(reset)


def _forget_graphs() -> None:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _register() -> None:
    """Puts our kernels into PyTorch's tables, once: they pass on what nobody asked us for.

    They stay there: those tables are not made to change while other threads call what is in them.
    """
    if _libraries:
        return
    with _lock:
        if _libraries:
            return
        library = torch.library.Library("aten", "IMPL")
        for place in ("AutogradCPU", "CPU"):  # with autograd, also under no_grad(); under inference_mode()
            _originals[place] = torch.library.get_kernel(f"aten::{SDPA}", place)
            library.impl(SDPA, functools.partial(_kernel, place), place, with_keyset=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            flash_kernels.register(library)
            fast_path.register(library)
        _originals[_WEIGHTS] = functional.multi_head_attention_forward
        functional.multi_head_attention_forward = _multi_head_attention_forward
        _libraries.append(library)


def _kernel(place: str, dispatch_keys: Any, *given: Any, **options: Any) -> Tensor:
    """Computes here, or by PyTorch's own kernel of that place, with its own flash kernel if we were asked."""
    if is_ours():
        out = _attend(*given, **options)
        if out is not None:
            return out
    original = _originals[place]
    if not is_ours():
        return original.call_boxed(dispatch_keys, *given, **options)
    with ask(False):
        return original.call_boxed(dispatch_keys, *given, **options)


def _is_plain(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> bool:
    """Returns whether PyTorch's rules for these arguments, without dropout or a mode, are attention()'s."""
    if only_pytorch_takes(query, 0.0, scale) is not None:
        return False
    if not (type(query) is Tensor and type(key) is Tensor and type(value) is Tensor):
        return False
    if query.is_neg() or key.is_neg() or value.is_neg() or torch.compiler.is_dynamo_compiling():
        return False
    q_shape, k_shape = query.shape, key.shape
    if len(q_shape) != 4 or len(k_shape) != 4 or k_shape != value.shape or 0 in q_shape or 0 in k_shape:
        return False
    if q_shape[0] != k_shape[0] or k_shape[3] != q_shape[3] or not query.dtype is key.dtype is value.dtype:
        return False
    if q_shape[1] != k_shape[1] and (not enable_gqa or q_shape[1] % k_shape[1]):
        return False
    if attn_mask is None:
        return True
    if is_causal or type(attn_mask) is not Tensor or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    mask_shape = attn_mask.shape
    if len(mask_shape) == 2:
        items, heads, (rows, keys) = 1, 1, mask_shape
    elif len(mask_shape) == 4:
        items, heads, rows, keys = mask_shape
    else:
        return False
    return items in (1, q_shape[0]) and heads in (1, q_shape[1]) and rows in (1, q_shape[2]) and keys in (1, k_shape[2])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Computes a call, and counts it; None, with the reason counted, where it is left to PyTorch."""
    if not dropout_p and query.dim() == 4 and is_plain() and not torch.compiler.is_dynamo_compiling():
        if attn_mask is scale is None:
            options = TOP_LEFT if is_causal else PLAIN
        else:
            is_mask = attn_mask is not None and attn_mask.dtype is torch.bool
            options = new_options(
                mask=attn_mask if is_mask else None,
                score=None if is_mask else attn_mask,
                scale=scale,
                causal="top-left" if is_causal else False,
            )
        check = functools.partial(_is_plain, query, key, value, attn_mask, is_causal, scale, enable_gqa)
        out = compute(query, key, value, options, call=_GROUPED if enable_gqa else SDPA, check=check)
        if out is not None:
            out = as_pytorch(out, query, key, value, attn_mask, 0.0, is_causal, enable_gqa)
            count_taken(SDPA)
            return out
    why = only_pytorch_takes(query, dropout_p, scale)
    if why is None:
        if min(query.dim(), key.dim(), value.dim()) < 2:
            why = "tensors of fewer than two dimensions"
        elif not query.dtype == key.dtype == value.dtype:
            why = "tensors of several dtypes"
        elif attn_mask is not None and is_causal:
            why = "attn_mask beside is_causal"
        elif not (query.shape[-1:].numel() and value.shape[-1:].numel()):
            why = "a head dim of 0"
        elif TORCH.peek_interpreter_stack() is not None:  # whose layers are above this one
            why = "inside torch.func"
        elif dropout_p and is_traced(query):
            why = "dropout_p in a graph that is being compiled"
        else:
            name = find_subclass(query, key, value, attn_mask)
            why = None if name is None else f"a tensor of class {name}"
    if why is not None:
        count_left(SDPA, why)
        return None
    out = scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not is_traced(query):
        count_taken(SDPA)
    elif type(query).__name__ == "FakeTensor":  # once for each call in a graph
        count_taken(f"{SDPA}, compiled into a graph")
    return out


@functools.wraps(functional.multi_head_attention_forward)
def _multi_head_attention_forward(*given: Any, **options: Any) -> Any:
    """Counts what attends without scaled_dot_product_attention, because its weights are asked for."""
    asked_for = given[_NEED_WEIGHTS] if len(given) > _NEED_WEIGHTS else options.get("need_weights", True)
    if asked_for and not torch.compiler.is_compiling() and is_ours():
        query = given[0] if given else options.get("query")
        if isinstance(query, Tensor) and query.device.type == "cpu" and type(query).__name__ != "FakeTensor":
            count_left(_WEIGHTS, "need_weights")
    return _originals[_WEIGHTS](*given, **options)


# TorchScript, which cannot compile this one, compiles the original
vars(_multi_head_attention_forward).update(
    __script_if_tracing_wrapper=True, __original_fn=functional.multi_head_attention_forward
)
