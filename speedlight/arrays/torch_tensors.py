"""PyTorch's tensors, read without importing PyTorch: where their numbers lie, and what records them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..host.insides import TORCH
from .dtypes import DTYPES, ELEMENT_BYTES, check_dtype
from .memory import Array, view_of_memory

F = TypeVar("F", bound=Callable[..., Any])


def is_tensor(x: Any) -> bool:
    """Returns whether it is a PyTorch tensor; never imports PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def library(x: Any) -> Any:
    """Returns the module that computes with x: PyTorch or NumPy."""
    return sys.modules["torch"] if is_tensor(x) else np


def converted(x: Any, dtype: str) -> Any:
    """Casts an array or a tensor."""
    lib = library(x)
    return x.astype(dtype, copy=False) if lib is np else x.to(getattr(lib, dtype))


def is_detached(x: Any) -> bool:
    """Returns whether it is a PyTorch tensor of no other class, which autograd does not follow."""
    torch = sys.modules.get("torch")
    return torch is not None and type(x) is torch.Tensor and not x.requires_grad


def is_followed(x: Any) -> bool:
    """Returns whether autograd records what is made of a tensor now: it requires grad, or carries a tangent."""
    torch = sys.modules["torch"]
    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def in_grad_mode(is_on: bool) -> Callable[[F], F]:
    """Decorates a function that runs with autograd's recording on or off; the thread's mode is put back after it.

    It takes the place of no_grad() and enable_grad(). A signal may come inside their methods, where an exception would
    leave the mode changed. Decorating imports PyTorch.
    """
    # torch.compile finds the name in TORCH, and could not follow the import that looks it up
    _ = TORCH.set_grad_enabled
    is_grad_enabled = sys.modules["torch"].is_grad_enabled

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            was_on = is_grad_enabled()
            # the try begins before the change: a signal may come right after it
            try:
                TORCH.set_grad_enabled(is_on)
                return function(*args, **options)
            finally:
                TORCH.set_grad_enabled(was_on)

        return run  # type: ignore[return-value]

    return decorate


def has_tangent(x: Any) -> bool:
    """Returns whether a tensor carries a tangent of forward mode."""
    if TORCH.forward_ad._current_level < 0:
        return False
    return sys.modules["torch"].autograd.forward_ad.unpack_dual(x).tangent is not None


def is_traced(x: Any) -> bool:
    """Returns whether a tensor stands for numbers that are elsewhere: in a graph, under a transform of torch.func …"""
    torch = sys.modules["torch"]
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return not x.is_nested
    return TORCH.is_functorch_wrapped_tensor(x)


def cast(*tensors: Any) -> Any:
    """Casts tensors as autocast says, all but float64, as PyTorch's own attention does.

    Autocast casts what autograd could follow. Caches and pages keep their dtype.
    """
    torch = sys.modules["torch"]
    device = tensors[0].device.type if is_tensor(tensors[0]) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if is_tensor(x) and x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def is_plain(*tensors: Any) -> bool:
    """Returns whether tensors are what they seem: no mode, no graph, no transform, no tangents."""
    torch = sys.modules["torch"]
    plain = torch.Tensor, torch.nn.Parameter
    for x in tensors:
        if type(x) not in plain and is_tensor(x) and is_traced(x):
            return False
    return (
        TORCH.len_torch_dispatch_stack() == 0
        and TORCH.get_tracing_state() is None
        and TORCH.peek_interpreter_stack() is None
        and TORCH.forward_ad._current_level < 0
    )


def check_plain_tensor(x: Any, name: str, *, followed: bool = False) -> None:
    """Raises unless a tensor's numbers lie in memory as its sizes and strides say, and, unless `followed`, nobody
    differentiates it.

    Raises for subclasses that compute in their own way (FakeTensor, DTensor …), inside torch.func.vmap, grad and jvp,
    and for storage that was resized. Of any dtype and device; q, k and v, masks, biases and lists all come through
    here.
    """
    torch = sys.modules["torch"]
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise UnsupportedError(
            f"{name}: expected a tensor whose numbers lie in memory; got {type(x).__name__}, which has its own way."
        )
    if x.is_nested:
        raise ArgumentTypeError(
            f"{name}: expected a strided tensor; got a nested one. Use {name}.to_padded_tensor(0) and lengths."
        )
    if x.layout is not torch.strided:
        raise ArgumentTypeError(f"{name}: expected a strided tensor; got layout {x.layout}. Use {name}.to_dense().")
    if not followed and is_followed(x):
        what = "requires grad" if x.requires_grad and torch.is_grad_enabled() else "has a tangent"
        raise UnsupportedError(
            f"{name}: {what}, and this call is not differentiable; speedlight.torch.attention() is, of tensors q, k "
            f"and v. Without gradients, use {name}.detach(), or call under torch.no_grad()."
        )
    if x.is_conj() or x.is_neg():
        raise ArgumentTypeError(f"{name}: expected a plain tensor; got a lazily negated one. Use {name}.resolve_neg().")
    if x.device.type == "meta":
        raise UnsupportedError(f"{name}: expected a tensor with values; got one on device meta.")
    if not _has_memory(x):
        raise ArgumentError(
            f"{name}: expected a tensor with memory for its {tuple(x.shape)}; its storage is missing or too short "
            f"(torch.func, resize_ …). Use {name}.clone()."
        )


