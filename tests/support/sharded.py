"""Attention over shards in several processes: what test_distributed.py starts.

    python tests/support/sharded.py WORLD NAME [SEED COUNT]

One process imports PyTorch and forks the others, which is most of what this costs. Each runs every case of NAME; rank 0
holds what comes together against the reference, and prints the name of a case that is right.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from engines import one_vector, tuned
from sharded_cases import Case, drawn_case, random_case, tensor
from sharded_faults import (
    SIZES,
    TIMEOUT,
    absent,
    call,
    dying,
    endless,
    forked,
    interrupted,
    lookups,
    refusals,
    refused,
    second,
)
from tolerance import assert_within
from turns import make_in_turn

import speedlight as sl
import speedlight.torch
from speedlight import distributed, reference
from speedlight.distributed.groups import Peers
from speedlight.host.machine import current_isa
from speedlight.problem import key_parts as parts_module

LEAST = parts_module._LEAST


def whole_of(x: torch.Tensor, case: Case, dim: int) -> torch.Tensor:
    return distributed.unshard(x.detach(), shard=case.shard, dim=dim)


def check(case: Case, **more: Any) -> None:
    """One case in every process; rank 0 judges."""
    dim, rng = case.dim, np.random.default_rng(1)
    parts_module._LEAST = 1 if case.in_turns else LEAST
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


def each(cases: list[Case], world: int, check: Callable[[Case], None]) -> Iterator[str]:
    """One after another, each named where it is wrong."""
    for n, x in enumerate(cases):
        try:
            check(x)
        except Exception as error:
            raise AssertionError(f"case {n} of {world}: {x}") from error
        yield f"case {n}"


def taken(case: Case) -> bool:
    """Whether one process takes it."""
    try:
        sl.attention(*case.arrays, **case.options)
    except sl.Error:
        return False
    return True


def judge(case: Case, options: dict[str, Any], whole: list[Any], flows: list[Any], gradients: list[Any]) -> None:
    plain = [x.detach() for x in case.arrays]
    if case.exact:
        want = sl.attention(*plain, return_lse=True, **options)
        for x, y in zip(whole, want, strict=True):
            assert torch.equal(bits_of(x), bits_of(y)), f"other bits: {(x.double() - y.double()).abs().max()}"
        if not gradients:
            return
    dot, of_gradients = (current_isa().dot(plain[0].dtype, gradients=x) for x in (False, True))
    want = reference.attention(*plain, return_lse=True, **options)
    bounds = reference.error_bound(*plain, dot=dot, **options)
    for x, y, bound, name in zip(whole, want, bounds, ("out", "lse"), strict=True):
        assert_within(x, y, bound, name, zeros_allowed=True)
    if gradients:
        want = reference.backward(*plain, *whole, *flows, **options)
        bounds = reference.backward_bound(*plain, *whole, *flows, dot=of_gradients, **options)
        for x, y, bound, name in zip(gradients, want, bounds, ("dq", "dk", "dv"), strict=True):
            assert_within(x, y, bound, name, zeros_allowed=True)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


# --- what is run


def everything(world: int, seed: int, count: int) -> Iterator[str]:
    for n in range(seed, seed + count):
        rng = np.random.default_rng(n)
        case = random_case(rng, rng.random() < 0.3, world)
        try:
            if taken(case):
                check(case)
        except Exception as error:
            raise AssertionError(f"case {n} of {world}: {case}") from error
        yield f"{n}"


def short(world: int) -> Iterator[str]:
    """Every way, sharding and kind of mask once; few kernels, which take long to make."""
    rng = np.random.default_rng(0)
    case = functools.partial(drawn_case, rng)
    causal, window = {"causal": True}, {"causal": True, "window": (9, None)}
    cases = [
        case(4, 2, 61, causal | {"sink_logits": [0.5, -1.0, 2.0, 0.0]}),
        case(4, 2, 61, causal, shard="zigzag", method="auto"),
        case(4, 2, 3, causal, shard="zigzag"),
        case(4, 2, 61, window, shard="stripe"),
        case(4, 2, 2300, causal, shard="zigzag", exact=True, gradients=False),
        case(4, 2, 1500, causal, torch.float16, exact=True, gradients=False, in_turns=True, batch=2),
        case(4, 2, 1500, causal, torch.bfloat16, shard="zigzag", exact=True, gradients=False),
        case(4, 2, 61, causal, torch.bfloat16, shard="zigzag"),
        case(4, 2, 61, causal | {"layout": "blhd"}, torch.bfloat16, shard="zigzag", in_turns=True, batch=2),
        case(4, 2, 2300, window, exact=True, gradients=False),
        case(4, 2, 61, window, method="gather", shard="zigzag"),
        case(2 * world, 1, 61, window, method="ulysses", shard="zigzag"),
        case(4, 2, 61, causal | {"layout": "lhd", "cu_seqlens_q": [0, 13, 13, 40, 61]}, shard="zigzag"),
        case(4, 2, 61, causal | {"lengths": [61, 23]}, batch=2),
        case(
            4, 2, 61, causal | {"q_lengths": [50, 40], "k_lengths": [61, 40]}, batch=2, shard="stripe"
        ),  # items begin apart
        case(4, 2, 61, {"mask": sl.prefix(0), "sink_logits": [0.5, -1.0, 2.0, 0.0]}),  # no row sees a key
    ]
    yield from each(cases, world, check)
    yield from learned(world)
    yield from unlike(world)
    yield from again(world)
    yield from gradients_of_heads(world)
    yield from second(world)
    yield from lookups(world)
    yield from apart(world)
    yield from interrupted(world)
    yield from refusals(world)


def learned(world: int) -> Iterator[str]:
    """What flows to tables and sinks adds up over processes, and over turns of heads."""
    rng, parts_module._LEAST = np.random.default_rng(3), 1
    arrays = [tensor(rng, "bhld", 1, 4, 40, 16) for _ in range(3)]
    found = []
    for alone in (True, False):
        slopes, sinks = torch.tensor([0.5, 0.1, 0.2, 0.3]), torch.tensor([0.5, -1.0, 2.0, 0.0])
        for x in (slopes, sinks):
            x.requires_grad_()
        options: dict[str, Any] = {"causal": True, "score": sl.alibi(slopes), "sink_logits": sinks}
        if alone:
            both = speedlight.torch.attention(*arrays, return_lse=True, **options)
        else:
            own = [distributed.shard(x, shard="zigzag", dim=2) for x in arrays]
            both = distributed.attention(*own, shard="zigzag", method="ring", return_lse=True, **options)
        (both[0].square().sum() + both[1].square().sum()).backward()
        if not alone:
            for x in (slopes, sinks):
                dist.all_reduce(x.grad)
        found.append((slopes.grad, sinks.grad))
    own = distributed.shard(torch.zeros(5 * world), shard="zigzag", dim=0).requires_grad_()
    weights = torch.arange(5.0 * world)  # of this process, and more of each that follows
    (distributed.unshard(own, shard="zigzag", dim=0) * (weights + dist.get_rank())).sum().backward()
    want = world * weights + world * (world - 1) / 2
    assert torch.equal(own.grad, distributed.shard(want, shard="zigzag", dim=0)), own.grad
    for want, got in zip(*found, strict=True):
        assert want.abs().min() > 1e-3
        assert torch.allclose(want, got, rtol=1e-4, atol=0), (want, got)
    yield "learned"


def unlike(world: int) -> Iterator[str]:
    """The first process uses log-sum-exps, the others outputs: all of them send what flows back from both."""
    rng = np.random.default_rng(4)
    arrays = [tensor(rng, "bhld", 1, 2 * world, 61, 16).requires_grad_() for _ in range(3)]
    ways = ("zigzag", {"method": "ulysses"}), ("stripe", {"exact": True}), ("contiguous", {"method": "ring"})
    for shard, how in ways:
        mine = distributed.shard(torch.zeros(61), shard=shard, dim=0) + dist.get_rank()
        ranks = distributed.unshard(mine, shard=shard, dim=0)
        out, lse = speedlight.torch.attention(*arrays, causal=True, return_lse=True)
        loss = out[:, :, ranks > 0].square().sum() + lse[:, :, ranks == 0].square().sum()
        want = torch.autograd.grad(loss, arrays)
        own = [distributed.shard(x.detach(), shard=shard, dim=2).clone().requires_grad_() for x in arrays]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # stripes are redistributed
            out, lse = distributed.attention(*own, causal=True, shard=shard, return_lse=True, **how)
        (lse if dist.get_rank() == 0 else out).square().sum().backward()
        for x, y in zip(own, want, strict=True):
            assert torch.allclose(x.grad, distributed.shard(y, shard=shard, dim=2), rtol=1e-4, atol=1e-4), how
    yield "unlike"


def again(world: int) -> Iterator[str]:
    """What was prepared for a call is not taken for one of other strides, of other bits, or of more rows."""
    rng = np.random.default_rng(6)
    arrays = [tensor(rng, "bhld", 1, n, 2300, 16) for n in (4, 2, 2)]
    own = [distributed.shard(x, shard="zigzag", dim=2) for x in arrays]
    want = distributed.shard(sl.attention(*arrays, causal=True), shard="zigzag", dim=2)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in own]
    for x, exact in itertools.product((own, strided), (False, True)):
        out = distributed.attention(*x, causal=True, shard="zigzag", method="ring", exact=exact)
        assert torch.equal(bits_of(out), bits_of(want)) if exact else torch.allclose(out, want, rtol=1e-4, atol=1e-5)
    for q_len in (8 * world, 8 * world - 1):  # of which the first process has 8
        q, k = arrays[0][:, :, :q_len], arrays[1][:, :, : 8 * world]
        own = [distributed.shard(x, dim=2).contiguous() for x in (q, k, k)]
        out = distributed.attention(*own, causal=True, method="gather")
        assert torch.equal(bits_of(out), bits_of(distributed.shard(sl.attention(q, k, k, causal=True), dim=2))), q_len
    yield "again"


def gradients_of_heads(world: int) -> Iterator[str]:
    """Where each process has whole heads, gradients have the bits of one process."""
    rng = np.random.default_rng(4)
    whole = [tensor(rng, "bhld", 1, 2 * world, 61, 16) for _ in range(4)]  # the last flows into out
    for x in whole[:3]:
        x.requires_grad_()
    own = [distributed.shard(x.detach(), dim=2).clone().requires_grad_() for x in whole[:3]]
    speedlight.torch.attention(*whole[:3], causal=True).backward(whole[3])
    distributed.attention(*own, causal=True, method="ulysses").backward(distributed.shard(whole[3], dim=2))
    for x, y in zip(whole, own, strict=False):
        assert x.grad is not None and y.grad is not None
        assert torch.equal(bits_of(distributed.shard(x.grad, dim=2)), bits_of(y.grad))
    yield "gradients of heads"


def apart(world: int) -> Iterator[str]:
    """A message of one exchange is no other's, whatever a process that was interrupted goes on with."""
    posted, carried = [], Peers.post

    def post(peers: Any, sends: Any, receives: Any) -> Any:
        exchange = peers.known.calls, peers.known.exchanges
        posted.extend([(exchange, peers._tag(tag)) for _, _, tag, _ in (*sends, *receives)])
        return carried(peers, sends, receives)

    x = torch.randn(1, 2 * world, 8 * world, 16, requires_grad=True)
    Peers.post = post  # type: ignore[method-assign]
    try:
        for method in ("ring", "gather", "ulysses"):
            call(x, method=method, shard="zigzag").sum().backward()
        cache = distributed.KVCache(**SIZES)
        for _ in range(2):
            cache.attend(0, *[x.detach()[:, :1, :1, :4]] * 3)
    finally:
        Peers.post = carried  # type: ignore[method-assign]
    exchanges = {exchange for exchange, _ in posted}
    assert len(exchanges) > 12 and all([exchange[1] for exchange in exchanges]), exchanges
    tags = {tag: exchange for exchange, tag in posted}
    assert all([tags[tag] == exchange for exchange, tag in posted])
    yield "apart"


