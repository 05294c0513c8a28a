"""The one harness of all measurements: calls in alternation, results held to their error bounds, rows of figures."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ml_dtypes
import numpy as np

import speedlight as sl

from ..arrays.dtypes import CODES, DTYPES, scales_of
from ..cpu.runtime import roof
from ..cpu.runtime.tuned import tuning_of
from ..host import machine
from ..host.others import Others
from ..host.tunings import FAMILIES
from ..problem import problem
from .peers import PEERS, Asked, Call, usable

PEER_SLACK = 64  # error bounds that a peer may be away from float64: PyTorch rounds scores to float16, 24 of them
Judge = Callable[..., "str | None"]  # of a result and, if not 1, how many bounds an element may be away
APART = "apart"  # the contender whose sequences have copies of what ours share
_PAGE = 16  # tokens
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


def stay_awake(seconds: float = 0.1) -> None:
    """Spins while the threads of the library before still spin (ONNX Runtime's: some 70 ms after a call); asleep we
    might wake on the core of one of ours.
    """
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
    return judge(q, k, v, heads=heads, rows=rows, arithmetic=arithmetic, **options)(got, slack)


def arithmetic_of_cache(dtype: str, queries: Any) -> dict[str, Any] | None:
    """Returns what wrong() is told of results of a cache of this dtype under queries of another; None: nothing."""
    if dtype not in CODES:
        return None
    return {"codes": dtype, "dot": machine.current_isa().dot(queries, codes=scales_of(dtype, latent=False))}


def judge(
    q: Any, k: Any, v: Any, *, heads: int = 1, rows: int = 256, arithmetic: dict[str, Any] | None = None, **options: Any
) -> Judge:
    """Returns the function that says what wrong() does of each result that it is given, by one reference for all."""
    rows, kv_heads = min(rows, q.shape[2]), -(-heads * k.shape[1] // q.shape[1])
    few = [_on_host(x) for x in (q[:1, :heads, -rows:], k[:1, :kv_heads], v[:1, :kv_heads])]
    of_codes = arithmetic is not None and "codes" in arithmetic  # whose k and v are float32
    want = sl.reference.attention(few[0].astype(np.float32) if of_codes else few[0], *few[1:], **options)
    bound = sl.reference.error_bound(*few, **(arithmetic or {"dot": machine.current_isa().dot(q.dtype)}), **options).out
    return lambda got, slack=1: _outside([(as_float64(got)[:1, :heads, -rows:], want, bound * slack)])


def wrong_gradients(
    got: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *, slack: float = 1,
    arithmetic: dict[str, Any] | None = None, **options: Any,
) -> str | None:  # fmt: skip
    """Says how many elements, of dq in the last rows and dk and dv in the first keys of a head, are outside the bound.

    Those depend on all keys, and on all rows; the lse that is given may be of more keys than there are.
    """
    return judge_gradients(q, k, v, out, lse, d_out, arithmetic=arithmetic, **options)(got, slack)


def judge_gradients(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, *, arithmetic: dict[str, Any] | None = None, **options: Any
) -> Judge:
    """Returns the function that says what wrong_gradients() does of each result that it is given."""
    heads = q.shape[1] // k.shape[1]  # that share a head of k and v
    q, out, lse, d_out = (_on_host(x[:1, :heads]) for x in (q, out, lse, d_out))
    k, v, offset = _on_host(k[:1, :1]), _on_host(v[:1, :1]), k.shape[2] - q.shape[2]
    last, first = slice(max(0, q.shape[2] - 256), q.shape[2]), slice(0, 256)
    by_rows = (q[:, :, last], k, v, out[:, :, last], lse[:, :, last], d_out[:, :, last])
    by_keys = (q, k[:, :, first], v[:, :, first], out, lse, d_out)
    known = []
    for given, start, parts in ((by_rows, last.start, {0: last}), (by_keys, 0, {1: first, 2: first})):
        how = arithmetic or {"dot": machine.current_isa().dot(q.dtype, gradients=True)}
        want = sl.reference.backward(*given, q_start=offset + start, **options)
        bound = sl.reference.backward_bound(*given, q_start=offset + start, **how, **options)
        parts = {n: (slice(1), slice(want[n].shape[1]), part) for n, part in parts.items()}
        known += [(n, part, want[n], bound[n]) for n, part in parts.items()]
    return lambda got, slack=1: _outside(
        [(as_float64(got[n])[part], want, bound * slack) for n, part, want, bound in known]
    )


def _on_host(x: Any) -> Any:
    return x.detach().cpu() if hasattr(x, "detach") else x


def _outside(results: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> str | None:
    total = sum(got.size for got, *_ in results)
    outside = sum(int((~(np.abs(got - want) <= bound)).sum()) for got, want, bound in results)
    return f"{outside} of {total} elements outside the bound" if outside else None


# --- rows


def normal_numbers(dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    """Returns arrays of normal numbers."""
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    return [rng.standard_normal(shape).astype(kind) for shape in shapes]


def measure_plan(
    plan: sl.Plan, options: dict[str, Any], turns: int, names: Iterable[str], *, decode: bool = False
) -> dict[str, Any]:
    """Measures a planned call with these options of attention(), beside peers of these names; `decode`: from a cache.

    Returns a row's figures; of a result that is wrong only "refused", and why.
    """
    p, ours = plan.problem, dict[str, Call]()
    if plan.shared_prefix:
        call, arrays, ours[APART] = _shared(plan, options)
    else:
        call, arrays = _decoded(p, options) if decode else _called(plan, options)
    shape = (*arrays[0].shape[:3], p.value_dim)
    find_wrong = functools.partial(_wrong_of_item, p, arrays, {n: x for n, x in options.items() if n != "lengths"})
    if refused := find_wrong(_in_shape(call(), shape)):
        return {"refused": refused}
    if ours and call().tobytes() != ours[APART]().tobytes():
        return {"refused": "sequences that share keys have other bits than sequences apart"}
    peers = {name: PEERS[name] for name in names}
    asked = Asked.of(p, arrays)
    if plan.latent and asked.q.shape[2] == 1:
        asked = _with_heads_as_rows(asked)
    others, notes = usable(peers, asked, lambda got: find_wrong(_in_shape(got, shape), slack=PEER_SLACK))
    isa, threads = machine.current_isa(), sl.get_threads()
    kind = roof.kind_of_peak(isa, DTYPES[p.dtype][0])
    programs = Others()
    times = measure({"speedlight": call} | ours | others, turns, lambda: roof.peak_flops(isa, kind, threads))
    taken = programs.share()
    peak, flops = statistics.median(times.pop("peak")), plan.flops or 0
    seconds, read = statistics.median(times["speedlight"]), _read_bandwidth(isa, threads)
    moved, speed = plan.bytes_read + plan.bytes_written, flops / seconds
    return {
        "kernel": plan.kernel, "flops": flops, "bytes_moved": moved, "gflops": speed / 1e9, "peak": peak / 1e9,
        "share_of_peak": speed / peak, "share_of_roof": max(speed / peak, moved / seconds / read),
        "read_bandwidth": read, "seconds": {x: quantiles(t) for x, t in times.items()},
        "ratios": ratios(times), "notes": notes, "others": taken,
    }  # fmt: skip


def _drawn(p: problem.Problem) -> list[np.ndarray]:
    """Returns q, k and v of a problem."""
    q_shape, shape = (p.batch, p.q_heads, max(p.q_lengths), p.head_dim), (p.batch, p.kv_heads, max(p.k_lengths))
    return normal_numbers(p.dtype, q_shape, (*shape, p.head_dim), (*shape, p.value_dim))


def _with_heads_as_rows(asked: Asked) -> Asked:
    """Returns the problem in which query heads that share keys are rows, as others are fastest over latents."""
    q, heads = asked.q, asked.k.shape[1]
    rows = q.reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[3])
    return asked._replace(q=rows)


def _in_shape(got: Any, shape: tuple[int, ...]) -> Any:
    """Returns a result as one array, where it is one whose heads may be rows; gradients stay."""
    return as_float64(got).reshape(shape) if hasattr(got, "shape") else got


def _called(plan: sl.Plan, options: dict[str, Any]) -> tuple[Call, list[np.ndarray]]:
    """Returns the call, forward or backward, and its arrays."""
    q, k, v = arrays = _drawn(plan.problem)
    if plan.latent:
        columns = plan.problem.value_dim
        arrays[2] = np.ascontiguousarray(k[..., :columns])  # others' own
        return lambda: sl.attention(q, k, None, value_dim=columns, **options), arrays
    if not plan.backward:
        return lambda: sl.attention(q, k, v, **options), arrays
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    d_out = np.random.default_rng(1).standard_normal(out.shape).astype(out.dtype)
    for item, length in zip(d_out, plan.problem.q_lengths, strict=True):
        item[:, length:] = 0  # to others what is padded is a row like any
    arrays += [out, lse, d_out]
    return lambda: sl.attention_backward(*arrays, **options), arrays


def _decoded(p: problem.Problem, options: dict[str, Any]) -> tuple[Call, list[np.ndarray]]:
    """Returns one step over a cache, and its arrays."""
    q, k, v = arrays = _drawn(p)
    sizes: dict[str, Any] = {"kv_heads": p.kv_heads, "head_dim": p.head_dim, "value_dim": p.value_dim}
    cache = sl.KVCache(layers=1, **sizes | {"batch": p.batch, "capacity": k.shape[2], "dtype": p.dtype})
    cache.append(0, k, v, new_lengths=list(p.k_lengths))
    own = {n: x for n, x in options.items() if n in ("score", "dropout", "seed")}  # the query is at the last token
    return lambda: cache.attend(0, q, mask=p.mask, **own), arrays


def _shared(plan: sl.Plan, options: dict[str, Any]) -> tuple[Call, list[np.ndarray], Call]:
    """Returns one step of forks of a prefix in a pool, its arrays, and the step of sequences that have copies of it."""
    p, prefix = plan.problem, slice(plan.shared_prefix)
    q, k, v = arrays = _drawn(p)
    for x in (k, v):
        x[1:, :, prefix] = x[0, :, prefix]
    longest, rows = -(-k.shape[2] // _PAGE), np.ascontiguousarray(q[:, :, 0])
    sizes: dict[str, Any] = {"kv_heads": p.kv_heads, "head_dim": p.head_dim, "value_dim": p.value_dim, "dtype": p.dtype}
    own = {"mask": p.mask, "score": options["score"]}  # the query is at the last token
    calls: list[Call] = []
    for is_shared in (True, False):
        pool = sl.PagePool(layers=1, pages=(p.batch + 1) * longest, page_size=_PAGE, **sizes)
        first = pool.sequence()
        pool.append(0, [first], _packed(k[0, :, prefix]), _packed(v[0, :, prefix]))
        sequences = [first.fork() if is_shared else pool.sequence() for _ in range(p.batch)]
        for sequence, keys, values, length in zip(sequences, k, v, p.k_lengths, strict=True):
            rest = slice(sequence.length(), length)
            pool.append(0, [sequence], _packed(keys[:, rest]), _packed(values[:, rest]))
        calls.append(functools.partial(pool.attend, 0, sequences, rows, **own))
    return calls[0], arrays, calls[1]


def _packed(x: np.ndarray) -> np.ndarray:
    """Returns keys or values (heads, tokens, dim) as a pool takes them, (tokens, heads, dim)."""
    return np.ascontiguousarray(x.swapaxes(0, 1))


def _wrong_of_item(
    p: problem.Problem, arrays: list[np.ndarray], options: dict[str, Any], got: Any, *, slack: float = 1
) -> str | None:
    """Holds a result of padded sequences to its bound: the first one's."""
    queries, keys = ((slice(1), slice(None), slice(lengths[0])) for lengths in (p.q_lengths, p.k_lengths))
    parts = (queries, keys, keys, queries, queries, queries)
    own = [x[part] for x, part in zip(arrays, parts, strict=False)]
    if len(arrays) == 3:
        return wrong(as_float64(got)[queries], *own, slack=slack, **options)
    results = [as_float64(x)[part] for x, part in zip(got, parts, strict=False)]
    return wrong_gradients(results, *own, slack=slack, **options)


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