def _choose_read_address(x: Any) -> int:
    """Reads a tensor's address, and chooses how every later call of read_address() does it."""
    global read_address
    torch: Any = sys.modules["torch"]
    read_address = getattr(torch.Tensor, "const_data_ptr", _read_address_of_storage)
    return read_address(x)


def _read_address_of_storage(x: Any) -> int:
    """Returns what const_data_ptr() does, which PyTorch 2.11 lacks; of an empty tensor 0."""
    if not x.numel():
        return 0
    return sys.modules["torch"]._C._data_address(x) + x.storage_offset() * x.itemsize


# The address of a tensor's first element. Unlike data_ptr(), it makes no copy-on-write tensor its copy. Call it as
# torch_tensors.read_address(x): the first call replaces it, and later ones take no longer than x.const_data_ptr().
read_address: Callable[[Any], int] = _choose_read_address


def view_of(x: Any) -> np.ndarray:
    """Returns a NumPy view of a plain tensor on the CPU, of a dtype that NumPy has. Unlike x.numpy(), it leaves the
    storage resizable, as FSDP needs; it lies where the tensor lay.
    """
    dtype, address = np.dtype(str(x.dtype).removeprefix("torch.")), read_address(x)
    end = (_last_of(x) + 1) * dtype.itemsize if x.numel() else 0
    strides = tuple([step * dtype.itemsize for step in x.stride()])
    return view_of_memory(address, (address, address + end), tuple(x.shape), strides, dtype, x)


def _last_of(x: Any) -> int:
    """Returns how many elements a tensor's last one lies after its first."""
    return sum([(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)])


def has_bytes(x: Any, size: int) -> bool:
    """Returns whether a plain tensor's storage, which may have been resized, has so many bytes from its first element
    on.
    """
    start = x.storage_offset()
    return x.untyped_storage().nbytes() >= size + (start and start * x.itemsize)


def _has_memory(x: Any) -> bool:
    """Returns whether every element lies inside the tensor's storage."""
    if not x.numel():
        return True
    try:
        return read_address(x) != 0 and has_bytes(x, (_last_of(x) + 1) * x.itemsize)
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func, a tensor of zeros that are nowhere
        return False


def is_cut(x: Any) -> bool:
    """Returns whether a tensor's storage, which may have been resized, ends before its last element; False of tensors
    that are traced, or have no storage of their own.
    """
    torch: Any = sys.modules["torch"]
    if torch.compiler.is_dynamo_compiling() or not is_tensor(x) or x.layout is not torch.strided or not x.numel():
        return False
    try:
        return not has_bytes(x, (_last_of(x) + 1) * x.itemsize)
    except (RuntimeError, NotImplementedError):  # a wrapper of torch.func
        return False


def makes_plain_tensors(x: Any) -> bool:
    """Returns whether x is a plain tensor on the CPU and what is made beside it now is one, too: no mode, no graph, no
    transform is around. In inference mode later calls may not use what is made.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or type(x) is not torch.Tensor or torch.compiler.is_dynamo_compiling():
        return False
    return (
        x.is_cpu
        and not x.is_nested
        and x.layout is torch.strided
        and TORCH.len_torch_dispatch_stack() == 0
        and TORCH.get_tracing_state() is None
        and TORCH.peek_interpreter_stack() is None
    )


_READ = frozenset(("q", "k", "v", "d_out", "d_lse"))  # what no call writes
_SIZES: dict[Any, tuple[str, int]] = {}  # name and bytes of a torch.dtype


def from_torch(x: Any, name: str, torch: Any, *, codes: bool = False) -> Array:
    """Reads where a tensor lies; raises unless its numbers lie there. `codes`: it may be of codes."""
    if TORCH.get_tracing_state() is not None:
        raise UnsupportedError(f"{name}: expected no torch.jit.trace, which speedlight.torch.attention() alone takes.")
    found = _SIZES.get(x.dtype)
    if found is None or not _is_plain(x, torch):
        if x.device.type not in ("cpu", "cuda"):
            way = "Make it where it has numbers." if x.device.type == "meta" else f"Use {name}.cpu()."
            raise UnsupportedError(
                f"{name}: expected a tensor on the CPU or a CUDA device; got one on {x.device}. {way}"
            )
        check_plain_tensor(x, name)
        dtype = check_dtype(name, str(x.dtype).removeprefix("torch."), codes=codes)
        found = dtype, ELEMENT_BYTES[dtype]
        if dtype in DTYPES:
            _SIZES[x.dtype] = found
    dtype, size = found
    address = read_address(x) if name in _READ else x.data_ptr()  # which makes a copy-on-write tensor its copy
    strides = tuple([s * size for s in x.stride()])
    return Array(name, address, tuple(x.shape), strides, dtype, "torch", True, x, str(x.device))


def _is_plain(x: Any, torch: Any) -> bool:
    """Returns whether check_plain_tensor() has nothing to say of a tensor on the CPU; in a third of the time."""
    if type(x) is not torch.Tensor or not x.is_cpu or x.is_nested or x.layout is not torch.strided:
        return False
    if x.is_neg() or x.is_conj() or TORCH.forward_ad._current_level >= 0:
        return False
    if x.requires_grad and torch.is_grad_enabled():
        return False
    return _has_memory(x)
