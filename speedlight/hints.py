"""What other libraries call our arguments, and what differs: for the errors of those who come from elsewhere."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

from .errors import ArgumentTypeError, Error

_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

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
_OPTIONS = {
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
_ADAPTERS = {
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
_OF = {
    "attention_backward": _BACKWARD,
    "rotary": _TURNED,
    "plan": _PLAN,
    "attention_paged": _KEYS,
    "append_paged": _APPENDED,
    "KVCache.attend": _ATTEND,
    "PagePool.attend": _ATTEND | _PACKED_ATTEND,
    "merge": _STATES,
}
_WINDOWED = dict.fromkeys(_WINDOWS, "mask=sl.window(n - 1, 0)")
# of calls over several processes, where they differ from those of the same name
_OVER_RANKS = {
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
_CAPACITY = (
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
_MAKERS = {"KVCache": _CACHE, "PagePool": _POOL, "Attention": _LAYER}
_LAYOUTS = {
    **dict.fromkeys(("sbhd", "lbhd", "tbhd"), "q.swapaxes(0, 1) is 'blhd'; so are k and v"),
    **dict.fromkeys(("hnd", "htd"), "of one item 'hld'; packed sequences are 'lhd'"),
    **dict.fromkeys(
        ("bsh", "bld", "bsd", "btd"), "split the last dimension into heads: q.reshape(b, l, heads, -1) is 'blhd'"
    ),
}


def explained(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A call whose errors say what other libraries' arguments are called here. Not for what a signal must not divide:
    when a decorator's call returns, signals are looked for.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*args, **options)
        except (TypeError, Error) as error:
            explain(error, function, args, options)
            raise

    return call


def explain(error: Exception, function: Any, args: Sequence[Any], options: Collection[str]) -> None:
    """Raises what says more than an error of a call: one of Python's own, that arguments do not fit, or one of ours.

    Of a TypeError from within, whose call had all that it needs, nothing is said.
    """
    if isinstance(error, Error):
        if "lengths" in options:
            _named_lengths(error)
        return
    known, by_place = parameters(function)
    theirs = [name for name in options if name not in known]
    if theirs:
        raise unknown(function, theirs[0]) from None
    if len(args) > by_place < len(known):
        skipped = "self" in known
        named = ", ".join(known[skipped:by_place]) or "no argument"
        raise ArgumentTypeError(
            f"{_name(function)}: expected {named} by place, and others by name; got {len(args) - skipped} by place. "
            f"Write {'mask' if 'mask' in known else known[by_place]}=…, and so on."
        ) from None
    has_sizes = {"layers", "kv_heads", "head_dim"} <= set(options)
    if _over_ranks(function) and _name(function) == "KVCache" and has_sizes and "capacity" not in options:
        raise ArgumentTypeError(_CAPACITY) from None


def parameters(function: Any) -> tuple[list[str], int]:
    """Names that a function's arguments have, and how many of them may come by place."""
    code = inspect.unwrap(function).__code__
    return list(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]), code.co_argcount


def unknown(function: Any, name: str, further: Collection[str] = ()) -> Exception:
    """The error of an argument that a function has not: another library's, or a slip of the pen. `further`: options
    that it takes beside those of its signature.
    """
    hint = hint_of(function, name, further)
    if hint is not None:
        way = hint.replace("nothing", "Leave it out", 1) if hint.startswith("nothing") else f"Use {hint}"
        more = "".join([f" {text}" for names, text in _ADAPTERS.items() if name in names])
        attention = sys.modules["speedlight"].attention
        whose = "an argument of attention()" if name in parameters(attention)[0] else "another library's"
        called = f"{_home(function)}{_name(function)}"
        return ArgumentTypeError(f"{name}: expected the arguments of {called}(); got {whose}. {way}.{more}")
    from difflib import get_close_matches

    near = get_close_matches(name, [x for x in (*parameters(function)[0], *further) if x != "self"], 1)
    way = f" Did you mean {near[0]!r}?" if near else ""
    return TypeError(f"{_home(function)}{_name(function)}() got an unexpected keyword argument {name!r}.{way}")


def hint_of(function: Any, name: str, further: Collection[str] = ()) -> str | None:
    """What another library's argument is in a call of ours; None where nobody knows the name, or the call has no such
    option, nor is it among `further`.
    """
    called = _name(function)
    if _over_ranks(function) and name in (known := _OVER_RANKS.get(called, {})):
        return known[name]
    own = _MAKERS.get(called)
    if own is not None:
        return own.get(name)
    if name in _OF.get(called, {}):
        return _OF[called][name]
    hint = _OPTIONS.get(name) if called not in ("merge", "merge_states", "synchronize") else None
    return hint if hint is not None and options_in(hint) <= {*parameters(function)[0], *further} else None


def options_in(hint: str) -> set[str]:
    """Which of a call's options a hint tells to use."""
    return set(re.findall(r"\b(\w+)=", re.sub(r"\w\(.*?\)", "", hint)))


def _name(function: Any) -> str:
    return function.__qualname__.removesuffix(".__init__")


