"""Files of arrays: what is damaged, or promises more than it holds, is named before anything is made of it."""

from __future__ import annotations

import io
import sys
import time
import zipfile

import numpy as np
import pytest
from conftest import FULL
from injection import interrupted, needs_places, places

import speedlight as sl
from speedlight.arrays.files import read_arrays, write_arrays


def refused(path, match):
    start = time.process_time()
    with pytest.raises(sl.FileError, match=match):
        read_arrays([path])
    assert time.process_time() - start < 0.5


def test_a_small_file_that_unpacks_to_much_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(40_000_000))
    assert path.stat().st_size < 1 << 20
    refused(path, "bytes promise 320,000,128")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:  # many of a size each that would do
        for n in range(80):
            archive.writestr(f"{n}.npy", bytes(1 << 20))
    refused(path, "bytes promise 83,886,080")


def test_what_numpy_compresses_well_can_be_read(tmp_path):
    seen = np.zeros((4096, 4096), bool)
    np.savez_compressed(tmp_path / "seen.npz", seen=seen)  # 1,000 times smaller, and still not much
    assert (read_arrays([tmp_path / "seen.npz"])["seen"] == seen).all()


@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compressions_that_numpy_does_not_write(tmp_path, kind):
    array = io.BytesIO()
    np.save(array, np.zeros(9))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", kind) as archive:
        archive.writestr("x.npy", array.getvalue())
    refused(tmp_path / "a.npz", "expected members that NumPy writes")


def test_a_member_that_is_longer_than_it_says(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(1_000_000))
    data = path.read_bytes()
    real, less = (8_000_128).to_bytes(4, "little"), (1000).to_bytes(4, "little")
    assert real in data
    path.write_bytes(data.replace(real, less))
    refused(path, "a.npz|x.npy")


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors"])
def test_damaged_files_are_named_at_once(rng, tmp_path, suffix):
    if suffix == ".safetensors":
        pytest.importorskip("safetensors")
    path, refusals = tmp_path / f"a{suffix}", 0
    arrays = {"out": rng.standard_normal((3, 40), dtype=np.float32)} | ({} if suffix == ".npy" else {"y": np.arange(5)})
    write_arrays(path, arrays)
    data = path.read_bytes()
    for _ in range(5000 if FULL else 200):
        damaged, at = bytearray(data), int(rng.integers(len(data)))
        match rng.integers(3):
            case 0:
                damaged = damaged[:at]
            case 1:
                damaged[at] = int(rng.integers(256))
            case 2:
                damaged[at : at + 4] = rng.bytes(4)
        path.write_bytes(damaged)
        start = time.process_time()
        try:
            found = read_arrays([path])
        except sl.FileError as error:
            refusals += 1
            assert str(error)
        else:
            assert sum(x.nbytes for x in found.values()) <= len(data)
        assert time.process_time() - start < 1
    assert refusals > 20


@needs_places
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors"])
def test_a_file_is_the_old_one_or_the_new_wherever_an_interrupt_comes(tmp_path, suffix):
    path, contents = tmp_path / f"a{suffix}", [{"out": np.full(9, n)} for n in range(2)]
    within = ("speedlight/arrays/files",)

    def write():
        write_arrays(path, contents[1])

    write()
    found = places(write, within)
    assert len(found) > 5
    for n in found:
        write_arrays(path, contents[0])
        assert interrupted(write, n, within)
        assert [x.name for x in tmp_path.iterdir()] == [path.name], f"place {n}"
        (found,) = read_arrays([path]).values()
        assert found[0] in (0, 1) and (found == found[0]).all()


def test_a_disk_that_is_full_keeps_the_old_file(tmp_path):
    """Whatever a limit leaves room for."""
    resource = pytest.importorskip("resource")
    cache, x = sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=64), np.ones((1, 1, 64, 8), np.float32)
    cache.save(tmp_path / "c.safetensors")
    cache.append(0, x, x)
    before, (_, most) = (tmp_path / "c.safetensors").read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1, 1000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        try:
            with pytest.raises(sl.FileError, match=r"c\.safetensors: "):
                cache.save(tmp_path / "c.safetensors")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert [x.name for x in tmp_path.iterdir()] == ["c.safetensors"]
        assert (tmp_path / "c.safetensors").read_bytes() == before


def test_without_safetensors_a_file_is_not_called_damaged(tmp_path, monkeypatch):
    cache, path = sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=64), tmp_path / "c.safetensors"
    cache.save(path)
    for name in [x for x in sys.modules if x.split(".")[0] == "safetensors"]:
        monkeypatch.setitem(sys.modules, name, None)
    before = path.read_bytes()
    for call in (
        lambda: cache.save(path),
        lambda: sl.KVCache.load(path),
        lambda: read_arrays([path]),
        lambda: write_arrays(path, {}),
    ):
        with pytest.raises(sl.UnsupportedError, match=r"^safetensors: .* Install the package safetensors\.$"):
            call()
    assert [x.name for x in tmp_path.iterdir()] == [path.name] and path.read_bytes() == before
