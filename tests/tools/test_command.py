"""The command's words: one vocabulary, errors as they were typed, JSON in numbers, what a terminal shows."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import shlex
import subprocess
import sys

import numpy as np
import pytest
from problems import qkv
from test_cli import EXAMPLE, here  # noqa: F401

import speedlight as sl
from speedlight.arrays.files import read_arrays, write_arrays
from speedlight.calls import pictures
from speedlight.tools import attending, cli, options, reports, typed

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels

GROUP = cli.command()
COMMANDS = {name: {x.name: x for x in one.params} for name, one in GROUP.commands.items()}
SIZES = ("q_len", "k_len", "batch", "q_heads", "kv_heads", "head_dim", "value_dim", "dtype", "causal", "window")


def test_options_are_called_as_arguments_are():
    listed = {x.name for x in dataclasses.fields(options.ProblemOptions)}
    assert set(SIZES) | {"dropout", "seed", "mask", "score", "backward", "lengths", "decode", "latent"} == listed
    for command in ("plan", "show", "bench"):
        own, plans = COMMANDS[command], COMMANDS["plan"]
        assert {*listed, "isa"} <= set(own) and all(own[name].help == plans[name].help for name in listed)
    assert set(SIZES) - {"batch"} <= set(COMMANDS["view"])
    for params in COMMANDS.values():
        for name, param in params.items():
            if name in SIZES:
                assert f"--{name.replace('_', '-')}" in param.opts
        assert "as_json" in params


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_flags_take_no_value_in_the_help(here, command):  # noqa: F811
    done = here(*([command] if command else []), "--help")
    assert done.returncode == 0 and "bool" not in done.stdout and "--help" in done.stdout


def test_no_words_print_the_help(here):  # noqa: F811
    done = here()
    assert done.returncode == 2 and "plan" in done.stdout and not done.stderr


def test_python_runs_the_package(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--version"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("speedlight", run_name="__main__")
    assert not end.value.code and capsys.readouterr().out == f"speedlight {sl.__version__}\n"


def test_words_that_are_not_arguments_stay():
    text = "mask: a mask with causal, a window and k_len-1 of x.q_len('k_len') but seed=7, dropout= and k_len"
    assert typed.as_typed(text, GROUP, ["plan", "--k-len", "3"]) == (
        "--mask: a mask with causal, a window and k_len-1 of x.q_len('k_len') but --seed=7, dropout= and --k-len"
    ).replace("dropout= ", "--dropout ").replace("dropout=", "--dropout=")
    assert typed.as_typed(text, GROUP, []) == text


def numbers_only(x: object, path: str = "") -> None:
    """Texts are names: no spaces in them, but of what is one by nature."""
    match x:
        case dict():
            for name, y in x.items():
                numbers_only(y, f"{path}/{name}")
        case list():
            for y in x:
                numbers_only(y, path)
        case str():
            assert " " not in x or path in ("/cpu",), f"{path} is prose: {x}"


def test_json_is_numbers(here, tmp_path):  # noqa: F811
    masked = ["--mask", "(i * j) % 7 == 0", "--json"]
    plan = json.loads(here("plan", "--q-len", 300, *masked).stdout)
    assert plan["flops"] is plan["visible_pairs"] is plan["seconds_at_least"] is None and plan["tile_flops"] > 0
    exact = json.loads(here("plan", "--q-len", 300, "--exact", *masked).stdout)
    same = sl.plan(q_heads=8, q_len=300, head_dim=64, mask=lambda b, h, i, j: (i * j) % 7 == 0, exact=True)
    assert (exact["flops"], exact["visible_pairs"]) == (same.flops, same.visible_pairs)
    written = tmp_path / "o.npz"
    attended = json.loads(here("attend", EXAMPLE, "--check", "--json", "-o", written).stdout)
    assert attended["written"] == ["out", "lse"] and attended["plan"]["problem"]["q_heads"] == 12
    shown = json.loads(here("show", "--json").stdout)
    assert shown["lanes"] in (4, 8, 16) and shown["tile_vectors"] >= 1
    drawn = json.loads(here("view", "--causal", "--q-len", 300, "-o", tmp_path / "v.png", "--json").stdout)
    for report in (plan, exact, attended, shown, drawn, json.loads(here("info", "--json").stdout)):
        numbers_only(json.loads(json.dumps(report).replace(str(tmp_path), "").replace(os.environ["HOME"], "")))


def test_json_has_no_infinity(capsys):
    reports.print_json({"ratio": float("inf"), "error": float("nan"), "n": 3})
    assert json.loads(capsys.readouterr().out, parse_constant=lambda name: 1 / 0) == {
        "ratio": None,
        "error": None,
        "n": 3,
    }


def test_an_unknown_count_is_unknown(here):  # noqa: F811
    done = here("plan", "--q-len", 300, "--mask", "(i * j) % 7 == 0")
    assert "visible unknown (`speedlight plan --exact` counts)" in done.stdout
    assert "time at least  unknown (" in done.stdout


@pytest.mark.parametrize("other", [0, "h"])
def test_counting_says_how_far_it_is(monkeypatch, other):
    """Heads that are alike are counted once: a step then stands for all of them."""
    mask = lambda b, h, i, j: (i * j) % 7 == (h if other else 0)  # noqa: E731
    length = 300 if other else 6_000  # so few tiles of one head are counted at once
    heard, whole = [], sl.plan(q_heads=8, q_len=length, head_dim=64, mask=mask)

    class Watched:
        def __init__(self, what, total):
            heard.append(total)

        def __enter__(self):
            return heard.append

        def __exit__(self, *error):
            return None

    monkeypatch.setattr(cli, "progress", Watched)
    pairs = cli._count_pairs(whole).visible_pairs
    total, *steps = heard
    assert total == sum(steps) == whole.tiles_mixed > 0 and len(steps) > 1
    assert pairs == sl.plan(q_heads=8, q_len=length, head_dim=64, mask=whole.problem.mask, exact=True).visible_pairs


@pytest.mark.parametrize(
    ("layout", "mask"), [("bhld", None), ("blhd", None), ("lhd", None), ("bhld", "h > 1"), ("bhld", "h >= 0")]
)
def test_a_call_head_by_head_has_the_same_bits(rng, monkeypatch, layout, mask):
    """Heads that a mask tells apart are not computed alone: each would be head 0."""
    monkeypatch.setattr(attending, "_LONG", 0.0)
    q, k, v = qkv(rng, "float32", 1, 4, 2, 20, 30, 8, 8)
    turned = {"bhld": (0, 1, 2, 3), "blhd": (0, 2, 1, 3), "lhd": (0, 2, 1, 3)}[layout]
    arrays = [x.transpose(turned)[0] if layout == "lhd" else x.transpose(turned) for x in (q, k, v)]
    causal = layout != "lhd" and mask is None
    given = {"layout": layout} | options.hidden_by(causal, None, mask, None)
    plan = sl.plan(*arrays, **given)
    out, lse, _ = attending._attend(arrays, given, plan)
    want, want_lse = sl.attention(*arrays, **given, return_lse=True)
    assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes()
    checked = attending._check(arrays, given, plan.problem, out, lse)
    assert checked["passed"] and checked["elements"] == out.size
    out[(0,) * out.ndim] += 1e-3
    assert not attending._check(arrays, given, plan.problem, out, lse)["passed"]


MASKS = """
import speedlight as sl
band = sl.causal() & sl.window(3, 0)
def heads(b, h, i, j): return (j <= i) & (h > 1)
def number(b, h, i, j): return i
def half(s, b, h, i, j): return s / 2
def fails(b, h, i, j): raise KeyError("no such mask")
three = 3
"""


def test_masks_and_scores_come_from_a_file(here, tmp_path):  # noqa: F811
    (tmp_path / "my masks.py").write_text(MASKS)
    words = ["plan", "--q-len", 50, "--q-heads", 4, "--json", "--mask"]
    typed_one = json.loads(here(*words, "causal() & window(3, 0)").stdout)
    of_file = json.loads(here(*words, f"{tmp_path}/my masks.py:band").stdout)
    assert of_file == typed_one and of_file["visible_pairs"] == 4 * (4 * 50 - 6)
    exact = json.loads(here(*words, f"{tmp_path}/my masks.py:heads", "--exact").stdout)
    assert exact["visible_pairs"] == 2 * 50 * 51 // 2
    done = here("attend", EXAMPLE, "--score", f"{tmp_path}/my masks.py:half", "--check", "--json")
    assert json.loads(done.stdout)["check"]["passed"], done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", "m.py: number: expected a bool result of number() in"),
        ("three", "m.py: three: expected a function, or a pattern such as sl.causal()"),
        ("half", "m.py: half: expected the arguments (b, h, i, j) of a mask; got a function of 5 arguments."),
        ("none", "m.py: expected one of its names band, fails, half, heads, number, sl, three; got 'none'."),
        ("fails", "m.py: fails: expected a function of symbols; it raised KeyError: 'no such mask'."),
    ],
)
def test_errors_of_a_masks_file_name_it(here, tmp_path, name, says):  # noqa: F811
    (tmp_path / "m.py").write_text(MASKS)
    done = here("plan", "--q-len", 5, "--mask", f"{tmp_path}/m.py:{name}")
    assert done.returncode == 2 and "--mask: " in done.stderr and says in done.stderr and not done.stdout
    alone = here("plan", "--q-len", 5, "--mask", f"{tmp_path}/m.py")
    assert alone.returncode == 2 and f"Name its function: {tmp_path}/m.py:name." in alone.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1 / 0", "expected a file that Python runs; got ZeroDivisionError: division by zero."),
        ("def (", "expected a file that Python runs; got SyntaxError: "),
        (None, "No such file or directory."),
    ],
)
def test_a_masks_file_that_does_not_run_is_named(here, tmp_path, text, says):  # noqa: F811
    if text is not None:
        (tmp_path / "m.py").write_text(text)
    done = here("view", "--mask", f"{tmp_path}/m.py:x", "-o", tmp_path / "m.png")
    assert done.returncode == 2 and done.stderr.startswith(f"speedlight: --mask: {tmp_path}/m.py: {says}")


def test_weights_of_a_head_obey_its_own_mask(rng, tmp_path):
    pytest.importorskip("matplotlib")
    q, k, _ = qkv(rng, "float32", 2, 2, 2, 6, 6, 8, 8)
    (tmp_path / "m.py").write_text("def own(b, h, i, j): return (j <= i) | (h + b < 2)")
    for mask in ("(j <= i) | (h + b < 2)", f"{tmp_path}/m.py:own"):
        for head, last in ((0, 5), (1, 0)):  # the first row sees all keys, or one
            given = options.hidden_by(False, None, mask, None, {"b": 1, "h": head})
            cells = pictures._cells(q, k, 1, head, given, (0, 6), (0, 6))
            assert np.flatnonzero(cells[0]).max() == last


def test_an_npy_file_holds_out_alone_and_it_says_so(here, tmp_path):  # noqa: F811
    done = here("attend", EXAMPLE, "-o", tmp_path / "o.npy")
    assert "o.npy: out (.npy holds out alone: .npz and .safetensors keep lse, too)" in done.stdout
    assert "o.npz: out and lse\n" in here("attend", EXAMPLE, "-o", tmp_path / "o.npz").stdout


def test_brackets_of_a_path_are_shown(here, tmp_path):  # noqa: F811
    done = here("attend", EXAMPLE, "-o", tmp_path / "o[red].npz")
    assert "o[red].npz: out and lse" in done.stdout


@pytest.mark.parametrize("width", [None, 40])
def test_no_name_is_broken(here, monkeypatch, width):  # noqa: F811
    monkeypatch.delenv("COLUMNS", raising=False)
    planned = here("plan", "--q-len", 9000).stdout.splitlines()
    assert len(planned) == 11  # in a pipe a line each
    name = planned[1].split()[-1]
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    shown = here("show").stdout.splitlines()
    assert shown[0].split()[-1] == name and name.startswith("forward_f32") and "entry" in "".join(shown)
    assert any(line.endswith(name) for line in here("plan", "--q-len", 9000).stdout.splitlines())


def test_rows_fold_between_words(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    reports.print_rows([("one", "some words that fold here"), ("three", "a" * 40)])
    assert capsys.readouterr().out == f"one    some words that fold\n       here\nthree  {'a' * 40}\n"


def test_isa_is_in_force_for_the_command_alone(here, monkeypatch):  # noqa: F811
    monkeypatch.delenv("SPEEDLIGHT_ISA", raising=False)
    assert json.loads(here("plan", "--q-len", 300, "--isa", "avx2", "--json").stdout)["isa"] == "avx2"
    assert json.loads(here("attend", EXAMPLE, "--isa", "avx2", "--json").stdout)["plan"]["isa"] == "avx2"
    assert "SPEEDLIGHT_ISA" not in os.environ
    monkeypatch.setenv("SPEEDLIGHT_ISA", "avx2")
    with options.on_unit("avx512"):
        assert os.environ["SPEEDLIGHT_ISA"] == "avx512"
    assert os.environ["SPEEDLIGHT_ISA"] == "avx2"


def test_a_window_is_that_of_attention(here):  # noqa: F811
    report = json.loads(here("plan", "--q-len", 300, "--window", "99,0", "--json").stdout)
    assert report["visible_pairs"] == 8 * sum(min(i + 1, 100) for i in range(300))
    assert options.window_of("7,") == (7, None) and options.window_of("none,3") == (None, 3)


def test_a_pipe_that_knows_few_letters():
    done = subprocess.run(
        [sys.executable, "-m", "speedlight.tools.cli", "attend", "--help"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "QK?)V" in done.stdout, done.stderr


def _output(kind):
    if kind == "full":
        return open("/dev/full", "w")
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
@pytest.mark.parametrize(("kind", "code", "told"), [
    ("full", 2, "speedlight: the output cannot be written: No space left on device.\n"), ("unread", 1, ""),
])  # fmt: skip
def test_no_command_prints_a_traceback_where_stdout_takes_nothing(here, tmp_path, monkeypatch, kind, code, told):  # noqa: F811
    calls = [["attend", EXAMPLE], ["plan", "--q-len", 300], ["view", "--causal", "-o", tmp_path / "v.png"]]
    calls += [[*call, "--json"] for call in calls] + [["--version"], *([name, "--help"] for name in COMMANDS)]
    for words in calls:
        with _output(kind) as out, monkeypatch.context() as here_alone:
            here_alone.setattr(sys, "stdout", out)
            done = here(*words)
        assert done.stderr == told and done.returncode == code, words


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
@pytest.mark.parametrize(("to", "code"), [(">/dev/full", 2), (">&-", 0), ("| true; exit ${PIPESTATUS[0]}", 1)])
def test_python_has_nothing_to_say_when_it_ends(to, code):
    command = f"sleep 0.2; {shlex.quote(sys.executable)} -m speedlight plan --q-len 300 {to}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == code and done.stderr.count("\n") == (code == 2) and "Traceback" not in done.stderr


@pytest.mark.parametrize("link", [False, True])
def test_what_is_read_is_not_written_over(here, tmp_path, link):  # noqa: F811
    """Its q, k and v would be gone."""
    x = np.ones((1, 2, 3, 4), np.float32)
    write_arrays(tmp_path / "x.npz", {"q": x, "k": x, "v": x})
    if link:
        (tmp_path / "y.npz").symlink_to("x.npz")
    done = here("attend", tmp_path / "x.npz", "-o", tmp_path / ("y.npz" if link else "x.npz"))
    assert done.returncode == 2 and "--output: expected another file than those that are read" in done.stderr
    assert sorted(read_arrays([tmp_path / "x.npz"])) == ["k", "q", "v"]


def test_a_check_that_fails_by_an_overflow_says_so(here, tmp_path, monkeypatch):  # noqa: F811
    """An element of NaN is outside its bound, and no error of 0."""
    x, attended, wrong = np.ones((1, 2, 3, 4), np.float32), attending._attend, [0.0]

    def broken(*given):
        out, lse, seconds = attended(*given)
        out[0, 0, 0, 0], out[0, 1, 2] = wrong[0], wrong[0]
        return out, lse, seconds

    monkeypatch.setattr(attending, "_attend", broken)
    write_arrays(tmp_path / "x.npz", {"q": x, "k": x, "v": x})
    for wrong[0], told in ((np.nan, "infinite or NaN"), (np.inf, "infinite or NaN"), (3.0, "largest error 2, ")):
        done = here("attend", tmp_path / "x.npz", "--check")
        line = next(x for x in done.stdout.splitlines() if x.startswith("check"))
        assert done.returncode == 1 and "FAILED: 5 of 24 elements outside their bounds" in line and told in line


def test_shells_complete():
    environment = os.environ | {"_SPEEDLIGHT_COMPLETE": "complete_bash", "COMP_CWORD": "3"}
    command = [sys.executable, "-m", "speedlight.tools.cli"]
    environment["COMP_WORDS"] = "speedlight plan --dtype flo"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert set(done.stdout.split()) == {"float32", "float64", "float16"}, done.stderr
