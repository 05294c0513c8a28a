"""Schedules as they ship and as they are tuned: no bit depends on them, files are not believed, noise is no gain."""

from __future__ import annotations

import json
import math
import os
import random
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import FULL
from engines import tuned as with_fields
from problems import qkv
from test_cli import here  # noqa: F401

import speedlight as sl
from speedlight import errors
from speedlight.cpu.runtime import kept_files, roof, tuned
from speedlight.host import tunings
from speedlight.host.machine import current_isa, isa_named
from speedlight.host.tunings import LIMITS, TUNINGS, shipped
from speedlight.problem.plan import Roofs
from speedlight.tools import trials
from speedlight.tools import tuning as command

ONE_VECTOR = {"fma": {"worth": (1.0, 0.02, 0.01), "panels": 2}, "decoding": {"tasks": 3}}
THREE = {"fma": {"worth": (0.01, 0.02, 1.0)}}


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """As in a process that has just begun: a directory for what is kept, empty."""
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.delenv("SPEEDLIGHT_TUNING")
    monkeypatch.setattr(tuned, "_known", {})
    monkeypatch.setattr(errors, "_warned", set())
    return tmp_path / "kept"


def again() -> tunings.Tuning:
    """What another process would find."""
    tuned._known.clear()
    return tuned.tuning_of(current_isa())


def panel() -> int:
    """Query rows that a plan takes together."""
    return sl.plan(q_heads=8, q_len=4096, head_dim=64).panel


# --- rows


def test_every_row_is_within_its_limits():
    for family, row in TUNINGS.items():
        assert row.family == family and row.origin == (family, None, ())
        every = {name: {x: asdict(row.part(name))[x] for x in limits} for name, limits in LIMITS.items()}
        assert row.with_parts(tuned._checked(every, row)).origin.parts == ()


def extremes() -> list[dict[str, Any]]:
    """Each field at both of its limits."""
    rows = []
    for side in (0, 1):
        parts = {}
        for name, limits in LIMITS.items():
            kinds = {x: type(getattr(TUNINGS["other"].part(name), x)) for x in limits}
            parts[name] = {x: kinds[x](limits[x][side]) for x in limits if kinds[x] is not tuple}
            if "worth" in limits:
                parts[name]["worth"] = (0.01, 0.01, 1.0) if side else (1.0, 0.01, 0.01)
        rows.append(parts)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["float32"])
def test_no_field_changes_a_bit(rng, dtype):
    """Many rows and few, arrays and caches, on two threads."""
    q, k, v = qkv(rng, dtype, 1, 4, 2, 150, 2100, 64, 64)
    adjoining = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q[:, :, :1], k, v)]
    sl.set_threads(2)
    results = []
    for parts in ({}, *extremes()):
        with with_fields(**parts):
            cache = sl.KVCache(layers=1, kv_heads=2, head_dim=64, capacity=2100, dtype=dtype)
            cache.append(0, k, v)
            some = sl.attention(q, k, v, causal=True), sl.attention(q[:, :, :1], k, v), cache.attend(0, q[:, :, :1])
            results.append(b"".join(x.tobytes() for x in (*some, sl.attention(*adjoining, layout="blhd"))))
    assert results[0] == results[1] == results[2]


# --- files


def test_what_is_kept_is_followed(kept, monkeypatch):
    """By processes that start later, for calls and plans, until it is forgotten or put aside."""
    isa = current_isa()
    before = again()
    assert before is shipped(isa) and before.origin.tuned is None
    for parts, vectors in ((ONE_VECTOR, 1), (THREE, 3)):
        path = tuned.keep_tuning(isa, parts)
        assert path is not None and path == tuned.tuning_path(isa) and path.stat().st_mode & 0o777 == 0o600
        found = tuned.tuning_of(isa)  # in this process, too
        assert found is not before and found is tuned.tuning_of(isa) and tuned.parts_of(found, before) == parts
        assert found.origin.parts == tuple(parts) and found.origin.tuned and panel() == vectors * isa.lanes("f32")
        assert "tuned on 2" in str(sl.plan(q_heads=2, q_len=64, head_dim=32).origin)
    assert kept.stat().st_mode & 0o777 == 0o700
    (kept / "mine.txt").write_text("not a tuning")
    monkeypatch.setenv("SPEEDLIGHT_TUNING", "0")
    assert again() is before
    monkeypatch.setenv("SPEEDLIGHT_TUNING", "1")
    assert again().origin.parts == ("fma",)
    monkeypatch.setenv("SPEEDLIGHT_TUNING", "yes")
    with pytest.raises(sl.ArgumentError, match=r"^SPEEDLIGHT_TUNING: expected 0 .* got 'yes'\.$"):
        again()
    monkeypatch.delenv("SPEEDLIGHT_TUNING")
    again()
    assert tuned.forget_tuning(isa) and tuned.tuning_of(isa) is before and not tuned.forget_tuning(isa)
    assert [x.name for x in kept.iterdir()] == ["mine.txt"]


