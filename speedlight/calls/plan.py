"""plan(): the cost of a call, without making it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import engines
from ..arrays import latents
from ..arrays.integers import integer
from ..errors import ArgumentError, UnsupportedError
from ..problem.build import from_arrays, from_sizes
from ..problem.checks import check_flag, check_planned, check_precision
from ..problem.gradients import check_one_dtype
from ..problem.operands import Dense, Strides
from ..problem.options import AllOptions, Method, Options, Shard
from ..problem.plan import Plan, of_latents, of_shared_prefix, over_ranks
from ..problem.problem import Sizes
from ..problem.rank_plan import asked_ranks
from ..problem.signatures import public
from .dense import describe_all

if TYPE_CHECKING:
    from typing_extensions import Unpack


@public(AllOptions)
def plan(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    batch: int | None = None,
    q_heads: int | None = None,
    kv_heads: int | None = None,
    q_len: int | None = None,
    k_len: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    latent: bool = False,
    shared_prefix: int = 0,
    dtype: Any = None,
    exact: bool = False,
    device: Any = None,
    threads: int | None = None,
    backward: bool = False,
    ranks: int | None = None,
    link_bandwidth: float | None = None,
    latency: float | None = None,
    shard: Shard = "auto",
    method: Method = "auto",
    **options: Unpack[AllOptions],
) -> Plan:
    """Returns the cost of an attention() call before it runs: FLOPs, bytes, workspace, tiles, and the least time.

    Takes either arrays, as attention() does, or sizes alone: batch 1 and float32 unless said; kv_heads are q_heads,
    k_len is q_len, and value_dim head_dim; sizes that are left out are the longest of lengths, q_lengths, k_lengths or
    cu_seqlens.
    With `latent=True`, or beside arrays v=None and value_dim, values are the first columns of keys: their bytes count
    once. `shared_prefix`: so many leading keys are those of all sequences, as of forks in a PagePool: bytes of their
    whole tiles of 128 count once. Every option of attention() counts in both. Sizes are of arrays that lie without gaps
    in the layout. Computes no attention. The least time is at the best peak and bandwidth that were measured on this
    machine: a run may beat it if the machine was busy then (`speedlight info --measure` measures again). Of a mask, the
    tiles that are computed are always known. What is visible in them is known where a mask is made of comparisons of i,
    j and i - j; else `exact=True` counts it, key by key in the tiles that are mixed, and without it visible_pairs and
    flops are None. Of arrays on a GPU, or with `device="cuda"`, the plan is that of the GPU's kernel, its peak that of
    a product of matrices of the dtype there. With `backward=True` it is the plan of attention_backward(), on the CPU:
    what flows to q, k and v; gradients of tables and sinks come on top.

    `threads`: on so many threads of a CPU, whether this machine has them or not, which then also says nothing of the
    least time; the number of set_threads() where nothing is said. `Plan.balance` is how evenly tasks keep them busy, by
    simulation of a server.

    `ranks`: also how long the call takes at least over so many processes, each on a machine like this one, what each of
    them sends, and what it holds beyond its shards: `Plan.ranks`, of speedlight.distributed's ways to do it, or of one
    `method` ("ring", "ulysses", "gather", "exact", "mesh") and one `shard` ("contiguous", "zigzag", "stripe").
    A mesh's numbers of ranks, (ring, ulysses), are in `Plan.ranks.way.mesh`; every pair of them is looked at.
    `link_bandwidth`, in bytes per second, and `latency`, in seconds, are of the link between a rank and the others:
    12.5e9 and 1e-5, where nothing is said; no link is measured.

    Args:
        **options: as for attention(); a call of arrays and one of sizes obey each.

    Returns:
        A `Plan`: a frozen dataclass that prints as a table. FLOPs count visible work; a multiply-add is two.

    Raises:
        speedlight.Error: as attention() does.

    >>> import speedlight as sl
    >>> p = sl.plan(batch=1, q_heads=32, kv_heads=8, q_len=8192, k_len=8192, head_dim=128, dtype="bfloat16",
    ...             causal=True)
    >>> p.visible_pairs == 32 * 8192 * 8193 // 2
    True
    >>> spread = sl.plan(q_heads=8, q_len=65536, head_dim=128, causal=True, ranks=8).ranks
    >>> {name: round(slowest, 2) for name, slowest in spread.balance.items()}  # over the mean
    {'contiguous': 1.87, 'zigzag': 1.0, 'stripe': 1.0}
    """
    spreading = asked_ranks(ranks, link_bandwidth, latency, shard, method)
    if threads is not None and not 1 <= (threads := integer("threads", threads)) <= 1024:
        raise ArgumentError(f"threads: expected 1 to 1024; got {threads}.")
    if threads is not None and spreading is not None:
        raise ArgumentError("threads: expected None beside ranks, each a machine like this one. Leave it out.")
    check_flag("exact", exact)
    check_flag("backward", backward)
    given = Options.of(plan, options).spelled()
    check_precision(given.precision)
    if spreading is not None and given.indices is not None:
        raise UnsupportedError(
            "indices: expected None beside ranks=; got chosen keys. Attention over several processes takes mask=."
        )
    check_flag("latent", latent)
    shared_prefix = integer("shared_prefix", shared_prefix)
    layout = given.layout
    if k is not None and (v is None or isinstance(k, (tuple, list))):
        latent = latent or v is None
        k, v = latents.resolve_joined(k, v, value_dim)
        value_dim = None
    sizes = Sizes(dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim)
    if q is not None or k is not None or v is not None:
        for name, x in zip(Sizes._fields, sizes, strict=True):
            if x is not None:
                raise ArgumentError(f"{name}: expected either arrays or sizes; got both. Leave the sizes out.")
        check_planned({"q": q, "k": k, "v": v})
        a, b, c = describe_all(q, k, v, gpu=True)
        device = a.device if device is None and a.device != "cpu" else device
        problem = from_arrays(a, b, c, given, apart=not backward).problem
        if backward:
            check_one_dtype(problem.dtype, problem.key_dtype)
        strides = Dense(layout, b, c).strides(problem.key_dtype)
    else:
        sizes = sizes._replace(batch=1 if batch is None else batch, dtype="float32" if dtype is None else dtype)
        problem = from_sizes(sizes, given, apart=not backward)
        if latent and problem.value_dim > problem.head_dim:
            raise ArgumentError(
                f"value_dim: expected at most head_dim {problem.head_dim}, as values are the first columns of keys "
                f"(latent=True); got {problem.value_dim}."
            )
        strides = Strides(heads_adjoin=layout in ("blhd", "lhd") and problem.kv_heads > 1)
    found = engines.plan(problem, device, strides, given.precision, exact=exact, backward=backward, threads=threads)
    packed = layout == "lhd"
    found = of_latents(found) if latent else found
    found = of_shared_prefix(found, shared_prefix, packed=packed)
    return found if spreading is None else over_ranks(found, spreading, packed=packed)
