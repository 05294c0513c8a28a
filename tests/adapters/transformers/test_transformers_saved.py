"""speedlight.transformers.Cache in files: generate() goes on with the same tokens; other models are refused by name."""

from __future__ import annotations

import copy
import doctest
import json
import warnings

import pytest
import torch
from small_llama import LEFT, SIZES, as_called, llama, registered, tokens

import speedlight as sl
import speedlight.transformers
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays
from speedlight.kv import saving

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    import transformers

__all__ = ["llama", "registered", "tokens"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
Cache = speedlight.transformers.Cache


def prefilled(model, tokens, cache, **options):
    """A cache with a prompt of a model."""
    model.set_attn_implementation("speedlight")
    with torch.no_grad():
        model(tokens, **as_called({"past_key_values": cache} | options))
    return cache


def continued(model, tokens, cache, **options):
    """Tokens that generate() adds after a prompt in a cache, and their logits."""
    model.set_attn_implementation("speedlight")
    options |= {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found = model.generate(tokens, **as_called({"past_key_values": cache} | options))
    return found.sequences.tolist(), [x.numpy().tobytes() for x in found.logits or ()]


def small(name, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options, name_or_path=f"small/{name}")
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


LATENTS = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "q_lora_rank": None,
           "num_key_value_heads": 4, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
           "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}  # fmt: skip
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "head_dim": 16},
    "GptOss": {"sliding_window": 6, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Gemma3Text": {"sliding_window": 6, "head_dim": 16},
    "DeepseekV3": LATENTS,
}


@pytest.mark.parametrize("name", MODELS)
def test_generation_goes_on_after_load(name, tokens, tmp_path):
    """Sliding layers, latents that are absorbed; a batch with padding on the left; the file never changes."""
    if name == "DeepseekV3":
        speedlight.transformers.register(mla="absorbed")
    model, path = small(name, **MODELS[name]), tmp_path / "prompt.safetensors"
    shown = LEFT.long()
    cache = prefilled(model, tokens[:, :12], Cache(model.config), attention_mask=shown[:, :12])
    cache.save(path)
    before = path.read_bytes()
    loaded = Cache.load(path, copy.deepcopy(model.config))
    assert repr(loaded) == repr(cache) and loaded.get_seq_length() == 12
    want = continued(model, tokens, copy.deepcopy(cache), attention_mask=shown)
    assert continued(model, tokens, loaded, attention_mask=shown) == want
    assert path.read_bytes() == before and path.stat().st_mode & 0o77 == 0
    assert continued(model, tokens, Cache.load(path, model.config), attention_mask=shown) == want
    speedlight.transformers.register()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kept", [None, "int8", "fp8", "int4"])
def test_every_dtype_comes_back(dtype, kept, tokens, tmp_path):
    if kept is not None and dtype is torch.float64:
        pytest.skip("refused when the model calls")
    model = small("Llama", sliding_window=6).to(dtype)
    cache = prefilled(model, tokens[:, :12], Cache(model.config, dtype=kept, capacity=40))
    cache.save(tmp_path / "a.safetensors")
    loaded = Cache.load(tmp_path / "a.safetensors", model.config)
    for mine, other in zip(cache.layers, loaded.layers, strict=True):
        assert torch.equal(mine.keys + 0, other.keys + 0) and torch.equal(mine.values + 0, other.values + 0)
        assert (other.like.dtype, other.dtype, other.capacity) == (dtype, mine.dtype, 40)
    assert continued(model, tokens, loaded) == continued(model, tokens, cache)


def test_a_loaded_cache_may_have_more_room(llama, tokens, tmp_path):
    path = tmp_path / "a.safetensors"
    prefilled(llama, tokens[:, :12], Cache(llama.config, capacity=12)).save(path)
    with pytest.raises(sl.CacheFull):
        continued(llama, tokens, Cache.load(path, llama.config))
    want = continued(llama, tokens, prefilled(llama, tokens[:, :12], Cache(llama.config)))
    assert continued(llama, tokens, Cache.load(path, llama.config, capacity=100)) == want
    with pytest.raises(sl.ArgumentError, match="capacity: expected at least 12 tokens; got 11"):
        Cache.load(path, llama.config, capacity=11)


def test_a_cache_in_the_middle_of_a_beam(llama, tokens, tmp_path):
    cache = prefilled(llama, tokens[:, :12], Cache(llama.config))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 1, 2, 2]))
    cache.save(tmp_path / "a.safetensors")
    loaded = Cache.load(tmp_path / "a.safetensors", llama.config)
    beams = tokens[[0, 0, 1, 1]]
    for each in (loaded, cache):
        each.crop(-2)
    assert continued(llama, beams, loaded) == continued(llama, beams, cache)


