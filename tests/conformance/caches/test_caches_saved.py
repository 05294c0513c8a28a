"""Caches in files: they come back as they were; what is damaged, or promises too much, is named at once."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import numpy as np
import pytest
from caches import made
from conftest import FULL
from injection import interrupted, needs_places, places
from problems import CODES, DTYPES, numpy_dtype, qkv, quantise, taken

import speedlight as sl
from speedlight.arrays.files import read_arrays, read_metadata, write_arrays

pytestmark = pytest.mark.usefixtures("one_width")  # how caches lie is seen at any width of panels


KINDS = [  # and how many tokens; 17: a key's last is no pair
    *(({"dtype": x, "d": 16}, 40) for x in DTYPES),
    ({"dtype": "bfloat16", "d": 17}, 40),
    *(({"dtype": x}, 400) for x in CODES),
    ({"dtype": "float32", "window": 70, "keep_first": 5, "capacity": None}, 400),
    *(({"dtype": x, "d": 40, "window": 300, "capacity": None}, 1000) for x in ("bfloat16", *CODES)),
    *(({"dtype": x, "d": 5}, 33) for x in CODES),
    *(({"dtype": x, "d": 130, "keep_first": 20, "window": 17, "capacity": None}, 700) for x in CODES),
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


def parts_of(cache):
    """The bytes of all slots in use, scales among them, as a file has them."""
    held = [list(map(cache._ring.held, *pair)) for pair in cache._now()]
    return [x.tobytes() for n, slots in enumerate(held) for both in cache._storage.parts(n, slots) for x in both]


@pytest.mark.units("dtype")
@pytest.mark.parametrize("dtype", [*DTYPES, *CODES])
@pytest.mark.parametrize("more", [{}, {"window": 70, "keep_first": 5, "capacity": None}], ids=["whole", "ring"])
def test_a_loaded_cache_has_every_slot_and_goes_on_without_its_file(rng, tmp_path, dtype, more):
    """Of keys and of latents: codes and scales are moved as they are, and appends never reach the file."""
    for sizes in ({"head_dim": 70, "value_dim": 33}, {"head_dim": 70, "value_dim": 33, "latent": True}):
        if "latent" in sizes and dtype == "int4":
            continue
        sizes |= {"layers": 2, "batch": 3, "kv_heads": 2, "dtype": dtype, "capacity": 300} | more
        cache, path = sl.KVCache(**sizes), tmp_path / f"{len(sizes)}.safetensors"
        k = rng.standard_normal((3, 2, 250, 70)).astype(numpy_dtype(taken(dtype)))
        new = (k,) if "latent" in sizes else (k, k[..., :33])
        cache.append(0, *new, new_lengths=[250, 17, 0])
        cache.save(path)
        before, loaded = path.read_bytes(), sl.KVCache.load(path)
        assert parts_of(loaded) == parts_of(cache) and loaded.lengths(0) == (250, 17, 0)
        for x in (loaded, cache):
            x.append(0, *(y[:, :, :40] for y in new))
        assert parts_of(loaded) == parts_of(cache) and path.read_bytes() == before
        path.unlink()
        assert loaded.keys(0).tobytes() == cache.keys(0).tobytes()


def test_only_the_user_reads_a_file_whose_name_is_taken_at_once(tmp_path):
    """The mode is that of the user alone whatever the umask, also where a file of the name was everybody's."""
    cache, path = sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=64), tmp_path / "c.safetensors"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        cache.save(path)
        assert reader.read() == b"old"
    if os.name == "posix":
        old = os.umask(0)
        try:
            path.chmod(0o644)
            cache.save(path)
        finally:
            os.umask(old)
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *x, name=name, real=real: (done.append(name), real(*x))[1])
    sl.KVCache(layers=1, kv_heads=1, head_dim=8, capacity=64).save(tmp_path / "c.safetensors")
    assert done == ["fsync", "replace"]


def test_a_file_that_is_cut_anywhere_or_has_any_other_byte_in_its_header_is_refused_or_the_same(rng, tmp_path):
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("int8"), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    cache.save(path)
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for at in range(0, len(data), 1 if FULL else 7):
        path.write_bytes(data[:at])
        with pytest.raises(sl.FileError, match=r"c\.safetensors"):
            sl.KVCache.load(path)
    for at in range(0, header, 1 if FULL else 3):
        for flipped in (data[at] ^ 1, data[at] ^ 0x80, ord("9")):
            path.write_bytes(data[:at] + bytes([flipped]) + data[at + 1 :])
            try:
                again = sl.KVCache.load(path)
            except sl.FileError as error:
                assert "c.safetensors" in str(error)
            else:
                assert again.keys(0).nbytes == cache.keys(0).nbytes


