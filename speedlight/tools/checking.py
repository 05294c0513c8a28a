"""`speedlight check`: an installation's parts, each held to float64 or to its own bits, in some ten seconds."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator

import numpy as np
import typer

import speedlight as sl

from ..host import machine
from .measuring import about, as_float64, normal_numbers, wrong, wrong_gradients
from .options import Json, on_unit
from .peers import as_tensors
from .reports import print_json, print_rows, progress

_SHAPES = (1, 4, 200, 64), (1, 2, 200, 64), (1, 2, 200, 64)  # of q, k and v: a group of two, and no whole tile


class WrongError(Exception):
    """A check that found another result than the one that is right."""


def check(as_json: Json = False) -> None:
    """Checks this installation in some ten seconds, and prints what to paste into an issue.

    The exit status is 1 if a check fails.
    """
    checks, outcomes = list(_checks()), {}
    with progress("checks", len(checks)) as advance:
        for name, run in checks:
            try:
                outcomes[name] = f"passed: {run()}"
            except Exception as error:  # whatever is broken, the others are still worth knowing
                kind = "" if isinstance(error, WrongError) else f"{type(error).__name__}: "
                outcomes[name] = f"FAILED: {kind}{(str(error).splitlines() or ['no words'])[0]}"
            advance()
    failed = [name for name, text in outcomes.items() if text.startswith("FAILED")]
    if as_json:
        print_json(about() | {"system": platform.platform(), "checks": outcomes, "passed": not failed})
    else:
        told = f"{len(failed)} of {len(checks)} checks failed: paste these lines into an issue"
        verdict = told if failed else "everything works"
        print_rows([*_machine_rows(), *outcomes.items(), ("verdict", verdict)])
    if failed:
        raise typer.Exit(1)


def _machine_rows() -> list[tuple[str, str]]:
    """Returns the lines that say where the checks ran."""
    head = about()
    given = [f"{name}={x}" for name, x in sorted(os.environ.items()) if name.startswith("SPEEDLIGHT_")]
    return [
        ("machine", f"{head['machine']}, {os.cpu_count()} cores, {head['threads']} threads, {head['isa']}"),
        ("system", platform.platform()),
        ("versions", ", ".join(f"{name} {x}" for name, x in head["versions"].items())),
        *([("environment", " ".join(given))] if given else []),
    ]


def _checks() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields the name of each check, and what runs it: it says what it did, or raises."""
    for unit in machine.host_isas():
        yield unit.name, lambda unit=unit: _forward(["float32", "bfloat16"], unit.name)
    yield "forward", lambda: _forward(["float32", "float64", "float16", "bfloat16"])
    yield "backward", _backward
    yield "cache", _cache
    yield "threads", _threads
    for library in ("torch", "jax", "onnxruntime", "openvino"):
        if library in about()["versions"]:
            yield library, lambda library=library: _peer(library)


def _hold(what: str, told: str | None) -> None:
    """Raises for what a comparison tells."""
    if told is not None:
        raise WrongError(f"{what}: {told}")


def _forward(dtypes: list[str], unit: str | None = None) -> str:
    with on_unit(unit):
        for dtype in dtypes:
            q, k, v = normal_numbers(dtype, *_SHAPES)
            _hold(dtype, wrong(sl.attention(q, k, v, causal=True), q, k, v, heads=4, causal=True))
    return f"{', '.join(dtypes)} are within their bounds of float64"


def _backward() -> str:
    q, k, v, d_out = normal_numbers("float32", *_SHAPES, _SHAPES[0])
    out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    given = q, k, v, out, lse, d_out
    _hold("gradients", wrong_gradients(sl.attention_backward(*given, causal=True), *given, causal=True))
    return "gradients are within their bounds of float64"


def _cache() -> str:
    q, k, v = normal_numbers("float32", *_SHAPES)
    for dtype in ("float32", "int8"):
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=64, capacity=200, dtype=dtype)
        chunks = [cache.attend(0, *(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 150), (150, 199), (199, 200))]
        out, stored = np.concatenate(chunks, axis=2), (cache.keys(0), cache.values(0))
        if dtype == "float32" and out.tobytes() != sl.attention(q, k, v, causal=True).tobytes():
            raise WrongError("a sequence in chunks has other bits than one call")
        arithmetic = {"int8": True} if dtype == "int8" else None
        _hold(dtype, wrong(out, q, *stored, heads=4, arithmetic=arithmetic, causal=True))
    return "chunks have the bits of one call; int8 is within its bound"


def _threads() -> str:
    before, bits = sl.get_threads(), set()
    q, k, v = normal_numbers("float32", (1, 8, 700, 64), *[(1, 8, 700, 64)] * 2)
    several = max(2, before)
    try:
        for threads in (1, several):
            sl.set_threads(threads)
            bits.add(sl.attention(q, k, v).tobytes())
    finally:
        sl.set_threads(before)
    if len(bits) > 1:
        raise WrongError(f"1 thread has other bits than {several}")
    return f"1 thread has the bits of {several}"


def _peer(library: str) -> str:
    """PyTorch's tensors have the bits of NumPy's arrays; the others are there for `speedlight bench`."""
    if library != "torch":
        return f"found, which `speedlight bench --peer {library}` measures"
    arrays = normal_numbers("float32", *_SHAPES)
    if not np.array_equal(as_float64(sl.attention(*as_tensors(*arrays))), as_float64(sl.attention(*arrays))):
        raise WrongError("its tensors have other bits than NumPy's arrays")
    return "its tensors have the bits of NumPy's arrays"
