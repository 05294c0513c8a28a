"""The specification: attention in float64, row by row, and the error bound that every engine keeps.

Slow, in memory that grows with q_len x k_len of one head, and plain on purpose.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import latents
from ..arrays.array import describe, listed
from ..arrays.dtypes import ALL_CODES, CODES, CodeFormat
from ..arrays.memory import Array
from ..arrays.torch_tensors import is_tensor
from ..errors import ArgumentError, ArgumentTypeError, join_words, shown
from ..host.rounding import standard
from ..problem.block_tables import page_lists
from ..problem.build import Stated
from ..problem.checks import (
    MOST,
    cache_dtype,
    check_flag,
    check_index,
    check_tokens,
    dropout_of,
    integer,
    seed_of,
    size,
    states_of,
)
from ..problem.gradients import SINKS
from ..problem.key_weights import WeightRequest, requested
from ..problem.options import AllOptions, Options, PagedOptions, ShardOptions
from ..problem.philox import MOST_POSITIONS, kept
from ..problem.problem import LAYOUTS
from ..problem.rotary_angles import RotaryOptions, rotation_of
from ..problem.signatures import public
from .backward_bounds import (
    GradientBounds,
    Sums,
    add_share,
    add_terms,
    folded_bound,
    key_bounds,
    key_weight_bound,
    query_bound,
    shared_bound,
    summed_bound,
    terms_of,
)
from .bounds import ROUNDOFF, TINY, Arithmetic, Bounds, bounds_of
from .case import Case, Flow
from .head_backward import backward_of, weights_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


@public(AllOptions, leaves_graph=False)
@standard
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool = False, value_dim: Any = None, **options: Unpack[AllOptions]
) -> Any:
    """Returns the exact result of `speedlight.attention` with the same arguments should return, in float64.

    Args:
        q, k, v: as for `speedlight.attention`.
        return_lse: also return the log-sum-exp.
        value_dim: as for `speedlight.attention`, with v=None.
        **options: as for `speedlight.attention`.

    Returns:
        float64 NumPy arrays of the shapes that `speedlight.attention` returns.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> sl.reference.attention(x, x, x)[0, 0, 0, 0]
    np.float64(1.0)
    """
    check_flag("return_lse", return_lse)
    k, v = latents.resolve_joined(k, v, value_dim)
    return _solved(_case(attention, q, k, v, options), return_lse)


def _solved(case: Case, return_lse: bool) -> Any:
    """Returns the result of a case, with the log-sum-exp if that is asked for."""
    out, lse = case.results()
    lse[...] = -np.inf
    with np.errstate(all="ignore"):
        for place in case.heads():
            place.solve(out, lse)
    return (case.outward(out), lse) if return_lse else case.outward(out)


@public(PagedOptions, leaves_graph=False)
@standard
def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    block_table: Any,
    k_lengths: Any,
    *,
    return_lse: bool = False,
    value_dim: Any = None,
    k_scales: Any = None,
    v_scales: Any = None,
    **options: Unpack[PagedOptions],
) -> Any:
    """Returns the exact result of `speedlight.attention_paged` with the same arguments should return, in float64.

    Keys are codes times k_scales, exactly, whatever kind of scales they are.

    Args:
        q, k_pages, v_pages, block_table, k_lengths, value_dim, k_scales, v_scales: as for `speedlight.attention_paged`.
        return_lse: also return the log-sum-exp.
        **options: as for `speedlight.attention_paged`.

    Returns:
        float64 NumPy arrays of the shapes that `speedlight.attention_paged` returns.

    >>> import numpy as np, speedlight as sl
    >>> q, codes = np.ones((1, 1, 1, 4), np.float32), np.full((2, 3, 1, 4), 100, np.int8)
    >>> sl.reference.attention_paged(q, codes, codes, [[1]], [2], k_scales=0.5, v_scales=[0.25])[0, 0, 0, 0]
    np.float64(25.0)
    """
    check_flag("return_lse", return_lse)
    given = Options.of(attention_paged, options).spelled()
    is_latent = v_pages is None
    k_pages, v_pages = latents.resolve_joined(k_pages, v_pages, value_dim)
    keys = _numbers_in_pages(k_pages, k_scales)
    values = _numbers_in_pages(v_pages, None if is_latent else v_scales)
    if is_latent:
        values = keys[..., : values.shape[-1]]
    numbers, lengths = page_lists(block_table, k_lengths, keys.shape[0], keys.shape[1], 0)
    k, v = (_gather(x, numbers, lengths, given.layout) for x in (keys, values))
    queries = describe(q, "q")
    rows = queries.shape[LAYOUTS[given.layout][-2]]
    if given.layout == "lhd":
        offsets = range(len(lengths) + 1) if given.cu_seqlens_q is None else given.cu_seqlens_q
        of_keys = (0, *np.cumsum(lengths, dtype=np.int64).tolist())
        given = replace(given, cu_seqlens_q=offsets, cu_seqlens_k=of_keys)
    else:
        q_lengths = (rows,) * len(lengths) if given.q_lengths is None else given.q_lengths
        given = replace(given, q_lengths=q_lengths, k_lengths=lengths)
    dtype = queries.numpy().dtype
    case = Case(queries.numpy(), np.zeros(k.shape, dtype), np.zeros(v.shape, dtype), given)
    case.k, case.v = case.inward(k), case.inward(v)
    return _solved(case, return_lse)


def _numbers_in_pages(pages: Any, scales: Any) -> np.ndarray:
    """Returns pages (pages, page_size, kv_heads, dim) in float64: of codes, times their scales."""
    numbers = describe(pages, "k_pages", codes=True).numpy().astype(np.float64)
    if scales is None:
        return numbers
    factors = _float64(scales)
    if factors.ndim in (1, 3):  # of heads, of tokens and heads: a row's columns have one
        factors = factors[..., None]
    return numbers * factors


def _gather(pages: np.ndarray, numbers: np.ndarray, lengths: tuple[int, ...], layout: str) -> np.ndarray:
    """Returns the tokens of sequences in pages, in a layout: packed, or padded with zeros."""
    rows = [pages[which].reshape(-1, *pages.shape[2:])[:n] for which, n in zip(numbers, lengths, strict=True)]
    if layout == "lhd":
        return np.concatenate(rows)
    padded = np.zeros((len(rows), max(lengths, default=0), *pages.shape[2:]))
    for item, x in enumerate(rows):
        padded[item, : len(x)] = x
    return padded if layout == "blhd" else padded.swapaxes(1, 2) if layout == "bhld" else padded[0].swapaxes(0, 1)


@public(AllOptions, leaves_graph=False)
@standard
def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any = None,
    *,
    grads: Any = (),
    value_dim: Any = None,
    **options: Unpack[AllOptions],
) -> Any:
    """Gradients of `speedlight.attention` with the same arguments, in float64.

    Weights are those of the lse that is given: q, k and v may be a shard of what out and lse are of, and the gradients
    of disjoint shards add up. A pair that is hidden adds no term to anything.

    Args:
        q, k, v, **options: as for `attention`.
        out, lse: what attention(…, return_lse=True) returned, or `merge` did. A row whose lse is -inf has no gradient.
        d_out, d_lse: what flows into them, of their shapes and dtypes; None: nothing flows into lse.
        grads: of what else: tables (sl.table) of floats that the score looks up, and "sink_logits".
        value_dim: as for `attention`, with v=None.

    Returns:
        (dq, dk, dv), shaped as q, k and v; with `grads` (dq, dk, dv, grads), a tuple of arrays shaped as the tables,
        (q_heads,) for the sinks. Of a pair of keys dk is a pair. With v=None, dv is None: dk has the sum of both.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> out, lse = sl.reference.attention(x, x, x, causal=True, return_lse=True)
    >>> dq, dk, dv = sl.reference.backward(x, x, x, out, lse, x, causal=True)
    >>> dv[0, 0, :, 0].round(6).tolist()
    [1.5, 0.5]
    """
    keys, values = k, v
    k, v = latents.resolve_joined(k, v, value_dim)
    case = _case(backward, q, k, v, options)
    flow = Flow(case, q, (out, lse, d_out, d_lse), grads)
    dq, dk, dv = (np.zeros(x.shape) for x in (case.q, case.k, case.v))
    found = {grad: np.zeros(flow.asked.shape(grad)) for grad in flow.asked.grads}
    with np.errstate(all="ignore"):
        for head in case.heads():
            x = backward_of(head, flow.into(head), flow.asked.tables)
            dq[head.at] += x.dq
            dk[head.keys] += x.dk
            dv[head.keys] += x.dv
            for table, share in zip(flow.asked.tables, x.tables, strict=True):
                found[table] += share
            if SINKS in found:
                found[SINKS][int(head.env["h"])] += x.sink
    results = latents.fold_gradients(tuple(case.outward(x) for x in (dq, dk, dv)), keys, values)
    return (*results, tuple(found.values())) if found else results


@public(AllOptions, leaves_graph=False)
def backward_bound(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any = None,
    *,
    grads: Any = (),
    dot: bool | str = False,
    tile: int | None = None,
    value_dim: Any = None,
    **options: Unpack[AllOptions],
) -> Any:
    """Bounds how far gradients may be from `backward`, element by element: by the roundings of these very numbers,
    to first order. docs/numerics.md has the formula.

    Args:
        q, k, v, out, lse, d_out, d_lse, grads, **options: as for `backward`.
        dot: bfloat16 by the dot instruction.
        tile: by the GPU engine, as for `error_bound`.
        value_dim: as for `attention`, with v=None.

    Returns:
        GradientBounds, of dq, dk and dv; with `grads` (dq, dk, dv, grads), as `backward` returns them. Of a pair of
        keys dk is a pair. With v=None, dv is None, and dk's bound is of the sum.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> lse = np.full((1, 1, 2), 2.6931472, np.float32)
    >>> bool((sl.reference.backward_bound(x, x, x, x, lse, x).dv < 1e-5).all())
    True
    """
    check_flag("dot", dot)
    given = k, v
    k, v = latents.resolve_joined(k, v, value_dim)
    case = _case(backward_bound, q, k, v, options)
    flow, tile = Flow(case, q, (out, lse, d_out, d_lse), grads), None if tile is None else size("tile", tile, 1)
    arithmetic = Arithmetic(case.problem, dot=dot, tile=tile, precision=options.get("precision", "ieee"))
    dq, dk, dv = (np.zeros(x.shape) for x in (case.q, case.k, case.v))
    further = {grad: Sums.none(flow.asked.shape(grad)) for grad in flow.asked.grads}
    group, shared = [], case.problem.shared
    of_items = [Sums.none(x.shape) for x in (dk, dv)]  # where keys are shared
    with np.errstate(all="ignore"):
        for head in case.heads():
            group.append(terms_of(head, flow.into(head), arithmetic, flow.asked.tables))
            dq[head.at] = query_bound(group[-1], arithmetic)
            for grad, sums in further.items():
                add_terms(sums, group[-1], grad, arithmetic)
            if shared:
                x = backward_of(head, flow.into(head))
                for y, share in zip(of_items, (x.dk, x.dv), strict=True):
                    add_share(y, head.keys, share)
            if len(group) == case.problem.group:
                for total, off in zip((dk, dv), key_bounds(group, arithmetic), strict=True):
                    total[head.keys] += off
                group = []
        if shared:
            dk, dv = (shared_bound(y, off, arithmetic) for y, off in zip(of_items, (dk, dv), strict=True))
        bounds = tuple(summed_bound(sums, grad, arithmetic) for grad, sums in further.items())
    outward = tuple(case.outward(x) for x in (dq, dk, dv))
    if given[1] is None:
        exact = backward(q, k, v, out, lse, d_out, d_lse, **options)
        outward = outward[0], folded_bound(outward[1:], exact[1:], case.problem.dtype), outward[2]
    own = GradientBounds(*latents.split_gradients(outward, *given))
    return (*own, bounds) if bounds else own


@public(AllOptions, leaves_graph=False)
def error_bound(
    q: Any,
    k: Any,
    v: Any,
    *,
    proven: bool = False,
    dot: bool | str = False,
    int8: bool = False,
    codes: Any = None,
    tile: int | None = None,
    value_dim: Any = None,
    **options: Unpack[AllOptions],
) -> Bounds:
    """Bounds how far a result may be from `attention`, element by element. docs/numerics.md has both formulas.

    Args:
        q, k, v, **options: as for `attention`. Of codes, k and v are float32, and q what attend() takes.
        proven: what the CPU engine cannot exceed, whatever the values are (with a score expression to first order).
            Default: what roundings of these very numbers come to at most, to first order: several times less.
        dot: bfloat16 by the dot instruction, where k and v are of q's dtype; "tiles": by tiles (AMX); "odd": by Arm's
            instructions. Codes are multiplied so under bfloat16 queries.
        int8: codes="int8".
        codes: k and v are codes · scales of a cache of this dtype ("int8", "float8_e4m3fn", "int4"), as its keys() and
            values() give them; with v=None those of latents.
        tile: by the GPU engine, keys of whose blocks these are, at least; `precision` is that of its float32 products.
        value_dim: as for `attention`, with v=None.

    Raises:
        ArgumentError: `proven` of the GPU engine, whose tensor cores add in an order of their own.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4), np.float32)
    >>> bool((sl.reference.error_bound(x, x, x).out < 1e-5).all())
    True
    """
    for name, x in (("proven", proven), ("int8", int8)):
        check_flag(name, x)
    if not isinstance(dot, bool) and dot not in ("tiles", "odd"):
        raise ArgumentTypeError(f"dot: expected True, False, 'tiles' or 'odd'; got {shown(dot)}.")
    tile = None if tile is None else size("tile", tile, 1)
    if proven and tile is not None:
        raise ArgumentError("proven: expected False with `tile`: only the CPU engine's bound is proven.")
    name, is_latent = _codes_of(codes, int8=int8), v is None
    k, v = latents.resolve_joined(k, v, value_dim)
    kind = describe(q, "q").dtype
    if name is not None and kind != describe(k, "k").dtype:
        q = describe(q, "q").numpy().astype(np.float32)  # which codes are multiplied with; the result is rounded
    case = _case(error_bound, q, k, v, options)
    if case.problem.widened or (name is not None and kind != "bfloat16"):
        dot = False
    problem = case.problem if name is None else replace(case.problem, dtype=kind)
    precision = options.get("precision", "ieee")
    arithmetic = Arithmetic(problem, proven, dot, name, is_latent and name is not None, tile, precision)
    out, lse = case.results()
    with np.errstate(all="ignore"):
        for head in case.heads():
            if head.q.size and (head.k.size or head.problem.sinks):
                out[head.at], lse[head.at] = bounds_of(head, arithmetic)
    return Bounds(case.outward(out), lse)


def _codes_of(codes: Any, *, int8: bool) -> str | None:
    """Returns the dtype of codes that error_bound() is given."""
    if codes is None:
        return "int8" if int8 else None
    return _name_of_codes("codes", codes)


def _name_of_codes(name: str, dtype: Any) -> str:
    """Returns the name of a dtype of codes, of a cache or of the caller's pages."""
    found: Any = str(dtype).removeprefix("torch.")
    found = found if found in ALL_CODES else cache_dtype(dtype)
    if found not in ALL_CODES:
        raise ArgumentTypeError(
            f"{name}: expected {join_words(ALL_CODES)}; got {found}, of which a cache keeps every bit."
        )
    return found


