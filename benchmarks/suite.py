"""The parts of a full run: prefill, narrower code, masks, the first call, memory, PyTorch beside us, errors."""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from decoding import decode
from squares import Problem, row_of, tensors

import speedlight as sl
from speedlight.host import machine
from speedlight.tools.measuring import (
    PEER_SLACK,
    alternate,
    measure,
    quantiles,
    seconds_of,
    wrong,
)
from speedlight.tools.options import on_unit
from speedlight.tools.peers import Asked, Call, Peer, flex, sdpa, usable

Rows = Iterator[dict[str, Any]]
_LENGTHS, _SHORT = (128, 256, 512, 1024, 2048, 4096), (128, 512, 1024, 4096)
PREFILL = [Problem("float32", 8, n, d, c) for n in _LENGTHS for d in (64, 128) for c in (False, True)]
PREFILL += [Problem("bfloat16", 8, n, d, c) for n in _SHORT for d in (64, 128) for c in (False, True)]
PREFILL += [Problem("float16", 8, 4096, d, False) for d in (64, 128)] + [Problem("float64", 8, 2048, 128, False)]


def prefill(turns: int) -> Rows:
    """Attention beside PyTorch, ONNX Runtime and OpenVINO."""
    for problem in PREFILL:
        yield row_of(problem, turns, ("torch", "onnxruntime", "openvino"))


def narrower(turns: int) -> Rows:
    """AVX2 code on this machine, of the peak of AVX2 multiply-adds."""
    if machine.isa_named("avx2") in machine.host_isas():
        with on_unit("avx2"):
            row = row_of(Problem("float32", 8, 2048, 128, False), turns, ())
            yield row | {"name": f"{row['name']}, AVX2 code"}


def _mask_list() -> Iterator[tuple[str, int, dict[str, Any], Any, Any, dict[str, Any]]]:
    """Name, length, our options, FlexAttention's mask and score, and the options of what it is compared with."""
    slopes = np.array([2.0 ** -(h + 1) for h in range(8)], np.float32)
    alibi = lambda s, b, h, i, j: s + 2.0 ** (-(h + 1)) * (j - i)  # noqa: E731
    softcap = lambda s, b, h, i, j: 30.0 * (s / 30.0).tanh()  # noqa: E731
    both = lambda s, b, h, i, j: alibi(softcap(s, b, h, i, j), b, h, i, j)  # noqa: E731
    causal = {"causal": True}
    yield "causal", 16384, {"mask": sl.causal()}, lambda b, h, i, j: i >= j, None, {}
    for n in (256, 1024, 4096):
        visible = lambda b, h, i, j, n=n: (i >= j) & (i - j <= n)  # noqa: E731
        yield f"window {n}", 16384, {"mask": sl.window(n, 0)}, visible, None, causal
    documents = sl.documents(np.repeat(np.arange(8), 2048))
    yield "8 documents", 16384, {"mask": documents}, lambda b, h, i, j: i // 2048 == j // 2048, None, {}
    prefix = lambda b, h, i, j: (i >= j) | (j < 512)  # noqa: E731
    yield "prefix 512 and causal", 4096, {"mask": sl.causal() | sl.prefix(512)}, prefix, None, causal
    yield "alibi", 4096, {"score": sl.alibi(slopes)}, None, alibi, {}
    yield "softcap", 4096, {"score": sl.softcap(30.0)}, None, softcap, {}
    yield "softcap and alibi", 4096, {"score": [sl.softcap(30.0), sl.alibi(slopes)]}, None, both, {}
    bias = np.random.default_rng(1).standard_normal((8, 4096, 4096), dtype=np.float32)
    yield "dense bias", 4096, {"score": bias}, None, _biased(bias), {}


def _biased(bias: np.ndarray) -> Any:
    import torch

    table = torch.from_numpy(bias)
    return lambda s, b, h, i, j: s + table[h, i, j]


def masks(turns: int) -> Rows:
    """Patterns against plain attention, PyTorch with a dense mask, and compiled FlexAttention with its block mask."""
    for name, n, options, mask, score, plain in _mask_list():
        arrays, title = tensors("float32", 8, n, 64), f"float32 H8 N{n} d64 {name}"
        ours = functools.partial(sl.attention, *arrays, **options)
        bias = options.get("score")
        few = {"score": bias[:, -64:]} if isinstance(bias, np.ndarray) else options
        held = lambda got, slack=1, a=arrays, few=few: wrong(got, *a, heads=8, rows=64, slack=slack, **few)  # noqa: E731
        if refused := held(ours()):
            yield {"name": title, "refused": refused}
            continue
        asked = Asked(arrays[0], arrays[1], arrays[2], mask=mask, score=score, dense=_dense(mask, bias, n))
        built: list[float] = []
        table = {"flex": _timed(flex, built)} | ({} if asked.dense is None else {"torch": sdpa})
        others, notes = usable(table, asked, functools.partial(held, slack=PEER_SLACK))
        calls = {"speedlight": ours, "plain": functools.partial(sl.attention, *arrays, **plain)} | others
        times = measure(calls, min(turns, 5))
        medians = {x: statistics.median(t) for x, t in times.items()}
        beside = {x: medians[x] / medians["speedlight"] if x in medians else None for x in ("flex", "torch")}
        yield {
            "name": title, "seconds": {x: quantiles(t) for x, t in times.items()}, "flex_seconds_to_build": sum(built),
            "of_plain": medians["speedlight"] / medians["plain"], **beside, "notes": notes,
        }  # fmt: skip


