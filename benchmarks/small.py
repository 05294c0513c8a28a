"""Architectures of transformers made small from their configurations: two layers or so, 64 wide, seeded weights."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are random; nothing is fetched

import torch

transformers: Any = importlib.import_module("transformers")  # untyped, as in language_models.py
auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")

# the kind of an architecture is the first of these mappings that names it
_MAPPINGS = {
    "encoder-decoders": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "encoders": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "decoders": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_CTC_MAPPING_NAMES",
    "transcribers": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "multimodal": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",  # of which text alone is given
}
KINDS = tuple(_MAPPINGS)
TOKENS, NEW = 12, 6  # of a prompt, and generated
_VOCABULARY, _SAMPLES, _PIXELS = 99, 2000, 32
_MOST = 80_000_000  # parameters


def _alike(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# what configurations call their sizes
_SIZES: dict[str, Any] = {
    **_alike(_VOCABULARY, "vocab_size", "encoder_vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"),
    **_alike(64, "hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"),
    **_alike(64, "embed_dim", "word_embed_proj_dim", "d_embed", "hidden_dim"),
    **_alike(96, "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"),
    **_alike(96, "feed_forward_size", "ffn_hidden_size", "dff", "feed_forward_proj_size", "intermediate_size_mlp"),
    **_alike(32, "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"),
    **_alike(2, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "decoder_layers"),
    **_alike(3, "encoder_layers", "num_encoder_layers"),
    **_alike(4, "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    **_alike(4, "decoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"),
    **_alike(16, "head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "d_head"),
    **_alike(8, "qk_rope_head_dim", "window", "local_radius", "index_topk", "block_size"),
    **_alike(6, "sliding_window", "local_attention", "attention_chunk_size", "attention_window_size"),
    **_alike(4, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts"),
    **_alike(2, "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"),
    **_alike(1, "n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "num_expert_group"),
    **_alike(128, "max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_source_positions"),
    **_alike(128, "max_seq_len", "max_sequence_length", "max_encoder_position_embeddings"),
    **_alike(_PIXELS, "image_size"),
    **_alike(8, "patch_size", "mamba_n_heads"),
    **_alike(16, "hidden_size_per_layer_input"),
    **_alike(_VOCABULARY, "vocab_size_per_layer_input"),
    **_alike(0, "num_kv_shared_layers"),
    **_alike(0, "pad_token_id"),
    **_alike(1, "bos_token_id", "decoder_start_token_id"),
    **_alike(None, "eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "sep_token_id"),
}  # fmt: skip
# what some want beside
_HYBRID = ["linear_attention", "full_attention"]
_BERT = {"model_type": "bert", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 128}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QSA = _alike(4, "indexer_n_heads", "indexer_budget") | {"indexer_kv_heads": 1, "indexer_head_dim": 16,
                                                         "indexer_compress_ratio": 2}  # fmt: skip
_SECTIONS = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
_BESIDE: dict[str, dict[str, Any]] = {  # by the name of an architecture or of a part of one
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"ffn_hidden_size": 32}},
    "encoder-decoder": {"encoder": _BERT, "decoder": _BERT | {"is_decoder": True, "add_cross_attention": True}},
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "luke": {"entity_vocab_size": 50},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "nemotron": {"num_key_value_heads": 2},
    **_alike(_SECTIONS, "glm4v_text", "glm_ocr_text", "glmga_text", "paddleocr_vl_text", "qwen2_vl_text"),
    **_alike(_SECTIONS, "qwen2_5_vl_text", "qwen2_5_omni_text", "hunyuan_vl_text"),
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"embed_dim": 48, "depths": [2, 2], "num_heads": [3, 6], "window_size": 4, "patch_size": 4},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}


class Small(NamedTuple):
    """A model, and what it takes."""

    model: Any
    kind: str
    inputs: dict[str, torch.Tensor]

    @property
    def takes_masks(self) -> bool:
        """Tells if inputs are of tokens or samples, some of which may be padding."""
        return self.kind != "images" and "attention_mask" in inspect.signature(self.model.forward).parameters

    @property
    def generates(self) -> bool:
        return self.kind in ("decoders", "encoder-decoders", "multimodal") and self.model.can_generate()


def names(kind: str) -> Iterator[tuple[str, str]]:
    """Yields kinds and names of architectures."""
    seen: set[str] = set()
    for each, mapping in _MAPPINGS.items():
        for name in getattr(auto, mapping):
            if name not in seen and kind in ("", each):
                yield each, name
            seen.add(name)


def find(kind: str, name: str) -> Any:
    """Returns a model's class."""
    found = getattr(auto, _MAPPINGS[kind])[name]
    return getattr(transformers, found if isinstance(found, str) else found[0])


def make(kind: str, name: str) -> Small:
    """Makes a small model; ValueError where it does not become small."""
    model_class = find(kind, name)
    config_class = model_class.config_class
    config = configure(config_class, _BESIDE.get(name) or _BESIDE.get(config_class.model_type, {}))
    with torch.device("meta"):
        size = sum(x.numel() for x in model_class(config).parameters())
    if size > _MOST:
        raise ValueError(f"{size:,} parameters, which is not small")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    _draw(model)
    return Small(model, kind, _inputs(model, kind))


