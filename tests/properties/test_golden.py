"""Some of the hashes of golden.json, of each class of bits; `python tests/golden.py` compares all, on every unit."""

from __future__ import annotations

import json

import golden
import pytest
from conftest import FULL
from problems import digest

from speedlight.host.machine import current_isa, isa_named, runnable_isas

UNITS = {golden.class_of("bfloat16", x.name): x.name for x in (*runnable_isas(), current_isa())}
CASES = [(kind, x) for kind in UNITS for x in golden.cases() if x[1].startswith("bfloat16")]
CASES += [("bfloat16", x) for x in golden.cases() if not x[1].startswith("bfloat16")]  # the same on every unit


@pytest.mark.parametrize("kind", UNITS)
def test_bits_are_those_that_are_kept(kind, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_ISA", UNITS[kind])
    cases, kept = [x for of, x in CASES if of == kind], json.loads(golden.FILE.read_text())
    few = 6 if isa_named(UNITS[kind]).is_native else 3  # kernels that stand for other machines' take the longest
    some = [x for x in cases if x[0] == "lse near zero"] + cases[:: len(cases) // few]
    found = {
        f"{golden.class_of(dtype, UNITS[kind])}: {name}": digest(run())
        for name, dtype, run in (cases if FULL else some)
    }
    assert found == {x: kept[x] for x in found}
