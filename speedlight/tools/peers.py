"""The libraries that attention is measured against: each a call over inputs in its own form."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import speedlight as sl

from ..arrays.torch_tensors import in_grad_mode
from ..problem.problem import Problem
from ..problem.tiles import seen

Call = Callable[[], Any]


class Asked(NamedTuple):
    """A problem for a peer; arrays, or tensors that may be on a GPU, are [batch, heads, length, head_dim]."""

    q: Any
    k: Any
    v: Any
    causal: bool = False
    d_out: Any = None  # the upstream gradient: then the backward pass alone is measured
    mask: Any = None  # FlexAttention's mask_mod
    score: Any = None  # FlexAttention's score_mod
    dense: Any = None  # PyTorch's attn_mask
    unfit: str | None = None  # why no other library computes the problem

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).rpartition(".")[2]

    @classmethod
    def of(cls, p: Problem, arrays: Sequence[np.ndarray]) -> Asked:
        """Returns a problem of ours: `causal` where that is all that hides keys, else a mask.

        arrays: q, k and v; of gradients out, lse and d_out, too.
        """
        (q, k, v), d_out = arrays[:3], arrays[5] if len(arrays) > 3 else None
        if p.score is not None or p.dropout:
            why = "others drop other weights" if p.dropout else "no other library is asked for a function of scores"
            return cls(q, k, v, d_out=d_out, unfit=why)
        is_square = k.shape[2] == q.shape[2]
        is_padded = min(p.k_lengths) < k.shape[2]
        if p.mask is None and not is_padded and (is_square or not p.causal):
            return cls(q, k, v, p.causal, d_out)
        dense = _visible(p, q.shape[2], k.shape[2])
        return cls(q, k, v, d_out=d_out) if dense.all() else cls(q, k, v, False, d_out, dense=dense)


def _visible(p: Problem, rows: int, keys: int) -> np.ndarray:
    """Returns which keys are visible, [batch or 1, q_heads or 1, rows, keys]."""
    uses, j, items = set() if p.mask is None else p.mask.root.uses, np.arange(keys), []
    alike = "b" not in uses and len({*zip(p.q_starts, p.k_lengths, strict=True)}) == 1
    h = np.arange(p.q_heads if "h" in uses else 1)[:, None, None]
    for b in range(1 if alike else p.batch):
        i = p.q_starts[b] + np.arange(rows)
        parts = [i[n : n + 256, None] for n in range(0, rows, 256)]  # what is in memory while it is computed
        seen_parts = [np.broadcast_to(seen(p, {"b": np.int64(b), "h": h, "i": x, "j": j}), (len(h), len(x), keys))
                      for x in parts]  # fmt: skip
        items.append(np.concatenate(seen_parts, axis=1) & (j < p.k_lengths[b]))
    return np.stack(items)


Peer = Callable[[Asked], Call]


class UnfitError(Exception):
    """A problem that a peer does not take."""


def usable(
    peers: dict[str, Peer], asked: Asked, wrong: Callable[[Any], str | None]
) -> tuple[dict[str, Call], dict[str, str]]:
    """Returns calls of the peers that run here and whose result is right, and why the others are left out."""
    calls: dict[str, Call] = {}
    notes: dict[str, str] = {}
    for name, peer in peers.items():
        try:
            if asked.unfit is not None:
                raise UnfitError(asked.unfit)
            call = peer(asked)
            if why := wrong(call()):
                notes[name] = f"another result than ours: {why}"
            else:
                calls[name] = call
        except UnfitError as error:
            notes[name] = str(error)
        except ImportError as error:
            notes[name] = f"not installed ({error.name})"
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return calls, notes


def as_tensors(*arrays: Any) -> list[Any]:
    """Returns PyTorch's tensors over the same memory; those that are tensors stay."""
    import torch

    torch.set_num_threads(sl.get_threads())
    found = []
    for x in arrays:
        if isinstance(x, np.ndarray):
            is_bf16 = x.dtype == ml_dtypes.bfloat16
            x = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if is_bf16 else torch.from_numpy(x)
        found.append(x)
    return found


def without_grad(call: Call) -> Call:
    """Returns the call with PyTorch's autograd off."""
    return in_grad_mode(False)(call)


