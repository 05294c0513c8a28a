"""plan(…, ranks=): what is visible between ranks, what they send, and how long it takes, by closed forms."""

from __future__ import annotations

import doctest
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from conftest import FULL, ROOT
from PIL import Image

import speedlight as sl
from speedlight.distributed.plans import Sharded, schedule_of
from speedlight.problem import rank_plan as model
from speedlight.problem import shard_visibility as visible
from speedlight.problem.build import Stated
from speedlight.problem.plan import pair_flops
from speedlight.problem.rank_plan import ASSUMED, Link, Rates, asked_ranks, spread
from speedlight.problem.shard_visibility import seen_by
from speedlight.problem.shardings import SHARDS, positions
from speedlight.problem.tiles import seen

DOCS = ROOT / "docs"
RATES = Rates(1e12, 1e12)
IDS = np.sort(np.random.default_rng(0).integers(0, 9, 700))
HIDING: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (99, None)},
    "documents": {"mask": sl.documents(IDS)},
    "heads and items": {"mask": lambda b, h, i, j: (i - j < 100 * (h + 1)) & (j <= i + 50 * b)},
    "odd": {"mask": lambda b, h, i, j: (i * j) % 7 == 0},
    "additive": {"score": np.where(np.tri(500, 700, 200, bool), 0, -np.inf).astype(np.float32)},
    "padded": {"causal": True, "q_lengths": [500, 77], "k_lengths": [700, 277]},
    "packed": {"causal": True, "layout": "lhd", "cu_seqlens_q": [0, 31, 31, 500], "cu_seqlens_k": [0, 200, 201, 700]},
}


def square(problem, q_len, k_len, packed):
    """How many heads of items see each pair of rows, one by one."""
    total = np.zeros((q_len, k_len), np.int64)
    q_at = k_at = 0
    for b, (n, m) in enumerate(zip(problem.q_lengths, problem.k_lengths, strict=True)):
        i, j = problem.q_starts[b] + np.arange(n)[:, None], problem.k_start + np.arange(m)
        for h in range(problem.q_heads):
            one = seen(problem, {"b": np.int64(b), "h": np.int64(h), "i": i, "j": j})
            total[q_at : q_at + n, k_at : k_at + m] += np.broadcast_to(one, (n, m))
        q_at, k_at = (q_at + n, k_at + m) if packed else (0, 0)
    return total


@pytest.mark.parametrize("name", HIDING)
def test_what_ranks_see_is_what_is_visible(name):
    packed = "layout" in HIDING[name]
    problem = sl.plan(batch=1 if packed else 2, q_heads=2, q_len=500, k_len=700, head_dim=8, **HIDING[name]).problem
    shown = square(problem, 500, 700, packed)
    for ranks, shard in itertools.product((1, 2, 3, 7) if FULL else (1, 3), SHARDS):
        q_runs, k_runs = positions(500, ranks, shard), positions(700, ranks, shard)
        runs = sorted([x for each in k_runs for x in each], key=lambda x: x.start)
        found = seen_by(problem, q_runs, runs, packed=packed)
        for rank, rows in enumerate(q_runs):
            own, striped = shown[[i for x in rows for i in x]].sum(), shard == "stripe" and ranks > 1
            close = name in ("full", "causal", "window")  # of stripes each has its share of the whole
            assert abs(found.pairs[rank] - own) <= 500 * problem.q_heads * problem.batch if striped and close else True
            assert striped or found.pairs[rank] == own
        for (rank, rows), (at, run) in itertools.product(enumerate(q_runs), enumerate(runs)):
            if shard == "stripe" and ranks > 1:
                continue
            keys = np.flatnonzero(shown[[i for x in rows for i in x]][:, list(run)].any(axis=0))
            first, last = found.first[rank, at], found.last[rank, at]
            assert (first, last) == (0, 0) if not keys.size else first <= keys[0] <= first + 31
            assert not keys.size or last - 31 <= keys[-1] + 1 <= last <= len(run)


