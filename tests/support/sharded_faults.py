"""What goes wrong in one of several processes: it is refused, interrupted, ends, hangs; and how all of them are forked.

A function here that yields is a run of tests/support/sharded.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import speedlight as sl
from speedlight import distributed
from speedlight.distributed import ring, ways
from speedlight.distributed.groups import Peers

SIZES = {"layers": 1, "kv_heads": 1, "head_dim": 4, "capacity": 8}
TIMEOUT = float(os.environ.get("SHARDED_TIMEOUT", "600"))


def forked(run: Callable[..., None], world: int, name: str, *numbers: int) -> int:
    """`run(rank, world, name, folder, *numbers)` in each; the exit status of the first that fails, or 0."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(world):
            child = os.fork()
            if not child:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nobody outlives the first process
                status = 1
                with contextlib.suppress(BaseException):
                    try:
                        run(rank, world, name, folder, *numbers)
                        status = 0
                    except BaseException:
                        traceback.print_exc()
                os._exit(status)
            children.append(child)
        found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        return next((x for x in found if x), 0)


def own(n: int) -> torch.Tensor:
    """Other numbers in each process."""
    return torch.full((n,), 0.5 + dist.get_rank(), requires_grad=True)


def raises(*_: Any) -> Any:
    raise LookupError("nobody")


def refused(call: Callable[[], Any], *kinds: type[Exception]) -> Any:
    """Returns the error that a call raises in this process: of ours, or of these kinds."""
    kinds = kinds or (sl.Error,)
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"no error on rank {dist.get_rank()}")


