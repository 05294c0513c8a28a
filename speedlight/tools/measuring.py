"""Measuring in turn, A B A B, and the libraries that attention is measured against."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import ml_dtypes
import numpy as np

import speedlight as sl

from ..host import machine

Call = Callable[[], Any]
Peer = Callable[[str, list[np.ndarray], bool], Call | None]


def tensors(dtype: str, heads: int, n: int, d: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return [rng.standard_normal((1, heads, n, d)).astype(kind) for _ in range(3)]


def check(arrays: list[np.ndarray], out: np.ndarray, causal: bool, window: Any = None) -> str | None:
    """One head against the oracle, every element inside its bound."""
    one = [x[:, :1, -256:] if i == 0 else x[:, :1] for i, x in enumerate(arrays)]
    want = sl.reference.attention(*one, causal=causal, window=window)
    dot = machine.current_isa().product("bf16") == "pairs" and arrays[0].dtype.name == "bfloat16"
    bound = sl.reference.error_bound(*one, causal=causal, window=window, dot=dot).out
    right = np.abs(out[:, :1, -256:].astype(np.float64) - want) <= bound
    return None if right.all() else f"{(~right).sum()} elements outside the bound"


def with_gradients(arrays: list[np.ndarray], causal: bool) -> list[np.ndarray]:
    """What a backward call is given beside q, k and v: out, lse, and what flows into out."""
    out, lse = sl.attention(*arrays, causal=causal, return_lse=True)
    return [*arrays, out, lse, np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)]


def check_gradients(arrays: list[np.ndarray], got: tuple[np.ndarray, ...], causal: bool) -> str | None:
    """One head against the oracle, every element inside its bound: dq of the last rows, dk and dv of the first keys.

    Those depend on all keys, and on all rows; the lse that is given may be of more keys than there are.
    """
    q, k, v, out, lse, d_out = (x[:, :1] for x in arrays)
    n, dot = q.shape[2], machine.current_isa().product("bf16") == "pairs" and q.dtype.name == "bfloat16"
    rows, keys = slice(max(0, n - 256), n), slice(0, 256)
    ends = [x[:, :, rows] for x in (q, out, lse, d_out)]
    by_rows = (ends[0], k, v, *ends[1:]), {"causal": causal, "q_start": rows.start}
    by_keys = (q, k[:, :, keys], v[:, :, keys], out, lse, d_out), {"causal": causal, "q_start": 0}
    wrong = 0
    for (given, options), some in ((by_rows, {0: rows}), (by_keys, {1: keys, 2: keys})):
        want = sl.reference.backward(*given, **options)
        bound = sl.reference.backward_bound(*given, dot=dot, **options)
        for at, part in some.items():
            error = np.abs(got[at][:, :1, part].astype(np.float64) - want[at])
            wrong += int((~(error <= bound[at])).sum())
    return f"{wrong} elements outside the bound" if wrong else None


def measure(
    calls: dict[str, Call], turns: int, peak: Callable[[], float]
) -> tuple[dict[str, list[float]], list[float]]:
    """A B A B: every call in every turn, repeated until a sample lasts 20 ms."""
    repeats = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, min(400, round(0.02 / (time.perf_counter() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    peaks = []
    for _ in range(turns):
        peaks.append(peak())
        for name, call in calls.items():
            settle()
            call()
            start = time.perf_counter()
            for _ in range(repeats[name]):
                call()
            times[name].append((time.perf_counter() - start) / repeats[name])
    return times, peaks


def settle(seconds: float = 0.03) -> None:
    """The threads of the library before spin for a while.

    Asleep we might wake on the core of a thread of our own: stay awake.
    """
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def name_of(dtype: str, heads: int, n: int, d: int, causal: bool, backward: bool = False) -> str:
    """A problem in one line."""
    return f"{dtype} H{heads} N{n} d{d} {'causal' if causal else 'full'}{' backward' * backward}"


def quantiles(times: list[float]) -> list[float]:
    """Least, quartiles, most."""
    return [float(x) for x in np.quantile(times, (0, 0.25, 0.5, 0.75, 1))]


def peers(
    dtype: str,
    arrays: list[np.ndarray],
    causal: bool,
    names: Iterable[str] | None = None,
    table: dict[str, Peer] | None = None,
) -> tuple[dict[str, Call], dict[str, str]]:
    """Every installed peer that can do this, with its inputs already in its own form; and why the others cannot.

    Of PEERS, unless another table is given.
    """
    found: dict[str, Call] = {}
    missing: dict[str, str] = {}
    table = PEERS if table is None else table
    for name in table if names is None else names:
        try:
            call = table[name](dtype, arrays, causal)
            if call is None:
                missing[name] = f"does not take {dtype}"
                continue
            call()
            found[name] = call
        except ImportError as error:
            missing[name] = f"not installed ({error.name})"
        except Exception as error:
            missing[name] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:100] if str(error) else ''}"
    return found, missing


def farthest(theirs: Any, got: np.ndarray | tuple[np.ndarray, ...]) -> float:
    """How far a peer's result is from ours; of gradients, which grow with the lengths, relative to the largest."""
    if isinstance(got, np.ndarray):
        return float(np.abs(as_numpy(theirs) - got.astype(np.float64)).max())
    ours = [x.astype(np.float64) for x in got]
    return max(float((np.abs(as_numpy(a) - b) / np.abs(b).max()).max()) for a, b in zip(theirs, ours, strict=True))


