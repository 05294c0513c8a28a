"""`speedlight check`: an installation's parts, each held to float64 or to its own bits, in some ten seconds."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import typer

import speedlight as sl

from ..host import machine
from ..problem.options import DtypeName
from .measuring import about, arithmetic_of_cache, as_float64, normal_numbers, wrong, wrong_gradients
from .options import Json, on_unit
from .peers import as_tensors
from .reports import print_report, progress

_SHAPES = (1, 4, 200, 64), (1, 2, 200, 64), (1, 2, 200, 64)  # of q, k and v: a group of two, and no whole tile
_DTYPES = "float32", "bfloat16", "float16", "float64"
_CACHES: tuple[tuple[DtypeName, str], ...] = (  # and the dtype of queries
    ("float32", "float32"),
    ("int8", "float32"),
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
)


def check(as_json: Json = False) -> None:
    """Checks this installation in some ten seconds, and prints what to paste into an issue.

    The exit status is 1 if a check fails.
    """
    checks, outcomes = list(_checks()), {}
    with progress("checks", len(checks)) as advance:
        for name, claim, find_wrong in checks:
            try:
                told = find_wrong()
            except Exception as error:  # whatever is broken, the others are still worth knowing
                told = f"{type(error).__name__}: {(str(error).splitlines() or ['no words'])[0]}"
            outcomes[name] = f"FAILED: {told}" if told else f"passed: {claim}"
            advance()
    failed = [name for name, text in outcomes.items() if text.startswith("FAILED")]
    verdict = f"{len(failed)} of {len(checks)} checks failed: paste these lines into an issue"
    rows = [*_machine_rows(), *outcomes.items(), ("verdict", verdict if failed else "everything works")]
    print_report(as_json, about() | {"system": platform.platform(), "checks": outcomes, "passed": not failed}, rows)
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


def _checks() -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    """Yields each check: its name, what it claims, and a function that says what is wrong with that, or None."""
    bound = "within their bounds of float64"
    for unit in machine.native_isas():
        yield unit.name, f"float32 and bfloat16 are {bound}", lambda unit=unit: _forward(_DTYPES[:2], unit.name)
    yield "forward", f"{', '.join(_DTYPES)} are {bound}", lambda: _forward(_DTYPES)
    yield "backward", f"gradients are {bound}", _backward
    yield "cache", "chunks have the bits of one call; codes are within their bounds", _cache
    yield "threads", "two have the bits of one", _threads
    if "torch" in about()["versions"]:
        yield "torch", "its tensors have the bits of NumPy's arrays", _tensors


def _forward(dtypes: Sequence[str], unit: str | None = None) -> str | None:
    with on_unit(unit):
        for dtype in dtypes:
            q, k, v = normal_numbers(dtype, *_SHAPES)
            if told := wrong(sl.attention(q, k, v, causal=True), q, k, v, heads=4, causal=True):
                return f"{dtype}: {told}"
    return None


def _backward() -> str | None:
    q, k, v, d_out = normal_numbers("float32", *_SHAPES, _SHAPES[0])
    given = (q, k, v, *sl.attention(q, k, v, causal=True, return_lse=True), d_out)
    return wrong_gradients(sl.attention_backward(*given, causal=True), *given, causal=True)


# of caches, and of the queries over them
_CACHES: tuple[tuple[DtypeName, str], ...] = (
    ("float32", "float32"), ("int8", "float32"), ("int8", "bfloat16"), ("int4", "bfloat16"),
)  # fmt: skip


def _cache() -> str | None:
    for dtype, queries in _CACHES:
        q, k, v = normal_numbers(queries, *_SHAPES)
        cache = sl.KVCache(layers=1, kv_heads=2, head_dim=64, capacity=200, dtype=dtype)
        chunks = [cache.attend(0, *(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 150), (150, 199), (199, 200))]
        out, arithmetic = np.concatenate(chunks, axis=2), arithmetic_of_cache(dtype, q.dtype)
        if dtype == "float32" and out.tobytes() != sl.attention(q, k, v, causal=True).tobytes():
            return "chunks have other bits than one call"
        stored = [x.astype(np.float32) for x in (cache.keys(0), cache.values(0))]
        if told := wrong(out, q, *stored, heads=4, arithmetic=arithmetic, causal=True):
            return f"{dtype}: {told}"
    return None


def _threads() -> str | None:
    before, bits = sl.get_threads(), set()
    q, k, v = normal_numbers("float32", *[(1, 8, 700, 64)] * 3)
    try:
        for threads in (1, 2):
            sl.set_threads(threads)
            bits.add(sl.attention(q, k, v).tobytes())
    finally:
        sl.set_threads(before)
    return "two have other bits than one" if len(bits) > 1 else None


def _tensors() -> str | None:
    arrays = normal_numbers("float32", *_SHAPES)
    same = np.array_equal(as_float64(sl.attention(*as_tensors(*arrays))), as_float64(sl.attention(*arrays)))
    return None if same else "its tensors have other bits than NumPy's arrays"
