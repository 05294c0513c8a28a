"""speedlight.distributed: shards in several processes against the whole in one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import FULL, ROOT, SUPPORT

import speedlight as sl
from speedlight.arrays.array import describe
from speedlight.distributed import arriving, groups, tensors
from speedlight.distributed.groups import Message
from speedlight.distributed.plans import Sharded, schedule_of
from speedlight.distributed.tensors import common
from speedlight.problem.build import from_arrays
from speedlight.problem.options import Options
from speedlight.problem.shardings import SHARDS, positions, tokens


def started(world, name, *numbers, timeout=600):
    """One process that forks the others, which end with it; what is to be interrupted has a session of its own."""
    env = {"OMP_NUM_THREADS": "1", "SPEEDLIGHT_THREADS": "1", "SHARDED_TIMEOUT": str(timeout)}
    command = [sys.executable, str(SUPPORT / "sharded.py"), str(world), name, *map(str, numbers)]
    env = os.environ | env | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=name == "endless", **pipes)


def ran(*words, **how):
    """What rank 0 has printed; all processes have ended well."""
    process = started(*words, **how)
    try:
        printed, errors = process.communicate(timeout=1500)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, errors[-6000:]
    return printed.split("\n")[:-1]


# --- in one process


@pytest.mark.parametrize("shard", SHARDS)
def test_every_position_is_held_once(shard):
    for length in (0, 1, 2, 5, 64, 101):
        for ranks in (1, 2, 3, 4, 7):
            held = positions(length, ranks, shard)
            assert len(held) == ranks
            assert sorted(x for runs in held for run in runs for x in run) == list(range(length))
            sizes = [sum(map(len, runs)) for runs in held]
            assert max(sizes) - min(sizes) <= 2
            assert all(run.start < run.stop for runs in held for run in runs)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"length": -1}, "length: expected a size from 0"),
        ({"ranks": 0}, "ranks: expected a size from 1"),
        ({"shard": "ring"}, "shard: expected 'contiguous', 'zigzag' or 'stripe'; got 'ring'"),
    ],
)
def test_wrong_shardings(wrong, text):
    with pytest.raises(sl.Error, match=text):
        positions(**({"length": 4, "ranks": 2} | wrong))


def test_places_of_common_positions():
    rng = np.random.default_rng(0)
    for _ in range(200):
        length, ranks = int(rng.integers(0, 40)), int(rng.integers(1, 5))
        held = positions(length, ranks, SHARDS[rng.integers(3)])[rng.integers(ranks)]
        wanted = positions(length, ranks, SHARDS[rng.integers(3)])[rng.integers(ranks)]
        a, b = ([x for run in runs for x in run] for runs in (held, wanted))
        pairs = [pair for at, into in common(held, wanted) for pair in zip(at, into, strict=True)]
        assert sorted(a[x] for x, _ in pairs) == sorted(b[y] for _, y in pairs) == sorted(set(a) & set(b))
        assert all(a[x] == b[y] for x, y in pairs)


def whole(length, heads=2, **options):
    x = describe(np.zeros((1, heads, length, 4), np.float32), "q")
    return from_arrays(x, x, x, Options(**options))


def sharded(length, ranks, shard, **options):
    held = positions(length, ranks, shard)
    return Sharded(whole(length, **options), held, held)


IDS = np.repeat(np.arange(4), [100, 412, 200, 312])
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "both sides": {"window": (60, 60)},
    "documents": {"mask": sl.documents(IDS)},
}


class Recorded:
    """Peers that take at once whatever is sent."""

    def __init__(self, rank):
        self.rank = rank

    def post(self, sends, receives):
        return [Message(None, x[0], x[1], x[3]) for x in (*sends, *receives)]

    def wait(self, message):
        pass


@pytest.mark.parametrize(
    ("ranks", "length", "exact"),
    [(2, 8192, False), (4, 16384, False), (4, 16384, True), (3, 32768, False), (8, 39999, False)],
)
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_keys_on_their_way_are_those_that_the_model_adds_up(ranks, length, exact, options, monkeypatch):
    """Those that are computed with, those that come, and those that are passed on; what is sent is not copied."""
    made, peaks = [], []

    def counted(like, shape):
        found = like.new_empty(shape)
        made.append(weakref.ref(found))
        peaks[-1] = max(peaks[-1], sum(x.nbytes for x in (ref() for ref in made) if x is not None))
        return found

    monkeypatch.setattr(arriving, "mmap_empty", counted)
    monkeypatch.setattr(tensors, "mmap_empty", counted)
    of = sharded(length, ranks, "zigzag", **options)
    schedule, states = schedule_of(of, exact=exact), []
    for rank in range(ranks):
        k = torch.empty(1, 2, tokens(of.k[rank]), 64, device="meta")
        made.clear()
        peaks.append(0)
        states.append(2 * k.shape[1] * k.shape[2] * 4)  # a maximum and a sum of every row
        arrivals = arriving.Arrivals(Recorded(rank), arriving.LocalKeys((k, k), of.k[rank], 2), schedule)
        for step in schedule.steps[rank]:
            assert [x.shape[2] for x in arrivals.keys(step)] == [len(step.keys)] * 2
        arrivals.finish()
    method = "exact" if exact else "ring"
    sizes = {"q_heads": 2, "q_len": length, "head_dim": 64} | options
    found = sl.plan(**sizes, ranks=ranks, shard="zigzag", method=method).ranks
    assert found is not None and found.way.memory_bytes == tuple(map(sum, zip(peaks, states, strict=True)))


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    """Who keeps it may be the one that is stopped."""
    monkeypatch.setattr(groups, "_PATIENCE", 0.01)
    stopped, peers = threading.Event(), object.__new__(groups.Peers)
    assert peers._answered(stopped.wait, "not asked") == "not asked"
    stopped.set()
    monkeypatch.setattr(groups, "_PATIENCE", 60.0)
    assert peers._answered(lambda: "said", "not asked") == "said"


class Batches(Recorded):
    """Keeps what is posted at once: of each message whether it comes, from or to whom, and its shape."""

    def __init__(self, rank):
        super().__init__(rank)
        self.posted = []

    def post(self, sends, receives):
        found = super().post(sends, receives)
        kinds = ["send"] * len(sends) + ["receive"] * len(receives)
        self.posted.append([(kind, x.peer, tuple(x.tensor.shape)) for kind, x in zip(kinds, found, strict=True)])
        return found


def pair(batches):
    """As NCCL does: messages between two by their order alone; a batch of a process begins when that before has ended.

    batches: of each process; they are emptied. What is left waits for ever.
    """
    moved = True
    while moved:
        moved, heads = False, [each[0] if each else [] for each in batches]
        for rank, head in enumerate(heads):
            for message in [x for x in head if x[0] == "send"]:
                other = next((x for x in heads[message[1]] if x[:2] == ("receive", rank)), None)
                if other is None:
                    continue
                assert other[2] == message[2]
                head.remove(message)
                heads[message[1]].remove(other)
                moved = True
        for each in batches:
            while each and not each[0]:
                del each[0]
                moved = True


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("mask", MASKS)
def test_messages_are_paired_by_their_order(mask, shard):
    """NCCL knows no tags, and runs what a process posts in its order: nothing is mixed up, nobody waits for ever."""
    for ranks, length in ((3, 1024), (4, 4097)) if FULL else ((3, 1024),):
        of = sharded(length, ranks, shard, **MASKS[mask])
        schedule, posted = schedule_of(of, exact=False), []
        for rank in range(ranks):
            k = torch.empty(1, 2, sum(map(len, of.k[rank])), 256)  # large enough to be sent head by head
            peers = Batches(rank)
            arrivals = arriving.Arrivals(peers, arriving.LocalKeys((k, k[..., :8]), of.k[rank], 2), schedule)
            for step in schedule.steps[rank]:
                arrivals.keys(step)
            arrivals.finish()
            posted.append(peers.posted)
        assert sum(len(x) for each in posted for x in each) >= 4 * len(schedule.transfers)
        pair(posted)
        assert not any(posted)


class OfBackends:
    """A group of two processes as far as its backends go."""

    def __init__(self, **backends):
        self.backends, self._device_types = backends, [torch.device(x) for x in backends]

    def _get_backend(self, device):
        return SimpleNamespace(name=lambda: self.backends[device.type])


@pytest.mark.parametrize(
    ("backends", "device", "way"),
    [
        ({"cpu": "gloo", "cuda": "gloo"}, "cpu", None),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", None),
        ({"cuda": "nccl"}, "cuda:1", None),
        ({"cuda": "nccl"}, "cuda:0", "torch.cuda.set_device"),
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", "cpu:gloo,cuda:nccl"),
        ({"cpu": "gloo"}, "cuda", "cpu:gloo,cuda:nccl"),
        ({"cuda": "nccl"}, "cpu", "gloo"),
    ],
)
def test_what_a_group_carries(backends, device, way, monkeypatch):
    peers = object.__new__(groups.Peers)
    peers.group, peers.ranks = OfBackends(**backends), 2
    monkeypatch.setattr(groups.dist, "get_backend_config", lambda group: "what it has")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    if way is None:
        peers.check_carries("q", torch.device(device))
        return
    with pytest.raises(sl.ArgumentError) as error:
        peers.check_carries("q", torch.device(device))
    if device == "cuda:0":
        assert str(error.value).startswith("q: expected a tensor on cuda:1, ")
        assert str(error.value).endswith("got one on cuda:0. Call torch.cuda.set_device(0) before.")
    else:
        assert str(error.value).startswith(f"group: expected a backend that sends q, on {device}, from one process")
        assert str(error.value).endswith(f"got what it has. torch.distributed.init_process_group('{way}') has one.")


def test_one_work_may_be_that_of_all_messages(monkeypatch):
    """As NCCL gives it; an error of it names who is at the other end of each."""
    peers, x = object.__new__(groups.Peers), torch.zeros(2)
    peers.group, peers.ranks, peers.known, peers.rank = None, 2, groups._Known(), 0

    class Work:
        def wait(self):
            raise RuntimeError("watchdog")

    monkeypatch.setattr(groups.dist, "P2POp", lambda how, tensor, **where: (how, tensor, where))
    monkeypatch.setattr(groups.dist, "batch_isend_irecv", lambda ops: [Work()])
    monkeypatch.setattr(peers, "world_rank", lambda rank: 7 + rank, raising=False)
    monkeypatch.setattr(peers, "_first", lambda said: said, raising=False)
    monkeypatch.setattr(peers, "_timeout", lambda: "1 s", raising=False)
    found = peers.post([(x, 1, 0, "with keys"), (x[:0], 1, 1, "with nothing")], [(x, 1, 2, "with values")])
    assert [(message.peer, message.what) for message in found] == [(1, "with keys"), (1, "with values")]
    assert found[0].work is found[1].work
    with pytest.raises(sl.CommunicationError, match="rank 8 did not answer with values"):
        peers.wait(found[1])
    assert peers.known.failed


def test_the_first_messages_between_gpus_are_of_all_processes(monkeypatch):
    """As NCCL wants it; once, and not where ranks have compared their calls there."""
    peers, asked = object.__new__(groups.Peers), []
    peers.ranks, peers.device, peers.known = 2, torch.device("cpu"), groups._Known()
    monkeypatch.setattr(peers, "gathered", lambda x, what: asked.append(x.device.type), raising=False)
    for device in ("cpu", "meta", "meta"):
        peers.open(torch.device(device))
    assert asked == ["meta"]


# --- in several


def test_two_processes():
    """Every way, sharding and kind of mask; the bits of one process; what differs between processes."""
    assert ran(2, "short")[-1] == "all"


def test_a_process_ends():
    assert ran(2, "dying")[-1] == "dying"


@pytest.mark.skipif(not FULL, reason="four processes")
@pytest.mark.parametrize("world", [3, 4])
def test_more_processes(world):
    assert ran(world, "short")[-1] == "all"


@pytest.mark.skipif(not FULL, reason="long")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_random_problems(world):
    seed, count = int(os.environ.get("SEED", "0")), int(os.environ.get("COUNT", "100"))
    assert len(ran(world, "everything", seed, count)) == count


@pytest.mark.skipif(not FULL, reason="four processes")
def test_mesh_of_two_dimensions():
    assert len(ran(4, "mesh")) == 6


@pytest.mark.skipif(not FULL, reason="four processes")
def test_one_of_four_ends():
    assert ran(4, "dying")[-1] == "dying"


@pytest.mark.skipif(not FULL, reason="waits for a timeout")
def test_a_process_does_not_come():
    assert ran(3, "absent", timeout=20)[-1] == "absent"


@pytest.mark.skipif(not FULL, reason="interrupts processes")
def test_interrupts_leave_no_process():
    process = started(3, "endless")
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError("a process is left")
