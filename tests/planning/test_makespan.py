"""Many threads, on paper: how evenly tasks keep them busy, and that no bit depends on their order."""

from __future__ import annotations

import numpy as np
import pytest
from problems import qkv

import speedlight as sl
from speedlight.cpu.engine import makespan as makespans
from speedlight.cpu.engine.makespan import Load, balance_of, makespan, run_region
from speedlight.cpu.engine.schedule import schedule
from speedlight.cpu.runtime import launch
from speedlight.errors import ArgumentError
from speedlight.host.machine import isa_named
from speedlight.host.tunings import MANY, TUNINGS
from speedlight.problem.operands import Strides

RAGGED = tuple(np.random.default_rng(0).permutation(np.linspace(256, 4096, 16).astype(int)).tolist())
CALLS = {
    "prefill 4,096": {"q_len": 4096},
    "prefill 512": {"q_len": 512},
    "16 ragged to 4,096": {"batch": 16, "q_len": 4096, "lengths": RAGGED},
    "decode 1 x 32k": {"q_len": 1, "k_len": 32768},
    "decode 64 x 4k": {"batch": 64, "q_len": 1, "k_len": 4096},
}


def problem_of(name: str, dtype: str = "float32"):
    return sl.plan(q_heads=32, kv_heads=8, head_dim=128, dtype=dtype, causal=True, **CALLS[name]).problem


@pytest.mark.parametrize(("threads", "least"), [(64, 0.93), (192, 0.88)])
@pytest.mark.parametrize("unit", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("name", CALLS)
def test_tasks_keep_many_threads_busy(name, unit, threads, least):
    family = "intel512" if unit == "avx512" else "other"
    problem = problem_of(name)
    how = schedule(problem, isa_named(unit), threads, Strides(), TUNINGS[family])
    found = balance_of(problem, how)
    assert found is not None and how.threads == threads and least <= found.share <= 1.0
    assert found.asleep < found.share + 0.01  # other regions may end a little better


def test_few_threads_have_the_tasks_that_were_measured(monkeypatch):
    """The tables of tunings.py were measured on two cores: nothing that many threads want may reach these."""
    monkeypatch.setattr("speedlight.cpu.engine.schedule.level2_bytes", lambda: 2 << 20)  # theirs: panels fit into it
    for name in CALLS:
        for threads in (1, 2, MANY):
            how = schedule(problem_of(name), isa_named("avx512"), threads, Strides(), TUNINGS["intel512"])
            assert dict(how.words).get("side_by_side", 1) == 1
    how = schedule(problem_of("prefill 4,096"), isa_named("avx512"), 2, Strides(), TUNINGS["intel512"])
    assert (how.tickets, how.panels) == (512, 8)


@pytest.mark.parametrize(
    ("seconds", "threads", "fed", "want"),
    [
        ([1.0] * 4, 2, np.inf, 2.0),
        ([1.0] * 3, 2, np.inf, 2.0),
        ([1.0, 1.0, 2.0], 2, np.inf, 3.0),
        ([2.0, 1.0, 1.0], 2, np.inf, 2.0),
        ([1.0] * 3, 4, 1.5, 2.0),  # memory feeds one and a half
        ([1.0] * 3, 2, 1.5, 7 / 3),  # and one alone no more than one: 4/3, then 1
        ([], 3, np.inf, 0.0),
    ],
)
def test_what_is_simulated(seconds, threads, fed, want):
    assert run_region(seconds, [0.0] * threads, fed, 0.0) == pytest.approx(want)
    visits = len(seconds) + threads  # each thread's last visit finds no ticket
    assert run_region(seconds, [0.0] * threads, fed, 1e-3) == pytest.approx(want, abs=visits * 1e-3)
    assert run_region(seconds, [5.0] * threads, fed, 0.0) == pytest.approx(want + 5.0)
    assert run_region([0.0] * len(seconds), [0.0] * threads, fed, 1e-3) == pytest.approx(visits * 1e-3)


def test_what_comes_before_the_simulated_tickets_is_taken_as_even():
    load = Load(np.full(100_000, 1e-6), np.inf)
    assert makespan(load, 10, 1.0, asleep=False) == pytest.approx(0.01, rel=0.5)
    assert makespan(load, 10, 1.0, asleep=True) > makespan(load, 10, 1.0, asleep=False)


def test_regions_that_are_alike_are_simulated_once(monkeypatch):
    """Whether threads slept at first is told by the first region alone; those after it are the same."""
    simulated, seconds = [], np.repeat(np.linspace(1e-2, 2e-2, 50), 8)
    monkeypatch.setattr(
        makespans, "run_region", lambda tickets, *more: simulated.append(tickets) or run_region(tickets, *more)
    )
    took = makespan(Load(seconds, np.inf), 2, 0.048, asleep=False)
    assert len(simulated) < len(seconds) / 2 / 2
    both = makespans.makespans(Load(seconds, np.inf), 2, 0.048, [False, True])
    assert both[0] == took < both[1] < took + 1e-3 and len(simulated) < len(seconds) / 2


def test_a_plan_tells_the_balance_of_threads_that_are_not_here():
    plan = sl.plan(q_heads=8, q_len=512, head_dim=64, causal=True, threads=96)
    assert plan.threads == 96 and plan.balance is not None and plan.roofs is None
    assert f"{plan.balance.share:.2f} of 96 threads" in str(plan)
    few = sl.plan(q_heads=8, q_len=512, head_dim=64, causal=True, threads=1)
    assert few.threads == 1 and "balance" not in str(few)
    hidden = sl.plan(q_heads=8, q_len=512, head_dim=64, mask=sl.window(30, 0), threads=96)
    assert hidden.balance is None and "balance" not in str(hidden)
    assert sl.plan(q_heads=8, q_len=10**9, head_dim=64, threads=96).balance is None
    for q_len in (1, 4096):  # no heads: nothing to do, in decoding either
        assert sl.plan(q_heads=0, q_len=q_len, k_len=4096, head_dim=64, threads=4).balance == (0.0, 1.0, 1.0)
    for wrong in ({"threads": 0}, {"threads": 1025}, {"threads": 2, "ranks": 4}, {"threads": 2, "device": "cuda"}):
        with pytest.raises(ArgumentError, match="^threads: expected"):
            sl.plan(q_heads=8, q_len=512, head_dim=64, **wrong)


@pytest.mark.parametrize("lengths", [None, (300, 1, 0, 170)])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "q_len", "k_len"), [(8, 4, 300, 400), (6, 6, 64, 3000), (12, 2, 2, 3500), (12, 2, 2, 0)]
)
def test_no_bit_depends_on_how_many_threads_there_are(rng, lengths, q_heads, kv_heads, q_len, k_len):
    """Of 40 threads blocks of several heads take turns, tasks are smaller, and a decode step has more shares."""
    q, k, v = qkv(rng, "float32", 4, q_heads, kv_heads, q_len, k_len, 64, 64)
    options = {"causal": True, "return_lse": True}
    if lengths is not None:
        options["q_lengths"] = tuple(min(x, q_len) for x in lengths)
    sl.set_threads(1)
    want = sl.attention(q, k, v, **options)
    sl.set_threads(40)
    found = sl.attention(q, k, v, **options)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in want]


def test_scratch_is_touched_by_who_works_in_it():
    """Its pages are then in the memory of their socket: whoever takes them for all threads touches none."""
    with open("/proc/self/statm") as f:
        before = int(f.read().split()[1])
    scratch = launch.take_pages(1 << 30)
    with open("/proc/self/statm") as f:
        assert int(f.read().split()[1]) - before < 256 and len(scratch) == 1 << 30