@standard
def quantise(x: Any, dtype: Any, *, block: Any = None, scales: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantises tokens as a cache of codes does. A code times its scale is near the number.

    A scale is of `block` neighbouring elements of a row, and the last block may have fewer. A block with NaN or
    infinity has a scale of NaN.

    - "int8" and "float8_e4m3fn": a scale is the largest magnitude over the largest code, 127 and 448. A code is the
      nearest to x / scale, of two the even one. Both quotients are rounded to float32.
    - "int4": codes and scales are ggml's of the type q4_0. A scale is the first element of the largest magnitude over
      -8, as float16, and a code is -8 to 7. A scale beyond float16's largest number becomes that, and codes of a scale
      that underflows to zero are 0.

    docs/numerics.md says how far codes · scales may be from x.

    Args:
        x: (…, dim) of float32, float16 or bfloat16: each row of dim elements, a token's of one head, is by itself.
        dtype: "int8", "float8_e4m3fn" or "int4", as KVCache takes it; "float8_e5m2", as pages of append_paged() may be.
        block: elements that share a scale. Default a whole row, of int4 32. A cache of latents has 128.
        scales: given ones, which broadcast to x. Quotients beyond the codes, which are -128 to 127 of int8, become the
            nearest one. NaN is NaN in float8, 0 in int8. By a scale of 0 or NaN all is 0.

    Returns:
        codes (…, dim) and scales (…, blocks), or those that are given, both as float32. The numbers are
        codes * scales.repeat(block, -1)[..., :dim], or codes * scales where a row has one scale.

    >>> import numpy as np, speedlight as sl
    >>> codes, scales = sl.reference.quantise(np.float32([[896.0, 100.0, 0.01]]), "fp8")
    >>> codes.tolist(), scales.tolist()
    ([[448.0, 48.0, 0.005859375]], [[2.0]])
    >>> codes, scales = sl.reference.quantise(np.float32([[4.0, -1.2, 0.3]]), "int4")
    >>> codes.tolist(), scales.tolist()
    ([[-8.0, 2.0, -1.0]], [[-0.5]])
    """
    name = _name_of_codes("dtype", dtype)
    given = describe(x, "x")
    check_tokens(given.dtype, "x", name if name in CODES else "int8")
    rows = given.numpy().astype(np.float32)
    if scales is not None:
        factors = _float64(scales).astype(np.float32)
        return _codes_by(rows, factors, ALL_CODES[name]), factors
    dim = rows.shape[-1]
    each = (ALL_CODES[name].block if block is None else size("block", block, 1)) or max(dim, 1)
    count = -(-dim // each) or 1
    blocks = np.zeros((*rows.shape[:-1], count * each), np.float32)
    blocks[..., :dim] = rows
    blocks = blocks.reshape(*rows.shape[:-1], count, each)
    with np.errstate(all="ignore"):
        codes, scales = (_ggml_codes if ALL_CODES[name].is_packed else _nearest_codes)(blocks, ALL_CODES[name])
    return codes.reshape(*rows.shape[:-1], count * each)[..., :dim].copy(), scales[..., 0]


def _nearest_codes(blocks: np.ndarray, row: CodeFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes nearest to blocks over their scales, and the scales, (…, 1)."""
    last = np.float32(row.largest)
    most = np.abs(blocks).max(axis=-1, keepdims=True, initial=0.0)
    scales = np.where(np.isfinite(most), most / last, np.float32(np.nan))
    return _rounded(np.where(scales > 0, np.clip(blocks / scales, -last, last), np.float32(0)), row), scales


def _codes_by(rows: np.ndarray, scales: np.ndarray, row: CodeFormat) -> np.ndarray:
    """Returns the codes nearest to rows over scales that are given."""
    last = np.float32(row.largest)
    is_whole = row.library == "numpy"  # as -128, but not NaN
    with np.errstate(all="ignore"):
        ratios = np.where(np.abs(scales) > 0, np.clip(rows / scales, -last - is_whole, last), np.float32(0))
        return _rounded(np.where(np.isnan(ratios), np.float32(0), ratios) if is_whole else ratios, row)


def _rounded(ratios: np.ndarray, row: CodeFormat) -> np.ndarray:
    """Returns the nearest codes, of two the even one."""
    digits = row.digits - np.maximum(np.frexp(ratios)[1], row.least)  # after the point
    return np.ldexp(np.rint(np.ldexp(ratios, digits)), np.negative(digits))


def _ggml_codes(blocks: np.ndarray, row: CodeFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes and scales (…, 1) of ggml's quantize_row_q4_0_ref().

    It has no rule for a scale that float16 cannot hold, nor for NaN and infinity.
    """
    sizes = np.abs(blocks)
    first = sizes.argmax(axis=-1, keepdims=True)  # of NaN, if there is one
    largest = np.take_along_axis(blocks, first, axis=-1) + np.float32(0)  # a zero is +0
    exact, most = largest / np.float32(-row.largest), np.finfo(np.float16).max
    exact = np.where(np.isinf(exact.astype(np.float16)), np.copysign(np.float32(most), exact), exact)
    scales = np.where(np.isfinite(largest), exact, np.float32(np.nan)).astype(np.float16).astype(np.float32)
    live = (scales != 0) & np.isfinite(scales)
    ratios = np.where(live, blocks * np.where(live, np.float32(1) / exact, np.float32(0)), np.float32(0))
    codes = np.floor(np.clip(ratios + np.float32(8.5), np.float32(0), np.float32(15))) - np.float32(8)
    return codes, scales


@public(leaves_graph=False)
def rotary(
    x: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: Any = None, interleaved: Any = False,
    dims: Any = None, layout: Any = "bhld",
) -> np.ndarray:  # fmt: skip
    """Returns the exact result of `speedlight.rotary` with the same arguments should return, in float64.

    >>> import numpy as np, speedlight as sl
    >>> sl.reference.rotary(np.ones((1, 1, 1, 2)), positions=1).round(6).tolist()
    [[[[-0.301169, 1.381773]]]]
    """
    rotation = rotation_of(x, RotaryOptions(cos, sin, positions, base, interleaved, dims, layout), "float64")
    rows, dims = _float64(x), rotation.dims
    of_pair = np.zeros((*rows.shape[:-1], rotation.cos.shape[-1]))
    cos, sin = (_float64(t) + of_pair for t in (rotation.cos, rotation.sin))
    for t in range(dims // 2):
        one, other = (2 * t, 2 * t + 1) if rotation.interleaved else (t, t + dims // 2)
        at, at_other = (one, other) if cos.shape[-1] == dims else (t, t)
        a, b = rows[..., one].copy(), rows[..., other].copy()
        rows[..., one] = a * cos[..., at] - b * sin[..., at]
        rows[..., other] = b * cos[..., at_other] + a * sin[..., at_other]
    return rows


def _case(function: Any, q: Any, k: Any, v: Any, options: Any) -> Case:
    """Returns the problem of one of these calls."""
    return Case(q, k, v, Options.of(function, options))


def _float64(x: Any) -> np.ndarray:
    """Returns a copy in float64."""
    return np.array(x.detach().cpu().double() if is_tensor(x) else x, np.float64)


@public(AllOptions, leaves_graph=False)
def weights(q: Any, k: Any, **options: Unpack[AllOptions]) -> np.ndarray:
    """softmax(scale · QKᵀ) itself, (batch, q_heads, q_len, k_len) in float64; for a few rows, since it is as large as
    it is; under dropout, what that leaves.

    Options as for `attention`, with layout "bhld", "blhd" or "hld". A row that sees nothing is 0. Beside sinks
    rows add up to less than 1.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> sl.reference.weights(x, x, causal=True)[0, 0].tolist()
    [[1.0, 0.0], [0.5, 0.5]]
    """
    k = latents.join_pair(k)
    case = _case(weights, q, k, k, options)
    out = np.zeros((*case.q.shape[:-1], case.k.shape[-2]))
    with np.errstate(all="ignore"):
        for place in case.heads():
            score = place.add_sink(place.scores())
            score = np.where(place.visible, score, -np.inf)
            p = np.exp(score - np.maximum(score.max(axis=1, keepdims=True, initial=-np.inf), -1e300))
            total = p.sum(axis=1, keepdims=True)
            left = p if place.factors is None else p * place.factors
            out[place.at][:, : len(place.k)] = (left / np.where(total == 0, 1, total))[:, : len(place.k)]
    return out


@public(ShardOptions, leaves_graph=False)
@standard
def key_weights(
    q: Any, k: Any, lse: Any, *, reduce: Any = "sum", queries: Any = None, rows: Any = None,
    **options: Unpack[ShardOptions],
) -> np.ndarray:  # fmt: skip
    """Returns the exact result of `speedlight.key_weights` with the same arguments, in float64.

    Args:
        q, k, lse, reduce, queries, rows: as for `speedlight.key_weights`.
        **options: as for `speedlight.key_weights`.

    >>> import numpy as np, speedlight as sl
    >>> x = np.ones((1, 1, 2, 4))
    >>> lse = sl.reference.attention(x, x, x, causal=True, return_lse=True)[1]
    >>> sl.reference.key_weights(x, x, lse, causal=True)[0, 0].round(6).tolist()
    [1.5, 0.5]
    """
    case, logs, request = _weighed(key_weights, q, k, lse, (reduce, queries, rows), options)
    found = np.zeros(request.shape)
    with np.errstate(all="ignore"):
        for head in case.heads():
            p = weights_of(head, logs[head.at].astype(np.float64)).p
            counted, result = _weighed_place(request, head)
            if request.reduction == "sum":
                found[result] = p[counted].sum(axis=0)
            elif request.reduction == "max":
                found[result] = p[counted].max(axis=0, initial=0.0)
            else:
                found[result] = p[counted]
    return found


@public(ShardOptions, leaves_graph=False)
def key_weights_bound(
    q: Any, k: Any, lse: Any, *, reduce: Any = "sum", queries: Any = None, rows: Any = None, dot: bool = False,
    **options: Unpack[ShardOptions],
) -> np.ndarray:  # fmt: skip
    """Bounds how far a result of `speedlight.key_weights` may be from `key_weights`, element by element.

    Args:
        q, k, lse, reduce, queries, rows: as for `speedlight.key_weights`.
        dot: bfloat16 by the dot instruction.
        **options: as for `speedlight.key_weights`.

    >>> import numpy as np, speedlight as sl
    >>> x, lse = np.ones((1, 1, 2, 4), np.float32), np.full((1, 1, 2), 2.6931472, np.float32)
    >>> bool((sl.reference.key_weights_bound(x, x, lse) < 1e-5).all())
    True
    """
    check_flag("dot", dot)
    case, logs, request = _weighed(key_weights_bound, q, k, lse, (reduce, queries, rows), options)
    arithmetic, found = Arithmetic(case.problem, dot=dot), np.zeros(request.shape)
    with np.errstate(all="ignore"):
        for head in case.heads():
            counted, result = _weighed_place(request, head)
            of_head = logs[head.at].astype(np.float64)
            found[result] = key_weight_bound(head, of_head, counted, arithmetic, request.reduction)
    return found


def _weighed(
    function: Any, q: Any, k: Any, lse: Any, wanted: tuple[Any, Any, Any], options: Any
) -> tuple[Case, np.ndarray, WeightRequest]:
    """Returns the case of a call of key_weights(), its log-sum-exps and its request."""
    k = latents.join_pair(k)
    case = _case(function, q, k, k, options)
    arrays = describe(q, "q"), describe(k, "k"), describe(lse, "lse")
    stated = Stated(case.problem, case.cu_q, case.cu_k)
    return case, arrays[2].numpy(), requested(stated, case.layout, arrays, *wanted)


def _weighed_place(request: WeightRequest, head: Any) -> tuple[Any, Any]:
    """Returns which of a head's rows count, and where its result goes."""
    item, at = int(head.env["b"]), (*head.at[:-1], head.keys[-1])
    if request.reduction != "rows":
        first = request.skipped[item]
        return slice(first, first + request.problem.q_lengths[item]), at
    present = [(number, row) for number, row in enumerate(request.rows) if row < len(head.q)]
    numbers, rows = (np.array([x[n] for x in present], np.int64) for n in range(2))
    keys = head.keys[-1]
    return rows, (*head.at[:-1], numbers[:, None], np.arange(keys.stop)[None, :])


def keep_mask(dropout: float, seed: int, b: int, h: int, i: Any, j: Any) -> np.ndarray:
    """Returns which weights `dropout=, seed=` leave: (len(i), len(j)), True where one stays.

    Args:
        dropout, seed: as for `speedlight.attention`.
        b: what a mask calls the batch item: its place in the batch.
        h: the query head.
        i, j: absolute positions of queries and of keys: below 2^32, and those of queries may be negative.

    >>> import speedlight as sl
    >>> sl.reference.keep_mask(0.5, 0, b=0, h=0, i=range(2), j=range(4)).tolist()
    [[False, True, True, True], [True, True, False, True]]
    """
    item, head = (check_index(name, x, MOST_POSITIONS) for name, x in (("b", b), ("h", h)))
    rows, keys = (_positions(name, x, least) for name, x, least in (("i", i, -MOST), ("j", j, 0)))
    return kept(dropout_of(dropout), seed_of(seed), item, head, rows, keys)


def _positions(name: str, x: Any, least: int) -> list[int]:
    found = [integer(name, n) for n in listed(x, name, "a sequence of ints")]
    if found and not least <= min(found) <= max(found) < MOST_POSITIONS:
        raise ArgumentError(f"{name}: expected positions from {least} to 2^32 - 1; got {min(found)} to {max(found)}.")
    return found


def merge(out1: Any, lse1: Any, out2: Any = None, lse2: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the exact result of `speedlight.merge` with the same arguments, in float64.

    >>> import numpy as np, speedlight as sl
    >>> out, lse = sl.reference.merge([np.ones((1, 2)), np.zeros((1, 2))], [np.zeros(1), np.zeros(1)])
    >>> out.tolist(), round(float(lse[0]), 6)
    ([[0.5, 0.5]], 0.693147)
    """
    out, seen, share, base, total = _shares(*states_of(out1, lse1, out2, lse2, gpu=False))
    with np.errstate(all="ignore"):
        return np.where(seen, share * out, 0.0).sum(axis=0), base + np.log(total)


def merge_bound(out1: Any, lse1: Any, out2: Any = None, lse2: Any = None) -> Bounds:
    """Bounds how far a result of `speedlight.merge` may be from `merge` with the same arguments, element by element.

    docs/numerics.md has the formula.
    """
    outs, lses = states_of(out1, lse1, out2, lse2, gpu=False)
    dtype, lse_dtype = outs[0].dtype, lses[0].dtype
    out, seen, share, base, total = _shares(outs, lses)
    with np.errstate(all="ignore"):
        log = np.abs(base + np.log(total))
        below = np.where(seen[..., 0] & (share[..., 0] > 0), -np.log(share[..., 0]), 0.0).max(axis=0)
        steps = 2.0**-51 * (len(outs) + 5 + below)
        m, mean = (np.where(seen, share * x, 0.0).sum(axis=0) for x in (np.abs(out), out))
        tiny = TINY[dtype] + len(outs) * 2.0**-1074 + 2.0**-1022 * np.where(seen, np.abs(out), 0.0).sum(axis=0)
        rounded = (ROUNDOFF[x] + (2.0**-24 if x.endswith("16") else 0.0) for x in (dtype, lse_dtype))
        return Bounds(
            next(rounded) * np.abs(mean) + steps[..., None] * m + tiny, next(rounded) * log + steps + TINY[lse_dtype]
        )


def _shares(outs: list[Array], lses: list[Array]) -> tuple[np.ndarray, ...]:
    """[states, …] of outputs, which of them saw anything, and their shares; per row, the largest lse and the sum of
    weights.
    """
    out, lse = (np.stack([x.numpy().astype(np.float64) for x in xs]) for xs in (outs, lses))
    top = np.where(np.isnan(lse), -np.inf, lse).max(axis=0)
    base = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(all="ignore"):
        weight = np.exp(lse - base)
        total = weight.sum(axis=0)
        return out, ~np.isneginf(lse)[..., None], (weight / total)[..., None], base, total