def _timed(peer: Peer, built: list[float]) -> Peer:
    """Returns the peer, which tells how long it takes to build and compile."""

    def build(asked: Asked) -> Call:
        start = time.perf_counter()
        call = peer(asked)
        call()
        built.append(time.perf_counter() - start)
        return call

    return build


def _dense(mask: Any, bias: Any, n: int) -> Any:
    """Returns the mask as PyTorch's SDPA takes it, or None where it takes none."""
    import torch

    if mask is None:
        return torch.from_numpy(bias) if isinstance(bias, np.ndarray) else None
    at = torch.arange(n)
    return mask(0, 0, at[:, None], at[None, :])


_FIRST = (
    "import time; t = time.perf_counter()\n"
    "import numpy as np, speedlight as sl\n"
    "q = np.ones((1, 8, 256, 64), np.float32)\n"
    "sl.attention(q, q, q)\n"
    "print(time.perf_counter() - t)"
)


def start_up(turns: int) -> Rows:
    """The first call in a fresh process, import included: with an empty kernel cache, then with a full one."""
    with tempfile.TemporaryDirectory() as root:

        def cold() -> float:
            os.environ["SPEEDLIGHT_CACHE_DIR"] = tempfile.mkdtemp(dir=root)
            return warm()

        def warm() -> float:
            return float(subprocess.check_output([sys.executable, "-c", _FIRST]))

        before = os.environ.get("SPEEDLIGHT_CACHE_DIR")
        try:
            times = alternate({"cold": cold, "object cache warm": warm}, turns)
        finally:
            os.environ.pop("SPEEDLIGHT_CACHE_DIR")
            os.environ |= {} if before is None else {"SPEEDLIGHT_CACHE_DIR": before}
    for name, some in times.items():
        yield {"name": f"first call, {name}", "seconds": {"speedlight": quantiles(some)}}


_MEMORY = (
    "import numpy as np, speedlight as sl\n"
    "q = np.ones((1, 1, 65536, 64), np.float32); k = q.copy(); v = q.copy(); out = np.ones_like(q)\n"
    "s = q[:, :, :256].copy(); sl.attention(s, s, s)\n"
    "peak = lambda: int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1]) * 1024\n"
    "open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak counts from here
    "a = peak(); sl.attention(q, k, v, out=out); print(peak() - a)"
)


def memory(_turns: int) -> Rows:
    """Peak memory above inputs and output (and above what a first small call loads)."""
    extra = int(subprocess.check_output([sys.executable, "-c", _MEMORY]))
    yield {"name": "peak extra memory, 1 head, 65,536 keys, d=64", "bytes": extra}


def beside_torch(turns: int) -> Rows:
    """A torch matmul and attention in turn, against the sum of both alone."""
    import torch

    torch.set_num_threads(sl.get_threads())
    x, y = torch.randn(256, 1024), torch.randn(1024, 1024)
    q = tensors("float32", 8, 128, 64)
    calls: dict[str, Call] = {
        "matmul": lambda: x @ y,
        "attention": lambda: sl.attention(*q),
        "both": lambda: (x @ y, sl.attention(*q)),
    }
    times = measure(calls, turns)
    matmul, attention, both = (statistics.median(t) for t in times.values())
    seconds = {name: quantiles(t) for name, t in times.items()}
    yield {"name": "torch matmul and attention alternating", "seconds": seconds, "of_sum": both / (matmul + attention)}


def error_time(_turns: int) -> Rows:
    """Measures a refused call."""
    q, k = np.ones((2, 4, 64, 64), np.float32), np.ones((2, 3, 64, 64), np.float32)

    def refused() -> None:
        try:
            sl.attention(q, k, k)
        except sl.Error:
            return
        raise AssertionError("attention() takes heads that do not divide")

    times = alternate({"speedlight": functools.partial(seconds_of, refused)}, 1000)
    yield {"name": "refused call", "seconds": {"speedlight": quantiles(times["speedlight"])}}


PARTS = {
    "prefill": prefill, "avx2": narrower, "masks": masks, "decode": decode, "start": start_up, "memory": memory,
    "torch": beside_torch, "errors": error_time,
}  # fmt: skip


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    text = f"{row['name']:48}"
    if "gflops" in row:
        text += f" {row['gflops']:7.1f} GFLOP/s {row['share_of_peak']:6.1%} of {row['peak']:.0f}"
        text += "".join(f"  {x} x{spread[2]:.2f}" for x, spread in row["ratios"].items())
    elif "seconds" in row:
        text += "  " + ", ".join(f"{x} {t[2] * 1e3:.3f} ms" for x, t in row["seconds"].items())
    if "of_plain" in row:
        text += f"  {row['of_plain']:.3f} of the plain time"
        text += f"  flex x{row['flex']:.2f}, built in {row['flex_seconds_to_build']:.1f} s" if row["flex"] else ""
        text += f"  torch with a dense mask x{row['torch']:.2f}" if row["torch"] else ""
    if "share_of_read" in row:
        own = row["share_of_read_arrays"]
        text += f"  cache {row['share_of_read']:.1%} of a plain read ({row['gbytes']:.1f} GB/s)"
        text += "" if own is None else f", arrays {own:.1%}"
        text += f", pages x{row['pages']:.2f}" + "".join(f"  {x} x{r:.2f}" for x, r in row["peers"].items())
    if "of_sum" in row:
        text += f"  {row['of_sum']:.2f} of the sum"
    if "bytes" in row:
        text += f"  {row['bytes'] / 2**20:.1f} MiB"
    return text + "".join(f"\n  ({name}: {why})" for name, why in row.get("notes", {}).items())
