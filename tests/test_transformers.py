"""speedlight.transformers: masks, the attention function and the cache, against what transformers documents."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL
from tolerance import assert_within

import speedlight as sl
import speedlight.transformers

pytestmark = pytest.mark.usefixtures("one_kernel")  # kernels of few shapes: engines' tests have the others

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, masking_utils
    from transformers.cache_utils import DynamicCache, StaticCache

Cache, attend, mask_of = (getattr(speedlight.transformers, x) for x in ("Cache", "attention_forward", "attention_mask"))
BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SIZES = {
    "vocab_size": 61, "hidden_size": HEADS * DIM, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64, "eos_token_id": None,
    "bos_token_id": 1,
}  # fmt: skip
LEFT = torch.tensor([[0] * 5 + [1] * 8, [1] * 13]).bool()
RIGHT, HOLES = LEFT.flip(0, 1), torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1], [0] * 3 + [1] * 10]).bool()
PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0]])


@pytest.fixture(scope="module", autouse=True)
def registered():
    speedlight.transformers.register()
    yield
    speedlight.transformers.unregister()


def drawn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def formula(q, k, v, seen, *, scaling=None, softcap=None, s_aux=None, position_bias=None):
    """What transformers' eager attention computes, in float64; rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if position_bias is None else scores + position_bias
    scores = scores.masked_fill(seen.logical_not(), -math.inf)
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], 3)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), -1).masked_fill(empty, 0)
    return (weights[..., : k.shape[2]] @ v).transpose(1, 2)


def assert_equal(got, want, what="out"):
    """Of two computations in float64."""
    want = want.detach().numpy()
    assert_within(got, want, 1e-12 * (1 + np.abs(want)), what, zeros_allowed=True)


def dense(**options):
    """transformers' own mask of the same arguments: (batch, 1, q_len, k_len)."""
    return masking_utils.sdpa_mask(**options, allow_is_causal_skip=False, allow_is_bidirectional_skip=False)


def packed(mask_function):
    positions = PACKED
    sequence = masking_utils.find_packed_sequence_indices(positions)
    return masking_utils.packed_sequence_compatibility_function(mask_function, positions, sequence)


m = masking_utils
SQUARE = {"q_length": 13, "kv_length": 13}
STEP = {"q_length": 1, "kv_length": 13, "q_offset": 12}
CHUNK = {"q_length": 4, "kv_length": 9, "q_offset": 9, "kv_offset": 4}
PATTERNS = {
    "causal": {**SQUARE},
    "causal, left": {**SQUARE, "attention_mask": LEFT},
    "causal, right": {**SQUARE, "attention_mask": RIGHT},
    "causal, holes": {**SQUARE, "attention_mask": HOLES},
    "step": {**STEP},
    "step, left": {**STEP, "attention_mask": LEFT},
    "chunk": {**CHUNK, "attention_mask": LEFT},
    "both ways": {**SQUARE, "mask_function": m.bidirectional_mask_function},
    "both ways, right": {**SQUARE, "mask_function": m.bidirectional_mask_function, "attention_mask": RIGHT},
    "both ways, left": {**SQUARE, "mask_function": m.bidirectional_mask_function, "attention_mask": LEFT},
    "sliding": {**SQUARE, "mask_function": m.sliding_window_causal_mask_function(4), "attention_mask": LEFT},
    "sliding chunk": {**CHUNK, "mask_function": m.sliding_window_causal_mask_function(6)},
    "sliding both ways": {
        **SQUARE, "mask_function": m.sliding_window_bidirectional_mask_function(3), "attention_mask": RIGHT
    },
    "chunked": {**SQUARE, "mask_function": m.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))},
    "chunked, left": {
        **SQUARE, "mask_function": m.chunked_causal_mask_function(4, torch.tensor([5, 0])), "attention_mask": LEFT
    },
    "chunked chunk": {**CHUNK, "mask_function": m.chunked_causal_mask_function(4, torch.tensor([2, 0]))},
    "packed": {**SQUARE, "mask_function": packed(m.causal_mask_function)},
    "packed, sliding": {**SQUARE, "mask_function": packed(m.sliding_window_causal_mask_function(3))},
    "packed, chunked": {
        **SQUARE,
        "mask_function": packed(m.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))),
    },
    "blocks": {
        **SQUARE,
        "mask_function": m.or_masks(
            m.causal_mask_function, m.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2, 2, 2]] * 2))
        ),
    },
    "prefix": {**SQUARE, "mask_function": m.or_masks(m.causal_mask_function, lambda b, h, i, j: j < 5)},
    "static": {"q_length": 7, "kv_length": 16, "q_offset": torch.tensor(3), "attention_mask": LEFT[:, :10]},
}  # fmt: skip


