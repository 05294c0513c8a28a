"""Measuring and planning for a GPU: rows are checked before they are timed, plans count what the kernel does."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import math
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

MODULES = ("gpu_report", "gpu_boxes.testing", "gpu_boxes.running")
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


def test_a_report_says_what_failed_and_what_is_known(tmp_path):
    report, testing, running = (importlib.import_module(x) for x in MODULES)
    test = tmp_path / "test_x.py"
    test.write_text("import time\ndef test_right(): pass\ndef test_wrong(): assert 0, '3 elements outside the bound'\n")
    found = testing.run_tests("smoke tests", [str(test)], 100)
    assert "1 failed, 1 passed" in found.summary and "test_wrong" in found.failed[0]
    assert [x.startswith("a result is wrong") for x in found.known] == [True]
    row = {"name": "x", "seconds": {"speedlight": [0, 0, 2e-3], "flash": [0, 0, 1e-3]}, "tflops": {"speedlight": 1.0}}
    about = {"GPU (name, driver, memory, capability)": "H100, 5, 81559 MiB, 9.0"}
    given = types.SimpleNamespace(seconds=None, output=tmp_path)
    box = report.Box("one", given, about)
    assert box.capability == (9, 0) and box.memory == 81_559 and 160 < box.left() <= 165
    box.journal.add("rows", "forward", running.Outcome(row, is_right=True))
    box.journal.add("rows", "backward", running.Outcome({"refused": "3 elements outside the bound"}, is_right=False))
    text = report.report(box)
    for words in (
        "81559 MiB", "- rows: 1 of 2", "forward: speedlight 2,000.0 us", "0.50 of the speed of flash",
        "FAILED backward: REFUSED: 3 elements outside", "known: a result is wrong",
    ):  # fmt: skip
        assert words in text, words
    assert "picture" in report.draw([row], tmp_path / "x.png")


def _dies():
    os._exit(7)


def _sleeps():
    subprocess.Popen(["sleep", "300"]).wait()


def _wrong():
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize("is_alone", [True, False])
def test_outcomes_are_written_whatever_an_item_does(tmp_path, is_alone):
    """A process that dies or hangs loses its own item; what has no time left is told of."""
    _, _, running = (importlib.import_module(x) for x in MODULES)
    journal = running.Journal(tmp_path)
    calls = {"a": lambda: "fine", "b": _dies, "c": _wrong, "d": _sleeps, "e": lambda: "WRONG: other bits"}
    calls |= {"f": lambda: {"refused": "NaN"}, "g": lambda: "late"}
    items = [running.Item(name, call) for name, call in calls.items()]
    found = running.run_items(items, "step", journal, seconds=60, each=2, is_alone=is_alone)
    assert {name: x.is_right for name, x in found.items()} == {x: x in "ag" for x in "abcdefg"}
    assert "ended with 7" in found["b"].result and "took too long" in found["d"].result
    assert "RuntimeError: an illegal memory access" in found["c"].result
    assert [x["name"] for x in journal.lines()] == list("abcdefg")
    assert "=== c\nTraceback" in (tmp_path / "failures.txt").read_text()
    late = running.run_items([running.Item("d", _sleeps), *items[:1]], "late", journal, seconds=0.5, each=9)
    assert [x.result for x in late.values()] == [running.NOT_RUN] * 2


KILLED = """import os, pathlib, subprocess, sys, time
sys.path.insert(0, {tools!r})
from gpu_boxes.running import Item, Journal, run_items
def hangs():
    pathlib.Path({pid!r}).write_text(str(os.getpid()))
    time.sleep(300)
items = [Item("first", lambda: "fine"), Item("second", hangs)]
run_items(items, "step", Journal(pathlib.Path({out!r})), seconds=99, each=99)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl() is Linux's")
def test_nothing_is_lost_if_a_box_is_killed(tmp_path):
    """And no process of it goes on."""
    _, _, running = (importlib.import_module(x) for x in MODULES)
    out, pid = tmp_path / "out", tmp_path / "pid"
    script = KILLED.format(tools=str(Path(running.__file__).parents[1]), pid=str(pid), out=str(out))
    process = subprocess.Popen([sys.executable, "-c", script])
    while not pid.exists() or not pid.read_text():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert [x["name"] for x in running.Journal(out).lines()] == ["first"]
    end = time.monotonic() + 60
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{pid.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid.read_text()}").exists()


@INTERPRETED
@pytest.mark.parametrize("name", ["packed sequences", "producer d64 causal", "pages", "decode B4 N1000"])
def test_problems_of_a_box_are_right(name):
    problems = importlib.import_module("gpu_boxes.problems")
    (item,) = [x for x in problems.problems() if x.name == name]
    assert "WRONG" not in item.run()
    for change in problems.PLAINER if name == "packed sequences" else ():
        assert "WRONG" not in problems.plainer(item, change).run()


