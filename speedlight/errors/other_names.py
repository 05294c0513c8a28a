"""Other libraries' names of our calls' arguments, each with ours: the tables of advice.py."""

from __future__ import annotations

_CAUSAL = (
    "causal=True, which aligns the last query with the last key, as flash-attn does, or causal='top-left', the first "
    "with the first, as PyTorch's and JAX's is_causal does: the same where there are as many queries as keys"
)
_MASK = "mask= of bool, True where a key is seen, or score= of floats, which are added to scores"
_PADDING = "mask=sl.padding(attention_mask) for a tokenizer's (batch, k_len), 1 where there is a token"
_HIDDEN = "mask=sl.padding(~key_padding_mask): PyTorch's is True where a key is hidden"
_ADDED = "score=, a float array that is added to scores after scale="
_CAP = "score=sl.softcap(30.0); 0, where it means none, is leaving it out"
_SINKS = "sink_logits=, one per query head"
_GROUPED = "nothing: fewer heads of k and v are grouped heads"
_PAGES = "attention_paged(q, k_pages, v_pages, block_table, k_lengths)"
_LSE = "return_lse=True; weights, of a few rows, are sl.reference.weights(q, k)"
_WEIGHTS = "sl.reference.weights(q, k) for a few rows: a whole matrix of weights is never made"
_FLEX = "the same function, beside q_start=0: FlexAttention counts queries from 0"
_PACKED = "cu_seqlens_q= (and cu_seqlens_k=, where keys have other lengths) beside layout='lhd'"
_FIRST_AT = "positions=, the first token's, an int, or each token's, (batch, length)"
_EACH_TOKENS = "positions=, of each token; in layout='lhd' they begin again where a sequence does"
_OFFSETS_SAY = "nothing: cu_seqlens_q= and cu_seqlens_k= say it"
_LENGTHS = "lengths= for queries and keys alike, k_lengths= for keys alone, both for batches padded on the right"
_LAYOUT = (
    "layout='bhld' for (batch, heads, length, head_dim), 'blhd' for (batch, length, heads, head_dim), 'hld' for one "
    "item, (heads, length, head_dim), 'lhd' for packed (total_length, heads, head_dim)"
)
_TRAINING = "nothing: dropout=0.0, the default, where nothing trains"
_SAME_BITS = "nothing: results have the same bits for any threads, and from run to run"
_OURS = "nothing: how work is divided is the engine's own"
_HAS_HEADS = "nothing: heads are a dimension of q, k and v: q.reshape(batch, length, heads, -1) is layout='blhd'"
_EARLIER = "nothing: keys and values of earlier tokens are a KVCache's: cache.attend(layer, q, k, v)"
_THREADS = "sl.set_threads(n), for all calls"
_INDICES = tuple([f"{x}kv_{y}" for x in ("", "paged_") for y in ("indices", "indptr", "last_page_len")])
_NO_CODES = "nothing: pages of yours hold no codes; those of PagePool(dtype='fp8') do, and find scales themselves"
_ALL_TOKENS = (
    "nothing: a pool keeps every token; a mask of attend() may be sl.window(n - 1, 0) | sl.prefix(first), and "
    "KVCache(window=n) forgets old ones"
)
_LEFT = "window=(left, None) beside causal=True; -1, elsewhere no limit, is leaving it out"

