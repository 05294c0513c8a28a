"""A GPU's figures beside its peers: forward, backward, float32, masks and decode: `run.py gpu`, which needs no more
than the engine does.

Calls are timed between CUDA events; in Triton's interpreter by the clock of this process.
"""

from __future__ import annotations

import functools
import math
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from peers import GPU, of_gpu

import speedlight as sl
from speedlight.host.machine import interpreting
from speedlight.tools.gpu_tiles import OF_GPU, device, drawn, measured
from speedlight.tools.measuring import PEER_SLACK, judge, judge_gradients
from speedlight.tools.peers import Asked, Call, usable

KINDS = ("forward", "backward", "float32", "mask", "decode")
LENGTHS, DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
MAIN = 8192  # the length of rows that come first; only there run peers that are compiled for each shape
TOKENS, WIDTH = 16384, 2048  # of every forward problem: batch x length, heads x head_dim
DECODE = ((32, 4096), (1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 32768), (64, 1024), (64, 8192))  # batch, keys
MASKS = ("causal", "window 1024", "prefix 1024", "documents", "alibi", "softcap")
FLOAT32 = ((128, 4096), (64, 4096), (128, 16384))  # head_dim, length


def graphed(call: Call) -> Call:
    """Returns the call as a CUDA graph: what it costs without Python."""
    if interpreting():
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def roofs(turns: int = 5) -> dict[str, float]:
    """Measures what this device copies (bytes read and written) and multiplies per second."""
    if interpreting():
        return {"copy": math.nan, "bfloat16": math.nan, "float32": math.nan}
    pair = [torch.empty(1 << 30, dtype=torch.float32, device="cuda") for _ in range(2)]
    rates = {"copy": 2 * pair[0].nbytes / measured({"copy": lambda: pair[0].copy_(pair[1])}, turns)["copy"][2]}
    pair.clear()
    for dtype, n in (("bfloat16", 8192), ("float32", 4096)):
        x = drawn(n, n, dtype=dtype, seed=0)
        rates[dtype] = 2 * n**3 / measured({"product": lambda x=x: x @ x}, turns)["product"][2]
    return rates


def row_of(
    name: str, turns: int, asked: Asked, peers: Iterable[str], *, decoding: bool = False, heads: int = 1, **options: Any
) -> dict[str, Any]:
    """Measures a problem beside peers; a result that is wrong leaves "refused" alone. `heads`: so many are checked."""
    arrays = asked[:3]
    ours = lambda: sl.attention(*arrays, engine="cuda", **options)  # noqa: E731

    got = ours()
    held = judge(*arrays, heads=heads, rows=64, arithmetic=OF_GPU, **options)
    if refused := held(got):
        return {"name": name, "refused": refused}
    others, notes = usable(of_gpu(peers), asked, lambda got: held(got, PEER_SLACK))
    calls = {"speedlight": ours} | others
    if decoding:
        calls = {name: graphed(call) for name, call in calls.items()} | {"speedlight eager": ours}
    return {"name": name, "seconds": measured(calls, turns), "notes": notes}


def forward(dtype: str, d: int, n: int, causal: bool, turns: int, names: Iterable[str] = GPU) -> dict[str, Any]:
    """TFLOP/s of prefill; causal counts half."""
    batch, heads = max(1, TOKENS // n), max(1, WIDTH // d)
    asked = Asked(*(drawn(batch, heads, n, d, dtype=dtype, seed=s) for s in range(3)), causal=causal)
    name = f"forward {dtype} d{d} N{n} {'causal' if causal else 'full'}"
    row = row_of(name, turns, asked, [x for x in names if n == MAIN or x != "flex"], causal=causal)
    flops = sl.plan(batch=batch, q_heads=heads, q_len=n, head_dim=d, dtype=dtype, causal=causal).flops or 0
    row |= {"dtype": dtype, "head_dim": d, "length": n, "flops": flops}
    return row | {"tflops": {x: flops / t[2] / 1e12 for x, t in row.get("seconds", {}).items()}}


def backward(dtype: str, d: int, n: int, causal: bool, turns: int, names: Iterable[str] = GPU) -> dict[str, Any]:
    """TFLOP/s of the gradients of q, k and v, counted as 2.5 times forward's, as others count them."""
    batch, heads = max(1, TOKENS // n), max(1, WIDTH // d)
    q, k, v, d_out = (drawn(batch, heads, n, d, dtype=dtype, seed=s) for s in range(4))
    out, lse = sl.attention(q, k, v, causal=causal, return_lse=True, engine="cuda")

    def ours() -> Any:
        return sl.attention_backward(q, k, v, out, lse, d_out, causal=causal, engine="cuda")

    got = ours()
    held = judge_gradients(q, k, v, out, lse, d_out, arithmetic=OF_GPU, causal=causal)
    row: dict[str, Any] = {"name": f"backward {dtype} d{d} N{n} {'causal' if causal else 'full'}", "dtype": dtype}
    if refused := held(got):
        return row | {"refused": refused}
    names = [x for x in names if n == MAIN or x != "flex"]
    others, notes = usable(of_gpu(names), Asked(q, k, v, causal, d_out), lambda got: held(got, PEER_SLACK))
    times = measured({"speedlight": ours} | others, turns)
    flops = 2.5 * (sl.plan(batch=batch, q_heads=heads, q_len=n, head_dim=d, dtype=dtype, causal=causal).flops or 0)
    row |= {"head_dim": d, "length": n, "flops": flops, "seconds": times, "notes": notes}
    return row | {"tflops": {x: flops / t[2] / 1e12 for x, t in times.items()}}


def mask_list(n: int, heads: int = 16) -> dict[str, tuple[dict[str, Any], Any, Any]]:
    """Returns our options, and the same mask and score for FlexAttention."""
    ids = np.arange(n) * 8 // n
    resident = torch.from_numpy(ids).to(device())
    slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)
    on_device = torch.from_numpy(slopes).to(device())
    causal = lambda b, h, i, j: i >= j  # noqa: E731
    return {
        "causal": ({"mask": sl.causal()}, causal, None),
        "window 1024": ({"mask": sl.window(1024, 0)}, lambda b, h, i, j: (i >= j) & (i - j <= 1024), None),
        "prefix 1024": ({"mask": sl.causal() | sl.prefix(1024)}, lambda b, h, i, j: (i >= j) | (j < 1024), None),
        "documents": (
            {"mask": sl.documents(ids) & sl.causal()},
            lambda b, h, i, j: (resident[i] == resident[j]) & (i >= j),
            None,
        ),
        "alibi": (
            {"score": sl.alibi(slopes), "causal": True},
            causal,
            lambda s, b, h, i, j: s + on_device[h] * (j - i),
        ),
        "softcap": (
            {"score": sl.softcap(30.0), "causal": True},
            causal,
            lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
        ),
    }


def masked(
    name: str, n: int, turns: int, peers: Iterable[str] = ("flex",), heads: int = 16, d: int = 128
) -> dict[str, Any]:
    """A mask of the list beside compiled FlexAttention; of ALiBi, whose slopes differ, all heads are checked."""
    options, mask, score = mask_list(n, heads)[name]
    q, k, v = (drawn(2 if peers else 1, heads, n, d, dtype="bfloat16", seed=s) for s in range(3))
    checked = heads if name == "alibi" else 1
    title = f"mask {name} bfloat16 d{d} N{n}"
    return row_of(title, turns, Asked(q, k, v, mask=mask, score=score), peers, heads=checked, **options)


def decode(
    batch: int, n: int, turns: int, dtype: str = "bfloat16", heads: tuple[int, int] = (32, 8), d: int = 128
) -> dict[str, Any]:
    """One token per sequence: bytes of keys and values per second."""
    q = drawn(batch, heads[0], 1, d, dtype=dtype, seed=0)
    k, v = (drawn(batch, heads[1], n, d, dtype=dtype, seed=s) for s in (1, 2))
    name = f"decode {dtype} B{batch} N{n} H{heads[0]}/{heads[1]} d{d}"
    row = row_of(name, turns, Asked(q, k, v), GPU[:3], decoding=True)
    moved = k.nbytes + v.nbytes
    return row | {"bytes": moved, "gbps": {x: moved / t[2] / 1e9 for x, t in row.get("seconds", {}).items()}}


def cases(turns: int = 5, only: str = "") -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields a name and the measurement of each row, or of those of a kind; the figures that matter most come first."""
    first = [(DIMS[1], MAIN, False), (DIMS[1], MAIN, True), (DIMS[0], MAIN, False)]
    rest = [(d, n, c) for d in DIMS for n in LENGTHS for c in (False, True) if (d, n, c) not in first]
    listed: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []
    listed += [("forward", forward, ("bfloat16", *x)) for x in first]
    listed += [("backward", backward, ("bfloat16", *x)) for x in first]
    listed += [("decode", decode, DECODE[0])]
    listed += [("float32", forward, ("float32", d, n, False)) for d, n in FLOAT32]
    listed += [("mask", masked, (name, MAIN)) for name in MASKS]
    listed += [("decode", decode, x) for x in DECODE[1:]]
    listed += [("forward", forward, ("bfloat16", *x)) for x in rest]
    listed += [("backward", backward, ("bfloat16", *x)) for x in rest if x[0] < 256]
    for kind, measure, case in listed:
        if only in ("", kind):
            yield f"{kind} {case}", functools.partial(measure, *case, turns)


def rows(turns: int = 5, only: str = "") -> Iterator[dict[str, Any]]:
    """Measures everything, or one kind."""
    for name, measure in cases(turns, only):
        try:
            yield measure()
        except Exception as error:  # too little memory, a kernel that does not compile: the other rows matter, too
            yield {"name": name, "refused": f"{type(error).__name__}: {str(error)[:200]}"}
        if not interpreting():
            torch.cuda.empty_cache()


def about() -> dict[str, Any]:
    """Returns what is known of the device."""
    found = {"cuda": torch.version.cuda, "machine": "interpreter"}
    if interpreting():
        return found
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        clocks = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        clocks = "does not answer"
    return found | {
        "machine": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
        "nvidia-smi": clocks, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def line(row: dict[str, Any], roofs: dict[str, float]) -> str:
    """Returns a row as text."""
    times = row["seconds"]
    ours = times["speedlight"][2]
    text = f"{row['name']}: {ours * 1e6:,.1f} us"
    if "tflops" in row:
        text += f", {row['tflops']['speedlight']:.0f} TFLOP/s"
    if "gbps" in row:
        rate = row["gbps"]["speedlight"]
        text += f", {rate:,.0f} GB/s, {rate * 1e9 / roofs['copy']:.0%} of a copy"
    beside = [f"{name} {t[2] / ours:.2f}" for name, t in times.items() if name != "speedlight"]
    text += f"; time of a peer over ours: {', '.join(beside)}" if beside else ""
    return text + "".join(f"; {name}: {why}" for name, why in row["notes"].items())
