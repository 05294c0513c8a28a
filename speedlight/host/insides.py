"""Private names of other libraries that we rely on, looked up at their first use; without them there is a plain way.

A release may move or drop a private name. Each one has a plain way here that gives the same results by public names,
more slowly, or that refuses. `speedlight info` says which are there.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple


class Inside(NamedTuple):
    """A private name, what takes its place, and what that means for a user."""

    path: str
    plain: Any
    without: str
    is_value: bool = False  # the name's value changes: what has the name is handed out, not the value


class Insides:
    """Private names of one library, as attributes. The first use of one looks it up, later ones find it here."""

    def __init__(self, **known: Inside) -> None:
        self._known = known

    def __getattr__(self, name: str) -> Any:
        inside = vars(self).get("_known", {}).get(name)
        if inside is None:
            raise AttributeError(name)
        found = look_up(inside)
        value = inside.plain if found is None else found
        setattr(self, name, value)
        return value

    def found(self) -> dict[str, bool]:
        """Returns of each private name if the installed release has it; imports the library."""
        return {x.path: look_up(x) is not None for x in self._known.values()}

    def missing(self) -> dict[str, str]:
        """Returns what is done instead, of each private name that the installed release lacks."""
        return {x.path: x.without for x in self._known.values() if look_up(x) is None}


def look_up(inside: Inside) -> Any:
    """Returns what a private name stands for, or None."""
    path, *rest = inside.path.split(".")
    owner = x = importlib.import_module(path)
    for name in rest:
        owner = x
        path = f"{path}.{name}"
        x = getattr(owner, name, None)
        if x is None and not inside.is_value:
            with contextlib.suppress(ImportError):
                x = importlib.import_module(path)
        if x is None:
            return None
    return owner if inside.is_value else x


# --- the plain ways of PyTorch's


class _Depth(threading.local):
    """How many calls deep a thread is in what torch.compile was told to leave alone."""

    number = 0


_depth = _Depth()


def _is_left_alone() -> Any:
    """Stands for the frame callback: None inside of what as_left_alone() wrapped, else there may be one."""
    return None if _depth.number else True


def as_left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that says of its frames that torch.compile leaves them alone, if PyTorch cannot say so."""
    if TORCH.get_eval_frame_callback is not _is_left_alone:
        return function

    def call(*args: Any, **options: Any) -> Any:
        _depth.number += 1
        try:
            return function(*args, **options)
        finally:
            _depth.number -= 1

    return call


def _tracing_state() -> Any:
    return sys.modules["torch"].jit.is_tracing() or None


def _has_no_storage(x: Any) -> bool:
    """Returns whether a tensor is a wrapper of torch.func, by what these refuse."""
    try:
        x.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _set_grad_enabled(flag: bool) -> None:
    sys.modules["torch"].set_grad_enabled(flag)


def _inference_mode(flag: bool) -> Any:
    return sys.modules["torch"].inference_mode(flag)


def _disable(function: Any) -> Any:
    return sys.modules["torch"].compiler.disable(function)


def _guard_scalar(x: Any) -> Any:
    """Returns the number that a symbolic one is in this graph; any other thing as it is."""
    number = {"SymBool": bool, "SymInt": int, "SymFloat": float}.get(type(x).__name__)
    return x if number is None else number(x)


