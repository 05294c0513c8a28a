"""Caches and other libraries' calls over several ranks, on this machine: what one process computes."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import FULL, ROOT, SUPPORT

import speedlight as sl
from speedlight.distributed import placement, positions

RANKS = (1, 2, 3, 4) if FULL else (2,)
TEXT = "".join([(SUPPORT / f"{x}.py").read_text() for x in ("sharded_cache", "dropins_rings", "dropins")])
CASES = re.findall(r"^def (case_\w+)", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> dict[tuple[int, str], list[str]]:
    """Of every number of ranks and every case, what each rank said: one process forks them all."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SPEEDLIGHT_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(SUPPORT / "dropins.py"), *map(str, RANKS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500 if FULL else 300)
    found: dict[tuple[int, str], list[str]] = {}
    for line in done.stdout.splitlines():
        ranks, _, name, text = line.split(" ", 3)
        found.setdefault((int(ranks), name), []).append(text.replace("\\n", "\n"))
    found[0, "errors"] = [done.stderr]
    return found


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_ranks(said, ranks, name):
    texts = said.get((ranks, name), ["said nothing", *said[0, "errors"]])
    assert texts == ["passed"] * ranks, "\n".join(texts)


# --- where tokens lie, without processes


def drawn_placement(draw: random.Random, ranks: int) -> placement.Placement:
    p = placement.placed([], ranks)
    for _ in range(draw.randrange(6)):
        n = draw.choice((0, 1, 5, 33, 200))
        shard = draw.choice(("contiguous", "zigzag", "stripe"))
        p = draw.choice((placement.sharded(p, positions(n, ranks, shard)), placement.grown(p, n, 16)))
    return p


def check(p: placement.Placement, n: int) -> None:
    """Every token is on one rank, and those of a rank rise."""
    own = [p.positions(rank) for rank in range(len(p.counts))]
    assert p.length == n and tuple(map(len, own)) == p.counts
    assert all((np.diff(x) > 0).all() for x in own) and sorted(np.concatenate(own)) == list(range(n))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_placements(ranks):
    draw = random.Random(ranks)
    for _ in range(60):
        p = drawn_placement(draw, ranks)
        check(p, p.length)
        n = draw.randrange(100)
        at_once = one_by_one = p
        at_once = placement.grown(p, n, 16)
        for _ in range(n):
            one_by_one = placement.grown(one_by_one, 1, 16)
        check(at_once, p.length + n)
        assert at_once == one_by_one
        for rank in range(ranks):
            rows = [i + p.length for i in placement.new_rows(p, at_once, rank)]
            assert rows == [i for i in at_once.positions(rank) if i >= p.length]
        if p.length:
            shorter = placement.shortened(p, draw.randrange(p.length))
            check(shorter, shorter.length)
            for rank in range(ranks):
                assert (p.positions(rank)[: shorter.counts[rank]] == shorter.positions(rank)).all()
        words = placement.as_words([[p], [at_once]])
        assert placement.from_words(words, ranks) == [[p], [at_once]]


def test_kept_tokens_stay_on_their_ranks():
    draw = random.Random(3)
    for _ in range(100):
        p = drawn_placement(draw, 3)
        start = draw.randrange(p.length + 1)
        path = sorted(draw.sample(range(p.length - start), draw.randrange(p.length - start + 1)))
        after, slots = placement.kept(p, start, path)
        check(after, start + len(path))
        for rank in range(3):
            first = placement.shortened(p, start).counts[rank]
            mine = p.positions(rank)[first:][slots[rank]]
            assert [start + path.index(i - start) for i in mine] == list(after.positions(rank)[first:])


@pytest.mark.parametrize("shard", ["contiguous", "zigzag", "stripe"])
def test_kept_tokens_join_no_run_before_them(shard):
    """Those before `start` are where they were, also where the first that is kept is on the rank of the last run."""
    p = placement.sharded(placement.placed([], 2), positions(12, 2, shard))
    for start in range(12):
        for index in range(12 - start):
            after, _ = placement.kept(p, start, [index])
            check(after, start + 1)
            before = placement.shortened(p, start)
            assert after.runs[:-1] == before.runs and len(after.runs[-1].at) == 1


def test_new_tokens_go_where_the_fewest_are():
    p = placement.sharded(placement.placed([], 3), ((range(40),), (), (range(40, 50),)))
    p = placement.grown(p, 100, 16)
    assert max(p.counts) - min(p.counts) <= 16
    # a run that began before the piece which tokens come into, as shards do, is not gone on with
    for own in (((range(40),), ()), ((range(20), range(36, 40)), (range(20, 36),)), ((), (range(40),))):
        p = placement.sharded(placement.placed([], 2), own)
        counts = [len(x) for x in map(p.positions, range(2))]
        begun = own == ((range(20), range(36, 40)), (range(20, 36),))  # inside of the piece
        to = 0 if begun else counts.index(min(counts))
        assert placement.grown(p, 8, 16).counts[to] == counts[to] + 8
    for ranks in (2, 3, 5):
        for capacity in (1, 16, 100, 1000):
            p = placement.grown(placement.placed([], ranks), capacity, 16)
            assert max(p.counts) <= placement.room(capacity, ranks, 16) <= capacity


@pytest.mark.parametrize("text", ["[[[[0, 0, 3, 1], [1, 2, 4, 1]]]]", "[[[[0, 1, 3, 1]]]]", "[[[[5, 0, 3, 1]]]]", "{"])
def test_damaged_placements(text):
    with pytest.raises((ValueError, IndexError)):
        placement.from_words(text, 2)


def test_cache_without_processes():
    from speedlight.distributed import KVCache

    with pytest.raises(sl.ArgumentError, match=r"^group: expected torch\.distributed to be initialised; it is not\."):
        KVCache(layers=1, kv_heads=1, head_dim=4, capacity=8)
