"""PyTorch's own ring and its context_parallel(), which have no kernel for CPUs, on speedlight's attention."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..calls.backward import attention_backward
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from ..front import attention

TESTED = "2.13"  # the release of PyTorch whose private functions these are
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
_INSTEAD = "speedlight.distributed.attention() needs nothing private of PyTorch's."
# what is called, or replaced, with the arguments that it has to have
_SIGNATURES = {
    "_templated_ring_attention": ("group", "seq_dim", "op", "query", "key", "value", "is_causal", "kwargs"),
    "_templated_ring_attention_backward": (
        "group", "seq_dim", "op", "grad_out", "grad_out_name", "query", "key", "value", "out", "logsumexp", "is_causal",
        "kwargs",
    ),
    "context_parallel": ("mesh", "buffers", "buffer_seq_dims", "no_restore_buffers"),
}  # fmt: skip


class _Forward(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *, scale: float | None = None
    ) -> tuple[Tensor, Tensor]: ...


class _Backward(Protocol):
    def __call__(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
        is_causal: bool = False, *, scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip


class RingOps(NamedTuple):
    """What `_templated_ring_attention(group, 2, ops.forward, q, k, v, …)` computes each block with, and its backward
    function, given `ops.backward` and the name "grad_out".
    """

    forward: _Forward
    backward: _Backward


def ring_ops() -> RingOps:
    """The `op` of PyTorch's private `_templated_ring_attention` and of `_templated_ring_attention_backward`.

    Tensors are (batch, heads, length, head_dim), as PyTorch's; grouped heads need no repeating. is_causal is aligned at
    the first query and key. `scale` is handed on by PyTorch's functions. Blocks are merged by PyTorch, in float32 even
    of float64.

    Raises:
        speedlight.UnsupportedError: another release of PyTorch than the one that these functions are known of, or one
            in which they have other arguments.

    >>> import torch, speedlight.distributed
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> out, lse = speedlight.distributed.ring_ops().forward(q, k, v, is_causal=True)
    >>> out.shape, lse.shape
    (torch.Size([1, 2, 3, 4]), torch.Size([1, 2, 3]))
    """
    theirs()
    return RingOps(_forward, _backward)


def theirs() -> Any:
    """The module of PyTorch's ring, if it is the one that is known."""
    release = torch.__version__
    if release.split(".")[:2] != TESTED.split("."):
        raise UnsupportedError(
            f"torch: expected {TESTED}, whose private ring attention is known; got {release}. {_INSTEAD}"
        )
    if not torch.distributed.is_available():
        raise UnsupportedError("torch: expected a build with torch.distributed; got one without.")
    import importlib

    module = importlib.import_module(_MODULE)
    for name, expected in _SIGNATURES.items():
        found = getattr(module, name, None)
        got = None if found is None else tuple(inspect.signature(found).parameters)
        if got != expected:
            raise UnsupportedError(
                f"torch: expected {name}({', '.join(expected)}) in {_MODULE}; got "
                f"{'none' if got is None else ', '.join(got)} in {release}. {_INSTEAD}"
            )
    return module


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one block."""
    with torch.no_grad():
        return attention(query, key, value, return_lse=True, scale=scale, causal=_causal(is_causal))


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    is_causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What flows to one block from the whole output: out and lse are those of all keys."""
    with torch.no_grad():
        return attention_backward(query, key, value, out, logsumexp, grad_out, scale=scale, causal=_causal(is_causal))


def _causal(is_causal: bool) -> Any:
    return "top-left" if is_causal else False


# --- context_parallel()


@contextlib.contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """PyTorch's context_parallel(), which has no rule for CPUs: inside it, torch.nn.functional's
    scaled_dot_product_attention() runs over the shards of all ranks, forward and backward, each block by speedlight.

    Args:
        mesh: a DeviceMesh of one dimension.
        buffers, buffer_seq_dims, no_restore_buffers: tensors that are sharded in place, along these dimensions, until
            the context ends, and those that stay sharded; as PyTorch has them.

    q, k and v are (batch, heads, this rank's tokens, head_dim), as many tokens on every rank; there is no attn_mask and
    no dropout, and values have the head_dim. PyTorch shards heads with tails ("zigzag") and then asks for
    is_causal=True; without, its private `_cp_options.enable_load_balance` has to be False before. The backward pass
    belongs inside, too. There is none inside another one.

    Raises:
        speedlight.UnsupportedError: as ring_ops() does; an attn_mask, dropout, another value_dim; a call under
            torch.compile; another context_parallel() around this one, which PyTorch's would end.
        speedlight.ArgumentError: no buffers, or not a dimension of each; lengths that do not divide by the ranks.

    >>> import torch, torch.distributed as dist
    >>> from speedlight.distributed import context_parallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> mesh, q = dist.init_device_mesh("cpu", (1,)), torch.ones(1, 2, 6, 4)
    >>> with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]):
    ...     q.shape  # of this process's tokens; scaled_dot_product_attention() here is over those of all
    torch.Size([1, 2, 6, 4])
    >>> dist.destroy_process_group()
    """
    module = theirs()
    _check(module, mesh, buffers, buffer_seq_dims)
    flash = getattr(torch.ops.aten, _FLASH).default
    flash_backward = getattr(torch.ops.aten, f"{_FLASH}_backward").default
    rules, before = module.custom_ops, dict(module.custom_ops)
    rules |= {flash: _ring_of(module), flash_backward: _ring_backward_of(module)}
    try:
        with module.context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
        ):
            sharding = F.scaled_dot_product_attention
            try:
                F.scaled_dot_product_attention = _checking(sharding)
                yield
            finally:
                F.scaled_dot_product_attention = sharding  # by which PyTorch knows what to restore
    finally:
        rules.clear()
        rules.update(before)


