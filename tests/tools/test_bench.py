"""`speedlight bench`: any problem that `plan` takes, beside peers that compute the same, and a verdict."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cli import here  # noqa: F401

import speedlight as sl
from speedlight import reference
from speedlight.host import others
from speedlight.host.others import Others
from speedlight.problem.options import AllOptions
from speedlight.tools import bench, measuring, peers

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels
SHARE = Others.share  # as it is: tests of commands have none


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Other tests that run meanwhile would take the verdict."""
    monkeypatch.setattr(Others, "share", lambda self: 0.0)


PROBLEMS = {
    "causal": "--causal",
    "grouped": "--kv-heads 2 --value-dim 24 --dtype bfloat16",
    "fewer queries": "--k-len 90 --causal --kv-heads 1",
    "window": "--window 9,0",
    "mask of heads": "--mask '(h > 1) | (j <= i)'",
    "padded": "--lengths 20,48,1 --causal",
    "gradients": "--backward --k-len 70 --causal --kv-heads 2 --value-dim 24",
    "padded gradients": "--lengths 20,48 --backward --mask 'window(5, 9)' --kv-heads 2",
    "decode": "--decode --k-len 70 --kv-heads 1 --causal --dtype float16",
    "padded decode": "--decode --lengths 70,3 --window 9,0",
    "shared prefix": "--decode --batch 3 --k-len 300 --shared-prefix 270 --kv-heads 2 --dtype bfloat16",
    "padded shared prefix": "--decode --lengths 300,290 --shared-prefix 129 --value-dim 24 --window 200,0",
    "latents": "--latent --k-len 70 --value-dim 12",
    "latents, more queries": "--latent --q-len 48 --value-dim 12 --causal",
}


@pytest.mark.parametrize("words", PROBLEMS.values(), ids=PROBLEMS)
def test_a_peer_computes_the_same(here, words):  # noqa: F811
    """Else it would be left out, and a note would say so."""
    size = [] if any(x in words for x in ("--decode", "--lengths", "--latent")) else ["--q-len", 48]
    done = here("bench", *size, "--head-dim", 16, "--q-heads", 4, "--turns", 1, "--peer", "torch", "--json",
                *shlex.split(words))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert len(row["ratios"]["torch"]) == 5 and not row["notes"], row["notes"]
    assert row["gflops"] > 0 and 0 < row["share_of_peak"] <= row["share_of_roof"]
    assert ("apart" in row["ratios"]) == ("--shared-prefix" in words)
    assert row["kernel"].startswith("backward" if "--backward" in words else "decode" if "--decode" in words else "f")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_takes_any_mask():
    """Not compiled: that takes long, and says no more."""
    compiled = torch.compile
    for mask in ("causal", lambda b, h, i, j: (j <= i) | (h > b)):
        options = {"causal": True} if mask == "causal" else {"mask": mask}
        plan = sl.plan(batch=2, q_heads=2, q_len=40, head_dim=16, **options)
        arrays = measuring.normal_numbers("float32", *[(2, 2, 40, 16)] * 3)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch, "compile", lambda x, **how: x if "dynamic" in how else compiled(x, **how))
            got = peers.flex(peers.Asked.of(plan.problem, arrays))()
        np.testing.assert_allclose(got.numpy(), reference.attention(*arrays, **options), atol=1e-5)


@pytest.mark.parametrize("words", ["--score 'softcap(9)'", "--dropout 0.5 --seed 3"])
def test_what_no_peer_computes_is_measured_alone(here, words):  # noqa: F811
    done = here("bench", "--q-len", 48, "--turns", 1, "--peer", "torch", "--peer", "jax", *shlex.split(words))
    assert done.returncode == 0 and "no other library to compare with" in done.stdout, done.stderr
    assert "torch, jax  " in done.stdout


def test_a_result_that_is_wrong_is_not_measured(here, monkeypatch):  # noqa: F811
    right = sl.attention
    monkeypatch.setattr(sl, "attention", lambda *arrays, **options: right(*arrays, **options) * 1.1)
    done = here("bench", "--q-len", 48, "--peer", "none")
    assert done.returncode == 1 and "FAILED: " in done.stdout and "outside the bound; not measured" in done.stdout
    assert "GFLOP/s" not in done.stdout


