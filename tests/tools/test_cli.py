"""The command, as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from conftest import FULL, ROOT
from problems import qkv

import speedlight as sl
from speedlight.arrays.files import read_arrays, write_arrays
from speedlight.cpu.runtime import roof
from speedlight.errors import FileError
from speedlight.host.machine import current_isa, host_isas, isa_named
from speedlight.host.others import Others
from speedlight.tools import cli

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

EXAMPLE = ROOT / "examples" / "minilm-layer3.safetensors"


def speedlight(*words: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "speedlight.tools.cli", *map(str, words)], capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def here(monkeypatch, capsys):
    """The same in this process: a new one takes half a second."""
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it: lines would be folded

    def run(*words: object) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, "argv", ["speedlight", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, error = capsys.readouterr()
        return subprocess.CompletedProcess(words, end.value.code or 0, out, error)

    return run


def test_the_example(tmp_path):
    done = speedlight("attend", EXAMPLE, "--causal", "--check", "-o", tmp_path / "o.safetensors")
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout and "time at least" in done.stdout
    arrays = read_arrays([EXAMPLE])
    want = sl.attention(arrays["q"], arrays["k"], arrays["v"], causal=True)
    written = read_arrays([tmp_path / "o.safetensors"])
    assert written["out"].tobytes() == want.tobytes() and written["lse"].shape == (1, 12, 213)
    assert [p.name for p in tmp_path.iterdir()] == ["o.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_files_come_back(here, rng, tmp_path, dtype, suffix):
    q, k, v = qkv(rng, dtype, 1, 2, 2, 20, 30, 8, 8)
    write_arrays(tmp_path / f"in{suffix}", {"a": q, "b": k, "c": v})
    words = ["--q", "a", "--k", "b", "--v", "c", "--json", "--check"]
    done = here("attend", tmp_path / f"in{suffix}", *words, "-o", tmp_path / f"out{suffix}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["passed"] and report["out"] == {"shape": [1, 2, 20, 8], "dtype": dtype}
    assert read_arrays([tmp_path / f"out{suffix}"])["out"].tobytes() == sl.attention(q, k, v).tobytes()


def test_dropout_of_a_file(here, tmp_path):
    done = here("attend", EXAMPLE, "--dropout", "0.2", "--seed", "7", "--check", "--json", "-o", tmp_path / "o.npz")
    assert done.returncode == 0, done.stderr
    report, arrays = json.loads(done.stdout), read_arrays([EXAMPLE])
    assert report["check"]["passed"] and report["plan"]["problem"]["dropout"] == 0.2
    want = sl.attention(*(arrays[n] for n in "qkv"), dropout=0.2, seed=7)
    assert read_arrays([tmp_path / "o.npz"])["out"].tobytes() == want.tobytes()
    done = here("attend", EXAMPLE, "--dropout", "0.2")
    assert done.returncode == 2 and "--seed: expected an int beside --dropout" in done.stderr


def test_three_npy_files(here, rng, tmp_path):
    for name, x in zip("qkv", qkv(rng, "float64", 1, 1, 1, 5, 6, 4, 4), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    done = here("attend", *(tmp_path / f"{n}.npy" for n in "qkv"), "--check", "-o", tmp_path / "out.npy")
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "out.npy").shape == (1, 1, 5, 4)


def test_view_draws_the_tiles_that_are_computed(here, tmp_path):
    import matplotlib.image

    path = tmp_path / "mask.png"
    done = here(
        "view", "--mask", "causal() & (window(300, 0) | (j < 64))", "--q-len", "2048", "-o", str(path), "--json"
    )
    assert done.returncode == 0, done.stderr
    plan = sl.plan(q_heads=1, q_len=2048, head_dim=64, mask=sl.causal() & (sl.window(300, 0) | sl.prefix(64)))
    report = json.loads(done.stdout)["plan"]
    assert all(report[x] == getattr(plan, x) for x in ("tiles_full", "tiles_mixed", "tiles_skipped", "flops"))
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    shares = [(pixels == colour).all(axis=1).mean() for colour in ([0, 114, 178], [230, 159, 0], [242, 242, 242])]
    assert all(x > 0.005 for x in shares) and shares[2] > 0.4  # full, mixed, skipped


def test_a_mask_of_heads_is_drawn_for_one_that_is_named(here, tmp_path):
    """Figures are of all heads, the tiles of those that share a head's keys."""
    words = ["view", "--mask", "(h > 1) & (j <= i)", "--q-len", "300", "--q-heads", "4", "--head", "3"]
    for more, named in (([], "head 3 of 4"), (["--kv-heads", "2"], "heads 2 to 3 of 4")):
        done = here(*words, *more, "-o", tmp_path / "m.svg")
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "m.svg").read_text()
        assert f"<!-- query position, {named} -->" in text and "% of the work of all heads is done" in text


