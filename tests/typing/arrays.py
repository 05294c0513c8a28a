# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What type checkers know of calls on NumPy's arrays. Checked by pyright, never run; an error that is expected and does
not come is one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from typing_extensions import assert_type

import speedlight as sl

Matrix = np.ndarray[tuple[Any, ...], np.dtype[np.float32]]

q = k = v = np.ones((1, 8, 64, 32), np.float32)
packed = np.ones((64, 8, 32), np.float32)
untyped: Any = q
flag = bool(q.any())

out = sl.attention(q, k, v, causal=True)
assert_type(out, Matrix)
out, lse = sl.attention(q, k, v, return_lse=True, layout="bhld", engine="cpu", precision="ieee")
assert_type(out, Matrix)
batch, heads, rows = lse.shape
assert_type(sl.attention(q, k, v, return_lse=False), Matrix)
assert_type(sl.attention(q, k, v, return_lse=flag), Matrix | tuple[Matrix, Matrix])
assert_type(sl.attention(untyped, untyped, untyped), Any)
assert_type(sl.attention(untyped, untyped, untyped, return_lse=True), tuple[Any, Any])
sl.attention(q, k, v, causal="top-left", window=(64, None), q_start=np.int64(0), k_lengths=[60], seed=None, out=out)
sl.attention(q, k, v, q_lengths=np.array([60]), k_lengths=(60,), sink_logits=[0.0] * 8, scale=0.1)

assert_type(sl.attention_backward(q, k, v, out, lse, out), tuple[Matrix, Matrix, Matrix])
sl.key_weights(q, (k, k), lse, rows=[0, -1], causal=True, window=(8, 0)).sum()
sl.key_weights(q, k, lse, reduce="mean")  # pyright: ignore[reportArgumentType]
slopes = sl.table(np.ones(8, np.float32))
dq, dk, dv, (d_slopes,) = sl.attention_backward(q, k, v, out, lse, out, score=sl.alibi(slopes), grads=(slopes,))
sl.attention_backward(q, k, v, out, lse, out, sink_logits=[0.0] * 8, grads=("sink_logits", slopes))

assert_type(sl.attention(q, (k, k), None, causal=True), Matrix)
assert_type(sl.attention(q, k, None, value_dim=16, return_lse=True), tuple[Matrix, Matrix])
of_pair, of_latent, nothing = sl.attention_backward(q, (k, k), None, out, lse, out, value_dim=16)

pages = np.ones((5, 16, 8, 32), np.float32)
assert_type(sl.attention_paged(q, (pages, pages), None, [[4]], [5], value_dim=16), Matrix)
assert_type(sl.attention_paged(q, pages, pages, [[4, 0], [2, -1]], [5, 3]), Matrix)
assert_type(sl.attention_paged(q, pages, pages, np.array([[4]]), [5], return_lse=True), tuple[Matrix, Matrix])
assert_type(sl.attention_paged(q, pages, pages, [[4]], [5], k_scales=0.5, v_scales=pages), Matrix)
assert_type(sl.merge([out, out], [lse, lse]), tuple[Matrix, Matrix])
assert_type(sl.merge(out, lse, out, lse), tuple[Matrix, Matrix])
assert_type(sl.merge_states(out, lse, base2=True), tuple[Matrix, Matrix])
assert_type(sl.merge_states([out, out], [lse, lse]), tuple[Matrix, Matrix])
assert_type(sl.rotary(q, positions=[0, 1, 2], layout="blhd"), Matrix)
assert_type(sl.plan(q, k, v, causal=True), sl.Plan)
assert_type(sl.plan(q_heads=8, q_len=64, head_dim=32, dtype="bfloat16").flops, int | None)

cache = sl.KVCache(layers=1, kv_heads=8, head_dim=32, capacity=64, dtype=np.float32)
assert_type(cache, sl.KVCache)
sl.KVCache(layers=1, kv_heads=1, head_dim=32, value_dim=24, capacity=64, latent=True).append(0, k)
sl.KVCache(layers=1, kv_heads=1, head_dim=32, capacity=64, latent="keys")  # pyright: ignore[reportArgumentType]
assert_type(cache.attend(0, q, k, v), Matrix)
assert_type(cache.attend(0, q, return_lse=True, mask=sl.causal()), tuple[Matrix, Matrix])
pool = sl.PagePool(layers=1, pages=300, page_size=16, kv_heads=8, head_dim=64, dtype="int8")
sequence = pool.sequence()
assert_type(sequence, sl.PagedSequence)
assert_type(sequence.fork(), sl.PagedSequence)
prompted = pool.sequence(tokens=[1, 2, 3], extra=("tenant", 1))
assert_type(pool.attend(0, [prompted], packed, packed, packed, tokens=range(8)), Matrix)
assert_type(prompted.tokens, list[int])
assert_type(pool.statistics(), dict[str, int])
assert_type(pool.attend(0, [sequence], packed, packed, packed, new_lengths=[8]), Matrix)
assert_type(pool.attend(0, (sequence,), packed, return_lse=True), tuple[Matrix, Matrix])

options: sl.AttentionOptions = {"causal": True, "score": lambda s, b, h, i, j: s - slopes[h] * (i - j), "dropout": 0.1}
assert_type(sl.attention(q, k, v, **options), Matrix)
sl.attention_backward(q, k, v, out, lse, out, **options, grads=(slopes,))
sl.plan(q, k, v, **options)

sl.attention([[1.0]], k, v)  # pyright: ignore[reportArgumentType]
sl.attention(q, None, v)  # pyright: ignore[reportArgumentType]
sl.attention(q, (k, k, k), v)  # pyright: ignore[reportArgumentType]
sl.attention(q, k)  # pyright: ignore[reportCallIssue]
sl.attention(q, k, v, is_causal=True)  # pyright: ignore[reportCallIssue]
sl.attention(q, k, v, causal="left")  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, layout="bhdl")  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, engine="gpu")  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, precision="tf32x2")  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, k_lengths=60)  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, mask="causal")  # pyright: ignore[reportArgumentType]
sl.attention(q, k, v, return_lse=True).squeeze()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
sl.attention_backward(q, k, v, out, lse, out, grads=("sinks",))  # pyright: ignore[reportArgumentType, reportCallIssue]
sl.KVCache(1, 1, 8, 32)  # pyright: ignore[reportCallIssue]
sl.KVCache(layers=1, kv_heads=8, head_dim=32, capacity=64, dtype="int2")  # pyright: ignore[reportArgumentType]
sl.atention(q, k, v)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
