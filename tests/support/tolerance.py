"""The one numerical check of the whole suite."""

from __future__ import annotations

from typing import Any

import numpy as np

import speedlight as sl
from speedlight import reference
from speedlight.arrays.dtypes import scales_of
from speedlight.host.machine import current_isa


def plain(x: Any) -> np.ndarray:
    """Any result as a float64 array."""
    if type(x).__module__.startswith("torch"):
        x = x.detach().double().numpy()
    return np.asarray(x).astype(np.float64)


def assert_within(
    got: Any, want: np.ndarray, bound: np.ndarray, what: str = "out", *, zeros_allowed: bool = False
) -> float:
    """Shape, then NaN and Inf patterns, then every element inside its bound. Where that is infinite a sum may have
    overflowed: a finite result is not asked for.

    Returns the largest share of the bound used.
    """
    got = plain(got)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return 0.0
    got = np.where(np.isposinf(bound) & np.isfinite(want), want, got)
    assert (np.isnan(got) == np.isnan(want)).all(), (
        f"{what}: NaN in {np.isnan(got).sum()} places, expected {np.isnan(want).sum()}"
    )
    infinite = np.isinf(want)
    assert (got[infinite] == want[infinite]).all(), f"{what}: wrong infinities"
    finite = np.isfinite(want)
    assert zeros_allowed or (want[finite] != 0).any() or not finite.any(), (
        f"{what}: an all-zero reference proves nothing"
    )
    error = np.abs(got[finite] - want[finite])
    inside = error <= bound[finite]  # False where anything is NaN
    if not inside.all():
        worst = np.argmin(inside)
        index = np.argwhere(finite)[worst]
        raise AssertionError(
            f"{what}: {(~inside).sum()} of {inside.size} elements outside the bound; first at {tuple(index)}: "
            f"got {got[finite][worst]!r}, expected {want[finite][worst]!r}, bound {bound[finite][worst]:.3g}"
        )
    return float((error / np.maximum(bound[finite], 1e-320)).max()) if error.size else 0.0


def assert_equal(got: Any, want: Any, what: str = "out") -> None:
    """Two computations in float64 differ by roundings alone."""
    want = plain(want)
    assert_within(got, want, 1e-12 * (1 + np.abs(want)), what, zeros_allowed=True)


def assert_accurate(q: Any, k: Any, v: Any, *, zeros_allowed: bool = False, **options: Any) -> tuple[Any, Any]:
    """speedlight.attention against the oracle: dtype, shape, special values, and the bound for every element."""
    out, lse = sl.attention(q, k, v, return_lse=True, **options)
    assert out.dtype == q.dtype
    want, want_lse = reference.attention(q, k, v, return_lse=True, **options)
    dot = current_isa().dot(q.dtype)
    bounds = reference.error_bound(q, k, v, dot=dot, **options)
    assert_within(out, want, bounds.out, "out", zeros_allowed=zeros_allowed)
    assert_within(lse, want_lse, bounds.lse, "lse", zeros_allowed=True)
    return out, lse


def assert_gradients(
    arrays: Any,
    flow: Any,
    *,
    grads: Any = (),
    zeros_allowed: bool = False,
    backward: Any = sl.attention_backward,
    tile: int | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """speedlight.attention_backward against the oracle: kinds, dtypes, shapes, special values, the bound for every
    element. `flow`: out, lse, d_out and d_lse. Returns dq, dk, dv and `grads`.
    """
    got = flat(backward(*arrays, *flow, grads=grads, **options))
    want = flat(reference.backward(*arrays, *flow, grads=grads, **options))
    dot = tile is None and current_isa().dot(arrays[0].dtype, gradients=True)
    bounds = flat(reference.backward_bound(*arrays, *flow, grads=grads, dot=dot, tile=tile, **options))
    kind, logs = type(arrays[0]), flow[1].dtype  # further gradients have what log-sum-exps have
    for name, g, w, bound in zip(("dq", "dk", "dv", *map(str, grads)), got, want, bounds, strict=True):
        dtype = arrays[0].dtype if name in ("dq", "dk", "dv") else logs
        assert type(g) is kind and g.dtype == dtype, f"{name}: {type(g)} of {g.dtype}"
        assert_within(g, w, bound, name, zeros_allowed=zeros_allowed)
    return got


def bounds_of_codes(q: Any, k: Any, v: Any, codes: str, **options: Any) -> reference.Bounds:
    """The bounds of queries of any dtype over a cache's codes, keys and values as it gives them (v: None of latents),
    on the unit in use.
    """
    dot = current_isa().dot(q.dtype, codes=scales_of(codes, latent=v is None))
    return reference.error_bound(q, k, v, codes=codes, dot=dot, **options)


def flat(x: Any) -> tuple[Any, ...]:
    """dq, dk, dv, and what comes as a tuple after them if more gradients are asked for."""
    return (*x[:3], *(y for more in x[3:] for y in more))
