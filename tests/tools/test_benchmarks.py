"""Benchmarks: turns alternate, wrong results are refused, rows keep what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import speedlight as sl
from speedlight.tools import measuring, peers
from speedlight.tools.measuring import alternate, wrong

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

ROOT = Path(sl.__file__).parent.parent


def row_of(turns, names, *sizes):
    """A row of the benchmarks' own kind."""
    import squares

    return squares.row_of(squares.Problem(*sizes or ("float32", 1, 16, 16, False)), turns, names)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Their folder is where a script of theirs would have it."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in (getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]


def test_turns_alternate():
    taken: list[str] = []
    samples = {name: lambda name=name: float(len(taken.append(name) or taken)) for name in "abc"}
    assert alternate(samples, 2) == {"a": [1.0, 4.0], "b": [2.0, 5.0], "c": [3.0, 6.0]} and taken == [*"abcabc"]
    assert alternate(samples, 1, first=4) == {"a": [9.0], "b": [7.0], "c": [8.0]}
    assert measuring.ratios({"speedlight": [1.0, 4.0], "other": [3.0, 2.0]})["other"] == [0.5, 1.125, 1.75, 2.375, 3.0]


@pytest.mark.parametrize("broken", [1.0, -1e-3, np.nan, np.inf])
def test_one_wrong_element_is_seen(broken):
    """Whoever computed it: a peer may be farther away, not anywhere."""
    arrays = measuring.normal_numbers("float32", *[(1, 2, 40, 16)] * 3)
    out = sl.attention(*arrays, causal=True)
    for got in (out, torch.from_numpy(out), [out]):
        assert wrong(got, *arrays, heads=2, causal=True) is None
    out[0, 1, 7, 3] += broken
    assert wrong(out, *arrays, heads=2, causal=True) == "1 of 1280 elements outside the bound"
    assert wrong(out, *arrays, heads=2, slack=measuring.PEER_SLACK, causal=True) is not None
    assert wrong(out, *arrays, causal=True) is None  # of the first head alone


@pytest.mark.parametrize("at", [0, 1, 2])
def test_wrong_gradients_are_refused(monkeypatch, at):
    def broken(*arrays, **options):
        results = backward(*arrays, **options)
        results[at][0, 0, -1 if at == 0 else 0, 0] += 1e-2
        return results

    backward = sl.attention_backward
    monkeypatch.setattr(sl, "attention_backward", broken)
    row = row_of(1, (), "float32", 1, 300, 16, True, True)
    assert row["refused"].startswith("1 of ") and "gflops" not in row


def test_a_peer_with_another_result_is_no_peer(monkeypatch):
    def missing(asked):
        raise ImportError("no", name="nothing")

    monkeypatch.setitem(peers.PEERS, "torch", lambda asked: lambda: asked.q * 2)
    monkeypatch.setitem(peers.PEERS, "flex", lambda asked: lambda: asked.q * np.nan)
    monkeypatch.setitem(peers.PEERS, "jax", missing)
    row = row_of(1, ["torch", "flex", "jax"])
    assert not row["ratios"] and row["notes"]["jax"] == "not installed (nothing)"
    assert "another result than ours" in row["notes"]["torch"] and "another" in row["notes"]["flex"]


def test_caches_of_codes_stand_beside_others(tmp_path, monkeypatch):
    """A peer over codes is held to the numbers that its codes stand for, with one that has another result."""
    import decoding
    import peers as benchmark_peers
    import run
    import table

    def right(asked):
        numbers = [asked.q.astype(np.float32), *(x.astype(np.float32).round(1) for x in asked[1:3])]
        return lambda: sl.attention(*numbers), numbers

    def broken(asked):
        call, numbers = right(asked)
        return lambda: call() + 1e-2, numbers

    small = ("int8", 1, 4, 2, 40, 32)
    held = {"right": right, "broken": broken}
    made = {name: lambda asked, x=x: benchmark_peers._over_codes(x, asked) for name, x in held.items()}
    monkeypatch.setitem(benchmark_peers.DECODE_CODES, "int8", made)
    monkeypatch.setattr(decoding, "BESIDE_CODES", [small])
    assert run.main(["codes", "--only", "layer", "--turns", "1", "-o", str(tmp_path / "r.json")]) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [*row["peers"]] == ["bfloat16 cache", "right"]
    assert "| int8 B1 H4/2 N40 d32 |" in table.codes_table([tmp_path / "r.json"])
    assert row["notes"] == {"broken": "another result than of its own codes: 128 of 128 elements outside the bound"}


def test_a_model_in_quantised_caches(tmp_path, monkeypatch, capsys):
    """A small one of random weights: what each cache holds, and whose perplexity is farther away than it may be."""
    transformers = pytest.importorskip("transformers")
    import quantised_caches
    import run
    import table

    def load(dtype):
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        config = transformers.LlamaConfig(vocab_size=60, hidden_size=64, intermediate_size=64, **sizes)
        words = torch.arange(200) ** 2 % 59
        return transformers.LlamaForCausalLM(config).to(dtype).eval(), words

    sizes = quantised_caches.Sizes(texts=2, prompt=40, scored=20, chunk=7)
    monkeypatch.setattr(quantised_caches.rows, "__defaults__", (sizes, load))
    words = ["codes", "--only", "model", "--turns", "1", "-o", str(tmp_path / "r.json")]
    assert run.main(words) == 0
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    tokens, elements = 2 * 2 * 40, 2 * 32  # of both layers' heads; of a key and its value
    bytes_of = {"speedlight": 2 * elements, "speedlight int8": elements + 8, "DynamicCache": 2 * elements}
    assert {x: row["bytes"][x] for x in bytes_of} == {x: tokens * n for x, n in bytes_of.items()}
    assert (
        row["bytes"]["fp8 of transformers"] == tokens * elements + 2 * 2 * 4
    )  # a scale of each layer's keys, and values
    changes = {x: abs(value / row["perplexity"]["float32"] - 1) for x, value in row["perplexity"].items()}
    assert changes["speedlight float32"] < 1e-5 < changes["speedlight int8"] < changes["speedlight float8_e4m3fn"]
    assert f"| speedlight int8 | {row['seconds']['speedlight int8'][2] * 1e3:.1f} |" in table.codes_table(
        [tmp_path / "r.json"]
    )
    assert "  DynamicCache" in capsys.readouterr().out
    monkeypatch.setitem(quantised_caches._MOST, "int8", 0.0)
    assert run.main(words) == 1 and "REFUSED: speedlight int8: a perplexity of" in capsys.readouterr().out


@pytest.mark.parametrize(("ours", "who"), [(x, y) for x in ("int8", "int4") for y in ("ggml", "onnxruntime")])
def test_other_libraries_attend_over_codes(ours, who):
    """Whoever makes the peer holds it to its own codes; these are near the numbers."""
    pytest.importorskip({"ggml": "llama_cpp"}.get(who, who))
    import peers as benchmark_peers

    arrays = measuring.normal_numbers("bfloat16", (1, 4, 1, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    out = benchmark_peers.DECODE_CODES[ours][who](peers.Asked(*arrays))()
    wide = [x.astype(np.float32) for x in arrays]
    off = np.abs(measuring.as_float64(out) - sl.reference.attention(*wide)).max()
    assert 0 < off < 0.5


def test_whole_models(tmp_path, monkeypatch, capsys):
    """Small ones; the whole, attention alone, and one whose results differ."""
    import models
    import pictures
    import run

    def problems(kind):
        yield models._gpt(torch.float32, layers=1, dim=16, heads=2, length=20)
        yield models._documents(False, heads=1, length=64, head_dim=8)
        zeroed = models._float_mask(8, 1, heads=1, length=16)
        zeros = models.Contender(lambda: ([torch.zeros_like(x) for x in zeroed.contenders["torch"].run()[0]], None))
        yield zeroed._replace(contenders=zeroed.contenders | {"torch": zeros})

    monkeypatch.setattr(models, "problems", problems)
    assert run.main(["models", "--turns", "1", "-o", str(tmp_path / "r.json")]) == 1
    told = capsys.readouterr().out
    assert "attention of it" in told and "  torch dense" in told and "REFUSED" in told
    report = json.loads((tmp_path / "r.json").read_text())
    gpt, flex, refused = report["rows"]
    assert gpt["attention"]["torch"][0] > 0 and "attention" not in flex and len(flex["ratios"]["torch dense"]) == 5
    assert refused["refused"] == "torch has another result than ours, by 1" and "ratios" not in refused
    pictures.model_bars(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_clients_of_a_prompt(tmp_path, monkeypatch, capsys):
    """Small ones: the memory of both ways, a client after the other and all together; and one whose results differ."""
    import clients
    import pictures
    import run

    sizes = clients.Sizes(clients=3, prompt=160, question=20, layers=1, heads=2, kv_heads=1, vocabulary=50)
    monkeypatch.setattr(clients.rows, "__defaults__", (sizes,))
    assert run.main(["prompts", "--turns", "2", "-o", str(tmp_path / "r.json")]) == 0
    assert "3 clients, a prompt of 160 tokens, questions of 20: shared" in capsys.readouterr().out
    report = json.loads((tmp_path / "r.json").read_text())
    (row,) = report["rows"]
    page = 16 * 64 * 2 * 4
    assert row["bytes"] == {"shared": (10 + 3 * 2) * page, "apart": 3 * 12 * page}
    assert len(set(row["seconds"]["shared"])) == 1 and row["seconds"]["apart"] == sorted(row["seconds"]["apart"])
    pictures.prompt_bars(report, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000
    monkeypatch.setattr(clients, "_SLACK", -1.0)
    assert run.main(["prompts", "--turns", "1"]) == 1 and "REFUSED: logits differ by" in capsys.readouterr().out


def test_language_models_have_the_same_results():
    pytest.importorskip("transformers")
    import contenders
    import language_models

    language_models.speedlight.transformers.register()
    problem = language_models._prefill("small", language_models._llama(torch.float32), 40, "sdpa")
    row = contenders.measured(problem, 1)
    assert len(row["ratios"]["sdpa"]) == 5 and len(row["attention_ratios"]["sdpa"]) == 5


def test_architectures(monkeypatch):
    """Equal, not taken, without attention; and one whose results are wrong on purpose."""
    pytest.importorskip("transformers")
    import architectures

    architectures.speedlight.transformers.register()
    assert ("decoders", "gpt_oss") in list(architectures.small.names(""))
    found = [architectures.measure("decoders", name) for name in ("gpt_oss", "bloom", "mamba")]
    assert [row["verdict"] for row in found] == ["equal", "not taken", "no attention"]
    assert found[0]["cache"] == "equal" and found[0]["errors"].keys() == {
        "logits",
        "left",
        "right",
        "gradients",
        "tokens",
    }
    table = architectures.small.transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    ours = table["speedlight"]
    monkeypatch.setitem(table, "speedlight", lambda *args, **options: (ours(*args, **options)[0] * 1.001, None))
    wrong = architectures.measure("encoders", "bert")
    assert wrong["verdict"] == "differs" and wrong["said"] == "logits, left, right, gradients"
    monkeypatch.setitem(table, "speedlight", lambda *_, **__: 1 / 0)
    refused = architectures.measure("encoders", "bert")
    assert refused["verdict"] == "refused" and "ZeroDivisionError" in architectures.line(refused)
    told = architectures.table([*found, wrong, refused])
    assert "| equal (1) | decoders (1) | gpt_oss |" in told and "| differs (1) | encoders (1) | bert |" in told


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no clone")
def test_a_commit_beside_itself_has_the_same_bits(tmp_path, capsys):
    import run

    words = ["--dtype", "float32", "--head-dim", "16", "--q-len", "64", "--causal", "--turns", "1"]
    assert run.main(["base", "HEAD", *words, "-o", str(tmp_path / "r.json")]) == 0
    assert "The same bits in 1 of 1 problems." in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["same_bits"] and len(row["ratios"]["base"]) == 5 and row["name"] == "float32 H8 N64 d16 causal"
    with pytest.raises(SystemExit, match="got 'no-such-commit' .*fatal"):
        run.main(["base", "no-such-commit"])


def test_parts_that_were_not_run_keep_their_rows(tmp_path, monkeypatch, capsys):
    import decoding
    import run
    import suite
    import table
    from pictures import roofline

    monkeypatch.setattr(run, "RESULTS", tmp_path)
    small = suite.PREFILL[0]._replace(dtype="float32", heads=1, length=16, head_dim=16, causal=False)
    monkeypatch.setattr(suite, "PREFILL", [small, small._replace(causal=True, length=32)])
    monkeypatch.setattr(decoding, "DECODE", [(x, 1, 4, 2, 40, 16) for x in ("float32", "int8")])
    assert run.main(["--only", "prefill,decode", "--quick"]) == 0
    assert run.main(["--only", "prefill,errors", "--quick"]) == 0
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    assert [x["part"] for x in report["rows"]] == ["decode"] * 2 + ["prefill"] * 2 + ["errors"]
    told, page = capsys.readouterr().out, table.table(path)
    assert "REFUSED" not in told and all(
        f"| {x['name'].removesuffix(' one token')} |" in page for x in report["rows"][:4]
    )
    roofline(report | {"threads": 2, "rows": report["rows"][2:4]}, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 10_000


@pytest.mark.parametrize(("words", "says"), [
    (["models", "--only", "cats"], "--only: expected one of gpt,"), (["ranks", "1"], "ranks: expected 2 to 64; got 1."),
    (["ranks", "3", "--only", "ulysses"], "--only: expected another kind for 3 ranks"),
    (["ranks", "--only", "gpt"], "--only: expected one of ring, ulysses, exact, window"),
    (["models", "--turns", "0"], "--turns: expected at least 1; got 0."),
])  # fmt: skip
def test_words_that_are_not_known(words, says):
    import run

    with pytest.raises(SystemExit, match=says):
        run.main(words)
