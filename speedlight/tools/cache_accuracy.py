"""`speedlight accuracy`: the error that a quantised cache makes of a file's attention, against float64."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer

import speedlight as sl

from ..arrays.dtypes import CODES, DTYPES, SHORTEST, SPELLINGS, THEIR_DTYPES, numpy_dtype
from ..errors import ArgumentError, join_words
from ..problem.checks import dtype_hint
from .options import FileOptions, Json, one_of, takes_listed
from .reports import print_report, progress

FORMATS = ("bfloat16", "float16", *CODES)
_TYPED = (*SHORTEST.values(), "bfloat16", "float16")
_SHORT = {theirs: name for theirs, name in THEIR_DTYPES.items() if name in FORMATS} | SPELLINGS


@takes_listed
def accuracy(
    given: FileOptions,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A cache's format: {join_words(_TYPED)}. May be given several times. Default all.",
            autocompletion=one_of(*_TYPED),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Says how far a file's attention is from float64 when its keys and values come from a quantised KVCache.

    Errors are shares of the output's root mean square (RMS); of a head, of that head's.
    """
    names = [_SHORT.get(x, x) for x in cache or FORMATS]
    for name in names:
        if name not in FORMATS:
            wanted = join_words(_TYPED, "and")
            raise ArgumentError(f"--cache: expected some of {wanted}; got {name!r}.{dtype_hint(name)}")
    found, options = given.read()
    if "cu_seqlens_q" in options:
        raise ArgumentError("--layout: expected one sequence, or a batch; got several, packed by cu_seqlens_q.")
    sl.plan(*found, **options)  # which names what does not fit
    arrays = [as_bhld(x, options["layout"]) for x in found]
    options["layout"] = "bhld"
    wide = [x.astype(np.float64) for x in arrays]
    report = []
    with progress("formats", len(names) + 1) as advance:
        want = sl.attention(wide[0], wide[1], wide[2], **options)
        advance()
        for name in names:
            *stored, smaller = _stored(name, arrays[1], arrays[2])
            got = sl.attention(wide[0], *stored, **options)
            report.append({"cache": name, "smaller": smaller} | errors_of(got, want))
            advance()
    dtype = arrays[1].dtype.name
    print_report(as_json, {"formats": report, "dtype": dtype}, [(x["cache"], _text(x, dtype)) for x in report])


def as_bhld(x: np.ndarray, layout: str) -> np.ndarray:
    """Returns an array of this layout as [batch, heads, length, dim]."""
    x = x if len(layout) == 4 else x[None]
    return x.swapaxes(1, 2) if layout in ("blhd", "lhd") else x


def _stored(name: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns the keys and values that such a cache holds, in float64, and how many times smaller it is."""
    kind = numpy_dtype(name) if name in DTYPES else k.dtype if k.dtype.name != "float64" else np.dtype("float32")
    (batch, heads, capacity, dim), codes = k.shape, name in CODES
    sizes: dict[str, Any] = {"kv_heads": heads, "head_dim": dim, "value_dim": v.shape[3], "capacity": capacity}
    cache = sl.KVCache(layers=1, **sizes | {"batch": batch, "dtype": name})
    with np.errstate(over="ignore"):  # in float16, which the error then says
        cache.append(0, k.astype(kind, copy=codes), v.astype(kind, copy=codes))
    held = cache.keys(0).astype(np.float64), cache.values(0).astype(np.float64)
    return *held, (k.nbytes + v.nbytes) / max(cache.used_bytes, 1)


def errors_of(got: np.ndarray, want: np.ndarray) -> dict[str, Any]:
    """Returns errors of [batch, heads, length, dim], as shares of the RMS of what is right."""
    error = got - want
    with np.errstate(all="ignore"):  # 0 of 0 is no error; some of 0 is infinitely much
        rms = [np.sqrt(np.square(x).mean(axis=(0, 2, 3))) for x in (error, want)]
        heads = np.where(rms[0] == 0, 0.0, rms[0] / rms[1])
        whole, size = (float(np.sqrt(np.square(x).mean())) for x in rms)
        largest = float(np.abs(error).max(initial=0.0))
        shares = [0.0 if x == 0 else x / size if size else np.inf for x in (whole, largest)]
    worst = int(np.argmax(np.nan_to_num(heads, nan=np.inf)))
    return {"rms": shares[0], "largest": shares[1], "worst_head": worst, "heads": heads.tolist()}


def _text(x: dict[str, Any], dtype: str) -> str:
    """Returns a format's line."""
    told = [f"RMS error {x['rms']:.2%} of the output's RMS", f"largest {x['largest']:.2%}"]
    worst = f"worst of {len(x['heads'])} heads {x['heads'][x['worst_head']]:.2%} (head {x['worst_head']})"
    return f"{', '.join([*told, worst])}; {x['smaller']:.2f} x smaller than {dtype}"
