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
    words = [] if FULL else ["prefill causal", "d128 decode", "bfloat16 append"]
    done = run(TOOL, capability, "--quick", *words)
    assert done.returncode == 0 and done.stdout.endswith(" kernels compiled, 0 with faults\n"), (
        done.stdout + done.stderr
    )
    attends, kernels = (3, 34) if FULL else (2, 9)
    assert done.stdout.count(" attend: ") == attends and done.stdout.count(" tensor, ") == kernels
    assert done.stdout.count(" combine: ") == 1  # of keys in several parts


@pytest.mark.skipif(not FULL, reason="a process of its own")
@pytest.mark.parametrize("name", ["bfloat16 d128 decode softcap", "bfloat16 d128 prefill causal"])
def test_the_path_of_a_call(name):
    """Scores, and keys in several parts, which are joined."""
    done = run(TOOL, "9.0", name)
    assert done.returncode == 0 and done.stdout.count(" attend") == 2, done.stdout + done.stderr
    assert done.stdout.count("combine") == ("decode" in name)


@pytest.fixture
def ahead(monkeypatch):
    """The tool, with status words of its own: of devices without numbers no later test can read one."""
    monkeypatch.setattr(importlib.import_module("speedlight.gpu.launch"), "_status", {})
    monkeypatch.syspath_prepend(str(TOOL.parent))
    return importlib.import_module("gpu_ahead")


def test_faults_are_found(ahead):
    good = {"name": "x", "registers": 200, "spills": 0, "shared": 1000, "seconds": 1.0, "instructions": {"tensor": 1}}
    figures = (200, 0, 1000)
    assert not ahead.Compiled(**good).faults((9, 0), True, figures)
    for bad in ({"registers": 201}, {"spills": 4}, {"shared": 1001}):
        assert ahead.Compiled(**good | bad).faults((9, 0), True, figures), bad
    for bad in ({"shared": 232_449}, {"instructions": {"tensor": 0}}, {"warnings": ("C7510",)}):
        assert ahead.Compiled(**good | bad).faults((9, 0), True), bad


def test_the_table_has_every_kernel_and_a_reason_for_each_spill(ahead):
    text = ahead.TABLE.read_text()
    rows = ahead.table_rows(text)
    assert ahead.table_text(rows) == text
    assert list(rows) == [name for name, *_ in ahead.listed((9, 0), []) if not name.endswith("repair")]
    for name, row in rows.items():
        assert bool(row.why) == any([spills for _, spills, _ in row.figures.values()]), name
        for capability, (registers, _, shared) in row.figures.items():
            assert 0 < registers <= 255 and shared <= ahead.DEVICES[capability], name
