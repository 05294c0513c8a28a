"""The one harness of all measurements: calls in alternation, results held to their error bounds, rows of figures."""

from __future__ import annotations

import functools
import itertools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import speedlight as sl

from ..arrays.dtypes import DTYPES
from ..cpu.runtime import roof
from ..cpu.runtime.tuned import tuning_of
from ..host import machine
from ..host.tunings import FAMILIES
from .peers import PEERS, Asked, Call, usable

PEER_SLACK = 64  # error bounds that a peer may be away from float64: PyTorch rounds scores to float16, 24 of them
_LONG = 0.5  # seconds from which a call is not warmed up by another one

# --- time


def alternate(samples: Mapping[str, Callable[[], float]], turns: int, *, first: int = 0) -> dict[str, list[float]]:
    """Takes a sample of each in every turn, A B A B; a turn begins with number `first`."""
    names = list(samples)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(turns):
        for at in range(len(names)):
            name = names[(first + at) % len(names)]
            found[name].append(samples[name]())
    return found


def seconds_of(call: Call, count: int = 1) -> float:
    """Returns the mean seconds of so many calls."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def stay_awake(seconds: float = 0.03) -> None:
    """Spins while the threads of the library before still spin: asleep we might wake on the core of one of ours."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def sampler(
    call: Call, *, seconds: float = 0.02, most: int = 400, clock: Callable[[Call, int], float] = seconds_of
) -> Callable[[], float]:
    """Returns what takes a sample: the mean of as many calls as last `seconds`, after one that warms caches."""
    call()
    once = clock(call, 1)
    count = max(1, min(most, round(seconds / max(once, 1e-7))))

    def sample() -> float:
        stay_awake()
        if once < _LONG:
            call()
        return clock(call, count)

    return sample


def measure(
    calls: Mapping[str, Call], turns: int, peak: Callable[[], float] | None = None, **how: Any
) -> dict[str, list[float]]:
    """Returns seconds of each call, turn after turn, and "peak" of the same turns; `how` is sampler's."""
    samples = {} if peak is None else {"peak": peak}
    return alternate(samples | {name: sampler(call, **how) for name, call in calls.items()}, turns)


def quantiles(times: Iterable[float]) -> list[float]:
    """Returns the least, the quartiles and the most."""
    return [float(x) for x in np.quantile(list(times), (0, 0.25, 0.5, 0.75, 1))]


def ratios(times: Mapping[str, list[float]], to: str = "speedlight") -> dict[str, list[float]]:
    """Returns quantiles of the others' times over ours, turn by turn, so that what slows both down does not count."""
    return {
        name: quantiles(a / b for a, b in zip(some, times[to], strict=True))
        for name, some in times.items()
        if name != to
    }


# --- right results


def as_float64(x: Any) -> np.ndarray:
    """Returns anybody's result, a list's first, as a float64 array."""
    if isinstance(x, (list, tuple)) or hasattr(x, "to_tuple"):  # which OpenVINO's have
        x = x[0]
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    return np.asarray(x).astype(np.float64)


