"""A GPU's figures, beside its peers: forward, masks and decode. `python -m speedlight.tools.gpu` needs no more than the
engine.

Calls are measured in turn, A B A B, between CUDA events; a row whose result is not right is refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import speedlight as sl

from ..arrays import array as arrays
from ..gpu.keys import arrays_of
from ..gpu.prepare import prepare
from ..gpu.schedule import capability
from ..gpu.tiles import Tile
from ..host.machine import interpreting
from ..problem.build import from_arrays
from ..problem.problem import Options

Call = Callable[[], Any]
LENGTHS, DIMS = (1024, 2048, 4096, 8192, 16384), (64, 128, 256)
TOKENS, WIDTH = 16384, 2048  # of every forward problem: batch x length, heads x head_dim
DECODE = ((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 4096), (32, 32768), (64, 1024), (64, 8192))  # batch, keys


def device() -> torch.device:
    return torch.device("cpu") if interpreting() else torch.device("cuda")


def drawn(*shape: int, dtype: str, seed: int) -> torch.Tensor:
    """Random numbers, made where they are used."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device(), dtype=torch.float32).to(getattr(torch, dtype))


# --- measuring


def seconds_of(call: Call, repeats: int) -> float:
    """One of `repeats` calls, on the device's own clock."""
    if interpreting():
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def measured(calls: dict[str, Call], turns: int, sample: float = 0.02) -> dict[str, list[float]]:
    """Least, quartiles and most of each call's seconds: A B A B, every sample as long as `sample` seconds."""
    repeats = {}
    for name, call in calls.items():
        call()
        seconds_of(call, 1)
        repeats[name] = max(1, min(1000, round(sample / max(seconds_of(call, 1), 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(seconds_of(call, repeats[name]))
    return {name: [float(x) for x in np.quantile(t, (0, 0.25, 0.5, 0.75, 1))] for name, t in times.items()}


def graphed(call: Call) -> Call:
    """The call as a CUDA graph: what it costs without Python. The call itself, where it cannot be captured."""
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
    """What this device copies (bytes read and written) and multiplies per second."""
    if interpreting():
        return {"copy": math.nan, "bfloat16": math.nan, "float32": math.nan}
    pair = [torch.empty(1 << 30, dtype=torch.float32, device="cuda") for _ in range(2)]
    rates = {"copy": 2 * pair[0].nbytes / measured({"copy": lambda: pair[0].copy_(pair[1])}, turns)["copy"][2]}
    pair.clear()
    for dtype, n in (("bfloat16", 8192), ("float32", 4096)):
        x = drawn(n, n, dtype=dtype, seed=0)
        rates[dtype] = 2 * n**3 / measured({"product": lambda x=x: x @ x}, turns)["product"][2]
    return rates


# --- peers


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Call]:
    """PyTorch's backends."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call(backend: Any) -> Any:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    names = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    return {name: lambda b=backend: call(b) for name, backend in names.items()}


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, score: Any = None) -> Call:
    """Compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block = create_block_mask(mask, None, None, q.shape[2], k.shape[2], device=q.device) if mask else None
    run = torch.compile(flex_attention, dynamic=False)
    return lambda: run(q, k, v, block_mask=block, score_mod=score, enable_gqa=q.shape[1] != k.shape[1])


def flash_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    function = importlib.import_module("flash_attn").flash_attn_func
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return lambda: function(q, k, v, causal=causal).transpose(1, 2)


def jax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Call:
    """By cuDNN; timed on this process's events, so each call is waited for."""
    library = importlib.import_module("jax")
    a, b, c = (library.dlpack.from_dlpack(x.transpose(1, 2).contiguous()) for x in (q, k, v))
    run = library.jit(
        lambda q, k, v: library.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")
    )
    return lambda: torch.from_dlpack(run(a, b, c).block_until_ready()).transpose(1, 2)


def peers_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, names: Iterable[str]) -> dict[str, Call]:
    makers: dict[str, Callable[[], Call]] = {
        "flex": lambda: flex(q, k, v, (lambda b, h, i, j: i >= j) if causal else None),
        "flash_attn": lambda: flash_attn(q, k, v, causal),
        "jax": lambda: jax(q, k, v, causal),
    }  # fmt: skip
    made = sdpa(q, k, v, causal)
    return {name: made.get(name) or (lambda n=name: makers[n]()) for name in names}  # type: ignore[dict-item]


def usable(calls: dict[str, Call], want: torch.Tensor, notes: dict[str, str], tolerance: float) -> dict[str, Call]:
    """Those peers that run here and say the same."""
    right = {}
    for name, call in calls.items():
        try:
            if name in ("flex", "flash_attn", "jax"):
                call = call()
            off = (call().float() - want.float()).abs().max().item()
            if not off <= tolerance:
                notes[name] = f"another result than ours, by {off:.2g}"
                continue
            right[name] = call
        except ImportError as error:
            notes[name] = f"not installed ({error.name})"
        except Exception as error:
            notes[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
    return right


PEERS = ("cudnn", "flash", "efficient", "flex", "flash_attn", "jax")
_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


def wrong(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, keys: int, **options: Any
) -> str | None:
    """The last rows of one head against the float64 oracle, every element inside its bound."""
    one = [x.detach()[:1, :1].cpu() for x in (q, k, v)]
    rows = min(64, q.shape[2])
    one[0] = one[0][:, :, -rows:]
    want = sl.reference.attention(*one, **options)
    bound = sl.reference.error_bound(*one, tile=keys, **options).out
    right = np.abs(out[:1, :1, -rows:].detach().cpu().double().numpy() - want) <= bound
    return None if right.all() else f"{(~right).sum()} of {right.size} elements outside the bound"


# --- what is measured


def forward(
    dtype: str, d: int, n: int, causal: bool, turns: int, names: Iterable[str] = PEERS, tokens: int = TOKENS
) -> dict[str, Any]:
    """TFLOP/s of prefill; causal counts half. Peers that are compiled for each shape run at 8,192 alone."""
    batch, heads = max(1, tokens // n), max(1, WIDTH // d) if tokens == TOKENS else 1
    q, k, v = (drawn(batch, heads, n, d, dtype=dtype, seed=s) for s in range(3))
    row: dict[str, Any] = {
        "name": f"forward {dtype} d{d} N{n} {'causal' if causal else 'full'}",
        "dtype": dtype,
        "head_dim": d,
        "length": n,
    }
    ours = lambda: sl.attention(q, k, v, causal=causal, engine="cuda")  # noqa: E731
    out = ours()
    if refused := wrong(q, k, v, out, 16, causal=causal):
        return row | {"refused": refused}
    notes: dict[str, str] = {}
    chosen = [x for x in names if n == 8192 or x not in ("flex", "jax")]
    others = usable(peers_of(q, k, v, causal, chosen), out, notes, _TOLERANCE[dtype])
    times = measured({"speedlight": ours} | others, turns)
    flops = sl.plan(batch=batch, q_heads=heads, q_len=n, head_dim=d, dtype=dtype, causal=causal).flops or 0
    return row | {
        "flops": flops,
        "seconds": times,
        "tflops": {x: flops / t[2] / 1e12 for x, t in times.items()},
        "notes": notes,
    }


def mask_list(n: int, heads: int = 16) -> dict[str, tuple[dict[str, Any], Any, Any]]:
    """Our options, and the same mask and score for FlexAttention."""
    ids = np.arange(n) * 8 // n
    ids_resident = torch.from_numpy(ids).to(device())
    slopes = np.exp2(-8 * np.arange(1, heads + 1) / heads).astype(np.float32)
    slopes_there = torch.from_numpy(slopes).to(device())
    causal = lambda b, h, i, j: i >= j  # noqa: E731
    return {
        "causal": ({"mask": sl.causal()}, causal, None),
        "window 1024": ({"mask": sl.window(1024, 0)}, lambda b, h, i, j: (i >= j) & (i - j <= 1024), None),
        "prefix 1024": ({"mask": sl.causal() | sl.prefix(1024)}, lambda b, h, i, j: (i >= j) | (j < 1024), None),
        "documents": (
            {"mask": sl.documents(ids) & sl.causal()},
            lambda b, h, i, j: (ids_resident[i] == ids_resident[j]) & (i >= j),
            None,
        ),
        "alibi": (
            {"score": sl.alibi(slopes), "causal": True},
            causal,
            lambda s, b, h, i, j: s + slopes_there[h] * (j - i),
        ),
        "softcap": (
            {"score": sl.softcap(30.0), "causal": True},
            causal,
            lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
        ),
    }


def masked(name: str, n: int, turns: int, with_flex: bool = True, heads: int = 16, d: int = 128) -> dict[str, Any]:
    """One mask of the list against compiled FlexAttention."""
    options, mask, score = mask_list(n, heads)[name]
    q, k, v = (drawn(2 if with_flex else 1, heads, n, d, dtype="bfloat16", seed=s) for s in range(3))
    ours = lambda: sl.attention(q, k, v, engine="cuda", **options)  # noqa: E731
    out = ours()
    row: dict[str, Any] = {"name": f"mask {name} bfloat16 d{d} N{n}"}
    if name != "alibi" and (refused := wrong(q, k, v, out, 16, **options)):  # one head alone has other slopes
        return row | {"refused": refused}
    notes: dict[str, str] = {}
    others = usable({"flex": lambda: flex(q, k, v, mask, score)}, out, notes, 5e-2) if with_flex else {}
    times = measured({"speedlight": ours} | others, turns)
    return row | {"seconds": times, "notes": notes}


def decode(
    batch: int, n: int, turns: int, dtype: str = "bfloat16", heads: tuple[int, int] = (32, 8), d: int = 128
) -> dict[str, Any]:
    """One token per sequence: bytes of keys and values per second."""
    q = drawn(batch, heads[0], 1, d, dtype=dtype, seed=0)
    k, v = (drawn(batch, heads[1], n, d, dtype=dtype, seed=s) for s in (1, 2))
    row: dict[str, Any] = {"name": f"decode {dtype} B{batch} N{n} H{heads[0]}/{heads[1]} d{d}"}
    ours = lambda: sl.attention(q, k, v, engine="cuda")  # noqa: E731
    out = ours()
    if refused := wrong(q, k, v, out, 16):
        return row | {"refused": refused}
    notes: dict[str, str] = {}
    others = usable(sdpa(q, k, v, False), out, notes, _TOLERANCE[dtype]) if not interpreting() else {}
    calls = {"speedlight": graphed(ours), "speedlight eager": ours} | {
        name: graphed(call) for name, call in others.items()
    }
    times = measured(calls, turns)
    moved = k.nbytes + v.nbytes
    return row | {
        "bytes": moved,
        "seconds": times,
        "gbps": {x: moved / t[2] / 1e9 for x, t in times.items()},
        "notes": notes,
    }


def rows(turns: int = 5, only: str = "", limit: float = math.inf) -> Iterator[dict[str, Any]]:
    """Everything, the figures of the issue first; what `limit` seconds do not reach is left out."""
    start = time.monotonic()
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    first = [(128, 8192, False), (128, 8192, True), (64, 8192, False)]
    rest = [(d, n, c) for d in DIMS for n in LENGTHS for c in (False, True) if (d, n, c) not in first]
    cases += [("forward", lambda a=a: forward("bfloat16", a[0], a[1], a[2], turns)) for a in first]
    cases += [("decode", lambda: decode(32, 4096, turns))]
    cases += [
        ("float32", lambda d=d, n=n: forward("float32", d, n, False, turns))
        for d, n in ((128, 4096), (64, 4096), (128, 16384))
    ]
    cases += [("mask", lambda m=m: masked(m, 8192, turns)) for m in mask_list(16)]
    cases += [("decode", lambda a=a: decode(a[0], a[1], turns)) for a in DECODE if a != (32, 4096)]
    cases += [("forward", lambda a=a: forward("bfloat16", a[0], a[1], a[2], turns)) for a in rest]
    for kind, call in cases:
        if only and only not in kind:
            continue
        if time.monotonic() - start > limit:
            break
        try:
            yield call()
        except torch.cuda.OutOfMemoryError:
            yield {"name": kind, "refused": "too little memory"}
        if not interpreting():
            torch.cuda.empty_cache()


def about() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "speedlight": sl.__version__}
    for package in ("numpy", "torch", "triton", "flash_attn", "jax"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    found = {
        "versions": versions,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cuda": torch.version.cuda,
    }
    if interpreting():
        return found | {"machine": "interpreter"}
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    asked = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return found | {
        "machine": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability(),
        "nvidia-smi": asked.stdout.strip(),
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def line(row: dict[str, Any], found: dict[str, float]) -> str:
    """A row in words."""
    if "refused" in row:
        return f"{row['name']}: REFUSED: {row['refused']}"
    times = row["seconds"]
    ours = times["speedlight"][2]
    text = f"{row['name']}: {ours * 1e6:,.1f} us"
    if "tflops" in row:
        text += f", {row['tflops']['speedlight']:.0f} TFLOP/s"
    if "gbps" in row:
        text += (
            f", {row['gbps']['speedlight']:,.0f} GB/s, {row['gbps']['speedlight'] * 1e9 / found['copy']:.0%} of a copy"
        )
    ratios = [f"{name} {t[2] / ours:.2f}" for name, t in times.items() if name != "speedlight"]
    return (
        text
        + (f"; time of a peer over ours: {', '.join(ratios)}" if ratios else "")
        + "".join(f"; {n}: {w}" for n, w in row["notes"].items())
    )


def candidates(kind: str, tma: bool) -> list[Tile]:
    """Tiles that may be the best of a kind: full, masked or decode."""
    decoding = kind == "decode"
    return [
        Tile(rows, keys, warps, stages, use_tma)
        for rows in ((16,) if decoding else (64, 128))
        for keys in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        for use_tma in ((False, True) if tma and not decoding else (False,))
        if rows * keys >= 16 * 32 * (1 if decoding else 4)
    ]


def tune(
    dtype: str, d: int, kind: str, turns: int = 3, *, length: int = 4096, tiles: list[Tile] | None = None
) -> list[tuple[float, Tile]]:
    """Tiles of a kind, best first: seconds and tile. Each is checked before it is timed."""
    decoding = kind == "decode"
    batch, heads, kv_heads = (32, 32, 8) if decoding else (4, 16, 16)
    q = drawn(batch, heads, 1 if decoding else length, d, dtype=dtype, seed=0)
    k, v = (drawn(batch, kv_heads, length, d, dtype=dtype, seed=s) for s in (1, 2))
    causal, out, keys = kind == "masked", torch.empty_like(q), arrays_of(k, v, "bhld")
    a, b, c = (arrays.describe(x, name, gpu=True) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    problem = from_arrays(a, b, c, Options(causal)).problem
    timed = []
    for tile in tiles or candidates(kind, capability(str(q.device)) >= (9, 0)):
        try:
            call = prepare(problem, "bhld", str(q.device), keys, tile=tile)
            call.run(q, keys, out, None)
            if not wrong(q, k, v, out, 16, causal=causal):
                seconds = measured({"x": lambda call=call: call.run(q, keys, out, None)}, turns)["x"]
                timed.append((seconds[2], tile))
        except sl.Error:
            continue  # too little shared memory
    return sorted(timed, key=lambda x: x[0])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="speedlight.tools.gpu", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="a directory for the rows")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="", help="forward, float32, mask or decode")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no further row is begun")
    given = parser.parse_args(arguments)
    if not interpreting() and not torch.cuda.is_available():
        print("speedlight: no CUDA device here", file=sys.stderr)
        return 2
    report = about() | {"roofs": roofs(given.turns), "rows": []}
    copy, products = report["roofs"]["copy"] / 1e9, report["roofs"]["bfloat16"] / 1e12
    print(f"{report['machine']}: copies {copy:,.0f} GB/s, multiplies bfloat16 at {products:.0f} TFLOP/s")
    for row in rows(given.turns, given.only, given.limit):
        report["rows"].append(row)
        print(line(row, report["roofs"]), flush=True)
        if given.output:
            name = "".join(c if c.isalnum() else "-" for c in report["machine"].lower())
            (given.output / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(any("refused" in row for row in report["rows"]))


if __name__ == "__main__":
    sys.exit(main())
