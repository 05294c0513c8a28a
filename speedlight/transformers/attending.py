"""attention_forward(), which transformers calls for each layer, in attention()'s terms."""

from __future__ import annotations

from typing import Any

import torch
import transformers.masking_utils as masking_utils
from transformers.cache_utils import Cache as ModelCache

from .. import ArgumentError, ArgumentTypeError, UnsupportedError, documents
from ..adapting import Renamed, draw_seed, shown
from ..arrays.latents import KeyPair
from ..host.insides import TORCH, as_left_alone
from ..host.insides import TRANSFORMERS as INSIDES
from ..torch.attending import attend, attention
from .absorbing import Expanded, attend_to_latents
from .caches import Kept
from .masks import MaskSpec, softcap_score
from .options import TRANSFORMERS

# options that models hand on and that change nothing, those that are looked at, and what register(harmless=…) names
harmless: frozenset[str] = frozenset((*TRANSFORMERS.ignored, "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions"))
_BIASED = Renamed({**TRANSFORMERS.names, "score": "position_bias"})


@TORCH.skip  # and it runs _untraced: compiler.disable() around each call took an eighth of attention
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cache: Any = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attends for a layer, as transformers calls it under `attn_implementation="speedlight"`.

    Args:
        module: the layer. Its `is_causal` counts where there is no mask and more than one query, as in PyTorch's:
            aligned at the first query and key.
        query: (batch, q_heads, q_len, head_dim), of any strides.
        key: (batch, kv_heads, k_len, head_dim), not repeated; or what speedlight.transformers.Cache.update() gave.
        value: (batch, kv_heads, k_len, value_dim).
        attention_mask: what attention_mask() made; or a tensor that broadcasts to (batch, q_heads, q_len, k_len):
            bool, True where a key is seen, or one that is added to scores; or None, where the model makes no mask.
        dropout: how likely a weight is dropped; the seed comes from PyTorch's default generator.
        scaling: factor of the scores. Default 1/sqrt(head_dim).
        is_causal: instead of the module's.
        sliding_window: nothing; the mask says it.
        softcap: scores become softcap · tanh(score / softcap).
        s_aux: a logit per query head that joins the softmax's denominator, as gpt-oss has it.
        position_bias: added to scores; broadcasts to (batch, q_heads, q_len, k_len).
        sinks: a logit per row that joins the softmax's denominator, as Inkling 2 has it: (batch, q_heads, q_len, 1).
        cache: a PagedAttentionCache of continuous batching, which takes key and value and gives those to attend to;
            any other cache of transformers changes nothing.
        more: cu_seq_lens_q and cu_seq_lens_k, offsets of packed sequences (batch 1); indices, ints of (batch, q_len,
            count), the keys that sparse attention has chosen of those that the mask shows; names that change nothing;
            any other, if it is not None or False, is an error.

    Returns:
        (output, None): (batch, q_len, q_heads, value_dim), contiguous. There are no weights.

    Raises:
        speedlight.Error: weights are asked for; a padding mask would be dropped; a mask that does not fit; an unknown
            option.

    >>> import torch
    >>> from speedlight.transformers import attention_forward, attention_mask
    >>> q, k = torch.ones(2, 4, 8, 16), torch.ones(2, 2, 8, 16)
    >>> attention_forward(torch.nn.Module(), q, k, k, attention_mask(2, 8, 8))[0].shape
    torch.Size([2, 8, 4, 16])
    """
    if TORCH.get_eval_frame_callback() is not None:  # torch.compile would look into what is called here
        given = dict(locals())
        return _untraced(**given.pop("more"), **given)
    if type(key) is Expanded:  # of latent attention
        given = dict(locals())
        return attend_to_latents(attention_forward, **given.pop("more"), **given)
    if INSIDES.active_collector.get() or "output_attentions" in more:
        _check_weights(more)
    chosen = None
    if more and not harmless.issuperset(more):
        chosen, attention_mask, more = _read_chosen(module, value, attention_mask, more)
        _check_unknown(module, more)
    if chosen is None and isinstance(attention_mask, torch.Tensor) and hasattr(module, "compressor"):
        chosen = _find_shown(module, query, attention_mask)
    if isinstance(cache, ModelCache):  # of a model that hands on what it has, its past_key_values before 5.24
        cache = None
    elif cache is not None:
        key, value = _append_paged(module, key, value, cache, more)
    softcap = None if softcap is None else float(softcap)  # known by its value
    kept = (key, value) if type(key) is Kept and type(value) is Kept else None
    if type(attention_mask) is MaskSpec:
        keys = value.shape[2]
        if keys != attention_mask.k_len or query.shape[2] != attention_mask.q_len:
            _check_fits(attention_mask, query, value)
        is_offset = more.get("cu_seq_lens_q") is not None
        if attention_mask.q_len > 1 and not is_offset:
            attention_mask.compare(more.get("position_ids"))
        # packed sequences have another layout
        if cache is s_aux is position_bias is sinks is chosen is None and not dropout and not is_offset:
            if kept is not None:
                with TRANSFORMERS.renamed:
                    out = kept[0].layer.attend_step(query, kept[0], attention_mask, scaling, softcap)
                if out is not None:
                    return out, None
            else:
                attention_mask, record = attention_mask.record(scaling, softcap)
                if attention_mask.k_len < keys:
                    key, value = key[:, :, : attention_mask.k_len], value[:, :, : attention_mask.k_len]
                if record is not None:
                    with TRANSFORMERS.renamed:
                        out = attend(query, key, value, record)
                    return out.transpose(1, 2).contiguous(), None
    elif attention_mask is None:
        _check_masked(module)
    options: dict[str, Any] = {"scale": scaling}
    if chosen is not None:
        options["indices"] = chosen
    if softcap is not None or position_bias is not None:
        options["score"] = _make_score(softcap, position_bias)
    if s_aux is not None:
        options["sink_logits"] = s_aux if torch.is_grad_enabled() else s_aux.detach()
    if dropout:
        options |= {"dropout": dropout, "seed": int(draw_seed())}
    if kept is not None:
        with TRANSFORMERS.renamed:
            out = kept[0].layer.attend_kept(query, kept[0], attention_mask, options) if sinks is None else None
        if out is not None:
            return out, None
        key, value = kept[0].stored(), kept[1].stored()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    hidden = _read_mask(query, value, attention_mask, causal, more.get("position_ids"))
    if "score" in options and "score" in hidden:
        hidden = {"score": [options["score"], hidden["score"]]}
    options |= hidden
    offsets = options.get("cu_seqlens_q", more.get("cu_seq_lens_q"))
    if offsets is not None and not isinstance(attention_mask, torch.Tensor):
        if sinks is not None:
            raise UnsupportedError("sinks: expected no packed sequences beside them; give documents as a batch.")
        return _attend_packed(query, key, value, offsets, options, more.get("cu_seq_lens_k")), None
    if query.shape[0] != value.shape[0] and query.shape[0] == 1:  # learned queries
        query = query.expand(value.shape[0], -1, -1, -1)
    with TRANSFORMERS.renamed if position_bias is None else _BIASED:
        if sinks is not None:
            return _attend_beside_sinks(query, key, value, sinks, options).transpose(1, 2).contiguous(), None
        return attention(query, key, value, **options).transpose(1, 2).contiguous(), None


_untraced: Any = torch.compiler.disable(as_left_alone(attention_forward))


def _attend_beside_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attends where each row has a sink: a row of weights is as much smaller as the denominator grows."""
    if sinks.shape != (*query.shape[:3], 1):
        raise ArgumentError(
            f"sinks: expected (batch, q_heads, q_len, 1) = {(*query.shape[:3], 1)}; got {tuple(sinks.shape)}. A logit "
            "per head is s_aux."
        )
    out, lse = attention(query, key, value, return_lse=True, **options)
    return out * torch.sigmoid(lse[..., None] - sinks).to(out.dtype)


