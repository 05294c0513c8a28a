"""Times on a GPU: main rows and roofs, the host's microseconds, tiles, and every row of benchmarks/gpu.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu
import torch

import speedlight as sl
from speedlight.gpu import differentiate
from speedlight.gpu.tiles import GradientRow, Tile
from speedlight.host import machine
from speedlight.tools import gpu_tiles

from . import problems
from .problems import GPU, need_device
from .running import Item, NoDevice

MAIN = ("cudnn", "flash")  # peers of the main rows
TURNS = 3  # samples of a row or tile
_CALLS = 200  # for the host's time

# rows, keys, warps, stages, registers: of the kernel for dQ, and of the one for dK and dV
PAIRS = [
    ((128, 64, 8, 2), (64, 64, 8, 2)),
    ((64, 64, 8, 2), (32, 64, 8, 2)),
    ((128, 128, 8, 1), (64, 128, 8, 1)),
    ((64, 64, 4, 2), (64, 64, 8, 1)),
    ((64, 128, 8, 2), (32, 128, 8, 2)),
]
FULL = [
    Tile(128, 128, 8, 2, True, producer=True),
    Tile(128, 128, 8, 2, True),
    Tile(128, 128, 8, 3, True, producer=True),
    Tile(128, 64, 8, 3, True, producer=True),
    Tile(128, 64, 8, 3, True),
    Tile(128, 64, 8, 4, True),
    Tile(64, 128, 4, 2, True),
    Tile(64, 64, 4, 3, True),
    Tile(128, 128, 8, 2),
    Tile(256, 64, 8, 2, True),
]
DECODE = [Tile(16, keys, warps, stages) for keys, warps, stages in ((64, 4, 3), (128, 4, 2), (64, 2, 4), (128, 8, 3))]


def main_rows() -> Iterator[Item]:
    """Yields the figures that matter most."""
    yield Item("roofs", roofs)
    for name, call in (
        ("forward full", lambda: gpu.forward("bfloat16", 128, gpu.MAIN, False, TURNS, MAIN)),
        ("forward causal", lambda: gpu.forward("bfloat16", 128, gpu.MAIN, True, TURNS, MAIN)),
        ("backward causal", lambda: gpu.backward("bfloat16", 128, gpu.MAIN, True, TURNS, MAIN)),
        ("decode B32 N4096", lambda: gpu.decode(32, 4096, TURNS)),
        ("decode B32 N32768", lambda: gpu.decode(32, 32768, TURNS)),
    ):
        yield Item(f"main {name}", _alone(call))
    yield Item("kernels and host", kernels_and_host)


def every_row() -> Iterator[Item]:
    """Yields the rows of the benchmark."""
    for name, call in gpu.cases(TURNS):
        yield Item(name, _alone(call))


def flex_graphs() -> Iterator[Item]:
    """Yields the rows beside FlexAttention, up to their times: PyTorch keeps what it compiled for the rows."""
    causal = [(d, is_causal) for d in gpu.DIMS for is_causal in (False, True)]
    cases: list[tuple[str, Callable[[], Any]]] = [
        (f"mask {name}", lambda name=name: gpu.masked(name, gpu.MAIN, 1)) for name in gpu.MASKS
    ]
    for d, c in causal:
        cases.append((f"forward d{d} {c}", lambda d=d, c=c: gpu.forward("bfloat16", d, gpu.MAIN, c, 1, ("flex",))))
        if d < 256:
            cases.append(
                (f"backward d{d} {c}", lambda d=d, c=c: gpu.backward("bfloat16", d, gpu.MAIN, c, 1, ("flex",)))
            )
    yield from (Item(f"FlexAttention {name}", _alone(_untimed(call))) for name, call in cases)


def _untimed(call: Callable[[], Any]) -> Callable[[], str]:
    """Returns the call, which ends where it would be timed, in a process of its own."""

    def run() -> str:
        gpu.measured = _no_device
        try:
            call()
        except NoDevice:
            if problems.is_dry:
                raise
        return "ready"

    return run


def tiles() -> Iterator[Item]:
    """Yields candidates of the table of tiles."""
    yield from _forward_tiles(128)
    yield from (Item(f"tile backward d128 causal {a} {b}", lambda a=a, b=b: _backward_tile(a, b)) for a, b in PAIRS)
    yield from (_tile("decode", 128, tile) for tile in DECODE)
    yield from _forward_tiles(64)


def _forward_tiles(d: int) -> Iterator[Item]:
    yield from (_tile(kind, d, tile) for kind in ("full", "causal") for tile in FULL)


def _tile(kind: str, d: int, tile: Tile) -> Item:
    words = f"{tile.rows}x{tile.keys} {tile.warps} warps {tile.stages} stages"
    name = f"tile {kind} d{d} {words}{' TMA' * tile.use_tma}{' producer' * tile.producer}"

    def run() -> str:
        length = 4096 if kind == "decode" else gpu.MAIN
        found = gpu_tiles.tune("bfloat16", d, kind, TURNS, length=length, tiles=[tile])
        return f"{found[0][0] * 1e6:,.1f} us" if found else "WRONG, or too large for this GPU"

    return Item(name, _alone(run))


def _backward_tile(queries: tuple[int, ...], keys: tuple[int, ...]) -> Any:
    real, (a, b) = differentiate.gradient_row, [Tile(x[0], x[1], x[2], x[3], registers=255) for x in (queries, keys)]
    row = GradientRow(512, a, b)
    differentiate.gradient_row = lambda *_, **__: row
    try:
        return _alone(lambda: gpu.backward("bfloat16", 128, gpu.MAIN, True, TURNS, ()))()
    finally:
        differentiate.gradient_row = real


def _alone(call: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the call with the memory of others freed; in a dry run it ends where results would be read."""

    def run() -> Any:
        if not problems.is_dry:
            if not machine.interpreting():
                torch.cuda.empty_cache()
            return call()
        changed = {(gpu, "drawn"): problems.drawn, (gpu_tiles, "drawn"): problems.drawn}
        changed |= dict.fromkeys(_ENDS, _no_device)
        before = {at: getattr(*at) for at in changed}
        try:
            for (module, name), value in changed.items():
                setattr(module, name, value)
            return call()
        finally:
            for (module, name), value in before.items():
                setattr(module, name, value)

    return run


