"""key_weights(): weights of keys reduced over queries, without the matrix of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from .. import engines
from ..arrays import latents
from ..arrays.array import describe
from ..arrays.making import empty_like, like_input
from ..errors import UnsupportedError
from ..problem.build import from_arrays
from ..problem.key_weights import requested
from ..problem.options import AnyArray, ArrayOf, Ints, Keys, Options, T, WeightOptions
from ..problem.signatures import public

if TYPE_CHECKING:
    from typing_extensions import Unpack


@public(WeightOptions)
def key_weights(
    q: ArrayOf[T],
    k: Keys,
    lse: AnyArray,
    *,
    reduce: Literal["sum", "max"] = "sum",
    queries: slice | None = None,
    rows: Ints | None = None,
    **options: Unpack[WeightOptions],
) -> T:
    """Returns the sum, or the largest, of each key's attention weights over queries, in memory linear in the length.

    Weights are exp(score - lse), and 0 where a key is hidden. Sinks count through the lse. On the CPU, without
    gradients; call it under torch.no_grad() where tensors require grad.

    Args:
        q, k: as attention() had them; k of q's dtype. Those of a cache without a window are cache.keys(layer).
        lse: the log-sum-exps that attention(…, return_lse=True) returned for them.
        reduce: "sum", or "max". A sum has the order of attention_backward()'s dv, for an upstream gradient of 1: it is
            the same to the bit for any number of threads. A maximum is exact, NaN above all.
        queries: a slice of the queries that count, as slice(-64, None): of each item's own, where lengths differ.
        rows: numbers of queries whose whole rows of weights are wanted, in place of a reduction.
        **options: as attention() had them.

    Returns:
        An array of q's kind, (batch, q_heads, k_len); packed (q_heads, total_length); of rows
        (batch, q_heads, len(rows), k_len). float32, or float64 for float64 arrays.

    Raises:
        speedlight.Error: the argument, what was expected and what came.

    >>> import numpy as np, speedlight as sl
    >>> q = k = v = np.ones((1, 2, 3, 4), dtype=np.float32)
    >>> out, lse = sl.attention(q, k, v, causal=True, return_lse=True)
    >>> sl.key_weights(q, k, lse, causal=True)[0, 0].round(3).tolist()
    [1.8329999446868896, 0.8330000042915344, 0.3330000042915344]
    >>> sl.key_weights(q, k, lse, causal=True, rows=[1])[0, 0].tolist()
    [[0.5, 0.5, 0.0]]
    """
    given = Options.of(key_weights, options).spelled()
    if engines.runs_on_gpu(q, None):
        raise UnsupportedError(
            "q: expected an array on the CPU, where weights of keys are computed; got one on a GPU. Use q.cpu(), "
            "k.cpu() and lse.cpu()."
        )
    three = describe(q, "q"), describe(latents.join_pair(k), "k"), describe(lse, "lse")
    stated = from_arrays(three[0], three[1], three[1], given)
    request = requested(stated, given.layout, three, reduce, queries, rows)
    result, out = empty_like(three[0], request.shape, three[2].dtype)
    out.numpy()[...] = 0
    engines.cpu().weigh_keys(request, given.layout, stated, (*three, out))
    return like_input(three[0], result)
