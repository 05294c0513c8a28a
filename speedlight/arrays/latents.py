"""Latent keys (multi-head latent attention, MLA): a pair of arrays, and values that are the keys' first columns."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError, shown
from .array import describe, is_masked, on_gpu
from .integers import integer
from .memory import Array
from .torch_tensors import is_cut, is_tensor

_STEP = 8  # elements of a step of a sum, at most: kernels read a second part where it lies, if it begins with a step


class KeyPair(NamedTuple):
    """Keys in two parts, whose values are the first columns of the latent.

    A key is a row of the latent and, behind it, one of the rotary part.
    """

    latent: Any
    rotary: Any
    value_dim: int

    def joined(self) -> tuple[Any, Any]:
        """Returns keys in one array, which is a copy, and values."""
        return join((self.latent, self.rotary)), self.latent[..., : self.value_dim]


def resolve(k: Any, v: Any, value_dim: Any, names: tuple[str, str] = ("k", "v")) -> tuple[Any, Any]:
    """Returns keys and values; a pair of keys whose values are columns of the latent is a KeyPair, and v None.

    Args:
        k: an array, or a pair (latent, rotary). A pair is joined, by a copy, beside values of their own, and where
            the latent's columns are no multiple of 8.
        v: an array, or None.
        value_dim: how many columns v has, where it is None; by default, of a pair, all of the latent's.
        names: of k and v in messages.
    """
    if type(k) is KeyPair:
        return k, None
    is_pair = isinstance(k, (tuple, list))
    if is_pair:
        _check_pair(k, names[0])
    if v is not None:
        if value_dim is not None:
            raise ArgumentError(
                f"value_dim: expected None beside {names[1]}, whose last dimension it is; got {shown(value_dim)}. "
                f"Leave one of them out."
            )
        return join(k), v
    latent = k[0] if is_pair else k
    if value_dim is None and not is_pair:
        raise ArgumentTypeError(
            f"{names[1]}: expected a NumPy array or a PyTorch tensor; got NoneType. Where values are the first columns "
            f"of {names[0]}, give value_dim=."
        )
    if not getattr(latent, "shape", ()) or not hasattr(latent, "__getitem__"):
        raise ArgumentTypeError(
            f"{names[0]}: expected an array of NumPy or PyTorch, whose first columns {names[1]} is; got "
            f"{type(latent).__name__}. Convert it, or give {names[1]}."
        )
    most = latent.shape[-1]
    columns = most if value_dim is None else integer("value_dim", value_dim)
    if not 1 <= columns <= most:
        whose = f"{names[0]}[0]" if is_pair else names[0]
        raise ArgumentError(
            f"value_dim: expected 1 to {most}, the last dimension of {whose}; got {columns}. Values of other columns "
            f"are an array of their own: give {names[1]}."
        )
    if is_pair and most % _STEP == 0:
        return KeyPair(latent=k[0], rotary=k[1], value_dim=columns), None
    return join(k), latent[..., :columns]


def describe_keys(
    k: Any, v: Any, names: tuple[str, str], *, gpu: bool = False, codes: bool = False
) -> tuple[Array, Array]:
    """Reads where keys and values lie; those of a KeyPair lie in its latent. `gpu`, `codes`: as for describe()."""
    if type(k) is not KeyPair:
        return describe(k, names[0], gpu=gpu, codes=codes), describe(v, names[1], gpu=gpu, codes=codes)
    latent, rotary = (describe(x, names[0], gpu=gpu, codes=codes) for x in (k.latent, k.rotary))
    values = replace(latent, name=names[1], shape=(*latent.shape[:-1], k.value_dim))
    return replace(latent, rest=rotary), values


def resolve_joined(k: Any, v: Any, value_dim: Any) -> tuple[Any, Any]:
    """Returns keys in one array, and values."""
    if v is None or value_dim is not None or isinstance(k, (tuple, list)):
        k, v = resolve(k, v, value_dim)
        if type(k) is KeyPair:
            return k.joined()
    return k, v


def fold_gradients(gradients: tuple[Any, ...], k: Any, v: Any) -> tuple[Any, ...]:
    """Returns gradients (dq, dk, dv, …) as the caller gave keys and values: of a pair a pair, and None for no values.

    Without values of their own, the first columns of dk get dv added, in that order: each of the two was rounded
    before.

    Args:
        gradients: of joined keys and of values.
        k, v: as the caller gave them.
    """
    _, dk, dv, *_ = gradients
    if v is None:
        dk[..., : dv.shape[-1]] += dv
    return split_gradients(gradients, k, v)


def split_gradients(gradients: tuple[Any, ...], k: Any, v: Any) -> tuple[Any, ...]:
    """Returns gradients, or their bounds, whose dk holds dv where there are no values: of a pair of keys a pair.

    Args:
        gradients, k, v: as for `fold_gradients`.
    """
    dq, dk, dv, *more = gradients
    if isinstance(k, (tuple, list)):
        columns = k[0].shape[-1]
        dk = dk[..., :columns], dk[..., columns:]
    return dq, dk, None if v is None else dv, *more


def join(k: Any) -> Any:
    """Returns keys in one array: of a pair a copy."""
    if not isinstance(k, (tuple, list)):
        return k
    if any(map(is_tensor, k)):
        for x in k:
            if is_cut(x):  # PyTorch would read past its end
                raise ArgumentError(
                    f"k: expected tensors with memory for their elements; got one of {tuple(x.shape)}, whose storage "
                    "is too short (resize_ …). Use clone() before."
                )
        return sys.modules["torch"].cat(tuple(k), -1)
    return np.concatenate([np.asarray(x) for x in k], -1)


def join_pair(k: Any) -> Any:
    """Returns keys in one array, for a call without values: of a pair a copy, if its parts go together."""
    if isinstance(k, (tuple, list)):
        _check_pair(k, "k")
    return join(k)


def _check_pair(k: Any, name: str) -> None:
    """Raises unless keys are two arrays of the same tokens and dtype."""
    if len(k) != 2:
        raise ArgumentTypeError(
            f"{name}: expected a NumPy array, a PyTorch tensor, or a pair (latent, rotary) of them; got "
            f"{type(k).__name__} of {len(k)}. Try numpy.asarray({name}, dtype='float32')."
        )
    latent, rotary = k
    for n, x in enumerate(k):
        if not hasattr(x, "shape") or not hasattr(x, "dtype") or is_masked(x):
            raise ArgumentTypeError(
                f"{name}: expected an array, or a pair (latent, rotary) of arrays; got {type(x).__name__} as "
                f"{name}[{n}]."
            )
    if tuple(latent.shape[:-1]) != tuple(rotary.shape[:-1]):
        raise ArgumentError(
            f"{name}: expected a pair of arrays that differ in their last dimension alone; got shapes "
            f"{tuple(latent.shape)} and {tuple(rotary.shape)}."
        )
    if latent.dtype != rotary.dtype or is_tensor(latent) != is_tensor(rotary):
        raise ArgumentTypeError(
            f"{name}: expected a pair of arrays of one kind and dtype; got {type(latent).__name__} of {latent.dtype} "
            f"and {type(rotary).__name__} of {rotary.dtype}."
        )
    if is_tensor(latent) and (latent.layout != rotary.layout or latent.device != rotary.device):
        raise ArgumentTypeError(
            f"{name}: expected a pair of tensors of one layout and device; got {latent.layout} on {latent.device} and "
            f"{rotary.layout} on {rotary.device}."
        )
    if on_gpu(latent) or on_gpu(rotary):
        raise UnsupportedError(
            f"{name}: expected keys in one array on a GPU; got a pair. Join them, torch.cat({name}, -1), or use arrays "
            "on the CPU."
        )
