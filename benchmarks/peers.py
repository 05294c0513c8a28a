"""The peers beside those of `speedlight bench`: PyTorch's on a GPU, and those that decode from a cache."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

import numpy as np

from speedlight.tools.peers import PEERS, Asked, Call, Peer, UnfitError, onnx_session, openvino, pass_of, sdpa

_BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
GPU = ("cudnn", "flash", "efficient", "flex", "flash_attn")


def of_gpu(names: Iterable[str]) -> dict[str, Peer]:
    """Returns the peers of these names."""
    own: dict[str, Peer] = {name: functools.partial(_on, backend) for name, backend in _BACKENDS.items()}
    own["flash_attn"] = _flash_attn
    return {name: own.get(name) or PEERS[name] for name in names}


def _on(backend: str, asked: Asked) -> Call:
    """SDPA on one of PyTorch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, backend)):  # which a backward pass is that of
        call = sdpa(asked)

    def run() -> Any:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return call()

    return run


def _flash_attn(asked: Asked) -> Call:
    function = importlib.import_module("flash_attn").flash_attn_func

    def call(*tensors: Any) -> Any:
        return function(*(x.transpose(1, 2) for x in tensors), causal=asked.causal).transpose(1, 2)

    return pass_of(call, *asked[:3], asked.d_out)


# --- one token


def _by_rows(peer: Peer, asked: Asked) -> Call:
    """A peer that gets the query heads of a group as rows of one head: what enable_gqa does without repeating keys."""
    shape, (batch, kv_heads) = asked.q.shape, asked.k.shape[:2]
    call = peer(asked._replace(q=asked.q.reshape(batch, kv_heads, -1, shape[3])))

    def run() -> Any:
        found = call()
        return (found if hasattr(found, "reshape") else found[0]).reshape(shape)

    return run


def _onnxruntime_decode(asked: Asked) -> Call:
    """GroupQueryAttention over a past that is also the present: it writes the last token in place, then attends."""
    if asked.dtype not in ("float32", "float16"):
        raise UnfitError(f"does not take {asked.dtype}")
    helper, ort = importlib.import_module("onnx").helper, importlib.import_module("onnxruntime")
    q, k, v = asked[:3]
    batch, heads, _, d = q.shape
    kv_heads, n = k.shape[1:3]
    last = [np.ascontiguousarray(x[:, :, -1]).reshape(batch, 1, kv_heads * d) for x in (k, v)]
    values = {
        "q": q.reshape(batch, 1, heads * d), "k": last[0], "v": last[1], "pk": k.copy(), "pv": v.copy(),
        "lengths": np.full(batch, n - 1, np.int32), "total": np.array(n, np.int32),
    }  # fmt: skip
    outputs = ["o", "ok", "ov"]
    node = helper.make_node(
        "GroupQueryAttention", list(values), outputs, domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads
    )
    session = onnx_session(node, values, outputs)
    held = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in values.items()}
    binding = session.io_binding()
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("o")
    binding.bind_ortvalue_output("ok", held["pk"])
    binding.bind_ortvalue_output("ov", held["pv"])

    bound = _Bound(binding, q.shape)

    def run() -> _Bound:
        session.run_with_iobinding(binding)
        return bound

    return run


class _Bound:
    """A result that is copied when it is looked at: the caches that are bound beside it are large."""

    def __init__(self, binding: Any, shape: tuple[int, ...]) -> None:
        self.binding, self.shape = binding, shape

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self.binding.copy_outputs_to_cpu()[0].reshape(self.shape)


DECODE: dict[str, Peer] = {
    "torch": sdpa, "torch by rows": functools.partial(_by_rows, sdpa), "onnxruntime": _onnxruntime_decode,
    "openvino": functools.partial(_by_rows, openvino),
}  # fmt: skip
