"""The kernel cache (R16-18): races, damage, and places it must not trust. Never a wrong kernel, never an exception."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speedlight.cpu import compile as compiling
from speedlight.cpu.microkernels import Shape
from speedlight.machine import current_isa

CODE = (
    "import warnings, numpy as np, speedlight as sl\n"
    "q = np.random.default_rng(0).standard_normal((1, 2, 100, 32)).astype(np.float32)\n"
    "with warnings.catch_warnings(record=True) as w:\n"
    "    warnings.simplefilter('always')\n"
    "    out = sl.attention(q, q, q)\n"
    "from speedlight.cpu.compile import _loaded\n"
    "ok = float(np.abs(out - sl.reference.attention(q, q, q)).max()) < 1e-5\n"
    "print(ok, len(w), next(iter(_loaded.values())).from_cache)"
)


def start(directory: Path, **environment: str) -> subprocess.Popen:
    env = os.environ | {"SPEEDLIGHT_CACHE_DIR": str(directory)} | environment
    return subprocess.Popen([sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: subprocess.Popen) -> list[str]:
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    return out.split()


def use(directory: Path, **environment: str) -> list[str]:
    return result(start(directory, **environment))


def test_compiles_once_then_hits(tmp_path):
    directory = tmp_path / "cache"
    assert use(directory) == ["True", "0", "False"]
    assert directory.stat().st_mode & 0o777 == 0o700
    (file,) = directory.iterdir()
    assert file.name.startswith("forward_f32_") and file.stat().st_mode & 0o777 == 0o600
    assert use(directory) == ["True", "0", "True"]


def test_a_hit_is_what_would_be_emitted(tmp_path, monkeypatch):
    """The digest of the IR is kept beside the object: emitting again must give the same."""
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "c"))
    for storage in ("f32", "bf16"):
        shape = Shape(current_isa(), storage, 3)
        compiling._make(shape)
        path = compiling.cache_path(shape)
        assert path is not None
        data = path.read_bytes()
        stored = data[len(compiling._MAGIC) + 32 : compiling._HEADER]
        assert stored == hashlib.sha256(compiling.emit(shape).encode()).digest()
        assert compiling._make(shape).from_cache


def test_processes_race(tmp_path):
    processes = [start(tmp_path / "cache") for _ in range(8)]
    assert all(result(p)[:2] == ["True", "0"] for p in processes)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign"])
def test_damage_is_compiled_over(tmp_path, damage):
    directory = tmp_path / "cache"
    use(directory)
    (file,) = directory.iterdir()
    data = bytearray(file.read_bytes())
    match damage:
        case "truncated":
            data = data[: len(data) // 2]
        case "empty":
            data = bytearray()
        case "flipped":
            data[len(data) // 2] ^= 16
        case "foreign":
            data = bytearray(b"#!/bin/sh\n")
    file.write_bytes(data)
    assert use(directory) == ["True", "0", "False"]
    assert use(directory) == ["True", "0", "True"]


def test_an_unfinished_file_of_a_killed_process_is_not_read(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    (directory / ".new-abc").write_bytes(b"half")
    assert use(directory) == ["True", "0", "False"]


def test_places_that_others_can_write_are_not_trusted(tmp_path):
    directory = tmp_path / "cache"
    use(directory)
    directory.chmod(0o777)
    assert use(directory) == ["True", "1", "False"]
    directory.chmod(0o700)
    (file,) = directory.iterdir()
    file.chmod(0o666)
    assert use(directory)[0::2] == ["True", "False"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_foreign_owner_is_not_trusted(tmp_path):
    directory = tmp_path / "cache"
    use(directory)
    os.chown(directory, 12345, 12345)
    assert use(directory) == ["True", "1", "False"]


def test_symbolic_links_are_not_followed(tmp_path):
    real = tmp_path / "real"
    use(real)
    (tmp_path / "link").symlink_to(real)
    assert use(tmp_path / "link") == ["True", "1", "False"]
    (file,) = real.iterdir()
    moved = tmp_path / "planted.o"
    file.rename(moved)
    file.symlink_to(moved)
    assert use(real)[0::2] == ["True", "False"]


def test_no_place_at_all(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert use(blocked / "cache") == ["True", "1", "False"]
    assert use(tmp_path / "unused", SPEEDLIGHT_CACHE="0") == ["True", "0", "False"]
    assert not (tmp_path / "unused").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setattr(compiling, "_warned", False)

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiling.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not compiling._make(Shape(current_isa(), "f32", 3)).from_cache
    assert list((tmp_path / "c").iterdir()) == []
