"""`speedlight bench`: any problem that `plan` takes, beside peers that compute the same, and a verdict."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
from test_cli import here  # noqa: F401

import speedlight as sl
from speedlight import reference
from speedlight.problem.options import AllOptions
from speedlight.tools import bench, measuring, peers

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

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
}


@pytest.mark.parametrize("words", PROBLEMS.values(), ids=PROBLEMS)
def test_a_peer_computes_the_same(here, words):  # noqa: F811
    """Else it would be left out, and a note would say so."""
    size = [] if "--decode" in words or "--lengths" in words else ["--q-len", 48]
    done = here("bench", *size, "--head-dim", 16, "--q-heads", 4, "--turns", 1, "--peer", "torch", "--json",
                *shlex.split(words))  # fmt: skip
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert len(row["ratios"]["torch"]) == 5 and not row["notes"], row["notes"]
    assert row["gflops"] > 0 and 0 < row["share_of_peak"] <= row["share_of_roof"]
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


ROW = {
    "load": 0.0, "share_of_roof": 0.84, "seconds": {"speedlight": [1.0, 1.0, 1.0, 1.05, 1.1]},
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
        ({"ratios": {}}, "84% of what this machine can do; no other library to compare with"),
        (
            {"share_of_roof": 1.2},
            "1.31 x as fast as PyTorch's SDPA; faster than this machine's memory is read: its caches hold the problem",
        ),
    ],
)
def test_the_verdict_is_a_sentence(changed, verdict):
    assert bench._verdict(ROW | changed) == verdict


def test_a_busy_machine_is_told(monkeypatch):
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 4)
    assert bench._disturbances(ROW) == ""
    assert bench._disturbances(ROW | {"load": 1.5}) == "load average 1.5 on 4 cores before it began"
    spread = ROW | {"seconds": {"speedlight": [1.0, 1.0, 1.1, 1.4, 2.0]}}
    assert bench._disturbances(spread) == "our times spread over 36%"
    assert bench._disturbances(spread | {"load": 2.0}).count(", ") == 1


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
