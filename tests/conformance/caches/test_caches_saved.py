"""Caches in files: they come back as they were; what is damaged, or promises too much, is named at once."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from caches import made
from conftest import FULL
from problems import CODES, DTYPES, numpy_dtype, qkv, taken

import speedlight as sl
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


KINDS = [  # and how many tokens; 17: a key's last is no pair
    *(({"dtype": x, "d": 16}, 40) for x in DTYPES),
    ({"dtype": "bfloat16", "d": 17}, 40),
    *(({"dtype": x}, 400) for x in CODES),
    ({"dtype": "float32", "window": 70, "keep_first": 5, "capacity": None}, 400),
]


@pytest.mark.parametrize(("kind", "n"), KINDS)
def test_saved_caches_come_back(rng, tmp_path, kind, n):
    cache = made(**kind, dv=20, layers=2, batch=2)
    q, k, v = qkv(rng, taken(cache.dtype), 2, 4, 2, n, n, cache.head_dim, 20)
    cache.append(0, k, v, new_lengths=[n, 7])
    cache.append(1, k[:, :, :3], v[:, :, :3])
    cache.save(tmp_path / "chat.safetensors")
    again = sl.KVCache.load(tmp_path / "chat.safetensors")
    assert repr(again) == repr(cache) and [again.lengths(x) for x in (0, 1)] == [(n, 7), (3, 3)]
    assert again.keys(0).tobytes() == cache.keys(0).tobytes()
    new = [x[:, :, :1] for x in (q, k, v)]
    assert all(again.attend(x, *new).tobytes() == cache.attend(x, *new).tobytes() for x in (0, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["chat.safetensors"]


def test_damaged_files_are_named(rng, tmp_path):
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32"), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    data, refused = path.read_bytes(), 0
    for _ in range(5000 if FULL else 400):
        damaged = bytearray(data)
        at = int(rng.integers(len(data) if rng.random() < 0.3 else 700))
        match rng.integers(3):
            case 0:
                damaged = damaged[:at]
            case 1:
                damaged[at] = int(rng.integers(256))
            case 2:
                damaged[at : at + 4] = rng.choice([b"9999", b"-111", b'""""', b"null"])
        path.write_bytes(damaged)
        start = time.process_time()
        try:
            back = sl.KVCache.load(path)
            assert back.length(0) <= back.capacity and back.keys(0).nbytes <= len(data)
        except sl.FileError as error:
            refused += 1
            assert "c.safetensors" in str(error)
        assert time.process_time() - start < 1
    assert refused > 100
    with pytest.raises(sl.FileError, match="No such file"):
        sl.KVCache.load(tmp_path / "none.safetensors")


def written(path, change):
    """A saved cache with other words in its header."""
    length = int.from_bytes(path.read_bytes()[:8], "little")
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


SIZES = ("0", "-1", "2", "17", "3000000", *(str(1 << n) for n in (31, 46, 63)), "9" * 5000, "1e3", "", "٣")


@pytest.mark.parametrize("kind", [{}, {"window": 70, "keep_first": 5, "capacity": None}])
def test_no_size_of_a_file_is_believed(rng, tmp_path, kind):
    """Every size is held against the file before anything is made: at once, and in little memory."""
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32", **kind), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    data = path.read_bytes()
    for name in ("layers", "batch", "kv_heads", "head_dim", "value_dim", "capacity", "window", "keep_first"):
        for size in SIZES:
            path.write_bytes(data)
            written(path, lambda header: header["__metadata__"].update({name: size}))  # noqa: B023
            start = time.process_time()
            try:
                again = sl.KVCache.load(path)
            except sl.FileError as error:
                assert "c.safetensors" in str(error)
            else:
                assert name in ("capacity", "window", "keep_first") or size == str(getattr(cache, name))
                assert again.lengths(0) == cache.lengths(0)
                assert again.keys(0).tobytes() == cache.keys(0).tobytes() or name == "window"
            assert time.process_time() - start < 2, (name, size)