def call(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return distributed.attention(**({"q": x, "k": x, "v": x, "method": "ring"} | options))


def refusals(world: int) -> Iterator[str]:
    """What differs, or is wrong in one process, is an error in all; the group goes on."""
    rank, x = dist.get_rank(), torch.randn(1, 4, 8, 16)
    last = rank == world - 1
    told = "" if last else f"group: rank {world - 1} failed before the exchange: "
    wrong: list[tuple[str, str, Callable[[], Any]]] = [
        ("causal", "causal: expected the same in every process; got ", lambda: call(x, causal=last)),
        ("dtype", "q: expected the same in every process; got float", lambda: call(x.double() if last else x)),
        ("heads", "q: expected the same in every process; got ", lambda: call(x[:, : 2 if last else 4])),
        ("mask", "mask: expected the same in", lambda: call(x, mask=sl.documents([0] * (9 * world - last)))),
        ("grad", "q: expected the same in", lambda: call(x.clone().requires_grad_(last), k=x, v=x)),
        ("lse", "return_lse: expected the same in", lambda: call(x, return_lse=last)),
        ("method", "method: expected the same in", lambda: call(x, method="gather" if last else "ring")),
        ("sinks", "sink_logits: expected the same in", lambda: call(x, sink_logits=own(4))),
        ("slopes", "score: expected the same in", lambda: call(x, score=sl.alibi(own(4)))),
        ("length", "q: expected lengths ", lambda: call(x[:, :, : 4 if last else 8])),
        (
            "one",
            f"{told}shard: expected",
            lambda: call(x, shard="odd" if last else "zigzag"),
        ),
        (
            "function",
            "nobody" if last else f"{told}LookupError: nobody",
            lambda: call(x, mask=raises if last else sl.causal()),
        ),
        (
            "meta",
            f"{told}q: expected a tensor on the CPU or a CUDA device; got one on meta",
            lambda: call(x.to("meta") if last else x),
        ),
        (
            "no array",
            f"{told}mask: expected a function, a pattern such as sl.causal(), or an array; got object",
            lambda: call(x, mask=object() if last else None),
        ),
        ("list", "mask: expected a function", lambda: call(x, mask=[sl.causal(), sl.prefix(2)])),
        (
            "sparse",
            f"{told}tensor: expected a strided tensor",
            lambda: distributed.unshard(x.to_sparse() if last else x, dim=2),
        ),
        (
            "unshard",
            f"{told}dim: expected",
            lambda: distributed.unshard(x, dim=7 if last else 0),
        ),
        ("call", "call: expected the same in", lambda: distributed.unshard(x, dim=0) if last else call(x)),
        ("cache", "call: expected the same in", lambda: distributed.KVCache(**SIZES) if last else call(x)),
        ("all", "q_lengths: expected", lambda: call(x, q_lengths=[1, 2])),
    ]
    for name, text, f in wrong:
        error = refused(f, sl.Error, LookupError)
        assert str(error).startswith(text), f"{name}: {error}"
        assert call(x).shape == x.shape
        yield name


def lookups(world: int) -> Iterator[str]:
    """An index that a kernel finds out of range in one process is an error in all, at the call's end; the group goes
    on. Where none can be, nobody asks.
    """
    x, row = torch.randn(1, 2 * world, 8, 16), torch.arange(8 * world) % 8
    row[-1] = 8
    known, last = Peers(None).known, dist.get_rank() == world - 1
    for method, text in itertools.product(("ring", "ulysses", "gather"), ("shown: expected index 1 from 0 to 7", "")):
        before, shown = known.calls, torch.ones(8 if text else 9)
        try:
            call(x, mask=lambda b, h, i, j, shown=shown: shown[row[i]] > 0, method=method)
        except sl.ArgumentError as error:
            mine = last or method == "ulysses"  # where every process has all rows
            told = "" if mine else f"group: rank {world - 1} failed before the exchange: "
            assert text and str(error).startswith(told + text), error
        else:
            assert not text, f"{method}: no error"
        assert known.calls - before == (2 if text else 1)
    yield "lookups"


def second(world: int) -> Iterator[str]:
    """There are no second derivatives; and the group goes on."""
    x = torch.randn(1, 2 * world, 8, 16, requires_grad=True)
    for method in ("ring", "ulysses", "gather"):
        out = call(x, method=method).sum()
        error = refused(lambda out=out: torch.autograd.grad(out, x, create_graph=True), sl.UnsupportedError)
        assert str(error).startswith("create_graph: expected False"), error
    assert torch.autograd.grad(call(x).sum(), x)[0].shape == x.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as speedlight.torch.attention() has it
        assert call(x, causal=True, shard="zigzag").dtype == torch.bfloat16
    yield "second"


def interrupted(world: int) -> Iterator[str]:
    """Between what all agree on and the first message, too: the group's calls have not all ended."""
    x, attend = torch.randn(1, 4, 8, 16), ways.Execution.attended
    for kind, is_told in ((KeyboardInterrupt, True), (sl.UnsupportedError, False)):
        group = dist.new_group()

        def stops(*_: Any, kind: type[BaseException] = kind) -> Any:
            raise kind("here")

        ways.Execution.attended = stops  # type: ignore[method-assign]
        with contextlib.suppress(kind):
            call(x, group=group)
        ways.Execution.attended = attend  # type: ignore[method-assign]
        try:
            call(x, group=group)
        except sl.CommunicationError as error:
            assert is_told and "one failed (KeyboardInterrupt)" in str(error), error
        else:
            assert not is_told
    yield "interrupted"


def dying(world: int) -> Iterator[str]:
    """The last process ends in the middle of a call: the others name it, in time, and call no more."""
    x, last = torch.randn(1, 4, 64, 16), dist.get_rank() == world - 1
    call(x)
    if last:
        ring._States.run = lambda *_: os._exit(0)
    error = refused(lambda: call(x), sl.CommunicationError)
    assert error.rank == world - 1, error
    assert f"rank {world - 1} did not answer with keys" in str(error) and " in step " in str(error), error
    error = refused(lambda: call(x), sl.CommunicationError)
    assert "one failed (group: expected every process to take part" in str(error), error
    yield "dying"
    os._exit(0)


def absent(world: int) -> Iterator[str]:
    """The last process does not come in time."""
    x, last = torch.randn(1, 4, 8, 16), dist.get_rank() == world - 1
    call(x)
    if last:
        time.sleep(3 * TIMEOUT)
        os._exit(0)
    error = refused(lambda: call(x), sl.CommunicationError)
    assert error.rank == world - 1, error
    assert f"rank {world - 1} did not answer to compare calls" in str(error), error
    yield "absent"
    os._exit(0)


def endless(world: int) -> Iterator[str]:
    """Until somebody interrupts it."""
    x = torch.randn(1, 4, 64, 16)
    call(x)
    yield "ready"
    while True:
        call(x)