LONGER = ("causal, holes", "both ways, left", "chunked chunk", "packed, sliding", "packed, chunked")  # in long runs


@pytest.mark.parametrize("name", [x for x in PATTERNS if FULL or x not in LONGER])
def test_masks(name):
    """A mask is seen as transformers' own tensor of it would be."""
    given = {"batch_size": BATCH, **PATTERNS[name]}
    q, k = drawn(BATCH, HEADS, given["q_length"], DIM), drawn(BATCH, KV_HEADS, given["kv_length"], DIM, seed=1)
    spec = mask_of(**given)
    assert "MaskSpec" in repr(spec)
    out, weights = attend(torch.nn.Module(), q, k, k, spec)
    assert weights is None and out.is_contiguous()
    assert_equal(out, formula(q, k, k, dense(**given)))


def test_packed_in_one_row():
    """A batch of one is cut into its sequences; offsets that a collator made say the same."""
    positions = PACKED[:1]
    sequence = masking_utils.find_packed_sequence_indices(positions)
    of = masking_utils.packed_sequence_compatibility_function(
        m.sliding_window_causal_mask_function(4), positions, sequence
    )
    given = {"batch_size": 1, **SQUARE, "mask_function": of}
    q, k = drawn(1, HEADS, 13, DIM), drawn(1, KV_HEADS, 13, DIM, seed=1)
    spec = mask_of(**given)
    assert spec.options()["cu_seqlens_q"] == [0, 4, 10, 13]
    want = formula(q, k, k, dense(**given))
    assert_equal(attend(torch.nn.Module(), q, k, k, spec)[0], want)
    offsets = torch.tensor([0, 4, 10, 13], dtype=torch.int32)
    plain = mask_of(1, 13, 13, mask_function=m.sliding_window_causal_mask_function(4))
    assert_equal(attend(torch.nn.Module(), q, k, k, plain, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)[0], want)


def test_packed_by_positions_alone():
    """Where no mask comes, as under DeepSpeed's Ulysses, position_ids that begin anew tell what is packed."""
    q, k = drawn(2, HEADS, 13, DIM), drawn(2, KV_HEADS, 13, DIM, seed=1)
    module = torch.nn.Module()
    causal = torch.ones(13, 13, dtype=torch.bool).tril()
    same = (PACKED[:, :, None] - PACKED[:, None] == torch.arange(13)[:, None] - torch.arange(13)).to(torch.bool)
    assert not same.all()
    assert_equal(attend(module, q, k, k, None, position_ids=PACKED)[0], formula(q, k, k, (same & causal)[:, None]))
    assert_equal(attend(module, q, k, k, None, position_ids=torch.arange(13)[None])[0], formula(q, k, k, causal))
    assert_equal(
        attend(module, q[:, :, :5], k, k, None, position_ids=PACKED[:, :5])[0], formula(q[:, :, :5], k, k, causal[:5])
    )


def test_no_mask_is_made():
    """What a mask holds does not grow with q_len times k_len."""
    spec = mask_of(1, 1 << 20, 1 << 20, mask_function=m.sliding_window_causal_mask_function(4096))
    assert spec.options() == {"causal": True, "window": (4095, None), "q_start": 0}
    step = mask_of(1, 1, 1 << 20, q_offset=(1 << 20) - 1, attention_mask=torch.ones(1, 1 << 20, dtype=torch.bool))
    assert step.options() == {} and step.in_cache(None) is None


