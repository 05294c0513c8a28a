"""Tensors in shards: a process's part of a whole one, the whole one of all parts, and from one sharding to another."""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..arrays.torch_tensors import check_plain_tensor, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..problem.shardings import Runs, Shard, check_shard, places, positions, tokens
from .groups import Peers, agreed

_LARGE = 1 << 18  # bytes of memory that is worth a mapping of its own, and of a message that is worth its own start


def shard(tensor: torch.Tensor, *, group: Any = None, shard: Shard = "contiguous", dim: int) -> torch.Tensor:
    """Returns this process's part of a tensor that every process has whole. Nothing is sent; gradients flow.

    Args:
        tensor: the whole of it, of any shape.
        group: the processes; None for all.
        shard: "contiguous", "zigzag" or "stripe", as positions() says.
        dim: which dimension is the sequence: 2 of "bhld", 1 of "blhd" and of "hld", 0 of "lhd".

    Returns:
        The positions that this process holds, in the order in which it holds them: a view of the tensor where they are
        one run.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import torch, torch.distributed as dist
    >>> from speedlight.distributed import shard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard(torch.arange(4), dim=0)
    tensor([0, 1, 2, 3])
    >>> dist.destroy_process_group()
    """
    check_shard(shard)
    dim = _dim(tensor, dim)
    peers = Peers(group)
    return taken(tensor, positions(tensor.shape[dim], peers.ranks, shard)[peers.rank], dim)


def unshard(tensor: torch.Tensor, *, group: Any = None, shard: Shard = "contiguous", dim: int) -> torch.Tensor:
    """Joins the parts of all processes to the whole tensor, in each. A part's gradient is the sum over processes.

    Args:
        tensor: this process's part; alike in all processes but for its length.
        group, shard, dim: as shard() had them.

    Returns:
        The whole tensor, positions in order.

    Raises:
        speedlight.Error: the argument, what was expected and what came; CommunicationError if a process is missed.

    >>> import torch, torch.distributed as dist
    >>> from speedlight.distributed import unshard
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> unshard(torch.arange(4), dim=0)
    tensor([0, 1, 2, 3])
    >>> dist.destroy_process_group()
    """
    peers, error, own = Peers(group), None, 0
    form = {"call": "unshard"}
    try:
        check_shard(shard)
        dim = _dim(tensor, dim)
        check_device("tensor", tensor)
        check_plain_tensor(tensor, "tensor", followed=True)
        peers.check_carries("tensor", tensor.device)
        others, own = [n for d, n in enumerate(tensor.shape) if d != dim], tensor.shape[dim]
        where = "" if tensor.device.type == "cpu" else " on a GPU"
        form |= {"tensor": f"{tensor.dtype} of {others}{where} beside {dim=}", "shard": shard}
    except Exception as found:  # which the others are told
        error = found
    lengths = [n for (n,) in agreed(peers, form, (own,), error)]
    held = positions(sum(lengths), peers.ranks, shard)
    check_lengths("tensor", lengths, held, shard)
    peers.open(tensor.device)
    return exchange((resharding(peers, held, ((range(sum(lengths)),),) * peers.ranks, dim),), tensor)[0]


def check_lengths(name: str, lengths: list[int], held: tuple[Runs, ...], shard: str) -> None:
    expected = [tokens(x) for x in held]
    if lengths != expected:
        raise ArgumentError(
            f"{name}: expected lengths {expected} on ranks 0 to {len(held) - 1} for shard={shard!r} of "
            f"{sum(lengths)} positions; got {lengths}. speedlight.distributed.shard() cuts a tensor so."
        )


