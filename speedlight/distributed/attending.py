"""attention() of shards: what a call means for the whole sequence, and by which way its processes compute it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import engines
from ..arrays.array import describe, on_gpu
from ..arrays.layouts import batch_of, check_beside, check_dimensions, check_together
from ..arrays.memory import Array
from ..arrays.torch_tensors import cast, in_grad_mode, is_tensor
from ..errors import ArgumentError, ArgumentTypeError, Error, UnsupportedError, shown
from ..problem.build import from_arrays
from ..problem.checks import check_flag, check_layout
from ..problem.gradients import Followed, check_on_cpu, check_one_dtype, followed, settled
from ..problem.options import Options, ShardOptions
from ..problem.problem import LAYOUTS, Problem
from ..problem.shardings import Shard, check_shard, one_after_the_other, positions
from ..problem.signatures import public, refuse_unknown
from .forms import form_of, tables_in
from .groups import MeshGroups, agreed, peers_of
from .plans import Sharded
from .tensors import check_device, check_lengths
from .ways import METHODS, Execution, Method

if TYPE_CHECKING:
    from typing_extensions import Unpack


@public(ShardOptions)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    shard: Shard = "contiguous",
    method: Method = "auto",
    exact: bool = False,
    return_lse: bool = False,
    **options: Unpack[ShardOptions],
) -> Any:
    """Computes speedlight.attention() over a sequence sharded over processes, with gradients. All call it together.

    All options say what they would say of the whole sequence in one process: masks and scores see absolute positions,
    lengths and offsets are those of the whole. They are the same in every process, or all raise.

    Args:
        q, k, v: this process's shards of what speedlight.torch.attention() takes, of the lengths that
            positions(length, ranks, shard) says for the rank in the group; k of q's batch. On a GPU of this process,
            where the group has NCCL for it; without gradients there. torch.autocast() casts them, as it does there.
        group: a process group of torch.distributed; None is the whole world.
        mesh: a DeviceMesh in place of a group: of one dimension, or of two, (ring, ulysses): keys travel along the
            first, heads are exchanged along the second; a process's rank is then its place in the mesh, row by row.
        shard: "contiguous", "zigzag" (under causal all have the same work), or "stripe".
        method: "ring" (keys and values travel, while what is there is computed), "ulysses" (all tokens of some heads in
            each process; the processes divide q_heads), "gather" (every process gets all keys and values), or "auto":
            "gather" of up to 1 MiB of keys and values, else what sends least.
        exact: out and lse have the bits of speedlight.attention() over the whole sequence, for any number of processes.
            Else they are within its bounds, and the same from run to run. Under "ulysses", and under "gather" of
            contiguous and zigzag shards, they have those bits anyway. On CPUs.
        return_lse: also return the log-sum-exps of this process's rows.
        **options: as for speedlight.attention(), of the whole sequence. There is no dropout.

    Returns:
        This process's rows of out, or with return_lse (out, lse). What flows back to q, k and v is of the whole
        sequence; what flows to tables and sinks is this process's share: add it up over the processes, as of any
        parameter (torch.distributed.all_reduce). On CPUs with the dot instruction the lse of bfloat16 is off by 1e-3 or
        so: of weights that are rounded.

    Raises:
        speedlight.Error: the argument, what was expected and what came; where calls differ between processes, in all of
        them, before anything is sent. Of tables above 64 KiB, shapes and dtypes are compared, not entries.
        UnsupportedError: a pass back with create_graph=True; there are first derivatives alone. On a GPU: tensors that
        require grad, exact=True, and what one GPU does not do.
        CommunicationError: a process ended, or did not answer within the group's timeout; the message names it.

    Source: Liu et al., Ring Attention (2023); Jacobs et al., DeepSpeed Ulysses (2023).

    >>> import torch, torch.distributed as dist
    >>> from speedlight.distributed import attention
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> attention(q, k, v, causal=True, shard="zigzag").shape
    torch.Size([1, 2, 3, 4])
    >>> dist.destroy_process_group()
    """
    refuse_unknown(attention, options)
    given = Given(q, k, v, shard, method, exact, return_lse, peers_of(group, mesh))
    known, error = Options(), None
    try:
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            q, k, v = cast(q, k, v)
            given = given._replace(q=q, k=k, v=v)
        known = Options.of(attention, options).spelled()
    except Exception as found:  # which the others are told
        error = found
    out, lse = attended(given, known, error)
    return (out, lse) if return_lse else out


def attended(given: Given, options: Options, error: Exception | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns out and lse of this process's rows; `error` is what was found wrong with its options before."""
    known, read, arrays = Followed(Options()), [], ()
    form: dict[str, str] = {}
    try:
        if error is None:
            known, read, arrays = given.checked(options)
            form = form_of(known.options, given.described(arrays, known.options.layout))
    except Exception as found:  # of functions that are traced, too
        error = found
    own = tuple([x.shape[LAYOUTS[known.options.layout][-2]] for x in arrays[:2]]) or (0, 0)
    sizes = agree_over_mesh(given.peers, form, own, error)
    with given.peers.underway(Error):
        # tables that are followed are read here
        sharded = in_grad_mode(False)(given.sharded)(known, arrays, sizes)
        for peers in (given.peers.ring, given.peers.heads):
            peers.open(given.q.device)
        deferred_errors: list[ArgumentError] = []
        way = Execution(
            given.peers, sharded, given.shard, given.method, given.exact, known, read, given.return_lse,
            deferred_errors, on_gpu(given.q),
        )  # fmt: skip
        found = way.attended(given.q, given.k, given.v)
        if deferred_errors or sharded.may_fail:
            agree_over_mesh(
                given.peers, {"call": "attention, computed"}, (), deferred_errors[0] if deferred_errors else None
            )
        return found


