"""A GPU's clock and inputs, and which tiles of its kernel are the fastest: `speedlight tune --device cuda`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import speedlight as sl

from ..arrays.array import describe
from ..gpu.keys import arrays_of
from ..gpu.prepare import prepare
from ..gpu.schedule import capability
from ..gpu.tiles import Tile
from ..host.machine import interpreting
from ..problem.build import from_arrays
from ..problem.options import Options
from .measuring import measure, quantiles, seconds_of, wrong
from .peers import Call

OF_GPU = {"tile": 16}  # keys of a block, at least, of which the error bound knows


def device() -> torch.device:
    return torch.device("cpu") if interpreting() else torch.device("cuda")


def drawn(*shape: int, dtype: str, seed: int) -> torch.Tensor:
    """Returns normal numbers, made where they are used."""
    generator = torch.Generator(device()).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device(), dtype=torch.float32).to(getattr(torch, dtype))


def device_seconds(call: Call, count: int = 1) -> float:
    """Returns the mean seconds of so many calls, on the device's own clock."""
    if interpreting():
        return seconds_of(call, count)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def measured(calls: dict[str, Call], turns: int) -> dict[str, list[float]]:
    """Returns quantiles of each call's seconds."""
    times = measure(calls, turns, clock=device_seconds, most=1000)
    return {name: quantiles(some) for name, some in times.items()}


def candidates(kind: str, tma: bool) -> list[Tile]:
    """Returns tiles that may be the best of a kind: full, causal, masked or decode."""
    decoding = kind == "decode"
    found = [
        Tile(rows, keys, warps, stages, use_tma)
        for rows in ((16,) if decoding else (64, 128))
        for keys in (32, 64, 128)
        for warps in (4, 8)
        for stages in (2, 3, 4)
        for use_tma in ((False, True) if tma and not decoding else (False,))
        if rows * keys >= 16 * 32 * (1 if decoding else 4)
    ]
    wide = [x for x in found if x.use_tma and x.rows == 128 and x.warps == 8 and kind != "masked"]
    return found + [replace(x, producer=True) for x in wide]


def tune(
    dtype: str, d: int, kind: str, turns: int = 3, *, length: int = 4096, tiles: list[Tile] | None = None
) -> list[tuple[float, Tile]]:
    """Returns seconds and tile of a kind, the best first; each tile's result is checked before it is timed."""
    decoding = kind == "decode"
    kinds: dict[str, dict[str, Any]] = {"causal": {"causal": True}, "masked": {"mask": sl.window(length // 4, 0)}}
    options = kinds.get(kind, {})
    batch, heads, kv_heads = (32, 32, 8) if decoding else (4, 16, 16)
    q = drawn(batch, heads, 1 if decoding else length, d, dtype=dtype, seed=0)
    k, v = (drawn(batch, kv_heads, length, d, dtype=dtype, seed=s) for s in (1, 2))
    out, keys = torch.empty_like(q), arrays_of(k, v, "bhld")
    a, b, c = (describe(x, name, gpu=True) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    problem = from_arrays(a, b, c, Options(**options)).problem
    timed = []
    for tile in tiles or candidates(kind, capability(str(q.device)) >= (9, 0)):
        try:
            call = prepare(problem, "bhld", str(q.device), keys, tile=tile)
            call.run(q, keys, out, None)
        except sl.Error:
            continue  # too little shared memory
        if not wrong(out, q, k, v, rows=64, arithmetic=OF_GPU, **options):
            times = measured({"tile": lambda call=call: call.run(q, keys, out, None)}, turns)
            timed.append((times["tile"][2], tile))
    return sorted(timed, key=lambda x: x[0])
