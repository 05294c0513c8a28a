"""The figures of docs/benchmarks.md: speedlight and its peers in turn, A B A B, in one process, every result checked
first.

    make bench                                    # or: python benchmarks/run.py [--quick] [--only
    prefill,small,start,...]

Rows go to benchmarks/results/<machine>.json, a file for each family of CPUs; each row says its family, its commit, and
whence its schedules came. Parts that are not run keep their rows. GFLOP/s count visible work; a share of peak is of
multiply-adds on registers measured in the same turn. A row whose result is outside its bound is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from decoding import decode

import speedlight as sl
from speedlight.cpu.runtime import roof
from speedlight.cpu.runtime.tuned import tuning_of
from speedlight.host import machine
from speedlight.host.tunings import FAMILIES
from speedlight.tools.measuring import Call, check, flex, measure, name_of, peers, quantiles, tensors, without_grad

HERE = Path(__file__).parent
# dtype, heads, length, head_dim, causal
PREFILL = [("float32", 8, n, d, c) for n in (128, 256, 512, 1024, 2048, 4096) for d in (64, 128) for c in (False, True)]
PREFILL += [("bfloat16", 8, n, d, c) for n in (128, 512, 1024, 4096) for d in (64, 128) for c in (False, True)]
PREFILL += [("float16", 8, 4096, d, False) for d in (64, 128)] + [("float64", 8, 2048, 128, False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three turns instead of nine")
    parser.add_argument("--only", default="prefill,avx2,masks,decode,start,memory,torch,errors")
    arguments = parser.parse_args()
    turns, rows = (3 if arguments.quick else 9), []
    parts = {
        "prefill": prefill,
        "avx2": narrower,
        "masks": masks,
        "decode": decode,
        "start": start_up,
        "memory": memory,
        "torch": beside_torch,
        "errors": error_time,
    }
    for name in arguments.only.split(","):
        for row in parts[name](turns):
            rows.append(row | {"part": name})
            print(describe(row), flush=True)
    save(rows, arguments.only)


def prefill(turns: int) -> Any:
    read = roof.bandwidth(machine.current_isa(), sl.get_threads(), 512 << 20)
    for dtype, heads, n, d, causal in PREFILL:
        arrays = tensors(dtype, heads, n, d)
        others, missing = peers(dtype, arrays, causal, ("torch", "onnxruntime", "openvino"))
        for name, why in missing.items():
            print(f"  ({name}: {why})")
        calls = {"speedlight": lambda a=arrays, c=causal: sl.attention(*a, causal=c)} | others
        if isinstance(refused := check(arrays, calls["speedlight"](), causal), str):
            yield {"name": "refused", "why": refused}
            continue
        plan = sl.plan(*arrays, causal=causal)
        isa = machine.current_isa()
        kind = (
            plan.problem.storage
            if plan.problem.storage in ("f64",) or isa.product(plan.problem.storage) == "pairs"
            else "f32"
        )
        times, peaks = measure(calls, turns, lambda kind=kind, isa=isa: roof.peak_flops(isa, kind, sl.get_threads()))
        ours, flops = statistics.median(times["speedlight"]), plan.flops
        assert flops is not None  # nothing is masked but by position
        best = min((x for x in times if x != "speedlight"), key=lambda x: statistics.median(times[x]), default=None)
        yield {
            "name": name_of(dtype, heads, n, d, causal), "dtype": dtype, "heads": heads, "length": n, "head_dim": d,
            "causal": causal, "kernel": plan.kernel,
            "flops": flops, "bytes_moved": plan.bytes_read + plan.bytes_written, "read_bandwidth": read,
            "seconds": {x: quantiles(t) for x, t in times.items()},
            "gflops": flops / ours / 1e9, "peak": statistics.median(peaks) / 1e9,
            "share_of_peak": flops / ours / statistics.median(peaks),
            "best_peer": best, "ratio": statistics.median(times[best]) / ours if best else None,
            "ratios": {x: statistics.median(t) / ours for x, t in times.items() if x != "speedlight"},
        }  # fmt: skip


def narrower(turns: int) -> Any:
    """AVX2 code on this machine, of the peak of AVX2 multiply-adds."""
    isa = machine.isa_named("avx2")
    if isa not in machine.host_isas():
        return
    before = os.environ.get("SPEEDLIGHT_ISA")
    os.environ["SPEEDLIGHT_ISA"] = "avx2"
    try:
        arrays = tensors("float32", 8, 2048, 128)
        if isinstance(refused := check(arrays, sl.attention(*arrays), False), str):
            yield {"name": "refused", "why": refused}
            return
        plan = sl.plan(*arrays)
        peak = lambda: roof.peak_flops(isa, "f32", sl.get_threads())  # noqa: E731
        times, peaks = measure({"speedlight": lambda: sl.attention(*arrays)}, turns, peak)
        assert plan.flops is not None
        rate, top = plan.flops / statistics.median(times["speedlight"]), statistics.median(peaks)
        yield {
            "name": "float32 H8 N2048 d128 full, AVX2 code", "kernel": plan.kernel, "flops": plan.flops, "ratios": {},
            "seconds": {"speedlight": quantiles(times["speedlight"])}, "gflops": rate / 1e9, "peak": top / 1e9,
            "share_of_peak": rate / top,
        }  # fmt: skip
    finally:
        os.environ.pop("SPEEDLIGHT_ISA")
        if before is not None:
            os.environ["SPEEDLIGHT_ISA"] = before


def masks(turns: int) -> Any:
    """Patterns against plain attention, PyTorch with a dense mask, and compiled FlexAttention with its block mask."""
    import torch

    slopes = np.array([2.0 ** -(h + 1) for h in range(8)], np.float32)
    bias = np.random.default_rng(1).standard_normal((8, 4096, 4096), dtype=np.float32)
    torch_bias = torch.from_numpy(bias)
    causal, window = (
        {"causal": True},
        lambda n: ({"mask": sl.window(n, 0)}, (lambda b, h, i, j: (i >= j) & (i - j <= n), None)),
    )
    documents = {"mask": sl.documents(np.repeat(np.arange(8), 2048))}, (lambda b, h, i, j: i // 2048 == j // 2048, None)
    alibi, softcap = (
        (lambda s, b, h, i, j: s + 2.0 ** (-(h + 1)) * (j - i)),
        (lambda s, b, h, i, j: 30.0 * (s / 30.0).tanh()),
    )
    for name, n, (options, mods), plain in (
        ("causal", 16384, ({"mask": sl.causal()}, (lambda b, h, i, j: i >= j, None)), {}),
        ("window 256", 16384, window(256), causal),
        ("window 1024", 16384, window(1024), causal),
        ("window 4096", 16384, window(4096), causal),
        ("8 documents", 16384, documents, {}),
        (
            "prefix 512 and causal",
            4096,
            ({"mask": sl.causal() | sl.prefix(512)}, (lambda b, h, i, j: (i >= j) | (j < 512), None)),
            causal,
        ),
        ("alibi", 4096, ({"score": sl.alibi(slopes)}, (None, alibi)), {}),
        ("softcap", 4096, ({"score": sl.softcap(30.0)}, (None, softcap)), {}),
        (
            "softcap and alibi",
            4096,
            (
                {"score": [sl.softcap(30.0), sl.alibi(slopes)]},
                (None, lambda s, b, h, i, j: alibi(softcap(s, b, h, i, j), b, h, i, j)),
            ),
            {},
        ),
        ("dense bias", 4096, ({"score": bias}, (None, lambda s, b, h, i, j: s + torch_bias[h, i, j])), {}),
    ):
        arrays = tensors("float32", 8, n, 64)
        calls: dict[str, Call] = {
            "speedlight": lambda o=options, a=arrays: sl.attention(*a, **o),
            "plain": lambda a=arrays, o=plain: sl.attention(*a, **o),
        }
        one = [x[:, :, -64:] if i == 0 else x for i, x in enumerate(arrays)]
        score = options.get("score")
        few = {"score": score[:, -64:]} if isinstance(score, np.ndarray) else options
        want, bound = sl.reference.attention(*one, **few), sl.reference.error_bound(*one, **few).out
        if not (np.abs(calls["speedlight"]()[:, :, -64:] - want) <= bound).all():
            yield {"name": "refused", "why": f"{name}: outside the bound"}
            continue
        start = time.perf_counter()
        calls |= flex(arrays, *mods)
        built = time.perf_counter() - start
        dense: Any = torch_bias if name == "dense bias" else None
        if mods[0] is not None:
            at = torch.arange(n)
            dense = mods[0](0, 0, at[:, None], at[None, :])
        if dense is not None:
            calls["torch"] = _dense_torch(arrays, dense)
        for peer in {"flex", "torch"} & set(calls):  # a peer that computes something else is no peer
            got = np.asarray(calls[peer]())[:, :, -64:]
            if not np.abs(got - want).max() < 1e-3:
                print(f"  ({peer}: {name}: not the same result)")
                del calls[peer]
        times, _ = measure(calls, min(turns, 5), lambda: 0.0)
        ours = statistics.median(times["speedlight"])
        yield {
            "name": f"float32 H8 N{n} d64 {name}", "seconds": {x: quantiles(t) for x, t in times.items()},
            "of_plain": ours / statistics.median(times["plain"]), "flex_seconds_to_build": built,
            "flex": statistics.median(times["flex"]) / ours if "flex" in times else None,
            "torch": statistics.median(times["torch"]) / ours if "torch" in times else None,
        }  # fmt: skip


def _dense_torch(arrays: list[np.ndarray], mask: Any) -> Call:
    import torch

    q, k, v = (torch.from_numpy(x) for x in arrays)
    call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    return lambda: without_grad(call)


_FIRST = (
    "import time; t = time.perf_counter()\n"
    "import numpy as np, speedlight as sl\n"
    "q = np.ones((1, 8, 256, 64), np.float32)\n"
    "sl.attention(q, q, q)\n"
    "print(time.perf_counter() - t)"
)


def start_up(turns: int) -> Any:
    """The first call in a fresh process, import included: with an empty kernel cache, then with a full one."""
    cold, warm = [], []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as directory:
            for times in (cold, warm):
                env = os.environ | {"SPEEDLIGHT_CACHE_DIR": directory + "/c"}
                times.append(float(subprocess.check_output([sys.executable, "-c", _FIRST], env=env)))
    for name, times in (("first call, cold", cold), ("first call, object cache warm", warm)):
        yield {"name": name, "seconds": {"speedlight": quantiles(times)}}


_MEMORY = (
    "import numpy as np, speedlight as sl\n"
    "q = np.ones((1, 1, 65536, 64), np.float32); k = q.copy(); v = q.copy(); out = np.ones_like(q)\n"
    "s = q[:, :, :256].copy(); sl.attention(s, s, s)\n"
    "peak = lambda: int(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1]) * 1024\n"
    "open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak counts from here
    "a = peak(); sl.attention(q, k, v, out=out); print(peak() - a)"
)


def memory(_turns: int) -> Any:
    """Peak memory above inputs and output (and above what a first small call loads)."""
    extra = int(subprocess.check_output([sys.executable, "-c", _MEMORY]))
    yield {"name": "peak extra memory, 1 head, 65,536 keys, d=64", "bytes": extra}


def beside_torch(turns: int) -> Any:
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
    times, _ = measure(calls, turns, lambda: 0.0)
    alone = statistics.median(times["matmul"]) + statistics.median(times["attention"])
    together = statistics.median(times["both"])
    yield {
        "name": "torch matmul and attention alternating",
        "seconds": {k: quantiles(t) for k, t in times.items()},
        "of_sum": together / alone,
    }


def error_time(_turns: int) -> Any:
    """How long a refused call takes."""
    q, k = np.ones((2, 4, 64, 64), np.float32), np.ones((2, 3, 64, 64), np.float32)
    times = []
    for _ in range(1000):
        start = time.perf_counter()
        try:
            sl.attention(q, k, k)
        except sl.Error:
            times.append(time.perf_counter() - start)
    yield {"name": "refused call", "seconds": {"speedlight": quantiles(times)}}


def describe(row: dict[str, Any]) -> str:
    text = f"{row['name']:48}"
    if "gflops" in row:
        text += f" {row['gflops']:7.1f} GFLOP/s {row['share_of_peak']:6.1%} of {row['peak']:.0f}"
        text += "".join(f"  {x} x{r:.2f}" for x, r in row["ratios"].items())
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
    return text


def save(rows: list[dict[str, Any]], only: str) -> None:
    """One file a machine; parts that were not run keep their rows."""
    isa, family = machine.current_isa(), machine.cpu_family()
    words = machine.cpu_name(), "" if family == "other" else family, os.cpu_count(), "cores", isa.name
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(map(str, words)).lower()).strip("-")
    path = HERE / "results" / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE
    ).stdout.strip()
    origin = {"family": FAMILIES[family], "commit": commit, "schedule": tuning_of(isa).origin._asdict()}
    rows = [r for r in old if r["part"] not in only.split(",")] + [r | origin for r in rows]
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": platform.python_version(), "speedlight": sl.__version__}
    for package in ("numpy", "llvmlite", "torch", "onnxruntime", "openvino"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    head = {
        "machine": machine.cpu_name(),
        "family": FAMILIES[family],
        "cores": os.cpu_count(),
        "isa": isa.name,
        "versions": versions,
    }
    path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
