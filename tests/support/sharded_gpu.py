"""Shards on GPUs in several processes: what test_gpu_distributed.py starts. In Triton's interpreter, or on GPUs.

    python tests/support/sharded_gpu.py NAME [SEED COUNT] WORLD [WORLD …]

Processes have a GPU each, and NCCL between them, where there are enough; else they share one, and what they send goes
by way of the host, over gloo. One process imports everything and forks the others; rank 0 judges, and prints.
"""

from __future__ import annotations

import datetime
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    import gpu_interpreter  # noqa: F401  (before Triton)

import triton  # noqa: F401
from sharded import each, taken, whole_of
from sharded_cases import Case, drawn_case, random_case, tensor
from sharded_faults import TIMEOUT, call, forked, refused
from tolerance import assert_within
from torch.distributed.device_mesh import init_device_mesh

import speedlight as sl
from speedlight import distributed, reference
from speedlight.distributed import attending, ring_flash_attn
from speedlight.distributed.groups import Message, Peers
from speedlight.gpu import schedule

ON_GPU = torch.cuda.is_available()  # PYTORCH_NVML_BASED_CUDA_CHECK=1: forked processes could not use CUDA, once started
DEVICE = "cuda" if ON_GPU else "cpu"


def attended(case: Case, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of this process's shards."""
    own = [distributed.shard(x, shard=case.shard, dim=case.dim).to(DEVICE) for x in case.arrays]
    options = {n: on_device(x) if n in ("mask", "score") else x for n, x in case.options.items()}
    return distributed.attention(*own, return_lse=True, shard=case.shard, method=case.method, **options, **more)


def on_device(x: Any) -> Any:
    return torch.from_numpy(x).to(DEVICE) if isinstance(x, np.ndarray) else x


def check(case: Case, **more: Any) -> None:
    """One case in every process, held to the bound of one call on a GPU."""
    out, lse = attended(case, **more)
    whole = [whole_of(out, case, case.dim).cpu(), whole_of(lse, case, lse.ndim - 1).cpu()]
    if dist.get_rank() == 0:
        want = reference.attention(*case.arrays, return_lse=True, **case.options)
        bounds = reference.error_bound(*case.arrays, tile=16, **case.options)
        for x, y, bound, name in zip(whole, want, bounds, ("out", "lse"), strict=True):
            assert_within(x, y, bound, name, zeros_allowed=True)


# --- what is run


def short(world: int) -> Iterator[str]:
    """Every way, sharding and kind of mask once."""
    rng = np.random.default_rng(0)
    case = functools.partial(drawn_case, rng, value_dim=8)
    causal, sinks = {"causal": True}, {"sink_logits": [0.5, -1.0]}
    slopes = sl.alibi(np.linspace(0.1, 0.6, 2 * world, dtype=np.float32))
    cases = [
        case(2, 1, 37, causal | sinks),
        case(2, 1, 37, causal, torch.bfloat16, shard="zigzag"),
        case(2, 1, 29, causal | {"window": (9, None)}, shard="stripe"),
        case(2, 2, 2, causal | sinks | {"layout": "blhd"}, shard="zigzag"),
        case(2, 1, 37, causal | {"layout": "lhd", "cu_seqlens_q": [0, 9, 9, 24, 37]}, torch.float16, shard="zigzag"),
        case(2, 1, 21, sinks | {"lengths": [21, 11], "score": sl.softcap(2.0)}, batch=2, shard="zigzag"),
        case(2, 1, 29, {"mask": sl.prefix(0), "layout": "hld"}),
        case(2, 1, 29, {"mask": rng.random((1, 1, 29, 29)) < 0.3, "scale": -0.3}, method="gather", shard="zigzag"),
        case(2 * world, 1, 37, causal | {"score": slopes}, method="ulysses", shard="zigzag"),
        case(2, 1, 37, causal, method="auto", shard="zigzag"),
    ]
    yield from each(cases, world, check)
    yield from values(world)
    yield from refusals(world)
    yield from cache(world)
    yield from theirs(world)


def values(world: int) -> Iterator[str]:
    """Values that are not finite reach the rows that see them, in whatever part, and no others."""
    rng = np.random.default_rng(1)
    q, k, v = (tensor(rng, "bhld", 1, 1, 12 * world, 16) for _ in range(3))
    v[:, :, 5], v[:, :, -1] = torch.inf, torch.nan
    k[:, :, 7, 0] = torch.nan
    case = Case((q, k, v), {"causal": True, "mask": sl.expression(lambda b, h, i, j: (i + j) % 3 != 0)}, "zigzag")
    out, lse = (whole_of(x, case, 2).cpu() for x in attended(case))
    want = reference.attention(q, k, v, return_lse=True, **case.options)
    for x, y in zip((out, lse), want, strict=True):
        assert np.array_equal(np.isfinite(x.numpy()), np.isfinite(y))
        assert np.array_equal(np.isposinf(x.numpy()), np.isposinf(y))
    yield "values"


def refusals(world: int) -> Iterator[str]:
    """What there is not on a GPU is refused in all processes, before anything is sent; and the group goes on."""
    rank, x = dist.get_rank(), torch.randn(1, 1, 8, 16, device=DEVICE)
    followed = x.clone().requires_grad_(rank == world - 1)
    told = "" if rank == world - 1 else f"group: rank {world - 1} failed before the exchange: "
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("exact: expected False for tensors on a GPU; got True", lambda: call(x, exact=True)),
        ("q: expected float32, float16 or bfloat16 on a GPU; got float64", lambda: call(x.double())),
        (f"{told}q: expected tensors on the CPU, where gradients of shards are computed", lambda: call(followed)),
        ("q: expected head dims up to 512 on a GPU", lambda: call(torch.randn(1, 1, 2, 600, device=DEVICE))),
    ]
    if ON_GPU:
        wrong.append(("mask: expected a tensor on cuda", lambda: call(x, mask=np.ones((8 * world, 8 * world), bool))))
    for text, f in wrong:
        error = refused(f)
        assert str(error).startswith(text), error
    with torch.no_grad():
        assert call(followed).shape == x.shape
    yield "refusals"


