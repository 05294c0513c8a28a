"""One token at a time: the rows of `decode`, and its peers."""

from __future__ import annotations

import functools
import importlib
import statistics
from typing import Any

import ml_dtypes
import numpy as np

import speedlight as sl
from speedlight.arrays.array import CODES
from speedlight.host import machine
from speedlight.tools.measuring import Call, measure, openvino, quantiles, without_grad

# dtype, batch, q_heads, kv_heads, keys, head_dim
DECODE: list[tuple[Any, int, int, int, int, int]] = [
    (t, 1, 32, 8, n, 128) for t in ("float32", "bfloat16", "float16", "int8") for n in (512, 4096, 16384, 32768, 131072)
]
DECODE += [("float8_e4m3fn", 1, 32, 8, n, 128) for n in (4096, 32768, 131072)]
DECODE += [(t, 1, h, 8, 16384, 128) for t in ("float32", "bfloat16", "int8") for h in (8, 64)]
DECODE += [(t, 16, 32, 8, 4096, 128) for t in ("float32", "bfloat16", "int8")] + [("float32", 16, 32, 8, 512, 64)]


def decode(turns: int) -> Any:
    """One token against a cache, a pool of pages in random order, and the caller's own arrays; beside the peers and a
    plain read.
    """
    import torch

    torch.set_num_threads(sl.get_threads())
    for dtype, batch, q_heads, kv_heads, n, d in DECODE:
        rng = np.random.default_rng(0)
        given = "bfloat16" if dtype in CODES else dtype  # of the queries
        kind = ml_dtypes.bfloat16 if given == "bfloat16" else given
        shapes = ((batch, q_heads, 1, d), (batch, kv_heads, n, d), (batch, kv_heads, n, d))
        q, k, v = (rng.standard_normal(s, dtype=np.float32).astype(kind) for s in shapes)
        name = f"{dtype} B{batch} H{q_heads}/{kv_heads} N{n} d{d} one token"
        cache = sl.KVCache(layers=1, batch=batch, kv_heads=kv_heads, head_dim=d, capacity=n, dtype=dtype)
        cache.append(0, k, v)
        pool, sequences = _pool(rng, cache, k, v)
        packed = np.ascontiguousarray(q[:, :, 0])
        why = _wrong_decode(q, k, v, cache, pool.attend(0, sequences, packed))
        if why:
            yield {"name": "refused", "why": f"{name}: {why}"}
            continue
        memory = torch.ones(cache.used_bytes // 8, dtype=torch.int64)
        calls: dict[str, Call] = {
            "cache": functools.partial(cache.attend, 0, q),
            "read": functools.partial(torch.sum, memory),
            "pages of 16": functools.partial(pool.attend, 0, sequences, packed),
        }
        if dtype not in CODES:
            calls |= {"arrays": functools.partial(sl.attention, q, k, v)} | _decode_peers(q, k, v)
        times, _ = measure(calls, turns, lambda: 0.0)
        medians = {x: statistics.median(t) for x, t in times.items()}
        ours, read = medians["cache"], medians["read"]
        peers = {x: t / ours for x, t in medians.items() if x.startswith(("torch", "onnxruntime", "openvino"))}
        yield {
            "name": name, "seconds": {x: quantiles(t) for x, t in times.items()}, "bytes_read": cache.used_bytes,
            "tokens": batch / ours, "gbytes": cache.used_bytes / ours / 1e9, "share_of_read": read / ours,
            "share_of_read_arrays": read / medians["arrays"] if "arrays" in medians else None,
            "pages": ours / medians["pages of 16"], "peers": peers, "ratio": min(peers.values(), default=None),
        }  # fmt: skip


def _pool(rng: np.random.Generator, cache: Any, k: np.ndarray, v: np.ndarray) -> tuple[Any, list[Any]]:
    """The same tokens in pages of 16, handed out in random order."""
    batch, heads, n, d = k.shape
    pool = sl.PagePool(layers=1, pages=batch * -(-n // 16), page_size=16, kv_heads=heads, head_dim=d, dtype=cache.dtype)
    rng.shuffle(pool._free)
    sequences = [pool.sequence() for _ in range(batch)]
    for at in range(0, n, 4096):
        for item, sequence in enumerate(sequences):
            pool.append(0, [sequence], *(x[item, :, at : at + 4096].swapaxes(0, 1) for x in (k, v)))
    return pool, sequences


def _wrong_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray, cache: Any, paged: np.ndarray) -> str | None:
    """The first item against the oracle; pages and arrays against the cache, bit by bit."""
    got = cache.attend(0, q)
    if got[:, :, 0].tobytes() != paged.tobytes():
        return "pages have other bits than the cache"
    coded = cache.dtype in CODES
    if not coded and got.tobytes() != sl.attention(q, k, v).tobytes():
        return "the arrays have other bits than the cache"
    first = [q[:1], *((cache.keys(0)[:1], cache.values(0)[:1]) if coded else (k[:1], v[:1]))]
    want = sl.reference.attention(*(x.astype(np.float64) for x in first))
    dot = cache.dtype == "bfloat16" and machine.current_isa().product("bf16") == "pairs"
    if coded:
        first[0] = first[0].astype(np.float32)
    bound = sl.reference.error_bound(*first, dot=dot).out + (np.abs(want) * 2.0**-8 if coded else 0)
    return None if (np.abs(got[:1].astype(np.float64) - want) <= bound).all() else "outside the bound"


def _decode_peers(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, Call]:
    found: dict[str, Call] = {}
    for name, make in (
        ("torch", _torch_decode),
        ("torch by rows", _torch_rows),
        ("onnxruntime", _onnxruntime_decode),
        ("openvino", _openvino_decode),
    ):
        try:
            call = make(q, k, v)
            if call is not None:
                call()
                found[name] = call
        except ImportError:
            print(f"  ({name} is not installed)")
        except Exception as error:
            print(f"  ({name} failed: {type(error).__name__}: {str(error)[:100]})")
    return found


def _tensors(*arrays: np.ndarray) -> list[Any]:
    import torch

    return [
        torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(x)
        for x in arrays
    ]


def _torch_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call:
    import torch

    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, *_tensors(q, k, v), enable_gqa=True)
    return lambda: without_grad(call)


def _by_rows(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The query heads of a group as rows of one head: what enable_gqa does without repeating keys."""
    batch, kv_heads = k.shape[:2]
    return q.reshape(batch, kv_heads, q.shape[1] // kv_heads, q.shape[3])


def _torch_rows(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call:
    import torch

    call = functools.partial(torch.nn.functional.scaled_dot_product_attention, *_tensors(_by_rows(q, k), k, v))
    return lambda: without_grad(call)


def _openvino_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call | None:
    name = q.dtype.name
    if name == "float16":
        return None
    return openvino(name, [_by_rows(q, k), k, v], False)


def _onnxruntime_decode(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Call | None:
    """GroupQueryAttention over a past that is also the present: it writes the last token in place, then attends."""
    if q.dtype.name not in ("float32", "float16"):
        return None
    from onnx import TensorProto, helper

    ort = importlib.import_module("onnxruntime")  # only of "bench": types are checked without it

    batch, heads, _, d = q.shape
    kv_heads, n = k.shape[1:3]
    kind = TensorProto.FLOAT if q.dtype == np.float32 else TensorProto.FLOAT16
    values = {
        "q": q.reshape(batch, 1, heads * d), "k": np.ascontiguousarray(k[:, :, -1]).reshape(batch, 1, kv_heads * d),
        "v": np.ascontiguousarray(v[:, :, -1]).reshape(batch, 1, kv_heads * d), "pk": k.copy(), "pv": v.copy(),
        "lengths": np.full(batch, n - 1, np.int32), "total": np.array(n, np.int32),
    }  # fmt: skip
    node = helper.make_node(
        "GroupQueryAttention",
        list(values),
        ["o", "ok", "ov"],
        domain="com.microsoft",
        num_heads=heads,
        kv_num_heads=kv_heads,
    )
    types = {np.dtype(np.int32): TensorProto.INT32}
    infos = [helper.make_tensor_value_info(x, types.get(a.dtype, kind), a.shape) for x, a in values.items()]
    outs = [helper.make_tensor_value_info(x, kind, None) for x in ("o", "ok", "ov")]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", infos, outs), opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = sl.get_threads()
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    held = {x: ort.OrtValue.ortvalue_from_numpy(a) for x, a in values.items()}
    binding = session.io_binding()
    for x, value in held.items():
        binding.bind_ortvalue_input(x, value)
    binding.bind_output("o")
    binding.bind_ortvalue_output("ok", held["pk"])
    binding.bind_ortvalue_output("ov", held["pv"])
    session.run_with_iobinding(binding)
    got = binding.copy_outputs_to_cpu()[0].reshape(batch, heads, 1, d).astype(np.float64)
    if np.abs(got - sl.attention(q, k, v).astype(np.float64)).max() > 0.01:
        raise ValueError("another result than ours")
    return lambda: session.run_with_iobinding(binding)
