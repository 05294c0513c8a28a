"""The public calls attention() and plan()."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, overload

from . import arrays, calls
from . import engine as engines
from .arrays import DTYPES
from .checks import check_flag, check_planned, check_precision
from .compiling import leaves_graph
from .cpu.operands import Dense, Rows, Strides, stride_of
from .distributed.model import asked_ranks
from .errors import ArgumentError, UnsupportedError
from .forks import importing
from .gradients import Followed, check_one_dtype, followed
from .hints import warn_if_swapped
from .machine import current_isa
from .planning import Plan, over_ranks
from .problem import Options, Sizes, new_options, padded_alike
from .resolve import from_arrays, from_sizes
from .results import results_for
from .signatures import (
    AnyArray,
    ArrayOf,
    ArrayOptions,
    Causal,
    Engine,
    Int,
    Ints,
    Layout,
    Mask,
    Method,
    Precision,
    Scores,
    Shard,
    Sinks,
    T,
    Window,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

_prepared: calls.Memo[calls.Repeatable] = calls.Memo(512, 64 << 20)


@overload
def attention(
    q: ArrayOf[T], k: AnyArray, v: AnyArray, *, return_lse: Literal[False] = False, **options: Unpack[ArrayOptions]
) -> T: ...
@overload
def attention(
    q: ArrayOf[T], k: AnyArray, v: AnyArray, *, return_lse: Literal[True], **options: Unpack[ArrayOptions]
) -> tuple[T, T]: ...
@overload
def attention(
    q: ArrayOf[T], k: AnyArray, v: AnyArray, *, return_lse: bool, **options: Unpack[ArrayOptions]
) -> T | tuple[T, T]: ...
@leaves_graph
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Window | None = None,
    mask: Mask | None = None,
    score: Scores | None = None,
    sink_logits: Sinks | None = None,
    q_start: Int | Ints | None = None,
    k_start: Int = 0,
    scale: float | None = None,
    layout: Layout = "bhld",
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    lengths: Ints | None = None,
    q_lengths: Ints | None = None,
    k_lengths: Ints | None = None,
    return_lse: bool = False,
    out: AnyArray | None = None,
    engine: Engine | None = None,
    precision: Precision = "ieee",
    dropout: float = 0.0,
    seed: Int | None = None,
) -> Any:
    """Exact attention, softmax(scale · QKᵀ)V, in memory that does not grow with the square of the length.

    Of the types above, Int is a whole number of Python's or NumPy's, or a tensor of one; Ints are several, in a list
    or an array; AnyArray is an array of a library that q may be of. Causal, Window, Mask, Scores, Sinks, Layout, Engine
    and Precision are what the arguments of these names take, as said below.

    Args:
        q: (batch, q_heads, q_len, head_dim) of float32, float64, float16 or bfloat16: a NumPy array, a PyTorch
            tensor, or an object with DLPack or `__array_interface__`; on the CPU or (not float64) on an NVIDIA GPU. Any
            strides.
        k: (batch, kv_heads, k_len, head_dim), same dtype, or float16 or bfloat16 under a q of another of float32 and
            these: then all is computed in float32, with the bits of a k and v that were converted. kv_heads divides
            q_heads: query head h reads kv head h // (q_heads // kv_heads). A batch of 1 is shared by all items of q;
            nothing is copied.
        v: (batch, kv_heads, k_len, value_dim), of k's dtype and batch.
        causal: True (or "bottom-right") hides keys after the query, aligned at the end (the last query sees every
            key); "top-left" aligns at the start, as PyTorch's is_causal does.
        window: (left, right): hides keys before i - left and after i + right; None means no limit on that side. A
            sliding window of n tokens, as speedlight.torch.Attention(window=n) and KVCache(window=n) have it, is
            (n - 1, None) beside causal=True.
        mask: which keys a query sees: a function (b, h, i, j) -> bool of batch item, query head and absolute positions
            of query and key, a pattern such as sl.window(1024, 0) or several joined by & | ~, or a bool array that
            broadcasts to (batch, q_heads, q_len, k_len), True meaning visible. Joined to `causal` and `window` by &.
        score: what becomes of a score: a function (s, b, h, i, j) -> s of the scaled score, a pattern such as
            sl.alibi(slopes), a float array to add, or a list of these, left to right. A score of -inf hides the key.
        sink_logits: a score per query head that joins the softmax's denominator and nothing else, as gpt-oss has it.
        q_start: absolute position of the first query, an int or one per batch item. Default k_len - q_len,
            by each item's lengths.
        k_start: absolute position of the first key, a multiple of 1024.
        scale: factor of the scores. Default 1/sqrt(head_dim).
        layout: "bhld", "blhd" for (batch, length, heads, head_dim), "hld" for one item without a batch, (heads,
            length, head_dim), or "lhd" for packed (total_length, heads, head_dim). Other libraries' names of these
            ("bhsd", "bshd", "BNSD", "thd" …) are taken, too.
        cu_seqlens_q: for "lhd", offsets of the sequences in q: 0, …, total_length. Default one sequence.
        cu_seqlens_k: the same for k and v. Default cu_seqlens_q.
        lengths: for a batch that is padded on the right, tokens of each item, queries and keys alike: those past them
            do not exist; their rows get out 0 and lse -inf. Padding anywhere is mask=sl.padding(attention_mask).
        q_lengths: for a padded batch, queries of each item, where keys have other lengths.
        k_lengths: for a padded batch, keys of each item. Where q_len is k_len, one of the two alone is refused if
            `causal`, `window` or a function of i looks at positions: the default q_start, by each item's lengths, is
            not what a padded square means. Give lengths= (self-attention), or q_start=0, which puts row i at key i.
        return_lse: also return the log-sum-exp of each row's scores, natural logarithm, (batch, q_heads, q_len), or
            (q_heads, q_len) without a batch and packed; float32, or float64 for float64. A row that sees nothing has
            -inf, and out 0.
        out: where to write the result, in the layout of q. If the call raises an Error, of a lookup out of range, too,
            it is as it was; a signal may come when it is half written.
        engine: "cpu" or "cuda" insists on one. Default: where q, k and v lie.
        precision: of float32 products on a GPU: "ieee", or by tensor cores "tf32x3" (three products for each) or "tf32"
            (10 bits). The CPU, and a GPU with head dims above 128, always compute as "ieee".
        dropout: how likely each weight becomes 0 after the softmax; those that stay are divided by 1 - dropout. The
            log-sum-exp is of all.
        seed: of dropout, an int of 64 bits: the same weights are dropped whenever seed, batch item, query head and
            positions of query and key are the same, on every device. sl.reference.keep_mask() tells which.

    Returns:
        The output, shaped as q with value_dim last, of q's kind and dtype; with return_lse a pair (out, lse).
        On a CPU with the dot instruction the lse of bfloat16 is off by 1e-3 or so: of weights that are rounded.

    Raises:
        speedlight.Error: the argument, what was expected and what came. Nothing has been written then. It is also a
            ValueError or TypeError.

    Source: Dao et al., FlashAttention (2022); the arithmetic is described in docs/numerics.md.

    >>> import numpy as np, speedlight as sl
    >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
    >>> out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape, float(out[0, 0, 0, 0])
    ((1, 2, 3, 4), (1, 2, 3), 1.0)
    """
    if lengths is not None:
        q_lengths = k_lengths = padded_alike(lengths, q_lengths, k_lengths)
    options = new_options(Options, (
        causal, window, mask, score, sink_logits, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k,
        q_lengths, k_lengths, precision, dropout, seed,
    ))  # fmt: skip
    if arrays.is_tensor(q) and sys.modules["torch"]._C._is_any_autocast_enabled():
        with importing:
            from .torch.attending import cast

        q, k, v = cast(q, k, v)
    return _computed(q, k, v, options, return_lse, out, engine)


def _computed(q: Any, k: Any, v: Any, options: Options, return_lse: Any, out: Any = None, engine: Any = None) -> Any:
    if engine is not None or arrays.on_gpu(q):
        at = arrays.describe(q.detach() if arrays.is_tensor(q) else q, "q", gpu=True)
        if engines.chosen(engine, at) != "cpu" or engine == "cuda":
            return _on_gpu(q, k, v, options.spelled(), return_lse, out)
    threads, isa = engines.threads_now(), current_isa()
    tensors = (q, k, v) if out is None else (q, k, v, out)
    key = calls.key_of(tensors, options, (threads, isa.name))
    if key is not None and type(return_lse) is bool:
        repeated = _prepared.get(key)
        results = None if repeated is None else repeated.again(tensors, return_lse, options.seed_word())
        if results is not None:
            return results
    check_flag("return_lse", return_lse)
    options = options.spelled()
    if key is None and arrays.is_tensor(q):
        known = followed(options)
        if _is_followed(q, k, v, known):
            return _by_autograd(q, k, v, known, return_lse, out)
        options = known.options
    a, b, c = _described(q, k, v)
    problem, cu_q, cu_k = from_arrays(a, b, c, options)
    warn_if_swapped(options.layout, a.shape, b.shape)
    results = results_for(a, problem, options, return_lse, out, (a, b, c))
    rows, keys = (
        Rows(options.layout, a, results.out.strides, cu_q and cu_q[:-1]),
        Dense(options.layout, b, c, cu_k and cu_k[:-1]),
    )
    prepared = engines.of("cpu").prepare(problem, rows, keys, threads, isa)
    prepared.run(a.address, b.address, c.address, results.out.address, results.lse_address)
    if key is not None:
        repeatable = calls.Repeatable(prepared.run, options.layout, [a, b, c, results.out])
        _prepared.put(key, repeatable, prepared.size)
    return results.returned()


compute = leaves_graph(_computed)  # attention() with its options in one, of tensors as they are under autocast, too


def _is_followed(q: Any, k: Any, v: Any, known: Followed) -> bool:
    """Whether PyTorch's autograd follows any of it."""
    return bool(known) or any([arrays.is_tensor(x) and arrays.is_followed(x) for x in (q, k, v)])


