"""speedlight.transformers.Cache under models: what is generated, rings, codes, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from small_llama import (
    CACHE,
    DIM,
    KV_HEADS,
    LEFT,
    SIZES,
    assert_equal,
    generated,
    llama,
    logits,
    registered,
    tokens,
)  # fmt: skip

import speedlight as sl
import speedlight.transformers

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, StaticCache
    from transformers.masking_utils import sliding_window_causal_mask_function

__all__ = ["llama", "registered", "tokens"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
Cache = speedlight.transformers.Cache
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


def test_a_layer_answers_what_transformers_asks_of_its_own(llama, tokens):
    cache, theirs = Cache(llama.config, capacity=40), DynamicCache()
    layer = cache.layers[0]
    assert not layer.is_initialized and layer.keys is None and layer.get_max_length() == 40
    for name, each in (("speedlight", cache), ("sdpa", theirs)):
        logits(llama, name, tokens[:, :9], past_key_values=each)
    assert layer.is_initialized and repr(cache).startswith("Cache([Layer(capacity=40, window=None, length=9), ")
    for part in ("keys", "values"):
        assert torch.equal(getattr(layer, part) + 0, getattr(theirs.layers[0], part))
    with pytest.raises(sl.UnsupportedError, match="offload: expected a Cache without offloading"):
        layer.offload()
    with pytest.raises(sl.UnsupportedError, match="key: expected float32, .* or bfloat16; got torch.complex64"):
        Cache(llama.config).layers[0].update(*(torch.zeros(2, KV_HEADS, 1, DIM, dtype=torch.complex64),) * 2)


def test_errors_name_what_a_cache_has(llama, tokens):
    """Not KVCache's methods and arguments; and the layer that is full."""
    cache, ring = Cache(llama.config, capacity=16), Cache(sliding(4).config, capacity=500)
    some = torch.zeros(2, KV_HEADS, 4, DIM)
    for layer in range(2):
        ring.update(*(torch.zeros(2, KV_HEADS, 400, DIM),) * 2, layer)
        cache.update(*(torch.zeros(2, KV_HEADS, 13, DIM),) * 2, layer)
    nobody = torch.zeros(0, dtype=torch.int64)
    cases = {
        r"^layer 1, sequence 0: 4 tokens need room, 3 of 16 are free. crop\(\) it, or": lambda: cache.update(
            some, some, 1
        ),
        "^tokens_to_remove: expected a number up to 0": lambda: cache.crop(1),
        "^tokens_to_remove: expected an int; got float": lambda: cache.crop(-1.5),
        r"^tokens_to_remove: .* window is still there; got -390, .* of 4 tokens .* reset\(\)": lambda: ring.crop(-390),
        "^beam_idx: expected 0 to 1; got 5": lambda: cache.reorder_cache(torch.tensor([0, 5])),
        "^indices: expected at least one sequence": lambda: cache.batch_select_indices(nobody),
        "^repeats: expected at least 1; got 0": lambda: cache.batch_repeat_interleave(0),
        r"^Cache: .* copy.deepcopy\(\), or save\(\) .* Cache.load\(\)": lambda: pickle.dumps(copy.deepcopy(cache)),
        "^Cache: expected no pickle": lambda: pickle.dumps(cache.layers[0]),
    }
    for message, call in cases.items():
        with pytest.raises(sl.Error, match=message) as refused:
            call()
        assert not [x for x in ("truncate", "KVCache", "batch_indices") if x in str(refused.value)]
    twin = copy.deepcopy(cache)
    twin.batch_repeat_interleave(2)
    assert twin.batch_size == 4 and type(twin.layers[1].cache) is type(cache.layers[1].cache)


def test_what_a_cache_refuses(llama, tokens):
    llama.set_attn_implementation("speedlight")
    with pytest.raises(sl.Error, match="key: expected a call under torch.no_grad"):
        llama(tokens, **{CACHE: Cache(llama.config)})
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
        Cache(llama.config, dtype="int2")
    with pytest.raises(sl.Error, match=r"^max_cache_len: expected the arguments of Cache\(\); .* Use capacity="):
        Cache(llama.config, max_cache_len=8)
    with pytest.raises(AttributeError, match=r"'KVCache' .* takes speedlight.transformers.Cache\(config\)$"):
        llama(tokens, **{CACHE: sl.KVCache(layers=2, kv_heads=KV_HEADS, head_dim=DIM, capacity=12)})


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
        t5.generate(tokens, max_new_tokens=2, **{CACHE: Cache(t5.config, capacity=32)})