def test_a_ring_that_was_written_less_far_or_further_than_its_lengths_say_is_refused(rng, tmp_path):
    """Past its length a ring may hold tokens that were forgotten, as far as they came round to none that are seen."""
    import safetensors.numpy

    _, k, v = qkv(rng, "float32", 1, 4, 2, 1000, 1000, 16, 16)
    cache, path = made("float32", window=70, keep_first=5, capacity=None), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    with safetensors.safe_open(path, "np") as file:
        words, stored = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    least = next(n for n in range(1000, -1, -1) if cache._ring.lost(n, n, 1000)) + 1
    for lengths, written, fits in (
        (1000, 1000, True),
        (1000, 999, False),
        (least, 1000, True),
        (least - 1, 1000, False),
    ):
        stored["lengths"][0, 0], stored["written"][0, 0] = lengths, written
        safetensors.numpy.save_file(stored, path, words)
        if fits:
            wanted = cache.copy()
            wanted.truncate(lengths)
            assert sl.KVCache.load(path).keys(0).tobytes() == wanted.keys(0).tobytes()
        else:
            with pytest.raises(sl.FileError, match=f"sequence of {lengths} tokens sees; of {written} that were there"):
                sl.KVCache.load(path)


def test_a_code_of_nan_is_refused(tmp_path):
    """A row that has one has a scale of NaN: kernels widen codes as numbers."""
    cache, x = made("fp8"), np.ones((1, 2, 3, 16), np.float32)
    cache.append(0, x, x)
    cache.save(tmp_path / "c.safetensors")
    (tmp_path / "c.safetensors").write_bytes(
        (tmp_path / "c.safetensors").read_bytes().replace(b"\x7e" * 16, b"\x7f" * 16, 1)
    )
    with pytest.raises(sl.FileError, match=r"keys.0 of numbers; got NaN"):
        sl.KVCache.load(tmp_path / "c.safetensors")


@pytest.mark.parametrize("dtype", [*DTYPES, *CODES])
def test_a_sequence_of_a_pool_is_saved_as_a_cache(rng, tmp_path, dtype):
    """Of layers of different lengths, one of them none; the cache attends with the pool's bits."""
    kind, path = numpy_dtype(taken(dtype)), tmp_path / "sequence.safetensors"
    pool = sl.PagePool(layers=3, pages=20, page_size=16, kv_heads=2, head_dim=24, value_dim=17, dtype=dtype)
    others, mine = pool.sequence(), pool.sequence()
    for layer, n in enumerate((40, 17)):
        for sequence in (others, mine):
            k, v = (rng.standard_normal((n, 2, d)).astype(kind) for d in (24, 17))
            pool.append(layer, [sequence], k, v)
    mine.save(path)
    cache = sl.KVCache.load(path)
    assert [cache.lengths(layer) for layer in range(3)] == [(40,), (17,), (0,)]
    q = rng.standard_normal((1, 4, 24)).astype(kind)
    for layer in range(2):
        assert cache.keys(layer)[0].tobytes() == mine.keys(layer).tobytes()
        assert cache.values(layer)[0].tobytes() == mine.values(layer).tobytes()
        one = pool.attend(layer, [mine], q)
        assert cache.attend(layer, q.swapaxes(0, 1)[None])[0, :, 0].tobytes() == one[0].tobytes()
    with pytest.raises(sl.FileError, match="expected a name that ends in .safetensors"):
        mine.save(tmp_path / "sequence")


@pytest.mark.parametrize("dtype", CODES)
def test_signs_of_scales_that_are_zero_or_nan_are_dropped(rng, tmp_path, dtype):
    """A row of zeros has a scale of +0, one with a NaN a scale of NaN: kernels read a sign there as another thing."""
    cache = made(dtype=dtype)
    _, k, v = qkv(rng, taken(dtype), 1, 4, 2, 20, 20, cache.head_dim, cache.value_dim)
    k[:, :, 3] = v[:, :, 3] = 0
    k[:, :, 19, 0] = v[:, :, 19, 0] = np.nan
    cache.append(0, k, v)
    path = tmp_path / "signs.safetensors"
    cache.save(path)
    stored, words = read_arrays([path]), read_metadata(path)
    for name, x in stored.items():
        if "_scale" in name:
            assert (x == 0).any() and np.isnan(x).any()
            stored[name] = np.where((x == 0) | np.isnan(x), np.copysign(x, np.float32(-1)), x)
    write_arrays(path, stored, words)
    again = sl.KVCache.load(path)
    parts = [x._storage.parts(0, [20]) for x in (cache, again)]
    for mine, theirs in zip(*parts, strict=True):
        assert mine[1].tobytes() == theirs[1].tobytes()
