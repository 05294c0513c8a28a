"""The peers beside those of `speedlight bench`: PyTorch's on a GPU, and those that decode from a cache."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from speedlight.tools.measuring import PEER_SLACK, wrong
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
    if asked.dtype not in ("float32", "float16"):
        raise UnfitError(f"does not take {asked.dtype}")
    q, k, v = asked[:3]
    return _grouped_query(q, k, v, {"pk": k.copy(), "pv": v.copy()})


def _grouped_query(q: np.ndarray, k: np.ndarray, v: np.ndarray, past: dict[str, np.ndarray], **attributes: Any) -> Call:
    """GroupQueryAttention over a past that is also the present: it writes the last token in place, then attends.

    past: the caches, "pk" and "pv"; of codes their scales, "ks" and "vs", too.
    """
    helper, ort = importlib.import_module("onnx").helper, importlib.import_module("onnxruntime")
    batch, heads, _, d = q.shape
    kv_heads, n = k.shape[1:3]
    last = [np.ascontiguousarray(x[:, :, -1]).reshape(batch, 1, kv_heads * d) for x in (k, v)]
    values = {
        "q": q.reshape(batch, 1, heads * d), "k": last[0], "v": last[1], "lengths": np.full(batch, n - 1, np.int32),
        "total": np.array(n, np.int32), **past,
    }  # fmt: skip
    names = ["q", "k", "v", "pk", "pv", "lengths", "total"]
    if "ks" in past:
        names += [""] * 5 + ["ks", "vs"]
    outputs = {"o": "q", "ok": "pk", "ov": "pv"}
    node = helper.make_node(
        "GroupQueryAttention", names, [*outputs], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
        **attributes,
    )  # fmt: skip
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


# --- one token, of a cache of codes: each library has its own

Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]  # q, k and v as a peer rounds them


def _over_codes(build: Callable[[Asked], tuple[Call, Numbers]], asked: Asked) -> Call:
    """A peer of one sequence, once its result is that of the numbers that its own codes stand for."""
    if asked.q.shape[0] > 1:
        raise UnfitError("is asked for one sequence")
    call, numbers = build(asked)
    if why := wrong(call(), *numbers, heads=asked.q.shape[1], slack=PEER_SLACK):
        raise UnfitError(f"another result than of its own codes: {why}")
    return call


def _ggml(kind: str, asked: Asked) -> tuple[Call, Numbers]:
    from ggml import Layer

    layer = Layer(kind, *asked[:3])
    return layer, layer.numbers


def _onnxruntime_codes(bits: int, asked: Asked) -> tuple[Call, Numbers]:
    """GroupQueryAttention over codes with a scale for all keys, and one for all values."""
    largest = 2 ** (bits - 1) - 1
    q, *tokens = (x.astype(np.float32) for x in asked[:3])
    scales = [np.array([np.abs(x).max() / largest], np.float32) for x in tokens]
    codes = [np.rint(x / scale).astype(np.int8) for x, scale in zip(tokens, scales, strict=True)]
    k, v = (x * scale for x, scale in zip(codes, scales, strict=True))
    stored = codes
    if bits == 4:
        halves = [(x + 8).astype(np.uint8) for x in codes]
        stored = [x[..., ::2] | (x[..., 1::2] << 4) for x in halves]
    past = {"pk": stored[0], "pv": stored[1], "ks": scales[0], "vs": scales[1]}
    way = "PER_TENSOR"
    call = _grouped_query(q, k, v, past, k_quant_type=way, v_quant_type=way, kv_cache_bit_width=bits)
    return call, (q, k, v)


# of a cache of ours with codes of as many bits
DECODE_CODES: dict[str, dict[str, Peer]] = {
    ours: {
        "ggml": functools.partial(_over_codes, functools.partial(_ggml, kind)),
        "onnxruntime": functools.partial(_over_codes, functools.partial(_onnxruntime_codes, bits)),
    }
    for ours, kind, bits in (("int8", "q8_0", 8), ("int4", "q4_0", 4))
}