def spread_of(ranks, link=ASSUMED, rates=RATES, shard="auto", method="auto", backward=False, **sizes):
    given: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "q_len": 8192, "head_dim": 64}
    problem, asked = sl.plan(**given | sizes).problem, asked_ranks(ranks, *link, shard, method)
    assert asked is not None
    return spread(problem, asked, rates, pair_flops(problem, backward=backward), backward=backward)


def ways(found, method):
    return {x.shard: x for x in found.ways if x.method == method}


BLOCK = 2048 * 2 * 128 * 4  # bytes of k and v of a quarter of 8,192 tokens, two heads of 64 + 64


def test_bytes_that_each_method_sends():
    found = spread_of(4)
    assert all(
        x.bytes_sent == (3 * BLOCK,) * 4 for x in (*ways(found, "ring").values(), *ways(found, "gather").values())
    )
    rows, back = 2048 * 4 // 4, 64 * 4 + 4  # of q for each other rank; of a row of out and its lse
    one = 3 * (rows * 64 * 4 + BLOCK // 2 + rows * back)  # two heads for four ranks: each gets one of them
    assert ways(found, "ulysses")["zigzag"].bytes_sent == (one,) * 4
    back = spread_of(4, backward=True)
    assert ways(back, "ring")["contiguous"].bytes_sent == (6 * BLOCK,) * 4  # what flows to them goes home
    assert ways(back, "gather")["contiguous"].bytes_sent == (3 * BLOCK,) * 4
    assert ways(back, "ulysses")["zigzag"].bytes_sent == (3 * (2 * rows * 64 * 4 + BLOCK // 2),) * 4
    half = spread_of(4, backward=True, dtype="bfloat16")  # whose sums are float32
    assert ways(half, "ring")["contiguous"].bytes_sent == (3 * (BLOCK // 2 + BLOCK),) * 4
    assert ways(half, "gather")["contiguous"].bytes_sent == (3 * BLOCK,) * 4
    assert ways(half, "ulysses")["zigzag"].bytes_sent == (3 * (2 * rows * 64 * 2 + BLOCK // 2),) * 4


def test_a_mesh_is_a_ring_of_what_exchanges_heads():
    """(2, 2): a rank gives one half of its rows and keys away, and has one block of two heads travel."""
    found = spread_of(4, method="mesh", shard="contiguous").way
    rows = 2048 * 2  # of q, of two heads
    there, home = rows * 64 * 4 + BLOCK // 2, rows * (64 * 4 + 4)
    assert found.mesh == (2, 2) and found.name == "mesh 2x2" and found.bytes_sent == (there + BLOCK + home,) * 4
    assert {x.mesh for x in spread_of(8, q_heads=8, kv_heads=4).ways} == {None, (4, 2), (2, 4)}
    assert not [x for x in spread_of(8, q_heads=3, kv_heads=3).ways if x.mesh]
    alone = spread_of(4, method="ulysses", shard="contiguous").way
    assert alone.compute_seconds == pytest.approx(found.compute_seconds)
    assert max(spread_of(8, q_heads=8, method="mesh", causal=True, shard="zigzag").way.balance, 1) < 1.01


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["full", "causal", "window", "documents"])
def test_bytes_are_those_that_processes_agree_to_send(name, exact):
    length, ranks = 6 << 10, 3  # whose chunks are whole spans
    options = {"documents": {"mask": sl.documents(np.arange(length) // 2500)}}.get(name, HIDING[name])
    found = spread_of(ranks, q_len=length, batch=2, method="exact" if exact else "ring", **options)
    problem = sl.plan(batch=2, q_heads=4, kv_heads=2, q_len=length, head_dim=64, **options).problem
    for way in found.ways:
        if way.shard != "stripe":
            held = positions(length, ranks, way.shard)
            schedule = schedule_of(Sharded(Stated(problem), held, held), exact=exact)
            sent = [schedule.tokens_sent(rank) * 2 * 2 * 128 * 4 for rank in range(ranks)]
            assert list(way.bytes_sent) == sent, (way.shard, way.bytes_sent, sent)


@pytest.mark.parametrize("name", ["full", "causal", "window", "documents"])
def test_bytes_of_lengths_that_are_no_whole_spans(name):
    """Within 15 % of what processes agree to send; a span that two ranks hold is told as the one's that is seen."""
    length = 39001
    ids = np.sort(np.random.default_rng(1).integers(0, 6, length))
    options = HIDING[name] | ({"causal": True, "mask": sl.documents(ids)} if name == "documents" else {})
    for ranks, method in ((2, "exact"), (5, "exact"), (3, "ring")):
        problem = sl.plan(q_heads=1, q_len=length, head_dim=8, **options).problem
        sizes = {"q_heads": 1, "kv_heads": 1, "q_len": length, "head_dim": 8}
        for way in spread_of(ranks, method=method, **sizes, **options).ways:
            if way.shard != "stripe":
                held = positions(length, ranks, way.shard)
                schedule = schedule_of(Sharded(Stated(problem), held, held), exact=method == "exact")
                sent = [schedule.tokens_sent(rank) * 16 * 4 for rank in range(ranks)]
                assert way.bytes_sent == pytest.approx(sent, rel=0.15, abs=1024 * 16 * 4), (ranks, way)


def rates_of(row: dict[str, Any], threads: int) -> Rates:
    """What one thread of the single process computed, of a measured row; memory is no bound of these."""
    window = 1023 if "window" in row["name"] else None
    length = 65536 if window else 16384
    pairs = sl.plan(q_heads=8, q_len=length, head_dim=128, causal=True, window=(window, None)).visible_pairs
    assert pairs is not None
    flops = pairs * (4 * 128 + ("backward" in row["name"]) * 10 * 128)
    return Rates(flops / row["seconds"]["single"][2] / threads, 1e18)


REPORTS = [json.loads(x.read_text()) for x in sorted((DOCS.parent / "benchmarks" / "results" / "ranks").glob("*.json"))]


@pytest.mark.parametrize(("report", "at"), [(x, n) for x in REPORTS for n in range(len(x["rows"]))])
def test_measured_rows(report, at):
    """Bytes, memory, and where ranks have cores of their own time, of what was measured: within 15 %."""
    row, ranks, link = report["rows"][at], report["ranks"], Link(**report["link"])
    kind, shard, *_ = row["name"].replace(",", "").split()
    window = (1023, None) if "window" in row["name"] else None
    method = {"ring": "ring", "ulysses": "ulysses", "exact": "exact"}[kind]
    sizes: dict[str, Any] = {"q_heads": 8, "kv_heads": 8, "q_len": 65536 if window else 16384, "head_dim": 128}
    given = {"causal": True, "window": window, "shard": shard, "method": method}
    rates = rates_of(row, report["ranks"] * report["threads_each"])
    backward = (False, True)[: 1 + ("backward" in row["name"])]
    found = [spread_of(ranks, link, rates, backward=x, **given, **sizes).way for x in backward]
    sent = [sum(each) for each in zip(*[x.bytes_sent for x in found], strict=True)]
    memory = [max(each) for each in zip(*[x.memory_bytes for x in found], strict=True)]
    assert sent == pytest.approx(row["bytes_sent"], rel=0.15)
    assert max(memory) == pytest.approx(max(row["memory_bytes"]), rel=0.15)
    if ranks * report["threads_each"] <= report["threads"]:
        assert sum(x.slowest for x in found) == pytest.approx(row["seconds"]["ranks"][2], rel=0.15)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 9), (9, 0)])
def test_no_tokens_take_no_time(lengths):
    found = sl.plan(q_heads=8, q_len=lengths[0], k_len=lengths[1], head_dim=8, ranks=2).ranks
    assert found is not None and found.way.slowest == 0 and set(found.way.bytes_sent) == {0}


def test_what_nobody_sees_is_not_sent():
    window = ways(spread_of(4, causal=True, window=(1023, None)), "ring")
    assert window["contiguous"].bytes_sent == (BLOCK // 2, BLOCK // 2, BLOCK // 2, 0)
    assert window["zigzag"].bytes_sent == (BLOCK // 2, BLOCK, BLOCK, BLOCK // 2)
    causal = ways(spread_of(4, causal=True), "ring")
    assert causal["contiguous"].bytes_sent == (BLOCK, 2 * BLOCK, 3 * BLOCK, 0)
    assert sum(causal["zigzag"].bytes_sent) == 9 * BLOCK  # a rank sees half of those after its own
    assert max(ways(spread_of(4, mask=sl.documents(np.arange(8192) // 2048)), "ring")["contiguous"].bytes_sent) == 0


def test_load_of_each_sharding():
    for ranks in (2, 4, 16):
        balance = spread_of(ranks, causal=True).balance
        assert balance["contiguous"] == pytest.approx(2 - 1 / ranks, rel=1e-3)
        assert balance["zigzag"] == pytest.approx(1, rel=1e-3) and balance["stripe"] == pytest.approx(1, rel=1e-3)
    assert spread_of(4).balance == dict.fromkeys(SHARDS, 1.0)


def test_seconds_are_of_computing_or_of_the_link_whichever_is_longer():
    flops = 4 * 8192**2 * 4 * 64
    for method in ("ring", "gather", "ulysses"):
        free, slow, late = (
            spread_of(4, Link(*link), method=method, shard="zigzag") for link in ((1e18, 0.0), (1e6, 0.0), (1e18, 10.0))
        )
        assert free.way.slowest == pytest.approx(flops / 4 / RATES.flops, rel=0.05) and 3.8 < free.speedup <= 4
        assert slow.way.slowest == pytest.approx(max(slow.way.bytes_sent) / 1e6, rel=0.01)
        assert late.way.slowest == pytest.approx(60 if method == "ulysses" else 30, rel=0.01)
    assert spread_of(4, Link(1e18, 0.0)).way.method == "ring" and spread_of(1).speedup == 1
    owners = spread_of(4, Link(1e6, 0.0), method="exact", shard="contiguous").way  # each sends to three at once
    assert 9 * BLOCK / 1e6 <= owners.slowest <= 12.1 * BLOCK / 1e6 and owners.bytes_sent == (3 * BLOCK,) * 4
    hidden = spread_of(4, Link(BLOCK / (flops / 16 / RATES.flops) * 1.25, 0.0), method="ring")  # 80 % of a step
    assert hidden.way.slowest == pytest.approx(flops / 4 / RATES.flops, rel=0.05)


def test_the_fastest_way_is_chosen():
    assert spread_of(4, causal=True).way.shard == "zigzag"
    assert spread_of(3, causal=True).way.method in ("ring", "gather")  # no four heads on three ranks
    assert not ways(spread_of(3), "ulysses")
    few = spread_of(4, Link(1e9, 0.0), rates=Rates(1e18, 1e18), kv_heads=4, q_len=64, k_len=65536)  # fewest bytes
    assert few.way.method == "ulysses" and few.ways == tuple(sorted(few.ways, key=lambda x: x.slowest))
    short = spread_of(8, Link(1e9, 1e-3), q_len=64, q_heads=8)  # latency is all there is
    assert short.way.slowest == min(x.slowest for x in short.ways)
    assert {x.shard for x in spread_of(2, shard="stripe").ways} == {"stripe"}


def test_memory_beyond_shards():
    found = spread_of(4)
    states = 2048 * 4 * 2 * 4
    passed_on = (3 * BLOCK // 2 + states,) * 4  # of halves of a shard: computed with, passed on, coming
    assert ways(found, "ring")["contiguous"].memory_bytes == passed_on
    assert ways(spread_of(2), "ring")["contiguous"].memory_bytes == (2 * BLOCK + 2 * states,) * 2
    causal = ways(spread_of(2, causal=True), "ring")["zigzag"]  # rank 1 gets half a shard, and no more
    assert causal.memory_bytes == (2 * BLOCK + 2 * states, BLOCK + 2 * states)
    assert ways(spread_of(2, causal=True), "exact")["zigzag"].memory_bytes == causal.memory_bytes
    assert ways(found, "gather")["contiguous"].memory_bytes == (4 * BLOCK,) * 4
    rows = 8192 * 64 * 4  # bytes of q, k, v or out, of the one head that a rank has of all tokens
    assert ways(found, "ulysses")["contiguous"].memory_bytes == (3 * rows + 2 * 8192 * 4,) * 4  # q, k, v and states


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_rank_holds_at_most_two_shards_beyond_its_own(backward, dtype):
    """Of as many heads of k and v as of q: the figure of forward passes, of rings and ulysses; back, of rings."""
    size, lengths = {"float32": 4, "bfloat16": 2}[dtype], (32768, 39999) if FULL else (39999,)
    for ranks, causal, length in itertools.product((2, 3, 4, 8) if FULL else (2, 4), (False, True), lengths):
        for kv_heads in (24, 8) if FULL or causal else (24,):
            sizes = {"q_heads": 24, "kv_heads": kv_heads, "q_len": length, "head_dim": 128, "dtype": dtype}
            for way in spread_of(ranks, causal=causal, backward=backward, **sizes).ways:
                shard = -(-length // ranks) * 24 * 2 * 128 * size
                if way.method in ("gather", "mesh") or (backward and way.method == "ulysses"):
                    continue
                assert 0 < max(way.memory_bytes) <= 2 * shard, (way.method, way.shard, ranks, kv_heads)


def test_memory_of_a_pass_back():
    """Keys in three halves; what flows to them of two, and of own ones of one: of half the heads."""
    sizes = {"q_heads": 8, "kv_heads": 8, "q_len": 8192, "head_dim": 128}
    shard = 2048 * 8 * 256 * 4
    found = ways(spread_of(4, backward=True, causal=True, **sizes), "ring")
    assert found["contiguous"].memory_bytes == (shard // 4, shard * 5 // 4, shard * 3 // 2, shard)
    assert found["zigzag"].memory_bytes == (shard * 3 // 2,) * 4
    half = ways(spread_of(4, backward=True, dtype="float16", **sizes), "ring")["contiguous"]  # a quarter, and sums
    assert half.memory_bytes == (shard // 2 * (3 / 2 + 3 + 3) // 4,) * 4


def test_memory_without_any_other_rank():
    assert ways(spread_of(1), "ring")["contiguous"].memory_bytes == (0,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks": 0}, "ranks: expected 1 to 2,048; got 0"),
        ({"ranks": 2.0}, "ranks: expected an int"),
        ({"ranks": 4096}, "ranks: expected 1 to 2,048; got 4096"),
        ({"ranks": 2, "method": "exact", "shard": "stripe"}, "shard: expected 'zigzag', 'contiguous' or 'auto' for"),
        ({"ranks": 2, "method": "exact", "backward": True}, "method: expected 'ring', 'ulysses', 'gather' or 'auto'"),
        ({"ranks": 2, "link_bandwidth": 0}, "link_bandwidth: expected bytes per second, finite and above 0; got 0.0"),
        ({"ranks": 2, "link_bandwidth": float("nan")}, "link_bandwidth: expected .*, finite and above 0; got nan"),
        ({"ranks": 2, "link_bandwidth": float("inf")}, "link_bandwidth: expected .*, finite and above 0; got inf"),
        ({"ranks": 2, "latency": float("inf")}, "latency: expected seconds, finite, from 0; got inf"),
        ({"ranks": 2, "latency": -1.0}, "latency: expected seconds, finite, from 0; got -1.0"),
        ({"ranks": 2, "latency": "1ms"}, "latency: expected seconds; got str"),
        ({"ranks": 2, "shard": "striped"}, "shard: expected 'auto' or one of 'contiguous', 'zigzag', 'stripe'"),
        ({"ranks": 2, "method": None}, "method: expected 'auto' or one of 'ring', 'ulysses', 'gather', 'exact', 'm"),
        ({"ranks": 3, "method": "mesh"}, "method: expected 'ring', 'gather', 'exact' or 'auto' for 3 ranks: a"),
        (
            {"ranks": 4, "method": "mesh", "shard": "stripe"},
            "shard: expected 'zigzag', 'contiguous' or 'auto' for method='mesh'; got 'stripe'",
        ),
        (
            {"ranks": 2, "dropout": 0.1, "seed": 1},
            "dropout: expected 0 beside ranks=; got 0.1. Several processes have no dropout",
        ),
        ({"ranks": 4, "mesh": (2, 2)}, "mesh: expected the arguments of plan.+Use method='mesh' beside ranks="),
        ({"shard": "zigzag"}, "shard: expected ranks= beside it; got 'zigzag' alone"),
        ({"latency": 1e-5}, "latency: expected ranks= beside it; got 1e-05 alone"),
        ({"ranks": 3, "method": "ulysses"}, "method: expected 'ring', 'gather', 'exact' or 'auto' where 3 r"),
        ({"ranks": 6, "method": "ulysses"}, "method: expected 'ring', 'gather', 'exact', 'mesh' or 'auto' where 6 r"),
    ],
)
def test_errors(options, words):
    with pytest.raises(sl.Error, match="^" + words.replace("(", r"\(")):
        sl.plan(q_heads=4, q_len=64, head_dim=8, **options)


def test_the_plan_says_it_in_words_and_numbers():
    plan = sl.plan(q_heads=8, q_len=65536, head_dim=128, causal=True, ranks=8, link_bandwidth=1e9, latency=1e-4)
    rows = dict(plan.rows())
    assert plan.ranks is not None
    assert rows["ranks"].startswith(f"8, {plan.ranks.way.method} zigzag: ") and rows["link"] == "1 GB/s, 100 µs"
    assert rows["load"] == "contiguous 1.87, zigzag 1, stripe 1: the most over the mean"
    assert sl.plan(q_len=9, q_heads=1, head_dim=1, ranks=2).rows()[-1] == ("link", "12.5 GB/s, 10 µs, assumed")
    assert (found := doctest.testmod(model)).attempted > 0 and found.failed == 0
    assert "ranks" not in dict(sl.plan(q_len=9, q_heads=1, head_dim=1).rows())


def test_the_command_says_the_same_without_pytorch(tmp_path):
    code = (
        "import sys; sys.argv = 'speedlight plan --q-len 8192 --causal --ranks 4 --shard contiguous --json'.split()\n"
        "from speedlight.tools.cli import main\n"
        "try: main()\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["ranks"]
    assert found["ranks"] == 4 and found["assumed"] and found["link"] == {"bandwidth": 12.5e9, "latency": 1e-5}
    assert found["way"]["shard"] == "contiguous" and len(found["way"]["seconds"]) == 4
    assert found["balance"]["contiguous"] == pytest.approx(1.75, rel=1e-3) and 1 < found["speedup"] < 4


def test_the_page_says_what_the_model_says(capsys):
    text = (DOCS / "scaling.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, {})
    first, *loads, last = capsys.readouterr().out.splitlines()
    assert [first, last] == [x.split(":")[0] for x in re.findall(r"^print\(.*\)  # (.*)$", text, re.MULTILINE)]
    assert f"over the mean: {', '.join(loads)}\n" in text and len(loads) == 3
    spec = importlib.util.spec_from_file_location("scaling", DOCS.parent / "tools" / "scaling.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with Image.open(tool.PICTURE) as picture:
        drawn = json.loads(picture.info["Figures"])
    assert len(drawn) == len(tool.RANKS) * 2 * len(tool.HIDING) * len(tool.LINKS)
    least = [x for x in drawn if x["ranks"] == tool.RANKS[0]]
    assert json.loads(json.dumps(list(tool.figures(tool.RANKS[:1])))) == least
    reports = [json.loads(path.read_text()) for path in sorted(tool.RESULTS.glob("*.json"))]
    assert tool.written(text, tool.measured(reports)) == text


@pytest.mark.skipif(not FULL, reason="three processes that import PyTorch")
def test_bench_of_ranks_measures_what_is_right(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS.parent / "benchmarks"))
    ranks = importlib.import_module("ranks")
    about: dict[str, Any] = {"ranks": 2, "threads_each": 1, "threads": 2}
    with ranks.groups(about) as (single, several):
        assert about["link"]["bandwidth"] > 1e6 and 0 < about["link"]["latency"] < 1
        for case in (ranks.Case("ring", 4096, backward=True), ranks.Case("exact", 4096), ranks.Case("ulysses", 2048),
                     ranks.Case("window", 4096, window=300)):  # fmt: skip
            row = ranks.row_of(case, single, several, 1, about)
            assert "refused" not in row and case.name in ranks.line(row)
            assert row["same_bits"] >= (case.kind in ("exact", "ulysses")) and row["share"][2] > 0
            assert max(row["bytes_sent"]) == row["modelled"]["bytes_sent"]
            assert 0 < row["memory_bytes"][0] < 8 * row["modelled"]["memory_bytes"] + (16 << 20)
            assert row["memory_shards"] <= 2, row
    assert [x.poll() is not None for x in (*single.processes, *several.processes)] == [True] * 3


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("q_len: expected fewer tokens", {"q_len": 1 << 36}),
        ("q_len: expected fewer tokens", {"q_len": 1 << 36, "causal": True}),
        ("q_len: expected fewer tokens", {"q_len": 1, "k_len": 1 << 36}),
        ("q_len: expected fewer tokens", {"q_len": 1 << 25, "q_heads": 1 << 14}),
        ("q_heads: expected at most", {"q_len": 1024, "q_heads": 1 << 40, "kv_heads": 1 << 40}),
    ],
)
def test_sizes_that_nobody_looks_at_are_refused_soon(what, options):
    start = time.process_time()
    with pytest.raises(sl.UnsupportedError, match=f"^{what}"):
        sl.plan(**{"q_heads": 8, "head_dim": 64, "ranks": 4} | options)
    assert time.process_time() - start < 30  # a hang guard


def test_masks_of_too_many_edges_are_refused(monkeypatch):
    monkeypatch.setattr(visible, "_MOST_LEAVES", 1000)
    with pytest.raises(sl.UnsupportedError, match=r"^q_len: .* under this mask are too many to look at\.$"):
        sl.plan(q_heads=8, head_dim=64, q_len=1 << 16, window=(4096, 0), ranks=4)


def test_long_causal_plans_are_closed_forms():
    """The last of four parts of n rows each sees n (3n + (n + 1) / 2) of n (8n + 2) pairs."""
    for q_len in (1 << 12, 1 << 26):
        n = q_len // 4
        found = sl.plan(q_heads=4, head_dim=64, q_len=q_len, causal=True, ranks=4).ranks
        assert found is not None
        assert found.balance["contiguous"] == float((3 * n + (n + 1) / 2) / (8 * n + 2) * 4)
        assert found.balance["zigzag"] == 1