def test_no_other_cpu_unit_or_version_follows_it(kept, monkeypatch):
    isa = current_isa()
    path = tuned.keep_tuning(isa, ONE_VECTOR)
    assert path is not None
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "_sources", lambda: "other sources")
        assert again() is shipped(isa)
    with monkeypatch.context() as patch:
        patch.setattr(tuned, "cpu_identity", lambda: "another CPU")
        other = tuned.tuning_path(isa)
        assert again() is shipped(isa) and other is not None and other != path
        write(other, json.loads(path.read_bytes()[tuned._HEADER :]))
        assert again() is shipped(isa)
    foreign = isa_named("neon" if isa.arch == "x86_64" else "avx2")
    assert tuned.tuning_path(foreign) is None and tuned.tuning_of(foreign) is shipped(foreign)
    narrow = replace(isa, name="narrow")
    assert tuned.tuning_of(narrow) is shipped(narrow)
    assert again().origin.parts == ("fma", "decoding")


def write(path: Path, row: Any) -> None:
    """A file that is whole, whatever it says."""
    body = json.dumps(row).encode()
    path.write_bytes(tuned._MAGIC + tuned.sum_of(path, body) + body)


def believed() -> bool:
    """Whether the file is; if not, one warning says so, the first time."""
    errors._warned.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [again().origin.parts for _ in range(2)]
    assert found[0] == found[1] and len(said) == (not found[0])
    return bool(found[0])


def test_a_damaged_file_is_not_believed(kept):
    path = tuned.keep_tuning(current_isa(), ONE_VECTOR)
    assert path is not None and believed()
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-9] ^= 1
    for damaged in (b"", whole[:20], whole[:-1], whole + b" ", bytes(flipped), whole.replace(b"0.02", b"0.03")):
        path.write_bytes(damaged)
        assert not believed()
    os.truncate(path, 1 << 40)  # which takes no room on the disk, and more memory than there is
    assert not believed() and tuned.forget_tuning(current_isa()) and not path.exists()
    path.touch(0o600)
    path.write_bytes(whole)
    assert believed()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes")
def test_a_file_that_others_could_have_written_is_not_believed(kept):
    path = tuned.keep_tuning(current_isa(), ONE_VECTOR)
    assert path is not None and believed()
    for place, mode in ((path, 0o600), (kept, 0o700)):
        place.chmod(mode | 0o022)
        assert not believed() and not tuned.forget_tuning(current_isa()) and path.exists()
        place.chmod(mode)
    moved = kept / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert not believed()
    path.unlink()
    moved.rename(path)
    assert believed()


PLANTED = [
    {"fma": {"panels": 0}}, {"fma": {"panels": 17}}, {"fma": {"panels": 2.0}}, {"fma": {"panels": True}},
    {"fma": {"worth": [1.0, 1.0]}}, {"fma": {"worth": [1.0, 1.0, 0.0]}}, {"fma": {"worth": [1.0, 1.0, math.nan]}},
    {"fma": {"worth": 1.0}}, {"fma": {"worth": "one"}}, {"fma": {"speed": 1}}, {"fma": []}, {"speed": {}},
    {"fetching": {"cache_blocks": 25}}, {"fetching": {"groups": 3}}, {"fetching": {"keys": -1}},
    {"fetching": {"twice": 1}}, {"fetching": {"level": 0}}, {"decoding": {"tasks": 10**30}},
    {"threading": {"inline_seconds": math.inf}}, {"threading": {"apart": 0}}, {"tiles": []}, {"ranges": {"tasks": 3}},
    [], None, "fma",
]  # fmt: skip


def test_planted_numbers_are_not_believed(kept):
    """In files that are whole: wrong types, beyond limits, fields that are not tuned."""
    path = tuned.keep_tuning(current_isa(), ONE_VECTOR)
    assert path is not None
    row = json.loads(path.read_bytes()[tuned._HEADER :])
    for parts in PLANTED:
        write(path, row | {"parts": parts})
        assert not believed(), parts
    for wrong in (row | {"date": "today"}, {x: row[x] for x in row if x != "date"}, [row], "row", 3):
        write(path, wrong)
        assert not believed(), wrong
    path.write_bytes(tuned._MAGIC + tuned.sum_of(path, b"[" * 100_000) + b"[" * 100_000)
    assert not believed()
    write(path, row)
    assert believed()
    with pytest.raises(ValueError, match=r"fma\.panels: 17"):
        tuned.keep_tuning(current_isa(), {"fma": {"panels": 17}})