def _check(module: Any, mesh: Any, buffers: Any, dims: Any) -> None:
    """What PyTorch takes for granted: of ranks that have other lengths gloo ends the process."""
    if getattr(torch.ops.aten, _FLASH).default in module.custom_ops or (
        F.scaled_dot_product_attention in module._replaced_functions
    ):
        raise UnsupportedError(
            "context_parallel: expected none around this one, which PyTorch would end with it; got one. Leave it first."
        )
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ArgumentTypeError(f"mesh: expected a DeviceMesh of one dimension; got {shown(mesh)}.")
    if not buffers or len(buffers) != len(dims or ()):
        raise ArgumentError(
            "buffers: expected one tensor at least, and in buffer_seq_dims a dimension of each; got "
            f"{len(buffers or ())} and {len(dims or ())}."
        )
    for n, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor) or not isinstance(dim, int) or not -x.ndim <= dim < x.ndim:
            of = f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"as buffers; got {type(x).__name__}"
            raise ArgumentError(f"buffer_seq_dims: expected dimensions of tensors {of}; got {dim!r} (buffer {n}).")
        if x.shape[dim] % mesh.size():
            raise ArgumentError(
                f"buffers: expected lengths that divide by {mesh.size()} ranks; got {x.shape[dim]} (buffer {n}). "
                "speedlight.distributed.attention() takes any."
            )


def _checking(inner: Any) -> Any:
    """scaled_dot_product_attention() over shards, if it is what PyTorch's flash attention on the CPU computes."""

    @functools.wraps(inner)
    def scaled_dot_product_attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        if torch.compiler.is_dynamo_compiling():
            raise UnsupportedError(
                "context_parallel: expected scaled_dot_product_attention() outside of a graph: its ring has messages, "
                "which no graph holds; got a call under torch.compile. Compile what is around it."
            )
        if attn_mask is not None or dropout_p:
            raise _refused("dropout_p" if attn_mask is None else "attn_mask")
        if value.shape[-1] != query.shape[-1]:
            raise UnsupportedError(
                f"value: expected head_dim {query.shape[-1]}, as query has, under context_parallel(); got "
                f"{value.shape[-1]}. speedlight.distributed.attention() takes any."
            )
        return inner(query, key, value, is_causal=is_causal, **options)

    return scaled_dot_product_attention


def _refused(name: str) -> UnsupportedError:
    way = " speedlight.distributed.attention() has masks." if name == "attn_mask" else ""
    return UnsupportedError(f"{name}: expected none under context_parallel(), whose ring has none.{way}")


def _ring_of(module: Any) -> Any:
    """What DTensors do for PyTorch's flash attention on the CPU: its ring, over the blocks of all ranks."""

    def handler(operation: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        given: Any = (*args, *(0.0, False)[len(args) - 3 :])
        query, key, value, dropout, is_causal = given
        if dropout or options.get("attn_mask") is not None:
            raise _refused("dropout_p" if dropout else "attn_mask")
        local = [x.to_local() for x in (query, key, value)]
        with torch.no_grad():
            found = module._templated_ring_attention(
                query.device_mesh.get_group(), 2, _forward, *local, is_causal=is_causal, scale=options.get("scale")
            )
        return tuple(_like(query, x) for x in found)  # type: ignore[return-value]

    return handler


def _ring_backward_of(module: Any) -> Any:
    def handler(operation: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        *six, _, is_causal = args
        grad_out, query, key, value, out, lse = (x.to_local() for x in six)
        with torch.no_grad():
            found = module._templated_ring_attention_backward(
                six[1].device_mesh.get_group(), 2, _backward, grad_out, "grad_out", query, key, value, out, lse,
                is_causal, scale=options.get("scale"),
            )  # fmt: skip
        return tuple(_like(six[1], x) for x in found)

    return handler


def _like(x: Any, local: Tensor) -> Any:
    """A rank's part, sharded as x is."""
    return type(x).from_local(local, x.device_mesh, x.placements, run_check=False)