def cache(world: int) -> Iterator[str]:
    """Tokens that lie on the processes' GPUs."""
    draw = torch.Generator().manual_seed(3)
    sizes: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "capacity": 64}
    one, every = sl.KVCache(**sizes), distributed.KVCache(**sizes, device="cuda", piece=4)
    q, k, v = (torch.randn(1, h, 12 * world, 16, generator=draw) for h in (2, 1, 1))
    one.append(0, k, v)
    every.append(0, *(distributed.shard(x, shard="zigzag", dim=2).to(DEVICE) for x in (k, v)), shard="zigzag")
    mask: dict[str, Any] = {"mask": sl.window(9, 0), "sink_logits": [0.5, 1.0]}
    for n, options in ((3, mask), *[(1, {})] * (world != 2)):
        q, k, v = (torch.randn(1, h, n, 16, generator=draw) for h in (2, 1, 1))
        want = one.attend(0, q, k, v, return_lse=True, **options)
        got = every.attend(0, *(x.to(DEVICE) for x in (q, k, v)), return_lse=True, **options)
        for x, y in zip(got, want, strict=True):
            assert torch.allclose(x.cpu(), y, rtol=1e-5, atol=1e-6), (x.cpu() - y).abs().max()
    every.truncate(7)
    assert every.lengths(0) == (7,) and every.keys(0).device.type == DEVICE
    yield "cache"