def test_attend_with_a_mask_and_a_score(here):
    done = here("attend", EXAMPLE, "--mask", "window(20, 20)", "--score", "s - abs(i - j) * 0.1", "--check", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["passed"] and report["plan"]["problem"]["masked"] and report["plan"]["problem"]["scored"]


def test_damaged_files_are_named(rng, tmp_path):
    q = rng.standard_normal((1, 1, 5, 4))
    seen = 0
    for suffix in (".safetensors", ".npz", ".npy"):
        path = tmp_path / f"out{suffix}"
        write_arrays(path, {"out": q})
        data = path.read_bytes()
        for _ in range(150):
            damaged = bytearray(data)
            match rng.integers(3):
                case 0:
                    damaged = damaged[: rng.integers(len(data))]
                case 1:
                    damaged[rng.integers(min(len(data), 200))] = rng.integers(256)
                case 2:
                    at = rng.integers(len(data))
                    damaged[at : at + 8] = rng.bytes(8)
            path.write_bytes(damaged)
            try:
                read_arrays([path])
            except FileError as error:
                seen += 1
                assert str(path.name) in str(error) or "header" in str(error) or "objects" in str(error)
    assert seen > 100


def test_a_header_that_promises_too_much_allocates_nothing(tmp_path):
    path = tmp_path / "q.npy"
    np.save(path, np.ones(4))
    whole = path.read_bytes()
    for other, promised in ((b"(9,)", 72), (b"(3,)", 24)):
        path.write_bytes(whole.replace(b"(4,)", other))
        with pytest.raises(FileError, match=f"its header promises {promised} bytes of data"):
            read_arrays([path])
    np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match="Python objects"):
        read_arrays([path])


def test_plan(here):
    words = ["--q-len", 8192, "--q-heads", 32, "--kv-heads", 8, "--head-dim", 128, "--causal"]
    done = here("plan", *words)
    assert done.returncode == 0 and "visible" in done.stdout and "x the workspace" in done.stdout, done.stderr
    report = json.loads(here("plan", *words, "--json").stdout)
    assert report["visible_pairs"] == 32 * 8192 * 8193 // 2 and report["memory_ratio"] > 1000
    masked = json.loads(here("plan", "--q-len", 500, "--mask", "(i * j) % 7 == 0", "--exact", "--json").stdout)
    i, j = np.arange(500)[:, None], np.arange(500)[None]
    assert masked["visible_pairs"] == 8 * int(((i * j) % 7 == 0).sum())


def test_plan_of_shared_keys(here):
    words = ["plan", "--decode", "--batch", 2, "--k-len", 600, "--json"]
    report, apart = (json.loads(here(*words, *more).stdout) for more in (["--shared-prefix", 520], []))
    assert (report["shared_prefix"], apart["shared_prefix"]) == (520, 0)
    assert apart["bytes_read"] - report["bytes_read"] == 512 * 8 * 2 * 64 * 4


def test_plan_of_gradients(here):
    words = ["plan", "--q-len", 300, "--dtype", "bfloat16", "--json"]
    report, forward = (json.loads(here(*words, *more).stdout) for more in (["--backward"], []))
    assert report["flops"] == 5 * forward["flops"] // 2 and report["kernel"].startswith("backward_bf16")
    assert report["backward"] is True and forward["backward"] is False


def test_info_and_clear(here, tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "kernels"))
    x = tmp_path / "x.npz"
    np.savez(x, **{n: np.ones((1, 1, 4, 8), np.float32) for n in "qkv"})
    assert speedlight("attend", x).returncode == 0
    (tmp_path / "kernels" / "mine.txt").write_text("not a kernel")
    report = json.loads(here("info", "--clear", "--json").stdout)
    assert report["kernels"]["count"] == report["removed"] >= 1 and report["peak_flops"]["float32"] > 1e9
    assert [p.name for p in (tmp_path / "kernels").iterdir() if not p.name.startswith("roofs_")] == ["mine.txt"]
    monkeypatch.setattr(roof, "bf16_peaks", lambda: {x.name: float(2 + (x is unit)) * 1e9 for x in host_isas()})
    unit = current_isa()
    monkeypatch.setattr(Others, "share", lambda self: 0.34)
    report = json.loads(here("info", "--measure", "--json").stdout)
    assert report["recommended_isa"] is None and report["others"] == 0.34
    unit = isa_named("avx2")
    said = here("info", "--measure").stdout
    assert current_isa() is unit or "SPEEDLIGHT_ISA=avx2 is faster here" in said
    assert "other programs took 34% of the CPUs: repeat this while little else runs" in said
    done = here("info")  # which measures nothing
    assert (
        done.returncode == 0
        and "other programs" not in done.stdout
        and "vector unit" in done.stdout
        and "GB/s" in done.stdout
    )