@pytest.mark.parametrize("length", [1, (1 << 63) - 1, (1 << 64) - 1, 100 << 20])
def test_a_header_that_is_longer_than_its_file_allocates_nothing(tmp_path, length):
    path = tmp_path / "c.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{" * 100)
    start = time.process_time()
    with pytest.raises(sl.FileError, match=r"c\.safetensors"):
        sl.KVCache.load(path)
    assert time.process_time() - start < 0.5


def test_a_cache_is_not_written_to_while_it_is_copied(rng, tmp_path, monkeypatch):
    """A thread that appends meanwhile is told so, and one that saves while another appends."""
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32"), tmp_path / "c.safetensors"
    cache.append(0, k, v)
    real, refused = type(cache._storage).parts, []

    def parts(self, *x):
        def append():
            try:
                cache.append(0, k, v)
            except sl.CacheBusy as error:
                refused.append(str(error))

        thread = threading.Thread(target=append)
        thread.start()
        thread.join()
        return real(self, *x)

    monkeypatch.setattr(type(cache._storage), "parts", parts)
    cache.save(path)
    assert refused == ["layer 0: another thread is appending to it, or saves it. Append from one thread at a time."]
    assert sl.KVCache.load(path).lengths(0) == (9,)
    monkeypatch.undo()
    cache._claims.add(0)
    with pytest.raises(sl.CacheBusy, match="layer 0: another thread"):
        cache.save(path)
    cache._claims.clear()
    cache.append(0, k, v)
    assert cache.lengths(0) == (18,) and sl.KVCache.load(path).lengths(0) == (9,)


@needs_places
def test_save_and_load_are_whole_or_nothing_wherever_an_interrupt_comes(rng, tmp_path):
    _, k, v = qkv(rng, "float32", 1, 4, 2, 9, 9, 16, 16)
    cache, path = made("float32"), tmp_path / "c.safetensors"
    within = ("speedlight/kv/", "speedlight/arrays/files")
    cache.save(path)
    old = path.read_bytes()
    cache.append(0, k, v)
    cache.save(path)
    new = path.read_bytes()
    for n in places(lambda: cache.save(path), within):
        path.write_bytes(old)
        assert interrupted(lambda: cache.save(path), n, within)
        assert path.read_bytes() in (old, new) and [x.name for x in tmp_path.iterdir()] == [path.name]
        assert not cache._claims
    cache.append(0, k, v)
    path.write_bytes(new)
    for n in places(lambda: sl.KVCache.load(path), within):
        assert interrupted(lambda: sl.KVCache.load(path), n, within)
    assert path.read_bytes() == new and sl.KVCache.load(path).lengths(0) == (9,)


def test_a_file_of_another_kind_says_who_reads_it(tmp_path):
    pool, path = sl.PagePool(layers=1, pages=2, page_size=16, kv_heads=1, head_dim=8), tmp_path / "x.safetensors"
    pool.save(path, [pool.sequence()])
    with pytest.raises(sl.FileError, match=r"KVCache.save\(\) wrote; .* load\(\) of a speedlight.PagePool reads it"):
        sl.KVCache.load(path)
    write_arrays(path, {"x": np.zeros(1)}, {"format": "speedlight key-value cache", "version": "2"})
    with pytest.raises(sl.FileError, match="expected version 1; got '2'"):
        sl.KVCache.load(path)


@pytest.mark.skipif(sys.platform == "win32", reason="umask")
def test_memory_of_a_file_is_not_taken_twice(tmp_path):
    """A file is read where it is mapped: what Python allocates for a load is little."""
    import tracemalloc

    cache, path = sl.KVCache(layers=1, kv_heads=2, head_dim=64, capacity=4096), tmp_path / "c.safetensors"
    x = np.ones((1, 2, 4096, 64), np.float32)
    cache.append(0, x, x)
    cache.save(path)
    tracemalloc.start()
    try:
        loaded = sl.KVCache.load(path)
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()
    assert loaded.lengths(0) == (4096,)


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