def as_numpy(out: Any) -> np.ndarray:
    """A peer's result, in our layout, as float64."""
    if isinstance(out, (list, tuple)):
        out = out[0]
    if hasattr(out, "detach"):
        out = out.detach().double().numpy()
    elif hasattr(out, "to_tuple"):  # OpenVINO's
        out = out[0]
    return np.asarray(out).astype(np.float64)


def _torch(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call:
    import torch

    torch.set_num_threads(sl.get_threads())
    kind = getattr(torch, dtype)
    q, k, v = (torch.from_numpy(x.astype(np.float64)).to(kind) for x in arrays)

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def _torch_backward(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call:
    """What its backward pass alone takes, of a forward pass that stays."""
    import torch

    torch.set_num_threads(sl.get_threads())
    kind = getattr(torch, dtype)
    q, k, v, _, _, d_out = (torch.from_numpy(x.astype(np.float64)).to(kind) for x in arrays)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return lambda: torch.autograd.grad(out, inputs, d_out, retain_graph=True)


def _onnxruntime(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call | None:
    if dtype != "float32":
        return None
    ort, onnx = (importlib.import_module(n) for n in ("onnxruntime", "onnx"))
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    _, heads, n, d = arrays[0].shape
    feeds = {
        x: np.ascontiguousarray(a.transpose(0, 2, 1, 3)).reshape(1, n, heads * d)
        for x, a in zip("qkv", arrays, strict=True)
    }
    node = helper.make_node(
        "MultiHeadAttention", list("qkv"), ["o"], domain="com.microsoft", num_heads=heads, unidirectional=int(causal)
    )
    infos = [helper.make_tensor_value_info(x, kind, a.shape) for x, a in feeds.items()]
    graph = helper.make_graph([node], "g", infos, [helper.make_tensor_value_info("o", kind, None)])
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = sl.get_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shape = 1, n, heads, d
    return lambda: session.run(None, feeds)[0].reshape(shape).swapaxes(1, 2)


def openvino(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call | None:
    """Inputs in float32 with a precision hint: that is how OpenVINO runs bf16."""
    if dtype not in ("float32", "bfloat16"):
        return None
    ov, op = (importlib.import_module(n) for n in ("openvino", "openvino.opset13"))
    inputs = [x.astype(np.float32) for x in arrays]
    parameters = [op.parameter(list(x.shape), np.float32) for x in inputs]
    model = ov.Model([op.scaled_dot_product_attention(*parameters, causal=causal)], parameters)
    hints = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[dtype],
        "INFERENCE_NUM_THREADS": sl.get_threads(),
    }
    request = ov.Core().compile_model(model, "CPU", hints).create_infer_request()
    return lambda: request.infer(inputs, share_inputs=True)


def flex(arrays: list[np.ndarray], mask: Any, score: Any) -> dict[str, Call]:
    """Compiled FlexAttention, warm; nothing where it is not there or cannot be compiled."""
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        torch._dynamo.reset()
        torch.set_num_threads(sl.get_threads())
        q, k, v = (torch.from_numpy(x) for x in arrays)
        n = q.shape[2]
        block = create_block_mask(mask, None, None, n, n, device="cpu") if mask else None
        run = torch.compile(flex_attention)
        call = lambda: run(q, k, v, block_mask=block, score_mod=score)  # noqa: E731
        with torch.no_grad():
            call()
        return {"flex": lambda: without_grad(call)}
    except Exception as error:
        print(f"  (FlexAttention: {type(error).__name__}: {str(error)[:100]})")
        return {}


def _flex(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call:
    """Compiled for this very shape, warm."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch.set_num_threads(sl.get_threads())
    q, k, v = (torch.from_numpy(x.astype(np.float64)).to(getattr(torch, dtype)) for x in arrays)
    n = q.shape[2]
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device="cpu") if causal else None
    run = torch.compile(flex_attention)
    return lambda: without_grad(lambda: run(q, k, v, block_mask=block))


def _jax(dtype: str, arrays: list[np.ndarray], causal: bool) -> Call:
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", dtype == "float64")
    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in arrays)
    run = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=causal).swapaxes(1, 2))
    return lambda: run(q, k, v).block_until_ready()


PEERS: dict[str, Peer] = {
    "torch": _torch, "flex": _flex, "onnxruntime": _onnxruntime, "openvino": openvino, "jax": _jax,
}  # fmt: skip
BACKWARD_PEERS: dict[str, Peer] = {"torch": _torch_backward}


def without_grad(call: Call) -> Any:
    import torch

    with torch.no_grad():
        return call()
