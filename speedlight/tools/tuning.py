"""`speedlight tune`: which tiles a GPU takes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from .. import engine
from ..errors import ArgumentError
from .options import Json, check_device
from .reports import print_json, progress

_KNOWN = {
    "dtype": ("float16", "bfloat16", "float32"),
    "head_dim": (64, 128, 256, 512),
    "kind": ("full", "masked", "decode"),
}


def tune(
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32.")] = "bfloat16",
    head_dim: Annotated[int, typer.Option(help="64, 128, 256 or 512.")] = 128,
    kind: Annotated[str, typer.Option(help="full, masked or decode.")] = "full",
    turns: Annotated[int, typer.Option(help="Samples of each tile.")] = 3,
    as_json: Json = False,
) -> None:
    """Measures the GPU kernel's tiles, best first: what gpu/tiles.py should say for this device."""
    given: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "kind": kind}
    for name, known in _KNOWN.items():
        if given[name] not in known:
            raise ArgumentError(f"{name}: expected one of {', '.join(map(str, known))}; got {given[name]!r}.")
    if turns < 1:
        raise ArgumentError(f"turns: expected at least 1; got {turns}.")
    check_device("cuda")
    engine.resident().device_of("cuda")
    from . import gpu

    with progress("tiles", None):
        measured = gpu.tune(dtype, head_dim, kind, turns)
    if as_json:
        print_json({"tiles": [{"seconds": seconds} | asdict(tile) for seconds, tile in measured]})
        return
    for seconds, tile in measured:
        print(f"{seconds * 1e6:10,.1f} us  {tile}")