def test_files_of_four_bits_have_two_codes_in_a_byte(rng, tmp_path):
    """The first of two in the low half; scales are float16 of either sign. What is infinite or missing is named."""
    path = tmp_path / "x.safetensors"
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=33, value_dim=70, capacity=40, dtype="int4")
    k, v = (rng.standard_normal((1, 2, 37, n)).astype(np.float32) for n in (33, 70))
    k[0, 0, 5, 3] = np.nan
    cache.append(0, k, v)
    cache.save(path)
    stored, words = read_arrays([path]), read_metadata(path)
    for name, x in (("key", k), ("value", v)):
        codes, scales = quantise(x, "int4")
        bits = codes.astype(np.int8).view(np.uint8) & 15
        bits = np.pad(bits, [(0, 0)] * 3 + [(0, bits.shape[-1] % 2)])
        assert (stored[f"{name}_nibbles.0"] == (bits[..., ::2] | bits[..., 1::2] << 4)).all()
        assert stored[f"{name}_scales.0"].tobytes() == scales.tobytes() and (scales < 0).any() and (scales > 0).any()
    assert parts_of(sl.KVCache.load(path)) == parts_of(cache)
    infinite, signed = stored["key_scales.0"].copy(), stored["key_scales.0"].copy()
    infinite[0, 0, 0, 0], signed[np.isnan(signed)] = np.inf, -np.float16(np.nan)
    write_arrays(path, stored | {"key_scales.0": signed}, words)
    assert parts_of(sl.KVCache.load(path)) == parts_of(cache)
    for changed, message in (
        ({"key_scales.0": infinite}, "expected key_scales.0 of finite numbers"),
        (
            {"key_scales.0": stored["key_scales.0"].astype(np.float32)},
            "key_scales.0 of shape .* and dtype float16; got",
        ),
        ({"value_nibbles.0": stored["value_nibbles.0"][..., :34].copy()}, "value_nibbles.0 of shape .* 35.* got .* 34"),
    ):
        write_arrays(path, stored | changed, words)
        with pytest.raises(sl.FileError, match=message):
            sl.KVCache.load(path)


def test_four_bits_of_sequences_of_a_pool_are_saved(rng, tmp_path):
    sizes = {"layers": 1, "kv_heads": 2, "head_dim": 33, "value_dim": 70, "dtype": "int4"}
    pools = [sl.PagePool(**sizes, pages=20, page_size=16) for _ in range(2)]
    one = pools[0].sequence()
    pools[0].append(0, [one], *(rng.standard_normal((37, 2, n)).astype(np.float32) for n in (33, 70)))
    other = one.fork()
    pools[0].append(0, [other], *(rng.standard_normal((5, 2, n)).astype(np.float32) for n in (33, 70)))
    pools[0].save(tmp_path / "pages.safetensors", [one, other])
    loaded = pools[1].load(tmp_path / "pages.safetensors")
    one.save(tmp_path / "one.safetensors")
    alone = sl.KVCache.load(tmp_path / "one.safetensors")
    for mine, theirs in zip((one, other), loaded, strict=True):
        assert mine.keys(0).tobytes() == theirs.keys(0).tobytes()
        assert mine.values(0).tobytes() == theirs.values(0).tobytes()
    assert alone.keys(0)[0].tobytes() == one.keys(0).tobytes()


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
            stored[name] = np.where((x == 0) | np.isnan(x), np.copysign(x, x.dtype.type(-1)), x)
    write_arrays(path, stored, words)
    again = sl.KVCache.load(path)
    parts = [x._storage.parts(0, [20]) for x in (cache, again)]
    for mine, theirs in zip(*parts, strict=True):
        assert mine[1].tobytes() == theirs[1].tobytes()


def test_a_loaded_cache_may_have_more_room(tmp_path):
    path, x = tmp_path / "a.safetensors", np.ones((1, 2, 5, 8), np.float32)
    cache = sl.KVCache(layers=1, kv_heads=2, head_dim=8, capacity=5)
    cache.append(0, x, x)
    cache.save(path)
    larger = sl.KVCache.load(path, capacity=20)
    larger.append(0, x, x)
    assert larger.length(0) == 10 and larger.keys(0)[:, :, :5].tobytes() == cache.keys(0).tobytes()
    for capacity in (4, 0, -1):
        with pytest.raises(sl.ArgumentError, match=f"capacity: expected at least 5 tokens; got {capacity}"):
            sl.KVCache.load(path, capacity=capacity)
    with pytest.raises(sl.ArgumentTypeError, match="capacity"):
        sl.KVCache.load(path, capacity="9")
    sl.KVCache(layers=1, kv_heads=2, head_dim=8, window=8).save(path)
    with pytest.raises(sl.ArgumentError, match="capacity: expected None, as the cache has a window"):
        sl.KVCache.load(path, capacity=9)
