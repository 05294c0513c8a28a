"""What newcomers write, and what they are told: a table, which docs/mistakes.md shows. Nothing here is compiled.

`python tests/docs/test_mistakes.py` writes the page.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import speedlight as sl
import speedlight.distributed
import speedlight.flash_attn
import speedlight.jax
import speedlight.torch
from speedlight.errors import advice as hints
from speedlight.errors import other_names
from speedlight.flash_attn import v3
from speedlight.problem.options import SAME_CAUSAL, SAME_LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "mistakes.md"

# --- what rows speak of
q = k = v = np.ones((2, 4, 6, 8), np.float32)  # (batch, heads, length, head_dim)
attention_mask = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])  # a tokenizer's: 1 where there is a token
slopes = np.ones(8, np.float32)
square = np.tri(6)
tensor = torch.ones(2, 4, 6, 8)
pages = np.ones((4, 16, 4, 8), np.float32)
new = np.ones((2, 4, 8), np.float32)
attention = functools.partial(sl.attention, q, k, v)
cache = sl.KVCache(layers=1, batch=2, kv_heads=4, head_dim=8, capacity=64)
narrow = sl.KVCache(layers=1, batch=2, kv_heads=4, head_dim=8, capacity=64, dtype="bfloat16")
embedding = torch.nn.Embedding(11, 4)
by_weight = sl.expression(lambda s, b, h, i, j: s + embedding.weight[i, h])
pool = sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=4, head_dim=8)
kept, table = torch.ones(2, 4, 16, 6, 8), torch.tensor([[0], [9]])
sdpa = speedlight.torch.scaled_dot_product_attention
flex, of_jax = speedlight.torch.flex_attention, speedlight.jax.dot_product_attention
flash = speedlight.flash_attn.flash_attn_func
layer, x = speedlight.torch.Attention(32, 4), torch.ones(2, 6, 32)
token, tokens = np.ones((2, 1, 4, 8), np.float32), np.ones((2, 9, 4, 8), np.float32)  # 'blhd'
gain = torch.nn.Parameter(torch.tensor(0.5))
edges, linear = torch.arange(4), torch.nn.Linear(1, 1)
# --- of errors
VALUE, TYPE, EXPRESSION, PLAIN = sl.ArgumentError, sl.ArgumentTypeError, sl.ExpressionError, TypeError

# Of each section: (what is written, the error, words of it)
MISTAKES = {
    "Other libraries' arguments": [
        ("sl.attention(q, k, v, is_causal=True)", TYPE, "causal=True", "causal='top-left'"),
        ("sl.attention(q, k, v, attn_mask=square)", TYPE, "mask= of bool", "score= of floats"),
        ("sl.attention(q, k, v, square)", TYPE, "q, k, v by place", "Write mask=…"),
        ("sl.attention(q, k, v, attention_mask=attention_mask)", TYPE, "mask=sl.padding(attention_mask)"),
        ("sl.attention(q, k, v, key_padding_mask=attention_mask)", TYPE, "mask=sl.padding(~key_padding_mask)"),
        ("sl.attention(q, k, v, dropout_p=0.1)", TYPE, "dropout= and seed="),
        ("sl.attention(q, k, v, p=0.1)", TYPE, "dropout= and seed="),
        ("sl.attention(q, k, v, num_heads=4)", TYPE, "Leave it out: heads are a dimension", "layout='blhd'"),
        ("sl.attention(q, k, v, num_kv_heads=4)", TYPE, "Leave it out: heads are a dimension"),
        ("sl.attention(q, k, v, past_key_values=None)", TYPE, "cache.attend(layer, q, k, v)"),
        ("sl.attention(q, k, v, is_training=False)", TYPE, "Leave it out: dropout=0.0"),
        ("sl.attention(q, k, v, enable_gqa=True)", TYPE, "Leave it out: fewer heads of k and v"),
        ("sl.attention(q, k, v, softmax_scale=0.1)", TYPE, "scale="),
        ("sl.attention(q, k, v, sm_scale=0.1)", TYPE, "scale="),
        ("sl.attention(q, k, v, softcap=30.0)", TYPE, "score=sl.softcap(30.0)"),
        ("sl.attention(q, k, v, window_size=(128, 0))", TYPE, "window=(left, right)", "None is no limit"),
        ("sl.attention(q, k, v, sliding_window=128)", TYPE, "window=(n - 1, None) beside causal=True"),
        ("sl.attention(q, k, v, alibi_slopes=slopes)", TYPE, "score=sl.alibi(slopes)"),
        ("sl.attention(q, k, v, score_mod=lambda s, b, h, i, j: s)", TYPE, "score=", "q_start=0"),
        ("sl.attention(q, k, v, mask_mod=lambda b, h, i, j: j <= i)", TYPE, "mask=", "q_start=0"),
        ("sl.attention(q, k, v, cu_seqlens=[0, 6])", TYPE, "cu_seqlens_q=", "layout='lhd'"),
        ("sl.attention(q, k, v, qo_indptr=[0, 6], kv_indptr=[0, 6])", TYPE, "cu_seqlens_q=", "layout='lhd'"),
        ("sl.attention(q, k, v, kv_indptr=[0, 6])", TYPE, "cu_seqlens_k=", "layout='lhd'"),
        ("sl.attention(q, k, v, seqlens_k=[6, 3])", TYPE, "k_lengths=, one for each item"),
        ("sl.attention(q, k, v, nonpad_kv_seqlen=[6, 3])", TYPE, "k_lengths=, one for each item"),
        ("sl.attention(q, k, v, left_window_size=4)", TYPE, "window=(left, None) beside causal=True"),
        ("sl.attention(q, k, v, seqlens=[6, 3])", TYPE, "lengths= for queries and keys alike"),
        ("sl.attention(q, k, v, tensor_layout='HND')", TYPE, "layout='bhld'"),
        ("sl.attention(q, k, v, page_table=[[0]])", TYPE, "attention_paged("),
        ("sl.attention(q, k, v, need_weights=True)", TYPE, "sl.reference.weights(q, k)"),
        ("sl.attention(query=q, key=k, value=v)", TYPE, "q="),
        ("sl.attention_backward(q, k, v, q, q, q, sm_scale=0.1)", TYPE, "scale="),
        ("sl.attention_paged(q, pages, pages, page_table=[[0]], seq_lens=[5])", TYPE, "block_table="),
        (
            "sl.attention_paged(new, pages, pages, [[0], [1]], [5, 5], layout='lhd', query_start_loc=[0, 1, 2])",
            TYPE,
            "cu_seqlens_q=",
        ),
        ("sl.attention(q, k, v, num_threads=2)", TYPE, "sl.set_threads(n)"),
        (
            "sl.append_paged(pages, pages, [[0], [1]], [0, 0], k, v, slot_mapping=[0])",
            TYPE,
            "block_table= and k_lengths=",
        ),
        ("sl.append_paged(k_cache=pages, v_cache=pages, page_table=[[0]])", TYPE, "k_pages="),
        ("sl.append_paged(pages, pages, [[0]], [0], k, v, append_indptr=[0, 6])", TYPE, "new_lengths="),
        ("sl.plan(seq_len=4096, num_heads=32, head_dim=128)", TYPE, "q_len= (and k_len=)"),
        ("sl.rotary(q, position_ids=[0, 1, 2, 3, 4, 5])", TYPE, "positions="),
        ("sl.rotary(q, rope_theta=5e5)", TYPE, "base="),
        ("sl.rotary(q, is_neox_style=False)", TYPE, "interleaved=, the other way round"),
        ("sl.rotary(q, k, q, k)", TYPE, "x, cos, sin by place", "Write positions=…"),
        ("sl.reference.attention(q, k, v, softmax_scale=0.1)", TYPE, "reference.attention()", "scale="),
        ("sl.reference.weights(q, k, casual=True)", PLAIN, "reference.weights() got", "mean 'causal'?"),
        ("sl.merge(v_a=q, s_a=q)", TYPE, "merge(out1, lse1, out2, lse2)"),
        ("sl.KVCache(layers=1, kv_heads=4, head_dim=8, max_model_len=64)", TYPE, "capacity="),
        ("sl.KVCache(1, 2, 4, 8, 64)", TYPE, "by name", "layers=…"),
        ("sl.PagePool(num_gpu_blocks=4, num_layers=1, block_size=16)", TYPE, "pages="),
        ("sl.PagePool(layers=1, pages=4, page_size=16, kv_heads=4, head_dim=8, window=4)", TYPE, "KVCache(window=n)"),
        ("cache.attend(0, q, k, v, causal=True)", TYPE, "Leave it out: a query sees the tokens up to its own"),
        (
            "cache.attend(0, q, k, v, layout='blhd')",
            TYPE,
            "caches take (batch, heads, length, dim)",
            "q.swapaxes(1, 2)",
        ),
        ("cache.attend(0, q, k, v, lengths=[6, 3])", TYPE, "got an argument of attention()", "new_lengths="),
        ("cache.attend(0, q, k, v, window=(5, 0))", TYPE, "got an argument of attention()", "KVCache(window=n)"),
        ("cache.attend(0, q, k, v, input_pos=0)", TYPE, "the cache knows its lengths"),
        ("pool.attend(0, [pool.sequence()], new, new, new, cu_seqlens_q=[0, 2])", TYPE, "new_lengths="),
        ("speedlight.torch.attention(tensor, tensor, tensor, is_causal=True)", TYPE, "scaled_dot_product_attention()"),
        ("speedlight.torch.Attention(embed_dim=32, num_heads=4)", TYPE, "dim="),
        ("speedlight.torch.Attention(32, num_attention_heads=4)", TYPE, "heads="),
        ("speedlight.torch.Attention(32, 4, num_key_value_heads=2)", TYPE, "kv_heads="),
        ("speedlight.torch.Attention(32, 4, rope_theta=5e5)", TYPE, "rotary=, the base of angles"),
        ("speedlight.torch.Attention(32, 4, 2)", TYPE, "dim, heads by place", "Write kv_heads=…"),
        ("layer(x, x, x)", TYPE, "x, context by place", "Write mask=…"),
        ("layer(x, key=x, value=x)", TYPE, "context=, what keys and values are both made of"),
        ("layer(x, key_padding_mask=x)", TYPE, "attention_mask=~key_padding_mask"),
        ("layer(x, attn_mask=square)", TYPE, "mask= of bool, True where a key is seen"),
        ("layer(x, is_causal=True)", TYPE, "Leave it out: Attention(causal=True) says it"),
        ("layer(hidden_states=x)", TYPE, "Use x="),
        ("layer(x, past_key_values=None)", TYPE, "cache=, a speedlight.KVCache"),
        ("layer(x, position_embeddings=(x, x))", TYPE, "rotation=(cos, sin)"),
        ("layer(x, attentoin_mask=None)", PLAIN, "unexpected keyword", "mean 'attention_mask'?"),
        ("sdpa(tensor, tensor, tensor, causal=True)", TYPE, "an argument of attention()", "Use is_causal=True"),
        ("sdpa(tensor, tensor, tensor, softmax_scale=0.1)", TYPE, "Use scale="),
        ("sl.attention(q, k, v, casual=True)", PLAIN, "unexpected keyword argument 'casual'", "mean 'causal'?"),
        ("cache.attend(0, q, k, v, retrun_lse=True)", PLAIN, "unexpected keyword", "mean 'return_lse'?"),
        ("sl.attention(q, k, v, position_ids=None)", TYPE, "sl.rotary(q) turns q and k before"),
        ("sl.attention(q, k, v, segment_ids=[0, 0])", TYPE, "mask=sl.documents(ids)"),
        ("sl.attention(q, k, v, dtype='float32')", TYPE, "convert q, k and v"),
        ("sl.attention(q, k, v, block_q=64)", TYPE, "how work is divided is the engine's own"),
        ("sl.attention(q, k, v, xyz=1)", PLAIN, "It takes q, k, v, causal, window"),
        ("sl.attention_backward(q, k, v, q, q, q, grad_outputs=q)", TYPE, "d_out="),
        ("sl.attention_paged(q, pages, pages, [[0]], [5], page_size=16)", TYPE, "the second dimension of k_pages"),
        ("sl.merge(outs=[q], lses=[q])", TYPE, "merge([out1, …], [lse1, …])"),
        ("sl.KVCache(layers=1, kv_heads=4, head_dim=8, capacity=64, nbits=8)", TYPE, "dtype='int8', 'fp8' or 'int4'"),
        ("sl.PagePool(layers=1, kv_heads=4, head_dim=8, gpu_memory_utilization=0.9)", TYPE, "Use pages="),
        ("sl.plan(q_heads=4, q_len=6, head_dim=8, num_layers=2)", TYPE, "a plan is of one layer"),
        ("sl.rotary(q, rope_type='llama3')", TYPE, "cos= and sin= of its angles"),
        ("sl.scaled_dot_product_attention", AttributeError, "speedlight.torch has scaled_dot_product_attention()"),
        ("sl.flash_attn_func", AttributeError, "speedlight.flash_attn has flash_attn_func()"),
        ("sl.set_num_threads", AttributeError, "use set_threads()"),
        ("sl.paged_attention", AttributeError, "use attention_paged()"),
    ],
    "Our arguments, and others', in another library's call": [
        ("sdpa(tensor, tensor, tensor, mask=square)", TYPE, "an argument of attention()", "Use attn_mask="),
        ("sdpa(tensor, tensor, tensor, window_size=(3, 0))", TYPE, "it is an option of speedlight.attention()"),
        ("sdpa(tensor, tensor, tensor, scale=gain)", TYPE, "multiplies query, beside scale=1.0"),
        ("sdpa(q, k, v)", TYPE, "query: expected a tensor; got ndarray", "torch.as_tensor()"),
        ("flex(tensor, tensor, tensor, is_causal=True)", TYPE, "block_mask=create_block_mask("),
        ("flex(tensor, tensor, tensor, softcap=30.0)", TYPE, "score_mod=lambda s, b, h, i, j: c * torch.tanh(s / c)"),
        (
            "flex(tensor, tensor, tensor, block_mask=tensor > 0)",
            TYPE,
            "create_block_mask(lambda b, h, i, j: tensor[i, j]",
        ),
        ("flex(tensor[0], tensor[0], tensor[0])", sl.UnsupportedError, "Of one item it is query[None]"),
        ("flash(tensor, tensor, tensor, is_causal=True)", TYPE, "Use causal=True"),
        ("flash(tensor, tensor, tensor, scale=0.1)", TYPE, "Use softmax_scale="),
        ("flash(tensor, tensor, tensor, softmax_scale=gain)", TYPE, "beside softmax_scale=1.0"),
        ("flash(tensor, tensor, tensor, window_size=4)", TYPE, "(left, right), as (127, 0)"),
        ("flash(tensor, tensor, tensor, cu_seqlens_q=None)", TYPE, "flash_attn_varlen_func()'s"),
        (
            "v3.flash_attn_func(tensor, tensor, tensor, dropout_p=0.1)",
            TYPE,
            "it is an option of speedlight.attention()",
        ),
        ("of_jax(q, k, v, causal=True)", TYPE, "Use is_causal=True"),
        ("of_jax(q, k, v, attn_mask=None)", TYPE, "Use mask=, of bool"),
        ("of_jax(q, k, v, window=(3, 0))", TYPE, "local_window_size=(left, right)"),
        ("of_jax(q, k, v, softcap=30.0)", TYPE, "sl.softcap(30.0) is a score of speedlight.attention()"),
        ("of_jax(q, k, v, None, None, True)", TYPE, "query, key, value, bias, mask by place", "Write scale=…"),
        ("of_jax(q, q[:, :, :4], q[:, :, :4])", VALUE, "heads that divide query's 6", "(batch, length, heads, dim)"),
        ("of_jax(q, k, v, mask=np.ones((6, 6)))", TYPE, "mask.astype(bool)"),
        ("of_jax(q, k, v, local_window_size=-1)", VALUE, "Without a limit leave it out"),
    ],
    "Layouts and shapes": [
        ("attention(layout='sbhd')", VALUE, "q.swapaxes(0, 1) is 'blhd'"),
        ("attention(layout='bld')", VALUE, "split the last dimension into heads"),
        ("sl.attention(np.ones((2, 512, 8, 64)), *np.ones((2, 2, 77, 8, 64)))", VALUE, "give layout='blhd'"),
        ("sl.attention(q[0, 0], k[0, 0], v[0, 0])", VALUE, "4 dimensions (batch, heads, length, head_dim)"),
        ("sl.attention(q[:, 0], k[:, 0], v[:, 0])", VALUE, "(batch, length, head_dim) of one head is q[:, None]"),
        ("sl.attention(q.tolist(), k, v)", TYPE, "numpy.asarray(q, dtype='float32')"),
        ("sl.attention(q, tensor, tensor)", TYPE, "the same kind of array as q"),
        ("sl.attention(q, k.astype('float64'), v)", TYPE, "dtype float32, as q has", "Convert one of them"),
        ("sl.attention(q.astype(int), k, v)", TYPE, "dtype float32, float64, float16 or bfloat16"),
        ("jax.jit(sl.attention)(q, k, v)", sl.UnsupportedError, "speedlight.jax"),
        ("sl.attention(token, tokens, tokens)", VALUE, "of 4 and 4 heads, give layout='blhd'"),
        ("cache.attend(0, token, token, token)", VALUE, "Heads come before tokens: k.swapaxes(1, 2)"),
        ("cache.attend(0, token)", VALUE, "of 4 heads, give q.swapaxes(1, 2)"),
        ("sl.attention(q, k[:, :3], v[:, :3])", VALUE, "divides q's 4 heads", "repeat heads of k and v"),
        ("sl.attention(q[:, :2, :5], k, v)", VALUE, "divides q's 2 heads", "in each other's place"),
        ("sl.attention(q, k[..., :4], v)", VALUE, "head_dim 8, as q has", "Fill q or k up with zeros, beside scale="),
        ("sl.attention(q, np.ones((2, 4, 8, 6), np.float32), v)", VALUE, "transposed, give k.swapaxes(-1, -2)"),
        ("sdpa(tensor, tensor[..., :4], tensor)", VALUE, "Fill query or key up with zeros"),
        (
            "pool.attend(0, [pool.sequence()], q, k, v)",
            VALUE,
            "q.swapaxes(1, 2).reshape(-1, 4, 8)",
            "new_lengths=[6] * 2",
        ),
        ("pool.append(0, [pool.sequence()], k, v)", VALUE, "k.swapaxes(1, 2).reshape(-1, 4, 8)"),
        ("pool.attend(0, [pool.sequence()], new[:, 0], new, new)", VALUE, "Of one head it is q[:, None]"),
        ("cache.attend(0, q[0], k[0], v[0])", VALUE, "Of one sequence it is k[None]"),
        ("cache.attend(0, q[:1], k[:1, :2], v[:1])", VALUE, "Make it with batch=1 and kv_heads=2"),
        ("cache.attend(q, k, v)", TYPE, "layer: expected an int; got ndarray", "before the arrays"),
        ("layer(x[0])", VALUE, "(batch, length, 32)", "x[None]"),
        ("layer(x.numpy())", TYPE, "torch.as_tensor()"),
    ],
    "Padding and lengths": [
        ("attention(causal=True, k_lengths=[6, 3])", VALUE, "lengths= in its place", "q_start=0"),
        ("attention(k_lengths=60)", TYPE, "One for each of the items", "[60] * 2"),
        ("attention(k_lengths=attention_mask)", TYPE, "mask=sl.padding(attention_mask)"),
        ("attention(lengths=[6])", VALUE, "2 lengths, one per batch item"),
        ("attention(lengths=[9, 3])", VALUE, "the length of q", "k_lengths= is of keys alone, q_lengths= of queries"),
        ("attention(lengths=[6, 3], k_lengths=[6, 3])", VALUE, "None beside k_lengths="),
        ("sl.attention(q[0], k[0], v[0], layout='hld', lengths=[6, 3])", VALUE, "'hld' is of one item", "q[:, None]"),
        ("attention(mask=attention_mask)", VALUE, "mask=sl.padding(attention_mask)"),
        ("attention(mask=attention_mask == 1)", VALUE, "mask[:, None, None, :]", "sl.padding(attention_mask)"),
        ("attention(mask=attention_mask[:, None, None])", TYPE, "mask.astype(bool)", "sl.padding(mask)"),
        ("sl.padding(attention_mask[:, None, None])", VALUE, "2 dimensions, (batch, k_len)"),
        ("sl.padding((1.0 - attention_mask) * -1e9)", TYPE, "score=[array]"),
        ("sdpa(tensor, tensor, tensor, torch.ones(2, 6).bool())", VALUE, "attn_mask[:, None, None, :]"),
        ("sl.padding([6, 3])", VALUE, "Of one sequence write [attention_mask]; lengths are lengths="),
        ("attention(lengths=[6.0, 3.0])", TYPE, "got float. Write 6."),
        ("sl.attention(q[:, :, 3:], k, v, mask=np.ones((6, 6), bool))", VALUE, "mask[..., -3:, :]"),
    ],
    "Masks, windows and scores": [
        ("attention(mask=sl.causal)", EXPRESSION, "Call it: sl.causal()"),
        ("attention(mask=sl.window)", EXPRESSION, "Call it: sl.window(…)"),
        ("attention(mask=True)", TYPE, "Causality is causal=True"),
        ("attention(mask=square)", TYPE, "a bool array, True where a key is seen", "score=[array]"),
        ("attention(mask=np.ones((2, 6, 6), bool))", VALUE, "mask[:, None]"),
        ("attention(mask=lambda i, j: j <= i)", EXPRESSION, "the arguments (b, h, i, j) of a mask"),
        ("attention(mask=lambda b, h, i, j: j <= i and i - j < 4)", EXPRESSION, "& | ~", "sl.where"),
        ("attention(mask=lambda b, h, i, j: 0 <= i - j < 4)", EXPRESSION, "chains", "(0 <= x) & (x < 4)"),
        ("attention(mask=lambda b, h, i, j: i >= j & j > 2)", EXPRESSION, "Put parentheses around each comparison"),
        ("attention(mask=lambda b, h, i, j: (i >= j) & j > 2)", EXPRESSION, "bind tighter", "(i >= j) & (j > 2)"),
        ("attention(mask=lambda b, h, i, j: i >= j | (j == 2))", EXPRESSION, "bind tighter", "(i >= j) & (j > 2)"),
        ("attention(mask=lambda b, h, i, j: j in (0, 1))", EXPRESSION, "not, in, max", "& | ~"),
        ("attention(mask=lambda b, h, i, j: (j > 2) & sl.causal())", EXPRESSION, "a pattern", "sl.causal() & (lambda"),
        ("attention(mask=lambda b, h, i, j: sl.causal() & (j > 2))", EXPRESSION, "two masks", "sl.causal() & (lambda"),
        ("attention(mask=lambda s, b, h, i, j: j <= i)", EXPRESSION, "A score is score="),
        ("attention(mask=lambda b, h, i, j: i - j)", EXPRESSION, "a bool result", "Write a comparison"),
        ("attention(mask=sl.causal() and sl.prefix(2))", EXPRESSION, "combine masks with & | ~"),
        ("attention(mask=[sl.causal(), sl.prefix(2)])", TYPE, "Join masks by &: sl.causal() & sl.prefix(3)"),
        ("attention(mask=sl.causal() & attention_mask)", EXPRESSION, "sl.padding(array), a mask, too"),
        ("attention(mask=attention_mask & sl.causal())", EXPRESSION, "sl.padding(array), a mask, too"),
        ("attention(mask=sl.documents([0, 0, 1, 1]))", VALUE, "from 0 to 3", "Give an id for every token"),
        ("attention(score=sl.relative_bias(np.ones((4, 9))))", VALUE, "got -1", "Give 2n - 1 distances"),
        ("attention(score=sl.relative_bias(np.ones((11, 4))))", VALUE, "(q_heads, 2n - 1)", "pass bias.T"),
        ("attention(score=by_weight)", sl.UnsupportedError, "requires grad", "of tensors q, k and v"),
        ("speedlight.torch.attention(q, k, v, score=by_weight)", TYPE, "q: expected a PyTorch", "torch.from_numpy(q)"),
        ("attention(score=lambda s, b, h, i, j: s + embedding(i - j + 5)[h])", EXPRESSION, "write emb.weight[i, h]"),
        ("attention(mask=sl.softcap(30.0))", EXPRESSION, "expected a mask; got the score", "Give it as score="),
        ("attention(score=lambda s, b, h, i, j: s + torch.bucketize(i - j, edges))", EXPRESSION, "t = sl.table(array)"),
        ("attention(score=lambda s, b, h, i, j: s + linear(s))", EXPRESSION, "torch.linear", "Compute it outside"),
        ("attention(score=lambda s, b, h, i, j: s + tensor[b])", EXPRESSION, "as many positions as it has dimensions"),
        (
            "attention(score=lambda s, b, h, i, j: s + sl.table(slopes))",
            EXPRESSION,
            "Look it up at positions: table[i]",
        ),
        ("attention(score=lambda b, h, i, j: j)", EXPRESSION, "A mask is mask="),
        ("attention(score=lambda s, b, h, i, j, t: s + t)", EXPRESSION, "captured by the function"),
        ("attention(score=slopes[:4])", VALUE, "score[:, None, None]"),
        ("attention(score=sl.alibi(8))", TYPE, "2.0 ** (-8 / n * numpy.arange(1, n + 1))"),
        ("attention(mask=sl.prefix([1, 2]))", TYPE, "lambda b, h, i, j: j < n[b]"),
        ("attention(score=lambda s, b, h, i, j: j <= i)", EXPRESSION, "Give it as mask="),
        ("attention(score=lambda s, b, h, i, j: 'alibi')", EXPRESSION, "a number made of s, b, h, i and j"),
        ("attention(score=square > 0)", TYPE, "Pass it as mask="),
        ("attention(mask='causal')", TYPE, "Causality is causal=True"),
        ("attention(score='alibi')", TYPE, "a pattern such as sl.softcap(30.0)"),
        ("attention(score=0.5)", TYPE, "A factor of scores is scale="),
        ("attention(score=sl.alibi(slopes))", VALUE, "an entry for each of q's 4 heads; got 8"),
        ("attention(window=128)", TYPE, "window=(127, None) beside causal=True"),
        ("attention(window=(128, -1))", VALUE, "None for no limit", "window=(128, None)"),
        ("sl.window(-1, 0)", VALUE, "None for no limit"),
        ("attention(causal='left')", VALUE, "True or 'bottom-right' (aligned at the end) or 'top-left'"),
        ("attention(causal=1)", VALUE, "Write causal=True"),
        ("attention(scale='auto')", TYPE, "a number or None (1/sqrt(head_dim))"),
        ("sl.attention(tensor, tensor, tensor, scale=gain)", TYPE, "score=lambda s, b, h, i, j: s * t"),
        ("sl.attention(tensor, tensor, tensor, scale=edges[1])", TYPE, "Write scale=scale.item()"),
        ("attention(scale=np.ones(4))", TYPE, "of each head, multiplies q, beside scale=1.0"),
        ("attention(window='128')", TYPE, "Write window=(127, 0)"),
        ("attention(causal=None)", VALUE, "Write causal=False"),
        ("attention(causal='true')", VALUE, "Write causal=True"),
        ("attention(dropout=0.1, seed=torch.Generator())", TYPE, "seed=random.getrandbits(62)"),
        ("attention(engine='gpu')", VALUE, "'cpu', 'cuda' or None", "Leave it out"),
        ("attention(precision='highest')", VALUE, "'ieee' has the products of float32"),
        ("sl.softcap(0)", VALUE, "Without a cap leave it out"),
        ("attention(dropout=0.1)", VALUE, "seed: expected an int beside dropout="),
        ("attention(sink_logits=1.0)", TYPE, "numbers, one per query head"),
    ],
    "Plans, caches and pages": [
        ("sl.plan()", TYPE, "plan(q, k, v), or plan(q_heads=…, q_len=…, head_dim=…)"),
        ("sl.plan(q, k, v, q_len=6)", VALUE, "either arrays or sizes", "Leave the sizes out"),
        ("sl.KVCache(layers=1, kv_heads=4, head_dim=8)", VALUE, "capacity: expected the most tokens"),
        ("sl.KVCache(layers=1, kv_heads=4, head_dim=8, window=(3, 0))", TYPE, "(3, 0) is window=4"),
        (
            "speedlight.distributed.KVCache(layers=1, kv_heads=4, head_dim=8)",
            TYPE,
            "capacity: expected the most tokens",
        ),
        ("speedlight.torch.Attention(32, 4, causal=True, window=(3, 0))", TYPE, "(3, 0) is window=4"),
        ("cache.attend(q, k, v)", TYPE, "layer: expected an int"),
        ("cache.attend(0, q[:, :, :1], k, v)", VALUE, "6 tokens, as k has"),
        ("narrow.attend(0, q, k, v)", TYPE, "dtype bfloat16, as the cache has", "k.astype(ml_dtypes.bfloat16)"),
        ("cache.keep(np.array([True, False]), start=0)", TYPE, "got bool", "numpy.flatnonzero(accepted)"),
        ("pool.attend(0, [], new, new, new)", VALUE, "sequences: expected one at least"),
        ("pool.attend(0, pool.sequence(), new, new, new)", TYPE, "Of one alone write [sequence]"),
        ("sl.PagedSequence(pool)", TYPE, "Sequences come from pool.sequence()"),
        ("sl.KVCache(layers=1, kv_heads=4, head_dim=8, capacity=64, keep_first=4)", VALUE, "Give window=, too"),
        ("sl.attention_backward(q, k, v, q, q[..., 0], q, grads=['dq'])", TYPE, "dq, dk and dv always come"),
        ("sl.rotary(q, 10000.0)", TYPE, "A base of angles is base=10000.0"),
        ("sl.attention_paged(q, pages, pages, [[0], [9]], [5, 5])", VALUE, "pages from 0 to 3; got 9 at [1, 0]"),
        ("sl.attention_paged(q, pages, pages, [[0], [1]], 5)", TYPE, "[5] * 2"),
        ("v3.flash_attn_with_kvcache(tensor, *kept, page_table=table, cache_seqlens=5)", VALUE, "page_table: expected"),
        ("sl.merge(q, q)", TYPE, "merge([out1, …], [lse1, …])"),
    ],
}
ROWS = [row for rows in MISTAKES.values() for row in rows]


@pytest.mark.parametrize(("call", "error", "words"), [(x[0], x[1], x[2:]) for x in ROWS], ids=[x[0] for x in ROWS])
def test_a_mistake_is_told_what_to_write(call, error, words):
    with pytest.raises(error) as caught:
        eval(call, globals() | {"jax": jax, "v3": v3})
    assert type(caught.value) is error
    for x in words:
        assert x in str(caught.value)
    assert caught.value.__cause__ is None and len(str(caught.value)) < 420


def _escaped(row):
    return [x.replace("|", "\\|") if isinstance(x, str) else x for x in row]


USED = (
    *("import functools", "import numpy as np", "import torch", "import speedlight as sl"),
    *("import speedlight.distributed", "import speedlight.flash_attn", "import speedlight.jax"),
    *("import speedlight.torch", "from speedlight.flash_attn import v3"),
)


def _names() -> list[str]:
    """The lines above that say what the rows speak of."""
    lines = Path(__file__).read_text().splitlines()
    imports = [x for x in lines if x in USED]
    first, last = (lines.index(f"# --- {x}") for x in ("what rows speak of", "of errors"))
    return [*imports, "", *lines[first + 1 : last]]


def page() -> str:
    """docs/mistakes.md."""
    lines = [
        "# Mistakes and answers",
        "",
        "The left column is a call with a mistake; the right column has the words of its error that name the way out.",
        "Each row runs as a test. `tests/docs/test_mistakes.py` holds the table and writes this page.",
        "",
        "The rows use these names:",
        "",
        "```python",
        *_names(),
        "```",
    ]
    for section, rows in MISTAKES.items():
        lines += ["", f"## {section}", "", "| written | error says |", "|---|---|"]
        lines += [f"| `{x[0]}` | {' … '.join(f'`{y}`' for y in x[2:])} |" for x in map(_escaped, rows)]
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table():
    assert len(ROWS) >= 60
    assert PAGE.read_text() == page(), "python tests/docs/test_mistakes.py writes it"


# --- hints name arguments that there are

CALLS = [sl.attention, sl.attention_backward, sl.attention_paged, sl.append_paged, sl.plan, sl.merge, sl.merge_states,
         sl.rotary, sl.KVCache.append, sl.PagePool.append, sl.KVCache.attend, sl.PagePool.attend,
         sl.KVCache.__init__, sl.PagePool.__init__,
         speedlight.torch.attention, speedlight.torch.Attention.__init__, speedlight.torch.Attention.forward,
         speedlight.distributed.attention,
         speedlight.distributed.KVCache.__init__,
         speedlight.distributed.KVCache.append, speedlight.distributed.KVCache.attend]  # fmt: skip
NAMES = {name for table in (other_names.OPTIONS, *other_names.OF.values(), *other_names.MAKERS.values(),
                              *other_names.OVER_RANKS.values()) for name in table}  # fmt: skip


@pytest.mark.parametrize("function", CALLS, ids=lambda x: x.__qualname__)
def test_hints_name_arguments_of_the_call(function):
    own = set(inspect.signature(function).parameters)
    found = {name: hints.hint_of(function, name) for name in NAMES - own}
    assert sum(x is not None for x in found.values()) >= (0 if function is sl.merge_states else 10)
    for hint in found.values():
        elsewhere = {"window"} if hint is not None and "KVCache(window=n)" in hint else set()
        assert hint is None or hints.options_in(hint) <= own | elsewhere, hint


def test_other_spellings_are_no_names_of_ours():
    for ours, theirs in SAME_LAYOUTS.items():
        assert ours not in theirs and all(len(x) == len(ours) for x in theirs)
    assert set(SAME_CAUSAL.values()) == {True, "top-left"}


def test_signatures_are_explicit():
    for function in CALLS:
        kinds = {x.kind for x in inspect.signature(function).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}, function


if __name__ == "__main__":
    PAGE.write_text(page())