def theirs(world: int) -> Iterator[str]:
    """ring-flash-attention's calls come here by themselves."""
    rng = np.random.default_rng(2)
    whole = [tensor(rng, "blhd", 1, n, 8 * world, 16) for n in (2, 1, 1)]
    own = [distributed.shard(x, shard="zigzag", dim=1).to(DEVICE) for x in whole]
    with torch.no_grad():
        out = ring_flash_attn.zigzag_ring_flash_attn_func(*own, causal=True)
    want = reference.attention(*whole, causal=True, layout="blhd")
    assert np.allclose(distributed.unshard(out, shard="zigzag", dim=1).cpu().numpy(), want, rtol=1e-5, atol=1e-5)
    yield "theirs"


def everything(world: int, seed: int, count: int) -> Iterator[str]:
    """Random problems, of what a GPU takes."""
    for n in range(seed, seed + count):
        case = random_case(np.random.default_rng(n), False, world)
        case = case._replace(arrays=tuple([x.float() if x.dtype == torch.float64 else x for x in case.arrays]))
        if not taken(case):
            continue
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"case {n} of {world}: {case}") from error
        yield f"{n}"


def mesh(world: int) -> Iterator[str]:
    """Keys along the first dimension, heads along the second."""
    rng, two = np.random.default_rng(5), init_device_mesh(DEVICE, (2, world // 2))
    for shard in ("contiguous", "zigzag"):
        arrays = tuple([tensor(rng, "bhld", 1, n, 21, 16) for n in (4, 2, 2)])
        options = {"causal": True, "score": sl.alibi(np.float32([0.5, 0.1, 0.2, 0.3])), "sink_logits": [0.1, 0, 1, 2]}
        check(Case(arrays, options, shard, "auto"), mesh=two)
        yield shard


# --- processes


class Landing(NamedTuple):
    """What comes to the host, and goes on to where it is wanted."""

    work: Any
    host: torch.Tensor
    tensor: torch.Tensor

    def wait(self) -> None:
        self.work.wait()
        self.tensor.copy_(self.host)


_post = Peers.post


def post_by_host(self: Peers, sends: list[Any], receives: list[Any]) -> list[Message]:
    """Peers.post() of copies in the host's memory."""
    gone = [(x[0], torch.empty(x[0].shape, dtype=x[0].dtype).copy_(x[0]), x[1:]) for x in sends if x[0].numel()]
    come = [(x[0], torch.empty(x[0].shape, dtype=x[0].dtype), x[1:]) for x in receives if x[0].numel()]
    messages = _post(self, *([(host, *rest) for _, host, rest in each] for each in (gone, come)))
    works = [x.work for x in messages]
    landing = works[: len(gone)] + [
        Landing(w, host, x) for w, (x, host, _) in zip(works[len(gone) :], come, strict=True)
    ]
    tensors = [x for x, *_ in (*gone, *come)]
    return [x._replace(work=work, tensor=t) for x, work, t in zip(messages, landing, tensors, strict=True)]


RUNS: dict[str, Callable[..., Iterator[str]]] = {"short": short, "everything": everything, "mesh": mesh}


def main(rank: int, world: int, name: str, folder: str, *numbers: int) -> None:
    torch.set_num_threads(1)
    backend, apart = "gloo", ON_GPU and torch.cuda.device_count() >= world
    if not ON_GPU:
        attending.on_gpu = lambda x: True
        if world == 2:  # what is split takes the interpreter long
            schedule.SHORT_ROWS = 4
    if apart:
        torch.cuda.set_device(rank)
        backend = "nccl" if world == 1 else "cpu:gloo,cuda:nccl"
    elif ON_GPU or world == 3:
        Peers.post = post_by_host
        Peers.check_carries = lambda *_: None
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    for done in RUNS[name](world, *numbers):
        if rank == 0:
            print(world, done, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    numbers, worlds = (words[:2], words[2:]) if name == "everything" else ([], words)
    statuses = [forked(main, int(world), name, *map(int, numbers)) for world in worlds]
    sys.exit(next((x for x in statuses if x), 0))