def test_tokens_that_wait_and_layers_without_any(llama, tmp_path):
    cache, path = Cache(llama.config, capacity=40), tmp_path / "a.safetensors"
    cache.save(path)
    empty = Cache.load(path, llama.config)
    assert empty.get_seq_length() == 0 and empty.get_max_length() == 40 and not empty.is_initialized
    x = torch.randn(2, 2, 5, 16)
    for layer in range(2):
        cache.update(x, x, layer)
    cache.save(path)
    loaded = Cache.load(path, llama.config)
    assert loaded.get_seq_length() == 5 and torch.equal(loaded.layers[1].keys + 0, x)


def test_a_step_that_is_half_done_is_not_saved(llama, tmp_path):
    cache, x = Cache(llama.config), torch.randn(2, 2, 5, 16)
    for layer in (0, 1, 0):
        cache.update(x, x, layer)
    with pytest.raises(sl.CacheBusy, match=r"layers of as many tokens; got \[5, 10\]"):
        cache.save(tmp_path / "a.safetensors")
    cache.layers[1].cache._claims.add(0)
    with pytest.raises(sl.CacheBusy, match="layer 0: another thread"):
        cache.save(tmp_path / "a.safetensors")
    assert not [*tmp_path.iterdir()]


def test_another_model_is_refused_by_name(llama, tokens, tmp_path):
    """By each size, the kinds of layers, positions, its name, and the key that the caller gives."""
    path, config = tmp_path / "a.safetensors", llama.config
    cache = prefilled(llama, tokens, Cache(config))
    cache.save(path)

    def other(**options):
        changed = copy.deepcopy(config)
        for name, x in options.items():
            setattr(changed, name, x)
        return changed

    for name, x in (
        ("hidden_size", 128), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 32),
        ("vocab_size", 62), ("intermediate_size", 64), ("model_type", "mistral"),
        ("rope_parameters", {"rope_theta": 1e6, "rope_type": "default"}),
    ):  # fmt: skip
        with pytest.raises(sl.FileError, match=rf"a\.safetensors: expected tokens of a model whose {name} is "):
            Cache.load(path, other(**{name: x}))
    with pytest.raises(sl.FileError, match="whose (layer_types|num_hidden_layers) is "):
        Cache.load(path, other(num_hidden_layers=3))
    with pytest.raises(
        sl.FileError, match="expected tokens of model='mine', as given; got those of model='small/llama'"
    ):
        Cache.load(path, config, model="mine")
    named = other()
    named.name_or_path = "some/llama"
    with pytest.raises(sl.FileError, match="model='some/llama'"):
        Cache.load(path, named)
    nameless = other(name_or_path="")
    with pytest.raises(sl.FileError, match="expected tokens that were saved without model=; got those of model='small"):
        Cache.load(path, nameless)
    with pytest.raises(sl.ArgumentError, match="^model: expected a key, since config.name_or_path is empty; got None"):
        Cache(nameless).save(path)
    with pytest.raises(sl.ArgumentError, match="^model: expected a key, .* got ''"):
        Cache(nameless).save(path, model="")
    with pytest.raises(sl.ArgumentError, match="^device: expected 'cpu', .* got 'tpu'"):
        Cache.load(path, config, device="tpu")
    cache.save(path, model="mine")
    with pytest.raises(sl.FileError, match="got those of model='mine'"):
        Cache.load(path, config)
    assert Cache.load(path, named, model="mine").get_seq_length() == 13
    with pytest.raises(sl.ArgumentTypeError, match="^model: expected a str"):
        cache.save(path, model=3)
    with pytest.raises(sl.ArgumentTypeError, match="^config: expected model.config"):
        Cache.load(path, None)
    sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=8).save(path)
    with pytest.raises(sl.FileError, match=r"Cache.save\(\) wrote; .* speedlight.KVCache.load\(\) reads it"):
        Cache.load(path, config)
    with pytest.raises(sl.FileError, match="No such file"):
        Cache.load(tmp_path / "none.safetensors", config)


