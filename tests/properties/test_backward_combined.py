"""Gradients under every option at once (R02, R03, R04, R10), by the forms of test_combined.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import FULL
from engines import tuned
from forms import FORMS, Form, units
from problems import Combined, as_numpy, draw_combined, flow_of
from tolerance import assert_within, plain
from ways import Call, as_kind, bits, lie, poisoned

import speedlight as sl
from speedlight import reference
from speedlight.host.machine import current_isa

MOST = 20_000  # pairs of queries and keys
KINKS = ("curves", "roots")  # |s| has one at 0, where float32's products of tiny numbers are


class Checked(Exception):
    """Instead of results."""


class Gradients(Call):
    """A problem's call, whose gradients are held against the specification instead of its results."""

    def attention(self, q: Any, k: Any, v: Any, options: dict[str, Any], out: bool) -> Any:
        arrays = [as_numpy(x) for x in (q, k, v)]
        rng, given = self.rng, self.flow(arrays, options)
        tasks = int(rng.choice([1, 3, 50]))
        sl.set_threads(int(rng.choice([1, 2, 3])))
        try:
            lying = [None if x is None else self.lying(x) for x in given]
            with tuned(ranges={"tasks": tasks}):
                got = [as_numpy(x) for x in sl.attention_backward(q, k, v, *lying, **options)]
                hiding = sl.attention_backward(*poisoned(arrays, given, options, rng), **options)
        finally:
            sl.set_threads(None)
        want = reference.backward(*arrays, *given, **options)
        dot = current_isa().dot(self.p.form.dtype, gradients=True)
        bounds = reference.backward_bound(*arrays, *given, dot=dot, **options)
        for name, g, w, bound, again in zip(bounds._fields, got, want, bounds, hiding, strict=True):
            assert bits(g) == bits(again), f"{name}: NaN and infinities that are hidden matter"
            unclear = np.isnan(plain(g)) & np.isinf(w)  # a weight that float32 has as 0, times an infinity
            w = np.where(unclear, np.nan, w)
            assert_within(g, w, bound, name, zeros_allowed=True)
        raise Checked

    def flow(self, arrays: list[np.ndarray], options: dict[str, Any]) -> list[Any]:
        """out, lse, d_out and d_lse, of all sizes, some with values that are not finite."""
        rng = self.rng
        with np.errstate(all="ignore"):
            out, lse, d_out, d_lse = flow_of(rng, arrays, **options)
        d_out = d_out * d_out.dtype.type(rng.choice([1, 1, 0.01, 30]))
        if rng.random() < 0.2:
            d_out[rng.random(d_out.shape) < 0.95] = 0
        for _ in range(int(rng.integers(1, 4)) if rng.random() < 0.15 and out.size else 0):
            x = [out, lse, d_out, d_lse][rng.integers(4)]
            x[tuple(rng.integers(n) for n in x.shape)] = rng.choice([np.nan, np.inf, -np.inf])
        return [out, lse, d_out, d_lse if rng.random() < 0.7 else None]

    def lying(self, x: np.ndarray) -> Any:
        ways = ["plain", "plain", "transposed", "sliced"]
        ways += ["backwards", "unaligned"] if self.kind == "numpy" else []
        return as_kind(lie(x, str(self.rng.choice(ways)), self.rng), self.kind)


def drawn(rng: np.random.Generator, form: Form) -> Combined:
    """A small problem."""
    while True:
        p = draw_combined(rng, form)
        pairs = sum(x.q.shape[1] * x.k.shape[1] for x in p.parts) * p.parts[0].q.shape[0]
        tiny = not any((np.abs(x.q) >= 1e-30).any() for x in p.parts)
        if pairs <= MOST and not (tiny and form.name in KINKS):
            return p


def check_problem(form: Form, seed: int, number: int, unit: str) -> None:
    rng = np.random.default_rng([seed, number])
    p = drawn(rng, form)
    call = Gradients(p, rng, kind=p.kind, lies=p.lies)
    call.options["causal"] = p.causal
    try:
        if p.layout == "lhd":
            call.packed(p.parts, starts=p.q_start)
        else:
            call.padded(p.parts, p.layout, starts=p.q_start, lengths=bool(rng.random() < 0.3))
    except Checked:
        return
    except Exception as error:
        sizes = [(x.q.shape, x.k.shape, x.v.shape, x.start) for x in p.parts]
        more = p.layout, p.kind, p.lies, p.expanded, p.causal, p.q_start, p.options
        raise AssertionError(f"{form.name}, seed {seed}, number {number}, {unit}: {sizes}, {more}: {error}") from error
    raise AssertionError("no gradients were computed")


SHORT = ("window to the left", "dilated", "distance by head", "a dense mask", "softcap", "roots")
TRIED = [x for x in FORMS if FULL or x.name in SHORT]  # a kernel takes a second


@pytest.mark.parametrize("form", TRIED, ids=[x.name for x in TRIED])
def test_every_form(form, monkeypatch):
    for n, unit in enumerate(units(form)[: 2 if FULL else 1]):
        monkeypatch.setenv("SPEEDLIGHT_ISA", unit)
        for number in range(200 if FULL else 4):
            check_problem(form, 5 + n, number, unit)


@pytest.mark.units
def test_every_unit(isa, dtype):
    form = next(x for x in FORMS if x.name.startswith("plain") and x.dtype == dtype)
    for number in range(400 if FULL else 16):
        check_problem(form, 7, number, isa)