@pytest.mark.parametrize("dims", [(24, 16), (DIM, DIM)] if FULL else [(24, 16)], ids=str)
def test_options(dims):
    """Soft caps, sinks, a bias, a scale, masks as tensors, other value dims: forwards and backwards."""
    dim, value_dim = dims
    seen = dense(batch_size=BATCH, **SQUARE, attention_mask=LEFT)
    spec, bias = mask_of(BATCH, 13, 13, attention_mask=LEFT), drawn(1, HEADS, 13, 13)
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min).to(torch.float64)
    some = LEFT[:, None, :, None]  # rows that see something
    cases = [
        ({"softcap": 2.0, "scaling": 0.3}, spec), ({"s_aux": drawn(HEADS)}, spec), ({"position_bias": bias}, added),
        ({}, seen), ({}, added), ({"position_bias": bias}, spec),
    ]  # fmt: skip
    for options, mask in cases if FULL else cases[:3]:
        q, k, v = (
            drawn(BATCH, h, 13, d, seed=n).requires_grad_()
            for n, (h, d) in enumerate(((HEADS, dim), (KV_HEADS, dim), (KV_HEADS, value_dim)))
        )
        learned = [x.requires_grad_() for x in options.values() if isinstance(x, torch.Tensor)]
        flow, results = drawn(BATCH, 13, HEADS, value_dim, seed=9) * some.transpose(1, 2), []
        for out in (attend(torch.nn.Module(), q, k, v, mask, **options)[0], formula(q, k, v, seen, **options)):
            results.append((out * some.transpose(1, 2), *torch.autograd.grad(out, [q, k, v, *learned], flow)))
        for got, want in zip(*results, strict=True):
            assert_equal(got, want)


def test_dropout_comes_from_pytorchs_generator():
    q, module = drawn(1, HEADS, 13, DIM), torch.nn.Module()
    outs = []
    for _ in range(2):
        torch.manual_seed(3)
        outs.append(attend(module, q, q, q, mask_of(1, 13, 13), dropout=0.5)[0])
    assert torch.equal(*outs) and not torch.equal(outs[0], attend(module, q, q, q, mask_of(1, 13, 13), dropout=0.5)[0])


def test_without_a_mask_the_module_says_whether_it_is_causal():
    module, q, k = torch.nn.Module(), drawn(1, HEADS, 5, DIM), drawn(1, KV_HEADS, 9, DIM)
    lower, every = torch.ones(5, 9, dtype=torch.bool).tril(), torch.ones(5, 9, dtype=torch.bool)
    assert_equal(attend(module, q, k, k, None)[0], formula(q, k, k, lower))  # PyTorch's alignment
    assert_equal(attend(module, q, k, k, None, is_causal=False)[0], formula(q, k, k, every))
    module.is_causal = False
    assert_equal(attend(module, q, k, k, None)[0], formula(q, k, k, every))
    assert_equal(attend(module, q[:, :, :1], k, k, None, is_causal=True)[0], formula(q[:, :, :1], k, k, every[:1]))


def test_what_is_refused():
    module, q, two = torch.nn.Module(), drawn(1, HEADS, 13, DIM), drawn(2, HEADS, 13, DIM)
    spec, tensor = mask_of(1, 13, 13), torch.ones(13, 13, dtype=torch.bool)
    refused = [
        ({"output_attentions": True}, "output_attentions: expected False.*set_attn_implementation"),
        ({"indices": q}, r"indices: Module gives attention an option.*register\(harmless=\('indices',\)\)"),
        ({"softcap": 2.0, "position_bias": q}, "position_bias: expected None beside softcap"),
        ({"position_bias": q[:, :, :12, :5]}, "^position_bias: expected a shape"),
        ({"s_aux": drawn(2)}, "^s_aux: expected .* numbers, one per query head"),
        ({"scaling": float("nan")}, "^scaling: expected a finite number"),
        ({"cache": 3}, "cache: expected a PagedAttentionCache; got int"),
        ({"attention_mask": tensor}, "attention_mask: expected what speedlight.transformers.attention_mask"),
        ({"attention_mask": mask_of(1, 13, 12)}, "key: expected 12 keys, for which the mask was made; got 13"),
        ({"attention_mask": mask_of(1, 12, 13)}, "query: expected 12 queries, for which the mask was made; got 13"),
        ({"cu_seq_lens_q": [0, 13], "attention_mask": mask_of(1, 13, 13, attention_mask=LEFT[:1])}, "beside them"),
    ]
    for options, words in refused:
        with pytest.raises(sl.Error, match=words):
            attend(module, q, q, q, **({"attention_mask": spec} | options))
    with pytest.raises(sl.Error, match="cu_seq_lens_q: expected a batch of one"):
        attend(module, two, two, two, mask_of(2, 13, 13), cu_seq_lens_q=[0, 13])
    attend(module, q, q, q, spec, indices=None, output_attentions=False, position_ids=q, deterministic=True)
    for use in (lambda: spec[:, :, :5], lambda: q + spec, lambda: torch.where(spec, q, 0.0)):
        with pytest.raises(sl.Error, match="this model computes with its mask as a tensor"):
            use()


