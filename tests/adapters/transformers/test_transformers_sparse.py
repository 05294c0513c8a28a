"""Models whose indexer chooses keys (DeepSeek-V3.2, GLM-5, DeepSeek-V4), small and seeded, against eager attention."""

from __future__ import annotations

import warnings

import pytest
import torch
from conftest import ROOT
from small_llama import as_called

import speedlight as sl
import speedlight.torch
import speedlight.transformers

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from speedlight.transformers import attending

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
PROMPT, NEW, CHOSEN, KEYS = 60, 20, 8, 80
SHARE = 5e-6  # of the largest logit, in float32
LEFT = torch.tensor([[0] * 5 + [1] * (PROMPT - 5), [1] * PROMPT])


def make(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import small

        found = small.make("decoders", name).model
    assert found.config.index_topk == CHOSEN
    return found


@pytest.fixture(scope="module", params=["deepseek_v32", "glm_moe_dsa"])
def model(request):
    return make(request.param)


@pytest.fixture(scope="module")
def deepseek_v4():
    return make("deepseek_v4")


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(1, 60, (2, PROMPT), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def restored():
    speedlight.torch.report(reset=True)
    yield
    speedlight.transformers.unregister()


def generated(model, implementation, ids, **options):
    if implementation == "speedlight":
        speedlight.transformers.register()
    model.set_attn_implementation(implementation)
    found = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True, **as_called(options)
    )
    return found.sequences, torch.stack(found.logits)


WAYS = {
    "a batch": {},
    "left padding": {"attention_mask": LEFT},
    "beams": {"num_beams": 2},
    "static cache": {"cache_implementation": "static", "disable_compile": True, "attention_mask": LEFT},
    "chunks": {"prefill_chunk_size": 16},
}


def assert_same_tokens(model, tokens, options):
    want, logits = generated(model, "eager", tokens, **options)
    got, own = generated(model, "speedlight", tokens, **options)
    assert torch.equal(got, want) and len(want.unique()) > NEW
    assert (own - logits).abs().max() <= SHARE * logits.abs().max()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_stock(model, tokens, way):
    assert_same_tokens(model, tokens, WAYS[way])


@pytest.mark.parametrize("way", ["a batch", "left padding", "beams"])
def test_tokens_of_a_model_that_adds_keys(deepseek_v4, tokens, way):
    """DeepSeek-V4 attends to compressed keys, too, and says in a tensor which of them are chosen."""
    assert_same_tokens(deepseek_v4, tokens, WAYS[way])


def test_few_keys_that_a_tensor_shows_are_read_alone(deepseek_v4, monkeypatch):
    """Of a longer prompt, the window and the chosen ones of 50 compressed keys; with padding queries see an average."""
    calls, attention = [], attending.attention
    monkeypatch.setattr(attending, "attention", lambda *x, **options: calls.append(options) or attention(*x, **options))
    ids = torch.randint(1, 60, (2, 200), generator=torch.Generator().manual_seed(1))
    assert_same_tokens(deepseek_v4, ids, {})
    sparse = [x["indices"].shape[-1] for x in calls if "indices" in x]
    layers = deepseek_v4.config.layer_types.count("compressed_sparse_attention")
    most = deepseek_v4.config.sliding_window + CHOSEN
    assert layers and len(sparse) == NEW * layers and max(sparse) <= most
    calls.clear()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    assert_same_tokens(deepseek_v4, ids, {"attention_mask": mask})
    assert "indices" not in calls[layers]


def test_attention_gets_the_indices_and_no_mask(model, tokens, monkeypatch):
    """A prompt's mask stays a rule; latents are read, and of them what was chosen."""
    calls, attention = [], attending.attention
    monkeypatch.setattr(attending, "attention", lambda *x, **options: calls.append(options) or attention(*x, **options))
    generated(model, "speedlight", tokens)
    assert len(calls) == NEW * model.config.num_hidden_layers
    assert all(x["indices"].shape[-1] == CHOSEN and not {"mask", "score"} & x.keys() for x in calls)
    report = speedlight.torch.report()
    assert sum(report.taken.values()) == len(calls) and not report.left


def test_gradients(model, tokens):
    found = {}
    for implementation in ("eager", "speedlight"):
        speedlight.transformers.register()
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        found[implementation] = [x.grad for x in model.parameters() if x.grad is not None]
    for want, got in zip(*found.values(), strict=True):
        assert (got - want).abs().max() <= 1e-4 * want.abs().max().clamp_min(1e-6)


def test_our_cache_has_no_room_for_indexers(model, deepseek_v4):
    for each in (model, deepseek_v4):
        with pytest.raises(sl.UnsupportedError, match="^config: expected layers of full.*Leave past_key_values out"):
            speedlight.transformers.Cache(each.config, capacity=KEYS)
