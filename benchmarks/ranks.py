"""Attention over processes, in turn with one process that has all their threads: `run.py ranks`.

    python benchmarks/ranks.py FOLDER RANK RANKS

is one of the processes: it answers questions, a line of JSON each. With RANKS 1 it is the single one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from workers import Workers

import speedlight as sl
import speedlight.torch
from speedlight.distributed import attention, shard, unshard
from speedlight.tools.measuring import alternate, quantiles, ratios, wrong, wrong_gradients

LEGEND = (
    "One process, and the ranks with as many threads in all, in turn: its time over theirs, of the same turn.\n"
    "Sent and memory: the most of a rank; memory is beyond its shards and results, in shards of K and V."
)
_MOST_RANKS = 64
_MESSAGE = 64 << 20  # bytes by which a link is measured


class Case(NamedTuple):
    """A problem of 8 heads of 128 in float32, causal, and the way it is computed."""

    kind: str
    length: int = 16384
    backward: bool = False
    window: int | None = None

    @property
    def shard(self) -> Any:
        return "contiguous" if self.window else "zigzag"

    @property
    def name(self) -> str:
        window = f", window {self.window:,}" if self.window else ""
        what = "forward and backward" if self.backward else "forward"
        return f"{self.kind if not self.window else 'ring'} {self.shard}, {self.length:,} tokens{window}, {what}"

    @property
    def options(self) -> dict[str, Any]:
        return {"causal": True, "window": (self.window - 1, None) if self.window else None}


CASES = (
    Case("ring"), Case("ring", backward=True), Case("ulysses"), Case("ulysses", backward=True), Case("exact"),
    Case("window", 65536, window=1024),
)  # fmt: skip
KINDS = tuple(dict.fromkeys(case.kind for case in CASES))
_HEADS, _DIM = 8, 128


# --- one of the processes


class _Subject:
    """A case's tensors in this process."""

    def __init__(self, case: Case, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        torch.manual_seed(0)
        whole = [torch.randn(1, _HEADS, case.length, _DIM) for _ in range(4)]  # the last is what flows into out
        self.whole = whole if ranks == 1 or dist.get_rank() == 0 else []  # rank 0 checks
        parts = whole if ranks == 1 else [shard(x, shard=case.shard, dim=2).clone() for x in whole]
        self.parts = [x.requires_grad_(case.backward) for x in parts[:3]]
        self.flow = parts[3]

    def call(self) -> list[torch.Tensor]:
        """out and lse; with a pass back what flows to q, k and v, too."""
        case = self.case
        for x in self.parts:
            x.grad = None
        if self.ranks == 1:
            out, lse = sl.attention(*self.parts, return_lse=True, **case.options)
        else:
            out, lse = attention(
                *self.parts, shard=case.shard, method="ulysses" if case.kind == "ulysses" else "ring",
                exact=case.kind == "exact", return_lse=True, **case.options,
            )  # fmt: skip
        if case.backward:
            out.backward(self.flow)
        return [out.detach(), lse.detach(), *(x.grad for x in self.parts if x.grad is not None)]

    def timed(self) -> dict[str, Any]:
        if self.ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        self.call()
        return {"seconds": time.perf_counter() - start}

    def checked(self) -> dict[str, Any]:
        """Returns what it sends and holds, whether it is right, and its bits. The first call compiles."""
        self.call()
        for x in self.parts:
            x.grad = None  # else they would be freed while memory is measured
        with _counted() as sent, _peak() as held:
            got = self.call()
        results = sum(x.nbytes for x in got)
        found: dict[str, Any] = {"sent": sent[0], "memory": max(0, held[0] - results), "refused": None}
        if self.ranks > 1:
            got = [unshard(x, shard=self.case.shard, dim=2) for x in got]
        if self.whole:
            found["refused"] = self._wrong(got)
            digest = hashlib.sha256()
            for x in got:
                digest.update(x.numpy().tobytes())
            found["bits"] = digest.hexdigest()
        return found

    def _wrong(self, got: list[torch.Tensor]) -> str | None:
        """Holds results to float64, every element with its bound."""
        q, k, v, flow = (x.detach().numpy() for x in self.whole)
        out, lse, *grads = (x.numpy() for x in got)
        refused = wrong(out, q, k, v, **self.case.options)
        if refused or not grads:
            return refused
        return wrong_gradients(grads, q, k, v, out, lse, flow, causal=True)


@contextlib.contextmanager
def _counted() -> Iterator[list[int]]:
    """Bytes of keys, values, rows and gradients that this process sends; not the few in which calls are compared."""
    total, post = [0], dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        total[0] += sum(x.tensor.nbytes for x in ops if x.op is dist.isend and x.tensor.is_floating_point())
        return post(ops)

    dist.batch_isend_irecv = counting
    try:
        yield total
    finally:
        dist.batch_isend_irecv = post


@contextlib.contextmanager
def _peak() -> Iterator[list[int]]:
    """Measures by how many bytes this process grows at most; 0 where the system does not tell."""
    found, status = [0], Path("/proc/self/status")
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the highest since now
    before = _kilobytes(status, "VmRSS")
    yield found
    found[0] = (_kilobytes(status, "VmHWM") - before) << 10


def _kilobytes(status: Path, name: str) -> int:
    with contextlib.suppress(OSError):
        return next((int(x.split()[1]) for x in status.read_text().splitlines() if x.startswith(name + ":")), 0)
    return 0


def _link() -> dict[str, float]:
    """Measures the link of ranks 0 and 1, both ways at once: bytes per second, and seconds of the least message."""
    rank = dist.get_rank()
    found = {}
    for name, count, times in (("latency", 1, 50), ("bandwidth", _MESSAGE // 4, 4)):
        tensors = torch.zeros(count), torch.empty(count)
        spent = []
        for _ in range(times):
            dist.barrier()
            start = time.perf_counter()
            if rank < 2:
                ops = [dist.P2POp(how, x, 1 - rank) for how, x in zip((dist.isend, dist.irecv), tensors, strict=True)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            spent.append(time.perf_counter() - start)
        found[name] = statistics.median(spent)
    return {"latency": found["latency"], "bandwidth": _MESSAGE / found["bandwidth"]}


def answer(folder: str, rank: int, ranks: int) -> None:
    """Answers until nobody asks."""
    torch.set_num_threads(sl.get_threads())
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    subject: _Subject | None = None
    for question in sys.stdin:
        match json.loads(question):
            case "link":
                found = _link()
            case "again":
                assert subject is not None
                found = subject.timed()
            case fields:
                subject = None  # whose memory the next one may need
                subject = _Subject(Case(**fields), ranks)
                found = subject.checked()
        print(json.dumps(found), flush=True)
    if ranks > 1:
        dist.destroy_process_group()


# --- who asks them


def start(folder: str, ranks: int, threads: int) -> Workers:
    """Starts processes of so many threads each."""
    named = "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "SPEEDLIGHT_THREADS"
    env = os.environ | dict.fromkeys(named, str(threads))
    env["PYTHONPATH"] = os.pathsep.join([str(Path(sl.__file__).parent.parent), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", __file__, folder]
    return Workers([[*command, str(rank), str(ranks)] for rank in range(ranks)], env=env)


def rows(about: dict[str, Any], ranks: int, turns: int, only: str) -> Iterator[dict[str, Any]]:
    """Measures every case, or those of a kind; `about` is told of the ranks and their link."""
    if not 2 <= ranks <= _MOST_RANKS:
        raise SystemExit(f"ranks: expected 2 to {_MOST_RANKS}; got {ranks}.")
    if only == "ulysses" and _HEADS % ranks:
        raise SystemExit(f"--only: expected another kind for {ranks} ranks, which do not divide {_HEADS} heads.")
    about |= {"ranks": ranks, "threads_each": max(1, sl.get_threads() // ranks)}
    with groups(about) as (single, several):
        for case in CASES:
            if only in ("", case.kind) and not (case.kind == "ulysses" and _HEADS % ranks):
                yield row_of(case, single, several, turns, about)


@contextlib.contextmanager
def groups(about: dict[str, Any]) -> Iterator[tuple[Workers, Workers]]:
    """Starts one process and several, and measures their link."""
    ranks, each = about["ranks"], about["threads_each"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        single, several = (stack.enter_context(start(folder, n, ranks * each // n)) for n in (1, ranks))
        link = several.ask("link")[:2]
        about["link"] = {name: slower(x[name] for x in link) for name, slower in (("bandwidth", min), ("latency", max))}
        yield single, several


def row_of(case: Case, single: Workers, several: Workers, turns: int, about: dict[str, Any]) -> dict[str, Any]:
    """Checks a case and then measures it in turn."""
    alone, found = single.ask(case._asdict())[0], several.ask(case._asdict())
    same, refused = alone["bits"] == found[0]["bits"], alone["refused"] or found[0]["refused"]
    if refused is None and case.kind == "exact" and not same:
        refused = "other bits than those of one process"
    if refused:
        return {"name": case.name, "refused": refused}

    def sample(group: Workers) -> float:
        time.sleep(0.05)  # threads of those before have stopped spinning
        return max(x["seconds"] for x in group.ask("again"))

    times = alternate({"single": functools.partial(sample, single), "ranks": functools.partial(sample, several)}, turns)
    keys = 2 * _HEADS * _DIM * 4 * case.length // about["ranks"]
    memory = [x["memory"] for x in found]
    return {
        "name": case.name, "seconds": {x: quantiles(t) for x, t in times.items()},
        "share": ratios(times, to="ranks")["single"], "bytes_sent": [x["sent"] for x in found],
        "memory_bytes": memory, "memory_shards": max(memory) / keys, "same_bits": same,
        "modelled": modelled(case, about),
    }  # fmt: skip


def modelled(case: Case, about: dict[str, Any]) -> dict[str, Any]:
    """Returns what plan(…, ranks=) says, at this machine's roofs and the link that was measured; no share where ranks
    have no cores of their own.
    """
    ranks, each, threads = about["ranks"], about["threads_each"], sl.get_threads()
    asked = {
        "ranks": ranks, "link_bandwidth": about["link"]["bandwidth"], "latency": about["link"]["latency"],
        "shard": case.shard, "method": "ring" if case.kind == "window" else case.kind,
    }  # fmt: skip
    seconds, alone, sent, memory = 0.0, 0.0, 0, 0
    for backward in (False, True)[: 1 + case.backward]:
        spreads = []
        for count in (each, ranks * each):
            sl.set_threads(count)
            sizes = {"q_heads": _HEADS, "q_len": case.length, "head_dim": _DIM}
            spreads.append(sl.plan(**sizes, **case.options, **asked, backward=backward).ranks)
        sl.set_threads(threads)
        over, whole = spreads
        seconds, alone = seconds + over.way.slowest, alone + whole.alone_seconds
        sent, memory = sent + max(over.way.bytes_sent), max(memory, *over.way.memory_bytes)
    share = alone / seconds if ranks * each <= about["threads"] else None
    return {"share": share, "bytes_sent": sent, "memory_bytes": memory}


def line(row: dict[str, Any]) -> str:
    """Returns a row as text."""
    single, several = (row["seconds"][x][2] for x in ("single", "ranks"))
    (low, middle, high), model = row["share"][1:4], row["modelled"]["share"]
    return (
        f"{row['name']:<62} {single * 1e3:7,.0f} ms {several * 1e3:7,.0f} ms  {middle:.0%} ({low:.0%}-{high:.0%}), "
        f"modelled {'–' if model is None else f'{model:.0%}'}; {max(row['bytes_sent']) / 2**20:,.1f} MiB sent, "
        f"{row['memory_shards']:.2f} shards of memory{', the same bits' * row['same_bits']}"
    )


if __name__ == "__main__":
    answer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
