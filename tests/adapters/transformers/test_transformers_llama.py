"""A Llama of two layers in float64, beside PyTorch's attention: eager's softmax is of float32 at most.

test_transformers_models.py has other models, in float32.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from conftest import FULL, ROOT
from small_llama import LEFT, RIGHT, SIZES, assert_equal, llama, logits, registered, tokens
from tolerance import assert_within

import speedlight as sl
import speedlight.transformers
from speedlight import errors

with warnings.catch_warnings():  # of a first import, about libraries that are missing
    warnings.simplefilter("ignore")
    from transformers import AttentionInterface

__all__ = ["llama", "registered", "tokens"]

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels


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


BESIDE_PACKED = {
    "ones": {"attention_mask": torch.ones(2, 13, dtype=torch.int64), "use_cache": False},
    "ones in a cache": {"attention_mask": torch.ones(2, 13, dtype=torch.int64)},
    "a cache": {"use_cache": True},
}


@pytest.mark.parametrize("beside", BESIDE_PACKED)
def test_packed_rows_that_see_each_other_are_warned_of_once(llama, tokens, beside, monkeypatch):
    """transformers' eager mixes documents there, and so do we; the way that the warning tells keeps them apart."""
    monkeypatch.setattr(errors, "_warned", set())
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]] * 2)
    first, second = (logits(llama, "sdpa", x) for x in tokens.split([5, 8], 1))
    apart, options = torch.cat([first, second], 1), BESIDE_PACKED[beside]
    mixed = logits(llama, "sdpa", tokens, position_ids=packed, **options)
    assert (mixed - apart).abs().max() > 1e-3
    with pytest.warns(RuntimeWarning, match="position_ids: they begin anew .* leave attention_mask out and") as said:
        got = logits(llama, "speedlight", tokens, position_ids=packed, **options)
    assert len(said) == 1
    assert_equal(got, mixed)
    assert_equal(logits(llama, "speedlight", tokens, position_ids=packed, **options), mixed)  # warnings are errors
    assert_equal(logits(llama, "speedlight", tokens, position_ids=packed, use_cache=False), apart)


@pytest.mark.parametrize("shown", [None, LEFT, RIGHT], ids=["whole", "left", "right"])
def test_rows_of_one_document_are_not_warned_of(llama, tokens, shown, monkeypatch):
    """Not either where padding has positions of its own, or a model goes on from a cache."""
    monkeypatch.setattr(errors, "_warned", set())
    mask = torch.ones_like(tokens) if shown is None else shown.long()
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    logits(llama, "speedlight", tokens, attention_mask=mask, position_ids=places)
    llama.generate(tokens, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert not errors._warned


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


def test_sdpa_is_replaced_and_given_back(llama, tokens):
    """Under PyTorch's name: tensors as masks, and none where PyTorch is asked to be causal."""
    theirs, options = AttentionInterface()["sdpa"], {"attention_mask": LEFT.long()}
    want = [logits(llama, "sdpa", tokens), logits(llama, "sdpa", tokens, **options)]
    speedlight.transformers.register(replace_sdpa=True)
    try:
        speedlight.transformers.register(replace_sdpa=True)
        assert AttentionInterface()["sdpa"] is speedlight.transformers.attention_forward
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
    here = os.environ | {"PYTHONPATH": str(ROOT)}
    code = f"SIZES = {SIZES}\n{BATCHED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=here)
    assert done.stdout.strip().endswith("True"), done.stderr