def configure(config_class: Any, beside: dict[str, Any] | None = None) -> Any:
    """Makes a small configuration, parts of its own too."""
    takes = inspect.signature(config_class.__init__).parameters
    try:
        usual = config_class()
    except Exception:  # which wants more
        usual = None
    given = {name: x for name, x in _SIZES.items() if name in takes and _fits(x, _of(usual, name), takes[name])}
    given |= _shorten(usual, takes) | (beside or {})
    for part, part_class in getattr(config_class, "sub_configs", {}).items():
        own = _of(usual, part)
        part_class = type(own) if own is not None else part_class
        if part in takes and part not in given and "Auto" not in part_class.__name__:
            given[part] = configure(part_class, _BESIDE.get(part_class.model_type, {}))
    return config_class(**given)


def _of(usual: Any, name: str) -> Any:
    try:
        return getattr(usual, name, None)
    except Exception:  # of an attribute that layers have each their own of
        return None


def _fits(value: Any, usual: Any, parameter: Any) -> bool:
    """Tells if a number may stand there: where lists are usual, none, and None only where it may be."""
    return not isinstance(usual, (list, tuple)) and (value is not None or "None" in str(parameter.annotation))


def _shorten(usual: Any, takes: Any) -> dict[str, Any]:
    """Returns grouped heads where there are, and of every list of layers as much as shows all kinds."""
    given: dict[str, Any] = {}
    names = ("num_attention_heads", "num_key_value_heads")
    heads, of_keys = (_of(usual, x) or (takes[x].default if x in takes else None) for x in names)
    if isinstance(of_keys, int) and "num_key_value_heads" in takes:
        given["num_key_value_heads"] = 4 if of_keys == heads else 1 if of_keys == 1 else 2
    kinds, count = _of(usual, "layer_types"), _of(usual, "num_hidden_layers")
    if not isinstance(kinds, list) or "layer_types" not in takes:
        return given
    few = list(dict.fromkeys(kinds))
    few = few * 2 if len(few) == 1 else few
    layers = "num_hidden_layers" if "num_hidden_layers" in takes else usual.attribute_map.get("num_hidden_layers")
    given |= {"layer_types": few, layers: len(few)}
    for name in takes:
        x = _of(usual, name)
        if name != "layer_types" and isinstance(x, list) and len(x) == count:
            given[name] = x[: len(few)]
    return given


def _draw(model: Any) -> None:
    """Draws weights large enough for attention to matter: as made, a small model's scores are nearly 0."""
    torch.manual_seed(1)
    for x in model.parameters():
        if not x.is_floating_point():
            continue
        with torch.no_grad():
            if x.ndim >= 2:
                x.normal_(std=x.shape[-1] ** -0.5)
            else:
                x.add_(torch.randn_like(x), alpha=0.05)
    if getattr(model, "generation_config", None) is not None:
        ends = _alike(None, "eos_token_id", "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")
        model.generation_config.update(**ends, pad_token_id=0, bos_token_id=1, decoder_start_token_id=1)


def _inputs(model: Any, kind: str) -> dict[str, torch.Tensor]:
    r = torch.Generator().manual_seed(2)
    if kind == "images":
        side, channels = (getattr(model.config, x, y) for x, y in (("image_size", _PIXELS), ("num_channels", 3)))
        side = side if isinstance(side, int) else side[0]
        return {"pixel_values": torch.randn(2, channels, side, side, generator=r)}
    if kind in ("speech", "transcribers"):
        return _sound(model, r)
    inputs = {"input_ids": torch.randint(3, _VOCABULARY, (2, TOKENS), generator=r)}
    if kind in ("encoder-decoders", "multimodal") and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, _VOCABULARY, (2, TOKENS // 2), generator=r)
    return inputs


def _sound(model: Any, r: torch.Generator) -> dict[str, torch.Tensor]:
    """Returns samples, or frames of a spectrogram; and what a decoder begins with."""
    config, sizes = (
        model.config,
        ("feature_projection_input_dim", "input_dim", "num_mel_bins", "input_feat_per_channel"),
    )
    configs = (config, _of(config, "encoder_config"), _of(config, "audio_config"))
    size = next((x for of in configs for name in sizes if isinstance(x := _of(of, name), int)), 80)
    match model.main_input_name, _of(config, "model_type"):
        case "input_values", _:
            inputs = {"input_values": torch.randn(2, _SAMPLES, generator=r)}
        case _, "whisper":
            inputs = {"input_features": torch.randn(2, size, 2 * config.max_source_positions, generator=r)}
        case _:
            inputs = {"input_features": torch.randn(2, 64, size, generator=r)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.randint(3, _VOCABULARY, (2, TOKENS // 2), generator=r)
    return inputs