def test_a_peer_that_is_wrong_is_left_out(here, monkeypatch):  # noqa: F811
    monkeypatch.setitem(peers.PEERS, "torch", lambda asked: lambda: asked.q * 2)
    done = here("bench", "--q-len", 48, "--peer", "torch", "--turns", 1)
    assert done.returncode == 0 and "torch       another result than ours: " in done.stdout
    assert "no other library to compare with" in done.stdout


def test_other_bits_than_sequences_apart_are_not_measured(here, monkeypatch):  # noqa: F811
    """Though every element is inside the error bound."""

    class Moved(sl.PagePool):
        def attend(self, layer, sequences, *arrays, **options):
            got = super().attend(layer, sequences, *arrays, **options)
            return np.nextafter(got, np.float32(9)) if self.used_bytes < 30 * self.page_bytes else got  # if shared

    monkeypatch.setattr(sl, "PagePool", Moved)
    words = "--decode --batch 2 --k-len 300 --shared-prefix 256 --peer none"
    done = here("bench", *shlex.split(words))
    assert done.returncode == 1 and "FAILED: sequences that share keys have other bits than sequences" in done.stdout


def test_sequences_that_share_keys_share_their_pages(monkeypatch):
    """Ours has the prefix once; "apart" has it in each sequence: same tokens, other pages."""
    plan = sl.plan(batch=3, q_heads=4, kv_heads=2, q_len=1, k_len=70, head_dim=16, shared_prefix=64)
    pools, made = [], sl.PagePool

    def counted(**sizes):
        pools.append(made(**sizes))
        return pools[-1]

    monkeypatch.setattr(sl, "PagePool", counted)
    call, arrays, apart = measuring._shared(plan, {"score": None})
    shared, copies = (pool.pages - pool.free_pages for pool in pools)
    assert (shared, copies) == (4 + 3, 3 * 5)
    want = reference.attention(*arrays)
    for got in (call(), apart()):
        np.testing.assert_allclose(got, want[:, :, 0], atol=1e-5)
    assert (arrays[1][1:, :, :64] == arrays[1][:1, :, :64]).all() and (arrays[1][1] != arrays[1][0]).any()


ROW = {
    "name": "causal", "gflops": 9.0, "others": 0.0, "share_of_roof": 0.84,
    "seconds": {"speedlight": [1.0, 1.0, 1.0, 1.05, 1.1]},
    "ratios": {"torch": [1.0, 1.2, 1.31, 1.4, 1.5]}, "notes": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, "1.31 x as fast as PyTorch's SDPA; 84% of what this machine can do"),
        (
            {"ratios": ROW["ratios"] | {"openvino": [0.5, 0.6, 0.7, 0.8, 0.9]}},
            "0.70 x as fast as OpenVINO, the fastest of 2 others; 84% of what this machine can do",
        ),
        (
            {"ratios": ROW["ratios"] | {"apart": [0.9, 1.0, 1.1, 1.2, 1.3]}},
            "1.10 x as fast as sequences apart; 1.31 x as fast as PyTorch's SDPA; 84% of what this machine can do",
        ),
        (
            {"ratios": {"apart": [2.0] * 5}},
            "2.00 x as fast as sequences apart; 84% of what this machine can do; no other library to compare with",
        ),
        ({"ratios": {}}, "84% of what this machine can do; no other library to compare with"),
        (
            {"share_of_roof": 1.2},
            "1.31 x as fast as PyTorch's SDPA; faster than this machine's memory is read: its caches hold the problem",
        ),
    ],
)
def test_the_verdict_is_a_sentence(changed, verdict):
    assert bench._verdict(ROW | changed) == verdict


