"""ONNX Runtime's GroupQueryAttention as onnx's reference evaluator calls it, over caches of floats and of codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from onnx.reference.op_run import OpRun

from .. import ArgumentError, append_paged, attention_paged, rotary
from .. import softcap as softcap_score
from ..adapting import Library
from .operators import check_softcap, errors_of, split_heads

GROUPED = Library(
    "ONNX GroupQueryAttention",
    names={
        "q": "query", "k": "key", "v": "value",
        "k_pages": "past_key", "v_pages": "past_value", "k_lengths": "seqlens_k",
        "k_scales": "k_scale", "v_scales": "v_scale", "score": "attention_bias", "sink_logits": "head_sink",
        "cos": "cos_cache", "sin": "sin_cache", "positions": "position_ids",
    },
    ignored=("qk_norm_epsilon",),
    refused={
        "q_norm_weight": "Normalise queries and keys before the node.",
        "k_norm_weight": "Normalise queries and keys before the node.",
        "qk_output": "An array of all products is Attention's qk_matmul_output.",
        "sliding_window_cache": "Give past_key and past_value of all tokens, beside local_window_size.",
    },
)  # fmt: skip
_KINDS = ("NONE", "PER_TENSOR", "PER_CHANNEL")
_CODES = ("int8", "float8_e4m3fn")


class GroupQueryAttention(OpRun):
    """The operator GroupQueryAttention of ONNX Runtime (com.microsoft), with caches of floats, int8 and float8e4m3fn.

    query: (batch, length, num_heads · dim), or with keys and values behind it; key, value: (batch, length,
    kv_num_heads · dim). past_key, past_value: (batch, kv_num_heads, past, dim), whose first seqlens_k + 1 - length
    tokens count. present_key and present_value are copies with the new ones behind those, and as long as past_key or
    total_sequence_length, the longer one. With k_quant_type and v_quant_type PER_TENSOR or PER_CHANNEL they hold codes,
    whose scales are k_scale and v_scale, (1,) or of kv_num_heads · dim entries. New tokens are rounded to the nearest
    code, and read as codes. A first prompt takes past_key and past_value of 0 tokens, whose dtype is the codes'; of
    floats it may leave them out. In a prompt (length = total_sequence_length) padding is at an item's end; its rows are
    0. A query sees local_window_size keys, its own among them.

    Raises:
        speedlight.Error: the input or attribute, what was expected and what came. Never a TypeError, which onnx would
            wrap in another. Codes of four bits are refused.

    Source: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.

    >>> import numpy as np, onnx.helper, speedlight.onnx
    >>> inputs = ["q", "k", "v", "past_k", "past_v", "seqlens", "total", "", "", "", "", "", "k_scale", "v_scale"]
    >>> node = onnx.helper.make_node("GroupQueryAttention", inputs, ["y", "k_now", "v_now"], domain="com.microsoft",
    ...     num_heads=1, kv_num_heads=1, k_quant_type="PER_TENSOR", v_quant_type="PER_TENSOR", kv_cache_bit_width=8)
    >>> x, past = np.ones((1, 1, 8), np.float32), np.zeros((1, 1, 4, 8), np.int8)
    >>> given = [x, x, x, past, past, np.int32([0]), np.int32([4]), *[None] * 5, np.float32([0.5]), np.float32([0.25])]
    >>> y, k, v = speedlight.onnx.run_node(node, given)
    >>> y[0, 0, 0], k[0, 0, :, 0].tolist()
    (np.float32(1.0), [2, 0, 0, 0])
    """

    op_domain = "com.microsoft"

    @errors_of(GROUPED)
    def _run(
        self,
        query: np.ndarray,
        key: np.ndarray | None = None,
        value: np.ndarray | None = None,
        past_key: np.ndarray | None = None,
        past_value: np.ndarray | None = None,
        seqlens_k: np.ndarray | None = None,
        total_sequence_length: np.ndarray | None = None,
        cos_cache: np.ndarray | None = None,
        sin_cache: np.ndarray | None = None,
        position_ids: np.ndarray | None = None,
        attention_bias: np.ndarray | None = None,
        head_sink: np.ndarray | None = None,
        k_scale: np.ndarray | None = None,
        v_scale: np.ndarray | None = None,
        q_norm_weight: np.ndarray | None = None,
        k_norm_weight: np.ndarray | None = None,
        *,
        num_heads: int | None = None,
        kv_num_heads: int | None = None,
        causal: int = 1,
        do_rotary: int = 0,
        k_quant_type: str = "NONE",
        kv_cache_bit_width: int = 0,
        local_window_size: int = -1,
        qk_norm_epsilon: float = 1e-6,
        qk_output: int = 0,
        rotary_interleaved: int = 0,
        scale: float = 0.0,
        sliding_window_cache: int = 0,
        smooth_softmax: int = 0,
        softcap: float = 0.0,
        v_quant_type: str = "NONE",
    ) -> tuple[np.ndarray, ...]:
        GROUPED.refuse(
            q_norm_weight=q_norm_weight,
            k_norm_weight=k_norm_weight,
            qk_output=qk_output or None,
            sliding_window_cache=sliding_window_cache or None,
        )
        q, k, v = _split_inputs(query, key, value, num_heads, kv_num_heads)
        coded = _check_kinds(k_quant_type, v_quant_type, kv_cache_bit_width)
        for name, past in (("past_key", past_key), ("past_value", past_value)):
            _check_past(name, past, k, coded=coded)
        lengths = _lengths_of(q, seqlens_k, total_sequence_length, past_key)
        present = [_present(name, x, new, lengths) for name, x, new in _caches(past_key, past_value, k, v)]
        if do_rotary:
            q, k = (_turned(x, cos_cache, sin_cache, position_ids, lengths, rotary_interleaved != 0) for x in (q, k))
        scales: dict[str, Any] = {}
        if coded:
            kinds = ("k_scale", k_scale, k_quant_type), ("v_scale", v_scale, v_quant_type)
            scales = {f"{n}s": _scales_of(n, x, kind, k) for n, x, kind in kinds}
        k_pages, v_pages = (x.swapaxes(1, 2) for x in present)
        table = np.arange(len(q))[:, None]
        append_paged(k_pages, v_pages, table, lengths.past, k, v, new_lengths=lengths.new, **scales)
        y: Any = attention_paged(
            q,
            k_pages,
            v_pages,
            table,
            lengths.total,
            causal=causal != 0,
            window=_window_of(local_window_size, causal),
            q_lengths=lengths.new,
            scale=scale or None,
            score=_scores_of(softcap, attention_bias, lengths) or None,
            sink_logits=_sinks_of(head_sink, smooth_softmax, q.shape[1]),
            **scales,
        )
        y = np.ascontiguousarray(y.swapaxes(1, 2)).reshape(*query.shape[:2], q.shape[1] * q.shape[3])
        return (y, *present)[: max(len(self.output), 1)]


class _Lengths(NamedTuple):
    """Tokens of each item: before, new, and both; of the longest, as the node says."""

    past: list[int]
    new: list[int]
    total: list[int]
    most: int


def _split_inputs(
    query: np.ndarray, key: np.ndarray | None, value: np.ndarray | None, heads: int | None, kv_heads: int | None
) -> list[np.ndarray]:
    """Returns views of q, k and v as (batch, heads, length, dim), which may have come packed in one."""
    for name, n in (("num_heads", heads), ("kv_num_heads", kv_heads)):
        if n is None or n < 1:
            raise ArgumentError(f"{name}: expected a number of heads; got {n}.")
    assert heads is not None and kv_heads is not None
    if query.ndim != 3:
        raise ArgumentError(f"query: expected (batch, length, num_heads · dim); got shape {query.shape}.")
    if (key is None) != (value is None):
        raise ArgumentError("value: expected key and value together, or none of them beside packed ones; got one.")
    if key is None or value is None:
        every = heads + 2 * kv_heads
        if query.shape[2] % every:
            raise ArgumentError(
                f"query: expected a multiple of {every} columns, those of {heads} heads and of {kv_heads} of keys and "
                f"of values; got shape {query.shape}."
            )
        dim = query.shape[2] // every
        query, key, value = np.split(query, [heads * dim, (heads + kv_heads) * dim], axis=2)
    q = split_heads("query", query, "num_heads", heads)
    k, v = (split_heads(n, x, "kv_num_heads", kv_heads) for n, x in (("key", key), ("value", value)))
    for name, x in (("key", k), ("value", v)):
        if (x.shape[0], *x.shape[2:]) != (q.shape[0], *q.shape[2:]):
            wanted = (q.shape[0], q.shape[2], kv_heads * q.shape[3])
            raise ArgumentError(f"{name}: expected shape {wanted}, as query has; got {x.shape} by heads.")
    return [q, k, v]


def _check_kinds(k_kind: str, v_kind: str, bits: int) -> bool:
    """Returns whether caches hold codes."""
    for name, kind in (("k_quant_type", k_kind), ("v_quant_type", v_kind)):
        if kind not in _KINDS:
            raise ArgumentError(f"{name}: expected NONE, PER_TENSOR or PER_CHANNEL; got {kind}.")
    coded = k_kind != "NONE"
    if coded != (v_kind != "NONE"):
        raise ArgumentError(f"v_quant_type: expected codes of both keys and values, or of none; got {v_kind}.")
    if bits not in ((8,) if coded else (0,)):
        way = " Codes of four bits are not offered." if bits == 4 else ""
        if not coded and bits == 8:
            way = " Of codes write k_quant_type and v_quant_type, too."
        raise ArgumentError(f"kv_cache_bit_width: expected {8 if coded else 0} beside {k_kind}; got {bits}.{way}")
    return coded


def _check_past(name: str, past: np.ndarray | None, k: np.ndarray, *, coded: bool) -> None:
    """Raises unless a past is of codes where the attributes say so, and of floats elsewhere."""
    wanted = f"{' or '.join(_CODES)} beside k_quant_type"
    if not coded:
        if past is not None and past.itemsize == 1:
            kind = "k_quant_type" if name == "past_key" else "v_quant_type"
            raise ArgumentError(
                f"{kind}: expected PER_TENSOR or PER_CHANNEL beside {name} of {past.dtype.name}; got NONE."
            )
    elif past is None:
        empty = (k.shape[0], k.shape[1], 0, k.shape[3])
        raise ArgumentError(
            f"{name}: expected {wanted}, since only its dtype says what the present one is; got None. In a first "
            f"prompt give one without tokens: numpy.zeros({empty}, 'int8')."
        )
    elif past.dtype.name not in _CODES:
        raise ArgumentError(f"{name}: expected {wanted}, which the operator has; got {past.dtype.name}.")


def _lengths_of(q: np.ndarray, seqlens_k: Any, total: Any, past_key: np.ndarray | None) -> _Lengths:
    """Returns the tokens of each item: in a prompt, of as many tokens as there are queries, none is before."""
    batch, length = q.shape[0], q.shape[2]
    seqlens = np.asarray(seqlens_k)
    if seqlens_k is None or seqlens.size != batch or seqlens.dtype.kind not in "iu":
        got = "None" if seqlens_k is None else f"{seqlens.dtype} of shape {seqlens.shape}"
        raise ArgumentError(f"seqlens_k: expected {batch} ints, the tokens of each item less one; got {got}.")
    if total is None or np.size(total) != 1 or np.asarray(total).dtype.kind not in "iu":
        raise ArgumentError("total_sequence_length: expected one int, the tokens of the longest item.")
    most, totals = int(np.asarray(total).item()), [int(n) + 1 for n in seqlens.ravel()]
    is_prompt = most == length
    least = 0 if is_prompt else length
    if not all([least <= n <= most for n in totals]):
        raise ArgumentError(
            f"seqlens_k: expected {least - 1} to {most - 1}, by query and total_sequence_length={most}; got "
            f"{[n - 1 for n in totals]}."
        )
    past = [0 if is_prompt else n - length for n in totals]
    room = 0 if past_key is None or past_key.ndim != 4 else past_key.shape[2]
    if max(past, default=0) > room:
        raise ArgumentError(f"past_key: expected {max(past)} tokens at least, by seqlens_k; got {room}.")
    return _Lengths(past, [n - before for n, before in zip(totals, past, strict=True)], totals, most)


def _caches(past_key: Any, past_value: Any, k: np.ndarray, v: np.ndarray) -> list[tuple[str, Any, np.ndarray]]:
    """Returns what each cache is called, the past and what is new."""
    if (past_key is None) != (past_value is None):
        raise ArgumentError("past_value: expected past_key and past_value together; got one of them.")
    return [("past_key", past_key, k), ("past_value", past_value, v)]


def _present(name: str, past: np.ndarray | None, new: np.ndarray, lengths: _Lengths) -> np.ndarray:
    """Returns a copy of a past with room for what is new."""
    batch, heads, _, dim = new.shape
    if past is None:
        return np.zeros((batch, heads, lengths.most, dim), new.dtype)
    if past.ndim != 4 or (past.shape[0], past.shape[1], past.shape[3]) != (batch, heads, dim):
        raise ArgumentError(f"{name}: expected shape ({batch}, {heads}, past, {dim}); got {past.shape}.")
    present = np.zeros((batch, heads, max(lengths.most, past.shape[2]), dim), past.dtype)
    present[:, :, : past.shape[2]] = past
    return present


def _turned(
    x: np.ndarray, cos: Any, sin: Any, position_ids: Any, lengths: _Lengths, is_interleaved: bool
) -> np.ndarray:
    """Returns queries or keys with rotary positions: by default those behind the past."""
    if cos is None or sin is None:
        raise ArgumentError("cos_cache: expected cos_cache and sin_cache beside do_rotary; got none.")
    positions = position_ids
    if position_ids is None or np.shape(position_ids) != (x.shape[0], x.shape[2]):
        positions = np.array(lengths.past, np.int64)[:, None] + np.arange(x.shape[2])
        positions = np.minimum(positions, len(cos) - 1)  # those of padding mean nothing
    dims = 2 * cos.shape[-1]
    return rotary(x, cos, sin, positions=positions, interleaved=is_interleaved, dims=dims, layout="bhld")


def _scales_of(name: str, scale: np.ndarray | None, kind: str, k: np.ndarray) -> np.ndarray:
    """Returns a scale for all, or (kv_heads, dim) for channels; a read-only view."""
    heads, dim = k.shape[1], k.shape[3]
    count = 1 if kind == "PER_TENSOR" else heads * dim
    if scale is None or scale.size != count:
        got = "None" if scale is None else f"shape {scale.shape}"
        raise ArgumentError(f"{name}: expected {count} of float32 beside {kind}; got {got}.")
    return scale.reshape(() if kind == "PER_TENSOR" else (heads, dim))


def _window_of(size: int, causal: int) -> tuple[int | None, int | None] | None:
    if size == -1:
        return None
    if size < 1 or not causal:
        raise ArgumentError(
            f"local_window_size: expected -1, which is no limit, or 1 or more beside causal; got {size}."
        )
    return size - 1, None


def _scores_of(softcap: float, bias: np.ndarray | None, lengths: _Lengths) -> list[Any]:
    cap = check_softcap(softcap)
    found: list[Any] = [] if cap is None else [softcap_score(cap)]
    if bias is not None:
        if bias.ndim != 4 or bias.shape[3] != lengths.most:
            raise ArgumentError(
                f"attention_bias: expected shape (batch or 1, num_heads or 1, length, {lengths.most}); got "
                f"{bias.shape}."
            )
        found.append(bias[..., : max(lengths.total)].astype(np.float32, copy=False))
    return found


def _sinks_of(head_sink: np.ndarray | None, smooth: int, heads: int) -> Any:
    """Returns what joins the denominator: a logit of each head, or e⁰ for all."""
    if head_sink is not None:
        return head_sink
    return [0.0] * heads if smooth > 0 else None