@pytest.mark.parametrize("unit", ["avx512bf16", "avx2", "neon"] if FULL else ["neon"])
def test_show(here, unit, tmp_path):
    report = json.loads(here("show", "--isa", unit, "--dtype", "bfloat16", "--mask", "window(100, 0)", "--json").stdout)
    assert report["isa"] == unit and unit in report["kernel"] and "score_tile" in report["functions"]
    counts = [x["instructions"] for x in report["functions"].values()]
    assert 8 <= report["registers"] <= 32 and report["instructions"] == sum(counts)
    assert here("show", "--isa", unit, "--q-len", 1, "--k-len", 500, "--ir").stdout.startswith("; ModuleID")
    done = here("show", "--isa", unit, "--asm", "-o", tmp_path / "k.s")
    assert done.returncode == 0 and "forward_f32" in (tmp_path / "k.s").read_text()
    if FULL:
        report = json.loads(here("show", "--backward", "--isa", unit, "--causal", "--json").stdout)
        assert report["kernel"].startswith(f"backward_f32_{unit}") and {"task", "region"} <= set(report["functions"])
        assert (report["tile_rows"] >= 1 and report["panels"] == 8) or unit != "avx2"
        assert here("show", "--backward", "--isa", unit, "--ir").stdout.startswith("; ModuleID")


@pytest.mark.skipif("avx512" not in [x.name for x in host_isas()], reason="a machine without AVX-512")
def test_show_knows_units_that_run_where_they_are_asked_for(here):
    done = here("show", "--isa", "amx-software", "--json")
    assert json.loads(done.stdout)["runs_here"]


def test_view_of_weights(here, tmp_path):
    pytest.importorskip("matplotlib")
    labels = EXAMPLE.parent / "minilm-tokens.txt"
    words = ["view", EXAMPLE, "--head", 0, "--head", 3, "--labels", labels, "--span", "0:42"]
    done = here(*words, "-o", tmp_path / "w.png")
    assert done.returncode == 0 and (tmp_path / "w.png").stat().st_size > 20_000, done.stderr
    assert "largest weight 0.829" in done.stdout
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 3000, 8), dtype=np.float32)
    np.savez(tmp_path / "long.npz", q=q, k=k)  # more tokens than the picture has cells
    report = json.loads(here("view", tmp_path / "long.npz", "--causal", "-o", tmp_path / "l.png", "--json").stdout)
    assert report["weights"]["heads"] == [{"head": 0, "largest": 1.0}]


@pytest.mark.parametrize(("heads", "text"), [(8, "i > j"), (1, " | ".join(["causal()"] * 20))])
def test_the_title_of_a_map_is_inside(heads, text):
    figure = sl.view(sl.plan(q_heads=heads, q_len=8192, head_dim=64, causal=True), title=text)
    figure.draw_without_rendering()
    title = figure.axes[0].title.get_window_extent()
    assert title.x0 >= 0 and title.x1 <= figure.bbox.x1


def test_view_refuses_arrays_that_do_not_go_together(here, tmp_path):
    pytest.importorskip("matplotlib")
    for shape in ((1, 3, 9, 8), (2, 2, 9, 8), (1, 2, 9, 7), (1, 0, 9, 8)):
        np.savez(tmp_path / "a.npz", q=np.ones((1, 4, 5, 8), np.float32), k=np.ones(shape, np.float32))
        done = here("view", tmp_path / "a.npz", "-o", tmp_path / "a.png")
        assert done.returncode == 2 and "k: expected shape (1, kv heads, length, 8), with kv heads" in done.stderr


def test_weights_are_those_of_attention(rng):
    q, k, v = qkv(rng, "float64", 2, 4, 2, 9, 30, 8, 8)
    options = {"causal": True, "mask": sl.window(7, 0), "score": sl.softcap(2.0), "sink_logits": [0.5, 3, -2, -1]}
    weights = sl.reference.weights(q, k, **options)
    np.testing.assert_allclose(weights @ v.repeat(2, axis=1), sl.reference.attention(q, k, v, **options), atol=1e-14)
    assert not sl.reference.weights(q, k, mask=lambda b, h, i, j: j < 0).any()
