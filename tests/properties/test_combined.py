"""Every option at once (R01, R03, R04, R05, R10): inside the bound, and of the same bits however a problem is computed.

As a script it takes any share of the problems, prints a line for each failure, which reproduces it, and goes on:

    export PYTHONPATH=tests:tests/support
    python tests/properties/test_combined.py --first 0 --count 25000 [--seed N] [--only K]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from engines import one_vector, tuned
from forms import FORMS, Form, third_of, units
from problems import draw_combined
from tolerance import plain
from ways import (
    Results,
    assert_right,
    assert_same,
    by_chunks,
    by_heads,
    by_layouts,
    by_threads,
    first_call,
    flooded,
    one_by_one,
    with_out,
)
from ways_of_caches import by_cache, by_codes, by_pages, by_pool, by_ring

from speedlight.cpu.engine import schedule
from speedlight.cpu.runtime import compile as compiler
from speedlight.host.machine import host_isas, isa_named


@contextlib.contextmanager
def kernels(form: Form, unit: str, short: bool, *, cached: bool = False) -> Iterator[None]:
    """On a vector unit; in a short run with panels of one width, and the decode kernel only where the form says so."""
    rows, before = schedule.DECODE_ROWS, os.environ.get("SPEEDLIGHT_ISA")
    os.environ["SPEEDLIGHT_ISA"] = unit
    if short and (form.extra != ("steps" if cached else "decode") or unit != units(form)[0]):
        schedule.DECODE_ROWS = 0
    try:
        with tuned(**one_vector(vectors_of(form))) if short else contextlib.nullcontext():
            yield
    finally:
        schedule.DECODE_ROWS = rows
        if before is None:
            del os.environ["SPEEDLIGHT_ISA"]
        else:
            os.environ["SPEEDLIGHT_ISA"] = before


def vectors_of(form: Form) -> int:
    """Query vectors of a panel in a short run."""
    return third_of(form) + 1


WAYS: tuple[tuple[Callable[..., Iterator[Results]], bool], ...] = (  # and whether keys lie in a cache
    (by_threads, False),
    (with_out, False),
    (by_layouts, False),
    (one_by_one, False),
    (by_chunks, False),
    (by_heads, False),
    (flooded, False),
    (by_pages, False),
    (by_cache, True),
    (by_ring, True),
    (by_pool, True),
    (by_codes, True),
)


def failures(form: Form, seed: int, index: int, *, short: bool) -> Iterator[str]:
    """What is wrong with one problem."""
    p = draw_combined(np.random.default_rng([seed, index]), form)
    if short and vectors_of(form) != 3 and not any(x.q.size for x in p.parts):
        return  # the schedule has three vectors for no rows
    unit, other = units(form)
    others = (
        [other] * (FORMS.index(form) % 8 == 1)  # kernels of the second unit, for an eighth of the forms
        if short
        else [
            x.name
            for x in host_isas()
            if form.dtype != "bfloat16" or x.product("bf16") == isa_named(unit).product("bf16")
        ]
    )
    try:
        with kernels(form, unit, short):
            want = first_call(p, np.random.default_rng([seed, index, 0]))
    except Exception as error:
        yield f"call: {type(error).__name__}: {error}"
        return
    checks: list[tuple[str, str, bool, Callable[[], Any]]] = [
        ("reference", unit, False, lambda: assert_right(p, want, unit))
    ]

    def compare(way: Any, salt: int) -> None:
        for got in way(p, np.random.default_rng([seed, index, salt]), short):
            assert_same(want, got)

    checks += [
        (u, u, False, lambda: assert_same(want, first_call(p, np.random.default_rng([seed, index, 0]))))
        for u in set(others) - {unit}
    ]
    for salt, (way, cached) in enumerate(WAYS, 1):
        wanted = ("codes",) if way is by_codes else ("cached", "steps")
        if not (short and cached and form.extra not in wanted):
            checks.append((way.__name__, unit, cached, lambda way=way, salt=salt: compare(way, salt)))
    for name, where, cached, check in checks:
        try:
            with kernels(form, where, short, cached=cached), np.errstate(all="ignore"):
                check()
        except Exception as error:
            yield f"{name}: {type(error).__name__ + ': ' if not isinstance(error, AssertionError) else ''}{error}"


SEED, EACH = 13, 3  # problems of each form in a short run


@pytest.mark.parametrize("form", FORMS, ids=[f.name for f in FORMS])
def test_combined(form, monkeypatch):
    """120 problems of few kernels; 50,000 of any in a full run."""
    shapes, kernel_of = set(), compiler.kernel_of
    monkeypatch.setattr(compiler, "kernel_of", lambda shape: shapes.add(shape) or kernel_of(shape))
    first, each = FORMS.index(form), 50_000 // len(FORMS) if FULL else EACH
    found = []
    for index in range(first, first + each * len(FORMS), len(FORMS)):
        found += [
            f"{again(SEED, index, short=not FULL)}  # {form.name}: {x}"
            for x in failures(form, SEED, index, short=not FULL)
        ]
    assert not found, "\n".join(found)
    assert FULL or len(shapes) <= form.kernels, "\n".join(str(s) for s in shapes)


def test_kernels_are_few():
    assert sum(form.kernels for form in FORMS) <= 120


def test_problems_are_of_every_kind():
    """What the 120 problems claim to cover, they do; and few of them have nothing to say."""
    drawn = [draw_combined(np.random.default_rng([SEED, n]), FORMS[n % len(FORMS)]) for n in range(len(FORMS) * EACH)]
    seen: Counter[str] = Counter()
    for p in drawn:
        seen.update(
            {
                p.layout,
                p.kind,
                *p.lies,
                f"repeats {p.expanded}",
                f"causal {p.causal}",
                f"scale {p.options['scale']}",
                f"{len(p.parts)} items",
            }
        )
        seen.update({"at the end"} if p.at_end else {"k_start"} if p.options["k_start"] else {"elsewhere"})
        seen.update({"sinks"} if p.options["sink_logits"] else set())
        seen.update({"ragged"} if len({(x.q.shape[1], x.k.shape[1]) for x in p.parts}) > 1 else set())
        seen.update({"grouped"} if p.parts[0].q.shape[0] > p.parts[0].k.shape[0] else set())
        seen.update({"infinities"} if p.has_infinity else set())
        seen.update(
            {"nothing to say"} if not any(x.q.size and np.nan_to_num(plain(x.v)).any() for x in p.parts) else set()
        )
    wanted = ["bhld", "blhd", "lhd", "numpy", "torch", "plain", "transposed", "sliced", "backwards", "unaligned"]
    wanted += ["k_start", "elsewhere", "sinks", "ragged", "grouped", "infinities"] + ["at the end", "repeats batch"]
    wanted += ["repeats heads", *(f"causal {x}" for x in (True, False, "top-left"))]
    wanted += [*(f"scale {x}" for x in (None, -0.3, 0.0, 1e-30)), *(f"{n} items" for n in (1, 2, 3, 4))]
    assert min(seen[x] for x in wanted) >= EACH, seen
    assert seen["nothing to say"] <= 4 * EACH and seen["at the end"] >= 15 * EACH


def again(seed: int, index: int, *, short: bool) -> str:
    script = "PYTHONPATH=tests:tests/support python tests/properties/test_combined.py"
    return f"{script} --seed {seed} --only {index}{' --short' if short else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Random problems of every option.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", type=int, help="one problem")
    parser.add_argument("--short", action="store_true", help="with the few kernels of `make test`")
    given = parser.parse_args()
    wanted = range(given.first, given.first + given.count) if given.only is None else [given.only]
    wrong, start = 0, time.perf_counter()
    for done, index in enumerate(wanted, 1):
        form = FORMS[index % len(FORMS)]
        for what in failures(form, given.seed, index, short=given.short):
            wrong += 1
            print(
                f"{again(given.seed, index, short=given.short)}  # {form.name}: {' '.join(what.split())[:300]}",
                flush=True,
            )
        if done % 1000 == 0:
            print(
                f"{done:,} problems, {wrong} failures, {time.perf_counter() - start:,.0f} s",
                file=sys.stderr,
                flush=True,
            )
    print(f"{len(wanted):,} problems, {wrong} failures, {time.perf_counter() - start:,.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
