"""Attention over shards in several processes: what tests/test_distributed.py starts.

    python tests/sharded.py WORLD NAME [SEED COUNT]

One process imports PyTorch and forks the others, which is most of what this costs. Each runs every case of NAME; rank 0
holds what comes together against the reference, and prints the name of a case that is right.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tolerance import assert_within

import speedlight as sl
from speedlight import distributed, reference
from speedlight.machine import current_isa

LENGTH_AT = {"bhld": 2, "blhd": 1, "hld": 1, "lhd": 0}
TIMEOUT = float(os.environ.get("SHARDED_TIMEOUT", "600"))


class Case(NamedTuple):
    """One call, by all processes."""

    arrays: tuple[torch.Tensor, ...]  # q, k and v of the whole sequence
    options: dict[str, Any]
    shard: Any = "contiguous"
    method: Any = "ring"
    exact: bool = False
    gradients: bool = True

    def __str__(self) -> str:
        q, k, v = self.arrays
        how = f"{self.shard} {self.method}{' exact' * self.exact}"
        return f"{how} {q.dtype} {tuple(q.shape)} {tuple(k.shape)} {v.shape[-1]} {self.options}"

    @property
    def dim(self) -> int:
        return LENGTH_AT[self.options.get("layout", "bhld")]


def whole_of(x: torch.Tensor, case: Case, dim: int) -> torch.Tensor:
    return distributed.unshard(x.detach(), shard=case.shard, dim=dim)


def check(case: Case, **more: Any) -> None:
    """One case in every process; rank 0 judges."""
    dim, rng = case.dim, np.random.default_rng(1)
    try:
        sl.attention(*case.arrays, **case.options)
    except sl.Error:
        return
    own = [distributed.shard(x, shard=case.shard, dim=dim).clone() for x in case.arrays]
    for x in own:
        x.requires_grad_(case.gradients)
    options = case.options
    stripes = case.shard == "stripe"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if stripes else "error", UserWarning)
        how = {"shard": case.shard, "method": case.method, "exact": case.exact}
        out, lse = distributed.attention(*own, return_lse=True, **how, **options, **more)
    whole = [whole_of(out, case, dim), whole_of(lse, case, lse.ndim - 1)]
    flows = [torch.from_numpy(rng.standard_normal(x.shape)).to(x.dtype) for x in whole]
    gradients = []
    if case.gradients:
        parts = [distributed.shard(x, shard=case.shard, dim=d) for x, d in zip(flows, (dim, lse.ndim - 1), strict=True)]
        torch.autograd.backward([out, lse], parts)
        gradients = [whole_of(x.grad, case, dim) for x in own]
    if dist.get_rank() == 0:
        judge(case, options, whole, flows, gradients)


def judge(case: Case, options: dict[str, Any], whole: list[Any], flows: list[Any], gradients: list[Any]) -> None:
    plain = [x.detach() for x in case.arrays]
    if case.exact:
        want = sl.attention(*plain, return_lse=True, **options)
        for x, y in zip(whole, want, strict=True):
            assert torch.equal(bits_of(x), bits_of(y)), f"other bits: {(x.double() - y.double()).abs().max()}"
    dot = current_isa().product("bf16") == "pairs" and plain[0].dtype == torch.bfloat16
    want = reference.attention(*plain, return_lse=True, **options)
    bounds = reference.error_bound(*plain, dot=dot, **options)
    for x, y, bound, name in zip(whole, want, bounds, ("out", "lse"), strict=True):
        assert_within(x, y, bound, name, zeros_allowed=True)
    if gradients:
        want = reference.backward(*plain, *whole, *flows, **options)
        bounds = reference.backward_bound(*plain, *whole, *flows, dot=dot, **options)
        for x, y, bound, name in zip(gradients, want, bounds, ("dq", "dk", "dv"), strict=True):
            assert_within(x, y, bound, name, zeros_allowed=True)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# --- random cases


def random_case(rng: np.random.Generator, exact: bool, world: int) -> Case:
    """Anything that attention() takes; every process draws the same."""
    layout = str(rng.choice(["bhld", "blhd", "hld", "lhd"], p=[0.4, 0.2, 0.1, 0.3]))
    method = str(rng.choice(["ring", "ring", "ulysses", "gather", "auto"]))
    batch = 1 if len(layout) == 3 else int(rng.integers(1, 3))
    kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3]))
    if method == "ulysses":
        group = world * int(rng.integers(1, 3)) if rng.random() < 0.5 else group
        kv = kv if group % world == 0 else world
    exact = exact and not (layout == "lhd" and method == "ring")
    long = int(rng.choice([1, 2, 5, 63, 200, 300])) if not exact else int(rng.choice([1, 900, 1025, 2300, 3100]))
    k_len = long if rng.random() < 0.7 else max(0, long + int(rng.integers(-40, 40)))
    dtype = [torch.float32, torch.bfloat16, torch.float16, torch.float64][rng.choice(4, p=[0.5, 0.3, 0.1, 0.1])]
    d, dv = (int(rng.choice([8, 16, 17, 32])) for _ in range(2))
    q, k, v = (
        tensor(rng, layout, batch, *x).to(dtype) for x in ((kv * group, long, d), (kv, k_len, d), (kv, k_len, dv))
    )
    shard = str(rng.choice(["contiguous", "zigzag", "stripe"]))
    options = random_options(rng, layout, (batch, kv * group, long, k_len))
    return Case((q, k, v), options, shard, method, exact, bool(long < 400 and rng.random() < 0.7))


def tensor(rng: np.random.Generator, layout: str, batch: int, heads: int, length: int, dim: int) -> torch.Tensor:
    shape = {"bhld": (batch, heads, length, dim), "blhd": (batch, length, heads, dim), "hld": (heads, length, dim)}
    return torch.from_numpy(rng.standard_normal(shape.get(layout, (length, heads, dim)), dtype=np.float32))


def random_options(rng: np.random.Generator, layout: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    batch, heads, q_len, k_len = sizes
    options: dict[str, Any] = {"layout": layout}
    options["causal"] = [False, True, "top-left"][rng.integers(3)]
    if rng.random() < 0.3:
        options["window"] = [(20, 0), (5, 5), (None, 3), (100, None)][rng.integers(4)]
    longest = max(q_len, k_len, 1) + 60
    if rng.random() < 0.4:
        ids = np.sort(rng.integers(0, 4, longest))
        masks = [
            sl.documents(ids), sl.prefix(7) | sl.causal(), sl.dilated(3),
            sl.expression(lambda b, h, i, j: (i + j + h + b) % 3 != 0),
        ]  # fmt: skip
        options["mask"] = masks[rng.integers(0 if layout != "lhd" and q_len == k_len else 1, 4)]
    if rng.random() < 0.4:
        slopes = rng.standard_normal(heads).astype(np.float32)
        scores = [sl.alibi(slopes), sl.softcap(3.0), [sl.softcap(2.0), sl.alibi(slopes)]]
        options["score"] = scores[rng.integers(3)]
    if rng.random() < 0.3:
        options["sink_logits"] = rng.standard_normal(heads).tolist()
    if rng.random() < 0.2:
        options["scale"] = 0.3
    if rng.random() < 0.15:
        options |= {"dropout": 0.3, "seed": 5}
    if layout == "lhd":
        options |= packing(rng, q_len, k_len)
    elif batch > 1 and rng.random() < 0.5:
        options |= padding(rng, sizes, options["causal"] == "top-left")
    elif rng.random() < 0.2 and options["causal"] != "top-left":
        options["q_start"] = int(rng.integers(0, 30))
    if len(layout) == 4 and rng.random() < 0.15:
        options["mask"] = rng.random((batch, 1, q_len, k_len)) < 0.7
    if len(layout) == 4 and rng.random() < 0.15:
        options["score"] = rng.standard_normal((1, heads, q_len, k_len)).astype(np.float32)
    return options


def packing(rng: np.random.Generator, q_len: int, k_len: int) -> dict[str, Any]:
    count = int(rng.integers(1, 5))
    cuts = [np.sort(rng.integers(0, n + 1, count - 1)).tolist() for n in (q_len, k_len)]
    if q_len == k_len:
        return {"cu_seqlens_q": [0, *cuts[0], q_len]}
    return {"cu_seqlens_q": [0, *cuts[0], q_len], "cu_seqlens_k": [0, *cuts[1], k_len]}


def padding(rng: np.random.Generator, sizes: tuple[int, ...], placed: bool) -> dict[str, Any]:
    batch, _, q_len, k_len = sizes
    if q_len == k_len and rng.random() < 0.5:
        return {"lengths": rng.integers(0, q_len + 1, batch).tolist()}
    lengths = {"k_lengths": rng.integers(0, k_len + 1, batch).tolist()}
    if rng.random() < 0.5:
        return lengths | {"q_lengths": rng.integers(0, q_len + 1, batch).tolist()}
    return lengths | ({} if placed else {"q_start": 0})


# --- what is run


def everything(world: int, seed: int, count: int) -> Iterator[str]:
    for n in range(seed, seed + count):
        rng = np.random.default_rng(n)
        case = random_case(rng, rng.random() < 0.3, world)
        try:
            check(case)
        except Exception as error:
            raise AssertionError(f"case {n} of {world}: {case}") from error
        yield f"{n}"


RUNS: dict[str, Callable[..., Iterator[str]]] = {"everything": everything}


def main(rank: int, world: int, name: str, folder: str, *numbers: int) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timeout
    )
    for done in RUNS[name](world, *numbers):
        if rank == 0:
            print(done, flush=True)
    dist.destroy_process_group()


def forked(world: int, name: str, *numbers: int) -> int:
    """The exit status of the first process that fails, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if not child:
                status = 1
                with contextlib.suppress(BaseException):
                    try:
                        main(rank, world, name, folder, *numbers)
                        status = 0
                    except BaseException:
                        traceback.print_exc()
                os._exit(status)
            children.append(child)
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return next((x for x in found if x), 0)


if __name__ == "__main__":
    sys.exit(forked(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
