"""The examples, as a person runs them and as tests can look into them; generate.py has more in test_caches.py."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import FULL

import speedlight as sl

EXAMPLES = Path(__file__).parent.parent / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def train_bytes():
    return loaded("train_bytes")


@pytest.fixture(scope="module")
def runs(train_bytes):
    """Losses of the same few steps through each attention."""
    data, losses = train_bytes.batches(train_bytes.text(), 5, 2, 64, 0), {}
    for engine in train_bytes.ENGINES:
        torch.manual_seed(0)
        losses[engine] = train_bytes.train(train_bytes.Model(engine), data, 4e-3)
    return losses


def test_the_losses_follow_those_of_pytorch_step_by_step(runs):
    np.testing.assert_allclose(*runs.values(), rtol=1e-5)
    ours = runs["speedlight"]
    assert 5 < ours[0] < 6.5 and ours[-1] < ours[0] - 0.5


def test_gradients_are_those_of_pytorch(train_bytes):
    tokens, grads = train_bytes.batches(train_bytes.text(), 1, 2, 64, 0)[0], []
    for engine in train_bytes.ENGINES:
        torch.manual_seed(0)
        model = train_bytes.Model(engine)
        torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, want in grads[1].items():
        torch.testing.assert_close(grads[0][name], want, rtol=1e-4, atol=1e-4 * want.abs().max().item(), msg=name)


def test_attention_has_the_same_bits_for_any_threads(train_bytes):
    data, digests = train_bytes.batches(train_bytes.text(), 2, 2, 64, 0), []
    torchs = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for threads in (1, 2):
            sl.set_threads(threads)
            torch.manual_seed(0)
            model = train_bytes.Model()
            digest = train_bytes.Digest(model)
            train_bytes.train(model, data, 4e-3)
            digests.append(digest.sum.hexdigest())
    finally:
        torch.set_num_threads(torchs)
    assert digests[0] == digests[1] != train_bytes.Digest(model).sum.hexdigest()


def test_training_and_generating_as_a_person_runs_them(tmp_path):
    """A checkpoint, a curve, a digest, and text; generate.py says the same as the model that was trained."""
    checkpoint = tmp_path / "bytes.safetensors"
    words = [
        "--steps",
        "3",
        "--batch",
        "2",
        "--length",
        "64",
        "--sample",
        "10",
        "--reproducible",
        "-o",
        str(checkpoint),
    ]
    done = run("train_bytes", *words)
    assert done.returncode == 0, done.stderr
    assert re.search(r"loss \d\.\d+ → \d\.\d+ nats a byte \(.* bits\)\nattention's bits: [0-9a-f]{16}\n", done.stdout)
    assert checkpoint.with_suffix(".png").read_bytes().startswith(b"\x89PNG") and "3/3 steps" in done.stderr
    done = run("generate", "--checkpoint", str(checkpoint), "--tokens", "5", "--prompt", "Zürich")
    assert done.returncode == 0 and done.stdout.startswith("Zürich") and "tokens/s" in done.stderr
    if FULL:
        wrong = run("generate", "--checkpoint", "nowhere")
        assert wrong.returncode == 2 and "--checkpoint: no file nowhere" in wrong.stderr
        wrong = run("train_bytes", "--sdpa", "mine")
        assert wrong.returncode == 2 and "expected speedlight or torch" in wrong.stderr
    assert_logits_agree(checkpoint)


def assert_logits_agree(checkpoint):
    """generate.py's NumPy model over a cache, and the one that was trained."""
    from safetensors.torch import load_file

    train, generate = loaded("train_bytes"), loaded("generate")
    theirs = train.Model()
    theirs.load_state_dict(load_file(checkpoint))
    ours = generate.Model(checkpoint=checkpoint)
    tokens = ours.tokens("The for statement")
    cache = sl.KVCache(layers=len(ours.layers), kv_heads=ours.kv_heads, head_dim=ours.head_dim, capacity=len(tokens))
    got = np.concatenate([ours.forward(x, cache) for x in np.split(tokens, [5, 6, 9])])
    with torch.no_grad():
        want = theirs(torch.from_numpy(tokens)[None])[0].numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def run(name, *words):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *words]
    here = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, encoding="utf-8", env=here)