def _home(function: Any) -> str:
    """What tells a function from the one of the same name that most people call."""
    if _over_ranks(function):
        return "speedlight.distributed."
    return "reference." if function.__module__ == "speedlight.reference" else ""


def _over_ranks(function: Any) -> bool:
    return bool(function.__module__.startswith("speedlight.distributed"))


def _named_lengths(error: Error) -> None:
    """`lengths=` is both kinds of lengths from early on: what is wrong with them is wrong with it."""
    text = re.sub(r"^[qk]_lengths(?=: )", "lengths", str(error.args[0])) if error.args else ""
    if error.args and text != error.args[0]:
        way = " lengths= is of queries and keys alike; k_lengths= is of keys alone, q_lengths= of queries."
        error.args = (text + way * ("expected lengths from" in text), *error.args[1:])


def refuses_others(method: _F) -> _F:
    """Of a method without a decorator's frame around it: its `**theirs`, which are only there to be refused by name,
    are no part of the signature that it shows.
    """
    shown = inspect.signature(method)
    own = [x for x in shown.parameters.values() if x.kind is not x.VAR_KEYWORD]
    vars(method)["__signature__"] = shown.replace(parameters=own)
    return method


def of_layout(layout: Any) -> str:
    """A sentence for who gives a layout that we have not."""
    hint = _LAYOUTS.get(layout.lower()) if isinstance(layout, str) else None
    return "" if hint is None else f" {layout!r}: {hint}."


def of_heads(layout: str, sizes: Any) -> str:
    """A sentence for who gives heads and lengths that would fit each other the other way round."""
    other = {"bhld": "blhd", "blhd": "bhld"}.get(layout)
    if other is None or not 0 < sizes.k_len <= sizes.q_len < sizes.q_heads or sizes.q_len % sizes.k_len:
        return ""
    return f" If these are lengths, of {sizes.q_len} and {sizes.k_len} heads, give layout={other!r}."


def of_window(x: Any) -> str:
    """A sentence for who gives a cache the pair that attention() takes."""
    if not isinstance(x, (tuple, list)):
        return ""
    is_pair = len(x) == 2 and type(x[0]) is int and x[0] >= 0
    ours = f": attention()'s ({x[0]}, 0) is window={x[0] + 1}" if is_pair else ""
    return f" window=n is n tokens, a query's own among them{ours}."


def of_items(layout: str) -> str:
    """A sentence for who gives several lengths of what has no batch."""
    one = "layout='hld' is of one item: (batch, length, head_dim) of one head is q[:, None], by layout='bhld'."
    return f" {one}" if layout == "hld" else ""


def of_causal(x: Any) -> str:
    """A sentence for who gives a truth that is no bool."""
    return f" Write causal={bool(x)}." if type(x).__name__ in ("int", "bool", "bool_") and x in (0, 1) else ""


def of_masks(name: str, x: Any) -> str:
    """A sentence for who gives several masks, or an array's lists."""
    if name != "mask" or not isinstance(x, (list, tuple)):
        return ""
    numbers = all([isinstance(one, (list, tuple, bool, int, float)) for one in x])
    return " Try numpy.array(mask)." if numbers else " Join masks by &: sl.causal() & sl.prefix(3)."


def of_mask(name: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """A sentence for who gives an array of a shape that does not broadcast to (batch, q_heads, q_len, k_len)."""
    batch, _, q_len, k_len = whole
    if shape == (batch, k_len):
        padding = "A tokenizer's mask of (batch, k_len) is mask=sl.padding(attention_mask)"
        bools = f"{padding}; of bools it is mask[:, None, None, :], too"
        return f" {bools if name == 'mask' else f'Of (batch, k_len) write {name}[:, None, None, :]'}."
    if shape == (batch, q_len, k_len):
        return f" Of (batch, q_len, k_len) write {name}[:, None]."
    return ""


_MANY_HEADS = 256  # of keys: no model has as many, nor anybody 16 for each token


def warn_if_swapped(layout: str, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    """Heads and length in each other's place give numbers, and wrong ones. Told where a call is prepared: few tokens
    of many heads are common (a step of decoding, a short prompt), hundreds of heads for a handful of tokens are not.
    """
    if layout not in ("bhld", "blhd") or not len(q_shape) == len(k_shape) == 4:
        return
    heads, length = (1, 2) if layout == "bhld" else (2, 1)
    count, q_len, k_len = q_shape[heads], q_shape[length], k_shape[length]
    if not count == k_shape[heads] >= _MANY_HEADS or count < 16 * max(q_len, k_len) or not k_len or q_len % k_len:
        return
    other = "blhd" if layout == "bhld" else "bhld"
    warnings.warn(
        f"q of shape {q_shape} has {count} heads of {q_len} token{'s' * (q_len != 1)} by layout={layout!r}. If these "
        f"are {q_len} head{'s' * (q_len != 1)} of {count} tokens, give layout={other!r}.",
        stacklevel=_outside(),
    )


def _outside() -> int:
    """The stacklevel of the first frame that is not ours, seen from who asks."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("speedlight", "torch"):
        frame, level = frame.f_back, level + 1
    return max(level, 1)