def test_other_tokens_are_refused_by_name(llama, tokens, tmp_path):
    """A file that was saved with tokens= asks for input_ids that begin with them, of as many sequences."""
    path, config, ids = tmp_path / "a.safetensors", llama.config, tokens[:, :12].tolist()
    cache = prefilled(llama, tokens[:, :12], Cache(config))
    cache.save(path, tokens=tokens[:, :12])
    want = continued(llama, tokens, copy.deepcopy(cache))
    for given in (ids, tokens, tokens.numpy(), [tuple(x) for x in ids]):
        assert continued(llama, tokens, Cache.load(path, config, tokens=given)) == want
    other = copy.deepcopy(ids)
    other[1][7] += 1
    for given, error, says in (
        (
            other,
            sl.FileError,
            rf"expected token {ids[1][7]} at position 7 of sequence 1, as was saved; got {other[1][7]}",
        ),
        ([ids[0], ids[1][:5]], sl.FileError, rf"expected token {ids[1][5]} at position 5 of sequence 1, .*; got None"),
        (ids[:1], sl.FileError, "expected tokens of 2 sequences, as were saved; got 1"),
        (None, sl.FileError, r"expected tokens=, as save\(\) was given them; got None"),
        (ids[0], sl.ArgumentError, r"tokens: expected a list of ints for each sequence, .* write \[tokens\]"),
        ([["a"], ["b"]], sl.ArgumentTypeError, "tokens: expected ints; got str among them"),
    ):
        with pytest.raises(error, match=says):
            Cache.load(path, config, tokens=given)
    before = path.read_bytes()
    for given, says in (
        (tokens, r"^tokens: expected 12 ints of each sequence, .*; got 13\. generate\(\) has not .* tokens\[:, :12\]"),
        (tokens[:, :11], r"^tokens: expected 12 ints of each sequence, as the cache has tokens; got 11\.$"),
        (tokens[:1, :12], "^tokens: expected those of 2 sequences; got 1"),
    ):
        with pytest.raises(sl.ArgumentError, match=says):
            cache.save(path, tokens=given)
    assert path.read_bytes() == before
    words, stored = read_metadata(path), read_arrays([path])
    short = stored["sequence_tokens"][:, :5].copy()
    for x in (stored["sequence_tokens"] + 1, short, short[0], None):
        write_arrays(path, {n: y for n, y in (stored | {"sequence_tokens": x}).items() if y is not None}, words)
        with pytest.raises(sl.FileError, match="damaged"):
            Cache.load(path, config, tokens=tokens)
    digest = {"sequences_sha256": saving._digest_of({"sequence_tokens": short})}
    write_arrays(path, stored | {"sequence_tokens": short}, words | digest)
    with pytest.raises(sl.FileError, match="damaged; it has 5 tokens, and keys of 12"):
        Cache.load(path, config, tokens=tokens)
    cache.save(path)
    with pytest.raises(sl.FileError, match="got a file that was saved without tokens="):
        Cache.load(path, config, tokens=tokens)


def test_an_empty_cache_has_no_tokens(llama, tmp_path):
    path = tmp_path / "a.safetensors"
    Cache(llama.config).save(path, tokens=[[], []])
    assert Cache.load(path, llama.config, tokens=[[1, 2], [3, 4]]).get_seq_length() == 0


def test_another_dtype_of_the_model_is_named_by_its_first_call(llama, tokens, tmp_path):
    prefilled(llama, tokens, Cache(llama.config)).save(tmp_path / "a.safetensors")
    with pytest.raises(sl.ArgumentTypeError, match="this cache keeps float64, and the model's keys are float32"):
        prefilled(copy.deepcopy(llama).float(), tokens, Cache.load(tmp_path / "a.safetensors", llama.config))


@pytest.mark.parametrize("name", ["Llama", "Gemma3Text", "GptOss", "DeepseekV3"])
def test_a_config_identifies_its_model_before_and_after_the_model_is_made(name):
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    before = Cache(copy.deepcopy(config))._identity
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert Cache(model.config)._identity == before == Cache(type(config)(**config.to_dict()))._identity


def test_damaged_words_are_named(llama, tokens, tmp_path):
    path = tmp_path / "a.safetensors"
    prefilled(llama, tokens, Cache(llama.config)).save(path)
    words, stored = read_metadata(path), read_arrays([path])
    for name in ("capacity", "config", "0.keys", "0.dtype", "1.batch", "1.layers", "1.capacity", "dtype", "0.window"):
        for x in ("", "0", "-1", "7", "null", "[" * 5000, str(1 << 70), "9" * 5000, "int8", "float32"):
            write_arrays(path, stored, words | {name: x})
            with pytest.raises(sl.FileError, match=r"a\.safetensors"):
                Cache.load(path, llama.config)
    for name in ("0.lengths", "1.keys.0"):
        write_arrays(path, {n: x for n, x in stored.items() if n != name}, words)
        with pytest.raises(sl.FileError, match=r"a\.safetensors"):
            Cache.load(path, llama.config)
    write_arrays(path, stored, words)
    assert json.loads(words["config"])["model_type"] == "llama"
    assert Cache.load(path, llama.config).get_seq_length() == 13


def test_its_example_runs():
    (example,) = doctest.DocTestFinder(recurse=False).find(Cache.save, "save")
    assert doctest.DocTestRunner().run(example).failed == 0