def _check_weights(more: dict[str, Any]) -> None:
    """Raises where weights are asked for: they are never made."""
    asked = INSIDES.active_collector.get()
    if more.get("output_attentions") or (asked and any(["attentions" in name for name in asked])):
        way = TRANSFORMERS.refused["output_attentions"]
        raise UnsupportedError(f"output_attentions: expected False; speedlight makes no matrix of weights. {way}")


def _check_unknown(module: Any, more: dict[str, Any]) -> None:
    for name in more.keys() - harmless:
        if more[name] is not None and more[name] is not False:
            raise UnsupportedError(
                f"{name}: {type(module).__name__} gives attention an option that speedlight does not know; got "
                f"{shown(more[name])}. If it changes nothing of the attention, register(harmless=({name!r},)); else "
                "use another attn_implementation."
            )


def _read_chosen(
    module: Any, key: torch.Tensor, mask: Any, more: dict[str, Any]
) -> tuple[torch.Tensor | None, Any, dict[str, Any]]:
    """Returns keys that an indexer has chosen, or a mask of blocks of keys, and the options that are left.

    "indices" are DeepSeek-V3.2's and its kin's; "block_indices" MiniMax-M3's, whose indexer knows what they say.
    """
    if not isinstance(mask, (MaskSpec, torch.Tensor)):
        return None, mask, more
    chosen, blocks = (None if name in harmless else more.get(name) for name in ("indices", "block_indices"))
    make = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if blocks is not None and make is not None:
        chosen = None
        mask = make(blocks, mask, key.shape[2], key.dtype, key.device, None)
    elif isinstance(chosen, torch.Tensor) and not chosen.is_floating_point() and chosen.ndim == 3:
        is_packed = isinstance(mask, MaskSpec) and mask.pattern.packed is not None
        if is_packed or more.get("cu_seq_lens_q") is not None:
            mask = mask.dense() if isinstance(mask, MaskSpec) else mask  # numbers count from the row's first key
        if key.device.type != "cpu":  # where attention() takes masks alone
            mask, chosen = _hide_others(chosen, mask, key), None
    else:
        return None, mask, more
    return chosen, mask, {name: x for name, x in more.items() if name not in ("indices", "block_indices")}