def wrong(
    got: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    heads: int = 1,
    rows: int = 256,
    slack: float = 1,
    arithmetic: dict[str, Any] | None = None,
    **options: Any,
) -> str | None:
    """Says how many elements, of the last rows of the first heads, are outside the error bound; None if none is.

    slack: bounds that an element may be away. arithmetic: error_bound()'s options, if not of arrays on the CPU. The
    other options are attention()'s.
    """
    rows, kv_heads = min(rows, q.shape[2]), -(-heads * k.shape[1] // q.shape[1])
    few = [_on_host(x) for x in (q[:1, :heads, -rows:], k[:1, :kv_heads], v[:1, :kv_heads])]
    want = sl.reference.attention(*few, **options)
    bound = sl.reference.error_bound(*few, **(arithmetic or {"dot": machine.current_isa().dot(q.dtype)}), **options).out
    return _outside([(as_float64(got)[:1, :heads, -rows:], want, bound * slack)])


def wrong_gradients(
    got: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *, slack: float = 1, **options: Any
) -> str | None:
    """Says how many elements, of dq in the last rows and dk and dv in the first keys of a head, are outside the bound.

    Those depend on all keys, and on all rows; the lse that is given may be of more keys than there are.
    """
    q, k, v, out, lse, d_out = (_on_host(x[:, :1]) for x in (q, k, v, out, lse, d_out))
    last, first = slice(max(0, q.shape[2] - 256), q.shape[2]), slice(0, 256)
    by_rows = (q[:, :, last], k, v, out[:, :, last], lse[:, :, last], d_out[:, :, last])
    by_keys = (q, k[:, :, first], v[:, :, first], out, lse, d_out)
    checked = []
    for given, start, parts in ((by_rows, last.start, {0: last}), (by_keys, 0, {1: first, 2: first})):
        want = sl.reference.backward(*given, q_start=start, **options)
        bound = sl.reference.backward_bound(
            *given, q_start=start, dot=machine.current_isa().dot(q.dtype, gradients=True), **options
        )
        checked += [(as_float64(got[n])[:, :1, part], want[n], bound[n] * slack) for n, part in parts.items()]
    return _outside(checked)


def _on_host(x: Any) -> Any:
    return x.detach().cpu() if hasattr(x, "detach") else x


def _outside(results: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> str | None:
    total = sum(got.size for got, *_ in results)
    outside = sum(int((~(np.abs(got - want) <= bound)).sum()) for got, want, bound in results)
    return f"{outside} of {total} elements outside the bound" if outside else None


# --- rows


class Problem(NamedTuple):
    """Attention of a tensor over itself, one item, as many heads of keys as of queries."""

    dtype: str
    heads: int
    length: int
    head_dim: int
    causal: bool
    backward: bool = False

    @property
    def name(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} H{self.heads} N{self.length} d{self.head_dim} {mask}{' backward' * self.backward}"


def problems_of(
    dtypes: list[str] | None, dims: list[int] | None, lengths: list[int] | None, causal: bool | None, heads: int,
    backward: bool,
) -> list[Problem]:  # fmt: skip
    """Returns all problems of these sizes; None stands for the usual ones."""
    dtypes, masks = dtypes or ["float32", "float16", "bfloat16"], (False, True) if causal is None else (causal,)
    sizes = itertools.product(dtypes, dims or (64, 128), lengths or (128, 512, 2048, 8192), masks)
    return [Problem(t, heads, n, d, c, backward) for t, d, n, c in sizes]


def tensors(dtype: str, heads: int, n: int, d: int) -> list[np.ndarray]:
    """Returns q, k and v, [1, heads, n, d], of normal numbers."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return [rng.standard_normal((1, heads, n, d)).astype(kind) for _ in range(3)]


def row_of(problem: Problem, turns: int, names: Iterable[str]) -> dict[str, Any]:
    """Measures a problem beside peers of these names; a result that is wrong leaves "refused" alone."""
    arrays, options = tensors(*problem[:4]), {"causal": problem.causal}
    plan, held = sl.plan(*arrays, backward=problem.backward, **options), wrong
    call: Call = lambda: sl.attention(*arrays, **options)  # noqa: E731
    if problem.backward:
        out, lse = sl.attention(*arrays, return_lse=True, **options)
        arrays += [out, lse, np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)]
        call, held = lambda: sl.attention_backward(*arrays, **options), wrong_gradients
    row = {"name": problem.name} | problem._asdict()
    if refused := held(call(), *arrays, **options):
        return row | {"refused": refused}
    asked = Asked(*arrays[:3], causal=problem.causal, d_out=arrays[5] if problem.backward else None)
    peers = {name: PEERS[name] for name in names}
    others, notes = usable(peers, asked, lambda got: held(got, *arrays, slack=PEER_SLACK, **options))
    isa, threads = machine.current_isa(), sl.get_threads()
    kind = roof.kind_of_peak(isa, DTYPES[problem.dtype][0])
    times = measure({"speedlight": call} | others, turns, lambda: roof.peak_flops(isa, kind, threads))
    peak, flops = statistics.median(times.pop("peak")), plan.flops or 0
    speed = flops / statistics.median(times["speedlight"])
    return row | {
        "kernel": plan.kernel, "flops": flops, "bytes_moved": plan.bytes_read + plan.bytes_written,
        "gflops": speed / 1e9, "peak": peak / 1e9, "share_of_peak": speed / peak,
        "read_bandwidth": _read_bandwidth(isa, threads), "seconds": {x: quantiles(t) for x, t in times.items()},
        "ratios": ratios(times), "notes": notes,
    }  # fmt: skip


@functools.cache
def _read_bandwidth(isa: machine.Isa, threads: int) -> float:
    return roof.bandwidth(isa, threads, 512 << 20)


def about(*packages: str) -> dict[str, Any]:
    """Returns the machine, whence its schedules come, versions and the time: the head of a report."""
    versions = {"python": platform.python_version(), "speedlight": sl.__version__}
    for package in ("numpy", "llvmlite", "torch", "onnxruntime", "openvino", "jax", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    isa = machine.current_isa()
    return {
        "machine": machine.cpu_name(), "family": FAMILIES[machine.cpu_family()], "threads": sl.get_threads(),
        "isa": isa.name, "schedule": tuning_of(isa).origin._asdict(), "versions": versions,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip
