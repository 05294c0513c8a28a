"""The examples, as a person runs them and as tests can look into them."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
import typer
from conftest import FULL, ROOT

import speedlight as sl

EXAMPLES = ROOT / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("one_width", "small_tiles")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_the_example_says_the_same_whatever_the_chunks_and_threads(dtype):
    generate = loaded("generate")
    model, texts = generate.Model(3, dtype), set()
    for chunk, threads, paged in ((1, 1, False), (5, 2, True), (16, 1, True), (100, 2, False)):
        sl.set_threads(threads)
        texts.add("".join(generate.generate(model, "The attention of a stranger, in turn", 30, chunk, paged=paged)))
    (text,) = texts
    assert len(text) == 30 and len(set(text)) > 5


def test_the_example_as_a_person_runs_it():
    done = run("generate", "--tokens", "20", "--prompt", "a stranger")
    assert done.returncode == 0 and done.stdout.startswith("a stranger") and "tokens/s" in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("generate", ("--tokens", "99999999999999")),
        ("generate", ("--seed", "-1")),
        ("generate", ("--prompt", "Zürich")),
        ("train_bytes", ("--learning-rate", "nan")),
        ("train_bytes", ("--learning-rate", "-1")),
        ("train_bytes", ("--seed", str(1 << 63))),
        ("train_bytes", ("--threads", "1025")),
    ],
)
def test_wrong_numbers_are_named(name, arguments, monkeypatch, capsys):
    main = loaded(name).main
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        typer.run(main) if name == "train_bytes" else main()
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


@pytest.fixture(scope="module")
def train_bytes():
    return loaded("train_bytes")


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
    if FULL:
        done = run("generate", "--checkpoint", str(checkpoint), "--tokens", "5", "--prompt", "Zürich")
        assert done.returncode == 0 and done.stdout.startswith("Zürich") and "tokens/s" in done.stderr
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


def test_training_overwrites_nothing_that_it_did_not_write(tmp_path, train_bytes):
    """Refused before a step is taken; what it wrote itself is written again."""
    import typer
    from safetensors.torch import save_file

    other, text = tmp_path / "other.safetensors", tmp_path / "notes.png"
    save_file({"x": torch.zeros(3)}, other)
    text.write_text("mine")
    new, before = tmp_path / "new.safetensors", (other.read_bytes(), text.read_bytes())
    for words, given in (
        (r"--output.*new name, or a file that this program wrote.*stays as it is", {"output": other}),
        (r"--output.*stays as it is", {"output": text}),
        (r"--output.*stays as it is", {"output": tmp_path}),
        (r"--curve.*stays as it is", {"output": new, "curve": text}),
        (r"--curve.*stays as it is", {"output": tmp_path / "notes.safetensors"}),
        (r"--curve.*ending in .png, .svg, .pdf", {"output": new, "curve": tmp_path / "x.txt"}),
        (r"--curve.*another name than the checkpoint's", {"output": tmp_path / "x.png"}),
        (r"--curve.*no folder", {"output": new, "curve": tmp_path / "no" / "x.png"}),
    ):
        with pytest.raises(typer.BadParameter) as refused:
            train_bytes.main(**given, steps=1)
        assert re.search(words, f"{refused.value.param_hint}: {refused.value.message}"), refused.value.message
    assert (other.read_bytes(), text.read_bytes()) == before and not new.exists()
    save_file({"x": torch.zeros(3)}, new, {"sizes": "{}"})
    for ending in train_bytes.PICTURES if FULL else (".png",):
        train_bytes.draw([1.0, 0.5], new.with_suffix(ending))
        train_bytes.check_files(new, new.with_suffix(ending))
    with pytest.raises(SystemExit, match="--checkpoint: expected a file that examples/train_bytes.py wrote"):
        loaded("generate").Model(checkpoint=text)


class Letters:
    """Instead of MiniLM: how often a text has each letter."""

    def __init__(self, folder):
        self.folder, self.asked = folder, 0
        self.model = type("Fake", (), {"config": type("Sizes", (), {"hidden_size": 26})})()
        self.model.set_attn_implementation = lambda name: None

    def __call__(self, texts):
        self.asked += len(texts)
        counts = torch.tensor([[x.lower().count(chr(97 + n)) for n in range(26)] for x in texts]).float()
        return torch.nn.functional.normalize(counts, dim=1)

    def digest(self):
        return str(self.folder)


@pytest.fixture
def search(tmp_path, monkeypatch):
    """semantic_search.py with words of a command line: what it embeds, beside printing."""
    module, made = loaded("semantic_search"), []
    monkeypatch.setattr(module, "Encoder", lambda folder: made.append(Letters(folder)) or made[-1])
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")

    def run(*words, model="first"):
        given = ["semantic_search.py", "how", "--model", str(tmp_path / model), *map(str, words)]
        monkeypatch.setattr(sys, "argv", given)
        module.main()
        return made[-1].asked

    return run


def test_a_search_overwrites_no_file_of_others(tmp_path, search, capsys):
    from safetensors.torch import save_file

    text, weights = tmp_path / "notes.txt", tmp_path / "model.safetensors"
    text.write_text("mine")
    save_file({"vectors": torch.zeros(3)}, weights, {"format": "pt"})
    for path in (text, weights, tmp_path):
        before = path.read_bytes() if path.is_file() else b""
        with pytest.raises(SystemExit):
            search("--index", path)
        said = " ".join(capsys.readouterr().err.split())
        assert "--index: expected a file that this program wrote, or a new name" in said and "stays as it is" in said
        assert path.is_dir() or path.read_bytes() == before
    with pytest.raises(SystemExit):
        search("--index", tmp_path / "no" / "x")
    assert "--index: no folder" in capsys.readouterr().err


def test_an_index_is_made_again_only_where_it_has_to_be(tmp_path, search, capsys):
    path = tmp_path / "topics.safetensors"
    assert search("--index", path, "--sections", 20) > 20
    said = capsys.readouterr()
    assert "there is no index; 20 sections are embedded now" in " ".join(said.err.split())
    assert "the whole model on the 16 longest sections, one batch" in " ".join(said.out.split())
    before = path.read_bytes()
    for words in ((), ("--sections", 20), ("--sections", 5)):
        assert search("--index", path, *words) == 1, words  # the query alone
        assert f"{words[1] if words else 20} of " in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before
    assert search("--index", path, "--sections", 30) > 30
    assert "the index has 20 sections, and --sections asks for 30; 30" in " ".join(capsys.readouterr().err.split())
    assert search("--index", path, "--sections", 7, model="second") > 7
    assert "the index is of another model; 7 sections" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(not FULL, reason="three processes that import PyTorch")
def test_a_long_context_is_the_same_over_any_number_of_processes():
    """The same tokens, and what each process sends."""
    said = []
    for ranks, prompt in ((2, "1"), (1, "1500"), (2, "1500")):  # of one token the second has nothing
        words = ["--prompt", prompt, "--tokens", "5", "--layers", "2", "--window", "100", "--dtype", "float32"]
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(EXAMPLES / "long_context.py"), *words], capture_output=True, text=True, timeout=300, env=env
        )
        assert done.returncode == 0, done.stderr
        if prompt == "1":
            continue
        said.append(done.stdout)
        sent = re.search(r"at most ([\d.,]+) MiB of keys", done.stdout)
        assert sent is not None and (float(sent[1]) > 0) == (ranks > 1)
    assert len(set(re.findall(r"tokens/s: ([\d ]+)\n", "".join(said)))) == 1


def test_a_process_without_tokens_of_the_prompt_goes_through_every_layer():
    example = loaded("long_context")
    layer = example.drawn(1, 100, torch.float32).layers[0]
    x = torch.empty(0, example.DIM)
    q, k, v = layer.projected(x, torch.arange(0))
    assert q.shape == (1, example.HEADS, 0, example.HEAD_DIM) and k.shape == v.shape
    assert layer.rest(x, q).shape == x.shape


def run(name, *words):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *words]
    here = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}  # more would wait in tight loops
    return subprocess.run(command, capture_output=True, text=True, timeout=300, encoding="utf-8", env=here)
