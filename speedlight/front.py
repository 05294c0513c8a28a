"""attention(): repeats a prepared call, or sends a new one to autograd or to the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from . import engines
from .arrays import latents
from .arrays.latents import KeyPair
from .arrays.torch_tensors import cast
from .calls import dense
from .host.forks import importing
from .problem.checks import check_flag
from .problem.options import (
    AnyArray,
    ArrayCall,
    ArrayOf,
    Causal,
    Engine,
    Indices,
    Int,
    Ints,
    Keys,
    Layout,
    Mask,
    Options,
    Precision,
    Scores,
    Sinks,
    T,
    Window,
    new_options,
    padded_alike,
    usual_options,
)
from .problem.signatures import public

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def attention(
    q: ArrayOf[T], k: Keys, v: AnyArray | None, *, return_lse: Literal[False] = False, **options: Unpack[ArrayCall]
) -> T: ...
@overload
def attention(
    q: ArrayOf[T], k: Keys, v: AnyArray | None, *, return_lse: Literal[True], **options: Unpack[ArrayCall]
) -> tuple[T, T]: ...
@overload
def attention(
    q: ArrayOf[T], k: Keys, v: AnyArray | None, *, return_lse: bool, **options: Unpack[ArrayCall]
) -> T | tuple[T, T]: ...
@public()
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
    indices: Indices | None = None,
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
    value_dim: Int | None = None,
) -> Any:
    """Computes exact attention, softmax(scale · QKᵀ)V, in memory linear in the length.

    Types: Int is a whole number of Python or NumPy, or a tensor of one; Ints are a list or an array of them; AnyArray
    is an array of any library that q may come from. Causal, Window, Mask, Scores, Sinks, Layout, Engine and Precision
    are described at the arguments of these names.

    Args:
        q: (batch, q_heads, q_len, head_dim) of float32, float64, float16 or bfloat16: a NumPy array, a PyTorch
            tensor, or an object with DLPack or `__array_interface__`; on the CPU or (not float64) on an NVIDIA GPU. Any
            strides.
        k: (batch, kv_heads, k_len, head_dim), same dtype, or float16 or bfloat16 under a q of another of float32 and
            these: then all is computed in float32, with the bits of a k and v that were converted. kv_heads divides
            q_heads: query head h reads kv head h // (q_heads // kv_heads). A batch of 1 is shared by all items of q;
            nothing is copied. A pair (latent, rotary) is a key in two parts, wherever each lies: the result is that of
            the parts joined along head_dim, bit for bit, without a copy of them.
        v: (batch, kv_heads, k_len, value_dim), of k's dtype and batch. None: the first value_dim columns of k, as
            latent attention (MLA) has it; of a pair, the latent's.
        causal: True (or "bottom-right") hides keys after the query, aligned at the end (the last query sees every
            key); "top-left" aligns at the start, as PyTorch's is_causal does.
        window: (left, right): hides keys before i - left and after i + right; None means no limit on that side. A
            sliding window of n tokens, as speedlight.torch.Attention(window=n) and KVCache(window=n) have it, is
            (n - 1, None) beside causal=True.
        mask: which keys a query sees: a function (b, h, i, j) -> bool of batch item, query head and absolute positions
            of query and key, a pattern such as sl.window(1024, 0) or several joined by & | ~, or a bool array that
            broadcasts to (batch, q_heads, q_len, k_len), True meaning visible. Joined to `causal` and `window` by &.
        score: how scores change: a function (s, b, h, i, j) -> s of the scaled score, a pattern such as
            sl.alibi(slopes), a float array to add, or a list of these, left to right. A score of -inf hides the key.
        sink_logits: a score per query head that joins the softmax's denominator and nothing else, as gpt-oss has it.
        indices: the keys that each query may see, chosen by their numbers in k: whole numbers of shape (batch, q_len,
            k), or (batch, kv_heads, q_len, k), without batch for layouts without one. -1 is none; any order; a key that
            is given twice counts once. `causal`, `window`, lengths and masks still hide. The bits are those of the call
            with the equal mask. In arrays on the CPU, other keys are not read (docs/options.md).
        q_start: absolute position of the first query, an int or one per batch item. Default k_len - q_len,
            by each item's lengths.
        k_start: absolute position of the first key, a multiple of 1024.
        scale: factor of the scores. Default 1/sqrt(head_dim).
        layout: "bhld", "blhd" for (batch, length, heads, head_dim), "hld" for one item without a batch, (heads,
            length, head_dim), or "lhd" for packed (total_length, heads, head_dim). Other libraries' names of these
            ("bhsd", "bshd", "BNSD", "thd" …) are taken, too.
        cu_seqlens_q: for "lhd", offsets of the sequences in q: 0, …, total_length. Default one sequence.
        cu_seqlens_k: the same for k and v. Default cu_seqlens_q.
        lengths: for a batch that is padded on the right, tokens of each item, queries and keys alike. Padding is
            never read; its rows get out 0 and lse -inf. Padding anywhere is mask=sl.padding(attention_mask).
        q_lengths: for a padded batch, queries of each item, where keys have other lengths.
        k_lengths: for a padded batch, keys of each item. Where q_len is k_len, one of the two alone is refused if
            `causal`, `window` or a function of i looks at positions: the default q_start, by each item's lengths, is
            not what a padded square means. Give lengths= (self-attention), or q_start=0, which puts row i at key i.
        return_lse: also return the log-sum-exp of each row's scores, natural logarithm, (batch, q_heads, q_len), or
            (q_heads, q_len) without a batch and packed; float32, or float64 for float64. A row that sees no key has
            lse -inf and out 0.
        out: where to write the result, in the layout of q. It is unchanged if an Error is raised; an interrupt may
            leave it partly written.
        engine: "cpu" or "cuda" insists on one. Default: where q, k and v lie.
        precision: of float32 products on a GPU: "ieee", or by tensor cores "tf32x3" (three products for each) or "tf32"
            (10 bits). The CPU, and a GPU with head dims above 128, always compute as "ieee".
        dropout: probability that a weight becomes 0 after the softmax; the others are divided by 1 - dropout. The
            log-sum-exp is of all weights.
        seed: key of dropout's random numbers, an int of 64 bits. Seed, batch item, query head and both positions decide
            which weights are dropped, on every device. sl.reference.keep_mask() shows which stay.
        value_dim: with v=None, how many of k's first columns are the values. Default, of a pair, all of the latent's.

    Returns:
        The output, shaped as q with value_dim last, of q's kind and dtype; with return_lse a pair (out, lse).
        On the vector units avx512bf16 and amx the lse of bfloat16 is off by about 1e-3, since weights are rounded.

    Raises:
        speedlight.Error: names the argument, what was expected and what came; also a ValueError or TypeError.
            Nothing has been written then.

    Source: Dao et al., FlashAttention (2022); the arithmetic is described in docs/numerics.md.

    >>> import numpy as np, speedlight as sl
    >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
    >>> out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape, float(out[0, 0, 0, 0])
    ((1, 2, 3, 4), (1, 2, 3), 1.0)
    """
    if lengths is not None:
        q_lengths = k_lengths = padded_alike(lengths, q_lengths, k_lengths)
    if (
        mask is score is sink_logits is seed is window is q_start is indices is None
        and cu_seqlens_q is cu_seqlens_k is q_lengths is k_lengths is None
        and type(causal) is bool
        and type(layout) is type(precision) is str
        and precision == "ieee"
        and type(k_start) is int
        and type(dropout) is float
        and not (k_start or dropout)
        and (scale is None or (type(scale) is float and scale))
    ):
        options = usual_options(causal, scale, layout)
    else:
        options = new_options(
            mask=mask,
            score=score,
            sink_logits=sink_logits,
            indices=indices,
            scale=scale,
            dropout=dropout,
            seed=seed,
            causal=causal,
            window=window,
            q_start=q_start,
            layout=layout,
            cu_seqlens_q=cu_seqlens_q,
            q_lengths=q_lengths,
            k_start=k_start,
            cu_seqlens_k=cu_seqlens_k,
            k_lengths=k_lengths,
            precision=precision,
        )
    if v is None or value_dim is not None or type(k) is tuple or type(k) is list:
        k, v = latents.resolve(k, v, value_dim)
    torch = None if type(q) is np.ndarray else sys.modules.get("torch")
    if torch is not None and torch._C._is_any_autocast_enabled():
        if type(k) is KeyPair:
            k, v = k.joined()
        q, k, v = cast(q, k, v)
    return compute(q, k, v, options, return_lse, out, engine)


def compute(
    q: Any, k: Any, v: Any, options: Options, return_lse: Any = False, out: Any = None, engine: Any = None,
    call: str = "attention", check: Callable[[], bool] | None = None,
) -> Any:  # fmt: skip
    """Computes attention() with its options in one. Autocast casts nothing here.

    Repeats a prepared call; a new one goes to autograd, if that records it, or to the engine.

    Args:
        call: a name for calls that check() accepted; those of other names are not repeated.
        check: says whether a call that is not repeated may be computed here; if not, None is returned. It must depend
            on what arrays are and on nothing in them.
    """
    key = None
    if engine is None or (type(engine) is str and engine == "cpu"):
        key, results = dense.repeat(q, k, v, options, return_lse, out, call)
        if results is not None:
            return results
    if check is not None and not check():
        return None
    on_gpu = engines.runs_on_gpu(q, engine)
    check_flag("return_lse", return_lse)
    torch = sys.modules.get("torch")
    # a key says that nothing was found that autograd follows
    is_recorded = key is None and torch is not None and (on_gpu or isinstance(q, torch.Tensor))
    if type(k) is KeyPair and (is_recorded or on_gpu):
        k, v = k.joined()
        key = None
    if is_recorded:
        with importing:
            from .autograd.attending import attend_recorded

        results, options = attend_recorded(q, k, v, options, return_lse, out)
        if results is not None:
            return results
    return dense.attend_anew(q, k, v, options.spelled(), return_lse, out, key, on_gpu)