def _tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to what lists, tuples and dictionaries hold."""
    if isinstance(tree, dict):
        return {name: _tree_map(function, x) for name, x in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)([_tree_map(function, x) for x in tree])
    return function(tree)


# PyTorch's own attention, by the names of its operators: sdpa() and patch() take their place
_OPERATORS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_flash_attention_backward",
    "_native_multi_head_attention",
)
_BATCHED = "torch.autograd.grad(is_grads_batched=True) is refused"
_AS_OPERATION = "each call is an operation of PyTorch's: repeated calls take longer, and is_grads_batched=True raises"

TORCH = Insides(
    len_torch_dispatch_stack=Inside("torch._C._len_torch_dispatch_stack", lambda: 1, _AS_OPERATION),
    get_tracing_state=Inside("torch._C._get_tracing_state", _tracing_state, "torch.jit.is_tracing() is asked"),
    peek_interpreter_stack=Inside(
        "torch._C._functorch.peek_interpreter_stack",
        lambda: (),
        f"{_AS_OPERATION}, and sdpa() leaves calls of other people's models to PyTorch",
    ),
    get_interpreter_stack=Inside(
        "torch._C._functorch.get_interpreter_stack", lambda: None, "tangents are looked for in each tensor"
    ),
    TransformType=Inside(
        "torch._C._functorch.TransformType", SimpleNamespace(Jvp=None), "tangents are looked for in each tensor"
    ),
    is_functorch_wrapped_tensor=Inside(
        "torch._C._functorch.is_functorch_wrapped_tensor", _has_no_storage, "each tensor's storage is asked for"
    ),
    temporarily_clear_interpreter_stack=Inside(
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
        contextlib.nullcontext,
        "tables must be made outside of torch.func's transforms",
    ),
    forward_ad=Inside(
        "torch.autograd.forward_ad._current_level", SimpleNamespace(_current_level=0), _AS_OPERATION, is_value=True
    ),
    set_grad_enabled=Inside(
        "torch._C._set_grad_enabled",
        _set_grad_enabled,
        "torch.set_grad_enabled() is called: a signal that comes as it does may leave gradients off",
    ),
    inference_mode=Inside(
        "torch._C._InferenceMode",
        _inference_mode,
        "torch.inference_mode() is called: a signal that comes as it begins or ends may leave it as it is inside",
    ),
    is_cow_tensor=Inside("torch._C._is_cow_tensor", None, "tensors are read in Python: small calls take longer"),
    is_any_autocast_enabled=Inside(
        "torch._C._is_any_autocast_enabled", lambda: True, "each device is asked: repeated calls take longer"
    ),
    get_current_graph_task_keep_graph=Inside(
        "torch._C._autograd._get_current_graph_task_keep_graph",
        lambda: True,
        "what a backward pass has read is freed with its graph, not before",
    ),
    is_legacy_batchedtensor=Inside("torch._C._functorch.is_legacy_batchedtensor", lambda x: False, _BATCHED),
    vmapmode_increment_nesting=Inside("torch._C._vmapmode_increment_nesting", None, _BATCHED),
    vmapmode_decrement_nesting=Inside("torch._C._vmapmode_decrement_nesting", None, _BATCHED),
    add_batch_dim=Inside("torch._add_batch_dim", None, _BATCHED),
    remove_batch_dim=Inside("torch._remove_batch_dim", None, _BATCHED),
    fused_sdp_choice=Inside(
        "torch._fused_sdp_choice", None, "results of scaled_dot_product_attention lie as PyTorch 2.13's do"
    ),
    disable_current_modes=Inside(
        "torch.utils._python_dispatch._disable_current_modes",
        contextlib.nullcontext,
        "a BlockMask that captures tensors cannot be read while torch.export runs",
    ),
    get_eval_frame_callback=Inside(
        "torch._C._dynamo.eval_frame.get_eval_frame_callback",
        _is_left_alone,
        "each call tells torch.compile to leave it alone: calls take longer where that is loaded",
    ),
    **{x: Inside(f"torch.ops.aten.{x}", None, "sdpa() does not take its place") for x in _OPERATORS},
    guard_scalar=Inside(
        "torch.fx.experimental.symbolic_shapes.guard_scalar", _guard_scalar, "symbolic numbers are turned into Python's"
    ),
    tree_map=Inside("torch.utils._pytree.tree_map", _tree_map, "only lists, tuples and dictionaries are looked into"),
    skip=Inside("torch._dynamo.decorators.skip", _disable, "torch.compiler.disable() takes its place"),
)

# --- transformers'

_TRACED = "masks that it makes are traced, and compiled, like other people's"


def _in_masks(name: str) -> Inside:
    return Inside(f"transformers.masking_utils.{name}", None, _TRACED)


TRANSFORMERS = Insides(
    active_collector=Inside(
        "transformers.utils.output_capturing._active_collector",
        SimpleNamespace(get=lambda: None),
        "a model that is asked for weights by its config gets None instead of an error",
    ),
    can_set_attn_implementation=Inside(
        "transformers.PreTrainedModel._can_set_attn_implementation",
        None,
        "a model that attends itself gets a mask as a tensor instead of an error",
    ),
    PagedAttentionCache=Inside(
        "transformers.generation.continuous_batching.cache.PagedAttentionCache", object, "cache= is not checked"
    ),
    causal_mask_function=_in_masks("causal_mask_function"),
    bidirectional_mask_function=_in_masks("bidirectional_mask_function"),
    and_masks=_in_masks("and_masks"),
    sliding_window_overlay=_in_masks("sliding_window_overlay"),
    sliding_window_bidirectional_overlay=_in_masks("sliding_window_bidirectional_overlay"),
    chunked_overlay=_in_masks("chunked_overlay"),
    packed_sequence_mask_function=_in_masks("packed_sequence_mask_function"),
    remap_positions_for_packed_sequence=_in_masks("remap_positions_for_packed_sequence"),
)
