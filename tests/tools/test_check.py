"""`speedlight check` and `speedlight accuracy`: what they say is so, and something broken is seen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from problems import decoded
from test_cli import EXAMPLE, here  # noqa: F401

import speedlight as sl
from speedlight.arrays.files import read_arrays, write_arrays
from speedlight.host import machine
from speedlight.tools import cache_accuracy, checking

pytestmark = pytest.mark.usefixtures("one_width", "small_tiles")  # engines' tests have the other kernels


def test_check(here):  # noqa: F811
    done = here("check")
    assert done.returncode == 0, done.stdout
    names = [line.split()[0] for line in done.stdout.splitlines()]
    units = [x.name for x in machine.native_isas()]
    assert {"machine", "system", "versions", *units, "forward", "backward", "cache", "threads", "torch"} <= set(names)
    assert names[-1] == "verdict" and "FAILED" not in done.stdout and f"speedlight {sl.__version__}" in done.stdout


def broken(name, change):
    right = getattr(sl, name)
    return lambda *given, **options: change(right(*given, **options))


def one_more(x):
    x = x.copy()
    x[0, 0, -1, 0] += 1e-2
    return x


BREAKS = {
    "forward": ("attention", lambda x: one_more(x) if isinstance(x, np.ndarray) else x),
    "backward": ("attention_backward", lambda x: (one_more(x[0]), *x[1:])),
    "cache": ("KVCache", lambda x: setattr(x, "attend", lambda layer, q, k, v: q) or x),
    "threads": ("attention", lambda x: one_more(x) if sl.get_threads() > 1 and isinstance(x, np.ndarray) else x),
    "torch": ("attention", lambda x: x if isinstance(x, np.ndarray) else x * 2),
}


@pytest.mark.parametrize("name", BREAKS)
def test_something_broken_is_seen(here, monkeypatch, name):  # noqa: F811
    checks = [x for x in checking._checks() if x[0] == name]
    monkeypatch.setattr(checking, "_checks", lambda: checks)
    sl.set_threads(2)
    try:
        assert here("check").returncode == 0
        what, change = BREAKS[name]
        monkeypatch.setattr(sl, what, broken(what, change))
        done = here("check")
    finally:
        sl.set_threads(None)
    assert done.returncode == 1 and f"{name}  " in done.stdout
    assert "FAILED: " in done.stdout and "1 of 1 checks failed: paste these lines into an issue" in done.stdout


def test_a_check_that_raises_fails_alone(here, monkeypatch):  # noqa: F811
    def fails():
        raise OSError("no disk\nat all")

    monkeypatch.setattr(checking, "_checks", lambda: [("disk", "", fails), ("other", "fine", lambda: None)])
    done = here("check")
    assert done.returncode == 1 and "FAILED: OSError: no disk\n" in done.stdout and "passed: fine" in done.stdout
    report = json.loads(here("check", "--json").stdout)
    assert not report["passed"] and report["checks"] == {"disk": "FAILED: OSError: no disk", "other": "passed: fine"}
    assert report["versions"]["speedlight"] == sl.__version__


STORED = {
    "int8": lambda x: decoded(x, "int8"),
    "fp8": lambda x: decoded(x, "float8_e4m3fn"),
    "int4": lambda x: decoded(x, "int4"),
    "fp16": lambda x: x.astype(np.float16).astype(np.float64),
    "bf16": lambda x: x.astype("bfloat16").astype(np.float64),
}
SMALLER = {"int8": 32 / 9, "fp8": 32 / 9, "int4": 64 / 9}  # heads of 32


@pytest.mark.parametrize("name", STORED)
def test_accuracy_is_that_of_the_reference(here, name):  # noqa: F811
    """Of keys and values that the reference has rounded, in float64."""
    done = here("accuracy", EXAMPLE, "--cache", name, "--causal", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["formats"]
    q, k, v = (read_arrays([EXAMPLE])[x] for x in "qkv")
    q = q.astype(np.float64)
    want = sl.reference.attention(q, k.astype(np.float64), v.astype(np.float64), causal=True)
    stored = [STORED[name](x).astype(np.float64) for x in (k, v)]
    error = sl.reference.attention(q, *stored, causal=True) - want
    rms = lambda x, axes=None: np.sqrt(np.square(x).mean(axis=axes))  # noqa: E731
    np.testing.assert_allclose(row["rms"], rms(error) / rms(want), rtol=1e-9)
    np.testing.assert_allclose(row["largest"], abs(error).max() / rms(want), rtol=1e-9)
    heads = rms(error, (0, 2, 3)) / rms(want, (0, 2, 3))
    np.testing.assert_allclose(row["heads"], heads, rtol=1e-9)
    assert row["worst_head"] == heads.argmax() and row["smaller"] == SMALLER.get(name, 2.0)


def test_accuracy_of_any_layout(here, tmp_path):  # noqa: F811
    """And of the other options of attend: another order of axes has the same errors."""
    arrays = read_arrays([EXAMPLE])
    words = ["--json", "--window", "9,", "--score", "softcap(3)", "--scale", "0.3"]
    whole = here("accuracy", EXAMPLE, *words).stdout
    assert json.loads(whole)["formats"][3]["rms"] > 1e-3
    turned = {"blhd": lambda x: x.swapaxes(1, 2), "hld": lambda x: x[0], "lhd": lambda x: x[0].swapaxes(0, 1)}
    for layout, turn in turned.items():
        write_arrays(tmp_path / "x.npz", {n: np.ascontiguousarray(turn(x)) for n, x in arrays.items()})
        assert here("accuracy", tmp_path / "x.npz", "--layout", layout, *words).stdout == whole
    packed = {n: turned["lhd"](x) for n, x in arrays.items()} | {"cu_seqlens_q": np.array([0, 99, 213])}
    write_arrays(tmp_path / "x.npz", packed)
    refused = here("accuracy", tmp_path / "x.npz", "--layout", "lhd")
    assert refused.returncode == 2 and "--layout: expected one sequence, or a batch" in refused.stderr


def test_accuracy_of_what_has_no_size():
    zero, some = np.zeros((1, 2, 3, 4)), np.ones((1, 2, 3, 4))
    assert cache_accuracy.errors_of(zero, zero) == {"rms": 0.0, "largest": 0.0, "worst_head": 0, "heads": [0.0, 0.0]}
    assert cache_accuracy.errors_of(some, zero)["rms"] == np.inf
    one = some.copy()
    one[0, 1] = 3
    found = cache_accuracy.errors_of(one, some)
    assert found["worst_head"] == 1 and found["heads"] == [0.0, 2.0] and found["rms"] == np.sqrt(2)


def test_accuracy_says_it_in_words(here, tmp_path):  # noqa: F811
    done = here("accuracy", EXAMPLE)
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(cache_accuracy.FORMATS)
    assert "int8           RMS error 0.50% of the output's RMS, largest 6.15%, worst of 12 heads 0.86% (head 8)" in (
        done.stdout
    )