@pytest.mark.parametrize("layers", [(3, 1), (2, 2)])
def test_a_decoder_of_fewer_layers_than_its_encoder(tokens, layers):
    from transformers import EncoderDecoderCache, T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_heads": 2, "eos_token_id": None}
    sizes |= {"num_layers": layers[0], "num_decoder_layers": layers[1], "decoder_start_token_id": 0}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes)).double().eval()
    cache = Cache(model.config, capacity=32)
    assert len(cache.layers) == layers[1]
    got = generated(model, "speedlight", tokens, past_key_values=EncoderDecoderCache(cache, DynamicCache()))
    assert torch.equal(got, generated(model, "sdpa", tokens))
    if layers[1] > 1:
        with pytest.raises(sl.Error, match=r"expected transformers' EncoderDecoderCache"):
            generated(model, "speedlight", tokens, past_key_values=Cache(model.config, capacity=32))


@pytest.mark.parametrize(("dtype", "near"), [("int8", 0.02), ("fp8", 0.1), ("int4", 0.3)])
def test_codes(llama, tokens, dtype, near):
    """A cache of codes is near, and takes half of the memory."""
    model = copy.deepcopy(llama).float()
    want, cache = logits(model, "eager", tokens), Cache(model.config, dtype=dtype)
    got = logits(model, "speedlight", tokens, past_key_values=cache)
    assert 0 < (got - want).abs().max() < near * want.abs().max()


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("first", [0, 5])
def test_keys_that_a_static_cache_has_not_taken(rows, first):
    """They are not read; the bits are those of a mask that hides them, from token to token."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)
    seen = torch.arange(40) >= torch.tensor([[0], [first]])
    make, attend = speedlight.transformers.attention_mask, speedlight.transformers.attention_forward
    with torch.no_grad():
        for start in range(9, 33, rows):
            q = torch.randn(2, 4, rows, 16)
            mask = make(2, rows, 40, q_offset=start, attention_mask=seen)
            assert mask.cut().k_len == start + rows and mask.cut() is mask.cut() and mask.k_len == 40
            assert torch.equal(mask.cut().dense(), mask.dense()[..., : start + rows])
            for _ in range(2):
                got = attend(torch.nn.Module(), q, k, v, mask)[0]
                want = sl.attention(q, k, v, causal=True, q_start=start, mask=sl.padding(seen.numpy()))
                assert torch.equal(got, want.transpose(1, 2))
    whole = make(2, 4, 40, q_offset=36)
    assert whole.cut() is whole


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 8])
def test_a_layers_steps_are_those_of_whole_sequences(softcap, window):
    """Steps that are repeated at once have the bits of a call over all tokens, and leave as many tokens."""
    torch.manual_seed(0)
    layer = speedlight.transformers.caches.Layer(64, window, None)
    q, k, v = (torch.randn(1, h, 40, 16) for h in (4, 2, 2))
    options = {"mask": None if window is None else sl.window(7, None), "score": softcap and sl.softcap(softcap)}
    function = None if window is None else sliding_window_causal_mask_function(window)
    make, attend = speedlight.transformers.attention_mask, speedlight.transformers.attention_forward
    with torch.no_grad():
        want = sl.attention(q, k, v, causal=True, **options).transpose(1, 2)
        for at, n in [(0, 9), *[(at, 1) for at in range(9, 40)]]:
            length, first = layer.get_mask_sizes(n)
            more = {} if function is None else {"mask_function": function}
            mask = make(1, n, length, at, first, **more)
            kept = layer.update(k[:, :, at : at + n], v[:, :, at : at + n])
            assert kept[0].shape == (1, 2, length, 16)
            got = attend(torch.nn.Module(), q[:, :, at : at + n], *kept, mask, softcap=softcap)[0]
            assert torch.equal(got, want[:, at : at + n]) and layer.get_seq_length() == at + n
            assert layer.waiting is None


def test_a_scale_of_two_layers_is_checked_in_each():
    """They share a mask, which keeps the options of the first."""
    torch.manual_seed(0)
    layers = [speedlight.transformers.caches.Layer(64, None, None) for _ in range(2)]
    make, attend = speedlight.transformers.attention_mask, speedlight.transformers.attention_forward
    q, k = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    with torch.no_grad():
        for at in range(20):
            row, mask, new = q[:, :, at : at + 1], make(1, 1, at + 1, at), k[:, :, at : at + 1]
            want = attend(torch.nn.Module(), row, *layers[0].update(new, new), mask, scaling=1.0)[0]
            with pytest.raises(sl.Error, match="^scaling: expected a number or None"):
                attend(torch.nn.Module(), row, *layers[1].update(new, new), mask, scaling=True)
            assert layers[1].get_seq_length() == at
            assert torch.equal(attend(torch.nn.Module(), row, *layers[1].update(new, new), mask, scaling=1.0)[0], want)
