"""The GPU's kernels compiled with no GPU: for three generations, by the path that a call takes. A kernel takes a
second or more: a short run compiles a few.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from conftest import FULL, ROOT

pytest.importorskip("triton")

TOOL = ROOT / "tools" / "gpu_ahead.py"


def run(*words):
    env = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, timeout=600)


@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"] if FULL else ["9.0"])
def test_kernels_compile_without_faults(capability):
    words = [] if FULL else ["prefill causal", "bfloat16 append"]
    done = run(TOOL, capability, "--quick", *words)
    assert done.returncode == 0 and done.stdout.endswith(" kernels compiled, 0 with faults\n"), (
        done.stdout + done.stderr
    )
    attends, kernels = (3, 34) if FULL else (1, 6)
    assert done.stdout.count(" attend: ") == attends and done.stdout.count(" tensor, ") == kernels


@pytest.mark.parametrize("name", ["bfloat16 d128 decode softcap", *["bfloat16 d128 prefill causal"] * FULL])
def test_the_path_of_a_call(name):
    """Scores, and keys in several parts, which are joined."""
    done = run(TOOL, "9.0", name)
    assert done.returncode == 0 and done.stdout.count(" attend") == 2, done.stdout + done.stderr
    assert done.stdout.count("combine") == ("decode" in name)


def test_faults_are_found(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOL.parent))
    Compiled = importlib.import_module("gpu_ahead").Compiled
    good = Compiled("x", 200, 0, 1000, 1.0, {"tensor": 3})
    known, (most, _) = next(iter(importlib.import_module("gpu_ahead").SPILLS.items()))
    for spills in (most, most + 1):  # whose reason is known
        assert bool(Compiled(known, 200, spills, 1000, 1.0, {"tensor": 3}).faults((9, 0), True)) == (spills > most)
    assert not good.faults((9, 0), True)
    for bad in ({"spills": 4}, {"shared": 232_449}, {"instructions": {"tensor": 0}}, {"warnings": ("C7510",)}):
        assert Compiled(
            **{"name": "x", "registers": 1, "spills": 0, "shared": 1, "seconds": 1.0, "instructions": {"tensor": 1}}
            | bad
        ).faults((9, 0), True)