def mesh(world: int) -> Iterator[str]:
    """Keys along the first dimension, heads along the second."""
    from torch.distributed.device_mesh import init_device_mesh

    rng = np.random.default_rng(5)
    two = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ring", "ulysses"))
    rank, x = dist.get_rank(), torch.randn(1, 4, 8, 16)
    for causal, text in ((rank == world - 1, "causal: expected the same"), (rank == 0 and "odd", "causal: expected")):
        error = refused(lambda causal=causal: call(x, causal=causal, mesh=two))
        assert text in str(error), error
    for shard in ("contiguous", "zigzag"):
        for exact in (False, True):
            length = 2300 if exact else 61
            arrays = tuple([tensor(rng, "bhld", 2, n, length, 16) for n in (4, 2, 2)])
            options = {"causal": True, "score": sl.alibi(np.float32([0.5, 0.1, 0.2, 0.3]))}
            check(Case(arrays, options, shard, "auto", exact, not exact), mesh=two)
            yield f"{shard} {exact}"
        counts(shard, two)
        yield f"{shard} bytes"


def counts(shard: Any, two: Any) -> None:
    """What is sent is what plan() says, to the byte."""
    total, post = [0], dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        total[0] += sum(x.tensor.nbytes for x in ops if x.op is dist.isend and x.tensor.is_floating_point())
        return post(ops)

    length, options = 203, {"causal": True, "window": (90, None)}
    q, k, v = (distributed.shard(torch.randn(2, n, length, 16), shard=shard, dim=2).requires_grad_() for n in (4, 2, 2))
    dist.batch_isend_irecv = counting
    try:
        out = distributed.attention(q, k, v, mesh=two, shard=shard, **options)
        forward, total[0] = total[0], 0
        out.sum().backward()
    finally:
        dist.batch_isend_irecv = post
    sizes: dict[str, Any] = {"batch": 2, "q_heads": 4, "kv_heads": 2, "q_len": length, "head_dim": 16} | options
    for backward, sent in ((False, forward), (True, total[0])):
        ranks = sl.plan(**sizes, ranks=dist.get_world_size(), shard=shard, method="mesh", backward=backward).ranks
        assert ranks is not None
        (way,) = [x for x in ranks.ways if x.mesh == tuple(two.shape)]
        assert way.bytes_sent[dist.get_rank()] == sent, (shard, backward, way.bytes_sent, sent)


RUNS: dict[str, Callable[..., Iterator[str]]] = {
    "everything": everything, "short": short, "mesh": mesh, "dying": dying, "absent": absent, "endless": endless,
}  # fmt: skip


def main(rank: int, world: int, name: str, folder: str, *numbers: int) -> None:
    torch.set_num_threads(1)
    make_in_turn(folder)
    timeout = datetime.timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timeout
    )
    with tuned(**one_vector(1)) if name == "short" else contextlib.nullcontext():  # kernels take long to make
        for done in RUNS[name](world, *numbers):
            if rank == 0:
                print(done, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(forked(main, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])))