def test_a_padding_mask_is_never_dropped():
    """Under a name that has a function and no mask, transformers would drop padding without a word."""
    AttentionInterface.register("half", attend)
    try:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="half")).eval()
        with pytest.raises(sl.Error, match="padding would be dropped.*AttentionMaskInterface.register"):
            model(torch.ones(2, 13, dtype=torch.int64), attention_mask=LEFT.long())
        AttentionMaskInterface.register("half", mask_of)
        model(torch.ones(2, 13, dtype=torch.int64), attention_mask=LEFT.long())
    finally:
        AttentionInterface._global_mapping.pop("half", None)
        AttentionMaskInterface._global_mapping.pop("half", None)


def test_register(monkeypatch):
    from speedlight.transformers import attending, registering

    registering.check_version("5.23.4")
    with pytest.raises(sl.Error, match=r"expected 5.23 or newer, .*; got 4.57.1. pip install -U"):
        registering.check_version("4.57.1")
    with pytest.raises(sl.Error, match=r"none is installed. pip install"):
        registering.check_version(None)
    with pytest.warns(UserWarning, match=r"5.24.0 is newer than 5.23, the last one .* pip install 'transformers==5.23"):
        registering.check_version("5.24.0")
    for wrong, words in (
        ({"replace_sdpa": 1}, "replace_sdpa"),
        ({"harmless": "x"}, "harmless"),
        ({"harmless": [1]}, "h"),
    ):
        with pytest.raises(sl.Error, match=f"{words}.*: expected"):
            speedlight.transformers.register(**wrong)
    monkeypatch.setattr(attending, "harmless", attending.harmless)
    speedlight.transformers.register(harmless=("indices",))
    q = drawn(1, HEADS, 13, DIM)
    attend(torch.nn.Module(), q, q, q, mask_of(1, 13, 13), indices=q)


# --- models: a Llama of two layers in float64, beside PyTorch's attention: eager's softmax is of float32 at most.
# tests/test_transformers_models.py has the others, beside eager


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def logits(model, name, tokens, **options):
    model.set_attn_implementation(name)
    with torch.no_grad():
        return model(tokens, **options).logits


def generated(model, name, tokens, **options):
    model.set_attn_implementation(name)
    return model.generate(tokens, max_new_tokens=9, do_sample=False, **options)


@pytest.mark.parametrize("shown", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_a_model_and_its_gradients(llama, tokens, shown):
    options, rows = ({}, LEFT | True) if shown is None else ({"attention_mask": shown.long()}, shown)
    results = []
    for name in ("speedlight", "sdpa"):
        llama.set_attn_implementation(name)
        out = llama(tokens, **options).logits[rows]
        results.append((out, *torch.autograd.grad(out.square().sum(), list(llama.parameters()))))
    for got, want in zip(*results, strict=True):
        want = want.detach().numpy()
        assert_within(got, want, 1e-10 * (1 + np.abs(want).max()) * np.ones_like(want))


def test_gradients_are_eagers_where_no_loss_comes_from_padding(llama, tokens):
    """The first real token of a row, which the last row of padding predicts, has the label -100 as well."""
    model, found = copy.deepcopy(llama).float(), []
    labels = tokens.masked_fill(LEFT.logical_not(), -100)
    for first in (False, True):
        labels = labels.masked_fill(LEFT.cumsum(1) == 1, -100) if first else labels
        for name in ("eager", "speedlight"):
            model.set_attn_implementation(name)
            loss = model(tokens, attention_mask=LEFT.long(), labels=labels, use_cache=False).loss
            found.append(torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))]))
    assert (found[0] - found[1]).abs().max() > 1e-3 and (found[2] - found[3]).abs().max() < 1e-6