def test_what_cannot_be_forgotten_is_an_error(kept, monkeypatch):
    """Of a directory that cannot be written to; not where another process was first."""
    path = tuned.keep_tuning(current_isa(), ONE_VECTOR)
    assert path is not None

    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.raises(sl.FileError, match="tuning_.*: Permission denied. Delete it, or set SPEEDLIGHT_TUNING=0"):
            tuned.forget_tuning(current_isa())
    assert believed()
    monkeypatch.setattr(tuned, "read_kept", lambda path: (kept_files.read_kept(path), path.unlink())[0])
    assert tuned.forget_tuning(current_isa())


def test_nothing_is_kept_where_nothing_can_be(kept, monkeypatch):
    kept.write_text("not a directory")
    with pytest.warns(RuntimeWarning, match="cannot be"):
        assert tuned.keep_tuning(current_isa(), THREE) is None
    monkeypatch.setenv("SPEEDLIGHT_CACHE", "0")
    assert tuned.keep_tuning(current_isa(), THREE) is None and not tuned.forget_tuning(current_isa())
    assert again() is shipped(current_isa())


# --- what is taken


def times(gains: list[float], noise: float, turns: int = 11, seed: int = 0) -> tuple[trials.Times, trials.Times]:
    """Of as many problems: what stands, and a candidate that is so many times as fast."""
    rng = random.Random(seed)
    draw = lambda mean: [mean * math.exp(rng.gauss(0, noise)) for _ in range(turns)]  # noqa: E731
    return [draw(1.0) for _ in gains], [draw(1 / gain) for gain in gains]


def test_a_gain_is_taken_and_noise_is_not():
    assert trials.verdict(*times([1.05] * 6, 0.02)).taken
    assert not trials.verdict(*times([1.2, 1.2, 1.2, 0.9], 0.005)).taken  # one problem pays for the others
    assert not trials.verdict(*times([1.005] * 6, 0.0)).taken  # too little to be worth a file
    taken = [trials.verdict(*times([1.0] * 6, noise, seed=n)).taken for noise in (0.01, 0.1, 0.5) for n in range(300)]
    assert sum(taken) <= 0.01 * len(taken)
    assert sum(trials.verdict(*times([1.1] * 6, 0.05, seed=n)).taken for n in range(100)) >= 95


def test_how_sure_a_turn_is():
    for turns in range(trials.LEAST_TURNS, 40):
        below = [sum(math.comb(turns, i) for i in range(n + 1)) / 2**turns for n in range(turns)]
        at = trials._sure(turns)
        assert below[at] <= 0.01 < below[at + 1]


def fake_trial(gains: dict[int, float], monkeypatch: Any, *, wrong: int | None = None) -> trials.Trial:
    """Of decode tasks: each number is so many times as fast as what stands, which is 4."""
    speeds: dict[int, float] = {}

    def case(isa: Any) -> trials.Run:
        tasks = tuned.tuning_of(isa).decoding.tasks
        out = np.zeros(4, np.float32)
        run = trials.Run(lambda: out.fill(tasks == wrong), out, ())
        speeds[id(run.out)] = gains.get(tasks, 1.0)
        return run

    monkeypatch.setattr(trials, "_sample", lambda run, count: (run.call(), 0.01 / speeds[id(run.out)])[1])
    rows = {f"tasks {n}": {"decoding": {"tasks": n}} for n in gains}
    return trials.Trial("decode tasks", lambda tuning: rows, lambda: [case, case])


def test_the_fastest_is_tried_once_more(monkeypatch):
    base = TUNINGS["zen5"]
    trial = fake_trial({2: 1.1, 8: 1.3, 16: 0.7}, monkeypatch)
    monkeypatch.setattr(trials, "trials_of", lambda isa: [trial, trial])
    (first, found), (_, last) = trials.try_all(current_isa(), base, 7, 60.0, lambda: None)
    assert first.kept == "tasks 8" and first.confirmed is not None and round(first.confirmed.gain, 3) == 1.3
    assert tuned.parts_of(found, base) == tuned.parts_of(last, base) == {"decoding": {"tasks": 8}}
    assert round(first.verdicts["tasks 16"].worst, 3) == 0.7 and not first.verdicts["tasks 16"].taken
    steps: list[int] = []
    assert list(trials.try_all(current_isa(), base, 7, -1.0, lambda: steps.append(1))) == [] and len(steps) == 2