def _hide_others(chosen: torch.Tensor, mask: Any, key: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that shows the chosen keys that the mask shows."""
    dense: Any = mask.dense() if isinstance(mask, MaskSpec) else mask
    hidden = torch.ones(*chosen.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
    hidden = hidden.scatter(-1, chosen.long(), False)[:, None]
    return dense & ~hidden if dense.dtype == torch.bool else dense.masked_fill(hidden, torch.finfo(dense.dtype).min)


def _find_shown(module: Any, query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
    """Returns the few keys that a tensor shows to each query, of a layer whose indexer says there what it has chosen.

    DeepSeek-V4's layers do so. Returns None where it shows many keys, or none to some query: that sees an average.
    """
    indexer = getattr(module.compressor, "indexer", None)
    if (
        indexer is None
        or mask.device.type != "cpu"
        or not mask.is_floating_point()
        or mask.shape[:3] != (query.shape[0], 1, query.shape[2])
    ):
        return None
    rows, keys = mask[:, 0].detach(), mask.shape[3]
    shown = rows == 0
    counts, hidden = shown.sum(-1), rows <= torch.finfo(mask.dtype).min
    if not counts.numel() or not 0 < int(counts.min()) <= int(counts.max()) <= keys // 2 or not (shown | hidden).all():
        return None
    numbers = torch.where(shown, torch.arange(keys, device=mask.device), -1)
    return numbers.sort(-1, descending=True).values[..., : int(counts.max())]


def _check_masked(module: Any) -> None:
    """Raises where transformers would drop padding without a word: under names that only the function was registered
    for. Models that make no masks give none, either.
    """
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is not None and name not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS:
        raise UnsupportedError(
            f"attention_mask: transformers makes no masks for attn_implementation={name!r}, so padding would be "
            f"dropped. Call AttentionMaskInterface.register({name!r}, speedlight.transformers.attention_mask), or use "
            "speedlight.transformers.register()."
        )


def _append_paged(module: Any, key: Any, value: Any, cache: Any, more: dict[str, Any]) -> tuple[Any, Any]:
    if not isinstance(cache, INSIDES.PagedAttentionCache):
        raise ArgumentTypeError(f"cache: expected a PagedAttentionCache; got {type(cache).__name__}.")
    paged: Any = cache
    return paged.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=more)


def _make_score(softcap: float | None, position_bias: torch.Tensor | None) -> Any:
    if softcap is None:
        return position_bias
    if position_bias is not None:
        raise UnsupportedError("position_bias: expected None beside softcap, as no model has both; got a tensor.")
    return softcap_score(softcap)


def _read_mask(query: torch.Tensor, key: torch.Tensor, mask: Any, is_causal: bool, places: Any) -> dict[str, Any]:
    """Returns options of attention() that say what is hidden."""
    if type(mask) is MaskSpec:
        return mask.options()
    if mask is None:
        if not (is_causal and query.shape[2] > 1):
            return {}
        packed = _find_documents(query, key, places)
        return {"causal": "top-left"} | ({} if packed is None else {"mask": packed})
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        raise ArgumentTypeError(
            "attention_mask: expected what speedlight.transformers.attention_mask() makes, or a tensor of 4 dimensions "
            f"that broadcasts to (batch, q_heads, q_len, k_len); got {shown(mask)}."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ArgumentTypeError(
            "attention_mask: of 4 dimensions, expected bool, True where a key is seen, or floats, which are added to "
            f"scores; got {mask.dtype}. Where 1 is a key that is seen, use attention_mask.bool()."
        )
    want = (max(query.shape[0], key.shape[0]), query.shape[1], query.shape[2], key.shape[2])
    if any([n not in (1, most) for n, most in zip(mask.shape, want, strict=True)]):
        raise ArgumentError(
            f"attention_mask: expected a shape that broadcasts to (batch, q_heads, q_len, k_len) = {want}, with the "
            f"keys of a cache counted; got {tuple(mask.shape)}."
        )
    return {"mask" if mask.dtype == torch.bool else "score": mask}


def _find_documents(query: torch.Tensor, key: torch.Tensor, places: Any) -> Any:
    """Returns a mask of packed sequences that position_ids alone tell: DeepSpeed's Ulysses drops every mask."""
    length = query.shape[2]
    if not isinstance(places, torch.Tensor) or places.ndim != 2 or places.shape[1] != length or key.shape[2] != length:
        return None
    begins = places[:, 1:] != places[:, :-1] + 1
    if not begins.any():
        return None
    ids = torch.nn.functional.pad(begins.cumsum(1), (1, 0))
    return documents(ids if len(ids) > 1 else ids[0])


def _check_fits(mask: MaskSpec, query: torch.Tensor, key: torch.Tensor) -> None:
    if key.shape[2] != mask.k_len:
        raise ArgumentError(f"key: expected {mask.k_len} keys, for which the mask was made; got {key.shape[2]}.")
    if query.shape[2] != mask.q_len and mask.looks_at_queries:
        raise ArgumentError(f"query: expected {mask.q_len} queries, for which the mask was made; got {query.shape[2]}.")


def _attend_packed(
    query: torch.Tensor, key: Any, value: torch.Tensor, offsets: Any, options: dict[str, Any], of_keys: Any
) -> torch.Tensor:
    """Attends in sequences that lie one after the other in a batch of one."""
    if query.shape[0] != 1:
        raise ArgumentError(f"cu_seq_lens_q: expected a batch of one, whose tokens they cut; got {query.shape[0]}.")
    if "mask" in options or "k_lengths" in options:
        raise UnsupportedError("cu_seq_lens_q: expected no attention_mask beside them; got one.")
    if type(key) is KeyPair:  # keys in two parts, which packed sequences do not have
        key, value = key.joined()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options = {name: x for name, x in options.items() if name not in ("cu_seqlens_q", "q_start")}
    out = attention(q, k, v, layout="lhd", cu_seqlens_q=offsets, cu_seqlens_k=of_keys, **options)
    return out[None].contiguous()
