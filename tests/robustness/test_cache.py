"""The kernel cache (R16-18): races, damage, and places it must not trust. Never a wrong kernel, never an exception."""

from __future__ import annotations

import functools
import gc
import hashlib
import os
import re
import shutil
import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import FULL
from repeated import forget

import speedlight as sl
from speedlight import errors
from speedlight.cpu.memory.shape import Shape
from speedlight.cpu.runtime import compile as compiling
from speedlight.cpu.runtime import kept_files
from speedlight.expressions.program import Program
from speedlight.host.machine import current_isa

CODE = (
    "import warnings, numpy as np, speedlight as sl\n"
    "q = np.random.default_rng(0).standard_normal((1, 2, 10, 4)).astype(np.float32)\n"
    "with warnings.catch_warnings(record=True) as w:\n"
    "    warnings.simplefilter('always')\n"
    "    out = sl.attention(q, q, q)\n"
    "from speedlight.cpu.runtime.compile import _loaded\n"
    "ok = float(np.abs(out - sl.reference.attention(q, q, q)).max()) < 1e-5\n"
    "print(ok, len(w), next(iter(_loaded.values())).from_cache)"
)


DECODE = Shape("decode", current_isa(), "f32")  # the quickest to compile


def start(directory: Path, **environment: str) -> subprocess.Popen:
    env = os.environ | {"SPEEDLIGHT_CACHE_DIR": str(directory)} | environment
    return subprocess.Popen(
        [sys.executable, "-c", CODE], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def result(process: subprocess.Popen) -> list[str]:
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0, error
    return out.split()


def use(directory: Path, **environment: str) -> list[str]:
    """What a fresh process says, by this one, as if it were fresh; LLVM is asked once."""
    q = np.random.default_rng(0).standard_normal((1, 2, 10, 4)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name, value in {"SPEEDLIGHT_CACHE_DIR": str(directory), **environment}.items():
            patch.setenv(name, value)
        patch.setattr(compiling, "_loaded", {})
        patch.setattr(errors, "_warned", set())
        patch.setattr(compiling, "compile_ir", compiled)
        forget()
        right = float(np.abs(sl.attention(q, q, q) - sl.reference.attention(q, q, q)).max()) < 1e-5
        (kernel,) = compiling._loaded.values()
    forget()
    return [str(right), str(len(said)), str(kernel.from_cache)]


compiled = functools.cache(compiling.compile_ir)


@pytest.fixture(scope="module")
def used(tmp_path_factory) -> Path:
    """A cache with the kernel of CODE."""
    directory = tmp_path_factory.mktemp("used") / "cache"
    assert use(directory) == ["True", "0", "False"]
    return directory


@pytest.fixture
def own(tmp_path, used) -> Path:
    """A copy of that, to be spoilt."""
    return Path(shutil.copytree(used, tmp_path / "cache"))


def test_compiles_once_then_hits(tmp_path):
    directory = tmp_path / "cache"
    assert result(start(directory)) == ["True", "0", "False"]
    assert directory.stat().st_mode & 0o777 == 0o700
    files = sorted(directory.iterdir())  # the kernel, and what repeats calls
    assert [x.name.split("_")[:2] for x in files] == [["forward", "f32"], ["repeat", current_isa().arch.split("_")[0]]]
    assert {x.stat().st_mode & 0o777 for x in files} == {0o600}
    assert result(start(directory)) == ["True", "0", "True"]


def test_a_hit_is_what_would_be_emitted(tmp_path, monkeypatch):
    """The digest of the IR is kept beside the object: emitting again must give the same."""
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "c"))
    for storage in ("f32", "bf16"):
        shape = Shape("forward", current_isa(), storage, 3)
        compiling._make(shape)
        path = compiling.cache_path(shape)
        assert path is not None
        data = path.read_bytes()
        stored = data[len(compiling._MAGIC) + 32 : compiling._HEADER]
        assert stored == hashlib.sha256("".join(compiling._module(shape).parts()).encode()).digest()
        assert compiling._make(shape).from_cache


def test_processes_race(tmp_path):
    processes = [start(tmp_path / "cache") for _ in range(8 if FULL else 2)]
    assert all(result(p)[:2] == ["True", "0"] for p in processes)
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign"])
def test_damage_is_compiled_over(own, damage):
    (file,) = own.iterdir()
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
    assert use(own) == ["True", "0", "False"]
    assert use(own) == ["True", "0", "True"]