def test_activation_checkpointing(llama, tokens):
    want = logits(llama, "sdpa", tokens)
    llama.set_attn_implementation("speedlight")
    llama.train()
    llama.activation_checkpointing_enable()
    try:
        assert_equal(llama(tokens, use_cache=False).logits, want)
    finally:
        llama.activation_checkpointing_disable()
        llama.eval()


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_compiled_graphs_break_where_attention_is(llama, tokens):
    want = logits(llama, "sdpa", tokens)
    llama.set_attn_implementation("speedlight")
    with torch.no_grad():
        assert_equal(torch.compile(llama, backend="eager")(tokens, use_cache=False).logits, want)
    torch._dynamo.reset()


def test_weights_are_refused(llama, tokens):
    llama.set_attn_implementation("speedlight")
    with pytest.raises(sl.Error, match="output_attentions: expected False.*'eager'"):
        llama(tokens, output_attentions=True)


CACHES = {
    "theirs": lambda config: None,
    "ours": lambda config: Cache(config),
    "ours of 40": lambda config: Cache(config, capacity=40),
    "static": lambda config: StaticCache(config, max_cache_len=32),
}


@pytest.mark.parametrize("shown", [None, LEFT], ids=["whole", "left"])
def test_generation(llama, tokens, shown):
    options = {} if shown is None else {"attention_mask": shown.long()}
    want = generated(llama, "sdpa", tokens, **options)
    for name, cache in CACHES.items():
        got = generated(llama, "speedlight", tokens, past_key_values=cache(llama.config), **options)
        assert torch.equal(got, want), name


def test_our_cache_under_other_attention(llama, tokens):
    """Whoever does not know what a Kept is has the tensor that it stands for."""
    want = generated(llama, "sdpa", tokens)
    for name in ("sdpa", "eager"):
        assert torch.equal(generated(llama, name, tokens, past_key_values=Cache(llama.config)), want)


def test_beams_and_assistance(llama, tokens):
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}):
        some = tokens[:1] if "prompt_lookup_num_tokens" in options else tokens
        want = generated(llama, "sdpa", some, **options)
        got = generated(llama, "speedlight", some, past_key_values=Cache(llama.config), **options)
        assert torch.equal(got, want), options


def sliding(window=6):
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).double().eval()


def test_rings(tokens):
    """A sliding layer's memory does not grow, whatever the chunks; crop() goes back."""
    model = sliding()
    whole = logits(model, "sdpa", tokens)
    cache = Cache(model.config)
    parts = [logits(model, "speedlight", x, past_key_values=cache) for x in tokens.split([7, 1, 1, 4], 1)]
    assert_equal(torch.cat(parts, 1), whole)
    assert cache.layers[0].is_sliding and cache.get_seq_length() == 13
    cache.crop(-5)
    assert cache.get_seq_length() == 8
    assert_equal(logits(model, "speedlight", tokens[:, 8:], past_key_values=cache), whole[:, 8:])
    twin = Cache(model.config)
    parts = [logits(model, "sdpa", x, past_key_values=twin) for x in tokens.split([7, 1, 5], 1)]
    assert_equal(torch.cat(parts, 1), whole)
    assert torch.equal(
        generated(model, "speedlight", tokens, past_key_values=Cache(model.config)), generated(model, "eager", tokens)
    )


def test_a_cache_is_copied_cut_reordered_and_cleared(llama, tokens):
    config, cache = llama.config, Cache(llama.config)
    want = logits(llama, "sdpa", tokens)
    logits(llama, "speedlight", tokens[:, :9], past_key_values=cache)
    twin = copy.deepcopy(cache)
    twin.reorder_cache(torch.tensor([1, 0]))
    assert_equal(logits(llama, "speedlight", tokens[:, 9:].flip(0), past_key_values=twin), want[:, 9:].flip(0))
    wide = copy.deepcopy(cache)
    wide.batch_repeat_interleave(2)
    wide.batch_select_indices(torch.tensor([0, 3]))
    assert wide.batch_size == 2 and cache.get_seq_length() == 9
    assert_equal(logits(llama, "speedlight", tokens[:, 9:], past_key_values=wide), want[:, 9:])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_equal(logits(llama, "speedlight", tokens, past_key_values=cache), want)
    assert isinstance(cache, DynamicCache) and Cache(config).batch_size == -1 and not cache.is_compileable