def _by_autograd(q: Any, k: Any, v: Any, known: Followed, return_lse: bool, out: Any) -> Any:
    """The same call, which autograd can follow."""
    if out is not None:
        raise UnsupportedError(
            "out: expected None where autograd follows the call (a tensor requires grad or has a tangent); got an "
            "array. Leave it out, or call under torch.no_grad()."
        )
    with importing:
        from .torch.attending import attended

    return attended(q, k, v, known, return_lse)


def _described(q: Any, k: Any, v: Any, *, gpu: bool = False) -> list[arrays.Array]:
    return [arrays.describe(x, name, gpu=gpu) for x, name in ((q, "q"), (k, "k"), (v, "v"))]


def _on_gpu(q: Any, k: Any, v: Any, options: Options, return_lse: Any, out: Any) -> Any:
    """attention() on arrays of a GPU: enqueued on PyTorch's current stream, not waited for."""
    check_flag("return_lse", return_lse)
    known = followed(options)
    if _is_followed(q, k, v, known):
        return _by_autograd(q, k, v, known, return_lse, out)
    options = known.options
    a, b, c = _described(q, k, v, gpu=True)
    problem, cu_q, cu_k = from_arrays(a, b, c, options)
    warn_if_swapped(options.layout, a.shape, b.shape)
    engine = engines.gpu()
    engine.check(problem, a.device, options.precision)
    results = results_for(a, problem, options, return_lse, out, (a, b, c))
    keys = engine.arrays_of(b.tensor, c.tensor, options.layout)
    call = engine.prepare(problem, options.layout, a.device, keys, cu_q=cu_q, cu_k=cu_k, precision=options.precision)
    call.run(a.tensor, keys, results.out.tensor, None if results.lse is None else results.lse.tensor)
    return results.returned()