_ENDS = ((gpu, "judge"), (gpu, "judge_gradients"), (gpu_tiles, "wrong"))


def _no_device(*_: Any, **__: Any) -> Any:
    raise NoDevice


def roofs() -> str:
    need_device(interpreter=False)
    rates = gpu.roofs(TURNS)
    products = ", ".join(f"{name} {rates[name] / 1e12:,.0f} TFLOP/s" for name in ("bfloat16", "float32"))
    return f"a copy {rates['copy'] / 1e9:,.0f} GB/s; products {products}"


def kernels_and_host() -> str:
    """Says how long each kernel takes by the profiler, and what calls cost the host."""
    q, k, v = (problems.drawn(2, 16, 8192, 128, seed=s) for s in range(3))
    token, *keys = problems.drawn(8, 32, 1, 128), *(problems.drawn(8, 8, 4096, 128, seed=s) for s in (1, 2))
    x, y, z = (problems.drawn(1, 2, 64, 64, seed=s) for s in range(3))
    calls: dict[str, Callable[[], Any]] = {
        "prefill": lambda: sl.attention(q, k, v, causal=True, **GPU),
        "decode": lambda: sl.attention(token, *keys, **GPU),
        "small": lambda: sl.attention(x, y, z, **GPU),
        "small by PyTorch": lambda: torch.nn.functional.scaled_dot_product_attention(x, y, z),
    }
    for call in calls.values():
        call()
    need_device(interpreter=False)
    texts = []
    for name in ("decode", "small", "small by PyTorch"):
        start = time.perf_counter()
        for _ in range(_CALLS):
            calls[name]()
        texts.append(f"host of {name} {(time.perf_counter() - start) / _CALLS * 1e6:,.0f} us")
        torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for name in ("prefill", "decode"):
            calls[name]()
        torch.cuda.synchronize()
    for event in profile.key_averages():
        if event.self_device_time_total:
            texts.append(f"{event.key[:40]} {event.self_device_time_total / event.count:,.1f} us x {event.count}")
    return "; ".join(texts)
