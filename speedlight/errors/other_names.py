"""Other libraries' names of our calls' arguments, each with ours: the tables of advice.py.

A table is written with the names of one meaning in one key; the public tables have a key for each name.
"""

from __future__ import annotations


def _by_name(table: dict[str, str]) -> dict[str, str]:
    """Returns a table with a key for each name; of several meanings of a name it has the last."""
    return {name: meaning for names, meaning in table.items() for name in names.split()}


def _each(tables: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Returns the tables of several calls, with a key for each name."""
    return {call: _by_name(table) for call, table in tables.items()}


_CAP = "score=sl.softcap(30.0); 0, where it means none, is leaving it out"
_FLEX = "the same function, beside q_start=0: FlexAttention counts queries from 0"
_OFFSETS_SAY = "nothing: cu_seqlens_q= and cu_seqlens_k= say it"
_INDICES = " ".join([f"{x}kv_{y}" for x in ("", "paged_") for y in ("indices", "indptr", "last_page_len")])

# of attention() and whatever has its options
_OPTIONS = {
    "is_causal use_causal_mask": "causal=True, which aligns the last query with the last key, as flash-attn does, or "
    "causal='top-left', the first with the first, as PyTorch's and JAX's is_causal does: the same where there are as "
    "many queries as keys",
    "attn_mask custom_mask atten_mask": "mask= of bool, True where a key is seen, or score= of floats, which are "
    "added to scores",
    "attention_mask": "mask=sl.padding(attention_mask) for a tokenizer's (batch, k_len), 1 where there is a token",
    "key_padding_mask src_key_padding_mask memory_key_padding_mask": "mask=sl.padding(~key_padding_mask): PyTorch's "
    "is True where a key is hidden",
    "attn_bias bias position_bias pse": "score=, a float array that is added to scores after scale=",
    "dropout_p attn_dropout attention_dropout dropout_rate p": "dropout= and seed=, an int that says which weights are "
    "dropped",
    "softmax_scale sm_scale scaling scale_factor": "scale=, a factor of the scores",
    "topk_indices topk_idxs gather_kv_indices sparse_indices selected_indices topk top_k": "indices=, the numbers of "
    "the keys that each query may see, -1 for none",
    "block_indices block_table_mask block_sparse_tensors": "mask=sl.blocks(table, size), whose table is True where a "
    "block of queries sees a block of keys",
    "enable_gqa": "nothing: fewer heads of k and v are grouped heads",
    "softcap logits_soft_cap attn_logits_soft_cap soft_cap logit_cap logit_softcapping attn_logit_softcapping": _CAP,
    "window_size": "window=(left, right), in which None is no limit, flash-attn's -1",
    "window_left left_window_size window_size_left": "window=(left, None) beside causal=True; -1, elsewhere no limit, "
    "is leaving it out",
    "num_heads q_num_heads kv_num_heads num_kv_heads n_kv_heads num_key_value_heads kv_heads q_heads heads "
    "n_heads": "nothing: heads are a dimension of q, k and v: q.reshape(batch, length, heads, -1) is layout='blhd'",
    "past_key_values past_key_value past_key past_value kv_cache": "nothing: keys and values of earlier tokens are a "
    "KVCache's: cache.attend(layer, q, k, v)",
    "local_window_size": "window=(left, right); JAX's n alone is (n, n)",
    "sliding_window": "window=(n - 1, None) beside causal=True: n tokens, the query's own among them",
    "alibi_slopes": "score=sl.alibi(slopes), s + slopes[h] * (j - i): flash-attn's, of -|i - j|, where causal",
    "score_mod": f"score=, {_FLEX}",
    "mask_mod block_mask": f"mask=, {_FLEX}",
    "cu_seqlens cu_seq_lens cu_seqlens_kv cu_seq_lens_q cu_seq_lens_k qo_indptr kv_indptr": "cu_seqlens_q= (and "
    "cu_seqlens_k=, where keys have other lengths) beside layout='lhd'",
    "max_seqlen max_seqlen_q max_seqlen_k max_s": _OFFSETS_SAY,
    "seqlens seq_lens seq_lengths lens sequence_lengths actual_seq_lengths": "lengths= for queries and keys alike, "
    "k_lengths= for keys alone, both for batches padded on the right",
    "seqused_q seqlens_q q_seq_lens query_seq_lengths": "q_lengths=, one for each item",
    "seqused_k seqlens_k cache_seqlens kv_lengths kv_lens kv_seq_lens kv_seqlens key_value_seq_lengths "
    "nonpad_kv_seqlen": "k_lengths=, one for each item",
    "tensor_layout qkv_format input_layout qkv_layout kv_layout batch_first": "layout='bhld' for (batch, heads, "
    "length, head_dim), 'blhd' for (batch, length, heads, head_dim), 'hld' for one item, (heads, length, head_dim), "
    "'lhd' for packed (total_length, heads, head_dim)",
    "is_training training": "nothing: dropout=0.0, the default, where nothing trains",
    "deterministic": "nothing: results have the same bits for any threads, and from run to run",
    "num_splits kernel_options scheduler_metadata tile_scheduler_metadata pack_gqa smooth_k": "nothing: how "
    "work is divided is the engine's own",
    "threads num_threads n_threads nthreads": "sl.set_threads(n), for all calls",
    "return_attn_probs return_softmax_lse return_softmax return_aux": "return_lse=True; weights, of a few rows, are "
    "sl.reference.weights(q, k)",
    "need_weights output_attentions return_weights": "sl.reference.weights(q, k) for a few rows: a whole matrix of "
    "weights is never made",
    "block_table block_tables page_table": "attention_paged(q, k_pages, v_pages, block_table, k_lengths)",
    "learnable_sink s_aux sinks": "sink_logits=, one per query head",
    "implementation backend": "engine='cpu' or 'cuda', or nothing: it is where q lies",
    "query": "q=",
    "key": "k=",
    "value": "v=",
    "alibi alibi_bias": "score=sl.alibi(slopes), a slope for each head",
    "position_ids positions rope rotary rotary_emb freqs_cis cos sin": "nothing: sl.rotary(q) turns q and k before",
    "segment_ids q_segment_ids kv_segment_ids document_ids": "mask=sl.documents(ids), or layout='lhd' and "
    "cu_seqlens_q= for packed sequences",
    "average_attn_weights": "nothing: sl.reference.weights(q, k) for a few rows",
    "chunk_size query_chunk_size key_chunk_size block_size block_q block_k num_warps num_stages op": "nothing: how "
    "work is divided is the engine's own",
    "dtype softmax_dtype precision_dtype": "nothing: convert q, k and v; softmax is computed in float32 or float64",
    "device": "engine='cpu' or 'cuda', or nothing: it is where q lies",
    "head_dim_v kv_lora_rank latent": "value_dim=, beside None for the values: the first columns of keys",
    "ckv kpe k_pe compressed_kv": "k=(latent, rotary), beside v=None",
    "q_nope q_pe qk_rope_head_dim": "q= of both parts joined, the first multiplied by W_UK",
    "head_dim head_size value_dim": "nothing: it is the last dimension of q and k, and of v",
    "generator rng key_rng dropout_seed": "seed=, an int",
    "kv_cache_dtype is_fp8_kvcache k_scale v_scale k_scales v_scales q_descale k_descale v_descale": "nothing: codes "
    "and their scales are a KVCache's, KVCache(dtype='int8', 'fp8' or 'int4'), or go to "
    "attention_paged(k_scales=, v_scales=)",
}
# names that belong to one library, whose own signature is here, too
ADAPTERS = {
    ("is_causal", "attn_mask", "dropout_p", "enable_gqa"): "speedlight.torch.scaled_dot_product_attention() has "
    "PyTorch's arguments.",
    ("score_mod", "mask_mod", "block_mask"): "speedlight.torch.flex_attention() has FlexAttention's arguments.",
    ("softmax_scale", "window_size", "alibi_slopes", "seqused_k", "cache_seqlens"): "speedlight.flash_attn has the "
    "calls of flash-attn.",
    ("head_dim_v", "tile_scheduler_metadata", "is_fp8_kvcache"): "speedlight.flash_mla has FlashMLA's calls.",
}
_HEADS = "num_kv_heads n_kv_heads num_key_value_heads num_heads_kv kv_num_heads nheads_k"
_BATCH = "batch_size bsz max_batch_size"
_SIZES = {
    _HEADS: "kv_heads=",
    "head_size headdim dim d": "head_dim=",
    "headdim_v": "value_dim=",
    "kv_lora_rank": "value_dim=, the columns of a latent, and head_dim= with its rotary part's",
    "qk_rope_head_dim": "head_dim=, the columns of a latent and of its rotary part",
}
_PLAN = {
    _BATCH: "batch=",
    **_SIZES,
    "num_heads n_heads nheads heads num_qo_heads q_num_heads": "q_heads= (and kv_heads=)",
    "seq_len seqlen sequence_length n": "q_len= (and k_len=)",
    "seqlen_q qo_len": "q_len=",
    "seqlen_k kv_len": "k_len=",
    "world_size cp_size num_ranks processes": "ranks=",
    "num_layers n_layers layers": "nothing: a plan is of one layer",
    "fwd_bwd training": "backward=True",
    "mesh": "method='mesh' beside ranks=: every mesh of so many is looked at",
    "engine": "device='cuda', or nothing: it is where the arrays lie",
}
_KEPT = {
    **_SIZES,
    "num_heads n_heads nheads heads": "kv_heads=, those of keys and values",
    "num_layers n_layers num_hidden_layers": "layers=",
}
_CODES = {
    "nbits bits kv_bits quantized quantization cache_dtype kv_dtype k_dtype v_dtype kv_cache_dtype kv_data_type "
    "kv_cache_precision key_cache_precision value_cache_precision type_k type_v cache_type_k cache_type_v ctk ctv "
    "cache_implementation backend": "dtype='int8', 'fp8' or 'int4', with scales",
    "group_size q_group_size kv_group_size key_cache_group_size value_cache_group_size axis_key axis_value": "nothing: "
    "a scale is for a token and head, or for 32 elements of 'int4'",
    "residual_length quantized_kv_start": "nothing: every token is stored as codes",
    "k_scale v_scale k_scales v_scales calculate_kv_scales": "nothing: a cache of codes finds scales itself",
}
_TOKENS = "max_seq_len max_seqlen max_model_len max_length max_len max_cache_len size n"
_WINDOWS = "window window_size sliding_window"
_FIRST = "keep_first num_sink_tokens sink_tokens sinks"
_CACHE = {
    _BATCH: "batch=",
    **_KEPT,
    _TOKENS: "capacity=, the most tokens of a sequence",
    "sliding_window window_size": "window=n: a token sees itself and the n - 1 before it",
    "num_sink_tokens sink_tokens sinks": "keep_first=",
    "page_size block_size num_pages num_blocks": "PagePool(…) for pages",
    "config": "layers=, kv_heads= and head_dim= of the model; transformers' models take speedlight.transformers.Cache",
    **_CODES,
    "layout": "nothing: a cache takes (batch, heads, length, dim) of any strides",
}
_POOL = {
    **_KEPT,
    "num_pages num_blocks num_gpu_blocks max_num_pages": "pages=",
    "block_size": "page_size=, a multiple of 16",
    "gpu_memory_utilization memory_fraction": "pages=, of page_size tokens",
    **_CODES,
    f"{_WINDOWS} {_FIRST}": "nothing: a pool keeps every token; a mask of attend() may be sl.window(n - 1, 0) | "
    "sl.prefix(first), and KVCache(window=n) forgets old ones",
    f"batch {_BATCH} capacity {_TOKENS}": "nothing: sequences grow while pages are free",
}
_ATTEND = {
    "causal is_causal": "nothing: a query sees the tokens up to its own; without k and v it sees all that are stored",
    _WINDOWS: "KVCache(window=n), or mask=sl.window(n - 1, 0)",
    "lengths q_lengths k_lengths seqlens seq_lens cu_seqlens cu_seqlens_q cache_seqlens": "new_lengths=, the new "
    "tokens of each sequence: the cache knows those before",
    "score_mod": "score=, the same function: positions are those in the whole sequence",
    "mask_mod": "mask=, the same function: positions are those in the whole sequence",
    "q_start k_start positions cache_position start_pos input_pos slot_mapping": "nothing: the cache knows its lengths",
    "past_key_values past_key_value past_key past_value kv_cache": "nothing: the cache has the tokens of earlier calls",
    "engine": "nothing: it is where the cache lies",
    "precision": "nothing: products of float32 are float32's",
    "layout": "nothing: caches take (batch, heads, length, dim) of any strides: q.swapaxes(1, 2) of 'blhd'",
}
_PACKED_ATTEND = {
    "layout": "nothing: pools take (total new, heads, dim), one sequence's tokens after the other's",
    "slot_mapping": "nothing: the pool finds places for new tokens",
    "token_ids input_ids prompt_token_ids": "tokens=, one int for each row of k",
}
_PUT = {
    "layout": _ATTEND["layout"].replace("q.swap", "k.swap"),
    "lengths q_lengths k_lengths seqlens seq_lens cu_seqlens cu_seqlens_k cache_seqlens": "new_lengths=, the new "
    "tokens of each sequence: the cache knows those before",
    "q_start k_start positions cache_position start_pos input_pos slot_mapping": "nothing: new tokens go behind those "
    "that are stored",
    "k_scale v_scale k_descale v_descale": "nothing: a cache of codes finds scales itself",
    "q query causal is_causal mask score scale window return_lse": "nothing: tokens are stored; attend() attends",
}
_STORED = {
    "page_table block_tables": "block_table=",
    "cache_seqlens seq_lens seqused_k context_lens kv_lens lengths": "k_lengths=",
    "k_cache key_cache": "k_pages=",
    "v_cache value_cache": "v_pages=",
    _INDICES: "block_table=, a row of page numbers for each sequence, and k_lengths=",
    "kv_layout": "nothing: pages are FlashInfer's 'NHD'; of 'HND' k_pages.swapaxes(1, 2), and so v_pages",
    "slot_mapping batch_indices positions": "nothing: block_table= and k_lengths= say where",
    "page_size block_size": "nothing: it is the second dimension of k_pages",
    "k_scale k_descale": "k_scales=, of pages of codes: a number, or one for each head, channel, or token and head",
    "v_scale v_descale": "v_scales=, of pages of codes: a number, or one for each head, channel, or token and head",
    "kv_cache_dtype kv_data_type": "nothing: it is the pages' own dtype; those of codes take k_scales= and v_scales=",
}
_KEYS = {
    **_STORED,
    "k_start": "nothing: the first key of a sequence is at 0",
    "cu_seqlens_k": "k_lengths=, one for each sequence",
    "query_start_loc": "cu_seqlens_q= beside layout='lhd'",
    "max_query_len max_seq_len": _OFFSETS_SAY.replace("cu_seqlens_k=", "k_lengths="),
    "precision": "nothing: products of float32 are float32's",
    "score_mod": "score=, the same function: positions are those in the whole sequence",
    "mask_mod": "mask=, the same function: positions are those in the whole sequence",
    "is_causal": "causal=True, which aligns the last query with the last key",
    "window_size": "window=(left, right), in which None is no limit, flash-attn's -1",
    "sliding_window": "window=(n - 1, None) beside causal=True: n tokens, the query's own among them",
}
_APPENDED = {
    **_STORED,
    "cu_seqlens cu_seqlens_q cu_seqlens_k append_indptr kv_append_indptr qo_indptr seqlens_new "
    "query_start_loc": "new_lengths=, the new tokens of each sequence; packed ones are layout='lhd'",
    "lengths seq_lens q_lengths": "k_lengths= for the tokens that sequences have, new_lengths= for those that come",
    "causal is_causal q query": "nothing: tokens are stored; attention_paged() attends",
}
_BACKWARD = {
    "dout grad_output grad_outputs grad_out": "d_out=, the gradient of out",
    "return_lse": "nothing: gradients come, (dq, dk, dv)",
    "delta": "nothing: it is computed",
}
_STATES = {
    "out lse outs lses out_a lse_a v_a s_a v_b s_b out_partial lse_partial": "merge(out1, lse1, out2, lse2), or "
    "merge([out1, …], [lse1, …])"
}
_IN_LAYER = "nothing: Attention({}) says it, where the layer is made"
_FORWARD = {
    "hidden_states query q input inputs hidden_state": "x=",
    "key value k v memory encoder_hidden_states key_value_states cross_states": "context=, what keys and values are "
    "both made of; beside no context= that is x",
    "attn_mask causal_mask src_mask tgt_mask": "mask= of bool, True where a key is seen: nn.MultiheadAttention's is "
    "True where it is hidden",
    "block_mask mask_mod": "mask=, the same function",
    "key_padding_mask src_key_padding_mask memory_key_padding_mask": "attention_mask=~key_padding_mask: PyTorch's is "
    "True where a key is hidden",
    "padding_mask encoder_attention_mask lengths q_lengths k_lengths seq_lens seqlens": "attention_mask=, (batch, "
    "k_len), 1 where there is a token",
    "position_ids cache_position input_pos start_pos offset": "positions=",
    "position_embeddings rotary_emb freqs_cis freqs rope cos sin": "rotation=(cos, sin), as for speedlight.rotary()",
    "past_key_values past_key_value kv_cache layer_past past use_cache inference_params": "cache=, a "
    "speedlight.KVCache, which keeps keys and values of all calls",
    "causal is_causal": _IN_LAYER.format("causal=True"),
    _WINDOWS: _IN_LAYER.format("window=n"),
    "dropout dropout_p": _IN_LAYER.format("dropout=p"),
    "scale softmax_scale scaling": _IN_LAYER.format("scale=x"),
    "score score_mod attn_bias bias position_bias alibi_slopes softcap": _IN_LAYER.format("score=…"),
    "sinks s_aux learnable_sink": _IN_LAYER.format("sinks=True"),
    "layer layer_idx layer_id": _IN_LAYER.format("layer=n"),
    "need_weights average_attn_weights output_attentions": "nothing: no weights are made",
}
_TURNED = {
    "q k query key": "x=: queries and keys take a call each",
    "t input inputs x_in": "x=",
    "position_ids pos_ids input_pos cache_position": "positions=, of each token",
    "offset offsets seqlen_offset seqlen_offsets start_pos": "positions=, the first token's, an int, or each token's, "
    "(batch, length)",
    "theta rope_theta rope_base rotary_base freq_base max_wavelength": "base=",
    "interleave rotary_interleaved rope_interleave traditional": "interleaved=",
    "is_neox is_neox_style neox": "interleaved=, the other way round",
    "dim rotary_dim rotary_dims rot_dim rotary_ndims rotary_embedding_dim": "dims=",
    "partial_rotary_factor": "dims=, how many elements turn: that times head_dim",
    "inplace": "out=x",
    "freqs freqs_cis inv_freq cos_sin_cache rotary_emb position_embeddings": "cos= and sin=, a row for each position",
    "cos_cache rotary_cos cos_cached": "cos=",
    "sin_cache rotary_sin sin_cached": "sin=",
    "rope_scaling scaling_factor rope_scale scale": "cos= and sin= of the scaled angles; base= alone scales none",
    "cu_seqlens cu_seqlens_q indptr max_seqlen": "positions=, of each token; in layout='lhd' they begin again where a "
    "sequence does",
    "seq_len seqlen max_seq_len max_position_embeddings": "nothing: x has its length; positions= are its tokens'",
    "rope_type": "cos= and sin= of its angles; base= alone is the plain one",
    "unsqueeze_dim": "layout='bhld' for 1, the default, and 'blhd' for 2",
}
OPTIONS = _by_name(_OPTIONS)
OF = _each(
    {
        "attention_backward": _BACKWARD,
        "rotary": _TURNED,
        "plan": _PLAN,
        "attention_paged": _KEYS,
        "append_paged": _APPENDED,
        "KVCache.append": _PUT,
        "KVCache.attend": _ATTEND,
        "PagePool.append": _PUT | _PACKED_ATTEND,
        "PagePool.attend": _ATTEND | _PACKED_ATTEND,
        "merge": _STATES,
        "Attention.forward": _FORWARD,
    }
)
# of calls over several processes, where they differ from those of the same name
OVER_RANKS = _each(
    {
        "attention": {
            "dropout dropout_p seed": "nothing: there is no dropout over several processes",
            "engine precision": "nothing: it runs on CPUs, and products of float32 are float32's",
            "out": "nothing: results are new tensors",
            "ranks world_size process_group": "group=, a process group, or mesh=",
        },
        "KVCache": {
            f"{_WINDOWS} {_FIRST}": "nothing: a mask of attend() may be sl.window(n - 1, 0), or each process has a "
            "speedlight.KVCache(window=n)",
        },
        "KVCache.attend": {_WINDOWS: "mask=sl.window(n - 1, 0)", "out": "nothing: results are new tensors"},
    }
)
CAPACITY = (
    "capacity: expected the most tokens of a sequence, on all processes together; got nothing. A window's cache is "
    "small: each process may have a speedlight.KVCache(window=n)."
)
_LAYER = {
    _HEADS: "kv_heads=",
    "embed_dim hidden_size d_model query_dim n_embd": "dim=",
    "num_heads n_heads n_head nhead num_attention_heads": "heads=",
    "head_size headdim dim_head": "head_dim=",
    "kdim vdim kv_dim cross_attention_dim": "context_dim=, of keys and values alike",
    "qkv_bias attention_bias use_bias": "bias=, of q, k and v, and out_bias=",
    "is_causal": "causal=True",
    "sliding_window window_size": "window=n: a token sees itself and the n - 1 before it",
    "rope_theta rope_base rotary_base theta base": "rotary=, the base of angles",
    "rotary_dim rotary_emb_dim partial_rotary_factor": "rotary_dims=, how many elements turn",
    "rotary_interleaved rotary_emb_interleaved": "interleaved=",
    "attn_dropout attention_dropout dropout_p": "dropout=",
    "softmax_scale scaling sm_scale": "scale=, a factor of the scores",
    "softcap attn_logit_softcapping": _CAP,
    "layer_idx layer_id layer_index": "layer=, whose part of a cache is this layer's",
    "batch_first": "nothing: x is (batch, length, dim)",
}
_MODELS = {
    f"{_TOKENS} max_new_tokens": "capacity=, the most tokens of a sequence",
    _BATCH: "nothing: it has the batch of the keys that it is given first",
    "device": "nothing: it lies where the model's keys lie",
    **_CODES,
}
MAKERS = _each({"KVCache": _CACHE, "PagePool": _POOL, "Attention": _LAYER, "Cache": _MODELS})
# of calls that have another library's arguments: what a name that is ours, or a third library's, is in whichever call
# has the argument
NO_SUCH = "nothing: it is an option of speedlight.attention()"
_BY_MASK_FUNCTION = "block_mask=create_block_mask(function, B, H, Q_LEN, KV_LEN)"
_LSE = ("return_lse=True", "return_attn_probs=True", "return_residual=True, log-sum-exps")
SHARED: dict[str, tuple[str, ...]] = {
    name: hints
    for names, hints in {
        "causal is_causal use_causal_mask": ("is_causal=True", "causal=True", _BY_MASK_FUNCTION),
        "scale softmax_scale sm_scale scaling": ("scale=", "softmax_scale="),
        "mask attn_mask attention_mask block_mask mask_mod": (
            "attn_mask=, of bool, True where a key is seen",
            "mask=, of bool, True where a key is seen",
            _BY_MASK_FUNCTION,
            "mask_mod=, a function",
            NO_SUCH,
        ),
        "score score_mod bias attn_bias": ("score_mod=, a function", "bias=", "attn_mask=, of floats", NO_SUCH),
        "dropout dropout_p attn_dropout dropout_rate": ("dropout_p=", NO_SUCH),
        "window window_size sliding_window local_window_size": (
            "window_size=(left, right)",
            "local_window_size=(left, right)",
            _BY_MASK_FUNCTION,
            NO_SUCH,
        ),
        "softcap logits_soft_cap soft_cap": (
            "softcap=",
            "score_mod=lambda s, b, h, i, j: c * torch.tanh(s / c)",
            "nothing: sl.softcap(30.0) is a score of speedlight.attention()",
        ),
        "alibi_slopes": (
            "score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i)",
            "nothing: sl.alibi(slopes) is a score of speedlight.attention()",
        ),
        "enable_gqa": ("nothing: fewer heads of k and v are grouped heads",),
        "sink_logits sinks s_aux learnable_sink": ("learnable_sink=, one for each head", NO_SUCH),
        "return_lse return_attn_probs return_softmax_lse return_residual": _LSE,
        "lengths k_lengths seqused_k kv_seq_lengths": ("key_value_seq_lengths=", "seqused_k=", "cache_seqlens="),
        "q_lengths seqused_q": ("query_seq_lengths=", "seqused_q="),
        "cu_seqlens cu_seqlens_q cu_seqlens_k": ("nothing: packed sequences are flash_attn_varlen_func()'s",),
        "block_table page_table block_tables": ("block_table=", "page_table="),
        "q query": ("query=", "q="),
        "k key": ("key=", "k="),
        "v value": ("value=", "v="),
    }.items()
    for name in names.split()
}
# of a package or a class: names that are elsewhere
ELSEWHERE = {
    "speedlight": _by_name(
        {
            "torch jax onnx flash_attn flash_mla transformers distributed": "import speedlight.{name} first",
            "scaled_dot_product_attention flex_attention create_block_mask sdpa patch": "speedlight.torch has {name}()",
            "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache": "speedlight.flash_attn has {name}()",
            "flash_mla_sparse_fwd flash_mla_with_kvcache get_mla_metadata": "speedlight.flash_mla has {name}()",
            "dot_product_attention": "speedlight.jax has {name}()",
            "register": "speedlight.transformers has {name}()",
            "flash_attention memory_efficient_attention attention_forward": "use attention()",
            "Attention MultiheadAttention": "speedlight.torch has Attention, a layer",
            "StaticCache DynamicCache Cache": "use KVCache; speedlight.transformers has Cache",
            "causal_mask make_causal_mask": "use causal()",
            "sliding_window": "use window()",
            "set_num_threads": "use set_threads()",
            "paged_attention PagedAttention": "use attention_paged()",
            "rope apply_rotary_emb apply_rotary_pos_emb": "use rotary()",
        }
    ),
    "KVCache": _by_name(
        {
            "get_seq_length get_mask_sizes get_max_cache_shape is_compileable is_initialized max_cache_len update "
            "early_initialization reorder_cache crop": "a model of transformers takes "
            "speedlight.transformers.Cache(config)"
        }
    ),
}
LAYOUTS = _by_name(
    {
        "sbhd lbhd tbhd": "q.swapaxes(0, 1) is 'blhd'; so are k and v",
        "hnd htd": "of one item 'hld'; packed sequences are 'lhd'",
        "bsh bld bsd btd": "split the last dimension into heads: q.reshape(b, l, heads, -1) is 'blhd'",
    }
)