@leaves_graph
def synchronize() -> None:
    """Waits for the GPUs that were used, and raises what kernels have noted: page numbers and lengths that were out of
    range.

    Does nothing where none was used.

    >>> import speedlight as sl
    >>> sl.synchronize()
    """
    if engines.gpu_used():
        engines.gpu().synchronize()


@leaves_graph
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
    dtype: Any = None,
    causal: Causal = False,
    window: Window | None = None,
    mask: Mask | None = None,
    score: Scores | None = None,
    sink_logits: Sinks | None = None,
    q_start: Int | Ints | None = None,
    k_start: Int = 0,
    scale: float | None = None,
    layout: Layout = "bhld",
    cu_seqlens_q: Ints | None = None,
    cu_seqlens_k: Ints | None = None,
    lengths: Ints | None = None,
    q_lengths: Ints | None = None,
    k_lengths: Ints | None = None,
    exact: bool = False,
    device: Any = None,
    precision: Precision = "ieee",
    dropout: float = 0.0,
    seed: Int | None = None,
    backward: bool = False,
    ranks: int | None = None,
    link_bandwidth: float | None = None,
    latency: float | None = None,
    shard: Shard = "auto",
    method: Method = "auto",
) -> Plan:
    """What attention() with these arguments would do: FLOPs, bytes, workspace, tiles, and the least time.

    Takes either arrays, as attention() does, or sizes alone: batch 1 and float32 unless said; kv_heads are q_heads,
    k_len is q_len, and value_dim head_dim; sizes that are left out are the longest of lengths, q_lengths, k_lengths or
    cu_seqlens.
    Every option of attention() counts in both. Sizes are of arrays that lie without gaps in the layout. Computes
    no attention. The least time is at the best peak and bandwidth that were measured on this machine: a run may beat
    it if the machine was busy then (`speedlight info --measure` measures again). Of a mask, the tiles that are computed
    are always known. What is visible in them is known where a mask is made of comparisons of i, j and i -
    j; else `exact=True` counts it, key by key in the tiles that are mixed, and without it visible_pairs and flops are
    None. Of arrays on a GPU, or with `device="cuda"`, the plan is that of the GPU's kernel, its peak that of a product
    of matrices of the dtype there. With `backward=True` it is the plan of attention_backward(), on the CPU: what
    flows to q, k and v; gradients of tables and sinks come on top.

    `ranks`: also how long the call takes at least over so many processes, each on a machine like this one, what each of
    them sends, and what it holds beyond its shards: `Plan.ranks`, of speedlight.distributed's ways to do it, or of one
    `method` ("ring", "ulysses", "gather", "exact", "mesh") and one `shard` ("contiguous", "zigzag", "stripe").
    A mesh's numbers of ranks, (ring, ulysses), are in `Plan.ranks.way.mesh`; every pair of them is looked at.
    `link_bandwidth`, in bytes per second, and `latency`, in seconds, are of the link between a rank and the others:
    12.5e9 and 1e-5, where nothing is said; no link is measured.

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
    check_flag("exact", exact)
    check_flag("backward", backward)
    check_precision(precision)
    if lengths is not None:
        q_lengths = k_lengths = padded_alike(lengths, q_lengths, k_lengths)
    options = Options(
        causal, window, mask, score, sink_logits, q_start, k_start, scale, layout, cu_seqlens_q, cu_seqlens_k,
        q_lengths, k_lengths, precision, dropout, seed,
    ).spelled()  # fmt: skip
    layout = options.layout
    sizes = Sizes(dtype, batch, q_heads, kv_heads, q_len, k_len, head_dim, value_dim)
    if q is not None or k is not None or v is not None:
        for name, x in zip(Sizes._fields, sizes, strict=True):
            if x is not None:
                raise ArgumentError(f"{name}: expected either arrays or sizes; got both. Leave the sizes out.")
        check_planned({"q": q, "k": k, "v": v})
        a, b, c = _described(q, k, v, gpu=True)
        device = a.device if device is None and a.device != "cpu" else device
        problem = from_arrays(a, b, c, options).problem
        if backward:
            check_one_dtype(problem.dtype, problem.key_dtype)
        strides = Dense(layout, b, c).strides(problem.key_dtype)
        strides = strides._replace(strided_queries=stride_of(a.strides, layout, -1) != DTYPES[problem.dtype][1])
    else:
        sizes = sizes._replace(batch=1 if batch is None else batch, dtype="float32" if dtype is None else dtype)
        problem = from_sizes(sizes, options)
        strides = Strides(heads_adjoin=layout in ("blhd", "lhd") and problem.kv_heads > 1)
    found = engines.plan(problem, device, strides, precision, exact=exact, backward=backward)
    return found if spreading is None else over_ranks(found, spreading, packed=layout == "lhd")
