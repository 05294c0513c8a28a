"""A Llama of two layers in float64 for tests of speedlight.transformers; its tokens and their paddings."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from tolerance import assert_equal  # noqa: F401 - for those who import the rest

import speedlight.transformers

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig, LlamaForCausalLM

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SIZES = {
    "vocab_size": 61, "hidden_size": HEADS * DIM, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64, "eos_token_id": None,
    "bos_token_id": 1,
}  # fmt: skip
LEFT = torch.tensor([[0] * 5 + [1] * 8, [1] * 13]).bool()
RIGHT, HOLES = LEFT.flip(0, 1), torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1], [0] * 3 + [1] * 10]).bool()


@pytest.fixture(scope="module", autouse=True)
def registered():
    speedlight.transformers.register()
    yield
    speedlight.transformers.unregister()


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, name_or_path="small/llama")).double().eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(1))


# what models and generate() call their cache: transformers 5.24 has renamed it
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def as_called(options):
    """Options of a model, with past_key_values under this release's name."""
    return {CACHE if name == "past_key_values" else name: x for name, x in options.items()}


def logits(model, name, tokens, **options):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(tokens, **as_called(options)).logits


def generated(model, name, tokens, **options):
    model.set_attn_implementation(name)
    return model.generate(tokens, max_new_tokens=9, do_sample=False, **as_called(options))