def sdpa(asked: Asked) -> Call:
    """PyTorch's scaled_dot_product_attention, or its backward pass alone, of a forward pass that stays."""
    import torch

    q, k, v = as_tensors(*asked[:3])
    dense = None if asked.dense is None else as_tensors(asked.dense)[0]
    call = functools.partial(
        torch.nn.functional.scaled_dot_product_attention, attn_mask=dense, is_causal=asked.causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return pass_of(call, q, k, v, asked.d_out)


def pass_of(call: Any, q: Any, k: Any, v: Any, d_out: Any) -> Call:
    """Returns a call on tensors; with an upstream gradient its backward pass alone, of a forward pass that stays."""
    import torch

    if d_out is None:
        return without_grad(lambda: call(q, k, v))
    inputs, flow = [x.detach().requires_grad_() for x in (q, k, v)], as_tensors(d_out)
    out = call(*inputs)
    return lambda: torch.autograd.grad(out, inputs, flow, retain_graph=True)


def flex(asked: Asked) -> Call:
    """FlexAttention, compiled for this very shape."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    q, k, v = as_tensors(*asked[:3])
    mask, of = (lambda b, h, i, j: i >= j) if asked.causal else asked.mask, (None, None)
    if mask is None and asked.dense is not None and asked.score is None:
        (shown,) = as_tensors(asked.dense)
        items, heads = of = [None if n == 1 else n for n in shown.shape[:2]]
        mask = lambda b, h, i, j: shown[b if items else 0, h if heads else 0, i, j]  # noqa: E731
    block = create_block_mask(mask, of[0], of[1], q.shape[2], k.shape[2], device=q.device) if mask else None
    run = torch.compile(flex_attention, dynamic=False)
    gqa = q.shape[1] != k.shape[1]
    call = functools.partial(run, block_mask=block, score_mod=asked.score, enable_gqa=gqa)
    return pass_of(call, q, k, v, asked.d_out)


def onnx_session(node: Any, inputs: dict[str, np.ndarray], outputs: dict[str, str]) -> Any:
    """Returns ONNX Runtime's session of one node, on as many threads as ours.

    outputs: names, each with that of an input of its dtype.
    """
    onnx, ort = (importlib.import_module(x) for x in ("onnx", "onnxruntime"))
    helper = onnx.helper
    kinds = {name: helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items()}
    infos = [helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in inputs.items()]
    results = [helper.make_tensor_value_info(name, kinds[alike], None) for name, alike in outputs.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", infos, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = sl.get_threads()
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _check_plain(asked: Asked) -> None:
    """Raises for what these peers are not asked for: a mask, and fewer heads of keys than of queries."""
    if asked.dense is not None or asked.q.shape[1] != asked.k.shape[1]:
        raise UnfitError("is asked for no mask but causal of a square, and as many heads of keys as of queries")


def _onnxruntime(asked: Asked) -> Call:
    if asked.dtype != "float32":
        raise UnfitError(f"does not take {asked.dtype}")
    _check_plain(asked)
    helper = importlib.import_module("onnx").helper
    batch, heads, n, _ = asked.q.shape
    rows = {x: np.ascontiguousarray(a.swapaxes(1, 2)) for x, a in zip("qkv", asked[:3], strict=True)}
    feeds = {x: a.reshape(*a.shape[:2], -1) for x, a in rows.items()}
    node = helper.make_node(
        "MultiHeadAttention", list("qkv"), ["o"], domain="com.microsoft", num_heads=heads,
        unidirectional=int(asked.causal),
    )  # fmt: skip
    session = onnx_session(node, feeds, {"o": "q"})
    return lambda: session.run(None, feeds)[0].reshape(batch, n, heads, -1).swapaxes(1, 2)


def openvino(asked: Asked) -> Call:
    """OpenVINO's, given float32 with a precision hint: that is how it runs bfloat16."""
    hints = {"float32": "f32", "bfloat16": "bf16"}
    if asked.dtype not in hints:
        raise UnfitError(f"does not take {asked.dtype}")
    _check_plain(asked)
    ov, op = (importlib.import_module(n) for n in ("openvino", "openvino.opset13"))
    inputs = [x.astype(np.float32) for x in asked[:3]]
    parameters = [op.parameter(list(x.shape), np.float32) for x in inputs]
    model = ov.Model([op.scaled_dot_product_attention(*parameters, causal=asked.causal)], parameters)
    config = {"INFERENCE_PRECISION_HINT": hints[asked.dtype], "INFERENCE_NUM_THREADS": sl.get_threads()}
    request = ov.Core().compile_model(model, "CPU", config).create_infer_request()
    return lambda: request.infer(inputs, share_inputs=True)


def _jax(asked: Asked) -> Call:
    """JAX's; each call is waited for."""
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", asked.dtype == "float64")
    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in asked[:3])
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=asked.causal)
    mask = None if asked.dense is None else jax.numpy.asarray(asked.dense)
    run = jax.jit(lambda q, k, v: attend(q, k, v, mask=mask).swapaxes(1, 2))
    return lambda: run(q, k, v).block_until_ready()


PEERS: dict[str, Peer] = {
    "torch": sdpa, "flex": flex, "onnxruntime": _onnxruntime, "openvino": openvino, "jax": _jax,
}  # fmt: skip
BACKWARD = ("torch",)  # those that have a backward pass
LIBRARIES = {"flex": "torch"}  # whose name is not the peer's
TITLES = {"torch": "PyTorch's SDPA", "flex": "FlexAttention", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