def test_problems_of_a_box_see_what_is_wrong():
    problems = importlib.import_module("gpu_boxes.problems")
    x = torch.ones(3, 4)
    nan = torch.tensor([[1.0, math.nan]])
    assert "WRONG" in problems.judged(x * 1.1, x.double(), "bfloat16") and "WRONG" in problems.judged(
        nan, nan, "float16"
    )
    assert "WRONG" not in problems.judged(x, x.double(), "float32")
    assert "WRONG" in problems.alike([x], [x * 2]) and "WRONG" not in problems.alike([x], [x.clone()])


@INTERPRETED
def test_a_dry_run_of_every_box(tmp_path):
    """As on a GPU, but launches are recorded; kernels are packed and unpacked where sources are the same."""
    report = importlib.import_module("gpu_report")
    env = {n: x for n, x in os.environ.items() if n not in ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER")}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, report.__file__, "--dry", "-o", str(tmp_path / "out"), "--seconds", "900"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    problems, measuring = (importlib.import_module(f"gpu_boxes.{x}") for x in ("problems", "measuring"))
    for box, steps in (
        ("one", {"problems": problems.problems(), "main rows": measuring.main_rows()}),
        ("two", {"tiles": measuring.tiles(), "rows": measuring.every_row(), "FlexAttention": measuring.flex_graphs()}),
    ):
        lines = importlib.import_module("gpu_boxes.running").Journal(tmp_path / "out" / f"box-{box}").lines()
        for step, items in steps.items():
            assert {x["name"] for x in lines if x["step"] == step} == {x.name for x in items}, step
        assert all(x["right"] and x["result"] == "recorded" for x in lines)
        assert (tmp_path / "out" / f"box-{box}" / "report.txt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_kernels_travel_to_the_same_sources(tmp_path, monkeypatch):
    recording = importlib.import_module("gpu_boxes.recording")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (tmp_path / "triton" / "x").mkdir(parents=True)
    (tmp_path / "triton" / "x" / "a.cubin").write_bytes(b"x")
    recording.pack(tmp_path / "k.tar.gz")
    (tmp_path / "triton" / "x" / "a.cubin").unlink()
    assert recording.unpack(tmp_path / "k.tar.gz").startswith("1 kernels came along")
    assert (tmp_path / "triton" / "x" / "a.cubin").exists()
    monkeypatch.setattr(recording, "sources_key", lambda: {"triton": "9", "sources": "other"})
    assert "of another triton, sources" in recording.unpack(tmp_path / "k.tar.gz")
    assert "no kernels came along" in recording.unpack(tmp_path / "none")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_report_tells_of_a_failure_at_once(tmp_path, processes):
    """By name and reason, before the other tests have run; processes of pytest-xdist, too."""
    report, test = importlib.import_module("gpu_boxes.testing"), tmp_path / "test_x.py"
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
    report, start = importlib.import_module("gpu_boxes.testing"), time.monotonic()
    script = "echo FAILED test_a.py::test_b - why; echo more; sleep 300 & wait"
    lines, is_late = report._lines_of(["bash", "-c", script], 3, dict(os.environ))
    assert is_late and len(lines) == 2 and capfd.readouterr().out == "  FAILED test_a.py::test_b - why\n"
    assert time.monotonic() - start < 200


def test_a_gpu_of_little_memory_has_few_processes_of_tests(monkeypatch):
    report = importlib.import_module("gpu_boxes.testing")
    monkeypatch.setattr(report.os, "cpu_count", lambda: 16)
    assert [report.workers(x) for x in (0, 8_000, 81_559)] == [1, 4, 14]
    monkeypatch.setattr(report.os, "cpu_count", lambda: 4)
    assert report.workers(81_559) == 2


def test_a_report_runs_every_file_of_a_gpu():
    report = importlib.import_module("gpu_boxes.testing")
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
def test_every_row_of_the_benchmark(tmp_path, monkeypatch, small, stand_ins):
    out = tmp_path / "out"
    out.mkdir()
    once = lambda calls, turns: {x: quantiles([seconds_of(call)]) for x, call in calls.items()}  # noqa: E731
    monkeypatch.setattr(gpu, "measured", once)
    with small_blocks():
        assert run.main(["gpu", "--turns", "1", "-o", str(out)]) == 0
    rows = json.loads((out / "interpreter.json").read_text())["rows"]
    peers = {"cudnn", "flash", "efficient", "flex", "flash_attn"}
    for row in rows:
        kind, *_ = row["name"].split()
        takes = {"mask": {"flex"}, "decode": {"cudnn", "flash", "efficient"}}.get(kind, peers)
        assert row["seconds"].keys() >= takes | {"speedlight"}, row
    assert {x["name"].split()[0] for x in rows} == {"forward", "backward", "mask", "decode"} and len(rows) == 17
    assert set(gpu.MASKS) == gpu.mask_list(16).keys()
    monkeypatch.setattr(gpu, "decode", lambda *_: 1 / 0)
    assert [x["refused"] for x in gpu.rows(1, "decode")] == 2 * ["ZeroDivisionError: division by zero"]


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
    monkeypatch.setattr(importlib.import_module("gpu_report"), "set_environment", lambda: None)
    for main, words in ((run.main, ["gpu"]), (importlib.import_module("gpu_report").main, ["one"])):
        assert main(words) == 2 and "gpu: expected a CUDA device; PyTorch sees none" in capsys.readouterr().err