def test_an_unfinished_file_of_a_killed_process_is_not_read(tmp_path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    (directory / ".new-abc").write_bytes(b"half")
    assert use(directory) == ["True", "0", "False"]


def test_places_that_others_can_write_are_not_trusted(own):
    (file,) = own.iterdir()
    for others in (0o002, 0o020):
        own.chmod(0o700 | others)
        assert use(own) == ["True", "1", "False"]
        own.chmod(0o700)
        file.chmod(0o600 | others)
        assert use(own)[0::2] == ["True", "False"]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a file away")
def test_a_foreign_owner_is_not_trusted(own):
    os.chown(own, 12345, 12345)
    assert use(own) == ["True", "1", "False"]


def test_symbolic_links_are_not_followed(tmp_path, own):
    (tmp_path / "link").symlink_to(own)
    assert use(tmp_path / "link") == ["True", "1", "False"]
    (file,) = own.iterdir()
    moved = tmp_path / "planted.o"
    file.rename(moved)
    file.symlink_to(moved)
    assert use(own)[0::2] == ["True", "False"]


def test_no_place_at_all(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    assert use(blocked / "cache") == ["True", "1", "False"]
    assert use(tmp_path / "unused", SPEEDLIGHT_CACHE="0") == ["True", "0", "False"]
    with pytest.raises(sl.ArgumentError, match=r"^SPEEDLIGHT_CACHE: expected 0 \(keep no kernels\) or 1 .*got 'maybe'"):
        use(tmp_path / "unused", SPEEDLIGHT_CACHE="maybe")
    assert not (tmp_path / "unused").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setattr(errors, "_warned", set())

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_files.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not compiling._make(DECODE).from_cache
    assert list((tmp_path / "c").iterdir()) == []


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A cache with one kernel, DECODE's."""
    monkeypatch.setenv("SPEEDLIGHT_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setattr(errors, "_warned", set())
    path = compiling.cache_path(DECODE)
    assert path is not None
    path.parent.mkdir(mode=0o700)
    text, objects = decode_compiled()
    code = len(objects[0]).to_bytes(8, "little") + b"".join(objects)
    path.write_bytes(compiling._MAGIC + kept_files.sum_of(path, code) + hashlib.sha256(text.encode()).digest() + code)
    path.chmod(0o600)
    assert compiling._objects_in(path, kept_files.read_kept(path) or b"") == objects
    return path.parent


@functools.cache
def decode_compiled() -> tuple[str, tuple[bytes, ...]]:
    texts = compiling._module(DECODE).parts()
    return "".join(texts), tuple([compiling.compile_ir(DECODE, text) for text in texts])


def test_another_kernels_file_under_this_name_is_compiled_over(directory):
    other = replace(DECODE, storage="f64")
    path = compiling.cache_path(other)
    assert path is not None
    (file,) = directory.iterdir()
    file.rename(path)
    assert not compiling._make(other).from_cache
    assert compiling._make(other).from_cache


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_place_of_a_file_is_not_waited_for(directory):
    (file,) = directory.iterdir()
    file.unlink()
    os.mkfifo(file, 0o600)
    code = "import pathlib, sys; from speedlight.cpu.runtime import kept_files\n"
    command = [sys.executable, "-W", "error", "-c", code + "kept_files.read_kept(pathlib.Path(sys.argv[1]))", str(file)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "is not a file" in read.stderr
    assert compiling.cached_kernels() == {}
    with pytest.warns(RuntimeWarning, match="is not a file"):
        assert not compiling._make(DECODE).from_cache
    assert compiling._make(DECODE).from_cache  # written in its place


def test_only_our_own_files_are_cleared(directory):
    """By name and by how they begin; of some older version, too."""
    (ours,) = directory.iterdir()
    digest = "0" * 12 + "_" + "f" * 64
    old = directory / f"forward_bf16_amx-software_32x2_{digest}.o"
    old.write_bytes(b"speedlight object 1\nwhatever")
    others = [
        directory / name
        for name in ("notes.o", f"decode_f32_avx2_{digest}.o", f"{ours.stem}.a", "sub_" + digest + ".o")
    ]
    for path, content in zip(others[:3], (b"speedlight object 2\n", b"ELF", ours.read_bytes()), strict=True):
        path.write_bytes(content)
    others[3].mkdir()
    link = directory / f"link_{digest}.o"
    link.symlink_to(ours)
    assert sorted(compiling.cached_kernels()) == sorted([ours, old])
    assert compiling.clear_kernels() == 2
    assert sorted(directory.iterdir()) == sorted([*others, link])


def test_directories_that_are_made_are_for_us_alone(tmp_path):
    """All of them, whatever the umask; one that was there stays as it is."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o755)
    before = os.umask(0)
    try:
        kept_files._make_directory(tmp_path / "a" / "b" / "c" / "d")
    finally:
        os.umask(before)
    modes = [(tmp_path / at).stat().st_mode & 0o777 for at in ("a", "a/b", "a/b/c", "a/b/c/d")]
    assert modes == [0o755, 0o700, 0o700, 0o700]


def test_every_source_that_kernels_may_need_is_in_the_digest(tmp_path):
    """A number that kernels are made of may stand anywhere."""
    package = tmp_path / "speedlight"
    shutil.copytree(Path(sl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    right = kept_files.digest_of(package, compiling.ROOMS)
    assert right == compiling._sources()
    paths = sorted(x for room in compiling.ROOMS for x in (package / room).rglob("*.py"))
    assert {"problem.py", "schedule.py", "storage.py", "forward_call.py", "task.py"} < {path.name for path in paths}
    for path in paths:
        source = path.read_bytes()
        path.write_bytes(source + b"#")
        assert kept_files.digest_of(package, compiling.ROOMS) != right, path
        path.write_bytes(source)
    (package / "cpu" / "memory" / "records.py").rename(package / "cpu" / "fields.py")
    assert kept_files.digest_of(package, compiling.ROOMS) != right


# --- kernels in memory


def test_kernels_hold_no_arrays(rng):
    """The array of the call for which a kernel was made goes when its owner lets it go."""
    q = rng.standard_normal((1, 2, 20, 16), dtype=np.float32)
    compiling._loaded.clear()
    for option, dtype in (("score", np.float32), ("mask", bool)):
        array = np.ones((20, 20), dtype)
        sl.attention(q, q, q, **{option: array})
        alive = weakref.ref(array)
        del array
        gc.collect()
        assert alive() is None


def test_so_many_kernels_are_loaded_at_most(rng, monkeypatch):
    """The one that was used longest ago goes, and comes back when it is asked for; who holds one can run it."""
    monkeypatch.setattr(compiling, "_loaded", {})
    monkeypatch.setattr(compiling, "MOST_LOADED", 2)
    inputs = [rng.standard_normal((1, 1, n, 16)).astype(t) for n, t in ((1, "f4"), (1, "f8"), (40, "f4"))]
    options = [{"out": np.empty_like(x)} for x in inputs]

    def call(n: int) -> bytes:
        return sl.attention(inputs[n], inputs[n], inputs[n], **options[n]).tobytes()

    want = [call(n) for n in range(3)]
    assert len(compiling.loaded_kernels()) == 2
    first, second = (weakref.ref(x) for x in compiling._loaded.values())
    call(1)  # now the other is the oldest
    held = second()
    call(0)
    gc.collect()
    assert first() is not None and second() is held is not None
    assert held.symbol not in compiling.loaded_kernels()
    del held
    gc.collect()
    assert second() is None
    for _ in range(3):
        assert [call(n) for n in range(3)] == want
        assert len(compiling.loaded_kernels()) == 2


LEFT = """import gc, itertools, mmap
from pathlib import Path
from speedlight.cpu.runtime import compile
from speedlight.cpu.memory.shape import Shape
from speedlight.host.machine import current_isa
sizes = []
for n in range(5):
    for m in range(60):  # each another text: what is compiled again is remembered
        text = f"define void @nothing{60 * n + m}() {{ ret void }}"
        compile.compile_ir(Shape("decode", current_isa(), "f32"), text)
    gc.collect()
    sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)
print(min(b - a for a, b in itertools.pairwise(sizes)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_compiling_leaves_nothing_behind():
    """LLVM's passes of a kernel take some 18 KB that were never freed: 1 MB of sixty. In a process of its own, whose
    heap has no room left over.
    """
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 600 << 10, done.stderr


def test_what_kernels_share_is_compiled_once(monkeypatch):
    """Another mask's kernel differs in a part of its own; the two parts together are the whole kernel."""
    monkeypatch.setenv("SPEEDLIGHT_CACHE", "0")
    masks = [sl.expression(lambda b, h, i, j: i > j), sl.expression(lambda b, h, i, j: i != j)]
    shapes = [Shape("forward", current_isa(), "f32", 1, Program(str(n), x.root)) for n, x in enumerate(masks)]
    first, second = (compiling._module(shape).parts() for shape in shapes)
    assert first[0] == second[0] and first[1] != second[1]
    monkeypatch.setattr(compiling, "_compiled", functools.lru_cache(maxsize=16)(compiling._compiled.__wrapped__))
    for shape in shapes:
        assert not compiling._make(shape).from_cache
    assert compiling._compiled.cache_info()[:2] == (1, 3)  # hits, misses
    names = [
        re.findall(r'^define (?:internal )?\S+ @"(\w+)"', text, re.M) for text in (*first, compiling.emit(shapes[0]))
    ]
    assert sorted(names[0] + names[1]) == sorted(names[2]) and "task" in names[1] and "score_tile" in names[0]