def test_a_busy_machine_is_told_and_has_no_verdict():
    def said(**changed):
        rows = dict(bench._rows(ROW | changed, {}))
        return rows.get("busy"), rows["verdict"]

    spread = {"seconds": {"speedlight": [1.0, 1.0, 1.1, 1.4, 2.0]}}
    verdict, advice = bench._verdict(ROW), ": repeat this while little else runs"
    none = "none: other programs took more than 10% of the CPUs"
    assert said() == said(others=0.1) == said(others=None) == (None, verdict)
    assert said(**spread) == (f"our times spread over 36%{advice}", verdict)
    assert said(others=0.34) == (f"other programs took 34% of the CPUs{advice}", none)
    assert said(others=0.34, **spread) == (
        f"other programs took 34% of the CPUs, our times spread over 36%{advice}", none,
    )  # fmt: skip


STAT = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 {busy} 0 {busy} {idle} 5 0 0 {busy} 7 7\ncpu99999 9 9 9 9 9 9 9 9 9 9\nintr 1\n"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone says how long CPUs were busy")
@pytest.mark.parametrize(
    ("busy", "idle", "own", "share"),
    [
        (64, 320, 2.0, 0.125),  # 3 seconds of 8, of which 2 were ours
        (64, 320, 4.0, 0.0),  # clocks differ by a little
        (0, 512, 0.0, 0.0),
        (192, 0, 0.0, 1.0),
        (0, 0, 1.0, None),  # a sandbox that counts nothing
    ],
)
def test_what_others_took_is_what_was_busy_and_not_ours(busy, idle, own, share, monkeypatch, tmp_path):
    """Of the CPUs that this process may use, whatever the load average was before."""
    stat, now = tmp_path / "stat", [0.0, 0.0]
    fake = SimpleNamespace(
        sched_getaffinity=lambda _: {0}, sysconf=lambda _: 64, times=lambda: (now[0] / 2, now[0] / 2, 0.0, 0.0, 9.0)
    )
    monkeypatch.setattr(others, "os", fake)
    monkeypatch.setattr(others, "open", lambda _: stat.open(), raising=False)
    monkeypatch.setattr(others, "time", SimpleNamespace(perf_counter=lambda: now[1]))
    stat.write_text(STAT.format(busy=1000, idle=2000))
    meter = Others()
    now[:] = own, 8.0
    stat.write_text(STAT.format(busy=1000 + busy, idle=2000 + idle))
    assert SHARE(meter) == share
    stat.unlink()
    assert SHARE(meter) is None and SHARE(Others()) is None


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux alone says how long CPUs were busy")
def test_another_process_counts():
    code = (
        "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nprint('done', flush=True)"
    )
    meter, start = Others(), time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", code + "\ninput()"], stdin=-1, stdout=-1, text=True) as child:
        child.stdout.readline()  # it lives on: those that have ended are ours
        share, seconds = SHARE(meter), time.perf_counter() - start
        child.stdin.write("\n")
    assert share is None or share > 0.2 / seconds / len(os.sched_getaffinity(0))


def test_rows_are_written(here, tmp_path):  # noqa: F811
    words = ["bench", "--q-len", 64, "--turns", 1, "--peer", "torch", "-o", tmp_path / "r.json"]
    done = here(*words)
    assert done.returncode == 0 and f"written     {tmp_path}/r.json" in done.stdout, done.stderr
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["name"].startswith("float32, batch 1, heads 8/8, q 64, k 64") and row["flops"] == 8 * 64 * 64 * 4 * 64
    missing = json.loads(here("bench", "--q-len", 64, "--turns", 1, "--peer", "jax", "--json").stdout)
    assert "jax" in missing["missing"] or "jax" in missing["rows"][0]["ratios"]


def test_every_option_of_plan_is_an_option_of_attention():
    """So that options() of a problem go to a call as they are."""
    from speedlight.tools.options import ProblemOptions

    given = ProblemOptions(lengths="3,4", dropout=0.5, seed=1).options()
    assert set(given) <= set(AllOptions.__annotations__)
    assert given["lengths"] == [3, 4] and ProblemOptions(lengths="3,4").plan().problem.q_lengths == (3, 4)
    decoded = ProblemOptions(decode=True, lengths="3,4").plan().problem
    assert (decoded.q_lengths, decoded.k_lengths, decoded.q_starts) == ((1, 1), (3, 4), (2, 3))
    assert ProblemOptions(decode=True).plan().problem.k_lengths == ProblemOptions().plan().problem.q_lengths == (2048,)