def agree_over_mesh(
    peers: MeshGroups, form: dict[str, str], own: tuple[int, ...], error: Exception | None
) -> list[tuple[int, ...]]:
    """Gathers every process's numbers, in the order of ranks; an error of one row of a mesh is raised by all rows."""
    row = [own]
    if peers.heads.ranks > 1:
        try:
            row = agreed(peers.heads, form, own, error)
        except Exception as found:
            error = found
    rows = agreed(peers.ring, form, [n for each in row for n in each], error)
    return [tuple(each[at : at + len(own)]) for each in rows for at in range(0, len(each), len(own) or 1)]


class Given(NamedTuple):
    """The arguments that are not attention()'s own options."""

    q: Any
    k: Any
    v: Any
    shard: Any
    method: Any
    exact: Any
    return_lse: Any
    peers: MeshGroups
    cuts: tuple[int, ...] | None = None  # offsets of sequences of which each is sharded by itself

    def checked(self, options: Options) -> tuple[Followed, list[Any], tuple[Array, ...]]:
        """Checks what this process can tell alone."""
        check_shard(self.shard)
        check_flag("exact", self.exact)
        check_flag("return_lse", self.return_lse)
        check_layout(options.layout)
        if not (isinstance(self.method, str) and self.method in METHODS):
            ways = {"exact": "Write exact=True", "mesh": "Give mesh= a DeviceMesh of two dimensions"}
            way = ways.get(self.method) if isinstance(self.method, str) else None
            way = "" if way is None else f" {way}: plan() calls it method={self.method!r}."
            raise ArgumentError(
                f"method: expected 'ring', 'ulysses', 'gather' or 'auto'; got {shown(self.method)}.{way}"
            )
        self._check_together(options)
        for name, x in (("q", self.q), ("k", self.k), ("v", self.v)):
            if not is_tensor(x):
                raise ArgumentTypeError(f"{name}: expected a PyTorch tensor; got {type(x).__name__}.")
            check_device(name, x)
            for peers in (self.peers.ring, self.peers.heads):
                peers.check_carries(name, x.device)
        given = (self.q, "q"), (self.k, "k"), (self.v, "v")
        arrays = tuple([describe(x.detach(), name, gpu=True) for x, name in given])
        q, k, v = arrays
        for x in arrays:
            check_beside(x, q)
            check_dimensions(x.name, x.shape, options.layout)
        dim = LAYOUTS[options.layout][-2]
        if v.shape[dim] != k.shape[dim]:
            raise ArgumentError(f"v: expected length {k.shape[dim]}, as k has; got {v.shape[dim]} (shape {v.shape}).")
        if batch_of(k.shape, options.layout) != batch_of(q.shape, options.layout):
            raise ArgumentError(f"k: expected batch {q.shape[0]}, as q has; got {k.shape[0]} (shape {k.shape}).")
        known = followed(options)
        if torch.is_grad_enabled() and (known or True in [x.requires_grad for x in (self.q, self.k, self.v)]):
            check_on_cpu(on_gpu(self.q))
            check_one_dtype(q.dtype, k.dtype)
        found, read = settled(known)
        if on_gpu(self.q):
            self._check_gpu(found.options, q, k, v)
        return found, read, arrays

    def _check_gpu(self, options: Options, q: Array, k: Array, v: Array) -> None:
        """Raises on all processes, before anything is sent, for what the GPU's engine cannot do."""
        if self.exact:
            raise UnsupportedError(
                "exact: expected False for tensors on a GPU; got True. The bits of one process are a promise of CPUs: "
                "use .cpu() for them."
            )
        widened, axes = check_together(k, v, q), LAYOUTS[options.layout]
        heads = q.shape[axes[-3]], k.shape[axes[-3]]
        sizes = Problem(q.dtype, *heads, q.shape[-1], v.shape[-1], (), (), (), 0, False, 1.0, widened=widened)
        engines.gpu().check(sizes, q.device, options.precision, tables_in(options))

    def _check_together(self, options: Options) -> None:
        """Raises unless the arguments go together."""
        packed, heads = options.layout == "lhd", self.peers.heads.ranks
        if self.exact and packed and self.peers.ring.ranks > 1 and (self.method == "ring" or heads > 1):
            raise UnsupportedError(
                "exact: expected False where keys of packed sequences travel, whose spans begin anywhere; got True. "
                "method='ulysses' and 'gather' have the bits of one process."
            )
        if heads > 1 and self.method not in ("auto", "ring"):
            raise ArgumentError(
                f"method: expected 'auto' for a mesh of two dimensions, (ring, ulysses); got {shown(self.method)}."
            )
        if heads > 1 and self.shard == "stripe":
            raise ArgumentError("shard: expected 'contiguous' or 'zigzag' for a mesh of two dimensions; got 'stripe'.")

    def described(self, arrays: tuple[Array, ...], layout: str) -> dict[str, str]:
        """Returns what must be the same everywhere, beside the options."""
        found = {"call": "attention", "shard": self.shard, "method": self.method, "exact": str(self.exact)}
        found["return_lse"] = str(self.return_lse)  # what flows back from it is everybody's
        for x, given in zip(arrays, (self.q, self.k, self.v), strict=True):
            shape = ", ".join(["…" if d == LAYOUTS[layout][-2] else str(n) for d, n in enumerate(x.shape)])
            followed = torch.is_grad_enabled() and given.requires_grad
            where = " on a GPU" if on_gpu(given) else ""
            found[x.name] = f"{x.dtype} ({shape}){where}{' that requires grad' if followed else ''}"
        return found

    def sharded(self, known: Followed, arrays: tuple[Array, ...], sizes: list[tuple[int, ...]]) -> Sharded:
        """The problem of the whole sequence, and who holds what of it; sizes: every process's lengths of q and k."""
        options = known.unfollowed
        dim, totals = LAYOUTS[options.layout][-2], [sum(x) for x in zip(*sizes, strict=True)]
        held = []
        for name, total, own in zip("qk", totals, zip(*sizes, strict=True), strict=True):
            cuts = (0, total) if self.cuts is None else self.cuts
            each = [positions(b - a, self.peers.ranks, self.shard) for a, b in itertools.pairwise(cuts)]
            held.append(one_after_the_other(each, self.peers.ranks))
            check_lengths(name, list(own), held[-1], self.shard)
        whole = [
            replace(x, shape=tuple([total if d == dim else n for d, n in enumerate(x.shape)]))
            for x, total in zip(arrays, (totals[0], totals[1], totals[1]), strict=True)
        ]
        return Sharded(from_arrays(whole[0], whole[1], whole[2], options), *held)