def test_bits_that_change_are_an_error(monkeypatch):
    trial = fake_trial({2: 2.0}, monkeypatch, wrong=2)
    with pytest.raises(errors.CompileError, match="decode tasks: tasks 2 changes bits"):
        trials.try_out(trial, current_isa(), TUNINGS["other"], 7)


def test_every_trial_is_within_limits():
    """Of every family, and on top of what any trial finds."""
    for isa in (current_isa(), isa_named("avx2")):
        for tuning in TUNINGS.values():
            for trial in trials.trials_of(isa):
                candidates = trial.candidates(tuning)
                assert len(candidates) >= 3
                for parts in candidates.values():
                    tuned._checked(json.loads(json.dumps(parts)), tuning)
                    ((name, fields),) = parts.items()
                    ((other, differ),) = tuned.parts_of(tuning.with_parts(parts), tuning).items()
                    assert name == other and differ.items() <= fields.items()


def test_cases_run(monkeypatch):
    """Each kind of problem, small; their results are those of calls."""
    q, k = trials.numbers((1, 32, 1, 128), "float32"), trials.numbers((1, 8, 130, 128), "float32")
    want = sl.attention(q, k, k).tobytes()
    isa = current_isa()
    for case in (trials.own_step("float32", 130), trials.cached_step("float32", 130)):
        run = case(isa)
        run.call()
        assert run.out.tobytes() == want
    run = trials.prefill("float32", 2, 64, 128, True)(isa)
    run.call()
    x = trials.numbers((1, 2, 64, 128), "float32")
    assert run.out.tobytes() == sl.attention(x, x, x, causal=True).tobytes()
    assert trials._sample(run, 2) > 0


# --- the command


def test_the_command(here, kept, monkeypatch):  # noqa: F811
    base, roofs = shipped(current_isa()), Roofs(1e12, 1e11, "2026-01-01")
    monkeypatch.setattr(roof, "roofs", lambda *_: roofs)
    trial = fake_trial({2: 1.1, 8: 1.3}, monkeypatch)
    monkeypatch.setattr(trials, "trials_of", lambda isa: [trial])
    done = here("tune", "--turns", "9")
    assert done.returncode == 0 and "tasks 8: 1.300 times as fast" in done.stdout, done.stderr
    assert again().decoding == replace(base.decoding, tasks=8)
    report = json.loads(here("info", "--json").stdout)
    assert report["schedule"] == {"family": base.family, "tuned": again().date, "parts": ["decoding"]}
    assert f"decoding tuned on {again().date}, else as shipped for" in here("info").stdout
    for words in (["plan", "--q-len", "64"], ["show", "--q-len", "1"]):
        assert json.loads(here(*words, "--json").stdout)["schedule"]["parts"] == ["decoding"]
        assert "decoding tuned on" in here(*words).stdout
    slower = fake_trial({2: 0.9, 8: 1.0}, monkeypatch)
    monkeypatch.setattr(trials, "trials_of", lambda isa: [slower])
    report = json.loads(here("tune", "--json").stdout)
    assert (
        report["parts"] == {}
        and report["trials"][0]["kept"] is None
        and report["kept_in"] == str(next(kept.glob("tun*")))
    )
    assert again().origin == (base.family, again().date, ()) and "the best on 2" in str(again().origin)
    assert json.loads(here("tune", "--reset", "--json").stdout) == {"isa": current_isa().name, "forgotten": True}
    assert "nothing kept" in here("tune", "--reset").stdout and again() is base


def test_what_was_not_measured_is_said(here, kept, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trials, "trials_of", lambda isa: [fake_trial({2: 1.1}, monkeypatch)])
    monkeypatch.setattr(command, "_SECONDS", 0.0)
    done = here("tune")
    assert "0 of 1: try again" in done.stdout and "nothing new: nothing gained" in done.stdout, done.stderr
    assert not kept.exists() or not list(kept.glob("tun*"))


def test_nothing_is_kept_of_what_was_interrupted(here, kept, monkeypatch):  # noqa: F811
    def interrupt(*_: Any) -> float:
        raise KeyboardInterrupt

    trial = fake_trial({2: 1.1}, monkeypatch)
    monkeypatch.setattr(trials, "_sample", interrupt)
    monkeypatch.setattr(trials, "trials_of", lambda isa: [trial])
    done = here("tune")
    assert done.returncode == 130 and not kept.exists()
    assert tuned._changes == ()
