"""Files of arrays: what is damaged, or promises more than it holds, is named before anything is made of it."""

from __future__ import annotations

import io
import time
import zipfile

import numpy as np
import pytest
from conftest import FULL

import speedlight as sl
from speedlight.files import read_arrays, write_arrays


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