# of attention() and whatever has its options
OPTIONS = {
    **dict.fromkeys(("is_causal", "use_causal_mask"), _CAUSAL),
    **dict.fromkeys(("attn_mask", "custom_mask", "atten_mask"), _MASK),
    "attention_mask": _PADDING,
    **dict.fromkeys(("key_padding_mask", "src_key_padding_mask", "memory_key_padding_mask"), _HIDDEN),
    **dict.fromkeys(("attn_bias", "bias", "position_bias", "pse"), _ADDED),
    **dict.fromkeys(
        ("dropout_p", "attn_dropout", "attention_dropout", "dropout_rate"),
        "dropout= and seed=, an int that says which weights are dropped",
    ),
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling", "scale_factor"), "scale=, a factor of the scores"),
    "enable_gqa": _GROUPED,
    **dict.fromkeys(("softcap", "logits_soft_cap", "attn_logits_soft_cap", "soft_cap"), _CAP),
    "window_size": "window=(left, right), in which None is no limit, flash-attn's -1",
    **dict.fromkeys(("window_left", "left_window_size", "window_size_left"), _LEFT),
    **dict.fromkeys(
        ("num_heads", "q_num_heads", "kv_num_heads", "kv_heads", "q_heads", "heads", "n_heads"), _HAS_HEADS
    ),
    **dict.fromkeys(("past_key_values", "past_key_value", "past_key", "past_value", "kv_cache"), _EARLIER),
    "local_window_size": "window=(left, right); JAX's n alone is (n, n)",
    "sliding_window": "window=(n - 1, None) beside causal=True: n tokens, the query's own among them",
    "alibi_slopes": "score=sl.alibi(slopes), s + slopes[h] * (j - i): flash-attn's, of -|i - j|, where causal",
    "score_mod": f"score=, {_FLEX}",
    "mask_mod": f"mask=, {_FLEX}",
    "block_mask": f"mask=, {_FLEX}",
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "cu_seqlens_kv", "cu_seq_lens_q", "cu_seq_lens_k"), _PACKED),
    **dict.fromkeys(("qo_indptr", "kv_indptr"), _PACKED),
    **dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_s"), _OFFSETS_SAY),
    **dict.fromkeys(("seqlens", "seq_lens", "seq_lengths", "lens", "sequence_lengths", "actual_seq_lengths"), _LENGTHS),
    **dict.fromkeys(("seqused_q", "seqlens_q", "q_seq_lens", "query_seq_lengths"), "q_lengths=, one for each item"),
    **dict.fromkeys(
        (
            *("seqused_k", "seqlens_k", "cache_seqlens", "kv_lengths", "kv_lens", "kv_seq_lens", "kv_seqlens"),
            *("key_value_seq_lengths", "nonpad_kv_seqlen"),
        ),
        "k_lengths=, one for each item",
    ),
    **dict.fromkeys(("tensor_layout", "qkv_format", "input_layout", "qkv_layout", "kv_layout", "batch_first"), _LAYOUT),
    **dict.fromkeys(("is_training", "training"), _TRAINING),
    "deterministic": _SAME_BITS,
    **dict.fromkeys(("num_splits", "kernel_options", "scheduler_metadata", "pack_gqa", "smooth_k"), _OURS),
    **dict.fromkeys(("threads", "num_threads", "n_threads", "nthreads"), _THREADS),
    **dict.fromkeys(("return_attn_probs", "return_softmax_lse", "return_softmax", "return_aux"), _LSE),
    **dict.fromkeys(("need_weights", "output_attentions", "return_weights"), _WEIGHTS),
    **dict.fromkeys(("block_table", "block_tables", "page_table"), _PAGES),
    **dict.fromkeys(("learnable_sink", "s_aux", "sinks"), _SINKS),
    **dict.fromkeys(("implementation", "backend"), "engine='cpu' or 'cuda', or nothing: it is where q lies"),
    "query": "q=",
    "key": "k=",
    "value": "v=",
}
# names that belong to one library, whose own signature is here, too
ADAPTERS = {
    ("is_causal", "attn_mask", "dropout_p", "enable_gqa"): "speedlight.torch.scaled_dot_product_attention() has "
    "PyTorch's arguments.",
    ("score_mod", "mask_mod", "block_mask"): "speedlight.torch.flex_attention() has FlexAttention's arguments.",
    ("softmax_scale", "window_size", "alibi_slopes", "seqused_k", "cache_seqlens"): "speedlight.flash_attn has the "
    "calls of flash-attn.",
}
_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads", "num_heads_kv", "kv_num_heads", "nheads_k")
_BATCH = dict.fromkeys(("batch_size", "bsz", "max_batch_size"), "batch=")
_SIZES = {
    **dict.fromkeys(_HEADS, "kv_heads="),
    **dict.fromkeys(("head_size", "headdim", "dim", "d"), "head_dim="),
    "headdim_v": "value_dim=",
}
_PLAN = {
    **_BATCH,
    **_SIZES,
    **dict.fromkeys(
        ("num_heads", "n_heads", "nheads", "heads", "num_qo_heads", "q_num_heads"), "q_heads= (and kv_heads=)"
    ),
    **dict.fromkeys(("seq_len", "seqlen", "sequence_length", "n"), "q_len= (and k_len=)"),
    **dict.fromkeys(("seqlen_q", "qo_len"), "q_len="),
    **dict.fromkeys(("seqlen_k", "kv_len"), "k_len="),
    **dict.fromkeys(("world_size", "cp_size", "num_ranks", "processes"), "ranks="),
    "mesh": "method='mesh' beside ranks=: every mesh of so many is looked at",
    "engine": "device='cuda', or nothing: it is where the arrays lie",
}
_KEPT = {
    **_SIZES,
    **dict.fromkeys(("num_heads", "n_heads", "nheads", "heads"), "kv_heads=, those of keys and values"),
    **dict.fromkeys(("num_layers", "n_layers", "num_hidden_layers"), "layers="),
}
_TOKENS = ("max_seq_len", "max_seqlen", "max_length", "max_len", "max_cache_len", "size", "n")
_WINDOWS = ("window", "window_size", "sliding_window")
_FIRST = ("keep_first", "num_sink_tokens", "sink_tokens", "sinks")
_CACHE = {
    **_BATCH,
    **_KEPT,
    **dict.fromkeys(_TOKENS, "capacity=, the most tokens of a sequence"),
    **dict.fromkeys(("sliding_window", "window_size"), "window=n: a token sees itself and the n - 1 before it"),
    **dict.fromkeys(("num_sink_tokens", "sink_tokens", "sinks"), "keep_first="),
    **dict.fromkeys(("page_size", "block_size", "num_pages", "num_blocks"), "PagePool(…) for pages"),
}
_POOL = {
    **_KEPT,
    **dict.fromkeys(("num_pages", "num_blocks", "max_num_pages"), "pages="),
    "block_size": "page_size=, a multiple of 16",
    **dict.fromkeys((*_WINDOWS, *_FIRST), _ALL_TOKENS),
    **dict.fromkeys(("batch", *_BATCH, "capacity", *_TOKENS), "nothing: sequences grow while pages are free"),
}
_ALWAYS = "nothing: a query sees the tokens up to its own; without k and v it sees all that are stored"
_ATTEND = {
    **dict.fromkeys(("causal", "is_causal"), _ALWAYS),
    **dict.fromkeys(_WINDOWS, "KVCache(window=n), or mask=sl.window(n - 1, 0)"),
    **dict.fromkeys(
        ("lengths", "q_lengths", "k_lengths", "seqlens", "seq_lens", "cu_seqlens", "cu_seqlens_q", "cache_seqlens"),
        "new_lengths=, the new tokens of each sequence: the cache knows those before",
    ),
    "score_mod": "score=, the same function: positions are those in the whole sequence",
    "mask_mod": "mask=, the same function: positions are those in the whole sequence",
    **dict.fromkeys(
        ("q_start", "k_start", "positions", "cache_position", "start_pos"), "nothing: the cache knows its lengths"
    ),
    **dict.fromkeys(
        ("past_key_values", "past_key_value", "past_key", "past_value", "kv_cache"),
        "nothing: the cache has the tokens of earlier calls",
    ),
    "engine": "nothing: it is where the cache lies",
    "precision": "nothing: products of float32 are float32's",
    "layout": "nothing: caches take (batch, heads, length, dim) of any strides: q.swapaxes(1, 2) of 'blhd'",
}
_PACKED_ATTEND = {
    "layout": "nothing: pools take (total new, heads, dim), one sequence's tokens after the other's",
    "slot_mapping": "nothing: the pool finds places for new tokens",
}
_PUT = {
    "layout": _ATTEND["layout"].replace("q.swap", "k.swap"),
    **dict.fromkeys(
        ("lengths", "q_lengths", "k_lengths", "seqlens", "seq_lens", "cu_seqlens", "cu_seqlens_k", "cache_seqlens"),
        _ATTEND["lengths"],
    ),
    **dict.fromkeys(
        ("q_start", "k_start", "positions", "cache_position", "start_pos", "input_pos", "slot_mapping"),
        "nothing: new tokens go behind those that are stored",
    ),
    **dict.fromkeys(("k_scale", "v_scale", "k_descale", "v_descale"), "nothing: a cache of codes finds scales itself"),
    **dict.fromkeys(
        ("q", "query", "causal", "is_causal", "mask", "score", "scale", "window", "return_lse"),
        "nothing: tokens are stored; attend() attends",
    ),
}
_STORED = {
    **dict.fromkeys(("page_table", "block_tables"), "block_table="),
    **dict.fromkeys(("cache_seqlens", "seq_lens", "seqused_k", "context_lens", "kv_lens", "lengths"), "k_lengths="),
    **dict.fromkeys(("k_cache", "key_cache"), "k_pages="),
    **dict.fromkeys(("v_cache", "value_cache"), "v_pages="),
    **dict.fromkeys(_INDICES, "block_table=, a row of page numbers for each sequence, and k_lengths="),
    "kv_layout": "nothing: pages are FlashInfer's 'NHD'; of 'HND' k_pages.swapaxes(1, 2), and so v_pages",
    **dict.fromkeys(("slot_mapping", "batch_indices", "positions"), "nothing: block_table= and k_lengths= say where"),
    **dict.fromkeys(("k_scale", "v_scale", "k_descale", "v_descale", "kv_cache_dtype", "kv_data_type"), _NO_CODES),
}
_KEYS = _STORED | {
    "k_start": "nothing: the first key of a sequence is at 0",
    "cu_seqlens_k": "k_lengths=, one for each sequence",
    "query_start_loc": "cu_seqlens_q= beside layout='lhd'",
    **dict.fromkeys(("max_query_len", "max_seq_len"), _OFFSETS_SAY.replace("cu_seqlens_k=", "k_lengths=")),
    "precision": "nothing: products of float32 are float32's",
    "score_mod": "score=, the same function: positions are those in the whole sequence",
    "mask_mod": "mask=, the same function: positions are those in the whole sequence",
    "is_causal": "causal=True, which aligns the last query with the last key",
    "window_size": "window=(left, right), in which None is no limit, flash-attn's -1",
    "sliding_window": "window=(n - 1, None) beside causal=True: n tokens, the query's own among them",
}
_APPENDED = _STORED | {
    **dict.fromkeys(
        (
            *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "append_indptr", "kv_append_indptr", "qo_indptr"),
            *("seqlens_new", "query_start_loc"),
        ),
        "new_lengths=, the new tokens of each sequence; packed ones are layout='lhd'",
    ),
    **dict.fromkeys(
        ("lengths", "seq_lens", "q_lengths"),
        "k_lengths= for the tokens that sequences have, new_lengths= for those that come",
    ),
    **dict.fromkeys(("causal", "is_causal", "q", "query"), "nothing: tokens are stored; attention_paged() attends"),
}
_BACKWARD = {
    **dict.fromkeys(("engine", "precision"), "nothing: gradients are computed on the CPU, as float32 has them"),
    **dict.fromkeys(("dout", "grad_output", "grad_out"), "d_out=, what flows back to out"),
}
_STATES = dict.fromkeys(
    ("out", "lse", "out_a", "lse_a", "v_a", "s_a", "v_b", "s_b", "out_partial", "lse_partial"),
    "merge(out1, lse1, out2, lse2), or merge([out1, …], [lse1, …])",
)
_IN_LAYER = "nothing: Attention({}) says it, where the layer is made"
_FORWARD = {
    **dict.fromkeys(("hidden_states", "query", "q", "input", "inputs", "hidden_state"), "x="),
    **dict.fromkeys(
        ("key", "value", "k", "v", "memory", "encoder_hidden_states", "key_value_states", "cross_states"),
        "context=, what keys and values are both made of; beside no context= that is x",
    ),
    **dict.fromkeys(
        ("attn_mask", "causal_mask", "src_mask", "tgt_mask"),
        "mask= of bool, True where a key is seen: nn.MultiheadAttention's is True where it is hidden",
    ),
    **dict.fromkeys(("block_mask", "mask_mod"), "mask=, the same function"),
    **dict.fromkeys(
        ("key_padding_mask", "src_key_padding_mask", "memory_key_padding_mask"),
        "attention_mask=~key_padding_mask: PyTorch's is True where a key is hidden",
    ),
    **dict.fromkeys(
        ("padding_mask", "encoder_attention_mask", "lengths", "q_lengths", "k_lengths", "seq_lens", "seqlens"),
        "attention_mask=, (batch, k_len), 1 where there is a token",
    ),
    **dict.fromkeys(("position_ids", "cache_position", "input_pos", "start_pos", "offset"), "positions="),
    **dict.fromkeys(
        ("position_embeddings", "rotary_emb", "freqs_cis", "freqs", "rope", "cos", "sin"),
        "rotation=(cos, sin), as for speedlight.rotary()",
    ),
    **dict.fromkeys(
        ("past_key_values", "past_key_value", "kv_cache", "layer_past", "past", "use_cache", "inference_params"),
        "cache=, a speedlight.KVCache, which keeps keys and values of all calls",
    ),
    **dict.fromkeys(("causal", "is_causal"), _IN_LAYER.format("causal=True")),
    **dict.fromkeys(_WINDOWS, _IN_LAYER.format("window=n")),
    **dict.fromkeys(("dropout", "dropout_p"), _IN_LAYER.format("dropout=p")),
    **dict.fromkeys(("scale", "softmax_scale", "scaling"), _IN_LAYER.format("scale=x")),
    **dict.fromkeys(
        ("score", "score_mod", "attn_bias", "bias", "position_bias", "alibi_slopes", "softcap"),
        _IN_LAYER.format("score=…"),
    ),
    **dict.fromkeys(("sinks", "s_aux", "learnable_sink"), _IN_LAYER.format("sinks=True")),
    **dict.fromkeys(("layer", "layer_idx", "layer_id"), _IN_LAYER.format("layer=n")),
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions"), "nothing: no weights are made"),
}
_TABLES = "cos= and sin=, a row for each position"
_SCALED = "cos= and sin= of the scaled angles; base= alone scales none"
_TURNED = {
    **dict.fromkeys(("q", "k", "query", "key"), "x=: queries and keys take a call each"),
    **dict.fromkeys(("t", "input", "inputs", "x_in"), "x="),
    **dict.fromkeys(("position_ids", "pos_ids", "input_pos", "cache_position"), "positions=, of each token"),
    **dict.fromkeys(("offset", "offsets", "seqlen_offset", "seqlen_offsets", "start_pos"), _FIRST_AT),
    **dict.fromkeys(("theta", "rope_theta", "rope_base", "rotary_base", "freq_base", "max_wavelength"), "base="),
    **dict.fromkeys(("interleave", "rotary_interleaved", "rope_interleave", "traditional"), "interleaved="),
    **dict.fromkeys(("is_neox", "is_neox_style", "neox"), "interleaved=, the other way round"),
    **dict.fromkeys(("dim", "rotary_dim", "rotary_dims", "rot_dim", "rotary_ndims", "rotary_embedding_dim"), "dims="),
    "partial_rotary_factor": "dims=, how many elements turn: that times head_dim",
    "inplace": "out=x",
    **dict.fromkeys(("freqs", "freqs_cis", "inv_freq", "cos_sin_cache", "rotary_emb", "position_embeddings"), _TABLES),
    **dict.fromkeys(("cos_cache", "rotary_cos", "cos_cached"), "cos="),
    **dict.fromkeys(("sin_cache", "rotary_sin", "sin_cached"), "sin="),
    **dict.fromkeys(("rope_scaling", "scaling_factor", "rope_scale", "scale"), _SCALED),
    **dict.fromkeys(("cu_seqlens", "cu_seqlens_q", "indptr", "max_seqlen"), _EACH_TOKENS),
    "unsqueeze_dim": "layout='bhld' for 1, the default, and 'blhd' for 2",
}
OF = {
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
_WINDOWED = dict.fromkeys(_WINDOWS, "mask=sl.window(n - 1, 0)")
# of calls over several processes, where they differ from those of the same name
OVER_RANKS = {
    "attention": {
        **dict.fromkeys(("dropout", "dropout_p", "seed"), "nothing: there is no dropout over several processes"),
        **dict.fromkeys(("engine", "precision"), "nothing: it runs on CPUs, and products of float32 are float32's"),
        "out": "nothing: results are new tensors",
        **dict.fromkeys(("ranks", "world_size", "process_group"), "group=, a process group, or mesh="),
    },
    "KVCache": dict.fromkeys(
        (*_WINDOWS, *_FIRST),
        "nothing: a mask of attend() may be sl.window(n - 1, 0), or each process has a speedlight.KVCache(window=n)",
    ),
    "KVCache.attend": _WINDOWED | {"out": "nothing: results are new tensors"},
}
CAPACITY = (
    "capacity: expected the most tokens of a sequence, on all processes together; got nothing. A window's cache is "
    "small: each process may have a speedlight.KVCache(window=n)."
)
_LAYER = {
    **dict.fromkeys(_HEADS, "kv_heads="),
    **dict.fromkeys(("embed_dim", "hidden_size", "d_model", "query_dim", "n_embd"), "dim="),
    **dict.fromkeys(("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"), "heads="),
    **dict.fromkeys(("head_size", "headdim", "dim_head"), "head_dim="),
    **dict.fromkeys(("kdim", "vdim", "kv_dim", "cross_attention_dim"), "context_dim=, of keys and values alike"),
    **dict.fromkeys(("qkv_bias", "attention_bias", "use_bias"), "bias=, of q, k and v, and out_bias="),
    "is_causal": "causal=True",
    **dict.fromkeys(("sliding_window", "window_size"), "window=n: a token sees itself and the n - 1 before it"),
    **dict.fromkeys(("rope_theta", "rope_base", "rotary_base", "theta", "base"), "rotary=, the base of angles"),
    **dict.fromkeys(("rotary_dim", "rotary_emb_dim", "partial_rotary_factor"), "rotary_dims=, how many elements turn"),
    **dict.fromkeys(("rotary_interleaved", "rotary_emb_interleaved"), "interleaved="),
    **dict.fromkeys(("attn_dropout", "attention_dropout", "dropout_p"), "dropout="),
    **dict.fromkeys(("softmax_scale", "scaling", "sm_scale"), "scale=, a factor of the scores"),
    **dict.fromkeys(("softcap", "attn_logit_softcapping"), _CAP),
    **dict.fromkeys(("layer_idx", "layer_id", "layer_index"), "layer=, whose part of a cache is this layer's"),
    "batch_first": "nothing: x is (batch, length, dim)",
}
MAKERS = {"KVCache": _CACHE, "PagePool": _POOL, "Attention": _LAYER}
LAYOUTS = {
    **dict.fromkeys(("sbhd", "lbhd", "tbhd"), "q.swapaxes(0, 1) is 'blhd'; so are k and v"),
    **dict.fromkeys(("hnd", "htd"), "of one item 'hld'; packed sequences are 'lhd'"),
    **dict.fromkeys(
        ("bsh", "bld", "bsd", "btd"), "split the last dimension into heads: q.reshape(b, l, heads, -1) is 'blhd'"
    ),
}