def check_device(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{name}: expected a tensor on the CPU or a CUDA device; got one on {tensor.device}.")


def taken(tensor: torch.Tensor, runs: Runs, dim: int) -> torch.Tensor:
    """Some positions of a whole tensor."""
    parts = [strided_slice(tensor, run, dim) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def strided_slice(tensor: torch.Tensor, run: range, dim: int) -> torch.Tensor:
    at: list[Any] = [slice(None)] * tensor.ndim
    at[dim] = slice(run.start, run.stop, run.step)
    return tensor[tuple(at)]


class Exchange(NamedTuple):
    """The exchange of a tensor's blocks with other processes, and of its gradient back.

    held, wanted: what each process has, and gets: the runs of each of the axes, the last of which is that of lengths.
    adds: what several processes have of a gradient comes back as its sum, in float32 at least, by rank.
    """

    peers: Peers
    held: tuple[tuple[Runs, ...], ...]
    wanted: tuple[tuple[Runs, ...], ...]
    axes: tuple[int, ...]
    adds: bool
    what: str = "with its shard"  # as an error names it

    def there(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._redistributed(tensor, self.held, self.wanted, adds=False)

    def back(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._redistributed(tensor, self.wanted, self.held, adds=self.adds)

    def _redistributed(self, tensor: torch.Tensor, held: Any, wanted: Any, *, adds: bool) -> torch.Tensor:
        own, ranks, shape = self.peers.rank, range(self.peers.ranks), list(tensor.shape)
        for axis, runs in zip(self.axes, wanted[own], strict=True):
            shape[axis] = tokens(runs)
        number = torch.promote_types(tensor.dtype, torch.float32)
        result = torch.zeros(shape, dtype=number, device=tensor.device) if adds else mmap_empty(tensor, shape)
        sends, receives, beside = [], [], []
        for to in ranks:
            blocks = self._blocks(held[own], wanted[to]) if to != own else ()
            parts = [y for at, _ in blocks for y in pieces(self._part(tensor, at), self.axes[-1])]
            sends += [(contiguous(y), to, n, self.what) for n, y in enumerate(parts)]
        for source in ranks:
            parts = []
            for at, into in self._blocks(held[source], wanted[own]):
                place = self._part(result, into)
                part = self._part(tensor, at) if source == own else mmap_empty(tensor, place.shape) if adds else place
                beside += [(place, part)] if part is not place else []
                parts += pieces(part, self.axes[-1]) if source != own else []
            for n, y in enumerate(parts):
                into = y if y.is_contiguous() else mmap_empty(y, y.shape)
                receives.append((into, source, n, self.what))
                beside += [] if into is y else [(y, into)]
        self.peers.carry(sends, receives)
        for place, part in beside:
            place.copy_(place + part if adds else part)
        return result.to(tensor.dtype)

    def _blocks(self, held: tuple[Runs, ...], wanted: tuple[Runs, ...]) -> Any:
        """The blocks that two processes have in common: their runs in both tensors, of each axis."""
        return [zip(*each, strict=True) for each in itertools.product(*map(common, held, wanted))]

    def _part(self, tensor: torch.Tensor, block: tuple[range, ...]) -> torch.Tensor:
        for run, axis in zip(block, self.axes, strict=True):
            tensor = strided_slice(tensor, run, axis)
        return tensor


def resharding(peers: Peers, held: tuple[Runs, ...], wanted: tuple[Runs, ...], dim: int) -> Exchange:
    """The way from one sharding to another; a position may be wanted by several processes, whose gradients add up."""
    here, there = (tuple([(runs,) for runs in each]) for each in (held, wanted))
    return Exchange(peers, here, there, (dim,), adds=True)


def exchange(ways: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sends each tensor there() by its way, and its gradient back(). What flows into any of them goes back with what
    flows into the others, or zeros: a process that uses some of them sends what those expect that use others.
    """
    return _Exchanged.apply(ways, *tensors)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ways: tuple[Exchange, ...], *tensors: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ways = ways
        return tuple([way.there(x.detach()) for way, x in zip(ways, tensors, strict=True)])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *flows: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        each = zip(ctx.ways, flows, ctx.needs_input_grad[1:], strict=True)
        return None, *[way.back(x) if needed else None for way, x, needed in each]


def pieces(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """A tensor as it is sent, alike at both ends: item by item and head by head where those are large, so that what
    lies far apart is sent from where it is. dim: of lengths, the first that is not taken apart.
    """
    count = math.prod(x.shape[:dim])
    if not 1 < count <= x.nbytes // _LARGE:
        return [x]
    found = [x]
    for _ in range(dim):
        found = [y for part in found for y in part.unbind(0)]
    return found


def common(held: Runs, wanted: Runs) -> list[tuple[range, range]]:
    """The positions that two processes' runs have in common, by ascending position: their places in both memories."""
    found = []
    for a, at in zip(held, places(held), strict=False):
        for b, into in zip(wanted, places(wanted), strict=False):
            both = _both(a, b)
            if both:
                found.append((both.start, _places(a, both, at), _places(b, both, into)))
    return [x[1:] for x in sorted(found, key=lambda x: x[0])]


def _both(a: range, b: range) -> range:
    """Returns the intersection of two runs, of which one has every position between its ends, or both have the same
    step.
    """
    step = max(a.step, b.step)
    coarse = a if a.step == step else b
    first, last = max(a.start, b.start), min(a.stop, b.stop)
    first += (coarse.start - first) % step
    return range(first, last, step) if a.step == 1 or b.step == 1 or (a.start - b.start) % step == 0 else range(0)


def _places(run: range, part: range, at: int) -> range:
    """Returns where a part of a run lies, which begins at `at`."""
    first, step = at + (part.start - run.start) // run.step, part.step // run.step
    return range(first, first + len(part) * step, step)


def mmap_empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Empty memory that the system has back when nobody has it: malloc keeps it, as a hole into which the next tensor,
    whose address is to be a multiple of 64, does not fit.
    """
    size = math.prod(shape) * like.element_size()
    if size < _LARGE or like.device.type != "cpu" or not hasattr(mmap, "MAP_ANONYMOUS"):
        return like.new_empty(shape)
    own = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(own, dtype=like.dtype).view(*shape)


class Memory:
    """Tensors that come and go: the memory of one serves the next of its shape. What fits none is let go of."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []

    def take(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Returns memory of like's dtype, with any numbers."""
        for at, x in enumerate(self.free):
            if x.dtype == like.dtype and tuple(x.shape) == tuple(shape):
                return self.free.pop(at)
        self.free = []
        return mmap_empty(like, shape)

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Nobody looks at them any more."""
        self.free += tensors


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor itself if it is contiguous, else a copy."""
    return tensor if tensor.is_contiguous() else mmap_empty(tensor, tensor.shape).copy_(tensor)


def _dim(tensor: Any, dim: Any) -> int:
    if not is_tensor(tensor):
        raise ArgumentTypeError(f"tensor: expected a PyTorch tensor; got {type(tensor).__name__}.")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -tensor.ndim <= dim < tensor.ndim:
        raise ArgumentError(f"dim: expected a dimension of a tensor of shape {tuple(tensor.shape)}; got {dim!r}.")
    return dim % tensor.ndim