def test_what_a_cache_refuses(llama, tokens):
    llama.set_attn_implementation("speedlight")
    with pytest.raises(sl.Error, match="key: expected a call under torch.no_grad"):
        llama(tokens, past_key_values=Cache(llama.config))
    cache = Cache(llama.config, capacity=12)
    with pytest.raises(sl.CacheFull, match="13 tokens need room, 12 of 12 are free"):
        logits(llama, "speedlight", tokens, past_key_values=cache)
    assert cache.get_seq_length() == 0
    logits(llama, "speedlight", tokens[:, :12], past_key_values=cache)
    with pytest.raises(sl.Error, match="tokens_to_remove: expected a number up to 0"):
        cache.crop(3)
    layer = cache.layers[0]
    cache.crop(-2)
    stale, _ = layer.update(*(torch.zeros(2, KV_HEADS, 1, DIM, dtype=torch.float64),) * 2)
    assert repr(stale) == f"Kept(keys, shape=(2, {KV_HEADS}, 11, {DIM}), dtype=torch.float64)"
    assert_equal(stale[:, :, 10:] + 1, torch.ones(2, KV_HEADS, 1, DIM, dtype=torch.float64))
    layer.crop(-1)
    with pytest.raises(sl.Error, match="expected what the last update"):
        stale.sum()
    with pytest.raises(sl.Error, match="config: expected layers of full, sliding or chunked attention; got one of"):
        Cache(LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"]))
    with pytest.raises(sl.Error, match="dtype"):
        Cache(llama.config, dtype="int4")


def test_messages_name_what_was_given(llama, tokens):
    """In a model's words: attention_mask, capacity, config, past_key_values; each with a way out."""
    from transformers import T5Config, T5ForConditionalGeneration

    config, n = llama.config, 13
    for mask, words in (
        (torch.ones(2, 1, n, n, dtype=torch.int64), r"attention_mask: of 4.*int64.*attention_mask.bool\(\)"),
        (
            torch.ones(2, 1, n, n + 1).bool(),
            r"attention_mask: expected a shape.*= \(2, 4, 13, 13\).*got \(2, 1, 13, 14",
        ),
        (torch.zeros(2, 3, n, n), r"attention_mask: expected a shape.*got \(2, 3, 13, 13\)"),
        (torch.ones(2, n, n), r"attention_mask: expected \(batch, length\).*\[:, None\] of 3; got \(2, 13, 13\)"),
        (torch.ones(n), r"attention_mask: expected \(batch, length\).*got \(13,\)"),
    ):
        with pytest.raises(sl.Error, match=words):
            logits(llama, "speedlight", tokens, attention_mask=mask)
    for capacity in (0, -3, 64.0, "64", True):
        with pytest.raises(sl.Error, match="capacity: expected"):
            Cache(config, capacity=capacity)
    for wrong in (llama, None, {}):
        with pytest.raises(sl.Error, match="config: expected model.config; got a"):
            Cache(wrong)
    for options, words in (
        ({"dtype": "float16"}, r"dtype: this cache keeps float16.*are float64.*model.to\(torch.float16\)"),
        ({"dtype": "int8"}, "dtype: an int8 cache takes.*float64"),
        ({"dtype": "fp8"}, "dtype: a float8_e4m3fn cache takes.*float64"),
    ):
        cache = Cache(config, **options)
        with pytest.raises(sl.Error, match=words):
            logits(llama, "speedlight", tokens, past_key_values=cache)
        assert cache.get_seq_length() == 0
    few = Cache(LlamaConfig(**SIZES | {"num_hidden_layers": 1}))
    with pytest.raises(sl.Error, match="config: expected that of the model; this cache was made for 1 layers"):
        logits(llama, "speedlight", tokens, past_key_values=few)
    cache = Cache(config)
    logits(llama, "speedlight", tokens, past_key_values=cache)
    with pytest.raises(sl.Error, match="past_key_values: this cache holds 2 sequences; got 1. Make a new Cache"):
        logits(llama, "speedlight", tokens[:1], past_key_values=cache)
    other = torch.zeros(2, KV_HEADS, 1, DIM + 1, dtype=torch.float64)
    with pytest.raises(sl.Error, match="past_key_values: this cache holds 2 heads of 16 and 16 dims; got 2 of 17 and"):
        cache.update(other, other, 0)
    with pytest.raises(sl.Error, match="dtype: this cache keeps float64, and the model's keys are float32"):
        cache.update(other.float(), other.float(), 0)
    assert cache.get_seq_length() == 13
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    t5.set_attn_implementation("speedlight")
    with pytest.raises(
        sl.Error, match=r"expected transformers' EncoderDecoderCache\(Cache\(config\), DynamicCache\(\)\); got"
    ):
        t5.generate(tokens, max_new_tokens=2, past_key_values=Cache(t5.config, capacity=32))


@pytest.mark.parametrize(("dtype", "near"), [("int8", 0.02), ("fp8", 0.1)])
def test_codes(llama, tokens, dtype, near):
    """A cache of codes is near, and takes half of the memory."""
    model = copy.deepcopy(llama).float()
    want, cache = logits(model, "eager", tokens), Cache(model.config, dtype=dtype)
    got = logits(model, "speedlight", tokens, past_key_values=cache)
    assert 0 < (got - want).abs().max() < near * want.abs().max()


def test_sdpa_is_replaced_and_given_back(llama, tokens):
    """Under PyTorch's name: tensors as masks, and none where PyTorch is asked to be causal."""
    theirs, options = AttentionInterface()["sdpa"], {"attention_mask": LEFT.long()}
    want = [logits(llama, "sdpa", tokens), logits(llama, "sdpa", tokens, **options)]
    speedlight.transformers.register(replace_sdpa=True)
    try:
        speedlight.transformers.register(replace_sdpa=True)
        assert AttentionInterface()["sdpa"] is attend
        got = [logits(llama, "sdpa", tokens), logits(llama, "sdpa", tokens, **options)]
    finally:
        speedlight.transformers.unregister()
    assert AttentionInterface()["sdpa"] is theirs
    assert_equal(got[0], want[0])
    assert_equal(got[1][LEFT], want[1][LEFT])


BATCHED = """
import copy, os, torch, speedlight.transformers
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM
speedlight.transformers.register(replace_sdpa=True)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
options, prompts = copy.deepcopy(model.generation_config), [list(range(3, 16)), list(range(20, 26))]
options.max_new_tokens, options.do_sample, options.eos_token_id = 9, False, 60
model.set_attn_implementation("sdpa")
room = ContinuousBatchingConfig(num_blocks=8, page_size=16, max_batch_tokens=32)
outs = model.generate_batch(prompts, generation_config=options, continuous_batching_config=room, warmup=False)
model.set_attn_implementation("eager")
want = [model.generate(torch.tensor([x]), generation_config=options)[0, len(x) :].tolist() for x in prompts]
print([x.generated_tokens for x in outs.values()] == want, flush=True)
os._exit(0)  # a thread of transformers does not end on a CPU
"""


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1")
def test_continuous_batching():
    """generate_batch() takes no name but "sdpa" on a CPU."""
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    code = f"SIZES = {SIZES}\n{BATCHED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=here)
    assert done.stdout.strip().endswith("True"), done.stderr


def test_a_model_without_register_says_what_docs_quote(monkeypatch):
    import transformers

    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "speedlight")
    said = 'Specified `attn_implementation="speedlight"` is not supported. The only possible arguments are'
    with pytest.raises(ValueError, match=re.escape(said)):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="speedlight"))
    assert f"ValueError: {said}" in (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()


def test_docs():
    names: dict = {}
    text = (Path(__file__).parent.parent / "docs" / "transformers.md").read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    assert "cache" in names


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1: docstrings are looked at in tests/test_docs.py's way")
def test_docstrings():
    import doctest

    for name in speedlight.transformers.__all__:
        examples = doctest.DocTestFinder(recurse=False).find(getattr(speedlight.transformers, name), name)
        assert sum(len(x.examples) for x in examples) > 0 or name == "unregister", name
        assert sum(doctest.DocTestRunner().run(x).failed for x in examples) == 0
