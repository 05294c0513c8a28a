"""Layouts of a call's arrays: their dimensions by name, and what q, k and v must have in common."""

from __future__ import annotations

from ..errors import ArgumentError, ArgumentTypeError
from .memory import Array

AXES = {
    "bhld": "(batch, heads, length, head_dim)",
    "blhd": "(batch, length, heads, head_dim)",
    "hld": "(heads, length, head_dim)",
    "lhd": "(total_length, heads, head_dim)",
}
_NARROW, _WIDE = ("float16", "bfloat16"), ("float32", "float16", "bfloat16")
_ONE_HEAD = {"bhld": "[:, None]", "blhd": "[:, :, None]"}  # makes (batch, length, head_dim) that of one head


def batch_of(shape: tuple[int, ...], layout: str) -> int:
    """Returns the batch items of an array: one where a layout has no batch."""
    return shape[0] if len(layout) == 4 else 1


def check_dimensions(name: str, shape: tuple[int, ...], layout: str) -> None:
    """Raises unless there are as many dimensions as the layout has letters. Of three, only the caller knows which they
    are.
    """
    if len(shape) == len(layout):
        return
    way = ""
    if len(shape) == 3:
        way = (
            f" Say which three: (batch, length, head_dim) of one head is {name}{_ONE_HEAD[layout]}; layout='hld' is "
            "for (heads, length, head_dim), 'lhd' for packed (length, heads, head_dim)."
        )
    elif len(shape) == 4:
        way = " With a batch the layout is 'bhld' or 'blhd'."
    raise ArgumentError(
        f"{name}: expected {len(layout)} dimensions {AXES[layout]} for layout={layout!r}; got shape {shape}.{way}"
    )


def check_batch(k: Array, v: Array, batch: int) -> None:
    """Raises unless keys and values are of every item, or of one, which all items then read where it lies."""
    if k.shape[0] not in (batch, 1):
        n, one, way = k.shape[0], ", or 1, which all of its items share", ""
        if batch == 1:
            call = f"q.expand({n}, -1, -1, -1)" if k.kind == "torch" else f"numpy.broadcast_to(q, ({n}, *q.shape[1:]))"
            one, way = "", f" To ask all of them the same, repeat q without a copy: {call}."
        raise ArgumentError(f"k: expected batch {batch}, as q has{one}; got {n} (shape {k.shape}).{way}")
    if v.shape[0] != k.shape[0]:
        raise ArgumentError(f"v: expected batch {k.shape[0]}, as k has; got {v.shape[0]} (shape {v.shape}).")


def are_widened(keys: str, queries: str) -> bool:
    """Returns whether keys of this dtype are widened under queries of another: all is computed in float32."""
    return keys != queries and keys in _NARROW and queries in _WIDE


def check_together(k: Array, v: Array, q: Array) -> str | None:
    """Raises unless keys and values are of q's kind, device and dtype; returns another dtype, which is widened."""
    for x, of in ((k, q), (v, q if k.dtype == q.dtype else k)):
        if x.dtype != of.dtype and not (x is k and are_widened(k.dtype, q.dtype)):
            raise ArgumentTypeError(
                f"{x.name}: expected dtype {of.dtype}, as {of.name} has; got {x.dtype}. Convert one of them."
            )
        check_beside(x, q)
    return None if k.dtype == q.dtype else k.dtype


def check_beside(x: Array, q: Array) -> None:
    """Raises unless x is of q's kind, and lies where q lies."""
    if (x.kind == "torch") != (q.kind == "torch"):
        way = f"torch.as_tensor({x.name if q.kind == 'torch' else 'q'})"
        raise ArgumentTypeError(
            f"{x.name}: expected the same kind of array as q; got {x.kind} beside {q.kind}. Write {way}."
        )
    if x.device != q.device:
        raise ArgumentError(
            f"{x.name}: expected an array on {q.device}, as q; got one on {x.device}. Move one of them."
        )
