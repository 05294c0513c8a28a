"""Measuring and planning for a GPU: rows are checked before they are timed, plans count what the kernel does."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL
from on_gpu import attention, small_blocks, tiles_computed
from problems import PATTERNS

import speedlight as sl
from speedlight.gpu.tiles import Tile
from speedlight.tools import gpu_tiles
from speedlight.tools.measuring import quantiles, seconds_of

sys.path += [str(Path(sl.__file__).parent.parent / x) for x in ("benchmarks", "tools")]
import gpu
import run

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="small problems, for the interpreter")


@pytest.fixture
def small(monkeypatch):
    """The benchmark's problems, at sizes for the interpreter."""
    sizes = {"LENGTHS": (16,), "DIMS": (16, 32), "MAIN": 16, "FLOAT32": ((16, 16),), "DECODE": ((2, 40), (1, 20))}
    calls = {
        "masked": functools.partial(gpu.masked, heads=2, d=32),
        "decode": functools.partial(gpu.decode, heads=(4, 2), d=32),
    }
    for name, x in (sizes | calls | {"TOKENS": 16, "WIDTH": 32}).items():
        monkeypatch.setattr(gpu, name, x)


@INTERPRETED
def test_rows(monkeypatch, small):
    rows = [
        gpu.forward("bfloat16", 64, 128, True, 1, ()),
        gpu.masked("window 1024", 160, 1, ()), gpu.masked("alibi", 160, 1, ()), gpu.decode(2, 300, 1),
        gpu.backward("bfloat16", 64, 128, True, 1, ()),
    ]  # fmt: skip
    for row in rows:
        assert (
            "refused" not in row and row["seconds"]["speedlight"][2] > 0 and row["name"] in gpu.line(row, {"copy": 1e9})
        )
    assert rows[0]["flops"] == 2 * 128 * (128 * 129 // 2) and rows[3]["bytes"] == 2 * 2 * 2 * 300 * 32 * 2
    real = sl.attention
    monkeypatch.setattr(sl, "attention", lambda *a, **o: real(*a, **o) * 1.1)
    for call in (
        lambda: gpu.forward("bfloat16", 64, 128, True, 1, ()),
        lambda: gpu.decode(2, 300, 1),
    ):
        row = call()
        assert (
            "outside the bound" in row["refused"] and "seconds" not in row and "REFUSED" in run.line_of(row, gpu.line)
        )


@INTERPRETED
@pytest.mark.parametrize(("kind", "name"), [("forward", "attention"), ("backward", "backward")])
def test_peers_are_held_to_one_reference(monkeypatch, stand_ins, kind, name):
    """In float64, which takes seconds at the benchmark's lengths."""
    calls, real = [], getattr(sl.reference, name)
    counted = functools.wraps(real)(lambda *given, **options: calls.append(name) or real(*given, **options))
    monkeypatch.setattr(sl.reference, name, counted)
    monkeypatch.setattr(gpu, "TOKENS", 16)
    monkeypatch.setattr(gpu, "WIDTH", 64)
    row = getattr(gpu, kind)("float32", 64, 16, True, 1, ("efficient", "flash"))
    assert row["seconds"].keys() == {"speedlight", "efficient", "flash"}
    assert len(calls) == {"forward": 1, "backward": 2}[kind]  # of rows and of keys


def test_a_report_says_what_failed_and_what_is_known(tmp_path, monkeypatch, capsys):
    report = importlib.import_module("gpu_report")
    test = tmp_path / "test_x.py"
    test.write_text("import time\ndef test_right(): pass\ndef test_wrong(): assert 0, '3 elements outside the bound'\n")
    found = report.run_tests("smoke tests", [str(test)], 100)
    assert "1 failed, 1 passed" in found.summary and "test_wrong" in found.failed[0]
    assert [x.startswith("a result is wrong") for x in found.known] == [True]
    rows = [
        {
            "name": "forward",
            "seconds": {"speedlight": [0, 0, 2e-3], "flash": [0, 0, 1e-3]},
            "tflops": {"speedlight": 1.0},
        },
        {"name": "backward", "refused": "3 elements outside the bound"},
    ]
    text = report.paragraph({"GPU": "none"}, [found], rows)
    for words in (
        "- GPU: none",
        "- smoke tests: 1 failed",
        "known: a result is wrong",
        "2,000 us, 0.50 of the speed of",
    ):
        assert words in text
    assert "backward: REFUSED" in text and "picture" in report.draw(rows, tmp_path / "x.png")
    for error, words in ((KeyboardInterrupt(), "interrupted"), (subprocess.TimeoutExpired("", 9), "stopped after 9 s")):
        monkeypatch.setattr(subprocess, "run", _raising(error))
        ended = report.run_benchmark("1", tmp_path, 9)
        assert f"- benchmark: {words}" in report.paragraph({}, ended, [])
        assert not any(report.went_wrong(x) for x in ended)


def _raising(error):
    def run(*_, **how):
        raise error

    return run


@pytest.mark.parametrize("processes", [1, 2])
def test_a_report_tells_of_a_failure_at_once(tmp_path, processes):
    """By name and reason, before the other tests have run; processes of pytest-xdist, too."""
    report, test = importlib.import_module("gpu_report"), tmp_path / "test_x.py"
    test.write_text("def test_wrong(): raise RuntimeError('an illegal memory access')\ndef test_right(): pass\n")
    (tmp_path / "test_y.py").write_text("import no_such_library\n")
    found = report.run_tests("all tests", [str(tmp_path), "--continue-on-collection-errors"], 300, processes)
    lines = found.output.splitlines()
    ends = next(n for n, line in enumerate(lines) if "= ERRORS =" in line)
    told = [line for line in lines[:ends] if line.startswith(("FAILED ", "ERROR "))]
    assert sorted(x.split()[0] for x in told) == ["ERROR", "FAILED"]
    assert [x.partition(" ")[2] for x in told] == found.failed
    assert "test_wrong - RuntimeError: an illegal memory access" in "".join(told) and "no_such_library" in "".join(told)
    assert [x[:17] for x in found.known] == ["an address is wro", "a package is miss"]


def test_a_report_ends_tests_with_all_their_processes(capfd):
    """Whose output, which they share, would go on otherwise."""
    report, start = importlib.import_module("gpu_report"), time.monotonic()
    script = "echo FAILED test_a.py::test_b - why; echo more; sleep 300 & wait"
    lines, is_late = report._lines_of(["bash", "-c", script], 3, dict(os.environ))
    assert is_late and len(lines) == 2 and capfd.readouterr().out == "  FAILED test_a.py::test_b - why\n"
    assert time.monotonic() - start < 200


def test_a_gpu_of_little_memory_has_few_processes_of_tests(monkeypatch):
    report = importlib.import_module("gpu_report")
    monkeypatch.setattr(report.os, "cpu_count", lambda: 16)
    assert [report.workers(x) for x in (0, 8_000, 81_559)] == [1, 4, 14]
    monkeypatch.setattr(report.os, "cpu_count", lambda: 4)
    assert report.workers(81_559) == 2


def test_a_report_runs_every_file_of_a_gpu():
    report = importlib.import_module("gpu_report")
    tests = {x for x in report.every_test() if Path(report.ROOT, x).exists()}
    assert {"tests/gpu/test_gpu.py", "tests/conformance/backward/test_gpu_backward.py"} <= tests and len(tests) > 7
    assert not any("distributed" in x or "ahead" in x for x in tests)


@pytest.fixture
def stand_ins(monkeypatch):
    """Peers that need a GPU, as PyTorch's operations."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def flash(*tensors, causal):
        return attend(*(x.transpose(1, 2) for x in tensors), is_causal=causal).transpose(1, 2)

    def flex(q, k, v, *, block_mask, score_mod, enable_gqa):
        h, i, j = torch.meshgrid(*(torch.arange(n) for n in (q.shape[1], q.shape[2], k.shape[2])), indexing="ij")
        scores = q.float() @ k.float().mT / q.shape[3] ** 0.5
        scores = scores if score_mod is None else score_mod(scores, 0, h, i, j)
        scores = scores if block_mask is None else scores.masked_fill(~block_mask(0, h, i, j), -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    flex_attention = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(flex_attention, "flex_attention", flex)
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda mask, *_, **__: mask)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash))
    kernel = torch.nn.attention.sdpa_kernel  # which PyTorch asks for what it wraps
    monkeypatch.setattr(torch.nn.attention, "sdpa_kernel", functools.wraps(kernel)(lambda _: contextlib.nullcontext()))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@INTERPRETED
def test_every_step_of_a_report(tmp_path, monkeypatch, capsys, small, stand_ins):
    """As `make gpu` runs it, the benchmark in this process."""
    report, real, out = importlib.import_module("gpu_report"), subprocess.run, tmp_path / "out"

    def here(command, **how):
        if "gpu" not in command:
            return real(command, **how)
        return types.SimpleNamespace(returncode=run.main([str(x) for x in command[2:]]), stderr="")

    monkeypatch.setattr(subprocess, "run", here)
    monkeypatch.setattr(report, "run_tests", lambda name, *_: report.Outcome(name, "1 passed", [], [], ""))
    once = lambda calls, turns: {x: quantiles([seconds_of(call)]) for x, call in calls.items()}  # noqa: E731
    monkeypatch.setattr(gpu, "measured", once)
    with small_blocks():
        assert report.main(["tests", "--turns", "1", "-o", str(out)]) == 0
    text = capsys.readouterr().out
    rows = json.loads((out / "interpreter.json").read_text())["rows"]
    peers = {"cudnn", "flash", "efficient", "flex", "flash_attn"}
    for row in rows:
        kind, *_ = row["name"].split()
        takes = {"mask": {"flex"}, "decode": {"cudnn", "flash", "efficient"}}.get(kind, peers)
        assert row["seconds"].keys() >= takes | {"speedlight"}, row
        assert f"- {row['name']}: " in text.partition("Please paste this into an issue:")[2]
    assert {x["name"].split()[0] for x in rows} == {"forward", "backward", "mask", "decode"} and len(rows) == 17
    names = {"interpreter.json", "all-tests.txt", "smoke-tests.txt", "report.txt"}
    names |= {"speed.png"} if importlib.util.find_spec("matplotlib") else set()
    assert {x.name for x in out.iterdir()} == names and "smoke tests: 1 passed" in text and str(out) in text
    monkeypatch.setattr(gpu, "decode", lambda *_: 1 / 0)
    ended = types.SimpleNamespace(returncode=1, stderr="Traceback\ntriton.CompilationError: at 3:1")
    assert [x["refused"] for x in gpu.rows(1, "decode")] == 2 * ["ZeroDivisionError: division by zero"]
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: ended)
    text = report.paragraph({}, report.run_benchmark("1", out, 9), [])
    assert "- benchmark: triton.CompilationError: at 3:1\n  - known: this Triton" in text


@INTERPRETED
@pytest.mark.skipif(not FULL, reason="minutes in the interpreter")
def test_tiles_are_measured_as_they_are_given(monkeypatch):
    tiles = [Tile(16, 16, 4, 1), Tile(32, 16, 4, 1)]
    found = gpu_tiles.tune("float32", 16, "masked", 1, length=20, tiles=tiles)
    assert {tile for _, tile in found} == set(tiles) and all(seconds > 0 for seconds, _ in found)
    assert all(tile.rows == 16 for tile in gpu_tiles.candidates("decode", True))
    monkeypatch.setattr(gpu_tiles, "wrong", lambda *_, **__: "wrong")
    assert gpu_tiles.tune("float32", 16, "masked", 1, length=20, tiles=tiles[:1]) == []


@INTERPRETED
@pytest.mark.parametrize("name", [*(PATTERNS if FULL else [*PATTERNS][1::2]), "plain"])
def test_a_plan_counts_the_tiles_that_are_computed(rng, monkeypatch, name):
    q, k, v = (rng.standard_normal((1, 4, 100, 16)).astype(np.float32) for _ in range(3))
    options = PATTERNS.get(name, {"causal": True})
    with small_blocks():
        mixed, full = tiles_computed(monkeypatch, lambda: attention(q, k, v, **options))
        found = sl.plan(*(torch.from_numpy(x) for x in (q, k, v)), device="cuda", **options)
    assert (found.tiles_mixed, found.tiles_full) == (mixed, full) and found.engine == "cuda" and found.tile_keys == 16
    assert found.tiles_full + found.tiles_mixed + found.tiles_skipped == 4 * 7 * 7
    assert found.flops == sl.plan(q, k, v, **options).flops and "16 x 16" in str(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_commands_without_a_gpu(monkeypatch, capsys):
    pytest.importorskip("typer")
    from speedlight.tools import cli

    monkeypatch.delenv("TRITON_INTERPRET")
    for words in (
        ["plan", "--q-len", "64", "--device", "cuda"],
        ["tune", "--device", "cuda"],
    ):
        monkeypatch.setattr(sys, "argv", ["speedlight", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        text = " ".join(capsys.readouterr().err.split())
        assert end.value.code == 2 and "device: expected a CUDA device; PyTorch sees none here." in text, words
    for main in (run.main, importlib.import_module("gpu_report").main):
        assert main(["gpu"]) == 2 and "gpu: expected a CUDA device; PyTorch sees none" in capsys.readouterr().err
